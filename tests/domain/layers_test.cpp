// Pooling, resizing, padding, norms, window attention and whole models on maps that are cut in space, against
// one rank.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::domain_layers_test {
namespace {

using kernels::Padding;
using test::error_text;
using test::expect_as;
using test::expect_as_serial;
using test::MakeModule;
using test::on_each_space;
using test::run_serial;

// On every space, by the bits.
template <class Layer, class Config>
void expect_same_bits(const std::vector<Config>& configs, const std::vector<Shape>& shapes) {
  on_each_space([&](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    for (std::size_t i = 0; i < configs.size(); ++i)
      for (const Shape& x : shapes) {
        SCOPED_TRACE(testing::Message() << "config " << i << " " << to_string(x));
        const MakeModule make = [&] { return std::make_unique<Layer>(configs[i]); };
        ASSERT_NO_FATAL_FAILURE(expect_as(run_serial(make, x, compute), make, compute, mesh, axes));
      }
  });
}

TEST(DomainPool, AveragesAndMaxima) {
  std::vector<Pool2dConfig> averages, maxima;
  for (std::int64_t k = 1; k <= 5; ++k)
    for (std::int64_t s = 1; s <= 4; ++s)
      for (std::int64_t p = 0; p <= k / 2; ++p) {
        averages.push_back({.kernel = k, .stride = s, .padding = p, .count_padding = (k + s) % 2 == 0});
        for (std::int64_t d = 1; d <= 3; ++d)
          maxima.push_back({.kernel = k, .stride = s, .padding = p, .dilation = d});
      }
  for (const Shape& x : {Shape{2, 3, 13, 15}, Shape{1, 3, 14, 16}}) {
    expect_same_bits<AvgPool2d>(averages, {x});
    expect_same_bits<MaxPool2d>(maxima, {x});
  }
}

TEST(DomainPool, OfTheWholeMap) {
  expect_same_bits<AdaptiveAvgPool2d>(std::vector<Extent2d>{1, {3, 2}, {5, 7}},
                                      {{2, 3, 11, 10}, {1, 1, 4, 3}});
}

TEST(DomainResize, NearestAndBilinear) {
  std::vector<Resize2dConfig> configs;
  for (const Extent2d& out : {Extent2d(22, 20), Extent2d(5, 3), Extent2d(13, 9), Extent2d(2, 30)}) {
    configs.push_back({.mode = Resizing::nearest, .out = out});
    configs.push_back({.mode = Resizing::bilinear, .out = out});
    configs.push_back({.mode = Resizing::bilinear, .out = out, .align_corners = true});
  }
  configs.push_back({.mode = Resizing::bilinear, .scale = {2, 3}});
  expect_same_bits<Resize2d>(configs, {{2, 2, 11, 10}, {1, 1, 4, 3}});
}

TEST(DomainPad, EveryRule) {
  std::vector<Pad2dConfig> configs;
  for (const Padding rows : {Padding::zeros, Padding::reflect, Padding::replicate, Padding::circular})
    for (const Padding columns : {Padding::zeros, Padding::circular, Padding::reflect})
      configs.push_back({.top = 3, .bottom = 2, .left = 1, .right = 4, .rows = rows, .columns = columns});
  expect_same_bits<Pad2d>(configs, {{2, 2, 8, 7}, {1, 1, 4, 5}});
}

TEST(DomainPixelShuffle, ChannelsBecomePixels) {
  expect_same_bits<PixelShuffle>(std::vector<std::int64_t>{1, 2, 3}, {{2, 36, 5, 4}, {1, 36, 4, 7}});
}

// Statistics are sums in f64 that ranks add in another order: after rounding to f32 the same, or the next
// number.
constexpr double kLastBit = 2.4e-7;

TEST(DomainGroupNorm, StatisticsOfAllRanks) {
  for (const std::int64_t groups : {1, 2, 6})
    for (const Shape& x : {Shape{2, 6, 7, 5}, Shape{1, 6, 30, 44}})
      expect_as_serial([&] { return std::make_unique<GroupNorm>(groups, 6); }, x,
                       {.maps = kLastBit, .weights = 1e-6});
}

TEST(DomainBatchNorm, StatisticsOfAllRanks) {
  for (const Shape& x : {Shape{2, 4, 7, 5}, Shape{1, 4, 30, 44}})
    expect_as_serial([] { return std::make_unique<BatchNorm>(4); }, x, {.maps = kLastBit, .weights = 1e-6});
}

TEST(DomainChannelNorm, EachPixelAlone) {
  expect_as_serial([] { return std::make_unique<ChannelNorm>(4); }, {2, 4, 7, 5},
                   {.maps = 0, .weights = 1e-6});
}

// Values far from 0, and the statistics that are kept for inference.
TEST(DomainBatchNorm, RunningStatisticsAreThoseOfOneRank) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    BatchNorm serial(4), split(4);
    const DomainManager manager = apply_domain_parallel(split, axes);
    replicate(split, mesh);
    test::set_up(serial, compute);
    test::set_up(split, compute);
    for (int step = 0; step < 3; ++step) {
      const Tensor x = test::random_map(compute.context(), {2, 4, 7, 5}, "x" + std::to_string(step));
      for (float& f : x.f32()) f += 3;
      Frame of_serial(compute), of_split(compute);
      const Tensor want = serial.forward(x, of_serial)[0];
      EXPECT_LE(test::difference(full(split.forward(shard_spatial(x, manager), of_split)[0]), want), 1e-6);
      const Tensor dy = test::random_map(compute.context(), x.shape(), "dy");
      const Tensor want_dx = serial.backward(dy, of_serial)[0];
      const Tensor dx = split.backward(shard_spatial(dy, manager), of_split)[0];
      EXPECT_LE(test::difference(full(dx), want_dx), 1e-6);
    }
    EXPECT_LE(test::difference(split.running_mean->tensor(), serial.running_mean->tensor()), 1e-6);
    EXPECT_LE(test::difference(split.running_var->tensor(), serial.running_var->tensor()), 1e-6);
    const Tensor x = test::random_map(compute.context(), {1, 4, 6, 5}, "x");
    Frame of_serial = Frame::inference(compute), of_split = Frame::inference(compute);
    EXPECT_LE(test::difference(full(split.forward(shard_spatial(x, manager), of_split)[0]),
                               serial.forward(x, of_serial)[0]),
              1e-6);
  });
}

