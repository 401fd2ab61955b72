// A program's own training loop, built from weft's parts: a small transformer on a mesh of dp x tp ranks
// learns to count in steps. The program prints the same losses on every mesh.
//   weft run -n 4 -- ./training
#include <cstdio>

#include "weft/models/build.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/train/gradients.hpp"
#include "weft/weft.hpp"

namespace {

constexpr std::int64_t kBatch = 16, kSequence = 24, kVocab = 32;
constexpr int kSteps = 60;

// Sample s counts from s on in steps of 1 + s % 3, modulo the vocabulary. `shift` 1 gives the labels.
weft::Tensor numbers(weft::Context& context, const std::vector<std::int64_t>& samples, std::int64_t shift) {
  weft::Tensor t(context, {static_cast<std::int64_t>(samples.size()), kSequence}, weft::DType::i64);
  std::size_t at = 0;
  for (const std::int64_t s : samples)
    for (std::int64_t k = 0; k < kSequence; ++k)
      t.as<std::int64_t>()[at++] = (s + (k + shift) * (1 + s % 3)) % kVocab;
  return t;
}

}  // namespace

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  const weft::DeviceMesh mesh(group, {{"dp", group.size() % 2 == 0 ? 2 : 1}, {"tp", -1}});
  weft::Compute compute(context);

  weft::TransformerConfig config;
  config.dim = 32;
  config.layers = 2;
  config.heads = config.kv_heads = 4;
  config.ffn_hidden = 64;
  config.vocab = kVocab;
  config.max_seq = kSequence;
  weft::ParallelModel parts = build_parallel_model(config, mesh, compute, {.seed = 1});
  weft::AdamW optimizer(compute, parts.parameters(), {});
  weft::CrossEntropy cross_entropy;
  const weft::Sampler sampler(parts.data, 96, kBatch, 1);

  for (int step = 0; step < kSteps; ++step) {
    const std::vector<std::int64_t> samples = sampler.local_batch(step);  // tp peers get the same samples
    const weft::Tensor tokens = parts.place(numbers(context, samples, 0), kBatch),
                       labels = parts.place(numbers(context, samples, 1), kBatch);
    weft::Frame frame(compute, {.seed = 1, .step = step});
    const weft::Tensors logits = parts.model->forward({tokens}, frame);
    const weft::Tensors loss =
        cross_entropy.forward({logits[0], labels, weft::scalar(mesh, kBatch * kSequence)}, frame);
    parts.model->backward(cross_entropy.backward({}, frame), frame);
    parts.reducer->finish();                                   // over dp
    weft::reduce_gradients(parts.parameters(), parts.tensor);  // over tp: gradients of replicated parameters
    weft::clip_grad_norm(parts.parameters(), 1.0);
    optimizer.step(3e-3);
    optimizer.zero_gradients();
    const double whole = full(loss[0]).as<double>()[0];  // over all ranks
    if (group.rank() == 0 && step % 20 == 19) std::printf("step %2d: loss %.4f\n", step + 1, whole);
  }
}
