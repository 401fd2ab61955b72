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
#include "weft/mesh/mesh.hpp"
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

// Two layers of one weight, with a scope around the backward of the one that runs last.
TEST(LeftOver, OfASharedWeightIsAnnouncedWhenAllUsesAreAdded) {
  Context context;
  Compute compute(context, 1);
  const auto gradients = [&](bool halves) {
    Sequential model;
    auto& a = static_cast<Linear&>(model.append("a", std::make_unique<Linear>(8, 8)));
    static_cast<Linear&>(model.append("b", std::make_unique<Linear>(8, 8))).tie_weight(a.weight);
    set_up(model, compute);
    int entered = 0;
    const HookHandle scope = a.around_backward({[&](Module&, Frame&) { ++entered; }, {}});
    Bits announced;
    a.weight->listen(
        [&](Parameter& p) { announced.emplace_back(p.gradient().f32().begin(), p.gradient().f32().end()); });
    Frame frame(compute);
    LeftOver left_over;
    model.forward(random(context, {2000, 8}, "x"), frame);
    const Tensor dy = random(context, {2000, 8}, "dy");
    if (halves)
      model.backward(dy, frame, left_over);
    else
      model.backward(dy, frame);
    EXPECT_EQ(entered, 1);
    EXPECT_TRUE(left_over.empty());  // the scope's weight is final when the scope ends
    const Bits all = gradients_of(model);
    EXPECT_EQ(announced, Bits{all[0]});
    return all;
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

TEST(LeftOver, MayBeRunByAHookInsideAScope) {
  Context context;
  Compute compute(context, 1);
  Sequential model;
  for (int i = 0; i < 4; ++i) model.append(std::make_unique<Linear>(8, 8));
  set_up(model, compute);
  LeftOver left_over;
  std::size_t found = 0;
  Module& first = model.get("0");
  const HookHandle scope = first.around_backward({[](Module&, Frame&) {}, [](Module&, Frame&) {}});
  const HookHandle hook = first.add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors&, Frame&) {
    found = left_over.size();
    left_over.run();
  });
  const auto gradients = [&](bool halves) {
    for (Parameter* p : model.parameters()) p->zero_gradient();
    Frame frame(compute);
    model.forward(random(context, {20, 8}, "x"), frame);
    if (halves)
      model.backward(random(context, {20, 8}, "dy"), frame, left_over);
    else
      model.backward(random(context, {20, 8}, "dy"), frame);
    EXPECT_TRUE(left_over.empty());
    return gradients_of(model);
  };
  const Bits halves = gradients(true);
  EXPECT_EQ(found, 6u);  // of three layers: a gradient, and its announcement
  EXPECT_EQ(halves, gradients(false));
}

// Gives its input back; its backward throws if `fails`.
struct Failing : Module {
  bool fails = true;
  Tensors do_forward(Inputs x, Frame& frame) override {
    frame.push(*this, {});
    return {x[0]};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    frame.pop(*this);
    if (fails) throw Error(ErrorCode::system, "this layer fails");
    return {dy[0]};
  }
};

TEST(LeftOver, OfAPassThatFailedIsDropped) {
  Context context;
  Compute compute(context, 1);
  Sequential model;
  auto& failing = static_cast<Failing&>(model.append(std::make_unique<Failing>()));
  model.append(std::make_unique<Linear>(8, 8));
  set_up(model, compute);
  Frame frame(compute);
  LeftOver left_over;
  const auto forward = [&](const char* x) { model.forward(random(context, {20, 8}, x), frame); };
  const Tensor dy = random(context, {20, 8}, "dy");

  failing.fails = false;
  for (const char* x : {"x", "z"}) {
    forward(x);
    model.backward(dy, frame);
  }
  const Bits expected = gradients_of(model);
  for (Parameter* p : model.parameters()) p->zero_gradient();

  forward("x");
  model.backward(dy, frame, left_over);
  const std::size_t of_one = left_over.size();
  failing.fails = true;
  forward("z");
  EXPECT_EQ(test::error_text(ErrorCode::system, [&] { model.backward(dy, frame, left_over); }),
            "this layer fails");
  EXPECT_EQ(left_over.size(), of_one);  // the work of the pass before is still there
  failing.fails = false;
  frame.clear();
  forward("z");
  model.backward(dy, frame, left_over);
  left_over.run();
  EXPECT_EQ(gradients_of(model), expected);

  // A hook of the pass that fails has run the work of the passes before.
  for (Parameter* p : model.parameters()) p->zero_gradient();
  const HookHandle hook =
      model.add_hook(Module::HookPoint::pre_backward, [&](Module&, Tensors&, Frame&) { left_over.run(); });
  forward("x");
  model.backward(dy, frame, left_over);
  failing.fails = true;
  forward("z");
  EXPECT_EQ(test::error_text(ErrorCode::system, [&] { model.backward(dy, frame, left_over); }),
            "this layer fails");
  EXPECT_TRUE(left_over.empty());
}

// Its gradient is random numbers.
struct Noisy : Module {
  ParameterRef weight = add("weight", std::make_shared<Parameter>(Shape{4, 4}));
  Tensors do_forward(Inputs x, Frame& frame) override {
    frame.push(*this, {});
    return {x[0]};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    frame.pop(*this);
    frame.later([this](Frame& f) {
      const Tensor noise = f.compute().make({4, 4});
      f.rng(path()).uniform(noise);
      weight->accumulate(noise);
    });
    return {dy[0]};
  }
};

TEST(LeftOver, HasThePassOfItsFrame) {
  Context context;
  Compute compute(context, 1);
  Noisy noisy;
  set_up(noisy, compute);
  const auto gradients = [&](bool halves) {
    noisy.weight->zero_gradient();
    Frame frame(compute, {.seed = 9, .step = 5, .micro_batch = 2});
    const Tensor x = random(context, {4, 4}, "x");
    noisy.forward(x, frame);
    LeftOver left_over;
    if (halves)
      noisy.backward(x, frame, left_over);
    else
      noisy.backward(x, frame);
    frame.begin({.seed = 9, .step = 6});  // the Frame goes on
    left_over.run();
    return gradients_of(noisy);
  };
  EXPECT_EQ(gradients(true), gradients(false));
}

// The whole weight is placed for the pass and dropped before its work is done.
TEST(LeftOver, RefusesAWeightOfAnotherShape) {
  Context context;
  Compute compute(context, 1);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 2}}, 0);
  Linear linear(6, 8);
  linear.weight->set_layout(make_layout(mesh, {Shard{0}}, {8, 6}));
  set_up(linear, compute);
  linear.weight->place_weight(random(context, {8, 6}, "w"));
  Frame frame(compute);
  linear.forward(random(context, {3, 6}, "x"), frame);
  LeftOver left_over;
  linear.backward(random(context, {3, 8}, "dy"), frame, left_over);
  linear.weight->drop_weight();
  EXPECT_EQ(test::error_text(ErrorCode::layout, [&] { left_over.run(); }),
            "parameter \"weight\": a plain gradient, but the weight is (4, 6) of (8, 6) here; expected a "
            "gradient with a layout, and the weight of the backward pass until its LeftOver has run");
  EXPECT_FALSE(linear.weight->has_gradient());
}

}  // namespace
}  // namespace weft::left_over_test
