// The gradients that each rank has not given. Every rank reports its list to all ranks, so that either all
// ranks throw or none does. Collective over the ranks of the axes. Private to dp and train.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

#include "weft/mesh/mesh.hpp"

namespace weft::dp {

/// The wording of the error: `<lacks> "b" on dp rank 0; "b", "c" on dp rank 1; <options>::unused = zeros lets
/// such ranks contribute zeros`.
struct MissingText {
  std::string_view lacks;    ///< "bucket_reducer: ready() was not called for"
  std::string_view options;  ///< "BucketOptions"
};

/// Throws bad_argument on all ranks if any rank lacks a gradient. ranks() gives those ranks. `missing`:
/// indices below `count` on this rank. `name_of(i)`: the name of gradient i. Every rank sends one bit per
/// gradient. `group`: a group of the same ranks. Null: the group of the axes.
void expect_none_missing(const MissingText& text, const DeviceMesh& axes, std::size_t count,
                         const std::vector<std::size_t>& missing,
                         const std::function<std::string_view(std::size_t)>& name_of,
                         ProcessGroup* group = nullptr);

}  // namespace weft::dp
