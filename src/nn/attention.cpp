#include "weft/nn/attention.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <limits>
#include <utility>

#include "base/mutant.hpp"
#include "nn/attention_parts.hpp"
#include "nn/exact/heads.hpp"
#include "nn/operands.hpp"
#include "nn/shared_heads.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/key_value_cache.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

std::shared_ptr<const RopeTables> RopeTables::make(std::int64_t positions, std::int64_t head_dim,
                                                   double theta) {
  if (positions < 0 || head_dim < 2 || head_dim % 2 != 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("rope: {} positions of head_dim {}; expected 0 positions or more, and an even head_dim "
                    "of at least 2",
                    positions, head_dim));
  auto tables = std::make_shared<RopeTables>();
  tables->positions = positions;
  tables->half = head_dim / 2;
  tables->cos.resize(static_cast<std::size_t>(positions * tables->half));
  tables->sin.resize(tables->cos.size());
  kernels::rope_tables(static_cast<float>(theta), head_dim, positions, tables->cos.data(),
                       tables->sin.data());
  return tables;
}

namespace {

// The tables on the device of the kernels: on the CPU the originals, on another device one copy for each
// Compute.
struct RopeCopies {
  explicit RopeCopies(Compute& c) : compute(c) {}
  struct Copy {
    std::shared_ptr<const RopeTables> of;
    Tensor cos, sin;
  };
  Compute& compute;
  std::vector<Copy> copies;

  Tensor copied(const std::vector<float>& table) const {
    auto* const data = const_cast<float*>(table.data());  // only read
    const Tensor here(Storage::borrow(data, table.size() * sizeof(float)), 0,
                      {static_cast<std::int64_t>(table.size())}, DType::f32);
    return to_device(compute.context(), here, compute.stream());
  }
};

struct RopePointers {
  const float *cos, *sin;
};

RopePointers on_device(Compute& compute, const std::shared_ptr<const RopeTables>& tables) {
  if (compute.device() == Device{}) return {tables->cos.data(), tables->sin.data()};
  RopeCopies& all = compute.attached<RopeCopies>();
  for (const RopeCopies::Copy& c : all.copies)
    if (c.of == tables) return {c.cos.data_ptr<float>(), c.sin.data_ptr<float>()};
  all.copies.push_back({tables, all.copied(tables->cos), all.copied(tables->sin)});
  return {all.copies.back().cos.data_ptr<float>(), all.copies.back().sin.data_ptr<float>()};
}

// The tensors of a backward pass: dout, the gradient that arrived through the projection behind attention;
// the tensors that the forward pass kept, in the order on the Frame; and the gradients of q, k and v, not
// written yet. softmax: (batch, heads, queries, kSoftmaxTerms); mask: empty if there is none.
struct HeadsBackward {
  Tensor dout, q, k, v, out, softmax, mask, dq, dk, dv;
};
HeadsBackward begin_heads_backward(const Module& module, Linear& o_proj, Inputs dy, Frame& frame) {
  Compute& compute = frame.compute();
  const Tensor dout = o_proj.backward(dy, frame)[0];
  const Tensors kept = frame.pop(module);
  const Tensor &q = kept[0], &k = kept[1], &v = kept[2], &out = kept[3];
  layouts::expect_same(layouts::named(module, "d(out)"), dout.layout(), out.layout(), "as out");
  const LayoutRef of_dk =
      WEFT_MUTANT("heads_unsummed") ? k.layout() : shared_heads::of_shared_gradient(q.layout(), k.layout());
  return {dout,
          q,
          k,
          v,
          out,
          kept[4],
          kept.size() > 5 ? kept[5] : Tensor(),
          compute.make(q.shape(), q.dtype()).with_layout(q.layout()),
          compute.make(k.shape(), k.dtype()).with_layout(of_dk),
          compute.make(v.shape(), v.dtype()).with_layout(of_dk)};
}

// This rank's share of the heads, from the shapes of q, k and v. q: (batch, seq, heads·head_dim), k, v:
// (batch, seq, kv_heads·head_dim)
kernels::AttentionShape share_of_heads(const Module& module, const AttentionConfig& config, const Tensor& q,
                                       const Tensor& k, const Tensor& v) {
  const auto expect_heads = [&](const char* name, const Tensor& t) {
    if (t.layout()) {
      layouts::expect_whole(layouts::named(module, name), t, "attention", false);
      const Layout& layout = *t.layout();
      for (int axis = 0; axis < layout.mesh_shape().axis_count(); ++axis)
        if (layout.mesh_shape().size(axis) > 1 &&
            is_shard(layout.placements[static_cast<std::size_t>(axis)], 1))
          throw Error(
              ErrorCode::layout,
              fmt::format(
                  "{} is Shard(1) on {}; attention needs the whole sequence: a boundary must gather it first",
                  layouts::named(module, name).text(), layouts::axis_name(layout, axis)));
    }
    if (t.shape().back() % config.head_dim != 0)
      throw Error(
          ErrorCode::layout,
          fmt::format(
              "{} has {} features on this rank, which is no multiple of head_dim {}: a head is cut in two",
              layouts::named(module, name).text(), t.shape().back(), config.head_dim));
    return t.shape().back() / config.head_dim;
  };
  const std::int64_t heads = expect_heads("q", q), kv_heads = expect_heads("k", k);
  expect_heads("v", v);
  layouts::expect_same(layouts::named(module, "v"), v.layout(), k.layout(), "as k");
  if (q.layout() && k.layout()) {
    if (shared_heads::shares_heads(*q.layout(), *k.layout())) {
      shared_heads::expect_heads_of_q(module, {config.heads, config.kv_heads, config.head_dim}, *q.layout(),
                                      *k.layout());
      return {q.size(0), q.size(1), heads, kv_heads, config.head_dim};
    }
    layouts::expect_same(layouts::named(module, "k"), k.layout(), q.layout()->with_global(k.layout()->global),
                         "as q");
  }
  if (heads * config.kv_heads != kv_heads * config.heads)
    throw Error(ErrorCode::layout, fmt::format("\"{}\": this rank has {} query and {} key/value heads; "
                                               "expected {} query heads for each, as of {} "
                                               "and {} in all",
                                               module.path(), heads, kv_heads, config.heads / config.kv_heads,
                                               config.heads, config.kv_heads));
  return {q.size(0), q.size(1), heads, kv_heads, config.head_dim};
}

}  // namespace

