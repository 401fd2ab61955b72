// Saves tensors in any memory, without modules. Loads them on the same and on other meshes. Tests what is
// refused.
#include "weft/checkpoint/checkpoint.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <deque>
#include <numeric>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/safetensors.hpp"

namespace weft::checkpoint_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::HasSubstr;

// A cut weight, a fused one in segments, a norm and a counter. Element i of each global tensor is base + i.
class Buffers {
 public:
  Buffers(const DeviceMesh& mesh, int dim) {
    put("weight", weight_, make_layout(mesh, {{"tp", Shard{dim}}}, {5, 7}));
    put("fused", fused_, make_layout(mesh, {{"tp", Shard{0}}}, {9, 2})->segmented(0, {4, 5}));
    put("norm", norm_, replicated_layout(mesh, {3}));
    put("steps", steps_, replicated_layout(mesh, {1}));
  }
  void fill(int base) {
    each([&](std::int64_t whole) { return base + static_cast<int>(whole); }, nullptr);
  }
  void expect(int base) {
    each(nullptr, [&](std::string_view name, std::int64_t whole, double value) {
      EXPECT_EQ(value, base + static_cast<int>(whole)) << name;
    });
  }
  std::span<const MutableNamedView> targets() const { return targets_; }
  std::vector<NamedView> views() const { return {targets_.begin(), targets_.end()}; }

 private:
  template <class T>
  void put(std::string_view name, std::vector<T>& memory, const LayoutRef& layout) {
    memory.resize(static_cast<std::size_t>(layout->local_shape().count()));
    targets_.push_back({name, view(memory.data(), layout->local_shape()), layout});
  }
  // Visits every element that this rank holds, with its index in the global tensor.
  void each(const std::function<int(std::int64_t)>& make,
            const std::function<void(std::string_view, std::int64_t, double)>& see) {
    for (const MutableNamedView& t : targets_) {
      const Strides strides = row_major(t.layout->global);
      std::int64_t at = 0;
      for (const Box& box : t.layout->parts())  // each is whole rows of this rank's part, except "weight"
        for (std::int64_t i = 0; i < box.shape.count(); ++i, ++at) {
          std::int64_t whole = 0, rest = i;
          for (int d = box.shape.rank(); d-- > 0; rest /= box.shape[d])
            whole += (box.offset[d] + rest % box.shape[d]) * strides[d];
          const auto with = [&](auto& x) {
            using T = std::remove_reference_t<decltype(x)>;
            if (make) x = static_cast<T>(make(whole));
            if (see) see(t.name, whole, static_cast<double>(x));
          };
          const auto k = static_cast<std::size_t>(at);
          if (t.data.dtype == DType::f32) with(t.data.as<float>()[k]);
          if (t.data.dtype == DType::f64) with(t.data.as<double>()[k]);
          if (t.data.dtype == DType::i64) with(t.data.as<std::int64_t>()[k]);
        }
    }
  }
  std::vector<float> weight_, norm_;
  std::vector<double> fused_;
  std::vector<std::int64_t> steps_;
  std::vector<MutableNamedView> targets_;
};

TEST(Checkpoint, BuffersOfAnybodyAreSavedAndLoadedOnAnyMesh) {
  struct Plan {
    MeshShape mesh;
    int dim;
  };
  const std::vector<Plan> plans = {
      {{{"dp", 1}, {"tp", 1}}, 0}, {{{"dp", 2}, {"tp", 2}}, 1}, {{{"dp", 1}, {"tp", 3}}, 0}};
  for (const Plan& from : plans) {
    const test::TemporaryFolder folder;
    test::run_ranks(Ranks::threads, from.mesh.size(), [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), from.mesh);
      Buffers buffers(mesh, from.dim);
      buffers.fill(100);
      save_checkpoint(folder.path(), mesh, 7, buffers.views(), {{"note", "mine"}});
    });
    for (const Plan& to : plans)
      test::run_ranks(Ranks::threads, to.mesh.size(), [&](Rank& rank) {
        const DeviceMesh mesh(rank.group(), to.mesh);
        Buffers buffers(mesh, to.dim);
        const CheckpointInfo info = load_checkpoint(folder.path(), mesh, buffers.targets());
        EXPECT_EQ(info.step, 7);
        EXPECT_EQ(info.mesh, to_string(from.mesh));
        EXPECT_EQ(info.extra.at("note"), "mine");
        buffers.expect(100);
      });
  }
}

// Without a mesh: one rank, no layouts. The file holds the tensors under their own names.
TEST(Checkpoint, PlainBuffersOfOneRank) {
  const test::TemporaryFolder folder;
  std::vector<float> w = {1, 2, 3};
  std::vector<std::uint8_t> mask = {1, 0};
  const std::vector<MutableNamedView> tensors = {{"w", view(w)}, {"mask", view(mask)}};
  save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>(tensors.begin(), tensors.end()));
  EXPECT_EQ(SafetensorsFile::open(folder / "step-00000001" / "rank-00000.safetensors").names(),
            (std::vector<std::string>{"mask", "w"}));
  w.assign(3, 0);
  mask.assign(2, 9);
  load_checkpoint(folder.path(), {}, tensors);
  EXPECT_EQ(w, (std::vector<float>{1, 2, 3}));
  EXPECT_EQ(mask, (std::vector<std::uint8_t>{1, 0}));
}

