// Point to point over the shm backend: eager and large messages, in shared and in other memory, in every
// order that must not deadlock.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <time.h>

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <thread>

#include "backends/shm/control.hpp"
#include "backends/shm/paths.hpp"
#include "support/shm_settings.hpp"
#include "support/values.hpp"

namespace weft::test::messages_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

constexpr std::int64_t kEager = shm::kEagerBytes, kStream = shm::kStreamBytes, kChunk = shm::kChunkBytes;

class Messages : public OnShm {
 protected:
  static Tensor empty(Rank& r, std::int64_t count, DType dtype = DType::u8) {
    const Tensor t(r.context, Shape{count}, dtype, GetParam().memory);
    fill(t, [](std::int64_t) { return 77; });
    return t;
  }
  // `seed` tells messages apart.
  static Tensor filled(Rank& r, std::int64_t count, int seed, DType dtype = DType::u8) {
    const Tensor t(r.context, Shape{count}, dtype, GetParam().memory);
    fill(t, [&](std::int64_t i) { return value(seed, i) + 10 * (seed % 5); });
    return t;
  }
  // Element i becomes x(i), which repeats every kPeriod indices, as value() does. The rest is copied, because
  // computing some millions of elements takes seconds under a sanitizer.
  static constexpr std::int64_t kPeriod = 49;
  template <class F>
  static void fill(const Tensor& t, const F& x) {
    const auto total = static_cast<std::size_t>(t.bytes());
    for (std::int64_t i = 0; i < std::min(kPeriod, t.count()); ++i) store(t, i, x(i));
    for (std::size_t done = static_cast<std::size_t>(kPeriod * size_bytes(t.dtype())); done < total;
         done *= 2)
      std::memcpy(t.data() + done, t.data(), std::min(done, total - done));
  }
  // Large ones are compared by the word.
  static Tensor words(Rank& r, std::int64_t count, int seed) {
    const Tensor t(r.context, Shape{count}, DType::u64, GetParam().memory);
    auto* const at = reinterpret_cast<std::uint64_t*>(t.data());
    for (std::int64_t i = 0; i < count; ++i) at[i] = word(seed, i);
    return t;
  }
  static std::uint64_t word(int seed, std::int64_t i) {
    return static_cast<std::uint64_t>(i + 1) * 0x9e3779b97f4a7c15u + static_cast<std::uint64_t>(seed);
  }
  static void expect_words(const Tensor& t, int seed) {
    const auto* const at = reinterpret_cast<const std::uint64_t*>(t.data());
    for (std::int64_t i = 0; i < t.count(); ++i) ASSERT_EQ(at[i], word(seed, i)) << "[" << i << "]";
  }
  static void expect_filled(const Tensor& t, int seed) {
    const std::int64_t period = std::min(kPeriod, t.count()), period_bytes = period * size_bytes(t.dtype());
    // Memory that repeats with the period is right if its first period is.
    const bool repeats = std::memcmp(t.data() + period_bytes, t.data(),
                                     static_cast<std::size_t>(t.bytes() - period_bytes)) == 0;
    for (std::int64_t i = 0; i < (repeats ? period : t.count()); ++i)
      ASSERT_EQ(load(t, i), value(seed, i) + 10 * (seed % 5)) << "message " << seed << " [" << i << "]";
    ASSERT_TRUE(repeats);
  }
};

INSTANTIATE_TEST_SUITE_P(Shm, Messages, testing::ValuesIn(shm_settings()),
                         [](const auto& setting) { return to_string(setting.param); });
INSTANTIATE_TEST_SUITE_P(ShmWithoutPairs, Messages,
                         testing::Values(ShmSetting{kThreadsInForks ? Ranks::processes : Ranks::threads,
                                                    Memory::local, false}),
                         [](const auto& setting) { return to_string(setting.param); });

TEST_P(Messages, EverySizeBothWays) {
  run(2, [](Rank& r) {
    for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{1}, std::int64_t{31}, shm::kExposedFrom,
                                     shm::kExposedFrom + 1, kEager, kEager + 1, kStream, kStream + 1,
                                     kChunk + 1, std::int64_t{1} << 20, std::int64_t{8} << 20}) {
      for (const int from : {0, 1}) {
        if (r.rank == from) {
          const Tensor t = filled(r, bytes, from + 1);
          r.group().send(t, 1 - from).wait();
        } else {
          const Tensor t = empty(r, bytes);
          r.group().recv(t, from).wait();
          expect_filled(t, from + 1);
        }
      }
    }
  });
}

