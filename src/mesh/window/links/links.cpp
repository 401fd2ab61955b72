#include "mesh/window/links/links.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "base/mutant.hpp"
#include "base/shared_words.hpp"
#include "group/user_numbers.hpp"
#include "host/arena.hpp"
#include "host/threads/idling.hpp"
#include "store/duration_text.hpp"
#include "weft/base/error.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/base/view.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

// Makes this rank's earlier stores visible to others before its later loads.
void full_fence() noexcept {
#if defined(__x86_64__)
  asm volatile("lock; orl $0, (%%rsp)" : : : "memory", "cc");  // faster than mfence
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// What a rank tells the others about itself.
struct Introduction {
  std::uint64_t usable;
  std::uint64_t word;  // its own address
  char address[448];
  char region[56];  // rank 0: the name under which it offers the links
};

bool put(char* to, std::size_t room, const std::string& text) {
  if (text.size() >= room) return false;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return true;
}

constexpr int kEagerLooks = 32;  // without a pause between them: most exchanges end here
constexpr auto kPatience = std::chrono::seconds(10);

constexpr auto kLook = std::chrono::milliseconds(20);
// Where other programs have the processors, a yield lasts for milliseconds, and the group may fail meanwhile.
constexpr int kYieldsPerLook = 8;

// The memory that rank 0 offers. It has offered it before it introduced itself, so that it is there: unless rank 0 was interrupted since then, which the
// group tells.
RegionRef open_links(ProcessGroup& group, HostPeers& host, PeerProcess& owner, const std::string& name,
                     Deadline deadline) {
  while (true) {
    try {
      return host.open(owner, name, Deadline::after(std::min<Duration>(deadline.left(), kLook)));
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout || deadline.passed()) throw;
    }
    group.probe(0);  // throws the group's failure
  }
}

std::size_t bytes_of_links(int n) {
  return static_cast<std::size_t>(n) * static_cast<std::size_t>(n) * sizeof(Link);
}

// Whether all ranks are threads of this process.
bool is_one_process(const std::vector<PeerProcessRef>& processes) {
  return std::ranges::all_of(processes, [](const PeerProcessRef& p) { return p->is_self(); });
}

// The processes of all ranks and the memory of the links; throws where they cannot be had.
RegionRef meet(ProcessGroup& group, HostPeers& host, const std::vector<Introduction>& all,
               const RegionRef& offered, std::vector<PeerProcessRef>& processes,
               std::vector<bool>& readable) {
  const Deadline deadline = Deadline::after(kPatience);
  const bool allowed = single_copy_setting() != SingleCopySetting::off;
  for (const Introduction& i : all) {
    if (i.usable == 0) throw Error(ErrorCode::unsupported, "window: a rank cannot share memory");
    processes.push_back(host.meet(ProcessAddress::decode(text_in(i.address)), deadline));
  }
  for (std::size_t r = 0; r < all.size(); ++r)
    readable.push_back(allowed && !is_one_process(processes) &&
                       KernelReads::finds(*processes[r], all[r].word, all[r].word));
  RegionRef region =
      group.rank() == 0 ? offered : open_links(group, host, *processes[0], text_in(all[0].region), deadline);
  if (region->bytes < bytes_of_links(group.size()))
    throw Error(ErrorCode::corrupt, fmt::format("window: the memory of the links has {} bytes; expected {}",
                                                region->bytes, bytes_of_links(group.size())));
  return region;
}

