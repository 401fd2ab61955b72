// Ranks that give different arguments to a save or a load: they must agree on the checkpoint to read, and on
// the arguments of a save.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <atomic>
#include <fstream>
#include <thread>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/reader.hpp"

namespace weft::ranks_agree_test {
namespace {

using namespace std::chrono_literals;
using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;

// A tensor of two ranks, each of whose elements is a step.
struct Steps {
  explicit Steps(Rank& rank)
      : mesh(rank.group(), {{"dp", 2}}), layout(make_layout(mesh, {Shard{0}}, {8})), values(4) {}
  std::vector<NamedView> views(float value) {
    values.assign(4, value);
    return {{"w", view(values), layout}};
  }
  std::vector<MutableNamedView> targets() { return {{"w", view(values), layout}}; }
  void save(const std::filesystem::path& directory, std::int64_t step) {
    save_checkpoint(directory, mesh, step, views(static_cast<float>(step)));
    mesh.group().barrier().wait();
  }

  DeviceMesh mesh;
  LayoutRef layout;
  std::vector<float> values;
};

// Each rank is given another directory, as with a folder for each host.
TEST(LoadOfRanks, IsOfTheCheckpointThatRank0Chose) {
  const test::TemporaryFolder folder;
  const auto a = folder / "a", b = folder / "b";
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Steps steps(rank);
    steps.save(a, 1);
    if (rank.rank == 0) std::filesystem::copy(a, b, std::filesystem::copy_options::recursive);
    steps.mesh.group().barrier().wait();
    const auto& mine = rank.rank == 0 ? a : b;
    EXPECT_EQ(load_checkpoint(mine, steps.mesh, steps.targets()).folder, mine / "step-00000001");
    steps.save(b, 2);  // which rank 1 would take
    EXPECT_EQ(load_checkpoint(mine, steps.mesh, steps.targets()).step, 1);
    EXPECT_EQ(steps.values, std::vector<float>(4, 1));

    const auto& other = rank.rank == 0 ? b : a;  // has no step 2
    const std::string missing = fmt::format("rank 0 loads step 2 of {}; {} is no checkpoint on this rank",
                                            (b / "step-00000002").string(), (a / "step-00000002").string());
    EXPECT_EQ(error_text([&] { load_checkpoint(other, steps.mesh, steps.targets()); }),
              rank.rank == 1
                  ? "mismatch: load_checkpoint: " + missing
                  : "mismatch: load_checkpoint: rank 1 failed: " + missing + "; no value has changed");
    EXPECT_EQ(steps.values, std::vector<float>(4, 1));

    save_checkpoint(a, steps.mesh, 2, steps.views(7));  // step 2 of a, with other values
    steps.mesh.group().barrier().wait();
    steps.values.assign(4, 0);
    const Error e = error_of([&] { load_checkpoint(other, steps.mesh, steps.targets()); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_THAT(e.what(),
                HasSubstr((a / "step-00000002").string() +
                          " is another checkpoint on this rank, of step 2 (the hash of its index is "));
    EXPECT_EQ(steps.values, std::vector<float>(4, 0));
    EXPECT_EQ(load_checkpoint(a / "step-00000002" / "", steps.mesh, steps.targets()).step, 2);
  });
}

TEST(LoadOfRanks, OneThatFindsNothingIsAnErrorOfAll) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Steps steps(rank);
    const std::string none =
        "checkpoint: " + folder.path().string() + " holds no checkpoint: neither latest nor index.json";
    EXPECT_EQ(error_text([&] { load_checkpoint(folder.path(), steps.mesh, steps.targets()); }),
              rank.rank == 0
                  ? "bad_argument: " + none
                  : "bad_argument: load_checkpoint: rank 0 failed: " + none + "; no value has changed");
  });
}

// A checkpoint that is damaged on one rank, and that the system refuses on the other. Both ranks get one code
// and both reasons.
TEST(LoadOfRanks, TheFirstCauseGivesTheCode) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Steps steps(rank);
    steps.save(folder.path(), 1);
    if (rank.rank == 0) std::filesystem::resize_file(folder / "step-00000001" / "rank-00000.safetensors", 3);
    steps.mesh.group().barrier().wait();
    LoadOptions options;
    std::vector<MutableNamedView> targets = steps.targets();
    const Error e = error_of([&] { load_checkpoint(folder.path(), steps.mesh, targets); });
    EXPECT_EQ(e.code(), ErrorCode::corrupt);
    EXPECT_THAT(e.what(), HasSubstr("rank-00000.safetensors: has 3 bytes; expected at least 8"));
    if (rank.rank == 1) {
      EXPECT_THAT(e.what(), ::testing::EndsWith("; the values are undefined"));
    }
  });
}

