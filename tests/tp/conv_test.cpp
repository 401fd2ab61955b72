// Column and row convolutions of kernel 1 on plain vectors: the ranks together compute the results of plain
// loops on one rank.
#include "weft/tp/conv.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::conv_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using Floats = std::vector<float>;

template <class T>
TensorView shaped(std::vector<T>& v, const Shape& shape) {
  return view(v.data(), shape);
}
template <class To, class From>
std::vector<To> as(const std::vector<From>& v) {
  std::vector<To> to;
  for (const From& e : v) to.push_back(To(static_cast<float>(e)));
  return to;
}

struct Part {
  std::int64_t begin, size;
};
Part cut(std::int64_t size, int ranks, int rank) {
  const std::int64_t each = size / ranks, more = size % ranks;
  return {each * rank + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}

// Indices [begin, begin + size) of a dimension of a tensor.
Floats slice(const Floats& v, const Shape& shape, int dim, const Part& p) {
  std::int64_t outer = 1, inner = 1;
  for (int d = 0; d < dim; ++d) outer *= shape[d];
  for (int d = dim + 1; d < shape.rank(); ++d) inner *= shape[d];
  Floats part;
  for (std::int64_t o = 0; o < outer; ++o) {
    const auto first = v.begin() + (o * shape[dim] + p.begin) * inner;
    part.insert(part.end(), first, first + p.size * inner);
  }
  return part;
}

struct Sizes {
  std::int64_t batch, in, hidden, out, height, width;
};

// x → column → h → row → y over maps (batch, channels, pixels), by plain loops. Whole numbers of -1 to 1, or
// up to `largest`: sums are exact in whatever order.
struct Serial {
  explicit Serial(const Sizes& s, int largest_in) : sizes(s), largest(largest_in) {
    h = forward(x, w1, b1, s.in, s.hidden), y = forward(h, w2, b2, s.hidden, s.out);
    dh = input_gradient(dy, w2, s.hidden, s.out), dx = input_gradient(dh, w1, s.in, s.hidden);
    dw2 = weight_gradient(dy, h, s.hidden, s.out), dw1 = weight_gradient(dh, x, s.in, s.hidden);
    db2 = bias_gradient(dy, s.out), db1 = bias_gradient(dh, s.hidden);
  }
  Sizes sizes;
  int largest;
  std::int64_t pixels = sizes.height * sizes.width;
  Floats x = make(0, sizes.batch*sizes.in*pixels), w1 = make(1, sizes.hidden*sizes.in),
         b1 = make(2, sizes.hidden), w2 = make(3, sizes.out*sizes.hidden), b2 = make(4, sizes.out),
         dy = make(5, sizes.batch*sizes.out*pixels);
  Floats h, y, dh, dx, dw1, dw2, db1, db2;

  Shape maps(std::int64_t channels) const { return {sizes.batch, channels, sizes.height, sizes.width}; }
  Floats make(int tensor, std::int64_t n) const {
    Floats v;
    const int numbers = 2 * largest + 1;
    for (std::int64_t i = 0; i < n; ++i)
      v.push_back(static_cast<float>((i * 7 + i / numbers * 2 + tensor * 3) % numbers - largest));
    return v;
  }
  float largest_of_all() const {
    float most = 0;
    for (const Floats* all : {&h, &y, &dh, &dx, &dw1, &dw2, &db1, &db2})
      for (const float f : *all) most = std::max(most, std::abs(f));
    return most;
  }

 private:
  // Calls see(of x, of w, of y) with the places of each product.
  template <class See>
  void each(std::int64_t in, std::int64_t out, const See& see) const {
    for (std::int64_t b = 0; b < sizes.batch; ++b)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t i = 0; i < in; ++i)
          for (std::int64_t p = 0; p < pixels; ++p)
            see(static_cast<std::size_t>((b * in + i) * pixels + p), static_cast<std::size_t>(o * in + i),
                static_cast<std::size_t>((b * out + o) * pixels + p));
  }
  Floats forward(const Floats& of_x, const Floats& w, const Floats& b, std::int64_t in,
                 std::int64_t out) const {
    Floats of_y(static_cast<std::size_t>(sizes.batch * out * pixels));
    for (std::size_t i = 0; i < of_y.size(); ++i)
      of_y[i] = b[i / static_cast<std::size_t>(pixels) % static_cast<std::size_t>(out)];
    each(in, out,
         [&](std::size_t x_at, std::size_t w_at, std::size_t y_at) { of_y[y_at] += w[w_at] * of_x[x_at]; });
    return of_y;
  }
  Floats input_gradient(const Floats& of_dy, const Floats& w, std::int64_t in, std::int64_t out) const {
    Floats of_dx(static_cast<std::size_t>(sizes.batch * in * pixels));
    each(in, out,
         [&](std::size_t x_at, std::size_t w_at, std::size_t y_at) { of_dx[x_at] += w[w_at] * of_dy[y_at]; });
    return of_dx;
  }
  Floats weight_gradient(const Floats& of_dy, const Floats& of_x, std::int64_t in, std::int64_t out) const {
    Floats dw(static_cast<std::size_t>(out * in));
    each(in, out,
         [&](std::size_t x_at, std::size_t w_at, std::size_t y_at) { dw[w_at] += of_dy[y_at] * of_x[x_at]; });
    return dw;
  }
  Floats bias_gradient(const Floats& of_dy, std::int64_t out) const {
    Floats db(static_cast<std::size_t>(out));
    each(1, out, [&](std::size_t, std::size_t o, std::size_t y_at) { db[o] += of_dy[y_at]; });
    return db;
  }
};

