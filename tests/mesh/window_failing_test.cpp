// Windows between ranks that share memory, in cases where something goes wrong: transfers that are dropped
// or late while the neighbour reads, ranks that wait for something else first, and fields that differ.
// window_ways_test.cpp tests the ways in which bytes go.
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/wait.h>
#include <unistd.h>

#include <chrono>
#include <cstring>
#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "support/run_ranks.hpp"
#include "weft/base/interrupt.hpp"
#include "weft/mesh/halo.hpp"

namespace weft::window_failing_test {
namespace {

using std::chrono::milliseconds;
using test::error_of;
using test::error_text;
using test::expect_error;
using test::Rank;
using test::RankOptions;
using test::Ranks;
using test::run_ranks;

// Memory that is unmapped at the end: a process that reads it then is killed.
class Pages {
 public:
  Pages(std::int64_t count, double value) : count_(count) {
    void* const at = ::mmap(nullptr, bytes(), PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    EXPECT_NE(at, MAP_FAILED);
    data_ = static_cast<double*>(at);
    for (std::int64_t i = 0; i < count; ++i) data_[i] = value;
  }
  ~Pages() { ::munmap(data_, bytes()); }
  Pages(const Pages&) = delete;
  Pages& operator=(const Pages&) = delete;
  double* data() const { return data_; }

 private:
  std::size_t bytes() const { return static_cast<std::size_t>(count_) * sizeof(double); }
  const std::int64_t count_;
  double* data_ = nullptr;
};

struct Ring {
  Ring(ProcessGroup& group, std::int64_t columns_in)
      : mesh(group, {{"y", -1}}),
        columns(columns_in),
        x(make_layout(mesh, {Shard{0}}, {group.size(), columns})),
        window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}) {}
  ConstTensorView part(const double* data) const { return view(data, {1, columns}); }
  TensorView wide(double* data) const { return view(data, {3, columns}); }
  const DeviceMesh mesh;
  const std::int64_t columns;
  const Partition x;
  const Window window;
};

double seconds_of(const std::function<void()>& f) {
  const auto begun = std::chrono::steady_clock::now();
  f();
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - begun).count();
}

// Rank 0 drops a transfer, and its memory with it: before rank 1 reads, while it reads, and after it, in both
// directions.
TEST(WindowFailing, ADroppedTransferIsReadNoMore) {
  for (const bool adjoint : {false, true})
    for (const int delay : {-1, 0, 1, 2, 4})
      run_ranks(Ranks::threads, 2, [&](Rank& r) {
        const Ring ring(r.group(), 1 << 20);
        const Pages wide(3 * ring.columns, 0);
        auto part = std::make_unique<Pages>(ring.columns, r.rank + 1.0);
        ring.window.fetch(ring.part(part->data()), ring.wide(wide.data()));
        auto gone = std::make_unique<Pages>(3 * ring.columns, r.rank + 1.0);
        const auto start = [&] {
          return adjoint ? ring.window.start_adjoint(ring.wide(gone->data()),
                                                     view(part->data(), {1, ring.columns}))
                         : ring.window.start(ring.part(gone->data()), ring.wide(wide.data()));
        };
        if (r.rank == 0) {
          {
            const WindowTransfer dropped = start();
            r.meet("started");
            std::this_thread::sleep_for(milliseconds(std::max(delay, 0)));
          }
          gone.reset();
          part.reset();
          r.meet("gone");
          // Destroying a transfer that is complete is no failure: for adjoints, which add everything at once,
          // this holds if rank 1 has arrived.
          EXPECT_TRUE(r.group().failed() || (adjoint && delay >= 0));
        } else {
          WindowTransfer transfer = start();
          r.meet("started");
          if (delay < 0) r.meet("gone");
          try {
            transfer.finish();
          } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
            EXPECT_NE(std::string(e.what()).find("window: rank 0 dropped an exchange in flight"),
                      std::string::npos)
                << e.what();
          }
          if (delay >= 0) r.meet("gone");
        }
        r.meet("over");
      });
}

