// Windows are compared with slices of the global tensor, element by element; adjoints are tested by scalar
// products of integers.
#include "weft/mesh/window.hpp"

#include <gtest/gtest.h>

#include <algorithm>
#include <complex>
#include <functional>
#include <optional>
#include <random>
#include <thread>

#include "support/errors.hpp"
#include "support/masked_backend.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/mesh/halo.hpp"

namespace weft::window_test {
namespace {

using test::error_text;
using test::expect_error;
using test::Rank;
using test::run_ranks;

// The global tensor: every element is its own index plus one, so all elements differ.
std::int64_t element(const Dims& index, const Shape& global) {
  std::int64_t flat = 0;
  for (int d = 0; d < global.rank(); ++d) flat = flat * global[d] + index[d];
  return flat + 1;
}

// One index beyond an end, computed by the rules of weft/mesh/window.hpp, one step at a time. nullopt: a
// number.
std::optional<std::int64_t> resolved(std::int64_t i, std::int64_t n, const Edge& edge, bool& other_side) {
  switch (edge.kind) {
    case Edge::Kind::none: ADD_FAILURE() << "nothing is there"; return std::nullopt;
    case Edge::Kind::zero:
    case Edge::Kind::constant: return std::nullopt;
    case Edge::Kind::periodic:
      while (i < 0) i += n;
      while (i >= n) i -= n;
      return i;
    case Edge::Kind::reflect: return i < 0 ? -i : n - 1 - (i - (n - 1));
    case Edge::Kind::replicate: return i < 0 ? 0 : n - 1;
    case Edge::Kind::pole: other_side = true; return i < 0 ? -i - 1 : n - 1 - (i - n);
  }
  return std::nullopt;
}

// The window's value at that index of the global tensor.
std::int64_t expected_at(Dims index, const Shape& global, std::vector<WindowDim> dims) {
  bool other_side = false;
  std::int64_t filled = 0;
  bool is_filled = false;
  int longitude = -1;
  std::ranges::stable_sort(dims, {}, [](const WindowDim& d) {
    return d.before.kind != Edge::Kind::pole && d.after.kind != Edge::Kind::pole;
  });
  for (const WindowDim& d : dims) {
    const std::int64_t i = index[d.dim], n = global[d.dim];
    if (i >= 0 && i < n) continue;
    const Edge& edge = i < 0 ? d.before : d.after;
    const std::optional<std::int64_t> at = resolved(i, n, edge, other_side);
    if (edge.kind == Edge::Kind::pole) longitude = edge.longitude;
    if (at) {
      index[d.dim] = *at;
    } else {
      if (!is_filled) filled = edge.kind == Edge::Kind::constant ? static_cast<std::int64_t>(edge.value) : 0;
      is_filled = true;
    }
  }
  if (is_filled) return filled;
  if (other_side) index[longitude] = (index[longitude] + global[longitude] / 2) % global[longitude];
  return element(index, global);
}

std::vector<std::int64_t> indices_of(const IndexRanges& ranges) {
  std::vector<std::int64_t> all;
  for (const IndexRange& r : ranges)
    for (std::int64_t i = r.lo; i < r.hi; ++i) all.push_back(i);
  return all;
}

// Calls see(place in the local tensor, index in the whole) for indices that each dimension has.
template <class See>
void each_index(const std::vector<std::vector<std::int64_t>>& of, const See& see) {
  std::int64_t count = 1;
  for (const auto& list : of) count *= static_cast<std::int64_t>(list.size());
  for (std::int64_t place = 0; place < count; ++place) {
    Dims index;
    for (std::size_t d = 0; d < of.size(); ++d) index.push_back(0);
    std::int64_t rest = place;
    for (std::size_t d = of.size(); d-- > 0;) {
      const auto size = static_cast<std::int64_t>(of[d].size());
      index[static_cast<int>(d)] = of[d][static_cast<std::size_t>(rest % size)];
      rest /= size;
    }
    see(static_cast<std::size_t>(place), index);
  }
}

// The ranges that this rank holds and requests in each dimension.
std::vector<std::vector<std::int64_t>> held_indices(const Partition& x) {
  std::vector<std::vector<std::int64_t>> of;
  for (int d = 0; d < x.global().rank(); ++d)
    of.push_back(indices_of(x.dim(d).parts[static_cast<std::size_t>(x.part(d))]));
  return of;
}
std::vector<std::vector<std::int64_t>> wanted_indices(const Partition& x,
                                                      const std::vector<WindowDim>& dims) {
  auto of = held_indices(x);
  for (const WindowDim& d : dims)
    of[static_cast<std::size_t>(d.dim)] = indices_of(d.wanted[static_cast<std::size_t>(x.part(d.dim))]);
  return of;
}
Shape shape_of(const std::vector<std::vector<std::int64_t>>& of) {
  Shape shape;
  for (const auto& list : of) shape.push_back(static_cast<std::int64_t>(list.size()));
  return shape;
}

std::string text_of(const Partition& x, const std::vector<WindowDim>& dims) {
  std::string text = to_string(x.global()) + " over " + to_string(x.mesh().shape());
  for (const WindowDim& d : dims) {
    text += "; dim " + std::to_string(d.dim) + " edges " + std::to_string(static_cast<int>(d.before.kind)) +
            "," + std::to_string(static_cast<int>(d.after.kind)) + " wants";
    for (const IndexRanges& part : d.wanted) {
      text += " {";
      for (const IndexRange& r : part) text += "[" + std::to_string(r.lo) + "," + std::to_string(r.hi) + ")";
      text += "}";
    }
  }
  return text;
}

Tensor part_of(Context& context, const Partition& x, Memory memory = Memory::shared) {
  const auto held = held_indices(x);
  Tensor part(context, shape_of(held), DType::i64, memory);
  each_index(held, [&](std::size_t place, const Dims& index) {
    part.as<std::int64_t>()[place] = element(index, x.global());
  });
  return part;
}

// Compares the window with the global tensor, and the adjoint with its definition.
void check(ProcessGroup& group, const Partition& x, const std::vector<WindowDim>& dims) {
  SCOPED_TRACE(text_of(x, dims));
  Context& context = group.context();
  const Window window(x, dims);
  const Tensor in = part_of(context, x);
  const auto wanted = wanted_indices(x, dims);
  const Tensor out(context, shape_of(wanted), DType::i64, Memory::shared);
  ASSERT_EQ(out.shape(), window.window_shape(in.shape()));
  std::ranges::fill(out.as<std::int64_t>(), -77);
  window.fetch(in, out);
  std::int64_t wrong = 0;
  each_index(wanted, [&](std::size_t place, const Dims& index) {
    wrong += out.as<std::int64_t>()[place] != expected_at(index, x.global(), dims);
  });
  ASSERT_EQ(wrong, 0);

  // <A x, y> = <x, A' y>, with numbers that are filled in left out.
  std::vector<WindowDim> linear = dims;
  for (WindowDim& d : linear)
    for (Edge* e : {&d.before, &d.after})
      if (e->kind == Edge::Kind::constant) *e = Edge::zero();
  const Window a(x, linear);
  a.fetch(in, out);
  const Tensor y(context, out.shape(), DType::i64, Memory::shared),
      dx(context, in.shape(), DType::i64, Memory::shared);
  for (std::size_t i = 0; i < y.as<std::int64_t>().size(); ++i)
    y.as<std::int64_t>()[i] =
        static_cast<std::int64_t>((i * 31 + static_cast<std::size_t>(group.rank()) * 7) % 19) - 9;
  a.adjoint(y, dx);
  std::int64_t products[2] = {0, 0};
  for (std::size_t i = 0; i < y.as<std::int64_t>().size(); ++i)
    products[0] += y.as<std::int64_t>()[i] * out.as<std::int64_t>()[i];
  for (std::size_t i = 0; i < dx.as<std::int64_t>().size(); ++i)
    products[1] += dx.as<std::int64_t>()[i] * in.as<std::int64_t>()[i];
  group.all_reduce(view(products, 2)).wait();
  ASSERT_EQ(products[0], products[1]);
}

// The n ranks of a random test; all draw the same random numbers.
struct Draw {
  std::mt19937 random;
  std::int64_t number(std::int64_t lo, std::int64_t hi) {
    return lo + static_cast<std::int64_t>(random() % static_cast<std::uint64_t>(hi - lo + 1));
  }
  Edge edge(std::int64_t n) {
    switch (number(0, n > 0 ? 5 : 2)) {
      case 0: return Edge::none();
      case 1: return Edge::zero();
      case 2: return Edge::constant(5);
      case 3: return Edge::periodic();
      case 4: return Edge::reflect();
      default: return Edge::replicate();
    }
  }
  static std::int64_t reach(const Edge& e, std::int64_t n) {
    switch (e.kind) {
      case Edge::Kind::none: return 0;
      case Edge::Kind::reflect: return std::min<std::int64_t>(5, n - 1);
      case Edge::Kind::periodic: return std::max<std::int64_t>(5, 2 * n + 1);  // more than twice round
      default: return 5;
    }
  }
  // Parts of random sizes, some of them empty.
  std::vector<IndexRanges> cuts(std::int64_t n, int count) {
    std::vector<std::int64_t> at{0, n};
    for (int i = 1; i < count; ++i) at.push_back(number(0, n));
    std::ranges::sort(at);
    std::vector<IndexRanges> parts;
    for (int i = 0; i < count; ++i)
      parts.push_back({{at[static_cast<std::size_t>(i)], at[static_cast<std::size_t>(i) + 1]}});
    return parts;
  }
  WindowDim window(int dim, std::int64_t n, int parts) {
    WindowDim d{dim, {}, edge(n), edge(n)};
    for (int p = 0; p < parts; ++p) {
      IndexRanges ranges;
      for (std::int64_t k = number(0, 3) == 0 ? number(0, 3) : 1; k > 0; --k) {
        const std::int64_t lo = number(-reach(d.before, n), n + reach(d.after, n)),
                           hi = number(lo, n + reach(d.after, n));
        ranges.push_back({lo, hi});
      }
      d.wanted.push_back(std::move(ranges));
    }
    return d;
  }
};

// The ways of elements from other ranks: in shared memory, or by messages of any transport.
class WindowOver : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (way() == "gloo" && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  }
  static void on(test::Ranks kind, int n, const std::function<void(Rank&)>& body,
                 test::RankOptions options = {}) {
    if (way() == "messages") options.factory = test::masked(test::messages_only());
    if (way() == "gloo") options.backend = "gloo";
    run_ranks(kind, n, body, options);
  }
  static std::string way() { return GetParam(); }
  /// Fewer random windows over Gloo: the ranks take a millisecond to compare a plan.
  static int rounds(int all) { return way() == "gloo" ? all / 10 : all; }
};
INSTANTIATE_TEST_SUITE_P(Way, WindowOver, testing::Values("shared", "messages", "gloo"),
                         [](const auto& way) { return std::string(way.param); });

TEST_P(WindowOver, AnyRangesOfLayouts) {
  struct Case {
    int ranks;
    MeshShape mesh;
    std::vector<Placements> placements;
  };
  const std::vector<Case> cases{
      {1, {{"y", 1}}, {{Shard{0}}}},
      {2, {{"y", 2}}, {{Shard{0}}, {Shard{2}}}},
      {3, {{"y", 3}}, {{Shard{1}}}},
      {4, {{"y", 2}, {"x", 2}}, {{Shard{1}, Shard{2}}, {Shard{1}, Shard{1}}, {Shard{2}, Shard{0}}}},
      {6, {{"y", 3}, {"x", 2}}, {{Shard{0}, Shard{1}}, {Shard{2}, Shard{2}}}},
      {8, {{"z", 2}, {"y", 2}, {"x", 2}}, {{Shard{0}, Shard{1}, Shard{2}}}},
  };
  const auto expect = [&](test::Ranks kind, const Case& c, int count) {
    on(kind, c.ranks, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), c.mesh);
      Draw draw{std::mt19937(static_cast<unsigned>(c.ranks))};
      for (int i = 0; i < rounds(count); ++i)
        for (const Placements& p : c.placements) {
          const Shape global{draw.number(1, 7), draw.number(1, 9), draw.number(1, 6)};
          const Partition x(make_layout(mesh, p, global));
          std::vector<WindowDim> dims;
          for (int d = 0; d < 3; ++d)
            if (draw.number(0, 3) > 0)
              dims.push_back(draw.window(d, global[d], static_cast<int>(x.dim(d).parts.size())));
          std::ranges::reverse(dims);
          ASSERT_NO_FATAL_FAILURE(check(r.group(), x, dims));
        }
    });
  };
  for (const Case& c : cases) {
    expect(test::Ranks::threads, c, 60);
    expect(test::Ranks::processes, c, 20);
  }
}

