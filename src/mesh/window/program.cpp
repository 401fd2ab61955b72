#include "mesh/window/program.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>

#include "host/strided/loops.hpp"
#include "host/strided/overlap.hpp"
#include "mesh/window/in_flight.hpp"
#include "mesh/window/joined.hpp"
#include "reduce/strided_sums.hpp"
#include "weft/base/error.hpp"

namespace weft {

Window::Plan::Plan() = default;
Window::Plan::~Plan() = default;

}  // namespace weft

namespace weft::windows {

void refuse(const Window::Plan& plan, const std::string& text) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", plan.name, text));
}

std::string called(const char* which, std::size_t index, std::size_t count) {
  return count == 1 ? std::string(which) : fmt::format("{} of field {}", which, index);
}

namespace {

using Program = Window::Plan::Program;
using Box = std::vector<Segment>;  // one of each of the plan's dims

// One side of a copy of a box: its beginning, and its steps in bytes in each dimension of the tensor.
struct Side {
  std::int64_t offset = 0;
  std::array<std::int64_t, Dims::kMaxDims> steps{};
};

// The places of a plan's boxes in tensors of some shape: the plan's number of each dimension, or -1 where
// no window is wanted.
class Geometry {
 public:
  explicit Geometry(const Window::Plan& plan) : rank_(plan.global.rank()) {
    of_.fill(-1);
    for (std::size_t d = 0; d < plan.dims.size(); ++d)
      of_[static_cast<std::size_t>(plan.dims[d].dim)] = static_cast<int>(d);
  }

  Shape counts(const Box& box, const Shape& shape) const {
    Shape counts = shape;
    for (int d = 0; d < rank_; ++d)
      if (of(d) >= 0) counts[d] = segment(box, d).count;
    return counts;
  }
  Side of_part(const Box& box, const Strides& strides, std::int64_t element) const {
    Side side;
    for (int d = 0; d < rank_; ++d) {
      const std::int64_t step = strides[d] * element;
      side.steps[static_cast<std::size_t>(d)] = of(d) < 0 ? step : segment(box, d).step * step;
      if (of(d) >= 0) side.offset += segment(box, d).in * step;
    }
    return side;
  }
  Side of_window(const Box& box, const Strides& strides, std::int64_t element) const {
    Side side;
    for (int d = 0; d < rank_; ++d) {
      const std::int64_t step = strides[d] * element;
      side.steps[static_cast<std::size_t>(d)] = step;
      if (of(d) >= 0) side.offset += segment(box, d).out * step;
    }
    return side;
  }
  Dims begin_in_window(const Box& box) const {
    Dims begin;
    for (int d = 0; d < rank_; ++d) begin.push_back(of(d) < 0 ? 0 : segment(box, d).out);
    return begin;
  }
  static Loops loops(const Shape& counts, const Side& in, const Side& out, std::int64_t element) {
    Loops loops(static_cast<std::size_t>(element));
    for (int d = 0; d < counts.rank(); ++d)
      loops.add(counts[d], in.steps[static_cast<std::size_t>(d)], out.steps[static_cast<std::size_t>(d)]);
    return loops;
  }

 private:
  int of(int dim) const { return of_[static_cast<std::size_t>(dim)]; }
  const Segment& segment(const Box& box, int dim) const { return box[static_cast<std::size_t>(of(dim))]; }
  int rank_;
  std::array<int, Dims::kMaxDims> of_{};
};

bool extents_fault(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 0; });
}

// The elements of a window that are not elements of a tensor, but a number: the first dimension that is
// filled gives it.
template <class See>
void each_filled_box(const Window::Plan& plan, const See& see) {
  for (std::size_t filled = 0; filled < plan.dims.size(); ++filled)
    for (const windows::Run& fill : plan.dims[filled].runs) {
      if (!fill.filled) continue;
      Box box(plan.dims.size());
      const auto descend = [&](const auto& again, std::size_t d) -> void {
        if (d == plan.dims.size()) return see(static_cast<const Box&>(box), fill.value);
        if (d == filled) {
          box[d] = {0, fill.out, fill.count};
          return again(again, d + 1);
        }
        if (d > filled) {
          box[d] = {0, 0, plan.dims[d].window_size};
          return again(again, d + 1);
        }
        for (const windows::Run& run : plan.dims[d].runs)
          if (!run.filled) {
            box[d] = {0, run.out, run.count};
            again(again, d + 1);
          }
      };
      descend(descend, 0);
    }
}

class Compiler {
 public:
  Compiler(const Window::Plan& plan, std::vector<Form> forms, Way way)
      : plan_(plan), adds_(way != Way::fetch), geometry_(plan) {
    static std::atomic<std::uint64_t> made{0};
    program_.way = way;
    program_.id = ++made;
    program_.forms = std::move(forms);
  }

