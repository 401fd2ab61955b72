#include "backends/shm/roll_call.hpp"

namespace weft::shm {
namespace {

constexpr auto kFirstLook = std::chrono::milliseconds(5);  // most have answered by then
constexpr auto kLookAgain = std::chrono::milliseconds(50);
constexpr auto kFresh = std::chrono::milliseconds(20);  // one roll-call serves all calls due at a time

}  // namespace

void RollCall::write(std::uint64_t asked, const std::vector<int>& awaited) noexcept {
  group_.control.awaited(group_.rank).store(awaited);
  group_.mine().answered.store(asked, std::memory_order_seq_cst);
  full_fence();
  for (int r = 0; r < group_.size; ++r)
    if (r != group_.rank && group_.of(r).asking.load(std::memory_order_seq_cst) != 0) group_.wake_fenced(r);
}

void RollCall::begin() noexcept {
  began_ = Clock::now();
  settled_ = Clock::time_point::max();
  looks_ = began_ + kFirstLook;
  std::fill(stopped_.begin(), stopped_.end(), false);
  group_.mine().asking.store(1, std::memory_order_seq_cst);
  number_ = group_.control.abort().asked.fetch_add(1, std::memory_order_seq_cst) + 1;
  group_.wake_all();
}

// Who is stopped does not answer: there is no need to wait for it.
void RollCall::look() noexcept {
  looks_ = Clock::now() + kLookAgain;
  for (int r = 0; r < group_.size; ++r) {
    Neighbour& home = *group_.homes[static_cast<std::size_t>(r)];
    if (r == group_.rank || group_.of(r).answered.load(std::memory_order_seq_cst) >= number_) continue;
    stopped_[static_cast<std::size_t>(r)] = home.look() != Neighbour::State::running;
  }
}

bool RollCall::ask(std::span<const int> awaited) noexcept try {
  if (awaited.empty()) return true;
  const auto now = Clock::now();
  // A rank that answered a warning may have been stopped since: the deadline asks anew.
  if (number_ == 0 || now - began_ >= kRollCallStale || (now > settled_ && now - settled_ >= kFresh)) begin();
  if (now >= looks_) look();
  if (now - began_ < kRollCallPatience && !found(awaited).settled) return false;
  settled_ = std::min(settled_, now);
  group_.mine().asking.store(0, std::memory_order_relaxed);
  return true;
} catch (...) {  // out of memory: then without
  return true;
}

HoldUp RollCall::found(std::span<const int> awaited) const {
  if (number_ == 0 || Clock::now() - began_ >= kRollCallStale) return {};
  return who_holds_up(
      group_.rank, group_.size, awaited,
      [&](int r) {
        if (group_.of(r).answered.load(std::memory_order_seq_cst) >= number_) return Heard::yes;
        return stopped_[static_cast<std::size_t>(r)] ? Heard::stopped : Heard::no;
      },
      [&](int r, int q) { return group_.control.awaited(r).has(q); });
}

}  // namespace weft::shm
