#include "weft/models/build.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "mesh/axis_ranks.hpp"
#include "train/float8_conversion.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/exact.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/tp/plan.hpp"

namespace weft {

namespace {

// Throws bad_argument if a pattern matches no parameter, before anything changes.
void freeze(Module& model, const std::vector<std::string>& patterns) {
  const std::vector<Parameter*> parameters = model.parameters();
  for (const std::string& pattern : patterns)
    if (std::ranges::none_of(parameters,
                             [&](const Parameter* p) { return matches_part(pattern, p->path()); }))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("build_parallel_model: frozen: nothing matches \"{}\"", pattern));
  for (Parameter* p : parameters)
    p->set_trainable(
        std::ranges::none_of(patterns, [&](const std::string& s) { return matches_part(s, p->path()); }));
}

void expect_exact(Module& model, const BuildOptions& options, const ParallelModel& built) {
  if (built.mesh.size() > 1 && built.mesh.group().order() != Order::canonical)
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: group \"{}\" adds in the order of its transport, {}; expected a group "
                            "whose Membership has order = canonical",
                            built.mesh.group().name(), built.mesh.group().backend()));
  if (const auto axes = built.tensor.each_axis(); options.tensor.sequence_parallel && axes.size() > 1) {
    std::string names;
    for (const DeviceMesh& axis : axes)
      names += fmt::format("{}{}={}", names.empty() ? "" : " x ", axis.name(), axis.size());
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: sequence_parallel over the axes {}, which reduce one after the other; "
                            "expected one tensor axis, or kv heads for each of its {} ranks",
                            names, built.tensor.size()));
  }
  if (options.activations != DType::f32)
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: activations is {}; expected f32", name(options.activations)));
  if (options.sharding.precision.reduce != DType::f32)
    throw Error(ErrorCode::bad_argument, fmt::format("exact: sharding.precision.reduce is {}; expected f32",
                                                     name(options.sharding.precision.reduce)));
  if (!options.reducer.hook.name.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: the hook \"{}\" of the reducer has no rule for exact mode",
                            options.reducer.hook.name));
  if (built.loss != nullptr && !built.loss->has_exact_rule())
    throw Error(ErrorCode::bad_argument,
                "exact: the loss of the recipe has no rule for exact mode; expected a CrossEntropy, a "
                "MeanSquaredError or a BinaryCrossEntropy");
  expect_exact(model, built.stages ? built.mesh_of_stage() : built.mesh);
}

