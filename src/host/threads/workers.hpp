// The threads of one rank, for loops over memory. The rank's Compute owns them. Only the thread that uses the
// Compute may use them.
#pragma once

#include <array>
#include <atomic>
#include <condition_variable>
#include <cstddef>
#include <cstdint>
#include <mutex>
#include <thread>
#include <vector>

#include "weft/host/compute.hpp"

namespace weft::threads {

/// compute.threads() - 1 threads, in addition to the caller, that sleep until there is work. If the system
/// refuses some of them, there are fewer, and weft logs one warning.
class Workers {
 public:
  explicit Workers(Compute& compute);
  ~Workers();
  Workers(const Workers&) = delete;
  Workers& operator=(const Workers&) = delete;

  /// Calls work(i) once for each i < count, on all threads, and returns when all calls are done. `work` must
  /// not throw.
  template <class Work>
  void run(std::size_t count, const Work& work) {
    run(count, &work, [](const void* w, std::size_t i) { (*static_cast<const Work*>(w))(i); });
  }

 private:
  using Call = void (*)(const void*, std::size_t);
  void run(std::size_t count, const void* work, Call call);
  void serve() noexcept;
  void take() noexcept;

  std::mutex mutex_;
  std::condition_variable begin_, end_;
  std::uint64_t round_ = 0;  // guarded by mutex_, like the next three members
  std::size_t busy_ = 0;     // threads that have not finished the round
  bool stop_ = false;
  std::size_t count_ = 0;
  const void* work_ = nullptr;
  Call call_ = nullptr;
  std::atomic<std::size_t> next_{0};
  std::vector<std::thread> threads_;
};

/// A part of one of several tensors.
struct Block {
  std::size_t tensor;
  std::int64_t begin, count;  ///< elements
};
constexpr std::int64_t kBlockElements = std::int64_t{1} << 16;
/// The number of blocks that are collected on the stack and then processed, before the next blocks are
/// collected.
constexpr std::size_t kBatch = 128;

/// Calls work(i) once for each i < count, on the threads of `compute` (null: on this one), and returns when
/// all calls are done. `elements`: the total number of elements. If there are few, it is not worth waking
/// threads.
template <class Work>
void run(Compute* compute, std::size_t count, std::int64_t elements, const Work& work) {
  if (compute != nullptr && compute->threads() > 1 && elements > kBlockElements)
    compute->attached<Workers>().run(count, work);
  else
    for (std::size_t i = 0; i < count; ++i) work(i);
}

/// Divides tensors of count_of(0), count_of(1), … elements into blocks of kBlockElements. They are always the
/// same blocks, so that results do not depend on the number of threads. Calls work(block) for each block, on
/// the threads of `compute` (null: on this one).
template <class CountOf, class Work>
void for_blocks(Compute* compute, std::size_t tensors, const CountOf& count_of, const Work& work) {
  std::array<Block, kBatch> batch;
  std::size_t n = 0;
  std::int64_t elements = 0;
  const auto finish = [&] {
    run(compute, n, elements, [&](std::size_t i) { work(batch[i]); });
    n = 0;
    elements = 0;
  };
  for (std::size_t t = 0; t < tensors; ++t) {
    const std::int64_t count = count_of(t);
    for (std::int64_t begin = 0; begin < count; begin += kBlockElements) {
      batch[n++] = {t, begin, count - begin < kBlockElements ? count - begin : kBlockElements};
      elements += batch[n - 1].count;
      if (n == kBatch) finish();
    }
  }
  finish();
}

}  // namespace weft::threads
