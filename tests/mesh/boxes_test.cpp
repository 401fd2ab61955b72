// Boxes, compared element by element: intersections, the parts of ranks, copies between strided memories.
#include "mesh/boxes.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <cstdint>
#include <cstring>
#include <limits>
#include <random>
#include <string>
#include <vector>

#include "weft/host/context.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/layout.hpp"

namespace weft::test::boxes_test {
namespace {

using Bytes = std::vector<std::byte>;
constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max();

class Random {
 public:
  explicit Random(unsigned seed) : random_(seed) {}
  // 0 … most
  std::int64_t up_to(std::int64_t most) {
    return static_cast<std::int64_t>(random_() % static_cast<std::uint64_t>(most + 1));
  }
  Dims up_to(const Dims& most) {
    Dims all = most;
    for (int d = 0; d < most.rank(); ++d) all[d] = up_to(most[d]);
    return all;
  }
  Shape shape(int rank, std::int64_t most) {
    Shape all;
    for (int d = 0; d < rank; ++d) all.push_back(up_to(most));
    return all;
  }
  Bytes bytes(std::int64_t count) {
    Bytes all(static_cast<std::size_t>(count));
    for (std::byte& b : all) b = static_cast<std::byte>(random_());
    return all;
  }

 private:
  std::mt19937_64 random_;
};

// Calls see(index) for each index of a shape, the last dimension quickest.
template <class See>
void each_index(const Shape& shape, const See& see) {
  for (const std::int64_t n : shape)
    if (n == 0) return;
  Dims index = zeros(shape.rank());
  while (true) {
    see(index);
    int d = shape.rank() - 1;
    for (; d >= 0 && ++index[d] == shape[d]; --d) index[d] = 0;
    if (d < 0) return;
  }
}

bool holds(const Box& box, const Dims& index) {
  for (int d = 0; d < index.rank(); ++d)
    if (index[d] < box.offset[d] || index[d] >= box.offset[d] + box.shape[d]) return false;
  return true;
}

std::int64_t offset_of(const Dims& index, const Strides& strides) {
  std::int64_t at = 0;
  for (int d = 0; d < index.rank(); ++d) at += index[d] * strides[d];
  return at;
}

Dims added(Dims a, const Dims& b) {
  for (int d = 0; d < a.rank(); ++d) a[d] += b[d];
  return a;
}

Box random_box(Random& random, const Shape& whole) {
  Box box{random.up_to(whole), whole};
  for (int d = 0; d < whole.rank(); ++d) box.shape[d] = random.up_to(whole[d] - box.offset[d]);
  return box;
}

TEST(Intersection, IsWhatBothHold) {
  Random random(1);
  for (int round = 0; round < 2000; ++round) {
    const Shape whole = random.shape(static_cast<int>(random.up_to(4)), 5);
    const Box a = random_box(random, whole), b = random_box(random, whole), both = intersection(a, b);
    ASSERT_EQ(both, intersection(b, a));
    each_index(whole, [&](const Dims& index) {
      ASSERT_EQ(holds(both, index), holds(a, index) && holds(b, index))
          << to_string(a.offset) << to_string(a.shape) << " and " << to_string(b.offset) << to_string(b.shape)
          << " at " << to_string(index);
    });
    EXPECT_EQ(intersection(a, a), a);
    EXPECT_EQ(intersection(a, whole_box(whole)), a);
  }
}

TEST(Intersection, OfNothingIsEmptyAndNoExtentIsNegative) {
  const Box a{{0, 0}, {2, 3}}, beside{{2, 0}, {2, 3}}, far{{7, 9}, {1, 1}}, none{{1, 1}, {0, 2}};
  EXPECT_EQ(intersection(a, beside).shape, (Shape{0, 3}));
  EXPECT_EQ(intersection(a, far).shape, (Shape{0, 0}));
  EXPECT_EQ(intersection(a, none).shape, (Shape{0, 2}));
  EXPECT_EQ(intersection(Box{}, Box{}), Box{});  // of no dimensions: the one element
  EXPECT_EQ(intersection(Box{}, Box{}).shape.count(), 1);
}

TEST(Intersection, OfRangesWhoseEndsDoNotFitEndsAtTheLastNumber) {
  const Chunk far = intersection(Chunk{kMost - 2, kMost}, Chunk{5, kMost});
  EXPECT_EQ(far.offset, kMost - 2);
  EXPECT_EQ(far.size, 2);
  const Box whole = whole_box({kMost, kMost, 2}), part{{kMost - 1, 0, 1}, {1, kMost, 1}};
  EXPECT_EQ(intersection(whole, part), part);
}

TEST(WholeBox, IsAllOfIt) {
  EXPECT_EQ(whole_box({2, 0, 3}), (Box{{0, 0, 0}, {2, 0, 3}}));
  EXPECT_EQ(whole_box({}), Box{});
  EXPECT_EQ(zeros(Dims::kMaxDims).rank(), Dims::kMaxDims);
}

// A tensor of random bytes, in memory that may have gaps, and dimensions in any order, backwards, or of a
// step of 0.
struct Strided {
  Bytes memory;
  ConstTensorView view;
};
Strided strided(Random& random, const Shape& shape, DType dtype, bool repeats) {
  Strided s;
  s.view = {nullptr, dtype, {}, shape, shape};
  std::vector<int> order;
  for (int d = 0; d < shape.rank(); ++d) order.insert(order.begin() + random.up_to(d), d);
  std::int64_t step = 1, first = 0;
  for (const int d : order) {
    const std::int64_t way = random.up_to(5);  // 0: backwards, 1: again and again
    s.view.strides[d] = repeats && way == 1 ? 0 : way == 0 ? -step : step;
    if (s.view.strides[d] < 0 && shape[d] > 0) first += (shape[d] - 1) * step;
    if (s.view.strides[d] != 0) step *= shape[d] + (random.up_to(2) == 0 ? random.up_to(3) : 0);
  }
  const std::int64_t element = size_bytes(dtype);
  s.memory = random.bytes((step + 1) * element);
  s.view.data = s.memory.data() + first * element;
  return s;
}

void copy_plainly(const ConstTensorView& from, const TensorView& to) {
  const std::int64_t element = size_bytes(from.dtype);
  each_index(to.shape, [&](const Dims& index) {
    std::memcpy(to.data + offset_of(index, to.strides) * element,
                from.data + offset_of(index, from.strides) * element, static_cast<std::size_t>(element));
  });
}

// The view at the same byte offset in another buffer.
TensorView moved(const ConstTensorView& v, const Bytes& from, Bytes& to) {
  return {to.data() + (v.data - from.data()), v.dtype, v.device, v.shape, v.strides};
}

// Host memory that is labelled as memory of a device.
class NamedDevice final : public DeviceRuntime {
 public:
  static constexpr Device kDevice{DeviceKind::cuda, 0};
  Device device() const noexcept override { return kDevice; }
  void* allocate(std::size_t, Stream) override { return nullptr; }
  void release(void*, std::size_t, Stream) noexcept override {}
  void copy(const void* from, Device, void* to, Device, const Rows& rows, Stream) override {
    expect_apart(rows.count, rows.bytes, std::min(rows.from_pitch, rows.to_pitch));
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows.count); ++i)
      std::memcpy(static_cast<std::byte*>(to) + i * rows.to_pitch,
                  static_cast<const std::byte*>(from) + i * rows.from_pitch, rows.bytes);
  }
  void fill(void* to, unsigned char value, const Rows& rows, Stream) override {
    expect_apart(rows.count, rows.bytes, rows.to_pitch);
    for (std::size_t i = 0; i < static_cast<std::size_t>(rows.count); ++i)
      std::memset(static_cast<std::byte*>(to) + i * rows.to_pitch, value, rows.bytes);
  }
  Stream make_stream() override { return kDevice; }
  void destroy_stream(Stream) noexcept override {}
  void depend(Stream, Stream) override {}
  void wait(Stream) override {}
  int calls = 0;

