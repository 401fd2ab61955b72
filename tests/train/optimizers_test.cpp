// Every optimizer: by its formulas in f64, on parameters however they are cut, saved and continued on another
// mesh, with groups, and with parameters that are unfrozen later.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/temporary_folder.hpp"
#include "train/bag.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/ema.hpp"
#include "weft/train/make_optimizer.hpp"

namespace weft::optimizers_test {
namespace {

using test::Bag;
using test::error_of;
using test::Rank;
using test::Ranks;

using Matrix = std::vector<double>;

struct Size {
  const char* name;
  std::int64_t rows, columns;  // columns 0: a vector
  Shape shape() const { return columns == 0 ? Shape{rows} : Shape{rows, columns}; }
  std::size_t count() const { return static_cast<std::size_t>(rows * (columns == 0 ? 1 : columns)); }
};
constexpr Size kSizes[] = {{"wide", 6, 10}, {"tall", 11, 4}, {"vector", 9, 0}, {"embedding", 8, 5}};
constexpr double kRate = 0.01;

float first_value(const Size& s, std::size_t i) {
  return 0.5f * std::sin(static_cast<float>(i * 7 + static_cast<std::size_t>(s.rows)));
}
float gradient_at(const Size& s, int step, std::size_t i) {
  return std::sin(static_cast<float>(step * 3) +
                  static_cast<float>(i * 5 + static_cast<std::size_t>(s.rows)));
}

struct Model {
  // `layouts`: one per size; empty: plain parameters.
  Model(Context& context, const std::vector<LayoutRef>& layouts = {}) {
    for (std::size_t k = 0; k < std::size(kSizes); ++k) {
      const Size& s = kSizes[k];
      Parameter& p = bag.put(context, s.name, s.shape(), layouts.empty() ? nullptr : layouts[k]);
      fill(p.write_master(), s, [&](std::size_t i) { return first_value(s, i); });
    }
  }
  // Writes this rank's part of a whole whose element i is value(i).
  void fill(const Tensor& part, const Size& s, const std::function<float(std::size_t)>& value) {
    const Tensor whole = bag.compute().make(s.shape());
    for (std::size_t i = 0; i < s.count(); ++i) whole.f32()[i] = value(i);
    const Tensor mine = part.layout() == nullptr ? whole : distribute(whole, part.layout());
    std::copy(mine.f32().begin(), mine.f32().end(), part.f32().begin());
  }
  void give_gradients(int step) {
    for (std::size_t k = 0; k < std::size(kSizes); ++k) {
      Parameter& p = *bag.parameters()[k];
      p.zero_gradient();
      if (!p.trainable()) continue;
      p.accumulate(p.master().layout(), [&](const Tensor& into, bool) {
        fill(into.with_layout(p.master().layout()), kSizes[k],
             [&](std::size_t i) { return gradient_at(kSizes[k], step, i); });
      });
    }
  }
  void train(Optimizer& optimizer, int first, int steps, double rate = kRate) {
    for (int step = first; step < first + steps; ++step) {
      give_gradients(step);
      optimizer.step(rate);
    }
  }
  std::vector<std::vector<float>> wholes() const {
    std::vector<std::vector<float>> all;
    for (const Parameter* p : bag.parameters()) {
      const Tensor whole = full(p->master());
      all.emplace_back(whole.f32().begin(), whole.f32().end());
    }
    return all;
  }
  Bag bag;
};

Matrix newton_schulz(Matrix u, std::int64_t rows, std::int64_t columns, int iterations) {
  const auto turn = [](const Matrix& x, std::int64_t m, std::int64_t n) {
    Matrix y(x.size());
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j)
        y[static_cast<std::size_t>(j * m + i)] = x[static_cast<std::size_t>(i * n + j)];
    return y;
  };
  const auto product = [](const Matrix& a, const Matrix& b, std::int64_t m, std::int64_t k, std::int64_t n) {
    Matrix c(static_cast<std::size_t>(m * n));
    for (std::int64_t i = 0; i < m; ++i)
      for (std::int64_t j = 0; j < n; ++j)
        for (std::int64_t l = 0; l < k; ++l)
          c[static_cast<std::size_t>(i * n + j)] +=
              a[static_cast<std::size_t>(i * k + l)] * b[static_cast<std::size_t>(l * n + j)];
    return c;
  };
  const bool turned = rows > columns;
  if (turned) u = turn(u, rows, columns);
  const std::int64_t m = std::min(rows, columns), n = std::max(rows, columns);
  double squares = 0;
  for (const double x : u) squares += x * x;
  for (double& x : u) x /= std::max(std::sqrt(squares), 1e-7);
  for (int it = 0; it < iterations; ++it) {
    const Matrix a = product(u, turn(u, m, n), m, n, m);
    Matrix b = product(a, a, m, m, m);
    for (std::size_t i = 0; i < b.size(); ++i) b[i] = 2.0315 * b[i] - 4.775 * a[i];
    const Matrix bu = product(b, u, m, m, n);
    for (std::size_t i = 0; i < u.size(); ++i) u[i] = 3.4445 * u[i] + bu[i];
  }
  return turned ? turn(u, m, n) : u;
}

// The formulas of the headers, in f64, written with what they say and not with what the code keeps.
struct ByHand {
  Matrix w, m, v, x, z;
  double rates = 0;
  void step(const Size& s, const AdamW::Options& o, int t, double decay) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(gradient_at(s, t, i));
      w[i] -= kRate * decay * w[i];
      m[i] = o.beta1 * m[i] + (1 - o.beta1) * g;
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      w[i] -= kRate * (m[i] / (1 - std::pow(o.beta1, t))) /
              (std::sqrt(v[i] / (1 - std::pow(o.beta2, t))) + o.eps);
    }
  }
  void step(const Size& s, const SGD::Options& o, int t, double decay) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      m[i] = o.momentum * m[i] + (static_cast<double>(gradient_at(s, t, i)) + decay * w[i]);
      w[i] -= kRate * m[i];
    }
  }
  void step(const Size& s, const Lion::Options& o, int t, double decay) {
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(gradient_at(s, t, i)), c = o.beta1 * m[i] + (1 - o.beta1) * g;
      w[i] -= kRate * ((c > 0 ? 1 : -1) + decay * w[i]);
      m[i] = o.beta2 * m[i] + (1 - o.beta2) * g;
    }
  }
  // The two sequences x and z of the paper; w is y.
  void step(const Size& s, const ScheduleFreeAdamW::Options& o, int t, double decay) {
    if (t == 1) x = z = w;
    rates += kRate * kRate;
    const double c = kRate * kRate / rates;
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(gradient_at(s, t, i));
      v[i] = o.beta2 * v[i] + (1 - o.beta2) * g * g;
      z[i] -= kRate * (g / (std::sqrt(v[i] / (1 - std::pow(o.beta2, t))) + o.eps) + decay * w[i]);
      x[i] = (1 - c) * x[i] + c * z[i];
      w[i] = (1 - o.beta1) * z[i] + o.beta1 * x[i];
    }
  }
  void step(const Size& s, const Muon::Options& o, int t, double decay) {
    if (s.columns == 0 || std::string_view(s.name) == "embedding") {
      step(s, AdamW::Options{o.adamw_beta1, o.adamw_beta2, o.adamw_eps, 0}, t, decay);
      return;
    }
    Matrix u(w.size());
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double g = static_cast<double>(gradient_at(s, t, i));
      m[i] = o.momentum * m[i] + (1 - o.momentum) * g;
      u[i] = o.nesterov ? o.momentum * m[i] + (1 - o.momentum) * g : m[i];
    }
    const Matrix step = newton_schulz(u, s.rows, s.columns, o.iterations);
    const auto rows = static_cast<double>(s.rows), columns = static_cast<double>(s.columns);
    const double scale = o.scale == Muon::Scale::original ? std::sqrt(std::max(1.0, rows / columns))
                                                          : 0.2 * std::sqrt(std::max(rows, columns));
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= kRate * (decay * w[i] + scale * step[i]);
  }
};

