// Training in C. Comments in weft/c_train/trainer.h say which functions are collective or block.
#include <cstddef>
#include <optional>

#include "capi_train/model_handles.hpp"
#include "weft/models/from_json.hpp"
#include "weft/nn/schedule.hpp"

using weft::ErrorCode;
using weft::Trainer;
using weft::capi::trainer_of;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kTrainerOptionsFirstBytes = 72, kStepResultFirstBytes = 40;
static_assert(offsetof(weft_trainer_options, loss_scale) == kTrainerOptionsFirstBytes);
static_assert(sizeof(weft_trainer_options) == 152);
static_assert(offsetof(weft_step_result, loss_scale) == kStepResultFirstBytes);
static_assert(sizeof(weft_step_result) == 48);
constexpr std::size_t kEvaluationFirstBytes = 32;
static_assert(sizeof(weft_evaluation) == kEvaluationFirstBytes);
static_assert(sizeof(weft_batch) == 32);  // has no struct_size: it stays as it is
constexpr std::size_t kScheduleFirstBytes = 56;
static_assert(sizeof(weft_schedule) == kScheduleFirstBytes);
static_assert(static_cast<int>(weft::ScheduleForm::none) == WEFT_SCHEDULE_NONE &&
              static_cast<int>(weft::ScheduleForm::constant) == WEFT_SCHEDULE_CONSTANT &&
              static_cast<int>(weft::ScheduleForm::linear) == WEFT_SCHEDULE_LINEAR &&
              static_cast<int>(weft::ScheduleForm::cosine) == WEFT_SCHEDULE_COSINE &&
              static_cast<int>(weft::ScheduleForm::wsd) == WEFT_SCHEDULE_WSD &&
              static_cast<int>(weft::ScheduleForm::rex) == WEFT_SCHEDULE_REX);
static_assert(static_cast<int>(weft::DecayShape::linear) == WEFT_DECAY_LINEAR &&
              static_cast<int>(weft::DecayShape::cosine) == WEFT_DECAY_COSINE &&
              static_cast<int>(weft::DecayShape::one_minus_sqrt) == WEFT_DECAY_ONE_MINUS_SQRT);

weft::Muon::Options muon_of(const char* function, const weft_trainer_options& o) {
  weft::Muon::Options to{
      .momentum = o.momentum,
      .nesterov = !o.without_nesterov,
      .weight_decay = o.weight_decay,
      .iterations = o.iterations,
      .scale = o.original_scale ? weft::Muon::Scale::original : weft::Muon::Scale::like_adamw,
      .adamw_beta1 = o.beta1,
      .adamw_beta2 = o.beta2,
      .adamw_eps = o.eps};
  for (const std::string_view pattern : capi::names_of(function, o.adamw_for, o.adamw_for_count,
                                                       "options->adamw_for", "options->adamw_for_count"))
    to.adamw_for.emplace_back(pattern);
  return to;
}

