// Cross-attention against plain loops, its gradients against finite differences, and what it refuses. Over
// ranks: tp/layers.
#include "weft/nn/attention.hpp"

#include <fstream>

#include "base/text/plain_streams.hpp"
#include "nn/support.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::attention_test {
namespace {

using test::error_text;
using test::random_tensor;

CrossAttentionConfig small() {
  return {.dim = 6,
          .heads = 4,
          .head_dim = 3,
          .context_dim = 5,
          .kv_heads = 2,
          .bias = true,
          .init = Normal{0.5},
          .out_init = Normal{0.5}};
}

void set_up(Module& module, Compute& compute) {
  materialise(module, compute);
  initialise(module, 3);
  for (Parameter* p : module.parameters())
    if (p->global_shape().rank() == 1)
      RandomStream(4, p->path()).normal(0, p->master().count(), p->write_master().f32().data());
}

// w x + b for every row
std::vector<double> projected(const Linear& layer, const Tensor& x) {
  const std::int64_t in = layer.weight->global_shape()[1], out = layer.weight->global_shape()[0];
  std::vector<double> y;
  for (std::int64_t t = 0; t < x.count() / in; ++t)
    for (std::int64_t o = 0; o < out; ++o) {
      double sum = static_cast<double>(layer.bias->master().f32()[static_cast<std::size_t>(o)]);
      for (std::int64_t i = 0; i < in; ++i)
        sum += static_cast<double>(x.f32()[static_cast<std::size_t>(t * in + i)]) *
               static_cast<double>(layer.weight->master().f32()[static_cast<std::size_t>(o * in + i)]);
      y.push_back(sum);
    }
  return y;
}

TEST(CrossAttention, EqualsLoopsOverQueriesAndKeys) {
  test::Bench bench;
  CrossAttention layer(small());
  set_up(layer, bench.compute);
  const std::int64_t batch = 2, queries = 3, keys = 4, heads = 4, kv_heads = 2, size = 3;
  const Tensor x = random_tensor(bench.context, {batch, queries, 6}, "x"),
               context = random_tensor(bench.context, {batch, keys, 5}, "context");
  const auto q = projected(layer.q_proj, x), k = projected(layer.k_proj, context),
             v = projected(layer.v_proj, context);
  Tensor out(bench.context, {batch, queries, heads * size});
  for (std::int64_t b = 0; b < batch; ++b)
    for (std::int64_t h = 0; h < heads; ++h)
      for (std::int64_t i = 0; i < queries; ++i) {
        const auto of_q = [&](std::int64_t d) {
          return q[static_cast<std::size_t>(((b * queries + i) * heads + h) * size + d)];
        };
        const auto at = [&](std::int64_t j, std::int64_t d) {
          return static_cast<std::size_t>(((b * keys + j) * kv_heads + h / 2) * size + d);
        };
        std::vector<double> weights;
        double sum = 0;
        for (std::int64_t j = 0; j < keys; ++j) {
          double score = 0;
          for (std::int64_t d = 0; d < size; ++d) score += of_q(d) * k[at(j, d)];
          weights.push_back(std::exp(score / std::sqrt(3.0)));
          sum += weights.back();
        }
        for (std::int64_t d = 0; d < size; ++d) {
          double value = 0;
          for (std::int64_t j = 0; j < keys; ++j)
            value += weights[static_cast<std::size_t>(j)] / sum * v[at(j, d)];
          out.f32()[static_cast<std::size_t>(((b * queries + i) * heads + h) * size + d)] =
              static_cast<float>(value);
        }
      }
  Frame frame = Frame::inference(bench.compute);
  test::expect_near(layer.forward({x, context}, frame)[0], projected(layer.o_proj, out), 1e-5, "y");
}

// One input of two, so that the helper for modules of one input checks it. The gradient of the other is in
// `other`.
class WithOneFixed : public Module {
 public:
  WithOneFixed(CrossAttention& layer, Tensor fixed, bool fixes_context, Tensor mask = {})
      : layer_(layer), fixed_(std::move(fixed)), mask_(std::move(mask)), fixes_context_(fixes_context) {
    add("layer", layer);
  }

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    Tensors in = fixes_context_ ? Tensors{x[0], fixed_} : Tensors{fixed_, x[0]};
    if (mask_) in.push_back(mask_);
    return layer_.forward(in, f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    const Tensors both = layer_.backward(dy, f);
    EXPECT_EQ(both.size(), 2u);
    return {both[fixes_context_ ? 0 : 1]};
  }
  CrossAttention& layer_;
  const Tensor fixed_, mask_;
  const bool fixes_context_;
};

TEST(CrossAttention, GradientsOfBothInputsMatchDifferences) {
  test::Bench bench;
  const Tensor x = random_tensor(bench.context, {2, 3, 6}, "x"),
               context = random_tensor(bench.context, {2, 4, 5}, "context");
  for (const bool fixes_context : {true, false}) {
    CrossAttention layer(small());
    WithOneFixed module(layer, fixes_context ? context : x, fixes_context);
    set_up(module, bench.compute);
    // The bias of k adds one number to all scores of a query: its gradient is 0 up to rounding.
    test::expect_gradients_match_differences(module, fixes_context ? x : context, bench.compute, 2e-3, 1e-3);
  }
}

// A padded context whose padding is hidden gives the results of the context without padding, in both passes,
// whatever the padding contains.
TEST(CrossAttention, PaddingThatIsHiddenChangesNothing) {
  test::Bench bench;
  CrossAttention layer(small());
  set_up(layer, bench.compute);
  const std::vector<std::int64_t> lengths{3, 0, 5};
  const Tensor x = random_tensor(bench.context, {3, 4, 6}, "x"),
               context = random_tensor(bench.context, {3, 5, 5}, "context"),
               dy = random_tensor(bench.context, {3, 4, 6}, "dy");
  Frame frame(bench.compute);
  const Tensor y = layer.forward({x, context, key_padding_mask(bench.compute, lengths, 5)}, frame)[0];
  const Tensors d = layer.backward(dy, frame);
  ASSERT_EQ(d.size(), 2u);  // the mask has no gradient
  EXPECT_TRUE(frame.empty());
  std::vector<std::vector<double>> gradients;
  for (Parameter* p : layer.parameters()) {
    gradients.push_back(test::doubles(p->gradient()));
    p->zero_gradient();
  }
  const auto sample = [&](const Tensor& t, std::int64_t b, std::int64_t rows) {
    return t.slice_flat(b * t.size(1) * t.size(2), {1, rows, t.size(2)});
  };
  for (std::int64_t b = 0; b < 3; ++b) {
    SCOPED_TRACE(b);
    const std::int64_t length = lengths[static_cast<std::size_t>(b)];
    const Tensor alone = layer.forward({sample(x, b, 4), sample(context, b, length)}, frame)[0];
    test::expect_near(sample(y, b, 4), test::doubles(alone), 1e-5, "y");
    const Tensors of_alone = layer.backward(sample(dy, b, 4), frame);
    test::expect_near(sample(d[0], b, 4), test::doubles(of_alone[0]), 1e-5, "dx");
    test::expect_near(sample(d[1], b, length), test::doubles(of_alone[1]), 1e-5, "d(context)");
    for (std::int64_t i = length * 5; i < 25; ++i)
      EXPECT_EQ(d[1].f32()[static_cast<std::size_t>(b * 25 + i)], 0.0f);
  }
  std::size_t at = 0;  // summed over the samples
  for (Parameter* p : layer.parameters())
    test::expect_near(p->gradient(), gradients.at(at++), 1e-4, p->path());
}

// An additive mask of each query and sample; of each query; of each key: scores in f64, and differences.
TEST(CrossAttention, GradientsUnderAMaskMatchDifferences) {
  test::Bench bench;
  const Tensor x = random_tensor(bench.context, {2, 3, 6}, "x"),
               context = random_tensor(bench.context, {2, 4, 5}, "context");
  for (const Shape& of_mask : {Shape{2, 3, 4}, Shape{1, 3, 4}, Shape{2, 1, 4}, Shape{1, 1, 4}}) {
    SCOPED_TRACE(to_string(of_mask));
    const Tensor mask = random_tensor(bench.context, of_mask, "mask");
    mask.f32()[1] = -std::numeric_limits<float>::infinity();
    for (const bool fixes_context : {true, false}) {
      CrossAttention layer(small());
      WithOneFixed module(layer, fixes_context ? context : x, fixes_context, mask);
      set_up(module, bench.compute);
      test::expect_gradients_match_differences(module, fixes_context ? x : context, bench.compute, 2e-3,
                                               1e-3);
    }
  }
}

TEST(CrossAttention, RefusesWhatDoesNotFit) {
  test::Bench bench;
  const auto refused = [](auto change) {
    CrossAttentionConfig c = small();
    change(c);
    return error_text(ErrorCode::bad_argument, [&] { CrossAttention{c}; });
  };
  EXPECT_EQ(refused([](auto& c) { c.dim = 0; }), "cross-attention: dim is 0; expected at least 1");
  EXPECT_EQ(refused([](auto& c) { c.kv_heads = 3; }),
            "cross-attention: heads 4 do not divide into kv_heads 3");
  CrossAttention layer(small());
  EXPECT_EQ(CrossAttention({.dim = 2, .heads = 1, .head_dim = 2}).config().context_dim, 2);
  set_up(layer, bench.compute);
  Frame frame = Frame::inference(bench.compute);
  const auto text = [&](const Shape& x, const Shape& context) {
    return error_text(ErrorCode::bad_argument, [&] {
      layer.forward({Tensor::zeros(bench.context, x), Tensor::zeros(bench.context, context)}, frame);
    });
  };
  EXPECT_EQ(text({2, 3, 5}, {2, 4, 5}), "\"\": x is (2, 3, 5); expected (batch, sequence, 6)");
  EXPECT_EQ(text({2, 3, 6}, {2, 4}), "\"\": context is (2, 4); expected (batch, sequence, 5)");
  EXPECT_EQ(text({2, 3, 6}, {1, 4, 5}), "\"\": context is (1, 4, 5); expected a batch of 2, as x has");
  EXPECT_EQ(error_text(ErrorCode::bad_argument,
                       [&] {
                         layer.forward(Tensor::zeros(bench.context, {2, 3, 6}), frame);
                       }),
            "\"\": got 1 inputs; expected 2");
  const auto masked = [&](const Shape& mask, DType dtype = DType::f32) {
    return error_text(ErrorCode::bad_argument, [&] {
      layer.forward({Tensor::zeros(bench.context, {2, 3, 6}), Tensor::zeros(bench.context, {2, 4, 5}),
                     Tensor::zeros(bench.context, mask, dtype)},
                    frame);
    });
  };
  const std::string fits = "; expected (2 or 1, 3 or 1, 4), of batch, queries and keys";
  EXPECT_EQ(masked({2, 4}), "\"\": mask is (2, 4)" + fits);
  EXPECT_EQ(masked({3, 1, 4}), "\"\": mask is (3, 1, 4)" + fits);
  EXPECT_EQ(masked({1, 2, 4}), "\"\": mask is (1, 2, 4)" + fits);
  EXPECT_EQ(masked({1, 1, 1}), "\"\": mask is (1, 1, 1)" + fits);
  EXPECT_EQ(masked({1, 1, 4}, DType::i64), "\"\": mask is i64; expected f32");
  const std::vector<std::int64_t> lengths{4, 5};
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { key_padding_mask(bench.compute, lengths, 4); }),
            "key_padding_mask: lengths[1] is 5; expected 0 to 4 (keys)");
}

