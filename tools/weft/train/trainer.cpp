#include "trainer.hpp"

#include <fmt/format.h>
#include <sched.h>

#include <algorithm>
#include <cerrno>
#include <charconv>
#include <cmath>
#include <set>

#include "base/parse_number.hpp"
#include "weft/base/env.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/nn/exact.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::tools {
namespace {

// The parts of a text between two such characters; one part if there is none.
std::vector<std::string_view> parts_of(std::string_view whole, char between) {
  std::vector<std::string_view> parts;
  for (std::size_t at = 0; at <= whole.size();) {
    const std::size_t end = std::min(whole.find(between, at), whole.size());
    parts.push_back(whole.substr(at, end - at));
    at = end + 1;
  }
  return parts;
}

BuildOptions build_options(const TrainConfig& config) {
  BuildOptions options;
  options.seed = config.seed;
  options.data = config.data == "ddp" ? DataForm::ddp : DataForm::fsdp;
  if (config.data == "hsdp") {
    options.data_axis = "dp_shard";
    options.replicate_axis = "dp_replicate";
  }
  options.exact = config.exact ? Exact::yes : Exact::no;
  if (config.weights == "bf16") options.dtype = DType::bf16;
  if (config.activations == "bf16") options.activations = DType::bf16;
  options.ac.mode = ac_mode_of(config.ac);
  options.ac.every = config.ac_every;
  options.loss_chunk = config.loss_chunk;
  options.tensor.sequence_parallel = config.sequence_parallel;
  options.tensor.vocab = config.vocab == "shard" ? VocabSplit::shard : VocabSplit::whole;
  if (config.pp > 1) {
    options.pipeline_axis = "pp";
    options.pipeline = config.pipeline_form();
  }
  if (config.float8 != "none") options.float8 = float8_recipe_from_name(config.float8);
  if (options.float8 && (config.exact || config.float8_scales == "whole"))
    options.float8_options.scales = Float8Scales::whole;
  if (config.has_experts()) options.expert_axis = "ep";
  if (config.domain > 1) options.domain_axes = {"domain"};
  return options;
}

std::optional<double> number_of(std::string_view text) {
  double value = 0;
  const auto [stop, failed] = std::from_chars(text.data(), text.data() + text.size(), value);
  if (failed != std::errc() || stop != text.data() + text.size()) return std::nullopt;
  return value;
}

OptimizerOptions optimizer_options(const TrainConfig& config) {
  const double decay = config.weight_decay;
  if (config.optimizer == "sgd") return SGD::Options{.momentum = 0.9, .weight_decay = decay};
  if (config.optimizer == "lion") return Lion::Options{.weight_decay = decay};
  if (config.optimizer == "schedule-free") return ScheduleFreeAdamW::Options{.weight_decay = decay};
  if (config.optimizer == "muon") {
    Muon::Options muon{.weight_decay = decay};
    if (config.is_of_maps()) return muon;
    muon.adamw_for = {"token_embedding"};
    if (!config.model.tied) muon.adamw_for.emplace_back("output_head");
    return muon;
  }
  return AdamW::Options{.weight_decay = decay};
}

// All that must be equal on the ranks: also what may change when a run is resumed.
std::string compared(const TrainConfig& config, const std::string& identity) {
  const std::filesystem::path& file = config.source.held_out_file;
  if (file.empty()) return identity;
  return fmt::format("{} held_out_file={:016x}", identity,
                     TokenFile(file, TokenForm::text, "train: held-out-file").fingerprint());
}

Trainer::Options trainer_options(const TrainConfig& config, const std::string& identity) {
  Trainer::Options options{.optimizer = optimizer_options(config),
                           .groups = groups_of(config.groups),
                           .max_norm = config.max_norm,
                           .seed = config.seed,
                           .identity = identity};
  if (config.loss_scale != 0) options.loss_scale = LossScaler::Options{.scale = config.loss_scale};
  options.label_smoothing = config.label_smoothing;
  options.z_loss = config.z_loss;
  options.freeze = FreezeSchedule::from_text(config.freeze);
  if (config.ema != 0) options.ema = Ema::Options{.decay = config.ema, .warm_up = true};
  return options;
}

// The place of this rank's rows among so many: each data axis divides those of the axis before.
Chunk part_of(const DeviceMesh& data, std::int64_t rows) {
  Chunk part{0, rows};
  for (const DeviceMesh& axis : data.each_axis()) {
    const Chunk inner = chunk_of(part.size, axis.size(), axis.rank());
    part = {part.offset + inner.offset, inner.size};
  }
  return part;
}

}  // namespace

