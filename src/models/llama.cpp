#include "weft/models/llama.hpp"

#include <fmt/format.h>

#include <array>
#include <cstring>
#include <map>
#include <nlohmann/json.hpp>
#include <optional>
#include <utility>
#include <vector>

#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "base/json_reader.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/checkpoint/safetensors.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/train/checkpoint.hpp"
#include "weft/train/convert.hpp"

namespace weft {
namespace {

using Pair = std::pair<std::string_view, std::string_view>;  // here, and in a folder of a Llama model
constexpr std::array<Pair, 3> kOfModel{{{"token_embedding.embedding.weight", "model.embed_tokens.weight"},
                                        {"norm.weight", "model.norm.weight"},
                                        {"output_head.proj.weight", "lm_head.weight"}}};
constexpr std::array<Pair, 9> kOfBlock{{{"attention_norm.weight", "input_layernorm.weight"},
                                        {"attention.q_proj.weight", "self_attn.q_proj.weight"},
                                        {"attention.k_proj.weight", "self_attn.k_proj.weight"},
                                        {"attention.v_proj.weight", "self_attn.v_proj.weight"},
                                        {"attention.o_proj.weight", "self_attn.o_proj.weight"},
                                        {"mlp_norm.weight", "post_attention_layernorm.weight"},
                                        {"mlp.gate_proj.weight", "mlp.gate_proj.weight"},
                                        {"mlp.up_proj.weight", "mlp.up_proj.weight"},
                                        {"mlp.down_proj.weight", "mlp.down_proj.weight"}}};
constexpr Pair kBlocks{"layers.", "model.layers."};

template <std::size_t kCount>
std::string_view other_name(const std::array<Pair, kCount>& pairs, std::string_view name, bool to_llama) {
  for (const auto& [here, there] : pairs)
    if (name == (to_llama ? here : there)) return to_llama ? there : here;
  return {};
}

std::string renamed(std::string_view name, bool to_llama) {
  if (const std::string_view other = other_name(kOfModel, name, to_llama); !other.empty())
    return std::string(other);
  const auto [from, to] = to_llama ? kBlocks : Pair{kBlocks.second, kBlocks.first};
  if (!name.starts_with(from)) return "";
  const std::string_view rest = name.substr(from.size());
  const std::size_t digits = std::min(rest.find_first_not_of("0123456789"), rest.size());
  if (digits == 0 || digits == rest.size() || rest[digits] != '.') return "";
  const std::string_view other = other_name(kOfBlock, rest.substr(digits + 1), to_llama);
  return other.empty() ? "" : fmt::format("{}{}.{}", to, rest.substr(0, digits), other);
}

[[noreturn]] void bad_llama(const std::string& text) { throw Error(ErrorCode::bad_argument, text); }

// The global shape of each parameter, by path.
std::map<std::string, Shape> shapes_of(const TransformerConfig& config) {
  config.check();
  std::map<std::string, Shape> shapes;
  const Transformer model(config);
  for (const Parameter* p : model.parameters()) shapes[p->path()] = p->global_shape();
  return shapes;
}

// Reads keys of a config.json.
class LlamaKeys {
 public:
  LlamaKeys(std::string_view text, std::string_view source)
      : source_(source), json_(parse_json(text, source)) {
    if (!json_.is_object()) bad_llama(fmt::format("{} is no JSON object", source));
  }
  std::int64_t integer(const char* key, std::optional<std::int64_t> otherwise = {}) const {
    return number<std::int64_t>(key, otherwise, &nlohmann::json::is_number_integer, "an integer");
  }
  double real(const char* key, std::optional<double> otherwise = {}) const {
    return number<double>(key, otherwise, &nlohmann::json::is_number, "a number");
  }
  bool flag(const char* key, bool otherwise) const {
    return number<bool>(key, otherwise, &nlohmann::json::is_boolean, "true or false");
  }
  /// Throws unless the key is absent, null, or has this value.
  void expect(const char* key, const nlohmann::json& value) const {
    const nlohmann::json* const found = find(key);
    if (found != nullptr && *found != value)
      bad_llama(fmt::format("{}: {} is {}; expected {}", source_, key, found->dump(), value.dump()));
  }
  const nlohmann::json* find(const char* key) const {
    const auto at = json_.find(key);
    return at == json_.end() || at->is_null() ? nullptr : &*at;
  }

