// Parallel layers give, forward and backward, what the same layers give on one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/tp/parallelize.hpp"

namespace weft::serial_test {
namespace {

using test::expect_near;
using test::random_tensor;
using test::Rank;
using test::Ranks;

// dp 3 cuts the four rows of x unevenly; tp 3 is for layers whose sizes it divides.
const MeshShape kMeshes[] = {{{"dp", 1}, {"tp", 1}}, {{"dp", 3}, {"tp", 1}}, {{"dp", 1}, {"tp", 3}},
                             {{"dp", 2}, {"tp", 1}}, {{"dp", 1}, {"tp", 2}}, {{"dp", 2}, {"tp", 2}},
                             {{"dp", 1}, {"tp", 4}}};

// Runs the module twice: plain, and over the mesh by `plan`.
void expect_as_serial(const std::function<std::unique_ptr<Module>()>& make, const Shape& x_shape,
                      const Shape& y_shape, const Plan& plan, bool by_three = true) {
  for (const MeshShape& shape : kMeshes) {
    if (!by_three && shape.size("tp") == 3) continue;
    SCOPED_TRACE(to_string(shape));
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute compute(rank.context);
      const Tensor x = random_tensor(rank.context, x_shape, "x"),
                   dy = random_tensor(rank.context, y_shape, "dy");

      const std::unique_ptr<Module> serial = make();
      materialise(*serial, compute);
      initialise(*serial, 3);
      Frame serial_frame(compute);
      const Tensor y = serial->forward(x, serial_frame)[0];
      const Tensor dx = serial->backward(dy, serial_frame)[0];

      DeviceMesh mesh(rank.group(), shape);
      const std::unique_ptr<Module> parallel = make();
      parallelize(*parallel, mesh["tp"], plan);
      replicate(*parallel, mesh);
      materialise(*parallel, compute);
      initialise(*parallel, 3);
      Frame frame(compute);
      const auto part = [&](const Tensor& t) {
        return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
      };
      const Tensor parallel_y = parallel->forward(part(x), frame)[0];
      expect_near(full(parallel_y), y, "y");
      EXPECT_EQ(parallel_y.layout(), make_layout(mesh, {{"dp", Shard{0}}}, y.shape()));
      const Tensor parallel_dx = parallel->backward(part(dy), frame)[0];
      expect_near(full(parallel_dx), dx, "dx");
      EXPECT_EQ(parallel_dx.layout(), make_layout(mesh, {{"dp", Shard{0}}}, x.shape()));
      for (Parameter* p : serial->parameters()) {
        const Tensor& dw = parallel->parameter(p->path())->gradient();
        expect_near(full(dw), p->gradient(), "gradient of " + p->path());
        if (mesh.size("dp") > 1) {
          EXPECT_EQ(dw.layout()->on("dp"), Placement(Partial{}));
        }
      }
    });
  }
}

// x: (4, 3, in), y: (4, 3, out)
void expect_as_serial(const std::function<std::unique_ptr<Module>()>& make, std::int64_t in, std::int64_t out,
                      const Plan& plan, bool by_three = true) {
  expect_as_serial(make, {4, 3, in}, {4, 3, out}, plan, by_three);
}

// q is split over all of tp, whose axes are kv and rep. The other half of the pair over kv alone would hold
// each head twice. This test only shows that a list of axes splits layers like one axis.
void expect_axes_as_one(const std::function<std::unique_ptr<Module>()>& make, std::int64_t in,
                        const Plan& plan) {
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Compute compute(rank.context);
    const Tensor x = random_tensor(rank.context, {4, 3, in}, "x");
    const DeviceMesh one(rank.group(), {{"tp", 4}});
    Tensor results[2];
    for (const bool apart : {false, true}) {
      const DeviceMesh mesh = apart ? one.unflatten("tp", {{"kv", 2}, {"rep", 2}}) : one;
      const std::unique_ptr<Module> module = make();
      parallelize(*module, mesh["tp"], plan);
      replicate(*module, mesh);
      materialise(*module, compute);
      initialise(*module, 3);
      Frame frame(compute);
      const Tensor stated = x.with_layout(replicated_layout(mesh, x.shape()));
      results[apart ? 1 : 0] = module->backward(module->forward(stated, frame), frame)[0];
    }
    EXPECT_TRUE(std::equal(results[0].f32().begin(), results[0].f32().end(), results[1].f32().begin()));
  });
}

std::unique_ptr<Linear> linear(std::int64_t in, std::int64_t out) {
  auto layer = std::make_unique<Linear>(in, out, true, Normal{0.5});
  layer->bias->set_init(Normal{1});
  return layer;
}

TEST(Serial, ColumnGathered) {
  expect_as_serial([] { return linear(8, 12); }, 8, 12, {{"", Style::column_gathered}});
}