TEST_P(Messages, EveryDtype) {
  run(2, [](Rank& r) {
    for (int d = 0; d < kDTypeCount; ++d) {
      const auto dtype = static_cast<DType>(d);
      for (const std::int64_t count : {3, 9000}) {
        const Tensor sent = empty(r, count, dtype), got = empty(r, count, dtype);
        for (std::int64_t i = 0; i < count; ++i) store(sent, i, value(0, i));
        if (r.rank == 0) {
          r.group().send(sent, 1).wait();
        } else {
          r.group().recv(got, 0).wait();
          for (std::int64_t i = 0; i < count; ++i) ASSERT_EQ(load(got, i), load(sent, i)) << name(dtype);
        }
      }
    }
  });
}

TEST_P(Messages, TagsInAnyOrder) {
  run(2, [](Rank& r) {
    constexpr int kTags = 12;
    const auto bytes = [](int tag) { return tag % 3 == 0 ? kEager + 100 + tag : std::int64_t{tag}; };
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int k = 0; k < kTags; ++k) {
      const int tag = r.rank == 0 ? k : (k * 7 + 5) % kTags;
      tensors.push_back(r.rank == 0 ? filled(r, bytes(tag), tag) : empty(r, bytes(tag)));
      works.push_back(r.rank == 0 ? r.group().send(tensors.back(), 1, {.tag = tag})
                                  : r.group().recv(tensors.back(), 0, {.tag = tag}));
    }
    for (Work& w : works) w.wait();
    if (r.rank == 1)
      for (int k = 0; k < kTags; ++k)
        expect_filled(tensors[static_cast<std::size_t>(k)], (k * 7 + 5) % kTags);
  });
}

TEST_P(Messages, OfOneTagKeepTheirOrder) {
  run(2, [](Rank& r) {
    const auto bytes = [](int k) { return k % 2 ? kEager * 3 + k : std::int64_t{k}; };
    std::vector<Tensor> tensors;
    std::vector<Work> works;
    for (int k = 0; k < 50; ++k) {
      tensors.push_back(r.rank == 0 ? filled(r, bytes(k), k) : empty(r, bytes(k)));
      works.push_back(r.rank == 0 ? r.group().send(tensors.back(), 1) : r.group().recv(tensors.back(), 0));
    }
    for (auto w = works.rbegin(); w != works.rend(); ++w) w->wait();
    if (r.rank == 1)
      for (int k = 0; k < 50; ++k) expect_filled(tensors[static_cast<std::size_t>(k)], k);
  });
}

// In any order: both ranks send, then both receive, then both wait. This works for every size.
TEST_P(Messages, BothSendLargeThenReceiveThenWait) {
  run(2, [](Rank& r) {
    for (const std::int64_t bytes : {kEager + 1, std::int64_t{3} << 20, std::int64_t{64} << 20}) {
      const Tensor out = words(r, bytes / 8, r.rank), in = words(r, bytes / 8, 7);
      Work send = r.group().send(out, 1 - r.rank);
      Work recv = r.group().recv(in, 1 - r.rank);
      send.wait();
      recv.wait();
      expect_words(in, 1 - r.rank);
    }
  });
}

// The messages of a pair are received in another order than they were sent, and other ranks wait in a
// collective that begins only when a message has arrived.
TEST_P(Messages, FreeOfTheOrderOfCollectives) {
  run(3, [](Rank& r) {
    constexpr std::int64_t kWords = 100000;
    const Tensor out = words(r, kWords, r.rank), late = words(r, kWords, 7), sum = words(r, 9000, r.rank);
    if (r.rank == 0) {
      Work first = r.group().send(out, 1, {.tag = 1}), second = r.group().send(out, 1, {.tag = 2});
      r.group().all_reduce(sum, sum, {.op = ReduceOp::max}).wait();
      first.wait();
      second.wait();
    } else if (r.rank == 1) {
      r.group().recv(late, 0, {.tag = 2}).wait();
      Work reduce = r.group().all_reduce(sum, sum, {.op = ReduceOp::max});
      r.group().recv(late, 0, {.tag = 1}).wait();
      reduce.wait();
      expect_words(late, 0);
    } else {
      r.group().all_reduce(sum, sum, {.op = ReduceOp::max}).wait();
    }
  });
}