TEST_P(WindowOver, AnyRangesOfPartsOfAnySize) {
  for (const int n : {2, 4})
    on(test::Ranks::threads, n, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"y", -1}, {"x", n / 2}});
      Draw draw{std::mt19937(99)};
      for (int i = 0; i < rounds(120); ++i) {
        const Shape global{2, draw.number(0, 12), draw.number(1, 7)};
        const Partition x(mesh, global,
                          {{1, {"y"}, draw.cuts(global[1], 2)}, {2, {"x"}, draw.cuts(global[2], n / 2)}});
        std::vector<WindowDim> dims;
        if (global[1] > 0) dims.push_back(draw.window(1, global[1], 2));
        dims.push_back(draw.window(2, global[2], n / 2));
        ASSERT_NO_FATAL_FAILURE(check(r.group(), x, dims));
      }
    });
}

TEST_P(WindowOver, HalosReachSeveralRanksAndBothEnds) {
  on(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 4}});
    for (const std::int64_t rows : {4, 5, 9})  // a halo of 3 to 5 reaches two or three ranks
      for (const Edge& edge :
           {Edge::zero(), Edge::constant(7), Edge::periodic(), Edge::reflect(), Edge::replicate()})
        for (const auto& [before, after] :
             {std::pair{1, 1}, std::pair{3, 0}, std::pair{0, 3}, std::pair{3, 3}}) {
          const Partition x(make_layout(mesh, {Shard{0}}, {rows, 3}));
          check(r.group(), x, {WindowDim::halo(x, 0, before, after, edge)});
        }
    const Partition few(make_layout(mesh, {Shard{0}}, {3, 2}));  // one rank has no row, and wants none
    check(r.group(), few, {WindowDim::halo(few, 0, 2, 2, Edge::reflect())});
  });
}

TEST_P(WindowOver, BetweenProcesses) {
  on(test::Ranks::processes, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}, {"x", 2}});
    for (const Shape& global : {Shape{3, 9, 7}, Shape{1, 200, 130}}) {
      const Partition x(make_layout(mesh, {Shard{1}, Shard{2}}, global));
      check(r.group(), x,
            {WindowDim::halo(x, 1, 2, 3, Edge::reflect()), WindowDim::halo(x, 2, 1, 1, Edge::periodic())});
    }
  });
}