std::shared_ptr<Links> make(ProcessGroup& group) {
  if (group.backend() != "shm") return nullptr;
  const int n = group.size();
  Context& context = group.context();
  HostPeers& host = context.host_peers();
  Introduction mine{};
  mine.usable = 1;
  mine.word = reinterpret_cast<std::uint64_t>(&mine.word);
  RegionRef region;
  try {
    const std::string name = "weft-windows-" + random_socket_name();
    mine.usable &= put(mine.region, sizeof(mine.region), name) ? 1U : 0U;
    mine.usable &= put(mine.address, sizeof(mine.address), host.self().encode()) ? 1U : 0U;
    if (group.rank() == 0) region = host.offer(mine.region, bytes_of_links(n));
    context.arena().ensure_segment();
    host.show_segments();
  } catch (const Error&) {
    mine.usable = 0;
  }
  std::vector<Introduction> all(static_cast<std::size_t>(n));
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Introduction));
  group
      .all_gather(view(reinterpret_cast<const std::uint8_t*>(&mine), kBytes),
                  view(reinterpret_cast<std::uint8_t*>(all.data()), kBytes * n))
      .wait();
  std::vector<PeerProcessRef> processes;
  std::vector<bool> readable;
  std::uint8_t met = 1;
  try {
    region = meet(group, host, all, region, processes, readable);
  } catch (const Error& e) {
    met = 0;
    context.log().write(LogLayer::group, LogLevel::info,
                        std::string("windows are exchanged by messages: ") + e.what());
  }
  std::vector<std::uint8_t> have(static_cast<std::size_t>(n));
  group.all_gather(view(&met, 1), view(have)).wait();
  for (const std::uint8_t h : have)
    if (h == 0) return nullptr;
  auto links = std::make_shared<Links>(group.state(), std::move(region), std::move(processes), readable);
  links->open();
  return links;
}

// What the group keeps: transfers and plans may outlive it.
struct Kept {
  explicit Kept(std::shared_ptr<Links> l) : links(std::move(l)) {}
  Kept(const Kept&) = delete;
  Kept& operator=(const Kept&) = delete;
  ~Kept() {
    if (links) links->close();
  }
  const std::shared_ptr<Links> links;
};

}  // namespace

std::shared_ptr<Links> Links::of(ProcessGroup& group) {
  return group.users()->kept<Kept>([&] { return std::make_shared<Kept>(make(group)); })->links;
}

// What drive() leaves to its thread, once that holds no lock: to send what is due, and copies by the kernel.
class Links::Answer final : public ProgressEngine::Later {
 public:
  explicit Answer(std::weak_ptr<Links> links) : links_(std::move(links)) {}
  void run() noexcept override {
    const std::shared_ptr<Links> links = links_.lock();
    if (!links) return;
    links->answers_later_.store(false);
    links->read_due();
    links->send_due();
  }

 private:
  const std::weak_ptr<Links> links_;
};

Links::Links(GroupState& group, RegionRef region, std::vector<PeerProcessRef> processes,
             const std::vector<bool>& readable)
    : group_(&group),
      engine_(group.progress()),
      arena_(group.context.arena()),
      deadline_(group.member.deadline),
      region_(std::move(region)),
      processes_(std::move(processes)),
      spins_(group.traits().spin),
      helped_(group.helped()),
      one_process_(is_one_process(processes_)),
      rank_(group.member.rank) {
  const auto n = static_cast<std::size_t>(group.member.size), me = static_cast<std::size_t>(rank_);
  auto* const links = reinterpret_cast<Link*>(region_->data);
  for (auto& ends : ends_) ends.resize(n);
  for (std::size_t r = 0; r < n; ++r) {
    ends_[0][r].link = links + me * n + r;
    ends_[1][r].link = links + r * n + me;
    if (readable[r]) ends_[1][r].link->kernel.store(1, std::memory_order_release);
    for (std::size_t side = 0; side < 2; ++side) {
      ends_[side][r].rank = static_cast<int>(r);
      ends_[side][r].sends = side == 0;
    }
  }
  touched_.reserve(2 * n);
  due_.reserve(2 * n);
}

void Links::open() {
  answer_ = std::make_shared<Answer>(weak_from_this());
  arena_.add_holder(this);
  engine_.add(this);
  if (!WEFT_MUTANT("windows_wait_unseen"))
    group().also_awaits([this](std::vector<int>& ranks) { return append_awaited(ranks); });
}

