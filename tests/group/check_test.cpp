// Tests the text of every error of check.cpp. The checks are pure, so no group is needed.
#include "group/check.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <complex>
#include <cstdio>
#include <limits>
#include <vector>

#include "support/errors.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/view.hpp"

namespace weft::test::check_test {
namespace {

constexpr int kRank = 1, kSize = 3;

class Check : public testing::Test {
 protected:
  Check() : traits(*known_traits("shm")) {}

  // The text of check() for a call by rank 1 of 3 (or of `size`), without the tail, which it must have.
  std::string said(Op op, ConstTensorView in, TensorView out, int root_or_peer = 0, CallOptions options = {},
                   int size = kSize) const {
    const bool message = op == Op::send || op == Op::recv;
    Call call{.op = op, .in = in, .out = out, .options = options};
    if (op == Op::send || op == Op::barrier) call.out = {};
    if (op == Op::recv || op == Op::barrier) call.in = {};
    (message ? call.peer : call.root) = root_or_peer;
    return said(call, size);
  }
  std::string said(const Call& call, int size = kSize) const {
    const int rank = size == 1 ? 0 : kRank;
    std::string text = error_text([&] {
      check(call, traits, rank, size, "tp");
      return 0;
    });
    const std::string tail = " [group \"tp\", rank " + std::to_string(rank) + "]";
    if (text == "no error") return text;
    EXPECT_TRUE(text.ends_with(tail)) << text;
    return text.substr(0, text.size() - std::min(text.size(), tail.size()));
  }

  TensorView f(std::int64_t begin, std::int64_t count) { return view(floats + begin, count); }

