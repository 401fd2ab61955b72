#include "trainer.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <fstream>

#include "base/hash.hpp"
#include "weft/base/env.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/gradients.hpp"

namespace weft::tools {
namespace {

// A hash by which a run that goes on notices another text.
std::uint64_t fingerprint(const std::vector<unsigned char>& text) {
  return hash_of({reinterpret_cast<const char*>(text.data()), text.size()});
}

BuildOptions build_options(const TrainConfig& config) {
  BuildOptions options;
  options.seed = config.seed;
  return options;
}

[[noreturn]] void wrong(const std::string& text) { throw Error(ErrorCode::bad_argument, "train: " + text); }

}  // namespace

std::vector<unsigned char> read_text(const std::filesystem::path& path, std::int64_t least) {
  std::ifstream file(path, std::ios::binary);
  if (!file) throw_errno(fmt::format("text \"{}\"", path.string()), errno != 0 ? errno : ENOENT);
  std::vector<unsigned char> bytes{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (static_cast<std::int64_t>(bytes.size()) < least)
    wrong(fmt::format("text \"{}\" has {} bytes; expected at least {} (sequence + 2)", path.string(),
                      bytes.size(), least));
  return bytes;
}

int threads_per_rank(int asked, int ranks) {
  if (asked > 0) return asked;
  if (const auto set = env::get_int("WEFT_THREADS", 1, 4096)) return static_cast<int>(*set);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, usable / ranks);
}

MeshShape TrainConfig::check(int ranks) const {
  if (tp < 1) wrong(fmt::format("tp is {}; expected 1 or more", tp));
  if (dp != -1 && dp < 1) wrong(fmt::format("dp is {}; expected 1 or more", dp));
  const MeshShape mesh = MeshShape{{"dp", dp}, {"tp", tp}}.fit(ranks);
  model.check();
  const auto divides = [&](const char* what, std::int64_t count) {
    if (count % tp != 0)
      wrong(fmt::format("{} {} do not divide into tp={} ({} = {} x {} + {})", count, what, tp, count, tp,
                        count / tp, count % tp));
  };
  divides("heads", model.heads);
  divides("kv_heads", model.kv_heads);
  divides("ffn_hidden columns", model.ffn_hidden);
  divides("vocabulary entries", model.vocab);
  if (global_batch < mesh.size("dp"))
    wrong(fmt::format("batch is {}; expected at least one sequence for each of dp={}", global_batch,
                      mesh.size("dp")));
  if (sequence < 1 || sequence > model.max_seq)
    wrong(fmt::format("seq is {}; expected 1 to {} (max_seq)", sequence, model.max_seq));
  if (steps < 1) wrong(fmt::format("steps is {}; expected 1 or more", steps));
  if (threads < 0)
    wrong(fmt::format("threads is {}; expected 1 or more, or 0 for a share of the cores", threads));
  CosineSchedule{peak_lr, floor_lr, warmup_steps(), steps}.check();
  return mesh;
}

Trainer::Trainer(ProcessGroup& group, const TrainConfig& config)
    : config_(config),
      context_(group.context()),
      text_(read_text(config.text, config.sequence + 2)),
      compute_(context_, threads_per_rank(config.threads, group.size())),
      parts_(build_parallel_model(config.model, DeviceMesh(group, config.check(group.size())), compute_,
                                  build_options(config))),
      schedule_{config.peak_lr, config.floor_lr, config.warmup_steps(), config.steps},
      sampler_(parts_.data, static_cast<std::int64_t>(text_.size()) - config.sequence, config.global_batch,
               config.seed) {
  AdamW::Options options;
  options.weight_decay = config.weight_decay;
  optimizer_ = std::make_unique<AdamW>(compute_, parts_.parameters(), options);
}

// tokens: (rows, sequence), the bytes from a sample's offset on; labels: the byte after each.
Trainer::Batch Trainer::batch(std::int64_t step) const {
  const std::vector<std::int64_t> starts = sampler_.local_batch(step);
  const Shape shape{static_cast<std::int64_t>(starts.size()), config_.sequence};
  Tensor tokens(context_, shape, DType::i64), labels(context_, shape, DType::i64);
  std::size_t i = 0;
  for (const std::int64_t start : starts) {
    for (std::int64_t k = 0; k < config_.sequence; ++k, ++i) {
      tokens.as<std::int64_t>()[i] = text_[static_cast<std::size_t>(start + k)];
      labels.as<std::int64_t>()[i] = text_[static_cast<std::size_t>(start + k + 1)];
    }
  }
  return {parts_.place(tokens, config_.global_batch), parts_.place(labels, config_.global_batch)};
}

StepResult Trainer::step() {
  const Batch b = batch(next_);
  Frame frame(compute_, {.seed = config_.seed, .step = next_});
  const Tensors logits = parts_.model->forward({b.tokens}, frame);
  const Tensors loss = loss_.forward({logits[0], b.labels, scalar(parts_.mesh, tokens_per_step())}, frame);
  const Tensors dlogits = loss_.backward({}, frame);
  parts_.model->backward(dlogits, frame);
  parts_.averager->finish();
  // What every tensor rank holds whole: the same gradient on each, which is checked, or contributions to it.
  if (parts_.tensor.size() > 1)
    sync_replicated_gradients(optimizer_->parameters(), parts_.tensor, {.compute = &compute_});
  StepResult result{.step = next_, .lr = schedule_.at(next_)};
  result.grad_norm =
      clip_grad_norm(optimizer_->parameters(), config_.max_norm, 2, NonFinite::error, &compute_);
  optimizer_->step(result.lr);
  optimizer_->zero_gradients();
  result.loss = full(loss[0]).as<double>()[0];
  ++next_;
  return result;
}

std::string identity_of(const TrainConfig& config, const std::vector<unsigned char>& text) {
  const TransformerConfig& m = config.model;
  return fmt::format(
      "dim={} layers={} heads={} kv_heads={} ffn={} vocab={} theta={} seq={} batch={} steps={} warmup={} "
      "lr={} floor={} decay={} clip={} "
      "seed={} text={:016x}",
      m.dim, m.layers, m.heads, m.kv_heads, m.ffn_hidden, m.vocab, m.rope_theta, config.sequence,
      config.global_batch, config.steps, config.warmup_steps(), config.peak_lr, config.floor_lr,
      config.weight_decay, config.max_norm, config.seed, fingerprint(text));
}

void Trainer::save(const std::filesystem::path& directory, int keep) {
  save_checkpoint(directory, parts_.mesh, next_, *parts_.model, optimizer_.get(),
                  {{"run", identity_of(config_, text_)}}, {.keep = keep});
}

void Trainer::resume(const std::filesystem::path& directory) {
  next_ = load_checkpoint(directory, parts_.mesh, *parts_.model, optimizer_.get()).step;
}

std::int64_t Trainer::parameter_count() const {
  std::int64_t n = 0;
  for (const Parameter* p : parts_.parameters()) n += p->global_shape().count();
  return n;
}

}  // namespace weft::tools
