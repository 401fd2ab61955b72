// The plan of a window: arithmetic on the parts and the requests of all ranks.
#include "weft/mesh/window.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>

#include "mesh/window/plan.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using windows::Run;
using windows::Segment;

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::bad_argument, "window: " + text); }

// A dimension with the indices of it that all ranks hold, and those that they want.
struct Wish {
  WindowDim want;
  PartitionDim held;
  std::vector<std::vector<Run>> runs, turned;  // by part; turned: of the longitude of a pole
};

bool has_pole(const WindowDim& d) {
  return d.before.kind == Edge::Kind::pole || d.after.kind == Edge::Kind::pole;
}

void check_dims(const Partition& x, const std::vector<WindowDim>& dims) {
  for (std::size_t i = 0; i < dims.size(); ++i) {
    const WindowDim& d = dims[i];
    const PartitionDim held = x.dim(d.dim);  // throws
    for (const Edge* edge : {&d.before, &d.after})
      if (edge->kind != Edge::Kind::constant && edge->value != 0)
        refuse(fmt::format("dimension {}: edge {} has the value {}; expected 0: only a constant edge has one",
                           d.dim, windows::kind_text(edge->kind), edge->value));
    for (std::size_t j = 0; j < i; ++j)
      if (dims[j].dim == d.dim) refuse(fmt::format("dimension {} is named twice", d.dim));
    if (d.wanted.size() != held.parts.size())
      refuse(fmt::format("dimension {} is wanted by {} parts; expected {}, as many as x has", d.dim,
                         d.wanted.size(), held.parts.size()));
  }
}

// The one longitude of poles. -1: there is none.
int longitude_of(const Partition& x, const std::vector<WindowDim>& dims) {
  int longitude = -1, latitude = -1;
  for (const WindowDim& d : dims)
    for (const Edge* edge : {&d.before, &d.after}) {
      if (edge->kind != Edge::Kind::pole) continue;
      if (edge->longitude < 0 || edge->longitude >= x.global().rank() || edge->longitude == d.dim)
        refuse(
            fmt::format("dimension {}: the longitude of its pole is dimension {}; expected another one of {}",
                        d.dim, edge->longitude, to_string(x.global())));
      if (latitude >= 0 && (latitude != d.dim || longitude != edge->longitude))
        refuse(fmt::format("dimensions {} and {} have poles; expected one, with one longitude", latitude,
                           d.dim));
      latitude = d.dim;
      longitude = edge->longitude;
      if (x.global()[longitude] % 2 != 0)
        refuse(fmt::format(
            "dimension {} is the longitude of a pole and has {} elements; half a turn needs an even number",
            longitude, x.global()[longitude]));
    }
  return longitude;
}

std::vector<Wish> wishes_of(const Partition& x, std::vector<WindowDim> dims) {
  check_dims(x, dims);
  const int longitude = longitude_of(x, dims);
  if (longitude >= 0 && std::ranges::none_of(dims, [&](const WindowDim& d) { return d.dim == longitude; }))
    dims.push_back({longitude, x.dim(longitude).parts, {}, {}});  // as it is
  std::stable_partition(dims.begin(), dims.end(), has_pole);
  std::vector<Wish> wishes;
  for (WindowDim& d : dims) {
    Wish wish{std::move(d), {}, {}, {}};
    wish.held = x.dim(wish.want.dim);
    const std::int64_t n = x.global()[wish.want.dim];
    for (std::size_t p = 0; p < wish.want.wanted.size(); ++p) {
      wish.runs.push_back(
          windows::runs_of_ranges(wish.want.wanted[p], n, wish.want.before, wish.want.after,
                                  fmt::format("window: dimension {}: part {}", wish.want.dim, p)));
      if (wish.want.dim == longitude) wish.turned.push_back(windows::half_a_turn(wish.runs.back(), n));
    }
    wishes.push_back(std::move(wish));
  }
  return wishes;
}

// A window is the product of its dimensions' runs. Bounded, since each box of it is a step of the exchange.
void check_boxes(const std::vector<Wish>& wishes) {
  constexpr std::int64_t kMostBoxes = std::int64_t{1} << 20;
  std::int64_t boxes = 1;
  for (const Wish& wish : wishes) {
    std::size_t most = 1;
    for (const auto& runs : wish.runs) most = std::max(most, runs.size());
    for (const auto& runs : wish.turned) most = std::max(most, runs.size());
    if (__builtin_mul_overflow(boxes, static_cast<std::int64_t>(most), &boxes) || boxes > kMostBoxes)
      refuse(fmt::format(
          "dimension {}: windows have up to {} runs here, {} with the dimensions before; expected at most {}",
          wish.want.dim, most, boxes, kMostBoxes));
  }
}