WindowAttentionConfig windows(double dropout) {
  WindowAttentionConfig c;
  c.dim = 8, c.heads = 2, c.head_dim = 3, c.window = 2, c.init = c.out_init = Normal{0.5},
  c.dropout = dropout;
  return c;
}

// The finite differences use training passes of one step, which all drop the same weights.
TEST(WindowAttentionDropout, GradientsMatchDifferences) {
  test::Bench bench;
  WindowAttention layer(windows(0.4)), whole(windows(0));
  set_up(layer, bench.compute);
  set_up(whole, bench.compute);
  const Tensor x = random_tensor(bench.context, {2, 8, 4, 4}, "x"),
               cotangent = random_tensor(bench.context, {2, 8, 4, 4}, "dy");
  const auto pass = [&](std::int64_t step) {
    Frame frame(bench.compute, {.seed = 3, .step = step});
    return layer.forward(x, frame)[0];
  };
  EXPECT_EQ(test::floats(pass(1)), test::floats(pass(1)));
  EXPECT_NE(test::floats(pass(1)), test::floats(pass(2)));
  Frame inference = Frame::inference(bench.compute), plain = Frame::inference(bench.compute);
  EXPECT_EQ(test::floats(layer.forward(x, inference)[0]), test::floats(whole.forward(x, plain)[0]));

  Frame frame(bench.compute, {.seed = 3, .step = 1});
  layer.forward(x, frame);
  const Tensor dx = layer.backward(cotangent, frame)[0];
  EXPECT_TRUE(frame.empty());
  const auto check = [&](const Tensor& at, const Tensor& gradient, const std::string& what) {
    const Tensor direction = random_tensor(bench.context, at.shape(), "direction of " + what);
    const std::vector<float> kept = test::floats(at);
    double value[2];
    for (const int side : {0, 1}) {
      for (std::size_t i = 0; i < kept.size(); ++i)
        at.f32()[i] = kept[i] + (side == 0 ? 1.0f : -1.0f) / 128 * direction.f32()[i];
      value[side] = test::dot(pass(1), cotangent);
    }
    std::ranges::copy(kept, at.f32().begin());
    const double scale = std::sqrt(test::dot(gradient, gradient) * test::dot(direction, direction));
    EXPECT_NEAR((value[0] - value[1]) * 64, test::dot(gradient, direction), 4e-3 * scale + 1e-3) << what;
  };
  check(x, dx, "x");
  for (Parameter* p : layer.parameters()) check(p->master(), p->gradient(), p->path());

  Frame without_step(bench.compute);
  EXPECT_TRUE(error_text(ErrorCode::bad_argument, [&] {
                layer.forward(x, without_step);
              }).starts_with("\"dropout\": random numbers in step -1"));
}

