// Averages of masters: by the formula, on shards as they lie, swapped in and out to the same bits.
#include "weft/train/ema.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <map>

#include "train/bag.hpp"

namespace weft::ema_test {
namespace {

using test::Bag;
using test::error_of;
using test::Rank;
using test::Ranks;

void fill(Parameter& p, const std::function<float(std::size_t)>& value) {
  const auto to = p.write_master().f32();
  for (std::size_t i = 0; i < to.size(); ++i) to[i] = value(i);
}
std::vector<float> values(const Tensor& t) { return {t.f32().begin(), t.f32().end()}; }

TEST(Ema, IsTheFormula) {
  Context context;
  Bag bag;
  Parameter& w = bag.put(context, "w", {7});
  fill(w, [](std::size_t i) { return static_cast<float>(i); });
  for (const bool warm_up : {false, true}) {
    Ema ema(bag.compute(), bag.parameters(), {.decay = 0.75, .warm_up = warm_up});
    EXPECT_EQ(values(ema.average(0)), values(w.master())) << "it begins as the master";
    std::vector<double> expected;
    for (const float x : w.master().f32()) expected.push_back(static_cast<double>(x));
    for (int step = 0; step < 40; ++step) {
      fill(w, [&](std::size_t i) { return std::sin(static_cast<float>(step * 7) + static_cast<float>(i)); });
      const double decay = warm_up ? std::min(0.75, (1.0 + step) / (10.0 + step)) : 0.75;
      EXPECT_EQ(ema.decay_at(step), decay);
      ema.update();
      for (std::size_t i = 0; i < expected.size(); ++i) {
        expected[i] = decay * expected[i] + (1 - decay) * static_cast<double>(w.master().f32()[i]);
        EXPECT_NEAR(ema.average(0).f32()[i], expected[i], 1e-6) << step;
      }
    }
  }
}

// An average far larger than the master does not take the master's digits along; of a decay of 0 it is the
// master.
TEST(Ema, ASmallDecayKeepsTheMastersDigits) {
  Context context;
  Bag bag;
  Parameter& w = bag.put(context, "w", {3});
  for (const double decay : {0.0, 0.1, 0.25}) {
    fill(w, [](std::size_t) { return 1e6f; });
    Ema ema(bag.compute(), bag.parameters(), {.decay = decay, .warm_up = false});
    fill(w, [](std::size_t i) { return 0.1f * static_cast<float>(i + 1); });
    for (int step = 1; step <= 30; ++step) ema.update();
    for (std::size_t i = 0; i < 3; ++i)
      EXPECT_NEAR(ema.average(0).f32()[i], w.master().f32()[i], 1e-7) << decay;
  }
}

// The ranks' parts together are the average of the whole, and nothing is sent: the mesh cannot communicate.
TEST(Ema, ShardsAreAveragedAsTheyLie) {
  Context context;
  for (int rank = 0; rank < 3; ++rank) {
    const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 3}}, rank);
    Bag bag;
    const LayoutRef cut = make_layout(mesh, {Shard{0}}, {7});
    Parameter& w = bag.put(context, "w", {7}, cut);
    const auto first = static_cast<std::size_t>(cut->parts().front().offset[0]);
    fill(w, [&](std::size_t i) { return static_cast<float>(first + i); });
    Ema ema(bag.compute(), bag.parameters(), {.decay = 0.5});
    fill(w, [&](std::size_t i) { return static_cast<float>(2 * (first + i)); });
    ema.update();
    for (std::size_t i = 0; i < static_cast<std::size_t>(w.master().count()); ++i)
      EXPECT_EQ(ema.average(0).f32()[i], 1.5f * static_cast<float>(first + i));
    EXPECT_EQ(ema.average(0).layout(), cut);
  }
}

TEST(Ema, IsSwappedInAndOutToTheSameBits) {
  Context context;
  Bag bag;
  Parameter &a = bag.put(context, "a", {5}), &b = bag.put(context, "b", {2, 3});
  b.set_trainable(false);
  fill(a, [](std::size_t i) { return 1.0f / static_cast<float>(i + 3); });
  fill(b, [](std::size_t) { return 4.0f; });
  Ema ema(bag.compute(), bag.parameters(), {.decay = 0.9});
  fill(a, [](std::size_t i) { return -1.0f / static_cast<float>(i + 5); });
  ema.update();
  const std::vector<float> master = values(a.master()), average = values(ema.average(0));
  {
    const Ema::Swapped averages(ema);
    EXPECT_TRUE(ema.swapped());
    EXPECT_EQ(values(a.master()), average);
    EXPECT_EQ(values(a.weight()), average);
    EXPECT_EQ(values(ema.average(0)), master);
    EXPECT_EQ(values(b.master()), std::vector<float>(6, 4.0f)) << "what is frozen is its own average";
    EXPECT_STREQ(error_of([&] { ema.update(); }).what(),
                 "ema: update() while the averages are swapped in; swap_out() first");
    EXPECT_STREQ(error_of([&] { ema.swap_in(); }).what(),
                 "ema: swap_in() while the averages are swapped in; swap_out() first");
    EXPECT_STREQ(error_of([&] { ema.entries([](const auto&, auto, const auto&) {}); }).what(),
                 "ema: entries() while the averages are swapped in; swap_out() first");
    EXPECT_STREQ(error_of([&] { ema.add(b); }).what(),
                 "ema: \"b\" is frozen; its average would be its master");
  }
  EXPECT_EQ(values(a.master()), master);
  EXPECT_EQ(values(ema.average(0)), average);
  EXPECT_STREQ(error_of([&] { ema.swap_out(); }).what(), "ema: swap_out() without swap_in()");
}

