#include "weft/tp/plan.hpp"

#include <gtest/gtest.h>

namespace weft::plan_test {
namespace {

TEST(Plan, StarIsOneStepOrAPartOfOne) {
  for (const auto& [pattern, path] : {std::pair{"", ""},
                                      {"norm", "norm"},
                                      {"*", "norm"},
                                      {"layers.*", "layers.11"},
                                      {"layers.*.attention", "layers.0.attention"},
                                      {"layers.*.mlp.*_proj", "layers.7.mlp.gate_proj"},
                                      {"*.*.*", "layers.0.mlp"},
                                      {"a*b*c", "aabbbcc"},
                                      {"a**", "a"}})
    EXPECT_TRUE(matches(pattern, path)) << pattern << " and " << path;
  for (const auto& [pattern, path] : {std::pair{"", "norm"},
                                      {"norm", ""},
                                      {"norm", "norms"},
                                      {"norms", "norm"},
                                      {"*", "layers.0"},
                                      {"layers.*", "layers"},
                                      {"layers.*", "layers.0.mlp"},
                                      {"layers*", "layers.0"},
                                      {"layers.*.mlp.*_proj", "layers.7.mlp.gate_project"},
                                      {"a*b", "a.b"}})
    EXPECT_FALSE(matches(pattern, path)) << pattern << " and " << path;
}

TEST(Plan, BuiltInStylesHaveTheirNames) {
  EXPECT_EQ(Style::enter.name, "enter");
  EXPECT_EQ(Style::column.name, "column");
  EXPECT_EQ(Style::column_gathered.name, "column_gathered");
  EXPECT_EQ(Style::row.name, "row");
}

TEST(Plan, KeepsEntriesInOrder) {
  Plan plan = {{"a", Style::row}};
  plan.add("b.*", Style::column).add("c", Style::enter);
  ASSERT_EQ(plan.entries().size(), 3u);
  EXPECT_EQ(plan.entries()[1].pattern, "b.*");
  EXPECT_EQ(plan.entries()[2].style, Style::enter);
}

}  // namespace
}  // namespace weft::plan_test