// Throws if an option is set that no other option makes anybody read.
void expect_options_read(const BuildOptions& o) {
  const BuildOptions usual;
  struct Option {
    const char* name;
    bool is_set;
    std::string value = "set";
  };
  const auto expect_none = [](const char* needs, std::initializer_list<Option> options) {
    for (const Option& option : options)
      if (option.is_set)
        throw Error(ErrorCode::bad_argument,
                    fmt::format("build_parallel_model: options.{} is {}; it needs {}", option.name,
                                option.value, needs));
  };
  const auto shown = [](bool flag) { return flag ? "true" : "false"; };
  if (!o.float8) {
    const Float8Options &f = o.float8_options, &none = usual.float8_options;
    expect_none("options.float8, which names no recipe",
                {{"float8_options.scales", f.scales != none.scales, "whole"},
                 {"float8_options.not_finite", f.not_finite != none.not_finite, "propagate"},
                 {"float8_options.filter.only", !f.filter.only.empty()},
                 {"float8_options.filter.except", !f.filter.except.empty()},
                 {"float8_options.filter.least_elements", f.filter.least_elements != 0,
                  std::to_string(f.filter.least_elements)},
                 {"float8_options.filter.left_out", f.filter.left_out != none.filter.left_out}});
  }
  if (o.data == DataForm::ddp) {
    const FullyShardOptions &s = o.sharding, &none = usual.sharding;
    const auto* const whole = std::get_if<bool>(&s.reshard_after_forward);
    const auto* const ranks = std::get_if<int>(&s.reshard_after_forward);
    const auto dtype = [&](const char* of, DType is, DType normal) {
      return Option{of, is != normal, std::string(name(is))};
    };
    expect_none("options.data fsdp, and that is ddp",
                {{"sharding.blocks", !s.blocks.empty()},
                 dtype("sharding.precision.param", s.precision.param, none.precision.param),
                 dtype("sharding.precision.activations", s.precision.activations, none.precision.activations),
                 dtype("sharding.precision.output", s.precision.output, none.precision.output),
                 dtype("sharding.precision.reduce", s.precision.reduce, none.precision.reduce),
                 {"sharding.precision.cast_inputs", !s.precision.cast_inputs, "false"},
                 {"sharding.reshard_after_forward", s.reshard_after_forward != none.reshard_after_forward,
                  whole != nullptr ? shown(*whole) : std::to_string(*ranks)},
                 {"sharding.prefetch", !s.prefetch, "false"},
                 {"sharding.unused", s.unused != none.unused, "zeros"},
                 {"sharding.cut_already", static_cast<bool>(s.cut_already)},
                 {"sharding.float8", s.float8 != nullptr},
                 {"sharding.only", !s.only.empty()}});
  } else {
    const GradientReducerOptions &r = o.reducer, &none = usual.reducer;
    expect_none(
        "options.data ddp, and that is fsdp",
        {{"reducer.bucket_bytes", r.bucket_bytes != none.bucket_bytes, std::to_string(r.bucket_bytes)},
         {"reducer.unused", r.unused != none.unused, "zeros"},
         {"reducer.compute", r.compute != nullptr},
         {"reducer.hook", !r.hook.name.empty(), fmt::format("\"{}\"", r.hook.name)}});
  }
  if (o.pipeline_axis.empty()) {
    const PipelineForm &p = o.pipeline, &none = usual.pipeline;
    expect_none("options.pipeline_axis, which is empty",
                {{"pipeline.kind", p.kind != none.kind, std::string(name(p.kind))},
                 {"pipeline.stages_per_rank", p.stages_per_rank != none.stages_per_rank,
                  std::to_string(p.stages_per_rank)},
                 {"pipeline.schedule", p.schedule.has_value(),
                  p.schedule ? fmt::format("\"{}\"", p.schedule->name) : std::string()},
                 {"pipeline.weights", !p.weights.empty()},
                 {"pipeline.keep_weights", p.keep_weights != none.keep_weights, shown(p.keep_weights)}});
  }
  if (o.domain_axes.empty())
    expect_none("options.domain_axes, which is empty", {{"domain.dims", o.domain.dims != usual.domain.dims},
                                                        {"domain.rules", !o.domain.rules.empty()}});
  if (o.domain.data)
    throw Error(
        ErrorCode::bad_argument,
        "build_parallel_model: options.domain.data is set; expected none, since options.data_axis names "
        "the axes of samples");
  if (o.ac.mode == AcMode::none)
    expect_none(
        "options.ac.mode full or selective, and that is none",
        {{"ac.modules", !o.ac.modules.empty()}, {"ac.compare_outputs", o.ac.compare_outputs, "true"}});
}

}  // namespace

void ParallelModel::set_trainable(std::span<Parameter* const> these, bool trainable) {
  std::vector<Parameter*> given(these.begin(), these.end());
  for (const TiedWeight& weight : tied)  // the uses that have no gradients of their own to reduce
    if (std::ranges::any_of(weight.uses,
                            [&](const auto& p) { return std::ranges::count(these, p.get()) > 0; }))
      for (std::size_t use = 0; use < weight.uses.size(); ++use) {
        Parameter* const p = weight.uses[use].get();
        if (std::ranges::count(given, p) > 0 || !is_own(weight.modules[use])) continue;
        p->zero_gradient();
        given.push_back(p);
      }
  for (const Parameter* p : given)
    if (p->has_gradient())
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("set_trainable: \"{}\" has a gradient; expected a call between steps", p->path()));
  if (sharded) {
    for (Parameter* p : given) sharded->set_trainable(*p, trainable);
    return;
  }
  const GradientReducerOptions given_before = reducer->options();
  reducer.reset();  // it listens to the parameters that were trained when it was made
  for (Parameter* p : given) p->set_trainable(trainable);
  reducer = std::make_unique<GradientReducer>(parameters(), data, given_before);
}

