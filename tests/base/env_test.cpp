#include "weft/base/env.hpp"

#include <gtest/gtest.h>

#include <cstdlib>
#include <set>
#include <string>

#include "support/errors.hpp"

namespace weft {
namespace {

struct Env : testing::Test {
  ~Env() override { ::unsetenv("WEFT_RANK"); }
};

TEST_F(Env, TableHasEachVariableOnce) {
  std::set<std::string_view> names;
  for (const env::Variable& v : env::variables()) {
    EXPECT_TRUE(names.insert(v.name).second) << v.name;
    EXPECT_FALSE(v.fallback.empty()) << v.name;
    EXPECT_FALSE(v.meaning.empty()) << v.name;
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
}

}  // namespace
}  // namespace weft
