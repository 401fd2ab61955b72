// Attention in bf16: the kernels of f32, on widened operands. Each part of a key or value is read once for
// many queries, so that the copies are a small part of the work.
#include "nn/kernels/widened.hpp"
#include "nn/kernels/cpu_context.hpp"

namespace weft::kernels::cpu {
namespace {

// No kernel inside uses this memory.
class StateMemory {
 public:
  StateMemory(KernelContext& ctx, std::int64_t floats) : data_(ctx.state().scratch_widened(floats)) {}
  float* data() const { return data_; }

 private:
  float* data_;
};

template <auto Narrow, auto Wide>
using OfWide = Widened<Narrow, Wide, StateMemory>;
using Table = KernelTable;

}  // namespace

template <>
void attention_forward<bf16>(KernelContext& ctx, const bf16* q, const bf16* k, const bf16* v, bf16* out,
                             float* softmax, AttentionShape s) {
  OfWide<&Table::attention_forward_bf16, &Table::attention_forward>::run(ctx, q, k, v, out, softmax, s);
}

template <>
void attention_backward<bf16>(KernelContext& ctx, const bf16* dout, const bf16* q, const bf16* k,
                              const bf16* v, const bf16* out, const float* softmax, bf16* dq, bf16* dk,
                              bf16* dv, AttentionShape s) {
  OfWide<&Table::attention_backward_bf16, &Table::attention_backward>::run(ctx, dout, q, k, v, out, softmax,
                                                                           dq, dk, dv, s);
}

template <>
void full_attention_forward<bf16>(KernelContext& ctx, const bf16* q, const bf16* k, const bf16* v,
                                  ScoreBias bias, bf16* out, float* softmax, FullAttentionShape s) {
  OfWide<&Table::full_attention_forward_bf16, &Table::full_attention_forward>::run(ctx, q, k, v, bias, out,
                                                                                   softmax, s);
}

template <>
void full_attention_backward<bf16>(KernelContext& ctx, const bf16* dout, const bf16* q, const bf16* k,
                                   const bf16* v, ScoreBias bias, const bf16* out, const float* softmax,
                                   bf16* dq, bf16* dk, bf16* dv, float* dbias, FullAttentionShape s) {
  OfWide<&Table::full_attention_backward_bf16, &Table::full_attention_backward>::run(
      ctx, dout, q, k, v, bias, out, softmax, dq, dk, dv, dbias, s);
}

}  // namespace weft::kernels::cpu
