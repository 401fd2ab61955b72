// Tiles of blocked.hpp in matrix registers, as AMX has them: products of bf16. Generic in the unit, so that a
// test can run the same code with a unit of its own if there is no AMX. Needs AVX-512.
//
// A register has 16 rows of 64 bytes. A unit is a struct of static members:
//   kName
//   configure, release          before a thread's first use of the registers, after its last one
//   zero<c>, store<c>(to, step) c, a, b: numbers of registers; step: bytes between rows
//   load<a>(from, step)
//   multiply<c, a, b>           c += a b; a: (16, 16 pairs), b: (16 pairs, 16), c: (16, 16) floats
#pragma once

#include <immintrin.h>

#include "nn/kernels/gemm/pack_pairs.hpp"

namespace weft::kernels::gemm {
namespace {

constexpr std::int64_t kOfRegister = 16;  // rows, and columns of four bytes

// Packs rows [0, count) of a matrix as in pack_pairs.hpp, but in the form of registers. The pair (i, q) is
// stored at place (i / 16 * pairs + q / 16 * 16 + i % 16) * 16 + q % 16 of `to`. `pairs` is a multiple of 16.

// p_step is 1.
inline void copy_rows(const std::uint16_t* from, std::int64_t i_step, float* to, std::int64_t count,
                      std::int64_t k, std::int64_t pairs) {
  for (std::int64_t i = 0; i < rounded_up(count, kOfRegister); ++i) {
    float* const row = to + (i / kOfRegister * pairs + i % kOfRegister) * kOfRegister;
    for (std::int64_t q = 0; q < pairs; q += kOfRegister) {
      const __mmask32 mask = i < count ? first_halves(k - 2 * q) : 0;
      _mm512_storeu_si512(row + q * kOfRegister, _mm512_maskz_loadu_epi16(mask, from + i * i_step + 2 * q));
    }
  }
}

// i_step is 1.
inline void turn_columns(const std::uint16_t* from, std::int64_t p_step, float* to, std::int64_t count,
                         std::int64_t k, std::int64_t pairs) {
  for (std::int64_t q = 0; q < pairs; q += kOfRegister) {
    for (std::int64_t i = 0; i < count; i += kOfRegister) {
      const __mmask32 there = first_halves(least(count - i, kOfRegister));
      __m512i v[16];
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) {
        const std::int64_t p = 2 * (q + r);
        const __m512i even = _mm512_maskz_loadu_epi16(p < k ? there : 0, from + p * p_step + i),
                      odd = _mm512_maskz_loadu_epi16(p + 1 < k ? there : 0, from + (p + 1) * p_step + i);
        v[r] = interleave(even, odd).low;
      }
      transpose_16(v);
      float* const square = to + (i / kOfRegister * pairs + q) * kOfRegister;
#pragma GCC unroll 16
      for (int r = 0; r < 16; ++r) _mm512_storeu_si512(square + r * kOfRegister, v[r]);
    }
  }
}

template <class Unit>
struct MatrixTiles {
  static constexpr const char* kName = Unit::kName;
  // Four registers of c, two of a and two of b. A panel of b, 64 KB, and a block of a, 384 KB, stay in the
  // second-level cache, a block of b, 8 MB, in the third-level cache.
  static constexpr std::int64_t kTileRows = 32, kTileColumns = 32, kSteps = 2, kBlockUnits = 512,
                                kRowStep = kOfRegister, kPanelRows = kOfRegister, kColumnStep = kOfRegister,
                                kBlockRows = 192, kBlockColumns = 128 * 32;

  struct Use {
    Use() { Unit::configure(); }
    ~Use() { Unit::release(); }
    Use(const Use&) = delete;
    Use& operator=(const Use&) = delete;
  };

