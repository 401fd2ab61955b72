// The backend "auto": its choice in each situation, and its log line.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <sched.h>
#include <sys/mount.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <mutex>

#include "support/processes.hpp"
#include "support/run_ranks.hpp"
#include "support/seccomp.hpp"
#include "support/temporary_folder.hpp"
#include "support/values.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::auto_test {
namespace {

using testing::HasSubstr;
using testing::StartsWith;

// Ranks as threads, each on a host of that name; what they logged.
struct Job {
  std::string log;
  std::mutex mutex;

  void run(const std::vector<std::string>& hosts, const std::function<void(Rank&, Membership)>& body) {
    RankOptions options;
    options.context.log_level = LogLevel::info;
    options.context.log_sink = [&](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      log.append(line).append("\n");
    };
    run_ranks(
        Ranks::threads, static_cast<int>(hosts.size()),
        [&](Rank& r) {
          const ScopedTestHooks hooks(r.context, r.rank, {.host = hosts[static_cast<std::size_t>(r.rank)]});
          body(r, r.membership("chosen"));
        },
        options);
  }
};

void sum_of_ranks(Rank& r, ProcessGroup& group) {
  float x = static_cast<float>(r.rank + 1);
  group.all_reduce(view(&x, 1), view(&x, 1)).wait();
  EXPECT_EQ(x, static_cast<float>(r.size * (r.size + 1) / 2));
}

TEST(Auto, OneHostIsSharedMemory) {
  Job job;
  job.run({"", "", ""}, [](Rank& r, const Membership& m) {
    ProcessGroup group = ProcessGroup::create(r.context, "auto", m);
    EXPECT_EQ(group.backend(), "shm");
    sum_of_ranks(r, group);
  });
  EXPECT_THAT(job.log, HasSubstr("group \"chosen\": auto takes shm: all ranks share this host"));
}

TEST(Auto, TakesWhatTheEnvironmentSays) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  ::setenv("WEFT_BACKEND", "gloo", 1);
  Job job;
  job.run({"", "", ""}, [](Rank& r, const Membership& m) {
    ProcessGroup group = ProcessGroup::create(r.context, "auto", m);
    EXPECT_EQ(group.backend(), "gloo");
    sum_of_ranks(r, group);
  });
  ::unsetenv("WEFT_BACKEND");
  EXPECT_THAT(job.log, HasSubstr("group \"chosen\": auto takes gloo: WEFT_BACKEND says so"));
}

TEST(Auto, ANameOfTheProgramsOwnIsTakenAndSaid) {
  ::setenv("WEFT_BACKEND", "gloo", 1);
  Job job;
  job.run({"", "", ""}, [](Rank& r, const Membership& m) {
    ProcessGroup group = ProcessGroup::create(r.context, "shm", m);
    EXPECT_EQ(group.backend(), "shm");
    sum_of_ranks(r, group);
  });
  ::unsetenv("WEFT_BACKEND");
  EXPECT_THAT(job.log, HasSubstr("group \"chosen\": the program asks for shm by name, so WEFT_BACKEND=gloo "
                                 "is ignored; \"auto\" would use it"));
}

TEST(Auto, AllRanksMustBeToldTheSame) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    if (r.rank == 1) ::setenv("WEFT_BACKEND", "gloo", 1);
    const Error e = error_of([&] { ProcessGroup::create(r.context, "auto", r.membership()); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(e.what(), r.rank == 0 ? "group \"world\": WEFT_BACKEND is gloo on rank 1, auto on rank 0; "
                                         "expected the same on all ranks"
                                       : "group \"world\": WEFT_BACKEND is auto on rank 0, gloo on rank 1; "
                                         "expected the same on all ranks");
  });
}

TEST(Auto, AValueThatNamesNoTransportIsRefusedByTheVariablesName) {
  const auto expect = [](const char* value, int size, const std::string& text) {
    run_ranks(Ranks::processes, size, [&](Rank& r) {
      ::setenv("WEFT_BACKEND", value, 1);
      const Error e = error_of([&] { ProcessGroup::create(r.context, "auto", r.membership()); });
      EXPECT_THAT(e.what(), StartsWith(text));
    });
  };
  for (const int size : {1, 2}) {
    expect("zzz", size, "WEFT_BACKEND is \"zzz\": backend \"zzz\" was not found: it is not built in");
    expect("a b", size,
           "WEFT_BACKEND is \"a b\": backend \"a b\" is no name; expected letters, digits, '-' and '_'");
    expect("a\nb", size, "WEFT_BACKEND is \"a?b\": backend \"a?b\" is no name; expected letters");
  }
}

TEST(Auto, SeveralHostsAreGloo) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  ::setenv("WEFT_INTERFACE", "lo", 1);
  Job job;
  job.run({"a", "b", "a"}, [](Rank& r, const Membership& m) {
    ProcessGroup group = ProcessGroup::create(r.context, "auto", m);
    EXPECT_EQ(group.backend(), "gloo");
    sum_of_ranks(r, group);
    // Its ranks of one host have no need of it.
    const int mates[] = {0, 2};
    if (r.rank != 1) {
      const ProcessGroup pair = group.subgroup("pair", mates);
      EXPECT_EQ(pair.backend(), "shm");
    }
  });
  ::unsetenv("WEFT_INTERFACE");
  EXPECT_THAT(job.log, HasSubstr("group \"chosen\": auto takes gloo: the ranks are on several hosts, and not "
                                 "MPI: no mpirun started it"));
}

TEST(Auto, OffItsHostGlooMustBeToldWhereToListen) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  Job job;
  job.run({"a", "b"}, [](Rank& r, const Membership& m) {
    const Error e = error_of([&] { ProcessGroup::create(r.context, "auto", m); });
    EXPECT_EQ(e.code(), ErrorCode::unsupported);
    EXPECT_STREQ(e.what(),
                 "group \"chosen\": the ranks are on several hosts and WEFT_INTERFACE is not set; expected "
                 "the network interface that gloo may listen on");
  });
}

