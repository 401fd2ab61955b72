// docs/support.md agrees with the traits.
#include "backends/support_table.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>
#include <sstream>

#include "reduce/reduce.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test::support_table_test {
namespace {

using testing::HasSubstr;

TEST(SupportTable, TheFileIsTheGeneratedOne) {
  std::ifstream file(WEFT_SUPPORT_MD);
  ASSERT_TRUE(file) << WEFT_SUPPORT_MD << " is missing";
  std::ostringstream text;
  text << file.rdbuf();
  EXPECT_EQ(text.str(), support_tables()) << "make it anew: weft doctor --tables > docs/support.md";
}

TEST(SupportTable, EveryBackendHasAColumn) {
  for (const std::string_view backend : known_backends())
    EXPECT_THAT(support_tables(), HasSubstr(fmt::format(" {} |", backend)));
}

// Rows whose contents are known without the table: shm always performs every operation itself.
TEST(SupportTable, SaysNativeComposedAndUnsupported) {
  const std::string text = support_tables();
  ASSERT_EQ(known_backends()[0], "shm");
  EXPECT_THAT(text, HasSubstr("| all_to_all_v | native |"));
  EXPECT_THAT(text, HasSubstr("| user of f64 f32 | native |"));
  EXPECT_THAT(text, testing::Not(HasSubstr("prod of bool")));  // not defined
  EXPECT_THAT(text, HasSubstr("composed |"));                  // MPI has no premultiplied sums
  EXPECT_THAT(text, HasSubstr("unsupported"));                 // NCCL has no bit operations
}

TEST(SupportTable, ShmReducesWhatTheKernelsCan) {
  const Traits* const shm = known_traits("shm");
  ASSERT_NE(shm, nullptr);
  for (int t = 0; t < kDTypeCount; ++t)
    for (int k = 0; k < kReduceKindCount; ++k) {
      const auto dtype = static_cast<DType>(t);
      const auto kind = static_cast<ReduceOp::Kind>(k);
      EXPECT_EQ((shm->reduces[static_cast<std::size_t>(k)] & dtype_bit(dtype)) != 0, can_reduce(dtype, kind))
          << name(kind) << " of " << name(dtype);
    }
}

}  // namespace
}  // namespace weft::test::support_table_test
