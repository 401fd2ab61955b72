// The means by which one rank computes: its device, its threads, and the objects that the layers above keep
// for it.
#pragma once

#include <memory>
#include <string_view>
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
  /// Makes a stream of its own on `device`. Throws bad_argument unless 1 <= threads <= 4096, and as
  /// Context::device() does.
  explicit Compute(Context& context, int threads = 1, Device device = {});
  ~Compute();
  Compute(const Compute&) = delete;
  Compute& operator=(const Compute&) = delete;

  Context& context() const noexcept { return *context_; }
  int threads() const noexcept { return threads_; }

  Device device() const noexcept { return stream_.device; }
  /// The stream on which this rank's kernels and copies run and its tensors are ordered.
  Stream stream() const noexcept { return stream_; }
  DeviceRuntime& runtime() const noexcept { return *runtime_; }
  /// The host waits for all that this rank has begun on its device; throws what failed there.
  void wait() const;

  /// An uninitialised tensor in the device's memory, ordered on stream().
  Tensor make(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor(*context_, shape, dtype, memory, stream_);
  }
  /// The same, all zeros.
  Tensor zeros(const Shape& shape, DType dtype = DType::f32, Memory memory = Memory::local) const {
    return Tensor::zeros(*context_, shape, dtype, memory, stream_);
  }
  /// Throws bad_argument if t is not ordered on stream():
  /// `x is on cpu; expected cuda:0, the device of this Compute`, `x is ordered on another stream of cuda:0
  /// than this Compute; to_device() orders it there`.
  void expect_here(std::string_view what, const Tensor& t) const {
    if (t && t.stream() != stream_) throw_elsewhere(what, t);
  }

  /// An object of type T that a layer above keeps per rank (the kernels' scratch memory). The first call
  /// makes it, as T(*this); the Compute destroys it, the newest of these objects first.
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