Tensor ParallelModel::place(const Tensor& rows, std::int64_t global_rows) const {
  Shape global = rows.shape();
  global[0] = global_rows;
  const LayoutRef layout = replicated_layout(mesh, global)->with(data, Shard{0});
  const Tensor placed = as_layout(rows, placement ? placement(layout, global) : layout);
  if (!domain) return placed;
  for (int axis = 0; axis < domain.axes().shape().axis_count(); ++axis)
    if (domain.options().dims[static_cast<std::size_t>(axis)] >= global.rank()) return placed;
  return shard_spatial(placed, domain);
}

const char* ModelBuilder::name(Step step) noexcept {
  switch (step) {
    case Step::model: return "the model";
    case Step::pipeline: return "pipeline parallel";
    case Step::tensor: return "tensor parallel";
    case Step::experts: return "expert parallel";
    case Step::domain: return "domain parallel";
    case Step::float8: return "float8";
    case Step::activation_checkpointing: return "activation checkpointing";
    case Step::data: return "data parallel";
    case Step::values: return "memory and values";
  }
  return "?";
}

// The reason why a step must come before those behind it.
const char* ModelBuilder::reason(Step step) noexcept {
  switch (step) {
    case Step::model: return "";
    case Step::pipeline: return "other steps are for the layers of the stages";
    case Step::tensor: return "layouts must be final before gradients are reduced or divided";
    case Step::experts: return "layouts must be final before gradients are reduced or divided";
    case Step::domain: return "float8 and recomputation run the passes of its layers";
    case Step::float8: return "the weights of its layers are gathered as codes, and run again as they are";
    case Step::activation_checkpointing: return "a block runs again inside the gather of its weights";
    case Step::data: return "a rank must never hold more than its part";
    case Step::values: return "";
  }
  return "?";
}

void ModelBuilder::begin(Step step) {
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "build_parallel_model: " + text);
  };
  if (built_.model == nullptr) refuse(fmt::format("\"{}\" after take()", name(step)));
  if (step == last_) refuse(fmt::format("\"{}\" was done already", name(step)));
  if (step < last_)
    refuse(fmt::format("\"{}\" comes too late, after \"{}\": {}", name(step), name(last_), reason(step)));
  if (last_ < Step::tensor && step > Step::tensor) replicate(*built_.model, built_.mesh);  // it stays whole
  last_ = step;
}

