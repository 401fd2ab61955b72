// The CPU's part of a KernelContext: scratch memory, the number of threads. Only one thread at a time may use
// a context.
#include "nn/kernels/cpu_context.hpp"

#include <omp.h>

#include <new>

namespace weft::kernels {
std::byte* Scratch::reserve(Context* context, std::size_t bytes) {
  constexpr std::align_val_t kAlignment{64};
  if (memory_ && memory_.bytes() >= bytes) return memory_.data();
  memory_ = {};  // before there are two
  if (context != nullptr) {
    memory_ = Storage::allocate(*context, Memory::local, bytes);
  } else {
    const std::shared_ptr<void> owner(::operator new(bytes, kAlignment),
                                      [](void* p) { ::operator delete(p, kAlignment); });
    memory_ = Storage::adopt(owner.get(), bytes, owner);
  }
  return memory_.data();
}

KernelContext::State::State(int thread_count, Context* context_in)
    : threads(thread_count),
      context(context_in),
      f32(gemm::best_f32()),
      bf16(gemm::best_bf16()),
      packed(context_in),
      per_thread(static_cast<std::size_t>(thread_count)),
      per_product(static_cast<std::size_t>(thread_count)) {}

float* KernelContext::State::scratch(std::int64_t floats) {
  return reinterpret_cast<float*>(shared.reserve(context, static_cast<std::size_t>(floats) * sizeof(float)));
}

float* KernelContext::State::scratch_widened(std::int64_t floats) {
  return reinterpret_cast<float*>(widened.reserve(context, static_cast<std::size_t>(floats) * sizeof(float)));
}

double* KernelContext::State::scratch_f64(std::int64_t doubles) {
  return reinterpret_cast<double*>(
      shared_f64.reserve(context, static_cast<std::size_t>(doubles) * sizeof(double)));
}

void KernelContext::State::reserve_per_thread(std::int64_t floats) {
  for (Scratch& scratch : per_thread)
    scratch.reserve(context, static_cast<std::size_t>(floats) * sizeof(float));
}

void KernelContext::State::reserve_products(const gemm::Kernel& kernel, std::int64_t n, std::int64_t k) {
  const std::size_t bytes = static_cast<std::size_t>(kernel.scratch(n, k)) * sizeof(float);
  for (Scratch& scratch : per_product) scratch.reserve(context, bytes);
}

namespace cpu {

int this_thread_number() { return omp_get_thread_num(); }

}  // namespace cpu

}  // namespace weft::kernels
