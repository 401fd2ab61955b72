// The state of a KernelContext of the CPU. Private to cpu_*.cpp and to tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <vector>

#include "nn/kernels/bf16/packed_weights.hpp"
#include "nn/kernels/gemm/gemm.hpp"
#include "nn/kernels/scratch.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels {

struct KernelContext::State {
  /// `context` may be null; otherwise it must outlive this object.
  State(int thread_count, Context* context);

  /// Scratch memory for the whole call. It is valid until the next request. Its contents are undefined.
  float* scratch(std::int64_t floats);
  double* scratch_f64(std::int64_t doubles);
  /// Like scratch(), for operands in bf16 that are widened for a kernel of f32. That kernel may call
  /// scratch().
  float* scratch_widened(std::int64_t floats);
  /// Scratch memory of one of the threads of a parallel_for. Call reserve_per_thread before it.
  void reserve_per_thread(std::int64_t floats);
  float* thread_scratch(int thread) { return per_thread[static_cast<std::size_t>(thread)].floats(); }

  /// Like reserve_per_thread(), for products that a thread computes, of up to n columns and up to this k.
  void reserve_products(const gemm::Kernel& kernel, std::int64_t n, std::int64_t k);
  float* product_scratch(int thread) { return per_product[static_cast<std::size_t>(thread)].floats(); }

  int threads;
  Context* context;
  const gemm::Kernel *f32, *bf16;  // the best products that this CPU has; tests choose others
  PackedWeights packed;
  Scratch shared, shared_f64, widened;
  std::vector<Scratch> per_thread, per_product;
};

}  // namespace weft::kernels
