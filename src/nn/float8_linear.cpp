#include "weft/nn/float8_linear.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <typeinfo>
#include <utility>

#include "nn/linear_parts.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/float8.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using float8::Granularity;
using kernels::Stored;

[[noreturn]] void refuse_float8_layer(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "float8: " + text);
}

bool is_cut(const Layout& layout, std::size_t axis) {
  return layout.mesh_shape().size(static_cast<int>(axis)) > 1 && is_shard(layout.placements[axis]);
}

// The largest values of all ranks of `axes`, one for each of `values`, which are equally many on these ranks.
void largest_over(Compute& compute, const DeviceMesh& root, const std::vector<bool>& axes,
                  std::vector<float>& values) {
  if (std::ranges::none_of(axes, [](bool b) { return b; })) return;
  Placements placements(axes.size(), Replicate{});
  for (std::size_t axis = 0; axis < axes.size(); ++axis)
    if (axes[axis]) placements[axis] = Partial{ReduceOp::max};
  const Shape shape{static_cast<std::int64_t>(values.size())};
  const LayoutRef whole = replicated_layout(root, shape);
  const Tensor own = compute.make(shape, DType::f32, Memory::shared).with_layout(whole->with(placements));
  std::ranges::copy(values, own.f32().begin());
  const Tensor all = redistribute(own, whole);
  std::ranges::copy(all.f32(), values.begin());
}

// An all-reduce may drop a NaN, and never drops an infinity.
void nan_to_infinity(std::vector<float>& amax) {
  for (float& a : amax)
    if (std::isnan(a)) a = std::numeric_limits<float>::infinity();
}

// The indices of dimension `dim`, of the global tensor, that this rank holds, as ranges of begin and size.
std::vector<Chunk> ranges_of(const LayoutRef& layout, const Shape& global, int dim) {
  if (layout == nullptr) return {{0, global[dim]}};
  std::vector<Chunk> ranges;
  for (const Box& box : layout->parts()) {
    ranges.push_back({box.offset[dim], box.shape[dim]});
    if (layout->segments.dim != dim) break;  // boxes differ in the segmented dimension alone
  }
  return ranges;
}

std::vector<float> part_of(const std::vector<float>& whole, const LayoutRef& layout, const Shape& global,
                           int dim) {
  std::vector<float> part;
  for (const Chunk& c : ranges_of(layout, global, dim))
    part.insert(part.end(), whole.begin() + c.offset, whole.begin() + c.offset + c.size);
  return part;
}

void raise_part(const std::vector<float>& part, const LayoutRef& layout, const Shape& global, int dim,
                float* whole) {
  std::size_t i = 0;
  for (const Chunk& c : ranges_of(layout, global, dim))
    for (std::int64_t at = c.offset; at < c.offset + c.size; ++at) whole[at] = std::max(whole[at], part[i++]);
}

// The sizes of the segments of a layer's outputs; empty: one segment.
std::vector<std::int64_t> segments_of(const Linear& layer) {
  for (const ShardRule::Part& part : layer.shard_rule(Split::column).parameters)
    if (part.parameter == layer.weight.get()) return part.segments.sizes;
  return {};
}

// An operand of a product: its values as bf16, and its scales.
struct Scaled {
  Tensor values;
  std::vector<float> scales;
};

}  // namespace

std::string_view name(Float8Recipe recipe) noexcept {
  switch (recipe) {
    case Float8Recipe::tensorwise: return "tensorwise";
    case Float8Recipe::rowwise: return "rowwise";
    case Float8Recipe::rowwise_gw_hp: return "rowwise_gw_hp";
  }
  return "?";
}

Float8Recipe float8_recipe_from_name(std::string_view text) {
  for (const Float8Recipe r : {Float8Recipe::tensorwise, Float8Recipe::rowwise, Float8Recipe::rowwise_gw_hp})
    if (name(r) == text) return r;
  if (text == "delayed")
    refuse_float8_layer(
        "the recipe is delayed; expected tensorwise, rowwise or rowwise_gw_hp: delayed scaling takes scales "
        "from earlier steps, so that a checkpoint would need its history and a sudden large value would be "
        "cut off");
  refuse_float8_layer(
      fmt::format("the recipe is \"{}\"; expected tensorwise, rowwise or rowwise_gw_hp", text));
}

