// The kernels of layers on maps (batch, channels, height, width), and of what these need: layer norms, GELU,
// ReLU. Against the plain-loop reference, whose backward passes are compared with finite differences in
// double. For tolerances see kernels_test.cpp.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cmath>

#include "nn/kernel_support.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "nn/kernels/reference_maps.hpp"

namespace weft::kernels::map_kernels_test {
namespace {

using namespace test;

TEST(Erf, IsWithinItsBoundOfTheTrueValue) {
  double worst = 0.0, worst_near = 0.0;
  for (double at = -6.0; at < 6.0; at += 0.000037) {
    const auto x = static_cast<float>(at);
    const double off = std::abs(static_cast<double>(erf_f32(x)) - std::erf(static_cast<double>(x)));
    worst = std::max(worst, off);
    if (std::abs(at) < 0.1) worst_near = std::max(worst_near, off);
  }
  EXPECT_LE(worst, 1e-7);
  EXPECT_LE(worst_near, 1e-8);
  const float infinity = std::numeric_limits<float>::infinity();
  EXPECT_EQ(erf_f32(0.0f), 0.0f);
  EXPECT_EQ(erf_f32(infinity), 1.0f);
  EXPECT_EQ(erf_f32(-infinity), -1.0f);
  EXPECT_TRUE(std::isnan(erf_f32(std::numeric_limits<float>::quiet_NaN())));
}

const std::int64_t kLengths[] = {0, 1, 15, 17, 97, (1 << 14) + 1};

TEST(Gelu, EqualsReference) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    for (const GeluForm form : {GeluForm::erf, GeluForm::tanh}) {
      auto x = random_array(n, 1, -6.0, 6.0), dy = random_array(n, 2);
      if (n > 0) x[0] = 6.0f, dy[0] = 1.0f;  // both forms lose relative, not absolute digits far below 0
      auto got = garbage(n), want = garbage(n);
      // The largest value is 6; erf and the quotient of the sigmoid are off by 4 ulps of 1 at most.
      gelu_forward(ctx, x.data(), got.data(), n, form);
      reference::gelu_forward(x.data(), want.data(), n, form);
      expect_close(got, want, 8.0, "y");
      gelu_backward(ctx, dy.data(), x.data(), got.data(), n, form);
      reference::gelu_backward(dy.data(), x.data(), want.data(), n, form);
      expect_close(got, want, 64.0, "dx");  // x (1 - s) and the polynomial beside it lose up to 4 bits at 6
      auto in_place = x, dx = dy;
      gelu_forward(ctx, in_place.data(), in_place.data(), n, form);
      gelu_forward(ctx, x.data(), want.data(), n, form);
      EXPECT_TRUE(same_bits(in_place, want));
      gelu_backward(ctx, dx.data(), x.data(), dx.data(), n, form);
      EXPECT_TRUE(same_bits(dx, got));
    }
  }
}

// At an x whose square is infinite, and at an infinite x.
TEST(Gelu, SlopesOfVeryLargeNumbers) {
  KernelContext ctx(1);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  const Array<float> x = {1e20f, -1e20f, 3e38f, -3e38f, kInfinity, -kInfinity, 200.0f, -200.0f},
                     dy(x.size(), 2.0f);
  for (const GeluForm form : {GeluForm::erf, GeluForm::tanh}) {
    const std::size_t count = form == GeluForm::erf ? 4 : x.size();
    auto dx = garbage(static_cast<std::int64_t>(x.size()));
    gelu_backward(ctx, dy.data(), x.data(), dx.data(), static_cast<std::int64_t>(count), form);
    for (std::size_t i = 0; i < count; ++i) EXPECT_EQ(dx[i], x[i] > 0 ? 2.0f : 0.0f) << x[i];
  }
}

TEST(Gelu, FarEnds) {
  KernelContext ctx(1);
  const float x[] = {-1000.0f, -20.0f, 0.0f, 20.0f, 1000.0f}, dy[] = {1.0f, 1.0f, 1.0f, 1.0f, 1.0f};
  for (const GeluForm form : {GeluForm::erf, GeluForm::tanh}) {
    float y[5], dx[5];
    gelu_forward(ctx, x, y, 5, form);
    gelu_backward(ctx, dy, x, dx, 5, form);
    EXPECT_THAT(y, ::testing::ElementsAre(0.0f, 0.0f, 0.0f, 20.0f, 1000.0f));
    EXPECT_THAT(dx, ::testing::ElementsAre(0.0f, 0.0f, 0.5f, 1.0f, 1.0f));
  }
}

TEST(Relu, EqualsReferenceToTheBit) {
  KernelContext ctx(1);
  for (const std::int64_t n : kLengths) {
    const auto x = random_array(n, 1), dy = random_array(n, 2);
    auto y = garbage(n), y_want = y, dx = garbage(n), dx_want = dx;
    relu_forward(ctx, x.data(), y.data(), n);
    reference::relu_forward(x.data(), y_want.data(), n);
    EXPECT_TRUE(same_bits(y, y_want));
    relu_backward(ctx, dy.data(), y.data(), dx.data(), n);
    reference::relu_backward(dy.data(), y.data(), dx_want.data(), n);
    EXPECT_TRUE(same_bits(dx, dx_want));
  }
  const float nan = std::numeric_limits<float>::quiet_NaN();
  float y = 0;
  relu_forward(ctx, &nan, &y, 1);
  EXPECT_TRUE(std::isnan(y));
}

