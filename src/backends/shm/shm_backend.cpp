#include "backends/shm/shm_backend.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>

#include "backends/shm/collectives.hpp"
#include "backends/shm/messages.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace shm {
namespace {

class ShmBackend final : public Backend {
 public:
  ShmBackend(Group group, UnexpectedLimits limits)
      : group_(std::move(group)), collectives_(group_), messages_(group_, limits) {
    traits_ = group_.single_copy == SingleCopy::push ? shm_single_copy_traits() : *known_traits("shm");
    traits_.spin = !group_.crowded;
  }

  ~ShmBackend() override {
    if (group_.context.forked()) return;  // the region is not mapped in a child
    group_.mine().left.store(1, std::memory_order_seq_cst);
    group_.wake_all();
  }

  const Traits& traits() const noexcept override { return traits_; }

  void post(OpState& s) noexcept override {
    if (s.op == Op::send || s.op == Op::recv) {
      messages_.post(s);
    } else {
      collectives_.post(s);
    }
  }

  Step poll(OpState& s) noexcept override {
    if (s.op == Op::send || s.op == Op::recv) return messages_.poll(s);
    const Step step = collectives_.poll(s);
    // Peers may be waiting for room in a ring of letters, or for an answer, while this rank waits here.
    if (step != Step::pending || !messages_.news()) return step;
    const bool moved = messages_.advance();
    if (messages_.trouble() == nullptr) return moved ? Step::advanced : step;
    raise(group_, *messages_.trouble());
    return Step::failed;
  }

  bool healthy() noexcept override {
    if (group_.aborted()) return false;
    const OpState* call = collectives_.current();
    if (const std::vector<int> dead = dead_ranks(group_); !dead.empty()) {
      Failure why{.code = ErrorCode::peer_lost,
                  .text = {},
                  .op = call ? call->op : Op::none,
                  .call = call ? call->call : kNoCall,
                  .ranks = dead};
      for (const int r : dead)
        why.text += fmt::format("{}rank {} (process {}) died", why.text.empty() ? "" : ", ", r,
                                group_.homes[static_cast<std::size_t>(r)]->address().pid);
      if (call) why.text = fmt::format("{}: {}", name(call->op), why.text);
      raise(group_, why);
      return false;
    }
    // Who left cannot come any more; who came before leaving is not waited for. `left` is read first.
    std::vector<int> left;
    for (int r = 0; r < group_.size; ++r)
      if (has_left(group_, r)) left.push_back(r);
    if (left.empty()) return true;
    std::string story;
    const bool arrived = messages_.collect() || messages_.news();
    std::vector<int> awaited = messages_.awaited();
    if (arrived) awaited.clear();  // it is seen to first
    if (call) {
      const std::vector<int> late = collectives_.missing(*call, story);
      awaited.insert(awaited.end(), late.begin(), late.end());
    }
    std::vector<int> lost;
    for (const int r : left)
      if (std::find(awaited.begin(), awaited.end(), r) != awaited.end()) lost.push_back(r);
    if (lost.empty()) return true;
    raise(group_,
          {.code = ErrorCode::peer_lost,
           .text = fmt::format("{}rank{} {} left the group", call ? fmt::format("{}: ", name(call->op)) : "",
                               lost.size() == 1 ? "" : "s", fmt::join(lost, ", ")),
           .op = call ? call->op : Op::none,
           .call = call ? call->call : kNoCall,
           .ranks = lost});
    return false;
  }

  std::vector<int> missing(const OpState& s, std::string& story) noexcept override {
    if (s.op == Op::send) {
      story = fmt::format("rank {} has not received it (tag {})", s.peer, s.tag);
      if (messages_.held_by(s.peer))
        story +=
            fmt::format("; rank {} holds as many messages that it has not received as {}", s.peer, kLimits);
      return {s.peer};
    }
    if (s.op == Op::recv) {
      story = fmt::format("rank {} has not sent it (tag {})", s.peer, s.tag);
      return {s.peer};
    }
    std::vector<int> ranks = collectives_.missing(s, story);
    if (const std::vector<int> held = messages_.held_back(); !held.empty())
      story += fmt::format(
          "; rank {} holds as many messages that it has not received as {}, so rank{} {} may wait "
          "to send more",
          group_.rank, kLimits, held.size() == 1 ? "" : "s", fmt::join(held, ", "));
    return ranks;
  }

  void fail(const Failure& why) noexcept override { raise(group_, why); }
  Failure failure() const override { return first_cause(group_); }
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

  const Group group_;
  Traits traits_;
  Collectives collectives_;
  Messages messages_;
};

}  // namespace
}  // namespace shm

std::unique_ptr<Backend> make_shm_backend(const Bringup& bringup) {
  const UnexpectedLimits limits = UnexpectedLimits::from_env();  // before others count on this rank
  return std::make_unique<shm::ShmBackend>(shm::bring_up(bringup), limits);
}

}  // namespace weft
