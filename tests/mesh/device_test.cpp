// Redistribution on devices: every pair of placements, on ranks with a late device each, gives the same
// result as on the CPU.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/errors.hpp"
#include "support/late_backend.hpp"
#include "support/late_device.hpp"
#include "support/run_ranks.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/mesh/replicas.hpp"

namespace weft::device_test {
namespace {

using test::Rank;
using test::Ranks;

// 5 rows and 7 columns: uneven parts on 2 and on 3 ranks.
const Placement kPlacements[] = {Replicate{}, Shard{0}, Shard{1}, Partial{}};

void expect_the_same(Rank& r, const DeviceMesh& here, const DeviceMesh& there, const Compute& compute,
                     const Shape& shape) {
  for (const Placement& from : kPlacements)
    for (const Placement& to : kPlacements) {
      SCOPED_TRACE(to_string(from) + " to " + to_string(to));
      const LayoutRef layout = make_layout(here, {{"tp", from}}, shape);
      const Tensor in(r.context, layout->local_shape());
      std::iota(in.f32().begin(), in.f32().end(), static_cast<float>(100 * r.rank + 1));
      const Tensor want = redistribute(in.with_layout(layout), {to});
      const Tensor moved =
          to_device(r.context, in, compute.stream()).with_layout(make_layout(there, {{"tp", from}}, shape));
      const Tensor got = redistribute(moved, {to});
      EXPECT_EQ(got.device(), compute.device());
      const Tensor home = to_host(r.context, got);
      ASSERT_EQ(home.shape(), want.shape());
      for (std::size_t i = 0; i < want.f32().size(); ++i) ASSERT_EQ(home.f32()[i], want.f32()[i]) << i;
      const Tensor own(r.context, want.shape(), DType::f32, Memory::local, compute.stream());
      redistribute(moved, moved.layout(), own, got.layout(), compute.stream());
      const Tensor there_too = to_host(r.context, own);
      for (std::size_t i = 0; i < want.f32().size(); ++i) ASSERT_EQ(there_too.f32()[i], want.f32()[i]) << i;
    }
}

TEST(RedistributeOnDevices, EveryPairOfPlacements) {
  for (const int ranks : {2, 3})
    test::run_ranks(Ranks::threads, ranks, [&](Rank& r) {
      r.context.add_device(std::make_unique<test::LateDevice>(r.rank));
      const Compute compute(r.context, 1, {DeviceKind::cuda, static_cast<std::int16_t>(r.rank)});
      ProcessGroup group =
          ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
      const DeviceMesh here(r.group(), {{"tp", r.size}}), there(group, {{"tp", r.size}});
      for (const Shape& shape : {Shape{5, 7}, Shape{6, 6}, Shape{0, 3}, Shape{2, 1, 7}})
        expect_the_same(r, here, there, compute, shape);
    });
}

// The proof that the tests on these devices can fail: each of these mistakes gives a wrong number, always.
TEST(CollectivesOnDevices, AForgottenWaitIsAWrongNumber) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& r) {
    auto made = std::make_unique<test::LateDevice>(r.rank);
    test::LateDevice& late = *made;
    r.context.add_device(std::move(made));
    Compute compute(r.context, 1, late.device());
    ProcessGroup group =
        ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
    const Stream stream = compute.stream(), other = late.make_stream();
    const std::vector<float> one(4, 1.0f);
    const auto ones = [&] {
      const Tensor x = compute.make({4});
      copy(r.context, view(one), x, stream);
      return x;
    };
    const auto first_of = [&](const Tensor& t, Stream on) {
      const Tensor here(r.context, {4});
      copy(r.context, t, here, on);
      late.wait(on);
      return here.f32()[0];
    };
    const auto sum = [&](const Tensor& in, const Tensor& out) {
      return group.all_reduce(in, out, {.stream = stream});
    };
    const Tensor x = ones(), never = compute.zeros({4}), before = compute.zeros({4}),
                 copied = compute.zeros({4}), on_other = compute.zeros({4}), changed = ones(),
                 result = compute.zeros({4});
    Work work = sum(x, never);
    EXPECT_NE(first_of(never, stream), 2) << "nobody has waited";
    work.wait();
    EXPECT_EQ(first_of(never, stream), 2);

    work = sum(x, before);
    copy(r.context, before, copied, stream);
    work.wait();
    EXPECT_NE(first_of(copied, stream), 2) << "was given to the stream before the wait";
    EXPECT_EQ(first_of(before, stream), 2);

    work = sum(x, on_other);
    work.wait_on(other);
    EXPECT_NE(first_of(on_other, stream), 2) << "another stream waits";
    EXPECT_EQ(first_of(on_other, other), 2);
    work.wait();
    EXPECT_EQ(first_of(on_other, stream), 2);

    work = sum(changed, result);
    late.fill(changed.data(), 0, {16}, stream);
    work.wait();
    EXPECT_NE(first_of(result, stream), 2) << "its input was written while it was in flight";
    late.destroy_stream(other);
  });
}

// Replicas of any dtype, one of several blocks of the hash, on devices.
TEST(ReplicasOnDevices, AreCompared) {
  test::run_ranks(Ranks::threads, 3, [&](Rank& r) {
    r.context.add_device(std::make_unique<test::LateDevice>(r.rank));
    Compute compute(r.context, 2, {DeviceKind::cuda, static_cast<std::int16_t>(r.rank)});
    ProcessGroup group =
        ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
    const DeviceMesh mesh(group, {{"dp", 3}});
    for (const DType dtype : {DType::u8, DType::i64})
      for (const std::int64_t count : {3, 1'100'003}) {
        const LayoutRef layout = replicated_layout(mesh, {count});
        const Tensor same = compute.zeros({count}, dtype), other = compute.zeros({count}, dtype);
        const std::vector<NamedView> tensors = {{"a", same.view(), layout}, {"b", other.view(), layout}};
        check_replicas(tensors, mesh, &compute);
        if (r.rank == 1)  // the last byte
          compute.runtime().fill(other.data() + other.bytes() - 1, 1, {1}, compute.stream());
        EXPECT_EQ(test::error_text(ErrorCode::mismatch, [&] { check_replicas(tensors, mesh, &compute); }),
                  "check_replicas: \"b\" is Replicate on dp=3, but on dp rank 1 it has other bits");
        EXPECT_THAT(test::error_text(ErrorCode::bad_argument, [&] { check_replicas(tensors, mesh); }),
                    testing::HasSubstr("check_replicas: \"a\" is on cuda:"));
      }
  });
}

}  // namespace
}  // namespace weft::device_test