TEST(Serial, AnAxisSeenAsTwoGivesTheSameBits) {
  expect_axes_as_one(
      [] {
        auto pair = std::make_unique<Sequential>();
        pair->append(linear(8, 24));
        pair->append(linear(24, 6));
        return pair;
      },
      8, {{"0", Style::column}, {"1", Style::row}});
}

// A user's own style: x is cut by sequence before and after the layer. Also: the rows of a fused weight in
// segments.
TEST(Serial, AStyleOfOnesOwnAndSegments) {
  const Style row_to_sequence{
      .name = "row_to_sequence", .split = Split::row, .after = Style::Change{Partial{}, Shard{1}}};
  const Style column_from_sequence{
      .name = "column_from_sequence", .split = Split::column, .before = Style::Change{Shard{1}, Replicate{}}};
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const Tensor x = random_tensor(rank.context, {4, 6, 8}, "x"),
                 dy = random_tensor(rank.context, {4, 6, 6}, "dy");
    const auto make = [] {
      auto pair = std::make_unique<Sequential>();
      pair->append("up", linear(8, 20));
      pair->append("down", linear(20, 6));
      return pair;
    };
    const auto serial = make(), parallel = make();
    Tensor y[2], dx[2];
    for (const bool split : {false, true}) {
      Sequential& module = split ? *parallel : *serial;
      if (split) {
        parallelize(module, mesh["tp"], {{"up", column_from_sequence}, {"down", row_to_sequence}});
        // The rows of `up`, the columns of `down` and its bias: three heads of 8, 8 and 4 features.
        for (const auto& [path, dim] :
             {std::pair{"up.weight", 0}, std::pair{"up.bias", 0}, std::pair{"down.weight", 1}}) {
          Parameter& p = *module.parameter(path);
          p.set_layout(p.layout()->segmented(dim, {8, 8, 4}));
        }
        replicate(module, mesh);
      }
      materialise(module, compute);
      initialise(module, 3);
      Frame frame(compute);
      const auto part = [&](const Tensor& t) {
        return split ? distribute(t, make_layout(mesh, {Shard{0}, Shard{1}}, t.shape())) : t;
      };
      y[split ? 1 : 0] = full(module.forward(part(x), frame)[0]);
      dx[split ? 1 : 0] = full(module.backward(part(dy), frame)[0]);
    }
    expect_near(y[1], y[0], "y");
    expect_near(dx[1], dx[0], "dx");
    for (Parameter* p : serial->parameters())
      expect_near(full(parallel->parameter(p->path())->gradient()), p->gradient(),
                  "gradient of " + p->path());
    // If the features between the layers are cut differently, the layer throws and does not compute a wrong
    // product.
    Linear down(20, 6);
    down.weight->set_layout(make_layout(mesh, {{"tp", Shard{1}}}, {6, 20}));
    materialise(down, compute);
    initialise(down, 1);
    Frame frame(compute);
    const LayoutRef segmented = make_layout(mesh, {{"tp", Shard{1}}}, {3, 20})->segmented(1, {8, 8, 4});
    try {
      down.forward(as_layout(Tensor::zeros(rank.context, segmented->local_shape()), segmented), frame);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_STREQ(
          e.what(),
          "\"\": x is (3, 20) as [dp: Replicate, tp: Shard(1)] in segments 8, 8, 4 of dimension 1, the "
          "weight (6, 20) as [dp: Replicate, tp: Shard(1)]; expected the same segments of features");
    }
  });
}

TEST(Serial, ColumnThenRow) {
  expect_as_serial(
      [] {
        auto pair = std::make_unique<Sequential>();
        pair->append(linear(8, 24));
        pair->append(linear(24, 6));
        return pair;
      },
      8, 6, {{"0", Style::column}, {"1", Style::row}});
}

TEST(Serial, SwiGLUWithOneBoundaryForGateAndUp) {
  expect_as_serial([] { return std::make_unique<SwiGLU>(8, 24, Normal{0.5}, Normal{0.5}); }, 8, 8,
                   {{"", Style::enter},
                    {"gate_proj", Style::column},
                    {"up_proj", Style::column},
                    {"down_proj", Style::row}});
}

TEST(Serial, GroupedQueryAttention) {
  expect_as_serial(
      [] {
        return std::make_unique<Attention>(AttentionConfig{16, 8, 4, 4, Normal{0.5}, Normal{0.5}},
                                           RopeTables::make(3, 4, 10000.0));
      },
      16, 16,
      {{"", Style::enter},
       {"q_proj", Style::column},
       {"k_proj", Style::column},
       {"v_proj", Style::column},
       {"o_proj", Style::row}},
      false);
}

std::unique_ptr<Conv2d> conv(std::int64_t in, std::int64_t out) {
  Conv2dConfig config;
  config.in = in, config.out = out, config.init = Normal{0.5};
  auto layer = std::make_unique<Conv2d>(config);
  layer->bias->set_init(Normal{1});
  return layer;
}