TEST_P(WindowOver, BeyondThePolesOfAGlobe) {
  for (const int n : {1, 2, 4})
    on(test::Ranks::threads, n, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"lat", n > 1 ? 2 : 1}, {"lon", -1}});
      for (const Shape& global : {Shape{2, 5, 6}, Shape{1, 4, 2}, Shape{1, 9, 10}}) {
        const Partition x(make_layout(mesh, {Shard{1}, Shard{2}}, global));
        check(r.group(), x,
              {WindowDim::halo(x, 2, 1, 2, Edge::periodic()), WindowDim::halo(x, 1, 2, 3, Edge::pole(2))});
        check(r.group(), x, {WindowDim::halo(x, 1, 4, 4, Edge::pole(2))});  // longitude as it is
        WindowDim one_pole = WindowDim::halo(x, 1, 3, 1, Edge::pole(2));
        one_pole.after = Edge::zero();
        check(r.group(), x, {one_pole, WindowDim::halo(x, 2, 3, 0, Edge::constant(4))});
      }
    });
}

// Three dimensions cut at random places, with empty parts, and a pole or another edge at each end of the
// latitude.
TEST_P(WindowOver, AnyRangesBeyondThePoles) {
  for (const int n : {2, 4, 8})
    on(test::Ranks::threads, n, [&](Rank& r) {
      const int z = n == 8 ? 2 : 1, lat = n >= 4 ? 2 : 1;
      const DeviceMesh mesh(r.group(), {{"z", z}, {"lat", lat}, {"lon", 2}});
      Draw draw{std::mt19937(static_cast<unsigned>(7 * n))};
      for (int i = 0; i < rounds(80); ++i) {
        const Shape global{draw.number(1, 3), draw.number(1, 7), 2 * draw.number(1, 4)};
        const Partition x(mesh, global,
                          {{0, {"z"}, draw.cuts(global[0], z)},
                           {1, {"lat"}, draw.cuts(global[1], lat)},
                           {2, {"lon"}, draw.cuts(global[2], 2)}});
        WindowDim latitude{
            1, {}, Edge::pole(2), draw.number(0, 1) == 0 ? Edge::pole(2) : draw.edge(global[1])};
        if (draw.number(0, 3) == 0) std::swap(latitude.before, latitude.after);
        const auto reach = [&](const Edge& e) {
          return e.kind == Edge::Kind::pole ? std::min<std::int64_t>(5, global[1])
                                            : Draw::reach(e, global[1]);
        };
        for (int p = 0; p < lat; ++p) {
          const std::int64_t lo = draw.number(-reach(latitude.before), global[1] + reach(latitude.after));
          latitude.wanted.push_back({{lo, draw.number(lo, global[1] + reach(latitude.after))}});
        }
        std::vector<WindowDim> dims{latitude};
        if (draw.number(0, 1) == 0) dims.push_back(draw.window(2, global[2], 2));
        if (draw.number(0, 1) == 0) dims.push_back(draw.window(0, global[0], z));
        if (draw.number(0, 1) == 0) std::ranges::reverse(dims);
        ASSERT_NO_FATAL_FAILURE(check(r.group(), x, dims));
      }
    });
}

// Each rank fetches rows l, l + n, l + 2n, …, as strided attention windows need, and sends them back.
TEST_P(WindowOver, PartsOfSeveralRanges) {
  on(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 3}});
    const Shape global{12, 2};
    const Partition x(make_layout(mesh, {Shard{0}}, global));
    std::vector<IndexRanges> strided(3);
    for (std::int64_t p = 0; p < 3; ++p)
      for (const std::int64_t far : {0, 4, 8})
        strided[static_cast<std::size_t>(p)].push_back({far + p, far + p + (p == 2 ? 2 : 1)});
    check(r.group(), x, {{0, strided}});
    const Partition y(mesh, global, {{0, {"y"}, strided}});
    check(r.group(), y, {{0, x.dim(0).parts}});
    check(r.group(), y, {{0, {{{0, 12}}, {{-2, 3}}, {}}, Edge::periodic(), Edge::none()}});
  });
}

// Arrays of two types with ghost cells, of three dimensions cut at random places: the value of each cell, and
// the cells that must stay as they were.
TEST_P(WindowOver, GhostCellsOfAnyParts) {
  for (const MeshShape& mesh_shape :
       {MeshShape{{"z", 1}, {"y", 3}, {"x", 1}}, MeshShape{{"z", 2}, {"y", 2}, {"x", 2}}})
    on(test::Ranks::threads, mesh_shape.size(), [&](Rank& r) {
      const DeviceMesh mesh(r.group(), mesh_shape);
      Draw draw{std::mt19937(static_cast<unsigned>(mesh_shape.size()))};
      for (int i = 0; i < rounds(60); ++i) {
        const Shape global{draw.number(1, 4), draw.number(2, 7), draw.number(1, 5)};
        const Partition x(mesh, global,
                          {{0, {"z"}, draw.cuts(global[0], mesh_shape.size("z"))},
                           {1, {"y"}, draw.cuts(global[1], mesh_shape.size("y"))},
                           {2, {"x"}, draw.cuts(global[2], mesh_shape.size("x"))}});
        std::vector<HaloDim> ghosts;
        std::vector<WindowDim> dims;
        for (int d = 0; d < 3; ++d) {
          HaloDim g{d, 0, 0, draw.edge(global[d]), draw.edge(global[d])};
          // With edge none there may be any number of ghost cells, which stay as they are.
          const auto width = [&](const Edge& e) {
            return draw.number(
                0, e.kind == Edge::Kind::none ? 3 : std::min<std::int64_t>(3, Draw::reach(e, global[d])));
          };
          g.before = width(g.before_edge), g.after = width(g.after_edge);
          ghosts.push_back(g);
          dims.push_back(WindowDim{d, {}, g.before_edge, g.after_edge});
        }
        const Halo halo(x, ghosts);
        const Shape& shape = halo.shape();
        SCOPED_TRACE(text_of(x, dims) + " array " + to_string(shape));
        std::vector<std::int64_t> a(static_cast<std::size_t>(shape.count()), -77);
        std::vector<float> b(a.size(), -77.0F);
        const auto each_cell = [&](const auto& see) {
          std::size_t place = 0;
          for (std::int64_t z = 0; z < shape[0]; ++z)
            for (std::int64_t y = 0; y < shape[1]; ++y)
              for (std::int64_t w = 0; w < shape[2]; ++w, ++place) {
                const Dims cell{z, y, w};
                Dims at = cell;
                bool inner = true;
                for (int d = 0; d < 3; ++d) {
                  at[d] = halo.offset()[d] + cell[d] - halo.inner().offset[d];
                  inner = inner && cell[d] >= halo.inner().offset[d] &&
                          cell[d] < halo.inner().offset[d] + halo.inner().shape[d];
                }
                see(place, at, inner);
              }
        };
        each_cell([&](std::size_t place, const Dims& at, bool inner) {
          if (!inner) return;
          a[place] = element(at, global);
          b[place] = static_cast<float>(-element(at, global));
        });
        const TensorView fields[]{view(a.data(), shape), view(b.data(), shape)};
        halo.start(fields).finish();
        std::int64_t wrong = 0;
        each_cell([&](std::size_t place, const Dims& at, bool) {
          bool nothing = false, number = false;
          for (int d = 0; d < 3; ++d) {
            if (at[d] >= 0 && at[d] < global[d]) continue;
            const Edge::Kind kind = (at[d] < 0 ? ghosts[static_cast<std::size_t>(d)].before_edge
                                               : ghosts[static_cast<std::size_t>(d)].after_edge)
                                        .kind;
            nothing = nothing || kind == Edge::Kind::none;
            number = number || kind == Edge::Kind::zero || kind == Edge::Kind::constant;
          }
          const std::int64_t want = nothing ? -77 : expected_at(at, global, dims);
          wrong += a[place] != want;
          wrong += b[place] != static_cast<float>(nothing || number ? want : -want);
        });
        ASSERT_EQ(wrong, 0);

        // Adding in place is the adjoint. The scalar product of the ghost cells filled from x with the ghost
        // cells of y equals the scalar product of x with the sums that y's ghost cells add to inner cells.
        // Ghost cells do not change.
        std::vector<std::int64_t> filled(a.size()), numbers(a.size()), y(a.size());
        each_cell([&](std::size_t place, const Dims& at, bool inner) {
          if (inner) filled[place] = element(at, global);
          y[place] = static_cast<std::int64_t>((place * 31 + static_cast<std::size_t>(r.rank) * 7) % 19) - 9;
        });
        const std::vector<std::int64_t> x_alone = filled;
        halo.exchange(view(filled.data(), shape));
        halo.exchange(view(numbers.data(), shape));
        std::vector<std::int64_t> added = y;
        halo.add(view(added.data(), shape));
        std::int64_t products[2] = {0, 0};
        each_cell([&](std::size_t place, const Dims&, bool inner) {
          if (inner) {
            products[1] += (added[place] - y[place]) * x_alone[place];
          } else {
            wrong += added[place] != y[place];
            products[0] += y[place] * (filled[place] - numbers[place]);
          }
        });
        r.group().all_reduce(view(products, 2)).wait();
        ASSERT_EQ(products[0], products[1]);
        ASSERT_EQ(wrong, 0);
      }
    });
}

