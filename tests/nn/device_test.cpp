// Layers, losses and optimizers on a device that is not the CPU: the late device of the tests, whose memory
// the host cannot touch and whose streams run as late as they can. Their results there have the CPU's bits.
#include <gtest/gtest.h>

#include <algorithm>
#include <functional>
#include <memory>
#include <string>

#include "support/errors.hpp"
#include "support/late_kernels.hpp"
#include "weft/base/random.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::device_test {
namespace {

using test::error_text;
using test::LateDevice;

constexpr Device kGpu{DeviceKind::cuda, 0};

struct NnDevice : testing::Test {
  Context context;
  LateDevice& late = test::add_late_device(context);
  Compute here{context, 2}, there{context, 2, kGpu};

  Tensor normal(const Shape& shape, const char* name) {
    const Tensor t(context, shape);
    RandomStream(7, name).normal(0, t.count(), t.f32().data());
    return t;
  }
  Tensor integers(const Shape& shape, std::vector<std::int64_t> values) {
    const Tensor t(context, shape, DType::i64);
    std::copy(values.begin(), values.end(), t.as<std::int64_t>().begin());
    return t;
  }
  std::vector<float> bits(const Tensor& t) {
    const Tensor home = to_host(context, t);
    return {home.f32().begin(), home.f32().end()};
  }
  Tensor on(Compute& compute, const Tensor& t) { return to_device(context, t, compute.stream()); }

  // The numbers of two steps of a module with an optimizer: outputs, gradients, new values.
  std::vector<std::vector<float>> two_steps(Compute& compute, Module& module, const Tensor& x,
                                            const Tensor& dy) {
    materialise(module, compute);
    initialise(module, 3);
    AdamW adam(compute, module.parameters(), {});
    SGD sgd(compute, module.parameters(), {.momentum = 0.9, .weight_decay = 0.1});
    std::vector<std::vector<float>> all;
    for (int step = 0; step < 2; ++step) {
      Frame frame(compute);
      const Tensor y = module.forward(on(compute, x), frame)[0];
      const Tensors dx = module.backward(on(compute, dy), frame);
      adam.step(0.01);
      sgd.step(0.01);
      all.push_back(bits(y));
      for (const Tensor& t : dx) all.push_back(bits(t));
      for (Parameter* p : module.parameters()) {
        all.push_back(bits(p->gradient()));
        p->accumulate(p->gradient().clone(context));  // the second use
        all.push_back(bits(p->gradient()));
        all.push_back(bits(p->master()));
      }
      adam.zero_gradients();
    }
    return all;
  }
  template <class Make>
  void expect_the_same_there(const Make& make, const Tensor& x, const Tensor& dy) {
    const auto cpu = make(), gpu = make();
    const auto want = two_steps(here, *cpu, x, dy), got = two_steps(there, *gpu, x, dy);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]) << i;
    EXPECT_EQ(cpu->parameters()[0]->master().device(), Device{});
    EXPECT_EQ(gpu->parameters()[0]->master().device(), kGpu);
  }
};

TEST_F(NnDevice, LayersComputeTheSame) {
  const Tensor x = normal({2, 5, 8}, "x"), dy = normal({2, 5, 8}, "dy");
  expect_the_same_there([] { return std::make_unique<Linear>(8, 8, true); }, x, dy);
  expect_the_same_there([] { return std::make_unique<RMSNorm>(8, 1e-5); }, x, dy);
  expect_the_same_there([] { return std::make_unique<SwiGLU>(8, 12, Normal{0.3}, Normal{0.3}); }, x, dy);
  expect_the_same_there(
      [] {
        return std::make_unique<Attention>(AttentionConfig{8, 4, 2, 2, Normal{0.3}, Normal{0.3}},
                                           RopeTables::make(6, 2, 100));
      },
      x, dy);
  expect_the_same_there([] { return std::make_unique<Embedding>(9, 8, Normal{1}); },
                        integers({2, 5}, {0, 8, 3, 3, 1, 0, 2, 7, 3, 5}), dy);
}

