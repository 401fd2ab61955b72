#include "weft/models/remap.hpp"

#include <fmt/format.h>

#include "checkpoint/conv_format.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

void put(const char* function, NamedTensors& to, const std::string& name, const Tensor& tensor,
         const std::string& from) {
  if (!to.emplace(name, tensor).second)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: \"{}\" becomes \"{}\", which is there already", function, from, name));
}

}  // namespace

NamedTensors remap_conv_weights(Context& context, const NamedTensors& stored) {
  constexpr const char* kFunction = "remap_conv_weights";
  NamedTensors to;
  for (const auto& [name, tensor] : stored) {
    const ConvFormat format = conv_format(name, tensor.shape());
    if (!format.expected.empty())
      throw Error(ErrorCode::bad_argument, fmt::format("{}: \"{}\" is {}; expected {}", kFunction, name,
                                                       to_string(tensor.shape()), format.expected));
    if (format.pieces.empty()) put(kFunction, to, name, tensor, name);
    const std::int64_t row =
        tensor.shape().rank() == 0 || tensor.size(0) == 0 ? 0 : tensor.count() / tensor.size(0);
    const RemappedTensor* before = nullptr;
    for (const RemappedTensor& piece : format.pieces) {
      const Tensor part = tensor.slice_flat(piece.first_row * row, piece.shape);
      const bool again = before != nullptr && before->first_row == piece.first_row && piece.shape.count() > 0;
      put(kFunction, to, piece.name, again ? part.clone(context) : part, name);
      before = &piece;
    }
  }
  return to;
}

NamedTensors remap_spectral_norm_names(const NamedTensors& stored) {
  NamedTensors to;
  for (const auto& [name, tensor] : stored)
    put("remap_spectral_norm_names", to, spectral_norm_name(name), tensor, name);
  return to;
}

}  // namespace weft
