// The Context: memory, calls in flight, fork guard and log of a process. A program makes it and passes it to
// the objects that need it. docs/overview.md lists the state outside the Context, which concerns the whole
// process. Threads that are ranks of one job share one Context.
#pragma once

#include <cstddef>
#include <memory>
#include <string>
#include <typeindex>

#include "weft/base/device.hpp"
#include "weft/base/log.hpp"
#include "weft/host/allocator.hpp"

namespace weft {

class DeviceRuntime;

namespace detail {
class ContextAccess;  // of weft's own layers
}

struct ContextOptions {
  LogLevel log_level = LogLevel::warning;  ///< the level of all layers, unless WEFT_LOG is set
  LogSink log_sink = {};                   ///< empty: stderr
  /// Address space of each segment of shared memory, from 1 to 2^62, rounded up to pages. If the system
  /// refuses it, weft halves it.
  std::size_t segment_bytes = std::size_t{1} << 30;
  /// levels of single layers, in the syntax of WEFT_LOG: "store=debug,dp=error"
  std::string log_levels = {};
  /// the source of local memory; if it is empty, weft uses its own allocator, which keeps free blocks
  Allocator allocator = {};
};

/// Thread-safe. A Context must exist longer than every Storage, Tensor and ProcessGroup made with it.
class Context {
 public:
  explicit Context(ContextOptions options = {});
  ~Context();
  Context(const Context&) = delete;
  Context& operator=(const Context&) = delete;

  Logger& log() noexcept;
  const ContextOptions& options() const noexcept;
  /// Throws `unsupported` in a process forked after this Context was made: "<what>: this process was forked
  /// …".
  void check_fork(const char* what) const {
    if (forked()) throw_forked(what);
  }
  /// True in a child forked after this Context was made. Makes no system call.
  bool forked() const noexcept { return *fork_mark_ == 0; }

  /// Adds a device; the Context owns it. Throws bad_argument if the Context already has a device of that
  /// name. The CPU is always a device of the Context.
  void add_device(std::unique_ptr<DeviceRuntime> runtime);
  /// Throws unsupported if the device was not added: `device cuda:1 is not in this Context, which has cpu,
  /// cuda:0; …`.
  DeviceRuntime& device(Device device);

  /// An object of type T that a higher layer keeps per process (a registry, a pool). The first call makes the
  /// object, as T(*this). The Context destroys all such objects, the newest first. Thread-safe.
  template <class T>
  T& attached() {
    return *static_cast<T*>(
        attachment(typeid(T), [](Context& c) -> std::shared_ptr<void> { return std::make_shared<T>(c); }));
  }

 private:
  friend class detail::ContextAccess;
  void* attachment(std::type_index type, std::shared_ptr<void> (*make)(Context&));
  [[noreturn]] void throw_forked(const char* what) const;
  struct Impl;
  std::unique_ptr<Impl> impl_;
  const volatile unsigned char* fork_mark_;  // a page that the kernel wipes in children (MADV_WIPEONFORK)
};

}  // namespace weft
