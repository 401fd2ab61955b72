// Windows between ranks that share memory: every way to copy bytes over a link, ranks that are late or
// absent, and ranks with different windows. window_test.cpp tests the values of windows.
#include <gtest/gtest.h>

#include <array>
#include <chrono>
#include <cstdlib>
#include <thread>

#include "backends/shm/exchange/ring.hpp"
#include "backends/shm/exchange/ways.hpp"
#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/halo.hpp"

namespace weft::window_ways_test {
namespace {

using test::expect_error;
using test::Rank;
using test::RankOptions;
using test::Ranks;
using test::run_ranks;

// Element j of row i of field f, in the step-th exchange.
std::int64_t element(std::int64_t f, std::int64_t i, std::int64_t j, std::int64_t step) {
  return ((f * 1000 + i) * 100'000 + j) * 100 + step;
}

struct Exchange {
  std::int64_t columns;  // of a row: 8 bytes each
  std::int64_t fields = 1;
  Memory memory = Memory::shared;
  bool transposed = false;  // rows lie as columns
};

// Two rows on each of n ranks in a ring, plus one row of each neighbour. All elements must be right in each
// of several steps with new values.
void check(Rank& r, const Exchange& e, int steps) {
  SCOPED_TRACE(std::to_string(e.columns) + " columns of " + std::to_string(e.fields) + " fields");
  const DeviceMesh mesh(r.group(), {{"y", -1}});
  const std::int64_t n = 2 * r.size, columns = e.columns;
  const Partition x(make_layout(mesh, {Shard{0}}, {n, columns}));
  const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
  std::vector<Tensor> in, out;
  std::vector<WindowField> fields;
  const auto as_view = [&](const Tensor& t, std::int64_t rows) {
    TensorView v = t;
    v.shape = {rows, columns};
    v.strides = e.transposed ? Strides{1, rows} : Strides{columns, 1};
    return v;
  };
  for (std::int64_t f = 0; f < e.fields; ++f) {
    in.emplace_back(r.context, Shape{2 * columns}, DType::i64, e.memory);
    out.emplace_back(r.context, Shape{4 * columns}, DType::i64, e.memory);
    fields.push_back({as_view(in.back(), 2), as_view(out.back(), 4)});
  }
  const auto at = [&](const Tensor& t, std::int64_t rows, std::int64_t i, std::int64_t j) -> std::int64_t& {
    return t.as<std::int64_t>()[static_cast<std::size_t>(e.transposed ? j * rows + i : i * columns + j)];
  };
  for (int step = 0; step < steps; ++step) {
    for (std::int64_t f = 0; f < e.fields; ++f)
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t j = 0; j < columns; ++j)
          at(in[static_cast<std::size_t>(f)], 2, i, j) = element(f, 2 * r.rank + i, j, step);
    if (step == 2 && r.rank == 0)
      std::this_thread::sleep_for(std::chrono::milliseconds(20));  // the others sleep
    window.start(fields).finish();
    std::int64_t wrong = 0;
    for (std::int64_t f = 0; f < e.fields; ++f)
      for (std::int64_t i = 0; i < 4; ++i)
        for (std::int64_t j = 0; j < columns; ++j)
          wrong += at(out[static_cast<std::size_t>(f)], 4, i, j) !=
                   element(f, (2 * r.rank + i - 1 + n) % n, j, step);
    ASSERT_EQ(wrong, 0) << "step " << step;
    // <A x, y> = <x, A' y> with y = x of the window: each element is in its own window and in one
    // neighbour's.
    std::vector<WindowField> back;
    std::vector<Tensor> dx;
    for (std::int64_t f = 0; f < e.fields; ++f) {
      dx.emplace_back(r.context, Shape{2 * columns}, DType::i64, e.memory);
      back.push_back({fields[static_cast<std::size_t>(f)].out, as_view(dx.back(), 2)});
    }
    window.start_adjoint(back).finish();
    for (std::int64_t f = 0; f < e.fields; ++f)
      for (std::int64_t i = 0; i < 2; ++i)
        for (std::int64_t j = 0; j < columns; ++j)
          wrong += at(dx[static_cast<std::size_t>(f)], 2, i, j) != 2 * element(f, 2 * r.rank + i, j, step);
    ASSERT_EQ(wrong, 0) << "adjoint of step " << step;
  }
}

// From bytes next to the flag to many slots one after the other, from shared memory and from a process's own
// memory.
const std::vector<Exchange> kExchanges{
    {1},
    {5},
    {40},
    {200},
    {1000},
    {2000, 1, Memory::local},
    {9000},
    {9000, 1, Memory::local},
    {40'000, 1, Memory::local},
    {40'000},
    {3, 8},
    {100, 8},
    {700, 8, Memory::local},
    {5000, 8, Memory::local},
    {5000, 8},
    {300, 1, Memory::shared, true},
    {300, 2, Memory::local, true},
    {9000, 1, Memory::local, true},
};
// In memory that is not shared, each way to copy is tried at first.
constexpr int kSteps = 4, kStepsOfAllWays = static_cast<int>(shm::kWays * shm::Ways::kTries) + 1;
int steps_of(const Exchange& e) { return e.memory == Memory::local ? kStepsOfAllWays : kSteps; }

TEST(WindowWays, EverySizeBetweenThreads) {
  for (const int n : {2, 3})
    run_ranks(Ranks::threads, n, [](Rank& r) {
      for (const Exchange& e : kExchanges) ASSERT_NO_FATAL_FAILURE(check(r, e, kSteps));
    });
}

TEST(WindowWays, EverySizeBetweenProcesses) {
  for (const int n : {2, 3})
    run_ranks(Ranks::processes, n, [](Rank& r) {
      for (const Exchange& e : kExchanges) ASSERT_NO_FATAL_FAILURE(check(r, e, steps_of(e)));
    });
}

// Bytes that travel beside the flag are copied run by run, and cut where the slot's first line ends: also
// within an element.
TEST(WindowWays, FewBytesOfAnyLength) {
  for (const int n : {2, 3})
    run_ranks(Ranks::threads, n, [](Rank& r) {
      const DeviceMesh mesh(r.group(), {{"y", -1}});
      const std::int64_t rows = 2 * r.size;
      const Partition x(make_layout(mesh, {Shard{0}}, {rows, 1}));
      const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
      const auto byte_of = [](std::int64_t field, std::int64_t row, std::int64_t byte) {
        return static_cast<std::byte>(31 * field + 57 * row + 7 * byte + 1);
      };
      const auto exchange = [&](const std::vector<std::pair<DType, std::int64_t>>& kinds) {
        std::vector<Tensor> in, out;
        std::vector<WindowField> fields;
        for (const auto& [dtype, columns] : kinds) {
          const std::int64_t bytes = columns * size_bytes(dtype);
          in.emplace_back(r.context, Shape{2, columns}, dtype);
          out.emplace_back(r.context, Shape{4, columns}, dtype);
          for (std::int64_t i = 0; i < 2 * bytes; ++i)
            in.back().data()[i] =
                byte_of(static_cast<std::int64_t>(in.size()), 2 * r.rank + i / bytes, i % bytes);
          fields.push_back({in.back(), out.back()});
        }
        window.start(fields).finish();
        for (std::size_t f = 0; f < kinds.size(); ++f) {
          const std::int64_t bytes = kinds[f].second * size_bytes(kinds[f].first);
          for (std::int64_t i = 0; i < 4 * bytes; ++i) {
            const std::int64_t row = (2 * r.rank + i / bytes - 1 + rows) % rows;
            ASSERT_EQ(out[f].data()[i], byte_of(static_cast<std::int64_t>(f + 1), row, i % bytes))
                << "byte " << i << " of field " << f << ", which has rows of " << bytes << " bytes";
          }
        }
      };
      for (std::int64_t bytes = 1; bytes <= 140; ++bytes)
        ASSERT_NO_FATAL_FAILURE(exchange({{DType::u8, bytes}})) << bytes;
      ASSERT_NO_FATAL_FAILURE(
          exchange({{DType::u8, 5}, {DType::c128, 3}, {DType::bf16, 1}, {DType::f64, 2}}));
      ASSERT_NO_FATAL_FAILURE(
          exchange({{DType::f64, 3}, {DType::c128, 1}, {DType::u8, 9}, {DType::i16, 21}}));
    });
}

void exchange_often(const Window& window, const std::vector<WindowField>& fields, int times) {
  for (int i = 0; i < times; ++i) window.start(fields).finish();
}

// Many packed bytes in short runs. The receiver tries to write them around the caches, too, also to places
// that begin within a cache line.
TEST(WindowWays, ManyPackedBytesAreUnpackedBothWays) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", -1}});
    constexpr std::int64_t kPlanes = 2048,
                           kRun = 515;  // of which one in six is looked at: at least one of each cache line
    const Partition x(make_layout(mesh, {Shard{1}}, {kPlanes, 4, kRun}));
    const Window window(x, {WindowDim::halo(x, 1, 1, 0, Edge::periodic())});
    const Tensor in(r.context, Shape{kPlanes, 2, kRun}, DType::i64, Memory::local);
    const Tensor out(r.context, window.window_shape(in.shape()), DType::i64, Memory::local);
    const auto value = [](std::int64_t plane, std::int64_t row, std::int64_t j, std::int64_t step) {
      return ((plane * 4 + row) * kRun + j) * 100 + step;
    };
    const auto at = [](const Tensor& t, std::int64_t plane, std::int64_t row,
                       std::int64_t j) -> std::int64_t& {
      return t.as<std::int64_t>()[static_cast<std::size_t>((plane * t.shape()[1] + row) * kRun + j)];
    };
    constexpr int kBefore = static_cast<int>((shm::kWays + 1) * shm::Ways::kTries),
                  kTimes = kBefore + 2 * static_cast<int>(shm::Unpackings::kTries) + 1;
    exchange_often(window, {{in, out}}, kBefore - 1);
    for (int step = kBefore - 1; step < kTimes; ++step) {
      for (std::int64_t p = 0; p < kPlanes; ++p)
        for (std::int64_t i = 0; i < 2; ++i)
          for (std::int64_t j = 0; j < kRun; j += 6) at(in, p, i, j) = value(p, 2 * r.rank + i, j, step);
      window.start(in, out).finish();
      std::int64_t wrong = 0;
      for (std::int64_t p = 0; p < kPlanes; ++p)
        for (std::int64_t i = 0; i < 3; ++i)
          for (std::int64_t j = 0; j < kRun; j += 6)
            wrong += at(out, p, i, j) != value(p, (2 * r.rank + i + 3) % 4, j, step);
      ASSERT_EQ(wrong, 0) << "step " << step;
    }
  });
}

TEST(WindowWays, WithoutCopiesByTheKernel) {
  ::setenv("WEFT_SINGLE_COPY", "off", 1);
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    for (const Exchange& e : kExchanges) ASSERT_NO_FATAL_FAILURE(check(r, e, 3));
  });
  ::unsetenv("WEFT_SINGLE_COPY");
}

