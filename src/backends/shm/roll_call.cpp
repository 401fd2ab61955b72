#include "backends/shm/roll_call.hpp"

#include "backends/call_word.hpp"
#include "backends/last_calls.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::shm {
namespace {

constexpr auto kFirstLook = std::chrono::milliseconds(5);  // most ranks have answered by then
constexpr auto kLookAgain = std::chrono::milliseconds(50);

}  // namespace

void RollCall::write(std::uint64_t asked, const std::vector<int>& awaited, const OpState* message) noexcept {
  group_.control.awaited(group_.rank).store(awaited);
  RankBlock& mine = group_.mine();
  const LastCall::Message m = message != nullptr ? message_of(*message) : LastCall::Message{};
  if (message != nullptr) {
    mine.message_count.store(m.count, std::memory_order_relaxed);
    mine.message_tag.store(m.tag, std::memory_order_relaxed);
  }
  mine.message.store(message == nullptr ? 0 : CallWord(m.op, m.dtype, ReduceOp::Kind::sum, 0, m.peer).bits(),
                     std::memory_order_relaxed);
  mine.answered.store(asked, std::memory_order_seq_cst);
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

// Determines which processes are stopped. They do not answer, so this rank does not wait for their answers.
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
      [&](int r, int q) {  // this rank, too, has written its part if it has answered its own question
        return group_.of(r).answered.load(std::memory_order_seq_cst) >= number_ &&
               group_.control.awaited(r).has(q);
      });
}

namespace {

// The newest line that the rank has published. A line that is rewritten meanwhile is not used.
LastCall newest_call(const Group& group, int r) {
  const RankBlock& block = group.of(r);
  std::uint64_t newest = 0;  // sequence: the number of the call and 1
  for (const Arrival& line : block.arrivals)
    newest = std::max(newest, line.sequence.load(std::memory_order_seq_cst));
  if (newest == 0) return {.rank = r, .state = LastCall::State::none};
  const CallRecord record = record_of(group, r, newest - 1);
  if (block.arrivals[(newest - 1) % kRing].sequence.load(std::memory_order_seq_cst) != newest ||
      static_cast<int>(record.op) >= kOpCount)
    return {.rank = r};
  const std::uint64_t finished = block.finished.load(std::memory_order_seq_cst);
  LastCall call =
      last_call_of(r, finished < newest ? LastCall::State::in_flight : LastCall::State::finished, record);
  if (finished < newest) call.oldest = finished;
  return call;
}

}  // namespace

std::vector<LastCall> RollCall::last_calls() const {
  const std::uint64_t asked = number_ != 0 ? number_ : group_.control.abort().asked.load();
  std::vector<LastCall> calls;
  for (int r = 0; r < group_.size; ++r) {
    LastCall& call = calls.emplace_back(newest_call(group_, r));
    const RankBlock& block = group_.of(r);
    call.answered =
        r == group_.rank || (asked != 0 && block.answered.load(std::memory_order_seq_cst) >= asked);
    const CallWord word(block.message.load(std::memory_order_relaxed));
    if (!call.answered || r == group_.rank || word.op() == Op::none ||
        static_cast<int>(word.op()) >= kOpCount || row(word.op()).collective)
      continue;
    call.message = {.op = word.op(),
                    .dtype = word.dtype(),
                    .peer = word.rank(),
                    .tag = block.message_tag.load(std::memory_order_relaxed),
                    .count = block.message_count.load(std::memory_order_relaxed)};
  }
  return calls;
}

}  // namespace weft::shm
