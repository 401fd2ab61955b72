// Saves in the background. The file has the values of the tensors at the call, the program continues
// meanwhile, and errors and kills have the same effects as in a blocking save.
#include "weft/checkpoint/async.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <latch>
#include <mutex>
#include <numeric>
#include <optional>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/interrupt.hpp"

namespace weft::async_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;
using ::testing::StartsWith;

constexpr std::int64_t kRows = 7, kColumns = 5;

// A weight that is sharded over tp, a weight with segments, and a replicated weight. Element i of the global
// tensor is base + i.
class Values {
 public:
  explicit Values(const DeviceMesh& mesh)
      : cut_(make_layout(mesh, {{"tp", Shard{0}}}, {kRows, kColumns})),
        fused_(make_layout(mesh, {{"tp", Shard{0}}}, {6})->segmented(0, {4, 2})),
        whole_(replicated_layout(mesh, {3})),
        memory_(static_cast<std::size_t>(3 + cut_->local_shape().count() + fused_->local_shape().count())) {}
  std::vector<MutableNamedView> targets() {
    float* const first = memory_.data();
    float* const second = first + 3;
    float* const third = second + cut_->local_shape().count();
    return {{"whole", view(first, {3}), whole_},
            {"cut", view(second, cut_->local_shape()), cut_},
            {"fused", view(third, fused_->local_shape()), fused_}};
  }
  std::vector<NamedView> views() {
    const auto all = targets();
    return {all.begin(), all.end()};
  }
  void fill(float base) {
    each([&](float& x, std::int64_t i) { x = base + static_cast<float>(i); });
  }
  void expect(float base) {
    each([&](const float& x, std::int64_t i) { EXPECT_EQ(x, base + static_cast<float>(i)); });
  }

 private:
  void each(const std::function<void(float&, std::int64_t)>& see) {
    for (const MutableNamedView& t : targets()) {
      std::int64_t row = t.layout->global.count() / t.layout->global[0], at = 0;
      for (const Box& box : t.layout->parts())
        for (std::int64_t i = 0; i < box.shape.count(); ++i, ++at)
          see(t.data.as<float>()[static_cast<std::size_t>(at)], box.offset[0] * row + i);
    }
  }
  LayoutRef cut_, fused_, whole_;
  std::vector<float> memory_;
};

void load_and_expect(const std::filesystem::path& folder, const DeviceMesh& mesh, std::int64_t step,
                     float base) {
  Values values(mesh);
  EXPECT_EQ(load_checkpoint(folder, mesh, values.targets()).step, step);
  values.expect(base);
}

// The writers of all ranks stand still until the program has changed its tensors and used the mesh's groups.
TEST(AsyncCheckpoint, TheProgramGoesOnAndWhatIsWrittenIsTheCopy) {
  const test::TemporaryFolder folder;
  std::latch may_write(1);
  std::atomic<int> done = 0;
  test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    AsyncCheckpoint saves(mesh);
    Values values(mesh);
    values.fill(100);
    const auto all_reduce = [&] {
      for (const DeviceMesh& over : {mesh, mesh["dp"], mesh["tp"]}) {
        int one = 1;
        over.group().all_reduce(view(&one, 1)).wait();
        EXPECT_EQ(one, over.size());
      }
    };
    all_reduce();
    SaveOptions options;
    options.on_stage = [&](std::string_view stage) {
      if (stage == "folder" || stage == "data") may_write.wait();
    };
    EXPECT_TRUE(saves.save(folder.path(), 1, values.views(), {{"k", "v"}}, options));
    EXPECT_TRUE(saves.running());
    values.fill(-1);
    for (int i = 0; i < 50; ++i) all_reduce();
    EXPECT_FALSE(latest_checkpoint(folder.path()));
    if (++done == 4) may_write.count_down();
    for (int i = 0; i < 200; ++i) all_reduce();  // while the writers tell each other how far they are
    saves.wait();
    EXPECT_FALSE(saves.running());
    load_and_expect(folder.path(), mesh, 1, 100);
    for (int step = 2; step < 6; ++step) {  // each waits for the one before it
      values.fill(static_cast<float>(step));
      EXPECT_TRUE(saves.save(folder.path(), step, values.views(), {}, {.keep = 2}));
      all_reduce();
    }
    saves.wait();
    load_and_expect(folder.path(), mesh, 5, 5);
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000003"));
  EXPECT_TRUE(std::filesystem::exists(folder / "step-00000004"));
}

