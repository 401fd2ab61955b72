// Parameters: master and weight, dtypes, frozen parameters, gathered weights, and the owner of the gradient's
// memory.
#include "nn/support.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::parameter_test {
namespace {

using test::error_text;
using test::random_tensor;
using ::testing::ElementsAre;

std::vector<float> as_floats(const Tensor& t) {
  const auto all = t.as<bf16>();
  return std::vector<float>(all.begin(), all.end());
}

TEST(Parameter, TheWeightIsTheMasterItselfInF32) {
  test::Bench bench;
  Parameter p({2, 3});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.weight(); }),
            "parameter \"\": used before materialise");
  p.materialise(bench.compute);
  EXPECT_EQ(p.weight().data(), p.master().data());
  EXPECT_EQ(p.dtype(), DType::f32);
}

TEST(Parameter, TheWeightFollowsTheMasterInBf16) {
  test::Bench bench;
  Parameter p({3});
  p.set_dtype(DType::bf16);
  p.materialise(bench.compute);
  std::ranges::copy(std::array{1.0f, 1.0f + 1.0f / 512, -3.0f}, p.write_master().f32().begin());
  EXPECT_EQ(p.weight().dtype(), DType::bf16);
  EXPECT_THAT(as_floats(p.weight()), ElementsAre(1, 1, -3));
  p.write_master().f32()[1] = 1.5f;
  EXPECT_THAT(as_floats(p.weight()), ElementsAre(1, 1.5f, -3));
  p.set_master(test::tensor_of(bench.context, {3}, {7, 8, 9}));
  EXPECT_THAT(as_floats(p.weight()), ElementsAre(7, 8, 9));
  initialise(p, 3);
  EXPECT_THAT(as_floats(p.weight()), ElementsAre(0, 0, 0));
}

TEST(Parameter, DtypesThatNoKernelTakesAreRefused) {
  test::Bench bench;
  Parameter p({3});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_dtype(DType::f16); }),
            "parameter \"\": set_dtype got f16; expected f32 or bf16");
  p.materialise(bench.compute);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_dtype(DType::bf16); }),
            "parameter \"\": set_dtype after materialise");
}

// An optimizer's step is seen by the next forward pass, whose weight is another tensor.
TEST(Parameter, AStepOnTheMasterReachesTheWeight) {
  test::Bench bench;
  Linear layer(1, 1, false);
  layer.weight->set_dtype(DType::bf16);
  materialise(layer, bench.compute);
  layer.weight->write_master().f32()[0] = 1;
  SGD optimizer(bench.compute, layer.parameters(), {});
  Frame frame(bench.compute);
  const Tensor one = test::tensor_of(bench.context, {1, 1}, {1});
  EXPECT_EQ(layer.forward(one, frame)[0].f32()[0], 1.0f);
  layer.backward(one, frame);
  optimizer.step(0.5);
  EXPECT_EQ(layer.forward(one, frame)[0].f32()[0], 0.5f);
}

TEST(Parameter, AnotherWeightMayBePlacedForAPass) {
  test::Bench bench;
  Parameter p({2, 2});
  p.materialise(bench.compute);
  const Tensor gathered = test::tensor_of(bench.context, {2, 2}, {1, 2, 3, 4});
  p.place_weight(gathered);
  EXPECT_EQ(p.weight().data(), gathered.data());
  EXPECT_NE(p.master().data(), gathered.data());
  p.drop_weight();
  EXPECT_EQ(p.weight().data(), p.master().data());
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.place_weight(Tensor(bench.context, {4})); }),
            "parameter \"\": place_weight got f32 (4); expected f32 (2, 2)");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         p.place_weight(Tensor(bench.context, {2, 2}, DType::bf16));
                       }),
            "parameter \"\": place_weight got bf16 (2, 2); expected f32 (2, 2)");
  Parameter empty({1});
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { empty.place_weight(Tensor(bench.context, {1})); }),
            "parameter \"\": used before materialise");
}

