#include "weft/models/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <charconv>
#include <cmath>
#include <limits>
#include <optional>
#include <utility>

#include "base/hash.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"

namespace weft {
namespace {

[[noreturn]] void wrong(const char* function, const std::string& text) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", function, text));
}

// "batch 1: " where there are several.
std::string of_batch(std::size_t number, std::size_t count) {
  return count > 1 ? fmt::format("batch {}: ", number) : std::string();
}

void check_sizes(const char* function, const std::string& which, const TransformerConfig& config,
                 const TokenBatch& b) {
  if (b.rows < 0) wrong(function, fmt::format("{}rows is {}; expected 0 or more", which, b.rows));
  if (b.sequence < 1 || b.sequence > config.max_seq)
    wrong(function,
          fmt::format("{}sequence is {}; expected 1 to {} (max_seq)", which, b.sequence, config.max_seq));
  if (b.global_rows < 0)
    wrong(function, fmt::format("{}global_rows is {}; expected 0 (the same rows on each rank) or more", which,
                                b.global_rows));
  std::int64_t elements = 0;
  if (__builtin_mul_overflow(b.rows, b.sequence, &elements) ||
      __builtin_mul_overflow(elements, config.vocab, &elements))
    wrong(function, fmt::format("{}{} rows of {} tokens are too many", which, b.rows, b.sequence));
}

// (rows, sequence) numbers of a batch as a tensor on the rank's device, as layers want them. `may_ignore`: kIgnore may be
// among them.
Tensor placed(const char* function, const std::string& which, const char* name, const ParallelModel& model,
              Compute& compute, const TokenBatch& b, const std::int64_t* numbers, bool may_ignore) {
  const std::int64_t count = b.rows * b.sequence, vocab = model.model->config().vocab;
  if (numbers == nullptr && count > 0)
    wrong(function, fmt::format("{}{} has no memory; expected {} x {}", which, name, b.rows, b.sequence));
  Tensor t(compute.context(), {b.rows, b.sequence}, DType::i64);
  const std::span<std::int64_t> to = t.as<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = numbers[i];
    if ((n < 0 || n >= vocab) && !(may_ignore && n == CrossEntropy::kIgnore))
      wrong(function, fmt::format("{}{}[{}] is {}; expected 0 to {}{}", which, name, i, n, vocab - 1,
                                  may_ignore ? fmt::format(", or {}", CrossEntropy::kIgnore) : ""));
    to[static_cast<std::size_t>(i)] = n;
  }
  const std::int64_t ranks = model.data.size(), global = b.global_rows == 0 ? b.rows * ranks : b.global_rows;
  std::int64_t part = global;  // as Shard cuts it: several axes one after the other
  for (const DeviceMesh& axis : model.data.each_axis()) part = chunk_of(part, axis.size(), axis.rank()).size;
  if (b.rows != part)
    wrong(function, fmt::format("{}rows is {}; expected {}, the part of rank {} of {} in global_rows {}",
                                which, b.rows, part, model.data.rank(), ranks, global));
  return model.place(to_device(compute.context(), t, compute.stream()), global);
}

void add_numbers(Fnv1a& hash, const TokenBatch& b, const std::int64_t* numbers) {
  for (std::int64_t i = 0; i < b.rows * b.sequence; ++i)
    hash.add_at_once(static_cast<std::uint64_t>(numbers[i]));
}
// Sizes and tokens.
void add_content(Fnv1a& hash, const TokenBatch& b) {
  for (const std::int64_t size : {b.rows, b.sequence, b.global_rows})
    hash.add_at_once(static_cast<std::uint64_t>(size));
  add_numbers(hash, b, b.tokens);
}

using Numbers = std::vector<std::int64_t>;

Tensor on_device(Compute& compute, const Numbers& numbers) {
  const Tensor own(compute.context(), {static_cast<std::int64_t>(numbers.size())}, DType::i64);
  std::copy(numbers.begin(), numbers.end(), own.as<std::int64_t>().begin());
  return to_device(compute.context(), own, compute.stream());
}
Numbers on_host(Compute& compute, const Tensor& numbers) {
  const Tensor here = to_host(compute.context(), numbers);
  const std::span<std::int64_t> values = here.as<std::int64_t>();
  return {values.begin(), values.end()};
}

// The least of each number over the ranks of `axes`.
Numbers least_of(Compute& compute, const DeviceMesh& axes, const Numbers& numbers) {
  if (axes.size() == 1) return numbers;
  const Tensor own = on_device(compute, numbers);
  const LayoutRef each = replicated_layout(axes, own.shape())->with(axes, Partial{ReduceOp::min});
  return on_host(compute, redistribute(own.with_layout(each), axes, Replicate{}));
}

