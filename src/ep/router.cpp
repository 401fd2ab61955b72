#include "weft/ep/router.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <limits>
#include <numeric>

#include "ep/tokens.hpp"
#include "ep/views.hpp"
#include "mesh/axis_ranks.hpp"
#include "weft/base/error.hpp"
#include "weft/ep/dispatch.hpp"
#include "weft/group/process_group.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

// The sizes of a router's views.
struct RouterShape {
  std::int64_t tokens, experts;
  int top_k;
};

RouterShape checked_shape(std::string_view call, const ConstTensorView& logits, const ConstTensorView& bias,
                          const RouterOptions& options) {
  ep::expect_matrix(call, "logits", logits);
  const RouterShape s{logits.shape[0], logits.shape[1], options.top_k};
  ep::expect_view(call, "logits", logits, DType::f32, logits.shape);
  if (s.top_k < 1 || s.top_k > s.experts)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{}: top_k is {}; expected 1 to {}, the number of experts", call, s.top_k, s.experts));
  if (options.bias != RouterBias::none)
    ep::expect_view(call, "bias", bias, DType::f32, {s.experts}, ", one for each expert");
  for (std::int64_t i = 0; options.bias != RouterBias::none && i < s.experts; ++i)
    if (const float value = bias.as<float>()[static_cast<std::size_t>(i)]; !std::isfinite(value))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: bias[{}] is {}; expected finite numbers", call, i, value));
  return s;
}

void expect_choices(std::string_view call, const ConstTensorView& experts, const RouterShape& s) {
  ep::expect_view(call, "experts", experts, DType::i32, {s.tokens, s.top_k});
}

// Choices that a caller made, or route_tokens().
void expect_known_experts(std::string_view call, const ConstTensorView& experts, const RouterShape& s) {
  expect_choices(call, experts, s);
  const auto chosen = experts.as<std::int32_t>();
  for (std::size_t i = 0; i < chosen.size(); ++i)
    if (ep::expert_of(chosen[i]) >= s.experts)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: choice {} of token {} is expert {}; there are {}", call,
                              i % static_cast<std::size_t>(s.top_k), i / static_cast<std::size_t>(s.top_k),
                              ep::expert_of(chosen[i]), s.experts));
}

// The logarithm of the sum of e^logit.
float log_sum_exp(const float* logits, std::int64_t experts) {
  const float largest = *std::max_element(logits, logits + experts);
  float sum = 0;
  for (std::int64_t i = 0; i < experts; ++i) sum += std::exp(logits[i] - largest);
  return largest + std::log(sum);
}

// The scores of one token.
void scores_of(const float* logits, const float* bias, const RouterOptions& options, std::int64_t experts,
               float* scores) {
  const bool weighs = options.bias == RouterBias::weighs;
  for (std::int64_t i = 0; i < experts; ++i) scores[i] = weighs ? logits[i] + bias[i] : logits[i];
  if (options.scores == RouterScores::sigmoid) {
    for (std::int64_t i = 0; i < experts; ++i) scores[i] = 1 / (1 + std::exp(-scores[i]));
    return;
  }
  const float largest = *std::max_element(scores, scores + experts);
  float sum = 0;
  for (std::int64_t i = 0; i < experts; ++i) sum += scores[i] = std::exp(scores[i] - largest);
  for (std::int64_t i = 0; i < experts; ++i) scores[i] /= sum;
}

const float* bias_of(const ConstTensorView& bias, const RouterOptions& options) {
  return options.bias == RouterBias::none ? nullptr : bias.as<float>().data();
}

// The first token with a logit that is not finite; -1: none.
std::int64_t not_finite(std::span<const float> logits, std::int64_t experts) {
  for (std::size_t i = 0; i < logits.size(); ++i)
    if (!std::isfinite(logits[i])) return static_cast<std::int64_t>(i) / experts;
  return -1;
}

