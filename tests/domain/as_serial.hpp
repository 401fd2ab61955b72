// A model twice, on one rank and with its maps cut in space. The outputs and gradients that each rank then
// has are compared with the whole ones.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <functional>
#include <memory>
#include <string>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/module.hpp"

namespace weft::test {

using MakeModule = std::function<std::unique_ptr<Module>()>;

inline Tensor random_map(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(7, name).normal(0, t.count(), t.f32().data());
  return t;
}

inline bool same_bits(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.bytes())) == 0;
}

/// The largest difference, relative to the largest element of `want`.
inline double difference(const Tensor& got, const Tensor& want) {
  if (want.dtype() == DType::bf16) {
    const auto wide = [](const Tensor& t) {
      return std::vector<float>(t.as<bf16>().begin(), t.as<bf16>().end());
    };
    double most = 1e-30, off = 0;
    const std::vector<float> a = wide(got), b = wide(want);
    for (std::size_t i = 0; i < b.size(); ++i)
      most = std::max(most, std::abs(static_cast<double>(b[i]))),
      off = std::max(off, std::abs(static_cast<double>(a[i]) - static_cast<double>(b[i])));
    return off / most;
  }
  double largest = 1e-30, worst = 0;
  for (const float f : want.f32()) largest = std::max(largest, std::abs(static_cast<double>(f)));
  for (std::size_t i = 0; i < want.f32().size(); ++i)
    worst = std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - static_cast<double>(want.f32()[i])));
  return worst / largest;
}

inline double largest_of(const Tensor& t) {
  double largest = 0;
  for (const float f : t.f32()) largest = std::max(largest, std::abs(static_cast<double>(f)));
  return largest;
}

/// The results of the passes of a model on one rank.
struct Serial {
  std::unique_ptr<Module> model;
  Tensor x, y, dy, dx;
  DType dtype = DType::f32;  ///< of weights, maps and their gradients
};

inline Tensor rounded(Context& context, const Tensor& t, DType dtype) {
  if (dtype == DType::f32) return t;
  Tensor narrow(context, t.shape(), DType::bf16);
  for (std::size_t i = 0; i < t.f32().size(); ++i) narrow.as<bf16>()[i] = bf16(t.f32()[i]);
  return narrow;
}

inline void set_up(Module& model, Compute& compute, DType dtype = DType::f32) {
  for (Parameter* p : model.parameters()) p->set_init(Normal{0.5}), p->set_dtype(dtype);
  materialise(model, compute);
  initialise(model, 3);
}

inline Serial run_serial(const MakeModule& make, const Shape& shape, Compute& compute,
                         DType dtype = DType::f32) {
  Serial s{make(), {}, {}, {}, {}, dtype};
  set_up(*s.model, compute, dtype);
  s.x = rounded(compute.context(), random_map(compute.context(), shape, "x"), dtype);
  Frame frame(compute);
  s.y = s.model->forward(s.x, frame)[0];
  s.dy = rounded(compute.context(), random_map(compute.context(), s.y.shape(), "dy"), dtype);
  s.dx = s.model->backward(s.dy, frame)[0];
  return s;
}

struct Bounds {
  double maps = 0;              ///< of y and dx; 0: the same bits
  double weights = 1e-6;        ///< of gradients of parameters
  double position_bias = 2e-6;  ///< of those of a position bias, which cancel
};

/// Runs the same module over `axes`, and compares it with the serial one.
inline void expect_as(const Serial& serial, const MakeModule& make, Compute& compute, const DeviceMesh& mesh,
                      const DeviceMesh& axes, const Bounds& bounds = {}) {
  const std::unique_ptr<Module> model = make();
  const DomainManager manager = apply_domain_parallel(*model, axes);
  replicate(*model, mesh);
  set_up(*model, compute, serial.dtype);
  const Tensor x = shard_spatial(serial.x, manager);
  Frame frame(compute);
  const Tensor y = model->forward(x, frame)[0];
  ASSERT_EQ(y.layout(), manager.layout(serial.y.shape()));
  const auto expect = [&](const char* what, const Tensor& got, const Tensor& whole) {
    const Tensor want = distribute(whole, got.layout());
    ASSERT_EQ(got.shape(), want.shape()) << what;
    if (bounds.maps == 0)
      ASSERT_TRUE(same_bits(got, want)) << what << " differs by " << difference(got, want);
    else
      ASSERT_LE(difference(got, want), bounds.maps) << what;
  };
  expect("y", y, serial.y);
  const Tensor dx = model->backward(distribute(serial.dy, y.layout()), frame)[0];
  ASSERT_EQ(dx.layout(), x.layout());
  expect("dx", dx, serial.dx);
  ASSERT_TRUE(frame.empty());
  sync_domain_gradients(*model, manager);
  const std::vector<Parameter*> got = model->parameters(), want = serial.model->parameters();
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    ASSERT_EQ(got[i]->path(), want[i]->path());
    // A constant added to all scores changes nothing. So biases of the position bias have gradients that are
    // 0 up to rounding, or sums of parts that cancel. They are compared with the largest gradient next to
    // them.
    double scale = 1, bound = bounds.weights;
    if (const std::size_t dpb = got[i]->path().find("dpb."); dpb != std::string::npos) {
      double largest = 1e-30;
      for (const Parameter* p : want)
        if (p->path().starts_with(got[i]->path().substr(0, dpb + 4)))
          largest = std::max(largest, largest_of(p->gradient()));
      scale = std::max(1e-30, largest_of(want[i]->gradient())) / largest;
      bound = bounds.position_bias;
    }
    // A parameter with an element for each pixel is cut as the maps are.
    const LayoutRef layout = got[i]->gradient_layout();
    const Tensor whole = layout->replicated() ? got[i]->gradient() : full(got[i]->gradient());
    ASSERT_LE(scale * difference(whole, want[i]->gradient()), bound) << got[i]->path();
  }
}

/// The meshes that tests run on, of up to four ranks: their axes cut the height, or height and width.
inline const std::vector<MeshShape>& spaces() {
  static const std::vector<MeshShape> all{
      {{"h", 2}}, {{"h", 3}}, {{"h", 4}}, {{"h", 2}, {"w", 2}}, {{"h", 1}, {"w", 3}}};
  return all;
}

/// For each of them, on each rank: body(compute, mesh, axes).
inline void on_each_space(const std::function<void(Compute&, const DeviceMesh&, const DeviceMesh&)>& body) {
  for (const MeshShape& shape : spaces())
    run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute compute(rank.context, 1);
      const DeviceMesh mesh(rank.group(), shape);
      body(compute, mesh, mesh);
    });
}

inline void expect_as_serial(const MakeModule& make, const Shape& x, const Bounds& bounds = {},
                             DType dtype = DType::f32) {
  on_each_space([&](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    expect_as(run_serial(make, x, compute, dtype), make, compute, mesh, axes, bounds);
  });
}

}  // namespace weft::test
