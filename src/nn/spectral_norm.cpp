#include "weft/nn/spectral_norm.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

using kernels::Stored;

// The part of a matrix that a rank holds, f32: (rows, columns), and how its rows and columns are sharded.
struct Matrix {
  Tensor values;
  std::int64_t rows, columns;
};

bool cut(const LayoutRef& layout, std::size_t axis) {
  return layout != nullptr && layout->mesh_shape().size(static_cast<int>(axis)) > 1 &&
         is_shard(layout->placements[axis]);
}

// `of`, with Partial(sum) on the axes that shard `summed`. If both are null, returns null.
LayoutRef partial_over(const LayoutRef& of, const LayoutRef& summed) {
  if (of == nullptr) return nullptr;
  Placements placements = of->placements;
  for (std::size_t axis = 0; axis < placements.size(); ++axis)
    if (cut(summed, axis)) placements[axis] = Partial{};
  return of->with(std::move(placements));
}

// The sum of all ranks' contributions, with the layout `to`; the contribution itself if nothing is Partial.
Tensor summed(const Tensor& contribution, const LayoutRef& from, const LayoutRef& to) {
  if (from == to) return contribution.with_layout(to);
  return redistribute(contribution.with_layout(from), to);
}

// The sum of one number, (1), over the ranks of the axes that shard `over`, each of which has a part. The
// number stays on its device, so the host never waits for it.
Tensor number_of(const Tensor& part, const LayoutRef& over) {
  const LayoutRef whole = over == nullptr ? nullptr : replicated_layout(over->mesh(), {1});
  return summed(part, partial_over(whole, over), whole);
}

// a · b over this rank's elements, (1)
Tensor dot(Frame& frame, const Tensor& a, const Tensor& b) {
  const Tensor product = frame.compute().make({1}, DType::f32, Memory::shared);
  multiply(frame, a, Stored::plain, b, Stored::plain, product, 1, 1, a.count(), false);
  return product;
}

// W x, or Wᵀ x: (rows) or (columns), summed over the axes that shard x, and sharded like `like`
Tensor product(Frame& frame, const Matrix& w, Stored stored, const Tensor& x, const LayoutRef& like) {
  const bool turned = stored == Stored::transposed;
  const std::int64_t n = turned ? w.columns : w.rows, k = turned ? w.rows : w.columns;
  const Tensor y = frame.compute().make({n}, DType::f32, Memory::shared);
  multiply(frame, w.values, stored, x, Stored::plain, y, n, 1, k, false);
  return summed(y, partial_over(like, x.layout()), like);
}

// x / max(|x|, eps), in place. The norm is over all ranks that have a part of x.
void normalise(Frame& frame, const Tensor& x, double eps) {
  const Tensor squares = frame.compute().make({1}, DType::f64, Memory::shared);
  kernels::sum_of_squares(frame.kernels(), x.data_ptr<float>(), squares.data_ptr<double>(), x.count());
  const Tensor sum = number_of(squares, x.layout());
  kernels::normalise(frame.kernels(), x.data_ptr<float>(), sum.data_ptr<double>(), eps, x.count());
}

Tensor copy_of(Frame& frame, const Tensor& x) {
  const Tensor y = frame.compute().make(x.shape(), x.dtype()).with_layout(x.layout());
  copy(frame.compute().context(), x, y, frame.compute().stream());
  return y;
}

// w / sigma, in the weight's dtype
Tensor divided(Frame& frame, const Tensor& weight, const Tensor& sigma) {
  const Tensor y = copy_of(frame, widened(frame, weight));
  kernels::spectral_divide(frame.kernels(), y.data_ptr<float>(), sigma.data_ptr<float>(), nullptr, y.count());
  return as_operand(frame, y, weight).with_layout(weight.layout());
}

// u and v are not kept if sigma cannot divide. After a u of zeros, or of NaNs, all later passes would fail.
// On the CPU the number is available, and the error names the weight. On another device the kernel that
// divides by it reports the fault, at the next wait.
void expect_sigma(Frame& frame, std::string_view path, const Tensor& sigma) {
  if (frame.compute().device() != Device{}) return;
  const float number = *sigma.data_ptr<float>();
  if (!std::isfinite(number) || number == 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("spectral norm of \"{}\": sigma is {}; expected a number other than 0", path, number));
}

