// casts.hpp for AVX2. This file is compiled for it, and its code is called only if the CPU has it.
#include <immintrin.h>

#include "nn/kernels/float8/vector_casts.hpp"

namespace weft::float8 {
namespace {

struct Avx2Lanes {
  static constexpr int kLanes = 8;
  using Floats = __m256;
  using Ints = __m256i;
  using Words = __m256i;
  using Bytes = __m256i;
  using Shift = __m128i;

  static Floats fill(float x) { return _mm256_set1_ps(x); }
  static Ints fill_ints(int x) { return _mm256_set1_epi32(x); }
  static Words fill_words(short x) { return _mm256_set1_epi16(x); }
  static Bytes fill_bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  static Shift shift(int by) { return _mm_cvtsi32_si128(by); }
  static Ints bits(Floats x) { return _mm256_castps_si256(x); }
  static Floats floats(Ints x) { return _mm256_castsi256_ps(x); }

  static Floats magnitude(Floats x) { return _mm256_andnot_ps(_mm256_set1_ps(-0.0F), x); }
  static Floats least_floats(Floats limit, Floats x) { return _mm256_min_ps(limit, x); }
  static Floats multiply(Floats x, Floats y) { return _mm256_mul_ps(x, y); }
  static Floats add(Floats x, Floats y) { return _mm256_add_ps(x, y); }
  static Floats subtract(Floats x, Floats y) { return _mm256_sub_ps(x, y); }
  static Ints add_ints(Ints x, Ints y) { return _mm256_add_epi32(x, y); }
  static Ints subtract_ints(Ints x, Ints y) { return _mm256_sub_epi32(x, y); }
  static Ints most_ints(Ints x, Ints y) { return _mm256_max_epi32(x, y); }
  static Ints ints_shifted_right(Ints x, Shift by) { return _mm256_srl_epi32(x, by); }
  static __m256i bits_and(__m256i x, __m256i y) { return _mm256_and_si256(x, y); }
  static __m256i bits_or(__m256i x, __m256i y) { return _mm256_or_si256(x, y); }
  static Words subtract_words(Words x, Words y) { return _mm256_subs_epi16(x, y); }
  static Words least_words(Words x, Words y) { return _mm256_min_epi16(x, y); }

