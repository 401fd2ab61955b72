#include "weft/tp/own_plan.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>

#include "mesh/axis_ranks.hpp"
#include "tp/refuse.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

const Style kFeedsColumns{.name = "feeds_columns", .after = Style::Change{Replicate{}, Replicate{}}};
const Style kFedColumn{.name = "fed_column", .split = Split::column};
const std::array kStyles{
    &Style::enter,    &Style::column,       &Style::column_gathered, &Style::row,    &Style::vocabulary,
    &Style::sequence, &Style::cut_sequence, &Style::gather_sequence, &kFeedsColumns, &kFedColumn};

std::string below(const std::string& path, const std::string& rest) {
  return path.empty() || rest.empty() ? path + rest : path + "." + rest;
}

// A module with a plan, its path below the given root, and the plan with paths from the root.
struct Planned {
  std::string path;
  Plan plan;
};

// The module's plan, with paths from the given root.
Plan plan_of(const Module& module, const std::string& path) {
  const OwnPlan own = module.own_plan();
  Plan plan;
  const auto add = [&](const std::string& at, std::string_view style) {
    try {
      plan.add(below(path, at), style_named(style));
    } catch (const Error& e) {
      refuse_parallelize(fmt::format("the plan of \"{}\" itself: \"{}\": {}", path, at, e.what()));
    }
  };
  if (!own.styles.empty() && !(own.columns.empty() && own.rows.empty()))
    refuse_parallelize(fmt::format("the plan of \"{}\" itself has styles and {}; expected only one of them",
                                   path, own.columns.empty() ? "rows" : "columns"));
  if (!own.styles.empty()) {
    for (const OwnPlan::Entry& entry : own.styles) add(entry.path, entry.style);
    return plan;
  }
  if (own.columns.empty() != own.rows.empty())
    refuse_parallelize(fmt::format("the plan of \"{}\" itself has {} but no {}; expected both, or styles",
                                   path, own.rows.empty() ? "columns" : "rows",
                                   own.rows.empty() ? "rows" : "columns"));
  for (const std::string& at : own.columns) add(at, "column");
  for (const std::string& at : own.rows) add(at, "row");
  return plan;
}

void collect(Module& module, const std::string& path, std::vector<Planned>& all) {
  if (!module.own_plan().empty()) all.push_back({path, plan_of(module, path)});
  for (const auto& [name, child] : module.children()) collect(*child, below(path, name), all);
}

// Returns why a layer that the plan names stays whole by default. Empty if no such layer does.
std::string whole_by_default(Module& module, const std::string& path, const Plan& plan) {
  for (const Plan::Entry& entry : plan.entries())
    if (entry.style.split && matches(entry.pattern, path))
      if (std::string why = module.shard_rule(*entry.style.split).whole_by_default; !why.empty()) return why;
  for (const auto& [name, child] : module.children())
    if (std::string why = whole_by_default(*child, below(path, name), plan); !why.empty()) return why;
  return {};
}

std::string names_of(const std::vector<std::string>& paths) {
  constexpr std::size_t kShown = 8;
  std::string text;
  for (std::size_t i = 0; i < std::min(kShown, paths.size()); ++i)
    text += fmt::format("{}\"{}\"", i == 0 ? "" : ", ", paths[i]);
  return paths.size() > kShown ? fmt::format("{} and {} more", text, paths.size() - kShown) : text;
}

}  // namespace

const Style& style_named(std::string_view name) {
  std::vector<std::string_view> known;
  for (const Style* style : kStyles) {
    if (style->name == name) return *style;
    known.push_back(style->name);
  }
  throw Error(ErrorCode::bad_argument,
              fmt::format("style \"{}\"; expected one of {}", name, fmt::join(known, ", ")));
}

bool supports_tp(Module& root) {
  bool any = false;
  root.visit([&](Module& m) { any |= !m.own_plan().empty(); });
  return any;
}

// All plans are collected. Plans with a layer that stays whole are left out. The others form one plan for
// parallelize(), which checks it completely before it sets anything.
OwnPlanCount parallelize(Module& root, const DeviceMesh& axis, const OwnPlanOptions& options) {
  given_mesh("parallelize", axis, "axis");
  std::vector<Planned> all;
  collect(root, "", all);
  if (all.empty())
    refuse_parallelize(
        "no module of the tree has a plan of its own; give one: parallelize(root, axis, plan), or "
        "set_own_plan() "
        "on a module");
  Plan together;
  std::vector<std::string> skipped;
  std::string why;
  for (const Planned& planned : all) {
    if (options.under_spectral_norm == WholeByDefault::skip)
      if (std::string reason = whole_by_default(root, "", planned.plan); !reason.empty()) {
        skipped.push_back(planned.path);
        together.leave_whole(planned.path);
        why = std::move(reason);
        continue;
      }
    for (const Plan::Entry& entry : planned.plan.entries()) together.add(entry.pattern, entry.style);
  }
  parallelize(root, axis, together);
  const OwnPlanCount count{static_cast<int>(all.size() - skipped.size()), static_cast<int>(skipped.size())};
  if (count.skipped > 0 && axis.size() > 1 && axis.root().rank() == 0) {  // once for all ranks
    const std::string where = axis_text(axis);
    if (count.split == 0)
      axis.context().log().write(
          LogLevel::error,
          fmt::format("parallelize: NOTHING is split over {}: each of the {} modules with a plan has a layer "
                      "with {} and stays whole, so every rank computes all of the model: {}",
                      where, count.skipped, why, names_of(skipped)));
    else
      axis.context().log().write(
          LogLevel::warning,
          fmt::format(
              "parallelize: {} of {} modules with a plan are split over {}; {} stay whole, since a layer "
              "has {}: {}",
              count.split, all.size(), where, count.skipped, why, names_of(skipped)));
  }
  return count;
}

}  // namespace weft