TEST_P(WindowOver, SeveralFieldsOfAnyTypeAndStrides) {
  on(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 3}});
    const Partition x(make_layout(mesh, {Shard{0}}, {7, 4}));
    const std::vector<WindowDim> dims{WindowDim::halo(x, 0, 2, 1, Edge::periodic())};
    const Window window(x, dims);
    const auto held = held_indices(x), wanted = wanted_indices(x, dims);
    const std::int64_t rows = window.part_size(0), wide = window.window_size(0);
    const auto value = [&](const Dims& i) {
      return static_cast<double>(element({(i[0] + 7) % 7, i[1]}, {7, 4}));
    };
    std::vector<double> a(static_cast<std::size_t>(rows * 4)), a_out(static_cast<std::size_t>(wide * 4), -1);
    std::vector<std::uint8_t> b(static_cast<std::size_t>(rows * 4)),
        b_out(static_cast<std::size_t>(wide * 4 * 3), 9);
    each_index(held, [&](std::size_t i, const Dims& at) {
      a[i] = value(at);
      // transposed.
      b[static_cast<std::size_t>(at[1] * rows + (at[0] - held[0][0]))] = static_cast<std::uint8_t>(value(at));
    });
    ConstTensorView b_in = view(b.data(), {rows, 4});
    b_in.strides = {1, rows};
    TensorView b_to = view(b_out.data(), {wide, 4});
    b_to.strides = {12, 3};  // with gaps
    const TensorView a_to = view(a_out.data(), {wide, 4});
    const ConstTensorView a_in = view(a.data(), {rows, 4});
    // A third field has two elements in the free dimension.
    std::vector<float> c(static_cast<std::size_t>(rows * 2), static_cast<float>(r.rank)),
        c_out(static_cast<std::size_t>(wide * 2));
    const ConstTensorView c_in = view(c.data(), {rows, 2});
    const WindowField fields[]{{a_in, a_to}, {b_in, b_to}, {c_in, view(c_out.data(), {wide, 2})}};
    WindowTransfer transfer = window.start(fields);
    transfer.finish();
    std::int64_t wrong = 0;
    each_index(wanted, [&](std::size_t i, const Dims& at) {
      wrong += a_out[i] != value(at);
      wrong += b_out[i * 3] != static_cast<std::uint8_t>(value(at));
      wrong += b_out[i * 3 + 1] != 9;
    });
    EXPECT_EQ(wrong, 0);
    const auto owner = [&](std::int64_t row) { return static_cast<float>(row < 3 ? 0 : row < 5 ? 1 : 2); };
    for (std::size_t i = 0; i < wanted[0].size(); ++i)
      EXPECT_EQ(c_out[2 * i + 1], owner((wanted[0][i] + 7) % 7));
  });
}

// Rank 1 of a ring of three, without the others: the messages that it gives to a transport that has no
// exchange of its own. Nine fields are one message to each neighbour. A box of 16 KiB or more is a separate
// message, sent from its place.
TEST(WindowMessages, OneForEachNeighbour) {
  const auto messages_of = [](std::int64_t columns, int doubles, const auto& see) {
    Context context;
    test::Recording recording;
    recording.lack(op_bit(Op::exchange));
    recording.decide([](const OpState& s) {
      return test::Fate{row(s.op).collective ? test::Fate::finish : test::Fate::never};
    });
    Membership m;
    m.store = make_local_store();
    m.rank = 1;
    m.size = 3;
    const DeviceMesh mesh(ProcessGroup::create(context, recording.factory(), m), {{"y", 3}});
    const Partition x(make_layout(mesh, {Shard{0}}, {6, columns}));
    const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
    std::vector<Tensor> memory;
    std::vector<WindowField> fields;
    for (int f = 0; f <= doubles; ++f) {
      const DType dtype = f == 0 ? DType::f32 : DType::f64;
      memory.emplace_back(context, Shape{2, columns}, dtype);
      memory.emplace_back(context, Shape{4, columns}, dtype);
      fields.push_back({memory[memory.size() - 2], memory.back()});
    }
    const WindowTransfer transfer = window.start(fields);
    std::vector<OpState> sent;
    for (const OpState& s : recording.posted())
      if (s.op == Op::send) sent.push_back(s);
    see(sent, memory);
  };
  messages_of(5, 8, [](const std::vector<OpState>& sent, const std::vector<Tensor>&) {
    ASSERT_EQ(sent.size(), 2U);
    for (const OpState& s : sent) {
      EXPECT_TRUE(s.peer == 0 || s.peer == 2) << s.peer;
      EXPECT_EQ(s.dtype, DType::u8);
      EXPECT_EQ(s.in_count, 256 + 5 * 4 + 8 * 5 * 8);  // behind a hash of the plan, and its words
    }
  });
  // 16 KiB of f32, 32 of f64, sent from where they lie, behind a message that describes the exchange
  messages_of(4096, 1, [](const std::vector<OpState>& sent, const std::vector<Tensor>& memory) {
    ASSERT_EQ(sent.size(), 6U);
    for (const OpState& s : sent) {
      if (s.dtype == DType::u8) {
        EXPECT_EQ(s.in_count, 256);
        continue;
      }
      const Tensor& in = memory[s.dtype == DType::f32 ? 0 : 2];
      const std::int64_t last = in.bytes() / 2;
      EXPECT_EQ(
          s.in,
          in.view().data +
              (s.peer == 0 ? 0 : last));  // the first row to the rank before, the last one to that behind
      EXPECT_EQ(s.in_count, 4096);
    }
  });
}

