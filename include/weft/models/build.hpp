// Builds a parallel model; this is the only place that fixes the order of its construction.
#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/base/exact.hpp"
#include "weft/domain/domain.hpp"
#include "weft/ep/moe.hpp"
#include "weft/models/recipe.hpp"
#include "weft/nn/loss_in_chunks.hpp"
#include "weft/nn/module.hpp"
#include "weft/pp/pipeline.hpp"
#include "weft/tp/plan.hpp"
#include "weft/train/activation_checkpointing.hpp"
#include "weft/train/float8.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradient_reducer.hpp"

namespace weft {

/// How the tensor axis is used for the vocabulary.
enum class VocabSplit : unsigned char {
  /// The embedding is replicated; the head is split, unless it is tied, and its logits are gathered.
  whole,
  /// Embedding and head, tied or not, are split over the vocabulary, and so are the logits of the model,
  /// which are never gathered: CrossEntropy takes split logits. The vocabulary may have any size, even if the
  /// number of ranks does not divide it.
  shard
};

struct TransformerPlanOptions {
  /// Norms and residual sums work on this rank's part of the sequence (any length): column layers gather the
  /// sequence, and row layers reduce-scatter into it. Ranks send the same number of bytes as without
  /// sequence_parallel, and keep 1/tp of the activations between layers. The gradients of the norms are
  /// Partial on the tensor axis: reduce_gradients() sums them.
  bool sequence_parallel = false;
  VocabSplit vocab = VocabSplit::whole;
  friend bool operator==(const TransformerPlanOptions&, const TransformerPlanOptions&) = default;
};

/// Returns the usual plan: q, k, v, gate and up are split by columns, o and down by rows, with one boundary
/// around each attention and each mlp, so a pass needs two all-reduces per block. (For fewer key/value heads
/// than ranks see build_parallel_model().) The head is split by columns over the vocabulary, and its output
/// is gathered before the loss; with tied embeddings, embedding and head stay whole. The embedding and the
/// norms are replicated. `options` can change the plan.
Plan transformer_plan(const TransformerConfig& config, const TransformerPlanOptions& options = {});

/// How data-parallel ranks hold the parameters.
enum class DataForm : unsigned char {
  ddp,  ///< each rank has all parameters, and gradients are averaged
  /// the parameters are divided over data_axis; if there is a replicate_axis, they are replicated over it
  /// (HSDP)
  fsdp
};

/// How a model is a pipeline over an axis of the mesh.
struct PipelineForm {
  PipelineKind kind = PipelineKind::one_f_one_b;
  int stages_per_rank = 1;  ///< 2 or more with PipelineKind::interleaved
  /// A schedule of one's own, in the place of `kind`. Each step then has its number of micro-batches.
  std::optional<PipelineSchedule> schedule = {};
  /// The time that each module of Recipe::pipeline takes, in any unit. Empty: all take equally long.
  std::vector<double> weights = {};
  /// With DataForm::fsdp: a rank gathers its stages once in a step, and keeps their weights until its end. If
  /// false, each pass gathers the module that it needs, and drops it.
  bool keep_weights = true;
};

/// An option that nothing reads, because another option is missing, is an error:
/// `build_parallel_model: options.pipeline.stages_per_rank is 2; it needs options.pipeline_axis, which is
/// empty`.
struct BuildOptions {
  std::string data_axis = "dp", tensor_axis = "tp";
  /// A second data axis, over which batches are also divided. Empty: there is none.
  std::string replicate_axis = {};
  /// The axis over which experts are divided, a data axis like the others: batches are divided over it, too.
  /// It comes after data_axis in the mesh. Empty: there is none.
  std::string expert_axis = {};
  ExpertParallelOptions experts = {};
  DataForm data = DataForm::ddp;
  /// The axis along which the model is cut into stages; a Trainer then runs the schedule of `pipeline`. Each
  /// rank has memory for its own stages alone, and is given all micro-batches of the step. Empty: none. Not
  /// with domain_axes. Float8 layers pass on values that are not finite, and the norm of the gradients finds
  /// them (Float8NotFinite::propagate). With DataForm::fsdp each module of Recipe::pipeline is a block, whose
  /// gradients are reduced once in a step. Exact mode keeps the gradients of each micro-batch until the end
  /// of the step, and does not go with fsdp in a pipeline.
  std::string pipeline_axis = {};
  PipelineForm pipeline = {};
  /// The axes that cut maps in space, one or two: the first cuts the height. Empty: none.
  std::vector<std::string> domain_axes = {};
  DomainOptions domain = {};  ///< of domain_axes; without its `data`, which is data_axis
  std::uint64_t seed = 0;
  Memory weights = Memory::local;
  /// The dtype in which layers read the parameters: f32, or bf16 with masters in f32.
  DType dtype = DType::f32;
  /// The dtype of activations and their gradients, between layers and over the tensor axis: f32, or bf16 if
  /// `dtype` is bf16. Logits are f32. See MixedPrecision.
  DType activations = DType::f32;
  /// Parameters that are not trained: patterns, as in a Plan, for paths of parameters, or of modules with
  /// all parameters below them.
  std::vector<std::string> frozen = {};
  /// Linear layers with operands of eight bits, by this recipe; see apply_float8(). Nothing: none.
  std::optional<Float8Recipe> float8 = {};
  Float8Options float8_options = {};
  GradientReducerOptions reducer = {};  ///< of DataForm::ddp
  /// Options for DataForm::fsdp; if `dtype` is bf16, precision.param becomes bf16, too, and likewise
  /// `activations`. If `float8` names a recipe, the weights of float8 layers are gathered as codes. Without
  /// patterns of blocks, the blocks of the Recipe are gathered separately, and all other parameters with the
  /// root.
  FullyShardOptions sharding = {};
  /// Which modules run again in backward; mode full without patterns means each
  /// block of the Recipe.
  AcPolicy ac = {};
  /// For models of tokens: how the tensor axis splits the model; see transformer_plan().
  TransformerPlanOptions tensor = {};
  /// A Trainer computes the loss for at most so many tokens of a rank at a time, so that it never holds the
  /// logits of all tokens (LossInChunks). The head is then split over the vocabulary, as with
  /// VocabSplit::shard. 0: all tokens at once. For models with Recipe::head; not in exact mode, nor in a
  /// pipeline.
  std::int64_t loss_chunk = 0;
  /// Exact mode (docs/exact.md): losses, gradients and parameters have the same bits on every mesh whose
  /// numbers of ranks divide kExactBlocks. build_parallel_model() then also throws the errors of
  /// expect_exact(), and bad_argument for a transport that does not add in canonical order.
  Exact exact = Exact::no;
  /// Refused: weft has no compiler. Configurations of other programs may ask for one.
  bool compile_model = false;
};

/// A model over a mesh, ready for its first pass. Destroyed before the mesh.
struct ParallelModel {
  ParallelModel() = default;
  ParallelModel(ParallelModel&&) noexcept = default;
  /// Destroys what this had before, first what was put around the model, then the model.
  ParallelModel& operator=(ParallelModel&& other) noexcept {
    if (this == &other) return *this;
    std::destroy_at(this);
    return *std::construct_at(this, std::move(other));
  }

