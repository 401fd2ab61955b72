#include "backends/shm/shm_backend.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <exception>

#include "backends/exchange/by_messages.hpp"
#include "backends/last_calls.hpp"
#include "backends/shm/collectives/collectives.hpp"
#include "backends/shm/exchange/exchanges.hpp"
#include "backends/shm/messages.hpp"
#include "backends/shm/pair_memory.hpp"
#include "backends/shm/roll_call.hpp"
#include "store/launcher_notice.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace shm {
namespace {

class ShmBackend final : public Backend {
 public:
  ShmBackend(Group group, UnexpectedLimits limits)
      : group_(std::move(group)),
        collectives_(group_),
        pairs_(group_),
        messages_(group_, pairs_, limits),
        exchanges_(group_, pairs_),
        by_messages_(group_.context, *this, group_.rank),
        roll_(group_) {
    traits_ = group_.single_copy == SingleCopy::push ? shm_single_copy_traits() : *known_traits("shm");
    traits_.spin = !group_.oversubscribed;
  }

  ~ShmBackend() override {
    if (group_.context.forked()) return;  // the region is not mapped in a child
    group_.mine().left.store(kLeaving, std::memory_order_seq_cst);
    compare_the_rest();
    group_.mine().left.store(kLeft, std::memory_order_seq_cst);
    group_.wake_all();
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    if (is_message(s.op)) {
      messages_.post(s);
    } else if (s.op == Op::exchange) {
      if (exchanges_.usable())
        exchanges_.post(s);
      else
        by_messages_.post(s);
    } else {
      collectives_.post(s);
    }
  }

  Step poll(OpState& s) noexcept override {
    if (is_message(s.op)) return note(s, messages_.poll(s));
    if (s.op == Op::exchange && !exchanges_.usable()) return by_messages_.poll(s);
    const Step step = s.op == Op::exchange ? exchanges_.poll(s) : collectives_.poll(s);
    // Peers may be waiting for room in a ring of envelopes, or for an answer, while this rank waits here.
    if (step != Step::pending || !messages_.news()) return step;
    const bool moved = messages_.advance();
    if (messages_.trouble() == nullptr) return moved ? Step::advanced : step;
    raise(group_, *messages_.trouble());
    return Step::failed;
  }

