#include "weft/dp/reduce_gradients.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <cstring>
#include <deque>
#include <limits>
#include <string>
#include <vector>

#include "dp/vectors.hpp"
#include "support/calls_made.hpp"
#include "weft/base/random.hpp"
#include "weft/dp/replicated.hpp"

namespace weft::reduce_gradients_test {
namespace {

using test::error_of;
using test::error_text;
using test::Rank;
using test::Ranks;
using test::Vectors;

// The text before that of tp rank 1 on this rank of dp x tp.
std::string told(const Rank& rank) {
  if (rank.rank % 2 == 1) return {};
  return "tp rank 1 (rank " + std::to_string(rank.rank + 1) + " of \"world\") failed: reduce_gradients: ";
}

// Every mixture of placements on the axes of a mesh, as f32 and f64, and what becomes of each by plain loops
// in f64. Numbers are whole and small: all sums and averages are exact.
class Mixture {
 public:
  // `data`: how many axes, the first ones, have ranks that saw different data. Averages are left out if they
  // are not exact.
  Mixture(const DeviceMesh& mesh, int data, bool averages = true)
      : mesh_(mesh), axes_(mesh.shape().axis_count()), averages_(averages) {
    Placements placements(static_cast<std::size_t>(axes_));
    put(placements, 0, data);
  }
  std::vector<Gradient>& all() { return list_; }

  void expect_reduced() const {
    for (std::size_t i = 0; i < list_.size(); ++i) {
      const std::vector<double> expected = reduced(i);
      for (std::size_t k = 0; k < expected.size(); ++k)
        EXPECT_EQ(list_[i].data.dtype == DType::f32 ? static_cast<double>(list_[i].data.as<float>()[k])
                                                    : list_[i].data.as<double>()[k],
                  expected[k])
            << list_[i].name << " [" << k << "] on rank " << mesh_.rank();
      for (int a = 0; a < axes_; ++a) {
        const Placement& now = list_[i].layout->placements[static_cast<std::size_t>(a)];
        EXPECT_EQ(is_shard(now), is_shard(was_[i]->placements[static_cast<std::size_t>(a)]));
        EXPECT_TRUE(is_shard(now) || is_replicate(now)) << list_[i].name;
      }
    }
  }

 private:
  void put(Placements& placements, int axis, int data) {
    if (axis < axes_) {
      for (const Placement& p : {Placement(Partial{}), Placement(Partial{ReduceOp::avg}), Placement(Shard{0}),
                                 Placement(Replicate{})}) {
        if (axis < data && is_replicate(p)) continue;
        if (!averages_ && p == Placement(Partial{ReduceOp::avg})) continue;
        placements[static_cast<std::size_t>(axis)] = p;
        put(placements, axis + 1, data);
      }
      return;
    }
    const LayoutRef layout = make_layout(mesh_, placements, {13});
    const auto count = static_cast<std::size_t>(layout->local_shape().count());
    std::string name = to_string(*layout);
    was_.push_back(layout);
    names_.push_back(name);
    std::vector<double> values;
    for (std::size_t k = 0; k < count; ++k)
      values.push_back(value(was_.size() - 1, mesh_.shape().coordinates(mesh_.rank()), k));
    if (was_.size() % 3 != 0) {
      std::vector<float>& f32 = f32_.emplace_back(values.begin(), values.end());
      list_.push_back({names_.back(), view(f32), layout});
    } else {
      std::vector<double>& f64 = f64_.emplace_back(std::move(values));
      list_.push_back({names_.back(), view(f64), layout});
    }
  }

  // Element k of the contribution of the rank at `place`; replicas are equal.
  double value(std::size_t i, const std::vector<int>& place, std::size_t k) const {
    int number = static_cast<int>(7 * i + k);
    for (int a = 0; a < axes_; ++a)
      if (!is_replicate(was_[i]->placements[static_cast<std::size_t>(a)]))
        number = 5 * number + (a + 2) * place[static_cast<std::size_t>(a)];
    return 8 * (number % 61 - 30);
  }

