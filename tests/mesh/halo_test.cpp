// Halos that are added in place, and windows and halos that start together.
#include "weft/mesh/halo.hpp"

#include <gtest/gtest.h>

#include <functional>
#include <vector>

#include "support/errors.hpp"
#include "support/masked_backend.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/dtype.hpp"

namespace weft::halo_test {
namespace {

using test::error_text;
using test::expect_error;
using test::Rank;
using test::run_ranks;

// The ways of elements from other ranks: in shared memory, or by messages of any transport.
class HaloOver : public testing::TestWithParam<const char*> {
 protected:
  void SetUp() override {
    if (std::string(GetParam()) == "gloo" && !WEFT_HAVE_GLOO) GTEST_SKIP() << "the build found no Gloo";
  }
  static void on(int n, const std::function<void(Rank&)>& body) {
    test::RankOptions options;
    if (std::string(GetParam()) == "messages") options.factory = test::masked(test::messages_only());
    if (std::string(GetParam()) == "gloo") options.backend = "gloo";
    run_ranks(test::Ranks::threads, n, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(Way, HaloOver, testing::Values("shared", "messages", "gloo"),
                         [](const auto& way) { return std::string(way.param); });

// A ring of three ranks that hold one cell each.
Halo ring_of_cells(ProcessGroup& group, std::int64_t width) {
  const DeviceMesh mesh(group, {{"y", 3}});
  return Halo(make_layout(mesh, {Shard{0}}, {3}), {{0, width, width, Edge::periodic()}});
}

// The cell of rank 1 receives contributions in this order: from rank 0, from itself (its periodic image),
// from rank 2.
TEST_P(HaloOver, AddGoesInTheOrderOfRanks) {
  on(3, [](Rank& r) {
    const Halo halo = ring_of_cells(r.group(), 3);
    ASSERT_EQ(halo.shape(), (Shape{7}));
    // The cells of rank r: the indices r - 3 to r + 3 of the ring.
    std::vector<float> cells(7);
    for (std::size_t i = 0; i < 7; ++i)
      cells[i] = static_cast<float>(r.rank == 0 ? 1e8 : r.rank == 1 ? 1 : -1e8) * static_cast<float>(i + 1);
    const std::vector<float> before = cells;
    halo.add(view(cells.data(), halo.shape()));
    // Rank `from` adds to cell `to` its cells at to and to +- 3, in the order of the boxes, which is
    // before the beginning, within, beyond the end.
    const auto value = [](int from, std::size_t i) {
      return static_cast<float>(from == 0 ? 1e8 : from == 1 ? 1 : -1e8) * static_cast<float>(i + 1);
    };
    volatile float sum = value(r.rank, 3);
    for (int from = 0; from < 3; ++from)
      for (int i = 0; i < 7; ++i)
        if (i != 3 && (from - 3 + i + 3) % 3 == r.rank) sum = sum + value(from, static_cast<std::size_t>(i));
    EXPECT_EQ(cells[3], sum);
    for (std::size_t i = 0; i < 7; ++i)
      if (i != 3) {
        EXPECT_EQ(cells[i], before[i]);
      }
  });
}

// 256 + 1 is 256 in bf16: twice rounded it would stay so, once rounded 256 + 1 + 1 is 258.
TEST_P(HaloOver, AddOfShortFloatsRoundsOnce) {
  on(3, [](Rank& r) {
    const Halo halo = ring_of_cells(r.group(), 1);
    std::vector<bf16> cells{bf16(1.0F), bf16(256.0F), bf16(1.0F)};
    halo.add(view(cells.data(), halo.shape()));
    EXPECT_EQ(static_cast<float>(cells[1]), 258.0F);
  });
}

TEST(Halo, AddsOnOneRank) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Halo halo(make_layout(mesh, {Shard{0}}, {3}), {{0, 3, 4, Edge::periodic()}});
  std::vector<int> cells{1, 2, 3, 10, 20, 30, 100, 200, 300, 1000};
  halo.add(view(cells.data(), halo.shape()));
  EXPECT_EQ(cells, (std::vector<int>{1, 2, 3, 1111, 222, 333, 100, 200, 300, 1000}));
  std::vector<bf16> shorts{bf16(1.0F), bf16(256.0F), bf16(1.0F)};
  const Halo one(make_layout(mesh, {Shard{0}}, {1}), {{0, 1, 1, Edge::periodic()}});
  one.add(view(shorts.data(), one.shape()));
  EXPECT_EQ(static_cast<float>(shorts[1]), 258.0F);
}

TEST(Halo, AddRefusesWhatItCannotAdd) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Halo halo(make_layout(mesh, {Shard{0}}, {3}), {{0, 1, 1, Edge::periodic()}});
  std::vector<std::byte> bytes(40);
  const TensorView logical{bytes.data(), DType::boolean, Device{}, {5}, {1}};
  EXPECT_NE(error_text(ErrorCode::bad_argument, [&] { halo.add(logical); })
                .find("halo: in is bool; expected a dtype that is added: an integer, or f64, f32, bf16, f16"),
            std::string::npos);
  const TensorView elsewhere{bytes.data(), DType::f32, Device{DeviceKind::cuda, 0}, {5}, {1}};
  expect_error(ErrorCode::unsupported, "halo: add adds in the memory of the host; in is on cuda:0",
               [&] { halo.add(elsewhere); });
  expect_error(ErrorCode::bad_argument,
               "halo: the field is (2); expected (5): this rank's part (3) and its ghost cells",
               [&] { halo.add(view(reinterpret_cast<float*>(bytes.data()), {2})); });
}

TEST_P(HaloOver, CellsThatAreAddedToAreNotTaken) {
  on(3, [](Rank& r) {
    const Halo halo = ring_of_cells(r.group(), 1);
    std::vector<int> cells{1, 2, 3};
    const TensorView field = view(cells.data(), halo.shape());
    WindowTransfer adding = halo.start_add(field);
    expect_error(ErrorCode::bad_argument,
                 "halo: the inner cells are still written by an exchange in flight; finish that one first",
                 [&] { return halo.start_add(field); });
    expect_error(ErrorCode::bad_argument,
                 "halo: the ghost cells are still read by an exchange in flight; finish that one first",
                 [&] { return halo.start(field); });
    adding.finish();
    EXPECT_EQ(cells[1], 6);
    halo.exchange(field);
    EXPECT_EQ(cells, (std::vector<int>{6, 6, 6}));
  });
}

// The nodes and the cells of a plate, cut over two axes.
struct Plate {
  explicit Plate(ProcessGroup& group)
      : mesh(group, {{"y", 2}, {"x", 2}}),
        nodes(make_layout(mesh, {Shard{0}, Shard{1}}, {7, 9}), {{0, 1, 1}, {1, 2, 1, Edge::periodic()}}),
        cells(make_layout(mesh, {Shard{0}, Shard{1}}, {6, 8}), {{0, 1, 0, Edge::constant(4)}, {1, 1, 1}}) {}
  static std::vector<double> filled(const Halo& halo, int seed) {
    std::vector<double> values(static_cast<std::size_t>(halo.shape().count()));
    for (std::size_t i = 0; i < values.size(); ++i)
      values[i] = static_cast<double>(seed) + static_cast<double>(i);
    return values;
  }
  DeviceMesh mesh;
  Halo nodes, cells;
};

TEST_P(HaloOver, SeveralStartTogether) {
  on(4, [](Rank& r) {
    const Plate plate(r.group());
    for (int round = 0; round < 3; ++round) {
      std::vector<double> u = Plate::filled(plate.nodes, 100 * r.rank + round),
                          v = Plate::filled(plate.nodes, 1000), e = Plate::filled(plate.cells, -100 * r.rank);
      auto u2 = u, v2 = v, e2 = e;
      const TensorView at_nodes[]{view(u.data(), plate.nodes.shape()), view(v.data(), plate.nodes.shape())};
      const TensorView at_cells[]{view(e.data(), plate.cells.shape())};
      WindowTransfer both = start_together({{plate.nodes, at_nodes}, {plate.cells, at_cells}});
      expect_error(ErrorCode::bad_argument,
                   "halo: the ghost cells are still written by an exchange in flight; finish that one first",
                   [&] { return plate.cells.start(at_cells); });
      both.finish();
      const TensorView nodes_alone[]{view(u2.data(), plate.nodes.shape()),
                                     view(v2.data(), plate.nodes.shape())};
      plate.nodes.exchange(nodes_alone);
      plate.cells.exchange(view(e2.data(), plate.cells.shape()));
      EXPECT_EQ(u, u2);
      EXPECT_EQ(v, v2);
      EXPECT_EQ(e, e2);
    }
  });
}

TEST_P(HaloOver, ACallbackOfTheGroupsCallComes) {
  on(3, [](Rank& r) {
    const Halo halo = ring_of_cells(r.group(), 1);
    std::vector<int> cells{0, r.rank, 0};
    WindowTransfer transfer = halo.start(view(cells.data(), halo.shape()));
    ASSERT_NE(transfer.work(), nullptr);
    int called = 0;
    transfer.work()->then([&](const Error* error) { called += error == nullptr ? 1 : 100; });
    transfer.finish();
    EXPECT_EQ(called, 1);
    EXPECT_EQ(transfer.work(), nullptr);
    EXPECT_EQ(cells, (std::vector<int>{(r.rank + 2) % 3, r.rank, (r.rank + 1) % 3}));
  });
}

TEST(StartTogether, OneMessageForEachNeighbour) {
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
  const Partition x(make_layout(mesh, {Shard{0}}, {6, 5}));
  const Window near(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}),
      far(x, {WindowDim::halo(x, 0, 2, 0, Edge::periodic())});
  std::vector<float> in(10), out(20), out2(20);
  const WindowField a[]{{view(in.data(), {2, 5}), view(out.data(), {4, 5})}},
      b[]{{view(in.data(), {2, 5}), view(out2.data(), {4, 5})}};
  const WindowTransfer transfer = start_together({{near, a}, {far, b}});
  std::vector<int> to;
  for (const OpState& s : recording.posted())
    if (s.op == Op::send) to.push_back(s.peer);
  EXPECT_EQ(to, (std::vector<int>{0, 2}));
}

TEST(StartTogether, OnOneRank) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Partition x(make_layout(mesh, {Shard{0}}, {3}));
  const Window zero(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())}),
      ring(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
  const std::vector<int> in{1, 2, 3};
  std::vector<int> a(5, -1), b(5, -1);
  const WindowField of_a[]{{view(in), view(a)}}, of_b[]{{view(in), view(b)}};
  start_together({{zero, of_a}, {ring, of_b}}).finish();
  EXPECT_EQ(a, (std::vector<int>{0, 1, 2, 3, 0}));
  EXPECT_EQ(b, (std::vector<int>{3, 1, 2, 3, 1}));
  start_together(std::span<const WindowFields>{}).finish();
}

