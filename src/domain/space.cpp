#include "domain/space.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft::domain {

Parts parts_of(const LayoutRef& layout, int dim) {
  const Partition partition(layout);
  const PartitionDim of = partition.dim(dim);
  Parts parts{dim, layout->global[dim], {}, partition.part(dim)};
  for (const IndexRanges& part : of.parts) parts.ranges.push_back(part.empty() ? IndexRange{} : part.front());
  return parts;
}

bool cut_in_space(const LayoutRef& layout) {
  if (layout == nullptr) return false;
  for (int a = 0; a < layout->mesh_shape().axis_count(); ++a) {
    const Placement& p = layout->placements[static_cast<std::size_t>(a)];
    if (layout->mesh_shape().size(a) > 1 && (is_shard(p, kHeight) || is_shard(p, kWidth))) return true;
  }
  return false;
}

WindowDim window_for(const Parts& parts, const std::function<IndexRange(const IndexRange&)>& wanted,
                     const Edge& edge) {
  std::vector<IndexRange> ranges;
  for (const IndexRange& part : parts.ranges) ranges.push_back(wanted(part));
  return WindowDim::ranges(parts.dim, ranges, edge);
}

IndexRanges as_ranges(const std::vector<std::int64_t>& ascending) {
  IndexRanges ranges;
  for (const std::int64_t i : ascending) {
    if (ranges.empty() || ranges.back().hi != i)
      ranges.push_back({i, i + 1});
    else
      ++ranges.back().hi;
  }
  return ranges;
}

Edge edge_of(kernels::Padding padding) {
  switch (padding) {
    case kernels::Padding::zeros: return Edge::zero();
    case kernels::Padding::reflect: return Edge::reflect();
    case kernels::Padding::replicate: return Edge::replicate();
    case kernels::Padding::circular: return Edge::periodic();
  }
  return Edge::none();
}

LayoutRef like(const LayoutRef& x, std::int64_t channels, std::int64_t height, std::int64_t width) {
  return x->with_global({x->global[0], channels, height, width});
}

Tensor as_samples(const Tensor& local, const LayoutRef& x) {
  Shape global = local.shape();
  Placements placements(x->placements.size(), Replicate{});
  for (std::size_t a = 0; a < placements.size(); ++a) {
    const Placement& p = x->placements[a];
    if (!is_shard(p)) {
      placements[a] = p;
      continue;
    }
    const int size = x->mesh_shape().size(static_cast<int>(a)), dim = std::get<Shard>(p).dim;
    if (dim == 1) {
      placements[a] = p;
      global[1] = x->global[1];
    } else {
      placements[a] = Shard{0};
      global[0] *= size;
    }
  }
  return local.with_layout(make_layout(x->mesh(), std::move(placements), global));
}

Tensors MapPasses::forward(Module& module, Inputs inputs, Frame& frame) const {
  if (inputs.size() == 1 && inputs[0].layout() == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("{} is a plain tensor; on {} it needs a layout (shard_spatial gives it one)",
                            layouts::named(module, "x").text(), to_string(axes_.shape())));
  const bool cut = inputs.size() == 1 && cut_in_space(inputs[0].layout());
  Tensors y = cut ? forward_cut(module, inputs[0], frame) : own_forward(module, inputs, frame);
  if (cut) y[0] = weft::cast(frame, y[0], inputs[0].dtype());
  // Backward needs this to do the same as forward, whatever dy is.
  if (frame.keeps()) frame.push(module, cut ? Tensors{maps::shape_alone(frame, inputs[0])} : Tensors{});
  return y;
}

Tensors MapPasses::backward(Module& module, Inputs gradients, Frame& frame) const {
  const Tensors of_x = frame.pop(module);
  if (of_x.empty()) return own_backward(module, gradients, frame);
  if (gradients.size() != 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": got {} gradients; expected 1", module.path(), gradients.size()));
  const Tensor dx = backward_cut(module, gradients[0], of_x[0].layout(), frame)[0];
  return {weft::cast(frame, dx, gradients[0].dtype())};
}

}  // namespace weft::domain
