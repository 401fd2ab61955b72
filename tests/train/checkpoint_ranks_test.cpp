// Saving and loading over several ranks: the rank that writes each part, loads of every mesh from every mesh,
// and a failing rank.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <mutex>

#include "checkpoint/index/index.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "train/tiny_run.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/init.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/ema.hpp"

namespace weft::checkpoint_ranks_test {
namespace {

using test::TinyRun;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::UnorderedElementsAre;

constexpr int kWidth = 7;

// The layout of a run: the mesh, and the dimension of first.weight that tp cuts.
struct Plan {
  MeshShape mesh;
  int dim;
};

void save_on(const Plan& plan, const std::filesystem::path& directory) {
  test::run_ranks(test::Ranks::threads, plan.mesh.size(), [&](test::Rank& r) {
    const DeviceMesh mesh(r.group(), plan.mesh);
    TinyRun run(r.context, mesh, kWidth, plan.dim);
    run.fill(40);
    save_checkpoint(directory, mesh, 3, run.parameters, &*run.optimizer, {{"seed", "11"}});
  });
}

void expect_loads_on(const Plan& plan, const std::filesystem::path& directory) {
  test::run_ranks(test::Ranks::threads, plan.mesh.size(), [&](test::Rank& r) {
    const DeviceMesh mesh(r.group(), plan.mesh);
    TinyRun run(r.context, mesh, kWidth, plan.dim);
    run.fill(-1);
    const CheckpointInfo info = load_checkpoint(directory, mesh, run.parameters, &*run.optimizer);
    EXPECT_EQ(info.step, 3);
    EXPECT_EQ(info.extra.at("seed"), "11");
    run.expect_filled(40);
  });
}

TEST(CheckpointRanks, EveryPartIsWrittenOnceByTheLowestRankThatHoldsIt) {
  const test::TemporaryFolder folder;
  save_on({{{"dp", 2}, {"tp", 2}}, 1}, folder.path());
  const auto run = folder / "step-00000003";
  EXPECT_TRUE(std::filesystem::exists(run / "index.json"));
  EXPECT_FALSE(std::filesystem::exists(run / "rank-00002.safetensors"));  // dp = 1 holds what dp = 0 holds
  EXPECT_FALSE(std::filesystem::exists(run / "rank-00003.safetensors"));
  const auto first = SafetensorsFile::open(run / "rank-00000.safetensors");
  const auto second = SafetensorsFile::open(run / "rank-00001.safetensors");
  EXPECT_THAT(first.names(), ElementsAre("optimizer.momentum.first.weight", "optimizer.momentum.second",
                                         "optimizer.step.first.weight", "optimizer.step.second",
                                         "param.first.weight", "param.second"));
  EXPECT_THAT(second.names(), ElementsAre("optimizer.momentum.first.weight", "param.first.weight"));
  EXPECT_EQ(first.info("param.first.weight").shape, Shape({2, 4}));
  EXPECT_EQ(second.info("param.first.weight").shape, Shape({2, 3}));
}

// Uneven shards (7 over 2, 3 and 4), empty ones (2 over 3 and 4), other dimensions, more and fewer ranks.
TEST(CheckpointRanks, EveryMeshLoadsWhatAnyMeshWrote) {
  const std::vector<Plan> plans = {{{{"dp", 1}, {"tp", 1}}, 0},
                                   {{{"dp", 2}, {"tp", 2}}, 1},
                                   {{{"dp", 1}, {"tp", 4}}, 1},
                                   {{{"dp", 1}, {"tp", 3}}, 0},
                                   {{{"dp", 2}, {"tp", 1}}, 1}};
  for (const Plan& from : plans) {
    const test::TemporaryFolder folder;
    save_on(from, folder.path());
    for (const Plan& to : plans) {
      SCOPED_TRACE(to_string(from.mesh) + " dim " + std::to_string(from.dim) + " -> " + to_string(to.mesh) +
                   " dim " + std::to_string(to.dim));
      expect_loads_on(to, folder.path());
    }
  }
}

// One rank fails while it writes: all ranks throw its code and its text, and the previous checkpoint is
// complete.
TEST(CheckpointRanks, AFailureOfOneRankIsAnErrorOfAll) {
  const test::TemporaryFolder folder;
  const Plan plan{{{"dp", 1}, {"tp", 3}}, 1};
  save_on(plan, folder.path());
  std::mutex mutex;
  std::vector<std::string> texts(3);
  test::run_ranks(test::Ranks::threads, 3, [&](test::Rank& r) {
    const DeviceMesh mesh(r.group(), plan.mesh);
    TinyRun run(r.context, mesh, kWidth, plan.dim);
    run.fill(50);
    SaveOptions options;
    options.on_stage = [&](std::string_view stage) {
      if (r.rank == 1 && stage == "data") throw Error(ErrorCode::system, "no more paper");
    };
    try {
      save_checkpoint(folder.path(), mesh, 4, run.parameters, &*run.optimizer, {}, options);
      ADD_FAILURE() << "no Error on rank " << r.rank;
    } catch (const Error& e) {
      const std::lock_guard lock(mutex);
      texts[static_cast<std::size_t>(r.rank)] = e.what();
      EXPECT_EQ(e.code(), ErrorCode::system);
    }
  });
  EXPECT_EQ(texts[1], "save_checkpoint: no more paper; " + folder.path().string() + " is as it was");
  const std::string others =
      "save_checkpoint: rank 1 failed: no more paper; " + folder.path().string() + " is as it was";
  EXPECT_EQ(texts[0], others);
  EXPECT_EQ(texts[2], others);
  std::vector<std::string> names;
  for (const auto& entry : std::filesystem::directory_iterator(folder.path()))
    names.push_back(entry.path().filename());
  EXPECT_THAT(names, UnorderedElementsAre("step-00000003", "latest"));
  expect_loads_on(plan, folder.path());
}

TEST(CheckpointRanks, ALoadThatFailsOnOneRankFailsOnAll) {
  const test::TemporaryFolder folder;
  const Plan plan{{{"dp", 1}, {"tp", 2}}, 1};
  save_on(plan, folder.path());
  std::filesystem::resize_file(folder / "step-00000003" / "rank-00001.safetensors",
                               100);  // only rank 1 reads it
  std::atomic<int> failed = 0;
  test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& r) {
    const DeviceMesh mesh(r.group(), plan.mesh);
    TinyRun run(r.context, mesh, kWidth, plan.dim);
    try {
      load_checkpoint(folder.path(), mesh, run.parameters, &*run.optimizer);
    } catch (const Error& e) {
      ++failed;
      EXPECT_EQ(e.code(), ErrorCode::corrupt);
      EXPECT_THAT(e.what(), HasSubstr("rank-00001.safetensors: says its header has"));
      EXPECT_THAT(e.what(), HasSubstr(r.rank == 1 ? "" : "load_checkpoint: rank 1 failed: safetensors: "));
      EXPECT_EQ(e.ranks().size(), r.rank == 1 ? 0u : 1u);
    }
  });
  EXPECT_EQ(failed, 2);
}