 private:
  template <class T>
  T number(const char* key, const std::optional<T>& otherwise, bool (nlohmann::json::*is)() const noexcept,
           const char* expected) const {
    const nlohmann::json* const found = find(key);
    if (found == nullptr && otherwise) return *otherwise;
    if (found == nullptr) bad_llama(fmt::format("{} has no \"{}\"", source_, key));
    if (!(found->*is)())
      bad_llama(fmt::format("{}: {} is {}; expected {}", source_, key, found->dump(), expected));
    return found->template get<T>();
  }
  std::string source_;
  nlohmann::json json_;
};

// The base of the rotary positions: a key of its own, or, since version 5 of transformers, one of
// rope_parameters.
double rope_theta_of(const LlamaKeys& keys, std::string_view source) {
  double theta = keys.real("rope_theta", TransformerConfig().rope_theta);
  for (const char* key : {"rope_parameters", "rope_scaling"}) {
    const nlohmann::json* const rope = keys.find(key);
    if (rope == nullptr) continue;
    const auto kind_by = [&](const char* name) {
      const auto at = rope->is_object() ? rope->find(name) : rope->end();
      return at != rope->end() && at->is_string() ? at->get<std::string>() : std::string();
    };
    std::string kind = kind_by("rope_type");
    if (kind.empty()) kind = kind_by("type");
    if (kind != "default")
      bad_llama(fmt::format("{}: {} is {}; expected rotary positions of the type \"default\"", source, key,
                            rope->dump()));
    if (const auto at = rope->find("rope_theta"); at != rope->end() && at->is_number())
      theta = at->get<double>();
  }
  return theta;
}

// Where the tensors of a folder lie, by name.
std::map<std::string, SafetensorsFile> open_files(const std::filesystem::path& folder) {
  std::map<std::string, SafetensorsFile> tensors;
  const std::filesystem::path index = folder / "model.safetensors.index.json";
  std::error_code none;
  if (!std::filesystem::exists(index, none)) {
    const SafetensorsFile file = SafetensorsFile::open(folder / "model.safetensors");
    for (const std::string& name : file.names()) tensors.emplace(name, file);
    return tensors;
  }
  const std::string subject = fmt::format("\"{}\"", index.string());
  const nlohmann::json j =
      parse_json(read_regular_file(index.string(), subject + ":", std::size_t{1} << 26), subject);
  const auto map = j.is_object() ? j.find("weight_map") : j.end();
  if (!j.is_object() || map == j.end() || !map->is_object())
    bad_llama(subject + " has no object \"weight_map\"");
  std::map<std::string, SafetensorsFile> files;
  for (const auto& [name, value] : map->items()) {
    const std::string file = value.is_string() ? value.get<std::string>() : "";
    if (file.empty() || std::filesystem::path(file).filename() != file)
      bad_llama(fmt::format("{}: \"{}\" is in {}; expected the name of a file of the folder", subject, name,
                            value.dump()));
    if (!files.contains(file)) files.emplace(file, SafetensorsFile::open(folder / file));
    tensors.emplace(name, files.at(file));
  }
  return tensors;
}

Tensor in_dtype(Context& context, Compute& compute, const Tensor& t, DType dtype) {
  if (t.dtype() == dtype) return t;
  const Tensor converted(context, t.shape(), dtype);
  convert(compute, t, converted);
  return converted;
}

void expect_shape(const std::string& what, const Shape& found, const Shape& expected) {
  if (!(found == expected))
    bad_llama(fmt::format("{} is {}; expected {}", what, to_string(found), to_string(expected)));
}

}  // namespace

std::string llama_name(std::string_view path) { return renamed(path, true); }
std::string path_of_llama(std::string_view name) { return renamed(name, false); }

std::string llama_config_text(const TransformerConfig& c, DType stored) {
  const nlohmann::ordered_json j{
      {"architectures", {"LlamaForCausalLM"}},
      {"model_type", "llama"},
      {"hidden_size", c.dim},
      {"intermediate_size", c.ffn_hidden},
      {"num_hidden_layers", c.layers},
      {"num_attention_heads", c.heads},
      {"num_key_value_heads", c.kv_heads},
      {"head_dim", c.head_dim()},
      {"vocab_size", c.vocab},
      {"max_position_embeddings", c.max_seq},
      {"rope_theta", c.rope_theta},
      {"rms_norm_eps", c.norm_eps},
      {"tie_word_embeddings", c.tied},
      {"hidden_act", "silu"},
      {"attention_bias", false},
      {"mlp_bias", false},
      {"initializer_range", c.init_std},
      {"bos_token_id", nullptr},
      {"eos_token_id", nullptr},
      {"torch_dtype", stored == DType::bf16 ? "bfloat16" : "float32"},
  };
  return j.dump(2) + "\n";
}

TransformerConfig transformer_from_llama(std::string_view text, std::string_view source) {
  const LlamaKeys keys(text, source);
  if (keys.find("model_type") == nullptr) bad_llama(fmt::format("{} has no \"model_type\"", source));
  keys.expect("model_type", "llama");
  keys.expect("hidden_act", "silu");
  keys.expect("attention_bias", false);
  keys.expect("mlp_bias", false);
  TransformerConfig c;
  c.dim = keys.integer("hidden_size");
  c.ffn_hidden = keys.integer("intermediate_size");
  c.layers = keys.integer("num_hidden_layers");
  c.heads = keys.integer("num_attention_heads");
  c.kv_heads = keys.integer("num_key_value_heads", c.heads);
  c.vocab = keys.integer("vocab_size");
  c.max_seq = keys.integer("max_position_embeddings");
  c.norm_eps = keys.real("rms_norm_eps", 1e-6);
  c.init_std = keys.real("initializer_range", c.init_std);
  c.tied = keys.flag("tie_word_embeddings", false);
  c.rope_theta = rope_theta_of(keys, source);
  if (const std::int64_t size = keys.integer("head_dim", 0); c.heads > 0 && size != c.dim / c.heads)
    c.head_size = size;
  try {
    c.check();
  } catch (const Error& e) {
    bad_llama(fmt::format("{}: {}", source, e.what()));
  }
  return c;
}

std::size_t export_llama(const std::filesystem::path& checkpoint, const std::filesystem::path& folder,
                         const TransformerConfig& config, const ExportLlamaOptions& options) {
  if (options.dtype != DType::f32 && options.dtype != DType::bf16)
    bad_llama(fmt::format("export_llama: dtype is {}; expected f32 or bf16", name(options.dtype)));
  const CheckpointReader reader = CheckpointReader::open(checkpoint);
  Context context;
  Compute compute(context);
  std::vector<Tensor> kept;
  std::vector<SafetensorsEntry> entries;
  for (const auto& [path, shape] : shapes_of(config)) {
    const std::string stored = (options.averages ? "ema.average." : "param.") + path;
    if (!reader.contains(stored))
      bad_llama(fmt::format("export_llama: {} has no \"{}\"", reader.info().folder.string(), stored));
    expect_shape(fmt::format("export_llama: \"{}\"", stored), reader.tensor(stored).shape, shape);
    const Tensor value =
        options.averages ? reader.read(context, stored) : value_for_evaluation(reader, compute, path);
    kept.push_back(in_dtype(context, compute, value, options.dtype));
    entries.push_back({llama_name(path), kept.back().view()});
  }
  std::filesystem::create_directories(folder);
  write_safetensors(folder / "model.safetensors", entries, {{"format", "pt"}});
  write_new_file(folder / "config.json", llama_config_text(config, options.dtype));
  return entries.size();
}

namespace {

// Throws if the head of a folder that says "tied" has other values than the embedding.
void expect_tied_head(const std::filesystem::path& folder,
                      const std::map<std::string, SafetensorsFile>& files, Context& context) {
  const auto embedding = files.find("model.embed_tokens.weight");
  if (embedding == files.end()) return;  // that is an error of its own
  const Tensor head = files.at("lm_head.weight").read(context, "lm_head.weight"),
               other = embedding->second.read(context, embedding->first);
  if (head.dtype() != other.dtype() || head.shape() != other.shape() ||
      std::memcmp(head.data(), other.data(), static_cast<std::size_t>(head.bytes())) != 0)
    bad_llama(
        fmt::format("\"{}\": config.json has tie_word_embeddings, and \"lm_head.weight\" differs from "
                    "\"model.embed_tokens.weight\"; expected equal values, no \"lm_head.weight\", or "
                    "tie_word_embeddings false",
                    folder.string()));
}

}  // namespace

TransformerConfig import_llama(const std::filesystem::path& folder, const std::filesystem::path& directory) {
  const std::string file = (folder / "config.json").string(), source = fmt::format("\"{}\"", file);
  const TransformerConfig config =
      transformer_from_llama(read_regular_file(file, source + ":", std::size_t{1} << 24), source);
  const std::map<std::string, SafetensorsFile> files = open_files(folder);
  std::map<std::string, Shape> shapes = shapes_of(config);
  Context context;
  Compute compute(context);
  std::vector<std::string> names;
  std::vector<Tensor> tensors;
  for (const auto& [name, in] : files) {
    const std::string path = path_of_llama(name);
    // Older programs wrote the angles of the rotary positions, too; and a tied head.
    if (name.ends_with(".rotary_emb.inv_freq")) continue;
    if (config.tied && name == "lm_head.weight") {
      expect_tied_head(folder, files, context);
      continue;
    }
    const auto shape = shapes.find(path);
    if (shape == shapes.end())
      bad_llama(
          fmt::format("\"{}\": a model of this config.json has no tensor \"{}\"", folder.string(), name));
    expect_shape(fmt::format("\"{}\": \"{}\"", folder.string(), name), in.info(name).shape, shape->second);
    const DType dtype = in.info(name).dtype;
    if (dtype != DType::f32 && dtype != DType::bf16 && dtype != DType::f16)
      bad_llama(fmt::format("\"{}\": \"{}\" is {}; expected f32, bf16 or f16", folder.string(), name,
                            weft::name(dtype)));
    names.push_back("param." + path);
    tensors.push_back(in_dtype(context, compute, in.read(context, name), DType::f32));
    shapes.erase(shape);
  }
  if (!shapes.empty())
    bad_llama(fmt::format("\"{}\" has no tensor \"{}\", and {} more are missing", folder.string(),
                          llama_name(shapes.begin()->first), shapes.size() - 1));
  std::vector<NamedView> views;
  for (std::size_t i = 0; i < names.size(); ++i) views.push_back({names[i], tensors[i].view()});
  save_checkpoint(directory, DeviceMesh(), 0, views, {{"model", transformer_text(config)}});
  return config;
}

}  // namespace weft
