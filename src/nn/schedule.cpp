#include "weft/nn/schedule.hpp"

#include <fmt/format.h>

#include <array>
#include <cmath>
#include <numbers>

#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::array kForms{ScheduleForm::none,   ScheduleForm::constant, ScheduleForm::linear,
                            ScheduleForm::cosine, ScheduleForm::wsd,      ScheduleForm::rex};
constexpr std::array kShapes{DecayShape::linear, DecayShape::cosine, DecayShape::one_minus_sqrt};

template <class Values>
auto value_of(const Values& values, const char* what, std::string_view asked) {
  std::string names;
  for (const auto v : values) {
    if (asked == name(v)) return v;
    names += (names.empty() ? "" : ", ") + std::string(name(v));
  }
  throw Error(ErrorCode::bad_argument,
              fmt::format("schedule: {} is \"{}\"; expected one of {}", what, asked, names));
}

[[noreturn]] void wrong(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "schedule: " + text);
}

bool falls(ScheduleForm form) { return form != ScheduleForm::none && form != ScheduleForm::constant; }

// The part of peak - floor that is left when the part d, from 0 to 1, of a decay is over.
double left(DecayShape shape, double d) {
  switch (shape) {
    case DecayShape::linear: return 1.0 - d;
    case DecayShape::cosine: return 0.5 * (1.0 + std::cos(std::numbers::pi * d));
    case DecayShape::one_minus_sqrt: return 1.0 - std::sqrt(d);
  }
  return 0;  // not reached
}

double rex_left(double d) { return (1.0 - d) / (0.5 + 0.5 * (1.0 - d)); }

}  // namespace

const char* name(ScheduleForm form) noexcept {
  switch (form) {
    case ScheduleForm::none: return "none";
    case ScheduleForm::constant: return "constant";
    case ScheduleForm::linear: return "linear";
    case ScheduleForm::cosine: return "cosine";
    case ScheduleForm::wsd: return "wsd";
    case ScheduleForm::rex: return "rex";
  }
  return "?";
}

const char* name(DecayShape shape) noexcept {
  switch (shape) {
    case DecayShape::linear: return "linear";
    case DecayShape::cosine: return "cosine";
    case DecayShape::one_minus_sqrt: return "1-sqrt";
  }
  return "?";
}

ScheduleForm schedule_form_from_name(std::string_view name) { return value_of(kForms, "form", name); }
DecayShape decay_shape_from_name(std::string_view name) { return value_of(kShapes, "shape", name); }

void Schedule::check() const {
  if (form == ScheduleForm::none && warmup != 0)
    wrong(fmt::format("warmup is {}; expected 0 with form none; constant has a warm-up", warmup));
  if (falls(form) && (warmup < 0 || warmup >= total))
    wrong(fmt::format("warmup {} of total {} steps; expected 0 <= warmup < total", warmup, total));
  if (warmup < 0) wrong(fmt::format("warmup is {}; expected 0 or more", warmup));
  if (!(floor >= 0 && floor <= peak))
    wrong(fmt::format("floor {} and peak {}; expected 0 <= floor <= peak", floor, peak));
  if (!std::isfinite(peak)) wrong(fmt::format("peak is {}; expected a finite number", peak));
  if (form == ScheduleForm::wsd) {
    if (decay < 1 || decay > total - warmup)
      wrong(fmt::format("decay is {}; expected 1 to {} (total {} - warmup {})", decay, total - warmup, total,
                        warmup));
    return;
  }
  if (decay != 0)
    wrong(fmt::format("decay is {}; expected 0 with form {}: only wsd has it", decay, name(form)));
  if (shape != DecayShape::linear)
    wrong(fmt::format("shape is {}; expected linear with form {}: only wsd has others", name(shape),
                      name(form)));
}

double Schedule::at(std::int64_t step) const noexcept {
  if (form == ScheduleForm::none) return peak;
  if (step < warmup) return peak * static_cast<double>(step + 1) / static_cast<double>(warmup);
  if (form == ScheduleForm::constant) return peak;
  if (step >= total) return floor;
  const std::int64_t begin = form == ScheduleForm::wsd ? total - decay : warmup;
  if (step < begin) return peak;
  const double d = static_cast<double>(step - begin) / static_cast<double>(total - begin);  // [0, 1)
  const double kept = form == ScheduleForm::rex      ? rex_left(d)
                      : form == ScheduleForm::cosine ? left(DecayShape::cosine, d)
                                                     : left(shape, d);
  return floor + (peak - floor) * kept;
}

std::string to_string(const Schedule& s) {
  std::string text = fmt::format("form={} peak={}", name(s.form), s.peak);
  if (falls(s.form)) text += fmt::format(" floor={}", s.floor);
  if (s.form != ScheduleForm::none) text += fmt::format(" warmup={}", s.warmup);
  if (falls(s.form)) text += fmt::format(" total={}", s.total);
  if (s.form == ScheduleForm::wsd) text += fmt::format(" decay={} shape={}", s.decay, name(s.shape));
  return text;
}

}  // namespace weft