// The passes of a converted layer. x: (…, in), y: (…, out), w: (out, in).
class Float8LinearPasses : public Passes {
  using WeightUse = Float8Linears::WeightUse;

 public:
  Float8LinearPasses(std::shared_ptr<Float8Linears> layers, std::size_t index)
      : layers_(std::move(layers)), index_(index) {}

  Tensors forward(Module& module, Inputs inputs, Frame& frame) const override;
  Tensors backward(Module& module, Inputs gradients, Frame& frame) const override;
  std::string exact_refusal() const override;
  const Float8LinearOptions& options() const noexcept { return layers_->options(); }

 private:
  Float8Recipe recipe() const noexcept { return layers_->options().recipe; }
  bool tensorwise() const noexcept { return recipe() == Float8Recipe::tensorwise; }
  std::vector<float> scales_of(Frame& frame, const Linear& layer, const Tensor& x, Granularity granularity,
                               DType format, bool gradient) const;
  Scaled gradient(Frame& frame, const Linear& layer, const Tensor& dy, Granularity granularity,
                  DType format) const;
  Scaled input(Frame& frame, const Linear& layer, const Tensor& x) const;
  Scaled weight(Frame& frame, const Linear& layer, Float8Linears::WeightUse use) const;
  void keep(Frame& frame, const Linear& layer, const Tensor& x, const std::vector<float>& scales) const;
  void expect_kept(const Linear& layer, const Tensors& kept) const;

  const std::shared_ptr<Float8Linears> layers_;
  const std::size_t index_;
};

// The scales of a tensor whose columns are its features.
std::vector<float> Float8LinearPasses::scales_of(Frame& frame, const Linear& layer, const Tensor& x,
                                                 Granularity granularity, DType format, bool gradient) const {
  std::vector<float> amax(static_cast<std::size_t>(float8::scale_count(x.shape(), granularity)));
  float8::amax(frame.kernels(), x, granularity, amax.data());
  if (layers_->options().scales == Float8Scales::whole && x.layout() != nullptr) {
    const Layout& layout = *x.layout();
    std::vector<bool> axes;
    for (std::size_t axis = 0; axis < layout.placements.size(); ++axis) {
      const Placement& placement = layout.placements[axis];
      const bool features = is_shard(placement, x.shape().rank() - 1), partial = is_partial(placement);
      const bool apart = granularity == Granularity::tensorwise || partial ||
                         features == (granularity == Granularity::rowwise);
      axes.push_back(layout.mesh_shape().size(static_cast<int>(axis)) > 1 && !is_replicate(placement) &&
                     apart);
    }
    nan_to_infinity(amax);
    largest_over(frame.compute(), layout.mesh(), axes, amax);
  }
  bool finite = true;
  for (float& a : amax) {
    finite = finite && std::isfinite(a);
    a = float8::scale_of(a, format, !tensorwise());
  }
  if (!finite) layers_->note_not_finite(layer, gradient);
  return amax;
}

Scaled Float8LinearPasses::gradient(Frame& frame, const Linear& layer, const Tensor& dy,
                                    Granularity granularity, DType format) const {
  Scaled s{frame.compute().make(dy.shape(), DType::bf16),
           scales_of(frame, layer, dy, granularity, format, true)};
  float8::quantise_to_bf16(frame.kernels(), dy, granularity, s.scales.data(), format, s.values);
  return s;
}