 private:
  void expect_apart(std::int64_t count, std::size_t bytes, std::size_t pitch) {
    ++calls;
    EXPECT_GT(bytes, 0u);
    EXPECT_TRUE(count == 1 || pitch >= bytes) << count << " of " << bytes << " bytes, " << pitch << " apart";
  }
};

TEST(CopyElements, OnADeviceIsOneCallForTheRowsOfTwoDimensions) {
  NamedDevice device;
  std::vector<float> in(6 * 7 * 4, 1.0F), out(in.size());
  const Shape shape{6, 7, 4};
  const auto from = view(in.data(), shape), to = view(out.data(), shape);
  copy_elements(device, NamedDevice::kDevice, narrow(from, 1, 2, 3), narrow(to, 1, 0, 3));
  EXPECT_EQ(device.calls, 1);
  EXPECT_EQ(std::count(out.begin(), out.end(), 1.0F), 6 * 3 * 4);
  clear_elements(device, NamedDevice::kDevice, narrow(to, 1, 0, 1));
  EXPECT_EQ(device.calls, 2);
  EXPECT_EQ(std::count(out.begin(), out.end(), 1.0F), 6 * 2 * 4);
}

TEST(CopyElements, IsOneElementAfterTheOther) {
  Random random(2);
  Context context;
  NamedDevice device;
  for (int round = 0; round < 3000; ++round) {
    const int rank = static_cast<int>(random.up_to(Dims::kMaxDims));
    const Shape shape = random.shape(rank, rank > 4 ? 3 : 7);
    const DType dtype = std::vector{DType::u8, DType::bf16, DType::f32, DType::f64, DType::c128}[round % 5];
    const Strided from = strided(random, shape, dtype, true), to = strided(random, shape, dtype, false);
    Bytes out = to.memory, expected = to.memory, by_runtime = to.memory, on_device = to.memory,
          by_copy = to.memory;
    copy_plainly(from.view, moved(to.view, to.memory, expected));
    copy_elements(from.view, moved(to.view, to.memory, out));
    copy_elements(context.device({}), {}, from.view, moved(to.view, to.memory, by_runtime));
    ASSERT_EQ(out, expected) << to_string(shape) << to_string(from.view.strides)
                             << to_string(to.view.strides);
    copy_elements(device, NamedDevice::kDevice, from.view, moved(to.view, to.memory, on_device));
    copy(context, from.view, moved(to.view, to.memory, by_copy));
    ASSERT_EQ(by_runtime, expected);
    ASSERT_EQ(by_copy, expected);
    ASSERT_EQ(on_device, expected);
    clear_elements(context.device({}), {}, moved(to.view, to.memory, out));
    clear_elements(device, NamedDevice::kDevice, moved(to.view, to.memory, on_device));
    const TensorView cleared = moved(to.view, to.memory, expected);
    each_index(shape, [&](const Dims& index) {
      const std::int64_t element = size_bytes(dtype);
      std::memset(cleared.data + offset_of(index, cleared.strides) * element, 0,
                  static_cast<std::size_t>(element));
    });
    ASSERT_EQ(out, expected) << "cleared";
    ASSERT_EQ(on_device, expected) << "cleared";
  }
}