struct Kind {
  const char* name;
  OptimizerOptions options;
  double tolerance;  // after 100 steps
};
std::vector<Kind> kinds() {
  return {
      {"adamw", AdamW::Options{}, 2e-5},
      {"sgd", SGD::Options{.momentum = 0.9, .weight_decay = 0.05}, 2e-5},
      {"plain sgd", SGD::Options{.momentum = 0, .weight_decay = 0.05}, 2e-6},
      {"lion", Lion::Options{}, 2e-6},
      {"schedule_free", ScheduleFreeAdamW::Options{}, 2e-5},
      {"muon", Muon::Options{.adamw_for = {"embedding"}}, 1e-4},
      {"plain muon",
       Muon::Options{
           .momentum = 0.9, .nesterov = false, .scale = Muon::Scale::original, .adamw_for = {"embedding"}},
       1e-4}};
}

TEST(Optimizers, FollowTheirFormulasFor100Steps) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Context context;
    Model model(context);
    const auto optimizer = make_optimizer(model.bag.compute(), model.bag.parameters(), kind.options);
    model.train(*optimizer, 1, 100);
    const auto expect_values = [&](const std::function<double(const ByHand&, std::size_t)>& of) {
      for (std::size_t k = 0; k < std::size(kSizes); ++k) {
        const Size& s = kSizes[k];
        ByHand hand;
        for (std::size_t i = 0; i < s.count(); ++i) hand.w.push_back(static_cast<double>(first_value(s, i)));
        hand.m = hand.v = Matrix(s.count());
        std::visit(
            [&](const auto& o) {
              for (int t = 1; t <= 100; ++t) hand.step(s, o, t, s.columns == 0 ? 0 : o.weight_decay);
            },
            kind.options);
        for (std::size_t i = 0; i < s.count(); ++i)
          ASSERT_NEAR(model.bag.parameters()[k]->master().f32()[i], of(hand, i), kind.tolerance)
              << s.name << " " << i;
      }
    };
    expect_values([](const ByHand& h, std::size_t i) { return h.w[i]; });
    if (!std::holds_alternative<ScheduleFreeAdamW::Options>(kind.options)) continue;
    const auto trained = model.wholes();
    {
      const Optimizer::Swapped values(*optimizer);
      expect_values([](const ByHand& h, std::size_t i) { return h.x[i]; });
      EXPECT_NE(model.wholes(), trained);
    }
    EXPECT_EQ(model.wholes(), trained) << "to the same bits";
  }
}

