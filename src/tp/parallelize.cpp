#include "weft/tp/parallelize.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "mesh/axis_ranks.hpp"
#include "nn/kind_of.hpp"
#include "tp/refuse.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

// The tree as a list, parents before children, with the plan's entry for each node.
struct Node {
  Module* module;
  std::string path;                    // relative to the root given, as patterns are
  int parent;                          // -1: none
  const Plan::Entry* entry = nullptr;  // null: the plan does not name it
  int entered_by = -1;                 // of a column layer: the node whose boundary is also that of the layer
  bool touched = false;                // it, or something below it, is split
};

std::string joined(const std::string& path, const std::string& name) {
  return path.empty() ? name : path + "." + name;
}

void list(Module& module, std::string path, int parent, std::vector<Node>& nodes) {
  const int self = static_cast<int>(nodes.size());
  nodes.push_back({&module, path, parent});
  for (const auto& [name, child] : module.children()) list(*child, joined(path, name), self, nodes);
}

// Throws for a pattern that matches nothing. The text says which part of it matches, and which children there
// are at that point.
[[noreturn]] void refuse_unmatched(const std::string& pattern, const std::vector<Node>& nodes) {
  std::string known = pattern;
  const Node* deepest = &nodes.front();
  while (!known.empty()) {
    const std::size_t dot = known.rfind('.');
    known.resize(dot == std::string::npos ? 0 : dot);
    const auto found =
        std::find_if(nodes.begin(), nodes.end(), [&](const Node& n) { return matches(known, n.path); });
    if (found == nodes.end()) continue;
    deepest = &*found;
    break;
  }
  std::vector<std::string_view> children;
  for (const auto& [name, child] : deepest->module->children()) children.push_back(name);
  refuse_parallelize(
      fmt::format("\"{}\" matches no module; {} has {}", pattern,
                  known.empty() ? "the root" : fmt::format("\"{}\"", deepest->path),
                  children.empty() ? "no children" : fmt::format("{}", fmt::join(children, ", "))));
}

void assign_entries(const Plan& plan, std::vector<Node>& nodes) {
  for (const Plan::Entry& entry : plan.entries()) {
    bool matched = false;
    for (Node& node : nodes) {
      if (!matches(entry.pattern, node.path)) continue;
      matched = true;
      if (node.entry != nullptr)
        refuse_parallelize(fmt::format("\"{}\" is named twice: as {} by \"{}\" and as {} by \"{}\"",
                                       node.path, node.entry->style.name, node.entry->pattern,
                                       entry.style.name, entry.pattern));
      node.entry = &entry;
    }
    if (!matched) refuse_unmatched(entry.pattern, nodes);
  }
}

void mark_ancestors(std::vector<Node>& nodes) {
  for (Node& node : nodes) {
    if (node.entry == nullptr || !node.entry->style.split) continue;
    node.touched = true;
    for (int up = node.parent; up >= 0; up = nodes[static_cast<std::size_t>(up)].parent) {
      Node& ancestor = nodes[static_cast<std::size_t>(up)];
      ancestor.touched = true;
      const bool enters = ancestor.entry != nullptr && ancestor.entry->style.before_is_for_inside;
      if (node.entry->style.shares_before && enters && node.entered_by < 0) node.entered_by = up;
    }
  }
}

// Into how many parts other axes than `axis` shard the dimensions that `rule` shards.
std::int64_t parts_already(const ShardRule& rule, const DeviceMesh& axis) {
  if (rule.parameters.empty() || rule.parameters[0].parameter->layout() == nullptr) return 1;
  const Layout& layout = *rule.parameters[0].parameter->layout();
  std::int64_t parts = 1;
  for (int a = 0; a < layout.mesh_shape().axis_count(); ++a)
    if (layout.placements[static_cast<std::size_t>(a)] == rule.parameters[0].placement &&
        std::ranges::find(axis.root_axes(), a) == axis.root_axes().end())
      parts *= layout.mesh_shape().size(a);
  return parts;
}