// Rank 1 drops the older of two exchanges: rank 0 gets the error in the other one, which waits behind it.
TEST(WindowFailing, AnExchangeBehindADroppedOneEnds) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const bool adjoint : {false, true})
      for (const std::int64_t columns : {4, 1000, 100'000})
        run_ranks(kind, 2, [&](Rank& r) {
          const Ring ring(r.group(), columns);
          const auto cells = [&](int rows) {
            return std::vector<double>(static_cast<std::size_t>(rows * columns));
          };
          std::vector<double> part = cells(1), wide = cells(3), other_part = cells(1), other_wide = cells(3);
          const auto start = [&](std::vector<double>& p, std::vector<double>& w) {
            return adjoint ? ring.window.start_adjoint(ring.wide(w.data()), view(p.data(), {1, columns}))
                           : ring.window.start(ring.part(p.data()), ring.wide(w.data()));
          };
          start(part, wide).finish();
          r.group().barrier().wait();
          WindowTransfer older, newer;
          if (r.rank == 0) {
            older = start(part, wide);
            newer = start(other_part, other_wide);
            r.meet("started");
            r.meet("dropped");
            const double took = seconds_of([&] {
              try {
                newer.finish();
                older.finish();
                r.group().barrier().wait();
                EXPECT_FALSE(r.group().failed()) << "not told";
                EXPECT_LE(columns, 1000);  // else rank 1 waits until rank 0 has copied its memory
              } catch (const Error& e) {
                EXPECT_EQ(e.code(), ErrorCode::aborted) << e.what();
                EXPECT_NE(std::string(e.what()).find("rank 1 dropped an exchange in flight"),
                          std::string::npos)
                    << e.what();
              }
            });
            EXPECT_LT(took, 2);
          } else {
            r.meet("started");
            // It has everything of the older one, except the part that waits for rank 0.
            older = start(part, wide);
            newer = start(other_part, other_wide);
            older = {};
            newer = {};
            r.meet("dropped");
            if (!r.group().failed())
              r.group().barrier().wait();  // few bytes: both were complete when they were dropped
          }
          r.meet("over");
        });
}

// Memory of an exchange that has thrown at the deadline is not read any more, either.
TEST(WindowFailing, ALateNeighbourDoesNotReadWhatIsGone) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes}) {
    RankOptions options;
    options.deadline = milliseconds(700);
    run_ranks(
        kind, 2,
        [](Rank& r) {
          const Ring ring(r.group(), 1 << 18);
          const Pages wide(3 * ring.columns, 0);
          auto part = std::make_unique<Pages>(ring.columns, r.rank + 1.0);
          ring.window.fetch(ring.part(part->data()), ring.wide(wide.data()));
          WindowTransfer transfer = ring.window.start(ring.part(part->data()), ring.wide(wide.data()));
          if (r.rank == 0) {
            // Time counts anew for nothing that happens meanwhile.
            const double took = seconds_of([&] {
              try {
                transfer.finish();
                ADD_FAILURE() << "rank 1 reads late";
              } catch (const Error& e) {
                EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
                EXPECT_EQ(std::vector<int>(e.ranks().begin(), e.ranks().end()), std::vector<int>{1})
                    << e.what();
              }
            });
            EXPECT_GE(took, 0.65);
            EXPECT_LE(took, 1.6);  // ranks that are asked who is there have half a second
            part.reset();
            r.meet("gone");
          } else {
            r.meet("gone");
            EXPECT_THROW(transfer.finish(), Error);
          }
          r.meet("over");
        },
        options);
  }
}

// done() notices the deadline, too, in a program that does nothing but ask.
TEST(WindowFailing, WhoAsksForEverIsToldAtTheDeadline) {
  RankOptions options;
  options.deadline = milliseconds(500);
  run_ranks(
      Ranks::threads, 2,
      [](Rank& r) {
        const Ring ring(r.group(), 4);
        const std::vector<double> part(4);
        std::vector<double> wide(12);
        ring.window.fetch(ring.part(part.data()), ring.wide(wide.data()));
        if (r.rank == 0) {
          WindowTransfer transfer = ring.window.start(ring.part(part.data()), ring.wide(wide.data()));
          try {
            while (!transfer.done()) std::this_thread::yield();
            ADD_FAILURE() << "rank 1 did not come";
          } catch (const Error& e) {
            EXPECT_EQ(e.code(), ErrorCode::timeout) << e.what();
          }
        }
        r.meet("over");
      },
      options);
}

