// Dropout: the dropped elements are the same on every mesh and for every cut into micro-batches. Also
// Frame::pass() and rng().
#include <fmt/format.h>

#include <cmath>
#include <set>

#include "nn/support.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/dropout.hpp"

namespace weft::dropout_test {
namespace {

using test::error_text;
using test::floats;
using test::random_tensor;

const Pass kPass{.seed = 7, .step = 3};

std::vector<float> dropped(Dropout& layer, const Tensor& x, Compute& compute, const Pass& pass = kPass) {
  Frame frame(compute, pass);
  return floats(layer.forward(x, frame)[0]);
}

Tensor ones(Context& context, const Shape& shape) {
  Tensor t(context, shape);
  std::ranges::fill(t.f32(), 1.0f);
  return t;
}

TEST(Dropout, DropsTheGivenPartAndScalesTheRest) {
  test::Bench bench;
  Dropout layer(0.25);
  const Tensor x = ones(bench.context, {100, 100});
  const std::vector<float> y = dropped(layer, x, bench.compute);
  const auto zeros = std::ranges::count(y, 0.0f);
  EXPECT_NEAR(static_cast<double>(zeros), 2500, 5 * std::sqrt(10000 * 0.25 * 0.75));
  EXPECT_EQ(std::ranges::count(y, 1.0f / 0.75f), 10000 - zeros);
}

TEST(Dropout, TheGradientHasTheHolesOfTheOutput) {
  test::Bench bench;
  Dropout layer(0.5);
  const Tensor x = ones(bench.context, {8, 5});
  Frame frame(bench.compute, kPass);
  const std::vector<float> y = floats(layer.forward(x, frame)[0]);
  EXPECT_EQ(floats(layer.backward(x, frame)[0]), y);
  EXPECT_TRUE(frame.empty());
}

// A gradient of another form would drop other elements than forward did.
TEST(Dropout, TheGradientHasTheFormOfTheOutput) {
  test::Bench bench;
  Dropout layer(0.5);
  Frame frame(bench.compute, kPass);
  layer.forward(ones(bench.context, {8, 5}), frame);
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.backward(ones(bench.context, {5, 8}), frame);
                       }),
            "\"\": dy is (5, 8); expected (8, 5)");
  const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"dp", 2}}, 0);
  const Tensor x = ones(bench.context, {8, 5}).with_layout(make_layout(mesh, {Shard{0}}, {16, 5}));
  layer.forward(x, frame);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         layer.backward(x.with_layout(make_layout(mesh, {Shard{1}}, {8, 10})), frame);
                       }),
            "\"\": dy is (8, 10) as [dp: Shard(1)]; expected (16, 5) as [dp: Shard(0)] (as y)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] { layer.forward(Tensor::zeros(bench.context, {2}, DType::f16), frame); }),
            "\"\": x is f16; expected f32 or bf16");
}

TEST(Dropout, DoesNothingOutsideOfTrainingOrForPZero) {
  test::Bench bench;
  const Tensor x = random_tensor(bench.context, {4, 5}, "x");
  Dropout layer(0.5), none(0);
  Frame frame = Frame::inference(bench.compute);
  EXPECT_EQ(floats(layer.forward(x, frame)[0]), floats(x));
  EXPECT_EQ(dropped(layer, x, bench.compute, {.training = false}), floats(x));
  EXPECT_EQ(dropped(none, x, bench.compute), floats(x));
}

TEST(Dropout, DependsOnSeedStepMicroBatchAndPath) {
  test::Bench bench;
  Sequential model;
  auto& first = static_cast<Dropout&>(model.append(std::make_unique<Dropout>(0.5)));
  auto& second = static_cast<Dropout&>(model.append(std::make_unique<Dropout>(0.5)));
  const Tensor x = ones(bench.context, {16, 16});
  const std::vector<float> y = dropped(first, x, bench.compute);
  EXPECT_EQ(dropped(first, x, bench.compute), y);
  EXPECT_NE(dropped(second, x, bench.compute), y);
  EXPECT_NE(dropped(first, x, bench.compute, {.seed = 8, .step = 3}), y);
  EXPECT_NE(dropped(first, x, bench.compute, {.seed = 7, .step = 4}), y);
  EXPECT_NE(dropped(first, x, bench.compute, {.seed = 7, .step = 3, .micro_batch = 1}), y);
}