  static Floats load(const float* x) { return _mm256_loadu_ps(x); }
  static void load(const float* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i) v[i] = load(x + i * kLanes);
  }
  static void load(const bf16* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i) {
      const __m128i half = _mm_loadu_si128(reinterpret_cast<const __m128i*>(x + i * kLanes));
      v[i] = floats(_mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
    }
  }
  static void load(const bf16* x, Floats (&v)[4], PairOrder) {
    const __m256i zero = _mm256_setzero_si256();
    for (int i = 0; i < 4; i += 2) {
      const __m256i pair = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + i * kLanes));
      v[i] = floats(_mm256_unpacklo_epi16(zero, pair));
      v[i + 1] = floats(_mm256_unpackhi_epi16(zero, pair));
    }
  }

  // Narrowing works in each half of a vector. A pair that was unpacked in halves is in order again.
  static Words to_words(Ints x, Ints y) { return _mm256_packs_epi32(x, y); }
  static Bytes to_bytes(Words x, Words y) { return _mm256_packs_epi16(x, y); }
  static Words upper_halves(Ints x, Ints y) {
    return _mm256_packus_epi32(_mm256_srli_epi32(x, 16), _mm256_srli_epi32(y, 16));
  }
  static Words with_signs_of_words(Words x, Words signs) {
    return bits_or(x, bits_and(signs, fill_words(static_cast<short>(0x8000))));
  }
  static Bytes with_signs_of_bytes(Bytes x, Bytes signs) {
    return bits_or(x, bits_and(signs, fill_bytes(0x80)));
  }
  static void store_bytes(std::uint8_t* out, Bytes x, MemoryOrder) {
    store(out, _mm256_permutevar8x32_epi32(x, _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7)));
  }
  static void store_bytes(std::uint8_t* out, Bytes x, PairOrder) {
    store(out, _mm256_permute4x64_epi64(x, 0xd8));
  }
  static void store_words(bf16* out, Words x, MemoryOrder) { store(out, _mm256_permute4x64_epi64(x, 0xd8)); }
  static void store_words(bf16* out, Words x, PairOrder) { store(out, x); }

  static Bytes table(const std::uint8_t* of) {
    return _mm256_broadcastsi128_si256(_mm_loadu_si128(reinterpret_cast<const __m128i*>(of)));
  }
  static Bytes lookup(Bytes table, Bytes at) { return _mm256_shuffle_epi8(table, at); }
  static Bytes less(Bytes x, Bytes y) { return _mm256_cmpgt_epi8(y, x); }
  static Bytes either(Bytes x, Bytes y) { return bits_or(x, y); }
  static Bytes select(Bytes mask, Bytes x, Bytes y) { return _mm256_blendv_epi8(y, x, mask); }
  static Bytes add_bytes(Bytes x, Bytes y) { return _mm256_add_epi8(x, y); }
  static Bytes words_shifted_right(Bytes x, Shift by) { return _mm256_srl_epi16(x, by); }
  static Bytes words_shifted_left(Bytes x, Shift by) { return _mm256_sll_epi16(x, by); }
  static Bytes load_for_pairs(const std::uint8_t* x) {
    return _mm256_permute4x64_epi64(_mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)), 0xd8);
  }
  static void store_pairs(bf16* out, Bytes lower, Bytes upper) {
    store(out, _mm256_unpacklo_epi8(lower, upper));
    store(out + 2 * kLanes, _mm256_unpackhi_epi8(lower, upper));
  }
  static void store_pairs(float* out, Bytes lower, Bytes upper) {
    for (const __m256i words : {_mm256_unpacklo_epi8(lower, upper), _mm256_unpackhi_epi8(lower, upper)})
      for (const __m128i half : {_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)}) {
        store(out, _mm256_slli_epi32(_mm256_cvtepu16_epi32(half), 16));
        out += kLanes;
      }
  }

 private:
  template <class T>
  static void store(T* out, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(out), x);
  }
};

// bf16 to codes in words of 16 bits, where vector_casts.hpp has words of 32: arithmetic, not memory, limits
// that cast with AVX2.
//
// A product's exponent is that of x, raised by a constant, and by one more from a certain mantissa on. The
// word of x and its scale therefore determine the anchor of its product: a magnitude m is
// (m - `before`) / 128 exponents above the anchor `magic`, rounded down, or has that anchor. Words at even
// places become floats by a shift, those at odd places by a mask. The sum with the anchor then has in its
// lower word the multiples of the last bit. The anchor of a magnitude beyond the format may overflow: it is
// then a NaN whose lower word is 0, and the code is too large all the same.
class InWords {
 public:
  static constexpr std::int64_t kBlock = 32;      // elements
  static constexpr std::int64_t kColumns = 8192;  // at most

  explicit InWords(const Float8Format& format) : format_(format) {}

