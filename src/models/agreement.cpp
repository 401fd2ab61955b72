#include "models/agreement.hpp"

#include <algorithm>
#include <span>

#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {
namespace {

Tensor on_device(Compute& compute, const Numbers& numbers) {
  const Tensor own(compute.context(), {static_cast<std::int64_t>(numbers.size())}, DType::i64);
  std::copy(numbers.begin(), numbers.end(), own.as<std::int64_t>().begin());
  return to_device(compute.context(), own, compute.stream());
}
Numbers on_host(Compute& compute, const Tensor& numbers) {
  const Tensor here = to_host(compute.context(), numbers);
  const std::span<std::int64_t> values = here.as<std::int64_t>();
  return {values.begin(), values.end()};
}

}  // namespace

Numbers least_of(Compute& compute, const DeviceMesh& axes, const Numbers& numbers) {
  if (axes.size() == 1) return numbers;
  const Tensor own = on_device(compute, numbers);
  const LayoutRef each = replicated_layout(axes, own.shape())->with(axes, Partial{ReduceOp::min});
  return on_host(compute, redistribute(own.with_layout(each), axes, Replicate{}));
}

Numbers gathered(Compute& compute, const DeviceMesh& axes, const Numbers& numbers) {
  if (axes.size() == 1) return numbers;
  const Tensor own = on_device(compute, numbers);
  const LayoutRef parts = replicated_layout(axes, {own.count() * axes.size()})->with(axes, Shard{0});
  return on_host(compute, redistribute(own.with_layout(parts), axes, Replicate{}));
}

}  // namespace weft