// Layers whose kernels depend on numbers that other kernels computed.
TEST_F(NnDevice, NormsOverBatchesAndSpectralNormsComputeTheSame) {
  const Tensor x = normal({2, 5, 8}, "x"), dy = normal({2, 5, 8}, "dy");
  expect_the_same_there([] { return std::make_unique<GroupNorm>(5, 5); }, x, dy);
  expect_the_same_there([] { return std::make_unique<BatchNorm>(5); }, x, dy);
  expect_the_same_there([] { return std::make_unique<LayerNorm>(Shape{5, 8}); }, x, dy);
  expect_the_same_there(
      [] {
        auto layer = std::make_unique<Linear>(8, 8, true, Normal{0.5});
        layer->add_spectral_norm();
        return layer;
      },
      x, dy);
}

// Weights of attention are dropped, and both inputs of cross-attention have gradients.
TEST_F(NnDevice, AttentionsComputeTheSame) {
  const Tensor maps = normal({2, 4, 4, 2}, "maps"), x = normal({2, 3, 8}, "x"),
               other = normal({2, 5, 8}, "other");
  std::vector<std::vector<float>> results[2];
  for (Compute* const c : {&here, &there}) {
    WindowAttentionConfig windows;
    windows.dim = 4, windows.heads = 2, windows.head_dim = 2, windows.window = 2, windows.dropout = 0.5;
    windows.init = windows.out_init = Normal{0.5};
    WindowAttention layer(windows);
    CrossAttention cross({.dim = 8, .heads = 4, .head_dim = 2, .kv_heads = 2, .init = Normal{0.3}});
    auto& all = results[c == &there];
    for (Module* m : {static_cast<Module*>(&layer), static_cast<Module*>(&cross)}) {
      materialise(*m, *c);
      initialise(*m, 3);
    }
    Frame frame(*c, {.seed = 3, .step = 2});
    all.push_back(bits(layer.forward(on(*c, maps), frame)[0]));
    all.push_back(bits(layer.backward(on(*c, maps), frame)[0]));
    all.push_back(bits(cross.forward({on(*c, x), on(*c, other)}, frame)[0]));
    for (const Tensor& t : cross.backward(on(*c, x), frame)) all.push_back(bits(t));
    const std::vector<std::int64_t> lengths{2, 5};
    all.push_back(
        bits(cross.forward({on(*c, x), on(*c, other), key_padding_mask(*c, lengths, 5)}, frame)[0]));
    for (const Tensor& t : cross.backward(on(*c, x), frame)) all.push_back(bits(t));
    for (Module* m : {static_cast<Module*>(&layer), static_cast<Module*>(&cross)})
      for (Parameter* p : m->parameters()) all.push_back(bits(p->gradient()));
  }
  EXPECT_EQ(results[0], results[1]);
}

