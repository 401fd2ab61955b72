// Several hosts, which are network namespaces here: the store and its secret, gloo, both MPIs, shm that
// refuses, and a host that is cut off in the middle of a call.
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/namespaces.hpp"
#include "support/processes.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/store/tcp.hpp"

namespace weft::hosts_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::error_text;
using test::Hosts;
using ::testing::AllOf;
using ::testing::AnyOf;
using ::testing::Contains;
using ::testing::HasSubstr;

using Variables = std::map<std::string, std::string>;

/// The view of a rank: a process on its host.
struct Rank {
  int rank, size;
  Context& context;
  std::function<std::vector<std::string>()> lines;  // of its log
  const Membership& member;

  ProcessGroup group(const std::string& backend, Duration deadline, const std::string& name = "world") {
    Membership m = member;
    m.name = name;
    m.deadline = deadline;
    return ProcessGroup::create(context, backend, m);
  }
};

class HostsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
    if (const std::string why = Hosts::unavailable(); !why.empty()) GTEST_SKIP() << why;
    write_secret("secret", "the secret of this test, long enough\n");
    write_secret("other", "another secret, as long as the first\n");
  }

  void write_secret(const std::string& name, const std::string& text) {
    std::ofstream(folder_ / name) << text;
    std::filesystem::permissions(folder_ / name,
                                 std::filesystem::perms::owner_read | std::filesystem::perms::owner_write);
  }

  /// The variables that a user would set on each host; `more` replaces some, or removes them if their values
  /// are empty.
  Variables variables(int rank, int size, const Variables& more = {}) const {
    Variables all{{"WEFT_RANK", std::to_string(rank)},
                  {"WEFT_WORLD_SIZE", std::to_string(size)},
                  {"WEFT_STORE", Hosts::address(0) + ":29400"},
                  {"WEFT_STORE_SECRET_FILE", folder_ / "secret"},
                  {"WEFT_INTERFACE", Hosts::kInterface}};
    for (const auto& [name, value] : more) all[name] = value;
    return all;
  }
  static void set(const Variables& variables) {
    for (const auto& [name, value] : variables)
      value.empty() ? ::unsetenv(name.c_str()) : ::setenv(name.c_str(), value.c_str(), 1);
  }

  /// `per_host` ranks on each host, in order. `meanwhile` runs here.
  static void run(
      const Hosts& hosts, int per_host, const std::function<void(int rank)>& body,
      const std::function<void()>& meanwhile = [] {}) {
    std::vector<test::ChildProcess> ranks;
    for (int r = 0; r < hosts.count() * per_host; ++r)
      ranks.push_back(test::ChildProcess::fork([&, r] {
        hosts.enter(r / per_host);
        body(r);
        return 0;
      }));
    meanwhile();
    const Deadline limit = Deadline::after(seconds(60));
    for (std::size_t r = 0; r < ranks.size(); ++r) {
      const auto status = ranks[r].wait(limit.left());
      EXPECT_EQ(status ? test::to_string(*status) : "hangs", "exit code 0") << "rank " << r;
    }
  }
  /// Like the function above, for ranks that are members of the job.
  void run_members(
      const Hosts& hosts, int per_host, const std::function<void(Rank&)>& body, const Variables& more = {},
      const std::function<void()>& meanwhile = [] {}) {
    const int size = hosts.count() * per_host;
    run(
        hosts, per_host,
        [&](int rank) {
          set(variables(rank, size, more));
          std::mutex mutex;
          std::vector<std::string> lines;
          Context context({.log_level = LogLevel::info, .log_sink = [&](LogLevel, std::string_view line) {
                             const std::lock_guard lock(mutex);
                             lines.emplace_back(line);
                           }});
          const Membership member = Membership::from_env(context, seconds(20));
          Rank r{rank, size, context,
                 [&] {
                   const std::lock_guard lock(mutex);
                   return lines;
                 },
                 member};
          body(r);
        },
        meanwhile);
  }

  test::TemporaryFolder folder_;
};

void meet(Rank& r, const std::string& name) {
  if (r.member.store->add("met/" + name, 1) == r.size) r.member.store->set("all/" + name, "1");
  r.member.store->get("all/" + name, Deadline::after(seconds(20)));
}