struct RowsByDim {
  std::int64_t rows, dim;
};

TEST(LayerNorm, EqualsReference) {
  KernelContext ctx(1);
  for (const RowsByDim s :
       {RowsByDim{1, 2}, RowsByDim{3, 7}, RowsByDim{65, 31}, RowsByDim{129, 192}, RowsByDim{0, 8}}) {
    const std::int64_t n = s.rows * s.dim;
    const auto x = random_array(n, 1, -1.0, 3.0), w = random_array(s.dim, 2), b = random_array(s.dim, 3),
               dy = random_array(n, 4);
    auto y = garbage(n), mean = garbage(s.rows), inv = garbage(s.rows), y_want = y, mean_want = mean,
         inv_want = inv;
    layer_norm_forward(ctx, x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), s.rows, s.dim,
                       1e-5f);
    reference::layer_norm_forward(x.data(), w.data(), b.data(), y_want.data(), mean_want.data(),
                                  inv_want.data(), s.rows, s.dim, 1e-5f);
    // Sixteen interleaved sums, twice, a root, a quotient and products; (x - mean) loses a bit or two. Two
    // numbers may be near to each other, and what they are apart has fewer bits.
    const double ulps = (static_cast<double>(s.dim) / 16.0 + 24.0) * (s.dim == 2 ? 64.0 : 1.0);
    expect_close(y, y_want, ulps, "y");
    expect_close(mean, mean_want, ulps, "mean");
    expect_close(inv, inv_want, ulps, "inv_std");
    auto dx = garbage(n), dw = random_array(s.dim, 5), db = random_array(s.dim, 6), dx_want = dx,
         dw_want = dw, db_want = db;
    layer_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                        db.data(), s.rows, s.dim);
    reference::layer_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx_want.data(),
                                   dw_want.data(), db_want.data(), s.rows, s.dim);
    if (s.dim > 2) expect_close(dx, dx_want, 4.0 * ulps, "dx");  // of two numbers dx is 0 up to rounding
    expect_close(dw, dw_want, static_cast<double>(s.rows) + 16.0, "dweight");
    expect_close(db, db_want, static_cast<double>(s.rows) + 8.0, "dbias");
    auto in_place = x;
    layer_norm_forward(ctx, in_place.data(), w.data(), b.data(), in_place.data(), mean.data(), inv.data(),
                       s.rows, s.dim, 1e-5f);
    EXPECT_TRUE(same_bits(in_place, y));
    in_place = dy;
    layer_norm_backward(ctx, in_place.data(), x.data(), w.data(), mean.data(), inv.data(), in_place.data(),
                        dw.data(), db.data(), s.rows, s.dim);
    EXPECT_TRUE(same_bits(in_place, dx));
  }
}

const MapShape kMaps[] = {{1, 2, 3}, {2, 5, 7}, {3, 24, 129}, {1, 64, 256}, {0, 3, 4}, {2, 3, 0}};

TEST(ChannelNorm, EqualsReference) {
  KernelContext ctx(1);
  for (const MapShape& s : kMaps) {
    const std::int64_t n = s.batch * s.channels * s.pixels, rows = s.batch * s.pixels;
    const auto x = random_array(n, 1, -1.0, 3.0), w = random_array(s.channels, 2),
               b = random_array(s.channels, 3), dy = random_array(n, 4);
    auto y = garbage(n), mean = garbage(rows), inv = garbage(rows), y_want = y, mean_want = mean,
         inv_want = inv;
    channel_norm_forward(ctx, x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), s, 1e-5f);
    reference::channel_norm_forward(x.data(), w.data(), b.data(), y_want.data(), mean_want.data(),
                                    inv_want.data(), s, 1e-5f);
    const double ulps = s.channels == 2 ? 1024.0 : 24.0;
    expect_close(y, y_want, ulps, "y");
    expect_close(mean, mean_want, ulps, "mean");
    expect_close(inv, inv_want, ulps, "inv_std");
    auto dx = garbage(n), dw = random_array(s.channels, 5), db = random_array(s.channels, 6), dx_want = dx,
         dw_want = dw, db_want = db;
    channel_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                          db.data(), s);
    reference::channel_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx_want.data(),
                                     dw_want.data(), db_want.data(), s);
    if (s.channels > 2) expect_close(dx, dx_want, 4.0 * ulps, "dx");
    expect_close(dw, dw_want, static_cast<double>(rows) + 16.0, "dweight");
    expect_close(db, db_want, static_cast<double>(rows) + 8.0, "dbias");
    auto in_place = x;
    channel_norm_forward(ctx, in_place.data(), w.data(), b.data(), in_place.data(), mean.data(), inv.data(),
                         s, 1e-5f);
    EXPECT_TRUE(same_bits(in_place, y));
    in_place = dy;
    channel_norm_backward(ctx, in_place.data(), x.data(), w.data(), mean.data(), inv.data(), in_place.data(),
                          dw.data(), db.data(), s);
    EXPECT_TRUE(same_bits(in_place, dx));
  }
}

