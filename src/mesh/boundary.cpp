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

// Shard(-1) is the last dimension of the tensor at hand.
Placement resolved(const Placement& p, const Tensor& t) {
  const Shard* const shard = std::get_if<Shard>(&p);
  if (shard == nullptr || shard->dim >= 0 || t.layout() == nullptr) return p;
  return Shard{shard->dim + t.layout()->global.rank()};
}

}  // namespace

Boundary::Boundary(DeviceMesh axis, Placement from, Placement to)
    : axis_(std::move(axis)), from_(from), to_(to) {
  axis_.root_axis();  // checks that it is one
  check(axis_, from_);
  check(axis_, to_);
}

Tensor Boundary::forward(const Tensor& x, std::string_view what) const {
  expect_layout(x, axis_, resolved(from_, x), what);
  return x.layout() == nullptr ? x : redistribute(x, axis_, resolved(to_, x));
}

Tensor Boundary::backward(const Tensor& dy, std::string_view what) const {
  const Placement from = resolved(from_, dy), to = resolved(to_, dy);
  const Placement form = placement_on(dy, axis_, what);
  if (axis_.size() > 1) {
    const bool fits =
        is_shard(to) ? form == to : is_replicate(form) || (is_replicate(to) && form == Placement(Partial{}));
    if (!fits)
      throw Error(ErrorCode::layout, fmt::format("{} is {} on {}={}; expected {}, the gradient of a {}", what,
                                                 to_string(form), axis_.name(), axis_.size(),
                                                 is_shard(to)       ? to_string(to)
                                                 : is_replicate(to) ? "Replicate or Partial(sum)"
                                                                    : "Replicate",
                                                 to_string(to)));
  }
  if (dy.layout() == nullptr) return dy;
  return redistribute(dy, axis_, is_shard(from) ? from : Placement(Replicate{}));
}

}  // namespace weft
