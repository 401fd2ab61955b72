// While a group is made: the errors on the other ranks if one rank cannot continue, or dies.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "store/forwarding_store.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test::group_init_test {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::ElementsAre;
using testing::HasSubstr;
using testing::StartsWith;

struct Kind {
  std::string backend;
  Ranks ranks;
};

class GroupInitFailure : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam().backend == "gloo" && !WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  }
};
INSTANTIATE_TEST_SUITE_P(On, GroupInitFailure,
                         testing::Values(Kind{"shm", Ranks::threads}, Kind{"shm", Ranks::processes},
                                         Kind{"gloo", Ranks::processes}, Kind{"auto", Ranks::processes}),
                         [](const auto& k) { return k.param.backend + "_" + to_string(k.param.ranks); });

// The reason is reported at once, not at the deadline, and with the number of the rank that has it.
TEST_P(GroupInitFailure, ARankThatMayNotHaveWhatItNeedsTellsTheOthers) {
  RankOptions options;
  options.factory = [backend = GetParam().backend](const GroupInit& b) -> std::unique_ptr<Backend> {
    if (b.rank == 1) throw std::bad_alloc();
    return load_backend(b.context, backend)(b);
  };
  run_ranks(
      GetParam().ranks, 3,
      [](Rank& r) {
        const auto began = Clock::now();
        const Error e = error_of([&] { r.group(); });
        EXPECT_LT(Clock::now() - began, 10s);  // the deadline is 20 s
        EXPECT_EQ(e.code(), ErrorCode::system) << e.what();
        if (r.rank == 1) {
          EXPECT_THAT(e.what(), StartsWith("group \"world\": Cannot allocate memory"));
        } else {
          EXPECT_THAT(e.what(), StartsWith("group \"world\": rank 1 cannot make it: Cannot allocate memory"));
          EXPECT_THAT(ranks_of(e), ElementsAre(1));
        }
        r.meet("end");
      },
      options);
}

// The process ends at its n-th request.
std::shared_ptr<Store> deadly(std::shared_ptr<Store> store, int n) {
  return std::make_shared<ObservedStore>(std::move(store),
                                         [n](StoreRequest request, std::string_view, Deadline) mutable {
                                           if (request != StoreRequest::try_get && n-- == 0) ::raise(SIGKILL);
                                         });
}

// Wherever the rank dies, no rank is named that only gave up because of it.
TEST_P(GroupInitFailure, OnlyTheRankThatDiesIsNamed) {
  if (GetParam().ranks == Ranks::threads) GTEST_SKIP() << "a thread does not die alone";
  for (int at = 0; at < 6; ++at) {
    SCOPED_TRACE("request " + std::to_string(at));
    RankOptions options;
    options.backend = GetParam().backend;
    RankProcesses ranks(
        4,
        [at](Rank& r) {
          Membership m = r.membership();
          m.deadline = 1500ms;
          if (r.rank == 2) m.store = deadly(r.store, at);
          try {
            const ProcessGroup g = ProcessGroup::create(r.context, r.options.backend, m);
          } catch (const Error& e) {
            EXPECT_THAT(e.code(), AnyOf(ErrorCode::peer_lost, ErrorCode::timeout)) << e.what();
            EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
          }
        },
        options);
    ranks.finish({2});
  }
}

#if WEFT_HAVE_GLOO
// When the ranks know each other's processes, they name a dead rank before the deadline, and before further
// attempts have failed.
TEST(GlooGroupInit, ARankThatDiesIsNamedWithinASecond) {
  const std::pair<StoreRequest, const char*> deaths[] = {{StoreRequest::add, "/gloo/0/ports/count"},
                                                         {StoreRequest::set, "/gloo/0/ports/2"},
                                                         {StoreRequest::get, "/gloo/0/ports/"},
                                                         {StoreRequest::get, "/gloo/0/verdict"},
                                                         {StoreRequest::add, "/gloo/0/connected"}};
  for (const auto& death : deaths) {
    SCOPED_TRACE(death.second);
    RankOptions options;
    options.backend = "gloo";
    RankProcesses ranks(
        4,
        [death](Rank& r) {
          Membership m = r.membership();
          if (r.rank == 2)
            m.store = std::make_shared<ObservedStore>(
                r.store, [death](StoreRequest request, std::string_view key, Deadline) {
                  if (request == death.first && key.find(death.second) != key.npos) ::raise(SIGKILL);
                });
          const auto began = Clock::now();
          const Error e = error_of([&] { ProcessGroup::create(r.context, r.options.backend, m); });
          EXPECT_LT(Clock::now() - began, 4s) << e.what();  // a second, and as much as a busy machine takes
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
          EXPECT_THAT(ranks_of(e), ElementsAre(2)) << e.what();
          EXPECT_THAT(e.what(), HasSubstr("rank 2 was lost while the group was made (")) << e.what();
        },
        options);
    ranks.finish({2});
  }
}
#endif

// Each peer costs one pidfd. A connection lasts for one request.
TEST(ManyRanks, KeepOneDescriptorAPeer) {
  constexpr int kRanks = 24;
  run_ranks(Ranks::processes, kRanks, [](Rank& r) {
    const int before = count_descriptors();
    r.group().barrier().wait();
    r.meet("made");
    int more = count_descriptors() - before;
    // A peer that asked for the region may close its connection a moment later.
    for (const Deadline limit = Deadline::after(10s); more > kRanks + 4 && !limit.passed();
         more = count_descriptors() - before)
      std::this_thread::sleep_for(10ms);
    EXPECT_LE(more, kRanks + 4);
    r.meet("counted");
  });
}

}  // namespace
}  // namespace weft::test::group_init_test
