#include "weft/train/checkpoint.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <deque>
#include <functional>
#include <map>
#include <optional>
#include <set>
#include <string>
#include <vector>

#include "checkpoint/index/index.hpp"
#include "train/stage_tensors.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

constexpr std::string_view kOfOptimizer = "optimizer.", kOfEma = "ema.", kOfBuffers = "buffer.",
                           kOfParameters = "param.";

struct Saved {
  std::vector<Parameter*> parameters;
  std::vector<ModuleBuffer*> buffers;
  bool of_model;  // these are all tensors of a model: its checkpoint may hold nothing else
};

Saved saved_of(std::span<Parameter* const> parameters) {
  return {{parameters.begin(), parameters.end()}, {}, false};
}

Saved saved_of(const Module& model) {
  Saved saved{model.parameters(), model.buffers(), true};
  std::erase_if(saved.buffers, [](const ModuleBuffer* b) { return !b->saved(); });
  return saved;
}

Saved saved_of(std::span<Parameter* const> parameters, std::span<ModuleBuffer* const> buffers) {
  Saved saved{{parameters.begin(), parameters.end()}, {buffers.begin(), buffers.end()}, true};
  std::erase_if(saved.buffers, [](const ModuleBuffer* b) { return !b->saved(); });
  return saved;
}

// Exists while masters are written. At its end the weights are made again from the masters, even if writing
// failed halfway; a parameter without values then has none.
class MastersWritten {
 public:
  explicit MastersWritten(const std::vector<Parameter*>& parameters) : parameters_(parameters) {}
  MastersWritten(const MastersWritten&) = delete;
  MastersWritten& operator=(const MastersWritten&) = delete;
  ~MastersWritten() {
    for (Parameter* p : parameters_)
      if (whole_ || p->has_values()) p->write_master();
  }
  void whole() noexcept { whole_ = true; }

 private:
  const std::vector<Parameter*>& parameters_;
  bool whole_ = false;
};

// Copies on the host of tensors of devices, while a checkpoint is written or read.
class OnHost {
 public:
  // Returns `t` itself, or a copy on the host.
  Tensor of(Compute& compute, const Tensor& t) {
    if (t.device() == Device{}) return t;
    copies_.push_back({&compute, t, to_host(compute.context(), t)});
    return copies_.back().home;
  }
  // Copies the values that were read to the devices.
  void write_back() {
    for (const Copy& c : copies_) copy(c.compute->context(), c.home, c.away, c.away.stream());
    for (const Copy& c : copies_) c.compute->wait();
  }

 private:
  struct Copy {
    Compute* compute;
    Tensor away, home;
  };
  std::vector<Copy> copies_;
};

bool matches_any(const std::vector<std::string>& patterns, std::string_view path) {
  return std::ranges::any_of(patterns, [&](const std::string& s) { return matches_part(s, path); });
}
// "layers.0.norm.weight" of "param.layers.0.norm.weight"
std::string_view path_in(std::string_view name) {
  return name.substr(std::min(name.find('.') + 1, name.size()));
}

