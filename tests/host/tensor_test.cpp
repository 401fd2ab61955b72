#include "weft/base/tensor.hpp"

#include <gtest/gtest.h>

#include <memory>
#include <numeric>

#include "host/arena.hpp"
#include "support/errors.hpp"
#include "weft/host/context.hpp"

namespace weft::tensor_test {
namespace {

using test::error_text;

struct TensorTest : testing::Test {
  Context context;
};

TEST_F(TensorTest, HasShapeTypeAndMemory) {
  const Tensor t(context, {2, 3}, DType::bf16, Memory::shared);
  EXPECT_EQ(t.shape(), (Shape{2, 3}));
  EXPECT_EQ(t.size(-1), 3);
  EXPECT_EQ(t.count(), 6);
  EXPECT_EQ(t.bytes(), 12);
  EXPECT_EQ(t.dtype(), DType::bf16);
  EXPECT_EQ(t.storage().memory(), Memory::shared);
  EXPECT_TRUE(arena_of(context).find(t.data(), 12));
  EXPECT_EQ(t.as<bf16>().size(), 6u);
  EXPECT_FALSE(Tensor());
  const Tensor empty(context, {0, 5});
  EXPECT_TRUE(empty);
  EXPECT_EQ(empty.bytes(), 0);
  const Tensor scalar(context, {});
  EXPECT_EQ(scalar.count(), 1);
}

TEST_F(TensorTest, IsAlignedToCacheLines) {
  for (const std::int64_t n : {1, 17, 1000, 300'000, 3'000'000})
    for (const Memory m : {Memory::local, Memory::shared}) {
      const Tensor t = Tensor::zeros(context, {n}, DType::f32, m);
      EXPECT_EQ(reinterpret_cast<std::uintptr_t>(t.data()) % 64, 0u) << n;
      for (const float f : t.f32()) ASSERT_EQ(f, 0.0f);
    }
}

TEST_F(TensorTest, CopiesShareAndClonesDoNot) {
  const Tensor t = Tensor::zeros(context, {4});
  const Tensor same = t;
  const Tensor clone = t.clone(context);
  t.f32()[2] = 5;
  EXPECT_EQ(same.f32()[2], 5);
  EXPECT_EQ(clone.f32()[2], 0);
  EXPECT_FALSE(Tensor().clone(context));
}

TEST_F(TensorTest, ReshapesAndSlices) {
  const Tensor t(context, {3, 4});
  std::iota(t.f32().begin(), t.f32().end(), 0.0f);
  const Tensor r = t.reshape({2, 6});
  EXPECT_EQ(r.data(), t.data());
  const Tensor s = r.slice_flat(5, {2, 2});
  EXPECT_EQ(s.f32()[0], 5);
  EXPECT_EQ(s.f32()[3], 8);
  EXPECT_EQ(s.slice_flat(3, {1}).f32()[0], 8);
  EXPECT_EQ(t.slice_flat(12, {0}).count(), 0);
  EXPECT_EQ(error_text([&] { t.reshape({5}); }),
            "bad_argument: reshape: (5) has 5 elements; expected 12, as (3, 4) has");
  EXPECT_EQ(error_text([&] { t.slice_flat(10, {3}); }),
            "bad_argument: slice_flat: 3 elements from 10 on, shape (3); expected a range within the 12 "
            "elements of (3, 4)");
  EXPECT_EQ(error_text([&] { t.slice_flat(-1, {1}); }),
            "bad_argument: slice_flat: 1 elements from -1 on, shape (1); expected a range within the 12 "
            "elements of (3, 4)");
}

TEST_F(TensorTest, RefusesWhatCannotBe) {
  EXPECT_EQ(error_text([&] {
              Tensor(context, {2, -3});
            }),
            "bad_argument: tensor: dimension 1 of shape (2, -3) is -3; expected 0 or more");
  EXPECT_EQ(error_text([&] {
              Tensor(context, {std::int64_t{1} << 40, std::int64_t{1} << 40});
            }),
            "bad_argument: tensor: shape (1099511627776, 1099511627776) of f32 has more than 2^63 bytes");
  EXPECT_EQ(error_text([&] { Tensor(context, {4}, static_cast<DType>(40)); }),
            "bad_argument: tensor: dtype is 40; expected 0 (f64) to 16 (c128)");
  const Tensor t(context, {4}, DType::i32);
  EXPECT_EQ(error_text([&] { t.f32(); }), "bad_argument: tensor: read as f32; expected i32, its dtype");
  EXPECT_EQ(error_text([&] { Tensor(t.storage(), 8, {3}, DType::f32); }),
            "bad_argument: tensor: shape (3) of f32 at byte 8 needs 20 bytes; the storage has 16");
  EXPECT_EQ(
      error_text([&] { Tensor(t.storage(), 2, {3}, DType::f32); }),
      "bad_argument: tensor: byte 2 of the storage is not aligned for f32; expected a multiple of 4 bytes");
  EXPECT_NO_THROW(Tensor(t.storage(), 8, {2}, DType::f32));
}

// An empty handle is a scalar, and a handle that was moved from keeps its shape. Neither has elements to
// read.
TEST_F(TensorTest, RefusesToReadWithoutMemory) {
  Tensor given(context, {2, 3});
  const Tensor taken = std::move(given);
  EXPECT_EQ(error_text([&] { given.f32(); }),
            "bad_argument: tensor: f32 (2, 3) has no memory: it is empty or was moved from");
  EXPECT_EQ(error_text([&] { (void)Tensor().data_ptr<float>(); }),
            "bad_argument: tensor: f32 () has no memory: it is empty or was moved from");
  EXPECT_TRUE(Tensor(Storage(), 0, {0, 4}, DType::f32).f32().empty()) << "no elements need none";
}

TEST_F(TensorTest, ALayoutIsStatedAndDroppedByReshape) {
  // The base layer knows the layout only as a pointer. Here it points to another object, which it does not
  // own.
  const LayoutRef layout(std::shared_ptr<void>(), reinterpret_cast<const Layout*>(this));
  const Tensor t = Tensor(context, {4}).with_layout(layout);
  EXPECT_EQ(t.layout(), layout);
  EXPECT_EQ(t.clone(context).layout(), layout);
  EXPECT_EQ(t.reshape({2, 2}).layout(), nullptr);
  EXPECT_EQ(t.slice_flat(0, {1}).layout(), nullptr);
}

TEST_F(TensorTest, StorageOfOthers) {
  float data[4] = {1, 2, 3, 4};
  const Tensor borrowed(Storage::borrow(data, sizeof data), 4, {3}, DType::f32);
  EXPECT_EQ(borrowed.f32()[0], 2);
  auto owner = std::make_shared<int>(0);
  {
    const Storage adopted = Storage::adopt(data, sizeof data, owner);
    const Storage copy = adopted;
    EXPECT_EQ(owner.use_count(), 3);
    EXPECT_EQ(copy.data(), adopted.data());
    EXPECT_EQ(copy.bytes(), 16u);
  }
  EXPECT_EQ(owner.use_count(), 1);
}

}  // namespace
}  // namespace weft::tensor_test
