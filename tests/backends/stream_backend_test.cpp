// A Backend over streams of bytes: errors of its streams, and how its ranks exchange addresses.
// tests/capi/transport_test.c runs every operation over it, and examples/backend is run by `weft check` where
// weft is installed.
#include "weft/backends/stream_backend.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fcntl.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <deque>
#include <map>
#include <mutex>
#include <stdexcept>
#include <thread>
#include <vector>

#include "support/run_ranks.hpp"
#include "weft/base/view.hpp"

namespace weft::test::stream_backend_test {
namespace {

using testing::HasSubstr;

// Streams in memory, for ranks that are threads. They take and give at most three bytes at a time.
struct Queues {
  std::mutex mutex;
  std::map<std::pair<int, int>, std::deque<std::byte>> of;  // by (from, to)
  int opened = 0;                                           // all_open() was called so often
};

class Ends final : public ByteStreams {
 public:
  Ends(Queues& queues, int rank, std::function<void(int to)> before_write, std::size_t gives = 0)
      : queues_(queues), rank_(rank), before_write_(std::move(before_write)), gives_(gives) {}
  std::size_t write(int to, const std::byte* bytes, std::size_t most) override {
    if (before_write_) before_write_(to);
    const std::lock_guard lock(queues_.mutex);
    const std::size_t taken = std::min(most, kAtOnce);
    std::deque<std::byte>& queue = queues_.of[{rank_, to}];
    queue.insert(queue.end(), bytes, bytes + taken);
    return taken;
  }
  std::size_t read(int from, std::byte* bytes, std::size_t most) override {
    const std::lock_guard lock(queues_.mutex);
    std::deque<std::byte>& queue = queues_.of[{from, rank_}];
    const std::size_t got = std::min({most, kAtOnce, queue.size()});
    std::copy_n(queue.begin(), got, bytes);
    queue.erase(queue.begin(), queue.begin() + static_cast<std::ptrdiff_t>(got));
    return gives_ != 0 ? gives_ : got;
  }
  void all_open() override {
    const std::lock_guard lock(queues_.mutex);
    ++queues_.opened;
  }

 private:
  static constexpr std::size_t kAtOnce = 3;
  Queues& queues_;
  const int rank_;
  const std::function<void(int to)> before_write_;
  const std::size_t gives_;  // what read() returns; 0: how many bytes there were
};

ProcessGroup group_over(Rank& r, Queues& queues, const std::string& name = "queues",
                        std::function<void(int to)> before_write = {}) {
  const BackendFactory make = [&](const GroupInit& b) {
    return make_stream_backend(
        b, {.name = name,
            .address = "rank " + std::to_string(b.rank) + "\nof two lines",
            .open = [&](std::span<const std::string> addresses) -> std::unique_ptr<ByteStreams> {
              for (std::size_t i = 0; i < addresses.size(); ++i)
                EXPECT_EQ(addresses[i], "rank " + std::to_string(i) + "\nof two lines");
              return std::make_unique<Ends>(queues, b.rank, before_write);
            }});
  };
  return ProcessGroup::create(r.context, make, r.membership("over streams"));
}

TEST(StreamBackend, EverythingIsDoneOverStreamsThatTakeAFewBytes) {
  Queues queues;
  run_ranks(Ranks::threads, 3, [&](Rank& r) {
    ProcessGroup group = group_over(r, queues);
    std::vector<std::int32_t> x(101, r.rank + 1), sum(101), got(101);
    group.all_reduce(view(x), view(sum)).wait();
    EXPECT_EQ(sum, std::vector<std::int32_t>(101, 6));
    if (r.rank == 0) {
      int seen = 0;
      for (int i = 0; i < 2; ++i) {
        group.recv(view(got), any_source, {.tag = 4}).wait();
        seen += got[100];
      }
      EXPECT_EQ(seen, 2 + 3);
    } else {
      group.send(view(x), 0, {.tag = 4}).wait();
    }
    r.meet("end");
  });
  EXPECT_EQ(queues.opened, 3);
}

// A rank that sends its last message, leaves, and ends its process has not died, even if the other rank looks
// at the process before it has read the message.
TEST(StreamBackend, ARankThatHasLeftAndEndedHasNotDied) {
  std::array<int, 2> pipe{};
  ASSERT_EQ(::pipe2(pipe.data(), O_NONBLOCK | O_CLOEXEC), 0);
  // Rank 0 only writes, rank 1 only reads.
  struct OneWay final : ByteStreams {
    explicit OneWay(std::array<int, 2> ends) : ends_(ends) {}
    std::size_t write(int, const std::byte* bytes, std::size_t most) override {
      return static_cast<std::size_t>(std::max<ssize_t>(0, ::write(ends_[1], bytes, most)));
    }
    std::size_t read(int, std::byte* bytes, std::size_t most) override {
      return static_cast<std::size_t>(std::max<ssize_t>(0, ::read(ends_[0], bytes, most)));
    }
    const std::array<int, 2> ends_;
  };
  RankProcesses ranks(2, [&](Rank& r) {
    const GroupInit init{.context = r.context,
                         .store = r.store,
                         .token = "one way",
                         .name = "one way",
                         .rank = r.rank,
                         .size = r.size,
                         .process_rank = r.rank,
                         .deadline = Deadline::after(std::chrono::seconds(20))};
    const std::unique_ptr<Backend> backend = make_stream_backend(
        init, {.name = "pipe", .open = [&](std::span<const std::string>) -> std::unique_ptr<ByteStreams> {
                 return std::make_unique<OneWay>(pipe);
               }});
    std::array<std::int32_t, 3> x{1, 2, 3}, got{};
    if (r.rank == 0) {
      OpState send{.op = Op::send,
                   .dtype = DType::i32,
                   .in = reinterpret_cast<const std::byte*>(x.data()),
                   .in_count = 3,
                   .peer = 1,
                   .scratch = {}};
      backend->post(send);
      EXPECT_EQ(backend->poll(send), Step::done);
      return;  // leaves, and the process ends
    }
    OpState recv{.op = Op::recv,
                 .dtype = DType::i32,
                 .out = reinterpret_cast<std::byte*>(got.data()),
                 .out_count = 3,
                 .peer = 0,
                 .scratch = {}};
    backend->post(recv);
    const Deadline deadline = Deadline::after(std::chrono::seconds(20));
    while (backend->gone().empty() && !deadline.passed()) std::this_thread::yield();
    EXPECT_EQ(backend->gone(), std::vector<int>{0});
    EXPECT_TRUE(backend->healthy()) << backend->failure().text;
    EXPECT_EQ(backend->poll(recv), Step::done);
    EXPECT_EQ(got, x);
  });
  ranks.finish();
  for (const int end : pipe) ::close(end);
}

TEST(StreamBackend, AGroupOfOneRankOpensItsEndToo) {
  Queues queues;
  run_ranks(Ranks::threads, 1, [&](Rank& r) {
    ProcessGroup group = group_over(r, queues);
    std::vector<float> x(5, 2), y(5);
    Work send = group.send(view(x), 0);
    group.recv(view(y), 0).wait();
    send.wait();
    EXPECT_EQ(y, x);
  });
  EXPECT_EQ(queues.opened, 1);
}

TEST(StreamBackend, WhatAStreamThrowsFailsTheGroupOnAllRanks) {
  Queues queues;
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    const auto throws = [](int) { throw std::runtime_error("the cable is cut"); };
    ProcessGroup group = group_over(r, queues, "queues", r.rank == 1 ? throws : std::function<void(int)>());
    std::vector<float> x(4);
    EXPECT_THAT(error_text(ErrorCode::system, [&] { group.all_reduce(view(x), view(x)).wait(); }),
                HasSubstr("transport queues: rank 1: the cable is cut"));
    r.meet("end");
  });
}

