// Checkpoints in the form of Llama models: names, configuration, a way there and back.
#include "weft/models/llama.hpp"

#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstring>
#include <filesystem>
#include <fstream>
#include <map>
#include <nlohmann/json.hpp>

#include "support/errors.hpp"
#include "support/temporary_folder.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/models/transformer_text.hpp"

namespace weft::llama_test {
namespace {

using test::error_of;
using test::TemporaryFolder;

TransformerConfig config_of(bool tied) {
  TransformerConfig c;
  c.dim = 12, c.layers = 11, c.heads = 4, c.kv_heads = 2, c.head_size = 6, c.ffn_hidden = 20, c.vocab = 30;
  c.max_seq = 17, c.rope_theta = 500, c.norm_eps = 1e-6, c.tied = tied, c.init_std = 0.03;
  return c;
}

// A checkpoint of such a model, with values that tell tensors and places apart, and averages.
void save(Context& context, const std::filesystem::path& folder, const TransformerConfig& config) {
  const Transformer model(config);
  std::vector<Tensor> tensors;
  std::vector<std::string> names;
  for (const Parameter* p : model.parameters())
    for (const char* kind : {"param.", "ema.average."}) {
      Tensor t(context, p->global_shape(), DType::f32);
      for (std::size_t i = 0; i < t.f32().size(); ++i)
        t.f32()[i] = 0.001F * static_cast<float>(i) + static_cast<float>(names.size());
      names.push_back(kind + p->path());
      tensors.push_back(std::move(t));
    }
  std::vector<NamedView> views;
  for (std::size_t i = 0; i < names.size(); ++i) views.push_back({names[i], tensors[i].view()});
  save_checkpoint(folder, DeviceMesh(), 3, views, {{"model", transformer_text(config)}});
}

std::string text_of(const std::filesystem::path& file) { return test::contents(file); }
void write(const std::filesystem::path& file, const std::string& text) { std::ofstream(file) << text; }

TEST(Llama, NamesEachParameter) {
  EXPECT_EQ(llama_name("layers.10.attention_norm.weight"), "model.layers.10.input_layernorm.weight");
  EXPECT_EQ(llama_name("output_head.proj.weight"), "lm_head.weight");
  EXPECT_EQ(path_of_llama("model.layers.3.self_attn.q_proj.weight"), "layers.3.attention.q_proj.weight");
  for (const char* none : {"", "layers", "layers.", "layers.3", "layers.3.", "layers.x.mlp_norm.weight",
                           "layers..norm", "model.norm.weight", "layers.3.mlp.up_proj.bias"})
    EXPECT_EQ(llama_name(none), "") << none;
  EXPECT_EQ(path_of_llama("layers.3.mlp_norm.weight"), "");
  const Transformer model(config_of(false));
  for (const Parameter* p : model.parameters()) {
    EXPECT_NE(llama_name(p->path()), "") << p->path();
    EXPECT_EQ(path_of_llama(llama_name(p->path())), p->path());
  }
}

TEST(Llama, ComesBackWithTheSameBits) {
  for (const bool tied : {false, true}) {
    Context context;
    const TemporaryFolder folder;
    const TransformerConfig config = config_of(tied);
    save(context, folder / "run", config);
    const std::size_t count = 2 + 9 * 11 + (tied ? 0 : 1);
    EXPECT_EQ(export_llama(folder / "run", folder / "llama", config), count);
    const SafetensorsFile file = SafetensorsFile::open(folder / "llama" / "model.safetensors");
    EXPECT_EQ(file.names().size(), count);
    EXPECT_EQ(file.metadata("format"), "pt");
    EXPECT_EQ(file.contains("lm_head.weight"), !tied);

    const TransformerConfig back = import_llama(folder / "llama", folder / "back");
    EXPECT_EQ(transformer_text(back), transformer_text(config));
    const CheckpointReader before = CheckpointReader::open(folder / "run"),
                           after = CheckpointReader::open(folder / "back");
    EXPECT_EQ(after.names().size(), count);
    EXPECT_EQ(after.info().extra.at("model"), transformer_text(config));
    for (const std::string& name : after.names()) {
      const Tensor a = before.read(context, name), b = after.read(context, name);
      EXPECT_EQ(a.shape(), b.shape());
      EXPECT_EQ(std::memcmp(a.data(), b.data(), static_cast<std::size_t>(a.count()) * sizeof(float)), 0)
          << name;
    }
    // averages, and bf16
    export_llama(folder / "run", folder / "averages", config, {.dtype = DType::bf16, .averages = true});
    const SafetensorsFile rounded = SafetensorsFile::open(folder / "averages" / "model.safetensors");
    EXPECT_EQ(rounded.info("model.norm.weight").dtype, DType::bf16);
    import_llama(folder / "averages", folder / "averages-back");
    const Tensor average = before.read(context, "ema.average.norm.weight"),
                 returned =
                     CheckpointReader::open(folder / "averages-back").read(context, "param.norm.weight");
    for (std::size_t i = 0; i < average.f32().size(); ++i)
      EXPECT_NEAR(returned.f32()[i], average.f32()[i], average.f32()[i] / 256);
  }
}

TEST(Llama, ReadsSeveralFilesAndOlderTensors) {
  Context context;
  const TemporaryFolder folder;
  const TransformerConfig config = config_of(true);
  save(context, folder / "run", config);
  export_llama(folder / "run", folder / "llama", config);
  // the same tensors in two files, with a tied head and the angles of rotary positions beside them
  const SafetensorsFile whole = SafetensorsFile::open(folder / "llama" / "model.safetensors");
  std::vector<Tensor> kept;
  std::vector<SafetensorsEntry> parts[2];
  nlohmann::json map;
  const auto put = [&](int part, const std::string& name, Tensor t) {
    kept.push_back(std::move(t));
    parts[part].push_back({name, kept.back().view()});
    map[name] = fmt::format("part-{}.safetensors", part);
  };
  int number = 0;
  for (const std::string& name : whole.names()) put(++number % 2, name, whole.read(context, name));
  put(0, "lm_head.weight", whole.read(context, "model.embed_tokens.weight"));
  const Tensor head = kept.back();
  put(1, "model.layers.0.self_attn.rotary_emb.inv_freq", Tensor::zeros(context, {3}));
  std::filesystem::remove(folder / "llama" / "model.safetensors");
  for (int part = 0; part < 2; ++part)
    write_safetensors(folder / "llama" / fmt::format("part-{}.safetensors", part), parts[part], {});
  const auto index = folder / "llama" / "model.safetensors.index.json";
  write(index, nlohmann::json{{"weight_map", map}}.dump());
  import_llama(folder / "llama", folder / "back");
  const CheckpointReader before = CheckpointReader::open(folder / "run"),
                         after = CheckpointReader::open(folder / "back");
  EXPECT_EQ(after.names().size(), 2U + 9 * 11);
  for (const std::string& name : after.names())
    EXPECT_THAT(after.read(context, name).f32(), testing::ElementsAreArray(before.read(context, name).f32()));

  const auto says = [&](const std::string& text) {
    EXPECT_THAT(error_of([&] { return import_llama(folder / "llama", folder / "no"); }).what(),
                testing::HasSubstr(text));
  };
  head.f32()[3] += 1;
  write_safetensors(folder / "llama" / "part-0.safetensors", parts[0], {});
  says(
      "config.json has tie_word_embeddings, and \"lm_head.weight\" differs from "
      "\"model.embed_tokens.weight\"; "
      "expected equal values, no \"lm_head.weight\", or tie_word_embeddings false");
  write(index, R"({"weight_map": {"model.norm.weight": "../part-0.safetensors"}})");
  says("\"model.norm.weight\" is in \"../part-0.safetensors\"; expected the name of a file of the folder");
  write(index, R"({"weights": 3})");
  says("has no object \"weight_map\"");
}

TEST(Llama, RefusesAnotherConfiguration) {
  const auto with = [](const nlohmann::json& changes) {
    nlohmann::json j = nlohmann::json::parse(llama_config_text(config_of(false)));
    j.merge_patch(changes);
    return j.dump();
  };
  const auto says = [](const std::string& config, const std::string& text) {
    EXPECT_THAT(error_of([&] { return transformer_from_llama(config, "\"c.json\""); }).what(),
                testing::HasSubstr(text));
  };
  EXPECT_EQ(transformer_text(transformer_from_llama(with(nlohmann::json::object()), "c")),
            transformer_text(config_of(false)));
  says("[]", "\"c.json\" is no JSON object");
  says("{", "\"c.json\" is no JSON");
  says(with({{"model_type", "gpt2"}}), "\"c.json\": model_type is \"gpt2\"; expected \"llama\"");
  says(with({{"model_type", nullptr}}), "\"c.json\" has no \"model_type\"");
  says(with({{"hidden_act", "gelu"}}), "hidden_act is \"gelu\"; expected \"silu\"");
  says(with({{"attention_bias", true}}), "attention_bias is true; expected false");
  says(with({{"mlp_bias", true}}), "mlp_bias is true; expected false");
  says(with({{"hidden_size", nullptr}}), "\"c.json\" has no \"hidden_size\"");
  says(with({{"hidden_size", "12"}}), "hidden_size is \"12\"; expected an integer");
  says(with({{"rms_norm_eps", "x"}}), "rms_norm_eps is \"x\"; expected a number");
  says(with({{"tie_word_embeddings", 1}}), "tie_word_embeddings is 1; expected true or false");
  says(with({{"num_key_value_heads", 3}}), "\"c.json\": ");
  says(with({{"rope_scaling", {{"rope_type", "yarn"}, {"factor", 2}}}}),
       "expected rotary positions of the type \"default\"");
  says(with({{"rope_parameters", {{"rope_type", 3}}}}), "expected rotary positions of the type \"default\"");
  says(with({{"rope_scaling", "linear"}}), "expected rotary positions of the type \"default\"");
  EXPECT_EQ(
      transformer_from_llama(with({{"rope_theta", nullptr},
                                   {"rope_parameters", {{"rope_type", "default"}, {"rope_theta", 77.0}}}}),
                             "c")
          .rope_theta,
      77);
  // absent keys that have a usual value
  const TransformerConfig c = transformer_from_llama(
      with({{"num_key_value_heads", nullptr}, {"head_dim", nullptr}, {"num_attention_heads", 3}}), "c");
  EXPECT_EQ(c.kv_heads, 3);
  EXPECT_EQ(c.head_dim(), 4);
}

TEST(Llama, RefusesOtherTensors) {
  Context context;
  const TemporaryFolder folder;
  TransformerConfig config = config_of(false);
  save(context, folder / "run", config);
  const auto says = [](const auto& run, const std::string& text) {
    EXPECT_THAT(error_of(run).what(), testing::HasSubstr(text));
  };
  config.vocab = 31;
  says([&] { return export_llama(folder / "run", folder / "no", config); },
       "export_llama: \"param.output_head.proj.weight\" is (30, 12); expected (31, 12)");
  config = config_of(false);
  config.layers = 12;
  says([&] { return export_llama(folder / "run", folder / "no", config); },
       "has no \"param.layers.11.attention.k_proj.weight\"");
  config = config_of(false);
  says([&] { return export_llama(folder / "run", folder / "no", config, {.dtype = DType::f16}); },
       "export_llama: dtype is f16; expected f32 or bf16");

  export_llama(folder / "run", folder / "llama", config);
  const auto json = nlohmann::json::parse(text_of(folder / "llama" / "config.json"));
  const auto import_with = [&](const nlohmann::json& changes) {
    nlohmann::json changed = json;
    changed.merge_patch(changes);
    write(folder / "llama" / "config.json", changed.dump());
    return [&] { return import_llama(folder / "llama", folder / "no"); };
  };
  says(import_with({{"vocab_size", 29}}), "\"lm_head.weight\" is (30, 12); expected (29, 12)");
  says(import_with({{"num_hidden_layers", 10}}),
       "a model of this config.json has no tensor \"model.layers.10.");
  says(import_with({{"num_hidden_layers", 12}}),
       "has no tensor \"model.layers.11.self_attn.k_proj.weight\", and 8 more are missing");
  EXPECT_FALSE(std::filesystem::exists(folder / "no"));
}

}  // namespace
}  // namespace weft::llama_test
