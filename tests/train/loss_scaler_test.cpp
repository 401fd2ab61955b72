// Loss scaling: the scale moves as torch's does, all ranks skip or none, and a run goes on where it stopped.
#include "weft/train/loss_scaler.hpp"

#include <gtest/gtest.h>

#include <cmath>
#include <limits>

#include "dp/vectors.hpp"
#include "train/bag.hpp"
#include "weft/dp/replicated.hpp"

namespace weft::loss_scaler_test {
namespace {

using test::Bag;
using test::error_of;
using test::Rank;
using test::Ranks;
using test::Vectors;

constexpr float kNaN = std::numeric_limits<float>::quiet_NaN(),
                kInfinity = std::numeric_limits<float>::infinity();

// The scales of torch.amp.GradScaler(init_scale=1024, growth_factor=2, backoff_factor=0.5,
// growth_interval=3).
TEST(LossScaler, TheScaleMovesAsTorchs) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  LossScaler scaler({.scale = 1024, .interval = 3});
  const bool finite[] = {true, true, true, true, false, true, true, false, false, true, true, true, true};
  const double after[] = {1024, 1024, 2048, 2048, 1024, 1024, 1024, 512, 256, 256, 256, 512, 512};
  for (std::size_t step = 0; step < std::size(finite); ++step) {
    const double scale = scaler.scale();
    std::vector<float> g = {3.0f * static_cast<float>(scale), finite[step] ? 0.0f : kInfinity};
    const Gradient list[] = {{"w", view(g)}};
    EXPECT_EQ(scaler.unscale(list, one), finite[step]);
    EXPECT_EQ(g[0], finite[step] ? 3.0f : 3.0f * static_cast<float>(scale))
        << "a step that is skipped changes nothing";
    scaler.update();
    EXPECT_EQ(scaler.scale(), after[step]) << step;
  }
  EXPECT_EQ(scaler.state().good_steps, 1);
}

// Two optimizers: each learns about its own gradients, and the scale falls if one of them overflowed.
TEST(LossScaler, AListThatIsNotFiniteCountsWhateverComesBehindIt) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  for (const bool first : {true, false}) {
    LossScaler scaler({.scale = 8});
    std::vector<float> a = {first ? kInfinity : 16.0f}, b = {first ? 16.0f : kInfinity};
    const Gradient list_a[] = {{"a", view(a)}}, list_b[] = {{"b", view(b)}};
    EXPECT_EQ(scaler.unscale(list_a, one), !first);
    EXPECT_EQ(scaler.unscale(list_b, one), first);
    EXPECT_EQ(first ? b[0] : a[0], 2.0f);
    scaler.update();
    EXPECT_EQ(scaler.scale(), 4);
    EXPECT_EQ(scaler.state().good_steps, 0);
    a[0] = b[0] = 4;
    EXPECT_TRUE(scaler.unscale(list_a, one));
    EXPECT_TRUE(scaler.unscale(list_b, one));
    scaler.update();
    EXPECT_EQ(scaler.state().good_steps, 1);
    b[0] = kNaN;
    EXPECT_FALSE(scaler.unscale(list_b, one));
    scaler.discard();
    EXPECT_STREQ(error_of([&] { scaler.update(); }).what(),
                 "loss_scaler: update() without unscale(); one comes before the other in each step");
    EXPECT_TRUE(scaler.unscale(list_a, one));
    scaler.update();
    EXPECT_EQ(scaler.scale(), 4);
    EXPECT_EQ(scaler.state().good_steps, 2);
  }
}