TEST(Dropout, MicroBatchesDrawWhatTheWholeBatchDraws) {
  test::Bench bench;
  Dropout layer(0.5);
  const std::vector<float> whole = dropped(layer, ones(bench.context, {6, 3, 4}), bench.compute);
  std::vector<float> joined;
  for (std::int64_t i = 0; i < 3; ++i)
    std::ranges::copy(dropped(layer, ones(bench.context, {2, 3, 4}), bench.compute,
                              {.seed = 7, .step = 3, .micro_batch = i}),
                      std::back_inserter(joined));
  EXPECT_EQ(joined, whole);
}

// Micro-batch 1 with two samples would drop the same elements as micro-batch 0 with four.
TEST(Dropout, RefusesMicroBatchesOfUnequalSizesOnEveryMesh) {
  test::Bench bench;
  const auto step = [&](const std::vector<std::int64_t>& sizes, const DeviceMesh& mesh, std::int64_t from) {
    Dropout layer(0.5);
    for (std::int64_t i = 0; i < std::ssize(sizes); ++i) {
      const Shape global{sizes[static_cast<std::size_t>(i)], 6};
      const LayoutRef layout = mesh ? make_layout(mesh, {Shard{0}}, global) : nullptr;
      const Tensor x = ones(bench.context, layout ? layout->local_shape() : global).with_layout(layout);
      dropped(layer, x, bench.compute, {.seed = 7, .step = 3, .micro_batch = from + i});
    }
  };
  for (int rank = -1; rank < 2; ++rank) {
    const DeviceMesh mesh =
        rank < 0 ? DeviceMesh() : DeviceMesh::arithmetic(bench.context, {{"dp", 2}}, rank);
    const auto text = [&](const std::vector<std::int64_t>& sizes) {
      return error_text(ErrorCode::bad_argument, [&] { step(sizes, mesh, 0); });
    };
    EXPECT_EQ(text({4, 2}),
              "\"\": micro-batch 1 of step 3 has 2 samples, micro-batch 0 had 4; expected as many, or "
              "Pass::first_sample");
    EXPECT_EQ(text({4, 4, 6}),
              "\"\": micro-batch 2 of step 3 has 6 samples, micro-batch 1 had 4; expected as many, or "
              "Pass::first_sample");
    step({4, 4, 4}, mesh, 0);
    step({4, 4}, mesh, 1);
  }
}

// The first micro-batch of a step, another step, another seed, and a pass that does not train begin again.
TEST(Dropout, AStepMayHaveOtherSizesThanTheOneBefore) {
  test::Bench bench;
  Dropout layer(0.5);
  const auto draw = [&](std::int64_t samples, const Pass& pass) {
    dropped(layer, ones(bench.context, {samples, 3}), bench.compute, pass);
  };
  draw(4, {.seed = 7, .step = 3, .micro_batch = 1});
  draw(6, {.seed = 7, .step = 3});
  draw(5, {.seed = 7, .step = 4, .micro_batch = 1});
  draw(3, {.seed = 8, .step = 4, .micro_batch = 2});
  draw(2, {.seed = 8, .step = 4, .micro_batch = 3, .training = false});
  draw(3, {.seed = 8, .step = 4, .micro_batch = 4});
}