// x, w and dy are of type T. Results and biases are of type W. x, dx, y and dy are divided along `dim` (-1:
// not divided), of which this rank has `here`.
template <class T, class W>
void expect_serial(const Serial& one, Rank& rank, Compute& compute, const DeviceMesh& axes, int dim,
                   const Part& here, bool accumulate) {
  using In = std::vector<T>;
  using Out = std::vector<W>;
  const Sizes& s = one.sizes;
  const Part own = cut(s.hidden, rank.size, rank.rank);  // channels between the layers
  const auto shape = [&](std::int64_t channels) {
    Shape maps = one.maps(channels);
    if (dim >= 0) maps[dim] = here.size;
    return maps;
  };
  const auto part = [&](const Floats& v, std::int64_t channels) {
    return dim < 0 ? v : slice(v, one.maps(channels), dim, here);
  };
  const auto own_channels = [&](const Floats& v) { return slice(v, one.maps(s.hidden), 1, own); };
  const Shape of_x = shape(s.in), of_h = one.maps(own.size), of_y = shape(s.out), of_w1{own.size, s.in, 1, 1},
              of_w2{s.out, own.size, 1, 1};
  In x = as<T>(part(one.x, s.in)), dy = as<T>(part(one.dy, s.out)),
     w1 = as<T>(slice(one.w1, {s.hidden, s.in}, 0, own)),
     w2 = as<T>(slice(one.w2, {s.out, s.hidden}, 1, own));
  Out b1 = as<W>(slice(one.b1, {s.hidden}, 0, own)), b2 = as<W>(one.b2);
  Out h(static_cast<std::size_t>(of_h.count()), W(3.0f)), y(dy.size(), W(3.0f));
  const ColumnOptions column{.sequence_dim = dim};
  const RowOptions row{.sequence_dim = dim};
  column_conv2d_forward(compute, axes, shaped(x, of_x), shaped(w1, of_w1), shaped(b1, {own.size}),
                        shaped(h, of_h), column);
  EXPECT_EQ(as<float>(h), own_channels(one.h));
  In h_in = as<T>(h);
  row_conv2d_forward(compute, axes, shaped(h_in, of_h), shaped(w2, of_w2), shaped(b2, {s.out}),
                     shaped(y, of_y), row);
  EXPECT_EQ(as<float>(y), part(one.y, s.out)) << "the bias counts once";

  const W before(accumulate ? 1.0f : 3.0f);
  Out dh(h.size(), W(3.0f)), dx(x.size(), W(3.0f)), dw2(w2.size(), before), db2(b2.size(), before),
      dw1(w1.size(), before), db1(b1.size(), before);
  row_conv2d_backward(compute, axes, shaped(dy, of_y), shaped(h_in, of_h), shaped(w2, of_w2),
                      {shaped(dh, of_h), shaped(dw2, of_w2), shaped(db2, {s.out}), accumulate}, row);
  In dh_in = as<T>(dh);
  column_conv2d_backward(compute, axes, shaped(dh_in, of_h), shaped(x, of_x), shaped(w1, of_w1),
                         {shaped(dx, of_x), shaped(dw1, of_w1), shaped(db1, {own.size}), accumulate}, column);
  const auto plus = [&](Floats v) {
    if (accumulate)
      for (float& f : v) f += 1;
    return v;
  };
  EXPECT_EQ(as<float>(dh), own_channels(one.dh));
  EXPECT_EQ(as<float>(dx), part(one.dx, s.in));
  EXPECT_EQ(as<float>(dw2), plus(slice(one.dw2, {s.out, s.hidden}, 1, own)));
  EXPECT_EQ(as<float>(db2), plus(one.db2)) << "is not scaled by the number of ranks";
  EXPECT_EQ(as<float>(dw1), plus(slice(one.dw1, {s.hidden, s.in}, 0, own)));
  EXPECT_EQ(as<float>(db1), plus(slice(one.db1, {s.hidden}, 0, own)));
}

