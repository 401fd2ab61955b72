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

/// A path that a test may force. It is a part of the call word, so that ranks notice if they force different
/// paths.
enum class Path : std::uint8_t { automatic, inline_only, direct, staged, single };

/// The single copies that are allowed (WEFT_SINGLE_COPY, see single_copy.hpp). Each value also allows what
/// the values before it allow.
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
  bool one_process = true;  ///< whether all ranks are threads of this process
  /// Whether there are more ranks on this host than cores that the group's ranks may use. If so, no rank
  /// spins.
  bool oversubscribed = false;
  /// The single copies by which all ranks may access each other's memory. Calls use them for the sizes in the
  /// table of paths.hpp.
  SingleCopy single_copy = SingleCopy::off;
  /// Whether all ranks may read each other's memory by single copies, and WEFT_SINGLE_COPY is not off; then
  /// exchanges try single copies, and measure them.
  bool may_pull = false;
  bool pairs_usable = false;  ///< PairMemory::usable()
  RegionRef all_pairs;        ///< if it is not usable: the memory of all pairs for their messages
  RegionRef region;
  Control control;
  std::vector<PeerProcessRef> processes;             ///< the process of each rank
  std::vector<Doorbell> doorbells;                   ///< of each rank
  mutable std::vector<Clock::time_point> ask_again;  ///< for each rank, when map_news() may ask it again
  std::function<void(std::uint64_t)> in_chunk;       ///< for tests

  RankBlock& mine() const { return control.rank(rank); }
  RankBlock& of(int r) const { return control.rank(r); }

  /// Wakes rank `r` if it sleeps. Call this after a word for which it may wait has been published (with
  /// release stores).
  void wake(int r) const noexcept {
    full_fence();
    wake_fenced(r);
  }
  /// Like wake(), if a full fence has already followed the stores.
  void wake_fenced(int r) const noexcept {
    if (of(r).sleeping.load(std::memory_order_seq_cst) != 0) doorbells[static_cast<std::size_t>(r)].ring();
  }
  void wake_all() const noexcept {
    full_fence();
    for (int r = 0; r < size; ++r)
      if (r != rank) wake_fenced(r);
  }

  /// Returns the place of a buffer of this rank, in the form in which all peers, or only the peer `reader`,
  /// can access it now.
  Buffer publish(const std::byte* data, std::size_t bytes, int reader = kEverybody) const noexcept;
  /// Returns the address, in this process, of `bytes` bytes at a place that another rank `r` has published,
  /// from `skip` on. Returns null if they do not lie in memory of rank r that this process has mapped. The
  /// place is then damaged: call say_damaged().
  std::byte* reach(int r, const Buffer& b, std::int64_t skip, std::int64_t bytes) const noexcept {
    if (b.kind == Buffer::pointer && one_process) return reinterpret_cast<std::byte*>(b.offset) + skip;
    if (b.kind != Buffer::shared || skip < 0) return nullptr;
    const std::uint64_t offset = b.offset + static_cast<std::uint64_t>(skip);
    return offset < b.offset ? nullptr
                             : processes[static_cast<std::size_t>(r)]->find(b.segment, offset, bytes);
  }
  /// Fails the group, because reach() does not find a place of rank `r`.
  [[gnu::cold]] void say_damaged(const OpState& s, int r, const Buffer& b, std::int64_t skip,
                                 std::int64_t bytes) const noexcept;
  /// Whether this rank can access this memory of rank `r` only through the kernel. This is also true for a
  /// thread of this process, because weft does not follow an address that another process may have
  /// overwritten.
  bool by_kernel(int r, const Buffer& b) const noexcept { return b.kind == Buffer::remote && r != rank; }
  /// Shows peers all segments of this process's arena, so that they can map them.
  void show_segments() const noexcept;
  /// Maps the segments that peers have added to their arenas, and notifies those peers. Takes little time.
  void map_news() const noexcept;
  /// Like map_news(), for one peer.
  void map_news(int r) const noexcept;

  bool aborted() const noexcept {
    return !WEFT_MUTANT("lost_abort") && control.abort().state.load(std::memory_order_seq_cst) != 0;
  }
  /// Announces that this rank is about to access peers' memory; `how`: 0 or kByKernel. Returns false if the
  /// group has failed. The rank must then not access that memory.
  bool enter(std::uint64_t call, std::uint64_t how = 0) const noexcept;
  /// States that this rank no longer accesses peers' memory. Returns false if the group has failed meanwhile.
  bool leave() const noexcept {
    mine().active.store(0, std::memory_order_release);
    return !aborted();
  }
};

/// Connects this rank with the other ranks. Throws the errors of make_shm_backend().
Group init_group(const GroupInit& b);

/// Claims the first cause, writes and seals it, and wakes all ranks. Returns false if there already was
/// another cause.
bool raise(const Group& g, const Failure& why) noexcept;
/// Returns the first cause. Waits a moment if the claiming rank is still writing it. If that rank has died,
/// its death is the cause.
Failure first_cause(const Group& g);
/// Returns the ranks that have died.
std::vector<int> dead_ranks(const Group& g);
/// Returns whether rank r has destroyed its handle of the group.
bool has_left(const Group& g, int r) noexcept;
/// Returns the ranks that have died or left.
std::vector<int> gone_ranks(const Group& g);
/// Returns whether no live rank is inside its peers' memory.
bool quiet(const Group& g) noexcept;
bool quiesce(const Group& g, Deadline deadline, std::span<const MemoryRange> exposed) noexcept;

/// Returns the call that rank `r` has published, as a record. Its field `order` is the requested order, even
/// if the operation does not reduce. A value that an enum does not have becomes none, u8, sum or native.
CallRecord record_of(const Group& g, int r, std::uint64_t call) noexcept;
/// Returns that call as a text: "rank 1 called all_gather f32 x1000 [call 17]". If count vectors differ,
/// `block` is the block that differs.
std::string describe(const Group& g, int r, std::uint64_t call, int block = -1);
/// Returns the bits of the CallWord that must be equal on all ranks. elaborate() writes the values for which
/// the word has no room.
std::uint64_t call_word(const OpState& s, Path path) noexcept;
/// Writes the Detail of this rank's call and returns its hash; returns 0 if the call has no Detail.
std::uint64_t elaborate(const Group& g, const OpState& s, bool small) noexcept;

}  // namespace weft::shm
