// The memory that a pair of ranks shares for exchanges: a ring of slots that the sender fills and the
// receiver empties, in order. A slot holds packed bytes, or says where in the sender's memory they lie.
// Then the receiver copies them from there, and the sender's memory is free once `taken` has reached the
// slot. Each word has one writer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"

namespace weft::shm {

/// Slots in a ring. With 2, a sender of many slots wrote lines that the receiver had just read, and which
/// were still in its cache: 512 KiB took 37 us, now 28.
inline constexpr std::uint64_t kExchangeSlots = 16;
inline constexpr std::int64_t kSlotBytes = 32 << 10;  ///< packed bytes in one slot
inline constexpr std::int64_t kBesideBytes = 32;      ///< packed bytes in a slot's first line
inline constexpr std::size_t kBoxNumbers = 1024;      ///< of the boxes of fields whose memory a slot names
inline constexpr std::size_t kAboutBytes = 192;       ///< text of what a slot holds
inline constexpr std::size_t kTimings = 32;           ///< of a ring, that the sender may ask for at a time
inline constexpr std::size_t kMostPlaces = 32;        ///< fields whose memory a slot may name

/// The content of a slot. `packed`: kSlotBytes or less, and perhaps more in the slots behind it.
/// `in_place`: `places` and `boxes` say where. `by_kernel`: the same, but the receiver reaches it through
/// the kernel alone.
enum class Holds : std::uint16_t { packed, in_place, by_kernel };

/// Slot number k (from 0) is in place k mod kExchangeSlots. The sender writes it, its first cache line
/// last; the receiver reads it once `sequence` is k + 1; the sender writes it again when `taken` is greater
/// than k.
struct alignas(64) Slot {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t form;   ///< a hash of what is exchanged: equal on both sides
  std::uint64_t taken;  ///< slots that the sender has emptied of the ring the other way
  Holds holds;
  /// Not 0: the receiver reports under this number how long it took to copy.
  std::uint16_t timing;
  /// The first packed bytes, if they are few: they arrive with the head.
  alignas(kBesideBytes) std::byte beside[kBesideBytes];
  alignas(64) std::byte apart[kSlotBytes];  ///< the others, at lines of their own
  alignas(64) std::uint64_t boxes_id;       ///< what `boxes` are of: a number of the sender's
  Buffer places[kMostPlaces];               ///< where each field begins
  alignas(64) char about[kAboutBytes];      ///< of `form`, in words
  alignas(64) std::int64_t boxes[kBoxNumbers];

  /// Where packed bytes begin, of an exchange that has so many.
  std::byte* packed(std::int64_t bytes) noexcept { return bytes <= kFewBytes ? beside : apart; }
  const std::byte* packed(std::int64_t bytes) const noexcept { return bytes <= kFewBytes ? beside : apart; }
};
static_assert(offsetof(Slot, beside) + kBesideBytes == offsetof(Slot, apart));  // they are read as one piece

/// The time that a receiver took to copy the bytes of one exchange, and which exchange: one word, so that
/// both belong together.
struct Took {
  static constexpr int kShift = 40;
  static std::uint64_t word(std::uint64_t last_slot, std::uint64_t ns) noexcept {
    return last_slot << kShift | std::min(ns, (std::uint64_t{1} << kShift) - 1);
  }
  static bool is_of(std::uint64_t word, std::uint64_t last_slot) noexcept {
    return word >> kShift == (last_slot << kShift) >> kShift;
  }
  static std::uint64_t ns(std::uint64_t word) noexcept { return word & ((std::uint64_t{1} << kShift) - 1); }
};

struct Ring {
  Slot slots[kExchangeSlots];
  alignas(64) std::atomic<std::uint64_t> taken;  ///< by the receiver: slots emptied
  std::atomic<std::uint32_t> found;              ///< by the receiver: 1 once it has mapped this
  /// by the receiver, before `taken`: see Slot::timing
  alignas(64) std::atomic<std::uint64_t> took[kTimings];

  /// Clears memory that had another use: every word that is read before another rank has written it.
  void clear() noexcept {
    for (Slot& s : slots) s.sequence.store(0, std::memory_order_relaxed);
    taken.store(0, std::memory_order_relaxed);
    found.store(0, std::memory_order_relaxed);
    for (auto& t : took) t.store(0, std::memory_order_relaxed);
  }
};

}  // namespace weft::shm