// A shard is gathered for the passes; its gradient has the shape of the whole until it is reduced to a shard.
TEST(Parameter, TheGradientHasTheShapeOfTheWeightUntilItIsReduced) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}}, 1);
  const LayoutRef shard = make_layout(mesh, {Shard{0}}, {3, 2}), whole = replicated_layout(mesh, {3, 2});
  Parameter p({3, 2});
  p.set_layout(shard);
  p.materialise(compute);
  EXPECT_EQ(p.master().shape(), (Shape{1, 2}));
  p.place_weight(Tensor(context, {3, 2}).with_layout(whole));
  p.accumulate(Tensor::zeros(context, {3, 2}).with_layout(whole->with("dp", Partial{})));
  EXPECT_EQ(p.gradient().shape(), (Shape{3, 2}));
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         p.place_weight(Tensor(context, {1, 2}).with_layout(shard));
                       }),
            "parameter \"\": place_weight got (1, 2) while it has a gradient of (3, 2); zero_gradient first");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         p.set_gradient(Tensor(context, {3, 2}).with_layout(shard));
                       }),
            "parameter \"\": set_gradient got f32 (3, 2), stated to be (3, 2) as [dp: Shard(0)]; expected "
            "f32 (1, 2) of (3, 2)");
  p.set_gradient(Tensor::zeros(context, {1, 2}).with_layout(shard));
  p.drop_weight();
  EXPECT_EQ(p.gradient_layout(), shard);
  SGD(compute, {&p}, {}).step(1);
  EXPECT_EQ(error_text(ErrorCode::layout,
                       [&] {
                         p.place_weight(Tensor(context, {3, 2}).with_layout(whole->with("dp", Partial{})));
                       }),
            "parameter \"\": place_weight got (3, 2) as [dp: Partial(sum)]; expected whole values of (3, 2)");
}

TEST(Parameter, AFrozenOneHasNoGradientAndIsLeftOut) {
  test::Bench bench;
  Sequential model;
  auto& first = static_cast<Linear&>(model.append(std::make_unique<Linear>(3, 4, true)));
  auto& norm = static_cast<RMSNorm&>(model.append(std::make_unique<RMSNorm>(4)));
  auto& last = static_cast<Linear&>(model.append(std::make_unique<Linear>(4, 2, true)));
  materialise(model, bench.compute);
  initialise(model, 3);
  const Tensor x = random_tensor(bench.context, {5, 3}, "x"), dy = random_tensor(bench.context, {5, 2}, "dy");
  Frame frame(bench.compute);
  model.forward(x, frame);
  const std::vector<float> dx = test::floats(model.backward(dy, frame)[0]);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { norm.weight->set_trainable(false); }),
            "parameter \"1.weight\": set_trainable while it has a gradient; expected before");
  for (Parameter* p : model.parameters()) {
    p->zero_gradient();
    p->set_trainable(p == last.bias.get());
  }
  model.forward(x, frame);
  EXPECT_EQ(test::floats(model.backward(dy, frame)[0]), dx) << "frozen weights pass gradients on";
  for (const Parameter* p : model.parameters())
    EXPECT_EQ(p->has_gradient(), p == last.bias.get()) << p->path();
  AdamW optimizer(bench.compute, model.parameters(), {});
  EXPECT_THAT(optimizer.parameters(), ElementsAre(last.bias.get()));
  const std::vector<float> before = test::floats(first.weight->master());
  optimizer.step(0.1);
  EXPECT_EQ(test::floats(first.weight->master()), before);
}

