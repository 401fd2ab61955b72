#include "weft/ep/experts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "ep/views.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::KernelContext;
using kernels::Stored;

struct ExpertSizes {
  std::int64_t experts, rows, dim, hidden;
};

ExpertSizes checked_sizes(std::string_view call, ExpertKind kind, const ConstTensorView& x,
                          std::span<const std::int64_t> offsets, const ExpertWeights& w,
                          const ExpertActivations& kept) {
  ep::expect_matrix(call, "x", x);
  if (w.up.shape.rank() != 3)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: up is {}; expected (experts, hidden, dim)", call, to_string(w.up.shape)));
  const ExpertSizes s{w.up.shape[0], x.shape[0], w.up.shape[2], w.up.shape[1]};
  if (x.dtype != DType::f32 && x.dtype != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: x is {}; expected f32 or bf16", call, name(x.dtype)));
  if (x.dtype == DType::bf16 && w.up.dtype == DType::f32)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: x is bf16 and the weights f32; expected weights in bf16", call));
  const DType of_weights = w.up.dtype == DType::bf16 ? DType::bf16 : DType::f32;
  ep::expect_view(call, "x", x, x.dtype, {s.rows, s.dim}, ", as up");
  ep::expect_view(call, "up", w.up, of_weights, {s.experts, s.hidden, s.dim});
  ep::expect_view(call, "down", w.down, of_weights, {s.experts, s.dim, s.hidden}, ", from up");
  if (kind == ExpertKind::swiglu) ep::expect_view(call, "gate", w.gate, of_weights, w.up.shape, ", as up");
  const Shape of_hidden{s.rows, s.hidden};
  if (kind == ExpertKind::swiglu) ep::expect_view(call, "kept.gate", kept.gate, x.dtype, of_hidden);
  ep::expect_view(call, "kept.up", kept.up, x.dtype, of_hidden);
  ep::expect_view(call, "kept.hidden", kept.hidden, x.dtype, of_hidden);
  if (offsets.size() != static_cast<std::size_t>(s.experts) + 1 || offsets.front() != 0 ||
      offsets.back() != s.rows || !std::ranges::is_sorted(offsets))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} offsets up to {}; expected {} that rise from 0 to {} rows", call,
                            offsets.size(), offsets.empty() ? 0 : offsets.back(), s.experts + 1, s.rows));
  return s;
}

// Matrix i of a view of matrices, or rows [first, first + rows) of a matrix.
template <class View>
View matrix_of(const View& v, std::int64_t i) {
  const Shape shape{v.shape[1], v.shape[2]};
  return {v.data + i * shape.count() * size_bytes(v.dtype), v.dtype, v.device, shape, row_major(shape)};
}
template <class View>
View rows_of_view(const View& v, std::int64_t first, std::int64_t rows) {
  const Shape shape{rows, v.shape[1]};
  return {v.data + first * v.shape[1] * size_bytes(v.dtype), v.dtype, v.device, shape, row_major(shape)};
}

// Rows as operands of products with bf16 weights.
struct Rounded {
  Rounded(KernelContext& ctx, const ConstTensorView& x, DType to) : view(x) {
    if (x.dtype == to) return;
    memory.resize(static_cast<std::size_t>(x.count()));
    kernels::round_to_bf16(ctx, x.as<float>().data(), memory.data(), x.count());
    view = weft::view(static_cast<const bf16*>(memory.data()), x.shape);
  }
  std::vector<bf16> memory;
  ConstTensorView view;
};

// c = a b in the dtype of c
void product(KernelContext& ctx, const ConstTensorView& a, const ConstTensorView& b, Stored b_stored,
             const TensorView& c) {
  const std::int64_t m = c.shape[0], n = c.shape[1], k = a.shape[1];
  if (c.dtype == DType::bf16)
    kernels::matmul_to_bf16(ctx, a.as<bf16>().data(), Stored::plain, b.as<bf16>().data(), b_stored, nullptr,
                            c.as<bf16>().data(), m, n, k);
  else
    multiply(ctx, a, Stored::plain, b, b_stored, c.as<float>().data(), m, n, k, false);
}

template <class Run>
void by_expert_dtype(DType dtype, Run&& run) {
  if (dtype == DType::bf16)
    run.template operator()<bf16>();
  else
    run.template operator()<float>();
}

