// The name of a tensor in error texts. Each call makes a TensorName. So it builds its text only if there is
// an error.
#pragma once

#include <string>
#include <string_view>

#include "weft/base/cxx20.hpp"

namespace weft {

/// A TensorName borrows its parts, which must be valid until the call returns.
class TensorName {
 public:
  /// The whole name: "x", "layers.0.mlp: x"
  TensorName(std::string_view text) noexcept : tensor_(text) {}
  TensorName(const char* text) noexcept : tensor_(text) {}
  TensorName(const std::string& text) noexcept : tensor_(text) {}
  /// A tensor of a module: `"layers.0.mlp": x`
  TensorName(std::string_view module_path, std::string_view tensor) noexcept
      : path_(module_path), tensor_(tensor), of_module_(true) {}

  /// A tensor of a parameter, with some words before it: `optimizer: the gradient of "w"`
  static TensorName of(std::string_view words, std::string_view path) noexcept {
    TensorName name(path, "");
    name.before_ = words;
    return name;
  }
  /// This name with an addition: `"layers.0": x + mlp: the second term`
  TensorName and_then(std::string_view more) const noexcept {
    TensorName name = *this;
    name.more_ = more;
    return name;
  }

  std::string text() const {
    std::string text(before_);
    if (of_module_) text.append("\"").append(path_).append(tensor_.empty() ? "\"" : "\": ");
    return text.append(tensor_).append(more_);
  }

 private:
  std::string_view before_, path_, tensor_, more_;
  bool of_module_ = false;
};

}  // namespace weft