Attention::Attention(const AttentionConfig& config, std::shared_ptr<const RopeTables> rope)
    : q_proj(config.dim, config.heads * config.head_dim, false, config.init),
      k_proj(config.dim, config.kv_heads * config.head_dim, false, config.init),
      v_proj(config.dim, config.kv_heads * config.head_dim, false, config.init),
      o_proj(config.heads * config.head_dim, config.dim, false, config.out_init),
      config_(config),
      rope_(std::move(rope)) {
  if (config.heads < 1 || config.head_dim < 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("attention: {} heads of head_dim {}; expected at least 1 of both", config.heads,
                            config.head_dim));
  if (config.kv_heads < 1 || config.heads % config.kv_heads != 0)
    throw Error(ErrorCode::bad_argument, fmt::format("attention: heads {} do not divide into kv_heads {}",
                                                     config.heads, config.kv_heads));
  if (config.head_dim % 2 != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("attention: head_dim {} is odd; rotary positions need pairs", config.head_dim));
  add("q_proj", q_proj);
  add("k_proj", k_proj);
  add("v_proj", v_proj);
  add("o_proj", o_proj);
}

namespace {

// One boundary before the module for each of its inputs; the projections behind these inputs have no
// boundaries.
OwnPlan plan_of_heads() {
  return {.styles = {{"", "enter"},
                     {"q_proj", "column"},
                     {"k_proj", "column"},
                     {"v_proj", "column"},
                     {"o_proj", "row"}}};
}

// Attention of the last s.seq of all known positions, over all of them.
Tensor attend_known(Frame& frame, const Tensor& q, const KeyValues& known, const kernels::AttentionShape& s) {
  Compute& compute = frame.compute();
  kernels::KernelContext& ctx = frame.kernels();
  const bool narrow = q.dtype() == DType::bf16;
  const Tensor wide = narrow ? compute.make(q.shape()) : q;
  if (narrow) kernels::widen_bf16(ctx, q.data_ptr<bf16>(), wide.data_ptr<float>(), q.count());
  const Tensor out = compute.make(q.shape());
  const kernels::AttentionPiece piece{.batch = 1,
                                      .queries = s.seq,
                                      .keys = known.size,
                                      .heads = s.heads,
                                      .kv_heads = s.kv_heads,
                                      .head_dim = s.head_dim,
                                      .first_query = known.size - s.seq,
                                      .first_key = 0,
                                      .causal = true,
                                      .begins = true,
                                      .ends = true,
                                      .bf16_products = s.bf16_products};
  const Tensor softmax = compute.make({s.heads, s.seq, kernels::kSoftmaxTerms});
  for (std::int64_t sample = 0; sample < s.batch; ++sample) {
    const std::int64_t at = sample * piece.q_elements(),
                       known_at = sample * known.most * s.kv_heads * s.head_dim;
    kernels::attention_piece_forward(ctx, wide.data_ptr<float>() + at,
                                     known.keys.data_ptr<float>() + known_at,
                                     known.values.data_ptr<float>() + known_at, {},
                                     out.data_ptr<float>() + at, softmax.data_ptr<float>(), piece);
  }
  if (!narrow) return out.with_layout(q.layout());
  const Tensor rounded = compute.make(q.shape(), DType::bf16);
  kernels::round_to_bf16(ctx, out.data_ptr<float>(), rounded.data_ptr<bf16>(), out.count());
  return rounded.with_layout(q.layout());
}

}  // namespace

