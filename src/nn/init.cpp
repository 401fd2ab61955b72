#include "weft/nn/init.hpp"

#include <algorithm>
#include <type_traits>

#include "weft/base/random.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {
namespace {

// Normal numbers for this rank's part (a box) of the global tensor, row by row of its last dimension. Each row
// is a run of the stream that begins at the row's global index.
void fill_normal(const Parameter& p, const Tensor& value, const Normal& how, std::uint64_t seed) {
  const RandomStream stream(seed, p.path());
  const Shape& global = p.global_shape();
  const Shape local = value.shape();
  Dims offsets = value.layout() ? value.layout()->local_offsets() : local;
  if (!value.layout())
    for (int d = 0; d < offsets.rank(); ++d) offsets[d] = 0;
  if (value.count() == 0) return;

  const int dims = local.rank();
  const std::int64_t row = dims == 0 ? 1 : local.back();
  float* out = value.f32().data();
  for (std::int64_t r = 0; r < value.count() / row; ++r, out += row) {
    std::int64_t rest = r, stride = dims == 0 ? 1 : global.back();
    std::int64_t start = dims == 0 ? 0 : offsets[dims - 1];  // the row's global index
    for (int d = dims - 2; d >= 0; --d) {
      start += (rest % local[d] + offsets[d]) * stride;
      rest /= local[d];
      stride *= global[d];
    }
    stream.normal(static_cast<std::uint64_t>(start), row, out);
    for (std::int64_t i = 0; i < row; ++i)
      out[i] = static_cast<float>(how.mean + how.std * static_cast<double>(out[i]));
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
