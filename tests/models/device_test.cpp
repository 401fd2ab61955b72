// A transformer that trains on the late device of the tests has the losses and the weights of the CPU, bit for bit.
#include <gtest/gtest.h>

#include <vector>

#include "support/late_kernels.hpp"
#include "support/temporary_folder.hpp"
#include "weft/host/copy.hpp"
#include "weft/models/transformer.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::device_test {
namespace {

struct Trained {
  std::vector<double> losses;
  std::vector<std::vector<float>> weights;
};

Trained train(Compute& compute, bool tied) {
  Context& context = compute.context();
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
  AdamW optimizer(compute, model.parameters(), {});
  CrossEntropy loss;
  Trained result;
  for (int step = 0; step < 3; ++step) {
    const Tensor tokens(context, {4, 6}, DType::i64), labels(context, {4, 6}, DType::i64);
    for (std::size_t i = 0; i < 24; ++i) {
      const std::size_t n = i + 24 * static_cast<std::size_t>(step);
      tokens.as<std::int64_t>()[i] = static_cast<std::int64_t>(n * 7 % 13);
      labels.as<std::int64_t>()[i] =
          i % 5 == 0 ? CrossEntropy::kIgnore : static_cast<std::int64_t>(n * 5 % 13);
    }
    Frame frame(compute);
    const Tensor labels_there = to_device(context, labels, compute.stream());
    const Tensor logits = model.forward(to_device(context, tokens, compute.stream()), frame)[0];
    const Tensor sum = loss.forward({logits, labels_there, global_valid(compute, labels_there)}, frame)[0];
    model.backward(loss.backward({}, frame), frame);
    optimizer.step(0.01);
    optimizer.zero_gradients();
    result.losses.push_back(to_host(context, sum).as<double>()[0]);
  }
  for (const Parameter* p : model.parameters()) {
    const Tensor home = to_host(context, p->master());
    result.weights.emplace_back(home.f32().begin(), home.f32().end());
  }
  return result;
}

TEST(TransformerOnADevice, TrainsToTheSameBits) {
  Context context;
  test::LateDevice& late = test::add_late_device(context);
  for (const bool tied : {false, true}) {
    Compute here(context, 2), there(context, 2, late.device());
    const Trained want = train(here, tied), got = train(there, tied);
    EXPECT_EQ(got.losses, want.losses);
    EXPECT_LT(got.losses[2], got.losses[0]);
    EXPECT_EQ(got.weights, want.weights);
  }
  EXPECT_EQ(late.blocks(), 0u) << "all memory was given back";
}

// A checkpoint of a device's tensors goes through the host: what is saved from the device is loaded on the CPU, and back.
TEST(TransformerOnADevice, IsSavedAndLoaded) {
  const test::TemporaryFolder folder;
  Context context;
  Compute there(context, 1, test::add_late_device(context).device()), here(context);
  const auto make = [](Compute& compute, std::uint64_t seed) {
    auto layer = std::make_unique<Linear>(3, 2, true);
    materialise(*layer, compute);
    initialise(*layer, seed);
    return layer;
  };
  const auto away = make(there, 1), home = make(here, 2), again = make(there, 3);
  const SGD::Options options{0.5, 0};
  SGD of_away(there, away->parameters(), options), of_home(here, home->parameters(), options),
      of_again(there, again->parameters(), options);
  save_checkpoint(folder.path() / "a", {}, 1, *away, &of_away);
  load_checkpoint(folder.path() / "a", {}, *home, &of_home);
  save_checkpoint(folder.path() / "b", {}, 2, *home, &of_home);
  load_checkpoint(folder.path() / "b", {}, *again, &of_again);
  const auto floats = [&](const Module& m) {
    const Tensor w = to_host(context, m.parameters()[0]->master());
    return std::vector<float>(w.f32().begin(), w.f32().end());
  };
  EXPECT_EQ(floats(*home), floats(*away));
  EXPECT_EQ(floats(*again), floats(*away));
}

}  // namespace
}  // namespace weft::device_test
