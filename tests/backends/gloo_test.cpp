// Tests of the Gloo transport: random calls, and each way in which it fails.
#include <arpa/inet.h>
#include <dirent.h>
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <signal.h>
#include <sys/socket.h>
#include <unistd.h>

#include <filesystem>
#include <fstream>
#include <mutex>
#include <set>
#include <sstream>
#include <thread>

#include "base/text/plain_streams.hpp"
#include "store/forwarding_store.hpp"
#include "support/random_calls.hpp"
#include "support/run_ranks.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/tensor.hpp"

namespace weft::test::gloo_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;
using testing::HasSubstr;

#define SKIP_WITHOUT_GLOO() \
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed"

RankOptions gloo() {
  RankOptions options;
  options.backend = "gloo";
  return options;
}

struct Gloo : testing::TestWithParam<Ranks> {
  void SetUp() override { SKIP_WITHOUT_GLOO(); }
};
INSTANTIATE_TEST_SUITE_P(Ranks, Gloo, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

TEST_P(Gloo, RandomCallsGiveWhatTheyShould) {
  for (const int n : {1, 2, 3, 5}) {
    run_ranks(
        GetParam(), n,
        [](Rank& r) {
          Variety v;
          v.many = {4099, 70001};
          calls_at_random(r, r.group(), 120, std::mt19937(7), std::mt19937(100 + r.rank), v, std::nullopt);
        },
        gloo());
  }
}

// Each socket and each epoll of this process is closed where it executes a program.
// A group whose Membership has the canonical order adds as shm does, in each form of a call and in subgroups.
TEST_P(Gloo, AGroupInCanonicalOrder) {
  constexpr std::size_t kCount = 3000;
  const auto body = [](Rank& r) {
    std::mt19937 random(static_cast<unsigned>(1 + r.rank));
    std::vector<float> x(kCount), native(kCount), expected(kCount);
    for (float& v : x) v = std::normal_distribution<float>()(random);
    Membership member = r.membership("native");
    ProcessGroup plain = ProcessGroup::create(r.context, "gloo", member);
    EXPECT_EQ(plain.order(), Order::native);
    plain.all_reduce(x, native).wait();
    plain.all_reduce(x, expected, {.order = Order::canonical}).wait();
    EXPECT_NE(native, expected);  // otherwise this test says nothing
    member.name = "canonical";
    member.order = Order::canonical;
    ProcessGroup group = ProcessGroup::create(r.context, "gloo", member);
    EXPECT_EQ(group.order(), Order::canonical);
    const auto expect = [&](const char* how, const std::vector<float>& y) { EXPECT_EQ(y, expected) << how; };
    std::vector<float> y(kCount);
    group.all_reduce(x, y).wait();
    expect("all_reduce", y);
    std::ranges::fill(y, 0.0f);
    group.reduce(x, y, 0).wait();
    if (r.rank == 0) expect("reduce", y);
    std::ranges::fill(y, 0.0f);
    group.coalesced({call::all_reduce(x, y)}).wait();
    expect("coalesced", y);
    std::ranges::fill(y, 0.0f);
    PersistentCall bound = group.make(call::all_reduce(x, y));
    bound.start().wait();
    expect("a persistent call", y);
    std::ranges::fill(y, 0.0f);
    ProcessGroup again = group.duplicate();
    EXPECT_EQ(again.order(), Order::canonical);
    again.all_reduce(x, y).wait();
    expect("a duplicate", y);
    group.barrier().wait();
  };
  run_ranks(GetParam(), 5, body, gloo());
}

TEST_P(Gloo, ProgramsThatAreExecutedInheritNoConnection) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        const ProcessGroup again = r.group().duplicate();
        r.group().barrier().wait();
        std::vector<std::string> inherited;
        int sockets = 0, epolls = 0;
        for (const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) {
          std::error_code gone;  // that of the iterator, and those of other ranks that are threads
          const std::string to = std::filesystem::read_symlink(entry.path(), gone).string();
          if (gone) continue;
          const bool socket = to.starts_with("socket:"), epoll = to == "anon_inode:[eventpoll]";
          sockets += socket ? 1 : 0;
          epolls += epoll ? 1 : 0;
          const int flags = ::fcntl(std::stoi(entry.path().filename()), F_GETFD);
          if ((socket || epoll) && flags >= 0 && (flags & FD_CLOEXEC) == 0)
            inherited.push_back(entry.path().filename().string() + " is " + to);
        }
        EXPECT_THAT(inherited, testing::IsEmpty());
        EXPECT_GE(sockets, 2 * 2);
        EXPECT_GE(epolls, 2);
        r.group().barrier().wait();
      },
      gloo());
}

