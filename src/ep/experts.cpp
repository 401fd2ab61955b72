#include "weft/ep/experts.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <vector>

#include "base/mutant.hpp"
#include "ep/tokens.hpp"
#include "ep/views.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/base/exact.hpp"
#include "weft/group/process_group.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::KernelContext;
using kernels::Stored;

struct ExpertSizes {
  std::int64_t experts, rows, dim, hidden;
};

void expect_kept_and_offsets(std::string_view call, ExpertKind kind, DType dtype,
                             std::span<const std::int64_t> offsets, const ExpertActivations& kept,
                             const ExpertSizes& s) {
  const Shape of_hidden{s.rows, s.hidden};
  if (kind == ExpertKind::swiglu) ep::expect_view(call, "kept.gate", kept.gate, dtype, of_hidden);
  ep::expect_view(call, "kept.up", kept.up, dtype, of_hidden);
  ep::expect_view(call, "kept.hidden", kept.hidden, dtype, of_hidden);
  if (offsets.empty() || offsets.size() != static_cast<std::size_t>(s.experts) + 1 || offsets.front() != 0 ||
      offsets.back() != s.rows || !std::ranges::is_sorted(offsets))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} offsets up to {}; expected {} that rise from 0 to {} rows", call,
                            offsets.size(), offsets.empty() ? 0 : offsets.back(), s.experts + 1, s.rows));
}