TEST_P(Messages, ToItself) {
  for (const int n : {1, 2}) {
    run(n, [](Rank& r) {
      for (const std::int64_t bytes : {std::int64_t{0}, std::int64_t{5}, kEager + 1, std::int64_t{1} << 20}) {
        for (const bool send_first : {true, false}) {
          const Tensor out = filled(r, bytes, r.rank + 1), in = empty(r, bytes);
          Work first =
              send_first ? r.group().send(out, r.rank, {.tag = 3}) : r.group().recv(in, r.rank, {.tag = 3});
          Work second =
              send_first ? r.group().recv(in, r.rank, {.tag = 3}) : r.group().send(out, r.rank, {.tag = 3});
          first.wait();
          second.wait();
          expect_filled(in, r.rank + 1);
        }
      }
      r.meet("over");  // a process that ends is lost to a rank that is still making its group
    });
  }
}

// More messages than the ring of envelopes holds, while the receiver is in a barrier.
TEST_P(Messages, ManySmallSendsWhileTheReceiverIsInABarrier) {
  run(2, [](Rank& r) {
    constexpr int kCount = 200;
    if (r.rank == 0) {
      for (int k = 0; k < kCount; ++k) {
        const Tensor t = filled(r, k % 50, k);
        r.group().send(t, 1, {.tag = k % 3}).wait();
      }
      r.group().barrier().wait();
    } else {
      r.group().barrier().wait();
      for (int k = 0; k < kCount; ++k) {
        const Tensor t = empty(r, k % 50);
        r.group().recv(t, 0, {.tag = k % 3}).wait();
        expect_filled(t, k);
      }
    }
  });
}

TEST_P(Messages, AllPairsAtOnce) {
  run(4, [](Rank& r) {
    for (int round = 0; round < 10; ++round) {
      std::vector<Tensor> sent, got;
      std::vector<Work> works;
      const auto bytes = [&](int from, int to, int tag) {
        return (from * 31 + to * 17 + tag * 5 + round) % 4 == 0 ? std::int64_t{70000} + from : 100 + to + tag;
      };
      const auto seed = [](int from, int to, int tag) { return from * 12 + to * 3 + tag; };
      for (int tag = 0; tag < 3; ++tag) {
        for (int peer = 0; peer < 4; ++peer) {  // itself too
          sent.push_back(filled(r, bytes(r.rank, peer, tag), seed(r.rank, peer, tag)));
          got.push_back(empty(r, bytes(peer, r.rank, tag)));
          works.push_back(r.group().send(sent.back(), peer, {.tag = tag}));
          works.push_back(r.group().recv(got.back(), peer, {.tag = tag}));
        }
      }
      for (std::size_t k = 0; k < works.size(); ++k)
        works[(k * 11 + static_cast<std::size_t>(r.rank)) % 24].wait();
      for (int k = 0; k < 12; ++k)
        expect_filled(got[static_cast<std::size_t>(k)], seed(k % 4, r.rank, k / 4));
    }
  });
}

TEST_P(Messages, OthersNeedDoNothing) {
  run(4, [](Rank& r) {
    r.group();
    if (r.rank < 2) {
      for (const std::int64_t bytes : {std::int64_t{8}, std::int64_t{1} << 20}) {
        const Tensor t = r.rank == 0 ? filled(r, bytes, 4) : empty(r, bytes);
        (r.rank == 0 ? r.group().send(t, 1) : r.group().recv(t, 0)).wait();
        expect_filled(t, 4);
      }
    }
    r.meet("end");
  });
}

// The largest possible number of large messages in flight, received in reverse order, first all at once, then
// one by one.
TEST_P(Messages, SixtyLargeInReverse) {
  run(2, [](Rank& r) {
    constexpr int kCount = 60;
    for (const bool at_once : {true, false}) {
      std::vector<Tensor> tensors;
      std::vector<Work> works;
      for (int k = 0; k < kCount; ++k) {
        const int tag = r.rank == 0 ? k : kCount - 1 - k;
        tensors.push_back(r.rank == 0 ? filled(r, 20000 + 3000 * (tag % 5), tag)
                                      : empty(r, 20000 + 3000 * (tag % 5)));
        works.push_back(r.rank == 0 ? r.group().send(tensors.back(), 1, {.tag = tag})
                                    : r.group().recv(tensors.back(), 0, {.tag = tag}));
        if (r.rank == 1 && !at_once) works.back().wait();
      }
      for (Work& w : works) w.wait();
      if (r.rank == 1)
        for (int k = 0; k < kCount; ++k) expect_filled(tensors[static_cast<std::size_t>(k)], kCount - 1 - k);
    }
  });
}

