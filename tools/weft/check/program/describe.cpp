// Programs as text for people, one line per step.
#include <fmt/format.h>
#include <fmt/ranges.h>

#include "faults/strike.hpp"
#include "program.hpp"

namespace weft::check {

std::string describe(const Fault& f) {
  if (f.kind == FaultKind::none) return "none";
  return fmt::format("{} {} of step {} on rank {}", name(f.kind), name(f.point), f.step, f.rank);
}

namespace {

// The action of a step that is no call.
std::string describe_more(const Step& s) {
  switch (s.does) {
    case Does::call: break;
    case Does::overlap:
      return fmt::format("calls that overlap: {}, of {} {}", name(s.overlap), s.count, name(s.dtype));
    case Does::gradients: {
      const GradientPlan& g = s.gradients;
      const std::string more =
          fmt::format("{} round{}{}", g.rounds, g.rounds == 1 ? "" : "s", s.shared ? ", shared memory" : "");
      if (g.at_once) return fmt::format("gradients at once, of [{}], {}", fmt::join(s.counts, " "), more);
      return fmt::format("{} of [{}], {} bytes, {}", g.cut ? "sharded parameters" : "gradients in buckets",
                         fmt::join(s.counts, " "), g.bytes, more);
    }
    case Does::agreement: return fmt::format("all give the same {}", name(s.value));
    case Does::window: {
      constexpr std::string_view kEdges[] = {"none", "zero", "constant", "periodic", "reflect", "replicate"};
      const WindowPlan& w = s.window;
      return fmt::format("{}{} {}, rows [{}] of {}, {} before and {} after, edge {}, {} x {} fields{}{}",
                         w.adjoint ? "adjoint of a " : "",
                         w.by_plan    ? "planned window"
                         : w.together ? "windows together, of"
                                      : "window",
                         name(s.dtype), fmt::join(s.counts, " "), s.count, w.before, w.after,
                         kEdges[static_cast<std::size_t>(w.edge)], w.exchanges, w.fields,
                         w.newest_first ? ", the newest finished first" : "",
                         s.shared  ? ", shared memory"
                         : s.plain ? ", plain buffers"
                                   : "");
    }
  }
  return {};
}

}  // namespace

std::string describe(const Program& p, int step) {
  const Step& s = p.steps[static_cast<std::size_t>(step)];
  if (s.does != Does::call) return fmt::format("step {:>2}: group {}  {}", step, s.group, describe_more(s));
  std::string text = fmt::format("step {:>2}: group {}  {}", step, s.group,
                                 s.op == Op::recv   ? "ring"
                                 : s.op == Op::send ? "message"
                                                    : name(s.op));
  if (s.starts > 1) text += fmt::format(" {} times", s.starts);
  if (s.op == Op::barrier) return text;
  text += fmt::format(" {}", name(s.dtype));
  if (s.counts.empty()) text += fmt::format(" x{}", s.count);
  if (!s.counts.empty()) text += fmt::format(" counts [{}]", fmt::join(s.counts, " "));
  if (s.reduces()) text += fmt::format(" {}", name(s.reduce));
  if (s.reduces() && s.reduce == ReduceOp::Kind::premul_sum) text += fmt::format("({})", s.scale);
  if (s.reduces() && s.order == Order::canonical) text += ", canonical order";
  if (s.is_rooted()) text += fmt::format(", root {}", s.root);
  if (s.op == Op::send) text += fmt::format(", {} -> {}, tag {}", s.root, s.peer, s.tag);
  if (s.op == Op::recv) text += fmt::format(", to the rank {} further on, tag {}", s.peer, s.tag);
  if (s.shared) text += ", shared memory";
  if (s.plain) text += ", plain buffers";
  if (s.coalesced) text += ", together with the next";
  return text;
}

std::string describe(const Program& p) {
  std::string text = fmt::format("{} rank{} in processes [{}], up to {} call{} in flight{}{}\n", p.ranks(),
                                 p.ranks() == 1 ? "" : "s", fmt::join(p.homes, " "), p.in_flight,
                                 p.in_flight == 1 ? "" : "s", p.helper ? ", helper threads" : "",
                                 p.path.empty() ? "" : fmt::format(", path {}", p.path));
  constexpr std::string_view kHow[] = {"world", "subgroup", "split", "duplicate"};
  for (std::size_t g = 0; g < p.groups.size(); ++g) {
    const GroupPlan& plan = p.groups[g];
    text += fmt::format("group {}: {}", g, kHow[static_cast<std::size_t>(plan.how)]);
    if (g > 0) text += fmt::format(" of group {} before step {}", plan.parent, plan.before);
    text += fmt::format(", ranks [{}]\n", fmt::join(plan.ranks, " "));
  }
  for (int k = 0; k < static_cast<int>(p.steps.size()); ++k) text += describe(p, k) + "\n";
  if (const auto those = p.heartbeat_ranks(); !those.empty())
    text += fmt::format("heartbeats in group 0: rank {} to rank {}\n", those[0], those[1]);
  if (shares_block(p))
    text += fmt::format("the others: {} in a group of their own; groups that have failed are {}\n",
                        p.window_beside ? "windows" : "an all_reduce", p.ends ? "ended" : "quiesced");
  if (p.ending != Ending::barriers) text += fmt::format("ends by: {}\n", name(p.ending));
  return text + fmt::format("fault: {}\n", describe(p.fault));
}

}  // namespace weft::check
