// Every message of check.cpp, read. The checks are pure, so no group is needed.
#include "backends/check.hpp"

#include <gtest/gtest.h>

#include "support/errors.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/view.hpp"

namespace weft::test {
namespace {

constexpr int kRank = 1, kSize = 3;

class Check : public testing::Test {
 protected:
  Check() : traits(*known_traits("shm")) {}

  // What check() says of a call by rank 1 of 3 (or of `size`), without the tail, which it must have.
  std::string said(Op op, ConstTensorView in, TensorView out, int root_or_peer = 0, CallOptions options = {},
                   int size = kSize) const {
    const bool message = op == Op::send || op == Op::recv;
    Call call{.op = op, .in = in, .out = out, .options = options};
    if (op == Op::send || op == Op::barrier) call.out = {};
    if (op == Op::recv || op == Op::barrier) call.in = {};
    (message ? call.peer : call.root) = root_or_peer;
    const int rank = size == 1 ? 0 : kRank;
    std::string text = error_of([&] {
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

TEST_F(Check, WhatABackendCannotDo) {
  bool flags[30] = {};
  EXPECT_EQ(said(Op::all_reduce, view(flags, 10), view(flags, 10)),
            "unsupported: all_reduce: sum of bool is not defined");
  EXPECT_EQ(said(Op::reduce_scatter, view(flags, 30), view(flags + 10, 10)),
            "unsupported: reduce_scatter: sum of bool is not defined");
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

TEST_F(Check, DeadlinesAreNotNegative) {
  for (const Op op : {Op::all_reduce, Op::barrier, Op::send})
    EXPECT_EQ(said(op, f(0, 1), f(0, 1), 0, {.deadline = Duration(-1)}),
              "bad_argument: " + std::string(name(op)) + ": deadline is negative");
}

}  // namespace
}  // namespace weft::test