// 6 pixels and 28 pixels, for which bf16 has two ways. Over 4 ranks 7 channels are 2, 2, 2 and 1, and of 2
// channels some ranks have none.
const Sizes kSizes[] = {{2, 5, 7, 3, 2, 3}, {1, 3, 8, 5, 4, 7}, {3, 2, 2, 1, 1, 5}};

TEST(ConvViews, ColumnAndRowEqualSerial) {
  for (const Sizes& sizes : kSizes) {
    const Serial one(sizes, 4), small(sizes, 1);
    ASSERT_LT(small.largest_of_all(), 255) << "is no whole number that bf16 has";
    for (const int ranks : {1, 2, 3, 4})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        for (const int threads : {1, 2})
          for (const bool accumulate : {false, true}) {
            Compute compute(rank.context, threads);
            expect_serial<float, float>(one, rank, compute, mesh["tp"], -1, {}, accumulate);
            expect_serial<bf16, float>(small, rank, compute, mesh["tp"], -1, {}, accumulate);
            expect_serial<bf16, bf16>(small, rank, compute, mesh["tp"], -1, {}, accumulate);
          }
      });
  }
}

// Samples, rows or columns of the maps. Over 4 ranks some have one more than others, or none.
TEST(ConvViews, MapsThatAreDividedBetweenPairsEqualSerial) {
  for (const Sizes& sizes : kSizes) {
    const Serial one(sizes, 4), small(sizes, 1);
    for (const int ranks : {1, 2, 4})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context, 2);
        for (const int dim : {0, 2, 3})
          for (const bool accumulate : {false, true}) {
            const Part here = cut(one.maps(1)[dim], rank.size, rank.rank);
            expect_serial<float, float>(one, rank, compute, mesh["tp"], dim, here, accumulate);
            expect_serial<bf16, float>(small, rank, compute, mesh["tp"], dim, here, accumulate);
            expect_serial<bf16, bf16>(small, rank, compute, mesh["tp"], dim, here, accumulate);
          }
      });
  }
}

TEST(ConvViews, AnAxisMayBeSeveral) {
  const Serial one(kSizes[0], 4);
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"kv", 2}, {"rep", 2}});
    Compute compute(rank.context);
    expect_serial<float, float>(one, rank, compute, mesh[{"kv", "rep"}], -1, {}, false);
  });
}

// A weight of so many elements that its gradient is made by the other kernel.
TEST(ConvViews, ManyChannels) {
  const Serial one({1, 140, 520, 130, 2, 2}, 1);
  ASSERT_LT(one.largest_of_all(), 1 << 24) << "is no whole number that f32 has";
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
    Compute compute(rank.context);
    expect_serial<float, float>(one, rank, compute, mesh["tp"], -1, {}, true);
  });
}