  /// Sets the scales of `count` columns, a multiple of 16. False if one is not positive, or so small or large
  /// that a product of bf16 might overflow.
  ///
  /// The smallest magnitude whose product is at least twice the smallest normal value is the quotient of the
  /// two cut to bf16, or the magnitude after that.
  bool set(const float* scales, std::int64_t count) {
    const __m256 least = _mm256_set1_ps(2 * std::bit_cast<float>(format_.least_normal)),
                 lowest = _mm256_set1_ps(0x1p-90F), highest = _mm256_set1_ps(0x1p90F);
    const __m256i upper = _mm256_set1_epi32(~0xffff);
    __m256 usable = _mm256_castsi256_ps(_mm256_set1_epi32(-1));
    const auto before = [&](__m256 scale) {
      usable = _mm256_and_ps(usable, _mm256_and_ps(_mm256_cmp_ps(scale, lowest, _CMP_GE_OQ),
                                                   _mm256_cmp_ps(scale, highest, _CMP_LE_OQ)));
      const __m256i cut = _mm256_and_si256(_mm256_castps_si256(_mm256_div_ps(least, scale)), upper);
      const __m256 small = _mm256_cmp_ps(_mm256_mul_ps(_mm256_castsi256_ps(cut), scale), least, _CMP_LT_OQ);
      const __m256i first = _mm256_sub_epi32(_mm256_srli_epi32(cut, 16), _mm256_castps_si256(small));
      return _mm256_sub_epi32(first, _mm256_set1_epi32(128));
    };
    for (std::int64_t at = 0; at < count; at += 16) {
      const __m256 a = _mm256_loadu_ps(scales + at), b = _mm256_loadu_ps(scales + at + 8);
      const auto in_order = [](__m256 halves) {
        return _mm256_permute4x64_epi64(_mm256_castps_si256(halves), 0xd8);
      };
      store(scales_ + at, in_order(_mm256_shuffle_ps(a, b, 0x88)));  // of even places
      store(scales_ + at + 8, in_order(_mm256_shuffle_ps(a, b, 0xdd)));
      store(before_ + at, _mm256_permute4x64_epi64(_mm256_packs_epi32(before(a), before(b)), 0xd8));
    }
    return _mm256_movemask_ps(usable) == 0xff;
  }

  /// Writes the codes of `blocks` blocks, with the scale of each column from `column` on, or with that of
  /// column 0. False: they are not valid, because some x is a NaN.
  template <bool kEach>
  bool cast(const bf16* x, std::uint8_t* codes, std::int64_t blocks, std::int64_t column) const {
    const __m256i magnitude = words(kMagnitude >> 16), odd = _mm256_set1_epi32(~0xffff),
                  exponent = words(0xff80), magic = words(bits_of(format_.magic) >> 16), sign = bytes(0x80),
                  limit = bytes(format_.largest_code);
    const __m128i by = _mm_cvtsi32_si128(format_.dropped - 16);
    const __m256 scale_of_all = _mm256_set1_ps(scales_[0]);
    const __m256i before_of_all = words(before_[0]);
    const bf16* const begin = x;
    const float* scales = scales_ + column;
    const std::int16_t* before = before_ + column;
    __m256i largest = _mm256_setzero_si256();
    const auto of_words = [&](__m256i all, int at) {
      const __m256i m = _mm256_and_si256(all, magnitude);
      const __m256i above =
          _mm256_and_si256(_mm256_subs_epu16(m, kEach ? load(before + at) : before_of_all), exponent);
      const __m256i anchor = _mm256_adds_epi16(above, magic);
      const auto sum = [&](__m256i v, __m256i a, int lane) {
        const __m256 scale = kEach ? _mm256_loadu_ps(scales + at + lane) : scale_of_all;
        return _mm256_castps_si256(
            _mm256_add_ps(_mm256_mul_ps(_mm256_castsi256_ps(v), scale), _mm256_castsi256_ps(a)));
      };
      const __m256i even = sum(_mm256_slli_epi32(m, 16), _mm256_slli_epi32(anchor, 16), 0),
                    odds = sum(_mm256_and_si256(m, odd), _mm256_and_si256(anchor, odd), 8);
      return _mm256_add_epi16(_mm256_blend_epi16(even, _mm256_slli_epi32(odds, 16), 0xaa),
                              _mm256_srl_epi16(above, by));
    };
    for (; blocks > 0; --blocks, x += kBlock, codes += kBlock) {
      _mm_prefetch(reinterpret_cast<const char*>(x + 4096), _MM_HINT_T0);
      const __m256i a = load(x), b = load(x + 16);
      __m256i unsigned_codes = _mm256_packs_epi16(of_words(a, 0), of_words(b, 16));
      largest = _mm256_max_epu8(largest, unsigned_codes);
      unsigned_codes = _mm256_min_epu8(unsigned_codes, limit);
      const __m256i both = _mm256_or_si256(unsigned_codes, _mm256_and_si256(_mm256_packs_epi16(a, b), sign));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permute4x64_epi64(both, 0xd8));
      if (kEach) scales += kBlock, before += kBlock;
    }
    const __m256i beyond = _mm256_cmpgt_epi8(largest, limit);
    return _mm256_testz_si256(beyond, beyond) != 0 || !has_nan(begin, x);
  }

 private:
  static bool has_nan(const bf16* x, const bf16* end) {
    __m256i largest = _mm256_setzero_si256();
    for (; x < end; x += 16)
      largest = _mm256_max_epi16(largest, _mm256_and_si256(load(x), words(kMagnitude >> 16)));
    const __m256i nan = _mm256_cmpgt_epi16(largest, words(kInfinite >> 16));
    return _mm256_testz_si256(nan, nan) == 0;
  }
  static __m256i words(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  static __m256i bytes(int x) { return _mm256_set1_epi8(static_cast<char>(x)); }
  template <class T>
  static __m256i load(const T* x) {
    return _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x));
  }
  template <class T>
  static void store(T* to, __m256i x) {
    _mm256_storeu_si256(reinterpret_cast<__m256i*>(to), x);
  }
  Float8Format format_;
  float scales_[kColumns];  // of 16 columns those at even places, then those at odd ones
  std::int16_t before_[kColumns];
};

