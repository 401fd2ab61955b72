#include "weft/base/shape.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "weft/base/view.hpp"

namespace weft::shape_test {
namespace {

TEST(Shape, CountsAndStrides) {
  const Shape s{2, 3, 4};
  EXPECT_EQ(s.rank(), 3);
  EXPECT_EQ(s.count(), 24);
  EXPECT_EQ(s.back(), 4);
  EXPECT_EQ(row_major(s), (Strides{12, 4, 1}));
  EXPECT_EQ(to_string(s), "(2, 3, 4)");
  EXPECT_EQ(to_string(Shape{}), "()");
  EXPECT_EQ(Shape{}.count(), 1);
  EXPECT_EQ((Shape{3, 0, 2}).count(), 0);
  EXPECT_NE(s, (Shape{2, 3}));
  EXPECT_NE(s, (Shape{2, 3, 5}));
  EXPECT_EQ(Shape::line(7), Shape{7});
}

// The arguments that view() takes: no temporary, whose memory would be gone.
template <class T>
concept Viewable = requires(T&& x) {
  view(std::forward<T>(x));
};
static_assert(Viewable<std::vector<float>&> && Viewable<const std::vector<float>&>);
static_assert(!Viewable<std::vector<float>> && !Viewable<const std::vector<float>>);

TEST(View, OfMemoryWithAShape) {
  std::vector<float> memory(6);
  const TensorView v = view(memory.data(), {2, 3});
  EXPECT_EQ(v.data, reinterpret_cast<std::byte*>(memory.data()));
  EXPECT_EQ(v.dtype, DType::f32);
  EXPECT_EQ(v.shape, (Shape{2, 3}));
  EXPECT_EQ(v.strides, (Strides{3, 1}));
  const std::vector<std::int64_t> constant(4);
  const ConstTensorView c = view(constant.data(), Shape{2, 2});
  EXPECT_EQ(c.count(), 4);
}

TEST(Shape, HasAtMostEightDimensions) {
  Shape s{1, 2, 3, 4, 5, 6, 7, 8};
  const std::string text = "bad_argument: shape: 9 dimensions; expected at most 8";
  EXPECT_EQ(test::error_text([&] { s.push_back(9); }), text);
  EXPECT_EQ(test::error_text([&] { return Shape{1, 2, 3, 4, 5, 6, 7, 8, 9}.rank(); }), text);
  EXPECT_EQ(s.rank(), 8);
}

TEST(View, ContiguousMeansRowMajorWithoutGaps) {
  float data[24] = {};
  TensorView v = view(data, 24);
  EXPECT_TRUE(v.contiguous());
  EXPECT_EQ(v.bytes(), 96);
  EXPECT_EQ(v.dtype, DType::f32);
  v.shape = {4, 6};
  v.strides = {6, 1};
  EXPECT_TRUE(v.contiguous());
  v.strides = {1, 4};
  EXPECT_FALSE(v.contiguous());
  v.shape = {1, 6};  // the stride of a single row does not matter
  v.strides = {99, 1};
  EXPECT_TRUE(v.contiguous());
  for (const Shape& empty : {Shape{4, 0}, Shape{0, 4}, Shape{0, 0}}) {  // as PyTorch and NumPy say, too
    v.shape = empty;
    v.strides = {1, 1};
    EXPECT_TRUE(v.contiguous());
    v.strides = {3, 7};
    EXPECT_TRUE(v.contiguous());
  }
  const ConstTensorView c = v;
  EXPECT_EQ(c.data, reinterpret_cast<const std::byte*>(data));
  EXPECT_EQ(c.as<float>().data(), data);
}

}  // namespace
}  // namespace weft::shape_test