TEST_P(Gloo, BothPostALargeSendThenAReceiveThenWait) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<double> in(2 << 20, r.rank + 1.0), out(in.size());
        Work send = r.group().send(view(in), 1 - r.rank, {.tag = 3});
        Work recv = r.group().recv(view(out), 1 - r.rank, {.tag = 3});
        send.wait();
        recv.wait();
        EXPECT_EQ(out.front(), 2.0 - r.rank);
        EXPECT_EQ(out.back(), 2.0 - r.rank);
      },
      gloo());
}

TEST_P(Gloo, TagsMayComeInAnyOrder) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        constexpr std::size_t kSizes[] = {1, 5000, 0, 300, 20000, 1024};
        std::vector<std::vector<std::int32_t>> data;
        std::vector<Work> works;
        for (std::size_t i = 0; i < std::size(kSizes); ++i)
          data.emplace_back(kSizes[i], r.rank == 0 ? static_cast<std::int32_t>(i + 1) : 0);
        for (std::size_t i = 0; i < std::size(kSizes); ++i) {
          const std::size_t k = r.rank == 0 ? i : std::size(kSizes) - 1 - i;
          const CallOptions options{.tag = static_cast<int>(k)};
          works.push_back(r.rank == 0 ? r.group().send(view(data[k]), 1, options)
                                      : r.group().recv(view(data[k]), 0, options));
        }
        for (Work& w : works) w.wait();
        for (std::size_t i = 0; i < std::size(kSizes); ++i)
          for (const std::int32_t x : data[i]) ASSERT_EQ(x, static_cast<std::int32_t>(i + 1));
      },
      gloo());
}

// A message never waits behind a collective that is not complete.
TEST_P(Gloo, MessagesPassCollectives) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group();
        Work barrier;
        if (r.rank != 2) barrier = r.group().barrier();
        std::vector<float> x(9000, static_cast<float>(r.rank));
        if (r.rank == 0) r.group().send(view(x), 1).wait();
        if (r.rank == 1) {
          r.group().recv(view(x), 0).wait();
          EXPECT_EQ(x.back(), 0.0f);
        }
        r.meet("the message has passed");
        if (r.rank == 2) barrier = r.group().barrier();
        barrier.wait();
      },
      gloo());
}

TEST_P(Gloo, AMessageOfAnotherSizeIsAMismatch) {
  for (const std::int64_t sent : {10, 30, 5000})
    run_ranks(
        GetParam(), 2,
        [&](Rank& r) {
          std::vector<float> x(5000);
          const Error e = error_of([&] {
            if (r.rank == 0) r.group().send(view(x.data(), sent), 1, {.tag = 4}).wait();
            if (r.rank == 1) r.group().recv(view(x.data(), 20), 0, {.tag = 4}).wait();
            r.group().barrier().wait();
          });
          EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 0 sent f32 x" + std::to_string(sent) +
                                          " with tag 4, rank 1 receives f32 x20"));
          EXPECT_THAT(ranks_of(e), ElementsAre(0, 1));
        },
        gloo());
}

