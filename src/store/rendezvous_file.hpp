// The file by which ranks of one host find the store that their rank 0 serves, if no variable gives the
// store's port. It is a small file, named after the job, in a folder that only this user may enter.
//
// The file counts only as long as the process that wrote it is alive (identified by its process number and
// start time). So the file of a killed job has no effect.
#pragma once

#include <sys/types.h>

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "base/memfd.hpp"
#include "weft/base/clock.hpp"

namespace weft {

/// Returns the start time of a process, in clock ticks since boot. Nothing if there is no such process.
std::optional<std::uint64_t> start_time_of(pid_t process);

class RendezvousFile {
 public:
  /// Opens the folder, and makes it if it is absent. It is $XDG_RUNTIME_DIR/weft; otherwise the first of
  /// /tmp/weft-<user>, /tmp/weft-<user>-1 to -9 and ~/.weft that exists and belongs only to this user, or
  /// that can be made. (Other users who may write to /tmp may have taken any of these names.) Throws system
  /// if there is no such folder. `key` names the job on this host.
  explicit RendezvousFile(std::string key);

  /// The path of the file, for error texts.
  std::string path() const { return path_in(folder_); }
  /// For rank 0: writes the address at which it serves. Throws system if another live process has published
  /// the same key.
  void publish(const std::string& address, Deadline deadline) const;
  /// Returns the address that rank 0 has published, or nothing if there is none yet.
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
  Folder folder_;  // the folder to which this process writes
};

}  // namespace weft