void choose_of_each(const float* logits, const float* bias, const RouterOptions& options,
                    const RouterShape& s, std::int32_t* experts, float* weights) {
  const auto n = static_cast<std::size_t>(s.experts);
  std::vector<float> scores(n), keys(n);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    scores_of(logits + t * s.experts, bias, options, s.experts, scores.data());
    for (std::size_t i = 0; i < n; ++i)
      keys[i] = options.bias == RouterBias::selects ? scores[i] + bias[i] : scores[i];
    std::int32_t* const chosen = experts + t * s.top_k;
    float* const weight = weights + t * s.top_k;
    float sum = 0;
    for (int k = 0; k < s.top_k; ++k) {
      // The first of the largest; a chosen expert is not chosen again.
      const auto best = std::max_element(keys.begin(), keys.end()) - keys.begin();
      const auto at = static_cast<std::size_t>(best);
      chosen[k] = static_cast<std::int32_t>(best);
      sum += weight[k] = scores[at];
      keys[at] = -std::numeric_limits<float>::infinity();
    }
    if (options.normalise)
      for (int k = 0; k < s.top_k; ++k) weight[k] = sum > 0 ? weight[k] / sum : 0.0f;
  }
}

}  // namespace

std::int64_t expert_capacity(double factor, std::int64_t tokens, int top_k, std::int64_t experts) {
  const double mean = static_cast<double>(tokens) * top_k / static_cast<double>(experts);
  const double most = static_cast<double>(tokens) * top_k;  // all assignments
  return std::max<std::int64_t>(1, static_cast<std::int64_t>(std::min(std::ceil(mean * factor), most)));
}

double RouterReport::imbalance() const noexcept {
  if (assignments == 0) return 1;
  const double largest = static_cast<double>(*std::max_element(counts.begin(), counts.end()));
  return largest * static_cast<double>(counts.size()) / static_cast<double>(assignments);
}

void route_tokens(const ConstTensorView& logits, const ConstTensorView& bias, const RouterOptions& options,
                  const TensorView& experts, const TensorView& weights) {
  const RouterShape s = checked_shape("route_tokens", logits, bias, options);
  expect_choices("route_tokens", experts, s);
  ep::expect_view("route_tokens", "weights", weights, DType::f32, {s.tokens, s.top_k});
  if (const std::int64_t token = not_finite(logits.as<float>(), s.experts); token >= 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("route_tokens: the logits of token {} are not finite", token));
  choose_of_each(logits.as<float>().data(), bias_of(bias, options), options, s,
                 experts.as<std::int32_t>().data(), weights.as<float>().data());
}

void add_router_sums(const ConstTensorView& logits, const ConstTensorView& bias,
                     const ConstTensorView& experts, const RouterOptions& options, RouterSums& sums) {
  const RouterShape s = checked_shape("add_router_sums", logits, bias, options);
  expect_known_experts("add_router_sums", experts, s);
  const auto n = static_cast<std::size_t>(s.experts);
  sums.counts.resize(n);
  sums.scores.resize(n);
  std::vector<float> scores(n);
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const float* const of_token = logits.as<float>().data() + t * s.experts;
    scores_of(of_token, bias_of(bias, options), options, s.experts, scores.data());
    const auto lse = static_cast<double>(log_sum_exp(of_token, s.experts));
    sums.z += lse * lse;
    for (std::size_t i = 0; i < n; ++i) sums.scores[i] += static_cast<double>(scores[i]);
  }
  for (const std::int32_t e : experts.as<std::int32_t>())
    sums.counts[static_cast<std::size_t>(ep::expert_of(e))] += 1;
}

