// One rank's end of a shared-memory group: the state that all paths of the backend use.
#pragma once

#include <atomic>
#include <functional>
#include <string>
#include <vector>

#include "backends/shm/control.hpp"
#include "backends/shm/fence.hpp"
#include "base/mutant.hpp"
#include "host/arena.hpp"
#include "host/peers.hpp"
#include "weft/backends/backend.hpp"
#include "weft/backends/call_record.hpp"

namespace weft::shm {

/// A path that a test may force; part of the call word, so that ranks which disagree notice.
enum class Path : std::uint8_t { automatic, inline_only, direct, staged, single };

/// WEFT_SINGLE_COPY: see single_copy.hpp. Each value allows everything that the values before it allow.
enum class SingleCopy : std::uint8_t { off, pull, push };

/// The group as one rank sees it, after initialisation.
struct Group {
  static constexpr int kEverybody = -1;
  explicit Group(Context& c) : context(c) {}

  Context& context;
  std::string name;
  int rank = 0;
  int size = 1;
  Path path = Path::automatic;
  bool one_process = true;  ///< all ranks are threads of this process
  /// There are more ranks on this host than cores that the group's ranks may use: no rank spins.
  bool oversubscribed = false;
  /// All ranks may reach each other by the kernel's single copies, and calls use them where a table says
  /// so.
  SingleCopy single_copy = SingleCopy::off;
  /// All ranks may read each other's memory by single copies, and WEFT_SINGLE_COPY is not off: an exchange
  /// tries it, and measures.
  bool may_pull = false;
  bool pairs_usable = false;  ///< PairMemory::usable()
  RegionRef all_pairs;        ///< where it is not: the memory of all pairs for their messages
  RegionRef region;
  Control control;
  std::vector<PeerProcessRef> processes;             ///< the process of each rank
  std::vector<Doorbell> doorbells;                   ///< of each rank
  mutable std::vector<Clock::time_point> ask_again;  ///< when map_news() may ask each rank again
  std::function<void(std::uint64_t)> in_chunk;       ///< tests

  RankBlock& mine() const { return control.rank(rank); }
  RankBlock& of(int r) const { return control.rank(r); }

  /// Wakes rank `r` if it sleeps; called after publishing a word that it may wait for (with release
  /// stores).
  void wake(int r) const noexcept {
    full_fence();
    wake_fenced(r);
  }
  /// The same, if a full fence has followed the stores already.
  void wake_fenced(int r) const noexcept {
    if (of(r).sleeping.load(std::memory_order_seq_cst) != 0) doorbells[static_cast<std::size_t>(r)].ring();
  }
  void wake_all() const noexcept {
    full_fence();
    for (int r = 0; r < size; ++r)
      if (r != rank) wake_fenced(r);
  }

  /// Where a buffer of this rank lies, in the form in which all peers, or the one `reader`, can reach it now.
  Buffer publish(const std::byte* data, std::size_t bytes, int reader = kEverybody) const noexcept;
  /// The address here of `bytes` bytes that another rank `r` published, from `skip` on. Null: they do not
  /// lie in memory of r that this process has mapped, so the place is damaged; then call say_damaged().
  std::byte* reach(int r, const Buffer& b, std::int64_t skip, std::int64_t bytes) const noexcept {
    if (b.kind == Buffer::pointer && one_process) return reinterpret_cast<std::byte*>(b.offset) + skip;
    if (b.kind != Buffer::shared || skip < 0) return nullptr;
    const std::uint64_t offset = b.offset + static_cast<std::uint64_t>(skip);
    return offset < b.offset ? nullptr
                             : processes[static_cast<std::size_t>(r)]->find(b.segment, offset, bytes);
  }
  /// The group fails, because of a place of rank `r` that reach() does not find.
  [[gnu::cold]] void say_damaged(const OpState& s, int r, const Buffer& b, std::int64_t skip,
                                 std::int64_t bytes) const noexcept;
  /// Whether this rank reaches this memory of rank `r` through the kernel alone. That holds for a thread of
  /// this process, too: an address that another process may have written to is not followed.
  bool by_kernel(int r, const Buffer& b) const noexcept { return b.kind == Buffer::remote && r != rank; }
  /// Shows peers all segments of this process's arena, so that they can map them.
  void show_segments() const noexcept;
  /// Maps the segments that peers have added to their arenas, and notifies those peers. Takes little time.
  void map_news() const noexcept;
  /// The same of one peer.
  void map_news(int r) const noexcept;

  bool aborted() const noexcept {
    return !WEFT_MUTANT("lost_abort") && control.abort().state.load(std::memory_order_seq_cst) != 0;
  }
  /// Announces that this rank is about to touch peers' memory; `how`: 0 or kByKernel. False: the group has
  /// failed, and the rank must not touch it.
  bool enter(std::uint64_t call, std::uint64_t how = 0) const noexcept;
  /// This rank no longer touches peers' memory. False: the group has failed meanwhile.
  bool leave() const noexcept {
    mine().active.store(0, std::memory_order_release);
    return !aborted();
  }
};

/// Meets the other ranks. Throws as make_shm_backend says.
Group init_group(const GroupInit& b);

/// Claims the first cause, writes and seals it, wakes everybody. False: another cause came first.
bool raise(const Group& g, const Failure& why) noexcept;
/// The first cause. Waits a moment if the claiming rank is still writing it; if that rank has died, this is
/// the cause.
Failure first_cause(const Group& g);
/// Names ranks that died; empty: none.
std::vector<int> dead_ranks(const Group& g);
/// Has rank r destroyed its handle of the group?
bool has_left(const Group& g, int r) noexcept;
/// Ranks that died or left.
std::vector<int> gone_ranks(const Group& g);
/// No live rank is inside its peers' memory.
bool quiet(const Group& g) noexcept;
bool quiesce(const Group& g, Deadline deadline, std::span<const MemoryRange> exposed) noexcept;

/// The call that rank `r` published, as a record. Its field `order` is the requested one, also where the
/// operation does not reduce. A value that its enum does not have becomes none, u8, sum or native.
CallRecord record_of(const Group& g, int r, std::uint64_t call) noexcept;
/// The same for people: "rank 1 called all_gather f32 x1000 [call 17]". Where count
/// vectors differ, `block` is where.
std::string describe(const Group& g, int r, std::uint64_t call, int block = -1);
/// The bits of the CallWord that must be equal on all ranks. elaborate() writes the facts for which the
/// word has no room.
std::uint64_t call_word(const OpState& s, Path path) noexcept;
/// Writes the Detail of this rank's call, if it has one, and returns its hash; 0: it has none.
std::uint64_t elaborate(const Group& g, const OpState& s, bool small) noexcept;

}  // namespace weft::shm