  std::vector<double> reduced(std::size_t i) const {
    std::vector<double> sums(static_cast<std::size_t>(was_[i]->local_shape().count()));
    const std::vector<int> own = mesh_.shape().coordinates(mesh_.rank());
    double parts = 1;
    for (int a = 0; a < axes_; ++a)
      if (was_[i]->placements[static_cast<std::size_t>(a)] == Placement(Partial{ReduceOp::avg}))
        parts *= mesh_.shape().size(a);
    for (int r = 0; r < mesh_.size(); ++r) {
      const std::vector<int> place = mesh_.shape().coordinates(r);
      bool counts = true;  // another rank along the axes on which the gradient is partial
      for (std::size_t a = 0; a < place.size(); ++a)
        counts = counts && (is_partial(was_[i]->placements[a]) || place[a] == own[a]);
      for (std::size_t k = 0; counts && k < sums.size(); ++k) sums[k] += value(i, place, k);
    }
    for (double& sum : sums) sum /= parts;
    return sums;
  }

  DeviceMesh mesh_;
  int axes_;
  bool averages_;
  std::deque<std::string> names_;
  std::deque<std::vector<float>> f32_;
  std::deque<std::vector<double>> f64_;
  std::vector<LayoutRef> was_;
  std::vector<Gradient> list_;
};

TEST(ReduceGradients, EveryMixtureOnDataTimesTensor) {
  for (const int dp : {1, 2, 3})
    test::run_ranks(Ranks::threads, 2 * dp, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"dp", dp}, {"tp", 2}});
      Mixture mixture(mesh, 1, dp != 3);
      EXPECT_EQ(mixture.all().size(), dp == 3 ? 6u : 12u);
      reduce_gradients(mixture.all(), mesh, {.data_axes = mesh["dp"]});
      mixture.expect_reduced();
    });
}

TEST(ReduceGradients, EveryMixtureOnDataTimesContextTimesTensor) {
  test::run_ranks(Ranks::threads, 8, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"cp", 2}, {"tp", 2}});
    Mixture mixture(mesh, 2);
    EXPECT_EQ(mixture.all().size(), 36u);
    reduce_gradients(mixture.all(), mesh, {.data_axes = mesh[{"dp", "cp"}]});
    mixture.expect_reduced();
    // Reduces over a part of the axes first, and then over the rest.
    Mixture twice(mesh, 2);
    reduce_gradients(twice.all(), mesh[{"dp", "cp"}], {.data_axes = mesh[{"dp", "cp"}]});
    reduce_gradients(twice.all(), mesh["tp"]);
    twice.expect_reduced();
  });
}

// The other names of the function give the same bits, for random numbers, whose sums depend on the order.
TEST(ReduceGradients, TheOldNamesGiveTheSameBits) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const auto random = [&](std::size_t i) {
      return static_cast<float>(std::sin(static_cast<double>(i * 4) + rank.rank * 0.7) * 1e3);
    };
    const auto put = [&](Vectors& g) {
      g.put("sum", make_layout(mesh, {Partial{}, Partial{}}, {1001}), random);
      g.put("mean", make_layout(mesh, {Partial{ReduceOp::avg}, Partial{}}, {77}), random);
      g.put("cut", make_layout(mesh, {Partial{}, Shard{0}}, {300}), random);
      g.put("more", make_layout(mesh, {Partial{}, Partial{}}, {5}), random);
    };
    const auto same = [&](Vectors& a, Vectors& b) {
      for (std::size_t i = 0; i < a.all().size(); ++i) {
        EXPECT_EQ(std::memcmp(a.values(i).data(), b.values(i).data(), 4 * a.values(i).size()), 0) << i;
        EXPECT_EQ(a.at(i).layout, b.at(i).layout);
      }
    };
    Vectors averaged, as_data;
    put(averaged), put(as_data);
    average_gradients(averaged.all(), mesh);
    reduce_gradients(as_data.all(), mesh, {.data_axes = mesh});
    same(averaged, as_data);

    const auto nearly = [&](std::size_t i) { return 1.0f + static_cast<float>(rank.rank * i) * 0x1p-22f; };
    Vectors synchronised, as_model;
    for (Vectors* g : {&synchronised, &as_model}) {
      put(*g);
      g->put("replica", replicated_layout(mesh, {9}), nearly);
    }
    sync_replicated_gradients(synchronised.all(), mesh);
    reduce_gradients(as_model.all(), mesh);
    same(synchronised, as_model);

    // Data axes change the result of no correct call.
    Vectors along_tp, both;
    for (Vectors* g : {&along_tp, &both}) {
      put(*g);
      g->put("replica", make_layout(mesh, {Shard{0}, Replicate{}}, {9}), nearly);
    }
    sync_replicated_gradients(along_tp.all(), mesh);
    reduce_gradients(both.all(), mesh, {.data_axes = mesh["dp"]});
    same(along_tp, both);
  });
}

