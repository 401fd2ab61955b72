// While a group is made: what a rank that cannot go on, or that dies on the way, means for the others.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <thread>

#include "support/run_ranks.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::test {
namespace {

using namespace std::chrono_literals;
using testing::AnyOf;
using testing::ElementsAre;
using testing::StartsWith;

std::vector<int> ranks_of(const Error& e) { return {e.ranks().begin(), e.ranks().end()}; }

struct Kind {
  std::string backend;
  Ranks ranks;
};

class BringUp : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    if (GetParam().backend == "gloo" && !WEFT_HAVE_GLOO) GTEST_SKIP() << "libgloo-dev is not installed";
  }
};
INSTANTIATE_TEST_SUITE_P(On, BringUp,
                         testing::Values(Kind{"shm", Ranks::threads}, Kind{"shm", Ranks::processes},
                                         Kind{"gloo", Ranks::processes}, Kind{"auto", Ranks::processes}),
                         [](const auto& k) { return k.param.backend + "_" + to_string(k.param.ranks); });

// The reason is told at once, not at the deadline, and under the name of the rank that has it.
TEST_P(BringUp, ARankThatMayNotHaveWhatItNeedsTellsTheOthers) {
  RankOptions options;
  options.factory = [backend = GetParam().backend](const Bringup& b) -> std::unique_ptr<Backend> {
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

// Ends its process at the n-th request.
class DeadlyStore final : public Store {
 public:
  DeadlyStore(std::shared_ptr<Store> store, int at) : store_(std::move(store)), left_(at) {}
  void set(std::string_view key, std::string_view value, Deadline d) override {
    count();
    store_->set(key, value, d);
  }
  std::string get(std::string_view key, Deadline d) override {
    count();
    return store_->get(key, d);
  }
  std::optional<std::string> try_get(std::string_view key, Deadline d) override {
    return store_->try_get(key, d);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline d) override {
    count();
    return store_->add(key, delta, d);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline d) override {
    return store_->compare_set(key, expected, desired, d);
  }
  void remove(std::string_view key, Deadline d) override {
    count();
    store_->remove(key, d);
  }

 private:
  void count() {
    if (left_-- == 0) ::raise(SIGKILL);
  }
  std::shared_ptr<Store> store_;
  int left_;
};

// Wherever it dies, nobody names a rank that only gave up because of it.
TEST_P(BringUp, OnlyTheRankThatDiesIsNamed) {
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
          if (r.rank == 2) m.store = std::make_shared<DeadlyStore>(r.store, at);
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

// What is kept of each peer is one pidfd; a connection lasts as long as one conversation.
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
}  // namespace weft::test
