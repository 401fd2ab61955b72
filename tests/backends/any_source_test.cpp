// Receives from any source, probe() and wait_message(), over every backend: the reported source, the order,
// receives with and without a source together, messages of unknown size, and the errors of a time-out, a
// mismatch and a leaving rank. Under mpirun the tests run over the MPI that WEFT_TEST_BACKEND names.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <csignal>
#include <cstdlib>
#include <functional>
#include <future>
#include <mutex>
#include <numeric>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/transport_setting.hpp"

namespace weft::test::any_source_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

using Setting = TransportSetting;

class AnySource : public testing::TestWithParam<Setting> {
 protected:
  // Rank 0 and n - 1 others.
  void run(int n, const std::function<void(Rank&)>& body) {
    RankOptions options;
    options.backend = GetParam().backend;
    run_ranks(GetParam().kind, GetParam().kind == Ranks::job ? job_size() : n, body, options);
  }
  // The group fails. In a job with one group for all tests, another test program must test this.
  bool in_job() const { return GetParam().kind == Ranks::job; }
};
INSTANTIATE_TEST_SUITE_P(Each, AnySource, testing::ValuesIn(transport_settings()), [](const auto& p) {
  return p.param.kind == Ranks::job ? "job" : p.param.backend + "_" + to_string(p.param.kind);
});

using Values = std::vector<std::int64_t>;

// The k-th message of rank `source`.
Values values(int source, int k, std::int64_t count) {
  Values all(static_cast<std::size_t>(count));
  std::iota(all.begin(), all.end(), 1000003 * source + 1009 * k);
  return all;
}

void send(ProcessGroup& g, const Values& what, int to, int tag) { g.send(what, to, {.tag = tag}).wait(); }

constexpr std::int64_t kCounts[] = {0, 1, 100, 5000, 200000};  // eager and large on every transport

TEST_P(AnySource, TheWorkNamesTheSender) {
  run(4, [](Rank& r) {
    ProcessGroup& g = r.group();
    for (const std::int64_t count : kCounts) {
      if (r.rank != 0) {
        send(g, values(r.rank, 0, count), 0, 7);
      } else {
        std::vector<int> sources;
        for (int k = 1; k < r.size; ++k) {
          Values got(static_cast<std::size_t>(count), -1);
          Work w = g.recv(got, any_source, {.tag = 7});
          w.wait();
          EXPECT_FALSE(w.valid());
          EXPECT_EQ(got, values(w.source(), 0, count));
          const Work moved = std::move(w);
          sources.push_back(moved.source());
        }
        std::sort(sources.begin(), sources.end());
        for (int k = 1; k < r.size; ++k) EXPECT_EQ(sources[static_cast<std::size_t>(k - 1)], k);
      }
      g.barrier().wait();
    }
  });
}

TEST_P(AnySource, MessagesOfOneSourceAndTagKeepTheirOrder) {
  run(4, [](Rank& r) {
    constexpr int kEach = 40;
    ProcessGroup& g = r.group();
    const auto count = [](int k) { return std::int64_t{k % 3 == 2 ? 3000 : 3}; };
    if (r.rank != 0) {
      for (int k = 0; k < kEach; ++k) send(g, values(r.rank, k, count(k)), 0, k % 2);
    } else {
      const auto n = static_cast<std::size_t>(r.size);
      std::vector<std::vector<int>> next{std::vector<int>(n, 0),
                                         std::vector<int>(n, 1)};  // by tag and source
      for (int i = 0; i < kEach / 2 * (r.size - 1); ++i) {
        for (int tag = 0; tag < 2; ++tag) {
          const MessageInfo m = g.wait_message(any_source, {.tag = tag});
          int& k = next[static_cast<std::size_t>(tag)][static_cast<std::size_t>(m.source)];
          ASSERT_EQ(m.count, count(k)) << "message " << k << " of rank " << m.source;
          Values got(static_cast<std::size_t>(m.count));
          g.recv(got, m.source, {.tag = tag}).wait();
          ASSERT_EQ(got, values(m.source, k, count(k)));
          k += 2;
        }
      }
    }
    g.barrier().wait();
  });
}