  Program compile() {
    program_.plan.name = plan_.name;
    program_.plan.kind = adds_ ? ExchangePlan::Kind::add : ExchangePlan::Kind::copy;
    for (const Form& form : program_.forms) program_.plan.fields.push_back(form.dtype);
    for (const auto& overlap : adds_ ? plan_.from : plan_.to) add_part(overlap, true, program_.plan.sends);
    for (const auto& overlap : adds_ ? plan_.to : plan_.from)
      add_part(overlap, false, program_.plan.receives);
    add_part(plan_.self, true, program_.plan.sends);
    add_part(plan_.self, false, program_.plan.receives);
    if (plan_.group == nullptr && adds_) {
      program_.sums.emplace(program_.plan, plan_.me);
      program_.room.resize(static_cast<std::size_t>(program_.sums->sums_bytes));
    }
    for (std::size_t f = 0; f < program_.forms.size(); ++f) {
      add_own(f);
      add_numbers(f);
    }
    return std::move(program_);
  }

 private:
  // The part side of a box sends if windows are fetched, the window side otherwise.
  Side side_of(const Box& box, const Form& form, bool sends) const {
    return adds_ == sends ? geometry_.of_window(box, form.window, form.element)
                          : geometry_.of_part(box, form.part, form.element);
  }
  // Whether it is this rank's part at its place in its window. The elements that would be added there are
  // there already.
  bool is_own_place(const Box& box) const {
    for (std::size_t d = 0; d < box.size(); ++d)
      if (box[d].in != 0 || box[d].step != 1 || box[d].turned || box[d].count != plan_.dims[d].part_size ||
          box[d].out != plan_.own_begin[plan_.dims[d].dim])
        return false;
    return true;
  }

  // The boxes that are exchanged with one rank, or with this rank itself: the boxes of all fields, in order.
  void add_part(const Window::Plan::Overlap& overlap, bool sends, std::vector<ExchangePart>& parts) const {
    ExchangePart part{overlap.rank};
    for (std::size_t f = 0; f < program_.forms.size(); ++f) {
      const Form& form = program_.forms[f];
      each_box(overlap, [&](const Box& box) {
        if (program_.way == Way::add && overlap.rank == plan_.me && is_own_place(box)) return;
        const Side here = side_of(box, form, sends);
        ExchangeBox b{static_cast<int>(f), here.offset / form.element, geometry_.counts(box, form.shape), {}};
        for (int d = 0; d < b.counts.rank(); ++d)
          b.strides.push_back(here.steps[static_cast<std::size_t>(d)] / form.element);
        part.boxes.push_back(b);
      });
    }
    parts.push_back(std::move(part));
  }

  // The copies of a rank that is alone, and the places at which its part may lie in its window.
  void add_own(std::size_t f) {
    const Form& form = program_.forms[f];
    std::vector<Program::Place> places;
    windows::each_box(plan_.self, [&](const Box& box) {
      const Side part = geometry_.of_part(box, form.part, form.element),
                 window = geometry_.of_window(box, form.window, form.element);
      const Loops loops = Geometry::loops(geometry_.counts(box, form.shape), part, window, form.element);
      if (!adds_ && plan_.group == nullptr) program_.own.push_back({f, loops, part.offset, window.offset});
      bool whole = program_.way != Way::adjoint && loops.same_steps();
      for (std::size_t d = 0; d < box.size(); ++d)
        whole &=
            box[d].in == 0 && box[d].count == plan_.dims[d].part_size && box[d].step == 1 && !box[d].turned;
      if (whole) places.push_back({part.offset, window.offset, geometry_.begin_in_window(box)});
    });
    program_.places.push_back(std::move(places));
  }

  // Elements that are set to a number: of windows beyond an edge, or sums before anything is added.
  void add_numbers(std::size_t f) {
    const Form& form = program_.forms[f];
    if (program_.way == Way::adjoint) {
      const Side part = side_of_all(form.part, form.element);
      program_.cleared.push_back({f, Geometry::loops(form.shape, part, part, form.element), 0, 0});
    }
    if (adds_) return;
    each_filled_box(plan_, [&](const Box& box, double value) {
      const Side to = side_of(box, form, false);
      program_.fills.push_back(
          {{f, Geometry::loops(geometry_.counts(box, form.shape), to, to, form.element), 0, to.offset},
           windows::element_of(value, form.dtype)});
    });
  }
  static Side side_of_all(const Strides& strides, std::int64_t element) {
    Side all;
    for (int d = 0; d < strides.rank(); ++d) all.steps[static_cast<std::size_t>(d)] = strides[d] * element;
    return all;
  }

  const Window::Plan& plan_;
  const bool adds_;
  const Geometry geometry_;
  Program program_;
};

