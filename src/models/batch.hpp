// A batch of tokens on its way into a model: checked, placed on the rank's device, and summed up as a number
// by which ranks find out whether their batches are equal. Errors are bad_argument, and begin with the name
// of the `function`. Included only inside models.
#pragma once

#include <string>

#include "base/hash.hpp"
#include "weft/models/trainer.hpp"

namespace weft {

[[noreturn]] void refuse_batch(const char* function, const std::string& text);
/// The sizes of a model of tokens; throws bad_argument if the model is none.
const TokenSizes& expect_tokens(const char* function, const ParallelModel& model);

/// `which`: "batch 1: " if there are several.
void check_sizes(const char* function, const std::string& which, const TokenSizes& sizes,
                 const TokenBatch& b);
/// (rows, sequence) numbers of a batch as a tensor on the rank's device, in the form that layers need.
/// `may_ignore`: whether kIgnore may be among them.
Tensor place_numbers(const char* function, const std::string& which, const char* name,
                     const ParallelModel& model, Compute& compute, const TokenBatch& b,
                     const std::int64_t* numbers, bool may_ignore);

void add_numbers(Fnv1a& hash, const TokenBatch& b, const std::int64_t* numbers);
/// Sizes and tokens.
void add_content(Fnv1a& hash, const TokenBatch& b);

/// The error text if the ranks of the tensor axis were given different batches.
std::string different_batches(const DeviceMesh& tensor);

}  // namespace weft
