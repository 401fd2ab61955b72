// What ranks tell weft run before they fail because others did (store/launcher_notice.hpp). One thread.
#pragma once

#include <string>
#include <string_view>

namespace weft::tools {

/// A datagram socket of this host, under a name that the kernel chooses.
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

}  // namespace weft::tools
