// The least and the largest value of all ranks and where they are, over every backend: order, ties, NaN, in
// place, and what is refused. Under mpirun over the MPI that WEFT_TEST_BACKEND names.
#include "weft/group/min_loc.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <bit>
#include <cmath>
#include <cstdlib>
#include <functional>
#include <limits>
#include <vector>

#include "support/errors.hpp"
#include "support/run_ranks.hpp"
#include "support/transport_setting.hpp"
#include "support/values.hpp"

namespace weft::test::min_loc_test {
namespace {

using testing::HasSubstr;

using Setting = TransportSetting;

class MinLoc : public testing::TestWithParam<Setting> {
 protected:
  void run(int n, const std::function<void(Rank&)>& body) {
    RankOptions options;
    options.backend = GetParam().backend;
    run_ranks(GetParam().kind, GetParam().kind == Ranks::job ? job_size() : n, body, options);
  }
};
INSTANTIATE_TEST_SUITE_P(Each, MinLoc, testing::ValuesIn(transport_settings()), [](const auto& p) {
  return p.param.kind == Ranks::job ? "job" : p.param.backend + "_" + to_string(p.param.kind);
});

constexpr double kNan = std::numeric_limits<double>::quiet_NaN();
constexpr double kInfinity = std::numeric_limits<double>::infinity();

// The values of rank r, or in larger groups of rank r + 3, and the result of all.
struct Column {
  std::vector<double> values;
  std::vector<std::int64_t> indices;
  double least;
  std::int64_t least_at;
  double largest;
  std::int64_t largest_at;
};
const std::vector<Column> kColumns = {
    {{3, 1, 2}, {10, 11, 12}, 1, 11, 3, 10},
    {{1, 1, 1}, {7, -5, 6}, 1, -5, 1, -5},  // of equals the lowest index, not the lowest rank
    {{0.0, -0.0, 0.0}, {0, 9, 2}, -0.0, 9, 0.0, 0},
    {{1, kNan, -kInfinity}, {1, 8, 3}, kNan, 8, kNan, 8},
    {{kNan, 5, -kNan}, {4, 1, 2}, kNan, 2, kNan, 2},
    {{kInfinity, kInfinity, -7}, {3, 2, 1}, -7, 1, kInfinity, 2},
};

template <class T>
void expect_columns(Rank& r, bool in_place) {
  std::vector<T> values;
  std::vector<std::int64_t> indices;
  std::vector<const Column*> columns;
  for (const Column& c : kColumns) {
    bool fits = true;
    for (const double x : c.values)
      fits = fits && (std::is_floating_point_v<T> || (std::isfinite(x) && !(x == 0 && std::signbit(x))));
    if (!fits) continue;
    columns.push_back(&c);
    values.push_back(static_cast<T>(c.values[static_cast<std::size_t>(r.rank % 3)]));
    indices.push_back(c.indices[static_cast<std::size_t>(r.rank % 3)]);
  }
  const auto same = [](T got, double wanted) {
    const T expected = static_cast<T>(wanted);
    if constexpr (std::is_floating_point_v<T>) {
      if (std::isnan(expected)) return std::isnan(got) && !std::signbit(got);
      return got == expected && std::signbit(got) == std::signbit(expected);
    }
    return got == expected;
  };
  for (const bool least : {true, false}) {
    std::vector<T> found = in_place ? values : std::vector<T>(values.size());
    std::vector<std::int64_t> where = in_place ? indices : std::vector<std::int64_t>(indices.size());
    const auto x = view(found);
    const auto at = view(where);
    if (in_place)
      least ? min_loc(r.group(), x, at) : max_loc(r.group(), x, at);
    else
      least ? min_loc(r.group(), view(values), view(indices), x, at)
            : max_loc(r.group(), view(values), view(indices), x, at);
    for (std::size_t i = 0; i < columns.size(); ++i) {
      EXPECT_TRUE(same(found[i], least ? columns[i]->least : columns[i]->largest)) << i << ": " << found[i];
      EXPECT_EQ(where[i], least ? columns[i]->least_at : columns[i]->largest_at) << i;
    }
  }
}

TEST_P(MinLoc, OrdersAndTiesAreThoseThatAreSaid) {
  run(3, [](Rank& r) {
    for (const bool in_place : {false, true}) {
      expect_columns<double>(r, in_place);
      expect_columns<float>(r, in_place);
      expect_columns<std::int64_t>(r, in_place);
      expect_columns<std::int32_t>(r, in_place);
    }
  });
}

// Values and indices that an f64 does not hold.
TEST_P(MinLoc, WholeNumbersKeepAllTheirBits) {
  run(2, [](Rank& r) {
    constexpr std::int64_t kMost = std::numeric_limits<std::int64_t>::max(), kFar = std::int64_t{1} << 60;
    std::vector<std::int64_t> x{kMost - r.rank}, at{kFar + r.rank};
    min_loc(r.group(), x, at);
    EXPECT_EQ(x[0], kMost - (r.size - 1));
    EXPECT_EQ(at[0], kFar + r.size - 1);
  });
}

// No elements, one, a prime number, and more than fit next to an arrival. Many values are equal.
TEST_P(MinLoc, OfManySizes) {
  run(5, [](Rank& r) {
    for (const std::size_t count : {0, 1, 13, 1009, 20011}) {
      std::vector<float> x, most;
      std::vector<std::int64_t> at;
      for (std::size_t i = 0; i < count; ++i) {
        x.push_back(static_cast<float>(value(r.rank, static_cast<std::int64_t>(i))));
        at.push_back(r.size - r.rank);
      }
      std::vector<std::int64_t> where(count);
      most.resize(count);
      max_loc(r.group(), x, at, most, where);
      min_loc(r.group(), x, at);
      for (std::size_t i = 0; i < count; ++i) {
        int least = 0, largest = 0;
        for (int p = 0; p < r.size; ++p) {  // of equal ones the last rank has the lowest index
          const auto of = [&](int rank) { return value(rank, static_cast<std::int64_t>(i)); };
          if (of(p) <= of(least)) least = p;
          if (of(p) >= of(largest)) largest = p;
        }
        ASSERT_EQ(x[i], static_cast<float>(value(least, static_cast<std::int64_t>(i))));
        ASSERT_EQ(at[i], r.size - least) << i;
        ASSERT_EQ(most[i], static_cast<float>(value(largest, static_cast<std::int64_t>(i))));
        ASSERT_EQ(where[i], r.size - largest) << i;
      }
    }
  });
}

TEST_P(MinLoc, OfOneRankIsItsOwn) {
  if (GetParam().kind == Ranks::job) GTEST_SKIP() << "a job has several ranks";
  run(1, [](Rank& r) {
    std::vector<double> x{5, kNan};
    std::vector<std::int64_t> at{-3, 4};
    max_loc(r.group(), x, at);
    EXPECT_EQ(x[0], 5);
    EXPECT_TRUE(std::isnan(x[1]));
    EXPECT_EQ(at, (std::vector<std::int64_t>{-3, 4}));
  });
}

class Refused : public testing::Test {
 protected:
  Refused() {
    Membership m;
    m.store = make_local_store();
    group = ProcessGroup::create(context, "shm", m);
  }
  std::string said(const ConstBuffer& a, const ConstBuffer& b, const Buffer& c, const Buffer& d) {
    return error_text([&] {
      min_loc(group, a, b, c, d);
      return 0;
    });
  }
  Context context;
  ProcessGroup group;
  std::vector<float> values = std::vector<float>(4), least = std::vector<float>(4);
  std::vector<std::int64_t> indices = std::vector<std::int64_t>(4), where = std::vector<std::int64_t>(4);
};

TEST_F(Refused, NamesTheArgument) {
  const ConstBuffer v = view(values), i = view(indices);
  const Buffer l = view(least), w = view(where);
  const std::string tail = " [group \"world\", rank 0]";
  EXPECT_EQ(said(v, i, l, w), "no error");
  EXPECT_EQ(said(v, {indices.data(), 3, DType::i64}, l, w),
            "bad_argument: min_loc: indices has 3 elements; expected 4 (values)" + tail);
  EXPECT_EQ(said(v, i, {least.data(), 2, DType::f32}, w),
            "bad_argument: min_loc: least has 2 elements; expected 4 (values)" + tail);
  EXPECT_EQ(said(v, i, l, {where.data(), 5, DType::i64}),
            "bad_argument: min_loc: where has 5 elements; expected 4 (values)" + tail);
  EXPECT_EQ(said(v, {indices.data(), 4, DType::i32}, l, w),
            "bad_argument: min_loc: indices is i32; expected i64" + tail);
  EXPECT_EQ(said(v, i, l, {where.data(), 4, DType::u64}),
            "bad_argument: min_loc: where is u64; expected i64" + tail);
  EXPECT_EQ(said(v, i, {where.data(), 4, DType::f64}, w),
            "bad_argument: min_loc: least is f64; expected f32 (values)" + tail);
  EXPECT_EQ(said({values.data(), 4, DType::u32}, i, {least.data(), 4, DType::u32}, w),
            "unsupported: min_loc: values is u32; expected f64, f32, i64 or i32" + tail);
  EXPECT_EQ(said({nullptr, 4, DType::f32}, i, l, w),
            "bad_argument: min_loc: values is null; expected 4 elements" + tail);
  EXPECT_EQ(said({values.data(), -1, DType::f32}, i, l, w),
            "bad_argument: min_loc: values has -1 elements; expected 0 or more" + tail);
  EXPECT_EQ(
      said({values.data(), std::int64_t{1} << 60, DType::f32}, i, l, w),
      "bad_argument: min_loc: values has 1152921504606846976 elements; 16 bytes of each do not fit 64 bits" +
          tail);
  EXPECT_EQ(said({values.data(), 4, DType::f32, Device{DeviceKind::cuda, 1}}, i, l, w),
            "unsupported: min_loc: values is on cuda:1; expected cpu memory" + tail);
  EXPECT_EQ(said(v, i, {where.data(), 4, DType::f32}, w),
            "bad_argument: min_loc: least and where overlap" + tail);
  ProcessGroup none;
  EXPECT_THAT(error_text([&] {
                max_loc(none, v, i, l, w);
                return 0;
              }),
              HasSubstr("bad_argument: "));
}

// A rank that calls max_loc, or has another count, is named.
TEST_P(MinLoc, RanksThatCallOtherThingsAreAMismatch) {
  if (GetParam().kind == Ranks::job) GTEST_SKIP() << "a job with a failed group ends badly";
  for (const bool count : {true, false})
    run(2, [&](Rank& r) {
      std::vector<float> x(count && r.rank == 1 ? 3u : 2u);
      std::vector<std::int64_t> at(x.size());
      const Error e = error_of([&] {
        if (count || r.rank == 0)
          min_loc(r.group(), x, at);
        else
          max_loc(r.group(), x, at);
        return 0;
      });
      EXPECT_EQ(e.code(), ErrorCode::mismatch) << e.what();
      EXPECT_EQ(e.op(), Op::all_reduce);
      if (count) {
        EXPECT_THAT(e.what(), HasSubstr("x3"));
      }
      if (GetParam().backend != "shm") return;  // the others have a hash of the name
      EXPECT_THAT(e.what(), HasSubstr("min_loc of f32"));
      if (!count) {
        EXPECT_THAT(e.what(), HasSubstr("max_loc of f32"));
      }
    });
}

}  // namespace
}  // namespace weft::test::min_loc_test
