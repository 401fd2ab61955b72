// Checks of an exchange's arguments, and the texts of their errors.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <optional>
#include <tuple>

#include "backends/exchange/program.hpp"
#include "host/strided/loops.hpp"
#include "host/strided/overlap.hpp"
#include "reduce/strided_sums.hpp"
#include "weft/base/error.hpp"
#include "weft/base/view.hpp"

namespace weft {
namespace {

// the largest distance from the beginning of a field
constexpr std::int64_t kMostBytes = std::int64_t{1} << 56;

// Calls see(offset, bytes) for each run of a box with indices, in order; offsets count from the beginning of
// the field.
template <class See>
void each_run(const ExchangeBox& b, std::int64_t element, const See& see) {
  const Strides packed = row_major(b.counts);
  Loops loops(static_cast<std::size_t>(element));
  loops.add_list(b.counts[0], b.indices.data(), b.strides[0] * element, nullptr, packed[0] * element);
  for (int d = 1; d < b.counts.rank(); ++d)
    loops.add(b.counts[d], b.strides[d] * element, packed[d] * element);
  loops.each_run(
      [&](std::int64_t at, std::int64_t, std::int64_t bytes) { see(b.offset * element + at, bytes); });
}

struct Checker {
  const ExchangePlan& plan;
  int rank, size;
  const std::string& tail;

  template <class... Args>
  [[noreturn]] void wrong(fmt::format_string<Args...> text, Args&&... args) const {
    throw Error(Failure{
        .code = ErrorCode::bad_argument,
        .text = fmt::format("{}: {}{}", plan.name, fmt::format(text, std::forward<Args>(args)...), tail),
        .op = Op::exchange,
        .ranks = {}});
  }

  void fields() const {
    for (std::size_t f = 0; f < plan.fields.size(); ++f) {
      const DType dtype = plan.fields[f];
      if (static_cast<int>(dtype) >= kDTypeCount)
        wrong("field {} has dtype {}; expected 0 to {}", f, static_cast<int>(dtype), kDTypeCount - 1);
      if (plan.kind == ExchangePlan::Kind::add && !can_add(dtype))
        wrong("field {} is {}; expected a dtype that is added: an integer, or f64, f32, bf16, f16", f,
              name(dtype));
    }
  }

  void box(const ExchangeBox& b, std::size_t index, const char* direction, int peer, bool written) const {
    const auto bad = [&](const std::string& text) {
      wrong("box {} of the data {} rank {}: {}", index, direction, peer, text);
    };
    if (b.field < 0 || b.field >= static_cast<int>(plan.fields.size()))
      bad(fmt::format("field is {}; expected 0 to {}", b.field, static_cast<int>(plan.fields.size()) - 1));
    if (b.strides.rank() != b.counts.rank())
      bad(fmt::format("it has {} strides for {} dimensions", b.strides.rank(), b.counts.rank()));
    const std::int64_t element = size_bytes(plan.fields[static_cast<std::size_t>(b.field)]);
    std::int64_t low = b.offset, high = b.offset, count = 1;
    bool fits = true, empty = false;
    for (int d = 0; d < b.counts.rank(); ++d) {
      if (b.counts[d] < 0) bad(fmt::format("counts is {}; expected no negative count", to_string(b.counts)));
      empty |= b.counts[d] == 0;
    }
    if (!b.indices.empty()) indices(b, bad);
    if (empty) return;
    const auto reach = [&](std::int64_t i, std::int64_t stride) {
      std::int64_t far = 0;
      fits &= !__builtin_mul_overflow(i, stride, &far);
      return far;
    };
    for (int d = 0; d < b.counts.rank(); ++d) {
      std::int64_t first = 0, last = b.counts[d] - 1;
      if (d == 0 && !b.indices.empty()) {
        const auto [least, most] = std::minmax_element(b.indices.begin(), b.indices.end());
        first = *least;
        last = *most;
      }
      first = reach(first, b.strides[d]);
      last = reach(last, b.strides[d]);
      fits &= !__builtin_add_overflow(low, std::min(first, last), &low);
      fits &= !__builtin_add_overflow(high, std::max(first, last), &high);
      fits &= !__builtin_mul_overflow(count, b.counts[d], &count);
    }
    if (!fits || count > kMostBytes / element || low < -kMostBytes / element || high >= kMostBytes / element)
      bad(fmt::format("counts {} with strides {} from offset {}{} reach farther than 2^56 bytes",
                      to_string(b.counts), to_string(b.strides), b.offset,
                      b.indices.empty() ? "" : " and its indices"));
    if (!b.indices.empty()) {
      if (written && plan.kind == ExchangePlan::Kind::copy)
        if (const std::optional<std::int64_t> twice = element_twice(b))
          bad(fmt::format("its indices name element {} of the field twice; expected each once", *twice));
      return;
    }
    if (written && overlaps_itself(ConstTensorView{
                       nullptr, plan.fields[static_cast<std::size_t>(b.field)], {}, b.counts, b.strides}))
      bad(fmt::format("strides {} of {}: elements share memory; expected each in a place of its own",
                      to_string(b.strides), to_string(b.counts)));
  }