// Only one rank is still writing.
TEST(AsyncCheckpoint, ASaveWhileOneRankWritesIsRefusedOnAll) {
  const test::TemporaryFolder folder;
  std::latch may_write(1);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    AsyncCheckpoint saves(mesh, AsyncCheckpoint::Busy::refuse);
    Values values(mesh);
    values.fill(1);
    SaveOptions options;
    options.on_stage = [&](std::string_view stage) {
      if (rank.rank == 1 && stage == "data") may_write.wait();
    };
    EXPECT_TRUE(saves.save(folder.path(), 1, values.views(), {}, options));
    values.fill(2);
    EXPECT_FALSE(saves.save(folder.path(), 2, values.views()));
    if (rank.rank == 1) may_write.count_down();
    saves.wait();
    mesh.group().barrier().wait();
    EXPECT_TRUE(saves.save(folder.path(), 3, values.views()));
    saves.wait();
    mesh.group().barrier().wait();
    load_and_expect(folder / "step-00000001", mesh, 1, 1);
    load_and_expect(folder.path(), mesh, 3, 2);
  });
  EXPECT_FALSE(std::filesystem::exists(folder / "step-00000002"));
}

TEST(AsyncCheckpoint, AnErrorIsToldByTheNextSaveOrByWait) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    AsyncCheckpoint saves(mesh);
    Values values(mesh);
    values.fill(1);
    SaveOptions fails;
    fails.on_stage = [&](std::string_view stage) {
      if (rank.rank == 1 && stage == "data") throw Error(ErrorCode::system, "no more paper");
    };
    const std::string background = "the save of step 7 in the background: save_checkpoint: ",
                      said = "no more paper; " + folder.path().string() + " is as it was",
                      mine = "system: " + background + said,
                      others = "system: " + background + "rank 1 failed: " + said;
    const std::string& expected = rank.rank == 1 ? mine : others;
    saves.save(folder.path(), 7, values.views(), {}, fails);
    EXPECT_EQ(error_text([&] { saves.wait(); }), expected);
    saves.wait();  // thrown once
    saves.save(folder.path(), 7, values.views(), {}, fails);
    EXPECT_EQ(error_text([&] { saves.save(folder.path(), 8, values.views()); }), expected);
    EXPECT_FALSE(latest_checkpoint(folder.path()));
    // A rank whose wait() has thrown does not throw again, but the save is not begun.
    saves.save(folder.path(), 7, values.views(), {}, fails);
    if (rank.rank == 0) {
      EXPECT_EQ(error_text([&] { saves.wait(); }), expected);
    }
    EXPECT_EQ(error_text([&] { saves.save(folder.path(), 8, values.views()); }),
              rank.rank == 1 ? expected
                             : "system: save_checkpoint: the save before this one: rank 1 failed: " +
                                   background + said + "; this one is not begun");
    EXPECT_TRUE(saves.save(folder.path(), 8, values.views()));
    saves.wait();
    load_and_expect(folder.path(), mesh, 8, 1);
  });
}

TEST(AsyncCheckpoint, WrongArgumentsAreToldAtOnce) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    EXPECT_EQ(error_text([&] { AsyncCheckpoint part(mesh["tp"]); }),
              "bad_argument: AsyncCheckpoint: mesh is tp=2, a part of dp=1 x tp=2; expected the whole");
    AsyncCheckpoint saves(mesh);
    Values values(mesh);
    EXPECT_EQ(error_text([&] { saves.save(folder.path(), -1, values.views()); }),
              "bad_argument: save_checkpoint: step is -1; expected 0 or more");
    std::vector<NamedView> twice = values.views();
    if (rank.rank == 1) twice.push_back(twice[0]);
    EXPECT_THAT(error_text([&] { saves.save(folder.path(), 1, twice); }),
                rank.rank == 1
                    ? StartsWith("bad_argument: save_checkpoint: \"whole\" is given twice")
                    : StartsWith("bad_argument: save_checkpoint: rank 1 failed: \"whole\" is given "
                                 "twice; "));
    EXPECT_FALSE(saves.running());
  });
}

// After an interrupted wait, the next wait still gets the end of the save and its error. Two threads may wait
// at once: Python leaves an interrupted call in a separate thread.
TEST(AsyncCheckpoint, AnInterruptEndsTheWaitAndNotTheSave) {
  const test::TemporaryFolder folder;
  std::atomic<bool> may_write = false;
  std::vector<float> values(10, 1);
  const std::vector<NamedView> views = {{"values", view(values)}};
  AsyncCheckpoint saves{DeviceMesh()};
  saves.save(folder.path(), 7, views, {}, {.on_stage = [&](std::string_view stage) {
               if (stage != "data") return;
               may_write.wait(false);
               throw Error(ErrorCode::system, "no more paper");
             }});
  const auto release = [&] {
    may_write = true;
    may_write.notify_all();
  };
  Interrupt interrupt;
  std::thread interrupted([&] {
    const Interruptible under(interrupt);
    EXPECT_EQ(error_text([&] { saves.wait(); }),
              "timeout: the save of step 7 in the background: it is still being written");
    EXPECT_TRUE(saves.running());
    release();
  });
  std::thread meanwhile([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(100));
    interrupt.raise();
    std::this_thread::sleep_for(std::chrono::seconds(1));
    release();  // so that a wait that is not ended fails the test
  });
  interrupted.join();
  EXPECT_THAT(error_text([&] { saves.wait(); }), HasSubstr("no more paper"));
  saves.wait();
  EXPECT_TRUE(saves.save(folder.path(), 8, views));
  saves.wait();
  meanwhile.join();
}

