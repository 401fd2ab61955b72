// A program's own model, whose parameters are divided over the data-parallel ranks: each of four ranks keeps
// a quarter of every parameter, and has all weights of a block only while it computes with the block. The
// program prints the same losses for any number of ranks.
//   weft run -n 4 -- ./sharded
#include <cstdio>
#include <memory>

#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradients.hpp"
#include "weft/weft.hpp"

namespace {

constexpr std::int64_t kRows = 24, kFeatures = 8, kWidth = 64;
constexpr int kBlocks = 6, kSteps = 60;

// Makes shapes and names, but no memory yet.
std::unique_ptr<weft::Sequential> make_model() {
  const weft::Init init = weft::Normal{.std = 0.12};
  auto blocks = std::make_unique<weft::Sequential>();
  for (int i = 0; i < kBlocks; ++i) {
    auto block = std::make_unique<weft::Sequential>();
    block->append("up", std::make_unique<weft::Linear>(kWidth, 2 * kWidth, true, init));
    block->append("act", std::make_unique<weft::GELU>());
    block->append("down", std::make_unique<weft::Linear>(2 * kWidth, kWidth, true, init));
    blocks->append(std::move(block));
  }
  auto model = std::make_unique<weft::Sequential>();
  model->append("in", std::make_unique<weft::Linear>(kFeatures, kWidth, true, init));
  model->append("blocks", std::move(blocks));
  model->append("out", std::make_unique<weft::Linear>(kWidth, 1, true, init));
  return model;
}

}  // namespace

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  weft::Compute compute(context);

  const auto model = make_model();
  const auto sharded = fully_shard(*model, group, {.blocks = {"blocks.*"}});  // over all ranks
  materialise(*model, compute);                                               // this rank's part alone
  initialise(*model, 1);
  weft::AdamW optimizer(compute, model->parameters(), {});

  const weft::DeviceMesh mesh = sharded->mesh();
  for (int step = 0; step < kSteps; ++step) {
    // Each rank has its part of the rows; the model must learn the sum of the first two features.
    weft::Tensor all(context, {kRows, kFeatures});
    weft::RandomStream(static_cast<std::uint64_t>(step), "x").normal(0, all.count(), all.f32().data());
    const weft::Tensor x = distribute(all, make_layout(mesh, {weft::Shard{0}}, all.shape()));
    weft::Frame frame(compute);
    const weft::Tensor y = model->forward(x, frame)[0];  // gathers each block ahead of time, and drops it
    weft::Tensor dy(context, y.shape());
    double loss = 0;
    for (std::size_t i = 0; i < y.f32().size(); ++i) {
      const float error = y.f32()[i] - x.f32()[i * kFeatures] - x.f32()[i * kFeatures + 1];
      dy.f32()[i] = error / static_cast<float>(kRows);
      loss += 0.5 * static_cast<double>(error) * static_cast<double>(error) / kRows;
    }
    model->backward(dy.with_layout(y.layout()), frame);  // reduce-scatters gradients behind
    weft::clip_grad_norm(model->parameters(), 1.0);
    optimizer.step(3e-3);
    optimizer.zero_gradients();
    group.all_reduce(loss).wait();
    if (group.rank() == 0 && step % 20 == 19) std::printf("step %2d: loss %.3f\n", step + 1, loss);
  }
  const weft::ShardMemory memory = sharded->memory();
  if (group.rank() == 0)
    std::printf(
        "of %ld bytes of parameters rank 0 keeps %ld; gathered blocks and their gradients took at most %ld\n",
        static_cast<long>(memory.whole_model), static_cast<long>(memory.masters),
        static_cast<long>(memory.whole_peak));
}