// The tensors of a checkpoint under their names in it. Throws if a tensor is Partial, or lacks the layout
// that it needs. `names` and `host` keep the names and the copies on the host.
std::vector<MutableNamedView> tensors_of(std::string_view what, const DeviceMesh& mesh, const Saved& saved,
                                         const TrainingState& state, std::deque<std::string>& names,
                                         OnHost& host) {
  const int ranks = mesh ? mesh.size() : 1;
  std::vector<MutableNamedView> tensors;
  std::set<std::string_view> paths;
  const auto expect_layout = [&](const std::string& path, const LayoutRef& layout) {
    if (layout == nullptr && ranks > 1)
      throw Error(
          ErrorCode::layout,
          fmt::format(
              "{}: {} is a plain tensor; on {} it needs a layout, which says what part of the whole it is",
              what, path, to_string(mesh.shape())));
  };
  for (const Parameter* p : saved.parameters) {
    expect_layout(p->path(), p->layout());
    if (!paths.insert(p->path()).second)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: two parameters have the path {}", what, p->path()));
    tensors.push_back({names.emplace_back(fmt::format("param.{}", p->path())),
                       host.of(p->compute(), p->master()).view(), p->layout()});
  }
  for (const ModuleBuffer* b : saved.buffers) {
    expect_layout(b->path(), b->layout());
    tensors.push_back({names.emplace_back(fmt::format("{}{}", kOfBuffers, b->path())),
                       host.of(b->compute(), b->tensor()).view(), b->layout()});
  }
  // State with a layout has the global shape of its layout, whatever its parameter has by now; other state (a
  // count of steps) is equal on all ranks.
  const auto put = [&](std::string_view owner, std::string_view prefix, const std::string& path,
                       std::string_view name, const Tensor& tensor) {
    if (paths.count(path) == 0)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("{}: the {} has state of {}, which is not among the parameters", what, owner, path));
    tensors.push_back({names.emplace_back(fmt::format("{}{}.{}", prefix, name, path)),
                       host.of(saved.parameters[0]->compute(), tensor).view(),
                       tensor.layout() == nullptr && ranks > 1
                           ? replicated_layout(mesh.root(), tensor.shape())
                           : tensor.layout()});
  };
  if (state.optimizer != nullptr)
    state.optimizer->visit_state([&](const std::string& path, std::string_view name, const Tensor& tensor) {
      put("optimizer", kOfOptimizer, path, name, tensor);
    });
  if (state.ema != nullptr)
    state.ema->entries([&](const std::string& path, std::string_view name, const Tensor& tensor) {
      put("ema", kOfEma, path, name, tensor);
    });
  return tensors;
}

constexpr std::string_view kLoad = "load_checkpoint", kSave = "save_checkpoint";
constexpr std::string_view kNothingRead = "no value has changed", kUndefined = "the values are undefined",
                           kNothingSaved = "nothing is saved";

// The list of the tensors of all stages, for which the ranks exchange messages: if one rank has an error, all
// throw it. All ranks call this, or none.
std::vector<MutableNamedView> list_stages(std::optional<StageTensors>& all, const DeviceMesh& stages,
                                          std::string_view what, std::string_view consequence,
                                          const std::function<std::vector<MutableNamedView>()>& own) {
  std::vector<MutableNamedView> of_rank;
  run_on_all(stages.root(), what, consequence, [&] { of_rank = own(); });
  run_on_all(stages.root(), what, consequence, [&] { all.emplace(stages, of_rank); });
  return all->views();
}

// The tensors that a save lists; it keeps the names and the copies on the host until the save has copied
// them.
class SaveList {
 public:
  // `stages`: the axis of a pipeline; then the list has this rank's parts of the tensors of all stages.
  SaveList(const DeviceMesh& mesh, const Saved& saved, const TrainingState& state, const DeviceMesh* stages)
      : mesh_(mesh), saved_(saved), state_(state), stages_(stages) {}
  std::vector<NamedView> operator()() {
    const auto own = [&] { return tensors_of(kSave, mesh_, saved_, state_, names_, host_); };
    const std::vector<MutableNamedView> tensors =
        stages_ == nullptr || stages_->size() == 1 ? own()
                                                   : list_stages(all_, *stages_, kSave, kNothingSaved, own);
    if (all_) all_->spread();
    return {tensors.begin(), tensors.end()};
  }

 private:
  const DeviceMesh mesh_;
  const Saved& saved_;
  const TrainingState& state_;
  const DeviceMesh* stages_;
  std::optional<StageTensors> all_;
  std::deque<std::string> names_;
  OnHost host_;
};

void save(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
          const Saved& saved, const TrainingState& state, const CheckpointExtra& extra,
          const SaveOptions& options, const DeviceMesh* stages = nullptr) {
  SaveList list(mesh, saved, state, stages);
  save_listed(directory, mesh, step, std::ref(list), extra, options);
}

bool save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
          const Saved& saved, const TrainingState& state, const CheckpointExtra& extra,
          const SaveOptions& options, const DeviceMesh* stages = nullptr) {
  SaveList list(stages != nullptr ? stages->root() : saves.mesh(), saved, state, stages);
  return save_listed(saves, directory, step, std::ref(list), extra, options);
}

