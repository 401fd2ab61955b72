#include "domain/split_attention.hpp"

#include <algorithm>
#include <functional>
#include <vector>

#include "domain/space.hpp"
#include "weft/base/error.hpp"

namespace weft::domain {
namespace {

// Positions of a piece. They are at most those of one rank, so that memory is that of T / n, and few enough
// that most of the exchange overlaps with the products.
std::int64_t piece_size(std::int64_t all, std::size_t parts) {
  constexpr std::int64_t kMost = 4 * kernels::kAttentionKeys;
  static_assert(kernels::kAttentionKeys % kernels::kAttentionQueries == 0);
  const std::int64_t share = ceil_div(all, static_cast<std::int64_t>(parts));
  return std::min(kMost, ceil_div(share, kernels::kAttentionKeys) * kernels::kAttentionKeys);
}

// needed(part, piece): the range that the ranks of a part need of a piece.
Pieces pieces_of(const LayoutRef& layout,
                 const std::function<IndexRange(std::size_t, const IndexRange&)>& needed) {
  const Parts parts = parts_of(layout, 1);
  Pieces pieces{parts.own().lo, parts.own().size(), {}, {}};
  const std::int64_t step = piece_size(parts.size, parts.ranges.size());
  for (std::int64_t lo = 0; lo < parts.size; lo += step) {
    std::vector<IndexRange> wanted;
    for (std::size_t part = 0; part < parts.ranges.size(); ++part)
      wanted.push_back(needed(part, {lo, std::min(parts.size, lo + step)}));
    pieces.wanted.push_back(wanted[static_cast<std::size_t>(parts.mine)]);
    pieces.windows.emplace_back(layout, std::vector<WindowDim>{WindowDim::ranges(1, wanted)});
  }
  return pieces;
}

// (batch, heads, positions), or each term of (batch, heads, positions, terms), seen as (batch, positions,
// heads), whose dimension 1 is cut.
std::vector<TensorView> by_position(const Tensor& sums) {
  const bool has_terms = sums.shape().rank() == 4;
  std::vector<TensorView> views;
  for (std::int64_t term = 0; term < (has_terms ? sums.size(3) : 1); ++term) {
    const TensorView all = sums;
    views.push_back({all.count() == 0 ? all.data : all.data + term * size_bytes(all.dtype),
                     all.dtype,
                     all.device,
                     {all.shape[0], all.shape[2], all.shape[1]},
                     {all.strides[0], all.strides[2], all.strides[1]}});
  }
  return views;
}

// Fetches the pieces of some tensors, one after the other. While one piece is used, the next one arrives.
class Incoming {
 public:
  /// Layouts of `own`, (batch, own positions, …), and of `sums`, (batch, heads, own positions), perhaps
  /// followed by the terms of each. In backward, the pieces go from the last to the first.
  Incoming(Frame& frame, const Pieces& pieces, std::vector<Tensor> own, std::vector<Tensor> sums,
           bool backwards)
      : frame_(frame), pieces_(pieces), own_(std::move(own)), sums_(std::move(sums)), backwards_(backwards) {
    for (std::size_t i = 0; i < pieces.wanted.size(); ++i) {
      if (pieces.wanted[at(i)].size() == 0) continue;
      if (!any_) first_ = i;
      any_ = true;
      last_ = i;
    }
    begin(0);
  }

  /// Whether this rank needs any piece.
  bool any() const { return any_; }
  /// Moves to the next piece. Returns false after the last one. Collective.
  bool next() {
    if (at_ == pieces_.wanted.size()) return false;
    coming_.finish();
    now_ = std::move(tensors_);
    ++at_;
    begin(at_);
    return true;
  }
  /// The part of the piece that this rank needs, perhaps nothing; whether it is the first or last one that it
  /// needs; and the tensors in order.
  const IndexRange& range() const { return pieces_.wanted[at(at_ - 1)]; }
  bool begins() const { return at_ - 1 == first_; }
  bool ends() const { return at_ - 1 == last_; }
  const float* operator[](std::size_t tensor) const { return now_[tensor].data_ptr<float>(); }

