// Maps in and out of a split model, and the gradients of its weights.
#include <fmt/format.h>

#include <optional>
#include <tuple>

#include "domain/plans.hpp"
#include "domain/space.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "weft/base/error.hpp"
#include "weft/domain/domain.hpp"
#include "weft/dp/reduce_gradients.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {

struct DomainManager::Plans {
  using Unpadding = std::tuple<LayoutRef, std::int64_t, std::int64_t, std::int64_t, std::int64_t>;  // of y
  domain::Plans<Window, Unpadding> unpaddings;
};

namespace {

[[noreturn]] void refuse_argument(const std::string& text) { throw Error(ErrorCode::bad_argument, text); }

const DomainManager& given(const char* function, const DomainManager& manager) {
  if (!manager)
    refuse_argument(
        fmt::format("{}: the manager is empty; expected that of apply_domain_parallel", function));
  return manager;
}

const LayoutRef& layout_of(const char* function, const Tensor& t) {
  if (t.layout() == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("{}: the tensor {} is plain; expected maps that are cut in space", function,
                            to_string(t.shape())));
  return t.layout();
}

// The axes shard their dimensions, inside the shards of all other axes.
LayoutRef cut(LayoutRef layout, const DomainManager& manager) {
  std::size_t i = 0;
  for (const DeviceMesh& axis : manager.axes().each_axis())
    layout = layout->with(axis, Shard{manager.options().dims[i++]});
  return layout;
}

// Throws if x cannot be sharded along the axes of the manager so that each rank gets at least one element.
void expect_cuttable(const Shape& x, const DomainManager& manager) {
  const std::span<const MeshAxis> axes = manager.axes().shape().axes();
  const std::vector<int>& dims = manager.options().dims;
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const int dim = dims[i];
    if (dim >= x.rank() || dim < 0)
      refuse_argument(fmt::format("shard_spatial: x is {}; dimension {} is cut along {}", to_string(x), dim,
                                  axes[i].name));
    std::int64_t parts = 1;  // several axes may shard one dimension
    std::string names;
    for (std::size_t j = 0; j < axes.size(); ++j)
      if (dims[j] == dim) {
        parts *= axes[j].size;
        names += fmt::format("{}{}={}", names.empty() ? "" : ", ", axes[j].name, axes[j].size);
      }
    if (x[dim] < parts)
      refuse_argument(
          fmt::format("shard_spatial: x {} has {} elements in dimension {} for {}; each rank needs at "
                      "least one: fewer ranks, or a larger map",
                      to_string(x), x[dim], dim, names));
  }
}

// The layout of the samples of all data ranks, of which this rank has `own`. They are whole maps, laid out
// along `axes` as one rank has them. The ranks send each other their shapes, and the faults that they found.
LayoutRef of_own_samples(const Shape& own, const DeviceMesh& axes, const DeviceMesh& data,
                         const std::optional<Error>& fault) {
  constexpr std::size_t kWords = Shape::kMaxDims + 1;
  std::vector<std::uint64_t> words(kWords, 0);
  words[0] = static_cast<std::uint64_t>(own.rank());
  for (int d = 0; d < own.rank(); ++d)
    words[static_cast<std::size_t>(d) + 1] = static_cast<std::uint64_t>(own[d]);
  const std::vector<std::uint64_t> all = gather_with_list(
      "shard_spatial", data, ListDigest{}, words, [] { return ListEntries{}; }, fault);
  const auto shape_on = [&](int rank) {
    const std::uint64_t* const of = all.data() + static_cast<std::size_t>(rank) * kWords;
    return Shape(std::vector<std::int64_t>(of + 1, of + 1 + of[0]));
  };
  Shape global = own;
  global[0] = 0;
  std::string counts;
  for (int rank = 0; rank < data.size(); ++rank) {
    Shape other = shape_on(rank);
    global[0] += other[0];
    counts += fmt::format("{}{}", rank == 0 ? "" : ", ", other[0]);
    other[0] = shape_on(0)[0];
    if (!(other == shape_on(0)))
      refuse_argument(fmt::format("shard_spatial: x is {} on {}, but {} on {}; expected maps of one size",
                                  to_string(shape_on(0)), name_axis_rank(data, 0), to_string(shape_on(rank)),
                                  name_axis_rank(data, rank)));
  }
  const LayoutRef layout = replicated_layout(axes, global)->with(data, Shard{0});
  std::string expected;
  bool fits = true;
  for (int rank = 0; rank < data.size(); ++rank) {
    const std::int64_t samples = domain::parts_of(layout, 0).ranges[static_cast<std::size_t>(rank)].size();
    expected += fmt::format("{}{}", rank == 0 ? "" : ", ", samples);
    fits = fits && samples == shape_on(rank)[0];
  }
  if (!fits)
    refuse_argument(
        fmt::format("shard_spatial: x has {} samples on the ranks of {}={}; expected {}, as a layout cuts "
                    "{} samples",
                    counts, data.name(), data.size(), expected, global[0]));
  return layout;
}

// The layout of y without its padding.
LayoutRef without_padding(const LayoutRef& y, const SpatialPadding& p) {
  return domain::like(y, y->global[1], y->global[domain::kHeight] - p.top - p.bottom,
                      y->global[domain::kWidth] - p.left - p.right);
}

