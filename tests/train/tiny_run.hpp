// A model of two parameters and an optimizer with state, whose every element is known: what checkpoint tests
// save. Belongs to one thread.
#pragma once

#include <gtest/gtest.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/nn/module.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::test {

class TinyModel : public Module {
 public:
  explicit TinyModel(int width) : first_(width) {
    add("first", first_);
    add("second", std::make_shared<Parameter>(Shape{5}));
  }
  void add_third() { add("third", std::make_shared<Parameter>(Shape{2})); }

 private:
  struct First : Module {
    explicit First(int width) { add("weight", std::make_shared<Parameter>(Shape{2, width})); }
    Tensors do_forward(Inputs, Frame&) override { return {}; }
    Tensors do_backward(Inputs, Frame&) override { return {}; }
  };
  Tensors do_forward(Inputs, Frame&) override { return {}; }
  Tensors do_backward(Inputs, Frame&) override { return {}; }
  First first_;
};

/// `mesh` empty: plain tensors on one rank; otherwise first.weight is sharded along its rows over "tp", and
/// second is replicated.
struct TinyRun {
  explicit TinyRun(Context& context, const DeviceMesh& mesh, int width = 3, int sharded_dim = 0)
      : compute(context), model(std::make_unique<TinyModel>(width)) {
    if (mesh) {
      model->parameter("first.weight")
          ->set_layout(make_layout(mesh, {{"tp", Shard{sharded_dim}}}, {2, width}));
      replicate(*model, mesh);
    }
    materialise(*model, compute);
    make_optimizer();
  }
  void add_third(const DeviceMesh& mesh) {
    model->add_third();
    if (mesh) replicate(*model, mesh);
    model->parameter("third")->materialise(compute);
    make_optimizer();
  }
  void make_optimizer() {
    parameters = model->parameters();
    optimizer.emplace(compute, parameters, SGD::Options{0.9, 0});
  }

  // Element i of a whole tensor t is base + 1000 t + i: another value at every place.
  static float value(float base, int tensor, std::int64_t i) {
    return base + 1000.0F * static_cast<float>(tensor) + static_cast<float>(i);
  }
  static void each_element(const Tensor& local, const Shape& global, LayoutRef layout,
                           const std::function<void(std::int64_t local, std::int64_t global)>& see) {
    const Dims offset = layout != nullptr ? layout->parts().at(0).offset : Dims{};
    const Strides global_strides = row_major(global), local_strides = row_major(local.shape());
    for (std::int64_t i = 0; i < local.count(); ++i) {
      std::int64_t whole = 0;
      for (int d = 0; d < global.rank(); ++d)
        whole += (i / local_strides[d] % local.shape()[d] + (layout != nullptr ? offset[d] : 0)) *
                 global_strides[d];
      see(i, whole);
    }
  }
  void each_tensor(
      bool with_parameters, bool with_state,
      const std::function<void(const std::string&, const Tensor&, const Shape&, LayoutRef, int)>& see) const {
    int number = 0;
    for (const Parameter* p : parameters) {
      if (with_parameters) see(p->path(), p->master(), p->global_shape(), p->layout(), number);
      ++number;
    }
    optimizer->visit_state([&](const std::string& path, std::string_view name, const Tensor& t) {
      const LayoutRef layout = t.layout();
      if (with_state)
        see(path + "/" + std::string(name), t, layout != nullptr ? layout->global : t.shape(), layout,
            number);
      ++number;
    });
  }
  void fill(float base) {
    each_tensor(true, true,
                [&](const std::string&, const Tensor& t, const Shape& global, LayoutRef layout, int number) {
                  each_element(t, global, layout, [&](std::int64_t i, std::int64_t whole) {
                    const float x = value(base, number, whole);
                    if (t.dtype() == DType::i64)
                      t.as<std::int64_t>()[static_cast<std::size_t>(i)] = static_cast<std::int64_t>(x);
                    else
                      t.f32()[static_cast<std::size_t>(i)] = x;
                  });
                });
  }
  void expect(bool with_parameters, bool with_state, float base) const {
    each_tensor(
        with_parameters, with_state,
        [&](const std::string& name, const Tensor& t, const Shape& global, LayoutRef layout, int number) {
          each_element(t, global, layout, [&](std::int64_t i, std::int64_t whole) {
            const auto at = static_cast<std::size_t>(i);
            const float got =
                t.dtype() == DType::i64 ? static_cast<float>(t.as<std::int64_t>()[at]) : t.f32()[at];
            EXPECT_EQ(got, value(base, number, whole)) << name << " at " << whole;
          });
        });
  }
  void expect_filled(float base) const { expect(true, true, base); }
  void expect_parameters_filled(float base) const { expect(true, false, base); }
  void expect_state_filled(float base) const { expect(false, true, base); }

  Compute compute;
  std::unique_ptr<TinyModel> model;
  std::vector<Parameter*> parameters;
  std::optional<SGD> optimizer;
};

}  // namespace weft::test