TEST(Dropout, UnequalMicroBatchesThatSayTheirFirstSampleDrawWhatTheWholeBatchDraws) {
  test::Bench bench;
  Dropout layer(0.5);
  const std::vector<float> whole = dropped(layer, ones(bench.context, {7, 3, 4}), bench.compute);
  std::vector<float> joined, numbers;
  std::int64_t first = 0;
  for (const std::int64_t samples : {3, 0, 3, 1}) {
    const Pass pass{.seed = 7, .step = 3, .micro_batch = 5, .first_sample = first};
    std::ranges::copy(dropped(layer, ones(bench.context, {samples, 3, 4}), bench.compute, pass),
                      std::back_inserter(joined));
    const Tensor drawn(bench.context, {samples, 3, 4});
    Frame(bench.compute, pass).rng(layer.path()).uniform(drawn);
    std::ranges::copy(drawn.f32(), std::back_inserter(numbers));
    first += samples;
  }
  EXPECT_EQ(joined, whole);
  for (std::size_t i = 0; i < whole.size(); ++i) EXPECT_EQ(whole[i] == 0, numbers[i] < 0.5f) << i;
}

// For every layout over 2 x 3 ranks a rank's numbers are its part of the global tensor.
TEST(Dropout, IsTheSameOnEveryMesh) {
  test::Bench bench;
  Dropout layer(0.5);
  const Shape global{5, 4, 6};
  const std::vector<float> whole = dropped(layer, ones(bench.context, global), bench.compute);
  const std::vector<Placement> ways = {Replicate{}, Shard{0}, Shard{1}, Shard{2}};
  for (int rank = 0; rank < 6; ++rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"dp", 2}, {"tp", 3}}, rank);
    for (const Placement& on_dp : ways)
      for (const Placement& on_tp : ways) {
        const LayoutRef layout = make_layout(mesh, {on_dp, on_tp}, global);
        SCOPED_TRACE(to_string(*layout));
        const std::vector<float> part =
            dropped(layer, ones(bench.context, layout->local_shape()).with_layout(layout), bench.compute);
        ASSERT_EQ(layout->parts().size(), 1u);
        const Box box = layout->parts()[0];
        std::size_t at = 0;
        for (std::int64_t i = 0; i < box.shape[0]; ++i)
          for (std::int64_t j = 0; j < box.shape[1]; ++j)
            for (std::int64_t k = 0; k < box.shape[2]; ++k)
              ASSERT_EQ(part[at++],
                        whole[static_cast<std::size_t>(((i + box.offset[0]) * 4 + j + box.offset[1]) * 6 + k +
                                                       box.offset[2])]);
      }
  }
}

// --- the numbers themselves, for modules of one's own

// On every mesh, ranks that hold an element have its number, and no two elements have the same one by chance.
TEST(FrameRng, AnElementHasItsNumberOnEveryMesh) {
  test::Bench bench;
  const Frame frame(bench.compute, kPass);
  const Shape global{5, 4, 6};
  for (const bool normal : {false, true}) {
    const auto drawn = [&](const Shape& shape, const LayoutRef& layout, const Frame& f) {
      const Tensor t = Tensor(bench.context, shape).with_layout(layout);
      normal ? f.rng("noise").normal(t) : f.rng("noise").uniform(t);
      return floats(t);
    };
    const std::vector<float> whole = drawn(global, nullptr, frame);
    EXPECT_GT(std::set<float>(whole.begin(), whole.end()).size(), whole.size() - 3);
    const std::vector<Placement> ways = {Replicate{}, Shard{0}, Shard{1}, Shard{2}};
    for (int rank = 0; rank < 6; ++rank) {
      const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"dp", 2}, {"tp", 3}}, rank);
      for (const Placement& on_dp : ways)
        for (const Placement& on_tp : ways) {
          const LayoutRef layout = make_layout(mesh, {on_dp, on_tp}, global);
          SCOPED_TRACE(to_string(*layout));
          const std::vector<float> part = drawn(layout->local_shape(), layout, frame);
          const Box box = layout->parts().at(0);
          std::size_t at = 0;
          for (std::int64_t i = 0; i < box.shape[0]; ++i)
            for (std::int64_t j = 0; j < box.shape[1]; ++j)
              for (std::int64_t k = 0; k < box.shape[2]; ++k)
                ASSERT_EQ(part[at++],
                          whole[static_cast<std::size_t>(((i + box.offset[0]) * 4 + j + box.offset[1]) * 6 +
                                                         k + box.offset[2])]);
        }
    }
    // A batch in two micro-batches.
    std::vector<float> joined;
    for (std::int64_t i = 0; i < 2; ++i)
      std::ranges::copy(
          drawn({3, 4, 6}, nullptr, Frame(bench.compute, {.seed = 7, .step = 3, .micro_batch = i})),
          std::back_inserter(joined));
    EXPECT_EQ(joined, drawn({6, 4, 6}, nullptr, frame));
  }
}

