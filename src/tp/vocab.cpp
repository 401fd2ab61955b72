#include "weft/tp/vocab.hpp"

#include <fmt/format.h>

#include <algorithm>
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
#include "weft/tp/linear.hpp"

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

// Checks the table (w or dw) and the tokens of an embedding, whose rows, (…, dim), are written or
// read.
void check_embedding(const Checker& c, const VocabPart& vocab, const char* tokens_name,
                     const ConstTensorView& tokens, const char* table_name, const ConstTensorView& table,
                     const char* rows_name, const ConstTensorView& rows) {
  check_numbers(c, tokens_name, tokens);
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
           fmt::format("{} {} and {} {}", tokens_name, to_string(tokens.shape), table_name,
                       to_string(table.shape)));
}

// The arguments that must be equal on all ranks. If they differ, each rank would continue with other numbers,
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
    check_embedding(c, part, "tokens", tokens, "w", w, "y", y);
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
  check_embedding(c, part, "tokens", tokens, "dw", dw, "dy", dy);
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

void check_options(const Checker& c, const VocabLossOptions& options) {
  if (options.valid <= 0)
    c.wrong("valid", fmt::format("is {}; expected the number of valid labels of the whole batch, more than 0",
                                 options.valid));
  if (!(options.label_smoothing >= 0 && options.label_smoothing <= 1))
    c.wrong("label_smoothing", fmt::format("is {}; expected 0 to 1", options.label_smoothing));
  if (!(options.z_loss >= 0 && std::isfinite(options.z_loss)))
    c.wrong("z_loss", fmt::format("is {}; expected a finite number of 0 or more", options.z_loss));
  if (!std::isfinite(options.scale))
    c.wrong("scale", fmt::format("is {}; expected a finite number", options.scale));
}

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
  check_options(c, options);
}

// The arguments of a loss that must be equal on all ranks.
std::vector<AgreedValue> loss_entries(const VocabLossOptions& o, const ConstTensorView& labels) {
  const auto real = [](const char* what, double value) {
    return AgreedValue{std::bit_cast<std::uint64_t>(value + 0.0), fmt::format("{} {}", what, value)};
  };
  return {vocab_entry(o.vocab),
          {static_cast<std::uint64_t>(o.valid), fmt::format("valid {}", o.valid)},
          real("label_smoothing", o.label_smoothing),
          real("scale", o.scale),
          tokens_entry("labels", labels),
          real("z_loss", o.z_loss)};
}

// The loss of some tokens of a call: the kernels, with the numbers that all tokens of the call share.
struct TokenLoss {
  Compute& compute;
  const DeviceMesh& axes;
  const VocabLossOptions& options;
  VocabPart part;
  Tensor valid;  // one i64

  // The memory of the terms of `tokens` tokens: (ranks, tokens, kLossTerms).
  Tensor make_terms(std::int64_t tokens) const {
    return compute.make({axes.size(), tokens, kernels::kLossTerms}, DType::f64,
                        axes.size() > 1 ? Memory::shared : Memory::local);
  }
  // This rank's part of the terms, where the all-gather expects it.
  Tensor own_of(const Tensor& terms) const {
    const std::int64_t tokens = terms.size(1);
    return terms.slice_flat(axes.rank() * tokens * kernels::kLossTerms, {tokens, kernels::kLossTerms});
  }
  void write_own(const float* logits, const std::int64_t* targets, const Tensor& terms) const {
    kernels::cross_entropy_terms(kernels_of(compute), logits, targets, own_of(terms).data_ptr<double>(),
                                 terms.size(1), part, valid.data_ptr<std::int64_t>(),
                                 options.label_smoothing);
  }
  // Gathers the terms of all ranks and writes one f64, the loss. Returns the softmax's terms.
  Tensor sum(const Tensor& terms, const std::int64_t* targets, double* loss) const {
    const std::int64_t tokens = terms.size(1);
    if (ProcessGroup* const group = group_of(axes))
      group->all_gather(own_of(terms).view(), terms.view(), {.stream = compute.stream()}).wait();
    Tensor softmax = compute.make({tokens, kernels::kSoftmaxTerms}, DType::f64);
    kernels::cross_entropy_sum(kernels_of(compute), terms.data_ptr<double>(), axes.size(), targets,
                               softmax.data_ptr<double>(), loss, tokens, part.whole,
                               valid.data_ptr<std::int64_t>(), options.label_smoothing, options.z_loss);
    return softmax;
  }
  // dlogits may be logits.
  void gradient(const float* logits, const std::int64_t* targets, const Tensor& softmax,
                float* dlogits) const {
    const std::int64_t tokens = softmax.size(0);
    kernels::KernelContext& ctx = kernels_of(compute);
    kernels::cross_entropy_backward(ctx, logits, targets, softmax.data_ptr<double>(), nullptr, dlogits,
                                    tokens, part, valid.data_ptr<std::int64_t>(), options.label_smoothing,
                                    options.z_loss);
    if (options.scale != 1)
      kernels::scale(ctx, dlogits, static_cast<float>(options.scale), tokens * part.count);
  }
};

