// A small model in eight modules, its micro-batches, and its gradients on one rank.
#pragma once

#include <gtest/gtest.h>

#include <map>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/norm.hpp"
#include "weft/pp/pipeline.hpp"

namespace weft::test {

inline constexpr std::int64_t kFeatures = 6;
inline constexpr int kModules = 8;

inline std::unique_ptr<Sequential> pipe_net() {
  auto net = std::make_unique<Sequential>();
  for (int i = 0; i < kModules; ++i) {
    if (i == 2)
      net->append(std::make_unique<RMSNorm>(kFeatures, 1e-5));
    else if (i == 4)
      net->append(std::make_unique<Dropout>(0.25));
    else
      net->append(std::make_unique<Linear>(kFeatures, kFeatures, i % 3 != 0, Normal{0.4}));
  }
  return net;
}

using Bits = std::map<std::string, std::vector<float>>;
inline void add_bits(Bits& bits, const Parameter& p) {
  if (p.has_gradient()) bits["d " + p.path()].assign(p.gradient().f32().begin(), p.gradient().f32().end());
  bits[p.path()].assign(p.master().f32().begin(), p.master().f32().end());
}

/// Micro-batches of three samples; the last has one, if there are several.
class PipeData {
 public:
  PipeData(Context& context, int micro_batches) {
    for (int m = 0; m < micro_batches; ++m) rows_.push_back(m > 0 && m + 1 == micro_batches ? 1 : 3);
    std::int64_t count = 0;
    for (const std::int64_t rows : rows_) count += rows * kFeatures;
    for (int m = 0; m < micro_batches; ++m) {
      Tensor x(context, {rows_[static_cast<std::size_t>(m)], kFeatures}), target(context, x.shape());
      RandomStream(3, "x" + std::to_string(m)).normal(0, x.count(), x.f32().data());
      RandomStream(3, "y" + std::to_string(m)).normal(0, x.count(), target.f32().data());
      batches_.push_back({{x}, {target, scalar(context, count)}});
    }
  }
  const std::vector<PipelineMicroBatch>& batches() const { return batches_; }

 private:
  std::vector<std::int64_t> rows_;
  std::vector<PipelineMicroBatch> batches_;
};

inline PipelineBorder pipe_border(int, const Tensors& inputs) { return {inputs[0].shape()}; }

inline PipelineOptions pipe_options(Module& net, const PipelineSchedule& schedule) {
  const std::vector<std::string> all{"*"};
  return {schedule, split_stages(pipeline_path(net, all), schedule.stages()), pipe_border};
}

/// w -= g / 4, and the gradients are dropped.
inline void descend(std::span<Parameter* const> parameters) {
  for (Parameter* p : parameters) {
    const std::span<float> w = p->write_master().f32();
    for (std::size_t i = 0; i < w.size(); ++i) w[i] -= 0.25F * p->gradient().f32()[i];
    p->zero_gradient();
  }
}

struct PipeOutcome {
  std::vector<double> losses;
  Bits bits;
  friend bool operator==(const PipeOutcome&, const PipeOutcome&) = default;
};

/// Two steps on one rank, without a Pipeline.
inline PipeOutcome serial_outcome(Context& context, int micro_batches) {
  Compute compute(context);
  const auto net = pipe_net();
  materialise(*net, compute);
  initialise(*net, 7);
  MeanSquaredError loss;
  const PipeData data(context, micro_batches);
  PipeOutcome outcome;
  for (int step = 0; step < 2; ++step) {
    if (step > 0) descend(net->parameters());
    std::int64_t first = 0;
    for (int m = 0; m < micro_batches; ++m) {
      const PipelineMicroBatch& b = data.batches()[static_cast<std::size_t>(m)];
      Frame frame(compute, {.seed = 5, .step = step, .micro_batch = m, .first_sample = first});
      first += b.inputs[0].size(0);
      const Tensors y = net->forward(b.inputs, frame);
      outcome.losses.push_back(loss.forward({y[0], b.targets[0], b.targets[1]}, frame)[0].as<double>()[0]);
      net->backward(loss.backward({}, frame), frame);
    }
  }
  for (const Parameter* p : net->parameters()) add_bits(outcome.bits, *p);
  return outcome;
}

/// The same by a Pipeline; `bits` has the parameters of this rank.
inline PipeOutcome pipeline_outcome(Rank& rank, const PipelineSchedule& schedule) {
  Compute compute(rank.context);
  const auto net = pipe_net();
  MeanSquaredError loss;
  Pipeline pipeline(*net, &loss, rank.group(), compute, pipe_options(*net, schedule));
  pipeline.materialise(7);
  const PipeData data(rank.context, schedule.micro_batches);
  PipeOutcome outcome;
  for (int step = 0; step < 2; ++step) {
    if (step > 0) descend(pipeline.parameters());
    const PipelineResult result = pipeline.run(data.batches(), {.seed = 5, .step = step});
    outcome.losses.insert(outcome.losses.end(), result.losses.begin(), result.losses.end());
  }
  for (const Parameter* p : pipeline.parameters()) add_bits(outcome.bits, *p);
  return outcome;
}

/// All losses, and the parameters and gradients of this rank, are those of one rank, bit by bit.
inline void expect_serial(const PipeOutcome& got, const PipeOutcome& serial, int ranks) {
  EXPECT_EQ(got.losses, serial.losses);
  for (const auto& [name, bits] : got.bits) EXPECT_EQ(bits, serial.bits.at(name)) << name;
  if (ranks == 1) {
    EXPECT_EQ(got.bits.size(), serial.bits.size());
  }
}

}  // namespace weft::test