// `already`: the number of parts into which other axes shard it. Each of these parts is sharded again.
void expect_divides(const Node& node, const Unit& unit, const DeviceMesh& axis, std::int64_t already) {
  const std::int64_t parts = axis.size() * already;
  if (unit.count % parts == 0) return;
  const std::string arithmetic =
      fmt::format("({} = {} x {} + {})", unit.count, parts, unit.count / parts, unit.count % parts);
  const std::string has = fmt::format("\"{}\" has {} {}{}", node.path, unit.count, unit.name,
                                      already > 1 ? fmt::format(", in {} parts already", already) : "");
  if (unit.count < parts)
    refuse_parallelize(
        fmt::format("{}; {} needs at least one for each rank {}", has, axis_text(axis), arithmetic));
  refuse_parallelize(fmt::format("{}; they do not divide into {} {}", has, axis_text(axis), arithmetic));
}

// How many of the modules that hold `parameter` the plan splits so that it has the placement `placement`.
int split_alike(const std::vector<Node>& nodes, const Parameter& parameter, const Placement& placement) {
  int count = 0;
  for (const Node& node : nodes) {
    if (node.entry == nullptr || !node.entry->style.split) continue;
    for (const ShardRule::Part& part : node.module->shard_rule(*node.entry->style.split).parameters)
      count += part.parameter == &parameter && part.placement == placement ? 1 : 0;
  }
  return count;
}

// Throws unless a parameter, or a buffer, has no memory and is whole on the axis.
template <class Kept>
void expect_free(const Kept& kept, const DeviceMesh& axis) {
  if (kept.materialised())
    refuse_parallelize(
        fmt::format("\"{}\" has memory already; parallelize comes before materialise", kept.path()));
  if constexpr (requires { kept.layout_fixed_by(); })
    if (kept.layout_fixed_by() != nullptr)
      refuse_parallelize(fmt::format("\"{}\" was laid out by {} already; parallelize comes before that",
                                     kept.path(), kept.layout_fixed_by()));
  if (kept.layout() == nullptr) return;
  if (!(kept.layout()->mesh() == axis.root()))
    refuse_parallelize(fmt::format(
        "\"{}\" lies over {}, the axis {} belongs to {}: not the same DeviceMesh; use one for both",
        kept.path(), to_string(kept.layout()->mesh_shape()), axis_text(axis),
        to_string(axis.root().shape())));
  if (!is_replicate(kept.layout()->on(axis)))
    refuse_parallelize(fmt::format("\"{}\" is {} on {} already", kept.path(),
                                   to_string(kept.layout()->on(axis)), axis_text(axis)));
}

void expect_unplaced(const Node& node, const ShardRule::Part& part, const std::vector<Node>& nodes,
                     const DeviceMesh& axis) {
  const Parameter& parameter = *part.parameter;
  expect_free(parameter, axis);
  if (parameter.holders() > 1)
    if (const int alike = split_alike(nodes, parameter, part.placement); alike < parameter.holders())
      refuse_parallelize(
          fmt::format("\"{}\": its weight \"{}\" is shared by {} modules, of which the plan splits {} as {}; "
                      "expected all or none",
                      node.path, parameter.path(), parameter.holders(), alike, to_string(part.placement)));
}

void check_split(const Node& node, const std::vector<Node>& nodes, const DeviceMesh& axis) {
  const ShardRule rule = node.module->shard_rule(*node.entry->style.split);
  if (!rule.refused.empty())
    refuse_parallelize(fmt::format("\"{}\" is of kind {}, which {}; style {} (pattern \"{}\") needs that",
                                   node.path, kind_of(*node.module), rule.refused, node.entry->style.name,
                                   node.entry->pattern));
  for (const ShardRule::Part& part : rule.parameters) expect_unplaced(node, part, nodes, axis);
  for (const ShardRule::BufferPart& part : rule.buffers) expect_free(*part.buffer, axis);
  if (node.entry->style.uneven) return;
  for (const Unit& unit : rule.whole_units) expect_divides(node, unit, axis, parts_already(rule, axis));
}

bool needs_before(const Node& node) { return node.entry->style.before && node.entered_by < 0; }
bool needs_after(const Node& node) { return node.entry->style.after.has_value(); }