Trainer::Options options_of(const char* function, const weft_trainer_options& o) {
  Trainer::Options to;
  switch (o.optimizer) {
    case WEFT_ADAMW: to.optimizer = weft::AdamW::Options{o.beta1, o.beta2, o.eps, o.weight_decay}; break;
    case WEFT_SGD: to.optimizer = weft::SGD::Options{o.momentum, o.weight_decay}; break;
    case WEFT_LION: to.optimizer = weft::Lion::Options{o.beta1, o.beta2, o.weight_decay}; break;
    case WEFT_SCHEDULE_FREE_ADAMW:
      to.optimizer = weft::ScheduleFreeAdamW::Options{o.beta1, o.beta2, o.eps, o.weight_decay};
      break;
    case WEFT_MUON: to.optimizer = muon_of(function, o); break;
    default:
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("options->optimizer is {}; expected 0 (WEFT_ADAMW) to 4 (WEFT_MUON)", o.optimizer));
  }
  for (const weft_parameter_group& g :
       capi::list_of(function, o.groups, o.group_count, "options->groups", "options->group_count")) {
    weft::ParameterGroup group;
    group.rate = g.rate;
    if (!(g.weight_decay < 0)) group.weight_decay = g.weight_decay;
    for (const std::string_view pattern :
         capi::names_of(function, g.patterns, g.pattern_count, "options->groups[].patterns",
                        "options->groups[].pattern_count"))
      group.patterns.emplace_back(pattern);
    to.groups.push_back(std::move(group));
  }
  to.max_norm = o.max_norm;
  to.non_finite = o.skip_non_finite ? weft::NonFinite::skip : weft::NonFinite::error;
  to.seed = o.seed;
  if (o.loss_scale != 0) to.loss_scale = weft::LossScaler::Options{.scale = o.loss_scale};
  to.label_smoothing = o.label_smoothing;
  to.z_loss = o.z_loss;
  if (o.freeze != nullptr) to.freeze = weft::FreezeSchedule::from_text(o.freeze);
  const auto expect_unset = [&](bool is_set, const char* option, const char* needs) {
    if (is_set)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("options->{} is set; it needs {}", option, needs));
  };
  expect_unset(o.ema_warm_up && o.ema_decay == 0, "ema_warm_up", "an ema_decay");
  if (o.optimizer != WEFT_MUON) {
    constexpr const char* kMuon = "options->optimizer WEFT_MUON";
    expect_unset(o.adamw_for_count != 0, "adamw_for", kMuon);
    expect_unset(o.without_nesterov, "without_nesterov", kMuon);
    expect_unset(o.original_scale, "original_scale", kMuon);
  }
  if (o.ema_decay != 0) to.ema = weft::Ema::Options{.decay = o.ema_decay, .warm_up = o.ema_warm_up};
  return to;
}

std::vector<weft::TokenBatch> batches_of(const char* function, const weft_token_batch* batches,
                                         int32_t count) {
  std::vector<weft::TokenBatch> all;
  for (const weft_token_batch& b : capi::list_of(function, batches, count, "batches", "batch_count"))
    all.push_back(capi::batch_of(b));
  return all;
}

std::vector<weft::Batch> batches_of(const char* function, const weft_trainer& trainer,
                                    const weft_batch* batches, int32_t count) {
  weft::Context& context = trainer.model->compute->context->context;
  std::vector<weft::Batch> all;
  for (const weft_batch& b : capi::list_of(function, batches, count, "batches", "batch_count"))
    all.push_back(capi::batch_of(function, context, b));
  return all;
}

// The batches of this rank. If they are wrong, the ranks that wait in the same call get an error, too.
template <class... Arguments>
auto told_batches_of(Trainer& trainer, const Arguments&... arguments) {
  try {
    return batches_of(arguments...);
  } catch (...) {
    trainer.give_up();
    throw;
  }
}

// Checked before any other work: the caller may have passed none.
void expect_result(const char* function, const weft_step_result* result) {
  if (result != nullptr)
    capi::expect_initialised(function, *result, kStepResultFirstBytes, "result", "WEFT_STEP_RESULT_INIT");
}
void tell(const char* function, weft_step_result* result, const Trainer::Result& of) {
  if (result == nullptr) return;
  capi::answer(function, *result, capi::in_c(of), kStepResultFirstBytes, "result", "WEFT_STEP_RESULT_INIT");
}

void rate_of(const char* function, const weft::Schedule& schedule, int64_t step, double* rate) {
  double& to = capi::given(function, rate, "rate");
  schedule.check();
  if (step < 0)
    capi::refuse(ErrorCode::bad_argument, function, fmt::format("step is {}; expected 0 or more", step));
  to = schedule.at(step);
}

}  // namespace

