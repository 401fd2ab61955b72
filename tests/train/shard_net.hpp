// A small model, and a run of it over a mesh, for tests of sharded training. Belongs to one thread.
#pragma once

#include <gtest/gtest.h>

#include <cmath>
#include <map>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradients.hpp"

namespace weft::test {

/// Does nothing, or throws: a place in a model that a test can make fail.
class Tripwire : public Module {
 public:
  bool forward_trips = false, backward_trips = false;

 private:
  Tensors do_forward(Inputs x, Frame&) override {
    if (forward_trips) throw Error(ErrorCode::system, "tripped forward");
    return {x[0]};
  }
  Tensors do_backward(Inputs dy, Frame&) override {
    if (backward_trips) throw Error(ErrorCode::system, "tripped backward");
    return {dy[0]};
  }
};

/// embed, layers.0 … (norm, up, act, trip, down), head. Prime sizes: nothing divides, biases of 13 and 3
/// elements.
inline std::unique_ptr<Sequential> shard_net(int layers = 3, std::int64_t width = 13,
                                             std::int64_t hidden = 40) {
  auto net = std::make_unique<Sequential>();
  const Init init = Normal{.std = 0.3};
  net->append("embed", std::make_unique<Linear>(5, width, true, init));
  auto blocks = std::make_unique<Sequential>();
  for (int i = 0; i < layers; ++i) {
    auto block = std::make_unique<Sequential>();
    block->append("norm", std::make_unique<RMSNorm>(width));
    block->append("up", std::make_unique<Linear>(width, hidden, true, init));
    block->append("act", std::make_unique<GELU>());
    block->append("trip", std::make_unique<Tripwire>());
    block->append("down", std::make_unique<Linear>(hidden, width, true, init));
    blocks->append(std::move(block));
  }
  net->append("layers", std::move(blocks));
  net->append("head", std::make_unique<Linear>(width, 3, true, init));
  return net;
}

/// Trains it on a regression. Ranks of the data axes have parts of the batch; those of "tp" share layers.
struct ShardRun {
  static constexpr std::int64_t kRows = 12, kFeatures = 5;

  /// `data`: names of axes of `shape` over which the batch is cut. No options: not sharded, and not averaged.
  ShardRun(Rank& rank, const MeshShape& shape, std::vector<std::string> shard,
           std::vector<std::string> replicate = {},
           std::optional<FullyShardOptions> options = FullyShardOptions{.blocks = {"layers.*"}},
           int layers = 3)
      : compute(rank.context), mesh(rank.group(), shape), net(shard_net(layers)) {
    if (shape.has("tp"))
      parallelize(*net, mesh["tp"], Plan{{"layers.*.up", Style::column}, {"layers.*.down", Style::row}});
    replicate_all();
    data = mesh.submesh(joined(replicate, shard));
    if (options)
      sharded = replicate.empty()
                    ? fully_shard(*net, mesh.submesh(shard), *options)
                    : fully_shard(*net, {mesh.submesh(shard), mesh.submesh(replicate)}, *options);
    materialise(*net, compute);
    initialise(*net, 7);
  }
  void replicate_all() { weft::replicate(*net, mesh); }
  static std::vector<std::string> joined(std::vector<std::string> a, const std::vector<std::string>& b) {
    a.insert(a.end(), b.begin(), b.end());
    return a;
  }

  /// This rank's part of a batch (rows, features), as layers want it.
  Tensor rows(std::int64_t step, std::int64_t count = kRows) const {
    Tensor whole(compute.context(), {count, kFeatures});
    RandomStream(static_cast<std::uint64_t>(step) + 3, "x").normal(0, whole.count(), whole.f32().data());
    return distribute(whole, replicated_layout(mesh, whole.shape())->with(data, Shard{0}));
  }
  /// One pass: gradients are those of the mean over `of` rows. Gives this rank's part of the loss.
  double pass(std::int64_t step, std::int64_t of = kRows, std::int64_t count = kRows) {
    Frame frame(compute);
    const Tensor x = rows(step, count), y = net->forward(x, frame)[0];
    Tensor dy(compute.context(), y.shape());
    double loss = 0;
    for (std::size_t i = 0; i < y.f32().size(); ++i) {
      const float d = y.f32()[i] - x.f32()[i / 3 * 5 + i % 3];  // to learn: the first three features
      dy.f32()[i] = d / static_cast<float>(of);
      loss += 0.5 * static_cast<double>(d) * static_cast<double>(d) / static_cast<double>(of);
    }
    net->backward(dy.with_layout(y.layout()), frame);
    EXPECT_TRUE(frame.empty());
    return loss;
  }
  /// The same over all ranks.
  double whole_pass(std::int64_t step) {
    double loss = pass(step);
    if (data.size() > 1) data.group().all_reduce(loss).wait();
    sync();
    return loss;
  }
  void sync() {
    if (mesh.has("tp")) sync_replicated_gradients(net->parameters(), mesh["tp"]);
  }
  void zero() {
    for (Parameter* p : net->parameters()) p->zero_gradient();
  }

  std::map<std::string, std::vector<float>> gradients() const {
    std::map<std::string, std::vector<float>> all;
    for (Parameter* p : net->parameters())
      if (p->has_gradient()) all[p->path()] = floats(p->gradient().with_layout(p->gradient_layout()));
    return all;
  }
  std::map<std::string, std::vector<float>> masters() const {
    std::map<std::string, std::vector<float>> all;
    for (Parameter* p : net->parameters()) all[p->path()] = floats(p->master());
    return all;
  }
  static std::vector<float> floats(const Tensor& t) {
    const Tensor whole = full(t);
    return {whole.f32().begin(), whole.f32().end()};
  }

  Compute compute;
  DeviceMesh mesh, data;
  std::unique_ptr<Sequential> net;
  std::unique_ptr<FullySharded> sharded;
};

using Values = std::map<std::string, std::vector<float>>;

/// Each element within `tolerance` of the largest of its tensor.
inline void expect_close(const Values& got, const Values& expected, double tolerance,
                         const std::string& what = "") {
  ASSERT_EQ(got.size(), expected.size()) << what;
  for (const auto& [path, values] : expected) {
    ASSERT_TRUE(got.count(path)) << what << path;
    const std::vector<float>& mine = got.at(path);
    ASSERT_EQ(mine.size(), values.size()) << what << path;
    double largest = 0, worst = 0;
    for (std::size_t i = 0; i < values.size(); ++i) {
      largest = std::max(largest, std::abs(static_cast<double>(values[i])));
      worst = std::max(worst, std::abs(static_cast<double>(mine[i]) - static_cast<double>(values[i])));
    }
    EXPECT_LE(worst, tolerance * largest) << what << path;
  }
}

}  // namespace weft::test
