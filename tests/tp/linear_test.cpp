// Column and row layers on plain vectors: the sum of the ranks' results is the result of one rank.
#include "weft/tp/linear.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <numeric>

#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"

namespace weft::linear_test {
namespace {

using test::error_of;
using test::Rank;
using test::Ranks;
using Floats = std::vector<float>;

// Small whole numbers, up to `largest`, whose products and sums are exact in f32 whatever their order.
float number(int tensor, std::int64_t i, int largest) {
  return static_cast<float>((i * 7 + tensor * 3) % (2 * largest + 1) - largest);
}

TensorView shaped(Floats& v, const Shape& shape) {
  return {reinterpret_cast<std::byte*>(v.data()), DType::f32, {}, shape, row_major(shape)};
}

constexpr std::int64_t kTokens = 6, kIn = 12, kHidden = 24, kOut = 8;

// x → column → row → y on one rank; every tensor by plain loops.
struct Serial {
  explicit Serial(int largest_in = 5) : largest(largest_in) {}
  int largest;
  Floats x = make(0, kTokens*kIn), w1 = make(1, kHidden*kIn), b1 = make(2, kHidden),
         w2 = make(3, kOut*kHidden), b2 = make(4, kOut), dy = make(5, kTokens*kOut);
  Floats h = times(x, w1, b1, kTokens, kIn, kHidden), y = times(h, w2, b2, kTokens, kHidden, kOut);
  Floats dh = back(dy, w2, kTokens, kOut, kHidden), dx = back(dh, w1, kTokens, kHidden, kIn);
  Floats dw2 = outer(dy, h, kTokens, kOut, kHidden), dw1 = outer(dh, x, kTokens, kHidden, kIn);
  Floats db2 = sum_rows(dy, kTokens, kOut), db1 = sum_rows(dh, kTokens, kHidden);

