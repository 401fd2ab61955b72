// One rank's part of a program: its groups, its steps, what happens to it, and what it does when a call
// fails.
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <map>
#include <memory>
#include <thread>

#include "backends/test_hooks.hpp"
#include "faults/strike.hpp"
#include "runner.hpp"
#include "store/forwarding_store.hpp"
#include "trial.hpp"
#include "weft/base/view.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kHeldBack =
    milliseconds(30);                  // others come so much later, where a rank is to be found waiting
constexpr auto kQuiesce = seconds(3);  // for quiesce() to become true
constexpr auto kShrink = seconds(1);   // for ranks to come to shrink()
constexpr auto kPoll = std::chrono::microseconds(500);
constexpr auto kTry = milliseconds(50);        // for a quiesce() that another group may hold up
constexpr std::int64_t kPoolBytes = 16 << 20;  // for all buffers of a program whose groups share one block

// A thread of this rank that sends or receives small messages, until it is destroyed, the group fails or its
// time is over.
class Heartbeat {
 public:
  Heartbeat(const Program& p, int rank, ProcessGroup& group, Duration patience)
      : p_(p), group_(group), options_{.deadline = patience, .tag = kHeartbeatTag} {
    const std::vector<int> ranks = p.heartbeat_ranks();
    if (ranks.empty() || (rank != ranks[0] && rank != ranks[1])) return;
    thread_ = std::thread([this, ranks, sends = rank == ranks[0]] {
      try {
        sends ? send(ranks[1]) : receive(ranks[0]);
      } catch (const std::exception&) {}  // the group has failed: the rank's own calls tell
    });
  }
  ~Heartbeat() {
    ending_.store(true);
    if (thread_.joinable()) thread_.join();
  }
  Heartbeat(const Heartbeat&) = delete;
  Heartbeat& operator=(const Heartbeat&) = delete;

 private:
  void send(int to) {
    Dice pauses(mix(p_.seed, p_.index));
    const Deadline end = Deadline::after(kLongest);
    for (std::int32_t last = 0; last == 0;) {
      std::this_thread::sleep_for(milliseconds(pauses.between(1, 60)));
      last = ending_.load() || end.passed() ? 1 : 0;
      group_.send(view(&last, 1), to, options_).wait();
    }
  }
  void receive(int from) {
    for (std::int32_t last = 0; last == 0;) group_.recv(view(&last, 1), from, options_).wait();
  }

  static constexpr int kHeartbeatTag = 4242;
  static constexpr Duration kLongest = seconds(6);  // far beyond what a deadline and a second allow
  const Program& p_;
  ProcessGroup& group_;
  const CallOptions options_;
  std::atomic<bool> ending_{false};
  std::thread thread_;
};

class Runner {
 public:
  Runner(const Program& p, int rank, Context& context, const Membership& member, const Settings& settings,
         SharedReport& shared)
      : p_(p),
        rank_(rank),
        context_(context),
        member_(member),
        settings_(settings),
        shared_(shared),
        report_(shared.ranks[rank]),
        groups_(p.groups.size()),
        posted_(p.groups.size()),
        victim_(p.fault.kind != FaultKind::none && p.fault.rank == rank) {}

  void run() {
    report_.group = -1;
    report_.phase.store(Phase::running);
    prepare();
    try {
      work();
    } catch (const Error& e) {
      note(e);
    } catch (const std::exception& e) {
      const Unlimited room;
      report_.thrown_at = now_ns();
      report_.untyped.set(e.what());
    }
    lift_limits();
    recover();
    report_.made.store(static_cast<bool>(groups_[0]));
    report_.phase.store(Phase::settled);
    go_on();
    report_.phase.store(Phase::done);
  }

 private:
  // A call, or several that were submitted together, in flight.
  struct Open {
    Work work;
    int group = 0;
    std::vector<int> steps;
  };

  void complain(const std::string& what, bool perhaps_late = false) {
    if (!report_.complaint.empty()) return;
    report_.complaint.set(what);
    report_.perhaps_late = perhaps_late;
  }

  // Where a rank is when something goes wrong, for note().
  void at(int group, bool creation = false) {
    group_ = group;
    creation_ = creation;
    report_.waiting_since.store(now_ns());
  }

