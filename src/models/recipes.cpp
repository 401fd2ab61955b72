// The recipes of the models of this library.
#include "weft/models/recipe.hpp"

#include <fmt/format.h>

#include <memory>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/models/build.hpp"
#include "weft/models/moe_transformer.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/own_plan.hpp"

namespace weft {

namespace {

// `split_logits`: the head is split over the vocabulary and its output is not gathered, as with
// VocabSplit::shard; a head that is tied to a whole embedding stays whole.
Plan plan_of(const TransformerConfig& config, const TransformerPlanOptions& options, bool split_logits) {
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
  if (shard || (split_logits && !config.tied))
    plan.add("output_head.proj", style(Style::vocabulary));
  else if (!config.tied)
    plan.add("output_head.proj", style(Style::column_gathered));
  else if (sequence)
    plan.add("output_head.proj",
             Style::gather_sequence);  // as the embedding, so that both gradients mean one
  return plan;
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

// The plan of the dense model, in which each block has the layers that it has.
Plan moe_plan(const MoETransformerConfig& config, const TransformerPlanOptions& options, bool split_logits) {
  if (options.sequence_parallel)
    throw Error(
        ErrorCode::bad_argument,
        "build_parallel_model: sequence_parallel with a mixture of experts; expected false: tokens are "
        "routed with their whole samples on one rank");
  const std::string mlp = "layers.*.mlp";
  Plan plan;
  const Plan dense = plan_of(config.transformer, options, split_logits);
  for (const Plan::Entry& entry : dense.entries()) {
    const bool of_mlp = entry.pattern == mlp || entry.pattern.starts_with(mlp + ".");
    if (!of_mlp) {
      plan.add(entry.pattern, entry.style);
      continue;
    }
    for (std::int64_t i = 0; i < config.transformer.layers; ++i) {
      const std::string layer = fmt::format("layers.{}.mlp", i), rest = entry.pattern.substr(mlp.size());
      if (!config.has_experts(i))
        plan.add(layer + rest, entry.style);
      else if (config.shared_hidden > 0)
        plan.add(layer + ".shared_expert" + rest, entry.style);
    }
  }
  for (std::int64_t i = 0; i < config.transformer.layers; ++i)
    if (config.has_experts(i)) plan.add(fmt::format("layers.{}.mlp.experts", i), style_named("fed_column"));
  return plan;
}

}  // namespace

Plan transformer_plan(const TransformerConfig& config, const TransformerPlanOptions& options) {
  return plan_of(config, options, false);
}

Recipe transformer_recipe(const TransformerConfig& config) {
  config.check();
  Recipe recipe;
  recipe.name = "transformer";
  recipe.description = transformer_text(config);
  recipe.build = [config] { return std::make_unique<Transformer>(config); };
  recipe.divide = [config](const DeviceMesh& mesh, const std::string& tensor_axis) {
    return with_axis_of_kv_heads(mesh, tensor_axis, config.kv_heads);
  };
  recipe.split = [config](Module& model, const DeviceMesh& tensor, const BuildOptions& options) {
    split_over(model, tensor, plan_of(config, options.tensor, options.loss_chunk > 0), config.kv_heads);
  };
  recipe.blocks = {"layers.*"};
  recipe.loss = [] { return std::make_unique<CrossEntropy>(); };
  recipe.tokens = TokenSizes{config.vocab, config.max_seq};
  recipe.head = "output_head.proj";
  recipe.pipeline = {"token_embedding", "layers.*", "norm", "output_head"};
  recipe.border = [dim = config.dim](const Shape& tokens) { return Shape{tokens[0], tokens[1], dim}; };
  return recipe;
}

Recipe moe_recipe(const MoETransformerConfig& config) {
  config.check();
  Recipe recipe = transformer_recipe(config.transformer);
  recipe.name = "mixture of experts";  // a Trainer compares the options of the mixtures themselves
  recipe.description += fmt::format("every = {}", config.every);
  recipe.build = [config] { return std::make_unique<MoETransformer>(config); };
  recipe.split = [config](Module& model, const DeviceMesh& tensor, const BuildOptions& options) {
    split_over(model, tensor, moe_plan(config, options.tensor, options.loss_chunk > 0),
               config.transformer.kv_heads);
  };
  return recipe;
}

Recipe weather_recipe(const WeatherStageConfig& config) {
  config.check();
  Recipe recipe;
  recipe.name = "weather stage";
  recipe.description = fmt::format("{} {} {} {} {} {} {} {} {}", config.dim, config.depth, config.head_dim,
                                   config.local_window, config.global_window, config.mult, config.dropout,
                                   config.init_std, config.attention_dropout);
  recipe.build = [config] { return std::make_unique<WeatherStage>(config); };
  recipe.blocks = {"layers.*"};
  recipe.loss = [] { return std::make_unique<MeanSquaredError>(); };
  return recipe;
}

Transformer& transformer_of(const ParallelModel& built) {
  auto* const transformer = dynamic_cast<Transformer*>(built.model.get());
  if (transformer == nullptr)
    throw Error(ErrorCode::bad_argument, "transformer_of: the model is no Transformer");
  return *transformer;
}

}  // namespace weft
