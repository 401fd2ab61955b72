// Layers with activations in bf16: dtypes of y, dx and of what a Frame keeps, and numbers beside f64 within
// the rounding of bf16. The numbers of inputs and weights are such that bf16 has them exactly.
#include <numeric>

#include "nn/kernels/reference.hpp"
#include "nn/support.hpp"
#include "support/counting_allocator.hpp"
#include "weft/host/copy.hpp"
#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/conv.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/feed_forward.hpp"
#include "weft/nn/init.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/maps/conv_transpose.hpp"
#include "weft/nn/maps/resample.hpp"
#include "weft/nn/norm.hpp"
#include "weft/nn/precision.hpp"
#include "weft/nn/spectral_norm.hpp"
#include "weft/nn/window_attention.hpp"

namespace weft::bf16_layers_test {
namespace {

namespace reference = kernels::reference;
using test::error_text;
using Doubles = std::vector<double>;

constexpr double kUnit = 0x1p-8;  // the largest relative error of one rounding to bf16

// Standard normal numbers, rounded to bf16.
Tensor numbers(Context& context, const Shape& shape, std::string_view name, DType dtype = DType::bf16) {
  const Tensor wide = test::random_tensor(context, shape, name);
  const Tensor narrow(context, shape, DType::bf16);
  for (std::size_t i = 0; i < wide.f32().size(); ++i) narrow.as<bf16>()[i] = bf16(wide.f32()[i]);
  if (dtype == DType::bf16) return narrow;
  for (std::size_t i = 0; i < wide.f32().size(); ++i)
    wide.f32()[i] = static_cast<float>(narrow.as<bf16>()[i]);
  return wide;
}

Doubles doubles(const Tensor& t) {
  if (t.dtype() == DType::f32) return test::doubles(t);
  Doubles all;
  for (const bf16 x : t.as<bf16>()) all.push_back(static_cast<double>(static_cast<float>(x)));
  return all;
}

// |got - want| / |want|, in the Euclidean norm.
double error_of(const Doubles& got, const Doubles& want) {
  EXPECT_EQ(got.size(), want.size());
  double off = 0, all = 0;
  for (std::size_t i = 0; i < want.size() && i < got.size(); ++i) {
    off += (got[i] - want[i]) * (got[i] - want[i]);
    all += want[i] * want[i];
  }
  EXPECT_GT(all, 0);
  return std::sqrt(off / all);
}

void fill(Module& module, Compute& compute, DType weights) {
  for (Parameter* p : module.parameters()) p->set_dtype(weights);
  materialise(module, compute);
  for (ModuleBuffer* b : module.buffers()) initialise(*b, 3);
  for (Parameter* p : module.parameters()) {
    const Tensor values = numbers(compute.context(), p->local_shape(), p->path(), DType::f32);
    const float scale = p->global_shape().rank() == 2 ? 0.25f : 1.0f;  // a power of 2
    std::transform(values.f32().begin(), values.f32().end(), p->write_master().f32().begin(),
                   [&](float f) { return f * scale; });
  }
}

struct Results {
  Tensor y;
  Tensors dx;
  std::vector<std::pair<std::string, Doubles>> dw;
};

Results run(Module& module, const Tensors& x, DType dtype, Compute& compute) {
  Frame frame(compute, {.seed = 3, .step = 0});
  Results r;
  r.y = module.forward(x, frame)[0];
  r.dx = module.backward(numbers(compute.context(), r.y.shape(), "dy", dtype), frame);
  EXPECT_TRUE(frame.empty());
  for (Parameter* p : module.parameters()) {
    EXPECT_EQ(p->gradient().dtype(), DType::f32) << p->path();
    r.dw.emplace_back(p->path(), test::doubles(p->gradient()));
  }
  return r;
}

// The layer with activations in bf16 is compared with the layer in f32, which other tests compare with f64.
// The errors of f32 are 2^-15 of those of bf16. `units`: the number of roundings on the way, about.
template <class Make>
void expect_near_f32(Make&& make, const std::vector<Shape>& shapes, double units, double dw_units = -1) {
  test::Bench bench;
  Results of[2];
  for (const DType dtype : {DType::f32, DType::bf16}) {
    auto layer = make();
    fill(*layer, bench.compute, dtype);
    Tensors x;
    for (const Shape& shape : shapes)
      x.push_back(numbers(bench.context, shape, "x" + std::to_string(x.size()), dtype));
    Results& r = of[dtype == DType::bf16 ? 1 : 0] = run(*layer, x, dtype, bench.compute);
    EXPECT_EQ(r.y.dtype(), dtype);
    for (const Tensor& dx : r.dx) EXPECT_EQ(dx.dtype(), dtype);
  }
  EXPECT_LE(error_of(doubles(of[1].y), doubles(of[0].y)), units * kUnit) << "y";
  ASSERT_EQ(of[1].dx.size(), of[0].dx.size());
  for (std::size_t i = 0; i < of[0].dx.size(); ++i)
    EXPECT_LE(error_of(doubles(of[1].dx[i]), doubles(of[0].dx[i])), units * kUnit) << "dx " << i;
  for (std::size_t i = 0; i < of[0].dw.size(); ++i)
    if (of[0].dw[i].first.find("dpb.") == std::string::npos) {  // those of a position bias cancel
      EXPECT_LE(error_of(of[1].dw[i].second, of[0].dw[i].second), (dw_units < 0 ? units : dw_units) * kUnit)
          << of[0].dw[i].first;
    }
}

// y and dx are rounded once. dw is computed from exact numbers and is f32.
TEST(Bf16Linear, RoundsOnceAndSumsInF32) {
  test::Bench bench;
  constexpr std::int64_t kTokens = 70, kIn = 300, kOut = 130;
  for (const bool bias : {false, true}) {
    Linear layer(kIn, kOut, bias);
    fill(layer, bench.compute, DType::bf16);
    const Tensor x = numbers(bench.context, {kTokens, kIn}, "x");
    const Results r = run(layer, {x}, DType::bf16, bench.compute);
    const Doubles in = doubles(x), w = test::doubles(layer.weight->master()),
                  dy = doubles(numbers(bench.context, {kTokens, kOut}, "dy"));
    Doubles y(kTokens * kOut), dx(kTokens * kIn), dw(kOut * kIn), db(kOut), b;
    if (bias) b = test::doubles(layer.bias->master());
    const kernels::LinearShape s{kTokens, kIn, kOut};
    reference::linear_forward(in.data(), w.data(), bias ? b.data() : nullptr, y.data(), s);
    for (std::int64_t t = 0; t < kTokens; ++t)
      for (std::int64_t o = 0; o < kOut; ++o) {
        const double d = dy[static_cast<std::size_t>(t * kOut + o)];
        db[static_cast<std::size_t>(o)] += d;
        for (std::int64_t i = 0; i < kIn; ++i) {
          dx[static_cast<std::size_t>(t * kIn + i)] += d * w[static_cast<std::size_t>(o * kIn + i)];
          dw[static_cast<std::size_t>(o * kIn + i)] += d * in[static_cast<std::size_t>(t * kIn + i)];
        }
      }
    const auto expect_rounded = [](const Tensor& got, const Doubles& want, const char* what) {
      ASSERT_EQ(got.dtype(), DType::bf16) << what;
      const Doubles numbers = doubles(got);
      for (std::size_t i = 0; i < want.size(); ++i)  // and an error of the sum in f32 before
        ASSERT_NEAR(numbers[i], want[i], kUnit * std::abs(want[i]) + 1e-4) << what << " [" << i << "]";
    };
    expect_rounded(r.y, y, "y");
    expect_rounded(r.dx[0], dx, "dx");
    EXPECT_LE(error_of(r.dw[0].second, dw), 1e-5);
    if (bias) {
      EXPECT_LE(error_of(r.dw[1].second, db), 1e-5);
    }
  }
}

TEST(Bf16Layers, StayWithinTheRoundingOfBf16) {
  const auto rope = RopeTables::make(40, 16, 10000.0);
  const auto expect = [](const char* name, auto make, const std::vector<Shape>& shapes, double units,
                         double dw_units = -1) {
    SCOPED_TRACE(name);
    expect_near_f32(make, shapes, units, dw_units);
  };
  expect(
      "Linear", [] { return std::make_unique<Linear>(96, 64, true); }, {{2, 33, 96}}, 1, 0.01);
  expect(
      "RMSNorm", [] { return std::make_unique<RMSNorm>(96); }, {{2, 33, 96}}, 1, 0.01);
  expect(
      "LayerNorm", [] { return std::make_unique<LayerNorm>(96); }, {{2, 33, 96}}, 1, 0.01);
  expect(
      "GELU", [] { return std::make_unique<GELU>(); }, {{2, 33, 96}}, 1);
  expect(
      "ReLU", [] { return std::make_unique<ReLU>(); }, {{2, 33, 96}}, 1);
  expect(
      "Dropout", [] { return std::make_unique<Dropout>(0.25); }, {{2, 33, 96}}, 1);
  expect(
      "SwiGLU", [] { return std::make_unique<SwiGLU>(64, 96); }, {{2, 33, 64}}, 4);
  expect(
      "Attention",
      [&] {
        return std::make_unique<Attention>(AttentionConfig{64, 4, 2, 16}, rope);
      },
      {{2, 33, 64}}, 6);
  expect(
      "CrossAttention",
      [] {
        return std::make_unique<CrossAttention>(
            CrossAttentionConfig{.dim = 64, .heads = 4, .head_dim = 16, .context_dim = 48, .bias = false});
      },
      {{2, 33, 64}, {2, 21, 48}}, 6);
}

TEST(Bf16Layers, OnMapsStayWithinTheRoundingOfBf16) {
  using kernels::Padding;
  const auto expect = [](const char* name, auto make, const Shape& x, double units, double dw_units = -1) {
    SCOPED_TRACE(name);
    expect_near_f32(make, {x}, units, dw_units);
  };
  const auto conv = [](const Conv2dConfig& c) { return [c] { return std::make_unique<Conv2d>(c); }; };
  const Shape map{2, 6, 10, 12};
  expect("1x1", conv({.in = 6, .out = 8}), map, 1, 1);
  expect("1x1 of few pixels", conv({.in = 6, .out = 8}), {2, 6, 3, 4}, 1, 1);
  expect("3x3", conv({.in = 6, .out = 8, .kernel = 3, .padding = 1}), map, 1, 1);
  expect("circular",
         conv({.in = 6, .out = 8, .kernel = 3, .stride = 2, .padding = 1, .padding_mode = Padding::circular}),
         map, 1, 1);
  expect("groups", conv({.in = 6, .out = 4, .kernel = 3, .groups = 2}), map, 1, 1);
  expect(
      "transposed",
      [] {
        return std::make_unique<ConvTranspose2d>(
            ConvTranspose2dConfig{.in = 6, .out = 4, .kernel = 3, .stride = 2});
      },
      map, 1, 1);
  expect(
      "spectral norm",
      [] {
        auto layer = std::make_unique<Conv2d>(Conv2dConfig{.in = 6, .out = 8, .kernel = 3});
        layer->add_spectral_norm();
        return layer;
      },
      map, 2, 4);
  expect(
      "padding",
      [] {
        return std::make_unique<Pad2d>(Pad2dConfig{1, 2, 3, 1, Padding::reflect, Padding::circular});
      },
      map, 1);
  expect(
      "mean", [] { return std::make_unique<AvgPool2d>(Pool2dConfig{.kernel = 3, .padding = 1}); }, map, 1);
  expect(
      "maximum", [] { return std::make_unique<MaxPool2d>(Pool2dConfig{}); }, map, 1);
  expect(
      "means of any size",
      [] {
        return std::make_unique<AdaptiveAvgPool2d>(Extent2d{3, 5});
      },
      map, 1);
  expect(
      "resizing", [] { return std::make_unique<Resize2d>(Resize2dConfig{.scale = 2}); }, map, 1);
  expect(
      "shuffle", [] { return std::make_unique<PixelShuffle>(1); }, map, 0);
  expect(
      "channel norm", [] { return std::make_unique<ChannelNorm>(6); }, map, 1, 0.01);
  expect(
      "group norm", [] { return std::make_unique<GroupNorm>(2, 6); }, map, 1, 0.01);
  expect(
      "batch norm", [] { return std::make_unique<BatchNorm>(6); }, map, 1, 0.01);
  expect(
      "layer norm over space",
      [] {
        return std::make_unique<LayerNorm>(Shape{6, 10, 12});
      },
      map, 1, 0.01);
  for (const double dropout : {0.0, 0.3})
    expect(
        dropout == 0 ? "windows" : "windows with dropout",
        [&] {
          WindowAttentionConfig c;
          c.dim = 16, c.heads = 2, c.head_dim = 8, c.window = 2, c.dropout = dropout;
          return std::make_unique<WindowAttention>(c);
        },
        {2, 16, 4, 6}, 6);
  expect(
      "feed forward", [] { return std::make_unique<ChannelFeedForward>(6, 12, 0.2); }, map, 4);
}

// Layers on maps keep bf16 for backward, and no copy in f32 of it.
TEST(Bf16Layers, OnMapsKeepBf16) {
  test::Bench bench;
  const auto expect = [&](auto layer, const Shape& x) {
    fill(*layer, bench.compute, DType::bf16);
    Frame frame(bench.compute, {.seed = 3, .step = 0});
    layer->forward(numbers(bench.context, x, "x"), frame);
    bool any = false;
    frame.visit_kept([&](const Module&, const Tensors& kept) {
      for (const Tensor& t : kept) {
        any = any || t.dtype() == DType::bf16;
        EXPECT_FALSE(t.dtype() == DType::f32 && t.count() >= x.count()) << to_string(t.shape());
      }
    });
    EXPECT_TRUE(any);
  };
  const Shape map{2, 6, 10, 12};
  expect(std::make_unique<Conv2d>(Conv2dConfig{.in = 6, .out = 8, .kernel = 3, .padding = 1}), map);
  expect(std::make_unique<Conv2d>(Conv2dConfig{.in = 6, .out = 8}), map);
  expect(std::make_unique<ConvTranspose2d>(ConvTranspose2dConfig{.in = 6, .out = 4, .kernel = 3}), map);
  expect(std::make_unique<ChannelNorm>(6), map);
  expect(std::make_unique<GroupNorm>(2, 6), map);
  expect(std::make_unique<BatchNorm>(6), map);
  expect(std::make_unique<LayerNorm>(Shape{6, 10, 12}), map);
  WindowAttentionConfig c;
  c.dim = 16, c.heads = 2, c.head_dim = 8, c.window = 2;
  expect(std::make_unique<WindowAttention>(c), {2, 16, 8, 8});
}

// A Frame keeps half of the bytes for the backward pass.
TEST(Bf16Layers, KeepHalfOfTheBytes) {
  std::size_t kept[2];
  for (const DType dtype : {DType::f32, DType::bf16}) {
    test::CountingAllocator memory;
    ContextOptions options;
    options.allocator = memory.functions();
    Context context(options);
    Compute compute(context, 1);
    Sequential model;
    model.append(std::make_unique<RMSNorm>(64));
    model.append(std::make_unique<SwiGLU>(64, 128));
    fill(model, compute, dtype);
    const Tensor x = numbers(context, {4096, 64}, "x", dtype);
    Frame first(compute), frame(compute);
    model.forward(x, first);  // scratch memory grows here
    const std::size_t before = memory.bytes();
    model.forward(x, frame);
    kept[dtype == DType::bf16 ? 1 : 0] = memory.bytes() - before;
  }
  EXPECT_GT(kept[0], 4096u * 4 * (64 + 3 * 128));  // what norm, gate, up and swiglu have given
  EXPECT_NEAR(static_cast<double>(kept[1]) / static_cast<double>(kept[0]), 0.5, 0.02);
}

TEST(Bf16Embedding, GivesTheDtypeThatWasSet) {
  test::Bench bench;
  for (const DType weights : {DType::f32, DType::bf16})
    for (const DType output : {DType::f32, DType::bf16}) {
      Embedding layer(10, 24);
      EXPECT_TRUE(layer.set_output_dtype(output));
      fill(layer, bench.compute, weights);
      const Tensor tokens = test::tokens_of(bench.context, {4}, {3, 9, 3, 0});
      Frame frame(bench.compute);
      const Tensor y = layer.forward(tokens, frame)[0];
      EXPECT_EQ(y.dtype(), output);
      const Doubles table = test::doubles(layer.weight->master()), rows = doubles(y);
      for (std::size_t i = 0; i < 24; ++i) EXPECT_EQ(rows[24 + i], table[9 * 24 + i]);
      const Tensor dy = numbers(bench.context, {4, 24}, "dy", output);
      layer.backward(dy, frame);
      const Doubles d = doubles(dy), dw = test::doubles(layer.weight->gradient());
      for (std::size_t i = 0; i < 24; ++i) EXPECT_NEAR(dw[3 * 24 + i], d[i] + d[48 + i], 1e-6);
    }
}

// Text of the error of a pass.
std::string text(Module& layer, const Tensors& x, Compute& compute, const Tensor& dy = {}) {
  return error_text(ErrorCode::bad_argument, [&] {
    Frame frame(compute);
    const Tensor y = layer.forward(x, frame)[0];
    layer.backward(dy ? dy : y, frame);
  });
}

TEST(Bf16Layers, NameADtypeThatTheyDoNotTake) {
  test::Bench bench;
  const auto zeros = [&](const Shape& shape, DType dtype) {
    return Tensor::zeros(bench.context, shape, dtype);
  };
  Linear narrow(4, 3), wide(4, 3);
  fill(narrow, bench.compute, DType::bf16);
  fill(wide, bench.compute, DType::f32);
  EXPECT_EQ(text(wide, {zeros({2, 4}, DType::bf16)}, bench.compute),
            "\"\": x is bf16 and the weight f32; expected a weight in bf16");
  EXPECT_EQ(text(narrow, {zeros({2, 4}, DType::bf16)}, bench.compute, zeros({2, 3}, DType::f32)),
            "\"\": dy is f32; expected bf16");
  EXPECT_EQ(text(narrow, {zeros({2, 4}, DType::f32)}, bench.compute, zeros({2, 3}, DType::bf16)),
            "\"\": dy is bf16; expected f32");
  narrow.set_output_dtype(DType::f32);
  EXPECT_EQ(text(narrow, {zeros({2, 4}, DType::bf16)}, bench.compute, zeros({2, 3}, DType::bf16)),
            "\"\": dy is bf16; expected f32");
  wide.set_output_dtype(DType::bf16);
  EXPECT_EQ(text(wide, {zeros({2, 4}, DType::f32)}, bench.compute),
            "\"\": y is bf16 and the weight f32; expected a weight in bf16");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [&] { wide.set_output_dtype(DType::f16); }),
            "\"\": set_output_dtype got f16; expected f32 or bf16");
  ChannelNorm maps(3);
  fill(maps, bench.compute, DType::bf16);
  EXPECT_EQ(text(maps, {zeros({1, 3, 2, 2}, DType::f16)}, bench.compute),
            "\"\": x is f16; expected f32 or bf16");
  EXPECT_EQ(text(maps, {zeros({1, 3, 2, 2}, DType::bf16)}, bench.compute, zeros({1, 3, 2, 2}, DType::f32)),
            "\"\": dy is f32; expected bf16");
  Compute& compute = bench.compute;
  EXPECT_EQ(
      error_text(
          ErrorCode::bad_argument,
          [&] { add_tensors(zeros({2}, DType::bf16), zeros({2}, DType::f32), compute, TensorName("sum")); }),
      "sum: the second term is f32; expected bf16");
}