TEST(GroupNorm, EqualsReference) {
  KernelContext ctx(1);
  for (const MapShape& s : {MapShape{1, 2, 3}, MapShape{2, 6, 7}, MapShape{3, 24, 129}, MapShape{0, 4, 4}}) {
    for (const std::int64_t groups : {std::int64_t{1}, std::int64_t{2}, s.channels}) {
      const std::int64_t n = s.batch * s.channels * s.pixels, rows = s.batch * groups;
      const auto x = random_array(n, 1, -1.0, 3.0), w = random_array(s.channels, 2),
                 b = random_array(s.channels, 3), dy = random_array(n, 4);
      auto y = garbage(n), mean = garbage(rows), inv = garbage(rows), y_want = y, mean_want = mean,
           inv_want = inv;
      group_norm_forward(ctx, x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), s, groups,
                         1e-5f);
      reference::group_norm_forward(x.data(), w.data(), b.data(), y_want.data(), mean_want.data(),
                                    inv_want.data(), s, groups, 1e-5f);
      expect_close(y, y_want, 32.0, "y");
      expect_close(mean, mean_want, 32.0, "mean");
      expect_close(inv, inv_want, 32.0, "inv_std");
      auto dx = garbage(n), dw = random_array(s.channels, 5), db = random_array(s.channels, 6), dx_want = dx,
           dw_want = dw, db_want = db;
      group_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                          db.data(), s, groups);
      reference::group_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx_want.data(),
                                     dw_want.data(), db_want.data(), s, groups);
      expect_close(dx, dx_want, 128.0, "dx");
      expect_close(dw, dw_want, 32.0, "dweight");
      expect_close(db, db_want, 32.0, "dbias");
      auto in_place = x;
      group_norm_forward(ctx, in_place.data(), w.data(), b.data(), in_place.data(), mean.data(), inv.data(),
                         s, groups, 1e-5f);
      EXPECT_TRUE(same_bits(in_place, y));
      in_place = dy;
      group_norm_backward(ctx, in_place.data(), x.data(), w.data(), mean.data(), inv.data(), in_place.data(),
                          dw.data(), db.data(), s, groups);
      EXPECT_TRUE(same_bits(in_place, dx));
    }
  }
  EXPECT_EQ(
      message_of([&] {
        group_norm_forward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, {1, 6, 1}, 4, 1e-5f);
      }),
      "group_norm_forward: 6 channels do not divide into 4 groups");
  EXPECT_EQ(message_of([&] {
              group_norm_backward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                  {1, 6, 1}, 0);
            }),
            "group_norm_backward: 6 channels do not divide into 0 groups");
}

TEST(BatchNorm, EqualsReference) {
  KernelContext ctx(1);
  for (const MapShape& s : {MapShape{1, 2, 3}, MapShape{2, 6, 7}, MapShape{3, 5, 129}, MapShape{0, 4, 4}}) {
    const std::int64_t n = s.batch * s.channels * s.pixels;
    const auto x = random_array(n, 1, -1.0, 3.0), dy = random_array(n, 4), w = random_array(s.channels, 2),
               b = random_array(s.channels, 3), mean = random_array(s.channels, 5),
               inv = random_array(s.channels, 6, 0.5, 2.0), mean_dy = random_array(s.channels, 7),
               mean_dyx = random_array(s.channels, 8);
    std::vector<double> sum(static_cast<std::size_t>(s.channels), 7.0), squares = sum, sum_want = sum,
                                                                        squares_want = sum;
    const auto expect_sums = [&](double magnitude) {
      for (std::size_t c = 0; c < sum.size(); ++c) {
        EXPECT_NEAR(sum[c], sum_want[c], 1e-12 * magnitude);
        EXPECT_NEAR(squares[c], squares_want[c], 1e-12 * magnitude);
      }
    };
    channel_moments(ctx, x.data(), sum.data(), squares.data(), s);
    reference::channel_moments(x.data(), sum_want.data(), squares_want.data(), s);
    expect_sums(static_cast<double>(10 * n + 1));
    batch_norm_backward_sums(ctx, dy.data(), x.data(), mean.data(), inv.data(), sum.data(), squares.data(),
                             s);
    reference::batch_norm_backward_sums(dy.data(), x.data(), mean.data(), inv.data(), sum_want.data(),
                                        squares_want.data(), s);
    expect_sums(static_cast<double>(10 * n + 1));
    auto y = garbage(n), y_want = y, dx = garbage(n), dx_want = dx;
    batch_norm_forward(ctx, x.data(), w.data(), b.data(), mean.data(), inv.data(), y.data(), s);
    reference::batch_norm_forward(x.data(), w.data(), b.data(), mean.data(), inv.data(), y_want.data(), s);
    expect_close(y, y_want, 128.0, "y");
    batch_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), mean_dy.data(),
                        mean_dyx.data(), dx.data(), s);
    reference::batch_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), mean_dy.data(),
                                   mean_dyx.data(), dx_want.data(), s);
    expect_close(dx, dx_want, 128.0, "dx");
    auto in_place = x;
    batch_norm_forward(ctx, in_place.data(), w.data(), b.data(), mean.data(), inv.data(), in_place.data(), s);
    EXPECT_TRUE(same_bits(in_place, y));
    in_place = dy;
    batch_norm_backward(ctx, in_place.data(), x.data(), w.data(), mean.data(), inv.data(), mean_dy.data(),
                        mean_dyx.data(), in_place.data(), s);
    EXPECT_TRUE(same_bits(in_place, dx));
  }
}

