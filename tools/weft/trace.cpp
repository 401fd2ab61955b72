// Ranks are aligned by group and call number. The time at which a call was posted, on clocks that agree,
// shows which rank was late. From then on the others could only wait. If a rank has not come, it is the
// latest.
#include "trace.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <filesystem>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/files/regular_file.hpp"
#include "base/json_reader.hpp"
#include "printable.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft::tools {
namespace {

using nlohmann::json;

constexpr std::int64_t kMost = std::int64_t{1} << 60;  // nanoseconds, so that sums of a few stay in 64 bits
constexpr std::size_t kWorst = 5;                      // calls that are listed
constexpr std::size_t kDifferences = 5;

TracedCall read_call(const JsonReader& in) {
  TracedCall c;
  c.op = in.named<Op>("op", kOpCount);
  c.call = static_cast<std::uint64_t>(in.integer("call", 0, kMost));
  c.dtype = in.named<DType>("dtype", kDTypeCount);
  c.count = in.integer("count", 0, INT64_MAX);
  if (row(c.op).reduces) c.reduce = in.named<ReduceOp::Kind>("reduce", kReduceKindCount);
  const char* const other = row(c.op).collective ? "root" : "peer";
  if (in.find(other) != nullptr) c.peer = static_cast<int>(in.integer(other, 0, INT32_MAX));
  c.posted_ns = in.integer("posted_ns", -kMost, kMost);
  c.finished_ns = in.integer("finished_ns", -kMost, kMost);
  c.state = in.named<TracedState>("state", 3);
  return c;
}

std::string shown(std::int64_t ns) {
  const auto t = static_cast<double>(ns);
  if (ns < 1'000'000) return fmt::format("{:.3g} us", t / 1e3);
  if (ns < 1'000'000'000) return fmt::format("{:.3g} ms", t / 1e6);
  return fmt::format("{:.3f} s", t / 1e9);
}

std::string what(const TracedCall& c) {
  std::string text(name(c.op));
  if (row(c.op).counts != Counts::none) text += fmt::format(" {} x{}", name(c.dtype), c.count);
  if (row(c.op).reduces) text += fmt::format(" {}", name(c.reduce));
  if (c.peer >= 0) text += fmt::format(" {} {}", row(c.op).collective ? "root" : "peer", c.peer);
  return text;
}

// Returns whether the calls of two ranks fit together, as far as traces show it. In rooted calls, and in
// calls with a block per rank, each rank may have another length.
bool same(const TracedCall& a, const TracedCall& b) {
  const OpRow r = row(a.op);
  if (a.op != b.op) return false;
  if (r.counts == Counts::none) return true;
  const bool same_counts = r.rooted == Rooted::no && r.counts != Counts::both_blocks &&
                           r.counts != Counts::in_blocks && r.counts != Counts::out_blocks;
  return a.dtype == b.dtype && a.peer == b.peer && (!r.reduces || a.reduce == b.reduce) &&
         (!same_counts || a.count == b.count);
}

// One group, with its ranks' files side by side.
class Group {
 public:
  void add(const TraceFile& file, std::int64_t shift) {
    const Trace& t = file.trace;
    traces_[t.rank] = &t;
    zero_[t.rank] = t.began_monotonic_ns + shift;
    for (const TracedCall& c : t.calls)
      if (row(c.op).collective) calls_[c.call][t.rank] = &c;
  }

  std::string text() const {
    const Trace& any = *traces_.begin()->second;
    std::string out =
        fmt::format("group \"{}\" ({}, {} ranks, over {})\n", any.group, any.id, any.size, any.backend);
    add_failure(out);
    add_end(out);
    add_differences(out);
    add_lateness(out);
    return out;
  }

  // The time at which the first of its ranks noticed that the group had failed. Nothing if it has not failed.
  std::optional<std::pair<std::int64_t, const Trace*>> failed() const {
    std::optional<std::pair<std::int64_t, const Trace*>> first;
    for (const auto& [rank, t] : traces_)
      if (t->failure && (!first || zero_.at(rank) + t->failure->noticed_ns < first->first))
        first = {zero_.at(rank) + t->failure->noticed_ns, t};
    return first;
  }

 private:
  static void line(std::string& out, std::string_view title, const std::string& text) {
    out += fmt::format("  {:<12}{}\n", title, text);
  }

  void add_failure(std::string& out) const {
    const auto first = failed();
    if (!first) return;
    std::map<std::string, std::vector<int>> told;  // one failure, unless the store was lost
    std::vector<int> well;
    for (const auto& [rank, t] : traces_) {
      if (t->failure)
        told[fmt::format("{}: {}", name(t->failure->why.code), t->failure->why.text)].push_back(rank);
      else
        well.push_back(rank);
    }
    for (const auto& [story, ranks] : told)
      line(out, "failure", fmt::format("{} (says {})", story, name_ranks(ranks)));
    if (!well.empty()) line(out, "", fmt::format("{} had not heard of it", name_ranks(well)));
  }

  // Adds the ranks that have not come to the last call of the group, and the calls that never ended.
  void add_end(std::string& out) const {
    std::vector<int> absent;
    const int size = traces_.begin()->second->size;
    for (int r = 0; r < size && absent.size() <= 64; ++r)
      if (!traces_.contains(r)) absent.push_back(r);
    if (!absent.empty())
      line(out, "no file", fmt::format("of {}{}", name_ranks(absent), absent.size() > 64 ? ", ..." : ""));
    if (!calls_.empty()) {
      const auto& [number, last] = *calls_.rbegin();
      std::map<std::string, std::vector<int>> missing;  // by their places
      for (const auto& [rank, t] : traces_) {
        if (last.contains(rank)) continue;
        missing[last_call(rank)].push_back(rank);
      }
      for (const auto& [where, ranks] : missing)
        line(out, "missing",
             fmt::format("{} at {} [call {}]: {}", name_ranks(ranks), what(*last.begin()->second), number,
                         where));
    }
    for (const auto& [rank, t] : traces_)
      for (const TracedCall& c : t->calls)
        if (c.state == TracedState::pending)
          line(out, "pending",
               fmt::format("rank {}: {} [call {}], for {}", rank, what(c), c.call,
                           shown(std::max<std::int64_t>(t->taken_ns - c.posted_ns, 0))));
  }

  std::string last_call(int rank) const {
    for (auto at = calls_.rbegin(); at != calls_.rend(); ++at)
      if (const auto own = at->second.find(rank); own != at->second.end())
        return fmt::format("the last of its calls here is {} [call {}], {}", what(*own->second), at->first,
                           name(own->second->state));
    return "it made no call here";
  }

  void add_differences(std::string& out) const {
    std::size_t found = 0;
    for (const auto& [number, ranks] : calls_) {
      const auto& [first, call] = *ranks.begin();
      const auto other = std::find_if(ranks.begin(), ranks.end(),
                                      [&call = call](const auto& r) { return !same(*call, *r.second); });
      if (other == ranks.end()) continue;
      if (found++ < kDifferences)
        line(out, "different",
             fmt::format("call {}: rank {} {}, rank {} {}", number, first, what(*call), other->first,
                         what(*other->second)));
    }
    if (found > kDifferences) line(out, "", fmt::format("and {} calls more", found - kDifferences));
  }

  // A rank's part in a call: how much later than the first rank it arrived. If it has not arrived, how long
  // the others had waited when it wrote its file.
  struct Coming {
    std::int64_t by;
    bool came;
  };

  // The ranks' parts, by rank. If a rank does not have the call, it has not come to it, unless its file
  // begins later.
  std::map<int, Coming> comings(std::uint64_t number) const {
    const auto& ranks = calls_.at(number);
    std::int64_t first = INT64_MAX;
    for (const auto& [rank, c] : ranks) first = std::min(first, zero_.at(rank) + c->posted_ns);
    std::map<int, Coming> all;
    for (const auto& [rank, t] : traces_) {
      if (const auto own = ranks.find(rank); own != ranks.end())
        all[rank] = {zero_.at(rank) + own->second->posted_ns - first, true};
      else if (const std::int64_t by = zero_.at(rank) + t->taken_ns - first;
               by > 0 && number >= next_call(rank))
        all[rank] = {by, false};
    }
    return all;
  }

  // The number after that of the rank's last call.
  std::uint64_t next_call(int rank) const {
    for (auto at = calls_.rbegin(); at != calls_.rend(); ++at)
      if (at->second.contains(rank)) return at->first + 1;
    return 0;
  }

  struct Late {
    std::int64_t total = 0, worst = 0;
    std::size_t last = 0;
    std::uint64_t worst_call = 0;
    std::optional<std::uint64_t> absent{};  // the first call to which it has not come

    void add(const Coming& c, std::uint64_t number) {
      if (__builtin_add_overflow(total, c.by, &total)) total = INT64_MAX;
      if (c.by > worst) worst_call = number;
      worst = std::max(worst, c.by);
      if (!c.came && !absent) absent = number;
    }
  };
  struct Spread {
    std::int64_t by;
    std::uint64_t number;
  };

  void add_lateness(std::string& out) const {
    std::map<int, Late> late;
    std::vector<Spread> spreads;
    for (const auto& [number, ranks] : calls_) {
      const std::map<int, Coming> all = comings(number);
      if (all.size() < 2) continue;
      const auto last = std::max_element(all.begin(), all.end(), [](const auto& a, const auto& b) {
        return std::pair(!a.second.came, a.second.by) < std::pair(!b.second.came, b.second.by);
      });
      for (const auto& [rank, c] : all) late[rank].add(c, number);
      ++late[last->first].last;
      spreads.push_back({last->second.by, number});
    }
    if (spreads.empty()) {
      line(out, "late", "nothing to compare: no call that two of these files have");
      return;
    }
    add_late_ranks(out, late, spreads.size());
    add_worst_calls(out, spreads);
  }

  // Lists first the ranks that did not come at all, because the others waited for them.
  static void add_late_ranks(std::string& out, const std::map<int, Late>& late, std::size_t calls) {
    line(out, "late", fmt::format("{:>5} {:>10} {:>12} {:>12}", "rank", "was last", "in all", "at worst"));
    std::vector<std::pair<int, Late>> order(late.begin(), late.end());
    std::stable_sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
      return std::pair(a.second.absent.has_value(), a.second.total) >
             std::pair(b.second.absent.has_value(), b.second.total);
    });
    for (const auto& [rank, l] : order)
      line(out, "",
           fmt::format("{:>5} {:>10} {:>12} {:>12}{}{}", rank, fmt::format("{} of {}", l.last, calls),
                       shown(l.total), shown(l.worst),
                       l.worst > 0 ? fmt::format("  [call {}]", l.worst_call) : "",
                       l.absent ? fmt::format("; has not come to call {}", *l.absent) : ""));
  }

