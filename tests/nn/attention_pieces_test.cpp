// Attention with keys and queries in pieces has the bits of attention in one piece, however the queries and
// keys are cut.
#include "nn/kernel_support.hpp"
#include "nn/kernels/gemm/gemm.hpp"

namespace weft::attention_pieces_test {
namespace {

using namespace kernels;
using namespace kernels::test;

enum class Bias {
  none,
  of_keys,
  of_queries
};  // what is added to scores: (samples, 1, keys) or (samples, queries, keys)
struct Case {
  std::int64_t batch, queries, keys, heads, kv_heads, head_dim;
  bool causal;
  Bias bias = Bias::none;
  bool of_each_sample = false;
  bool bf16 = false, large = false;  // large: scores are near 1e5
};

// Shapes with one piece and several, pieces that end within a block, shared key/value heads, and fewer heads
// than threads.
const Case kCases[] = {{1, 40, 40, 2, 1, 8, true},
                       {2, 300, 300, 4, 2, 16, true},
                       {1, 1100, 1100, 3, 1, 8, true},
                       {1, 600, 600, 1, 1, 64, true},
                       {2, 70, 900, 4, 2, 16, false},
                       {1, 513, 257, 2, 2, 24, false},
                       {1, 5, 256, 6, 2, 7, false},
                       {1, 129, 1030, 2, 1, 32, false},
                       {2, 70, 900, 4, 2, 16, false, Bias::of_keys, true},
                       {2, 70, 900, 4, 2, 16, false, Bias::of_queries, true},
                       {3, 129, 600, 2, 1, 8, false, Bias::of_keys},
                       {2, 300, 513, 2, 2, 8, false, Bias::of_queries},
                       {1, 300, 300, 2, 1, 16, true, Bias::none, false, false, true},
                       {2, 70, 900, 4, 2, 16, false, Bias::of_queries, true, false, true},
                       {1, 600, 300, 1, 1, 64, false, Bias::of_queries}};  // few heads for the threads

struct Results {
  Array<float> out, softmax, dq, dk, dv;
};

struct Given {
  explicit Given(const Case& c)
      : q(random_array(c.batch * c.queries * c.heads * c.head_dim, 1, -2, 2)),
        k(random_array(c.batch * c.keys * c.kv_heads * c.head_dim, 2, -2, 2)),
        v(random_array(c.batch * c.keys * c.kv_heads * c.head_dim, 3)),
        dout(random_array(c.batch * c.queries * c.heads * c.head_dim, 4)) {
    // Scores that grow with the position: the largest so far changes from piece to piece.
    for (std::size_t i = 0; i < k.size(); ++i)
      k[i] *= 1.0f + 3.0f * static_cast<float>(i) / static_cast<float>(k.size());
    for (std::size_t i = 0; c.large && i < q.size(); i += static_cast<std::size_t>(c.head_dim)) q[i] = 1e3f;
    for (std::size_t i = 0; c.large && i < k.size(); i += static_cast<std::size_t>(c.head_dim)) k[i] = 4e2f;
    if (c.bias == Bias::none) return;
    // The bias hides each third key, all keys of the first blocks for some queries, and all keys for one
    // query.
    const std::int64_t samples = c.of_each_sample ? c.batch : 1,
                       rows = c.bias == Bias::of_queries ? c.queries : 1;
    bias = random_array(samples * rows * c.keys, 5);
    for (std::int64_t i = 0; i < samples * rows * c.keys; ++i) {
      const std::int64_t key = i % c.keys, row = i / c.keys % rows;
      if (key % 3 == 1 || (row % 5 == 2 && key < 280) || (rows > 1 && row == 4))
        bias[static_cast<std::size_t>(i)] = -std::numeric_limits<float>::infinity();
    }
  }
  ScoreBias whole(const Case& c) const {
    return {bias.empty() ? nullptr : bias.data(), c.of_each_sample, c.bias == Bias::of_queries};
  }
  Array<float> q, k, v, dout, bias;
};

Results of_whole(KernelContext& ctx, const Case& c, const Given& x) {
  Results r{garbage(static_cast<std::int64_t>(x.q.size())),
            garbage(c.batch * c.heads * c.queries * kSoftmaxTerms),
            garbage(static_cast<std::int64_t>(x.q.size())), garbage(static_cast<std::int64_t>(x.k.size())),
            garbage(static_cast<std::int64_t>(x.k.size()))};
  if (c.causal) {
    const AttentionShape s{c.batch, c.keys, c.heads, c.kv_heads, c.head_dim, c.bf16};
    attention_forward(ctx, x.q.data(), x.k.data(), x.v.data(), r.out.data(), r.softmax.data(), s);
    attention_backward(ctx, x.dout.data(), x.q.data(), x.k.data(), x.v.data(), r.out.data(), r.softmax.data(),
                       r.dq.data(), r.dk.data(), r.dv.data(), s);
  } else {
    const FullAttentionShape s{c.batch, c.queries, c.keys, c.heads, c.kv_heads, c.head_dim, c.bf16};
    full_attention_forward(ctx, x.q.data(), x.k.data(), x.v.data(), x.whole(c), r.out.data(),
                           r.softmax.data(), s);
    full_attention_backward(ctx, x.dout.data(), x.q.data(), x.k.data(), x.v.data(), x.whole(c), r.out.data(),
                            r.softmax.data(), r.dq.data(), r.dk.data(), r.dv.data(), nullptr, s);
  }
  return r;
}

// Positions [lo, hi) of x: (batch, positions, width)
Array<float> positions(const Array<float>& x, std::int64_t batch, std::int64_t lo, std::int64_t hi,
                       std::int64_t width) {
  Array<float> part;
  const std::int64_t all = batch == 0 ? 0 : static_cast<std::int64_t>(x.size()) / batch;
  for (std::int64_t b = 0; b < batch; ++b)
    part.insert(part.end(), x.begin() + b * all + lo * width, x.begin() + b * all + hi * width);
  return part;
}

// The bias on the scores of queries [lo, hi) and keys [begin, end), made in `room`.
ScoreBias bias_of_piece(const Case& c, const Given& x, std::int64_t lo, std::int64_t hi, std::int64_t begin,
                        std::int64_t end, Array<float>& room) {
  if (c.bias == Bias::none) return nullptr;
  const bool of_queries = c.bias == Bias::of_queries;
  const std::int64_t samples = c.of_each_sample ? c.batch : 1, all = of_queries ? c.queries : 1;
  room.clear();
  for (std::int64_t b = 0; b < samples; ++b)
    for (std::int64_t row = of_queries ? lo : 0; row < (of_queries ? hi : 1); ++row) {
      const auto from = x.bias.begin() + (b * all + row) * c.keys;
      room.insert(room.end(), from + begin, from + end);
    }
  return {room.data(), c.of_each_sample, of_queries};
}

// Queries [lo, hi) with keys in pieces: out, softmax and dq. Then keys [lo, hi) with queries in pieces: dk
// and dv.
void expect_pieces(KernelContext& ctx, const Case& c, const Given& x, const Results& want, std::int64_t lo,
                   std::int64_t hi, std::int64_t step) {
  const std::int64_t wide = c.heads * c.head_dim, kv_wide = c.kv_heads * c.head_dim;
  Array<float> scratch;
  const auto sums = [&](const Array<float>& all, std::int64_t from, std::int64_t to, std::int64_t terms) {
    return positions(all, c.batch * c.heads, from, to, terms);
  };
  if (lo < c.queries) {
    const std::int64_t end = std::min(hi, c.queries), count = end - lo, last = c.causal ? end : c.keys;
    const auto q = positions(x.q, c.batch, lo, end, wide), dout = positions(x.dout, c.batch, lo, end, wide);
    auto out = garbage(c.batch * count * wide), dq = out,
         softmax = garbage(c.batch * c.heads * count * kSoftmaxTerms),
         delta = garbage(c.batch * c.heads * count);
    const auto piece = [&](std::int64_t key) {
      const std::int64_t size = std::min(step, last - key);
      return AttentionPiece{c.batch, count, size,     c.heads,  c.kv_heads,         c.head_dim,
                            lo,      key,   c.causal, key == 0, key + size == last, c.bf16};
    };
    for (std::int64_t key = 0; key < last; key += step) {
      const AttentionPiece p = piece(key);
      attention_piece_forward(ctx, q.data(), positions(x.k, c.batch, key, key + p.keys, kv_wide).data(),
                              positions(x.v, c.batch, key, key + p.keys, kv_wide).data(),
                              bias_of_piece(c, x, lo, end, key, key + p.keys, scratch), out.data(),
                              softmax.data(), p);
    }
    ASSERT_TRUE(same_bits(out, positions(want.out, c.batch, lo, end, wide)));
    ASSERT_TRUE(same_bits(softmax, sums(want.softmax, lo, end, kSoftmaxTerms)));
    attention_delta(ctx, dout.data(), out.data(), delta.data(), {c.batch, count, 0, c.heads, 1, c.head_dim});
    for (std::int64_t key = 0; key < last; key += step) {
      const AttentionPiece p = piece(key);
      attention_piece_backward_queries(ctx, dout.data(), q.data(),
                                       positions(x.k, c.batch, key, key + p.keys, kv_wide).data(),
                                       positions(x.v, c.batch, key, key + p.keys, kv_wide).data(),
                                       bias_of_piece(c, x, lo, end, key, key + p.keys, scratch),
                                       softmax.data(), delta.data(), dq.data(), p);
    }
    ASSERT_TRUE(same_bits(dq, positions(want.dq, c.batch, lo, end, wide)));
  }
  if (lo < c.keys) {
    const std::int64_t end = std::min(hi, c.keys), count = end - lo;
    const auto k = positions(x.k, c.batch, lo, end, kv_wide), v = positions(x.v, c.batch, lo, end, kv_wide);
    auto dk = garbage(c.batch * count * kv_wide), dv = dk, deltas = garbage(c.batch * c.heads * c.queries);
    attention_delta(ctx, x.dout.data(), want.out.data(), deltas.data(),
                    {c.batch, c.queries, 0, c.heads, 1, c.head_dim});
    const std::int64_t steps = (c.queries + step - 1) / step, first = c.causal ? lo / 64 * 64 : 0;
    for (std::int64_t i = steps - 1; i >= 0; --i) {
      const std::int64_t from = std::max(i * step, first), to = std::min(c.queries, (i + 1) * step);
      if (from >= to) continue;
      attention_piece_backward_keys(ctx, positions(x.dout, c.batch, from, to, wide).data(),
                                    positions(x.q, c.batch, from, to, wide).data(), k.data(), v.data(),
                                    bias_of_piece(c, x, from, to, lo, end, scratch),
                                    sums(want.softmax, from, to, kSoftmaxTerms).data(),
                                    sums(deltas, from, to, 1).data(), dk.data(), dv.data(),
                                    {c.batch, to - from, count, c.heads, c.kv_heads, c.head_dim, from, lo,
                                     c.causal, i == steps - 1, i == 0, c.bf16});
    }
    ASSERT_TRUE(same_bits(dk, positions(want.dk, c.batch, lo, end, kv_wide)));
    ASSERT_TRUE(same_bits(dv, positions(want.dv, c.batch, lo, end, kv_wide)));
  }
}

void expect_the_bits_of_the_whole(bool bf16) {
  for (Case c : kCases) {
    c.bf16 = bf16;
    const Given x(c);
    KernelContext one(1), three(3);
    const Results want = of_whole(one, c, x), other = of_whole(three, c, x);
    ASSERT_TRUE(same_bits(want.out, other.out) && same_bits(want.dq, other.dq) &&
                same_bits(want.dk, other.dk) && same_bits(want.dv, other.dv));
    for (const std::int64_t step : {256, 512, 2048})
      for (const std::int64_t share : {7, 64, 100, 333, 2000}) {
        if (share < 64 && std::max(c.queries, c.keys) > 300) continue;
        for (std::int64_t lo = 0; lo < std::max(c.queries, c.keys); lo += share) {
          SCOPED_TRACE(testing::Message() << c.queries << " queries, " << c.keys << " keys, [" << lo << ", "
                                          << lo + share << ") in pieces of " << step);
          ASSERT_NO_FATAL_FAILURE(
              expect_pieces(share == 100 ? three : one, c, x, want, lo, lo + share, step));
        }
      }
  }
}

TEST(AttentionPieces, HaveTheBitsOfTheWhole) { expect_the_bits_of_the_whole(false); }
TEST(AttentionPieces, SoTheyDoInBf16) { expect_the_bits_of_the_whole(true); }

TEST(AttentionPieces, NothingIsSeen) {
  KernelContext ctx(1);
  const auto q = random_array(6, 1);
  auto out = garbage(6), softmax = garbage(3 * kSoftmaxTerms), dq = garbage(6), dk = garbage(4),
       dv = garbage(4);
  attention_piece_forward(ctx, q.data(), nullptr, nullptr, nullptr, out.data(), softmax.data(),
                          {1, 3, 0, 1, 1, 2, 0, 0, false, true, true});
  EXPECT_EQ(out, zeros(6));
  for (const float x : log_sums(softmax)) EXPECT_EQ(x, -std::numeric_limits<float>::infinity());
  attention_piece_backward_queries(ctx, q.data(), q.data(), nullptr, nullptr, nullptr, softmax.data(),
                                   q.data(), dq.data(), {1, 3, 0, 1, 1, 2, 0, 0, false, true, true});
  EXPECT_EQ(dq, zeros(6));
  attention_piece_backward_keys(ctx, nullptr, nullptr, q.data(), q.data(), nullptr, nullptr, nullptr,
                                dk.data(), dv.data(), {1, 0, 2, 1, 1, 2, 0, 0, false, true, true});
  EXPECT_EQ(dk, zeros(4));
  EXPECT_EQ(dv, zeros(4));
}

// More keys than the causal queries see. Some queries of a piece see no key of it, and in one piece no query
// does.
TEST(AttentionPieces, KeysThatNoQuerySees) {
  KernelContext ctx(2);
  constexpr std::int64_t kBatch = 2, kQueries = 70, kKeys = 300, kWidth = 3;
  const auto q = random_array(kBatch * kQueries * kWidth, 1), k = random_array(kBatch * kKeys * kWidth, 2),
             softmax = random_array(kBatch * kQueries * kSoftmaxTerms, 3, 5, 6);
  for (const std::int64_t first_key : {0, 256}) {
    auto dk = garbage(kBatch * kKeys * kWidth), dv = dk;
    attention_piece_backward_keys(ctx, q.data(), q.data(), k.data(), k.data(), nullptr, softmax.data(),
                                  softmax.data(), dk.data(), dv.data(),
                                  {kBatch, kQueries, kKeys, 1, 1, kWidth, 0, first_key, true, true, true});
    const std::int64_t seen = first_key == 0 ? kQueries : 0;
    for (std::int64_t i = 0; i < kBatch * kKeys * kWidth; ++i) {
      const bool is_seen = i / kWidth % kKeys < seen;
      ASSERT_EQ(dk[static_cast<std::size_t>(i)] != 0.0f, is_seen) << i;
      ASSERT_EQ(dv[static_cast<std::size_t>(i)] != 0.0f, is_seen) << i;
      ASSERT_LT(std::abs(dk[static_cast<std::size_t>(i)]), 1e6f) << i;
    }
  }
}

TEST(AttentionPieces, RefusesPiecesThatBeginWithinABlock) {
  KernelContext ctx(1);
  EXPECT_EQ(message_of([&] {
              attention_piece_forward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                      {1, 0, 0, 2, 1, 4, 0, 100, true, true, true});
            }),
            "attention_piece_forward: first_key is 100; expected a multiple of 256");
  EXPECT_EQ(message_of([&] {
              attention_piece_backward_queries(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                               nullptr, nullptr, {1, 0, 0, 2, 1, 4, 0, 64, true, true, true});
            }),
            "attention_piece_backward_queries: first_key is 64; expected a multiple of 256");
  EXPECT_EQ(message_of([&] {
              attention_piece_backward_keys(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                            nullptr, nullptr, nullptr,
                                            {1, 0, 0, 2, 1, 4, 32, 0, true, true, true});
            }),
            "attention_piece_backward_keys: first_query is 32; expected a multiple of 64");
  EXPECT_EQ(message_of([&] {
              attention_piece_forward(ctx, nullptr, nullptr, nullptr, nullptr, nullptr, nullptr,
                                      {1, 0, 0, 5, 2, 4, 0, 0, true, true, true});
            }),
            "attention_piece_forward: 5 query heads over 2 key/value heads; expected a multiple");
}

}  // namespace
}  // namespace weft::attention_pieces_test