// The announcements of collectives are behind messages that nobody has asked for, so these cannot wait.
TEST_P(Gloo, TooManyUnexpectedMessagesFailTheGroup) {
  ::setenv("WEFT_UNEXPECTED_MESSAGES", "100", 1);
  run_ranks(
      GetParam(), 2,
      [&](Rank& r) {
        std::vector<float> x(5);
        for (int round = 0; round < 3; ++round) {  // as many as are allowed, in the opposite order
          for (int k = 0; k < 100 && r.rank == 0; ++k) r.group().send(view(x), 1, {.tag = k}).wait();
          r.group().barrier().wait();
          for (int k = 100; k-- > 0 && r.rank == 1;) r.group().recv(view(x), 0, {.tag = k}).wait();
          r.group().barrier().wait();
        }
        const Error e = error_of([&] {
          for (int k = 0; k < 101 && r.rank == 0; ++k) r.group().send(view(x), 1, {.tag = k}).wait();
          r.group().barrier().wait();
          r.group().barrier().wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(0, 1));
        EXPECT_THAT(e.what(),
                    HasSubstr("rank 1 has no room for a message of 20 bytes with tag 100 from rank 0: "
                              "it holds 100 messages of 2000 bytes that it has not received yet, and "
                              "WEFT_UNEXPECTED_MESSAGES is 100"));
      },
      gloo());
  ::unsetenv("WEFT_UNEXPECTED_MESSAGES");
}

TEST_P(Gloo, MismatchSaysWhatBothCalled) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<float> x(1024), y(2048);
        const Error e = error_of([&] {
          if (r.rank == 0) r.group().all_reduce(view(x), view(x)).wait();
          if (r.rank == 1) r.group().all_gather(view(x.data(), 1000), view(y.data(), 2000)).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("all_gather f32 x1000"));
        EXPECT_THAT(e.what(), HasSubstr("all_reduce f32 x1024 sum"));
        EXPECT_THAT(e.what(), HasSubstr("[call 0]"));
      },
      gloo());
}

TEST_P(Gloo, CountsBetweenTwoRanksAreCompared) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        std::vector<float> in(10), out(10);
        const std::int64_t give[2][2] = {{1, 2}, {3, 4}}, get[2][2] = {{1, 3}, {5, 4}};
        const Error e = error_of([&] {
          r.group()
              .all_to_all_v(view(in), view(out), {.counts = give[r.rank]}, {.counts = get[r.rank]})
              .wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("all_to_all_v: rank 0 sends 2 elements to rank 1, which expects 5"));
      },
      gloo());
}

TEST_P(Gloo, AnAbsentRankIsNamedAtTheDeadline) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank != 1) {
          std::vector<float> x(10);
          const auto began = Clock::now();
          const Error e =
              error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 300ms}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("all_reduce: not finished within 0.3 s: rank 1 had not arrived"));
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
          EXPECT_GE(Clock::now() - began, 290ms);
          EXPECT_TRUE(r.group().quiesce(5s));
        }
        r.meet("both have failed");
        const Error late = error_of([&] { r.group().barrier().wait(); });
        EXPECT_THAT(late.what(), HasSubstr("rank 1 had not arrived"));
      },
      gloo());
}

TEST_P(Gloo, AMessageThatDoesNotComeIsATimeout) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          std::vector<float> x(10);
          const Error e = error_of([&] { r.group().recv(view(x), 1, {.deadline = 200ms, .tag = 6}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout);
          EXPECT_THAT(e.what(), HasSubstr("rank 1 has not sent it (tag 6)"));
        }
        r.meet("end");
      },
      gloo());
}

TEST_P(Gloo, RanksThatDoNotJoinAreNamed) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        Membership m = r.membership("never whole");
        m.size = 4;
        m.deadline = 300ms;
        const Error e = error_of([&] { ProcessGroup::create(r.context, "gloo", m); });
        EXPECT_EQ(e.code(), ErrorCode::timeout);
        EXPECT_THAT(e.what(), HasSubstr("group \"never whole\": ranks 2, 3 did not join within "));
        EXPECT_THAT(ranks_of(e), ElementsAre(2, 3));
      },
      gloo());
}

TEST_P(Gloo, AbortIsHeardByAll) {
  run_ranks(
      GetParam(), 3,
      [](Rank& r) {
        r.group();
        r.meet("all have a group");
        if (r.rank == 2) r.group().abort("the loss is not a number");
        const Error e = error_of([&] { r.group().barrier().wait(); });
        EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("aborted by rank 2: the loss is not a number"));
        EXPECT_THAT(ranks_of(e), ElementsAre(2));
      },
      gloo());
}

TEST_P(Gloo, ARankThatLeavesIsNamed) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 0) {
          const Error e = error_of([&] { r.group().barrier().wait(); });
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 1 left the group without it"));
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
        } else {
          r.group() = ProcessGroup();
        }
        r.meet("end");
      },
      gloo());
}