std::vector<ParameterGroup> groups_of(const std::string& text) {
  std::vector<ParameterGroup> groups;
  if (text.empty()) return groups;
  for (const std::string_view one : parts_of(text, ';')) {
    ParameterGroup group;
    const std::vector<std::string_view> parts = parts_of(one, ':');
    std::optional<double> rate;
    for (const std::string_view pattern : parts_of(parts[0], ',')) group.patterns.emplace_back(pattern);
    for (std::size_t i = 1; i < parts.size(); ++i) {
      const std::size_t equals = std::min(parts[i].find('='), parts[i].size());
      const std::string_view key = parts[i].substr(0, equals);
      const std::optional<double> value =
          equals == parts[i].size() ? std::nullopt : number_of(parts[i].substr(equals + 1));
      std::optional<double>& to = key == "rate" ? rate : group.weight_decay;
      if (!value || !(*value >= 0 && std::isfinite(*value)) || (key != "rate" && key != "decay") || to)
        bad_training(fmt::format(
            "groups has \"{}\"; expected rate=NUMBER or decay=NUMBER, each at most once, of 0 or more",
            parts[i]));
      to = value;
    }
    group.rate = rate.value_or(1);
    if (parts.size() == 1 || parts[0].empty())
      bad_training(fmt::format("groups has \"{}\"; expected PATTERN,...:rate=NUMBER:decay=NUMBER", one));
    groups.push_back(std::move(group));
  }
  return groups;
}

int data_ranks_of(const MeshShape& mesh) {
  int ranks = 1;
  for (const char* axis : {"dp", "dp_replicate", "dp_shard", "ep"})
    if (mesh.has(axis)) ranks *= mesh.size(axis);
  return ranks;
}

int threads_per_rank(int asked, int ranks) {
  if (asked > 0) return asked;
  if (const auto set = env::get_int("WEFT_THREADS", 1, 4096)) return static_cast<int>(*set);
  cpu_set_t cores;
  CPU_ZERO(&cores);
  const int usable = sched_getaffinity(0, sizeof(cores), &cores) == 0 ? CPU_COUNT(&cores) : 1;
  return std::max(1, usable / ranks);
}

void TrainConfig::fill_in() {
  if (kind == "dense" && has_experts())
    bad_training(fmt::format("experts is {} with --model dense; expected 0, or --model moe", moe.experts));
  if (kind == "moe" && moe.experts == 0) moe.experts = 8;
  if (kind.empty()) kind = has_experts() ? "moe" : "dense";
  kind_of(*this).fill_in(*this);
  if (floor_lr == -1) floor_lr = peak_lr / 10;
}

Schedule TrainConfig::rates() const {
  Schedule s{schedule_form_from_name(schedule), peak_lr, floor_lr, warmup, steps};
  if (warmup == -1) s.warmup = s.form == ScheduleForm::none ? 0 : std::min<std::int64_t>(100, steps / 3);
  s.shape = decay_shape_from_name(decay_shape);
  if (decay_steps != -1)
    s.decay = decay_steps;
  else if (s.form == ScheduleForm::wsd)
    s.decay = std::max<std::int64_t>(1, steps / 5);
  return s;
}

PipelineForm TrainConfig::pipeline_form() const {
  PipelineForm form;
  if (pipeline.find_first_of("./") != std::string::npos) {
    form.schedule = read_pipeline_schedule(pipeline);
    return form;
  }
  form.kind = pipeline_kind(pipeline);
  form.stages_per_rank = stages_per_rank != 0                     ? stages_per_rank
                         : form.kind == PipelineKind::interleaved ? 2
                                                                  : 1;
  return form;
}