  Traits traits;
  float floats[100] = {}, other[100] = {};
  const ConstTensorView nothing{};
};

TEST_F(Check, RightCallsPass) {
  for (const Op op : {Op::all_reduce, Op::broadcast}) {
    EXPECT_EQ(said(op, f(0, 10), view(other, 10), kRank), "no error");
    EXPECT_EQ(said(op, f(0, 10), f(0, 10), kRank), "no error");
    EXPECT_EQ(said(op, f(0, 10), f(10, 10), kRank), "no error");
    EXPECT_EQ(said(op, f(0, 0), f(0, 0), kRank), "no error");
  }
  EXPECT_EQ(said(Op::all_gather, f(0, 10), view(other, 30)), "no error");
  EXPECT_EQ(said(Op::all_gather, f(10, 10), f(0, 30)), "no error");
  EXPECT_EQ(said(Op::reduce_scatter, f(0, 30), view(other, 10)), "no error");
  EXPECT_EQ(said(Op::reduce_scatter, f(0, 30), f(10, 10)), "no error");
  EXPECT_EQ(said(Op::barrier, nothing, f(0, 0)), "no error");
  EXPECT_EQ(said(Op::send, f(0, 10), f(0, 0), 2), "no error");
  EXPECT_EQ(said(Op::recv, nothing, f(0, 10), kRank, {.tag = 9}), "no error");
}

TEST_F(Check, AnErrorHasTheOpAndNoCall) {
  const ConstTensorView in = f(0, 1);
  const Call call{.op = Op::send, .in = in, .peer = 7};
  try {
    check(call, traits, kRank, kSize, "tp");
    FAIL();
  } catch (const Error& e) {
    EXPECT_EQ(e.op(), Op::send);
    EXPECT_EQ(e.call(), kNoCall);
    EXPECT_TRUE(e.ranks().empty());
    EXPECT_TRUE(e.quiesced());
  }
}

TEST_F(Check, CountsWithTheirArithmetic) {
  EXPECT_EQ(said(Op::all_reduce, f(0, 10), view(other, 11)),
            "bad_argument: all_reduce: out has 11 elements; expected 10 (in)");
  EXPECT_EQ(said(Op::broadcast, f(0, 10), view(other, 9), kRank),
            "bad_argument: broadcast: out has 9 elements; expected 10 (in)");
  EXPECT_EQ(said(Op::broadcast, f(0, 10), view(other, 9), 0), "no error");  // `in` counts at the root alone
  EXPECT_EQ(said(Op::all_gather, f(0, 10), view(other, 20)),
            "bad_argument: all_gather: out has 20 elements; expected 10 (in) x 3 (group size) = 30");
  EXPECT_EQ(said(Op::reduce_scatter, f(0, 31), view(other, 10)),
            "bad_argument: reduce_scatter: in has 31 elements; expected 10 (out) x 3 (group size) = 30");
}

TEST_F(Check, OverlapMeansInPlaceOrNothing) {
  const std::string same = "in and out overlap; in place means the same buffer";
  for (const std::int64_t begin : {1, 9}) {
    EXPECT_EQ(said(Op::all_reduce, f(0, 10), f(begin, 10)), "bad_argument: all_reduce: " + same);
    EXPECT_EQ(said(Op::all_reduce, f(begin, 10), f(0, 10)), "bad_argument: all_reduce: " + same);
    EXPECT_EQ(said(Op::broadcast, f(0, 10), f(begin, 10), kRank), "bad_argument: broadcast: " + same);
  }
  for (const std::int64_t begin : {0, 9, 11, 20, 29}) {  // rank 1's block begins at 10
    EXPECT_EQ(said(Op::all_gather, f(begin, 10), f(0, 30)),
              "bad_argument: all_gather: in and out overlap; in place means in is block rank() of out");
    EXPECT_EQ(said(Op::reduce_scatter, f(0, 30), f(begin, 10)),
              "bad_argument: reduce_scatter: in and out overlap; in place means out is block rank() of in");
  }
  EXPECT_EQ(said(Op::all_gather, f(0, 10), f(5, 30)),
            "bad_argument: all_gather: in and out overlap; in place means in is block rank() of out");
  EXPECT_EQ(said(Op::reduce_scatter, f(5, 30), f(0, 10)),
            "bad_argument: reduce_scatter: in and out overlap; in place means out is block rank() of in");
}

TEST_F(Check, OverlapOfOneRank) {
  EXPECT_EQ(said(Op::all_gather, f(0, 10), f(0, 10), 0, {}, 1), "no error");
  EXPECT_EQ(said(Op::reduce_scatter, f(0, 10), f(0, 10), 0, {}, 1), "no error");
  for (const std::int64_t begin : {1, 9}) {
    EXPECT_EQ(said(Op::all_gather, f(0, 10), f(begin, 10), 0, {}, 1),
              "bad_argument: all_gather: in and out overlap; in place means in is block rank() of out");
    EXPECT_EQ(said(Op::reduce_scatter, f(0, 10), f(begin, 10), 0, {}, 1),
              "bad_argument: reduce_scatter: in and out overlap; in place means out is block rank() of in");
  }
}

TEST_F(Check, ViewsAreContiguous) {
  TensorView columns = f(0, 12);
  columns.shape = {3, 4};
  columns.strides = {1, 3};
  const std::string text = " is not contiguous: shape (3, 4) has strides (1, 3)";
  EXPECT_EQ(said(Op::all_reduce, columns, view(other, 12)), "bad_argument: all_reduce: in" + text);
  EXPECT_EQ(said(Op::all_reduce, view(other, 12), columns), "bad_argument: all_reduce: out" + text);
  EXPECT_EQ(said(Op::broadcast, columns, view(other, 12), kRank), "bad_argument: broadcast: in" + text);
  EXPECT_EQ(said(Op::send, columns, f(0, 0), 0), "bad_argument: send: in" + text);
  EXPECT_EQ(said(Op::recv, nothing, columns, 0), "bad_argument: recv: out" + text);
  columns.strides = {4, 1};
  EXPECT_EQ(said(Op::all_reduce, columns, view(other, 12)), "no error");
  columns.shape = {1, 12};  // the stride of a single element says nothing
  columns.strides = {7, 1};
  EXPECT_EQ(said(Op::all_reduce, columns, view(other, 12)), "no error");
}

TEST_F(Check, EmptyViewsAreContiguous) {
  const std::int64_t big = std::int64_t{1} << 62;
  TensorView empty = f(0, 0);
  const auto said_of = [&](const Shape& shape, const Strides& strides) {
    empty.shape = shape, empty.strides = strides;
    return said(Op::all_reduce, empty, f(0, 0));
  };
  EXPECT_EQ(said_of({4, 0}, {1, 1}), "no error");
  EXPECT_EQ(said_of({0}, {0}), "no error");
  EXPECT_EQ(said_of({0, 7}, {3, 5}), "no error");
  EXPECT_EQ(said_of({big, 0, big}, {1, 1, 1}), "no error");
  EXPECT_EQ(said_of({-1, 0}, {1, 1}),
            "bad_argument: all_reduce: in has shape (-1, 0); expected no negative extent");
}

TEST_F(Check, BuffersOfAPointerAndACount) {
  Buffer out(other, 10, DType::f32);
  EXPECT_EQ(said({.op = Op::all_reduce, .in = f(0, 10), .out = out}), "no error");
  EXPECT_EQ(said({.op = Op::all_reduce, .in = out, .out = out}), "no error");  // what is written may be read
  out.count = -2;
  EXPECT_EQ(said({.op = Op::all_reduce, .in = f(0, 10), .out = out}),
            "bad_argument: all_reduce: out has -2 elements; expected 0 or more");
  out.count = std::int64_t{1} << 61;
  EXPECT_EQ(said({.op = Op::recv, .out = out, .peer = 0}),
            "bad_argument: recv: out has 2305843009213693952 elements; their bytes do not fit 64 bits");
}

// A buffer has little room to say what was wrong with its view.
TEST_F(Check, LongShapesAreCutShort) {
  TensorView v = f(0, 1);
  const auto fault = [&](const Shape& shape, const Strides& strides) {
    v.shape = shape, v.strides = strides;
    return said(Op::recv, nothing, v, 0);
  };
  EXPECT_EQ(
      fault({8, 128, 56, 56}, {401408, 3136, 1, 56}),
      "bad_argument: recv: out is not contiguous: shape (8, 128, 56, 56) has strides (401408, 3136, 1, 56)");
  EXPECT_EQ(
      fault({4096, 4096, 4096}, {1, 4096, -16777216}),
      "bad_argument: recv: out is not contiguous: shape (4096, 4096, 4096) has strides (1, 4096, -16777216)");
  EXPECT_EQ(
      fault({1 << 20, 1 << 20, 3}, {1, 1 << 20, std::int64_t{1} << 40}),
      "bad_argument: recv: out is not contiguous: shape (1048576, 1048576, 3) has strides (1, 1048576, …)");
  const std::int64_t big = std::int64_t{1} << 62;
  EXPECT_EQ(fault({big, big, big}, {1, 1, 1}),
            "bad_argument: recv: out has shape (4611686018427387904, …); its bytes do not fit 64 bits");
  EXPECT_EQ(fault({-big, 7}, {7, 1}),
            "bad_argument: recv: out has shape (-4611686018427387904, 7); expected no negative extent");
  EXPECT_EQ(fault({}, {}), "no error");  // a single element
}

TEST_F(Check, NullIsForNothingOnly) {
  const TensorView null = view(static_cast<float*>(nullptr), 10),
                   empty = view(static_cast<float*>(nullptr), 0);
  EXPECT_EQ(said(Op::all_reduce, null, view(other, 10)),
            "bad_argument: all_reduce: in is null; expected 10 elements");
  EXPECT_EQ(said(Op::all_gather, view(other, 4), view(static_cast<float*>(nullptr), 12)),
            "bad_argument: all_gather: out is null; expected 12 elements");
  EXPECT_EQ(said(Op::send, null, empty, 0), "bad_argument: send: in is null; expected 10 elements");
  EXPECT_EQ(said(Op::recv, nothing, null, 0), "bad_argument: recv: out is null; expected 10 elements");
  EXPECT_EQ(said(Op::all_reduce, empty, empty), "no error");
  EXPECT_EQ(said(Op::broadcast, null, view(other, 10), 0), "no error");  // not the root's
}

TEST_F(Check, DtypesAgree) {
  double doubles[30] = {};
  for (const Op op : {Op::all_reduce, Op::broadcast})
    EXPECT_EQ(said(op, f(0, 10), view(doubles, 10), kRank),
              "bad_argument: " + std::string(name(op)) + ": out is f64; expected f32 (in)");
  EXPECT_EQ(said(Op::all_gather, f(0, 10), view(doubles, 30)),
            "bad_argument: all_gather: out is f64; expected f32 (in)");
  EXPECT_EQ(said(Op::reduce_scatter, view(doubles, 30), f(0, 10)),
            "bad_argument: reduce_scatter: out is f32; expected f64 (in)");
}

TEST_F(Check, OnlyCpuMemory) {
  TensorView there = f(0, 10);
  there.device = {DeviceKind::cuda, 1};
  EXPECT_EQ(said(Op::all_reduce, there, view(other, 10)),
            "unsupported: all_reduce: in is on cuda:1; backend shm moves cpu memory");
  EXPECT_EQ(said(Op::recv, nothing, there, 0),
            "unsupported: recv: out is on cuda:1; backend shm moves cpu memory");
}

TEST_F(Check, RootsPeersAndTags) {
  for (const int wrong : {-1, 3}) {
    const std::string text = " is " + std::to_string(wrong) + "; expected 0 to 2 (group size 3)";
    EXPECT_EQ(said(Op::broadcast, f(0, 1), f(0, 1), wrong), "bad_argument: broadcast: root" + text);
    EXPECT_EQ(said(Op::send, f(0, 1), f(0, 0), wrong), "bad_argument: send: dst" + text);
    EXPECT_EQ(said(Op::recv, nothing, f(0, 1), wrong), "bad_argument: recv: src" + text);
  }
  EXPECT_EQ(said(Op::send, f(0, 1), f(0, 0), 0, {.tag = -1}),
            "bad_argument: send: tag is -1; expected 0 or more");
  EXPECT_EQ(said(Op::recv, nothing, f(0, 1), 0, {.tag = -5}),
            "bad_argument: recv: tag is -5; expected 0 or more");
}

TEST_F(Check, AReceiveMayBeFromAnySource) {
  EXPECT_EQ(said(Op::recv, nothing, f(0, 1), any_source), "no error");
  EXPECT_EQ(said(call::wait_message(any_source, {.tag = 3})), "no error");
  EXPECT_EQ(said(call::wait_message(2)), "no error");
  EXPECT_EQ(said(Op::send, f(0, 1), f(0, 0), any_source),
            "bad_argument: send: dst is any_source; expected 0 to 2 (group size 3)");
  EXPECT_EQ(said(call::wait_message(-1)),
            "bad_argument: wait_message: src is -1; expected 0 to 2 (group size 3)");
  EXPECT_EQ(said(call::wait_message(any_source, {.tag = -7})),
            "bad_argument: wait_message: tag is -7; expected 0 or more");
  EXPECT_EQ(error_text([&] {
              check_probe(3, {}, traits, kRank, kSize, "tp");
              return 0;
            }),
            "bad_argument: probe: src is 3; expected 0 to 2 (group size 3) [group \"tp\", rank 1]");
  traits.ops &= ~op_bit(Op::wait_message);
  EXPECT_EQ(said(Op::recv, nothing, f(0, 1), any_source),
            "unsupported: recv: src is any_source; backend shm receives from a rank that is named");
  EXPECT_EQ(said(call::wait_message(1)), "unsupported: wait_message: backend shm cannot do it");
}

TEST_F(Check, WhatABackendCannotDo) {
  bool flags[30] = {};
  EXPECT_EQ(said(Op::all_reduce, view(flags, 10), view(flags, 10)),
            "unsupported: all_reduce: sum of bool is not defined; logical_or and logical_and are");
  EXPECT_EQ(said(Op::reduce_scatter, view(flags, 30), view(flags + 10, 10)),
            "unsupported: reduce_scatter: sum of bool is not defined; logical_or and logical_and are");
  EXPECT_EQ(said(Op::all_gather, view(flags + 10, 10), view(flags, 30)), "no error");  // but it moves them
  traits.dtypes = 1u << static_cast<int>(DType::f64);
  EXPECT_EQ(said(Op::send, f(0, 1), f(0, 0), 0),
            "unsupported: send: in is f32, which backend shm does not move");
  EXPECT_EQ(said(Op::recv, nothing, f(0, 1), 0),
            "unsupported: recv: out is f32, which backend shm does not move");
  traits.dtypes = ~0u;
  traits.native_is_canonical = false;
  traits.ops &= ~op_bit(Op::send) & ~op_bit(Op::all_to_all_v);
  EXPECT_EQ(said(Op::all_reduce, f(0, 1), f(0, 1), 0, {.order = Order::canonical}),
            "unsupported: all_reduce: backend shm has no sum of f32 in canonical order");
  EXPECT_EQ(said(Op::all_gather, f(0, 1), view(other, 3), 0, {.order = Order::canonical}), "no error");
}

// A barrier, too, has to be there, or be composed.
TEST_F(Check, ABarrierIsRefusedWhereThereIsNone) {
  for (const OpSet ops : {OpSet{0}, op_bit(Op::send), op_bit(Op::all_reduce)}) {
    traits.ops = ops;
    EXPECT_EQ(said(call::barrier()), "unsupported: barrier: backend shm cannot do it");
  }
  for (const OpSet ops :
       {op_bit(Op::barrier), op_bit(Op::send) | op_bit(Op::recv), op_bit(Op::all_to_all_v)}) {
    traits.ops = ops;
    EXPECT_EQ(said(call::barrier()), "no error");
  }
}

TEST_F(Check, DeadlinesAreNotNegative) {
  for (const Op op : {Op::all_reduce, Op::barrier, Op::send})
    EXPECT_EQ(said(op, f(0, 1), f(0, 1), 0, {.deadline = Duration(-1)}),
              "bad_argument: " + std::string(name(op)) + ": deadline is -1 ns; expected 0 or more");
}

// Numbers that the enums do not have: some that a shift would confuse with others (33 with 1), some just
// beyond the last.
TEST_F(Check, ValuesOutsideTheEnumsAreRefused) {
  traits.dtypes = ~0u;  // a plug-in may say that of itself
  traits.ops = ~0u;
  traits.reduces.fill(~0u);
  for (const int number : {19, 20, 33, 77, 255}) {
    Call call = call::all_reduce(f(0, 2), view(other, 2));
    call.op = static_cast<Op>(number);
    EXPECT_EQ(said(call),
              "bad_argument: ?: op is " + std::to_string(number) + "; expected 0 (none) to 18 (exchange)");
    try {
      check(call, traits, kRank, kSize, "tp");
    } catch (const Error& e) {
      EXPECT_EQ(e.op(), Op::none);
    }
  }
  for (const int number : {17, 31, 33, 40, 255}) {
    const auto dtype = static_cast<DType>(number);
    const ConstBuffer in(floats, 2, dtype);
    const Buffer out(other, 2, dtype);
    const std::string text = " is " + std::to_string(number) + "; expected 0 (f64) to 16 (c128)";
    EXPECT_EQ(said(call::all_reduce(in, out)), "bad_argument: all_reduce: dtype of in" + text);
    EXPECT_EQ(said(call::broadcast(in, out, 0)), "bad_argument: broadcast: dtype of out" + text);
    EXPECT_EQ(said(call::send(in, 0)), "bad_argument: send: dtype of in" + text);
  }
  for (const int number : {13, 32, 77, 255})
    EXPECT_EQ(said(call::all_reduce(f(0, 2), view(other, 2),
                                    {.op = {.kind = static_cast<ReduceOp::Kind>(number)}})),
              "bad_argument: all_reduce: kind of op is " + std::to_string(number) +
                  "; expected 0 (sum) to 12 (user)");
  for (const int number : {2, 9, 255})
    EXPECT_EQ(said(call::all_reduce(f(0, 2), view(other, 2), {.order = static_cast<Order>(number)})),
              "bad_argument: all_reduce: order is " + std::to_string(number) +
                  "; expected 0 (native) or 1 (canonical)");
  Buffer out(other, 2, DType::f32);
  out.device.kind = static_cast<DeviceKind>(9);
  for (const bool device : {false, true}) {
    traits.device = device;
    EXPECT_EQ(said(call::recv(out, 0)),
              "bad_argument: recv: out is on a device of kind 9; expected 0 (cpu) or 1 (cuda)");
  }
}

// Blocks ---------------------------------------------------------------------------------------------------

using Counts64 = std::vector<std::int64_t>;

TEST_F(Check, RightBlocksPass) {
  const Counts64 counts{3, 4, 0}, mirrored{2, 4, 5}, turned{20, 0, 20}, none;
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 7), {counts})), "no error");
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 30), {counts, turned})), "no error");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 7), view(other, 4), {counts})), "no error");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 30), view(other, 4), {counts, turned})), "no error");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 7), view(other, 11), {counts}, {mirrored})), "no error");
  // Blocks that are only read may overlap, and a view may be larger than its blocks.
  const Counts64 same{0, 0, 0}, all_four{4, 4, 4};
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 9), view(other, 4), {all_four, same})), "no error");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 9), view(other, 99), {all_four, same}, {all_four})), "no error");
  // In place: the buffer is this rank's own block.
  EXPECT_EQ(said(call::all_gather_v(f(3, 4), f(0, 7), {counts})), "no error");
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), f(0, 30), {counts, turned})), "no error");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 7), f(3, 4), {counts})), "no error");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 30), f(0, 4), {counts, turned})), "no error");
}

