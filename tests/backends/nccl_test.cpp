// The nccl transport over a stand-in for NCCL and CUDA: the order of work on streams, calls that start
// together, and failures. Ranks are threads.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <thread>

#include "backends/nccl/nccl_backend.hpp"
#include "store/forwarding_store.hpp"
#include "support/errors.hpp"
#include "support/nccl_stand_in.hpp"
#include "support/random_calls.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/first_cause.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test::nccl_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::IsEmpty;
using testing::StartsWith;

constexpr Device kDevice{DeviceKind::cuda, 0};

// The host's memory, which is the stand-in's device memory, labelled.
template <class T>
auto on_device(std::vector<T>& v, Device device = kDevice) {
  auto labelled = view(v);
  labelled.device = device;
  return labelled;
}

std::vector<float> values(int rank, std::int64_t count) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < count; ++i) v.push_back(static_cast<float>(value(rank, i)));
  return v;
}

std::vector<float> sums(int n, std::int64_t count) {
  std::vector<float> v;
  for (std::int64_t i = 0; i < count; ++i)
    v.push_back(static_cast<float>(combined(ReduceOp::sum, DType::f32, n, i)));
  return v;
}

class Nccl : public testing::Test {
 protected:
  void TearDown() override {
    EXPECT_THAT(nccl.complaints(), IsEmpty());
    EXPECT_THAT(nccl.leftovers(), IsEmpty());
  }

  static RankOptions with(Duration deadline) {
    RankOptions options;
    options.deadline = deadline;
    return options;
  }
  ProcessGroup group(Rank& r) { return ProcessGroup::create(r.context, nccl.factory(), r.membership()); }
  void run(int n, const std::function<void(Rank&, ProcessGroup&)>& body, Duration deadline = 20s) {
    run_ranks(
        Ranks::threads, n,
        [&](Rank& r) {
          ProcessGroup g = group(r);
          body(r, g);
        },
        with(deadline));
  }

  NcclStandIn nccl;
};

// ---- Operations

TEST_F(Nccl, EveryOperationInterleaved) {
  for (const int questions : {0, 3}) {
    nccl.set_launch_questions(questions);
    for (const int n : {1, 2, 3, 5})
      run(n, [&](Rank& r, ProcessGroup& g) {
        Variety variety;
        variety.leave_out_scans();
        variety.many = {1009, 5003};
        variety.whole_averages = false;
        variety.dtypes = {DType::f32, DType::f64, DType::f16, DType::bf16, DType::i8,
                          DType::i32, DType::i64, DType::u8,  DType::u32,  DType::u64};
        variety.staging = stage_to_device(nccl.api());
        calls_at_random(r, g, 150, std::mt19937(static_cast<unsigned>(n)),
                        std::mt19937(static_cast<unsigned>(100 + r.rank)), variety, Memory::local);
      });
  }
}

// Messages of NCCL have no tag, and a receiver cannot choose by sender.
TEST_F(Nccl, ReceivesNameTheirSource) {
  run(2, [](Rank& r, ProcessGroup& g) {
    std::vector<float> x(3);
    const auto expect_refused = [&](const auto& call, const std::string& text) {
      const Error e = error_of(call);
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_THAT(e.what(), StartsWith(text));
    };
    const std::string any =
        "src is any_source; backend nccl receives from a rank that is named [group \"world\"";
    expect_refused([&] { g.recv(on_device(x), any_source).wait(); }, "recv: " + any);
    expect_refused([&] { return g.probe(any_source); }, "probe: " + any);
    expect_refused([&] { return g.wait_message(any_source); }, "wait_message: " + any);
    expect_refused([&] { return g.probe(1 - r.rank); }, "probe: ");
    expect_refused([&] { return g.wait_message(1 - r.rank); }, "wait_message: ");
    g.barrier().wait();  // the group goes on
  });
}

// Every pair that the traits name, against the meaning that all backends share. Other pairs are refused.
TEST_F(Nccl, EveryReductionOfEveryType) {
  run(3, [](Rank& r, ProcessGroup& g) {
    for (int k = 0; k < kReduceKindCount; ++k) {
      for (int d = 0; d < kDTypeCount; ++d) {
        const ReduceOp op = reduction(static_cast<ReduceOp::Kind>(k));
        const auto dtype = static_cast<DType>(d);
        const Tensor t(r.context, Shape{13}, dtype);
        for (std::int64_t i = 0; i < 13; ++i) store(t, i, input(op, dtype, r.rank, i));
        TensorView v = t;
        v.device = kDevice;
        if (!g.traits().reduces_itself(op.kind, dtype)) {
          EXPECT_EQ(error_of([&] { g.all_reduce(v, v, {.op = op}).wait(); }).code(), ErrorCode::unsupported)
              << name(op) << " " << name(dtype);
          continue;
        }
        g.all_reduce(v, v, {.op = op}).wait();
        for (std::int64_t i = 0; i < 13; ++i)
          ASSERT_EQ(load(t, i), combined(op, dtype, 3, i)) << name(op) << " " << name(dtype) << " " << i;
      }
    }
  });
}

// Types that NCCL does not know are bytes to it.
TEST_F(Nccl, MovesEveryType) {
  run(3, [](Rank& r, ProcessGroup& g) {
    for (int d = 0; d < kDTypeCount; ++d) {
      const auto dtype = static_cast<DType>(d);
      const Tensor in(r.context, Shape{7}, dtype), out(r.context, Shape{21}, dtype);
      for (std::int64_t i = 0; i < 7; ++i) store(in, i, value(r.rank, i));
      TensorView from = in, to = out;
      from.device = to.device = kDevice;
      g.all_gather(from, to).wait();
      for (std::int64_t i = 0; i < 21; ++i)
        ASSERT_EQ(load(out, i), stored(dtype, value(static_cast<int>(i / 7), i % 7))) << name(dtype) << i;
    }
  });
}

