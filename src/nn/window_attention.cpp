#include "weft/nn/window_attention.hpp"

#include <fmt/format.h>

#include "nn/exact/sums.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

const WindowAttentionConfig& checked(const WindowAttentionConfig& c) {
  for (const auto& [name, size] :
       {std::pair{"dim", c.dim}, {"heads", c.heads}, {"head_dim", c.head_dim}, {"window", c.window}})
    if (size < 1)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("window attention: {} is {}; expected at least 1", name, size));
  return c;
}

// The windows of a map. Maps have height and width as two dimensions each, permuted to (batch, window row,
// window column, row in it, column in it, channel). Also the inverse.
struct Cut {
  Shape maps, windows;  // six dimensions each
  Dims order, back;
};

// maps: (batch, channels, height, width); window w
Cut cut_of(const Shape& maps, Windows kind, std::int64_t w) {
  const std::int64_t batch = maps[0], channels = maps[1], rows = maps[2] / w, columns = maps[3] / w;
  const Shape windows{batch, rows, columns, w, w, channels};
  if (kind == Windows::neighbours)
    return {{batch, channels, rows, w, columns, w}, windows, {0, 2, 4, 3, 5, 1}, {0, 5, 1, 3, 2, 4}};
  return {{batch, channels, w, rows, w, columns}, windows, {0, 3, 5, 2, 4, 1}, {0, 5, 3, 1, 4, 2}};
}

// (batch, channels, height, width) as (batch, windows, pixels of one, channels)
Shape windows_shape(const Shape& maps, std::int64_t w) {
  return {maps[0], maps[2] / w * (maps[3] / w), w * w, maps[1]};
}

// q, k, v: (batch, windows, pixels, heads · head_dim), of this rank. Throws layout if a head is split, or if
// windows are not whole. In exact mode ranks may have different windows of one map.
kernels::FullAttentionShape share_of_heads(const Module& module, std::int64_t head_dim, const Tensor& q,
                                           const Tensor& k, const Tensor& v, bool exact) {
  const TensorName what = layouts::named(module, "q");
  layouts::expect_whole(what, q, "attention", false);
  for (int dim = exact ? 2 : 1; dim < 3; ++dim) layouts::expect_whole_dim(what, q, "window attention", dim);
  layouts::expect_same(layouts::named(module, "k"), k.layout(), q.layout(), "as q");
  layouts::expect_same(layouts::named(module, "v"), v.layout(), q.layout(), "as q");
  if (q.shape().back() % head_dim != 0)
    throw Error(
        ErrorCode::layout,
        fmt::format(
            "{} has {} features on this rank, which is no multiple of head_dim {}: a head is cut in two",
            what.text(), q.shape().back(), head_dim));
  const std::int64_t heads = q.shape().back() / head_dim;
  return {q.size(0) * q.size(1), q.size(2), q.size(2), heads, heads, head_dim};
}

// The layout of a tensor with this global shape, cut in dimension `to` where `layout` is cut in `from`.
LayoutRef cut_in(const LayoutRef& layout, int from, int to, const Shape& global) {
  if (layout == nullptr) return nullptr;
  Placements placements = layout->placements;
  bool cut = false;
  for (Placement& p : placements)
    if (is_shard(p, from)) p = Shard{to}, cut = true;
  return cut ? make_layout(layout->mesh(), std::move(placements), global)
             : layouts::with_global(layout, global);
}

// dbias: (blocks of samples, queries · keys), each the sum over the windows of these samples on all ranks.
// run(windows, dbias) computes the gradients of these windows, and overwrites dbias.
template <class Run>
Tensor exact_bias_gradient(const Module& module, Frame& frame, const Tensor& q,
                           const kernels::FullAttentionShape& s, const Run& run) {
  const exact::SampleBlocks blocks = exact::blocks_of(layouts::named(module, "q"), q, 1);
  const std::int64_t width = s.queries * s.keys;
  const Tensor one = frame.compute().make({width});
  return exact::block_sums<float>(
      frame, q.layout(), blocks, width, [&](std::int64_t sample, Chunk windows, float* sum) {
        run(Chunk{sample * blocks.positions + windows.offset, windows.size}, one.data_ptr<float>());
        kernels::add(frame.kernels(), sum, one.data_ptr<float>(), sum, width);
      });
}

}  // namespace