  /// The root mesh; the data axes (replicate_axis first, expert_axis last); the tensor axis, or axes.
  DeviceMesh mesh, data, tensor;
  std::unique_ptr<Module> model;
  std::unique_ptr<Module> loss;                 ///< null if the Recipe has none
  std::shared_ptr<const LossInChunks> chunked;  ///< of BuildOptions::loss_chunk; null: none
  std::optional<TokenSizes> tokens;             ///< of a model of tokens
  DomainManager domain;                         ///< empty: maps are whole
  std::function<LayoutRef(const LayoutRef& rows, const Shape& global)> placement;  ///< Recipe::place
  std::function<std::int64_t(std::span<const Tensor> inputs, std::span<const Tensor> targets)>
      count;                                 ///< Recipe::count
  std::unique_ptr<Float8Model> float8;       ///< null: none
  std::unique_ptr<GradientReducer> reducer;  ///< of DataForm::ddp
  std::unique_ptr<FullySharded> sharded;     ///< of DataForm::fsdp
  Exact exact = Exact::no;                   ///< of BuildOptions
  BuildOptions options;                      ///< with which it was built
  std::weak_ptr<const void> trained_by;      ///< expired: no Trainer has this model
  std::uint64_t recipe_digest = 0;           ///< of the Recipe's name and description, and of the parameters
  /// In exact mode: refuses a training pass of a program's own loop without Pass::exact.
  HookHandle passes_are_exact;
  bool sequence_parallel = false;                     ///< of BuildOptions::tensor
  DeviceMesh stages;                                  ///< BuildOptions::pipeline_axis; empty: no pipeline
  PipelineForm pipeline;                              ///< of BuildOptions
  std::vector<std::vector<std::string>> stage_paths;  ///< the modules of each stage of a pipeline
  std::function<PipelineBorder(int stage, const Tensors& inputs)> border;  ///< between stages
  std::vector<TiedWeight> tied;                                            ///< the tied weights of a pipeline

