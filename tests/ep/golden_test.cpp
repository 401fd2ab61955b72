// Compares mixtures of experts with the numbers of another implementation, on one rank: every file of a case
// in the golden folder, with all shapes and constants from the file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <string>

#include "support/golden_case.hpp"
#include "weft/ep/moe.hpp"

namespace weft::ep_golden_test {
namespace {

using test::Golden;

class MoELayer : public ::testing::TestWithParam<std::filesystem::path> {};

MoEConfig config_of(const nlohmann::json& c) {
  MoEConfig config;
  config.dim = c.at("dim");
  config.hidden = c.at("hidden");
  config.experts = c.at("num_experts");
  config.router.top_k = c.at("top_k");
  config.router.aux_loss = 1;
  if (c.at("router_type") == "sigmoid_topk") {
    config.router.scores = RouterScores::sigmoid;
    config.router.bias = RouterBias::weighs;
    config.router.aux_loss = c.at("sequence_aux_loss_weight");
  }
  if (c.contains("capacity_factor")) {
    config.router.capacity = Capacity::per_choice_and_rank;
    config.router.capacity_factor = c.at("capacity_factor");
  }
  if (c.contains("shared_experts")) config.shared_hidden = config.hidden;
  config.scale_outputs_by_load = c.value("gradient_scale", false);
  return config;
}

// The file names each expert's matrices; the module has one tensor for all experts.
std::string name_in_file(const std::string& path, std::int64_t expert) {
  const std::string before = "experts.";
  return before + std::to_string(expert) + "." + path.substr(before.size()) + ".weight";
}
void fill(Golden& golden, Parameter& p) {
  const auto to = p.write_master().f32();
  if (!p.path().starts_with("experts.")) {
    const Tensor from = golden.tensor("param." + p.path());
    ASSERT_EQ(from.shape(), p.global_shape());
    return void(std::ranges::copy(from.f32(), to.begin()));
  }
  const std::int64_t each = p.global_shape()[1] * p.global_shape()[2];
  for (std::int64_t e = 0; e < p.global_shape()[0]; ++e) {
    const Tensor from = golden.tensor("param." + name_in_file(p.path(), e));
    ASSERT_EQ(from.count(), each);
    std::ranges::copy(from.f32(), to.begin() + e * each);
  }
}
void compare(Golden& golden, const Parameter& p) {
  const auto mine = p.gradient().f32();
  if (!p.path().starts_with("experts.")) return golden.compare("grad.param." + p.path(), mine);
  const std::int64_t each = p.global_shape()[1] * p.global_shape()[2];
  for (std::int64_t e = 0; e < p.global_shape()[0]; ++e)
    golden.compare("grad.param." + name_in_file(p.path(), e),
                   mine.subspan(static_cast<std::size_t>(e * each), static_cast<std::size_t>(each)));
}

TEST_P(MoELayer, OutputsLossesAndAllGradients) {
  Golden golden(GetParam());
  const MoEConfig config = config_of(golden.config());
  MoE layer(config);
  materialise(layer, golden.compute);
  initialise(layer, 1);
  for (Parameter* p : layer.parameters()) ASSERT_NO_FATAL_FAILURE(fill(golden, *p));
  if (layer.router.share) {
    const Tensor before = golden.tensor("in.expert_ema_before");
    std::ranges::copy(before.f32(), layer.router.share->tensor().f32().begin());
  }
  Tensors routed;
  const HookHandle handle = layer.router.add_hook(Module::HookPoint::post_forward,
                                                  [&](Module&, Tensors& y, Frame&) { routed = y; });
  Frame frame(golden.compute);
  const Tensor y = layer.forward(golden.tensor("in.x"), frame)[0];
  golden.compare("out.y", y.f32());
  golden.compare("out.router.weights", routed[1].f32());
  const RouterReport& report = layer.router.report();
  const Tensor indices = golden.tensor("out.router.indices"),
               counts = golden.tensor("out.router.expert_counts");
  std::int64_t dropped = 0;
  for (std::size_t i = 0; i < static_cast<std::size_t>(indices.count()); ++i) {
    const std::int32_t choice = routed[0].as<std::int32_t>()[i];
    ASSERT_EQ(choice < 0 ? ~choice : choice, indices.as<std::int64_t>()[i]) << i;
    dropped += choice < 0 ? 1 : 0;
    if (config.router.capacity != Capacity::none) {
      EXPECT_EQ(choice < 0, golden.values("out.router.weights_after_capacity")[i] == 0) << i;
    }
  }
  EXPECT_EQ(dropped, golden.info().value("dropped_assignments", 0));
  EXPECT_EQ(report.dropped, dropped);
  EXPECT_TRUE(std::ranges::equal(report.counts, counts.as<std::int64_t>()));
  golden.within("out.router_z_loss", std::abs(report.z_loss - golden.values("out.router_z_loss")[0]));
  golden.within("out.aux_loss",
                std::abs(config.router.aux_loss * report.aux_loss - golden.values("out.aux_loss")[0]));

  const Tensor dx = layer.backward(golden.tensor("in.cotangent"), frame)[0];
  EXPECT_TRUE(frame.empty());
  golden.compare("grad.in.x", dx.f32());
  for (const Parameter* p : layer.parameters()) compare(golden, *p);
  if (config.router.bias == RouterBias::weighs) {
    update_router_bias(layer.router);
    golden.compare("out.expert_bias_after", layer.router.bias_parameter->master().f32());
    golden.compare("out.expert_ema_after", layer.router.share->tensor().f32());
  }
  RecordProperty("most_of_the_limit_used", std::to_string(golden.most_used()));
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

INSTANTIATE_TEST_SUITE_P(Golden, MoELayer, ::testing::ValuesIn(test::golden_files("kf_moe_layer")),
                         file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(MoELayer);

TEST(GoldenMoE, FilesArePresent) { test::expect_golden({"kf_moe_layer_sigmoid", "kf_moe_layer_capacity"}); }

}  // namespace
}  // namespace weft::ep_golden_test
