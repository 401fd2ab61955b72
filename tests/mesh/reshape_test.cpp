// Layouts, tensors and views of the same elements in another shape. Nothing is communicated: each test builds
// every rank's view of a mesh.
#include "weft/mesh/reshape.hpp"

#include <gtest/gtest.h>

#include <numeric>

#include "support/errors.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::reshape_test {
namespace {

using test::expect_error;

Tensor numbered(Context& context, const Shape& shape) {
  Tensor t(context, shape, DType::i64);
  std::iota(t.as<std::int64_t>().begin(), t.as<std::int64_t>().end(), 0);
  return t;
}

bool equal(const Tensor& a, const Tensor& b) {
  return a.shape() == b.shape() && a.layout() == b.layout() &&
         std::ranges::equal(a.as<std::int64_t>(), b.as<std::int64_t>());
}

const MeshShape kMesh{{"dp", 2}, {"one", 1}, {"tp", 4}};

struct Reshape : ::testing::Test {
  Reshape() {
    for (int rank = 0; rank < kMesh.size(); ++rank)
      meshes.push_back(DeviceMesh::arithmetic(context, kMesh, rank));
  }
  LayoutRef layout(int rank, const Placement& dp, const Placement& tp, const Shape& global) {
    return make_layout(meshes[static_cast<std::size_t>(rank)], {dp, Replicate{}, tp}, global);
  }
  Context context;
  std::vector<DeviceMesh> meshes;  // as each rank sees it
};

struct Case {
  Shape from;
  Placement dp, tp;
  Shape to;
  Placement to_dp, to_tp;
};

// Each rank's part of the whole in its new shape is the part that it held, in place.
TEST_F(Reshape, EachRankKeepsItsElements) {
  const Placement all = Replicate{}, sum = Partial{};
  const Case cases[] = {
      // features and heads, which tp divides, and a batch that dp does not
      {{3, 5, 32}, Shard{0}, Shard{2}, {3, 5, 8, 4}, Shard{0}, Shard{2}},
      {{3, 5, 8, 4}, Shard{0}, Shard{2}, {3, 5, 32}, Shard{0}, Shard{2}},
      {{3, 5, 8, 4}, Shard{0}, Shard{2}, {3, 5, 2, 4, 4}, Shard{0}, sum},  // refused below: 8 heads as 2 x 4
      // samples and positions as tokens, and back
      {{4, 5, 6}, Shard{0}, all, {20, 6}, Shard{0}, all},
      {{20, 6}, Shard{0}, all, {4, 5, 6}, Shard{0}, all},
      {{8, 3, 5}, Shard{2}, Shard{0}, {24, 5}, Shard{1}, Shard{0}},
      // both axes cut one dimension
      {{16, 3}, Shard{0}, Shard{0}, {8, 2, 3}, Shard{0}, Shard{0}},
      // sums of contributions have any shape
      {{3, 4}, sum, sum, {12}, sum, sum},
      {{6, 7}, all, sum, {7, 2, 3}, all, sum},
      // dimensions of one index come and go
      {{1, 8, 3}, Shard{2}, Shard{1}, {8, 1, 3}, Shard{2}, Shard{0}},
      {{8, 3}, all, Shard{0}, {1, 8, 3, 1}, all, Shard{1}},
      {{4, 1, 2}, all, Shard{0}, {4, 2}, all, Shard{0}},
      // uneven cuts, of a dimension that stays
      {{3, 10, 4}, Shard{0}, Shard{1}, {3, 10, 2, 2}, Shard{0}, Shard{1}},
      // no elements
      {{0, 5, 8}, Shard{0}, Shard{2}, {0, 5, 4, 2}, Shard{0}, Shard{2}},
      {{4, 0}, all, Shard{0}, {0}, all, Shard{0}},
  };
  int carried = 0;
  for (const Case& c : cases)
    for (int rank = 0; rank < kMesh.size(); ++rank) {
      SCOPED_TRACE(to_string(c.from) + " to " + to_string(c.to));
      const LayoutRef of = layout(rank, c.dp, c.tp, c.from);
      if (is_shard(c.tp) && is_partial(c.to_tp)) {
        EXPECT_EQ(test::error_of([&] { of->reshaped(c.to); }).code(), ErrorCode::layout);
        continue;
      }
      const LayoutRef expected = layout(rank, c.to_dp, c.to_tp, c.to);
      ASSERT_EQ(of->reshaped(c.to), expected) << to_string(*of->reshaped(c.to));
      const auto part = [&](const Tensor& whole, const LayoutRef& l) {  // a contribution is all of it here
        Placements cut = l->placements;
        for (Placement& p : cut)
          if (is_partial(p)) p = Replicate{};
        return distribute(whole, l->with(cut)).with_layout(l);
      };
      const Tensor whole = numbered(context, c.from);
      const Tensor here = part(whole, of), there = reshape(here, c.to);
      EXPECT_TRUE(equal(there, part(whole.reshape(c.to), expected)));
      EXPECT_EQ(there.data(), here.data()) << "nothing was copied";
      EXPECT_TRUE(equal(reshape(there, c.from), here)) << "and back";
      ++carried;
    }
  EXPECT_GT(carried, 0);
}

// Every shape of 24 elements is reshaped to every other, cut in any way. If there is a result, the layout
// says where the elements are. If there is no result, no layout would be right.
TEST_F(Reshape, EveryCutOfEveryShapeIsCarriedOrRefusedAsItMust) {
  const Shape shapes[] = {{24},    {4, 6},    {6, 4},    {8, 3},  {2, 12},
                          {12, 2}, {2, 3, 4}, {4, 3, 2}, {1, 24}, {2, 2, 2, 3}};
  int carried = 0, refused = 0;
  for (const Shape& from : shapes)
    for (const Shape& to : shapes)
      for (int d0 = -1; d0 < from.rank(); ++d0)
        for (int d1 = -1; d1 < from.rank(); ++d1) {
          const auto placement = [](int d) { return d < 0 ? Placement(Replicate{}) : Placement(Shard{d}); };
          const Tensor whole = numbered(context, from);
          const auto parts_alike = [&](const Placement& dp, const Placement& tp) {
            for (int rank = 0; rank < kMesh.size(); ++rank) {
              const Tensor a = distribute(whole, layout(rank, placement(d0), placement(d1), from)),
                           b = distribute(whole.reshape(to), layout(rank, dp, tp, to));
              if (!std::ranges::equal(a.as<std::int64_t>(), b.as<std::int64_t>())) return false;
            }
            return true;
          };
          try {
            const LayoutRef l = layout(0, placement(d0), placement(d1), from)->reshaped(to);
            ASSERT_TRUE(parts_alike(l->placements[0], l->placements[2]))
                << to_string(*l) << " from " << to_string(from) << ", " << d0 << ", " << d1;
            ++carried;
          } catch (const Error& e) {
            ASSERT_EQ(e.code(), ErrorCode::layout);
            for (int e0 = -1; e0 < to.rank(); ++e0)
              for (int e1 = -1; e1 < to.rank(); ++e1)
                ASSERT_FALSE((d0 < 0) == (e0 < 0) && (d1 < 0) == (e1 < 0) && (d0 == d1) == (e0 == e1) &&
                             parts_alike(placement(e0), placement(e1)))
                    << to_string(from) << ", " << d0 << ", " << d1 << " to " << to_string(to) << ", " << e0
                    << ", " << e1;
            ++refused;
          }
        }
  EXPECT_GT(carried, 100);
  EXPECT_GT(refused, 100);
}

TEST_F(Reshape, SegmentsAndNestingGoAlong) {
  for (int rank = 0; rank < kMesh.size(); ++rank) {
    // q, k and v of 8, 4 and 4 heads of 3 features: each rank's part of each stays one
    const LayoutRef fused = layout(rank, Shard{0}, Shard{1}, {2, 48})->segmented(1, {24, 12, 12});
    const LayoutRef heads = fused->reshaped({2, 16, 3});
    EXPECT_EQ(heads, layout(rank, Shard{0}, Shard{1}, {2, 16, 3})->segmented(1, {8, 4, 4}));
    EXPECT_EQ(heads->reshaped({2, 48}), fused);
    const Tensor whole = numbered(context, {2, 48});
    EXPECT_TRUE(
        equal(reshape(distribute(whole, fused), {2, 16, 3}), distribute(whole.reshape({2, 16, 3}), heads)));
    // segments that are no whole heads matter where they are cut, alone
    EXPECT_EQ(test::error_of([&] {
                layout(rank, Shard{0}, Shard{1}, {2, 48})->segmented(1, {20, 28})->reshaped({2, 16, 3});
              }).code(),
              ErrorCode::layout);
    EXPECT_EQ(layout(rank, Shard{0}, Replicate{}, {2, 48})->segmented(1, {20, 28})->reshaped({2, 16, 3}),
              layout(rank, Shard{0}, Replicate{}, {2, 16, 3}));
    const LayoutRef inner = layout(rank, Shard{0}, Shard{0}, {16, 3})->nested({"tp", "dp"});
    EXPECT_EQ(inner->reshaped({8, 2, 3}), layout(rank, Shard{0}, Shard{0}, {8, 2, 3})->nested({"tp", "dp"}));
  }
}

TEST_F(Reshape, WhatCannotBeCarriedIsNamed) {
  const auto text = [&](const LayoutRef& l, const Shape& to) {
    return test::error_text(ErrorCode::layout, [&] { l->reshaped(to); });
  };
  // 6 heads over 4 ranks: as features 36 they are cut within heads
  EXPECT_EQ(text(layout(0, Replicate{}, Shard{1}, {2, 36}), {2, 6, 6}),
            "layout: (2, 36) as [dp: Replicate, one: Replicate, tp: Shard(1)] becomes (2, 6, 6), of which no "
            "dimension "
            "is cut on tp=4 where that is cut: a boundary must gather it first");
  // of every sample the positions of one rank are no part of all tokens
  EXPECT_EQ(text(layout(0, Shard{1}, Replicate{}, {2, 8, 3}), {16, 3}),
            "layout: (2, 8, 3) as [dp: Shard(1), one: Replicate, tp: Replicate] becomes (16, 3), of which no "
            "dimension "
            "is cut on dp=2 where that is cut: a boundary must gather it first");
  EXPECT_EQ(text(layout(0, Replicate{}, Replicate{}, {2, 8}), {3, 5}),
            "layout: (2, 8) as [dp: Replicate, one: Replicate, tp: Replicate] becomes (3, 5); expected a "
            "shape of as many "
            "elements");
  EXPECT_EQ(text(layout(0, Replicate{}, Replicate{}, {2, 8}), {-2, -8}),
            "layout: (2, 8) as [dp: Replicate, one: Replicate, tp: Replicate] becomes (-2, -8); expected a "
            "shape of as "
            "many elements");
  // Over an axis of one rank all placements mean the same.
  const LayoutRef one = make_layout(meshes[0], {{"one", Shard{1}}}, {2, 8, 3});
  EXPECT_TRUE(one->reshaped({16, 3})->replicated());
}

TEST_F(Reshape, DimensionsInAnotherOrder) {
  const Dims order{0, 2, 1};
  for (int rank = 0; rank < kMesh.size(); ++rank) {
    const LayoutRef of = layout(rank, Shard{0}, Shard{2}, {3, 4, 16})->segmented(2, {12, 4});
    const LayoutRef turned = of->transposed(order);
    EXPECT_EQ(turned, layout(rank, Shard{0}, Shard{1}, {3, 16, 4})->segmented(1, {12, 4}));
    EXPECT_EQ(turned->transposed(order), of);
    Tensor part = distribute(numbered(context, {3, 4, 16}), of);
    const MutableNamedView view{"x", part, of};
    const MutableNamedView other = transpose(view, order);
    EXPECT_EQ(other.layout, turned);
    EXPECT_EQ(other.data.data, view.data.data);
    ASSERT_EQ(other.data.shape, turned->local_shape());
    const auto* const numbers = reinterpret_cast<const std::int64_t*>(other.data.data);
    for (std::int64_t i = 0; i < other.data.shape[0]; ++i)
      for (std::int64_t j = 0; j < other.data.shape[1]; ++j)
        for (std::int64_t k = 0; k < 4; ++k)
          ASSERT_EQ(
              numbers[i * other.data.strides[0] + j * other.data.strides[1] + k * other.data.strides[2]],
              part.as<std::int64_t>()[static_cast<std::size_t>((i * 4 + k) * part.size(2) + j)]);
  }
  const LayoutRef of = layout(0, Shard{0}, Shard{2}, {3, 4, 16});
  for (const Dims& wrong : {Dims{0, 1}, Dims{0, 1, 1}, Dims{0, 1, 3}, Dims{0, -1, 2}})
    EXPECT_EQ(test::error_of([&] { of->transposed(wrong); }).code(), ErrorCode::layout);
  expect_error(ErrorCode::layout,
               "layout: the order (0, 1, 1) of (3, 4, 16) as [dp: Shard(0), one: Replicate, tp: Shard(2)]; "
               "expected each of "
               "its 3 dimensions once",
               [&] {
                 of->transposed({0, 1, 1});
               });
}

TEST_F(Reshape, Views) {
  Tensor part = distribute(numbered(context, {3, 5, 32}), layout(3, Shard{0}, Shard{2}, {3, 5, 32}));
  const MutableNamedView view{"q", part, part.layout()};
  const MutableNamedView heads = reshape(view, {3, 5, 8, 4});
  EXPECT_EQ(heads.name, "q");
  EXPECT_EQ(heads.data.data, view.data.data);
  EXPECT_EQ(heads.data.shape, (Shape{2, 5, 2, 4}));
  EXPECT_EQ(heads.data.strides, row_major(heads.data.shape));
  EXPECT_EQ(heads.layout, layout(3, Shard{0}, Shard{2}, {3, 5, 8, 4}));
  const NamedView read = reshape(NamedView(view), {3, 5, 8, 4});
  EXPECT_EQ(read.layout, heads.layout);
  // heads first, as matrices of each head: strided, so that it has no other shape
  const NamedView turned = transpose(read, {0, 2, 1, 3});
  EXPECT_EQ(turned.data.shape, (Shape{2, 2, 5, 4}));
  EXPECT_EQ(turned.layout, layout(3, Shard{0}, Shard{1}, {3, 8, 5, 4}));
  expect_error(
      ErrorCode::layout,
      "reshape: \"q\" is strided: shape (2, 2, 5, 4) has strides (40, 4, 8, 1); make it contiguous first",
      [&] {
        (void)reshape(turned, {3, 8, 20});
      });
  // this rank's alone
  const NamedView plain{"p", part, nullptr};
  EXPECT_EQ(reshape(plain, {10, 8}).data.shape, (Shape{10, 8}));
  EXPECT_EQ(reshape(plain, {10, 8}).layout, nullptr);
  expect_error(ErrorCode::bad_argument, "reshape: \"p\" is (2, 5, 8); it cannot be (10, 7)", [&] {
    (void)reshape(plain, {10, 7});
  });
  expect_error(ErrorCode::layout,
               "layout: the order (0, 1) of \"p\", (2, 5, 8); expected each of its 3 dimensions once", [&] {
                 (void)transpose(plain, {0, 1});
               });
  EXPECT_EQ(reshape(part.with_layout(nullptr), {80}).shape(), (Shape{80}));
}

}  // namespace
}  // namespace weft::reshape_test