MeshShape TrainConfig::check(int ranks) const {
  const ModelKind& of_kind = kind_of(*this);
  of_kind.check_flags(*this);
  if (tp < 1) bad_training(fmt::format("tp is {}; expected 1 or more", tp));
  if (pp < 1) bad_training(fmt::format("pp is {}; expected 1 or more", pp));
  if (domain < 1) bad_training(fmt::format("domain is {}; expected 1 or more", domain));
  if (dp != -1 && dp < 1) bad_training(fmt::format("dp is {}; expected 1 or more", dp));
  if (ep < 1 || (ep > 1 && !has_experts()))
    bad_training(fmt::format("ep is {}; expected 1{}", ep,
                             has_experts() ? " or more" : ", since the model has no experts"));
  std::vector<MeshAxis> of_mesh;
  if (pp > 1) of_mesh.push_back({"pp", pp});
  of_mesh.push_back({"dp", dp});
  if (has_experts()) of_mesh.push_back({"ep", ep});
  of_mesh.push_back({"tp", tp});
  if (domain > 1) of_mesh.push_back({"domain", domain});
  MeshShape mesh = MeshShape(of_mesh).fit(ranks);
  const int of_dp = mesh.size("dp"), data_ranks = of_dp * ep;
  if (data != "ddp" && data != "fsdp" && data != "hsdp")
    bad_training(fmt::format("data is \"{}\"; expected ddp, fsdp or hsdp", data));
  if (replicate != 0 && data != "hsdp")
    bad_training(fmt::format("replicate is {} with data \"{}\"; it is of hsdp alone", replicate, data));
  if (data == "hsdp") {
    const int copies = replicate == 0 ? 2 : replicate;
    if (copies < 1 || of_dp % copies != 0)
      bad_training(fmt::format("replicate is {}; expected a number that divides dp={}", copies, of_dp));
    std::vector<MeshAxis> axes;
    if (pp > 1) axes.push_back({"pp", pp});
    axes.insert(axes.end(), {{"dp_replicate", copies}, {"dp_shard", of_dp / copies}});
    if (has_experts()) axes.push_back({"ep", ep});
    axes.push_back({"tp", tp});
    if (domain > 1) axes.push_back({"domain", domain});
    mesh = MeshShape(axes);
  }
  if (activations == "bf16" && weights != "bf16")
    bad_training(fmt::format("activations is bf16 with weights {}; expected --weights bf16", weights));
  if (exact && activations == "bf16") bad_training("activations is bf16 with --exact; expected f32");
  ac_mode_of(ac);
  if (ac_every < 1 || (ac_every > 1 && ac != "full"))
    bad_training(
        fmt::format("ac-every is {} with ac \"{}\"; expected 1, or more with ac full", ac_every, ac));
  if (global_batch < data_ranks)
    bad_training(fmt::format("batch is {}; expected at least one {} for each of {}={}", global_batch,
                             is_of_maps() ? "map" : "sequence", ep > 1 ? "dp x ep" : "dp", data_ranks));
  if (micro_batches < 1) bad_training(fmt::format("micro-batches is {}; expected 1 or more", micro_batches));
  if (micro_batches > 1 && (global_batch % data_ranks != 0 || global_batch / data_ranks < micro_batches))
    bad_training(
        fmt::format("micro-batches is {}; expected as many sequences for each of dp={}, and one or "
                    "more for each micro-batch; batch is {}",
                    micro_batches, data_ranks, global_batch));
  if (micro_batches > 1 && exact) {
    if (global_batch % micro_batches != 0)
      bad_training(fmt::format("exact: micro-batches is {}; expected a divisor of batch, {}", micro_batches,
                               global_batch));
    expect_exact_parts("micro-batch: sequences", global_batch / micro_batches, data_ranks);
  }
  if (float8 != "none") float8_recipe_from_name(float8);
  if (float8 == "none" && float8_scales == "whole")
    bad_training("float8-scales is whole; expected a recipe in --float8");
  of_kind.check_sizes(*this, mesh);
  if (steps < 1) bad_training(fmt::format("steps is {}; expected 1 or more", steps));
  if (!(max_norm >= 0)) bad_training(fmt::format("clip is {}; expected 0 (no clipping) or more", max_norm));
  if (!(loss_scale >= 0 && std::isfinite(loss_scale)))
    bad_training(fmt::format("loss-scale is {}; expected 0 (none), or a finite number above 0", loss_scale));
  FreezeSchedule::from_text(freeze);
  if (!(ema >= 0 && ema < 1))
    bad_training(fmt::format("ema is {}; expected 0 (none) or more, and less than 1", ema));
  if (threads < 0)
    bad_training(fmt::format("threads is {}; expected 1 or more, or 0 for a share of the cores", threads));
  if (!(floor_lr >= 0 && floor_lr <= peak_lr))
    bad_training(fmt::format("lr-floor is {} and lr {}; expected 0 <= lr-floor <= lr", floor_lr, peak_lr));
  rates().check();
  groups_of(groups);
  return mesh;
}