void expect_rows_dtype(std::string_view call, const ConstTensorView& x) {
  ep::expect_matrix(call, "x", x);
  if (x.dtype != DType::f32 && x.dtype != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: x is {}; expected f32 or bf16", call, name(x.dtype)));
}

void check_sizes(std::string_view call, ExpertKind kind, const ConstTensorView& x,
                 std::span<const std::int64_t> offsets, const ExpertWeights& w,
                 const ExpertActivations& kept) {
  expect_rows_dtype(call, x);
  if (w.up.shape.rank() != 3)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: up is {}; expected (experts, hidden, dim)", call, to_string(w.up.shape)));
  const ExpertSizes s{w.up.shape[0], x.shape[0], w.up.shape[2], w.up.shape[1]};
  if (x.dtype == DType::bf16 && w.up.dtype == DType::f32)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: x is bf16 and the weights f32; expected weights in bf16", call));
  const DType of_weights = w.up.dtype == DType::bf16 ? DType::bf16 : DType::f32;
  ep::expect_view(call, "x", x, x.dtype, {s.rows, s.dim}, ", as up");
  ep::expect_view(call, "up", w.up, of_weights, {s.experts, s.hidden, s.dim});
  ep::expect_view(call, "down", w.down, of_weights, {s.experts, s.dim, s.hidden}, ", from up");
  if (kind == ExpertKind::swiglu) ep::expect_view(call, "gate", w.gate, of_weights, w.up.shape, ", as up");
  expect_kept_and_offsets(call, kind, x.dtype, offsets, kept, s);
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

// c = a b in the dtype of c; over a tree if there are leaves
void product(KernelContext& ctx, const ConstTensorView& a, const ConstTensorView& b, Stored b_stored,
             const TensorView& c, int leaves = 0) {
  const std::int64_t m = c.shape[0], n = c.shape[1], k = a.shape[1];
  const kernels::ProductTree tree{.leaves = WEFT_MUTANT("exact_expert_hidden_whole") ? 1 : leaves};
  if (leaves > 0 && a.dtype == DType::bf16)
    kernels::tree_matmul(ctx, a.as<bf16>().data(), Stored::plain, b.as<bf16>().data(), b_stored,
                         c.as<float>().data(), m, n, k, tree);
  else if (leaves > 0)
    kernels::tree_matmul(ctx, a.as<float>().data(), Stored::plain, b.as<float>().data(), b_stored,
                         c.as<float>().data(), m, n, k, tree);
  else if (c.dtype == DType::bf16)
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

namespace {

// In exact mode products are f32.
void expect_exact_dtype(std::string_view call, const ConstTensorView& x, const ExactExperts& exact) {
  if (exact.hidden_blocks != 0 && x.dtype != DType::f32)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: x is {}; expected f32 in exact mode", call, name(x.dtype)));
}

// to = the rows of each expert times its matrix
void products(KernelContext& ctx, std::span<const std::int64_t> offsets, const ConstTensorView& rows,
              const ConstTensorView& matrices, Stored stored, const TensorView& to, int leaves = 0) {
  for (std::size_t e = 0; e + 1 < offsets.size(); ++e) {
    const std::int64_t first = offsets[e], count = offsets[e + 1] - first;
    if (count > 0)
      product(ctx, rows_of_view(rows, first, count), matrix_of(matrices, static_cast<std::int64_t>(e)),
              stored, rows_of_view(to, first, count), leaves);
  }
}

}  // namespace

void experts_forward(KernelContext& ctx, ExpertKind kind, const ConstTensorView& x,
                     std::span<const std::int64_t> offsets, const ExpertWeights& w,
                     const ExpertActivations& kept, const TensorView& y, const ExactExperts& exact) {
  check_sizes("experts_forward", kind, x, offsets, w, kept);
  ep::expect_view("experts_forward", "y", y, x.dtype, x.shape, ", as x");
  expect_exact_dtype("experts_forward", x, exact);
  const Rounded rows(ctx, x, w.up.dtype);
  if (kind == ExpertKind::swiglu) products(ctx, offsets, rows.view, w.gate, Stored::transposed, kept.gate);
  products(ctx, offsets, rows.view, w.up, Stored::transposed, kept.up);
  activate(ctx, kind, kept);
  const Rounded hidden(ctx, kept.hidden, w.down.dtype);
  products(ctx, offsets, hidden.view, w.down, Stored::transposed, y, exact.hidden_blocks);
}

void experts_backward(KernelContext& ctx, ExpertKind kind, const ConstTensorView& dy,
                      const ConstTensorView& x, std::span<const std::int64_t> offsets, const ExpertWeights& w,
                      const ExpertActivations& kept, const TensorView& dx, const ExactExperts& exact) {
  check_sizes("experts_backward", kind, x, offsets, w, kept);
  ep::expect_view("experts_backward", "dy", dy, x.dtype, x.shape, ", as x");
  ep::expect_view("experts_backward", "dx", dx, x.dtype, x.shape, ", as x");
  expect_exact_dtype("experts_backward", x, exact);
  const bool gated = kind == ExpertKind::swiglu, in_parts = gated && exact.hidden_blocks != 0;
  if (in_parts)
    ep::expect_view("experts_backward", "exact.dx_gate", exact.dx_gate, x.dtype, x.shape, ", as x");
  const DType of_weights = w.up.dtype;
  std::vector<std::byte> memory(static_cast<std::size_t>(kept.hidden.bytes()));
  const TensorView dhidden{
      memory.data(), kept.hidden.dtype, {}, kept.hidden.shape, row_major(kept.hidden.shape)};
  products(ctx, offsets, Rounded(ctx, dy, of_weights).view, w.down, Stored::plain, dhidden);
  activate_backward(ctx, kind, dhidden, kept);
  products(ctx, offsets, Rounded(ctx, kept.up, of_weights).view, w.up, Stored::plain, dx,
           exact.hidden_blocks);
  if (!gated) return;
  memory.resize(in_parts ? 0 : static_cast<std::size_t>(dx.bytes()));
  const TensorView through_gate =
      in_parts ? exact.dx_gate : TensorView{memory.data(), dx.dtype, {}, dx.shape, row_major(dx.shape)};
  products(ctx, offsets, Rounded(ctx, kept.gate, of_weights).view, w.gate, Stored::plain, through_gate,
           exact.hidden_blocks);
  if (in_parts) return;
  by_expert_dtype(dx.dtype, [&]<class T>() {
    kernels::add(ctx, dx.as<T>().data(), through_gate.as<T>().data(), dx.as<T>().data(), dx.count());
  });
}

void experts_weight_gradients(KernelContext& ctx, ExpertKind kind, const ConstTensorView& dy,
                              const ConstTensorView& x, std::span<const std::int64_t> offsets,
                              DType of_weights, const ExpertActivations& kept,
                              const ExpertGradients& gradients) {
  const std::string_view call = "experts_weight_gradients";
  expect_rows_dtype(call, x);
  ep::expect_matrix(call, "kept.up", kept.up);
  const ExpertSizes s{static_cast<std::int64_t>(offsets.size()) - 1, x.shape[0], x.shape[1],
                      kept.up.shape[1]};
  if (of_weights != DType::bf16 && (of_weights != DType::f32 || x.dtype == DType::bf16))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: of_weights is {}; expected {}", call, name(of_weights),
                            x.dtype == DType::bf16 ? "bf16, as x" : "f32 or bf16"));
  ep::expect_view(call, "x", x, x.dtype, x.shape);
  ep::expect_view(call, "dy", dy, x.dtype, x.shape, ", as x");
  expect_kept_and_offsets(call, kind, x.dtype, offsets, kept, s);
  const Shape of_up{s.experts, s.hidden, s.dim}, of_down{s.experts, s.dim, s.hidden};
  for (const auto& [what, gradient, shape] : {std::tuple{"gradients.gate", &gradients.gate, &of_up},
                                              {"gradients.up", &gradients.up, &of_up},
                                              {"gradients.down", &gradients.down, &of_down}})
    if (gradient->data != nullptr)
      ep::expect_view(call, what, *gradient, DType::f32, *shape, ", as the weight");
  const int blocks = gradients.blocks;
  if (blocks != 0 && gradients.block_offsets.size() != static_cast<std::size_t>(s.experts * (blocks + 1)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} block offsets; expected {} experts x ({} blocks + 1)", call,
                            gradients.block_offsets.size(), s.experts, blocks));
  // dw = or += dᵀ rows of each expert's rows; of none it is 0
  const auto weight_gradient = [&](const ConstTensorView& d_given, const ConstTensorView& rows_given,
                                   const TensorView& dw, bool add) {
    if (dw.data == nullptr) return;
    const Rounded d(ctx, d_given, of_weights), rows(ctx, rows_given, of_weights);
    for (std::int64_t e = 0; e < s.experts; ++e) {
      const TensorView to = matrix_of(dw, e);
      const std::int64_t first = offsets[static_cast<std::size_t>(e)],
                         count = offsets[static_cast<std::size_t>(e) + 1] - first;
      if (blocks > 0 && !WEFT_MUTANT("exact_expert_rows_whole"))
        add_tree(ctx, d.view, rows.view,
                 gradients.block_offsets.subspan(static_cast<std::size_t>(e * (blocks + 1)),
                                                 static_cast<std::size_t>(blocks) + 1),
                 to, add);
      else
        multiply(ctx, rows_of_view(d.view, first, count), Stored::transposed,
                 rows_of_view(rows.view, first, count), Stored::plain, to.as<float>().data(), to.shape[0],
                 to.shape[1], count, add);
    }
  };
  weight_gradient(dy, kept.hidden, gradients.down, gradients.add_down);
  weight_gradient(kept.up, x, gradients.up, gradients.add_up);
  if (kind == ExpertKind::swiglu) weight_gradient(kept.gate, x, gradients.gate, gradients.add_gate);
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

LayoutRef ep::gradient_layout(const Parameter& p, const LayoutRef& tokens) {
  const LayoutRef weight = p.weight().layout();
  if (weight == nullptr || tokens == nullptr) return weight;
  Placements placements = weight->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_replicate(placements[axis]) && is_shard(tokens->placements[axis]) &&
        weight->mesh_shape().size(static_cast<int>(axis)) > 1)
      placements[axis] = Partial{};
  return weight->with(std::move(placements));
}
LayoutRef Experts::gradient_layout(const Parameter& p) const {
  return ep::gradient_layout(p, tokens_layout_);
}

