// Spectral norms under tensor parallelism. Blocks that have one stay whole, or are split with it. They then
// compute the results of one rank, over several passes of a training.
#include "weft/nn/spectral_norm.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft::tp_spectral_norm_test {
namespace {

using test::random_tensor;
using test::Rank;
using test::Ranks;

// Sums of at most 96 products in another order, through two power iterations: some units of the last place of
// what is largest.
constexpr double kTolerance = 4e-5;
void expect_near(const Tensor& got, const Tensor& expected, const std::string& what) {
  test::expect_near(got, expected, what, kTolerance);
}

using Make = std::function<std::unique_ptr<Module>()>;
using Split = std::function<void(Module&, const DeviceMesh& tp)>;

// Runs the module twice, plain and over the mesh: two training passes, then one inference pass.
void expect_as_serial(Rank& rank, const MeshShape& shape, const Make& make, const Shape& x_shape,
                      const Split& split) {
  SCOPED_TRACE(to_string(shape));
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  const std::unique_ptr<Module> serial = make(), parallel = make();
  split(*parallel, mesh["tp"]);
  replicate(*parallel, mesh);
  for (Module* m : {serial.get(), parallel.get()}) {
    materialise(*m, compute);
    initialise(*m, 3);
  }
  const auto part = [&](const Tensor& t) {
    return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
  };
  for (int pass = 0; pass < 2; ++pass) {
    const Tensor x = random_tensor(rank.context, x_shape, "x" + std::to_string(pass));
    Frame plain(compute), frame(compute);
    const Tensor y = serial->forward(x, plain)[0];
    expect_near(full(parallel->forward(part(x), frame)[0]), y, "y");
    const Tensor dy = random_tensor(rank.context, y.shape(), "dy" + std::to_string(pass));
    const Tensor dx = serial->backward(dy, plain)[0];
    expect_near(full(parallel->backward(part(dy), frame)[0]), dx, "dx");
    for (Parameter* p : serial->parameters()) {
      const ParameterRef other = parallel->parameter(p->path());
      ASSERT_TRUE(other->has_gradient()) << p->path();
      expect_near(full(other->gradient()), p->gradient(), "gradient of " + p->path());
    }
    for (std::size_t i = 0; i < serial->buffers().size(); ++i)
      expect_near(full(parallel->buffers()[i]->tensor()), serial->buffers()[i]->tensor(),
                  serial->buffers()[i]->path());
  }
  const Tensor x = random_tensor(rank.context, x_shape, "x");
  Frame plain = Frame::inference(compute), frame = Frame::inference(compute);
  expect_near(full(parallel->forward(part(x), frame)[0]), serial->forward(x, plain)[0], "y of inference");
}

const MeshShape kMeshes[] = {
    {{"dp", 1}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}}, {{"dp", 1}, {"tp", 4}}};

void expect_as_serial(const Make& make, const Shape& x, const Split& split) {
  for (const MeshShape& shape : kMeshes)
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_as_serial(rank, shape, make, x, split); });
}

std::unique_ptr<Module> pair_of_linears() {
  auto pair = std::make_unique<Sequential>();
  for (const auto& [in, out] : {std::pair{8, 24}, std::pair{24, 6}}) {
    auto layer = std::make_unique<Linear>(in, out, true, Normal{0.5});
    layer->bias->set_init(Normal{1});
    layer->add_spectral_norm({.power_iterations = 2});
    pair->append(std::move(layer));
    if (in == 8) pair->append(std::make_unique<GELU>());
  }
  return pair;
}

void split_pair(Module& pair, const DeviceMesh& tp) {
  parallelize(pair, tp, Plan{{"0", Style::column}, {"2", Style::row}});
  if (tp.size() == 1) return;
  EXPECT_EQ(to_string(pair.buffers()[0]->layout()->on("tp")), "Shard(0)");
  EXPECT_EQ(pair.buffers()[1]->layout(), nullptr);
  EXPECT_EQ(pair.buffers()[2]->layout(), nullptr);
  EXPECT_EQ(to_string(pair.buffers()[3]->layout()->on("tp")), "Shard(0)");
}

