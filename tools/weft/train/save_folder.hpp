// The state of the folder to which a run will save. Every rank calls it before the ranks meet, and so does
// the process that starts them: all find the same state.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>

#include "trainer.hpp"

namespace weft::tools {

struct SaveFolder {
  bool resume = false;  ///< the run goes on from the checkpoint that is there
  std::int64_t step = 0;
  std::string note{};  ///< a note for the user; or empty
};

/// Compares the runs of the ranks of `group`, of the form of identity_of(). Collective. Throws mismatch on
/// all ranks if a rank has another run than rank 0; the text names the flags and their values.
void expect_same_run(ProcessGroup& group, const std::string& run);

/// Makes the folder. `resume`: "latest", "auto" (if there is a checkpoint), or "no". Throws bad_argument if
/// there is no checkpoint from which to resume, or if there is one of another run; the text names the
/// differences. The number of steps and the warm-up may differ in a resumed run. Without resume, a checkpoint
/// of another run is refused, too, unless `overwrite` is set. Throws system if the folder cannot be made or
/// written to.
SaveFolder look_at_save_folder(const std::filesystem::path& folder, const TrainConfig& config,
                               const std::string& resume, bool overwrite);

}  // namespace weft::tools
