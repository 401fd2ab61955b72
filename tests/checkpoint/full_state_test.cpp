// Global tensors of a mesh, one after the other: what visitors see, what ranks get, how much memory is used,
// and errors.
#include "weft/checkpoint/full_state.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <atomic>
#include <cstdlib>
#include <map>
#include <mutex>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"

namespace weft::full_state_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;

const std::vector<std::string> kNames = {"rows", "columns", "segments", "nested", "whole", "scalar"};

// Element i of global tensor t is 1000 t + i.
class Tensors {
 public:
  explicit Tensors(const DeviceMesh& mesh) {
    const LayoutRef rows = make_layout(mesh, {{"tp", Shard{0}}}, {7, 3});
    add(rows);
    add(make_layout(mesh, {{"tp", Shard{1}}}, {3, 5}));
    add(make_layout(mesh, {{"tp", Shard{0}}}, {8, 2})->segmented(0, {5, 3}));
    add(rows->shard_inside(mesh["dp"], 0));
    add(replicated_layout(mesh, {4}));
    add(replicated_layout(mesh, {}));
  }
  std::vector<MutableNamedView> targets() {
    std::vector<MutableNamedView> all;
    for (std::size_t t = 0; t < layouts_.size(); ++t)
      all.push_back({kNames[t], view(memory_[t].data(), layouts_[t]->local_shape()), layouts_[t]});
    return all;
  }
  std::vector<NamedView> views() {
    const auto all = targets();
    return {all.begin(), all.end()};
  }
  void fill() {
    each([](float& x, float value) { x = value; });
  }
  void expect() {
    each([](const float& x, float value) { EXPECT_EQ(x, value); });
  }
  static float value(std::size_t tensor, std::int64_t i) {
    return 1000 * static_cast<float>(tensor) + static_cast<float>(i);
  }

 private:
  void add(const LayoutRef& layout) {
    layouts_.push_back(layout);
    memory_.emplace_back(static_cast<std::size_t>(layout->local_shape().count()) + 1, -1.0f);
  }
  void each(const std::function<void(float&, float)>& see) {
    for (std::size_t t = 0; t < layouts_.size(); ++t) {
      const LayoutRef& layout = layouts_[t];
      const Strides strides = row_major(layout->global);
      std::size_t at = 0;  // parts lie one behind the other except columns, which have one part
      for (const Box& box : layout->parts())
        for (std::int64_t i = 0; i < box.shape.count(); ++i) {
          std::int64_t whole = 0, rest = i;
          for (int d = box.shape.rank(); d-- > 0; rest /= box.shape[d])
            whole += (box.offset[d] + rest % box.shape[d]) * strides[d];
          see(memory_[t][at++], value(t, whole));
        }
    }
  }
  std::vector<LayoutRef> layouts_;
  std::vector<std::vector<float>> memory_;
};

void expect_whole(std::size_t tensor, const ConstTensorView& whole) {
  for (std::int64_t i = 0; i < whole.count(); ++i)
    EXPECT_EQ(whole.as<float>()[static_cast<std::size_t>(i)], Tensors::value(tensor, i)) << kNames[tensor];
}

const MeshShape kShapes[] = {{{"dp", 1}, {"tp", 1}}, {{"dp", 2}, {"tp", 2}}, {{"dp", 1}, {"tp", 3}}};

TEST(FullState, IsSeenWholeAtOneRankOrAtAll) {
  for (const MeshShape& shape : kShapes)
    for (const int root : {kEveryRank, 0, shape.size() - 1})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        SCOPED_TRACE(to_string(shape) + " root " + std::to_string(root));
        const DeviceMesh mesh(rank.group(), shape);
        Tensors tensors(mesh);
        tensors.fill();
        std::vector<std::string> seen;
        gather_full_state(mesh, tensors.views(), root,
                          [&](std::string_view name, const ConstTensorView& whole) {
                            expect_whole(seen.size(), whole);
                            seen.emplace_back(name);
                          });
        EXPECT_EQ(seen, root == kEveryRank || root == rank.rank ? kNames : std::vector<std::string>());
      });
}

