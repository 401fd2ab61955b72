// Membership::from_env under the variables of each launcher, good and bad, and under those launchers
// themselves that are installed.
#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <sys/file.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <utility>
#include <vector>

#include "store/claim.hpp"
#include "store/rendezvous_file.hpp"
#include "support/errors.hpp"
#include "support/other_user.hpp"
#include "support/processes.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

namespace weft::rendezvous_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

using Variables = std::map<std::string, std::string>;

/// Sets these variables, and unsets all others that weft reads.
void set_environment(const Variables& variables) {
  for (const env::Variable& v : env::variables()) ::unsetenv(std::string(v.name).c_str());
  for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
}

/// The files through which ranks find each other are in a folder of the test.
class RendezvousTest : public ::testing::Test {
 protected:
  class Found;
  /// One process's Context, whose info lines and warnings are kept.
  class Process {
   public:
    std::vector<std::string> lines() {
      const std::lock_guard lock(mutex_);
      return lines_;
    }

   private:
    std::mutex mutex_;
    std::vector<std::string> lines_;

   public:
    Context context{{.log_level = LogLevel::info, .log_sink = [this](LogLevel, std::string_view line) {
                       const std::lock_guard lock(mutex_);
                       constexpr std::string_view kLayer = "[store] ";
                       if (line.starts_with("[store] rendezvous:"))
                         lines_.emplace_back(line.substr(kLayer.size()));
                     }}};
  };

  void set(Variables variables) {
    variables.try_emplace("XDG_RUNTIME_DIR", folder_.path());
    set_environment(variables);
  }

  Membership from(const Variables& variables, Context& context, Duration deadline = seconds(20)) {
    set(variables);
    return Membership::from_env(context, deadline);
  }
  Membership from(const Variables& variables) { return from(variables, context_); }

  void expect_error(const Variables& variables, ErrorCode code, const std::string& text,
                    Duration deadline = seconds(20)) {
    try {
      Context context;
      from(variables, context, deadline);
      ADD_FAILURE() << "no error; expected: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(text));
    }
  }

  static Deadline soon() { return Deadline::after(seconds(10)); }

  /// Ranks as processes, started in an order that is not theirs, tell each other their numbers.
  void expect_they_meet(int size, const std::function<Variables(int rank)>& variables) {
    if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
    test::run_in_children(size, [&](int child) {
      const int rank = (child + 1) % size;
      set(variables(rank));
      Context context;
      const Membership m = Membership::from_env(context, seconds(20));
      EXPECT_EQ(m.rank, rank);
      EXPECT_EQ(m.size, size);
      EXPECT_EQ(m.process_rank, 0);
      m.store->set(std::to_string(rank), fmt::format("I am {}", rank));
      for (int peer = 0; peer < size; ++peer)
        EXPECT_EQ(m.store->get(std::to_string(peer), soon()), fmt::format("I am {}", peer));
    });
    EXPECT_THAT(rendezvous_files(), IsEmpty()) << "files stay behind";
  }

  std::vector<std::string> rendezvous_files() {
    std::vector<std::string> names;
    std::error_code absent;
    for (const auto& entry : std::filesystem::directory_iterator(folder_ / "weft", absent))
      names.push_back(entry.path().filename());
    return names;
  }

  test::TemporaryFolder folder_;
  int next_file_ = 0;
  Context context_;
};

/// A port without a listener: a server had it and has ended.
std::uint16_t free_port() {
  Logger log;
  return TcpStoreServer(log).port();
}

TEST_F(RendezvousTest, WithoutVariablesOneRankIsAlone) {
  const Membership m = from({});
  EXPECT_EQ(m.rank, 0);
  EXPECT_EQ(m.size, 1);
  EXPECT_EQ(m.process_rank, 0);
  EXPECT_EQ(m.store->add("n", 1), 1);
}

TEST_F(RendezvousTest, RanksOfWeftRunMeetAndJobsDoNot) {
  TcpStoreServer server(context_.log(), {.linger = milliseconds(0)});
  const auto member = [&](const char* rank, const char* job) {
    return from(
        {{"WEFT_RANK", rank}, {"WEFT_WORLD_SIZE", "3"}, {"WEFT_STORE", server.address()}, {"WEFT_JOB", job}});
  };
  const Membership zero = member("0", "a");
  const Membership two = member("2", "a");
  const Membership other = member("1", "b");
  EXPECT_EQ(zero.rank, 0);
  EXPECT_EQ(two.rank, 2);
  EXPECT_EQ(two.size, 3);
  EXPECT_EQ(two.process_rank, 0);
  zero.store->set("key", "from zero");
  EXPECT_EQ(two.store->get("key", soon()), "from zero");
  EXPECT_FALSE(other.store->try_get("key").has_value());
  EXPECT_EQ(other.store->compare_set("key", "", "mine"), "mine");
  EXPECT_EQ(other.store->add("n", 3), 3);
  EXPECT_EQ(two.store->add("n", 1), 1);
  other.store->remove("key");
  EXPECT_EQ(two.store->try_get("key"), "from zero");
}

TEST_F(RendezvousTest, VariablesOfWeftRunComeBeforeThoseOfTorchrun) {
  TcpStoreServer server(context_.log(), {.linger = milliseconds(0)});
  const Membership m = from({{"WEFT_RANK", "1"},
                             {"WEFT_WORLD_SIZE", "2"},
                             {"WEFT_STORE", server.address()},
                             {"RANK", "7"},
                             {"WORLD_SIZE", "9"}});
  EXPECT_EQ(m.rank, 1);
  EXPECT_EQ(m.size, 2);
}