// The numbers of each rank of `axes`, one rank after the other.
Numbers gathered(Compute& compute, const DeviceMesh& axes, const Numbers& numbers) {
  if (axes.size() == 1) return numbers;
  const Tensor own = on_device(compute, numbers);
  const LayoutRef parts = replicated_layout(axes, {own.count() * axes.size()})->with(axes, Shard{0});
  return on_host(compute, redistribute(own.with_layout(parts), axes, Replicate{}));
}

// What is wrong on a rank, as ranks tell each other: the least of all counts.
enum Fault : std::int64_t { kNone = 0, kBatch = -1, kRate = -2 };

// A number that orders and tells apart learning rates as they are.
std::int64_t bits_of(double lr) { return std::bit_cast<std::int64_t>(lr + 0.0); }  // -0 is 0
bool possible(double lr) { return lr >= 0 && std::isfinite(lr); }
Error impossible(double lr) {
  return {ErrorCode::bad_argument,
          fmt::format("trainer: the learning rate is {}; expected a finite number of 0 or more", lr)};
}
[[noreturn]] void wrong_elsewhere(std::int64_t fault) {
  wrong("trainer", fault == kRate
                       ? "another rank was given a learning rate that is none; its own error says why"
                       : "another rank was given a batch that does not fit; its own error says why");
}
// Throws where the ranks have different learning rates: the least and the largest, as bits.
void expect_one_rate(const DeviceMesh& mesh, double lr, std::int64_t least, std::int64_t most) {
  if (least != most)
    wrong(
        "trainer",
        fmt::format("the learning rate is {} here, and {} to {} on the ranks of {}; expected the "
                    "same on all",
                    lr, std::bit_cast<double>(least), std::bit_cast<double>(most), to_string(mesh.shape())));
}

