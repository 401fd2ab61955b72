// The shared memory of this process: memfd segments, the blocks cut from them, and where peers find a block.
// Thread-safe. Peers address a byte as (process, segment, offset); blocks own whole pages.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <optional>
#include <vector>

namespace weft {

class Logger;

/// Where a byte of a process's shared memory lives, as its peers address it.
struct Place {
  std::uint32_t segment = 0;
  std::uint64_t offset = 0;
};

/// Asked before a freed block is used again: a group with calls in flight, or failed and not quiesced,
/// answers true for memory its peers may still touch. Called from the thread that frees, under the arena's
/// lock: no calls back.
class BlockHolder {
 public:
  virtual ~BlockHolder() = default;
  virtual bool holds(const void* block, std::size_t bytes) const noexcept = 0;
};

class Arena {
 public:
  static constexpr std::uint32_t kMaxSegments = 256;

  /// Reserves nothing yet; the first segment is made by the first allocate() or by ensure_segment().
  Arena(Logger& log, std::size_t segment_bytes);
  ~Arena();
  Arena(const Arena&) = delete;
  Arena& operator=(const Arena&) = delete;

  /// A block of whole pages, 64-byte aligned at least, uninitialised; populated in bulk; recycled by size.
  /// Null where shared memory cannot be had (logged once at level info).
  void* allocate(std::size_t bytes);
  /// Back to the cache, or into quarantine while a BlockHolder holds it (looked at again on later
  /// allocations).
  void release(void* block) noexcept;

  /// Makes the first segment if there is none, so that peers can map it early. False where it cannot be had.
  bool ensure_segment() noexcept;
  /// Segments made so far; grows only. Lock-free.
  std::uint32_t segment_count() const noexcept { return segment_count_.load(std::memory_order_acquire); }
  std::size_t segment_bytes(std::uint32_t segment) const noexcept;
  std::byte* segment_base(std::uint32_t segment) const noexcept;
  /// The memfd of a segment, owned by the arena.
  int segment_descriptor(std::uint32_t segment) const noexcept;

  /// Where [data, data + bytes) lies, or nothing where it is not (wholly, contiguously) shared memory of this
  /// arena. Lock-free, a few nanoseconds: called for each buffer of each call that is not inline.
  std::optional<Place> find(const void* data, std::size_t bytes) const noexcept;

  /// Gives the blocks that [data, data + bytes) touches new pages at the same address, with the same
  /// contents, and retires the old ones for good: a late writer that mapped the old pages hits orphans.
  /// find() then answers with the new place. False where it is not shared memory or the system refuses (then
  /// nothing changed). The caller sees to it that no other thread of this process touches these blocks
  /// meanwhile.
  bool evacuate(void* data, std::size_t bytes) noexcept;

  void add_holder(const BlockHolder* holder);
  void remove_holder(const BlockHolder* holder) noexcept;

  struct Counters {
    std::size_t in_use_bytes, cached_bytes, quarantined_bytes, retired_bytes;
  };
  Counters counters() const;

 private:
  bool add_segment(std::size_t bytes);
  std::byte* take(std::size_t bytes);

  struct Impl;
  std::unique_ptr<Impl> impl_;
  std::atomic<std::uint32_t> segment_count_{0};
};

}  // namespace weft
