// The gradients that each rank has not given: every rank reports them to all, so that all ranks throw or
// none. Collective among the ranks of the axes. Private to dp and train.
#pragma once

#include <cstddef>
#include <functional>
#include <string_view>
#include <vector>

#include "weft/mesh/mesh.hpp"

namespace weft::dp {

/// How the error is worded: `<lacks> "b" on dp rank 0; "b", "c" on dp rank 1; <options>::unused = zeros lets
/// such ranks contribute zeros`.
struct MissingText {
  std::string_view lacks;    ///< "bucket_reducer: nobody made ready"
  std::string_view options;  ///< "BucketOptions"
};

/// Throws bad_argument on all ranks where one of them lacks a gradient; ranks() are those. `missing`: indices
/// below `count` on this rank; `name_of(i)`: of gradient i. One bit per gradient from every rank. `group`: of
/// the same ranks; null: that of the axes.
void expect_none_missing(const MissingText& text, const DeviceMesh& axes, std::size_t count,
                         const std::vector<std::size_t>& missing,
                         const std::function<std::string_view(std::size_t)>& name_of,
                         ProcessGroup* group = nullptr);

}  // namespace weft::dp
