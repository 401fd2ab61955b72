// Halos and windows in C. Comments in weft/c/window.h say which functions communicate.
#include "weft/mesh/window.hpp"

#include <algorithm>
#include <cstring>

#include "capi/mesh_handles.hpp"
#include "mesh/window_errors.hpp"
#include "weft/mesh/halo.hpp"

using weft::ErrorCode;
using weft::Partition;
using weft::TensorView;
namespace capi = weft::capi;

static_assert(sizeof(weft_edge) == 16);  // have no struct_size: they stay as they are
static_assert(sizeof(weft_cut) == 16);
static_assert(sizeof(weft_halo_dim) == 56);
static_assert(sizeof(weft_range) == 16);
static_assert(sizeof(weft_window_dim) == 48);
static_assert(sizeof(weft_halo_fields) == 24);
static_assert(sizeof(weft_window_fields) == 32);

struct weft_halo : capi::Handle<weft_halo> {
  static constexpr const char* kKind = "weft_halo";
  weft_halo(capi::MeshOwner owner_in, weft::Halo halo_in)
      : owner(std::move(owner_in)), halo(std::move(halo_in)) {}
  capi::MeshOwner owner;
  weft::Halo halo;
};

struct weft_window : capi::Handle<weft_window> {
  static constexpr const char* kKind = "weft_window";
  weft_window(capi::MeshOwner owner_in, weft::Window window_in, const weft::Shape& part_in)
      : owner(std::move(owner_in)), window(std::move(window_in)), part(part_in) {}
  capi::MeshOwner owner;
  weft::Window window;
  weft::Shape part;
};

struct weft_exchange : capi::Handle<weft_exchange> {
  static constexpr const char* kKind = "weft_exchange";
  explicit weft_exchange(capi::MeshOwner owner_in) : owner(std::move(owner_in)) {}
  capi::MeshOwner owner;
  weft::WindowTransfer transfer;
  bool finished = false;
};

namespace {

weft::Edge edge_of(const char* function, const weft_edge& edge, const std::string& which) {
  if (edge.kind < WEFT_EDGE_NONE || edge.kind > WEFT_EDGE_POLE)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("{}.kind is {}; expected 0 (WEFT_EDGE_NONE) to 6 (WEFT_EDGE_POLE)", which, edge.kind));
  static_assert(static_cast<int>(weft::Edge::Kind::pole) == WEFT_EDGE_POLE);
  if (edge.kind != WEFT_EDGE_CONSTANT && edge.value != 0)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("{}.value is {}; expected 0: only WEFT_EDGE_CONSTANT has one", which, edge.value));
  if (edge.kind != WEFT_EDGE_POLE && edge.longitude != 0)
    capi::refuse(
        ErrorCode::bad_argument, function,
        fmt::format("{}.longitude is {}; expected 0: only WEFT_EDGE_POLE has one", which, edge.longitude));
  return {static_cast<weft::Edge::Kind>(edge.kind), edge.value, edge.longitude};
}

Partition partition_of(const char* function, const weft_layout* layout, const weft_cut* cuts,
                       std::int32_t cut_count) {
  const Partition even(capi::layout_of(function, layout, "layout"));
  const std::span<const weft_cut> list = capi::list_of(function, cuts, cut_count, "cuts", "cut_count");
  if (list.empty()) return even;
  std::vector<weft::PartitionDim> dims(even.dims().begin(), even.dims().end());
  for (std::size_t i = 0; i < list.size(); ++i) {
    const std::string which = fmt::format("cuts[{}]", i);
    constexpr std::int32_t kMostParts = 1 << 24;
    if (list[i].part_count < 1 || list[i].part_count > kMostParts)
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("{}.part_count is {}; expected 1 to {}", which, list[i].part_count, kMostParts));
    const std::span<const std::int64_t> begins =
        capi::list_of(function, list[i].begins, list[i].part_count + 1, (which + ".begins").c_str(),
                      (which + ".part_count + 1").c_str());
    const auto cut =
        std::find_if(dims.begin(), dims.end(), [&](const auto& d) { return d.dim == list[i].dim; });
    if (cut == dims.end())
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("{}.dim is {}; expected a dimension that the layout cuts", which, list[i].dim));
    cut->parts.clear();
    for (std::size_t p = 0; p + 1 < begins.size(); ++p) cut->parts.push_back({{begins[p], begins[p + 1]}});
  }
  return {even.mesh(), even.global(), std::move(dims)};
}

// Buffers of the caller's as arrays of this shape.
std::vector<TensorView> arrays_of(const char* function, const weft_buffer* buffers, std::int32_t count,
                                  const char* what, const weft::Shape& shape) {
  std::vector<TensorView> views;
  for (const weft_buffer& b : capi::list_of(function, buffers, count, what, "field_count"))
    views.push_back(capi::view_of(capi::buffer_of(function, &b, what), shape));
  return views;
}

