#include "group/trace/trace.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <map>
#include <tuple>

#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

// Returns how many bytes of `text` from `at` on form one UTF-8 character. 0 if they form none.
std::size_t character(std::string_view text, std::size_t at) {
  const auto byte = [&](std::size_t i) { return static_cast<unsigned char>(text[i]); };
  const unsigned char first = byte(at);
  const std::size_t n = first < 0x80       ? 1
                        : first >> 5 == 6  ? 2
                        : first >> 4 == 14 ? 3
                        : first >> 3 == 30 ? 4
                                           : 0;
  if (n == 0 || at + n > text.size() || (n == 2 && first < 0xc2) || first > 0xf4) return 0;
  for (std::size_t i = 1; i < n; ++i)
    if (byte(at + i) >> 6 != 2) return 0;
  // excludes overlong forms, surrogates, and values beyond the last character
  const unsigned char second = n > 1 ? byte(at + 1) : 0;
  if ((first == 0xe0 && second < 0xa0) || (first == 0xed && second > 0x9f) ||
      (first == 0xf0 && second < 0x90) || (first == 0xf4 && second > 0x8f))
    return 0;
  return n;
}

// Returns the text as a JSON string. Control characters and bytes that are not UTF-8 become question marks.
std::string quoted(std::string_view text) {
  std::string out = "\"";
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t n = character(text, at);
    if (n == 0 || static_cast<unsigned char>(text[at]) < 0x20) {
      out += '?';
    } else {
      if (text[at] == '"' || text[at] == '\\') out += '\\';
      out += text.substr(at, n);
    }
    at += std::max<std::size_t>(n, 1);
  }
  return out + '"';
}

// Returns the fields that describe a call; they are equal in both formats.
std::string fields(const TracedCall& c) {
  const OpRow r = row(c.op);
  std::string out =
      fmt::format("\"call\": {}, \"dtype\": \"{}\", \"count\": {}", c.call, name(c.dtype), c.count);
  if (r.reduces) out += fmt::format(", \"reduce\": \"{}\"", name(c.reduce));
  if (c.peer >= 0) out += fmt::format(", \"{}\": {}", r.collective ? "root" : "peer", c.peer);
  return out;
}

std::string number(std::uint64_t call) { return call == kNoCall ? "null" : std::to_string(call); }

// Chrome's viewers draw overlapping calls in one row wrongly, so overlapping calls go to further rows of
// their group.
std::vector<int> rows(const Trace& t, std::vector<std::int64_t>& durations) {
  std::vector<int> row_of;
  std::vector<std::int64_t> ends;
  for (const TracedCall& c : t.calls) {
    const std::int64_t end = c.state == TracedState::pending ? t.taken_ns : c.finished_ns;
    const std::int64_t duration = std::max<std::int64_t>(end - c.posted_ns, 0);
    durations.push_back(duration);
    std::size_t r = 0;
    while (r < ends.size() && ends[r] > c.posted_ns) ++r;
    if (r == ends.size()) ends.push_back(0);
    ends[r] = c.posted_ns + duration;
    row_of.push_back(static_cast<int>(r));
  }
  return row_of;
}