// Like a function that returns the result of read(2).
TEST(StreamBackend, AStreamThatReturnsMoreThanItWasAskedForFailsTheGroup) {
  Queues queues;
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    const auto minus_one = static_cast<std::size_t>(-1);
    const BackendFactory make = [&](const GroupInit& b) {
      return make_stream_backend(
          b, {.name = "queues", .open = [&](std::span<const std::string>) -> std::unique_ptr<ByteStreams> {
                return std::make_unique<Ends>(queues, b.rank, nullptr, b.rank == 1 ? minus_one : 0);
              }});
    };
    ProcessGroup group = ProcessGroup::create(r.context, make, r.membership("over streams"));
    std::vector<float> x(4);
    EXPECT_THAT(error_text(ErrorCode::system, [&] { group.all_reduce(view(x), view(x)).wait(); }),
                HasSubstr("transport queues: rank 1: read() returned 18446744073709551615 bytes from rank 0; "
                          "expected 0 to 16"));
    r.meet("end");
  });
}

TEST(StreamBackend, ATransportThatLacksSomethingIsRefused) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const auto refused = [&](StreamTransport transport) {
      const BackendFactory make = [&](const GroupInit& b) { return make_stream_backend(b, transport); };
      return error_text(ErrorCode::bad_argument,
                        [&] { ProcessGroup::create(r.context, make, r.membership("over streams")); });
    };
    const auto nothing = [](std::span<const std::string>) { return std::unique_ptr<ByteStreams>(); };
    EXPECT_THAT(refused({.name = "", .open = nothing}), HasSubstr("StreamTransport::name is empty"));
    EXPECT_THAT(refused({.name = "a\nb", .open = nothing}),
                HasSubstr("StreamTransport::name is \"a?b\"; expected no line feed"));
    EXPECT_THAT(refused({.name = "none", .open = {}}),
                HasSubstr("StreamTransport::open is empty; expected a function that opens this rank's end"));
    EXPECT_THAT(refused({.name = "none", .open = nothing}),
                HasSubstr("StreamTransport::open of none returned null; expected this rank's end"));
  });
}

TEST(StreamBackend, TransportsOfOtherNamesAreRefused) {
  Queues queues;
  run_ranks(Ranks::threads, 2, [&](Rank& r) {
    EXPECT_THAT(
        error_text(ErrorCode::mismatch, [&] { group_over(r, queues, r.rank == 0 ? "queues" : "cables"); }),
        HasSubstr(r.rank == 0 ? "rank 1 has the transport cables, rank 0 queues [rank 0]"
                              : "rank 0 has the transport queues, rank 1 cables [rank 1]"));
  });
}

}  // namespace
}  // namespace weft::test::stream_backend_test
