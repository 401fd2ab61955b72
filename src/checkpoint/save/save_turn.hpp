// Decides which save may write to a directory. If two saves wrote there at once, they would remove each
// other's unfinished folder, and the slower save would decide which folder `latest` names. May be called from
// any thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"

namespace weft {

/// Returns one name for each directory, whether it exists or not: absolute, without links and `..` if that
/// can be found out.
std::string canonical_name(const std::filesystem::path& directory);

/// A save's place among the saves of this process that write to one directory. One save writes at a time, in
/// the order in which they took their places. The destructor gives up the place, even if the save's turn has
/// not arrived. This table does not know saves of other processes.
class SaveTurn {
 public:
  /// A place without a save: wait() returns at once.
  SaveTurn() = default;
  /// Takes the last place. Different names (links, `..`) that lead to the same directory count as one. If
  /// that cannot be found out, the name itself counts; writing there will report why.
  explicit SaveTurn(const std::filesystem::path& directory);
  SaveTurn(SaveTurn&& other) noexcept;
  SaveTurn& operator=(SaveTurn&& other) noexcept;
  ~SaveTurn();

  /// Waits until the saves before this one have ended, at most `limit`. Throws timeout that names `what` (the
  /// caller) and the directory.
  void wait(std::string_view what, Duration limit) const;

 private:
  std::string directory_;
  std::uint64_t place_ = 0;  // 0: of no save
};

}  // namespace weft
