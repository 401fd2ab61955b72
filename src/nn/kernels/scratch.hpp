// Memory that grows to what was needed. Private to cpu_*.cpp; one thread at a time.
#pragma once

#include <cstddef>

#include "weft/base/storage.hpp"

namespace weft {
class Context;
}

namespace weft::kernels {

/// Scratch memory of one purpose, which grows to what was needed: local memory of a Context, or of the C++
/// library if there is none.
class Scratch {
 public:
  /// At least `bytes` bytes, 64-byte aligned; valid until the next call. Contents are whatever was there.
  std::byte* reserve(Context* context, std::size_t bytes);
  std::byte* data() const noexcept { return memory_.data(); }
  float* floats() const noexcept { return reinterpret_cast<float*>(memory_.data()); }

 private:
  Storage memory_;
};

}  // namespace weft::kernels