// The list of plans that start together: at least one.
template <class T>
std::span<const T> some_of(const char* function, const T* list, std::int32_t count, const char* name) {
  const std::string count_name =
      fmt::format("{}_count", std::string_view(name).substr(0, std::strlen(name) - 1));
  if (count < 1)
    capi::refuse(ErrorCode::bad_argument, function,
                 fmt::format("{} is {}; expected at least 1", count_name, count));
  return capi::list_of(function, list, count, name, count_name.c_str());
}

void expect_no_more(const char* function, std::int32_t reserved, const std::string& which) {
  if (reserved != 0)
    capi::refuse(ErrorCode::unsupported, function,
                 fmt::format("{}.reserved is {}; expected 0", which, reserved));
}

// `begin` gives the transfer. Its handle is made before, since the transfer must not be lost once it has
// begun.
template <class Begin>
void run(const capi::MeshOwner& owner, weft_exchange** exchange, const Begin& begin) {
  auto handle = std::make_unique<weft_exchange>(owner);
  handle->transfer = begin();
  if (exchange == nullptr)
    handle->transfer.finish();
  else
    *exchange = handle.release();
}

std::vector<weft::WindowField> fields_of(const char* function, const weft_window& window,
                                         const weft_buffer* in, const weft_buffer* out, std::int32_t count,
                                         bool adjoint) {
  const weft::Shape wide = window.window.window_shape(window.part);
  const std::vector<TensorView> from = arrays_of(function, in, count, "in", adjoint ? wide : window.part),
                                to = arrays_of(function, out, count, "out", adjoint ? window.part : wide);
  std::vector<weft::WindowField> fields;
  for (std::size_t i = 0; i < from.size(); ++i) fields.push_back({from[i], to[i]});
  return fields;
}

}  // namespace

weft_status weft_halo_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                             const weft_halo_dim* dims, int32_t dim_count, weft_halo** halo,
                             weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Partition x =
        weft::windows::as_halo([&] { return partition_of(function, layout, cuts, cut_count); });
    std::vector<weft::HaloDim> list;
    for (const weft_halo_dim& d : capi::list_of(function, dims, dim_count, "dims", "dim_count")) {
      const std::string which = fmt::format("dims[{}]", list.size());
      expect_no_more(function, d.reserved, which);
      list.push_back({d.dim, d.before, d.after, edge_of(function, d.before_edge, which + ".before_edge"),
                      edge_of(function, d.after_edge, which + ".after_edge")});
    }
    weft_halo*& to = capi::given(function, halo, "halo");
    to = std::make_unique<weft_halo>(layout->owner, weft::Halo(x, list)).release();
  });
}

void weft_halo_destroy(weft_halo* halo) { capi::destroy(__func__, halo, "halo"); }

weft_status weft_halo_extents(const weft_halo* halo, int64_t* extents, int32_t room, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Shape& shape = capi::given(function, halo, "halo").halo.shape();
    std::copy(shape.begin(), shape.end(), capi::room_for(function, extents, room, shape.rank(), "extents"));
  });
}

weft_status weft_halo_part(const weft_halo* halo, int64_t* inner, int64_t* offsets, int64_t* extents,
                           int32_t room, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Halo& of = capi::given(function, halo, "halo").halo;
    const int rank = of.shape().rank();
    int64_t* const at = capi::room_for(function, inner, room, rank, "inner");
    int64_t* const whole = capi::room_for(function, offsets, room, rank, "offsets");
    int64_t* const size = capi::room_for(function, extents, room, rank, "extents");
    std::copy(of.inner().offset.begin(), of.inner().offset.end(), at);
    std::copy(of.offset().begin(), of.offset().end(), whole);
    std::copy(of.inner().shape.begin(), of.inner().shape.end(), size);
  });
}

weft_status weft_halo_start(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                            weft_exchange** exchange, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_halo& of = capi::given(function, halo, "halo");
    const std::vector<TensorView> views = arrays_of(function, fields, field_count, "fields", of.halo.shape());
    run(of.owner, exchange, [&] { return of.halo.start(views); });
  });
}

weft_status weft_halo_start_add(const weft_halo* halo, const weft_buffer* fields, int32_t field_count,
                                weft_exchange** exchange, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_halo& of = capi::given(function, halo, "halo");
    const std::vector<TensorView> views = arrays_of(function, fields, field_count, "fields", of.halo.shape());
    run(of.owner, exchange, [&] { return of.halo.start_add(views); });
  });
}

weft_status weft_halo_start_together(const weft_halo_fields* halos, int32_t halo_count,
                                     weft_exchange** exchange, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::span<const weft_halo_fields> list = some_of(function, halos, halo_count, "halos");
    std::vector<std::vector<TensorView>> views;
    std::vector<weft::HaloFields> together;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string which = fmt::format("halos[{}]", i);
      expect_no_more(function, list[i].reserved, which);
      const weft_halo& of = capi::given(function, list[i].halo, (which + ".halo").c_str());
      views.push_back(arrays_of(function, list[i].fields, list[i].field_count, (which + ".fields").c_str(),
                                of.halo.shape()));
    }
    for (std::size_t i = 0; i < list.size(); ++i) together.push_back({list[i].halo->halo, views[i]});
    run(list[0].halo->owner, exchange, [&] { return weft::start_together(together); });
  });
}