Init of_norm_one(std::int64_t count) {
  return Normal{1 / std::sqrt(static_cast<double>(std::max<std::int64_t>(1, count)))};
}

}  // namespace

SpectralNorm::SpectralNorm(std::string_view layer, ParameterRef weight, const SpectralNormConfig& config)
    : weight_(std::move(weight)), config_(config) {
  const auto refuse = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("spectral norm of \"{}\": {}", layer, text));
  };
  if (config.power_iterations < 1)
    refuse(fmt::format("power_iterations is {}; expected at least 1", config.power_iterations));
  if (!(config.eps > 0)) refuse(fmt::format("eps is {}; expected more than 0", config.eps));
  if (weight_->holders() > 1)
    refuse(fmt::format("its weight \"{}\" is shared by {} modules; expected one of its own", weight_->path(),
                       weight_->holders()));
  if (weight_->layout() != nullptr || weight_->materialised())
    refuse(fmt::format("its weight \"{}\" has {} already; add it before parallelize and materialise",
                       weight_->path(), weight_->materialised() ? "memory" : "a layout"));
  const Shape& shape = weight_->global_shape();
  const std::int64_t rows = shape[0], columns = rows == 0 ? 0 : shape.count() / rows;
  u = std::make_shared<ModuleBuffer>(Shape{rows}, DType::f32, of_norm_one(rows));
  v = std::make_shared<ModuleBuffer>(Shape{columns}, DType::f32, of_norm_one(columns));
}

std::vector<ShardRule::BufferPart> SpectralNorm::parts(Split split) const {
  return {{split == Split::column ? u.get() : v.get(), Shard{0}}};
}

// Products use this rank's part of the weight. Each part of the rows gives a contribution to the vector of
// the columns, Wᵀ u. Each part of the columns gives one to the vector of the rows, W v. So each vector is
// summed over the axes that shard the vector from which it is computed, and is then sharded like the weight's
// other dimension.
Tensor SpectralNorm::forward(Frame& frame, Tensors& kept) const {
  const Tensor& weight = weight_->weight();
  const std::int64_t rows = weight.size(0), columns = rows == 0 ? 0 : weight.count() / rows;
  const Matrix w{widened(frame, weight), rows, columns};
  const LayoutRef of_u = u->tensor().layout(), of_v = v->tensor().layout();
  if (u->tensor().count() != rows || v->tensor().count() != columns)
    throw Error(
        ErrorCode::layout,
        fmt::format("spectral norm of \"{}\": this rank has ({}, {}) of the weight, {} of u and {} of "
                    "v; expected u cut as the rows, and v as the columns",
                    weight_->path(), rows, columns, u->tensor().count(), v->tensor().count()));
  const auto estimate = [&](bool iterate) -> Tensors {
    Tensor of_rows = u->tensor(), of_columns = v->tensor();
    Tensor w_v;
    if (iterate) {
      for (int i = 0; i < config_.power_iterations; ++i) {
        of_columns = product(frame, w, Stored::transposed, of_rows, of_v);
        normalise(frame, of_columns, config_.eps);
        w_v = product(frame, w, Stored::plain, of_columns, of_u);
        of_rows = copy_of(frame, w_v);
        normalise(frame, of_rows, config_.eps);
      }
    } else {
      w_v = product(frame, w, Stored::plain, of_columns, of_u);
      if (frame.keeps()) of_rows = copy_of(frame, of_rows), of_columns = copy_of(frame, of_columns);
    }
    const Tensor sigma = number_of(dot(frame, of_rows, w_v), of_u);
    expect_sigma(frame, weight_->path(), sigma);
    if (iterate)
      for (const auto& [from, to] : {std::pair{&of_rows, u.get()}, {&of_columns, v.get()}})
        kernels::spectral_keep(frame.kernels(), from->data_ptr<float>(), sigma.data_ptr<float>(),
                               to->tensor().data_ptr<float>(), from->count());
    return {of_rows, of_columns, sigma};
  };
  // A layer that runs again for its backward must find the u and v of its first run, and leave the buffers.
  const Tensors found =
      frame.pass().training ? frame.once(weight_->path(), [&] { return estimate(true); }) : estimate(false);
  kept.insert(kept.end(), found.begin(), found.end());
  return divided(frame, weight, found.back());
}