PositionBias::PositionBias(std::int64_t dim, std::int64_t window, Init init) : window_(window) {
  const std::int64_t hidden = dim / 4;
  if (hidden < 1)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("position bias: dim is {}; expected at least 4, since it has dim / 4 features", dim));
  for (int i = 0; i < 3; ++i) {
    layers.append(std::make_unique<Linear>(i == 0 ? 2 : hidden, hidden, true, init));
    layers.append(std::make_unique<LayerNorm>(hidden));
    layers.append(std::make_unique<ReLU>());
  }
  layers.append(std::make_unique<Linear>(hidden, 1, true, init));
  add("layers", layers);
  for (std::int64_t query = 0; query < window * window; ++query)
    for (std::int64_t key = 0; key < window * window; ++key) {
      const std::int64_t dy = query / window - key / window, dx = query % window - key % window;
      rows_.push_back((dy + window - 1) * (2 * window - 1) + dx + window - 1);
    }
}

Tensor PositionBias::coordinates(Frame& frame, const LayoutRef& scores) const {
  Context& context = frame.compute().context();
  const Tensor table(context, {1, offsets(), 2});
  float* at = table.f32().data();
  for (std::int64_t i = -window_; i <= window_; ++i)
    for (std::int64_t j = -window_; j <= window_; ++j)
      *at++ = static_cast<float>(i), *at++ = static_cast<float>(j);
  const Tensor there = to_device(context, table, frame.compute().stream());
  if (frame.exact()) return exact_copies(frame, there, scores);
  if (scores == nullptr) return there;
  std::int64_t copies = 1;
  Placements placements(scores->placements.size(), Replicate{});
  for (std::size_t axis = 0; axis < placements.size(); ++axis) {
    const int size = scores->mesh_shape().size(static_cast<int>(axis));
    if (size == 1 || !is_shard(scores->placements[axis])) continue;
    placements[axis] = Shard{0};
    copies *= size;
  }
  return there.with_layout(
      replicated_layout(scores->mesh(), {copies, offsets(), 2})->with(std::move(placements)));
}

// A copy for each block of samples, as if it were a sample of its own.
Tensor PositionBias::exact_copies(Frame& frame, const Tensor& one, const LayoutRef& scores) const {
  const int copies = exact::blocks_here(layouts::named(*this, "scores"), scores, 0);
  const Tensor all = frame.compute().make({copies, offsets(), 2});
  for (int i = 0; i < copies; ++i)
    std::copy_n(one.data_ptr<float>(), one.count(), all.data_ptr<float>() + i * one.count());
  if (scores == nullptr) return all;
  Placements placements(scores->placements.size(), Replicate{});
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (is_shard(scores->placements[axis], 0)) placements[axis] = Shard{0};
  return all.with_layout(make_layout(scores->mesh(), std::move(placements), {kExactBlocks, offsets(), 2}));
}

Tensor PositionBias::rows(Frame& frame) const {
  auto* const data = const_cast<std::int64_t*>(rows_.data());  // only read
  const std::int64_t pixels = window_ * window_;
  const Tensor here(Storage::borrow(data, rows_.size() * sizeof(std::int64_t)), 0, {pixels, pixels},
                    DType::i64);
  return to_device(frame.compute().context(), here, frame.compute().stream());
}

Tensors PositionBias::do_forward(Inputs x, Frame& frame) { return layers.forward(x, frame); }
Tensors PositionBias::do_backward(Inputs dy, Frame& frame) { return layers.backward(dy, frame); }

WindowAttention::WindowAttention(const WindowAttentionConfig& config)
    : norm(checked(config).dim, config.norm_eps),
      dpb(config.dim, config.window, config.init),
      to_q(config.dim, config.heads * config.head_dim, false, config.init),
      to_k(config.dim, config.heads * config.head_dim, false, config.init),
      to_v(config.dim, config.heads * config.head_dim, false, config.init),
      to_out(config.heads * config.head_dim, config.dim, true, config.out_init),
      dropout(config.dropout),
      config_(config) {
  add("norm", norm);
  add("dpb", dpb);
  add("to_q", to_q);
  add("to_k", to_k);
  add("to_v", to_v);
  add("to_out", to_out);
  add("dropout", dropout);
}