TEST_P(WindowOver, InPlaceTheHaloAloneIsWritten) {
  on(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {6, 5}));
    const Window window(
        x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic()), WindowDim::halo(x, 1, 1, 1, Edge::periodic())});
    std::vector<std::int32_t> cells(5 * 7, -1);
    TensorView all = view(cells.data(), {5, 7});
    TensorView inner = all;
    inner.shape = {3, 5};
    inner.data += (7 + 1) * sizeof(std::int32_t);
    for (int i = 0; i < 3; ++i)
      for (int j = 0; j < 5; ++j)
        cells[static_cast<std::size_t>((i + 1) * 7 + j + 1)] = (r.rank * 3 + i) * 5 + j;
    EXPECT_EQ(window.own(0), (IndexRange{1, 4}));
    WindowTransfer transfer = window.start(inner, all);
    while (!transfer.done()) {}
    transfer.finish();
    for (int i = 0; i < 5; ++i)
      for (int j = 0; j < 7; ++j)
        EXPECT_EQ(cells[static_cast<std::size_t>(i * 7 + j)], (r.rank * 3 + i + 5) % 6 * 5 + (j + 4) % 5);
    TensorView shifted = inner;
    shifted.data += sizeof(std::int32_t);
    expect_error(ErrorCode::bad_argument,
                 "window: in and out overlap; expected disjoint memory, or in at its place in out",
                 [&] { window.fetch(shifted, all); });
  });
}

// Ghost cells of a plate: a wall that the program sets above and below, a ring from left to right.
TEST(Halo, GhostCellsOfSeveralFields) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}, {"x", 2}});
    const Partition x(make_layout(mesh, {Shard{0}, Shard{1}}, {7, 6}));
    const Halo halo(x, {{0, 2, 1}, {1, 1, 2, Edge::periodic()}});
    const Shape& inner = halo.inner().shape;
    ASSERT_EQ(halo.shape(), (Shape{inner[0] + 3, inner[1] + 3}));
    std::vector<std::vector<float>> fields(
        3, std::vector<float>(static_cast<std::size_t>(halo.shape().count()), -1));
    std::vector<TensorView> views;
    for (std::size_t f = 0; f < fields.size(); ++f) {
      views.push_back(view(fields[f].data(), halo.shape()));
      for (std::int64_t i = 0; i < inner[0]; ++i)
        for (std::int64_t j = 0; j < inner[1]; ++j)
          fields[f][static_cast<std::size_t>((i + 2) * halo.shape()[1] + j + 1)] = static_cast<float>(
              100 * static_cast<int>(f) + element({halo.offset()[0] + i, halo.offset()[1] + j}, {7, 6}));
    }
    halo.exchange(views);
    for (std::size_t f = 0; f < fields.size(); ++f)
      for (std::int64_t i = 0; i < halo.shape()[0]; ++i)
        for (std::int64_t j = 0; j < halo.shape()[1]; ++j) {
          const std::int64_t row = halo.offset()[0] + i - 2, column = (halo.offset()[1] + j - 1 + 6) % 6;
          EXPECT_EQ(fields[f][static_cast<std::size_t>(i * halo.shape()[1] + j)],
                    row < 0 || row >= 7
                        ? -1.0F
                        : static_cast<float>(100 * static_cast<int>(f) + element({row, column}, {7, 6})));
        }
    expect_error(ErrorCode::bad_argument,
                 "halo: the field is (2, 2); expected " + to_string(halo.shape()) + ": this rank's part " +
                     to_string(inner) + " and its ghost cells",
                 [&] {
                   halo.exchange(view(fields[0].data(), {2, 2}));
                 });
  });
}

TEST_P(WindowOver, SeveralInFlightAndOverlapped) {
  on(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 3}});
    const Partition x(make_layout(mesh, {Shard{0}}, {3000, 4}));
    const std::vector<WindowDim> dims{WindowDim::halo(x, 0, 600, 600, Edge::periodic())};
    const Window window(x, dims);
    const Tensor in = part_of(r.context, x, Memory::local);
    std::vector<Tensor> out;
    std::vector<WindowTransfer> transfers;
    for (int i = 0; i < 6; ++i) {
      out.emplace_back(r.context, window.window_shape(in.shape()), DType::i64);
      transfers.push_back(window.start(in, out.back()));
    }
    const IndexRange own = window.own(0);
    for (std::int64_t i = own.lo; i < own.hi; ++i)
      ASSERT_EQ(out[5].as<std::int64_t>()[static_cast<std::size_t>(i * 4)],
                in.as<std::int64_t>()[static_cast<std::size_t>((i - own.lo) * 4)]);
    for (auto t = transfers.rbegin(); t != transfers.rend(); ++t) t->finish();
    for (const Tensor& t : out) {
      std::int64_t wrong = 0;
      each_index(wanted_indices(x, dims), [&](std::size_t i, const Dims& at) {
        wrong += t.as<std::int64_t>()[i] != expected_at(at, x.global(), dims);
      });
      EXPECT_EQ(wrong, 0);
    }
  });
}

TEST_P(WindowOver, OfTensorsWithLayouts) {
  on(test::Ranks::threads, 4, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"dp", 2}, {"y", 2}});
    const LayoutRef layout = make_layout(mesh, {Shard{0}, Shard{1}}, {3, 5, 2});
    const Partition x(layout);
    const Tensor in = part_of(r.context, x).with_layout(layout);
    const std::vector<WindowDim> dims{WindowDim::halo(x, 1, 1, 2, Edge::replicate())};
    const Tensor out = fetch_window(in, dims);
    EXPECT_EQ(out.layout(), nullptr);
    std::int64_t wrong = 0;
    each_index(wanted_indices(x, dims), [&](std::size_t i, const Dims& at) {
      wrong += out.as<std::int64_t>()[i] != expected_at(at, x.global(), dims);
    });
    EXPECT_EQ(wrong, 0);
    Tensor ones(r.context, out.shape(), DType::i64);
    std::ranges::fill(ones.as<std::int64_t>(), 1);
    const Tensor uses = fetch_window_adjoint(ones, layout, dims);
    EXPECT_EQ(uses.layout(), layout);
    EXPECT_EQ(uses.shape(), in.shape());
    // For rows 0 to 4, the number of places in the windows [-1, 5) and [2, 7) that hold the row.
    const std::int64_t expected[]{2, 1, 2, 2, 4};
    each_index(held_indices(x), [&](std::size_t i, const Dims& at) {
      EXPECT_EQ(uses.as<std::int64_t>()[i], expected[at[1]]);
    });
    expect_error(ErrorCode::layout,
                 "fetch_window: the tensor " + to_string(in.shape()) +
                     " is plain; give it a layout, which says what part of the whole it is",
                 [&] { fetch_window(in.with_layout(nullptr), dims); });
  });
}

// The sum's order is that of the windows' ranks, in any order of arrival: bits of a float sum that depends
// on the order.
TEST_P(WindowOver, AdjointAddsInTheOrderOfRanks) {
  on(test::Ranks::threads, 3, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 3}});
    const Partition x(make_layout(mesh, {Shard{0}}, {3}));
    const Window window(x, {WindowDim::ranges(0, {{0, 3}, {0, 3}, {0, 3}})});
    const float terms[]{1e8F, 1.0F, -1e8F};
    for (int i = 0; i < 20; ++i) {
      const std::vector<float> dy(3, terms[r.rank]);
      float dx = 0;
      if (i % 3 == r.rank) std::this_thread::sleep_for(std::chrono::milliseconds(1));
      window.adjoint(view(dy), view(&dx, 1));
      EXPECT_EQ(dx, (1e8F + 1.0F) + -1e8F);
    }
  });
}

