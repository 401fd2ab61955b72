// The state of a Trainer: its size, and checkpoints of it.
#include <fmt/format.h>

#include <algorithm>
#include <charconv>
#include <limits>
#include <optional>

#include "checkpoint/index/index.hpp"
#include "models/agreement.hpp"
#include "models/batch.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/models/trainer.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft {
namespace {

constexpr const char *kSeed = "trainer.seed", *kLossScale = "trainer.loss_scale", *kFreeze = "trainer.freeze";

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

// Throws if the checkpoint was trained with another schedule.
void expect_same_freezing(const CheckpointInfo& info, const FreezeSchedule& mine) {
  const auto found = info.extra.find(kFreeze);
  const FreezeSchedule theirs = FreezeSchedule::from_text(found == info.extra.end() ? "" : found->second);
  if (theirs == mine) return;
  std::string differences;
  const auto only = [&](const FreezeSchedule& a, const FreezeSchedule& b, const char* where) {
    for (const FreezeRule& rule : a.rules())
      if (std::ranges::count(b.rules(), rule) == 0)
        differences += fmt::format("{}{} is only {}", differences.empty() ? "" : ", ",
                                   to_string(FreezeSchedule({rule})), where);
  };
  only(theirs, mine, "there");
  only(mine, theirs, "here");
  if (differences.empty())
    differences = fmt::format("the order is {} there and {} here", to_string(theirs), to_string(mine));
  throw Error(ErrorCode::bad_argument, fmt::format("trainer: \"{}\" has another freeze schedule: {}",
                                                   info.folder.string(), differences));
}

// The description of the checkpoint; nothing if it cannot be read: load_checkpoint() says why, on all ranks.
std::optional<CheckpointInfo> described(const std::filesystem::path& directory) {
  try {
    return CheckpointReader::open(directory).info();
  } catch (const Error&) {
    return std::nullopt;
  }
}

}  // namespace

Trainer::Memory Trainer::memory() const {
  Memory m;
  for (const Parameter* p : model_->parameters()) {
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
  if (!options_.freeze.empty()) extra[kFreeze] = to_string(options_.freeze);
  if (scaler_) extra[kLossScale] = scaler_->to_text();
  return extra;
}

void Trainer::save(const std::filesystem::path& directory, const CheckpointExtra& extra,
                   const SaveOptions& options) const {
  if (model_->stages)
    return save_stages(directory, model_->stages, steps_, model_->parameters(), model_->buffers(),
                       TrainingState(optimizer_.get(), ema_.get()), with_state(extra), options);
  save_checkpoint(directory, model_->mesh, steps_, *model_->model,
                  TrainingState(optimizer_.get(), ema_.get()), with_state(extra), options);
}

bool Trainer::save(AsyncCheckpoint& saves, const std::filesystem::path& directory,
                   const CheckpointExtra& extra, const SaveOptions& options) const {
  if (model_->stages)
    return start_save_stages(saves, directory, model_->stages, steps_, model_->parameters(),
                             model_->buffers(), TrainingState(optimizer_.get(), ema_.get()),
                             with_state(extra), options);
  return start_save(saves, directory, steps_, *model_->model, TrainingState(optimizer_.get(), ema_.get()),
                    with_state(extra), options);
}

CheckpointInfo Trainer::load(const std::filesystem::path& directory) {
  discard();
  if (const std::optional<CheckpointInfo> first = described(directory)) {
    expect_same_freezing(*first, options_.freeze);
    // The checkpoint has states of all parameters that its steps have trained.
    for (const FreezeRule& rule : options_.freeze.rules())
      if (rule.step < first->step) freeze_at(rule.step);
  }
  const TrainingState state(optimizer_.get(), ema_.get());
  CheckpointInfo info =
      model_->stages ? load_stages(directory, model_->stages, model_->parameters(), model_->buffers(), state)
                     : load_checkpoint(directory, model_->mesh, *model_->model, state);
  options_.seed = seed_of(info, options_.seed);
  if (const auto scale = info.extra.find(kLossScale); scaler_ && scale != info.extra.end())
    scaler_->set_text(scale->second);
  steps_ = info.step;
  return info;
}

CheckpointInfo Trainer::load_newest(const std::filesystem::path& directory) {
  if (std::filesystem::exists(directory / kIndexFile)) return load(directory);
  const bool finds = model_->mesh.rank() == 0;
  for (const WholeCheck check : {WholeCheck::files, WholeCheck::bytes}) {
    WholeCheckpoint whole;
    constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max(), kNone = -1;
    Numbers choice{kAny, kAny};
    if (finds) {
      whole = newest_whole_checkpoint(directory, check);
      choice = {whole.found ? whole.found->step : kNone, whole.broken.empty() ? 0 : 1};
    }
    choice = least_of(*compute_, model_->mesh, choice);
    if (choice[0] == kNone)
      refuse_batch("trainer", fmt::format("there is no whole checkpoint in \"{}\"{}", directory.string(),
                                          whole.broken.empty() ? "" : ": " + whole.broken[0]));
    try {
      CheckpointInfo info = load(choice[1] == 0 ? directory : directory / folder_name(choice[0]));
      if (finds && !whole.broken.empty())
        compute_->context().log().write(
            LogLayer::dp, LogLevel::warning,
            fmt::format("trainer: \"{}\" is loaded, the newest whole checkpoint; a newer one is broken: {}",
                        info.folder.string(), whole.broken[0]));
      return info;
    } catch (const Error& e) {  // the same on all ranks
      if (e.code() != ErrorCode::corrupt || check == WholeCheck::bytes) throw;
    }
  }
  return {};  // not reached: the second attempt returns or throws
}

}  // namespace weft
