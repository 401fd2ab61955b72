#include "weft/tp/parallelize.hpp"

#include <cxxabi.h>
#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cstdlib>
#include <typeinfo>

#include "weft/base/error.hpp"
#include "weft/nn/linear.hpp"

namespace weft {
namespace {

// The tree as a list, parents before children; what the plan says of each node.
struct Node {
  Module* module;
  std::string path;                    // relative to the root given, as patterns are
  int parent;                          // -1: none
  const Plan::Entry* entry = nullptr;  // null: the plan does not name it
  int entered_by = -1;                 // of a column layer: the node whose boundary is its own, too
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

bool splits(Style style) { return style != Style::enter; }
bool by_columns(Style style) { return style == Style::column || style == Style::column_gathered; }

[[noreturn]] void refuse(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "parallelize: " + text);
}

// "weft::RMSNorm" → "RMSNorm"
std::string kind_of(const Module& module) {
  char* const demangled = abi::__cxa_demangle(typeid(module).name(), nullptr, nullptr, nullptr);
  std::string kind = demangled ? demangled : typeid(module).name();
  std::free(demangled);
  const std::size_t colon = kind.rfind(':');
  return colon == std::string::npos ? kind : kind.substr(colon + 1);
}

std::string axis_name(const DeviceMesh& axis) { return fmt::format("{}={}", axis.name(), axis.size()); }

// How far a pattern that matches nothing leads, and what is there.
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
  refuse(fmt::format("\"{}\" matches no module; {} has {}", pattern,
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
        refuse(fmt::format("\"{}\" is named twice: as {} by \"{}\" and as {} by \"{}\"", node.path,
                           name(node.entry->style), node.entry->pattern, name(entry.style), entry.pattern));
      node.entry = &entry;
    }
    if (!matched) refuse_unmatched(entry.pattern, nodes);
  }
}

void mark_ancestors(std::vector<Node>& nodes) {
  for (Node& node : nodes) {
    if (node.entry == nullptr || !splits(node.entry->style)) continue;
    node.touched = true;
    for (int up = node.parent; up >= 0; up = nodes[static_cast<std::size_t>(up)].parent) {
      Node& ancestor = nodes[static_cast<std::size_t>(up)];
      ancestor.touched = true;
      const bool enters = ancestor.entry != nullptr && ancestor.entry->style == Style::enter;
      if (by_columns(node.entry->style) && enters && node.entered_by < 0) node.entered_by = up;
    }
  }
}

void expect_divides(const Node& node, std::int64_t count, std::string_view what, const DeviceMesh& axis) {
  const std::int64_t ranks = axis.size();
  if (count % ranks == 0) return;
  const std::string arithmetic =
      fmt::format("({} = {} x {} + {})", count, ranks, count / ranks, count % ranks);
  if (count < ranks)
    refuse(fmt::format("\"{}\" has {} {}; {} needs at least one for each rank {}", node.path, count, what,
                       axis_name(axis), arithmetic));
  refuse(fmt::format("\"{}\" has {} {}; they do not divide into {} {}", node.path, count, what,
                     axis_name(axis), arithmetic));
}

void expect_unplaced(const Node& node, const Parameter& parameter, const DeviceMesh& axis) {
  if (parameter.materialised())
    refuse(fmt::format("\"{}\" has memory already; parallelize comes before materialise", parameter.path()));
  if (parameter.holders() > 1)
    refuse(fmt::format("\"{}\": its weight \"{}\" is shared by {} modules, which need it whole", node.path,
                       parameter.path(), parameter.holders()));
  if (parameter.layout() == nullptr) return;
  if (!(parameter.layout()->mesh() == axis.root()))
    refuse(fmt::format("\"{}\" lies over {}, the axis {} belongs to {}: not the same mesh", parameter.path(),
                       to_string(parameter.layout()->mesh_shape()), axis_name(axis),
                       to_string(axis.root().shape())));
  if (!is_replicate(parameter.layout()->on(axis)))
    refuse(fmt::format("\"{}\" is {} on {} already", parameter.path(),
                       to_string(parameter.layout()->on(axis)), axis_name(axis)));
}

void check_linear(const Node& node, const DeviceMesh& axis) {
  const Style style = node.entry->style;
  const auto* const linear = dynamic_cast<const Linear*>(node.module);
  if (linear == nullptr)
    refuse(fmt::format("\"{}\" is of kind {}; style {} (pattern \"{}\") needs a Linear", node.path,
                       kind_of(*node.module), name(style), node.entry->pattern));
  expect_unplaced(node, *linear->weight, axis);
  if (linear->bias) expect_unplaced(node, *linear->bias, axis);
  if (by_columns(style)) expect_divides(node, linear->weight->global_shape()[0], "output features", axis);
  if (style == Style::row) expect_divides(node, linear->weight->global_shape()[1], "input features", axis);
}

bool needs_before(const Node& node) {
  return node.entry->style == Style::enter || (by_columns(node.entry->style) && node.entered_by < 0);
}
bool needs_after(const Node& node) {
  return node.entry->style == Style::row || node.entry->style == Style::column_gathered;
}

void check(const std::vector<Node>& nodes, const DeviceMesh& axis) {
  for (std::size_t i = 0; i < nodes.size(); ++i) {
    const Node& node = nodes[i];
    if (node.touched)
      for (const Module::Unit& unit : node.module->units()) expect_divides(node, unit.count, unit.name, axis);
    if (node.entry == nullptr) continue;
    if (splits(node.entry->style)) check_linear(node, axis);
    if (node.entry->style == Style::enter && std::none_of(nodes.begin(), nodes.end(), [&](const Node& n) {
          return n.entered_by == static_cast<int>(i);
        }))
      refuse(fmt::format("\"{}\" is named enter (pattern \"{}\"), but no layer inside it is split by columns",
                         node.path, node.entry->pattern));
    if ((needs_before(node) && !node.module->before().empty()) ||
        (needs_after(node) && !node.module->after().empty()))
      refuse(fmt::format("\"{}\" has a boundary already", node.path));
  }
}

void split(Parameter& parameter, const DeviceMesh& axis, const Placement& placement) {
  const LayoutRef layout = parameter.layout() != nullptr
                               ? parameter.layout()
                               : replicated_layout(axis.root(), parameter.global_shape());
  parameter.set_layout(layout->with(axis, placement));
}

void put_into_effect(const std::vector<Node>& nodes, const DeviceMesh& axis) {
  const BoundaryRef enter = boundary::enter(axis), leave = boundary::leave(axis),
                    gather = boundary::gather(axis, -1);
  for (const Node& node : nodes) {
    if (node.entry == nullptr) continue;
    const Style style = node.entry->style;
    if (needs_before(node)) node.module->add_before(enter);
    if (needs_after(node)) node.module->add_after(style == Style::row ? leave : gather);
    if (!splits(style)) continue;
    auto& linear = dynamic_cast<Linear&>(*node.module);
    split(*linear.weight, axis, Shard{by_columns(style) ? 0 : 1});
    if (linear.bias)
      split(*linear.bias, axis, by_columns(style) ? Placement(Shard{0}) : Placement(Replicate{}));
  }
}

}  // namespace

// First the whole plan is laid over the tree, then all of it is checked, and only then is anything set.
void parallelize(Module& root, const DeviceMesh& axis, const Plan& plan) {
  std::vector<Node> nodes;
  list(root, "", -1, nodes);
  assign_entries(plan, nodes);
  mark_ancestors(nodes);
  check(nodes, axis);
  if (axis.size() > 1) put_into_effect(nodes, axis);
}

}  // namespace weft
