#include "weft/nn/optimizer.hpp"

#include "nn/support.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/norm.hpp"

namespace weft::optimizer_test {
namespace {

using test::error_text;
using ::testing::ElementsAre;

// A parameter of two dimensions (decays) and one of one (does not), with gradients given by hand.
struct Two : Module {
  Two() {
    matrix = add("matrix", std::make_shared<Parameter>(Shape{2, 2}, Normal{1.0}));
    vector = add("vector", std::make_shared<Parameter>(Shape{3}, Normal{1.0}));
  }
  ParameterRef matrix, vector;
  void give_gradients(Context& context, int step) {
    for (Parameter* p : parameters()) {
      p->zero_gradient();
      p->accumulate(test::random_tensor(context, p->global_shape(), p->path() + std::to_string(step)));
    }
  }

 private:
  Tensors do_forward(Inputs, Frame&) override { return {}; }
  Tensors do_backward(Inputs, Frame&) override { return {}; }
};

// The formulas of the header in double, over three steps with learning rates 0.01, 0.02, 0.03.
std::vector<double> adamw_by_hand(Context& context, const Parameter& p, double decay) {
  std::vector<double> w = test::doubles(p.master()), m(w.size()), v(w.size());
  for (int t = 1; t <= 3; ++t) {
    const Tensor g = test::random_tensor(context, p.global_shape(), p.path() + std::to_string(t));
    for (std::size_t i = 0; i < w.size(); ++i) {
      const double gi = g.f32()[i], lr = 0.01 * t;
      w[i] -= lr * decay * w[i];
      m[i] = 0.8 * m[i] + 0.2 * gi;
      v[i] = 0.9 * v[i] + 0.1 * gi * gi;
      w[i] -= lr * (m[i] / (1 - std::pow(0.8, t))) / (std::sqrt(v[i] / (1 - std::pow(0.9, t))) + 1e-3);
    }
  }
  return w;
}

std::vector<double> sgd_by_hand(Context& context, const Parameter& p, double momentum, double decay) {
  std::vector<double> w = test::doubles(p.master()), v(w.size());
  for (int t = 1; t <= 3; ++t) {
    const Tensor g = test::random_tensor(context, p.global_shape(), p.path() + std::to_string(t));
    for (std::size_t i = 0; i < w.size(); ++i) {
      v[i] = momentum * v[i] + (g.f32()[i] + decay * w[i]);
      w[i] -= 0.01 * t * v[i];
    }
  }
  return w;
}

void take_steps(Two& model, Optimizer& optimizer, Context& context) {
  for (int t = 1; t <= 3; ++t) {
    model.give_gradients(context, t);
    optimizer.step(0.01 * t);
  }
}

TEST(AdamW, FollowsItsFormulaAndDecaysMatricesOnly) {
  test::Bench bench;
  Two model;
  materialise(model, bench.compute);
  initialise(model, 1);
  const auto matrix = adamw_by_hand(bench.context, *model.matrix, 0.1);
  const auto vector = adamw_by_hand(bench.context, *model.vector, 0.0);
  AdamW adamw(bench.compute, model.parameters(),
              {.beta1 = 0.8, .beta2 = 0.9, .eps = 1e-3, .weight_decay = 0.1});
  take_steps(model, adamw, bench.context);
  test::expect_near(model.matrix->master(), matrix, 1e-6, "matrix");
  test::expect_near(model.vector->master(), vector, 1e-6, "vector");
}

// Gain and bias of a norm never decay, however many dimensions they have.
TEST(Optimizer, NormsDoNotDecay) {
  test::Bench bench;
  for (const auto& dims : {Shape{6}, Shape{2, 3}, Shape{2, 3, 2}}) {
    Sequential model;
    model.append(std::make_unique<LayerNorm>(dims));
    materialise(model, bench.compute);
    initialise(model, 1);
    for (Parameter* p : model.parameters()) {
      std::ranges::fill(p->write_master().f32(), 2.0f);
      p->accumulate(Tensor::zeros(bench.context, p->global_shape()));
    }
    AdamW adamw(bench.compute, model.parameters(), {.weight_decay = 0.5});
    adamw.step(0.1);
    SGD sgd(bench.compute, model.parameters(), {.weight_decay = 0.5});
    sgd.step(0.1);
    for (const Parameter* p : model.parameters())
      for (const float x : p->master().f32()) EXPECT_EQ(x, 2.0f) << p->path() << " " << to_string(dims);
  }
}

TEST(SGD, FollowsItsFormula) {
  for (const double momentum : {0.0, 0.9}) {
    test::Bench bench;
    Two model;
    materialise(model, bench.compute);
    initialise(model, 1);
    const auto matrix = sgd_by_hand(bench.context, *model.matrix, momentum, 0.1);
    const auto vector = sgd_by_hand(bench.context, *model.vector, momentum, 0.0);
    SGD sgd(bench.compute, model.parameters(), {.momentum = momentum, .weight_decay = 0.1});
    take_steps(model, sgd, bench.context);
    test::expect_near(model.matrix->master(), matrix, 1e-6, "matrix");
    test::expect_near(model.vector->master(), vector, 1e-6, "vector");
  }
}

TEST(Optimizer, StateHasAPathAndANameAndIsAllThereIs) {
  test::Bench bench;
  Two a, b;
  for (Two* model : {&a, &b}) {
    materialise(*model, bench.compute);
    initialise(*model, 1);
  }
  AdamW first(bench.compute, a.parameters(), {});
  take_steps(a, first, bench.context);
  std::vector<std::string> names;
  std::vector<Tensor> state;
  first.visit_state([&](const std::string& path, std::string_view name, const Tensor& t) {
    names.push_back(path + "." + std::string(name));
    state.push_back(t);
  });
  EXPECT_THAT(names, ElementsAre("matrix.step", "matrix.exp_avg", "matrix.exp_avg_sq", "vector.step",
                                 "vector.exp_avg", "vector.exp_avg_sq"));
  EXPECT_EQ(state[0].as<std::int64_t>()[0], 3);
  EXPECT_EQ(state[2].shape(), (Shape{2, 2}));

  // Values and state are copied into another model and optimizer: both continue with the same bits.
  AdamW second(bench.compute, b.parameters(), {});
  std::size_t next = 0;
  second.visit_state([&](const std::string&, std::string_view, const Tensor& t) {
    std::copy_n(state[next].data(), t.bytes(), t.data());
    ++next;
  });
  for (std::size_t i = 0; i < 2; ++i) {
    const Tensor &from = a.parameters()[i]->master(), &to = b.parameters()[i]->master();
    std::copy_n(from.data(), to.bytes(), to.data());
  }
  take_steps(a, first, bench.context);
  take_steps(b, second, bench.context);
  EXPECT_EQ(test::floats(a.matrix->master()), test::floats(b.matrix->master()));
  EXPECT_EQ(test::floats(a.vector->master()), test::floats(b.vector->master()));
}

TEST(Optimizer, NamesEveryParameterWithoutAGradientAndChangesNothing) {
  test::Bench bench;
  Two model;
  materialise(model, bench.compute);
  initialise(model, 1);
  SGD sgd(bench.compute, model.parameters(), {});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { sgd.step(0.1); }),
            "optimizer: no gradient for matrix, vector; no backward pass has used it");
  const auto before = test::floats(model.matrix->master());
  model.matrix->accumulate(test::random_tensor(bench.context, {2, 2}, "g"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { sgd.step(0.1); }),
            "optimizer: no gradient for vector; no backward pass has used it");
  EXPECT_EQ(test::floats(model.matrix->master()), before);
  sgd.zero_gradients();
  EXPECT_FALSE(model.matrix->has_gradient());
}

}  // namespace
}  // namespace weft::optimizer_test