std::string different_batches(const DeviceMesh& tensor) {
  return fmt::format(
      "the ranks of {}={} were given different batches; expected the same, as they share the "
      "work on each",
      tensor.name(), tensor.size());
}

}  // namespace

Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch,
                      const std::optional<Error>& fault) {
  constexpr const char* kWho = "compute_logits";
  std::optional<Error> own = fault;
  Tensor tokens;
  Fnv1a hash;
  try {
    if (!own) {
      check_sizes(kWho, "", model.model->config(), batch);
      tokens = placed(kWho, "", "tokens", model, compute, batch, batch.tokens, false);
      add_content(hash, batch);
    }
  } catch (const Error& e) {
    own = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  const Numbers least = least_of(compute, model.tensor, {own ? kBatch : kNone, content, ~content});
  if (own) throw Error(*own);
  if (least[0] != kNone)
    wrong(kWho,
          fmt::format("another rank of {}={} was given a batch that does not fit; its own error says why",
                      model.tensor.name(), model.tensor.size()));
  if (least[1] != ~least[2]) wrong(kWho, different_batches(model.tensor));
  Frame frame = Frame::inference(compute);
  return redistribute(model.model->forward({tokens}, frame)[0], model.tensor, Replicate{});
}

Trainer::Trainer(ParallelModel& model, Compute& compute, const Options& options)
    : model_(&model), compute_(&compute), options_(options) {
  if (!(options.max_norm >= 0))
    wrong("trainer", fmt::format("max_norm is {}; expected 0 (no clipping) or more", options.max_norm));
  const auto check = [](const char* name, double value, double below) {
    if (!(value >= 0 && value < below))
      wrong("trainer", fmt::format("{} is {}; expected 0 or more{}", name, value,
                                   std::isfinite(below) ? fmt::format(", and less than {}", below) : ""));
  };
  if (options.loss_scale) scaler_.emplace(*options.loss_scale);
  constexpr double kNone = std::numeric_limits<double>::infinity();
  if (const AdamW::Options* const o = std::get_if<AdamW::Options>(&options.optimizer)) {
    check("beta1", o->beta1, 1);
    check("beta2", o->beta2, 1);
    check("eps", o->eps, kNone);
    check("weight_decay", o->weight_decay, kNone);
    optimizer_ = std::make_unique<AdamW>(compute, model.parameters(), *o);
  } else {
    const SGD::Options& sgd = std::get<SGD::Options>(options.optimizer);
    check("momentum", sgd.momentum, kNone);
    check("weight_decay", sgd.weight_decay, kNone);
    optimizer_ = std::make_unique<SGD>(compute, model.parameters(), sgd);
  }
}

std::vector<Trainer::Placed> Trainer::place(std::span<const TokenBatch> batches) const {
  if (batches.empty()) wrong("trainer", "no batch is given; expected 1 or more");
  std::vector<Placed> all;
  for (std::size_t i = 0; i < batches.size(); ++i) {
    const TokenBatch& b = batches[i];
    const std::string which = of_batch(i, batches.size());
    check_sizes("trainer", which, model_->model->config(), b);
    all.push_back({placed("trainer", which, "tokens", *model_, *compute_, b, b.tokens, false),
                   placed("trainer", which, "labels", *model_, *compute_, b, b.labels, true)});
  }
  return all;
}

// The number of labels that count, over all ranks. Fills `to`. By a small all-reduce over the tensor axis and a small all-gather over the
// data axis ranks also learn of each other's faults, so that none goes on alone; that tensor ranks have the same batches; and that all have the
// same learning rate, where there is one.
std::int64_t Trainer::agree(std::span<const TokenBatch> batches, std::optional<double> lr,
                            std::vector<Placed>& to) const {
  const DeviceMesh &data = model_->data, &tensor = model_->tensor;
  std::optional<Error> own;
  std::int64_t fault = kNone, valid = 0;
  Fnv1a hash;
  try {
    if (lr && !possible(*lr)) {
      fault = kRate;
      own = impossible(*lr);
    } else {
      to = place(batches);
      for (const TokenBatch& b : batches) {
        valid += std::count_if(b.labels, b.labels + b.rows * b.sequence,
                               [](std::int64_t label) { return label != CrossEntropy::kIgnore; });
        add_content(hash, b);
        add_numbers(hash, b, b.labels);
      }
    }
  } catch (const Error& e) {
    fault = kBatch;
    own = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  const std::int64_t rate = lr && fault != kRate ? bits_of(*lr) : 0;
  const Numbers least = least_of(*compute_, tensor, {fault, content, ~content, rate, ~rate});
  const bool differ = least[0] == kNone && least[1] != ~least[2];
  const Numbers all = gathered(*compute_, data, {differ ? kBatch : least[0], valid, least[3], ~least[4]});
  std::int64_t worst = kNone, sum = 0, lowest = all[2], highest = all[3];
  for (std::size_t i = 0; i < all.size(); i += 4) {
    worst = std::min(worst, all[i]);
    sum += all[i + 1];
    lowest = std::min(lowest, all[i + 2]);
    highest = std::max(highest, all[i + 3]);
  }
  if (own) throw Error(*own);
  if (differ) wrong("trainer", different_batches(tensor));
  if (worst != kNone) wrong_elsewhere(worst);
  if (lr) expect_one_rate(model_->mesh, *lr, lowest, highest);
  if (sum == 0)
    wrong("trainer", fmt::format("no label of the step counts (all are {})", CrossEntropy::kIgnore));
  return sum;
}

// The same of a learning rate alone.
void Trainer::agree_on_rate(double lr) const {
  const std::int64_t fault = possible(lr) ? kNone : kRate, rate = fault == kNone ? bits_of(lr) : 0;
  Numbers least{fault, rate, ~rate};
  for (const DeviceMesh* axes : {&model_->tensor, &model_->data}) least = least_of(*compute_, *axes, least);
  if (fault != kNone) throw impossible(lr);
  if (least[0] != kNone) wrong_elsewhere(kRate);
  expect_one_rate(model_->mesh, lr, least[1], ~least[2]);
}

namespace {

// Whether ranks may still communicate after this error.
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

// Ends the averager's step after passes that did not: buckets may be on their way, and data ranks on which nothing failed wait for the
// others. They hear that these have no gradients; here the error that ended the passes is the one to tell. A sharded model has ended its
// passes itself; what it kept between forward and backward goes.
void end_step(ParallelModel& model) noexcept {
  if (model.sharded) return model.sharded->discard();
  if (model.data.size() > 1 && !groups_are_sound()) return;
  try {
    model.averager->finish();
  } catch (...) {}
}

}  // namespace

// Forward, loss and backward of each batch; gradients are those of all data ranks afterwards. Returns the loss.
double Trainer::passes(const std::vector<Placed>& all, std::int64_t valid) {
  const Tensor global = to_device(compute_->context(), scalar(model_->mesh, valid), compute_->stream());
  std::vector<Tensor> losses;
  Tensors dloss;
  if (scaler_) {
    Tensor scale(compute_->context(), {1}, DType::f64);
    scale.as<double>()[0] = scaler_->scale();
    dloss.push_back(to_device(compute_->context(), scale.with_layout(replicated_layout(model_->mesh, {1})),
                              compute_->stream()));
  }
  try {
    std::optional<NoSync> off;  // a sharded model reduces each micro-batch: it keeps no whole gradients
    if (all.size() > 1 && model_->averager) off.emplace(model_->no_sync());
    for (std::size_t i = 0; i < all.size(); ++i) {
      if (i + 1 == all.size()) off.reset();
      Frame frame(*compute_,
                  {.seed = options_.seed, .step = steps_, .micro_batch = static_cast<std::int64_t>(i)});
      const Tensors logits = model_->model->forward({all[i].tokens}, frame);
      losses.push_back(loss_.forward({logits[0], all[i].labels, global}, frame)[0]);
      model_->model->backward(loss_.backward(dloss, frame), frame);
    }
  } catch (...) {
    end_step(*model_);
    throw;
  }
  model_->finish();
  if (model_->tensor.size() > 1)  // what each tensor rank holds whole
    sync_replicated_gradients(optimizer_->parameters(), model_->tensor, {.compute = compute_});
  double sum = 0;
  for (const Tensor& loss : losses) sum += to_host(compute_->context(), full(loss)).as<double>()[0];
  return sum;
}

Trainer::Result Trainer::backward(std::span<const TokenBatch> batches, std::optional<double> lr) {
  if (pending_)
    wrong("trainer", "the gradients of a backward() are there; expected update() or discard() first");
  Result result{.step = steps_};
  std::vector<Placed> all;
  result.tokens = agree(batches, lr, all);
  try {
    result.loss = passes(all, result.tokens);
    if (scaler_) finite_ = scaler_->unscale(optimizer_->parameters(), model_->mesh, compute_);
  } catch (...) {
    optimizer_->zero_gradients();
    throw;
  }
  pending_ = result;
  return result;
}

// Clips, and takes a step: of all ranks, with one learning rate.
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
  else
    result.grad_norm = options_.max_norm > 0
                           ? clip_grad_norm(parameters, options_.max_norm, 2, options_.non_finite, compute_)
                           : grad_norm(parameters, 2, compute_);
  result.skipped = !std::isfinite(result.grad_norm);
  if (result.skipped && options_.non_finite == NonFinite::error && !(scaler_ && !finite_))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("trainer: the norm of the gradients is {}; expected a finite one", result.grad_norm));
  if (!result.skipped) optimizer_->step(lr);
  ++steps_;
  return result;
}