void route_tokens_backward(const ConstTensorView& logits, const ConstTensorView& bias,
                           const ConstTensorView& experts, const ConstTensorView& weights,
                           const ConstTensorView& dweights, const RouterOptions& options,
                           const RouterLossTerms& losses, const TensorView& dlogits,
                           const TensorView& dbias) {
  const std::string_view call = "route_tokens_backward";
  const RouterShape s = checked_shape(call, logits, bias, options);
  expect_known_experts(call, experts, s);
  ep::expect_view(call, "weights", weights, DType::f32, {s.tokens, s.top_k});
  ep::expect_view(call, "dweights", dweights, DType::f32, {s.tokens, s.top_k});
  ep::expect_view(call, "dlogits", dlogits, DType::f32, logits.shape, ", as logits");
  const auto n = static_cast<std::size_t>(s.experts);
  if (!losses.shares.empty() && losses.shares.size() != n)
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} shares; expected {}, one for each expert", call,
                                                     losses.shares.size(), n));
  std::vector<float> scores(n), dscores(n);
  if (dbias.data != nullptr) ep::expect_view(call, "dbias", dbias, DType::f32, {s.experts});
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    const float* const logit = logits.as<float>().data() + t * s.experts;
    scores_of(logit, bias_of(bias, options), options, s.experts, scores.data());
    const std::int32_t* const chosen = experts.as<std::int32_t>().data() + t * s.top_k;
    const float* const weight = weights.as<float>().data() + t * s.top_k;
    const float* const dweight = dweights.as<float>().data() + t * s.top_k;
    float* const dlogit = dlogits.as<float>().data() + t * s.experts;
    for (std::size_t i = 0; i < n; ++i)
      dscores[i] = losses.shares.empty()
                       ? 0.0f
                       : static_cast<float>(losses.aux * static_cast<double>(s.experts) * losses.shares[i]);
    // weight_k = score_k / sum: dscore_k = (dweight_k − Σ_j dweight_j weight_j) / sum
    float sum = 0, through_sum = 0;
    for (int k = 0; k < s.top_k; ++k) {
      sum += scores[static_cast<std::size_t>(ep::expert_of(chosen[k]))];
      if (chosen[k] >= 0) through_sum += dweight[k] * weight[k];
    }
    for (int k = 0; k < s.top_k; ++k) {
      const float own = chosen[k] >= 0 ? dweight[k] : 0.0f;
      float& d = dscores[static_cast<std::size_t>(ep::expert_of(chosen[k]))];
      if (!options.normalise)
        d += own;
      else if (sum > 0)
        d += (own - through_sum) / sum;
    }
    if (options.scores == RouterScores::sigmoid) {
      for (std::size_t i = 0; i < n; ++i) dlogit[i] = dscores[i] * scores[i] * (1 - scores[i]);
    } else {
      float mean = 0;
      for (std::size_t i = 0; i < n; ++i) mean += dscores[i] * scores[i];
      for (std::size_t i = 0; i < n; ++i) dlogit[i] = scores[i] * (dscores[i] - mean);
    }
    if (dbias.data != nullptr)
      for (std::size_t i = 0; i < n; ++i) dbias.as<float>()[i] += dlogit[i];
    if (losses.z == 0) continue;
    const float lse = log_sum_exp(logit, s.experts);
    const auto factor = static_cast<float>(2 * losses.z * static_cast<double>(lse));
    for (std::size_t i = 0; i < n; ++i) dlogit[i] += factor * std::exp(logit[i] - lse);
  }
}

// ---- the module ----