TEST(FullState, IsSetFromOneRankOrAll) {
  for (const MeshShape& shape : kShapes)
    for (const int root : {kEveryRank, 0, shape.size() - 1})
      test::run_ranks(Ranks::threads, shape.size(), [&](Rank& rank) {
        SCOPED_TRACE(to_string(shape) + " root " + std::to_string(root));
        const DeviceMesh mesh(rank.group(), shape);
        Tensors tensors(mesh);
        std::size_t given = 0;
        set_full_state(mesh, tensors.targets(), root, [&](std::string_view name, const TensorView& whole) {
          EXPECT_EQ(name, kNames[given]);
          for (std::int64_t i = 0; i < whole.count(); ++i)
            whole.as<float>()[static_cast<std::size_t>(i)] = Tensors::value(given, i);
          ++given;
        });
        tensors.expect();
        EXPECT_EQ(given, root == kEveryRank || root == rank.rank ? kNames.size() : 0u);
      });
}

TEST(FullState, OfOneRankWithoutAMesh) {
  std::vector<float> x = {1, 2};
  const std::vector<MutableNamedView> tensors = {{"x", view(x)}};
  const float* seen = nullptr;
  gather_full_state({}, std::vector<NamedView>(tensors.begin(), tensors.end()), 0,
                    [&](auto, const ConstTensorView& whole) { seen = whole.as<float>().data(); });
  EXPECT_EQ(seen, x.data()) << "where it lies";
  set_full_state({}, tensors, 0, [](auto, const TensorView& whole) { whole.as<float>()[1] = 5; });
  EXPECT_THAT(x, ElementsAre(1, 5));
}

// Bytes that are taken at once from the Context which all ranks share.
class Peak {
 public:
  Allocator functions() { return {&allocate, &deallocate, this}; }
  std::int64_t most() const { return most_; }
  void restart() { most_ = now_.load(); }
  std::int64_t now() const { return now_; }

 private:
  static void* allocate(void* data, std::size_t bytes, std::size_t alignment) {
    Peak& peak = *static_cast<Peak*>(data);
    const std::int64_t now = peak.now_ += static_cast<std::int64_t>(bytes);
    std::int64_t most = peak.most_;
    while (now > most && !peak.most_.compare_exchange_weak(most, now)) {}
    return std::aligned_alloc(alignment, bytes);
  }
  static void deallocate(void* data, void* memory, std::size_t bytes, std::size_t) {
    static_cast<Peak*>(data)->now_ -= static_cast<std::int64_t>(bytes);
    std::free(memory);
  }
  std::atomic<std::int64_t> now_ = 0, most_ = 0;
};

