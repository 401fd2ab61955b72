#include "nn/kernels/bf16/packed_weights.hpp"

#include <algorithm>

#include "nn/kernels/cpu_context.hpp"

namespace weft::kernels {

const float* PackedWeights::find(KernelContext::State& state, const gemm::Matrix& b, const WeightMatrix& of,
                                 std::int64_t k, std::int64_t n) {
  if (of.version == 0 || state.bf16 == state.f32) return nullptr;
  Entry& e = entry({of.weight, k, n, b.row_step == 1});
  e.last_use = ++uses_;
  if (e.version != of.version) {  // the packed weights are old; their memory stays for later weights
    e.version = of.version;
    e.uses = 0;
    e.packed = false;
  }
  if (e.packed) return reinterpret_cast<const float*>(e.memory.data());
  if (e.uses < kUsesBefore) return ++e.uses, nullptr;
  const gemm::Kernel& kernel = *state.bf16;
  const std::size_t bytes = static_cast<std::size_t>(kernel.packed_floats(n, k)) * sizeof(float);
  if (e.bytes == 0 && !make_room(e, bytes)) return nullptr;
  auto* const to = reinterpret_cast<float*>(e.memory.reserve(context_, bytes));
  cpu::parallel_for(state, cpu::blocks_of(n, kernel.columns),
                    [&](std::int64_t panel, int) { kernel.pack_b(b, n, k, panel * kernel.columns, to); });
  e.packed = true;
  return to;
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
