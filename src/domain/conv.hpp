// The common part of convolutions and transposed convolutions on maps that are sharded in space. Inside
// domain.
#pragma once

#include "domain/rules.hpp"
#include "domain/space.hpp"
#include "nn/maps/conv_maps.hpp"
#include "weft/host/copy.hpp"

namespace weft::domain {

/// Both dimensions of a convolution. The larger map is the one over which its kernel slides. The smaller map
/// has a pixel for each place of the kernel.
struct Both {
  Sliding height, width;
  kernels::UnfoldShape shape(std::int64_t channels) const {
    return {channels,
            0,
            0,
            height.kernel,
            width.kernel,
            height.stride,
            width.stride,
            0,
            0,
            height.dilation,
            width.dilation,
            0,
            0,
            kernels::Padding::zeros};
  }
};

inline void expect_input(const Module& module, const Tensor& x, std::int64_t channels) {
  maps::expect_map(module, x);
  layouts::expect_whole_dim(layouts::named(module, "x"), x, "a convolution", 1);
  if (x.size(1) != channels)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (batch, {}, height, width)",
                            layouts::named(module, "x").text(), to_string(x.shape()), channels));
}

/// The part of the larger map that the kernel sees when it is applied at this rank's pixels of the smaller
/// map. The window holds all of these pixels, including padding.
struct Seen {
  Window window;
  Parts rows, columns;  // of the smaller map
  Seen(const LayoutRef& larger, const LayoutRef& smaller, const Both& k, const Edge& edge)
      : Seen(larger, k, parts_of(smaller, kHeight), parts_of(smaller, kWidth), edge) {}
  kernels::UnfoldShape shape(kernels::UnfoldShape s) const {
    s.height = window.window_size(kHeight), s.width = window.window_size(kWidth);
    s.out_height = rows.own().size(), s.out_width = columns.own().size();
    return s;
  }

 private:
  Seen(const LayoutRef& larger, const Both& k, Parts rows_in, Parts columns_in, const Edge& edge)
      : window(larger, {window_for(
                            rows_in, [&](const IndexRange& o) { return k.height.seen(o); }, edge),
                        window_for(
                            columns_in, [&](const IndexRange& o) { return k.width.seen(o); }, edge)}),
        rows(std::move(rows_in)),
        columns(std::move(columns_in)) {}
};

/// The pixels of the smaller map that see any of this rank's pixels of the larger map; spreads their values
/// over the larger map.
struct Seeing {
  Window window;
  Parts rows, columns;  // of the larger map
  Seeing(const LayoutRef& smaller, const LayoutRef& larger, const Both& k)
      : Seeing(smaller, k, parts_of(larger, kHeight), parts_of(larger, kWidth)) {}
  Seeing(const LayoutRef& smaller, const Both& k, Parts rows_in, Parts columns_in)
      : window(smaller, {window_for(rows_in, [&](const IndexRange& i) { return k.height.seeing(i); }),
                         window_for(columns_in, [&](const IndexRange& i) { return k.width.seeing(i); })}),
        rows(std::move(rows_in)),
        columns(std::move(columns_in)) {}
  kernels::UnfoldShape shape(kernels::UnfoldShape s, const Both& k) const {
    const IndexRange r = rows.own(), c = columns.own();
    const IndexRange from_rows = k.height.seeing(r), from_columns = k.width.seeing(c);
    s.height = r.size(), s.width = c.size();
    s.out_height = from_rows.size(), s.out_width = from_columns.size();
    s.padding_height = k.height.padding + r.lo - from_rows.lo * k.height.stride;
    s.padding_width = k.width.padding + c.lo - from_columns.lo * k.width.stride;
    return s;
  }
};

/// Memory for a window on maps of that shape, and the exchange of the window, which has begun.
struct Fetched {
  Tensor window;
  WindowTransfer transfer;
};
inline Fetched start(Frame& frame, const Window& window, const Tensor& maps) {
  Fetched f{frame.compute().make(window.window_shape(maps.shape()), maps.dtype(), Memory::shared), {}};
  f.transfer = window.start(maps, f.window, frame.compute().stream());
  return f;
}
inline Tensor fetch(Frame& frame, const Window& window, const Tensor& maps) {
  Fetched f = start(frame, window, maps);
  f.transfer.finish();
  return f.window;
}

/// Uninitialised maps of this rank, in memory that other ranks can read.
inline Tensor make_maps(Frame& frame, const LayoutRef& layout, DType dtype = DType::f32) {
  return frame.compute().make(layout->local_shape(), dtype, Memory::shared).with_layout(layout);
}

/// The part of a map, or of the memory of one, that begins at this row and column.
template <class View>
View part_of(View map, std::int64_t row, std::int64_t column, const Shape& shape) {
  map.data += (row * map.strides[kHeight] + column) * size_bytes(map.dtype);
  map.shape = shape;
  return map;
}
/// Copies that part of the map, with this layout, to new memory.
inline Tensor cut_out(Frame& frame, const Tensor& map, std::int64_t row, std::int64_t column,
                      const LayoutRef& layout) {
  const Tensor out = make_maps(frame, layout, map.dtype());
  if (out.count() > 0)
    copy(frame.compute().context(), part_of(ConstTensorView(map), row, column, out.shape()), out.view(),
         frame.compute().stream());
  return out;
}

}  // namespace weft::domain