// Its connections are closed by the time at which the others call. Each of them notices that before it could
// wait for any rank.
TEST_P(Gloo, ARankThatHasLeftIsNamedOverClosedConnections) {
  for (const bool check : {true, false})
    for (const Op op : {Op::gather, Op::broadcast, Op::all_reduce}) {
      if (!check) ::setenv("WEFT_GLOO_CHECK", "off", 1);
      run_ranks(
          GetParam(), 3,
          [&](Rank& r) {
            constexpr int kLeaver = 1;
            ProcessGroup g = r.group().duplicate();
            g.barrier().wait();
            if (r.rank == kLeaver) g = {};
            r.meet("it has left");
            if (r.rank == kLeaver) return;
            std::this_thread::sleep_for(50ms);  // Gloo's thread reads that the connection is closed
            std::vector<float> x(10), all(30);
            const auto began = Clock::now();
            const Error e = error_of([&] {
              switch (op) {
                case Op::gather: g.gather(view(x), view(all), kLeaver).wait(); break;
                case Op::broadcast: g.broadcast(view(x), view(x), kLeaver).wait(); break;
                default: g.all_reduce(view(x), view(x)).wait();
              }
              g.barrier().wait();  // of a gather the ranks that give something need no answer
            });
            EXPECT_EQ(e.code(), ErrorCode::peer_lost) << name(op) << ": " << e.what();
            EXPECT_THAT(e.what(), HasSubstr("rank 1 left the group"));
            EXPECT_THAT(ranks_of(e), ElementsAre(kLeaver));
            EXPECT_LT(Clock::now() - began, 1500ms);
          },
          gloo());
      ::unsetenv("WEFT_GLOO_CHECK");
    }
}

// All ranks answer a rank before it notifies its predecessor that it leaves. So the predecessor has its own
// answer before the other's notice. A rank must not treat that notice as the end of the questions that it has
// to answer.
TEST_P(Gloo, RanksThatLeaveInACircleDoNotWaitForOneAnother) {
  constexpr int n = 3;
  run_ranks(
      GetParam(), n,
      [](Rank& r) {
        const int last = (r.rank + n - 1) % n;
        const auto answered = [](int rank) { return "left/" + std::to_string(rank); };
        TestHooks hooks;
        hooks.before_leave = [&](int peer) {
          if (peer != last) return;
          // The predecessor has notified this rank, whose thread has answered; the others have notified it,
          // too.
          r.store->set(answered(r.rank), "1", Deadline::after(20s));
          for (int rank = 0; rank < n; ++rank) r.store->get(answered(rank), Deadline::after(20s));
          std::this_thread::sleep_for(100ms);  // the answers are under way
        };
        const ScopedTestHooks scope(r.context, r.rank, hooks);
        ProcessGroup g = ProcessGroup::create(r.context, "gloo", r.membership("circle"));
        g.barrier().wait();
        const auto began = Clock::now();
        g = {};
        EXPECT_LT(Clock::now() - began, 1500ms);
        r.meet("all have left");
      },
      gloo());
}

// The addresses at which this process listens: "0100007F:1F90" as the kernel writes 127.0.0.1:8080.
std::set<std::string> listening() {
  std::set<std::string> sockets;
  DIR* const folder = ::opendir("/proc/self/fd");
  while (const dirent* const entry = ::readdir(folder)) {
    char to[64] = {};
    if (::readlinkat(::dirfd(folder), entry->d_name, to, sizeof(to) - 1) > 0) sockets.insert(to);
  }
  ::closedir(folder);
  std::set<std::string> found;
  FileIn table("/proc/self/net/tcp");
  std::string line;
  while (std::getline(table, line)) {
    TextIn words(line);
    std::string number, local, remote, state, word, inode;
    words >> number >> local >> remote >> state;
    for (int i = 0; i < 5; ++i) words >> word;
    words >> inode;
    if (state == "0A" && sockets.count("socket:[" + inode + "]") != 0) found.insert(local);
  }
  return found;
}

// Connects to each port that this process listens on, as a port scanner would, and keeps the connections.
class Scanner {
 public:
  explicit Scanner(std::string says) : says_(std::move(says)) {}
  ~Scanner() {
    for (const int fd : connections_) ::close(fd);
  }
  Scanner(const Scanner&) = delete;
  Scanner& operator=(const Scanner&) = delete;