// Layers with bf16 weights give the results of f32 layers with rounded operands.
TEST(Parameter, LayersWorkWithBf16Weights) {
  test::Bench bench;
  const auto rounded = [&](const Tensor& t) {
    Tensor r = t.clone(bench.context);
    for (float& f : r.f32()) f = static_cast<float>(bf16(f));
    return r;
  };
  const auto make = [&](DType dtype) {
    auto model = std::make_unique<Sequential>();
    model->append(std::make_unique<RMSNorm>(24));
    model->append(std::make_unique<Linear>(24, 8, true));
    for (Parameter* p : model->parameters()) p->set_dtype(dtype);
    materialise(*model, bench.compute);
    for (Parameter* p : model->parameters())
      p->set_master(rounded(random_tensor(bench.context, p->global_shape(), p->path())));
    return model;
  };
  const auto exact = make(DType::f32), low = make(DType::bf16);
  const Tensor x = random_tensor(bench.context, {6, 24}, "x"),
               dy = rounded(random_tensor(bench.context, {6, 8}, "dy"));
  Frame a(bench.compute), b(bench.compute);
  // The norm's output is what the bf16 product rounds: given rounded to the other model's Linear.
  const Tensor h = exact->get("0").forward(x, a)[0];
  const Tensor y = exact->get("1").forward(rounded(h), a)[0];
  test::expect_near(low->forward(x, b)[0], test::doubles(y), 1e-4, "y");
  const Tensor dh = exact->get("1").backward(dy, a)[0];
  const Tensor dx = exact->get("0").backward(dh, a)[0];
  test::expect_near(low->backward(dy, b)[0], test::doubles(dx), 1e-4, "dx");
  for (std::size_t i = 0; i < low->parameters().size(); ++i)
    test::expect_near(low->parameters()[i]->gradient(), test::doubles(exact->parameters()[i]->gradient()),
                      1e-4, low->parameters()[i]->path());
}

TEST(Parameter, AnEmbeddingLooksUpBf16Rows) {
  test::Bench bench;
  Embedding layer(3, 2);
  layer.weight->set_dtype(DType::bf16);
  materialise(layer, bench.compute);
  layer.weight->set_master(test::tensor_of(bench.context, {3, 2}, {1, 2, 3, 4, 5, 1.0f + 1.0f / 512}));
  Frame frame = Frame::inference(bench.compute);
  const Tensor y = layer.forward(test::tokens_of(bench.context, {2}, {2, 0}), frame)[0];
  EXPECT_THAT(test::floats(y), ElementsAre(5, 1, 1, 2));
}

// A gradient in the memory of a GradientReducer stays there.
TEST(Parameter, AClaimedGradientStaysInItsMemory) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}}, 1);
  Parameter p({3, 2});
  p.set_layout(make_layout(mesh, {Shard{0}}, {3, 2}));
  p.materialise(compute);
  p.claim_gradient(&context);
  const Tensor whole = Tensor(context, {3, 2}).with_layout(replicated_layout(mesh, {3, 2}));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.place_weight(whole); }),
            "parameter \"\": place_weight of another shape while its gradient belongs to a reducer");
  p.accumulate(Tensor::zeros(context, {1, 2}).with_layout(p.layout()));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_gradient(p.gradient()); }),
            "parameter \"\": set_gradient while its gradient belongs to a reducer");
  p.release_gradient(&context);
  p.set_gradient(p.gradient());
}

TEST(Parameter, AMasterOfAnotherShapeLeavesAClaimedGradient) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}}, 0);
  Parameter p({4, 2});
  p.set_layout(replicated_layout(mesh, {4, 2}));
  p.materialise(compute);
  p.claim_gradient(&context);
  const Tensor part = Tensor(context, {2, 2}).with_layout(make_layout(mesh, {Shard{0}}, {4, 2}));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_master(part); }),
            "parameter \"\": set_master of another shape while its gradient belongs to a reducer");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { Parameter({1}).claim_gradient(nullptr); }),
            "parameter \"\": claim_gradient: owner is null; expected the owner of the claim");
}

