// Modules with their own plans: the effect of parallelize on them, and the errors. No communication: each
// mesh is as one of its ranks sees it. models/weather_golden and tp/spectral_norm test that split layers
// compute the results of whole layers.
#include "weft/tp/own_plan.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/linear.hpp"

namespace weft::own_plan_test {
namespace {

using test::error_of;

// layers.0 and layers.2 are a pair; each kind has its plan.
class Pair : public Module {
 public:
  explicit Pair(std::int64_t hidden = 8) {
    layers.append(std::make_unique<Linear>(4, hidden, true));
    layers.append(std::make_unique<ReLU>());
    layers.append(std::make_unique<Linear>(hidden, 4, true));
    add("layers", layers);
  }
  Sequential layers;
  std::vector<Unit> units() const override { return {{"widgets", widgets}}; }
  std::int64_t widgets = 4;

 protected:
  OwnPlan class_plan() const override { return {.columns = {"layers.0"}, .rows = {"layers.2"}}; }

 private:
  Tensors do_forward(Inputs x, Frame& f) override { return layers.forward(x, f); }
  Tensors do_backward(Inputs dy, Frame& f) override { return layers.backward(dy, f); }
};

// A Linear whose rule recommends that it stays whole.
class Reluctant : public Linear {
 public:
  using Linear::Linear;
  ShardRule shard_rule(Split split) const override {
    ShardRule rule = Linear::shard_rule(split);
    rule.whole_by_default = "a spectral norm";
    return rule;
  }
};

class PairWithReluctant : public Module {
 public:
  PairWithReluctant() {
    layers.append(std::make_unique<Linear>(4, 8));
    layers.append(std::make_unique<Reluctant>(8, 4));
    add("layers", layers);
  }
  Sequential layers;
  std::vector<Unit> units() const override { return {{"heads", 3}}; }

 protected:
  OwnPlan class_plan() const override { return {.columns = {"layers.0"}, .rows = {"layers.1"}}; }

 private:
  Tensors do_forward(Inputs x, Frame& f) override { return layers.forward(x, f); }
  Tensors do_backward(Inputs dy, Frame& f) override { return layers.backward(dy, f); }
};

struct OwnPlans : ::testing::Test {
  std::vector<std::string> log;
  Context context{{.log_sink = [this](LogLevel level, std::string_view line) {
    log.push_back(std::string(name(level)) + " " + std::string(line));
  }}};
  DeviceMesh tp(int ranks) {
    return DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}, {"tp", ranks}}, 0)["tp"];
  }
  // The layers that are split, and the places of boundaries.
  static std::string seen(Module& model) {
    std::string text;
    model.visit([&](Module& m) {
      for (const auto& [name, p] : m.own_parameters())
        if (p->layout() && !is_replicate(p->layout()->on("tp")))
          text += p->path() + " " + to_string(p->layout()->on("tp")) + ", ";
      if (!m.before().empty()) text += m.path() + " before, ";
      if (!m.after().empty()) text += m.path() + " after, ";
    });
    return text;
  }
  // Returns the text of the error, after a check that nothing has changed.
  std::string refused(Module& model, int ranks) {
    const std::string before = seen(model);
    const Error e = error_of([&] { parallelize(model, tp(ranks)); });
    EXPECT_EQ(e.code(), ErrorCode::bad_argument) << e.what();
    EXPECT_EQ(seen(model), before);
    return e.what();
  }
};

const char* const kPairIsSplit =
    "layers.0.weight Shard(0), layers.0.bias Shard(0), layers.0 before, layers.2.weight Shard(1), layers.2 "
    "after, ";

TEST_F(OwnPlans, APairOfColumnsAndRowsInAContainer) {
  Pair model;
  EXPECT_TRUE(supports_tp(model));
  const OwnPlanCount count = parallelize(model, tp(2));
  EXPECT_EQ(count.split, 1);
  EXPECT_EQ(count.skipped, 0);
  EXPECT_EQ(seen(model), kPairIsSplit);
  EXPECT_TRUE(log.empty());
}

