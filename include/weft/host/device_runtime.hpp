// The interface of a device for weft: memory, copies and streams. The CPU is one. To add a device, derive
// from this class and add the object to the Context. Its kernels are a separate table (weft/nn/kernels.hpp);
// its collectives come from a transport that moves the device's memory (weft/backends/backend.hpp).
#pragma once

#include <cstddef>
#include <cstdint>

#include "weft/base/device.hpp"

namespace weft {

/// `count` runs of `bytes` bytes each, which begin `from_pitch` bytes apart where they are read and
/// `to_pitch` bytes apart where they are written (as cudaMemcpy2D has them). A pitch is at least `bytes`;
/// with a single run the pitches do not matter.
struct Rows {
  std::size_t bytes = 0;
  std::int64_t count = 1;
  std::size_t from_pitch = 0, to_pitch = 0;
};

/// A device. Several threads may call the functions at once. Those that take a stream (of this device; see
/// Stream) may return before the work is done; it is done after all work that was queued on the stream
/// before. The next wait() throws an error that occurs later.
class DeviceRuntime {
 public:
  virtual ~DeviceRuntime() = default;
  /// The device; the result never changes.
  virtual Device device() const noexcept = 0;

  /// Memory for work that is queued on `stream` after this, at least 64-byte aligned; never null, even for 0
  /// bytes. Uninitialised. Throws system naming the size.
  virtual void* allocate(std::size_t bytes, Stream stream) = 0;
  /// `bytes` and `stream` as given to allocate(). Work queued on the stream before this may still use it.
  virtual void release(void* memory, std::size_t bytes, Stream stream) noexcept = 0;

  /// Copies from this device or the host to this device or the host. Memory of the host has been read when
  /// this returns; bytes that are written to the host are there after wait(stream), and the caller keeps that
  /// memory until then. The two must not overlap.
  virtual void copy(const void* from, Device from_device, void* to, Device to_device, const Rows& rows,
                    Stream stream) = 0;
  /// Each byte of the rows at `to`, which is this device's memory, becomes `value`.
  virtual void fill(void* to, unsigned char value, const Rows& rows, Stream stream) = 0;

  virtual Stream make_stream() = 0;
  /// The stream has nothing left to do (wait() has returned).
  virtual void destroy_stream(Stream stream) noexcept = 0;
  /// Work queued on `later` from now on begins after all work queued on `earlier` so far. The host does not
  /// wait.
  virtual void depend(Stream later, Stream earlier) = 0;
  /// The host waits until all work queued on `stream` is done. Throws an error of that work, once.
  virtual void wait(Stream stream) = 0;
};

}  // namespace weft