constexpr std::string_view kZ = "optimizer.z.", kRates = "optimizer.rates.", kSteps = "optimizer.step.";

std::string joined(std::string_view prefix, std::string_view path) {
  return std::string(prefix).append(path);
}

// The beta1 of the ScheduleFreeAdamW that has trained the parameter; nothing if none has.
std::optional<double> schedule_free_beta(const CheckpointReader& reader, Context& context,
                                         std::string_view path) {
  if (!reader.contains(joined(kZ, path)) || !reader.contains(joined(kRates, path))) return std::nullopt;
  if (reader.read(context, joined(kSteps, path)).as<std::int64_t>()[0] == 0) return std::nullopt;
  const Tensor rates = reader.read(context, joined(kRates, path));
  constexpr std::int64_t kWithBeta = 3;
  if (rates.count() != kWithBeta)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("load_checkpoint: {}: \"{}\" has {} numbers; expected {}: an older version has saved "
                    "it, without the beta1 that gives the values for evaluation",
                    reader.info().folder.string(), joined(kRates, path), rates.count(), kWithBeta));
  return rates.as<double>().back();
}

// y becomes x = y / b1 + (1 - 1/b1) z, as ScheduleFreeAdamW::swap_in() writes it.
void to_evaluation(Compute& compute, const Tensor& y, const Tensor& z, double beta1) {
  kernels::sgd_step(kernels_of(compute), y.data_ptr<float>(), nullptr, z.data_ptr<float>(), y.count(),
                    {1 / beta1 - 1, 0, -1});
}

// The masters, which have been read from `folder` by `remap`, become the values for evaluation.
void masters_to_evaluation(const std::filesystem::path& folder, const DeviceMesh& mesh, const Saved& saved,
                           const DeviceMesh* stages, const Remap& remap) {
  struct Read {
    Parameter* parameter;
    double beta1;
    Tensor z;
  };
  const auto path_of = [](std::string_view name) { return std::string(name.substr(kOfParameters.size())); };
  std::vector<Read> all;
  bool has_any = false;
  run_on_all(mesh, kLoad, kUndefined, [&] {
    const CheckpointReader reader = CheckpointReader::open(folder);
    has_any = has_values_for_evaluation(reader) && (mesh || !saved.parameters.empty());
    if (!has_any) return;
    Context& context = mesh ? mesh.context() : saved.parameters[0]->compute().context();
    std::map<std::string, double, std::less<>> betas;  // by the paths of the model
    for (const std::string& name : reader.names()) {
      if (!name.starts_with(kOfParameters)) continue;
      const auto beta1 = schedule_free_beta(reader, context, path_of(name));
      if (!beta1) continue;
      const std::vector<RemappedTensor> pieces = remap(name, reader.tensor(name).shape);
      if (pieces.empty()) betas.emplace(path_of(name), *beta1);
      for (const RemappedTensor& piece : pieces)
        if (piece.name.starts_with(kOfParameters)) betas.emplace(path_of(piece.name), *beta1);
    }
    for (Parameter* p : saved.parameters)
      if (const auto beta1 = betas.find(p->path()); beta1 != betas.end())
        all.push_back(
            {p, beta1->second,
             Tensor(p->compute().context(), p->master().shape()).with_layout(p->master().layout())});
  });
  if (!has_any) return;
  std::deque<std::string> names;
  std::vector<MutableNamedView> list;
  for (const Read& r : all)
    list.push_back({names.emplace_back(joined(kZ, r.parameter->path())), r.z.view(), r.z.layout()});
  std::optional<StageTensors> of_stages;
  if (stages != nullptr && stages->size() > 1)
    list = list_stages(of_stages, *stages, kLoad, kUndefined, [own = list] { return own; });
  LoadOptions options;
  options.may_leave = [](std::string_view) { return true; };
  // z is cut and named like the parameter that it belongs to.
  options.remap = [&](std::string_view name, const Shape& shape) {
    if (!name.starts_with(kZ)) return std::vector<RemappedTensor>{};
    std::vector<RemappedTensor> pieces = remap(joined(kOfParameters, name.substr(kZ.size())), shape);
    for (RemappedTensor& piece : pieces)
      if (piece.name.starts_with(kOfParameters)) piece.name = joined(kZ, path_of(piece.name));
    return pieces;
  };
  load_listed(
      folder, mesh, [&] { return list; }, options, "the model");
  if (of_stages) of_stages->collect();
  for (const Read& r : all) {
    Compute& compute = r.parameter->compute();
    to_evaluation(compute, r.parameter->write_master(), to_device(compute.context(), r.z, compute.stream()),
                  r.beta1);
  }
}