// Parts of a mesh of four ranks: whole, cut by rows (uneven, some parts empty), by columns, by both.
std::vector<std::vector<LayoutRef>> cuts(const DeviceMesh& mesh) {
  std::vector<std::vector<LayoutRef>> all(4);
  for (const Size& s : kSizes) {
    const Shape shape = s.shape();
    const bool matrix = s.columns != 0;
    all[0].push_back(make_layout(mesh, {Replicate{}, Replicate{}}, shape));
    all[1].push_back(make_layout(mesh, {Shard{0}, Replicate{}}, shape));
    all[2].push_back(make_layout(mesh, {Shard{0}, Shard{matrix ? 1 : 0}}, shape));
    all[3].push_back(make_layout(mesh, {Replicate{}, Shard{matrix ? 1 : 0}}, shape));
  }
  return all;
}

TEST(Optimizers, HaveTheBitsOfOneRankHoweverParametersAreCut) {
  for (const Kind& kind : kinds()) {
    Context context;
    Model one(context);
    const auto alone = make_optimizer(one.bag.compute(), one.bag.parameters(), kind.options);
    one.train(*alone, 1, 5);
    const auto expected = one.wholes();
    alone->swap_in();
    const auto to_evaluate = one.wholes();
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 2}, {"tp", 2}});
      for (const std::vector<LayoutRef>& layouts : cuts(mesh)) {
        SCOPED_TRACE(std::string(kind.name) + " " + to_string(layouts[0]->placements));
        Model model(rank.context, layouts);
        const auto optimizer = make_optimizer(model.bag.compute(), model.bag.parameters(), kind.options);
        model.train(*optimizer, 1, 5);
        EXPECT_EQ(model.wholes(), expected);
        const Optimizer::Swapped values(*optimizer);
        EXPECT_EQ(model.wholes(), to_evaluate);
      }
    });
  }
}

TEST(Optimizers, GoOnFromACheckpointOnAnotherMesh) {
  for (const Kind& kind : kinds()) {
    const test::TemporaryFolder folder;
    Context context;
    Model one(context);
    const auto alone = make_optimizer(one.bag.compute(), one.bag.parameters(), kind.options);
    one.train(*alone, 1, 7);
    const auto expected = one.wholes();
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 2}, {"tp", 2}});
      Model model(rank.context, cuts(mesh)[2]);
      const auto optimizer = make_optimizer(model.bag.compute(), model.bag.parameters(), kind.options);
      model.train(*optimizer, 1, 4);
      save_checkpoint(folder.path() / "run", mesh, 4, model.bag, optimizer.get());
    });
    test::run_ranks(Ranks::threads, 3, [&](Rank& rank) {
      SCOPED_TRACE(kind.name);
      const DeviceMesh mesh(rank.group(), MeshShape{{"dp", 3}});
      std::vector<LayoutRef> layouts;
      for (const Size& s : kSizes) layouts.push_back(make_layout(mesh, {Shard{0}}, s.shape()));
      Model model(rank.context, layouts);
      const auto optimizer = make_optimizer(model.bag.compute(), model.bag.parameters(), kind.options);
      load_checkpoint(folder.path() / "run", mesh, model.bag, optimizer.get());
      model.train(*optimizer, 5, 3);
      EXPECT_EQ(model.wholes(), expected);
    });
  }
}