// Two channels of four values: 1 2 3 4 and four times 5, whose variance is 0.
TEST(BatchNorm, StatisticsOfSums) {
  KernelContext ctx(2);
  const double sum[] = {10, 20}, squares[] = {30, 100 - 1e-9};
  float mean[2], inv[2];
  double of_mean[2], of_var[2];
  batch_norm_statistics(ctx, sum, squares, 4, 0.25, mean, inv, of_mean, of_var, 2);
  EXPECT_EQ(mean[0], 2.5F);
  EXPECT_EQ(mean[1], 5.0F);
  EXPECT_FLOAT_EQ(inv[0], static_cast<float>(1 / std::sqrt(1.25 + 0.25)));
  EXPECT_FLOAT_EQ(inv[1], 2.0F) << "a variance is not below 0";
  EXPECT_EQ(of_mean[0], 2.5);
  EXPECT_DOUBLE_EQ(of_var[0], 1.25 * 4 / 3) << "unbiased";
  EXPECT_EQ(of_var[1], 0);
  float running_mean[] = {8, 1}, running_var[] = {3, 1};
  std::int64_t batches = 41;
  const double sums_mean[] = {6, 2}, sums_var[] = {10, 0};  // of two ranks
  batch_norm_track(ctx, sums_mean, sums_var, 2, 0.25, running_mean, running_var, &batches, 2);
  EXPECT_EQ(running_mean[0], 0.75F * 8 + 0.25F * 3);
  EXPECT_EQ(running_mean[1], 1.0F);
  EXPECT_EQ(running_var[0], 0.75F * 3 + 0.25F * 5);
  EXPECT_EQ(running_var[1], 0.75F);
  EXPECT_EQ(batches, 42);
  float inverse[2], divided[2];
  inverse_std(ctx, running_var, 1, inverse, 2);
  EXPECT_FLOAT_EQ(inverse[0], static_cast<float>(1 / std::sqrt(4.5)));
  divide_f64(ctx, sum, 4, divided, 2);
  EXPECT_EQ(divided[1], 5.0F);
}

TEST(RowNorm, EqualsReference) {
  for (const int threads : {1, 3}) {
    KernelContext ctx(threads);
    for (const auto& [rows, dim] :
         {std::pair<std::int64_t, std::int64_t>{1, 5}, {3, 1024}, {2, 3073}, {0, 4}, {4, 0}}) {
      const std::int64_t n = rows * dim;
      const auto x = random_array(n, 1, -1.0, 3.0), dy = random_array(n, 4), w = random_array(dim, 2),
                 b = random_array(dim, 3), mean = random_array(rows, 5),
                 inv = random_array(rows, 6, 0.5, 2.0), mean_g = random_array(rows, 7),
                 mean_gx = random_array(rows, 8);
      std::vector<double> g(static_cast<std::size_t>(rows), 7.0), gx = g, g_want = g, gx_want = g;
      auto dw = random_array(dim, 9), db = random_array(dim, 10), dw_want = dw, db_want = db;
      row_norm_backward_sums(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), g.data(), gx.data(),
                             dw.data(), db.data(), rows, dim);
      reference::row_norm_backward_sums(dy.data(), x.data(), w.data(), mean.data(), inv.data(), g_want.data(),
                                        gx_want.data(), dw_want.data(), db_want.data(), rows, dim);
      for (std::size_t r = 0; r < g.size(); ++r) {
        EXPECT_NEAR(g[r], g_want[r], 1e-12 * static_cast<double>(10 * n + 1));
        EXPECT_NEAR(gx[r], gx_want[r], 1e-6 * static_cast<double>(n + 1));  // x^ is f32
      }
      expect_close(dw, dw_want, 64.0, "dweight");
      expect_close(db, db_want, 64.0, "dbias");
      auto y = garbage(n), y_want = y, dx = garbage(n), dx_want = dx;
      row_norm_forward(ctx, x.data(), w.data(), b.data(), mean.data(), inv.data(), y.data(), rows, dim);
      reference::row_norm_forward(x.data(), w.data(), b.data(), mean.data(), inv.data(), y_want.data(), rows,
                                  dim);
      expect_close(y, y_want, 128.0, "y");
      row_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), mean_g.data(),
                        mean_gx.data(), dx.data(), rows, dim);
      reference::row_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), mean_g.data(),
                                   mean_gx.data(), dx_want.data(), rows, dim);
      expect_close(dx, dx_want, 128.0, "dx");
      auto in_place = x;
      row_norm_forward(ctx, in_place.data(), w.data(), b.data(), mean.data(), inv.data(), in_place.data(),
                       rows, dim);
      EXPECT_TRUE(same_bits(in_place, y));
      in_place = dy;
      row_norm_backward(ctx, in_place.data(), x.data(), w.data(), mean.data(), inv.data(), mean_g.data(),
                        mean_gx.data(), in_place.data(), rows, dim);
      EXPECT_TRUE(same_bits(in_place, dx));
    }
  }
}