  Floats make(int tensor, std::int64_t n) const {
    Floats v(static_cast<std::size_t>(n));
    for (std::size_t i = 0; i < v.size(); ++i) v[i] = number(tensor, static_cast<std::int64_t>(i), largest);
    return v;
  }
  static std::size_t at(std::int64_t row, std::int64_t column, std::int64_t columns) {
    return static_cast<std::size_t>(row * columns + column);
  }
  static Floats times(const Floats& x, const Floats& w, const Floats& b, std::int64_t n, std::int64_t in,
                      std::int64_t out) {
    Floats y(static_cast<std::size_t>(n * out));
    for (std::int64_t t = 0; t < n; ++t)
      for (std::int64_t o = 0; o < out; ++o) {
        y[at(t, o, out)] = b[static_cast<std::size_t>(o)];
        for (std::int64_t i = 0; i < in; ++i) y[at(t, o, out)] += x[at(t, i, in)] * w[at(o, i, in)];
      }
    return y;
  }
  static Floats back(const Floats& dy, const Floats& w, std::int64_t n, std::int64_t out, std::int64_t in) {
    Floats dx(static_cast<std::size_t>(n * in));
    for (std::int64_t t = 0; t < n; ++t)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t i = 0; i < in; ++i) dx[at(t, i, in)] += dy[at(t, o, out)] * w[at(o, i, in)];
    return dx;
  }
  static Floats outer(const Floats& dy, const Floats& x, std::int64_t n, std::int64_t out, std::int64_t in) {
    Floats dw(static_cast<std::size_t>(out * in));
    for (std::int64_t t = 0; t < n; ++t)
      for (std::int64_t o = 0; o < out; ++o)
        for (std::int64_t i = 0; i < in; ++i) dw[at(o, i, in)] += dy[at(t, o, out)] * x[at(t, i, in)];
    return dw;
  }
  static Floats sum_rows(const Floats& dy, std::int64_t n, std::int64_t out) {
    Floats db(static_cast<std::size_t>(out));
    for (std::int64_t t = 0; t < n; ++t)
      for (std::int64_t o = 0; o < out; ++o) db[static_cast<std::size_t>(o)] += dy[at(t, o, out)];
    return db;
  }
  // Columns [begin, begin + size) of a matrix.
  static Floats columns(const Floats& m, std::int64_t row_count, std::int64_t begin, std::int64_t size) {
    const std::int64_t width = static_cast<std::int64_t>(m.size()) / row_count;
    Floats part;
    for (std::int64_t r = 0; r < row_count; ++r)
      part.insert(part.end(), m.begin() + r * width + begin, m.begin() + r * width + begin + size);
    return part;
  }
  static Floats rows(const Floats& m, std::int64_t width, std::int64_t begin, std::int64_t size) {
    return {m.begin() + begin * width, m.begin() + (begin + size) * width};
  }
};

template <class To, class From>
std::vector<To> as(const std::vector<From>& v) {
  std::vector<To> to;
  for (const From& e : v) to.push_back(To(static_cast<float>(e)));
  return to;
}

// x, w and dy of type T; what is written, and the biases, of type W.
template <class T, class W>
void expect_serial(const Serial& one, Rank& rank, bool accumulate) {
  using In = std::vector<T>;
  using Out = std::vector<W>;
  DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
  Compute compute(rank.context, 2);
  const std::int64_t part = kHidden / rank.size, begin = part * rank.rank;
  In x = as<T>(one.x), dy = as<T>(one.dy), w1 = as<T>(Serial::rows(one.w1, kIn, begin, part)),
     w2 = as<T>(Serial::columns(one.w2, kOut, begin, part));
  Out b1 = as<W>(Serial::rows(one.b1, 1, begin, part)), b2 = as<W>(one.b2);
  const Shape of_x{2, 3, kIn}, of_h{2, 3, part}, of_y{2, 3, kOut};
  Out h(static_cast<std::size_t>(kTokens * part)), y(one.y.size());
  column_linear_forward(compute, view(x.data(), of_x), view(w1.data(), {part, kIn}), view(b1),
                        view(h.data(), of_h));
  EXPECT_EQ(as<float>(h), Serial::columns(one.h, kTokens, begin, part));
  In h_in = as<T>(h);
  row_linear_forward(compute, mesh["tp"], view(h_in.data(), of_h), view(w2.data(), {kOut, part}), view(b2),
                     view(y.data(), of_y));
  EXPECT_EQ(as<float>(y), one.y);

  const W before(accumulate ? 1.0f : 3.0f);
  Out dh(h.size()), dx(x.size()), dw2(w2.size(), before), db2(b2.size(), before), dw1(w1.size(), before),
      db1(b1.size(), before);
  row_linear_backward(
      compute, view(dy.data(), of_y), view(h_in.data(), of_h), view(w2.data(), {kOut, part}),
      {view(dh.data(), of_h), view(dw2.data(), {kOut, part}), view(db2.data(), {kOut}), accumulate});
  In dh_in = as<T>(dh);
  column_linear_backward(
      compute, mesh["tp"], view(dh_in.data(), of_h), view(x.data(), of_x), view(w1.data(), {part, kIn}),
      {view(dx.data(), of_x), view(dw1.data(), {part, kIn}), view(db1.data(), {part}), accumulate});
  const auto plus = [&](Floats v) {
    if (accumulate)
      for (float& f : v) f += 1;
    return v;
  };
  EXPECT_EQ(as<float>(dh), Serial::columns(one.dh, kTokens, begin, part));
  EXPECT_EQ(as<float>(dx), one.dx);
  EXPECT_EQ(as<float>(dw2), plus(Serial::columns(one.dw2, kOut, begin, part)));
  EXPECT_EQ(as<float>(db2), plus(one.db2)) << "is not scaled by the number of ranks";
  EXPECT_EQ(as<float>(dw1), plus(Serial::rows(one.dw1, kIn, begin, part)));
  EXPECT_EQ(as<float>(db1), plus(Serial::rows(one.db1, 1, begin, part)));
}

TEST(LinearViews, ColumnAndRowEqualSerial) {
  const Serial one, small(1);
  for (const Floats& all : {small.h, small.y, small.dh, small.dx, small.dw1, small.dw2, small.db1, small.db2})
    for (const float v : all) ASSERT_LT(std::abs(v), 255) << "is no whole number that bf16 has";
  for (const int ranks : {1, 2, 3, 4})
    for (const bool accumulate : {false, true})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        expect_serial<float, float>(one, rank, accumulate);
        expect_serial<bf16, float>(small, rank, accumulate);
        expect_serial<bf16, bf16>(small, rank, accumulate);
      });
}

