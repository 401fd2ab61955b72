// SIGKILL while checkpoints are written: at each named point, and at any moment. The remaining checkpoint
// loads, is complete, and is not older than the last finished one.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <random>
#include <set>
#include <thread>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "train/tiny_run.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::checkpoint_kill_test {
namespace {

using std::chrono::microseconds;
using test::TinyRun;

constexpr int kWidth = 20000;  // so that writing takes most of the time

// All that a save has to tell, in its order, on the rank that writes everything.
const std::vector<std::string> kStages = {
    "folder",         "data",          "data#2",       "file written", "file synced", "file named",
    "file",           "index written", "index synced", "index named",  "index",       "renamed",
    "latest written", "latest synced", "latest named", "latest",       "old"};

// Kills this process when the stage is reached: "data#2", the second time.
SaveOptions killing(const std::string& stage) {
  SaveOptions options;
  options.keep = 1;
  options.on_stage = [stage, seen = std::multiset<std::string>()](std::string_view reached) mutable {
    seen.emplace(reached);
    const std::size_t times = seen.count(std::string(reached));
    if (stage == (times == 1 ? std::string(reached) : fmt::format("{}#{}", reached, times)))
      ::kill(::getpid(), SIGKILL);
  };
  return options;
}

bool names_the_new_one(const std::string& stage) {
  return stage == "latest named" || stage == "latest" || stage == "old";
}

// `latest` of the folder, all of whose elements are of one step; -1: there is none. In a child, as the test
// forks again.
void expect_latest(const std::filesystem::path& folder, std::int64_t least, std::int64_t most) {
  SCOPED_TRACE(fmt::format("{} to {}", least, most));
  EXPECT_TRUE(test::run_in_child([&] {
                const auto latest = latest_checkpoint(folder);
                if (!latest) {
                  EXPECT_EQ(least, -1) << "no checkpoint";
                  return 0;
                }
                Context context;
                TinyRun run(context, {}, kWidth);
                const CheckpointInfo info = load_checkpoint(folder, {}, run.parameters, &*run.optimizer);
                EXPECT_GE(info.step, least);
                EXPECT_LE(info.step, most);
                run.expect_filled(static_cast<float>(info.step));
                return 0;
              }).ok());
}

struct Killed {
  TinyRun run;
  DeviceMesh mesh;
  Killed(Context& context, const DeviceMesh& mesh_in) : run(context, mesh_in, kWidth, 1), mesh(mesh_in) {}
  void save(const std::filesystem::path& folder, std::int64_t step, const SaveOptions& options) {
    run.fill(static_cast<float>(step));
    save_checkpoint(folder, mesh, step, run.parameters, &*run.optimizer, {}, options);
  }
};

TEST(CheckpointKill, AtEachPointOfOneRank) {
  for (const std::string& stage : kStages) {
    SCOPED_TRACE(stage);
    const test::TemporaryFolder folder;
    const auto result = test::run_in_child([&] {
      Context context;
      Killed run(context, {});
      run.save(folder.path(), 1, {});
      run.save(folder.path(), 2, killing(stage));
      return 0;
    });
    ASSERT_EQ(result.status.signal, SIGKILL) << test::to_string(result) << ": the stage was not reached";
    const std::int64_t expected = names_the_new_one(stage) ? 2 : 1;
    expect_latest(folder.path(), expected, expected);
  }
}

// One of two ranks dies; the other gets an error, and the earlier checkpoint is complete.
TEST(CheckpointKill, AtEachPointOfOneOfTwoRanks) {
  const std::vector<std::string> of_others = {"data", "file written", "file synced", "file named", "file"};
  for (const int dies : {0, 1})
    for (const std::string& stage : dies == 0 ? kStages : of_others) {
      SCOPED_TRACE(fmt::format("rank {}, {}", dies, stage));
      const test::TemporaryFolder folder;
      {
        test::RankProcesses ranks(2, [&](test::Rank& rank) {
          const DeviceMesh mesh(rank.group(), {{"tp", 2}});
          Killed run(rank.context, mesh);
          run.save(folder.path(), 1, {});
          const Error e = test::error_of([&] {
            run.save(folder.path(), 2, rank.rank == dies ? killing(stage) : SaveOptions{.keep = 1});
          });
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        });
        ranks.finish({dies});
      }
      const std::int64_t expected = dies == 0 && names_the_new_one(stage) ? 2 : 1;
      expect_latest(folder.path(), expected, expected);
    }
}

// A run that saves every step with `save` is killed again and again, and continues from the remaining
// checkpoint. `done`: called after each save that is known to be whole.
using Loop = std::function<void(const std::function<void(std::int64_t)>& done)>;
void kill_at_random(int times, std::uint64_t seed, const std::filesystem::path& folder, int saves_in_flight,
                    const Loop& loop) {
  std::mt19937_64 random(seed);
  std::int64_t known = -1;
  for (int i = 0; i < times; ++i) {
    SCOPED_TRACE(fmt::format("kill {} of seed {}", i, seed));
    test::Pipe lines;
    test::ChildProcess child = test::ChildProcess::fork([&] {
      loop([&](std::int64_t step) { lines.write_line(std::to_string(step)); });
      return 0;
    });
    known = std::stoll(lines.read_line());  // it has begun
    std::this_thread::sleep_for(microseconds(random() % 12000));
    child.kill(SIGKILL);
    ASSERT_TRUE(child.wait(std::chrono::seconds(10)).has_value());
    lines.write_line("end");
    for (std::string line = lines.read_line(); line != "end"; line = lines.read_line())
      known = std::stoll(line);
    expect_latest(folder, known, known + saves_in_flight);
  }
}

int times(int all) { return test::does_everything() ? all : all / 5; }

std::int64_t next_step(const std::filesystem::path& folder) {
  const auto latest = latest_checkpoint(folder);
  return latest ? latest->step + 1 : 0;
}

TEST(CheckpointKill, AtAnyMoment) {
  const test::TemporaryFolder folder;
  kill_at_random(times(25), 1, folder.path(), 1, [&](const auto& done) {
    Context context;
    Killed run(context, {});
    for (std::int64_t step = next_step(folder.path());; ++step) {
      run.save(folder.path(), step, {.keep = 2});
      done(step);
    }
  });
}

TEST(CheckpointKill, AtAnyMomentOfASaveInTheBackground) {
  const test::TemporaryFolder folder;
  kill_at_random(times(25), 2, folder.path(), 2, [&](const auto& done) {
    Context context;
    TinyRun run(context, {}, kWidth);
    AsyncCheckpoint saves{DeviceMesh()};
    for (std::int64_t step = next_step(folder.path());; ++step) {
      run.fill(static_cast<float>(step));
      start_save(saves, folder.path(), step, run.parameters, &*run.optimizer, {}, {.keep = 2});
      if (step > 0) done(step - 1);  // this save has waited for it
    }
  });
}

// Both ranks die, one a little before the other.
TEST(CheckpointKill, AtAnyMomentOfTwoRanks) {
  const test::TemporaryFolder folder;
  std::mt19937_64 random(3);
  for (int i = 0; i < times(10); ++i) {
    SCOPED_TRACE(fmt::format("kill {}", i));
    test::Pipe lines;
    const std::int64_t first = next_step(folder.path());
    std::int64_t known = -1;
    {
      test::RankProcesses ranks(2, [&](test::Rank& rank) {
        const DeviceMesh mesh(rank.group(), {{"tp", 2}});
        Killed run(rank.context, mesh);
        for (std::int64_t step = first;; ++step) {
          run.save(folder.path(), step, {.keep = 2});
          if (rank.rank == 0) lines.write_line(std::to_string(step));
        }
      });
      known = std::stoll(lines.read_line());
      std::this_thread::sleep_for(microseconds(random() % 20000));
      const int dies = static_cast<int>(random() % 2);
      ranks[dies].kill(SIGKILL);
      std::this_thread::sleep_for(microseconds(random() % 2000));
      ranks[1 - dies].kill(SIGKILL);
      for (const int rank : {0, 1}) ASSERT_TRUE(ranks[rank].wait(std::chrono::seconds(10)).has_value());
      lines.write_line("end");
      for (std::string line = lines.read_line(); line != "end"; line = lines.read_line())
        known = std::stoll(line);
      ranks.finish({0, 1});
    }
    expect_latest(folder.path(), known, known + 1);
  }
}

}  // namespace
}  // namespace weft::checkpoint_kill_test