// The two steps together are full attention, forward and backward, if nothing happens between them.
TEST(AttentionInTwoSteps, IsFullAttention) {
  KernelContext ctx(2);
  for (const FullAttentionShape& s :
       {FullAttentionShape{1, 1, 1, 1, 1, 1}, FullAttentionShape{2, 3, 5, 4, 2, 7},
        FullAttentionShape{3, 16, 16, 4, 4, 32}, FullAttentionShape{0, 2, 2, 2, 2, 2}}) {
    const std::int64_t queries = s.batch * s.queries * s.heads * s.head_dim,
                       keys = s.batch * s.keys * s.kv_heads * s.head_dim,
                       weights = s.batch * s.heads * s.queries * s.keys;
    const auto q = random_array(queries, 1), k = random_array(keys, 2), v = random_array(keys, 3),
               bias = random_array(s.queries * s.keys, 4), dout = random_array(queries, 5);
    auto w = garbage(weights), w_want = w, out = garbage(queries), out_want = out, want = out,
         softmax = garbage(s.batch * s.heads * s.queries * kSoftmaxTerms);
    attention_weights_forward(ctx, q.data(), k.data(), bias.data(), w.data(), s);
    reference::attention_weights_forward(q.data(), k.data(), bias.data(), w_want.data(), s);
    expect_close(w, w_want, 64.0, "weights");
    attention_apply_forward(ctx, w.data(), v.data(), out.data(), s);
    reference::attention_apply_forward(w.data(), v.data(), out_want.data(), s);
    expect_close(out, out_want, 64.0, "out");
    full_attention_forward(ctx, q.data(), k.data(), v.data(), bias.data(), want.data(), softmax.data(), s);
    expect_close(out, want, 128.0, "out of full attention");
    auto dw = garbage(weights), dq = garbage(queries), dk = garbage(keys), dv = dk,
         dbias = garbage(s.queries * s.keys), dq_want = dq, dk_want = dk, dv_want = dv, dbias_want = dbias;
    attention_apply_backward(ctx, dout.data(), w.data(), v.data(), dw.data(), dv.data(), s);
    attention_weights_backward(ctx, dw.data(), w.data(), q.data(), k.data(), dq.data(), dk.data(),
                               dbias.data(), s);
    full_attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), bias.data(), want.data(),
                            softmax.data(), dq_want.data(), dk_want.data(), dv_want.data(), dbias_want.data(),
                            s);
    expect_close(dq, dq_want, 256.0, "dq");
    expect_close(dk, dk_want, 256.0, "dk");
    expect_close(dv, dv_want, 256.0, "dv");
    expect_close(dbias, dbias_want, 256.0, "dbias");
    // Without a bias, on one thread: the same bits of dq as with a bias of zeros on two.
    KernelContext one(1);
    const auto none = std::vector<float>(static_cast<std::size_t>(s.queries * s.keys), 0.0f);
    auto other = w;
    attention_weights_forward(ctx, q.data(), k.data(), none.data(), w.data(), s);
    attention_weights_forward(one, q.data(), k.data(), nullptr, other.data(), s);
    EXPECT_TRUE(same_bits(w, other));
  }
}

// A bias that hides some keys, and all keys of one query.
TEST(AttentionInTwoSteps, HidesKeysAsFullAttentionDoes) {
  KernelContext ctx(1);
  constexpr float kHidden = -std::numeric_limits<float>::infinity();
  const FullAttentionShape s{1, 3, 4, 2, 1, 5};
  const auto q = random_array(30, 1), k = random_array(20, 2), v = random_array(20, 3),
             dout = random_array(30, 5);
  const Array<float> bias = {kHidden, 0.5f, kHidden, 1, kHidden, kHidden, kHidden, kHidden, 1, 2, 3, kHidden};
  auto w = garbage(24), out = garbage(30), want = out, softmax = garbage(6 * kSoftmaxTerms), dw = w, dq = out,
       dk = garbage(20), dv = dk, dbias = garbage(12), dq_want = dq, dk_want = dk, dv_want = dv,
       dbias_want = dbias;
  attention_weights_forward(ctx, q.data(), k.data(), bias.data(), w.data(), s);
  attention_apply_forward(ctx, w.data(), v.data(), out.data(), s);
  attention_apply_backward(ctx, dout.data(), w.data(), v.data(), dw.data(), dv.data(), s);
  attention_weights_backward(ctx, dw.data(), w.data(), q.data(), k.data(), dq.data(), dk.data(), dbias.data(),
                             s);
  full_attention_forward(ctx, q.data(), k.data(), v.data(), bias.data(), want.data(), softmax.data(), s);
  full_attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), bias.data(), want.data(),
                          softmax.data(), dq_want.data(), dk_want.data(), dv_want.data(), dbias_want.data(),
                          s);
  for (std::size_t i = 10; i < 20; ++i) EXPECT_EQ(out[i], 0.0f) << i;  // of the query that sees no key
  expect_close(out, want, 64.0, "out");
  expect_close(dq, dq_want, 256.0, "dq");
  expect_close(dk, dk_want, 256.0, "dk");
  expect_close(dv, dv_want, 256.0, "dv");
  expect_close(dbias, dbias_want, 256.0, "dbias");
}

