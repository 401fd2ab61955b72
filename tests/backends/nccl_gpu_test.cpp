// The nccl transport on a real GPU, if there is one. Every operation runs on one rank, and on two ranks of
// one GPU if NCCL allows that (2.30). Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <thread>

#include "backends/nccl/nccl_backend.hpp"
#include "support/device_staging.hpp"
#include "support/random_calls.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"

namespace weft::test::nccl_gpu_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

class NcclGpu : public testing::TestWithParam<int> {
 protected:
  void SetUp() override {
    const nccl::LoadedApi& loaded = nccl::loaded_api();
    const std::string problem = loaded.problem.empty() ? nccl::obstacle(loaded.api) : loaded.problem;
    if (!problem.empty()) GTEST_SKIP() << problem;
    int version = 0;
    api().ncclGetVersion(&version);
    if (GetParam() > 1 && version < 23000)
      GTEST_SKIP() << nccl::version_text(api()) << " has no two ranks on one GPU; 2.30 has";
    ::setenv("NCCL_MULTI_RANK_GPU_ENABLE", "1", 0);  // read when the first communicator is made
  }
  static const nccl::NcclApi& api() { return nccl::loaded_api().api; }

  static void run(const std::function<void(Rank&, ProcessGroup&)>& body, Duration deadline = 60s) {
    RankOptions options;
    options.deadline = deadline;
    options.limit = 150s;
    run_ranks(
        Ranks::threads, GetParam(),
        [&](Rank& r) {
          ProcessGroup g = ProcessGroup::create(
              r.context, [](const GroupInit& b) { return nccl::make_backend(api(), b); }, r.membership());
          body(r, g);
        },
        options);
  }
};
INSTANTIATE_TEST_SUITE_P(Ranks, NcclGpu, testing::Values(1, 2), testing::PrintToStringParamName());

TEST_P(NcclGpu, EveryOperationInterleaved) {
  run([](Rank& r, ProcessGroup& g) {
    Variety variety;
    variety.leave_out_scans();
    variety.many = {1009, 5003, 300007};
    variety.whole_averages = false;
    variety.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                      DType::i32, DType::i64, DType::u8,  DType::u32,  DType::u64};
    variety.staging = stage_to_device(api());
    r.meet("memory is there");
    calls_at_random(r, g, 200, std::mt19937(1), std::mt19937(static_cast<unsigned>(100 + r.rank)), variety,
                    Memory::local);
    r.meet("memory may go");
  });
}

// The table's promise that the numbers of all backends are the same: exact here.
TEST_P(NcclGpu, EveryReductionOfEveryType) {
  run([](Rank& r, ProcessGroup& g) {
    const DeviceStaging staging = stage_to_device(api());
    for (int k = 0; k < kReduceKindCount; ++k) {
      for (int d = 0; d < kDTypeCount; ++d) {
        const ReduceOp op = reduction(static_cast<ReduceOp::Kind>(k));
        const auto dtype = static_cast<DType>(d);
        if (!g.traits().reduces_itself(op.kind, dtype)) continue;
        const Tensor t(r.context, Shape{1013}, dtype);
        for (std::int64_t i = 0; i < t.count(); ++i) store(t, i, input(op, dtype, r.rank, i));
        Call call = call::all_reduce(t, t, {.op = op});
        const auto back = staging(call);
        g.submit(call).wait();
        back();
        for (std::int64_t i = 0; i < t.count(); ++i)
          ASSERT_EQ(load(t, i), combined(op, dtype, r.size, i)) << name(op) << " " << name(dtype) << " " << i;
      }
    }
  });
}

// A stream waits for a call and the host does not: the next copy on the stream reads the result.
TEST_P(NcclGpu, StreamsWaitOnAWork) {
  run([](Rank& r, ProcessGroup& g) {
    const std::int64_t count = 1 << 20;
    const Tensor t(r.context, Shape{count}), home(r.context, Shape{count});
    for (std::int64_t i = 0; i < count; ++i) store(t, i, value(r.rank, i));
    Call call = call::all_reduce(t, t);
    const auto back = stage_to_device(api())(call);
    nccl::CudaStream before = nullptr, after = nullptr;
    ASSERT_EQ(api().cudaStreamCreateWithFlags(&before, nccl::kStreamNonBlocking), nccl::CudaResult::success);
    ASSERT_EQ(api().cudaStreamCreateWithFlags(&after, nccl::kStreamNonBlocking), nccl::CudaResult::success);
    call.options.stream = {call.out.device, before};
    Work work = g.submit(call);
    work.wait_on({call.out.device, after});
    ASSERT_EQ(api().cudaMemcpyAsync(home.data(), call.out.data, static_cast<std::size_t>(home.bytes()),
                                    nccl::CopyKind::by_address, after),
              nccl::CudaResult::success);
    while (api().cudaStreamQuery(after) == nccl::CudaResult::not_ready) std::this_thread::sleep_for(100us);
    for (std::int64_t i = 0; i < count; ++i)
      ASSERT_EQ(load(home, i), combined(ReduceOp::sum, DType::f32, r.size, i)) << i;
    work.wait();
    back();
    api().cudaStreamDestroy(before);
    api().cudaStreamDestroy(after);
  });
}

// A rank that does not come: the kernels of the others are aborted at the deadline.
TEST_P(NcclGpu, AbsentRanksAreNamed) {
  if (GetParam() == 1) GTEST_SKIP() << "one rank waits for nobody";
  run(
      [](Rank& r, ProcessGroup& g) {
        Tensor t(r.context, Shape{1000});
        for (std::int64_t i = 0; i < 1000; ++i) store(t, i, 1);
        Call call = call::all_reduce(t, t);
        const auto back = stage_to_device(api())(call);
        g.submit(call).wait();
        if (r.rank == 0) {
          const Error e = error_of([&] { g.submit(call).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_THAT(e.what(), HasSubstr("rank 1 has not announced a wait for it"));
          EXPECT_TRUE(g.quiesce(30s));
        }
        r.meet("failed");
      },
      5s);
}

}  // namespace
}  // namespace weft::test::nccl_gpu_test
