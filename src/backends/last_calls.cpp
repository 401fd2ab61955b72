#include "backends/last_calls.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>
#include <utility>
#include <vector>

#include "backends/call_word.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

// The largest length of the text, without its last group: an abort record of shm has room for 2047 letters.
constexpr std::size_t kLongest = 900;

std::string call_words(const LastCall& c) {
  const CallRecord record{
      .call = c.call, .count = c.count, .root = c.root, .op = c.op, .dtype = c.dtype, .reduce = c.reduce};
  std::string text = fmt::format("{} [call {}]", what(record), c.call);
  if (c.state == LastCall::State::in_flight && c.oldest < c.call)
    text += fmt::format(", of which all from call {} on are in flight", c.oldest);
  return text;
}

// Returns the text that follows the names of the ranks. `one`: whether only one rank is named.
std::string words(const LastCall& c, bool one) {
  std::string text;
  switch (c.state) {
    case LastCall::State::unknown:
      text = fmt::format("{}, so that {} last call{} unknown",
                         c.answered ? (one ? "does not say it" : "do not say it") : "did not answer",
                         one ? "its" : "their", one ? " is" : "s are");
      break;
    case LastCall::State::none: text = one ? "has called nothing yet" : "have called nothing yet"; break;
    case LastCall::State::called: text = "called " + call_words(c); break;
    case LastCall::State::in_flight: text = (one ? "is in " : "are in ") + call_words(c); break;
    case LastCall::State::finished: text = "finished " + call_words(c); break;
  }
  if (const LastCall::Message& m = c.message; m.op == Op::exchange)
    text += fmt::format(" and {} in an exchange", one ? "waits" : "wait");
  else if (m.op != Op::none)
    text += fmt::format(" and {} in {} {} x{} {} {} (tag {})", one ? "waits" : "wait", name(m.op),
                        name(m.dtype), m.count, m.op == Op::send ? "to" : "from",
                        m.peer < 0 ? std::string("any rank") : fmt::format("rank {}", m.peer), m.tag);
  return text;
}

// A sort key by which ranks that are behind are first: ranks of which nothing is known, then ranks that have
// called nothing, then the others by call number.
std::uint64_t place(const LastCall& c) noexcept {
  switch (c.state) {
    case LastCall::State::unknown: return 0;
    case LastCall::State::none: return 1;
    case LastCall::State::called:
    case LastCall::State::in_flight:
    case LastCall::State::finished: break;
  }
  return 2 + std::min(c.call, kNoCall - 2);
}

}  // namespace

std::string tell_last_calls(std::span<const LastCall> calls) {
  if (std::all_of(calls.begin(), calls.end(),
                  [](const LastCall& c) { return c.state == LastCall::State::unknown; }))
    return {};
  struct Group {
    const LastCall* call = nullptr;
    std::vector<int> ranks;
  };
  std::map<std::pair<std::uint64_t, std::string>, Group> groups;
  for (const LastCall& c : calls) {
    Group& group = groups[{place(c), words(c, true)}];
    group.call = &c;
    group.ranks.push_back(c.rank);
  }
  std::string text = "last calls";
  std::size_t told = 0;
  for (const auto& [key, group] : groups) {
    if (text.size() > kLongest) break;
    text += fmt::format("{} {} {}", told == 0 ? ":" : ";", name_ranks(group.ranks),
                        words(*group.call, group.ranks.size() == 1));
    told += group.ranks.size();
  }
  if (told < calls.size()) text += fmt::format("; {} more ranks are not listed", calls.size() - told);
  return text;
}

std::string left_text(Op op, std::span<const int> ranks) {
  return fmt::format("{}{} left the group without it", op == Op::none ? "" : fmt::format("{}: ", name(op)),
                     name_ranks(ranks));
}

}  // namespace weft
