// The tensors of a training step as lines that runs on different meshes can compare: each line has a hash of
// a tensor's global content, by global index. `weft train --hash-every` writes them, `weft parity --exact`
// reads them.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::tools {

/// A tensor in a step.
struct ContentName {
  std::int64_t step = 0;
  std::string kind,
      path;  ///< "activation", "gradient", "parameter" or "state"; a module's or parameter's path
  friend bool operator==(const ContentName&, const ContentName&) = default;
};

/// "step 3 gradient layers.0.mlp.up_proj.weight 9f86d081884c7d65". Collective: gathers the tensor.
std::string content_line(const ContentName& name, const Tensor& tensor);

/// All elements as bits, in hexadecimal, after a line "ranks …" with the boxes that the ranks hold: for a
/// report on one tensor. Collective.
std::string content_values(const Tensor& tensor);

/// The losses, norms and hashes of a run.
struct RunContents {
  std::vector<double> losses, norms;  ///< by step
  struct Hash {
    ContentName name;
    std::string hash;
  };
  std::vector<Hash> hashes;  ///< in the order of the run
};
/// Reads lines of content_line(). Throws bad_argument that begins with `where`.
std::vector<RunContents::Hash> read_contents(const std::string& text, const std::string& where);

/// The first thing in which two runs of equally many steps differ; nothing if all bits are equal.
struct ContentDifference {
  std::int64_t step;
  std::string what;  ///< "the loss", "the gradient norm", or empty: a tensor
  std::optional<ContentName> tensor;
};
std::optional<ContentDifference> first_difference(const RunContents& a, const RunContents& b);

/// How content_values() of two runs differ: `element (3, 5) of (64, 48): 3e99999a and 3e99999b; 7 of 3072
/// elements differ; on rank 1 of the first, on ranks 0 and 2 of the second`. Empty if they do not.
std::string value_difference(const std::string& a, const std::string& b, const std::string& where);

}  // namespace weft::tools
