#include "oracle.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cmath>
#include <complex>
#include <cstring>
#include <limits>
#include <type_traits>

namespace weft::check {
namespace {

using Kind = ReduceOp::Kind;

bool complex(DType t) { return t == DType::c64 || t == DType::c128; }

// ---- Numbers. How a dtype is stored, and the type in which its sums are computed.

// A binary floating-point format of 16 bits, by its definition: `kFraction` bits of fraction, exponents from
// `kLeast` on. Rounding is to nearest, ties to even.
template <int kFraction, int kBias>
struct Short {
  static constexpr int kExponents = 15 - kFraction;
  static constexpr std::uint16_t kInfinity = ((1 << kExponents) - 1) << kFraction;

  static float load(std::uint16_t bits) {
    const int exponent = (bits >> kFraction) & ((1 << kExponents) - 1),
              fraction = bits & ((1 << kFraction) - 1);
    const double sign = bits & 0x8000 ? -1 : 1;
    if (exponent == (1 << kExponents) - 1)
      return fraction ? std::numeric_limits<float>::quiet_NaN()
                      : static_cast<float>(sign * std::numeric_limits<double>::infinity());
    const double mantissa = exponent ? fraction + (1 << kFraction) : fraction;
    return static_cast<float>(sign * std::ldexp(mantissa, (exponent ? exponent : 1) - kBias - kFraction));
  }
  static std::uint16_t store(float x) {
    if (std::isnan(x)) return kInfinity | (1 << (kFraction - 1));
    const auto sign = static_cast<std::uint16_t>(std::signbit(x) ? 0x8000 : 0);
    const double magnitude = std::abs(static_cast<double>(x));
    if (magnitude == 0) return sign;
    int exponent = 0;
    if (std::isinf(magnitude)) return sign | kInfinity;
    std::frexp(magnitude, &exponent);                // magnitude = [0.5, 1) x 2^exponent
    int stored = std::max(exponent - 1 + kBias, 0);  // 0: below the normal numbers
    const int unit = (stored ? stored : 1) - kBias - kFraction;
    auto mantissa = static_cast<std::int64_t>(std::nearbyint(std::ldexp(magnitude, -unit)));
    if (mantissa >> kFraction >= 2) {
      mantissa >>= 1;
      ++stored;
    }
    if (stored == 0 && mantissa >> kFraction == 1) stored = 1;
    if (stored >= (1 << kExponents) - 1) return sign | kInfinity;
    return static_cast<std::uint16_t>(sign | stored << kFraction | (mantissa & ((1 << kFraction) - 1)));
  }
};
using Half = Short<10, 15>;
using Brain = Short<7, 127>;

template <class T>
T read(const std::byte* at) {
  T x;
  std::memcpy(static_cast<void*>(&x), at, sizeof x);
  return x;
}
template <class T>
void write(std::byte* at, T x) {
  std::memcpy(at, &x, sizeof x);
}

// Reals: `Sum` is the type of the accumulator, `Total` the accumulator's type for an average.
struct F64 {
  using Sum = double;
  using Total = double;
  static constexpr double kUnit = 0x1p-53;
  static double load(const std::byte* p) { return read<double>(p); }
  static void store(std::byte* p, double x) {
    write(p, std::isnan(x) ? std::bit_cast<double>(0x7ff8000000000000u) : x);
  }
};
struct F32 {
  using Sum = float;
  using Total = double;
  static constexpr double kUnit = 0x1p-24;
  static float load(const std::byte* p) { return read<float>(p); }
  static void store(std::byte* p, float x) {
    write(p, std::isnan(x) ? std::bit_cast<float>(0x7fc00000u) : x);
  }
};
struct F16 {
  using Sum = float;
  using Total = float;
  static constexpr double kUnit = 0x1p-11;
  static float load(const std::byte* p) { return Half::load(read<std::uint16_t>(p)); }
  static void store(std::byte* p, float x) { write(p, Half::store(x)); }
};
struct BF16 {
  using Sum = float;
  using Total = float;
  static constexpr double kUnit = 0x1p-8;
  static float load(const std::byte* p) { return Brain::load(read<std::uint16_t>(p)); }
  static void store(std::byte* p, float x) { write(p, Brain::store(x)); }
};

// The canonical tree over ranks [from, from + n), split at the largest power of two below n.
template <class T, class F>
T tree(const std::vector<T>& in, std::size_t from, std::size_t n, const F& combine) {
  if (n == 1) return in[from];
  std::size_t left = 1;
  while (left * 2 < n) left *= 2;
  return combine(tree(in, from, left, combine), tree(in, from + left, n - left, combine));
}

template <class T>
T least(T a, T b) {  // -0 before +0, a NaN wins
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  if (a == b) return std::signbit(a) ? a : b;
  return a < b ? a : b;
}
template <class T>
T greatest(T a, T b) {
  if (std::isnan(a) || std::isnan(b)) return std::numeric_limits<T>::quiet_NaN();
  if (a == b) return std::signbit(a) ? b : a;
  return a < b ? b : a;
}

// The sum, divided by the number of ranks. If the sum is not finite, uses the sum of numbers that are smaller
// by a power of two, which is finite if they are.
template <class Total>
Total average(std::vector<Total> x) {
  const auto sum = [&] { return tree(x, 0, x.size(), [](Total a, Total b) { return a + b; }); };
  const auto n = static_cast<Total>(x.size());
  if (const Total total = sum(); std::isfinite(total)) return total / n;
  const auto smaller = static_cast<Total>(1.0 / static_cast<double>(std::bit_ceil(x.size())));
  for (Total& y : x) y *= smaller;
  const Total total = sum(), y = total / (n * smaller), most = std::numeric_limits<Total>::max();
  return std::isfinite(total) ? std::clamp(y, -most, most) : y;
}

using Blocks = std::vector<std::vector<std::byte>>;  // of each rank

template <class Number>
void real(const Step& s, const Blocks& in, int n, bool exact, std::int64_t stride, std::int64_t numbers,
          Expected& out) {
  using T = typename Number::Sum;
  std::vector<T> x(static_cast<std::size_t>(n));
  const bool rounds = s.reduce == Kind::sum || s.reduce == Kind::avg || s.reduce == Kind::prod ||
                      s.reduce == Kind::premul_sum;
  if (!exact && rounds) out.slack.resize(static_cast<std::size_t>(numbers));
  for (std::int64_t i = 0; i < numbers; ++i) {
    double sizes = 0, product = 1;
    for (std::size_t r = 0; r < x.size(); ++r) {
      x[r] = Number::load(in[r].data() + i * stride);
      if (s.reduce == Kind::premul_sum) x[r] = x[r] * static_cast<T>(s.scale);
      sizes += std::abs(static_cast<double>(x[r]));
      product *= std::abs(static_cast<double>(x[r]));
    }
    const auto fold = [&](const auto& f) { return tree(x, 0, x.size(), f); };
    T y{};
    switch (s.reduce) {
      case Kind::sum:
      case Kind::premul_sum: y = fold([](T a, T b) { return a + b; }); break;
      case Kind::avg:
        y = static_cast<T>(average(std::vector<typename Number::Total>(x.begin(), x.end())));
        break;
      case Kind::prod: y = fold([](T a, T b) { return a * b; }); break;
      case Kind::min: y = fold([](T a, T b) { return least(a, b); }); break;
      case Kind::max: y = fold([](T a, T b) { return greatest(a, b); }); break;
      case Kind::bit_and:
      case Kind::bit_or:
      case Kind::bit_xor:
      case Kind::logical_and:
      case Kind::logical_or:
      case Kind::logical_xor:
      case Kind::user: break;
    }
    Number::store(out.bytes.data() + i * stride, y);
    if (!out.slack.empty()) {
      // Each of n roundings is off by at most a unit of the sum so far. This is doubled, since our own sum is
      // rounded, too.
      const double most = s.reduce == Kind::prod ? product : sizes;
      out.slack[static_cast<std::size_t>(i)] =
          2 * (n + 1) * Number::kUnit * most + std::numeric_limits<float>::denorm_min();
    }
  }
}

template <class T>
void complex_product(const Blocks& in, int n, bool exact, std::int64_t count, Expected& out) {
  using Z = std::pair<T, T>;
  std::vector<Z> x(static_cast<std::size_t>(n));
  if (!exact) out.slack.resize(static_cast<std::size_t>(2 * count));
  for (std::int64_t i = 0; i < count; ++i) {
    double size = 1;
    for (std::size_t r = 0; r < x.size(); ++r) {
      const std::byte* const p = in[r].data() + i * static_cast<std::int64_t>(2 * sizeof(T));
      x[r] = {read<T>(p), read<T>(p + sizeof(T))};
      size *= std::hypot(static_cast<double>(x[r].first), static_cast<double>(x[r].second));
    }
    const Z y = tree(x, 0, x.size(), [](const Z& a, const Z& b) {
      const T ac = a.first * b.first, bd = a.second * b.second, ad = a.first * b.second,
              bc = a.second * b.first;
      return Z{ac - bd, ad + bc};
    });
    std::byte* const p = out.bytes.data() + i * static_cast<std::int64_t>(2 * sizeof(T));
    write(p, y.first);
    write(p + sizeof(T), y.second);
    if (!exact) {
      const double slack = 8 * n * (sizeof(T) == 4 ? 0x1p-24 : 0x1p-53) * size;
      out.slack[static_cast<std::size_t>(2 * i)] = out.slack[static_cast<std::size_t>(2 * i + 1)] = slack;
    }
  }
}

__extension__ typedef __int128 Wide;

// Integers wrap, except in averages; the order does not matter.
template <class T>
void whole(const Step& s, const Blocks& in, int n, std::int64_t count, Expected& out) {
  using U = std::make_unsigned_t<T>;
  for (std::int64_t i = 0; i < count; ++i) {
    const auto of = [&](int r) {
      return read<T>(in[static_cast<std::size_t>(r)].data() + i * static_cast<std::int64_t>(sizeof(T)));
    };
    std::uint64_t sum = 0, product = 1, scaled = 0;
    Wide total = 0;
    U ones = static_cast<U>(~U{0}), any = 0, odd = 0;
    bool all_true = true, any_true = false, odd_true = false;
    T low = of(0), high = of(0);
    for (int r = 0; r < n; ++r) {
      const T x = of(r);
      const auto bits = static_cast<U>(x);
      sum += bits;
      total += x;
      product *= bits;
      scaled += bits * static_cast<std::uint64_t>(static_cast<std::int64_t>(s.scale));
      ones = static_cast<U>(ones & bits);
      any = static_cast<U>(any | bits);
      odd = static_cast<U>(odd ^ bits);
      all_true = all_true && x != 0;
      any_true = any_true || x != 0;
      odd_true = odd_true != (x != 0);
      low = x < low ? x : low;
      high = high < x ? x : high;
    }
    T y{};
    switch (s.reduce) {
      case Kind::sum: y = static_cast<T>(sum); break;
      case Kind::avg: y = static_cast<T>(total / n); break;
      case Kind::min: y = low; break;
      case Kind::max: y = high; break;
      case Kind::prod: y = static_cast<T>(product); break;
      case Kind::premul_sum: y = static_cast<T>(scaled); break;
      case Kind::bit_and: y = static_cast<T>(ones); break;
      case Kind::bit_or: y = static_cast<T>(any); break;
      case Kind::bit_xor: y = static_cast<T>(odd); break;
      case Kind::logical_and: y = static_cast<T>(all_true); break;
      case Kind::logical_or: y = static_cast<T>(any_true); break;
      case Kind::logical_xor: y = static_cast<T>(odd_true); break;
      case Kind::user: break;
    }
    write(out.bytes.data() + i * static_cast<std::int64_t>(sizeof(T)), y);
  }
}

// left after right: x -> a1 (a2 x + b2) + b1
std::uint8_t compose(std::uint8_t left, std::uint8_t right) {
  const unsigned a1 = left >> 4, b1 = left & 15u, a2 = right >> 4, b2 = right & 15u;
  return static_cast<std::uint8_t>(((a1 * a2) & 15u) << 4 | ((a1 * b2 + b1) & 15u));
}

// The combination of no ranks: rank 0's part in an exscan.
template <class Number>
void real_identity(Kind kind, std::int64_t stride, std::int64_t numbers, std::byte* to) {
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double y = kind == Kind::prod  ? 1
                   : kind == Kind::min ? kInfinity
                   : kind == Kind::max ? -kInfinity
                                       : 0;
  for (std::int64_t i = 0; i < numbers; ++i)
    Number::store(to + i * stride, static_cast<typename Number::Sum>(y));
}
template <class T>
void whole_identity(Kind kind, bool truths, std::int64_t count, std::byte* to) {
  const T least = truths ? T{0} : std::numeric_limits<T>::min(),
          most = truths ? T{1} : std::numeric_limits<T>::max(), ones = truths ? T{1} : static_cast<T>(~T{0});
  const T y = kind == Kind::prod || kind == Kind::logical_and ? T{1}
              : kind == Kind::min                             ? most
              : kind == Kind::max                             ? least
              : kind == Kind::bit_and                         ? ones
                                                              : T{0};
  for (std::int64_t i = 0; i < count; ++i) write(to + i * static_cast<std::int64_t>(sizeof(T)), y);
}
Expected identity(const Step& s, std::int64_t count) {
  Expected e;
  if (s.reduce == Kind::avg || s.reduce == Kind::user) return e;  // these dtypes have none
  e.bytes.resize(static_cast<std::size_t>(count * size_bytes(s.dtype)));
  std::byte* const to = e.bytes.data();
  const Kind k = s.reduce;
  // Complex numbers have sums, whose identity is 0, and products, whose identity is 1 + 0i.
  if (complex(s.dtype) && k != Kind::prod) return e;
  switch (s.dtype) {
    case DType::f64: real_identity<F64>(k, 8, count, to); break;
    case DType::f32: real_identity<F32>(k, 4, count, to); break;
    case DType::f16: real_identity<F16>(k, 2, count, to); break;
    case DType::bf16: real_identity<BF16>(k, 2, count, to); break;
    case DType::c64: real_identity<F32>(k, 8, count, to); break;
    case DType::c128: real_identity<F64>(k, 16, count, to); break;
    case DType::i8: whole_identity<std::int8_t>(k, false, count, to); break;
    case DType::i16: whole_identity<std::int16_t>(k, false, count, to); break;
    case DType::i32: whole_identity<std::int32_t>(k, false, count, to); break;
    case DType::i64: whole_identity<std::int64_t>(k, false, count, to); break;
    case DType::u8: whole_identity<std::uint8_t>(k, false, count, to); break;
    case DType::boolean: whole_identity<std::uint8_t>(k, true, count, to); break;
    case DType::u16: whole_identity<std::uint16_t>(k, false, count, to); break;
    case DType::u32: whole_identity<std::uint32_t>(k, false, count, to); break;
    case DType::u64: whole_identity<std::uint64_t>(k, false, count, to); break;
    case DType::f8e4m3:
    case DType::f8e5m2: break;  // never combined
  }
  return e;
}

Expected combined(const Step& s, int me, int ranks, bool exact) {
  const std::int64_t count = s.elements(0, me, ranks);
  const int n = s.combined_ranks(me, ranks);
  if (n == 0) return identity(s, count);
  Blocks in;
  for (int r = 0; r < n; ++r) in.push_back(input(s, r, me, ranks));
  Expected e;
  e.bytes.resize(in[0].size());
  exact = exact || s.order == Order::canonical;
  if (s.reduce == Kind::user) {
    for (std::size_t i = 0; i < e.bytes.size(); ++i) {
      std::uint8_t y = static_cast<std::uint8_t>(in[0][i]);
      for (std::size_t r = 1; r < in.size(); ++r) y = compose(y, static_cast<std::uint8_t>(in[r][i]));
      e.bytes[i] = std::byte{y};
    }
    return e;
  }
  switch (s.dtype) {
    case DType::f64: real<F64>(s, in, n, exact, 8, count, e); break;
    case DType::f32: real<F32>(s, in, n, exact, 4, count, e); break;
    case DType::f16: real<F16>(s, in, n, exact, 2, count, e); break;
    case DType::bf16: real<BF16>(s, in, n, exact, 2, count, e); break;
    case DType::c64:
      if (s.reduce == Kind::prod)
        complex_product<float>(in, n, exact, count, e);
      else
        real<F32>(s, in, n, exact, 4, 2 * count, e);
      break;
    case DType::c128:
      if (s.reduce == Kind::prod)
        complex_product<double>(in, n, exact, count, e);
      else
        real<F64>(s, in, n, exact, 8, 2 * count, e);
      break;
    case DType::i8: whole<std::int8_t>(s, in, n, count, e); break;
    case DType::i16: whole<std::int16_t>(s, in, n, count, e); break;
    case DType::i32: whole<std::int32_t>(s, in, n, count, e); break;
    case DType::i64: whole<std::int64_t>(s, in, n, count, e); break;
    case DType::u8:
    case DType::boolean: whole<std::uint8_t>(s, in, n, count, e); break;
    case DType::u16: whole<std::uint16_t>(s, in, n, count, e); break;
    case DType::u32: whole<std::uint32_t>(s, in, n, count, e); break;
    case DType::u64: whole<std::uint64_t>(s, in, n, count, e); break;
    case DType::f8e4m3:
    case DType::f8e5m2: break;  // never combined
  }
  return e;
}

// A real number whose sums must round: it has a random fraction, sign and, within some powers of two, size.
// For products it is close to 1. If nothing is rounded, it is sometimes a zero of either sign, an infinity or
// a NaN. For averages it is a number near `most`, the largest number, whose sum is infinite.
double any_real(std::uint64_t h, Kind kind, bool wide, double most) {
  const double fraction = static_cast<double>(h >> 12) * 0x1p-52;  // [0, 1)
  const double sign = h & 1 ? -1 : 1;
  if (kind == Kind::min || kind == Kind::max) {
    const std::uint64_t special = (h >> 1) % 64;
    if (special == 0) return 0.0;
    if (special == 1) return -0.0;
    if (special == 2) return std::numeric_limits<double>::infinity() * sign;
    if (special == 3) return std::numeric_limits<double>::quiet_NaN();
  }
  if (kind == Kind::avg && (h >> 1) % 16 == 0) return sign * most * (1 - fraction / 4);
  if (kind == Kind::prod) return sign * (0.5 + fraction * 1.5);
  return sign * std::ldexp(1 + fraction, static_cast<int>((h >> 1) % (wide ? 24 : 10)) - (wide ? 12 : 5));
}

double largest(DType dtype) {
  if (dtype == DType::f16) return 65504;
  if (dtype == DType::bf16) return 0x1.fep127;
  return dtype == DType::f64 || dtype == DType::c128 ? std::numeric_limits<double>::max()
                                                     : std::numeric_limits<float>::max();
}

double number_at(DType dtype, const std::byte* p) {
  switch (dtype) {
    case DType::f64:
    case DType::c128: return read<double>(p);
    case DType::f32:
    case DType::c64: return read<float>(p);
    case DType::f16: return Half::load(read<std::uint16_t>(p));
    case DType::bf16: return Brain::load(read<std::uint16_t>(p));
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2: break;
  }
  return 0;
}

std::string hex(const std::byte* p, int bytes) {
  std::string text = "0x";
  for (int i = bytes; i-- > 0;) text += fmt::format("{:02x}", static_cast<unsigned>(p[i]));
  return text;
}

}  // namespace

std::vector<std::byte> input(const Step& s, int from, int to, int n) {
  const auto size = static_cast<std::size_t>(size_bytes(s.dtype));
  const auto count = static_cast<std::size_t>(s.elements(from, to, n));
  std::vector<std::byte> bytes(count * size);
  const std::uint64_t seed =
      mix(s.salt, static_cast<std::uint64_t>(from) * 131 + (s.in_parted() ? to + 1 : 0));
  const bool real = s.reduces() && s.reduce != Kind::user && (is_floating(s.dtype) || complex(s.dtype));
  if (!real) {
    const bool truths = s.reduces() && (s.reduce == Kind::logical_and || s.reduce == Kind::logical_or ||
                                        s.reduce == Kind::logical_xor);
    for (std::size_t i = 0; i < bytes.size(); i += 8) {
      std::uint64_t h = mix(seed, i);
      if (s.dtype == DType::boolean) h &= 0x0101010101010101u;
      if (truths && h % 3 == 0) h = 0;
      std::memcpy(bytes.data() + i, &h, std::min<std::size_t>(8, bytes.size() - i));
    }
    return bytes;
  }
  const std::size_t part = complex(s.dtype) ? size / 2 : size;
  for (std::size_t i = 0; i < bytes.size(); i += part) {
    std::byte* const p = bytes.data() + i;
    const double x = any_real(mix(seed, i), s.reduce, s.dtype != DType::f16, largest(s.dtype));
    if (s.dtype == DType::f16) {
      F16::store(p, static_cast<float>(x));
    } else if (s.dtype == DType::bf16) {
      BF16::store(p, static_cast<float>(x));
    } else if (part == sizeof(float)) {
      F32::store(p, static_cast<float>(x));
    } else {
      F64::store(p, x);
    }
  }
  return bytes;
}

Expected expected(const Step& s, int from, int me, int n, bool exact) {
  if (s.reduces()) return combined(s, me, n, exact);
  return {.bytes = input(s, from, me, n), .slack = {}};
}

namespace {

// Calls `f` with functions that store and load an element.
template <class F>
void with_number(DType dtype, const F& f) {
  const auto real = [&](auto number) {
    using Number = decltype(number);
    f([](std::byte* p, int x) { Number::store(p, static_cast<typename Number::Sum>(x)); },
      [](const std::byte* p) { return static_cast<int>(Number::load(p)); });
  };
  const auto whole = [&](auto zero) {
    using T = decltype(zero);
    f([](std::byte* p, int x) { write(p, static_cast<T>(x)); },
      [](const std::byte* p) { return static_cast<int>(read<T>(p)); });
  };
  switch (dtype) {
    case DType::f64: return real(F64());
    case DType::f32: return real(F32());
    case DType::f16: return real(F16());
    case DType::bf16: return real(BF16());
    case DType::i8: return whole(std::int8_t{});
    case DType::i16: return whole(std::int16_t{});
    case DType::i32: return whole(std::int32_t{});
    case DType::i64: return whole(std::int64_t{});
    case DType::u8: return whole(std::uint8_t{});
    case DType::u16: return whole(std::uint16_t{});
    case DType::u32: return whole(std::uint32_t{});
    case DType::u64: return whole(std::uint64_t{});
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;
  }
}

}  // namespace

std::vector<std::byte> small_numbers(DType dtype, const std::vector<int>& numbers) {
  const auto size = static_cast<std::size_t>(size_bytes(dtype));
  std::vector<std::byte> bytes(numbers.size() * size);
  with_number(dtype, [&](const auto& store, const auto&) {
    for (std::size_t i = 0; i < numbers.size(); ++i) store(bytes.data() + i * size, numbers[i]);
  });
  return bytes;
}

std::vector<int> numbers_in(DType dtype, const std::vector<std::byte>& elements) {
  const auto size = static_cast<std::size_t>(size_bytes(dtype));
  std::vector<int> numbers(elements.size() / size);
  with_number(dtype, [&](const auto&, const auto& load) {
    for (std::size_t i = 0; i < numbers.size(); ++i) numbers[i] = load(elements.data() + i * size);
  });
  return numbers;
}

std::string compare(const Step& s, const Expected& e, const std::byte* got) {
  if (e.bytes.empty() || std::memcmp(e.bytes.data(), got, e.bytes.size()) == 0) return {};
  const int size = size_bytes(s.dtype), part = complex(s.dtype) ? size / 2 : size;
  for (std::size_t i = 0, k = 0; i < e.bytes.size(); i += static_cast<std::size_t>(part), ++k) {
    if (std::memcmp(e.bytes.data() + i, got + i, static_cast<std::size_t>(part)) == 0) continue;
    const double want = number_at(s.dtype, e.bytes.data() + i), have = number_at(s.dtype, got + i);
    if (!e.slack.empty() && std::abs(want - have) <= e.slack[k]) continue;
    std::string text = fmt::format("[{}] is {}; expected {}", i / static_cast<std::size_t>(size),
                                   hex(got + i, part), hex(e.bytes.data() + i, part));
    if (!e.slack.empty()) text += fmt::format(" ({:g}, {:g} within {:g})", have, want, e.slack[k]);
    return text;
  }
  return {};
}

const UserReduction& user_reduction() {
  static const UserReduction reduction{
      "maps", [](const void* left, const void* right, void* out, std::int64_t count, DType dtype) {
        const auto* const l = static_cast<const std::uint8_t*>(left);
        const auto* const r = static_cast<const std::uint8_t*>(right);
        auto* const o = static_cast<std::uint8_t*>(out);
        for (std::int64_t i = 0; i < count * size_bytes(dtype); ++i) o[i] = compose(l[i], r[i]);
      }};
  return reduction;
}

}  // namespace weft::check