TEST_P(Messages, AmongCollectives) {
  run(3, [](Rank& r) {
    for (int round = 0; round < 30; ++round) {
      const std::int64_t bytes = round % 3 == 0 ? 30000 : 60, count = round % 4 == 0 ? 5000 : 9;
      const int next = (r.rank + 1) % 3, before = (r.rank + 2) % 3;
      const Tensor sent = filled(r, bytes, r.rank + round), got = empty(r, bytes),
                   sum = empty(r, count, DType::f32);
      for (std::int64_t i = 0; i < count; ++i) store(sum, i, value(r.rank, i));
      Work recv = r.group().recv(got, before, {.tag = round});
      Work reduce = r.group().all_reduce(sum, sum);
      Work send = r.group().send(sent, next, {.tag = round});
      if ((round + r.rank) % 2) recv.wait();
      reduce.wait();
      send.wait();
      recv.wait();
      expect_filled(got, before + round);
      for (std::int64_t i = 0; i < count; ++i)
        ASSERT_EQ(load(sum, i), combined(ReduceOp::sum, DType::f32, 3, i));
    }
  });
}

TEST_P(Messages, AMismatchSaysBothSides) {
  const auto expect = [](const std::function<void(Rank&)>& call, const std::string& text) {
    run(2, [&](Rank& r) {
      r.group().barrier().wait();
      const Error e = error_of([&] {
        call(r);
        r.group().barrier().wait();  // the sender learns of it at its next call, if not before
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch);
      EXPECT_EQ(e.op(), Op::recv);
      EXPECT_EQ(e.call(), 0u);
      EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0, 1));
      EXPECT_EQ(e.what(), text + " [group \"world\", rank " + std::to_string(r.rank) + ", call 0]");
    });
  };
  for (const std::int64_t scale : {1, 5000}) {  // eager and large
    const std::string small = std::to_string(10 * scale), big = std::to_string(20 * scale);
    expect(
        [&](Rank& r) {
          const Tensor t = empty(r, (r.rank == 0 ? 10 : 20) * scale, DType::f32);
          (r.rank == 0 ? r.group().send(t, 1, {.tag = 3}) : r.group().recv(t, 0, {.tag = 3})).wait();
        },
        "rank 0 sent f32 x" + small + " with tag 3, rank 1 receives f32 x" + big);
    expect(
        [&](Rank& r) {
          const Tensor t = empty(r, 10 * scale, r.rank == 0 ? DType::i32 : DType::f32);
          (r.rank == 0 ? r.group().recv(t, 1) : r.group().send(t, 0)).wait();
        },
        "rank 1 sent f32 x" + small + " with tag 0, rank 0 receives i32 x" + small);
  }
}

TEST_P(Messages, AnAbsentSenderIsNamedWithItsTag) {
  run(3, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 1) {
      const Tensor t = empty(r, 4);
      const Error e = error_of([&] { r.group().recv(t, 2, {.deadline = 200ms, .tag = 9}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_EQ(e.op(), Op::recv);
      EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(2));
      EXPECT_THAT(
          e.what(),
          testing::AllOf(testing::StartsWith("recv: not finished within 0.2 s: rank 2 has not sent it (tag "
                                             "9); last calls: "),
                         HasSubstr("rank 1 finished barrier [call 0] and waits in recv u8 x4 from rank 2 "
                                   "(tag 9) [group \"world\", rank 1, call 0]")));
    }
    r.meet("end");
  });
}

