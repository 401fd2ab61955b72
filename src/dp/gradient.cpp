#include "weft/dp/gradient.hpp"

#include <fmt/format.h>

#include "dp/view_memory.hpp"
#include "weft/base/error.hpp"

namespace weft {

void check_gradients(std::string_view what, std::span<const Gradient> gradients) {
  for (const Gradient& g : gradients) {
    const auto wrong = [&](ErrorCode code, const std::string& text) {
      throw Error(code, fmt::format("{}: the gradient of \"{}\" {}", what, g.name, text));
    };
    const DType t = g.data.dtype;
    if (t != DType::f64 && t != DType::f32 && t != DType::bf16 && t != DType::f16)
      wrong(ErrorCode::bad_argument, fmt::format("is {}; expected f64, f32, bf16 or f16", name(t)));
    if (g.data.device.kind != DeviceKind::cpu)
      wrong(ErrorCode::bad_argument, fmt::format("is on {}; expected cpu", to_string(g.data.device)));
    if (const std::string fault = memory_fault(g.data); !fault.empty()) wrong(ErrorCode::bad_argument, fault);
    if (g.layout != nullptr && !(g.data.shape == g.layout->local_shape()))
      wrong(ErrorCode::layout, fmt::format("is {}; {} is {} on this rank", to_string(g.data.shape),
                                           to_string(*g.layout), to_string(g.layout->local_shape())));
  }
}

}  // namespace weft
