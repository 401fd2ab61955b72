// Which gradients are the same on all ranks that hold a replica, and how far the others are from their average.
// Every rank of the axes learns it of all gradients and all ranks, so that all throw or none. Private to dp.
#pragma once

#include <cstddef>
#include <map>
#include <span>
#include <string>
#include <vector>

#include "weft/dp/gradient.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::dp {

class Replicas {
 public:
  explicit Replicas(const DeviceMesh& axes) : axes_(axes) {}

  /// Gradient `index` of those given is Replicate on the axes `along`, among those of the mesh. All ranks add the
  /// same, where a gradient is empty, too.
  void add(const Gradient& gradient, std::size_t index, const std::vector<std::string>& along);
  /// One all-gather over the axes, of a hash of each replica; none where there are no replicas. Throws mismatch
  /// where the ranks gave different options.
  void compare_bits(const SyncOptions& options);

  /// Whether all bits are the same on all ranks that hold the replica that this rank has of gradient `index`.
  bool same_here(std::size_t index) const;
  bool same_everywhere() const;

  /// Throws mismatch naming the first gradient whose replicas have different bits, and the ranks whose replica
  /// differs from most; all that hold one, where no value is held by more ranks than any other.
  [[noreturn]] void throw_other_bits() const;
  /// Throws mismatch where a replica is not finite though another is, or too far from the average: `averages`, by
  /// the index of the gradient, of the replicas that are not the same here. One all-gather over the axes.
  void expect_no_drift(const SyncOptions& options, const std::map<std::size_t, TensorView>& averages) const;

 private:
  // Ranks of the axes that hold the same part of a gradient: their coordinates differ along some axes only.
  struct Holders {
    std::vector<std::vector<int>> sets;
    std::size_t own = 0;  // the set that this rank is in
  };
  struct Replica {
    const Gradient* gradient;
    std::vector<std::string> along;
    const Holders* holders;
    std::vector<bool> same;  // for each set of holders
  };

  const Holders& holders(const std::vector<std::string>& along);
  std::uint64_t hash_of_rank(int rank, std::size_t position) const;
  [[noreturn]] void throw_drift(const Replica& replica, const std::vector<int>& ranks,
                                const std::string& how) const;

  DeviceMesh axes_;
  std::map<std::vector<std::string>, Holders> holders_;
  std::map<std::size_t, Replica> replicas_;  // by the index of the gradient
  std::vector<std::uint64_t> hashes_;        // of every rank, in the order of replicas_
};

}  // namespace weft::dp