 private:
  std::size_t at(std::size_t i) const { return backwards_ ? pieces_.wanted.size() - 1 - i : i; }

  void begin(std::size_t i) {
    if (i == pieces_.wanted.size()) return;
    const std::int64_t size = pieces_.wanted[at(i)].size();
    std::vector<WindowField> fields;
    tensors_.clear();
    for (const Tensor& own : own_) {
      Shape shape = own.shape();
      shape[1] = size;
      tensors_.push_back(frame_.compute().make(shape, DType::f32, Memory::shared));
      fields.push_back({own, tensors_.back()});
    }
    for (const Tensor& sums : sums_) {
      Shape shape = sums.shape();
      shape[2] = size;
      tensors_.push_back(frame_.compute().make(shape, DType::f32, Memory::shared));
      const std::vector<TensorView> from = by_position(sums), to = by_position(tensors_.back());
      for (std::size_t term = 0; term < from.size(); ++term) fields.push_back({from[term], to[term]});
    }
    coming_ = pieces_.windows[at(i)].start(fields, frame_.compute().stream());
  }

  Frame& frame_;
  const Pieces& pieces_;
  const std::vector<Tensor> own_, sums_;
  const bool backwards_;
  bool any_ = false;
  std::size_t first_ = 0, last_ = 0, at_ = 0;
  std::vector<Tensor> tensors_, now_;
  WindowTransfer coming_;  // destroyed first: it writes to tensors_
};

kernels::AttentionPiece piece(const HeadsShape& s, const IndexRange& queries, const IndexRange& keys,
                              bool causal, bool begins, bool ends) {
  return {s.batch,    queries.size(), keys.size(), s.heads, s.kv_heads, s.head_dim,
          queries.lo, keys.lo,        causal,      begins,  ends,       s.bf16_products};
}

// A part of a mask, in the form that kernels take.
class PieceOfMask {
 public:
  /// Rows and keys of `from`, counted from its first ones. If the mask is equal for all queries, its single
  /// row.
  PieceOfMask(const SplitMask& mask, const Tensor& from, const IndexRange& rows, const IndexRange& keys) {
    if (!from) return;
    const IndexRange of = mask.of_each_query ? rows : IndexRange{0, 1};
    const std::int64_t width = from.size(2), wanted = keys.size();
    const float* const data = from.data_ptr<float>();
    values_.resize(static_cast<std::size_t>(from.size(0) * of.size() * wanted));
    float* to = values_.data();
    for (std::int64_t b = 0; b < from.size(0); ++b)
      for (std::int64_t row = of.lo; row < of.hi; ++row, to += wanted)
        std::copy_n(data + (b * from.size(1) + row) * width + keys.lo, wanted, to);
    bias_ = {values_.data(), mask.of_each_sample, mask.of_each_query};
  }
  const kernels::ScoreBias& bias() const { return bias_; }

