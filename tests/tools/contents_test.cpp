// The report of `weft parity --exact` on two runs whose bits differ.
#include "contents.hpp"

#include <gtest/gtest.h>

#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft::contents_test {
namespace {

using namespace weft::tools;

RunContents run(double loss = 2, double norm = 1, const std::string& gradient = "aa",
                const std::string& parameter = "bb") {
  RunContents c;
  c.losses = {3, loss}, c.norms = {1, norm};
  c.hashes = {{{0, "gradient", "w"}, "11"},
              {{0, "parameter", "w"}, "22"},
              {{1, "gradient", "w"}, gradient},
              {{1, "parameter", "w"}, parameter}};
  return c;
}

std::string shown(const std::optional<ContentDifference>& d) {
  if (!d) return "none";
  return "step " + std::to_string(d->step) + " " +
         (d->tensor ? d->tensor->kind + " " + d->tensor->path : d->what);
}

TEST(Contents, TheFirstDifferenceOfAStep) {
  EXPECT_EQ(shown(first_difference(run(), run())), "none");
  EXPECT_EQ(shown(first_difference(run(), run(2, 1, "aa", "x"))), "step 1 parameter w");
  EXPECT_EQ(shown(first_difference(run(), run(2, 1.5, "aa", "x"))), "step 1 the gradient norm");
  EXPECT_EQ(shown(first_difference(run(), run(2, 1.5, "x", "x"))), "step 1 gradient w");
  EXPECT_EQ(shown(first_difference(run(), run(2.5, 1.5, "x", "x"))), "step 1 the loss");
  EXPECT_EQ(shown(first_difference(run(0.0), run(-0.0))), "step 1 the loss") << "bits, not values";
  RunContents other = run(2.5);
  other.hashes.insert(other.hashes.begin() + 2, {{1, "activation", "layers.0"}, "33"});
  RunContents others = other;
  others.hashes[2].hash = "44";
  EXPECT_EQ(shown(first_difference(other, others)), "step 1 activation layers.0");
  other.hashes.push_back({{1, "state", "w.exp_avg"}, "55"});
  others = other;
  others.hashes.back().hash = "66";
  EXPECT_EQ(shown(first_difference(other, others)), "step 1 state w.exp_avg");
  RunContents fewer = run();
  fewer.hashes.pop_back();
  EXPECT_EQ(shown(first_difference(run(), fewer)), "step 1 parameter w");
}

TEST(Contents, LinesAreReadBack) {
  Context context;
  Tensor t(context, {2});
  t.f32()[0] = 1, t.f32()[1] = 2;
  const std::string line = content_line({7, "gradient", "a.b"}, t);
  const auto read = read_contents(line + "\n" + content_line({8, "parameter", "c"}, t) + "\n", "here");
  ASSERT_EQ(read.size(), 2u);
  EXPECT_EQ(read[0].name, (ContentName{7, "gradient", "a.b"}));
  EXPECT_EQ(read[0].hash, read[1].hash);
  t.f32()[1] = 3;
  EXPECT_NE(content_line({7, "gradient", "a.b"}, t), line);
  EXPECT_EQ(test::error_text([] { read_contents("step 1 gradient\n", "here"); }),
            "bad_argument: here: line 1 is \"step 1 gradient\"; expected step, kind, path and hash");
}

// Lines have the global content, the same on every mesh; reports name the ranks that hold an element.
TEST(Contents, OfGlobalIndicesAndRanks) {
  std::string one, values;
  for (const int ranks : {1, 2})
    test::run_ranks(test::Ranks::threads, ranks, [&](test::Rank& rank) {
      const DeviceMesh mesh(rank.group(), {{"tp", ranks}});
      Tensor whole(rank.context, {3, 4});
      for (std::int64_t i = 0; i < 12; ++i) whole.f32()[static_cast<std::size_t>(i)] = static_cast<float>(i);
      const LayoutRef layout = make_layout(mesh, {Shard{1}}, {3, 4});
      const Tensor part = distribute(whole, layout);
      const std::string line = content_line({0, "gradient", "w"}, part), own = content_values(part);
      if (ranks == 1) one = line, values = own;
      EXPECT_EQ(line, one);
      EXPECT_EQ(value_difference(values, own, "here"), "");
      whole.f32()[7] = 8, whole.f32()[11] = 0;
      EXPECT_EQ(value_difference(values, content_values(distribute(whole, layout)), "here"),
                std::string(
                    "element (1, 3) of (3, 4): 40e00000 and 41000000, on rank 0 of the first and on rank ") +
                    (ranks == 1 ? "0" : "1") + " of the second; 2 of 12 elements differ");
    });
}

}  // namespace
}  // namespace weft::contents_test