TEST(CopyElements, OfABoxTakesThatBoxAlone) {
  Random random(3);
  for (int round = 0; round < 2000; ++round) {
    const int rank = static_cast<int>(random.up_to(5));
    const Shape from_shape = random.shape(rank, 6), to_shape = random.shape(rank, 6);
    Shape shape = random.up_to(from_shape);
    for (int d = 0; d < rank; ++d) shape[d] = std::min(shape[d], to_shape[d]);
    Dims from_at = from_shape, to_at = to_shape;
    for (int d = 0; d < rank; ++d) {
      from_at[d] = random.up_to(from_shape[d] - shape[d]);
      to_at[d] = random.up_to(to_shape[d] - shape[d]);
    }
    const Bytes in = random.bytes(from_shape.count() * 4), before = random.bytes(to_shape.count() * 4);
    Bytes out = before, expected = before;
    const ConstTensorView from{in.data(), DType::f32, {}, from_shape, row_major(from_shape)};
    const TensorView to{out.data(), DType::f32, {}, to_shape, row_major(to_shape)};
    copy_elements(narrow(from, from_at, shape), narrow(to, to_at, shape));
    each_index(shape, [&](const Dims& index) {
      std::memcpy(expected.data() + offset_of(added(index, to_at), to.strides) * 4,
                  in.data() + offset_of(added(index, from_at), from.strides) * 4, 4);
    });
    ASSERT_EQ(out, expected) << to_string(shape) << " of " << to_string(from_shape) << " from "
                             << to_string(from_at) << " on";
  }
}