  void scan(const std::set<std::string>& not_these) {
    const std::lock_guard lock(mutex_);
    for (const std::string& where : listening()) {
      if (not_these.count(where) != 0) continue;
      EXPECT_THAT(where, testing::StartsWith("0100007F:"));  // all ranks are on one host
      sockaddr_in to{};
      to.sin_family = AF_INET;
      to.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
      to.sin_port = htons(static_cast<std::uint16_t>(std::stoi(where.substr(9), nullptr, 16)));
      const int fd = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
      connections_.push_back(fd);
      if (::connect(fd, reinterpret_cast<const sockaddr*>(&to), sizeof(to)) != 0) continue;
      if (!says_.empty()) ::send(fd, says_.data(), says_.size(), MSG_NOSIGNAL);
    }
  }
  std::size_t connections() {
    const std::lock_guard lock(mutex_);
    return connections_.size();
  }

 private:
  const std::string says_;
  std::mutex mutex_;
  std::vector<int> connections_;
};

// A store in which a rank that gives its ports to the others waits first until an unauthenticated client has
// been there.
class ScannedStore final : public ForwardingStore {
 public:
  ScannedStore(std::shared_ptr<Store> store, Scanner& scanner, int times)
      : ForwardingStore(std::move(store)), scanner_(scanner), times_(times) {}
  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    scan(key);
    ForwardingStore::set(key, value, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    scan(key);
    return ForwardingStore::add(key, delta, deadline);
  }

 private:
  void scan(std::string_view key) {
    if (key.find("/gloo/") == key.npos || key.find("/port") == key.npos || key.ends_with("/all")) return;
    if (scanned_.size() < times_ || scanned_.count(std::string(key)) != 0) {
      scanned_.insert(std::string(key));
      scanner_.scan(before_);
    }
  }
  Scanner& scanner_;
  const std::size_t times_;
  const std::set<std::string> before_ = listening();
  std::set<std::string> scanned_;
};

// Gloo takes the first process that connects for the peer. The ranks notice, and try again on other ports.
TEST_P(Gloo, AnUnauthenticatedClientThatConnectsWhileAGroupIsMadeDoesNotKillTheJob) {
  for (const std::string& says :
       {std::string("GET / HTTP/1.0\r\n\r\n"), std::string(), std::string(100, '\0')})
    run_ranks(
        GetParam(), 3,
        [&](Rank& r) {
          r.meet("here");
          Scanner scanner(says);
          Membership m = r.membership("scanned");
          // The scanner sees the keys of the first attempt, which writes two keys with its ports.
          m.store = std::make_shared<ScannedStore>(r.store, scanner, 2);
          r.meet("all look before anybody listens");
          ProcessGroup g = ProcessGroup::create(r.context, "gloo", m);
          EXPECT_GT(scanner.connections(), 0u);
          std::vector<float> x(1000, 1.0f);
          g.all_reduce(view(x), view(x)).wait();
          EXPECT_EQ(x, std::vector<float>(1000, 3.0f));
        },
        gloo());
}

// If a foreign process connects again and again, every rank names it.
TEST_P(Gloo, AnUnauthenticatedClientThatConnectsAgainAndAgainIsAnErrorOfAllRanks) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.meet("here");
        Scanner scanner("GET / HTTP/1.0\r\n\r\n");
        Membership m = r.membership("scanned");
        m.store = std::make_shared<ScannedStore>(r.store, scanner, 1000);
        r.meet("all look before anybody listens");
        const Error e = error_of([&] { ProcessGroup::create(r.context, "gloo", m); });
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("group \"scanned\": gloo cannot connect the ranks: rank "));
        EXPECT_THAT(e.what(), HasSubstr("; does somebody else connect to the ports? [rank "));
        r.meet("both know");
        ProcessGroup again = ProcessGroup::create(r.context, "gloo", r.membership("again"));
        again.barrier().wait();
      },
      gloo());
}