TEST(ReduceGradients, ReplicateOnADataAxisIsRefused) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const auto mine = [&](std::size_t) { return static_cast<float>(rank.rank); };
    Vectors g;
    g.put("w", make_layout(mesh, {Partial{}, Shard{0}}, {4}), mine);
    g.put("norm", replicated_layout(mesh, {4}), mine);  // drifted, too
    const Error e = error_of([&] { reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"]}); });
    EXPECT_EQ(e.code(), ErrorCode::layout);
    EXPECT_STREQ(e.what(),
                 "reduce_gradients: the gradient of \"norm\" is Replicate on dp=2; expected Partial(sum) or "
                 "Partial(avg): there is nothing to reduce");
    EXPECT_EQ(g.values(0), std::vector<float>(2, static_cast<float>(rank.rank))) << "changed all the same";
    EXPECT_EQ(g.at(0).layout, make_layout(mesh, {Partial{}, Shard{0}}, {4}));
    // An axis of one rank has nothing to reduce.
    const DeviceMesh one(rank.group(), {{"dp", 1}, {"tp", 4}});
    Vectors whole;
    whole.put("norm", replicated_layout(one, {4}), [](std::size_t) { return 2.0f; });
    reduce_gradients(whole.all(), one, {.data_axes = one["dp"]});
    EXPECT_EQ(whole.values(0), std::vector<float>(4, 2.0f));
  });
}

// A gradient that is summed over the data axis, and whose replicas along a model axis differ.
TEST(ReduceGradients, DriftOnAModelAxisIsToldBeforeAnythingChanges) {
  for (const std::optional<double> tolerance : {ReduceOptions{}.tolerance, std::optional(0.0)})
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      const auto mine = [&](std::size_t) { return static_cast<float>(rank.rank + 1); };
      Vectors g;
      g.put("w", make_layout(mesh, {Partial{}, Partial{}}, {4}), mine);
      g.put("norm", make_layout(mesh, {Partial{}, Replicate{}}, {4}), [&](std::size_t i) {
        return rank.rank == 3 && i == 2 ? 9.0f : rank.rank < 2 ? 1.0f : 2.0f;
      });
      const std::vector<float> before[] = {g.values(0), g.values(1)};
      const Error e = error_of(
          [&] { reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"], .tolerance = tolerance}); });
      EXPECT_EQ(e.code(), ErrorCode::mismatch);
      EXPECT_STREQ(
          e.what(),
          tolerance == 0
              ? "reduce_gradients: the gradient of \"norm\" is Replicate on tp=2, but on dp,tp ranks 2, 3 it "
                "has other bits, where the tolerance is 0; a replica drifted, or the gradient is Partial "
                "there"
              : "reduce_gradients: the gradient of \"norm\" is Replicate on tp=2, but on dp,tp ranks 2, 3 it "
                "is 3.5 from the average, 3.19e+03 times what rounding explains; a replica drifted, or the "
                "gradient is Partial there");
      EXPECT_EQ(e.ranks().size(), 2u);
      for (std::size_t i = 0; i < 2; ++i) {
        EXPECT_EQ(g.values(i), before[i]);
        EXPECT_TRUE(is_partial(g.at(i).layout->on(mesh["dp"])));
      }
      // On request the gradient is averaged over the replicas, and then summed over the data axis.
      reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"], .on_drift = OnDrift::average});
      EXPECT_EQ(g.values(0), std::vector<float>(4, 10.0f));
      EXPECT_EQ(g.values(1), (std::vector<float>{3, 3, 6.5, 3}));
    });
}