TEST(ChannelBias, EqualsReference) {
  KernelContext ctx(1);
  for (const MapShape& s : kMaps) {
    const auto bias = random_array(s.channels, 1), dy = random_array(s.batch * s.channels * s.pixels, 2);
    auto y = dy, y_want = dy, db = random_array(s.channels, 3), db_want = db;
    add_channel_bias(ctx, bias.data(), y.data(), s);
    reference::add_channel_bias(bias.data(), y_want.data(), s);
    EXPECT_TRUE(same_bits(y, y_want));
    channel_bias_backward(ctx, dy.data(), db.data(), s);
    reference::channel_bias_backward(dy.data(), db_want.data(), s);
    expect_close(db, db_want, static_cast<double>(s.batch * s.pixels) / 16.0 + 24.0, "dbias");
  }
}

TEST(Permute, EqualsReferenceToTheBit) {
  KernelContext ctx(1);
  for (const Permutation& how :
       {Permutation{{2, 3, 4, 5}, {0, 2, 3, 1}},              // maps to pixels first
        Permutation{{2, 6, 3, 4, 3, 4}, {0, 2, 4, 3, 5, 1}},  // short windows
        Permutation{{2, 6, 4, 3, 4, 3}, {0, 3, 5, 2, 4, 1}},  // long windows
        Permutation{{40, 70}, {1, 0}}, Permutation{{1, 7, 1, 5}, {3, 2, 1, 0}}, Permutation{{3, 4}, {0, 1}},
        Permutation{{5, 17, 33}, {2, 0, 1}}, Permutation{{3, 0, 2}, {2, 1, 0}}, Permutation{{1, 1}, {1, 0}},
        Permutation{Shape{}, Dims{}}}) {
    const auto x = random_array(how.in.count(), 1);
    auto y = garbage(how.in.count()), want = y;
    permute(ctx, x.data(), y.data(), how);
    reference::permute(x.data(), want.data(), how);
    EXPECT_TRUE(same_bits(y, want)) << to_string(how.in);
  }
}

std::vector<UnfoldShape> unfold_shapes() {
  std::vector<UnfoldShape> all;
  for (const Padding padding : {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular}) {
    all.push_back({3, 5, 7, 3, 3, 1, 1, 1, 1, 1, 1, 5, 7, padding});
    all.push_back({2, 6, 4, 3, 1, 2, 1, 1, 0, 2, 1, 2, 4, padding});
    all.push_back({1, 4, 9, 2, 5, 1, 3, 0, 2, 1, 1, 3, 3, padding});
  }
  all.push_back({0, 4, 4, 3, 3, 1, 1, 1, 1, 1, 1, 4, 4, Padding::zeros});
  all.push_back({2, 1, 1, 5, 5, 1, 1, 2, 2, 1, 1, 1, 1, Padding::zeros});  // sees little but the border
  return all;
}

TEST(Unfold, EqualsReferenceAndFoldIsItsAdjoint) {
  KernelContext ctx(1);
  for (const UnfoldShape& s : unfold_shapes()) {
    const std::int64_t n = s.channels * s.height * s.width,
                       m = s.channels * s.kernel_height * s.kernel_width * s.out_height * s.out_width;
    const auto x = random_array(n, 1), dcolumns = random_array(m, 2);
    auto columns = garbage(m), columns_want = columns, dx = garbage(n), dx_want = dx;
    unfold(ctx, x.data(), columns.data(), s);
    reference::unfold(x.data(), columns_want.data(), s);
    EXPECT_TRUE(same_bits(columns, columns_want));
    fold(ctx, dcolumns.data(), dx.data(), s);
    reference::fold(dcolumns.data(), dx_want.data(), s);
    expect_close(dx, dx_want, 32.0, "dx");
    double there = 0.0, back = 0.0;
    for (std::size_t i = 0; i < columns.size(); ++i)
      there += static_cast<double>(columns[i]) * static_cast<double>(dcolumns[i]);
    for (std::size_t i = 0; i < x.size(); ++i) back += static_cast<double>(x[i]) * static_cast<double>(dx[i]);
    EXPECT_NEAR(there, back, 1e-5);
  }
}

const FullAttentionShape kFullAttentions[] = {
    {1, 1, 2, 1, 1, 1},    {2, 3, 5, 4, 2, 5},    {1, 64, 64, 2, 1, 16},
    {3, 65, 16, 6, 2, 16}, {2, 16, 131, 3, 3, 7}, {70, 16, 16, 2, 2, 8},
    {0, 7, 7, 2, 1, 8},    {2, 0, 3, 2, 2, 8},    {2, 3, 0, 2, 2, 8}};

