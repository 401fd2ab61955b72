#include "program/more_steps.hpp"

#include <algorithm>
#include <numeric>

#include "faults/strike.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {
namespace {

constexpr std::int64_t kColumns[] = {1, 3, 17, 100, 513, 4099, 9001};
constexpr std::int64_t kNamedColumns[] = {2051, 4099,
                                          8191};  // too many to be packed: memory is named to the receiver

bool wanted(const Range& range, Does does) {
  return range.steps.empty() || std::find(range.steps.begin(), range.steps.end(), does) != range.steps.end();
}

// Returns whether only faults are requested that strike these steps alone.
bool only_more(const Range& range) {
  return !range.kinds.empty() && std::all_of(range.kinds.begin(), range.kinds.end(),
                                             [](FaultKind kind) { return row(kind).of_more; });
}

Step any_window(Dice& d, const Program& p, const Range& range, int group) {
  const int n = p.group_size(group);
  Step s;
  s.group = group;
  s.does = Does::window;
  s.op = Op::none;
  s.dtype = static_cast<DType>(d.below(kDTypeCount));
  s.salt = d.next();
  s.count = std::min(d.any(kColumns), range.most);
  const bool even = d.one_in(2);
  for (int r = 0; r < n; ++r) s.counts.push_back(even ? 1 : d.between(0, 3));
  if (std::accumulate(s.counts.begin(), s.counts.end(), std::int64_t{0}) == 0) s.counts[0] = 2;
  const auto rows = static_cast<int>(std::accumulate(s.counts.begin(), s.counts.end(), std::int64_t{0}));
  s.window.before = std::min(d.below(3), rows - 1);
  s.window.after = std::min(d.below(3), rows - 1);
  constexpr Edge::Kind kEdges[] = {Edge::Kind::zero, Edge::Kind::zero, Edge::Kind::periodic,
                                   Edge::Kind::reflect, Edge::Kind::replicate};
  s.window.edge = static_cast<int>(d.any(kEdges));
  s.window.exchanges = d.one_in(2) ? 1 : d.between(2, 3);
  s.window.fields = d.one_in(3) ? 2 : 1;
  s.window.newest_first = d.one_in(2);
  s.shared = d.one_in(3);
  s.window.adjoint = has_adjoint(s.dtype) && mix(s.salt, 7) % 3 == 0;
  s.window.by_plan = mix(s.salt, 11) % 4 == 0;
  s.window.together =
      !s.window.adjoint && !s.window.by_plan && s.window.exchanges > 1 && mix(s.salt, 13) % 2 == 0;
  return s;
}

Step any_gradients(Dice& d, const Range& range, int group) {
  constexpr std::int64_t kSizes[] = {0, 1, 2, 5, 7, 31, 127, 1021, 8191};
  constexpr std::int64_t kBytes[] = {1, 64, 4096, 1 << 16, 4 << 20};
  Step s;
  s.group = group;
  s.does = Does::gradients;
  s.op = Op::none;
  s.salt = d.next();
  for (int tensors = d.between(1, 7); tensors > 0; --tensors)
    s.counts.push_back(std::min(d.any(kSizes), range.most));
  s.gradients.cut = d.one_in(2);
  s.gradients.at_once = !s.gradients.cut && mix(s.salt, 34) % 4 == 0;
  s.gradients.rounds = d.between(1, 3);
  s.gradients.bytes = d.any(kBytes);
  s.shared = d.one_in(3);
  return s;
}

Step any_agreement(Dice& d, const Program& p, int group) {
  Step s;
  s.group = group;
  s.does = Does::agreement;
  s.op = Op::none;
  s.salt = d.next();
  s.value = static_cast<Value>(d.below(kValuesHere));
  if (p.group_size(group) < 2) s.value = Value::full;
  return s;
}

Step any_overlap(Dice& d, const Range& range, int group) {
  constexpr std::int64_t kSizes[] = {3, 127, 1021, 8191};
  Step s;
  s.group = group;
  s.does = Does::overlap;
  s.op = Op::none;
  s.dtype = d.one_in(2) ? DType::f32 : DType::i64;
  s.count = std::min(d.any(kSizes), range.most);
  s.salt = d.next();
  s.overlap = static_cast<Overlap>(d.below(kOverlaps));
  return s;
}

// The places at which steps can be inserted: not between calls that belong together, nor behind the barriers
// at the end.
std::vector<int> places(const Program& p) {
  int last = static_cast<int>(p.steps.size());
  if (p.fault.kind != FaultKind::none)
    while (last > 0 && p.steps[static_cast<std::size_t>(last - 1)].op == Op::barrier) --last;
  std::vector<int> at;
  for (int k = 0; k <= last; ++k) {
    const bool parted = k > 0 && p.steps[static_cast<std::size_t>(k - 1)].coalesced;
    const bool behind_fault = p.fault.kind != FaultKind::none && k == p.fault.step + 1;
    if (!parted && !behind_fault) at.push_back(k);
  }
  return at;
}

void insert(Program& p, int at, Step s) {
  p.steps.insert(p.steps.begin() + at, std::move(s));
  for (GroupPlan& g : p.groups)
    if (g.before > at) ++g.before;
  if (p.fault.kind != FaultKind::none && p.fault.step >= at) ++p.fault.step;
}

int any_group(Dice& d, const Program& p, int at) {
  std::vector<int> made;
  for (int g = 0; g < static_cast<int>(p.groups.size()); ++g)
    if (p.groups[static_cast<std::size_t>(g)].before <= at) made.push_back(g);
  return d.one_in(2) ? 0 : d.any(made);
}

// Repeats the window: its ranks have agreed, so nobody waits in its start.
Step again(Dice& d, const Step& s, const Range& range) {
  Step t = s;
  t.salt = d.next();
  t.count = std::min(d.any(kColumns), range.most);
  t.window.exchanges = d.between(1, 3);
  t.window.newest_first = d.one_in(2);
  t.window.adjoint = has_adjoint(s.dtype) && mix(t.salt, 7) % 3 == 0;
  t.window.together = false;
  return t;
}

void insert_any(Dice& d, Program& p, const Range& range) {
  constexpr Does kOften[] = {Does::window, Does::window, Does::agreement, Does::overlap};
  const Does does =
      d.any(range.steps.empty() ? std::vector<Does>(std::begin(kOften), std::end(kOften)) : range.steps);
  const int at = d.any(places(p)), group = any_group(d, p, at);
  switch (does) {
    case Does::call: return;
    case Does::agreement: return insert(p, at, any_agreement(d, p, group));
    case Does::overlap: return insert(p, at, any_overlap(d, range, group));
    case Does::gradients: return insert(p, at, any_gradients(d, range, group));
    case Does::window: break;
  }
  const Step s = any_window(d, p, range, group);
  insert(p, at, s);
  for (int more = d.below(3); more > 0; --more) {
    std::vector<int> after = places(p);
    std::erase_if(after, [&](int k) { return k <= at; });
    if (!after.empty()) insert(p, d.any(after), again(d, s, range));
  }
}

// Adds a window that is in flight, in the same group, when the rank is stopped inside the others' memory:
// holds_window().
void hold_window(Dice& d, Program& p, const Range& range) {
  const int group = p.steps[static_cast<std::size_t>(p.fault.step)].group;
  if (p.group_size(group) < 3) return;
  Step s = any_window(d, p, range, group);
  s.dtype = DType::f32;
  s.counts.assign(s.counts.size(), 1);
  s.count = std::min(d.any(kNamedColumns), range.most);
  s.shared = true;
  s.window = {.before = 1, .after = 1, .edge = static_cast<int>(Edge::Kind::periodic), .exchanges = 1};
  const int at = p.fault.step;
  insert(p, at, s);
  s.salt = d.next();
  insert(p, at, s);
}

// Makes the struck call the last one of its group: later calls would show the fault, too.
void end_behind_it(Dice& d, Program& p) {
  const Step& struck = p.steps[static_cast<std::size_t>(p.fault.step)];
  if (p.group_size(struck.group) < 2 || (struck.op != Op::broadcast && struck.op != Op::scatter)) return;
  const bool left_out = row(p).steps == StepsTaken::left_out;
  if (left_out && p.rank_in(struck.group, p.fault.rank) == struck.root) return;  // the others wait for it
  p.ending = left_out && d.one_in(2) ? Ending::destroy : Ending::leave;
  p.steps.resize(static_cast<std::size_t>(p.fault.step) + 1);
  settle(p);
}

// Adds a chain of ranks, each of which waits for the next one in consecutive exchanges. The last of them
// waits for the struck rank.
void add_chain(Dice& d, Program& p, const Range& range) {
  Step s = any_window(d, p, range, 0);
  s.counts.assign(s.counts.size(), 1);
  s.window = {
      .before = 1, .after = 1, .edge = static_cast<int>(Edge::Kind::zero), .exchanges = d.between(1, 3)};
  s.window.newest_first = d.one_in(2);
  p.in_flight = 1;
  const int at = p.fault.step;
  for (int k = 0; k < 5; ++k) {
    s.salt = d.next();
    insert(p, at, s);
  }
  p.fault.step = at + 1;
}

// The steps at which this fault can strike.
std::vector<int> struck_steps(const Program& p, const Fault& f) {
  const FaultRow& kind = row(f.kind);
  std::vector<int> those;
  for (int k = 0; k < static_cast<int>(p.steps.size()); ++k) {
    const Step& s = p.steps[static_cast<std::size_t>(k)];
    const int me = p.rank_in(s.group, f.rank);
    if (s.does == Does::call || me < 0 || p.group_size(s.group) < 2 || !kind.fits(s, me)) continue;
    const bool lasts = s.does == Does::window || s.does == Does::gradients;
    const bool in_time = lasts ? f.point != FaultPoint::in_chunk : f.point == FaultPoint::before_post;
    if (in_time) those.push_back(k);
  }
  return those;
}

// Adds the barriers at the end, in which every rank learns of the fault.
void add_barriers(Dice& d, Program& p) {
  Step last;
  last.salt = d.next();
  last.group = p.steps[static_cast<std::size_t>(p.fault.step)].group;
  const bool ended = !p.steps.empty() && p.steps.back().op == Op::barrier && p.steps.back().group == 0;
  if (last.group != 0) p.steps.insert(p.steps.end() - (ended ? 1 : 0), last);
  last.group = 0;
  if (!ended) p.steps.push_back(last);
}

// Lets the drawn fault strike at one of these steps instead.
void strike_there(Dice& d, Program& p) {
  if (p.fault.point == FaultPoint::in_creation || row(p).other_next) return;
  const std::vector<int> those = struck_steps(p, p.fault);
  if (those.empty()) return;
  p.fault.step = d.any(those);
  add_barriers(d, p);
}

// The rank leaves out its reductions of gradients, or makes them after the barrier behind them.
void strike_gradients(Dice& d, Program& p, const Range& range) {
  const int group = p.steps[static_cast<std::size_t>(p.fault.step)].group, at = p.fault.step;
  Step next;
  next.group = group;
  next.salt = d.next();
  insert(p, at, next);
  insert(p, at, any_gradients(d, range, group));
  p.fault.step = at;
}

// Replaces the drawn fault by one that strikes only such steps.
void strike_these_alone(Dice& d, Program& p, const Range& range) {
  std::vector<Fault> faults;
  for (int k = 1; k < kFaultKinds; ++k) {
    Fault f;
    f.kind = static_cast<FaultKind>(k);
    const FaultRow& kind = row(f.kind);
    const bool asked = std::find(range.kinds.begin(), range.kinds.end(), f.kind) != range.kinds.end();
    if (!kind.of_more || (!range.kinds.empty() && !asked) ||
        (kind.guaranteed != nullptr && !kind.guaranteed(range)))
      continue;
    f.point = kind.points.front();
    for (f.rank = 0; f.rank < p.ranks(); ++f.rank)
      for (const int step : struck_steps(p, f)) {
        f.step = step;
        faults.push_back(f);
      }
  }
  if (faults.empty()) return;
  p.fault = d.any(faults);
  p.heartbeats = false;
  for (GroupPlan& g : p.groups) g.before = 0;
  add_barriers(d, p);
}

}  // namespace