  // All buffers are there before the first call, so that nothing but weft needs memory later.
  void prepare() {
    order_ = order_of(p_, rank_);
    if (shares_block(p_)) pool_ = std::make_unique<Pool>(context_, kPoolBytes);
    trials_.resize(p_.steps.size());
    for (const int k : order_) {
      if (!p_.takes_part(k, rank_)) continue;
      const Step& s = p_.steps[static_cast<std::size_t>(k)];
      const int me = p_.rank_in(s.group, rank_), n = p_.group_size(s.group);
      const bool wrong = victim_ && k == p_.fault.step;
      trials_[static_cast<std::size_t>(k)] =
          std::make_unique<Trial>(context_, wrong ? distorted(s, p_.fault.kind, me, n) : s, me, n,
                                  settings_.call_deadline(p_), pool_.get());
    }
  }

  // Where a rank is stopped inside the others' memory, these have a group of their own, whose buffers lie in
  // one block with all others. A call of it is in flight while they give that memory other pages.
  void make_others() {
    if (!shares_block(p_) || victim_) return;
    Membership m = member_;
    m.name += "/others";
    m.deadline = settings_.patience;
    if (m.process_rank < 0) m.process_rank = m.rank;
    m.rank -= rank_ > p_.fault.rank ? 1 : 0;
    --m.size;
    at(0, true);
    others_ = ProcessGroup::create(context_, settings_.backend, m);
    Step s;
    s.op = Op::all_reduce;
    s.dtype = DType::i32;
    s.count = 20011;
    s.plain = s.shared = true;
    s.salt = mix(p_.seed, p_.index);
    beside_ = std::make_unique<Trial>(context_, s, m.rank, m.size, settings_.patience, pool_.get());
  }

  // The last of them comes to that call when all others have tried to quiesce.
  void call_beside() {
    if (!others_) return;
    const std::uint32_t mine = std::uint32_t{1} << rank_;
    const bool last = others_.rank() == others_.size() - 1;
    try {
      Work work;
      if (!last) work = others_.submit(beside_->calls()[0]);
      for (ProcessGroup& g : groups_)
        if (g) g.quiesce(kTry);
      shared_.tried.fetch_or(mine);
      const std::uint32_t all = (std::uint32_t{1} << p_.ranks()) - 1 - (std::uint32_t{1} << p_.fault.rank);
      if (last) {
        await([&] { return shared_.tried.load() == all; }, seconds(10));
        work = others_.submit(beside_->calls()[0]);
      }
      work.wait();
      if (const std::string wrong = beside_->complaint(true); !wrong.empty())
        complain(fmt::format("the group of the others, whose memory is in the same block: {}", wrong));
    } catch (const std::exception& e) {
      complain(fmt::format("the group of the others, whose memory is in the same block: {}", e.what()), true);
    }
  }

  // Before each request to the store: one of those that it makes for the group in question is its last.
  void on_request() {
    constexpr std::uint64_t kRequests = 6;
    if (creation_ && group_ == p_.struck_group() && requests_++ == mix(p_.seed, p_.index) / 7 % kRequests)
      strike(p_, report_, settings_.call_deadline(p_));
  }

  TestHooks hooks() {
    TestHooks hooks;
    hooks.path = p_.path;
    if (victim_ && p_.fault.point == FaultPoint::in_chunk)
      hooks.in_chunk = [this](std::uint64_t call) {
        if (armed_.load() == call + 1 && armed_.exchange(0) != 0)
          strike(p_, report_, settings_.call_deadline(p_));
      };
    return hooks;
  }
  int process_rank() const { return member_.process_rank < 0 ? member_.rank : member_.process_rank; }