// Rank 0 of torchrun's variables serves; when its Context is gone, so is the store.
TEST_F(RendezvousTest, UnderTorchrunRankZeroServes) {
  const std::string port = std::to_string(free_port());
  const auto member = [&](const char* rank, Process& process) {
    return from({{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", port}},
                process.context);
  };
  auto first = std::make_unique<Process>();
  auto second = std::make_unique<Process>();
  Membership zero = member("0", *first);
  Membership one = member("1", *second);
  EXPECT_EQ(zero.process_rank, 0);
  EXPECT_EQ(one.rank, 1);
  EXPECT_EQ(one.size, 2);
  zero.store->set("key", "value");
  EXPECT_EQ(one.store->get("key", soon()), "value");
  EXPECT_THAT(first->lines(),
              ElementsAre("rendezvous: rank 0 of 2 by torchrun (RANK, WORLD_SIZE)",
                          "rendezvous: serving at 127.0.0.1:" + port,
                          "rendezvous: store at localhost:" + port + " by interface lo (127.0.0.1)"));
  zero.store.reset();
  std::thread slow([&] {  // it still wants to say goodbye
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_EQ(one.store->add("goodbye", 1), 1);
    one.store.reset();
    second.reset();
  });
  first.reset();
  slow.join();
}

TEST_F(RendezvousTest, AskedTwiceTheSameStoreComesBack) {
  const std::string port = std::to_string(free_port());
  const Variables zero{{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}};
  const Membership once = from(zero);
  EXPECT_EQ(from(zero).store, once.store);
}

TEST_F(RendezvousTest, OneRankUnderTorchrunNeedsNoPort) {
  const Membership m = from({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(m.size, 1);
  EXPECT_EQ(m.store->add("n", 1), 1);
}

TEST_F(RendezvousTest, BadValuesNameTheirVariable) {
  const auto bad = [&](const Variables& variables, const std::string& text) {
    expect_error(variables, ErrorCode::bad_argument, text);
  };
  bad({{"RANK", "7"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "1234"}},
      "RANK is \"7\"; expected 0 to 3 (WORLD_SIZE is 4)");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "abc"}},
      "MASTER_PORT is \"abc\"; expected an integer from 1 to 65535");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "70000"}},
      "MASTER_PORT is \"70000\"; expected an integer from 1 to 65535");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}},
      "MASTER_PORT is not set, but WORLD_SIZE is; expected an integer from 1");
  bad({{"RANK", "1"}}, "WORLD_SIZE is not set, but RANK is; expected an integer from 1");
  bad({{"WORLD_SIZE", "2"}}, "RANK is not set, but WORLD_SIZE is; expected an integer from 0");
  bad({{"MASTER_PORT", "1234"}}, "WORLD_SIZE is not set, but MASTER_PORT is; expected an integer from 1");
  bad({{"MASTER_ADDR", "localhost"}},
      "WORLD_SIZE is not set, but MASTER_ADDR is; expected an integer from 1");
  bad({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK is \"-1\"; expected an integer from 0");
  bad({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is \"0\"; expected an integer from 1");
  bad({{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK is \"one\"; expected an integer from 0");
  bad({{"RANK", "0"}, {"WORLD_SIZE", "2147483647"}, {"MASTER_PORT", "1234"}},
      "WORLD_SIZE is \"2147483647\"; expected an integer from 1 to 65536");

  bad({{"WEFT_RANK", "3"}, {"WEFT_WORLD_SIZE", "3"}, {"WEFT_STORE", "localhost:1"}},
      "WEFT_RANK is \"3\"; expected 0 to 2 (WEFT_WORLD_SIZE is 3)");
  bad({{"WEFT_RANK", "0"}}, "WEFT_WORLD_SIZE is not set, but WEFT_RANK is");
  bad({{"WEFT_STORE", "localhost:1"}}, "WEFT_WORLD_SIZE is not set, but WEFT_STORE is");
  bad({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}},
      "WEFT_STORE is not set, but WEFT_RANK is; expected host:port, [IPv6 address]:port or file:///path");
  for (const char* store : {"localhost", "localhost:", "localhost:12x", "localhost:65536", ":x", "::1:9",
                            "file://", "file://host/x", "/tmp/x"}) {
    bad({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", store}},
        std::string("WEFT_STORE is \"") + store +
            "\"; expected host:port, [IPv6 address]:port or file:///path, the port from 0 to 65535");
  }
  bad({{"OMPI_COMM_WORLD_RANK", "4"}, {"OMPI_COMM_WORLD_SIZE", "4"}},
      "OMPI_COMM_WORLD_RANK is \"4\"; expected 0 to 3 (OMPI_COMM_WORLD_SIZE is 4)");
  bad({{"OMPI_COMM_WORLD_RANK", "0"}}, "OMPI_COMM_WORLD_SIZE is not set, but OMPI_COMM_WORLD_RANK is");
  bad({{"OMPI_COMM_WORLD_RANK", "0"}, {"OMPI_COMM_WORLD_SIZE", "2"}},
      "OMPI_COMM_WORLD_RANK is set, but nothing that names the job (PMIX_NAMESPACE); expected that, or "
      "WEFT_STORE as host:port or file:///path");
  bad({{"PMI_RANK", "2"}, {"PMI_SIZE", "2"}}, "PMI_RANK is \"2\"; expected 0 to 1 (PMI_SIZE is 2)");
  const Variables step{{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "5"}};
  const auto with = [&](Variables more) {
    more.insert(step.begin(), step.end());
    return more;
  };
  bad(with({{"SLURM_STEP_NUM_TASKS", "3"}}),
      "SLURM_PROCID is \"5\"; expected 0 to 2 (SLURM_STEP_NUM_TASKS is 3)");
  bad(with({{"SLURM_NTASKS", "3"}}), "SLURM_PROCID is \"5\"; expected 0 to 2 (SLURM_NTASKS is 3)");
  bad(with({}), "SLURM_NTASKS is not set, but SLURM_PROCID is");
  bad(with({{"SLURM_STEP_ID", "x"}}), "SLURM_STEP_ID is \"x\"; expected an integer from 0 to 4294967295");
  bad({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", "1"}, {"TORCHELASTIC_USE_AGENT_STORE", "True"}},
      "RANK is set, but nothing that names the job (TORCHELASTIC_RUN_ID)");
}

TEST_F(RendezvousTest, SeveralHostsNeedAStoreThatIsNamed) {
  const auto several = [&](const Variables& variables, const std::string& because) {
    expect_error(
        variables, ErrorCode::bad_argument,
        "WEFT_STORE is not set, but the job spans several hosts (" + because +
            "); expected host:port of rank 0's host, or file:///path on a file system that all share");
  };
  several({{"OMPI_COMM_WORLD_RANK", "0"},
           {"OMPI_COMM_WORLD_SIZE", "4"},
           {"OMPI_COMM_WORLD_LOCAL_SIZE", "2"},
           {"PMIX_NAMESPACE", "1"}},
          "OMPI_COMM_WORLD_LOCAL_SIZE is 2, OMPI_COMM_WORLD_SIZE is 4");
  several({{"PMI_RANK", "0"}, {"PMI_SIZE", "4"}, {"MPI_LOCALNRANKS", "3"}},
          "MPI_LOCALNRANKS is 3, PMI_SIZE is 4");
  several({{"SLURM_STEP_ID", "0"},
           {"SLURM_PROCID", "0"},
           {"SLURM_STEP_NUM_TASKS", "2"},
           {"SLURM_STEP_NUM_NODES", "2"}},
          "SLURM_STEP_NUM_NODES is 2");
  several({{"SLURM_STEP_ID", "0"}, {"SLURM_PROCID", "0"}, {"SLURM_NTASKS", "2"}, {"SLURM_NNODES", "2"}},
          "SLURM_NNODES is 2");
  several({{"RANK", "0"},
           {"WORLD_SIZE", "4"},
           {"LOCAL_WORLD_SIZE", "2"},
           {"MASTER_PORT", "1"},
           {"TORCHELASTIC_RUN_ID", "x"},
           {"TORCHELASTIC_USE_AGENT_STORE", "True"}},
          "LOCAL_WORLD_SIZE is 2, WORLD_SIZE is 4");
}

TEST_F(RendezvousTest, OtherHostsNeedASecret) {
  constexpr const char* kHow =
      " is not on loopback, and there is no secret; expected one that all ranks have, in a file of mode 0600 "
      "(WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET";
  for (const char* rank : {"0", "1"}) {
    expect_error(
        {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "192.0.2.7"}, {"MASTER_PORT", "1234"}},
        ErrorCode::bad_argument,
        fmt::format("MASTER_ADDR is \"192.0.2.7\", MASTER_PORT is \"1234\": store: 192.0.2.7:1234{}", kHow));
  }
  for (const char* where : {"192.0.2.7:99", "[2001:db8::7]:99"})
    expect_error({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", where}},
                 ErrorCode::bad_argument, fmt::format("WEFT_STORE is \"{0}\": store: {0}{1}", where, kHow));
}

// On loopback the secret is checked if it is set, but not required.
TEST_F(RendezvousTest, TheSecretIsReadFromTheEnvironment) {
  const std::string where = fmt::format("127.0.0.1:{}", free_port());
  const auto expect_refused = [&](const Variables& more, ErrorCode code, const std::string& text) {
    Variables variables{{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "1"}, {"WEFT_STORE", where}};
    variables.insert(more.begin(), more.end());
    expect_error(variables, code, text);
  };
  const std::string path = folder_ / "secret";
  const std::string said = fmt::format("WEFT_STORE_SECRET_FILE is \"{}\"", path);
  const auto write = [&](std::string_view text, int mode) {
    std::filesystem::remove(path);
    std::ofstream(path) << text;
    std::filesystem::permissions(path, static_cast<std::filesystem::perms>(mode));
  };
  expect_refused({{"WEFT_STORE_SECRET_FILE", path}}, ErrorCode::system,
                 fmt::format("WEFT_STORE is \"{}\": {}", where, said) + ": No such file or directory");
  expect_refused({{"WEFT_STORE_SECRET_FILE", folder_.path()}}, ErrorCode::bad_argument,
                 "which is not a regular file");
  for (const int mode : {0604, 0640, 0660, 0644}) {
    write("0123456789abcdef", mode);
    expect_refused(
        {{"WEFT_STORE_SECRET_FILE", path}}, ErrorCode::bad_argument,
        fmt::format("{}, which others may use (its mode is {:04o}); expected mode 0600", said, mode));
  }
  write("0123456789abcde\r\n\n", 0600);
  expect_refused(
      {{"WEFT_STORE_SECRET_FILE", path}}, ErrorCode::bad_argument,
      fmt::format("WEFT_STORE_SECRET_FILE \"{}\" has a secret of 15 bytes; expected 16 to 4096, at "
                  "random (openssl rand -hex 32)",
                  path));
  write(std::string(5000, 'x'), 0600);
  expect_refused({{"WEFT_STORE_SECRET_FILE", path}}, ErrorCode::bad_argument, "expected 16 to 4096");
  expect_refused({{"WEFT_STORE_SECRET", "short"}}, ErrorCode::bad_argument,
                 "WEFT_STORE_SECRET has a secret of 5 bytes; expected 16 to 4096");
  write("0123456789abcdef\n", 0600);
  expect_refused({{"WEFT_STORE_SECRET_FILE", path}, {"WEFT_STORE_SECRET", "0123456789abcdef"}},
                 ErrorCode::bad_argument,
                 "WEFT_STORE_SECRET_FILE and WEFT_STORE_SECRET are both set; expected one of them");
  if (::geteuid() == 0) {
    ASSERT_EQ(::chown(path.c_str(), 65534, 65534), 0);
    expect_refused({{"WEFT_STORE_SECRET_FILE", path}}, ErrorCode::bad_argument,
                   said + ", which is user 65534's; expected a file of user 0");
    write("0123456789abcdef\n", 0600);
  }
  expect_they_meet(2, [&](int rank) {
    return Variables{{"WEFT_RANK", std::to_string(rank)},
                     {"WEFT_WORLD_SIZE", "2"},
                     {"WEFT_STORE", where},
                     {"WEFT_STORE_SECRET_FILE", path}};
  });
}

TEST_F(RendezvousTest, ATakenPortIsNamed) {
  TcpStoreServer other(context_.log());
  const std::string port = std::to_string(other.port());
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}, ErrorCode::system,
               "MASTER_PORT is \"" + port + "\": store server: cannot listen on 127.0.0.1:" + port +
                   ": Address already in use");
}

// ---- two jobs at one address ----

/// Writes the value as the parent of this process would have written it.
TEST(Claim, KnowsWhoIsOfOneFamily) {
  Claim first = make_claim("here", 0, 2), other = make_claim("here", 1, 2);
  EXPECT_FALSE(other.is_no_sibling_of(first)) << "nobody's parent is known";
  first.process = 20, first.started = 7, first.parent = 10, first.parent_started = 5;
  other.process = 21, other.started = 8, other.parent = 10, other.parent_started = 5;
  EXPECT_FALSE(other.is_no_sibling_of(first));
  other.parent_started = 6;
  EXPECT_TRUE(other.is_no_sibling_of(first)) << "another process of that number";
  other.parent = 20, other.parent_started = 7;
  EXPECT_FALSE(other.is_no_sibling_of(first)) << "its child";
  EXPECT_FALSE(first.is_no_sibling_of(other)) << "its parent";
  other.parent = 11;
  EXPECT_TRUE(other.is_no_sibling_of(first));
  other.host = "elsewhere";
  EXPECT_FALSE(other.is_no_sibling_of(first)) << "not known there";
}

std::string claim_of_rank_zero() {
  Claim claim = make_claim("elsewhere", 0, 2);
  claim.process = ::getppid();
  return claim.text();
}

/// The variables of a rank that was started by hand.
Variables by_hand(int rank, int size, const std::string& store) {
  return {
      {"WEFT_RANK", std::to_string(rank)}, {"WEFT_WORLD_SIZE", std::to_string(size)}, {"WEFT_STORE", store}};
}

Variables by_port(int rank, int size, std::uint16_t port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)}};
}