namespace {

// The numbers that a data rank sends to the others, and what all of them make of it.
struct SentByRank {
  static constexpr std::size_t kTokens = 0, kNotFinite = 1, kZ = 2, kAuxOfSequences = 3, kSequences = 4,
                               kDropped = 5, kSums = 6;
  static std::size_t size(std::int64_t experts) { return kSums + 2 * static_cast<std::size_t>(experts); }
};

void expect_factor(const char* what, double value) {
  if (!(value >= 0 && std::isfinite(value)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("router: {} is {}; expected a finite number of 0 or more", what, value));
}

// The auxiliary loss of sums over `tokens` tokens.
double balance_loss(std::span<const double> counts, std::span<const double> scores, double tokens,
                    double assignments) {
  double sum = 0;
  for (std::size_t i = 0; i < counts.size(); ++i) sum += counts[i] * scores[i];
  return tokens == 0 ? 0 : static_cast<double>(counts.size()) * sum / (tokens * assignments);
}

// The tokens of a sample: all dimensions of x but the first and the last.
std::int64_t tokens_of_sample(const Tensor& x) {
  std::int64_t n = 1;
  for (int i = 1; i + 1 < x.shape().rank(); ++i) n *= x.size(i);
  return n;
}

ConstTensorView rows_of(const Tensor& t, std::int64_t first, std::int64_t rows) {
  const std::int64_t width = t.size(1);
  return t.slice_flat(first * width, {rows, width}).view();
}

// A choice of the global batch for one expert.
struct Candidate {
  float weight;
  std::int64_t place;  // token · top_k + choice, in the order of the global batch
};

// Marks the choices that an expert cannot keep. `kept(expert, place)` says which stay.
// Returns their number.
template <class Keeps>
std::int64_t drop(std::span<std::int32_t> experts, Keeps&& keeps) {
  std::int64_t dropped = 0;
  for (std::size_t i = 0; i < experts.size(); ++i)
    if (!keeps(experts[i], i)) experts[i] = ~experts[i], ++dropped;
  return dropped;
}

std::int64_t drop_by_choice(std::span<std::int32_t> experts, int top_k, std::int64_t count,
                            std::int64_t capacity) {
  std::vector<std::int64_t> taken(static_cast<std::size_t>(count * top_k));
  return drop(experts, [&](std::int32_t e, std::size_t i) {
    const auto k = static_cast<std::int64_t>(i) % top_k;
    return taken[static_cast<std::size_t>(k * count + e)]++ < capacity;
  });
}

}  // namespace

Router::Router(std::int64_t dim, std::int64_t experts, const RouterOptions& options, Init init)
    : gate(dim, experts, false, init), experts_(experts), options_(options) {
  if (options.top_k < 1 || options.top_k > experts)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("router: top_k is {}; expected 1 to {}, the number of experts", options.top_k, experts));
  expect_factor("noise", options.noise);
  expect_factor("capacity_factor", options.capacity_factor);
  expect_factor("aux_loss", options.aux_loss);
  expect_factor("z_loss", options.z_loss);
  if (options.capacity == Capacity::none && options.capacity_factor != RouterOptions{}.capacity_factor)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("router: capacity_factor is {}, but capacity is none; expected by_weight, by_position "
                    "or per_choice_and_rank with it",
                    options.capacity_factor));
  add("gate", gate);
  gate.set_output_dtype(DType::f32);
  if (options.bias == RouterBias::selects)
    bias_buffer = add("expert_bias", std::make_shared<ModuleBuffer>(Shape{experts}));
  if (options.bias == RouterBias::weighs) {
    bias_parameter = add("expert_bias", std::make_shared<Parameter>(Shape{experts}, Constant{0}));
    share = add("expert_share", std::make_shared<ModuleBuffer>(Shape{experts}, DType::f32,
                                                               Constant{1.0 / static_cast<double>(experts)}));
  }
}

Tensor Router::bias_values() const {
  if (bias_buffer) return bias_buffer->tensor();
  return bias_parameter ? bias_parameter->weight() : Tensor();
}

Tensors Router::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  layouts::expect_whole(layouts::named(*this, "x"), x, "a router");
  ep::expect_samples_split(layouts::named(*this, "x"), x.layout());
  const Tensor whole = gate.forward(x, frame)[0];
  const std::int64_t tokens = whole.count() / std::max<std::int64_t>(experts_, 1);
  if (options_.noise > 0 && frame.pass().training) {
    const Tensor noise = frame.compute().make(whole.shape()).with_layout(whole.layout());
    frame.rng(path()).normal(noise);
    for (std::size_t i = 0; i < noise.f32().size(); ++i)
      whole.f32()[i] += static_cast<float>(options_.noise) * noise.f32()[i];
  }
  const Tensor logits = whole.reshape({tokens, experts_});
  const Tensors chosen = frame.once(path(), [&] { return choose(x, logits, frame); });
  frame.push(*this, {logits, chosen[0], chosen[1], chosen[2], whole.with_layout(whole.layout())});
  return {chosen[0], chosen[1]};
}

