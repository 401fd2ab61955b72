// A layer that is not part of weft and uses only weft's installed headers: y = x (w + b a)ᵀ, a linear layer
// with a low-rank correction (E. Hu et al., "LoRA", 2021). x: (…, in), w: (out, in), a: (rank, in), b: (out,
// rank). All tensors are f32: a bf16 weight (Parameter::set_dtype) is an error here.
#pragma once

#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/module.hpp"

class LowRankLinear : public weft::Module {
 public:
  LowRankLinear(std::int64_t in, std::int64_t out, std::int64_t rank) {
    weight = add("weight", std::make_shared<weft::Parameter>(weft::Shape{out, in}, weft::Normal{0.3}));
    a = add("a", std::make_shared<weft::Parameter>(weft::Shape{rank, in}, weft::Normal{0.3}));
    b = add("b", std::make_shared<weft::Parameter>(weft::Shape{out, rank}, weft::Normal{0.3}));
  }
  weft::ParameterRef weight, a, b;

  // Split by columns: each rank computes some of the outputs. All ranks need `a`, so it is replicated.
  weft::ShardRule shard_rule(weft::Split split) const override {
    if (split == weft::Split::row) return Module::shard_rule(split);
    return {{{weight.get(), weft::Shard{0}}, {b.get(), weft::Shard{0}}},
            {{"output features", weight->global_shape()[0]}},
            {}};
  }

 private:
  weft::Tensors do_forward(weft::Inputs inputs, weft::Frame& frame) override {
    using weft::kernels::Stored;
    expect_count(inputs, 1, "inputs");
    const weft::Tensor x = weft::layouts::beside(*this, "x", inputs[0], *weight);
    const weft::LayoutRef layout =
        weft::layouts::linear_output(weft::layouts::named(*this, "x"), x.layout(), weight->weight().layout());
    const std::int64_t in = weight->weight().size(1), out = weight->weight().size(0),
                       rank = a->weight().size(0);
    const std::int64_t tokens = x.count() / in;
    const weft::Tensor y =
        frame.compute().make(weft::layouts::with_last(x.shape(), out), weft::DType::f32, out_memory());
    const weft::Tensor h = frame.compute().make({tokens, rank});
    weft::kernels::linear_forward(frame.kernels(), x.data_ptr<float>(), a->weight().data_ptr<float>(),
                                  nullptr, h.data_ptr<float>(), {tokens, in, rank});
    weft::kernels::linear_forward(frame.kernels(), x.data_ptr<float>(), weight->weight().data_ptr<float>(),
                                  nullptr, y.data_ptr<float>(), {tokens, in, out});
    weft::kernels::matmul(frame.kernels(), h.data_ptr<float>(), Stored::plain, b->weight().data_ptr<float>(),
                          Stored::transposed, y.data_ptr<float>(), tokens, out, rank, true);
    frame.push(*this, {x, h});
    return {y.with_layout(layout)};
  }

  weft::Tensors do_backward(weft::Inputs gradients, weft::Frame& frame) override {
    using weft::kernels::Stored;
    const weft::Tensors kept = frame.pop(*this);
    const weft::Tensor &x = kept[0], &h = kept[1], &dy = gradients[0];
    const std::int64_t in = x.shape().back(), out = dy.shape().back(), rank = h.size(1), tokens = h.size(0);
    const int last = x.shape().rank() - 1;
    // (rows, columns) = or += leftᵀ right, summed over tokens.
    const auto gradient = [&](weft::Parameter& p, const weft::Tensor& left, const weft::Tensor& right,
                              const weft::LayoutRef& layout) {
      p.accumulate(layout, [&](const weft::Tensor& into, bool add) {
        weft::kernels::matmul(frame.kernels(), left.data_ptr<float>(), Stored::transposed,
                              right.data_ptr<float>(), Stored::plain, into.data_ptr<float>(), into.size(0),
                              into.size(1), tokens, add);
      });
    };
    const weft::Tensor dh = frame.compute().make({tokens, rank});
    weft::kernels::linear_backward_input(frame.kernels(), dy.data_ptr<float>(), b->weight().data_ptr<float>(),
                                         dh.data_ptr<float>(), {tokens, rank, out});
    gradient(*weight, dy, x, weft::layouts::gradient_of(weight->weight().layout(), dy.layout(), last));
    gradient(*b, dy, h, weft::layouts::gradient_of(b->weight().layout(), dy.layout(), last));
    // dh comes from this rank's outputs alone, so each rank has only a contribution to the gradient of `a`:
    // this gradient is Partial on the axes on which dy is sharded.
    gradient(*a, dh, x, weft::layouts::gradient_of(a->weight().layout(), dy.layout(), -1));
    const weft::Tensor dx = frame.compute().make(x.shape(), weft::DType::f32, dx_memory());
    weft::kernels::linear_backward_input(frame.kernels(), dy.data_ptr<float>(),
                                         weight->weight().data_ptr<float>(), dx.data_ptr<float>(),
                                         {tokens, in, out});
    weft::kernels::matmul(frame.kernels(), dh.data_ptr<float>(), Stored::plain, a->weight().data_ptr<float>(),
                          Stored::plain, dx.data_ptr<float>(), tokens, in, rank, true);
    return {dx.with_layout(weft::layouts::linear_input_gradient(x.layout(), weight->weight().layout()))};
  }
};
