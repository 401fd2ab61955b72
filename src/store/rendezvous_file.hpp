// The file by which ranks of one host find the store that their rank 0 serves, if no variable can give its
// port. It is small, named after the job, and lies in a folder that only this user may enter.
//
// The file counts only while the process that wrote it lives (identified by its process number and start
// time). So a file that a killed job left has no effect.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/memfd.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// When a process started, in clock ticks since boot; nothing if there is no such process.
std::optional<std::uint64_t> start_time_of(pid_t process);

class RendezvousFile {
 public:
  /// Opens the folder, and makes it if it is absent: $XDG_RUNTIME_DIR/weft; otherwise the first of
  /// /tmp/weft-<user>, /tmp/weft-<user>-1 to -9 and ~/.weft that belongs to this user alone, or can be made
  /// so. Other users who may write to /tmp may have taken any name there. Throws system if there is no such
  /// folder. `key` names the job on this host.
  explicit RendezvousFile(std::string key);

  /// The file, for error texts.
  std::string path() const { return path_in(folder_); }
  /// To be called by rank 0: writes the address at which it serves. Throws system if another live process has
  /// published the same key.
  void publish(const std::string& address, Deadline deadline) const;
  /// The address that rank 0 published, or nothing yet.
  std::optional<std::string> find() const;
  /// Removes the file if it still has this address. Called when all ranks have met, or when rank 0 leaves.
  void remove(const std::string& address) const noexcept;

 private:
  struct Published {
    std::string address;
    pid_t process = 0;
    std::uint64_t started = 0;
    bool lives() const { return start_time_of(process) == started; }
  };
  struct Folder {
    std::string path;
    Descriptor fd;
  };
  std::optional<Published> read(const Folder& folder) const;
  std::optional<Published> read_any() const;
  std::string path_in(const Folder& folder) const { return folder.path + "/" + name_; }

  std::string key_;
  std::string name_;
  std::vector<std::string> candidates_;
  Folder folder_;  // to which this process writes
};

}  // namespace weft