// Returns the choices, their weights, and the sums over all data ranks. The ranks meet here, in the first run
// of a pass alone.
Tensors Router::choose(const Tensor& x, const Tensor& logits, Frame& frame) {
  Compute& compute = frame.compute();
  const std::int64_t tokens = logits.size(0);
  const Tensor experts = compute.make({tokens, options_.top_k}, DType::i32),
               weights = compute.make({tokens, options_.top_k});
  const Tensor bias = bias_values();
  const ConstTensorView bias_view = bias ? bias.view() : ConstTensorView{};
  const std::size_t size = SentByRank::size(experts_), n = static_cast<std::size_t>(experts_);
  const Tensor own = compute.zeros({static_cast<std::int64_t>(size)}, DType::f64);
  const auto sent = own.as<double>();
  const std::int64_t bad = not_finite(logits.f32(), experts_);
  sent[SentByRank::kTokens] = static_cast<double>(tokens);
  sent[SentByRank::kNotFinite] = static_cast<double>(bad);
  if (bad < 0) {
    route_tokens(logits, bias_view, options_, experts, weights);
    RouterSums sums;
    add_router_sums(logits, bias_view, experts, options_, sums);
    sent[SentByRank::kZ] = sums.z;
    std::copy(sums.counts.begin(), sums.counts.end(), sent.begin() + SentByRank::kSums);
    std::copy(sums.scores.begin(), sums.scores.end(),
              sent.begin() + static_cast<std::ptrdiff_t>(SentByRank::kSums + n));
    if (options_.balance == Balance::sequence) {
      const std::int64_t of_sample = tokens_of_sample(x), samples = of_sample == 0 ? 0 : tokens / of_sample;
      for (std::int64_t b = 0; b < samples; ++b) {
        RouterSums sample;
        add_router_sums(rows_of(logits, b * of_sample, of_sample), bias_view,
                        rows_of(experts, b * of_sample, of_sample), options_, sample);
        const auto count = static_cast<double>(of_sample);
        sent[SentByRank::kAuxOfSequences] +=
            balance_loss(sample.counts, sample.scores, count, count * options_.top_k);
      }
      sent[SentByRank::kSequences] = static_cast<double>(samples);
    }
    if (options_.capacity == Capacity::per_choice_and_rank)
      sent[SentByRank::kDropped] = static_cast<double>(
          drop_by_choice(experts.as<std::int32_t>(), options_.top_k, experts_,
                         expert_capacity(options_.capacity_factor, tokens, options_.top_k, experts_)));
  }
  const DeviceMesh axes = ep::sample_axes(x.layout());
  const int ranks = axes ? axes.size() : 1, rank = axes ? axes.rank() : 0;
  Tensor all = own;
  if (ranks > 1) {
    all = compute.make({ranks * static_cast<std::int64_t>(size)}, DType::f64);
    axes.group().all_gather(own.view(), all.view()).wait();
  }
  const auto got = all.as<double>();
  const auto of = [&](int r, std::size_t i) { return got[static_cast<std::size_t>(r) * size + i]; };
  for (int r = 0; r < ranks; ++r)
    if (of(r, SentByRank::kNotFinite) >= 0)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("\"{}\": the logits of token {}{} are not finite", path(),
                              static_cast<std::int64_t>(of(r, SentByRank::kNotFinite)),
                              ranks > 1 ? " on " + name_axis_rank(axes, r) : std::string()));
  const Tensor sums = compute.zeros({static_cast<std::int64_t>(size)}, DType::f64);
  for (int r = 0; r < ranks; ++r)
    for (std::size_t i = 0; i < size; ++i) sums.as<double>()[i] += of(r, i);

  const auto global_tokens = static_cast<std::int64_t>(sums.as<double>()[SentByRank::kTokens]);
  const auto choices = experts.as<std::int32_t>();
  const auto capacity = [&](std::int64_t of_tokens) {
    return expert_capacity(options_.capacity_factor, of_tokens, options_.top_k, experts_);
  };
  switch (options_.capacity) {
    case Capacity::none:
    case Capacity::per_choice_and_rank: break;
    case Capacity::by_position: {
      std::vector<double> before(n);
      for (int r = 0; r < rank; ++r)
        for (std::size_t i = 0; i < n; ++i) before[i] += of(r, SentByRank::kSums + i);
      const auto most = static_cast<double>(capacity(global_tokens));
      drop(choices,
           [&](std::int32_t e, std::size_t) { return before[static_cast<std::size_t>(e)]++ < most; });
      break;
    }
    case Capacity::by_weight: {
      std::vector<std::int64_t> counts;
      for (int r = 0; r < ranks; ++r) counts.push_back(static_cast<std::int64_t>(of(r, SentByRank::kTokens)));
      const ExpertChoices everyone =
          ranks > 1 ? gather_choices(compute, axes.group(), experts.view(), weights.view(), counts)
                    : ExpertChoices{experts, weights, counts};
      std::vector<std::vector<Candidate>> of_expert(n);
      const auto chosen = everyone.experts.as<std::int32_t>();
      for (std::size_t i = 0; i < chosen.size(); ++i)
        of_expert[static_cast<std::size_t>(chosen[i])].push_back(
            {everyone.weights.f32()[i], static_cast<std::int64_t>(i)});
      const auto most = static_cast<std::size_t>(capacity(global_tokens));
      std::vector<bool> keeps(chosen.size(), true);
      for (std::vector<Candidate>& list : of_expert) {
        if (list.size() <= most) continue;
        std::ranges::sort(list, [](const Candidate& a, const Candidate& b) {
          return a.weight != b.weight ? a.weight > b.weight : a.place < b.place;
        });
        for (std::size_t i = most; i < list.size(); ++i)
          keeps[static_cast<std::size_t>(list[i].place)] = false;
      }
      const auto first = static_cast<std::size_t>(
          std::accumulate(counts.begin(), counts.begin() + rank, std::int64_t{0}) * options_.top_k);
      drop(choices, [&](std::int32_t, std::size_t i) { return keeps[first + i]; });
      break;
    }
  }

  report_ = {};
  report_.tokens = global_tokens;
  report_.assignments = global_tokens * options_.top_k;
  const auto counts = sums.as<double>().subspan(SentByRank::kSums, n),
             scores = sums.as<double>().subspan(SentByRank::kSums + n, n);
  for (const double c : counts) report_.counts.push_back(static_cast<std::int64_t>(c));
  if (options_.capacity == Capacity::per_choice_and_rank)
    report_.dropped = static_cast<std::int64_t>(sums.as<double>()[SentByRank::kDropped]);
  else if (options_.capacity != Capacity::none)
    for (const std::int64_t c : report_.counts)
      report_.dropped += std::max<std::int64_t>(0, c - capacity(global_tokens));
  const auto all_tokens = static_cast<double>(global_tokens);
  if (frame.pass().training) {
    counts_.resize(n);
    step_counts_.resize(n);
    if (frame.pass().micro_batch == 0) std::ranges::fill(step_counts_, 0.0);
    for (std::size_t i = 0; i < n; ++i) {
      counts_[i] += report_.counts[i];
      step_counts_[i] += counts[i];
    }
  }
  if (options_.balance == Balance::step && frame.pass().training)
    std::ranges::copy(step_counts_, counts.begin());
  const double assignments = std::accumulate(counts.begin(), counts.end(), 0.0);
  const double sequences = sums.as<double>()[SentByRank::kSequences];
  if (options_.balance == Balance::sequence)
    report_.aux_loss = sequences == 0 ? 0 : sums.as<double>()[SentByRank::kAuxOfSequences] / sequences;
  else
    report_.aux_loss = balance_loss(counts, scores, all_tokens, assignments);
  report_.z_loss = global_tokens == 0 ? 0 : sums.as<double>()[SentByRank::kZ] / all_tokens;
  return {experts, weights, sums};
}