  template <class Bad>
  static void indices(const ExchangeBox& b, const Bad& bad) {
    if (b.counts.rank() == 0 || b.counts[0] != static_cast<std::int64_t>(b.indices.size()))
      bad(fmt::format("it has {} indices for counts {}; expected as many as the first of these",
                      b.indices.size(), to_string(b.counts)));
    for (std::size_t i = 0; i < b.indices.size(); ++i)
      if (b.indices[i] < 0) bad(fmt::format("indices[{}] is {}; expected 0 or more", i, b.indices[i]));
  }

  // Returns an element of the field that a box with indices has twice, if there is one.
  static std::optional<std::int64_t> element_twice(const ExchangeBox& b) {
    if (rows_are_apart(b)) {
      std::vector<std::int64_t> rows = b.indices;
      std::sort(rows.begin(), rows.end());
      const auto twice = std::adjacent_find(rows.begin(), rows.end());
      return twice == rows.end() ? std::nullopt : std::optional(b.offset + *twice * b.strides[0]);
    }
    std::vector<std::int64_t> all;
    all.reserve(static_cast<std::size_t>(b.counts.count()));
    each_run(b, 1, [&](std::int64_t at, std::int64_t count) {
      for (std::int64_t i = 0; i < count; ++i) all.push_back(at + i);
    });
    std::sort(all.begin(), all.end());
    const auto twice = std::adjacent_find(all.begin(), all.end());
    return twice == all.end() ? std::nullopt : std::optional(*twice);
  }

  // Whether the elements of one index are contiguous, and no row of them reaches into that of another index.
  static bool rows_are_apart(const ExchangeBox& b) {
    std::int64_t row = 1;
    for (int d = b.counts.rank() - 1; d > 0; --d) {
      if (b.counts[d] > 1 && b.strides[d] != row) return false;
      row *= b.counts[d];
    }
    return b.strides[0] >= row;
  }

  void parts(const std::vector<ExchangePart>& list, const char* which, const char* direction,
             bool written) const {
    std::vector<int> seen;
    for (std::size_t i = 0; i < list.size(); ++i) {
      const ExchangePart& p = list[i];
      if (p.peer < 0 || p.peer >= size)
        wrong("{}[{}].peer is {}; expected 0 to {} (group size {})", which, i, p.peer, size - 1, size);
      if (std::find(seen.begin(), seen.end(), p.peer) != seen.end())
        wrong("{} names rank {} twice; expected one part for each rank", which, p.peer);
      seen.push_back(p.peer);
      for (std::size_t b = 0; b < p.boxes.size(); ++b) box(p.boxes[b], b, direction, p.peer, written);
    }
  }