  void add_worst_calls(std::string& out, std::vector<Spread> spreads) const {
    std::stable_sort(spreads.begin(), spreads.end(),
                     [](const Spread& a, const Spread& b) { return a.by > b.by; });
    for (std::size_t i = 0; i < std::min(kWorst, spreads.size()); ++i) {
      const std::map<int, Coming> all = comings(spreads[i].number);
      const bool absent = std::any_of(all.begin(), all.end(), [](const auto& c) { return !c.second.came; });
      std::string who;
      for (const auto& [rank, c] : all)
        if (absent ? !c.came : c.by > spreads[i].by / 2)
          who += fmt::format("{}rank {} {} {}", who.empty() ? "" : ", ", rank,
                             absent ? "has not come within" : "by", shown(c.by));
      if (!who.empty())
        line(out, i == 0 ? "worst calls" : "",
             fmt::format("{} [call {}]: {}", what(*calls_.at(spreads[i].number).begin()->second),
                         spreads[i].number, who));
    }
  }

  std::map<int, const Trace*> traces_;                               // by rank
  std::map<int, std::int64_t> zero_;                                 // of its times, on the common clock
  std::map<std::uint64_t, std::map<int, const TracedCall*>> calls_;  // collectives by number and rank
};

}  // namespace

TraceFile read_trace(const std::string& path) {
  constexpr JsonLimits kLimits;
  const RegularFile opened = open_regular_file(path);
  if (opened.error_number != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: cannot read it: {}", path, system_words(opened.error_number)));
  const std::string bytes = read_regular_file(path, fmt::format("{}:", path), kLimits.bytes);
  if (bytes.empty()) throw Error(ErrorCode::bad_argument, fmt::format("{}: no trace, for it is empty", path));
  JsonProblem why;
  const auto content = try_parse_json(bytes, why, kLimits);
  if (!content) throw Error(ErrorCode::bad_argument, fmt::format("{}: no trace, for it {}", path, why.text));
  const JsonReader in(path, *content, "");
  const auto number = [&](const char* key, int min, int max) {
    return static_cast<int>(in.integer(key, min, max));
  };
  if (in.find("weft_trace") == nullptr) in.wrong("no trace of weft:", "it has no \"weft_trace\"");
  number("weft_trace", 1, 1);
  TraceFile out{path, {}};
  Trace& t = out.trace;
  t.group = printable(in.text("group"));
  t.id = printable(in.text("id"));
  t.size = number("size", 1, INT32_MAX);
  t.rank = number("rank", 0, t.size - 1);
  t.backend = printable(in.text("backend"));
  t.host = printable(in.text("host"));
  t.boot = printable(in.text("boot"));
  t.process = number("process", 0, INT32_MAX);
  t.process_rank = number("process_rank", 0, INT32_MAX);
  t.began_monotonic_ns = in.integer("began_monotonic_ns", 0, kMost);
  t.began_realtime_ns = in.integer("began_realtime_ns", 0, 4 * kMost);
  t.taken_ns = in.integer("taken_ns", -kMost, kMost);
  t.forgotten = static_cast<std::uint64_t>(in.integer("forgotten", 0, kMost));
  if (const json* const failure = in.find("failure")) {
    const JsonReader f(path, *failure, "failure");
    t.failure.emplace();
    t.failure->why.code = f.named<ErrorCode>("code", kErrorCodeCount, 1);
    t.failure->why.text = printable(f.text("text"));
    t.failure->noticed_ns = f.integer("noticed_ns", -kMost, kMost);
  }
  const json& calls = in.list("calls");
  for (std::size_t i = 0; i < calls.size(); ++i)
    t.calls.push_back(read_call(JsonReader(path, calls[i], fmt::format("calls[{}]", i))));
  return out;
}

std::vector<TraceFile> read_traces(const std::vector<std::string>& paths) {
  std::vector<std::string> files;
  for (const std::string& path : paths) {
    std::error_code ignored;
    if (!std::filesystem::is_directory(path, ignored)) {
      files.push_back(path);
      continue;
    }
    const std::size_t before = files.size();
    for (const auto& entry : std::filesystem::directory_iterator(path, ignored))
      if (entry.path().extension() == ".json") files.push_back(entry.path());
    if (files.size() == before)
      throw Error(ErrorCode::bad_argument, fmt::format("{}: no file in this folder ends in .json", path));
    std::sort(files.begin() + static_cast<std::ptrdiff_t>(before), files.end());
  }
  std::vector<TraceFile> traces;
  std::map<std::string, std::map<int, std::size_t>> groups;
  for (const std::string& path : files) {
    TraceFile file = read_trace(path);
    auto& ranks = groups[file.trace.id];
    if (!ranks.empty()) {
      const TraceFile& first = traces[ranks.begin()->second];
      if (first.trace.size != file.trace.size)
        throw Error(
            ErrorCode::bad_argument,
            fmt::format("{}: group \"{}\" has {} ranks, and in {} it has {}; expected files of one job", path,
                        file.trace.group, file.trace.size, first.path, first.trace.size));
    }
    const auto [at, fresh] = ranks.emplace(file.trace.rank, traces.size());
    if (!fresh)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}: of rank {} of group \"{}\", as {} is; expected files of one job", path,
                              file.trace.rank, file.trace.group, traces[at->second].path));
    traces.push_back(std::move(file));
  }
  return traces;
}