// The part of the result, y, that each rank has.
Window unpadding(const LayoutRef& y, const SpatialPadding& padding) {
  const LayoutRef result = without_padding(y, padding);
  const auto shifted = [&](int dim, std::int64_t by) {
    return domain::window_for(domain::parts_of(result, dim), [by](const IndexRange& r) {
      return r.size() > 0 ? IndexRange{r.lo + by, r.hi + by} : IndexRange{};
    });
  };
  return Window(y, {shifted(domain::kHeight, padding.top), shifted(domain::kWidth, padding.left)});
}

std::shared_ptr<const Window> kept_unpadding(const DomainManager& manager, const LayoutRef& y,
                                             const SpatialPadding& p) {
  const auto make = [&] { return unpadding(y, p); };
  if (manager.plans() == nullptr) return std::make_shared<const Window>(make());
  return manager.plans()->unpaddings.of({y, p.top, p.bottom, p.left, p.right}, make);
}

}  // namespace

std::shared_ptr<DomainManager::Plans> domain::make_plans() {
  return std::make_shared<DomainManager::Plans>();
}

LayoutRef DomainManager::layout(const Shape& global) const {
  LayoutRef layout = replicated_layout(axes_, global);
  if (options_.data && options_.data.size() > 1) layout = layout->with(options_.data, Shard{0});
  return cut(layout, *this);
}

Tensor shard_spatial(const Tensor& x, const DomainManager& manager) {
  given("shard_spatial", manager);
  const std::optional<Error> fault =
      fault_of([&] { expect_cuttable(x.layout() ? x.layout()->global : x.shape(), manager); });
  const DeviceMesh& data = manager.options().data;
  const bool several = !x.layout() && data && data.size() > 1;
  if (fault && !several) throw Error(*fault);
  if (x.layout()) return redistribute(x, cut(x.layout(), manager));
  const LayoutRef whole = several ? of_own_samples(x.shape(), manager.axes(), data, fault)
                                  : replicated_layout(manager.axes(), x.shape());
  return redistribute(as_layout(x, whole), cut(whole, manager));
}

Tensor gather_spatial(const Tensor& y, const DomainManager& manager) {
  given("gather_spatial", manager);
  LayoutRef whole = layout_of("gather_spatial", y);
  for (const DeviceMesh& axis : manager.axes().each_axis()) whole = whole->with(axis, Replicate{});
  return redistribute(y, whole);
}

Tensor crop_padding(const Tensor& y, const SpatialPadding& padding, const DomainManager& manager,
                    std::int64_t height, std::int64_t width) {
  given("crop_padding", manager);
  const LayoutRef of_y = layout_of("crop_padding", y);
  const Shape& has = of_y->global;
  if (has.rank() != 4 || has[domain::kHeight] != height + padding.top + padding.bottom ||
      has[domain::kWidth] != width + padding.left + padding.right)
    refuse_argument(
        fmt::format("crop_padding: y is {}; expected {} + {} + {} rows and {} + {} + {} columns of "
                    "padding, map and padding",
                    to_string(has), padding.top, height, padding.bottom, padding.left, width, padding.right));
  const std::shared_ptr<const Window> window = kept_unpadding(manager, of_y, padding);
  const Tensor result(of_y->mesh().context(), window->window_shape(y.shape()), y.dtype(), Memory::shared,
                      y.stream());
  window->fetch(y, result, y.stream());
  return result.with_layout(without_padding(of_y, padding));
}

Tensor crop_padding_adjoint(const Tensor& dy, const SpatialPadding& padding, const LayoutRef& y,
                            const DomainManager& manager) {
  constexpr const char* kName = "crop_padding_adjoint";
  const LayoutRef& of_dy = layout_of(kName, dy);
  if (y == nullptr)
    refuse_argument(fmt::format("{}: y is null; expected the layout of what was cropped", kName));
  if (y->global.rank() != domain::kMapDims || y->global[domain::kHeight] < padding.top + padding.bottom ||
      y->global[domain::kWidth] < padding.left + padding.right)
    refuse_argument(fmt::format("{}: y is {}; expected maps with {} + {} rows and {} + {} columns of padding",
                                kName, to_string(y->global), padding.top, padding.bottom, padding.left,
                                padding.right));
  const LayoutRef expected = without_padding(y, padding);
  if (of_dy != expected)
    throw Error(ErrorCode::layout, fmt::format("{}: dy is {}; expected {}, as y without its padding", kName,
                                               to_string(*of_dy), to_string(*expected)));
  const Tensor result(y->mesh().context(), y->local_shape(), dy.dtype(), Memory::shared, dy.stream());
  kept_unpadding(manager, y, padding)->adjoint(dy, result);
  return result.with_layout(y);
}

void sync_domain_gradients(Module& model, const DomainManager& manager) {
  given("sync_domain_gradients", manager);
  if (manager.size() == 1) return;
  std::vector<Gradient> gradients;
  std::vector<Parameter*> parameters;
  Compute* compute = nullptr;
  for (Parameter* p : model.parameters()) {
    if (!p->trainable()) continue;
    if (!p->has_gradient())
      refuse_argument(fmt::format("sync_domain_gradients: \"{}\" has no gradient", p->path()));
    parameters.push_back(p);
    gradients.push_back({p->path(), p->gradient(), p->gradient_layout()});
    if (!(p->compute().device() == Device{})) compute = &p->compute();
  }
  reduce_gradients(gradients, manager.axes(), {.compute = compute});
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i]->set_gradient_layout(gradients[i].layout);
}

}  // namespace weft
