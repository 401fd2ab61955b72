// Tests what parallelize sets and what it refuses. No communication: each mesh is as one of its ranks sees
// it.
#include "weft/tp/parallelize.hpp"

#include <gtest/gtest.h>

#include "support/run_ranks.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/norm.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft::parallelize_test {
namespace {

using test::error_of;

// blocks.N.{attention, mlp}, norm, head: the names and kinds of a model, without its passes.
class Block : public Module {
 public:
  Block(std::int64_t heads, std::int64_t kv_heads, std::int64_t hidden)
      : attention({heads * 4, heads, kv_heads, 4, {}, {}}, RopeTables::make(4, 4, 10000.0)),
        mlp(heads * 4, hidden) {
    add("attention", attention);
    add("mlp", mlp);
  }
  Attention attention;
  SwiGLU mlp;

 private:
  Tensors do_forward(Inputs x, Frame& f) override { return mlp.forward(attention.forward(x, f), f); }
  Tensors do_backward(Inputs dy, Frame& f) override { return attention.backward(mlp.backward(dy, f), f); }
};

class Model : public Module {
 public:
  explicit Model(std::int64_t heads = 4, std::int64_t kv_heads = 4, std::int64_t hidden = 24,
                 std::int64_t out = 12)
      : norm(heads * 4), head(heads * 4, out, true) {
    for (int i = 0; i < 2; ++i) blocks.append(std::make_unique<Block>(heads, kv_heads, hidden));
    add("blocks", blocks);
    add("norm", norm);
    add("head", head);
  }
  Sequential blocks;
  RMSNorm norm;
  Linear head;

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    return head.forward(norm.forward(blocks.forward(x, f), f), f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return blocks.backward(norm.backward(head.backward(dy, f), f), f);
  }
};

Plan whole_plan() {
  return {{"blocks.*.attention", Style::enter},         {"blocks.*.attention.q_proj", Style::column},
          {"blocks.*.attention.k_proj", Style::column}, {"blocks.*.attention.v_proj", Style::column},
          {"blocks.*.attention.o_proj", Style::row},    {"blocks.*.mlp", Style::enter},
          {"blocks.*.mlp.gate_proj", Style::column},    {"blocks.*.mlp.up_proj", Style::column},
          {"blocks.*.mlp.down_proj", Style::row},       {"head", Style::column_gathered}};
}

struct Parallelize : ::testing::Test {
  Context context;
  DeviceMesh mesh(int dp, int tp) {
    return DeviceMesh::arithmetic(context, MeshShape{{"dp", dp}, {"tp", tp}}, dp * tp - 1);
  }
  // Nothing of the model has changed.
  static void expect_untouched(Module& model) {
    model.visit([](Module& m) {
      EXPECT_TRUE(m.before().empty()) << m.path();
      EXPECT_TRUE(m.after().empty()) << m.path();
      for (const auto& [name, p] : m.own_parameters()) EXPECT_EQ(p->layout(), nullptr) << p->path();
    });
  }
  // Returns the text of the error, after a check that nothing has changed.
  std::string refused(Module& model, int tp, const Plan& plan) {
    const Error e = error_of([&] { parallelize(model, mesh(1, tp)["tp"], plan); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument) << e.what();
    expect_untouched(model);
    return e.what();
  }
};

TEST_F(Parallelize, SetsLayoutsAndBoundariesAndNothingElse) {
  Model model;
  const DeviceMesh root = mesh(2, 2), tp = root["tp"];
  parallelize(model, tp, whole_plan());
  const auto layout = [&](const Placement& on_tp, const Shape& global) {
    return make_layout(root, {{"tp", on_tp}}, global);
  };
  for (const char* block : {"blocks.0.", "blocks.1."}) {
    const std::string b = block;
    for (const char* name : {"q_proj", "k_proj", "v_proj"})
      EXPECT_EQ(model.parameter(b + "attention." + name + ".weight")->layout(), layout(Shard{0}, {16, 16}));
    EXPECT_EQ(model.parameter(b + "attention.o_proj.weight")->layout(), layout(Shard{1}, {16, 16}));
    for (const char* name : {"gate_proj", "up_proj"})
      EXPECT_EQ(model.parameter(b + "mlp." + name + ".weight")->layout(), layout(Shard{0}, {24, 16}));
    EXPECT_EQ(model.parameter(b + "mlp.down_proj.weight")->layout(), layout(Shard{1}, {16, 24}));
  }
  EXPECT_EQ(model.head.weight->layout(), layout(Shard{0}, {12, 16}));
  EXPECT_EQ(model.head.bias->layout(), layout(Shard{0}, {12}));
  EXPECT_EQ(model.norm.weight->layout(), nullptr);
  EXPECT_EQ(model.parameter("blocks.1.mlp.down_proj.weight")->local_shape(), Shape({16, 12}));

  std::string boundaries;
  model.visit([&](Module& m) {
    if (!m.before().empty()) boundaries += m.path() + " before, ";
    if (!m.after().empty())
      boundaries += m.path() + " after " +
                    to_string(dynamic_cast<const RedistributeBoundary&>(*m.after().at(0).boundary).from()) +
                    ", ";
  });
  EXPECT_EQ(
      boundaries,
      "blocks.0.attention before, blocks.0.attention.o_proj after Partial(sum), blocks.0.mlp before, "
      "blocks.0.mlp.down_proj after Partial(sum), blocks.1.attention before, blocks.1.attention.o_proj after "
      "Partial(sum), blocks.1.mlp before, blocks.1.mlp.down_proj after Partial(sum), head before, head after "
      "Shard(-1), ");
}

TEST_F(Parallelize, KeepsPlacementsOnOtherAxes) {
  Linear layer(8, 6, true);
  const DeviceMesh root = mesh(2, 2);
  layer.weight->set_layout(make_layout(root, {{"dp", Shard{1}}}, {6, 8}));
  parallelize(layer, root["tp"], {{"", Style::row}});
  EXPECT_EQ(layer.weight->layout(), make_layout(root, {{"dp", Shard{1}}, {"tp", Shard{1}}}, {6, 8}));
  EXPECT_EQ(layer.bias->layout(), replicated_layout(root, {6}));
}

TEST_F(Parallelize, AColumnWithoutOneAroundItHasItsOwnBoundary) {
  Linear layer(8, 6);
  parallelize(layer, mesh(1, 2)["tp"], {{"", Style::column}});
  ASSERT_FALSE(layer.before().empty());
  EXPECT_TRUE(layer.after().empty());
}

TEST_F(Parallelize, NamesWhyAConvolutionIsNotSplit) {
  Conv2dConfig config;
  config.in = 4, config.out = 4, config.stride = 2;
  Conv2d layer(config);
  const Error e = error_of([&] { parallelize(layer, mesh(1, 2)["tp"], {{"", Style::column}}); });
  EXPECT_STREQ(e.what(),
               "parallelize: \"\" is of kind Conv2d, which has stride 2, and only a 1x1 convolution of "
               "stride 1, without "
               "padding, of dilation 1, in one group, with padding mode zeros, is split over channels; style "
               "column (pattern "
               "\"\") needs that");
  config.stride = 1, config.in = 3;
  Conv2d odd(config);
  const Error rows = error_of([&] { parallelize(odd, mesh(1, 2)["tp"], {{"", Style::row}}); });
  EXPECT_STREQ(rows.what(),
               "parallelize: \"\" has 3 input channels; they do not divide into tp=2 (3 = 2 x 1 + 1)");
}

TEST_F(Parallelize, PathsAreRelativeToTheRootGiven) {
  Model model;
  parallelize(model.blocks, mesh(1, 2)["tp"], {{"1.mlp.down_proj", Style::row}});
  EXPECT_NE(model.parameter("blocks.1.mlp.down_proj.weight")->layout(), nullptr);
  EXPECT_EQ(model.parameter("blocks.0.mlp.down_proj.weight")->layout(), nullptr);
}

TEST_F(Parallelize, OnOneRankThePlanIsCheckedAndNothingIsSet) {
  Model model;
  parallelize(model, mesh(2, 1)["tp"], whole_plan());
  expect_untouched(model);
  EXPECT_EQ(refused(model, 1, {{"norm", Style::row}}),
            "parallelize: \"norm\" is of kind RMSNorm, which cannot be split by rows; style row (pattern "
            "\"norm\") needs "
            "that");
}

TEST_F(Parallelize, APatternThatMatchesNothingSaysHowFarItLed) {
  Model model;
  EXPECT_EQ(refused(model, 2, {{"head", Style::column}, {"blocks.*.attn.q_proj", Style::column}}),
            "parallelize: \"blocks.*.attn.q_proj\" matches no module; \"blocks.0\" has attention, mlp");
  EXPECT_EQ(refused(model, 2, {{"layers.*", Style::enter}}),
            "parallelize: \"layers.*\" matches no module; the root has blocks, norm, head");
  EXPECT_EQ(refused(model, 2, {{"norm.scale", Style::row}}),
            "parallelize: \"norm.scale\" matches no module; \"norm\" has no children");
}

TEST_F(Parallelize, AModuleNamedTwiceIsRefused) {
  Model model;
  EXPECT_EQ(refused(model, 2, {{"head", Style::column}, {"h*", Style::row}}),
            "parallelize: \"head\" is named twice: as column by \"head\" and as row by \"h*\"");
}

TEST_F(Parallelize, HeadsMustDivide) {
  Model model(4);
  EXPECT_EQ(refused(model, 3, whole_plan()),
            "parallelize: \"blocks.0.attention\" has 4 heads; they do not divide into tp=3 (4 = 3 x 1 + 1)");
  Model few(8, 2);
  EXPECT_EQ(refused(few, 4, whole_plan()),
            "parallelize: \"blocks.0.attention\" has 2 kv heads; tp=4 needs at least one for each rank (2 = "
            "4 x 0 + "
            "2)");
  // Units are checked only if a layer inside is split.
  parallelize(few, mesh(1, 4)["tp"], {{"head", Style::column}});
  EXPECT_NE(few.head.weight->layout(), nullptr);
}

TEST_F(Parallelize, SizesMustDivide) {
  Model odd(4, 4, 27);
  EXPECT_EQ(refused(odd, 2, whole_plan()),
            "parallelize: \"blocks.0.mlp.gate_proj\" has 27 output features; they do not divide into tp=2 "
            "(27 = 2 x "
            "13 + 1)");
  EXPECT_EQ(
      refused(odd, 2, {{"blocks.1.mlp.down_proj", Style::row}}),
      "parallelize: \"blocks.1.mlp.down_proj\" has 27 input features; they do not divide into tp=2 (27 = 2 x "
      "13 + 1)");
  Model few(4, 4, 24, 3);
  EXPECT_EQ(
      refused(few, 4, {{"head", Style::column_gathered}}),
      "parallelize: \"head\" has 3 output features; tp=4 needs at least one for each rank (3 = 4 x 0 + 3)");
}

TEST_F(Parallelize, EnterWithoutAColumnInsideIsRefused) {
  Model model;
  EXPECT_EQ(refused(model, 2, {{"blocks.*.mlp", Style::enter}, {"blocks.*.mlp.down_proj", Style::row}}),
            "parallelize: \"blocks.0.mlp\" is named enter (pattern \"blocks.*.mlp\"), but no layer inside it "
            "is split "
            "by columns");
}

TEST_F(Parallelize, ATiedWeightIsRefused) {
  Model model;
  Linear other(16, 12);
  model.head.tie_weight(other.weight);
  EXPECT_EQ(refused(model, 2, {{"head", Style::column_gathered}}),
            "parallelize: \"head\": its weight \"weight\" is shared by 2 modules, of which the plan splits 1 "
            "as Shard(0); "
            "expected all or none");
}

TEST_F(Parallelize, TwiceAndTooLateAreRefused) {
  Model model;
  const DeviceMesh root = mesh(1, 2);
  parallelize(model, root["tp"], {{"head", Style::column}});
  const auto again = [&] { parallelize(model, root["tp"], {{"head", Style::column}}); };
  EXPECT_STREQ(error_of(again).what(), "parallelize: \"head.weight\" is Shard(0) on tp=2 already");
  const auto elsewhere = [&] { parallelize(model, mesh(1, 2)["tp"], {{"head", Style::column}}); };
  EXPECT_STREQ(error_of(elsewhere).what(),
               "parallelize: \"head.weight\" lies over dp=1 x tp=2, the axis tp=2 belongs to dp=1 x tp=2: "
               "not the same DeviceMesh; use one for both");
  parallelize(model, root["tp"], {{"blocks.0.mlp", Style::enter}, {"blocks.0.mlp.up_proj", Style::column}});
  const auto boundary = [&] {
    parallelize(model, root["tp"],
                {{"blocks.0.mlp", Style::enter}, {"blocks.0.mlp.gate_proj", Style::column}});
  };
  EXPECT_STREQ(error_of(boundary).what(), "parallelize: \"blocks.0.mlp\" has a boundary already");

  Linear late(4, 4);
  Compute compute(context);
  materialise(late, compute);
  EXPECT_EQ(refused(late, 2, {{"", Style::column}}),
            "parallelize: \"weight\" has memory already; parallelize comes before materialise");
}

TEST_F(Parallelize, ABufferThatHasMemoryIsFoundBeforeAnythingChanges) {
  Compute compute(context);
  Sequential pair;
  pair.append(std::make_unique<Linear>(4, 4));
  BatchNorm& late = dynamic_cast<BatchNorm&>(pair.append(std::make_unique<BatchNorm>(4)));
  late.running_var->materialise(compute);
  EXPECT_EQ(refused(pair, 2, {{"0", Style::column}, {"1", style_named("fed_column")}}),
            "parallelize: \"1.running_var\" has memory already; parallelize comes before materialise");
  for (const Parameter* p : pair.parameters()) EXPECT_EQ(p->layout(), nullptr) << p->path();
  EXPECT_TRUE(pair.get("0").before().empty());
}

TEST_F(Parallelize, AListOfAxesSplitsAsOne) {
  Linear layer(4, 8);
  parallelize(layer, mesh(2, 2), {{"", Style::column}});
  EXPECT_EQ(layer.weight->local_shape(), (Shape{2, 4}));
}

}  // namespace
}  // namespace weft::parallelize_test
