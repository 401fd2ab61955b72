#include "weft/models/build.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/init.hpp"
#include "weft/tp/parallelize.hpp"

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

// Whether the pattern matches the path, or the path of a module above it.
bool is_below(std::string_view pattern, std::string_view path) {
  for (std::size_t end = path.find('.'); end != std::string_view::npos; end = path.find('.', end + 1))
    if (matches(pattern, path.substr(0, end))) return true;
  return matches(pattern, path);
}

// Throws bad_argument where a pattern matches no parameter, before anything changes.
void freeze(Module& model, const std::vector<std::string>& patterns) {
  const std::vector<Parameter*> parameters = model.parameters();
  for (const std::string& pattern : patterns)
    if (std::ranges::none_of(parameters, [&](const Parameter* p) { return is_below(pattern, p->path()); }))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("build_parallel_model: frozen: nothing matches \"{}\"", pattern));
  for (Parameter* p : parameters)
    p->set_trainable(
        std::ranges::none_of(patterns, [&](const std::string& s) { return is_below(s, p->path()); }));
}

}  // namespace

Tensor ParallelModel::place(const Tensor& rows, std::int64_t global_rows) const {
  Shape global = rows.shape();
  global[0] = global_rows;
  return as_layout(rows, make_layout(mesh, {{data.name(), Shard{0}}}, global));
}

// The order of the parts, and why it is this one.
ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options) {
  given_mesh("build_parallel_model", mesh, "mesh");
  ParallelModel built{mesh.root(), mesh[options.data_axis], mesh[options.tensor_axis], nullptr, nullptr};
  for (const int axis : built.data.root_axes())
    if (std::ranges::count(built.tensor.root_axes(), axis) > 0)
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("build_parallel_model: data_axis \"{}\" and tensor_axis \"{}\" share an axis of {}; "
                      "expected two apart",
                      options.data_axis, options.tensor_axis, to_string(built.mesh.shape())));

  // 1. The tree with its names and global shapes; no memory.
  built.model = std::make_unique<Transformer>(config);
  Transformer& model = *built.model;

  for (Parameter* p : model.parameters()) p->set_dtype(options.dtype);
  freeze(model, options.frozen);

  // 2. The tensor axis, before there is memory: no rank ever holds more than its part.
  parallelize(model, built.tensor, transformer_plan(config, options.tensor));
  replicate(model, built.mesh);

  // 3. The data axis, when all layouts stand: the averager must hear the first gradient that becomes final.
  built.averager = std::make_unique<GradientAverager>(model.parameters(), built.data, options.averager);

  // 4. Memory for this rank's part of each parameter, then values, which depend on seed, path and global
  // index
  //    alone: the same model on every mesh.
  materialise(model, compute, options.weights);
  initialise(model, options.seed);
  return built;
}

}  // namespace weft
