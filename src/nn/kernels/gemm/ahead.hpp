// Parts of blocked.hpp that its tiles share: sizes of blocks, lines that are prefetched, the matrix to which
// a tile is added. All code is in an unnamed namespace, as in blocked.hpp.
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::gemm {
namespace {

constexpr std::int64_t kLine = 16;  // floats

constexpr std::int64_t least(std::int64_t x, std::int64_t y) { return x < y ? x : y; }
constexpr std::int64_t rounded_up(std::int64_t x, std::int64_t to) { return (x + to - 1) / to * to; }
// The size of the blocks of x: as equal as possible, at most `most`, and a multiple of `to` like `most`.
constexpr std::int64_t equal_blocks(std::int64_t x, std::int64_t most, std::int64_t to) {
  const std::int64_t count = (x + most - 1) / most;
  return count == 0 ? to : rounded_up((x + count - 1) / count, to);
}

// The lines of the part of a matrix that is packed next. They are prefetched into the second-level cache
// while the previous part is multiplied.
class Ahead {
 public:
  Ahead() = default;
  /// The lines of x in rows [0, rows) and columns [0, columns).
  Ahead(const Matrix& x, std::int64_t rows, std::int64_t columns) {
    const std::int64_t size = x.is_bf16 ? 2 : 4;
    const bool by_rows = x.column_step == 1;
    row_ = static_cast<const char*>(x.data);
    row_bytes_ = (by_rows ? columns : rows) * size;
    step_ = (by_rows ? x.row_step : x.column_step) * size;
    rows_ = by_rows ? rows : columns;
  }
  std::int64_t lines() const { return rows_ * ((row_bytes_ + kLineBytes - 1) / kLineBytes); }
  void fetch(std::int64_t lines) {
    for (; lines > 0 && rows_ > 0; --lines) {
      _mm_prefetch(row_ + at_, _MM_HINT_T1);
      at_ += kLineBytes;
      if (at_ < row_bytes_) continue;
      at_ = 0;
      row_ += step_;
      --rows_;
    }
  }

 private:
  static constexpr std::int64_t kLineBytes = 64;
  const char* row_ = nullptr;
  std::int64_t row_bytes_ = 0, step_ = 0, rows_ = 0, at_ = 0;
};

// The matrix to which a tile is added: c itself, or the bias, whose row_step is 0, or nothing.
struct Before {
  const float* data = nullptr;
  std::int64_t row_step = 0;
};

// The number of steps of k between two prefetches of lines: more prefetches at once would wait for memory.
constexpr std::int64_t kStepsOfFetch = 16;
struct Fetch {
  Ahead* ahead = nullptr;
  std::int64_t lines = 0;  // at a time
};

}  // namespace
}  // namespace weft::kernels::gemm
