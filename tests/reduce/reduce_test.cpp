// Element-wise reduction against a reference written the slow way, on every instruction set this machine has.
#include "reduce/reduce.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <array>
#include <cmath>
#include <complex>
#include <cstdlib>
#include <cstring>
#include <limits>
#include <random>
#include <vector>

#include "reduce/reduce_isa.hpp"
#include "support/averages.hpp"
#include "support/sanitizers.hpp"
#include "support/values.hpp"

namespace weft::reduce_test {
namespace {

using Kind = ReduceOp::Kind;
// Numbers of inputs that make odd and even trees; counts one element beyond vectors of every length.
const std::vector<int> kRanks =
    test::does_everything() ? std::vector{1, 2, 3, 4, 5, 6, 7, 8, 9, 17} : std::vector{1, 2, 3, 5, 8};
const std::vector<int> kCounts = test::does_everything() ? std::vector{0, 1, 2, 3, 7, 31, 64, 1000, 4097}
                                                         : std::vector{0, 1, 3, 31, 65, 257};

// A byte that is 0 or 1; a vector of bool is none of bools.
enum class Bool : std::uint8_t {};

template <class T>
inline constexpr DType kDType = dtype_of<T>;
template <>
inline constexpr DType kDType<Bool> = DType::boolean;
template <class T>
inline constexpr bool kIsHalf = std::is_same_v<T, f16> || std::is_same_v<T, bf16>;
template <class T>
inline constexpr bool kIsComplex = false;
template <class T>
inline constexpr bool kIsComplex<std::complex<T>> = true;

// The reductions that each dtype has.
bool defined(DType dtype, Kind kind) {
  switch (dtype) {
    case DType::f8e4m3:
    case DType::f8e5m2: return false;
    case DType::c64:
    case DType::c128:
      return kind == Kind::sum || kind == Kind::avg || kind == Kind::prod || kind == Kind::user;
    case DType::f64:
    case DType::f32:
    case DType::f16:
    case DType::bf16: return kind <= Kind::premul_sum || kind == Kind::user;
    case DType::boolean:
      return kind != Kind::sum && kind != Kind::avg && kind != Kind::prod && kind != Kind::premul_sum;
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64: break;
  }
  return true;
}
std::vector<Kind> kinds_of(DType dtype) {
  std::vector<Kind> to;
  for (int k = 0; k < kReduceKinds; ++k)
    if (defined(dtype, static_cast<Kind>(k))) to.push_back(static_cast<Kind>(k));
  return to;
}

// premul_sum's factor, one that rounds in f32.
template <class T>
inline constexpr double kScale = std::is_integral_v<T> ? -3 : 0.1;

// ---- The reference: one element at a time, the tree spelled out.

template <class T>
struct Accumulator {
  using type = std::conditional_t<kIsHalf<T>, float, T>;
};
template <>
struct Accumulator<Bool> {
  using type = std::uint8_t;
};
template <class T>
using AccumulatorOf = typename Accumulator<T>::type;

template <class A>
A combine_integers(Kind kind, A a, A b) {
  const auto x = static_cast<std::uint64_t>(a), y = static_cast<std::uint64_t>(b);
  switch (kind) {
    case Kind::sum:
    case Kind::premul_sum: return static_cast<A>(x + y);  // wraps
    case Kind::prod: return static_cast<A>(x * y);        // so does this
    case Kind::min: return std::min(a, b);
    case Kind::max: return std::max(a, b);
    case Kind::bit_and: return static_cast<A>(x & y);
    case Kind::bit_or: return static_cast<A>(x | y);
    case Kind::bit_xor: return static_cast<A>(x ^ y);
    case Kind::logical_and: return static_cast<A>(a != 0 && b != 0);
    case Kind::logical_or: return static_cast<A>(a != 0 || b != 0);
    case Kind::logical_xor: return static_cast<A>((a != 0) != (b != 0));
    case Kind::avg:
    case Kind::user: break;
  }
  std::abort();
}

template <class A>
A combine(Kind kind, A a, A b) {
  if constexpr (std::is_integral_v<A>) {
    return combine_integers(kind, a, b);
  } else if constexpr (kIsComplex<A>) {
    if (kind != Kind::prod) return {a.real() + b.real(), a.imag() + b.imag()};
    return {a.real() * b.real() - a.imag() * b.imag(), a.real() * b.imag() + a.imag() * b.real()};
  } else {
    if (kind == Kind::prod) return a * b;
    if (kind != Kind::min && kind != Kind::max) return a + b;
    if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<A>::quiet_NaN();
    if (a == 0 && b == 0) {
      const bool negative =
          kind == Kind::min ? std::signbit(a) || std::signbit(b) : std::signbit(a) && std::signbit(b);
      return negative ? A(-0.0) : A(0.0);
    }
    return kind == Kind::min ? std::min(a, b) : std::max(a, b);
  }
}

template <class A, class F>
A tree(const F& f, const std::vector<A>& values, int first, int n) {
  if (n == 1) return values[first];
  int half = 1;
  while (half * 2 < n) half *= 2;
  return f(tree(f, values, first, half), tree(f, values, first + half, n - half));
}

template <class T>
T one_quiet_nan() {
  if constexpr (std::is_same_v<T, f16>) return f16::from_bits(0x7e00);
  if constexpr (std::is_same_v<T, bf16>) return bf16::from_bits(0x7fc0);
  if constexpr (std::is_same_v<T, float>) return std::bit_cast<float>(0x7fc00000u);
  if constexpr (std::is_same_v<T, double>) return std::bit_cast<double>(std::uint64_t{0x7ff8000000000000u});
  return T{};
}

// Rounded to T, with every NaN replaced by the one quiet NaN.
template <class T, class A>
T finished(A total) {
  if constexpr (kIsComplex<T>) {
    using Part = typename T::value_type;
    return {finished<Part>(total.real()), finished<Part>(total.imag())};
  } else {
    if constexpr (std::is_floating_point_v<A>) {
      if (std::isnan(total)) return one_quiet_nan<T>();
    }
    return static_cast<T>(total);
  }
}

// Averages: integers in 128 bits, f32 in f64, the others as they are summed. If that sum is not finite, it is
// the sum of numbers smaller by a power of two, and at most the largest number.
template <class T>
T average(const std::vector<T>& in) {
  const int n = static_cast<int>(in.size());
  if constexpr (std::is_integral_v<T>) {
    test::Wide total = 0;
    for (const T x : in) total += x;
    return static_cast<T>(total / n);
  } else if constexpr (kIsComplex<T>) {
    std::vector<typename T::value_type> re, im;
    for (const T& z : in) re.push_back(z.real()), im.push_back(z.imag());
    return {average(re), average(im)};
  } else {
    using A = std::conditional_t<kIsHalf<T>, float, double>;
    std::vector<A> x;
    for (const T y : in) x.push_back(static_cast<A>(y));
    const auto sum = [&] { return tree([](A a, A b) { return a + b; }, x, 0, n); };
    if (const A total = sum(); std::isfinite(total)) return finished<T>(total / static_cast<A>(n));
    A smaller = 1;
    while (smaller * static_cast<A>(n) > 1) smaller /= 2;
    for (A& y : x) y *= smaller;
    const A total = sum(), most = std::numeric_limits<A>::max(), y = total / (smaller * static_cast<A>(n));
    return finished<T>(std::isfinite(total) ? std::clamp(y, -most, most) : y);
  }
}

template <class T>
T reference(Kind kind, const std::vector<std::vector<T>>& in, int i, double scale) {
  using A = AccumulatorOf<T>;
  if constexpr (!std::is_same_v<T, Bool>) {
    if (kind == Kind::avg) {
      std::vector<T> numbers;
      for (const auto& x : in) numbers.push_back(x[i]);
      return average(numbers);
    }
  }
  const int n = static_cast<int>(in.size());
  std::vector<A> values;
  for (const auto& x : in) {
    auto a = static_cast<A>(x[i]);
    if constexpr (std::is_integral_v<A>) {
      if (kind == Kind::premul_sum)
        a = combine(Kind::prod, a, static_cast<A>(static_cast<std::int64_t>(scale)));
      if (kind >= Kind::logical_and) a = a != 0;
    } else if constexpr (std::is_floating_point_v<A>) {
      if (kind == Kind::premul_sum) a = a * static_cast<A>(scale);
    }
    values.push_back(a);
  }
  return finished<T>(tree([kind](A a, A b) { return combine(kind, a, b); }, values, 0, n));
}

// ---- Inputs: half of the elements random bits (any exponent, NaNs, infinities), a quarter numbers of like
// size, so that sums round, and a quarter from a list of what usually goes wrong.

template <class T>
std::vector<T> specials() {
  if constexpr (kIsComplex<T>) {
    using Part = typename T::value_type;
    using L = std::numeric_limits<Part>;
    std::vector<T> to;
    const Part parts[] = {0, Part(-0.0), 1, L::infinity(), L::quiet_NaN(), L::max()};
    for (const Part re : parts)
      for (const Part im : parts) to.push_back({re, im});
    return to;
  } else if constexpr (std::is_same_v<T, Bool>) {
    return {Bool{0}, Bool{1}};
  } else if constexpr (std::is_integral_v<T>) {
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
  std::vector<T> to(count);
  if constexpr (kIsComplex<T>) {
    const auto parts = inputs<typename T::value_type>(2 * count, random);
    for (int i = 0; i < count; ++i) to[i] = {parts[2 * i], parts[2 * i + 1]};
  } else {
    const std::vector<T> special = specials<T>();
    for (T& x : to) {
      const std::uint64_t r = random();
      if constexpr (std::is_same_v<T, Bool>) {
        x = Bool{r % 8 != 0};
      } else if (r % 4 < 2) {
        const std::uint64_t bits = random();
        std::memcpy(static_cast<void*>(&x), &bits, sizeof x);
      } else if (r % 4 == 2) {
        x = static_cast<T>(
            static_cast<AccumulatorOf<T>>(static_cast<float>(static_cast<int>(r >> 40) % 200) / 3.0f));
      } else {
        x = special[(r >> 8) % special.size()];
      }
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
std::vector<T> expected(Kind kind, const Buffers<T>& in, double scale = kScale<T>) {
  std::vector<T> to(in[0].size());
  for (int i = 0; i < static_cast<int>(to.size()); ++i) to[i] = reference(kind, in, i, scale);
  return to;
}

template <class T>
std::string hex(T x) {
  if constexpr (kIsComplex<T>) {
    return fmt::format("({}, {})", hex(x.real()), hex(x.imag()));
  } else {
    std::uint64_t bits = 0;
    std::memcpy(&bits, &x, sizeof x);
    return fmt::format("{:#x}", bits);
  }
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
  std::array<const ReduceIsa*, kReduceIsas> all{};
  const int n = runnable_reduce_isas(all.data());
  return {all.begin(), all.begin() + n};
}

// Null where the baseline's serves.
ReduceKernel kernel_of(const ReduceIsa& isa, DType dtype, Kind kind) {
  return isa.kernel[static_cast<int>(dtype)][static_cast<int>(kind)];
}
std::vector<const ReduceIsa*> isas_of(DType dtype, Kind kind) {
  std::vector<const ReduceIsa*> to = isas();
  std::erase_if(to, [&](const ReduceIsa* isa) { return kernel_of(*isa, dtype, kind) == nullptr; });
  return to;
}

template <class T>
class Reduce : public testing::Test {
 protected:
  std::mt19937_64 random_{20260601};
};

using Types = testing::Types<double, float, f16, bf16, std::int8_t, std::int16_t, std::int32_t, std::int64_t,
                             std::uint8_t, std::uint16_t, std::uint32_t, std::uint64_t, Bool,
                             std::complex<float>, std::complex<double>>;
class TypeNames {
 public:
  template <class T>
  static std::string GetName(int) {
    return std::string(name(kDType<T>));
  }
};
TYPED_TEST_SUITE(Reduce, Types, TypeNames);

TYPED_TEST(Reduce, every_instruction_set_gives_the_bits_of_the_reference) {
  using T = TypeParam;
  for (const int n : kRanks)
    for (const int count : kCounts) {
      const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
      for (const Kind kind : kinds_of(kDType<T>)) {
        const std::vector<T> want = expected(kind, in);
        for (const ReduceIsa* isa : isas_of(kDType<T>, kind))
          for (const int outs : {1, 2, 3}) {
            SCOPED_TRACE(fmt::format("{} {} n={} outs={}", isa->name, name(ReduceOp{kind}), n, outs));
            Buffers<T> out(outs, std::vector<T>(count));
            std::vector<std::byte*> to;
            for (auto& x : out) to.push_back(bytes(x.data()));
            kernel_of(*isa, kDType<T>, kind)(pointers(in).data(), n, to.data(), outs, count, kScale<T>);
            for (const auto& x : out) ASSERT_TRUE(same_bits(x.data(), want, in));
          }
      }
    }
}

TYPED_TEST(Reduce, chosen_kernel_and_streaming_give_the_same_bits) {
  using T = TypeParam;
  const int count = 80000 / static_cast<int>(sizeof(T)) + 5;
  const std::vector<int> ranks = test::does_everything() ? std::vector{1, 2, 3, 9} : std::vector{1, 3};
  const std::vector<int> shifts = test::does_everything() ? std::vector{0, 1, 3} : std::vector{0, 3};
  for (const int n : ranks) {
    const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
    for (const Kind kind : kinds_of(kDType<T>)) {
      const std::vector<T> want = expected(kind, in);
      for (const bool stream : {false, true})
        for (const int shift : shifts) {
          SCOPED_TRACE(fmt::format("{} n={} stream={} shift={}", name(ReduceOp{kind}), n, stream, shift));
          std::vector<T> a(count + shift), b(count);
          std::byte* const out[] = {bytes(a.data() + shift), bytes(b.data())};
          reduce(kDType<T>, ReduceOp{kind, kScale<T>}, pointers(in), out, count, stream);
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
      // One kind that has separate loops if the dtype has that kind, and one kind that never has.
      const Kind kind = count == 777 || kDType<T> == DType::boolean ? kinds_of(kDType<T>).back() : Kind::sum;
      const std::vector<T> want = expected(kind, in);
      for (const bool stream : {false, true}) {
        for (int j = 0; j < n; ++j) {
          SCOPED_TRACE(fmt::format("n={} count={} stream={} out==in[{}]", n, count, stream, j));
          Buffers<T> copy = in;
          std::byte* const out[] = {bytes(copy[j].data())};
          reduce(kDType<T>, ReduceOp{kind, kScale<T>}, pointers(copy), out, count, stream);
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
        reduce(kDType<T>, ReduceOp{kind, kScale<T>}, pointers(copy), out, count, stream);
        for (const auto& x : copy) ASSERT_TRUE(same_bits(x.data(), want, in));
      }
    }
}

TYPED_TEST(Reduce, pointers_need_only_the_alignment_of_the_element_and_neighbours_stay) {
  using T = TypeParam;
  constexpr int kGuard = 3;
  const Kind kind = kIsComplex<T> ? Kind::sum : Kind::max;
  for (const ReduceIsa* isa : isas_of(kDType<T>, kind))
    for (int shift = 1; shift <= 3; ++shift)
      for (const int count : {1, 5, 130}) {
        SCOPED_TRACE(fmt::format("{} shift={} count={}", isa->name, shift, count));
        Buffers<T> in = ranks_of_inputs<T>(2, count, this->random_);
        const std::vector<T> want = expected(kind, in);
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
        kernel_of(*isa, kDType<T>, kind)(from.data(), 2, to, 1, count, 1);
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
    for (const Kind kind : kinds_of(kDType<T>)) {
      const std::vector<T> want = expected(kind, some);
      for (const ReduceIsa* isa : isas_of(kDType<T>, kind)) {
        SCOPED_TRACE(fmt::format("{} {} n={}", isa->name, name(ReduceOp{kind}), n));
        std::vector<T> out(count);
        std::byte* const to[] = {bytes(out.data())};
        kernel_of(*isa, kDType<T>, kind)(pointers(some).data(), n, to, 1, count, kScale<T>);
        ASSERT_TRUE(same_bits(out.data(), want, some));
      }
    }
  }
}

// Averages have other loops for two inputs, for three and four, and for more; each has its remainders.
TYPED_TEST(Reduce, averages_of_any_length_from_any_start) {
  using T = TypeParam;
  if constexpr (!std::is_same_v<T, Bool>) {
    constexpr int kGuard = 3;
    std::vector<int> counts = {1027};
    for (int count = 0; count <= 70; count += test::does_everything() ? 1 : 23) counts.push_back(count);
    for (int n = 2; n <= 9; ++n)
      for (const int count : counts) {
        const Buffers<T> in = ranks_of_inputs<T>(n, count, this->random_);
        const std::vector<T> want = expected(Kind::avg, in);
        Buffers<T> shifted(static_cast<std::size_t>(n));
        std::vector<const std::byte*> from;
        for (int k = 0; k < n; ++k) {
          const int shift = (k + count) % 5;
          shifted[k].resize(static_cast<std::size_t>(shift));
          shifted[k].insert(shifted[k].end(), in[k].begin(), in[k].end());
          from.push_back(bytes(shifted[k].data() + shift));
        }
        const int shift = count % 4;
        const std::vector<T> around = inputs<T>(shift + count + kGuard, this->random_);
        for (const ReduceIsa* isa : isas_of(kDType<T>, Kind::avg)) {
          SCOPED_TRACE(fmt::format("{} n={} count={}", isa->name, n, count));
          std::vector<T> out = around;
          std::byte* const to[] = {bytes(out.data() + shift)};
          kernel_of(*isa, kDType<T>, Kind::avg)(from.data(), n, to, 1, count, 1);
          ASSERT_TRUE(same_bits(out.data() + shift, want, in));
          ASSERT_EQ(std::memcmp(out.data(), around.data(), shift * sizeof(T)), 0);
          ASSERT_EQ(
              std::memcmp(out.data() + shift + count, around.data() + shift + count, kGuard * sizeof(T)), 0);
        }
      }
  }
}

// Every 16-bit pattern alone: widening and rounding give the value back, NaNs become the one.
template <class T>
void every_pattern_survives() {
  Buffers<T> in(1);
  for (int b = 0; b < 65536; ++b) in[0].push_back(T::from_bits(static_cast<std::uint16_t>(b)));
  for (const Kind kind : kinds_of(dtype_of<T>))
    for (const ReduceIsa* isa : isas_of(dtype_of<T>, kind)) {
      SCOPED_TRACE(fmt::format("{} {}", isa->name, name(ReduceOp{kind})));
      std::vector<T> out(65536);
      std::byte* const to[] = {bytes(out.data())};
      kernel_of(*isa, dtype_of<T>, kind)(pointers(in).data(), 1, to, 1, 65536, 1);
      for (int b = 0; b < 65536; ++b) {
        const T want = std::isnan(static_cast<float>(in[0][b])) ? one_quiet_nan<T>() : in[0][b];
        ASSERT_EQ(out[b].bits, want.bits) << b;
      }
    }
}
TEST(ReduceHalves, every_f16_pattern_survives) { every_pattern_survives<f16>(); }
TEST(ReduceHalves, every_bf16_pattern_survives) { every_pattern_survives<bf16>(); }

// Averages that neither wrap nor are infinite, though the sum wraps or is infinite. They are compared with an
// oracle that uses no rule of ours.
TEST(ReduceAverages, of_numbers_whose_sum_does_not_fit) {
  constexpr int kCount = 203;
  for (const DType dtype : test::averaged_dtypes())
    for (const int n : {1, 2, 3, 4, 5, 7, 8, 64, 257, 300}) {
      const auto bytes = static_cast<std::size_t>(kCount * size_bytes(dtype));
      std::vector<std::vector<std::byte>> room(static_cast<std::size_t>(n), std::vector<std::byte>(bytes));
      std::vector<const std::byte*> in;
      for (int r = 0; r < n; ++r) {
        for (int i = 0; i < kCount; ++i)
          test::store_extreme(room[static_cast<std::size_t>(r)].data(), dtype, r, i);
        in.push_back(room[static_cast<std::size_t>(r)].data());
      }
      for (const ReduceIsa* isa : isas_of(dtype, Kind::avg)) {
        std::vector<std::byte> out(bytes);
        std::byte* const to[] = {out.data()};
        kernel_of(*isa, dtype, Kind::avg)(in.data(), n, to, 1, kCount, 1);
        EXPECT_EQ(test::wrong_average(dtype, in, out.data(), kCount), "")
            << isa->name << " " << name(dtype) << " n=" << n;
      }
    }
}

// Totals that the number of ranks divides, and those one above and one below. A quotient that is off by its
// last digit shows there.
TEST(ReduceAverages, of_integers_whose_total_is_near_a_multiple) {
  std::mt19937_64 random(17);
  const auto check = [&]<class T>(T) {
    constexpr int kCount = 600;
    for (const int n : {2, 3, 4, 5, 6, 7, 8, 9, 16, 63, 1000, 1023, 1024}) {
      auto in = ranks_of_inputs<T>(n, kCount, random);
      for (int i = 0; i < kCount; ++i) {
        test::Wide total = 0;
        for (int k = 0; k + 1 < n; ++k) {
          if (i % 3 == 0) in[k][i] = static_cast<T>(random());
          total += in[k][i];
        }
        // The number that the last one must take away.
        const auto off = static_cast<int>((total % n + n) % n) + i % 3 - 1;
        T& last = in[n - 1][i];
        last = static_cast<T>(
            (i % 2 == 0 ? std::numeric_limits<T>::max() - n : std::numeric_limits<T>::min() + n) / n * n -
            off);
      }
      const auto want = expected(Kind::avg, in);
      for (const ReduceIsa* isa : isas_of(dtype_of<T>, Kind::avg)) {
        std::vector<T> out(kCount);
        std::byte* const to[] = {bytes(out.data())};
        kernel_of(*isa, dtype_of<T>, Kind::avg)(pointers(in).data(), n, to, 1, kCount, 1);
        ASSERT_TRUE(same_bits(out.data(), want, in)) << isa->name << " " << name(dtype_of<T>) << " n=" << n;
      }
    }
  };
  check(std::int64_t{});
  check(std::uint64_t{});
  check(std::int32_t{});
  check(std::uint32_t{});
}

// An element is summed again if its own sum is infinite, and not if a neighbour's is. Tiny numbers keep their
// bits.
TEST(ReduceAverages, tiny_numbers_beside_large_ones_keep_their_bits) {
  const double tiny = std::numeric_limits<double>::denorm_min(), most = std::numeric_limits<double>::max();
  for (const int n : {2, 3, 4, 5, 9}) {
    Buffers<double> in(static_cast<std::size_t>(n));
    for (auto& x : in)
      for (int i = 0; i < 67; ++i) x.push_back(i % 3 == 0 ? most : (i % 3) * tiny);
    for (const ReduceIsa* isa : isas_of(DType::f64, Kind::avg)) {
      std::vector<double> out(67);
      std::byte* const to[] = {bytes(out.data())};
      kernel_of(*isa, DType::f64, Kind::avg)(pointers(in).data(), n, to, 1, 67, 1);
      for (int i = 0; i < 67; ++i) {
        if (i % 3 == 0)
          ASSERT_TRUE(out[i] <= most && out[i] > most * (1 - 1e-15)) << isa->name << " n=" << n << " " << i;
        else
          ASSERT_EQ(out[i], in[0][i]) << isa->name << " n=" << n << " " << i;
      }
    }
  }
}

// The largest possible number of ranks, most of which have the same numbers.
TEST(ReduceMany, as_many_ranks_as_a_group_has) {
  std::mt19937_64 random(19);
  const auto check = [&]<class T>(T) {
    const auto some = ranks_of_inputs<T>(5, 17, random);
    for (const int n : {65535, 65536}) {
      Buffers<T> in;
      for (int k = 0; k < n; ++k) in.push_back(some[static_cast<std::size_t>(k % 7 % 5)]);
      const auto want = expected(Kind::avg, in);
      for (const ReduceIsa* isa : isas_of(dtype_of<T>, Kind::avg)) {
        std::vector<T> out(17);
        std::byte* const to[] = {bytes(out.data())};
        kernel_of(*isa, dtype_of<T>, Kind::avg)(pointers(in).data(), n, to, 1, 17, 1);
        for (std::size_t i = 0; i < out.size(); ++i) ASSERT_EQ(out[i], want[i]) << isa->name << " n=" << n;
      }
    }
  };
  check(std::int8_t{});
  check(std::int32_t{});
  check(std::int64_t{});
  check(std::uint64_t{});
}

// 300 ranks: the sum of an i8 wraps many times, and the number of ranks does not fit in one.
TEST(ReduceMany, hundreds_of_ranks) {
  std::mt19937_64 random(7);
  const auto check = [&]<class T>(T, int n) {
    const auto in = ranks_of_inputs<T>(n, 33, random);
    for (const Kind kind : kinds_of(dtype_of<T>)) {
      std::vector<T> out(33);
      std::byte* const to[] = {bytes(out.data())};
      reduce(dtype_of<T>, ReduceOp{kind, kScale<T>}, pointers(in), to, 33);
      ASSERT_TRUE(same_bits(out.data(), expected(kind, in), in)) << n << name(kind);
    }
  };
  for (const int n : {64, 65, 127, 300}) {
    check(bf16{}, n);
    check(std::int8_t{}, n);
    check(std::int64_t{}, n);
    check(std::uint64_t{}, n);
    check(float{}, n);
    check(std::complex<float>{}, n);
  }
}

TEST(ReduceOrder, is_a_tree_split_at_the_largest_power_of_two) {
  // In f32, 2^24 plus 1 is 2^24, but 2^24 plus 2 is not.
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

// A sum of bf16s that was rounded at each step would stay at 256: the next one is 258.
TEST(ReduceHalves, bf16_sums_accumulate_in_f32) {
  for (const int ones : {2, 3, 7, 64, 255}) {
    Buffers<bf16> in = {{bf16(256.0f)}};
    for (int k = 0; k < ones; ++k) in.push_back({bf16(1.0f)});
    const int n = ones + 1;
    for (const ReduceIsa* isa : isas()) {
      const auto got = [&](Kind kind, double scale) {
        bf16 out;
        std::byte* const to[] = {bytes(&out)};
        kernel_of(*isa, DType::bf16, kind)(pointers(in).data(), n, to, 1, 1, scale);
        return static_cast<float>(out);
      };
      const auto exact = static_cast<float>(256 + ones);
      SCOPED_TRACE(fmt::format("{} n={}", isa->name, n));
      EXPECT_EQ(got(Kind::sum, 1), static_cast<float>(bf16(exact)));
      EXPECT_EQ(got(Kind::avg, 1), static_cast<float>(bf16(exact / static_cast<float>(n))));
      EXPECT_EQ(got(Kind::premul_sum, 0.25), static_cast<float>(bf16(exact / 4)));
    }
  }
}

// Factors that round, overflow or vanish in the accumulator; a sign of zero counts.
TEST(ReduceScale, is_rounded_to_the_accumulator_once) {
  std::mt19937_64 random(11);
  const auto check = [&]<class T>(T, std::initializer_list<double> scales) {
    for (const double scale : scales)
      for (const int n : {1, 2, 3, 5}) {
        const auto in = ranks_of_inputs<T>(n, 1000, random);
        std::vector<T> out(1000);
        std::byte* const to[] = {bytes(out.data())};
        reduce(dtype_of<T>, ReduceOp::premul_sum(scale), pointers(in), to, 1000);
        ASSERT_TRUE(same_bits(out.data(), expected(Kind::premul_sum, in, scale), in))
            << name(dtype_of<T>) << " " << scale;
      }
  };
  const double nan = std::numeric_limits<double>::quiet_NaN();
  check(double{}, {1.0 / 3, -0.0, 1e308, 1e-320, nan});
  check(float{}, {1.0 / 3, -0.0, 1e300, 1e-45, nan});
  check(f16{}, {1.0 / 3, -0.0, 1e300});
  check(bf16{}, {1.0 / 3, -0.0, 1e-45});
  check(std::int8_t{}, {0, -1, 255, 0x1p53});
  check(std::uint32_t{}, {0, -1, 0x1p52 + 3});
  check(std::int64_t{}, {0, -1, 0x1p53 - 1, -0x1p53});
}

// c128 needs the alignment of its parts only: a block then ends between two cache lines.
TEST(ReduceComplex, streams_to_half_aligned_memory) {
  std::mt19937_64 random(13);
  const int count = 6000;
  const auto in = ranks_of_inputs<std::complex<double>>(2, count, random);
  for (const Kind kind : {Kind::sum, Kind::prod}) {
    std::vector<double> room(2 * count + 1), other(2 * count + 2);
    std::byte* const out[] = {bytes(room.data() + 1), bytes(other.data() + 2)};
    reduce(DType::c128, ReduceOp{kind}, pointers(in), out, count, true);
    std::vector<std::complex<double>> got(count);
    for (const std::byte* from : out) {
      std::memcpy(static_cast<void*>(got.data()), from, count * sizeof got[0]);
      ASSERT_TRUE(same_bits(got.data(), expected(kind, in), in));
    }
  }
}

// ---- A user's function

// A string as its hash and 31 to the power of its length: put together it is associative, not commutative.
struct Text {
  std::uint32_t hash = 0, power = 1;
  friend Text operator+(Text a, Text b) { return {a.hash * b.power + b.hash, a.power * b.power}; }
  friend bool operator==(const Text&, const Text&) = default;
};

template <class T, class F>
UserReduction user_of(const F& f) {
  return {"test", [f](const void* left, const void* right, void* out, std::int64_t count, DType dtype) {
            EXPECT_EQ(size_bytes(dtype), sizeof(T));
            for (std::int64_t i = 0; i < count; ++i)
              static_cast<T*>(out)[i] = f(static_cast<const T*>(left)[i], static_cast<const T*>(right)[i]);
          }};
}

constexpr int kUserCounts[] = {0, 1, 255, 256, 257, 5000};

TEST(ReduceUser, left_comes_from_lower_ranks) {
  const UserReduction concatenate = user_of<Text>([](Text a, Text b) { return a + b; });
  for (const int n : kRanks)
    for (const int count : kUserCounts) {
      Buffers<Text> in(n);
      std::vector<Text> want(count);
      for (int k = 0; k < n; ++k)
        for (int i = 0; i < count; ++i) {
          in[k].push_back({static_cast<std::uint32_t>(k * 17 + i), 31});
          want[i] = want[i] + in[k][i];
        }
      for (const bool stream : {false, true}) {
        SCOPED_TRACE(fmt::format("n={} count={}", n, count));
        Buffers<Text> out(3, std::vector<Text>(count));
        std::vector<std::byte*> to;
        for (auto& x : out) to.push_back(bytes(x.data()));
        reduce(DType::u64, ReduceOp::of(concatenate), pointers(in), to, count, stream);
        for (const auto& x : out) ASSERT_EQ(x, want);
        for (int j = 0; j < n; ++j) {  // in place
          Buffers<Text> copy = in;
          std::byte* const one[] = {bytes(copy[j].data())};
          reduce(DType::u64, ReduceOp::of(concatenate), pointers(copy), one, count, stream);
          ASSERT_EQ(copy[j], want);
          for (int k = 0; k < n; ++k)
            if (k != j) {
              ASSERT_EQ(copy[k], in[k]);
            }
        }
      }
    }
}

// A function that is not associative shows the tree; it is called on the stored type, here of every size.
template <class T>
void user_tree() {
  const auto f = [](T a, T b) {
    return static_cast<T>(static_cast<std::uint64_t>(a) * 5 + static_cast<std::uint64_t>(b) * 3 + 1);
  };
  const UserReduction user = user_of<T>(f);
  std::mt19937_64 random(17);
  for (const int n : kRanks) {
    const auto in = ranks_of_inputs<T>(n, 5000, random);
    std::vector<T> want(5000), out(5000);
    for (int i = 0; i < 5000; ++i) {
      std::vector<T> values;
      for (const auto& x : in) values.push_back(x[i]);
      want[i] = tree(f, values, 0, n);
    }
    std::byte* const to[] = {bytes(out.data())};
    reduce(dtype_of<T>, ReduceOp::of(user), pointers(in), to, 5000);
    ASSERT_TRUE(same_bits(out.data(), want, in)) << n;
  }
}
TEST(ReduceUser, combines_in_the_canonical_tree) {
  user_tree<std::uint8_t>();
  user_tree<std::int16_t>();
  user_tree<std::uint32_t>();
  user_tree<std::int64_t>();
}

// The expected values in tests of collectives agree with the kernels, for every dtype and kind.
TEST(ReduceValues, combined_is_what_reduce_gives) {
  for (int t = 0; t < kDTypeCount; ++t)
    for (int k = 0; k < kReduceKindCount; ++k)
      for (int n = 1; n <= 9; ++n) {
        const auto dtype = static_cast<DType>(t);
        const auto kind = static_cast<Kind>(k);
        if (!defined(dtype, kind)) continue;
        const ReduceOp op = test::reduction(kind);
        std::vector<std::vector<std::byte>> in(n, std::vector<std::byte>(16 * 300));
        std::vector<const std::byte*> from;
        for (int r = 0; r < n; ++r) {
          const TensorView v{in[r].data(), dtype, Device{}, {300}};
          for (int i = 0; i < 300; ++i) test::store(v, i, test::input(op, dtype, r, i));
          from.push_back(in[r].data());
        }
        std::byte* const to[] = {in[n - 1].data()};
        reduce(dtype, op, from, to, 300);
        const ConstTensorView got{in[n - 1].data(), dtype, Device{}, {300}};
        for (int i = 0; i < 300; ++i)
          ASSERT_EQ(test::load(got, i), test::combined(op, dtype, n, i))
              << name(kind) << " of " << name(dtype) << " n=" << n << " i=" << i;
      }
}

TEST(ReduceTable, knows_what_is_defined) {
  for (int t = 0; t < kDTypeCount; ++t)
    for (int k = 0; k < kReduceKindCount; ++k) {
      const auto dtype = static_cast<DType>(t);
      const auto kind = static_cast<Kind>(k);
      const bool want = defined(dtype, kind);
      SCOPED_TRACE(fmt::format("{} of {}", name(kind), name(dtype)));
      EXPECT_EQ(can_reduce(dtype, kind), want);
      if (kind == Kind::user) continue;
      EXPECT_EQ(kernel_of(kReduceBaseline, dtype, kind) != nullptr, want);
      for (const ReduceIsa* isa : isas()) {
        // The most frequent reductions are there for every instruction set that is not for one dtype alone.
        if (kernel_of(*isa, dtype, kind) != nullptr) {
          EXPECT_TRUE(want);
        } else if (std::string_view(isa->name) != "avx512_bf16" && kind <= Kind::max &&
                   dtype != DType::boolean) {
          EXPECT_FALSE(want);
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
}  // namespace weft::reduce_test