// x as the left operand of y. A layer that runs again for its backward uses the scales of its first run.
Scaled Float8LinearPasses::input(Frame& frame, const Linear& layer, const Tensor& x) const {
  const Granularity granularity = tensorwise() ? Granularity::tensorwise : Granularity::rowwise;
  const Tensors kept = frame.once(layer.path(), [&] {
    const std::vector<float> found = scales_of(frame, layer, x, granularity, DType::f8e4m3, false);
    const Tensor scales = frame.compute().make({static_cast<std::int64_t>(found.size())});
    std::ranges::copy(found, scales.f32().begin());
    return Tensors{scales};
  });
  Scaled s{frame.compute().make(x.shape(), DType::bf16), {kept[0].f32().begin(), kept[0].f32().end()}};
  float8::quantise_to_bf16(frame.kernels(), x, granularity, s.scales.data(), DType::f8e4m3, s.values);
  return s;
}

Scaled Float8LinearPasses::weight(Frame& frame, const Linear& layer, Float8Linears::WeightUse use) const {
  layers_->update_scales();
  const Tensor& w = layer.weight->weight();
  const Granularity granularity = layers_->granularity_of(use);
  Scaled s{frame.compute().make(w.shape(), DType::bf16).with_layout(w.layout()),
           layers_->scales_of_part(index_, use, w.layout())};
  if (w.dtype() != DType::f8e4m3) {
    float8::quantise_to_bf16(frame.kernels(), w, granularity, s.scales.data(), DType::f8e4m3, s.values);
    return s;
  }
  if (!layers_->one_set_of_codes() && layers_->codes_[index_] != use)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("float8: \"{}\": the codes of its weight were gathered for {}; expected those for "
                    "{}: a block that is run again in its backward pass must be run as a block",
                    layer.path(), use == WeightUse::backward ? "forward" : "backward",
                    use == WeightUse::backward ? "backward" : "forward"));
  float8::widen(frame.kernels(), w, s.values);
  return s;
}

// Keeps what dw = dyᵀ x needs of x; `scales`: of the forward pass.
void Float8LinearPasses::keep(Frame& frame, const Linear& layer, const Tensor& x,
                              const std::vector<float>& scales) const {
  if (!frame.keeps()) return;
  const Tensor of_x = frame.compute().make({0}, x.dtype());  // the dtype of dx
  if (recipe() == Float8Recipe::rowwise_gw_hp) {
    frame.push(layer, {cast(frame, x, DType::bf16), of_x});
    return;
  }
  const Granularity granularity = tensorwise() ? Granularity::tensorwise : Granularity::columnwise;
  const std::vector<float> of_columns =
      tensorwise() ? scales : scales_of(frame, layer, x, granularity, DType::f8e4m3, false);
  const Tensor codes = frame.compute().make(x.shape(), DType::f8e4m3).with_layout(x.layout());
  float8::quantise(frame.kernels(), x, granularity, of_columns.data(), codes);
  const Tensor kept = frame.compute().make({static_cast<std::int64_t>(of_columns.size())});
  std::ranges::copy(of_columns, kept.f32().begin());
  frame.push(layer, {codes, of_x, kept});
}

// The layer may have been converted, or restored, since the forward pass.
void Float8LinearPasses::expect_kept(const Linear& layer, const Tensors& kept) const {
  const bool in_bf16 = recipe() == Float8Recipe::rowwise_gw_hp;
  const DType dtype = in_bf16 ? DType::bf16 : DType::f8e4m3;
  const std::int64_t scales = in_bf16 ? 0 : tensorwise() ? 1 : layer.weight->weight().size(1);
  const std::int64_t found = kept.size() == 3 ? kept[2].count() : 0;
  const bool of_float8 = kept.size() == (in_bf16 ? 2u : 3u) && kept[1].count() == 0;
  if (of_float8 && kept[0].dtype() == dtype && found == scales) return;
  refuse_float8_layer(
      fmt::format("\"{}\": its forward pass kept x in {} with {} scales on the Frame; {} needs {} with {}: a "
                  "layer must not change between forward and backward",
                  layer.path(), name(kept[0].dtype()), found, name(recipe()), name(dtype), scales));
}