TEST_F(Check, BlocksAreAsManyAsRanks) {
  const Counts64 two{1, 1}, three{1, 1, 1}, four{0, 0, 0, 0}, none;
  EXPECT_EQ(said(call::all_gather_v(f(0, 1), view(other, 2), {two})),
            "bad_argument: all_gather_v: out_blocks has 2 counts; expected 3 (group size)");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 2), view(other, 1), {none})),
            "bad_argument: reduce_scatter_v: in_blocks has 0 counts; expected 3 (group size)");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 3), view(other, 3), {three}, {four})),
            "bad_argument: all_to_all_v: out_blocks has 4 counts; expected 3 (group size)");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 3), view(other, 3), {two}, {three})),
            "bad_argument: all_to_all_v: in_blocks has 2 counts; expected 3 (group size)");
  EXPECT_EQ(said(call::all_gather_v(f(0, 1), view(other, 3), {three, two})),
            "bad_argument: all_gather_v: out_blocks has 2 offsets; expected 3 (group size) or none");
}

TEST_F(Check, BlocksLieInTheirView) {
  const Counts64 counts{3, 4, 2}, far{0, 8, 3}, before{0, -1, 5}, beyond{0, 4, 11}, negative{3, 4, -2};
  const Counts64 huge{0, 4, std::numeric_limits<std::int64_t>::max()};
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 8), {counts})),
            "bad_argument: all_gather_v: out_blocks: block 2 has 2 elements from 7 on; out has 8");
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 11), {counts, far})),
            "bad_argument: all_gather_v: out_blocks: block 1 has 4 elements from 8 on; out has 11");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 10), view(other, 4), {counts, before})),
            "bad_argument: reduce_scatter_v: in_blocks: block 1 has 4 elements from -1 on; in has 10");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 10), view(other, 4), {counts, beyond})),
            "bad_argument: reduce_scatter_v: in_blocks: block 2 has 2 elements from 11 on; in has 10");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 9), view(other, 90), {counts}, {negative})),
            "bad_argument: all_to_all_v: out_blocks.counts[2] is -2; expected 0 or more");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 9), view(other, 90), {negative}, {counts})),
            "bad_argument: all_to_all_v: in_blocks.counts[2] is -2; expected 0 or more");
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 90), {huge})),
            "bad_argument: all_gather_v: out_blocks: block 2 has 9223372036854775807 elements from 4 on; "
            "out has 90");
}

