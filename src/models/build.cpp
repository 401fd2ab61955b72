#include "weft/models/build.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/exact.hpp"
#include "weft/nn/init.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft {

Plan transformer_plan(const TransformerConfig& config, const TransformerPlanOptions& options) {
  const bool sequence = options.sequence_parallel, shard = options.vocab == VocabSplit::shard;
  const auto style = [&](const Style& whole) { return sequence ? whole.on_sequence() : whole; };
  Plan plan = {
      {"layers.*.attention", style(Style::enter)},
      {"layers.*.attention.q_proj", style(Style::column)},
      {"layers.*.attention.k_proj", style(Style::column)},
      {"layers.*.attention.v_proj", style(Style::column)},
      {"layers.*.attention.o_proj", style(Style::row)},
      {"layers.*.mlp", style(Style::enter)},
      {"layers.*.mlp.gate_proj", style(Style::column)},
      {"layers.*.mlp.up_proj", style(Style::column)},
      {"layers.*.mlp.down_proj", style(Style::row)},
  };
  if (sequence)
    for (const char* norm : {"layers.*.attention_norm", "layers.*.mlp_norm", "norm"})
      plan.add(norm, Style::sequence);
  if (shard)
    plan.add("token_embedding.embedding", style(Style::row));
  else if (sequence)
    plan.add("token_embedding.embedding", Style::cut_sequence);
  if (shard)
    plan.add("output_head.proj", style(Style::vocabulary));
  else if (!config.tied)
    plan.add("output_head.proj", style(Style::column_gathered));
  else if (sequence)
    plan.add("output_head.proj",
             Style::gather_sequence);  // as the embedding, so that both gradients mean one
  return plan;
}

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

// The axes over which key/value heads are split, the first ones of `tensor`: all axes, unless there are fewer
// heads than ranks. A single head has no segments.
DeviceMesh axes_of_kv_heads(const DeviceMesh& tensor, std::int64_t kv_heads) {
  if (kv_heads >= tensor.size()) return tensor;
  std::vector<std::string> names;
  std::string all;
  std::int64_t ranks = 1;
  for (const DeviceMesh& axis : tensor.each_axis()) {
    all += fmt::format("{}{}={}", all.empty() ? "" : " x ", axis.name(), axis.size());
    if (ranks >= kv_heads) continue;
    names.push_back(axis.name());
    ranks *= axis.size();
  }
  if (ranks != kv_heads)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("build_parallel_model: {} kv heads over {}; expected the first axes to have as many "
                    "ranks: unflatten() it so",
                    kv_heads, all));
  return names.empty() ? DeviceMesh() : tensor.root().submesh(names);
}

// Returns `mesh`, or a mesh of its ranks in which two axes replace the tensor axis: one over kv heads, and
// one over ranks that share a head.
DeviceMesh with_axis_of_kv_heads(const DeviceMesh& mesh, const std::string& axis, std::int64_t kv_heads) {
  const DeviceMesh tensor = mesh[axis];
  if (kv_heads >= tensor.size() || tensor.each_axis().size() > 1) return mesh;
  if (tensor.size() % kv_heads != 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("build_parallel_model: {}={} does not divide into {} kv heads ({} = {} x {} + {}); "
                    "expected as many ranks for each of them",
                    axis, tensor.size(), kv_heads, tensor.size(), kv_heads, tensor.size() / kv_heads,
                    tensor.size() % kv_heads));
  return mesh.unflatten(axis, {{axis + "_kv", static_cast<int>(kv_heads)}, {axis + "_rep", -1}});
}

// If ranks share key/value heads, k and v are split over other axes than the rest, and the boundary before
// them is the boundary of q.
void split_over(Module& model, const DeviceMesh& tensor, const Plan& plan, std::int64_t kv_heads) {
  const DeviceMesh of_kv = axes_of_kv_heads(tensor, kv_heads);
  if (of_kv == tensor) return parallelize(model, tensor, plan);
  Plan rest, shared;
  for (const Plan::Entry& entry : plan.entries())
    if (entry.pattern.ends_with(".k_proj") || entry.pattern.ends_with(".v_proj"))
      shared.add(entry.pattern, style_named("fed_column"));
    else
      rest.add(entry.pattern, entry.style);
  parallelize(model, tensor, rest);
  if (of_kv) parallelize(model, of_kv, shared);
}

