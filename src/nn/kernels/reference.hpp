// The kernels as plain loops: the definition of their results in the simplest form. Names and arguments are
// those of kernels.hpp, but without a context, and for float and double. Tests compare the fast kernels with
// these, and take finite differences of the double versions. Sums are computed in double. Pure functions. Any
// thread may call them.
#pragma once

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <vector>

#include "weft/base/exact.hpp"
#include "weft/nn/kernels.hpp"

namespace weft::kernels::reference {

/// c = a b, or c += a b. a: (m, k), b: (k, n), c: (m, n). `In` is float, double or bf16.
template <class In, class T>
void matmul(const In* a, Stored a_stored, const In* b, Stored b_stored, T* c, std::int64_t m, std::int64_t n,
            std::int64_t k, bool accumulate) {
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      double sum = accumulate ? static_cast<double>(c[i * n + j]) : 0.0;
      for (std::int64_t l = 0; l < k; ++l) {
        const auto left = static_cast<T>(a[a_stored == Stored::transposed ? l * m + i : i * k + l]);
        const auto right = static_cast<T>(b[b_stored == Stored::transposed ? j * k + l : l * n + j]);
        sum += static_cast<double>(left) * static_cast<double>(right);
      }
      c[i * n + j] = static_cast<T>(sum);
    }
  }
}

/// c = a b like matmul, but each leaf of the tree, and each sum of two, is rounded.
template <class In, class T>
void tree_matmul(const In* a, Stored a_stored, const In* b, Stored b_stored, T* c, std::int64_t m,
                 std::int64_t n, std::int64_t k, const ProductTree& tree) {
  const std::vector<std::int64_t> segments = tree.segments.empty()
                                                 ? std::vector{k / tree.unit}
                                                 : std::vector(tree.segments.begin(), tree.segments.end());
  for (std::int64_t i = 0; i < m; ++i) {
    for (std::int64_t j = 0; j < n; ++j) {
      std::vector<T> sums;
      for (int leaf = 0; leaf < tree.leaves; ++leaf) {
        double sum = 0.0;
        std::int64_t first = 0;
        for (const std::int64_t segment : segments) {
          const Chunk part = exact_block(segment, tree.leaves, leaf);
          const std::int64_t begin = (first + part.offset) * tree.unit;
          for (std::int64_t l = begin; l < begin + part.size * tree.unit; ++l) {
            const auto left = static_cast<T>(a[a_stored == Stored::transposed ? l * m + i : i * k + l]);
            const auto right = static_cast<T>(b[b_stored == Stored::transposed ? j * k + l : l * n + j]);
            sum += static_cast<double>(left) * static_cast<double>(right);
          }
          first += segment;
        }
        sums.push_back(static_cast<T>(sum));
      }
      for (; sums.size() > 1; sums.resize(sums.size() / 2))
        for (std::size_t s = 0; s < sums.size() / 2; ++s) sums[s] = sums[2 * s] + sums[2 * s + 1];
      c[i * n + j] = sums[0];
    }
  }
}

/// x: (tokens, in), w: (out, in), bias: (out) or null, y: (tokens, out).
template <class T>
void linear_forward(const T* x, const T* w, const T* bias, T* y, LinearShape s) {
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t o = 0; o < s.out; ++o) {
      double sum = bias != nullptr ? static_cast<double>(bias[o]) : 0.0;
      for (std::int64_t i = 0; i < s.in; ++i) {
        sum += static_cast<double>(x[t * s.in + i]) * static_cast<double>(w[o * s.in + i]);
      }
      y[t * s.out + o] = static_cast<T>(sum);
    }
  }
}

/// dy: (tokens, out), w: (out, in), dx: (tokens, in).
template <class T>
void linear_backward_input(const T* dy, const T* w, T* dx, LinearShape s) {
  for (std::int64_t t = 0; t < s.tokens; ++t) {
    for (std::int64_t i = 0; i < s.in; ++i) {
      double sum = 0.0;
      for (std::int64_t o = 0; o < s.out; ++o) {
        sum += static_cast<double>(dy[t * s.out + o]) * static_cast<double>(w[o * s.in + i]);
      }
      dx[t * s.in + i] = static_cast<T>(sum);
    }
  }
}