// If a message fits several receives, the one that was posted first takes it.
TEST_P(AnySource, MixedWithNamedSourcesTheFirstPostedTakesIt) {
  run(3, [](Rank& r) {
    ProcessGroup& g = r.group();
    for (const std::int64_t count : {std::int64_t{3}, std::int64_t{5000}}) {
      for (const bool first : {false, true}) {  // whether the messages come before the receives
        if (r.rank == 0) {
          Values a(static_cast<std::size_t>(count)), b = a, c = a, other = a;
          if (first) g.wait_message(1, {.tag = 9});
          Work wa = g.recv(a, 1, {.tag = 5}), wb = g.recv(b, any_source, {.tag = 5}),
               wc = g.recv(c, 1, {.tag = 5}), wother = g.recv(other, any_source, {.tag = 6});
          char go = 1, end = 0;
          if (!first) g.send(go, 1, {.tag = 8}).wait();
          wait_all(wa, wb, wc, wother);
          g.recv(end, 1, {.tag = 9}).wait();
          EXPECT_EQ(a, values(1, 0, count));
          EXPECT_EQ(b, values(1, 1, count));
          EXPECT_EQ(c, values(1, 2, count));
          EXPECT_EQ(other, values(1, 3, count));
          EXPECT_EQ(wb.source(), 1);
          EXPECT_EQ(wa.source(), 1);
          EXPECT_EQ(wother.source(), 1);
        } else if (r.rank == 1) {
          char go = 0;
          if (!first) g.recv(go, 0, {.tag = 8}).wait();
          const std::vector<Values> all{values(1, 0, count), values(1, 1, count), values(1, 2, count),
                                        values(1, 3, count)};
          Work other = g.send(all[3], 0, {.tag = 6});
          Work w0 = g.send(all[0], 0, {.tag = 5}), w1 = g.send(all[1], 0, {.tag = 5}),
               w2 = g.send(all[2], 0, {.tag = 5});
          g.send(go, 0, {.tag = 9}).wait();
          wait_all(other, w0, w1, w2);
        }
        g.barrier().wait();
      }
    }
  });
}

TEST_P(AnySource, AProbeShowsWhatARecvTakes) {
  run(3, [](Rank& r) {
    ProcessGroup& g = r.group();
    g.barrier().wait();
    if (r.rank == 0) {
      EXPECT_EQ(g.probe(any_source, {.tag = 100}), std::nullopt);
      EXPECT_EQ(g.probe(1, {.tag = 100}), std::nullopt);
    }
    g.barrier().wait();
    for (const std::int64_t count : kCounts) {
      if (r.rank == 1) send(g, values(1, 0, count), 0, 3);
      if (r.rank == 0) {
        std::optional<MessageInfo> m;
        while (!(m = g.probe(any_source, {.tag = 3}))) std::this_thread::yield();
        EXPECT_EQ(*m, (MessageInfo{1, 3, DType::i64, count}));
        EXPECT_EQ(g.probe(1, {.tag = 3}), m);  // it stays
        EXPECT_EQ(g.probe(1, {.tag = 4}), std::nullopt);
        EXPECT_EQ(g.probe(0, {.tag = 3}), std::nullopt);
        EXPECT_EQ(g.wait_message(1, {.tag = 3}), *m);
        Values got(static_cast<std::size_t>(m->count));
        g.recv(got, m->source, {.tag = m->tag}).wait();
        EXPECT_EQ(got, values(1, 0, count));
        EXPECT_EQ(g.probe(any_source, {.tag = 3}), std::nullopt);
      }
      g.barrier().wait();
    }
  });
}

