#include "nn/kernels/bf16/packed_weights.hpp"

#include <algorithm>
#include <cstring>

#if defined(__SSE2__)
#include <immintrin.h>
#endif

#include "host/clones.hpp"
#include "nn/kernels/cpu_context.hpp"

namespace weft::kernels {
namespace {

constexpr std::int64_t kColumns = PackedWeights::kColumns;

// One block of 64 columns, all rows by pairs. to: (pairs, 64) of two elements each.

// from: (k, columns), rows ld apart
WEFT_CPU_CLONES(void, pack_rows,
                (const std::uint16_t* from, std::int64_t ld, std::uint32_t* to, std::int64_t columns,
                 std::int64_t k, std::int64_t pairs),
                (from, ld, to, columns, k, pairs)) {
  for (std::int64_t pair = 0; pair < pairs; ++pair, to += kColumns) {
    const std::uint16_t *const even = from + 2 * pair * ld, *const odd = even + ld;
    if (columns == kColumns && 2 * pair + 1 < k) {
#pragma GCC ivdep
      for (std::int64_t j = 0; j < kColumns; ++j)
        to[j] = static_cast<std::uint32_t>(even[j]) | static_cast<std::uint32_t>(odd[j]) << 16;
    } else {
      for (std::int64_t j = 0; j < kColumns; ++j)
        to[j] = (j < columns && 2 * pair < k ? static_cast<std::uint32_t>(even[j]) : 0u) |
                (j < columns && 2 * pair + 1 < k ? static_cast<std::uint32_t>(odd[j]) << 16 : 0u);
    }
  }
}

// Turns pairs [0, pairs) of four rows of `from`, ld apart, into four columns of `to`. Returns how many pairs
// it did: a multiple of 4.
std::int64_t turn_four(const std::uint16_t* from, std::int64_t ld, std::uint32_t* to, std::int64_t pairs) {
  std::int64_t p = 0;
#if defined(__SSE2__)
  for (; p + 4 <= pairs; p += 4) {
    __m128 row[4];
    for (std::int64_t j = 0; j < 4; ++j)
      row[j] = _mm_castsi128_ps(_mm_loadu_si128(reinterpret_cast<const __m128i*>(from + j * ld + 2 * p)));
    _MM_TRANSPOSE4_PS(row[0], row[1], row[2], row[3]);
    for (std::int64_t q = 0; q < 4; ++q)
      _mm_storeu_si128(reinterpret_cast<__m128i*>(to + (p + q) * kColumns), _mm_castps_si128(row[q]));
  }
#endif
  return p;
}

// from: (columns, k), rows ld apart. It reads four rows at a time from end to end, which the CPU prefetches;
// the written data stays in the second-level cache.
void pack_columns(const std::uint16_t* from, std::int64_t ld, std::uint32_t* to, std::int64_t columns,
                  std::int64_t k, std::int64_t pairs) {
  const std::int64_t whole = k / 2;
  for (std::int64_t four = 0; four < kColumns; four += 4) {
    const std::int64_t done = four + 4 <= columns ? turn_four(from + four * ld, ld, to + four, whole) : 0;
    for (std::int64_t j = four; j < four + 4; ++j) {
      const std::uint16_t* const row = from + j * ld;
      for (std::int64_t p = done; p < pairs; ++p) {
        std::uint32_t pair = 0;
        if (j < columns && p < whole)
          std::memcpy(&pair, row + 2 * p, sizeof pair);
        else if (j < columns && 2 * p < k)
          pair = row[2 * p];  // the last row of an odd number
        to[p * kColumns + j] = pair;
      }
    }
  }
}

}  // namespace

const bf16* PackedWeights::find(KernelContext::State& state, const WeightMatrix& b, Stored stored,
                                std::int64_t ld, std::int64_t k, std::int64_t n) {
  if (b.version == 0) return nullptr;
  Entry& e = entry({b.weight, k, n, stored == Stored::transposed});
  e.last_use = ++uses_;
  if (e.version != b.version) {  // what was packed is old; its memory stays for what comes
    e.version = b.version;
    e.uses = 0;
    e.packed = false;
  }
  auto* const memory = reinterpret_cast<bf16*>(e.memory.data());
  if (e.packed) return memory;
  if (e.uses < kUsesBefore) return ++e.uses, nullptr;
  const std::int64_t rows = rounded_up(k, kRows), blocks = rounded_up(n, kColumns) / kColumns;
  const std::size_t bytes = static_cast<std::size_t>(rows * blocks * kColumns) * sizeof(bf16);
  if (e.bytes == 0 && !make_room(e, bytes)) return nullptr;
  auto* const to = reinterpret_cast<std::uint32_t*>(e.memory.reserve(context_, bytes));
  cpu::parallel_for(state, blocks, [&](std::int64_t block, int) {
    const std::int64_t column = block * kColumns, columns = std::min(kColumns, n - column);
    const auto* const from = reinterpret_cast<const std::uint16_t*>(b.data);
    std::uint32_t* const into = to + column * rows / 2;
    if (stored == Stored::transposed)
      pack_columns(from + column * ld, ld, into, columns, k, rows / 2);
    else
      pack_rows(from + column, ld, into, columns, k, rows / 2);
  });
  e.packed = true;
  return reinterpret_cast<bf16*>(to);
}

bool PackedWeights::is_packed(std::uint64_t weight) const {
  return std::any_of(entries_.begin(), entries_.end(),
                     [&](const auto& e) { return e.first.weight == weight && e.second.packed; });
}

PackedWeights::Entry& PackedWeights::entry(const Key& key) {
  if (const auto found = entries_.find(key); found != entries_.end()) return found->second;
  if (entries_.size() >= kMostEntries) {
    const auto oldest = std::min_element(entries_.begin(), entries_.end(), [](const auto& x, const auto& y) {
      return x.second.last_use < y.second.last_use;
    });
    bytes_ -= oldest->second.bytes;
    entries_.erase(oldest);
  }
  return entries_[key];
}

// Takes the memory of old entries, the oldest first, until there are `bytes` for this entry. If that fails,
// it is tried again much later, because it looks at all entries.
bool PackedWeights::make_room(Entry& of, std::size_t bytes) {
  if (bytes > limit || (of.no_room_at != 0 && uses_ - of.no_room_at < kOldAfter)) return false;
  while (bytes_ + bytes > limit) {
    Entry* oldest = nullptr;
    for (auto& [key, e] : entries_)
      if (e.bytes > 0 && (oldest == nullptr || e.last_use < oldest->last_use)) oldest = &e;
    if (uses_ - oldest->last_use < kOldAfter) {
      of.no_room_at = uses_;
      return false;
    }
    bytes_ -= oldest->bytes;
    oldest->bytes = 0;
    oldest->packed = false;
    oldest->memory = {};
  }
  of.bytes = bytes;
  bytes_ += bytes;
  return true;
}

}  // namespace weft::kernels