OwnPlan Attention::class_plan() const { return plan_of_heads(); }

Tensors Attention::do_forward(Inputs x, Frame& frame) {
  expect_count(x, 1, "inputs");
  if (x[0].shape().rank() != 3)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (batch, sequence, {})", layouts::named(*this, "x").text(),
                            to_string(x[0].shape()), config_.dim));
  if (rope_ == nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("\"{}\": rope is null; expected its tables", path()));
  Compute& compute = frame.compute();
  const Tensor q_plain = q_proj.forward(x, frame)[0];
  const Tensor k_plain = k_proj.forward(x, frame)[0];
  const Tensor v = v_proj.forward(x, frame)[0];
  kernels::AttentionShape s = share_of_heads(*this, config_, q_plain, k_plain, v);
  s.bf16_products = bf16_products(*q_proj.weight);
  if (known_ != nullptr && frame.keeps())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("\"{}\": a key/value cache exists, and the pass keeps tensors for a backward pass; "
                    "expected Frame::inference",
                    path()));
  if (known_ != nullptr && frame.documents() != nullptr)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("\"{}\": a key/value cache exists, and the pass has documents; expected sequences "
                    "of one document",
                    path()));
  const std::int64_t first = known_ == nullptr ? 0 : known_->size;  // the position of the first token
  if (first + s.seq > rope_->positions || rope_->half * 2 != s.head_dim)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "\"{}\": sequence {} of head_dim {}; the rotary tables are for {} positions and head_dim {}",
            path(), first + s.seq, s.head_dim, rope_->positions, rope_->half * 2));
  const Tensor q = compute.make(q_plain.shape(), q_plain.dtype()).with_layout(q_plain.layout());
  const Tensor k = compute.make(k_plain.shape(), k_plain.dtype()).with_layout(k_plain.layout());
  RopePointers rope = on_device(compute, rope_);
  rope.cos += first * rope_->half;
  rope.sin += first * rope_->half;
  by_element(q_plain, [&]<class T>() {
    each_part(frame, path(), s, [&](const PartOfAttention& at, const kernels::AttentionShape& of) {
      kernels::rope_forward(frame.kernels(), q_plain.data_ptr<T>() + at.q, rope.cos, rope.sin,
                            q.data_ptr<T>() + at.q, {of.batch, of.seq, of.heads, of.head_dim});
      kernels::rope_forward(frame.kernels(), k_plain.data_ptr<T>() + at.kv, rope.cos, rope.sin,
                            k.data_ptr<T>() + at.kv, {of.batch, of.seq, of.kv_heads, of.head_dim});
    });
  });
  if (known_ != nullptr) {
    known_->append(compute, k, v);
    return o_proj.forward(attend_known(frame, q, *known_, s), frame);
  }
  const Tensor out = compute.make(q.shape(), q.dtype()).with_layout(q.layout());
  const Tensor softmax = compute.make({s.batch, s.heads, s.seq, kernels::kSoftmaxTerms});
  by_element(q, [&]<class T>() {
    each_part(frame, path(), s, [&](const PartOfAttention& at, const kernels::AttentionShape& of) {
      kernels::attention_forward(frame.kernels(), q.data_ptr<T>() + at.q, k.data_ptr<T>() + at.kv,
                                 v.data_ptr<T>() + at.kv, out.data_ptr<T>() + at.q,
                                 softmax.data_ptr<float>() + at.softmax, of);
    });
  });
  frame.push(*this, {q, k, v, out, softmax});
  return o_proj.forward(out, frame);
}