// There are more exchanges than a link has slots. They finish in another order, while ranks take turns to be
// late.
TEST(WindowWays, ManyInFlight) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    run_ranks(kind, 3, [](Rank& r) {
      constexpr int kFlights = shm::kExchangeSlots + 3;
      const DeviceMesh mesh(r.group(), {{"y", 3}});
      for (const std::int64_t columns : {4, 300, 20'000}) {
        const Partition x(make_layout(mesh, {Shard{0}}, {3, columns}));
        const Window both(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}),
            one_way(x, {WindowDim::halo(x, 0, 1, 0, Edge::periodic())});
        const auto size = static_cast<std::size_t>(columns);
        for (int round = 0; round < 3; ++round) {
          std::vector<std::vector<int>> in, out;
          std::vector<WindowTransfer> flights;
          for (int i = 0; i < kFlights; ++i) {
            if ((i + round) % 3 == r.rank && columns == 300)
              std::this_thread::sleep_for(std::chrono::milliseconds(3));
            const bool two = i % 2 == 0;
            in.emplace_back(size, 100 * i + r.rank);
            out.emplace_back(size * (two ? 3 : 2), -1);
            flights.push_back((two ? both : one_way)
                                  .start(view(in.back().data(), {1, columns}),
                                         view(out.back().data(), {two ? 3 : 2, columns})));
          }
          for (std::size_t i = 0; i < flights.size(); ++i)
            flights[round == 1 ? flights.size() - 1 - i : i].finish();
          for (int i = 0; i < kFlights; ++i) {
            const std::vector<int>& o = out[static_cast<std::size_t>(i)];
            for (std::size_t row = 0; row < o.size() / size; ++row)
              for (const std::size_t j : {std::size_t{0}, size - 1})
                ASSERT_EQ(o[row * size + j], 100 * i + (r.rank + static_cast<int>(row) + 2) % 3);
          }
        }
      }
    });
}

