#include "weft/ep/dispatch.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>

#include "base/mutant.hpp"
#include "ep/tokens.hpp"
#include "ep/views.hpp"
#include "group/persistent/prepared_exchange.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/float8.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace ep {

DeviceMesh sample_axes(const LayoutRef& layout) {
  std::vector<std::string> names;
  if (layout)
    for (const int axis : layout->nesting)
      if (layout->mesh_shape().size(axis) > 1 &&
          is_shard(layout->placements[static_cast<std::size_t>(axis)], 0))
        names.push_back(layout->mesh_shape().name(axis));
  return names.empty() ? DeviceMesh() : layout->mesh().submesh(names);
}

void expect_samples_split(const TensorName& what, const LayoutRef& layout) {
  if (layout == nullptr) return;
  for (int axis = 0; axis < layout->mesh_shape().axis_count(); ++axis) {
    const Placement& p = layout->placements[static_cast<std::size_t>(axis)];
    if (layout->mesh_shape().size(axis) > 1 && is_shard(p) && !is_shard(p, 0))
      throw Error(ErrorCode::layout,
                  fmt::format("{} is {} on {}; expected Replicate or Shard(0): tokens are routed with their "
                              "whole samples on one rank",
                              what.text(), to_string(p), layouts::axis_name(*layout, axis)));
  }
}

}  // namespace ep

namespace {

std::int64_t sum(std::span<const std::int64_t> counts) {
  return std::accumulate(counts.begin(), counts.end(), std::int64_t{0});
}

// Where each block of `counts` begins.
std::vector<std::int64_t> starts(std::span<const std::int64_t> counts) {
  std::vector<std::int64_t> first(counts.size() + 1);
  std::partial_sum(counts.begin(), counts.end(), first.begin() + 1);
  return first;
}

std::size_t row_bytes(const ConstTensorView& x) {
  return static_cast<std::size_t>(x.shape[1] * size_bytes(x.dtype));
}

// row to[i] of `out` = row from[i] of `in`, each of `bytes` bytes
void copy_rows(const std::byte* in, std::span<const std::int64_t> from, std::byte* out,
               std::span<const std::int64_t> to, std::size_t bytes) {
  for (std::size_t i = 0; i < from.size() && bytes > 0; ++i)
    std::memcpy(out + static_cast<std::size_t>(to[i]) * bytes, in + static_cast<std::size_t>(from[i]) * bytes,
                bytes);
}

// The rows `indices` of a matrix of this width, as what is exchanged with `peer`; without indices: `count`
// rows from row `first` on.
ExchangePart part_of(int peer, std::span<const std::int64_t> indices, std::int64_t width) {
  return {peer,
          {{0,
            0,
            {static_cast<std::int64_t>(indices.size()), width},
            {width, 1},
            {indices.begin(), indices.end()}}}};
}
ExchangePart part_of(int peer, std::int64_t first, std::int64_t count, std::int64_t width) {
  return {peer, {{0, first * width, {count, width}, {width, 1}}}};
}

// Rows on their way. `in`: they are read from there until they have arrived. After that some rows of `out`
// are copied to others.
class RowSteps final : public Transfer::Steps {
 public:
  RowSteps(const TensorView& out, Work work, std::span<const std::int64_t> from,
           std::span<const std::int64_t> to)
      : out_(out), work_(std::move(work)), from_(from), to_(to) {}
  bool done() override { return !work_.valid() || work_.done(); }
  Tensor finish() override {
    if (work_.valid()) work_.wait();
    copy_rows(out_.data, from_, out_.data, to_, row_bytes(out_));
    return {};
  }

 private:
  const TensorView out_;
  Work work_;
  const std::span<const std::int64_t> from_, to_;
};

// The same with tensors, which it keeps.
class TensorSteps final : public Transfer::Steps {
 public:
  TensorSteps(Tensor in, Tensor out, Transfer rows)
      : in_(std::move(in)), out_(std::move(out)), rows_(std::move(rows)) {}
  bool done() override { return rows_.done(); }
  Tensor finish() override {
    rows_.finish();
    return out_;
  }