Tensor count_on_device(Compute& compute, std::int64_t count) {
  return to_device(compute.context(), scalar(compute.context(), count), compute.stream());
}

}  // namespace

double vocab_parallel_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& logits,
                                    const ConstTensorView& labels, const VocabLossOptions& options,
                                    const TensorView& dlogits) {
  const Checker c{"vocab_parallel_cross_entropy", compute.device()};
  given_mesh(c.function, axes);
  const auto* const targets = as<std::int64_t>(labels);
  TokenLoss loss{compute, axes, options, VocabPart{0}, {}};
  Tensor terms;
  std::optional<Input> from;
  // All steps of this rank that need no other rank. A fault here is reported to the other ranks, because they
  // would wait for this rank.
  const std::optional<Error> fault = fault_of([&] {
    loss.part = checked_part(c, axes, options.vocab);
    check_loss(c, loss.part, logits, labels, options, dlogits);
    loss.valid = count_on_device(compute, options.valid);
    from.emplace(compute, logits);
    terms = loss.make_terms(labels.count());
    loss.write_own(from->data(), targets, terms);
  });
  if (fault) throw_told(c.function, axes, *fault);
  if (group_of(axes) != nullptr) expect_alike(c, axes, loss_entries(options, labels));
  const Tensor sum = compute.make({1}, DType::f64),
               softmax = loss.sum(terms, targets, sum.data_ptr<double>());
  if (given(dlogits)) {
    const Output out(compute, dlogits);
    loss.gradient(from->data(), targets, softmax, out.data());
    out.round();
  }
  return to_host(compute.context(), sum).as<double>()[0];
}

namespace {

// Rows [first, first + count) of a view, with all dimensions but the last taken as rows.
template <class View>
View rows_of(const View& v, std::int64_t first, std::int64_t count) {
  const std::int64_t width = v.shape.back();
  View rows = v;
  if (v.data != nullptr) rows.data += first * width * size_bytes(v.dtype);
  rows.shape = {count, width};
  rows.strides = row_major(rows.shape);
  return rows;
}

void check_linear_loss(const Checker& c, const VocabPart& part, const ConstTensorView& x,
                       const ConstTensorView& w, const ConstTensorView& labels,
                       const VocabLossOptions& options, const LinearLossGradients& g, std::int64_t chunk) {
  if (chunk < 1) c.wrong("chunk", fmt::format("is {}; expected 1 token or more", chunk));
  check_embedding(c, part, "labels", labels, "w", w, "x", x);
  if (w.dtype != x.dtype) c.wrong("w", fmt::format("is {}; expected {}, as x", name(w.dtype), name(x.dtype)));
  const auto check_gradient = [&](const char* what, const TensorView& v, const char* of_name,
                                  const ConstTensorView& of) {
    if (!given(v)) return;
    if (v.dtype != DType::f32 && v.dtype != x.dtype)
      c.wrong(what, fmt::format("is {}; expected f32{}", name(v.dtype),
                                x.dtype == DType::f32 ? "" : fmt::format(", or {} as x", name(x.dtype))));
    c.check(what, v);
    c.expect(what, v.shape, of.shape, fmt::format("{} {}", of_name, to_string(of.shape)));
    c.expect_apart(what, v, {{"x", x}, {"w", w}, {"labels", labels}});
  };
  check_gradient("dx", g.dx, "x", x);
  check_gradient("dw", g.dw, "w", w);
  c.expect_apart("dx", g.dx, {{"dw", g.dw}});
  check_options(c, options);
}

}  // namespace