/// dw += dy^T x, dbias += the sum of dy's rows. dy: (tokens, out), x: (tokens, in), dw: (out, in), dbias:
/// (out) or null.
template <class T>
void linear_backward_weight(const T* dy, const T* x, T* dw, T* dbias, LinearShape s) {
  for (std::int64_t o = 0; o < s.out; ++o) {
    for (std::int64_t i = 0; i < s.in; ++i) {
      auto sum = static_cast<double>(dw[o * s.in + i]);
      for (std::int64_t t = 0; t < s.tokens; ++t) {
        sum += static_cast<double>(dy[t * s.out + o]) * static_cast<double>(x[t * s.in + i]);
      }
      dw[o * s.in + i] = static_cast<T>(sum);
    }
    if (dbias == nullptr) continue;
    auto sum = static_cast<double>(dbias[o]);
    for (std::int64_t t = 0; t < s.tokens; ++t) sum += static_cast<double>(dy[t * s.out + o]);
    dbias[o] = static_cast<T>(sum);
  }
}

/// x, y: (rows, dim), weight: (dim), inv_rms: (rows).
template <class T>
void rms_norm_forward(const T* x, const T* weight, T* y, T* inv_rms, std::int64_t rows, std::int64_t dim,
                      T eps) {
  for (std::int64_t r = 0; r < rows; ++r) {
    double squares = 0.0;
    for (std::int64_t i = 0; i < dim; ++i) {
      squares += static_cast<double>(x[r * dim + i]) * static_cast<double>(x[r * dim + i]);
    }
    inv_rms[r] =
        static_cast<T>(1.0 / std::sqrt(squares / static_cast<double>(dim) + static_cast<double>(eps)));
    for (std::int64_t i = 0; i < dim; ++i) y[r * dim + i] = x[r * dim + i] * inv_rms[r] * weight[i];
  }
}

/// dx, and dweight +=. dy, x, dx: (rows, dim), weight, dweight: (dim), inv_rms: (rows).
template <class T>
void rms_norm_backward(const T* dy, const T* x, const T* weight, const T* inv_rms, T* dx, T* dweight,
                       std::int64_t rows, std::int64_t dim) {
  std::vector<double> sums(dweight, dweight + dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const double inv = static_cast<double>(inv_rms[r]);
    double dot = 0.0;
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = r * dim + i;
      dot += static_cast<double>(dy[at]) * static_cast<double>(weight[i]) * static_cast<double>(x[at]);
      sums[static_cast<std::size_t>(i)] += static_cast<double>(dy[at]) * static_cast<double>(x[at]) * inv;
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = r * dim + i;
      dx[at] = static_cast<T>(static_cast<double>(dy[at]) * static_cast<double>(weight[i]) * inv -
                              static_cast<double>(x[at]) * dot * inv * inv * inv / static_cast<double>(dim));
    }
  }
  for (std::int64_t i = 0; i < dim; ++i) dweight[i] = static_cast<T>(sums[static_cast<std::size_t>(i)]);
}

/// x, y: (rows, dim), weight, bias: (dim), mean, inv_std: (rows).
template <class T>
void layer_norm_forward(const T* x, const T* weight, const T* bias, T* y, T* mean, T* inv_std,
                        std::int64_t rows, std::int64_t dim, T eps) {
  for (std::int64_t r = 0; r < rows; ++r) {
    double sum = 0.0, squares = 0.0;
    for (std::int64_t i = 0; i < dim; ++i) sum += static_cast<double>(x[r * dim + i]);
    const double middle = sum / static_cast<double>(dim);
    for (std::int64_t i = 0; i < dim; ++i) {
      const double off = static_cast<double>(x[r * dim + i]) - middle;
      squares += off * off;
    }
    const double inv = 1.0 / std::sqrt(squares / static_cast<double>(dim) + static_cast<double>(eps));
    mean[r] = static_cast<T>(middle);
    inv_std[r] = static_cast<T>(inv);
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = r * dim + i;
      y[at] = static_cast<T>((static_cast<double>(x[at]) - middle) * inv * static_cast<double>(weight[i]) +
                             static_cast<double>(bias[i]));
    }
  }
}