TEST_F(Check, BlocksThatAreWrittenLieApart) {
  const Counts64 counts{3, 4, 2}, close{0, 5, 8}, twice{6, 0, 6}, empty_inside{0, 4, 4}, one_empty{3, 0, 2};
  EXPECT_EQ(said(call::all_gather_v(f(0, 4), view(other, 20), {counts, close})),
            "bad_argument: all_gather_v: out_blocks: blocks 1 and 2 overlap");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 9), view(other, 20), {counts}, {counts, twice})),
            "bad_argument: all_to_all_v: out_blocks: blocks 0 and 2 overlap");
  const Counts64 inside{0, 1, 2};  // an empty block may lie anywhere
  EXPECT_EQ(said(call::all_gather_v(f(0, 0), view(other, 20), {one_empty, Counts64{0, 1, 3}})), "no error");
  EXPECT_EQ(said(call::all_gather_v(f(0, 0), view(other, 20), {one_empty, inside})),
            "bad_argument: all_gather_v: out_blocks: blocks 0 and 2 overlap");
}

TEST_F(Check, TheOwnBlockIsTheOtherBuffer) {
  const Counts64 counts{3, 4, 2}, mine_is_five{1, 5, 1};
  EXPECT_EQ(said(call::all_gather_v(f(0, 5), view(other, 9), {counts})),
            "bad_argument: all_gather_v: in has 5 elements; expected 4 (out_blocks.counts[1])");
  EXPECT_EQ(said(call::reduce_scatter_v(f(0, 9), view(other, 3), {counts})),
            "bad_argument: reduce_scatter_v: out has 3 elements; expected 4 (in_blocks.counts[1])");
  EXPECT_EQ(
      said(call::all_to_all_v(f(0, 9), view(other, 9), {counts}, {mine_is_five})),
      "bad_argument: all_to_all_v: out_blocks.counts[1] is 5; expected 4 (in_blocks.counts[1], this rank's "
      "own)");
}