namespace {

// The pairs of --init-remap.
std::vector<std::pair<std::string, std::string>> renames_of(const std::string& text) {
  std::vector<std::pair<std::string, std::string>> all;
  if (text.empty()) return all;
  for (const std::string_view part : parts_of(text, ',')) {
    const std::size_t at = part.find('=');
    if (at == std::string_view::npos || at == 0 || at + 1 == part.size() ||
        part.find('=', at + 1) != std::string_view::npos)
      bad_training(fmt::format("init-remap has \"{}\"; expected OLD=NEW, two paths", part));
    all.emplace_back(part.substr(0, at), part.substr(at + 1));
  }
  return all;
}

// Names in a checkpoint are "param.<path>" and "buffer.<path>". `used` learns which pairs had a tensor.
Remap remap_of(const std::vector<std::pair<std::string, std::string>>& renames, std::vector<bool>& used) {
  return [&](std::string_view name, const Shape& shape) -> std::vector<RemappedTensor> {
    const std::size_t dot = name.find('.') + 1;
    const std::string_view path = name.substr(dot);
    for (std::size_t i = 0; i < renames.size(); ++i) {
      const auto& [old, now] = renames[i];
      if (!path.starts_with(old) || (path.size() > old.size() && path[old.size()] != '.')) continue;
      used[i] = true;
      return {{std::string(name.substr(0, dot)) + now + std::string(path.substr(old.size())), shape, 0}};
    }
    return {};
  };
}

// The same model, with the parameters of another run if the configuration names one.
ParallelModel& initialised(ParallelModel& model, const TrainConfig& config, bool resumes) {
  if (resumes || config.init_from.empty()) return model;
  InitOptions options;
  if (!config.init_except.empty())
    for (const std::string_view pattern : parts_of(config.init_except, ','))
      options.except.emplace_back(pattern);
  options.left_out = options.except;
  const auto renames = renames_of(config.init_remap);
  std::vector<bool> used(renames.size());
  if (!renames.empty()) options.remap = remap_of(renames, used);
  if (model.stages)
    init_stages_from(config.init_from, model.stages, *model.model, model.parameters(), model.buffers(),
                     options);
  else
    init_from(config.init_from, model.mesh, *model.model, options);
  for (std::size_t i = 0; i < renames.size(); ++i)
    if (!used[i])
      bad_training(fmt::format("init-remap has \"{}={}\", and \"{}\" has no \"{}\"; expected a path of it",
                               renames[i].first, renames[i].second, config.init_from.string(),
                               renames[i].first));
  return model;
}

}  // namespace

Training::Training(ProcessGroup& group, const TrainConfig& config, bool resumes)
    : config_(config),
      kind_(kind_of(config)),
      samples_(kind_.samples(config, group.context())),
      identity_(identity_of(config)),
      compute_(group.context(), threads_per_rank(config.threads, group.size())),
      parts_(build_parallel_model(kind_.recipe(config), DeviceMesh(group, config.check(group.size())),
                                  compute_, build_options(config))),
      trainer_(initialised(parts_, config, resumes), compute_,
               trainer_options(config, compared(config, identity_))),
      schedule_(config.rates()),
      order_(samples_->population(), config.seed),
      part_(Sampler(parts_.data, samples_->population(), config.global_batch, config.seed).part()) {}

// Hooks that show the outputs of all modules, each once: not when an activation checkpoint runs again.
std::vector<HookHandle> Training::see_activations(const See& see) {
  std::vector<HookHandle> hooks;
  parts_.model->visit([&](Module& module) {
    hooks.push_back(
        module.add_hook(Module::HookPoint::post_forward, [this, &see](Module& m, Tensors& out, Frame& frame) {
          if (frame.recomputing()) return;
          for (std::size_t i = 0; i < out.size(); ++i) {
            std::string path = m.path().empty() ? "model" : m.path();
            if (out.size() > 1) path += fmt::format("[{}]", i);
            if (config_.micro_batches > 1) path += fmt::format("@{}", frame.pass().micro_batch);
            see("activation", path, out[i]);
          }
        }));
  });
  return hooks;
}