/// dx, dweight += and dbias +=. dy, x, dx: (rows, dim), weight, dweight, dbias: (dim), mean, inv_std: (rows).
template <class T>
void layer_norm_backward(const T* dy, const T* x, const T* weight, const T* mean, const T* inv_std, T* dx,
                         T* dweight, T* dbias, std::int64_t rows, std::int64_t dim) {
  std::vector<double> weights(dweight, dweight + dim), biases(dbias, dbias + dim);
  const auto n = static_cast<double>(dim);
  for (std::int64_t r = 0; r < rows; ++r) {
    const double inv = static_cast<double>(inv_std[r]), middle = static_cast<double>(mean[r]);
    double sum = 0.0, dot = 0.0;  // of dy weight, and of that times the normalised x
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = r * dim + i;
      const double normal = (static_cast<double>(x[at]) - middle) * inv, d = static_cast<double>(dy[at]);
      sum += d * static_cast<double>(weight[i]);
      dot += d * static_cast<double>(weight[i]) * normal;
      weights[static_cast<std::size_t>(i)] += d * normal;
      biases[static_cast<std::size_t>(i)] += d;
    }
    for (std::int64_t i = 0; i < dim; ++i) {
      const std::int64_t at = r * dim + i;
      const double normal = (static_cast<double>(x[at]) - middle) * inv;
      dx[at] = static_cast<T>(
          (static_cast<double>(dy[at]) * static_cast<double>(weight[i]) - sum / n - normal * dot / n) * inv);
    }
  }
  for (std::int64_t i = 0; i < dim; ++i) {
    dweight[i] = static_cast<T>(weights[static_cast<std::size_t>(i)]);
    dbias[i] = static_cast<T>(biases[static_cast<std::size_t>(i)]);
  }
}

/// ids: (tokens), each inside [0, vocab.whole); table: (vocab.count, dim), y: (tokens, dim).
template <class T>
void embedding_forward(const std::int64_t* ids, const T* table, T* y, std::int64_t tokens,
                       const VocabPart& vocab, std::int64_t dim) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t row = ids[t] - vocab.first;
    for (std::int64_t i = 0; i < dim; ++i)
      y[t * dim + i] = row >= 0 && row < vocab.count ? table[row * dim + i] : T{0};
  }
}

/// dtable[ids[t] - vocab.first] += dy[t]. dy: (tokens, dim), dtable: (vocab.count, dim).
template <class T>
void embedding_backward(const std::int64_t* ids, const T* dy, T* dtable, std::int64_t tokens,
                        const VocabPart& vocab, std::int64_t dim) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const std::int64_t row = ids[t] - vocab.first;
    if (row < 0 || row >= vocab.count) continue;
    for (std::int64_t i = 0; i < dim; ++i) dtable[row * dim + i] += dy[t * dim + i];
  }
}

/// cosine, sine: (positions, head_dim/2). Each step is rounded to T.
template <class T>
void rope_tables(T theta, std::int64_t head_dim, std::int64_t positions, T* cosine, T* sine) {
  const std::int64_t half = head_dim / 2;
  for (std::int64_t i = 0; i < half; ++i) {
    const T exponent = static_cast<T>(2 * i) / static_cast<T>(head_dim);
    const T frequency = T{1} / static_cast<T>(std::pow(theta, exponent));
    for (std::int64_t p = 0; p < positions; ++p) {
      const T angle = static_cast<T>(p) * frequency;
      cosine[p * half + i] = std::cos(angle);
      sine[p * half + i] = std::sin(angle);
    }
  }
}

/// x, y: (batch, seq, heads, head_dim); cosine, sine: (at least seq, head_dim/2).
template <class T>
void rope_forward(const T* x, const T* cosine, const T* sine, T* y, RopeShape s) {
  const std::int64_t half = s.head_dim / 2;
  for (std::int64_t row = 0; row < s.batch * s.seq * s.heads; ++row) {
    const std::int64_t position = row / s.heads % s.seq;
    for (std::int64_t i = 0; i < half; ++i) {
      const T low = x[row * s.head_dim + i], high = x[row * s.head_dim + i + half];
      const T c = cosine[position * half + i], n = sine[position * half + i];
      y[row * s.head_dim + i] = low * c - high * n;
      y[row * s.head_dim + i + half] = high * c + low * n;
    }
  }
}

