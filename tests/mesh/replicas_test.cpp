// Drifted replicas are found on any rank; tensors that are no replicas are not compared.
#include "weft/mesh/replicas.hpp"

#include <gtest/gtest.h>

#include <string>
#include <vector>

#include "support/calls_made.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"

namespace weft::replicas_test {
namespace {

using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;

std::string drift(const std::vector<NamedView>& tensors, const DeviceMesh& axes) {
  return error_text([&] { check_replicas(tensors, axes); });
}

TEST(CheckReplicas, EveryDtypeIsComparedByItsBits) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 3}});
    const auto text = [&]<class T>(T same, T other) {
      std::vector<T> good(37, same), bad = good;
      if (rank.rank == 1) bad[36] = other;
      const LayoutRef layout = replicated_layout(mesh, {37});
      check_replicas(std::vector<NamedView>{{"good", view(good), layout}}, mesh["dp"]);
      return drift({{"good", view(good), layout}, {"bad", view(bad), layout}}, mesh["dp"]);
    };
    const std::string expected =
        "mismatch: check_replicas: \"bad\" is Replicate on dp=3, but on dp rank 1 it has other bits";
    EXPECT_EQ(text(1.0, 1.0 + 0x1p-52), expected);
    EXPECT_EQ(text(0.0f, -0.0f), expected);
    EXPECT_EQ(text(bf16(1.0f), bf16(1.0f + 0x1p-7f)), expected);
    EXPECT_EQ(text(f16(1.0f), f16(1.0f + 0x1p-10f)), expected);
    EXPECT_EQ(text(std::int64_t{7}, std::int64_t{8}), expected);
    EXPECT_EQ(text(std::uint8_t{7}, std::uint8_t{8}), expected);
  });
}

// Ranks that hold the same part are compared along the axes on which it is replicated, and named as the axes
// number them.
TEST(CheckReplicas, PartsAreComparedWhereTheyAreReplicated) {
  test::run_ranks(Ranks::threads, 8, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 4}, {"tp", 2}});
    const int tp = rank.rank % 2;
    std::vector<float> cut = {static_cast<float>(tp)}, part = {static_cast<float>(rank.rank)};
    std::vector<NamedView> tensors = {
        {"cut", view(cut), make_layout(mesh, {Replicate{}, Shard{0}}, {2})},
        {"gradient", view(part), make_layout(mesh, {Partial{}, Partial{}}, {1})},
        {"shard", view(part), make_layout(mesh, {Shard{0}, Shard{0}}, {8})}};
    check_replicas(tensors, mesh);
    check_replicas(tensors, mesh["tp"]);
    if (rank.rank == 5) cut[0] = 9;
    const Error e = error_of([&] { check_replicas(tensors, mesh); });
    EXPECT_STREQ(e.what(),
                 "check_replicas: \"cut\" is Replicate on dp=4, but on dp,tp rank 5 it has other bits");
    ASSERT_EQ(e.ranks().size(), 1u);
    EXPECT_EQ(e.ranks()[0], 5);
    EXPECT_EQ(drift(tensors, mesh["dp"]),
              tp == 0 ? "no error"
                      : "mismatch: check_replicas: \"cut\" is Replicate on dp=4, but on dp rank 2 (rank 5 of "
                        "\"world\") it has other bits");
    check_replicas(tensors, mesh["tp"]);  // sharded there
  });
}

// If no value is held by more ranks than any other, nobody can say which is right.
TEST(CheckReplicas, WithoutAMajorityAllAreNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 4}});
    std::vector<float> w = {rank.rank < 2 ? 1.0f : 2.0f};
    std::vector<NamedView> tensors(6, {"w", view(w), replicated_layout(mesh, {1})});
    tensors[1].name = "a";
    EXPECT_EQ(
        drift({tensors[0]}, mesh),
        "mismatch: check_replicas: \"w\" is Replicate on dp=4, but on dp ranks 0, 1, 2, 3 it has other bits");
    EXPECT_EQ(
        drift(tensors, mesh),
        "mismatch: check_replicas: \"w\" is Replicate on dp=4, but on dp ranks 0, 1, 2, 3 it has other bits; "
        "replicas of \"a\", \"w\", \"w\" and 2 more differ, too");
  });
}