TEST_F(Nccl, AGroupOfOneGoesToTheDevice) {
  run(1, [&](Rank&, ProcessGroup& g) {
    std::vector<float> v = values(0, 10), out(10);
    g.all_reduce(on_device(v), on_device(out)).wait();
    EXPECT_EQ(out, v);
    EXPECT_EQ(nccl.count("ncclAllReduce"), 1u);
    g.barrier().wait();
    EXPECT_EQ(nccl.count("ncclAllReduce"), 2u);
  });
}

TEST_F(Nccl, WhatItLacksIsSaid) {
  run(1, [](Rank&, ProcessGroup& g) {
    std::vector<std::int32_t> v(2);
    expect_error(ErrorCode::unsupported,
                 "all_reduce: backend nccl has no sum of i32 in canonical order [group \"world\", rank 0]",
                 [&] { g.all_reduce(on_device(v), on_device(v), {.order = Order::canonical}).wait(); });
    expect_error(ErrorCode::unsupported,
                 "all_reduce: in is on cpu; backend nccl moves cuda memory [group \"world\", rank 0]",
                 [&] { g.all_reduce(view(v), view(v)).wait(); });
    const Device other{DeviceKind::cuda, 1};
    expect_error(ErrorCode::bad_argument,
                 "all_reduce: in is on cuda:1; expected cuda:0 (the device of the group) "
                 "[group \"world\", rank 0]",
                 [&] { g.all_reduce(on_device(v, other), on_device(v, other)).wait(); });
  });
}

TEST_F(Nccl, SubgroupsMeetWithoutHostMemory) {
  run(4, [](Rank& r, ProcessGroup& g) {
    for (int round = 0; round < 2; ++round) {
      ProcessGroup half = g.split(r.rank % 2, -r.rank);
      ASSERT_EQ(half.size(), 2);
      EXPECT_EQ(half.rank(), r.rank < 2 ? 1 : 0);
      std::vector<float> v{static_cast<float>(r.rank)};
      half.all_reduce(on_device(v), on_device(v)).wait();
      EXPECT_EQ(v[0], r.rank % 2 ? 4 : 2);
    }
    EXPECT_FALSE(g.split(r.rank == 3 ? -1 : 0) && r.rank == 3);
  });
}

// ---- Streams

// Work that is on the caller's stream before the call is done before the call; the host does not wait.
TEST_F(Nccl, CallsWaitForTheCallersStream) {
  std::atomic<bool> open{false};
  run(2, [&](Rank& r, ProcessGroup& g) {
    const Stream stream = nccl.make_stream();
    std::vector<float> v(100), out(100);
    nccl.run_on(stream, [&] {
      if (!open) return false;
      std::copy_n(values(r.rank, 100).begin(), 100, v.begin());
      return true;
    });
    Work work = g.all_reduce(on_device(v), on_device(out), {.stream = stream});
    EXPECT_FALSE(work.wait_for(5ms));
    r.meet("both have posted");
    open = true;
    work.wait();
    EXPECT_EQ(out, sums(2, 100));
  });
}

// Later work on the caller's stream does not delay the call, and waits for the call only on request.
TEST_F(Nccl, StreamsWaitOnAWork) {
  run(2, [&](Rank& r, ProcessGroup& g) {
    const Stream before = nccl.make_stream();
    const Stream after = nccl.make_stream();
    std::atomic<bool> open{false};
    std::vector<float> v = values(r.rank, 100), out(100), seen;
    nccl.run_on(before, [&] { return open.load(); });
    Work work = g.all_reduce(on_device(v), on_device(out), {.stream = before});
    work.wait_on(after);
    nccl.run_on(after, [&] {
      seen = out;
      return true;
    });
    EXPECT_FALSE(work.done());
    open = true;
    nccl.drain(after);
    EXPECT_EQ(seen, sums(2, 100));
    work.wait();
    work.wait_on(after);  // finished: nothing to wait for
  });
}

// Each start of a persistent call waits for the work that is on its stream at that time. A stream that is
// captured at that time is an error.
TEST_F(Nccl, PersistentCallsWaitForTheirStreamEachTime) {
  std::atomic<int> open{0};
  run(2, [&](Rank& r, ProcessGroup& g) {
    const Stream stream = nccl.make_stream();
    std::vector<float> v(100), out(100);
    PersistentCall call = g.make_all_reduce(on_device(v), on_device(out), {.stream = stream});
    for (int round = 1; round <= 2; ++round) {
      out.assign(100, 0);
      v.assign(100, 0);
      nccl.run_on(stream, [&, round] {
        if (open < round) return false;
        std::copy_n(values(r.rank, 100).begin(), 100, v.begin());
        return true;
      });
      Work work = call.start();
      EXPECT_FALSE(work.wait_for(5ms));
      r.meet("both have started " + std::to_string(round));
      open = round;
      work.wait();
      EXPECT_EQ(out, sums(2, 100));
    }
    nccl.capture(stream, true);
    expect_error(
        ErrorCode::unsupported,
        "all_reduce: the stream is being captured into a graph, and a call that is replayed would have no "
        "Work; expected one that is not [group \"world\", rank " +
            std::to_string(r.rank) + "]",
        [&] { call.start().wait(); });
    nccl.capture(stream, false);
    call.start().wait();
    r.meet("captured no more");
  });
}