void Links::close() noexcept {
  GroupState* const group = group_.exchange(nullptr, std::memory_order_acq_rel);
  if (group == nullptr || !answer_) return;
  group->also_awaits(nullptr);
  engine_.remove(this);
  const Owning owning(*this);
  if (!owning) {  // the thread may come back: for it they stay, and hold what it writes to
    stuck_ = weak_from_this().lock();
    return;
  }
  while (!active_.empty()) remove(*active_.back());
  arena_.remove_holder(this);
}

// ---- blocks of shared memory that are given other pages ----

bool Links::touches(const void* block, std::size_t bytes) const noexcept {
  const auto* const begin = static_cast<const std::byte*>(block);
  return std::ranges::any_of(active_, [&](const LinkedSteps* x) { return x->touches(begin, begin + bytes); });
}

// A thread in the middle of a step may be the one that frees.
bool Links::holds(const void* block, std::size_t bytes) const noexcept {
  if (flying_.load(std::memory_order_relaxed) == 0) return false;
  if (!owned_.try_own()) return true;
  const bool held = touches(block, bytes);
  owned_.disown();
  return held;
}

bool Links::stand_still() noexcept { return WEFT_MUTANT("windows_go_on") || owned_.try_own(); }

void Links::go_on() noexcept {
  if (!WEFT_MUTANT("windows_go_on")) owned_.disown();
}

// Where the group has failed the block may move: what neighbours know of it is revoked first. So a neighbour that reads the old pages afterwards
// sees that before it reports success, as in a call that has failed.
bool Links::uses(const void* block, std::size_t bytes) const noexcept {
  if (WEFT_MUTANT("windows_hold_nothing") || WEFT_MUTANT("windows_go_on") || !touches(block, bytes))
    return false;
  const GroupState* const group = group_.load(std::memory_order_acquire);
  if (group != nullptr && !group->failed()) return true;
  if (!WEFT_MUTANT("moved_unrevoked")) revoke();
  return false;
}

bool Links::has_room(End& to) noexcept {
  if (to.next < to.room_to) return true;
  to.room_to = sound_taken(to, to.link->taken.load(std::memory_order_acquire)) + kSlots;
  return to.next < to.room_to;
}

void Links::raise_taken(const End& to, std::uint64_t taken) {
  throw Error(damaged(to.rank, "its count of slots emptied", taken,
                      fmt::format("up to {}, as many as were filled", to.next)));
}

void Links::publish(End& to) {
  Slot& slot = to.link->slots[to.next % kSlots];
  slot.sequence.store(++to.next, std::memory_order_release);
  touch(to);
}

void Links::take(End& from) {
  from.link->taken.store(++from.next, std::memory_order_release);
  touch(from);
}

void Links::touch(End& end) {
  if (!end.touched) touched_.push_back(&end);
  end.touched = true;
}

// ---- exchanges in flight ----

void Links::add(LinkedSteps& x) {
  active_.push_back(&x);
  flying_.fetch_add(1, std::memory_order_relaxed);
  if (helped_) engine_.in_flight(1);
}

void Links::remove(LinkedSteps& x) noexcept {
  if (std::erase(active_, &x) == 0) return;
  came_back(x);
  flying_.fetch_sub(1, std::memory_order_relaxed);
  if (helped_) engine_.in_flight(-1);
}

// Once, where it was abandoned.
void Links::came_back(LinkedSteps& x) noexcept {
  if (!x.abandoned.load(std::memory_order_acquire) || x.counted_back.exchange(true)) return;
  if (GroupState* const group = group_.load(std::memory_order_acquire)) group->stuck_elsewhere(-1);
}

bool Links::in_flight(const LinkedSteps& x) const noexcept {
  return std::find(active_.begin(), active_.end(), &x) != active_.end();
}

Links::State Links::state_owned(const LinkedSteps& x) const noexcept {
  return in_flight(x) ? State::in_flight : x.complete() ? State::complete : State::over;
}