// While a rank waits for a message, its own sends proceed: two ranks wait for each other's message, and then
// receive.
TEST_P(AnySource, WaitingForAMessageGetsOtherCallsOn) {
  run(4, [](Rank& r) {
    ProcessGroup& g = r.group();
    const Values mine = values(r.rank, 0, 5000);
    Work send = g.send(mine, (r.rank + 1) % r.size, {.tag = 2});
    std::int64_t sum = r.rank;
    Work reduce = g.all_reduce(sum);
    const MessageInfo m = g.wait_message(any_source, {.tag = 2});
    EXPECT_EQ(m.source, (r.rank + r.size - 1) % r.size);
    Values got(static_cast<std::size_t>(m.count));
    g.recv(got, any_source, {.tag = 2}).wait();
    EXPECT_EQ(got, values(m.source, 0, 5000));
    wait_all(send, reduce);
    EXPECT_EQ(sum, r.size * (r.size - 1) / 2);
  });
}

TEST_P(AnySource, CoalescedCallsNameTheirSources) {
  run(3, [](Rank& r) {
    ProcessGroup& g = r.group();
    const int n = r.size, next = (r.rank + 1) % n, before = (r.rank + n - 1) % n;
    const Values mine = values(r.rank, 0, 2000);
    Values a(2000), b(2000);
    Work w = g.coalesced({call::recv(a, any_source, {.tag = 1}), call::recv(b, before, {.tag = 2}),
                          call::send(mine, next, {.tag = 1}), call::send(mine, next, {.tag = 2})});
    w.wait();
    EXPECT_FALSE(w.valid());
    EXPECT_THAT(w.sources(), ElementsAre(before));
    EXPECT_EQ(a, values(before, 0, 2000));
    EXPECT_EQ(b, a);
    w.wait();  // tells nothing
    EXPECT_TRUE(w.done());
    Work both = g.send_recv(mine, next, a, any_source, {.tag = 4});
    both.wait();
    const Work kept = std::move(both);
    EXPECT_THAT(kept.sources(), ElementsAre(before));
    g.barrier().wait();
  });
}

TEST_P(AnySource, ARankMaySendToItself) {
  run(2, [](Rank& r) {
    ProcessGroup& g = r.group();
    for (const std::int64_t count : {std::int64_t{2}, std::int64_t{5000}}) {
      Values got(static_cast<std::size_t>(count));
      Work w = g.recv(got, any_source);
      const Values mine = values(r.rank, 0, count);
      Work send = g.send(mine, r.rank);
      w.wait();
      send.wait();
      EXPECT_EQ(w.source(), r.rank);
      EXPECT_EQ(got, mine);
    }
    g.barrier().wait();
  });
}

// Each of many small messages reaches exactly one of the receives, and no source is starved by another's
// flood.
TEST_P(AnySource, NoSourceWaitsForEver) {
  run(4, [](Rank& r) {
    constexpr int kFlood = 600;
    ProcessGroup& g = r.group();
    std::int64_t x = r.rank;
    if (r.rank == 1) {  // sends on until the last rank's message has been received
      std::int64_t stop = 0;
      Work stopped = g.recv(stop, 0, {.tag = 2});
      int sent = 0;
      for (; sent < 1000 * kFlood && !stopped.done(); ++sent) g.send(x, 0, {.tag = 1}).wait();
      if (stopped.valid()) stopped.wait();
      const std::int64_t end = -sent;
      g.send(end, 0, {.tag = 1}).wait();
    } else if (r.rank == 0) {
      std::int64_t got = 0, received = 0, others = 0;
      while (others < r.size - 2 || (r.size == 2 && received < kFlood)) {
        Work w = g.recv(got, any_source, {.tag = 1});
        w.wait();
        ASSERT_EQ(got, w.source());
        ++(w.source() == 1 ? received : others);
        ASSERT_LT(received, 1000 * kFlood);
      }
      g.send(x, 1, {.tag = 2}).wait();
      for (;;) {
        g.recv(got, any_source, {.tag = 1}).wait();
        if (got <= 0) break;
        ++received;
      }
      EXPECT_EQ(-got, received);
    } else {
      g.send(x, 0, {.tag = 1}).wait();
    }
    g.barrier().wait();
  });
}