// Rank 0 waits for a barrier. Rank 1 enters that barrier when it has received the bytes that rank 0 sends.
TEST(WindowFailing, ExchangesMoveWhileTheirRankWaitsElsewhere) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const std::int64_t columns : {3, 1000, 40'000})
      run_ranks(kind, 2, [&](Rank& r) {
        const Ring ring(r.group(), columns);
        const std::vector<double> part(static_cast<std::size_t>(columns), r.rank + 1.0);
        std::vector<double> wide(static_cast<std::size_t>(3 * columns));
        for (int step = 0; step < 3; ++step) {
          std::memset(wide.data(), 0, wide.size() * sizeof(double));
          std::vector<WindowTransfer> transfers;
          std::vector<std::vector<double>> wides(5, wide);
          for (std::vector<double>& w : wides)
            transfers.push_back(ring.window.start(ring.part(part.data()), ring.wide(w.data())));
          const double took = seconds_of([&] {
            if (r.rank == step % 2) r.group().barrier().wait();
            for (WindowTransfer& t : transfers) t.finish();
            if (r.rank != step % 2) r.group().barrier().wait();
          });
          EXPECT_LT(took, 2);
          for (const std::vector<double>& w : wides) {
            EXPECT_EQ(w.front(), 2 - r.rank);
            EXPECT_EQ(w[static_cast<std::size_t>(columns)], r.rank + 1);
            EXPECT_EQ(w.back(), 2 - r.rank);
          }
        }
      });
}

// Fields with the same total of bytes, each of which differs on the other rank.
TEST(WindowFailing, FieldsOfOtherSizesAreTold) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const std::int64_t columns : {2, 1000})
      run_ranks(kind, 2, [&](Rank& r) {
        const DeviceMesh mesh(r.group(), {{"y", 2}});
        const Partition x(make_layout(mesh, {Shard{0}}, {2, 1}));
        const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
        const auto exchange = [&](std::int64_t first, std::int64_t second) {
          const std::vector<double> a(static_cast<std::size_t>(first)), b(static_cast<std::size_t>(second));
          std::vector<double> a3(a.size() * 3), b3(b.size() * 3);
          const WindowField fields[]{{view(a.data(), {1, first}), view(a3.data(), {3, first})},
                                     {view(b.data(), {1, second}), view(b3.data(), {3, second})}};
          window.start(fields).finish();
        };
        exchange(columns, columns);
        const std::int64_t less = columns / 2, more = 2 * columns - less;
        try {
          r.rank == 0 ? exchange(less, more) : exchange(more, less);
          r.group().barrier().wait();
          ADD_FAILURE() << "not noticed";
        } catch (const Error& e) {
          EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
          const std::string text = e.what();
          const auto boxes = [](std::int64_t a, std::int64_t b) {
            return " of boxes (1, " + std::to_string(a) + ") of field 0, (1, " + std::to_string(b) +
                   ") of field 1";
          };
          EXPECT_NE(text.find(boxes(less, more)), std::string::npos) << text;
          EXPECT_NE(text.find(boxes(more, less)), std::string::npos) << text;
        }
        r.meet("over");
      });
}

// A rank whose fields are empty, or that gives none, notifies the ranks that send to it, as soon as they
// exchange.
TEST(WindowFailing, FieldsWithoutElementsAreTold) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const bool none : {false, true})
      for (const bool adjoint : {false, true})
        run_ranks(kind, 2, [&](Rank& r) {
          constexpr std::int64_t kColumns = 1000;
          const DeviceMesh mesh(r.group(), {{"y", 2}});
          const Partition x(make_layout(mesh, {Shard{0}}, {2, 1}));
          const Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
          std::vector<double> part(kColumns), wide(3 * kColumns);
          const auto exchange = [&](std::int64_t columns, bool nothing) {
            const TensorView a = view(part.data(), {1, columns}), b = view(wide.data(), {3, columns});
            const WindowField field = adjoint ? WindowField{b, a} : WindowField{a, b};
            const std::span<const WindowField> fields(&field, nothing ? 0 : 1);
            (adjoint ? window.start_adjoint(fields) : window.start(fields)).finish();
          };
          exchange(kColumns, false);
          for (int i = 0; i < 5; ++i) exchange(0, i % 2 == 0);  // on all ranks: nothing moves
          const double took = seconds_of([&] {
            try {
              exchange(r.rank == 0 ? kColumns : 0, none && r.rank == 1);
              r.group().barrier().wait();
              ADD_FAILURE() << "not noticed";
            } catch (const Error& e) {
              const std::string text = e.what(), mode = adjoint ? "sums of " : "";
              EXPECT_EQ(e.code(), ErrorCode::mismatch) << text;
              EXPECT_NE(text.find(mode + "1 field: f64, 16000 bytes"), std::string::npos) << text;
              EXPECT_NE(text.find(mode + (none ? "0 fields" : "1 field: f64") + ", 0 bytes"),
                        std::string::npos)
                  << text;
            }
          });
          EXPECT_LT(took, 2);
          r.meet("over");
        });
}