weft::Trainer::Result Training::step(const See& see) {
  std::vector<std::int64_t> numbers;
  for (std::int64_t i = 0; i < part_.size; ++i) numbers.push_back(order_.number(drawn_ + part_.offset + i));
  const BatchRows rows = samples_->training(numbers, cut());
  const auto with_batches = [&](const auto& use) {
    return std::visit([&](const auto& batches) { return use(std::span(batches)); }, rows.batches);
  };
  const double lr = schedule_.at(trainer_.steps());
  drawn_ += config_.global_batch;
  if (!see) {
    const Trainer::Result result =
        with_batches([&](const auto batches) { return trainer_.step(batches, lr); });
    if (config_.has_experts()) balance_ = expert_balance(parts_);
    return result;
  }
  {
    std::vector<HookHandle> hooks;
    if (!parts_.stages) hooks = see_activations(see);  // a stage runs on its own ranks alone
    with_batches([&](const auto batches) { return trainer_.backward(batches); });
  }
  // By path: the uses of a tied weight in a pipeline have one.
  std::vector<std::pair<std::string, const Parameter*>> all;  // null: of another stage
  const std::vector<Parameter*> own = parts_.parameters();
  for (const Parameter* p : parts_.model->parameters()) {
    if (std::ranges::any_of(all, [&](const auto& named) { return named.first == p->path(); })) continue;
    const bool here = std::ranges::count(own, p) > 0 && (!parts_.stages || parts_.is_own(p->path()));
    all.emplace_back(p->path(), here ? p : nullptr);
  }
  for (auto named = all.rbegin(); named != all.rend(); ++named) {
    const Parameter* const p = named->second;
    const bool any = p != nullptr && p->has_gradient();  // a frozen one has none
    if (const Tensor t = on_all_stages(any ? p->gradient() : Tensor())) see("gradient", named->first, t);
  }
  const Trainer::Result result = trainer_.update(lr);
  if (config_.has_experts()) balance_ = expert_balance(parts_);
  for (const auto& [path, p] : all)
    see("parameter", path, on_all_stages(p != nullptr ? p->master() : Tensor()));
  if (!parts_.stages)
    trainer_.optimizer().visit_state(
        [&](const std::string& path, std::string_view name, const Tensor& state) {
          see("state", fmt::format("{}.{}", path, name), state);
        });
  return result;
}

// `own`: null on the ranks of other stages. In a pipeline returns the whole tensor, on all ranks; null if no
// stage has one.
Tensor Training::on_all_stages(const Tensor& own) {
  if (!parts_.stages) return own;
  ProcessGroup& group = parts_.stages.group();
  const Tensor whole = own ? full(own) : Tensor();
  std::vector<std::int64_t> mine{whole ? whole.shape().rank() : -1};
  for (int dim = 0; dim < Shape::kMaxDims; ++dim)
    mine.push_back(whole && dim < mine[0] ? whole.size(dim) : 0);
  std::vector<std::int64_t> all(mine.size() * static_cast<std::size_t>(group.size()));
  group.all_gather(mine, all).wait();
  for (int owner = 0; owner < group.size(); ++owner) {
    const auto of = std::span(all).subspan(static_cast<std::size_t>(owner) * mine.size(), mine.size());
    if (of[0] < 0) continue;
    std::vector<std::int64_t> dims(of.begin() + 1, of.begin() + 1 + of[0]);
    const Tensor t = whole ? whole : Tensor(group.context(), Shape(dims));
    group.broadcast(Buffer(t), owner).wait();
    return t.with_layout(replicated_layout(parts_.mesh, t.shape()));
  }
  return {};
}

weft::Trainer::Evaluation Training::evaluate(std::int64_t most_batches) {
  std::optional<Optimizer::Swapped> values;
  if (config_.optimizer == "schedule-free") values.emplace(trainer_.optimizer());
  const std::int64_t all = (samples_->held_out() + config_.global_batch - 1) / config_.global_batch;
  const std::int64_t count = most_batches == 0 ? all : std::min(most_batches, all);
  weft::Trainer::Evaluation mean;
  // One batch after the other, so that memory holds one.
  for (std::int64_t batch = 0; batch < count; ++batch) {
    std::optional<BatchRows> rows;
    try {
      rows = samples_->held_out(batch * config_.global_batch, cut(),
                                [&](std::int64_t global) { return part_of(parts_.data, global); });
    } catch (...) {
      trainer_.give_up();  // the others wait in evaluate()
      throw;
    }
    if (!rows) continue;
    const weft::Trainer::Evaluation one =
        std::visit([&](const auto& batches) { return trainer_.evaluate(std::span(batches)); }, rows->batches);
    mean.loss += one.loss * static_cast<double>(one.tokens);
    mean.tokens += one.tokens;
  }
  if (mean.tokens == 0) bad_training("no held-out token has a label; expected more held-out text");
  mean.loss /= static_cast<double>(mean.tokens);
  mean.perplexity = std::exp(mean.loss);
  return mean;
}

