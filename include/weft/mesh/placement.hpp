// The parts of a tensor that the ranks of one mesh axis hold. Values; any thread.
#pragma once

#include <string>
#include <variant>
#include <vector>

#include "weft/base/chunk.hpp"
#include "weft/base/op.hpp"

namespace weft {

/// Every rank of the axis holds the same elements.
struct Replicate {
  friend bool operator==(const Replicate&, const Replicate&) = default;
};
/// Dimension `dim` is cut into as many parts as the axis has ranks. Chunk gives their sizes.
struct Shard {
  int dim = 0;
  friend bool operator==(const Shard&, const Shard&) = default;
};
/// Each rank holds a contribution of full size. The value is their combination by `op`.
struct Partial {
  ReduceOp op = ReduceOp::sum;
  friend bool operator==(const Partial&, const Partial&) = default;
};
using Placement = std::variant<Replicate, Shard, Partial>;
/// One per axis of the root mesh, in its order.
using Placements = std::vector<Placement>;

inline bool is_replicate(const Placement& p) noexcept { return std::holds_alternative<Replicate>(p); }
inline bool is_partial(const Placement& p) noexcept { return std::holds_alternative<Partial>(p); }
inline bool is_shard(const Placement& p) noexcept { return std::holds_alternative<Shard>(p); }
inline bool is_shard(const Placement& p, int dim) noexcept { return p == Placement(Shard{dim}); }

/// "Replicate", "Shard(1)", "Partial(sum)"
std::string to_string(const Placement& placement);
/// "[Shard(0), Replicate]"
std::string to_string(const Placements& placements);

}  // namespace weft