TEST_F(OwnPlans, AMapOfStylesOfOneInstance) {
  Sequential model;
  for (int i = 0; i < 3; ++i) model.append(std::make_unique<Pair>());
  model.get("1").set_own_plan(OwnPlan{.styles = {{"layers.0", "column_gathered"}}});
  model.get("2").set_own_plan(OwnPlan{});  // stays whole
  const OwnPlanCount count = parallelize(model, tp(2));
  EXPECT_EQ(count.split, 2);
  EXPECT_EQ(seen(model),
            "0.layers.0.weight Shard(0), 0.layers.0.bias Shard(0), 0.layers.0 before, 0.layers.2.weight "
            "Shard(1), 0.layers.2 after, "
            "1.layers.0.weight Shard(0), 1.layers.0.bias Shard(0), 1.layers.0 before, 1.layers.0 after, ");
}

TEST_F(OwnPlans, NoPlanOfTheInstanceMeansThatOfItsKind) {
  Pair model;
  model.set_own_plan(OwnPlan{.styles = {{"layers.2", "column_gathered"}}});
  model.set_own_plan(std::nullopt);
  EXPECT_EQ(model.own_plan(), (OwnPlan{.columns = {"layers.0"}, .rows = {"layers.2"}}));
  parallelize(model, tp(2));
  EXPECT_EQ(seen(model), kPairIsSplit);
}

TEST_F(OwnPlans, StylesByName) {
  for (const Style& style : {Style::enter, Style::column, Style::column_gathered, Style::row,
                             Style::vocabulary, Style::sequence, Style::cut_sequence, Style::gather_sequence})
    EXPECT_EQ(style_named(style.name), style);
  EXPECT_EQ(style_named("fed_column").split, Split::column);
  EXPECT_FALSE(style_named("fed_column").before.has_value());
  Pair model;
  model.set_own_plan(OwnPlan{.styles = {{"layers.0", "colums"}}});
  EXPECT_TRUE(
      refused(model, 2).starts_with("parallelize: the plan of \"\" itself: \"layers.0\": style \"colums\"; "
                                    "expected one of enter, column, "))
      << refused(model, 2);
}

TEST_F(OwnPlans, AModelWithoutAnyIsRefused) {
  Linear model(4, 4);
  EXPECT_FALSE(supports_tp(model));
  EXPECT_EQ(
      refused(model, 2),
      "parallelize: no module of the tree has a plan of its own; give one: parallelize(root, axis, plan), "
      "or set_own_plan() on a module");
}

TEST_F(OwnPlans, HalfAPairIsRefused) {
  Pair model;
  model.set_own_plan(OwnPlan{.columns = {"layers.0"}});
  EXPECT_EQ(refused(model, 2),
            "parallelize: the plan of \"\" itself has columns but no rows; expected both, or styles");
  model.set_own_plan(OwnPlan{.rows = {"layers.2"}});
  EXPECT_EQ(refused(model, 2),
            "parallelize: the plan of \"\" itself has rows but no columns; expected both, or styles");
}

TEST_F(OwnPlans, APairAndAMapTogetherAreRefused) {
  Pair model;
  model.set_own_plan(OwnPlan{.rows = {"layers.2"}, .styles = {{"layers.0", "column"}}});
  EXPECT_EQ(refused(model, 2),
            "parallelize: the plan of \"\" itself has styles and rows; expected only one of them");
}

TEST_F(OwnPlans, WhatOnePlanHasWrongChangesNothingAnywhere) {
  const auto with = [](auto change) {
    auto model = std::make_unique<Sequential>();
    for (int i = 0; i < 2; ++i) model->append(std::make_unique<Pair>());
    change(dynamic_cast<Pair&>(model->get("1")));
    return model;
  };
  const auto missing =
      with([](Pair& p) { p.set_own_plan(OwnPlan{.columns = {"layers.0"}, .rows = {"layers.3"}}); });
  EXPECT_EQ(refused(*missing, 2), "parallelize: \"1.layers.3\" matches no module; \"1.layers\" has 0, 1, 2");
  const auto wrong_kind =
      with([](Pair& p) { p.set_own_plan(OwnPlan{.columns = {"layers.0"}, .rows = {"layers.1"}}); });
  EXPECT_EQ(refused(*wrong_kind, 2),
            "parallelize: \"1.layers.1\" is of kind ReLU, which cannot be split by rows; style row (pattern "
            "\"1.layers.1\") needs that");
  const auto constraint = with([](Pair& p) { p.widgets = 3; });
  EXPECT_EQ(refused(*constraint, 2),
            "parallelize: \"1\" has 3 widgets; they do not divide into tp=2 (3 = 2 x 1 + 1)");
  const auto twice_named = with([](Pair& p) {
    p.layers.get("0").set_own_plan(OwnPlan{.styles = {{"", "column"}}});
  });
  EXPECT_EQ(refused(*twice_named, 2),
            "parallelize: \"1.layers.0\" is named twice: as column by \"1.layers.0\" and as column by "
            "\"1.layers.0\"");
}

