#include "mesh/window/agree.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <string_view>

#include "base/hash.hpp"
#include "group/group_state.hpp"
#include "mesh/axis_ranks.hpp"
#include "mesh/same_list.hpp"
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

std::uint64_t digest_of_ranges(const IndexRanges& ranges) {
  Fnv1a hash;
  for (const IndexRange& r : ranges)
    hash.add_at_once(static_cast<std::uint64_t>(r.lo)), hash.add_at_once(static_cast<std::uint64_t>(r.hi));
  return hash.value;
}

std::uint64_t digest_of_edge(const Edge& edge) {
  std::uint64_t bits = 0;
  std::memcpy(&bits, &edge.value, sizeof(bits));
  return digest_of(static_cast<std::uint64_t>(edge.kind), edge.kind == Edge::Kind::constant ? bits : 0,
                   edge.kind == Edge::Kind::pole ? edge.longitude : 0);
}

// Calls see(digest, what, value) for each thing that a rank gave. If two ranks differ, the error names the
// first thing that differs. A digest has a letter for the kind of thing, since lists may have other kinds at
// a place. `what` ("the edge before dimension 0") and `value` make a text, when it is needed.
template <class See>
void each_given(const Window::Plan& plan, const std::vector<Form>& forms, Device device, Way way,
                const See& see) {
  Fnv1a shape;
  for (const std::int64_t extent : plan.global) shape.add_at_once(static_cast<std::uint64_t>(extent));
  see(
      digest_of('s', shape.value), [] { return std::string("the shape of x"); },
      [&] { return to_string(plan.global); });
  for (std::size_t i = 0; i < plan.wanted.size(); ++i) {
    const WindowDim& want = plan.wanted[i];
    see(
        digest_of('d', want.dim), [&] { return fmt::format("dimension {} of those wanted", i); },
        [&] { return fmt::format("{}", want.dim); });
    const PartitionDim& held = plan.held[i];
    for (std::size_t p = 0; p < held.parts.size(); ++p) {
      see(
          digest_of('h', digest_of_ranges(held.parts[p])),
          [&] { return fmt::format("what part {} holds of dimension {}", p, want.dim); },
          [&] { return text_of(held.parts[p]); });
      see(
          digest_of('w', digest_of_ranges(want.wanted[p])),
          [&] { return fmt::format("what part {} wants of dimension {}", p, want.dim); },
          [&] { return text_of(want.wanted[p]); });
    }
    see(
        digest_of('b', digest_of_edge(want.before)),
        [&] { return fmt::format("the edge before dimension {}", want.dim); },
        [&] { return text_of(want.before); });
    see(
        digest_of('a', digest_of_edge(want.after)),
        [&] { return fmt::format("the edge after dimension {}", want.dim); },
        [&] { return text_of(want.after); });
  }
  see(
      digest_of('n', plan.wanted.size()), [] { return std::string("the number of dimensions"); },
      [&] { return fmt::format("{}", plan.wanted.size()); });
  const std::string fields = fields_text(forms, way);
  see(
      digest_of('f', hash_of(fields)), [] { return std::string("the list of fields"); },
      [&] { return fields; });
  for (std::size_t f = 0; f < forms.size(); ++f)
    for (int d = 0; d < forms[f].shape.rank(); ++d)
      if (std::none_of(plan.wanted.begin(), plan.wanted.end(),
                       [&](const WindowDim& w) { return w.dim == d; }))
        see(
            digest_of('e', forms[f].shape[d]),
            [&] { return fmt::format("the extent of dimension {} of field {}", d, f); },
            [&] { return fmt::format("{}", forms[f].shape[d]); });
  see(
      digest_of('k', device == Device{}), [] { return std::string("the kind of device"); },
      [&] { return std::string(device == Device{} ? "cpu" : "not cpu"); });
}

// Long values are cut, with a hash so that they still differ.
constexpr std::size_t kLongest = 200;
std::string cut(std::string text) {
  if (text.size() <= kLongest) return text;
  const std::uint64_t hash = hash_of(text);
  text.resize(kLongest);
  return text + fmt::format("… (hash {:x})", hash);
}

// "<what>\t<value>" of rank 0 and of another rank. Without a tab there is no value.
std::string difference(std::string_view a, std::string_view b, int other) {
  const auto part = [](std::string_view line, bool value) {
    const std::size_t tab = std::min(line.find('\t'), line.size());
    return std::string(value ? line.substr(std::min(tab + 1, line.size())) : line.substr(0, tab));
  };
  const auto given = [&](std::string_view line) {
    return line.find('\t') == line.npos ? "nothing" : part(line, false) + " " + part(line, true);
  };
  if (part(a, false) == part(b, false))
    return fmt::format("{} is {} on rank {} and {} on rank 0", part(a, false), part(b, true), other,
                       part(a, true));
  return fmt::format("rank {} has {} where rank 0 has {}", other, given(b), given(a));
}

}  // namespace

void agree(const Window::Plan& plan, const std::vector<Form>& forms, Device device, Way way) {
  // If the group's transport is on a device, its collectives are there, too. Then messages compare dtypes and
  // counts alone.
  if (plan.group->traits().device) return;
  ListDigest digest;
  each_given(plan, forms, device, way,
             [&](std::uint64_t given, const auto&, const auto&) { digest.add(given); });
  const auto list = [&] {
    std::vector<std::uint64_t> digests;
    std::vector<std::string> texts;
    each_given(plan, forms, device, way, [&](std::uint64_t given, const auto& what, const auto& value) {
      digests.push_back(given);
      texts.push_back(what() + "\t" + cut(value()));
    });
    ListEntries entries{"thing", digests.size(), [digests](std::size_t i) { return digests[i]; },
                        [texts](std::size_t i) { return texts[i]; }};
    entries.difference = [&](std::string_view first, std::string_view second, int other) {
      return fmt::format("{}; expected the same on all ranks [{}]", difference(first, second, other),
                         name_axis_rank(plan.axes, other));
    };
    return entries;
  };
  try {
    gather_with_list(plan.name, plan.axes, digest, {}, list);
  } catch (const Error& e) {
    if (e.code() == ErrorCode::mismatch && !plan.group->failed())
      detail::Access::state(*plan.group)
          .fail({.code = e.code(), .text = e.what(), .ranks = {e.ranks().begin(), e.ranks().end()}});
    throw;
  }
}

}  // namespace weft::windows
