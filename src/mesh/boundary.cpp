#include "weft/mesh/boundary.hpp"

#include <fmt/format.h>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft {

namespace {

void check(const DeviceMesh& axes, const Placement& p) {
  if (const Partial* partial = std::get_if<Partial>(&p); partial != nullptr && partial->op != ReduceOp::sum)
    throw Error(ErrorCode::layout,
                fmt::format("boundary: {} on {}; only a sum has this adjoint", to_string(p), axes.name()));
}

// Shard(-1) means the last dimension of the tensor at hand.
Placement resolved(const Placement& p, const LayoutRef& layout) {
  const Shard* const shard = std::get_if<Shard>(&p);
  if (shard == nullptr || shard->dim >= 0 || layout == nullptr) return p;
  return Shard{shard->dim + layout->global.rank()};
}

}  // namespace

RedistributeBoundary::RedistributeBoundary(DeviceMesh axes, Placement from, Placement to)
    : axes_(given_mesh("boundary", axes)), from_(from), to_(to) {
  check(axes_, from_);
  check(axes_, to_);
}

Transfer RedistributeBoundary::start_forward(const Tensor& x, const TensorName& what) const {
  expect_layout(x, axes_, resolved(from_, x.layout()), what);
  return x.layout() == nullptr ? Transfer(x) : start_redistribute(x, axes_, resolved(to_, x.layout()));
}

LayoutRef RedistributeBoundary::out_layout(const LayoutRef& in, const TensorName& what) const {
  expect_layout(in, axes_, resolved(from_, in), what);
  return in == nullptr ? in : in->with(axes_, resolved(to_, in));
}

Transfer RedistributeBoundary::start_backward(const Tensor& dy, const TensorName& what) const {
  const Placement from = resolved(from_, dy.layout()), to = resolved(to_, dy.layout());
  if (axes_.size() > 1) {
    const Placement form = placement_on(dy.layout(), axes_, what);
    const bool fits =
        is_shard(to) ? form == to : is_replicate(form) || (is_replicate(to) && form == Placement(Partial{}));
    if (!fits)
      throw Error(ErrorCode::layout, fmt::format("{} is {} on {}={}; expected {}, the gradient of a {}",
                                                 what.text(), to_string(form), axes_.name(), axes_.size(),
                                                 is_shard(to)       ? to_string(to)
                                                 : is_replicate(to) ? "Replicate or Partial(sum)"
                                                                    : "Replicate",
                                                 to_string(to)));
    if (is_shard(to)) expect_layout(dy.layout(), axes_, to, what);  // the nesting, too
  }
  if (dy.layout() == nullptr) return Transfer(dy);
  return start_redistribute(dy, axes_, is_shard(from) ? from : Placement(Replicate{}));
}

namespace boundary {

BoundaryRef enter(const DeviceMesh& axes) {
  return std::make_shared<RedistributeBoundary>(axes, Replicate{}, Replicate{});
}
BoundaryRef leave(const DeviceMesh& axes) {
  return std::make_shared<RedistributeBoundary>(axes, Partial{}, Replicate{});
}
BoundaryRef gather(const DeviceMesh& axes, int dim) {
  return std::make_shared<RedistributeBoundary>(axes, Shard{dim}, Replicate{});
}
BoundaryRef scatter(const DeviceMesh& axes, int dim, const Placement& from) {
  return std::make_shared<RedistributeBoundary>(axes, from, Shard{dim});
}

}  // namespace boundary

}  // namespace weft
