#include "weft/train/freeze_schedule.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <charconv>

#include "weft/base/error.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

[[noreturn]] void bad_schedule(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "freeze schedule: " + text);
}

std::string_view trimmed(std::string_view text) {
  while (!text.empty() && text.front() == ' ') text.remove_prefix(1);
  while (!text.empty() && text.back() == ' ') text.remove_suffix(1);
  return text;
}

// "100:trained:layers.3"
FreezeRule rule_of(std::string_view text) {
  const auto wrong = [&] {
    bad_schedule(fmt::format("\"{}\"; expected STEP:frozen:PATTERN or STEP:trained:PATTERN", text));
  };
  const std::size_t first = text.find(':');
  const std::size_t second = first == std::string_view::npos ? first : text.find(':', first + 1);
  if (second == std::string_view::npos) wrong();
  FreezeRule rule;
  const auto [end, failed] = std::from_chars(text.data(), text.data() + first, rule.step);
  if (failed != std::errc() || end != text.data() + first) wrong();
  const std::string_view what = text.substr(first + 1, second - first - 1);
  if (what != "frozen" && what != "trained") wrong();
  rule.frozen = what == "frozen";
  rule.pattern = text.substr(second + 1);
  return rule;
}

}  // namespace

FreezeSchedule::FreezeSchedule(std::vector<FreezeRule> rules) : rules_(std::move(rules)) {
  for (const FreezeRule& rule : rules_) {
    if (rule.step < 0)
      bad_schedule(fmt::format("step {} of \"{}\"; expected 0 or more", rule.step, rule.pattern));
    if (rule.pattern.empty() || rule.pattern.find_first_of(" :,") != std::string::npos)
      bad_schedule(
          fmt::format("the pattern is \"{}\"; expected a path, without blank, ':' and ','", rule.pattern));
  }
  std::ranges::stable_sort(rules_, {}, &FreezeRule::step);
  rules_.erase(std::unique(rules_.begin(), rules_.end()), rules_.end());
}

FreezeSchedule FreezeSchedule::from_text(std::string_view text) {
  std::vector<FreezeRule> rules;
  if (trimmed(text).empty()) return {};
  for (std::size_t begin = 0; begin <= text.size();) {
    const std::size_t end = std::min(text.find(',', begin), text.size());
    rules.push_back(rule_of(trimmed(text.substr(begin, end - begin))));
    begin = end + 1;
  }
  return FreezeSchedule(std::move(rules));
}

std::optional<bool> FreezeSchedule::frozen(std::string_view path, std::int64_t step) const noexcept {
  std::optional<bool> last;
  for (const FreezeRule& rule : rules_)
    if (rule.step <= step && matches_part(rule.pattern, path)) last = rule.frozen;
  return last;
}

void FreezeSchedule::check(std::span<Parameter* const> parameters) const {
  for (const FreezeRule& rule : rules_)
    if (std::ranges::none_of(parameters,
                             [&](const Parameter* p) { return matches_part(rule.pattern, p->path()); }))
      bad_schedule(
          fmt::format("the pattern \"{}\" of step {} matches no parameter", rule.pattern, rule.step));
}

std::string to_string(const FreezeSchedule& schedule) {
  std::string text;
  for (const FreezeRule& rule : schedule.rules())
    text += fmt::format("{}{}:{}:{}", text.empty() ? "" : ",", rule.step, rule.frozen ? "frozen" : "trained",
                        rule.pattern);
  return text;
}

}  // namespace weft