namespace {

// The layout of weights (batch, windows, heads, queries, keys) if q, (batch, windows, pixels, heads ·
// head_dim), has this layout.
LayoutRef of_weights(const LayoutRef& q, const Shape& weights, std::int64_t heads) {
  if (q == nullptr) return nullptr;
  Shape global = weights;
  global[0] = q->global[0], global[1] = q->global[1], global[2] = heads;
  LayoutRef layout = replicated_layout(q->mesh(), global);
  for (const int axis : q->nesting) {  // outermost first, so that axes of one dimension nest in the same
                                       // order
    const Placement& p = q->placements[static_cast<std::size_t>(axis)];
    if (!is_shard(p)) continue;
    const std::string& name = q->mesh_shape().name(axis);
    const int dim = is_shard(p, 3) ? 2 : 0;
    layout = layout->with(name, Shard{dim})->shard_inside(q->mesh()[name], dim);
  }
  return layout;
}

// The layout of weights (batch, rows of windows, columns of windows, heads, queries, keys) of maps whose
// windows have the layout `windows`. Heads are sharded like those of q.
LayoutRef of_part(const LayoutRef& windows, const LayoutRef& q, std::int64_t heads, std::int64_t pixels) {
  const Shape& whole = windows->global;
  LayoutRef layout =
      replicated_layout(windows->mesh(), {whole[0], whole[2], whole[3], heads, pixels, pixels});
  const auto cut = [&](const LayoutRef& as, int axis, int dim) {
    const std::string& name = as->mesh_shape().name(axis);
    layout = layout->with(name, Shard{dim})->shard_inside(as->mesh()[name], dim);
  };
  for (const int axis : windows->nesting)
    for (const auto& [of_map, dim] : {std::pair{0, 0}, {2, 1}, {3, 2}})
      if (is_shard(windows->placements[static_cast<std::size_t>(axis)], of_map)) cut(windows, axis, dim);
  for (const int axis : q->nesting)
    if (is_shard(q->placements[static_cast<std::size_t>(axis)], 3)) cut(q, axis, 3);
  return layout;
}

// The weights after dropout. They are all weights or, with a layout of windows, the weights of the samples on
// this rank; the others become 0.
template <class Drop>
Tensor dropped_of(Frame& frame, const Tensor& weights, const LayoutRef& part, const Drop& drop) {
  if (part == nullptr) return drop(weights);
  const Tensor there = drop(weights.slice_flat(0, part->local_shape()).with_layout(part));
  if (there.count() == weights.count()) return there.reshape(weights.shape()).with_layout(weights.layout());
  const Tensor all = frame.compute().zeros(weights.shape()).with_layout(weights.layout());
  copy(frame.compute().context(), there, all.slice_flat(0, there.shape()), frame.compute().stream());
  return all;
}

}  // namespace

// The norm feeds three column layers: their dx are summed once, behind the norm.
OwnPlan WindowAttention::class_plan() const {
  return {.styles = {{"norm", "feeds_columns"},
                     {"to_q", "fed_column"},
                     {"to_k", "fed_column"},
                     {"to_v", "fed_column"},
                     {"to_out", "row"}}};
}

namespace {

void expect_windows(const TensorName& what, const Tensor& x, const WindowAttentionConfig& config) {
  const std::int64_t w = config.window;
  if (x.shape().rank() != 4 || x.size(1) != config.dim)
    throw Error(ErrorCode::bad_argument, fmt::format("{} is {}; expected (batch, {}, height, width)",
                                                     what.text(), to_string(x.shape()), config.dim));
  if (x.size(2) % w != 0 || x.size(3) % w != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected height and width in whole windows of {}x{}", what.text(),
                            to_string(x.shape()), w, w));
}

}  // namespace

Tensors WindowAttention::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const TensorName what = layouts::named(*this, "x");
  expect_windows(what, inputs[0], config_);
  for (const int dim : {2, 3}) layouts::expect_whole_dim(what, inputs[0], "window attention", dim);
  return forward_windows(norm.forward(inputs[0], frame)[0], frame, nullptr);
}

bool WindowAttention::has_exact_rule() const {
  if (typeid(*this) != typeid(WindowAttention)) return false;
  const LayoutRef& layout = to_q.weight->layout();
  for (std::size_t axis = 0; layout != nullptr && axis < layout->placements.size(); ++axis)
    if (layout->mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(layout->placements[axis], 0))
      return false;
  return true;
}

