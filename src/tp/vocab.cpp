#include "weft/tp/vocab.hpp"

#include <fmt/format.h>

#include <bit>
#include <cmath>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "base/hash.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
#include "tp/views.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/loss.hpp"

namespace weft {
namespace {

using kernels::VocabPart;
using views::as;
using views::Checker;
using views::given;
using views::group_of;
using views::Input;
using views::Output;

VocabPart checked_part(const Checker& c, const DeviceMesh& axes, std::int64_t vocab) {
  given_mesh(c.function, axes);
  if (vocab < 0) c.wrong("vocab", fmt::format("is {}; expected 0 or more", vocab));
  const Chunk part = chunk_of(vocab, axes.size(), axes.rank());
  return {part.offset, part.size, vocab};
}

void check_numbers(const Checker& c, const char* what, const ConstTensorView& v) {
  if (v.dtype != DType::i64) c.wrong(what, fmt::format("is {}; expected i64", name(v.dtype)));
  c.check(what, v);
}

// Checks the embedding that the table (w or dw) and the tokens form, whose rows, (…, dim), are written or
// read.
void check_embedding(const Checker& c, const VocabPart& vocab, const ConstTensorView& tokens,
                     const char* table_name, const ConstTensorView& table, const char* rows_name,
                     const ConstTensorView& rows) {
  check_numbers(c, "tokens", tokens);
  c.check_floats(table_name, table);
  if (table.shape.rank() != 2)
    c.wrong(table_name, fmt::format("is {}; expected (part, dim)", to_string(table.shape)));
  if (table.shape[0] != vocab.count)
    c.wrong(table_name, fmt::format("is {}; expected ({}, {}), entries {} to {} of {}",
                                    to_string(table.shape), vocab.count, table.shape[1], vocab.first,
                                    vocab.first + vocab.count - 1, vocab.whole));
  c.check_floats(rows_name, rows);
  Shape shape = tokens.shape;
  shape.push_back(table.shape[1]);
  c.expect(rows_name, rows.shape, shape,
           fmt::format("tokens {} and {} {}", to_string(tokens.shape), table_name, to_string(table.shape)));
}

// The arguments that must be equal on all ranks: if they differ, each rank would go on with other numbers,
// and nobody would notice it.
using AgreedValue = std::pair<std::uint64_t, std::string>;

AgreedValue vocab_entry(std::int64_t vocab) {
  return {static_cast<std::uint64_t>(vocab), fmt::format("vocab {}", vocab)};
}

AgreedValue tokens_entry(const char* what, const ConstTensorView& tokens) {
  Fnv1a hash;
  hash.add(static_cast<std::uint64_t>(tokens.count()));
  if (tokens.device == Device{})  // of a device the host does not read them
    for (const std::int64_t token : tokens.as<std::int64_t>())
      hash.add_at_once(static_cast<std::uint64_t>(token));
  return {hash.value, fmt::format("{} {} with digest {:016x}", tokens.count(), what, hash.value)};
}

// Collective over the ranks of `axes`.
void expect_alike(const Checker& c, const DeviceMesh& axes, const std::vector<AgreedValue>& entries) {
  ListDigest digest;
  for (const AgreedValue& e : entries) digest.add(e.first);
  gather_with_list(c.function, axes, digest, {}, [&]() -> ListEntries {
    return {"argument", entries.size(), [&](std::size_t i) { return entries[i].first; },
            [&](std::size_t i) { return entries[i].second; }};
  });
}

}  // namespace

Chunk vocab_part(const DeviceMesh& axes, std::int64_t vocab) {
  const VocabPart part = checked_part({"vocab_part", {}}, axes, vocab);
  return {part.first, part.count};
}

void vocab_parallel_embedding_forward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                      const ConstTensorView& tokens, const ConstTensorView& w,
                                      const TensorView& y, bool reduce) {
  const Checker c{"vocab_parallel_embedding_forward", compute.device()};
  given_mesh(c.function, axes);
  // All steps of this rank that need no other rank. A fault here is reported to the other ranks if they would
  // wait for this rank.
  const std::optional<Error> fault = fault_of([&] {
    const VocabPart part = checked_part(c, axes, vocab);
    check_embedding(c, part, tokens, "w", w, "y", y);
    c.expect_apart("y", y, {{"tokens", tokens}, {"w", w}});
    const Output out(compute, y);
    const auto look_up = [&](const auto* table) {
      kernels::embedding_forward(kernels_of(compute), as<std::int64_t>(tokens), table, out.data(),
                                 tokens.count(), part, w.shape[1]);
    };
    if (w.dtype == DType::bf16)
      look_up(as<bf16>(w));
    else
      look_up(as<float>(w));
    out.round();
  });
  if (fault && !reduce) throw *fault;
  if (fault) throw_told(c.function, axes, *fault);
  if (ProcessGroup* const group = reduce ? group_of(axes) : nullptr) {
    expect_alike(c, axes, {vocab_entry(vocab), tokens_entry("tokens", tokens)});
    group->all_reduce(y, y, {.stream = compute.stream()}).wait();
  }
}

