// A rank with a fault writes nonsense to the words over which windows are exchanged in shared memory: one
// word a case, and then at random. The others get an Error that says which word it is, or wrong values.
// They do not crash, and they do not hang.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <random>
#include <string>
#include <utility>
#include <vector>

#include "backends/shm/exchange/ring.hpp"
#include "host/arena.hpp"
#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/scribbled_job.hpp"
#include "weft/mesh/halo.hpp"

namespace weft::window_damaged_test {
namespace {

using namespace std::chrono_literals;
using shm::Buffer;
using shm::Control;
using shm::Holds;
using shm::Slot;
using test::Rank;
using test::RankOptions;
using test::Ranks;
using test::ScribbledJob;
using test::SharedMapping;
using testing::HasSubstr;

// Rows of a ring of ranks, two each, and windows on them with one of either neighbour.
struct Halo {
  Halo(const DeviceMesh& mesh, std::int64_t columns)
      : x(make_layout(mesh, {Shard{0}}, {2 * mesh.size(), columns})),
        window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())}) {}
  Partition x;
  Window window;
};

class WindowDamaged : public testing::Test {
 protected:
  void SetUp() override {
    if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  }
  // Where rank 1 sends to rank 0, in a group of two.
  static shm::Ring* ring(Rank& r) {
    for (const SharedMapping& m : test::shared_mappings("region")) {
      if (m.bytes < Control::bytes(2) || m.bytes >= Control::bytes(2) + 4096) continue;
      const std::uint64_t place = Control(reinterpret_cast<std::byte*>(m.data), 2).ring(1, 0).load();
      if (place == 0) continue;
      std::byte* const segment =
          arena_of(r.context).segment_base(static_cast<std::uint32_t>((place >> 48) - 1));
      return reinterpret_cast<shm::Ring*>(segment + (place & ((std::uint64_t{1} << 48) - 1)));
    }
    ADD_FAILURE() << "no ring";
    return nullptr;
  }
  struct Case {
    std::int64_t columns;
    Memory memory;
    bool adjoint = false;
    const char* single_copy = "off";
  };
  // Rank 1 begins the second exchange, then damages its slot (number 1) to rank 0. Rank 0 then takes its
  // part, and fails with such a text; none: it does not fail.
  static void check(const Case& c, const std::function<void(Slot&)>& damages, const std::string& text,
                    ErrorCode code = ErrorCode::corrupt) {
    const auto body = [&](Rank& r) {
      ::setenv("WEFT_SINGLE_COPY", c.single_copy, 1);
      const DeviceMesh mesh(r.group(), {{"y", -1}});
      const Halo halo(mesh, c.columns);
      const Tensor part(r.context, {2, c.columns}, DType::f64, c.memory),
          window(r.context, {4, c.columns}, DType::f64, c.memory);
      std::memset(part.data(), 0, static_cast<std::size_t>(part.bytes()));
      std::memset(window.data(), 0, static_cast<std::size_t>(window.bytes()));
      const auto start = [&] {
        return c.adjoint ? halo.window.start_adjoint(window, part) : halo.window.start(part, window);
      };
      for (int i = 0; i < 2; ++i) start().finish();
      r.meet("exchanged");
      try {
        WindowTransfer transfer;
        if (r.rank == 1) {
          transfer = start();
          shm::Ring* const all = ring(r);
          ASSERT_NE(all, nullptr);
          std::uint64_t newest = 0;
          for (const Slot& slot : all->slots) newest = std::max(newest, slot.sequence.load());
          ASSERT_GT(newest, 0u);
          damages(all->slots[(newest - 1) % shm::kExchangeSlots]);
        }
        r.meet("damaged");
        if (r.rank == 0) transfer = start();
        transfer.finish();
        if (r.rank == 0 && !text.empty()) ADD_FAILURE() << "no error; expected one with: " << text;
      } catch (const Error& e) {
        if (r.rank == 0) {
          EXPECT_THAT(e.what(), HasSubstr(text.empty() ? "no error" : text));
          EXPECT_EQ(name(e.code()), name(code)) << e.what();
        }
      }
      r.meet("told");
    };
    RankOptions options;
    options.deadline = 5s;
    run_ranks(Ranks::processes, 2, body, options);
  }
  static constexpr std::int64_t kFew = 4, kMany = 2000;
};

TEST_F(WindowDamaged, WhatASlotHolds) {
  const std::string text = "rank 1's words in shared memory are damaged: what a slot holds is ";
  check(
      {kFew, Memory::shared}, [](Slot& s) { s.holds = Holds::in_place; }, text + "1; expected 0");
  check(
      {kMany, Memory::shared}, [](Slot& s) { s.holds = static_cast<Holds>(77); },
      text + "77; expected 0 to 2");
  check(
      {kFew, Memory::local, true}, [](Slot& s) { s.holds = static_cast<Holds>(65535); },
      text + "65535; expected 0");
}