TEST_F(Check, OverlapOfBlocks) {
  const Counts64 counts{3, 4, 2}, apart{0, 10, 20};
  for (const std::int64_t begin : {0, 2, 4, 8}) {  // the own block begins at 3
    EXPECT_EQ(said(call::all_gather_v(f(begin, 4), f(0, 9), {counts})),
              "bad_argument: all_gather_v: in and out overlap; in place means in is block rank() of out");
    EXPECT_EQ(said(call::reduce_scatter_v(f(0, 9), f(begin, 4), {counts})),
              "bad_argument: reduce_scatter_v: in and out overlap; in place means out is block rank() of in");
  }
  EXPECT_EQ(said(call::all_gather_v(f(4, 4), f(0, 22), {counts, apart})),  // between the blocks
            "bad_argument: all_gather_v: in and out overlap; in place means in is block rank() of out");
  EXPECT_EQ(said(call::all_to_all_v(f(0, 9), f(0, 9), {counts}, {counts})),
            "bad_argument: all_to_all_v: in and out overlap; all_to_all_v is never in place");
  EXPECT_EQ(said(call::all_to_all(f(0, 9), f(0, 9))),
            "bad_argument: all_to_all: in and out overlap; all_to_all is never in place");
  EXPECT_EQ(said(call::all_to_all(f(0, 9), f(9, 9))), "no error");
}

