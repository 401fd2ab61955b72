// A Linear in float8: against torchao, and against an emulation in f64 with the same codes; what its Frame
// keeps; values that are not finite.
#include "weft/nn/float8_linear.hpp"

#include <functional>

#include "nn/float8_reference.hpp"
#include "nn/support.hpp"
#include "support/golden_case.hpp"
#include "weft/nn/float8.hpp"

namespace weft::float8_linear_test {
namespace {

using float8::Granularity;
using test::Bench;
using test::random_tensor;

constexpr Float8Recipe kRecipes[] = {Float8Recipe::tensorwise, Float8Recipe::rowwise,
                                     Float8Recipe::rowwise_gw_hp};

std::vector<std::uint8_t> bytes_of(const Tensor& t) {
  const auto* const p = reinterpret_cast<const std::uint8_t*>(t.data());
  return {p, p + t.bytes()};
}

// A matrix in f64.
struct Matrix {
  std::int64_t rows, columns;
  std::vector<double> values;
  double& operator()(std::int64_t r, std::int64_t c) {
    return values[static_cast<std::size_t>(r * columns + c)];
  }
  double operator()(std::int64_t r, std::int64_t c) const {
    return values[static_cast<std::size_t>(r * columns + c)];
  }
};
Matrix matrix_of(const Tensor& t) {
  const float8::MatrixSize size = float8::matrix_size(t.shape());
  return {size.rows, size.columns, test::doubles(t)};
}

// The matrix that codes of m stand for: scale, cast and divide by the scale, in f64 except for the two
// roundings to f32 of the rule.
Matrix through_float8(const Matrix& m, DType format, Granularity g, bool power_of_two) {
  const test::Float8Reference reference(format);
  const auto group = [&](std::int64_t r, std::int64_t c) {
    return static_cast<std::size_t>(g == Granularity::tensorwise ? 0 : g == Granularity::rowwise ? r : c);
  };
  std::vector<double> scales(static_cast<std::size_t>(std::max(m.rows, m.columns)), 0);
  for (std::int64_t r = 0; r < m.rows; ++r)
    for (std::int64_t c = 0; c < m.columns; ++c)
      scales[group(r, c)] = std::max(scales[group(r, c)], std::abs(m(r, c)));
  for (double& s : scales) {
    s = static_cast<float>(reference.values.back() / std::max(s, 1e-12));
    if (power_of_two) s = std::exp2(std::floor(std::log2(s)));
  }
  Matrix out = m;
  for (std::int64_t r = 0; r < m.rows; ++r)
    for (std::int64_t c = 0; c < m.columns; ++c) {
      const int code = reference.code(static_cast<float>(m(r, c) * scales[group(r, c)]));
      const double value = reference.values[static_cast<std::size_t>(code & 0x7f)];
      out(r, c) = (code & 0x80 ? -value : value) / scales[group(r, c)];
    }
  return out;
}
Matrix rounded(Matrix m) {
  for (double& v : m.values) v = static_cast<float>(bf16(static_cast<float>(v)));
  return m;
}
Matrix transposed(const Matrix& m) {
  Matrix t{m.columns, m.rows, std::vector<double>(m.values.size())};
  for (std::int64_t r = 0; r < m.rows; ++r)
    for (std::int64_t c = 0; c < m.columns; ++c) t(c, r) = m(r, c);
  return t;
}
Matrix product(const Matrix& a, const Matrix& b) {
  Matrix c{a.rows, b.columns, std::vector<double>(static_cast<std::size_t>(a.rows * b.columns))};
  for (std::int64_t i = 0; i < a.rows; ++i)
    for (std::int64_t k = 0; k < a.columns; ++k)
      for (std::int64_t j = 0; j < b.columns; ++j) c(i, j) += a(i, k) * b(k, j);
  return c;
}

void expect_near(const Tensor& got, const std::vector<double>& expected, double tolerance,
                 const std::string& what) {
  double largest = 0;
  for (const double e : expected) largest = std::max(largest, std::abs(e));
  test::expect_near(got, expected, tolerance * largest, what);
}

// A layer with values, converted by the recipe.
struct Converted {
  Converted(Bench& bench, const Float8LinearOptions& options, std::int64_t in, std::int64_t out,
            bool with_bias = true, DType dtype = DType::f32)
      : layer(in, out, with_bias, Normal{0.3}), linears(std::make_shared<Float8Linears>(options)) {
    layer.weight->set_dtype(dtype);
    if (with_bias) layer.bias->set_init(Normal{1});
    materialise(layer, bench.compute);
    initialise(layer, 5);
    Float8Linears::convert(linears, layer);
  }
  Linear layer;
  std::shared_ptr<Float8Linears> linears;
};

TEST(Float8Linear, IsTheEmulationInF64) {
  Bench bench;
  for (const Float8Recipe recipe : kRecipes)
    for (const DType dtype : {DType::f32, DType::bf16}) {
      SCOPED_TRACE(std::string(name(recipe)) + " " + std::string(name(dtype)));
      const bool tensorwise = recipe == Float8Recipe::tensorwise,
                 high = recipe == Float8Recipe::rowwise_gw_hp;
      Converted c(bench, {recipe}, 48, 32, true, dtype);
      const Tensor x = random_tensor(bench.context, {2, 17, 48}, "x"),
                   dy = random_tensor(bench.context, {2, 17, 32}, "dy");
      Frame frame(bench.compute);
      const Tensor y = c.layer.forward(x, frame)[0], dx = c.layer.backward(dy, frame)[0];
      EXPECT_TRUE(frame.empty());

      const auto cast = [&](const Matrix& m, DType format, Granularity g) {
        return through_float8(m, format, tensorwise ? Granularity::tensorwise : g, !tensorwise);
      };
      const DType of_dy = tensorwise ? DType::f8e5m2 : DType::f8e4m3;
      const Matrix mx = matrix_of(x), mdy = matrix_of(dy);
      Matrix w = matrix_of(c.layer.weight->master());
      if (dtype == DType::bf16) w = rounded(w);
      Matrix expected = product(cast(mx, DType::f8e4m3, Granularity::rowwise),
                                transposed(cast(w, DType::f8e4m3, Granularity::rowwise)));
      const Tensor& bias = c.layer.bias->weight();
      for (std::int64_t r = 0; r < expected.rows; ++r)
        for (std::int64_t o = 0; o < expected.columns; ++o) {
          const auto at = static_cast<std::size_t>(o);
          expected(r, o) += bias.f32()[at];
        }
      expect_near(y, expected.values, 1e-6, "y");
      expect_near(dx,
                  product(cast(mdy, of_dy, Granularity::rowwise),
                          through_float8(w, DType::f8e4m3,
                                         recipe == Float8Recipe::rowwise ? Granularity::columnwise
                                                                         : Granularity::tensorwise,
                                         !tensorwise))
                      .values,
                  1e-6, "dx");
      const Matrix dw = high ? product(transposed(rounded(mdy)), rounded(mx))
                             : product(transposed(cast(mdy, of_dy, Granularity::columnwise)),
                                       cast(mx, DType::f8e4m3, Granularity::columnwise));
      expect_near(c.layer.weight->gradient(), dw.values, 1e-6, "dw");

      // A second use adds; dw of both is twice the first to the bit, since the codes are the same.
      const std::vector<float> once = test::floats(c.layer.weight->gradient());
      c.layer.forward(x, frame);
      c.layer.backward(dy, frame);
      for (std::size_t i = 0; i < once.size(); ++i)
        ASSERT_NEAR(c.layer.weight->gradient().f32()[i], 2 * once[i], 1e-6);
      // The gradient of the bias is that of the layer before: dy is not cast.
      std::vector<double> db(32, 0);
      for (std::int64_t r = 0; r < mdy.rows; ++r)
        for (std::int64_t o = 0; o < 32; ++o) db[static_cast<std::size_t>(o)] += 2 * mdy(r, o);
      expect_near(c.layer.bias->gradient(), db, 1e-6, "db");
    }
}

TEST(Float8Linear, KeepsWhatTheWeightGradientNeeds) {
  Bench bench;
  const Tensor x = random_tensor(bench.context, {16, 64}, "x");
  for (const Float8Recipe recipe : kRecipes) {
    Converted c(bench, {recipe}, 64, 32);
    Frame frame(bench.compute);
    c.layer.forward(x, frame);
    const Tensors kept = frame.pop(c.layer);
    EXPECT_TRUE(frame.empty());
    switch (recipe) {
      case Float8Recipe::tensorwise: {
        ASSERT_EQ(kept.size(), 3u);
        EXPECT_EQ(kept[0].dtype(), DType::f8e4m3);
        EXPECT_EQ(kept[1].count(), 0);
        EXPECT_EQ(kept[2].count(), 1);
        break;
      }
      case Float8Recipe::rowwise: {
        ASSERT_EQ(kept.size(), 3u);
        EXPECT_EQ(kept[0].dtype(), DType::f8e4m3);
        EXPECT_EQ(kept[1].count(), 0);
        EXPECT_EQ(kept[2].count(), 64);  // one for each column
        break;
      }
      case Float8Recipe::rowwise_gw_hp: {
        ASSERT_EQ(kept.size(), 2u);
        EXPECT_EQ(kept[0].dtype(), DType::bf16);
        EXPECT_EQ(kept[1].count(), 0);
        break;
      }
    }
    Frame inference = Frame::inference(bench.compute);
    const Tensor y = c.layer.forward(x, inference)[0];
    EXPECT_EQ(test::floats(y), test::floats(c.layer.forward(x, frame)[0]));
  }
}

Tensor in_bf16(Bench& bench, const Tensor& x) {
  const Tensor y = bench.compute.make(x.shape(), DType::bf16);
  for (std::size_t i = 0; i < y.as<bf16>().size(); ++i) y.as<bf16>()[i] = bf16(x.f32()[i]);
  return y;
}
Tensor in_f32(Bench& bench, const Tensor& x) {
  const Tensor y = bench.compute.make(x.shape());
  for (std::size_t i = 0; i < y.f32().size(); ++i) y.f32()[i] = static_cast<float>(x.as<bf16>()[i]);
  return y;
}

// Activations in bf16 give what the same values in f32 give, rounded once; gradients of weights are equal.
TEST(Float8Linear, ActivationsInBf16) {
  Bench bench;
  for (const Float8Recipe recipe : kRecipes) {
    Converted f32(bench, {recipe}, 48, 32, true, DType::bf16),
        half(bench, {recipe}, 48, 32, true, DType::bf16);
    const Tensor x = in_bf16(bench, random_tensor(bench.context, {17, 48}, "x")),
                 dy = in_bf16(bench, random_tensor(bench.context, {17, 32}, "dy"));
    Frame frame(bench.compute);
    const Tensor y = half.layer.forward(x, frame)[0], dx = half.layer.backward(dy, frame)[0];
    ASSERT_EQ(y.dtype(), DType::bf16);
    ASSERT_EQ(dx.dtype(), DType::bf16);
    EXPECT_EQ(bytes_of(y), bytes_of(in_bf16(bench, f32.layer.forward(in_f32(bench, x), frame)[0])));
    EXPECT_EQ(bytes_of(dx), bytes_of(in_bf16(bench, f32.layer.backward(in_f32(bench, dy), frame)[0])));
    EXPECT_EQ(bytes_of(half.layer.weight->gradient()), bytes_of(f32.layer.weight->gradient()));
    half.layer.set_output_dtype(DType::f32);
    const Tensor wide = half.layer.forward(x, frame)[0];
    EXPECT_EQ(wide.dtype(), DType::f32);
    EXPECT_EQ(half.layer.backward(in_f32(bench, dy), frame)[0].dtype(), DType::bf16);
  }
}

// Zeros have the scale of the floor, 1e-12: finite codes, and exact zeros.
TEST(Float8Linear, ZerosStayZeros) {
  Bench bench;
  for (const Float8Recipe recipe : kRecipes) {
    Converted c(bench, {recipe}, 32, 16, false);
    const Tensor x = bench.compute.zeros({4, 32}), dy = bench.compute.zeros({4, 16});
    std::ranges::fill(c.layer.weight->write_master().f32(), 0.0F);
    Frame frame(bench.compute);
    for (const float y : test::floats(c.layer.forward(x, frame)[0])) ASSERT_EQ(y, 0.0F);
    for (const float d : test::floats(c.layer.backward(dy, frame)[0])) ASSERT_EQ(d, 0.0F);
    for (const float d : c.layer.weight->gradient().f32()) ASSERT_EQ(d, 0.0F);
    c.linears->expect_finite();
  }
}

TEST(Float8Linear, NoTokens) {
  Bench bench;
  for (const Float8Recipe recipe : kRecipes) {
    Converted c(bench, {recipe}, 32, 16);
    Frame frame(bench.compute);
    EXPECT_EQ(c.layer.forward(Tensor(bench.context, {0, 32}), frame)[0].count(), 0);
    EXPECT_EQ(c.layer.backward(Tensor(bench.context, {0, 16}), frame)[0].count(), 0);
    for (const float d : c.layer.weight->gradient().f32()) ASSERT_EQ(d, 0.0F);
  }
}

template <class F>
std::string text_of(const F& f) {
  return test::error_text(ErrorCode::bad_argument, f);
}

TEST(Float8Linear, NotFiniteIsNamed) {
  Bench bench;
  for (const Float8Recipe recipe : kRecipes)
    for (const float bad :
         {std::numeric_limits<float>::infinity(), std::numeric_limits<float>::quiet_NaN()}) {
      Converted c(bench, {recipe}, 32, 16);
      const Tensor x = random_tensor(bench.context, {4, 32}, "x"),
                   dy = random_tensor(bench.context, {4, 16}, "dy");
      Frame frame(bench.compute);
      c.layer.forward(x, frame);
      dy.f32()[5] = bad;
      c.layer.backward(dy, frame);
      EXPECT_EQ(text_of([&] { c.linears->expect_finite(); }),
                "float8: \"\": dy has an element that is not finite");
      c.linears->expect_finite();  // it was reported
      // The gradient shows it to what skips steps.
      EXPECT_TRUE(
          std::ranges::any_of(c.layer.weight->gradient().f32(), [](float g) { return !std::isfinite(g); }));
      x.f32()[7] = bad;
      EXPECT_TRUE(std::ranges::any_of(test::floats(c.layer.forward(x, frame)[0]),
                                      [](float y) { return std::isnan(y); }));
      EXPECT_EQ(text_of([&] { c.linears->expect_finite(); }),
                "float8: \"\": x has an element that is not finite");
      c.layer.weight->write_master().f32()[3] = bad;
      for (int pass = 0; pass < 2; ++pass) {  // in each pass, until the weight is finite
        c.linears->begin_pass();
        EXPECT_TRUE(std::ranges::any_of(test::floats(c.layer.forward(x, frame)[0]),
                                        [](float y) { return std::isnan(y); }));
        EXPECT_EQ(text_of([&] { c.linears->expect_finite(); }),
                  "float8: the weight \"weight\" has an element that is not finite");
      }
      frame.clear();
      c.layer.weight->write_master().f32()[3] = 0;
      x.f32()[7] = 0;
      c.layer.forward(x, frame);
      c.linears->expect_finite();
    }
}

// A layer compares the entry of the Frame with its recipe before it reads the entry.
TEST(Float8Linear, ALayerMustNotChangeBetweenForwardAndBackward) {
  Bench bench;
  const auto text = [&](std::optional<Float8Recipe> forward, std::optional<Float8Recipe> backward,
                        DType dtype = DType::f32) {
    Linear layer(32, 16, false, Normal{0.3});
    layer.weight->set_dtype(dtype);
    materialise(layer, bench.compute);
    initialise(layer, 5);
    Frame frame(bench.compute);
    std::shared_ptr<Float8Linears> linears;
    const auto convert = [&](std::optional<Float8Recipe> recipe) {
      if (linears) linears->restore();
      if (!recipe) return;
      linears = std::make_shared<Float8Linears>(Float8LinearOptions{*recipe});
      Float8Linears::convert(linears, layer);
    };
    convert(forward);
    layer.forward(random_tensor(bench.context, {4, 32}, "x"), frame);
    convert(backward);
    const std::string error = text_of([&] {
      layer.backward(random_tensor(bench.context, {4, 16}, "dy"), frame);
    });
    EXPECT_FALSE(layer.weight->has_gradient());
    return error;
  };
  const std::string must = ": a layer must not change between forward and backward";
  using enum Float8Recipe;
  EXPECT_EQ(text(tensorwise, rowwise),
            "float8: \"\": its forward pass kept x in f8e4m3 with 1 scales on the Frame; rowwise needs "
            "f8e4m3 with 32" +
                must);
  EXPECT_EQ(text(rowwise, tensorwise),
            "float8: \"\": its forward pass kept x in f8e4m3 with 32 scales on the Frame; tensorwise needs "
            "f8e4m3 with 1" +
                must);
  EXPECT_EQ(text(rowwise_gw_hp, rowwise),
            "float8: \"\": its forward pass kept x in bf16 with 0 scales on the Frame; rowwise needs f8e4m3 "
            "with 32" +
                must);
  EXPECT_EQ(text({}, rowwise_gw_hp),
            "float8: \"\": its forward pass kept x in f32 with 0 scales on the Frame; rowwise_gw_hp needs "
            "bf16 with 0" +
                must);
  EXPECT_EQ(
      text(rowwise, {}),
      "\"\": its forward pass kept x in f8e4m3 on the Frame; expected f32, the dtype of its weight" + must);
  EXPECT_EQ(
      text(tensorwise, {}, DType::bf16),
      "\"\": its forward pass kept x in f8e4m3 on the Frame; expected bf16, the dtype of its weight" + must);
  EXPECT_EQ(
      text(rowwise_gw_hp, {}),
      "\"\": its forward pass kept x in bf16 on the Frame; expected f32, the dtype of its weight" + must);
}

TEST(Float8Linear, ScalesFollowTheMaster) {
  Bench bench;
  Converted c(bench, {Float8Recipe::rowwise}, 32, 16, false);
  const Tensor x = random_tensor(bench.context, {4, 32}, "x");
  Frame frame = Frame::inference(bench.compute);
  const std::vector<float> before = test::floats(c.layer.forward(x, frame)[0]);
  for (float& w : c.layer.weight->write_master().f32()) w *= 1024;
  std::vector<float> after = test::floats(c.layer.forward(x, frame)[0]);
  for (float& y : after) y /= 1024;
  EXPECT_EQ(after, before);  // scales are powers of two: the codes stay
}

TEST(Float8Linear, WhatIsRefused) {
  Bench bench;
  const auto linears = std::make_shared<Float8Linears>(Float8LinearOptions{});
  Linear spectral(16, 16);
  spectral.add_spectral_norm();
  EXPECT_EQ(text_of([&] { Float8Linears::convert(linears, spectral); }), "float8: \"\" has a spectral norm");
  Linear one(16, 16), other(16, 16);
  other.tie_weight(one.weight);
  EXPECT_EQ(text_of([&] { Float8Linears::convert(linears, other); }),
            "float8: \"\" shares its weight \"weight\" with other modules");
  struct Own : Linear {
    Own() : Linear(16, 16) {}
  } own;
  EXPECT_EQ(text_of([&] { Float8Linears::convert(linears, own); }),
            "float8: \"\" is of a class derived from Linear");
  Linear twice(16, 16);
  Float8Linears::convert(linears, twice);
  EXPECT_EQ(text_of([&] { Float8Linears::convert(linears, twice); }),
            "float8: \"\" has other passes already");
  linears->restore();
  EXPECT_EQ(twice.passes(), nullptr);
  materialise(twice, bench.compute);
  initialise(twice, 1);
  Float8Linears::convert(linears, twice);
  Frame frame(bench.compute);
  EXPECT_EQ(text_of([&] {
              twice.forward(Tensor(bench.context, {2, 3}), frame);
            }),
            "\"\": x is (2, 3); expected 16 features (the second dimension of weight (16, 16))");
  linears->restore();
}

TEST(Float8Linear, NamesOfRecipes) {
  for (const Float8Recipe recipe : kRecipes) EXPECT_EQ(float8_recipe_from_name(name(recipe)), recipe);
  EXPECT_EQ(text_of([] { float8_recipe_from_name("mxfp8"); }),
            "float8: the recipe is \"mxfp8\"; expected tensorwise, rowwise or rowwise_gw_hp");
  EXPECT_EQ(text_of([] { float8_recipe_from_name("delayed"); }),
            "float8: the recipe is delayed; expected tensorwise, rowwise or rowwise_gw_hp: delayed scaling "
            "takes scales from earlier steps, so that a checkpoint would need its history and a sudden large "
            "value would be cut off");
}

// --- torchao's numbers ---

TEST(Float8LinearGolden, FilesArePresent) {
  test::expect_golden({"fp8_linear_tensorwise", "fp8_linear_rowwise"});
}

// The scales and codes of an operand, which the file stores as `name`; `x`: the tensor as weft has it. The
// weight's are stored transposed.
void expect_operand(test::Golden& golden, const std::string& name, const Tensor& x, Granularity g,
                    DType format, bool power_of_two, bool transposed) {
  kernels::KernelContext ctx(1);
  std::vector<float> scales(static_cast<std::size_t>(float8::scale_count(x.shape(), g)));
  float8::amax(ctx, x, g, scales.data());
  for (float& s : scales) s = float8::scale_of(s, format, power_of_two);
  EXPECT_EQ(scales, test::floats(golden.tensor("aux." + name + ".scale"))) << name;
  const Tensor codes(golden.context, x.shape(), format);
  float8::quantise(ctx, x, g, scales.data(), codes);
  std::vector<std::uint8_t> own = bytes_of(codes);
  if (transposed) {
    std::vector<std::uint8_t> turned;
    for (std::int64_t c = 0; c < x.size(1); ++c)
      for (std::int64_t r = 0; r < x.size(0); ++r)
        turned.push_back(own[static_cast<std::size_t>(r * x.size(1) + c)]);
    own = turned;
  }
  EXPECT_EQ(own, bytes_of(golden.tensor("aux." + name + ".fp8_bits"))) << name;
}

void expect_golden_linear(const std::string& prefix, Float8Recipe recipe) {
  for (const auto& file : test::golden_files(prefix)) {
    test::Golden golden(file);
    const bool tensorwise = recipe == Float8Recipe::tensorwise;
    const Tensor x = golden.tensor("in.x"), dy = golden.tensor("in.cotangent"),
                 w = golden.tensor("param.weight");
    const DType of_dy = tensorwise ? DType::f8e5m2 : DType::f8e4m3;
    const auto along = [&](Granularity g) { return tensorwise ? Granularity::tensorwise : g; };
    const Granularity rows = along(Granularity::rowwise), columns = along(Granularity::columnwise);
    expect_operand(golden, "x_fwd", x, rows, DType::f8e4m3, !tensorwise, false);
    expect_operand(golden, "x_gw", x, columns, DType::f8e4m3, !tensorwise, false);
    expect_operand(golden, "g_gin", dy, rows, of_dy, !tensorwise, false);
    expect_operand(golden, "g_gw", dy, columns, of_dy, !tensorwise, false);
    expect_operand(golden, "wt_fwd", w, rows, DType::f8e4m3, !tensorwise, true);
    expect_operand(golden, "wt_gin", w, columns, DType::f8e4m3, !tensorwise, true);

    Linear layer(w.size(1), w.size(0), true);
    materialise(layer, golden.compute);
    layer.weight->set_master(w);
    layer.bias->set_master(golden.tensor("param.bias"));
    const auto linears = std::make_shared<Float8Linears>(Float8LinearOptions{recipe});
    Float8Linears::convert(linears, layer);
    Frame frame(golden.compute);
    golden.compare("out.y", layer.forward(x, frame)[0].f32());
    const Tensors kept = frame.pop(layer);
    EXPECT_EQ(bytes_of(kept[0]), bytes_of(golden.tensor("aux.x_gw.fp8_bits")));
    EXPECT_EQ(test::floats(kept[2]), test::floats(golden.tensor("aux.x_gw.scale")));
    frame.push(layer, kept);
    golden.compare("grad.in.x", layer.backward(dy, frame)[0].f32());
    golden.compare("grad.param.weight", layer.weight->gradient().f32());
    golden.compare("grad.param.bias", layer.bias->gradient().f32());
  }
}

TEST(Float8LinearGolden, TensorwiseIsTorchao) {
  expect_golden_linear("fp8_linear_tensorwise", Float8Recipe::tensorwise);
}
TEST(Float8LinearGolden, RowwiseIsTorchao) {
  expect_golden_linear("fp8_linear_rowwise", Float8Recipe::rowwise);
}

}  // namespace
}  // namespace weft::float8_linear_test