// The elements that a rank with the window of the parts `wanting` gets from a rank that holds the parts
// `holding`.
Window::Plan::Overlap overlap_of(const std::vector<Wish>& wishes, const std::vector<int>& wanting,
                                 const std::vector<int>& holding, int rank) {
  Window::Plan::Overlap overlap{rank, {}};
  for (std::size_t d = 0; d < wishes.size(); ++d) {
    const auto want = static_cast<std::size_t>(wanting[d]), hold = static_cast<std::size_t>(holding[d]);
    const IndexRanges& held = wishes[d].held.parts[hold];
    Window::Plan::Overlap::OfDim of{windows::held(wishes[d].runs[want], held), {}, !wishes[d].turned.empty()};
    if (of.longitude) of.turned = windows::held(wishes[d].turned[want], held);
    overlap.dims.push_back(std::move(of));
  }
  return overlap;
}

}  // namespace

Window::Window(Partition x, std::vector<WindowDim> dims) : plan_(std::make_shared<Plan>()) {
  const std::vector<Wish> wishes = wishes_of(x, std::move(dims));
  check_boxes(wishes);
  Plan& plan = *plan_;
  plan.global = x.global();
  for (const Wish& wish : wishes) {
    plan.held.push_back(wish.held);
    plan.wanted.push_back(wish.want);
  }
  std::vector<std::string> axes;
  for (const Wish& wish : wishes) axes.insert(axes.end(), wish.held.axes.begin(), wish.held.axes.end());
  plan.mesh = x.mesh();
  std::vector<int> ranks{plan.mesh.rank()};
  if (!axes.empty()) {
    plan.axes = plan.mesh.submesh(axes);
    plan.me = plan.axes.rank();
    ranks = plan.axes.ranks();
  }
  std::vector<std::vector<int>> parts;  // of each rank of the axes, in each dimension
  for (const int rank : ranks) {
    parts.emplace_back();
    for (const Wish& wish : wishes) parts.back().push_back(x.part(wish.want.dim, rank));
  }
  const std::vector<int>& mine = parts[static_cast<std::size_t>(plan.me)];
  for (std::size_t d = 0; d < wishes.size(); ++d) {
    const auto part = static_cast<std::size_t>(mine[d]);
    plan.dims.push_back({wishes[d].want.dim, windows::size_of(wishes[d].held.parts[part]),
                         windows::size_of(wishes[d].want.wanted[part]), wishes[d].runs[part]});
  }
  plan.self = overlap_of(wishes, mine, mine, plan.me);
  const auto any = [](const Plan::Overlap& overlap) {
    bool found = false;
    windows::each_box(overlap, [&](const auto&) { found = true; });
    return found;
  };
  for (int r = 0; r < static_cast<int>(ranks.size()); ++r) {
    if (r == plan.me) continue;
    const std::vector<int>& theirs = parts[static_cast<std::size_t>(r)];
    if (Plan::Overlap o = overlap_of(wishes, theirs, mine, r); any(o)) plan.to.push_back(std::move(o));
    if (Plan::Overlap o = overlap_of(wishes, mine, theirs, r); any(o)) plan.from.push_back(std::move(o));
  }
}

namespace {

// The number among the plan's of a dimension of the tensor.
std::size_t index_of(const Window::Plan& plan, int dim) {
  std::vector<int> known;
  for (std::size_t d = 0; d < plan.dims.size(); ++d) {
    if (plan.dims[d].dim == dim) return d;
    known.push_back(plan.dims[d].dim);
  }
  refuse(fmt::format("dimension {} is not one of those of which a window is wanted: {}", dim,
                     fmt::join(known, ", ")));
}

}  // namespace

Shape Window::window_shape(Shape part) const {
  for (const Plan::Dim& d : plan_->dims)
    if (d.dim < part.rank()) part[d.dim] = d.window_size;
  return part;
}

std::int64_t Window::part_size(int dim) const { return plan_->dims[index_of(*plan_, dim)].part_size; }
std::int64_t Window::window_size(int dim) const { return plan_->dims[index_of(*plan_, dim)].window_size; }

IndexRange Window::own(int dim) const {
  IndexRange longest;
  for (const Segment& s : plan_->self.dims[index_of(*plan_, dim)].plain)
    if (s.step == 1 && !s.turned && s.count > longest.size()) longest = {s.out, s.out + s.count};
  return longest;
}

}  // namespace weft
