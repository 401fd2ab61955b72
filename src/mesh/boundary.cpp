#include "weft/mesh/boundary.hpp"

#include <fmt/format.h>

#include "weft/base/error.hpp"

namespace weft {

namespace {

void check(const DeviceMesh& axis, const Placement& p) {
  if (const Partial* partial = std::get_if<Partial>(&p); partial != nullptr && partial->op != ReduceOp::sum)
    throw Error(ErrorCode::layout,
                fmt::format("boundary: {} on {}; only a sum has this adjoint", to_string(p), axis.name()));
}

}  // namespace

Boundary::Boundary(DeviceMesh axis, Placement from, Placement to)
    : axis_(std::move(axis)), from_(from), to_(to) {
  axis_.root_axis();  // checks that it is one
  check(axis_, from_);
  check(axis_, to_);
}

Tensor Boundary::forward(const Tensor& x, std::string_view what) const {
  expect_layout(x, axis_, from_, what);
  return x.layout() == nullptr ? x : redistribute(x, axis_, to_);
}

Tensor Boundary::backward(const Tensor& dy, std::string_view what) const {
  const Placement form = placement_on(dy, axis_, what);
  if (axis_.size() > 1) {
    const bool fits = is_shard(to_)
                          ? form == to_
                          : is_replicate(form) || (is_replicate(to_) && form == Placement(Partial{}));
    if (!fits)
      throw Error(ErrorCode::layout, fmt::format("{} is {} on {}={}; expected {}, the gradient of a {}", what,
                                                 to_string(form), axis_.name(), axis_.size(),
                                                 is_shard(to_)       ? to_string(to_)
                                                 : is_replicate(to_) ? "Replicate or Partial(sum)"
                                                                     : "Replicate",
                                                 to_string(to_)));
  }
  if (dy.layout() == nullptr) return dy;
  return redistribute(dy, axis_, is_shard(from_) ? from_ : Placement(Replicate{}));
}

}  // namespace weft
