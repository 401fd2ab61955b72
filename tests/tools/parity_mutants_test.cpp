// Mistakes in parallel code that `weft parity` finds without exact mode. Mistakes below chaos, which only
// exact mode finds, are in tests/models/exact_mutants_test.cpp.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/command_output.hpp"

namespace weft::parity_mutants_test {
namespace {

using testing::HasSubstr;

struct Mutant {
  const char *name, *test;
};

test::CommandOutput parity_tests(const std::string& mutant, const std::string& tests) {
  return test::output_of(fmt::format("WEFT_MUTANT={} timeout 100 {} --gtest_filter={} 2>&1 </dev/null",
                                     mutant, WEFT_PARITY_MUTANTS, tests));
}

class ParityMutants : public testing::TestWithParam<Mutant> {};

TEST_P(ParityMutants, IsFound) {
  const auto [name, test] = GetParam();
  const test::CommandOutput o = parity_tests(name, fmt::format("ParityMeshes.{}", test));
  EXPECT_EQ(o.status, 1) << o.text;
  EXPECT_THAT(o.text, HasSubstr("[  FAILED  ] 1 test"));
}

INSTANTIATE_TEST_SUITE_P(
    Found, ParityMutants,
    testing::Values(Mutant{"values_by_place", "Tensor"},  // of shards of weights
                    Mutant{"embedding_from_row_0", "Vocabulary"}, Mutant{"loss_of_own_classes", "Vocabulary"},
                    Mutant{"loss_of_own_labels", "Data"}, Mutant{"heads_unsummed", "SharedHeads"},
                    Mutant{"norms_unreduced", "SequenceParallel"}, Mutant{"gradients_averaged", "Data"},
                    Mutant{"reduced_each_time", "MicroBatches"}, Mutant{"shards_averaged", "Sharded"},
                    Mutant{"clip_by_ranks", "Clipped"}, Mutant{"muon_not_sent", "Muon"}),
    [](const auto& m) { return std::string(m.param.name); });

TEST(ParityWithoutMutants, Passes) {
  const test::CommandOutput o = parity_tests("none", "ParityMeshes.*-*.RandomConfigurations");
  EXPECT_EQ(o.status, 0) << o.text;
}

}  // namespace
}  // namespace weft::parity_mutants_test
