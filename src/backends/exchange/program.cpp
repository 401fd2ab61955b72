#include "backends/exchange/program.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <map>

#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "reduce/strided_sums.hpp"

namespace weft {
namespace {

using Program = ExchangeProgram;

using Steps = std::array<std::int64_t, Dims::kMaxDims>;

Steps steps_of(const Strides& strides, std::int64_t element) {
  Steps steps{};
  for (int d = 0; d < strides.rank(); ++d) steps[static_cast<std::size_t>(d)] = strides[d] * element;
  return steps;
}

// One side of a copy of a box: the places of its elements, in bytes.
struct Walk {
  Steps steps;
  const std::int64_t* list = nullptr;
};

// The steps of `in` are multiplied by `in_times`, and those of `out` by `out_times`.
Loops loops_of(const Shape& counts, std::int64_t element, const Walk& in, std::int64_t in_times,
               const Walk& out, std::int64_t out_times) {
  Loops loops(static_cast<std::size_t>(element));
  if (counts.rank() > 0)
    loops.add_list(counts[0], in.list, in.steps[0] * in_times, out.list, out.steps[0] * out_times);
  for (int d = 1; d < counts.rank(); ++d)
    loops.add(counts[d], in.steps[static_cast<std::size_t>(d)] * in_times,
              out.steps[static_cast<std::size_t>(d)] * out_times);
  return loops;
}

// A box of a plan, in elements. If all indices have the same distance, they are replaced by a stride.
struct Placed {
  std::int64_t offset;
  Strides strides;
  const std::int64_t* list = nullptr;
  std::int64_t least = 0, most = 0;  // of the numbers in the list
};

// Returns the distance between each two successive indices if it is the same for all; otherwise 0.
std::int64_t one_step(const std::vector<std::int64_t>& indices) {
  if (indices.size() == 1) return 1;
  const std::int64_t step = indices[1] - indices[0];
  for (std::size_t i = 2; i < indices.size(); ++i)
    if (indices[i] - indices[i - 1] != step) return 0;
  return step;
}

// Returns the range of bytes of a box, from the beginning of its field.
Program::Span span_of(const Shape& counts, const Placed& b, std::int64_t element) {
  std::int64_t low = b.offset, high = b.offset;
  for (int d = 0; d < counts.rank(); ++d) {
    const bool listed = d == 0 && b.list != nullptr;
    const std::int64_t first = (listed ? b.least : 0) * b.strides[d];
    const std::int64_t last = (listed ? b.most : counts[d] - 1) * b.strides[d];
    low += std::min(first, last);
    high += std::max(first, last);
  }
  return {low * element, (high + 1) * element};
}

void widen(Program::Span& span, Program::Span by) {
  if (span.low == span.high)
    span = by;
  else
    span = {std::min(span.low, by.low), std::max(span.high, by.high)};
}

std::vector<const ExchangePart*> by_rank(const std::vector<ExchangePart>& parts) {
  std::vector<const ExchangePart*> sorted;
  for (const ExchangePart& p : parts) sorted.push_back(&p);
  std::sort(sorted.begin(), sorted.end(), [](const auto* a, const auto* b) { return a->peer < b->peer; });
  return sorted;
}

std::string fields_text(const ExchangePlan& plan) {
  std::string text = plan.kind == ExchangePlan::Kind::add ? "sums of " : "";
  text += fmt::format("{} field{}{}", plan.fields.size(), plan.fields.size() == 1 ? "" : "s",
                      plan.fields.empty() ? "" : ": ");
  for (std::size_t i = 0; i < plan.fields.size(); ++i)
    text += (i > 0 ? ", " : "") + std::string(name(plan.fields[i]));
  return text;
}

class Compiler {
 public:
  Compiler(const ExchangePlan& plan, Program& program) : plan_(plan), program_(program) {}

  void compile() {
    const std::size_t n = plan_.fields.size();
    program_.sent.resize(n);
    program_.written.resize(n);
    program_.sums.resize(n);
    const auto sends = by_rank(plan_.sends), receives = by_rank(plan_.receives);
    for (const ExchangePart* p : sends) see_spans(*p, program_.sent);
    for (const ExchangePart* p : receives) see_spans(*p, program_.written);
    if (program_.adds) place_sums();
    const ExchangePart *own_in = nullptr, *own_out = nullptr;
    for (const ExchangePart* p : sends) {
      if (p->peer == program_.rank)
        own_in = p;
      else
        program_.in_bytes += add_side(*p, true, program_.sends);
    }
    for (const ExchangePart* p : receives) {
      if (p->peer == program_.rank)
        own_out = p;
      else
        program_.out_bytes += add_side(*p, false, program_.receives);
      if (program_.adds) add_widened(*p);
    }
    if (own_in != nullptr && own_out != nullptr) add_own(*own_in, *own_out);
  }