TEST_F(HostsTest, RanksMeetInTheStoreOfRankZero) {
  const Hosts hosts(3);
  run_members(hosts, 2, [&](Rank& r) {
    r.member.store->set(std::to_string(r.rank), fmt::format("I am {}", r.rank));
    for (int peer = 0; peer < r.size; ++peer)
      EXPECT_EQ(r.member.store->get(std::to_string(peer), Deadline::after(seconds(20))),
                fmt::format("I am {}", peer));
    EXPECT_THAT(r.lines(),
                Contains(fmt::format("[store] rendezvous: store at 10.77.0.1:29400 by interface weft0 ({})",
                                     Hosts::address(r.rank / 2))));
  });
}

TEST_F(HostsTest, UnauthenticatedClientsOfOtherHostsAreRefusedWhileTheJobGoesOn) {
  const Hosts hosts(3);
  constexpr const char* kServer = "the server at 10.77.0.1:29400";
  run(hosts, 1, [&](int rank) {
    if (rank == 2) {  // no rank of this job
      set(variables(1, 2, {{"WEFT_STORE_SECRET_FILE", folder_ / "other"}}));
      const auto join = [] {
        Context context;
        return Membership::from_env(context, seconds(60));
      };
      const auto start = Clock::now();
      EXPECT_EQ(
          error_text(join),
          fmt::format("mismatch: WEFT_STORE is \"10.77.0.1:29400\": store: {} has another secret than this "
                      "process, or none; expected the same one on all hosts (WEFT_STORE_SECRET_FILE, "
                      "WEFT_STORE_SECRET)",
                      kServer));
      EXPECT_LT(Clock::now() - start, seconds(30)) << "at once, not at the deadline";
      set({{"WEFT_STORE_SECRET_FILE", ""}});
      EXPECT_EQ(
          error_text(join),
          "bad_argument: WEFT_STORE is \"10.77.0.1:29400\": store: 10.77.0.1:29400 is not on loopback, and "
          "there is no secret; expected one that all ranks have, in a file of mode 0600 "
          "(WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET");
      set(variables(1, 2));
      Context context;
      make_tcp_store("10.77.0.1", 29400, Deadline::after(seconds(20)), store_secret_from_env())
          ->set("job/unauthenticated", "done");
      return;
    }
    set(variables(rank, 2, {{"WEFT_JOB", "job"}}));
    std::mutex mutex;
    std::vector<std::string> lines;
    Context context({.log_sink = [&](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      lines.emplace_back(line);
    }});
    const Membership m = Membership::from_env(context, seconds(20));
    m.store->get("unauthenticated", Deadline::after(seconds(20)));
    m.store->add("left", 1);
    while (m.store->add("left", 0) != 2) std::this_thread::sleep_for(milliseconds(5));
    if (rank == 0) {
      const std::lock_guard lock(mutex);
      EXPECT_THAT(lines, Contains(AllOf(HasSubstr("store server: closed 10.77.0.3:"),
                                        HasSubstr("it does not know the secret"))));
    }
  });
}

/// In mounts of this process's own.
void put_in_place_of(const std::string& path, const std::string& other) {
  ASSERT_EQ(::mount(other.c_str(), path.c_str(), nullptr, MS_BIND, nullptr), 0) << path;
}

TEST_F(HostsTest, WithoutLibsodiumTheErrorSaysWhatToInstall) {
  const Hosts hosts(1);
  run(hosts, 1, [&](int) {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    for (const char* const folder :
         {"/usr/lib/" WEFT_MULTIARCH, "/usr/lib64", "/usr/lib", "/usr/local/lib"}) {
      std::error_code absent;
      for (const auto& entry : std::filesystem::directory_iterator(folder, absent))
        if (entry.path().filename().string().starts_with("libsodium.so") && !entry.is_symlink())
          put_in_place_of(entry.path(), "/dev/null");
    }
    const auto join = [] {
      Context context;
      return Membership::from_env(context, seconds(20));
    };
    set(variables(0, 1));
    EXPECT_THAT(
        error_text(join),
        AllOf(HasSubstr(
                  "unsupported: WEFT_STORE is \"10.77.0.1:29400\": store: a secret needs libsodium, which "
                  "cannot be used: "),
              HasSubstr("; expected libsodium.so.23 (Debian's package libsodium23)")));
    set({{"WEFT_STORE", "127.0.0.1:29400"}});  // there nobody asks for it
    EXPECT_EQ(error_text(join), "no error");
  });
}