// The next steps of all exchanges in flight, the oldest first. True: something moved.
bool Links::progress(bool patient, bool may_read) noexcept {
  bool moved = false;
  patient_ = patient;
  may_read_ = may_read;
  reads_due_ = false;
  for (std::size_t i = 0; i < active_.size();) {
    LinkedSteps& x = *active_[i];
    try {
      if (!x.abandoned.load(std::memory_order_acquire)) moved |= x.step();
    } catch (...) {
      remove(x);
      x.broke(std::current_exception());  // fails the group, and so what it names is read no more
      revoke();
      moved = true;
      continue;
    }
    if (x.complete() || x.abandoned.load(std::memory_order_acquire))
      remove(x);
    else
      ++i;
  }
  if (moved) tell();
  return moved;
}

void Links::read_due() noexcept {
  const Owning owning(*this, Duration::zero());
  if (owning && reads_due_) progress(false, true);
}

bool Links::has_failed() noexcept {
  GroupState* const group = group_.load(std::memory_order_acquire);
  return group == nullptr || group->look_after();
}

// For peers that ask whom this rank waits for.
bool Links::append_awaited(std::vector<int>& ranks) noexcept {
  if (flying_.load(std::memory_order_relaxed) == 0) return true;
  if (!owned_.try_own()) return false;
  for (const LinkedSteps* x : active_) x->append_awaited(ranks);
  owned_.disown();
  return true;
}

bool Links::drive() noexcept {
  if (flying_.load(std::memory_order_relaxed) == 0 || !owned_.try_own()) return false;
  const bool moved = progress(false, false), reads = reads_due_;
  owned_.disown();
  if ((reads || has_due_.load(std::memory_order_relaxed)) && !answers_later_.exchange(true))
    engine_.run_later(answer_);
  return moved || reads;
}

bool Links::settled() noexcept {
  if (flying_.load(std::memory_order_relaxed) == 0) return true;
  if (!owned_.try_own()) return false;
  owned_.disown();
  return !drive();
}

void Links::check_group() {
  if (group().failed()) look();
}

GroupState& Links::group() const {
  GroupState* const group = group_.load(std::memory_order_acquire);
  if (group == nullptr) throw Error(ErrorCode::aborted, "its group has ended");
  return *group;
}

// Notices ranks that die, now and then; throws the group's first failure. A thread that owns the group looks itself, and is not
// waited for: it may be stuck.
void Links::look() {
  GroupState& group = this->group();
  const std::int64_t now = Clock::now().time_since_epoch() / std::chrono::milliseconds(4);
  const bool due = looked_.exchange(now, std::memory_order_relaxed) != now;
  if (due ? group.look_after() : group.failed()) static_cast<void>(group.probe(rank_, {.tag = kTokenTag}));
}

Links::State Links::ask(LinkedSteps& x) {
  bool moved = false;
  State now = State::in_flight;
  if (const Owning owning(*this, Duration::zero()); owning) {
    moved = progress(true, true);
    now = state_owned(x);
  }
  send_due();
  if (now != State::in_flight) return now;
  check_group();
  if (moved) return now;
  // A peer may need this rank's part in a call of some group before it comes to this; and ranks that die are noticed here.
  look();
  engine_.drive_all();
  return state(x);
}

Links::State Links::state(const LinkedSteps& x) noexcept {
  const Owning owning(*this, Duration::zero());
  return owning ? state_owned(x) : State::in_flight;
}

