// What a KernelContext holds, and how a kernel spreads its blocks over the context's threads. Private to
// cpu_*.cpp.
#pragma once

#include <dnnl.hpp>

#include <algorithm>
#include <compare>
#include <cstdint>
#include <exception>
#include <map>
#include <type_traits>
#include <vector>

#include "weft/nn/kernels.hpp"

namespace weft::kernels {

/// What the matrix library prepares a bf16 product for.
struct ProductKey {
  std::int64_t m, n, k, lda, ldb, ldc;
  bool a_transposed, b_transposed, accumulate;
  auto operator<=>(const ProductKey&) const = default;
};

/// A prepared bf16 product: the library's code and the descriptions of what it is run on.
struct PreparedProduct {
  dnnl::matmul product;
  dnnl::memory::desc a, b, c, scratch;
};

struct KernelContext::State {
  explicit State(int thread_count);

  /// Scratch memory of the whole call; valid until the next request. Contents are whatever was there.
  float* scratch(std::int64_t floats);
  double* scratch_f64(std::int64_t doubles);
  /// Scratch memory of one of the threads of a parallel_for. Call reserve_per_thread before it.
  void reserve_per_thread(std::int64_t floats);
  float* thread_scratch(int thread) { return per_thread[static_cast<std::size_t>(thread)].data(); }

  int threads;
  dnnl::engine engine;
  dnnl::stream stream;
  std::map<ProductKey, PreparedProduct> prepared;
  std::vector<float> shared;
  std::vector<double> shared_f64;
  std::vector<std::vector<float>> per_thread;
};

namespace cpu {

/// While it lives, the matrix library uses `threads` threads for calls of this thread.
class ThreadCountGuard {
 public:
  explicit ThreadCountGuard(int threads);
  ~ThreadCountGuard();
  ThreadCountGuard(const ThreadCountGuard&) = delete;
  ThreadCountGuard& operator=(const ThreadCountGuard&) = delete;

 private:
  int before_;
};

int this_thread_number();

/// Calls body(task, thread) for task in [0, tasks), thread in [0, threads). Which thread gets a task must not
/// matter to the result. The first exception of any task is rethrown here.
template <class Body>
void parallel_for(KernelContext::State& state, std::int64_t tasks, Body&& body) {
  const int threads = static_cast<int>(std::min<std::int64_t>(state.threads, tasks));
  if (threads <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  std::exception_ptr failure;
#pragma omp parallel for num_threads(threads) schedule(static)
  for (std::int64_t task = 0; task < tasks; ++task) {
    try {
      body(task, this_thread_number());
    } catch (...) {
#pragma omp critical(weft_kernels_failure)
      if (!failure) failure = std::current_exception();
    }
  }
  if (failure) std::rethrow_exception(failure);
}

/// Elements of one task of an element-wise kernel, and of one partial sum: 64 KiB of f32, which stays in the
/// cache while the task costs far more than handing it to a thread.
inline constexpr std::int64_t kElementBlock = std::int64_t{1} << 14;
/// Rows of one partial sum where rows are added up.
inline constexpr std::int64_t kRowBlock = 64;

constexpr std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

/// Calls body(begin, end) for consecutive ranges of [0, size), `block` long but for the last.
template <class Body>
void parallel_blocks(KernelContext::State& state, std::int64_t size, std::int64_t block, Body&& body) {
  parallel_for(state, blocks_of(size, block),
               [&](std::int64_t task, int) { body(task * block, std::min(size, (task + 1) * block)); });
}

/// c = alpha a b + beta c in f32, on matrices whose rows are lda, ldb, ldc apart as they are stored; the
/// matrix library's product with the cases it leaves open (an empty k) settled. Runs on the calling thread's
/// current number of threads.
void strided_matmul(Stored a_stored, Stored b_stored, std::int64_t m, std::int64_t n, std::int64_t k,
                    float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                    float beta, float* c, std::int64_t ldc);

/// out += the sum over blocks of partials, in order. partials: (blocks, dim), out: (dim).
void add_partial_rows(KernelContext::State& state, const float* partials, float* out, std::int64_t blocks,
                      std::int64_t dim);

// The kernels of the CPU, declared from the table.
#define WEFT_DECLARE(name) std::remove_pointer_t<decltype(KernelTable::name)> name;
WEFT_KERNELS(WEFT_DECLARE)
#undef WEFT_DECLARE

}  // namespace cpu

}  // namespace weft::kernels