TEST(DomainDropout, DropsTheSamePixelsWhereverMapsAreCut) {
  on_each_space([](Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes) {
    Dropout serial(0.4), split(0.4);
    const DomainManager manager = apply_domain_parallel(split, axes);
    replicate(split, mesh);
    const Tensor x = test::random_map(compute.context(), {2, 3, 7, 5}, "x");
    Frame of_serial(compute, {.seed = 9, .step = 3, .micro_batch = 1}),
        of_split(compute, {.seed = 9, .step = 3, .micro_batch = 1});
    const Tensor want = serial.forward(x, of_serial)[0];
    EXPECT_GT(std::ranges::count(want.f32(), 0.0F), 50);
    EXPECT_TRUE(test::same_bits(full(split.forward(shard_spatial(x, manager), of_split)[0]), want));
    EXPECT_TRUE(test::same_bits(full(split.backward(shard_spatial(x, manager), of_split)[0]),
                                serial.backward(x, of_serial)[0]));
  });
}

MakeModule attention(Windows windows, std::int64_t dim = 32) {
  return [=] {
    return std::make_unique<WindowAttention>(
        WindowAttentionConfig{.dim = dim, .heads = 4, .head_dim = dim / 4, .window = 2, .windows = windows});
  };
}

TEST(DomainWindowAttention, NearAndFarWindowsDoNotDependOnTheDegree) {
  for (const Windows windows : {Windows::neighbours, Windows::strided})
    for (const Shape& x : {Shape{2, 32, 8, 6}, Shape{1, 32, 12, 4}, Shape{1, 32, 4, 6}})
      expect_as_serial(attention(windows), x, {.maps = 0, .weights = 1e-6});
}

