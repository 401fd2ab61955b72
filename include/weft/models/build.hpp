// Builds a parallel model; this is the only place that fixes the order of its construction.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "weft/base/exact.hpp"
#include "weft/models/transformer.hpp"
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

struct BuildOptions {
  std::string data_axis = "dp", tensor_axis = "tp";
  /// A second data axis, over which batches are also divided. Empty: there is none.
  std::string replicate_axis = {};
  DataForm data = DataForm::ddp;
  std::uint64_t seed = 0;
  Memory weights = Memory::local;
  /// The dtype in which layers read the parameters: f32, or bf16 with masters in f32.
  DType dtype = DType::f32;
  /// Parameters that are not trained: patterns, as in a Plan, for paths of parameters, or of modules with
  /// all parameters below them.
  std::vector<std::string> frozen = {};
  /// Linear layers with operands of eight bits, by this recipe; see apply_float8(). Nothing: none.
  std::optional<Float8Recipe> float8 = {};
  Float8Options float8_options = {};
  GradientReducerOptions reducer = {};  ///< of DataForm::ddp
  /// Options for DataForm::fsdp; if `dtype` is bf16, precision.param becomes bf16, too. If `float8`
  /// names a recipe, the weights of float8 layers are gathered as codes.
  FullyShardOptions sharding = by_layers();
  /// Which modules run again in backward; mode full without patterns means each block, "layers.*".
  AcPolicy ac = {};
  /// How the tensor axis splits the model; see transformer_plan().
  TransformerPlanOptions tensor = {};
  /// Exact mode (docs/exact.md): losses, gradients and parameters have the same bits on every mesh whose
  /// numbers of ranks divide kExactBlocks. build_parallel_model() then also throws the errors of
  /// expect_exact(), and bad_argument for a transport that does not add in canonical order.
  Exact exact = Exact::no;

  /// By default each block of the transformer is gathered separately; all other parameters are gathered with
  /// the root.
  static FullyShardOptions by_layers() { return {.blocks = {"layers.*"}}; }
};

/// A model over a mesh, ready for its first pass. Destroyed before the mesh.
struct ParallelModel {
  DeviceMesh mesh, data,
      tensor;  ///< the root mesh; the data axes (replicate_axis first); the tensor axis, or axes
  std::unique_ptr<Transformer> model;
  std::unique_ptr<Float8Model> float8;       ///< null: none
  std::unique_ptr<GradientReducer> reducer;  ///< of DataForm::ddp
  std::unique_ptr<FullySharded> sharded;     ///< of DataForm::fsdp
  Exact exact = Exact::no;                   ///< of BuildOptions
  bool sequence_parallel = false;            ///< of BuildOptions::tensor

  /// Use it around all micro-batches except the last: passes then only accumulate. See GradientReducer and
  /// FullySharded.
  NoSync no_sync() { return sharded ? sharded->no_sync() : reducer->no_sync(); }
  /// Call it after the last backward pass: it reduces every gradient over all data ranks.
  void finish() { sharded ? sharded->finish() : reducer->finish(); }

  std::vector<Parameter*> parameters() const { return model->parameters(); }
  /// Gives this rank's rows of a batch the layout that layers expect, with the first dimension split over the
  /// data axis: `rows` is (this rank's rows, …), and the global batch has `global_rows` rows. Throws layout
  /// if the counts do not fit.
  Tensor place(const Tensor& rows, std::int64_t global_rows) const;
};

/// Builds the model in this order: the tensor axis cuts the parameters, then layers become float8 layers,
/// then activation checkpointing is set, then the data axis divides the resulting parts, then this rank's
/// part gets memory. A later parallelize() throws an error.
///
/// If there are fewer key/value heads than ranks on the tensor axis, weft treats the axis as two: AXIS_kv
/// with one rank per head, and AXIS_rep, whose ranks share the heads. k_proj and v_proj are split only over
/// AXIS_kv, and their gradients are Partial on AXIS_rep until reduce_gradients() sums them.
/// ParallelModel::mesh is then another root mesh than `mesh`; in it the name of the tensor axis means both
/// axes, and the model's inputs lie over that mesh (place() does so). If the tensor axis of `mesh` is already
/// divided in this way (unflatten), `mesh` is used as it is.
///
/// `mesh` must have the axes; an axis that is not wanted has size 1. The model uses the memory and threads of
/// `compute`, which must outlive the model. No communication. Throws bad_argument if the model does not fit
/// the mesh; the text shows the sizes (TransformerConfig::check, parallelize).
ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options = {});

}  // namespace weft
