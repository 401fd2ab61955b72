#include "weft/models/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <initializer_list>
#include <limits>
#include <numeric>
#include <optional>
#include <utility>
#include <vector>

#include "base/cpu/isa.hpp"
#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "models/agreement.hpp"
#include "models/batch.hpp"
#include "models/micro_batches.hpp"
#include "nn/history.hpp"
#include "nn/optimizer_options.hpp"
#include "nn/swapped_masters.hpp"
#include "weft/base/error.hpp"
#include "weft/ep/moe.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/spread_failure.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/packed_documents.hpp"
#include "weft/nn/path_pattern.hpp"
#include "weft/pp/grad_norm.hpp"
#include "weft/train/gradients.hpp"

namespace weft {
namespace {

[[noreturn]] void wrong(const std::string& text) { refuse_batch("trainer", text); }

// "batch 1: " if there are several.
std::string of_batch(std::size_t number, std::size_t count) {
  return count > 1 ? fmt::format("batch {}: ", number) : std::string();
}

// The fault of a rank, as ranks exchange it: the smallest value of all ranks counts.
enum Fault : std::int64_t { kNone = 0, kBatch = -1, kRate = -2, kAverages = -3, kGivesUp = -4 };

// A number for a learning rate; numbers are ordered like the rates, and differ for different rates.
std::int64_t bits_of(double lr) { return std::bit_cast<std::int64_t>(lr + 0.0); }  // -0 is 0
bool possible(double lr) { return lr >= 0 && std::isfinite(lr); }
Error impossible(double lr) {
  return {ErrorCode::bad_argument,
          fmt::format("trainer: the learning rate is {}; expected a finite number of 0 or more", lr)};
}
[[noreturn]] void wrong_elsewhere(std::int64_t fault) {
  wrong(fault == kGivesUp    ? "another rank has given up; its own error says why"
        : fault == kAverages ? "another rank has averages, or values for evaluation, in the place of its "
                               "masters; its own error says why"
        : fault == kRate     ? "another rank was given a learning rate that is none; its own error says why"
                             : "another rank was given a batch that does not fit; its own error says why");
}
// Counts a call, and whether it throws. If it throws in a pipeline, data and tensor ranks of other stages
// wait in groups of their own: they learn of the failure, too.
class CountedCall {
 public:
  CountedCall(Trainer::Calls& calls, const ParallelModel& model) noexcept : calls_(calls), model_(model) {
    ++calls_.begun;
  }
  ~CountedCall() {
    if (std::uncaught_exceptions() == before_) return;
    ++calls_.failed;
    if (model_.stages) spread_failure(model_.mesh);
  }
  CountedCall(const CountedCall&) = delete;
  CountedCall& operator=(const CountedCall&) = delete;

