// Training in C. What is collective or blocks says so in weft/c_train/trainer.h.
#include <optional>

#include "capi_train/model_handles.hpp"
#include "weft/nn/schedule.hpp"

using weft::ErrorCode;
using weft::Trainer;
namespace capi = weft::capi;

namespace {

constexpr std::size_t kTrainerOptionsFirstBytes = 72, kStepResultFirstBytes = 40;
static_assert(sizeof(weft_trainer_options) == kTrainerOptionsFirstBytes);
static_assert(sizeof(weft_step_result) == kStepResultFirstBytes);

Trainer::Options options_of(const char* function, const weft_trainer_options& o) {
  Trainer::Options to;
  switch (o.optimizer) {
    case WEFT_ADAMW: to.optimizer = weft::AdamW::Options{o.beta1, o.beta2, o.eps, o.weight_decay}; break;
    case WEFT_SGD: to.optimizer = weft::SGD::Options{o.momentum, o.weight_decay}; break;
    default:
      capi::refuse(
          ErrorCode::bad_argument, function,
          fmt::format("options->optimizer is {}; expected 0 (WEFT_ADAMW) or 1 (WEFT_SGD)", o.optimizer));
  }
  to.max_norm = o.max_norm;
  to.non_finite = o.skip_non_finite ? weft::NonFinite::skip : weft::NonFinite::error;
  to.seed = o.seed;
  return to;
}

Trainer& trainer_of(const char* function, const weft_trainer* trainer) {
  const weft_trainer& t = capi::given(function, trainer, "trainer");
  t.model->compute->context->context.check_fork(function);
  return *t.trainer;
}

}  // namespace

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

void weft_trainer_destroy(weft_trainer* trainer) { capi::destroy(__func__, trainer, "trainer"); }

weft_status weft_trainer_step(weft_trainer* trainer, const weft_token_batch* batches, int32_t batch_count,
                              double rate, weft_step_result* result, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    Trainer& t = trainer_of(function, trainer);
    std::vector<weft::TokenBatch> all;
    for (const weft_token_batch& b : capi::list_of(function, batches, batch_count, "batches", "batch_count"))
      all.push_back(capi::batch_of(b));
    weft_step_result r = WEFT_STEP_RESULT_INIT;
    const auto tell = [&] {
      if (result != nullptr)
        capi::answer(function, *result, r, kStepResultFirstBytes, "result", "WEFT_STEP_RESULT_INIT");
    };
    if (result != nullptr)
      capi::expect_initialised(function, *result, kStepResultFirstBytes, "result", "WEFT_STEP_RESULT_INIT");
    const Trainer::Result of = t.step(all, rate);
    r.skipped = of.skipped;
    r.step = of.step;
    r.tokens = of.tokens;
    r.loss = of.loss;
    r.grad_norm = of.grad_norm;
    tell();
  });
}

weft_status weft_trainer_steps(const weft_trainer* trainer, int64_t* steps, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Trainer& t = trainer_of(function, trainer);
    capi::given(function, steps, "steps") = t.steps();
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
    t.load(&capi::given(function, directory, "directory"));
  });
}

weft_status weft_cosine_rate(double peak, double floor, int64_t warmup, int64_t total, int64_t step,
                             double* rate, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    double& to = capi::given(function, rate, "rate");
    const weft::CosineSchedule schedule{peak, floor, warmup, total};
    schedule.check();
    if (step < 0)
      capi::refuse(ErrorCode::bad_argument, function, fmt::format("step is {}; expected 0 or more", step));
    to = schedule.at(step);
  });
}
