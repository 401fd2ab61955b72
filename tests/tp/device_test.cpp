// Tensor parallelism on devices: two ranks, each with a late device of its own, give the bits of two ranks on
// the CPU.
#include <gtest/gtest.h>

#include <functional>
#include <memory>

#include "support/errors.hpp"
#include "support/late_backend.hpp"
#include "support/late_kernels.hpp"
#include "support/near.hpp"
#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/conv.hpp"
#include "weft/tp/linear.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/tp/vocab.hpp"

namespace weft::device_test {
namespace {

using test::random_tensor;
using test::Rank;
using test::Ranks;
using Numbers = std::vector<std::vector<float>>;

// Runs `body` on a group of the CPU and on one of late devices, on two ranks, and compares what it gives.
void expect_the_same(const std::function<Numbers(Compute&, ProcessGroup&)>& body) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& r) {
    const test::LateDevice& late = test::add_late_device(r.context, r.rank);
    Compute here(r.context), there(r.context, 1, late.device());
    const Numbers want = body(here, r.group());
    ProcessGroup on_devices =
        ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
    const Numbers got = body(there, on_devices);
    ASSERT_EQ(got.size(), want.size());
    for (std::size_t i = 0; i < want.size(); ++i) EXPECT_EQ(got[i], want[i]) << i;
  });
}

void keep(Numbers& all, Compute& compute, const Tensor& t) {
  const Tensor home = to_host(compute.context(), t);
  all.emplace_back(home.f32().begin(), home.f32().end());
}

Numbers passes(Compute& compute, ProcessGroup& group, Module& module, const Plan& plan) {
  Context& context = compute.context();
  const DeviceMesh mesh(group, {{"tp", 2}});
  parallelize(module, mesh["tp"], plan);
  replicate(module, mesh);
  materialise(module, compute);
  initialise(module, 3);
  const auto place = [&](const char* name) {
    return to_device(context, random_tensor(context, {4, 3, 8}, name), compute.stream())
        .with_layout(replicated_layout(mesh, {4, 3, 8}));
  };
  Frame frame(compute);
  Numbers all;
  keep(all, compute, module.forward(place("x"), frame)[0]);
  keep(all, compute, module.backward(place("dy"), frame)[0]);
  for (const Parameter* p : module.parameters()) keep(all, compute, p->gradient());
  return all;
}

TEST(TensorParallelOnDevices, LayersGiveTheBitsOfTheCpu) {
  expect_the_same([](Compute& compute, ProcessGroup& group) {
    SwiGLU mlp(8, 12, Normal{0.3}, Normal{0.3});
    return passes(compute, group, mlp,
                  {{"", Style::enter},
                   {"gate_proj", Style::column},
                   {"up_proj", Style::column},
                   {"down_proj", Style::row}});
  });
  expect_the_same([](Compute& compute, ProcessGroup& group) {
    Attention attention({8, 4, 2, 2, Normal{0.3}, Normal{0.3}}, RopeTables::make(3, 2, 100));
    return passes(compute, group, attention,
                  {{"", Style::enter},
                   {"q_proj", Style::column},
                   {"k_proj", Style::column},
                   {"v_proj", Style::column},
                   {"o_proj", Style::row}});
  });
}

TEST(TensorParallelOnDevices, FunctionsOnViewsGiveTheBitsOfTheCpu) {
  expect_the_same([](Compute& compute, ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"tp", 2}});
    const auto there = [&](const Shape& shape, const char* name) {
      return to_device(compute.context(), random_tensor(compute.context(), shape, name), compute.stream());
    };
    const Tensor x = there({5, 6}, "x"), w1 = there({4, 6}, "w1"), b1 = there({4}, "b1"),
                 h = compute.make({5, 4}), w2 = there({6, 4}, "w2"), b2 = there({6}, "b2"),
                 y = compute.make({5, 6});
    column_linear_forward(compute, x, w1, b1, h);
    row_linear_forward(compute, mesh["tp"], h, w2, b2, y);
    const Tensor dy = there({5, 6}, "dy"), dh = compute.make({5, 4}), dw2 = compute.make({6, 4}),
                 db2 = compute.make({6}), dx = compute.make({5, 6}), dw1 = compute.make({4, 6}),
                 db1 = compute.make({4});
    row_linear_backward(compute, dy, h, w2, {dh, dw2, db2});
    column_linear_backward(compute, mesh["tp"], dh, x, w1, {dx, dw1, db1});
    Numbers all;
    for (const Tensor& t : {h, y, dh, dw2, db2, dx, dw1, db1}) keep(all, compute, t);
    return all;
  });
}

