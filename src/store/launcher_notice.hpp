// What a rank tells weft run, which started it, before it fails because others did: the launcher then names
// those, though their ends may be noticed later. Any thread.
#pragma once

#include <string>
#include <string_view>

namespace weft {

/// The launcher's side: a datagram socket of this host, under a name that the kernel chooses.
class LauncherNotices {
 public:
  /// Throws system.
  LauncherNotices();
  ~LauncherNotices();
  LauncherNotices(const LauncherNotices&) = delete;
  LauncherNotices& operator=(const LauncherNotices&) = delete;

  int fd() const noexcept { return fd_; }
  /// What ranks find in WEFT_LAUNCHER.
  const std::string& name() const noexcept { return name_; }
  /// The rank that one more notice of `job` is from; -1: there is none now. Never waits.
  int next(std::string_view job);

 private:
  int fd_ = -1;
  std::string name_;
};

/// The rank's side: this process's group failed because of other ranks. Nothing where no launcher listens;
/// waits for at most a tenth of a second.
void tell_launcher_that_others_failed() noexcept;

}  // namespace weft