weft_status weft_window_create(const weft_layout* layout, const weft_cut* cuts, int32_t cut_count,
                               const weft_window_dim* dims, int32_t dim_count, weft_window** window,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Partition x = partition_of(function, layout, cuts, cut_count);
    std::vector<weft::WindowDim> list;
    for (const weft_window_dim& d : capi::list_of(function, dims, dim_count, "dims", "dim_count")) {
      const std::string which = fmt::format("dims[{}]", list.size());
      weft::WindowDim wanted{d.dim,
                             {},
                             edge_of(function, d.before_edge, which + ".before_edge"),
                             edge_of(function, d.after_edge, which + ".after_edge")};
      for (const weft_range& r : capi::list_of(function, d.wanted, d.part_count, (which + ".wanted").c_str(),
                                               (which + ".part_count").c_str()))
        wanted.wanted.push_back({{r.lo, r.hi}});
      list.push_back(std::move(wanted));
    }
    weft_window*& to = capi::given(function, window, "window");
    weft::Shape part = x.global();
    for (int d = 0; d < part.rank(); ++d) {
      const weft::PartitionDim of = x.dim(d);
      part[d] = 0;
      for (const weft::IndexRange& r : of.parts[static_cast<std::size_t>(x.part(d))]) part[d] += r.size();
    }
    to = std::make_unique<weft_window>(layout->owner, weft::Window(x, std::move(list)), part).release();
  });
}

void weft_window_destroy(weft_window* window) { capi::destroy(__func__, window, "window"); }

weft_status weft_window_extents(const weft_window* window, int64_t* part, int64_t* extents, int32_t room,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_window& of = capi::given(function, window, "window");
    const weft::Shape wide = of.window.window_shape(of.part);
    int64_t* const held = capi::room_for(function, part, room, wide.rank(), "part");
    int64_t* const to = capi::room_for(function, extents, room, wide.rank(), "extents");
    std::copy(of.part.begin(), of.part.end(), held);
    std::copy(wide.begin(), wide.end(), to);
  });
}

weft_status weft_window_own(const weft_window* window, int32_t dim, weft_range* own, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_window& of = capi::given(function, window, "window");
    weft_range& to = capi::given(function, own, "own");
    const weft::IndexRange range = of.window.own(dim);
    to = {range.lo, range.hi};
  });
}

weft_status weft_window_start(const weft_window* window, const weft_buffer* in, const weft_buffer* out,
                              int32_t field_count, const weft_stream* stream, weft_exchange** exchange,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_window& of = capi::given(function, window, "window");
    const weft::Stream on = stream == nullptr ? weft::Stream{} : capi::stream_of(function, *stream, "stream");
    const std::vector<weft::WindowField> fields = fields_of(function, of, in, out, field_count, false);
    run(of.owner, exchange, [&] { return of.window.start(fields, on); });
  });
}

weft_status weft_window_start_together(const weft_window_fields* windows, int32_t window_count,
                                       const weft_stream* stream, weft_exchange** exchange,
                                       weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::span<const weft_window_fields> list = some_of(function, windows, window_count, "windows");
    const weft::Stream on = stream == nullptr ? weft::Stream{} : capi::stream_of(function, *stream, "stream");
    std::vector<std::vector<weft::WindowField>> fields;
    std::vector<weft::WindowFields> together;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const std::string which = fmt::format("windows[{}]", i);
      expect_no_more(function, list[i].reserved, which);
      const weft_window& of = capi::given(function, list[i].window, (which + ".window").c_str());
      fields.push_back(fields_of(function, of, list[i].in, list[i].out, list[i].field_count, false));
    }
    for (std::size_t i = 0; i < list.size(); ++i) together.push_back({list[i].window->window, fields[i]});
    run(list[0].window->owner, exchange, [&] { return weft::start_together(together, on); });
  });
}

weft_status weft_window_start_adjoint(const weft_window* window, const weft_buffer* in,
                                      const weft_buffer* out, int32_t field_count, weft_exchange** exchange,
                                      weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_window& of = capi::given(function, window, "window");
    const std::vector<weft::WindowField> fields = fields_of(function, of, in, out, field_count, true);
    run(of.owner, exchange, [&] { return of.window.start_adjoint(fields); });
  });
}

weft_status weft_exchange_done(weft_exchange* exchange, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_exchange& asked = capi::given(function, exchange, "exchange");
    capi::given(function, done, "done") = asked.finished || asked.transfer.done();
  });
}

weft_status weft_exchange_finish(weft_exchange* exchange, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_exchange& asked = capi::given(function, exchange, "exchange");
    if (asked.finished) capi::refuse(ErrorCode::bad_argument, function, "exchange is finished already");
    asked.finished = true;
    asked.transfer.finish();
  });
}

void weft_exchange_destroy(weft_exchange* exchange) { capi::destroy(__func__, exchange, "exchange"); }