// ---- gathered output, divided sequence ----

struct Extent {
  std::int64_t begin, size;
};
Extent cut(std::int64_t size, int ranks, int rank) {
  const std::int64_t each = size / ranks, more = size % ranks;
  return {each * rank + std::min<std::int64_t>(rank, more), each + (rank < more ? 1 : 0)};
}
Extent cut(std::int64_t size, const Rank& rank) { return cut(size, rank.size, rank.rank); }

// The part of (batch, sequence, width) that has the positions of `c`.
Floats positions(const Floats& v, std::int64_t batch, std::int64_t width, const Extent& c) {
  const std::int64_t sequence = static_cast<std::int64_t>(v.size()) / batch / width;
  Floats part;
  for (std::int64_t b = 0; b < batch; ++b)
    part.insert(part.end(), v.begin() + (b * sequence + c.begin) * width,
                v.begin() + (b * sequence + c.begin + c.size) * width);
  return part;
}

// x → column → row → y as expect_serial(), with x, dx, y and dy divided along the sequence of (batch, kTokens
// / batch, …).
template <class T, class W>
void expect_serial_divided(const Serial& one, Rank& rank, const DeviceMesh& axes, const Extent& here,
                           std::int64_t batch, bool accumulate) {
  using In = std::vector<T>;
  using Out = std::vector<W>;
  Compute compute(rank.context, 2);
  const std::int64_t sequence = kTokens / batch;
  const Extent features = cut(kHidden, rank);
  const std::int64_t part = features.size, begin = features.begin;
  In x = as<T>(positions(one.x, batch, kIn, here)), dy = as<T>(positions(one.dy, batch, kOut, here)),
     w1 = as<T>(Serial::rows(one.w1, kIn, begin, part)),
     w2 = as<T>(Serial::columns(one.w2, kOut, begin, part));
  Out b1 = as<W>(Serial::rows(one.b1, 1, begin, part)), b2 = as<W>(one.b2);
  const Shape of_x{batch, here.size, kIn}, of_h{batch, sequence, part}, of_y{batch, here.size, kOut};
  Out h(static_cast<std::size_t>(kTokens * part)), y(dy.size());
  column_linear_forward(compute, axes, view(x.data(), of_x), view(w1.data(), {part, kIn}), view(b1),
                        view(h.data(), of_h), {.sequence_dim = 1});
  EXPECT_EQ(as<float>(h), Serial::columns(one.h, kTokens, begin, part));
  In h_in = as<T>(h);
  row_linear_forward(compute, axes, view(h_in.data(), of_h), view(w2.data(), {kOut, part}), view(b2),
                     view(y.data(), of_y), {.sequence_dim = 1});
  EXPECT_EQ(as<float>(y), positions(one.y, batch, kOut, here));

  const W before(accumulate ? 1.0f : 3.0f);
  Out dh(h.size()), dx(x.size()), dw2(w2.size(), before), db2(b2.size(), before), dw1(w1.size(), before),
      db1(b1.size(), before);
  row_linear_backward(
      compute, axes, view(dy.data(), of_y), view(h_in.data(), of_h), view(w2.data(), {kOut, part}),
      {view(dh.data(), of_h), view(dw2.data(), {kOut, part}), view(db2.data(), {kOut}), accumulate},
      {.sequence_dim = 1});
  In dh_in = as<T>(dh);
  column_linear_backward(
      compute, axes, view(dh_in.data(), of_h), view(x.data(), of_x), view(w1.data(), {part, kIn}),
      {view(dx.data(), of_x), view(dw1.data(), {part, kIn}), view(db1.data(), {part}), accumulate},
      {.sequence_dim = 1});
  const auto plus = [&](Floats v) {
    if (accumulate)
      for (float& f : v) f += 1;
    return v;
  };
  EXPECT_EQ(as<float>(dh), Serial::columns(one.dh, kTokens, begin, part));
  EXPECT_EQ(as<float>(dx), positions(one.dx, batch, kIn, here));
  EXPECT_EQ(as<float>(dw2), plus(Serial::columns(one.dw2, kOut, begin, part)));
  EXPECT_EQ(as<float>(db2), plus(one.db2)) << "is the sum over the whole sequence, once";
  EXPECT_EQ(as<float>(dw1), plus(Serial::rows(one.dw1, kIn, begin, part)));
  EXPECT_EQ(as<float>(db1), plus(Serial::rows(one.db1, 1, begin, part)));
}

