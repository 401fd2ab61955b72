#include "nn/exact/heads.hpp"

#include <algorithm>

#include "base/mutant.hpp"
#include "nn/attention_parts.hpp"
#include "nn/exact/sums.hpp"

namespace weft::exact {
namespace {

// Each key/value head once for each of its query heads. x: (rows, kv_heads, head_dim) → (rows, heads,
// head_dim)
Tensor repeated(Frame& frame, const Tensor& x, std::int64_t rows, const kernels::AttentionShape& s) {
  const Tensor y = frame.compute().make({rows, s.heads, s.head_dim});
  const std::int64_t each = s.heads / s.kv_heads;
  const float* from = x.data_ptr<float>();
  float* to = y.data_ptr<float>();
  for (std::int64_t i = 0; i < rows * s.kv_heads; ++i, from += s.head_dim)
    for (std::int64_t h = 0; h < each; ++h, to += s.head_dim) std::copy_n(from, s.head_dim, to);
  return y;
}

// The first of `count` arrays becomes their sum, a balanced tree.
void add_heads(float* first, std::int64_t count, std::int64_t width) {
  if (count < 2) return;
  const std::int64_t half = WEFT_MUTANT("exact_heads_in_a_row") ? count - 1 : (count + 1) / 2;
  float* const second = first + half * width;
  add_heads(first, half, width);
  add_heads(second, count - half, width);
  for (std::int64_t i = 0; i < width; ++i) first[i] += second[i];
}

// dx of the key/value heads, from those of the query heads, whose contents are lost.
void sum_of_heads(const Tensor& of_queries, std::int64_t rows, const kernels::AttentionShape& s,
                  const Tensor& dx) {
  const std::int64_t each = s.heads / s.kv_heads;
  float* from = of_queries.data_ptr<float>();
  float* to = dx.data_ptr<float>();
  for (std::int64_t i = 0; i < rows * s.kv_heads; ++i, from += each * s.head_dim, to += s.head_dim) {
    add_heads(from, each, s.head_dim);
    std::copy_n(from, s.head_dim, to);
  }
}

}  // namespace

void attention_backward(Frame& frame, const std::string& path, const HeadsPass& h,
                        const kernels::AttentionShape& s, Tensor& dk, Tensor& dv) {
  const auto run = [&](const Tensor& k, const Tensor& v, const Tensor& to_k, const Tensor& to_v,
                       const kernels::AttentionShape& all) {
    each_part(frame, path, all, [&](const PartOfAttention& at, const kernels::AttentionShape& of) {
      kernels::attention_backward(frame.kernels(), h.dout.data_ptr<float>() + at.q,
                                  h.q.data_ptr<float>() + at.q, k.data_ptr<float>() + at.kv,
                                  v.data_ptr<float>() + at.kv, h.out.data_ptr<float>() + at.q,
                                  h.softmax.data_ptr<float>() + at.softmax, h.dq.data_ptr<float>() + at.q,
                                  to_k.data_ptr<float>() + at.kv, to_v.data_ptr<float>() + at.kv, of);
    });
  };
  if (s.heads == s.kv_heads) {
    run(h.k, h.v, dk, dv, s);
  } else {
    const std::int64_t rows = s.batch * s.seq;
    kernels::AttentionShape alone = s;
    alone.kv_heads = s.heads;
    const Tensor k = repeated(frame, h.k, rows, s), v = repeated(frame, h.v, rows, s);
    const Tensor to_k = frame.compute().make(k.shape()), to_v = frame.compute().make(v.shape());
    run(k, v, to_k, to_v, alone);
    sum_of_heads(to_k, rows, s, dk);
    sum_of_heads(to_v, rows, s, dv);
  }
  dk = summed(dk);
  dv = summed(dv);
}

}  // namespace weft::exact
