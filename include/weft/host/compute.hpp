// The device and the threads with which one rank computes, and objects that higher layers keep for the
// rank.
#pragma once

#include <memory>
#include <string_view>
#include <typeindex>
#include <utility>
#include <vector>

#include "weft/base/tensor.hpp"
#include "weft/host/context.hpp"

namespace weft {

/// The device and the threads with which one rank computes. The program sets the number of threads. weft does
/// not guess it. One thread at a time may use a Compute. The Compute must exist longer than everything that
/// was made with it. The Context must exist longer than the Compute.
class Compute {
 public:
  /// Makes a new stream on `device`. Throws bad_argument unless 1 <= threads <= 4096, and the errors of
  /// Context::device().
  explicit Compute(Context& context, int threads = 1, Device device = {});
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  Context& context() const noexcept { return *context_; }
  int threads() const noexcept { return threads_; }

  Device device() const noexcept { return stream_.device; }
  /// The stream on which this rank's kernels and copies run, and on which its tensors are ordered.
  Stream stream() const noexcept { return stream_; }
  DeviceRuntime& runtime() const noexcept { return *runtime_; }
  /// Makes the host wait for all work that this rank has begun on its device. Throws the error of work that
  /// has failed there.
  void wait() const;

  /// An uninitialised tensor in the device's memory, ordered on stream().
  Tensor make(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor(*context_, shape, dtype, memory, stream_);
  }
  /// Like the function above, but all zeros.
  Tensor zeros(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor::zeros(*context_, shape, dtype, memory, stream_);
  }
  /// Throws bad_argument if t is not ordered on stream():
  /// `x is on cpu; expected cuda:0, the device of this Compute`, `x is ordered on another stream of cuda:0
  /// than this Compute; to_device() orders it there`.
  void expect_here(std::string_view what, const Tensor& t) const {
    if (t && t.stream() != stream_) throw_elsewhere(what, t);
  }

  /// An object of type T that a higher layer keeps per rank (the kernels' scratch memory). The first call
  /// makes the object, as T(*this). The Compute destroys all such objects, the newest first.
  template <class T>
  T& attached() {
    for (const auto& [type, attachment] : attachments_)
      if (type == typeid(T)) return *static_cast<T*>(attachment.get());
    auto made = std::make_shared<T>(*this);
    attachments_.emplace_back(typeid(T), made);
    return *made;
  }

 private:
  [[noreturn]] void throw_elsewhere(std::string_view what, const Tensor& t) const;
  Context* context_;
  int threads_;
  DeviceRuntime* runtime_;
  Stream stream_;
  std::vector<std::pair<std::type_index, std::shared_ptr<void>>> attachments_;
};

}  // namespace weft