  void own() const {
    const auto part = [&](const std::vector<ExchangePart>& list) {
      const auto found =
          std::find_if(list.begin(), list.end(), [&](const auto& p) { return p.peer == rank; });
      return found == list.end() ? ExchangePart{rank} : *found;
    };
    const ExchangePart in = part(plan.sends), out = part(plan.receives);
    if (in.boxes.size() != out.boxes.size())
      wrong("this rank sends {} boxes to itself and receives {}; expected as many", in.boxes.size(),
            out.boxes.size());
    for (std::size_t i = 0; i < in.boxes.size(); ++i)
      if (in.boxes[i].field != out.boxes[i].field || !(in.boxes[i].counts == out.boxes[i].counts))
        wrong(
            "box {} of the data that this rank sends to itself is {} of field {}, and {} of field {} where "
            "it is "
            "received; expected the same",
            i, to_string(in.boxes[i].counts), in.boxes[i].field, to_string(out.boxes[i].counts),
            out.boxes[i].field);
  }
};

struct Run {
  const std::byte *low, *high;
};

// A box of a field in memory.
struct BoxInMemory {
  ConstTensorView view;
  const std::byte *low, *high;
  std::size_t field;
  bool written;
  // The number of the box among the boxes that a rank sends to itself; -1 for any other box.
  int pair;
  const ExchangeBox* box;
  std::vector<Run> runs;  // the runs of a box with indices, sorted; adjacent runs are joined
  bool listed() const { return !runs.empty(); }
};

BoxInMemory placed(const ExchangePlan& plan, const ExchangeBox& b, const ExchangeField* fields, bool written,
                   int pair) {
  const auto field = static_cast<std::size_t>(b.field);
  const DType dtype = plan.fields[field];
  const auto* const data = static_cast<const std::byte*>(written ? fields[field].out : fields[field].in) +
                           b.offset * size_bytes(dtype);
  BoxInMemory p{{data, dtype, {}, b.counts, b.strides}, nullptr, nullptr, field, written, pair, &b, {}};
  if (b.indices.empty()) {
    std::tie(p.low, p.high) = span_of(p.view);
    return p;
  }
  const auto* const begin = data - b.offset * size_bytes(dtype);
  each_run(b, size_bytes(dtype), [&](std::int64_t at, std::int64_t bytes) {
    p.runs.push_back({begin + at, begin + at + bytes});
  });
  std::sort(p.runs.begin(), p.runs.end(), [](const Run& x, const Run& y) { return x.low < y.low; });
  std::size_t last = 0;
  for (const Run& r : p.runs) {
    if (r.low <= p.runs[last].high)
      p.runs[last].high = std::max(p.runs[last].high, r.high);
    else
      p.runs[++last] = r;
  }
  p.runs.resize(last + 1);
  p.low = p.runs.front().low;
  p.high = p.runs.back().high;
  return p;
}

bool meet(const Run& a, const Run& b) { return a.low < b.high && b.low < a.high; }

// Returns whether a run of `a` and an element of `b`, a box without indices, share a byte.
bool runs_meet_box(const BoxInMemory& a, const BoxInMemory& b) {
  const Run all{b.low, b.high};
  const bool one_piece = b.high - b.low == b.view.shape.count() * size_bytes(b.view.dtype);
  return std::any_of(a.runs.begin(), a.runs.end(), [&](const Run& r) {
    if (!meet(r, all)) return false;
    return one_piece ||
           share_memory(ConstTensorView{r.low, DType::u8, {}, Shape{r.high - r.low}, Strides{1}}, b.view);
  });
}

// Returns whether two boxes have a byte in common.
bool share_memory(const BoxInMemory& a, const BoxInMemory& b) {
  if (!a.listed() && !b.listed()) return share_memory(a.view, b.view);
  if (!a.listed()) return runs_meet_box(b, a);
  if (!b.listed()) return runs_meet_box(a, b);
  for (std::size_t i = 0, j = 0; i < a.runs.size() && j < b.runs.size();) {
    if (meet(a.runs[i], b.runs[j])) return true;
    if (a.runs[i].low < b.runs[j].low)
      ++i;
    else
      ++j;
  }
  return false;
}

}  // namespace

void check_exchange(const ExchangePlan& plan, int rank, int size, const std::string& tail) {
  const Checker c{plan, rank, size, tail};
  if (plan.kind != ExchangePlan::Kind::copy && plan.kind != ExchangePlan::Kind::add)
    c.wrong("kind is {}; expected 0 (copy) or 1 (add)", static_cast<int>(plan.kind));
  c.fields();
  c.parts(plan.sends, "sends", "sent to", false);
  c.parts(plan.receives, "receives", "received from", true);
  c.own();
}

void check_exchange_memory(const ExchangePlan& plan, const ExchangeProgram& program,
                           const ExchangeField* fields, const std::string& tail) {
  const Checker c{plan, program.rank, 0, tail};
  for (std::size_t f = 0; f < plan.fields.size(); ++f) {
    const auto span = [](ExchangeProgram::Span s) { return s.high > s.low; };
    if (fields[f].in == nullptr && span(program.sent[f]))
      c.wrong("in of field {} has no memory; boxes of it are sent", f);
    if (fields[f].out == nullptr && span(program.written[f]))
      c.wrong("out of field {} has no memory; boxes of it are received", f);
  }
  std::vector<BoxInMemory> boxes;
  const auto add = [&](const std::vector<ExchangePart>& parts, bool written) {
    for (const ExchangePart& p : parts)
      for (std::size_t i = 0; i < p.boxes.size(); ++i)
        if (p.boxes[i].counts.count() > 0)
          boxes.push_back(
              placed(plan, p.boxes[i], fields, written, p.peer == program.rank ? static_cast<int>(i) : -1));
  };
  add(plan.sends, false);
  add(plan.receives, true);
  std::sort(boxes.begin(), boxes.end(),
            [](const BoxInMemory& a, const BoxInMemory& b) { return a.low < b.low; });
  // The boxes so far, those that are read and those that are written, that reach beyond the begin of the next
  // box. Many boxes may read the same elements, so boxes that are read are not compared with each other.
  std::array<std::vector<const BoxInMemory*>, 2> open;
  const auto compare = [&](const BoxInMemory& b, std::vector<const BoxInMemory*>& others) {
    std::erase_if(others, [&](const BoxInMemory* o) { return o->high <= b.low; });
    for (const BoxInMemory* o : others) {
      // Boxes that are added to a field may overlap: they are added one after the other.
      if (o->written && b.written && program.adds && o->field == b.field) continue;
      // A box that a rank sends to itself may have the same place on both sides: its elements stay where they
      // are.
      const bool same = o->pair >= 0 && o->pair == b.pair && o->view.data == b.view.data &&
                        o->view.strides == b.view.strides && o->box->indices == b.box->indices &&
                        !program.adds;
      if (same || !share_memory(*o, b)) continue;
      const BoxInMemory &w = b.written ? b : *o, &r = b.written ? *o : b;
      c.wrong(
          "a box of out of field {} that is received and a box of {} of field {} that is {} overlap; "
          "expected disjoint memory",
          w.field, r.written ? "out" : "in", r.field, r.written ? "received" : "sent");
    }
  };
  for (const BoxInMemory& b : boxes) {
    compare(b, open[1]);
    if (b.written) compare(b, open[0]);
    open[b.written ? 1 : 0].push_back(&b);
  }
}

std::vector<ExchangeBox> boxes_of(int field, std::span<const std::int64_t> indices) {
  return {{field,
           0,
           Shape{static_cast<std::int64_t>(indices.size())},
           Strides{1},
           {indices.begin(), indices.end()}}};
}

}  // namespace weft
