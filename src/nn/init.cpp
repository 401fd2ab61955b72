#include "weft/nn/init.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/mutant.hpp"
#include "mesh/boxes.hpp"
#include "nn/history.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/parameter.hpp"

namespace weft {
namespace {

void fill_normal(const Tensor& value, const Shape& global, std::string_view path, const Normal& how,
                 std::uint64_t seed) {
  const RandomStream stream(seed, path);
  float* const all = value.f32().data();
  each_run(
      global, value.layout(), value.shape(), [&](std::int64_t start, std::int64_t place, std::int64_t count) {
        float* const out = all + place;
        stream.normal(static_cast<std::uint64_t>(WEFT_MUTANT("values_by_place") ? place : start), count, out);
        for (std::int64_t i = 0; i < count; ++i)
          out[i] = static_cast<float>(how.mean + how.std * static_cast<double>(out[i]));
      });
}

// Throws bad_argument if a cast would change the number.
void expect_integer(const std::string& path, double constant) {
  if (!(std::abs(constant) < 0x1p63 && std::trunc(constant) == constant))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("initialise: \"{}\" is i64; its constant {} is no integer of 64 bits", path, constant));
}

template <class T>
void fill_constant(const Tensor& value, double constant) {
  std::fill_n(value.as<T>().data(), value.count(), static_cast<T>(constant));
}

// The numbers are made on the host for every device, so that they are equal on all devices.
void fill(Compute& compute, const Tensor& value, const Shape& global, const std::string& path,
          const Init& init, std::uint64_t seed) {
  const bool here = value.device() == Device{};
  const Tensor made =
      here ? value : Tensor(compute.context(), value.shape(), value.dtype()).with_layout(value.layout());
  const Constant* const constant = std::get_if<Constant>(&init);
  if (value.dtype() == DType::f32)
    constant != nullptr ? fill_constant<float>(made, constant->value)
                        : fill_normal(made, global, path, std::get<Normal>(init), seed);
  else if (constant != nullptr && value.dtype() == DType::f64)
    fill_constant<double>(made, constant->value);
  else if (constant != nullptr && value.dtype() == DType::i64) {
    expect_integer(path, constant->value);
    fill_constant<std::int64_t>(made, constant->value);
  } else
    throw Error(ErrorCode::bad_argument,
                fmt::format("initialise: \"{}\" is {}; expected f32, or a constant in f64 or i64", path,
                            name(value.dtype())));
  if (!here) copy(compute.context(), made, value, value.stream());
}

}  // namespace

void initialise(Parameter& p, std::uint64_t seed) {
  fill(p.compute(), p.write_master(), p.global_shape(), p.path(), p.init(), seed);
  const auto bits = [](double v) { return std::bit_cast<std::uint64_t>(v); };
  if (const Constant* const constant = std::get_if<Constant>(&p.init()))
    return set_history(p, digest_of(bits(constant->value)) | 1);
  const Normal& normal = std::get<Normal>(p.init());
  set_history(p, digest_of(bits(normal.std), bits(normal.mean), seed) | 1);
}

void initialise(ModuleBuffer& b, std::uint64_t seed) {
  fill(b.compute(), b.tensor(), b.global_shape(), b.path(), b.init(), seed);
}

void initialise(Module& root, std::uint64_t seed) {
  for (Parameter* p : root.parameters()) initialise(*p, seed);
  for (ModuleBuffer* b : root.buffers()) initialise(*b, seed);
}

}  // namespace weft