Trainer& capi::trainer_of(const char* function, const weft_trainer* trainer) {
  const weft_trainer& t = capi::given(function, trainer, "trainer");
  t.model->compute->context->context.check_fork(function);
  return *t.trainer;
}
weft_step_result capi::in_c(const Trainer::Result& of) {
  weft_step_result r = WEFT_STEP_RESULT_INIT;
  r.skipped = of.skipped;
  r.step = of.step;
  r.tokens = of.tokens;
  r.loss = of.loss;
  r.grad_norm = of.grad_norm;
  r.loss_scale = of.loss_scale;
  return r;
}
weft_evaluation capi::in_c(const Trainer::Evaluation& of) {
  weft_evaluation r = WEFT_EVALUATION_INIT;
  r.tokens = of.tokens;
  r.loss = of.loss;
  r.perplexity = of.perplexity;
  return r;
}

weft_status weft_trainer_create(weft_model* model, const weft_trainer_options* options,
                                weft_trainer** trainer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    weft_trainer*& to = capi::given(function, trainer, "trainer");
    const weft_trainer_options o =
        capi::read(function, options, weft_trainer_options WEFT_TRAINER_OPTIONS_INIT,
                   kTrainerOptionsFirstBytes, "WEFT_TRAINER_OPTIONS_INIT");
    to = new weft_trainer{model->state,
                          std::make_unique<Trainer>(m.parts, m.compute->compute, options_of(function, o))};
  });
}

weft_status weft_trainer_create_from_json(weft_model* model, const char* options, weft_trainer** trainer,
                                          weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::ModelState& m = capi::model_of(function, model);
    weft_trainer*& to = capi::given(function, trainer, "trainer");
    const Trainer::Options o =
        options == nullptr ? Trainer::Options{} : weft::trainer_options_from_json(options);
    to = new weft_trainer{model->state, std::make_unique<Trainer>(m.parts, m.compute->compute, o)};
  });
}

void weft_trainer_destroy(weft_trainer* trainer) { capi::destroy(__func__, trainer, "trainer"); }

weft_status weft_trainer_step(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                              double rate, weft_step_result* result, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    const std::vector<weft::TokenBatch> all = told_batches_of(t, function, batches, batch_count);
    expect_result(function, result);
    tell(function, result, t.step(all, rate));
  });
}

weft_status weft_trainer_step_batches(weft_trainer* trainer, const weft_batch* batches, int32_t batch_count,
                                      double rate, weft_step_result* result, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    const std::vector<weft::Batch> all = told_batches_of(t, function, *trainer, batches, batch_count);
    expect_result(function, result);
    tell(function, result, t.step(all, rate));
  });
}

weft_status weft_trainer_evaluate(weft_trainer* trainer, const weft_batch* batches, int32_t batch_count,
                                  weft_evaluation* evaluation, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    const std::vector<weft::Batch> all = told_batches_of(t, function, *trainer, batches, batch_count);
    weft_evaluation& to = capi::given(function, evaluation, "evaluation");
    capi::expect_initialised(function, to, kEvaluationFirstBytes, "evaluation", "WEFT_EVALUATION_INIT");
    capi::answer(function, to, capi::in_c(t.evaluate(all)), kEvaluationFirstBytes, "evaluation",
                 "WEFT_EVALUATION_INIT");
  });
}

weft_status weft_trainer_backward(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                                  weft_step_result* result, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    const std::vector<weft::TokenBatch> all = told_batches_of(t, function, batches, batch_count);
    expect_result(function, result);
    tell(function, result, t.backward(all));
  });
}

weft_status weft_trainer_backward_batches(weft_trainer* trainer, const weft_batch* batches,
                                          int32_t batch_count, weft_step_result* result, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    const std::vector<weft::Batch> all = told_batches_of(t, function, *trainer, batches, batch_count);
    expect_result(function, result);
    tell(function, result, t.backward(all));
  });
}