TEST_F(WindowDamaged, ASlotThatWasPackedNamesNoPlaces) {
  check(
      {kMany, Memory::local}, [](Slot& s) { s.holds = Holds::in_place; },
      "rank 1's words in shared memory are damaged: the number of a slot's boxes is 0; expected 1 or more");
}

TEST_F(WindowDamaged, TheCountOfSlotsEmptied) {
  check(
      {kFew, Memory::shared}, [](Slot& s) { s.taken = 1000; },
      "rank 1's words in shared memory are damaged: its count of slots emptied is 1000; expected up to");
}

TEST_F(WindowDamaged, ThePlaceOfAField) {
  const std::string text = "rank 1's words in shared memory are damaged: the place of field 0 is ";
  for (const bool adjoint : {false, true}) {
    const Case c{kMany, Memory::shared, adjoint};
    check(
        c, [](Slot& s) { s.places[0].segment = 200; }, text);
    check(
        c, [](Slot& s) { s.places[0].segment = 0xffffffff; }, text);
    check(
        c, [](Slot& s) { s.places[0].kind = Buffer::pointer; }, text);
    check(
        c, [](Slot& s) { s.places[0].kind = static_cast<Buffer::Kind>(77); }, text);
    check(
        c, [](Slot& s) { s.places[0].offset = std::uint64_t{1} << 45; }, text);
    check(
        c, [](Slot& s) { s.places[0].offset = ~std::uint64_t{7}; }, text);
  }
}

TEST_F(WindowDamaged, TheBoxes) {
  const Case c{kMany, Memory::shared};
  const auto boxes = [](const std::function<void(Slot&)>& change) {
    return [=](Slot& s) {
      s.boxes_id = 4711;  // read anew
      change(s);
    };
  };
  const std::string text = "rank 1's words in shared memory are damaged: ";
  check(c, boxes([](Slot& s) { s.boxes[0] = 5; }), text + "the field of a box is 5; expected 0");
  check(c, boxes([](Slot& s) { s.boxes[1] = INT64_MAX; }),
        text +
            "the place of a box is offset 9223372036854775807; expected one from which its steps stay within "
            "2^56 bytes");
  check(c, boxes([](Slot& s) { s.boxes[1] = std::int64_t{1} << 40; }), text + "the place of field 0 is ");
  check(c, boxes([](Slot& s) { s.boxes[1] = -(std::int64_t{1} << 40); }), text + "the place of field 0 is ");
  check(c, boxes([](Slot& s) { s.boxes[3] = INT64_MIN; }), text + "the place of a box is offset ");
  check(c, boxes([](Slot& s) { s.boxes[3] = -(std::int64_t{1} << 30); }), text + "the place of field 0 is ");
}

// A box gets indices that its sender has not, behind the end of the segment; or more than a slot holds.
TEST_F(WindowDamaged, TheIndicesOfABox) {
  for (const auto& [elements, text] :
       {std::pair{std::int64_t{2000}, "the place of field 0 is "},
        {static_cast<std::int64_t>(shm::kListNumbers) + 1,
         "what a slot holds is places of boxes with many indices; expected packed bytes"}})
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      ExchangePlan plan;
      plan.fields = {DType::f64};
      plan.sends = plan.receives = {{1 - r.rank, {{0, 0, {elements}, {1}}}}};
      const Tensor in = Tensor::zeros(r.context, {elements}, DType::f64, Memory::shared),
                   out = Tensor::zeros(r.context, {elements}, DType::f64, Memory::shared);
      const ExchangeField field{in.data(), out.data()};
      PersistentExchange exchange = r.group().make_exchange(plan);
      for (int i = 0; i < 2; ++i) exchange.start({&field, 1}).wait();
      r.meet("exchanged");
      try {
        Work work;
        if (r.rank == 1) {
          work = exchange.start({&field, 1});
          shm::Ring* const all = ring(r);
          ASSERT_NE(all, nullptr);
          Slot& slot = all->slots[2];
          ASSERT_EQ(slot.holds, Holds::in_place);
          slot.boxes_id = 4711;
          slot.boxes[0] = shm::kListed;
          std::memset(slot.apart, 0xff, sizeof(slot.apart));
        }
        r.meet("damaged");
        if (r.rank == 0) work = exchange.start({&field, 1});
        work.wait();
        if (r.rank == 0) ADD_FAILURE() << "no error; expected one with: " << text;
      } catch (const Error& e) {
        if (r.rank == 0) {
          EXPECT_THAT(e.what(),
                      HasSubstr(std::string("rank 1's words in shared memory are damaged: ") + text));
          EXPECT_EQ(name(e.code()), name(ErrorCode::corrupt)) << e.what();
        }
      }
      r.meet("told");
    });
}