Trainer::Result Trainer::step(std::span<const TokenBatch> batches, double lr) {
  backward(batches, lr);
  return apply(lr);
}

Trainer::Result Trainer::backward(std::span<const TokenBatch> batches) {
  return backward(batches, std::nullopt);
}

std::vector<Gradient> Trainer::gradients() const {
  if (!pending_) wrong("trainer", "there are no gradients; expected backward() first");
  return gradients_of(optimizer_->parameters(), "trainer");
}

Trainer::Result Trainer::update(double lr) {
  if (!pending_) wrong("trainer", "update() has no gradients; expected backward() first");
  try {
    agree_on_rate(lr);
  } catch (...) {
    discard();
    throw;
  }
  return apply(lr);
}

void Trainer::discard() noexcept {
  optimizer_->zero_gradients();
  if (scaler_) scaler_->discard();
  pending_.reset();
}

namespace {

constexpr const char *kSeed = "trainer.seed", *kLossScale = "trainer.loss_scale";

// That of a checkpoint; `mine` where it has none.
std::uint64_t seed_of(const CheckpointInfo& info, std::uint64_t mine) {
  const auto found = info.extra.find(kSeed);
  if (found == info.extra.end()) return mine;
  const std::string& digits = found->second;
  std::uint64_t seed = 0;
  const auto [end, error] = std::from_chars(digits.data(), digits.data() + digits.size(), seed);
  if (error != std::errc() || end != digits.data() + digits.size())
    wrong("trainer", fmt::format("\"{}\" of {} is \"{}\"; expected a number from 0 to 2^64 - 1", kSeed,
                                 info.folder.string(), digits));
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
  save_checkpoint(directory, model_->mesh, steps_, *model_->model, optimizer_.get(), with_state(extra),
                  options);
}

bool Trainer::save(AsyncCheckpoint& saves, const std::filesystem::path& directory,
                   const CheckpointExtra& extra, const SaveOptions& options) const {
  return start_save(saves, directory, steps_, *model_->model, optimizer_.get(), with_state(extra), options);
}

CheckpointInfo Trainer::load(const std::filesystem::path& directory) {
  discard();
  CheckpointInfo info = load_checkpoint(directory, model_->mesh, *model_->model, optimizer_.get());
  options_.seed = seed_of(info, options_.seed);
  if (const auto scale = info.extra.find(kLossScale); scaler_ && scale != info.extra.end())
    scaler_->set_text(scale->second);
  steps_ = info.step;
  return info;
}

}  // namespace weft