/// A rank that has found its job, in a separate process, as long as this object exists.
class RendezvousTest::Found {
 public:
  Found(RendezvousTest& test, const Variables& variables)
      : process_(test::ChildProcess::fork([&] {
          test.set(variables);
          Context context;
          const Membership m = Membership::from_env(context, seconds(20));
          ready_.write_line("here");
          leave_.read_line();
          return 0;
        })) {
    ready_.read_line();
  }
  ~Found() {
    leave_.write_line("now");
    EXPECT_EQ(process_.wait(seconds(20)), (test::ExitStatus{0, 0}));
  }
  int pid() const { return process_.pid(); }

 private:
  test::Pipe ready_, leave_;
  test::ChildProcess process_;
};

TEST_F(RendezvousTest, ARankThatIsTakenIsToldByWhom) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::string where = fmt::format("127.0.0.1:{}", free_port());
  const Found zero(*this, by_hand(0, 2, where));
  const Found one(*this, by_hand(1, 2, where));
  for (const auto& [rank, holder] : {std::pair(0, zero.pid()), {1, one.pid()}}) {
    expect_error(
        by_hand(rank, 2, where), ErrorCode::bad_argument,
        fmt::format("WEFT_STORE is \"{0}\": store: the store at {0}: it has a rank {1} already, process "
                    "{2} (on ",
                    where, rank, holder));
    expect_error(
        by_hand(rank, 2, where), ErrorCode::bad_argument,
        fmt::format(
            ", rank {} of 2); expected another address for each job or, in a store that no rank serves, "
            "another WEFT_JOB; this is process {} (on ",
            rank, ::getpid()));
  }
}