TEST(FullState, HasNoMoreThanOneTensorWholeInMemory) {
  constexpr std::int64_t kRows = 64, kColumns = 1024, kWhole = kRows * kColumns * 4, kCount = 10;
  constexpr int kRanks = 4;
  for (const int dim : {0, 1})
    for (const int root : {0, kEveryRank}) {
      Peak memory;
      test::RankOptions options;
      options.context.allocator = memory.functions();
      std::int64_t before = 0, gathered = 0, set = 0;
      test::run_ranks(
          Ranks::threads, kRanks,
          [&](Rank& rank) {
            const DeviceMesh mesh(rank.group(), {{"tp", kRanks}});
            const LayoutRef cut = make_layout(mesh, {Shard{dim}}, {kRows, kColumns});
            std::vector<std::vector<float>> own(kCount, std::vector<float>(kRows * kColumns / kRanks));
            std::vector<std::string> names;
            for (int i = 0; i < kCount; ++i) names.push_back("t" + std::to_string(i));
            std::vector<MutableNamedView> tensors;
            for (std::size_t i = 0; i < own.size(); ++i)
              tensors.push_back({names[i], view(own[i].data(), cut->local_shape()), cut});
            const auto measured = [&](std::int64_t& most, const std::function<void()>& action) {
              mesh.group().barrier().wait();
              if (rank.rank == 0) {
                memory.restart();
                before = memory.now();
              }
              mesh.group().barrier().wait();
              action();
              mesh.group().barrier().wait();
              if (rank.rank == 0) most = memory.most() - before;
            };
            measured(gathered, [&] {
              gather_full_state(mesh, std::vector<NamedView>(tensors.begin(), tensors.end()), root,
                                [](auto, const ConstTensorView&) {});
            });
            measured(set, [&] {
              set_full_state(mesh, tensors, root, [](auto, const TensorView& whole) {
                std::fill_n(whole.as<float>().begin(), whole.count(), 1.0f);
              });
            });
          },
          options);
      // Each visiting rank holds one global tensor and one part. Every other rank holds a copy of its part if
      // that is not contiguous.
      const std::int64_t wholes = root == kEveryRank ? kRanks : 1;
      const std::int64_t limit = wholes * kWhole + kRanks * (kWhole / kRanks) + 64 * 1024;
      EXPECT_GE(gathered, wholes * kWhole);
      EXPECT_LE(gathered, limit) << "dim " << dim << " root " << root;
      EXPECT_GE(set, kWhole);
      EXPECT_LE(set, limit) << "dim " << dim << " root " << root;
    }
}

TEST(FullState, AnErrorOfOneRankIsOneOfAll) {
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"tp", 2}});
    Tensors tensors(mesh);
    tensors.fill();
    int seen = 0;
    const auto see = [&](std::string_view name, const ConstTensorView&) {
      ++seen;
      if (name == "columns") throw Error(ErrorCode::system, "no more paper");
    };
    const auto give = [&](std::string_view name, const TensorView& whole) { see(name, whole); };
    const std::string told = "failed: no more paper; ";
    EXPECT_EQ(error_text([&] { gather_full_state(mesh, tensors.views(), 1, see); }),
              rank.rank == 1
                  ? "system: no more paper"
                  : "system: gather_full_state: rank 1 " + told + "tensors after \"columns\" were not moved");
    EXPECT_EQ(seen, rank.rank == 1 ? 2 : 0);
    EXPECT_EQ(error_text([&] { set_full_state(mesh, tensors.targets(), 0, give); }),
              rank.rank == 0
                  ? "system: no more paper"
                  : "system: set_full_state: rank 0 " + told + "values from \"columns\" on are undefined");
    EXPECT_EQ(error_text([&] { gather_full_state(mesh, tensors.views(), 2, see); }),
              "bad_argument: gather_full_state: root is 2; expected 0 to 1, or -1 for every rank");
    EXPECT_EQ(error_text([&] { gather_full_state(mesh, tensors.views(), rank.rank, see); }),
              std::string("mismatch: gather_full_state: ranks gave different roots, ") +
                  (rank.rank == 0 ? "0 and 1" : "1 and 0"));
    std::vector<NamedView> other = tensors.views();
    if (rank.rank == 1) other[0].name = "lines";
    EXPECT_THAT(error_text([&] { gather_full_state(mesh, other, 0, see); }),
                ::testing::StartsWith("mismatch: gather_full_state: tensor 0 is \"rows\""));
    other = tensors.views();
    if (rank.rank == 1) other.push_back(other[0]);
    EXPECT_EQ(error_text([&] { gather_full_state(mesh, other, 0, see); }),
              rank.rank == 1 ? "bad_argument: gather_full_state: \"rows\" is given twice"
                             : "bad_argument: gather_full_state: rank 1 failed: \"rows\" is given twice; "
                               "nothing was moved");
  });
}

}  // namespace
}  // namespace weft::full_state_test