ExpertWeights Experts::weights() const {
  return {gate_proj ? gate_proj->weight().view() : ConstTensorView{}, up_proj->weight().view(),
          down_proj->weight().view()};
}

// The axes of several ranks that split the hidden features, outermost first; empty: none.
DeviceMesh Experts::hidden_axes() const {
  const LayoutRef weight = up_proj->weight().layout();
  std::vector<std::string> names;
  if (weight)
    for (const int axis : weight->nesting)
      if (weight->mesh_shape().size(axis) > 1 &&
          is_shard(weight->placements[static_cast<std::size_t>(axis)], 1))
        names.push_back(weight->mesh_shape().name(axis));
  return names.empty() ? DeviceMesh() : weight->mesh().submesh(names);
}

namespace {

Memory memory_of(Memory one, Memory other) {
  return one == Memory::shared || other == Memory::shared ? Memory::shared : Memory::local;
}

// The sum over the axes, in the tree of exact mode.
void add_contributions(const DeviceMesh& axes, const Tensor& t) {
  if (axes) axes.group().all_reduce(t.view(), t.view(), {.order = Order::canonical}).wait();
}

}  // namespace

Tensors Experts::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, frame.exact() ? 3 : 2, "inputs");
  const Tensor &x = inputs[0], &offsets = inputs[1];
  const Shape of_hidden{x.size(0), up_proj->weight().size(1)};
  const auto make = [&] { return frame.compute().make(of_hidden, x.dtype()); };
  const Tensor gate = gate_proj ? make() : Tensor(), up = make(), hidden = make();
  const DeviceMesh axes = frame.exact() ? hidden_axes() : DeviceMesh();
  ExactExperts exact;
  if (frame.exact()) exact.hidden_blocks = kExactBlocks / (axes ? axes.size() : 1);
  const Tensor y = frame.compute().make(x.shape(), x.dtype(),
                                        axes ? Memory::shared : memory_of(rows_memory_, out_memory()));
  experts_forward(frame.kernels(), kind_, x.view(), offsets.as<std::int64_t>(), weights(),
                  {gate ? gate.view() : TensorView{}, up.view(), hidden.view()}, y.view(), exact);
  add_contributions(axes, y);
  Tensors kept{x, offsets, up, hidden};
  if (frame.exact()) kept.push_back(inputs[2]);
  if (gate) kept.push_back(gate);
  frame.push(*this, std::move(kept));
  return {y};
}

