// One rank's part of a program: its groups, its steps, its fault, and what it does when a call fails.
#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <atomic>
#include <cstdio>
#include <memory>
#include <thread>

#include "backends/test_hooks.hpp"
#include "faults/strike.hpp"
#include "rank/agreement.hpp"
#include "rank/await.hpp"
#include "rank/heartbeat.hpp"
#include "rank/open.hpp"
#include "rank/others.hpp"
#include "rank/parts.hpp"
#include "rank/survivors.hpp"
#include "runner.hpp"
#include "store/forwarding_store.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/base/view.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

// How much later the other ranks arrive, if a rank must be found waiting.
constexpr auto kHeldBack = milliseconds(30);
constexpr auto kQuiesce = seconds(3);       // for quiesce() to become true
constexpr auto kReach = milliseconds(200);  // for a rank to be stopped inside the others' memory
constexpr auto kAsk = seconds(1);           // for a rank to ask for its call before the others come to it
constexpr auto kHold = seconds(5);          // for the others to give theirs back
constexpr auto kTry = milliseconds(50);     // for a quiesce() that another group may hold up

// How long this thread could run and had no processor. 0 if the kernel does not report it.
std::int64_t starved_ns() {
  std::FILE* const f = std::fopen("/proc/thread-self/schedstat", "r");
  long long ran = 0, waited = 0;
  if (f == nullptr || std::fscanf(f, "%lld %lld", &ran, &waited) != 2) waited = 0;
  if (f != nullptr) std::fclose(f);
  return waited;
}

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
        order_(order_of(p, rank)),
        parts_(p, rank, context, settings),
        groups_(p.groups.size()),
        victim_(p.fault.kind != FaultKind::none && p.fault.rank == rank) {}

  void run() {
    report_.group = -1;
    starved_before_ = starved_ns();
    report_.phase.store(Phase::running);
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
    if (!report_.has_error) report_.starved_ns = std::max<std::int64_t>(starved_ns() - starved_before_, 0);
    recover();
    report_.made.store(static_cast<bool>(groups_[0]));
    report_.phase.store(Phase::settled);
    go_on();
    report_.phase.store(Phase::done);
  }

 private:
  void complain(const std::string& what, bool perhaps_late = false) {
    if (!report_.complaint.empty()) return;
    report_.complaint.set(what);
    report_.perhaps_late = perhaps_late;
  }

  // Records the rank's present place for note(), in case something goes wrong.
  void at(int group, bool creation = false, bool own_deadline = false) {
    group_ = group;
    creation_ = creation;
    own_deadline_ = own_deadline;
    report_.waiting_since.store(now_ns());
  }

  // Gives the memory of failed groups back as far as possible.
  void give_back() {
    if (p_.ends && report_.has_error) return end_groups();
    for (ProcessGroup& g : groups_)
      if (g) g.quiesce(kTry);
  }
  void end_groups() {
    windows_.end();
    for (ProcessGroup& g : groups_) g = ProcessGroup();
  }
  void go_on_beside() {
    if (!others_) return;
    const auto [wrong, perhaps_late] = others_->go_on_while([&] { give_back(); });
    if (!wrong.empty())
      complain(fmt::format("the group of the others, whose memory is in the same block: {}", wrong),
               perhaps_late);
  }

  // Called before each request to the store: one of the requests for the group in question is the rank's
  // last.
  void on_request() {
    constexpr std::uint64_t kRequests = 6;
    if (creation_ && group_ == p_.struck_group() && requests_++ == mix(p_.seed, p_.index) / 7 % kRequests)
      strike(p_, report_, settings_.call_deadline(p_));
  }

  TestHooks hooks() {
    TestHooks hooks;
    hooks.path = p_.path;
    if (victim_ && p_.fault.point == FaultPoint::in_chunk)
      hooks.in_chunk = [this](std::uint64_t) {
        if (armed_.load() && armed_.exchange(false)) strike(p_, report_, settings_.call_deadline(p_));
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
                                                      on_request();  // a waiting rank makes many of these
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
        // a rank that stays out has a part in the exchange, too
        at(static_cast<int>(color < 0 ? g : mine), true);
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
    if (shares_block(p_) && !victim_) {
      at(0, true);
      others_ = std::make_unique<Others>(p_, rank_, context_, member_, settings_, shared_, parts_.pool());
    }
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
      if (do_at_once(k, s)) continue;
      // The steps that are coalesced with this step are posted with it.
      Open open{.work = {}, .transfers = {}, .group = s.group, .steps = {k}};
      while (p_.steps[static_cast<std::size_t>(order_[i])].coalesced && i + 1 < order_.size() &&
             p_.steps[static_cast<std::size_t>(order_[i + 1])].group == s.group &&
             p_.fault.step != order_[i + 1]) {
        ++i;
        if (p_.takes_part(order_[i], rank_)) open.steps.push_back(order_[i]);
      }
      const bool held = holds_window(p_) && k == p_.fault.step - 1;
      // The rank that holds the window back has started it, and posted the call, before; so this rank finds
      // nothing to copy yet.
      if (held && rank_ != holding_rank(p_)) await([&] { return shared_.holding.load(); }, kReach);
      post(open, k);
      if (!after(open, k)) continue;
      open_.push_back(std::move(open));
      if (held) continue;
      while (static_cast<int>(open_.size()) >= p_.in_flight || (!open_.empty() && habits.one_in(4)))
        finish(static_cast<std::size_t>(habits.below(open_.size())), habits.below(4));
    }
    drain();
    heartbeat_.reset();  // the group lives
    if (p_.ending != Ending::leave) return;
    windows_.end();
    // Leaves the group of the struck call first: the root of a large broadcast waits for its readers, and
    // comes to no other group. Leaves the group of all ranks last.
    const auto leave_one = [&](int g) {
      ProcessGroup& group = groups_[static_cast<std::size_t>(g)];
      if (!group) return;
      at(g);
      group.leave(settings_.call_deadline(p_));
    };
    const int struck = p_.steps[static_cast<std::size_t>(p_.fault.step)].group;
    leave_one(struck);
    for (int g = static_cast<int>(groups_.size()); g-- > 0;)
      if (g != struck) leave_one(g);
  }

  // Steps of a training, in the middle of which the rank may be struck.
  void reduce_gradients(int k, const Step& s) {
    const bool waits = struck_at(k, FaultPoint::while_waiting);
    pending_ = {k};
    const std::string wrong =
        parts_.gradients(k).run(groups_[static_cast<std::size_t>(s.group)], settings_.exact(),
                                {.before_waiting = [&] { at(s.group, false, true); },
                                 .in_flight =
                                     [&] {
                                       if (struck_at(k, FaultPoint::after_post)) strike_in_flight(s.group);
                                       if (waits) strike_soon(p_, report_);
                                     }});
    if (waits) await_strike();
    pending_.clear();
    if (!wrong.empty()) complain(fmt::format("step {}: {}", k, wrong));
  }

  // At after_post.
  void strike_in_flight(int group) {
    if (row(p_).act == Act::fork)
      fork_and_call(groups_[static_cast<std::size_t>(group)], shared_, report_);
    else
      strike(p_, report_, settings_.call_deadline(p_));
  }

  // Performs a step that is over before the next one begins. Returns false if it is another kind of step.
  bool do_at_once(int k, const Step& s) {
    if (s.does == Does::gradients) {
      reduce_gradients(k, s);
      return true;
    }
    if (s.does != Does::agreement && s.does != Does::overlap) return false;
    ProcessGroup& group = groups_[static_cast<std::size_t>(s.group)];
    at(s.group, false, true);
    const Step called = as_called(p_, k, rank_);
    const std::string wrong =
        s.does == Does::overlap ? overlap(s, group, settings_.call_deadline(p_)) : agree(called, group);
    if (!wrong.empty()) complain(fmt::format("step {}: {}", k, wrong));
    return true;
  }

  // The fault that strikes the rank before it posts. Returns false if the rank goes no further.
  bool before(int k, const Step& s) {
    const Duration deadline = settings_.call_deadline(p_);
    const bool found_waiting = p_.fault.point == FaultPoint::while_waiting || row(p_).act == Act::drop;
    if (!victim_ && row(p_).act == Act::interrupt && p_.fault.step == k) await_asked();
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
        end_groups();
        return false;
      case Act::fork:
        if (p_.fault.point == FaultPoint::before_post) fork_and_call(group, shared_, report_);
        return true;
      case Act::call_wrongly: report_.struck.store(true); return true;
      case Act::strike:
      case Act::interrupt:
      case Act::drop: break;
    }
    if (p_.fault.point == FaultPoint::before_quiesce) group.abort("the program says so");
    if (p_.fault.point == FaultPoint::before_post && !row(p_).limits) strike(p_, report_, deadline);
    if (p_.fault.point == FaultPoint::in_chunk) {
      drain(holds_window(p_));  // the hook does not know which call it is in
      armed_.store(true);
    }
    return true;
  }

  // Messages have different tags, so no rank needs to submit them in the others' order.
  bool any_order(const Open& open) const {
    std::vector<int> tags;
    for (const int k : open.steps) {
      const Step& s = p_.steps[static_cast<std::size_t>(k)];
      if (s.op != Op::send || std::find(tags.begin(), tags.end(), s.tag) != tags.end()) return false;
      tags.push_back(s.tag);
    }
    return true;
  }

  // A message whose tag no other message of its group has can be received from any source: half of the ranks
  // do so.
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
    ProcessGroup& group = groups_[static_cast<std::size_t>(open.group)];
    if (WindowTrial* const window = parts_.window(k)) {
      at(open.group, false, true);
      pending_ = open.steps;
      open.transfers = window->start(windows_, group);
      pending_.clear();
      return;
    }
    std::vector<Call> calls;
    for (const int step : open.steps) {
      for (Call call : parts_.calls(step).calls()) {
        if (call.op == Op::recv && from_any(step)) call.peer = any_source;
        calls.push_back(call);
      }
    }
    if (any_order(open) &&
        mix(p_.steps[static_cast<std::size_t>(k)].salt, static_cast<std::uint64_t>(rank_)) % 2 == 0)
      std::reverse(calls.begin(), calls.end());
    at(open.group);
    pending_ = open.steps;
    open.work = calls.size() == 1 ? begin(k, calls[0], group) : group.coalesced(calls);
    pending_.clear();
  }

  // Begins one call. On about half of the ranks it is a persistent call. The last start is left in flight.
  Work begin(int k, const Call& call, ProcessGroup& group) {
    const Step& s = p_.steps[static_cast<std::size_t>(k)];
    const std::uint64_t habits = mix(s.salt, static_cast<std::uint64_t>(rank_) + 5000);
    // It does not do so if memory may be short, since a plain call needs none.
    const bool persistent = habits % 2 == 0 && !row(p_).limits;
    PersistentCall made;
    if (persistent) made = group.make(call);
    const auto begin_once = [&] { return persistent ? made.start() : group.submit(call); };
    for (int left = s.starts; left > 1; --left) {
      begin_once().wait();
      if (const std::string wrong = parts_.complaint(k); !wrong.empty())
        complain(fmt::format("step {}, {} starts before its last: {}", k, left - 1, wrong));
      parts_.calls(k).renew();
    }
    Work last = begin_once();
    if (habits / 2 % 2 == 0)
      persistent_.push_back(std::move(made));  // or it goes while its call is in flight
    return last;
  }

  // The fault that strikes the rank once it has posted. Returns false if the Work is gone.
  bool after(Open& open, int k) {
    if (p_.fault.step == k && holds_window(p_) && !victim_) return hold(open);
    if (!victim_ || p_.fault.step != k) return true;
    if (row(p_).act == Act::drop) {
      report_.struck.store(true);
      lost_ = open.steps;
      open = Open();
      return false;
    }
    if (row(p_).act == Act::interrupt) {
      shared_.holding.store(true);
      const Holding until(shared_);
      report_.struck.store(true);
      ask_interrupted(open);
      return true;
    }
    if (p_.fault.point == FaultPoint::after_post) strike_in_flight(open.group);
    if (p_.fault.point == FaultPoint::while_waiting) strike_soon(p_, report_);
    if (p_.fault.point == FaultPoint::while_waiting || p_.fault.point == FaultPoint::in_chunk) {
      open_.push_back(std::move(open));
      finish(open_.size() - 1, 0);
      if (p_.fault.point == FaultPoint::while_waiting) await_strike();
      armed_.store(false);  // a call that reached into no memory is struck no more
      return false;
    }
    return true;
  }

  // The struck rank must ask while its call cannot be done, so the others come to the call later. They take
  // the steps of calls that they have begun before, for which that rank may wait.
  void await_asked() {
    const RankReport& struck = shared_.ranks[p_.fault.rank];
    await(
        [&] {
          for (Open& other : open_) (void)other.done();
          return struck.struck.load() && !shared_.holding.load();
        },
        kAsk);
  }

  // An Interrupt ends waits, but not polls.
  void ask_interrupted(Open& open) {
    Interrupt interrupt;
    const Interruptible here(interrupt);
    (void)open.done();
    for (Open& other : open_) (void)other.done();
    interrupt.raise();
    for (int k = 0; k < 20; ++k) {
      (void)open.done();
      for (Open& other : open_) (void)other.done();
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    }
  }

  // While this object exists, the other ranks do not touch their part of the window.
  class Holding {
   public:
    explicit Holding(SharedReport& shared) : shared_(shared) {}
    ~Holding() { shared_.holding.store(false); }
    Holding(const Holding&) = delete;
    Holding& operator=(const Holding&) = delete;

   private:
    SharedReport& shared_;
  };

  // holds_window(): a rank that is not struck has posted the call that will fail. One rank takes no step
  // until the others have tried to give their memory other pages. Then it finishes the window that was begun
  // before, in the same group. The others take the possible steps of that window, and wait for the call.
  bool hold(Open& open) {
    open_.push_back(std::move(open));
    const std::vector<int>& ranks = p_.groups[static_cast<std::size_t>(group_)].ranks;
    std::uint32_t others = 0;
    for (const int r : ranks)
      if (r != p_.fault.rank && r != rank_) others |= std::uint32_t{1} << r;
    if (rank_ == holding_rank(p_)) {
      shared_.holding.store(true);
      const Holding until(shared_);
      const RankReport& struck = shared_.ranks[p_.fault.rank];
      const auto over = [&] { return (shared_.tried_holding.load() & others) == others; };
      if (await([&] { return over() || struck.struck.load(); }, kReach)) await(over, kHold);
      finish(open_.size() - 2, 0);
      return false;
    }
    Open& window = open_[open_.size() - 2];
    for (int k = 0; k < 50; ++k) {
      (void)window.done();
      std::this_thread::sleep_for(std::chrono::microseconds(100));
    }
    finish(open_.size() - 1, 0);
    shared_.tried_holding.fetch_or(std::uint32_t{1} << rank_);
    return false;
  }

  // Exchanges of one group are finished in the order in which all ranks have started them.
  std::size_t in_turn(std::size_t which) const {
    if (!open_[which].is_window()) return which;
    const auto first = std::find_if(open_.begin(), open_.end(), [&](const Open& o) {
      return o.is_window() && o.group == open_[which].group;
    });
    return static_cast<std::size_t>(first - open_.begin());
  }

  // In some programs a rank begins late, so that others wait longer than it does.
  void compute(const Open& open) const {
    const Step& s = p_.steps[static_cast<std::size_t>(open.steps[0])];
    const bool struck_there = p_.steps[static_cast<std::size_t>(p_.fault.step)].does == Does::window;
    Dice d(mix(s.salt, static_cast<std::uint64_t>(rank_) + 3000));
    if (row(p_).is_absent && struck_there && d.one_in(2))
      std::this_thread::sleep_for(milliseconds(d.below(120)));
  }

  void finish_window(Open& open, int how) {
    compute(open);
    const bool newest_first = p_.steps[static_cast<std::size_t>(open.steps[0])].window.newest_first;
    if (newest_first) std::reverse(open.transfers.begin(), open.transfers.end());
    for (WindowTransfer& t : open.transfers) {
      for (int k = 0; how == 1 ? !t.done() : how == 2 && k < 20; ++k) {
        if (how == 2) (void)t.done();
        sched_yield();
      }
      t.finish();
    }
  }

  void finish(std::size_t which, int how) {
    which = in_turn(which);
    Open open = std::move(open_[which]);
    open_.erase(open_.begin() + static_cast<std::ptrdiff_t>(which));
    at(open.group, false, open.is_window());
    pending_ = open.steps;
    try {
      if (open.is_window()) {
        finish_window(open, how);
      } else {
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
      }
    } catch (...) {
      failed_.push_back(open.steps);
      throw;
    }
    pending_.clear();
    const Unlimited room;
    for (const int k : open.steps)
      if (const std::string wrong = parts_.complaint(k); !wrong.empty())
        complain(fmt::format("step {}: {}", k, wrong));
  }

  void drain(bool but_windows = false) {
    for (std::size_t k = 0; k < open_.size();) {
      if (but_windows && open_[k].is_window())
        ++k;
      else
        finish(k, 0);
    }
  }

  void note(const Error& e) {
    const Unlimited room;
    report_.thrown_at = now_ns();
    report_.starved_ns = std::max<std::int64_t>(starved_ns() - starved_before_, 0);
    report_.code = e.code();
    report_.op = e.op();
    report_.call = e.call();
    report_.group = group_;
    report_.in_creation = creation_;
    report_.own_deadline = own_deadline_;
    // While a group is being made, errors number ranks like the group from which it is made.
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

  // Every other call of the rank ends, too, with the first cause of its group. Then the rank may use its
  // memory again.
  void recover() {
    if (!report_.has_error && report_.untyped.empty()) return go_on_beside();
    report_.phase.store(Phase::failed);
    if (victim_ && p_.fault.point == FaultPoint::before_quiesce && p_.fault.kind != FaultKind::none)
      strike(p_, report_, settings_.call_deadline(p_));
    if (holds_window(p_) && !victim_ &&
        report_.group == p_.steps[static_cast<std::size_t>(p_.fault.step)].group) {
      groups_[static_cast<std::size_t>(report_.group)].quiesce(kTry);
      shared_.tried_holding.fetch_or(std::uint32_t{1} << rank_);
      await([&] { return !shared_.holding.load(); }, kHold);
    }
    if (!pending_.empty()) failed_.push_back(pending_);
    if (!lost_.empty()) failed_.push_back(lost_);
    for (std::size_t g = 0; g < groups_.size(); ++g)
      if (groups_[g] && static_cast<int>(g) != report_.group)
        groups_[g].abort("another group of mine has failed");
    heartbeat_.reset();
    for (Open& open : open_) {
      try {
        at(open.group, false, open.is_window());
        if (open.work.valid()) open.work.wait();
        if (open.is_window()) finish_window(open, 0);
        for (const int k : open.steps)  // it was done before
          if (const std::string wrong = parts_.complaint(k); !wrong.empty())
            complain(fmt::format("step {}, after a failure: {}", k, wrong));
      } catch (const Error& e) {
        if (open.group == report_.group && e.code() != report_.code)
          complain(fmt::format("the first call failed with \"{}\", another of the same group with \"{}\"",
                               report_.text.view(), e.what()));
        failed_.push_back(open.steps);
      }
    }
    open_.clear();
    go_on_beside();
    if (!groups_[0] && p_.ends) return;  // ended: nobody reports whether its memory is free
    const std::int64_t began = now_ns();
    report_.quiesced = true;
    for (ProcessGroup& g : groups_)
      if (g && !g.quiesce(kQuiesce)) report_.quiesced = false;
    report_.quiesce_ns = now_ns() - began;
    if (!report_.quiesced) return;
    for (const auto& steps : failed_)
      for (const int k : steps) parts_.overwrite(k);
  }

  // Goes on with the survivors in a new group; then checks whether a rank that was stopped has written late.
  void go_on() {
    if (p_.fault.kind == FaultKind::none && !report_.has_error && report_.untyped.empty()) {
      leave();
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
            if (const std::string wrong = parts_.overwritten(k); !wrong.empty())
              complain(fmt::format("step {}: {}", k, wrong));
    }
    leave();
  }
  void leave() {
    windows_.end();
    groups_.clear();
    others_.reset();
  }

  void again(std::uint32_t left) {
    const SurvivorsComplaint wrong =
        use_group_of_survivors(p_, rank_, context_, member_, settings_, shared_, groups_[0], hooks(), left);
    if (wrong.text.empty())
      report_.after_made = true;
    else
      complain(wrong.text, wrong.perhaps_late);
  }

  const Program& p_;
  const int rank_;
  Context& context_;
  const Membership& member_;
  const Settings& settings_;
  SharedReport& shared_;
  RankReport& report_;
  const std::vector<int> order_;
  const Parts parts_;  // outlive the groups
  std::vector<ProcessGroup> groups_;
  std::unique_ptr<Others> others_;
  Windows windows_;
  std::unique_ptr<Heartbeat> heartbeat_;
  std::vector<bool> made_;
  std::vector<PersistentCall> persistent_;  // whose calls may be in flight, or over
  std::vector<Open> open_;
  std::vector<int> pending_, lost_;
  std::vector<std::vector<int>> failed_;
  std::uint64_t requests_ = 0;      // made for the group in whose making the rank is struck
  std::atomic<bool> armed_{false};  // in_chunk
  std::int64_t starved_before_ = 0;
  int group_ = 0;
  bool creation_ = false, own_deadline_ = false;
  const bool victim_;
};

}  // namespace

Duration Settings::call_deadline(const Program& p) const {
  return runs_into_deadline(p, traits.guarantees) ? deadline : patience;
}

Duration Settings::group_deadline(const Program& p) const {
  const bool is_short =
      row(p).limits || p.fault.point == FaultPoint::in_creation || runs_into_deadline(p, traits.guarantees);
  return is_short ? deadline + kGroupsWaitLonger : patience;
}

void run_rank(const Program& p, int rank, Context& context, const Membership& member,
              const Settings& settings, SharedReport& shared) {
  Runner(p, rank, context, member, settings, shared).run();
}

}  // namespace weft::check