TEST_F(Check, BlocksAreForOpsThatHaveThem) {
  const Counts64 counts{1, 1, 1};
  Call call = call::all_reduce(f(0, 3), f(0, 3));
  call.in_blocks = {counts};
  EXPECT_EQ(said(call), "bad_argument: all_reduce: in_blocks has 3 counts; expected none");
  call = call::barrier();
  call.out_blocks = {counts};
  EXPECT_EQ(said(call), "bad_argument: barrier: out_blocks has 3 counts; expected none");
  call = call::all_gather_v(f(0, 1), view(other, 3), {counts});
  call.in_blocks = {counts};
  EXPECT_EQ(said(call), "bad_argument: all_gather_v: in_blocks has 3 counts; expected none");
}

// The rest -------------------------------------------------------------------------------------------------

TEST_F(Check, EqualBlocksNeedMultiples) {
  EXPECT_EQ(said(call::all_to_all(f(0, 10), view(other, 10))),
            "bad_argument: all_to_all: in has 10 elements; expected a multiple of 3 (group size)");
  EXPECT_EQ(said(call::all_to_all(f(0, 9), view(other, 6))),
            "bad_argument: all_to_all: out has 6 elements; expected 9 (in)");
  EXPECT_EQ(said(call::gather(f(0, 10), view(other, 31), kRank)),
            "bad_argument: gather: out has 31 elements; expected 10 (in) x 3 (group size) = 30");
  EXPECT_EQ(said(call::scatter(f(0, 31), view(other, 10), kRank)),
            "bad_argument: scatter: in has 31 elements; expected 10 (out) x 3 (group size) = 30");
}

