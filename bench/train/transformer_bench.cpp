// Measures a training step of a small transformer on one rank, and the bare matrix products of that step. The
// difference is the cost of everything else (attention, norms, activations, loss, optimizer, memory).
//
//   transformer_bench            counters: tokens/s, milliseconds of each part of the step
#include <benchmark/benchmark.h>

#include <algorithm>
#include <cmath>
#include <string>
#include <vector>

#include "weft/base/clock.hpp"
#include "weft/models/transformer.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft {
namespace {

struct Row {
  const char* name;
  TransformerConfig model;
  std::int64_t batch, seq;
  int threads;
};

TransformerConfig small() {
  TransformerConfig c;
  c.dim = 256, c.layers = 4, c.heads = 8, c.kv_heads = 4, c.ffn_hidden = 768, c.vocab = 256, c.max_seq = 128;
  return c;
}

const std::vector<Row>& rows() {
  static const std::vector<Row> all = {
      {"dim256/layers4/batch8/seq128/threads1", small(), 8, 128, 1},
      {"dim256/layers4/batch8/seq128/threads2", small(), 8, 128, 2},
      {"dim256/layers4/batch2/seq128/threads1", small(), 2, 128, 1},
  };
  return all;
}

double milliseconds_since(Clock::time_point start) {
  return std::chrono::duration<double, std::milli>(Clock::now() - start).count();
}

void step(benchmark::State& state, const Row& row) {
  Context context;
  Compute compute(context, row.threads);
  Transformer model(row.model);
  materialise(model, compute);
  initialise(model, 1);
  AdamW adamw(compute, model.parameters(), {});
  CrossEntropy cross_entropy;
  Frame frame(compute);
  const std::int64_t count = row.batch * row.seq;
  Tensor tokens(context, {row.batch, row.seq}, DType::i64), labels(context, {row.batch, row.seq}, DType::i64);
  for (std::int64_t i = 0; i < count; ++i) {
    tokens.as<std::int64_t>()[static_cast<std::size_t>(i)] = i * 7919 % row.model.vocab;
    labels.as<std::int64_t>()[static_cast<std::size_t>(i)] = (i + 1) * 7919 % row.model.vocab;
  }
  const Tensor valid = scalar(context, count);
  double forward_ms = 0, loss_ms = 0, backward_ms = 0, optimizer_ms = 0;
  const auto train = [&] {
    auto start = Clock::now();
    const Tensor logits = model.forward(tokens, frame)[0];
    forward_ms += milliseconds_since(start);
    start = Clock::now();
    const double loss = cross_entropy.forward({logits, labels, valid}, frame)[0].as<double>()[0];
    const Tensors dlogits = cross_entropy.backward({}, frame);
    loss_ms += milliseconds_since(start);
    start = Clock::now();
    adamw.zero_gradients();
    model.backward(dlogits, frame);
    backward_ms += milliseconds_since(start);
    start = Clock::now();
    adamw.step(1e-3);
    optimizer_ms += milliseconds_since(start);
    return loss;
  };
  const double first = train();
  double last = first;
  for (int i = 0; i < 4; ++i) last = train();
  if (!std::isfinite(last) || last >= first) state.SkipWithError("the loss does not fall");
  forward_ms = loss_ms = backward_ms = optimizer_ms = 0;
  for ([[maybe_unused]] const auto _ : state) train();
  const auto per_step = [](double ms) { return benchmark::Counter(ms, benchmark::Counter::kAvgIterations); };
  state.counters["forward_ms"] = per_step(forward_ms);
  state.counters["loss_ms"] = per_step(loss_ms);
  state.counters["backward_ms"] = per_step(backward_ms);
  state.counters["optimizer_ms"] = per_step(optimizer_ms);
  state.counters["tokens"] =
      benchmark::Counter(static_cast<double>(count), benchmark::Counter::kIsIterationInvariantRate);
}

// Computes y = x wᵀ, dx = dy w and dw = dyᵀ x of every linear layer, on separate buffers.
void products(benchmark::State& state, const Row& row) {
  const TransformerConfig& c = row.model;
  const std::int64_t tokens = row.batch * row.seq, q = c.heads * c.head_dim(), kv = c.kv_heads * c.head_dim();
  struct Layer {
    std::int64_t in, out;
    std::vector<float> x, w, y;
  };
  std::vector<Layer> layers;
  const auto add = [&](std::int64_t in, std::int64_t out) {
    layers.push_back({in, out, std::vector<float>(static_cast<std::size_t>(tokens * in), 0.5f),
                      std::vector<float>(static_cast<std::size_t>(in * out), 0.25f),
                      std::vector<float>(static_cast<std::size_t>(tokens * out), 0.125f)});
  };
  for (std::int64_t i = 0; i < c.layers; ++i)
    for (const auto& [in, out] : {std::pair{c.dim, q},
                                  {c.dim, kv},
                                  {c.dim, kv},
                                  {q, c.dim},
                                  {c.dim, c.ffn_hidden},
                                  {c.dim, c.ffn_hidden},
                                  {c.ffn_hidden, c.dim}})
      add(in, out);
  add(c.dim, c.vocab);
  kernels::KernelContext kernels(row.threads);
  using kernels::Stored;
  double flops = 0;
  for (const Layer& l : layers) flops += 6.0 * static_cast<double>(tokens * l.in * l.out);
  for ([[maybe_unused]] const auto _ : state) {
    for (Layer& l : layers)
      kernels::matmul(kernels, l.x.data(), Stored::plain, l.w.data(), Stored::transposed, l.y.data(), tokens,
                      l.out, l.in, false);
    for (auto l = layers.rbegin(); l != layers.rend(); ++l) {
      kernels::matmul(kernels, l->y.data(), Stored::transposed, l->x.data(), Stored::plain, l->w.data(),
                      l->out, l->in, tokens, false);
      kernels::matmul(kernels, l->y.data(), Stored::plain, l->w.data(), Stored::plain, l->x.data(), tokens,
                      l->in, l->out, false);
    }
    for (Layer& l : layers) {  // keep the numbers finite from step to step
      std::fill(l.x.begin(), l.x.end(), 0.5f);
      std::fill(l.w.begin(), l.w.end(), 0.25f);
    }
  }
  state.counters["GFLOP"] = benchmark::Counter(flops * 1e-9, benchmark::Counter::kIsIterationInvariantRate);
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  benchmark::Initialize(&argc, argv);
  for (const weft::Row& row : weft::rows()) {
    using Function = void (*)(benchmark::State&, const weft::Row&);
    for (const auto& [name, f] :
         {std::pair<const char*, Function>{"step/", weft::step}, {"products/", weft::products}})
      benchmark::RegisterBenchmark((std::string(name) + row.name).c_str(),
                                   [f = f, &row](benchmark::State& s) { f(s, row); })
          ->UseRealTime()
          ->Unit(benchmark::kMillisecond);
  }
  benchmark::RunSpecifiedBenchmarks();
  benchmark::Shutdown();
}