Tensors Router::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensors kept = frame.pop(*this);
  const Tensor &logits = kept[0], &experts = kept[1], &weights = kept[2], &whole = kept[4];
  const auto sums = kept[3].as<double>();
  const std::int64_t tokens = logits.size(0);
  const auto n = static_cast<std::size_t>(experts_);
  const Tensor bias = bias_values();
  const ConstTensorView bias_view = bias ? bias.view() : ConstTensorView{};
  const Tensor dlogits = frame.compute().make(whole.shape()).with_layout(whole.layout());
  const Tensor rows = dlogits.reshape(logits.shape());
  const double all_tokens = sums[SentByRank::kTokens];
  RouterLossTerms losses;
  if (all_tokens > 0) losses.z = loss_scale_ * options_.z_loss / all_tokens;
  const auto shares_of = [&](std::span<const double> counts) {
    std::vector<double> shares(counts.begin(), counts.end());
    const double all = std::accumulate(counts.begin(), counts.end(), 0.0);
    for (double& s : shares) s = all == 0 ? 0 : s / all;
    return shares;
  };
  const auto run = [&](const TensorView& dbias) {
    if (options_.aux_loss == 0 || options_.balance != Balance::sequence) {
      const std::vector<double> shares = shares_of(sums.subspan(SentByRank::kSums, n));
      if (options_.aux_loss != 0 && all_tokens > 0) {
        losses.shares = shares;
        losses.aux = loss_scale_ * options_.aux_loss / all_tokens;
      }
      return route_tokens_backward(logits, bias_view, experts, weights, gradients[0], options_, losses, rows,
                                   dbias);
    }
    const std::int64_t of_sample = tokens_of_sample(whole);
    for (std::int64_t first = 0; first < tokens; first += of_sample) {
      RouterSums sample;
      add_router_sums(rows_of(logits, first, of_sample), bias_view, rows_of(experts, first, of_sample),
                      options_, sample);
      const std::vector<double> shares = shares_of(sample.counts);
      losses.shares = shares;
      losses.aux =
          loss_scale_ * options_.aux_loss / (sums[SentByRank::kSequences] * static_cast<double>(of_sample));
      route_tokens_backward(rows_of(logits, first, of_sample), bias_view, rows_of(experts, first, of_sample),
                            rows_of(weights, first, of_sample), rows_of(gradients[0], first, of_sample),
                            options_, losses, rows.slice_flat(first * experts_, {of_sample, experts_}).view(),
                            dbias);
    }
  };
  if (bias_parameter && bias_parameter->trainable())
    bias_parameter->accumulate(
        layouts::gradient_of(bias_parameter->weight().layout(), whole.layout(), whole.shape().rank() - 1),
        [&](const Tensor& into, bool add) {
          if (!add) std::ranges::fill(into.f32(), 0.0f);
          run(into.view());
        });
  else
    run({});
  return gate.backward(dlogits, frame);
}

