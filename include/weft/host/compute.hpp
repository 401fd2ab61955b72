// What one rank computes with: its memory and its threads, and what the layers above keep for it.
#pragma once

#include <memory>
#include <typeindex>
#include <utility>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// The means of one rank. Threads are set, not guessed. Belongs to one thread at a time. Must outlive
/// everything made with it; the Context must outlive it.
class Compute {
 public:
  /// Throws bad_argument where `threads` < 1.
  explicit Compute(Context& context, int threads = 1);
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  Context& context() const noexcept { return *context_; }
  int threads() const noexcept { return threads_; }

  /// An uninitialised tensor in this rank's memory.
  Tensor make(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor(*context_, shape, dtype, memory);
  }

  /// The one T of this Compute, made as T(*this) by the first call and destroyed with the Compute, last made
  /// first: what a layer above keeps per rank (the kernels' scratch memory).
  template <class T>
  T& attached() {
    for (const auto& [type, attachment] : attachments_)
      if (type == typeid(T)) return *static_cast<T*>(attachment.get());
    auto made = std::make_shared<T>(*this);
    attachments_.emplace_back(typeid(T), made);
    return *made;
  }

 private:
  Context* context_;
  int threads_;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> attachments_;
};

}  // namespace weft