bool Links::finish(LinkedSteps& x, bool expired) {
  bool flies = true;
  if (const Owning owning(*this, Duration::zero()); owning)
    for (int looks = 0; looks < kEagerLooks && (flies = in_flight(x));)
      looks = progress(true, true) && !pace_.slow() ? 0 : looks + 1;
  send_due();
  if (!flies) return x.complete();
  const Deadline limit = Deadline::after(deadline_);
  const auto begin = Clock::now();
  Idling idling(engine_.spin_limit(), spins_);
  std::optional<ProgressEngine::Waiter> waiter;
  int yields = 0;
  for (bool late = expired;;) {
    bool moved = false;
    if (const Owning owning(*this, Duration::zero()); owning) {
      if (!in_flight(x)) break;
      moved = progress(true, true) &&
              !pace_.slow();  // where pages are slow it looks at all else after each of them
      if (!in_flight(x)) break;
    }
    if (!waiter) waiter.emplace(engine_);
    send_due();
    if (moved) {
      idling.moved();
      continue;
    }
    check_group();
    if ((!idling.spins() || idling.polls() % 16 == 15) && engine_.drive_all(this)) {
      idling.moved();
      late |= limit.passed();  // they may move all the time
      if (!late) continue;
    }
    if (!late && idling.spin()) continue;
    if (!late && !limit.passed() && idling.yield()) {
      if (++yields % kYieldsPerLook == 0) look();
      continue;
    }
    const Duration left = late ? Duration::zero() : limit.left();
    if (!expired && left == Duration::zero() && interrupted()) {
      fail_interrupted(x);
      continue;  // check_group() throws
    }
    if (left > Duration::zero() && behind(x)) {
      nap(x, left, Clock::now() - begin);
      continue;
    }
    await(x, left, expired);
    idling.restart();
  }
  idling.moved();
  send_due();
  return x.complete();
}

void Links::fail_interrupted(const LinkedSteps& x) noexcept {
  fail({.code = ErrorCode::aborted,
        .text = fmt::format("{}: rank {} was interrupted while it waited", x.name(), rank_),
        .ranks = {rank_}});
}

// Whether older exchanges are in flight, or another thread owns the links.
bool Links::behind(const LinkedSteps& x) noexcept {
  const Owning owning(*this, Duration::zero());
  return !owning || (!active_.empty() && active_.front() != &x);
}

bool Links::is_fulfilled(const LinkedSteps::Wish& w) noexcept {
  return w.receives
             ? from(w.rank).link->slots[(w.value - 1) % kSlots].sequence.load(std::memory_order_seq_cst) >=
                   w.value
             : to(w.rank).link->taken.load(std::memory_order_seq_cst) >= w.value;
}

// What it waits for; where that is there, what one before it waits for, which holds it up.
LinkedSteps::Wish Links::what_holds_up(const LinkedSteps& x) noexcept {
  LinkedSteps::Wish wish = x.wish();
  for (auto i = std::find(active_.begin(), active_.end(), &x); is_fulfilled(wish) && i != active_.begin();)
    if (!(*--i)->complete()) wish = (*i)->wish();
  return wish;
}

// For an exchange that others are before: any of them may hold it up, and it may complete before any of them. So no message says when; the engine drives all,
// and naps.
void Links::nap(const LinkedSteps& x, Duration left, Duration waited) {
  look();
  engine_.sleep(left, waited, [&] { return state(x) != State::in_flight; });
}

