// The CPU's part of a KernelContext: scratch memory, the number of threads. Only one thread at a time may use
// a context.
#include "nn/kernels/cpu_context.hpp"

#include <omp.h>

#include <new>

#include "base/cpu/isa.hpp"
#include "nn/kernels/bf16/library_isa.hpp"

namespace weft::kernels {
namespace {

const gemm::Kernel* best_own() {
  static const gemm::Kernel* const best = gemm::avx512() != nullptr ? gemm::avx512() : gemm::avx2();
  return best;
}

// weft's own products, if there are any for this CPU: oneDNN's bits depend on how a product is divided among
// the threads.
Products best_f32() { return best_own() != nullptr ? Products::own : Products::onednn; }
// oneDNN is twice as fast if the CPU multiplies bf16; on other CPUs these are f32 products.
Products best_bf16() {
  return best_own() != nullptr && cpu_isa() < CpuIsa::avx512_bf16 ? Products::own : Products::onednn;
}

// The limit of oneDNN's instructions is set before any oneDNN object is made.
dnnl::engine make_engine() {
  (void)cpu::library_isa();
  return {dnnl::engine::kind::cpu, 0};
}

}  // namespace

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
      own(best_own()),
      f32(best_f32()),
      bf16(best_bf16()),
      engine(make_engine()),
      stream(engine),
      packed(context_in),
      per_thread(static_cast<std::size_t>(thread_count)),
      per_product(static_cast<std::size_t>(thread_count)) {}

float* KernelContext::State::scratch(std::int64_t floats) {
  return reinterpret_cast<float*>(shared.reserve(context, static_cast<std::size_t>(floats) * sizeof(float)));
}

double* KernelContext::State::scratch_f64(std::int64_t doubles) {
  return reinterpret_cast<double*>(
      shared_f64.reserve(context, static_cast<std::size_t>(doubles) * sizeof(double)));
}

void KernelContext::State::reserve_per_thread(std::int64_t floats) {
  for (Scratch& scratch : per_thread)
    scratch.reserve(context, static_cast<std::size_t>(floats) * sizeof(float));
}

void KernelContext::State::reserve_products(std::int64_t n, std::int64_t k) {
  if (own == nullptr) return;
  const std::size_t bytes = static_cast<std::size_t>(own->scratch(n, k)) * sizeof(float);
  for (Scratch& scratch : per_product) scratch.reserve(context, bytes);
}

namespace cpu {

// The number of threads that the matrix library uses is an OpenMP setting of each thread. So ranks that are
// threads do not change each other's number, and a context may move to another thread.
ThreadCountGuard::ThreadCountGuard(int threads) : before_(omp_get_max_threads()) {
  omp_set_num_threads(threads);
}
ThreadCountGuard::~ThreadCountGuard() { omp_set_num_threads(before_); }

int this_thread_number() { return omp_get_thread_num(); }

}  // namespace cpu

}  // namespace weft::kernels
