#include "backends/shm/roll_call.hpp"

namespace weft::shm {
namespace {

constexpr auto kFirstLook = std::chrono::milliseconds(5);  // most have answered by then
constexpr auto kLookAgain = std::chrono::milliseconds(50);

}  // namespace

void RollCall::write(std::uint64_t asked, const std::vector<int>& awaited) noexcept {
  group_.control.awaited(group_.rank).store(awaited);
  group_.mine().answered.store(asked, std::memory_order_seq_cst);
  full_fence();
  for (int r = 0; r < group_.size; ++r)
    if (r != group_.rank && group_.of(r).asking.load(std::memory_order_seq_cst) != 0) group_.wake_fenced(r);
}

void RollCall::begin(const OpState& s, Clock::time_point now) noexcept {
  times_.begin(s.op, s.call, now);
  looks_ = now + kFirstLook;
  std::fill(stopped_.begin(), stopped_.end(), false);
  group_.mine().asking.store(1, std::memory_order_seq_cst);
  number_ = group_.control.abort().asked.fetch_add(1, std::memory_order_seq_cst) + 1;
  group_.wake_all();
}

// A process that is stopped does not answer, so nobody waits for its answer.
void RollCall::look(Clock::time_point now) noexcept {
  looks_ = now + kLookAgain;
  for (int r = 0; r < group_.size; ++r) {
    PeerProcess& process = *group_.processes[static_cast<std::size_t>(r)];
    if (r == group_.rank || group_.of(r).answered.load(std::memory_order_seq_cst) >= number_) continue;
    stopped_[static_cast<std::size_t>(r)] = process.look() != PeerProcess::State::running;
  }
}

bool RollCall::ask(const OpState& s, std::span<const int> awaited) noexcept try {
  if (awaited.empty()) return true;
  const auto now = Clock::now();
  if (times_.due(s.op, s.call, now)) begin(s, now);
  if (now >= looks_) look(now);
  if (times_.patient(now) && !found(awaited).settled) return false;
  times_.end(now);
  group_.mine().asking.store(0, std::memory_order_relaxed);
  return true;
} catch (...) {  // out of memory: then without
  return true;
}

HoldUp RollCall::found(std::span<const int> awaited) const {
  if (!times_.counts(Clock::now())) return {};
  return who_holds_up(
      group_.rank, group_.size, awaited,
      [&](int r) {
        if (group_.of(r).answered.load(std::memory_order_seq_cst) >= number_) return Answer::yes;
        return stopped_[static_cast<std::size_t>(r)] ? Answer::stopped : Answer::no;
      },
      [&](int r, int q) { return group_.control.awaited(r).has(q); });
}

}  // namespace weft::shm