TEST_F(RendezvousTest, TwoJobsAtOneMasterPortAreTold) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::uint16_t port = free_port();
  const Found zero(*this, by_port(0, 2, port));
  const Found one(*this, by_port(1, 2, port));
  expect_error(
      by_port(0, 2, port), ErrorCode::system,
      fmt::format("MASTER_ADDR is \"127.0.0.1\", MASTER_PORT is \"{0}\": store server: cannot listen on "
                  "127.0.0.1:{0}: Address already in use (process {1} of user {2} serves there; this is "
                  "process {3})",
                  port, zero.pid(), ::geteuid(), ::getpid()));
  expect_error(by_port(1, 2, port), ErrorCode::bad_argument,
               fmt::format("it has a rank 1 already, process {} (on ", one.pid()));
}

TEST_F(RendezvousTest, AJobOfAnotherSizeIsTold) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::string where = fmt::format("127.0.0.1:{}", free_port());
  const Found zero(*this, by_hand(0, 2, where));
  expect_error(
      by_hand(2, 3, where), ErrorCode::bad_argument,
      fmt::format("store: the store at {}: its job has 2 ranks, as process {} (on ", where, zero.pid()));
}

// Rank 0 of the job is the server, and the store ends with it.
TEST_F(RendezvousTest, TheStoreOfAnotherJobIsTold) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::string where = fmt::format("127.0.0.1:{}", free_port());
  const Found zero(*this, by_hand(0, 2, where));
  for (const int rank : {0, 1}) {
    Variables other = by_hand(rank, 2, where);
    other["WEFT_JOB"] = "another";
    expect_error(
        other, ErrorCode::bad_argument,
        fmt::format("store: the store at {}: it belongs to another job, and is served by process {} (on ",
                    where, zero.pid()));
  }
}

// A job that ended well, or whose ranks were killed, may be started again at its address. This is so with a
// rank 0 that serves, and in a store that continues after the jobs.
TEST_F(RendezvousTest, AJobMayBeStartedAgain) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  TcpStoreServer lasting(context_.log(), {.linger = milliseconds(100)});
  const std::uint16_t port = free_port();
  const std::string where = fmt::format("127.0.0.1:{}", free_port());
  const std::function<Variables(int, int)> starts[] = {
      [&](int rank, int size) { return by_hand(rank, size, lasting.address()); },
      [&](int rank, int size) { return by_hand(rank, size, where); },
      [&](int rank, int size) { return by_port(rank, size, port); },
  };
  for (const auto& start : starts) {
    expect_they_meet(2, [&](int rank) { return start(rank, 2); });
    expect_they_meet(2, [&](int rank) { return start(rank, 2); });
    expect_they_meet(3, [&](int rank) { return start(rank, 3); });
    {
      test::Pipe ready;
      auto killed = test::ChildProcess::fork([&] {
        set(start(0, 3));
        Context context;
        const Membership m = Membership::from_env(context, seconds(20));
        ready.write_line("here");
        std::this_thread::sleep_for(seconds(60));
        return 0;
      });
      ready.read_line();
      killed.kill(SIGKILL);
      ASSERT_TRUE(killed.wait(seconds(10)));
    }
    expect_they_meet(3, [&](int rank) { return start(rank, 3); });
  }
  // Within one process two libraries may have a Context each, and the earlier one may be gone.
  {
    Process one, other;
    EXPECT_EQ(from(by_hand(2, 3, lasting.address()), one.context).rank, 2);
    EXPECT_EQ(from(by_hand(2, 3, lasting.address()), other.context).rank, 2);
  }
  for (int i = 0; i < 2; ++i) {
    Process again;
    EXPECT_EQ(from(by_hand(1, 3, lasting.address()), again.context).rank, 1);
  }
}

// Rank 1 of the second job comes while rank 0 of the first still says its goodbyes.
TEST_F(RendezvousTest, ARankWaitsForAnEarlierJobToEnd) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::uint16_t port = free_port();
  test::Pipe go;
  auto second_one = test::ChildProcess::fork([&] {
    go.read_line();
    set(by_port(1, 2, port));
    Context context;
    const Membership one = Membership::from_env(context, seconds(20));
    EXPECT_EQ(one.store->get("whose", soon()), "the second's");
    return 0;
  });
  auto first = std::make_unique<Process>();
  from(by_port(0, 2, port), first->context);
  {
    Process first_one;
    from(by_port(1, 2, port), first_one.context);
  }
  expect_error(by_port(1, 2, port), ErrorCode::timeout, "it has a rank 1 already, process ",
               milliseconds(200));
  go.write_line("the first job's store is there to be seen");
  std::this_thread::sleep_for(milliseconds(100));
  first.reset();
  Process second_zero;
  from(by_port(0, 2, port), second_zero.context).store->set("whose", "the second's");
  EXPECT_EQ(second_one.wait(seconds(20)), (test::ExitStatus{0, 0}));
}

// Jobs without names that were given one address at the same moment.
class RacingJobs : public RendezvousTest, public ::testing::WithParamInterface<std::string> {
 protected:
  void SetUp() override {
    if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
    where_ = GetParam() == "port"        ? fmt::format("127.0.0.1:{}", free_port())
             : GetParam() == "free_port" ? "localhost:0"
                                         : "file://" + (folder_ / "store").string();
  }
  /// A process that starts others, as a shell does, and waits for them.
  static test::ChildProcess shell(const std::vector<std::function<void()>>& ranks) {
    return test::ChildProcess::fork([&] {
      std::vector<test::ChildProcess> children;
      for (const auto& rank : ranks)
        children.push_back(test::ChildProcess::fork([&] {
          rank();
          return 0;
        }));
      for (auto& child : children) EXPECT_EQ(child.wait(seconds(30)), (test::ExitStatus{0, 0}));
      return 0;
    });
  }
  /// Joins as a rank of two, says so, and stays until the other side ends it. Both must be of one job.
  void take_part(int rank, const std::string& job, test::Pipe& says, test::Pipe& leave) {
    set(by_hand(rank, 2, where_));
    Context context;
    const Membership m = Membership::from_env(context, seconds(20));
    says.write_line(std::to_string(::getpid()));
    m.store->set(std::to_string(rank), job, soon());
    EXPECT_EQ(m.store->get(std::to_string(1 - rank), soon()), job) << "of another job";
    if (rank == 0) {
      m.store->get("read", soon());
    } else {
      m.store->set("read", "1", soon());
    }
    leave.read_line();
  }

  std::string where_;
};
INSTANTIATE_TEST_SUITE_P(Over, RacingJobs, ::testing::Values("port", "free_port", "file"),
                         [](const auto& p) { return p.param; });

// Rank 0 of job A was first, then comes rank 1 of B, and then rank 1 of A.
TEST_P(RacingJobs, RanksOfOneParentComeFirst) {
  test::Pipe zero_says, one_says, other_is_there, other_says, zero_leaves, one_leaves;
  auto a = shell({[&] { take_part(0, "A", zero_says, zero_leaves); },
                  [&] {
                    other_is_there.read_line();
                    std::this_thread::sleep_for(milliseconds(50));
                    take_part(1, "A", one_says, one_leaves);
                  }});
  zero_says.read_line();
  auto b = shell({[&] {
    set(by_hand(1, 2, where_));
    other_is_there.write_line("now");
    std::string text = "joined";
    try {
      Context context;
      Membership::from_env(context, seconds(3));
    } catch (const Error& e) {
      text = e.what();
    }
    other_says.write_line(text);
  }});
  const std::string said = other_says.read_line();
  if (said == "joined") {  // then rank 1 of A did not
    a.kill(SIGKILL);
    FAIL() << "ranks of two jobs have met";
  }
  EXPECT_THAT(said, HasSubstr(fmt::format(" a rank 1 already, process {} (on ", one_says.read_line())));
  for (test::Pipe* leaves : {&zero_leaves, &one_leaves}) leaves->write_line("now");
  EXPECT_EQ(a.wait(seconds(30)), (test::ExitStatus{0, 0}));
  EXPECT_EQ(b.wait(seconds(30)), (test::ExitStatus{0, 0}));
}

