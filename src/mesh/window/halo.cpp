#include "weft/mesh/halo.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "mesh/boxes.hpp"
#include "mesh/window/plan.hpp"
#include "mesh/window_errors.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The windows that ranks request if nothing lies beyond the ends that have edge none.
std::vector<WindowDim> windows_of(const Partition& x, const std::vector<HaloDim>& dims) {
  std::vector<WindowDim> windows;
  for (const HaloDim& h : dims) {
    WindowDim d = WindowDim::halo(x, h.dim, h.before, h.after);
    d.before = h.before_edge;
    d.after = h.after_edge;
    const std::int64_t n = x.global()[h.dim];
    for (IndexRanges& part : d.wanted)
      for (IndexRange& r : part) {
        if (h.before_edge.kind == Edge::Kind::none) r.lo = std::max<std::int64_t>(r.lo, 0);
        if (h.after_edge.kind == Edge::Kind::none) r.hi = std::min(r.hi, n);
      }
    windows.push_back(std::move(d));
  }
  return windows;
}

}  // namespace

Halo::Halo(const Partition& x, const std::vector<HaloDim>& dims)
    : Halo(x, dims, windows::as_halo([&] { return windows_of(x, dims); })) {}

Halo::Halo(const Partition& x, const std::vector<HaloDim>& dims, std::vector<WindowDim> wanted)
    : window_(windows::as_halo([&] { return Window(x, wanted); })), shape_(x.global()) {
  window_.plan_->name = "halo";
  for (int d = 0; d < shape_.rank(); ++d) {
    const PartitionDim of = x.dim(d);
    const auto part = static_cast<std::size_t>(x.part(d));
    IndexRange held;
    for (const IndexRange& r : of.parts[part])
      if (r.size() > 0) held = r;  // WindowDim::halo() has refused several where there are ghosts
    shape_[d] = 0;
    for (const IndexRange& r : of.parts[part]) shape_[d] += r.size();
    std::int64_t before = 0, reached = 0, reached_size = shape_[d], all = shape_[d];
    for (std::size_t i = 0; i < dims.size(); ++i) {
      if (dims[i].dim != d || held.size() == 0) continue;
      const IndexRange& r = wanted[i].wanted[part].front();
      before = dims[i].before;
      reached = before - (held.lo - r.lo);
      reached_size = r.size();
      all += before + dims[i].after;
    }
    inner_.offset.push_back(before);
    inner_.shape.push_back(shape_[d]);
    reached_.offset.push_back(reached);
    reached_.shape.push_back(reached_size);
    offset_.push_back(held.lo);
    shape_[d] = all;
    window_.plan_->own_begin.push_back(before - reached);
  }
}

TensorView Halo::inner(const TensorView& cells) const { return narrow(cells, inner_.offset, inner_.shape); }
ConstTensorView Halo::inner(const ConstTensorView& cells) const {
  return narrow(cells, inner_.offset, inner_.shape);
}

std::vector<WindowField> Halo::fields_of(std::span<const TensorView> fields, bool add) const {
  std::vector<WindowField> of_window;
  of_window.reserve(fields.size());
  for (std::size_t i = 0; i < fields.size(); ++i) {
    const TensorView& f = fields[i];
    if (!(f.shape == shape_) || f.strides.rank() != f.shape.rank())
      throw Error(ErrorCode::bad_argument,
                  fmt::format("halo: {} is {}; expected {}: this rank's part {} and its ghost cells",
                              fields.size() == 1 ? "the field" : fmt::format("field {}", i),
                              to_string(f.shape), to_string(shape_), to_string(inner_.shape)));
    const TensorView part = inner(f), window = narrow(f, reached_.offset, reached_.shape);
    of_window.push_back(add ? WindowField{window, part} : WindowField{part, window});
  }
  return of_window;
}

WindowTransfer Halo::start(std::span<const TensorView> fields) const {
  return window_.start(fields_of(fields, false));
}

WindowTransfer Halo::start_add(std::span<const TensorView> fields) const {
  return window_.start_add(fields_of(fields, true));
}

WindowTransfer start_together(std::span<const HaloFields> list) {
  std::vector<std::vector<WindowField>> fields;
  std::vector<WindowFields> windows;
  for (const HaloFields& h : list) fields.push_back(h.halo.fields_of(h.fields, false));
  for (std::size_t i = 0; i < list.size(); ++i) windows.push_back({list[i].halo.window_, fields[i]});
  return start_together(windows);
}

}  // namespace weft