void update_router_bias(Router& router, double rate, double mean_rate) {
  const std::vector<std::int64_t> counts = std::exchange(router.counts_, {});
  const auto all = static_cast<double>(std::accumulate(counts.begin(), counts.end(), std::int64_t{0}));
  if (all == 0 || router.options_.bias == RouterBias::none) return;
  const double n = static_cast<double>(counts.size());
  if (router.bias_buffer) {
    const auto bias = router.bias_buffer->tensor().f32();
    for (std::size_t i = 0; i < counts.size(); ++i) {
      const double difference = all / n - static_cast<double>(counts[i]);
      bias[i] += static_cast<float>(difference > 0 ? rate : difference < 0 ? -rate : 0);
    }
    return;
  }
  const auto share = router.share->tensor().f32();
  for (std::size_t i = 0; i < counts.size(); ++i)
    share[i] += static_cast<float>(mean_rate *
                                   (static_cast<double>(counts[i]) / all - static_cast<double>(share[i])));
  // The master may be this rank's part of the bias.
  const Tensor& master = router.bias_parameter->write_master();
  std::size_t first = 0;
  if (master.layout()) first = static_cast<std::size_t>(master.layout()->parts()[0].offset[0]);
  for (std::size_t i = 0; i < master.f32().size(); ++i)
    master.f32()[i] += static_cast<float>(rate * (1 / n - static_cast<double>(share[first + i])));
}

void forget_router_counts(Module& model) {
  model.visit([&](Module& m) {
    if (auto* const router = dynamic_cast<Router*>(&m)) router->forget_counts();
  });
}

void update_router_biases(Module& model, double rate, double mean_rate) {
  model.visit([&](Module& m) {
    if (auto* const router = dynamic_cast<Router*>(&m)) update_router_bias(*router, rate, mean_rate);
  });
}

}  // namespace weft
