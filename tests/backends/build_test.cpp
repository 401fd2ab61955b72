// Two builds of weft in one job: ranks that make a group get an error, over every transport, before anything
// is shared.
#include "backends/build.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <regex.h>
#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <iterator>
#include <sstream>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "support/values.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/group/process_group.hpp"
#include "weft/store/file.hpp"

namespace weft::test::build_test {
namespace {

using testing::ElementsAre;
using testing::HasSubstr;
using testing::MatchesRegex;
using testing::StartsWith;

constexpr auto kLimit = std::chrono::seconds(20);

class Builds : public testing::Test {
 protected:
  GroupInit at(int rank, int size) {
    return {.context = context_,
            .store = store_,
            .token = "token",
            .name = "g",
            .rank = rank,
            .size = size,
            .deadline = Deadline::after(kLimit)};
  }
  Context context_;
  std::shared_ptr<Store> store_ = make_local_store();
};

TEST_F(Builds, AreNamedByVersionAndLayout) {
  const std::string word = build_word(1, 0);
  EXPECT_THAT(word, MatchesRegex("weft-[0-9.]+-[0-9a-f]+"));
  EXPECT_THAT(describe_build(word), MatchesRegex("weft [0-9.]+ \\(layout [0-9a-f]+\\)"));
  EXPECT_EQ(describe_build("weft-0.2.0-rc1-00001234"), "weft 0.2.0-rc1 (layout 00001234)");
  EXPECT_EQ(describe_build("3"), "another weft (\"3\")");
  EXPECT_EQ(word, build_word(1, 0));
  EXPECT_NE(word, build_word(2, 0));
}

// Ranks whose transports have different constants. If one of three differs, all ranks get the error.
TEST_F(Builds, OfTwoLayoutsDoNotJoin) {
  std::string said[3];
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 3; ++r)
      ranks.emplace_back([&, r] {
        said[r] = error_text(ErrorCode::mismatch, [&] { join(at(r, 3), "info", "of it", r == 1 ? 8 : 7); });
      });
  }
  const std::string most = describe_build(build_word(7, 0)), one = describe_build(build_word(8, 0));
  const auto expected = [&](int low, int high, int self) {
    return fmt::format(
        "group \"g\": rank {} runs {}, rank {} {}; expected the same build of weft on all ranks [rank {}]",
        low, low == 1 ? one : most, high, high == 1 ? one : most, self);
  };
  EXPECT_EQ(said[0], expected(0, 1, 0));
  EXPECT_EQ(said[1], expected(0, 1, 1));
  EXPECT_EQ(said[2], expected(1, 2, 2));
}

// The info of a rank as written by an older weft, which did not include its build.
TEST_F(Builds, AnOldInfoIsAMismatch) {
  store_->set("token/info/all", "7:2 of it1:x", Deadline::never());
  const Error e = error_of([&] { join(at(1, 2), "info", {}, 0); });
  EXPECT_EQ(e.code(), ErrorCode::mismatch);
  EXPECT_THAT(e.what(), StartsWith("group \"g\": rank 0 runs another weft (\"2\"), rank 1 weft "));
  EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(0, 1));
}

// The error comes before the transport shares anything; with MPI, before MPI_Init.
TEST_F(Builds, AreComparedByEveryTransport) {
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  struct Row {
    const char *backend, *key;
  };
  for (const Row& row : {Row{"shm", "shm"}, Row{"auto", "auto"}, Row{"gloo", "gloo"},
                         Row{"mpi-openmpi", "mpi/here"}, Row{"mpi-mpich", "mpi/here"}}) {
    SCOPED_TRACE(row.backend);
    // Each MPI runs in its own process, because one process can have only one MPI.
    const ProcessResult result = run_in_child([&] {
      Context context;
      try {
        load_backend(context, row.backend);
      } catch (const Error& e) {
        return e.code() == ErrorCode::unsupported ? 0 : 1;  // not built here
      }
      Membership m;
      m.store = store_;
      m.size = 2;
      m.deadline = kLimit;
      GroupInit other = at(1, 2);
      other.token = "weft/world#1";
      announce(other, row.key, "some info", 12345);
      const std::string said =
          error_text(ErrorCode::mismatch, [&] { ProcessGroup::create(context, row.backend, m); });
      EXPECT_THAT(said, StartsWith("group \"world\": rank 0 runs weft "));
      EXPECT_THAT(said, HasSubstr(", rank 1 " + describe_build(build_word(12345, 1)) +
                                  "; expected the same build of weft on all ranks [rank 0]"));
      return 0;
    });
    EXPECT_TRUE(result.ok()) << to_string(result);
  }
}

