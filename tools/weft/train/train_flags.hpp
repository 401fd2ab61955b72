// The flags that `weft train` and `weft parity` share.
#pragma once

#include "trainer.hpp"

namespace CLI {
class App;
}

namespace weft::tools {

class ConfigFile;

/// Model, text, batch, schedule, seed: everything except the mesh.
void add_train_flags(CLI::App& sub, TrainConfig& config, ConfigFile& file);
/// The tables of a file, for the options that are there by now.
void arrange_tables(ConfigFile& file);
/// The flags as words, for a process that runs this configuration: everything except the model, which is in a
/// file (transformer_text).
std::vector<std::string> to_words(const TrainConfig& config);

}  // namespace weft::tools