// Sequences of 6, 3 and 1 positions. Over 4 ranks some have one more than others, or none.
TEST(LinearViews, ADividedSequenceEqualsSerial) {
  const Serial one, small(1);
  for (const int ranks : {1, 2, 3, 4})
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
      for (const std::int64_t batch : {1, 2, 6})
        for (const bool accumulate : {false, true}) {
          const Extent here = cut(kTokens / batch, rank);
          expect_serial_divided<float, float>(one, rank, mesh["tp"], here, batch, accumulate);
          expect_serial_divided<bf16, float>(small, rank, mesh["tp"], here, batch, accumulate);
          expect_serial_divided<bf16, bf16>(small, rank, mesh["tp"], here, batch, accumulate);
        }
    });
}

TEST(LinearViews, ASequenceIsDividedOverSeveralAxesInTheirOrder) {
  const Serial one;
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"kv", 2}, {"rep", 2}});
    // 6 positions are 3 + 3, then 2 + 1 and 2 + 1.
    const Extent outer = cut(kTokens, 2, rank.rank / 2), inner = cut(outer.size, 2, rank.rank % 2);
    expect_serial_divided<float, float>(one, rank, mesh[{"kv", "rep"}],
                                        {outer.begin + inner.begin, inner.size}, 1, false);
  });
}

// kOut features over the ranks, also uneven, and more ranks than features.
TEST(LinearViews, AGatheredOutputEqualsSerial) {
  const Serial one;
  for (const std::int64_t out : {std::int64_t{8}, std::int64_t{7}, std::int64_t{2}})
    for (const int ranks : {1, 2, 3, 4})
      test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", rank.size}});
        Compute compute(rank.context);
        const Extent own = cut(out, rank);
        Floats all_w = one.make(7, out * kIn), all_b = one.make(8, out), dy = one.make(9, kTokens * out);
        Floats x = one.x, w = Serial::rows(all_w, kIn, own.begin, own.size),
               b = Serial::rows(all_b, 1, own.begin, own.size);
        Floats y(dy.size(), 3), dx(x.size(), 3), dw(w.size(), 3), db(b.size(), 3);
        const Shape of_w{own.size, kIn};
        for (const int sequence_dim : {-1, 0}) {
          const Extent here = sequence_dim == 0 ? cut(kTokens, rank) : Extent{0, kTokens};
          const ColumnOptions how{.gather_output = true, .sequence_dim = sequence_dim};
          Floats own_x = Serial::rows(x, kIn, here.begin, here.size), own_dx(own_x.size(), 3);
          const Shape of_x{here.size, kIn};
          column_linear_forward(compute, mesh["tp"], shaped(own_x, of_x), shaped(w, of_w),
                                shaped(b, {own.size}), shaped(y, {kTokens, out}), how);
          EXPECT_EQ(y, Serial::times(x, all_w, all_b, kTokens, kIn, out));
          column_linear_backward(
              compute, mesh["tp"], shaped(dy, {kTokens, out}), shaped(own_x, of_x), shaped(w, of_w),
              {shaped(own_dx, of_x), shaped(dw, of_w), shaped(db, {own.size}), false}, how);
          EXPECT_EQ(own_dx,
                    Serial::rows(Serial::back(dy, all_w, kTokens, out, kIn), kIn, here.begin, here.size));
          EXPECT_EQ(dw, Serial::rows(Serial::outer(dy, x, kTokens, out, kIn), kIn, own.begin, own.size));
          EXPECT_EQ(db, Serial::rows(Serial::sum_rows(dy, kTokens, out), 1, own.begin, own.size));
        }
      });
}

