// A rank is interrupted while it waits for others. It continues at once, leaves nothing behind and may try
// again. The errors of the others name it.
#include "weft/base/interrupt.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <filesystem>
#include <thread>

#include "support/errors.hpp"
#include "support/temporary_folder.hpp"
#include "weft/group/process_group.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

namespace weft::test::interrupt_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

std::ptrdiff_t entries(const char* folder) {
  return std::distance(std::filesystem::directory_iterator(folder), {});
}

enum class Kind { local, file, tcp };

// Two ranks, each with a separate store object over one table.
class InterruptedGroup : public testing::TestWithParam<Kind> {
 protected:
  void SetUp() override {
    for (auto& store : stores_) store = make();
  }
  std::shared_ptr<Store> make() {
    switch (GetParam()) {
      case Kind::local: return local_;
      case Kind::file: return make_file_store((folder_.path() / "table").string());
      case Kind::tcp: return make_tcp_store("127.0.0.1", server_.port(), Deadline::after(20s));
    }
    return nullptr;
  }
  ProcessGroup create(int rank, int size = 2) {
    Membership m;
    m.store = rank < 2 ? stores_[static_cast<std::size_t>(rank)] : make();
    m.rank = rank;
    m.size = size;
    m.name = "pair";
    m.deadline = 60s;
    return ProcessGroup::create(context_, "shm", m);
  }
  // The error of an interrupted wait; `took_`: how long after.
  template <class F>
  Error interrupt(const F& wait) {
    Interrupt interrupt;
    Clock::time_point raised;
    std::thread other([&] {
      std::this_thread::sleep_for(100ms);
      raised = Clock::now();
      interrupt.raise();
    });
    Error error(ErrorCode::system, "none");
    {
      const Interruptible here(interrupt);
      error = error_of(wait);
    }
    const auto ended = Clock::now();
    other.join();
    took_ = std::min<Duration>(took_, ended - raised);
    return error;
  }

  TemporaryFolder folder_;
  Context context_;
  TcpStoreServer server_{context_.log()};
  std::shared_ptr<Store> local_ = make_local_store();
  std::array<std::shared_ptr<Store>, 2> stores_;
  Duration took_ = 1h;
};

TEST_P(InterruptedGroup, EndsAtOnceAndTellsTheOthers) {
  const Error mine = interrupt([&] { return create(0); });
  EXPECT_EQ(mine.code(), ErrorCode::aborted);
  EXPECT_STREQ(mine.what(), "group \"pair\": rank 0 was interrupted while it was made [rank 0]");
  EXPECT_EQ(ranks_of(mine), std::vector{0});
  const auto began = Clock::now();
  const Error theirs = error_of([&] { return create(1); });  // of the same attempt
  EXPECT_EQ(theirs.code(), ErrorCode::aborted);
  EXPECT_STREQ(theirs.what(), "group \"pair\": rank 0 was interrupted while it was made [rank 1]");
  EXPECT_EQ(ranks_of(theirs), std::vector{0});
  EXPECT_LT(Clock::now() - began, 20s);
}

TEST_P(InterruptedGroup, TellsARankThatWaitsAlready) {
  Error theirs(ErrorCode::system, "none");
  std::thread other([&] { theirs = error_of([&] { return create(1, 3); }); });  // rank 2 comes never
  EXPECT_EQ(interrupt([&] { return create(0, 3); }).code(), ErrorCode::aborted);
  other.join();
  EXPECT_EQ(theirs.code(), ErrorCode::aborted);
  EXPECT_STREQ(theirs.what(), "group \"pair\": rank 0 was interrupted while it was made [rank 1]");
}

// Rank 1 has read the texts of both ranks and waits in the transport for rank 0, which is late.
class LateStore final : public Store {
 public:
  explicit LateStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}
  void set(std::string_view key, std::string_view value, Deadline d) override { store_->set(key, value, d); }
  std::string get(std::string_view key, Deadline d) override {
    std::string value = store_->get(key, d);
    std::this_thread::sleep_for(500ms);
    return value;
  }
  std::optional<std::string> try_get(std::string_view key, Deadline d) override {
    return store_->try_get(key, d);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline d) override {
    return store_->add(key, delta, d);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline d) override {
    return store_->compare_set(key, expected, desired, d);
  }
  void remove(std::string_view key, Deadline d) override { store_->remove(key, d); }

 private:
  const std::shared_ptr<Store> store_;
};

TEST_P(InterruptedGroup, ItIsNamedAlsoWhereItWaitsInTheTransport) {
  stores_[0] = std::make_shared<LateStore>(make());
  Error theirs(ErrorCode::system, "none");
  std::thread other([&] { theirs = error_of([&] { return create(0); }); });
  std::this_thread::sleep_for(200ms);  // rank 0 waits for the texts
  const Error mine = interrupt([&] { return create(1); });
  other.join();
  EXPECT_EQ(mine.code(), ErrorCode::aborted);
  EXPECT_STREQ(mine.what(), "group \"pair\": rank 1 was interrupted while it was made [rank 1]");
  EXPECT_EQ(theirs.code(), ErrorCode::aborted) << theirs.what();
  EXPECT_STREQ(theirs.what(), "group \"pair\": rank 1 was interrupted while it was made [rank 0]");
  EXPECT_EQ(ranks_of(theirs), std::vector{1});
}

