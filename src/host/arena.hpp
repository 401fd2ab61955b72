// The shared memory of this process: memfd segments, the blocks cut from them, and the place at which peers
// find a block. Thread-safe. Peers address a byte as (process, segment, offset); a block consists of complete
// pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace weft {

class Context;
class Logger;

/// The place of a byte in a process's shared memory, as the process's peers address it.
struct SegmentPlace {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// A group, from the arena's point of view. The arena calls holds() before it reuses a freed block. A group
/// with calls in flight, or a failed group that is not quiesced, returns true for memory that its peers may
/// still access. The thread that frees memory calls the functions under the arena's lock, so they must not
/// call the arena.
class BlockHolder {
 public:
  virtual ~BlockHolder() = default;
  virtual bool holds(const void* block, std::size_t bytes) const noexcept = 0;
  /// Called before blocks get other pages. From then until go_on() the group must begin no call, and must not
  /// publish the place of a buffer to a peer. Returns false if the group is in the middle of a step. Called
  /// under the arena's lock, so it must not wait.
  virtual bool stand_still() noexcept { return true; }
  virtual void go_on() noexcept {}
  /// Called while the group is held. Returns whether a call in flight that has not failed uses the block.
  /// Such a block is not moved, because peers know its old place.
  virtual bool uses(const void* /*block*/, std::size_t /*bytes*/) const noexcept { return false; }
};

class Arena {
 public:
  static constexpr std::uint32_t kMaxSegments = 256;

  /// The constructor reserves no memory; the first allocate() or ensure_segment() makes the first segment.
  Arena(Logger& log, std::size_t segment_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// When a block's pages are populated: all at once, or each page at its first use.
  enum class Pages : std::uint8_t { now, at_first_use };
  /// Returns an uninitialised block of complete pages, at least 64-byte aligned, from the cache if possible.
  /// Returns null if there is no shared memory (logged once at level info).
  void* allocate(std::size_t bytes, Pages pages = Pages::now);
  /// Returns the block to the cache, or puts it into quarantine as long as a BlockHolder holds it (later
  /// allocations check this again).
  void release(void* block) noexcept;
  /// Like release(), for memory that no call uses as a buffer, such as memory of a transport. It asks no
  /// holder. (A holder could not answer if this thread is in the middle of the holder's step.)
  void release_unnamed(void* block) noexcept;

  /// Makes the first segment if there is none, so that peers can map it early. Returns false if there is no
  /// shared memory.
  bool ensure_segment() noexcept;
  /// The number of segments made so far. It never decreases. Lock-free.
  std::uint32_t segment_count() const noexcept { return segment_count_.load(std::memory_order_acquire); }
  std::size_t segment_bytes(std::uint32_t segment) const noexcept;
  std::byte* segment_base(std::uint32_t segment) const noexcept;
  /// The memfd of a segment, owned by the arena.
  int segment_descriptor(std::uint32_t segment) const noexcept;

  /// The place of [data, data + bytes), or nothing if the range is not (completely, contiguously) shared
  /// memory of this arena. Lock-free and fast (a few nanoseconds), because it is called for each buffer of
  /// each call that is not inline.
  std::optional<SegmentPlace> find(const void* data, std::size_t bytes) const noexcept;
  /// As long as the version does not change, find() returns the same results.
  struct Version {
    const void* moved = nullptr;
    std::uint32_t segments = 0;
    friend bool operator==(const Version&, const Version&) = default;
  };
  Version version() const noexcept;

  /// Gives the blocks that [data, data + bytes) touches new pages at the same address, with the same
  /// contents. The old pages are never used again, so a peer that still writes to them does no harm.
  /// Afterwards find() returns the new place. Returns false, and changes nothing, if the range is not shared
  /// memory, a holder uses a block, its pages are pinned, or the system refuses. Waits up to 100 ms for
  /// holders that are in the middle of a step. The caller must ensure that no other thread of this process
  /// writes to these blocks meanwhile. Holders may.
  bool evacuate(void* data, std::size_t bytes) noexcept;

  /// Declares that a driver holds the pages of the blocks that the range touches. Until unpin() they are
  /// neither moved nor reused. Calls are counted. Returns false if the range is not shared memory of this
  /// arena.
  bool pin(const void* data, std::size_t bytes);
  void unpin(const void* data, std::size_t bytes) noexcept;

  void add_holder(BlockHolder* holder);
  void remove_holder(const BlockHolder* holder) noexcept;

  struct Counters {
    std::size_t in_use_bytes, cached_bytes, quarantined_bytes, retired_bytes;
  };
  Counters counters() const;

 private:
  struct Move;
  enum class Outcome { moved, refused, later };
  Outcome try_evacuate(std::byte* begin, std::size_t bytes);
  bool find_moves(std::byte* begin, std::size_t bytes, std::vector<Move>& moves) const;
  bool carry_out(std::vector<Move>& moves);
  bool add_segment(std::size_t bytes);
  void release(void* block, bool named) noexcept;
  std::byte* take(std::size_t bytes, Pages pages);

  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::atomic<std::uint32_t> segment_count_{0};
};

/// This process's shared memory.
Arena& arena_of(Context& context) noexcept;

}  // namespace weft