ModelBuilder::ModelBuilder(Recipe recipe, const DeviceMesh& mesh, Compute& compute, BuildOptions options)
    : recipe_(std::move(recipe)), options_(std::move(options)), compute_(&compute) {
  given_mesh("build_parallel_model", mesh, "mesh");
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "build_parallel_model: " + text);
  };
  if (!recipe_.build) refuse(fmt::format("recipe \"{}\" has no build; expected a function", recipe_.name));
  if (options_.compile_model) refuse("compile_model is true; weft has no compiler, and its layers need none");
  expect_options_read(options_);
  if (!recipe_.tokens && !(options_.tensor == TransformerPlanOptions{}))
    refuse(fmt::format("options.tensor is for models of tokens; recipe \"{}\" has none", recipe_.name));
  mesh_ = recipe_.divide ? recipe_.divide(mesh, options_.tensor_axis) : mesh;
  std::vector<std::string> data_axes{options_.data_axis};
  if (!options_.replicate_axis.empty()) data_axes.insert(data_axes.begin(), options_.replicate_axis);
  if (!options_.expert_axis.empty()) data_axes.push_back(options_.expert_axis);
  built_.mesh = mesh_.root();
  built_.data = mesh_.submesh(data_axes);
  built_.tensor = mesh_[options_.tensor_axis];
  for (const int axis : built_.data.root_axes())
    if (std::ranges::count(built_.tensor.root_axes(), axis) > 0)
      refuse(fmt::format("data_axis \"{}\" and tensor_axis \"{}\" share an axis of {}; expected two apart",
                         options_.data_axis, options_.tensor_axis, to_string(built_.mesh.shape())));
  for (const std::string& axis : options_.domain_axes) {
    const DeviceMesh cut = mesh_[axis];
    for (const int of_root : cut.root_axes())
      if (std::ranges::count(built_.data.root_axes(), of_root) > 0 ||
          std::ranges::count(built_.tensor.root_axes(), of_root) > 0)
        refuse(fmt::format("domain_axes has \"{}\", a data or tensor axis of {}; expected another", axis,
                           to_string(built_.mesh.shape())));
  }
  built_.exact = options_.exact;
  built_.options = options_;
  built_.sequence_parallel = options_.tensor.sequence_parallel;
  built_.tokens = recipe_.tokens;
  built_.placement = recipe_.place;
  built_.count = recipe_.count;
  built_.model = recipe_.build();
  if (built_.model == nullptr) refuse(fmt::format("recipe \"{}\" built no model", recipe_.name));
  if (recipe_.loss) built_.loss = recipe_.loss();
  Fnv1a digest;
  for (const std::string* text : {&recipe_.name, &recipe_.description}) digest.add(hash_of(*text));
  for (const Parameter* p : built_.model->parameters()) {
    digest.add(hash_of(p->path()));
    for (const std::int64_t extent : p->global_shape()) digest.add(static_cast<std::uint64_t>(extent));
  }
  built_.recipe_digest = digest.value;
  for (Parameter* p : built_.model->parameters()) p->set_dtype(options_.dtype);
  if (options_.activations == DType::bf16 && options_.dtype != DType::bf16)
    refuse("options.activations is bf16 and options.dtype f32; expected bf16 of both");
  if (options_.data == DataForm::ddp)
    set_activations(*built_.model, {.param = options_.dtype, .activations = options_.activations});
  freeze(*built_.model, options_.frozen);
}

std::vector<Parameter*> ParallelModel::parameters() const {
  if (!stages) return model->parameters();
  std::vector<const Parameter*> twins,
      held;  // of tied weights: all uses but the first, and this rank's first
  for (const TiedWeight& weight : tied) {
    const auto here =
        std::ranges::find_if(weight.modules, [&](const auto& module) { return is_own(module); });
    if (here != weight.modules.end())
      held.push_back(weight.uses[static_cast<std::size_t>(here - weight.modules.begin())].get());
    for (std::size_t use = 1; use < weight.uses.size(); ++use) twins.push_back(weight.uses[use].get());
  }
  std::vector<Parameter*> all;
  for (Parameter* p : model->parameters())
    if (std::ranges::count(held, p) > 0 || (is_own(p->path()) && std::ranges::count(twins, p) == 0))
      all.push_back(p);
  return all;
}

std::vector<ModuleBuffer*> ParallelModel::buffers() const {
  std::vector<ModuleBuffer*> all = model->buffers();
  if (stages) std::erase_if(all, [&](const ModuleBuffer* b) { return !is_own(b->path()); });
  return all;
}

bool ParallelModel::is_own(std::string_view path) const {
  const PipelineSchedule placed = forward_schedule_for(1);
  for (std::size_t stage = 0; stage < stage_paths.size(); ++stage)
    if (placed.rank_of_stage[stage] == stages.rank())
      for (const std::string& module : stage_paths[stage])
        if (is_inside(path, module)) return true;
  return false;
}

