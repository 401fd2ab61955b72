#include "weft/models/trainer.hpp"

#include <fmt/format.h>

#include <algorithm>
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
  const std::int64_t part = global / ranks + (model.data.rank() < global % ranks ? 1 : 0);
  if (b.rows != part)
    wrong(function, fmt::format("{}rows is {}; expected {}, the part of rank {} of {} in global_rows {}",
                                which, b.rows, part, model.data.rank(), ranks, global));
  return model.place(to_device(compute.context(), t, compute.stream()), global);
}

void add_content(Fnv1a& hash, const TokenBatch& b) {
  for (const std::int64_t size : {b.rows, b.sequence, b.global_rows})
    hash.add_at_once(static_cast<std::uint64_t>(size));
  for (const std::int64_t* numbers : {b.tokens, b.labels})
    for (std::int64_t i = 0; i < b.rows * b.sequence; ++i)
      hash.add_at_once(static_cast<std::uint64_t>(numbers[i]));
}

// Numbers of each rank of `axes`, reduced over these.
std::vector<std::int64_t> reduced(Compute& compute, const DeviceMesh& mesh, const DeviceMesh& axes,
                                  const ReduceOp& op, std::vector<std::int64_t> numbers) {
  if (axes.size() == 1) return numbers;
  const Shape shape{static_cast<std::int64_t>(numbers.size())};
  const Tensor own(compute.context(), shape, DType::i64);
  std::copy(numbers.begin(), numbers.end(), own.as<std::int64_t>().begin());
  const LayoutRef each = replicated_layout(mesh, shape)->with(axes, Partial{op});
  const Tensor here = to_device(compute.context(), own, compute.stream()).with_layout(each);
  const Tensor all = to_host(compute.context(), redistribute(here, axes, Replicate{}));
  const std::span<std::int64_t> values = all.as<std::int64_t>();
  return {values.begin(), values.end()};
}

}  // namespace

Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch) {
  check_sizes("compute_logits", "", model.model->config(), batch);
  const Tensor tokens = placed("compute_logits", "", "tokens", model, compute, batch, batch.tokens, false);
  Frame frame = Frame::inference(compute);
  return model.model->forward({tokens}, frame)[0];
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

// The number of labels that count, over all ranks. Fills `to`. By two small all-reduces ranks also learn of each other's
// faults, so that none goes on alone, and that tensor ranks have the same batches.
std::int64_t Trainer::agree_on_valid(std::span<const TokenBatch> batches, std::vector<Placed>& to) const {
  const DeviceMesh &data = model_->data, &tensor = model_->tensor;
  std::optional<Error> fault;
  std::int64_t valid = 0;
  Fnv1a hash;
  try {
    to = place(batches);
    for (const TokenBatch& b : batches) {
      valid += std::count_if(b.labels, b.labels + b.rows * b.sequence,
                             [](std::int64_t label) { return label != CrossEntropy::kIgnore; });
      add_content(hash, b);
    }
  } catch (const Error& e) {
    fault = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  const std::vector<std::int64_t> least =
      reduced(*compute_, model_->mesh, tensor, ReduceOp::min, {fault ? -1 : 0, content, ~content});
  const bool differ = least[1] != ~least[2], fits = least[0] == 0 && !differ;
  const std::vector<std::int64_t> sums =
      reduced(*compute_, model_->mesh, data, ReduceOp::sum, {valid, fits ? 0 : 1});
  if (fault) throw Error(*fault);
  if (differ && least[0] == 0)
    wrong("trainer",
          fmt::format("the ranks of {}={} were given different batches; expected the same, as they "
                      "share the work on each",
                      tensor.name(), tensor.size()));
  if (sums[1] > 0)
    wrong("trainer", "another rank was given a batch that does not fit; its own error says why");
  if (sums[0] == 0)
    wrong("trainer", fmt::format("no label of the step counts (all are {})", CrossEntropy::kIgnore));
  return sums[0];
}

// Forward, loss and backward of each batch; gradients are those of all data ranks afterwards. Returns the loss.
double Trainer::passes(const std::vector<Placed>& all, std::int64_t valid) {
  const Tensor global = to_device(compute_->context(), scalar(model_->mesh, valid), compute_->stream());
  std::vector<Tensor> losses;
  std::optional<NoSync> off;
  if (all.size() > 1) off.emplace(model_->averager->no_sync());
  for (std::size_t i = 0; i < all.size(); ++i) {
    if (i + 1 == all.size()) off.reset();
    Frame frame(*compute_,
                {.seed = options_.seed, .step = steps_, .micro_batch = static_cast<std::int64_t>(i)});
    const Tensors logits = model_->model->forward({all[i].tokens}, frame);
    losses.push_back(loss_.forward({logits[0], all[i].labels, global}, frame)[0]);
    model_->model->backward(loss_.backward({}, frame), frame);
  }
  model_->averager->finish();
  if (model_->tensor.size() > 1)  // what each tensor rank holds whole
    sync_replicated_gradients(optimizer_->parameters(), model_->tensor, {.compute = compute_});
  double sum = 0;
  for (const Tensor& loss : losses) sum += to_host(compute_->context(), full(loss)).as<double>()[0];
  return sum;
}

Trainer::Result Trainer::step(std::span<const TokenBatch> batches, double lr) {
  if (!(lr >= 0 && std::isfinite(lr)))
    wrong("trainer", fmt::format("the learning rate is {}; expected a finite number of 0 or more", lr));
  Result result{.step = steps_};
  std::vector<Placed> all;
  result.tokens = agree_on_valid(batches, all);
  struct Forget {
    Optimizer& optimizer;
    ~Forget() { optimizer.zero_gradients(); }
  } const forget{*optimizer_};
  result.loss = passes(all, result.tokens);
  const std::span<Parameter* const> parameters = optimizer_->parameters();
  result.grad_norm = options_.max_norm > 0
                         ? clip_grad_norm(parameters, options_.max_norm, 2, options_.non_finite, compute_)
                         : grad_norm(parameters, 2, compute_);
  result.skipped = !std::isfinite(result.grad_norm);
  if (result.skipped && options_.non_finite == NonFinite::error)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("trainer: the norm of the gradients is {}; expected a finite one", result.grad_norm));
  if (!result.skipped) optimizer_->step(lr);
  ++steps_;
  return result;
}

void Trainer::save(const std::filesystem::path& directory, const CheckpointExtra& extra) const {
  save_checkpoint(directory, model_->mesh, steps_, *model_->model, optimizer_.get(), extra);
}

CheckpointInfo Trainer::load(const std::filesystem::path& directory) {
  CheckpointInfo info = load_checkpoint(directory, model_->mesh, *model_->model, optimizer_.get());
  steps_ = info.step;
  return info;
}

}  // namespace weft
