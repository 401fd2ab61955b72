// The state of the folder that a run is to save to. Called by every rank before they meet, and by who starts
// them: all find the same.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "trainer.hpp"

namespace weft::tools {

struct SaveFolder {
  bool resume = false;  ///< the run goes on from the checkpoint that is there
  std::int64_t step = 0;
  std::string note{};  ///< what is worth saying of it; or empty
};

/// Makes the folder. `resume`: "latest", "auto" (if there is a checkpoint), or "no". Throws bad_argument
/// if there is none to go on from, or where one of another run is there, naming what differs: the number
/// of steps and the warm-up may, for a run that goes on. Without resume, one of another run is refused, too,
/// unless `overwrite`. Throws system if the folder cannot be made or written to.
SaveFolder look_at_save_folder(const std::filesystem::path& folder, const TrainConfig& config,
                               const std::string& resume, bool overwrite);

}  // namespace weft::tools