// The mean over many steps is the result without dropout.
TEST(WindowAttentionDropout, KeepsTheMean) {
  test::Bench bench;
  WindowAttention layer(windows(0.25));
  set_up(layer, bench.compute);
  const Tensor x = random_tensor(bench.context, {1, 8, 2, 2}, "x");
  Frame inference = Frame::inference(bench.compute);
  const Tensor expected = layer.forward(x, inference)[0];
  std::vector<double> sum(32, 0.0);
  constexpr int kSteps = 4000;
  for (int step = 0; step < kSteps; ++step) {
    Frame frame(bench.compute, {.seed = 3, .step = step});
    const Tensor y = layer.forward(x, frame)[0];
    for (std::size_t i = 0; i < sum.size(); ++i) sum[i] += static_cast<double>(y.f32()[i]) / kSteps;
    frame.clear();
  }
  const double largest =
      std::abs(*std::ranges::max_element(expected.f32(), {}, [](float f) { return std::abs(f); }));
  test::expect_near(expected, sum, 0.05 * largest, "mean of y");
}

// The most memory that this process has had, in bytes, as the kernel counts. 0 if the kernel does not report
// it.
double most_memory() {
  FileIn status("/proc/self/status");
  for (std::string line; std::getline(status, line);)
    if (line.starts_with("VmHWM:")) return std::stod(line.substr(6)) * 1024;
  return 0;
}

