// The CPU's part of a KernelContext: scratch memory, the number of threads. One thread at a time uses a context.
#include "nn/kernels/cpu_context.hpp"

#include <omp.h>

namespace weft::kernels {
namespace {

// With AVX-512 oneDNN is as fast as the CPU is; without it, it is not.
Products best_products() {
  static const Products best =
      gemm::has_avx2() && !cpu::library_has_avx512() ? Products::own : Products::onednn;
  return best;
}

}  // namespace

KernelContext::State::State(int thread_count)
    : threads(thread_count),
      products(best_products()),
      engine(dnnl::engine::kind::cpu, 0),
      stream(engine),
      per_thread(static_cast<std::size_t>(thread_count)),
      per_product(static_cast<std::size_t>(thread_count)) {}

float* KernelContext::State::scratch(std::int64_t floats) {
  if (shared.size() < static_cast<std::size_t>(floats)) shared.resize(static_cast<std::size_t>(floats));
  return shared.data();
}

double* KernelContext::State::scratch_f64(std::int64_t doubles) {
  if (shared_f64.size() < static_cast<std::size_t>(doubles))
    shared_f64.resize(static_cast<std::size_t>(doubles));
  return shared_f64.data();
}

void KernelContext::State::reserve_per_thread(std::int64_t floats) {
  for (auto& scratch : per_thread) {
    if (scratch.size() < static_cast<std::size_t>(floats)) scratch.resize(static_cast<std::size_t>(floats));
  }
}

void KernelContext::State::reserve_products(std::int64_t n, std::int64_t k) {
  if (products != Products::own) return;
  const auto floats = static_cast<std::size_t>(gemm::avx2_scratch(n, k));
  for (auto& scratch : per_product)
    if (scratch.size() < floats) scratch.resize(floats);
}

namespace cpu {

bool library_has_avx512() {
  return (static_cast<unsigned>(dnnl::get_effective_cpu_isa()) & dnnl_cpu_isa_avx512_core) ==
         dnnl_cpu_isa_avx512_core;
}

// The number of threads that the matrix library uses is an OpenMP setting of each thread, so ranks that are
// threads do not change each other's, and a context may move to another thread.
ThreadCountGuard::ThreadCountGuard(int threads) : before_(omp_get_max_threads()) {
  omp_set_num_threads(threads);
}
ThreadCountGuard::~ThreadCountGuard() { omp_set_num_threads(before_); }

int this_thread_number() { return omp_get_thread_num(); }

}  // namespace cpu

}  // namespace weft::kernels
