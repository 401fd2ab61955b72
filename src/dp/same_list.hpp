// Whether all ranks of some axes work on the same list of gradients in the same order. One digest of the whole
// list is compared, which rides on an all-gather that happens anyway or is one of its own; only where it
// differs, further exchanges find the first entry that does. Private to dp and train.
#pragma once

#include <array>
#include <cstdint>
#include <functional>
#include <span>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::dp {

/// What all ranks must say alike of a gradient: name, dtype, layout; without one, also the shape.
std::uint64_t digest_of_gradient(const Gradient& g);
/// `"w" (f32 (7, 4) as [dp: Shard(0)])`
std::string text_of_gradient(const Gradient& g);

/// What a rank tells of its list.
class ListDigest {
 public:
  static constexpr std::size_t kWords = 2;
  void add(std::uint64_t entry) {
    ++count_;
    hash_.add(entry);
  }
  std::array<std::uint64_t, kWords> words() const { return {count_, hash_.value}; }

 private:
  std::uint64_t count_ = 0;
  Fnv1a hash_;
};

/// `all`: the words of rank r begin at r * stride.
bool same_lists(std::span<const std::uint64_t> all, std::size_t stride);

/// A list, for the text of an error.
struct ListEntries {
  std::size_t count = 0;
  std::function<std::uint64_t(std::size_t)> digest;
  std::function<std::string(std::size_t)> text;
};

/// Collective over `axes`, after same_lists() was false there. Throws mismatch with the same text on all
/// ranks: `average_gradients: gradient 0 is "a" (…) on dp rank 0, but "b" (…) on dp rank 1`. `what`: the
/// caller.
[[noreturn]] void throw_first_difference(std::string_view what, const DeviceMesh& axes,
                                         const ListEntries& list);

/// The comparison with an all-gather of its own. With one rank nothing happens.
void expect_same_list(std::string_view what, const DeviceMesh& axes, const ListEntries& list);
void expect_same_list(std::string_view what, const DeviceMesh& axes, std::span<const Gradient> gradients);

}  // namespace weft::dp
