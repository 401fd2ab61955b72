#include "weft/train/convert.hpp"

#include <fmt/format.h>

#include <cstdint>
#include <functional>
#include <string>

#include "base/floating.hpp"
#include "dp/convert.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse(ErrorCode code, const std::string& text) { throw Error(code, "convert: " + text); }

void check(const char* which, const ConstBuffer& b, const Compute& compute) {
  if (b.fault) refuse(ErrorCode::bad_argument, fmt::format("{} {}", which, b.fault.text()));
  if (!is_floating(b.dtype))
    refuse(ErrorCode::bad_argument,
           fmt::format("{} is {}; expected {}", which, name(b.dtype), kFloatingNames));
  if (b.count < 0)
    refuse(ErrorCode::bad_argument, fmt::format("{} has {} elements; expected 0 or more", which, b.count));
  if (b.data == nullptr && b.count != 0)
    refuse(ErrorCode::bad_argument, fmt::format("{} has no memory for its {} elements", which, b.count));
  if (b.device != compute.device())
    refuse(ErrorCode::bad_argument, fmt::format("{} is on {}; expected {}, as compute", which,
                                                to_string(b.device), to_string(compute.device())));
  if (reinterpret_cast<std::uintptr_t>(b.data) % static_cast<std::uintptr_t>(size_bytes(b.dtype)) != 0)
    refuse(ErrorCode::bad_argument, fmt::format("{}'s memory is not aligned for {}", which, name(b.dtype)));
}

bool overlap(const ConstBuffer& a, const ConstBuffer& b) {
  const std::less<const std::byte*> before;
  return a.count != 0 && before(a.data, b.data + b.bytes()) && before(b.data, a.data + a.bytes());
}

}  // namespace

void convert(Compute& compute, const ConstBuffer& in, const Buffer& out) {
  check("in", in, compute);
  check("out", out, compute);
  if (in.count != out.count)
    refuse(ErrorCode::bad_argument,
           fmt::format("out has {} elements; expected {}, as in", out.count, in.count));
  if (overlap(in, out)) refuse(ErrorCode::bad_argument, "in and out overlap; expected memory apart");
  if (in.count == 0) return;
  const bool on_host = compute.device() == Device{};
  if (on_host || in.dtype == out.dtype) {
    dp::convert_all(&compute, {{in.data, out.data, in.count}}, in.dtype, out.dtype);
  } else if (in.dtype == DType::f32 && out.dtype == DType::bf16) {
    kernels::round_to_bf16(kernels_of(compute), reinterpret_cast<const float*>(in.data),
                           reinterpret_cast<bf16*>(out.data), in.count);
  } else if (in.dtype == DType::bf16 && out.dtype == DType::f32) {
    kernels::widen_bf16(kernels_of(compute), reinterpret_cast<const bf16*>(in.data),
                        reinterpret_cast<float*>(out.data), in.count);
  } else {
    refuse(ErrorCode::unsupported, fmt::format("{} to {} on {}; expected f32 and bf16 there", name(in.dtype),
                                               name(out.dtype), to_string(compute.device())));
  }
}

}  // namespace weft
