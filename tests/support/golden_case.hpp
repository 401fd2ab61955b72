// One transformer case of the reference data: its configuration, its tensors, and the allowed distance. For
// tests that link weft_train and nlohmann_json.
#pragma once

#include <gtest/gtest.h>

#include <algorithm>
#include <cmath>
#include <memory>
#include <nlohmann/json.hpp>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "support/golden.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/models/transformer.hpp"

namespace weft::test {

// One golden file: its case, its tensors, and the limit its folder's README gives for a float32
// implementation: |mine - ref| <= 4 · torch_f32_max_abs_err[name] + 16 · 2^-23 · ref_max_abs[name].
class Golden {
 public:
  explicit Golden(const std::filesystem::path& path)
      : file_(SafetensorsFile::open(path)), info_(nlohmann::json::parse(file_.metadata("case"))) {}

  /// All that the file says of its case.
  const nlohmann::json& info() const { return info_; }
  const nlohmann::json& config() const { return info_.at("config"); }
  Tensor tensor(const std::string& name) { return file_.read(context, name); }
  std::vector<double> values(const std::string& name) {
    const Tensor t = tensor(name);
    return {t.as<double>().begin(), t.as<double>().end()};
  }
  double limit(const std::string& name) const {
    return 4 * info_.at("torch_f32_max_abs_err").at(name).get<double>() +
           16 * 0x1p-23 * info_.at("ref_max_abs").at(name).get<double>();
  }
  std::vector<std::string> names(std::string_view prefix) const {
    std::vector<std::string> found;
    for (const std::string& name : file_.names())
      if (name.starts_with(prefix)) found.push_back(name);
    return found;
  }

  TransformerConfig model() const {
    const nlohmann::json& c = config();
    TransformerConfig m;
    m.dim = c.at("dim"), m.layers = c.at("n_layers"), m.heads = c.at("n_heads"),
    m.kv_heads = c.at("n_kv_heads");
    m.ffn_hidden = c.at("ffn_hidden_dim"), m.vocab = c.at("vocab_size"), m.max_seq = c.at("max_seq_len");
    m.head_size = c.at("head_dim");
    m.rope_theta = c.at("rope_theta"), m.norm_eps = c.at("norm_eps"), m.tied = c.at("tie_embeddings");
    return m;
  }

  /// Gives the model the file's parameters, which must be exactly the model's, and its rotary tables.
  void load(Transformer& transformer) {
    materialise(transformer, compute);
    const std::vector<Parameter*> parameters = transformer.parameters();
    ASSERT_EQ(names("param.").size(), parameters.size());
    for (Parameter* p : parameters) p->set_master(tensor("param." + p->path()));
    auto rope = std::make_shared<RopeTables>();
    const Tensor cosine = tensor("aux.rope_cos"), sine = tensor("aux.rope_sin");
    rope->cos.assign(cosine.f32().begin(), cosine.f32().end());
    rope->sin.assign(sine.f32().begin(), sine.f32().end());
    rope->positions = cosine.size(0), rope->half = cosine.size(1);
    // Our frequencies are made in f32 in the same steps. A last bit of a frequency is multiplied by the
    // position.
    const auto own = RopeTables::make(rope->positions, rope->half * 2, config().at("rope_theta"));
    for (std::size_t i = 0; i < own->cos.size(); ++i) {
      const double allowed = 0x1p-22 * static_cast<double>(1 + i / static_cast<std::size_t>(rope->half));
      ASSERT_NEAR(own->cos[i], rope->cos[i], allowed);
      ASSERT_NEAR(own->sin[i], rope->sin[i], allowed);
    }
    transformer.set_rope(rope);
  }

  /// Compares with the file's tensor of that name, within its limit. Records how much of the limit was used.
  void compare(const std::string& name, std::span<const float> mine) {
    const std::vector<double> reference = values(name);
    ASSERT_EQ(mine.size(), reference.size()) << name;
    double worst = 0;
    for (std::size_t i = 0; i < mine.size(); ++i) {
      ASSERT_TRUE(std::isfinite(mine[i])) << name << " [" << i << "]";
      worst = std::max(worst, std::abs(static_cast<double>(mine[i]) - reference[i]));
    }
    within(name, worst);
  }
  void within(const std::string& name, double difference) {
    EXPECT_LE(difference, limit(name)) << name;
    most_used_ = std::max(most_used_, difference / limit(name));
  }
  double most_used() const { return most_used_; }

  Context context;
  Compute compute{context, 1};

 private:
  SafetensorsFile file_;
  nlohmann::json info_;
  double most_used_ = 0;
};

}  // namespace weft::test
