// casts.hpp for NEON, which each CPU of AArch64 has.
#include <arm_neon.h>

#include "nn/kernels/float8/vector_casts.hpp"

namespace weft::float8 {
namespace {

struct NeonLanes {
  static constexpr int kLanes = 4;
  using Floats = float32x4_t;
  using Ints = int32x4_t;
  using Words = int16x8_t;
  using Bytes = uint8x16_t;
  using Shift = int;

  static Floats fill(float x) { return vdupq_n_f32(x); }
  static Ints fill_ints(int x) { return vdupq_n_s32(x); }
  static Words fill_words(short x) { return vdupq_n_s16(x); }
  static Bytes fill_bytes(int x) { return vdupq_n_u8(static_cast<std::uint8_t>(x)); }
  static Shift shift(int by) { return by; }
  static Ints bits(Floats x) { return vreinterpretq_s32_f32(x); }
  static Floats floats(Ints x) { return vreinterpretq_f32_s32(x); }

  static Floats magnitude(Floats x) { return vabsq_f32(x); }
  static Floats least_floats(Floats limit, Floats x) { return vminq_f32(limit, x); }
  static Floats multiply(Floats x, Floats y) { return vmulq_f32(x, y); }
  static Floats add(Floats x, Floats y) { return vaddq_f32(x, y); }
  static Floats subtract(Floats x, Floats y) { return vsubq_f32(x, y); }
  static Ints add_ints(Ints x, Ints y) { return vaddq_s32(x, y); }
  static Ints subtract_ints(Ints x, Ints y) { return vsubq_s32(x, y); }
  static Ints most_ints(Ints x, Ints y) { return vmaxq_s32(x, y); }
  static Ints ints_shifted_right(Ints x, Shift by) { return vshlq_s32(x, vdupq_n_s32(-by)); }
  static Ints bits_and(Ints x, Ints y) { return vandq_s32(x, y); }
  static Bytes bits_and(Bytes x, Bytes y) { return vandq_u8(x, y); }
  static Bytes bits_or(Bytes x, Bytes y) { return vorrq_u8(x, y); }
  static Words subtract_words(Words x, Words y) { return vqsubq_s16(x, y); }
  static Words least_words(Words x, Words y) { return vminq_s16(x, y); }

  static Floats load(const float* x) { return vld1q_f32(x); }
  static void load(const float* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i) v[i] = load(x + i * kLanes);
  }
  static void load(const bf16* x, Floats (&v)[4], MemoryOrder) {
    for (int i = 0; i < 4; ++i)
      v[i] = vreinterpretq_f32_u32(
          vshll_n_u16(vld1_u16(reinterpret_cast<const std::uint16_t*>(x + i * kLanes)), 16));
  }
  static void load(const bf16* x, Floats (&v)[4], PairOrder) { load(x, v, MemoryOrder{}); }

  static Words to_words(Ints x, Ints y) { return vqmovn_high_s32(vqmovn_s32(x), y); }
  static Bytes to_bytes(Words x, Words y) { return vreinterpretq_u8_s8(vqmovn_high_s16(vqmovn_s16(x), y)); }
  static Words upper_halves(Ints x, Ints y) { return vshrn_high_n_s32(vshrn_n_s32(x, 16), y, 16); }
  static Words with_signs_of_words(Words x, Words signs) {
    return vorrq_s16(x, vandq_s16(signs, vdupq_n_s16(static_cast<short>(0x8000))));
  }
  static Bytes with_signs_of_bytes(Bytes x, Bytes signs) {
    return vorrq_u8(x, vandq_u8(signs, vdupq_n_u8(0x80)));
  }
  template <class Order>
  static void store_bytes(std::uint8_t* out, Bytes x, Order) {
    vst1q_u8(out, x);
  }
  template <class Order>
  static void store_words(bf16* out, Words x, Order) {
    vst1q_s16(reinterpret_cast<std::int16_t*>(out), x);
  }

  static Bytes table(const std::uint8_t* of) { return vld1q_u8(of); }
  static Bytes lookup(Bytes table, Bytes at) { return vqtbl1q_u8(table, vandq_u8(at, vdupq_n_u8(15))); }
  static Bytes less(Bytes x, Bytes y) { return vcltq_u8(x, y); }
  static Bytes either(Bytes x, Bytes y) { return vorrq_u8(x, y); }
  static Bytes select(Bytes mask, Bytes x, Bytes y) { return vbslq_u8(mask, x, y); }
  static Bytes add_bytes(Bytes x, Bytes y) { return vaddq_u8(x, y); }
  static Bytes words_shifted_right(Bytes x, Shift by) { return shifted(x, -by); }
  static Bytes words_shifted_left(Bytes x, Shift by) { return shifted(x, by); }
  static Bytes load_for_pairs(const std::uint8_t* x) { return vld1q_u8(x); }
  static void store_pairs(bf16* out, Bytes lower, Bytes upper) {
    vst2q_u8(reinterpret_cast<std::uint8_t*>(out), uint8x16x2_t{{lower, upper}});
  }
  static void store_pairs(float* out, Bytes lower, Bytes upper) {
    for (const Bytes bytes : {vzip1q_u8(lower, upper), vzip2q_u8(lower, upper)}) {
      const uint16x8_t words = vreinterpretq_u16_u8(bytes);
      vst1q_u32(reinterpret_cast<std::uint32_t*>(out), vshll_n_u16(vget_low_u16(words), 16));
      vst1q_u32(reinterpret_cast<std::uint32_t*>(out + kLanes), vshll_high_n_u16(words, 16));
      out += 2 * kLanes;
    }
  }

 private:
  static Bytes shifted(Bytes x, int by) {
    return vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(x), vdupq_n_s16(static_cast<short>(by))));
  }
};

}  // namespace

const Casts* neon_casts() noexcept { return &VectorCasts<NeonLanes>::kCasts; }

}  // namespace weft::float8
