// The dtypes in which a model computes.
#pragma once

#include <string_view>

#include "weft/base/dtype.hpp"

namespace weft {

class Module;

/// The dtypes in which a model computes and reduces. Each is f32 or bf16. Masters, gradients of parameters
/// and optimizer states are f32 in any case.
///
/// Activations in bf16 are rounded once, when they are stored. Sums, statistics of norms, softmax and
/// activation functions are in f32 inside a layer. dx has the dtype of x.
struct MixedPrecision {
  /// The dtype in which layers read their weights. With bf16 products are computed in bf16, and a sharded
  /// model sends its weights in bf16.
  DType param = DType::f32;
  /// The dtype of the tensors between layers and of their gradients, which boundaries send and Frames keep.
  /// bf16 needs `param` bf16.
  DType activations = DType::f32;
  /// The dtype of the model's outputs, f32 unless `activations` is bf16. The last Linear of a model writes it
  /// from its sums in f32.
  DType output = DType::f32;
  DType reduce = DType::f32;  ///< the dtype of gradients while the ranks of fully_shard() combine them
  /// If `param` is bf16 and `activations` f32, the values of a sharded module's inputs are rounded to bf16,
  /// as PyTorch's cast rounds them. But the tensors stay f32. Integer inputs do not change.
  bool cast_inputs = true;
};

/// Makes passes of `root` compute in these dtypes, as long as it exists. `reduce` and `cast_inputs` have no
/// effect. Call it before materialise(). fully_shard() calls it itself. Floating-point inputs of the model in
/// f32 are rounded to `activations`. Every Embedding gives `activations`. Outputs become `output`. dy has the
/// dtype of the outputs, dx that of the inputs.
///
/// A layer without activations in bf16 throws at the first pass, naming itself:
/// `"layers.0.conv": x is bf16; expected f32`. Throws bad_argument for another dtype, for `activations` bf16
/// with `param` f32, and for `output` bf16 with `activations` f32.
void set_precision(Module& root, const MixedPrecision& precision);

/// Throws as set_precision() does: `fully_shard: options.precision.param is f16; expected f32 or bf16`.
/// `argument` begins the texts.
void expect_precision(const MixedPrecision& precision, std::string_view argument);
/// set_precision() without the weights, whose dtype is set already.
void set_activations(Module& root, const MixedPrecision& precision);

}  // namespace weft