TEST_P(WindowOver, AdjointOfShortFloatsRoundsOnce) {
  on(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {4, 2}));
    const Window window(x, {WindowDim::halo(x, 0, 300, 0, Edge::replicate())});
    const auto summed = [&](auto zero) {
      using T = decltype(zero);
      const std::vector<T> dy(static_cast<std::size_t>(window.window_size(0) * 2), T(1.0F));
      std::vector<T> dx(8, T(-5.0F));  // the part's columns first
      TensorView out = view(dx.data(), {2, 2});
      out.strides = {1, 3};
      window.adjoint(view(dy.data(), {window.window_size(0), 2}), out);
      // Element 0 is 301 times in the window of rank 0 and 299 times in that of rank 1.
      for (const std::size_t column : {0, 3}) {
        EXPECT_EQ(static_cast<float>(dx[column]), r.rank == 0 ? 600.0F : 1.0F);
        EXPECT_EQ(static_cast<float>(dx[column + 1]), r.rank == 0 ? 2.0F : 1.0F);
      }
      EXPECT_EQ(static_cast<float>(dx[2]), -5.0F);
    };
    summed(bf16{});
    summed(f16{});
    summed(float{});
  });
}

// A ring of two ranks with a row each, as a Halo and as a Window: errors name the one that was called.
struct Ring {
  Ring(ProcessGroup& group, bool of_halo_in, std::int64_t columns = 4)
      : mesh(group, {{"y", 2}}),
        x(make_layout(mesh, {Shard{0}}, {2, columns})),
        halo(x, {{0, 1, 1, Edge::periodic()}}),
        window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}),
        of_halo(of_halo_in),
        all(static_cast<std::size_t>(3 * columns)),
        cells(view(all.data(), {3, columns})) {}
  WindowTransfer start() const {
    return of_halo ? halo.start(cells) : window.start(halo.inner(cells), cells);
  }
  const DeviceMesh mesh;
  const Partition x;
  const Halo halo;
  const Window window;
  const bool of_halo;
  std::vector<double> all;
  const TensorView cells;
};
std::string name_of(bool halo) { return halo ? "halo" : "window"; }

TEST_P(WindowOver, ErrorsInFlightNameWhatWasCalled) {
  test::RankOptions options;
  options.deadline = std::chrono::seconds(1);
  for (const bool of_halo : {true, false}) {
    const bool asks = of_halo;
    on(
        test::Ranks::threads, 2,
        [&](Rank& r) {
          const std::string begin = name_of(of_halo) + ": ";
          const Ring ring(r.group(), of_halo);
          ring.start().finish();
          if (r.rank == 0) {
            WindowTransfer transfer = ring.start();
            const Error late = test::error_of([&] {
              while (asks && !transfer.done()) std::this_thread::yield();
              transfer.finish();
            });
            EXPECT_EQ(late.code(), ErrorCode::timeout) << late.what();
            EXPECT_EQ(test::ranks_of(late), std::vector<int>{1}) << late.what();
            EXPECT_EQ(std::string(late.what()).find(begin), 0U) << late.what();
            if (asks) {  // and what did not come is not unpacked
              const Error again = test::error_of([&] { transfer.finish(); });
              EXPECT_EQ(again.code(), ErrorCode::timeout) << again.what();
              EXPECT_EQ(std::string(again.what()).find(begin), 0U) << again.what();
            }
            const Error later = test::error_of([&] { return ring.start(); });
            EXPECT_EQ(later.code(), ErrorCode::timeout) << later.what();
            EXPECT_EQ(std::string(later.what()).find(begin), 0U) << later.what();
          }
          r.meet("over");
        },
        options);
  }
}

TEST_P(WindowOver, WhoDropsAnExchangeIsNamedToOthers) {
  for (const bool of_halo : {true, false})
    on(test::Ranks::threads, 2, [&](Rank& r) {
      const Ring ring(r.group(), of_halo);
      ring.start().finish();
      r.group().barrier().wait();
      const std::string why = name_of(of_halo) + ": rank 0 dropped an exchange in flight";
      if (r.rank == 0) {
        { const WindowTransfer dropped = ring.start(); }
        EXPECT_EQ(error_text(ErrorCode::aborted, [&] { r.group().barrier().wait(); }),
                  "barrier: " + why + " [group \"world\", rank 0]");
        r.meet("dropped");
      } else {
        r.meet("dropped");
        const std::string text = error_text(ErrorCode::aborted, [&] {
          ring.start().finish();
          ring.start().finish();  // the first may have found all that it wants
        });
        EXPECT_EQ(text.find(name_of(of_halo) + ": "), 0U) << text;
        EXPECT_NE(text.find("rank 0"), std::string::npos) << text;
        if (way() != "gloo") {
          EXPECT_EQ(text.find(why + " [group \"world\", rank 1"), 0U) << text;
        }
      }
      r.meet("over");
    });
}

TEST_P(WindowOver, PlansThatDifferAreToldOfWhatWasCalled) {
  for (const bool of_halo : {true, false})
    on(test::Ranks::threads, 2, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"y", 2}});
      const Partition x(make_layout(mesh, {Shard{0}}, {4}));
      const Edge edge = r.rank == 1 ? Edge::reflect() : Edge::zero();
      const Halo halo(x, {{0, 1, 1, edge}});
      const Window window(x, {WindowDim::halo(x, 0, 1, 1, edge)});
      std::vector<double> all(4);
      const TensorView cells = view(all);
      expect_error(ErrorCode::mismatch,
                   name_of(of_halo) +
                       ": the edge before dimension 0 is reflect on rank 1 and zero on rank 0; expected the "
                       "same on all ranks [y rank 1]",
                   [&] { return of_halo ? halo.start(cells) : window.start(halo.inner(cells), cells); });
      r.meet("over");
    });
}

// While an exchange is in flight, no other exchange may touch memory that it writes, or write memory that it
// reads.
TEST_P(WindowOver, MemoryOfAnExchangeInFlightIsNotTaken) {
  on(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {4}));
    const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
    std::vector<int> in(2, r.rank), other_in(2, 10 + r.rank), out(4), other_out(4), part(2);
    const auto refused = [&](const std::string& text, const auto& f) {
      expect_error(ErrorCode::bad_argument,
                   "window: " + text + " an exchange in flight; finish that one first", f);
    };
    WindowTransfer transfer = window.start(view(in), view(out));
    refused("out is still written by", [&] { return window.start(view(other_in), view(out)); });
    refused("out is still read by", [&] { return window.start_adjoint(view(other_out), view(in)); });
    refused("in is still written by", [&] { return window.start_adjoint(view(out), view(part)); });
    const WindowField fields[]{{view(other_in), view(other_out)}, {view(in), view(out)}};
    refused("out of field 1 is still written by", [&] { return window.start(fields); });
    WindowTransfer other = window.start(view(in), view(other_out));  // both read `in`
    transfer.finish();
    window.fetch(view(other_in), view(out));
    other.finish();
    EXPECT_EQ(out.front(), 11 - r.rank);
    EXPECT_EQ(other_out.back(), 1 - r.rank);
    WindowTransfer back = window.start_adjoint(view(out), view(part));
    refused("in is still written by", [&] { return window.start(view(part), view(other_out)); });
    refused("out is still read by", [&] { return window.start(view(in), view(out)); });
    back.finish();
    window.fetch(view(part), view(out));
  });
}