TEST(WindowWays, ARankThatDoesNotComeIsNamed) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes}) {
    RankOptions options;
    options.deadline = std::chrono::milliseconds(1500);
    run_ranks(
        kind, 2,
        [](Rank& r) {
          const DeviceMesh mesh(r.group(), {{"y", 2}});
          const Partition x(make_layout(mesh, {Shard{0}}, {4}));
          const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())});
          const std::vector<int> in(2, r.rank);
          std::vector<int> out(4);
          window.fetch(view(in), view(out));
          if (r.rank == 0) {
            try {
              window.fetch(view(in), view(out));
              ADD_FAILURE() << "nobody came";
            } catch (const Error& e) {
              EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
              EXPECT_EQ(std::vector<int>(e.ranks().begin(), e.ranks().end()), std::vector<int>{1})
                  << e.what();
            }
            EXPECT_THROW(window.fetch(view(in), view(out)), Error);  // the group has failed
          }
          r.meet("over");
        },
        options);
  }
}

TEST(WindowWays, ARankThatLeavesIsLost) {
  run_ranks(Ranks::processes, 2, [](Rank& r) {
    const std::vector<float> in(5000, 1);
    std::vector<float> out(10'000);
    {
      const DeviceMesh mesh(r.group(), {{"y", 2}});
      const Partition x(make_layout(mesh, {Shard{0}}, {10'000}));
      const Window window(x, {WindowDim::ranges(0, {{0, 10'000}, {0, 10'000}})});
      window.fetch(view(in), view(out));
      if (r.rank == 0) {
        try {
          window.fetch(view(in), view(out));
          ADD_FAILURE() << "rank 1 has left";
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::peer_lost) << e.what();
        }
      }
    }
  });
}

TEST(WindowWays, DroppingAnExchangeFailsTheGroup) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {4}));
    const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())});
    const std::vector<int> in(2);
    std::vector<int> out(4);
    window.fetch(view(in), view(out));
    if (r.rank == 0) {
      { const WindowTransfer dropped = window.start(view(in), view(out)); }
      expect_error(ErrorCode::aborted,
                   "barrier: window: rank 0 dropped an exchange in flight [group \"world\", rank 0]",
                   [&] { r.group().barrier().wait(); });
    } else {
      std::this_thread::sleep_for(std::chrono::milliseconds(20));
      EXPECT_THROW(
          {
            window.fetch(view(in), view(out));
            r.group().barrier().wait();
          },
          Error);
    }
  });
}