 private:
  Trainer::Calls& calls_;
  const ParallelModel& model_;
  int before_ = std::uncaught_exceptions();
};
// The error of a rank that gives up; nobody sees it.
Error given_up() { return {ErrorCode::aborted, "trainer: this rank has given up"}; }
bool has_batch_norm(Module& model) {
  bool has = false;
  model.visit([&](Module& m) { has = has || dynamic_cast<BatchNorm*>(&m) != nullptr; });
  return has;
}
// Returns a fault that is known before a step begins, other than a fault of its batches.
std::optional<Error> out_of_place(const Ema* ema, const Optimizer& optimizer) {
  const bool averages = ema != nullptr && ema->swapped();
  if (!averages && !optimizer.swapped()) return std::nullopt;
  return Error(ErrorCode::bad_argument,
               fmt::format("trainer: the {} are in the place of the masters; swap_out() first",
                           averages ? "averages" : "values for evaluation"));
}
// The arguments, without the learning rate, that must be equal on all ranks; each as a number.
struct Setting {
  const char* name;
  std::int64_t digest;
  bool known = true;  // otherwise this rank agrees with any other
};
// `optimizer`: its digest. `first_values`: the history of the first values; 0: not known.
std::vector<Setting> settings_of(const Trainer::Options& o, const ParallelModel& model,
                                 std::uint64_t optimizer, std::int64_t steps, std::uint64_t first_values) {
  const Float8Model* const float8 = model.float8.get();
  const BuildOptions& build = model.options;
  const auto of = [](std::initializer_list<double> values) {
    Fnv1a hash;
    for (const double v : values) hash.add(std::bit_cast<std::uint64_t>(v));
    return static_cast<std::int64_t>(hash.value);
  };
  const auto& scale = o.loss_scale;
  const Float8LinearOptions of_float8 =
      float8 != nullptr ? float8->linears()->options() : Float8LinearOptions{};
  Fnv1a frozen;
  for (const std::string& pattern : build.frozen) frozen.add(hash_of(pattern));
  Fnv1a identity;
  identity.add(o.identity);
  Fnv1a converted;
  if (float8 != nullptr)
    for (const Float8Report::Layer& layer : float8->report().layers)  // of all stages of a pipeline
      if (layer.why_not.empty()) converted.add(hash_of(layer.path));
  return {
      {"the model (its recipe, or the paths and shapes of its parameters)",
       static_cast<std::int64_t>(model.recipe_digest)},
      {"options.identity", static_cast<std::int64_t>(identity.value)},
      {"options.groups", static_cast<std::int64_t>(digest_of_groups(o.groups))},
      {"options.optimizer", static_cast<std::int64_t>(optimizer)},
      {"options.max_norm", of({o.max_norm})},
      {"options.non_finite", static_cast<std::int64_t>(o.non_finite)},
      {"options.seed", static_cast<std::int64_t>(o.seed)},
      {"options.loss_scale", scale ? of({scale->scale, scale->growth, scale->backoff,
                                         static_cast<double>(scale->interval), scale->least})
                                   : 0},
      {"options.label_smoothing", of({o.label_smoothing})},
      {"options.z_loss", of({o.z_loss})},
      {"options.freeze", static_cast<std::int64_t>(hash_of(to_string(o.freeze)))},
      {"options.ema", o.ema ? of({o.ema->decay, static_cast<double>(o.ema->warm_up)}) : 0},
      {"BuildOptions::exact", static_cast<std::int64_t>(build.exact)},
      {"BuildOptions::pipeline.keep_weights", build.pipeline.keep_weights ? 1 : 0},
      {"BuildOptions::loss_chunk", build.loss_chunk},
      {"BuildOptions::dtype", static_cast<std::int64_t>(build.dtype)},
      {"BuildOptions::activations", static_cast<std::int64_t>(build.activations)},
      {"BuildOptions::data", static_cast<std::int64_t>(build.data)},
      {"BuildOptions::frozen", static_cast<std::int64_t>(frozen.value)},
      {"BuildOptions::tensor.sequence_parallel", build.tensor.sequence_parallel ? 1 : 0},
      {"BuildOptions::tensor.vocab", static_cast<std::int64_t>(build.tensor.vocab)},
      {"BuildOptions::float8", float8 != nullptr ? 1 + static_cast<std::int64_t>(of_float8.recipe) : 0},
      {"BuildOptions::float8_options.filter", static_cast<std::int64_t>(converted.value)},
      {"BuildOptions::float8_options.scales", static_cast<std::int64_t>(of_float8.scales)},
      {"BuildOptions::float8_options.not_finite", static_cast<std::int64_t>(of_float8.not_finite)},
      {"steps()", steps},
      {"what the parameters were initialised with (the seed)", static_cast<std::int64_t>(first_values >> 2),
       first_values != 0},
  };
}
// Throws if the ranks have different learning rates: `least` and `most` are the lowest and the highest rate,
// as bits.
void expect_one_rate(const DeviceMesh& mesh, double lr, std::int64_t least, std::int64_t most) {
  if (least != most)
    wrong(
        fmt::format("the learning rate is {} here, and {} to {} on the ranks of {}; expected the "
                    "same on all",
                    lr, std::bit_cast<double>(least), std::bit_cast<double>(most), to_string(mesh.shape())));
}

}  // namespace

Trainer::Trainer(ParallelModel& model, Compute& compute, const Options& options)
    : model_(&model), compute_(&compute), options_(options) {
  if (model.loss == nullptr) wrong("the model has no loss; expected a Recipe with one");
  if (options.label_smoothing != 0 || options.z_loss != 0) {
    own_loss_ = std::make_unique<CrossEntropy>(options.label_smoothing, options.z_loss);
    if (dynamic_cast<const CrossEntropy*>(model.loss.get()) == nullptr)
      wrong(
          fmt::format("label_smoothing is {} and z_loss {}; the loss of the model is no CrossEntropy, and "
                      "has no such options",
                      options.label_smoothing, options.z_loss));
  }
  if (!(options.max_norm >= 0))
    wrong(fmt::format("max_norm is {}; expected 0 (no clipping) or more", options.max_norm));
  if (options.loss_scale) scaler_.emplace(*options.loss_scale);
  has_batch_norm_ = has_batch_norm(*model.model);
  options.freeze.check(model.model->parameters());
  if (!model.trained_by.expired())
    wrong("the model has a Trainer already; expected its end before another begins, or another model");
  freeze_at(0);
  make_optimizer_of_model();
  if (options.ema) ema_ = std::make_unique<Ema>(compute, model.parameters(), *options.ema);
  claim_ = std::make_shared<char>();
  model.trained_by = claim_;
}

// In a pipeline patterns must match a parameter of some stage; this rank's optimizer gets those that match
// here.
void Trainer::make_optimizer_of_model() {
  OptimizerOptions of_optimizer = options_.optimizer;
  std::vector<ParameterGroup> groups = options_.groups;
  const std::vector<Parameter*> own = model_->parameters();
  if (!model_->stages) {
    optimizer_ = make_optimizer(*compute_, own, of_optimizer, groups);
    digest_of_optimizer_ = optimizer_->digest();
    return;
  }
  const std::vector<Parameter*> all = model_->model->parameters();
  const auto keep_own = [&](const char* what, std::vector<std::string>& patterns) {
    expect_patterns_match(what, patterns, all);
    std::erase_if(patterns, [&](const std::string& pattern) {
      return std::ranges::none_of(own, [&](const Parameter* p) { return matches_part(pattern, p->path()); });
    });
  };
  Fnv1a digest;
  if (auto* const muon = std::get_if<Muon::Options>(&of_optimizer)) {
    for (const std::string& pattern : muon->adamw_for) digest.add(hash_of(pattern));
    keep_own("adamw_for", muon->adamw_for);
    if (!muon->axes) muon->axes = model_->mesh_of_stage();
    Muon::Options rest = *muon;
    rest.adamw_for.clear();
    digest.add(make_optimizer(*compute_, {}, rest)->digest());
  } else {
    digest.add(make_optimizer(*compute_, {}, of_optimizer)->digest());
  }
  for (ParameterGroup& group : groups) keep_own("a group", group.patterns);
  optimizer_ = make_optimizer(*compute_, own, of_optimizer, std::move(groups));
  digest_of_optimizer_ = digest.value;
}

// Freezes and unfreezes what the schedule says of this step. A parameter that is trained for the first time
// gets its state.
void Trainer::freeze_at(std::int64_t step) {
  if (options_.freeze.empty()) return;
  std::vector<Parameter*> changed[2];  // those that are frozen, and those that are unfrozen
  for (Parameter* p : model_->parameters()) {
    const std::optional<bool> frozen = options_.freeze.frozen(p->path(), step);
    if (frozen && p->trainable() == *frozen) changed[*frozen ? 0 : 1].push_back(p);
  }
  for (const bool trainable : {false, true})
    if (!changed[trainable].empty()) model_->set_trainable(changed[trainable], trainable);
  const auto is_new = [](const auto* trains, Parameter* p) {
    return trains != nullptr && std::ranges::count(trains->parameters(), p) == 0;
  };
  for (Parameter* p : changed[1]) {
    if (is_new(optimizer_.get(), p)) optimizer_->add(*p);
    if (is_new(ema_.get(), p)) ema_->add(*p);
  }
}

std::vector<Batch> Trainer::plain(const Batches& batches) const {
  if (const auto* any = std::get_if<std::span<const Batch>>(&batches)) return {any->begin(), any->end()};
  const auto tokens = std::get<std::span<const TokenBatch>>(batches);
  std::vector<Batch> all;
  for (std::size_t i = 0; i < tokens.size(); ++i)
    all.push_back(batch_of("trainer", of_batch(i, tokens.size()), *model_, *compute_, tokens[i], true));
  return all;
}

// Returns the number of elements that count, over all ranks. Fills `to`. A small all-reduce over the tensor
// axis, another over domain axes, and a small all-gather over the data axis also exchange the ranks' faults,
// so that no rank goes on alone. They check that tensor and domain ranks have equal batches, and that all
// ranks have equal learning rates, if there is one, equal options, and took equally many steps.
std::int64_t Trainer::agree(const Batches& batches, std::optional<double> lr, std::vector<Batch>& to,
                            bool averages, bool gives_up) const {
  const DeviceMesh& data = model_->data;
  std::optional<Error> own;
  std::int64_t fault = kNone, valid = 0;
  Fnv1a hash;
  try {
    if (gives_up) {
      fault = kGivesUp;
      own = given_up();
    } else if (!averages && (own = out_of_place(ema_.get(), *optimizer_))) {
      fault = kAverages;
    } else if (lr && !possible(*lr)) {
      fault = kRate;
      own = impossible(*lr);
    } else {
      const std::vector<Batch> all = plain(batches);
      if (all.empty()) wrong("no batch is given; expected 1 or more");
      for (std::size_t i = 0; i < all.size(); ++i) {
        to.push_back(placed("trainer", of_batch(i, all.size()), *model_, *compute_, all[i]));
        valid += counted(*model_, all[i]);
        add_content(hash, all[i]);
      }
    }
  } catch (const Error& e) {
    fault = kBatch;
    own = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  const std::int64_t rate = lr && fault == kNone ? bits_of(*lr) : 0;
  std::vector<Setting> settings =
      settings_of(options_, *model_, digest_of_optimizer_, steps_,
                  steps_ > 0 || model_->stages ? 0 : history_of_first_values(model_->parameters()));
  // Bits differ between instruction sets.
  const auto isa = static_cast<std::int64_t>(cpu_isa());
  settings.insert(settings.begin(), {"which of step(), backward() and evaluate() was called",
                                     averages ? 3
                                     : lr     ? 1
                                              : 2,
                                     !gives_up});
  settings.push_back({"the instruction set of an exact step (WEFT_CPU_ISA chooses one)",
                      model_->exact == Exact::yes ? 1 + isa : 0});
  settings.push_back(
      {"options of the mixtures of experts", static_cast<std::int64_t>(digest_of_mixtures(*model_->model))});
  // Ranks of several stages have other parameters, whose first values cannot be compared.
  Fnv1a pipeline;
  if (model_->stages) {
    pipeline.add(to_string(model_->schedule_for(1)));
    for (const std::vector<std::string>& stage : model_->stage_paths)
      for (const std::string& path : stage) pipeline.add(path);
  }
  settings.push_back({"BuildOptions::pipeline", static_cast<std::int64_t>(pipeline.value)});
  settings.push_back({"BuildOptions::seed of a pipeline",
                      model_->stages ? static_cast<std::int64_t>(model_->options.seed) : 0});
  Fnv1a rows;
  for (const Batch& batch : to) rows.add(static_cast<std::uint64_t>(batch.global_rows));
  settings.push_back({"global_rows of the batches", static_cast<std::int64_t>(rows.value), !own});
  const auto documents =
      std::ranges::count_if(to, [&](const Batch& b) { return has_documents(*model_, b.inputs); });
  settings.push_back({"the number of batches with documents", documents, !own});
  // A batch norm counts its summands by the layout, as if all samples had the shape of this rank's samples.
  Fnv1a samples;
  if (has_batch_norm_)
    for (const Batch& batch : to)
      for (const Tensor& input : batch.inputs)
        for (const std::int64_t extent : layouts::global_shape(input).values().subspan(1))
          samples.add(static_cast<std::uint64_t>(extent));
  settings.push_back({"the shape of a sample, for a model with a BatchNorm,",
                      static_cast<std::int64_t>(samples.value), !own});
  // Represents a number that this rank does not know.
  constexpr std::int64_t kAny = std::numeric_limits<std::int64_t>::max();
  Numbers mine{fault, content, ~content, rate, ~rate};
  for (const Setting& s : settings)
    mine.insert(mine.end(), {s.known ? s.digest : kAny, s.known ? ~s.digest : kAny});
  Numbers least = mine;
  for (const DeviceMesh& axes : model_->axes_of_equal_batches()) least = least_of(*compute_, axes, least);
  const bool differ = least[0] == kNone && least[1] != ~least[2];
  Numbers told{differ ? kBatch : least[0], valid};
  told.insert(told.end(), least.begin() + 3, least.end());  // the least of each number, and of its complement
  const Numbers all = gathered(*compute_, data, told);
  std::int64_t worst = kNone, sum = 0;
  Numbers extremes(told.begin() + 2, told.end());
  for (std::size_t i = 0; i < all.size(); i += told.size()) {
    worst = std::min(worst, all[i]);
    sum += all[i + 1];
    for (std::size_t e = 0; e < extremes.size(); ++e) extremes[e] = std::min(extremes[e], all[i + 2 + e]);
  }
  if (own) throw Error(*own);
  if (differ) wrong(different_batches(*model_));
  if (worst != kNone) wrong_elsewhere(worst);
  const bool one_function = extremes[2] == ~extremes[3];
  if (lr && one_function) expect_one_rate(model_->mesh, *lr, extremes[0], ~extremes[1]);
  for (std::size_t i = 0; i < settings.size(); ++i)
    if (extremes[2 + 2 * i] != ~extremes[3 + 2 * i] && (settings[i].known || extremes[3 + 2 * i] != kAny))
      wrong(fmt::format("{} is not the same on all ranks of {}; expected the same", settings[i].name,
                        to_string(model_->mesh.shape())));
  if (sum == 0)
    wrong(model_->tokens
              ? fmt::format("no label of the step counts (all are {})", CrossEntropy::kIgnore)
              : "nothing in the step counts: no row has a target; expected 1 element or more on all ranks");
  if (WEFT_MUTANT("loss_of_own_labels")) return std::max<std::int64_t>(valid * data.size(), 1);
  return sum;
}

// Like agree(), for the learning rate alone.
void Trainer::agree_on_rate(double lr, bool gives_up) const {
  const std::optional<Error> averages = out_of_place(ema_.get(), *optimizer_);
  const std::int64_t fault = gives_up       ? kGivesUp
                             : averages     ? kAverages
                             : possible(lr) ? kNone
                                            : kRate,
                     rate = fault == kNone ? bits_of(lr) : 0;
  Numbers least{fault, rate, ~rate};
  for (const DeviceMesh& axes : model_->axes_of_equal_batches()) least = least_of(*compute_, axes, least);
  least = least_of(*compute_, model_->data, least);
  if (gives_up) throw given_up();
  if (averages) throw Error(*averages);
  if (fault != kNone) throw impossible(lr);
  if (least[0] != kNone) wrong_elsewhere(least[0]);
  expect_one_rate(model_->mesh, lr, least[1], ~least[2]);
}

namespace {

Tensors inputs_of_loss(const Tensors& outputs, const Batch& batch, const Tensor& counted) {
  Tensors all = outputs;
  all.insert(all.end(), batch.targets.begin(), batch.targets.end());
  all.push_back(counted);
  return all;
}

// The sum of the losses of all ranks. In exact mode it is the tree over blocks of samples, which may be
// nested in another order than the axes of the mesh.
double loss_of_all(const ParallelModel& model, Compute& compute, const Tensor& loss) {
  if (model.exact == Exact::no) return to_host(compute.context(), full(loss)).as<double>()[0];
  const double own = to_host(compute.context(), loss).as<double>()[0];
  std::vector<double> sums;
  for (const std::int64_t bits : gathered(compute, model.data, {std::bit_cast<std::int64_t>(own)}))
    sums.push_back(std::bit_cast<double>(bits));
  for (std::size_t step = 1; step < sums.size(); step *= 2)
    for (std::size_t i = 0; i + step < sums.size(); i += 2 * step) sums[i] += sums[i + step];
  return sums[0];
}

// Returns whether ranks may still communicate after this error.
bool groups_are_sound() noexcept {
  try {
    throw;
  } catch (const Error& e) {
    return e.code() != ErrorCode::timeout && e.code() != ErrorCode::peer_lost &&
           e.code() != ErrorCode::aborted;
  } catch (...) {
    return true;
  }
}

// Ends the reducer's step after passes that failed: buckets may be in flight, and data ranks without a
// failure wait for the others. Those ranks learn that this rank has no gradients, and this rank throws the
// error that ended the passes. A sharded model has ended its passes itself; what it kept between forward and
// backward is dropped.
// `reduced`: the error is the reducer's, which has ended its step then.
void end_step(ParallelModel& model, bool reduced) noexcept {
  // Data and tensor ranks of other stages wait in groups of their own.
  if (model.stages) spread_failure(model.mesh);
  if (model.sharded) return model.sharded->discard();
  if (reduced) return;
  // The stages' group has failed, and not that of the data ranks, who may wait in finish().
  if (model.data.size() > 1 && !model.stages && !groups_are_sound()) return;
  model.reducer->give_up();
}

// While this lives, float8 layers pass on gradients that are not finite, for steps that are skipped then.
class GradientsMayBeInfinite {
 public:
  explicit GradientsMayBeInfinite(const Float8Model* model) : model_(model) {
    if (model_ != nullptr) before_ = model_->linears()->set_not_finite(Float8NotFinite::propagate);
  }
  GradientsMayBeInfinite(const GradientsMayBeInfinite&) = delete;
  GradientsMayBeInfinite& operator=(const GradientsMayBeInfinite&) = delete;
  ~GradientsMayBeInfinite() {
    if (model_ != nullptr) model_->linears()->set_not_finite(before_);
  }

 private:
  const Float8Model* model_;
  Float8NotFinite before_ = Float8NotFinite::error;
};

}  // namespace

// The pipeline for steps with so many micro-batches; made at the first such step.
Pipeline& Trainer::pipeline_for(int micro_batches, Module& loss, bool trains) {
  auto& made = pipelines_[{trains ? micro_batches : -micro_batches, &loss}];
  if (made != nullptr) return *made;
  PipelineOptions options{
      trains ? model_->schedule_for(micro_batches) : model_->forward_schedule_for(micro_batches),
      model_->stage_paths, model_->border, model_->tied};
  if (model_->exact == Exact::yes) {
    options.total_loss = [model = model_, compute = compute_](const Tensor& of) {
      return loss_of_all(*model, *compute, of);
    };
    if (apart_ == nullptr) apart_ = std::make_shared<MicroBatchGradients>(*compute_);
    if (trains && micro_batches > 1)
      options.after_gradients = [apart = apart_](std::span<Parameter* const> parameters, int micro_batch) {
        apart->take(parameters, micro_batch);
      };
  }
  made = std::make_unique<Pipeline>(*model_->model, &loss, model_->stages.group(), *compute_,
                                    std::move(options));
  return *made;
}

// Performs the passes of all batches over the stages; the losses come in the order of the batches.
std::vector<double> Trainer::pipeline_losses(const std::vector<Batch>& all, const Tensor& counted,
                                             Module& loss, const Pass& pass, const Tensors& dloss) {
  std::optional<FullySharded::KeptWeights> kept;
  if (model_->sharded && model_->pipeline.keep_weights) kept.emplace(model_->sharded->keep_weights());
  if (model_->float8) model_->float8->update_scales();  // no pass of the whole model does
  std::vector<PipelineMicroBatch> micro_batches;
  for (const Batch& b : all) {
    PipelineMicroBatch& m = micro_batches.emplace_back();
    m = {b.inputs, inputs_of_loss({}, b, counted)};
    if (!has_documents(*model_, b.inputs)) continue;
    // The second input of a Transformer, which no stage has as an input.
    if (!WEFT_MUTANT("documents_of_no_stage"))
      m.documents = PackedDocuments::of(compute_->context(), b.inputs[1], "trainer: inputs[1]");
    m.inputs.pop_back();
  }
  return pipeline_for(static_cast<int>(all.size()), loss, pass.training)
      .run(micro_batches, pass, dloss)
      .losses;
}

// Performs forward, loss and backward of each batch; afterwards the gradients are those of all data ranks.
// Returns the loss.
double Trainer::passes(const std::vector<Batch>& all, std::int64_t counted) {
  const Tensor global = to_device(compute_->context(), scalar(model_->mesh, counted), compute_->stream());
  std::vector<Tensor> losses;
  Tensors dloss;
  const bool skips = scaler_ || options_.non_finite == NonFinite::skip;
  if (scaler_ || model_->chunked) {
    Tensor scale(compute_->context(), {1}, DType::f64);
    scale.as<double>()[0] = scaler_ ? scaler_->scale() : 1;
    dloss.push_back(to_device(compute_->context(), scale.with_layout(replicated_layout(model_->mesh, {1})),
                              compute_->stream()));
  }
  set_router_loss_scale(*model_->model, (scaler_ ? scaler_->scale() : 1.0) / static_cast<double>(all.size()));
  std::optional<MicroBatchSum> earlier;  // in exact mode: of the micro-batches before the last
  if (model_->exact == Exact::yes && all.size() > 1 && !WEFT_MUTANT("exact_micro_batches_unreduced"))
    earlier.emplace(optimizer_->parameters(), *compute_);
  std::vector<double> of_batches;
  bool reduces = false;  // an error is the reducer's
  try {
    if (model_->stages) {
      for (const TiedWeight& weight : model_->tied)  // the optimizer drops those of one use alone
        for (const ParameterRef& use : weight.uses) use->zero_gradient();
      {
        const NoSync off = model_->sharded ? model_->sharded->no_sync() : model_->reducer->no_sync();
        of_batches = pipeline_losses(all, global, loss(),
                                     {.seed = options_.seed, .step = steps_, .exact = model_->exact}, dloss);
      }
      reduces = true;
      for (std::size_t i = 0; earlier && i < all.size(); ++i) {
        apart_->give(static_cast<int>(i));
        if (i + 1 == all.size()) continue;
        model_->finish();
        earlier->take();
      }
      reduces = false;
    }
    std::optional<NoSync> off;  // a sharded model reduces each micro-batch: it keeps no whole gradients
    if (all.size() > 1 && model_->reducer && !earlier && !model_->stages)
      off.emplace(model_->reducer->no_sync());
    std::int64_t first = 0;
    for (std::size_t i = 0; i < all.size() && !model_->stages; ++i) {
      if (i + 1 == all.size() || WEFT_MUTANT("reduced_each_time")) off.reset();
      Frame frame(*compute_, {.seed = options_.seed,
                              .step = steps_,
                              .micro_batch = static_cast<std::int64_t>(i),
                              .first_sample = first,
                              .exact = model_->exact});
      first += all[i].global_rows;
      std::optional<LossInChunks::Given> in_chunks;
      if (model_->chunked)
        in_chunks.emplace(model_->chunked->give(loss(), inputs_of_loss({}, all[i], global)));
      const Tensors y = model_->model->forward(all[i].inputs, frame);
      losses.push_back(in_chunks ? y[0] : loss().forward(inputs_of_loss(y, all[i], global), frame)[0]);
      const Tensors dy = in_chunks ? dloss : loss().backward(dloss, frame);
      const GradientsMayBeInfinite here(skips ? model_->float8.get() : nullptr);
      model_->model->backward(dy, frame);
      if (!earlier || i + 1 == all.size()) continue;
      reduces = true;
      model_->finish();
      reduces = false;
      earlier->take();
    }
    reduces = true;
    model_->finish();
  } catch (...) {
    end_step(*model_, reduces);
    throw;
  }
  if (earlier) earlier->add_to_last();
  for (const DeviceMesh& axes : model_->axes_of_equal_rows())  // of parameters that are whole there
    if (axes.size() > 1 && !WEFT_MUTANT("norms_unreduced"))
      reduce_gradients(optimizer_->parameters(), axes, {.compute = compute_});
  for (const Tensor& loss : losses) of_batches.push_back(loss_of_all(*model_, *compute_, loss));
  return std::accumulate(of_batches.begin(), of_batches.end(), 0.0);
}

Trainer::Result Trainer::take_backward(const Batches& batches, std::optional<double> lr) {
  const CountedCall call(calls_, *model_);
  return first_half(batches, lr);
}

Trainer::Result Trainer::first_half(const Batches& batches, std::optional<double> lr) {
  if (pending_) wrong("the gradients of a backward() are there; expected update() or discard() first");
  Result result{.step = steps_};
  std::vector<Batch> all;
  result.tokens = agree(batches, lr, all);
  freeze_at(steps_);
  try {
    result.loss = passes(all, result.tokens);
    if (scaler_) finite_ = scaler_->unscale(optimizer_->parameters(), model_->mesh, compute_);
  } catch (...) {
    optimizer_->zero_gradients();
    if (apart_ != nullptr) *apart_ = MicroBatchGradients(*compute_);
    forget_router_counts(*model_->model);
    throw;
  }
  pending_ = result;
  return result;
}

// The norm of a pipeline's gradients, which it clips.
double Trainer::norm_of_stages(std::span<Parameter* const> parameters) const {
  const std::vector<Gradient> gradients = gradients_of(parameters, "trainer");
  std::vector<std::string> copies;
  for (const Gradient& g : gradients)
    if (!model_->is_own(g.name)) copies.emplace_back(g.name);
  return options_.max_norm > 0 ? clip_pipeline_grad_norm(gradients, model_->stages, options_.max_norm,
                                                         options_.non_finite, copies)
                               : pipeline_grad_norm(gradients, model_->stages, copies);
}

// Clips, and takes a step, on all ranks with one learning rate.
Trainer::Result Trainer::apply(double lr) {
  Result result = *pending_;
  struct Forget {
    Trainer& trainer;
    ~Forget() { trainer.discard(); }
  } const forget{*this};
  if (scaler_) {
    result.loss_scale = scaler_->scale();
    scaler_->update();
  }
  const std::span<Parameter* const> parameters = optimizer_->parameters();
  if (scaler_ && !finite_)
    result.grad_norm = std::numeric_limits<double>::infinity();
  else if (model_->stages)
    result.grad_norm = norm_of_stages(parameters);
  else
    result.grad_norm = options_.max_norm > 0 ? clip_grad_norm(parameters,
                                                              WEFT_MUTANT("clip_by_ranks")
                                                                  ? options_.max_norm / model_->mesh.size()
                                                                  : options_.max_norm,
                                                              2, options_.non_finite, compute_, model_->exact)
                                             : grad_norm(parameters, 2, compute_, model_->exact);
  result.skipped = !std::isfinite(result.grad_norm);
  if (result.skipped && options_.non_finite == NonFinite::error && !(scaler_ && !finite_))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("trainer: the norm of the gradients is {}; expected a finite one", result.grad_norm));
  if (!result.skipped) optimizer_->step(lr);
  if (!result.skipped) update_router_biases(*model_->model);
  if (!result.skipped && ema_) ema_->update();
  ++steps_;
  return result;
}

Trainer::Result Trainer::take_step(const Batches& batches, double lr) {
  const CountedCall call(calls_, *model_);
  first_half(batches, lr);
  return apply(lr);
}

std::vector<Gradient> Trainer::gradients() const {
  if (!pending_) wrong("there are no gradients; expected backward() first");
  return gradients_of(optimizer_->parameters(), "trainer");
}

Trainer::Evaluation Trainer::evaluate_any(const Batches& batches) {
  const CountedCall call(calls_, *model_);
  std::vector<Batch> all;
  Evaluation result{.tokens = agree(batches, std::nullopt, all, true)};
  std::optional<Optimizer::Swapped> values;  // other values than the trained ones, unless the program swaps
  if (dynamic_cast<ScheduleFreeAdamW*>(optimizer_.get()) != nullptr && !optimizer_->swapped() &&
      !any_swapped(optimizer_->parameters()))
    values.emplace(*optimizer_);
  const Tensor global =
      to_device(compute_->context(), scalar(model_->mesh, result.tokens), compute_->stream());
  Module& loss = dynamic_cast<CrossEntropy*>(model_->loss.get()) != nullptr ? plain_loss() : *model_->loss;
  if (model_->stages)
    for (const double part :
         pipeline_losses(all, global, loss, {.training = false, .exact = model_->exact}, {}))
      result.loss += part;
  std::vector<Tensor> losses;
  std::exception_ptr failure;
  try {
    for (std::size_t i = 0; i < all.size() && !model_->stages; ++i) {
      const Batch& batch = all[i];
      Frame frame = Frame::inference(*compute_);
      frame.begin({.training = false, .exact = model_->exact});
      std::optional<LossInChunks::Given> in_chunks;
      if (model_->chunked) in_chunks.emplace(model_->chunked->give(loss, inputs_of_loss({}, batch, global)));
      const Tensors y = model_->model->forward(batch.inputs, frame);
      losses.push_back(in_chunks ? y[0] : loss.forward(inputs_of_loss(y, batch, global), frame)[0]);
    }
  } catch (...) {
    if (!groups_are_sound()) throw;
    failure = std::current_exception();
  }
  // The passes of a data rank fail for it alone, unless weights are gathered for them, or rows travel to the
  // experts of other ranks.
  const std::string& experts = model_->options.expert_axis;
  const bool rows_travel = !experts.empty() && model_->mesh[experts].size() > 1;
  if (!model_->stages && !model_->sharded && !rows_travel && model_->data.size() > 1) {
    const bool failed = least_of(*compute_, model_->data, {failure ? -1 : 0})[0] < 0;
    if (failed && !failure) wrong("the passes of another rank failed; its own error says why");
  }
  if (failure) std::rethrow_exception(failure);
  for (const Tensor& of_batch : losses) result.loss += loss_of_all(*model_, *compute_, of_batch);
  result.perplexity = std::exp(result.loss);
  return result;
}

Trainer::Result Trainer::update(double lr) {
  const CountedCall call(calls_, *model_);
  if (!pending_) wrong("update() has no gradients; expected backward() first");
  try {
    agree_on_rate(lr);
  } catch (...) {
    discard();
    throw;
  }
  return apply(lr);
}

void Trainer::give_up() noexcept {
  ++calls_.begun, ++calls_.failed;  // the others know
  try {
    if (pending_) {
      agree_on_rate(0, true);
    } else {
      std::vector<Batch> none;
      agree(std::span<const Batch>(), std::nullopt, none, false, true);
    }
  } catch (...) {  // also given_up()
  }
  discard();
}

void Trainer::discard() noexcept {
  optimizer_->zero_gradients();
  if (scaler_) scaler_->discard();
  pending_.reset();
  forget_router_counts(*model_->model);
}

}  // namespace weft
