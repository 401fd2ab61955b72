#include "models/batch.hpp"

#include <fmt/format.h>

#include <span>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/exact.hpp"

namespace weft {

void refuse_batch(const char* function, const std::string& text) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", function, text));
}

const TokenSizes& expect_tokens(const char* function, const ParallelModel& model) {
  if (!model.tokens)
    refuse_batch(function, "the model has no TokenSizes (ParallelModel::tokens); expected a model of tokens");
  return *model.tokens;
}

void check_sizes(const char* function, const std::string& which, const TokenSizes& sizes,
                 const TokenBatch& b) {
  if (b.rows < 0) refuse_batch(function, fmt::format("{}rows is {}; expected 0 or more", which, b.rows));
  if (b.sequence < 1 || b.sequence > sizes.max_seq)
    refuse_batch(function, fmt::format("{}sequence is {}; expected 1 to {} (max_seq)", which, b.sequence,
                                       sizes.max_seq));
  if (b.global_rows < 0)
    refuse_batch(function, fmt::format("{}global_rows is {}; expected 0 (the same rows on each rank) or more",
                                       which, b.global_rows));
  std::int64_t elements = 0;
  if (__builtin_mul_overflow(b.rows, b.sequence, &elements) ||
      __builtin_mul_overflow(elements, sizes.vocab, &elements))
    refuse_batch(function, fmt::format("{}{} rows of {} tokens are too many", which, b.rows, b.sequence));
}

Tensor place_numbers(const char* function, const std::string& which, const char* name,
                     const ParallelModel& model, Compute& compute, const TokenBatch& b,
                     const std::int64_t* numbers, bool may_ignore) {
  const std::int64_t count = b.rows * b.sequence, vocab = model.tokens->vocab;
  if (numbers == nullptr && count > 0)
    refuse_batch(function,
                 fmt::format("{}{} has no memory; expected {} x {}", which, name, b.rows, b.sequence));
  Tensor t(compute.context(), {b.rows, b.sequence}, DType::i64);
  const std::span<std::int64_t> to = t.as<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = numbers[i];
    if ((n < 0 || n >= vocab) && !(may_ignore && n == CrossEntropy::kIgnore))
      refuse_batch(function, fmt::format("{}{}[{}] is {}; expected 0 to {}{}", which, name, i, n, vocab - 1,
                                         may_ignore ? fmt::format(", or {}", CrossEntropy::kIgnore) : ""));
    to[static_cast<std::size_t>(i)] = n;
  }
  const std::int64_t ranks = model.data.size(), global = b.global_rows == 0 ? b.rows * ranks : b.global_rows;
  if (model.exact == Exact::yes) {
    expect_exact_parts(which + "rows of a batch", global, model.data.size());
    if (model.sequence_parallel)
      expect_exact_parts(which + "tokens of a row", b.sequence, model.tensor.size());
  }
  std::int64_t part = global;  // in the order of Shard: several axes one after the other
  for (const DeviceMesh& axis : model.data.each_axis()) part = chunk_of(part, axis.size(), axis.rank()).size;
  if (b.rows != part)
    refuse_batch(function,
                 fmt::format("{}rows is {}; expected {}, the part of rank {} of {} in global_rows {}", which,
                             b.rows, part, model.data.rank(), ranks, global));
  return model.place(to_device(compute.context(), t, compute.stream()), global);
}

void add_numbers(Fnv1a& hash, const TokenBatch& b, const std::int64_t* numbers) {
  for (std::int64_t i = 0; i < b.rows * b.sequence; ++i)
    hash.add_at_once(static_cast<std::uint64_t>(numbers[i]));
}

void add_content(Fnv1a& hash, const TokenBatch& b) {
  for (const std::int64_t size : {b.rows, b.sequence, b.global_rows})
    hash.add_at_once(static_cast<std::uint64_t>(size));
  add_numbers(hash, b, b.tokens);
}

std::string different_batches(const DeviceMesh& tensor) {
  return fmt::format(
      "the ranks of {}={} were given different batches; expected the same, as they share the "
      "work on each",
      tensor.name(), tensor.size());
}

}  // namespace weft