// Layers of the widths that models have, with weights of f32 and of bf16; also with fewer windows than
// ranks.
TEST(DomainWindowAttention, WideOnesDoNotDependOnTheDegree) {
  struct {
    std::int64_t heads, head_dim, window;
    Shape x;
  } const cases[] = {{4, 32, 5, {1, 128, 15, 10}}, {8, 32, 7, {1, 256, 14, 14}}, {5, 64, 2, {2, 320, 6, 4}}};
  for (const auto& c : cases)
    for (const Windows windows : {Windows::neighbours, Windows::strided})
      for (const DType dtype : {DType::f32, DType::bf16})
        expect_as_serial(
            [&] {
              auto attention = std::make_unique<WindowAttention>(WindowAttentionConfig{.dim = c.x[1],
                                                                                       .heads = c.heads,
                                                                                       .head_dim = c.head_dim,
                                                                                       .window = c.window,
                                                                                       .windows = windows});
              for (Linear* linear :
                   {&attention->to_q, &attention->to_k, &attention->to_v, &attention->to_out})
                linear->weight->set_dtype(dtype);
              return attention;
            },
            c.x, {.maps = 0, .weights = 1e-6, .position_bias = 2e-5});
}

// Down, in the middle, and up again: strided convolutions, norms, activations, attention, and both ways up.
std::unique_ptr<Module> small_unet() {
  auto model = std::make_unique<Sequential>();
  model->append("pad",
                std::make_unique<Pad2d>(Pad2dConfig{.left = 1, .right = 1, .columns = Padding::circular}));
  model->append("down", std::make_unique<Conv2d>(Conv2dConfig{
                            .in = 3, .out = 32, .kernel = {4, 4}, .stride = {2, 2}, .padding = {1, 0}}));
  model->append("norm", std::make_unique<GroupNorm>(2, 32));
  model->append("act", std::make_unique<GELU>());
  model->append("near", std::make_unique<WindowAttention>(
                            WindowAttentionConfig{.dim = 32, .heads = 2, .head_dim = 16, .window = 3}));
  model->append("mix",
                std::make_unique<Conv2d>(Conv2dConfig{
                    .in = 32, .out = 16, .kernel = 3, .padding = 1, .padding_mode = Padding::replicate}));
  model->append("shuffle", std::make_unique<PixelShuffle>(2));
  model->append("pool", std::make_unique<MaxPool2d>(Pool2dConfig{.kernel = 3, .stride = 1, .padding = 1}));
  model->append("up", std::make_unique<ConvTranspose2d>(
                          ConvTranspose2dConfig{.in = 4, .out = 2, .kernel = 2, .stride = 2}));
  model->append("size",
                std::make_unique<Resize2d>(Resize2dConfig{.mode = Resizing::bilinear, .out = {18, 12}}));
  return model;
}

TEST(DomainModels, DownAndUpAgain) {
  expect_as_serial(small_unet, {2, 3, 18, 12}, {.maps = 1e-6, .weights = 1e-6});
}

// A user's own layer with the rule any_part, and a layer without a rule.
class Scaled : public Module {
 public:
  explicit Scaled(bool says) : says_(says) {}
  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    return {says_ ? SpaceRule::Kind::any_part : SpaceRule::Kind::unknown};
  }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override { return {times_two(x[0], frame)}; }
  Tensors do_backward(Inputs dy, Frame& frame) override { return {times_two(dy[0], frame)}; }
  static Tensor times_two(const Tensor& x, Frame& frame) {
    const Tensor y = x.clone(frame.compute().context()).with_layout(x.layout());
    for (float& f : y.f32()) f *= 2;
    return y;
  }
  bool says_;
};

// A user's own residual block, with a child and with its own code.
class Residual : public Module {
 public:
  explicit Residual(bool says) : says_(says) { add("branch", branch); }
  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    return {says_ ? SpaceRule::Kind::any_part : SpaceRule::Kind::unknown};
  }
  Conv2d branch{{.in = 2, .out = 2, .kernel = 3, .padding = 1}};

 private:
  Tensors do_forward(Inputs x, Frame& frame) override {
    return {add_tensors(x[0], branch.forward(x, frame)[0], frame.compute(), TensorName("", "y"))};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    return {add_tensors(dy[0], branch.backward(dy, frame)[0], frame.compute(), TensorName("", "dx"))};
  }
  bool says_;
};

