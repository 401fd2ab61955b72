// What an error calls a tensor. Made for every call, so it is no text yet.
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// Borrows its parts; used until the call that takes it is over.
class TensorName {
 public:
  /// As it is: "x", "layers.0.mlp: x"
  TensorName(std::string_view text) noexcept : tensor_(text) {}
  TensorName(const char* text) noexcept : tensor_(text) {}
  TensorName(const std::string& text) noexcept : tensor_(text) {}
  /// A module's: `"layers.0.mlp": x`
  TensorName(std::string_view module_path, std::string_view tensor) noexcept
      : path_(module_path), tensor_(tensor), of_module_(true) {}

  /// The same with more said: `"layers.0": x + mlp: the second term`
  TensorName and_then(std::string_view more) const noexcept {
    TensorName name = *this;
    name.more_ = more;
    return name;
  }

  std::string text() const {
    std::string text = of_module_ ? '"' + std::string(path_) + "\": " : std::string();
    return text.append(tensor_).append(more_);
  }

 private:
  std::string_view path_, tensor_, more_;
  bool of_module_ = false;
};

}  // namespace weft