// Waits for a message that says that what it waits for is there. Meanwhile the engine drives all, as it does for each call that waits. At the
// deadline (nothing is `left`) the message is what is late: so the ranks are asked whom they wait for before one is named. `asks`: for done(), which
// no Interrupt ends.
void Links::await(const LinkedSteps& x, Duration left, bool asks) {
  const bool late = left == Duration::zero();
  LinkedSteps::Wish wish{};
  bool first = false, fulfilled = false;
  {
    const Owning owning(*this, late ? kStuckInFailure : Duration::zero());
    if (!owning && late) raise_stuck(x);
    if (!owning || !in_flight(x) || x.complete()) return;
    first = !awaiting_.exchange(true);
    wish = what_holds_up(x);
    if (first) {
      End& end = wish.receives ? from(wish.rank) : to(wish.rank);
      std::atomic<std::uint64_t>& waits = wish.receives ? end.link->receiver_waits : end.link->sender_waits;
      waits.store(wish.value, std::memory_order_seq_cst);
      full_fence();
      std::uint64_t mine = wish.value;
      fulfilled =
          is_fulfilled(wish) && !late && waits.compare_exchange_strong(mine, 0, std::memory_order_seq_cst);
      if (fulfilled) awaiting_.store(false);
    }
  }
  if (fulfilled) {  // and yet stays so where it is for an exchange that has failed: the group knows
    look();
    return;
  }
  if (!first && !late) {  // that thread gets the message, or sees the group fail
    std::this_thread::sleep_for(std::chrono::microseconds(100));
    return;
  }
  std::uint8_t token = 0;
  try {
    GroupState& group = this->group();
    const bool anew = WEFT_MUTANT("windows_wait_anew");
    const Duration limit = anew ? std::max<Duration>(left, std::chrono::milliseconds(1)) : deadline_;
    Work message =
        group.submit(call::recv(view(&token, 1), wish.rank, {.deadline = limit, .tag = kTokenTag}));
    if (!anew) group.has_waited(message, deadline_ - left);
    while (asks && !message.done()) std::this_thread::sleep_for(std::chrono::microseconds(200));
    // An Interrupt ends the exchange, not the message: all ranks read the exchange's name.
    while (!message.wait_for(deadline_))
      if (interrupted()) {
        fail_interrupted(x);
        break;
      }
    message.wait();
  } catch (...) {
    if (first) awaiting_.store(false);
    throw;
  }
  if (first) awaiting_.store(false);
}

// ---- messages to those who wait ----

void Links::tell() {
  if (touched_.empty()) return;
  full_fence();
  while (!touched_.empty()) {
    End& e = *touched_.back();
    touched_.pop_back();
    e.touched = false;
    std::atomic<std::uint64_t>& waits = e.sends ? e.link->receiver_waits : e.link->sender_waits;
    std::uint64_t wish = waits.load(std::memory_order_seq_cst);
    if (wish == 0 || wish > e.next || !waits.compare_exchange_strong(wish, 0, std::memory_order_seq_cst))
      continue;
    due_.push_back(e.rank);
    has_due_.store(true, std::memory_order_release);
  }
}

// One thread sends at a time. Who finds another one sending waits for it, so that the group lives meanwhile. A thread that comes here from within its
// sending, which makes progress, may be in that of any group: it leaves these messages to the loop that sends them, below it or in another thread, and
// waits for none: that thread might wait for it.
void Links::send_due() noexcept {
  thread_local std::vector<const Links*> senders;  // this thread's, the innermost last
  while (has_due_.load(std::memory_order_acquire) || sending_.load(std::memory_order_acquire)) {
    if (std::find(senders.begin(), senders.end(), this) != senders.end()) return;
    if (sending_.exchange(true, std::memory_order_acq_rel)) {
      if (!senders.empty()) return;
      sched_yield();
      continue;
    }
    senders.push_back(this);
    for (;;) {
      int rank = -1;
      {
        const Owning owning(*this, kStuckInFailure);
        if (!owning) {  // the thread that owns them sends, when it comes back
          senders.pop_back();
          sending_.store(false, std::memory_order_release);
          return;
        }
        if (due_.empty()) {
          has_due_.store(false, std::memory_order_relaxed);
          break;
        }
        rank = due_.back();
        due_.pop_back();
      }
      static constexpr std::uint8_t kToken = 1;
      try {
        if (GroupState* const group = group_.load(std::memory_order_acquire))
          group->submit(call::send(view(&kToken, 1), rank, {.tag = kTokenTag})).wait();
      } catch (...) {  // the group has failed: who waits sees that, too
      }
    }
    senders.pop_back();
    sending_.store(false, std::memory_order_release);
  }
}

// ---- exchanges that fail ----

void Links::fail(const Failure& why) noexcept {
  if (GroupState* const group = group_.load(std::memory_order_acquire)) group->fail(why);
}

