// Windows between ranks that share memory, in cases where a rank has several exchanges in flight, or
// several groups: the order of waits, and that each wait ends.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <string>
#include <thread>
#include <vector>

#include "backends/shm/exchange/ways.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/window.hpp"

namespace weft::window_waiting_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::error_of;
using test::Rank;
using test::RankOptions;
using test::Ranks;
using test::run_ranks;

double seconds_since(std::chrono::steady_clock::time_point begin) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begin).count();
}

// The error of done(), which is called until it throws: within five seconds, long before the deadline.
Error error_of_asking(WindowTransfer& t) {
  const auto begin = std::chrono::steady_clock::now();
  const Error e = error_of([&] {
    while (!t.done()) std::this_thread::yield();
  });
  EXPECT_LT(seconds_since(begin), 5);
  return e;
}

// Part `from` of a line, of n elements on each rank, goes to rank `to` alone.
class OneWay {
 public:
  OneWay(const DeviceMesh& mesh, int me, int from, int to, std::int64_t n)
      : window_(Partition(make_layout(mesh, {Shard{0}}, {mesh.size() * n})),
                {dim_of(mesh.size(), from, to, n)}),
        in_(static_cast<std::size_t>(n), me + 10.0),
        out_(me == to ? static_cast<std::size_t>(n) : 0) {}
  WindowTransfer start() {
    return window_.start(view(in_), view(out_.data(), static_cast<std::int64_t>(out_.size())));
  }
  double first() const { return out_.at(0); }

 private:
  static WindowDim dim_of(int ranks, int from, int to, std::int64_t n) {
    std::vector<IndexRange> wanted(static_cast<std::size_t>(ranks), {from * n, from * n});
    wanted[static_cast<std::size_t>(to)].hi += n;
    return WindowDim::ranges(0, wanted);
  }
  Window window_;
  std::vector<double> in_, out_;
};

// Rank 0 finishes the exchange with rank 2 before the exchange with rank 1; rank 1 begins its own only
// then.
TEST(WindowWaiting, ANewerExchangeIsFinishedWhileAnOlderOneWaits) {
  RankOptions options;
  options.deadline = seconds(8);
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const bool asks : {false, true})
      run_ranks(
          kind, 3,
          [&](Rank& r) {
            const DeviceMesh mesh(r.group(), {{"y", 3}});
            OneWay from_1(mesh, r.rank, 1, 0, 1), from_2(mesh, r.rank, 2, 0, 1);
            from_1.start().finish();
            from_2.start().finish();
            r.group().barrier().wait();
            std::uint8_t go = 1;
            if (r.rank == 1) r.group().recv(view(&go, 1), 0, {.tag = 5}).wait();
            if (r.rank == 2) std::this_thread::sleep_for(milliseconds(300));  // rank 0 sleeps
            WindowTransfer older = from_1.start(), newer = from_2.start();
            while (asks && !newer.done()) std::this_thread::yield();
            newer.finish();
            if (r.rank == 0) {
              EXPECT_EQ(from_2.first(), 12);
              r.group().send(view(&go, 1), 1, {.tag = 5}).wait();
            }
            older.finish();
            EXPECT_TRUE(r.rank != 0 || from_1.first() == 11);
          },
          options);
}

