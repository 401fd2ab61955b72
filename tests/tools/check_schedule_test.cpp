// `weft check schedule` as a user calls it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fstream>

#include "support/command_output.hpp"
#include "support/temporary_folder.hpp"

namespace weft::test::check_schedule_test {
namespace {

using testing::HasSubstr;

class CheckSchedule : public testing::Test {
 protected:
  CommandOutput command(const std::string& words) const {
    return output_of(fmt::format("cd '{}' && timeout 60 '{}' check schedule {} 2>&1 </dev/null",
                                 folder.path().string(), WEFT_COMMAND, words));
  }
  TemporaryFolder folder;
};

TEST_F(CheckSchedule, AcceptsWhatItHasMade) {
  const CommandOutput made = command("a.txt --make 1f1b --ranks 2 --micro-batches 3 --plot a.svg");
  EXPECT_EQ(made.status, 0);
  EXPECT_EQ(made.text,
            "schedule \"1f1b\" runs to its end: 2 ranks, 2 stages, 3 micro-batches, 24 actions\n"
            "bubble 25.0 % if F, I and W take equally long\n"
            "rank 0: keeps at most 2 activations, 6 messages\n"
            "rank 1: keeps at most 1 activations, 6 messages\n"
            "wrote a.svg\n");
  EXPECT_THAT(contents(folder / "a.svg"), HasSubstr("<title>1B2</title>"));
  EXPECT_THAT(command("a.txt").text, HasSubstr("bubble 25.0 %"));
}

TEST_F(CheckSchedule, NamesTheActionsThatDoNotFit) {
  std::ofstream(folder / "b.txt") << "schedule b\nranks 2\nmicro-batches 1\nstages 0 1\nmemory 0 0\n"
                                     "0: 0F0\n1: 1RECV_F0 1F0\n";
  const CommandOutput refused = command("b.txt");
  EXPECT_EQ(refused.status, 2);
  EXPECT_THAT(refused.text,
              HasSubstr("schedule b.txt: schedule \"b\": 0SEND_F0 is missing on rank 0, the other "
                        "end of rank 1, action 1 (1RECV_F0)"));
  EXPECT_EQ(command("none.txt").status, 1);
  EXPECT_THAT(command("a.txt --make 3f3b").text, HasSubstr("the schedule is \"3f3b\""));
}

}  // namespace
}  // namespace weft::test::check_schedule_test