std::vector<std::int64_t> shifts(const std::vector<TraceFile>& files) {
  std::map<std::string, std::int64_t>
      by_boot;  // one shift for all ranks of a host, since their common clock is more exact
  for (const TraceFile& f : files)
    by_boot.emplace(f.trace.boot, f.trace.began_realtime_ns - f.trace.began_monotonic_ns);
  std::vector<std::int64_t> out;
  for (const TraceFile& f : files) out.push_back(by_boot.size() == 1 ? 0 : by_boot[f.trace.boot]);
  return out;
}

std::string report(const std::vector<TraceFile>& files) {
  const std::vector<std::int64_t> shift = shifts(files);
  std::map<std::string, Group> groups;  // by id: there may be several of a name
  std::vector<std::string> order;
  std::set<std::string> hosts;
  for (std::size_t i = 0; i < files.size(); ++i) {
    const Trace& t = files[i].trace;
    if (!groups.contains(t.id)) order.push_back(t.id);
    groups[t.id].add(files[i], shift[i]);
    hosts.insert(t.boot);
  }
  std::string out = fmt::format(
      "{} file{}, {} group{}; {}\n", files.size(), files.size() == 1 ? "" : "s", order.size(),
      order.size() == 1 ? "" : "s",
      hosts.size() == 1 ? "one host, one clock"
                        : fmt::format("{} hosts, lined up by their real-time clocks: what is later by "
                                      "less than these differ means nothing",
                                      hosts.size()));
  std::optional<std::pair<std::int64_t, const Trace*>> first;
  std::size_t failures = 0;
  for (const std::string& id : order) {
    const auto failed = groups[id].failed();
    failures += failed ? 1 : 0;
    if (failed && (!first || failed->first < first->first)) first = failed;
  }
  if (failures > 1)
    out += fmt::format("the first failure is that of group \"{}\", noticed by its rank {}: {}\n",
                       first->second->group, first->second->rank, first->second->failure->why.text);
  for (const std::string& id : order) out += fmt::format("\n{}", groups[id].text());
  return out;
}

}  // namespace weft::tools
