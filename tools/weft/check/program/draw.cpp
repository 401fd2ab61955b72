// Draws programs: which steps, in which order, how often, and in which sizes.
#include <algorithm>
#include <numeric>

#include "faults/kinds.hpp"
#include "program.hpp"
#include "program/more_steps.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"

namespace weft::check {
namespace {

using Kind = ReduceOp::Kind;

// A device's transport has no scans, and nobody composes scans there.
Op any_for_everybody(Dice& d, const Range& range) {
  for (;;)
    if (const Op op = d.any(kForEverybody); !(range.traits.device && is_scan(op))) return op;
}
// The values that weft defines and this backend supports.
bool can(const Traits& t, DType dtype, Kind kind, Order order) {
  if (!t.moves(dtype) || !known_traits("shm")->reduces_itself(kind, dtype)) return false;
  return !t.device || (order == Order::native && t.reduces_itself(kind, dtype));
}

constexpr std::int64_t kFew[] = {0, 1, 2, 3, 5, 7, 13, 31, 61, 127, 509};
constexpr std::int64_t kMany[] = {1021, 2048, 4099, 8191};
constexpr std::int64_t kHuge[] = {32771, 70001};

std::int64_t any_count(Dice& d, const Range& range) {
  const std::int64_t count = d.one_in(16) ? d.any(kHuge) : d.one_in(4) ? d.any(kMany) : d.any(kFew);
  return std::min(count, range.most);
}

void any_reduction(Dice& d, Step& s, const Range& range) {
  s.order = d.one_in(3) ? Order::canonical : Order::native;
  constexpr Kind kOften[] = {Kind::sum, Kind::avg, Kind::min, Kind::max};
  for (int tries = 0; tries < 200; ++tries) {
    s.reduce = d.one_in(3) ? static_cast<Kind>(d.below(kReduceKindCount)) : d.any(kOften);
    s.dtype = static_cast<DType>(d.below(kDTypeCount));
    if (s.reduce == Kind::user && s.dtype == DType::boolean) continue;  // its bytes would be no bools
    if (!can(range.traits, s.dtype, s.reduce, s.order)) continue;
    if (s.reduce == Kind::premul_sum) {
      constexpr double kReal[] = {0.5, -2, 3, 0.375}, kWhole[] = {2, 3, 5};
      s.scale = is_floating(s.dtype) ? d.any(kReal) : d.any(kWhole);
    }
    return;
  }
  s.dtype = DType::f32;
  s.reduce = Kind::sum;
  s.order = Order::native;
}

// Draws counts and data for a given operation.
void fill(Dice& d, Step& s, const Range& range, int n) {
  s.salt = d.next();
  s.dtype = static_cast<DType>(d.below(kDTypeCount));
  if (s.reduces()) any_reduction(d, s, range);
  if (s.op == Op::barrier) return;
  s.root = d.below(static_cast<std::size_t>(n));
  s.peer = d.below(static_cast<std::size_t>(n));
  constexpr int kTags[] = {0, 0, 1, 77, 2147483647};
  s.tag = d.any(kTags);
  if (has_counts(s.op)) {
    s.counts.resize(static_cast<std::size_t>(s.op == Op::all_to_all_v ? n * n : n));
    for (std::int64_t& c : s.counts) c = any_count(d, range);
  } else {
    s.count = any_count(d, range);
  }
}

Step any_step(Dice& d, const Program& p, const Range& range, int group) {
  Step s;
  s.group = group;
  const int kind = d.below(10);
  s.op = kind < 5   ? any_for_everybody(d, range)
         : kind < 8 ? d.any(kRooted)
         : kind < 9 ? (d.one_in(3) ? Op::recv : Op::send)
                    : (d.one_in(3) ? Op::barrier : any_for_everybody(d, range));
  fill(d, s, range, p.group_size(group));
  return s;
}

// ---- Groups

std::vector<int> shuffled(Dice& d, std::vector<int> list) {
  for (std::size_t i = list.size(); i > 1; --i)
    std::swap(list[i - 1], list[static_cast<std::size_t>(d.below(i))]);
  return list;
}

void add_group(Dice& d, Program& p, int before) {
  GroupPlan g;
  g.parent = d.below(p.groups.size());
  g.before = std::max(before, p.groups[static_cast<std::size_t>(g.parent)].before);
  const std::vector<int> of = p.groups[static_cast<std::size_t>(g.parent)].ranks;
  const int kind = d.below(4);
  if (kind == 0) {
    g.how = GroupPlan::How::duplicate;
    g.ranks = of;
    p.groups.push_back(g);
  } else if (kind < 3 || of.size() < 2) {
    g.how = GroupPlan::How::subgroup;
    g.ranks = shuffled(d, of);
    g.ranks.resize(static_cast<std::size_t>(d.between(1, static_cast<int>(of.size()))));
    p.groups.push_back(g);
  } else {  // two colors, and perhaps some ranks in neither; a group for each color that has ranks
    g.how = GroupPlan::How::split;
    GroupPlan other = g;
    for (const int r : shuffled(d, of)) {
      const int color = d.below(5);
      if (color < 2) g.ranks.push_back(r);
      if (color == 2 || color == 3) other.ranks.push_back(r);
    }
    if (g.ranks.empty()) std::swap(g.ranks, other.ranks);
    if (g.ranks.empty()) g.ranks.push_back(of.front());
    p.groups.push_back(g);
    other.joined = true;
    if (!other.ranks.empty()) p.groups.push_back(other);
  }
}

// ---- Faults

// Returns whether the backend guarantees an outcome for this kind of fault.
bool guaranteed(const Range& range, const FaultRow& kind) {
  if (kind.of_more) return false;
  if (!range.kinds.empty())
    return std::find(range.kinds.begin(), range.kinds.end(), kind.kind) != range.kinds.end();
  if (kind.of_processes && !range.processes) return false;
  return kind.guaranteed == nullptr || kind.guaranteed(range);
}

FaultPoint any_point(Dice& d, const Range& range, const FaultRow& kind) {
  if (kind.points.size() == 1) return kind.points.front();
  std::vector<FaultPoint> points(kind.points.begin(), kind.points.end());
  std::erase_if(points, [&](FaultPoint at) {
    return (at == FaultPoint::in_chunk && range.backend != "shm") ||
           (at == FaultPoint::in_creation && range.job && kind.takes_process);
  });
  std::vector<FaultPoint> asked = points;
  std::erase_if(asked, [&](FaultPoint at) {
    return std::find(range.points.begin(), range.points.end(), at) == range.points.end();
  });
  return d.any(asked.empty() ? points : asked);
}

// Turns the step into one in which rank `me` accesses the memory of others. Returns false if its operation
// has no such step.
bool make_reaching(Dice& d, Step& s, const Range& range, int me) {
  if (!s.is_for_everybody() && s.op != Op::reduce && s.op != Op::gather && s.op != Op::broadcast &&
      s.op != Op::scatter)
    return false;
  if (s.op == Op::gather) s.root = me;  // the root reads
  if ((s.op == Op::broadcast || s.op == Op::scatter) && s.root == me) return false;
  constexpr std::int64_t kLarge[] = {2051, 8191, 70001};
  if (s.count > 0 || s.counts.empty()) s.count = std::min(d.any(kLarge), range.most);
  for (std::int64_t& c : s.counts) c += 2051;
  s.shared = true;
  return true;
}

// Draws a step in which the fault makes sense, of a group that contains the rank.
Step step_for(Dice& d, const Program& p, const Range& range, const Fault& f) {
  std::vector<int> groups;
  for (int g = 0; g < static_cast<int>(p.groups.size()); ++g)
    if (p.rank_in(g, f.rank) >= 0 && p.group_size(g) > 1) groups.push_back(g);
  const int group = d.one_in(2) ? 0 : d.any(groups), me = p.rank_in(group, f.rank);
  for (;;) {
    Step s = any_step(d, p, range, group);
    // a step in which one rank writes into the memory of others
    if (f.point == FaultPoint::in_chunk && d.one_in(2)) {
      s.op = Op::all_reduce;
      s.counts.clear();
      fill(d, s, range, p.group_size(group));
    }
    s.tag = 1000;
    const bool fits = f.point == FaultPoint::in_chunk        ? make_reaching(d, s, range, me)
                      : f.point == FaultPoint::while_waiting ? s.is_for_everybody()
                                                             : row(f.kind).fits(s, me);
    if (fits) return s;
  }
}

void add_fault(Dice& d, Program& p, const Range& range) {
  std::vector<FaultKind> kinds;
  for (int k = 1; k < kFaultKinds; ++k) {
    const FaultRow& kind = row(static_cast<FaultKind>(k));
    if (guaranteed(range, kind) && !(kind.of_processes && p.processes() < p.ranks()))
      kinds.push_back(kind.kind);
  }
  if (kinds.empty()) return;
  Fault& f = p.fault;
  f.kind = d.any(kinds);
  f.rank = d.below(static_cast<std::size_t>(p.ranks()));
  f.point = any_point(d, range, row(f.kind));
  if (f.point == FaultPoint::in_chunk) p.path.clear();  // the direct path
  f.step = d.below(p.steps.size() + 1);
  while (f.step > 0 && p.steps[static_cast<std::size_t>(f.step - 1)].coalesced) --f.step;
  for (GroupPlan& g : p.groups) g.before = 0;  // no group can be made without the rank that is gone
  const bool in_creation = f.point == FaultPoint::in_creation;
  if (in_creation && d.one_in(2)) f.step = 0;  // the group of all
  if (row(f.kind).limits ||
      (in_creation && f.step > 0)) {  // a group is made under the limit, or by a rank that is struck
    GroupPlan g;
    g.how = GroupPlan::How::duplicate;
    g.before = f.step;
    g.ranks = p.groups[0].ranks;
    p.groups.push_back(g);
  }
  std::vector<Step> more{step_for(d, p, range, f)};
  if (row(f.kind).other_next) {
    // The next step in that group must be another operation, or the ranks could not notice the fault.
    Step next = more[0];
    do {
      next.op = any_for_everybody(d, range);
      next.count = 0;
      next.counts.clear();
      fill(d, next, range, p.group_size(next.group));
    } while (next.op == more[0].op);
    more.push_back(next);
  }
  p.steps.insert(p.steps.begin() + f.step, more.begin(), more.end());
}

// Threads, processes, or a mixture; processes more often if there are faults, since many faults strike
// processes.
std::vector<int> any_homes(Dice& d, const Range& range, int n) {
  enum { threads, processes, mixture };
  constexpr int kCalm[] = {threads, threads, processes, processes, mixture};
  constexpr int kFaulty[] = {threads,   threads,   processes, processes,
                             processes, processes, processes, mixture};
  const int drawn = range.faults ? d.any(kFaulty) : d.any(kCalm);
  const int kind = range.job || !range.threads ? processes : !range.processes ? threads : drawn;
  std::vector<int> homes{0};
  for (int r = 1; r < n; ++r)
    homes.push_back(kind == processes ? r : kind == threads ? 0 : d.between(0, homes.back() + 1));
  return homes;
}
// Adds many small steps of one root in succession, in the group of `s`, which becomes one of them. They run
// ahead, as far as the ring permits.
void add_many_small(Dice& d, Program& p, Step& s, const Range& range) {
  constexpr Op kAhead[] = {Op::broadcast, Op::scatter, Op::send, Op::broadcast, Op::reduce};
  s.op = d.any(kAhead);
  s.count = 0;
  s.counts.clear();
  fill(d, s, range, p.group_size(s.group));
  p.in_flight = 60;
  for (int k = d.between(33, 60); k > 0; --k) {
    s.count = d.any(kFew);
    s.salt = d.next();
    p.steps.push_back(s);
  }
}

// Messages of several tags at once in the group of `s`, which ranks may submit in another order.
void add_messages(Dice& d, Program& p, const Step& s, const Range& range) {
  const int tag = d.below(1000);
  for (int k = d.between(2, 4); k > 0; --k) {
    Step m = s;
    m.op = Op::send;
    m.counts.clear();
    fill(d, m, range, p.group_size(m.group));
    if (k % 2 == 0 && !p.steps.empty() && p.steps.back().op == Op::send && p.steps.back().group == m.group) {
      m.root = p.steps.back().root;
      m.peer = p.steps.back().peer;
    }
    m.tag = tag + k;
    m.coalesced = k > 1;
    p.steps.push_back(m);
  }
}

}  // namespace
Program draw(std::uint64_t seed, std::uint64_t index, const Range& range) {
  Dice d(mix(seed, index));
  Program p;
  p.seed = seed;
  p.index = index;
  const int n = d.any(range.ranks);
  p.homes = any_homes(d, range, n);
  GroupPlan world;
  world.ranks.resize(static_cast<std::size_t>(n));
  std::iota(world.ranks.begin(), world.ranks.end(), 0);
  p.groups.push_back(world);
  const int steps = d.between(2, 12);
  for (int more = d.below(4) - 1; more > 0; --more) add_group(d, p, d.below(static_cast<std::size_t>(steps)));
  constexpr int kInFlight[] = {1, 1, 3, 7, 25};
  p.in_flight = d.any(kInFlight);
  p.helper = d.one_in(10);
  if (range.backend == "shm" && d.one_in(5)) p.path = "staged";
  while (static_cast<int>(p.steps.size()) < steps) {
    const int at = static_cast<int>(p.steps.size());
    std::vector<int> made;
    for (int g = 0; g < static_cast<int>(p.groups.size()); ++g)
      if (p.groups[static_cast<std::size_t>(g)].before <= at) made.push_back(g);
    Step s = any_step(d, p, range, d.one_in(2) ? 0 : d.any(made));
    if (d.one_in(10)) add_many_small(d, p, s, range);
    if (d.one_in(10)) add_messages(d, p, s, range);
    if (d.one_in(8) && !p.steps.empty() && p.steps.back().group == s.group) p.steps.back().coalesced = true;
    p.steps.push_back(std::move(s));
  }
  if (range.faults && !d.one_in(5) && n > 1) add_fault(d, p, range);  // a single rank has nobody to notice it
  // Drawn from a separate sequence, so that the other random choices stay the same.
  p.heartbeats = !range.job && row(p).is_absent && mix(mix(seed, index), 4242) % 2 == 0;
  if (p.fault.kind != FaultKind::none) {  // the calls in which all ranks learn of it
    Step last;
    last.salt = d.next();
    last.group = p.steps[static_cast<std::size_t>(p.fault.step)].group;
    if (last.group != 0) p.steps.push_back(last);
    last.group = 0;
    p.steps.push_back(last);
  }
  settle(p);
  add_more_steps(p, range);
  for (int k = 0; k < static_cast<int>(p.steps.size()); ++k) {  // from a separate sequence, too
    Step& s = p.steps[static_cast<std::size_t>(k)];
    const std::uint64_t drawn = mix(s.salt, 4243);
    if (drawn % 5 == 0 && p.may_be_repeated(k))
      s.starts = 2 + static_cast<int>(drawn / 5 % (kMostStarts - 1));
  }
  return p;
}

}  // namespace weft::check
