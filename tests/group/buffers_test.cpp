// Calls as a program writes them: on vectors, arrays, variables, text and structs, in place with one
// argument.
#include <gtest/gtest.h>

#include <array>
#include <cstring>
#include <span>
#include <string>
#include <vector>

#include "support/errors.hpp"
#include "support/recording_backend.hpp"
#include "support/run_ranks.hpp"
#include "weft/group/process_group.hpp"

namespace weft::test::buffers_test {
namespace {

using namespace std::chrono_literals;

class BuffersOf : public testing::TestWithParam<Ranks> {};
INSTANTIATE_TEST_SUITE_P(All, BuffersOf, testing::Values(Ranks::threads, Ranks::processes),
                         [](const auto& kind) { return to_string(kind.param); });

TEST_P(BuffersOf, InPlaceWithOneArgument) {
  run_ranks(GetParam(), 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    std::vector<float> sum = {1.f, 2.f, static_cast<float>(r.rank)};
    g.all_reduce(sum).wait();
    EXPECT_EQ(sum, (std::vector<float>{3, 6, 3}));
    std::array<int, 2> most = {r.rank, -r.rank};
    g.all_reduce(most, {.op = ReduceOp::max}).wait();
    EXPECT_EQ(most, (std::array<int, 2>{2, 0}));

    // A root and options are never mistaken for a buffer, even if they are variables.
    const int root = 2;
    int other_root = 1;
    double numbers[2] = {1.0 * r.rank, 10};
    g.reduce(numbers, root).wait();
    EXPECT_EQ(numbers[0], r.rank == 2 ? 3 : r.rank);
    EXPECT_EQ(numbers[1], r.rank == 2 ? 30 : 10);
    g.broadcast(numbers, root).wait();
    EXPECT_EQ(numbers[0], 3);
    int value = r.rank + 5;
    g.reduce(value, other_root, {.op = ReduceOp::max}).wait();
    EXPECT_EQ(value, r.rank == 1 ? 7 : r.rank + 5);
    const CallOptions options{.deadline = 10s};
    g.broadcast(value, other_root, options).wait();
    EXPECT_EQ(value, 7);
    EXPECT_EQ(other_root, 1);

    g.coalesced({call::all_reduce(value), call::broadcast(numbers, 0), call::reduce(sum, 0)}).wait();
    EXPECT_EQ(value, 21);
    EXPECT_EQ(sum[0], r.rank == 0 ? 9 : 3);
  });
}

TEST_P(BuffersOf, VariablesAndRanges) {
  run_ranks(GetParam(), 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    double loss = r.rank + 0.5;
    g.all_reduce(loss, {.op = ReduceOp::avg}).wait();
    EXPECT_EQ(loss, 1.5);
    const long long mine = 100 + r.rank;
    std::vector<long long> all(3);
    g.all_gather(mine, all).wait();
    EXPECT_EQ(all, (std::vector<long long>{100, 101, 102}));
    std::int64_t of_another_name = 0;  // i64 as well: the ranks agree
    g.reduce_scatter(all, of_another_name).wait();
    EXPECT_EQ(of_another_name, 3 * (100 + r.rank));
    std::array<int, 6> table{};
    if (r.rank == 0) table = {0, 1, 2, 3, 4, 5};
    int part[2];
    g.scatter(table, part, 0).wait();
    EXPECT_EQ(part[1], 2 * r.rank + 1);
    g.gather(std::span(part).first(1), std::span(table).first(3), 1).wait();
    if (r.rank == 1) {
      EXPECT_EQ(table[2], 4);
    }
  });
}

struct Settings {
  int steps = 0;
  double rate = 0;
  char name[8] = {};
};

TEST_P(BuffersOf, StructsTextAndBytes) {
  run_ranks(GetParam(), 3, [](Rank& r) {
    ProcessGroup& g = r.group();
    Settings settings;
    if (r.rank == 1) settings = {7, 0.25, "weft"};
    g.broadcast(as_bytes(settings), 1).wait();
    EXPECT_EQ(settings.steps, 7);
    EXPECT_EQ(settings.rate, 0.25);
    EXPECT_STREQ(settings.name, "weft");
    settings.steps = r.rank;
    std::vector<Settings> all(3);
    g.all_gather(as_bytes(settings), as_bytes(all)).wait();
    for (int peer = 0; peer < 3; ++peer) EXPECT_EQ(all[static_cast<std::size_t>(peer)].steps, peer);

    std::string text = r.rank == 0 ? "seven" : "     ";
    g.broadcast(text, 0).wait();
    EXPECT_EQ(text, "seven");
    std::vector<std::byte> bytes(4, std::byte{static_cast<unsigned char>(r.rank)});
    if (r.rank == 0) g.send(bytes, 1).wait();
    if (r.rank == 1) g.recv(bytes, 0).wait();
    EXPECT_EQ(bytes[3], std::byte{static_cast<unsigned char>(r.rank == 1 ? 0 : r.rank)});
    // Raw bytes match numbers of 8 bits: a message may be sent as bytes and received as numbers, or the
    // reverse.
    std::vector<std::uint8_t> numbers(2);
    if (r.rank == 2) g.send(std::string_view("AB"), 0).wait();
    if (r.rank == 0) {
      g.recv(numbers, 2).wait();
      EXPECT_EQ(numbers[1], 'B');
    }
  });
}