// One rank has an infinity or a NaN, in a shard or in a gradient that only it has: all skip, and their scales
// stay equal.
TEST(LossScaler, AllRanksSkipOrNone) {
  test::run_ranks(Ranks::threads, 3, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"domain", 3}});
    LossScaler scaler({.scale = 8, .interval = 2});
    for (int step = 0; step < 9; ++step) {
      const int bad = step % 3 == 2 ? step % 4 % 3 : -1;  // this rank's gradient
      Vectors gradients;
      std::vector<float>& w = gradients.put("w", make_layout(mesh, {Shard{0}}, {7}), [&](std::size_t i) {
        return bad == rank.rank && i == 1
                   ? (step % 2 == 0 ? kNaN : kInfinity)
                   : static_cast<float>(scaler.scale() * (1.0 + static_cast<double>(i)));
      });
      if (rank.rank == 1) gradients.put("of stage 1", nullptr, {2}, [](std::size_t) { return 1.0f; });
      EXPECT_EQ(scaler.unscale(gradients.all(), mesh), bad < 0);
      if (bad < 0) {
        EXPECT_EQ(w[1], 2.0f);
      }
      scaler.update();
      EXPECT_EQ(scaler.scale(), step % 3 == 1 ? 16 : 8)
          << "two good steps double it, and a skipped one halves it";
      EXPECT_EQ(scaler.state().good_steps, step % 3 == 0 ? 1 : 0);
    }
  });
}

// The gradients that f16 holds of a loss that is not scaled are mostly zeros; with the scale they are those
// of f32.
TEST(LossScaler, KeepsGradientsOfF16FromVanishing) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  LossScaler scaler;
  float lost = 0, kept = 0;
  std::vector<float> widened;
  for (int i = 1; i < 29; ++i) {
    const float small = 1e-9f * static_cast<float>(i);
    lost += static_cast<float>(f16(small));
    widened.push_back(static_cast<float>(f16(small * static_cast<float>(scaler.scale()))));
  }
  EXPECT_EQ(lost, 0.0f);
  const Gradient list[] = {{"w", view(widened)}};
  EXPECT_TRUE(scaler.unscale(list, one));
  for (std::size_t i = 0; i < widened.size(); ++i) {
    const float small = 1e-9f * static_cast<float>(i + 1);
    EXPECT_NEAR(widened[i] / small, 1, 1e-3);
    kept += widened[i];
  }
  EXPECT_GT(kept, 0.0f);
}

TEST(LossScaler, GoesOnFromItsText) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  const LossScaler::Options options{.scale = 1000.1, .growth = 1.7, .backoff = 0.3, .interval = 2};
  LossScaler whole(options), after(options);
  const auto step = [&](LossScaler& scaler, int n) {
    std::vector<float> g = {n % 5 == 3 ? kNaN : 1.0f};
    const Gradient list[] = {{"w", view(g)}};
    scaler.unscale(list, one);
    scaler.update();
  };
  for (int n = 0; n < 6; ++n) step(whole, n);
  after.set_text(whole.to_text());
  EXPECT_EQ(after.scale(), whole.scale());
  EXPECT_EQ(after.state().good_steps, whole.state().good_steps);
  for (int n = 6; n < 20; ++n) {
    step(whole, n);
    step(after, n);
    EXPECT_EQ(after.scale(), whole.scale());
  }
  for (const char* text : {"", "1024", "1024 ", "x 3", "1024 3x", "1024  3", "1024 3 "})
    EXPECT_EQ(error_of([&] { after.set_text(text); }).what(),
              "loss_scaler: \"" + std::string(text) +
                  "\" is no state; expected a scale and a number of steps, as to_text() writes them");
  EXPECT_STREQ(error_of([&] { after.set_text("inf 3"); }).what(),
               "loss_scaler: a state's scale is inf; expected a finite number above 0");
  EXPECT_STREQ(error_of([&] { after.set_text("2 -3"); }).what(),
               "loss_scaler: a state's good_steps is -3; expected 0 or more");
  EXPECT_EQ(after.scale(), whole.scale()) << "what is refused changes nothing";
}