// The exchange of colors is a collective, so the parent group fails, too.
TEST_P(InterruptedGroup, SplitTellsARankThatComesLate) {
  Error theirs(ErrorCode::system, "none");
  std::thread other([&] {
    ProcessGroup all = create(1);
    std::this_thread::sleep_for(600ms);
    theirs = error_of([&] { return all.split(0); });
  });
  ProcessGroup all = create(0);
  EXPECT_EQ(interrupt([&] { return all.split(0); }).code(), ErrorCode::aborted);
  other.join();
  EXPECT_EQ(theirs.code(), ErrorCode::aborted);
  EXPECT_THAT(theirs.what(), HasSubstr("rank 0 was interrupted while it waited"));
  EXPECT_EQ(ranks_of(theirs), std::vector{0});
}

// wait() fails the group. Rank 1 is in the call, rank 2 arrives too late.
TEST_P(InterruptedGroup, ACallInFlightFailsForAll) {
  std::array<Error, 3> errors{Error(ErrorCode::system, "none"), Error(ErrorCode::system, "none"),
                              Error(ErrorCode::system, "none")};
  const auto reduce = [](ProcessGroup& all) {
    std::array<int, 4> x{};
    all.all_reduce(view(x), view(x)).wait();
  };
  std::thread waiting([&] {
    ProcessGroup all = create(1, 3);
    errors[1] = error_of([&] { reduce(all); });
  });
  std::thread late([&] {
    ProcessGroup all = create(0, 3);
    std::this_thread::sleep_for(600ms);
    errors[0] = error_of([&] {
      reduce(all);  // may end well, since the data from the others had arrived
      reduce(all);
    });
  });
  ProcessGroup all = create(2, 3);
  errors[2] = interrupt([&] { reduce(all); });
  waiting.join();
  late.join();
  for (int r = 0; r < 3; ++r) {
    const Error& e = errors[static_cast<std::size_t>(r)];
    EXPECT_EQ(e.code(), ErrorCode::aborted);
    EXPECT_EQ(std::string(e.what()),
              "all_reduce: rank 2 was interrupted while it waited [group \"pair\", rank " +
                  std::to_string(r) + ", call 0]");
    EXPECT_EQ(ranks_of(e), std::vector{2});
    EXPECT_EQ(e.op(), Op::all_reduce);
  }
}

// A wait_for() with a limit ends, and the call stays in flight. The same holds for a wait that begins after
// the interrupt was noticed.
TEST_P(InterruptedGroup, AWaitWithALimitLeavesTheCallInFlight) {
  std::thread other([&] {
    ProcessGroup all = create(1);
    std::this_thread::sleep_for(400ms);
    all.barrier().wait();
  });
  ProcessGroup all = create(0);
  Work work = all.barrier();
  Interrupt by;
  by.raise();
  {
    const Interruptible here(by);
    const auto began = Clock::now();
    EXPECT_FALSE(work.wait_for(60s));
    EXPECT_LT(Clock::now() - began, 20s);
    work.wait();
  }
  other.join();
}

TEST_P(InterruptedGroup, StoreAnswersAfterwards) {
  const Error e = interrupt([&] { return stores_[0]->get("never set", Deadline::after(60s)); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), HasSubstr("\"never set\""));
  stores_[0]->set("set", "x", Deadline::after(20s));
  EXPECT_EQ(stores_[1]->get("set", Deadline::after(20s)), "x");
}

TEST_P(InterruptedGroup, LeavesNothingBehindAndIsMadeTheNextTime) {
  const auto held = [] { return std::pair(entries("/proc/self/fd"), entries("/proc/self/task")); };
  std::pair<std::ptrdiff_t, std::ptrdiff_t> first;
  for (int i = 0; i < 4; ++i) {
    EXPECT_EQ(interrupt([&] { return create(0); }).code(), ErrorCode::aborted);
    EXPECT_EQ(error_of([&] { return create(1); }).code(), ErrorCode::aborted);
    if (i == 0) {  // it may open connections that stay
      std::this_thread::sleep_for(300ms);
      first = held();
    }
  }
  for (const Deadline limit = Deadline::after(10s); held() != first && !limit.passed();)
    std::this_thread::sleep_for(10ms);  // a thread that was joined is gone a moment later
  EXPECT_EQ(held(), first);
  EXPECT_LT(took_, 100ms);  // the best of four: other tests run, too
  std::thread other([&] { create(1).barrier().wait(); });
  create(0).barrier().wait();
  other.join();
}

std::string name_of(const testing::TestParamInfo<Kind>& info) {
  switch (info.param) {
    case Kind::local: return "local";
    case Kind::file: return "file";
    case Kind::tcp: return "tcp";
  }
  return "";
}
INSTANTIATE_TEST_SUITE_P(Stores, InterruptedGroup, testing::Values(Kind::local, Kind::file, Kind::tcp),
                         name_of);

TEST(InterruptedStore, ServerThatIsNotThere) {
  Interrupt interrupt;
  interrupt.raise();  // before the wait begins
  const Interruptible here(interrupt);
  const auto began = Clock::now();
  const Error e = error_of([] { return make_tcp_store("127.0.0.1", 1, Deadline::after(60s)); });
  EXPECT_EQ(e.code(), ErrorCode::timeout);
  EXPECT_THAT(e.what(), HasSubstr("no server at 127.0.0.1:1"));
  EXPECT_LT(Clock::now() - began, 20s);
}

}  // namespace
}  // namespace weft::test::interrupt_test
