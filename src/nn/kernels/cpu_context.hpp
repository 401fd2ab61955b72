// How a kernel distributes its blocks over the context's threads, and what the kernels share. Private to
// cpu_*.cpp.
#pragma once

#include <algorithm>
#include <cstdint>
#include <exception>

#include "nn/kernels/cpu_state.hpp"

namespace weft::kernels {

namespace cpu {

int this_thread_number();

/// Whether all tasks take equal time, or each task is given to the next free thread.
enum class Tasks : unsigned char { equal, unequal };

/// Calls body(task, thread) for task in [0, tasks), thread in [0, threads). The result must not depend on
/// which thread gets a task. It rethrows the first exception of any task.
template <class Body>
void parallel_for(KernelContext::State& state, std::int64_t tasks, Body&& body, Tasks kind = Tasks::equal) {
  const int threads = static_cast<int>(std::min<std::int64_t>(state.threads, tasks));
  if (threads <= 1) {
    for (std::int64_t task = 0; task < tasks; ++task) body(task, 0);
    return;
  }
  std::exception_ptr failure;
  const auto run = [&](std::int64_t task) {
    try {
      body(task, this_thread_number());
    } catch (...) {
#pragma omp critical(weft_kernels_failure)
      if (!failure) failure = std::current_exception();
    }
  };
  if (kind == Tasks::equal) {
#pragma omp parallel for num_threads(threads) schedule(static)
    for (std::int64_t task = 0; task < tasks; ++task) run(task);
  } else {
#pragma omp parallel for num_threads(threads) schedule(dynamic)
    for (std::int64_t task = 0; task < tasks; ++task) run(task);
  }
  if (failure) std::rethrow_exception(failure);
}

/// The number of elements in one task of an element-wise kernel, and in one partial sum. It is 64 KiB of f32.
/// These stay in the cache, and the task takes far longer than passing it to a thread.
inline constexpr std::int64_t kElementBlock = std::int64_t{1} << 14;
/// The number of rows in one partial sum of a sum over rows.
inline constexpr std::int64_t kRowBlock = 64;

constexpr std::int64_t blocks_of(std::int64_t size, std::int64_t block) { return (size + block - 1) / block; }

/// Calls body(begin, end) for consecutive ranges of [0, size), `block` long except the last.
template <class Body>
void parallel_blocks(KernelContext::State& state, std::int64_t size, std::int64_t block, Body&& body) {
  parallel_for(state, blocks_of(size, block),
               [&](std::int64_t task, int) { body(task * block, std::min(size, (task + 1) * block)); });
}

/// c = alpha a b, or c += alpha a b, in f32, on matrices in their stored form, whose rows are lda, ldb, ldc
/// apart. One of the threads of a parallel_for calls it, after reserve_products(*state.f32, …).
void strided_matmul(KernelContext::State& state, int thread, Stored a_stored, Stored b_stored, std::int64_t m,
                    std::int64_t n, std::int64_t k, float alpha, const float* a, std::int64_t lda,
                    const float* b, std::int64_t ldb, bool accumulate, float* c, std::int64_t ldc);

/// out += the sum over blocks of partials, in order. partials: (blocks, dim), out: (dim).
void add_partial_rows(KernelContext::State& state, const float* partials, float* out, std::int64_t blocks,
                      std::int64_t dim);

// The kernels of the CPU, declared from the list. A kernel of two elements is a template. The file that
// defines it instantiates it, WEFT_KERNEL_OF_BOTH(add), or each element has its own code, as stated below.
#define WEFT_PARAMETERS(...) __VA_ARGS__
#define WEFT_KERNEL(name, ...) detail::KernelOf::name<float> name;
#define WEFT_KERNEL_F32_BF16(name, parameters, ...) \
  template <class T>                                \
  void name(KernelContext& ctx, WEFT_PARAMETERS parameters);
#include "weft/nn/kernels.inl"
#undef WEFT_PARAMETERS
#define WEFT_KERNEL_OF_BOTH(name)                     \
  template detail::KernelOf::name<float> name<float>; \
  template detail::KernelOf::name<bf16> name<bf16>
#define WEFT_KERNEL_OF_EACH(name)            \
  template <>                                \
  detail::KernelOf::name<float> name<float>; \
  template <>                                \
  detail::KernelOf::name<bf16> name<bf16>
WEFT_KERNEL_OF_EACH(matmul);
WEFT_KERNEL_OF_EACH(tree_matmul);
WEFT_KERNEL_OF_EACH(linear_forward);
WEFT_KERNEL_OF_EACH(embedding_forward);
WEFT_KERNEL_OF_EACH(attention_forward);
WEFT_KERNEL_OF_EACH(attention_backward);
WEFT_KERNEL_OF_EACH(full_attention_forward);
WEFT_KERNEL_OF_EACH(full_attention_backward);
#undef WEFT_KERNEL_OF_EACH

}  // namespace cpu

}  // namespace weft::kernels