Tensors Attention::do_backward(Inputs dy, Frame& frame) {
  Compute& compute = frame.compute();
  HeadsBackward h = begin_heads_backward(*this, o_proj, dy, frame);
  kernels::AttentionShape s = share_of_heads(*this, config_, h.q, h.k, h.v);
  s.bf16_products = bf16_products(*q_proj.weight);
  const RopePointers rope = on_device(compute, rope_);
  by_element(h.q, [&]<class T>() {
    if (frame.exact())
      exact::attention_backward(frame, path(), {h.dout, h.q, h.k, h.v, h.out, h.softmax, h.dq}, s, h.dk,
                                h.dv);
    each_part(frame, path(), s, [&](const PartOfAttention& at, const kernels::AttentionShape& of) {
      T *const dq = h.dq.data_ptr<T>() + at.q, *const dk = h.dk.data_ptr<T>() + at.kv;
      if (!frame.exact())
        kernels::attention_backward(frame.kernels(), h.dout.data_ptr<T>() + at.q, h.q.data_ptr<T>() + at.q,
                                    h.k.data_ptr<T>() + at.kv, h.v.data_ptr<T>() + at.kv,
                                    h.out.data_ptr<T>() + at.q, h.softmax.data_ptr<float>() + at.softmax, dq,
                                    dk, h.dv.data_ptr<T>() + at.kv, of);
      kernels::rope_backward(frame.kernels(), dq, rope.cos, rope.sin, dq,
                             {of.batch, of.seq, of.heads, of.head_dim});
      kernels::rope_backward(frame.kernels(), dk, rope.cos, rope.sin, dk,
                             {of.batch, of.seq, of.kv_heads, of.head_dim});
    });
  });
  const Tensor through_v = v_proj.backward(h.dv, frame)[0];
  const Tensor through_k = k_proj.backward(h.dk, frame)[0];
  const Tensor through_q = q_proj.backward(h.dq, frame)[0];
  const TensorName what = layouts::named(*this, "dx");
  return {
      add_tensors(add_tensors(through_v, through_k, compute, what), through_q, compute, what, dx_memory())};
}

namespace {

CrossAttentionConfig checked(CrossAttentionConfig c) {
  if (c.context_dim == 0) c.context_dim = c.dim;
  if (c.kv_heads == 0) c.kv_heads = c.heads;
  for (const auto& [name, size] : {std::pair{"dim", c.dim},
                                   {"heads", c.heads},
                                   {"head_dim", c.head_dim},
                                   {"context_dim", c.context_dim},
                                   {"kv_heads", c.kv_heads}})
    if (size < 1)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("cross-attention: {} is {}; expected at least 1", name, size));
  if (c.heads % c.kv_heads != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("cross-attention: heads {} do not divide into kv_heads {}", c.heads, c.kv_heads));
  return c;
}

}  // namespace

CrossAttention::CrossAttention(const CrossAttentionConfig& config)
    : q_proj(checked(config).dim, config.heads * config.head_dim, config.bias, config.init),
      k_proj(checked(config).context_dim, checked(config).kv_heads * config.head_dim, config.bias,
             config.init),
      v_proj(checked(config).context_dim, checked(config).kv_heads * config.head_dim, config.bias,
             config.init),
      o_proj(config.heads * config.head_dim, config.dim, config.bias, config.out_init),
      config_(checked(config)) {
  add("q_proj", q_proj);
  add("k_proj", k_proj);
  add("v_proj", v_proj);
  add("o_proj", o_proj);
}

OwnPlan CrossAttention::class_plan() const { return plan_of_heads(); }

namespace {

// This rank's heads, as computed by share_of_heads(), and the numbers of queries and keys in q and k.
kernels::FullAttentionShape cross_shape(const CrossAttention& module, const CrossAttentionConfig& c,
                                        const Tensor& q, const Tensor& k, const Tensor& v) {
  const kernels::AttentionShape s =
      share_of_heads(module, {c.dim, c.heads, c.kv_heads, c.head_dim, c.init, c.out_init}, q, k, v);
  return {
      s.batch, q.size(1), k.size(1), s.heads, s.kv_heads, s.head_dim, bf16_products(*module.q_proj.weight)};
}

// Throws unless the mask has x's samples and queries and the context's keys, is whole in queries and keys,
// and is sharded in samples like x.
void expect_mask(const Module& module, const Tensor& mask, const Tensor& x, const Tensor& context) {
  const TensorName what = layouts::named(module, "mask");
  expect_dtype(what, mask, DType::f32);
  expect_mask_shape(what, mask, x, context);
  layouts::expect_whole(what, mask, "attention");
  layouts::expect_whole_dim(what, mask, "attention", 1);
  const bool for_all = layouts::global_shape(mask)[0] == 1 && mask.size(0) == 1;
  if (!for_all && mask.size(0) != x.size(0))
    throw Error(ErrorCode::layout,
                fmt::format("{} has {} samples on this rank; expected {}, cut as those of x", what.text(),
                            mask.size(0), x.size(0)));
  if (!for_all) expect_same_samples(module, x, mask, "mask");
}

kernels::ScoreBias bias_of(const Tensor& mask, const kernels::FullAttentionShape& s) {
  if (!mask) return nullptr;
  return {mask.data_ptr<float>(), mask.size(0) != 1 || s.batch == 1, mask.size(1) != 1 || s.queries == 1};
}

}  // namespace

