// Converts maps to parts for a split model and back: parts, global maps, and maps without their padding,
// exactly.
#include <gtest/gtest.h>

#include "domain/as_serial.hpp"
#include "weft/nn/activation.hpp"

namespace weft::domain_spatial_test {
namespace {

using test::Rank;

const SpatialPadding kPaddings[] = {{1, 1, 2, 2}, {0, 5, 0, 0}, {5, 0, 3, 1}, {7, 7, 7, 7}, {0, 0, 0, 0}};

// Element (plane, row, column) of maps of that size is its own number.
template <class T>
Tensor numbered(Context& context, const Shape& shape, DType dtype) {
  Tensor t(context, shape, dtype);
  std::int64_t i = 0;
  for (T& e : t.as<T>()) e = static_cast<T>(static_cast<float>(i++ % 251));
  return t;
}

// The maps of height x width within y, and maps of zeros with dy in that place.
template <class T>
Tensor cut_out(Context& context, const Tensor& y, const SpatialPadding& p, std::int64_t height,
               std::int64_t width) {
  Tensor out(context, {y.size(0), y.size(1), height, width}, y.dtype());
  auto to = out.as<T>().begin();
  for (std::int64_t plane = 0; plane < y.size(0) * y.size(1); ++plane)
    for (std::int64_t i = 0; i < height; ++i)
      for (std::int64_t j = 0; j < width; ++j)
        *to++ = y.as<T>()[static_cast<std::size_t>((plane * y.size(2) + i + p.top) * y.size(3) + j + p.left)];
  return out;
}
template <class T>
Tensor put_back(Context& context, const Tensor& dy, const SpatialPadding& p) {
  Tensor out = Tensor::zeros(
      context, {dy.size(0), dy.size(1), dy.size(2) + p.top + p.bottom, dy.size(3) + p.left + p.right},
      dy.dtype());
  auto from = dy.as<T>().begin();
  for (std::int64_t plane = 0; plane < dy.size(0) * dy.size(1); ++plane)
    for (std::int64_t i = 0; i < dy.size(2); ++i)
      for (std::int64_t j = 0; j < dy.size(3); ++j)
        out.as<T>()[static_cast<std::size_t>((plane * out.size(2) + i + p.top) * out.size(3) + j + p.left)] =
            *from++;
  return out;
}

template <class T>
void expect_exact(Rank& rank, const DomainManager& manager, DType dtype) {
  for (const SpatialPadding& p : kPaddings)
    for (const auto& [height, width] : {std::pair{8, 6}, {7, 5}, {3, 2}, {1, 1}}) {
      const Shape padded{2, 3, height + p.top + p.bottom, width + p.left + p.right};
      const MeshShape& axes = manager.axes().shape();
      if (padded[2] < axes.size("h") || padded[3] < axes.size("w")) continue;
      SCOPED_TRACE(testing::Message() << to_string(padded) << " to " << height << " x " << width);
      const Tensor whole = numbered<T>(rank.context, padded, dtype);
      const Tensor part = shard_spatial(whole, manager);
      ASSERT_EQ(part.layout(), manager.layout(padded));
      ASSERT_TRUE(test::same_bits(part, distribute(whole, part.layout())));
      ASSERT_TRUE(test::same_bits(gather_spatial(part, manager), whole));
      for (int pass = 0; pass < 2; ++pass) {  // the second one has its plan
        const Tensor y = crop_padding(part, p, manager, height, width);
        ASSERT_EQ(y.layout(), manager.layout({2, 3, height, width}));
        ASSERT_TRUE(
            test::same_bits(gather_spatial(y, manager), cut_out<T>(rank.context, whole, p, height, width)));
        const Tensor dy = numbered<T>(rank.context, {2, 3, height, width}, dtype);
        const Tensor back = crop_padding_adjoint(distribute(dy, y.layout()), p, part.layout(), manager);
        ASSERT_EQ(back.layout(), part.layout());
        ASSERT_TRUE(test::same_bits(gather_spatial(back, manager), put_back<T>(rank.context, dy, p)));
      }
    }
}

// With padding that is more than a rank has, and maps with fewer rows than ranks, too.
TEST(DomainSpatial, UnpaddingIsExact) {
  for (const MeshShape& shape :
       {MeshShape{{"h", 1}, {"w", 1}}, MeshShape{{"h", 2}, {"w", 1}}, MeshShape{{"h", 3}, {"w", 1}},
        MeshShape{{"h", 2}, {"w", 2}}, MeshShape{{"h", 6}, {"w", 1}}, MeshShape{{"h", 2}, {"w", 3}}})
    test::run_ranks(test::Ranks::threads, shape.size(), [&](Rank& rank) {
      SCOPED_TRACE(to_string(shape));
      const DeviceMesh mesh(rank.group(), shape);
      Sequential model;
      model.append("act", std::make_unique<ReLU>());
      const DomainManager manager = apply_domain_parallel(model, mesh);
      ASSERT_NO_FATAL_FAILURE(expect_exact<float>(rank, manager, DType::f32));
      ASSERT_NO_FATAL_FAILURE(expect_exact<bf16>(rank, manager, DType::bf16));
      ASSERT_NO_FATAL_FAILURE(expect_exact<std::int32_t>(rank, manager, DType::i32));
    });
}

}  // namespace
}  // namespace weft::domain_spatial_test