TEST(ReduceGradients, AnotherListOnOneRankIsNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const auto one = [](std::size_t) { return 1.0f; };
    const auto text = [&](Vectors& g) {
      return error_text([&] { reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"]}); });
    };
    const LayoutRef used = make_layout(mesh, {Partial{}, Replicate{}}, {2}),
                    cut = make_layout(mesh, {Partial{}, Shard{0}}, {2});
    Vectors placement, fewer;
    placement.put("a", rank.rank == 2 ? cut : used, one);
    EXPECT_EQ(text(placement),
              "mismatch: reduce_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(sum), tp: "
              "Replicate]) on dp,tp rank 0, but \"a\" (f32 (2) as [dp: Partial(sum), tp: Shard(0)]) on "
              "dp,tp rank 2");
    if (rank.rank != 3) fewer.put("a", used, one);
    EXPECT_EQ(text(fewer),
              "mismatch: reduce_gradients: gradient 0 is \"a\" (f32 (2) as [dp: Partial(sum), tp: "
              "Replicate]) on dp,tp rank 0, but missing on dp,tp rank 3");
    for (const float x : placement.values(0)) EXPECT_EQ(x, 1.0f);
    Vectors good;  // the group lives
    good.put("a", used, one);
    reduce_gradients(good.all(), mesh, {.data_axes = mesh["dp"]});
    EXPECT_EQ(good.values(0), std::vector<float>(2, 2.0f));
  });
}

TEST(ReduceGradients, WrongDataAxesAreNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}}), other(rank.group(), {{"dp", 4}});
    Vectors g;
    g.put("w", make_layout(mesh, {Partial{}, Replicate{}}, {2}), [](std::size_t) { return 1.0f; });
    const auto text = [&](const DeviceMesh& axes, const auto& data) {
      return error_text([&] { reduce_gradients(g.all(), axes, {.data_axes = data()}); });
    };
    EXPECT_EQ(text(mesh, [&] { return mesh["data"]; }),
              "bad_argument: mesh: no axis \"data\" in dp=2 x tp=2");
    EXPECT_EQ(text(mesh["tp"], [&] { return mesh["dp"]; }),
              "bad_argument: reduce_gradients: options.data_axes has dp=2; expected axes of tp=2");
    EXPECT_EQ(text(mesh["tp"], [&] { return mesh; }),
              "bad_argument: reduce_gradients: options.data_axes has dp=2; expected axes of tp=2");
    EXPECT_EQ(text(mesh, [&] { return other["dp"]; }),
              "bad_argument: reduce_gradients: options.data_axes is dp=4, of another mesh; expected axes of "
              "dp=2 x tp=2");
    EXPECT_EQ(text(DeviceMesh(), [&] { return mesh["dp"]; }),
              "bad_argument: reduce_gradients: axes is an empty DeviceMesh, made by default or moved from");
    // A fault on one rank only: all ranks get the error.
    EXPECT_EQ(text(mesh["tp"], [&] { return rank.rank % 2 == 1 ? mesh["dp"] : mesh["tp"]; }),
              std::string("bad_argument: reduce_gradients: ") + told(rank) +
                  "options.data_axes has dp=2; expected axes of tp=2");
    EXPECT_EQ(g.values(0), std::vector<float>(2, 1.0f));
    reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"]});  // the group lives
  });
}

// If one rank treated an axis as a data axis and another did not, the first would throw and the other would
// wait.
TEST(ReduceGradients, OtherOptionsOnOneRankAreNamed) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    Vectors g;
    g.put("w", replicated_layout(mesh, {2}), [](std::size_t) { return 1.0f; });
    const bool odd = rank.rank == 3;
    EXPECT_EQ(
        error_text([&] { reduce_gradients(g.all(), mesh, {.data_axes = odd ? DeviceMesh() : mesh["dp"]}); }),
        "mismatch: reduce_gradients: ranks gave different options: tolerance unset, on_drift error and "
        "data_axes dp on dp,tp rank 0, tolerance unset, on_drift error and data_axes none on dp,tp rank "
        "3");
    EXPECT_EQ(error_text([&] {
                odd ? average_gradients(g.all(), mesh) : reduce_gradients(g.all(), mesh, {.tolerance = 0.5});
              }),
              std::string("mismatch: ") + (odd ? "average_gradients" : "reduce_gradients") +
                  ": ranks gave different options: tolerance 0.5, on_drift error and data_axes none on dp,tp "
                  "rank 0, tolerance unset, on_drift error and data_axes dp,tp on dp,tp rank 3");
    EXPECT_EQ(
        error_text([&] { reduce_gradients(g.all(), mesh, {.tolerance = odd ? 0.5 : 0.25}); }),
        "mismatch: reduce_gradients: ranks gave different options: tolerance 0.25 and on_drift error on "
        "dp,tp rank 0, tolerance 0.5 and on_drift error on dp,tp rank 3");
    EXPECT_EQ(error_text(
                  [&] { reduce_gradients(g.all(), mesh["tp"], {.tolerance = rank.rank % 2 == 1 ? -1 : 1}); }),
              std::string("bad_argument: reduce_gradients: ") + told(rank) +
                  "options.tolerance is -1; expected 0 or more");
  });
}

