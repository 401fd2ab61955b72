// The interface of a device for weft: memory, copies and streams. The CPU is a device, too. To add a device,
// derive from this class and add the object to the Context. The device's kernels are a separate table
// (weft/nn/kernels.hpp). Collectives on its memory need a transport that moves this memory
// (weft/backends/backend.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/base/device.hpp"

namespace weft {

/// `count` rows of `bytes` bytes each, as in cudaMemcpy2D. In the source, row i begins i * from_pitch bytes
/// after the first row; in the destination, i * to_pitch bytes after it. A pitch is at least `bytes`. With a
/// single row the pitches have no effect.
struct Rows {
  std::size_t bytes = 0;
  std::int64_t count = 1;
  std::size_t from_pitch = 0, to_pitch = 0;
};

/// A device. Several threads may call the functions at once. A function that takes a stream (of this device;
/// see Stream) may return before its work is done. The work runs after all work that was queued on the stream
/// before. If the work fails after the function has returned, the next wait() throws the error.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// The device. The result never changes.
  virtual Device device() const noexcept = 0;

  /// Returns uninitialised memory for work that is queued on `stream` after this call. It is at least 64-byte
  /// aligned and never null, even for 0 bytes. Throws system, with the size, on failure.
  virtual void* allocate(std::size_t bytes, Stream stream) = 0;
  /// Frees memory of allocate(), with the same `bytes` and `stream`. Work that was queued on the stream
  /// before this call may still use the memory.
  virtual void release(void* memory, std::size_t bytes, Stream stream) noexcept = 0;

  /// Copies from this device or the host to this device or the host. If the source is host memory, it has
  /// been read when the function returns. If the destination is host memory, the bytes have arrived after
  /// wait(stream), and the caller must keep the memory until then. Source and destination must not overlap.
  virtual void copy(const void* from, Device from_device, void* to, Device to_device, const Rows& rows,
                    Stream stream) = 0;
  /// Sets each byte of the rows at `to`, which is memory of this device, to `value`.
  virtual void fill(void* to, unsigned char value, const Rows& rows, Stream stream) = 0;

  virtual Stream make_stream() = 0;
  /// The stream must have no work left: call wait() first.
  virtual void destroy_stream(Stream stream) noexcept = 0;
  /// Orders two streams: work queued on `later` after this call begins after all work that has been queued on
  /// `earlier` so far. The host does not wait.
  virtual void depend(Stream later, Stream earlier) = 0;
  /// Makes the host wait until all work queued on `stream` is done. If that work has failed, throws its
  /// error, once.
  virtual void wait(Stream stream) = 0;
};

}  // namespace weft
