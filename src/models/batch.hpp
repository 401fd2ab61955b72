// A batch on its way into a model: checked, placed on the rank's device, and summed up as a number by which
// ranks find out whether their batches are equal. Errors are bad_argument, and begin with the name
// of the `function`. Included only inside models.
#pragma once

#include <string>

#include "base/hash.hpp"
#include "weft/models/trainer.hpp"

namespace weft {

[[noreturn]] void refuse_batch(const char* function, const std::string& text);
/// The sizes of a model of tokens; throws bad_argument if the model is none.
const TokenSizes& expect_tokens(const char* function, const ParallelModel& model);

/// The tokens of `batch` as the input of a Batch, and the labels, if asked for, as its target. `which`:
/// "batch 1: " if there are several.
Batch batch_of(const char* function, const std::string& which, const ParallelModel& model, Compute& compute,
               const TokenBatch& batch, bool labels);

/// Whether the second of these inputs says to which document of a Transformer's sequence each token belongs.
bool has_documents(const ParallelModel& model, std::span<const Tensor> inputs);

/// The same batch on the rank's device, in the form that layers need.
Batch placed(const char* function, const std::string& which, const ParallelModel& model, Compute& compute,
             const Batch& batch);

/// The number of elements over which the loss is a mean, on this rank; see Recipe::count.
std::int64_t counted(const ParallelModel& model, const Batch& batch);

/// Shapes and elements.
void add_content(Fnv1a& hash, const Batch& batch);

/// The error text if the ranks of the tensor axis were given different batches.
std::string different_batches(const ParallelModel& model);

}  // namespace weft
