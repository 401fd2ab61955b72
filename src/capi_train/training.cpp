// A whole training in C: the plan's functions are the program's.
#include <cstddef>
#include <limits>

#include "capi/call_out.hpp"
#include "capi_train/model_handles.hpp"
#include "weft/models/training.hpp"

using weft::Error;
using weft::ErrorCode;
using weft::Trainer;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kTrainingPlanFirstBytes = 144, kTrainingEndFirstBytes = 32;
static_assert(sizeof(weft_training_plan) == kTrainingPlanFirstBytes);
static_assert(sizeof(weft_training_end) == kTrainingEndFirstBytes);
static_assert(static_cast<int>(weft::TrainingEnded::steps) == WEFT_ENDED_STEPS &&
              static_cast<int>(weft::TrainingEnded::stop) == WEFT_ENDED_STOP &&
              static_cast<int>(weft::TrainingEnded::patience) == WEFT_ENDED_PATIENCE);

// Calls a function of the plan, which is not NULL. Throws what its status says.
template <class Function, class... Arguments>
void call_plan(const char* what, Function function, void* data, Arguments... arguments) {
  const capi::CallOut out;
  if (!out) throw Error(ErrorCode::system, fmt::format("{}: {}", what, capi::kEnded));
  weft_error error = WEFT_ERROR_INIT;
  const weft_status status = function(data, arguments..., &error);
  if (status == WEFT_OK) return;
  throw Error(weft::error_code(status),
              error.text[0] != 0
                  ? std::string(error.text)
                  : fmt::format("weft_trainer_train: plan->{} failed, and says nothing more", what));
}

weft_training_end in_c(const weft::TrainingEnd& of) {
  weft_training_end end = WEFT_TRAINING_END_INIT;
  end.why = static_cast<weft_training_ended>(of.why);
  end.steps = of.steps;
  end.reason = of.reason;
  end.evaluated = of.best_loss.has_value();
  end.best_loss = of.best_loss.value_or(0);
  return end;
}

// A duration that the plan may not have stays negative: weft::train() refuses it on all ranks.
weft::Duration duration_of(double seconds) {
  constexpr double kMost = 1e9;  // about 30 years
  if (!(seconds >= 0)) return weft::Duration(-1);
  return std::chrono::duration_cast<weft::Duration>(
      std::chrono::duration<double>(seconds < kMost ? seconds : kMost));
}

weft::CheckpointPlan checkpoints_of(const weft_training_plan& p) {
  weft::CheckpointPlan to;
  if (p.folder != nullptr) to.folder = p.folder;
  to.every_steps = p.save_every;
  to.every = duration_of(p.save_seconds);
  to.at_end = !p.not_at_end;
  to.keep = p.keep;
  to.background = !p.wait_for_saves;
  to.check_replicas = !p.no_replica_check;
  return to;
}

weft::TrainingPlan plan_of(const weft_training_plan& p) {
  weft::TrainingPlan to;
  to.steps = p.steps;
  if (p.step != nullptr)
    to.step = [p](std::int64_t number) {
      weft_step_result r = WEFT_STEP_RESULT_INIT;
      call_plan("step", p.step, p.data, number, &r);
      return Trainer::Result{.step = r.step,
                             .tokens = r.tokens,
                             .loss = r.loss,
                             .grad_norm = r.grad_norm,
                             .skipped = r.skipped,
                             .loss_scale = r.loss_scale};
    };
  to.evaluate_every = p.evaluate_every;
  if (p.evaluate != nullptr)
    to.evaluate = [p] {
      weft_evaluation e = WEFT_EVALUATION_INIT;
      call_plan("evaluate", p.evaluate, p.data, &e);
      return Trainer::Evaluation{.tokens = e.tokens, .loss = e.loss, .perplexity = e.perplexity};
    };
  to.patience = p.patience;
  to.least_gain = p.least_gain;
  if (p.stop != nullptr)
    to.stop = [p] {
      std::int32_t reason = 0;
      call_plan("stop", p.stop, p.data, &reason);
      return static_cast<int>(reason);
    };
  to.checkpoints = checkpoints_of(p);
  if (p.on_begin != nullptr) to.on_begin = [p] { call_plan("on_begin", p.on_begin, p.data); };
  if (p.on_step != nullptr)
    to.on_step = [p](const Trainer::Result& result) {
      const weft_step_result r = capi::in_c(result);
      call_plan("on_step", p.on_step, p.data, &r);
    };
  if (p.on_evaluation != nullptr)
    to.on_evaluation = [p](const Trainer::Evaluation& evaluation) {
      const weft_evaluation e = capi::in_c(evaluation);
      call_plan("on_evaluation", p.on_evaluation, p.data, &e);
    };
  if (p.on_checkpoint != nullptr)
    to.on_checkpoint = [p](std::int64_t step) { call_plan("on_checkpoint", p.on_checkpoint, p.data, step); };
  if (p.on_end != nullptr)
    to.on_end = [p](const weft::TrainingEnd& of) {
      const weft_training_end end = in_c(of);
      call_plan("on_end", p.on_end, p.data, &end);
    };
  return to;
}

}  // namespace

weft_status weft_trainer_train(weft_trainer* trainer, const weft_training_plan* plan, weft_training_end* end,
                               weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = capi::trainer_of(function, trainer);
    capi::given(function, plan, "plan");
    weft::TrainingPlan p = plan_of(capi::read(function, plan, weft_training_plan WEFT_TRAINING_PLAN_INIT,
                                              kTrainingPlanFirstBytes, "WEFT_TRAINING_PLAN_INIT", "plan"));
    if (end != nullptr)
      capi::expect_initialised(function, *end, kTrainingEndFirstBytes, "end", "WEFT_TRAINING_END_INIT");
    p.resumed = trainer->loaded;
    const weft::TrainingEnd of = weft::train(t, p);
    trainer->loaded.clear();
    if (end != nullptr)
      capi::answer(function, *end, in_c(of), kTrainingEndFirstBytes, "end", "WEFT_TRAINING_END_INIT");
  });
}