// If the group cannot use a stream, one call throws before anything is posted, and the group continues.
TEST_F(Nccl, AStreamOfAnotherDeviceIsABadArgument) {
  nccl.set_devices(2);
  run(2, [&](Rank& r, ProcessGroup& g) {
    std::vector<float> v = values(r.rank, 10);
    nccl.api().cudaSetDevice(1);
    const Stream other = nccl.make_stream();
    nccl.api().cudaSetDevice(0);
    const std::string tail = " [group \"world\", rank " + std::to_string(r.rank) + "]";
    const std::string text = "stream is of cuda:1; expected cuda:0 (the device of the group)";
    expect_error(ErrorCode::bad_argument, "all_reduce: " + text + tail,
                 [&] { g.all_reduce(on_device(v), on_device(v), {.stream = other}).wait(); });
    expect_error(ErrorCode::bad_argument, "send: " + text + tail,
                 [&] { g.send(on_device(v), 1 - r.rank, {.stream = other.device}).wait(); });
    int none = 0;  // and handles that are not what they are said to be
    for (void* const handle : {other.handle, static_cast<void*>(&none)})
      expect_error(ErrorCode::bad_argument,
                   "send: the stream is no stream of cuda:0; expected one (the device of the group)" + tail,
                   [&] {
                     g.send(on_device(v), 1 - r.rank, {.stream = {kDevice, handle}}).wait();
                   });
    expect_error(ErrorCode::bad_argument, "barrier: " + text + tail, [&] {
      g.coalesced({call::all_reduce(on_device(v), on_device(v)), call::barrier({.stream = other})}).wait();
    });
    Work work = g.all_reduce(on_device(v), on_device(v));
    work.wait_on(other);  // may wait all the same
    expect_error(
        ErrorCode::bad_argument,
        "wait_on: the stream is the default one of cuda:1; expected cuda:0's, or a stream with a handle" +
            tail,
        [&] { work.wait_on(other.device); });
    work.wait();
    EXPECT_EQ(v, sums(2, 10));
  });
}

TEST_F(Nccl, AStreamThatIsCapturedIsUnsupported) {
  run(2, [&](Rank& r, ProcessGroup& g) {
    std::vector<float> v = values(r.rank, 10);
    const Stream stream = nccl.make_stream();
    nccl.capture(stream, true);
    const std::string tail =
        "the stream is being captured into a graph, and a call that is replayed would have "
        "no Work; expected one that is not [group \"world\", rank " +
        std::to_string(r.rank) + "]";
    expect_error(ErrorCode::unsupported, "all_reduce: " + tail,
                 [&] { g.all_reduce(on_device(v), on_device(v), {.stream = stream}).wait(); });
    // A capture elsewhere in the program continues while a group works: the group's queries do not end the
    // capture.
    Work work = g.all_reduce(on_device(v), on_device(v));
    expect_error(ErrorCode::unsupported, "wait_on: " + tail, [&] {
      r.meet("posted");
      work.wait_on(stream);
    });
    work.wait();
    nccl.capture(stream, false);
    EXPECT_EQ(v, sums(2, 10));
    g.all_reduce(on_device(v), on_device(v), {.stream = stream}).wait();
    r.meet("captured no more");
  });
}

TEST_F(Nccl, EventsAreUsedAgain) {
  run(2, [&](Rank&, ProcessGroup& g) {
    std::vector<float> v(10);
    for (int k = 0; k < 50; ++k) g.all_reduce(on_device(v), on_device(v)).wait();
  });
  EXPECT_LE(nccl.count("cudaEventCreateWithFlags"), 4u);  // of two ranks
}

// The group's device is the device that was current in the thread that made the group, whichever device is
// current later. The group does not change the current device.
TEST_F(Nccl, TheCurrentDeviceIsTheCallersAgain) {
  nccl.set_devices(2);
  const nccl::NcclApi& api = nccl.api();
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    api.cudaSetDevice(1);
    ProcessGroup g = group(r);
    EXPECT_EQ(g.traits().device_index, 1);
    api.cudaSetDevice(0);
    const Device device{DeviceKind::cuda, 1};
    std::vector<float> v = values(r.rank, 10);
    g.all_reduce(on_device(v, device), on_device(v, device)).wait();
    EXPECT_EQ(v, sums(2, 10));
    int current = -1;
    api.cudaGetDevice(&current);
    EXPECT_EQ(current, 0);
  });
}

TEST_F(Nccl, NothingThatWaitsForADeviceIsInTheTable) {
#define WEFT_NAME(name, ...) #name,
  for (const std::string name : {WEFT_NCCL_FUNCTIONS(WEFT_NAME) WEFT_CUDA_FUNCTIONS(WEFT_NAME)}) {
    EXPECT_THAT(name, testing::Not(HasSubstr("Synchronize")));
    EXPECT_NE(name, "cudaMemcpy");
  }
#undef WEFT_NAME
}

// ---- Groups of calls

TEST_F(Nccl, CoalescedCallsStartTogether) {
  run(1, [&](Rank&, ProcessGroup& g) {
    std::vector<float> a(3), b(5), c(15);
    const std::size_t before = nccl.calls().size();
    g.coalesced({call::all_reduce(on_device(a), on_device(a)), call::broadcast(on_device(b), on_device(b), 0),
                 call::all_reduce(on_device(c), on_device(c))})
        .wait();
    std::vector<std::string> calls = nccl.calls();
    calls.erase(calls.begin(), calls.begin() + static_cast<std::ptrdiff_t>(before));
    std::erase(calls, "cudaEventCreateWithFlags");
    // Waits on the callers' streams, then the group, then the events, which come after the group's end.
    EXPECT_THAT(calls, ElementsAre("cudaEventRecord", "cudaEventRecord", "cudaEventRecord",
                                   "cudaStreamWaitEvent", "cudaStreamWaitEvent", "cudaStreamWaitEvent",
                                   "ncclGroupStart", "ncclAllReduce", "ncclBroadcast", "ncclAllReduce",
                                   "ncclGroupEnd", "cudaEventRecord", "cudaEventRecord", "cudaEventRecord"));
  });
}