/// The transpose of rope_forward. dy, dx: (batch, seq, heads, head_dim).
template <class T>
void rope_backward(const T* dy, const T* cosine, const T* sine, T* dx, RopeShape s) {
  const std::int64_t half = s.head_dim / 2;
  for (std::int64_t row = 0; row < s.batch * s.seq * s.heads; ++row) {
    const std::int64_t position = row / s.heads % s.seq;
    for (std::int64_t i = 0; i < half; ++i) {
      const T low = dy[row * s.head_dim + i], high = dy[row * s.head_dim + i + half];
      const T c = cosine[position * half + i], n = sine[position * half + i];
      dx[row * s.head_dim + i] = low * c + high * n;
      dx[row * s.head_dim + i + half] = high * c - low * n;
    }
  }
}

/// q, out: (batch, seq, heads, head_dim); k, v: (batch, seq, kv_heads, head_dim); softmax: (batch, heads,
/// seq, kSoftmaxTerms).
template <class T>
void attention_forward(const T* q, const T* k, const T* v, T* out, T* softmax, AttentionShape s) {
  const double scaling = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  std::vector<double> scores(static_cast<std::size_t>(s.seq));
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv_head = h / (s.heads / s.kv_heads);
      for (std::int64_t i = 0; i < s.seq; ++i) {
        const T* query = q + ((b * s.seq + i) * s.heads + h) * s.head_dim;
        double largest = -std::numeric_limits<double>::infinity();
        for (std::int64_t j = 0; j <= i; ++j) {
          const T* key = k + ((b * s.seq + j) * s.kv_heads + kv_head) * s.head_dim;
          double dot = 0.0;
          for (std::int64_t d = 0; d < s.head_dim; ++d)
            dot += static_cast<double>(query[d]) * static_cast<double>(key[d]);
          scores[static_cast<std::size_t>(j)] = dot * scaling;
          largest = std::max(largest, dot * scaling);
        }
        T* kept = softmax + ((b * s.heads + h) * s.seq + i) * kSoftmaxTerms;
        kept[0] = static_cast<T>(largest);
        double sum = 0.0;
        for (std::int64_t j = 0; j <= i; ++j) {
          double& score = scores[static_cast<std::size_t>(j)];
          score = std::exp(score - static_cast<double>(kept[0]));
          sum += score;
        }
        kept[1] = static_cast<T>(sum);
        for (std::int64_t j = 0; j <= i; ++j) scores[static_cast<std::size_t>(j)] /= sum;
        T* to = out + ((b * s.seq + i) * s.heads + h) * s.head_dim;
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          double value = 0.0;
          for (std::int64_t j = 0; j <= i; ++j) {
            value += scores[static_cast<std::size_t>(j)] *
                     static_cast<double>(v[((b * s.seq + j) * s.kv_heads + kv_head) * s.head_dim + d]);
          }
          to[d] = static_cast<T>(value);
        }
      }
    }
  }
}

