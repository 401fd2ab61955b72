// Determines which gradients are equal on all ranks that hold a replica, and how far the other gradients are
// from their average. Every rank of the axes receives the result for all gradients and all ranks. So either
// all ranks throw or none does. Private to dp.
#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "mesh/pieces.hpp"
#include "mesh/replica_bits.hpp"
#include "weft/dp/gradient.hpp"
#include "weft/dp/reduce_gradients.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft::dp {

class Replicas {
 public:
  Replicas(const DeviceMesh& axes, Compute* compute) : axes_(axes), bits_(axes, compute) {}

  /// Declares that gradient `index` of the given gradients is Replicate on the axes `along`, given by their
  /// numbers in the root mesh, among the axes of this mesh. All ranks must add the same gradients, including
  /// gradients that are empty on them.
  void add(const Gradient& gradient, std::size_t index, const std::vector<int>& along);
  /// Uses one small all-gather over the axes. It compares the lists of all gradients, the options, and a hash
  /// of the replicas. If the hash differs, a second all-gather finds out which gradient differs. Throws
  /// mismatch if the ranks gave different lists or options. `data`: the data axes, one bit for each among the
  /// axes of the mesh. `what`: the caller, for this error and the errors below. `fault`: as in
  /// gather_with_list().
  void compare_bits(const ReduceOptions& options, std::uint64_t data, const char* what,
                    std::span<const Gradient> gradients, const std::optional<Error>& fault);

  /// Returns whether all bits are equal on all ranks that hold the replica that this rank has of gradient
  /// `index`.
  bool same_here(std::size_t index) const;
  bool same_everywhere() const { return bits_.same_everywhere(); }

  /// Throws mismatch that names the first gradient whose replicas have different bits, and the ranks that
  /// drifted.
  [[noreturn]] void throw_other_bits() const;
  /// Throws mismatch if one replica is not finite but another is, or if a replica is too far from the
  /// average. `averages`, by the index of the gradient: the averages of the replicas that are not equal here.
  /// Uses one all-gather over the axes.
  void expect_no_drift(const ReduceOptions& options, const std::map<std::size_t, TensorView>& averages) const;

 private:
  struct Replica {
    const Gradient* gradient;
    std::size_t index;  // among the gradients given, ascending
    std::vector<int> along;
  };
  void expect_same_options(const std::vector<std::uint64_t>& all) const;
  [[noreturn]] void throw_drift(const Replica& replica, const std::vector<int>& ranks,
                                const std::string& how) const;

  DeviceMesh axes_;
  const char* what_ = "";
  ReplicaBits bits_;
  Pieces<Replica> replicas_;  // in the order of bits_
};

}  // namespace weft::dp