// bf16 weights are made again from the averages, and from the masters afterwards.
TEST(Ema, WeightsOfBf16Follow) {
  Context context;
  Compute compute(context);
  Parameter w({4});
  w.set_dtype(DType::bf16);
  w.materialise(compute);
  fill(w, [](std::size_t) { return 1.0f; });
  Ema ema(compute, {&w}, {.decay = 0.5});
  fill(w, [](std::size_t) { return 3.0f; });
  ema.update();
  const auto first = [&] { return static_cast<float>(w.weight().as<bf16>()[0]); };
  EXPECT_EQ(first(), 3.0f);
  ema.swap_in();
  EXPECT_EQ(first(), 2.0f);
  ema.swap_out();
  EXPECT_EQ(first(), 3.0f);
}

// A run that was saved and goes on has the averages of one that never stopped, to the bit.
TEST(Ema, GoesOnFromItsEntries) {
  Context context;
  Bag bag;
  Parameter &a = bag.put(context, "a", {5}), &b = bag.put(context, "b", {2, 3});
  const auto step = [&](int n) {
    fill(a, [&](std::size_t i) { return std::cos(static_cast<float>(n) + static_cast<float>(i)); });
    fill(b, [&](std::size_t i) { return std::sin(static_cast<float>(n * static_cast<int>(i))); });
  };
  step(0);
  const Ema::Options options{.decay = 0.8, .warm_up = true};
  Ema whole(bag.compute(), bag.parameters(), options), before(bag.compute(), bag.parameters(), options);
  for (int n = 1; n < 4; ++n) {
    step(n);
    whole.update();
    before.update();
  }
  Ema after(bag.compute(), bag.parameters(), options);
  std::map<std::string, Tensor> saved;
  before.entries([&](const std::string& path, std::string_view name, const Tensor& t) {
    saved[path + "/" + std::string(name)] = t;
  });
  EXPECT_EQ(saved.size(), 4u);
  EXPECT_EQ(saved.at("b/updates").as<std::int64_t>()[0], 3);
  after.entries([&](const std::string& path, std::string_view name, const Tensor& t) {
    const Tensor& from = saved.at(path + "/" + std::string(name));
    ASSERT_EQ(from.bytes(), t.bytes());
    std::copy_n(from.data(), from.bytes(), t.data());
  });
  for (int n = 4; n < 9; ++n) {
    step(n);
    whole.update();
    after.update();
  }
  for (std::size_t i = 0; i < 2; ++i) EXPECT_EQ(values(after.average(i)), values(whole.average(i)));
}

// A parameter that is unfrozen later is as if it had been trained from the start with a rate of zero.
TEST(Ema, TakesWhatIsUnfrozenLater) {
  Context context;
  Bag bag;
  Parameter &a = bag.put(context, "a", {2}), &b = bag.put(context, "b", {2});
  fill(a, [](std::size_t) { return 1.0f; });
  fill(b, [](std::size_t) { return 2.0f; });
  b.set_trainable(false);
  Ema late(bag.compute(), bag.parameters(), {.decay = 0.5});
  b.set_trainable(true);
  EXPECT_STREQ(error_of([&] { late.update(); }).what(),
               "ema: \"b\" was frozen when the ema was made; add() it when it is unfrozen");
  late.add(b);
  EXPECT_STREQ(error_of([&] { late.add(b); }).what(), "ema: \"b\" is averaged already");
  Ema always(bag.compute(), bag.parameters(), {.decay = 0.5});
  always.update();
  late.update();
  fill(b, [](std::size_t) { return 4.0f; });
  always.update();
  late.update();
  EXPECT_EQ(values(late.average(1)), values(always.average(1)));
  EXPECT_EQ(late.average(1).f32()[0], 3.0f);
  a.set_trainable(false);
  late.update();
  EXPECT_EQ(late.average(0).f32()[0], 1.0f);
}

TEST(Ema, WhatDoesNotFitIsNamed) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, MeshShape{{"dp", 2}}, 0);
  Bag bag;
  Parameter& w = bag.put(context, "w", {4}, replicated_layout(mesh, {4}));
  EXPECT_STREQ(error_of([&] { Ema(bag.compute(), bag.parameters(), {.decay = 1}); }).what(),
               "ema: decay is 1; expected 0 or more, and less than 1");
  EXPECT_STREQ(error_of([&] { Ema(bag.compute(), {&w, &w}); }).what(), "ema: \"w\" is averaged already");
  Ema ema(bag.compute(), bag.parameters());
  const LayoutRef cut = make_layout(mesh, {Shard{0}}, {4});
  w.set_master(Tensor(context, {2}).with_layout(cut));
  const Error e = error_of([&] { ema.update(); });
  EXPECT_EQ(e.code(), ErrorCode::layout);
  EXPECT_STREQ(e.what(),
               "ema: the average of \"w\" is Replicate on dp=2; expected Shard(0) (as the master; make the "
               "ema after the "
               "master has its layout)");
  EXPECT_EQ(error_of([&] { ema.swap_in(); }).code(), ErrorCode::layout);
  EXPECT_FALSE(ema.swapped());
}

}  // namespace
}  // namespace weft::ema_test