// The arithmetic alone: every element of every rank's box is in exactly one part.
TEST(CheckpointIndex, PartsCoverTheWholeOnce) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 3}}, 0);
  const Tensor memory(context, {4, 3});
  const NamedView tensor{"t", memory.view(), make_layout(mesh, {Shard{0}, Shard{1}}, {7, 8})};
  const CheckpointIndex index = make_index({&tensor, 1}, 6);
  const auto& parts = index.tensors.at("t").parts;
  ASSERT_EQ(parts.size(), 6u);
  EXPECT_EQ(parts[5].file, "rank-00005.safetensors");
  EXPECT_EQ(index_from_json("index.json", to_json(index)).tensors.at("t").parts[5].box, parts[5].box);
  for (std::int64_t row = 0; row < 7; ++row)
    for (std::int64_t column = 0; column < 8; ++column) {
      const Box one{{row, column}, {1, 1}};
      EXPECT_EQ(
          std::count_if(parts.begin(), parts.end(),
                        [&](const CheckpointPart& p) { return intersection(p.box, one).shape.count() == 1; }),
          1);
    }
}

TEST(CheckpointIndex, WhatIsReplicatedIsOnePart) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"dp", 2}, {"tp", 2}}, 0);
  const Tensor memory(context, {5});
  const NamedView tensor{"t", memory.view(), replicated_layout(mesh, {5})};
  const auto index = make_index({&tensor, 1}, 4);
  ASSERT_EQ(index.tensors.at("t").parts.size(), 1u);
  EXPECT_EQ(index.tensors.at("t").parts[0].file, "rank-00000.safetensors");
  EXPECT_THAT(index.tensors.at("t").layout, ElementsAre("Replicate", "Replicate"));
}

