#include <fmt/format.h>
#include <fmt/ranges.h>

#include <string>
#include <vector>

#include "nn/kind_of.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/exact.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse_exact(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "exact: " + text);
}

bool divides_blocks(int ranks) { return ranks >= 1 && kExactBlocks % ranks == 0; }

// The axes that cut dimension `dim` of a parameter, and how many ranks they have.
struct Cutting {
  std::vector<std::string> axes;
  int ranks = 1;
};
Cutting cutting(const Layout& layout, int dim) {
  Cutting c;
  for (int axis = 0; axis < layout.mesh_shape().axis_count(); ++axis)
    if (layout.mesh_shape().size(axis) > 1 &&
        is_shard(layout.placements[static_cast<std::size_t>(axis)], dim)) {
      c.axes.push_back(fmt::format("{}={}", layout.mesh_shape().name(axis), layout.mesh_shape().size(axis)));
      c.ranks *= layout.mesh_shape().size(axis);
    }
  return c;
}

void expect_parameter(const Parameter& p) {
  if (p.holders() > 1)
    refuse_exact(
        fmt::format("\"{}\" is used by {} modules, whose gradients are added before the ranks add "
                    "theirs; there is no rule for that",
                    p.path(), p.holders()));
  if (p.layout() == nullptr) return;
  for (int dim = 0; dim < p.global_shape().rank(); ++dim)
    if (const Cutting c = cutting(*p.layout(), dim); c.ranks > 1)
      expect_exact_parts(fmt::format("\"{}\": dimension {} over {}", p.path(), dim, fmt::join(c.axes, " x ")),
                         p.global_shape()[dim], c.ranks);
}

}  // namespace

void expect_exact_parts(std::string_view what, std::int64_t size, int ranks) {
  if (!divides_blocks(ranks))
    refuse_exact(fmt::format("{}: {} ranks do not divide {} blocks", what, ranks, kExactBlocks));
  if (size % ranks != 0)
    refuse_exact(fmt::format("{}: {} over {} ranks ({} = {} x {} + {}); expected equal parts", what, size,
                             ranks, size, ranks, size / ranks, size % ranks));
}

void expect_exact(Module& root, const DeviceMesh& mesh) {
  for (const DeviceMesh& axis : mesh.each_axis())
    if (!divides_blocks(axis.size()))
      refuse_exact(fmt::format("{}={} does not divide {} blocks", axis.name(), axis.size(), kExactBlocks));
  root.visit([](Module& module) {
    if (!module.has_exact_rule())
      refuse_exact(fmt::format("\"{}\" is of kind {}, which has no rule for exact mode", module.path(),
                               kind_of(module)));
    if (module.passes() != nullptr)
      if (const std::string why = module.passes()->exact_refusal(); !why.empty())
        refuse_exact(fmt::format("\"{}\" {}", module.path(), why));
    for (const auto& [name, parameter] : module.own_parameters()) expect_parameter(*parameter);
  });
}

}  // namespace weft