/// dq has the shape of q, dk and dv have the shape of k. They are computed from dout (shaped like out) and
/// the values that the forward pass kept.
template <class T>
void attention_backward(const T* dout, const T* q, const T* k, const T* v, const T* out, const T* softmax,
                        T* dq, T* dk, T* dv, AttentionShape s) {
  const double scaling = 1.0 / std::sqrt(static_cast<double>(s.head_dim));
  const auto kv_size = static_cast<std::size_t>(s.batch * s.seq * s.kv_heads * s.head_dim);
  std::vector<double> dk_sum(kv_size), dv_sum(kv_size), dq_sum(static_cast<std::size_t>(s.head_dim));
  for (std::int64_t b = 0; b < s.batch; ++b) {
    for (std::int64_t h = 0; h < s.heads; ++h) {
      const std::int64_t kv_head = h / (s.heads / s.kv_heads);
      for (std::int64_t i = 0; i < s.seq; ++i) {
        const std::int64_t at = ((b * s.seq + i) * s.heads + h) * s.head_dim;
        double delta = 0.0;
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          delta += static_cast<double>(dout[at + d]) * static_cast<double>(out[at + d]);
        }
        std::fill(dq_sum.begin(), dq_sum.end(), 0.0);
        for (std::int64_t j = 0; j <= i; ++j) {
          const std::int64_t kv_at = ((b * s.seq + j) * s.kv_heads + kv_head) * s.head_dim;
          double dot = 0.0, dprobability = 0.0;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            dot += static_cast<double>(q[at + d]) * static_cast<double>(k[kv_at + d]);
            dprobability += static_cast<double>(dout[at + d]) * static_cast<double>(v[kv_at + d]);
          }
          const T* kept = softmax + ((b * s.heads + h) * s.seq + i) * kSoftmaxTerms;
          const double probability =
              std::exp(dot * scaling - static_cast<double>(kept[0])) / static_cast<double>(kept[1]);
          const double dscore = probability * (dprobability - delta) * scaling;
          for (std::int64_t d = 0; d < s.head_dim; ++d) {
            dv_sum[static_cast<std::size_t>(kv_at + d)] += probability * static_cast<double>(dout[at + d]);
            dk_sum[static_cast<std::size_t>(kv_at + d)] += dscore * static_cast<double>(q[at + d]);
            dq_sum[static_cast<std::size_t>(d)] += dscore * static_cast<double>(k[kv_at + d]);
          }
        }
        for (std::int64_t d = 0; d < s.head_dim; ++d)
          dq[at + d] = static_cast<T>(dq_sum[static_cast<std::size_t>(d)]);
      }
    }
  }
  for (std::size_t i = 0; i < kv_size; ++i) {
    dk[i] = static_cast<T>(dk_sum[i]);
    dv[i] = static_cast<T>(dv_sum[i]);
  }
}

/// y = x sigmoid(x). All: (n).
template <class T>
void silu_forward(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] / (T{1} + std::exp(-x[i]));
}

template <class T>
void silu_backward(const T* dy, const T* x, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T sigmoid = T{1} / (T{1} + std::exp(-x[i]));
    dx[i] = dy[i] * sigmoid * (T{1} + x[i] * (T{1} - sigmoid));
  }
}

/// y = x Phi(x), or x (1 + tanh u) / 2. x, y: (n).
template <class T>
void gelu_forward(const T* x, T* y, std::int64_t n, GeluForm form) {
  const double root = std::sqrt(2.0 / std::acos(-1.0));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<double>(x[i]);
    const double inner = root * (v + 0.044715 * v * v * v);
    y[i] = static_cast<T>(form == GeluForm::erf ? 0.5 * v * std::erfc(-v / std::sqrt(2.0))
                                                : 0.5 * v * (1.0 + std::tanh(inner)));
  }
}

template <class T>
void gelu_backward(const T* dy, const T* x, T* dx, std::int64_t n, GeluForm form) {
  const double root = std::sqrt(2.0 / std::acos(-1.0));
  for (std::int64_t i = 0; i < n; ++i) {
    const auto v = static_cast<double>(x[i]);
    const double t = std::tanh(root * (v + 0.044715 * v * v * v));
    const double slope =
        form == GeluForm::erf
            ? 0.5 * std::erfc(-v / std::sqrt(2.0)) + 0.5 * v * root * std::exp(-0.5 * v * v)
            : 0.5 * (1.0 + t) + 0.5 * v * (1.0 - t * t) * root * (1.0 + 3.0 * 0.044715 * v * v);
    dx[i] = static_cast<T>(static_cast<double>(dy[i]) * slope);
  }
}

/// y = max(x, 0). x, y: (n).
template <class T>
void relu_forward(const T* x, T* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = x[i] <= T{0} ? T{0} : x[i];
}

template <class T>
void relu_backward(const T* dy, const T* y, T* dx, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) dx[i] = y[i] > T{0} ? dy[i] : T{0};
}