TEST(SaveOfRanks, ArgumentsThatDifferAreNamed) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Steps steps(rank);
    AsyncCheckpoint saves(steps.mesh);
    const bool one = rank.rank == 1;
    const auto expect = [&](const std::string& there, const std::string& here, std::int64_t step,
                            const std::filesystem::path& directory, const CheckpointExtra& extra,
                            const SaveOptions& options) {
      const std::string text =
          "mismatch: save_checkpoint: argument " + there + " on dp rank 0, but " + here + " on dp rank 1";
      EXPECT_EQ(
          error_text([&] { save_checkpoint(directory, steps.mesh, step, steps.views(1), extra, options); }),
          text);
      EXPECT_EQ(error_text([&] { saves.save(directory, step, steps.views(1), extra, options); }), text);
    };
    const auto run = folder / "run";
    expect("0 is step 1", "step 2", one ? 2 : 1, run, {}, {});
    const std::string at = std::filesystem::canonical(folder.path()).string();
    expect(fmt::format("1 is directory \"{}/run\"", at), fmt::format("directory \"{}/other\"", at), 1,
           one ? folder / "other" : run, {}, {});
    expect("2 is options.keep 0", "options.keep 3", 1, run, {}, {.keep = one ? 3 : 0});
    expect("3 is options.deadline 1000000000 ns", "options.deadline 2000000000 ns", 1, run, {},
           {.deadline = one ? 2s : 1s});
    expect("5 is extra \"k\" = \"v\"", "extra \"k\" = \"w\"", 1, run, {{"a", "b"}, {"k", one ? "w" : "v"}},
           {});
    expect("4 is extra \"k\" = \"v\"", "missing", 1, run,
           one ? CheckpointExtra() : CheckpointExtra{{"k", "v"}}, {});
    // Only one rank is wrong. The other does not wait until its deadline.
    EXPECT_EQ(error_text([&] { save_checkpoint(run, steps.mesh, one ? -1 : 1, steps.views(1)); }),
              one ? "bad_argument: save_checkpoint: step is -1; expected 0 or more"
                  : "bad_argument: save_checkpoint: rank 1 failed: step is -1; expected 0 or more; " +
                        run.string() + " is as it was");
    EXPECT_FALSE(std::filesystem::exists(run));
    // Another name of the same directory is the same one.
    save_checkpoint(one ? run / ".." / "run" : run, steps.mesh, 1, steps.views(1));
  });
  EXPECT_EQ(latest_checkpoint(folder / "run")->step, 1);
}

TEST(SaveOfRanks, AnEmptyDirectoryIsRefused) {
  std::vector<float> w(1);
  EXPECT_EQ(error_text([&] {
              save_checkpoint("", {}, 1, std::vector<NamedView>{{"w", view(w)}});
            }),
            "bad_argument: save_checkpoint: directory is empty; expected the path of a folder");
}

// Saves a step that removes all before it.
void save_alone(const std::filesystem::path& directory, int step) {
  std::vector<float> w(8, static_cast<float>(step)), more(300, 1);
  save_checkpoint(directory, {}, step, std::vector<NamedView>{{"more", view(more)}, {"w", view(w)}}, {},
                  {.keep = 1});
}

// A save removes what was chosen after the load has read its index: the load takes what `latest` names by
// then.
TEST(BesideSaves, ALoadTakesTheNextOne) {
  const test::TemporaryFolder folder;
  save_alone(folder.path(), 1);
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    Steps steps(rank);
    int asked = 0;
    LoadOptions options;
    options.may_leave = [&](std::string_view name) {
      if (asked++ == 0 && rank.rank == 1) save_alone(folder.path(), 2);
      return name == "more";
    };
    EXPECT_EQ(load_checkpoint(folder.path(), steps.mesh, steps.targets(), options).step, 2);
    EXPECT_EQ(steps.values, std::vector<float>(4, 2));
    EXPECT_EQ(asked, 2);
  });
}

TEST(BesideSaves, AVerificationLooksAtTheNextOne) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) { Steps(rank).save(folder.path(), 1); });
  int told = 0;
  EXPECT_THAT(verify_checkpoint(folder.path(),
                                [&](std::int64_t, std::int64_t) {
                                  if (told++ == 0) save_alone(folder.path(), 2);  // rank 1's file goes
                                }),
              ::testing::IsEmpty());
  EXPECT_EQ(told, 3);  // of the first one a chunk, of the next one two tensors
}

// While one thread saves all the time, no load, reader or verification finds anything wrong.
TEST(BesideSaves, NothingIsFoundMissing) {
  const test::TemporaryFolder folder;
  save_alone(folder.path(), 1);
  std::atomic<bool> ends = false;
  std::thread saver([&] {
    for (int step = 2; !ends; ++step) save_alone(folder.path(), step);
  });
  std::vector<float> w(8), more(300);
  const std::vector<MutableNamedView> targets = {{"more", view(more)}, {"w", view(w)}};
  for (int i = 0; i < 40; ++i) {
    EXPECT_EQ(error_text([&] { load_checkpoint(folder.path(), {}, targets); }), "no error");
    EXPECT_EQ(error_text([&] { CheckpointReader::open(folder.path()); }), "no error");
    EXPECT_EQ(error_text([&] { latest_checkpoint(folder.path()); }), "no error");
    EXPECT_THAT(verify_checkpoint(folder.path()), ::testing::IsEmpty());
  }
  ends = true;
  saver.join();
}

// The folder that `latest` names is gone for good.
TEST(BesideSaves, AFolderThatIsGoneIsDamage) {
  const test::TemporaryFolder folder;
  save_alone(folder.path(), 1);
  std::filesystem::remove_all(folder / "step-00000001");
  const std::string text = "checkpoint: " + (folder / "latest").string() +
                           " names \"step-00000001\", which is no checkpoint in the same folder";
  EXPECT_EQ(error_text([&] { load_checkpoint(folder.path(), {}, {}); }), "corrupt: " + text);
  EXPECT_EQ(error_text([&] { latest_checkpoint(folder.path()); }), "corrupt: " + text);
  EXPECT_THAT(verify_checkpoint(folder.path()), ::testing::ElementsAre(text));
  save_alone(folder.path(), 2);
  std::filesystem::remove(folder / "step-00000002" / "rank-00000.safetensors");
  EXPECT_THAT(
      verify_checkpoint(folder.path()),
      ::testing::ElementsAre("checkpoint: " + (folder / "step-00000002" / "rank-00000.safetensors").string() +
                             ": is missing; the index names it"));
}

}  // namespace
}  // namespace weft::ranks_agree_test