Tensors CrossAttention::do_forward(Inputs inputs, Frame& frame) {
  if (inputs.size() != 3) expect_count(inputs, 2, "inputs");
  const auto expect_sequence = [&](const char* name, const Tensor& t, std::int64_t dim) {
    if (t.shape().rank() != 3 || t.size(2) != dim)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{} is {}; expected (batch, sequence, {})", layouts::named(*this, name).text(),
                              to_string(t.shape()), dim));
  };
  expect_sequence("x", inputs[0], config_.dim);
  expect_sequence("context", inputs[1], config_.context_dim);
  expect_same_samples(*this, inputs[0], inputs[1], "context");
  if (inputs.size() == 3) expect_mask(*this, inputs[2], inputs[0], inputs[1]);
  if (frame.documents() != nullptr)
    throw Error(ErrorCode::unsupported,
                fmt::format("\"{}\": the pass has documents, whose contexts cross-attention does not know; "
                            "expected a mask, and no documents",
                            path()));
  Compute& compute = frame.compute();
  const Tensor q = q_proj.forward(inputs[0], frame)[0], k = k_proj.forward(inputs[1], frame)[0],
               v = v_proj.forward(inputs[1], frame)[0];
  const kernels::FullAttentionShape s = cross_shape(*this, config_, q, k, v);
  const Tensor mask = inputs.size() == 3 ? inputs[2] : Tensor();
  const Tensor out = compute.make(q.shape(), q.dtype()).with_layout(q.layout());
  const Tensor softmax = compute.make({s.batch, s.heads, s.queries, kernels::kSoftmaxTerms});
  by_element(q, [&]<class T>() {
    kernels::full_attention_forward(frame.kernels(), q.data_ptr<T>(), k.data_ptr<T>(), v.data_ptr<T>(),
                                    bias_of(mask, s), out.data_ptr<T>(), softmax.data_ptr<float>(), s);
  });
  Tensors kept{q, k, v, out, softmax};
  if (mask) kept.push_back(mask);
  frame.push(*this, std::move(kept));
  return o_proj.forward(out, frame);
}

Tensors CrossAttention::do_backward(Inputs dy, Frame& frame) {
  const HeadsBackward h = begin_heads_backward(*this, o_proj, dy, frame);
  const kernels::FullAttentionShape s = cross_shape(*this, config_, h.q, h.k, h.v);
  by_element(h.q, [&]<class T>() {
    kernels::full_attention_backward(frame.kernels(), h.dout.data_ptr<T>(), h.q.data_ptr<T>(),
                                     h.k.data_ptr<T>(), h.v.data_ptr<T>(), bias_of(h.mask, s),
                                     h.out.data_ptr<T>(), h.softmax.data_ptr<float>(), h.dq.data_ptr<T>(),
                                     h.dk.data_ptr<T>(), h.dv.data_ptr<T>(), nullptr, s);
  });
  const Tensor through_v = v_proj.backward(h.dv, frame)[0];
  const Tensor through_k = k_proj.backward(h.dk, frame)[0];
  const Tensor dx = q_proj.backward(h.dq, frame)[0];
  return {dx, add_tensors(through_v, through_k, frame.compute(), layouts::named(*this, "d(context)"),
                          dx_memory())};
}

Tensor key_padding_mask(Compute& compute, std::span<const std::int64_t> lengths, std::int64_t keys) {
  const auto samples = static_cast<std::int64_t>(lengths.size());
  const Tensor mask(compute.context(), {samples, 1, keys});
  for (std::int64_t b = 0; b < samples; ++b) {
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    if (length < 0 || length > keys)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("key_padding_mask: lengths[{}] is {}; expected 0 to {} (keys)", b, length, keys));
    float* const row = mask.f32().data() + b * keys;
    std::fill(row, row + length, 0.0f);
    std::fill(row + length, row + keys, -std::numeric_limits<float>::infinity());
  }
  return to_device(compute.context(), mask, compute.stream());
}

}  // namespace weft