  bool healthy() noexcept override {
    if (group_.aborted()) return false;
    answer();
    exchanges_.find_rings();
    messages_.find_pairs();
    if (messages_.trouble() != nullptr) {
      raise(group_, *messages_.trouble());
      return false;
    }
    look_for_cores();
    const OpState* call = collectives_.current();
    if (const std::vector<int> dead = dead_ranks(group_); !dead.empty()) {
      Failure why{.code = ErrorCode::peer_lost,
                  .text = {},
                  .op = call ? call->op : Op::none,
                  .call = call ? call->call : kNoCall,
                  .ranks = dead};
      for (const int r : dead)
        why.text += fmt::format("{}rank {} (process {}) died", why.text.empty() ? "" : ", ", r,
                                group_.processes[static_cast<std::size_t>(r)]->address().pid);
      if (call) why.text = fmt::format("{}: {}", name(call->op), why.text);
      raise(group_, why);
      return false;
    }
    // A rank that has left will not arrive any more. If it arrived before it left, no rank waits for it; so
    // `left` is read before the arrivals.
    std::vector<int> left;
    for (int r = 0; r < group_.size; ++r)
      if (has_left(group_, r)) left.push_back(r);
    if (left.empty()) return true;
    const bool arrived = messages_.collect() || messages_.news();
    std::vector<int> awaited = messages_.awaited_by_name();
    if (messages_.awaits_any() && static_cast<int>(left.size()) == group_.size - 1) awaited = left;
    if (arrived) awaited.clear();  // it is handled first
    if (call) {
      const std::vector<int> late = collectives_.missing(*call);
      awaited.insert(awaited.end(), late.begin(), late.end());
    }
    const std::vector<int> late = exchanges_.awaited();
    awaited.insert(awaited.end(), late.begin(), late.end());
    std::vector<int> lost;
    for (const int r : left)
      if (std::find(awaited.begin(), awaited.end(), r) != awaited.end()) lost.push_back(r);
    if (lost.empty()) return true;
    raise(group_, {.code = ErrorCode::peer_lost,
                   .text = left_text(call ? call->op : Op::none, lost),
                   .op = call ? call->op : Op::none,
                   .call = call ? call->call : kNoCall,
                   .ranks = lost});
    return false;
  }

  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    if (is_by_messages(s)) return by_messages_.missing(s, story);
    std::vector<int> ranks = awaited_by(s);
    story = tell(ranks, roll_.found(ranks), [&](std::span<const int> late) {
      if (s.op == Op::exchange) return exchanges_.story(s, late);
      if (!is_message(s.op)) return collectives_.story(s, late);
      if (s.op != Op::send) return not_sent(s, late, group_.rank, group_.size);
      return not_received(s);
    });
    if (is_message(s.op) && s.op != Op::send) story += messages_.not_received(s);
    if (s.op == Op::recv && s.peer != any_source && messages_.cannot_reach(s.peer))
      story += fmt::format("; rank {} cannot map the memory of rank {} now", group_.rank, s.peer);
    if (s.op == Op::send) {
      if (messages_.held_by(s.peer))
        story +=
            fmt::format("; rank {} holds as many messages that it has not received as {}", s.peer, kLimits);
    } else if (const std::vector<int> held = messages_.held_back();
               (!is_message(s.op) || s.peer == any_source) && !held.empty()) {
      story += fmt::format(
          "; rank {} holds as many messages that it has not received as {}, so {} may wait to send more",
          group_.rank, kLimits, name_ranks(held));
    }
    return ranks;
  }

  bool ask(const OpState& s) noexcept override {
    return is_by_messages(s) ? by_messages_.ask(s) : roll_.ask(s, awaited_by(s));
  }
  void answer() noexcept override {
    roll_.answer([&] { return awaited(); }, [&] { return waits_in_; });
  }
  std::vector<LastCall> last_calls() noexcept override try {
    return roll_.last_calls();
  } catch (...) {  // out of memory: then without
    return {};
  }

  std::optional<MessageInfo> probe(int source, int tag) noexcept override {
    std::optional<MessageInfo> found = messages_.probe(source, tag);
    if (messages_.trouble() != nullptr) raise(group_, *messages_.trouble());
    return found;
  }

  std::unique_ptr<PlannedExchange> plan_exchange(const ExchangePlan& plan) override {
    return exchanges_.usable() ? exchanges_.plan(plan) : by_messages_.plan(plan);
  }

  void fail(const Failure& why) noexcept override { raise(group_, why); }
  Failure failure() const override {
    told_.store(true, std::memory_order_relaxed);
    return first_cause(group_);
  }
  bool quiet() const noexcept override { return shm::quiet(group_); }
  std::vector<int> gone() const noexcept override { return shm::gone_ranks(group_); }
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override {
    return shm::quiesce(group_, deadline, exposed);
  }
  void announce_sleep(bool asleep) noexcept override {
    group_.mine().sleeping.fetch_add(asleep ? 1u : ~0u, std::memory_order_seq_cst);
  }