// Ranks whose rings are filled differently still start the same calls together.
TEST_F(Nccl, BatchesAreTheSameOnAllRanks) {
  run(2, [&](Rank& r, ProcessGroup& g) {
    std::vector<float> early(1);
    std::vector<Work> works;
    for (int k = 0; k < 40; ++k) {
      works.push_back(g.all_reduce(on_device(early), on_device(early)));
      if (r.rank == 0) works.back().wait();  // its ring is empty, the other's is not
    }
    std::vector<std::vector<float>> v(100, values(r.rank, 3));
    std::vector<Call> calls;
    for (auto& each : v) calls.push_back(call::all_reduce(on_device(each), on_device(each)));
    g.coalesced(calls).wait();
    for (Work& work : works) work.wait();
    for (const auto& each : v) EXPECT_EQ(each, sums(2, 3));
  });
  EXPECT_EQ(nccl.count("ncclGroupStart"), 2u * (40 + 2));  // 64 calls, and the 36 others
}

TEST_F(Nccl, BlocksOfUnevenSizesAreOneGroup) {
  run(3, [&](Rank& r, ProcessGroup& g) {
    const std::vector<std::int64_t> counts{2, 0, 5};
    const std::int64_t mine = counts[static_cast<std::size_t>(r.rank)];
    std::vector<float> in = values(r.rank, mine), all(7);
    g.all_gather_v(on_device(in), on_device(all), {counts}).wait();
    std::vector<float> expected = values(0, 2);
    for (const float x : values(2, 5)) expected.push_back(x);
    EXPECT_EQ(all, expected);
    r.meet("gathered");
    EXPECT_EQ(nccl.count("ncclGroupStart"), 3u);
    EXPECT_EQ(nccl.count("ncclSend"), 4u);  // two ranks that have something, to two others each
    EXPECT_EQ(nccl.count("ncclRecv"), 4u);
    r.meet("counted");
    std::vector<float> whole = values(r.rank, 7), part(static_cast<std::size_t>(mine));
    g.reduce_scatter_v(on_device(whole), on_device(part), {counts}).wait();
    const std::vector<float> sum = sums(3, 7);
    const auto begin = sum.begin() + (r.rank == 2 ? 2 : 0);
    EXPECT_EQ(part, std::vector<float>(begin, begin + mine));
    r.meet("scattered");
    EXPECT_EQ(nccl.count("ncclReduce"), 6u);  // a reduction to each rank that gets something
  });
}

// ---- Messages

TEST_F(Nccl, BothSendBeforeTheyReceive) {
  run(2, [](Rank& r, ProcessGroup& g) {
    std::vector<float> out(5000), in = values(r.rank, 5000);
    Work send = g.send(on_device(in), 1 - r.rank);
    EXPECT_FALSE(send.wait_for(10ms));
    r.meet("both sent");
    Work receive = g.recv(on_device(out), 1 - r.rank);
    send.wait();
    receive.wait();
    EXPECT_EQ(out, values(1 - r.rank, 5000));
  });
}

TEST_F(Nccl, TagsInAnyOrderAndPastCollectives) {
  run(3, [](Rank& r, ProcessGroup& g) {
    std::vector<float> a = values(7, 10), b = values(8, 20), sum = values(r.rank, 10);
    Work first, second;
    if (r.rank == 0) {
      first = g.send(on_device(a), 1, {.tag = 1});
      second = g.send(on_device(b), 1, {.tag = 2});
    }
    g.all_reduce(on_device(sum), on_device(sum)).wait();  // no message holds it up
    EXPECT_EQ(sum, sums(3, 10));
    if (r.rank == 1) {
      std::vector<float> x(20), y(10);
      g.recv(on_device(x), 0, {.tag = 2}).wait();
      EXPECT_EQ(x, b);
      g.recv(on_device(y), 0, {.tag = 1}).wait();
      EXPECT_EQ(y, a);
    }
    if (first.valid()) first.wait();
    if (second.valid()) second.wait();
  });
}

