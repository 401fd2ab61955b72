// Redistribution on devices: every pair of placements, on ranks with a late device each, gives what it gives on the CPU.
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/late_backend.hpp"
#include "support/late_device.hpp"
#include "support/run_ranks.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"

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

}  // namespace
}  // namespace weft::device_test