TEST(ReduceGradients, AnEmptyListIsCompared) {
  test::run_ranks(Ranks::threads, 4, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
    const std::size_t before = test::calls_made(rank.group());
    reduce_gradients({}, mesh, {.data_axes = mesh["dp"]});
    EXPECT_EQ(test::calls_made(rank.group()), before + 1);
    EXPECT_EQ(error_of([&] { reduce_gradients({}, mesh, {.tolerance = rank.rank}); }).code(),
              ErrorCode::mismatch);
  });
}

TEST(ReduceGradients, AComputeOfTheHostChangesNoBit) {
  test::run_ranks(Ranks::threads, 2, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 1}});
    std::vector<float> first;
    for (const int threads : {0, 1, 3}) {
      Vectors g;
      g.put("w", make_layout(mesh, {Partial{}, Replicate{}}, {100003}),
            [&](std::size_t i) { return std::sin(static_cast<float>(i) + static_cast<float>(rank.rank)); });
      std::optional<Compute> compute;
      if (threads > 0) compute.emplace(rank.context, threads);
      reduce_gradients(g.all(), mesh, {.data_axes = mesh["dp"], .compute = compute ? &*compute : nullptr});
      if (first.empty()) first = g.values(0);
      EXPECT_EQ(g.values(0), first) << threads;
    }
  });
}

// One comparison, and one all-reduce for each reduction, dtype and set of axes that occur.
TEST(ReduceGradients, OneCallForEachReductionDtypeAndSetOfAxes) {
  test::run_ranks(Ranks::threads, 8, [](Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"cp", 2}, {"tp", 2}});
    const Partial sum{}, mean{ReduceOp::avg};
    const Shard rows{0};
    const Replicate same{};
    std::deque<std::vector<float>> f32;
    std::deque<std::vector<bf16>> bf16s;
    std::vector<Gradient> list;
    const auto put = [&](const Placements& placements) {
      const LayoutRef layout = make_layout(mesh, placements, {8});
      const auto count = static_cast<std::size_t>(layout->local_shape().count());
      list.push_back({"f", view(f32.emplace_back(count, 1.0f)), layout});
      list.push_back({"b", view(bf16s.emplace_back(count, bf16(1.0f))), layout});
    };
    for (int repeat = 0; repeat < 3; ++repeat) {
      put({sum, sum, sum});   // all: one for each dtype
      put({sum, sum, rows});  // dp and cp
      put({sum, sum, same});  // the same
      put({mean, mean, same});
      put({rows, sum, same});  // cp
      put({rows, rows, rows});
    }
    const DeviceMesh both = mesh[{"dp", "cp"}], cp = mesh["cp"];
    const auto calls = [&](const DeviceMesh& of) { return test::calls_made(of.group()); };
    for (const DeviceMesh& of : {both, cp}) of.group();
    const std::size_t of_all = calls(mesh), of_both = calls(both), of_cp = calls(cp);
    reduce_gradients(list, mesh, {.data_axes = both});
    EXPECT_EQ(calls(mesh), of_all + 1 + 2) << "the comparison, and sums of two dtypes";
    EXPECT_EQ(calls(both), of_both + 2 + 2) << "sums and averages of two dtypes";
    EXPECT_EQ(calls(cp), of_cp + 2) << "sums of two dtypes";
    EXPECT_EQ(f32[0][0], 8.0f);
    EXPECT_EQ(f32[3][0], 1.0f);
    reduce_gradients(list, mesh);  // nothing is left
    EXPECT_EQ(calls(mesh), of_all + 4);
    EXPECT_EQ(calls(both), of_both + 4);
  });
}

}  // namespace
}  // namespace weft::reduce_gradients_test