 private:
  std::int64_t element_of(const ExchangeBox& b) const {
    return size_bytes(plan_.fields[static_cast<std::size_t>(b.field)]);
  }

  void see_spans(const ExchangePart& part, std::vector<Program::Span>& spans) {
    for (const ExchangeBox& b : part.boxes)
      if (b.counts.count() > 0)
        widen(spans[static_cast<std::size_t>(b.field)], span_of(b.counts, placed(b), element_of(b)));
  }

  Placed placed(const ExchangeBox& b) {
    Placed p{b.offset, b.strides};
    if (b.indices.empty()) return p;
    if (const std::int64_t step = one_step(b.indices); step != 0) {
      p.offset += b.indices[0] * b.strides[0];
      p.strides[0] *= step;
      return p;
    }
    const auto [least, most] = std::minmax_element(b.indices.begin(), b.indices.end());
    p.least = *least;
    p.most = *most;
    const std::int64_t*& list = lists_[&b];
    if (list == nullptr) {  // shared, because several fields often have the same list
      if (program_.lists.empty() || program_.lists.back() != b.indices) program_.lists.push_back(b.indices);
      list = program_.lists.back().data();
    }
    p.list = list;
    return p;
  }

  void place_sums() {
    for (std::size_t f = 0; f < plan_.fields.size(); ++f) {
      const DType dtype = plan_.fields[f], sums = sum_dtype(dtype);
      const Program::Span span = program_.written[f];
      if (sums == dtype || span.low == span.high) continue;
      const std::int64_t widen = size_bytes(sums) / size_bytes(dtype);
      program_.sums[f] = {program_.sums_bytes, span.low, widen};
      program_.sums_bytes += on_lines((span.high - span.low) * widen);
    }
  }

  std::int64_t add_side(const ExchangePart& part, bool sends, std::vector<Program::Side>& sides) {
    Program::Side side;
    side.peer = part.peer;
    for (const ExchangeBox& b : part.boxes) {
      const std::int64_t elements = b.counts.count(), element = element_of(b);
      if (elements == 0) continue;
      const auto field = static_cast<std::size_t>(b.field);
      const Placed place = placed(b);
      const Walk here{steps_of(place.strides, element), place.list},
          packed{steps_of(row_major(b.counts), element)};
      side.boxes.push_back({field, b.counts, element, elements, place.offset * element, here.steps,
                            place.list, side.bytes,
                            loops_of(b.counts, element, sends ? here : packed, 1, sends ? packed : here, 1)});
      if (!sends && program_.adds)
        side.sums.push_back(loops_of(b.counts, element, packed, 1, here, program_.sums[field].widen));
      side.bytes += elements * element;
      std::int64_t run = element;
      for (int d = b.counts.rank() - 1; d >= (place.list != nullptr ? 1 : 0) &&
                                        (b.counts[d] == 1 || here.steps[static_cast<std::size_t>(d)] == run);
           --d)
        run *= b.counts[d];
      side.runs += elements * element / run;
    }
    describe(side);
    const std::int64_t bytes = side.bytes;
    sides.push_back(std::move(side));
    return bytes;
  }

  // Describes the values that must be equal on both ranks: the fields, including those without elements, and
  // the boxes.
  void describe(Program::Side& side) const {
    side.about = fmt::format("{}, {} bytes", fields_text(plan_), side.bytes);
    Fnv1a hash;
    hash.add(side.about);
    hash.add(side.boxes.size());
    const char* between = " of boxes ";
    std::size_t shown = 0;
    std::size_t told = ~std::size_t{0};  // the field whose first box was described last
    for (const Program::Box& b : side.boxes) {
      hash.add(b.field);
      hash.add(static_cast<std::uint64_t>(b.element));
      for (const std::int64_t n : b.counts) hash.add_at_once(static_cast<std::uint64_t>(n));
      if (b.field == told) continue;
      told = b.field;
      side.about += between + to_string(b.counts);
      if (plan_.fields.size() > 1) side.about += fmt::format(" of field {}", b.field);
      between = ", ";
      ++shown;
    }
    if (shown < side.boxes.size()) side.about += fmt::format(" and {} more", side.boxes.size() - shown);
    side.form = hash.value;
  }