 private:
  const Tensor in_, out_;
  Transfer rows_;
};

void expect_rows(std::string_view call, std::string_view what, const ConstTensorView& x, std::int64_t rows) {
  ep::expect_matrix(call, what, x);
  if (x.shape[0] != rows)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} has {} rows; expected {}", call, what, x.shape[0], rows));
  ep::expect_view(call, what, x, x.dtype, x.shape);
}

// Throws unless the memory that a call reads and the memory that it writes are apart.
void expect_apart(std::string_view call, std::string_view in_name, const ConstTensorView& in,
                  std::string_view out_name, const TensorView& out) {
  if (in.bytes() > 0 && out.bytes() > 0 && in.data < out.data + out.bytes() &&
      out.data < in.data + in.bytes())
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} and {} overlap; expected disjoint memory", call, in_name, out_name));
}

void expect_f32_or_bf16(std::string_view call, std::string_view what, const ConstTensorView& x) {
  if (x.dtype != DType::f32 && x.dtype != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected f32 or bf16", call, what, name(x.dtype)));
}

template <class T>
float widen(T x) {
  return static_cast<float>(x);
}

template <class Run>
void by_dtype(DType dtype, Run&& run) {
  if (dtype == DType::bf16)
    run.template operator()<bf16>();
  else
    run.template operator()<float>();
}

}  // namespace

ExpertChoices gather_choices(Compute& compute, ProcessGroup& group, const ConstTensorView& experts,
                             const ConstTensorView& weights) {
  ep::expect_matrix("gather_choices", "experts", experts);
  ep::expect_view("gather_choices", "experts", experts, DType::i32, experts.shape);
  ep::expect_view("gather_choices", "weights", weights, DType::f32, experts.shape, ", as experts");
  const std::int64_t own[2] = {experts.shape[0], experts.shape[1]};
  std::vector<std::int64_t> all(2 * static_cast<std::size_t>(group.size()));
  group.all_gather(std::span<const std::int64_t>(own), all).wait();
  std::vector<std::int64_t> tokens;
  for (std::size_t r = 0; 2 * r < all.size(); ++r) {
    tokens.push_back(all[2 * r]);
    if (all[2 * r + 1] != all[1])
      throw Error(
          ErrorCode::mismatch,
          fmt::format("gather_choices: tokens choose {} experts on rank 0 and {} on rank {}; expected "
                      "the same on all ranks",
                      all[1], all[2 * r + 1], r));
  }
  return gather_choices(compute, group, experts, weights, std::move(tokens));
}

ExpertChoices gather_choices(Compute& compute, ProcessGroup& group, const ConstTensorView& experts,
                             const ConstTensorView& weights, std::vector<std::int64_t> tokens) {
  ep::expect_matrix("gather_choices", "experts", experts);
  ep::expect_view("gather_choices", "experts", experts, DType::i32, experts.shape);
  ep::expect_view("gather_choices", "weights", weights, DType::f32, experts.shape, ", as experts");
  const std::int64_t top_k = experts.shape[1], count = experts.count();
  const auto rank = static_cast<std::size_t>(group.rank());
  if (tokens.size() != static_cast<std::size_t>(group.size()) || tokens[rank] != experts.shape[0])
    throw Error(ErrorCode::bad_argument,
                fmt::format("gather_choices: experts has {} tokens; expected {} of {} ranks",
                            experts.shape[0], rank < tokens.size() ? tokens[rank] : 0, group.size()));
  // Both as numbers of 32 bits: first a rank's experts, then its weights.
  std::vector<std::int64_t> counts = tokens;
  for (std::int64_t& c : counts) c *= 2 * top_k;
  const Tensor own = compute.make({2 * count}, DType::i32, Memory::shared),
               all = compute.make({sum(counts)}, DType::i32, Memory::shared);
  if (count > 0) {
    std::memcpy(own.data(), experts.data, static_cast<std::size_t>(count) * 4);
    std::memcpy(own.data() + count * 4, weights.data, static_cast<std::size_t>(count) * 4);
  }
  group.all_gather_v(own.view(), all.view(), {counts}).wait();
  ExpertChoices choices{compute.make({all.count() / 2}, DType::i32), compute.make({all.count() / 2}), {}};
  std::int64_t from = 0, to = 0;
  for (const std::int64_t t : tokens) {
    const std::int64_t n = t * top_k;
    if (n > 0) {
      std::memcpy(choices.experts.data() + to * 4, all.data() + from * 4, static_cast<std::size_t>(n) * 4);
      std::memcpy(choices.weights.data() + to * 4, all.data() + (from + n) * 4,
                  static_cast<std::size_t>(n) * 4);
    }
    from += 2 * n;
    to += n;
  }
  choices.tokens = std::move(tokens);
  return choices;
}