// Ranks with different arguments: every rank gets the name of the argument, and the values of two of the
// ranks.
void expect_mismatch(int ranks, const std::string& text,
                     const std::function<void(Rank&, const DeviceMesh&)>& body) {
  run_ranks(Ranks::threads, ranks, [&](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", -1}});
    try {
      body(r, mesh);
      ADD_FAILURE() << "rank " << r.rank << " noticed nothing";
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
      EXPECT_NE(std::string(e.what()).find(text), std::string::npos) << e.what();
    }
  });
}

TEST(WindowPlans, ThatDifferAreToldAtTheFirstStart) {
  const auto fetch = [](const Partition& x, const std::vector<WindowDim>& dims, int fields = 1,
                        bool ints = false) {
    const Window window(x, dims);
    std::vector<std::vector<float>> memory;
    std::vector<WindowField> list;
    for (int f = 0; f < fields; ++f) {
      const Shape part{window.part_size(0), 2}, wide{window.window_size(0), 2};
      const auto room = [&](const Shape& shape) {
        return memory.emplace_back(static_cast<std::size_t>(shape.count())).data();
      };
      float* const in = room(part);
      list.push_back({view(in, part), view(room(wide), wide)});
      if (ints) list.back().in.dtype = list.back().out.dtype = DType::i32;
    }
    window.start(list).finish();
  };
  const auto cut = [](const DeviceMesh& mesh) { return Partition(make_layout(mesh, {Shard{0}}, {9, 2})); };
  expect_mismatch(3,
                  "window: what part 0 wants of dimension 0 is [[0, 3)] on rank 1 and [[-1, 4)] on rank 0; "
                  "expected the same "
                  "on all ranks",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    const std::int64_t wide = r.rank == 1 ? 0 : 1;
                    fetch(cut(mesh), {WindowDim::halo(cut(mesh), 0, wide, wide, Edge::zero())});
                  });
  expect_mismatch(2, "window: the edge before dimension 0 is reflect on rank 1 and constant(2.5) on rank 0",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    fetch(cut(mesh), {WindowDim::halo(cut(mesh), 0, 1, 1,
                                                      r.rank == 1 ? Edge::reflect() : Edge::constant(2.5))});
                  });
  expect_mismatch(2, "window: the list of fields is 1 field: i32 on rank 1 and 1 field: f32 on rank 0",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    fetch(cut(mesh), {WindowDim::halo(cut(mesh), 0, 1, 1, Edge::zero())}, 1, r.rank == 1);
                  });
  expect_mismatch(
      2, "window: the list of fields is 3 fields: f32, f32, f32 on rank 1 and 1 field: f32 on rank 0",
      [&](Rank& r, const DeviceMesh& mesh) {
        fetch(cut(mesh), {WindowDim::halo(cut(mesh), 0, 1, 1, Edge::zero())}, r.rank == 1 ? 3 : 1);
      });
  expect_mismatch(3,
                  "window: rank 2 has dimension 1 of those wanted 1 where rank 0 has the number of "
                  "dimensions 1; expected "
                  "the same on all ranks [y rank 2]",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    std::vector<WindowDim> dims{WindowDim::halo(cut(mesh), 0, 1, 1, Edge::zero())};
                    if (r.rank == 2) dims.push_back(WindowDim::halo(cut(mesh), 1, 0, 0, Edge::zero()));
                    fetch(cut(mesh), dims);
                  });
  expect_mismatch(2, "window: what part 1 wants of dimension 0 is [[0, 1), [0, 1), [0, 1), [0, 1)",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    WindowDim many{0, {{{0, 1}}, IndexRanges(100, IndexRange{0, 1})}, {}, {}};
                    if (r.rank == 1) many.wanted[1][99] = {1, 2};  // beyond what a text has
                    fetch(cut(mesh), {many});
                  });
  expect_mismatch(2, "window: what part 0 holds of dimension 0 is [[0, 4)] on rank 1 and [[0, 5)] on rank 0",
                  [&](Rank& r, const DeviceMesh& mesh) {
                    const std::int64_t at = r.rank == 1 ? 4 : 5;
                    const Partition x(mesh, {9, 2}, {{0, {"y"}, {{{0, at}}, {{at, 9}}}}});
                    fetch(x, {WindowDim::ranges(0, {{0, 9}, {0, 9}})});
                  });
}