  /// Use it around all micro-batches except the last: passes then only accumulate. See GradientReducer and
  /// FullySharded. Throws bad_argument in exact mode, whose micro-batches are reduced before they are added:
  /// a Trainer does so.
  NoSync no_sync() {
    if (exact == Exact::yes)
      throw Error(ErrorCode::bad_argument,
                  "exact: no_sync() adds micro-batches before the ranks add theirs, which has other bits on "
                  "other meshes; expected one pass in a step, or a Trainer");
    return sharded ? sharded->no_sync() : reducer->no_sync();
  }
  /// Call it after the last backward pass: it reduces every gradient over all data ranks.
  void finish() { sharded ? sharded->finish() : reducer->finish(); }

  /// The schedule of a step with so many micro-batches. In a pipeline only.
  PipelineSchedule schedule_for(int micro_batches) const;
  /// Forward passes alone, for evaluation, with the stages on the same ranks.
  PipelineSchedule forward_schedule_for(int micro_batches) const;

  /// The parameters of this rank: of the whole model, or of its own stages in a pipeline. Stages on several
  /// ranks may have a tied weight, with equal values; see Pipeline::parameters().
  std::vector<Parameter*> parameters() const;
  /// The buffers, likewise.
  std::vector<ModuleBuffer*> buffers() const;
  /// Whether the module, parameter or buffer with this path is of this rank's stages, in a pipeline. A tied
  /// weight is of the stage with the module of its path.
  bool is_own(std::string_view path) const;
  /// The axes whose ranks have the same rows of a batch and share the work on them: the tensor axis, then the
  /// domain axes, if there are any. Gradients are Partial on these axes until reduce_gradients() sums them.
  std::vector<DeviceMesh> axes_of_equal_rows() const {
    std::vector<DeviceMesh> all{tensor};
    if (domain) all.push_back(domain.axes());
    return all;
  }
  /// In a pipeline the axes of the mesh other than that of the stages: the ranks that compute one stage.
  DeviceMesh mesh_of_stage() const;
  /// The axes whose ranks are given the same batches: axes_of_equal_rows(), and the axis of a pipeline.
  std::vector<DeviceMesh> axes_of_equal_batches() const {
    std::vector<DeviceMesh> all = axes_of_equal_rows();
    if (stages) all.push_back(stages);
    return all;
  }
  /// Freezes these parameters, or unfreezes them, between steps: gradients of trained parameters are reduced
  /// like all others. With DataForm::ddp this makes the reducer anew, whose first finish() compares the
  /// parameters of the ranks again. No communication, but all ranks must call it alike. Throws bad_argument,
  /// before anything changes, if one of them has a gradient.
  void set_trainable(std::span<Parameter* const> given, bool trainable);
  /// Gives this rank's rows of a batch the layout that layers expect: that of Recipe::place, or the first
  /// dimension split over the data axes. `rows` is (this rank's rows, …), and the global batch has
  /// `global_rows` rows. With domain axes, `rows` are whole maps, of which this rank keeps its part; tensors
  /// without the dimensions that these axes cut stay whole. No communication. Throws layout if the counts do
  /// not fit, and the errors of shard_spatial().
  Tensor place(const Tensor& rows, std::int64_t global_rows) const;
};

/// Builds a model in steps, each a call. The steps before data_parallel() may be left out, if the mesh needs
/// none; each must come before those below it. A step that comes too late, or twice, throws
/// bad_argument that names both steps: `build_parallel_model: "tensor parallel" comes too late, after "data
/// parallel": layouts must be final before gradients are reduced or divided`. build_parallel_model() does all
/// steps in their order; a program that changes the model in between calls them one by one.
class ModelBuilder {
 public:
  /// Makes the tree, without memory, sets dtypes, and freezes. The arguments, and errors, are those of
  /// build_parallel_model().
  ModelBuilder(Recipe recipe, const DeviceMesh& mesh, Compute& compute, BuildOptions options = {});
  Module& model() noexcept { return *built_.model; }