bool is_below(const std::vector<Node>& nodes, std::size_t node, std::size_t ancestor) {
  for (int up = nodes[node].parent; up >= 0; up = nodes[static_cast<std::size_t>(up)].parent)
    if (up == static_cast<int>(ancestor)) return true;
  return node == ancestor;
}

// Checks that the units of a module divide if the plan splits a layer inside it to which they belong (or the
// layer that they name).
void check_units(const std::vector<Node>& nodes, std::size_t i, const DeviceMesh& axis) {
  for (const Unit& unit : nodes[i].module->units()) {
    std::int64_t already = 0;
    for (std::size_t k = i; k < nodes.size(); ++k) {
      const Node& n = nodes[k];
      if (n.entry != nullptr && n.entry->style.split && is_below(nodes, k, i) &&
          (unit.cut_by == nullptr || unit.cut_by == n.module))
        already = std::max(already, parts_already(n.module->shard_rule(*n.entry->style.split), axis));
    }
    if (already > 0) expect_divides(nodes[i], unit, axis, already);
  }
}

void check(const std::vector<Node>& nodes, const Plan& plan, const DeviceMesh& axis) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    if (node.touched && std::ranges::find(plan.left_whole(), node.path) == plan.left_whole().end())
      check_units(nodes, i, axis);
    if (node.entry == nullptr) continue;
    if (node.entry->style.split) check_split(node, nodes, axis);
    if (node.entry->style.before_is_for_inside &&
        std::none_of(nodes.begin(), nodes.end(),
                     [&](const Node& n) { return n.entered_by == static_cast<int>(i); }))
      refuse_parallelize(
          fmt::format("\"{}\" is named {} (pattern \"{}\"), but no layer inside it is split by columns",
                      node.path, node.entry->style.name, node.entry->pattern));
    if ((needs_before(node) && !node.module->before().empty()) ||
        (needs_after(node) && !node.module->after().empty()))
      refuse_parallelize(fmt::format("\"{}\" has a boundary already", node.path));
  }
}

// A parameter or a buffer.
template <class Kept>
void split(Kept& kept, const DeviceMesh& axis, const Placement& placement, const Segments& segments) {
  const LayoutRef layout =
      kept.layout() != nullptr ? kept.layout() : replicated_layout(axis.root(), kept.global_shape());
  const LayoutRef cut = layout->with(axis, placement);
  kept.set_layout(segments.sizes.empty() ? cut : cut->segmented(segments.dim, segments.sizes));
}

void put_into_effect(const std::vector<Node>& nodes, const DeviceMesh& axis) {
  for (const Node& node : nodes) {
    if (node.entry == nullptr) continue;
    const Style& style = node.entry->style;
    const int features = style.split ? node.module->shard_rule(*style.split).features : -1;
    const auto boundary = [&](const Style::Change& change) {
      const auto meant = [&](const Placement& p) { return is_shard(p, -1) ? Placement(Shard{features}) : p; };
      return std::make_shared<RedistributeBoundary>(axis, meant(change.from), meant(change.to));
    };
    if (needs_before(node)) node.module->add_before(boundary(*style.before));
    if (needs_after(node)) node.module->add_after(boundary(*style.after));
    if (!style.split) continue;
    const ShardRule rule = node.module->shard_rule(*style.split);
    for (const ShardRule::Part& part : rule.parameters)
      split(*part.parameter, axis, part.placement, part.segments);
    for (const ShardRule::BufferPart& part : rule.buffers)
      split(*part.buffer, axis, part.placement, part.segments);
  }
}

}  // namespace

// First every entry of the plan is matched with nodes of the tree, then everything is checked, and only then
// is anything set.
void parallelize(Module& root, const DeviceMesh& axis, const Plan& plan) {
  given_mesh("parallelize", axis, "axis");
  std::vector<Node> nodes;
  list(root, "", -1, nodes);
  assign_entries(plan, nodes);
  for (const std::string& path : plan.left_whole())
    if (std::ranges::none_of(nodes, [&](const Node& n) { return n.path == path; }))
      refuse_unmatched(path, nodes);
  mark_ancestors(nodes);
  check(nodes, plan, axis);
  if (axis.size() > 1) put_into_effect(nodes, axis);
}

}  // namespace weft
