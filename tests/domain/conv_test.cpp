// Convolutions and transposed convolutions of maps that are cut in space: the bits of one rank.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/norm.hpp"

namespace weft::domain_conv_test {
namespace {

using kernels::Padding;
using test::expect_as;
using test::expect_as_serial;
using test::MakeModule;
using test::on_each_space;
using test::run_serial;

constexpr Padding kPaddings[] = {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular};

std::string text_of(const Conv2dConfig& c) {
  return testing::PrintToString(std::vector<std::int64_t>{c.kernel.height, c.stride.height, c.dilation.height,
                                                          c.padding.height, static_cast<int>(c.padding_mode),
                                                          c.groups});
}

MakeModule conv_of(const Conv2dConfig& c) {
  return [c] { return std::make_unique<Conv2d>(c); };
}

// Kernels 1 to 5, strides 1 to 4, dilations 1 to 3, paddings 0 to the kernel, each with every padding mode,
// on 2 to 4 ranks.
void expect_every_conv(const Shape& x, int count) {
  on_each_space([&](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    const std::int64_t side = std::min(x[2], x[3]);
    int done = 0;
    for (std::int64_t k = 1; k <= 5; ++k)
      for (std::int64_t s = 1; s <= 4; ++s)
        for (std::int64_t d = 1; d <= 3; ++d)
          for (std::int64_t p = 0; p <= k; ++p)
            for (const Padding mode : kPaddings) {
              if (side + 2 * p < d * (k - 1) + 1 || (p == 0 && mode != Padding::zeros)) continue;
              const Conv2dConfig c{.in = 2,
                                   .out = 3,
                                   .kernel = k,
                                   .stride = s,
                                   .padding = p,
                                   .dilation = d,
                                   .padding_mode = mode};
              SCOPED_TRACE(text_of(c) + " " + to_string(x));
              ASSERT_NO_FATAL_FAILURE(
                  expect_as(run_serial(conv_of(c), x, compute), conv_of(c), compute, mesh, axes));
              ++done;
            }
    EXPECT_EQ(done, count);
  });
}

TEST(DomainConv, EveryKernelStrideDilationAndPaddingOfOddMaps) { expect_every_conv({1, 2, 13, 11}, 776); }
TEST(DomainConv, EveryKernelStrideDilationAndPaddingOfEvenMaps) { expect_every_conv({1, 2, 12, 10}, 760); }

TEST(DomainConv, GroupsSamplesUnequalSidesAndMapsOfFewRows) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    for (const Padding mode : kPaddings)
      for (const Conv2dConfig& c : {Conv2dConfig{.in = 4,
                                   .out = 6,
                                   .kernel = {3, 5},
                                   .stride = {2, 1},
                                   .padding = {1, 2},
                                   .dilation = {1, 2},
                                   .groups = 2},
                                    Conv2dConfig{.in = 4, .out = 4, .kernel = 4, .stride = 4, .padding = 0},
                                    Conv2dConfig{.in = 4,
                                    .out = 4,
                                    .kernel = {2, 1},
                                    .stride = {1, 3},
                                    .padding = {1, 0},
                                    .groups = 4,
                                    .bias = false}}) {
        Conv2dConfig of = c;
        of.padding_mode = mode;
        // Each rank has one of four rows, or none, and an output has fewer rows than there are ranks.
        for (const Shape& x : {Shape{3, 4, 16, 17}, Shape{2, 4, 4, 9}}) {
          SCOPED_TRACE(text_of(of) + " " + to_string(x));
          ASSERT_NO_FATAL_FAILURE(
              expect_as(run_serial(conv_of(of), x, compute), conv_of(of), compute, mesh, axes));
        }
      }
  });
}

TEST(DomainConv, ManyChannelsAndWideMaps) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    const Conv2dConfig c{.in = 33, .out = 17, .kernel = 3, .padding = 1, .padding_mode = Padding::circular};
    ASSERT_NO_FATAL_FAILURE(
        expect_as(run_serial(conv_of(c), {1, 33, 30, 64}, compute), conv_of(c), compute, mesh, axes));
    const Conv2dConfig one{.in = 33, .out = 40};
    ASSERT_NO_FATAL_FAILURE(
        expect_as(run_serial(conv_of(one), {2, 33, 7, 5}, compute), conv_of(one), compute, mesh, axes));
    // Products with a long k and 1 to 6 columns.
    const Conv2dConfig few{.in = 600, .out = 300};
    ASSERT_NO_FATAL_FAILURE(
        expect_as(run_serial(conv_of(few), {1, 600, 4, 3}, compute), conv_of(few), compute, mesh, axes));
  });
}