  /// Cuts the model into stages, over BuildOptions::pipeline_axis.
  void pipeline_parallel();
  /// Cuts parameters over the tensor axis: no rank ever holds more than its part.
  void tensor_parallel();
  /// Divides the experts over BuildOptions::expert_axis, each with its part of the tensor axis: data parallel
  /// then divides, or reduces, only what the ranks of this axis share.
  void expert_parallel();
  /// Cuts the maps of the layers in space, over BuildOptions::domain_axes.
  void domain_parallel();
  /// BuildOptions::float8. Layers take part as they are split, and before they are gathered, since codes may
  /// be gathered in the place of weights.
  void float8();
  /// BuildOptions::ac.
  void activation_checkpointing();
  /// Adds the data axes, inside the shards of the tensor axis: the reducer must be notified of the first
  /// final gradient, and a rank that shards must never hold more than its part of its part.
  void data_parallel();
  /// Memory for this rank's part of each parameter, then values, which depend on seed, path and global index
  /// alone: the same model on every mesh.
  void memory_and_values();
  /// The model. Throws bad_argument if one of the last two steps is missing.
  ParallelModel take();

 private:
  enum class Step : unsigned char {
    model,
    pipeline,
    tensor,
    experts,
    domain,
    float8,
    activation_checkpointing,
    data,
    values
  };
  static const char* name(Step step) noexcept;
  static const char* reason(Step step) noexcept;
  void begin(Step step);
  void chunk_loss();
  Recipe recipe_;
  BuildOptions options_;
  Compute* compute_;
  DeviceMesh mesh_;  // the mesh of the model; its names of axes count
  ParallelModel built_;
  Step last_ = Step::model;
};

/// Builds the model of a recipe: all steps of ModelBuilder in their order.
///
/// `mesh` must have the axes; an axis that is not wanted has size 1. The model uses the memory and threads of
/// `compute`, which must outlive the model. No communication. Throws bad_argument if the model does not fit
/// the mesh (the text shows the sizes: parallelize), for a recipe without `build`, for options.tensor if the
/// recipe has no `tokens`, and for options.compile_model.
ParallelModel build_parallel_model(const Recipe& recipe, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options = {});

/// The function above for transformer_recipe(config); also throws the errors of TransformerConfig::check().
///
/// If there are fewer key/value heads than ranks on the tensor axis, weft treats the axis as two: AXIS_kv
/// with one rank per head, and AXIS_rep, whose ranks share the heads. k_proj and v_proj are split only over
/// AXIS_kv, and their gradients are Partial on AXIS_rep until reduce_gradients() sums them.
/// ParallelModel::mesh is then another root mesh than `mesh`; in it the name of the tensor axis means both
/// axes, and the model's inputs lie over that mesh (place() does so). If the tensor axis of `mesh` is already
/// divided in this way (unflatten), `mesh` is used as it is.
ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options = {});

/// The model as a Transformer. Throws bad_argument if it is another.
Transformer& transformer_of(const ParallelModel& built);

}  // namespace weft