TEST_F(WindowDamaged, TheAddressOfAFieldThatTheKernelReads) {
  check(
      {kMany, Memory::local, false, "pull"},
      [](Slot& s) {
        s.holds = Holds::by_kernel;
        s.boxes_id = 4711;
        s.places[0] = {Buffer::remote, 0, 4711};
      },
      "rank 0 cannot read the memory of rank 1", ErrorCode::system);
}

// Rank 1 names memory that it has not, before rank 0 exchanges with it for the first time.
TEST_F(WindowDamaged, ThePlaceOfARing) {
  for (const std::uint64_t place :
       {std::uint64_t{201} << 48, (std::uint64_t{1} << 48) | (std::uint64_t{1} << 46)})
    run_ranks(Ranks::processes, 2, [&](Rank& r) {
      ExchangePlan plan;
      plan.fields = {DType::f64};
      plan.sends = plan.receives = {{1 - r.rank, {{0, 0, {kFew}, {1}}}}};
      std::vector<double> in(kFew), out(kFew);
      const ExchangeField field{in.data(), out.data()};
      if (r.rank == 1) {
        r.group();  // it is made
        int regions = 0;
        for (const SharedMapping& m : test::shared_mappings("region"))
          if (m.bytes >= Control::bytes(2) && m.bytes < Control::bytes(2) + 4096) {
            Control(reinterpret_cast<std::byte*>(m.data), 2).ring(1, 0).store(place);
            ++regions;
          }
        EXPECT_GT(regions, 0);
      } else {
        r.group();
      }
      r.meet("damaged");
      if (r.rank == 0) {
        EXPECT_THAT(
            test::error_text(ErrorCode::corrupt,
                             [&] {
                               r.group().exchange(plan, {&field, 1}).wait();
                             }),
            HasSubstr("exchange: rank 1's words in shared memory are damaged: the place of its memory for "
                      "rank 0 is "));
      }
      r.meet("told");
    });
}

TEST_F(WindowDamaged, ATextWithoutAnEnd) {
  check(
      {kFew, Memory::shared},
      [](Slot& s) {
        s.form ^= 1;
        std::memset(s.about, 'x', sizeof(s.about));
      },
      "rank 1 gave " + std::string(shm::kAboutBytes, 'x') + ", and rank 0", ErrorCode::mismatch);
}

// Fields of many sizes, in memory of both kinds, and their adjoints.
class Exchanges final : public ScribbledJob::Calls {
 public:
  Exchanges(Rank& r, test::KeptBuffers& buffers, ProcessGroup& group)
      : rank_(r), buffers_(buffers), mesh_(group, {{"y", -1}}) {
    for (const std::int64_t columns : kColumns) halos_.emplace_back(mesh_, columns);
    exchange(0, Memory::shared, false).finish();  // the rings are there
  }
  std::function<void()> make(std::mt19937_64& random) override {
    const auto number = [&](std::uint64_t below) { return static_cast<std::size_t>(random() % below); };
    const std::size_t which = number(kColumns.size());
    const Memory memory = number(2) == 0 ? Memory::local : Memory::shared;
    const auto transfer = std::make_shared<WindowTransfer>(exchange(which, memory, number(3) == 0));
    return [transfer] { transfer->finish(); };
  }

 private:
  static constexpr std::array<std::int64_t, 4> kColumns{3, 200, 3000, 30'000};
  WindowTransfer exchange(std::size_t which, Memory memory, bool adjoint) {
    const std::int64_t columns = kColumns[which];
    TensorView part = buffers_.view_of(rank_, memory, 0, 2 * columns),
               window = buffers_.view_of(rank_, memory, 1, 4 * columns);
    part.shape = {2, columns};
    window.shape = {4, columns};
    part.strides = window.strides = Strides{columns, 1};
    return adjoint ? halos_[which].window.start_adjoint(window, part)
                   : halos_[which].window.start(part, window);
  }
  Rank& rank_;
  test::KeptBuffers& buffers_;
  const DeviceMesh mesh_;
  std::vector<Halo> halos_;
};

TEST_F(WindowDamaged, ByARankThatScribbles) {
  const bool full = std::getenv("WEFT_TEST_FULL") != nullptr;
  test::run_in_children(
      full ? 6 : 3,
      [&](int job) {
        for (int k = 0; k < (full ? 10 : 1); ++k)
          ScribbledJob{.seed = static_cast<std::uint64_t>(1 + 100 * k + job),
                       .time = full ? 10s : 3s,
                       .deadline = 800ms}
              .run([](Rank& r, test::KeptBuffers& buffers, ProcessGroup& group) {
                return std::make_unique<Exchanges>(r, buffers, group);
              });
      },
      400s);
}

}  // namespace
}  // namespace weft::window_damaged_test