TEST_P(Gloo, DestructionWithCallsInFlightAborts) {
  run_ranks(
      GetParam(), 2,
      [](Rank& r) {
        r.group().barrier().wait();
        std::vector<float> x(200000);
        if (r.rank == 0) {
          { const Work dropped = r.group().all_reduce(view(x), view(x)); }
          r.meet("dropped");
        } else {
          r.meet("dropped");
        }
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x)).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("all_reduce: rank 0 dropped the Work of a call in flight"));
      },
      gloo());
}

// The comparison can be switched off: calls work without it, mismatches are no longer found, and all ranks
// must have the same setting.
TEST(GlooProcesses, TheComparisonCanBeSwitchedOff) {
  SKIP_WITHOUT_GLOO();
  run_ranks(
      Ranks::processes, 3,
      [](Rank& r) {
        ::setenv("WEFT_GLOO_CHECK", "off", 1);
        EXPECT_FALSE(r.group().traits().guarantees.checks_calls);
        EXPECT_FALSE(r.group().traits().guarantees.names_absent);
        Variety v;
        v.many = {4099};
        calls_at_random(r, r.group(), 100, std::mt19937(7), std::mt19937(100 + r.rank), v, std::nullopt);
        r.meet("calls are done");
        std::vector<float> x(10);
        if (r.rank != 1) {
          const Error e =
              error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 200ms}).wait(); });
          EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          EXPECT_THAT(e.what(),
                      HasSubstr("Gloo cannot report which ranks are missing (WEFT_GLOO_CHECK is off)"));
        }
        r.meet("both have failed");
        ::setenv("WEFT_GLOO_CHECK", r.rank == 1 ? "off" : "on", 1);
        const Error e = error_of([&] { ProcessGroup::create(r.context, "gloo", r.membership("mixed")); });
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("group \"mixed\": WEFT_GLOO_CHECK is "));
        EXPECT_THAT(e.what(), HasSubstr("expected the same on all ranks"));
        ::setenv("WEFT_GLOO_CHECK", "perhaps", 1);
        EXPECT_EQ(error_text([&] { ProcessGroup::create(r.context, "gloo", r.membership("other")); }),
                  "bad_argument: WEFT_GLOO_CHECK is \"perhaps\"; expected on or off");
      },
      gloo());
}

TEST(GlooProcesses, AKilledRankIsNamedByTheSurvivors) {
  SKIP_WITHOUT_GLOO();
  RankOptions options = gloo();
  options.deadline = 60s;  // so it is not the deadline that tells
  options.limit = 30s;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        r.group().barrier().wait();
        r.meet("ready");
        std::vector<float> x(3000000);
        const Error e = error_of([&] {
          for (;;) r.group().all_reduce(view(x), view(x)).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("rank 1 was lost"));
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        EXPECT_TRUE(r.group().quiesce(5s));
        // The survivors go on in a group of their own.
        Membership m = r.membership("survivors");
        m.size = 2;
        m.rank = r.rank / 2;
        ProcessGroup survivors = ProcessGroup::create(r.context, "gloo", m);
        survivors.barrier().wait();
      },
      options);
  ranks.store().get("test/met/ready", Deadline::after(20s));
  std::this_thread::sleep_for(50ms);
  ranks[1].kill(SIGKILL);
  ranks.finish({1});
}

// A worker that a rank forked outlives it with copies of its connections, so these do not show that the rank
// died.
TEST(GlooProcesses, ARankThatDiesBeforeAChildItForkedIsNamedWithinASecond) {
  SKIP_WITHOUT_GLOO();
  RankOptions options = gloo();
  options.deadline = 20s;  // so it is not the deadline that tells
  options.limit = 30s;
  RankProcesses ranks(
      3,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 1) {
          const pid_t child = ::fork();
          if (child == 0) {
            ::alarm(30);
            for (;;) ::pause();
          }
          r.store->set("child", std::to_string(child), Deadline::after(20s));
          r.store->get("waiting", Deadline::after(20s));
          ::raise(SIGKILL);
        }
        if (r.rank == 0) r.store->set("waiting", "", Deadline::after(20s));
        const auto began = Clock::now();
        const Error e = error_of([&] { r.group().barrier().wait(); });
        EXPECT_LT(Clock::now() - began, 2s);
        EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("rank 1 was lost: its process has ended"));
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        r.store->set("told/" + std::to_string(r.rank), "", Deadline::after(20s));
      },
      options);
  const pid_t child = std::stoi(ranks.store().get("child", Deadline::after(20s)));
  for (const char* told : {"told/0", "told/2"})
    EXPECT_NO_THROW(ranks.store().get(told, Deadline::after(25s))) << told;
  ::kill(child, SIGKILL);
  ranks.finish({1});
}