Tensors Experts::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Tensor &x = kept[0], &dy = gradients[0];
  const auto activations = [kept, gated = gate_proj != nullptr] {
    return ExpertActivations{gated ? kept.back().view() : TensorView{}, kept[2].view(), kept[3].view()};
  };
  const DeviceMesh axes = frame.exact() ? hidden_axes() : DeviceMesh();
  // In exact mode the parts of dx through up and through gate are sums of their own.
  const bool in_parts = frame.exact() && gate_proj != nullptr;
  const Shape parts{in_parts ? 2 * x.size(0) : x.size(0), x.size(1)};
  const Tensor dx = frame.compute().make(
      parts, x.dtype(), axes || in_parts ? Memory::shared : memory_of(rows_memory_, dx_memory()));
  const Tensor through_up = in_parts ? dx.slice_flat(0, x.shape()) : dx;
  ExactExperts exact;
  if (frame.exact()) exact.hidden_blocks = kExactBlocks / (axes ? axes.size() : 1);
  if (in_parts) exact.dx_gate = dx.slice_flat(x.count(), x.shape()).view();
  experts_backward(frame.kernels(), kind_, dy.view(), x.view(), kept[1].as<std::int64_t>(), weights(),
                   activations(), through_up.view(), exact);
  add_contributions(axes, dx);
  if (in_parts)
    kernels::add(frame.kernels(), through_up.data_ptr<float>(), exact.dx_gate.as<float>().data(),
                 through_up.data_ptr<float>(), x.count());

  frame.later([this, kept, dy, activations, exact = frame.exact(), of_weights = up_proj->weight().dtype(),
               layouts = std::array{gate_proj ? gradient_layout(*gate_proj) : nullptr,
                                    gradient_layout(*up_proj), gradient_layout(*down_proj)}](Frame& f) {
    ExpertGradients to;
    if (exact) {
      to.block_offsets = kept[4].as<std::int64_t>();
      to.blocks = static_cast<int>(kept[4].size(1)) - 1;
    }
    // The parameters' gradients are written by one call: each accumulate() gives the place of its own.
    const auto run = [&] {
      experts_weight_gradients(f.kernels(), kind_, dy.view(), kept[0].view(), kept[1].as<std::int64_t>(),
                               of_weights, activations(), to);
    };
    const auto with = [&](Parameter& p, const LayoutRef& layout, TensorView& view, bool& add,
                          const auto& next) {
      if (!p.trainable()) return next();
      p.accumulate(layout, [&](const Tensor& into, bool adds) {
        view = into.view();
        add = adds;
        next();
      });
    };
    with(*down_proj, layouts[2], to.down, to.add_down, [&] {
      with(*up_proj, layouts[1], to.up, to.add_up, [&] {
        if (gate_proj)
          with(*gate_proj, layouts[0], to.gate, to.add_gate, run);
        else
          run();
      });
    });
  });
  return {through_up};
}

}  // namespace weft
