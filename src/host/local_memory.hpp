// Memory::local: ordinary pages of this process. Small blocks come from malloc. Others are kept for the next
// allocation of that size: the first touch of a page is expensive, and training asks for the same sizes in every step.
// Large ones are mapped, in huge pages where possible. Thread-safe.
#pragma once

#include <cstddef>
#include <list>
#include <map>
#include <mutex>
#include <vector>

namespace weft {

class LocalMemory {
 public:
  static constexpr std::size_t kAlignment = 64;
  /// Blocks of more bytes are cached.
  static constexpr std::size_t kSmallBytes = std::size_t{4} << 10;
  /// Blocks of at least so many bytes, rounded up, are mapped.
  static constexpr std::size_t kMappedBytes = std::size_t{1} << 20;

  LocalMemory() = default;
  ~LocalMemory();
  LocalMemory(const LocalMemory&) = delete;
  LocalMemory& operator=(const LocalMemory&) = delete;

  /// Uninitialised, 64-byte aligned; null where the system refuses.
  void* allocate(std::size_t bytes) noexcept;
  /// `bytes` as given to allocate().
  void release(void* block, std::size_t bytes) noexcept;

  /// Sums over blocks of more than kSmallBytes, with their sizes rounded up.
  struct Counters {
    std::size_t in_use_bytes, cached_bytes;
  };
  Counters counters() const;

 private:
  struct Cached {
    void* block;
    std::size_t bytes;
  };
  using Order = std::list<Cached>;  // the one freed first comes first

  void take(std::size_t bytes) noexcept;
  void drop(Order::iterator oldest) noexcept;

  mutable std::mutex mutex_;
  Order cached_;
  std::multimap<std::size_t, Order::iterator> by_size_;
  std::size_t in_use_ = 0, peak_in_use_ = 0, cached_bytes_ = 0;
};

}  // namespace weft
