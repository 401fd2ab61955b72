// Attention layers whose sequence (dimension 1) is sharded over ranks.
#include "domain/plans.hpp"
#include "domain/rules.hpp"
#include "domain/split_attention.hpp"
#include "nn/shared_heads.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"

namespace weft::domain {
namespace {

bool cut_in_sequence(const LayoutRef& x) {
  if (x == nullptr) return false;
  for (int a = 0; a < x->mesh_shape().axis_count(); ++a)
    if (x->mesh_shape().size(a) > 1 && is_shard(x->placements[static_cast<std::size_t>(a)], 1)) return true;
  return false;
}

void expect_sequence(const Module& module, const char* name, const Tensor& t, std::int64_t dim) {
  const TensorName what = layouts::named(module, name);
  expect_dtype(what, t, DType::f32);
  if (t.shape().rank() != 3 || t.size(2) != dim)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, sequence, {})", what.text(),
                                                     to_string(t.shape()), dim));
}

// The layout of this rank's heads, from the features of q and k. Axes that split heads also split the heads
// of keys and values, or the ranks of these axes share them.
template <class Attending>
HeadsShape share_of_heads(const Attending& module, const Tensor& q, const Tensor& k, const Tensor& v) {
  const std::int64_t heads = module.config().heads, kv_heads = module.config().kv_heads,
                     head_dim = module.config().head_dim;
  layouts::expect_whole(layouts::named(module, "q"), q, "attention", false);
  layouts::expect_same(layouts::named(module, "v"), v.layout(), k.layout(), "as k");
  const HeadsShape s{q.size(0), q.size(2) / head_dim, k.size(2) / head_dim, head_dim,
                     bf16_products(*module.q_proj.weight)};
  if (shared_heads::shares_heads(*q.layout(), *k.layout())) {
    shared_heads::expect_heads_of_q(module, {heads, kv_heads, head_dim}, *q.layout(), *k.layout());
    return s;
  }
  if (q.size(2) % head_dim != 0 || k.size(2) % head_dim != 0 || s.heads * kv_heads != s.kv_heads * heads)
    throw Error(ErrorCode::layout,
                fmt::format("\"{}\": this rank has {} features of queries and {} of keys; expected whole "
                            "heads of {}, {} of queries for each "
                            "of keys: a sequence that is cut goes with heads that are all cut alike",
                            module.path(), q.size(2), k.size(2), head_dim, heads / kv_heads));
  return s;
}

SplitMask split_mask_of(const Tensor& of_queries, const Tensor& of_keys) {
  const Shape& whole = layouts::global_shape(of_queries);
  return {of_queries, of_keys, whole[0] != 1, whole[1] != 1};
}

// The mask's layouts over a sharded sequence. Its samples are sharded like those of x. Its queries are
// sharded like those of x, or its keys like those of the context, or neither.
struct MaskLayouts {
  MaskLayouts(const Shape& mask, const Tensor& x, const Tensor& context) {
    LayoutRef samples = x.layout()->with_global(mask);
    for (int a = 0; a < samples->mesh_shape().axis_count(); ++a) {
      const auto axis = static_cast<std::size_t>(a);
      if (is_shard(samples->placements[axis], 0) && mask[0] != 1) continue;
      if (is_shard(samples->placements[axis], 1)) continue;
      samples = samples->with(samples->mesh_shape().name(a), Replicate{});
    }
    const DeviceMesh axes = x.layout()->mesh().submesh(Partition(x.layout()).dim(1).axes);
    by_queries = samples;
    whole = samples->with(axes, Replicate{});
    by_keys =
        samples->with(context.layout()->mesh().submesh(Partition(context.layout()).dim(1).axes), Shard{2});
  }
  LayoutRef whole, by_queries, by_keys;
};

// The part of the mask of a sharded sequence that this rank needs. A mask that differs between queries is
// needed twice, for own queries and for own keys. One exchange brings the dimension that is not sharded.
// Collective.
SplitMask split_mask(const Module& module, Frame& frame, const Tensor& given, const Tensor& x,
                     const Tensor& context) {
  const TensorName what = layouts::named(module, "mask");
  expect_dtype(what, given, DType::f32);
  expect_mask_shape(what, given, x, context);
  const Shape& got = layouts::global_shape(given);
  const MaskLayouts layouts_of(got, x, context);
  const Tensor mask = given.layout() ? given : given.with_layout(replicated_layout(x.layout()->mesh(), got));
  if (got[0] != 1) expect_same_samples(module, x, mask, "mask");
  if (!layouts::same(mask.layout(), layouts_of.whole) &&
      !layouts::same(mask.layout(), layouts_of.by_queries) &&
      !layouts::same(mask.layout(), layouts_of.by_keys))
    throw Error(
        ErrorCode::layout,
        fmt::format(
            "{} is {}; expected {}, its queries cut as those of x; or {}, its keys cut as those of the "
            "context; or {}",
            what.text(), to_string(*mask.layout()), to_string(*layouts_of.by_queries),
            to_string(*layouts_of.by_keys), to_string(*layouts_of.whole)));
  const Tensor of_queries = redistribute(mask, got[1] == 1 ? layouts_of.whole : layouts_of.by_queries);
  return split_mask_of(of_queries, frame.keeps() ? redistribute(mask, layouts_of.by_keys) : Tensor());
}