  void make(std::size_t g) {
    const GroupPlan& plan = p_.groups[g];
    if (plan.joined) return;  // with the one before
    const ScopedTestHooks scope(context_, process_rank(), hooks());
    const std::string name = fmt::format("{}/g{}", member_.name, g);
    at(static_cast<int>(g), true);
    if (plan.how == GroupPlan::How::world) {
      Membership m = member_;
      m.deadline = settings_.group_deadline(p_);
      m.progress = p_.helper ? Progress::thread : Progress::caller;
      if (victim_ && p_.fault.point == FaultPoint::in_creation)
        m.store = std::make_shared<ObservedStore>(m.store,
                                                  [this](StoreRequest request, std::string_view, Deadline) {
                                                    if (request != StoreRequest::try_get)
                                                      on_request();  // who waits makes many of these
                                                  });
      groups_[g] = settings_.factory ? ProcessGroup::create(context_, settings_.factory(context_), m)
                                     : ProcessGroup::create(context_, settings_.backend, m);
      return;
    }
    const auto parent = static_cast<std::size_t>(plan.parent);
    if (p_.rank_in(plan.parent, rank_) < 0) return;
    std::vector<int> ranks;  // in the parent's numbering
    for (const int r : plan.ranks) ranks.push_back(p_.rank_in(plan.parent, r));
    switch (plan.how) {
      case GroupPlan::How::world: break;
      case GroupPlan::How::duplicate: groups_[g] = groups_[parent].duplicate(); break;
      case GroupPlan::How::subgroup:
        if (p_.rank_in(static_cast<int>(g), rank_) >= 0) groups_[g] = groups_[parent].subgroup(name, ranks);
        break;
      case GroupPlan::How::split: {
        std::size_t mine = g;
        int color = 0, key = 0;
        for (std::size_t other = g;; ++other) {
          if (other >= p_.groups.size() || (other > g && !p_.groups[other].joined)) {
            color = -1;
            break;
          }
          key = p_.rank_in(static_cast<int>(other), rank_);
          mine = other;
          if (key >= 0) break;
          ++color;
        }
        ++posted_[parent];                                 // its all-gather
        at(static_cast<int>(color < 0 ? g : mine), true);  // who stays out has a part in the exchange, too
        ProcessGroup made = groups_[parent].split(color, color < 0 ? 0 : key);
        if (color >= 0) groups_[mine] = std::move(made);
        break;
      }
    }
  }

  bool struck_at(int k, FaultPoint point) const {
    return victim_ && p_.fault.step == k && p_.fault.point == point;
  }

  void work() {
    make_others();
    Dice habits(mix(mix(p_.seed, p_.index), static_cast<std::uint64_t>(rank_) + 77));
    std::size_t made = 0;
    for (std::size_t i = 0; i < order_.size(); ++i) {
      const int k = order_[i];
      report_.step.store(k);
      if (struck_at(k, FaultPoint::before_post) && row(p_).limits)
        strike(p_, report_, settings_.call_deadline(p_));
      std::vector<bool> now(p_.groups.size());
      bool any = false;
      for (std::size_t g = 0; g < p_.groups.size(); ++g) {
        now[g] = made_.size() <= g || !made_[g] ? p_.groups[g].before <= k : false;
        any = any || now[g];
      }
      if (any) {
        made_.resize(p_.groups.size());
        drain();
        for (std::size_t g = 0; g < p_.groups.size(); ++g) {
          if (!now[g]) continue;
          made_[g] = true;
          make(g);
        }
        if (heartbeat_ == nullptr && groups_[0])
          heartbeat_ = std::make_unique<Heartbeat>(p_, rank_, groups_[0], settings_.patience);
        ++made;
      }
      if (!p_.takes_part(k, rank_)) continue;
      const Step& s = p_.steps[static_cast<std::size_t>(k)];
      if (habits.one_in(24)) std::this_thread::sleep_for(std::chrono::microseconds(habits.between(50, 3000)));
      if (!before(k, s)) return;
      // The steps that are coalesced with this one are posted with it.
      Open open{.work = {}, .group = s.group, .steps = {k}};
      while (p_.steps[static_cast<std::size_t>(order_[i])].coalesced && i + 1 < order_.size() &&
             p_.steps[static_cast<std::size_t>(order_[i + 1])].group == s.group &&
             p_.fault.step != order_[i + 1]) {
        ++i;
        if (p_.takes_part(order_[i], rank_)) open.steps.push_back(order_[i]);
      }
      post(open, k);
      if (!after(open, k)) continue;
      open_.push_back(std::move(open));
      while (static_cast<int>(open_.size()) >= p_.in_flight || (!open_.empty() && habits.one_in(4)))
        finish(static_cast<std::size_t>(habits.below(open_.size())), habits.below(4));
    }
    drain();
    heartbeat_.reset();  // the group lives
  }