  void add_widened(const ExchangePart& part) {
    for (const ExchangeBox& b : part.boxes) {
      const auto field = static_cast<std::size_t>(b.field);
      const Program::Sums& sums = program_.sums[field];
      if (sums.at < 0 || b.counts.count() == 0) continue;
      const Placed place = placed(b);
      const std::int64_t element = element_of(b), offset = place.offset * element;
      const Walk here{steps_of(place.strides, element), place.list};
      program_.widened.push_back({field, loops_of(b.counts, element, here, 1, here, sums.widen),
                                  loops_of(b.counts, element, here, sums.widen, here, 1), offset,
                                  sums.place(offset)});
    }
  }

  void add_own(const ExchangePart& in, const ExchangePart& out) {
    for (std::size_t i = 0; i < in.boxes.size(); ++i) {
      const ExchangeBox &from = in.boxes[i], &to = out.boxes[i];
      if (from.counts.count() == 0) continue;
      const auto field = static_cast<std::size_t>(from.field);
      const std::int64_t element = element_of(from);
      const Placed in_place = placed(from), out_place = placed(to);
      const Program::Sums& sums = program_.sums[field];
      const std::int64_t times = program_.adds ? sums.widen : 1, at = out_place.offset * element;
      program_.own.push_back(
          {field,
           loops_of(from.counts, element, {steps_of(in_place.strides, element), in_place.list}, 1,
                    {steps_of(out_place.strides, element), out_place.list}, times),
           in_place.offset * element, program_.adds ? sums.place(at) : at});
    }
  }

  const ExchangePlan& plan_;
  Program& program_;
  // for each box with indices, its list in the program
  std::map<const ExchangeBox*, const std::int64_t*> lists_;
};

const std::byte* in_of(const ExchangeField& f) { return static_cast<const std::byte*>(f.in); }
std::byte* out_of(const ExchangeField& f) { return static_cast<std::byte*>(f.out); }

}  // namespace

ExchangeProgram::ExchangeProgram(const ExchangePlan& plan, int rank_in)
    : adds(plan.kind == ExchangePlan::Kind::add), rank(rank_in), fields(plan.fields) {
  Compiler(plan, *this).compile();
}

void ExchangeProgram::copy_own(const ExchangeField* memory) const {
  for (const Own& o : own) {
    const std::byte* const from = in_of(memory[o.field]) + o.from;
    std::byte* const to = out_of(memory[o.field]) + o.to;
    if (from != to || !o.loops.same_steps()) o.loops.copy(from, to);
  }
}

void ExchangeProgram::add_packed(std::size_t receive, const std::byte* packed, const ExchangeField* memory,
                                 std::byte* sums_memory) const {
  const Side& side = receives[receive];
  for (std::size_t i = 0; i < side.boxes.size(); ++i) {
    const Box& b = side.boxes[i];
    add_to(side.sums[i], fields[b.field], packed + b.at,
           sums_of(b.field, memory, sums_memory) + sums[b.field].place(b.offset));
  }
}

void ExchangeProgram::add_all(const ExchangeField* memory, std::byte* sums_memory,
                              const std::function<void(std::size_t)>& add) const {
  for (const Widened& w : widened)
    widen_to(w.widen, fields[w.field], out_of(memory[w.field]) + w.in_field, sums_memory + w.in_sums);
  const auto add_own = [&] {
    for (const Own& o : own) {
      add_to(o.loops, fields[o.field], in_of(memory[o.field]) + o.from,
             sums_of(o.field, memory, sums_memory) + o.to);
      if (WEFT_MUTANT("adjoint_first_box")) break;
    }
  };
  bool added = false;
  for (std::size_t i = 0; i < receives.size(); ++i) {
    if (!added && receives[i].peer > rank) {
      add_own();
      added = true;
    }
    add(i);
  }
  if (!added) add_own();
  for (const Widened& w : widened)
    round_to(w.round, fields[w.field], sums_memory + w.in_sums, out_of(memory[w.field]) + w.in_field);
}

}  // namespace weft
