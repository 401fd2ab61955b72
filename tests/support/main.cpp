// The main of the tests. An executable holds the tests of several files; --only=<layer>/<stem> runs those of
// tests/<layer>/<stem>_test.cpp.
#include <gtest/gtest.h>

#include <cstdio>
#include <locale>
#include <set>
#include <stdexcept>
#include <string>
#include <string_view>

namespace {

// All tests run in a program that has chosen a locale. Its streams write 12345.5 as "12 345,5" and read "12
// 345 6" as one number. Text between processes, and of the kernel, must not depend on it.
struct SpacedNumbers : std::numpunct<char> {
  char do_thousands_sep() const override { return ' '; }
  char do_decimal_point() const override { return ','; }
  std::string do_grouping() const override { return "\3"; }
};

// of(test): whether the test is to run. As a filter of gtest, which selects whole suites at once if it can.
template <typename Of>
std::string filter_of(const Of& of) {
  std::string all;
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *unit.GetTestSuite(s);
    std::string some;
    int count = 0;
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      if (!of(test)) continue;
      ++count;
      some += std::string(":") + suite.name() + "." + test.name();
    }
    if (count > 0) all += count == suite.total_test_count() ? std::string(":") + suite.name() + ".*" : some;
  }
  return all.substr(all.empty() ? 0 : 1);
}

// So that every test is run by the --only of its file, and by no other.
void check_files() {
  std::set<std::string> names;
  const testing::UnitTest& unit = *testing::UnitTest::GetInstance();
  for (int s = 0; s < unit.total_test_suite_count(); ++s) {
    const testing::TestSuite& suite = *unit.GetTestSuite(s);
    for (int t = 0; t < suite.total_test_count(); ++t) {
      const testing::TestInfo& test = *suite.GetTestInfo(t);
      const std::string name = std::string(suite.name()) + "." + test.name();
      if (!std::string_view(test.file()).ends_with("_test.cpp"))
        throw std::runtime_error("test " + name + " is in " + test.file() +
                                 "; expected a file of the name <stem>_test.cpp, by which it is found");
      if (!names.insert(name).second)
        throw std::runtime_error("two tests of one executable have the name " + name + ", one of them in " +
                                 test.file());
    }
  }
}

void run_only(const std::string& file) {
  const std::string end = "/" + file + "_test.cpp";
  const auto in_file = [&](const testing::TestInfo& test) {
    return std::string_view(test.file()).ends_with(end);
  };
  const std::string inside = filter_of(in_file);
  if (inside.empty())
    throw std::runtime_error("--only=" + file + ": this executable has no test of that file");
  const std::string others = filter_of([&](const testing::TestInfo& test) { return !in_file(test); });
  std::string filter = GTEST_FLAG_GET(filter);
  if (filter.empty() || filter == "*") {
    filter = inside;
  } else if (!others.empty()) {
    filter += (filter.find('-') == std::string::npos ? "-" : ":") + others;
  }
  GTEST_FLAG_SET(filter, filter);
}

}  // namespace

int main(int argc, char** argv) {
  testing::InitGoogleTest(&argc, argv);
  std::locale::global(std::locale(std::locale::classic(), new SpacedNumbers));
  try {
    check_files();
    for (int i = 1; i < argc; ++i) {
      const std::string_view argument = argv[i];
      if (!argument.starts_with("--only=") || argc > 2)
        throw std::runtime_error("argument \"" + std::string(argv[argc - 1]) +
                                 "\"; expected one --only=<layer>/<stem> beside the options of gtest");
      run_only(std::string(argument.substr(7)));
    }
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    return 2;
  }
  return RUN_ALL_TESTS();
}
