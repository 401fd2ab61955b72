// Kernels that compute each element, or each row, separately. An element has the same bits wherever it is,
// and however long the array is. Exact mode relies on it.
#include <algorithm>
#include <cstring>
#include <functional>
#include <string>
#include <type_traits>
#include <vector>

#include "nn/kernel_support.hpp"

namespace weft::element_cuts_test {
namespace {

using namespace kernels;
using kernels::test::Array;
using kernels::test::random_array;

constexpr std::int64_t kMost =
    70;  // elements, or rows: whole vectors of each width, and rests of each length

// Outputs of a kernel for parts [first, first + count) of its operands; `width` elements each.
template <class T>
struct Kernel {
  std::string name;
  int outputs;
  std::int64_t width;
  std::function<void(std::int64_t first, std::int64_t count, std::vector<Array<T>>& to)> run;
};

template <class T>
void expect_no_cut_changes_bits(const Kernel<T>& kernel) {
  const auto fresh = [&] {
    return std::vector<Array<T>>(static_cast<std::size_t>(kernel.outputs),
                                 Array<T>(static_cast<std::size_t>(kMost * kernel.width)));
  };
  std::vector<Array<T>> single = fresh();
  for (std::int64_t i = 0; i < kMost; ++i) kernel.run(i, 1, single);
  for (std::int64_t n = 1; n <= kMost; ++n)
    for (const std::int64_t first : {std::int64_t{0}, kMost - n}) {
      std::vector<Array<T>> whole = fresh();
      kernel.run(first, n, whole);
      for (std::size_t o = 0; o < whole.size(); ++o)
        for (std::int64_t i = first * kernel.width; i < (first + n) * kernel.width; ++i) {
          const auto at = static_cast<std::size_t>(i);
          ASSERT_EQ(std::memcmp(&whole[o][at], &single[o][at], sizeof(T)), 0)
              << kernel.name << (std::is_same_v<T, float> ? "" : " in bf16") << ": output " << o
              << ", element " << i << " of " << n * kernel.width << " from " << first * kernel.width;
        }
    }
}

template <class T>
std::vector<Kernel<T>> element_kernels(KernelContext& ctx) {
  static const auto x = random_array<T>(kMost, 1), y = random_array<T>(kMost, 2),
                    d = random_array<T>(kMost, 3);
  using Out = std::vector<Array<T>>&;
  std::vector<Kernel<T>> all;
  const auto add_kernel = [&](const char* name, int outputs, auto run) {
    all.push_back({name, outputs, 1, run});
  };
  add_kernel("silu_forward", 1, [&](auto f, auto n, Out o) { silu_forward(ctx, &x[f], &o[0][f], n); });
  add_kernel("silu_backward", 1,
             [&](auto f, auto n, Out o) { silu_backward(ctx, &d[f], &x[f], &o[0][f], n); });
  for (const GeluForm form : {GeluForm::erf, GeluForm::tanh}) {
    add_kernel("gelu_forward", 1,
               [&ctx, form](auto f, auto n, Out o) { gelu_forward(ctx, &x[f], &o[0][f], n, form); });
    add_kernel("gelu_backward", 1,
               [&ctx, form](auto f, auto n, Out o) { gelu_backward(ctx, &d[f], &x[f], &o[0][f], n, form); });
  }
  add_kernel("relu_forward", 1, [&](auto f, auto n, Out o) { relu_forward(ctx, &x[f], &o[0][f], n); });
  add_kernel("relu_backward", 1,
             [&](auto f, auto n, Out o) { relu_backward(ctx, &d[f], &y[f], &o[0][f], n); });
  add_kernel("swiglu_forward", 1,
             [&](auto f, auto n, Out o) { swiglu_forward(ctx, &x[f], &y[f], &o[0][f], n); });
  add_kernel("swiglu_backward", 2, [&](auto f, auto n, Out o) {
    swiglu_backward(ctx, &d[f], &x[f], &y[f], &o[0][f], &o[1][f], n);
  });
  add_kernel("add", 1, [&](auto f, auto n, Out o) { add(ctx, &x[f], &y[f], &o[0][f], n); });
  return all;
}

std::vector<Kernel<float>> optimizer_kernels(KernelContext& ctx) {
  static const auto p = random_array<float>(kMost, 4), m = random_array<float>(kMost, 5),
                    g = random_array<float>(kMost, 6);
  static const auto v = [] {
    auto squares = random_array<float>(kMost, 7);
    for (float& s : squares) s *= s;
    return squares;
  }();
  using Out = std::vector<Array<float>>&;
  const auto begin = [](Out o, std::int64_t f, std::int64_t n) {
    const Array<float>* const from[] = {&p, &m, &v};
    for (std::size_t i = 0; i < o.size(); ++i) std::copy_n(from[i]->begin() + f, n, o[i].begin() + f);
  };
  return {{"adamw_step", 3, 1,
           [&, begin](auto f, auto n, Out o) {
             begin(o, f, n);
             adamw_step(ctx, &o[0][f], &o[1][f], &o[2][f], &g[f], n, AdamWStep{1e-3, .9, .999, 1e-8, .1, 3});
           }},
          {"sgd_step", 2, 1,
           [&, begin](auto f, auto n, Out o) {
             begin(o, f, n);
             sgd_step(ctx, &o[0][f], &o[1][f], &g[f], n, SgdStep{1e-3, .9, .1});
           }},
          {"lion_step", 2, 1,
           [&, begin](auto f, auto n, Out o) {
             begin(o, f, n);
             lion_step(ctx, &o[0][f], &o[1][f], &g[f], n, LionStep{1e-3, .9, .99, .1});
           }},
          {"schedule_free_step", 3, 1, [&, begin](auto f, auto n, Out o) {
             begin(o, f, n);
             schedule_free_step(ctx, &o[0][f], &o[1][f], &o[2][f], &g[f], n,
                                ScheduleFreeStep{1e-3, .9, .999, 1e-8, .1, .3, 3});
           }}};
}

template <class T>
std::vector<Kernel<T>> row_kernels(KernelContext& ctx, std::int64_t dim) {
  const auto x = random_array<T>(kMost * dim, 8), d = random_array<T>(kMost * dim, 9);
  const auto gain = random_array<float>(dim, 10), bias = random_array<float>(dim, 11);
  using Out = std::vector<Array<T>>&;
  std::vector<Kernel<T>> all;
  all.push_back(
      {"rms_norm", 2, dim, [=, &ctx](auto f, auto n, Out o) {
         std::vector<float> inverse(static_cast<std::size_t>(n)), dgain(static_cast<std::size_t>(dim));
         rms_norm_forward(ctx, &x[f * dim], gain.data(), &o[0][f * dim], inverse.data(), n, dim, 1e-5f);
         rms_norm_backward(ctx, &d[f * dim], &x[f * dim], gain.data(), inverse.data(), &o[1][f * dim],
                           dgain.data(), n, dim);
       }});
  all.push_back({"layer_norm", 2, dim, [=, &ctx](auto f, auto n, Out o) {
                   std::vector<float> mean(static_cast<std::size_t>(n)), inverse(mean),
                       dgain(static_cast<std::size_t>(dim)), dbias(dgain);
                   layer_norm_forward(ctx, &x[f * dim], gain.data(), bias.data(), &o[0][f * dim], mean.data(),
                                      inverse.data(), n, dim, 1e-5f);
                   layer_norm_backward(ctx, &d[f * dim], &x[f * dim], gain.data(), mean.data(),
                                       inverse.data(), &o[1][f * dim], dgain.data(), dbias.data(), n, dim);
                 }});
  return all;
}

TEST(ElementKernels, GiveEachElementItsBitsHoweverTheArrayIsCut) {
  KernelContext ctx(1);
  for (const auto& kernel : element_kernels<float>(ctx)) expect_no_cut_changes_bits(kernel);
  for (const auto& kernel : element_kernels<bf16>(ctx)) expect_no_cut_changes_bits(kernel);
  for (const auto& kernel : optimizer_kernels(ctx)) expect_no_cut_changes_bits(kernel);
}

TEST(RowKernels, GiveEachRowItsBitsHoweverTheRowsAreCut) {
  KernelContext ctx(1);
  for (const std::int64_t dim : {1, 7, 16, 29, 64}) {
    for (const auto& kernel : row_kernels<float>(ctx, dim)) expect_no_cut_changes_bits(kernel);
    for (const auto& kernel : row_kernels<bf16>(ctx, dim)) expect_no_cut_changes_bits(kernel);
  }
}

}  // namespace
}  // namespace weft::element_cuts_test