// An exchange in place does not change its own part. Others may read it meanwhile.
TEST_P(WindowOver, MemoryInFlightIsJudgedByItsElements) {
  on(test::Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {4, 3}));
    const std::vector<WindowDim> dims{WindowDim::halo(x, 0, 1, 1, Edge::periodic()),
                                      WindowDim::halo(x, 1, 1, 1, Edge::periodic())};
    const Window window(x, dims);
    std::vector<int> cells(4 * 5 * 2, -1), apart(4 * 5);  // (rows, columns, fields)
    const auto field = [&](std::int64_t f) {
      TensorView v = view(cells.data() + f, {4, 5});
      v.strides = {10, 2};
      return v;
    };
    const auto inner = [](TensorView v) {
      v.data += (v.strides[0] + v.strides[1]) * size_bytes(v.dtype);
      v.shape = {2, 3};
      return v;
    };
    for (std::int64_t f = 0; f < 2; ++f)
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t j = 0; j < 3; ++j)
          cells[static_cast<std::size_t>((i + 1) * 10 + (j + 1) * 2 + f)] =
              static_cast<int>(100 * f + (r.rank * 2 + i) * 10 + j);
    WindowTransfer first = window.start(inner(field(0)), field(0));
    WindowTransfer second = window.start(inner(field(1)), field(1));
    WindowTransfer third = window.start(inner(field(0)), view(apart.data(), {4, 5}));
    expect_error(ErrorCode::bad_argument,
                 "window: out is still written by an exchange in flight; finish that one first",
                 [&] { return window.start(inner(field(1)), field(1)); });
    TensorView shifted = inner(field(1));
    shifted.data -= shifted.strides[1] * size_bytes(shifted.dtype);
    std::vector<int> more(4 * 5);
    expect_error(ErrorCode::bad_argument,
                 "window: in is still written by an exchange in flight; finish that one first", [&] {
                   return window.start(shifted, view(more.data(), {4, 5}));
                 });
    first.finish();
    second.finish();
    third.finish();
    for (std::int64_t i = 0; i < 4; ++i)
      for (std::int64_t j = 0; j < 5; ++j) {
        const auto at = static_cast<std::size_t>(i * 5 + j);
        const int expected = static_cast<int>((r.rank * 2 + i + 3) % 4 * 10 + (j + 2) % 3);
        EXPECT_EQ(cells[2 * at], expected);
        EXPECT_EQ(cells[2 * at + 1], 100 + expected);
        EXPECT_EQ(apart[at], expected);
      }
  });
}

TEST_P(WindowOver, GhostCellsInFlightAreNotTaken) {
  on(test::Ranks::threads, 2, [](Rank& r) {
    const Ring ring(r.group(), true);
    std::vector<double> other(ring.all.size());
    const TensorView other_cells = view(other.data(), ring.halo.shape());
    WindowTransfer transfer = ring.start();
    expect_error(ErrorCode::bad_argument,
                 "halo: the ghost cells are still written by an exchange in flight; finish that one first",
                 [&] { return ring.start(); });
    const TensorView both[]{other_cells, ring.cells};
    expect_error(
        ErrorCode::bad_argument,
        "halo: the ghost cells of field 1 are still written by an exchange in flight; finish that one first",
        [&] { return ring.halo.start(both); });
    ring.halo.exchange(other_cells);
    transfer.finish();
    ring.halo.exchange(both);
  });
}

// On one rank, too, where an exchange is a copy. A program is right or wrong on any number of ranks.
TEST(Window, OneRankTakesNoMemoryInFlight) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Partition x(make_layout(mesh, {Shard{0}}, {4}));
  const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())});
  const std::vector<int> in(4);
  std::vector<int> out(6);
  {
    const WindowTransfer dropped = window.start(view(in), view(out));
    expect_error(ErrorCode::bad_argument,
                 "window: out is still written by an exchange in flight; finish that one first",
                 [&] { return window.start(view(in), view(out)); });
  }
  window.fetch(view(in), view(out));
}

TEST(Window, DTypesThatDifferBetweenRanksAreRefused) {
  for (const bool second : {false, true})
    run_ranks(test::Ranks::threads, 2, [&](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"y", 2}});
      const Partition x(make_layout(mesh, {Shard{0}}, {4}));
      const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())});
      std::vector<double> in(2), out(4), in2(2), out2(4);
      std::vector<float> f(2), f_out(4);
      std::vector<std::int32_t> i(2), i_out(4);
      const WindowField floats{view(f), view(f_out)}, ints{view(i), view(i_out)};
      std::vector<WindowField> fields;
      if (second) fields.push_back({view(in), view(out)});
      fields.push_back(r.rank == 0 ? floats : ints);
      try {
        window.start(fields).finish();
        ADD_FAILURE() << "rank " << r.rank << " took another dtype";
      } catch (const Error& e) {
        EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
        EXPECT_NE(std::string(e.what()).find("i32"), std::string::npos) << e.what();
      }
    });
}

TEST(Window, OneRankAsksNobody) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);  // has no group
  const Partition x(make_layout(mesh, {Shard{0}}, {4}));
  const Window window(x, {WindowDim::halo(x, 0, 2, 2, Edge::reflect())});
  const std::vector<int> in{1, 2, 3, 4};
  std::vector<int> out(8);
  window.fetch(view(in), view(out));
  EXPECT_EQ(out, (std::vector<int>{3, 2, 1, 2, 3, 4, 3, 2}));
}

TEST(Window, NumbersAreRoundedToTheDtype) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Partition x(make_layout(mesh, {Shard{0}}, {1}));
  const auto filled = [&](auto zero, double value) {
    decltype(zero) in[1]{}, out[2]{};
    Window(x, {WindowDim::halo(x, 0, 1, 0, Edge::constant(value))}).fetch(view(in, 1), view(out, 2));
    return out[0];
  };
  EXPECT_EQ(filled(0.0F, 0.1), 0.1F);
  EXPECT_EQ(filled(std::int8_t{}, 300.0), 127);
  EXPECT_EQ(filled(std::uint8_t{}, -4.0), 0);
  EXPECT_EQ(filled(std::int64_t{}, 2.6), 3);
  EXPECT_EQ(static_cast<float>(filled(bf16{}, 1.5)), 1.5F);
  // Just above the middle of two. If they were first rounded to f32, they would be in the middle, and then be
  // rounded to the even one.
  EXPECT_EQ(static_cast<float>(filled(bf16{}, 1 + 1.0 / 256 + 0x1p-40)), 1 + 1.0F / 128);
  EXPECT_EQ(static_cast<float>(filled(bf16{}, -(1 + 3.0 / 256 - 0x1p-40))), -(1 + 1.0F / 128));
  EXPECT_EQ(static_cast<float>(filled(f16{}, 1 + 0x1p-11 + 0x1p-40)), 1 + 0x1p-10F);
  EXPECT_EQ(static_cast<float>(filled(f8e4m3{}, 1 + 0x1p-4 + 0x1p-40)), 1.125F);
  EXPECT_EQ(filled(std::complex<double>{}, 2.0), std::complex<double>(2.0));
}