ExpertChoices own_choices(Compute& compute, const ConstTensorView& experts, const ConstTensorView& weights) {
  ep::expect_matrix("own_choices", "experts", experts);
  ep::expect_view("own_choices", "experts", experts, DType::i32, experts.shape);
  ep::expect_view("own_choices", "weights", weights, DType::f32, experts.shape, ", as experts");
  const ExpertChoices choices{
      compute.make({experts.count()}, DType::i32), compute.make({experts.count()}), {experts.shape[0]}};
  if (experts.count() > 0) {
    std::memcpy(choices.experts.data(), experts.data, static_cast<std::size_t>(experts.bytes()));
    std::memcpy(choices.weights.data(), weights.data, static_cast<std::size_t>(weights.bytes()));
  }
  return choices;
}

TokenRoutes::TokenRoutes(const ExpertChoices& choices, int rank, int top_k,
                         std::span<const std::int64_t> first_experts)
    : top_k_(top_k), ranks_(static_cast<int>(choices.tokens.size())), rank_(rank) {
  if (first_experts.size() != choices.tokens.size() + 1 || rank < 0 || rank >= ranks_)
    throw Error(ErrorCode::bad_argument,
                fmt::format("token_routes: {} first experts for rank {} of {} ranks; expected {}",
                            first_experts.size(), rank, ranks_, ranks_ + 1));
  if (first_experts.front() != 0 || !std::ranges::is_sorted(first_experts))
    throw Error(ErrorCode::bad_argument,
                fmt::format("token_routes: first experts are {}; expected numbers that rise from 0",
                            fmt::join(first_experts, ", ")));
  const std::int64_t all = first_experts.back();
  tokens_ = choices.tokens[static_cast<std::size_t>(rank)];
  const auto experts = choices.experts.as<std::int32_t>();
  if (choices.weights.count() != choices.experts.count())
    throw Error(ErrorCode::bad_argument, fmt::format("token_routes: {} weights; expected {}, as choices",
                                                     choices.weights.count(), choices.experts.count()));
  if (choices.experts.count() != sum(choices.tokens) * top_k)
    throw Error(ErrorCode::bad_argument, fmt::format("token_routes: {} choices; expected {} tokens x {}",
                                                     choices.experts.count(), sum(choices.tokens), top_k));
  // The rank of each expert, and its number on that rank.
  std::vector<int> owner(static_cast<std::size_t>(all));
  for (int r = 0; r < ranks_; ++r)
    for (std::int64_t e = first_experts[static_cast<std::size_t>(r)];
         e < first_experts[static_cast<std::size_t>(r) + 1]; ++e)
      owner[static_cast<std::size_t>(e)] = r;
  const std::int64_t first = first_experts[static_cast<std::size_t>(rank)],
                     here = first_experts[static_cast<std::size_t>(rank) + 1] - first;
  const std::vector<std::int64_t> begin = starts(choices.tokens);  // tokens before each rank's
  const auto k_of = static_cast<std::size_t>(top_k);

  offsets_.assign(static_cast<std::size_t>(here) + 1, 0);
  for (std::size_t i = 0; i < experts.size(); ++i) {
    const std::int32_t e = experts[i];
    if (ep::expert_of(e) >= all)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("token_routes: choice {} of token {} is expert {}; there are {}", i % k_of,
                              i / k_of, ep::expert_of(e), all));
    for (std::size_t j = i - i % k_of; j < i; ++j)
      if (ep::expert_of(experts[j]) == ep::expert_of(e))
        throw Error(ErrorCode::bad_argument,
                    fmt::format("token_routes: token {} chose expert {} twice", i / k_of, ep::expert_of(e)));
    if (e >= 0 && owner[static_cast<std::size_t>(e)] == rank)
      ++offsets_[static_cast<std::size_t>(e - first) + 1];
  }
  std::partial_sum(offsets_.begin(), offsets_.end(), offsets_.begin());

  // The rows that come here, in the order of ranks and tokens. A token comes once, to the first of its rows.
  std::vector<std::int64_t> next(offsets_.begin(), offsets_.end() - 1);
  row_weights_.resize(static_cast<std::size_t>(rows()));
  row_tokens_.resize(static_cast<std::size_t>(rows()));
  for (int s = 0; s < ranks_; ++s) {
    std::vector<std::int64_t>&came = came_rows_.emplace_back(), &returned = returned_rows_.emplace_back();
    for (std::int64_t t = begin[static_cast<std::size_t>(s)]; t < begin[static_cast<std::size_t>(s) + 1];
         ++t) {
      std::int64_t first_row = -1;
      for (std::size_t i = static_cast<std::size_t>(t) * k_of; i < static_cast<std::size_t>(t + 1) * k_of;
           ++i) {
        if (experts[i] < 0 || owner[static_cast<std::size_t>(experts[i])] != rank) continue;
        const std::int64_t row = next[static_cast<std::size_t>(experts[i] - first)]++;
        row_weights_[static_cast<std::size_t>(row)] = choices.weights.f32()[i];
        row_tokens_[static_cast<std::size_t>(row)] = t;
        returned.push_back(row);
        if (s == rank) {
          own_tokens_.push_back(t - begin[static_cast<std::size_t>(s)]);
        } else if (first_row < 0) {
          came.push_back(first_row = row);
        } else {
          copied_from_.push_back(first_row);
          copied_to_.push_back(row);
        }
      }
    }
  }

  // The rows that go from here: each token once to each rank, and the results by rank, token and choice.
  const std::size_t own = static_cast<std::size_t>(begin[static_cast<std::size_t>(rank)]) * k_of;
  result_of_.assign(static_cast<std::size_t>(tokens_) * k_of, -1);
  first_results_.push_back(0);
  for (int r = 0; r < ranks_; ++r) {
    std::vector<std::int64_t>& sent = sent_tokens_.emplace_back();
    std::int64_t result = first_results_.back();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      bool goes = false;
      for (std::size_t i = static_cast<std::size_t>(t) * k_of; i < static_cast<std::size_t>(t + 1) * k_of;
           ++i) {
        const std::int32_t e = experts[own + i];
        if (e < 0 || owner[static_cast<std::size_t>(e)] != r) continue;
        result_of_[i] = result++;
        goes = true;
      }
      if (goes && r != rank) sent.push_back(t);
    }
    first_results_.push_back(result);
  }
}

