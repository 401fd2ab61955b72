// Element-wise reduction against a reference written the slow way, on every instruction set this machine has.
#include "backends/reduce.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "backends/reduce_isa.hpp"

namespace weft {
namespace {

using Kind = ReduceOp::Kind;
constexpr Kind kKinds[] = {Kind::sum, Kind::avg, Kind::min, Kind::max};
constexpr int kRanks[] = {1, 2, 3, 4, 5, 7, 8, 9, 17};
constexpr int kCounts[] = {0, 1, 2, 3, 7, 31, 64, 1000, 4097};

// ---- The reference: one element at a time, the tree spelled out.

template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
using AccumulatorOf = std::conditional_t<kIsHalf<T>, float, T>;

template <class A>
A combine(Kind kind, A a, A b) {
  switch (kind) {
    case Kind::sum:
    case Kind::avg:
      if constexpr (std::is_integral_v<A>) {
        return static_cast<A>(static_cast<std::uint64_t>(a) + static_cast<std::uint64_t>(b));  // wraps
      } else {
        return a + b;
      }
    case Kind::min:
    case Kind::max:
    case Kind::prod:
    case Kind::premul_sum:
    case Kind::bit_and:
    case Kind::bit_or:
    case Kind::bit_xor:
    case Kind::logical_and:
    case Kind::logical_or:
    case Kind::logical_xor:
    case Kind::user: break;
  }
  if constexpr (std::is_floating_point_v<A>) {
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
    if (a == 0 && b == 0) {
      const bool negative =
          kind == Kind::min ? std::signbit(a) || std::signbit(b) : std::signbit(a) && std::signbit(b);
      return negative ? A(-0.0) : A(0.0);
    }
  }
  return kind == Kind::min ? std::min(a, b) : std::max(a, b);
}

template <class A>
A tree(Kind kind, const std::vector<A>& values, int first, int n) {
  if (n == 1) return values[first];
  int half = 1;
  while (half * 2 < n) half *= 2;
  return combine(kind, tree(kind, values, first, half), tree(kind, values, first + half, n - half));
}

template <class T>
T one_quiet_nan() {
  if constexpr (std::is_same_v<T, f16>) return f16::from_bits(0x7e00);
  if constexpr (std::is_same_v<T, bf16>) return bf16::from_bits(0x7fc0);
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(0x7fc00000u);
  if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(std::uint64_t{0x7ff8000000000000u});
  return T{};
}

template <class T>
T reference(Kind kind, const std::vector<std::vector<T>>& in, int i) {
  using A = AccumulatorOf<T>;
  const int n = static_cast<int>(in.size());
  std::vector<A> values;
  for (const auto& x : in) values.push_back(static_cast<A>(x[i]));
  A total = tree(kind, values, 0, n);
  if (kind == Kind::avg) {
    if constexpr (std::is_floating_point_v<A>) {
      total = total / static_cast<A>(n);
    } else if constexpr (std::is_signed_v<A>) {
      total = static_cast<A>(static_cast<std::int64_t>(total) / n);
    } else {
      total = static_cast<A>(static_cast<std::uint64_t>(total) / static_cast<std::uint64_t>(n));
    }
  }
  if constexpr (std::is_floating_point_v<A>) {
    if (std::isnan(total)) return one_quiet_nan<T>();
  }
  return static_cast<T>(total);
}

// ---- Inputs: half of the elements random bits (any exponent, NaNs, infinities), a quarter numbers of like
// size, so that sums round, and a quarter from a list of what usually goes wrong.

template <class T>
std::vector<T> specials() {
  if constexpr (std::is_integral_v<T>) {
    using L = std::numeric_limits<T>;
    return {T(0), T(1), L::min(), L::max(), T(L::max() - 1), T(L::min() + 1), T(-1), T(-3), T(5)};
  } else {
    std::vector<T> to;
    using Bits = std::conditional_t<sizeof(T) == 2, std::uint16_t,
                                    std::conditional_t<sizeof(T) == 4, std::uint32_t, std::uint64_t>>;
    const Bits sign = Bits(Bits{1} << (sizeof(T) * 8 - 1)), nan = std::bit_cast<Bits>(one_quiet_nan<T>());
    const int mantissa = std::is_same_v<T, f16> ? 10 : std::is_same_v<T, bf16> ? 7 : sizeof(T) == 4 ? 23 : 52;
    const Bits quiet = Bits(Bits{1} << (mantissa - 1)), infinity = Bits(nan ^ quiet);
    for (const Bits b :
         {Bits(0), Bits(1), Bits(quiet), Bits((quiet << 1) - 1), Bits(quiet << 1), infinity,
          Bits(infinity - 1), nan, Bits(nan | 1), Bits(infinity | 1), Bits(nan + (quiet >> 1)),
          std::bit_cast<Bits>(static_cast<T>(1.0f)), std::bit_cast<Bits>(static_cast<T>(65504.0f)),
          std::bit_cast<Bits>(static_cast<T>(0x1.004p-14f))}) {
      to.push_back(std::bit_cast<T>(b));
      to.push_back(std::bit_cast<T>(Bits(b ^ sign)));
    }
    return to;
  }
}

template <class T>
std::vector<T> inputs(int count, std::mt19937_64& random) {
  const std::vector<T> special = specials<T>();
  std::vector<T> to(count);
  for (T& x : to) {
    const std::uint64_t r = random();
    if (r % 4 < 2) {
      const std::uint64_t bits = random();
      std::memcpy(static_cast<void*>(&x), &bits, sizeof x);
    } else if (r % 4 == 2) {
      x = static_cast<T>(
          static_cast<AccumulatorOf<T>>(static_cast<float>(static_cast<int>(r >> 40) % 200) / 3.0f));
    } else {
      x = special[(r >> 8) % special.size()];
    }
  }
  return to;
}

template <class T>
using Buffers = std::vector<std::vector<T>>;

template <class T>
Buffers<T> ranks_of_inputs(int n, int count, std::mt19937_64& random) {
  Buffers<T> to;
  for (int k = 0; k < n; ++k) to.push_back(inputs<T>(count, random));
  return to;
}

template <class T>
std::vector<T> expected(Kind kind, const Buffers<T>& in) {
  std::vector<T> to(in[0].size());
  for (int i = 0; i < static_cast<int>(to.size()); ++i) to[i] = reference(kind, in, i);
  return to;
}

template <class T>
std::string hex(T x) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &x, sizeof x);
  return fmt::format("{:#x}", bits);
}

