#include "weft/models/generate.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <exception>
#include <limits>
#include <numeric>
#include <optional>

#include "models/agreement.hpp"
#include "models/batch.hpp"
#include "weft/ep/router.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/key_value_cache.hpp"

namespace weft {
namespace {

constexpr const char* kGenerate = "generate";

void check_options(const char* function, const GenerateOptions& o) {
  if (!(o.temperature >= 0) || !std::isfinite(o.temperature))
    refuse_batch(function, fmt::format("temperature is {}; expected 0 or more", o.temperature));
  if (o.top_k < 0) refuse_batch(function, fmt::format("top_k is {}; expected 0 (all) or more", o.top_k));
  if (!(o.top_p > 0 && o.top_p <= 1))
    refuse_batch(function, fmt::format("top_p is {}; expected more than 0, and 1 at most", o.top_p));
}

void check_prompts(const TokenSizes& sizes, std::span<const TokenList> prompts, const GenerateOptions& o) {
  const auto tokens_of = [&](const std::string& what, const TokenList& list) {
    if (list.empty()) refuse_batch(kGenerate, what + " is empty; expected 1 token or more");
    for (std::size_t i = 0; i < list.size(); ++i)
      if (list[i] < 0 || list[i] >= sizes.vocab)
        refuse_batch(kGenerate,
                     fmt::format("{}[{}] is {}; expected 0 to {}", what, i, list[i], sizes.vocab - 1));
  };
  if (o.new_tokens < 1)
    refuse_batch(kGenerate, fmt::format("new_tokens is {}; expected 1 or more", o.new_tokens));
  if (prompts.empty()) refuse_batch(kGenerate, "no prompt; expected 1 or more");
  for (std::size_t p = 0; p < prompts.size(); ++p) {
    tokens_of(fmt::format("prompt {}", p), prompts[p]);
    if (static_cast<std::int64_t>(prompts[p].size()) >= sizes.max_seq)
      refuse_batch(kGenerate, fmt::format("prompt {} has {} tokens; expected at most {}, one below max_seq",
                                          p, prompts[p].size(), sizes.max_seq - 1));
  }
  for (std::size_t s = 0; s < o.stops.size(); ++s) tokens_of(fmt::format("stop {}", s), o.stops[s]);
}

// With a capacity a token's experts depend on the other tokens of a pass, and so on the cache and the
// prompts.
void expect_no_capacity(Module& model) {
  model.visit([](Module& m) {
    if (const auto* const router = dynamic_cast<const Router*>(&m);
        router != nullptr && router->options().capacity != Capacity::none)
      refuse_batch(kGenerate,
                   fmt::format("\"{}\" has a capacity; expected Capacity::none, so that a token does not "
                               "depend on the other tokens of a pass",
                               m.path()));
  });
}

std::uint64_t content_of(std::span<const TokenList> prompts, const GenerateOptions& o) {
  Fnv1a hash;
  const auto add_list = [&](const TokenList& list) {
    hash.add_at_once(list.size());
    for (const std::int64_t token : list) hash.add_at_once(static_cast<std::uint64_t>(token));
  };
  hash.add_at_once(prompts.size());
  for (const TokenList& prompt : prompts) add_list(prompt);
  for (const TokenList& stop : o.stops) add_list(stop);
  for (const std::int64_t n : {o.new_tokens, o.top_k}) hash.add_at_once(static_cast<std::uint64_t>(n));
  for (const double x : {o.temperature, o.top_p}) hash.add_at_once(std::bit_cast<std::uint64_t>(x));
  hash.add_at_once(o.seed);
  hash.add_at_once(o.cache ? 1 : 0);
  return hash.value;
}

// The ranks compare what they were given; a fault of one of them is an error on all.
void agree(ParallelModel& model, Compute& compute, const std::optional<Error>& own, std::uint64_t content) {
  const auto bits = static_cast<std::int64_t>(content);
  Numbers least{own ? -1 : 0, bits, ~bits};
  least = least_of(compute, model.tensor, least);
  least = least_of(compute, model.data, least);
  if (own) throw Error(*own);
  if (least[0] != 0)
    refuse_batch(kGenerate,
                 "another rank was given prompts or options that do not fit; its own error says why");
  if (least[1] != ~least[2])
    refuse_batch(kGenerate, "ranks were given different prompts or options; expected the same on all ranks");
}

// One prompt and what follows it.
struct Sample {
  std::size_t prompt;
  bool copy;  // of another rank's prompt, so that all ranks have as many samples: nobody sees it
  TokenList tokens;
  std::int64_t length, end;  // of the prompt; the most tokens in all
  bool stopped = false;
  bool done() const noexcept { return stopped || static_cast<std::int64_t>(tokens.size()) == end; }
};

std::vector<Sample> samples_of(const ParallelModel& model, std::span<const TokenList> prompts,
                               const GenerateOptions& o) {
  const auto ranks = static_cast<std::size_t>(model.data.size()),
             rank = static_cast<std::size_t>(model.data.rank());
  const std::size_t each = (prompts.size() + ranks - 1) / ranks;
  std::vector<Sample> samples;
  for (std::size_t i = 0; i < each; ++i) {
    const std::size_t wanted = rank * each + i, p = std::min(wanted, prompts.size() - 1);
    const auto length = static_cast<std::int64_t>(prompts[p].size());
    samples.push_back({p, wanted != p, prompts[p], length,
                       length + std::min(o.new_tokens, model.tokens->max_seq - length)});
  }
  return samples;
}

bool ends_with(std::span<const std::int64_t> tokens, const TokenList& stop) {
  return tokens.size() >= stop.size() && std::equal(stop.rbegin(), stop.rend(), tokens.rbegin());
}

double uniform_of(const GenerateOptions& o, std::size_t prompt, std::size_t position) {
  float two[2];
  RandomStream(o.seed, fmt::format("generate/{}", prompt)).uniform(2 * position, 2, two);
  return static_cast<double>(two[0]) + std::ldexp(static_cast<double>(two[1]), -24);
}

// Passes over the samples of this rank: all samples are at the same position, and a sample whose prompt is
// longer takes its next token from there.
class TokenPasses {
 public:
  TokenPasses(ParallelModel& model, Compute& compute, const GenerateOptions& options,
              std::vector<Sample>& samples, std::int64_t most)
      : model_(model), compute_(compute), options_(options), samples_(samples) {
    if (options.cache) cache_.emplace(*model.model, most);
  }
  /// Returns the logits, on the host, of position `known` - 1 of each sample: (samples, vocab).
  Tensor run(std::int64_t known) {
    const std::int64_t first = cache_ ? cache_->size() : 0, count = known - first,
                       rows = static_cast<std::int64_t>(samples_.size());
    const Tensor tokens(compute_.context(), {rows, count}, DType::i64);
    std::int64_t* to = tokens.as<std::int64_t>().data();
    for (const Sample& s : samples_)
      for (std::int64_t i = first; i < known; ++i)  // a sample that is done goes on with its last token
        *to++ = s.tokens[std::min(static_cast<std::size_t>(i), s.tokens.size() - 1)];
    Frame frame = Frame::inference(compute_);
    frame.begin({.training = false, .exact = model_.exact});
    const Tensor placed =
        model_.place(to_device(compute_.context(), tokens, compute_.stream()), rows * model_.data.size());
    const Tensor logits = redistribute(model_.model->forward({placed}, frame)[0], model_.tensor, Replicate{});
    const Tensor here = to_host(compute_.context(), logits);
    const std::int64_t vocab = here.shape().back();
    Tensor last(compute_.context(), {rows, vocab}, DType::f32);
    for (std::int64_t r = 0; r < rows; ++r)
      std::copy_n(here.data_ptr<float>() + (r * count + count - 1) * vocab, vocab,
                  last.data_ptr<float>() + r * vocab);
    return last;
  }
  /// Appends a token to each sample that is not done and whose prompt has no more. Returns a hash of the
  /// tokens.
  std::uint64_t choose(const Tensor& logits, std::int64_t known) {
    Fnv1a hash;
    const std::int64_t vocab = logits.size(1);
    for (std::size_t r = 0; r < samples_.size(); ++r) {
      Sample& s = samples_[r];
      if (s.done() || known < s.length) continue;
      const std::span<const float> row(logits.data_ptr<float>() + static_cast<std::int64_t>(r) * vocab,
                                       static_cast<std::size_t>(vocab));
      const std::int64_t token =
          choose_token(row, options_, uniform_of(options_, s.prompt, static_cast<std::size_t>(known)));
      s.tokens.push_back(token);
      hash.add_at_once(static_cast<std::uint64_t>(token));
      const auto made = std::span<const std::int64_t>(s.tokens).subspan(static_cast<std::size_t>(s.length));
      const auto prompt = static_cast<std::int64_t>(s.prompt);
      for (const TokenList& stop : options_.stops) s.stopped |= ends_with(made, stop);
      if (options_.stop_when) s.stopped |= options_.stop_when(prompt, made);
      hash.add_at_once(s.stopped ? 1 : 0);
      if (options_.on_token && !s.copy) options_.on_token(prompt, token);
    }
    return hash.value;
  }