Transfer TokenRoutes::start_dispatch(ProcessGroup* group, const ConstTensorView& x,
                                     const TensorView& rows) const {
  expect_rows("dispatch", "x", x, tokens_);
  const std::int64_t width = x.shape[1];
  ep::expect_view("dispatch", "rows", rows, x.dtype, {this->rows(), width});
  expect_apart("dispatch", "x", x, "rows", rows);
  const auto own = static_cast<std::size_t>(rank_);
  Work work;
  if (ranks_ > 1) {
    ExchangePlan plan{.fields = {x.dtype}, .name = "dispatch"};
    for (std::size_t r = 0; r < came_rows_.size(); ++r) {
      if (r == own) continue;
      plan.sends.push_back(part_of(static_cast<int>(r), sent_tokens_[r], width));
      plan.receives.push_back(part_of(static_cast<int>(r), came_rows_[r], width));
    }
    work = exchanged(group, plan, x, rows);
  }
  copy_rows(x.data, own_tokens_, rows.data, returned_rows_[own], row_bytes(x));
  return Transfer(std::make_unique<RowSteps>(rows, std::move(work), copied_from_, copied_to_));
}

Transfer TokenRoutes::start_combine(ProcessGroup* group, const ConstTensorView& rows,
                                    const TensorView& results) const {
  expect_rows("combine", "rows", rows, this->rows());
  const std::int64_t width = rows.shape[1];
  ep::expect_view("combine", "results", results, rows.dtype, {this->results(), width});
  expect_apart("combine", "rows", rows, "results", results);
  const auto own = static_cast<std::size_t>(rank_);
  Work work;
  if (ranks_ > 1) {
    ExchangePlan plan{.fields = {rows.dtype}, .name = "combine"};
    for (std::size_t r = 0; r < returned_rows_.size(); ++r) {
      if (r == own) continue;
      plan.sends.push_back(part_of(static_cast<int>(r), returned_rows_[r], width));
      plan.receives.push_back(
          part_of(static_cast<int>(r), first_results_[r], first_results_[r + 1] - first_results_[r], width));
    }
    work = exchanged(group, plan, rows, results);
  }
  std::vector<std::int64_t> to(returned_rows_[own].size());
  std::iota(to.begin(), to.end(), first_results_[own]);
  copy_rows(rows.data, returned_rows_[own], results.data, to, row_bytes(rows));
  using None = std::span<const std::int64_t>;
  return Transfer(std::make_unique<RowSteps>(results, std::move(work), None(), None()));
}

