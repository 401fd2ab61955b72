// Functions that move a tensor on one axis of a mesh, or reduce it over several axes. Each begins a call and
// returns the tensor later. A move within this rank's memory is completed at once.
#pragma once

#include <vector>

#include "mesh/cut.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// A call in flight, the memory that it uses, and the work that follows it.
class Move {
 public:
  Move() = default;
  /// A Move that is already done.
  explicit Move(Tensor ready) : out_(std::move(ready)) {}
  bool done() { return !work_.valid() || work_.done(); }
  Tensor finish();

 private:
  friend class Moves;
  enum class After : unsigned char { nothing, unpack_gathered, drop_padding, unpack_exchanged };
  Tensor in_, blocks_, out_;
  DeviceMesh axis_;
  Cut cut_;
  int dim_ = 0;
  After after_ = After::nothing;
  Work work_;  // last: it ends before the memory goes
};

/// `cut`: how the axis shards dimension `dim`, which the axes inside it do not shard. `tag`: the tag of the
/// collective, which compares it.
class Moves {
 public:
  /// Replicate → Shard(dim).
  static Move slice(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut);
  /// Shard(dim) → Replicate.
  static Move gather(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, int tag);
  /// Partial(op) → Shard(dim).
  static Move reduce_scatter(const Tensor& in, const DeviceMesh& axis, int dim, const Cut& cut, ReduceOp op,
                             int tag);
  /// Shard(from) → Shard(to), without ever holding the whole tensor.
  static Move exchange(const Tensor& in, const DeviceMesh& axis, int from, const Cut& from_cut, int to,
                       const Cut& to_cut, int tag);
  /// Partial(op) → Replicate, over one axis or several.
  static Move all_reduce(const Tensor& in, const DeviceMesh& axes, ReduceOp op, int tag);
  /// Replicate → Partial(op): gives each rank a contribution, so that the contributions combine to the value.
  static Move contribute(const Tensor& in, const DeviceMesh& axis, ReduceOp op);
};

}  // namespace weft
