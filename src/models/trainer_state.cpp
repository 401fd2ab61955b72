// The state of a Trainer: its size, and checkpoints of it.
#include <fmt/format.h>

#include <charconv>

#include "weft/base/error.hpp"
#include "weft/models/trainer.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft {
namespace {

constexpr const char *kSeed = "trainer.seed", *kLossScale = "trainer.loss_scale";

// Returns the seed in a checkpoint; `mine` if the checkpoint has none.
std::uint64_t seed_of(const CheckpointInfo& info, std::uint64_t mine) {
  const auto found = info.extra.find(kSeed);
  if (found == info.extra.end()) return mine;
  const std::string& digits = found->second;
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), seed);
  if (error != std::errc() || end != digits.data() + digits.size())
    throw Error(ErrorCode::bad_argument,
                "trainer: " + fmt::format("\"{}\" of {} is \"{}\"; expected a number from 0 to 2^64 - 1",
                                          kSeed, info.folder.string(), digits));
  return seed;
}

}  // namespace

Trainer::Memory Trainer::memory() const {
  Memory m;
  for (const Parameter* p : model_->model->parameters()) {
    m.parameters += p->master().bytes() + (p->dtype() == DType::bf16 ? p->master().bytes() / 2 : 0);
    if (p->trainable()) m.gradients += p->master().bytes();
  }
  optimizer_->visit_state(
      [&](const std::string&, std::string_view, const Tensor& t) { m.states += t.bytes(); });
  if (ema_)
    for (std::size_t i = 0; i < ema_->parameters().size(); ++i) m.states += ema_->average(i).bytes();
  if (model_->sharded) m.gathered = model_->sharded->memory().whole_peak;
  return m;
}

CheckpointExtra Trainer::with_state(CheckpointExtra extra) const {
  extra[kSeed] = std::to_string(options_.seed);
  if (scaler_) extra[kLossScale] = scaler_->to_text();
  return extra;
}

void Trainer::save(const std::filesystem::path& directory, const CheckpointExtra& extra,
                   const SaveOptions& options) const {
  save_checkpoint(directory, model_->mesh, steps_, *model_->model,
                  TrainingState(optimizer_.get(), ema_.get()), with_state(extra), options);
}

bool Trainer::save(AsyncCheckpoint& saves, const std::filesystem::path& directory,
                   const CheckpointExtra& extra, const SaveOptions& options) const {
  return start_save(saves, directory, steps_, *model_->model, TrainingState(optimizer_.get(), ema_.get()),
                    with_state(extra), options);
}

CheckpointInfo Trainer::load(const std::filesystem::path& directory) {
  discard();
  CheckpointInfo info =
      load_checkpoint(directory, model_->mesh, *model_->model, TrainingState(optimizer_.get(), ema_.get()));
  options_.seed = seed_of(info, options_.seed);
  if (const auto scale = info.extra.find(kLossScale); scaler_ && scale != info.extra.end())
    scaler_->set_text(scale->second);
  steps_ = info.step;
  return info;
}

}  // namespace weft