TEST(CheckReplicas, OneSmallExchangeWhateverTheNumberOfTensors) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> w(300, 1.0f);
    std::vector<NamedView> tensors;
    for (std::size_t i = 0; i < w.size(); ++i)
      tensors.push_back({"w", view(w.data() + i, 1), replicated_layout(mesh, {1})});
    const auto calls = [&] { return test::calls_made(rank.group()); };
    const std::size_t before = calls();
    check_replicas(tensors, mesh["dp"]);
    EXPECT_EQ(calls(), before + 1);
    check_replicas({}, mesh["dp"]);
  });
}

TEST(CheckReplicas, AnotherListOnOneRankIsFoundOut) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> w(2);
    const LayoutRef same = replicated_layout(mesh, {2});
    const bool odd = rank.rank == 1;
    EXPECT_EQ(drift({{odd ? "b" : "a", view(w), same}}, mesh),
              "mismatch: check_replicas: tensor 0 is \"a\" (f32 (2) as [dp: Replicate]) on dp rank 0, but "
              "\"b\" (f32 "
              "(2) as [dp: Replicate]) on dp rank 1");
    std::vector<NamedView> fewer(odd ? 1 : 2, {"a", view(w), same});
    EXPECT_EQ(drift(fewer, mesh),
              "mismatch: check_replicas: tensor 1 is \"a\" (f32 (2) as [dp: Replicate]) on dp rank 0, but "
              "missing on "
              "dp rank 1");
    EXPECT_EQ(drift({{"a", view(w), odd ? nullptr : same}}, mesh),
              "mismatch: check_replicas: tensor 0 is \"a\" (f32 (2) as [dp: Replicate]) on dp rank 0, but "
              "\"a\" (f32 "
              "(2) without a layout) on dp rank 1");
  });
}

// No rank waits for a rank that got other tensors than the others.
TEST(CheckReplicas, AWrongArgumentOnOneRankIsToldToAll) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 3}});
    std::vector<float> w(4);
    const LayoutRef same = replicated_layout(mesh, {4});
    const std::string own = rank.rank == 1 ? "" : "check_replicas: dp rank 1 failed: ";
    EXPECT_EQ(drift({{"w", view(w.data(), rank.rank == 1 ? 3 : 4), same}}, mesh),
              "layout: " + own + "check_replicas: \"w\" is (3); (4) as [dp: Replicate] is (4) on this rank");
    EXPECT_EQ(drift({{"w", view(rank.rank == 1 ? nullptr : w.data(), 4), same}}, mesh),
              "bad_argument: " + own + "check_replicas: \"w\" has no memory");
    EXPECT_EQ(drift({{"w", view(w), same}}, mesh), "no error") << "and the group goes on";
  });
}

TEST(CheckReplicas, WhatCannotBeComparedIsNamed) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    DeviceMesh mesh(rank.group(), {{"dp", 2}}), other(rank.group(), {{"x", 2}});
    std::vector<float> w(4);
    const LayoutRef same = replicated_layout(mesh, {4});
    EXPECT_EQ(drift({{"w", view(w), nullptr}}, mesh),
              "layout: check_replicas: \"w\" is a plain tensor; on dp=2 it needs a layout, which "
              "says what part of the whole it is");
    EXPECT_EQ(drift({{"w", view(w), replicated_layout(other, {4})}}, mesh["dp"]),
              "layout: check_replicas: \"w\" is laid out over x=2, another mesh than that of dp");
    EXPECT_EQ(drift({{"w", view(w.data(), 3), same}}, mesh),
              "layout: check_replicas: \"w\" is (3); (4) as [dp: Replicate] is (4) on this rank");
    EXPECT_EQ(drift({{"w", view(static_cast<float*>(nullptr), 4), same}}, mesh),
              "bad_argument: check_replicas: \"w\" has no memory");
    NamedView strided{"w", view(w), replicated_layout(mesh, {2, 2})};
    strided.data.shape = {2, 2};
    strided.data.strides = {1, 2};
    EXPECT_EQ(drift({strided}, mesh),
              "bad_argument: check_replicas: \"w\" is not contiguous; copy it into a contiguous buffer");
    NamedView cuda{"w", view(w), same};
    cuda.data.device = {DeviceKind::cuda, 0};
    EXPECT_EQ(drift({cuda}, mesh),
              "bad_argument: check_replicas: \"w\" is on cuda:0; expected cpu, as no Compute was given");
  });
  DeviceMesh none;
  EXPECT_EQ(drift({}, none),
            "bad_argument: check_replicas: axes is an empty DeviceMesh, made by default or moved from");
}

}  // namespace
}  // namespace weft::replicas_test