// The plans of a layer, by the layouts of q and k.
class SplitAttentions {
 public:
  explicit SplitAttentions(bool causal) : causal_(causal) {}
  std::shared_ptr<const SplitAttention> of(const Tensor& q, const Tensor& k) const {
    return plans_.of({q.layout(), k.layout()},
                     [&] { return SplitAttention(q.layout(), k.layout(), causal_); });
  }

 private:
  bool causal_;
  Plans<SplitAttention, std::pair<LayoutRef, LayoutRef>> plans_;
};

// Attends to all keys, and keeps the values that backward needs.
Tensor attend(const Module& module, Frame& frame, const SplitAttentions& plans, const HeadsShape& s,
              const Tensor& q, const Tensor& k, const Tensor& v, const SplitMask& mask = {}) {
  Compute& compute = frame.compute();
  const Tensor out = compute.make(q.shape()).with_layout(q.layout()),
               softmax = compute.make({s.batch, s.heads, q.size(1), kernels::kSoftmaxTerms});
  split_attention_forward(frame, *plans.of(q, k), s, q, k, v, mask, out, softmax);
  Tensors kept{q, k, v, out, softmax};
  if (mask.of_queries) kept.insert(kept.end(), {mask.of_queries, mask.of_keys});
  frame.push(module, std::move(kept));
  return out;
}

struct Attended {
  HeadsShape shape;
  Tensor dq, dk, dv;
};
// The adjoint of attend().
template <class Attending>
Attended attend_backward(const Attending& module, Frame& frame, const SplitAttentions& plans,
                         const Tensor& dout) {
  Compute& compute = frame.compute();
  const Tensors kept = frame.pop(module);
  const Tensor &q = kept[0], &k = kept[1], &v = kept[2], &out = kept[3], &softmax = kept[4];
  layouts::expect_same(layouts::named(module, "d(out)"), dout.layout(), out.layout(), "as out");
  const LayoutRef of_dk = shared_heads::of_shared_gradient(q.layout(), k.layout());
  Attended a{share_of_heads(module, q, k, v), compute.make(q.shape()).with_layout(q.layout()),
             compute.make(k.shape()).with_layout(of_dk), compute.make(v.shape()).with_layout(of_dk)};
  SplitMask mask;
  if (kept.size() > 5) mask = split_mask_of(kept[5], kept[6]);
  split_attention_backward(frame, *plans.of(q, k), a.shape, dout, q, k, v, mask, out, softmax, a.dq, a.dk,
                           a.dv);
  return a;
}

class CausalPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs x, Frame& frame) const override {
    auto& attention = dynamic_cast<Attention&>(module);
    const AttentionConfig& c = attention.config();
    if (x.size() != 1 || !cut_in_sequence(x[0].layout())) return own_forward(module, x, frame);
    expect_sequence(module, "x", x[0], c.dim);
    if (frame.documents() != nullptr)
      throw Error(
          ErrorCode::unsupported,
          fmt::format("\"{}\": the pass has documents, and the sequence is cut over ranks; expected whole "
                      "sequences, or no documents",
                      module.path()));
    Compute& compute = frame.compute();
    const Tensor q_plain = attention.q_proj.forward(x, frame)[0],
                 k_plain = attention.k_proj.forward(x, frame)[0], v = attention.v_proj.forward(x, frame)[0];
    const HeadsShape s = share_of_heads(attention, q_plain, k_plain, v);
    const Parts positions = parts_of(q_plain.layout(), 1);
    const RopeTables& rope = tables_for(attention, positions.size);
    const Tensor q = compute.make(q_plain.shape()).with_layout(q_plain.layout()),
                 k = compute.make(k_plain.shape()).with_layout(k_plain.layout());
    const std::int64_t first = positions.own().lo * rope.half, length = positions.own().size();
    kernels::rope_forward(frame.kernels(), q_plain.data_ptr<float>(), rope.cos.data() + first,
                          rope.sin.data() + first, q.data_ptr<float>(),
                          {s.batch, length, s.heads, s.head_dim});
    kernels::rope_forward(frame.kernels(), k_plain.data_ptr<float>(), rope.cos.data() + first,
                          rope.sin.data() + first, k.data_ptr<float>(),
                          {s.batch, length, s.kv_heads, s.head_dim});
    return attention.o_proj.forward(attend(module, frame, plans_, s, q, k, v), frame);
  }

  Tensors backward(Module& module, Inputs dy, Frame& frame) const override {
    auto& attention = dynamic_cast<Attention&>(module);
    if (dy.size() != 1 || !cut_in_sequence(dy[0].layout())) return own_backward(module, dy, frame);
    Compute& compute = frame.compute();
    const Tensor dout = attention.o_proj.backward(dy, frame)[0];
    const auto [s, dq, dk, dv] = attend_backward(attention, frame, plans_, dout);
    const Parts positions = parts_of(dq.layout(), 1);
    const RopeTables& rope = tables_for(attention, positions.size);
    const std::int64_t first = positions.own().lo * rope.half, length = positions.own().size();
    kernels::rope_backward(frame.kernels(), dq.data_ptr<float>(), rope.cos.data() + first,
                           rope.sin.data() + first, dq.data_ptr<float>(),
                           {s.batch, length, s.heads, s.head_dim});
    kernels::rope_backward(frame.kernels(), dk.data_ptr<float>(), rope.cos.data() + first,
                           rope.sin.data() + first, dk.data_ptr<float>(),
                           {s.batch, length, s.kv_heads, s.head_dim});
    const Tensor through_v = attention.v_proj.backward(dv, frame)[0],
                 through_k = attention.k_proj.backward(dk, frame)[0],
                 through_q = attention.q_proj.backward(dq, frame)[0];
    const TensorName what = layouts::named(module, "dx");
    return {add_tensors(add_tensors(through_v, through_k, compute, what), through_q, compute, what,
                        Memory::shared)};
  }

 private:
  static const RopeTables& tables_for(const Attention& attention, std::int64_t length) {
    const RopeTables* const rope = attention.rope().get();
    if (rope == nullptr || rope->positions < length || rope->half * 2 != attention.config().head_dim)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format(
              "\"{}\": sequence {} of head_dim {}; the rotary tables are for {} positions and head_dim {}",
              attention.path(), length, attention.config().head_dim, rope == nullptr ? 0 : rope->positions,
              rope == nullptr ? 0 : rope->half * 2));
    return *rope;
  }

  SplitAttentions plans_{true};
};

class CrossPasses final : public Passes {
 public:
  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override {
    auto& attention = dynamic_cast<CrossAttention&>(module);
    const CrossAttentionConfig& c = attention.config();
    if (inputs.size() < 2 || !cut_in_sequence(inputs[0].layout()) || !cut_in_sequence(inputs[1].layout()))
      return own_forward(module, inputs, frame);
    expect_sequence(module, "x", inputs[0], c.dim);
    expect_sequence(module, "context", inputs[1], c.context_dim);
    expect_same_samples(module, inputs[0], inputs[1], "context");
    SplitMask mask;
    if (inputs.size() > 2) {
      expect_same_axes(module, inputs[0], inputs[1]);
      mask = split_mask(module, frame, inputs[2], inputs[0], inputs[1]);
    }
    const Tensor q = attention.q_proj.forward(inputs[0], frame)[0],
                 k = attention.k_proj.forward(inputs[1], frame)[0],
                 v = attention.v_proj.forward(inputs[1], frame)[0];
    const HeadsShape s = share_of_heads(attention, q, k, v);
    expect_same_axes(module, q, k);
    return attention.o_proj.forward(attend(module, frame, plans_, s, q, k, v, mask), frame);
  }

  Tensors backward(Module& module, Inputs dy, Frame& frame) const override {
    auto& attention = dynamic_cast<CrossAttention&>(module);
    if (dy.size() != 1 || !cut_in_sequence(dy[0].layout())) return own_backward(module, dy, frame);
    Compute& compute = frame.compute();
    const Tensor dout = attention.o_proj.backward(dy, frame)[0];
    const Attended a = attend_backward(attention, frame, plans_, dout);
    const Tensor through_v = attention.v_proj.backward(a.dv, frame)[0],
                 through_k = attention.k_proj.backward(a.dk, frame)[0];
    const Tensor dx = attention.q_proj.backward(a.dq, frame)[0];
    return {dx,
            add_tensors(through_v, through_k, compute, layouts::named(module, "d(context)"), Memory::shared)};
  }

 private:
  static DeviceMesh axes_of(const Tensor& t) {
    return t.layout()->mesh().submesh(Partition(t.layout()).dim(1).axes);
  }
  static void expect_same_axes(const Module& module, const Tensor& q, const Tensor& k) {
    const DeviceMesh of_q = axes_of(q), of_k = axes_of(k);
    if (!(of_q == of_k))
      throw Error(ErrorCode::layout,
                  fmt::format("{} is cut along {}, x along {}; expected the same axes",
                              layouts::named(module, "context").text(), of_k.name(), of_q.name()));
  }

  SplitAttentions plans_{false};
};

}  // namespace

SpaceRule sequence_rule(const Module& module, const DeviceMesh&) {
  return either(rule_by<Attention, CausalPasses>(module), rule_by<CrossAttention, CrossPasses>(module));
}

}  // namespace weft::domain
