#include "rank/others.hpp"

#include <thread>

#include "rank/await.hpp"

namespace weft::check {
namespace {

constexpr auto kPatience = std::chrono::seconds(10);  // for the others to have given their memory back

}  // namespace

Others::Others(const Program& p, int rank, Context& context, const Membership& member,
               const Settings& settings, SharedReport& shared, Pool& pool)
    : p_(p), rank_(rank), shared_(shared) {
  Membership m = member;
  m.name += "/others";
  m.deadline = settings.patience;
  m.progress = p.helper ? Progress::thread : Progress::caller;
  if (m.process_rank < 0) m.process_rank = m.rank;
  m.rank -= rank > p.fault.rank ? 1 : 0;
  --m.size;
  group_ = ProcessGroup::create(context, settings.backend, m);
  Dice d(mix(p.seed, p.index));
  step_.salt = d.next();
  step_.shared = true;
  if (!p.window_beside) {
    step_.op = Op::all_reduce;
    step_.dtype = DType::i32;
    step_.count = 20011;
    step_.plain = true;
    call_ = std::make_unique<Trial>(context, step_, m.rank, m.size, settings.patience, &pool);
    return;
  }
  constexpr std::int64_t kColumns[] = {7, 500, 8191, 65521};  // packed, or named to the receiver
  step_.does = Does::window;
  step_.op = Op::none;
  step_.dtype = DType::f32;
  step_.count = d.any(kColumns);
  step_.counts.assign(static_cast<std::size_t>(m.size), 1);
  step_.window = {
      .before = 1, .after = 1, .edge = static_cast<int>(Edge::Kind::periodic), .exchanges = d.between(1, 3)};
  window_ = std::make_unique<WindowTrial>(context, step_, m.rank, m.size, &pool);
  for (int warm = 0; warm < 3; ++warm) {  // from now on nobody waits in a start, and memory is mapped
    start();
    finish();
    group_.barrier().wait();
  }
}

Others::~Others() { windows_.end(); }

void Others::start() {
  if (call_ != nullptr)
    work_ = group_.submit(call_->calls()[0]);
  else
    transfers_ = window_->start(windows_, group_);
}

void Others::finish() {
  if (call_ != nullptr) return work_.wait();
  for (WindowTransfer& t : transfers_) t.finish();
}

std::pair<std::string, bool> Others::go_on_while(const std::function<void()>& give_back) {
  const std::uint32_t mine = std::uint32_t{1} << rank_;
  const std::uint32_t all = (std::uint32_t{1} << p_.ranks()) - 1 - (std::uint32_t{1} << p_.fault.rank);
  const bool last = group_.rank() == group_.size() - 1;
  Dice d(mix(mix(p_.seed, p_.index), 99));
  const bool early = p_.window_beside && d.one_in(2);
  try {
    if (!last) start();
    shared_.trying.fetch_or(mine);
    if (last && early) {
      await([&] { return shared_.trying.load() == all; }, kPatience);
      std::this_thread::sleep_for(std::chrono::microseconds(d.below(3000)));
      start();
    }
    give_back();
    shared_.tried.fetch_or(mine);
    if (last && !early) {
      await([&] { return shared_.tried.load() == all; }, kPatience);
      start();
    }
    finish();
    return {call_ != nullptr ? call_->complaint(true) : window_->complaint(), false};
  } catch (const std::exception& e) {
    return {e.what(), true};
  }
}

}  // namespace weft::check