// Without a rule, the block's work between its children is unknown.
TEST(DomainRules, OfBlocksFromOutside) {
  expect_as_serial([] { return std::make_unique<Residual>(true); }, {1, 2, 5, 4});
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"h", 2}}, 0);
  Residual block(false);
  EXPECT_EQ(
      error_text([&] { apply_domain_parallel(block, mesh); }),
      "bad_argument: apply_domain_parallel: \"\" is of kind Residual, which has no rule for maps that are "
      "cut in space. Give it one: space_rule() of "
      "the layer, or DomainOptions::rules; one whose own code, between its children, treats each pixel alone "
      "(residual sums) has the rule SpaceRule::Kind::any_part, and its children keep their own rules");
  EXPECT_EQ(block.branch.passes(), nullptr);  // nothing was set
  DomainOptions options;
  options.rules[typeid(Residual)] = [](Module&) { return SpaceRule{SpaceRule::Kind::any_part}; };
  apply_domain_parallel(block, mesh, options);
  EXPECT_NE(block.branch.passes(), nullptr);
  // A class that derives from a container may do something else between the children.
  class Odd : public Sequential {};
  Odd odd;
  odd.append(std::make_unique<ReLU>());
  EXPECT_NE(error_text([&] { apply_domain_parallel(odd, mesh); }).find("Odd, which has no rule"),
            std::string::npos);
}

// A rule is for one class: what derives from a layer may do something else to a pixel.
template <class Layer>
class Derived : public Layer {
 public:
  using Layer::Layer;
};
template <class Layer, class... Args>
void expect_derived_is_unknown(const Args&... args) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"h", 2}}, 0);
  Layer layer(args...);
  apply_domain_parallel(layer, mesh);
  Derived<Layer> derived(args...);
  EXPECT_NE(error_text([&] { apply_domain_parallel(derived, mesh); }).find("which has no rule"),
            std::string::npos);
}

TEST(DomainRules, AreNotInherited) {
  expect_derived_is_unknown<GELU>();
  expect_derived_is_unknown<GroupNorm>(2, 4);
  expect_derived_is_unknown<LayerNorm>(4);
  expect_derived_is_unknown<LayerNorm>(Shape{4, 3});
  expect_derived_is_unknown<Linear>(4, 4);
  expect_derived_is_unknown<Conv2d>(Conv2dConfig{.in = 4, .out = 4});
  expect_derived_is_unknown<Conv2d>(Conv2dConfig{.in = 4, .out = 4, .kernel = 3});
  expect_derived_is_unknown<MaxPool2d>(Pool2dConfig{});
}

