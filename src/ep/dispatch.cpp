#include "weft/ep/dispatch.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>
#include <memory>
#include <numeric>

#include "ep/tokens.hpp"
#include "ep/views.hpp"
#include "weft/base/error.hpp"
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

// An all_to_all_v of rows, then the rows `order` of what came; an empty order: as they came.
class RowSteps final : public Transfer::Steps {
 public:
  RowSteps(Compute& compute, Tensor sent, Tensor came, Work work, std::span<const std::int64_t> order,
           bool in_order)
      : compute_(compute),
        sent_(std::move(sent)),
        came_(std::move(came)),
        work_(std::move(work)),
        order_(order),
        in_order_(in_order) {}
  bool done() override { return work_.done(); }
  Tensor finish() override;

 private:
  Compute& compute_;
  const Tensor sent_, came_;
  Work work_;
  const std::span<const std::int64_t> order_;
  const bool in_order_;
};

// to = the rows `order` of x, each of `bytes` bytes
void copy_rows(const std::byte* x, std::span<const std::int64_t> order, std::size_t bytes, std::byte* to) {
  for (const std::int64_t row : order) {
    std::memcpy(to, x + static_cast<std::size_t>(row) * bytes, bytes);
    to += bytes;
  }
}

Tensor rows_in_order(Compute& compute, const Tensor& x, std::span<const std::int64_t> order, Memory memory) {
  const Tensor y = compute.make({static_cast<std::int64_t>(order.size()), x.size(1)}, x.dtype(), memory);
  if (x.size(1) > 0)
    copy_rows(x.data(), order, static_cast<std::size_t>(x.size(1) * size_bytes(x.dtype())), y.data());
  return y;
}

Tensor RowSteps::finish() {
  work_.wait();
  return in_order_ ? came_ : rows_in_order(compute_, came_, order_, Memory::local);
}

Transfer start_rows(Compute& compute, ProcessGroup& group, Tensor sent,
                    std::span<const std::int64_t> send_counts, std::span<const std::int64_t> receive_counts,
                    std::span<const std::int64_t> order, bool in_order) {
  const std::int64_t width = sent.size(1);
  std::vector<std::int64_t> in(send_counts.begin(), send_counts.end()),
      out(receive_counts.begin(), receive_counts.end());
  for (std::int64_t& count : in) count *= width;
  for (std::int64_t& count : out) count *= width;
  const Tensor came = compute.make({sum(receive_counts), width}, sent.dtype(), Memory::shared);
  Work work = group.all_to_all_v(sent.view(), came.view(), {in}, {out});
  return Transfer(
      std::make_unique<RowSteps>(compute, std::move(sent), came, std::move(work), order, in_order));
}

void expect_rows(std::string_view call, std::string_view what, const Tensor& x, std::int64_t rows) {
  ep::expect_matrix(call, what, x.view());
  if (x.size(0) != rows)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} has {} rows; expected {}", call, what, x.size(0), rows));
}