// Compares bits; names the first element that differs and its inputs.
template <class T>
testing::AssertionResult same_bits(const T* got, const std::vector<T>& want, const Buffers<T>& in) {
  for (std::size_t i = 0; i < want.size(); ++i) {
    if (std::memcmp(&got[i], &want[i], sizeof(T)) == 0) continue;
    std::string from;
    for (const auto& x : in) from += fmt::format(" {}", hex(x[i]));
    return testing::AssertionFailure() << fmt::format("element {} of {}: {}; expected {} from{}", i,
                                                      want.size(), hex(got[i]), hex(want[i]), from);
  }
  return testing::AssertionSuccess();
}

template <class T>
const std::byte* bytes(const T* x) {
  return reinterpret_cast<const std::byte*>(x);
}
template <class T>
std::byte* bytes(T* x) {
  return reinterpret_cast<std::byte*>(x);
}

template <class T>
std::vector<const std::byte*> pointers(const Buffers<T>& in) {
  std::vector<const std::byte*> to;
  for (const auto& x : in) to.push_back(bytes(x.data()));
  return to;
}

std::vector<const ReduceIsa*> isas() {
  std::array<const ReduceIsa*, 3> all{};
  const int n = runnable_reduce_isas(all.data());
  return {all.begin(), all.begin() + n};
}

