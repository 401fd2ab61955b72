// Ranks that write slowly. A slow disk is no failure, a time-out ends only one save, and files to which a
// late rank still writes stay.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <chrono>
#include <latch>
#include <thread>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/async.hpp"

namespace weft::slow_save_test {
namespace {

using namespace std::chrono_literals;
using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::StartsWith;

// Each rank has two of four elements, so that each writes a file.
struct Halves {
  explicit Halves(const DeviceMesh& mesh, float value) : memory(2, value) {
    targets = {{"cut", view(memory), make_layout(mesh, {{"dp", Shard{0}}}, {4})}};
    views.assign(targets.begin(), targets.end());
  }
  std::vector<float> memory;
  std::vector<MutableNamedView> targets;
  std::vector<NamedView> views;
};

// Rank 1 does `wait` before it writes.
SaveOptions slow(const Rank& rank, std::function<void()> wait, Duration deadline = SaveOptions().deadline) {
  return {.on_stage =
              [first = rank.rank == 1, wait = std::move(wait)](std::string_view stage) {
                if (first && stage == "data") wait();
              },
          .deadline = deadline};
}

TEST(SlowSave, AFileMayTakeLongerThanTheGroupsDeadline) {
  const test::TemporaryFolder folder;
  test::RankOptions short_messages;
  short_messages.deadline = 1s;
  test::run_ranks(
      Ranks::threads, 2,
      [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"dp", 2}});
        const SaveOptions options = slow(rank, [] { std::this_thread::sleep_for(2500ms); });
        const Halves values(mesh, 3);
        AsyncCheckpoint saves(mesh);
        saves.save(folder.path(), 1, values.views, {}, options);
        saves.wait();
        save_checkpoint(folder.path(), mesh, 2, values.views, {}, options);
        Halves loaded(mesh, 0);
        EXPECT_EQ(load_checkpoint(folder.path(), mesh, loaded.targets).step, 2);
        EXPECT_EQ(loaded.memory, values.memory);
      },
      short_messages);
}

TEST(SlowSave, ATimeOutEndsOneSaveAlone) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const SaveOptions late = slow(
        rank, [] { std::this_thread::sleep_for(1500ms); }, 300ms);
    const Halves values(mesh, 5);
    AsyncCheckpoint saves(mesh);
    for (const std::int64_t step : {1, 3}) {
      saves.save(folder.path(), step, values.views, {}, late);
      EXPECT_THAT(error_text([&] { saves.wait(); }),
                  StartsWith("timeout: the save of step " + std::to_string(step) + " in the background: "));
      EXPECT_TRUE(saves.save(folder.path(), step + 1, values.views));
      saves.wait();
      mesh.group().barrier().wait();
      EXPECT_EQ(latest_checkpoint(folder.path())->step, step + 1);
    }
    // One rank gets the error from wait(), the other from save(). The next save is written.
    saves.save(folder.path(), 5, values.views, {}, late);
    if (rank.rank == 0) {
      EXPECT_THAT(error_text([&] { saves.wait(); }), StartsWith("timeout: the save of step 5"));
    }
    EXPECT_THAT(error_text([&] { saves.save(folder.path(), 6, values.views); }),
                rank.rank == 1 ? StartsWith("timeout: the save of step 5")
                               : StartsWith("timeout: save_checkpoint: the save before this one: rank 1"));
    EXPECT_TRUE(saves.save(folder.path(), 7, values.views));
    saves.wait();
    Halves loaded(mesh, 0);
    mesh.group().barrier().wait();
    EXPECT_EQ(load_checkpoint(folder.path(), mesh, loaded.targets).step, 7);
    EXPECT_EQ(loaded.memory, values.memory);
  });
}

TEST(SlowSave, AFolderThatALateRankWritesToStays) {
  const test::TemporaryFolder folder;
  const auto unfinished = folder / "step-00000001.unfinished";
  std::latch gave_up(1);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    const Halves values(mesh, 5);
    const std::string error = error_text([&] {
      save_checkpoint(folder.path(), mesh, 1, values.views, {},
                      slow(
                          rank, [&] { gave_up.wait(); }, 300ms));
    });
    EXPECT_THAT(error, StartsWith("timeout: "));  // on rank 1, too: its own file could be written
    if (rank.rank == 0) gave_up.count_down();
  });
  EXPECT_TRUE(std::filesystem::exists(unfinished / "rank-00001.safetensors"));
  EXPECT_FALSE(latest_checkpoint(folder.path()));
  const std::vector<float> values(2);
  save_checkpoint(folder.path(), {}, 2, std::vector<NamedView>{{"x", view(values), {}}});
  EXPECT_FALSE(std::filesystem::exists(unfinished));
}

TEST(SlowSave, ADeadlineIsPositive) {
  const test::TemporaryFolder folder;
  for (const Duration wrong : {Duration(0), Duration(-1)})
    EXPECT_EQ(error_text([&] { save_checkpoint(folder.path(), {}, 1, {}, {}, {.deadline = wrong}); }),
              "bad_argument: save_checkpoint: options.deadline is " + std::to_string(wrong.count()) +
                  " ns; expected more than 0");
}

}  // namespace
}  // namespace weft::slow_save_test
