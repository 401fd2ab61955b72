#include "host/local_memory.hpp"

#include <fmt/format.h>
#include <sys/mman.h>

#include <bit>
#include <cerrno>
#include <cstdint>
#include <cstdlib>
#include <string>

#include "base/errors/caught.hpp"
#include "base/poison.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

constexpr std::size_t kHugePage = std::size_t{2} << 20;

std::size_t round_up(std::size_t n, std::size_t step) { return (n + step - 1) / step * step; }

// The size that an Allocator gets: C's aligned_alloc requires a multiple of the alignment.
std::size_t asked_bytes(std::size_t bytes) {
  return round_up(bytes > 0 ? bytes : 1, LocalMemory::kAlignment);
}

// Sizes are rounded up to eighths of a power of two, so that blocks of nearly equal sizes are
// interchangeable.
std::size_t size_class(std::size_t bytes) { return round_up(bytes, std::bit_floor(bytes) / 8); }

// Returns pages that begin at a multiple of the size of a huge page. It maps one huge page more than needed,
// and unmaps the surplus.
void* map_pages(std::size_t bytes) noexcept {
  if (bytes > SIZE_MAX - kHugePage) return nullptr;
  void* got = ::mmap(nullptr, bytes + kHugePage, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
  if (got == MAP_FAILED) return nullptr;
  const auto begin = reinterpret_cast<std::uintptr_t>(got), aligned = round_up(begin, kHugePage);
  if (aligned > begin) ::munmap(got, aligned - begin);
  ::munmap(reinterpret_cast<void*>(aligned + bytes), kHugePage - (aligned - begin));
  void* block = reinterpret_cast<void*>(aligned);
  if (bytes >= kHugePage) ::madvise(block, bytes, MADV_HUGEPAGE);  // only a hint: small pages work as well
  return block;
}

// Returns a block of a size class that is not in the cache; null if the system refuses.
void* new_block(std::size_t rounded) noexcept {
  return rounded < LocalMemory::kMappedBytes ? std::aligned_alloc(LocalMemory::kAlignment, rounded)
                                             : map_pages(rounded);
}
void give_back(void* block, std::size_t rounded) noexcept {
  if (rounded < LocalMemory::kMappedBytes)
    std::free(block);
  else
    ::munmap(block, rounded);
}

}  // namespace

LocalMemory::~LocalMemory() {
  while (!cached_.empty()) drop(cached_.begin());
}

void LocalMemory::refused(std::string_view who, std::size_t bytes) {
  throw_errno(fmt::format("{}: {} bytes of local memory cannot be allocated", who, bytes), ENOMEM);
}

void* LocalMemory::from_allocator(std::string_view who, std::size_t bytes) {
  if (bytes > PTRDIFF_MAX - kAlignment) refused(who, bytes);
  const std::size_t rounded = asked_bytes(bytes);
  const auto failed = [&](const std::string& what) {
    return Error(
        ErrorCode::system,
        fmt::format(
            "{}: {} bytes of local memory cannot be allocated: the host's allocator, asked for {} bytes "
            "aligned to {}, {}",
            who, bytes, rounded, kAlignment, what));
  };
  void* block = nullptr;
  try {
    block = allocator_.allocate(allocator_.data, rounded, kAlignment);
  } catch (...) {
    throw failed(fmt::format("threw: {}", caught_words()));
  }
  if (block == nullptr) throw failed("gave none");
  if (reinterpret_cast<std::uintptr_t>(block) % kAlignment != 0) {
    to_allocator(block, rounded);
    throw failed(fmt::format("gave {}, which is not aligned in this way", block));
  }
  return block;
}

void LocalMemory::to_allocator(void* block, std::size_t rounded) noexcept {
  try {
    allocator_.deallocate(allocator_.data, block, rounded, kAlignment);
  } catch (...) {
    try {  // the caller may hold locks
      log_->write_later(LogLayer::host, LogLevel::warning,
                        fmt::format("local memory: the host's allocator, given {} bytes back, threw: {}",
                                    rounded, caught_words()));
    } catch (...) {}  // no memory for the line
  }
}

void* LocalMemory::own(std::size_t bytes) noexcept {
  if (bytes <= kSmallBytes) return std::aligned_alloc(kAlignment, round_up(bytes ? bytes : 1, kAlignment));
  if (bytes > SIZE_MAX / 2) return nullptr;
  const std::size_t rounded = size_class(bytes);
  {
    const std::lock_guard lock(mutex_);
    if (const auto found = by_size_.find(rounded); found != by_size_.end()) {
      void* block = found->second->block;
      cached_.erase(found->second);
      by_size_.erase(found);
      cached_bytes_ -= rounded;
      take(rounded);
      unpoison(block, bytes);
      return block;
    }
  }
  void* block = new_block(rounded);
  const std::lock_guard lock(mutex_);
  if (block == nullptr) {  // cached blocks of other sizes may occupy the memory that is missing
    while (!cached_.empty()) drop(cached_.begin());
    block = new_block(rounded);
    if (block == nullptr) return nullptr;
  }
  take(rounded);
  poison(static_cast<std::byte*>(block) + bytes, rounded - bytes);
  return block;
}

void LocalMemory::take(std::size_t bytes) noexcept {
  in_use_ += bytes;
  if (in_use_ > peak_in_use_) peak_in_use_ = in_use_;
}

void LocalMemory::release(void* block, std::size_t bytes) noexcept {
  if (allocator_.allocate != nullptr) [[unlikely]]
    return to_allocator(block, asked_bytes(bytes));
  if (bytes <= kSmallBytes) return std::free(block);
  const std::size_t rounded = size_class(bytes);
  unpoison(block, rounded);
  const std::lock_guard lock(mutex_);
  in_use_ -= rounded;
  try {
    cached_.push_back({block, rounded});
    try {
      by_size_.emplace(rounded, std::prev(cached_.end()));
    } catch (...) {
      cached_.pop_back();
      throw;
    }
  } catch (...) {  // no memory for the entry: the block goes back at once
    give_back(block, rounded);
    return;
  }
  cached_bytes_ += rounded;
  poison(block, rounded);
  // The cache never holds more than the largest amount that was in use at once. So a program whose sizes keep
  // changing does not grow without bound.
  while (cached_bytes_ > peak_in_use_) drop(cached_.begin());
}

void LocalMemory::drop(Order::iterator oldest) noexcept {
  auto [entry, end] = by_size_.equal_range(oldest->bytes);
  while (entry != end && entry->second != oldest) ++entry;
  if (entry != end) by_size_.erase(entry);
  unpoison(oldest->block, oldest->bytes);
  give_back(oldest->block, oldest->bytes);
  cached_bytes_ -= oldest->bytes;
  cached_.erase(oldest);
}

LocalMemory::Counters LocalMemory::counters() const {
  const std::lock_guard lock(mutex_);
  return {in_use_, cached_bytes_};
}

}  // namespace weft