void expect_exact(Module& model, const BuildOptions& options, const ParallelModel& built) {
  if (built.mesh.size() > 1 && !built.mesh.group().traits().native_is_canonical)
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: the transport of group \"{}\" adds in an order of its own; expected one "
                            "that adds in canonical order, such as shm",
                            built.mesh.group().name()));
  if (const auto axes = built.tensor.each_axis(); options.tensor.sequence_parallel && axes.size() > 1) {
    std::string names;
    for (const DeviceMesh& axis : axes)
      names += fmt::format("{}{}={}", names.empty() ? "" : " x ", axis.name(), axis.size());
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: sequence_parallel over the axes {}, which reduce one after the other; "
                            "expected one tensor axis, or kv heads for each of its {} ranks",
                            names, built.tensor.size()));
  }
  if (options.sharding.precision.reduce != DType::f32)
    throw Error(ErrorCode::bad_argument, fmt::format("exact: sharding.precision.reduce is {}; expected f32",
                                                     name(options.sharding.precision.reduce)));
  if (!options.reducer.hook.name.empty())
    throw Error(ErrorCode::bad_argument,
                fmt::format("exact: the hook \"{}\" of the reducer has no rule for exact mode",
                            options.reducer.hook.name));
  expect_exact(model, built.mesh);
}

}  // namespace

Tensor ParallelModel::place(const Tensor& rows, std::int64_t global_rows) const {
  Shape global = rows.shape();
  global[0] = global_rows;
  return as_layout(rows, replicated_layout(mesh, global)->with(data, Shard{0}));
}

// Builds the parts in this order; the comments say why.
ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options) {
  given_mesh("build_parallel_model", mesh, "mesh");
  config.check();
  const DeviceMesh whole = with_axis_of_kv_heads(mesh, options.tensor_axis, config.kv_heads);
  std::vector<std::string> data_axes{options.data_axis};
  if (!options.replicate_axis.empty()) data_axes.insert(data_axes.begin(), options.replicate_axis);
  ParallelModel built;
  built.mesh = whole.root(), built.data = whole.submesh(data_axes), built.tensor = whole[options.tensor_axis];
  for (const int axis : built.data.root_axes())
    if (std::ranges::count(built.tensor.root_axes(), axis) > 0)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("build_parallel_model: data_axis \"{}\" and tensor_axis \"{}\" share an axis of {}; "
                      "expected two apart",
                      options.data_axis, options.tensor_axis, to_string(built.mesh.shape())));

  built.exact = options.exact;
  built.sequence_parallel = options.tensor.sequence_parallel;

  // 1. The tree with its names and global shapes, without memory.
  built.model = std::make_unique<Transformer>(config);
  Transformer& model = *built.model;

  for (Parameter* p : model.parameters()) p->set_dtype(options.dtype);
  freeze(model, options.frozen);

  // 2. Splits over the tensor axis before there is memory: no rank ever holds more than its part.
  split_over(model, built.tensor, transformer_plan(config, options.tensor), config.kv_heads);
  replicate(model, built.mesh);

  // Layers take part in float8 as they are split, and before they are gathered: what is gathered may be
  // codes.
  if (options.float8) built.float8 = apply_float8(model, *options.float8, options.float8_options);
  if (options.exact == Exact::yes) expect_exact(model, options, built);

  AcPolicy ac = options.ac;
  if (ac.mode == AcMode::full && ac.modules.empty()) ac.modules = {"layers.*"};
  apply_ac(model, ac);

  // 3. Adds the data axes after all layouts are final, inside the shards of the tensor axis: the reducer must
  //    be notified of the first final gradient, and a rank that shards must never hold more than its part of
  //    its part.
  if (options.data == DataForm::ddp) {
    built.reducer = std::make_unique<GradientReducer>(model.parameters(), built.data, options.reducer);
  } else {
    ShardAxes axes(whole[options.data_axis]);
    if (!options.replicate_axis.empty()) axes.replicate = whole[options.replicate_axis];
    FullyShardOptions sharding = options.sharding;
    if (options.dtype == DType::bf16) sharding.precision.param = DType::bf16;
    if (built.float8) sharding.float8 = built.float8->linears();
    if (options.exact == Exact::yes) sharding.precision.cast_inputs = false;  // other forms cast none
    built.sharded = fully_shard(model, axes, sharding);
  }

  // 4. Memory for this rank's part of each parameter, then values, which depend on seed, path and global
  // index
  //    alone: the same model on every mesh.
  materialise(model, compute, options.weights);
  initialise(model, options.seed);
  return built;
}

}  // namespace weft
