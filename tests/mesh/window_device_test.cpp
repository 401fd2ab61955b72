// Windows on devices: on ranks with a late device each, their values are the same as on the CPU.
#include <gtest/gtest.h>

#include <cstring>
#include <numeric>
#include <vector>

#include "support/errors.hpp"
#include "support/late_backend.hpp"
#include "support/late_device.hpp"
#include "support/run_ranks.hpp"
#include "weft/host/compute.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/window.hpp"

namespace weft::window_device_test {
namespace {

TEST(WindowOnDevices, GivesWhatItGivesOnTheHost) {
  for (const int ranks : {2, 3})
    test::run_ranks(test::Ranks::threads, ranks, [&](test::Rank& r) {
      r.context.add_device(std::make_unique<test::LateDevice>(r.rank));
      const Compute compute(r.context, 1, {DeviceKind::cuda, static_cast<std::int16_t>(r.rank)});
      ProcessGroup group =
          ProcessGroup::create(r.context, test::late_collectives(), r.membership("on devices"));
      const DeviceMesh here(r.group(), {{"y", r.size}}), there(group, {{"y", r.size}});
      const Edge edges[] = {Edge::zero(),    Edge::constant(2.5), Edge::periodic(),
                            Edge::reflect(), Edge::replicate(),   Edge::pole(1)};
      for (const int cut : {0, 1})
        for (const Edge& edge : edges) {
          SCOPED_TRACE(testing::Message()
                       << "dimension " << cut << " is cut, edge " << static_cast<int>(edge.kind));
          const auto layout_on = [&](const DeviceMesh& mesh) {
            return make_layout(mesh, {{"y", Shard{cut}}}, {5, 6});
          };
          const auto dims_on = [&](const LayoutRef& layout) {
            return std::vector<WindowDim>{WindowDim::halo(layout, 0, 2, 1, edge),
                                          WindowDim::halo(layout, 1, 1, 2, Edge::periodic())};
          };
          const LayoutRef layout = layout_on(here), far = layout_on(there);
          const Tensor in(r.context, layout->local_shape());
          std::iota(in.f32().begin(), in.f32().end(), static_cast<float>(100 * r.rank + 1));
          const Tensor want = fetch_window(in.with_layout(layout), dims_on(layout));
          const Tensor moved = to_device(r.context, in, compute.stream()).with_layout(far);
          const Tensor got = fetch_window(moved, dims_on(far));
          EXPECT_EQ(got.device(), compute.device());
          const Tensor home = to_host(r.context, got);
          ASSERT_EQ(home.shape(), want.shape());
          EXPECT_EQ(std::memcmp(home.data(), want.data(), static_cast<std::size_t>(want.bytes())), 0);
          EXPECT_EQ(
              test::error_text(ErrorCode::unsupported, [&] { fetch_window_adjoint(got, far, dims_on(far)); }),
              "window: the adjoint adds in the memory of the host; in is on " + to_string(compute.device()));
        }
    });
}

}  // namespace
}  // namespace weft::window_device_test