// Arguments that a rank does not use are not checked; all others are.
TEST_F(Check, RootedOperations) {
  const TensorView wrong = view(static_cast<float*>(nullptr), 10);
  EXPECT_EQ(said(call::reduce(f(0, 10), wrong, 0)), "no error");
  EXPECT_EQ(said(call::gather(f(0, 10), wrong, 0)), "no error");
  EXPECT_EQ(said(call::scatter(wrong, f(0, 10), 0)), "no error");
  EXPECT_EQ(said(call::reduce(f(0, 10), wrong, kRank)),
            "bad_argument: reduce: out is null; expected 10 elements");
  EXPECT_EQ(said(call::gather(wrong, f(0, 10), 0)), "bad_argument: gather: in is null; expected 10 elements");
  EXPECT_EQ(said(call::scatter(wrong, f(0, 10), kRank)),
            "bad_argument: scatter: in is null; expected 10 elements");
  EXPECT_EQ(said(call::reduce(f(0, 10), view(other, 9), kRank)),
            "bad_argument: reduce: out has 9 elements; expected 10 (in)");
  for (const int root : {-1, 3}) {
    const std::string text = ": root is " + std::to_string(root) + "; expected 0 to 2 (group size 3)";
    EXPECT_EQ(said(call::reduce(f(0, 1), f(0, 1), root)), "bad_argument: reduce" + text);
    EXPECT_EQ(said(call::gather(f(0, 1), f(0, 1), root)), "bad_argument: gather" + text);
    EXPECT_EQ(said(call::scatter(f(0, 1), f(0, 1), root)), "bad_argument: scatter" + text);
  }
  EXPECT_EQ(said(call::reduce(f(0, 10), f(0, 10), kRank)), "no error");
  EXPECT_EQ(said(call::reduce(f(0, 10), f(1, 10), kRank)),
            "bad_argument: reduce: in and out overlap; in place means the same buffer");
  EXPECT_EQ(said(call::gather(f(10, 10), f(0, 30), kRank)), "no error");
  EXPECT_EQ(said(call::gather(f(0, 10), f(0, 30), kRank)),
            "bad_argument: gather: in and out overlap; in place means in is block rank() of out");
  EXPECT_EQ(said(call::scatter(f(0, 30), f(10, 10), kRank)), "no error");
  EXPECT_EQ(said(call::scatter(f(0, 30), f(20, 10), kRank)),
            "bad_argument: scatter: in and out overlap; in place means out is block rank() of in");
}

TEST_F(Check, ShapesAreNotNegativeNorEndless) {
  TensorView v = f(0, 10);
  v.shape = {-1};
  EXPECT_EQ(said(Op::all_reduce, v, view(other, 10)),
            "bad_argument: all_reduce: in has shape (-1); expected no negative extent");
  v.shape = {std::int64_t{1} << 61};
  EXPECT_EQ(said(Op::recv, nothing, v, 0),
            "bad_argument: recv: out has shape (2305843009213693952); its bytes do not fit 64 bits");
  v.shape = {std::int64_t{1} << 60};  // its bytes do, those of three do not
  EXPECT_EQ(
      said(Op::all_gather, v, view(other, 10)),
      "bad_argument: all_gather: out has 10 elements; expected 1152921504606846976 (in) x 3 (group size) = "
      "3458764513820540928");
  EXPECT_EQ(said(call::all_gather(v, view(other, 10)), 1),
            "bad_argument: all_gather: out has 10 elements; expected "
            "1152921504606846976 (in) x 1 (group size) = 1152921504606846976");
  EXPECT_EQ(
      said(call::gather(v, view(other, 10), kRank), 9),
      "bad_argument: gather: in has 1152921504606846976 elements; 9 (group size) times that does not fit 64 "
      "bits");
  EXPECT_EQ(
      said(call::reduce_scatter(view(other, 10), v), 9),
      "bad_argument: reduce_scatter: out has 1152921504606846976 elements; 9 (group size) times that does "
      "not fit 64 bits");
}

TEST_F(Check, ReductionsNeedWholeElements) {
  TensorView odd = f(0, 10);
  odd.data += 2;
  const auto text = [&](const char* which) {
    char at[32];
    std::snprintf(at, sizeof at, "%p", static_cast<const void*>(odd.data));
    return std::string(which) + " begins at " + at + "; expected a multiple of 4 bytes for f32";
  };
  EXPECT_EQ(said(Op::all_reduce, odd, view(other, 10)), "bad_argument: all_reduce: " + text("in"));
  EXPECT_EQ(said(call::reduce(f(0, 10), odd, kRank)), "bad_argument: reduce: " + text("out"));
  EXPECT_EQ(said(call::reduce(view(other, 10), odd, 0)), "no error");       // not the root's
  EXPECT_EQ(said(Op::broadcast, odd, view(other, 10), kRank), "no error");  // only moved
  odd.shape = {0};
  EXPECT_EQ(said(Op::all_reduce, odd, odd), "no error");
}

