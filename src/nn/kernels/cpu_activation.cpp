// SiLU, GELU, ReLU and SwiGLU, forward and backward.
#include <cmath>

#include "nn/kernels/cpu_context.hpp"
#include "nn/kernels/cpu_math.hpp"

namespace weft::kernels::cpu {
namespace {

// d/dx (x sigmoid(x)) = s (1 + x (1 - s)) with s = sigmoid(x). The code requests the fused operation by name.
// If the compiler chose (g++ 12, AVX-512), it fused in whole vectors and not in the last elements of an
// array.
WEFT_INLINE inline float silu_slope(float x, float s) { return s * std::fma(x, 1.0f - s, 1.0f); }

WEFT_CPU_CLONES_OF_T(void, silu_range, (const T* x, T* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    y[i] = T(v * sigmoid_f32(v));
  }
}

WEFT_CPU_CLONES_OF_T(void, silu_backward_range, (const T* dy, const T* x, T* dx, std::int64_t n),
                     (dy, x, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    dx[i] = T(wide(dy[i]) * silu_slope(v, sigmoid_f32(v)));
  }
}

constexpr float kRootHalf = 0.707106781f;           // sqrt(1/2)
constexpr float kNormalAtZero = 0.398942280f;       // 1 / sqrt(2 pi)
constexpr float kTwiceRootTwoOverPi = 1.59576912f;  // 2 sqrt(2/pi)
constexpr float kCubic = 0.044715f;

// (1 + tanh u) / 2 is sigmoid(2 u).
WEFT_INLINE inline float twice_gelu_inner(float x) { return kTwiceRootTwoOverPi * (x + kCubic * x * x * x); }

WEFT_CPU_CLONES_OF_T(void, gelu_erf_range, (const T* x, T* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    y[i] = T(v * (0.5f + 0.5f * erf_f32(v * kRootHalf)));
  }
}

WEFT_CPU_CLONES_OF_T(void, gelu_tanh_range, (const T* x, T* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    y[i] = T(v * sigmoid_f32(twice_gelu_inner(v)));
  }
}

// d/dx (x Phi(x)) = Phi(x) + x phi(x)
WEFT_CPU_CLONES_OF_T(void, gelu_erf_backward_range, (const T* dy, const T* x, T* dx, std::int64_t n),
                     (dy, x, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float v = wide(x[i]);
    const float phi = kNormalAtZero * exp_f32(-0.5f * v * v);
    dx[i] = T(wide(dy[i]) * (0.5f + 0.5f * erf_f32(v * kRootHalf) + v * phi));
  }
}

WEFT_CPU_CLONES_OF_T(void, gelu_tanh_backward_range, (const T* dy, const T* x, T* dx, std::int64_t n),
                     (dy, x, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    // Beyond 100 the sigmoid and the slope are 0 or 1. v^2 would become infinite, and infinity times 0 is
    // NaN.
    const float given = wide(x[i]), most = given > 100.0f ? 100.0f : given,
                v = most < -100.0f ? -100.0f : most;
    const float s = sigmoid_f32(twice_gelu_inner(v));
    dx[i] =
        T(wide(dy[i]) * s * (1.0f + v * (1.0f - s) * kTwiceRootTwoOverPi * (1.0f + 3.0f * kCubic * v * v)));
  }
}

WEFT_CPU_CLONES_OF_T(void, relu_range, (const T* x, T* y, std::int64_t n), (x, y, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) y[i] = wide(x[i]) <= 0.0f ? T(0.0f) : x[i];
}

WEFT_CPU_CLONES_OF_T(void, relu_backward_range, (const T* dy, const T* y, T* dx, std::int64_t n),
                     (dy, y, dx, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) dx[i] = wide(y[i]) > 0.0f ? dy[i] : T(0.0f);
}

WEFT_CPU_CLONES_OF_T(void, swiglu_range, (const T* gate, const T* up, T* out, std::int64_t n),
                     (gate, up, out, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float g = wide(gate[i]);
    out[i] = T(g * sigmoid_f32(g) * wide(up[i]));
  }
}

WEFT_CPU_CLONES_OF_T(void, swiglu_backward_range,
                     (const T* dout, const T* gate, const T* up, T* dgate, T* dup, std::int64_t n),
                     (dout, gate, up, dgate, dup, n)) {
#pragma GCC ivdep
  for (std::int64_t i = 0; i < n; ++i) {
    const float d = wide(dout[i]), g = wide(gate[i]), u = wide(up[i]), s = sigmoid_f32(g);
    dgate[i] = T(d * u * silu_slope(g, s));
    dup[i] = T(d * g * s);
  }
}

}  // namespace

template <class T>
void silu_forward(KernelContext& ctx, const T* x, T* y, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    silu_range(x + begin, y + begin, end - begin);
  });
}

template <class T>
void silu_backward(KernelContext& ctx, const T* dy, const T* x, T* dx, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    silu_backward_range(dy + begin, x + begin, dx + begin, end - begin);
  });
}

template <class T>
void gelu_forward(KernelContext& ctx, const T* x, T* y, std::int64_t n, GeluForm form) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    (form == GeluForm::erf ? gelu_erf_range<T> : gelu_tanh_range<T>)(x + begin, y + begin, end - begin);
  });
}

template <class T>
void gelu_backward(KernelContext& ctx, const T* dy, const T* x, T* dx, std::int64_t n, GeluForm form) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    (form == GeluForm::erf ? gelu_erf_backward_range<T>
                           : gelu_tanh_backward_range<T>)(dy + begin, x + begin, dx + begin, end - begin);
  });
}

template <class T>
void relu_forward(KernelContext& ctx, const T* x, T* y, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    relu_range(x + begin, y + begin, end - begin);
  });
}

template <class T>
void relu_backward(KernelContext& ctx, const T* dy, const T* y, T* dx, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    relu_backward_range(dy + begin, y + begin, dx + begin, end - begin);
  });
}

template <class T>
void swiglu_forward(KernelContext& ctx, const T* gate, const T* up, T* out, std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    swiglu_range(gate + begin, up + begin, out + begin, end - begin);
  });
}

template <class T>
void swiglu_backward(KernelContext& ctx, const T* dout, const T* gate, const T* up, T* dgate, T* dup,
                     std::int64_t n) {
  parallel_blocks(ctx.state(), n, kElementBlock, [&](std::int64_t begin, std::int64_t end) {
    swiglu_backward_range(dout + begin, gate + begin, up + begin, dgate + begin, dup + begin, end - begin);
  });
}

WEFT_KERNEL_OF_BOTH(silu_forward);
WEFT_KERNEL_OF_BOTH(silu_backward);
WEFT_KERNEL_OF_BOTH(gelu_forward);
WEFT_KERNEL_OF_BOTH(gelu_backward);
WEFT_KERNEL_OF_BOTH(relu_forward);
WEFT_KERNEL_OF_BOTH(relu_backward);
WEFT_KERNEL_OF_BOTH(swiglu_forward);
WEFT_KERNEL_OF_BOTH(swiglu_backward);

}  // namespace weft::kernels::cpu
