// Tensors that are the same memory under two names, and paths that are resolved at the call.
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <unistd.h>

#include <latch>

#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/async.hpp"
#include "weft/checkpoint/convert.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::tied_test {
namespace {

namespace fs = std::filesystem;
using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;

TEST(Tied, AreStoredOnceAndReadUnderBothNames) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    // "small" has one row: rank 1 holds nothing of it.
    const LayoutRef large = make_layout(mesh, {Shard{0}}, {4, 3}),
                    small = make_layout(mesh, {Shard{0}}, {1, 3});
    std::vector<float> w(6), one(rank.rank == 0 ? 3 : 0), other(6), small_other(one.size());
    const auto of = [](std::vector<float>& memory, const LayoutRef& layout) {
      return view(memory.data(), layout->local_shape());
    };
    const std::vector<MutableNamedView> tied = {{"embed", of(w, large), large},
                                                {"one", of(one, small), small},
                                                {"head", of(w, large), large},
                                                {"again", of(one, small), small}};
    const std::vector<MutableNamedView> apart = {{"embed", of(w, large), large},
                                                 {"one", of(one, small), small},
                                                 {"head", of(other, large), large},
                                                 {"again", of(small_other, small), small}};
    w.assign(6, static_cast<float>(rank.rank + 1));
    one.assign(one.size(), 9);
    save_checkpoint(folder.path(), mesh, 1, std::vector<NamedView>(tied.begin(), tied.end()));
    mesh.group().barrier().wait();
    const fs::path file =
        folder / "step-00000001" / ("rank-0000" + std::to_string(rank.rank) + ".safetensors");
    const std::vector<std::string> stored =
        rank.rank == 0 ? std::vector<std::string>{"embed", "one"} : std::vector<std::string>{"embed"};
    EXPECT_EQ(SafetensorsFile::open(file).names(), stored);
    const std::vector<float> w_saved = w, one_saved = one;
    for (const auto* targets : {&tied, &apart}) {
      w.assign(6, 0);
      one.assign(one.size(), 0);
      load_checkpoint(folder.path(), mesh, *targets);
      EXPECT_EQ(w, w_saved);
      EXPECT_EQ(one, one_saved);
    }
    EXPECT_EQ(other, w_saved);
    EXPECT_EQ(small_other, one_saved);

    // Tensors that are tied on one rank only: both are stored, and each loads with its values.
    other.assign(6, 5);
    save_checkpoint(folder.path(), mesh, 2,
                    std::vector<NamedView>((rank.rank == 0 ? tied : apart).begin(),
                                           (rank.rank == 0 ? tied : apart).end()));
    load_checkpoint(folder.path(), mesh, apart);
    EXPECT_EQ(w, w_saved);
    EXPECT_EQ(other, rank.rank == 0 ? w_saved : std::vector<float>(6, 5));
    const std::string text = "\"embed\" and \"head\" are the same memory, but have other values in " +
                             (folder / "step-00000002").string() +
                             "; expected tensors that were tied when they were saved";
    EXPECT_EQ(error_text([&] { load_checkpoint(folder.path(), mesh, tied); }),
              rank.rank == 1
                  ? "bad_argument: load_checkpoint: " + text
                  : "bad_argument: load_checkpoint: rank 1 failed: " + text + "; the values are undefined");
  });
  EXPECT_THAT(verify_checkpoint(folder / "step-00000001"), ElementsAre());
  const CheckpointReader reader = CheckpointReader::open(folder / "step-00000001");
  EXPECT_THAT(reader.names(), ElementsAre("again", "embed", "head", "one"));
  Context context;
  EXPECT_EQ(reader.read(context, "head").f32()[11], 2);
  EXPECT_EQ(export_checkpoint(folder / "step-00000001", folder / "all.safetensors"), 4u);
  EXPECT_EQ(convert_checkpoint(folder / "step-00000001", folder / "anew"), 4u);
}

// Tensors that cannot be loaded are not saved either.
TEST(Tied, MemoryThatOverlapsOtherwiseIsRefusedByBoth) {
  const test::TemporaryFolder folder;
  std::vector<float> w(12);
  const auto text = [&](const char* what, const std::vector<MutableNamedView>& tensors) {
    return error_text([&] {
      if (what[0] == 's')
        save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>(tensors.begin(), tensors.end()));
      else
        load_checkpoint(folder.path(), {}, tensors);
    });
  };
  save_checkpoint(folder.path(), {}, 1,
                  std::vector<NamedView>{{"a", view(w.data(), 6)}, {"b", view(w.data() + 6, 6)}});
  for (const std::string what : {"save_checkpoint", "load_checkpoint"}) {
    const auto refused = [&](const char* which) {
      return "bad_argument: " + what + ": the memory of " + which +
             "; expected the same place, dtype, shape and layout (tied tensors), or disjoint memory";
    };
    EXPECT_EQ(text(what.c_str(), {{"a", view(w.data(), 6)}, {"b", view(w.data() + 5, 6)}}),
              refused("\"b\" overlaps that of \"a\""));
    EXPECT_EQ(text(what.c_str(), {{"a", view(w.data(), {2, 3})}, {"b", view(w.data(), 6)}}),
              refused("\"b\" overlaps that of \"a\""));
    EXPECT_EQ(text(what.c_str(),
                   {{"a", view(w.data(), 12)}, {"b", view(w.data() + 1, 1)}, {"c", view(w.data() + 6, 2)}}),
              refused("\"b\" overlaps that of \"a\""));
  }
}

// The working directory is another one when the thread writes and when the reader reads.
TEST(Paths, AreResolvedAtTheCall) {
  const test::TemporaryFolder folder;
  fs::create_directory(folder / "elsewhere");
  const auto result = test::run_in_child([&] {
    EXPECT_EQ(::chdir(folder.path().c_str()), 0);
    std::vector<float> w(3, 1);
    std::latch moved(1);
    AsyncCheckpoint saves{DeviceMesh()};
    SaveOptions held;
    held.on_stage = [&](std::string_view stage) {
      if (stage == "data") moved.wait();
    };
    saves.save("run", 1, std::vector<NamedView>{{"w", view(w)}}, {}, held);
    EXPECT_EQ(::chdir("elsewhere"), 0);
    moved.count_down();
    EXPECT_EQ(error_text([&] { saves.wait(); }), "no error");
    EXPECT_TRUE(fs::is_empty("."));
    EXPECT_EQ(::chdir(".."), 0);
    const CheckpointReader reader = CheckpointReader::open("run");
    EXPECT_EQ(reader.info().folder, "run/step-00000001");
    EXPECT_EQ(::chdir("elsewhere"), 0);
    Context context;
    EXPECT_EQ(reader.read(context, "w").f32()[2], 1);
    EXPECT_EQ(::rmdir((folder / "elsewhere").c_str()), 0);
    EXPECT_EQ(
        error_text([&] {
          save_checkpoint("run", {}, 1, std::vector<NamedView>{{"w", view(w)}});
        }),
        "system: save_checkpoint: the working directory, in which run is to lie: No such file or directory");
    return 0;
  });
  EXPECT_TRUE(result.ok()) << test::to_string(result);
}

}  // namespace
}  // namespace weft::tied_test
