#include "nn/kernels/attention/block_products.hpp"

#include "nn/kernels/gemm/gemm.hpp"

namespace weft::kernels::cpu {
namespace {

void copy(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
          std::int64_t ld) noexcept {
  for (std::int64_t i = 0; i < rows; ++i) std::copy_n(from + i * stride, columns, to + i * ld);
}

void transpose(const float* from, std::int64_t stride, std::int64_t rows, std::int64_t columns, float* to,
               std::int64_t ld) noexcept {
  for (std::int64_t i = 0; i < rows; ++i)
    for (std::int64_t j = 0; j < columns; ++j) to[j * ld + i] = from[i * stride + j];
}

// strided_matmul computes the products.
constexpr blocks::Kernel kPlain{1, &copy, &copy, &transpose, nullptr};

// Tests may choose the products of another instruction set.
const blocks::Kernel& best(const KernelContext::State& state, bool bf16) {
  if (gemm::avx512() == nullptr || state.f32 != gemm::avx512()) return kPlain;
  return bf16 && blocks::avx512_bf16() != nullptr ? *blocks::avx512_bf16() : *blocks::avx512();
}

}  // namespace

BlockProducts::BlockProducts(KernelContext::State& state, bool bf16, std::int64_t n, std::int64_t k)
    : state_(state), kernel_(best(state, bf16)) {
  if (kernel_.multiply == nullptr) state.reserve_products(*state.f32, n, k);
}

void BlockProducts::multiply(int thread, const blocks::Product& p) const {
  if (kernel_.multiply != nullptr) return kernel_.multiply(p);
  const bool columns = p.a_row_step == 1 && p.a_step != 1;
  strided_matmul(state_, thread, columns ? Stored::transposed : Stored::plain, Stored::plain, p.m, p.n, p.k,
                 p.alpha, p.a, columns ? p.a_step : p.a_row_step, p.b, p.ldb, p.accumulate, p.c, p.ldc);
}

}  // namespace weft::kernels::cpu
