#include "models/batch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/models/transformer.hpp"
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

namespace {

// (rows, sequence) numbers as a tensor on the host. `may_ignore`: whether kIgnore may be among them.
Tensor numbers_of(const char* function, const std::string& which, const char* name, std::int64_t vocab,
                  Context& context, const TokenBatch& b, const std::int64_t* numbers, bool may_ignore) {
  const std::int64_t count = b.rows * b.sequence;
  if (numbers == nullptr && count > 0)
    refuse_batch(function,
                 fmt::format("{}{} has no memory; expected {} x {}", which, name, b.rows, b.sequence));
  Tensor t(context, {b.rows, b.sequence}, DType::i64);
  const std::span<std::int64_t> to = t.as<std::int64_t>();
  for (std::int64_t i = 0; i < count; ++i) {
    const std::int64_t n = numbers[i];
    if ((n < 0 || n >= vocab) && !(may_ignore && n == CrossEntropy::kIgnore))
      refuse_batch(function, fmt::format("{}{}[{}] is {}; expected 0 to {}{}", which, name, i, n, vocab - 1,
                                         may_ignore ? fmt::format(", or {}", CrossEntropy::kIgnore) : ""));
    to[static_cast<std::size_t>(i)] = n;
  }
  return t;
}

void check_sizes(const char* function, const std::string& which, const TokenSizes& sizes,
                 const TokenBatch& b) {
  if (b.rows < 0) refuse_batch(function, fmt::format("{}rows is {}; expected 0 or more", which, b.rows));
  if (b.sequence < 1 || b.sequence > sizes.max_seq)
    refuse_batch(function, fmt::format("{}sequence is {}; expected 1 to {} (max_seq)", which, b.sequence,
                                       sizes.max_seq));
  std::int64_t elements = 0;
  if (__builtin_mul_overflow(b.rows, b.sequence, &elements) ||
      __builtin_mul_overflow(elements, sizes.vocab, &elements))
    refuse_batch(function, fmt::format("{}{} rows of {} tokens are too many", which, b.rows, b.sequence));
}

}  // namespace

Batch batch_of(const char* function, const std::string& which, const ParallelModel& model, Compute& compute,
               const TokenBatch& b, bool labels) {
  const TokenSizes& sizes = expect_tokens(function, model);
  check_sizes(function, which, sizes, b);
  const auto of = [&](const char* name, const std::int64_t* numbers, bool may_ignore) {
    return numbers_of(function, which, name, sizes.vocab, compute.context(), b, numbers, may_ignore);
  };
  Batch batch{.inputs = {of("tokens", b.tokens, false)}, .global_rows = b.global_rows};
  if (b.documents != nullptr) {
    Tensor& documents = batch.inputs.emplace_back(compute.context(), Shape{b.rows, b.sequence}, DType::i64);
    std::copy_n(b.documents, documents.count(), documents.as<std::int64_t>().data());
  }
  if (labels) batch.targets.push_back(of("labels", b.labels, true));
  if (model.exact == Exact::yes && model.sequence_parallel)
    expect_exact_parts(which + "tokens of a row", b.sequence, model.tensor.size());
  return batch;
}

bool has_documents(const ParallelModel& model, std::span<const Tensor> inputs) {
  return inputs.size() == 2 && dynamic_cast<const Transformer*>(model.model.get()) != nullptr;
}