TEST_F(HostsTest, ANameThatIsLoopbackAtHomeIsWarnedOf) {
  const Hosts hosts(1);
  std::ofstream(folder_ / "hosts") << "127.0.0.1 localhost\n127.0.1.1 node7\n";
  run(hosts, 1, [&](int) {
    ASSERT_EQ(::unshare(CLONE_NEWNS), 0);
    put_in_place_of("/etc/hosts", folder_ / "hosts");
    set(variables(0, 1, {{"WEFT_STORE", "node7:29400"}}));
    std::vector<std::string> lines;
    Context context({.log_sink = [&](LogLevel, std::string_view line) { lines.emplace_back(line); }});
    const Membership m = Membership::from_env(context, seconds(20));
    EXPECT_THAT(
        lines,
        ::testing::ElementsAre(
            "[store] rendezvous: on this host node7 is 127.0.1.1:29400, where ranks of other hosts cannot "
            "reach it; give the store an address of the network between them"));
  });
}

TEST_F(HostsTest, ShmRefuses) {
  const Hosts hosts(2);
  run_members(hosts, 1, [&](Rank& r) {
    const std::string text = error_text([&] { r.group("shm", seconds(20)); });
    EXPECT_THAT(text, AllOf(HasSubstr(fmt::format(
                                "unsupported: group \"world\": rank {}: host peers: process ", 1 - r.rank)),
                            HasSubstr(" is on another host, or in another pid or network namespace ("),
                            HasSubstr("as this process: memory cannot be shared")));
    meet(r, "end");
  });
}

// Containers that share the network, but not the process numbers: a death could not be watched.
TEST_F(HostsTest, ShmRefusesAcrossPidNamespaces) {
  const Hosts hosts(1);
  const auto rank = [&](int number) {
    set(variables(number, 2, {{"WEFT_STORE", "127.0.0.1:29400"}}));
    Context context;
    Membership m = Membership::from_env(context, seconds(20));
    EXPECT_THAT(error_text([&] { ProcessGroup::create(context, "shm", m); }),
                AllOf(HasSubstr("unsupported: group \"world\": rank "),
                      HasSubstr(" is on another host, or in another pid or network namespace (")));
    if (m.store->add("met", 1) == 2) m.store->set("all", "1");
    m.store->get("all", Deadline::after(seconds(20)));
  };
  run(hosts, 2, [&](int number) {
    if (number == 0) return rank(0);
    ASSERT_EQ(::unshare(CLONE_NEWPID), 0);  // for its children
    test::run_in_children(1, [&](int) {
      EXPECT_EQ(::getpid(), 1);
      rank(1);
    });
  });
}

#if WEFT_HAVE_GLOO
std::vector<float> numbers(int rank, std::size_t count) {
  std::vector<float> v(count);
  for (std::size_t i = 0; i < count; ++i) v[i] = static_cast<float>(rank * 1000 + static_cast<int>(i % 97));
  return v;
}

