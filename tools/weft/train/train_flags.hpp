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
/// Throws bad_argument if a flag that only models of another kind have is not at its default.
void expect_flags_of_kind(const TrainConfig& config);
/// The tables of a file, for the options that are there by now.
void arrange_tables(ConfigFile& file);
/// The flags as words, for a process that runs this configuration: everything except the model, which is in a
/// file (ModelKind::table).
std::vector<std::string> to_words(const TrainConfig& config);

}  // namespace weft::tools