void Links::fail_dropped(const Failure& why) noexcept {
  if (GroupState* const group = group_.load(std::memory_order_acquire)) group->fail_dropped(why);
}

void Links::give_up(LinkedSteps& x) noexcept {
  if (const Owning owning(*this, kStuckInFailure); owning) {
    remove(x);
  } else if (!x.abandoned.exchange(true, std::memory_order_acq_rel)) {
    if (GroupState* const group = group_.load(std::memory_order_acquire)) group->stuck_elsewhere(1);
  }
  revoke();
  await_readers();
  send_due();
}

bool Links::take_back(LinkedSteps& x) noexcept {
  const Owning owning(*this);
  if (owning) remove(x);
  if (owning) came_back(x);  // it may have been removed just before it was abandoned
  return static_cast<bool>(owning);
}

void Links::raise_stuck(const LinkedSteps& x) {
  const int rank = reads_from_.load(std::memory_order_relaxed);
  fail({.code = ErrorCode::timeout,
        .text = fmt::format(
            "{}: not finished within {}: {}", x.name(), shown_seconds(deadline_),
            rank < 0 ? "another thread of this rank is in the middle of a step"
                     : fmt::format("the kernel waits for memory of rank {}, which a thread of rank {} "
                                   "copies; WEFT_SINGLE_COPY=off does without",
                                   rank, rank_)),
        .ranks = {rank < 0 ? rank_ : rank}});
  check_group();
  throw Error(ErrorCode::aborted, "its group has ended");
}

void Links::revoke() const noexcept {
  for (const End& e : ends_[0]) e.link->revoked.store(1, std::memory_order_seq_cst);
}

// A copy is finite. A process that is stopped in one keeps its mapping of that memory, and sees `revoked` after it. A thread of this process would not:
// for it this rank waits longer, and not for ever, since a rank with a fault may have written that word. This rank reads nothing from itself.
void Links::await_readers() noexcept {
  constexpr auto kPatienceWithReaders = std::chrono::seconds(1);
  constexpr auto kPatienceWithThreads = std::chrono::seconds(10);
  const Deadline limit = Deadline::after(kPatienceWithReaders), last = Deadline::after(kPatienceWithThreads);
  for (End& e : ends_[0])
    while (e.link->reading.load(std::memory_order_seq_cst) != 0) {
      PeerProcess& peer = process(e.rank);
      if (e.rank == rank_ || last.passed() || (!peer.is_self() && (limit.passed() || !peer.alive()))) break;
      sched_yield();
    }
}

void Links::raise_revoked(int rank, const char* name) {
  check_group();
  const Failure why{.code = ErrorCode::aborted,
                    .text = fmt::format("{}: rank {} gave up an exchange", name, rank),
                    .op = Op::recv,
                    .ranks = {rank}};
  fail(why);
  check_group();
  throw Error(why);
}

Links::Reading::Reading(const End& from) : link_(*from.link), rank_(from.rank) {
  link_.reading.store(1, std::memory_order_seq_cst);
  if (link_.revoked.load(std::memory_order_seq_cst) == 0) return;
  link_.reading.store(0, std::memory_order_release);
  throw Revoked{rank_};
}

void Links::Reading::check() const {
  // An exchange of nothing, not a load: it stays behind the reads of that memory. (A fence would, too, but the thread sanitizer knows none.)
  if (link_.revoked.fetch_add(0, std::memory_order_acq_rel) != 0) throw Revoked{rank_};
}

void Links::map(End& from, std::uint32_t segments) noexcept {
  if (!patient_ || segments <= from.asked || segments > Arena::kMaxSegments) return;
  from.asked = segments;
  PeerProcess& peer = process(from.rank);
  peer.map_segments(segments, Deadline::after(std::chrono::milliseconds(100)));
  while (from.mapped < segments && peer.segment(from.mapped) != nullptr) ++from.mapped;
  from.link->mapped.store(from.mapped, std::memory_order_release);
}

}  // namespace weft::windows
