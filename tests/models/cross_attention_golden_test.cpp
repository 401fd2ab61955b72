// Text that attends to images, put together of the library's layers, against the numbers of another
// implementation, on one rank and split by the layers' own plans: every file of the case's name that lies in
// the golden folder.
#include <gtest/gtest.h>

#include <optional>

#include "support/golden_case.hpp"
#include "support/run_ranks.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/nn/loss.hpp"
#include "weft/tp/own_plan.hpp"
#include "weft/train/gradients.hpp"

namespace weft::cross_attention_golden_test {
namespace {

using test::Golden;
using test::Rank;
using test::Ranks;

// Image features to the width of the text: proj2(gelu(proj1(x))).
struct Adapter : Module {
  Adapter(std::int64_t features, std::int64_t dim) : proj1(features, dim, true), proj2(dim, dim, true) {
    add("proj1", proj1);
    add("gelu", gelu);
    add("proj2", proj2);
  }
  Linear proj1, proj2;
  GELU gelu;

 protected:
  OwnPlan class_plan() const override { return {.columns = {"proj1"}, .rows = {"proj2"}}; }

 private:
  Tensors do_forward(Inputs x, Frame& f) override {
    return proj2.forward(gelu.forward(proj1.forward(x, f), f), f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return proj1.backward(gelu.backward(proj2.backward(dy, f), f), f);
  }
};

// x + attn(norm(x), image), then x + mlp(norm(x)); gradients of x and of the image.
struct CrossBlock : Module {
  explicit CrossBlock(const TransformerConfig& c)
      : attn_norm(c.dim, c.norm_eps),
        attn({.dim = c.dim, .heads = c.heads, .head_dim = c.head_dim()}),
        mlp_norm(c.dim, c.norm_eps),
        mlp(c.dim, c.ffn_hidden) {
    add("attn_norm", attn_norm);
    add("attn", attn);
    add("mlp_norm", mlp_norm);
    add("mlp", mlp);
  }
  RMSNorm attn_norm;
  CrossAttention attn;
  RMSNorm mlp_norm;
  SwiGLU mlp;

 private:
  Tensor sum(const Tensor& a, const Tensor& b, Frame& f) {
    return add_tensors(a, b, f.compute(), {path(), "x"});
  }
  Tensors do_forward(Inputs in, Frame& f) override {
    const Tensor x = sum(in[0], attn.forward({attn_norm.forward(in[0], f)[0], in[1]}, f)[0], f);
    return {sum(x, mlp.forward(mlp_norm.forward(x, f), f)[0], f)};
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    const Tensor dx = sum(dy[0], mlp_norm.backward(mlp.backward(dy, f), f)[0], f);
    const Tensors through = attn.backward(dx, f);
    return {sum(dx, attn_norm.backward(through[0], f)[0], f), through[1]};
  }
};

// A transformer in which a CrossBlock follows each block.
struct Reader : Module {
  explicit Reader(const TransformerConfig& c)
      : token_embedding(c.vocab, c.dim, Normal{0.02}),
        norm(c.dim, c.norm_eps),
        output_head(c.dim, c.vocab, Normal{0.02}) {
    add("token_embedding", token_embedding);
    for (std::int64_t i = 0; i < c.layers; ++i) {
      layers.append(std::make_unique<TransformerBlock>(c, nullptr));
      cross_attention_layers.append(std::make_unique<CrossBlock>(c));
    }
    add("layers", layers);
    add("cross_attention_layers", cross_attention_layers);
    add("norm", norm);
    add("output_head", output_head);
  }
  TokenEmbedding token_embedding;
  Sequential layers, cross_attention_layers;
  RMSNorm norm;
  OutputHead output_head;

 private:
  Tensors do_forward(Inputs in, Frame& f) override {  // tokens, image
    Tensors x = token_embedding.forward(in[0], f);
    for (std::size_t i = 0; i < layers.size(); ++i) {
      x = layers.children()[i].second->forward(x, f);
      x = cross_attention_layers.children()[i].second->forward({x[0], in[1]}, f);
    }
    return output_head.forward(norm.forward(x, f), f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    Tensors dx = norm.backward(output_head.backward(dy, f), f);
    Tensor dimage;
    for (std::size_t i = layers.size(); i-- > 0;) {
      const Tensors both = cross_attention_layers.children()[i].second->backward(dx, f);
      dimage = dimage ? add_tensors(dimage, both[1], f.compute(), {path(), "d(image)"}) : both[1];
      dx = layers.children()[i].second->backward({both[0]}, f);
    }
    token_embedding.backward(dx, f);
    return {dimage};
  }
};

struct Model : Module {
  Model(const TransformerConfig& c, std::int64_t features) : adapter(features, c.dim), transformer(c) {
    add("adapter", adapter);
    add("transformer", transformer);
  }
  Adapter adapter;
  Reader transformer;