// Channels over the ranks, also uneven, and more ranks than channels.
TEST(ConvViews, AGatheredOutputEqualsSerial) {
  for (const Sizes& sizes : kSizes) {
    const Serial one(sizes, 4);
    for (const int ranks : {1, 2, 3, 4})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context);
        const Part own = cut(sizes.hidden, rank.size, rank.rank);
        Floats w = slice(one.w1, {sizes.hidden, sizes.in}, 0, own), b = slice(one.b1, {sizes.hidden}, 0, own),
               dh = one.dh;
        for (const int dim : {-1, 2}) {
          const Part here = dim < 0 ? Part{0, sizes.height} : cut(sizes.height, rank.size, rank.rank);
          Floats x = slice(one.x, one.maps(sizes.in), 2, here), y(one.h.size(), 3), dx(x.size(), 3),
                 dw(w.size(), 3), db(b.size(), 3);
          const Shape of_x{sizes.batch, sizes.in, here.size, sizes.width}, of_w{own.size, sizes.in, 1, 1},
              of_y = one.maps(sizes.hidden);
          const ColumnOptions how{.gather_output = true, .sequence_dim = dim};
          column_conv2d_forward(compute, mesh["tp"], shaped(x, of_x), shaped(w, of_w), shaped(b, {own.size}),
                                shaped(y, of_y), how);
          EXPECT_EQ(y, one.h);
          column_conv2d_backward(compute, mesh["tp"], shaped(dh, of_y), shaped(x, of_x), shaped(w, of_w),
                                 {shaped(dx, of_x), shaped(dw, of_w), shaped(db, {own.size})}, how);
          EXPECT_EQ(dx, slice(one.dx, one.maps(sizes.in), 2, here));
          EXPECT_EQ(dw, slice(one.dw1, {sizes.hidden, sizes.in}, 0, own));
          EXPECT_EQ(db, slice(one.db1, {sizes.hidden}, 0, own));
        }
      });
  }
}

TEST(ConvViews, WithoutBiasOrGradientsThatNobodyWants) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 1}}, 0);
  Floats x = {1, 2, 3, 4}, w = {3, 5}, y(2), dy = {2, 1}, dw(2), none;
  const Shape of_x{1, 2, 1, 2}, of_w{1, 2, 1, 1}, of_y{1, 1, 1, 2};
  column_conv2d_forward(compute, shaped(x, of_x), shaped(w, of_w), {}, shaped(y, of_y));
  EXPECT_EQ(y, (Floats{18, 26}));
  y = {0, 0};
  row_conv2d_forward(compute, mesh["tp"], shaped(x, of_x), shaped(w, of_w), {}, shaped(y, of_y));
  EXPECT_EQ(y, (Floats{18, 26}));
  row_conv2d_backward(compute, shaped(dy, of_y), shaped(x, of_x), shaped(w, of_w), {.dw = shaped(dw, of_w)});
  EXPECT_EQ(dw, (Floats{4, 10}));
  column_conv2d_forward(compute, shaped(none, {0, 2, 1, 2}), shaped(w, of_w), {}, shaped(none, {0, 1, 1, 2}));
  column_conv2d_backward(compute, mesh["tp"], shaped(none, {0, 1, 1, 2}), shaped(none, {0, 2, 1, 2}),
                         shaped(w, of_w), {.dw = shaped(dw, of_w)});
  EXPECT_EQ(dw, (Floats{0, 0}));
}

// The functions and the modules have the same kernels, and send the same.
TEST(ConvViews, TheBitsOfTheModules) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context, 2);
    const auto random = [&](const Shape& shape, const char* name) {
      Tensor t(rank.context, shape);
      RandomStream(5, name).normal(0, t.count(), t.f32().data());
      return t;
    };
    const auto floats = [](const Tensor& t) { return Floats(t.f32().begin(), t.f32().end()); };
    Sequential pair;
    pair.append(std::make_unique<Conv2d>(Conv2dConfig{.in = 24, .out = 40, .init = Normal{0.3}}));
    pair.append(std::make_unique<Conv2d>(Conv2dConfig{.in = 40, .out = 16, .init = Normal{0.3}}));
    parallelize(pair, mesh["tp"], Plan{{"0", Style::column}, {"1", Style::row}});
    replicate(pair, mesh);
    materialise(pair, compute);
    initialise(pair, 3);
    const Tensor x = random({2, 24, 11, 13}, "x"), dy = random({2, 16, 11, 13}, "dy");
    const auto whole = [&](const Tensor& t) { return t.with_layout(replicated_layout(mesh, t.shape())); };
    Frame frame(compute);
    const Tensor y_of_module = pair.forward(whole(x), frame)[0],
                 dx_of_module = pair.backward(whole(dy), frame)[0];
    const auto weight = [&](const char* path) { return pair.parameter(path)->weight(); };
    const Tensor h(rank.context, {2, 20, 11, 13}), y(rank.context, {2, 16, 11, 13}),
        dh(rank.context, h.shape()), dx(rank.context, x.shape()), dw1(rank.context, {20, 24, 1, 1}),
        db1(rank.context, {20}), dw2(rank.context, {16, 20, 1, 1}), db2(rank.context, {16});
    column_conv2d_forward(compute, x, weight("0.weight"), weight("0.bias"), h);
    row_conv2d_forward(compute, mesh["tp"], h, weight("1.weight"), weight("1.bias"), y);
    row_conv2d_backward(compute, dy, h, weight("1.weight"), {dh, dw2, db2});
    column_conv2d_backward(compute, mesh["tp"], dh, x, weight("0.weight"), {dx, dw1, db1});
    EXPECT_EQ(floats(y), floats(y_of_module));
    EXPECT_EQ(floats(dx), floats(dx_of_module));
    for (const auto& [path, gradient] : {std::pair<const char*, const Tensor&>{"0.weight", dw1},
                                         {"0.bias", db1},
                                         {"1.weight", dw2},
                                         {"1.bias", db2}})
      EXPECT_EQ(floats(gradient), floats(pair.parameter(path)->gradient())) << path;
  });
}