void activate(KernelContext& ctx, ExpertKind kind, const ExpertActivations& a) {
  by_expert_dtype(a.up.dtype, [&]<class T>() {
    const T* const up = a.up.as<T>().data();
    T* const hidden = a.hidden.as<T>().data();
    const std::int64_t n = a.up.count();
    switch (kind) {
      case ExpertKind::swiglu: kernels::swiglu_forward(ctx, a.gate.as<T>().data(), up, hidden, n); break;
      case ExpertKind::silu: kernels::silu_forward(ctx, up, hidden, n); break;
      case ExpertKind::gelu: kernels::gelu_forward(ctx, up, hidden, n, kernels::GeluForm::erf); break;
      case ExpertKind::relu: kernels::relu_forward(ctx, up, hidden, n); break;
    }
  });
}

// sum = the balanced binary tree over the products dᵀ x of these blocks of rows; one of no rows is +0.
void tree_of_blocks(KernelContext& ctx, const ConstTensorView& d, const ConstTensorView& x,
                    std::span<const std::int64_t> offsets, const TensorView& sum) {
  const std::size_t blocks = offsets.size() - 1;
  if (blocks == 1) {
    const std::int64_t first = offsets[0], count = offsets[1] - first;
    return multiply(ctx, rows_of_view(d, first, count), Stored::transposed, rows_of_view(x, first, count),
                    Stored::plain, sum.as<float>().data(), sum.shape[0], sum.shape[1], count, false);
  }
  tree_of_blocks(ctx, d, x, offsets.first(blocks / 2 + 1), sum);
  std::vector<float> memory(static_cast<std::size_t>(sum.count()));
  const TensorView second = view(memory.data(), sum.shape);
  tree_of_blocks(ctx, d, x, offsets.subspan(blocks / 2), second);
  kernels::add(ctx, sum.as<float>().data(), memory.data(), sum.as<float>().data(), sum.count());
}

// dw = or += that tree
void add_tree(KernelContext& ctx, const ConstTensorView& d, const ConstTensorView& x,
              std::span<const std::int64_t> offsets, const TensorView& dw, bool add) {
  if (!add) return tree_of_blocks(ctx, d, x, offsets, dw);
  std::vector<float> memory(static_cast<std::size_t>(dw.count()));
  tree_of_blocks(ctx, d, x, offsets, view(memory.data(), dw.shape));
  kernels::add(ctx, dw.as<float>().data(), memory.data(), dw.as<float>().data(), dw.count());
}

// gate and up become their gradients, from that of hidden.
void activate_backward(KernelContext& ctx, ExpertKind kind, const ConstTensorView& dhidden,
                       const ExpertActivations& a) {
  by_expert_dtype(a.up.dtype, [&]<class T>() {
    const T* const d = dhidden.as<T>().data();
    T* const up = a.up.as<T>().data();
    const std::int64_t n = a.up.count();
    switch (kind) {
      case ExpertKind::swiglu: {
        T* const gate = a.gate.as<T>().data();
        kernels::swiglu_backward(ctx, d, gate, up, gate, up, n);
        break;
      }
      case ExpertKind::silu: {
        const std::vector<T> before(up, up + n);
        kernels::silu_backward(ctx, d, before.data(), up, n);
        break;
      }
      case ExpertKind::gelu: {
        const std::vector<T> before(up, up + n);
        kernels::gelu_backward(ctx, d, before.data(), up, n, kernels::GeluForm::erf);
        break;
      }
      case ExpertKind::relu: {
        const std::vector<T> y(a.hidden.as<T>().begin(), a.hidden.as<T>().end());
        kernels::relu_backward(ctx, d, y.data(), up, n);
        break;
      }
    }
  });
}

}  // namespace

void experts_forward(KernelContext& ctx, ExpertKind kind, const ConstTensorView& x,
                     std::span<const std::int64_t> offsets, const ExpertWeights& w,
                     const ExpertActivations& kept, const TensorView& y) {
  const ExpertSizes s = checked_sizes("experts_forward", kind, x, offsets, w, kept);
  ep::expect_view("experts_forward", "y", y, x.dtype, x.shape, ", as x");
  const Rounded rows(ctx, x, w.up.dtype);
  const auto each = [&](const ConstTensorView& a, const ConstTensorView& b, const TensorView& c) {
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const std::int64_t first = offsets[static_cast<std::size_t>(e)],
                         count = offsets[static_cast<std::size_t>(e) + 1] - first;
      if (count > 0)
        product(ctx, rows_of_view(a, first, count), matrix_of(b, e), Stored::transposed,
                rows_of_view(c, first, count));
    }
  };
  if (kind == ExpertKind::swiglu) each(rows.view, w.gate, kept.gate);
  each(rows.view, w.up, kept.up);
  activate(ctx, kind, kept);
  const Rounded hidden(ctx, kept.hidden, w.down.dtype);
  each(hidden.view, w.down, y);
}