// `init`: null for the checkpoint of the same run. `stages`: the axis of a pipeline, of whose stages `saved`
// has those of this rank; null: there is none.
CheckpointInfo load(const std::filesystem::path& directory, const DeviceMesh& mesh, const Saved& saved,
                    const TrainingState& state, const InitOptions* init = nullptr,
                    const DeviceMesh* stages = nullptr) {
  std::deque<std::string> names;
  OnHost host;
  std::optional<StageTensors> of_stages;
  LoadOptions options;
  options.may_leave = [&](std::string_view name) {
    return (state.optimizer == nullptr && name.starts_with(kOfOptimizer)) ||
           (state.optimizer == nullptr && state.ema == nullptr && name.starts_with(kOfEma)) ||
           (!saved.of_model && name.starts_with(kOfBuffers)) ||
           (init != nullptr &&
            (matches_any(init->except, path_in(name)) || matches_any(init->left_out, path_in(name))));
  };
  options.remap = remap_old_names;
  if (init != nullptr && init->remap)
    options.remap = [init](std::string_view name, const Shape& shape) {
      std::vector<RemappedTensor> to = init->remap(name, shape);
      return to.empty() ? remap_old_names(name, shape) : to;
    };
  MastersWritten written(saved.parameters);
  CheckpointInfo info = load_listed(
      directory, mesh,
      [&] {
        const auto own = [&] { return tensors_of(kLoad, mesh, saved, state, names, host); };
        if (stages == nullptr || stages->size() == 1) return own();
        return list_stages(of_stages, *stages, kLoad, kNothingRead, own);
      },
      options, "the model");
  if (of_stages) of_stages->collect();
  host.write_back();
  if (state.optimizer == nullptr) masters_to_evaluation(info.folder, mesh, saved, stages, options.remap);
  if (!info.remapped.empty() && (init == nullptr || !init->remap) && !saved.parameters.empty() &&
      (!mesh || mesh.rank() == 0))
    saved.parameters[0]->compute().context().log().write(
        LogLayer::dp, LogLevel::warning,
        fmt::format("load_checkpoint: {}: {} tensor{} stored under older names or shapes: {}{}",
                    info.folder.string(), info.remapped.size(), info.remapped.size() == 1 ? " was" : "s were",
                    info.remapped[0], info.remapped.size() == 1 ? "" : "; and so on"));
  written.whole();
  return info;
}

}  // namespace

void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     std::span<Parameter* const> parameters, const TrainingState& state,
                     const CheckpointExtra& extra, const SaveOptions& options) {
  save(directory, mesh, step, saved_of(parameters), state, extra, options);
}

void save_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh, std::int64_t step,
                     const Module& model, const TrainingState& state, const CheckpointExtra& extra,
                     const SaveOptions& options) {
  save(directory, mesh, step, saved_of(model), state, extra, options);
}

bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                std::span<Parameter* const> parameters, const TrainingState& state,
                const CheckpointExtra& extra, const SaveOptions& options) {
  return save(saves, directory, step, saved_of(parameters), state, extra, options);
}

bool start_save(AsyncCheckpoint& saves, const std::filesystem::path& directory, std::int64_t step,
                const Module& model, const TrainingState& state, const CheckpointExtra& extra,
                const SaveOptions& options) {
  return save(saves, directory, step, saved_of(model), state, extra, options);
}

CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               std::span<Parameter* const> parameters, const TrainingState& state) {
  return load(directory, mesh, saved_of(parameters), state);
}