template <class T>
class Reduce : public testing::Test {
 protected:
  static ReduceKernel kernel(const ReduceIsa& isa, Kind kind) {
    return isa.kernel[static_cast<int>(dtype_of<T>)][static_cast<int>(kind)];
  }
  std::mt19937_64 random_{20260601};
};

using Types = testing::Types<double, float, f16, bf16, std::int8_t, std::int16_t, std::int32_t, std::int64_t,
                             std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t>;
class TypeNames {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::string(name(dtype_of<T>));
  }
};
TYPED_TEST_SUITE(Reduce, Types, TypeNames);

TYPED_TEST(Reduce, every_instruction_set_gives_the_bits_of_the_reference) {
  using T = TypeParam;
  for (const int n : kRanks)
    for (const int count : kCounts) {
      const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
      for (const Kind kind : kKinds) {
        const std::vector<T> want = expected(kind, in);
        for (const ReduceIsa* isa : isas())
          for (const int outs : {1, 2, 3}) {
            SCOPED_TRACE(fmt::format("{} {} n={} outs={}", isa->name, name(ReduceOp{kind}), n, outs));
            Buffers<T> out(outs, std::vector<T>(count));
            std::vector<std::byte*> to;
            for (auto& x : out) to.push_back(bytes(x.data()));
            this->kernel(*isa, kind)(pointers(in).data(), n, to.data(), outs, count);
            for (const auto& x : out) ASSERT_TRUE(same_bits(x.data(), want, in));
          }
      }
    }
}

TYPED_TEST(Reduce, chosen_kernel_and_streaming_give_the_same_bits) {
  using T = TypeParam;
  const int count = 80000 / static_cast<int>(sizeof(T)) + 5;
  for (const int n : {1, 2, 3, 9}) {
    const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
    for (const Kind kind : kKinds) {
      const std::vector<T> want = expected(kind, in);
      for (const bool stream : {false, true})
        for (const int shift : {0, 1, 3}) {
          SCOPED_TRACE(fmt::format("{} n={} stream={} shift={}", name(ReduceOp{kind}), n, stream, shift));
          std::vector<T> a(count + shift), b(count);
          std::byte* const out[] = {bytes(a.data() + shift), bytes(b.data())};
          reduce(dtype_of<T>, ReduceOp{kind}, pointers(in), out, count, stream);
          ASSERT_TRUE(same_bits(a.data() + shift, want, in));
          ASSERT_TRUE(same_bits(b.data(), want, in));
        }
    }
  }
}

TYPED_TEST(Reduce, an_out_may_be_any_of_the_ins) {
  using T = TypeParam;
  for (const int n : {1, 2, 3, 4, 5, 9})
    for (const int count : {2, 777, 70001}) {
      if (count > 777 && n > 3) continue;
      const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
      const std::vector<T> want = expected(Kind::sum, in);
      for (const bool stream : {false, true}) {
        for (int j = 0; j < n; ++j) {
          SCOPED_TRACE(fmt::format("n={} count={} stream={} out==in[{}]", n, count, stream, j));
          Buffers<T> copy = in;
          std::byte* const out[] = {bytes(copy[j].data())};
          reduce(dtype_of<T>, ReduceOp::sum, pointers(copy), out, count, stream);
          ASSERT_TRUE(same_bits(copy[j].data(), want, in));
          for (int k = 0; k < n; ++k) {
            if (k != j) {
              ASSERT_EQ(std::memcmp(copy[k].data(), in[k].data(), count * sizeof(T)), 0) << k;
            }
          }
        }
        Buffers<T> copy = in;
        std::vector<std::byte*> out;
        for (auto& x : copy) out.push_back(bytes(x.data()));
        reduce(dtype_of<T>, ReduceOp::sum, pointers(copy), out, count, stream);
        for (const auto& x : copy) ASSERT_TRUE(same_bits(x.data(), want, in));
      }
    }
}