class OneRankOfBuffers : public testing::Test {
 protected:
  ProcessGroup make(int size) {
    Membership m;
    m.store = store;
    m.size = size;
    m.name = "x";
    return ProcessGroup::create(context, recording.factory(), m);
  }
  Context context;
  std::shared_ptr<Store> store = make_local_store();
  Recording recording;
};

TEST_F(OneRankOfBuffers, BytesAreNeverReduced) {
  for (const int size : {1, 3}) {
    ProcessGroup g = make(size);
    Settings settings;
    std::vector<std::byte> bytes(4);
    std::vector<std::uint8_t> numbers(4);
    std::string text = "seven";
    const auto says = [](const char* call, const char* which, const char* op) {
      return std::string("unsupported: ") + call + ": " + which +
             " is raw bytes (u8, from as_bytes(), std::byte or characters), for which there is no " + op +
             "; expected elements of the dtype to combine [group \"x\", rank 0]";
    };
    EXPECT_EQ(error_text([&] { g.all_reduce(as_bytes(settings)).wait(); }), says("all_reduce", "in", "sum"));
    EXPECT_EQ(error_text([&] { g.all_reduce(bytes, {.op = ReduceOp::max}).wait(); }),
              says("all_reduce", "in", "max"));
    EXPECT_EQ(error_text([&] { g.reduce(text, 0).wait(); }), says("reduce", "in", "sum"));
    EXPECT_EQ(error_text([&] { g.all_reduce(numbers, bytes).wait(); }), says("all_reduce", "out", "sum"));
    EXPECT_EQ(error_text([&] {
                g.coalesced({call::barrier(), call::all_reduce(bytes)}).wait();
              }),
              says("all_reduce", "in", "sum"));
    g.all_reduce(numbers).wait();  // bytes are numbers where their type says so
    g.broadcast(bytes, 0).wait();
  }
}

TEST_F(OneRankOfBuffers, AVariableTakenForTheOutIsNamed) {
  ProcessGroup g = make(3);
  std::vector<float> x(4);
  int count = 1;  // where the program forgot the out
  EXPECT_EQ(error_text([&] { g.all_gather(x, count).wait(); }),
            "bad_argument: all_gather: out is i32; expected f32 (in) [group \"x\", rank 0]");
  EXPECT_EQ(count, 1);
}

TEST_F(OneRankOfBuffers, InPlaceHandsOnOneBuffer) {
  ProcessGroup g = make(3);
  std::vector<float> x(4);
  g.all_reduce(x).wait();
  g.reduce(x, 0).wait();
  g.broadcast(x, 0).wait();
  const auto* const data = reinterpret_cast<const std::byte*>(x.data());
  ASSERT_EQ(recording.posted().size(), 3u);
  for (const OpState& s : recording.posted()) {
    EXPECT_EQ(s.in, data);
    EXPECT_EQ(s.out, data);
    EXPECT_EQ(s.in_count, 4);
  }
  EXPECT_EQ(recording.posted()[1].root, 0);
}

// Code that must not compile.
template <class T>
concept AllReduces = requires(ProcessGroup g, T&& x) {
  g.all_reduce(std::forward<T>(x));
};
static_assert(AllReduces<std::vector<float>&> && AllReduces<double&> && AllReduces<Buffer>);
static_assert(!AllReduces<std::vector<float>> && !AllReduces<double> && !AllReduces<ConstBuffer>);
static_assert(!AllReduces<const std::vector<float>&> && !AllReduces<const double&>);
static_assert(!AllReduces<Settings&> && !AllReduces<std::vector<Settings>&>);
template <class T>
concept Broadcasts = requires(ProcessGroup g, T&& x) {
  g.broadcast(std::forward<T>(x), 0);
};
static_assert(Broadcasts<double&> && !Broadcasts<const double&> && !Broadcasts<double>);
static_assert(!Broadcasts<ConstTensorView> && Broadcasts<TensorView>);

}  // namespace
}  // namespace weft::test::buffers_test