// Started from two terminals.
TEST_P(RacingJobs, RanksOfTwoParentsMayMeet) {
  test::Pipe says, zero_leaves, one_leaves;
  auto a = shell({[&] { take_part(0, "A", says, zero_leaves); }});
  says.read_line();
  auto b = shell({[&] { take_part(1, "A", says, one_leaves); }});
  says.read_line();
  for (test::Pipe* leaves : {&zero_leaves, &one_leaves}) leaves->write_line("now");
  EXPECT_EQ(a.wait(seconds(30)), (test::ExitStatus{0, 0}));
  EXPECT_EQ(b.wait(seconds(30)), (test::ExitStatus{0, 0}));
}

// The ranks got their numbers by hand, but the batch system names their job.
TEST_P(RacingJobs, TwoBatchJobsAreTold) {
  const auto in_batch = [&](int rank, const char* batch) {
    Variables v = by_hand(rank, 2, where_);
    v["SLURM_JOB_ID"] = batch;
    return v;
  };
  const Found zero(*this, in_batch(0, "4711"));
  const ErrorCode code = GetParam() == "free_port" ? ErrorCode::timeout : ErrorCode::bad_argument;
  expect_error(in_batch(1, "4712"), code,
               fmt::format("it belongs to another job: process {} (on ", zero.pid()), milliseconds(500));
  expect_error(
      in_batch(1, "4712"), code,
      "runs in SLURM_JOB_ID=4711, this process in SLURM_JOB_ID=4712; ranks of one job that spans both "
      "have the same WEFT_JOB",
      milliseconds(500));
  const Found one(*this, in_batch(1, "4711"));
}

// Rank 0 of job A serves, and has not taken its place yet.
TEST_F(RendezvousTest, WhoServesHasItsPlace) {
  TcpStoreServer server(context_.log(), {.served_by = fmt::format("{}\njob", claim_of_rank_zero())});
  expect_error(by_hand(0, 2, server.address()), ErrorCode::bad_argument,
               fmt::format("it has a rank 0 already, process {} (on ", ::getppid()));
}

TEST_F(RendezvousTest, AStoreFileThatIsLockedIsATimeoutAtTheDeadline) {
  const std::string path = folder_ / "store";
  const int other = ::open(path.c_str(), O_RDWR | O_CREAT | O_CLOEXEC, 0600);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  const auto start = Clock::now();
  expect_error(by_hand(0, 2, "file://" + path), ErrorCode::timeout,
               fmt::format("store: opening it: another process has held the lock of {} for ", path),
               milliseconds(200));
  EXPECT_LT(Clock::now() - start, seconds(10));
  ::close(other);
}

/// False: a plug-in that was not built.
bool is_here(const char* backend) {
  try {
    Context context;
    load_backend(context, backend);
    return true;
  } catch (const Error&) {
    return false;
  }
}

// A process that only serves a store; `where` becomes its address.
test::ChildProcess serving_process(std::string& where) {
  test::Pipe told;
  auto server = test::ChildProcess::fork([&] {
    Context context;
    const TcpStoreServer serves(context.log());
    told.write_line(serves.address());
    std::this_thread::sleep_for(seconds(60));
    return 0;
  });
  where = told.read_line();
  return server;
}

// If the server is stopped, nothing waits longer than its deadline, and the error names the server that does
// not answer.
TEST_F(RendezvousTest, AStoppedServerIsATimeoutAtTheDeadline) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  std::string where;
  auto server = serving_process(where);
  auto process = std::make_unique<Process>();
  Membership m = from(by_hand(0, 2, where), process->context);
  server.stop();
  const auto within = [&](const std::string& text, const std::function<void()>& call) {
    const auto began = Clock::now();
    try {
      call();
      ADD_FAILURE() << "no error; expected: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(e.what(), testing::ContainsRegex(text));
    }
    EXPECT_LT(Clock::now() - began, seconds(3)) << text;
  };
  // Nearly all of the deadline is left when the store is looked for.
  within(fmt::format("^WEFT_STORE is .*store: no server at {} within (500|49[0-9]) ms \\(the process that "
                     "listens there does not answer\\)$",
                     where),
         [&] {
           Context context;
           from(by_hand(1, 2, where), context, milliseconds(500));
         });
  m.deadline = milliseconds(500);
  for (const char* backend : {"shm", "gloo", "auto"}) {
    if (!is_here(backend)) continue;
    within(fmt::format("the server at {}: it did not answer within ", where),
           [&] { ProcessGroup::create(process->context, backend, m); });
  }
  // Nor does the place that was taken hold up the end.
  const auto began = Clock::now();
  m = {};
  process.reset();
  EXPECT_LT(Clock::now() - began, seconds(3));
}

// One that is stopped in the middle of it.
TEST_F(RendezvousTest, AServerThatStopsWhileAGroupIsMadeIsATimeoutAtTheDeadline) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  std::string where;
  auto server = serving_process(where);
  Process process;
  Membership m = from(by_hand(0, 2, where), process.context);
  m.deadline = seconds(1);
  for (const char* backend : {"shm", "gloo", "auto"}) {
    if (!is_here(backend)) continue;
    std::thread stops([&] {
      std::this_thread::sleep_for(milliseconds(300));
      server.stop();
    });
    const auto began = Clock::now();
    try {
      ProcessGroup::create(process.context, backend, m);
      ADD_FAILURE() << backend << ": no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
      EXPECT_THAT(e.what(), HasSubstr("the server at " + where));
    }
    EXPECT_LT(Clock::now() - began, seconds(5)) << backend;
    stops.join();
    server.resume();
  }
}

// ---- every launcher's ranks ----

Variables openmpi(int rank, int size) {
  return {{"OMPI_COMM_WORLD_RANK", std::to_string(rank)},
          {"OMPI_COMM_WORLD_SIZE", std::to_string(size)},
          {"OMPI_COMM_WORLD_LOCAL_SIZE", std::to_string(size)},
          {"PMIX_NAMESPACE", "633274369"}};
}

Variables slurm(int rank, int size) {
  return {{"SLURM_PROCID", std::to_string(rank)},
          {"SLURM_STEP_NUM_TASKS", std::to_string(size)},
          {"SLURM_STEP_ID", "3"},
          {"SLURM_JOB_ID", "4711"},
          {"SLURM_STEP_NUM_NODES", "1"},
          {"SLURM_NNODES", "2"},
          {"SLURM_NTASKS", "64"}};
}