 private:
  static constexpr const char* kLimits = "WEFT_UNEXPECTED_MESSAGES and WEFT_UNEXPECTED_BYTES allow";
  // Reports, as this rank leaves, that ranks have made different calls. No caller would catch an exception
  // here, so it logs a warning. If this rank leaves because of an exception, it has left out calls, and its
  // program knows that. Then there is no warning.
  void compare_the_rest() noexcept try {
    std::string found;
    if (!group_.aborted() && !WEFT_MUTANT("uncompared_rest")) {
      collectives_.compare_the_rest();
      if (!group_.aborted() && std::uncaught_exceptions() == 0) found = collectives_.left_out();
    }
    if (group_.aborted() && !told_.load(std::memory_order_relaxed))
      if (const Failure why = first_cause(group_); why.code == ErrorCode::mismatch) found = why.text;
    if (found.empty()) return;
    group_.context.log().write(
        LogLayer::backends, LogLevel::warning,
        fmt::format("mismatch, found when the group was left: {} [group \"{}\", rank {}]", found, group_.name,
                    group_.rank));
    tell_launcher_that_results_are_in_doubt();
  } catch (...) {  // out of memory
  }

  bool is_by_messages(const OpState& s) const noexcept {
    return s.op == Op::exchange && !exchanges_.usable();
  }
  std::vector<int> awaited_by(const OpState& s) const {
    if (s.op == Op::exchange) return exchanges_.awaited(s);
    if (s.op == Op::send) return {s.peer};
    if (is_message(s.op)) return awaited_sources(s, group_.rank, group_.size);
    return collectives_.missing(s);
  }
  // Remembers the message that was polled last and is not done.
  Step note(const OpState& s, Step step) noexcept {
    if (step != Step::done) {
      if (is_users_message(s)) waits_in_ = &s;
    } else if (waits_in_ == &s) {
      waits_in_ = nullptr;
    }
    return step;
  }
  // Returns the ranks for which any call in flight waits.
  std::vector<int> awaited() const {
    std::vector<int> ranks = messages_.awaited();
    const std::vector<int> neighbours =
        WEFT_MUTANT("exchanges_wait_unseen") ? std::vector<int>() : exchanges_.awaited();
    ranks.insert(ranks.end(), neighbours.begin(), neighbours.end());
    if (const OpState* const call = collectives_.current()) {
      const std::vector<int> late = collectives_.missing(*call);
      ranks.insert(ranks.end(), late.begin(), late.end());
    }
    return ranks;
  }

  // Checks from time to time whether processes for which this rank waits write a core file. These have ended.
  // It starts at the next rank, so that the ranks together check all processes.
  void look_for_cores() {
    constexpr auto kEvery = std::chrono::milliseconds(200);
    constexpr int kAtOnce = 64;
    const auto now = Clock::now();
    if (now < looks_for_cores_) return;
    looks_for_cores_ = now + kEvery;
    std::vector<int> ranks = awaited();
    std::sort(ranks.begin(), ranks.end());
    std::rotate(ranks.begin(),
                std::lower_bound(ranks.begin(), ranks.end(), (group_.rank + last_looked_) % group_.size),
                ranks.end());
    const PeerProcess* before = nullptr;
    int looks = 0;
    for (const int r : ranks) {
      PeerProcess& process = *group_.processes[static_cast<std::size_t>(r)];
      if (process.is_self() || &process == before) continue;
      if (looks++ == kAtOnce) break;
      process.look();
      before = &process;
    }
    last_looked_ = (last_looked_ + looks) % group_.size;
  }

  const Group group_;
  Traits traits_;
  Collectives collectives_;
  PairMemory pairs_;
  Messages messages_;
  Exchanges exchanges_;
  ExchangeByMessages by_messages_;  // used if exchanges_ is not usable
  RollCall roll_;
  const OpState* waits_in_ = nullptr;
  Clock::time_point looks_for_cores_{};
  int last_looked_ = 0;
  mutable std::atomic<bool> told_{false};  // the group has read the first cause
};

}  // namespace
}  // namespace shm

std::unique_ptr<Backend> make_shm_backend(const GroupInit& init) {
  // read before other ranks depend on this rank
  const UnexpectedLimits limits = UnexpectedLimits::from_env();
  return std::make_unique<shm::ShmBackend>(shm::init_group(init), limits);
}

}  // namespace weft
