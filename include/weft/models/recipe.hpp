// A recipe says how a model is built for a mesh; build_parallel_model() (weft/models/build.hpp) follows it. A
// value; any thread.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <vector>

#include "weft/mesh/layout.hpp"
#include "weft/mesh/mesh.hpp"
#include "weft/models/transformer.hpp"
#include "weft/models/weather.hpp"
#include "weft/nn/module.hpp"
#include "weft/tp/plan.hpp"

namespace weft {

struct BuildOptions;

/// The sizes of a model whose inputs are tokens and whose outputs are logits. TokenBatch and compute_logits()
/// are for such models.
struct TokenSizes {
  std::int64_t vocab = 0, max_seq = 0;
};

/// Everything that build_parallel_model() has to know of a model. Only `name` and `build` are necessary.
///
///     Recipe pictures{.name = "classifier", .build = [] { return std::make_unique<Classifier>(); },
///                     .blocks = {"stages.*"}, .loss = [] { return std::make_unique<CrossEntropy>(); }};
///     ParallelModel built = build_parallel_model(pictures, mesh, compute, {.data = DataForm::fsdp});
struct Recipe {
  std::string name;  ///< for errors
  /// The sizes and options of the model, in any form. A Trainer compares them between the ranks, as it does
  /// the paths and shapes of the parameters, which do not say all (heads, for example, or a norm's epsilon).
  std::string description = {};
  /// Makes the tree with its names and global shapes, without memory.
  std::function<std::unique_ptr<Module>()> build;
  /// Splits the model over the tensor axis, or axes. Empty: by the own plans of its modules,
  /// parallelize(model, tensor); a model without any then stays whole.
  std::function<void(Module& model, const DeviceMesh& tensor, const BuildOptions& options)> split = {};
  /// The mesh over which the model lies: a mesh of the same ranks in which the tensor axis may be divided.
  /// Empty: `mesh`.
  std::function<DeviceMesh(const DeviceMesh& mesh, const std::string& tensor_axis)> divide = {};
  /// The blocks, as patterns of paths: fully_shard() gathers them one by one, and AcMode::full runs them
  /// again.
  std::vector<std::string> blocks = {};
  /// Makes the loss, ParallelModel::loss. Empty: none. A Trainer gives it the outputs of the model, then the
  /// targets of the batch, then the number of counted elements of all ranks: i64 (1).
  std::function<std::unique_ptr<Module>()> loss = {};
  /// The number of elements over which the loss is a mean, in this rank's rows of a batch, which are on the
  /// host. Empty: the elements of the first target, without labels that are CrossEntropy::kIgnore; without
  /// targets the rows.
  std::function<std::int64_t(std::span<const Tensor> inputs, std::span<const Tensor> targets)> count = {};
  /// The layout of an input or a target whose global shape is `global`: `rows` has the first dimension split
  /// over the data axes. Empty: `rows`. Maps are cut in space after that.
  std::function<LayoutRef(const LayoutRef& rows, const Shape& global)> place = {};
  std::optional<TokenSizes> tokens = {};  ///< of a model of tokens
  /// The path of the last layer, whose output is that of the model: BuildOptions::loss_chunk computes the
  /// loss there. Empty: the model has no such layer.
  std::string head = {};
  /// The modules through which a forward pass goes, one after the other, as patterns (pipeline_path()).
  /// Empty: the model cannot be a pipeline.
  std::vector<std::string> pipeline = {};
  /// The global shape of the tensor between two of these modules, for a first input with global shape
  /// `input`.
  std::function<Shape(const Shape& input)> border = {};
};

/// The transformer: split by transformer_plan(), blocks "layers.*", CrossEntropy. `config` is checked.
Recipe transformer_recipe(const TransformerConfig& config);
/// The stage of a weather model: split by its own plans, blocks "layers.*", MeanSquaredError. Inputs and
/// targets are maps (batch, dim, height, width). `config` is checked.
Recipe weather_recipe(const WeatherStageConfig& config);

}  // namespace weft
