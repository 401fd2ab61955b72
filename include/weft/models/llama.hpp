// Checkpoints in the form of Llama models: a folder with config.json and safetensors files, under the names
// that the transformers library and many inference programs read. One process, no mesh; any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "weft/models/transformer.hpp"

namespace weft {

/// The name of a Transformer's parameter in such a folder: `layers.0.mlp.up_proj.weight` becomes
/// `model.layers.0.mlp.up_proj.weight`. Returns "" for a path that a Transformer does not have.
std::string llama_name(std::string_view path);
/// The path of the parameter that has this name in such a folder; "" if there is none.
std::string path_of_llama(std::string_view name);

/// Returns the text of a config.json that describes the model.
std::string llama_config_text(const TransformerConfig& config, DType stored = DType::f32);
/// Reads config.json. `source` names it in errors. Throws bad_argument, with the key, if a key is missing or
/// has a value that a Transformer does not have: another model_type, biases, another activation than silu,
/// scaled rotary positions.
TransformerConfig transformer_from_llama(std::string_view text, std::string_view source);

struct ExportLlamaOptions {
  DType dtype = DType::f32;  ///< of the tensors in the file: f32 or bf16
  bool averages = false;     ///< those of an Ema in the place of the parameters
};
/// Writes `folder`/model.safetensors and `folder`/config.json from a checkpoint of a Transformer with this
/// configuration. The folder is made if it is absent. Returns the number of tensors. Throws bad_argument if
/// the checkpoint lacks a parameter or its averages, or has one with another shape than `config` says; and
/// the errors of CheckpointReader and of files.
std::size_t export_llama(const std::filesystem::path& checkpoint, const std::filesystem::path& folder,
                         const TransformerConfig& config, const ExportLlamaOptions& options = {});

/// Reads such a folder (model.safetensors, or the files that model.safetensors.index.json lists; f32, bf16 or
/// f16) and writes the parameters as a checkpoint of step 0 into `directory`: f32, under "param.", with the
/// configuration as extra "model". The whole model is in memory. Returns the configuration. Throws
/// bad_argument that names the tensor if one is missing, unknown, or has another shape than config.json says;
/// and the errors of transformer_from_llama(), SafetensorsFile and save_checkpoint().
TransformerConfig import_llama(const std::filesystem::path& folder, const std::filesystem::path& directory);

}  // namespace weft
