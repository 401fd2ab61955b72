// Checks of the views that functions of ep take. Included only inside ep.
#pragma once

#include <fmt/format.h>

#include <string_view>

#include "weft/base/error.hpp"
#include "weft/base/view.hpp"

namespace weft::ep {

/// Throws bad_argument unless the view is contiguous memory of the host, of this dtype and shape:
/// `route_tokens: weights is f32 (3, 2); expected f32 (4, 2)`. `why` may say where the shape is from.
inline void expect_view(std::string_view call, std::string_view what, const ConstTensorView& v, DType dtype,
                        const Shape& shape, std::string_view why = {}) {
  if (v.device.kind != DeviceKind::cpu)
    throw Error(ErrorCode::unsupported,
                fmt::format("{}: {} is on {}; expected memory of the host: mixtures of experts have no "
                            "kernels for devices",
                            call, what, to_string(v.device)));
  if (v.dtype != dtype || !(v.shape == shape))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {} {}; expected {} {}{}", call, what, name(v.dtype),
                            to_string(v.shape), name(dtype), to_string(shape), why));
  if (!v.contiguous())
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} is not contiguous", call, what));
  if (v.count() > 0 && v.data == nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} has no memory", call, what));
}

/// Throws bad_argument unless the view has two dimensions.
inline void expect_matrix(std::string_view call, std::string_view what, const ConstTensorView& v) {
  if (v.shape.rank() != 2)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} is {}; expected two dimensions", call, what, to_string(v.shape)));
}

}  // namespace weft::ep
