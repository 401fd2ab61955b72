// Memory::local: ordinary pages of this process. Small blocks come from malloc. Other blocks are kept for the
// next allocation of that size. The first access to a page is expensive, and training requests the same sizes
// in every step. Large blocks are mapped, in huge pages if possible. Alternatively all memory comes from the
// program's Allocator, block by block. Thread-safe.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <string_view>
#include <vector>

#include "weft/host/allocator.hpp"

namespace weft {

class Context;
class Logger;

class LocalMemory {
 public:
  static constexpr std::size_t kAlignment = 64;
  /// Blocks of more than this many bytes are cached.
  static constexpr std::size_t kSmallBytes = std::size_t{4} << 10;
  /// Blocks of at least this many bytes, rounded up, are mapped.
  static constexpr std::size_t kMappedBytes = std::size_t{1} << 20;

  LocalMemory() = default;
  /// Takes memory from `allocator` if its functions are set. `log`, which must outlive this object, receives
  /// exceptions of the allocator's deallocate().
  LocalMemory(const Allocator& allocator, Logger& log) : allocator_(allocator), log_(&log) {}
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;

  /// Returns uninitialised, 64-byte aligned memory. Throws system, with `who` and the size, if there is no
  /// memory: `storage: 100 bytes of local memory cannot be allocated: Cannot allocate memory`. Throws the
  /// exception of the Allocator.
  void* allocate(std::string_view who, std::size_t bytes) {
    if (allocator_.allocate != nullptr) [[unlikely]]
      return from_allocator(who, bytes);
    void* const block = own(bytes);
    if (block == nullptr) [[unlikely]]
      refused(who, bytes);
    return block;
  }
  /// Frees a block. `bytes`: the value that was passed to allocate().
  void release(void* block, std::size_t bytes) noexcept;

  /// Sums over blocks of more than kSmallBytes, with sizes rounded up. They count weft's own memory, but not
  /// memory of the Allocator.
  struct Counters {
    std::size_t in_use_bytes, cached_bytes;
  };
  Counters counters() const;

 private:
  struct Cached {
    void* block;
    std::size_t bytes;
  };
  using Order = std::list<Cached>;  // the block that was freed first comes first

  void* own(std::size_t bytes) noexcept;
  void* from_allocator(std::string_view who, std::size_t bytes);
  void to_allocator(void* block, std::size_t rounded) noexcept;
  [[noreturn]] static void refused(std::string_view who, std::size_t bytes);
  void take(std::size_t bytes) noexcept;
  void drop(Order::iterator oldest) noexcept;

  const Allocator allocator_{};
  Logger* const log_ = nullptr;
  mutable std::mutex mutex_;
  Order cached_;
  std::multimap<std::size_t, Order::iterator> by_size_;
  std::size_t in_use_ = 0, peak_in_use_ = 0, cached_bytes_ = 0;
};

/// This process's own memory.
LocalMemory& local_memory_of(Context& context) noexcept;

}  // namespace weft
