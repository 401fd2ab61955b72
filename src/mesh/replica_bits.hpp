// Finds out which tensors of a list have the same bits on all ranks that hold a replica. Every rank of the
// axes learns it for all tensors and all ranks, so that all throw or none. Private to mesh and dp.
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

/// Whether the layout is over the mesh that `axes` is a part of.
bool is_over(const Layout& layout, const DeviceMesh& axes);

/// The axes of several ranks among `axes` on which a tensor is Replicate, as axes of the root. Empty for one
/// without a layout, or over another mesh.
std::vector<int> replicated_along(const LayoutRef& layout, const DeviceMesh& axes);

class ReplicaBits {
 public:
  /// `compute`: where the tensors are, and with whose threads they are read; null: the host's, by this
  /// thread.
  explicit ReplicaBits(const DeviceMesh& axes, Compute* compute = nullptr) : axes_(axes), compute_(compute) {}

  /// One more tensor, Replicate along these axes of the root. All ranks add the same ones, where a part is
  /// empty, too. Contiguous; it lives until compare() has read it.
  void add(const ConstTensorView& data, const std::vector<int>& along);
  std::size_t size() const noexcept { return tensors_.size(); }

  /// One small all-gather over the axes: compares the lists of the ranks, and one hash of all replicas along
  /// the same axes; if that differs, a second one tells the hash of each. `own`: words of the caller's
  /// that travel with the first; returns those of all ranks, those of rank r from r * own.size() on. The
  /// other arguments as in gather_with_list(); nothing is read where this rank has a fault.
  std::vector<std::uint64_t> compare(std::string_view what, const ListDigest& digest,
                                     std::span<const std::uint64_t> own,
                                     const std::function<ListEntries()>& list,
                                     const std::optional<Error>& fault);

  /// Ranks of the axes that hold the same part of tensor i: their coordinates differ along some axes only.
  const std::vector<std::vector<int>>& holders(std::size_t i) const { return tensors_[i].holders->sets; }
  /// After compare(). Whether all ranks that hold this rank's part have the same bits; whether this is so for
  /// all parts.
  bool same_here(std::size_t i) const { return same(i, tensors_[i].holders->own); }
  bool same(std::size_t i) const;
  bool same_everywhere() const noexcept { return !hashes_; }
  /// The ranks whose replica differs from most; all that hold one, where no value is held by more ranks than
  /// any other. Empty if all are the same.
  std::vector<int> drifted(std::size_t i) const;
  /// After compare(). Throws mismatch if replicas of a tensor differ: `check_replicas: "w" is Replicate on
  /// dp=3, but on dp rank 1 it has other bits; replicas of "b" differ, too`. `name`: that of tensor i.
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
  // u64, of every rank; in memory that the Context keeps for the next time. Empty: all are the same.
  Tensor hashes_;
};

}  // namespace weft