Tensors WindowAttention::forward_windows(const Tensor& x, Frame& frame, const LayoutRef& part) {
  const std::int64_t w = config_.window;
  const TensorName what = layouts::named(*this, "norm(x)");
  expect_windows(what, x, config_);
  for (int dim = frame.exact() ? 3 : 2; dim < 4; ++dim)
    layouts::expect_whole_dim(what, x, "window attention", dim);
  Compute& compute = frame.compute();
  const Cut cut = cut_of(x.shape(), config_.windows, w);
  const Shape windows = windows_shape(x.shape(), w);
  const Tensor tokens = permuted(frame, x, cut.maps, cut.order, windows,
                                 cut_in(x.layout(), 2, 1, windows_shape(layouts::global_shape(x), w)));
  const Tensor q = to_q.forward(tokens, frame)[0], k = to_k.forward(tokens, frame)[0],
               v = to_v.forward(tokens, frame)[0];
  const kernels::FullAttentionShape s = share_of_heads(*this, config_.head_dim, q, k, v, frame.exact());
  const Tensor table = dpb.forward(dpb.coordinates(frame, q.layout()), frame)[0];
  const Tensor rows = dpb.rows(frame);
  const Tensor bias = compute.make({s.queries, s.keys});
  kernels::embedding_forward(frame.kernels(), rows.data_ptr<std::int64_t>(), table.data_ptr<float>(),
                             bias.data_ptr<float>(), rows.count(), dpb.offsets(), 1);
  const Tensor wide_q = widened(frame, q), wide_k = widened(frame, k), wide_v = widened(frame, v);
  const Tensor out = compute.make(q.shape(), q.dtype()).with_layout(q.layout());
  const auto finish = [&]() -> Tensors {
    const Tensor y = to_out.forward(out, frame)[0];
    return {permuted(frame, y, cut.windows, cut.back, x.shape(),
                     cut_in(y.layout(), 1, 2, layouts::global_shape(x)), out_memory())};
  };
  if (drops(frame)) {
    const Shape shape{q.size(0), q.size(1), s.heads, s.queries, s.keys};
    const Tensor weights = compute.make(shape).with_layout(of_weights(q.layout(), shape, config_.heads));
    kernels::attention_weights_forward(frame.kernels(), wide_q.data_ptr<float>(), wide_k.data_ptr<float>(),
                                       bias.data_ptr<float>(), weights.data_ptr<float>(), s);
    const LayoutRef of_dropped = part ? of_part(part, q.layout(), config_.heads, s.queries) : nullptr;
    const Tensor dropped =
        dropped_of(frame, weights, of_dropped, [&](const Tensor& t) { return dropout.forward(t, frame)[0]; });
    into_f32(frame, out, [&](float* to) {
      kernels::attention_apply_forward(frame.kernels(), dropped.data_ptr<float>(), wide_v.data_ptr<float>(),
                                       to, s);
    });
    frame.push(*this, {q, k, v, bias, weights, dropped, table});
    return finish();
  }
  const Tensor softmax = compute.make({s.batch, s.heads, s.queries, kernels::kSoftmaxTerms});
  into_f32(frame, out, [&](float* to) {
    kernels::full_attention_forward(frame.kernels(), wide_q.data_ptr<float>(), wide_k.data_ptr<float>(),
                                    wide_v.data_ptr<float>(), bias.data_ptr<float>(), to,
                                    softmax.data_ptr<float>(), s);
  });
  frame.push(*this, {q, k, v, bias, out, softmax, table});
  return finish();
}

Tensors WindowAttention::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  return norm.backward(backward_windows(gradients[0], frame, nullptr), frame);
}