// A layer that is not part of weft and sees neighbours. It states these: y = scale · Σ (1 + i + 3 j) x of a 3
// x 2 kernel, of every second row, with zeros above and below, around the globe in columns. Its own code
// knows nothing of ranks.
class Stencil : public Module {
 public:
  explicit Stencil(std::int64_t padding) : Stencil(padding, {.kernel = 3, .stride = 2, .padding = padding}) {}
  Stencil(std::int64_t padding, const SpaceRule::Reach& said) : padding_(padding), said_(said) {
    scale_ = add("scale", std::make_shared<Parameter>(Shape{1}));
  }
  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    SpaceRule rule{SpaceRule::Kind::window};
    rule.height = said_;
    rule.width = {.kernel = 2, .padding = 1, .edge = Edge::periodic()};
    return rule;
  }

 private:
  Shape of_y(const Shape& x) const {
    if (x[2] + 2 * padding_ < 3) throw Error(ErrorCode::bad_argument, "too few rows");
    return {x[0], x[1], (x[2] + 2 * padding_ - 3) / 2 + 1, x[3] + 1};
  }
  // Calls see(y's index, x's index, weight).
  template <class See>
  void each(const Shape& x, const See& see) const {
    const std::int64_t h = x[2], w = x[3], rows = of_y(x)[2], columns = w + 1;
    for (std::int64_t map = 0; map < x[0] * x[1]; ++map)
      for (std::int64_t r = 0; r < rows; ++r)
        for (std::int64_t c = 0; c < columns; ++c)
          for (std::int64_t i = 0; i < 3; ++i)
            for (std::int64_t j = 0; j < 2; ++j)
              if (const std::int64_t row = 2 * r - padding_ + i; row >= 0 && row < h)
                see(static_cast<std::size_t>((map * rows + r) * columns + c),
                    static_cast<std::size_t>((map * h + row) * w + (c - 1 + j + w) % w),
                    static_cast<float>(1 + i + 3 * j));
  }
  Tensors do_forward(Inputs x, Frame& frame) override {
    const Tensor y = Tensor::zeros(frame.compute().context(), of_y(x[0].shape()));
    const float scale = scale_->weight().f32()[0];
    each(x[0].shape(),
         [&](std::size_t o, std::size_t i, float weight) { y.f32()[o] += scale * weight * x[0].f32()[i]; });
    frame.push(*this, {x[0]});
    return {y};
  }
  Tensors do_backward(Inputs dy, Frame& frame) override {
    const Tensor x = frame.pop(*this)[0], dx = Tensor::zeros(frame.compute().context(), x.shape()),
                 dscale = Tensor::zeros(frame.compute().context(), {1});
    const float scale = scale_->weight().f32()[0];
    each(x.shape(), [&](std::size_t o, std::size_t i, float weight) {
      dx.f32()[i] += scale * weight * dy[0].f32()[o];
      dscale.f32()[0] += weight * x.f32()[i] * dy[0].f32()[o];
    });
    scale_->accumulate(dscale.with_layout(layouts::gradient_of(scale_->weight().layout(), x.layout(), 1)));
    return {dx};
  }
  std::int64_t padding_;
  SpaceRule::Reach said_;
  ParameterRef scale_;
};

// The user's own layer follows a layer of weft. From 5 rows it makes 2 to 4, so some of 4 ranks have none.
TEST(DomainRules, OfLayersFromOutsideThatSeeNeighbours) {
  for (const std::int64_t padding : {0, 1, 2})
    for (const Shape& x : {Shape{2, 3, 9, 6}, Shape{1, 2, 5, 4}, Shape{1, 2, 12, 5}})
      expect_as_serial(
          [&] {
            auto model = std::make_unique<Sequential>();
            model->append(std::make_unique<ReLU>());
            model->append(std::make_unique<Stencil>(padding));
            return model;
          },
          x, {.maps = 1e-6, .weights = 1e-5});
}

TEST(DomainRules, OfWindowsThatDoNotFit) {
  test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}});
    Stencil nothing(1, {.kernel = 0});
    EXPECT_EQ(error_text([&] { apply_domain_parallel(nothing, mesh); }),
              "bad_argument: apply_domain_parallel: the rule of \"\" (kind Stencil) has kernel 0, stride 1, "
              "padding 0, dilation 1 along the height; expected at "
              "least 1, and a padding of at least 0");
    Stencil wrong(1, {.kernel = 3, .stride = 1, .padding = 1});  // it makes every second row
    const DomainManager manager = apply_domain_parallel(wrong, mesh);
    replicate(wrong, mesh);
    test::set_up(wrong, compute);
    Frame frame = Frame::inference(compute);
    EXPECT_EQ(
        error_text([&] {
          wrong.forward(shard_spatial(Tensor::zeros(rank.context, {1, 2, 8, 4}), manager), frame);
        }),
        "bad_argument: \"\": y is (1, 2, 3, 7) for a window (1, 2, 6, 6); expected (batch, channels, 6, "
        "7), by the layer's rule for maps that are cut in space");
  });
}