/// The lines that rank's Context logs at info.
struct Lines {
  std::mutex mutex;
  std::string text;
  LogSink sink() {
    return [this](LogLevel, std::string_view line) {
      const std::lock_guard lock(mutex);
      text.append(line).append("\n");
    };
  }
};

/// A rank of two processes that meet at that port.
Membership pair_of(int rank, const std::string& port) {
  Membership m;
  m.rank = rank;
  m.size = 2;
  m.name = "chosen";
  m.process_rank = 0;
  m.deadline = std::chrono::seconds(20);
  m.store =
      make_tcp_store("127.0.0.1", static_cast<std::uint16_t>(std::stoi(port)), Deadline::after(m.deadline));
  return m;
}

// The filter of a sandbox refuses one rank memory that others can map. All ranks use gloo, and the log says
// why.
TEST(Auto, WithoutMemfdTheRanksTakeGloo) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  Pipe where[2];
  std::vector<ChildProcess> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.push_back(ChildProcess::fork([&, rank] {
      if (rank == 1) forbid(SYS_memfd_create);
      Lines lines;
      Context context({.log_level = LogLevel::info, .log_sink = lines.sink()});
      const Membership m = pair_of(rank, where[rank].read_line());
      ProcessGroup group = ProcessGroup::create(context, "auto", m);
      EXPECT_EQ(group.backend(), "gloo");
      float x = static_cast<float>(rank + 1);
      group.all_reduce(view(&x, 1), view(&x, 1)).wait();
      EXPECT_EQ(x, 3.0f);
      EXPECT_THAT(lines.text, HasSubstr("group \"chosen\": auto takes gloo: rank 1 has no memory that others "
                                        "can map (memfd_create: Operation not permitted), and not MPI: "));
      return 0;
    }));
  Logger log;
  TcpStoreServer server(log);
  for (Pipe& pipe : where) pipe.write_line(std::to_string(server.port()));
  for (ChildProcess& rank : ranks) EXPECT_EQ(rank.wait(std::chrono::seconds(30)), (ExitStatus{0, 0}));
}

// Takes /proc away from this process and its children. Not so in a chroot, whose root is no mount.
bool hide_proc() {
  return ::unshare(CLONE_NEWNS) == 0 && ::mount(nullptr, "/", nullptr, MS_REC | MS_PRIVATE, nullptr) == 0 &&
         ::mount("none", "/proc", "tmpfs", 0, nullptr) == 0;
}

// Without /proc a process cannot determine its host. That does not mean that it is on another host.
TEST(Auto, WithoutProcTheHostIsUnknownAndItIsSaid) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can take /proc away";
  if (ChildProcess::fork([] { return hide_proc() ? 0 : 1; }).wait(std::chrono::seconds(30)) !=
      ExitStatus{0, 0})
    GTEST_SKIP() << "a mount namespace of its own is refused";
  Pipe where[2];
  std::vector<ChildProcess> ranks;
  for (int rank = 0; rank < 2; ++rank)
    ranks.push_back(ChildProcess::fork([&, rank] {
      if (rank == 1 && !hide_proc()) return 1;
      Context context;
      const Membership m = pair_of(rank, where[rank].read_line());
      const Error e = error_of([&] { ProcessGroup::create(context, "shm", m); });
      EXPECT_THAT(e.what(), HasSubstr("cannot determine its host, where memory could be shared: "
                                      "/proc/sys/kernel/random/boot_id or /proc/self/ns cannot be read (is "
                                      "/proc mounted?)"));
      if (WEFT_HAVE_GLOO) {
        const Error other = error_of([&] { ProcessGroup::create(context, "auto", m); });
        EXPECT_THAT(other.what(),
                    HasSubstr("group \"chosen\": a rank cannot determine its host "
                              "(/proc/sys/kernel/random/boot_id or /proc/self/ns cannot be read "
                              "(is /proc mounted?)) and WEFT_INTERFACE is not set"));
      }
      return 0;
    }));
  Logger log;
  TcpStoreServer server(log);
  for (Pipe& pipe : where) pipe.write_line(std::to_string(server.port()));
  for (ChildProcess& rank : ranks) EXPECT_EQ(rank.wait(std::chrono::seconds(30)), (ExitStatus{0, 0}));
}

// Under Open MPI's mpirun, if not every rank can load its plug-in, all ranks use gloo.
TEST(Auto, AnMpiThatCannotBeLoadedIsSaid) {
  if (!WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  ::setenv("OMPI_COMM_WORLD_RANK", "0", 1);
  ::setenv("OMPI_COMM_WORLD_SIZE", "2", 1);
  const TemporaryFolder folder;
  std::ofstream(folder / "libweft_backend_mpi-openmpi.so") << "this is no library";
  ::setenv("WEFT_BACKEND_PATH", folder.path().c_str(), 1);
  ::setenv("WEFT_INTERFACE", "lo", 1);
  Job job;
  job.run({"a", "b"}, [](Rank& r, const Membership& m) {
    ProcessGroup group = ProcessGroup::create(r.context, "auto", m);
    EXPECT_EQ(group.backend(), "gloo");
    sum_of_ranks(r, group);
  });
  for (const char* name :
       {"OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE", "WEFT_BACKEND_PATH", "WEFT_INTERFACE"})
    ::unsetenv(name);
  EXPECT_THAT(job.log, HasSubstr("libweft_backend_mpi-openmpi.so: cannot be loaded"));
}

}  // namespace
}  // namespace weft::test::auto_test