Transfer TokenRoutes::start_dispatch(Compute& compute, ProcessGroup* group, const Tensor& x) const {
  expect_rows("dispatch", "x", x, tokens_);
  Tensor out = compute.make({rows(), x.size(1)}, x.dtype());
  Transfer transfer = start_dispatch(group, x, out);
  return Transfer(std::make_unique<TensorSteps>(x, std::move(out), std::move(transfer)));
}

Transfer TokenRoutes::start_combine(Compute& compute, ProcessGroup* group, const Tensor& rows_in) const {
  expect_rows("combine", "rows", rows_in, rows());
  Tensor out = compute.make({results(), rows_in.size(1)}, rows_in.dtype());
  Transfer transfer = start_combine(group, rows_in, out);
  return Transfer(std::make_unique<TensorSteps>(rows_in, std::move(out), std::move(transfer)));
}

// Every other rank is in the plan, also where no row travels: so all ranks take part in each exchange. The
// plan is sound, because each row of `out` is in one list of the routes, and `in` is other memory. Ranks
// compare the numbers of their rows.
Work TokenRoutes::exchanged(ProcessGroup* group, const ExchangePlan& plan, const ConstTensorView& in,
                            const TensorView& out) const {
  if (group == nullptr || group->size() != ranks_)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: group has {} ranks; expected {}, as the choices", plan.name,
                            group == nullptr ? 1 : group->size(), ranks_));
  if (group->rank() != rank_)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: this is rank {} of the group; the routes are of rank {}", plan.name,
                            group->rank(), rank_));
  const ExchangeField field{in.data, out.data};
  return detail::PreparedExchange::make_sound(*group, plan).start({&field, 1});
}

void TokenRoutes::weighted_sum(const ConstTensorView& results, const ConstTensorView& weights,
                               const TensorView& y) const {
  expect_rows("weighted_sum", "results", results, this->results());
  expect_f32_or_bf16("weighted_sum", "results", results);
  const std::int64_t width = results.shape[1];
  ep::expect_view("weighted_sum", "y", y, results.dtype, {tokens_, width});
  const bool weighs = weights.data != nullptr;
  if (weighs) ep::expect_view("weighted_sum", "weights", weights, DType::f32, {tokens_, top_k_});
  std::vector<float> total(static_cast<std::size_t>(width));
  std::vector<std::int64_t> order(static_cast<std::size_t>(top_k_));  // of the choices of a token
  by_dtype(results.dtype, [&]<class T>() {
    const T* const from = results.template as<T>().data();
    T* const to = y.template as<T>().data();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::ranges::fill(total, 0.0f);
      std::iota(order.begin(), order.end(), t * top_k_);
      if (WEFT_MUTANT("exact_choices_by_rank"))
        std::ranges::sort(order, {}, [&](std::int64_t i) { return result_of_[static_cast<std::size_t>(i)]; });
      for (const std::int64_t i : order) {
        const std::int64_t row = result_of_[static_cast<std::size_t>(i)];
        if (row < 0) continue;
        const float weight = weighs ? weights.as<float>()[static_cast<std::size_t>(i)] : 1.0f;
        const T* const of_row = from + row * width;
        for (std::int64_t c = 0; c < width; ++c)
          total[static_cast<std::size_t>(c)] += weight * widen(of_row[c]);
      }
      for (std::int64_t c = 0; c < width; ++c)
        to[t * width + c] = static_cast<T>(total[static_cast<std::size_t>(c)]);
    }
  });
}