/// out = silu(gate) up. All: (n).
template <class T>
void swiglu_forward(const T* gate, const T* up, T* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = gate[i] / (T{1} + std::exp(-gate[i])) * up[i];
}

template <class T>
void swiglu_backward(const T* dout, const T* gate, const T* up, T* dgate, T* dup, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) {
    const T sigmoid = T{1} / (T{1} + std::exp(-gate[i]));
    const T from_gate = dout[i] * up[i] * sigmoid * (T{1} + gate[i] * (T{1} - sigmoid));
    const T from_up = dout[i] * gate[i] * sigmoid;
    dgate[i] = from_gate;
    dup[i] = from_up;
  }
}

template <class T>
void add(const T* a, const T* b, T* out, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) out[i] = a[i] + b[i];
}

template <class T>
void scale(T* x, T factor, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] *= factor;
}

template <class T>
void fill(T* x, T value, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) x[i] = value;
}

inline void round_to_bf16(const float* x, bf16* y, std::int64_t n) {
  for (std::int64_t i = 0; i < n; ++i) y[i] = bf16(x[i]);
}

/// logits: (tokens, vocab.count), targets: (tokens), terms: (tokens, kLossTerms).
template <class T>
void cross_entropy_terms(const T* logits, const std::int64_t* targets, double* terms, std::int64_t tokens,
                         const VocabPart& vocab, double smoothing) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const T* row = logits + t * vocab.count;
    double largest = -std::numeric_limits<double>::infinity(), sum = 0.0, all = 0.0;
    for (std::int64_t j = 0; j < vocab.count; ++j) largest = std::max(largest, static_cast<double>(row[j]));
    for (std::int64_t j = 0; j < vocab.count; ++j) sum += std::exp(static_cast<double>(row[j]) - largest);
    for (std::int64_t j = 0; j < vocab.count; ++j) all += static_cast<double>(row[j]);
    const std::int64_t target = targets[t] - vocab.first;
    double* to = terms + t * kLossTerms;
    to[0] = largest;
    to[1] = sum;
    to[2] = target >= 0 && target < vocab.count ? static_cast<double>(row[target]) : 0.0;
    to[3] = smoothing > 0 ? all : 0.0;
  }
}

/// terms: (parts, tokens, kLossTerms), targets: (tokens), softmax: (tokens, kSoftmaxTerms).
inline double cross_entropy_sum(const double* terms, int parts, const std::int64_t* targets, double* softmax,
                                std::int64_t tokens, std::int64_t vocab, double count, double smoothing,
                                double z_loss) {
  double loss = 0.0;
  for (std::int64_t t = 0; t < tokens; ++t) {
    double sum = 0.0, target = 0.0, all = 0.0, largest = -std::numeric_limits<double>::infinity();
    for (int p = 0; p < parts; ++p) largest = std::max(largest, terms[(p * tokens + t) * kLossTerms]);
    for (int p = 0; p < parts; ++p) {
      const double* term = terms + (p * tokens + t) * kLossTerms;
      sum += term[1] * std::exp(term[0] - largest);
      target += term[2];
      all += term[3];
    }
    softmax[t * kSoftmaxTerms] = largest;
    softmax[t * kSoftmaxTerms + 1] = sum;
    if (targets[t] == kIgnoredTarget) continue;
    loss += std::log(sum) + (1 - smoothing) * (largest - target) +
            smoothing * (largest - all / static_cast<double>(vocab)) +
            z_loss * std::pow(largest + std::log(sum), 2);
  }
  return loss / count;
}

template <class T>
void cross_entropy_backward(const T* logits, const std::int64_t* targets, const double* softmax, T* dlogits,
                            std::int64_t tokens, const VocabPart& vocab, double count, double smoothing,
                            double z_loss) {
  for (std::int64_t t = 0; t < tokens; ++t) {
    const double largest = softmax[t * kSoftmaxTerms], sum = softmax[t * kSoftmaxTerms + 1];
    const double of_z = 2 * z_loss * (largest + std::log(sum));
    for (std::int64_t j = 0; j < vocab.count; ++j) {
      const double probability = std::exp(static_cast<double>(logits[t * vocab.count + j]) - largest) / sum;
      const double wanted = (j + vocab.first == targets[t] ? 1 - smoothing : 0.0) +
                            smoothing / static_cast<double>(vocab.whole);
      dlogits[t * vocab.count + j] =
          targets[t] == kIgnoredTarget ? T{0} : static_cast<T>((probability * (1 + of_z) - wanted) / count);
    }
  }
}

