// Determines which tensors of a list have equal bits on all ranks that hold a replica. Every rank of the axes
// receives the result for all tensors and all ranks. So either all ranks throw or none does. Private to mesh
// and dp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <optional>
#include <span>
#include <string_view>
#include <vector>

#include "mesh/pieces.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/tensor.hpp"
#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// Returns whether the layout is over the mesh to which `axes` belongs.
bool is_over(const Layout& layout, const DeviceMesh& axes);

/// The axes of several ranks, among `axes`, on which a tensor is Replicate; as axes of the root. Empty for a
/// tensor without a layout, or over another mesh.
std::vector<int> replicated_along(const LayoutRef& layout, const DeviceMesh& axes);

class ReplicaBits {
 public:
  /// `compute`: the device of the tensors, and the threads that read them; null: the host, and this thread.
  explicit ReplicaBits(const DeviceMesh& axes, Compute* compute = nullptr) : axes_(axes), compute_(compute) {}

  /// Adds a tensor that is Replicate along these axes of the root. All ranks must add the same tensors,
  /// including tensors whose part is empty on them. The tensor must be contiguous. The caller must keep it
  /// alive until compare() has read it.
  void add(const ConstTensorView& data, const std::vector<int>& along);
  std::size_t size() const noexcept { return tensors_.size(); }

  /// Uses one small all-gather over the axes: it compares the lists of the ranks, and one hash of all
  /// replicas along the same axes. If the hash differs, a second all-gather exchanges the hash of each
  /// tensor. `own`: words of the caller that travel with the first all-gather. Returns the words of all
  /// ranks, those of rank r from r * own.size() on. The other arguments are as in gather_with_list(). Nothing
  /// is read if this rank has a fault.
  std::vector<std::uint64_t> compare(std::string_view what, const ListDigest& digest,
                                     std::span<const std::uint64_t> own,
                                     const std::function<ListEntries()>& list,
                                     const std::optional<Error>& fault);

  /// The ranks of the axes that hold the same part of tensor i: only their coordinates along some axes
  /// differ.
  const std::vector<std::vector<int>>& holders(std::size_t i) const { return tensors_[i].holders->sets; }
  /// Call it after compare(). same_here() returns whether all ranks that hold this rank's part have equal
  /// bits. same() returns whether this is so for all parts.
  bool same_here(std::size_t i) const { return same(i, tensors_[i].holders->own); }
  bool same(std::size_t i) const;
  bool same_everywhere() const noexcept { return !hashes_; }
  /// The ranks whose replica differs from most replicas. If no value is held by more ranks than any other
  /// value, all ranks that hold a replica. Empty if all replicas are equal.
  std::vector<int> drifted(std::size_t i) const;
  /// Call it after compare(). Throws mismatch if replicas of a tensor differ: `check_replicas: "w" is
  /// Replicate on dp=3, but on dp rank 1 it has other bits; replicas of "b" differ, too`. `name(i)`: the name
  /// of tensor i.
  void expect_same(std::string_view what, const std::function<std::string_view(std::size_t)>& name) const;

 private:
  struct Holders {
    std::vector<int> along;  // axes of the root
    std::vector<std::vector<int>> sets;
    std::size_t own = 0;  // the set that this rank is in
  };
  struct Replica {
    const std::byte* data;
    std::int64_t bytes;
    const Holders* holders;
    std::uint64_t hash = 0;
  };
  struct Block;
  void hash_all();
  void hash_blocks(std::span<Block> blocks, Tensor& staging) const;
  const Holders& holders_along(const std::vector<int>& along);
  bool same(std::size_t i, std::size_t set) const;
  std::uint64_t hash_of_rank(int rank, std::size_t i) const {
    return hashes_.as<std::uint64_t>()[static_cast<std::size_t>(rank) * tensors_.size() + i];
  }

  DeviceMesh axes_;
  Compute* compute_;
  std::map<std::vector<int>, Holders> holders_;
  Pieces<Replica> tensors_;
  // u64, of every rank; in memory that the Context keeps for the next time. Empty if all are equal.
  Tensor hashes_;
};

}  // namespace weft