TEST_F(Check, Reductions) {
  std::int32_t x[4] = {};
  const TensorView v = view(x, 4);
  const auto of = [&](const TensorView& t, ReduceOp op) { return said(call::all_reduce(t, t, {.op = op})); };
  for (const double scale : {0.5, 1e300, std::numeric_limits<double>::infinity()})
    EXPECT_THAT(
        of(v, ReduceOp::premul_sum(scale)),
        testing::MatchesRegex("bad_argument: all_reduce: scale is .*; expected a whole number of at most "
                              "2\\^53 for i32"));
  EXPECT_THAT(of(v, ReduceOp::premul_sum(0.5)), testing::HasSubstr("scale is 0.5;"));
  EXPECT_EQ(of(v, ReduceOp::premul_sum(-3)), "no error");
  EXPECT_EQ(of(f(0, 4), ReduceOp::premul_sum(0.5)), "no error");

  const UserReduction empty{"empty", {}};
  EXPECT_EQ(of(v, ReduceOp{.kind = ReduceOp::Kind::user}),
            "bad_argument: all_reduce: op is user, but its function is empty");
  EXPECT_EQ(of(v, ReduceOp::of(empty)), "bad_argument: all_reduce: op is user, but its function is empty");

  EXPECT_EQ(of(f(0, 4), ReduceOp::bit_and), "unsupported: all_reduce: bit_and of f32 is not defined");
  std::complex<float> c[2];
  const TensorView complex{reinterpret_cast<std::byte*>(c), DType::c64, {}, {2}, {1}};
  EXPECT_EQ(of(complex, ReduceOp::max), "unsupported: all_reduce: max of c64 is not defined");
  EXPECT_EQ(of(complex, ReduceOp::prod), "no error");
}

TEST_F(Check, Scans) {
  for (const Op op : {Op::scan, Op::exscan}) {
    const std::string head = "bad_argument: " + std::string(name(op)) + ": ";
    EXPECT_EQ(said({.op = op, .in = f(0, 10), .out = f(0, 10)}), "no error");  // in place
    EXPECT_EQ(said({.op = op, .in = f(0, 10), .out = view(other, 10)}), "no error");
    EXPECT_EQ(said({.op = op, .in = f(0, 10), .out = view(other, 11)}),
              head + "out has 11 elements; expected 10 (in)");
    EXPECT_EQ(said({.op = op, .in = f(0, 10), .out = f(1, 10)}),
              head + "in and out overlap; in place means the same buffer");
  }
}

TEST_F(Check, WhatCannotBeComposed) {
  traits.name = "poor";
  traits.native_is_canonical = false;
  traits.ops = op_bit(Op::all_reduce) | op_bit(Op::barrier);
  traits.reduces = {};
  traits.reduces[static_cast<std::size_t>(ReduceOp::Kind::sum)] = dtype_bit(DType::f32);
  const UserReduction user{"mine", [](const void*, const void*, void*, std::int64_t, DType) {}};
  EXPECT_EQ(said(call::all_reduce(f(0, 1), f(0, 1))), "no error");
  EXPECT_EQ(said(call::all_reduce(f(0, 1), f(0, 1), {.op = ReduceOp::max})),
            "unsupported: all_reduce: backend poor has no max of f32");
  EXPECT_EQ(said(call::all_reduce(f(0, 1), f(0, 1), {.op = ReduceOp::of(user)})),
            "unsupported: all_reduce: backend poor has no reduction by a user's function of f32");
  EXPECT_EQ(said(call::all_reduce(f(0, 1), f(0, 1), {.order = Order::canonical})),
            "unsupported: all_reduce: backend poor has no sum of f32 in canonical order");
  EXPECT_EQ(said(call::all_gather(f(0, 1), view(other, 3))),
            "unsupported: all_gather: backend poor cannot do it");
  EXPECT_EQ(said(call::send(f(0, 1), 0)), "unsupported: send: backend poor cannot do it");
  EXPECT_EQ(said(call::scan(f(0, 1), view(other, 1))), "unsupported: scan: backend poor cannot do it");
  EXPECT_EQ(said(call::exscan(f(0, 1))), "unsupported: exscan: backend poor cannot do it");
  EXPECT_EQ(said(call::barrier()), "no error");
}

TEST_F(Check, MemoryOfTheWrongKind) {
  traits.device = true;
  traits.name = "gpu";
  EXPECT_EQ(said(Op::all_reduce, f(0, 1), f(0, 1)),
            "unsupported: all_reduce: in is on cpu; backend gpu moves cuda memory");
}

TEST_F(Check, AnEmptyCall) {
  EXPECT_EQ(said(Call{}), "bad_argument: none: the call is empty; make it with a function of namespace call");
}

}  // namespace
}  // namespace weft::test::check_test
