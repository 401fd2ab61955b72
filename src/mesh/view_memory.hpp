// Checks of memory, for functions that read and write views themselves and do not pass them to a group. Any
// thread may call them. Private to mesh, dp and tp.
#pragma once

#include <fmt/format.h>

#include <cstdint>
#include <string>

#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"

namespace weft {

/// Why the elements of `v` cannot be read as an array of its dtype, as a text to follow its name: `has shape
/// (-4, 4); expected no negative extent`, `has shape (…); its bytes do not fit 64 bits`, `is not contiguous;
/// copy it into a contiguous buffer`, `has no memory`, `begins at 0x7f01; expected a multiple of 4 bytes for
/// f32`. Returns "" if nothing is wrong.
inline std::string memory_fault(const ConstTensorView& v) {
  if (static_cast<int>(v.dtype) >= kDTypeCount)
    return fmt::format("has dtype {}; expected 0 ({}) to {} ({})", static_cast<int>(v.dtype), name(DType{}),
                       kDTypeCount - 1, name(static_cast<DType>(kDTypeCount - 1)));
  bool negative = false, empty = false, beyond = false;
  std::int64_t bytes = size_bytes(v.dtype);
  for (const std::int64_t extent : v.shape) {
    negative |= extent < 0;
    empty |= extent == 0;
    if (extent != 0) beyond |= __builtin_mul_overflow(bytes, extent, &bytes);
  }
  if (negative) return fmt::format("has shape {}; expected no negative extent", to_string(v.shape));
  if (beyond) return fmt::format("has shape {}; its bytes do not fit 64 bits", to_string(v.shape));
  if (!v.contiguous()) return "is not contiguous; copy it into a contiguous buffer";
  if (empty) return {};
  if (v.data == nullptr) return "has no memory";
  const auto alignment = static_cast<std::uintptr_t>(size_bytes(v.dtype) < 8 ? size_bytes(v.dtype) : 8);
  if (reinterpret_cast<std::uintptr_t>(v.data) % alignment != 0)
    return fmt::format("begins at {}; expected a multiple of {} bytes for {}",
                       static_cast<const void*>(v.data), alignment, name(v.dtype));
  return {};
}

/// The reason why `compute` cannot work on data on `device`, as a text that follows the data's name; a null
/// `compute` stands for the host: `is on cuda:0; expected cpu, as no Compute was given`, `is on cpu; expected
/// cuda:0, the device of the Compute`. Returns "" if nothing is wrong.
inline std::string device_fault(Device device, const Compute* compute) {
  const Device expected = compute == nullptr ? Device{} : compute->device();
  if (device == expected) return {};
  return is_on(device, expected) +
         (compute == nullptr ? ", as no Compute was given" : ", the device of the Compute");
}

/// Returns whether two views have a byte in common. Neither view may have a memory_fault().
inline bool overlap(const ConstTensorView& a, const ConstTensorView& b) noexcept {
  return a.count() > 0 && b.count() > 0 && a.data < b.data + b.bytes() && b.data < a.data + a.bytes();
}

}  // namespace weft