TEST(LinearViews, WhatDoesNotFitADividedSequenceIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    Floats x(30), w(6), y(30, 7);
    const std::string here = fmt::format("rank {} of 2", rank.rank);
    const auto column = [&](const Shape& of_x, const Shape& of_w, const Shape& of_y,
                            const ColumnOptions& how) {
      return std::string(error_of([&] {
                           column_linear_forward(compute, mesh["tp"], shaped(x, of_x), shaped(w, of_w), {},
                                                 shaped(y, of_y), how);
                         }).what());
    };
    const auto row = [&](const Shape& of_x, const Shape& of_y, int dim) {
      return std::string(error_of([&] {
                           row_linear_forward(compute, mesh["tp"], shaped(x, of_x), shaped(w, {2, 3}), {},
                                              shaped(y, of_y), {.sequence_dim = dim});
                         }).what());
    };
    const std::int64_t own = rank.rank == 0 ? 3 : 2;
    EXPECT_EQ(column({4, 3}, {2, 3}, {5, 2}, {.sequence_dim = 0}),
              fmt::format("column_linear_forward: x is (4, 3); expected ({}, 3), what {} has of the sequence "
                          "of y (5, 2)",
                          own, here));
    EXPECT_EQ(row({5, 3}, {4, 2}, 0),
              fmt::format("row_linear_forward: y is (4, 2); expected ({}, 2), what {} has of the sequence of "
                          "x (5, 3)",
                          own, here));
    EXPECT_EQ(row({5, 3}, {5, 1, 2}, 0),
              "row_linear_forward: y is (5, 1, 2); expected 2 dimensions, as x (5, 3) has");
    EXPECT_EQ(row({5, 3}, {3, 2}, 1),
              "row_linear_forward: sequence_dim is 1; expected 0 to 0, as x is (5, 3), or -1: none");
    EXPECT_EQ(row({5, 3}, {3, 2}, -2),
              "row_linear_forward: sequence_dim is -2; expected 0 to 0, as x is (5, 3), or -1: none");
    EXPECT_EQ(row({3}, {2}, 0),
              "row_linear_forward: sequence_dim is 0, and x is (3); expected two dimensions or more");
    EXPECT_EQ(
        column({2, 3}, {2, 3}, {2, 6}, {.gather_output = true}),
        fmt::format("column_linear_forward: w is (2, 3); expected (3, 3), what {} has of the 6 features "
                    "of y",
                    here));
    EXPECT_EQ(y, Floats(30, 7));
  });
}

TEST(LinearViews, WithoutBiasOrGradientsThatNobodyWants) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 1}}, 0);
  Floats x = {1, 2}, w = {3, 4}, y(1), dy = {2}, dw(2);
  row_linear_forward(compute, mesh["tp"], shaped(x, {1, 2}), shaped(w, {1, 2}), {}, shaped(y, {1, 1}));
  EXPECT_EQ(y[0], 11);
  row_linear_backward(compute, shaped(dy, {1, 1}), shaped(x, {1, 2}), shaped(w, {1, 2}),
                      {.dw = shaped(dw, {1, 2})});
  EXPECT_EQ(dw, (Floats{2, 4}));
  Floats none, no_rows;
  column_linear_forward(compute, shaped(none, {0, 2}), shaped(w, {1, 2}), {}, shaped(no_rows, {0, 1}));
}