Tensors Float8LinearPasses::forward(Module& module, Inputs inputs, Frame& frame) const {
  auto& layer = static_cast<Linear&>(module);
  if (inputs.size() != 1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\": got {} inputs; expected 1", layer.path(), inputs.size()));
  const Tensor x = layouts::beside(layer, "x", inputs[0], *layer.weight);
  expect_activation(layouts::named(layer, "x"), x);
  const Tensor& stored = layer.weight->weight();
  const LayoutRef layout = layouts::linear_output(layouts::named(layer, "x"), x.layout(), stored.layout());
  const std::int64_t in = stored.size(1), out = stored.size(0);
  if (x.shape().rank() == 0 || x.shape().back() != in)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{} is {}; expected {} features (the second dimension of weight {})",
                    layouts::named(layer, "x").text(), to_string(x.shape()), in, to_string(stored.shape())));
  const Memory memory = layer.after().empty() ? Memory::local : Memory::shared;
  const DType of_y = layer.output_dtype().value_or(x.dtype());
  const Tensor y =
      frame.compute().make(layouts::with_last(x.shape(), out), DType::f32, memory).with_layout(layout);
  const bool add_bias_here = layer.bias && !row_parallel(*layer.weight);
  if (add_bias_here) expect_bias_fits(layer, y, *layer.bias, y.shape().rank() - 1);
  const Tensor b = add_bias_here ? widened(frame, layer.bias->weight()) : Tensor();

  const Scaled of_x = input(frame, layer, x), of_w = weight(frame, layer, WeightUse::forward);
  const float8::MatrixSize size = float8::matrix_size(y.shape());
  float* const result = y.data_ptr<float>();
  if (frame.exact())
    exact::output(frame, layer, of_x.values, of_w.values, nullptr, y);
  else
    kernels::linear_forward(frame.kernels(), of_x.values.data_ptr<bf16>(), of_w.values.data_ptr<bf16>(),
                            static_cast<const float*>(nullptr), result, {size.rows, in, out});
  float8::rescale(frame.kernels(), result, size, {of_x.scales.data(), !tensorwise()},
                  {of_w.scales.data(), !tensorwise()}, b ? b.data_ptr<float>() : nullptr, result, false);
  keep(frame, layer, x, of_x.scales);
  return {cast(frame, y, of_y)};
}