  // What happens to the rank before it posts. False: it goes no further.
  bool before(int k, const Step& s) {
    const Duration deadline = settings_.call_deadline(p_);
    const bool found_waiting = p_.fault.point == FaultPoint::while_waiting || row(p_).act == Act::drop;
    if (!victim_ && p_.fault.kind != FaultKind::none && found_waiting && p_.fault.step == k)
      std::this_thread::sleep_for(kHeldBack);
    if (!victim_ || p_.fault.step != k) return true;
    ProcessGroup& group = groups_[static_cast<std::size_t>(s.group)];
    switch (row(p_).act) {
      case Act::abort:
        report_.struck.store(true);
        group.abort("the program says so");
        return true;
      case Act::leave:
        drain();
        report_.struck.store(true);
        report_.left = true;
        for (ProcessGroup& g : groups_) g = ProcessGroup();
        return false;
      case Act::fork:
        if (p_.fault.point == FaultPoint::before_post) fork_and_call(group, shared_, report_);
        return true;
      case Act::call_wrongly: report_.struck.store(true); return true;
      case Act::strike:
      case Act::drop: break;
    }
    if (p_.fault.point == FaultPoint::before_quiesce) group.abort("the program says so");
    if (p_.fault.point == FaultPoint::before_post && !row(p_).limits) strike(p_, report_, deadline);
    if (p_.fault.point == FaultPoint::in_chunk) drain();  // the hook knows calls by their number alone
    if (p_.fault.point == FaultPoint::in_chunk) armed_.store(posted_[static_cast<std::size_t>(s.group)] + 1);
    return true;
  }

  // Messages of different tags: no rank needs to submit them as the others do.
  bool any_order(const Open& open) const {
    std::vector<int> tags;
    for (const int k : open.steps) {
      const Step& s = p_.steps[static_cast<std::size_t>(k)];
      if (s.op != Op::send || std::find(tags.begin(), tags.end(), s.tag) != tags.end()) return false;
      tags.push_back(s.tag);
    }
    return true;
  }

  // A message whose tag no other of its group has can be received from any source: on half of the ranks it is.
  bool from_any(int k) const {
    const Step& s = p_.steps[static_cast<std::size_t>(k)];
    if (p_.fault.kind != FaultKind::none ||
        !groups_[static_cast<std::size_t>(s.group)].traits().has(Op::wait_message) ||
        mix(s.salt, static_cast<std::uint64_t>(rank_) + 2000) % 2 == 0)
      return false;
    return std::count_if(p_.steps.begin(), p_.steps.end(), [&](const Step& other) {
             return other.group == s.group && other.tag == s.tag &&
                    (other.op == Op::send || other.op == Op::recv);
           }) == 1;
  }

  void post(Open& open, int k) {
    std::vector<Call> calls;
    for (const int step : open.steps) {
      for (Call call : trials_[static_cast<std::size_t>(step)]->calls()) {
        if (call.op == Op::recv && from_any(step)) call.peer = any_source;
        calls.push_back(call);
      }
      const Op op = p_.steps[static_cast<std::size_t>(step)].op;
      if (op != Op::send && op != Op::recv) ++posted_[static_cast<std::size_t>(open.group)];
    }
    if (any_order(open) &&
        mix(p_.steps[static_cast<std::size_t>(k)].salt, static_cast<std::uint64_t>(rank_)) % 2 == 0)
      std::reverse(calls.begin(), calls.end());
    at(open.group);
    pending_ = open.steps;
    ProcessGroup& group = groups_[static_cast<std::size_t>(open.group)];
    open.work = calls.size() == 1 ? group.submit(calls[0]) : group.coalesced(calls);
    pending_.clear();
  }

  // What happens to the rank once it has posted. False: the Work is gone.
  bool after(Open& open, int k) {
    if (!victim_ || p_.fault.step != k) return true;
    const Duration deadline = settings_.call_deadline(p_);
    if (row(p_).act == Act::drop) {
      report_.struck.store(true);
      lost_ = open.steps;
      open.work = Work();
      return false;
    }
    if (p_.fault.point == FaultPoint::after_post) {
      if (row(p_).act == Act::fork) {
        fork_and_call(groups_[static_cast<std::size_t>(open.group)], shared_, report_);
      } else {
        strike(p_, report_, deadline);
      }
    }
    if (p_.fault.point == FaultPoint::while_waiting) strike_soon(p_, report_);
    if (p_.fault.point == FaultPoint::while_waiting || p_.fault.point == FaultPoint::in_chunk) {
      open_.push_back(std::move(open));
      finish(open_.size() - 1, 0);
      if (p_.fault.point == FaultPoint::while_waiting) await_strike();
      armed_.store(0);  // a call that reached into no memory is struck no more
      return false;
    }
    return true;
  }

