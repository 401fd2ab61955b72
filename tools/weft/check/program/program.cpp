#include "program.hpp"

#include <algorithm>

namespace weft::check {
namespace {

constexpr std::string_view kPoints[] = {"before_post",   "after_post",     "in_chunk",
                                        "while_waiting", "before_quiesce", "in_creation"};
static_assert(std::size(kPoints) == kFaultPoints);

constexpr std::string_view kDoesNames[] = {"call", "window", "agreement", "overlap", "gradients"};
static_assert(std::size(kDoesNames) == kDoes);
constexpr std::string_view kValueNames[] = {"edge", "full", "mesh", "max_norm", "saved", "loaded"};
static_assert(std::size(kValueNames) == kValues);
constexpr std::string_view kOverlapNames[] = {"send_recv", "send_recv_part", "twice", "read_written"};
static_assert(std::size(kOverlapNames) == kOverlaps);
constexpr std::string_view kEndingNames[] = {"barriers", "leave", "destroy"};
static_assert(std::size(kEndingNames) == kEndings);

template <class List>
bool contains(const List& list, Op op) {
  return std::find(std::begin(list), std::end(list), op) != std::end(list);
}

}  // namespace

std::string_view name(FaultPoint point) noexcept { return kPoints[static_cast<std::size_t>(point)]; }
std::string_view name(Does does) noexcept { return kDoesNames[static_cast<std::size_t>(does)]; }
std::string_view name(Value value) noexcept { return kValueNames[static_cast<std::size_t>(value)]; }
std::string_view name(Ending ending) noexcept { return kEndingNames[static_cast<std::size_t>(ending)]; }
std::string_view name(Overlap overlap) noexcept { return kOverlapNames[static_cast<std::size_t>(overlap)]; }

std::int64_t Step::elements(int from, int to, int n) const {
  if (op == Op::all_to_all_v) return counts[static_cast<std::size_t>(from * n + to)];
  if (op == Op::all_gather_v) return counts[static_cast<std::size_t>(from)];
  if (op == Op::reduce_scatter_v) return counts[static_cast<std::size_t>(to)];
  return count;
}
bool Step::in_parted() const {
  return op == Op::scatter || op == Op::reduce_scatter || op == Op::reduce_scatter_v ||
         op == Op::all_to_all || op == Op::all_to_all_v;
}
bool Step::out_parted() const {
  return op == Op::gather || op == Op::all_gather || op == Op::all_gather_v || op == Op::all_to_all ||
         op == Op::all_to_all_v;
}
bool Step::reduces() const {
  return op == Op::all_reduce || op == Op::reduce || op == Op::reduce_scatter || op == Op::reduce_scatter_v ||
         is_scan(op);
}
int Step::combined_ranks(int me, int n) const { return op == Op::scan ? me + 1 : op == Op::exscan ? me : n; }
bool Step::is_for_everybody() const { return contains(kForEverybody, op); }
bool Step::is_rooted() const { return contains(kRooted, op); }
bool Step::reaches_neighbours() const {
  return does == Does::window && window.before + window.after > 0 &&
         std::all_of(counts.begin(), counts.end(), [](std::int64_t rows) { return rows > 0; });
}

int Program::processes() const { return 1 + *std::max_element(homes.begin(), homes.end()); }
int Program::rank_in(int group, int rank) const {
  const std::vector<int>& of = groups[static_cast<std::size_t>(group)].ranks;
  const auto at = std::find(of.begin(), of.end(), rank);
  return at == of.end() ? -1 : static_cast<int>(at - of.begin());
}
int Program::struck_group() const {
  if (fault.kind == FaultKind::none || fault.point != FaultPoint::in_creation) return -1;
  for (int g = 0; g < static_cast<int>(groups.size()); ++g)
    if (groups[static_cast<std::size_t>(g)].before == fault.step && group_size(g) == ranks()) return g;
  return -1;
}
bool Program::has_more_than_calls(int group) const {
  return std::any_of(steps.begin(), steps.end(),
                     [&](const Step& s) { return s.group == group && s.does != Does::call; });
}
bool Program::may_be_repeated(int step) const {
  const auto k = static_cast<std::size_t>(step);
  const Step& s = steps[k];
  return fault.kind == FaultKind::none && s.does == Does::call && s.op != Op::send && s.op != Op::recv &&
         !s.coalesced && (k == 0 || !steps[k - 1].coalesced);
}
bool Program::takes_part(int step, int rank) const {
  const Step& s = steps[static_cast<std::size_t>(step)];
  const int me = rank_in(s.group, rank);
  return me >= 0 && (s.op != Op::send || me == s.root || me == s.peer);
}
std::vector<int> Program::heartbeat_ranks() const {
  std::vector<int> those;
  for (int r = 0; heartbeats && r < ranks() && those.size() < 2; ++r)
    if (homes[static_cast<std::size_t>(r)] != homes[static_cast<std::size_t>(fault.rank)]) those.push_back(r);
  return those.size() == 2 ? those : std::vector<int>();
}

void settle(Program& p) {
  if (!p.steps.empty()) p.steps.back().coalesced = false;
  for (std::size_t k = 1; k < p.steps.size(); ++k)
    if (p.steps[k].group != p.steps[k - 1].group || p.steps[k].does != Does::call)
      p.steps[k - 1].coalesced = false;
  for (std::size_t k = 0; k < p.steps.size(); ++k)
    if (!p.may_be_repeated(static_cast<int>(k))) p.steps[k].starts = 1;
  for (GroupPlan& g : p.groups)
    while (g.before > 0 && (g.before > static_cast<int>(p.steps.size()) ||
                            p.steps[static_cast<std::size_t>(g.before - 1)].coalesced))
      --g.before;
}

}  // namespace weft::check