 private:
  std::vector<float> values_;
  kernels::ScoreBias bias_;
};

void expect_host(const Frame& frame) {
  if (!(frame.compute().device() == Device{}))
    throw Error(
        ErrorCode::unsupported,
        "attention over a sequence that is cut is computed in the memory of the host; the Frame is on " +
            to_string(frame.compute().device()));
}

IndexRange own(const Pieces& pieces) { return {pieces.first, pieces.first + pieces.size}; }

}  // namespace

SplitAttention::SplitAttention(const LayoutRef& q, const LayoutRef& k, bool causal_in) : causal(causal_in) {
  const Parts of_q = parts_of(q, 1), of_k = parts_of(k, 1);
  keys = pieces_of(k, [&](std::size_t part, const IndexRange& piece) {
    const IndexRange& from = of_q.ranges[part];
    if (from.size() == 0) return IndexRange{};
    const std::int64_t hi = causal_in ? std::min(piece.hi, from.hi) : piece.hi;
    return piece.lo < hi ? IndexRange{piece.lo, hi} : IndexRange{};
  });
  queries = pieces_of(q, [&](std::size_t part, const IndexRange& piece) {
    const IndexRange& of = of_k.ranges[part];
    if (of.size() == 0) return IndexRange{};
    constexpr std::int64_t kBlock = kernels::kAttentionQueries;
    const std::int64_t lo = causal_in ? std::max(piece.lo, of.lo / kBlock * kBlock) : piece.lo;
    return lo < piece.hi ? IndexRange{lo, piece.hi} : IndexRange{};
  });
}

void split_attention_forward(Frame& frame, const SplitAttention& split, const HeadsShape& s, const Tensor& q,
                             const Tensor& k, const Tensor& v, const SplitMask& mask, const Tensor& out,
                             const Tensor& softmax) {
  expect_host(frame);
  const auto attend = [&](const IndexRange& of, const float* keys, const float* values, bool begins,
                          bool ends) {
    const PieceOfMask added(mask, mask.of_queries, {0, split.queries.size}, of);
    kernels::attention_piece_forward(frame.kernels(), q.data_ptr<float>(), keys, values, added.bias(),
                                     out.data_ptr<float>(), softmax.data_ptr<float>(),
                                     piece(s, own(split.queries), of, split.causal, begins, ends));
  };
  Incoming keys(frame, split.keys, {k, v}, {}, false);
  if (!keys.any()) attend({}, nullptr, nullptr, true, true);
  while (keys.next())
    if (keys.range().size() > 0) attend(keys.range(), keys[0], keys[1], keys.begins(), keys.ends());
}

void split_attention_backward(Frame& frame, const SplitAttention& split, const HeadsShape& s,
                              const Tensor& dout, const Tensor& q, const Tensor& k, const Tensor& v,
                              const SplitMask& mask, const Tensor& out, const Tensor& softmax,
                              const Tensor& dq, const Tensor& dk, const Tensor& dv) {
  const Tensor delta = frame.compute().make({softmax.size(0), softmax.size(1), softmax.size(2)});
  kernels::attention_delta(frame.kernels(), dout.data_ptr<float>(), out.data_ptr<float>(),
                           delta.data_ptr<float>(),
                           {s.batch, split.queries.size, split.keys.size, s.heads, s.kv_heads, s.head_dim});
  const auto of_queries = [&](const IndexRange& of, const float* keys, const float* values, bool begins,
                              bool ends) {
    const PieceOfMask added(mask, mask.of_queries, {0, split.queries.size}, of);
    kernels::attention_piece_backward_queries(frame.kernels(), dout.data_ptr<float>(), q.data_ptr<float>(),
                                              keys, values, added.bias(), softmax.data_ptr<float>(),
                                              delta.data_ptr<float>(), dq.data_ptr<float>(),
                                              piece(s, own(split.queries), of, split.causal, begins, ends));
  };
  const auto of_keys = [&](const IndexRange& of, const float* douts, const float* queries, const float* sums,
                           const float* deltas, bool begins, bool ends) {
    const PieceOfMask added(mask, mask.of_keys, of, {0, split.keys.size});
    kernels::attention_piece_backward_keys(frame.kernels(), douts, queries, k.data_ptr<float>(),
                                           v.data_ptr<float>(), added.bias(), sums, deltas,
                                           dk.data_ptr<float>(), dv.data_ptr<float>(),
                                           piece(s, of, own(split.keys), split.causal, begins, ends));
  };
  Incoming keys(frame, split.keys, {k, v}, {}, false);
  Incoming queries(frame, split.queries, {dout, q}, {softmax, delta}, true);
  if (!keys.any()) of_queries({}, nullptr, nullptr, true, true);
  if (!queries.any()) of_keys({}, nullptr, nullptr, nullptr, nullptr, true, true);
  // Processes keys and queries by turns. In causal attention the first ranks have few keys to see and many
  // queries that see theirs, and the last ranks the reverse. So no rank waits long.
  for (bool more = true; more;) {
    more = keys.next();
    if (more && keys.range().size() > 0)
      of_queries(keys.range(), keys[0], keys[1], keys.begins(), keys.ends());
    const bool more_queries = queries.next();
    if (more_queries && queries.range().size() > 0)
      of_keys(queries.range(), queries[0], queries[1], queries[2], queries[3], queries.begins(),
              queries.ends());
    more = more || more_queries;
  }
}

}  // namespace weft::domain