Variables hydra(int rank, int size) {
  return {{"PMI_RANK", std::to_string(rank)},
          {"PMI_SIZE", std::to_string(size)},
          {"MPI_LOCALNRANKS", std::to_string(size)}};
}

Variables torchrun(int rank, int size, std::uint16_t port) {
  return {{"RANK", std::to_string(rank)},
          {"WORLD_SIZE", std::to_string(size)},
          {"LOCAL_WORLD_SIZE", std::to_string(size)},
          {"MASTER_ADDR", "127.0.0.1"},
          {"MASTER_PORT", std::to_string(port)},
          {"TORCHELASTIC_RUN_ID", "none"},
          {"TORCHELASTIC_RESTART_COUNT", "0"},
          {"TORCHELASTIC_USE_AGENT_STORE", "True"}};
}

// It ends what it has from its parent, which serves, has a place, and has published its address.
TEST_F(RendezvousTest, AForkedChildLeavesItsParentsJobAlone) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const Variables places[] = {by_hand(0, 2, fmt::format("127.0.0.1:{}", free_port())),
                              by_hand(0, 2, "file://" + (folder_ / "store").string()), openmpi(0, 2)};
  for (const Variables& where : places) {
    auto process = std::make_unique<Process>();
    const Membership m = from(where, process->context);
    const auto files = rendezvous_files();
    EXPECT_TRUE(test::run_in_child(
                    [&] {
                      process.reset();
                      return 0;
                    },
                    seconds(10))
                    .ok());
    EXPECT_EQ(m.store->add("n", 1, soon()), 1);
    EXPECT_EQ(rendezvous_files(), files);
    EXPECT_THAT(m.store->try_get("weft/rank/0", soon()).value_or(""), ::testing::EndsWith(" here"));
  }
}

TEST_F(RendezvousTest, RanksOfOneHostMeetByAFile) {
  expect_they_meet(3, [](int rank) { return openmpi(rank, 3); });
  expect_they_meet(3, [](int rank) { return hydra(rank, 3); });
  expect_they_meet(3, [](int rank) { return slurm(rank, 3); });
}

// A process has bound the port but does not listen: rank 0 takes it for a server. (A store on loopback only
// has no port.)
TEST_F(RendezvousTest, RankZeroSaysThatItCouldNotServe) {
  const int taken = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in address{};
  address.sin_family = AF_INET;
  address.sin_addr.s_addr = htonl(INADDR_ANY);
  socklen_t length = sizeof address;
  ASSERT_EQ(::bind(taken, reinterpret_cast<sockaddr*>(&address), length), 0);
  ASSERT_EQ(::getsockname(taken, reinterpret_cast<sockaddr*>(&address), &length), 0);
  expect_error(
      {{"WEFT_RANK", "0"},
       {"WEFT_WORLD_SIZE", "2"},
       {"WEFT_STORE", fmt::format("0.0.0.0:{}", ntohs(address.sin_port))},
       {"WEFT_STORE_SECRET", "a secret of some bytes"}},
      ErrorCode::timeout,
      "; this rank 0 could not serve there either: the address is not of this host, or its port is in use",
      milliseconds(300));
  ::close(taken);
}