// A view of no elements may be null on one rank and not on another: all must still take part in the same
// calls.
TEST(LinearViews, RanksAgreeOnAnEmptyGradient) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Compute compute(rank.context);
    Floats w = {1, 2}, dw = {7, 7}, db = {7}, elements(1), none;
    float* const dx = rank.rank == 0 ? none.data() : elements.data();
    column_linear_backward(compute, mesh["tp"], shaped(none, {0, 1}), shaped(none, {0, 2}), shaped(w, {1, 2}),
                           {view(dx, Shape{0, 2}), shaped(dw, {1, 2}), shaped(db, {1})});
    EXPECT_EQ(dw, (Floats{0, 0}));
    EXPECT_EQ(db, (Floats{0}));
    rank.group().barrier().wait();
  });
}

TEST(LinearViews, WhatDoesNotFitIsNamed) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 1}}, 0);
  Floats x(6), w(8), y(4), b(3);
  const auto text = [&](const TensorView& x_view, const TensorView& w_view, const TensorView& b_view,
                        const TensorView& y_view) {
    const Error e =
        error_of([&] { row_linear_forward(compute, mesh["tp"], x_view, w_view, b_view, y_view); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument);
    return std::string(e.what());
  };
  const TensorView good_x = shaped(x, {2, 3}), good_w = shaped(w, {2, 3}), good_y = shaped(y, {2, 2});
  EXPECT_EQ(text(good_x, shaped(w, {2, 4}), {}, good_y),
            "row_linear_forward: w is (2, 4); expected (2, 3), from x (2, 3)");
  EXPECT_EQ(text(good_x, good_w, {}, shaped(y, {4})),
            "row_linear_forward: y is (4); expected (2, 2), from x (2, 3) and w (2, 3)");
  EXPECT_EQ(text(good_x, good_w, shaped(b, {3}), good_y),
            "row_linear_forward: b is (3); expected (2), from x (2, 3) and w (2, 3)");
  EXPECT_EQ(text(good_x, shaped(w, {6}), {}, good_y), "row_linear_forward: w is (6); expected (out, in)");
  TensorView wrong = good_x;
  wrong.dtype = DType::f64;
  EXPECT_EQ(text(wrong, good_w, {}, good_y), "row_linear_forward: x is f64; expected f32 or bf16");
  wrong = good_w;
  wrong.dtype = DType::bf16;
  EXPECT_EQ(text(good_x, wrong, {}, good_y), "row_linear_forward: w is bf16; expected f32, as x");
  wrong = good_y;
  wrong.dtype = DType::bf16;
  EXPECT_EQ(text(good_x, good_w, {}, wrong), "row_linear_forward: y is bf16; expected f32");
  TensorView narrow_x = good_x, narrow_w = good_w;
  narrow_x.dtype = narrow_w.dtype = DType::bf16;
  wrong.dtype = DType::f64;
  EXPECT_EQ(text(narrow_x, narrow_w, {}, wrong), "row_linear_forward: y is f64; expected f32, or bf16 as x");
  wrong = good_x;
  wrong.strides = {1, 2};
  EXPECT_EQ(text(wrong, good_w, {}, good_y),
            "row_linear_forward: x is not contiguous; copy it into a contiguous buffer");
  wrong = good_x;
  wrong.device = {DeviceKind::cuda, 0};
  EXPECT_EQ(text(wrong, good_w, {}, good_y),
            "row_linear_forward: x is on cuda:0; expected cpu, the device of the Compute");
  wrong = good_x;
  wrong.data = nullptr;
  EXPECT_EQ(text(wrong, good_w, {}, good_y), "row_linear_forward: x has no memory");
}