DeviceMesh ParallelModel::mesh_of_stage() const {
  std::vector<std::string> names;
  for (const DeviceMesh& axis : mesh.each_axis())
    if (std::ranges::count(stages.root_axes(), axis.root_axes()[0]) == 0) names.push_back(axis.name());
  return names.empty() ? DeviceMesh() : mesh.submesh(names);
}

PipelineSchedule ParallelModel::schedule_for(int micro_batches) const {
  if (pipeline.schedule) return *pipeline.schedule;
  return make_pipeline_schedule(pipeline.kind, stages.size(), micro_batches, pipeline.stages_per_rank);
}

PipelineSchedule ParallelModel::forward_schedule_for(int micro_batches) const {
  if (!pipeline.schedule)
    return make_pipeline_schedule(PipelineKind::forward_only, stages.size(), micro_batches,
                                  pipeline.stages_per_rank);
  PipelineSchedule s = *pipeline.schedule;
  s.micro_batches = micro_batches;
  s.memory.clear();
  for (std::vector<PipelineAction>& list : s.actions) list.clear();
  for (int m = 0; m < micro_batches; ++m)
    for (int stage = 0; stage < s.stages(); ++stage)
      s.actions[static_cast<std::size_t>(s.rank_of_stage[static_cast<std::size_t>(stage)])].push_back(
          {PipelineAction::Kind::forward, stage, m});
  return with_messages(std::move(s));
}

void ModelBuilder::pipeline_parallel() {
  begin(Step::pipeline);
  if (options_.pipeline_axis.empty()) return;
  const auto refuse = [](const std::string& text) {
    throw Error(ErrorCode::bad_argument, "build_parallel_model: pipeline_axis: " + text);
  };
  const auto refuse_with = [&](const char* what) {
    refuse(fmt::format("a pipeline with {} is not supported", what));
  };
  if (options_.data == DataForm::fsdp && options_.exact == Exact::yes)
    refuse_with("DataForm::fsdp and exact mode");
  if (options_.data == DataForm::fsdp && !options_.sharding.blocks.empty()) refuse_with("sharding.blocks");
  if (!options_.domain_axes.empty())
    refuse("a pipeline with domain_axes is not supported: a border has no cut of a map in space");
  if (recipe_.pipeline.empty() || !recipe_.border)
    refuse(fmt::format("recipe \"{}\" has no pipeline or no border; expected both", recipe_.name));
  const DeviceMesh axis = mesh_[options_.pipeline_axis];
  for (const int of_root : axis.root_axes())
    if (std::ranges::count(built_.data.root_axes(), of_root) > 0 ||
        std::ranges::count(built_.tensor.root_axes(), of_root) > 0)
      refuse(fmt::format("\"{}\" is a data or tensor axis of {}; expected another", options_.pipeline_axis,
                         to_string(built_.mesh.shape())));
  const std::vector<std::string> path = pipeline_path(*built_.model, recipe_.pipeline);
  built_.stages = axis;
  built_.pipeline = options_.pipeline;
  if (built_.pipeline.schedule) check_pipeline_schedule(*built_.pipeline.schedule);
  if (built_.pipeline.schedule && !built_.pipeline.schedule->trains())
    refuse(fmt::format("schedule \"{}\" has no backward passes; expected a schedule that trains",
                       built_.pipeline.schedule->name));
  if (!built_.pipeline.schedule && built_.pipeline.kind == PipelineKind::forward_only)
    refuse("kind forward has no backward passes; expected a kind that trains");
  const PipelineSchedule one = built_.pipeline.schedule ? *built_.pipeline.schedule : built_.schedule_for(1);
  if (one.ranks != axis.size())
    refuse(fmt::format("schedule \"{}\" is for {} ranks; {}={}", one.name, one.ranks, options_.pipeline_axis,
                       axis.size()));
  built_.stage_paths = split_stages(path, one.stages(), options_.pipeline.weights);
  const bool sequence = options_.tensor.sequence_parallel && built_.tensor.size() > 1;
  built_.border = [rows = built_.data, mesh = built_.mesh, dtype = options_.activations,
                   shape = recipe_.border,
                   cut = sequence ? built_.tensor : DeviceMesh()](int, const Tensors& inputs) {
    const Shape global = shape(layouts::global_shape(inputs[0]));
    const LayoutRef layout = replicated_layout(mesh, global)->with(rows, Shard{0});
    return PipelineBorder{layout->local_shape(), dtype, layout, cut ? layout->with(cut, Shard{1}) : nullptr};
  };
}

