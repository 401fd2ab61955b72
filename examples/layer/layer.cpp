// Trains a layer from outside the library on a 2 x 2 mesh, parallelised by a plan, and on one rank.
//   weft run -n 4 -- ./layer
#include <algorithm>
#include <cmath>
#include <cstdio>

#include "low_rank_linear.hpp"
#include "weft/base/random.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/optimizer.hpp"
#include "weft/tp/parallelize.hpp"
#include "weft/train/gradient_reducer.hpp"
#include "weft/train/gradients.hpp"
#include "weft/weft.hpp"

namespace {

constexpr std::int64_t kSamples = 16, kIn = 12, kHidden = 24, kOut = 6;
constexpr int kSteps = 20;

weft::Tensor numbers(weft::Context& context, const weft::Shape& shape, const char* name) {
  weft::Tensor t(context, shape);
  weft::RandomStream(7, name).normal(0, t.count(), t.f32().data());
  return t;
}

// Steps of gradient descent on |y - target|² / (2 · samples). `mesh`: empty for one rank.
void train(weft::Sequential& model, weft::Compute& compute, const weft::DeviceMesh& mesh) {
  const auto mine = [&](const weft::Tensor& t) {
    return mesh ? distribute(t, make_layout(mesh, {{"dp", weft::Shard{0}}}, t.shape())) : t;
  };
  const weft::Tensor x = mine(numbers(compute.context(), {kSamples, kIn}, "x")),
                     target = mine(numbers(compute.context(), {kSamples, kOut}, "target"));
  weft::SGD optimizer(compute, model.parameters(), {});
  std::optional<weft::GradientReducer> reducer;
  if (mesh) reducer.emplace(model.parameters(), mesh["dp"]);
  for (int step = 0; step < kSteps; ++step) {
    weft::Frame frame(compute);
    const weft::Tensor y = model.forward(x, frame)[0];
    const weft::Tensor dy = compute.make(y.shape()).with_layout(y.layout());
    for (std::size_t i = 0; i < dy.f32().size(); ++i)
      dy.f32()[i] = (y.f32()[i] - target.f32()[i]) / static_cast<float>(kSamples);
    model.backward(dy, frame);
    if (mesh) {
      reducer->finish();                                       // over the ranks that saw other samples
      weft::reduce_gradients(model.parameters(), mesh["tp"]);  // over the ranks that share the layers
    }
    optimizer.step(0.05);
    optimizer.zero_gradients();
  }
}

void build(weft::Sequential& model) {
  model.append("up", std::make_unique<LowRankLinear>(kIn, kHidden, 4));
  model.append("down", std::make_unique<weft::Linear>(kHidden, kOut, true));
}

}  // namespace

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  const weft::DeviceMesh mesh(group, {{"dp", 2}, {"tp", -1}});
  weft::Compute compute(context);

  weft::Sequential parallel, serial;
  build(parallel);
  build(serial);
  weft::parallelize(parallel, mesh["tp"], {{"up", weft::Style::column}, {"down", weft::Style::row}});
  weft::replicate(parallel, mesh);
  for (weft::Sequential* model : {&parallel, &serial}) {
    weft::materialise(*model, compute);
    weft::initialise(*model, 1);
    train(*model, compute, model == &parallel ? mesh : weft::DeviceMesh());
  }
  double worst = 0;
  for (weft::Parameter* p : serial.parameters()) {
    const weft::Tensor whole = full(parallel.parameter(p->path())->master());
    for (std::size_t i = 0; i < whole.f32().size(); ++i)
      worst = std::max(
          worst, std::abs(static_cast<double>(whole.f32()[i]) - static_cast<double>(p->master().f32()[i])));
  }
  if (group.rank() == 0)
    std::printf("%s: after %d steps the weights %s those of one rank\n", to_string(mesh.shape()).c_str(),
                kSteps, worst < 1e-5 ? "equal" : "differ from");
  return worst < 1e-5 ? 0 : 1;
}