TEST(Parameter, AGradientIsLaidOutAsTheWeight) {
  Context context;
  Compute compute(context);
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 1);
  Parameter p({4, 2});
  p.set_layout(make_layout(mesh, {{"tp", Shard{0}}}, {4, 2}));
  p.materialise(compute);
  const auto use = [&](const LayoutRef& layout) {
    return error_text([&] { p.accumulate(Tensor::zeros(context, {2, 2}).with_layout(layout)); });
  };
  EXPECT_EQ(
      use(make_layout(mesh, {{"dp", Shard{0}}}, {4, 2})),
      "layout: parameter \"\": a gradient, summed, is Shard(0) on dp=2; expected Replicate (as the weight)");
  EXPECT_EQ(use(make_layout(mesh, {{"tp", Shard{0}}}, {4, 2})->segmented(0, {2, 2})),
            "layout: parameter \"\": a gradient, summed, is (4, 2) as [dp: Replicate, tp: Shard(0)] in "
            "segments 2, 2 of "
            "dimension 0; expected (4, 2) as [dp: Replicate, tp: Shard(0)] (as the weight)");
  EXPECT_EQ(use(make_layout(mesh, {{"dp", Partial{}}, {"tp", Shard{0}}}, {4, 2})), "no error");
  const LayoutRef other = replicated_layout(mesh, {7, 7});
  EXPECT_EQ(error_text([&] { p.set_gradient_layout(other); }),
            "layout: parameter \"\": set_gradient_layout got (7, 7) as [dp: Replicate, tp: Replicate], of "
            "which this rank "
            "holds (7, 7); expected one for (4, 2), of which it holds (2, 2)");
  EXPECT_EQ(error_text([&] {
              p.state_gradient(replicated_layout(mesh, {4, 2}));
            }),
            "layout: parameter \"\": state_gradient got (4, 2) as [dp: Replicate, tp: Replicate], of which "
            "this rank "
            "holds (4, 2); expected one for (4, 2), of which it holds (2, 2)");
}

// A tensor that was moved from keeps its shape, but has no memory.
TEST(Parameter, TakesNoTensorWithoutMemory) {
  test::Bench bench;
  Parameter p({2, 3});
  EXPECT_EQ(error_text([&] { (void)p.compute(); }), "bad_argument: parameter \"\": used before materialise");
  p.materialise(bench.compute);
  Tensor given = test::random_tensor(bench.context, {2, 3}, "given");
  const Tensor taken = std::move(given);
  const auto text = [](const std::string& call) {
    return "parameter \"\": the tensor given to " + call + " has no memory: it is empty or was moved from";
  };
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_master(given); }), text("set_master"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.place_weight(given); }), text("place_weight"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.place_gradient(given); }), text("place_gradient"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.accumulate(given); }), text("accumulate"));
  p.accumulate(taken);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.set_gradient(given); }), text("set_gradient"));
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         p.accumulate(Tensor(bench.context, {2, 3}, DType::bf16));
                       }),
            "parameter \"\": a gradient of bf16; expected f32");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { p.accumulate(LayoutRef(), {}); }),
            "parameter \"\": accumulate: write is empty; expected a function");
  EXPECT_EQ(test::floats(p.gradient()), test::floats(taken));
}

TEST(Parameter, ListenersComeAndGoWhileTheyAreCalled) {
  test::Bench bench;
  Parameter p({1});
  p.materialise(bench.compute);
  p.accumulate(test::tensor_of(bench.context, {1}, {1}));
  std::vector<int> called;
  int first = -1;
  first = p.listen([&](Parameter& self) {
    called.push_back(0);
    self.stop_listening(first);
    for (int i = 0; i < 100; ++i) self.listen([&](Parameter&) { called.push_back(2); });
  });
  p.listen([&](Parameter&) { called.push_back(1); });
  p.announce_final();
  std::vector<int> expected = {0, 1};
  expected.insert(expected.end(), 100, 2);
  EXPECT_EQ(called, expected);
  EXPECT_EQ(error_text([&] { p.listen({}); }),
            "bad_argument: parameter \"\": listen: listener is empty; expected a function");
}

TEST(Parameter, WhatThawsAfterTheOptimizerWasMadeIsAnError) {
  test::Bench bench;
  Parameter frozen({1}), trained({1});
  for (Parameter* p : {&frozen, &trained}) p->materialise(bench.compute);
  frozen.set_trainable(false);
  SGD optimizer(bench.compute, {&frozen, &trained}, {});
  trained.accumulate(test::tensor_of(bench.context, {1}, {1}));
  optimizer.step(0.1);
  trained.zero_gradient();
  trained.set_trainable(false);
  optimizer.step(0.1);  // nothing is trained
  frozen.set_trainable(true);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { optimizer.step(0.1); }),
            "optimizer: \"\" was frozen when the optimizer was made; add() it when it is unfrozen");
}

}  // namespace
}  // namespace weft::parameter_test
