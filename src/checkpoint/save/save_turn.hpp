// Whose turn it is to write to a directory. Two saves that wrote there at once would remove each other's
// unfinished folder, and the slower one would have the last word on what `latest` names. From any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"

namespace weft {

/// One name for each directory, whether it is there or not: absolute, without links and `..` if that can be
/// found out.
std::string canonical_name(const std::filesystem::path& directory);

/// A save's place among those of this process that write to one directory: one writes at a time, in the order
/// in which they took their places. The place ends with the object, also one whose turn has not come. Saves
/// of other processes are not known.
class SaveTurn {
 public:
  /// Without a save: wait() returns at once.
  SaveTurn() = default;
  /// Takes the last place. Ways to name the directory that lead to the same one (links, `..`) are one. If
  /// that cannot be found out the name itself counts: writing there will say why.
  explicit SaveTurn(const std::filesystem::path& directory);
  SaveTurn(SaveTurn&& other) noexcept;
  SaveTurn& operator=(SaveTurn&& other) noexcept;
  ~SaveTurn();

  /// Waits until the saves before this one have ended, at most `limit`. Throws timeout naming `what`, the
  /// caller, and the directory.
  void wait(std::string_view what, Duration limit) const;

 private:
  std::string directory_;
  std::uint64_t place_ = 0;  // 0: of none
};

}  // namespace weft
