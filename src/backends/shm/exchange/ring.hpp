// The memory that a pair of ranks shares for exchanges: a ring of slots that the sender fills and the
// receiver empties, in order. A slot holds packed bytes, or names the place of the bytes in the sender's
// memory. In the second case the receiver copies them from there, and the sender may change its memory when
// `taken` has reached the slot. Each word has one writer.
#pragma once

#include <algorithm>
#include <atomic>
#include <cstddef>
#include <cstdint>

#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"

namespace weft::shm {

/// Slots in a ring. With 2 slots, a sender of many slots wrote to lines that the receiver had just read, and
/// which were still in the receiver's cache: 512 KiB took 37 us; with 16 slots they take 28 us.
inline constexpr std::uint64_t kExchangeSlots = 16;
inline constexpr std::int64_t kSlotBytes = 32 << 10;  ///< packed bytes in one slot
inline constexpr std::int64_t kBesideBytes = 32;      ///< packed bytes in a slot's first line
/// room for the numbers that describe boxes, if a slot names memory
inline constexpr std::size_t kBoxNumbers = 1024;
/// room for the indices of these boxes: 32-bit numbers, in the place of packed bytes
inline constexpr std::size_t kListNumbers = kSlotBytes / sizeof(std::uint32_t);
/// In the number of a box's field: the box has indices.
inline constexpr std::int64_t kListed = std::int64_t{1} << 32;
/// the length of the text that describes a slot's contents
inline constexpr std::size_t kAboutBytes = 192;
/// the measurements of a ring that the sender may request at a time
inline constexpr std::size_t kTimings = 32;
inline constexpr std::size_t kMostPlaces = 32;  ///< fields whose memory a slot may name

/// The contents of a slot. `packed`: at most kSlotBytes packed bytes, and perhaps more in the slots behind
/// it. `in_place`: `places` and `boxes` give the places of the bytes, and `apart` has the indices of boxes,
/// one box after the other. `by_kernel`: like `in_place`, but the receiver reaches the bytes only through the
/// kernel.
enum class Holds : std::uint16_t { packed, in_place, by_kernel };

/// Slot number k (from 0) is in place k mod kExchangeSlots. The sender writes it, its first cache line
/// last; the receiver reads it once `sequence` is k + 1; the sender writes it again when `taken` is greater
/// than k.
struct alignas(64) Slot {
  std::atomic<std::uint64_t> sequence;
  std::uint64_t form;  ///< a hash of the description of the exchange, which must be equal on both sides
  /// the number of slots that the sender has emptied of the ring in the other direction
  std::uint64_t taken;
  Holds holds;
  /// If it is not 0, the receiver reports under this number how long its copy took.
  std::uint16_t timing;
  /// The first packed bytes, if they are few: they arrive with the head.
  alignas(kBesideBytes) std::byte beside[kBesideBytes];
  alignas(64) std::byte apart[kSlotBytes];  ///< all other packed bytes, on separate lines; or indices
  alignas(64) std::uint64_t boxes_id;       ///< the sender's number for the boxes that are in `boxes`
  Buffer places[kMostPlaces];               ///< the place of each field
  alignas(64) char about[kAboutBytes];      ///< the description of the exchange in words
  alignas(64) std::int64_t boxes[kBoxNumbers];

  /// Returns the begin of the packed bytes of an exchange that has so many bytes.
  std::byte* packed(std::int64_t bytes) noexcept { return bytes <= kFewBytes ? beside : apart; }
  const std::byte* packed(std::int64_t bytes) const noexcept { return bytes <= kFewBytes ? beside : apart; }
};
// `beside` and `apart` are read as one piece
static_assert(offsetof(Slot, beside) + kBesideBytes == offsetof(Slot, apart));

/// The time that a receiver took to copy the bytes of an exchange, and the exchange: one word, so that both
/// are written together.
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
  alignas(64) std::atomic<std::uint64_t> taken;  ///< by the receiver: the number of slots emptied
  std::atomic<std::uint32_t> found;              ///< by the receiver: 1 if it has mapped this memory
  /// by the receiver, before `taken`: see Slot::timing
  alignas(64) std::atomic<std::uint64_t> took[kTimings];

  /// Clears memory that had another use: all words that a rank reads before another rank has written them.
  void clear() noexcept {
    for (Slot& s : slots) s.sequence.store(0, std::memory_order_relaxed);
    taken.store(0, std::memory_order_relaxed);
    found.store(0, std::memory_order_relaxed);
    for (auto& t : took) t.store(0, std::memory_order_relaxed);
  }
};

}  // namespace weft::shm