TEST(FullAttention, EqualsReference) {
  KernelContext ctx(1);
  for (const FullAttentionShape& s : kFullAttentions) {
    for (int form = 0; form < 5; ++form) {  // no bias, then (samples or 1, queries or 1, keys)
      const bool of_each_sample = form == 2 || form == 3, of_each_query = form == 1 || form == 2,
                 summed = form == 1;  // its gradient is asked for
      const std::int64_t nq = s.batch * s.queries * s.heads * s.head_dim,
                         nk = s.batch * s.keys * s.kv_heads * s.head_dim,
                         rows = s.batch * s.heads * s.queries, pairs = s.queries * s.keys;
      const auto q = random_array(nq, 1, -2.0, 2.0), k = random_array(nk, 2, -2.0, 2.0),
                 v = random_array(nk, 3), dout = random_array(nq, 4);
      auto biases = random_array(s.batch * pairs, 5, -2.0, 2.0);
      if (!summed)  // hides every third, and all keys of the first query, or of the first sample
        for (std::size_t i = 0; i < biases.size(); ++i)
          if (i % 3 == 2 || i < static_cast<std::size_t>(s.keys))
            biases[i] = -std::numeric_limits<float>::infinity();
      const ScoreBias bias{form == 0 ? nullptr : biases.data(), of_each_sample, of_each_query};
      auto out = garbage(nq), out_want = out, softmax = garbage(rows * kSoftmaxTerms), softmax_want = softmax;
      full_attention_forward(ctx, q.data(), k.data(), v.data(), bias, out.data(), softmax.data(), s);
      reference::full_attention_forward(q.data(), k.data(), v.data(), bias, out_want.data(),
                                        softmax_want.data(), s);
      // As of causal attention, and one more term.
      const double ulps = 8.0 * static_cast<double>(s.head_dim) + 32.0;
      expect_close(out, out_want, ulps, "out");
      auto sums = log_sums(softmax), sums_want = log_sums(softmax_want);
      for (std::size_t i = 0; i < sums.size(); ++i)
        if (std::isinf(sums_want[i])) {  // of a query that sees no key
          EXPECT_EQ(sums[i], sums_want[i]);
          sums[i] = sums_want[i] = 0;
        }
      expect_close(sums, sums_want, ulps, "log of the sum");
      auto dq = garbage(nq), dk = garbage(nk), dv = garbage(nk), db = garbage(pairs), dq_want = dq,
           dk_want = dk, dv_want = dv, db_want = db;
      full_attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), bias, out.data(),
                              softmax.data(), dq.data(), dk.data(), dv.data(), summed ? db.data() : nullptr,
                              s);
      reference::full_attention_backward(dout.data(), q.data(), k.data(), v.data(), bias, out_want.data(),
                                         softmax_want.data(), dq_want.data(), dk_want.data(), dv_want.data(),
                                         summed ? db_want.data() : nullptr, s);
      expect_close(dq, dq_want, 4.0 * ulps, "dq");
      expect_close(dk, dk_want, 4.0 * ulps, "dk");
      expect_close(dv, dv_want, 4.0 * ulps, "dv");
      if (summed) expect_close(db, db_want, 4.0 * ulps, "dbias");
    }
  }
  constexpr const float* kNone = nullptr;
  EXPECT_EQ(
      message_of([&] {
        full_attention_forward(ctx, kNone, nullptr, nullptr, nullptr, nullptr, nullptr, {1, 1, 1, 5, 2, 4});
      }),
      "full_attention_forward: 5 query heads over 2 key/value heads; expected a multiple");
  EXPECT_EQ(message_of([&] {
              full_attention_backward(ctx, kNone, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                      nullptr, nullptr, nullptr, nullptr, {1, 1, 1, 5, 0, 4});
            }),
            "full_attention_backward: 5 query heads over 0 key/value heads; expected a multiple");
  float one = 0;
  EXPECT_EQ(
      message_of([&] {
        full_attention_backward(ctx, &one, &one, &one, &one, {&one, true}, &one, &one, &one, &one, &one, &one,
                                {1, 1, 1, 1, 1, 1});
      }),
      "full_attention_backward: dbias is not null; expected null, or a bias (queries, keys) of all samples");
}

// --- finite differences of the reference, in double

TEST(FiniteDifferences, GeluAndRelu) {
  auto x = random_array<double>(9, 1, -3.0, 3.0);
  const auto dy = random_array<double>(9, 2);
  Array<double> y(9), dx(9);
  for (const GeluForm form : {GeluForm::erf, GeluForm::tanh}) {
    reference::gelu_backward(dy.data(), x.data(), dx.data(), 9, form);
    expect_gradient(
        x, dx,
        [&] {
          reference::gelu_forward(x.data(), y.data(), 9, form);
          return dot(y, dy);
        },
        "gelu");
  }
  const auto relu_loss = [&] {
    reference::relu_forward(x.data(), y.data(), 9);
    return dot(y, dy);
  };
  relu_loss();
  reference::relu_backward(dy.data(), y.data(), dx.data(), 9);
  expect_gradient(x, dx, relu_loss, "relu");
}

TEST(FiniteDifferences, LayerNormAndChannelNorm) {
  auto x = random_array<double>(2 * 5 * 3, 1), w = random_array<double>(5, 2), b = random_array<double>(5, 3);
  const auto dy = random_array<double>(2 * 5 * 3, 4);
  Array<double> y(30), mean(6), inv(6), dx(30);
  for (const bool maps : {false, true}) {
    const MapShape s{2, 5, 3};
    const auto loss = [&] {
      if (maps)
        reference::channel_norm_forward(x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), s,
                                        1e-5);
      else
        reference::layer_norm_forward(x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), 6, 5,
                                      1e-5);
      return dot(y, dy);
    };
    loss();
    Array<double> dw(5), db(5);
    if (maps)
      reference::channel_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(),
                                       dw.data(), db.data(), s);
    else
      reference::layer_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(),
                                     dw.data(), db.data(), 6, 5);
    expect_gradient(x, dx, loss, "dx");
    expect_gradient(w, dw, loss, "dweight");
    expect_gradient(b, db, loss, "dbias");
  }
}

