// The tensors of all stages of a pipeline as one list for a checkpoint. Private to train.
#pragma once

#include <cstddef>
#include <span>
#include <string>
#include <vector>

#include "weft/mesh/mesh.hpp"
#include "weft/mesh/named_view.hpp"

namespace weft {

/// A checkpoint wants one list of tensors on all ranks, each with a layout over the whole mesh; a tensor of a
/// stage lies on one coordinate of the axis of the stages alone. So each tensor is divided over this axis,
/// inside the part of its rank: then all ranks have the same list, and as much of it as of their own stages.
class StageTensors {
 public:
  /// `own`: the tensors of this rank's stages, with layouts over the root of `stages`, Replicate on `stages`.
  /// Stages may have equal tensors of one name, those of tied weights: the list has them once, from the first
  /// rank that has them. Collective over `stages`: a rank without a list of its own must not leave the others
  /// waiting here. Throws bad_argument, on all ranks, if two stages have
  /// tensors of one name that differ in dtype or layout.
  StageTensors(const DeviceMesh& stages, std::span<const MutableNamedView> own);

  /// This rank's parts of the tensors of all stages.
  std::vector<MutableNamedView> views();
  /// Fill the parts from the stages' own tensors, and these from the parts. Collective over the axis.
  void spread();
  void collect();

 private:
  struct Item {
    std::string name;
    DType dtype;
    int owner;
    std::byte* own;                    // null on ranks of other stages
    LayoutRef whole, divided;          // the layout on the owner; that in the checkpoint
    std::vector<std::int64_t> counts;  // elements on each rank of the axis; empty: all have all of it
    std::vector<std::byte> part{};
  };
  std::int64_t count(const Item& item) const { return item.whole->local_shape().count(); }
  DeviceMesh stages_;
  std::vector<Item> items_;
};

}  // namespace weft
