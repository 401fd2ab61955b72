// Memory that is owned: reference-counted blocks, local to this process or shared with the ranks of the host.
#pragma once

#include <cstddef>
#include <memory>

namespace weft {

class Context;

/// `local`: ordinary pages, huge where possible (weights, optimizer state). `shared`: pages that peers on
/// this host may map, on which collectives copy nothing (boundaries, gradient buckets, shards).
enum class Memory : unsigned char { local, shared };

/// A block of at least `bytes` bytes, 64-byte aligned (shared: whole pages). Copying shares; the last owner
/// frees. The Context must outlive it. Reference counting is thread-safe, the bytes are the user's to guard.
class Storage {
 public:
  Storage() = default;
  /// Uninitialised memory. Throws system naming the size where it cannot be had. Where shared memory cannot
  /// be had at all (RLIMIT_AS, no memfd), local memory is given instead and one line at level info says so.
  static Storage allocate(Context& context, Memory memory, std::size_t bytes);
  /// Wraps foreign memory without owning it; the caller keeps it alive.
  static Storage borrow(void* data, std::size_t bytes);
  /// Wraps foreign memory; `owner` is kept until the last copy goes.
  static Storage adopt(void* data, std::size_t bytes, std::shared_ptr<void> owner);

  std::byte* data() const noexcept { return static_cast<std::byte*>(data_.get()); }
  std::size_t bytes() const noexcept { return bytes_; }
  Memory memory() const noexcept { return memory_; }
  explicit operator bool() const noexcept { return data_ != nullptr; }

 private:
  std::shared_ptr<void> data_;
  std::size_t bytes_ = 0;
  Memory memory_ = Memory::local;
};

}  // namespace weft