// A group's rate and decay are those of an optimizer with these options; of two groups the last one counts.
TEST(Optimizers, GroupsHaveRatesAndDecaysOfTheirOwn) {
  Context context;
  const auto trained = [&](const AdamW::Options& options, std::vector<ParameterGroup> groups, double rate) {
    Model model(context);
    AdamW optimizer(model.bag.compute(), model.bag.parameters(), options, std::move(groups));
    model.train(optimizer, 1, 5, rate);
    return model.wholes();
  };
  const auto plain = trained({.weight_decay = 0.2}, {}, 0.02),
             slow = trained({.weight_decay = 0.2}, {}, 0.01),
             undecayed = trained({.weight_decay = 0}, {}, 0.02);
  const auto grouped = trained({.weight_decay = 0.2},
                               {{.patterns = {"wide", "tall"}, .rate = 0},
                                {.patterns = {"wide"}, .rate = 0.5},
                                {.patterns = {"embed*"}, .weight_decay = 0.0}},
                               0.02);
  EXPECT_EQ(grouped[0], slow[0]) << "the last group of two";
  EXPECT_EQ(grouped[1], Model(context).wholes()[1]) << "a rate of 0";
  EXPECT_EQ(grouped[2], plain[2]) << "no group";
  EXPECT_EQ(grouped[3], undecayed[3]);
  // A group may let a vector decay, too.
  EXPECT_NE(trained({.weight_decay = 0}, {{.patterns = {"vector"}, .weight_decay = 0.2}}, 0.02)[2], plain[2]);
}

TEST(Optimizers, NameGroupsAndOptionsThatAreWrong) {
  Context context;
  Model model(context);
  const auto text = [&](const OptimizerOptions& options, std::vector<ParameterGroup> groups = {}) {
    return std::string(error_of([&] {
                         make_optimizer(model.bag.compute(), model.bag.parameters(), options, groups);
                       }).what());
  };
  EXPECT_EQ(text(AdamW::Options{}, {{.patterns = {"wide", "hide"}}}),
            "optimizer: a group has the pattern \"hide\", which matches no parameter");
  EXPECT_EQ(text(AdamW::Options{}, {{.patterns = {"wide"}, .rate = -1}}),
            "optimizer: the rate of a group is -1; expected 0 or more");
  EXPECT_EQ(text(Lion::Options{}, {{.patterns = {"wide"}, .weight_decay = NAN}}),
            "optimizer: the weight_decay of a group is nan; expected 0 or more");
  EXPECT_EQ(text(AdamW::Options{.beta1 = 1}), "optimizer: beta1 is 1; expected 0 or more, and less than 1");
  EXPECT_EQ(text(SGD::Options{.momentum = -1}), "optimizer: momentum is -1; expected 0 or more");
  EXPECT_EQ(text(Lion::Options{.beta2 = 1.5}),
            "optimizer: beta2 is 1.5; expected 0 or more, and less than 1");
  EXPECT_EQ(text(ScheduleFreeAdamW::Options{.beta1 = 0}),
            "optimizer: beta1 is 0; expected more than 0, and less than 1");
  EXPECT_EQ(text(ScheduleFreeAdamW::Options{.eps = -1}),
            "optimizer: eps is -1; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(AdamW::Options{.eps = 0}),
            "optimizer: eps is 0; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(AdamW::Options{.eps = 1e-60}),
            "optimizer: eps is 1e-60; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(AdamW::Options{.eps = 1e300}),
            "optimizer: eps is 1e+300; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(Muon::Options{.adamw_eps = 0}),
            "optimizer: adamw_eps is 0; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(Muon::Options{.momentum = 1}),
            "optimizer: momentum is 1; expected 0 or more, and less than 1");
  EXPECT_EQ(text(Muon::Options{.eps = 0}),
            "optimizer: eps is 0; expected a finite number that is above 0 in f32");
  EXPECT_EQ(text(Muon::Options{.iterations = 0}), "optimizer: iterations is 0; expected 1 to 100");
  EXPECT_EQ(text(Muon::Options{.adamw_for = {"head"}}),
            "optimizer: adamw_for has the pattern \"head\", which matches no parameter");
}