TEST_P(AnySource, AMismatchNamesTheSender) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  for (const bool first : {false, true}) {
    for (const std::int64_t count : {std::int64_t{4}, std::int64_t{5000}}) {
      run(3, [&](Rank& r) {
        ProcessGroup& g = r.group();
        g.barrier().wait();
        const Error e = error_of([&] {
          if (r.rank == 1) {
            send(g, values(1, 0, count), 0, 6);
          } else if (r.rank == 0) {
            if (first) g.wait_message(1, {.tag = 6});
            Values got(3);
            g.recv(got, any_source, {.tag = 6}).wait();
          }
          g.barrier().wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch);
        EXPECT_EQ(e.op(), Op::recv);
        EXPECT_THAT(ranks_of(e), ElementsAre(0, 1));
        EXPECT_THAT(e.what(),
                    HasSubstr(fmt::format("rank 1 sent i64 x{} with tag 6, rank 0 receives i64 x3", count)));
      });
    }
  }
}

TEST_P(AnySource, ATimeOutSaysThatNobodyHasSent) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  for (const bool waits : {false, true}) {
    run(3, [&](Rank& r) {
      ProcessGroup& g = r.group();
      g.barrier().wait();
      if (r.rank == 0) {
        const Error e = error_of([&] {
          if (waits) {
            g.wait_message(any_source, {.deadline = 200ms, .tag = 5});
          } else {
            std::int64_t x = 0;
            g.recv(x, any_source, {.deadline = 200ms, .tag = 5}).wait();
          }
        });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_EQ(e.op(), waits ? Op::wait_message : Op::recv);
        EXPECT_THAT(ranks_of(e), ElementsAre(1, 2));
        EXPECT_THAT(e.what(), HasSubstr(fmt::format(
                                  "{}: not finished within 0.2 s: no rank has sent a message with tag 5",
                                  waits ? "wait_message" : "recv")));
      }
      r.meet("end");
    });
  }
}

TEST_P(AnySource, AWaitForANamedSourceNamesIt) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  run(3, [&](Rank& r) {
    ProcessGroup& g = r.group();
    g.barrier().wait();
    if (r.rank == 0) {
      const Error e = error_of([&] { return g.wait_message(2, {.deadline = 200ms, .tag = 5}); });
      EXPECT_EQ(e.code(), ErrorCode::timeout);
      EXPECT_THAT(ranks_of(e), ElementsAre(2));
      EXPECT_THAT(
          e.what(),
          HasSubstr("wait_message: not finished within 0.2 s: rank 2 has sent no message with tag 5"));
    }
    r.meet("end");
  });
}

// A leaving rank causes no error while another rank may still send; when all others have left, it does.
TEST_P(AnySource, WhenAllOthersHaveLeftItFails) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  for (const bool waits : {false, true}) {
    run(3, [&](Rank& r) {
      ProcessGroup g = ProcessGroup::create(r.context, r.options.backend, r.membership());
      g.barrier().wait();
      std::int64_t x = r.rank;
      if (r.rank == 2) {
        g = ProcessGroup();
        r.meet("two has left");
      } else if (r.rank == 1) {
        r.meet("two has left");
        std::this_thread::sleep_for(50ms);  // longer than rank 0 needs to see that rank 2 has left
        g.send(x, 0, {.tag = 1}).wait();
        g = ProcessGroup();
      } else {
        Work first = g.recv(x, any_source, {.tag = 1});
        r.meet("two has left");
        first.wait();
        EXPECT_EQ(first.source(), 1);
        // a rank that has left sends nothing more, which is no failure
        EXPECT_EQ(g.probe(2, {.tag = 1}), std::nullopt);
        const Error e = error_of([&] {
          if (waits) return static_cast<void>(g.wait_message(any_source, {.tag = 1}));
          g.recv(x, any_source, {.tag = 1}).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(1, 2));
        EXPECT_THAT(e.what(), HasSubstr("ranks 1, 2 left the group without it"));
      }
    });
  }
}

