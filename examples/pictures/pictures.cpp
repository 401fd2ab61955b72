// A model of one's own over a mesh: a small convolutional classifier of pictures that the program makes. It
// trains with divided parameters and activation checkpointing, saves, and goes on on other ranks.
//   weft run -n 4 -- ./pictures begin     dp 2 x tp 2, steps 1 to 20, saves
//   weft run -n 3 -- ./pictures resume    dp 3, steps 21 to 40
#include <cstdio>
#include <filesystem>
#include <memory>
#include <string>

#include "weft/train.hpp"

namespace {

constexpr std::int64_t kRows = 12, kSize = 8, kSteps = 20;

// x + branch(x)
class Residual : public weft::Module {
 public:
  explicit Residual(std::int64_t width)
      : branch_(width, 2 * width, 0.1, weft::Normal{0.2}, weft::Normal{0.2}) {
    add("branch", branch_);
  }

 private:
  weft::Tensors do_forward(weft::Inputs x, weft::Frame& frame) override {
    return {add_tensors(x[0], branch_.forward(x, frame)[0], frame.compute(), {path(), "x + branch"})};
  }
  weft::Tensors do_backward(weft::Inputs dy, weft::Frame& frame) override {
    return {add_tensors(dy[0], branch_.backward(dy, frame)[0], frame.compute(), {path(), "d(x + branch)"})};
  }
  weft::ChannelFeedForward branch_;  // its own plan splits its products, by columns and by rows
};

weft::Conv2dConfig conv(std::int64_t in, std::int64_t out, std::int64_t kernel) {
  return {.in = in, .out = out, .kernel = kernel, .padding = kernel / 2, .init = weft::Normal{0.3}};
}

// (rows, 1, 8, 8) -> (rows, 1, 1, 1), which is positive for stripes along the columns
std::unique_ptr<weft::Module> classifier() {
  auto model = std::make_unique<weft::Sequential>();
  model->append("embed", std::make_unique<weft::Conv2d>(conv(1, 8, 3)));
  model->append("act", std::make_unique<weft::GELU>());
  model->append("pool", std::make_unique<weft::AdaptiveAvgPool2d>(weft::Extent2d(1)));
  auto stages = std::make_unique<weft::Sequential>();
  for (int i = 0; i < 2; ++i) stages->append(std::make_unique<Residual>(8));
  model->append("stages", std::move(stages));
  model->append("head", std::make_unique<weft::Conv2d>(conv(8, 1, 1)));
  return model;
}

// This rank's rows of the batch of a step: noisy stripes along the rows (0) or along the columns (1).
weft::Batch make_pictures(weft::Context& context, const weft::ParallelModel& built, std::int64_t step) {
  const weft::Chunk part = weft::chunk_of(kRows, built.data.size(), built.data.rank());
  weft::Tensor pictures(context, {part.size, 1, kSize, kSize}), targets(context, {part.size, 1, 1, 1});
  for (std::int64_t row = 0; row < part.size; ++row) {
    const std::int64_t sample = part.offset + row, kind = sample % 2;
    targets.f32()[static_cast<std::size_t>(row)] = static_cast<float>(kind);
    float* const pixels = pictures.f32().data() + row * kSize * kSize;
    weft::RandomStream(5, std::to_string(step) + "." + std::to_string(sample))
        .normal(0, kSize * kSize, pixels);
    for (std::int64_t at = 0; at < kSize * kSize; ++at)
      pixels[at] = pixels[at] + static_cast<float>((kind == 1 ? at % kSize : at / kSize) % 2);
  }
  return {.inputs = {pictures}, .targets = {targets}, .global_rows = kRows};
}

}  // namespace

int main(int argc, char** argv) {
  const bool resumes = argc > 1 && std::string(argv[1]) == "resume";
  const std::filesystem::path folder = "pictures-checkpoint";
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  const weft::DeviceMesh mesh(group, {{"dp", -1}, {"tp", group.size() % 2 == 0 ? 2 : 1}});
  weft::Compute compute(context);

  weft::Recipe recipe;
  recipe.name = "classifier of pictures";
  recipe.build = classifier;
  recipe.blocks = {"stages.*"};
  recipe.loss = [] { return std::make_unique<weft::BinaryCrossEntropy>(); };
  weft::BuildOptions options;
  options.data = weft::DataForm::fsdp;
  options.ac.mode = weft::AcMode::full;
  options.seed = 3;
  weft::ParallelModel built = build_parallel_model(recipe, mesh, compute, options);
  weft::Trainer trainer(built, compute, {.seed = 1});

  if (resumes) trainer.load(folder);
  for (const std::int64_t end = trainer.steps() + kSteps; trainer.steps() < end;) {
    const weft::Batch batch = make_pictures(context, built, trainer.steps());
    const double loss = trainer.step({&batch, 1}, 5e-3).loss;  // over all ranks
    if (group.rank() == 0 && trainer.steps() % 10 == 0)
      std::printf("step %d: loss %.3f\n", static_cast<int>(trainer.steps()), loss);
  }
  if (resumes) return 0;
  if (group.rank() == 0) std::filesystem::remove_all(folder);
  group.barrier().wait();
  trainer.save(folder);
}
