// A checkpoint's folder while it is written: it has a temporary name until all its files are on the disk.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <map>
#include <string>
#include <string_view>
#include <vector>

#include "checkpoint/index/index.hpp"
#include "checkpoint/safetensors_write.hpp"
#include "checkpoint/save/replace_folder.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The string with the step in a file's metadata.
inline constexpr const char* kStepKey = "weft_step";

/// directory/step-N. One rank calls make(), finish() and remove(). Each writing rank calls write(). Each
/// function throws `system` that names the file. The caller must hold the directory's SaveTurn.
class NewFolder {
 public:
  /// `warn` gets a text about everything that should have been removed and was not.
  NewFolder(std::filesystem::path directory, std::int64_t step,
            std::function<void(std::string_view stage)> on_stage, Warn warn);
  /// Makes the folder, empty, under the temporary name, and removes the remains of a save that was killed.
  void make() const;
  /// Writes a file into the folder; returns the hash of its header.
  std::uint64_t write(const std::string& name, std::vector<PlannedTensor> tensors,
                      std::map<std::string, std::string> metadata) const;
  /// Writes the index, gives the folder its name, lets `latest` name it, and removes older checkpoints until
  /// `keep` are left (0: removes none).
  void finish(const CheckpointIndex& index, int keep);
  /// Call it after an error before finish(). It removes the folder.
  void remove() const noexcept;
  /// How far the save has got, for an error's text: `run is as it was`, `run/step-00000002 is whole, but
  /// run/latest does not name it`, `run/step-00000002 is whole, and run/latest names it`.
  std::string state() const;

 private:
  void reached(std::string_view stage) const;
  std::function<void(std::string_view)> steps_of(std::string what) const;
  std::filesystem::path directory_, folder_, unfinished_;
  std::int64_t step_;
  std::function<void(std::string_view)> on_stage_;
  Warn warn_;
  bool has_its_name_ = false;
};

/// `run is as it was`
std::string unchanged(const std::filesystem::path& directory);

/// Where a save's warnings go: to the log of the mesh's Context. Without a mesh they go to stderr, as
/// WEFT_LOG says.
Warn warnings_of(std::string what, const DeviceMesh& mesh);

}  // namespace weft