// The samples of a checkpoint that does not say how many it has drawn: those of its steps.
CheckpointExtra Training::resume(const std::filesystem::path& directory) {
  CheckpointInfo info = trainer_.load_newest(directory);
  const auto found = info.extra.find(kSamplesDrawn);
  drawn_ = trainer_.steps() * config_.global_batch;
  if (found == info.extra.end()) return std::move(info.extra);
  const auto drawn = parse_integer<std::int64_t>(found->second);
  if (!drawn || *drawn < 0)
    bad_training(fmt::format("resume: \"{}\" of the checkpoint is \"{}\"; expected a number of samples",
                             kSamplesDrawn, found->second));
  drawn_ = *drawn;
  return std::move(info.extra);
}

std::string identity_of(const TrainConfig& config) {
  const Schedule rates = config.rates();
  std::string identity =
      fmt::format("{} batch={} steps={} warmup={} lr={} floor={} decay={} clip={} seed={}",
                  kind_of(config).identity(config), config.global_batch, config.steps, rates.warmup,
                  config.peak_lr, config.floor_lr, config.weight_decay, config.max_norm, config.seed);
  if (config.loss_scale != 0) identity += fmt::format(" loss_scale={}", config.loss_scale);
  if (config.weights != "f32") identity += fmt::format(" weights={}", config.weights);
  if (config.activations != "f32") identity += fmt::format(" activations={}", config.activations);
  if (config.optimizer != "adamw") identity += fmt::format(" optimizer={}", config.optimizer);
  if (!config.groups.empty()) identity += fmt::format(" groups={}", config.groups);
  if (!config.freeze.empty())
    identity += fmt::format(" freeze={}", to_string(FreezeSchedule::from_text(config.freeze)));
  if (config.ema != 0) identity += fmt::format(" ema={}", config.ema);
  if (rates.form != ScheduleForm::cosine) identity += fmt::format(" schedule={}", name(rates.form));
  if (rates.form == ScheduleForm::wsd)
    identity += fmt::format(" decay_steps={} decay_shape={}", rates.decay, name(rates.shape));
  if (config.exact) identity += " exact=1";
  return identity;
}

std::map<std::string, std::string> parts_of_identity(const std::string& identity) {
  std::map<std::string, std::string> parts;
  for (const std::string_view word : parts_of(identity, ' ')) {
    const std::size_t equals = std::min(word.find('='), word.size());
    parts.emplace(word.substr(0, equals), word.substr(std::min(equals + 1, word.size())));
  }
  return parts;
}

MoETransformerConfig experts_of_identity(const std::string& identity, const TransformerConfig& transformer,
                                         const std::string& where) {
  const std::map<std::string, std::string> parts = parts_of_identity(identity);
  const auto text = [&](const char* name) {
    const auto at = parts.find(name);
    return at == parts.end() ? std::string() : at->second;
  };
  const auto read = [&](const char* name, auto& to) {
    const auto value = number_of(text(name));
    if (!value)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: {} is \"{}\"; expected a number", where, name, text(name)));
    to = static_cast<std::remove_reference_t<decltype(to)>>(*value);
  };
  TrainConfig config;
  config.model = transformer;
  read("experts", config.moe.experts);
  read("top_k", config.moe.router.top_k);
  read("expert_hidden", config.moe.expert_hidden);
  read("shared_hidden", config.moe.shared_hidden);
  read("every", config.moe.every);
  read("aux_loss", config.moe.router.aux_loss);
  read("capacity_factor", config.capacity_factor);
  config.router = text("router");
  config.router_bias = text("router_bias");
  return config.moe_model();
}

CheckpointExtra Training::extra() const {
  CheckpointExtra words{{"run", identity_}, {kSamplesDrawn, std::to_string(drawn_)}};
  if (tokenizer() != nullptr) words.emplace(kTokenizerHash, hash_text(*tokenizer()));
  if (const std::string model = kind_.sample_text(config_); !model.empty())
    words.emplace(config_.has_experts() ? kExpertsTransformer : "model", model);
  return words;
}

std::string hash_text(const Tokenizer& tokenizer) { return fmt::format("{:016x}", tokenizer.fingerprint()); }

// The uses of a tied weight in a pipeline have one path.
std::vector<const Parameter*> Training::parameters() const {
  std::vector<const Parameter*> all;
  std::set<std::string> seen;
  for (const Parameter* p : parts_.model->parameters())
    if (seen.insert(p->path()).second) all.push_back(p);
  return all;
}

std::int64_t Training::parameter_count() const {
  std::int64_t n = 0;
  for (const Parameter* p : parameters()) n += p->global_shape().count();
  return n;
}

}  // namespace weft::tools
