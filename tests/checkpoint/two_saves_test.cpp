// Saves to one directory at the same time: each is written completely, in the order of the calls.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <thread>
#include <utility>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/convert.hpp"

namespace weft::two_saves_test {
namespace {

using namespace std::chrono_literals;
using test::error_text;
using test::Rank;
using test::Ranks;

// The checkpoint of that step is complete, all its elements equal the step, and the directory has no
// unfinished files.
void expect_whole(const std::filesystem::path& directory, std::initializer_list<int> steps, int latest) {
  std::vector<float> values(4);
  const std::vector<MutableNamedView> targets = {{"values", view(values), {}}};
  for (const int step : steps) {
    EXPECT_EQ(load_checkpoint(directory / ("step-0000000" + std::to_string(step)), {}, targets).step, step);
    EXPECT_EQ(values, std::vector<float>(4, static_cast<float>(step)));
  }
  EXPECT_EQ(latest_checkpoint(directory)->step, latest);
  for (const auto& entry : std::filesystem::directory_iterator(directory))
    EXPECT_NE(entry.path().extension(), ".unfinished") << entry.path();
}

// Stages at which the writer of the save in the background stands still until after a plain save has begun,
// long enough for that one to be written if it did not wait.
TEST(TwoSaves, APlainSaveWaitsForTheOneInTheBackground) {
  for (const std::string stage : {"folder", "file", "renamed"}) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    std::latch reached(1), begun(2);
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"dp", 2}});
      const LayoutRef layout = replicated_layout(mesh, {4});
      std::vector<float> values(4, 1);
      const std::vector<NamedView> views = {{"values", view(values), layout}};
      AsyncCheckpoint saves(mesh);
      SaveOptions held;
      if (rank.rank == 0)
        held.on_stage = [&](std::string_view at) {
          if (at != stage) return;
          reached.count_down();
          begun.wait();
          std::this_thread::sleep_for(300ms);
        };
      saves.save(folder.path(), 1, views, {}, held);
      reached.wait();
      values.assign(4, 2);
      begun.count_down();
      save_checkpoint(folder.path(), mesh, 2, views);
      saves.wait();
    });
    expect_whole(folder.path(), {1, 2}, 2);
  }
}

// The first of two saves in the background is held; the second is begun under another name of the directory.
TEST(TwoSaves, ThoseInTheBackgroundKeepTheOrderOfTheCalls) {
  const test::TemporaryFolder folder;
  std::filesystem::create_directory(folder / "run");
  std::filesystem::create_directory_symlink(folder / "run", folder / "link");
  const auto run = folder / "run", fresh = folder / "new" / "run";
  const std::vector<std::pair<std::filesystem::path, std::filesystem::path>> names = {
      {run, run}, {run, folder / "link"}, {run, run / ".." / "run"}, {fresh, fresh / ""}};
  for (const auto& [one, other] : names) {
    SCOPED_TRACE(other.string());
    std::latch begun(1);
    std::vector<float> first(4, 1), second(4, 2);
    AsyncCheckpoint a{DeviceMesh()}, b{DeviceMesh()};
    SaveOptions held;
    held.on_stage = [&](std::string_view stage) {
      if (stage != "data" && stage != "renamed") return;
      begun.wait();
      std::this_thread::sleep_for(50ms);
    };
    a.save(one, 1, std::vector<NamedView>{{"values", view(first), {}}}, {}, held);
    b.save(other, 2, std::vector<NamedView>{{"values", view(second), {}}});
    begun.count_down();
    b.wait();
    a.wait();
    expect_whole(one, {1, 2}, 2);
  }
}

TEST(TwoSaves, OneThatWaitsTooLongIsATimeOutAndTheOthersAreWritten) {
  const test::TemporaryFolder folder;
  std::latch may_write(1);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> values(4, 1);
    const std::vector<NamedView> views = {{"values", view(values), replicated_layout(mesh, {4})}};
    AsyncCheckpoint first(mesh), third(mesh);
    SaveOptions held;
    held.on_stage = [&](std::string_view stage) {
      if (stage == "data") may_write.wait();
    };
    first.save(folder.path(), 1, views, {}, held);
    EXPECT_EQ(error_text([&] { save_checkpoint(folder.path(), mesh, 2, views, {}, {.deadline = 500ms}); }),
              std::string("timeout: save_checkpoint: ") + (rank.rank == 0 ? "" : "rank 0 failed: ") +
                  "another save of this process, begun before, still wrote to " +
                  std::filesystem::canonical(folder.path()).string() + " after 0.5 s; " +
                  folder.path().string() + " is as it was");
    values.assign(4, 3);
    third.save(folder.path(), 3, views);
    mesh.group().barrier().wait();
    if (rank.rank == 0) may_write.count_down();
    third.wait();
    first.wait();
  });
  expect_whole(folder.path(), {1, 3}, 3);
}