  static constexpr std::int64_t units(std::int64_t k) { return Pairs<kOfRegister>::units(k); }
  static void pack_a(const Matrix& a, float* to, std::int64_t rows, std::int64_t k) {
    const auto* const from = static_cast<const std::uint16_t*>(a.data);
    if (a.row_step == 1)
      turn_columns(from, a.column_step, to, rows, k, units(k));
    else
      copy_rows(from, a.row_step, to, rows, k, units(k));
  }
  static void pack_b(const Matrix& b, float* to, std::int64_t columns, std::int64_t k) {
    Pairs<kOfRegister>::template pack<kTileColumns>(b, b.column_step, b.row_step, to, columns, k);
  }

  // sums: (16 kRows, kTileColumns), of which 16 kColumns are written
  template <int kRows, int kColumns>
  static void sum_up(const float* a, const float* b, std::int64_t k, float* sums) {
    constexpr std::int64_t kOfA = kOfRegister * 4,
                           kOfB = kTileColumns * 4;  // bytes between rows
    Unit::template zero<0>();
    if constexpr (kColumns == 2) Unit::template zero<1>();
    if constexpr (kRows == 2) Unit::template zero<2>();
    if constexpr (kRows == 2 && kColumns == 2) Unit::template zero<3>();
    for (std::int64_t q = 0; q < k; q += kOfRegister) {
      Unit::template load<4>(a + q * kOfRegister, kOfA);
      Unit::template load<6>(b + q * kTileColumns, kOfB);
      Unit::template multiply<0, 4, 6>();
      if constexpr (kColumns == 2) {
        Unit::template load<7>(b + q * kTileColumns + kOfRegister, kOfB);
        Unit::template multiply<1, 4, 7>();
      }
      if constexpr (kRows == 2) {
        Unit::template load<5>(a + (k + q) * kOfRegister, kOfA);
        Unit::template multiply<2, 5, 6>();
      }
      if constexpr (kRows == 2 && kColumns == 2) Unit::template multiply<3, 5, 7>();
    }
    Unit::template store<0>(sums, kOfB);
    if constexpr (kColumns == 2) Unit::template store<1>(sums + kOfRegister, kOfB);
    if constexpr (kRows == 2) Unit::template store<2>(sums + kOfRegister * kTileColumns, kOfB);
    if constexpr (kRows == 2 && kColumns == 2)
      Unit::template store<3>(sums + kOfRegister * kTileColumns + kOfRegister, kOfB);
  }

  // rows and columns are 16 or 32
  template <bool kStream>
  static void whole_tile(const float* a, const float* b, float* c, std::int64_t ldc, std::int64_t rows,
                         std::int64_t columns, std::int64_t k, float alpha, Before before, Fetch fetch) {
    alignas(64) float sums[kTileRows * kTileColumns];
    if (fetch.ahead != nullptr) fetch.ahead->fetch(fetch.lines * ((k + kStepsOfFetch - 1) / kStepsOfFetch));
    if (rows == 32)
      columns == 32 ? sum_up<2, 2>(a, b, k, sums) : sum_up<2, 1>(a, b, k, sums);
    else
      columns == 32 ? sum_up<1, 2>(a, b, k, sums) : sum_up<1, 1>(a, b, k, sums);
    const __m512 factor = _mm512_set1_ps(alpha);
    for (std::int64_t i = 0; i < rows; ++i) {
      for (std::int64_t j = 0; j < columns; j += kOfRegister) {
        const __m512 sum = _mm512_load_ps(sums + i * kTileColumns + j);
        const __m512 result =
            before.data == nullptr
                ? _mm512_mul_ps(factor, sum)
                : _mm512_fmadd_ps(factor, sum, _mm512_loadu_ps(before.data + i * before.row_step + j));
        if constexpr (kStream)
          _mm512_stream_ps(c + i * ldc + j, result);
        else
          _mm512_storeu_ps(c + i * ldc + j, result);
      }
    }
  }
};

}  // namespace
}  // namespace weft::kernels::gemm