TEST(SpectralNormOverRanks, ColumnThenRowIsAsOnOneRank) {
  expect_as_serial(pair_of_linears, {4, 3, 8}, split_pair);
}

TEST(SpectralNormOverRanks, TheSameOverProcesses) {
  test::run_ranks(Ranks::processes, 2, [](Rank& rank) {
    expect_as_serial(rank, {{"dp", 1}, {"tp", 2}}, pair_of_linears, {4, 3, 8}, split_pair);
  });
}

TEST(SpectralNormOverRanks, ConvolutionsToo) {
  expect_as_serial(
      [] {
        auto pair = std::make_unique<Sequential>();
        pair->append(std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 8, .init = Normal{0.5}}));
        pair->append(std::make_unique<GELU>());
        pair->append(std::make_unique<Conv2d>(Conv2dConfig{.in = 8, .out = 4, .init = Normal{0.5}}));
        add_spectral_norm(*pair);
        return pair;
      },
      {4, 4, 3, 2}, split_pair);
}

// Two blocks; `with` says which have spectral norms.
std::unique_ptr<Module> blocks(bool first, bool second) {
  auto model = std::make_unique<Sequential>();
  for (const bool with : {first, second}) {
    auto block = std::make_unique<ChannelFeedForward>(8, 16, 0, Normal{0.5}, Normal{0.5});
    if (with) add_spectral_norm(*block);
    model->append(std::move(block));
  }
  return model;
}

bool is_split(const Module& module) {
  return std::ranges::any_of(module.parameters(), [](const Parameter* p) { return p->layout() != nullptr; });
}

TEST(SpectralNormOverRanks, SomeBlocksStayWhole) {
  expect_as_serial([] { return blocks(true, false); }, {4, 8, 2, 2},
                   [](Module& model, const DeviceMesh& tp) {
                     const OwnPlanCount count = parallelize(model, tp);
                     EXPECT_EQ(count.split, 1);
                     EXPECT_EQ(count.skipped, 1);
                     EXPECT_FALSE(is_split(model.get("0")));
                     EXPECT_EQ(is_split(model.get("1")), tp.size() > 1);
                   });
}

TEST(SpectralNormOverRanks, AllBlocksStayWhole) {
  expect_as_serial([] { return blocks(true, true); }, {4, 8, 2, 2},
                   [](Module& model, const DeviceMesh& tp) {
                     const OwnPlanCount count = parallelize(model, tp);
                     EXPECT_EQ(count.split, 0);
                     EXPECT_EQ(count.skipped, 2);
                     EXPECT_FALSE(is_split(model));
                   });
}

TEST(SpectralNormOverRanks, OnRequestAllBlocksAreSplit) {
  expect_as_serial([] { return blocks(true, true); }, {4, 8, 2, 2},
                   [](Module& model, const DeviceMesh& tp) {
                     const OwnPlanCount count =
                         parallelize(model, tp, OwnPlanOptions{.under_spectral_norm = WholeByDefault::split});
                     EXPECT_EQ(count.split, 2);
                     EXPECT_EQ(is_split(model.get("0")), tp.size() > 1);
                     EXPECT_EQ(is_split(model.get("1")), tp.size() > 1);
                   });
}

// u of another cut than the weight's rows would give another sigma: an error.
TEST(SpectralNormOverRanks, VectorsThatAreNotCutAsTheWeightAreALayoutError) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    Linear layer(4, 6);
    layer.add_spectral_norm();
    layer.weight->set_layout(make_layout(mesh, {{"tp", Shard{0}}}, {6, 4}));
    replicate(layer, mesh);
    Compute compute(rank.context);
    materialise(layer, compute);
    initialise(layer, 1);
    Frame frame(compute);
    const Tensor x = random_tensor(rank.context, {2, 4}, "x");
    const Error e =
        test::error_of([&] { layer.forward(as_layout(x, replicated_layout(mesh, x.shape())), frame); });
    EXPECT_EQ(e.code(), ErrorCode::layout);
    EXPECT_STREQ(e.what(),
                 "spectral norm of \"weight_orig\": this rank has (3, 4) of the weight, 6 of u and 4 of v; "
                 "expected u cut as the rows, and v as the columns");
  });
}

}  // namespace
}  // namespace weft::tp_spectral_norm_test