TEST(WindowPlans, FieldsThatDifferLaterAreTold) {
  for (const int change : {0, 1, 2})
    expect_mismatch(2,
                    change == 0   ? "1 field: i32, 4 bytes"
                    : change == 1 ? "2 fields: f32, f32, 8 bytes"
                                  : "sums of 1 field: f32, 4 bytes",
                    [&](Rank& r, const DeviceMesh& mesh) {
                      const Partition x(make_layout(mesh, {Shard{0}}, {4}));
                      const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::zero())});
                      std::vector<float> in(2), out(4), in2(2), out2(4);
                      std::vector<std::int32_t> ints(2), ints_out(4);
                      window.fetch(view(in), view(out));
                      if (r.rank == 0) {
                        window.fetch(view(in), view(out));
                      } else if (change == 0) {
                        window.fetch(view(ints), view(ints_out));
                      } else if (change == 1) {
                        const WindowField two[]{{view(in), view(out)}, {view(in2), view(out2)}};
                        window.start(two).finish();
                      } else {
                        window.adjoint(view(out), view(in));
                      }
                      // The rank may have received the data before the failure. Then this barrier reports the
                      // failure.
                      r.group().barrier().wait();
                    });
}

// Fields in one array: overlap is decided by their elements, not by the bytes between the first and the last.
TEST(WindowMemory, InterleavedFieldsAreApart) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const DeviceMesh mesh(r.group(), {{"y", 2}});
    const Partition x(make_layout(mesh, {Shard{0}}, {6, 3}));
    const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
    std::vector<int> cells(5 * 3 * 3, -1);  // (rows, columns, fields): two fields and one that stays
    const auto field = [&](std::int64_t row, std::int64_t rows, std::int64_t f) {
      TensorView v = view(cells.data() + row * 9 + f, {rows, 3});
      v.strides = {9, 3};
      return v;
    };
    for (std::int64_t i = 0; i < 3; ++i)
      for (std::int64_t j = 0; j < 3; ++j)
        for (std::int64_t f = 0; f < 2; ++f)
          cells[static_cast<std::size_t>((i + 1) * 9 + j * 3 + f)] =
              static_cast<int>((r.rank * 3 + i) * 10 + j + 100 * f);
    const WindowField fields[]{{field(1, 3, 0), field(0, 5, 0)}, {field(1, 3, 1), field(0, 5, 1)}};
    window.start(fields).finish();
    for (std::int64_t i = 0; i < 5; ++i)
      for (std::int64_t j = 0; j < 3; ++j)
        for (std::int64_t f = 0; f < 3; ++f)
          EXPECT_EQ(cells[static_cast<std::size_t>(i * 9 + j * 3 + f)],
                    f == 2 ? -1 : (r.rank * 3 + i + 5) % 6 * 10 + j + 100 * f);
    const auto refused = [&](const std::vector<WindowField>& list, const std::string& text) {
      expect_error(ErrorCode::bad_argument, text, [&] { window.start(list).finish(); });
    };
    std::vector<int> apart(9);
    refused({{field(1, 3, 0), field(0, 5, 0)}, {view(apart.data(), {3, 3}), field(0, 5, 0)}},
            "window: in of field 0 and out of field 1 overlap; expected disjoint memory");
    std::vector<int> apart2(9);
    refused({{view(apart2.data(), {3, 3}), field(0, 5, 1)}, {view(apart.data(), {3, 3}), field(0, 5, 1)}},
            "window: out of field 0 and out of field 1 overlap; expected disjoint memory");
    refused({{field(1, 3, 0), field(0, 5, 0)}, {field(0, 3, 0), field(0, 5, 1)}},
            "window: in of field 1 and out of field 0 overlap; expected disjoint memory");
    TensorView flat = field(0, 5, 0);
    flat.strides = {0, 3};
    refused({{view(apart.data(), {3, 3}), flat}},
            "window: out has strides (0, 3) of (5, 3): elements share memory; expected each in a place of "
            "its own");
    TensorView far = field(1, 3, 0);
    far.strides = {std::int64_t{1} << 61, 3};
    refused({{far, field(0, 5, 0)}},
            "window: in has strides (2305843009213693952, 3) of (3, 3); expected elements within 2^63 bytes");
    far.strides = {3};
    refused({{far, field(0, 5, 0)}}, "window: in has 1 strides for 2 dimensions");
  });
}

