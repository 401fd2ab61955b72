// The nccl transport over a stand-in for NCCL and CUDA: what is given to streams in which order, what starts
// together, what happens when something goes wrong. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <atomic>
#include <numeric>
#include <thread>

#include "backends/first_cause.hpp"
#include "backends/nccl/nccl_backend.hpp"
#include "support/expect_error.hpp"
#include "support/nccl_stand_in.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;
using testing::AllOf;
using testing::HasSubstr;
using testing::IsEmpty;

template <class V>
auto on_device(V v, int index = 0) {
  v.device = {DeviceKind::cuda, static_cast<std::int16_t>(index)};
  return v;
}

class Nccl : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_THAT(nccl.complaints(), IsEmpty());
    EXPECT_THAT(nccl.leftovers(), IsEmpty());
  }

  void run(int n, const std::function<void(Rank&, ProcessGroup&)>& body, Duration deadline = 20s) {
    RankOptions options;
    options.deadline = deadline;
    run_ranks(
        Ranks::threads, n,
        [&](Rank& r) {
          ProcessGroup group = ProcessGroup::create(r.context, nccl.factory(), r.membership());
          body(r, group);
        },
        options);
  }

  static std::vector<float> values(int rank, int count) {
    std::vector<float> v(static_cast<std::size_t>(count));
    for (int i = 0; i < count; ++i) v[static_cast<std::size_t>(i)] = static_cast<float>(value(rank, i));
    return v;
  }

  NcclStandIn nccl;
};

TEST_F(Nccl, AllReduces) {
  run(3, [&](Rank& r, ProcessGroup& group) {
    const std::vector<float> in = values(r.rank, 100);
    std::vector<float> out(100);
    group.all_reduce(on_device(view(in)), on_device(view(out))).wait();
    for (int i = 0; i < 100; ++i)
      ASSERT_EQ(out[static_cast<std::size_t>(i)], combined(ReduceOp::sum, DType::f32, 3, i)) << i;
  });
}

}  // namespace
}  // namespace weft::test
