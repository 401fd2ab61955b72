// Exact mode needs kernels whose bits do not depend on the cuts of rows, columns, elements and heads. This
// check runs on the CPU that runs the model, once, in some milliseconds.
#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "base/cpu/isa.hpp"
#include "base/mutant.hpp"
#include "weft/base/error.hpp"
#include "weft/base/random.hpp"
#include "weft/nn/exact.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"

namespace weft {
namespace {

using kernels::KernelContext;
using kernels::Stored;

std::vector<float> random_floats(std::int64_t count, const char* name) {
  std::vector<float> x(static_cast<std::size_t>(count));
  RandomStream(1, name).normal(0, count, x.data());
  return x;
}

std::vector<bf16> rounded(KernelContext& ctx, const std::vector<float>& x) {
  std::vector<bf16> y(x.size());
  kernels::round_to_bf16(ctx, x.data(), y.data(), static_cast<std::int64_t>(x.size()));
  return y;
}

void expect_bits(std::vector<float> whole, const std::vector<float>& parts, const std::string& what,
                 std::string_view cut) {
  if (WEFT_MUTANT("exact_kernel_differs")) whole[whole.size() / 2] += 1;
  if (std::memcmp(whole.data(), parts.data(), whole.size() * sizeof(float)) == 0) return;
  throw Error(ErrorCode::unsupported,
              fmt::format("exact: {} has other bits if {} are cut in two, on this CPU with {}; exact mode "
                          "needs kernels that give the same bits for all cuts",
                          what, cut, name_of(cpu_isa())));
}

// a: (m, k), b: (n, k). The product of rows and of columns is computed in two parts each.
template <class T>
void check_product(KernelContext& ctx, const std::vector<T>& a, const std::vector<T>& b, std::int64_t m,
                   std::int64_t n, std::int64_t k, const char* dtype) {
  const std::string what = fmt::format("the product {} x {} x {} in {}", m, n, k, dtype);
  std::vector<float> whole(static_cast<std::size_t>(m * n)), parts(whole);
  kernels::tree_matmul(ctx, a.data(), Stored::plain, b.data(), Stored::transposed, whole.data(), m, n, k, {});
  const std::int64_t rows = m / 2 + 1, columns = n / 2 + 1;
  for (const std::int64_t first : {std::int64_t{0}, rows})
    kernels::tree_matmul(ctx, a.data() + first * k, Stored::plain, b.data(), Stored::transposed,
                         parts.data() + first * n, first == 0 ? rows : m - rows, n, k, {});
  expect_bits(whole, parts, what, "rows");
  for (const std::int64_t first : {std::int64_t{0}, columns}) {
    const std::int64_t count = first == 0 ? columns : n - columns;
    std::vector<float> part(static_cast<std::size_t>(m * count));
    kernels::tree_matmul(ctx, a.data(), Stored::plain, b.data() + first * k, Stored::transposed, part.data(),
                         m, count, k, {});
    for (std::int64_t i = 0; i < m; ++i)
      std::copy_n(part.begin() + i * count, count, parts.begin() + i * n + first);
  }
  expect_bits(whole, parts, what, "columns");
}

void check_products(KernelContext& ctx) {
  struct Sizes {
    std::int64_t m, n, k;
  };
  for (const Sizes s : {Sizes{37, 45, 24}, Sizes{5, 70, 296}, Sizes{130, 33, 104}}) {
    const std::vector<float> a = random_floats(s.m * s.k, "a"), b = random_floats(s.n * s.k, "b");
    check_product(ctx, a, b, s.m, s.n, s.k, "f32");
    check_product(ctx, rounded(ctx, a), rounded(ctx, b), s.m, s.n, s.k, "bf16");
  }
}

// Kernels that compute each element, or each row, for itself.
void check_elements(KernelContext& ctx) {
  constexpr std::int64_t kCount = 203, kFirst = 97, kDim = 29, kRows = kCount / kDim, kFirstRows = 3;
  static_assert(kRows * kDim == kCount);
  const std::vector<float> x = random_floats(kCount, "x"), y = random_floats(kCount, "y"),
                           z = random_floats(kCount, "z"), gain = random_floats(kDim, "gain");
  std::vector<float> whole(x.size()), parts(x.size()), inverse(kRows);
  const auto each = [&](std::string_view what, std::string_view cut, std::int64_t first, std::int64_t count,
                        const auto& run) {
    run(std::int64_t{0}, count, whole.data());
    run(std::int64_t{0}, first, parts.data());
    run(first, count - first, parts.data());
    expect_bits(whole, parts, std::string(what), cut);
  };
  each("swiglu", "elements", kFirst, kCount, [&](std::int64_t at, std::int64_t n, float* to) {
    kernels::swiglu_forward(ctx, x.data() + at, y.data() + at, to + at, n);
  });
  std::vector<float> other(x.size());
  each("swiglu backward", "elements", kFirst, kCount, [&](std::int64_t at, std::int64_t n, float* to) {
    kernels::swiglu_backward(ctx, z.data() + at, x.data() + at, y.data() + at, to + at, other.data(), n);
  });
  each("silu backward", "elements", kFirst, kCount, [&](std::int64_t at, std::int64_t n, float* to) {
    kernels::silu_backward(ctx, z.data() + at, x.data() + at, to + at, n);
  });
  for (const kernels::GeluForm form : {kernels::GeluForm::erf, kernels::GeluForm::tanh}) {
    each("gelu", "elements", kFirst, kCount, [&](std::int64_t at, std::int64_t n, float* to) {
      kernels::gelu_forward(ctx, x.data() + at, to + at, n, form);
    });
    each("gelu backward", "elements", kFirst, kCount, [&](std::int64_t at, std::int64_t n, float* to) {
      kernels::gelu_backward(ctx, z.data() + at, x.data() + at, to + at, n, form);
    });
  }
  each("rms_norm backward", "rows", kFirstRows, kRows, [&](std::int64_t row, std::int64_t rows, float* to) {
    kernels::rms_norm_forward(ctx, x.data() + row * kDim, gain.data(), other.data(), inverse.data(), rows,
                              kDim, 1e-5f);
    kernels::rms_norm_backward(ctx, z.data() + row * kDim, x.data() + row * kDim, gain.data(), inverse.data(),
                               to + row * kDim, other.data(), rows, kDim);
  });
  each("rms_norm", "rows", kFirstRows, kRows, [&](std::int64_t row, std::int64_t rows, float* to) {
    kernels::rms_norm_forward(ctx, x.data() + row * kDim, gain.data(), to + row * kDim, inverse.data(), rows,
                              kDim, 1e-5f);
  });
}

// Attention of two heads, and of each of them. q, k, v: (seq, heads, head_dim)
void check_heads(KernelContext& ctx) {
  constexpr std::int64_t kSeq = 41, kHeads = 2, kDim = 8, kCount = kSeq * kHeads * kDim;
  const std::vector<float> q = random_floats(kCount, "q"), k = random_floats(kCount, "k"),
                           v = random_floats(kCount, "v");
  std::vector<float> whole(kCount), parts(kCount), softmax(kHeads * kSeq * kernels::kSoftmaxTerms);
  kernels::attention_forward(ctx, q.data(), k.data(), v.data(), whole.data(), softmax.data(),
                             {1, kSeq, kHeads, kHeads, kDim});
  for (std::int64_t head = 0; head < kHeads; ++head) {
    const auto of_head = [&](const std::vector<float>& x) {
      std::vector<float> own(kSeq * kDim);
      for (std::int64_t i = 0; i < kSeq; ++i)
        std::copy_n(x.begin() + (i * kHeads + head) * kDim, kDim, own.begin() + i * kDim);
      return own;
    };
    std::vector<float> out(kSeq * kDim);
    kernels::attention_forward(ctx, of_head(q).data(), of_head(k).data(), of_head(v).data(), out.data(),
                               softmax.data(), {1, kSeq, 1, 1, kDim});
    for (std::int64_t i = 0; i < kSeq; ++i)
      std::copy_n(out.begin() + i * kDim, kDim, parts.begin() + (i * kHeads + head) * kDim);
  }
  expect_bits(whole, parts, "attention", "heads");
}

struct Checked {
  explicit Checked(Compute& compute) {
    KernelContext& ctx = kernels_of(compute);
    check_products(ctx);
    check_elements(ctx);
    check_heads(ctx);
  }
};

}  // namespace

void expect_exact_kernels(Compute& compute) {
  if (compute.device() != Device{})
    throw Error(ErrorCode::unsupported, fmt::format("exact: the model is on {}; exact mode is for the host",
                                                    to_string(compute.device())));
  compute.attached<Checked>();
}

}  // namespace weft