TEST(DomainRules, OfLayersFromOutside) {
  expect_as_serial([] { return std::make_unique<Scaled>(true); }, {1, 2, 5, 4});
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"h", 2}, {"tp", 2}}, 0);
  const auto with = [](std::unique_ptr<Module> child) {
    auto model = std::make_unique<Sequential>();
    model->append("first", std::make_unique<ReLU>());
    model->append("odd", std::move(child));
    return model;
  };
  const auto refused = [&](std::unique_ptr<Module> child, const DomainOptions& options = {}) {
    const std::unique_ptr<Sequential> model = with(std::move(child));
    const std::string text = error_text([&] { apply_domain_parallel(*model, mesh["h"], options); });
    EXPECT_FALSE(get_domain_manager(*model));  // nothing was set
    EXPECT_EQ(model->get("first").passes(), nullptr);
    return text;
  };
  EXPECT_EQ(
      refused(std::make_unique<Scaled>(false)),
      "bad_argument: apply_domain_parallel: \"odd\" is of kind Scaled, which has no "
      "rule for maps that are cut in space. Give it one: space_rule() of the layer, or "
      "DomainOptions::rules; a layer that treats each pixel alone has the rule SpaceRule::Kind::any_part");
  DomainOptions options;
  options.rules[typeid(Scaled)] = [](Module&) {
    return SpaceRule{SpaceRule::Kind::refused, {}, "is not for maps"};
  };
  EXPECT_EQ(refused(std::make_unique<Scaled>(false), options),
            "bad_argument: apply_domain_parallel: \"odd\" is of kind Scaled, which is not for maps");
  options.rules[typeid(Scaled)] = [](Module&) { return SpaceRule{SpaceRule::Kind::by_passes, {}, {}}; };
  EXPECT_EQ(refused(std::make_unique<Scaled>(false), options),
            "bad_argument: apply_domain_parallel: the rule of \"odd\" (kind "
            "Scaled) has no passes");
  // The rule of the options replaces the layer's own rule.
  options.rules = {{typeid(ReLU), [](Module&) {
                      return SpaceRule{SpaceRule::Kind::refused, {}, "is not for maps"};
                    }}};
  EXPECT_EQ(refused(std::make_unique<Scaled>(true), options),
            "bad_argument: apply_domain_parallel: \"first\" is of kind ReLU, which is not for maps");
  options = {};
  options.dims = {};
  EXPECT_EQ(refused(std::make_unique<ReLU>(), options),
            "bad_argument: apply_domain_parallel: h has 1 axes; options.dims says what 0 cut");
  const std::unique_ptr<Sequential> model = with(std::make_unique<GELU>());
  const DomainManager manager = apply_domain_parallel(*model, mesh["h"]);
  EXPECT_EQ(get_domain_manager(*model).axes(), mesh["h"]);
  EXPECT_EQ(error_text([&] { apply_domain_parallel(*model, mesh["h"]); }),
            "bad_argument: apply_domain_parallel: \"\" has passes of other code already");
  EXPECT_EQ(error_text([&] {
              shard_spatial(Tensor(context, {1, 3, 1, 8}), manager);
            }),
            "bad_argument: shard_spatial: x (1, 3, 1, 8) has 1 elements in dimension 2 for h=2; each rank "
            "needs at least one: fewer ranks, or a "
            "larger map");
  EXPECT_EQ(error_text([&] {
              shard_spatial(Tensor(context, {1, 3}), manager);
            }),
            "bad_argument: shard_spatial: x is (1, 3); dimension 2 is cut along h");
  EXPECT_EQ(error_text([&] {
              gather_spatial(Tensor(context, {1, 3}), {});
            }),
            "bad_argument: gather_spatial: the manager is empty; expected that of apply_domain_parallel");
  EXPECT_EQ(error_text([&] {
              gather_spatial(Tensor(context, {1, 3}), manager);
            }),
            "layout: gather_spatial: the tensor (1, 3) is plain; expected maps that are cut in space");
  const Tensor y = shard_spatial(Tensor(context, {1, 3, 4, 8}), manager);
  EXPECT_EQ(error_text([&] { crop_padding(y, {.top = 1}, manager, 4, 8); }),
            "bad_argument: crop_padding: y is (1, 3, 4, 8); expected 1 + 4 + 0 rows and 0 + 8 + 0 "
            "columns of padding, map and padding");
  const Tensor dy = shard_spatial(Tensor(context, {1, 3, 3, 8}), manager);
  EXPECT_EQ(error_text([&] { crop_padding_adjoint(dy, {.top = 2}, y.layout()); }),
            "layout: crop_padding_adjoint: dy is (1, 3, 3, 8) as [h: Shard(2), tp: Replicate]; expected "
            "(1, 3, 2, 8) as [h: Shard(2), tp: Replicate], as y without its padding");
  EXPECT_EQ(error_text([&] { crop_padding_adjoint(dy, {.left = 9}, y.layout(), manager); }),
            "bad_argument: crop_padding_adjoint: y is (1, 3, 4, 8); expected maps with 0 + 0 rows and 9 + 0 "
            "columns of padding");
  EXPECT_EQ(error_text([&] { crop_padding_adjoint(dy, {.left = 9}, nullptr, manager); }),
            "bad_argument: crop_padding_adjoint: y is null; expected the layout of what was cropped");
}