TEST_F(OwnPlans, TwiceIsRefused) {
  Pair model;
  const DeviceMesh axis = tp(2);
  parallelize(model, axis);
  EXPECT_STREQ(error_of([&] { parallelize(model, axis); }).what(),
               "parallelize: \"layers.0.weight\" is Shard(0) on tp=2 already");
}

TEST_F(OwnPlans, AWholePairIsSkippedForOneOfItsLayersAndCounted) {
  Sequential model;
  model.append(std::make_unique<Pair>());
  model.append(std::make_unique<PairWithReluctant>());  // 3 heads, of which nobody asks
  const OwnPlanCount count = parallelize(model, tp(2));
  EXPECT_EQ(count.split, 1);
  EXPECT_EQ(count.skipped, 1);
  EXPECT_EQ(seen(model.get("1")), "");
  EXPECT_NE(seen(model.get("0")), "");
  ASSERT_EQ(log.size(), 1u);
  EXPECT_EQ(
      log[0],
      "warning [program] parallelize: 1 of 2 modules with a plan are split over tp=2; 1 stay whole, since "
      "a layer has a spectral norm: \"1\"");
}

TEST_F(OwnPlans, APairInsideOfOneThatIsSkippedIsSplit) {
  struct Around : PairWithReluctant {
    Around() { add("inside", inside); }
    Pair inside;
  } model;  // 3 heads, of which nobody asks
  const OwnPlanCount count = parallelize(model, tp(2));
  EXPECT_EQ(count.split, 1);
  EXPECT_EQ(count.skipped, 1);
  EXPECT_EQ(seen(model.get("layers")), "");
  EXPECT_NE(seen(model.get("inside")), "");
  Around other;
  other.inside.widgets = 3;
  EXPECT_STREQ(error_of([&] { parallelize(other, tp(2)); }).what(),
               "parallelize: \"inside\" has 3 widgets; they do not divide into tp=2 (3 = 2 x 1 + 1)");
}

TEST_F(OwnPlans, NothingSplitIsSaidLoudly) {
  Sequential model;
  for (int i = 0; i < 10; ++i) model.append(std::make_unique<PairWithReluctant>());
  const OwnPlanCount count = parallelize(model, tp(2));
  EXPECT_EQ(count.split, 0);
  EXPECT_EQ(count.skipped, 10);
  EXPECT_EQ(seen(model), "");
  ASSERT_EQ(log.size(), 1u);
  EXPECT_EQ(
      log[0],
      "error [program] parallelize: NOTHING is split over tp=2: each of the 10 modules with a plan has a "
      "layer with a spectral norm and stays whole, so every rank computes all of the model: \"0\", \"1\", "
      "\"2\", \"3\", \"4\", \"5\", \"6\", \"7\" and 2 more");
}

TEST_F(OwnPlans, OnRequestAllIsSplitAndThenConstraintsHold) {
  PairWithReluctant model;
  const OwnPlanOptions split{.under_spectral_norm = WholeByDefault::split};
  EXPECT_STREQ(error_of([&] { parallelize(model, tp(2), split); }).what(),
               "parallelize: \"\" has 3 heads; they do not divide into tp=2 (3 = 2 x 1 + 1)");
  const OwnPlanCount count = parallelize(model, tp(1), split);
  EXPECT_EQ(count.split, 1);
  EXPECT_TRUE(log.empty());
}

}  // namespace
}  // namespace weft::own_plan_test
