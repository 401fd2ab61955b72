// Matrix products, all of them oneDNN's, and the linear layer made of them.
#include <fmt/format.h>
#include <oneapi/dnnl/dnnl_debug.h>

#include <cstring>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"
#include "weft/base/error.hpp"

namespace weft::kernels {
namespace {

[[noreturn]] void throw_dnnl(const char* what, dnnl_status_t status) {
  throw Error(ErrorCode::system, fmt::format("{}: oneDNN failed with {}", what, dnnl_status2str(status)));
}

PreparedProduct prepare(KernelContext::State& state, bool a_transposed, bool b_transposed, std::int64_t m,
                        std::int64_t n, std::int64_t k, bool accumulate) {
  using dnnl::memory;
  const memory::desc a({m, k}, memory::data_type::bf16,
                       a_transposed ? memory::dims{1, m} : memory::dims{k, 1});
  const memory::desc b({k, n}, memory::data_type::bf16,
                       b_transposed ? memory::dims{1, k} : memory::dims{n, 1});
  const memory::desc c({m, n}, memory::data_type::f32, memory::dims{n, 1});
  dnnl::primitive_attr attributes;
  if (accumulate) {
    dnnl::post_ops after;
    after.append_sum(1.0f);
    attributes.set_post_ops(after);
  }
  const dnnl::matmul::primitive_desc description(dnnl::matmul::desc(a, b, c), attributes, state.engine);
  PreparedProduct p{dnnl::matmul(description),
                    memory(a, state.engine, nullptr),
                    memory(b, state.engine, nullptr),
                    memory(c, state.engine, nullptr),
                    {}};
  p.arguments = {{DNNL_ARG_SRC, p.a}, {DNNL_ARG_WEIGHTS, p.b}, {DNNL_ARG_DST, p.c}};
  return p;
}

// partial = the sum of rows of x. x: (rows, dim), partial: (dim)
WEFT_CPU_CLONES void sum_rows(const float* x, float* partial, std::int64_t rows, std::int64_t dim) {
  std::memset(partial, 0, sizeof(float) * static_cast<std::size_t>(dim));
  for (std::int64_t row = 0; row < rows; ++row) {
    const float* from = x + row * dim;
#pragma GCC ivdep
    for (std::int64_t i = 0; i < dim; ++i) partial[i] += from[i];
  }
}

WEFT_CPU_CLONES void add_rows(const float* partials, float* out, std::int64_t blocks, std::int64_t dim,
                              std::int64_t begin, std::int64_t end) {
  for (std::int64_t block = 0; block < blocks; ++block) {
    const float* from = partials + block * dim;
#pragma GCC ivdep
    for (std::int64_t i = begin; i < end; ++i) out[i] += from[i];
  }
}

}  // namespace

void add_partial_rows(KernelContext::State& state, const float* partials, float* out, std::int64_t blocks,
                      std::int64_t dim) {
  constexpr std::int64_t kColumns = 1024;
  parallel_blocks(state, dim, kColumns, [&](std::int64_t begin, std::int64_t end) {
    add_rows(partials, out, blocks, dim, begin, end);
  });
}

void strided_matmul(Stored a_stored, Stored b_stored, std::int64_t m, std::int64_t n, std::int64_t k,
                    float alpha, const float* a, std::int64_t lda, const float* b, std::int64_t ldb,
                    float beta, float* c, std::int64_t ldc) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (beta == 1.0f) return;
    for (std::int64_t i = 0; i < m; ++i) {
      for (std::int64_t j = 0; j < n; ++j) c[i * ldc + j] = beta == 0.0f ? 0.0f : beta * c[i * ldc + j];
    }
    return;
  }
  const dnnl_status_t status =
      dnnl_sgemm(a_stored == Stored::transposed ? 'T' : 'N', b_stored == Stored::transposed ? 'T' : 'N', m, n,
                 k, alpha, a, lda, b, ldb, beta, c, ldc);
  if (status != dnnl_success) throw_dnnl("matmul", status);
}

void matmul(KernelContext& ctx, const float* a, Stored a_stored, const float* b, Stored b_stored, float* c,
            std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  const ThreadCountGuard guard(ctx.threads());
  strided_matmul(a_stored, b_stored, m, n, k, 1.0f, a, a_stored == Stored::transposed ? m : k, b,
                 b_stored == Stored::transposed ? k : n, accumulate ? 1.0f : 0.0f, c, n);
}

void matmul(KernelContext& ctx, const bf16* a, Stored a_stored, const bf16* b, Stored b_stored, float* c,
            std::int64_t m, std::int64_t n, std::int64_t k, bool accumulate) {
  if (m == 0 || n == 0) return;
  if (k == 0) {
    if (!accumulate) fill(ctx, c, 0.0f, m * n);
    return;
  }
  KernelContext::State& state = ctx.state();
  const ThreadCountGuard guard(state.threads);
  const bool a_transposed = a_stored == Stored::transposed, b_transposed = b_stored == Stored::transposed;
  const auto key = std::make_tuple(m, n, k, a_transposed, b_transposed, accumulate);
  try {
    auto at = state.prepared.find(key);
    if (at == state.prepared.end()) {
      at = state.prepared.emplace(key, prepare(state, a_transposed, b_transposed, m, n, k, accumulate)).first;
    }
    PreparedProduct& p = at->second;
    p.a.set_data_handle(const_cast<bf16*>(a));  // the library reads it only
    p.b.set_data_handle(const_cast<bf16*>(b));
    p.c.set_data_handle(c);
    p.product.execute(state.stream, p.arguments);
    state.stream.wait();
  } catch (const dnnl::error& e) {
    throw_dnnl("matmul", e.status);
  }
}

void linear_forward(KernelContext& ctx, const float* x, const float* w, const float* bias, float* y,
                    LinearShape s) {
  if (bias != nullptr) {
    parallel_blocks(ctx.state(), s.tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
      for (std::int64_t t = begin; t < end; ++t) std::copy_n(bias, s.out, y + t * s.out);
    });
  }
  matmul(ctx, x, Stored::plain, w, Stored::transposed, y, s.tokens, s.out, s.in, bias != nullptr);
}

void linear_backward_input(KernelContext& ctx, const float* dy, const float* w, float* dx, LinearShape s) {
  matmul(ctx, dy, Stored::plain, w, Stored::plain, dx, s.tokens, s.in, s.out, false);
}

void linear_backward_weight(KernelContext& ctx, const float* dy, const float* x, float* dw, float* dbias,
                            LinearShape s) {
  matmul(ctx, dy, Stored::transposed, x, Stored::plain, dw, s.out, s.in, s.tokens, true);
  if (dbias == nullptr) return;
  KernelContext::State& state = ctx.state();
  const std::int64_t blocks = blocks_of(s.tokens, kRowBlock);
  float* partials = state.scratch(blocks * s.out);
  parallel_blocks(state, s.tokens, kRowBlock, [&](std::int64_t begin, std::int64_t end) {
    sum_rows(dy + begin * s.out, partials + begin / kRowBlock * s.out, end - begin, s.out);
  });
  add_partial_rows(state, partials, dbias, blocks, s.out);
}

}  // namespace weft::kernels