Tensors Float8LinearPasses::backward(Module& module, Inputs gradients, Frame& frame) const {
  auto& layer = static_cast<Linear&>(module);
  const Tensors kept = frame.pop(layer);
  expect_kept(layer, kept);
  const Tensor& x = kept[0];  // its codes, or in bf16
  const Tensor& stored = layer.weight->weight();
  const LayoutRef of_w = stored.layout();
  const LayoutRef y_layout = layouts::linear_output(layouts::named(layer, "x"), x.layout(), of_w);
  const Tensor& dy = gradients[0];
  const std::int64_t in = stored.size(1), out = stored.size(0);
  expect_gradient(layer, dy, layouts::with_last(x.shape(), out),
                  expected_gradient(layouts::gradient_of_output(y_layout), of_w, dy.layout()),
                  layer.output_dtype().value_or(kept[1].dtype()));
  if (layer.bias && !row_parallel(*layer.weight)) accumulate_bias_of(layer, frame, *layer.bias, dy);

  const std::int64_t tokens = float8::matrix_size(x.shape()).rows;
  const int last = x.shape().rank() - 1;
  // dw of maps that are cut needs a sum over their ranks, for which there is no rule here.
  for (int dim = 1; frame.exact() && last > 2 && dim < last; ++dim)
    layouts::expect_whole_dim(layouts::named(layer, "x"), x, "a float8 layer in exact mode", dim);
  const Granularity by_row = tensorwise() ? Granularity::tensorwise : Granularity::rowwise;
  const Scaled rows = gradient(frame, layer, dy, by_row, tensorwise() ? DType::f8e5m2 : DType::f8e4m3);

  const bool in_high_precision = recipe() == Float8Recipe::rowwise_gw_hp;
  if (layer.weight->trainable()) {
    const Scaled columns = tensorwise() ? rows
                           : in_high_precision
                               ? Scaled{cast(frame, dy, DType::bf16), {}}
                               : gradient(frame, layer, dy, Granularity::columnwise, DType::f8e4m3);
    const LayoutRef of_dw = layouts::partial_as(layouts::gradient_of(of_w, x.layout(), last), dy.layout());
    frame.later([&layer, kept, columns, of_dw, in, out, tokens, in_high_precision, each = !tensorwise(),
                 exact = frame.exact()](Frame& f) {
      // dw = or += dyᵀ of_x, in bf16
      const auto multiplied = [&](const Tensor& of_x, const Tensor& dw, bool add) {
        multiply(f, columns.values, Stored::transposed, of_x, Stored::plain, dw, out, in, tokens, add);
      };
      layer.weight->accumulate(of_dw, [&](const Tensor& dw, bool add) {
        if (in_high_precision)
          return exact ? exact::weight_gradient(f, layer, columns.values, kept[0], dw, add)
                       : multiplied(kept[0], dw, add);
        const Tensor values = f.compute().make(kept[0].shape(), DType::bf16).with_layout(kept[0].layout());
        float8::widen(f.kernels(), kept[0], values);
        const auto rescale = [&](const Tensor& product, const Tensor& to, bool more) {
          float8::rescale(f.kernels(), product.data_ptr<float>(), {out, in}, {columns.scales.data(), each},
                          {kept[2].data_ptr<float>(), each}, nullptr, to.data_ptr<float>(), more);
        };
        // Each block is rescaled before it is added. So an overflow occurs on every mesh or on none.
        if (exact)
          return exact::over_samples(f, layer, values, 1, dw, add, [&](Chunk block, const Tensor& sum) {
            kernels::tree_matmul(f.kernels(), columns.values.data_ptr<bf16>() + block.offset * out,
                                 Stored::transposed, values.data_ptr<bf16>() + block.offset * in,
                                 Stored::plain, sum.data_ptr<float>(), out, in, block.size, {});
            rescale(sum, sum, false);
          });
        const Tensor product = add ? f.compute().make(dw.shape()) : dw;
        multiplied(values, product, false);
        rescale(product, dw, add);
      });
    });
  }

  const Memory memory = layer.before().empty() ? Memory::local : Memory::shared;
  Tensor dx =
      frame.compute()
          .make(x.shape(), DType::f32, memory)
          .with_layout(layouts::partial_as(layouts::linear_input_gradient(x.layout(), of_w), dy.layout()));
  const bool each_column = recipe() == Float8Recipe::rowwise;
  const Scaled w = weight(frame, layer, WeightUse::backward);
  if (frame.exact())
    dx = exact::input_gradient(frame, layer, rows.values, w.values, segments_of(layer), dx);
  else
    multiply(frame, rows.values, Stored::plain, w.values, Stored::plain, dx, tokens, in, out, false);
  float* const result = dx.data_ptr<float>();
  float8::rescale(frame.kernels(), result, {tokens, in}, {rows.scales.data(), !tensorwise()},
                  {w.scales.data(), each_column}, nullptr, result, false);
  return {cast(frame, dx, kept[1].dtype())};
}

Float8Linears::Float8Linears(const Float8LinearOptions& options) : options_(options) {}

std::string Float8Linears::refusal(const Linear& layer) {
  if (typeid(layer) != typeid(Linear)) return "is of a class derived from Linear";
  if (layer.spectral_norm() != nullptr) return "has a spectral norm";
  if (layer.passes() != nullptr) return "has other passes already";
  if (layer.weight->holders() > 1)
    return fmt::format("shares its weight \"{}\" with other modules", layer.weight->path());
  return {};
}

void Float8Linears::convert(const std::shared_ptr<Float8Linears>& self, Linear& layer) {
  if (const std::string why = refusal(layer); !why.empty())
    refuse_float8_layer(fmt::format("\"{}\" {}", layer.path(), why));
  layer.set_passes(std::make_shared<Float8LinearPasses>(self, self->layers_.size()));
  self->layers_.push_back(&layer);
  self->scales_.emplace_back();
  self->codes_.push_back(WeightUse::forward);
  self->known_ = false;
}