 private:
  ParallelModel& model_;
  Compute& compute_;
  const GenerateOptions& options_;
  std::vector<Sample>& samples_;
  std::optional<KeyValueCache> cache_;
};

// The samples of all ranks, as numbers: for each sample the number of tokens, whether it was stopped, the
// tokens.
std::vector<Generated> exchange(ParallelModel& model, Compute& compute, const std::vector<Sample>& samples,
                                std::size_t prompts, std::int64_t most) {
  const auto width = static_cast<std::size_t>(2 + most);
  Numbers own(samples.size() * width, 0);
  for (std::size_t i = 0; i < samples.size(); ++i) {
    const Sample& s = samples[i];
    const auto at = own.begin() + static_cast<std::ptrdiff_t>(i * width);
    at[0] = static_cast<std::int64_t>(s.tokens.size()) - s.length;
    at[1] = s.stopped ? 1 : 0;
    std::copy(s.tokens.begin() + s.length, s.tokens.end(), at + 2);
  }
  const Numbers all = gathered(compute, model.data, own);
  std::vector<Generated> results;
  for (std::size_t p = 0; p < prompts; ++p) {
    const auto at = all.begin() + static_cast<std::ptrdiff_t>(p * width);
    results.push_back({TokenList(at + 2, at + 2 + at[0]), at[1] != 0});
  }
  return results;
}

}  // namespace

std::int64_t choose_token(std::span<const float> logits, const GenerateOptions& options, double uniform) {
  constexpr const char* kWho = "choose_token";
  check_options(kWho, options);
  if (!(uniform >= 0 && uniform < 1))
    refuse_batch(kWho, fmt::format("uniform is {}; expected 0 or more, below 1", uniform));
  std::size_t best = 0;
  for (std::size_t i = 0; i < logits.size(); ++i) {
    if (std::isnan(logits[i]) || logits[i] == std::numeric_limits<float>::infinity())
      refuse_batch(kWho, fmt::format("logit {} is {}; expected a finite number", i, logits[i]));
    if (logits[i] > logits[best]) best = i;
  }
  if (logits.empty() || std::isinf(logits[best])) refuse_batch(kWho, "no token has a probability above 0");
  if (options.temperature == 0 || options.top_k == 1) return static_cast<std::int64_t>(best);

  std::vector<std::size_t> order(logits.size());
  std::iota(order.begin(), order.end(), 0);
  const auto before = [&](std::size_t a, std::size_t b) {
    return logits[a] != logits[b] ? logits[a] > logits[b] : a < b;
  };
  const std::size_t most =
      options.top_k == 0 ? order.size() : std::min(order.size(), static_cast<std::size_t>(options.top_k));
  std::partial_sort(order.begin(), order.begin() + static_cast<std::ptrdiff_t>(most), order.end(), before);
  std::vector<double> sums(most);  // of the probabilities, not divided by their sum
  double sum = 0;
  for (std::size_t i = 0; i < most; ++i)
    sums[i] = sum += std::exp((static_cast<double>(logits[order[i]]) - static_cast<double>(logits[best])) /
                              options.temperature);
  const auto place_of = [&](double x) {
    return static_cast<std::size_t>(std::lower_bound(sums.begin(), sums.end() - 1, x) - sums.begin());
  };
  const double kept = sums[place_of(options.top_p * sum)];
  // The first token whose sum is above the number that was drawn.
  const double drawn = uniform * kept;
  const auto at = std::upper_bound(sums.begin(), sums.end() - 1, drawn) - sums.begin();
  return static_cast<std::int64_t>(order[static_cast<std::size_t>(at)]);
}

std::vector<Generated> generate(ParallelModel& model, Compute& compute, std::span<const TokenList> prompts,
                                const GenerateOptions& options, const std::optional<Error>& fault) {
  const TokenSizes& sizes = expect_tokens(kGenerate, model);
  if (model.stages)
    refuse_batch(kGenerate, "the model is a pipeline; expected a model that is whole on each rank");
  std::optional<Error> own = fault;
  try {
    if (!own) {
      check_options(kGenerate, options);
      check_prompts(sizes, prompts, options);
      expect_no_capacity(*model.model);
    }
  } catch (const Error& e) {
    own = e;
  }
  agree(model, compute, own, content_of(prompts, options));

  std::vector<Sample> samples = samples_of(model, prompts, options);
  std::int64_t known = sizes.max_seq, most = 0;  // the shortest prompt; the longest sample
  for (const TokenList& prompt : prompts) {
    const auto length = static_cast<std::int64_t>(prompt.size());
    known = std::min(known, length);
    most = std::max(most, length + std::min(options.new_tokens, sizes.max_seq - length));
  }
  TokenPasses passes(model, compute, options, samples, most);
  for (std::int64_t left = 1; left > 0; ++known) {
    const Tensor logits = passes.run(known);
    std::exception_ptr failed;  // also of the program's function
    std::uint64_t hash = 0;
    try {
      hash = passes.choose(logits, known);
    } catch (...) {
      failed = std::current_exception();
    }
    const auto bits = static_cast<std::int64_t>(hash);
    const Numbers same = least_of(compute, model.tensor, {failed ? -1 : 0, bits, ~bits});
    const bool done = std::all_of(samples.begin(), samples.end(), [](const Sample& s) { return s.done(); });
    const bool differ = same[1] != ~same[2];
    // -1: a rank has failed, 0: a rank has samples that go on
    const std::int64_t least = least_of(compute, model.data, {same[0] != 0 || differ ? -1 : done ? 1 : 0})[0];
    if (failed) std::rethrow_exception(failed);
    if (differ)
      throw Error(ErrorCode::mismatch,
                  fmt::format("generate: the ranks of {}={} have chosen different tokens at "
                              "position {}: their logits, or the results of stop_when, differ",
                              model.tensor.name(), model.tensor.size(), known));
    if (least < 0)
      refuse_batch(kGenerate,
                   fmt::format("another rank failed at position {}; its own error says why", known));
    left = least == 1 ? 0 : 1;
  }
  return exchange(model, compute, samples, prompts.size(), std::min(options.new_tokens, sizes.max_seq - 1));
}

}  // namespace weft
