// Which limit of this process an errno may mean.
#include "weft/base/error.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <filesystem>
#include <fstream>
#include <utility>

#include "base/errors/pids_limit.hpp"
#include "base/signals.hpp"
#include "support/errors.hpp"
#include "support/other_user.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"

namespace weft::error_test {
namespace {

using ::testing::HasSubstr;

TEST(SystemWords, NameTheLimitThatWasMet) {
#ifdef WEFT_EMULATED
  GTEST_SKIP() << "qemu-user keeps limits of memory from the programs that it runs";
#endif
  const auto result = test::run_in_child([] {
    const auto limit = [](auto resource, rlim_t value) {
      rlimit l{};
      ::getrlimit(resource, &l);
      l.rlim_cur = value;
      EXPECT_EQ(::setrlimit(resource, &l), 0);
    };
    limit(RLIMIT_NOFILE, 12);
    EXPECT_EQ(system_words(EMFILE), "Too many open files (ulimit -n is 12)");
    limit(RLIMIT_FSIZE, 4096);
    EXPECT_EQ(system_words(EFBIG), "File too large (ulimit -f is 4)");
    limit(RLIMIT_NPROC, 7);
    EXPECT_THAT(system_words(EAGAIN), HasSubstr("(ulimit -u is 7)"));
    limit(RLIMIT_DATA, rlim_t{1} << 60);
    EXPECT_EQ(system_words(ENOMEM), "Cannot allocate memory (ulimit -d is 1125899906842624)");
    EXPECT_THAT(system_words(EAGAIN), HasSubstr("(ulimit -d is 1125899906842624)"));
    for (const auto& [words, expected] :
         {std::pair("a library: File too large", "(ulimit -f is 4)"),
          {"Cannot allocate memory, it says", "(ulimit -d is 1125899906842624)"},
          {"Resource temporarily unavailable", "(ulimit -u is 7)"}})
      EXPECT_THAT(with_limits(words), HasSubstr(expected));
    EXPECT_EQ(with_limits("no reason"), "no reason");
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

// Finds the nearest full cgroup of the process, in both versions of cgroups.
TEST(PidsLimit, IsThatOfTheGroupThatIsFull) {
  const test::TemporaryFolder mount;
  const auto group = [&](const std::string& path, const char* most, const char* now) {
    const auto folder = mount / path;
    std::filesystem::create_directories(folder);
    std::ofstream(folder / "pids.max") << most << "\n";
    std::ofstream(folder / "pids.current") << now << "\n";
  };
  const std::string at = mount.path().string();
  group("job", "20", "20");
  group("job/task", "max", "20");
  group("roomy", "20", "19");
  group("pids/old", "7", "8");
  EXPECT_EQ(met_pids_max("0::/job/task\n", at), "20");
  EXPECT_EQ(met_pids_max("0::/job\n", at), "20");
  EXPECT_EQ(met_pids_max("0::/roomy\n", at), "");
  EXPECT_EQ(met_pids_max("0::/absent/group\n", at), "");
  EXPECT_EQ(met_pids_max("12:cpu,cpuacct:/job\n7:pids:/old\n", at), "7");
  EXPECT_EQ(met_pids_max("7:pids:/\n0::/", at), "");
  for (const char* damaged : {"", "\n", ":", "::", "0:", "x", "0::", "::::\n:::"})
    EXPECT_EQ(met_pids_max(damaged, at), "");
}

// Root has no limit of processes.
TEST(SystemWords, AThreadThatCannotBeHadNamesTheLimitOfProcesses) {
  const auto result = test::run_in_child([] {
    const bool other = ::geteuid() != 0 || test::become_user(3'200'000'000u + static_cast<uid_t>(::getpid()));
    EXPECT_TRUE(other);
    const rlimit one{.rlim_cur = 1, .rlim_max = 1};
    EXPECT_EQ(::setrlimit(RLIMIT_NPROC, &one), 0);
    const std::string text = test::error_text([] { start_thread("a helper", [] {}).join(); });
    EXPECT_THAT(text, HasSubstr("system: a helper: no thread: Resource temporarily unavailable"));
    EXPECT_THAT(text, HasSubstr("(ulimit -u is 1)"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

}  // namespace
}  // namespace weft::error_test