template <class T>
double sum_of_squares(const T* x, std::int64_t n) {
  double sum = 0.0;
  for (std::int64_t i = 0; i < n; ++i) sum += static_cast<double>(x[i]) * static_cast<double>(x[i]);
  return sum;
}

/// p, m, v, g: (n).
template <class T>
void adamw_step(T* p, T* m, T* v, const T* g, std::int64_t n, const AdamWStep& s) {
  const double correction1 = 1.0 - std::pow(s.beta1, static_cast<double>(s.step));
  const double correction2 = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  for (std::int64_t i = 0; i < n; ++i) {
    const double gradient = static_cast<double>(g[i]);
    const double kept = static_cast<double>(p[i]) * (1.0 - s.rate * s.weight_decay);
    const double before = static_cast<double>(m[i]);
    const double first = s.beta1 == 0    ? gradient
                         : s.beta1 < 0.5 ? gradient - s.beta1 * (gradient - before)
                                         : before + (1.0 - s.beta1) * (gradient - before);
    const double second = static_cast<double>(v[i]) * s.beta2 + (1.0 - s.beta2) * gradient * gradient;
    m[i] = static_cast<T>(first);
    v[i] = static_cast<T>(second);
    p[i] = static_cast<T>(kept - s.rate / correction1 * first /
                                     (std::sqrt(second) / std::sqrt(correction2) + s.eps));
  }
}

/// p, velocity, g: (n).
template <class T>
void sgd_step(T* p, T* velocity, const T* g, std::int64_t n, const SgdStep& s) {
  for (std::int64_t i = 0; i < n; ++i) {
    double move = static_cast<double>(g[i]) + s.weight_decay * static_cast<double>(p[i]);
    if (s.momentum != 0.0) {
      move += s.momentum * static_cast<double>(velocity[i]);
      velocity[i] = static_cast<T>(move);
    }
    p[i] = static_cast<T>(static_cast<double>(p[i]) - s.rate * move);
  }
}

/// p, m, g: (n).
template <class T>
void lion_step(T* p, T* m, const T* g, std::int64_t n, const LionStep& s) {
  for (std::int64_t i = 0; i < n; ++i) {
    const double gradient = static_cast<double>(g[i]), before = static_cast<double>(m[i]),
                 c = s.beta1 * before + (1.0 - s.beta1) * gradient, old = static_cast<double>(p[i]);
    const double sign = c > 0 ? 1 : c < 0 ? -1 : c;
    p[i] = static_cast<T>(old - s.rate * (sign + s.weight_decay * old));
    m[i] = static_cast<T>(s.beta2 * before + (1.0 - s.beta2) * gradient);
  }
}

/// y, z, v, g: (n).
template <class T>
void schedule_free_step(T* y, T* z, T* v, const T* g, std::int64_t n, const ScheduleFreeStep& s) {
  const double correction = 1.0 - std::pow(s.beta2, static_cast<double>(s.step));
  for (std::int64_t i = 0; i < n; ++i) {
    const double gradient = static_cast<double>(g[i]), trained = static_cast<double>(y[i]),
                 fast = static_cast<double>(z[i]),
                 second = s.beta2 * static_cast<double>(v[i]) + (1.0 - s.beta2) * gradient * gradient;
    const double d = gradient / (std::sqrt(second / correction) + s.eps) + s.weight_decay * trained;
    v[i] = static_cast<T>(second);
    y[i] = static_cast<T>((1.0 - s.weight) * trained + s.weight * fast -
                          s.rate * (1.0 - s.beta1 * (1.0 - s.weight)) * d);
    z[i] = static_cast<T>(fast - s.rate * d);
  }
}

}  // namespace weft::kernels::reference