// Products of more than 2^27 terms on one rank, and fewer on several. Also products with a k that ends in a
// part of a block, and a weight of more than 65536 elements, whose gradient a matrix product makes.
TEST(DomainConv, LargeOnes) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    const auto expect = [&](const Conv2dConfig& c, const Shape& x, DType dtype) {
      SCOPED_TRACE(text_of(c) + " " + to_string(x) + " " + std::string(name(dtype)));
      const MakeModule make = [&] {
        auto conv = std::make_unique<Conv2d>(c);
        conv->weight->set_dtype(dtype);
        return conv;
      };
      ASSERT_NO_FATAL_FAILURE(expect_as(run_serial(make, x, compute), make, compute, mesh, axes));
    };
    const Conv2dConfig wide{.in = 64, .out = 128, .kernel = 3, .padding = 1};
    expect(wide, {1, 64, 30, 20}, DType::f32);
    expect(wide, {1, 64, 48, 40}, DType::bf16);
    expect({.in = 130, .out = 70, .kernel = 3, .padding = 1}, {1, 130, 41, 50}, DType::bf16);
    expect({.in = 600, .out = 300}, {1, 600, 30, 27}, DType::bf16);
    expect({.in = 100, .out = 520, .kernel = 3, .stride = 2, .padding = 1}, {1, 100, 34, 44}, DType::bf16);
    // Few pixels on one rank, and fewer on several.
    for (const Shape& s :
         {Shape{1, 600, 6, 6}, Shape{1, 600, 4, 4}, Shape{2, 600, 4, 9}, Shape{1, 600, 8, 7}})
      expect({.in = 600, .out = 300}, s, DType::bf16);
    expect({.in = 512, .out = 2048}, {1, 512, 5, 8}, DType::bf16);
    // The same with a long sum, and with a single channel on either side.
    expect({.in = 2048, .out = 64}, {1, 2048, 5, 8}, DType::bf16);
    expect({.in = 64, .out = 2048}, {1, 64, 4, 3}, DType::bf16);
    expect({.in = 1500, .out = 33}, {2, 1500, 4, 7}, DType::bf16);
    expect({.in = 1, .out = 1500}, {1, 1, 5, 6}, DType::bf16);
    expect({.in = 2048, .out = 1}, {1, 2048, 5, 6}, DType::bf16);
  });
}

// The interior first, or the whole window. A plan tries both, and uses the quicker one.
TEST(DomainConv, EitherOrderHasTheBitsOfOneRank) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"rows", 2}});
    for (const DType dtype : {DType::f32, DType::bf16})
      for (const Conv2dConfig& c : {Conv2dConfig{.in = 40, .out = 24, .kernel = 3, .padding = 1},
                                    Conv2dConfig{.in = 24, .out = 24, .kernel = 5, .padding = 2}}) {
        SCOPED_TRACE(text_of(c) + " " + std::string(name(dtype)));
        const MakeModule make = [&] {
          auto conv = std::make_unique<Conv2d>(c);
          conv->weight->set_dtype(dtype);
          return conv;
        };
        const test::Serial serial = run_serial(make, {1, c.in, 26, 22}, compute);
        const std::unique_ptr<Module> model = make();
        const DomainManager manager = apply_domain_parallel(*model, mesh);
        replicate(*model, mesh);
        test::set_up(*model, compute);
        const Tensor x = shard_spatial(serial.x, manager);
        for (int step = 0; step < 24; ++step) {
          Frame frame = Frame::inference(compute);
          const Tensor y = model->forward(x, frame)[0];
          ASSERT_TRUE(test::same_bits(y, distribute(serial.y, y.layout()))) << "step " << step;
        }
      }
  });
}