TEST_F(NnDevice, TheLossComputesTheSame) {
  const Tensor logits = normal({4, 6}, "logits"), labels = integers({4}, {5, CrossEntropy::kIgnore, 0, 2});
  const Tensor dloss(context, {1}, DType::f64);
  dloss.as<double>()[0] = 0.25;
  std::vector<double> losses;
  std::vector<std::vector<float>> gradients;
  for (Compute* const c : {&here, &there}) {
    CrossEntropy loss;
    Frame frame(*c);
    const Tensor there_labels = on(*c, labels), valid = global_valid(*c, there_labels);
    EXPECT_EQ(to_host(context, valid).as<std::int64_t>()[0], 3);
    losses.push_back(
        to_host(context, loss.forward({on(*c, logits), there_labels, valid}, frame)[0]).as<double>()[0]);
    gradients.push_back(bits(loss.backward(on(*c, dloss), frame)[0]));
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST_F(NnDevice, LossesOfElementsComputeTheSame) {
  const Tensor y = normal({4, 6}, "y"), target = normal({4, 6}, "target");
  for (float& x : target.f32()) x = x > 0 ? 1.0f : 0.25f;
  std::vector<double> losses[2];
  std::vector<std::vector<float>> gradients[2];
  for (Compute* const c : {&here, &there}) {
    MeanSquaredError squares;
    BinaryCrossEntropy entropies;
    const std::size_t which = c == &there ? 1 : 0;
    for (Module* loss : {static_cast<Module*>(&squares), static_cast<Module*>(&entropies)}) {
      Frame frame(*c);
      const Tensor of = on(*c, y);
      const Tensor value = loss->forward({of, on(*c, target), global_count(*c, of)}, frame)[0];
      losses[which].push_back(to_host(context, value).as<double>()[0]);
      gradients[which].push_back(bits(loss->backward({}, frame)[0]));
    }
  }
  EXPECT_EQ(losses[0], losses[1]);
  EXPECT_EQ(gradients[0], gradients[1]);
}

TEST_F(NnDevice, DropoutDrawsTheSame) {
  const Tensor x = normal({4, 9}, "x");
  std::vector<std::vector<float>> results[2];
  for (Compute* const c : {&here, &there}) {
    Dropout dropout(0.5);
    Frame frame(*c, {.seed = 3, .step = 2});
    auto& all = results[c == &there];
    all.push_back(bits(dropout.forward(on(*c, x), frame)[0]));
    all.push_back(bits(dropout.backward(on(*c, x), frame)[0]));
    EXPECT_EQ(std::count(all[0].begin(), all[0].end(), 0.0f), std::count(all[1].begin(), all[1].end(), 0.0f));
    EXPECT_NE(all[0], bits(x));
  }
  EXPECT_EQ(results[0], results[1]);
}

// The kernels that the layers above do not use.
TEST_F(NnDevice, OtherKernelsComputeTheSame) {
  std::vector<std::vector<float>> results[2];
  for (Compute* const c : {&here, &there}) {
    kernels::KernelContext& ctx = kernels_of(*c);
    const Tensor x = on(*c, normal({6, 4}, "x")), dy = on(*c, normal({6, 5}, "dy")), dw = c->zeros({5, 4}),
                 db = c->zeros({5}), y = c->make({6, 4}), dx = c->make({6, 4}),
                 half = c->make({6, 4}, DType::bf16), squares = c->make({1}, DType::f64),
                 product = c->make({6, 6});
    const auto p = [](const Tensor& t) { return t.data_ptr<float>(); };
    kernels::linear_backward_weight(ctx, p(dy), p(x), p(dw), p(db), {6, 4, 5});
    kernels::silu_forward(ctx, p(x), p(y), 24);
    kernels::silu_backward(ctx, p(y), p(x), p(dx), 24);
    kernels::scale(ctx, p(y), 3.0f, 24);
    kernels::round_to_bf16(ctx, p(x), half.data_ptr<bf16>(), 24);
    kernels::matmul(ctx, half.data_ptr<bf16>(), kernels::Stored::plain, half.data_ptr<bf16>(),
                    kernels::Stored::transposed, p(product), 6, 6, 4, false);
    kernels::sum_of_squares(ctx, p(x), squares.data_ptr<double>(), 24);
    auto& all = results[c == &there];
    for (const Tensor& t : {dw, db, y, dx, product}) all.push_back(bits(t));
    all.push_back({static_cast<float>(to_host(context, squares).as<double>()[0])});
    EXPECT_GT(all.back()[0], 0);
  }
  EXPECT_EQ(results[0], results[1]);
}

// An error that the CPU's kernels throw at once is thrown when the result is read.
TEST_F(NnDevice, WrongDataIsToldByTheNextWait) {
  CrossEntropy loss;
  Frame frame(there);
  const Tensor logits = on(there, normal({2, 6}, "logits")), labels = on(there, integers({2}, {5, 6}));
  const Tensor wrong = loss.forward({logits, labels, global_valid(there, labels)}, frame)[0];
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { to_host(context, wrong); }),
            "cross_entropy: token 1 has target 6; expected 0 <= target < 6 (vocab) or -100");
  EXPECT_NO_THROW(there.wait());
}

