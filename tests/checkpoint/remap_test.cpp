// Names and shapes of older programs: their conversion, and loads that find them. The numbers of golden files
// are in tests/models/remap_test.cpp.
#include "weft/checkpoint/remap.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <numeric>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"

namespace weft::checkpoint_remap_test {
namespace {

using test::error_text;
using test::Rank;
using test::Ranks;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

std::string words(std::string_view name, const Shape& shape) {
  std::string all;
  for (const RemappedTensor& piece : remap_old_names(name, shape))
    all += piece.name + " " + to_string(piece.shape) + " from " + std::to_string(piece.first_row) + "; ";
  return all;
}

TEST(OldNames, AreReadAsTodays) {
  EXPECT_EQ(
      words("param.a.to_qkv.weight", {6, 8, 1, 1}),
      "param.a.to_q.weight (2, 8) from 0; param.a.to_k.weight (2, 8) from 2; param.a.to_v.weight (2, 8) "
      "from 4; ");
  EXPECT_EQ(words("to_qkv.weight_u", {6}),
            "to_q.weight_u (2) from 0; to_k.weight_u (2) from 2; to_v.weight_u (2) from 4; ");
  EXPECT_EQ(words("to_qkv.weight_v", {8}),
            "to_q.weight_v (8) from 0; to_k.weight_v (8) from 0; to_v.weight_v (8) from 0; ");
  EXPECT_EQ(words("optimizer.step.a.to_qkv.weight", {1}),
            "optimizer.step.a.to_q.weight (1) from 0; optimizer.step.a.to_k.weight (1) from 0; "
            "optimizer.step.a.to_v.weight (1) from 0; ");
  EXPECT_EQ(words("a.layers.4.weight", {8, 4, 1, 1}), "a.layers.4.weight (8, 4) from 0; ");
  EXPECT_EQ(words("a.parametrizations.weight.0._u", {8}), "a.weight_u (8) from 0; ");
  EXPECT_EQ(words("to_out.parametrizations.weight.original", {8, 4, 1, 1}),
            "to_out.weight_orig (8, 4) from 0; ");
  for (const auto& [name, shape] : {std::pair<const char*, Shape>{"a.to_qkv.weight", {7, 8, 1, 1}},
                                    {"a.to_qkv.weight", {6, 8, 3, 3}},
                                    {"into_qkv.weight", {6, 8, 1, 1}},
                                    {"a.to_out.weight", {6, 8}},
                                    {"a.to_q.weight", {2, 8}},
                                    {"a.conv.weight", {8, 4, 1, 1}}})
    EXPECT_EQ(words(name, shape), "") << name;
}

// Elements of a stored global tensor are 0, 1, 2, …
struct Old {
  std::vector<float> qkv = numbers(24), out = numbers(15), u = numbers(6), v = numbers(4), other = numbers(3);
  static std::vector<float> numbers(std::size_t count) {
    std::vector<float> all(count);
    std::iota(all.begin(), all.end(), 0.0f);
    return all;
  }
};

// Saved on two ranks that cut the fused weight within q, k and v, and loaded on one, two and three.
TEST(OldNames, AreFoundByALoadOnAnyMesh) {
  const test::TemporaryFolder folder;
  test::run_ranks(Ranks::threads, 2, [&](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    Old old;
    const LayoutRef rows = make_layout(mesh, {{"tp", Shard{0}}}, {6, 4, 1, 1}),
                    columns = make_layout(mesh, {{"tp", Shard{1}}}, {5, 3, 1, 1});
    std::vector<float> half(old.qkv.begin() + 12 * rank.rank, old.qkv.begin() + 12 * rank.rank + 12), cut;
    for (std::size_t row = 0; row < 5; ++row)
      for (std::size_t c = rank.rank == 0 ? 0 : 2; c < (rank.rank == 0 ? 2u : 3u); ++c)
        cut.push_back(old.out[row * 3 + c]);
    save_checkpoint(
        folder.path(), mesh, 1,
        std::vector<NamedView>{{"to_qkv.weight", view(half.data(), {3, 4, 1, 1}), rows},
                               {"to_out.weight", view(cut.data(), columns->local_shape()), columns},
                               {"to_qkv.weight_u", view(old.u), replicated_layout(mesh, {6})},
                               {"to_qkv.weight_v", view(old.v), replicated_layout(mesh, {4})},
                               {"other", view(old.other), replicated_layout(mesh, {3})}});
  });
  for (const int ranks : {1, 2, 3})
    test::run_ranks(Ranks::threads, ranks, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", ranks}});
      const LayoutRef cut = make_layout(mesh, {{"tp", Shard{1}}}, {2, 4}),
                      out = make_layout(mesh, {{"tp", Shard{0}}}, {5, 3}), two = replicated_layout(mesh, {2}),
                      four = replicated_layout(mesh, {4}), three = replicated_layout(mesh, {3});
      std::map<std::string, std::vector<float>> memory;
      std::vector<MutableNamedView> targets;
      std::vector<std::string> names;
      const auto want = [&](const std::string& name, const LayoutRef& layout) {
        std::vector<float>& own = memory[name];
        own.assign(static_cast<std::size_t>(layout->local_shape().count()), -1);
        targets.push_back({memory.find(name)->first, view(own.data(), layout->local_shape()), layout});
      };
      for (const char* p : {"to_q", "to_k", "to_v"}) {
        want(std::string(p) + ".weight", cut);
        want(std::string(p) + ".weight_u", two);
        want(std::string(p) + ".weight_v", four);
      }
      want("to_out.weight", out);
      want("other", three);
      const CheckpointInfo info = load_checkpoint(folder.path(), mesh, targets, {.remap = remap_old_names});
      float first = 0;
      for (const char* p : {"to_q", "to_k", "to_v"}) {
        const std::vector<float>& w = memory[std::string(p) + ".weight"];
        const std::int64_t columns = cut->local_shape()[1], from = cut->parts().at(0).offset[1];
        for (std::int64_t i = 0; i < cut->local_shape().count(); ++i)
          EXPECT_EQ(w[static_cast<std::size_t>(i)],
                    4 * first + static_cast<float>(i / columns * 4 + from + i % columns));
        EXPECT_THAT(memory[std::string(p) + ".weight_u"], ElementsAre(first, first + 1));
        EXPECT_THAT(memory[std::string(p) + ".weight_v"], ElementsAre(0, 1, 2, 3));
        first += 2;
      }
      const std::int64_t row = out->parts().at(0).offset[0];
      for (std::size_t i = 0; i < memory["to_out.weight"].size(); ++i)
        EXPECT_EQ(memory["to_out.weight"][i], static_cast<float>(row * 3) + static_cast<float>(i));
      EXPECT_THAT(memory["other"], ElementsAre(0, 1, 2));
      EXPECT_THAT(
          info.remapped,
          ElementsAre("to_out.weight (5, 3, 1, 1) -> to_out.weight (5, 3)",
                      "to_qkv.weight (6, 4, 1, 1) -> to_q.weight (2, 4), to_k.weight (2, 4), "
                      "to_v.weight (2, 4)",
                      "to_qkv.weight_u (6) -> to_q.weight_u (2), to_k.weight_u (2), to_v.weight_u (2)",
                      "to_qkv.weight_v (4) -> to_q.weight_v (4), to_k.weight_v (4), to_v.weight_v (4)"));
      EXPECT_THAT(error_text([&] { load_checkpoint(folder.path(), mesh, targets); }),
                  HasSubstr("missing in the checkpoint (9): to_q.weight f32 (2, 4)"));
    });
}

// A tensor that is requested under its old name is read under it, and nothing is read twice.
TEST(OldNames, StayWhereTheyAreAskedFor) {
  const test::TemporaryFolder folder;
  Old old;
  std::vector<float> two(2);
  const NamedView u{"to_qkv.weight_u", view(old.u)};
  save_checkpoint(folder.path(), {}, 1, std::vector<NamedView>{u});
  const LoadOptions options{.remap = remap_old_names};
  EXPECT_TRUE(load_checkpoint(folder.path(), {},
                              std::vector<MutableNamedView>{{"to_qkv.weight_u", view(old.u)}}, options)
                  .remapped.empty());
  EXPECT_THAT(
      error_text([&] {
        load_checkpoint(folder.path(), {}, std::vector<MutableNamedView>{{"other", view(two)}}, options);
      }),
      HasSubstr("missing in the checkpoint (1): other f32 (2); not in the list given (1): to_qkv.weight_u"));
  EXPECT_THAT(error_text([&] {
                load_checkpoint(folder.path(), {},
                                std::vector<MutableNamedView>{{"to_k.weight_u", view(two)}}, options);
              }),
              HasSubstr("not in the list given (2): to_q.weight_u, to_v.weight_u"));
  save_checkpoint(folder.path(), {}, 2, std::vector<NamedView>{u, {"to_q.weight_u", view(two)}});
  EXPECT_EQ(error_text([&] {
              load_checkpoint(folder.path(), {}, std::vector<MutableNamedView>{{"to_k.weight_u", view(two)}},
                              options);
            }),
            "bad_argument: load_checkpoint: " + (folder / "step-00000002").string() +
                " has \"to_qkv.weight_u\", which is read as \"to_q.weight_u\", and that, too");
  const LoadOptions wrong{.remap = [](std::string_view, const Shape&) {
    return std::vector<RemappedTensor>{{"x", {2}, 5}};
  }};
  EXPECT_EQ(
      error_text([&] {
        load_checkpoint(folder / "step-00000001", {}, std::vector<MutableNamedView>{{"x", view(two)}}, wrong);
      }),
      "bad_argument: checkpoint: \"to_qkv.weight_u\" (6) cannot be read as \"x\" (2) from row 5 on; expected "
      "some of its rows");
}

}  // namespace
}  // namespace weft::checkpoint_remap_test
