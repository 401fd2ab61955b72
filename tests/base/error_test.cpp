// Which limit of this process an errno may mean.
#include "weft/base/error.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <utility>

#include "base/signals.hpp"
#include "support/errors.hpp"
#include "support/other_user.hpp"
#include "support/processes.hpp"

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
