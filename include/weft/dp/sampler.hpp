// Determines which samples make up each global batch, and which of these samples a rank reads. Pure
// arithmetic, any thread.
#pragma once

#include <cstdint>
#include <vector>

#include "weft/mesh/layout.hpp"

namespace weft {

/// A shuffled walk through `population` samples, without repeats within a round (epoch). It is a pure
/// function of (seed, step), so a program need save only the step. The global batch is the same for any
/// number of data ranks. Each data rank reads a contiguous part of it. Only the coordinate on the data axis
/// decides which part. So tensor-parallel peers read the same samples.
///
/// With up to 64 samples, all orders of a round are equally likely: the order is drawn without replacement
/// (R. Fisher, F. Yates; R. Durstenfeld, "Algorithm 235: Random Permutation", 1964), again for each batch,
/// which takes some microseconds. With more samples, a sample's number passes through a Feistel network until
/// the result falls into the range (J. Black, P. Rogaway, "Ciphers with Arbitrary Finite Domains", CT-RSA
/// 2002). This needs no table, works for any population, and gives orders that cannot be distinguished from
/// equally likely orders.
class Sampler {
 public:
  /// `axis`: the data axis. Throws bad_argument if the axis is empty, if a size is not positive, or if the
  /// batch has fewer samples than the axis has ranks: `sampler: a global batch of 3 leaves some of 4 data
  /// ranks without a sample`.
  Sampler(const DeviceMesh& axis, std::int64_t population, std::int64_t global_batch, std::uint64_t seed);
  /// A sampler without a mesh, for part `index` of `parts`.
  Sampler(int parts, int index, std::int64_t population, std::int64_t global_batch, std::uint64_t seed);

  /// The sample numbers of the global batch of a step, and of this rank's part of it. Throw bad_argument for
  /// a step below 0, or if the last sample of the step would be beyond number 2^63 of the walk.
  std::vector<std::int64_t> global_batch(std::int64_t step) const;
  std::vector<std::int64_t> local_batch(std::int64_t step) const;
  /// The place of this rank's part in the global batch.
  Chunk part() const noexcept { return part_; }

 private:
  std::vector<std::int64_t> batch(std::int64_t step, Chunk of) const;
  std::int64_t sample(std::int64_t position) const;
  std::vector<std::int64_t> shuffled(std::uint64_t round) const;
  std::int64_t population_, global_batch_;
  std::uint64_t seed_;
  Chunk part_;
  int half_bits_;  // the network permutes numbers of 2 * half_bits_ bits
};

}  // namespace weft
