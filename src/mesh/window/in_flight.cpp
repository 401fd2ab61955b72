#include "mesh/window/in_flight.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <span>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "host/strided/overlap.hpp"
#include "mesh/window/exchange.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"

namespace weft::windows {
namespace {

using Program = Window::Plan::Program;

// The memory of one field that an exchange reads, or writes.
class Access {
 public:
  Access(const Program& program, std::size_t field, const Pair& pair, bool writes)
      : program_(program), form_(program.forms[field]), field_(field), pair_(pair), writes_(writes) {
    data_ = of_window() ? pair.window : pair.part;
    low_ = data_ + (of_window() ? form_.window_low : form_.part_low);
    high_ = data_ + (of_window() ? form_.window_high : form_.part_high);
  }

  bool meets(const Access& other) const {
    if (low_ >= other.high_ || other.low_ >= high_) return false;
    const std::vector<ConstTensorView> mine = pieces(), theirs = other.pieces();
    return std::ranges::any_of(mine, [&](const ConstTensorView& a) {
      return std::ranges::any_of(theirs, [&](const ConstTensorView& b) { return share_memory(a, b); });
    });
  }

 private:
  bool of_window() const { return writes_ == (program_.way == Way::fetch); }

  // All its memory. If it is a window in which this rank's part lies in place, only the memory around the
  // part.
  std::vector<ConstTensorView> pieces() const {
    ConstTensorView rest = of_window()
                               ? ConstTensorView{data_, form_.dtype, {}, form_.of_window, form_.window}
                               : ConstTensorView{data_, form_.dtype, {}, form_.shape, form_.part};
    const std::vector<Program::Place>& places = program_.places[field_];
    const auto place = std::ranges::find_if(places, [&](const Program::Place& p) { return p.holds(pair_); });
    if (!of_window() || place == places.end()) return {rest};
    std::vector<ConstTensorView> around;
    for (int d = 0; d < form_.shape.rank(); ++d) {
      const std::int64_t step = form_.window[d] * form_.element, begin = place->begin[d],
                         size = form_.shape[d];
      ConstTensorView before = rest, after = rest;
      before.shape[d] = begin;
      after.shape[d] -= begin + size;
      after.data += (begin + size) * step;
      for (const ConstTensorView& piece : {before, after})
        if (piece.count() > 0) around.push_back(piece);
      rest.shape[d] = size;
      rest.data += begin * step;
    }
    return around;
  }

  const Program& program_;
  const Form& form_;
  const std::size_t field_;
  const Pair& pair_;
  const bool writes_;
  const std::byte *data_, *low_, *high_;
};

// "out of field 3 is", as the program knows it.
std::string subject(const Window::Plan& plan, Way way, bool out, std::size_t index, std::size_t count) {
  if (std::string_view(plan.name) != "halo") return called(out ? "out" : "in", index, count) + " is";
  return called(out == (way == Way::fetch) ? "the ghost cells" : "the inner cells", index, count) + " are";
}

}  // namespace

bool in_flight(const Window::Plan& plan, const Program& program) noexcept {
  return std::ranges::any_of(plan.in_flight, [&](const Exchange* x) { return &x->program() == &program; });
}

void expect_free(const Window::Plan& plan, const Program& program, const Judged& fields) {
  const std::span<const Pair> pairs = fields.pairs();
  const std::size_t n = pairs.size();
  const auto taken = [&](bool out, std::size_t field, const char* by) {
    if (plan.group != nullptr && plan.group->failed()) return;
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: {} still {} by an exchange in flight; finish that one first", plan.name,
                            subject(plan, program.way, out, field, n), by));
  };
  for (const Exchange* other : plan.in_flight) {
    const std::uint64_t mine = fields.id(), theirs = other->judged();
    const std::pair<std::uint64_t, std::uint64_t> ids{std::min(mine, theirs), std::max(mine, theirs)};
    if (std::ranges::find(plan.apart, ids) != plan.apart.end()) continue;
    for (std::size_t i = 0; i < n; ++i) {
      const Access in(program, i, pairs[i], false), out(program, i, pairs[i], true);
      for (std::size_t j = 0; j < other->program().forms.size(); ++j) {
        const Access its_in(other->program(), j, other->pair(j), false),
            its_out(other->program(), j, other->pair(j), true);
        if (out.meets(its_out)) taken(true, i, "written");
        if (out.meets(its_in)) taken(true, i, "read");
        if (in.meets(its_out)) taken(false, i, "written");
      }
    }
    plan.apart[plan.next_apart++ % plan.apart.size()] = ids;
  }
}

}  // namespace weft::windows
