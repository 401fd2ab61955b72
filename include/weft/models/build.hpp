// The one place that fixes the order in which the parts of a parallel model are put together.
#pragma once

#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "weft/models/transformer.hpp"
#include "weft/tp/plan.hpp"
#include "weft/train/fully_shard.hpp"
#include "weft/train/gradient_reducer.hpp"

namespace weft {

/// The use of the tensor axis for the vocabulary.
enum class VocabSplit : unsigned char {
  /// The embedding is whole on each rank; the head is split, unless tied, and its logits are gathered.
  whole,
  /// Embedding and head, tied or not, are split over the vocabulary, and so are the logits that the model.
  shard
  ///< gives: CrossEntropy takes them so, and they are never gathered. Any vocabulary, also one that does not
  ///< divide
};

struct TransformerPlanOptions {
  /// Norms and residual sums work on this rank's part of the sequence (any length): column layers gather it,
  /// row layers reduce-scatter into it. Ranks send the same bytes, and keep 1/tp of the activations between
  /// layers. The gradients of the norms are Partial on the tensor axis: reduce_gradients() sums them.
  bool sequence_parallel = false;
  VocabSplit vocab = VocabSplit::whole;
};

/// q, k, v, gate and up by columns, o and down by rows, with one boundary around each attention and each mlp:
/// two all-reduces a pass per block. (Fewer key/value heads than ranks: see build_parallel_model().) The head
/// by columns over the vocabulary, gathered before the loss; with tied embeddings embedding and head stay
/// whole. The embedding and the norms are replicated. `options` changes that.
Plan transformer_plan(const TransformerConfig& config, const TransformerPlanOptions& options = {});

/// The use that data-parallel ranks make of the parameters.
enum class DataForm : unsigned char {
  ddp,  ///< each has all, gradients are averaged
  fsdp  ///< they are divided over data_axis; with a replicate_axis, replicated over that (HSDP)
};

struct BuildOptions {
  std::string data_axis = "dp", tensor_axis = "tp";
  /// A second data axis: batches are divided over it, too. Empty: none.
  std::string replicate_axis = {};
  DataForm data = DataForm::ddp;
  std::uint64_t seed = 0;
  Memory weights = Memory::local;
  /// The dtype in which layers read the parameters: f32, or bf16 with masters in f32.
  DType dtype = DType::f32;
  /// Parameters that are not trained: patterns, as in a Plan, for paths of parameters, or of modules with
  /// all parameters below them.
  std::vector<std::string> frozen = {};
  GradientReducerOptions reducer = {};  ///< of DataForm::ddp
  /// Options of DataForm::fsdp; if `dtype` is bf16, so is precision.param.
  FullyShardOptions sharding = by_layers();
  /// How the tensor axis splits the model; see transformer_plan().
  TransformerPlanOptions tensor = {};

  /// Each block of the transformer on its own, then what is around them.
  static FullyShardOptions by_layers() { return {.blocks = {"layers.*"}}; }
};

/// A model over a mesh, ready for its first pass. Destroyed before the mesh.
struct ParallelModel {
  DeviceMesh mesh, data,
      tensor;  ///< the whole; its data axes (replicate_axis first); its tensor axis, or axes
  std::unique_ptr<Transformer> model;
  std::unique_ptr<GradientReducer> reducer;  ///< of DataForm::ddp
  std::unique_ptr<FullySharded> sharded;     ///< of DataForm::fsdp

  /// Around micro-batches before the last: passes only accumulate. See GradientReducer and FullySharded.
  NoSync no_sync() { return sharded ? sharded->no_sync() : reducer->no_sync(); }
  /// After the last backward pass: every gradient is that of all data ranks.
  void finish() { sharded ? sharded->finish() : reducer->finish(); }

  std::vector<Parameter*> parameters() const { return model->parameters(); }
  /// This rank's rows of a batch whose first dimension is split over the data axis, as layers want them:
  /// `rows` is (this rank's rows, …), the whole has `global_rows`. Throws layout if the counts do not fit.
  Tensor place(const Tensor& rows, std::int64_t global_rows) const;
};

/// The order of the parts: the tensor axis cuts first, then the data axis divides what it leaves, then this
/// rank's part gets memory. A parallelize() after that is an error that says so.
///
/// Fewer key/value heads than ranks of the tensor axis: that axis is seen as two, AXIS_kv of as many ranks as
/// there are such heads and AXIS_rep of the rest, over which they are shared. k_proj and v_proj are split
/// over the first alone, and their gradients are Partial on the second until reduce_gradients() sums them.
/// ParallelModel::mesh is then another root mesh than `mesh`, whose name of the tensor axis stands for both:
/// the model's inputs lie over that one (place() does so). A `mesh` that has the axis so already (unflatten)
/// is taken as it is.
///
/// `mesh` must have the axes (of size 1 where not wanted). This rank works with the memory and threads of
/// `compute`, which must outlive the model. No communication. Throws bad_argument with the arithmetic where
/// the model does not fit the mesh (TransformerConfig::check, parallelize).
ParallelModel build_parallel_model(const TransformerConfig& config, const DeviceMesh& mesh, Compute& compute,
                                   const BuildOptions& options = {});

}  // namespace weft