 private:
  Tensors do_forward(Inputs in, Frame& f) override {  // tokens, features
    return transformer.forward({in[0], adapter.forward({in[1]}, f)[0]}, f);
  }
  Tensors do_backward(Inputs dy, Frame& f) override {
    return adapter.backward(transformer.backward(dy, f), f);
  }
};

TransformerConfig config_of(const Golden& golden) {
  const nlohmann::json& c = golden.config();
  TransformerConfig m;
  m.dim = c.at("dim"), m.layers = c.at("n_layers"), m.heads = c.at("n_heads"),
  m.kv_heads = c.at("n_kv_heads");
  m.ffn_hidden = c.at("ffn_hidden_dim"), m.vocab = c.at("vocab_size"), m.max_seq = c.at("max_seq_len");
  m.head_size = c.at("head_dim"), m.rope_theta = c.at("rope_theta"), m.norm_eps = c.at("norm_eps");
  return m;
}

void expect_the_files_numbers(Rank& rank, const MeshShape& shape, const std::filesystem::path& file) {
  SCOPED_TRACE(to_string(shape));
  Golden golden(file);
  Compute compute(rank.context);
  const DeviceMesh mesh(rank.group(), shape);
  Model model(config_of(golden), golden.config().at("feature_dim"));
  const Tensor cosine = golden.tensor("aux.rope_cos"), sine = golden.tensor("aux.rope_sin");
  auto rope = std::make_shared<RopeTables>();
  rope->cos.assign(cosine.f32().begin(), cosine.f32().end());
  rope->sin.assign(sine.f32().begin(), sine.f32().end());
  rope->positions = cosine.size(0), rope->half = cosine.size(1);
  model.visit([&](Module& m) {
    if (auto* const attention = dynamic_cast<Attention*>(&m)) attention->set_rope(rope);
  });
  EXPECT_EQ(parallelize(model, mesh["tp"]).split, 1 + 4 * golden.config().at("n_layers").get<int>());
  replicate(model, mesh);
  materialise(model, compute);
  ASSERT_EQ(golden.names("param.").size(), model.parameters().size());
  for (Parameter* p : model.parameters())
    p->set_master(distribute(golden.tensor("param." + p->path()), p->layout()));

  const auto part = [&](const char* name) {
    const Tensor whole = golden.tensor(name);
    return distribute(whole, make_layout(mesh, {{"dp", Shard{0}}}, whole.shape()));
  };
  Frame frame(compute);
  CrossEntropy cross_entropy;
  const Tensor labels = golden.tensor("in.labels");
  const Tensor logits = model.forward({part("in.tokens"), part("in.features")}, frame)[0];
  const Tensor loss =
      cross_entropy.forward({logits, part("in.labels"), scalar(mesh, count_valid(labels))}, frame)[0];
  const Tensor dfeatures = model.backward(cross_entropy.backward({}, frame), frame)[0];
  EXPECT_TRUE(frame.empty());
  sync_replicated_gradients(model.parameters(), mesh);
  golden.within("out.loss", std::abs(full(loss).as<double>()[0] - golden.values("out.loss")[0]));
  golden.compare("out.logits", full(logits).f32());
  golden.compare("grad.in.features", full(dfeatures).f32());
  for (const Parameter* p : model.parameters())
    golden.compare("grad.param." + p->path(), full(p->gradient()).f32());
  std::printf("%s %s, rank %d: at most %.2f of the limit\n", file.stem().c_str(), to_string(shape).c_str(),
              rank.rank, golden.most_used());
}

class TextAndImages : public ::testing::TestWithParam<std::filesystem::path> {};

TEST_P(TextAndImages, LossLogitsAndAllGradients) {
  for (const MeshShape& shape : {MeshShape{{"dp", 1}, {"tp", 1}}, MeshShape{{"dp", 1}, {"tp", 2}},
                                 MeshShape{{"dp", 3}, {"tp", 1}}, MeshShape{{"dp", 2}, {"tp", 2}}})
    test::run_ranks(Ranks::threads, shape.size(),
                    [&](Rank& rank) { expect_the_files_numbers(rank, shape, GetParam()); });
  test::run_ranks(Ranks::processes, 2, [&](Rank& rank) {
    expect_the_files_numbers(rank, {{"dp", 1}, {"tp", 2}}, GetParam());
  });
}

std::string file_name(const ::testing::TestParamInfo<std::filesystem::path>& info) {
  std::string name = info.param.stem().string();
  for (char& c : name)
    if (std::isalnum(static_cast<unsigned char>(c)) == 0) c = '_';
  return name;
}
INSTANTIATE_TEST_SUITE_P(Golden, TextAndImages, ::testing::ValuesIn(test::golden_files("kf_vlm_cross")),
                         file_name);
GTEST_ALLOW_UNINSTANTIATED_PARAMETERIZED_TEST(TextAndImages);

TEST(TextAndImagesGolden, FilesArePresent) { test::expect_golden({"kf_vlm_cross"}); }

}  // namespace
}  // namespace weft::cross_attention_golden_test