void TokenRoutes::row_products(const ConstTensorView& results, const ConstTensorView& dy,
                               const TensorView& dweights) const {
  expect_rows("row_products", "results", results, this->results());
  expect_rows("row_products", "dy", dy, tokens_);
  expect_f32_or_bf16("row_products", "results", results);
  ep::expect_view("row_products", "dy", dy, results.dtype, {tokens_, results.shape[1]});
  ep::expect_view("row_products", "dweights", dweights, DType::f32, {tokens_, top_k_});
  const std::int64_t width = results.shape[1];
  by_dtype(results.dtype, [&]<class T>() {
    const T *const from = results.template as<T>().data(), *const gradients = dy.template as<T>().data();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const T* const of_dy = gradients + t * width;
      for (std::int64_t i = t * top_k_; i < (t + 1) * top_k_; ++i) {
        const std::int64_t row = result_of_[static_cast<std::size_t>(i)];
        double product = 0;
        if (row >= 0)
          for (std::int64_t c = 0; c < width; ++c)
            product +=
                static_cast<double>(widen(of_dy[c])) * static_cast<double>(widen(from[row * width + c]));
        dweights.as<float>()[static_cast<std::size_t>(i)] = static_cast<float>(product);
      }
    }
  });
}

namespace {
constexpr std::int64_t kScaleBytes = sizeof(float);
}

Tensor to_float8_rows(Compute& compute, const Tensor& x, Memory memory) {
  ep::expect_matrix("to_float8_rows", "x", x.view());
  expect_f32_or_bf16("to_float8_rows", "x", x);
  const std::int64_t count = x.size(0), width = x.size(1);
  std::vector<float> scales(static_cast<std::size_t>(count));
  float8::amax(kernels_of(compute), x.view(), float8::Granularity::rowwise, scales.data());
  for (float& scale : scales) scale = float8::scale_of(scale, DType::f8e4m3, true);
  const Tensor codes = compute.make(x.shape(), DType::f8e4m3),
               rows = compute.make({count, width + kScaleBytes}, DType::u8, memory);
  float8::quantise(kernels_of(compute), x.view(), float8::Granularity::rowwise, scales.data(), codes.view());
  for (std::int64_t r = 0; r < count; ++r) {
    std::byte* const to = rows.data() + r * (width + kScaleBytes);
    if (width > 0) std::memcpy(to, codes.data() + r * width, static_cast<std::size_t>(width));
    std::memcpy(to + width, &scales[static_cast<std::size_t>(r)], kScaleBytes);
  }
  return rows;
}

Tensor from_float8_rows(Compute& compute, const Tensor& rows, DType dtype) {
  ep::expect_matrix("from_float8_rows", "rows", rows.view());
  const std::int64_t count = rows.size(0), width = rows.size(1) - kScaleBytes;
  if (rows.dtype() != DType::u8 || width < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("from_float8_rows: rows is {} {}; expected u8 (rows, width + {})",
                            name(rows.dtype()), to_string(rows.shape()), kScaleBytes));
  const Tensor codes = compute.make({count, width}, DType::f8e4m3), y = compute.make({count, width}, dtype);
  expect_f32_or_bf16("from_float8_rows", "the result", y);
  for (std::int64_t r = 0; r < count && width > 0; ++r)
    std::memcpy(codes.data() + r * width, rows.data() + r * rows.size(1), static_cast<std::size_t>(width));
  float8::widen(kernels_of(compute), codes.view(), y.view());
  by_dtype(dtype, [&]<class T>() {
    for (std::int64_t r = 0; r < count; ++r) {
      float scale = 1;
      std::memcpy(&scale, rows.data() + r * rows.size(1) + width, kScaleBytes);
      T* const row = y.data_ptr<T>() + r * width;
      for (std::int64_t c = 0; c < width; ++c) row[c] = static_cast<T>(widen(row[c]) / scale);
    }
  });
  return y;
}

}  // namespace weft