// A head that gives f32 has the bits of its sums, not those of bf16.
TEST(Bf16Linear, GivesF32ToALoss) {
  test::Bench bench;
  Linear head(64, 40);
  head.set_output_dtype(DType::f32);
  fill(head, bench.compute, DType::bf16);
  const Tensor x = numbers(bench.context, {9, 64}, "x");
  Frame frame(bench.compute);
  const Tensor logits = head.forward(x, frame)[0];
  ASSERT_EQ(logits.dtype(), DType::f32);
  const Doubles in = doubles(x), w = test::doubles(head.weight->master());
  Doubles y(9 * 40);
  reference::linear_forward(in.data(), w.data(), static_cast<const double*>(nullptr), y.data(), {9, 64, 40});
  EXPECT_LE(error_of(test::doubles(logits), y), 1e-5);
  EXPECT_EQ(head.backward(numbers(bench.context, {9, 40}, "dy", DType::f32), frame)[0].dtype(), DType::bf16);
}

TEST(SetPrecision, CastsInputsAndOutputsAndTheirGradients) {
  test::Bench bench;
  Sequential model;
  model.append(std::make_unique<LayerNorm>(24));
  model.append(std::make_unique<GELU>());
  set_precision(model, {.param = DType::bf16, .activations = DType::bf16});
  fill(model, bench.compute, DType::bf16);
  const Tensor x = numbers(bench.context, {5, 24}, "x", DType::f32);
  const Results r = run(model, {x}, DType::f32, bench.compute);
  EXPECT_EQ(r.y.dtype(), DType::f32);
  EXPECT_EQ(r.dx.at(0).dtype(), DType::f32);
  for (const double v : doubles(r.y))
    EXPECT_EQ(v, static_cast<double>(static_cast<float>(bf16(static_cast<float>(v)))));

  Sequential with_head;
  with_head.append(std::make_unique<Embedding>(10, 24));
  with_head.append(std::make_unique<Linear>(24, 8));
  set_precision(with_head, {.param = DType::bf16, .activations = DType::bf16, .output = DType::bf16});
  fill(with_head, bench.compute, DType::bf16);
  const Tensor tokens = test::tokens_of(bench.context, {3}, {1, 2, 3});
  EXPECT_EQ(run(with_head, {tokens}, DType::bf16, bench.compute).y.dtype(), DType::bf16);
}

TEST(SetPrecision, RefusesWhatDoesNotFit) {
  Linear model(4, 3);
  const auto refused = [&](const MixedPrecision& p) {
    return error_text(ErrorCode::bad_argument, [&] { set_precision(model, p); });
  };
  EXPECT_EQ(refused({.param = DType::f16}), "set_precision: precision.param is f16; expected f32 or bf16");
  EXPECT_EQ(refused({.activations = DType::i64}),
            "set_precision: precision.activations is i64; expected f32 or bf16");
  EXPECT_EQ(refused({.activations = DType::bf16}),
            "set_precision: precision.activations is bf16 and param f32; expected "
            "bf16 of both, since products in f32 do not take bf16");
  EXPECT_EQ(refused({.param = DType::bf16, .output = DType::bf16}),
            "set_precision: precision.output is bf16 and activations f32; expected f32, or bf16 of both");
}

}  // namespace
}  // namespace weft::bf16_layers_test
