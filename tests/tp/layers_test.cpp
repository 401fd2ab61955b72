// Norms over batches and groups, and cross-attention, over several ranks have the results of one rank.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <functional>

#include "support/errors.hpp"
#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/window_attention.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft::tp_layers_test {
namespace {

using test::expect_near;
using test::random_tensor;
using test::Rank;
using test::Ranks;

void set_up(Module& module, Compute& compute) {
  materialise(module, compute);
  initialise(module, 3);
}

std::unique_ptr<Module> with_random_gains(std::unique_ptr<Module> module) {
  for (Parameter* p : module->parameters()) p->set_init(Normal{1});
  return module;
}

// Runs the module twice: plain, and over the mesh, split as `split` says, with x cut on each axis as `of_x`
// says. Two passes of a training and one of inference; buffers, too.
void expect_as_serial(const MeshShape& shape, const std::function<std::unique_ptr<Module>()>& make,
                      const Shape& x_shape, const Placements& of_x,
                      const std::function<void(Module&, const DeviceMesh&)>& split) {
  test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
    SCOPED_TRACE(to_string(shape));
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), shape);
    const std::unique_ptr<Module> serial = make(), parallel = make();
    split(*parallel, mesh);
    replicate(*parallel, mesh);
    set_up(*serial, compute);
    set_up(*parallel, compute);
    const auto part = [&](const Tensor& t) { return distribute(t, make_layout(mesh, of_x, t.shape())); };
    for (int pass = 0; pass < 3; ++pass) {
      const Tensor x = random_tensor(rank.context, x_shape, "x" + std::to_string(pass));
      const Tensor dy = random_tensor(rank.context, x_shape, "dy" + std::to_string(pass));
      Frame plain(compute, {.training = pass < 2}), frame(compute, {.training = pass < 2});
      expect_near(full(parallel->forward(part(x), frame)[0]), serial->forward(x, plain)[0], "y");
      expect_near(full(parallel->backward(part(dy), frame)[0]), serial->backward(dy, plain)[0], "dx");
      for (std::size_t i = 0; i < serial->buffers().size(); ++i) {
        const ModuleBuffer& b = *serial->buffers()[i];
        if (b.dtype() == DType::f32)
          expect_near(full(parallel->buffers()[i]->tensor()), b.tensor(), b.path());
        else
          EXPECT_EQ(parallel->buffers()[i]->tensor().as<std::int64_t>()[0], std::min(pass + 1, 2));
      }
    }
    for (Parameter* p : serial->parameters())
      expect_near(full(parallel->parameter(p->path())->gradient()), p->gradient(), p->path());
  });
}

const Style kOwnChannels{.name = "own_channels", .split = Split::column};
void leave(Module&, const DeviceMesh&) {}
void by_channels(Module& m, const DeviceMesh& mesh) { parallelize(m, mesh["b"], Plan{{"", kOwnChannels}}); }

TEST(BatchNormOverRanks, StatisticsAreThoseOfAllSamplesAndPixels) {
  const auto make = [] { return with_random_gains(std::make_unique<BatchNorm>(6)); };
  // samples, uneven; samples and rows of pixels; samples and channels
  expect_as_serial({{"a", 3}, {"b", 1}}, make, {4, 6, 4, 3}, {Shard{0}, Replicate{}}, leave);
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {4, 6, 4, 3}, {Shard{0}, Shard{2}}, leave);
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {4, 6, 4, 3}, {Shard{0}, Shard{1}}, by_channels);
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {4, 6, 4, 3}, {Shard{0}, Replicate{}}, leave);
  expect_as_serial(
      {{"a", 2}, {"b", 1}},
      [] {
        return with_random_gains(std::make_unique<BatchNorm>(6, BatchNormConfig{.axes = {{"a", "b"}}}));
      },
      {4, 6, 4, 3}, {Shard{0}, Replicate{}}, leave);
}

// Statistics are shared only over axis b; each rank of axis a has statistics of its own samples. The running
// statistics are the mean of both. Statistics of each rank's own samples, of which one rank has none.
TEST(BatchNormOverRanks, TooFewValuesOnOneRankAreAnErrorOnAll) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    BatchNorm layer(2, {.axes = std::vector<std::string>{}});
    replicate(layer, mesh);
    set_up(layer, compute);
    const auto x = [&](std::int64_t batch) {
      const Shape shape{batch, 2, 2};
      return distribute(random_tensor(rank.context, shape, "x"),
                        make_layout(mesh, {{"dp", Shard{0}}}, shape));
    };
    Frame frame(compute);
    EXPECT_EQ(std::string(test::error_of([&] { layer.forward(x(1), frame); }).what()),
              rank.rank == 0
                  ? "\"\": x has fewer than 2 values for each channel on other ranks of dp=2; a batch norm "
                    "needs at least 2 in a training"
                  : "\"\": x has 0 value for each channel; a batch norm needs at least 2 in a training");
    EXPECT_EQ(layer.num_batches_tracked->tensor().as<std::int64_t>()[0], 0);
    EXPECT_EQ(layer.running_mean->tensor().f32()[0], 0);
    layer.forward(x(2), frame);
    EXPECT_EQ(layer.num_batches_tracked->tensor().as<std::int64_t>()[0], 1);
  });
}