double vocab_parallel_linear_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                                           const ConstTensorView& w, const ConstTensorView& labels,
                                           const VocabLossOptions& options, const LinearLossGradients& g,
                                           std::int64_t chunk) {
  const Checker c{"vocab_parallel_linear_cross_entropy", compute.device()};
  given_mesh(c.function, axes);
  kernels::KernelContext& ctx = kernels_of(compute);
  const std::int64_t tokens = labels.count(), most = std::min(chunk, tokens);
  const auto* const targets = as<std::int64_t>(labels);
  const bool backward = given(g.dx) || given(g.dw);
  TokenLoss loss{compute, axes, options, VocabPart{0}, {}};
  Tensor all_terms, all_logits, rounded, losses;  // of one chunk; losses: one f64 for each chunk
  std::optional<Output> dw;
  const std::optional<Error> fault = fault_of([&] {
    loss.part = checked_part(c, axes, options.vocab);
    check_linear_loss(c, loss.part, x, w, labels, options, g, chunk);
    loss.valid = count_on_device(compute, options.valid);
    const Tensor checked = compute.make({tokens, kernels::kLossTerms}, DType::f64);
    // The kernel checks all labels; without entries it does nothing else.
    kernels::cross_entropy_terms(ctx, nullptr, targets, checked.data_ptr<double>(), tokens,
                                 {loss.part.first, 0, loss.part.whole}, loss.valid.data_ptr<std::int64_t>(),
                                 0);
    all_terms = loss.make_terms(most);
    all_logits = compute.make({most, loss.part.count});
    if (backward && x.dtype == DType::bf16) rounded = compute.make({most, loss.part.count}, DType::bf16);
    losses = compute.make({chunk < 1 ? 0 : (tokens + chunk - 1) / chunk}, DType::f64);
    if (given(g.dw)) {
      dw.emplace(compute, g.dw);
      if (g.accumulate)
        dw->read();
      else
        kernels::fill(ctx, dw->data(), 0.0f, g.dw.count());
    }
  });
  if (fault) throw_told(c.function, axes, *fault);
  if (group_of(axes) != nullptr) {
    std::vector<AgreedValue> entries = loss_entries(options, labels);
    entries.emplace_back(static_cast<std::uint64_t>(chunk), fmt::format("chunk {}", chunk));
    entries.emplace_back(given(g.dx) ? 1 : 0, given(g.dx) ? "a dx" : "no dx");
    expect_alike(c, axes, entries);
  }
  for (std::int64_t first = 0; first < tokens; first += chunk) {
    const std::int64_t here = std::min(chunk, tokens - first);
    const ConstTensorView of_x = rows_of(x, first, here);
    const Tensor logits = all_logits.slice_flat(0, {here, loss.part.count}),
                 terms = all_terms.slice_flat(0, {axes.size(), here, kernels::kLossTerms});
    const TensorView of_logits = logits.view();
    column_linear_forward(compute, of_x, w, {}, of_logits);
    loss.write_own(logits.data_ptr<float>(), targets + first, terms);
    const Tensor softmax = loss.sum(terms, targets + first, losses.data_ptr<double>() + first / chunk);
    if (!backward) continue;
    loss.gradient(logits.data_ptr<float>(), targets + first, softmax, logits.data_ptr<float>());
    Tensor dlogits = logits;
    if (rounded) {
      dlogits = rounded.slice_flat(0, {here, loss.part.count});
      kernels::round_to_bf16(ctx, logits.data_ptr<float>(), dlogits.data_ptr<bf16>(), logits.count());
    }
    LinearGradients of_chunk{.accumulate = true};
    if (given(g.dx)) of_chunk.dx = rows_of(g.dx, first, here);
    Tensor sum;
    if (dw) {
      sum = dw->tensor();
      of_chunk.dw = sum.view();
    }
    row_linear_backward(compute, dlogits.view(), of_x, w, of_chunk);
  }
  if (dw) dw->round();
  if (ProcessGroup* const group = given(g.dx) && g.dx.count() > 0 ? group_of(axes) : nullptr)
    group->all_reduce(g.dx, g.dx, {.stream = compute.stream()}).wait();
  const Tensor on_host = to_host(compute.context(), losses);
  double total = 0;
  for (const double l : on_host.as<double>()) total += l;
  return total;
}

}  // namespace weft