void expect_f32_or_bf16(std::string_view call, std::string_view what, const Tensor& x) {
  if (x.dtype() != DType::f32 && x.dtype() != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected f32 or bf16", call, what, name(x.dtype())));
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

TokenRoutes::TokenRoutes(const ExpertChoices& choices, int rank, int top_k,
                         std::span<const std::int64_t> first_experts)
    : top_k_(top_k), ranks_(static_cast<int>(choices.tokens.size())), rank_(rank) {
  if (first_experts.size() != choices.tokens.size() + 1 || rank < 0 || rank >= ranks_)
    throw Error(ErrorCode::bad_argument,
                fmt::format("token_routes: {} first experts for rank {} of {} ranks; expected {}",
                            first_experts.size(), rank, ranks_, ranks_ + 1));
  const std::int64_t all = first_experts.back();
  tokens_ = choices.tokens[static_cast<std::size_t>(rank)];
  const auto experts = choices.experts.as<std::int32_t>();
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

  // The rows that come here, in the order of ranks and tokens: rows of a dispatch, and rows by expert.
  std::vector<std::int64_t> next(offsets_.begin(), offsets_.end() - 1);
  source_.resize(static_cast<std::size_t>(rows()));
  row_weights_.resize(static_cast<std::size_t>(rows()));
  std::int64_t came = 0;
  for (int s = 0; s < ranks_; ++s) {
    const std::int64_t came_before = came;
    const std::size_t returned_before = returned_.size();
    for (std::int64_t t = begin[static_cast<std::size_t>(s)]; t < begin[static_cast<std::size_t>(s) + 1];
         ++t) {
      bool comes = false;
      for (std::size_t i = static_cast<std::size_t>(t) * k_of; i < static_cast<std::size_t>(t + 1) * k_of;
           ++i) {
        if (experts[i] < 0 || owner[static_cast<std::size_t>(experts[i])] != rank) continue;
        const auto row = static_cast<std::size_t>(next[static_cast<std::size_t>(experts[i] - first)]++);
        source_[row] = came;
        row_weights_[row] = choices.weights.f32()[i];
        returned_.push_back(static_cast<std::int64_t>(row));
        comes = true;
      }
      came += comes ? 1 : 0;
    }
    receive_counts_.push_back(came - came_before);
    return_counts_.push_back(static_cast<std::int64_t>(returned_.size() - returned_before));
  }

  // The rows that go from here: each token once to each rank, and the results by rank, token and choice.
  const std::size_t own = static_cast<std::size_t>(begin[static_cast<std::size_t>(rank)]) * k_of;
  result_of_.assign(static_cast<std::size_t>(tokens_) * k_of, -1);
  std::int64_t result = 0;
  for (int r = 0; r < ranks_; ++r) {
    const std::size_t sent_before = sent_tokens_.size();
    const std::int64_t result_before = result;
    for (std::int64_t t = 0; t < tokens_; ++t) {
      bool goes = false;
      for (std::size_t i = static_cast<std::size_t>(t) * k_of; i < static_cast<std::size_t>(t + 1) * k_of;
           ++i) {
        const std::int32_t e = experts[own + i];
        if (e < 0 || owner[static_cast<std::size_t>(e)] != r) continue;
        result_of_[i] = result++;
        goes = true;
      }
      if (goes) sent_tokens_.push_back(t);
    }
    send_counts_.push_back(static_cast<std::int64_t>(sent_tokens_.size() - sent_before));
    result_counts_.push_back(result - result_before);
  }
}

std::int64_t TokenRoutes::sent_rows() const noexcept {
  return sum(send_counts_) - send_counts_[static_cast<std::size_t>(rank_)];
}
std::int64_t TokenRoutes::received_rows() const noexcept {
  return sum(receive_counts_) - receive_counts_[static_cast<std::size_t>(rank_)];
}

Transfer TokenRoutes::start_dispatch(Compute& compute, ProcessGroup* group, const Tensor& x) const {
  expect_rows("dispatch", "x", x, tokens_);
  if (ranks_ == 1) {
    const Tensor sent = rows_in_order(compute, x, sent_tokens_, Memory::local);
    return Transfer(rows_in_order(compute, sent, source_, Memory::local));
  }
  return start_rows(compute, *group, rows_in_order(compute, x, sent_tokens_, Memory::shared), send_counts_,
                    receive_counts_, source_, false);
}

Transfer TokenRoutes::start_combine(Compute& compute, ProcessGroup* group, const Tensor& rows_in) const {
  expect_rows("combine", "rows", rows_in, rows());
  if (ranks_ == 1) return Transfer(rows_in_order(compute, rows_in, returned_, Memory::local));
  return start_rows(compute, *group, rows_in_order(compute, rows_in, returned_, Memory::shared),
                    return_counts_, result_counts_, {}, true);
}

void TokenRoutes::weighted_sum(const Tensor& results, const ConstTensorView& weights,
                               const TensorView& y) const {
  expect_rows("weighted_sum", "results", results, sum(result_counts_));
  expect_f32_or_bf16("weighted_sum", "results", results);
  const std::int64_t width = results.size(1);
  ep::expect_view("weighted_sum", "y", y, results.dtype(), {tokens_, width});
  const bool weighs = weights.data != nullptr;
  if (weighs) ep::expect_view("weighted_sum", "weights", weights, DType::f32, {tokens_, top_k_});
  std::vector<float> total(static_cast<std::size_t>(width));
  by_dtype(results.dtype(), [&]<class T>() {
    const T* const from = results.data_ptr<T>();
    T* const to = y.template as<T>().data();
    for (std::int64_t t = 0; t < tokens_; ++t) {
      std::ranges::fill(total, 0.0f);
      for (std::int64_t i = t * top_k_; i < (t + 1) * top_k_; ++i) {
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

void TokenRoutes::row_products(const Tensor& results, const Tensor& dy, const TensorView& dweights) const {
  expect_rows("row_products", "results", results, sum(result_counts_));
  expect_rows("row_products", "dy", dy, tokens_);
  expect_f32_or_bf16("row_products", "results", results);
  ep::expect_view("row_products", "dy", dy.view(), results.dtype(), {tokens_, results.size(1)});
  ep::expect_view("row_products", "dweights", dweights, DType::f32, {tokens_, top_k_});
  const std::int64_t width = results.size(1);
  by_dtype(results.dtype(), [&]<class T>() {
    for (std::int64_t t = 0; t < tokens_; ++t) {
      const T* const of_dy = dy.data_ptr<T>() + t * width;
      for (std::int64_t i = t * top_k_; i < (t + 1) * top_k_; ++i) {
        const std::int64_t row = result_of_[static_cast<std::size_t>(i)];
        double product = 0;
        if (row >= 0)
          for (std::int64_t c = 0; c < width; ++c)
            product += static_cast<double>(widen(of_dy[c])) *
                       static_cast<double>(widen(results.data_ptr<T>()[row * width + c]));
        dweights.as<float>()[static_cast<std::size_t>(i)] = static_cast<float>(product);
      }
    }
  });
}

}  // namespace weft
