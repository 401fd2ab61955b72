#include "weft/nn/schedule.hpp"

#include <cmath>
#include <numbers>
#include <vector>

#include "nn/support.hpp"

namespace weft::schedule_test {
namespace {

using test::error_text;

constexpr std::int64_t kWarmup = 4, kTotal = 40, kDecay = 16;
constexpr double kPeak = 0.75, kFloor = 0.125;

std::string text_of(const Schedule& s) {
  return error_text(ErrorCode::bad_argument, [&] { s.check(); });
}

// The rates of 50 steps, made step by step in one loop. The first `stable` steps after the warm-up have the
// peak. Then the rate is f of the part of the fall that has passed.
template <class F>
std::vector<double> expected(std::int64_t stable, const F& f) {
  std::vector<double> rates;
  for (std::int64_t i = 1; i <= kWarmup; ++i)
    rates.push_back(kPeak * static_cast<double>(i) / static_cast<double>(kWarmup));
  for (std::int64_t i = 0; i < stable; ++i) rates.push_back(kPeak);
  const std::int64_t fall = kTotal - kWarmup - stable;
  for (std::int64_t i = 0; i < fall; ++i)
    rates.push_back(kFloor + (kPeak - kFloor) * f(static_cast<double>(i) / static_cast<double>(fall)));
  while (rates.size() < 50) rates.push_back(kFloor);
  return rates;
}

void expect_rates(const Schedule& s, const std::vector<double>& want) {
  s.check();
  for (std::size_t i = 0; i < want.size(); ++i)
    EXPECT_NEAR(s.at(static_cast<std::int64_t>(i)), want[i], 1e-15) << to_string(s) << ", step " << i;
}

TEST(Schedule, EachFormFollowsItsFormula) {
  const auto of = [](ScheduleForm form) { return Schedule{form, kPeak, kFloor, kWarmup, kTotal}; };
  const auto straight = [](double d) { return 1 - d; };
  const auto half_cosine = [](double d) { return std::pow(std::cos(std::numbers::pi * d / 2), 2); };
  expect_rates(of(ScheduleForm::linear), expected(0, straight));
  expect_rates(of(ScheduleForm::cosine), expected(0, half_cosine));
  // REX as its paper has it: (1 - z) / (1/2 + (1 - z)/2), which is 2 (1 - z) / (2 - z).
  expect_rates(of(ScheduleForm::rex), expected(0, [](double d) { return 2 * (1 - d) / (2 - d); }));

  Schedule wsd = of(ScheduleForm::wsd);
  wsd.decay = kDecay;
  const std::int64_t stable = kTotal - kWarmup - kDecay;
  expect_rates(wsd, expected(stable, straight));
  wsd.shape = DecayShape::cosine;
  expect_rates(wsd, expected(stable, half_cosine));
  wsd.shape = DecayShape::one_minus_sqrt;
  expect_rates(wsd, expected(stable, [](double d) { return 1 - std::sqrt(d); }));

  Schedule rest = of(ScheduleForm::constant);
  rest.check();
  for (std::int64_t i = 0; i < 50; ++i)
    EXPECT_EQ(rest.at(i), i < kWarmup ? kPeak * static_cast<double>(i + 1) / 4 : kPeak) << i;
  rest = {ScheduleForm::none, kPeak};
  rest.check();
  for (const std::int64_t i : {0, 1, 1000}) EXPECT_EQ(rest.at(i), kPeak);
}

TEST(Schedule, RisesThenFalls) {
  const Schedule s{.peak = 1.0, .floor = 0.1, .warmup = 4, .total = 12};
  EXPECT_DOUBLE_EQ(s.at(0), 0.25);
  EXPECT_DOUBLE_EQ(s.at(3), 1.0);
  EXPECT_DOUBLE_EQ(s.at(4), 1.0);
  EXPECT_NEAR(s.at(8), 0.55, 1e-12);
  EXPECT_DOUBLE_EQ(s.at(12), 0.1);
  EXPECT_DOUBLE_EQ(s.at(1000), 0.1);
}

// A decay of all steps after the warm-up is the schedule without a stable part, to the bit.
TEST(Schedule, ADecayOfAllStepsIsTheShapeItself) {
  const Schedule linear{ScheduleForm::linear, kPeak, kFloor, kWarmup, kTotal},
      cosine{ScheduleForm::cosine, kPeak, kFloor, kWarmup, kTotal};
  Schedule wsd{ScheduleForm::wsd, kPeak, kFloor, kWarmup, kTotal, kTotal - kWarmup};
  for (std::int64_t i = 0; i < 50; ++i) EXPECT_EQ(wsd.at(i), linear.at(i)) << i;
  wsd.shape = DecayShape::cosine;
  for (std::int64_t i = 0; i < 50; ++i) EXPECT_EQ(wsd.at(i), cosine.at(i)) << i;
}

TEST(Schedule, IsAValueThatCanBeComparedAndPrinted) {
  const Schedule wsd{ScheduleForm::wsd, 0.1, 0, 10, 100, 20, DecayShape::one_minus_sqrt};
  Schedule other = wsd;
  EXPECT_EQ(wsd, other);
  other.decay = 21;
  EXPECT_NE(wsd, other);
  EXPECT_EQ(to_string(wsd), "form=wsd peak=0.1 floor=0 warmup=10 total=100 decay=20 shape=1-sqrt");
  EXPECT_EQ(to_string(Schedule{.peak = 0.5, .total = 9}), "form=cosine peak=0.5 floor=0 warmup=0 total=9");
  EXPECT_EQ(to_string(Schedule{ScheduleForm::constant, 0.5, 0, 3}), "form=constant peak=0.5 warmup=3");
  EXPECT_EQ(to_string(Schedule{ScheduleForm::none, 0.5}), "form=none peak=0.5");
  for (const ScheduleForm f : {ScheduleForm::none, ScheduleForm::constant, ScheduleForm::linear,
                               ScheduleForm::cosine, ScheduleForm::wsd, ScheduleForm::rex})
    EXPECT_EQ(schedule_form_from_name(name(f)), f);
  for (const DecayShape s : {DecayShape::linear, DecayShape::cosine, DecayShape::one_minus_sqrt})
    EXPECT_EQ(decay_shape_from_name(name(s)), s);
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [] { schedule_form_from_name("step"); }),
            "schedule: form is \"step\"; expected one of none, constant, linear, cosine, wsd, rex");
  EXPECT_EQ(error_text(ErrorCode::bad_argument, [] { decay_shape_from_name(""); }),
            "schedule: shape is \"\"; expected one of linear, cosine, 1-sqrt");
}