// The file that tells where rank 0 serves.
TEST_F(RendezvousTest, ALimitOfTheSizeOfFilesIsAnError) {
  const auto result = test::run_in_child([&] {
    const rlimit none{};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &none), 0);
    expect_error({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", "localhost:0"}},
                 ErrorCode::system, ".new: File too large (ulimit -f is 0)", seconds(2));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

// torchrun's agent holds MASTER_PORT, here the test does.
TEST_F(RendezvousTest, UnderTorchrunsAgentRankZeroTakesAnotherPort) {
  TcpStoreServer agent(context_.log());
  expect_they_meet(3, [&](int rank) { return torchrun(rank, 3, agent.port()); });
}

TEST_F(RendezvousTest, EveryLaunchersRanksMeetAtWeftStore) {
  TcpStoreServer served(context_.log());
  const std::string where[] = {
      served.address(),                          // by somebody else: rank 0 finds the port taken
      fmt::format("localhost:{}", free_port()),  // by rank 0
      "localhost:0",                             // by rank 0, which writes its address into a file
      fmt::format("file://{}", (folder_ / "store").string()),
  };
  int job = 0;
  for (const std::string& store : where) {
    for (const auto& launcher : {openmpi, hydra, slurm}) {
      expect_they_meet(3, [&, token = std::to_string(job++)](int rank) {
        Variables v = launcher(rank, 3);
        v["WEFT_STORE"] = store;
        v["WEFT_JOB"] = token;
        v["OMPI_COMM_WORLD_LOCAL_SIZE"] = v["MPI_LOCALNRANKS"] = "1";  // as on several hosts
        if (launcher != openmpi) v.erase("OMPI_COMM_WORLD_LOCAL_SIZE");
        return v;
      });
    }
    expect_they_meet(2, [&, token = std::to_string(job++)](int rank) {
      Variables v = torchrun(rank, 2, 1);
      v["WEFT_STORE"] = store;
      v["WEFT_JOB"] = token;
      return v;
    });
    expect_they_meet(2, [&, token = std::to_string(job++)](int rank) {
      return Variables{{"WEFT_RANK", std::to_string(rank)},
                       {"WEFT_WORLD_SIZE", "2"},
                       {"WEFT_STORE", store},
                       {"WEFT_JOB", token}};
    });
  }
}

TEST_F(RendezvousTest, OneRankOfAnyLauncherIsAlone) {
  for (const Variables& v : {openmpi(0, 1), hydra(0, 1), slurm(0, 1), torchrun(0, 1, 1)}) {
    const Membership m = from(v);
    EXPECT_EQ(m.size, 1);
    EXPECT_EQ(m.store->add("n", 1), 1);
  }
  EXPECT_THAT(rendezvous_files(), IsEmpty());
}

// A batch script, and what it starts without srun, is no rank.
TEST_F(RendezvousTest, SlurmsVariablesHoldWithinAStepAlone) {
  Variables v = slurm(0, 4);
  v["SLURM_STEP_ID"] = "4294967291";  // SLURM_BATCH_SCRIPT
  EXPECT_EQ(from(v).size, 1);
  v.erase("SLURM_STEP_ID");
  EXPECT_EQ(from(v).size, 1);
}

// ---- several launchers at once ----

TEST_F(RendezvousTest, TheFirstOfSeveralLaunchersHolds) {
  const auto chosen = [&](std::initializer_list<Variables> sets) {
    Variables all{{"WEFT_STORE", "file://" + (folder_ / std::to_string(next_file_++)).string()}};
    for (const Variables& v : sets) all.insert(v.begin(), v.end());
    Process process;
    from(all, process.context);
    return process.lines();
  };
  const Variables weft{{"WEFT_RANK", "1"}, {"WEFT_WORLD_SIZE", "2"}};
  const std::string mpi_too =
      "rendezvous: rank 1 of 2 by weft run (WEFT_RANK, WEFT_WORLD_SIZE); set, but not used: Open MPI, Slurm";
  EXPECT_EQ(chosen({weft, openmpi(1, 2), slurm(0, 9)})[0], mpi_too);
  const auto differing = chosen({weft, openmpi(3, 4), slurm(0, 9)});
  EXPECT_EQ(differing[0], mpi_too);
  EXPECT_EQ(differing[1],
            "rendezvous: WEFT_RANK and WEFT_WORLD_SIZE say rank 1 of 2, but OMPI_COMM_WORLD_RANK and "
            "OMPI_COMM_WORLD_SIZE say rank 3 of 4; the first two are used");
  // mpirun within an allocation: one step per host starts its daemons.
  EXPECT_EQ(chosen({openmpi(3, 4), slurm(0, 2)})[0],
            "rendezvous: rank 3 of 4 by Open MPI (OMPI_COMM_WORLD_RANK, OMPI_COMM_WORLD_SIZE); set, but not "
            "used: Slurm");
  EXPECT_EQ(chosen({hydra(3, 4), slurm(0, 2)})[0],
            "rendezvous: rank 3 of 4 by Hydra (PMI_RANK, PMI_SIZE); set, but not used: Slurm");
  // srun --mpi=pmi2
  EXPECT_EQ(
      chosen({hydra(3, 4), slurm(3, 4)})[0],
      "rendezvous: rank 3 of 4 by Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS); set, but not used: Hydra");
  // The address of a torchrun job, exported for a job of srun.
  EXPECT_EQ(chosen({slurm(3, 4), {{"MASTER_ADDR", "node7"}, {"MASTER_PORT", "9"}}})[0],
            "rendezvous: rank 3 of 4 by Slurm (SLURM_PROCID, SLURM_STEP_NUM_TASKS)");
}

// ---- files by which ranks meet ----

TEST_F(RendezvousTest, TheFileIsGoneWhenAllHaveMet) {
  Process first, second;
  set(openmpi(0, 2));
  const Membership zero = Membership::from_env(first.context);
  ASSERT_EQ(rendezvous_files().size(), 1u);
  struct stat status {};
  ASSERT_EQ(::stat((folder_ / "weft" / rendezvous_files()[0]).c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0600u);
  ASSERT_EQ(::stat((folder_ / "weft").c_str(), &status), 0);
  EXPECT_EQ(status.st_mode & 07777, 0700u);
  set(openmpi(1, 2));
  const Membership one = Membership::from_env(second.context);
  EXPECT_THAT(rendezvous_files(), IsEmpty());
  EXPECT_THAT(second.lines()[1], ::testing::MatchesRegex("rendezvous: store at 127.0.0.1:[0-9]+ by interface "
                                                         "lo .127.0.0.1."));
}

TEST_F(RendezvousTest, TheFileIsGoneWhenRankZeroLeaves) {
  {
    Process first;
    from(openmpi(0, 2), first.context);
    EXPECT_EQ(rendezvous_files().size(), 1u);
  }
  EXPECT_THAT(rendezvous_files(), IsEmpty());
}

// Rank 0 of an earlier job of the same name was killed, and left its file. The new job's ranks wait for their
// own rank 0, whichever comes first.
TEST_F(RendezvousTest, AStaleFileIsNotTaken) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  test::Pipe pipe;
  auto earlier = test::ChildProcess::fork([&] {
    set(openmpi(0, 2));
    Context context;
    const Membership m = Membership::from_env(context);
    pipe.write_line("serving");
    std::this_thread::sleep_for(seconds(60));
    return 0;
  });
  pipe.read_line();
  earlier.kill(SIGKILL);
  ASSERT_TRUE(earlier.wait(seconds(10)));
  ASSERT_EQ(rendezvous_files().size(), 1u);
  expect_error(openmpi(1, 2), ErrorCode::timeout, "where it serves within 100 ms (it is not there)",
               milliseconds(100));
  expect_they_meet(2, [](int rank) { return openmpi(rank, 2); });
}

// A script starts two programs one after the other under one mpirun. Rank 1 of the second may arrive while
// rank 0 of the first is still leaving. It waits for rank 0 of the second program.
TEST_F(RendezvousTest, AnEarlierProgramsStoreIsNotTaken) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  test::Pipe go;
  auto second_one = test::ChildProcess::fork([&] {
    go.read_line();
    set(openmpi(1, 3));
    Context context;
    const Membership one = Membership::from_env(context, seconds(20));
    EXPECT_EQ(one.store->get("whose", soon()), "the second's");
    return 0;
  });
  auto first = std::make_unique<Process>();
  from(openmpi(0, 3), first->context);
  {
    Process first_one;
    from(openmpi(1, 3), first_one.context);
  }
  expect_error(openmpi(1, 3), ErrorCode::timeout, "has a rank 1 already, process ", milliseconds(200));
  go.write_line("the first program's store is there to be seen");
  std::this_thread::sleep_for(milliseconds(100));
  first.reset();
  Process second_zero;
  from(openmpi(0, 3), second_zero.context).store->set("whose", "the second's");
  EXPECT_EQ(second_one.wait(seconds(20)), (test::ExitStatus{0, 0}));
}

TEST_F(RendezvousTest, TwoProcessesOfRankZeroAreTold) {
  Process first;
  from(openmpi(0, 2), first.context);
  expect_error(
      openmpi(0, 2), ErrorCode::system,
      fmt::format(" was written by process {}, which still runs; expected one process of rank 0 in a "
                  "job",
                  ::getpid()));
}

TEST_F(RendezvousTest, AStoreFileOfAnEarlierJobIsTold) {
  const std::string path = folder_ / "store";
  const Variables v{{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", "file://" + path}};
  {
    Process first;
    from(v, first.context);
  }
  expect_error(v, ErrorCode::bad_argument,
               fmt::format("WEFT_STORE is \"file://{0}\": store: {0} holds a rank 0 already, process {1} (",
                           path, ::getpid()));
  Variables other = v;
  other["WEFT_JOB"] = "another";
  EXPECT_EQ(from(other).rank, 0);
}

TEST_F(RendezvousTest, AFolderOfOthersIsRefused) {
  const std::string folder = folder_ / "weft";
  const auto refused = [&](const std::string& text) { expect_error(openmpi(0, 2), ErrorCode::system, text); };
  std::filesystem::create_directory(folder);
  ::chmod(folder.c_str(), 0755);
  refused("Open MPI: rendezvous: the folder " + folder + " has mode 0755; expected 0700");
  std::filesystem::remove(folder);
  std::filesystem::create_directory(folder_ / "elsewhere");
  ::chmod((folder_ / "elsewhere").c_str(), 0700);
  std::filesystem::create_symlink(folder_ / "elsewhere", folder);
  refused("rendezvous: " + folder + " is not a folder (links are not followed)");
  std::filesystem::remove(folder);
  std::ofstream(folder) << "a file";
  refused("rendezvous: " + folder + " is not a folder (links are not followed)");
  std::filesystem::remove(folder);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can give a folder to another user";
  std::filesystem::create_directory(folder);
  ASSERT_EQ(::chown(folder.c_str(), 4711, 4711), 0);
  refused("rendezvous: the folder " + folder + " belongs to user 4711; expected 0");
}

// Another user has made the folder before. The ranks find each other in the next folder, even ranks that
// search first where that user has removed his folder meanwhile.
TEST_F(RendezvousTest, AFolderInTmpThatAnotherUserHasTakenIsPassedOver) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can play another user";
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const uid_t user = 3'000'000'000u + static_cast<uid_t>(::getpid());
  const std::string taken = fmt::format("/tmp/weft-{}", user), next = taken + "-1";
  std::filesystem::create_directory(taken);
  ::chmod(taken.c_str(), 0777);
  const auto vars = [](int rank) {
    Variables v = openmpi(rank, 2);
    v["XDG_RUNTIME_DIR"] = "";
    return v;
  };
  test::Pipe served;
  auto zero = test::ChildProcess::fork([&] {
    EXPECT_TRUE(test::become_user(user));
    set(vars(0));
    Context context;
    const Membership m = Membership::from_env(context, seconds(20));
    served.write_line("told");
    EXPECT_EQ(m.store->get("from one", soon()), "yes");
    return 0;
  });
  served.read_line();
  EXPECT_TRUE(std::filesystem::is_directory(next));
  std::filesystem::remove(taken);
  auto one = test::ChildProcess::fork([&] {
    EXPECT_TRUE(test::become_user(user));
    set(vars(1));
    Context context;
    const Membership m = Membership::from_env(context, seconds(20));
    m.store->set("from one", "yes");
    return 0;
  });
  EXPECT_EQ(one.wait(seconds(30)), (test::ExitStatus{0, 0}));
  EXPECT_EQ(zero.wait(seconds(30)), (test::ExitStatus{0, 0}));
  EXPECT_TRUE(std::filesystem::is_empty(next)) << "files stay behind";
  for (const std::string& folder : {taken, next}) std::filesystem::remove_all(folder);
}

// All names in /tmp are unusable, and there is no home folder: the error gives the reason for each.
TEST_F(RendezvousTest, WhereEveryFolderIsTakenItIsSaid) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can play another user";
  const uid_t user = 3'100'000'000u + static_cast<uid_t>(::getpid());
  std::vector<std::string> all{fmt::format("/tmp/weft-{}", user)};
  for (int i = 1; i <= 9; ++i) all.push_back(fmt::format("{}-{}", all[0], i));
  for (const std::string& folder : all) std::filesystem::create_directory(folder);
  const auto result = test::run_in_child([&] {
    EXPECT_TRUE(test::become_user(user));
    set({{"XDG_RUNTIME_DIR", ""}});
    const std::string text = test::error_text([] { RendezvousFile("x"); });
    for (const std::string& folder : all)
      EXPECT_THAT(text, HasSubstr(fmt::format("the folder {} belongs to user 0; expected {}", folder, user)));
    EXPECT_THAT(
        text, ::testing::EndsWith("; expected XDG_RUNTIME_DIR to be a folder of this user's, or WEFT_STORE"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
  for (const std::string& folder : all) std::filesystem::remove(folder);
}

TEST_F(RendezvousTest, AnAbsentRuntimeFolderGivesWayToTmp) {
  set({{"XDG_RUNTIME_DIR", (folder_ / "absent").string()}});
  EXPECT_THAT(RendezvousFile("x").path(), HasSubstr(fmt::format("/tmp/weft-{}/meet-", ::geteuid())));
}

TEST_F(RendezvousTest, AStoppedWriterOfTheFolderIsATimeout) {
  set({});
  const RendezvousFile place("key");
  const int other = ::open((folder_ / "weft").c_str(), O_RDONLY | O_DIRECTORY | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  EXPECT_EQ(test::error_text([&] { place.publish("a:1", Deadline::after(milliseconds(50))); }),
            "timeout: rendezvous: another process holds the lock of " + (folder_ / "weft").string());
  ::close(other);
  place.publish("a:1", soon());
  EXPECT_EQ(place.find(), "a:1");
  EXPECT_FALSE(RendezvousFile("another key").find());
  place.remove("b:1");
  EXPECT_EQ(place.find(), "a:1") << "the file tells of another store";
  place.remove("a:1");
  EXPECT_FALSE(place.find());
}

TEST_F(RendezvousTest, GarbageInTheFileCountsForNothing) {
  set({});
  const RendezvousFile place("key");
  for (const char* text : {"", "hello", "weft rendezvous 1\n", "weft rendezvous 1\nother\na:1\n1 1\n",
                           "weft rendezvous 1\nkey\na:1\n", "weft rendezvous 1\nkey\na:1\n1 0\n"}) {
    std::ofstream(place.path()) << text;
    EXPECT_FALSE(place.find()) << text;
  }
  place.publish("a:1", soon());
  EXPECT_EQ(place.find(), "a:1");
}

TEST_F(RendezvousTest, AFileThatOthersMayWriteIsRefused) {
  set({});
  const RendezvousFile place("key");
  place.publish("a:1", soon());
  ASSERT_EQ(::chmod(place.path().c_str(), 0622), 0);
  EXPECT_EQ(test::error_text([&] { place.find(); }),
            "system: rendezvous: " + place.path() +
                " has mode 0622; expected one that only its owner may write, such as 0600");
}

TEST(StartTime, TellsProcessesApart) {
  EXPECT_TRUE(start_time_of(::getpid()));
  auto child = test::ChildProcess::fork([] { return 0; });
  const pid_t pid = child.pid();
  ASSERT_TRUE(child.wait(seconds(10)));
  EXPECT_FALSE(start_time_of(pid));
  EXPECT_FALSE(start_time_of(-1));
}

// ---- launchers that are installed ----

/// Runs a command of the shell; its output, both kinds. `status` is the shell's.
std::string run_shell(const std::string& command, int& status) {
  std::string text;
  FILE* const pipe = ::popen(("timeout 60 sh -c '" + command + "' 2>&1").c_str(), "r");
  char buffer[4096];
  for (std::size_t got = 0; (got = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) text.append(buffer, got);
  status = ::pclose(pipe);
  return text;
}

void expect_meet_under(const std::string& mpirun) {
  int status = 0;
  run_shell("command -v " + mpirun.substr(0, mpirun.find(' ')), status);
  if (status != 0) GTEST_SKIP() << mpirun.substr(0, mpirun.find(' ')) << " is not installed";
  const std::string once = run_shell(mpirun + " -n 3 " WEFT_MEET, status);
  EXPECT_EQ(status, 0) << once;
  for (int rank = 0; rank < 3; ++rank) EXPECT_THAT(once, HasSubstr(fmt::format("rank {} of 3: 33\n", rank)));
  // By a script, twice: two jobs of one name, one after the other.
  const std::string twice = run_shell(mpirun + " -n 2 sh -c \"" WEFT_MEET "; " WEFT_MEET "\"", status);
  EXPECT_EQ(status, 0) << twice;
  EXPECT_THAT(twice, HasSubstr("rank 0 of 2: 21\n"));
  const auto lines = std::count(twice.begin(), twice.end(), '\n');
  EXPECT_EQ(lines, 4) << twice;
}

TEST_F(RendezvousTest, RanksOfMpirunOpenMpiMeet) {
  set({});
  expect_meet_under("mpirun.openmpi --allow-run-as-root --oversubscribe");
  EXPECT_THAT(rendezvous_files(), IsEmpty());
}

TEST_F(RendezvousTest, RanksOfMpirunMpichMeet) {
  set({});
  expect_meet_under("mpirun.mpich");
  EXPECT_THAT(rendezvous_files(), IsEmpty());
}

}  // namespace
}  // namespace weft::rendezvous_test