TEST(WindowMemory, StridedFieldsOfOtherSizesAreJudgedByTheirBytes) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 1}}, 0);
  const Partition x(make_layout(mesh, {Shard{0}}, {4}));
  const Window window(x, {WindowDim::ranges(0, {{0, 4}})});
  std::vector<double> cells(64);
  const auto at = [&](std::int64_t byte, DType dtype, std::int64_t stride) {
    TensorView v = view(cells.data(), {4});
    v.data += byte;
    v.dtype = dtype;
    v.strides = {stride};
    return v;
  };
  const auto fetched = [&](const TensorView& a_in, const TensorView& a_out, const TensorView& b_in,
                           const TensorView& b_out) {
    const WindowField fields[]{{a_in, a_out}, {b_in, b_out}};
    window.start(fields).finish();
  };
  // Every 16 bytes: 8 of a double, 4 of a float behind it, 2 and 2 of shorts.
  fetched(at(256, DType::f64, 1), at(0, DType::f64, 2), at(320, DType::f32, 1), at(8, DType::f32, 4));
  fetched(at(256, DType::i16, 1), at(12, DType::i16, 8), at(320, DType::i16, 1), at(14, DType::i16, 8));
  expect_error(ErrorCode::bad_argument,
               "window: out of field 0 and out of field 1 overlap; expected disjoint memory", [&] {
                 fetched(at(256, DType::f64, 1), at(0, DType::f64, 2), at(320, DType::f32, 1),
                         at(4, DType::f32, 4));
               });
  expect_error(ErrorCode::bad_argument,
               "window: out of field 0 and out of field 1 overlap; expected disjoint memory", [&] {
                 fetched(at(256, DType::f64, 1), at(0, DType::f64, 2), at(320, DType::i16, 1),
                         at(54, DType::i16, -8));
               });
  // 3 and 5 apart: they meet only at 15.
  expect_error(ErrorCode::bad_argument,
               "window: out of field 0 and out of field 1 overlap; expected disjoint memory", [&] {
                 fetched(at(256, DType::u8, 1), at(6, DType::u8, 3), at(320, DType::u8, 1),
                         at(0, DType::u8, 5));
               });
  fetched(at(256, DType::u8, 1), at(8, DType::u8, 3), at(320, DType::u8, 1), at(0, DType::u8, 5));
}