// A transport from outside weft does not report its build itself.
TEST_F(Builds, AreComparedForPluginsFromOutside) {
  ::setenv("WEFT_BACKEND_PATH", WEFT_TEST_PLUGINS, 1);
  announce(at(1, 2), "build", {}, 12345);
  const Error e = error_of([&] { load_backend(context_, "sound")(at(0, 2)); });
  ::unsetenv("WEFT_BACKEND_PATH");
  EXPECT_EQ(e.code(), ErrorCode::mismatch);
  EXPECT_THAT(e.what(), HasSubstr("rank 1 " + describe_build(build_word(12345, 1))));
}

TEST_F(Builds, AComparisonLeavesNothing) {
  {
    std::vector<std::jthread> ranks;
    for (int r = 0; r < 3; ++r) ranks.emplace_back([&, r] { compare_builds(at(r, 3)); });
  }
  for (const char* key : {"token/build/0", "token/build/1", "token/build/2", "token/build/count",
                          "token/build/all", "token/build/done"})
    EXPECT_FALSE(store_->try_get(key, Deadline::never())) << key;
}

// One process has a library with another threshold for inline payloads, and the other process has this
// library. Without the comparison every element of the sum was wrong on both, and both succeeded.
TEST_F(Builds, TwoInOneJobOfTwoProcesses) {
#ifndef WEFT_OTHER_BUILD
  GTEST_SKIP() << "the other build needs the tools";
#else
  if (!kThreadsInForks) GTEST_SKIP() << kNoThreadsInForks;
  const TemporaryFolder folder;
  const std::string file = folder / "store", said = folder / "said";
  ChildProcess other = ChildProcess::fork([&] {
    ::setenv("WEFT_MUTANT", "mixed_builds", 1);
    ::execl(WEFT_OTHER_BUILD, WEFT_OTHER_BUILD, file.c_str(), said.c_str(), nullptr);
    return 1;
  });
  const ProcessResult result = run_in_child([&] {
    Context context;
    Membership m;
    m.store = make_file_store(file);
    m.size = 2;
    m.deadline = kLimit;
    const Error e = error_of([&] { ProcessGroup::create(context, "shm", m); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(), MatchesRegex("group \"world\": rank 0 runs weft .*, rank 1 weft .*\\[rank 0\\]"));
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
  EXPECT_EQ(other.wait(kLimit), (ExitStatus{0, 0}));
  std::string text;
  std::getline(std::ifstream(said), text);
  EXPECT_THAT(text, StartsWith("mismatch: group \"world\": rank 0 runs weft "));
#endif
}

// A struct that is added to the layouts of shared memory is added to their digest, too.
TEST_F(Builds, TheDigestOfSharedMemoryHasAllItsConstants) {
  const auto read = [](const std::string& name) {
    std::ifstream file(fmt::format("{}/src/backends/shm/{}", WEFT_SOURCE_DIR, name));
    return std::string(std::istreambuf_iterator<char>(file), {});
  };
  const std::string digest = read("layout.hpp");
  // The text in the second pair of brackets of each line that begins with the pattern. (gcc 12 warns of
  // std::regex under the sanitizers.)
  const auto all_of = [&](const std::string& file, const char* pattern, const std::string& form) {
    regex_t regex;
    ASSERT_EQ(::regcomp(&regex, pattern, REG_EXTENDED), 0);
    int found = 0;
    std::istringstream lines(file);
    for (std::string line; std::getline(lines, line);) {
      regmatch_t part[3];
      if (::regexec(&regex, line.c_str(), 3, part, 0) != 0) continue;
      ++found;
      const auto begin = static_cast<std::size_t>(part[2].rm_so),
                 end = static_cast<std::size_t>(part[2].rm_eo);
      EXPECT_THAT(digest, HasSubstr(fmt::format(fmt::runtime(form), line.substr(begin, end - begin))));
    }
    ::regfree(&regex);
    EXPECT_GT(found, 0) << pattern;
  };
  const std::string control = read("control.hpp"), paths = read("paths.hpp");
  all_of(control, "^inline constexpr ([a-z_0-9: ]* )?(k[A-Z][A-Za-z0-9_]+)", "{}");
  all_of(paths, "^inline constexpr ([A-Za-z0-9_: ]* )?(k[A-Z][A-Za-z0-9_]+)", "{}");
  all_of(control, "^struct (alignas\\(64\\) )?([A-Za-z0-9_]+) \\{", "sizeof({})");
}

}  // namespace
}  // namespace weft::test::build_test