std::string events(std::span<const Trace> traces, std::span<const std::int64_t> shifts) {
  // In the viewer a "process" is a rank. Each of its groups has `rows` rows.
  using Key = std::tuple<std::string, std::string, int, int>;
  struct Process {
    int number = 0, rows = 0;
    const Trace* widest = nullptr;
  };
  std::map<Key, Process> processes;
  for (const Trace& t : traces) {
    Process& p = processes[{t.boot, t.host, t.process, t.process_rank}];
    if (p.widest == nullptr || t.size > p.widest->size) p.widest = &t;
  }
  std::vector<Process*> order;
  for (auto& [key, p] : processes) order.push_back(&p);
  std::stable_sort(order.begin(), order.end(),
                   [](const Process* a, const Process* b) { return a->widest->rank < b->widest->rank; });
  std::string out;
  const auto add = [&](const std::string& event) { out += (out.empty() ? "\n  " : ",\n  ") + event; };
  for (std::size_t i = 0; i < order.size(); ++i) {
    Process& p = *order[i];
    p.number = static_cast<int>(i);
    add(fmt::format(
        "{{\"ph\": \"M\", \"name\": \"process_name\", \"pid\": {}, \"args\": {{\"name\": {}}}}}", i,
        quoted(fmt::format("rank {} ({}, process {})", p.widest->rank, p.widest->host, p.widest->process))));
    add(
        fmt::format("{{\"ph\": \"M\", \"name\": \"process_sort_index\", \"pid\": {0}, \"args\": "
                    "{{\"sort_index\": {0}}}}}",
                    i));
  }
  const auto microseconds = [](std::int64_t ns) { return static_cast<double>(ns) / 1e3; };
  for (std::size_t i = 0; i < traces.size(); ++i) {
    const Trace& t = traces[i];
    const std::int64_t zero = t.began_monotonic_ns + (shifts.empty() ? 0 : shifts[i]);
    Process& p = processes[{t.boot, t.host, t.process, t.process_rank}];
    std::vector<std::int64_t> durations;
    const std::vector<int> row_of = rows(t, durations);
    const int first_row = p.rows;
    p.rows += row_of.empty() ? 1 : 1 + *std::max_element(row_of.begin(), row_of.end());
    for (int r = first_row; r < p.rows; ++r)
      add(fmt::format(
          "{{\"ph\": \"M\", \"name\": \"thread_name\", \"pid\": {}, \"tid\": {}, \"args\": {{\"name\": "
          "{}}}}}",
          p.number, r, quoted(fmt::format("{}, rank {} of {}", t.group, t.rank, t.size))));
    for (std::size_t k = 0; k < t.calls.size(); ++k) {
      const TracedCall& c = t.calls[k];
      add(fmt::format(
          "{{\"ph\": \"X\", \"name\": \"{}\", \"cat\": \"weft\", \"pid\": {}, \"tid\": {}, \"ts\": {:.3f}, "
          "\"dur\": {:.3f}, \"args\": {{{}, \"state\": \"{}\", \"group\": {}}}}}",
          name(c.op), p.number, first_row + row_of[k], microseconds(zero + c.posted_ns),
          microseconds(durations[k]), fields(c), name(c.state), quoted(t.group)));
    }
    if (t.failure)
      add(fmt::format(
          "{{\"ph\": \"i\", \"name\": {}, \"cat\": \"weft\", \"s\": \"p\", \"pid\": {}, \"tid\": {}, "
          "\"ts\": {:.3f}, \"args\": {{\"text\": {}}}}}",
          quoted(name(t.failure->why.code)), p.number, first_row, microseconds(zero + t.failure->noticed_ns),
          quoted(t.failure->why.text)));
  }
  return out;
}

}  // namespace

std::string_view name(TracedState state) noexcept {
  switch (state) {
    case TracedState::pending: return "pending";
    case TracedState::done: return "done";
    case TracedState::failed: return "failed";
  }
  return "?";
}

std::string to_json(const Trace& t, bool with_events) {
  std::string out = fmt::format(
      "{{\"weft_trace\": 1, \"group\": {}, \"id\": {}, \"rank\": {}, \"size\": {}, \"backend\": {},\n"
      " \"host\": {}, \"boot\": {}, \"process\": {}, \"process_rank\": {},\n"
      " \"began_monotonic_ns\": {}, \"began_realtime_ns\": {}, \"taken_ns\": {}, \"forgotten\": {},\n",
      quoted(t.group), quoted(t.id), t.rank, t.size, quoted(t.backend), quoted(t.host), quoted(t.boot),
      t.process, t.process_rank, t.began_monotonic_ns, t.began_realtime_ns, t.taken_ns, t.forgotten);
  if (t.failure) {
    const Failure& f = t.failure->why;
    out += fmt::format(
        " \"failure\": {{\"code\": \"{}\", \"op\": {}, \"call\": {}, \"ranks\": [{}], \"noticed_ns\": {}, "
        "\"text\": "
        "{}}},\n",
        name(f.code), f.op == Op::none ? "null" : quoted(name(f.op)), number(f.call),
        fmt::join(f.ranks, ", "), t.failure->noticed_ns, quoted(f.text));
  }
  out += " \"calls\": [";
  for (std::size_t k = 0; k < t.calls.size(); ++k) {
    const TracedCall& c = t.calls[k];
    out +=
        fmt::format("{}\n  {{\"op\": \"{}\", {}, \"posted_ns\": {}, \"finished_ns\": {}, \"state\": \"{}\"}}",
                    k ? "," : "", name(c.op), fields(c), c.posted_ns, c.finished_ns, name(c.state));
  }
  out += "\n]";
  if (with_events) out += fmt::format(",\n \"traceEvents\": [{}\n]", events({&t, 1}, {}));
  return out + "}\n";
}

std::string to_chrome(std::span<const Trace> traces, std::span<const std::int64_t> shifts) {
  return fmt::format("{{\"displayTimeUnit\": \"ns\", \"traceEvents\": [{}\n]}}\n", events(traces, shifts));
}

}  // namespace weft