// Its turn is an hour away, and the interrupt ends the wait for it all the same.
TEST(TwoSaves, AnInterruptEndsTheWaitForTheTurn) {
  const test::TemporaryFolder folder;
  std::latch may_write(1);
  const std::vector<float> values(4, 1);
  const std::vector<NamedView> views = {{"values", view(values), {}}};
  AsyncCheckpoint saves{DeviceMesh()};
  saves.save(folder.path(), 1, views, {}, {.on_stage = [&](std::string_view stage) {
               if (stage == "data") may_write.wait();
             }});
  Interrupt interrupt;
  std::thread raises([&] {
    std::this_thread::sleep_for(100ms);
    interrupt.raise();
    std::this_thread::sleep_for(1s);
    may_write.count_down();
  });
  {
    const Interruptible under(interrupt);
    EXPECT_THAT(error_text([&] { save_checkpoint(folder.path(), {}, 2, views); }),
                ::testing::HasSubstr("timeout: save_checkpoint: another save of this process"));
  }
  raises.join();
  saves.wait();
  EXPECT_EQ(latest_checkpoint(folder.path())->step, 1);
}

// An interrupt does not end the work of a rank that waits for nobody. But no rank may be left waiting in the
// next call of a group that one rank has left.
TEST(TwoSaves, AnInterruptWhileARankWritesIsToldAllRanks) {
  for (const std::string stage : {"data", "latest"}) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"dp", 2}});
      const LayoutRef layout = replicated_layout(mesh, {4});
      const std::vector<float> values(4, 1);
      const std::vector<NamedView> views = {{"values", view(values), layout}};
      Interrupt interrupt;
      const Interruptible under(interrupt);
      SaveOptions options;
      if (rank.rank == 0)
        options.on_stage = [&](std::string_view at) {
          if (at == stage) interrupt.raise();
        };
      const std::string said =
          error_text([&] { save_checkpoint(folder.path(), mesh, 1, views, {}, options); });
      EXPECT_THAT(said, ::testing::HasSubstr("save_checkpoint: rank 0 was interrupted while it saved; " +
                                             folder.path().string() +
                                             (stage == "latest" ? "/step-0" : " is as it was")));
      EXPECT_THAT(error_text([&] { mesh.group().barrier().wait(); }),
                  ::testing::HasSubstr("rank 0 was interrupted"));
    });
    EXPECT_EQ(latest_checkpoint(folder.path()).has_value(), stage == "latest");
  }
}

// A save that failed leaves no turn.
TEST(TwoSaves, OneThatFailsLetsTheNextOneWrite) {
  const test::TemporaryFolder folder;
  std::vector<float> values(4, 2);
  const std::vector<NamedView> views = {{"values", view(values), {}}};
  AsyncCheckpoint saves{DeviceMesh()};
  saves.save(folder.path(), 1, views, {},
             {.on_stage = [](std::string_view) { throw Error(ErrorCode::system, "no more paper"); }});
  save_checkpoint(folder.path(), {}, 2, views, {}, {.deadline = 20s});
  EXPECT_EQ(error_text([&] { saves.wait(); }),
            "system: the save of step 1 in the background: save_checkpoint: no more paper; " +
                folder.path().string() + " is as it was");
  expect_whole(folder.path(), {2}, 2);
}

TEST(TwoSaves, AConversionWaitsToo) {
  const test::TemporaryFolder folder;
  std::vector<float> values(4, 2);
  save_checkpoint(folder / "from", {}, 2, std::vector<NamedView>{{"values", view(values), {}}});
  values.assign(4, 1);
  std::latch reached(1);
  AsyncCheckpoint saves{DeviceMesh()};
  SaveOptions held;
  held.on_stage = [&](std::string_view stage) {
    if (stage != "file") return;
    reached.count_down();
    std::this_thread::sleep_for(300ms);
  };
  saves.save(folder / "to", 1, std::vector<NamedView>{{"values", view(values), {}}}, {}, held);
  reached.wait();
  convert_checkpoint(folder / "from", folder / "to");
  saves.wait();
  expect_whole(folder / "to", {1, 2}, 2);
}

}  // namespace
}  // namespace weft::two_saves_test
