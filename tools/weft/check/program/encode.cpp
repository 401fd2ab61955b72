// Programs as JSON, and back.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <nlohmann/json.hpp>
#include <numeric>

#include "base/json_reader.hpp"
#include "faults/kinds.hpp"
#include "program.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/window.hpp"

namespace weft::check {

std::string encode(const Program& p) {
  using nlohmann::json;
  json groups = json::array(), steps = json::array();
  for (const GroupPlan& g : p.groups)
    groups.push_back({{"how", static_cast<int>(g.how)},
                      {"parent", g.parent},
                      {"before", g.before},
                      {"joined", g.joined},
                      {"ranks", g.ranks}});
  for (const Step& s : p.steps) {
    steps.push_back({{"group", s.group},
                     {"does", static_cast<int>(s.does)},
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
                     {"starts", s.starts},
                     {"shared", s.shared},
                     {"salt", s.salt}});
    json& written = steps.back();
    const WindowPlan& w = s.window;
    if (s.does == Does::window)
      written["window"] = {
          {"before", w.before},       {"after", w.after},     {"edge", w.edge},
          {"exchanges", w.exchanges}, {"fields", w.fields},   {"newest_first", w.newest_first},
          {"adjoint", w.adjoint},     {"by_plan", w.by_plan}, {"together", w.together}};
    if (s.does == Does::gradients)
      written["gradients"] = {{"cut", s.gradients.cut},
                              {"at_once", s.gradients.at_once},
                              {"rounds", s.gradients.rounds},
                              {"bytes", s.gradients.bytes}};
    if (s.does == Does::agreement) written["value"] = name(s.value);
    if (s.does == Does::overlap) written["overlap"] = name(s.overlap);
  }
  return json{{"seed", p.seed},
              {"index", p.index},
              {"homes", p.homes},
              {"groups", groups},
              {"steps", steps},
              {"in_flight", p.in_flight},
              {"helper", p.helper},
              {"path", p.path},
              {"heartbeats", p.heartbeats},
              {"window_beside", p.window_beside},
              {"ends", p.ends},
              {"ending", name(p.ending)},
              {"fault",
               {{"kind", static_cast<int>(p.fault.kind)},
                {"point", static_cast<int>(p.fault.point)},
                {"rank", p.fault.rank},
                {"step", p.fault.step}}}}
      .dump();
}

namespace {

using Kind = ReduceOp::Kind;

const std::string kSubject = "check: not a program";

// A program that is read will be run, so every number must be within the range of programs.
constexpr int kMostInFlight = 1000;
constexpr std::int64_t kMostElements = 1 << 24;  // of a block
constexpr std::int64_t kMostInAll = 1 << 28;     // of all blocks of a program
constexpr int kMostHalo = 16, kMostExchanges = 8;
constexpr int kMostTensors = 64, kMostRounds = 8;
constexpr std::int64_t kMostRows = 1000;  // of a window's tensor
constexpr double kMostScale = 1000;       // fits every type
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

// The first group contains all ranks. The others follow their parents.
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
  // A program has only two colors.
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

// Halos that every edge rule can fill: the rule `reflect` reaches no further than the tensor.
WindowPlan read_window(const JsonReader& in, const Step& s) {
  WindowPlan w;
  const std::int64_t rows = std::accumulate(s.counts.begin(), s.counts.end(), std::int64_t{0});
  if (rows == 0) in.wrong(in.place("before"), "is of a window on no rows; expected counts above 0");
  const int most = static_cast<int>(std::min<std::int64_t>(kMostHalo, rows - 1));
  w.before = read_int(in, "before", 0, most);
  w.after = read_int(in, "after", 0, most);
  w.edge = read_int(in, "edge", static_cast<int>(Edge::Kind::zero), static_cast<int>(Edge::Kind::replicate));
  w.exchanges = read_int(in, "exchanges", 1, kMostExchanges);
  w.fields = read_int(in, "fields", 1, kMostExchanges);
  w.newest_first = in.boolean("newest_first");
  w.adjoint = in.boolean("adjoint");
  w.by_plan = in.boolean("by_plan");
  w.together = in.boolean("together");
  if (w.together && (w.adjoint || w.by_plan))
    in.wrong(in.place("together"), "is true; expected false of an adjoint and of a plan");
  if (w.adjoint && !has_adjoint(s.dtype))
    in.wrong(in.place("adjoint"), fmt::format("is true for {}, which has no sums", name(s.dtype)));
  return w;
}

GradientPlan read_gradients(const JsonReader& in) {
  const GradientPlan g{.cut = in.boolean("cut"),
                       .at_once = in.boolean("at_once"),
                       .rounds = read_int(in, "rounds", 1, kMostRounds),
                       .bytes = in.integer("bytes", 1, kMostElements)};
  if (g.cut && g.at_once) in.wrong(in.place("at_once"), "is true of tensors that are cut");
  return g;
}

Step read_step(const JsonReader& in, const Program& p, int number) {
  Step s;
  s.group = read_int(in, "group", 0, static_cast<int>(p.groups.size()) - 1);
  if (const int before = p.groups[static_cast<std::size_t>(s.group)].before; before > number)
    in.wrong(in.place("group"), fmt::format("is {}, which is made before step {} only", s.group, before));
  const int n = p.group_size(s.group);
  s.does = static_cast<Does>(read_int(in, "does", 0, kDoesHere - 1));
  const bool call = s.does == Does::call;
  s.op = static_cast<Op>(read_int(in, "op", call ? 1 : 0, call ? static_cast<int>(Op::exscan) : 0));
  s.dtype = in.named<DType>("dtype", kDTypeCount);
  read_reduction(in, s);
  s.root = read_int(in, "root", 0, n - 1);
  s.peer = read_int(in, "peer", 0, n - 1);
  s.tag = read_int(in, "tag", 0, INT32_MAX);
  s.count = in.integer("count", 0, kMostElements);
  s.counts = in.integers("counts", 0, kMostElements);
  const bool per_rank = has_counts(s.op) || s.does == Does::window;
  const int wanted = s.op == Op::all_to_all_v ? n * n : per_rank ? n : 0;
  if (s.does == Does::gradients) {
    if (s.counts.empty() || s.counts.size() > std::size_t{kMostTensors})
      in.wrong(in.place("counts"), fmt::format("has {} numbers; expected 1 to {}, one for each tensor",
                                               s.counts.size(), kMostTensors));
  } else if (s.counts.size() != static_cast<std::size_t>(wanted))
    in.wrong(in.place("counts"),
             fmt::format("has {} numbers; expected {}, for {} of {} ranks", s.counts.size(), wanted,
                         s.does == Does::window ? "window" : name(s.op), n));
  s.coalesced = in.boolean("coalesced");
  s.plain = in.boolean("plain");
  if (in.find("starts") != nullptr) s.starts = read_int(in, "starts", 1, kMostStarts);
  s.shared = in.boolean("shared");
  s.salt = in.any_unsigned("salt");
  if (s.does == Does::window)
    s.window = read_window(JsonReader(kSubject, in.at("window"), in.place("window")), s);
  if (s.does == Does::gradients)
    s.gradients = read_gradients(JsonReader(kSubject, in.at("gradients"), in.place("gradients")));
  if (s.does == Does::agreement) s.value = in.named<Value>("value", kValues);
  if (s.does == Does::overlap) s.overlap = in.named<Overlap>("overlap", kOverlaps);
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
  for (const Step& s : p.steps) {
    const auto sum = std::accumulate(s.counts.begin(), s.counts.end(), std::int64_t{0});
    if (s.does == Does::gradients)
      all += 4 * kMostColumns * sum;
    else if (s.does != Does::window)
      all += s.count * p.group_size(s.group) + sum;
    else if (sum > kMostRows)
      return kMostInAll + 1;
    else
      all += s.count * (sum + kMostRanks * 2 * kMostHalo) * s.window.exchanges * s.window.fields;
  }
  return all;
}

}  // namespace

Program decode(const std::string& text) {
  const nlohmann::json whole = parse_json(text, kSubject + ": it", kLimits);
  const JsonReader in(kSubject, whole, "");
  Program p;
  p.seed = in.any_unsigned("seed");
  p.index = in.any_unsigned("index");
  p.homes = read_homes(in);
  const nlohmann::json &groups = in.list("groups"), &steps = in.list("steps");
  if (groups.empty()) in.wrong("groups", "is empty; expected the group of all ranks");
  for (std::size_t g = 0; g < groups.size(); ++g)
    p.groups.push_back(read_group(JsonReader(kSubject, groups[g], fmt::format("groups[{}]", g)), p,
                                  static_cast<int>(steps.size())));
  for (std::size_t k = 0; k < steps.size(); ++k)
    p.steps.push_back(
        read_step(JsonReader(kSubject, steps[k], fmt::format("steps[{}]", k)), p, static_cast<int>(k)));
  if (elements(p) > kMostInAll)
    in.wrong("steps", fmt::format("move {} elements; at most {} are allowed", elements(p), kMostInAll));
  p.in_flight = read_int(in, "in_flight", 1, kMostInFlight);
  p.helper = in.boolean("helper");
  p.path = in.text("path");
  p.heartbeats = in.find("heartbeats") != nullptr && in.boolean("heartbeats");
  p.window_beside = in.boolean("window_beside");
  p.ends = in.boolean("ends");
  p.ending = in.named<Ending>("ending", kEndings);
  p.fault = read_fault(JsonReader(kSubject, in.at("fault"), "fault"), p);
  settle(p);
  return p;
}

}  // namespace weft::check
