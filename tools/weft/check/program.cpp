#include "program.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/json_reader.hpp"
#include "faults/kinds.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/error.hpp"

namespace weft::check {
namespace {

using Kind = ReduceOp::Kind;

constexpr std::string_view kPoints[] = {"before_post",   "after_post",     "in_chunk",
                                        "while_waiting", "before_quiesce", "in_creation"};
static_assert(std::size(kPoints) == kFaultPoints);

constexpr Op kEverybody[] = {
    Op::all_reduce, Op::all_gather,   Op::all_gather_v, Op::reduce_scatter, Op::reduce_scatter_v,
    Op::all_to_all, Op::all_to_all_v, Op::scan,         Op::exscan};
constexpr Op kRooted[] = {Op::reduce, Op::broadcast, Op::gather, Op::scatter};

// A device's transport has no scans, and nobody composes them there.
Op any_for_everybody(Dice& d, const Range& range) {
  for (;;)
    if (const Op op = d.any(kEverybody); !(range.traits.device && is_scan(op))) return op;
}

bool has_counts(Op op) {
  return op == Op::all_gather_v || op == Op::reduce_scatter_v || op == Op::all_to_all_v;
}

// What weft defines, and what this backend has of it.
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

// Counts and data of an operation that is given.
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

// Whether the backend's row of guarantees says what must happen.
bool guaranteed(const Range& range, const FaultRow& kind) {
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

// Makes it a step in which rank `me` reaches into the memory of others. False: it is none of these.
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

// A step in which the fault makes sense, of a group that holds the rank.
Step step_for(Dice& d, const Program& p, const Range& range, const Fault& f) {
  std::vector<int> groups;
  for (int g = 0; g < static_cast<int>(p.groups.size()); ++g)
    if (p.rank_in(g, f.rank) >= 0 && p.group_size(g) > 1) groups.push_back(g);
  const int group = d.one_in(2) ? 0 : d.any(groups), me = p.rank_in(group, f.rank);
  for (;;) {
    Step s = any_step(d, p, range, group);
    if (f.point == FaultPoint::in_chunk && d.one_in(2)) {  // where one writes into the memory of others
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
  for (GroupPlan& g : p.groups) g.before = 0;  // none can be made without the rank that is gone
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

}  // namespace

std::string_view name(FaultPoint point) noexcept { return kPoints[static_cast<std::size_t>(point)]; }

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
bool Step::is_for_everybody() const {
  return std::find(std::begin(kEverybody), std::end(kEverybody), op) != std::end(kEverybody);
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
bool Program::takes_part(int step, int rank) const {
  const Step& s = steps[static_cast<std::size_t>(step)];
  const int me = rank_in(s.group, rank);
  return me >= 0 && (s.op != Op::send || me == s.root || me == s.peer);
}

// Threads, processes, or a mixture; processes more often where faults are, since many faults are theirs.
namespace {
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
// Many small steps of the same root in a row, in the group of `s`, which becomes one of them: they run ahead,
// as far as the ring goes.
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
  if (range.faults && !d.one_in(5) && n > 1) add_fault(d, p, range);  // one rank has nobody who could tell
  // Drawn from a separate sequence, so that the other random choices stay the same.
  p.heartbeats = !range.job && row(p).is_absent && mix(mix(seed, index), 4242) % 2 == 0;
  if (p.fault.kind != FaultKind::none) {  // where everybody hears of it
    Step last;
    last.salt = d.next();
    last.group = p.steps[static_cast<std::size_t>(p.fault.step)].group;
    if (last.group != 0) p.steps.push_back(last);
    last.group = 0;
    p.steps.push_back(last);
  }
  settle(p);
  return p;
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
    if (p.steps[k].group != p.steps[k - 1].group) p.steps[k - 1].coalesced = false;
  for (GroupPlan& g : p.groups)
    while (g.before > 0 && (g.before > static_cast<int>(p.steps.size()) ||
                            p.steps[static_cast<std::size_t>(g.before - 1)].coalesced))
      --g.before;
}

// ---- For people

std::string describe(const Fault& f) {
  if (f.kind == FaultKind::none) return "none";
  return fmt::format("{} {} of step {} on rank {}", name(f.kind), name(f.point), f.step, f.rank);
}

std::string describe(const Program& p, int step) {
  const Step& s = p.steps[static_cast<std::size_t>(step)];
  std::string text = fmt::format("step {:>2}: group {}  {}", step, s.group,
                                 s.op == Op::recv   ? "ring"
                                 : s.op == Op::send ? "message"
                                                    : name(s.op));
  if (s.op == Op::barrier) return text;
  text += fmt::format(" {}", name(s.dtype));
  if (s.counts.empty()) text += fmt::format(" x{}", s.count);
  if (!s.counts.empty()) text += fmt::format(" counts [{}]", fmt::join(s.counts, " "));
  if (s.reduces()) text += fmt::format(" {}", name(s.reduce));
  if (s.reduces() && s.reduce == Kind::premul_sum) text += fmt::format("({})", s.scale);
  if (s.reduces() && s.order == Order::canonical) text += ", canonical order";
  if (std::find(std::begin(kRooted), std::end(kRooted), s.op) != std::end(kRooted))
    text += fmt::format(", root {}", s.root);
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
  return text + fmt::format("fault: {}\n", describe(p.fault));
}

// ---- For files

std::string encode(const Program& p) {
  using nlohmann::json;
  json groups = json::array(), steps = json::array();
  for (const GroupPlan& g : p.groups)
    groups.push_back({{"how", static_cast<int>(g.how)},
                      {"parent", g.parent},
                      {"before", g.before},
                      {"joined", g.joined},
                      {"ranks", g.ranks}});
  for (const Step& s : p.steps)
    steps.push_back({{"group", s.group},
                     {"op", static_cast<int>(s.op)},
                     {"dtype", name(s.dtype)},
                     {"reduce", static_cast<int>(s.reduce)},
                     {"scale", s.scale},
                     {"canonical", s.order == Order::canonical},
                     {"root", s.root},
                     {"peer", s.peer},
                     {"tag", s.tag},
                     {"count", s.count},
                     {"counts", s.counts},
                     {"coalesced", s.coalesced},
                     {"plain", s.plain},
                     {"shared", s.shared},
                     {"salt", s.salt}});
  return json{{"seed", p.seed},
              {"index", p.index},
              {"homes", p.homes},
              {"groups", groups},
              {"steps", steps},
              {"in_flight", p.in_flight},
              {"helper", p.helper},
              {"path", p.path},
              {"heartbeats", p.heartbeats},
              {"fault",
               {{"kind", static_cast<int>(p.fault.kind)},
                {"point", static_cast<int>(p.fault.point)},
                {"rank", p.fault.rank},
                {"step", p.fault.step}}}}
      .dump();
}

namespace {

// A program that is read will be run, so every number must be within what a program can have.
constexpr int kMostInFlight = 1000;
constexpr std::int64_t kMostElements = 1 << 24;  // of a block
constexpr std::int64_t kMostInAll = 1 << 28;     // of all blocks of a program
constexpr double kMostScale = 1000;              // fits every type
constexpr JsonLimits kLimits{.bytes = std::size_t{1} << 20, .depth = 8, .values = 200'000};

int read_int(const JsonReader& in, const char* key, int min, int max) {
  return static_cast<int>(in.integer(key, min, max));
}

std::vector<int> read_homes(const JsonReader& in) {
  std::vector<int> homes;
  int next = 0;  // processes are numbered as they come
  const nlohmann::json& list = in.list("homes");
  if (list.empty() || list.size() > std::size_t{kMostRanks})
    in.wrong("homes", fmt::format("has {} ranks; expected 1 to {}", list.size(), kMostRanks));
  for (std::size_t r = 0; r < list.size(); ++r) {
    homes.push_back(static_cast<int>(in.integer(list[r], fmt::format("homes[{}]", r), 0, next)));
    next = std::max(next, homes.back() + 1);
  }
  return homes;
}

std::vector<int> read_members(const JsonReader& in, const std::vector<int>& of) {
  std::vector<int> ranks;
  for (const std::int64_t r : in.integers("ranks", 0, kMostRanks - 1)) {
    if (std::find(of.begin(), of.end(), r) == of.end())
      in.wrong(in.place("ranks"), fmt::format("has rank {}, which is not in its parent", r));
    if (std::find(ranks.begin(), ranks.end(), r) != ranks.end())
      in.wrong(in.place("ranks"), fmt::format("has rank {} twice", r));
    ranks.push_back(static_cast<int>(r));
  }
  if (ranks.empty()) in.wrong(in.place("ranks"), "is empty; expected the ranks of a group");
  return ranks;
}

// The first group is that of all ranks; the others follow their parents.
GroupPlan read_group(const JsonReader& in, const Program& p, int steps) {
  using How = GroupPlan::How;
  const int number = static_cast<int>(p.groups.size());
  GroupPlan g;
  g.how = static_cast<How>(number == 0 ? read_int(in, "how", 0, 0) : read_int(in, "how", 1, 3));
  g.parent = read_int(in, "parent", 0, std::max(number - 1, 0));
  std::vector<int> all(p.homes.size());
  std::iota(all.begin(), all.end(), 0);
  const GroupPlan* const parent = number == 0 ? nullptr : &p.groups[static_cast<std::size_t>(g.parent)];
  g.before = read_int(in, "before", parent == nullptr ? 0 : parent->before, parent == nullptr ? 0 : steps);
  g.joined = in.boolean("joined");
  g.ranks = read_members(in, parent == nullptr ? all : parent->ranks);
  if (parent == nullptr && g.ranks != all)
    in.wrong(in.place("ranks"), fmt::format("is not all {} ranks in their order", all.size()));
  if (g.how == How::duplicate && g.ranks != parent->ranks)
    in.wrong(in.place("ranks"), "is not what its parent has, of which it is a duplicate");
  if (!g.joined) return g;
  const GroupPlan* const first = number == 0 ? nullptr : &p.groups.back();
  if (g.how != How::split || first->how != How::split || first->parent != g.parent ||
      first->before != g.before)
    in.wrong(in.place("joined"), "is true, but the group before it is no other color of the same split");
  // Two colors are all that a program has.
  if (first->joined) in.wrong(in.place("joined"), "is true for a third color of one split");
  for (const int r : g.ranks)
    if (std::find(first->ranks.begin(), first->ranks.end(), r) != first->ranks.end())
      in.wrong(in.place("ranks"), fmt::format("has rank {}, which has the color before it", r));
  return g;
}

void read_reduction(const JsonReader& in, Step& s) {
  s.reduce = static_cast<Kind>(read_int(in, "reduce", 0, kReduceKindCount - 1));
  const nlohmann::json& scale = in.at("scale");
  if (!scale.is_number() || !(std::abs(scale.get<double>()) <= kMostScale))
    in.wrong(in.place("scale"), fmt::format("is {}; expected a number from {} to {}", shown_json(scale),
                                            -kMostScale, kMostScale));
  s.scale = scale.get<double>();
  s.order = in.boolean("canonical") ? Order::canonical : Order::native;
  if (s.reduces() && !known_traits("shm")->reduces_itself(s.reduce, s.dtype))
    in.wrong(in.place("reduce"),
             fmt::format("is {} of {}, which weft does not know", name(s.reduce), name(s.dtype)));
}

Step read_step(const JsonReader& in, const Program& p, int number) {
  Step s;
  s.group = read_int(in, "group", 0, static_cast<int>(p.groups.size()) - 1);
  if (const int before = p.groups[static_cast<std::size_t>(s.group)].before; before > number)
    in.wrong(in.place("group"), fmt::format("is {}, which is made before step {} only", s.group, before));
  const int n = p.group_size(s.group);
  s.op = static_cast<Op>(read_int(in, "op", 1, static_cast<int>(Op::exscan)));
  s.dtype = in.named<DType>("dtype", kDTypeCount);
  read_reduction(in, s);
  s.root = read_int(in, "root", 0, n - 1);
  s.peer = read_int(in, "peer", 0, n - 1);
  s.tag = read_int(in, "tag", 0, INT32_MAX);
  s.count = in.integer("count", 0, kMostElements);
  s.counts = in.integers("counts", 0, kMostElements);
  const int wanted = s.op == Op::all_to_all_v ? n * n : has_counts(s.op) ? n : 0;
  if (s.counts.size() != static_cast<std::size_t>(wanted))
    in.wrong(in.place("counts"), fmt::format("has {} numbers; expected {}, for {} of {} ranks",
                                             s.counts.size(), wanted, name(s.op), n));
  s.coalesced = in.boolean("coalesced");
  s.plain = in.boolean("plain");
  s.shared = in.boolean("shared");
  s.salt = in.any_unsigned("salt");
  return s;
}

Fault read_fault(const JsonReader& in, const Program& p) {
  Fault f;
  f.kind = static_cast<FaultKind>(read_int(in, "kind", 0, kFaultKinds - 1));
  f.point = static_cast<FaultPoint>(read_int(in, "point", 0, kFaultPoints - 1));
  f.rank = read_int(in, "rank", 0, p.ranks() - 1);
  f.step = read_int(in, "step", 0, std::max(static_cast<int>(p.steps.size()) - 1, 0));
  if (f.kind == FaultKind::none) return f;
  if (p.steps.empty()) in.wrong(in.place("step"), "is 0, but there are no steps");
  const int group = p.steps[static_cast<std::size_t>(f.step)].group;
  if (p.rank_in(group, f.rank) < 0 || p.group_size(group) < 2)
    in.wrong(in.place("rank"),
             fmt::format("is {}, which has nobody beside it in group {} of step {}", f.rank, group, f.step));
  return f;
}

std::int64_t elements(const Program& p) {
  std::int64_t all = 0;
  for (const Step& s : p.steps)
    all +=
        s.count * p.group_size(s.group) + std::accumulate(s.counts.begin(), s.counts.end(), std::int64_t{0});
  return all;
}

}  // namespace

Program decode(const std::string& text) {
  const std::string subject = "check: not a program";
  const nlohmann::json whole = parse_json(text, subject + ": it", kLimits);
  const JsonReader in(subject, whole, "");
  Program p;
  p.seed = in.any_unsigned("seed");
  p.index = in.any_unsigned("index");
  p.homes = read_homes(in);
  const nlohmann::json &groups = in.list("groups"), &steps = in.list("steps");
  if (groups.empty()) in.wrong("groups", "is empty; expected the group of all ranks");
  for (std::size_t g = 0; g < groups.size(); ++g)
    p.groups.push_back(read_group(JsonReader(subject, groups[g], fmt::format("groups[{}]", g)), p,
                                  static_cast<int>(steps.size())));
  for (std::size_t k = 0; k < steps.size(); ++k)
    p.steps.push_back(
        read_step(JsonReader(subject, steps[k], fmt::format("steps[{}]", k)), p, static_cast<int>(k)));
  if (elements(p) > kMostInAll)
    in.wrong("steps", fmt::format("move {} elements; at most {} are allowed", elements(p), kMostInAll));
  p.in_flight = read_int(in, "in_flight", 1, kMostInFlight);
  p.helper = in.boolean("helper");
  p.path = in.text("path");
  p.heartbeats = in.find("heartbeats") != nullptr && in.boolean("heartbeats");
  p.fault = read_fault(JsonReader(subject, in.at("fault"), "fault"), p);
  settle(p);
  return p;
}

}  // namespace weft::check
