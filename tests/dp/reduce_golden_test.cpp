// Gradients of other projects' parallel layers, as their ranks had them, against those of the whole layer: in
// f64, to the last digits.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <deque>
#include <string>
#include <vector>

#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "weft/dp/reduce_gradients.hpp"

namespace weft::reduce_golden_test {
namespace {

using test::Rank;
using test::Ranks;

class Doubles {
 public:
  void put(const std::string& name, const LayoutRef& layout, std::vector<double> values) {
    list_.push_back({names_.emplace_back(name), view(values_.emplace_back(std::move(values))), layout});
    list_.back().data.shape = layout->local_shape();
    list_.back().data.strides = row_major(layout->local_shape());
  }
  std::vector<Gradient>& all() { return list_; }
  void expect(std::size_t i, const std::vector<double>& expected) const {
    ASSERT_EQ(values_[i].size(), expected.size()) << names_[i];
    double most = 0;
    for (const double x : expected) most = std::max(most, std::abs(x));
    for (std::size_t k = 0; k < expected.size(); ++k)
      EXPECT_NEAR(values_[i][k], expected[k], 1e-13 * most) << names_[i] << " " << k;
  }

 private:
  std::deque<std::string> names_;
  std::deque<std::vector<double>> values_;
  std::vector<Gradient> list_;
};

// Each rank has the gradient of its own heads. Position biases are Partial on tp, projections are cut, norms
// are the same. The data ranks have a quarter and three quarters of all samples.
TEST(ReduceGolden, TensorParallelStageOfMilesCredit) {
  const auto files = test::golden_files("tp_plan_credit");
  if (files.empty()) GTEST_SKIP() << "no tp_plan_credit*.safetensors in " << test::golden_dir();
  for (const auto& file : files)
    test::run_ranks(Ranks::threads, 4, [&](Rank& rank) {
      test::Golden golden(file);
      const DeviceMesh mesh(rank.group(), {{"dp", 2}, {"tp", 2}});
      const int dp = mesh.coordinate("dp"), tp = mesh.coordinate("tp");
      Doubles gradients;
      std::vector<std::vector<double>> expected;
      int partial = 0, cut = 0, same = 0;
      for (const std::string& name : golden.names("grad.param.")) {
        const std::string of_rank = "aux.rank" + std::to_string(tp) + "." + name;
        std::vector<double> values = golden.values(name);
        Placement on_tp = Replicate{};
        if (!golden.names(of_rank).empty()) {
          on_tp = Partial{};
          expected.push_back(values);
          values = golden.values(of_rank);
          ++partial;
        } else if (name.ends_with(".to_q.weight") || name.ends_with(".layers.1.weight")) {
          on_tp = Shard{0};
          const auto half = static_cast<std::ptrdiff_t>(values.size() / 2);
          values = {values.begin() + tp * half, values.begin() + (tp + 1) * half};
          expected.push_back(values);
          ++cut;
        } else {
          expected.push_back(values);
          ++same;
        }
        for (double& x : values) x *= dp == 0 ? 0.25 : 0.75;
        gradients.put(name, make_layout(mesh, {Partial{}, on_tp}, golden.tensor(name).shape()), values);
      }
      EXPECT_GE(partial, 26);
      EXPECT_GE(cut, 2);
      EXPECT_GE(same, 8);
      reduce_gradients(gradients.all(), mesh, {.data_axes = mesh["dp"]});
      for (std::size_t i = 0; i < expected.size(); ++i) gradients.expect(i, expected[i]);
    });
}

// A convolution of a map that is cut into rows: the shards' gradients are to be summed; the project takes
// their mean.
TEST(ReduceGolden, ConvolutionsOfCutMaps) {
  const auto files = test::golden_files("halo_conv_");
  if (files.empty()) GTEST_SKIP() << "no halo_conv_*.safetensors in " << test::golden_dir();
  for (const auto& file : files)
    for (const int n : {2, 3, 4})
      test::run_ranks(Ranks::threads, n, [&](Rank& rank) {
        SCOPED_TRACE(file.filename().string());
        test::Golden golden(file);
        const DeviceMesh mesh(rank.group(), {{"dp", 1}, {"domain", n}});
        Doubles gradients;
        const std::string own = "shard.n" + std::to_string(n) + ".r" + std::to_string(rank.rank) + ".";
        const std::vector<std::string> names = golden.names("grad.param.");
        for (const std::string& name : names)
          gradients.put(name, make_layout(mesh, {Partial{}, Partial{}}, golden.tensor(name).shape()),
                        golden.values(own + name));
        EXPECT_EQ(names.size(), 2u);
        reduce_gradients(gradients.all(), mesh, {.data_axes = mesh});
        for (std::size_t i = 0; i < names.size(); ++i) gradients.expect(i, golden.values(names[i]));
      });
}

}  // namespace
}  // namespace weft::reduce_golden_test