Tensor SpectralNorm::again(Frame& frame, const Tensors& kept) const {
  return divided(frame, weight_->weight(), kept.back());
}

void SpectralNorm::accumulate(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                              const std::function<void(const Tensor&, bool)>& write) const {
  if (!weight_->trainable()) return;
  const Tensor &of_rows = kept[kept.size() - 3], &of_columns = kept[kept.size() - 2];
  const Tensor& sigma = kept.back();
  weight_->accumulate(layout, [&](const Tensor& into, bool add) {
    const Tensor& weight = weight_->weight();
    const Tensor gradient = add ? frame.compute().make(into.shape()) : into;
    write(gradient, false);
    // <dŴ, W>, over the parts of the weight. If dŴ is a contribution to a sum (Partial: of this rank's
    // samples), so is dW.
    const Tensor inner = number_of(dot(frame, gradient, widened(frame, weight)), weight.layout());
    const Tensor scaled = copy_of(frame, of_rows);
    for (const auto& [x, factor] : {std::pair{&gradient, static_cast<const float*>(nullptr)},
                                    {&scaled, static_cast<const float*>(inner.data_ptr<float>())}})
      kernels::spectral_divide(frame.kernels(), x->data_ptr<float>(), sigma.data_ptr<float>(), factor,
                               x->count());
    multiply(frame, scaled, Stored::plain, of_columns, Stored::plain, gradient, of_rows.count(),
             of_columns.count(), 1, true);
    if (add)
      kernels::add(frame.kernels(), into.data_ptr<float>(), gradient.data_ptr<float>(),
                   into.data_ptr<float>(), into.count());
  });
}

WeightedLayer::WeightedLayer(const Shape& weight_shape, bool with_bias, const Init& init) {
  weight = add("weight", std::make_shared<Parameter>(weight_shape, init));
  if (with_bias) bias = add("bias", std::make_shared<Parameter>(Shape{weight_shape[0]}));
}

void WeightedLayer::add_spectral_norm(const SpectralNormConfig& config) {
  if (spectral_norm_)
    throw Error(ErrorCode::bad_argument, fmt::format("spectral norm of \"{}\": it has one already", path()));
  auto norm = std::make_unique<SpectralNorm>(path(), weight, config);
  rename_parameter("weight", "weight_orig");
  add("weight_u", norm->u);
  add("weight_v", norm->v);
  spectral_norm_ = std::move(norm);
}

ShardRule WeightedLayer::rule_of_product(Split split, const std::vector<std::int64_t>& segments) const {
  const bool columns = split == Split::column;
  const Segments of_outputs{0, columns ? segments : std::vector<std::int64_t>{}};
  ShardRule rule;
  rule.parameters.push_back({weight.get(), Shard{columns ? 0 : 1}, of_outputs});
  if (bias)
    rule.parameters.push_back(
        {bias.get(), columns ? Placement(Shard{0}) : Placement(Replicate{}), of_outputs});
  if (!spectral_norm_) return rule;
  rule.buffers = spectral_norm_->parts(split);
  for (ShardRule::BufferPart& part : rule.buffers) part.segments = of_outputs;
  rule.whole_by_default = "a spectral norm";
  return rule;
}

Tensor WeightedLayer::weight_to_use(Frame& frame, Tensors& kept) const {
  return spectral_norm_ ? spectral_norm_->forward(frame, kept) : weight->weight();
}

Tensor WeightedLayer::weight_used(Frame& frame, const Tensors& kept) const {
  return spectral_norm_ ? spectral_norm_->again(frame, kept) : weight->weight();
}

void WeightedLayer::accumulate_weight(Frame& frame, const Tensors& kept, const LayoutRef& layout,
                                      const std::function<void(const Tensor& into, bool add)>& write) const {
  if (spectral_norm_)
    spectral_norm_->accumulate(frame, kept, layout, write);
  else
    weight->accumulate(layout, write);
}

int add_spectral_norm(Module& root, const SpectralNormConfig& config) {
  int count = 0;
  root.visit([&](Module& m) {
    auto* const layer = dynamic_cast<WeightedLayer*>(&m);
    if (layer == nullptr || layer->spectral_norm() != nullptr) return;
    layer->add_spectral_norm(config);
    ++count;
  });
  return count;
}

}  // namespace weft