constexpr auto kGeneralBf16ToCodes = VectorCasts<Avx2Lanes>::kCasts.bf16_to_codes;

// Casts `count` elements, in parts: the general cast repeats a part whose codes are not valid.
template <bool kEach>
void cast_in_words(const InWords& words, const bf16* x, const float* scales, const Float8Format& format,
                   std::uint8_t* codes, std::int64_t count) {
  constexpr std::int64_t kPart = 1024;
  for (std::int64_t at = 0; at < count; at += kPart) {
    const std::int64_t part = std::min(kPart, count - at);
    if (!words.cast<kEach>(x + at, codes + at, part / InWords::kBlock, kEach ? at : 0))
      kGeneralBf16ToCodes(x + at, {scales + (kEach ? at : 0), kEach}, format, codes + at, 1, part);
  }
}

void bf16_to_codes(const bf16* x, CastScales scales, const Float8Format& format, std::uint8_t* codes,
                   std::int64_t rows, std::int64_t n) {
  InWords words(format);
  if (!scales.each) {
    float same[16];
    std::fill(same, same + 16, *scales.scales);
    const std::int64_t count = rows * n, in_blocks = count - count % InWords::kBlock;
    const bool usable = count >= 1024 && words.set(same, 16);
    if (usable) cast_in_words<false>(words, x, same, format, codes, in_blocks);
    const std::int64_t done = usable ? in_blocks : 0;
    return kGeneralBf16ToCodes(x + done, scales, format, codes + done, 1, count - done);
  }
  for (std::int64_t at = 0; at < n;) {
    const std::int64_t rest = n - at, in_blocks = std::min(rest - rest % InWords::kBlock, InWords::kColumns),
                       columns = in_blocks > 0 ? in_blocks : rest;
    const float* const of_columns = scales.scales + at;
    const bool usable = rows >= 4 && in_blocks > 0 && words.set(of_columns, in_blocks);
    for (std::int64_t r = 0; r < rows; ++r) {
      const std::int64_t from = r * n + at;
      if (usable)
        cast_in_words<true>(words, x + from, of_columns, format, codes + from, columns);
      else
        kGeneralBf16ToCodes(x + from, {of_columns, true}, format, codes + from, 1, columns);
    }
    at += columns;
  }
}

constexpr Casts with_bf16_to_codes(Casts casts) {
  casts.bf16_to_codes = bf16_to_codes;
  return casts;
}

}  // namespace

const Casts* avx2_casts() noexcept {
  static constexpr Casts kCasts = with_bf16_to_codes(VectorCasts<Avx2Lanes>::kCasts);
  return &kCasts;
}

}  // namespace weft::float8