// A product whose input is written on another stream: without the dependency a wrong number, always.
TEST_F(NnDevice, AForgottenDependencyIsAWrongNumber) {
  const Stream copies = late.make_stream();
  const Tensor x = normal({4}, "x"), early = to_device(context, x, copies), sum = there.make({4});
  kernels::add(kernels_of(there), early.data_ptr<float>(), early.data_ptr<float>(), sum.data_ptr<float>(), 4);
  const std::vector<float> wrong = bits(sum);
  late.depend(there.stream(), copies);
  kernels::add(kernels_of(there), early.data_ptr<float>(), early.data_ptr<float>(), sum.data_ptr<float>(), 4);
  const std::vector<float> right = bits(sum);
  for (std::size_t i = 0; i < 4; ++i) {
    EXPECT_NE(wrong[i], 2 * x.f32()[i]);
    EXPECT_EQ(right[i], 2 * x.f32()[i]);
  }
  late.wait(copies);
}

TEST_F(NnDevice, NothingRunsBeforeSomebodyWaits) {
  Linear linear(3, 3);
  materialise(linear, there);
  initialise(linear, 1);
  there.wait();
  Frame frame(there);
  const Tensor y = linear.forward(on(there, normal({2, 3}, "x")), frame)[0];
  linear.backward(y, frame);
  EXPECT_GE(late.waiting(), 4u) << "a host that waits in between would be slow on a real device";
}

// Statistics stay on the device, in a training and after it.
TEST_F(NnDevice, ABatchNormWaitsForNothing) {
  for (const bool training : {true, false}) {
    BatchNorm layer(3);
    materialise(layer, there);
    initialise(layer, 1);
    const Tensor x = on(there, normal({4, 3, 2}, "x"));
    there.wait();
    Frame frame(there, {.training = training});
    layer.backward(layer.forward(x, frame), frame);
    EXPECT_GE(late.waiting(), training ? 10u : 8u) << "every kernel of both passes";
    there.wait();
  }
}

// Neither sigma nor sums are copied to the host.
TEST_F(NnDevice, SpectralNormsAndNormsOverSpaceWaitForNothing) {
  const auto waiting_after = [&](Module& layer, const Shape& shape) {
    materialise(layer, there);
    initialise(layer, 1);
    const Tensor x = on(there, normal(shape, "x"));
    there.wait();
    Frame frame(there);
    layer.backward(layer.forward(x, frame), frame);
    const std::size_t waiting = late.waiting();
    there.wait();
    return waiting;
  };
  Linear linear(6, 6);
  linear.add_spectral_norm();
  EXPECT_GE(waiting_after(linear, {4, 6}), 20u) << "every kernel of both passes";
  LayerNorm norm(Shape{3, 4});
  EXPECT_GE(waiting_after(norm, {2, 3, 4}), 8u) << "every kernel of both passes";
}

// A weight of zeros: the next wait throws, and u and v are unchanged.
TEST_F(NnDevice, ASigmaThatDoesNotDivideIsToldByTheNextWait) {
  Linear linear(3, 3);
  linear.add_spectral_norm();
  materialise(linear, there);
  initialise(linear, 1);
  const Tensor &u = linear.spectral_norm()->u->tensor(), &v = linear.spectral_norm()->v->tensor();
  const auto of_u = bits(u), of_v = bits(v);
  linear.weight->set_master(on(there, Tensor::zeros(context, {3, 3})));
  Frame frame(there);
  const Tensor y = linear.forward(on(there, normal({2, 3}, "x")), frame)[0];
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { to_host(context, y); }),
            "spectral norm: sigma is 0; expected a number other than 0");
  EXPECT_EQ(bits(u), of_u);
  EXPECT_EQ(bits(v), of_v);
}