TEST_F(Nccl, MessagesToOneself) {
  run(2, [](Rank& r, ProcessGroup& g) {
    std::vector<float> in = values(r.rank, 100), out(100);
    Work receive = g.recv(on_device(out), r.rank, {.tag = 5});
    EXPECT_FALSE(receive.done());
    g.send(on_device(in), r.rank, {.tag = 5}).wait();
    receive.wait();
    EXPECT_EQ(out, in);
    if (r.rank == 1) return;
    std::vector<float> less(3);
    Work send = g.send(on_device(in), 0);
    const Error e = error_of([&] { g.recv(on_device(less), 0).wait(); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(),
                HasSubstr("recv: rank 0 sends itself f32 x100 [tag 0] and receives f32 x3 [group \"world\""));
    EXPECT_THROW(send.wait(), Error);
  });
}

TEST_F(Nccl, TooManyLanes) {
  run(2, [](Rank& r, ProcessGroup& g) {
    if (r.rank == 1) return;
    std::vector<float> v(1);
    std::string text;
    for (int tag = 0; tag < 64; ++tag) {
      Work receive = g.recv(on_device(v), 0, {.tag = tag});
      g.send(on_device(v), 0, {.tag = tag}).wait();
      receive.wait();
    }
    const Error e = error_of([&] { g.send(on_device(v), 1, {.tag = 64}).wait(); });
    EXPECT_EQ(e.code(), ErrorCode::unsupported);
    EXPECT_THAT(e.what(), StartsWith("send: tag 64 would be the 65th pair of peer and tag of this rank; each "
                                     "takes a communicator of NCCL, and 64 are the most"));
  });
}

// The stand-in itself: outside of a group a send holds up its stream, so that two of them wait forever.
TEST_F(Nccl, TheStandInKnowsTheDeadlock) {
  const nccl::NcclApi& api = nccl.api();
  nccl.set_launch_questions(0);
  nccl::UniqueId id{};
  api.ncclGetUniqueId(&id);
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    nccl::Comm* comm = nullptr;
    nccl::Config config;
    config.blocking = 0;
    api.ncclCommInitRankConfig(&comm, 2, id, r.rank, &config);
    nccl::Result state = nccl::Result::in_progress;
    while (state == nccl::Result::in_progress) api.ncclCommGetAsyncError(comm, &state);
    nccl::CudaStream stream = nullptr;
    api.cudaStreamCreateWithFlags(&stream, nccl::kStreamNonBlocking);
    for (const bool group : {true, false}) {
      std::vector<float> in = values(r.rank, 3), out(3);
      if (group) api.ncclGroupStart();
      api.ncclSend(in.data(), 3, nccl::DataType::f32, 1 - r.rank, comm, stream);
      api.ncclRecv(out.data(), 3, nccl::DataType::f32, 1 - r.rank, comm, stream);
      if (group) {
        api.ncclGroupEnd();
        nccl.drain({kDevice, stream});
        EXPECT_EQ(out, values(1 - r.rank, 3));
      } else {
        r.meet("both sent");
        std::this_thread::sleep_for(5ms);
        EXPECT_EQ(api.cudaStreamQuery(stream), nccl::CudaResult::not_ready);
        r.meet("both stuck");
        api.ncclCommAbort(comm);
        r.meet("both aborted");
        EXPECT_EQ(out, std::vector<float>(3));
      }
    }
    nccl.drain({kDevice, stream});
    api.cudaStreamDestroy(stream);
  });
}

// ---- Failures

// A rank is late: the waiting ranks log it once.
TEST_F(Nccl, LateRanksAreNamedWhileTheOthersWait) {
  std::vector<std::string> lines;  // one call of the sink at a time
  RankOptions options = with(5s);
  options.context.log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); };
  run_ranks(
      Ranks::threads, 2,
      [&](Rank& r) {
        ProcessGroup g = group(r);
        std::vector<float> v = values(r.rank, 100);
        if (r.rank == 1) std::this_thread::sleep_for(1200ms);
        g.all_reduce(on_device(v), on_device(v)).wait();
      },
      options);
  EXPECT_THAT(
      lines, ElementsAre(
                 "[group] all_reduce f32 x100 sum: not finished after 0.5 s, a tenth of its deadline: "
                 "rank 1 has not announced a wait for it; last calls: rank 1 did not answer, so that its "
                 "last call is "
                 "unknown; rank 0 is in all_reduce f32 x100 sum [call 0] [group \"world\", rank 0, call 0]"));
}