// In exact mode a product is rescaled on each rank before the ranks add their products. This gives the bits
// of one rank if all ranks have the same scales, and if these are powers of two. Gradients of weights, which
// may overflow if the loss is scaled, are rescaled block by block.
std::string Float8LinearPasses::exact_refusal() const {
  const Float8LinearOptions& o = options();
  if (o.recipe == Float8Recipe::tensorwise)
    return "is a float8 layer of the recipe tensorwise; expected rowwise or rowwise_gw_hp, whose scales are "
           "powers of two";
  if (o.scales == Float8Scales::own)
    return "is a float8 layer whose scales are of each rank's part; expected Float8Scales::whole";
  return {};
}

void Float8Linears::restore() noexcept {
  const std::vector<Linear*> layers = std::exchange(layers_, {});
  for (Linear* layer : layers) layer->set_passes(nullptr);
  scales_.clear();
  codes_.clear();
}

// The largest magnitudes of all weights are in one list of numbers, at places that are the same on all ranks.
// A weight has numbers for the rows and columns of the whole weight, or one number. A rank fills in the
// magnitudes of its part of the master, and 0 elsewhere, and the ranks take the largest.
void Float8Linears::update_scales() {
  std::uint64_t versions = 0;
  for (const Linear* layer : layers_) versions += layer->weight->master_version();
  if (known_ && versions == versions_) return;
  if (layers_.empty()) return;
  const bool by_rows = options_.recipe != Float8Recipe::tensorwise,
             by_columns = options_.recipe == Float8Recipe::rowwise;
  std::vector<float> most;
  DeviceMesh root;
  std::vector<bool> axes;
  for (const Linear* layer : layers_) {
    const Parameter& p = *layer->weight;
    const Tensor& master = p.master();
    const Shape& global = p.global_shape();
    kernels::KernelContext& ctx = kernels_of(p.compute());
    const auto found = [&](Granularity granularity) {
      std::vector<float> amax(static_cast<std::size_t>(float8::scale_count(master.shape(), granularity)));
      float8::amax(ctx, master, granularity, amax.data());
      if (p.dtype() == DType::bf16)  // layers read the rounded master, and rounding keeps the order
        for (float& a : amax) a = static_cast<float>(bf16(a));
      nan_to_infinity(amax);
      return amax;
    };
    const std::size_t begin = most.size();
    if (!by_rows) most.push_back(found(Granularity::tensorwise)[0]);
    if (by_rows) most.resize(begin + static_cast<std::size_t>(global[0] + (by_columns ? global[1] : 0)), 0);
    if (by_rows) raise_part(found(Granularity::rowwise), p.layout(), global, 0, most.data() + begin);
    if (by_columns)
      raise_part(found(Granularity::columnwise), p.layout(), global, 1, most.data() + begin + global[0]);
    if (p.layout() == nullptr) continue;
    root = p.layout()->mesh();
    axes.resize(p.layout()->placements.size(), false);
    for (std::size_t axis = 0; axis < axes.size(); ++axis)
      axes[axis] = axes[axis] || is_cut(*p.layout(), axis);
  }
  largest_over(layers_[0]->weight->compute(), root, axes, most);

  bad_weight_ = 0;
  const float* at = most.data();
  for (std::size_t i = 0; i < layers_.size(); ++i) {
    const Parameter& p = *layers_[i]->weight;
    WeightScales& w = scales_[i];
    const std::int64_t rows = by_rows ? p.global_shape()[0] : 1,
                       columns = by_columns ? p.global_shape()[1] : 0;
    const float largest = rows == 0 ? 0.0F : *std::max_element(at, at + rows);
    if (!std::isfinite(largest) && bad_weight_ == 0) bad_weight_ = i + 1;
    const auto scale = [&](float amax) { return float8::scale_of(amax, DType::f8e4m3, by_rows); };
    w.tensor = scale(largest);
    w.rows.resize(static_cast<std::size_t>(by_rows ? rows : 0));
    w.columns.resize(static_cast<std::size_t>(columns));
    std::transform(at, at + static_cast<std::int64_t>(w.rows.size()), w.rows.begin(), scale);
    std::transform(at + rows, at + rows + columns, w.columns.begin(), scale);
    at += rows + columns;
  }
  versions_ = versions;
  known_ = true;
}

