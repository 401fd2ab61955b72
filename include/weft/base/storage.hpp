// Memory that has an owner: reference-counted blocks on the host, local to this process or shared with its
// ranks, or on a device.
#pragma once

#include <cstddef>
#include <memory>

#include "weft/base/device.hpp"

namespace weft {

class Context;

/// `local`: ordinary pages, huge pages if possible (for weights, optimizer state). `shared`: pages that peers
/// on this host can map, so that collectives need no copies (for boundaries, gradient buckets, shards). A
/// device has one kind of memory, so this value has no effect on a device.
enum class Memory : unsigned char { local, shared };

/// A block of at least `bytes` bytes, 64-byte aligned (shared: whole pages). Copies share the block, and the
/// last owner frees it. The Context must outlive the Storage. Reference counting is thread-safe. The program
/// must synchronise accesses to the bytes.
///
/// On a device, memory is ordered on a stream. Code that writes or reads the memory does so on that stream,
/// or makes the two streams wait for one another (DeviceRuntime::depend). It must keep the memory until that
/// has happened. The last owner frees the memory in the order of the stream: work that was queued on the
/// stream before may still use it.
class Storage {
 public:
  Storage() = default;
  /// Uninitialised memory. Throws system, with the size, if the memory cannot be allocated. If the process
  /// cannot have shared memory at all (RLIMIT_AS, no memfd), the result is local memory, and one line at
  /// level info says so. `where`: a stream of the device, or the device. Also throws the errors of
  /// Context::device().
  static Storage allocate(Context& context, Memory memory, std::size_t bytes, Stream where = {});
  /// Wraps foreign memory without owning it. The caller must keep the memory alive.
  static Storage borrow(void* data, std::size_t bytes, Stream where = {});
  /// Wraps foreign memory. The last copy of this Storage releases `owner`.
  static Storage adopt(void* data, std::size_t bytes, std::shared_ptr<void> owner, Stream where = {});

  /// The same memory, ordered on `where`, another stream of its device: later work on `where` begins after
  /// all work queued on this Storage's stream so far. When the last copy of the result is destroyed, this
  /// Storage's stream waits for the work that has been queued on `where` so far. The memory is freed only
  /// after the last copy of this Storage is destroyed, too, in the order of this Storage's stream. Throws
  /// bad_argument if `where` is a stream of another device.
  Storage ordered_on(Context& context, Stream where) const;

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_.get()); }
  std::size_t bytes() const noexcept { return bytes_; }
  Memory memory() const noexcept { return memory_; }
  Device device() const noexcept { return stream_.device; }
  /// The stream that orders work on this memory.
  Stream stream() const noexcept { return stream_; }
  /// Whether collectives can work on this memory in place. True for shared memory and for a device's memory.
  bool direct() const noexcept { return memory_ == Memory::shared || device() != Device{}; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  static Storage on_device(Context& context, Memory memory, std::size_t bytes, Stream where);
  std::shared_ptr<void> data_;
  std::size_t bytes_ = 0;
  Stream stream_{};
  Memory memory_ = Memory::local;
};

}  // namespace weft