// A parameter that is unfrozen is trained from then on as by a new optimizer: its state begins with its first
// step.
TEST(Optimizers, TrainWhatIsUnfrozen) {
  for (const Kind& kind : kinds()) {
    SCOPED_TRACE(kind.name);
    Context context;
    Model model(context), fresh(context);
    Parameter& wide = *model.bag.parameters()[0];
    wide.set_trainable(false);
    const auto optimizer = make_optimizer(model.bag.compute(), model.bag.parameters(), kind.options);
    model.train(*optimizer, 1, 3);
    EXPECT_EQ(model.wholes()[0], fresh.wholes()[0]);
    wide.set_trainable(true);
    model.give_gradients(4);
    EXPECT_STREQ(error_of([&] { optimizer->step(kRate); }).what(),
                 "optimizer: \"wide\" was frozen when the optimizer was made; add() it when it is unfrozen");
    optimizer->add(wide);
    EXPECT_STREQ(error_of([&] { optimizer->add(wide); }).what(),
                 "optimizer: add(): \"wide\" is trained already");
    model.train(*optimizer, 4, 3);
    const auto other = make_optimizer(fresh.bag.compute(), fresh.bag.parameters(), kind.options);
    fresh.train(*other, 4, 3);
    EXPECT_EQ(model.wholes()[0], fresh.wholes()[0]);
  }
  Context context;
  Model model(context);
  model.bag.parameters()[0]->set_trainable(false);
  AdamW optimizer(model.bag.compute(), model.bag.parameters(), {});
  EXPECT_STREQ(error_of([&] { optimizer.add(*model.bag.parameters()[0]); }).what(),
               "optimizer: add(): \"wide\" is frozen");
}

TEST(Optimizers, TakeNoStepWithTheValuesForEvaluation) {
  Context context;
  Model model(context);
  ScheduleFreeAdamW optimizer(model.bag.compute(), model.bag.parameters(), {});
  model.train(optimizer, 1, 2);
  EXPECT_STREQ(error_of([&] { optimizer.swap_out(); }).what(), "optimizer: swap_out() without swap_in()");
  {
    const Optimizer::Swapped values(optimizer);
    const auto text = [](const char* call) {
      return std::string("optimizer: ") + call +
             " while the values for evaluation are swapped in; swap_out() first";
    };
    EXPECT_EQ(error_of([&] { optimizer.step(kRate); }).what(), text("step()"));
    EXPECT_EQ(error_of([&] { optimizer.swap_in(); }).what(), text("swap_in()"));
    EXPECT_EQ(error_of([&] { optimizer.visit_state([](auto&&...) {}); }).what(), text("visit_state()"));
  }
  EXPECT_FALSE(optimizer.swapped());
}

// Averages, and the values to evaluate, are never trained, averaged or exchanged in the place of the masters.
TEST(Optimizers, ValuesInThePlaceOfTheMastersAreLeftAlone) {
  Context context;
  Model model(context);
  ScheduleFreeAdamW optimizer(model.bag.compute(), model.bag.parameters(), {});
  Ema ema(model.bag.compute(), model.bag.parameters());
  model.train(optimizer, 1, 2);
  ema.update();
  model.train(optimizer, 3, 2);
  const auto trained = model.wholes();
  {
    const Ema::Swapped averages(ema);
    EXPECT_STREQ(error_of([&] { optimizer.swap_in(); }).what(),
                 "optimizer: swap_in(): \"wide\" holds the averages; swap_out() first");
    EXPECT_STREQ(error_of([&] { optimizer.step(kRate); }).what(),
                 "optimizer: step(): \"wide\" holds the averages; swap_out() first");
    EXPECT_FALSE(optimizer.swapped());
  }
  {
    const Optimizer::Swapped values(optimizer);
    EXPECT_STREQ(error_of([&] { ema.swap_in(); }).what(),
                 "ema: swap_in(): \"wide\" holds the values for evaluation; swap_out() first");
    EXPECT_STREQ(error_of([&] { ema.update(); }).what(),
                 "ema: update(): \"wide\" holds the values for evaluation; swap_out() first");
    EXPECT_FALSE(ema.swapped());
  }
  EXPECT_EQ(model.wholes(), trained);
}