weft_status weft_trainer_gradients(weft_trainer* trainer, weft_tensor* gradients, int32_t room,
                                   int32_t* count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Trainer& t = trainer_of(function, trainer);
    int32_t& to = capi::given(function, count, "count");
    if (room < 0)
      capi::refuse(ErrorCode::bad_argument, function, fmt::format("room is {}; expected 0 or more", room));
    const std::vector<weft::Gradient> all = t.gradients();
    const auto needed = static_cast<int32_t>(all.size());
    to = needed;
    if (room == 0) return;
    capi::room_for(function, gradients, room, needed, "the list of gradients");
    std::vector<std::unique_ptr<weft_layout>>& layouts = trainer->layouts;
    for (std::size_t i = 0; i < all.size(); ++i) {
      const weft::Gradient& g = all[i];
      // If the layouts are equal to those of the call before, the old handles stay, because the program may
      // still hold them.
      if (i == layouts.size()) layouts.emplace_back();
      if (layouts[i] == nullptr || layouts[i]->layout != g.layout) {
        layouts[i] = std::make_unique<weft_layout>(trainer->model->owner, g.layout);
        layouts[i]->lend();
      }
      const weft_device device =
          g.data.device == weft::Device{} ? WEFT_CPU : WEFT_CUDA(weft_device{g.data.device.index});
      gradients[i] = {
          g.name.data(), {g.data.data, g.data.count(), WEFT_F32, device}, layouts[i].get(), nullptr, 0};
    }
  });
}

weft_status weft_trainer_update(weft_trainer* trainer, double rate, weft_step_result* result,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    expect_result(function, result);
    tell(function, result, t.update(rate));
  });
}

weft_status weft_trainer_discard(weft_trainer* trainer, weft_error* error) {
  return capi::guarded(__func__, error,
                       [&, function = __func__] { trainer_of(function, trainer).discard(); });
}

weft_status weft_trainer_steps(const weft_trainer* trainer, int64_t* steps, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Trainer& t = trainer_of(function, trainer);
    capi::given(function, steps, "steps") = t.steps();
  });
}

weft_status weft_trainer_swap_averages(weft_trainer* trainer, bool averages_in, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Ema* const ema = trainer_of(function, trainer).ema();
    if (ema == nullptr)
      capi::refuse(ErrorCode::bad_argument, function,
                   "trainer has no averages; expected one made with an ema_decay");
    averages_in ? ema->swap_in() : ema->swap_out();
  });
}

weft_status weft_trainer_swap_evaluation(weft_trainer* trainer, bool evaluation_in, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Optimizer& optimizer = trainer_of(function, trainer).optimizer();
    evaluation_in ? optimizer.swap_in() : optimizer.swap_out();
  });
}

weft_status weft_trainer_save(const weft_trainer* trainer, const char* directory, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Trainer& t = trainer_of(function, trainer);
    t.save(&capi::given(function, directory, "directory"));
  });
}

weft_status weft_trainer_load(weft_trainer* trainer, const char* directory, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    trainer->loaded = t.load_newest(&capi::given(function, directory, "directory")).extra;
  });
}

weft_status weft_cosine_rate(double peak, double floor, int64_t warmup, int64_t total, int64_t step,
                             double* rate, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    rate_of(function, {weft::ScheduleForm::cosine, peak, floor, warmup, total}, step, rate);
  });
}

weft_status weft_schedule_rate(const weft_schedule* schedule, int64_t step, double* rate, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::given(function, schedule, "schedule");
    const weft_schedule s = capi::read(function, schedule, weft_schedule WEFT_SCHEDULE_INIT,
                                       kScheduleFirstBytes, "WEFT_SCHEDULE_INIT");
    const auto known = [&](const char* field, int32_t value, int32_t last) {
      if (value < 0 || value > last)
        capi::refuse(ErrorCode::bad_argument, function,
                     fmt::format("schedule->{} is {}; expected 0 to {}", field, value, last));
    };
    known("form", s.form, WEFT_SCHEDULE_REX);
    known("shape", s.shape, WEFT_DECAY_ONE_MINUS_SQRT);
    rate_of(function,
            {static_cast<weft::ScheduleForm>(s.form), s.peak, s.floor, s.warmup, s.total, s.decay,
             static_cast<weft::DecayShape>(s.shape)},
            step, rate);
  });
}