TEST(CopyElements, OfOneDimensionLeavesTheOthersWhole) {
  std::vector<float> in(2 * 5 * 3), out(in.size(), -1.0F);
  for (std::size_t i = 0; i < in.size(); ++i) in[i] = static_cast<float>(i);
  const Shape shape{2, 5, 3};
  copy_elements(narrow(view(in.data(), shape), 1, 3, 2), narrow(view(out.data(), shape), 1, 0, 2));
  for (std::int64_t i = 0; i < 2; ++i)
    for (std::int64_t j = 0; j < 5; ++j)
      for (std::int64_t k = 0; k < 3; ++k)
        EXPECT_EQ(out[static_cast<std::size_t>((i * 5 + j) * 3 + k)],
                  j < 2 ? in[static_cast<std::size_t>((i * 5 + j + 3) * 3 + k)] : -1.0F);
}

TEST(CopyElements, OfNoneReadsAndWritesNothing) {
  Context context;
  for (const Shape& none : {Shape{0}, Shape{3, 0}, Shape{0, kMost, kMost}, Shape{kMost, kMost, 0}}) {
    const Box part{zeros(none.rank()), none};
    const ConstTensorView from{nullptr, DType::f64, {}, none, row_major(none)};
    const TensorView to{nullptr, DType::f64, {}, none, row_major(none)};
    copy_elements(from, to);
    copy_elements(context.device({}), {}, from, to);
    clear_elements(context.device({}), {}, to);
    copy_elements(narrow(from, part.offset, part.shape), narrow(to, none.rank() - 1, 5, 0));
  }
  EXPECT_EQ(narrow(ConstTensorView{nullptr, DType::f32, {}, {0, 4}, {4, 1}}, 1, 2, 2).data, nullptr);
}

TEST(CopyElements, OfNoDimensionsIsOneElement) {
  const std::vector<double> in{2.5};
  std::vector<double> out{0, 7};
  copy_elements(view(in.data(), Shape{}), view(out.data(), Shape{}));
  EXPECT_EQ(out, (std::vector<double>{2.5, 7}));
}

// Which elements of the whole a rank's part has, in its order: against a list of indices for each dimension
// -----------------

using Indices = std::vector<std::int64_t>;

// The first of n parts of a range that does not divide have one more.
std::pair<std::int64_t, std::int64_t> part_of(std::int64_t begin, std::int64_t end, int parts, int part) {
  const std::int64_t each = (end - begin) / parts, more = (end - begin) % parts;
  const std::int64_t first = begin + each * part + std::min<std::int64_t>(part, more);
  return {first, first + each + (part < more ? 1 : 0)};
}

// The part of dimension d that a rank with these coordinates holds: in each segment the part that remains
// after all axes in the order of nesting.
Indices indices_of(const Layout& layout, const std::vector<int>& sizes, const std::vector<int>& at, int d) {
  Indices segments = {layout.global[d]};
  if (!layout.segments.sizes.empty() && layout.segments.dim == d) segments = layout.segments.sizes;
  Indices held;
  std::int64_t start = 0;
  for (const std::int64_t size : segments) {
    std::int64_t begin = start, end = start + size;
    for (const int axis : layout.nesting) {
      const auto a = static_cast<std::size_t>(axis);
      if (is_shard(layout.placements[a], d)) std::tie(begin, end) = part_of(begin, end, sizes[a], at[a]);
    }
    for (std::int64_t i = begin; i < end; ++i) held.push_back(i);
    start += size;
  }
  return held;
}

