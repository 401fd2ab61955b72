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

// bf16 to codes with one scale, in words of 16 bits where vector_casts.hpp has words of 32: arithmetic, not
// memory, limits that cast with AVX2.
//
// A product's exponent is that of x, raised by a constant, and by one more from a certain mantissa on. The
// word of x therefore determines the anchor of its product: `first` is the smallest magnitude whose product
// is at least twice the smallest normal value; a magnitude m is (m - first) / 128 + 1 exponents above the
// anchor `magic`, rounded down, or has that anchor. Words at even places become floats by a shift, those at
// odd places by a mask. The sum with the anchor then has in its lower word the multiples of the last bit.
class OneScale {
 public:
  /// usable() is false for scales that are not positive, or so small or large that exponents might overflow.
  OneScale(float scale, const Float8Format& f) : scale_(scale), format_(f) {
    if (!(scale >= 0x1p-90F && scale <= 0x1p90F)) return;
    first_ = least_with(2 * std::bit_cast<float>(f.least_normal));
    // A product above the largest value by 1/64 still rounds to that value: no x below has a code too large.
    beyond_ = least_with(std::bit_cast<float>(f.largest) * (1 + 1.0F / 64));
  }
  bool usable() const noexcept { return first_ != 0; }

  /// Writes the codes of `blocks` times 32 elements. False: they are not valid, because some x is a NaN or is
  /// beyond the largest value.
  bool cast(const bf16* x, std::uint8_t* codes, std::int64_t blocks) const {
    const __m256i magnitude = words(kMagnitude >> 16), odd = _mm256_set1_epi32(~0xffff),
                  before = words(first_ - 128), exponent = words(0xff80),
                  magic = words(bits_of(format_.magic) >> 16),
                  sign = _mm256_set1_epi8(static_cast<char>(0x80));
    const __m128i by = _mm_cvtsi32_si128(format_.dropped - 16);
    const __m256 scale = _mm256_set1_ps(scale_);
    __m256i largest = _mm256_setzero_si256();
    const auto of_words = [&](__m256i all) {
      const __m256i m = _mm256_and_si256(all, magnitude);
      largest = _mm256_max_epi16(largest, m);
      const __m256i above = _mm256_and_si256(_mm256_subs_epu16(m, before), exponent);
      const __m256i anchor = _mm256_add_epi16(above, magic);
      const auto sum = [&](__m256i v, __m256i a) {
        return _mm256_castps_si256(
            _mm256_add_ps(_mm256_mul_ps(_mm256_castsi256_ps(v), scale), _mm256_castsi256_ps(a)));
      };
      const __m256i even = sum(_mm256_slli_epi32(m, 16), _mm256_slli_epi32(anchor, 16)),
                    odds = sum(_mm256_and_si256(m, odd), _mm256_and_si256(anchor, odd));
      return _mm256_add_epi16(_mm256_blend_epi16(even, _mm256_slli_epi32(odds, 16), 0xaa),
                              _mm256_srl_epi16(above, by));
    };
    for (; blocks > 0; --blocks, x += 32, codes += 32) {
      _mm_prefetch(reinterpret_cast<const char*>(x + 4096), _MM_HINT_T0);
      const __m256i a = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x)),
                    b = _mm256_loadu_si256(reinterpret_cast<const __m256i*>(x + 16));
      const __m256i unsigned_codes = _mm256_packs_epi16(of_words(a), of_words(b));
      const __m256i both = _mm256_or_si256(unsigned_codes, _mm256_and_si256(_mm256_packs_epi16(a, b), sign));
      _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permute4x64_epi64(both, 0xd8));
    }
    const __m256i without_code = _mm256_cmpgt_epi16(largest, words(beyond_ - 1));
    return _mm256_testz_si256(without_code, without_code) != 0;
  }

 private:
  static __m256i words(int x) { return _mm256_set1_epi16(static_cast<short>(x)); }
  // The smallest magnitude of bf16 whose product is at least so large; monotone, since rounding is.
  int least_with(float product) const {
    int low = 0x80, high = 0x7f80;
    while (low < high) {
      const int middle = (low + high) / 2;
      const bool enough = std::bit_cast<float>(middle << 16) * scale_ >= product;
      (enough ? high : low) = enough ? middle : middle + 1;
    }
    return low;
  }
  float scale_;
  Float8Format format_;
  int first_ = 0, beyond_ = 0;
};

void bf16_to_codes(const bf16* x, CastScales scales, const Float8Format& format, std::uint8_t* codes,
                   std::int64_t n) {
  constexpr std::int64_t kPart = 1024;  // elements
  const auto& general = VectorCasts<Avx2Lanes>::kCasts.bf16_to_codes;
  if (scales.each || n < kPart) return general(x, scales, format, codes, n);
  const OneScale one(*scales.scales, format);
  if (!one.usable()) return general(x, scales, format, codes, n);
  for (; n >= kPart; n -= kPart, x += kPart, codes += kPart)
    if (!one.cast(x, codes, kPart / 32)) general(x, scales, format, codes, kPart);
  general(x, scales, format, codes, n);
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