TEST_P(AnySource, AnAbortEndsIt) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  for (const int what : {0, 1, 2}) {
    run(3, [&](Rank& r) {
      ProcessGroup& g = r.group();
      g.barrier().wait();
      if (r.rank == 1) g.abort("enough");
      const Error e = error_of([&] {
        std::int64_t x = 0;
        if (what == 0) g.recv(x, any_source).wait();
        if (what == 1) g.wait_message(any_source);
        while (what == 2) g.probe(any_source);
      });
      EXPECT_EQ(e.code(), ErrorCode::aborted);
      EXPECT_THAT(e.what(), HasSubstr("aborted by rank 1: enough"));
    });
  }
}

// A probe does not fail because ranks have left, even if all have; wait_message then fails.
TEST_P(AnySource, AProbeFindsNothingOfARankThatHasLeft) {
  if (in_job()) GTEST_SKIP() << "of groups that fail: mpi_job_test";
  run(2, [&](Rank& r) {
    ProcessGroup g = ProcessGroup::create(r.context, r.options.backend, r.membership());
    g.barrier().wait();
    std::int64_t x = 5;
    if (r.rank == 1) {
      g.send(x, 0, {.tag = 1}).wait();
      g = ProcessGroup();
      r.meet("one has left");
      return;
    }
    r.meet("one has left");
    while (!g.probe(1, {.tag = 1})) std::this_thread::yield();  // what it sent before still comes
    g.recv(x, any_source, {.tag = 1}).wait();
    for (int i = 0; i < 1000; ++i) {
      EXPECT_EQ(g.probe(1, {.tag = 1}), std::nullopt);
      EXPECT_EQ(g.probe(any_source, {.tag = 1}), std::nullopt);
    }
    const Error e = error_of([&] { return g.wait_message(1, {.tag = 1}); });
    EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
    EXPECT_THAT(ranks_of(e), ElementsAre(1));
    EXPECT_EQ(error_of([&] { return g.probe(1, {.tag = 1}); }).code(), ErrorCode::peer_lost);
  });
}

// A helper thread ends receives while the program computes.
TEST_P(AnySource, AHelperThreadTakesTheMessages) {
  if (in_job()) GTEST_SKIP() << "of processes and threads of this host";
  run(3, [](Rank& r) {
    Membership m = r.membership("helped");
    m.progress = Progress::thread;
    ProcessGroup g = ProcessGroup::create(r.context, r.options.backend, m);
    for (const std::int64_t count : {std::int64_t{3}, std::int64_t{5000}}) {
      if (r.rank != 0) {
        send(g, values(r.rank, 0, count), 0, 7);
      } else {
        std::vector<int> sources;
        for (int k = 1; k < r.size; ++k) {
          Values got(static_cast<std::size_t>(count), -1);
          std::promise<bool> ended;
          Work w = g.recv(got, any_source, {.tag = 7}).then([&](const Error* e) {
            ended.set_value(e == nullptr);
          });
          EXPECT_TRUE(ended.get_future().get());
          sources.push_back(w.source());  // known before anybody has waited
          w.wait();
          EXPECT_EQ(w.source(), sources.back());
          EXPECT_EQ(got, values(w.source(), 0, count));
        }
        std::sort(sources.begin(), sources.end());
        EXPECT_THAT(sources, ElementsAre(1, 2));
      }
      g.barrier().wait();
    }
  });
}