// Scores are never kept. The scores of one head of 8192 tokens would be 256 MB. In a separate process the
// largest amount of memory is that from here on.
TEST(Attention, MemoryGrowsWithTheSequenceAndNotWithItsSquare) {
  if (!test::kPlainMemory) GTEST_SKIP() << test::kNoPlainMemory;
  test::run_ranks(test::Ranks::processes, 1, [](test::Rank& rank) {
    constexpr std::int64_t kTokens = 8192, kSize = 16;
    Compute compute(rank.context, 1);  // a child of a process whose OpenMP has threads must not ask for them
    const auto make = [&](const char* name) { return random_tensor(rank.context, {kTokens, kSize}, name); };
    const Tensor q = make("q"), k = make("k"), v = make("v"), dout = make("dout"), out = make("out"),
                 dq = make("dq"), dk = make("dk"), dv = make("dv");
    const Tensor softmax(rank.context, {kTokens, kernels::kSoftmaxTerms});
    const double before = most_memory();
    if (before == 0) GTEST_SKIP() << "/proc/self/status has no VmHWM";
    kernels::KernelContext& ctx = kernels_of(compute);
    const kernels::AttentionShape s{1, kTokens, 1, 1, kSize};
    kernels::attention_forward(ctx, q.data_ptr<float>(), k.data_ptr<float>(), v.data_ptr<float>(),
                               out.data_ptr<float>(), softmax.data_ptr<float>(), s);
    kernels::attention_backward(ctx, dout.data_ptr<float>(), q.data_ptr<float>(), k.data_ptr<float>(),
                                v.data_ptr<float>(), out.data_ptr<float>(), softmax.data_ptr<float>(),
                                dq.data_ptr<float>(), dk.data_ptr<float>(), dv.data_ptr<float>(), s);
    EXPECT_LT(most_memory() - before, 32e6);
    std::vector<char> noticed(64 << 20, 1);
    EXPECT_GT(most_memory() - before, 60e6 * noticed[1]) << "more would have been seen";
  });
}

}  // namespace
}  // namespace weft::attention_test