// A plain map does not say whether it is whole or a part. Backward takes the same way as forward, whatever dy
// is.
TEST(DomainRules, MapsThatDoNotSayWhatTheyAreAreRefused) {
  const std::pair<const char*, MakeModule> layers[] = {
      {"conv",
       [] { return std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 4, .kernel = 3, .padding = 1}); }},
      {"conv with a stride",
       [] { return std::make_unique<Conv2d>(Conv2dConfig{.in = 4, .out = 4, .stride = 2}); }},
      {"conv transpose",
       [] {
         return std::make_unique<ConvTranspose2d>(
             ConvTranspose2dConfig{.in = 4, .out = 4, .kernel = 2, .stride = 2});
       }},
      {"average", [] { return std::make_unique<AvgPool2d>(Pool2dConfig{}); }},
      {"maximum", [] { return std::make_unique<MaxPool2d>(Pool2dConfig{}); }},
      {"pad", [] { return std::make_unique<Pad2d>(Pad2dConfig{.top = 1}); }},
      {"resize", [] { return std::make_unique<Resize2d>(Resize2dConfig{.scale = 2}); }},
      {"shuffle", [] { return std::make_unique<PixelShuffle>(2); }},
      {"group norm", [] { return std::make_unique<GroupNorm>(2, 4); }},
      {"attention", attention(Windows::neighbours, 4)},
  };
  test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& rank) {
    Compute compute(rank.context, 1);
    const DeviceMesh mesh(rank.group(), {{"h", 2}});
    for (const auto& [name, make] : layers) {
      SCOPED_TRACE(name);
      const auto [serial, split] = std::pair{make(), make()};
      const DomainManager manager = apply_domain_parallel(*split, mesh);
      replicate(*split, mesh);
      for (Module* model : {serial.get(), split.get()}) test::set_up(*model, compute);
      const Tensor x = test::random_map(rank.context, {1, 4, 8, 6}, "x");
      Frame frame(compute);
      // A norm has a weight that lies on the mesh, and says it as every layer with weights does.
      const bool norm = dynamic_cast<GroupNorm*>(split.get()) != nullptr;
      EXPECT_EQ(
          error_text([&] { split->forward(x, frame); }),
          fmt::format("layout: \"\": x is a plain tensor; on h=2 it needs a layout{}",
                      norm ? ", which says what part of the whole it is" : " (shard_spatial gives it one)"));
      EXPECT_TRUE(frame.empty());
      const Tensor part = shard_spatial(x, manager);
      const Tensor y = split->forward(part, frame)[0];
      const std::string of_plain = error_text([&] { split->backward(y.with_layout(nullptr), frame); });
      EXPECT_NE(of_plain.find("dy is a plain tensor"), std::string::npos) << of_plain;
      Frame other(compute);
      split->forward(part, other);
      const std::string of_whole = error_text([&] { split->backward(gather_spatial(y, manager), other); });
      EXPECT_TRUE(of_whole.starts_with("layout: \"\": dy is")) << of_whole;
      // A whole map that every rank has is computed whole on each.
      Frame of_each(compute), of_serial(compute);
      const Tensor whole = gather_spatial(part, manager);
      const Tensor want = serial->forward(x, of_serial)[0];
      const Tensor same = split->forward(whole, of_each)[0];
      EXPECT_TRUE(test::same_bits(same, want));
      EXPECT_TRUE(test::same_bits(split->backward(same, of_each)[0], serial->backward(want, of_serial)[0]));
      EXPECT_TRUE(of_each.empty());
    }
  });
}