// If a rank dies, a receive from any source, a wait and a loop of probes end. Others might have sent, but the
// group has failed.
TEST(AnySourceDeath, EverybodyLearnsWhoDied) {
  if (!kProcesses) GTEST_SKIP() << "of processes";
  for (const int what : {0, 1, 2}) {
    RankProcesses ranks(3, [what](Rank& r) {
      ProcessGroup& g = r.group();
      std::int64_t x = 0;
      g.barrier().wait();
      r.store->set(fmt::format("ready/{}", r.rank), "");
      if (r.rank == 1) {
        std::this_thread::sleep_for(60s);
        return;
      }
      const Error e = error_of([&] {
        if (what == 0) g.recv(x, any_source).wait();
        if (what == 1) g.wait_message(any_source);
        while (what == 2) g.probe(any_source);
      });
      EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
      EXPECT_THAT(ranks_of(e), ElementsAre(1)) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("rank 1 (process "));
      EXPECT_THAT(e.what(), HasSubstr(") died"));
    });
    for (int r = 0; r < 3; ++r) ranks.store().get(fmt::format("ready/{}", r), Deadline::after(20s));
    ranks[1].kill(SIGKILL);
    ranks.finish({1});
  }
}

// Threads of one rank receive from any source.
TEST_P(AnySource, SeveralThreadsReceive) {
  run(3, [](Rank& r) {
    constexpr int kEach = 60;
    ProcessGroup& g = r.group();
    if (r.rank != 0) {
      for (int k = 0; k < kEach; ++k) {
        const Values v = values(r.rank, k, k % 4 == 3 ? 1500 : 8);
        g.send(v, 0, {.tag = k % 4 == 3 ? 2 : 1}).wait();
      }
    } else {
      std::vector<std::int64_t> got;
      std::mutex mutex;
      const auto receive = [&](int tag, std::int64_t count, int messages) {
        for (int i = 0; i < messages; ++i) {
          Values v(static_cast<std::size_t>(count));
          Work w = g.recv(v, any_source, {.tag = tag});
          w.wait();
          EXPECT_EQ(v.back() - v.front(), count - 1);
          EXPECT_EQ(v.front() / 1000003, w.source());
          const std::lock_guard lock(mutex);
          got.push_back(v.front());
        }
      };
      const int others = r.size - 1, small = kEach / 4 * 3 * others, large = kEach / 4 * others;
      std::thread a([&] { receive(1, 8, small / 3); }), b([&] { receive(2, 1500, large); });
      receive(1, 8, small - small / 3);
      a.join();
      b.join();
      std::sort(got.begin(), got.end());
      std::vector<std::int64_t> sent;
      for (int s = 1; s < r.size; ++s)
        for (int k = 0; k < kEach; ++k) sent.push_back(values(s, k, 1).front());
      std::sort(sent.begin(), sent.end());
      EXPECT_EQ(got, sent);
    }
    g.barrier().wait();
  });
}

// All ranks send messages of every size to all ranks, and receive from any source. Some receives are posted
// before the sends, some after.
TEST_P(AnySource, EverybodyReceivesFromAnybody) {
  run(4, [](Rank& r) {
    constexpr int kRounds = 12;
    ProcessGroup& g = r.group();
    for (int round = 0; round < kRounds; ++round) {
      const std::int64_t count = kCounts[1 + round % 4] / (round % 4 == 3 ? 4 : 1);
      const Values mine = values(r.rank, round, count);
      std::vector<Values> got(static_cast<std::size_t>(r.size), Values(static_cast<std::size_t>(count)));
      std::vector<Work> receives, sends;
      const auto receive = [&](int from, int to) {
        for (int k = from; k < to; ++k)
          receives.push_back(g.recv(got[static_cast<std::size_t>(k)], any_source, {.tag = round}));
      };
      receive(0, (round + r.rank) % (r.size + 1));
      for (int k = 0; k < r.size; ++k) sends.push_back(g.send(mine, (r.rank + k) % r.size, {.tag = round}));
      receive(static_cast<int>(receives.size()), r.size);
      wait_all(std::span(receives));
      wait_all(std::span(sends));
      std::vector<int> sources;
      for (std::size_t k = 0; k < receives.size(); ++k) {
        sources.push_back(receives[k].source());
        ASSERT_EQ(got[k], values(sources.back(), round, count));
      }
      std::sort(sources.begin(), sources.end());
      for (int k = 0; k < r.size; ++k) EXPECT_EQ(sources[static_cast<std::size_t>(k)], k);
    }
  });
}

}  // namespace
}  // namespace weft::test::any_source_test