// Errors of a Halo's exchange over a link begin with "halo", also between processes, and on the rank that did
// nothing wrong.
TEST(WindowFailing, AHaloIsCalledAHalo) {
  for (const Ranks kind : {Ranks::threads, Ranks::processes})
    for (const std::int64_t columns : {4, 1000, 100'000}) {
      const auto with_halo = [&](const std::function<void(Rank&, const Halo&, const TensorView&)>& body) {
        run_ranks(kind, 2, [&](Rank& r) {
          const Ring ring(r.group(), columns);
          const Halo halo(ring.x, {{0, 1, 1, Edge::periodic()}});
          std::vector<double> all(static_cast<std::size_t>(3 * columns));
          const TensorView cells = ring.wide(all.data());
          halo.exchange(cells);
          r.group().barrier().wait();
          body(r, halo, cells);
          r.meet("over");
        });
      };
      with_halo([](Rank& r, const Halo& halo, const TensorView& cells) {
        if (r.rank == 0) {
          { const WindowTransfer dropped = halo.start(cells); }
          r.meet("dropped");
          return;
        }
        r.meet("dropped");
        const std::string text = error_text(ErrorCode::aborted, [&] {
          halo.exchange(cells);
          halo.exchange(cells);  // the first may have found all that it wants
        });
        EXPECT_EQ(text.find("halo: rank 0 dropped an exchange in flight [group \"world\", rank 1"), 0U)
            << text;
      });
      with_halo([&](Rank& r, const Halo& halo, const TensorView& cells) {
        TensorView given = cells;
        if (r.rank == 1) given.dtype = DType::i64;
        const std::string text = error_text(ErrorCode::mismatch, [&] {
          halo.exchange(given);
          r.group().barrier().wait();
        });
        EXPECT_EQ(text.find("halo: rank "), text.find("barrier: ") == 0 ? 9U : 0U) << text;
        EXPECT_NE(text.find("expected the same on all ranks"), std::string::npos) << text;
        EXPECT_EQ(text.find("window"), std::string::npos) << text;
      });
    }
}

// The group of an exchange ends before the exchange, which gets an error that names the call.
TEST(WindowFailing, AnExchangeWhoseGroupHasEndedSaysSo) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    std::vector<double> all(12), part(4), wide(12);
    WindowTransfer of_halo, of_window;
    {
      ProcessGroup group = ProcessGroup::create(r.context, "shm", r.membership("short"));
      const Ring ring(group, 4);
      const Halo halo(ring.x, {{0, 1, 1, Edge::periodic()}});
      halo.exchange(ring.wide(all.data()));
      ring.window.fetch(ring.part(part.data()), ring.wide(wide.data()));
      group.barrier().wait();
      if (r.rank == 0) {
        of_halo = halo.start(ring.wide(all.data()));
        of_window = ring.window.start(ring.part(part.data()), ring.wide(wide.data()));
      }
    }
    if (r.rank == 0) {
      // The exchanges keep their group alive, which rank 1 has left.
      EXPECT_EQ(error_text(ErrorCode::peer_lost, [&] { of_halo.finish(); })
                    .find("halo: rank 1 left the group without it"),
                0U);
      EXPECT_EQ(error_text(ErrorCode::peer_lost, [&] { of_window.finish(); })
                    .find("window: rank 1 left the group without it"),
                0U);
    }
    r.meet("over");
  });
}