TEST(LinearViews, WhatIsWrittenOverlapsNothing) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 1}}, 0);
  Floats memory[5] = {Floats(16), Floats(16), Floats(16), Floats(16), Floats(20)};
  const Shape square{4, 4};
  const TensorView x = shaped(memory[0], square), w = shaped(memory[1], square),
                   dy = shaped(memory[2], square), out = shaped(memory[3], square),
                   wide = shaped(memory[4], square), four = shaped(memory[4], {4});
  TensorView after = four;
  after.data += 16 * 4;
  const auto text = [&](const LinearGradients& g) {
    const std::string row = error_of([&] { row_linear_backward(compute, dy, x, w, g); }).what();
    const std::string column =
        error_of([&] { column_linear_backward(compute, mesh["tp"], dy, x, w, g); }).what();
    EXPECT_EQ(row.substr(row.find(':')), column.substr(column.find(':')));
    return row;
  };
  EXPECT_EQ(text({.dx = x, .dw = out}), "row_linear_backward: dx overlaps x; expected memory of its own");
  EXPECT_EQ(text({.dx = dy, .dw = out}), "row_linear_backward: dx overlaps dy; expected memory of its own");
  EXPECT_EQ(text({.dx = out, .dw = out}), "row_linear_backward: dx overlaps dw; expected memory of its own");
  EXPECT_EQ(text({.dx = out, .dw = w}), "row_linear_backward: dw overlaps w; expected memory of its own");
  EXPECT_EQ(text({.dw = wide, .db = four}),
            "row_linear_backward: dw overlaps db; expected memory of its own");
  EXPECT_EQ(text({.db = shaped(memory[2], {4})}),
            "row_linear_backward: db overlaps dy; expected memory of its own");
  row_linear_backward(compute, dy, x, w, {.dx = out, .dw = wide, .db = after});  // touch, and do not overlap
  const auto forward = [&](const TensorView& b, const TensorView& y) {
    return std::string(error_of([&] { row_linear_forward(compute, mesh["tp"], x, w, b, y); }).what());
  };
  EXPECT_EQ(forward({}, x), "row_linear_forward: y overlaps x; expected memory of its own");
  EXPECT_EQ(forward(four, wide), "row_linear_forward: y overlaps b; expected memory of its own");
  EXPECT_STREQ(error_of([&] { column_linear_forward(compute, x, w, {}, w); }).what(),
               "column_linear_forward: y overlaps w; expected memory of its own");
}

TEST(LinearViews, MemoryThatCannotBeUsedIsNamedBeforeAnythingIsWritten) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"tp", 2}}, 0);
  Floats x(16, 1), w(16, 1), y(17, 7), b(4);
  const Shape square{4, 4};
  const auto text = [&](const TensorView& x_view, const TensorView& w_view, const TensorView& b_view,
                        const TensorView& y_view) {
    return std::string(
        error_of([&] { row_linear_forward(compute, mesh["tp"], x_view, w_view, b_view, y_view); }).what());
  };
  const TensorView good_x = shaped(x, square), good_w = shaped(w, square), good_y = shaped(y, square);
  TensorView misplaced = good_y, no_bias = shaped(b, {4});
  misplaced.data += 1;
  no_bias.data = nullptr;
  EXPECT_EQ(text(good_x, good_w, {}, misplaced).substr(0, 34), "row_linear_forward: y begins at 0x");
  EXPECT_EQ(text(good_x, good_w, no_bias, good_y), "row_linear_forward: b has no memory");
  EXPECT_EQ(text(shaped(x, {-4, 4}), good_w, {}, shaped(y, {-4, 4})),
            "row_linear_forward: x has shape (-4, 4); expected no negative extent");
  EXPECT_EQ(text(shaped(x, {4, -4}), shaped(w, {4, -4}), {}, good_y),
            "row_linear_forward: x has shape (4, -4); expected no negative extent");
  const std::string cannot_send = text(good_x, good_w, {}, good_y);  // the mesh has no group
  EXPECT_NE(cannot_send.find("arithmetic"), std::string::npos) << cannot_send;
  EXPECT_EQ(y, Floats(17, 7));
}

}  // namespace
}  // namespace weft::linear_test