// Averages are saved with their layouts, and continue on another mesh.
TEST(CheckpointRanks, AveragesGoIntoOtherMeshes) {
  const test::TemporaryFolder folder;
  const auto with_ema = [&](const Plan& plan,
                            const std::function<void(TinyRun&, const DeviceMesh&, Ema&)>& body) {
    test::run_ranks(test::Ranks::threads, plan.mesh.size(), [&](test::Rank& r) {
      const DeviceMesh mesh(r.group(), plan.mesh);
      TinyRun run(r.context, mesh, kWidth, plan.dim);
      run.fill(40);
      Ema ema(run.compute, run.parameters, {.decay = 0.5});
      body(run, mesh, ema);
    });
  };
  with_ema({{{"dp", 2}, {"tp", 2}}, 1}, [&](TinyRun& run, const DeviceMesh& mesh, Ema& ema) {
    run.fill(60);
    ema.update();  // 50
    save_checkpoint(folder.path(), mesh, 3, run.parameters, {&*run.optimizer, &ema});
  });
  for (const Plan& plan : {Plan{{{"dp", 1}, {"tp", 1}}, 0}, Plan{{{"dp", 1}, {"tp", 3}}, 1}})
    with_ema(plan, [&](TinyRun& run, const DeviceMesh& mesh, Ema& ema) {
      run.fill(-1);
      load_checkpoint(folder.path(), mesh, run.parameters, {&*run.optimizer, &ema});
      run.expect_filled(60);
      ema.entries([&](const std::string&, std::string_view name, const Tensor& t) {
        if (name == "updates") {
          EXPECT_EQ(t.as<std::int64_t>()[0], 1);
        }
      });
      ema.swap_in();
      run.expect_parameters_filled(50);
      ema.swap_out();
      EXPECT_THAT(
          test::error_text([&] { load_checkpoint(folder.path(), mesh, run.parameters, &*run.optimizer); }),
          HasSubstr("not in the model (4): ema.average.first.weight, ema.average.second, "
                    "ema.updates.first.weight, ema.updates.second"));
      load_checkpoint(folder.path(), mesh, run.parameters, nullptr);  // parameters alone
    });
}