TEST_P(Messages, ATimeOutNamesTheTagsThatHaveCome) {
  run(2, [](Rank& r) {
    const Tensor t = empty(r, 4);
    r.group().barrier().wait();
    if (r.rank == 0) r.group().send(t, 1, {.tag = 8}).wait();
    r.meet("sent");
    if (r.rank == 1) {
      const Error e = error_of([&] { r.group().recv(t, 0, {.deadline = 200ms, .tag = 9}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_THAT(
          e.what(),
          HasSubstr("rank 0 has not sent it (tag 9); messages that were not received: tag 8 from rank 0; "));
    }
    r.meet("end");
  });
}

TEST_P(Messages, AnAbsentReceiverIsNamedWithItsTag) {
  run(2, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 1) {
      const Tensor t = filled(r, kEager + 1, 1);
      const Error e = error_of([&] { r.group().send(t, 0, {.deadline = 200ms, .tag = 4}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0));
      EXPECT_THAT(e.what(), HasSubstr("send: not finished within 0.2 s: rank 0 has not received it (tag 4)"));
    }
    r.meet("end");
  });
}

TEST_P(Messages, WhoLeavesWithoutReceivingIsNamed) {
  run(2, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 0) {
      r.group() = ProcessGroup();
    } else {
      const Tensor t = filled(r, kEager + 1, 1);
      const auto began = Clock::now();
      const Error e = error_of([&] { r.group().send(t, 0).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost);
      EXPECT_THAT(e.what(), HasSubstr("rank 0 left the group without it"));
      EXPECT_LT(Clock::now() - began, 2s);
    }
    r.meet("end");
  });
}

// Unexpected envelopes of a rank that stays do not hide that another rank has left.
TEST_P(Messages, WhoLeavesIsNamedBesideUnexpectedMessages) {
  run(3, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 1) r.group().send(filled(r, 100, 1), 0, {.tag = 9}).wait();
    r.meet("sent");
    if (r.rank == 2) r.group() = ProcessGroup();
    r.meet("left");
    if (r.rank == 0) {
      const Tensor t = empty(r, 100);
      const auto began = Clock::now();
      const Error e = error_of([&] { r.group().recv(t, 2, {.tag = 5}).wait(); });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost);
      EXPECT_THAT(e.what(), HasSubstr("rank 2 left the group without it"));
      EXPECT_LT(Clock::now() - began, 2s);
    }
    r.meet("end");
  });
}

// Messages sent before leaving arrive.
TEST_P(Messages, WhoLeavesAfterSendingIsNotMissed) {
  run(2, [](Rank& r) {
    r.group().barrier().wait();
    if (r.rank == 0) {
      const Tensor t = filled(r, 100, 1);
      for (int k = 0; k < 10; ++k) r.group().send(t, 1, {.tag = k}).wait();
      r.group() = ProcessGroup();
      r.meet("left");
    } else {
      r.meet("left");
      for (int k = 9; k >= 0; --k) {
        const Tensor t = empty(r, 100);
        r.group().recv(t, 0, {.tag = k}).wait();
        expect_filled(t, 1);
      }
    }
  });
}

// Unexpected messages are found at once. Sixteen times as many of them cost their receiver about sixteen
// times as much, not the square of it.
TEST_P(Messages, ManyUnexpectedOnesAreFoundAtOnce) {
  run(2, [](Rank& r) {
    const Tensor t = empty(r, 4);
    const auto seconds_of = [&](int count) {
      timespec began{}, now{};
      for (int k = 0; k < count && r.rank == 0; ++k) r.group().send(t, 1, {.tag = k}).wait();
      r.group().barrier().wait();
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &began);
      for (int k = count; k-- > 0 && r.rank == 1;) r.group().recv(t, 0, {.tag = k}).wait();
      ::clock_gettime(CLOCK_THREAD_CPUTIME_ID, &now);
      return static_cast<double>(now.tv_sec - began.tv_sec) +
             static_cast<double>(now.tv_nsec - began.tv_nsec) * 1e-9;
    };
    seconds_of(100);
    double few = 1;
    for (int round = 0; round < 3; ++round) few = std::min(few, seconds_of(1250));
    const double many = seconds_of(20000);
    if (r.rank == 1) {
      EXPECT_LT(many, 80 * few) << few;
    }
  });
}

class Limit {
 public:
  Limit(const char* name, const char* value) : name_(name) { ::setenv(name, value, 1); }
  ~Limit() { ::unsetenv(name_); }
  Limit(const Limit&) = delete;
  Limit& operator=(const Limit&) = delete;

 private:
  const char* const name_;
};

// Beyond the limit messages stay in the ring. Their sender waits, but its later calls can proceed, and the
// receiver gets all messages.
TEST_P(Messages, UnexpectedOnesBeyondTheLimitMakeTheirSenderWait) {
  const Limit limit("WEFT_UNEXPECTED_MESSAGES", "10");
  run(3, [](Rank& r) {
    r.group().barrier().wait();
    for (int round = 0; round < 3; ++round) {
      std::vector<Tensor> sent;
      std::vector<Work> works;
      for (int k = 0; k < 50 && r.rank == 0; ++k) {
        sent.push_back(filled(r, k % 3 ? 40 : 20000, k));
        works.push_back(r.group().send(sent.back(), 1, {.tag = k % 2}));
      }
      r.group().barrier().wait();
      if (r.rank == 0) {
        EXPECT_FALSE(works.back().done());
        r.store->set("late " + std::to_string(round), "1");
      }
      if (r.rank == 2) r.group().send(filled(r, 5, 7), 1).wait();  // another one's are not in their way
      if (r.rank == 1) {
        r.store->get("late " + std::to_string(round), Deadline::after(20s));
        for (int k = 0; k < 50; ++k) {
          const Tensor t = empty(r, k % 3 ? 40 : 20000);
          r.group().recv(t, 0, {.tag = k % 2}).wait();
          expect_filled(t, k);
        }
        const Tensor t = empty(r, 5);
        r.group().recv(t, 2).wait();
        expect_filled(t, 7);
      }
      for (Work& w : works) w.wait();
      r.group().barrier().wait();
    }
  });
}

