// Which ranks of a group share a host: local_rank(), local_size(), split_by_host(). Ranks here are threads
// with the names of other hosts. tests/backends/hosts_test has ranks on separate hosts.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "backends/test_hooks.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::hosts_test {
namespace {

using namespace std::chrono_literals;
using testing::ElementsAre;

class HostsOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(All, HostsOf, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

TEST_P(HostsOf, ThreadsAndProcessesOfOneHostShareIt) {
  run_ranks(GetParam(), 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    EXPECT_EQ(g.local_rank(), r.rank);
    EXPECT_EQ(g.local_size(), 3);
    ProcessGroup local = g.split_by_host();
    EXPECT_EQ(local.rank(), r.rank);
    EXPECT_EQ(local.size(), 3);
    int sum = 1;
    local.all_reduce(sum).wait();
    EXPECT_EQ(sum, 3);
    EXPECT_EQ(local.name(), "world/host0");
  });
}

std::vector<int> parents(const ProcessGroup& g) { return {g.parent_ranks().begin(), g.parent_ranks().end()}; }

// a b a b a: uneven, and not in a row.
TEST(Hosts, RanksOfSeveral) {
  run_ranks(Ranks::threads, 5, [](Rank& r) {
    const ScopedTestHooks hooks(r.context, r.rank, {.host = r.rank % 2 == 0 ? "a" : "b"});
    ProcessGroup g = ProcessGroup::create(r.context, "shm", r.membership("several"));
    const std::vector<int> mine = r.rank % 2 == 0 ? std::vector<int>{0, 2, 4} : std::vector<int>{1, 3};
    EXPECT_EQ(g.local_rank(), r.rank / 2);
    EXPECT_EQ(g.local_size(), static_cast<int>(mine.size()));
    ProcessGroup local = g.split_by_host();
    EXPECT_EQ(parents(local), mine);
    EXPECT_EQ(local.rank(), g.local_rank());
    EXPECT_EQ(local.local_size(), local.size());

    // Groups made from the group also have local ranks, in their own numbering.
    ProcessGroup turned = g.split(0, -r.rank);
    EXPECT_EQ(turned.rank(), 4 - r.rank);
    EXPECT_EQ(turned.local_rank(), static_cast<int>(mine.size()) - 1 - r.rank / 2);
    EXPECT_EQ(turned.duplicate().local_size(), static_cast<int>(mine.size()));
    if (r.rank >= 2) {
      const std::vector<int> last = {2, 3, 4};
      ProcessGroup sub = g.subgroup("last", last);
      EXPECT_EQ(sub.local_size(), r.rank == 3 ? 1 : 2);
      EXPECT_EQ(sub.local_rank(), r.rank == 4 ? 1 : 0);
      EXPECT_EQ(parents(sub.split_by_host()), r.rank == 3 ? std::vector<int>{1} : (std::vector<int>{0, 2}));
    }
    g.barrier().wait();
    EXPECT_EQ(parents(g.shrink(5s)), (std::vector<int>{0, 1, 2, 3, 4}));
    EXPECT_EQ(g.shrink(5s).local_rank(), r.rank / 2);
  });
}

TEST(Hosts, TheSameNameAgainElsewhere) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    for (const bool together : {true, false, true}) {
      const ScopedTestHooks hooks(r.context, r.rank, {.host = together || r.rank == 0 ? "a" : "b"});
      ProcessGroup g = ProcessGroup::create(r.context, "shm", r.membership("again"));
      EXPECT_EQ(g.local_size(), together ? 2 : 1);
      g.barrier().wait();
    }
  });
}

TEST(Hosts, OfOneRank) {
  Context context;
  ProcessGroup g = ProcessGroup::create(context, "shm", {});
  EXPECT_EQ(g.local_rank(), 0);
  EXPECT_EQ(g.local_size(), 1);
  EXPECT_EQ(g.split_by_host().size(), 1);
}

TEST(Hosts, ARankThatNeverCameIsNamed) {
  Context context;
  Recording recording;  // a transport that does not wait for the others
  Membership m;
  m.store = make_local_store();
  m.rank = 1;
  m.size = 3;
  m.name = "x";
  m.deadline = 50ms;
  ProcessGroup g = ProcessGroup::create(context, recording.factory(), m);
  for (const auto& ask :
       {+[](ProcessGroup& group) { group.local_rank(); }, +[](ProcessGroup& group) { group.local_size(); },
        +[](ProcessGroup& group) { group.split_by_host(); }}) {
    const Error e = error_of([&] {
      ask(g);
      return 0;
    });
    EXPECT_STREQ(e.what(),
                 "hosts: rank 0 did not say within 0.05 s which host it is on [group \"x\", rank 1]");
    EXPECT_EQ(e.code(), ErrorCode::timeout);
    EXPECT_THAT(ranks_of(e), ElementsAre(0));
  }
}

TEST(Hosts, AnEmptyHandleSaysSo) {
  const ProcessGroup g;
  ProcessGroup empty;
  EXPECT_THAT(error_text([&] { return g.local_rank(); }),
              testing::StartsWith("bad_argument: local_rank: empty"));
  EXPECT_THAT(error_text([&] { return g.local_size(); }),
              testing::StartsWith("bad_argument: local_size: empty"));
  EXPECT_THAT(error_text([&] { empty.split_by_host(); }),
              testing::StartsWith("bad_argument: split_by_host: empty"));
}

}  // namespace
}  // namespace weft::test::hosts_test