TEST(Schedule, WrongFieldsAreNamed) {
  EXPECT_EQ(text_of({.warmup = 5, .total = 5}),
            "schedule: warmup 5 of total 5 steps; expected 0 <= warmup < total");
  EXPECT_EQ(text_of({.form = ScheduleForm::constant, .warmup = -1}),
            "schedule: warmup is -1; expected 0 or more");
  EXPECT_EQ(text_of({.form = ScheduleForm::none, .warmup = 3}),
            "schedule: warmup is 3; expected 0 with form none; constant has a warm-up");
  EXPECT_EQ(text_of({.peak = 0.1, .floor = 0.5}),
            "schedule: floor 0.5 and peak 0.1; expected 0 <= floor <= peak");
  EXPECT_EQ(text_of({.peak = HUGE_VAL}), "schedule: peak is inf; expected a finite number");
  EXPECT_EQ(text_of({.peak = std::nan("")}), "schedule: floor 0 and peak nan; expected 0 <= floor <= peak");
  EXPECT_EQ(text_of({.form = ScheduleForm::wsd, .warmup = 2, .total = 10}),
            "schedule: decay is 0; expected 1 to 8 (total 10 - warmup 2)");
  EXPECT_EQ(text_of({.form = ScheduleForm::wsd, .warmup = 2, .total = 10, .decay = 9}),
            "schedule: decay is 9; expected 1 to 8 (total 10 - warmup 2)");
  EXPECT_EQ(text_of({.form = ScheduleForm::rex, .total = 10, .decay = 3}),
            "schedule: decay is 3; expected 0 with form rex: only wsd has it");
  EXPECT_EQ(text_of({.form = ScheduleForm::linear, .total = 10, .shape = DecayShape::cosine}),
            "schedule: shape is cosine; expected linear with form linear: only wsd has others");
}

}  // namespace
}  // namespace weft::schedule_test
