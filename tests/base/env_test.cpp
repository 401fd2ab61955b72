#include "weft/base/env.hpp"

#include <gtest/gtest.h>
#include <sys/auxv.h>
#include <sys/stat.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <map>
#include <set>
#include <sstream>
#include <string>

#include "support/errors.hpp"
#include "support/other_user.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"

namespace weft::env_test {
namespace {

struct Env : testing::Test {
  ~Env() override {
    for (const char* const name : {"WEFT_RANK", "WEFT_SINGLE_COPPY", "WEFT_QUITE_ANOTHER", "WEFT_TEST_OWN"})
      ::unsetenv(name);
  }
};

TEST_F(Env, TableHasEachVariableOnce) {
  std::set<std::string_view> names;
  for (const env::Variable& v : env::variables()) {
    EXPECT_TRUE(names.insert(v.name).second) << v.name;
    EXPECT_FALSE(v.fallback.empty()) << v.name;
    EXPECT_FALSE(v.meaning.empty()) << v.name;
    EXPECT_FALSE(v.type.empty()) << v.name;
    EXPECT_FALSE(v.reader.empty()) << v.name;
  }
  EXPECT_TRUE(names.count("WEFT_LOG"));
}

TEST_F(Env, EmptyCountsAsUnset) {
  EXPECT_FALSE(env::get("WEFT_RANK"));
  ::setenv("WEFT_RANK", "", 1);
  EXPECT_FALSE(env::get("WEFT_RANK"));
  EXPECT_FALSE(env::get_int("WEFT_RANK", 0, 9));
  ::setenv("WEFT_RANK", "a b", 1);
  EXPECT_EQ(env::get("WEFT_RANK"), "a b");
}

// The test runs itself as a setuid program of another user, called by this process.
TEST_F(Env, AProgramWithMoreRightsThanItsCallerIgnoresVariables) {
  constexpr int kNotPrivileged = 77;
  if (::getauxval(AT_SECURE) != 0) {
    ASSERT_STREQ(std::getenv("WEFT_RANK"), "7");
    EXPECT_FALSE(env::get("WEFT_RANK"));
    ::_exit(HasFailure() ? 1 : 0);  // at once: a leak checker cannot look into a setuid program
  }
  if (std::getenv("WEFT_TEST_SETUID") != nullptr) ::_exit(kNotPrivileged);
  if (::geteuid() != 0) GTEST_SKIP() << "only root can make a setuid program of another user";
  const test::TemporaryFolder folder;
  const std::string program = folder / "setuid";
  std::filesystem::copy_file("/proc/self/exe", program);
  ASSERT_EQ(::chmod(folder.path().c_str(), 0755), 0);
  ASSERT_EQ(::chown(program.c_str(), test::kNobody, static_cast<gid_t>(-1)), 0);
  ASSERT_EQ(::chmod(program.c_str(), 04755), 0);
  const test::ProcessResult result = test::run_in_child([&] {
    ::setenv("WEFT_TEST_SETUID", "1", 1);
    ::setenv("WEFT_RANK", "7", 1);
    ::execl(program.c_str(), program.c_str(),
            "--gtest_filter=Env.AProgramWithMoreRightsThanItsCallerIgnoresVariables", nullptr);
    return 1;
  });
  if (result.status.code == kNotPrivileged)
    GTEST_SKIP() << program << " is on a file system mounted without setuid";
  EXPECT_TRUE(result.ok()) << to_string(result);
}

TEST_F(Env, IntegersAreReadWholeAndWithinTheirRange) {
  ::setenv("WEFT_RANK", "7", 1);
  EXPECT_EQ(env::get_int("WEFT_RANK", 0, 9), 7);
  ::setenv("WEFT_RANK", "-3", 1);
  EXPECT_EQ(env::get_int("WEFT_RANK", -3, 9), -3);
  for (const std::string text : {"x", "7x", " 7", "10", "-1", "99999999999999999999", "1.5"}) {
    ::setenv("WEFT_RANK", text.c_str(), 1);
    EXPECT_EQ(test::error_text([] { env::get_int("WEFT_RANK", 0, 9); }),
              "bad_argument: WEFT_RANK is \"" + text + "\"; expected an integer from 0 to 9");
  }
  ::setenv("WEFT_RANK", "7\x1b[2J", 1);  // could clear the terminal that the text is written to
  EXPECT_EQ(test::error_text([] { env::get_int("WEFT_RANK", 0, 9); }),
            "bad_argument: WEFT_RANK is \"7?[2J\"; expected an integer from 0 to 9");
}

TEST_F(Env, AnUnknownNameIsReportedWithTheNearestKnownOne) {
  ::setenv("WEFT_SINGLE_COPPY", "off", 1);
  ::setenv("WEFT_QUITE_ANOTHER", "1", 1);
  ::setenv("WEFT_TEST_OWN", "1", 1);
  std::map<std::string, std::string_view> found;
  for (const env::Unknown& v : env::unknown_variables()) found[v.name] = v.nearest;
  EXPECT_EQ(found, (std::map<std::string, std::string_view>{{"WEFT_SINGLE_COPPY", "WEFT_SINGLE_COPY"},
                                                            {"WEFT_QUITE_ANOTHER", ""}}));
}

TEST_F(Env, ThePageIsTheGeneratedOne) {
  std::ifstream file(WEFT_ENVIRONMENT_MD);
  ASSERT_TRUE(file) << WEFT_ENVIRONMENT_MD << " is missing";
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), env::page()) << "make it anew: weft doctor --environment > docs/environment.md";
}

}  // namespace
}  // namespace weft::env_test