void add_more_steps(Program& p, const Range& range) {
  Dice d(mix(mix(p.seed, p.index), 5151));
  const bool faulty = p.fault.kind != FaultKind::none;
  if (faulty && shares_block(p) && wanted(range, Does::window)) {
    p.window_beside = d.one_in(2);
    p.ends = d.one_in(3);
  }
  if (range.backend == "shm" && faulty && row(p).unseen_at_root && d.one_in(2)) return end_behind_it(d, p);
  if (range.traits.device || row(p).limits) return;
  if (range.steps.empty() && !only_more(range) && d.one_in(2)) return;
  for (int more = d.between(1, 4); more > 0; --more) insert_any(d, p, range);
  // Drawn from a separate sequence, so that the other random choices stay the same.
  Dice of_gradients(mix(mix(p.seed, p.index), 6161));
  if (range.steps.empty() && kDoesHere == kDoes && of_gradients.one_in(2)) {
    const int at = of_gradients.any(places(p));
    insert(p, at, any_gradients(of_gradients, range, any_group(of_gradients, p, at)));
  }
  if (range.faults && (only_more(range) || d.one_in(8)))
    strike_these_alone(d, p, range);
  else if (faulty && shares_block(p) && wanted(range, Does::window) && d.one_in(2))
    hold_window(d, p, range);
  else if (faulty && row(p).is_absent && p.fault.point != FaultPoint::in_chunk &&
           p.fault.point != FaultPoint::in_creation && p.ranks() > 2 && wanted(range, Does::window) &&
           d.one_in(3))
    add_chain(d, p, range);
  else if (faulty && row(p).other_next && kDoesHere == kDoes && wanted(range, Does::gradients) &&
           of_gradients.one_in(3))
    strike_gradients(of_gradients, p, range);
  else if (faulty && (row(p).act == Act::interrupt || d.one_in(2)))
    strike_there(d, p);
  settle(p);
}

}  // namespace weft::check
