// The purpose of a collective in addition to its operation: a digest of layouts, which ranks compare with the
// call. The digest travels as the call's tag, which collectives do not use otherwise. Pure functions; any
// thread.
#pragma once

#include <cstdint>

#include "backends/call_word.hpp"
#include "base/hash.hpp"

namespace weft {

/// A tag up to this value is such a digest. Messages never have such a tag.
inline constexpr int kLayoutTags = -kComposedTags - 1;
inline int layout_tag(std::uint64_t digest) noexcept {
  return kLayoutTags - static_cast<int>((digest ^ digest >> 32) & 0x3fffffff);
}
inline bool has_layout_tag(const OpState& s) noexcept { return s.tag <= kLayoutTags; }

/// `detail`: detail_hash() of the call. Returns `detail` unchanged if the call has no such tag.
inline std::uint64_t with_layout_tag(std::uint64_t detail, const OpState& s) noexcept {
  if (!has_layout_tag(s)) return detail;
  Fnv1a hash;
  hash.add_at_once(detail);
  hash.add_at_once(static_cast<std::uint64_t>(s.tag));
  return hash.value;
}

}  // namespace weft