// ---- Errors ----

TEST(ConvViews, WhatDoesNotFitIsNamed) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 1}}, 0);
  Floats x(2 * 3 * 2 * 2), w(2 * 3 * 9), y(2 * 2 * 2 * 2, 7), b(3), dx(x.size()), dw(w.size());
  const Shape of_x{2, 3, 2, 2}, of_w{2, 3, 1, 1}, of_y{2, 2, 2, 2};
  const TensorView good_x = shaped(x, of_x), good_w = shaped(w, of_w), good_y = shaped(y, of_y);
  const auto text = [&](const TensorView& x_view, const TensorView& w_view, const TensorView& b_view,
                        const TensorView& y_view) {
    const Error e =
        error_of([&] { row_conv2d_forward(compute, mesh["tp"], x_view, w_view, b_view, y_view); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return std::string(e.what());
  };
  EXPECT_EQ(text(shaped(x, {2, 12}), good_w, {}, good_y),
            "row_conv2d_forward: x is (2, 12); expected (batch, in, height, width)");
  EXPECT_EQ(text(good_x, shaped(w, {2, 3}), {}, good_y),
            "row_conv2d_forward: w is (2, 3); expected (out, in, 1, 1): a 1x1 convolution");
  EXPECT_EQ(text(good_x, shaped(w, {2, 3, 3, 3}), {}, good_y),
            "row_conv2d_forward: w is (2, 3, 3, 3); expected (out, in, 1, 1): a 1x1 convolution");
  EXPECT_EQ(text(good_x, shaped(w, {2, 3, 1, 3}), {}, good_y),
            "row_conv2d_forward: w is (2, 3, 1, 3); expected (out, in, 1, 1): a 1x1 convolution");
  EXPECT_EQ(text(good_x, shaped(w, {2, 4, 1, 1}), {}, good_y),
            "row_conv2d_forward: w is (2, 4, 1, 1); expected (2, 3, 1, 1), from x (2, 3, 2, 2)");
  const std::string from = ", from x (2, 3, 2, 2) and w (2, 3, 1, 1)";
  EXPECT_EQ(text(good_x, good_w, {}, shaped(y, {2, 2, 4})),
            "row_conv2d_forward: y is (2, 2, 4); expected (2, 2, 2, 2)" + from);
  EXPECT_EQ(text(good_x, good_w, {}, shaped(y, {2, 2, 2, 1})),
            "row_conv2d_forward: y is (2, 2, 2, 1); expected (2, 2, 2, 2)" + from);
  EXPECT_EQ(text(good_x, good_w, shaped(b, {3}), good_y),
            "row_conv2d_forward: b is (3); expected (2)" + from);
  const auto changed = [](TensorView v, DType dtype) {
    v.dtype = dtype;
    return v;
  };
  EXPECT_EQ(text(changed(good_x, DType::f64), good_w, {}, good_y),
            "row_conv2d_forward: x is f64; expected f32 or bf16");
  EXPECT_EQ(text(good_x, changed(good_w, DType::bf16), {}, good_y),
            "row_conv2d_forward: w is bf16; expected f32, as x");
  EXPECT_EQ(text(good_x, good_w, {}, changed(good_y, DType::bf16)),
            "row_conv2d_forward: y is bf16; expected f32");
  EXPECT_EQ(text(changed(good_x, DType::bf16), changed(good_w, DType::bf16), {}, changed(good_y, DType::f64)),
            "row_conv2d_forward: y is f64; expected f32, or bf16 as x");
  TensorView wrong = good_x;
  wrong.strides = {12, 1, 6, 3};  // channels last, as other programs have maps
  EXPECT_EQ(text(wrong, good_w, {}, good_y),
            "row_conv2d_forward: x is not contiguous; copy it into a contiguous buffer");
  wrong = good_x;
  wrong.data = nullptr;
  EXPECT_EQ(text(wrong, good_w, {}, good_y), "row_conv2d_forward: x has no memory");
  wrong = good_x;
  wrong.device = {DeviceKind::cuda, 0};
  EXPECT_EQ(text(wrong, good_w, {}, good_y),
            "row_conv2d_forward: x is on cuda:0; expected cpu, the device of the Compute");
  wrong = good_y;
  wrong.data = good_x.data;
  EXPECT_EQ(text(good_x, good_w, {}, wrong), "row_conv2d_forward: y overlaps x; expected memory of its own");
  EXPECT_EQ(y, Floats(y.size(), 7));

  const auto backward = [&](const TensorView& dy, const LinearGradients& g) {
    const std::string row = error_of([&] { row_conv2d_backward(compute, dy, good_x, good_w, g); }).what();
    const std::string column =
        error_of([&] { column_conv2d_backward(compute, mesh["tp"], dy, good_x, good_w, g); }).what();
    EXPECT_EQ(column, "column" + row.substr(3));
    return row;
  };
  EXPECT_EQ(backward(shaped(y, {2, 2, 1, 2}), {}),
            "row_conv2d_backward: dy is (2, 2, 1, 2); expected (2, 2, 2, 2)" + from);
  EXPECT_EQ(backward(good_y, {.dx = shaped(dx, {2, 3, 4})}),
            "row_conv2d_backward: dx is (2, 3, 4); expected (2, 3, 2, 2)" + from);
  EXPECT_EQ(backward(good_y, {.dw = shaped(dw, {2, 3})}),
            "row_conv2d_backward: dw is (2, 3); expected (2, 3, 1, 1)" + from);
  EXPECT_EQ(backward(good_y, {.db = shaped(b, {3})}), "row_conv2d_backward: db is (3); expected (2)" + from);
  EXPECT_EQ(backward(good_y, {.dx = good_x}),
            "row_conv2d_backward: dx overlaps x; expected memory of its own");
}

TEST(ConvViews, WhatDoesNotFitOptionsIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    Floats x(60), w(6), y(60, 7);
    const auto column = [&](const Shape& of_x, const Shape& of_w, const Shape& of_y,
                            const ColumnOptions& how) {
      return std::string(error_of([&] {
                           column_conv2d_forward(compute, mesh["tp"], shaped(x, of_x), shaped(w, of_w), {},
                                                 shaped(y, of_y), how);
                         }).what());
    };
    const std::string here = fmt::format("what rank {} of 2 has", rank.rank);
    EXPECT_EQ(column({2, 3, 4, 2}, {2, 3, 1, 1}, {2, 2, 5, 2}, {.sequence_dim = 2}),
              fmt::format("column_conv2d_forward: x is (2, 3, 4, 2); expected (2, 3, {}, 2), {} of the "
                          "sequence of y (2, 2, 5, 2)",
                          rank.rank == 0 ? 3 : 2, here));
    for (const int dim : {-2, 1, 4})
      EXPECT_EQ(
          column({2, 3, 4, 2}, {2, 3, 1, 1}, {2, 2, 5, 2}, {.sequence_dim = dim}),
          fmt::format("column_conv2d_forward: sequence_dim is {}; expected 0, 2 or 3, as y is (2, 2, 5, "
                      "2), or -1: none",
                      dim));
    EXPECT_EQ(column({2, 3, 4, 2}, {2, 3, 1, 1}, {4, 5}, {.sequence_dim = 2}),
              "column_conv2d_forward: y is (4, 5); expected (batch, out, height, width)");
    EXPECT_EQ(column({2, 12}, {2, 3, 1, 1}, {2, 2, 5, 2}, {.sequence_dim = 2}),
              "column_conv2d_forward: x is (2, 12); expected 4 dimensions, as y (2, 2, 5, 2) has");
    EXPECT_EQ(
        column({2, 3, 2, 2}, {2, 3, 1, 1}, {2, 6, 2, 2}, {.gather_output = true}),
        fmt::format(
            "column_conv2d_forward: w is (2, 3, 1, 1); expected (3, 3, 1, 1), {} of the 6 channels of y",
            here));
    EXPECT_EQ(y, Floats(60, 7));
  });
}

}  // namespace
}  // namespace weft::conv_test
