// Checks of an exchange's arguments, and the texts of their errors.
#include <fmt/format.h>

#include <algorithm>
#include <tuple>

#include "backends/exchange/program.hpp"
#include "host/strided/overlap.hpp"
#include "reduce/strided_sums.hpp"
#include "weft/base/error.hpp"
#include "weft/base/view.hpp"

namespace weft {
namespace {

constexpr std::int64_t kMostBytes = std::int64_t{1} << 56;  // from where a field begins

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
      wrong("box {} of what is {} rank {}: {}", index, direction, peer, text);
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
    if (empty) return;
    for (int d = 0; d < b.counts.rank(); ++d) {
      std::int64_t far = 0;
      fits &= !__builtin_mul_overflow(b.counts[d] - 1, b.strides[d], &far);
      fits &= !__builtin_add_overflow(far < 0 ? low : high, far, far < 0 ? &low : &high);
      fits &= !__builtin_mul_overflow(count, b.counts[d], &count);
    }
    if (!fits || count > kMostBytes / element || low < -kMostBytes / element || high >= kMostBytes / element)
      bad(fmt::format("counts {} with strides {} from offset {} reach farther than 2^56 bytes",
                      to_string(b.counts), to_string(b.strides), b.offset));
    if (written && overlaps_itself(ConstTensorView{
                       nullptr, plan.fields[static_cast<std::size_t>(b.field)], {}, b.counts, b.strides}))
      bad(fmt::format("strides {} of {}: elements share memory; expected each in a place of its own",
                      to_string(b.strides), to_string(b.counts)));
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
            "box {} of what this rank sends to itself is {} of field {}, and {} of field {} where it is "
            "received; expected the same",
            i, to_string(in.boxes[i].counts), in.boxes[i].field, to_string(out.boxes[i].counts),
            out.boxes[i].field);
  }
};

// A box of a field in memory.
struct Placed {
  ConstTensorView view;
  const std::byte *low, *high;
  std::size_t field;
  bool written;
  // The number of the box among those that a rank sends to itself; -1: it is not one of them.
  int pair;
};

Placed placed(const ExchangePlan& plan, const ExchangeBox& b, const ExchangeField* fields, bool written,
              int pair) {
  const auto field = static_cast<std::size_t>(b.field);
  const DType dtype = plan.fields[field];
  const auto* const data = static_cast<const std::byte*>(written ? fields[field].out : fields[field].in) +
                           b.offset * size_bytes(dtype);
  Placed p{{data, dtype, {}, b.counts, b.strides}, nullptr, nullptr, field, written, pair};
  std::tie(p.low, p.high) = span_of(p.view);
  return p;
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
  std::vector<Placed> boxes;
  const auto add = [&](const std::vector<ExchangePart>& parts, bool written) {
    for (const ExchangePart& p : parts)
      for (std::size_t i = 0; i < p.boxes.size(); ++i)
        if (p.boxes[i].counts.count() > 0)
          boxes.push_back(
              placed(plan, p.boxes[i], fields, written, p.peer == program.rank ? static_cast<int>(i) : -1));
  };
  add(plan.sends, false);
  add(plan.receives, true);
  std::sort(boxes.begin(), boxes.end(), [](const Placed& a, const Placed& b) { return a.low < b.low; });
  std::vector<const Placed*> open;  // boxes that reach beyond where the next one begins
  for (const Placed& b : boxes) {
    std::erase_if(open, [&](const Placed* o) { return o->high <= b.low; });
    for (const Placed* o : open) {
      if (!o->written && !b.written) continue;
      // Added one after the other.
      if (o->written && b.written && program.adds && o->field == b.field) continue;
      // The elements stay where they are.
      const bool same = o->pair >= 0 && o->pair == b.pair && o->view.data == b.view.data &&
                        o->view.strides == b.view.strides && !program.adds;
      if (same || !share_memory(o->view, b.view)) continue;
      const Placed &w = b.written ? b : *o, &r = b.written ? *o : b;
      c.wrong(
          "a box of out of field {} that is received and a box of {} of field {} that is {} overlap; "
          "expected apart",
          w.field, r.written ? "out" : "in", r.field, r.written ? "received" : "sent");
    }
    open.push_back(&b);
  }
}

std::vector<ExchangeBox> boxes_of(int field, std::span<const std::int64_t> indices) {
  std::vector<ExchangeBox> boxes;
  for (std::size_t i = 0; i < indices.size();) {
    std::size_t end = i + 1;
    const std::int64_t step = end < indices.size() ? indices[end] - indices[i] : 1;
    while (end < indices.size() && indices[end] - indices[end - 1] == step) ++end;
    // Two elements with a step that leads nowhere begin no run: the second may begin a longer one.
    if (end == i + 2 && step != 1 && end < indices.size()) end = i + 1;
    const auto count = static_cast<std::int64_t>(end - i);
    boxes.push_back({field, indices[i], Shape{count}, Strides{count == 1 ? 1 : step}});
    i = end;
  }
  return boxes;
}

}  // namespace weft
