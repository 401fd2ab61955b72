// Statistics of norms: numbers of f64 on the host, summed over ranks, and as f32 where the kernels read them. Inside nn and domain.
#pragma once

#include <algorithm>
#include <functional>
#include <vector>

#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/frame.hpp"

namespace weft::norms {

using Numbers = std::vector<double>;

/// The sums over the axes of x's mesh for which sums(axis) says so; itself where there is none. Collective among their ranks: one all-reduce.
inline Tensor summed(const Tensor& mine, const LayoutRef& x,
                     const std::function<bool(std::size_t axis)>& sums) {
  if (x == nullptr) return mine;
  const LayoutRef whole = replicated_layout(x->mesh(), mine.shape());
  Placements placements = whole->placements;
  bool any = false;
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    if (x->mesh_shape().size(static_cast<int>(axis)) == 1 || !sums(axis)) continue;
    placements[axis] = Partial{};
    any = true;
  }
  if (!any) return mine;
  return redistribute(mine.with_layout(whole->with(std::move(placements))), whole).with_layout(nullptr);
}

/// The same of numbers on the host.
inline Numbers summed(Context& context, const Numbers& mine, const LayoutRef& x,
                      const std::function<bool(std::size_t axis)>& sums) {
  if (x == nullptr) return mine;
  const Tensor part(context, {static_cast<std::int64_t>(mine.size())}, DType::f64, Memory::shared);
  std::copy(mine.begin(), mine.end(), part.as<double>().begin());
  const Tensor sum = summed(part, x, sums);
  return {sum.as<double>().begin(), sum.as<double>().end()};
}

/// f32 numbers where the kernels read them.
inline Tensor placed(Frame& frame, const Numbers& numbers) {
  Context& context = frame.compute().context();
  const Tensor here(context, {static_cast<std::int64_t>(numbers.size())});
  std::transform(numbers.begin(), numbers.end(), here.f32().begin(),
                 [](double d) { return static_cast<float>(d); });
  return to_device(context, here, frame.compute().stream());
}

inline Numbers on_host(Context& context, const Tensor& t) {
  const Tensor here = to_host(context, t);
  if (here.dtype() == DType::f64) return {here.as<double>().begin(), here.as<double>().end()};
  return {here.f32().begin(), here.f32().end()};
}

}  // namespace weft::norms