// An absent rank is named at the deadline; the kernels are aborted and memory is free again.
TEST_F(Nccl, AbsentRanksAreNamedAtTheDeadline) {
  run(
      3,
      [&](Rank& r, ProcessGroup& g) {
        std::vector<float> v = values(r.rank, 100);
        if (r.rank != 1) {
          const Error e = error_of([&] { g.all_reduce(on_device(v), on_device(v)).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_THAT(e.what(),
                      HasSubstr("all_reduce: not finished within 1 s: rank 1 has not announced a wait for "
                                "it; last calls: rank 1 did not answer, so that its last call is "
                                "unknown; "));
          EXPECT_EQ(e.last_calls()[static_cast<std::size_t>(r.rank)].op, Op::all_reduce);
          EXPECT_EQ(e.last_calls()[1].state, LastCall::State::unknown);
          EXPECT_THAT(e.ranks(), ElementsAre(1));
          EXPECT_TRUE(g.quiesce(10s));
        }
        r.meet("failed");
        if (r.rank == 1) {
          Work work;
          const Error e = error_of([&] {
            work = g.all_reduce(on_device(v), on_device(v));
            work.wait();
          });
          EXPECT_THAT(e.what(), HasSubstr("rank 1 has not announced a wait for it"));  // the same first cause
          EXPECT_TRUE(g.quiesce(10s));
        }
        r.meet("all know");
      },
      1s);
  EXPECT_EQ(nccl.count("ncclCommAbort"), 3u);
  EXPECT_EQ(nccl.count("ncclCommDestroy"), 0u);
}

TEST_F(Nccl, AbsentPeersOfMessagesAreNamed) {
  run(
      2,
      [&](Rank& r, ProcessGroup& g) {
        std::vector<float> v(10);
        if (r.rank == 0) {
          const Error e = error_of([&] { g.recv(on_device(v), 1, {.tag = 3}).wait(); });
          EXPECT_THAT(e.what(), HasSubstr("recv: not finished within 0.2 s: rank 1 has not sent it (tag 3)"));
          EXPECT_THAT(e.ranks(), ElementsAre(1));
        }
        r.meet("failed");
      },
      200ms);
}

// All ranks have called, and the devices are stuck.
TEST_F(Nccl, StuckKernelsAreAborted) {
  run(
      2,
      [&](Rank& r, ProcessGroup& g) {
        nccl.hang_kernels(true);
        r.meet("hanging");
        std::vector<float> v(10);
        Work work = g.all_reduce(on_device(v), on_device(v));
        const Error e = error_of([&] { work.wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), HasSubstr("not finished within 0.4 s: "));
        EXPECT_TRUE(g.quiesce(10s));
        r.meet("aborted");
      },
      400ms);
  EXPECT_EQ(nccl.count("ncclCommAbort"), 2u);
}

// An abort waits for kernels, which wait for the caller's stream. fail() does not wait; quiesce() reports
// whether the abort is done.
TEST_F(Nccl, QuiesceWaitsForTheCallersStream) {
  run(1, [&](Rank&, ProcessGroup& g) {
    const Stream stream = nccl.make_stream();
    std::atomic<bool> open{false};
    nccl.run_on(stream, [&] { return open.load(); });
    std::vector<float> v(10);
    Work work = g.all_reduce(on_device(v), on_device(v), {.stream = stream});
    EXPECT_FALSE(work.wait_for(5ms));  // started
    g.abort("enough");
    const Error e = error_of([&] { work.wait(); });
    EXPECT_FALSE(e.quiesced());
    EXPECT_FALSE(g.quiesce(20ms));
    open = true;
    EXPECT_TRUE(g.quiesce(10s));
  });
}

TEST_F(Nccl, AnAbortReachesWaitingPeers) {
  run(3, [&](Rank& r, ProcessGroup& g) {
    std::vector<float> v(10);
    if (r.rank == 2) {
      std::this_thread::sleep_for(20ms);
      g.abort("the disk is full");
    } else {
      const Error e = error_of([&] { g.all_reduce(on_device(v), on_device(v)).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::aborted);
      EXPECT_EQ(e.op(), Op::all_reduce);
      EXPECT_THAT(e.what(),
                  StartsWith("all_reduce: aborted by rank 2: the disk is full [group \"world\", rank " +
                             std::to_string(r.rank)));
    }
    EXPECT_TRUE(g.quiesce(10s));
    r.meet("all know");
  });
}

TEST_F(Nccl, WhatNcclFindsOutByItself) {
  run(2, [&](Rank& r, ProcessGroup& g) {
    std::vector<float> v(10);
    r.meet("made");
    if (r.rank == 1) {
      nccl.break_rank(0, nccl::Result::remote_error, "socket closed by 10.0.0.7");
    } else {
      const Error e = error_of([&] { g.all_reduce(on_device(v), on_device(v)).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost);
      EXPECT_THAT(e.what(), HasSubstr("remote process exited or there was a network error (socket closed by "
                                      "10.0.0.7) [group \"world\", rank 0, call 0]"));
      EXPECT_THAT(e.what(), StartsWith("all_reduce: "));
    }
    r.meet("known");
  });
}

// If any function returns an error, the group fails on all ranks; the text has the function and the library's
// own text.
TEST_F(Nccl, FailedFunctionsAreNamed) {
  const auto fails = [&](const std::string& text) {
    run(2, [&](Rank& r, ProcessGroup& g) {
      std::vector<float> v(10);
      r.meet("made");
      // A rank without the error may have finished; then its next call throws.
      const Error e = error_of([&] {
        for (int k = 0; k < 2; ++k) g.all_reduce(on_device(v), on_device(v)).wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::system);
      EXPECT_THAT(e.what(), StartsWith("all_reduce: " + text + " [group \"world\", rank "));
      r.meet("told");
    });
  };
  nccl.fail_next("ncclAllReduce", nccl::Result::invalid_usage);
  fails("ncclAllReduce: invalid usage (run with NCCL_DEBUG=WARN for details)");
  nccl.fail_next("ncclGroupEnd", nccl::Result::unhandled_cuda_error);
  fails("ncclGroupEnd: unhandled cuda error (run with NCCL_DEBUG=INFO for details)");
  nccl.fail_next("cudaEventRecord", static_cast<nccl::CudaResult>(700));
  fails("cudaEventRecord: unspecified launch failure");
  nccl.fail_next("cudaEventQuery", static_cast<nccl::CudaResult>(700));
  fails("cudaEventQuery: unspecified launch failure");
}

// The last rank to leave ends the communicators without an error. A rank that waits for one that has left
// gets an error.
TEST_F(Nccl, WhoLeavesIsNamed) {
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    std::optional<ProcessGroup> g = group(r);
    std::vector<float> v(10);
    g->all_reduce(on_device(v), on_device(v)).wait();
    if (r.rank == 1) {
      g.reset();
    } else {
      expect_error(ErrorCode::peer_lost,
                   "all_reduce: rank 1 left the group without it [group \"world\", rank 0, call 1]",
                   [&] { g->all_reduce(on_device(v), on_device(v)).wait(); });
    }
    r.meet("told");
  });
}

// The remaining ranks continue on the same devices.
TEST_F(Nccl, SurvivorsGoOnInAGroupOfTheirOwn) {
  run_ranks(Ranks::threads, 3, [&](Rank& r) {
    ProcessGroup g = group(r);
    std::vector<float> v = values(r.rank, 10);
    g.all_reduce(on_device(v), on_device(v)).wait();
    if (r.rank == 2) {
      g = {};
    } else {
      EXPECT_EQ(error_of([&] { g.all_reduce(on_device(v), on_device(v)).wait(); }).code(),
                ErrorCode::peer_lost);
      EXPECT_TRUE(g.quiesce(10s));
      g = g.shrink(5s);
      EXPECT_EQ(g.size(), 2);
      v = values(r.rank, 10);
      g.all_reduce(on_device(v), on_device(v)).wait();
      EXPECT_EQ(v, sums(2, 10));
    }
    r.meet("end");
  });
}

TEST_F(Nccl, RanksEndTheirCommunicatorsTogether) {
  run(3, [](Rank& r, ProcessGroup& g) {
    std::vector<float> v(10), got(10);
    g.all_reduce(on_device(v), on_device(v)).wait();
    g.send_recv(on_device(v), (r.rank + 1) % 3, on_device(got), (r.rank + 2) % 3).wait();
  });
  EXPECT_EQ(nccl.count("ncclCommAbort"), 0u);
  EXPECT_EQ(nccl.count("ncclCommDestroy"), 3u + 6u);  // of all, and of each of three pairs
}

// A message may still lie in the sender's buffers when the sender has long left.
TEST_F(Nccl, WhoLeavesKeepsWhatPeersHaveYetToReceive) {
  nccl.send_eagerly(true);
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    ProcessGroup g = group(r);
    std::vector<float> v = values(0, 100), out(100);
    if (r.rank == 0) {
      g.send(on_device(v), 1).wait();
      g = {};
      r.meet("left");
    } else {
      const Stream stream = nccl.make_stream();
      std::atomic<bool> open{false};
      nccl.run_on(stream, [&] { return open.load(); });
      Work receive = g.recv(on_device(out), 0, {.stream = stream});
      EXPECT_FALSE(receive.wait_for(20ms));  // the lane is there, and the receive queued
      while (nccl.count("ncclRecv") == 0) EXPECT_FALSE(receive.wait_for(5ms));
      r.meet("left");
      open = true;
      receive.wait();
      EXPECT_EQ(out, values(0, 100));
    }
  });
  EXPECT_THAT(nccl.leftovers(), IsEmpty());
  EXPECT_EQ(nccl.count("ncclCommAbort"), 0u);
}

TEST_F(Nccl, MoreCommunicatorsThanQueuesAreNamedAtTheDeadline) {
  run(
      2,
      [&](Rank& r, ProcessGroup& g) {
        std::vector<float> v(1);
        for (int tag = 0; tag < 8; ++tag) {
          if (r.rank == 0) g.send(on_device(v), 1, {.deadline = 20s, .tag = tag}).wait();
          if (r.rank == 1) g.recv(on_device(v), 0, {.deadline = 20s, .tag = tag}).wait();
        }
        if (r.rank == 0) {
          const Error e = error_of([&] { g.recv(on_device(v), 1, {.tag = 0}).wait(); });
          EXPECT_THAT(
              e.what(),
              HasSubstr(
                  "rank 1 has not sent it (tag 0); this rank has 10 communicators of NCCL in this group "
                  "and the device 8 queues (CUDA_DEVICE_MAX_CONNECTIONS), so that one may wait behind "
                  "another"));
        }
        r.meet("failed");
      },
      200ms);
}

// A store whose process is stopped answers nobody. A request without a limit waits for half a minute.
std::shared_ptr<Store> stopped_store(std::shared_ptr<Store> store, const std::atomic<bool>& stopped) {
  return std::make_shared<ObservedStore>(
      std::move(store), [&stopped](StoreRequest, std::string_view, Deadline deadline) {
        if (!stopped) return;
        std::this_thread::sleep_for(std::min<Duration>(deadline.left(), 30s));
        throw Error(ErrorCode::timeout, "store: the server does not answer");
      });
}

// Then an error is due at the deadline or a little later, other threads of the rank continue meanwhile, and
// leaving takes no longer than otherwise.
TEST_F(Nccl, AStoppedStoreHoldsNobodyUp) {
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    std::atomic<bool> stopped{false};
    Membership m = r.membership();
    m.store = stopped_store(r.store, stopped);
    ProcessGroup g = ProcessGroup::create(r.context, nccl.factory(), m);
    std::vector<float> v(10), w(10);
    g.all_reduce(on_device(v), on_device(v)).wait();
    r.meet("made");
    stopped = true;
    if (r.rank == 0) {
      // A lane that is not made yet, and a collective that a thread waits for meanwhile.
      const auto began = Clock::now();
      const auto since = [&] { return Clock::now() - began; };
      Work send = g.send(on_device(w), 1, {.tag = 1});
      Work receive = g.recv(on_device(w), 1, {.tag = 2});
      EXPECT_LT(since(), 400ms);
      std::thread other([&] {
        std::this_thread::sleep_for(300ms);  // the other thread's wait has long begun to look at the Store
        const auto asked = Clock::now();
        EXPECT_FALSE(send.done());
        EXPECT_LT(Clock::now() - asked, 300ms);
      });
      // At every moment: warnings and the deadline ask which ranks are missing, and the failure must be
      // reported.
      std::atomic<bool> over{false};
      Duration longest{};
      std::thread often([&] {
        while (!over) {
          const auto asked = Clock::now();
          try {
            receive.done();
          } catch (const Error&) {}
          longest = std::max<Duration>(longest, Clock::now() - asked);
          std::this_thread::sleep_for(5ms);
        }
      });
      const Error e = error_of([&] { g.all_reduce(on_device(v), on_device(v), {.deadline = 1s}).wait(); });
      over = true;
      often.join();
      EXPECT_LT(longest, 300ms);
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_THAT(e.what(),
                  HasSubstr("not finished within 1 s: the Store does not say which ranks have arrived"));
      EXPECT_LT(since(), 4s);
      other.join();
      EXPECT_TRUE(g.quiesce(10s));
      error_of([&] { send.wait(); });
      error_of([&] { receive.wait(); });
    }
    r.meet("failed");
    if (r.rank == 1) g.abort("nobody could tell it");
    const auto began = Clock::now();
    g = {};
    EXPECT_LT(Clock::now() - began, 5s);
  });
}