TEST(Checkpoint, WhatIsThereAndWhatIsAskedForAreCompared) {
  const test::TemporaryFolder folder;
  std::vector<float> w(3), other(2);
  save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>{{"w", view(w)}, {"state", view(w)}});
  const std::vector<MutableNamedView> part = {{"w", view(w)}}, wrong = {{"w", view(other)}, {"v", view(w)}};
  EXPECT_THAT(error_text([&] { load_checkpoint(folder.path(), {}, part); }),
              HasSubstr("does not fit the list given; not in the list given (1): state"));
  load_checkpoint(folder.path(), {}, part,
                  {.may_leave = [](std::string_view name) { return name == "state"; }});
  const std::string text = error_text([&] { load_checkpoint(folder.path(), {}, wrong); });
  EXPECT_THAT(text, HasSubstr("missing in the checkpoint (1): v f32 (3)"));
  EXPECT_THAT(text, HasSubstr("of another shape or dtype (1): w f32 (3), expected f32 (2)"));
}

// If two tensors shared memory, the memory would hold only the tensor that was read last.
TEST(Checkpoint, TensorsAreReadIntoMemoryOfTheirOwn) {
  const test::TemporaryFolder folder;
  std::vector<float> a(8, 1), b(8, 2), all(16, 3);
  save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>{{"a", view(a)}, {"b", view(b)}});
  const std::vector<MutableNamedView> shared = {{"b", view(all.data() + 4, 8)}, {"a", view(all.data(), 8)}},
                                      apart = {{"b", view(all.data() + 8, 8)}, {"a", view(all.data(), 8)}};
  EXPECT_EQ(error_text([&] { load_checkpoint(folder.path(), {}, shared); }),
            "bad_argument: load_checkpoint: the memory of \"b\" overlaps that of \"a\"; expected the same "
            "place, dtype, shape and layout (tied tensors), or disjoint memory");
  EXPECT_EQ(all, std::vector<float>(16, 3));
  load_checkpoint(folder.path(), {}, apart);
  EXPECT_EQ(all[7], 1);
  EXPECT_EQ(all[8], 2);
  MutableNamedView strange{"a", view(a)};
  strange.data.dtype = static_cast<DType>(77);
  EXPECT_EQ(error_text([&] { save_checkpoint(folder.path(), {}, 2, std::vector<NamedView>{strange}); }),
            "bad_argument: save_checkpoint: \"a\" has dtype 77; expected 0 (f64) to 16 (c128)");
}

// Errors are thrown before anything is written. If only one rank is wrong, all ranks get the error.
TEST(Checkpoint, TensorsThatCannotBeSavedAreNamed) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}}), other(rank.group(), {{"x", 2}});
    std::vector<float> w(4);
    const LayoutRef same = replicated_layout(mesh, {4});
    const auto text = [&](const std::vector<NamedView>& tensors) {
      return error_text([&] { save_checkpoint(folder.path(), mesh, 1, tensors); });
    };
    EXPECT_EQ(text({{"w", view(w)}}),
              "layout: save_checkpoint: \"w\" is a plain tensor; on tp=2 it needs a layout, which "
              "says what part of the whole it is");
    EXPECT_EQ(text({{"w", view(w), make_layout(mesh, {Partial{}}, {4})}}),
              "layout: save_checkpoint: \"w\" is (4) as [tp: Partial(sum)]; it must be reduced first");
    EXPECT_EQ(text({{"w", view(w), replicated_layout(other, {4})}}),
              "layout: save_checkpoint: \"w\" is laid out over x=2, but the mesh given is another, tp=2");
    EXPECT_EQ(text({{"w", view(w.data(), 3), same}}),
              "layout: save_checkpoint: \"w\" is (3); (4) as [tp: Replicate] is (4) on this rank");
    EXPECT_EQ(text({{"w", view(w), same}, {"w", view(w), same}}),
              "bad_argument: save_checkpoint: \"w\" is given twice");
    EXPECT_EQ(text({{"w", view(static_cast<float*>(nullptr), 4), same}}),
              "bad_argument: save_checkpoint: \"w\" has no memory");
    EXPECT_EQ(
        text({{"w", view(w.data(), rank.rank == 0 ? 4 : 3), same}}),
        rank.rank == 1
            ? "layout: save_checkpoint: \"w\" is (3); (4) as [tp: Replicate] is (4) on this rank"
            : "layout: save_checkpoint: rank 1 failed: \"w\" is (3); (4) as [tp: Replicate] is (4) on this "
              "rank; " +
                  folder.path().string() + " is as it was");
    EXPECT_EQ(
        text({{rank.rank == 0 ? "w" : "v", view(w), same}}),
        "mismatch: save_checkpoint: tensor 0 is \"w\" (f32 (4) as [tp: Replicate]) on tp rank 0, but \"v\" "
        "(f32 (4) as [tp: Replicate]) on tp rank 1");
    EXPECT_EQ(error_text([&] {
                save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>{{"w", view(w), same}});
              }),
              "layout: save_checkpoint: \"w\" is laid out over tp=2, but the mesh given is empty");
  });
  EXPECT_TRUE(std::filesystem::is_empty(folder.path()));
}

}  // namespace
}  // namespace weft::checkpoint_test