void vocab_parallel_embedding_backward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                       const ConstTensorView& tokens, const ConstTensorView& dy,
                                       const TensorView& dw, bool accumulate) {
  const Checker c{"vocab_parallel_embedding_backward", compute.device()};
  const VocabPart part = checked_part(c, axes, vocab);
  check_embedding(c, part, tokens, "dw", dw, "dy", dy);
  c.expect_apart("dw", dw, {{"tokens", tokens}, {"dy", dy}});
  kernels::KernelContext& ctx = kernels_of(compute);
  const Output out(compute, dw);
  const Input from(compute, dy);
  if (accumulate)
    out.read();
  else
    kernels::fill(ctx, out.data(), 0.0f, dw.count());
  kernels::embedding_backward(ctx, as<std::int64_t>(tokens), from.data(), out.data(), tokens.count(), part,
                              dw.shape[1]);
  out.round();
}

namespace {

void check_loss(const Checker& c, const VocabPart& part, const ConstTensorView& logits,
                const ConstTensorView& labels, const VocabLossOptions& options, const TensorView& dlogits) {
  check_numbers(c, "labels", labels);
  c.check_floats("logits", logits);
  Shape shape = labels.shape;
  shape.push_back(part.count);
  c.expect("logits", logits.shape, shape,
           fmt::format("labels {} and entries {} to {} of {}", to_string(labels.shape), part.first,
                       part.first + part.count - 1, part.whole));
  c.expect_apart("logits", logits, {{"labels", labels}});
  if (given(dlogits)) {
    c.check_floats("dlogits", dlogits);
    c.expect("dlogits", dlogits.shape, logits.shape, fmt::format("logits {}", to_string(logits.shape)));
    c.expect_apart("dlogits", dlogits, {{"labels", labels}});
    if (dlogits.data != logits.data || dlogits.dtype != logits.dtype)
      c.expect_apart("dlogits", dlogits, {{"logits", logits}});
  }
  if (options.valid <= 0)
    c.wrong("valid", fmt::format("is {}; expected the number of valid labels of the whole batch, more than 0",
                                 options.valid));
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    c.wrong("label_smoothing", fmt::format("is {}; expected 0 to 1", options.label_smoothing));
  if (!std::isfinite(options.scale))
    c.wrong("scale", fmt::format("is {}; expected a finite number", options.scale));
}

}  // namespace

double vocab_parallel_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& logits,
                                    const ConstTensorView& labels, const VocabLossOptions& options,
                                    const TensorView& dlogits) {
  const Checker c{"vocab_parallel_cross_entropy", compute.device()};
  given_mesh(c.function, axes);
  kernels::KernelContext& ctx = kernels_of(compute);
  Context& context = compute.context();
  const double smoothing = options.label_smoothing;

  VocabPart part{0};
  Tensor valid, terms,
      own;  // terms: (ranks, tokens, kLossTerms); each writes its own, in place of the all-gather
  std::optional<Input> from;
  // All steps of this rank that need no other rank. A fault here is reported to the other ranks, because they
  // would wait for this rank.
  const std::optional<Error> fault = fault_of([&] {
    part = checked_part(c, axes, options.vocab);
    check_loss(c, part, logits, labels, options, dlogits);
    valid = to_device(context, scalar(context, options.valid), compute.stream());
    from.emplace(compute, logits);
    terms = compute.make({axes.size(), labels.count(), kernels::kLossTerms}, DType::f64,
                         axes.size() > 1 ? Memory::shared : Memory::local);
    own = terms.slice_flat(axes.rank() * labels.count() * kernels::kLossTerms,
                           {labels.count(), kernels::kLossTerms});
    kernels::cross_entropy_terms(ctx, from->data(), as<std::int64_t>(labels), own.data_ptr<double>(),
                                 labels.count(), part, valid.data_ptr<std::int64_t>(), smoothing);
  });
  if (fault) throw_told(c.function, axes, *fault);
  if (ProcessGroup* const group = group_of(axes)) {
    expect_alike(c, axes,
                 {vocab_entry(options.vocab),
                  {static_cast<std::uint64_t>(options.valid), fmt::format("valid {}", options.valid)},
                  {std::bit_cast<std::uint64_t>(smoothing), fmt::format("label_smoothing {}", smoothing)},
                  {std::bit_cast<std::uint64_t>(options.scale), fmt::format("scale {}", options.scale)},
                  tokens_entry("labels", labels)});
    group->all_gather(own.view(), terms.view(), {.stream = compute.stream()}).wait();
  }
  const std::int64_t tokens = labels.count();
  const auto* const targets = as<std::int64_t>(labels);
  const Tensor softmax = compute.make({tokens, kernels::kSoftmaxTerms}, DType::f64),
               loss = compute.make({1}, DType::f64);
  kernels::cross_entropy_sum(ctx, terms.data_ptr<double>(), axes.size(), targets, softmax.data_ptr<double>(),
                             loss.data_ptr<double>(), tokens, part.whole, valid.data_ptr<std::int64_t>(),
                             smoothing);
  if (given(dlogits)) {
    const Output out(compute, dlogits);
    kernels::cross_entropy_backward(ctx, from->data(), targets, softmax.data_ptr<double>(), nullptr,
                                    out.data(), tokens, part, valid.data_ptr<std::int64_t>(), smoothing);
    if (options.scale != 1)
      kernels::scale(ctx, out.data(), static_cast<float>(options.scale), dlogits.count());
    out.round();
  }
  return to_host(context, loss).as<double>()[0];
}

}  // namespace weft