void experts_backward(KernelContext& ctx, ExpertKind kind, const ConstTensorView& dy,
                      const ConstTensorView& x, std::span<const std::int64_t> offsets, const ExpertWeights& w,
                      const ExpertActivations& kept, const TensorView& dx, const ExpertGradients& gradients) {
  const ExpertSizes s = checked_sizes("experts_backward", kind, x, offsets, w, kept);
  ep::expect_view("experts_backward", "dy", dy, x.dtype, x.shape, ", as x");
  ep::expect_view("experts_backward", "dx", dx, x.dtype, x.shape, ", as x");
  for (const auto& [what, gradient, weight] : {std::tuple{"gradients.gate", &gradients.gate, &w.gate},
                                               {"gradients.up", &gradients.up, &w.up},
                                               {"gradients.down", &gradients.down, &w.down}})
    if (gradient->data != nullptr)
      ep::expect_view("experts_backward", what, *gradient, DType::f32, weight->shape, ", as the weight");
  const auto each = [&](const auto& run) {
    for (std::int64_t e = 0; e < s.experts; ++e)
      run(e, offsets[static_cast<std::size_t>(e)],
          offsets[static_cast<std::size_t>(e) + 1] - offsets[static_cast<std::size_t>(e)]);
  };
  // dw = or += dyᵀ x of each expert's rows; of none it is 0
  const auto weight_gradient = [&](const ConstTensorView& d, const ConstTensorView& of, const TensorView& dw,
                                   bool add) {
    if (dw.data == nullptr) return;
    each([&](std::int64_t e, std::int64_t first, std::int64_t count) {
      const TensorView to = matrix_of(dw, e);
      if (gradients.blocks > 0) {
        const auto of_expert =
            gradients.block_offsets.subspan(static_cast<std::size_t>(e * (gradients.blocks + 1)),
                                            static_cast<std::size_t>(gradients.blocks) + 1);
        return add_tree(ctx, d, of, of_expert, to, add);
      }
      multiply(ctx, rows_of_view(d, first, count), Stored::transposed, rows_of_view(of, first, count),
               Stored::plain, to.as<float>().data(), to.shape[0], to.shape[1], count, add);
    });
  };
  if (gradients.blocks != 0 &&
      gradients.block_offsets.size() != static_cast<std::size_t>(s.experts * (gradients.blocks + 1)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("experts_backward: {} block offsets; expected {} experts x ({} blocks + 1)",
                            gradients.block_offsets.size(), s.experts, gradients.blocks));
  const DType of_weights = w.up.dtype;
  std::vector<std::byte> memory(static_cast<std::size_t>(kept.hidden.bytes()));
  const TensorView dhidden{
      memory.data(), kept.hidden.dtype, {}, kept.hidden.shape, row_major(kept.hidden.shape)};
  {
    const Rounded of_dy(ctx, dy, of_weights), hidden(ctx, kept.hidden, of_weights);
    weight_gradient(of_dy.view, hidden.view, gradients.down, gradients.add_down);
    each([&](std::int64_t e, std::int64_t first, std::int64_t count) {
      if (count > 0)
        product(ctx, rows_of_view(of_dy.view, first, count), matrix_of(w.down, e), Stored::plain,
                rows_of_view(dhidden, first, count));
    });
  }
  activate_backward(ctx, kind, dhidden, kept);
  const Rounded rows(ctx, x, of_weights), dup(ctx, kept.up, of_weights);
  weight_gradient(dup.view, rows.view, gradients.up, gradients.add_up);
  const auto through = [&](const ConstTensorView& d, const ConstTensorView& weight, const TensorView& to) {
    each([&](std::int64_t e, std::int64_t first, std::int64_t count) {
      if (count > 0)
        product(ctx, rows_of_view(d, first, count), matrix_of(weight, e), Stored::plain,
                rows_of_view(to, first, count));
    });
  };
  through(dup.view, w.up, dx);
  if (kind != ExpertKind::swiglu) return;
  const Rounded dgate(ctx, kept.gate, of_weights);
  weight_gradient(dgate.view, rows.view, gradients.gate, gradients.add_gate);
  memory.resize(static_cast<std::size_t>(dx.bytes()));
  const TensorView more{memory.data(), dx.dtype, {}, dx.shape, row_major(dx.shape)};
  through(dgate.view, w.gate, more);
  by_expert_dtype(dx.dtype, [&]<class T>() {
    kernels::add(ctx, dx.as<T>().data(), more.as<T>().data(), dx.as<T>().data(), dx.count());
  });
}

// ---- the module ----

Experts::Experts(std::int64_t experts, std::int64_t dim, std::int64_t hidden, ExpertKind kind, Init init,
                 Init down_init)
    : kind_(kind) {
  if (kind == ExpertKind::swiglu)
    gate_proj = add("gate_proj", std::make_shared<Parameter>(Shape{experts, hidden, dim}, init));
  up_proj = add("up_proj", std::make_shared<Parameter>(Shape{experts, hidden, dim}, init));
  down_proj = add("down_proj", std::make_shared<Parameter>(Shape{experts, dim, hidden}, down_init));
}

ShardRule Experts::shard_rule(Split split) const {
  ShardRule rule;
  if (split == Split::row) {
    rule.refused = "is split by its hidden features, a column style";
    return rule;
  }
  if (gate_proj) rule.parameters.push_back({gate_proj.get(), Shard{1}});
  rule.parameters.push_back({up_proj.get(), Shard{1}});
  rule.parameters.push_back({down_proj.get(), Shard{2}});
  rule.whole_units.push_back({"hidden features", hidden()});
  return rule;
}

// A weight is used on the tokens of all ranks along the axes that split them, except where it is split
// itself: there each rank has the rows of all ranks for its own experts.
LayoutRef Experts::gradient_layout(const Parameter& p) const {
  const LayoutRef weight = p.weight().layout();
  if (weight == nullptr || tokens_layout_ == nullptr) return weight;
  Placements placements = weight->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_replicate(placements[axis]) && is_shard(tokens_layout_->placements[axis]) &&
        weight->mesh_shape().size(static_cast<int>(axis)) > 1)
      placements[axis] = Partial{};
  return weight->with(std::move(placements));
}

