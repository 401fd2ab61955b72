#include "domain/ring.hpp"

#include <algorithm>
#include <cmath>
#include <limits>

#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"

namespace weft::domain {
namespace {

constexpr int kTag = 0x7fff0058;

// A block on its way: `tensors` of the part that it belongs to, one after the other.
struct Block {
  Tensor memory;
  std::int64_t size = 0;  // elements of one tensor
  Tensor part(int index, const Shape& shape) const { return memory.slice_flat(index * size, shape); }
};

Block make_block(Frame& frame, std::int64_t size, int tensors) {
  return {frame.compute().make({size * tensors}, DType::f32, Memory::shared), size};
}

// Sends `out` on to the next rank of the ring and receives that of the one before. Nothing moves of empty blocks.
Work pass_on(const Ring& ring, const Block& out, const Block& in) {
  const int n = static_cast<int>(ring.parts.size());
  std::vector<Call> calls;
  CallOptions options;
  options.tag = kTag;
  if (in.memory.count() > 0) calls.push_back(call::recv(in.memory, (ring.me + n - 1) % n, options));
  if (out.memory.count() > 0) calls.push_back(call::send(out.memory, (ring.me + 1) % n, options));
  return calls.empty() ? Work() : ring.axes.group().coalesced(calls);
}

std::int64_t elements(const HeadsShape& s, const IndexRange& part) {
  return s.batch * part.size() * s.kv_heads * s.head_dim;
}
Shape shape_of(const HeadsShape& s, const IndexRange& part) {
  return {s.batch, part.size(), s.kv_heads, s.head_dim};
}

enum class Meets : unsigned char { nothing, diagonal, all };
Meets meeting(const Ring& ring, int of, bool causal) {
  if (ring.queries.size() == 0 || ring.parts[static_cast<std::size_t>(of)].size() == 0) return Meets::nothing;
  if (!causal) return Meets::all;
  return of == ring.me ? Meets::diagonal : of < ring.me ? Meets::all : Meets::nothing;
}

// Adds what a block gives to what the blocks before it gave.
void put_together(const HeadsShape& s, std::int64_t queries, const Tensor& block, const Tensor& block_lse,
                  const Tensor& out, const Tensor& lse) {
  for (std::int64_t b = 0; b < s.batch; ++b)
    for (std::int64_t h = 0; h < s.heads; ++h)
      for (std::int64_t i = 0; i < queries; ++i) {
        float& sum = lse.f32()[static_cast<std::size_t>((b * s.heads + h) * queries + i)];
        const double before = static_cast<double>(sum),
                     more = static_cast<double>(
                         block_lse.f32()[static_cast<std::size_t>((b * s.heads + h) * queries + i)]);
        const double largest = std::max(before, more);
        const double share = std::exp(before - largest), added = std::exp(more - largest),
                     all = share + added;
        for (std::int64_t d = 0; d < s.head_dim; ++d) {
          const auto at = static_cast<std::size_t>(((b * queries + i) * s.heads + h) * s.head_dim + d);
          out.f32()[at] = static_cast<float>(
              (share * static_cast<double>(out.f32()[at]) + added * static_cast<double>(block.f32()[at])) /
              all);
        }
        sum = static_cast<float>(largest + std::log(all));
      }
}

void add(Frame& frame, const Tensor& more, const Tensor& to) {
  kernels::add(frame.kernels(), to.data_ptr<float>(), more.data_ptr<float>(), to.data_ptr<float>(),
               to.count());
}

void expect_host(const Frame& frame) {
  if (!(frame.compute().device() == Device{}))
    throw Error(ErrorCode::unsupported,
                "ring attention puts blocks together in the memory of the host; the Frame is on " +
                    to_string(frame.compute().device()));
}

void copy_to(const Tensor& from, const Tensor& to) {
  std::copy(from.f32().begin(), from.f32().end(), to.f32().begin());
}

}  // namespace

Ring::Ring(const LayoutRef& sequence) {
  const Partition partition(sequence);
  const PartitionDim of = partition.dim(1);
  axes = sequence->mesh().submesh(of.axes);
  me = axes.rank();
  for (const IndexRanges& part : of.parts) parts.push_back(part.empty() ? IndexRange{} : part.front());
  queries = own();
}

void ring_attention_forward(Frame& frame, const Ring& ring, const HeadsShape& s, bool causal, const Tensor& q,
                            const Tensor& k, const Tensor& v, const Tensor& out, const Tensor& log_sum_exp) {
  expect_host(frame);
  const int n = static_cast<int>(ring.parts.size());
  const std::int64_t queries = ring.queries.size();
  Block now = make_block(frame, elements(s, ring.own()), 2);
  copy_to(k, now.part(0, k.shape()));
  copy_to(v, now.part(1, v.shape()));
  const Tensor block = frame.compute().make(q.shape()), block_lse = frame.compute().make(log_sum_exp.shape());
  std::fill(out.f32().begin(), out.f32().end(), 0.0f);
  std::fill(log_sum_exp.f32().begin(), log_sum_exp.f32().end(), -std::numeric_limits<float>::infinity());
  for (int step = 0; step < n; ++step) {
    const int of = (ring.me + n - step) % n;
    const IndexRange& keys = ring.parts[static_cast<std::size_t>(of)];
    Block next;
    Work work;
    if (step + 1 < n) {  // the next block comes while this one is met
      next = make_block(frame, elements(s, ring.parts[static_cast<std::size_t>((of + n - 1) % n)]), 2);
      work = pass_on(ring, now, next);
    }
    const Meets meets = meeting(ring, of, causal);
    if (meets != Meets::nothing) {
      const Tensor keys_of = now.part(0, shape_of(s, keys)), values_of = now.part(1, shape_of(s, keys));
      if (meets == Meets::diagonal)
        kernels::attention_forward(frame.kernels(), q.data_ptr<float>(), keys_of.data_ptr<float>(),
                                   values_of.data_ptr<float>(), block.data_ptr<float>(),
                                   block_lse.data_ptr<float>(),
                                   {s.batch, queries, s.heads, s.kv_heads, s.head_dim});
      else
        kernels::full_attention_forward(frame.kernels(), q.data_ptr<float>(), keys_of.data_ptr<float>(),
                                        values_of.data_ptr<float>(), nullptr, block.data_ptr<float>(),
                                        block_lse.data_ptr<float>(),
                                        {s.batch, queries, keys.size(), s.heads, s.kv_heads, s.head_dim});
      put_together(s, queries, block, block_lse, out, log_sum_exp);
    }
    work.wait();
    now = std::move(next);
  }
}

// With the sum and output over all keys, each block's part of the gradients is what the kernels give for that block alone: a weight is
// e^(score - log_sum_exp), and its derivative needs dout · out of all.
void ring_attention_backward(Frame& frame, const Ring& ring, const HeadsShape& s, bool causal,
                             const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                             const Tensor& out, const Tensor& log_sum_exp, const Tensor& dq, const Tensor& dk,
                             const Tensor& dv) {
  expect_host(frame);
  const int n = static_cast<int>(ring.parts.size());
  const std::int64_t queries = ring.queries.size();
  Block now = make_block(frame, elements(s, ring.own()), 4);  // k, v, dk, dv
  copy_to(k, now.part(0, k.shape()));
  copy_to(v, now.part(1, v.shape()));
  for (const int gradient : {2, 3}) {
    const Tensor part = now.part(gradient, k.shape());
    std::fill(part.f32().begin(), part.f32().end(), 0.0f);
  }
  std::fill(dq.f32().begin(), dq.f32().end(), 0.0f);
  const Tensor more_q = frame.compute().make(dq.shape());
  for (int step = 0; step < n; ++step) {
    const int of = (ring.me + n - step) % n;
    const IndexRange& keys = ring.parts[static_cast<std::size_t>(of)];
    const Meets meets = meeting(ring, of, causal);
    if (meets != Meets::nothing) {
      const Shape shape = shape_of(s, keys);
      const Tensor keys_of = now.part(0, shape), values_of = now.part(1, shape),
                   more_k = frame.compute().make(shape), more_v = frame.compute().make(shape);
      if (meets == Meets::diagonal)
        kernels::attention_backward(
            frame.kernels(), dout.data_ptr<float>(), q.data_ptr<float>(), keys_of.data_ptr<float>(),
            values_of.data_ptr<float>(), out.data_ptr<float>(), log_sum_exp.data_ptr<float>(),
            more_q.data_ptr<float>(), more_k.data_ptr<float>(), more_v.data_ptr<float>(),
            {s.batch, queries, s.heads, s.kv_heads, s.head_dim});
      else
        kernels::full_attention_backward(
            frame.kernels(), dout.data_ptr<float>(), q.data_ptr<float>(), keys_of.data_ptr<float>(),
            values_of.data_ptr<float>(), nullptr, out.data_ptr<float>(), log_sum_exp.data_ptr<float>(),
            more_q.data_ptr<float>(), more_k.data_ptr<float>(), more_v.data_ptr<float>(), nullptr,
            {s.batch, queries, keys.size(), s.heads, s.kv_heads, s.head_dim});
      add(frame, more_q, dq);
      add(frame, more_k, now.part(2, shape));
      add(frame, more_v, now.part(3, shape));
    }
    if (n > 1) {  // after the last step each block is at home again
      Block next = make_block(frame, elements(s, ring.parts[static_cast<std::size_t>((of + n - 1) % n)]), 4);
      pass_on(ring, now, next).wait();
      now = std::move(next);
    }
  }
  copy_to(now.part(2, k.shape()), dk);
  copy_to(now.part(3, v.shape()), dv);
}

}  // namespace weft::domain
