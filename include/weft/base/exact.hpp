// Exact mode (docs/exact.md): the sums that are made over blocks, and these blocks. Pure arithmetic.
#pragma once

#include <cstdint>

#include "weft/base/chunk.hpp"

namespace weft {

/// Whether sums that parallelism may split are made over kExactBlocks blocks of global indices. Losses,
/// gradients and parameters then have the same bits on every mesh.
enum class Exact : bool { no, yes };

/// The number of blocks of each such sum. Numbers of ranks divide it. The blocks are the leaves of a balanced
/// binary tree: partial sums of blocks 0 and 1, 2 and 3, … are added, then pairs of these sums, and so on.
/// The ranks that share a sum hold the subtrees of equal depth, in the order of the ranks.
inline constexpr int kExactBlocks = 8;

/// Part `index` of `size` indices that are halved again and again into `parts` (1, 2, 4 or 8) parts. The
/// first half has one index more if the halves are uneven. If n divides `size`, the ranks 0 to n − 1 have
/// equal parts, and a part of a rank's part is a part of the whole.
constexpr Chunk exact_block(std::int64_t size, int parts, int index) noexcept {
  Chunk block{0, size};
  while (parts > 1) {
    parts /= 2;
    const std::int64_t first = (block.size + 1) / 2;
    if (index < parts) {
      block.size = first;
    } else {
      block.offset += first;
      block.size -= first;
      index -= parts;
    }
  }
  return block;
}

}  // namespace weft
