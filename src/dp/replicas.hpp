// Which gradients are the same on all ranks that hold a replica, and how far the others are from their
// average. Every rank of the axes learns it of all gradients and all ranks, so that all throw or none.
// Private to dp.
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

  /// Gradient `index` of those given is Replicate on the axes `along`, by their numbers in the root, among
  /// those of the mesh. All ranks add the same, where a gradient is empty, too.
  void add(const Gradient& gradient, std::size_t index, const std::vector<int>& along);
  /// One small all-gather over the axes: compares the lists of all gradients, the options, and a hash of the
  /// replicas; if that differs, a second one finds out which. Throws mismatch if the ranks gave
  /// different lists or options. `data`: the data axes, a bit for each among those of the mesh; `what`: the
  /// caller, for this error and those below; `fault`: as in gather_with_list().
  void compare_bits(const ReduceOptions& options, std::uint64_t data, const char* what,
                    std::span<const Gradient> gradients, const std::optional<Error>& fault);

  /// Whether all bits are the same on all ranks that hold the replica that this rank has of gradient `index`.
  bool same_here(std::size_t index) const;
  bool same_everywhere() const { return bits_.same_everywhere(); }

  /// Throws mismatch naming the first gradient whose replicas have different bits, and the ranks that
  /// drifted.
  [[noreturn]] void throw_other_bits() const;
  /// Throws mismatch if a replica is not finite though another is, or too far from the average:
  /// `averages`, by the index of the gradient, of the replicas that are not the same here. One all-gather
  /// over the axes.
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
