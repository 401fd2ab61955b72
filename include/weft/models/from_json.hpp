// Recipes and options as JSON text, for programs in other languages and for files. Values; any thread.
#pragma once

#include <functional>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "weft/models/build.hpp"
#include "weft/models/recipe.hpp"
#include "weft/models/trainer.hpp"

namespace weft {

/// The recipe that a text describes. It is an object with the keys
///   name    for errors; "model" if it is missing
///   model   a layer
///   loss    "cross_entropy", "mean_squared_error" or "binary_cross_entropy"; none if it is missing
///   blocks  a list of patterns, Recipe::blocks
///   plan    the own plan of the whole model (Module::set_own_plan): an object with the names of styles
///           (weft/tp/own_plan.hpp) by the paths of layers: {"up": "column", "down": "row"}
///   pipeline  a list of patterns, Recipe::pipeline
///   border  Recipe::border: a list of extents, "input.0" for one of the first input: ["input.0", 64]
/// or {"transformer": {…}} or {"weather": {…}}, with the fields of TransformerConfig or WeatherStageConfig;
/// or {"moe": {…}}, with the fields of MoETransformerConfig and of its TransformerConfig side by side, and
/// "router", an object with the fields of RouterOptions: {"moe": {"dim": 64, "experts": 8, "router":
/// {"top_k": 2, "bias": "selects"}}}.
///
/// A layer is an object whose key "layer" has the name of a class of weft/nn; the other keys are the
/// arguments of its constructor or the fields of its config, which may be missing if C++ has a default:
///
///     {"name": "classifier", "loss": "binary_cross_entropy", "blocks": ["stages.*"],
///      "model": {"layer": "Sequential", "children": [
///         ["embed", {"layer": "Conv2d", "in": 1, "out": 8, "kernel": 3, "padding": 1}],
///         ["stages", {"layer": "Sequential", "children": [["0", {"layer": "Residual", "branch": …}]]}]]}}
///
/// An extent is a number or [height, width]. Initial values are a number, the standard deviation of a normal
/// distribution, or {"constant": c}. docs/recipes.md lists the layers.
///
/// Throws bad_argument that names the place: `recipe: model.children.embed has no "kernal" (Conv2d); is
/// kernel meant?`, and the errors of the layers' constructors, as `recipe: model.children.embed: …`.
Recipe recipe_from_json(std::string_view text);

/// A layer of the program, for recipe_from_json(). The recipe names it: {"layer": "Scale"}, without other
/// keys.
struct OwnLayer {
  std::string name;                               ///< no name of a layer of the library
  std::function<std::unique_ptr<Module>()> make;  ///< called for each place, and each time the tree is made
};
using OwnLayers = std::vector<OwnLayer>;
/// Like the function above, with layers of the program among those of the library. Throws bad_argument for a
/// name that is taken, too.
Recipe recipe_from_json(std::string_view text, const OwnLayers& own);

/// BuildOptions from an object with the keys data_axis, tensor_axis, replicate_axis, expert_axis,
/// uneven_experts, domain_axes, data ("ddp", "fsdp"), reshard_after_forward (a bool, or a number of ranks),
/// reduce, seed, dtype, activations, frozen, float8, float8_scales, ac ("none", "full", "selective"),
/// ac_modules, ac_every, sequence_parallel, split_vocab, loss_chunk, pipeline_axis, pipeline (the name of a
/// PipelineKind), stages_per_rank, pipeline_file (a file with a schedule, in the place of these two),
/// stage_weights (a list), keep_weights, exact, compile_model.
/// Throws bad_argument for another key, with the nearest known, and for a wrong value.
BuildOptions build_options_from_json(std::string_view text);

/// Trainer::Options from an object with the keys optimizer, groups, max_norm, non_finite ("error", "skip"),
/// seed, loss_scale (the first scale), label_smoothing, z_loss, freeze (FreezeSchedule::from_text), ema (the
/// decay), ema_warm_up. `optimizer` is a name ("adamw", "sgd", "lion", "schedule_free_adamw", "muon") or an
/// object with the key "name" and the fields of its Options; a group is an object with the fields of
/// ParameterGroup. Throws bad_argument for another key, with the nearest known, and for a wrong value.
Trainer::Options trainer_options_from_json(std::string_view text);

}  // namespace weft