// Optimizer state keeps the layout of the value that it was made for; where the value has another one by now,
// every rank's part of the state is saved all the same, and a step with it is an error.
TEST(CheckpointRanks, StateThatLiesOtherwiseThanItsValueIsSavedWhole) {
  const test::TemporaryFolder folder;
  test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& r) {
    const DeviceMesh mesh(r.group(), {{"tp", 2}});
    const LayoutRef cut = make_layout(mesh, {Shard{0}}, {6, 2}), whole = replicated_layout(mesh, {6, 2});
    Compute compute(r.context);
    const auto sharded = [&](Parameter& p) {
      p.set_layout(cut);
      p.materialise(compute);
      initialise(p, 3);
    };
    const auto state_of = [](const SGD& optimizer) {
      Tensor found;
      optimizer.visit_state([&](const std::string&, std::string_view name, const Tensor& t) {
        if (name == "momentum") found = t;
      });
      return found;
    };
    Parameter p({6, 2}, Normal{1});
    sharded(p);
    SGD optimizer(compute, {&p}, {.momentum = 0.9});
    const Tensor momentum = state_of(optimizer);
    for (std::size_t i = 0; i < 6; ++i)
      momentum.f32()[i] = static_cast<float>(10 * mesh.rank()) + static_cast<float>(i);
    p.set_master(redistribute(p.master(), whole));
    EXPECT_EQ(p.layout(), whole);
    save_checkpoint(folder.path(), mesh, 1, std::vector<Parameter*>{&p}, &optimizer);

    Parameter again({6, 2}, Normal{1});
    sharded(again);
    SGD loaded(compute, {&again}, {.momentum = 0.9});
    load_checkpoint(folder.path(), mesh, std::vector<Parameter*>{&again}, &loaded);
    EXPECT_TRUE(std::ranges::equal(state_of(loaded).f32(), momentum.f32()));
    EXPECT_TRUE(std::ranges::equal(full(again.master()).f32(), p.master().f32()));

    p.accumulate(Tensor::zeros(r.context, {6, 2}).with_layout(whole));
    try {
      optimizer.step(0.1);
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_STREQ(
          e.what(),
          "optimizer: the state of \"\" is Shard(0) on tp=2; expected Replicate (as the master; make the "
          "optimizer after the master has its layout)");
    }
    try {
      p.set_master(redistribute(p.master(), cut));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_STREQ(
          e.what(),
          "parameter \"\": set_master with another layout while it has a gradient; zero_gradient first");
    }
    p.zero_gradient();
    try {
      p.set_master(p.master().with_layout(whole->with("tp", Partial{})));
      ADD_FAILURE();
    } catch (const Error& e) {
      EXPECT_STREQ(
          e.what(),
          "parameter \"\": set_master got (6, 2) as [tp: Partial(sum)]; expected whole values of (6, 2)");
    }
  });
}

// A parameter of 11 x 6 elements in every possible layout. Initialisation depends only on the global index,
// so a parameter that is saved from one layout and loaded into another equals a newly initialised one.
class AnyLayout {
 public:
  static constexpr int kCount = 6;
  AnyLayout(Context& context, const DeviceMesh& mesh, int which, std::uint64_t seed)
      : compute_(context), value_({11, 6}, Normal{1}) {
    const LayoutRef tp = make_layout(mesh, {{"tp", Shard{0}}}, {11, 6});
    const LayoutRef layouts[kCount] = {
        replicated_layout(mesh, {11, 6}),
        tp->shard_inside(mesh["dp"], 0),
        tp->with("dp", Shard{0}),
        tp->segmented(0, {5, 4, 2}),
        tp->segmented(0, {5, 4, 2})->shard_inside(mesh["dp"], 0),
        make_layout(mesh, {Shard{0}, Shard{1}}, {11, 6})->segmented(1, {1, 5})};
    value_.set_layout(layouts[which]);
    value_.materialise(compute_);
    initialise(value_, seed);
  }
  std::vector<Parameter*> parameters() { return {&value_}; }
  Tensor whole() const { return full(value_.master()); }

 private:
  Compute compute_;
  Parameter value_;
};

TEST(CheckpointRanks, NestedAndSegmentedLayoutsGoIntoEachOther) {
  for (int saved = 0; saved < AnyLayout::kCount; ++saved) {
    const test::TemporaryFolder folder;
    test::run_ranks(test::Ranks::threads, 4, [&](test::Rank& r) {
      const DeviceMesh mesh(r.group(), {{"dp", 2}, {"tp", 2}});
      AnyLayout plain(r.context, mesh, 0, 7), from(r.context, mesh, saved, 7);
      ASSERT_TRUE(std::ranges::equal(from.whole().f32(), plain.whole().f32())) << "initialised otherwise";
      save_checkpoint(folder.path(), mesh, 1, from.parameters(), nullptr);
      for (int loaded = 0; loaded < AnyLayout::kCount; ++loaded) {
        SCOPED_TRACE(fmt::format("from {} into {}", saved, loaded));
        AnyLayout to(r.context, mesh, loaded, 8);
        load_checkpoint(folder.path(), mesh, to.parameters(), nullptr);
        EXPECT_TRUE(std::ranges::equal(to.whole().f32(), plain.whole().f32()));
      }
    });
  }
}

}  // namespace
}  // namespace weft::checkpoint_ranks_test