TEST_P(Messages, AReceiveOfWhatIsBehindTooManyFailsAndSaysSo) {
  for (const bool number : {true, false}) {
    const Limit limit(number ? "WEFT_UNEXPECTED_MESSAGES" : "WEFT_UNEXPECTED_BYTES", number ? "10" : "1000");
    run(2, [&](Rank& r) {
      r.group().barrier().wait();
      const Tensor t = empty(r, 100);
      const Error e = error_of([&] {
        for (int k = 0; k < 30 && r.rank == 0; ++k) r.group().send(t, 1, {.tag = 3}).wait();
        if (r.rank == 1) r.group().recv(t, 0, {.tag = 4}).wait();
        r.group().barrier().wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::system);
      EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0, 1));
      EXPECT_THAT(e.what(),
                  HasSubstr("rank 1 has no room for a message of 100 bytes with tag 3 from rank 0: it "
                            "holds 10 messages of 1000 bytes that it has not received yet, and " +
                            std::string(number ? "WEFT_UNEXPECTED_MESSAGES is 10 ["
                                               : "WEFT_UNEXPECTED_BYTES is 1000 [")));
    });
  }
}

TEST_P(Messages, ADeadlineSaysThatTheReceiverHoldsTooMany) {
  const Limit limit("WEFT_UNEXPECTED_MESSAGES", "10");
  const char* const allow =
      " holds as many messages that it has not received as WEFT_UNEXPECTED_MESSAGES and "
      "WEFT_UNEXPECTED_BYTES allow";
  for (const int impatient : {0, 1}) {
    run(2, [&](Rank& r) {
      r.group().barrier().wait();
      const Tensor t = empty(r, 8);
      const Duration deadline = r.rank == impatient ? 500ms : 20s;
      const Error e = error_of([&] {
        for (int k = 0; k < 30 && r.rank == 0; ++k)
          r.group().send(t, 1, {.deadline = deadline, .tag = k}).wait();
        r.group().barrier({.deadline = deadline}).wait();
      });
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_THAT(e.what(), HasSubstr(impatient == 0
                                          ? "rank 1 has not received it (tag 26); rank 1" + std::string(allow)
                                          : "rank 0 had not arrived; rank 1" + std::string(allow) +
                                                ", so rank 0 may wait to send more"));
    });
  }
}

TEST(Processes, AKilledSenderIsNamed) {
  for (const Memory memory : {Memory::shared, Memory::local}) {
    for (const std::int64_t bytes : {std::int64_t{10}, std::int64_t{50} << 20}) {
      RankProcesses ranks(3, [&](Rank& r) {
        r.group().barrier().wait();
        const Tensor t(r.context, Shape{bytes}, DType::u8, memory);
        r.meet("ready");
        if (r.rank == 2) {
          if (bytes == 10) raise(SIGKILL);
          Work w = r.group().send(t, 0);
          // with a part of it on its way
          for (int k = 0; k < 3; ++k) static_cast<void>(w.done());
          raise(SIGKILL);
        }
        if (r.rank == 0) {
          const Error e = error_of([&] {
            // Shared memory that is published outlives its owner, so the first may still arrive.
            for (int k = 0; k < 2; ++k) r.group().recv(t, 2).wait();
          });
          r.store->set("told", "1");
          EXPECT_EQ(e.code(), ErrorCode::peer_lost);
          EXPECT_THAT(e.what(), HasSubstr("rank 2 (process "));
          EXPECT_THAT(e.what(), HasSubstr(") died"));
          EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(2));
        } else {
          r.store->get("told", Deadline::after(20s));
        }
      });
      EXPECT_EQ(ranks[2].wait(20s), (ExitStatus{-1, SIGKILL}));
      EXPECT_NO_THROW(ranks.store().get("told", Deadline::after(2s)));
      ranks.finish({2});
    }
  }
}

}  // namespace
}  // namespace weft::test::messages_test