std::optional<std::size_t> Float8Linears::layer_of(const Parameter& weight) const noexcept {
  for (std::size_t i = 0; i < layers_.size(); ++i)
    if (layers_[i]->weight.get() == &weight) return i;
  return std::nullopt;
}

Granularity Float8Linears::granularity_of(WeightUse use) const noexcept {
  if (options_.recipe == Float8Recipe::tensorwise) return Granularity::tensorwise;
  if (use == WeightUse::forward) return Granularity::rowwise;
  return options_.recipe == Float8Recipe::rowwise ? Granularity::columnwise : Granularity::tensorwise;
}

std::vector<float> Float8Linears::scales_of_part(std::size_t layer, WeightUse use,
                                                 const LayoutRef& layout) const {
  const WeightScales& known = scales_[layer];
  const Shape& global = layers_[layer]->weight->global_shape();
  switch (granularity_of(use)) {
    case Granularity::tensorwise: return {known.tensor};
    case Granularity::rowwise: return part_of(known.rows, layout, global, 0);
    case Granularity::columnwise: return part_of(known.columns, layout, global, 1);
  }
  return {};
}

Tensor Float8Linears::weight_codes(std::size_t layer, WeightUse use) {
  if (layer >= layers_.size())
    refuse_float8_layer(
        "the codes of a weight are requested, but its layer is no longer a float8 layer; expected the "
        "Float8Model to be destroyed after the FullySharded that gathers its codes");
  update_scales();
  Parameter& p = *layers_[layer]->weight;
  const Tensor& w = p.weight();
  const Tensor codes = p.compute().make(w.shape(), DType::f8e4m3).with_layout(w.layout());
  const std::vector<float> scales = scales_of_part(layer, use, w.layout());
  float8::quantise(kernels_of(p.compute()), w, granularity_of(use), scales.data(), codes);
  return codes;
}

// Tensors have numbers in the order in which one is the cause of the others. From 1 on there are the weights,
// then the x of each layer, then the dy from the last layer to the first. The smallest number is reported.
void Float8Linears::note_not_finite(const Linear& layer, bool gradient) noexcept {
  const auto at = static_cast<std::size_t>(std::ranges::find(layers_, &layer) - layers_.begin());
  const std::size_t count = layers_.size(), number = gradient ? 3 * count - at : count + at + 1;
  if (first_not_finite_ == 0 || number < first_not_finite_) first_not_finite_ = number;
}

void Float8Linears::expect_finite() {
  if (options_.not_finite != Float8NotFinite::error || layers_.empty()) return;
  const std::size_t count = layers_.size(), noted = std::exchange(first_not_finite_, 0),
                    own = bad_weight_ != 0 ? bad_weight_ : noted;
  const auto numbers = static_cast<float>(3 * count + 1);
  std::vector<float> first{own == 0 ? 0 : numbers - static_cast<float>(own)};
  const Parameter& p = *layers_[0]->weight;
  if (const LayoutRef layout = p.weight().layout(); layout != nullptr) {
    std::vector<bool> axes;
    for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis)
      axes.push_back(layout->mesh_shape().size(axis) > 1);
    largest_over(p.compute(), layout->mesh(), axes, first);
  }
  if (first[0] == 0) return;
  const auto number = static_cast<std::size_t>(numbers - first[0]) - 1;
  const char* const what = "has an element that is not finite";
  if (number < count)
    refuse_float8_layer(fmt::format("the weight \"{}\" {}", layers_[number]->weight->path(), what));
  const bool gradient = number >= 2 * count;
  refuse_float8_layer(fmt::format("\"{}\": {} {}",
                                  layers_[gradient ? 3 * count - 1 - number : number - count]->path(),
                                  gradient ? "dy" : "x", what));
}

}  // namespace weft
