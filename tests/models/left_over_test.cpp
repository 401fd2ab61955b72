// A backward pass in two halves: the gradients that it leaves over have the bits of a pass in one piece, come
// when run() is called, and not at all after an error.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/domain/domain.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/transformer.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/spectral_norm.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradients.hpp"

namespace weft::left_over_test {
namespace {

using Bits = std::vector<std::vector<float>>;

Bits gradients_of(const Module& model) {
  Bits all;
  for (const Parameter* p : model.parameters()) {
    all.emplace_back();
    if (p->has_gradient()) all.back().assign(p->gradient().f32().begin(), p->gradient().f32().end());
  }
  return all;
}

// Which parameters are announced as final, in order.
struct Announced {
  explicit Announced(Module& model) {
    for (Parameter* p : model.parameters())
      p->listen([this](Parameter& which) { paths.push_back(which.path()); });
  }
  std::vector<std::string> paths;
};

Tensor random(Context& context, const Shape& shape, std::string_view name) {
  Tensor t(context, shape);
  RandomStream(11, name).normal(0, t.count(), t.f32().data());
  return t;
}

void set_up(Module& model, Compute& compute) {
  for (Parameter* p : model.parameters())
    if (p->global_shape().rank() > 1) p->set_init(Normal{0.2});
  materialise(model, compute);
  initialise(model, 5);
}

// A forward pass of a micro-batch; gives the gradient that its backward begins with.
using Forward = std::function<Tensor(int micro_batch, Frame& frame)>;

// Two micro-batches in one piece, and the same in halves: both dx before both dw.
void expect_equal_halves(Module& model, Compute& compute, const Forward& forward) {
  const auto run = [&](bool halves) {
    for (Parameter* p : model.parameters()) p->zero_gradient();
    std::vector<Frame> two;
    for (int i = 0; i < 2; ++i)
      two.emplace_back(compute,
                       Pass{.micro_batch = i, .training = false});  // u and v of a spectral norm stay
    Tensors dy;
    for (int i = 0; i < 2; ++i) dy.push_back(forward(i, two[static_cast<std::size_t>(i)]));
    LeftOver left_over;
    Tensors all;
    for (std::size_t i = 0; i < 2; ++i)
      for (const Tensor& t :
           halves ? model.backward(dy[i], two[i], left_over) : model.backward(dy[i], two[i]))
        all.push_back(t.clone(compute.context()));
    EXPECT_EQ(halves, !left_over.empty());
    left_over.run();
    EXPECT_TRUE(left_over.empty());
    return all;
  };
  const Tensors whole = run(false);
  const Bits expected = gradients_of(model);
  const Tensors halves = run(true);
  EXPECT_EQ(gradients_of(model), expected);
  ASSERT_EQ(halves.size(), whole.size());
  for (std::size_t i = 0; i < whole.size(); ++i)
    EXPECT_TRUE(std::ranges::equal(halves[i].f32(), whole[i].f32())) << "dx " << i;
}

TEST(LeftOver, HasTheBitsOfAPassInOnePiece) {
  Context context;
  Compute compute(context, 1);
  for (const bool tied : {false, true}) {
    SCOPED_TRACE(tied ? "tied" : "not tied");
    Transformer model({.dim = 16,
                       .layers = 2,
                       .heads = 2,
                       .kv_heads = 1,
                       .ffn_hidden = 24,
                       .vocab = 13,
                       .max_seq = 8,
                       .tied = tied,
                       .init_std = 0.2});
    materialise(model, compute);
    initialise(model, 3);
    const auto forward = [&](int micro_batch, Frame& frame) {
      Tensor tokens(context, {2, 6}, DType::i64);
      for (std::size_t i = 0; i < 12; ++i)
        tokens.as<std::int64_t>()[i] = (static_cast<std::int64_t>(i) * 7 + micro_batch) % 13;
      const Tensor logits = model.forward(tokens, frame)[0];
      return random(context, logits.shape(), "dy" + std::to_string(micro_batch));
    };
    expect_equal_halves(model, compute, forward);
  }
}

TEST(LeftOver, OfMapsHasTheBitsOfAPassInOnePiece) {
  Context context;
  Compute compute(context, 1);
  Sequential model;
  model.append("embed", std::make_unique<Conv2d>(Conv2dConfig{.in = 3, .out = 8, .kernel = 3, .padding = 1}));
  model.append("stage", std::make_unique<WeatherStage>(WeatherStageConfig{
                            .dim = 8, .depth = 1, .head_dim = 4, .local_window = 2, .global_window = 2}));
  model.append("up", std::make_unique<ConvTranspose2d>(
                         ConvTranspose2dConfig{.in = 8, .out = 4, .kernel = 2, .stride = 2}));
  model.append("out", std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 2, .kernel = 3, .padding = 1}));
  EXPECT_GT(add_spectral_norm(model.get("stage")), 0);
  set_up(model, compute);
  expect_equal_halves(model, compute, [&](int micro_batch, Frame& frame) {
    const std::string name = std::to_string(micro_batch);
    const Tensor y = model.forward(random(context, {2, 3, 8, 8}, "x" + name), frame)[0];
    return random(context, y.shape(), "dy" + name);
  });
}

