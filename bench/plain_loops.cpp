#include "plain_loops.hpp"

namespace weft::bench {
namespace {

template <class T, class Acc>
void sum(const T* const* in, int n, T* out, std::int64_t count) {
  if (n == 2) {
    const T *a = in[0], *b = in[1];
    for (std::int64_t i = 0; i < count; ++i)
      out[i] = static_cast<T>(static_cast<Acc>(a[i]) + static_cast<Acc>(b[i]));
    return;
  }
  for (std::int64_t i = 0; i < count; ++i) {
    auto total = static_cast<Acc>(in[0][i]);
    for (int k = 1; k < n; ++k) total += static_cast<Acc>(in[k][i]);
    out[i] = static_cast<T>(total);
  }
}

}  // namespace

void plain_sum(const float* const* in, int n, float* out, std::int64_t count) {
  sum<float, float>(in, n, out, count);
}
void plain_sum(const double* const* in, int n, double* out, std::int64_t count) {
  sum<double, double>(in, n, out, count);
}
void plain_sum(const bf16* const* in, int n, bf16* out, std::int64_t count) {
  sum<bf16, float>(in, n, out, count);
}
void plain_sum(const f16* const* in, int n, f16* out, std::int64_t count) {
  sum<f16, float>(in, n, out, count);
}

}  // namespace weft::bench