TEST_F(Nccl, AGroupOverAStoppedStoreIsATimeoutAtTheDeadline) {
  run_ranks(
      Ranks::threads, 2,
      [&](Rank& r) {
        const std::atomic<bool> stopped{true};
        Membership m = r.membership();
        m.store = stopped_store(r.store, stopped);
        const auto began = Clock::now();
        const Error e = error_of([&] { ProcessGroup::create(r.context, nccl.factory(), m); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), HasSubstr("store: the server does not answer"));
        EXPECT_LT(Clock::now() - began, 3s);
      },
      with(500ms));
}

// ---- Bring-up

TEST_F(Nccl, RanksThatDoNotJoinAreNamed) {
  run_ranks(
      Ranks::threads, 3,
      [&](Rank& r) {
        if (r.rank == 1) return;
        const Error e = error_of([&] { group(r); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), testing::MatchesRegex("group \"world\": rank 1 did not join within [0-9.]+ s "
                                                    "\\[rank [02]\\]"));
        EXPECT_THAT(e.ranks(), ElementsAre(1));
      },
      with(200ms));
}

TEST_F(Nccl, ConnectingHasADeadline) {
  nccl.never_connect();
  run_ranks(
      Ranks::threads, 2,
      [&](Rank& r) {
        const Error e = error_of([&] { group(r); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), HasSubstr("group \"world\": NCCL did not connect the ranks within "));
      },
      with(200ms));
}

