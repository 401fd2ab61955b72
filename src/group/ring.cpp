#include "group/ring.hpp"

#include "base/mutant.hpp"

namespace weft {

// Blocks without offsets follow one another.
void Ring::keep_blocks(std::vector<BufferBlock>& blocks, OpState& op, const Call& call, int ranks) noexcept {
  const auto n = static_cast<std::size_t>(ranks);
  const auto keep = [&](const Blocks& from, BufferBlock* to) -> const BufferBlock* {
    if (from.counts.empty()) return nullptr;
    std::int64_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
      to[i] = {from.offsets.empty() || WEFT_MUTANT("ignored_offsets") ? next : from.offsets[i],
               from.counts[i]};
      next += from.counts[i];
    }
    return to;
  };
  op.in_blocks = keep(call.in_blocks, blocks.data());
  op.out_blocks = keep(call.out_blocks, blocks.data() + n);
}

bool Ring::is_exposed(const void* block, std::size_t bytes) const noexcept {
  const auto* begin = static_cast<const std::byte*>(block);
  const auto touches = [&](const std::byte* p, std::size_t n) {
    return p != nullptr && p < begin + bytes && begin < p + n;
  };
  for (const Slot& slot : slots_) {
    if (touches(slot.in.load(std::memory_order_relaxed), slot.in_bytes.load(std::memory_order_relaxed)) ||
        touches(slot.out.load(std::memory_order_relaxed), slot.out_bytes.load(std::memory_order_relaxed)))
      return true;
  }
  return false;
}

std::size_t Ring::exposed(std::span<MemoryRange> to) const noexcept {
  std::size_t count = 0;
  for (const Slot& slot : slots_) {
    const std::byte* out = slot.out.load(std::memory_order_acquire);
    const std::size_t bytes = slot.out_bytes.load(std::memory_order_relaxed);
    if (out != nullptr && bytes > 0) to[count++] = {const_cast<std::byte*>(out), bytes};
  }
  return count;
}

}  // namespace weft