TEST(WindowBounds, TurnsAndBoxesAreBounded) {
  Context context;
  const DeviceMesh mesh = DeviceMesh::arithmetic(context, {{"y", 2}}, 0);
  const Partition x(make_layout(mesh, {Shard{0}}, {8, 8}));
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0: part 0 wants [-1000000000000, 4) of 8: 125000000000 turns of edge "
               "periodic; expected "
               "at most 65536",
               [&] {
                 Window(x, {WindowDim::ranges(0, {{-1'000'000'000'000, 4}, {4, 8}}, Edge::periodic())});
               });
  expect_error(ErrorCode::bad_argument,
               "window: dimension 0: part 1 wants [4, 1000000000000) of 8: 124999999999 turns of edge "
               "periodic; expected "
               "at most 65536",
               [&] {
                 Window(x, {WindowDim::ranges(0, {{0, 4}, {4, 1'000'000'000'000}}, Edge::periodic())});
               });
  expect_error(ErrorCode::bad_argument,
               "window: dimension 1: windows have up to 2001 runs here, 4004001 with the dimensions before; "
               "expected at "
               "most 1048576",
               [&] {
                 Window(x, {WindowDim::ranges(0, {{-8000, 8008}, {0, 8}}, Edge::periodic()),
                            WindowDim::ranges(1, {{-8000, 8008}}, Edge::periodic())});
               });
  // Other edges are one run, however wide.
  const Window wide(x, {WindowDim::ranges(0, {{-1'000'000'000'000, 4}, {4, 8}}, Edge::zero())});
  EXPECT_EQ(wide.window_size(0), 1'000'000'000'004);
}

}  // namespace
}  // namespace weft::window_ways_test