TEST(TensorParallelOnDevices, ConvolutionsOnViewsGiveTheBitsOfTheCpu) {
  expect_the_same([](Compute& compute, ProcessGroup& group) {
    const DeviceMesh mesh(group, {{"tp", 2}});
    const auto there = [&](const Shape& shape, const char* name) {
      return to_device(compute.context(), random_tensor(compute.context(), shape, name), compute.stream());
    };
    const Shape of_x{2, 6, 3, 5}, of_h{2, 4, 3, 5};
    const Tensor x = there(of_x, "x"), w1 = there({4, 6, 1, 1}, "w1"), b1 = there({4}, "b1"),
                 h = compute.make(of_h), w2 = there({6, 4, 1, 1}, "w2"), b2 = there({6}, "b2"),
                 y = compute.make(of_x);
    column_conv2d_forward(compute, x, w1, b1, h);
    row_conv2d_forward(compute, mesh["tp"], h, w2, b2, y);
    const Tensor dy = there(of_x, "dy"), dh = compute.make(of_h), dw2 = compute.make({6, 4, 1, 1}),
                 db2 = compute.make({6}), dx = compute.make(of_x), dw1 = there({4, 6, 1, 1}, "dw1"),
                 db1 = there({4}, "db1");
    row_conv2d_backward(compute, dy, h, w2, {dh, dw2, db2});
    column_conv2d_backward(compute, mesh["tp"], dh, x, w1, {dx, dw1, db1, true});
    Numbers all;
    for (const Tensor& t : {h, y, dh, dw2, db2, dx, dw1, db1}) keep(all, compute, t);
    return all;
  });
}

// By the functions on views, and by CrossEntropy: what ranks gather lies on the device.
TEST(TensorParallelOnDevices, AVocabularyThatIsSplitGivesTheBitsOfTheCpu) {
  expect_the_same([](Compute& compute, ProcessGroup& group) {
    Context& context = compute.context();
    const DeviceMesh mesh(group, {{"tp", 2}});
    const std::int64_t vocab = 7, part = vocab_part(mesh, vocab).size;
    const auto there = [&](const Tensor& t) { return to_device(context, t, compute.stream()); };
    const Tensor numbers(context, {4}, DType::i64);
    for (std::int64_t i = 0; i < 4; ++i)
      numbers.as<std::int64_t>()[static_cast<std::size_t>(i)] = (i * 5) % vocab;
    const Tensor tokens = there(numbers), w = there(random_tensor(context, {part, 3}, "w")),
                 dy = there(random_tensor(context, {4, 3}, "dy")),
                 logits = there(random_tensor(context, {4, part}, "logits")), y = compute.make({4, 3}),
                 dw = compute.make({part, 3}), dlogits = compute.make({4, part});
    vocab_parallel_embedding_forward(compute, mesh, vocab, tokens, w, y);
    vocab_parallel_embedding_backward(compute, mesh, vocab, tokens, dy, dw);
    const double loss = vocab_parallel_cross_entropy(
        compute, mesh, logits, tokens, {.vocab = vocab, .valid = 4, .label_smoothing = 0.1, .scale = 3},
        dlogits);
    Numbers all{{static_cast<float>(loss)}};
    for (const Tensor& t : {y, dw, dlogits}) keep(all, compute, t);

    CrossEntropy module(0.1);
    Frame frame(compute);
    const Tensor of_module =
        module.forward({logits.with_layout(make_layout(mesh, {Shard{1}}, {4, vocab})),
                        tokens.with_layout(replicated_layout(mesh, {4})), there(scalar(mesh, 4))},
                       frame)[0];
    EXPECT_EQ(to_host(context, of_module).as<double>()[0], loss);
    keep(all, compute, module.backward({}, frame)[0]);
    return all;
  });
}

}  // namespace
}  // namespace weft::device_test
