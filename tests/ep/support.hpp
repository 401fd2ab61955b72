// Helpers of the tests of experts.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "ep/reference.hpp"
#include "weft/base/random.hpp"
#include "weft/ep/moe.hpp"
#include "weft/nn/init.hpp"

namespace weft::test {

inline Tensor normal_tensor(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(7, name).normal(0, t.count(), t.f32().data());
  return t;
}
inline Doubles doubles_of(const Tensor& t) { return {t.f32().begin(), t.f32().end()}; }

/// Memory and values; the biases of routers are numbers that matter, too.
inline void set_up(Module& model, Compute& compute) {
  model.visit([](Module& m) {
    if (auto* const router = dynamic_cast<Router*>(&m); router != nullptr && router->bias_parameter)
      router->bias_parameter->set_init(Normal{0.5});
  });
  materialise(model, compute);
  initialise(model, 3);
  model.visit([](Module& m) {
    auto* const router = dynamic_cast<Router*>(&m);
    if (router != nullptr && router->bias_buffer)
      RandomStream(4, "bias").normal(0, router->experts(), router->bias_buffer->tensor().f32().data());
  });
}

/// The layer's values, which must be whole on this rank. x: (samples, …, dim)
inline ReferenceMoE reference_of(MoE& layer, const Tensor& x) {
  ReferenceMoE r;
  r.c = layer.config();
  r.router = doubles_of(layer.router.gate.weight->master());
  if (layer.router.bias_parameter) r.bias = doubles_of(layer.router.bias_parameter->master());
  if (layer.router.bias_buffer) r.bias = doubles_of(layer.router.bias_buffer->tensor());
  if (layer.experts.gate_proj) r.gate = doubles_of(layer.experts.gate_proj->master());
  r.up = doubles_of(layer.experts.up_proj->master());
  r.down = doubles_of(layer.experts.down_proj->master());
  if (layer.shared_expert) {
    r.shared_gate = doubles_of(layer.shared_expert->gate_proj.weight->master());
    r.shared_up = doubles_of(layer.shared_expert->up_proj.weight->master());
    r.shared_down = doubles_of(layer.shared_expert->down_proj.weight->master());
  }
  r.sequences = x.size(0);
  return r;
}

/// `tolerance`: of the largest number.
inline void expect_as_reference(const Tensor& got, const Doubles& expected, const std::string& what,
                                double tolerance = 3e-6) {
  ASSERT_EQ(static_cast<std::size_t>(got.count()), expected.size()) << what;
  double largest = 0, worst = 0;
  for (std::size_t i = 0; i < expected.size(); ++i) {
    largest = std::max(largest, std::abs(expected[i]));
    worst = std::max(worst, std::abs(static_cast<double>(got.f32()[i]) - expected[i]));
  }
  EXPECT_GT(largest, 0) << what;
  EXPECT_LE(worst, tolerance * largest) << what;
}

inline void expect_gradients_as(MoE& layer, const ReferenceMoE& r) {
  const auto check = [](const Parameter* p, const Doubles& expected) {
    if (p != nullptr) expect_as_reference(p->gradient(), expected, p->path());
  };
  check(layer.router.gate.weight.get(), r.drouter);
  check(layer.router.bias_parameter.get(), r.dbias);
  check(layer.experts.gate_proj.get(), r.dgate);
  check(layer.experts.up_proj.get(), r.dup);
  check(layer.experts.down_proj.get(), r.ddown);
  if (!layer.shared_expert) return;
  check(layer.shared_expert->gate_proj.weight.get(), r.dshared_gate);
  check(layer.shared_expert->up_proj.weight.get(), r.dshared_up);
  check(layer.shared_expert->down_proj.weight.get(), r.dshared_down);
}

}  // namespace weft::test