TEST(FrameRng, DependsOnSeedStepAndPath) {
  test::Bench bench;
  const auto drawn = [&](const Pass& pass, const char* path) {
    const Tensor t(bench.context, {8});
    Frame(bench.compute, pass).rng(path).uniform(t);
    return floats(t);
  };
  const std::vector<float> one = drawn(kPass, "a");
  EXPECT_EQ(drawn(kPass, "a"), one);
  EXPECT_NE(drawn(kPass, "b"), one);
  EXPECT_NE(drawn({.seed = 8, .step = 3}, "a"), one);
  EXPECT_NE(drawn({.seed = 7, .step = 4}, "a"), one);
}

// Dropout drops what is below p.
TEST(FrameRng, IsWhatDropoutDraws) {
  test::Bench bench;
  Dropout layer(0.25);
  const Tensor numbers(bench.context, {3, 5, 7});
  const std::vector<float> y = dropped(layer, ones(bench.context, {3, 5, 7}), bench.compute);
  Frame(bench.compute, kPass).rng(layer.path()).uniform(numbers);
  for (std::size_t i = 0; i < y.size(); ++i) EXPECT_EQ(y[i] == 0, numbers.f32()[i] < 0.25f) << i;
}

TEST(FrameRng, RefusesAPassWithoutAStepAndContributions) {
  test::Bench bench;
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { (void)Frame(bench.compute).rng("layers.0.noise"); }),
            "\"layers.0.noise\": random numbers in step -1, micro-batch 0; expected 0 or more of both: "
            "Frame(compute, "
            "{.seed = …, .step = …}) says which pass it is");
  const DeviceMesh mesh = DeviceMesh::arithmetic(bench.context, {{"tp", 2}}, 0);
  const Tensor partial = Tensor(bench.context, {4}).with_layout(make_layout(mesh, {Partial{}}, {4}));
  EXPECT_EQ(error_text(ErrorCode::layout, [&] { Frame(bench.compute, kPass).rng("a").uniform(partial); }),
            "random numbers: out is Partial(sum) on tp=2; a tensor of random numbers needs values, not "
            "contributions to them: a boundary "
            "must reduce it first");
}

TEST(Dropout, RefusesWhatIsNoProbability) {
  EXPECT_THROW(Dropout(1 - 1e-12), Error) << "1 as f32";
  for (const double p : {-0.1, 1.0, std::nan("")})
    EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { Dropout layer(p); }),
              fmt::format("dropout: p is {}; expected 0 <= p < 1", p));
}

TEST(Dropout, RefusesAPassWithoutAStep) {
  test::Bench bench;
  Dropout layer(0.5);
  Frame frame(bench.compute), inference = Frame::inference(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { layer.forward(ones(bench.context, {2}), frame); }),
            "\"\": random numbers in step -1, micro-batch 0; expected 0 or more of both: Frame(compute, "
            "{.seed = …, "
            ".step = …}) says "
            "which pass it is");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { inference.begin(kPass); }),
            "frame: begin of a training pass on an inference Frame, which keeps nothing");
}

TEST(Frame, BeginsAPassOnlyWhereNoBackwardIsMissing) {
  test::Bench bench;
  Sequential model;
  model.append("drop", std::make_unique<Dropout>(0.5));
  Frame frame(bench.compute);
  const Tensor x = ones(bench.context, {4});
  frame.begin(kPass);
  EXPECT_EQ(frame.pass().step, 3);
  model.forward(x, frame);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { frame.begin({}); }),
            "frame: begin while the backward of \"drop\" has not run; run it, or clear() the Frame");
  model.backward(x, frame);
  frame.begin({});
  EXPECT_EQ(frame.pass().seed, 0u);
}

}  // namespace
}  // namespace weft::dropout_test
