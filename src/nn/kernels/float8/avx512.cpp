// casts.hpp for AVX-512 (F, BW, VL, DQ). This file is compiled for it, and its code is called only if the CPU
// has it.
#include <immintrin.h>

#include "nn/kernels/float8/vector_casts.hpp"

namespace weft::float8 {
namespace {

struct Avx512Lanes {
  static constexpr int kLanes = 16;
  using Floats = __m512;
  using Ints = __m512i;
  using Words = __m512i;
  using Bytes = __m512i;
  using Shift = __m128i;

  static Floats fill(float x) { return _mm512_set1_ps(x); }
  static Ints fill_ints(int x) { return _mm512_set1_epi32(x); }
  static Words fill_words(short x) { return _mm512_set1_epi16(x); }
  static Bytes fill_bytes(int x) { return _mm512_set1_epi8(static_cast<char>(x)); }
  static Shift shift(int by) { return _mm_cvtsi32_si128(by); }
  static Ints bits(Floats x) { return _mm512_castps_si512(x); }
  static Floats floats(Ints x) { return _mm512_castsi512_ps(x); }

  static Floats magnitude(Floats x) { return floats(_mm512_and_si512(bits(x), fill_ints(kMagnitude))); }
  static Floats least_floats(Floats limit, Floats x) { return _mm512_min_ps(limit, x); }
  static Floats multiply(Floats x, Floats y) { return _mm512_mul_ps(x, y); }
  static Floats add(Floats x, Floats y) { return _mm512_add_ps(x, y); }
  static Floats subtract(Floats x, Floats y) { return _mm512_sub_ps(x, y); }
  static Ints add_ints(Ints x, Ints y) { return _mm512_add_epi32(x, y); }
  static Ints subtract_ints(Ints x, Ints y) { return _mm512_sub_epi32(x, y); }
  static Ints most_ints(Ints x, Ints y) { return _mm512_max_epi32(x, y); }
  static Ints ints_shifted_right(Ints x, Shift by) { return _mm512_srl_epi32(x, by); }
  static __m512i bits_and(__m512i x, __m512i y) { return _mm512_and_si512(x, y); }
  static __m512i bits_or(__m512i x, __m512i y) { return _mm512_or_si512(x, y); }
  static Words subtract_words(Words x, Words y) { return _mm512_subs_epi16(x, y); }
  static Words least_words(Words x, Words y) { return _mm512_min_epi16(x, y); }

  static Floats load(const float* x) { return _mm512_loadu_ps(x); }
  static void load(const float* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i) v[i] = load(x + i * kLanes);
  }
  static void load(const bf16* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i) {
      const __m256i half = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i * kLanes));
      v[i] = floats(_mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
    }
  }
  static void load(const bf16* x, Floats (&v)[4], PairOrder) {
    const __m512i zero = _mm512_setzero_si512();
    for (int i = 0; i < 4; i += 2) {
      const __m512i pair = _mm512_loadu_si512(x + i * kLanes);
      v[i] = floats(_mm512_unpacklo_epi16(zero, pair));
      v[i + 1] = floats(_mm512_unpackhi_epi16(zero, pair));
    }
  }

  // Narrowing works in each quarter of a vector. A pair that was unpacked in quarters is in order again.
  static Words to_words(Ints x, Ints y) { return _mm512_packs_epi32(x, y); }
  static Bytes to_bytes(Words x, Words y) { return _mm512_packs_epi16(x, y); }
  static Words upper_halves(Ints x, Ints y) {
    return _mm512_packus_epi32(_mm512_srli_epi32(x, 16), _mm512_srli_epi32(y, 16));
  }
  static Words with_signs_of_words(Words x, Words signs) {
    return or_of_and(x, signs, fill_words(static_cast<short>(0x8000)));
  }
  static Bytes with_signs_of_bytes(Bytes x, Bytes signs) { return or_of_and(x, signs, fill_bytes(0x80)); }
  static void store_bytes(std::uint8_t* out, Bytes x, MemoryOrder) {
    const __m512i order = _mm512_setr_epi32(0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15);
    _mm512_storeu_si512(out, _mm512_permutexvar_epi32(order, x));
  }
  static void store_bytes(std::uint8_t* out, Bytes x, PairOrder) {
    _mm512_storeu_si512(out, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x));
  }
  static void store_words(bf16* out, Words x, MemoryOrder) {
    _mm512_storeu_si512(out, _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 2, 4, 6, 1, 3, 5, 7), x));
  }
  static void store_words(bf16* out, Words x, PairOrder) { _mm512_storeu_si512(out, x); }

  static Bytes table(const std::uint8_t* of) {
    return _mm512_broadcast_i32x4(_mm_loadu_si128(reinterpret_cast<const __m128i*>(of)));
  }
  static Bytes lookup(Bytes table, Bytes at) { return _mm512_shuffle_epi8(table, at); }
  static __mmask64 less(Bytes x, Bytes y) { return _mm512_cmplt_epi8_mask(x, y); }
  static __mmask64 either(__mmask64 x, __mmask64 y) { return x | y; }
  static Bytes select(__mmask64 mask, Bytes x, Bytes y) { return _mm512_mask_blend_epi8(mask, y, x); }
  static Bytes add_bytes(Bytes x, Bytes y) { return _mm512_add_epi8(x, y); }
  static Bytes words_shifted_right(Bytes x, Shift by) { return _mm512_srl_epi16(x, by); }
  static Bytes words_shifted_left(Bytes x, Shift by) { return _mm512_sll_epi16(x, by); }
  static Bytes load_for_pairs(const std::uint8_t* x) {
    return _mm512_permutexvar_epi64(_mm512_setr_epi64(0, 4, 1, 5, 2, 6, 3, 7), _mm512_loadu_si512(x));
  }
  static void store_pairs(bf16* out, Bytes lower, Bytes upper) {
    _mm512_storeu_si512(out, _mm512_unpacklo_epi8(lower, upper));
    _mm512_storeu_si512(out + 2 * kLanes, _mm512_unpackhi_epi8(lower, upper));
  }
  static void store_pairs(float* out, Bytes lower, Bytes upper) {
    for (const __m512i words : {_mm512_unpacklo_epi8(lower, upper), _mm512_unpackhi_epi8(lower, upper)})
      for (const __m256i half : {_mm512_castsi512_si256(words), _mm512_extracti64x4_epi64(words, 1)}) {
        _mm512_storeu_si512(out, _mm512_slli_epi32(_mm512_cvtepu16_epi32(half), 16));
        out += kLanes;
      }
  }

 private:
  // x | (y & z)
  static __m512i or_of_and(__m512i x, __m512i y, __m512i z) {
    return _mm512_ternarylogic_epi32(x, y, z, 0xf8);
  }
};

}  // namespace

const Casts* avx512_casts() noexcept { return &VectorCasts<Avx512Lanes>::kCasts; }

}  // namespace weft::float8
