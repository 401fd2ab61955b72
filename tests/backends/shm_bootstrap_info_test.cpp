// Tests the information that ranks of shm exchange through the store, in case a foreign process has written
// it.
#include "backends/shm/bootstrap_info.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "store/forwarding_store.hpp"
#include "support/run_ranks.hpp"

namespace weft::test::shm_bootstrap_info_test {
namespace {

using shm::BootstrapInfo;
using shm::SingleCopy;
using testing::ElementsAre;

const std::string kAddress = "weft1 boot/pid:[1]/net:[2] weft-00ff 1000 77 5 12";

TEST(ShmBootstrapInfo, IsReadAsItIsWritten) {
  const std::string text = "1023 2 3 ff/17/5:2500 " + kAddress;
  const BootstrapInfo info = BootstrapInfo::decode(text);
  EXPECT_EQ(info.doorbell, 1023);
  EXPECT_EQ(info.single_copy, SingleCopy::push);
  EXPECT_EQ(info.region, 3);
  EXPECT_EQ(info.address.pid, 77);
  EXPECT_EQ(info.encode(), text);
}

TEST(ShmBootstrapInfo, OtherTextIsRefused) {
  for (const std::string text :
       {"", "7", "7x 0 0 f/1/- a", "-1 0 0 f/1/- a", "1024 0 0 f/1/- a", "0x1 0 0 f/1/- a",
        "99999999999999999999 0 0 f/1/- a", "0 3 0 f/1/- a", "0 -1 0 f/1/- a", "0  0 0 f a", "0 0 f/1/- a",
        "0 0 -1 f/1/- a", "0 0 1073741825 f/1/- a"})
    EXPECT_EQ(error_text([&] { BootstrapInfo::decode(text); }),
              "mismatch: shm: \"" + text +
                  "\" is no rank's info; expected \"<doorbell from 0 to 1023> <single copy "
                  "from 0 to 2> <region from 0 to 1073741824> <cores> <process address>\"");
  EXPECT_THAT(error_text([] { BootstrapInfo::decode("0 0 0 f/1/- weft1 a b 1 2 3"); }),
              testing::StartsWith("mismatch: host peers: \"weft1 a b 1 2 3\" is not a process address; "));
}

// Writes another doorbell than the rank has.
class WrongDoorbell final : public ForwardingStore {
 public:
  using ForwardingStore::ForwardingStore;
  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    std::string text(value);  // "build size place doorbell …"
    if (key.ends_with("/shm/1")) {
      std::size_t doorbell = 0;
      for (int words = 0; words < 3; ++words) doorbell = text.find(' ', doorbell) + 1;
      text.insert(doorbell, "7777");
    }
    ForwardingStore::set(key, text, deadline);
  }
};

TEST(ShmBootstrapInfo, OfAnotherRankIsNamed) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    Membership m = r.membership();
    m.store = std::make_shared<WrongDoorbell>(m.store);
    const Error e = error_of([&] { ProcessGroup::create(r.context, "shm", m); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
    EXPECT_THAT(e.what(),
                testing::MatchesRegex("group \"world\": rank 1: shm: \"7777[0-9]+ .*\" is no rank's "
                                      "info; expected .* \\[rank [01]\\]"));
    EXPECT_THAT(std::vector<int>(e.ranks().begin(), e.ranks().end()), ElementsAre(1));
    r.meet("end");
  });
}

}  // namespace
}  // namespace weft::test::shm_bootstrap_info_test
