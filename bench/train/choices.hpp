// The choices of the tokens of experts_bench and of its peers: two of eight experts at random. Any thread.
#pragma once

#include <algorithm>
#include <cstdint>
#include <vector>

#include "inputs.hpp"
#include "weft/base/chunk.hpp"

namespace weft::bench {

inline constexpr std::int64_t kExperts = 8;
inline constexpr int kTopK = 2;

/// Choice k of a token, by its number among the tokens of all ranks.
inline std::int32_t choice_of(std::int64_t token, int k) {
  const auto first = static_cast<std::int32_t>((number(kProbe, 2 * token) + 0.5f) * kExperts);
  if (k == 0) return std::min<std::int32_t>(first, kExperts - 1);
  const auto step = 1 + static_cast<std::int32_t>((number(kProbe, 2 * token + 1) + 0.5f) * (kExperts - 1));
  return (choice_of(token, 0) + std::min<std::int32_t>(step, kExperts - 1)) % kExperts;
}

/// Rows that this rank sends to each rank, and gets from each: one for each choice, or, if not `each_choice`,
/// one for each token and other rank that has one of its experts.
struct ChoiceCounts {
  std::vector<std::int64_t> sent, came;
};
inline ChoiceCounts counts_of_choices(std::int64_t tokens, int rank, int ranks, bool each_choice = true) {
  ChoiceCounts counts{std::vector<std::int64_t>(static_cast<std::size_t>(ranks)),
                      std::vector<std::int64_t>(static_cast<std::size_t>(ranks))};
  for (int from = 0; from < ranks; ++from)
    for (std::int64_t t = from * tokens; t < (from + 1) * tokens; ++t)
      for (int to = 0; to < ranks; ++to) {
        if (!each_choice && to == from) continue;
        const Chunk theirs = chunk_of(kExperts, ranks, to);
        std::int64_t rows = 0;
        for (int k = 0; k < kTopK; ++k) {
          const std::int32_t e = choice_of(t, k);
          rows += e >= theirs.offset && e < theirs.offset + theirs.size;
        }
        if (!each_choice) rows = std::min<std::int64_t>(rows, 1);
        if (from == rank) counts.sent[static_cast<std::size_t>(to)] += rows;
        if (to == rank) counts.came[static_cast<std::size_t>(from)] += rows;
      }
  return counts;
}

}  // namespace weft::bench