// A layer on each pixel alone, after a mean of the whole map that one rank has.
TEST(DomainConv, OneByOneWhereOtherRanksHaveNothing) {
  const MakeModule make = [] {
    auto model = std::make_unique<Sequential>();
    model->append("squeeze", std::make_unique<AdaptiveAvgPool2d>(Extent2d(1)));
    model->append("down", std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 3}));
    model->append("norm", std::make_unique<ChannelNorm>(3));
    model->append("act", std::make_unique<GELU>());
    model->append("up", std::make_unique<Conv2d>(Conv2dConfig{.in = 3, .out = 4}));
    return model;
  };
  expect_as_serial(make, {2, 4, 6, 6});
  expect_as_serial(
      [] {
        auto model = std::make_unique<Sequential>();
        model->append("squeeze", std::make_unique<AdaptiveAvgPool2d>(Extent2d(1)));
        auto conv = std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 4});
        conv->add_spectral_norm();
        model->append("conv", std::move(conv));
        return model;
      },
      {1, 4, 6, 6});
}

TEST(DomainConv, UnderASpectralNorm) {
  test::expect_as_serial(
      [] {
        auto conv = std::make_unique<Conv2d>(Conv2dConfig{.in = 3, .out = 4, .kernel = 3, .padding = 1});
        conv->add_spectral_norm();
        return conv;
      },
      {1, 3, 9, 8});
}

TEST(DomainConvTranspose, EveryKernelStrideDilationAndPadding) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    int turn = 0;
    for (std::int64_t k = 1; k <= 5; ++k)
      for (std::int64_t s = 1; s <= 4; ++s)
        for (std::int64_t d = 1; d <= 3; ++d)
          for (std::int64_t p = 0; p <= k; ++p) {
            const std::int64_t more = turn++ % std::max(s, d);
            if (4 * s - 2 * p + d * (k - 1) + more + 1 < 1) continue;
            const ConvTranspose2dConfig c{.in = 4,
                                          .out = 2,
                                          .kernel = k,
                                          .stride = s,
                                          .padding = p,
                                          .output_padding = more,
                                          .dilation = d,
                                          .groups = turn % 2 + 1};
            const MakeModule make = [&] { return std::make_unique<ConvTranspose2d>(c); };
            SCOPED_TRACE(testing::PrintToString(std::vector<std::int64_t>{k, s, d, p, more, c.groups}));
            ASSERT_NO_FATAL_FAILURE(
                expect_as(run_serial(make, {1, 4, 7, 5}, compute), make, compute, mesh, axes));
          }
  });
}

TEST(DomainConv, ErrorsAreThoseOfOneRank) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}});
    Conv2d reflects({.in = 1, .out = 1, .kernel = 3, .padding = 4, .padding_mode = Padding::reflect});
    const DomainManager manager = apply_domain_parallel(reflects, mesh);
    replicate(reflects, mesh);
    test::set_up(reflects, compute);
    Frame frame(compute);
    EXPECT_EQ(test::error_text([&] {
                reflects.forward(shard_spatial(Tensor::zeros(rank.context, {1, 1, 4, 9}), manager), frame);
              }),
              "bad_argument: \"\": x has height 4; reflect padding of 4 needs more");
    EXPECT_EQ(test::error_text([&] {
                reflects.forward(shard_spatial(Tensor::zeros(rank.context, {1, 2, 8, 9}), manager), frame);
              }),
              "bad_argument: \"\": x is (1, 2, 4, 9); expected (batch, 1, height, width)");
    Conv2d large({.in = 1, .out = 1, .kernel = 5});
    apply_domain_parallel(large, mesh);
    replicate(large, mesh);
    test::set_up(large, compute);
    EXPECT_EQ(
        test::error_text([&] {
          large.forward(shard_spatial(Tensor::zeros(rank.context, {1, 1, 4, 9}), manager), frame);
        }),
        "bad_argument: \"\": x has height 4; expected at least 5, for kernel 5, dilation 1 and padding 0");
    const ConvTranspose2dConfig all_padding{.in = 1, .out = 1, .padding = {2, 0}};
    ConvTranspose2d serial(all_padding), nothing_left(all_padding);
    apply_domain_parallel(nothing_left, mesh);
    replicate(nothing_left, mesh);
    test::set_up(serial, compute);
    test::set_up(nothing_left, compute);
    const Tensor x = Tensor::zeros(rank.context, {1, 1, 3, 9});
    const char* const expected =
        "bad_argument: \"\": x has height 3; nothing is left of its 3 outputs after padding 2";
    EXPECT_EQ(test::error_text([&] { serial.forward(x, frame); }), expected);
    EXPECT_EQ(test::error_text([&] { nothing_left.forward(shard_spatial(x, manager), frame); }), expected);
  });
}

}  // namespace
}  // namespace weft::domain_conv_test
