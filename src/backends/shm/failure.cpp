// The handling of failures: finds the first cause, the dead ranks, and the time from which memory is safe
// again.
//
// The first rank to notice a failure claims the abort record by compare-and-swap. Later causes are dropped,
// so that all ranks report the same cause. After the claim no rank enters a peer's memory. A rank that is
// about to enter stores `active` and then reads the record. The rank that aborts claims the record and then
// reads every `active`. The accesses are sequentially consistent, so one of the two ranks sees the other. A
// rank may have been inside before the claim. Then it leaves at the end of its chunk, or it is dead, or it is
// stopped. If a rank is stopped, the memory that it might still write gets new pages, and its late writes go
// to the old pages. If the kernel copies for it (single_copy.hpp), new pages do not help, because the kernel
// writes to the address. Then weft can only wait.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <cstring>
#include <thread>

#include "backends/shm/group.hpp"
#include "base/mutant.hpp"
#include "base/shared_words.hpp"

namespace weft::shm {
namespace {

constexpr auto kSealPatience = std::chrono::seconds(2);
// After this time weft asks the system whether the claiming rank runs.
constexpr auto kSealLook = std::chrono::milliseconds(20);
constexpr auto kSealNap = std::chrono::milliseconds(1);
constexpr auto kQuiesceNap = std::chrono::microseconds(200);
constexpr std::string_view kDots = " ...";

}  // namespace

bool raise(const Group& g, const Failure& why) noexcept {
  AbortRecord& record = g.control.abort();
  std::uint32_t unclaimed = 0;
  const std::uint32_t claim = 1u + static_cast<std::uint32_t>(g.rank);
  if (!record.state.compare_exchange_strong(unclaimed, claim, std::memory_order_seq_cst)) return false;
  record.code = why.code;
  record.op = why.op;
  record.call = why.call;
  g.control.blamed().store(why.ranks);
  const std::size_t length = std::min(why.text.size(), sizeof(record.text) - 1);
  std::memcpy(record.text, why.text.data(), length);
  record.text[length] = '\0';
  if (length < why.text.size()) std::memcpy(record.text + length - kDots.size(), kDots.data(), kDots.size());
  record.state.store(claim | AbortRecord::kSealed, std::memory_order_seq_cst);
  for (const Doorbell& doorbell : g.doorbells) doorbell.ring();
  return true;
}

// If many ranks share few cores, a claiming rank that is alive may not run for a long time.
Failure first_cause(const Group& g) {
  const AbortRecord& record = g.control.abort();
  const Deadline patience = Deadline::after(kSealPatience);
  std::uint32_t state = record.state.load(std::memory_order_seq_cst);
  const auto claimer = [&] { return static_cast<int>(state & ~AbortRecord::kSealed) - 1; };
  const auto is_rank = [&] { return claimer() >= 0 && claimer() < g.size; };
  Deadline look = Deadline::after(kSealLook);
  for (bool runs = true; (state & AbortRecord::kSealed) == 0 && is_rank() && runs && !patience.passed();) {
    if (look.passed()) {
      runs = g.processes[static_cast<std::size_t>(claimer())]->look() == PeerProcess::State::running;
      look = Deadline::after(kSealLook);
    }
    std::this_thread::sleep_for(kSealNap);
    state = record.state.load(std::memory_order_seq_cst);
  }
  if (!is_rank())
    return {.code = ErrorCode::corrupt,
            .text = fmt::format(
                "the group's words in shared memory are damaged: the rank that reported a failure is "
                "{}; expected 0 to {}",
                claimer(), g.size - 1),
            .ranks = {}};
  if ((state & AbortRecord::kSealed) == 0)
    return {.code = ErrorCode::peer_lost,
            .text = fmt::format("rank {} died or stopped while it reported a failure", claimer()),
            .ranks = {claimer()}};
  return {.code = error_code(static_cast<std::int64_t>(read_once(record.code))),
          .text = text_in(record.text),
          .op = known_or(read_once(record.op), static_cast<Op>(kOpCount - 1), Op::none),
          .call = read_once(record.call),
          .ranks = g.control.blamed().list()};
}

std::vector<int> dead_ranks(const Group& g) {
  std::vector<int> dead;
  for (int r = 0; r < g.size; ++r) {
    const PeerProcess& process = *g.processes[static_cast<std::size_t>(r)];
    if (r == g.rank || process.is_self() || process.alive() || WEFT_MUTANT("unseen_death")) continue;
    if (!has_left(g, r)) dead.push_back(r);
  }
  return dead;
}

bool has_left(const Group& g, int r) noexcept {
  return r != g.rank && g.of(r).left.load(std::memory_order_seq_cst) == kLeft;
}

std::vector<int> gone_ranks(const Group& g) {
  std::vector<int> gone = dead_ranks(g);
  for (int r = 0; r < g.size; ++r)
    if (has_left(g, r)) gone.push_back(r);
  return gone;
}

namespace {

enum class Inside { nobody, process, kernel, thread };

// Returns whether a live rank is inside its peers' memory, and whether new pages do not help against one of
// them: a thread of this process, or a rank for which the kernel copies to addresses of this process. Another
// thread of this rank may be in the middle of a step, too.
Inside inside(const Group& g) noexcept {
  Inside found = Inside::nobody;
  for (int r = 0; r < g.size; ++r) {
    const PeerProcess& process = *g.processes[static_cast<std::size_t>(r)];
    const std::uint64_t active = g.of(r).active.load(std::memory_order_seq_cst);
    if (active == 0 || (r != g.rank && !process.alive())) continue;
    if (process.is_self()) return Inside::thread;
    if ((active & kByKernel) != 0) return Inside::kernel;
    found = Inside::process;
  }
  return found;
}

}  // namespace

bool quiet(const Group& g) noexcept { return inside(g) == Inside::nobody; }

bool quiesce(const Group& g, Deadline deadline, std::span<const MemoryRange> exposed) noexcept {
  if (WEFT_MUTANT("skipped_quiesce")) return true;
  Inside who = inside(g);
  for (; who != Inside::nobody && !deadline.passed(); who = inside(g))
    std::this_thread::sleep_for(kQuiesceNap);
  // new pages do not help against a thread of this process
  if (who != Inside::process) return who == Inside::nobody;
  for (const MemoryRange& m : exposed) {
    Arena& arena = arena_of(g.context);
    if (arena.find(m.data, m.bytes) && !arena.evacuate(m.data, m.bytes)) return false;
  }
  return true;
}

}  // namespace weft::shm