TEST_F(NnDevice, TensorsElsewhereAreNamed) {
  const auto text = [](const auto& f) { return error_text(ErrorCode::bad_argument, f); };
  Sequential tree;
  tree.append("proj", std::make_unique<Linear>(3, 3));
  materialise(tree, there);
  initialise(tree, 1);
  const Tensor x = normal({2, 3}, "x");
  Frame on_gpu(there), on_cpu(here);
  EXPECT_EQ(text([&] { tree.get("proj").forward(x, on_gpu); }),
            "\"proj\": input 0 is on cpu; expected cuda:0, the device of the Frame");
  EXPECT_EQ(text([&] { tree.get("proj").forward(x, on_cpu); }),
            "\"proj\": weight is on cuda:0; expected cpu, the device of the Frame");
  tree.forward(on(there, x), on_gpu);
  EXPECT_EQ(text([&] { tree.get("proj").backward(x, on_gpu); }),
            "\"proj\": gradient 0 is on cpu; expected cuda:0, the device of the Frame");
  Parameter& weight = *tree.parameter("proj.weight");
  EXPECT_EQ(text([&] { SGD(here, {&weight}, {}); }),
            "proj.weight is on cuda:0; expected cpu, the device of this Compute");
  const std::string head = "parameter \"proj.weight\": the tensor given to ",
                    tail = " is on cpu; expected cuda:0, the device of the master";
  const Tensor other = normal({3, 3}, "w");
  EXPECT_EQ(text([&] { weight.set_master(other); }), head + "set_master" + tail);
  EXPECT_EQ(text([&] { weight.place_gradient(other); }), head + "place_gradient" + tail);
  EXPECT_EQ(text([&] { weight.accumulate(other); }), head + "accumulate" + tail);
  Compute second(context, 1, kGpu);
  const Tensor there_too = on(second, x);
  EXPECT_EQ(
      text([&] { tree.get("proj").forward(there_too, on_gpu); }),
      "\"proj\": input 0 is ordered on another stream of cuda:0 than the Frame; to_device() orders it there");
  EXPECT_EQ(
      text([&] { weight.set_master(on(second, other)); }),
      head +
          "set_master is ordered on another stream of cuda:0 than the master; to_device() orders it there");
  EXPECT_EQ(text([&] { global_valid(there, integers({1}, {1})); }),
            "global_valid: labels is on cpu; expected cuda:0, the device of this Compute");
}

TEST_F(NnDevice, KernelsAreGivenOnce) {
  context.add_device(std::make_unique<LateDevice>(1));
  constexpr Device kOther{DeviceKind::cuda, 1};
  Compute other(context, 1, kOther);
  EXPECT_EQ(error_text(ErrorCode::unsupported, [&] { kernels_of(other); }),
            "kernels: cuda:1 has none in this Context; add_kernels() adds them");
  EXPECT_EQ(
      error_text(ErrorCode::bad_argument, [&] { kernels::add_kernels(context, kGpu, test::late::table()); }),
      "add_kernels: cuda:0 has its kernels already");
  EXPECT_EQ(
      error_text(ErrorCode::unsupported,
                 [&] {
                   kernels::add_kernels(context, {DeviceKind::cuda, 5}, test::late::table());
                 }),
      "device cuda:5 is not in this Context, which has cpu, cuda:0, cuda:1; Context::add_device adds one");
  EXPECT_EQ(
      error_text(ErrorCode::bad_argument, [&] { kernels::add_kernels(context, {}, test::late::table()); }),
      "add_kernels: cpu has its kernels already");
  kernels::add_kernels(context, kOther, test::late::table());
  EXPECT_EQ(kernels_of(other).stream(), other.stream());
}

}  // namespace
}  // namespace weft::device_test