TEST_F(HostsTest, GlooSumsAcrossHosts) {
  const Hosts hosts(3);
  run_members(hosts, 2, [&](Rank& r) {
    for (const char* backend : {"gloo", "auto"}) {
      ProcessGroup group = r.group(backend, seconds(20), backend);
      EXPECT_EQ(group.backend(), "gloo");
      for (const std::size_t count : {1u, 1009u, 200'003u}) {
        std::vector<float> sum = numbers(r.rank, count);
        group.all_reduce(view(sum), view(sum)).wait();
        for (std::size_t i = 0; i < count; ++i)
          ASSERT_EQ(sum[i], static_cast<float>(15 * 1000 + 6 * static_cast<int>(i % 97))) << i;
      }
      std::vector<int> all(static_cast<std::size_t>(r.size));
      group.all_gather(view(&r.rank, 1), view(all)).wait();
      for (int peer = 0; peer < r.size; ++peer) EXPECT_EQ(all[static_cast<std::size_t>(peer)], peer);
      EXPECT_EQ(group.local_size(), 2);
      EXPECT_EQ(group.local_rank(), r.rank % 2);
      ProcessGroup local = group.split_by_host();
      EXPECT_THAT(local.parent_ranks(), ::testing::ElementsAre(r.rank / 2 * 2, r.rank / 2 * 2 + 1));
    }
    meet(r, "end");
  });
}

TEST_F(HostsTest, GlooIsToldItsInterface) {
  const Hosts hosts(2);
  run_members(
      hosts, 1,
      [&](Rank& r) {
        EXPECT_EQ(
            error_text([&] { r.group("gloo", seconds(20)); }),
            "unsupported: group \"world\": the ranks are on several hosts and WEFT_INTERFACE is not set; "
            "expected the network interface that gloo may listen on");
        meet(r, "end");
      },
      {{"WEFT_INTERFACE", ""}});
}

// The network is cut while all ranks call. Every rank, including the disconnected one, gets an error that
// names the unreachable ranks, within the deadline plus a second. If host 0 is cut off, the store is cut off,
// too.
class CutOff : public HostsTest, public ::testing::WithParamInterface<int> {};

TEST_P(CutOff, InMidCallEverybodyIsTold) {
  constexpr Duration kDeadline = seconds(2);
  const int lost = GetParam();
  const Hosts hosts(3);
  test::Pipe ready;
  run_members(
      hosts, 1,
      [&](Rank& r) {
        ProcessGroup group = r.group("gloo", kDeadline);
        std::vector<float> sum = numbers(r.rank, 50'000);
        auto began = Clock::now();
        try {
          for (int call = 0;; ++call) {
            if (call == 20) ready.write_line("going");
            began = Clock::now();
            group.all_reduce(view(sum), view(sum)).wait();
          }
        } catch (const Error& e) {
          // A second by its promise, and some more for a machine that does other things.
          EXPECT_LT(Clock::now() - began, kDeadline + seconds(4)) << e.what();
          EXPECT_THAT(e.code(), AnyOf(ErrorCode::timeout, ErrorCode::peer_lost)) << e.what();
          EXPECT_EQ(e.op(), Op::all_reduce);
          if (r.rank == lost) {
            EXPECT_FALSE(e.ranks().empty()) << e.what();  // of its own it cannot know
          } else {
            EXPECT_THAT(e.ranks(), ::testing::ElementsAre(lost)) << e.what();
            EXPECT_THAT(e.what(), HasSubstr(fmt::format("rank {}", lost)));
          }
        }
        EXPECT_TRUE(group.quiesce(seconds(5)));
        EXPECT_THAT(error_text([&] { group.barrier().wait(); }),
                    AnyOf(HasSubstr("timeout"), HasSubstr("peer_lost")));
        const auto left = Clock::now();
        group = ProcessGroup();
        EXPECT_LT(Clock::now() - left, seconds(4));
      },
      {},
      [&] {
        for (int r = 0; r < 3; ++r) EXPECT_EQ(ready.read_line(), "going");
        hosts.cut_off(lost);
      });
}

INSTANTIATE_TEST_SUITE_P(Hosts, CutOff, ::testing::Values(2, 0));
#endif

// ---- MPI ----

struct Mpi {
  const char* name;
  bool built;
  std::string mpirun;  // with places for the agent and the variables to hand on
};

class MpiAcrossHosts : public HostsTest, public ::testing::WithParamInterface<Mpi> {
 protected:
  void SetUp() override {
    if (!GetParam().built) GTEST_SKIP() << GetParam().name << " is not built here";
    HostsTest::SetUp();
  }
  enum class Then { go_on, may_end, end_all };
  /// Two ranks on each of two hosts, for at most `limit` seconds. `heard` gets every line as it arrives, and
  /// decides whether the ranks may end now, or must be ended. Returns all lines.
  std::string job(const Hosts& hosts, const std::string& what, int limit,
                  const std::function<Then(const std::string&)>& heard) {
    const std::string agent = folder_ / "agent";
    hosts.write_agent(agent);
    std::string set, passed;
    for (const auto& [name, value] :
         variables(0, 4, {{"WEFT_LOG", "warning"}, {"OMPI_MCA_mpi_yield_when_idle", "1"}})) {
      if (name == "WEFT_RANK" || name == "WEFT_WORLD_SIZE") continue;
      set += fmt::format(" {}={}", name, value);
      if (name.starts_with("WEFT_")) passed += fmt::format(" -x {}", name);
    }
    const std::string mpirun =
        fmt::format(fmt::runtime(GetParam().mpirun), fmt::arg("agent", agent), fmt::arg("passed", passed));
    const std::filesystem::path all_heard = folder_ / "all_heard";
    std::filesystem::remove(all_heard);
    const std::string command =
        fmt::format("{} env{} timeout -k 2 {} {} -n 4 {} {} {} 2>&1 </dev/null", hosts.on(0), set, limit,
                    mpirun, WEFT_HOST_RANKS, what, all_heard.string());
    std::string all;
    std::FILE* const pipe = ::popen(command.c_str(), "r");
    char line[4096];
    while (std::fgets(line, sizeof line, pipe) != nullptr) {
      all += line;
      const Then then = heard(line);
      if (then == Then::may_end) std::ofstream(all_heard) << "all\n";
      if (then == Then::end_all) {
        hosts.end_all();
        break;
      }
    }
    ::pclose(pipe);
    return all;
  }
};

TEST_P(MpiAcrossHosts, Sums) {
  const Hosts hosts(2);
  for (const std::string backend : {GetParam().name, "auto"}) {
    int summed = 0;
    const std::string all = job(hosts, backend + " sums", 40, [&](const std::string& line) {
      return line.find(": sums over ") != std::string::npos && ++summed == 4 ? Then::may_end : Then::go_on;
    });
    for (int r = 0; r < 4; ++r)
      EXPECT_THAT(all,
                  HasSubstr(fmt::format("rank {}: sums over {} on host{}\n", r, GetParam().name, r / 2)));
  }
}

// mpirun itself is on the remaining host. This test does not check what mpirun does about the other host.
TEST_P(MpiAcrossHosts, WhoIsLeftNamesWhoIsCutOff) {
  const Hosts hosts(2);
  int going = 0, told = 0;
  const std::string all = job(hosts, std::string(GetParam().name) + " cut", 30, [&](const std::string& line) {
    if (line.find("is going") != std::string::npos && ++going == 4) hosts.cut_off(1);
    return line.ends_with(" ms\n") && ++told == 2 ? Then::end_all : Then::go_on;
  });
  for (int r = 0; r < 2; ++r) {
    EXPECT_THAT(all, ::testing::ContainsRegex(fmt::format(
                         "rank {}: (timeout|peer_lost) (2 3|2|3): all_reduce: [^\n]*ranks? [23]", r)));
    int took = 0;
    const std::size_t end = all.find(" ms\n", all.find(fmt::format("rank {}: timeout", r)));
    if (end != std::string::npos) took = std::stoi(all.substr(all.rfind(' ', end - 1) + 1));
    EXPECT_LT(took, 6000) << all;
  }
  if (HasFailure()) std::printf("%s", all.c_str());
}

INSTANTIATE_TEST_SUITE_P(
    Both, MpiAcrossHosts,
    ::testing::Values(
        Mpi{"mpi-openmpi", WEFT_HAVE_OPENMPI != 0,
            "mpirun.openmpi --allow-run-as-root --oversubscribe -host 10.77.0.1:2,10.77.0.2:2 --mca "
            "plm_rsh_agent {agent} --mca oob_tcp_if_include weft0 --mca btl_tcp_if_include weft0 --mca "
            "pml ob1{passed}"},
        Mpi{"mpi-mpich", WEFT_HAVE_MPICH != 0,
            "mpirun.mpich -launcher rsh -launcher-exec {agent} -iface weft0 -hosts "
            "10.77.0.1:2,10.77.0.2:2"}),
    [](const auto& mpi) { return std::string(mpi.param.name).substr(4); });

}  // namespace
}  // namespace weft::hosts_test