void check_view(const Window::Plan& plan, const std::string& name, const ConstTensorView& v) {
  if (extents_fault(v.shape))
    refuse(plan, fmt::format("{} is {}; expected no negative extent", name, to_string(v.shape)));
  if (v.strides.rank() != v.shape.rank())
    refuse(plan, fmt::format("{} has {} strides for {} dimensions", name, v.strides.rank(), v.shape.rank()));
  if (reaches_too_far(v.shape, v.strides, v.dtype))
    refuse(plan, fmt::format("{} has strides {} of {}; expected elements within 2^63 bytes", name,
                             to_string(v.strides), to_string(v.shape)));
}

// The form of a field; throws where it does not fit the window.
Form form_of(const Window& window, const Window::Plan& plan, const WindowField& f, Way way, std::size_t index,
             std::size_t count) {
  const bool adjoint = way != Way::fetch;
  const std::string in = called("in", index, count), out = called("out", index, count);
  check_view(plan, in, f.in);
  check_view(plan, out, f.out);
  const Shape& part = adjoint ? f.out.shape : f.in.shape;
  if (part.rank() != plan.global.rank())
    refuse(plan, fmt::format("{} is {}; expected {} dimensions, as the whole {} has", adjoint ? out : in,
                             to_string(part), plan.global.rank(), to_string(plan.global)));
  Shape expected = part;
  for (const Window::Plan::Dim& d : plan.dims) expected[d.dim] = d.part_size;
  if (!(part == expected))
    refuse(plan, fmt::format("{} is {}; expected {}, this rank's part", adjoint ? out : in, to_string(part),
                             to_string(expected)));
  const Shape of_window = window.window_shape(part);
  if (const Shape& got = adjoint ? f.in.shape : f.out.shape; !(got == of_window))
    refuse(plan, fmt::format("{} is {}; expected {}, this rank's window on {}", adjoint ? in : out,
                             to_string(got), to_string(of_window), to_string(part)));
  if (f.in.dtype != f.out.dtype)
    refuse(plan, fmt::format("{} is {}; expected {} as {}", out, name(f.out.dtype), name(f.in.dtype), in));
  if (adjoint && !can_add(f.in.dtype))
    refuse(plan, fmt::format("{} is {}; expected a dtype that is added: an integer, or f64, f32, bf16, f16",
                             in, name(f.in.dtype)));
  const ConstTensorView held = adjoint ? ConstTensorView(f.out) : f.in;
  const ConstTensorView wanted = adjoint ? f.in : ConstTensorView(f.out);
  const auto of_part = span_of(held), of_window_span = span_of(wanted);
  return {part,
          held.strides,
          wanted.strides,
          f.in.dtype,
          size_bytes(f.in.dtype),
          of_window,
          of_part.first - held.data,
          of_part.second - held.data,
          of_window_span.first - wanted.data,
          of_window_span.second - wanted.data};
}

bool has_form(const Form& form, const WindowField& f, Way way) {
  const bool adjoint = way != Way::fetch;
  return f.in.dtype == form.dtype && f.out.dtype == form.dtype &&
         (adjoint ? f.out.shape : f.in.shape) == form.shape &&
         (adjoint ? f.out.strides : f.in.strides) == form.part &&
         (adjoint ? f.in.strides : f.out.strides) == form.window &&
         (adjoint ? f.in.shape : f.out.shape) == form.of_window;
}

}  // namespace

std::string fields_text(const std::vector<Form>& forms, Way way) {
  std::string text = way == Way::adjoint ? "the adjoint of " : way == Way::add ? "sums of " : "";
  text += fmt::format("{} field{}{}", forms.size(), forms.size() == 1 ? "" : "s", forms.empty() ? "" : ": ");
  for (std::size_t i = 0; i < forms.size(); ++i)
    text += (i > 0 ? ", " : "") + std::string(name(forms[i].dtype));
  return text;
}

const Program& program_for(const Window& window, const Window::Plan& plan,
                           std::span<const WindowField> fields, Way way) {
  const auto fits = [&](const Program& p) {
    if (p.way != way || p.forms.size() != fields.size()) return false;
    for (std::size_t i = 0; i < fields.size(); ++i)
      if (!has_form(p.forms[i], fields[i], way)) return false;
    return true;
  };
  for (const auto& p : plan.programs)
    if (fits(*p)) return *p;
  std::vector<Form> forms;
  for (std::size_t i = 0; i < fields.size(); ++i)
    forms.push_back(form_of(window, plan, fields[i], way, i, fields.size()));
  auto made = std::make_unique<const Program>(Compiler(plan, std::move(forms), way).compile());
  constexpr std::size_t kMostPrograms = 4;
  if (plan.programs.size() >= kMostPrograms) {
    const auto idle = std::find_if(plan.programs.begin(), plan.programs.end(),
                                   [&](const auto& p) { return !in_flight(plan, *p); });
    if (idle != plan.programs.end()) plan.programs.erase(idle);
  }
  plan.programs.push_back(std::move(made));
  return *plan.programs.back();
}

}  // namespace weft::windows
