// Prefix reductions against reduce() of each prefix, and the identities against reduce() itself.
#include "reduce/scan.hpp"

#include <gtest/gtest.h>

#include <cstring>
#include <vector>

#include "reduce/reduce.hpp"
#include "support/values.hpp"

namespace weft::test::scan_test {
namespace {

using Kind = ReduceOp::Kind;

struct Rows {
  Rows(int n, std::int64_t count, DType dtype)
      : bytes(static_cast<std::size_t>(n),
              std::vector<std::byte>(static_cast<std::size_t>(count * size_bytes(dtype)))) {}
  std::vector<const std::byte*> ins() const {
    std::vector<const std::byte*> all;
    for (const auto& row : bytes) all.push_back(row.data());
    return all;
  }
  std::vector<std::byte*> outs() {
    std::vector<std::byte*> all;
    for (auto& row : bytes) all.push_back(row.data());
    return all;
  }
  std::vector<std::vector<std::byte>> bytes;
};

Rows inputs(const ReduceOp& op, int n, std::int64_t count, DType dtype) {
  Rows rows(n, count, dtype);
  for (int r = 0; r < n; ++r)
    for (std::int64_t i = 0; i < count; ++i)
      store(rows.bytes[static_cast<std::size_t>(r)].data(), dtype, i, input(op, dtype, r, i));
  return rows;
}

void each_pair(const std::function<void(DType, ReduceOp)>& body) {
  for (int d = 0; d < kDTypeCount; ++d)
    for (int k = 0; k < kReduceKindCount; ++k)
      if (can_reduce(static_cast<DType>(d), static_cast<Kind>(k)))
        body(static_cast<DType>(d), reduction(static_cast<Kind>(k)));
}

TEST(Scan, PrefixesAreReductionsOfTheRanksUpTo) {
  each_pair([](DType dtype, ReduceOp op) {
    for (const int n : {1, 2, 3, 5, 8})
      for (const std::int64_t count : {0, 1, 31})
        for (const bool exclusive : {false, true})
          for (const bool in_place : {false, true}) {
            Rows in = inputs(op, n, count, dtype), out(n, count, dtype), kept = in;
            if (!in_place) kept = out;
            scan(dtype, op, exclusive, in.ins(), in_place ? in.outs() : out.outs(), count);
            const Rows given = inputs(op, n, count, dtype);
            const std::vector<const std::byte*> rows = given.ins();
            const Rows& got = in_place ? in : out;
            for (int r = 0; r < n; ++r) {
              const auto row = static_cast<std::size_t>(r);
              const std::size_t ranks = row + (exclusive ? 0 : 1);
              std::vector<std::byte> expected = kept.bytes[row];
              std::byte* const to = expected.data();
              if (ranks > 0) reduce(dtype, op, std::span(rows).first(ranks), {&to, 1}, count);
              if (ranks == 0 && has_identity(op.kind)) continue;
              EXPECT_EQ(got.bytes[row], expected)
                  << name(op) << " of " << name(dtype) << ", rank " << r << " of " << n << " x" << count;
            }
          }
  });
}

// Combined with the identity, a number stays what it is.
TEST(Scan, IdentitiesChangeNothing) {
  each_pair([](DType dtype, ReduceOp op) {
    constexpr std::int64_t kCount = 67;
    if (op.kind == Kind::premul_sum) op.scale = 1;
    Rows pair = inputs(op, 2, kCount, dtype);
    const std::vector<std::byte> untouched = pair.bytes[1];
    fill_identity(dtype, op.kind, pair.bytes[1].data(), kCount);
    EXPECT_EQ(has_identity(op.kind), identity_of(op, dtype).has_value());
    if (!has_identity(op.kind)) {
      EXPECT_EQ(pair.bytes[1], untouched) << name(op);
      return;
    }
    Rows out(2, kCount, dtype);
    const std::vector<const std::byte*> both = pair.ins(), one = {both[0]};
    std::byte *const to = out.bytes[0].data(), *const alone = out.bytes[1].data();
    reduce(dtype, op, both, {&to, 1}, kCount);
    reduce(dtype, op, one, {&alone, 1}, kCount);
    for (std::int64_t i = 0; i < kCount; ++i) {
      EXPECT_EQ(load(to, dtype, i), load(alone, dtype, i))  // but -0 + 0 is 0
          << name(op) << " of " << name(dtype);
      EXPECT_EQ(load(pair.bytes[1].data(), dtype, i), identity_of(op, dtype))
          << name(op) << " of " << name(dtype);
    }
  });
}

TEST(Scan, LeavesOutWhatIsNotWanted) {
  Rows in = inputs(ReduceOp::sum, 3, 5, DType::i32), out(3, 5, DType::i32);
  std::vector<std::byte*> outs = out.outs();
  outs[1] = nullptr;
  const std::vector<std::byte> before = out.bytes[1];
  scan(DType::i32, ReduceOp::sum, false, in.ins(), outs, 5);
  EXPECT_EQ(out.bytes[1], before);
  EXPECT_EQ(load(out.bytes[2].data(), DType::i32, 4), combined(ReduceOp::sum, DType::i32, 3, 4));
}

}  // namespace
}  // namespace weft::test::scan_test