TEST(GlooProcesses, AStoppedRankIsATimeoutAndMemoryIsOursAgain) {
  SKIP_WITHOUT_GLOO();
  RankProcesses ranks(
      2,
      [](Rank& r) {
        r.group().barrier().wait();
        r.meet("ready");
        if (r.rank == 1) {
          r.store->get("test/never", Deadline::after(20s));
          return;
        }
        r.store->get("test/stopped", Deadline::after(10s));
        std::vector<float> x(3000000);
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x), {.deadline = 300ms}).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(1));
        EXPECT_TRUE(r.group().quiesce(5s));
      },
      gloo());
  ranks.store().get("test/met/ready", Deadline::after(20s));
  ranks[1].kill(SIGSTOP);
  ranks.store().set("test/stopped", "1");
  ranks.finish({1});
  ranks[1].kill(SIGKILL);
}

// Each receives from its left before it sends to its right. All wait in a chain behind the rank that is
// stopped, and name it, not the next one.
TEST(GlooChain, TheRankAtItsEndIsNamed) {
  SKIP_WITHOUT_GLOO();
  RankProcesses ranks(
      4,
      [](Rank& r) {
        r.group().barrier().wait();
        if (r.rank == 2) {
          raise(SIGSTOP);
          return;
        }
        std::vector<float> in(100000), out(in.size());
        const CallOptions options{.deadline = r.rank == 1 ? Duration(300ms) : Duration(10s)};
        const Error e = error_of([&] {
          r.group().recv(view(in), (r.rank + 3) % 4, options).wait();
          r.group().send(view(out), (r.rank + 1) % 4, options).wait();
        });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
        EXPECT_THAT(e.what(),
                    HasSubstr("rank 0 has not sent it (tag 0); rank 0 waits, too; rank 2 does not answer"));
        r.store->add("through", 1, Deadline::after(10s));
      },
      gloo());
  const Deadline end = Deadline::after(30s);
  while (ranks.store().add("through", 0, Deadline::after(10s)) < 3 && !end.passed())
    std::this_thread::sleep_for(5ms);
  ranks[2].kill(SIGKILL);
  ranks.finish({2});
}

// All ranks have entered a call that is composed of messages, and then one is stopped. A rank that waits for
// another waiting rank names the stopped one.
TEST(GlooChain, ARankThatIsStoppedInsideACollectiveIsNamed) {
  SKIP_WITHOUT_GLOO();
  RankProcesses ranks(
      4,
      [](Rank& r) {
        r.group().barrier().wait();
        std::vector<float> x(1000);
        const CallOptions options{.order = Order::canonical, .deadline = r.rank == 3 ? Duration(20s) : 300ms};
        if (r.rank == 3) {
          Work work = r.group().all_reduce(view(x), view(x), options);  // tells the others so
          std::this_thread::sleep_for(100ms);
          r.meet("called");
          r.store->get("never", Deadline::after(20s));
          return;
        }
        r.meet("called");
        r.store->get("stopped", Deadline::after(20s));
        const Error e = error_of([&] { r.group().all_reduce(view(x), view(x), options).wait(); });
        EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
        EXPECT_THAT(ranks_of(e), ElementsAre(3)) << e.what();
        EXPECT_THAT(e.what(), HasSubstr("rank 3 has not done its part")) << e.what();
        r.store->add("through", 1, Deadline::after(10s));
      },
      gloo());
  ranks.store().get("test/met/called", Deadline::after(20s));
  ranks[3].kill(SIGSTOP);
  ranks.store().set("stopped", "1");
  const Deadline end = Deadline::after(30s);
  while (ranks.store().add("through", 0, Deadline::after(10s)) < 3 && !end.passed())
    std::this_thread::sleep_for(5ms);
  ranks[3].kill(SIGKILL);
  ranks.finish({3});
}

}  // namespace
}  // namespace weft::test::gloo_test