TEST(BatchNormOverRanks, OverTheAxesThatAreNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"a", 2}, {"b", 2}});
    const auto make = [] { return BatchNormConfig{.axes = std::vector<std::string>{"b"}}; };
    BatchNorm layer(3, make()), halves[2] = {BatchNorm(3), BatchNorm(3)};
    replicate(layer, mesh);
    set_up(layer, compute);
    const Tensor x = random_tensor(rank.context, {4, 3, 4}, "x");
    Frame frame(compute);
    const LayoutRef layout = make_layout(mesh, {Shard{0}, Shard{2}}, x.shape());
    const Tensor y = full(layer.forward(distribute(x, layout), frame)[0]);
    for (std::size_t half = 0; half < 2; ++half) {
      set_up(halves[half], compute);
      Frame plain(compute);
      const Tensor part = x.slice_flat(static_cast<std::int64_t>(half) * 24, {2, 3, 4});
      expect_near(y.slice_flat(static_cast<std::int64_t>(half) * 24, {2, 3, 4}),
                  halves[half].forward(part, plain)[0], "y of half " + std::to_string(half));
    }
    for (std::size_t c = 0; c < 3; ++c) {
      const auto mean_of = [&](auto member) {
        return ((halves[0].*member)->tensor().f32()[c] + (halves[1].*member)->tensor().f32()[c]) / 2;
      };
      EXPECT_NEAR(layer.running_mean->tensor().f32()[c], mean_of(&BatchNorm::running_mean), 1e-6);
      EXPECT_NEAR(layer.running_var->tensor().f32()[c], mean_of(&BatchNorm::running_var), 1e-6);
    }
    BatchNorm other(3, {.axes = std::vector<std::string>{"pp"}});
    replicate(other, mesh);
    set_up(other, compute);
    Frame unused(compute);
    EXPECT_EQ(
        test::error_text(ErrorCode::bad_argument, [&] { other.forward(distribute(x, layout), unused); }),
        "mesh: no axis \"pp\" in a=2 x b=2");
  });
}

TEST(GroupNormOverRanks, SamplesPixelsAndWholeGroupsAreCut) {
  const auto make = [] { return with_random_gains(std::make_unique<GroupNorm>(4, 8)); };
  expect_as_serial({{"a", 3}, {"b", 1}}, make, {4, 8, 4, 3}, {Shard{0}, Replicate{}}, leave);
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {4, 8, 4, 3}, {Shard{0}, Shard{1}}, by_channels);
  expect_as_serial({{"a", 1}, {"b", 4}}, make, {4, 8, 4, 3}, {Replicate{}, Shard{1}}, by_channels);
  // Pixels of maps, and positions of sequences, are split, too.
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {4, 8, 4, 3}, {Shard{0}, Shard{2}}, leave);
  expect_as_serial({{"a", 2}, {"b", 2}}, make, {2, 8, 5, 3}, {Shard{3}, Shard{1}}, by_channels);
  expect_as_serial({{"a", 3}, {"b", 1}}, make, {2, 8, 7}, {Shard{2}, Replicate{}}, leave);
  Context context;
  GroupNorm layer(2, 8);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"a", 1}, {"b", 4}}, 0);
  EXPECT_EQ(test::error_text(ErrorCode::bad_argument, [&] { by_channels(layer, mesh); }),
            "parallelize: \"\" has 2 groups; b=4 needs at least one for each rank (2 = 4 x 0 + 2)");
}

TEST(GroupNormOverRanks, ChannelsOfAnotherCutAreLayoutErrors) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    Compute compute(rank.context);
    const DeviceMesh mesh(rank.group(), {{"a", 2}});
    GroupNorm layer(2, 4);
    replicate(layer, mesh);
    set_up(layer, compute);
    Frame frame(compute);
    const Tensor x = Tensor::zeros(rank.context, {2, 4, 4});
    EXPECT_EQ(test::error_text(
                  ErrorCode::layout,
                  [&] {
                    layer.forward(distribute(x, make_layout(mesh, {{"a", Shard{1}}}, x.shape())), frame);
                  }),
              "\"\": x is Shard(1) on a=2; expected channels cut as the weight is");
  });
}