TEST(Optimizers, RefuseRatesAndParametersGivenTwice) {
  Context context;
  Model model(context);
  AdamW optimizer(model.bag.compute(), model.bag.parameters(), {});
  model.give_gradients(1);
  const auto before = model.wholes();
  EXPECT_STREQ(error_of([&] { optimizer.step(NAN); }).what(),
               "optimizer: the learning rate is nan; expected a finite number of 0 or more");
  EXPECT_STREQ(error_of([&] { optimizer.step(-1); }).what(),
               "optimizer: the learning rate is -1; expected a finite number of 0 or more");
  EXPECT_EQ(model.wholes(), before);
  Parameter* const p = model.bag.parameters()[0];
  EXPECT_STREQ(error_of([&] {
                 SGD twice(model.bag.compute(), {p, p}, {});
               }).what(),
               "optimizer: \"wide\" is given twice");
}

// A gradient far smaller than the last one is not lost where a factor of the past is 0.
TEST(Optimizers, SmallGradientsAfterLargeOnesCount) {
  for (const OptimizerOptions& options :
       {OptimizerOptions(Lion::Options{.beta1 = 0, .beta2 = 0, .weight_decay = 0}),
        OptimizerOptions(Muon::Options{.momentum = 0, .weight_decay = 0})}) {
    Context context;
    Bag bag;
    Parameter& w = bag.put(context, "w", {1, 1});
    w.write_master().f32()[0] = 0;
    const auto optimizer = make_optimizer(bag.compute(), bag.parameters(), options);
    float last = 0;
    for (const float g : {1.0f, -1e-9f}) {
      w.zero_gradient();
      w.accumulate(nullptr, [&](const Tensor& into, bool) { into.f32()[0] = g; });
      last = w.master().f32()[0];
      optimizer->step(0.1);
    }
    EXPECT_GT(w.master().f32()[0], last);
  }
}

// Two stages of a pipeline hold other matrices: an error on all ranks, unless Muon has the axes of a stage.
TEST(Muon, OfAStageOfAPipelineTakesItsAxes) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), MeshShape{{"pp", 2}, {"dp", 2}});
    const int stage = mesh.coordinate("pp");
    Bag bag;
    const LayoutRef layout = make_layout(mesh, {Replicate{}, Shard{0}}, {4, 4});
    const auto train = [&](Muon& muon) {
      for (Parameter* p : bag.parameters()) {
        p->zero_gradient();
        p->accumulate(layout, [&](const Tensor& into, bool) {
          for (std::size_t i = 0; i < into.f32().size(); ++i)
            into.f32()[i] = std::sin(
                static_cast<float>(i * 3 + static_cast<std::size_t>(stage * 5 + mesh.coordinate("dp"))));
        });
      }
      muon.step(0.1);
    };
    for (int i = 0; i < 3; ++i) {
      Parameter& p =
          bag.put(rank.context, "stage" + std::to_string(stage) + "_" + std::to_string(i), {4, 4}, layout);
      std::ranges::fill(p.write_master().f32(), 0.0f);
    }
    Muon wrong(bag.compute(), bag.parameters(), {});
    const Error error = error_of([&] { train(wrong); });
    EXPECT_EQ(error.code(), ErrorCode::mismatch);
    EXPECT_THAT(error.what(), ::testing::HasSubstr("muon: matrix 0 is \"stage0_0\""));
    Muon muon(bag.compute(), bag.parameters(), {.momentum = 0, .weight_decay = 0, .axes = mesh["dp"]});
    train(muon);
    // Without a past, the step depends on the gradient alone: that of one rank.
    Bag one;
    Parameter& w = one.put(rank.context, "w", {4, 4});
    std::ranges::fill(w.write_master().f32(), 0.0f);
    const Tensor g = full(bag.parameters()[0]->gradient().with_layout(layout));
    w.accumulate(nullptr, [&](const Tensor& into, bool) { std::ranges::copy(g.f32(), into.f32().begin()); });
    Muon alone(one.compute(), one.parameters(), {.momentum = 0, .weight_decay = 0});
    alone.step(0.1);
    for (const Parameter* p : bag.parameters()) {
      const Tensor whole = full(p->master());
      EXPECT_EQ(std::vector<float>(whole.f32().begin(), whole.f32().end()),
                std::vector<float>(w.master().f32().begin(), w.master().f32().end()));
    }
  });
}

}  // namespace
}  // namespace weft::optimizers_test