TEST(FiniteDifferences, GroupNorm) {
  const MapShape s{2, 4, 3};
  auto x = random_array<double>(24, 1), w = random_array<double>(4, 2), b = random_array<double>(4, 3);
  const auto dy = random_array<double>(24, 4);
  Array<double> y(24), mean(4), inv(4), dx(24), dw(4), db(4);
  const auto loss = [&] {
    reference::group_norm_forward(x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), s, 2,
                                  1e-5);
    return dot(y, dy);
  };
  loss();
  reference::group_norm_backward(dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                                 db.data(), s, 2);
  expect_gradient(x, dx, loss, "dx");
  expect_gradient(w, dw, loss, "dweight");
  expect_gradient(b, db, loss, "dbias");
}

TEST(FiniteDifferences, FullAttention) {
  const FullAttentionShape s{2, 3, 4, 4, 2, 3};
  auto q = random_array<double>(2 * 3 * 4 * 3, 1), k = random_array<double>(2 * 4 * 2 * 3, 2),
       v = random_array<double>(2 * 4 * 2 * 3, 3), bias = random_array<double>(12, 4);
  const auto dout = random_array<double>(2 * 3 * 4 * 3, 5);
  Array<double> out(q.size()), softmax(24 * kSoftmaxTerms);
  const auto loss = [&] {
    reference::full_attention_forward(q.data(), k.data(), v.data(), bias.data(), out.data(), softmax.data(),
                                      s);
    return dot(out, dout);
  };
  loss();
  Array<double> dq(q.size()), dk(k.size()), dv(v.size()), db(bias.size());
  reference::full_attention_backward(dout.data(), q.data(), k.data(), v.data(), bias.data(), out.data(),
                                     softmax.data(), dq.data(), dk.data(), dv.data(), db.data(), s);
  expect_gradient(q, dq, loss, "dq");
  expect_gradient(k, dk, loss, "dk");
  expect_gradient(v, dv, loss, "dv");
  expect_gradient(bias, db, loss, "dbias");
}

// --- threads

// Everything here that sums, on `threads` threads; all results in one array.
Array<float> results(int threads) {
  KernelContext ctx(threads);
  Array<float> all;
  const auto keep = [&](const Array<float>& a) { all.insert(all.end(), a.begin(), a.end()); };
  const std::int64_t rows = 517, dim = 96, n = rows * dim;
  const auto x = random_array(n, 1), dy = random_array(n, 2), w = random_array(dim, 3),
             b = random_array(dim, 4);
  auto y = garbage(n), mean = garbage(rows), inv = garbage(rows), dx = garbage(n), dw = zeros(dim),
       db = zeros(dim);
  layer_norm_forward(ctx, x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), rows, dim, 1e-5f);
  layer_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                      db.data(), rows, dim);
  keep(y), keep(dx), keep(dw), keep(db);
  const MapShape maps{1, dim, rows};
  channel_norm_forward(ctx, x.data(), w.data(), b.data(), y.data(), mean.data(), inv.data(), maps, 1e-5f);
  channel_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                        db.data(), maps);
  keep(y), keep(dx), keep(dw), keep(db);
  group_norm_backward(ctx, dy.data(), x.data(), w.data(), mean.data(), inv.data(), dx.data(), dw.data(),
                      db.data(), maps, 4);
  channel_bias_backward(ctx, dy.data(), db.data(), maps);
  keep(dx), keep(dw), keep(db);
  const UnfoldShape unfolded{48, 11, 11, 3, 3, 1, 1, 1, 1, 1, 1, 11, 11, Padding::zeros};
  auto folded = garbage(48 * 11 * 11);
  fold(ctx, random_array(48 * 9 * 11 * 11, 5).data(), folded.data(), unfolded);
  keep(folded);
  const FullAttentionShape s{70, 16, 16, 3, 3, 8};
  const std::int64_t size = 70 * 16 * 3 * 8;
  const auto q = random_array(size, 6), k = random_array(size, 7), v = random_array(size, 8),
             dout = random_array(size, 9), bias = random_array(256, 10);
  auto out = garbage(size), softmax = garbage(70 * 3 * 16 * kSoftmaxTerms), dq = garbage(size),
       dk = garbage(size), dv = garbage(size), dbias = garbage(256);
  full_attention_forward(ctx, q.data(), k.data(), v.data(), bias.data(), out.data(), softmax.data(), s);
  full_attention_backward(ctx, dout.data(), q.data(), k.data(), v.data(), bias.data(), out.data(),
                          softmax.data(), dq.data(), dk.data(), dv.data(), dbias.data(), s);
  keep(out), keep(softmax), keep(dq), keep(dk), keep(dv), keep(dbias);
  return all;
}

TEST(Threads, DoNotChangeABitOfMaps) {
  const auto one = results(1);
  EXPECT_TRUE(same_bits(results(2), one));
  EXPECT_TRUE(same_bits(results(3), one));
}

}  // namespace
}  // namespace weft::kernels::map_kernels_test