TEST(StartTogether, RefusesWhatDoesNotGoTogether) {
  run_ranks(test::Ranks::threads, 4, [](Rank& r) {
    const Plate plate(r.group());
    const Halo rows(make_layout(plate.mesh, {Shard{0}, Replicate{}}, {8, 2}), {{0, 1, 1}});
    std::vector<double> u = Plate::filled(plate.nodes, 1), w = Plate::filled(rows, 2);
    const TensorView at_nodes[]{view(u.data(), plate.nodes.shape())}, at_rows[]{view(w.data(), rows.shape())};
    expect_error(ErrorCode::bad_argument,
                 "halo: halo 1 is cut over y; expected y,x of the same mesh, as halo 0", [&] {
                   return start_together({{plate.nodes, at_nodes}, {rows, at_rows}});
                 });
    expect_error(ErrorCode::bad_argument, "halo: halo 1 is halo 0; expected each once", [&] {
      return start_together({{plate.nodes, at_nodes}, {plate.nodes, at_nodes}});
    });
    const Plate other(r.group());
    const Halo again(make_layout(plate.mesh, {Shard{0}, Shard{1}}, {7, 9}),
                     {{0, 1, 1}, {1, 2, 1, Edge::periodic()}});
    expect_error(ErrorCode::bad_argument,
                 "halo: fields of halo 0 and of halo 1 overlap; expected disjoint memory", [&] {
                   return start_together({{plate.nodes, at_nodes}, {again, at_nodes}});
                 });
  });
}

}  // namespace
}  // namespace weft::halo_test
