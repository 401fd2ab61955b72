#include "reduce/scan.hpp"

#include <algorithm>
#include <array>
#include <cassert>
#include <complex>
#include <cstring>
#include <limits>

#include "reduce/reduce.hpp"

namespace weft {
namespace {

using Kind = ReduceOp::Kind;

// The bytes of one element.
struct Element {
  std::array<std::byte, 16> bytes{};
  template <class T>
  void set(T x) noexcept {
    std::memcpy(bytes.data(), &x, sizeof x);
  }
};

template <class T>
void set_whole(Element& e, Kind kind) noexcept {
  switch (kind) {
    case Kind::sum:
    case Kind::premul_sum:
    case Kind::bit_or:
    case Kind::bit_xor:
    case Kind::logical_or:
    case Kind::logical_xor:
    case Kind::avg:
    case Kind::user: return;
    case Kind::prod:
    case Kind::logical_and: return e.set(T{1});
    case Kind::min: return e.set(std::numeric_limits<T>::max());
    case Kind::max: return e.set(std::numeric_limits<T>::lowest());
    case Kind::bit_and: return e.set(static_cast<T>(~T{0}));
  }
}

// The bits of 1 and of infinity, for a dtype of that size; the sign is the highest bit.
template <class Bits>
void set_real(Element& e, Kind kind, Bits one, Bits infinity) noexcept {
  if (kind == Kind::prod) e.set(one);
  if (kind == Kind::min) e.set(infinity);
  if (kind == Kind::max) e.set(static_cast<Bits>(infinity | Bits{1} << (sizeof(Bits) * 8 - 1)));
}

// For bool: 0 and 1, and bit operations on them.
void set_truth(Element& e, Kind kind) noexcept {
  if (kind == Kind::min || kind == Kind::bit_and || kind == Kind::logical_and) e.set(std::uint8_t{1});
}

Element identity(DType dtype, Kind kind) noexcept {
  Element e;
  switch (dtype) {
    case DType::f64: set_real<std::uint64_t>(e, kind, 0x3ff0000000000000u, 0x7ff0000000000000u); break;
    case DType::f32: set_real<std::uint32_t>(e, kind, 0x3f800000u, 0x7f800000u); break;
    case DType::f16: set_real<std::uint16_t>(e, kind, 0x3c00, 0x7c00); break;
    case DType::bf16: set_real<std::uint16_t>(e, kind, 0x3f80, 0x7f80); break;
    case DType::i8: set_whole<std::int8_t>(e, kind); break;
    case DType::i16: set_whole<std::int16_t>(e, kind); break;
    case DType::i32: set_whole<std::int32_t>(e, kind); break;
    case DType::i64: set_whole<std::int64_t>(e, kind); break;
    case DType::u8: set_whole<std::uint8_t>(e, kind); break;
    case DType::u16: set_whole<std::uint16_t>(e, kind); break;
    case DType::u32: set_whole<std::uint32_t>(e, kind); break;
    case DType::u64: set_whole<std::uint64_t>(e, kind); break;
    case DType::boolean: set_truth(e, kind); break;
    case DType::c64:
      if (kind == Kind::prod) e.set(std::complex<float>(1));
      break;
    case DType::c128:
      if (kind == Kind::prod) e.set(std::complex<double>(1));
      break;
    case DType::f8e4m3:
    case DType::f8e5m2: break;  // never combined
  }
  return e;
}

}  // namespace

void fill_identity(DType dtype, Kind kind, std::byte* to, std::int64_t count) noexcept {
  if (!has_identity(kind) || count == 0) return;
  const Element e = identity(dtype, kind);
  const auto size = static_cast<std::size_t>(size_bytes(dtype)),
             bytes = static_cast<std::size_t>(count) * size;
  std::memcpy(to, e.bytes.data(), size);
  for (std::size_t done = size; done < bytes;) {  // doubles the filled part in each step
    const std::size_t step = std::min(done, bytes - done);
    std::memcpy(to + done, to, step);
    done += step;
  }
}

// Runs from the last prefix to the first: out[r] may be in[r], which no later step needs.
void scan(DType dtype, const ReduceOp& op, bool exclusive, std::span<const std::byte* const> in,
          std::span<std::byte* const> out, std::int64_t count) noexcept {
  assert(in.size() == out.size());
  for (std::size_t r = in.size(); r-- > 0;)
    if (out[r] != nullptr) scan_of(static_cast<int>(r), dtype, op, exclusive, in, out[r], count);
}

void scan_of(int rank, DType dtype, const ReduceOp& op, bool exclusive, std::span<const std::byte* const> in,
             std::byte* out, std::int64_t count) noexcept {
  const std::size_t n = static_cast<std::size_t>(rank) + (exclusive ? 0 : 1);
  if (n == 0)
    fill_identity(dtype, op.kind, out, count);
  else
    reduce(dtype, op, in.first(n), {&out, 1}, count);
}

}  // namespace weft