TEST(LossScaler, TheScaleHasBounds) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  std::vector<float> good = {0}, bad = {kNaN};
  const Gradient fine[] = {{"w", view(good)}}, broken[] = {{"w", view(bad)}};
  LossScaler large({.scale = 0x1p127, .interval = 1});
  EXPECT_TRUE(large.unscale(fine, one));
  large.update();
  EXPECT_EQ(large.scale(), 0x1p127);
  LossScaler small({.scale = 3, .least = 1});
  for (const double scale : {1.5, 1.0}) {
    EXPECT_FALSE(small.unscale(broken, one));
    small.update();
    EXPECT_EQ(small.scale(), scale);
  }
  EXPECT_FALSE(small.unscale(broken, one));
  EXPECT_STREQ(error_of([&] { small.update(); }).what(),
               "loss_scaler: gradients are not finite though the scale is 1; something else than the scale "
               "is at fault");
  EXPECT_TRUE(small.unscale(fine, one));
  small.update();
}

TEST(LossScaler, WhatDoesNotFitIsNamed) {
  const auto text = [](const LossScaler::Options& o) {
    return std::string(error_of([&] { LossScaler{o}; }).what());
  };
  EXPECT_EQ(text({.scale = 0}), "loss_scaler: scale is 0; expected a finite number above 0");
  EXPECT_EQ(text({.growth = 0.5}), "loss_scaler: growth is 0.5; expected a finite number of 1 or more");
  EXPECT_EQ(text({.backoff = 1}), "loss_scaler: backoff is 1; expected more than 0, and less than 1");
  EXPECT_EQ(text({.interval = 0}), "loss_scaler: interval is 0; expected 1 or more");
  EXPECT_EQ(text({.least = -1}), "loss_scaler: least is -1; expected a finite number above 0");
  LossScaler scaler;
  EXPECT_STREQ(error_of([&] { scaler.update(); }).what(),
               "loss_scaler: update() without unscale(); one comes before the other in each step");
  EXPECT_EQ(error_of([&] { scaler.unscale(std::span<const Gradient>(), DeviceMesh()); }).code(),
            ErrorCode::bad_argument);
}

TEST(LossScaler, WhatIsWrongOnOneRankIsToldToAll) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}});
    std::vector<float> g = {1};
    std::vector<f16> half = {f16(1.0f)};
    const Gradient wide[] = {{"w", view(g)}}, narrow[] = {{"w", view(half)}};
    LossScaler scaler;
    const std::string why =
        "loss_scaler: the gradient of \"w\" is f16; expected f64, f32 or bf16: divided by the scale its "
        "small elements would "
        "vanish";
    EXPECT_EQ(error_of([&] { scaler.unscale(rank.rank == 0 ? wide : narrow, mesh); }).what(),
              rank.rank == 1 ? why : "loss_scaler: dp rank 1 failed: " + why);
    if (rank.rank == 1) scaler.set_state({32768, 0});
    const Error e = error_of([&] { scaler.unscale(wide, mesh); });
    EXPECT_EQ(e.code(), ErrorCode::mismatch);
    EXPECT_STREQ(
        e.what(),
        "loss_scaler: the scale is 65536 after 0 good steps on dp rank 0, but 32768 after 0 on dp rank 1");
    EXPECT_EQ(g[0], 1.0f);
    if (rank.rank == 1) scaler.set_state({65536, 0});
    EXPECT_TRUE(scaler.unscale(wide, mesh));
  });
}

TEST(LossScaler, TakesParameters) {
  Context context;
  const DeviceMesh one = DeviceMesh::arithmetic(context, MeshShape{{"dp", 1}}, 0);
  Bag bag;
  Parameter &a = bag.put(context, "a", {2}), &b = bag.put(context, "b", {2});
  b.set_trainable(false);
  LossScaler scaler({.scale = 4});
  EXPECT_STREQ(error_of([&] { scaler.unscale(bag.parameters(), one); }).what(),
               "loss_scaler: \"a\" has no gradient");
  test::use(a, nullptr, [](std::size_t) { return 6.0f; });
  EXPECT_TRUE(scaler.unscale(bag.parameters(), one));
  EXPECT_EQ(test::gradient(a), (std::vector<float>{1.5f, 1.5f}));
}

}  // namespace
}  // namespace weft::loss_scaler_test
