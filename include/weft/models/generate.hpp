// Text from a model of tokens: each new token is drawn from the model's distribution of the next one.
#pragma once

#include <cstdint>
#include <functional>
#include <optional>
#include <span>
#include <vector>

#include "weft/base/error.hpp"
#include "weft/models/build.hpp"

namespace weft {

using TokenList = std::vector<std::int64_t>;

struct GenerateOptions {
  std::int64_t new_tokens = 128;  ///< at most so many tokens behind each prompt
  /// Logits are divided by it. 0: greedy, always the most probable token; of equal ones the lowest.
  double temperature = 1;
  std::int64_t top_k = 0;  ///< only the k most probable tokens; 0: all
  /// Only the most probable tokens, as few as have this probability together (A. Holtzman et al., "The
  /// Curious Case of Neural Text Degeneration", 2020); 1: all.
  double top_p = 1;
  /// The random number of a token depends on the seed, the number of its prompt and its position only.
  std::uint64_t seed = 0;
  /// A sample ends behind the first of these sequences that it has made.
  std::vector<TokenList> stops = {};
  /// Keep keys and values of earlier positions (KeyValueCache). Without it each token is a pass over the
  /// whole sample: slower, the same bits.
  bool cache = true;
  /// Called for each new token on every rank of the data coordinate that has the prompt, in the order of
  /// positions. If it throws, all ranks throw.
  std::function<void(std::int64_t prompt, std::int64_t token)> on_token = {};
  /// Called behind each new token, with all new tokens of its prompt: if it returns true, the sample ends
  /// there, as with a stop. For stops that several sequences of tokens make, such as a text. It must return
  /// the same on all ranks; if ranks of the tensor axis differ, all throw mismatch. If it throws, all throw.
  std::function<bool(std::int64_t prompt, std::span<const std::int64_t> made)> stop_when = {};
};

struct Generated {
  TokenList tokens;      ///< those behind the prompt
  bool stopped = false;  ///< by one of the stops, which are the last of the tokens, or by stop_when
};

/// Continues each prompt, and returns the new tokens of all prompts, in their order, on every rank. Prompts
/// may have different lengths, and lie on the data ranks in turn: rank d of n computes a part of them.
///
/// The tokens are the same on every mesh in exact mode; otherwise up to the first place at which the rounding
/// of sums decides. Collective over the mesh of the model. Throws bad_argument on all ranks, before any pass,
/// if there is no prompt, a prompt is empty, has a token that is not in the vocabulary, or leaves no room
/// below max_seq for a token; if an option is out of its range; if the model is no model of tokens; or if
/// ranks have different prompts or options. If there is room for fewer than new_tokens, the samples are
/// shorter.
std::vector<Generated> generate(ParallelModel& model, Compute& compute, std::span<const TokenList> prompts,
                                const GenerateOptions& options = {},
                                const std::optional<Error>& fault = std::nullopt);

/// The token that a distribution gives: `logits` of one position, `uniform` on [0, 1). For generate(), and
/// for programs that decode by themselves. Throws bad_argument for options out of range, and for NaN among
/// the logits. Any thread.
std::int64_t choose_token(std::span<const float> logits, const GenerateOptions& options, double uniform);

}  // namespace weft