// Heads on one axis, maps cut in space on the other.
TEST(LeftOver, OfRanksHasTheBitsOfAPassInOnePiece) {
  test::run_ranks(test::Ranks::threads, 4, [](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 1}, {"tp", 2}, {"h", 2}, {"w", 1}});
    Sequential model;
    model.append("embed",
                 std::make_unique<Conv2d>(Conv2dConfig{.in = 3, .out = 16, .kernel = 3, .padding = 1}));
    model.append("stage", std::make_unique<WeatherStage>(WeatherStageConfig{
                              .dim = 16, .depth = 1, .head_dim = 4, .local_window = 2, .global_window = 2}));
    model.append("up", std::make_unique<ConvTranspose2d>(
                           ConvTranspose2dConfig{.in = 16, .out = 4, .kernel = 2, .stride = 2}));
    parallelize(model, mesh["tp"]);
    DomainOptions options;
    options.data = mesh["dp"];
    const DomainManager manager = apply_domain_parallel(model, mesh[{"h", "w"}], options);
    replicate(model, mesh);
    set_up(model, compute);
    expect_equal_halves(model, compute, [&](int micro_batch, Frame& frame) {
      const std::string name = std::to_string(micro_batch);
      const Tensor x = random(rank.context, {2, 3, 8, 8}, "x" + name);
      const Tensor y = model.forward(distribute(x, manager.layout(x.shape())), frame)[0];
      return distribute(random(rank.context, y.layout()->global, "dy" + name), y.layout());
    });
  });
}

// Its weights are gone when the scope around a block ends, so nothing of a block is left over.
TEST(LeftOver, OfShardedParametersIsDoneInTheirBlock) {
  test::run_ranks(test::Ranks::threads, 2, [](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 2}});
    const auto gradients = [&](bool halves) {
      Sequential model;
      model.append("in", std::make_unique<Linear>(5, 13));
      model.append("out", std::make_unique<Linear>(13, 3));
      const auto sharded = fully_shard(model, mesh["dp"], {.blocks = {"in", "out"}});
      set_up(model, compute);
      Frame frame(compute);
      LeftOver left_over;
      const auto part = [&](const Shape& shape, const char* name) {
        return distribute(random(rank.context, shape, name), make_layout(mesh, {{"dp", Shard{0}}}, shape));
      };
      model.forward(part({4, 5}, "x"), frame);
      const Tensor dy = part({4, 3}, "dy");
      if (halves)
        model.backward(dy, frame, left_over);
      else
        model.backward(dy, frame);
      EXPECT_TRUE(left_over.empty());
      return gradients_of(model);
    };
    EXPECT_EQ(gradients(true), gradients(false));
  });
}

class LeftOverOfLinears : public testing::Test {
 protected:
  LeftOverOfLinears() {
    model.append("first", std::make_unique<Linear>(4, 6, true));
    model.append("last", std::make_unique<Linear>(6, 2, true));
    set_up(model, compute);
    announced = std::make_unique<Announced>(model);
    model.forward(random(context, {3, 4}, "x"), frame);
  }
  bool has_gradient(const char* path) { return model.parameter(path)->has_gradient(); }
  Context context;
  Compute compute{context, 1};
  Sequential model;
  Frame frame{compute};
  LeftOver left_over;
  std::unique_ptr<Announced> announced;
  const Tensor dy = random(context, {3, 2}, "dy");
};

TEST_F(LeftOverOfLinears, ComesWhenItIsRunAndIsAnnouncedThen) {
  model.backward(dy, frame, left_over);
  EXPECT_TRUE(frame.empty());
  EXPECT_FALSE(has_gradient("first.weight") || has_gradient("last.weight"));
  EXPECT_TRUE(has_gradient("first.bias") && has_gradient("last.bias"));
  EXPECT_EQ(announced->paths, std::vector<std::string>{});
  left_over.run();
  EXPECT_TRUE(has_gradient("first.weight") && has_gradient("last.weight"));
  EXPECT_EQ(announced->paths,
            (std::vector<std::string>{"last.weight", "last.bias", "first.weight", "first.bias"}));
}

TEST_F(LeftOverOfLinears, GoesWhereTheInnermostListIs) {
  LeftOver outer;
  const Frame::Leaving leaving(frame, outer);
  model.backward(dy, frame, left_over);
  EXPECT_TRUE(outer.empty());
  const std::size_t parts = left_over.size();
  EXPECT_GT(parts, 0u);
  left_over.clear();
  EXPECT_TRUE(left_over.empty());
  left_over.run();
  EXPECT_FALSE(has_gradient("last.weight"));
  model.forward(random(context, {3, 4}, "x"), frame);
  model.backward(dy, frame);  // on this Frame the outer list is the one in use
  EXPECT_EQ(outer.size(), parts);
}

TEST_F(LeftOverOfLinears, BehindAnErrorIsDropped) {
  const int id = model.parameter("last.weight")->listen([](Parameter&) {
    throw Error(ErrorCode::system, "the listener fails");
  });
  model.backward(dy, frame, left_over);
  EXPECT_EQ(test::error_text(ErrorCode::system, [&] { left_over.run(); }), "the listener fails");
  EXPECT_TRUE(left_over.empty());
  EXPECT_TRUE(has_gradient("last.weight"));
  EXPECT_FALSE(has_gradient("first.weight"));
  model.parameter("last.weight")->stop_listening(id);
}

}  // namespace
}  // namespace weft::left_over_test
