// Memory that grows to the largest request. Private to cpu_*.cpp. One thread at a time uses it.
#pragma once

#include <cstddef>

#include "weft/base/storage.hpp"

namespace weft {
class Context;
}

namespace weft::kernels {

/// Scratch memory for one purpose, which grows to the largest request. It is local memory of a Context, or
/// memory of the C++ library if there is no Context.
class Scratch {
 public:
  /// Returns at least `bytes` bytes, 64-byte aligned; valid until the next call. Their contents are
  /// undefined.
  std::byte* reserve(Context* context, std::size_t bytes);
  std::byte* data() const noexcept { return memory_.data(); }
  float* floats() const noexcept { return reinterpret_cast<float*>(memory_.data()); }

 private:
  Storage memory_;
};

}  // namespace weft::kernels
