// Each rule of exact mode is needed: a build without it has other bits on some mesh, and the tests of exact
// mode say where.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include "support/command_output.hpp"

namespace weft::exact_mutants_test {
namespace {

using testing::HasSubstr;

struct Mutant {
  const char *name, *tests, *text;
};

test::CommandOutput exact_tests(const std::string& mutant, const std::string& tests) {
  return test::output_of(fmt::format("WEFT_MUTANT={} timeout 100 {} --gtest_filter={} 2>&1 </dev/null",
                                     mutant, WEFT_EXACT_MUTANTS, tests));
}

class ExactMutants : public testing::TestWithParam<Mutant> {};

TEST_P(ExactMutants, IsFound) {
  const auto [name, tests, text] = GetParam();
  const test::CommandOutput o = exact_tests(name, tests);
  EXPECT_EQ(o.status, 1) << o.text;
  EXPECT_THAT(o.text, HasSubstr("[  FAILED  ] 1 test"));
  EXPECT_THAT(o.text, HasSubstr(text));
}

constexpr const char* kMeshes = "Exact.DataAndTensorAndSequenceParallel";
constexpr const char* kMaps = "ExactMaps.DomainAndData";
constexpr const char* kExperts = "MoEModel.ExactRulesOfExperts";

INSTANTIATE_TEST_SUITE_P(
    Rules, ExactMutants,
    testing::Values(
        // Contractions over features, and the sums of their parts over ranks.
        Mutant{"exact_output_whole", kMeshes, "step 0: loss"},
        Mutant{"exact_dx_whole", kMeshes, "step 0: gradient of "},
        Mutant{"exact_dx_unsummed", kMeshes, "step 0: gradient of "},
        // Sums over tokens.
        Mutant{"exact_dw_whole", kMeshes, "step 0: gradient of layers.0.attention.q_proj.weight"},
        Mutant{"exact_table_whole", kMeshes, "step 0: gradient of token_embedding.embedding.weight"},
        Mutant{"exact_positions_whole", kMeshes, "step 0: gradient of layers.0.attention_norm.weight"},
        Mutant{"exact_loss_in_a_row", kMeshes, "step 0: loss"},
        Mutant{"exact_micro_batches_unreduced", "Exact.MicroBatches", "step 0: gradient of "},
        // Key and value heads, and the vocabulary.
        Mutant{"exact_heads_in_a_row", "Exact.SharedKeyAndValueHeads", "step 0: gradient of "},
        Mutant{"exact_classes_whole", "Exact.Vocabulary", "step 0: loss"},
        // Norms, and what data-parallel forms do to inputs.
        Mutant{"exact_norm_in_f64", kMeshes, "step 0: norm"},
        // Experts: the order of a token's choices, their rows, and their hidden features.
        Mutant{"exact_choices_by_rank", kExperts, "ep 2 has other bits"},
        Mutant{"exact_expert_rows_whole", kExperts, "dp 2 has other bits"},
        Mutant{"exact_expert_hidden_whole", kExperts, "tp 2 has other bits"},
        // Attention that stays inside documents.
        Mutant{"document_borders_ignored", "PackedDocuments.AttentionEqualsLoopsWithAMask", "y ["},
        Mutant{"documents_of_no_stage", "PackedDocuments.TrainAsRowsOfTheirOwnOnEveryMesh", "pipeline"},
        // Maps: the rows of weights, norms, biases of positions, and the loss.
        Mutant{"exact_map_dw_whole", kMaps, "domain 2: step 0: gradient of layers.0.0.to_q.weight"},
        Mutant{"exact_map_norm_whole", kMaps, "domain 2: step 0: gradient of layers.0.0.norm.g"},
        Mutant{"exact_bias_whole", kMaps, "domain 2: step 0: gradient of layers.0.0.dpb.layers."},
        Mutant{"exact_map_loss_whole", kMaps, "loss has other bits"},
        // Kernels on which all this rests.
        Mutant{"exact_kernel_differs", "Exact.Threads",
               "exact: the product 37 x 45 x 24 in f32 has other bits if rows are cut in two"},
        Mutant{"exact_inputs_cast", "Exact.WeightsInBf16", "step 0: loss"}),
    [](const auto& m) { return std::string(m.param.name); });

TEST(ExactWithoutMutants, Passes) {
  const test::CommandOutput o = exact_tests(
      "none",
      "Exact.DataAnd*:Exact.Shared*:Exact.Vocabulary:ExactMaps.DomainAndData:MoEModel.ExactRulesOfExperts");
  EXPECT_EQ(o.status, 0) << o.text;
}

}  // namespace
}  // namespace weft::exact_mutants_test