  void finish(std::size_t which, int how) {
    Open open = std::move(open_[which]);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(which));
    at(open.group);
    pending_ = open.steps;
    try {
      switch (how) {
        case 1:
          while (open.work.valid() && !open.work.done()) sched_yield();
          break;
        case 2:
          while (open.work.valid() && !open.work.wait_for(milliseconds(2))) {}
          break;
        default:
          if (open.work.valid()) open.work.wait();
      }
    } catch (...) {
      failed_.push_back(open.steps);
      throw;
    }
    pending_.clear();
    const Unlimited room;
    for (const int k : open.steps)
      if (const std::string wrong = trials_[static_cast<std::size_t>(k)]->complaint(settings_.exact());
          !wrong.empty())
        complain(fmt::format("step {}: {}", k, wrong));
  }

  void drain() {
    while (!open_.empty()) finish(0, 0);
  }

  void note(const Error& e) {
    const Unlimited room;
    report_.thrown_at = now_ns();
    report_.code = e.code();
    report_.op = e.op();
    report_.call = e.call();
    report_.group = group_;
    report_.in_creation = creation_;
    // While a group is being made, errors number ranks as the group that it is made from does.
    const GroupPlan& plan = p_.groups[static_cast<std::size_t>(group_)];
    const bool from_parent = creation_ && plan.how != GroupPlan::How::world;
    const std::vector<int>& of =
        from_parent ? p_.groups[static_cast<std::size_t>(plan.parent)].ranks : plan.ranks;
    for (const int r : e.ranks())
      if (r >= 0 && r < static_cast<int>(of.size()) && report_.blamed_count < kMostRanks)
        report_.blamed[report_.blamed_count++] = of[static_cast<std::size_t>(r)];
    report_.said_quiesced = e.quiesced();
    report_.text.set(e.what());
    report_.has_error = true;
  }

  // Every other call of the rank ends too, with the first cause of its group; then its memory is its own.
  void recover() {
    if (!report_.has_error && report_.untyped.empty()) return call_beside();
    report_.phase.store(Phase::failed);
    if (victim_ && p_.fault.point == FaultPoint::before_quiesce && p_.fault.kind != FaultKind::none)
      strike(p_, report_, settings_.call_deadline(p_));
    if (!pending_.empty()) failed_.push_back(pending_);
    if (!lost_.empty()) failed_.push_back(lost_);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      if (groups_[g] && static_cast<int>(g) != report_.group)
        groups_[g].abort("another group of mine has failed");
    heartbeat_.reset();
    for (Open& open : open_) {
      try {
        at(open.group);
        if (open.work.valid()) open.work.wait();
        for (const int k : open.steps)  // it was done before
          if (const std::string wrong = trials_[static_cast<std::size_t>(k)]->complaint(settings_.exact());
              !wrong.empty())
            complain(fmt::format("step {}, after a failure: {}", k, wrong));
      } catch (const Error& e) {
        if (open.group == report_.group && e.code() != report_.code)
          complain(fmt::format("the first call failed with \"{}\", another of the same group with \"{}\"",
                               report_.text.view(), e.what()));
        failed_.push_back(open.steps);
      }
    }
    open_.clear();
    call_beside();
    const std::int64_t began = now_ns();
    report_.quiesced = true;
    for (ProcessGroup& g : groups_)
      if (g && !g.quiesce(kQuiesce)) report_.quiesced = false;
    report_.quiesce_ns = now_ns() - began;
    if (!report_.quiesced) return;
    for (const auto& steps : failed_)
      for (const int k : steps) trials_[static_cast<std::size_t>(k)]->overwrite();
  }

  template <class Ready>
  bool await(const Ready& ready, Duration limit) {
    for (const Deadline deadline = Deadline::after(limit); !ready();) {
      if (deadline.passed()) return false;
      std::this_thread::sleep_for(kPoll);
    }
    return true;
  }

  // Goes on with the survivors in a new group; then checks whether a rank that was stopped has written late.
  void go_on() {
    if (p_.fault.kind == FaultKind::none && !report_.has_error && report_.untyped.empty()) {
      groups_.clear();
      others_ = ProcessGroup();
      return;
    }
    if (!await([&] { return shared_.survivors.load() != 0; }, seconds(60)))
      return complain("nobody said who is left");
    const std::uint32_t left = shared_.survivors.load();
    if ((left >> rank_ & 1u) != 0) {
      report_.phase.store(Phase::after);
      if ((left & SharedReport::kPromised) != 0) again(left);
      report_.phase.store(Phase::reused);
      if (!await([&] { return shared_.late_over.load(); }, seconds(60)))
        complain("the stopped rank never went on");
      if (report_.quiesced)
        for (const auto& steps : failed_)
          for (const int k : steps)
            if (const std::string wrong = trials_[static_cast<std::size_t>(k)]->overwritten(); !wrong.empty())
              complain(fmt::format("step {}: {}", k, wrong));
    }
    groups_.clear();
    others_ = ProcessGroup();
  }

  // The survivors' group: by shrink(), or new from the store.
  ProcessGroup survivors(std::uint32_t left) {
    Membership m = member_;
    m.name += "/after";
    m.deadline = settings_.patience;
    if (m.process_rank < 0) m.process_rank = m.rank;
    m.size = 0;
    std::vector<int> ranks;
    for (int r = 0; r < p_.ranks(); ++r) {
      if ((left >> r & 1u) == 0) continue;
      if (r == rank_) m.rank = m.size;
      ++m.size;
      ranks.push_back(r);
    }
    // A rank that was still making the group when it failed has no group to shrink.
    const bool shrinks =
        mix(p_.seed, p_.index) % 2 == 0 &&
        std::all_of(ranks.begin(), ranks.end(), [&](int r) { return shared_.ranks[r].made.load(); });
    const ScopedTestHooks scope(context_, process_rank(), shrinks ? hooks() : TestHooks{});
    ProcessGroup group = shrinks             ? groups_[0].shrink(kShrink)
                         : settings_.factory ? ProcessGroup::create(context_, settings_.factory(context_), m)
                                             : ProcessGroup::create(context_, settings_.backend, m);
    if (shrinks &&
        !std::equal(ranks.begin(), ranks.end(), group.parent_ranks().begin(), group.parent_ranks().end()))
      complain(fmt::format("shrink() gave ranks {}; expected {}", fmt::join(group.parent_ranks(), ", "),
                           fmt::join(ranks, ", ")),
               true);
    return group;
  }

  void again(std::uint32_t left) {
    try {
      ProcessGroup group = survivors(left);
      Step s;
      s.op = Op::all_reduce;
      s.dtype = DType::i64;
      s.count = 1009;
      s.salt = mix(p_.seed, p_.index);
      for (const bool shared : {true, false}) {
        s.shared = shared;
        const Trial trial(context_, s, group.rank(), group.size(), {});
        group.submit(trial.calls()[0]).wait();
        if (const std::string wrong = trial.complaint(true); !wrong.empty())
          complain(fmt::format("the new group: {}", wrong));
      }
      group.barrier().wait();
      report_.after_made = true;
    } catch (const std::exception& e) {
      complain(fmt::format("the new group of those who are left: {}", e.what()), true);
    }
  }

  const Program& p_;
  const int rank_;
  Context& context_;
  const Membership& member_;
  const Settings& settings_;
  SharedReport& shared_;
  RankReport& report_;
  std::vector<int> order_;
  std::unique_ptr<Pool> pool_;
  std::vector<std::unique_ptr<Trial>> trials_;  // outlive the groups
  std::unique_ptr<Trial> beside_;
  std::vector<ProcessGroup> groups_;
  ProcessGroup others_;
  std::unique_ptr<Heartbeat> heartbeat_;
  std::vector<bool> made_;
  std::vector<std::uint64_t> posted_;  // collectives, by group
  std::vector<Open> open_;
  std::vector<int> pending_, lost_;
  std::vector<std::vector<int>> failed_;
  std::uint64_t requests_ = 0;           // made for the group in whose making the rank is struck
  std::atomic<std::uint64_t> armed_{0};  // in_chunk: call + 1
  int group_ = 0;
  bool creation_ = false;
  const bool victim_;
};

}  // namespace

Duration Settings::call_deadline(const Program& p) const {
  return runs_into_deadline(p, traits.guarantees) ? deadline : patience;
}

Duration Settings::group_deadline(const Program& p) const {
  const bool is_short =
      row(p).limits || p.fault.point == FaultPoint::in_creation || runs_into_deadline(p, traits.guarantees);
  return is_short ? deadline + seconds(2) : patience;
}

void run_rank(const Program& p, int rank, Context& context, const Membership& member,
              const Settings& settings, SharedReport& shared) {
  Runner(p, rank, context, member, settings, shared).run();
}

}  // namespace weft::check
