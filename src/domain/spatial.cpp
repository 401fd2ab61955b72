// Maps in and out of a split model, and the gradients of its weights.
#include <fmt/format.h>

#include "domain/space.hpp"
#include "weft/base/error.hpp"
#include "weft/domain/domain.hpp"
#include "weft/dp/replicated.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::bad_argument, text); }

const DomainManager& given(const char* function, const DomainManager& manager) {
  if (!manager)
    refuse(fmt::format("{}: the manager is empty; expected that of apply_domain_parallel", function));
  return manager;
}

const LayoutRef& layout_of(const char* function, const Tensor& t) {
  if (t.layout() == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("{}: the tensor {} is plain; expected maps that are cut in space", function,
                            to_string(t.shape())));
  return t.layout();
}

// The axes cut what they cut, inside whatever else does.
LayoutRef cut(LayoutRef layout, const DomainManager& manager) {
  std::size_t i = 0;
  for (const DeviceMesh& axis : manager.axes().each_axis())
    layout = layout->with(axis, Shard{manager.options().dims[i++]});
  return layout;
}

std::vector<WindowDim> without_padding(const LayoutRef& y, const LayoutRef& result,
                                       const SpatialPadding& padding) {
  const auto shifted = [&](int dim, std::int64_t by) {
    return domain::window_for(domain::parts_of(result, dim), [by](const IndexRange& r) {
      return r.size() > 0 ? IndexRange{r.lo + by, r.hi + by} : IndexRange{};
    });
  };
  static_cast<void>(y);
  return {shifted(domain::kHeight, padding.top), shifted(domain::kWidth, padding.left)};
}

}  // namespace

LayoutRef DomainManager::layout(const Shape& global) const {
  LayoutRef layout = replicated_layout(axes_, global);
  if (options_.data && options_.data.size() > 1) layout = layout->with(options_.data, Shard{0});
  return cut(layout, *this);
}

Tensor shard_spatial(const Tensor& x, const DomainManager& manager) {
  given("shard_spatial", manager);
  Shape global = x.layout() ? x.layout()->global : x.shape();
  const auto& dims = manager.options().dims;
  const std::span<const MeshAxis> axes = manager.axes().shape().axes();
  for (std::size_t i = 0; i < axes.size(); ++i) {
    const int dim = dims[i];
    if (dim >= global.rank() || dim < 0)
      refuse(fmt::format("shard_spatial: x is {}; dimension {} is cut along {}", to_string(global), dim,
                         axes[i].name));
    std::int64_t parts = 1;  // several axes may cut one dimension
    std::string names;
    for (std::size_t j = 0; j < axes.size(); ++j)
      if (dims[j] == dim) {
        parts *= axes[j].size;
        names += fmt::format("{}{}={}", names.empty() ? "" : ", ", axes[j].name, axes[j].size);
      }
    if (global[dim] < parts)
      refuse(
          fmt::format("shard_spatial: x {} has {} elements in dimension {} for {}; each rank needs at "
                      "least one: fewer ranks, or a larger map",
                      to_string(global), global[dim], dim, names));
  }
  if (x.layout()) return redistribute(x, cut(x.layout(), manager));
  const DeviceMesh& data = manager.options().data;
  if (data && data.size() > 1) global[0] *= data.size();
  const LayoutRef whole = data && data.size() > 1
                              ? replicated_layout(manager.axes(), global)->with(data, Shard{0})
                              : replicated_layout(manager.axes(), global);
  return redistribute(as_layout(x, whole), cut(whole, manager));
}

Tensor gather_spatial(const Tensor& y, const DomainManager& manager) {
  given("gather_spatial", manager);
  LayoutRef whole = layout_of("gather_spatial", y);
  for (const DeviceMesh& axis : manager.axes().each_axis()) whole = whole->with(axis, Replicate{});
  return redistribute(y, whole);
}

Tensor unpad_shard_interp(const Tensor& y, const SpatialPadding& padding, const DomainManager& manager,
                          std::int64_t height, std::int64_t width) {
  given("unpad_shard_interp", manager);
  const LayoutRef of_y = layout_of("unpad_shard_interp", y);
  const Shape& has = of_y->global;
  if (has.rank() != 4 || has[domain::kHeight] != height + padding.top + padding.bottom ||
      has[domain::kWidth] != width + padding.left + padding.right)
    refuse(
        fmt::format("unpad_shard_interp: y is {}; expected {} + {} + {} rows and {} + {} + {} columns of "
                    "padding, map and padding",
                    to_string(has), padding.top, height, padding.bottom, padding.left, width, padding.right));
  const LayoutRef result = domain::like(of_y, has[1], height, width);
  return fetch_window(y, without_padding(of_y, result, padding)).with_layout(result);
}

Tensor unpad_shard_interp_adjoint(const Tensor& dy, const SpatialPadding& padding, const LayoutRef& y) {
  return fetch_window_adjoint(dy, y,
                              without_padding(y, layout_of("unpad_shard_interp_adjoint", dy), padding));
}

void sync_domain_gradients(Module& model, const DomainManager& manager) {
  given("sync_domain_gradients", manager);
  if (manager.size() == 1) return;
  std::vector<Gradient> gradients;
  std::vector<Parameter*> parameters;
  Compute* compute = nullptr;
  for (Parameter* p : model.parameters()) {
    if (!p->trainable()) continue;
    if (!p->has_gradient()) refuse(fmt::format("sync_domain_gradients: \"{}\" has no gradient", p->path()));
    parameters.push_back(p);
    gradients.push_back({p->path(), p->gradient(), p->gradient_layout()});
    if (!(p->compute().device() == Device{})) compute = &p->compute();
  }
  SyncOptions options;
  options.compute = compute;
  sync_replicated_gradients(gradients, manager.axes(), options);
  for (std::size_t i = 0; i < parameters.size(); ++i) parameters[i]->set_gradient_layout(gradients[i].layout);
}

}  // namespace weft
