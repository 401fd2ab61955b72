#include "weft/base/shape.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <array>
#include <cstring>

#include "weft/base/buffer.hpp"
#include "weft/base/error.hpp"

namespace weft {

Dims::Dims(std::span<const std::int64_t> values) {
  if (values.size() > kMaxDims)
    throw Error(ErrorCode::bad_argument,
                fmt::format("shape: {} dimensions; expected at most {}", values.size(), kMaxDims));
  for (const std::int64_t v : values) values_[rank_++] = v;
}

void Dims::push_back(std::int64_t value) {
  if (rank_ == kMaxDims)
    throw Error(ErrorCode::bad_argument,
                fmt::format("shape: {} dimensions; expected at most {}", rank_ + 1, kMaxDims));
  values_[rank_++] = value;
}

Strides row_major(const Shape& shape) noexcept {
  Strides s = shape;
  std::int64_t step = 1;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    s[i] = step;
    // the function that takes the view checks its extents.
    static_cast<void>(__builtin_mul_overflow(step, shape[i], &step));
  }
  return s;
}

std::string to_string(const Dims& dims) { return fmt::format("({})", fmt::join(dims.values(), ", ")); }

// Views that are no buffers (buffer.hpp) --------------------------------------------------------------------
namespace {

// The packed form. The first byte holds the fault and the number of dimensions. Then follow the extents and,
// if the strides are wrong, the strides. Each number takes as many bytes as it needs, seven bits per byte,
// the lowest bits first. The top bit says that more bytes follow. The lowest bit of a number is its sign.
using Bytes = std::array<std::uint8_t, 16>;
enum class Fault : std::uint8_t { none, negative, beyond, strided };

// Returns false if there is no room for all bytes. The last written byte then still says that more bytes
// follow.
bool pack(const Dims& dims, Bytes& to, std::size_t& at) noexcept {
  for (const std::int64_t number : dims) {
    auto left = static_cast<std::uint64_t>(number) << 1 ^ static_cast<std::uint64_t>(number >> 63);
    do {
      if (at == to.size()) return false;
      to[at++] = static_cast<std::uint8_t>((left & 0x7f) | (left > 0x7f ? 0x80 : 0));
      left >>= 7;
    } while (left != 0);
  }
  return true;
}

// "(3, 4)", or "(3, …)" if the other extents had no room.
std::string unpacked(int rank, const Bytes& from, std::size_t& at) {
  std::string text;
  for (int i = 0; i < rank; ++i) {
    text += i == 0 ? "" : ", ";
    std::uint64_t number = 0;
    bool more = true;
    for (int shift = 0; more && at < from.size(); shift += 7) {
      number |= static_cast<std::uint64_t>(from[at] & 0x7f) << shift;
      more = (from[at++] & 0x80) != 0;
    }
    if (more) return "(" + text + "…)";
    text += std::to_string(static_cast<std::int64_t>(number >> 1 ^ -(number & 1)));
  }
  return "(" + text + ")";
}

Fault find_fault(const Shape& shape, const Strides& strides, DType dtype) noexcept {
  bool negative = false, beyond = false, dense = true, empty = false;
  std::int64_t n = 1, bytes = 0;
  for (int i = shape.rank() - 1; i >= 0; --i) {
    negative |= shape[i] < 0;
    empty |= shape[i] == 0;
    dense &= shape[i] == 1 || strides[i] == n;
    beyond |= __builtin_mul_overflow(n, shape[i], &n);
  }
  beyond |= __builtin_mul_overflow(n, std::int64_t{size_bytes(dtype)}, &bytes);
  if (empty && !negative) return Fault::none;
  return negative ? Fault::negative : beyond ? Fault::beyond : dense ? Fault::none : Fault::strided;
}

}  // namespace

ViewFault ViewFault::of(Shape shape, Strides strides, DType dtype) noexcept {
  ViewFault packed;
  const Fault fault = find_fault(shape, strides, dtype);
  if (fault == Fault::none) return packed;
  Bytes bytes{static_cast<std::uint8_t>(static_cast<int>(fault) << 4 | shape.rank())};
  std::size_t at = 1;
  if (pack(shape, bytes, at) && fault == Fault::strided) pack(strides, bytes, at);
  std::memcpy(&packed.first_, bytes.data(), 8);
  std::memcpy(&packed.second_, bytes.data() + 8, 8);
  return packed;
}

std::string ViewFault::text() const {
  Bytes bytes{};
  std::memcpy(bytes.data(), &first_, 8);
  std::memcpy(bytes.data() + 8, &second_, 8);
  const int rank = bytes[0] & 0xf;
  std::size_t at = 1;
  const std::string shape = unpacked(rank, bytes, at);
  switch (static_cast<Fault>(bytes[0] >> 4)) {
    case Fault::none: break;
    case Fault::negative: return fmt::format("has shape {}; expected no negative extent", shape);
    case Fault::beyond: return fmt::format("has shape {}; its bytes do not fit 64 bits", shape);
    case Fault::strided:
      return fmt::format("is not contiguous: shape {} has strides {}", shape, unpacked(rank, bytes, at));
  }
  return {};
}

}  // namespace weft
