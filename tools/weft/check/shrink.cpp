#include "shrink.hpp"

#include <algorithm>
#include <optional>

#include "weft/base/error.hpp"

namespace weft::check {
namespace {

// Returns whether the verdict on a fault needs the step. It needs the struck step, the one next to it, and
// the barriers at the end, in which every rank learns of the fault.
bool needed(const Program& p, int step) {
  if (p.fault.kind == FaultKind::none) return false;
  if (step == p.fault.step || step == p.fault.step + 1) return true;
  for (std::size_t k = static_cast<std::size_t>(step); k < p.steps.size(); ++k)
    if (p.steps[k].op != Op::barrier) return false;
  return true;
}

// The program without steps [from, to).
std::optional<Program> without_steps(const Program& p, int from, int to) {
  const bool fault = p.fault.kind != FaultKind::none;
  for (int k = from; k < to; ++k)
    if (needed(p, k)) return std::nullopt;
  Program q = p;
  q.steps.erase(q.steps.begin() + from, q.steps.begin() + to);
  if (fault && p.fault.step >= to) q.fault.step -= to - from;
  for (GroupPlan& g : q.groups)
    if (g.before >= to)
      g.before -= to - from;
    else if (g.before > from)
      g.before = from;
  settle(q);
  return q;
}

// The program without a group that no step and no other group needs.
std::optional<Program> without_group(const Program& p, int group) {
  Program q = p;
  for (const Step& s : p.steps)
    if (s.group == group) return std::nullopt;
  for (const GroupPlan& g : p.groups)
    if (&g != &p.groups[0] && g.parent == group) return std::nullopt;
  const auto at = static_cast<std::size_t>(group);
  if (at + 1 < p.groups.size() && p.groups[at + 1].joined && !p.groups[at].joined)
    q.groups[at + 1].joined = false;
  q.groups.erase(q.groups.begin() + group);
  for (Step& s : q.steps) s.group -= s.group > group;
  for (std::size_t g = 1; g < q.groups.size(); ++g) q.groups[g].parent -= q.groups[g].parent > group;
  return q;
}

// The program without its last rank, in all groups.
std::optional<Program> without_last_rank(const Program& p) {
  const int last = p.ranks() - 1;
  if (last < 1 || (p.fault.kind != FaultKind::none && p.fault.rank == last)) return std::nullopt;
  Program q = p;
  q.homes.pop_back();
  std::vector<int> homes;  // numbers without gaps
  for (int& h : q.homes) {
    if (std::find(homes.begin(), homes.end(), h) == homes.end()) homes.push_back(h);
    h = static_cast<int>(std::find(homes.begin(), homes.end(), h) - homes.begin());
  }
  for (std::size_t g = 0; g < q.groups.size(); ++g) {
    std::vector<int>& ranks = q.groups[g].ranks;
    const int at = p.rank_in(static_cast<int>(g), last), n = p.group_size(static_cast<int>(g));
    if (at < 0) continue;
    ranks.erase(ranks.begin() + at);
    if (ranks.empty()) return std::nullopt;
    for (Step& s : q.steps) {
      if (s.group != static_cast<int>(g)) continue;
      const auto moved = [&](int r) { return std::min(r - (r > at), n - 2); };
      s.root = moved(s.root);
      s.peer = moved(s.peer);
      if (s.op == Op::all_to_all_v) {
        std::vector<std::int64_t> counts;
        for (int from = 0; from < n; ++from)
          for (int to = 0; to < n; ++to)
            if (from != at && to != at) counts.push_back(s.counts[static_cast<std::size_t>(from * n + to)]);
        s.counts = counts;
      } else if (!s.counts.empty() && s.does != Does::gradients) {
        s.counts.erase(s.counts.begin() + at);
      }
    }
  }
  return q;
}

// Returns whether the program could be read from a file: a program whose struck rank is alone in its group
// could not, for example.
bool can_run(const Program& p) {
  try {
    decode(encode(p));
    return true;
  } catch (const Error&) {
    return false;
  }
}

}  // namespace

Program shrink(Program p, const std::function<bool(const Program&)>& fails, int runs) {
  const auto take = [&](const std::optional<Program>& q) {
    if (!q || runs <= 0 || q->steps.empty() || !can_run(*q)) return false;
    --runs;
    if (!fails(*q)) return false;
    p = *q;
    return true;
  };
  const auto steps = [&] { return static_cast<int>(p.steps.size()); };
  for (bool smaller = true; smaller && runs > 0;) {
    smaller = false;
    for (int size = std::max(1, steps() / 2); size > 0; size /= 2)
      for (int from = steps() - size; from >= 0; from -= size)
        if (from + size <= steps()) smaller = take(without_steps(p, from, from + size)) || smaller;
    for (int g = static_cast<int>(p.groups.size()) - 1; g > 0; --g)
      smaller = take(without_group(p, g)) || smaller;
    while (take(without_last_rank(p))) smaller = true;
    for (int k = 0; k < steps(); ++k) {
      const auto with = [&](const auto& change) {
        Program q = p;
        change(q.steps[static_cast<std::size_t>(k)]);
        smaller = take(q) || smaller;
      };
      const Step& s = p.steps[static_cast<std::size_t>(k)];
      const std::int64_t most =
          s.counts.empty() ? s.count : *std::max_element(s.counts.begin(), s.counts.end());
      for (const std::int64_t to : {std::int64_t{1}, most / 16, most / 2}) {
        const Step& now = p.steps[static_cast<std::size_t>(k)];
        const std::int64_t large =
            now.counts.empty() ? now.count : *std::max_element(now.counts.begin(), now.counts.end());
        if (to >= large || to < 1) continue;
        with([&](Step& t) {
          t.count = std::min(t.count, to);
          for (std::int64_t& c : t.counts) c = std::min(c, to);
        });
      }
      if (s.window.exchanges > 1) with([](Step& t) { t.window.exchanges = 1; });
      if (s.gradients.rounds > 1) with([](Step& t) { t.gradients.rounds = 1; });
      if (s.does == Does::gradients && s.counts.size() > 1) with([](Step& t) { t.counts.resize(1); });
      if (s.window.together) with([](Step& t) { t.window.together = false; });
      if (s.window.by_plan) with([](Step& t) { t.window.by_plan = false; });
      if (s.window.fields > 1) with([](Step& t) { t.window.fields = 1; });
      if (s.coalesced) with([](Step& t) { t.coalesced = false; });
      if (p.steps[static_cast<std::size_t>(k)].starts > 1) with([](Step& t) { t.starts = 1; });
      if (!p.steps[static_cast<std::size_t>(k)].plain && !p.steps[static_cast<std::size_t>(k)].shared)
        with([](Step& t) { t.plain = true; });
    }
    const auto whole = [&](const auto& change) {
      Program q = p;
      change(q);
      smaller = take(q) || smaller;
    };
    if (p.in_flight > 1) whole([](Program& q) { q.in_flight = 1; });
    if (p.helper) whole([](Program& q) { q.helper = false; });
    if (p.window_beside) whole([](Program& q) { q.window_beside = false; });
    if (p.ends) whole([](Program& q) { q.ends = false; });
    if (!p.path.empty()) whole([](Program& q) { q.path.clear(); });
    if (p.processes() > 1 && p.fault.kind == FaultKind::none)
      whole([](Program& q) { std::fill(q.homes.begin(), q.homes.end(), 0); });
  }
  return p;
}

}  // namespace weft::check