void ModelBuilder::tensor_parallel() {
  begin(Step::tensor);
  if (recipe_.split)
    recipe_.split(*built_.model, built_.tensor, options_);
  else if (supports_tp(*built_.model))
    parallelize(*built_.model, built_.tensor);
  replicate(*built_.model, built_.mesh);
  if (built_.stages) built_.tied = untie(*built_.model);
}

void ModelBuilder::expert_parallel() {
  begin(Step::experts);
  if (options_.expert_axis.empty() && options_.experts.uneven)
    throw Error(
        ErrorCode::bad_argument,
        "build_parallel_model: experts.uneven is true, but expert_axis names no axis; expected both, or "
        "neither");
  if (!options_.expert_axis.empty())
    apply_expert_parallel(*built_.model, mesh_[options_.expert_axis], options_.experts);
}

void ModelBuilder::domain_parallel() {
  begin(Step::domain);
  if (options_.domain_axes.empty()) return;
  DomainOptions domain = options_.domain;
  domain.data = built_.data;
  built_.domain = apply_domain_parallel(*built_.model, mesh_.submesh(options_.domain_axes), domain);
}

void ModelBuilder::float8() {
  begin(Step::float8);
  if (!options_.float8) return;
  if (options_.exact == Exact::yes && built_.domain)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("exact: float8 is {} with domain_axes; expected one of them: float8 layers have no "
                    "rule for maps that are cut",
                    weft::name(*options_.float8)));
  if (!built_.stages) {
    built_.float8 = convert_linears(*built_.model, *options_.float8, options_.float8_options);
    return;
  }
  Float8Options options = options_.float8_options;
  options.not_finite = Float8NotFinite::propagate;  // its check is for passes of the root
  built_.float8 = convert_linears(*built_.model, *options_.float8, options,
                                  [&](const std::string& path) { return built_.is_own(path); });
}

// The loss is computed inside of the head, whatever its layout: after all steps that change how it computes.
void ModelBuilder::chunk_loss() {
  if (options_.loss_chunk == 0) return;
  const auto refuse = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("build_parallel_model: loss_chunk is {}: {}", options_.loss_chunk, text));
  };
  if (options_.loss_chunk < 0) refuse("expected 0 (all tokens at once) or more");
  if (options_.exact == Exact::yes) refuse("exact mode has no rule for it; expected 0");
  if (!options_.pipeline_axis.empty()) refuse("the head of a pipeline is a stage; expected 0");
  if (recipe_.head.empty() || built_.loss == nullptr)
    refuse(fmt::format("recipe \"{}\" has no head or no loss; expected both, or 0", recipe_.name));
  Module* head = nullptr;
  built_.model->visit([&](Module& m) {
    if (m.path() == recipe_.head) head = &m;
  });
  if (head == nullptr) refuse(fmt::format("the model has no \"{}\", which is Recipe::head", recipe_.head));
  if (head->passes() != nullptr)
    refuse(
        fmt::format("\"{}\" has passes of its own, such as those of a float8 layer; expected a plain layer",
                    recipe_.head));
  built_.chunked = std::make_shared<LossInChunks>(options_.loss_chunk);
  head->set_passes(built_.chunked);
}

