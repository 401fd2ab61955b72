#include "weft/base/context.hpp"

#include <gtest/gtest.h>
#include <unistd.h>

#include "support/processes.hpp"
#include "weft/base/error.hpp"
#include "weft/base/tensor.hpp"

namespace weft {
namespace {

TEST(Context, TellsAForkedChildWhatToDo) {
  Context context;
  EXPECT_FALSE(context.forked());
  EXPECT_NO_THROW(context.check_fork("storage"));
  const auto result = test::run_in_child([&] {
    EXPECT_TRUE(context.forked());
    try {
      context.check_fork("all_reduce");
      ADD_FAILURE() << "no error";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::unsupported);
      EXPECT_EQ(
          std::string(e.what()),
          "all_reduce: this process was forked from process " + std::to_string(::getppid()) +
              " after its Context was made; make a new Context in the child, or fork before the first one");
    }
    EXPECT_THROW(Storage::allocate(context, Memory::local, 8), Error);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

}  // namespace
}  // namespace weft