TEST(WindowWaiting, ANewerExchangeThatDoesNotComeIsToldAtTheDeadline) {
  RankOptions options;
  options.deadline = milliseconds(700);
  run_ranks(
      Ranks::processes, 3,
      [&](Rank& r) {
        const DeviceMesh mesh(r.group(), {{"y", 3}});
        OneWay from_1(mesh, r.rank, 1, 0, 1), from_2(mesh, r.rank, 2, 0, 1);
        from_1.start().finish();
        from_2.start().finish();
        r.group().barrier().wait();
        if (r.rank == 0) {
          const auto begin = std::chrono::steady_clock::now();
          WindowTransfer older = from_1.start(), newer = from_2.start();
          const Error e = error_of([&] { newer.finish(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_NE(
              std::string(e.what()).find("window: not finished within 0.7 s: rank 1 has not sent its part"),
              std::string::npos)
              << e.what();
          EXPECT_LT(seconds_since(begin), 5);
        }
        r.meet("over");
      },
      options);
}

TEST(WindowWaiting, WhoAsksAfterAFailureIsToldAtOnce) {
  RankOptions options;
  options.deadline = seconds(20);
  run_ranks(
      Ranks::threads, 2,
      [&](Rank& r) {
        const DeviceMesh mesh(r.group(), {{"y", 2}});
        OneWay there(mesh, r.rank, 1, 0, 4);
        there.start().finish();
        r.group().barrier().wait();
        if (r.rank == 0) {
          WindowTransfer t = there.start();
          r.group().abort("so it is");
          for (int errors = 0; errors < 3; ++errors) {
            const Error e = error_of_asking(t);
            EXPECT_NE(std::string(e.what()).find("so it is"), std::string::npos) << e.what();
          }
        }
        r.meet("over");
      },
      options);
}

TEST(WindowWaiting, WhoAsksAfterTheEndOfItsGroupIsToldAtOnce) {
  RankOptions options;
  options.deadline = seconds(20);
  run_ranks(
      Ranks::threads, 2,
      [](Rank& r) {
        WindowTransfer t;
        {
          ProcessGroup group = ProcessGroup::create(r.context, "shm", r.membership("short"));
          const DeviceMesh mesh(group, {{"y", 2}});
          OneWay there(mesh, r.rank, 1, 0, 4);
          there.start().finish();
          group.barrier().wait();
          if (r.rank == 0) t = there.start();
        }
        if (r.rank == 0) {
          const Error e = error_of_asking(t);  // the exchange keeps its group alive, which rank 1 has left
          EXPECT_EQ(e.code(), ErrorCode::peer_lost);
          EXPECT_EQ(std::string(e.what()).find("window: rank 1 left the group without it"), 0U) << e.what();
        }
        r.meet("over");
      },
      options);
}

// Rank 0 wakes its neighbours by messages of two groups, while there is no room for these. It makes progress
// in one group while it sends in the other group, and that sends in the first one again.
TEST(WindowWaiting, MessagesOfTwoGroupsThatHaveNoRoom) {
  RankOptions options;
  options.deadline = seconds(15);
  ::setenv("WEFT_SINGLE_COPY", "off", 1);  // many slots
  run_ranks(
      Ranks::processes, 4,
      [&](Rank& r) {
        ProcessGroup other = ProcessGroup::create(r.context, "shm", r.membership("other"));
        const DeviceMesh mesh(r.group(), {{"y", 4}}), of_other(other, {{"y", 4}});
        OneWay to_1(mesh, r.rank, 0, 1, 300'000), to_3(of_other, r.rank, 0, 3, 300'000),
            to_2(of_other, r.rank, 0, 2, 100);
        const auto all = [&] {
          WindowTransfer a = to_1.start(), b = to_3.start(), c = to_2.start();
          a.finish();
          b.finish();
          c.finish();
        };
        all();
        std::uint8_t x = 7;
        for (int messages = 17; messages < 33;
             messages += 2) {  // about as many as a peer has room for, and more
          r.group().barrier().wait();
          other.barrier().wait();
          const std::string begun = "begun" + std::to_string(messages);
          if (r.rank == 0) {
            WindowTransfer a = to_1.start(), b = to_3.start();
            r.store->set(begun, "1");
            std::this_thread::sleep_for(milliseconds(80));  // the others have emptied all slots, and sleep
            std::vector<Work> sends;
            for (int i = 0; i < messages; ++i) {
              sends.push_back(r.group().send(view(&x, 1), 1, {.tag = 9}));
              sends.push_back(other.send(view(&x, 1), 2, {.tag = 9}));
            }
            WindowTransfer c = to_2.start();
            a.finish();
            b.finish();
            c.finish();
            for (Work& s : sends) s.wait();
          } else {
            r.store->get(begun, Deadline::after(seconds(10)));
            all();
            for (int i = 0; i < messages && r.rank != 3; ++i)
              (r.rank == 1 ? r.group() : other).recv(view(&x, 1), 0, {.tag = 9}).wait();
          }
        }
      },
      options);
  ::unsetenv("WEFT_SINGLE_COPY");
}

// Memory that the kernel reads for nobody (memfd_secret), from the beginning and where there was other memory
// before.
void* secret(void* at, std::size_t bytes) {
#ifdef SYS_memfd_secret
  const int file = static_cast<int>(::syscall(SYS_memfd_secret, 0));
#else
  const int file = -1;
#endif
  if (file < 0 || ::ftruncate(file, static_cast<off_t>(bytes)) != 0) return MAP_FAILED;
  void* const data =
      ::mmap(at, bytes, PROT_READ | PROT_WRITE, MAP_SHARED | (at != nullptr ? MAP_FIXED : 0), file, 0);
  ::close(file);
  return data;
}

TEST(WindowWaiting, MemoryThatTheKernelDoesNotReadIsPacked) {
  constexpr std::int64_t kCount = 1 << 15;
  constexpr std::size_t kBytes = kCount * sizeof(double);
  if (void* const any = secret(nullptr, kBytes); any == MAP_FAILED)
    GTEST_SKIP() << "no memfd_secret here";
  else
    ::munmap(any, kBytes);
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {2, kCount}));
    std::vector<double> out(3 * kCount);
    const auto exchange = [&](void* memory) {
      auto* const in = static_cast<double*>(memory);
      const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
      for (int i = 0; i < static_cast<int>(shm::kWays * shm::Ways::kTries) + 1; ++i) {
        for (std::int64_t k = 0; k < kCount; ++k) in[k] = 100.0 * i + r.rank;
        window.fetch(view(static_cast<const double*>(in), {1, kCount}), view(out.data(), {3, kCount}));
        ASSERT_EQ(out[5], 100.0 * i + 1 - r.rank);
      }
    };
    void* const plain = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    ASSERT_NE(plain, MAP_FAILED);
    exchange(plain);
    ::munmap(plain, kBytes);
    void* const same_place = secret(plain, kBytes);
    ASSERT_EQ(same_place, plain);
    exchange(same_place);
    ::munmap(plain, kBytes);
  });
}

}  // namespace
}  // namespace weft::window_waiting_test