// The save cannot begin without the rank that has left it: both ranks get the error, and the checkpoint
// before is complete.
TEST(AsyncCheckpoint, AnInterruptOfASaveThatWaitsForTheOneBeforeItIsToldAllRanks) {
  const test::TemporaryFolder folder;
  std::latch may_write(1);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    AsyncCheckpoint saves(mesh);
    Values values(mesh);
    values.fill(1);
    SaveOptions options;
    options.on_stage = [&](std::string_view stage) {
      if (rank.rank == 0 && stage == "data") may_write.wait();
    };
    EXPECT_TRUE(saves.save(folder.path(), 1, values.views(), {}, options));
    Interrupt interrupt;
    std::optional<Interruptible> under;
    if (rank.rank == 0) {
      interrupt.raise();
      under.emplace(interrupt);
    }
    const std::string said = error_text([&] { saves.save(folder.path(), 2, values.views()); });
    under.reset();
    if (rank.rank == 0) may_write.count_down();
    EXPECT_THAT(said, rank.rank == 0
                          ? HasSubstr("the save of step 1 in the background: it is still being written")
                          : HasSubstr("save_checkpoint: rank 0 was interrupted while it saved; this save is "
                                      "not begun"));
    EXPECT_THAT(error_text([&] { mesh.group().barrier().wait(); }),
                HasSubstr("rank 0 was interrupted while it saved"));
    saves.wait();
  });
  EXPECT_EQ(load_checkpoint(folder.path(), {}, {}, {.may_leave = [](std::string_view) { return true; }}).step,
            1);
}

// An error that no call returns is in the log.
TEST(AsyncCheckpoint, AnErrorThatNobodyIsToldIsLogged) {
  const test::TemporaryFolder folder;
  std::mutex mutex;
  std::vector<std::string> lines;
  test::RankOptions options;
  options.context.log_sink = [&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  };
  test::run_ranks(
      Ranks::threads, 1,
      [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", 1}});
        AsyncCheckpoint saves(mesh);
        Values values(mesh);
        saves.save(folder.path(), 7, values.views(), {}, {.on_stage = [](std::string_view) { throw 7; }});
      },
      options);
  ASSERT_EQ(lines.size(), 1u);
  EXPECT_THAT(lines[0], HasSubstr("the save of step 7 in the background: an exception of type int"));
}

// A child saves step 1, then its writer dies at a stage of saving step 2 while the program does something
// else.
TEST(AsyncCheckpoint, AKillAtAnyStageLeavesAWholeCheckpoint) {
  for (const std::string stage : {"folder", "data", "file written", "file synced", "file named", "file",
                                  "index written", "index synced", "index named", "index", "renamed",
                                  "latest written", "latest synced", "latest named", "latest", "old"}) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    std::vector<float> values(1000, 1);
    const std::vector<MutableNamedView> targets = {{"values", view(values)}};
    const std::vector<NamedView> views(targets.begin(), targets.end());
    const auto result = test::run_in_child([&] {
      AsyncCheckpoint saves{DeviceMesh()};
      saves.save(folder.path(), 0, views);
      saves.save(folder.path(), 1, views);
      values.assign(values.size(), 2);
      SaveOptions options;
      options.keep = 2;
      options.on_stage = [&](std::string_view reached) {
        if (reached == stage) ::kill(::getpid(), SIGKILL);
      };
      saves.save(folder.path(), 2, views, {}, options);
      for (float round = 3;; ++round) values.assign(values.size(), round);
      return 0;
    });
    ASSERT_EQ(result.status.signal, SIGKILL) << test::to_string(result) << ": the stage was not reached";
    const bool named = stage == "latest named" || stage == "latest" || stage == "old";
    EXPECT_EQ(load_checkpoint(folder.path(), {}, targets).step, named ? 2 : 1);
    EXPECT_EQ(values, std::vector<float>(1000, named ? 2 : 1));
    save_checkpoint(folder.path(), {}, 3, views, {}, {.keep = 2});
    for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
      EXPECT_THAT(entry.path().filename().string(),
                  ::testing::AnyOf("latest", "step-00000003", "step-00000002", "step-00000001"));
  }
}

}  // namespace
}  // namespace weft::async_test