// Channels are dimension 1, which the style "gathered" gathers.
TEST(Serial, Conv2dByColumnsGathered) {
  expect_as_serial([] { return conv(8, 12); }, {4, 8, 2, 3}, {4, 12, 2, 3}, {{"", Style::column_gathered}});
}

TEST(Serial, Conv2dByColumnsThenByRows) {
  expect_as_serial(
      [] {
        auto pair = std::make_unique<Sequential>();
        pair->append(conv(8, 24));
        pair->append(std::make_unique<GELU>());
        pair->append(conv(24, 6));
        return pair;
      },
      {4, 8, 2, 3}, {4, 6, 2, 3}, {{"0", Style::column}, {"2", Style::row}});
}

TEST(Serial, AConv2dThatIsNotPlainTakesWholeMapsAndAWholeWeight) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    Compute compute(rank.context);
    Conv2dConfig config;
    config.in = 2, config.out = 2, config.kernel = 3, config.padding = 1;
    const auto text = [&](Conv2d& layer, const Placement& of_x) {
      Frame frame(compute);
      const LayoutRef layout = make_layout(mesh, {{"tp", of_x}}, {2, 2, 4, 4});
      const Error e = test::error_of([&] {
        layer.forward(as_layout(Tensor::zeros(rank.context, layout->local_shape()), layout), frame);
      });
      EXPECT_EQ(e.code(), ErrorCode::layout);
      return std::string(e.what());
    };
    Conv2d whole(config), cut(config);
    replicate(whole, mesh);
    cut.weight->set_layout(make_layout(mesh, {{"tp", Shard{0}}}, {2, 2, 3, 3}));
    replicate(cut, mesh);
    for (Conv2d* layer : {&whole, &cut}) {
      materialise(*layer, compute);
      initialise(*layer, 1);
    }
    EXPECT_EQ(text(whole, Shard{2}),
              "\"\": x is Shard(2) on tp=2; a convolution that is not 1x1 needs dimension 2 whole: a "
              "boundary must gather it "
              "first");
    EXPECT_EQ(text(cut, Replicate{}),
              "\"weight\" is Shard(0) on tp=2; expected Replicate (a convolution that is not 1x1)");
  });
}

// Small integers, so that every sum is exact. A bias that is added per rank, or whose gradient is scaled by
// the number of ranks, then shows.
TEST(Serial, RowBiasAndItsGradientAreNotScaled) {
  for (const int ranks : {1, 2, 4})
    test::run_ranks(Ranks::threads, ranks, [](Rank& rank) {
      DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", rank.size}});
      Linear layer(4, 2, true);
      parallelize(layer, mesh["tp"], {{"", Style::row}});
      replicate(layer, mesh);
      Compute compute(rank.context);
      materialise(layer, compute);
      for (float& w : layer.weight->write_master().f32()) w = 2;
      layer.bias->write_master().f32()[0] = 100;
      layer.bias->master().f32()[1] = -7;
      Frame frame(compute);
      // x: (3, 4), all ones, split by features; dy: (3, 2), each row (1, 10)
      const LayoutRef layout = make_layout(mesh, {{"tp", Shard{1}}}, {3, 4});
      Tensor x(rank.context, layout->local_shape());
      for (float& v : x.f32()) v = 1;
      const Tensor y = layer.forward(as_layout(x, layout), frame)[0];
      Tensor dy(rank.context, {3, 2});
      for (std::size_t row = 0; row < 3; ++row) {
        EXPECT_EQ(y.f32()[row * 2], 4 * 2 + 100);
        EXPECT_EQ(y.f32()[row * 2 + 1], 4 * 2 - 7);
        dy.f32()[row * 2] = 1;
        dy.f32()[row * 2 + 1] = 10;
      }
      layer.backward(as_layout(dy, replicated_layout(mesh, {3, 2})), frame);
      EXPECT_EQ(layer.bias->gradient().f32()[0], 3);
      EXPECT_EQ(layer.bias->gradient().f32()[1], 30);
      EXPECT_EQ(layer.bias->gradient_layout(), replicated_layout(mesh, {2}));
    });
}

TEST(Serial, ARowLayerGivenWholeFeaturesIsALayoutError) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    auto pair = std::make_unique<Sequential>();
    pair->append(linear(8, 24));
    pair->append(linear(24, 6));
    parallelize(*pair, mesh["tp"], {{"1", Style::row}});
    replicate(*pair, mesh);
    Compute compute(rank.context);
    materialise(*pair, compute);
    initialise(*pair, 3);
    Frame frame(compute);
    const Tensor x = random_tensor(rank.context, {3, 8}, "x");
    const Error e =
        test::error_of([&] { pair->forward(as_layout(x, replicated_layout(mesh, x.shape())), frame); });
    EXPECT_EQ(e.code(), ErrorCode::layout);
    EXPECT_STREQ(e.what(), "\"1\": x is Replicate on tp=2; expected Shard(1), since the weight is Shard(1)");
  });
}

}  // namespace
}  // namespace weft::serial_test