// A rank that cannot make the group notifies the ranks that wait for it.
TEST_F(Nccl, FailuresToConnectReachAll) {
  nccl.fail_next("ncclCommInitRankConfig", nccl::Result::invalid_usage);
  std::atomic<int> told{0};
  run_ranks(Ranks::threads, 3, [&](Rank& r) {
    const Error e = error_of([&] { group(r); });
    EXPECT_EQ(e.code(), ErrorCode::system);
    EXPECT_THAT(e.what(), HasSubstr("ncclCommInitRankConfig: invalid usage"));
    ++told;
  });
  EXPECT_EQ(told, 3);
}

TEST_F(Nccl, SizesThatDifferAreAMismatch) {
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    Membership m = r.membership();
    m.size = 2 + r.rank;
    m.deadline = 2s;
    const Error e = error_of([&] { ProcessGroup::create(r.context, nccl.factory(), m); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(), HasSubstr(r.rank == 0 ? "rank 1 says size 3, rank 0 says 2"
                                                : "rank 0 says size 2, rank 1 says 3"));
  });
}

// ---- What is there

TEST_F(Nccl, ObstaclesAreToldApart) {
  EXPECT_EQ(nccl::obstacle(nccl.api()), "");
  EXPECT_EQ(nccl::version_text(nccl.api()), "NCCL 2.20.5");
  nccl.set_version(21701);
  EXPECT_EQ(nccl::obstacle(nccl.api()), "NCCL 2.17.1 is too old; expected 2.18 or newer");
  nccl.set_version(2804);
  EXPECT_EQ(nccl::obstacle(nccl.api()), "NCCL 2.8.4 is too old; expected 2.18 or newer");
  run_ranks(Ranks::threads, 1, [&](Rank& r) {
    expect_error(ErrorCode::unsupported,
                 "group \"world\": nccl: NCCL 2.8.4 is too old; expected 2.18 or newer [rank 0]",
                 [&] { group(r); });
  });
  nccl.set_version(21800);
  EXPECT_EQ(nccl::obstacle(nccl.api()), "");
  nccl.set_devices(0);
  EXPECT_EQ(nccl::obstacle(nccl.api()), "no CUDA device: no CUDA-capable device is detected");
}

TEST(NcclLibraries, ThatAreNotThere) {
  EXPECT_THAT(nccl::load_api({"libnone.so.1"}, {"libc.so.6"}).problem,
              StartsWith("libnone.so.1 cannot be loaded: libnone.so.1: cannot open shared object file"));
  EXPECT_THAT(nccl::load_api({"libc.so.6"}, {"libnone.so.2"}).problem,
              StartsWith("libnone.so.2 cannot be loaded: libnone.so.2: cannot open shared object file"));
  EXPECT_EQ(nccl::load_api({"libc.so.6"}, {"libc.so.6"}).problem, "the library has no ncclGetVersion");
}

// The plug-in on this machine, with or without NCCL: it can be used, or it reports why not.
TEST(NcclPlugin, SaysWhyItCannotBeUsed) {
  Context context;
  const nccl::LoadedApi& here = nccl::loaded_api();
  const std::string problem = here.problem.empty() ? nccl::obstacle(here.api) : here.problem;
  if (problem.empty()) {
    EXPECT_NO_THROW(load_backend(context, "nccl"));
    return;
  }
  const Error e = error_of([&] { load_backend(context, "nccl"); });
  EXPECT_EQ(e.code(), ErrorCode::unsupported);
  EXPECT_THAT(e.what(), HasSubstr("libweft_backend_nccl.so: cannot be used here: " + problem));
}

TEST(FirstCause, CrossesTheStore) {
  const Failure why{ErrorCode::peer_lost, "two\nlines", Op::broadcast, 17, {3, 1}};
  const Failure back = decode_failure(encode(why));
  EXPECT_EQ(back.code, why.code);
  EXPECT_EQ(back.text, why.text);
  EXPECT_EQ(back.op, why.op);
  EXPECT_EQ(back.call, why.call);
  EXPECT_EQ(back.ranks, why.ranks);
  const std::shared_ptr<Store> store = make_local_store();
  const FirstCause a(store, "group"), b(store, "group"), other(store, "other");
  EXPECT_FALSE(b.look());
  EXPECT_EQ(a.raise(why).text, why.text);
  EXPECT_EQ(b.raise({ErrorCode::timeout, "later", Op::none, kNoCall, {}}).text, why.text);
  EXPECT_EQ(b.look()->call, 17u);
  EXPECT_FALSE(other.look());
  EXPECT_EQ(FirstCause(nullptr, "alone").raise(why).text, why.text);
}

}  // namespace
}  // namespace weft::test::nccl_test
