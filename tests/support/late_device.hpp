// A device for tests, if there is no GPU: it finds code that assumes the CPU.
//
// - Memory: the addresses that it gives out cannot be read or written. The bytes lie elsewhere, where only
// copies, fills and kernels of the device find them. So host code that touches a tensor of the device
// crashes. New memory holds NaNs, and holds them again when it has been given back.
// - Streams: what a stream is given is only remembered. It runs when the host waits for that stream, or when
//   another stream that depends on it runs, as late as it can. So a forgotten dependency always gives a wrong
//   number, and not only in some runs.
// - The next wait throws the exception of a task.
//
// Thread-safe; tasks run on the thread that waits.
#pragma once

#include <cstddef>
#include <deque>
#include <exception>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/host/device_runtime.hpp"

namespace weft::test {

class LateDevice final : public DeviceRuntime {
 public:
  /// It calls itself cuda:<index>.
  explicit LateDevice(int index = 0);
  ~LateDevice() override;

  Device device() const noexcept override { return device_; }
  void* allocate(std::size_t bytes, Stream stream) override;
  void release(void* memory, std::size_t bytes, Stream stream) noexcept override;
  void copy(const void* from, Device from_device, void* to, Device to_device, const Rows& rows,
            Stream stream) override;
  void fill(void* to, unsigned char value, const Rows& rows, Stream stream) override;
  Stream make_stream() override;
  void destroy_stream(Stream stream) noexcept override;
  void depend(Stream later, Stream earlier) override;
  void wait(Stream stream) override;

  /// Remembers a task: a kernel.
  void push(Stream stream, std::function<void()> task);
  /// Runs the tasks of the stream; the next wait() throws an error of these tasks.
  void catch_up(Stream stream) noexcept;
  /// The host's address of the bytes at a device's address. Throws std::logic_error for memory that is not
  /// the device's; null stays null.
  template <class T>
  T* bytes_of(T* address) const {
    return static_cast<T*>(const_cast<void*>(translate(address)));
  }
  /// Throws std::logic_error naming the kernel unless the bytes lie in one block of the device's memory.
  void expect_inside(std::string_view kernel, const void* address, std::size_t bytes) const;
  /// From now on the copy after `count` further ones throws, once.
  void fail_copy(std::size_t count);
  /// The number of tasks on all streams that have not run yet.
  std::size_t waiting() const;
  /// The number of blocks that have been allocated and not freed.
  std::size_t blocks() const;

 private:
  struct Queue {
    std::deque<std::function<void()>> tasks;
    std::size_t done = 0;
    std::map<std::size_t, std::vector<void*>> free;  // by size; for this stream again, since it orders them
  };
  using Lock = std::unique_lock<std::recursive_mutex>;
  const void* translate(const void* address) const;
  Queue& queue(Stream stream);
  void run_until(Queue& q, std::size_t done);

  const Device device_;
  std::byte* given_out_;  // no access
  std::byte* true_;
  mutable std::recursive_mutex mutex_;
  std::size_t used_ = 0, blocks_ = 0;
  std::map<const std::byte*, std::size_t> sizes_;   // of the blocks that are given out, as asked for
  std::map<void*, std::unique_ptr<Queue>> queues_;  // by handle; null: the default stream
  std::exception_ptr failed_;
  std::optional<std::size_t> copies_to_failure_;
};

}  // namespace weft::test
