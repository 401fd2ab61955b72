// The purpose of a collective besides its operation: a digest of layouts, which ranks compare with the call.
// It travels as the call's tag, of which collectives make no other use. Pure functions; any thread.
#pragma once

#include <cstdint>

#include "backends/call_word.hpp"
#include "base/hash.hpp"

namespace weft {

/// Tags of collectives from this one down are such digests. Messages have none of these.
inline constexpr int kLayoutTags = -kComposedTags - 1;
inline int layout_tag(std::uint64_t digest) noexcept {
  return kLayoutTags - static_cast<int>((digest ^ digest >> 32) & 0x3fffffff);
}
inline bool has_layout_tag(const OpState& s) noexcept { return s.tag <= kLayoutTags; }

/// `detail`: detail_hash() of the call. The same where it has no such tag.
inline std::uint64_t with_layout_tag(std::uint64_t detail, const OpState& s) noexcept {
  if (!has_layout_tag(s)) return detail;
  Fnv1a hash;
  hash.add_at_once(detail);
  hash.add_at_once(static_cast<std::uint64_t>(s.tag));
  return hash.value;
}

}  // namespace weft