void ModelBuilder::activation_checkpointing() {
  begin(Step::activation_checkpointing);
  AcPolicy ac = options_.ac;
  if (ac.mode == AcMode::full && ac.modules.empty()) ac.modules = recipe_.blocks;
  apply_ac(*built_.model, ac);
}

void ModelBuilder::data_parallel() {
  begin(Step::data);
  chunk_loss();  // here, because a program must take this step
  if (options_.exact == Exact::yes) {
    expect_exact(*built_.model, options_, built_);
    expect_exact_kernels(*compute_);
    built_.passes_are_exact =
        built_.model->add_hook(Module::HookPoint::pre_forward, [](Module&, Tensors&, Frame& frame) {
          if (frame.pass().training && !frame.exact())
            throw Error(ErrorCode::bad_argument,
                        "exact: a training pass whose Frame is not exact, of a model that was built exact; "
                        "expected Frame(compute, {.exact = Exact::yes})");
        });
  }
  if (options_.data == DataForm::ddp) {
    built_.reducer = std::make_unique<GradientReducer>(built_.parameters(), built_.data, options_.reducer);
    return;
  }
  std::vector<std::string> shard_axes{options_.data_axis};
  if (!options_.expert_axis.empty()) shard_axes.push_back(options_.expert_axis);
  ShardAxes axes(mesh_.submesh(shard_axes));
  if (!options_.replicate_axis.empty()) axes.replicate = mesh_[options_.replicate_axis];
  FullyShardOptions sharding = options_.sharding;
  if (!options_.expert_axis.empty()) sharding.cut_already = mesh_[options_.expert_axis];
  if (built_.stages) {
    for (const std::vector<std::string>& stage : built_.stage_paths)
      for (const std::string& module : stage)
        if (built_.is_own(module)) sharding.only.push_back(module);
    sharding.blocks = sharding.only;
  }
  if (sharding.blocks.empty()) sharding.blocks = recipe_.blocks;
  if (options_.dtype == DType::bf16) sharding.precision.param = DType::bf16;
  if (options_.activations == DType::bf16) sharding.precision.activations = DType::bf16;
  if (built_.float8 && !built_.float8->linears()->layers().empty())
    sharding.float8 = built_.float8->linears();
  if (options_.exact == Exact::yes && !WEFT_MUTANT("exact_inputs_cast"))
    sharding.precision.cast_inputs = false;  // other forms cast none
  built_.sharded = fully_shard(*built_.model, axes, sharding);
}

void ModelBuilder::memory_and_values() {
  begin(Step::values);
  if (!built_.stages) {
    materialise(*built_.model, *compute_, options_.weights);
    initialise(*built_.model, options_.seed);
    return;
  }
  for (Parameter* p : built_.parameters()) {
    p->materialise(*compute_, options_.weights);
    initialise(*p, options_.seed);
  }
  for (ModuleBuffer* b : built_.buffers()) {
    b->materialise(*compute_, options_.weights);
    initialise(*b, options_.seed);
  }
}

ParallelModel ModelBuilder::take() {
  for (const auto& [step, done] :
       {std::pair{Step::data, built_.reducer || built_.sharded}, {Step::values, last_ == Step::values}})
    if (!done)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("build_parallel_model: take() without \"{}\"", name(step)));
  return std::move(built_);
}

ParallelModel build_parallel_model(const Recipe& recipe, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options) {
  ModelBuilder builder(recipe, mesh, compute, options);
  builder.pipeline_parallel();
  builder.tensor_parallel();
  builder.expert_parallel();
  builder.domain_parallel();
  builder.float8();
  builder.activation_checkpointing();
  builder.data_parallel();
  builder.memory_and_values();
  return builder.take();
}

ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options) {
  given_mesh("build_parallel_model", mesh, "mesh");
  return build_parallel_model(transformer_recipe(config), mesh, compute, options);
}

}  // namespace weft