Tensor WindowAttention::backward_windows(const Tensor& dy, Frame& frame, const LayoutRef& part) {
  Compute& compute = frame.compute();
  const std::int64_t w = config_.window;
  const TensorName what = layouts::named(*this, "dy");
  expect_activation(what, dy);
  if (dy.shape().rank() != 4 || dy.size(1) != config_.dim || dy.size(2) % w != 0 || dy.size(3) % w != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (batch, {}, height, width) in whole windows of {}x{}",
                            what.text(), to_string(dy.shape()), config_.dim, w, w));
  for (const int dim : {1, 2, 3})
    if (dim != 2 || !frame.exact()) layouts::expect_whole_dim(what, dy, "window attention", dim);
  const Cut cut = cut_of(dy.shape(), config_.windows, w);
  const Tensor dwindows = permuted(frame, dy, cut.maps, cut.order, windows_shape(dy.shape(), w),
                                   cut_in(dy.layout(), 2, 1, windows_shape(layouts::global_shape(dy), w)));
  const Tensor dout = widened(frame, to_out.backward(dwindows, frame)[0]);
  const Tensors kept = frame.pop(*this);
  const Tensor q = widened(frame, kept[0]), k = widened(frame, kept[1]), v = widened(frame, kept[2]),
               &bias = kept[3], &table = kept[6];
  layouts::expect_same(layouts::named(*this, "d(out)"), dout.layout(), q.layout(), "as out");
  const kernels::FullAttentionShape s = share_of_heads(*this, config_.head_dim, q, k, v, frame.exact());
  const Tensor dq = compute.make(q.shape()).with_layout(q.layout());
  const Tensor dk = compute.make(k.shape()).with_layout(k.layout());
  const Tensor dv = compute.make(v.shape()).with_layout(v.layout());
  // Computes the gradients of these windows. Exact mode adds those of the bias block by block.
  const bool drop = drops(frame);
  Tensor ddropped, dweights;
  if (drop) {
    const Tensor &weights = kept[4], &dropped = kept[5];
    ddropped = compute.make(weights.shape()).with_layout(weights.layout());
    kernels::attention_apply_backward(frame.kernels(), dout.data_ptr<float>(), dropped.data_ptr<float>(),
                                      v.data_ptr<float>(), ddropped.data_ptr<float>(), dv.data_ptr<float>(),
                                      s);
    const LayoutRef of_dropped = part ? of_part(part, q.layout(), config_.heads, s.queries) : nullptr;
    dweights = dropped_of(frame, ddropped, of_dropped,
                          [&](const Tensor& t) { return dropout.backward(t, frame)[0]; });
  }
  const Tensor out = drop ? Tensor() : widened(frame, kept[4]);
  const auto run = [&](Chunk windows, float* dbias) {
    kernels::FullAttentionShape of = s;
    of.batch = windows.size;
    const std::int64_t at = windows.offset * s.queries * s.heads * s.head_dim,
                       rows = windows.offset * s.heads * s.queries;
    if (drop)
      kernels::attention_weights_backward(frame.kernels(), dweights.data_ptr<float>() + rows * s.keys,
                                          kept[4].data_ptr<float>() + rows * s.keys, q.data_ptr<float>() + at,
                                          k.data_ptr<float>() + at, dq.data_ptr<float>() + at,
                                          dk.data_ptr<float>() + at, dbias, of);
    else
      kernels::full_attention_backward(
          frame.kernels(), dout.data_ptr<float>() + at, q.data_ptr<float>() + at, k.data_ptr<float>() + at,
          v.data_ptr<float>() + at, bias.data_ptr<float>(), out.data_ptr<float>() + at,
          kept[5].data_ptr<float>() + rows * kernels::kSoftmaxTerms, dq.data_ptr<float>() + at,
          dk.data_ptr<float>() + at, dv.data_ptr<float>() + at, dbias, of);
  };
  Tensor dbias;
  if (frame.exact()) {
    dbias = exact_bias_gradient(*this, frame, q, s, run);
  } else {
    dbias = compute.make({1, s.queries * s.keys});
    run({0, s.batch}, dbias.data_ptr<float>());
  }
  const Tensor rows = dpb.rows(frame);
  const Tensor dtable = compute.zeros(table.shape()).with_layout(table.layout());
  for (std::int64_t i = 0; i < dbias.size(0); ++i)
    kernels::embedding_backward(frame.kernels(), rows.data_ptr<std::int64_t>(),
                                dbias.data_ptr<float>() + i * dbias.size(1),
                                dtable.data_ptr<float>() + i * dpb.offsets(), rows.count(), dpb.offsets(), 1);
  dpb.backward(dtable, frame);
  const Tensor through_v = to_v.backward(cast(frame, dv, dy.dtype()), frame)[0];
  const Tensor through_k = to_k.backward(cast(frame, dk, dy.dtype()), frame)[0];
  const Tensor through_q = to_q.backward(cast(frame, dq, dy.dtype()), frame)[0];
  const TensorName sum = layouts::named(*this, "d(norm(x))");
  const Tensor dtokens =
      add_tensors(add_tensors(through_v, through_k, compute, sum), through_q, compute, sum);
  return permuted(frame, dtokens, cut.windows, cut.back, dy.shape(),
                  cut_in(dtokens.layout(), 1, 2, layouts::global_shape(dy)),
                  norm.after().empty() ? Memory::local : Memory::shared);  // that boundary sums it
}

}  // namespace weft