TYPED_TEST(Reduce, pointers_need_only_the_alignment_of_the_element_and_neighbours_stay) {
  using T = TypeParam;
  constexpr int kGuard = 3;
  for (const ReduceIsa* isa : isas())
    for (int shift = 1; shift <= 3; ++shift)
      for (const int count : {1, 5, 130}) {
        SCOPED_TRACE(fmt::format("{} shift={} count={}", isa->name, shift, count));
        Buffers<T> in = ranks_of_inputs<T>(2, count, this->random_);
        const std::vector<T> want = expected(Kind::max, in);
        Buffers<T> shifted(2);
        std::vector<const std::byte*> from;
        for (int k = 0; k < 2; ++k) {
          shifted[k].resize(shift + k);
          shifted[k].insert(shifted[k].end(), in[k].begin(), in[k].end());
          from.push_back(bytes(shifted[k].data() + shift + k));
        }
        const std::vector<T> around = inputs<T>(shift + count + kGuard, this->random_);
        std::vector<T> out = around;
        std::byte* const to[] = {bytes(out.data() + shift)};
        this->kernel(*isa, Kind::max)(from.data(), 2, to, 1, count);
        ASSERT_TRUE(same_bits(out.data() + shift, want, in));
        ASSERT_EQ(std::memcmp(out.data(), around.data(), shift * sizeof(T)), 0);
        ASSERT_EQ(std::memcmp(out.data() + shift + count, around.data() + shift + count, kGuard * sizeof(T)),
                  0);
      }
}

// All pairs of the special values, in both orders and in each place of a tree of three.
TYPED_TEST(Reduce, special_values_meet_each_other) {
  using T = TypeParam;
  const std::vector<T> special = specials<T>();
  const int s = static_cast<int>(special.size());
  Buffers<T> in(3);
  for (int a = 0; a < s; ++a)
    for (int b = 0; b < s; ++b)
      for (int c = 0; c < s; ++c) {
        in[0].push_back(special[a]);
        in[1].push_back(special[b]);
        in[2].push_back(special[c]);
      }
  const int count = s * s * s;
  for (const int n : {2, 3}) {
    const Buffers<T> some(in.begin(), in.begin() + n);
    for (const Kind kind : kKinds) {
      const std::vector<T> want = expected(kind, some);
      for (const ReduceIsa* isa : isas()) {
        SCOPED_TRACE(fmt::format("{} {} n={}", isa->name, name(ReduceOp{kind}), n));
        std::vector<T> out(count);
        std::byte* const to[] = {bytes(out.data())};
        this->kernel(*isa, kind)(pointers(some).data(), n, to, 1, count);
        ASSERT_TRUE(same_bits(out.data(), want, some));
      }
    }
  }
}

// Every 16-bit pattern alone: widening and rounding give the value back, NaNs become the one.
template <class T>
void every_pattern_survives() {
  Buffers<T> in(1);
  for (int b = 0; b < 65536; ++b) in[0].push_back(T::from_bits(static_cast<std::uint16_t>(b)));
  for (const ReduceIsa* isa : isas())
    for (const Kind kind : kKinds) {
      SCOPED_TRACE(fmt::format("{} {}", isa->name, name(ReduceOp{kind})));
      std::vector<T> out(65536);
      std::byte* const to[] = {bytes(out.data())};
      isa->kernel[static_cast<int>(dtype_of<T>)][static_cast<int>(kind)](pointers(in).data(), 1, to, 1,
                                                                         65536);
      for (int b = 0; b < 65536; ++b) {
        const T want = std::isnan(static_cast<float>(in[0][b])) ? one_quiet_nan<T>() : in[0][b];
        ASSERT_EQ(out[b].bits, want.bits) << b;
      }
    }
}
TEST(ReduceHalves, every_f16_pattern_survives) { every_pattern_survives<f16>(); }
TEST(ReduceHalves, every_bf16_pattern_survives) { every_pattern_survives<bf16>(); }