TEST(WindowFailing, AnInterruptedHaloSaysSo) {
  run_ranks(Ranks::threads, 2, [](Rank& r) {
    const Ring ring(r.group(), 4);
    const Halo halo(ring.x, {{0, 1, 1, Edge::periodic()}});
    std::vector<double> all(12);
    halo.exchange(ring.wide(all.data()));
    const std::string why = "rank 0 was interrupted while it waited [group \"world\"";
    std::string text;
    if (r.rank == 0) {
      Interrupt interrupt;
      std::jthread raiser([&] {
        std::this_thread::sleep_for(milliseconds(50));
        interrupt.raise();
      });
      const Interruptible interruptible(interrupt);
      text = error_text(ErrorCode::aborted, [&] { halo.exchange(ring.wide(all.data())); });
      EXPECT_EQ(text.find("halo: " + why), 0U) << text;
    } else {
      text = error_text(ErrorCode::aborted, [&] { r.group().barrier().wait(); });
      EXPECT_EQ(text.find("exchange: " + why), 0U) << text;
    }
    r.meet("over");
  });
}

// An exchange that has failed in done() keeps no memory, though its transfer lives: the next start gets the
// failure.
TEST(WindowFailing, WhatHasFailedIsNotInFlight) {
  RankOptions options;
  options.deadline = milliseconds(1000);
  run_ranks(
      Ranks::threads, 2,
      [](Rank& r) {
        const Ring ring(r.group(), 4);
        const std::vector<double> part(4);
        std::vector<double> wide(12);
        const auto start = [&] { return ring.window.start(ring.part(part.data()), ring.wide(wide.data())); };
        start().finish();
        if (r.rank == 0) {
          WindowTransfer transfer = start();
          EXPECT_EQ(error_of([&] {
                      while (!transfer.done()) std::this_thread::yield();
                    }).code(),
                    ErrorCode::timeout);
          EXPECT_EQ(error_of(start).code(), ErrorCode::timeout);
        }
        r.meet("over");
      },
      options);
}

// A child made by fork while an exchange is in flight may destroy all objects that it inherited, and
// everything else is refused. Its parent continues.
TEST(WindowFailing, AForkedChildLeavesTheExchangeToItsParent) {
  for (const std::int64_t columns : {4, 1000, 100'000})
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      const auto ring = std::make_unique<Ring>(r.group(), columns);
      const Halo halo(ring->x, {{0, 1, 1, Edge::periodic()}});
      const bool of_halo = columns == 1000;
      const std::string name = of_halo ? "halo" : "window";
      std::vector<double> wide(static_cast<std::size_t>(3 * columns), r.rank + 1.0);
      const TensorView cells = ring->wide(wide.data());
      const auto start = [&] {
        return of_halo ? halo.start(cells) : ring->window.start(halo.inner(cells), cells);
      };
      start().finish();
      r.group().barrier().wait();
      WindowTransfer transfer;
      if (r.rank == 0) {
        transfer = start();
        const pid_t child = ::fork();
        if (child == 0) {
          int refused = 0;
          const auto refuses = [&](const auto& f) {
            try {
              f();
            } catch (const Error& e) {
              refused += e.code() == ErrorCode::unsupported &&
                         std::string(e.what()).find(name + ": this process was forked from") == 0;
            }
          };
          refuses([&] { static_cast<void>(transfer.done()); });
          refuses([&] { static_cast<void>(start()); });
          WindowTransfer other = std::move(transfer);
          refuses([&] { other.finish(); });
          other = {};
          ::_exit(refused);
        }
        int status = 0;
        EXPECT_EQ(::waitpid(child, &status, 0), child);
        EXPECT_TRUE(WIFEXITED(status) && WEXITSTATUS(status) == 3) << status;
      }
      r.meet("child");
      if (r.rank == 1) transfer = start();
      transfer.finish();
      EXPECT_EQ(wide.front(), 2 - r.rank);
      EXPECT_EQ(wide.back(), 2 - r.rank);
      start().finish();
    });
}

}  // namespace
}  // namespace weft::window_failing_test