// Each input has its boundary: both gradients are whole again. Key/value heads of another sequence.
TEST(CrossAttentionOverRanks, ByItsOwnPlanIsAsOnOneRank) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 1}, {"tp", 4}}})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), shape);
      const CrossAttentionConfig config{.dim = 6,
                                        .heads = 8,
                                        .head_dim = 3,
                                        .context_dim = 5,
                                        .kv_heads = 4,
                                        .bias = true,
                                        .init = Normal{0.5},
                                        .out_init = Normal{0.5}};
      CrossAttention serial(config), parallel(config);
      EXPECT_EQ(parallelize(parallel, mesh["tp"]).split, 1);
      EXPECT_EQ(parallel.before().size(), 1u);  // one that stands before each input
      EXPECT_TRUE(parallel.k_proj.before().empty());
      replicate(parallel, mesh);
      for (CrossAttention* m : {&serial, &parallel}) {
        for (Parameter* p : m->parameters()) p->set_init(Normal{0.5});
        set_up(*m, compute);
      }
      const Tensor x = random_tensor(rank.context, {4, 3, 6}, "x"),
                   context = random_tensor(rank.context, {4, 2, 5}, "context"),
                   dy = random_tensor(rank.context, {4, 3, 6}, "dy");
      const auto part = [&](const Tensor& t) {
        return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
      };
      Frame plain(compute), frame(compute);
      const Tensor of_samples = random_tensor(rank.context, {4, 1, 2}, "mask"),
                   of_all = random_tensor(rank.context, {1, 3, 2}, "mask");
      const Tensor everywhere = as_layout(of_all, replicated_layout(mesh, of_all.shape()));
      Frame inference = Frame::inference(compute);
      expect_near(full(parallel.forward({part(x), part(context), everywhere}, inference)[0]),
                  serial.forward({x, context, of_all}, inference)[0], "y with a mask for all samples");
      expect_near(full(parallel.forward({part(x), part(context), part(of_samples)}, frame)[0]),
                  serial.forward({x, context, of_samples}, plain)[0], "y");
      if (mesh["dp"].size() == 2) {
        const Tensor whole = as_layout(of_samples, replicated_layout(mesh, of_samples.shape()));
        EXPECT_EQ(test::error_text(ErrorCode::layout,
                                   [&] {
                                     parallel.forward({part(x), part(context), whole}, inference);
                                   }),
                  "\"\": mask has 4 samples on this rank; expected 2, cut as those of x");
      }
      const Tensors expected = serial.backward(dy, plain), got = parallel.backward(part(dy), frame);
      for (const std::size_t i : {0u, 1u}) {
        expect_near(full(got.at(i)), expected.at(i), i == 0 ? "dx" : "d(context)");
        EXPECT_EQ(to_string(got.at(i).layout()->on("tp")), "Replicate");
      }
      for (Parameter* p : serial.parameters()) {
        if (p->path() == "k_proj.bias")
          continue;  // 0 up to rounding: it adds one number to all scores of a query
        expect_near(full(parallel.parameter(p->path())->gradient()), p->gradient(), p->path());
      }
    });
}

// The weights that are dropped are those of one rank, whichever rank has the head or the sample.
TEST(WindowAttentionOverRanks, DropsTheSameWeightsOnEveryMesh) {
  for (const MeshShape& shape :
       {MeshShape{{"dp", 1}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 2}}, MeshShape{{"dp", 2}, {"tp", 1}}})
    test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      Compute compute(rank.context);
      const DeviceMesh mesh(rank.group(), shape);
      WindowAttentionConfig config;
      config.dim = 32, config.heads = 4, config.head_dim = 3, config.window = 2, config.dropout = 0.5;
      config.init = config.out_init = Normal{0.5};
      WindowAttention serial(config), parallel(config);
      parallelize(parallel, mesh["tp"]);
      replicate(parallel, mesh);
      set_up(serial, compute);
      set_up(parallel, compute);
      const Tensor x = random_tensor(rank.context, {4, 32, 4, 2}, "x"),
                   dy = random_tensor(rank.context, {4, 32, 4, 2}, "dy");
      const auto part = [&](const Tensor& t) {
        return distribute(t, make_layout(mesh, {{"dp", Shard{0}}}, t.shape()));
      };
      const Pass pass{.seed = 3, .step = 7};
      Frame plain(compute, pass), frame(compute, pass);
      expect_near(full(parallel.forward(part(x), frame)[0]), serial.forward(x, plain)[0], "y");
      expect_near(full(parallel.backward(part(dy), frame)[0]), serial.backward(dy, plain)[0], "dx");
      for (Parameter* p : serial.parameters())
        if (p->path() != "dpb.layers.9.bias")  // added to all scores of a softmax: 0 up to rounding
          expect_near(full(parallel.parameter(p->path())->gradient()), p->gradient(), p->path());
    });
}

}  // namespace
}  // namespace weft::tp_layers_test