TEST(Window, RefusesWhatDoesNotFit) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 2}, {"tp", 2}}, 1);
  const LayoutRef layout = make_layout(mesh, {Shard{0}, Replicate{}}, {8, 3});
  const Partition x(layout);
  const auto refused = [&](const std::vector<WindowDim>& dims, const std::string& text) {
    expect_error(ErrorCode::bad_argument, text, [&] { Window(x, dims); });
  };
  refused({WindowDim::ranges(0, {{0, 5}, {3, 9}})},
          "window: dimension 0: part 1 wants [3, 9) of 8; with edge none expected within [0, 8)");
  refused({WindowDim::ranges(0, {{-9, 5}, {3, 8}}, Edge::reflect())},
          "window: dimension 0: part 0 wants [-9, 5) of 8: 9 beyond the beginning; edge reflect has at most "
          "7 there");
  refused(
      {WindowDim::ranges(0, {{0, 5}, {3, 16}}, Edge::reflect())},
      "window: dimension 0: part 1 wants [3, 16) of 8: 8 beyond the end; edge reflect has at most 7 there");
  refused({WindowDim::ranges(0, {{0, 5}, {5, 4}})},
          "window: dimension 0: part 1 wants [5, 4); expected an end that is not before its beginning");
  refused({WindowDim::ranges(0, {{0, 5}})},
          "window: dimension 0 is wanted by 1 parts; expected 2, as many as x has");
  refused({WindowDim::ranges(2, {{0, 5}})}, "window: dimension 2 of a tensor (8, 3)");
  refused({WindowDim::ranges(1, {{0, 2}}), WindowDim::ranges(1, {{0, 2}})},
          "window: dimension 1 is named twice");
  refused(
      {WindowDim::halo(x, 0, 1, 1, Edge::pole(1))},
      "window: dimension 1 is the longitude of a pole and has 3 elements; half a turn needs an even number");
  refused({WindowDim::halo(x, 0, 1, 1, Edge::pole(0))},
          "window: dimension 0: the longitude of its pole is dimension 0; expected another one of (8, 3)");
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0: a halo of -1 before and 0 after; expected at least 0",
               [&] { WindowDim::halo(x, 0, -1, 0); });
  const std::int64_t most = std::numeric_limits<std::int64_t>::max();
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0: a halo of 9223372036854775807 before and 9223372036854775807 after; "
               "expected at most 1152921504606846976",
               [&] { WindowDim::halo(x, 0, most, most, Edge::zero()); });
  expect_error(ErrorCode::bad_argument,
               "halo: dimension 0: a halo of 0 before and 9223372036854775807 after; expected at most "
               "1152921504606846976",
               [&] {
                 Halo(x, {{0, 0, most}});
               });
  refused({WindowDim::halo(x, 0, 1, 1, {Edge::Kind::periodic, 2.5})},
          "window: dimension 0: edge periodic has the value 2.5; expected 0: only a constant edge has one");
  expect_error(ErrorCode::bad_argument,
               "halo: dimension 0: edge replicate has the value 1; expected 0: only a constant edge has one",
               [&] {
                 Halo(x, {{0, 1, 1, Edge::zero(), {Edge::Kind::replicate, 1}}});
               });
  refused({{0, {{{-most - 1, 0}}, {}}, Edge::zero(), Edge::zero()}},
          "window: dimension 0: part 0 wants [-9223372036854775808, 0); expected within "
          "[-1152921504606846976, 1152921504606846976)");
  const IndexRange all{-(std::int64_t{1} << 60), std::int64_t{1} << 60};
  refused({{0, {{}, {all, all}}, Edge::zero(), Edge::zero()}},
          "window: dimension 0: part 1 wants more than 2305843009213693952 indices");
  expect_error(ErrorCode::layout,
               "window: x is Partial(sum) on tp=2; expected it reduced: a window is of whole values",
               [&] { Partition p(layout->with("tp", Partial{})); });
  expect_error(ErrorCode::bad_argument, "window: the layout is null; expected that of the tensor",
               [&] { Partition p(LayoutRef{}); });

  const auto cut = [&](std::vector<PartitionDim> dims) { return Partition(mesh, {8, 3}, std::move(dims)); };
  expect_error(ErrorCode::bad_argument, "window: dimension 0 has 1 parts; expected 2 (y=2)", [&] {
    cut({{0, {"y"}, {{{0, 8}}}}});
  });
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0: the parts do not hold each index of [0, 8) once; the first that is "
               "missing, or held twice, is "
               "about 3",
               [&] {
                 cut({{0, {"y"}, {{{0, 3}}, {{4, 8}}}}});
               });
  expect_error(ErrorCode::bad_argument, "window: dimension 0: part 1 holds [3, 9); expected within [0, 8)",
               [&] {
                 cut({{0, {"y"}, {{{0, 3}}, {{3, 9}}}}});
               });
  EXPECT_EQ(cut({PartitionDim::cut_at(0, {"y"}, {0, 3, 8})}).dim(0).parts,
            (std::vector<IndexRanges>{{{0, 3}}, {{3, 8}}}));
  expect_error(ErrorCode::bad_argument, "window: dimension 0: part 1 holds [3, 9); expected within [0, 8)",
               [&] {
                 cut({PartitionDim::cut_at(0, {"y"}, {0, 3, 9})});
               });
  expect_error(ErrorCode::bad_argument, "window: dimension 0 has 1 parts; expected 2 (y=2)", [&] {
    cut({PartitionDim::cut_at(0, {"y"}, {0, 8})});
  });
  expect_error(ErrorCode::bad_argument, "window: dimension 0: part 1 holds 2 ranges; a halo needs one range",
               [&] {
                 WindowDim::halo(cut({{0, {"y"}, {{{2, 5}}, {{0, 2}, {5, 8}}}}}), 0, 1, 1);
               });
  expect_error(ErrorCode::bad_argument, "window: axis \"y\" cuts twice; expected one dimension", [&] {
    cut({{0, {"y"}, {{{0, 3}}, {{3, 8}}}}, {1, {"y"}, {{{0, 3}}, {}}}});
  });
  expect_error(ErrorCode::bad_argument, "window: dimension 0 is cut twice; name its axes together", [&] {
    cut({{0, {"y"}, {{{0, 3}}, {{3, 8}}}}, {0, {"tp"}, {{{0, 8}}, {}}}});
  });
  expect_error(ErrorCode::bad_argument, "mesh: no axis \"z\" in y=2 x tp=2", [&] { cut({{0, {"z"}, {}}}); });

  const Window window(x, {WindowDim::ranges(1, {{0, 2}})});  // asks nobody
  std::vector<float> in(12), out(8);
  const auto fetched = [&](const ConstTensorView& from, const TensorView& to, const std::string& text) {
    expect_error(ErrorCode::bad_argument, text, [&] { window.fetch(from, to); });
  };
  fetched(view(in.data(), {4, 2}), view(out.data(), {4, 2}),
          "window: in is (4, 2); expected (4, 3), this rank's part");
  fetched(view(in.data(), {4, 3}), view(out.data(), {4, 1}),
          "window: out is (4, 1); expected (4, 2), this rank's window on (4, 3)");
  fetched(view(in.data(), {12}), view(out.data(), {4, 2}),
          "window: in is (12); expected 2 dimensions, as the whole (8, 3) has");
  std::vector<double> wide(8);
  fetched(view(in.data(), {4, 3}), view(wide.data(), {4, 2}), "window: out is f64; expected f32 as in");
  fetched(view(static_cast<float*>(nullptr), {4, 3}), view(out.data(), {4, 2}),
          "window: in (4, 3) has no memory");
  bool flags[12]{}, flags_out[8]{};
  expect_error(ErrorCode::bad_argument,
               "window: in is bool; expected a dtype that is added: an integer, or f64, f32, bf16, f16", [&] {
                 window.adjoint(view(flags_out, {4, 2}), view(flags, {4, 3}));
               });
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0 is not one of those of which a window is wanted: 1",
               [&] { (void)window.own(0); });
  const WindowField fields[]{{view(in.data(), {4, 3}), view(out.data(), {4, 2})},
                             {view(in.data(), {4, 3}), view(out.data(), {3, 2})}};
  expect_error(ErrorCode::bad_argument,
               "window: out of field 1 is (3, 2); expected (4, 2), this rank's window on (4, 3)",
               [&] { window.start(fields).finish(); });
}

}  // namespace
}  // namespace weft::window_test