void expect_runs(const LayoutRef& layout, const std::vector<int>& sizes, const std::vector<int>& at) {
  SCOPED_TRACE(to_string(*layout));
  const Shape& local = layout->local_shape();
  Indices found(static_cast<std::size_t>(local.count()), -1);
  each_run(layout->global, layout, local, [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    for (std::int64_t i = 0; i < count; ++i) {
      ASSERT_LT(place + i, local.count());
      EXPECT_EQ(found[static_cast<std::size_t>(place + i)], -1) << "twice";
      found[static_cast<std::size_t>(place + i)] = start + i;
    }
  });
  Indices expected;
  for (const std::int64_t i : indices_of(*layout, sizes, at, 0))
    for (const std::int64_t j : indices_of(*layout, sizes, at, 1))
      for (const std::int64_t k : indices_of(*layout, sizes, at, 2))
        expected.push_back((i * layout->global[1] + j) * layout->global[2] + k);
  EXPECT_EQ(found, expected);
}

TEST(Runs, AreWhatEachRankHoldsForEveryNestingAndSegments) {
  Context context;
  const std::vector<int> sizes{2, 3};
  const std::vector<Placement> ways = {Replicate{}, Shard{0}, Shard{1}, Shard{2}};
  for (int rank = 0; rank < 6; ++rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, rank);
    const std::vector<int> at{rank / 3, rank % 3};
    for (const Placement& on_dp : ways)
      for (const Placement& on_tp : ways)
        for (const Shape& global : {Shape{7, 9, 2}, Shape{1, 9, 5}, Shape{6, 0, 3}}) {
          const LayoutRef plain = make_layout(mesh, {on_dp, on_tp}, global);
          for (const LayoutRef& layout : {plain, plain->nested({"tp", "dp"})}) {
            expect_runs(layout, sizes, at);
            if (global[1] == 9) expect_runs(layout->segmented(1, {4, 0, 5}), sizes, at);
          }
        }
  }
}

TEST(Runs, OfAPlainTensorAreOne) {
  int runs = 0;
  each_run({4, 3}, nullptr, {4, 3}, [&](std::int64_t start, std::int64_t place, std::int64_t count) {
    EXPECT_EQ(start, 0);
    EXPECT_EQ(place, 0);
    EXPECT_EQ(count, 12);
    ++runs;
  });
  EXPECT_EQ(runs, 1);
}

TEST(HeldBoxes, BeginOneAfterTheOtherInTheLocalTensor) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"tp", 2}}, 1);
  const LayoutRef layout = make_layout(mesh, {Shard{0}}, {8, 3})->segmented(0, {5, 0, 3});
  const std::vector<HeldBox> held = held_boxes(layout->global, layout, 1);
  ASSERT_EQ(held.size(), 3u);
  EXPECT_EQ(held[0].box, (Box{{3, 0}, {2, 3}}));
  EXPECT_EQ(held[0].at, (Dims{0, 0}));
  EXPECT_EQ(held[1].box, (Box{{5, 0}, {0, 3}}));
  EXPECT_EQ(held[1].at, (Dims{2, 0}));
  EXPECT_EQ(held[2].box, (Box{{7, 0}, {1, 3}}));
  EXPECT_EQ(held[2].at, (Dims{2, 0}));
  const std::vector<HeldBox> all = held_boxes({2, 2}, nullptr, 5);
  ASSERT_EQ(all.size(), 1u);
  EXPECT_EQ(all[0].box, whole_box({2, 2}));
  EXPECT_EQ(all[0].at, zeros(2));
}

}  // namespace
}  // namespace weft::test::boxes_test
