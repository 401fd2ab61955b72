// Compares the transformer with the numbers of another implementation: for every file of a case in the golden
// folder, with all shapes and constants from the file.
#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>

#include "support/golden_case.hpp"
#include "weft/nn/loss.hpp"
#include "weft/nn/optimizer.hpp"

namespace weft::golden_test {
namespace {

using test::Golden;

class GoldenFile : public ::testing::TestWithParam<std::filesystem::path> {};
using ForwardBackward = GoldenFile;
using Trajectory = GoldenFile;

TEST_P(ForwardBackward, LogitsLossAndAllGradients) {
  Golden golden(GetParam());
  Transformer model(golden.model());
  ASSERT_NO_FATAL_FAILURE(golden.load(model));
  Tensors hidden;
  const HookHandle handle =
      model.norm.add_hook(Module::HookPoint::post_forward, [&](Module&, Tensors& y, Frame&) { hidden = y; });

  const Tensor labels = golden.tensor("in.labels");
  Frame frame(golden.compute);
  CrossEntropy cross_entropy;
  const Tensor logits = model.forward(golden.tensor("in.tokens"), frame)[0];
  const Tensor loss =
      cross_entropy.forward({logits, labels, scalar(golden.context, count_valid(labels))}, frame)[0];
  golden.compare("out.hidden", hidden[0].f32());
  golden.compare("out.logits", logits.f32());
  golden.within("out.loss", std::abs(loss.as<double>()[0] - golden.values("out.loss")[0]));

  model.backward(cross_entropy.backward({}, frame), frame);
  EXPECT_TRUE(frame.empty());
  EXPECT_EQ(golden.names("grad.param.").size(), model.parameters().size());
  for (const Parameter* p : model.parameters())
    golden.compare("grad.param." + p->path(), p->gradient().f32());
  RecordProperty("most_of_the_limit_used", std::to_string(golden.most_used()));
}

double squares(std::span<const float> x) {
  double sum = 0;
  for (const float f : x) sum += static_cast<double>(f) * static_cast<double>(f);
  return sum;
}

TEST_P(Trajectory, LossGradientNormAndParameterNormOfEveryStep) {
  Golden golden(GetParam());
  const nlohmann::json& config = golden.config();
  Transformer model(golden.model());
  ASSERT_NO_FATAL_FAILURE(golden.load(model));
  const std::vector<Parameter*> parameters = model.parameters();
  for (Parameter* p : parameters) p->set_decays(true);  // one group, as the reference trained
  AdamW adamw(golden.compute, parameters,
              {.beta1 = config.at("betas").at(0),
               .beta2 = config.at("betas").at(1),
               .eps = config.at("adam_eps"),
               .weight_decay = config.at("weight_decay")});

  const std::int64_t steps = config.at("steps"), batch = config.at("B"), seq = config.at("S");
  const double max_norm = config.at("max_grad_norm"), lr = config.at("lr");
  const Tensor tokens = golden.tensor("in.tokens"), labels = golden.tensor("in.labels");
  const std::vector<double> ref_loss = golden.values("out.loss"), ref_norm = golden.values("out.grad_norm"),
                            ref_param_norm = golden.values("out.param_norm");
  ASSERT_EQ(ref_loss.size(), static_cast<std::size_t>(steps));
  CrossEntropy cross_entropy;
  Frame frame(golden.compute);
  for (std::int64_t step = 0; step < steps; ++step) {
    const auto at = static_cast<std::size_t>(step);
    const Tensor step_labels = labels.slice_flat(step * batch * seq, {batch, seq});
    const Tensor logits = model.forward(tokens.slice_flat(step * batch * seq, {batch, seq}), frame)[0];
    const Tensor loss = cross_entropy.forward(
        {logits, step_labels, scalar(golden.context, count_valid(step_labels))}, frame)[0];
    golden.within("out.loss", std::abs(loss.as<double>()[0] - ref_loss[at]));
    adamw.zero_gradients();
    model.backward(cross_entropy.backward({}, frame), frame);

    double sum = 0;
    for (const Parameter* p : parameters) sum += squares(p->gradient().f32());
    const double norm = std::sqrt(sum);
    golden.within("out.grad_norm", std::abs(norm - ref_norm[at]));
    const auto clip = static_cast<float>(std::min(1.0, max_norm / (norm + 1e-6)));
    for (const Parameter* p : parameters)
      for (float& g : p->gradient().f32()) g *= clip;
    adamw.step(lr);

    sum = 0;
    for (const Parameter* p : parameters) sum += squares(p->master().f32());
    golden.within("out.param_norm", std::abs(std::sqrt(sum) - ref_param_norm[at]));
    if (HasFailure()) FAIL() << "first difference at step " << step;
  }
  for (const Parameter* p : parameters) golden.compare("out.param." + p->path(), p->master().f32());
  RecordProperty("most_of_the_limit_used", std::to_string(golden.most_used()));
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}

std::vector<std::filesystem::path> forward_backward_files() {
  std::vector<std::filesystem::path> files = test::golden_files("kf_transformer_tiny");
  for (auto& more : test::golden_files("kf_transformer_tied")) files.push_back(more);
  return files;
}

INSTANTIATE_TEST_SUITE_P(Golden, ForwardBackward, ::testing::ValuesIn(forward_backward_files()), file_name);
INSTANTIATE_TEST_SUITE_P(Golden, Trajectory, ::testing::ValuesIn(test::golden_files("kf_train_trajectory")),
                         file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(ForwardBackward);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(Trajectory);

TEST(Golden, FilesArePresent) {
  test::expect_golden({"kf_transformer_tiny", "kf_transformer_tied", "kf_train_trajectory"});
}

}  // namespace
}  // namespace weft::golden_test