CheckpointInfo load_checkpoint(const std::filesystem::path& directory, const DeviceMesh& mesh,
                               const Module& model, const TrainingState& state) {
  return load(directory, mesh, saved_of(model), state);
}

Tensor value_for_evaluation(const CheckpointReader& reader, Compute& compute, std::string_view path) {
  Context& context = compute.context();
  const Tensor stored = reader.read(context, joined("param.", path));
  if (const auto beta1 = schedule_free_beta(reader, context, path))
    to_evaluation(compute, stored, reader.read(context, joined(kZ, path)), *beta1);
  return stored;
}

bool has_values_for_evaluation(const CheckpointReader& reader) {
  return std::ranges::any_of(reader.names(),
                             [](const std::string& name) { return name.starts_with(kRates); });
}

namespace {

// `all`: of the whole model; `saved`: of this rank.
CheckpointInfo init(const std::filesystem::path& directory, const DeviceMesh& mesh, const Saved& all,
                    Saved saved, const InitOptions& options, const DeviceMesh* stages) {
  for (const std::string& pattern : options.except) {
    const auto matches = [&](const auto* p) { return matches_part(pattern, p->path()); };
    if (std::ranges::none_of(all.parameters, matches) && std::ranges::none_of(all.buffers, matches))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("init_from: except: nothing in the model matches \"{}\"", pattern));
  }
  const auto kept = [&](const auto* p) { return matches_any(options.except, p->path()); };
  std::erase_if(saved.parameters, kept);
  std::erase_if(saved.buffers, kept);
  return load(directory, mesh, saved, {}, &options, stages);
}

}  // namespace

CheckpointInfo init_from(const std::filesystem::path& directory, const DeviceMesh& mesh, const Module& model,
                         const InitOptions& options) {
  const Saved saved = saved_of(model);
  return init(directory, mesh, saved, saved, options, nullptr);
}

CheckpointInfo init_stages_from(const std::filesystem::path& directory, const DeviceMesh& stages,
                                const Module& model, std::span<Parameter* const> parameters,
                                std::span<ModuleBuffer* const> buffers, const InitOptions& options) {
  return init(directory, stages.root(), saved_of(model), saved_of(parameters, buffers), options, &stages);
}

void save_stages(const std::filesystem::path& directory, const DeviceMesh& stages, std::int64_t step,
                 std::span<Parameter* const> parameters, std::span<ModuleBuffer* const> buffers,
                 const TrainingState& state, const CheckpointExtra& extra, const SaveOptions& options) {
  save(directory, stages.root(), step, saved_of(parameters, buffers), state, extra, options, &stages);
}

bool start_save_stages(AsyncCheckpoint& saves, const std::filesystem::path& directory,
                       const DeviceMesh& stages, std::int64_t step, std::span<Parameter* const> parameters,
                       std::span<ModuleBuffer* const> buffers, const TrainingState& state,
                       const CheckpointExtra& extra, const SaveOptions& options) {
  return save(saves, directory, step, saved_of(parameters, buffers), state, extra, options, &stages);
}

CheckpointInfo load_stages(const std::filesystem::path& directory, const DeviceMesh& stages,
                           std::span<Parameter* const> parameters, std::span<ModuleBuffer* const> buffers,
                           const TrainingState& state) {
  return load(directory, stages.root(), saved_of(parameters, buffers), state, nullptr, &stages);
}

void gather_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                       const FullStateVisitor& see) {
  const Saved saved = saved_of(model);
  std::deque<std::string> names;
  OnHost host;
  const std::vector<MutableNamedView> tensors =
      tensors_of("gather_full_state", mesh, saved, state, names, host);
  gather_full_state(mesh, std::vector<NamedView>(tensors.begin(), tensors.end()), root, see);
}

void set_full_state(const DeviceMesh& mesh, const Module& model, const TrainingState& state, int root,
                    const FullStateSource& give) {
  const Saved saved = saved_of(model);
  std::deque<std::string> names;
  OnHost host;
  MastersWritten written(saved.parameters);
  set_full_state(mesh, tensors_of("set_full_state", mesh, saved, state, names, host), root, give);
  host.write_back();
  written.whole();
}

}  // namespace weft