Batch placed(const char* function, const std::string& which, const ParallelModel& model, Compute& compute,
             const Batch& b) {
  if (b.inputs.empty()) refuse_batch(function, which + "inputs is empty; expected 1 tensor or more");
  std::int64_t rows = -1;
  const auto check = [&](const char* list, std::span<const Tensor> tensors) {
    for (std::size_t i = 0; i < tensors.size(); ++i) {
      const Tensor& t = tensors[i];
      const auto refuse = [&](const std::string& text) {
        refuse_batch(function, fmt::format("{}{}[{}] {}", which, list, i, text));
      };
      if (t.shape().rank() == 0) refuse("has no dimension; expected (rows, …)");
      if (t.layout()) refuse("has a layout; expected the plain rows of this rank");
      if (t.device() != Device{}) refuse(fmt::format("is on {}; expected the host", to_string(t.device())));
      if (rows == -1) rows = t.shape()[0];
      if (t.shape()[0] != rows)
        refuse(fmt::format("has {} rows; expected {}, as inputs[0]", t.shape()[0], rows));
    }
  };
  check("inputs", b.inputs);
  check("targets", b.targets);
  if (has_documents(model, b.inputs))
    if (const Tensor& ids = b.inputs[1]; ids.dtype() != DType::i64 || ids.shape() != b.inputs[0].shape())
      refuse_batch(function,
                   fmt::format("{}inputs[1], the documents, is {} {}; expected i64 {}, as inputs[0]", which,
                               name(ids.dtype()), to_string(ids.shape()), to_string(b.inputs[0].shape())));
  if (b.global_rows < 0)
    refuse_batch(function, fmt::format("{}global_rows is {}; expected 0 (the same rows on each rank) or more",
                                       which, b.global_rows));
  const std::int64_t ranks = model.data.size(), global = b.global_rows == 0 ? rows * ranks : b.global_rows;
  if (model.exact == Exact::yes) expect_exact_parts(which + "rows of a batch", global, model.data.size());
  std::int64_t part = global;  // in the order of Shard: several axes one after the other
  for (const DeviceMesh& axis : model.data.each_axis()) part = chunk_of(part, axis.size(), axis.rank()).size;
  if (rows != part)
    refuse_batch(function,
                 fmt::format("{}rows is {}; expected {}, the part of rank {} of {} in global_rows {}", which,
                             rows, part, model.data.rank(), ranks, global));
  Batch here{.inputs = {}, .global_rows = global};
  const auto put = [&](const Tensors& from, Tensors& to) {
    for (const Tensor& t : from)
      to.push_back(model.place(to_device(compute.context(), t, compute.stream()), global));
  };
  put(b.inputs, here.inputs);
  put(b.targets, here.targets);
  return here;
}

std::int64_t counted(const ParallelModel& model, const Batch& b) {
  if (model.count) return model.count(b.inputs, b.targets);
  if (b.targets.empty()) return b.inputs[0].shape()[0];
  return b.targets[0].dtype() == DType::i64 ? count_valid(b.targets[0]) : b.targets[0].count();
}

void add_content(Fnv1a& hash, const Batch& b) {
  const auto add = [&](const Tensor& t) {
    for (int d = 0; d < t.shape().rank(); ++d) hash.add_at_once(static_cast<std::uint64_t>(t.shape()[d]));
    const auto words = static_cast<std::size_t>(t.bytes()) / sizeof(std::uint64_t);
    for (std::size_t i = 0; i < words; ++i) {
      std::uint64_t word = 0;
      std::memcpy(&word, t.data() + i * sizeof(word), sizeof(word));
      hash.add_at_once(word);
    }
    const std::size_t done = words * sizeof(std::uint64_t);
    hash.add({reinterpret_cast<const char*>(t.data()) + done, static_cast<std::size_t>(t.bytes()) - done});
  };
  hash.add_at_once(static_cast<std::uint64_t>(b.global_rows));
  for (const Tensor& t : b.inputs) add(t);
  for (const Tensor& t : b.targets) add(t);
}

std::string different_batches(const ParallelModel& model) {
  std::string axes;
  for (const DeviceMesh& of : model.axes_of_equal_batches())
    if (of.size() > 1) axes += fmt::format("{}{}={}", axes.empty() ? "" : " x ", of.name(), of.size());
  return fmt::format(
      "the ranks of {} were given different batches; expected the same, as they share the "
      "work on each",
      axes);
}

}  // namespace weft
