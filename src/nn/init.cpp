#include "weft/nn/init.hpp"

#include <algorithm>
#include <type_traits>

#include "weft/base/random.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {
namespace {

// Normal numbers for one box of the global tensor, row by row of its last dimension. Each row is a run of the
// stream that begins at the row's global index. `local`, `at`: the shape of what this rank holds, and where the
// box begins in it.
void fill_box(const RandomStream& stream, const Normal& how, const Shape& global, const Box& box,
              float* value, const Shape& local, const Dims& at) {
  if (box.shape.count() == 0) return;
  const int dims = local.rank();
  const std::int64_t row = dims == 0 ? 1 : box.shape.back();
  for (std::int64_t r = 0; r < box.shape.count() / row; ++r) {
    std::int64_t rest = r, stride = dims == 0 ? 1 : global.back(),
                 local_stride = dims == 0 ? 1 : local.back();
    std::int64_t start = dims == 0 ? 0 : box.offset[dims - 1];  // the row's global index
    std::int64_t place = dims == 0 ? 0 : at[dims - 1];          // and its place in the local part
    for (int d = dims - 2; d >= 0; --d) {
      start += (rest % box.shape[d] + box.offset[d]) * stride;
      place += (rest % box.shape[d] + at[d]) * local_stride;
      rest /= box.shape[d];
      stride *= global[d];
      local_stride *= local[d];
    }
    float* const out = value + place;
    stream.normal(static_cast<std::uint64_t>(start), row, out);
    for (std::int64_t i = 0; i < row; ++i)
      out[i] = static_cast<float>(how.mean + how.std * static_cast<double>(out[i]));
  }
}

void fill_normal(const Parameter& p, const Tensor& value, const Normal& how, std::uint64_t seed) {
  const RandomStream stream(seed, p.path());
  Dims at = p.global_shape();
  for (int d = 0; d < at.rank(); ++d) at[d] = 0;
  const LayoutRef& layout = value.layout();
  if (layout == nullptr) {
    fill_box(stream, how, p.global_shape(), {at, p.global_shape()}, value.f32().data(), value.shape(), at);
    return;
  }
  for (const Box& box : layout->parts()) {
    fill_box(stream, how, p.global_shape(), box, value.f32().data(), value.shape(), at);
    if (!layout->segments.sizes.empty()) at[layout->segments.dim] += box.shape[layout->segments.dim];
  }
}

}  // namespace

void initialise(Parameter& p, std::uint64_t seed) {
  const Tensor& value = p.value();
  std::visit(
      [&](const auto& how) {
        using How = std::decay_t<decltype(how)>;
        if constexpr (std::is_same_v<How, Constant>)
          std::fill_n(value.f32().data(), value.count(), static_cast<float>(how.value));
        else
          fill_normal(p, value, how, seed);
      },
      p.init());
}

void initialise(Module& root, std::uint64_t seed) {
  for (Parameter* p : root.parameters()) initialise(*p, seed);
}

}  // namespace weft