Tensors Experts::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, frame.exact() ? 3 : 2, "inputs");
  const Tensor &x = inputs[0], &offsets = inputs[1];
  const Tensor up_weight = up_proj->weight();
  const Shape of_hidden{x.size(0), up_weight.size(1)};
  const auto make = [&] { return frame.compute().make(of_hidden, x.dtype()); };
  const Tensor gate = gate_proj ? make() : Tensor(), up = make(), hidden = make();
  const Tensor y = frame.compute().make(x.shape(), x.dtype(),
                                        rows_memory_ == Memory::shared ? Memory::shared : out_memory());
  experts_forward(frame.kernels(), kind_, x.view(), offsets.as<std::int64_t>(),
                  {gate_proj ? gate_proj->weight().view() : ConstTensorView{}, up_weight.view(),
                   down_proj->weight().view()},
                  {gate ? gate.view() : TensorView{}, up.view(), hidden.view()}, y.view());
  Tensors kept{x, offsets, up, hidden};
  if (frame.exact()) kept.push_back(inputs[2]);
  if (gate) kept.push_back(gate);
  frame.push(*this, std::move(kept));
  return {y};
}

Tensors Experts::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &offsets = kept[1], &up = kept[2], &hidden = kept[3];
  const Tensor gate = gate_proj ? kept.back() : Tensor();
  const Tensor dx = frame.compute().make(x.shape(), x.dtype(),
                                         rows_memory_ == Memory::shared ? Memory::shared : dx_memory());
  ExpertGradients to;
  if (frame.exact()) {
    to.block_offsets = kept[4].as<std::int64_t>();
    to.blocks = static_cast<int>(kept[4].size(1)) - 1;
  }
  // The parameters' gradients are written by one call: each accumulate() gives the place of its own.
  const auto run = [&] {
    experts_backward(frame.kernels(), kind_, gradients[0].view(), x.view(), offsets.as<std::int64_t>(),
                     {gate_proj ? gate_proj->weight().view() : ConstTensorView{}, up_proj->weight().view(),
                      down_proj->weight().view()},
                     {gate ? gate.view() : TensorView{}, up.view(), hidden.view()}, dx.view(), to);
  };
  const auto with = [&](Parameter& p, TensorView& view, bool& add, const auto& next) {
    if (!p.trainable()) return next();
    p.accumulate(gradient_layout(p), [&](const Tensor& into, bool adds) {
      view = into.view();
      add = adds;
      next();
    });
  };
  with(*down_proj, to.down, to.add_down, [&] {
    with(*up_proj, to.up, to.add_up, [&] {
      if (gate_proj)
        with(*gate_proj, to.gate, to.add_gate, run);
      else
        run();
    });
  });
  return {dx};
}

}  // namespace weft