// 300 ranks: the sum of an i8 wraps many times, and the number of ranks does not fit in one.
TEST(ReduceMany, hundreds_of_ranks) {
  std::mt19937_64 random(7);
  for (const int n : {64, 65, 127, 300}) {
    const auto f = ranks_of_inputs<bf16>(n, 33, random);
    const auto i = ranks_of_inputs<std::int8_t>(n, 33, random);
    for (const Kind kind : kKinds) {
      std::vector<bf16> out_f(33);
      std::vector<std::int8_t> out_i(33);
      std::byte* const to_f[] = {bytes(out_f.data())};
      std::byte* const to_i[] = {bytes(out_i.data())};
      reduce(DType::bf16, ReduceOp{kind}, pointers(f), to_f, 33);
      reduce(DType::i8, ReduceOp{kind}, pointers(i), to_i, 33);
      ASSERT_TRUE(same_bits(out_f.data(), expected(kind, f), f)) << n;
      ASSERT_TRUE(same_bits(out_i.data(), expected(kind, i), i)) << n;
    }
  }
}

TEST(ReduceOrder, is_a_tree_split_at_the_largest_power_of_two) {
  // In f32, 2^24 swallows a 1 that comes alone but not a 2.
  const float big = 0x1p24f;
  const auto sum = [](std::vector<float> x) {
    std::vector<const std::byte*> in;
    for (const float& v : x) in.push_back(bytes(&v));
    float out = 0;
    std::byte* const to[] = {bytes(&out)};
    reduce(DType::f32, ReduceOp::sum, in, to, 1);
    return out;
  };
  EXPECT_EQ(sum({big, 1, 1}), big);                  // (0+1)+2
  EXPECT_EQ(sum({1, 1, big}), big + 2);              // (0+1)+2
  EXPECT_EQ(sum({big, 0, 1, 1}), big + 2);           // (0+1)+(2+3)
  EXPECT_EQ(sum({0, big, 1, 0, 1}), big);            // ((0+1)+(2+3))+4
  EXPECT_EQ(sum({0, 0, 0, big, 1, 1}), big + 2);     // ((0+1)+(2+3))+(4+5)
  EXPECT_EQ(sum({big, 0, 0, 0, 0, 1, 1}), big + 2);  // ((0+1)+(2+3))+((4+5)+6)
}

TEST(ReduceTable, knows_all_but_bool) {
  for (int t = 0; t < kDTypeCount; ++t)
    for (const Kind kind : kKinds) {
      const bool want = t < 12;
      EXPECT_EQ(can_reduce(static_cast<DType>(t), ReduceOp{kind}), want);
      if (t < 13) {
        for (const ReduceIsa* isa : isas()) {
          EXPECT_EQ(isa->kernel[t][static_cast<int>(kind)] != nullptr, want);
        }
      }
    }
}

TEST(CopyBytes, copies_all_and_nothing_else) {
  std::mt19937_64 random(3);
  for (const int size : {0, 1, 63, 64, 65, 4096, 65535, 65536, 200003})
    for (const int shift : {0, 1, 63})
      for (const bool stream : {false, true}) {
        std::vector<std::uint8_t> from(size + 1), around(shift + size + 7), to;
        for (auto& x : from) x = static_cast<std::uint8_t>(random());
        for (auto& x : around) x = static_cast<std::uint8_t>(random());
        to = around;
        copy_bytes(bytes(to.data() + shift), bytes(from.data() + 1), size, stream);
        std::vector<std::uint8_t> want = around;
        std::copy(from.begin() + 1, from.end(), want.begin() + shift);
        EXPECT_EQ(to, want) << size << " " << shift << " " << stream;
      }
}

}  // namespace
}  // namespace weft
