// Weights in bf16 that are packed once and used by many products. They give the bits of products that pack
// them each time, never those of an older weight, and use no more memory than the limit.
#include "nn/kernels/bf16/packed_weights.hpp"

#include "nn/kernel_support.hpp"
#include "nn/kernels/cpu_state.hpp"
#include "nn/support.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::kernels::packed_weights_test {
namespace {

using namespace weft::test;
using kernels::test::Array;
using kernels::test::garbage;
using kernels::test::random_array;

constexpr int kPacked = PackedWeights::kUsesBefore + 1;  // the use that packs

// Whether bf16 products here multiply bf16. Only these keep packed weights.
bool packs_here() {
  KernelContext ctx(1);
  const std::int64_t n = 64;
  const auto a = random_array<bf16>(n * n, 1), b = random_array<bf16>(n * n, 2);
  auto c = garbage(n * n);
  for (int use = 0; use < kPacked; ++use)
    matmul(ctx, a.data(), Stored::plain, WeightMatrix{b.data(), 1, 1}, Stored::plain, c.data(), n, n, n,
           false);
  return ctx.state().packed.bytes() > 0;
}

std::size_t bytes_of(KernelContext& ctx, std::int64_t n, std::int64_t k) {
  return static_cast<std::size_t>(ctx.state().bf16->packed_floats(n, k)) * sizeof(float);
}

struct Sizes {
  std::int64_t m, n, k;
};

TEST(PackedWeights, ProductsHaveTheBitsOfThoseThatPackEachTime) {
  int of_packed = 0;
  for (const int threads : {1, 2})
    for (const Sizes s : {Sizes{1, 64, 32}, Sizes{8, 1024, 640}, Sizes{37, 100, 70}, Sizes{130, 65, 33},
                          Sizes{3, 1, 5}, Sizes{5, 40, 257}, Sizes{64, 192, 1056}, Sizes{9, 128, 1030},
                          Sizes{600, 1088, 256}, Sizes{40, 4160, 512}, Sizes{1100, 320, 200}})
      for (const Stored stored : {Stored::plain, Stored::transposed})
        for (const bool accumulate : {false, true}) {
          KernelContext ctx(threads);
          const auto a = random_array<bf16>(s.m * s.k, 1), b = random_array<bf16>(s.k * s.n, 2);
          const auto before = random_array(s.m * s.n, 3);
          auto want = before;
          matmul(ctx, a.data(), Stored::plain, b.data(), stored, want.data(), s.m, s.n, s.k, accumulate);
          for (int use = 0; use < kPacked + 2; ++use) {
            auto got = before;
            matmul(ctx, a.data(), Stored::plain, WeightMatrix{b.data(), 7, 1}, stored, got.data(), s.m, s.n,
                   s.k, accumulate);
            ASSERT_EQ(std::memcmp(got.data(), want.data(), got.size() * sizeof(float)), 0)
                << s.m << "x" << s.n << "x" << s.k << " use " << use << (stored == Stored::plain ? "" : " T");
          }
          of_packed += ctx.state().packed.bytes() > 0;
        }
  EXPECT_EQ(of_packed >= 2 * 2 * 2 * 4, packs_here()) << of_packed;
}

TEST(PackedWeights, BiasAndForwardPassToo) {
  const LinearShape s{9, 320, 192};
  KernelContext ctx(1);
  const auto x = random_array<bf16>(s.tokens * s.in, 1), w = random_array<bf16>(s.out * s.in, 2);
  const auto bias = random_array(s.out, 3);
  auto want = garbage(s.tokens * s.out), got = want;
  linear_forward(ctx, x.data(), w.data(), bias.data(), want.data(), s);
  for (int use = 0; use < kPacked + 1; ++use) {
    linear_forward(ctx, x.data(), WeightMatrix{w.data(), 1, 1}, bias.data(), got.data(), s);
    ASSERT_EQ(got, want);
  }
}

// The elements change in place, like those of a Parameter: a product must not use the packed copy of an older
// version.
TEST(PackedWeights, AnotherVersionIsPackedAnew) {
  const std::int64_t m = 4, n = 128, k = 96;
  KernelContext ctx(1);
  const auto a = random_array<bf16>(m * k, 1);
  auto b = random_array<bf16>(k * n, 2);
  auto got = garbage(m * n), want = got;
  for (std::uint64_t version = 1; version < 6; ++version) {
    b = random_array<bf16>(k * n, static_cast<unsigned>(version));
    matmul(ctx, a.data(), Stored::plain, b.data(), Stored::plain, want.data(), m, n, k, false);
    for (int use = 0; use < kPacked + 2; ++use) {
      matmul(ctx, a.data(), Stored::plain, WeightMatrix{b.data(), 1, version}, Stored::plain, got.data(), m,
             n, k, false);
      ASSERT_EQ(got, want) << "version " << version << " use " << use;
    }
  }
  if (packs_here()) {
    EXPECT_EQ(ctx.state().packed.bytes(), bytes_of(ctx, n, k));
  }
}

TEST(PackedWeights, MemoryIsBoundedAndOldOnesMakeRoom) {
  if (!packs_here()) GTEST_SKIP() << "bf16 is widened here";
  const std::int64_t m = 2, n = 64, k = 64;
  KernelContext ctx(1);
  const std::size_t one_matrix = bytes_of(ctx, n, k);
  PackedWeights& packed = ctx.state().packed;
  packed.limit = 3 * one_matrix;
  const auto a = random_array<bf16>(m * k, 1), b = random_array<bf16>(k * n, 2);
  auto got = garbage(m * n), want = got;
  matmul(ctx, a.data(), Stored::plain, b.data(), Stored::plain, want.data(), m, n, k, false);
  const auto use = [&](std::uint64_t weight) {
    matmul(ctx, a.data(), Stored::plain, WeightMatrix{b.data(), weight, 1}, Stored::plain, got.data(), m, n,
           k, false);
    ASSERT_EQ(got, want);
    ASSERT_LE(packed.bytes(), packed.limit);
  };
  for (int round = 0; round < 5; ++round)
    for (std::uint64_t weight = 1; weight <= 8; ++weight) use(weight);
  EXPECT_EQ(packed.bytes(), 3 * one_matrix);  // the first three; the others are multiplied as they are
  EXPECT_EQ(packed.is_packed(1) + packed.is_packed(2) + packed.is_packed(3), 3);
  for (std::uint64_t turn = 0; turn < 2 * PackedWeights::kOldAfter; ++turn) use(8);
  EXPECT_TRUE(packed.is_packed(8));
  EXPECT_FALSE(packed.is_packed(1));
  EXPECT_EQ(packed.bytes(), 3 * one_matrix);
  for (std::uint64_t weight = 100; weight < 100 + 2 * PackedWeights::kMostEntries; ++weight) use(weight);
  EXPECT_LE(packed.entries(), PackedWeights::kMostEntries);
}

// --- layers

struct Passes {
  std::vector<float> y, dx;
};

Passes passes(Linear& layer, const Tensor& x, const Tensor& dy, Compute& compute) {
  layer.weight->zero_gradient();
  Frame frame(compute);
  const Tensor y = layer.forward(x, frame)[0];
  return {floats(y), floats(layer.backward(dy, frame)[0])};
}

// The same layer, new, with the elements of `weight` (bf16, as layers read it).
Passes fresh(const Tensor& master, const Tensor& x, const Tensor& dy) {
  weft::test::Bench bench;
  Linear layer(master.size(1), master.size(0), false);
  layer.weight->set_dtype(DType::bf16);
  materialise(layer, bench.compute);
  std::ranges::copy(master.f32(), layer.weight->write_master().f32().begin());
  const auto copied = [&](const Tensor& t) { return tensor_of(bench.context, t.shape(), floats(t)); };
  return passes(layer, copied(x), copied(dy), bench.compute);
}

void expect_as_fresh(Linear& layer, const Tensor& master, const Tensor& x, const Tensor& dy, Compute& compute,
                     const char* what) {
  for (int use = 0; use < kPacked + 2; ++use) {
    const Passes got = passes(layer, x, dy, compute), want = fresh(master, x, dy);
    ASSERT_EQ(got.y, want.y) << what << ", use " << use;
    ASSERT_EQ(got.dx, want.dx) << what << ", use " << use;
  }
}

TEST(PackedWeights, LayersNeverSeeAnOlderWeight) {
  weft::test::Bench bench;
  Linear layer(96, 128, false);
  layer.weight->set_dtype(DType::bf16);
  materialise(layer, bench.compute);
  initialise(layer, 5);
  Parameter& w = *layer.weight;
  const Tensor x = random_tensor(bench.context, {7, 96}, "x"),
               dy = random_tensor(bench.context, {7, 128}, "dy");
  const auto expect = [&](const char* what) {
    ASSERT_NO_FATAL_FAILURE(expect_as_fresh(layer, w.master(), x, dy, bench.compute, what));
  };
  expect("at first");
  SGD sgd(bench.compute, layer.parameters(), {});
  sgd.step(0.5);
  expect("after a step of the optimizer");
  w.write_master().f32()[17] += 3.0f;
  expect("one element written");
  const TensorView view = w.write_master().view();  // as code from outside writes: through a view
  std::fill_n(reinterpret_cast<float*>(view.data), 96, -1.5f);
  expect("written through a view");
  w.set_master(random_tensor(bench.context, {128, 96}, "loaded"));
  expect("another master");

  // The code that gathers placed weights writes them in place and without a notice.
  const Tensor wide = random_tensor(bench.context, {128, 96}, "gathered");
  const Tensor placed(bench.context, {128, 96}, DType::bf16);
  const auto gather = [&] {
    round_to_bf16(kernels_of(bench.compute), wide.data_ptr<float>(), placed.data_ptr<bf16>(), wide.count());
  };
  gather();
  w.place_weight(placed);
  ASSERT_NO_FATAL_FAILURE(expect_as_fresh(layer, wide, x, dy, bench.compute, "placed"));
  wide.f32()[5] = 9.0f;
  gather();
  ASSERT_NO_FATAL_FAILURE(expect_as_fresh(layer, wide, x, dy, bench.compute, "gathered again in place"));
  w.drop_weight();
  expect("back at the master");
}

// 1x1 convolutions of few pixels multiply by their packed weight, too. Others do not. The same bits in every
// use.
TEST(PackedWeights, ConvolutionsOfFewPixels) {
  for (const auto& [height, width] : {std::pair{1, 1}, {2, 4}, {4, 4}, {5, 5}}) {
    SCOPED_TRACE(::testing::Message() << height << "x" << width);
    weft::test::Bench bench;
    constexpr std::int64_t kBatch = 2, kIn = 96, kOut = 130;
    Conv2d layer({.in = kIn, .out = kOut, .bias = false, .init = Normal{0.1}});
    layer.weight->set_dtype(DType::bf16);
    materialise(layer, bench.compute);
    initialise(layer, 5);
    const std::int64_t pixels = height * width;
    const Tensor x = random_tensor(bench.context, {kBatch, kIn, height, width}, "x"),
                 dy = random_tensor(bench.context, {kBatch, kOut, height, width}, "dy");
    const auto rounded = [](float f) { return static_cast<double>(static_cast<float>(bf16(f))); };
    const auto w = [&](std::int64_t o, std::int64_t i) {
      return static_cast<double>(static_cast<float>(layer.weight->weight().data_ptr<bf16>()[o * kIn + i]));
    };
    std::vector<double> y, dx;
    for (std::int64_t b = 0; b < kBatch; ++b) {
      for (std::int64_t o = 0; o < kOut; ++o)
        for (std::int64_t p = 0; p < pixels; ++p) {
          double sum = 0;
          for (std::int64_t i = 0; i < kIn; ++i)
            sum += w(o, i) * rounded(x.f32()[static_cast<std::size_t>((b * kIn + i) * pixels + p)]);
          y.push_back(sum);
        }
      for (std::int64_t i = 0; i < kIn; ++i)
        for (std::int64_t p = 0; p < pixels; ++p) {
          double sum = 0;
          for (std::int64_t o = 0; o < kOut; ++o)
            sum += w(o, i) * rounded(dy.f32()[static_cast<std::size_t>((b * kOut + o) * pixels + p)]);
          dx.push_back(sum);
        }
    }
    std::vector<float> first_y, first_dx;
    for (int use = 0; use < kPacked + 1; ++use) {
      Frame frame(bench.compute);
      const Tensor got_y = layer.forward(x, frame)[0], got_dx = layer.backward(dy, frame)[0];
      weft::test::expect_near(got_y, y, 1e-5, "y");
      weft::test::expect_near(got_dx, dx, 1e-5, "dx");
      if (use == 0) first_y = floats(got_y), first_dx = floats(got_dx);
      EXPECT_EQ(floats(got_y), first_y) << use;
      EXPECT_EQ(floats(got_dx), first_dx) << use;
    }
    const KernelContext::State& state = kernels_of(bench.compute).state();
    EXPECT_EQ(state.packed.is_packed(layer.weight->number()), pixels <= 16 && packs_here());
  }
}

// y and dx of few pixels have the bits that they have in a larger map, of which a rank may have any part:
// long sums, a single channel, a single pixel, a weight that is not packed yet and one that is.
TEST(PackedWeights, FewPixelsHaveTheBitsOfALargerMap) {
  constexpr std::int64_t kAll = 40;
  for (const auto& [in, out] : {std::pair<std::int64_t, std::int64_t>{2048, 64},
                                {64, 2048},
                                {1500, 33},
                                {1025, 100},
                                {1, 1500},
                                {2048, 1},
                                {3000, 3000}}) {
    weft::test::Bench bench;
    Conv2d layer({.in = in, .out = out, .bias = false, .init = Normal{0.1}});
    layer.weight->set_dtype(DType::bf16);
    materialise(layer, bench.compute);
    initialise(layer, 5);
    const Tensor x = random_tensor(bench.context, {1, in, 1, kAll}, "x"),
                 dy = random_tensor(bench.context, {1, out, 1, kAll}, "dy");
    const auto first_of = [&](const Tensor& map, std::int64_t pixels) {
      const std::int64_t channels = map.size(1);
      const Tensor part = bench.compute.make({1, channels, 1, pixels});
      for (std::int64_t c = 0; c < channels; ++c)
        std::copy_n(map.data_ptr<float>() + c * map.size(3), pixels, part.data_ptr<float>() + c * pixels);
      return part;
    };
    Frame frame(bench.compute);
    const Tensor y = layer.forward(x, frame)[0], dx = layer.backward(dy, frame)[0];
    for (const std::int64_t pixels : {1, 2, 7, 16, 17}) {
      const Tensor part_of_x = first_of(x, pixels), part_of_dy = first_of(dy, pixels);
      for (int use = 0; use < kPacked + 1; ++use) {
        SCOPED_TRACE(::testing::Message() << in << " to " << out << ", " << pixels << " pixels, use " << use);
        Frame again(bench.compute);
        EXPECT_EQ(floats(layer.forward(part_of_x, again)[0]), floats(first_of(y, pixels)));
        EXPECT_EQ(floats(layer.backward(part_of_dy, again)[0]), floats(first_of(dx, pixels)));
      }
    }
  }
}

// A parameter that takes the place of another, whose memory it gets, too.
TEST(PackedWeights, AnotherParameterInTheSamePlace) {
  weft::test::Bench bench;
  const Tensor x = random_tensor(bench.context, {3, 64}, "x"),
               dy = random_tensor(bench.context, {3, 64}, "dy");
  for (std::uint64_t seed = 1; seed < 4; ++seed) {
    Linear layer(64, 64, false);
    layer.weight->set_dtype(DType::bf16);
    materialise(layer, bench.compute);
    initialise(layer, seed);
    ASSERT_NO_FATAL_FAILURE(
        expect_as_fresh(layer, layer.weight->master(), x, dy, bench.compute, "a new one"));
  }
}

// Two layers, each with a Compute of its own, used in turns on Frames of one of them.
TEST(PackedWeights, WeightsOfSeveralComputesOnOneFrame) {
  weft::test::Bench bench;
  Compute other(bench.context, 1);
  Linear first(64, 512, false), second(64, 512, false);
  std::uint64_t seed = 1;
  for (Linear* layer : {&first, &second}) {
    layer->weight->set_dtype(DType::bf16);
    materialise(*layer, layer == &first ? bench.compute : other);
    initialise(*layer, seed++);
  }
  EXPECT_NE(first.weight->number(), second.weight->number());
  const Tensor x = random_tensor(bench.context, {16, 64}, "x"),
               dy = random_tensor(bench.context, {16, 512}, "dy");
  for (int use = 0; use < kPacked + 2; ++use)
    for (Linear* layer : {&first, &second}) {
      const Passes got = passes(*layer, x, dy, bench.compute), want = fresh(layer->weight->master(), x, dy);
      ASSERT_EQ(got.y, want.y) << (layer == &first ? "first" : "second") << ", use " << use;
      ASSERT_EQ(got.dx, want.dx) << (layer == &first ? "first" : "second") << ", use " << use;
    }
}

}  // namespace
}  // namespace weft::kernels::packed_weights_test
