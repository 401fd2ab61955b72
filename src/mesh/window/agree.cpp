#include "mesh/window/agree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/window/links/links.hpp"
#include "mesh/window/segments.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"

namespace weft::windows {
namespace {

std::string text_of(const IndexRanges& ranges) {
  std::string text = "[";
  for (const IndexRange& r : ranges)
    text += fmt::format("{}[{}, {})", text.size() > 1 ? ", " : "", r.lo, r.hi);
  return text + "]";
}

std::string text_of(const Edge& edge) {
  const std::string kind = kind_text(edge.kind);
  if (edge.kind == Edge::Kind::constant) return fmt::format("{}({})", kind, edge.value);
  if (edge.kind == Edge::Kind::pole) return fmt::format("{}({})", kind, edge.longitude);
  return kind;
}

// What a rank gave, one thing after the other: where two differ, the first of these that differs is told.
struct Given {
  std::string what;  // "edge before dimension 0"
  std::string value;
};

// Calls see(what, value) for each; `what` and `value` make a text, when it is needed.
template <class See>
void each_given(const Window::Plan& plan, const std::vector<Form>& forms, Device device, bool adjoint,
                const See& see) {
  see([] { return std::string("the shape of x"); }, [&] { return to_string(plan.global); });
  for (std::size_t i = 0; i < plan.wanted.size(); ++i) {
    const WindowDim& want = plan.wanted[i];
    see([&] { return fmt::format("dimension {} of those wanted", i); },
        [&] { return fmt::format("{}", want.dim); });
    const PartitionDim& held = plan.held[i];
    for (std::size_t p = 0; p < held.parts.size(); ++p) {
      see([&] { return fmt::format("what part {} holds of dimension {}", p, want.dim); },
          [&] { return text_of(held.parts[p]); });
      see([&] { return fmt::format("what part {} wants of dimension {}", p, want.dim); },
          [&] { return text_of(want.wanted[p]); });
    }
    see([&] { return fmt::format("the edge before dimension {}", want.dim); },
        [&] { return text_of(want.before); });
    see([&] { return fmt::format("the edge after dimension {}", want.dim); },
        [&] { return text_of(want.after); });
  }
  see([] { return std::string("the number of dimensions"); },
      [&] { return fmt::format("{}", plan.wanted.size()); });
  see([] { return std::string("the list of fields"); }, [&] { return fields_text(forms, adjoint); });
  for (std::size_t f = 0; f < forms.size(); ++f)
    for (int d = 0; d < forms[f].shape.rank(); ++d)
      if (std::none_of(plan.wanted.begin(), plan.wanted.end(),
                       [&](const WindowDim& w) { return w.dim == d; }))
        see([&] { return fmt::format("the extent of dimension {} of field {}", d, f); },
            [&] { return fmt::format("{}", forms[f].shape[d]); });
  see([] { return std::string("the kind of device"); },
      [&] { return std::string(device == Device{} ? "cpu" : "not cpu"); });
}

// A list of things and values, as many as fit; long values cut, with a hash so that they still differ.
constexpr std::size_t kListBytes = 16 << 10;
constexpr std::size_t kLongest = 200;
std::string cut(std::string text) {
  if (text.size() <= kLongest) return text;
  const std::uint64_t hash = hash_of(text);
  text.resize(kLongest);
  return text + fmt::format("… (hash {:x})", hash);
}

std::vector<std::string_view> lines_of(const char* text) {
  std::vector<std::string_view> lines;
  for (std::string_view rest(text, ::strnlen(text, kListBytes)); !rest.empty();) {
    const std::size_t end = std::min(rest.find('\n'), rest.size());
    lines.push_back(rest.substr(0, end));
    rest.remove_prefix(std::min(end + 1, rest.size()));
  }
  return lines;
}

// "<what>\t<value>": two ranks' first lines that differ.
std::string difference(std::string_view a, std::string_view b, int other) {
  const auto part = [](std::string_view line, bool value) {
    const std::size_t tab = std::min(line.find('\t'), line.size());
    return std::string(value ? line.substr(std::min(tab + 1, line.size())) : line.substr(0, tab));
  };
  if (part(a, false) == part(b, false))
    return fmt::format("{} is {} on rank {} and {} on rank 0", part(a, false), part(b, true), other,
                       part(a, true));
  return fmt::format("rank {} has {} where rank 0 has {}", other,
                     b.empty() ? "nothing" : part(b, false) + " " + part(b, true),
                     a.empty() ? "nothing" : part(a, false) + " " + part(a, true));
}

}  // namespace

void agree(const Window::Plan& plan, const std::vector<Form>& forms, Device device, bool adjoint) {
  ProcessGroup& group = *plan.group;
  const auto n = static_cast<std::size_t>(group.size());
  Fnv1a hash;
  hash.add(std::uint64_t{adjoint});
  for (const std::int64_t extent : plan.global) hash.add_at_once(static_cast<std::uint64_t>(extent));
  const auto add_ranges = [&](const IndexRanges& ranges) {
    hash.add_at_once(ranges.size());
    for (const IndexRange& r : ranges)
      hash.add_at_once(static_cast<std::uint64_t>(r.lo)), hash.add_at_once(static_cast<std::uint64_t>(r.hi));
  };
  hash.add(plan.wanted.size());
  for (std::size_t i = 0; i < plan.wanted.size(); ++i) {
    hash.add(static_cast<std::uint64_t>(plan.wanted[i].dim));
    for (const IndexRanges& part : plan.held[i].parts) add_ranges(part);
    for (const IndexRanges& part : plan.wanted[i].wanted) add_ranges(part);
    for (const Edge* e : {&plan.wanted[i].before, &plan.wanted[i].after}) {
      std::uint64_t bits = 0;
      std::memcpy(&bits, &e->value, sizeof(bits));
      hash.add(static_cast<std::uint64_t>(e->kind));
      hash.add(e->kind == Edge::Kind::constant ? bits : 0);
      hash.add(e->kind == Edge::Kind::pole ? static_cast<std::uint64_t>(e->longitude) : 0);
    }
  }
  hash.add(fields_text(forms, adjoint));
  for (const Form& form : forms)
    for (int d = 0; d < form.shape.rank(); ++d)
      if (std::none_of(plan.wanted.begin(), plan.wanted.end(),
                       [&](const WindowDim& w) { return w.dim == d; }))
        hash.add(static_cast<std::uint64_t>(form.shape[d]));
  hash.add(std::uint64_t{device == Device{}});

  // Where the group's transport is on a device, its collectives are there, too: then messages compare dtypes and counts alone.
  if (group.traits().device) return;
  std::vector<std::uint64_t> all(n);
  group.all_gather(view(&hash.value, 1), view(all)).wait();
  if (std::all_of(all.begin(), all.end(), [&](std::uint64_t h) { return h == all[0]; })) return;

  std::string list;
  each_given(plan, forms, device, adjoint, [&](const auto& what, const auto& value) {
    const std::string line = what() + "\t" + cut(value()) + "\n";
    if (list.size() + line.size() < kListBytes) list += line;
  });
  std::vector<std::uint8_t> mine(kListBytes), lists(n * kListBytes);
  std::memcpy(mine.data(), list.data(), list.size());
  group.all_gather(view(mine), view(lists)).wait();
  const auto of = [&](std::size_t r) {
    return lines_of(reinterpret_cast<const char*>(lists.data() + r * kListBytes));
  };
  const auto other = static_cast<std::size_t>(
      std::find_if(all.begin(), all.end(), [&](std::uint64_t h) { return h != all[0]; }) - all.begin());
  const auto first = of(0), second = of(other);
  std::string text = "something in long lists";
  for (std::size_t i = 0; i < std::max(first.size(), second.size()); ++i) {
    const std::string_view a = i < first.size() ? first[i] : "", b = i < second.size() ? second[i] : "";
    if (a == b) continue;
    text = difference(a, b, static_cast<int>(other));
    break;
  }
  Failure why{.code = ErrorCode::mismatch,
              .text = fmt::format("{}: {}; expected the same on all ranks [{}]", plan.name, text,
                                  name_axis_rank(plan.axes, static_cast<int>(other))),
              .ranks = {0, static_cast<int>(other)}};
  group.fail(why);
  throw Error(std::move(why));
}

void find_links(Window::Plan& plan) {
  plan.links = Links::of(*plan.group);
  if (plan.links) plan.listed.emplace(plan.mesh.context(), fmt::format("a {}", plan.name));
  plan.asked_for_links = true;
}

}  // namespace weft::windows