// On a domain of one rank the layers' own code runs.
TEST(DomainRules, OneRankIsLeftAlone) {
  Context context;
  Compute compute(context, 1);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"h", 1}, {"w", 1}}, 0);
  const std::unique_ptr<Module> model = small_unet();
  apply_domain_parallel(*model, mesh);
  for (const auto& [name, child] : model->children()) EXPECT_EQ(child->passes(), nullptr) << name;
  EXPECT_EQ(get_domain_manager(*model).size(), 1);
  // Nothing was split, so the model may be split, over these axes or others.
  apply_domain_parallel(*model, mesh["w"]);
  const DeviceMesh larger = DeviceMesh::arithmetic(context, {{"h", 2}}, 0);
  apply_domain_parallel(*model, larger);
  EXPECT_EQ(get_domain_manager(*model).axes(), larger);
  EXPECT_EQ(error_text([&] { apply_domain_parallel(*model, larger); }),
            "bad_argument: apply_domain_parallel: \"\" has passes of other code already");
}

// Data ranks that have plain maps of their own samples: the layout is that of all of them.
TEST(DomainRules, SamplesOfTheDataRanksAreCounted) {
  test::run_ranks(test::Ranks::threads, 4, [](test::Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"d", 2}, {"h", 2}});
    Sequential model;
    model.append("act", std::make_unique<ReLU>());
    const DomainManager manager = apply_domain_parallel(model, mesh["h"], {.data = mesh["d"]});
    const bool first = mesh["d"].rank() == 0;
    for (const auto& [of_first, of_second] : {std::pair{2, 2}, {2, 1}, {1, 0}}) {
      const Tensor all = test::random_map(rank.context, {of_first + of_second, 2, 5, 3}, "maps");
      const std::int64_t begin = first ? 0 : of_first, samples = first ? of_first : of_second;
      const Tensor got = shard_spatial(all.slice_flat(begin * 30, {samples, 2, 5, 3}), manager);
      EXPECT_EQ(got.layout(), manager.layout(all.shape()));
      EXPECT_TRUE(test::same_bits(got, distribute(all, got.layout())));
    }
    EXPECT_EQ(
        test::error_text([&] {
          shard_spatial(Tensor(rank.context, {first ? 1 : 3, 2, 5, 3}), manager);
        }),
        "bad_argument: shard_spatial: x has 1, 3 samples on the ranks of d=2; expected 2, 2, as a layout "
        "cuts 4 samples");
    const std::string of_both = test::error_text([&] {
      shard_spatial(Tensor(rank.context, {1, 2, first ? 5 : 6, 3}), manager);
    });
    EXPECT_TRUE(of_both.starts_with("bad_argument: shard_spatial: x is (1, 2, 5, 3) on d rank 0")) << of_both;
    EXPECT_TRUE(of_both.ends_with("; expected maps of one size")) << of_both;
    const std::string of_one = test::error_text([&] {
      shard_spatial(Tensor(rank.context, {1, 2, first ? 5 : 1, 3}), manager);
    });
    const std::string why =
        "shard_spatial: x (1, 2, 1, 3) has 1 elements in dimension 2 for h=2; each rank needs at least one: "
        "fewer ranks, or a larger map";
    EXPECT_TRUE(of_one.starts_with("bad_argument: shard_spatial: ")) << of_one;
    EXPECT_TRUE(of_one.ends_with(why)) << of_one;
  });
}

// Two axes may cut one dimension; each of their ranks then needs an element of it.
TEST(DomainRules, SeveralAxesOfOneDimension) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"h", 2}, {"w", 2}}, 3);
  Sequential model;
  model.append("act", std::make_unique<ReLU>());
  const DomainManager manager = apply_domain_parallel(model, mesh, {.dims = {2, 2}});
  EXPECT_EQ(error_text([&] {
              shard_spatial(Tensor(context, {1, 1, 3, 3}), manager);
            }),
            "bad_argument: shard_spatial: x (1, 1, 3, 3) has 3 elements in dimension 2 for h=2, w=2; each "
            "rank needs at least one: fewer ranks, or a larger map");
  EXPECT_EQ(shard_spatial(Tensor(context, {1, 1, 5, 3}), manager).shape(), Shape({1, 1, 1, 3}));
}

}  // namespace
}  // namespace weft::domain_layers_test
