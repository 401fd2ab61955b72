// Notices of ranks to weft run (store/launcher_notice.hpp). One thread.
#pragma once

#include <string>
#include <vector>

#include "base/memfd.hpp"

namespace weft::tools {

/// A datagram socket of this host, under a name that the kernel chooses. Anybody of this host may send to it;
/// the kernel drops what does not begin with the job's token, if it can be asked to.
class LauncherNotices {
 public:
  struct Notice {
    int rank = 0;
    bool in_doubt = false;  ///< its results may be wrong; otherwise it fails because of others
  };

  /// `job`: the token of the job. Throws system.
  explicit LauncherNotices(std::string job);

  int fd() const noexcept { return fd_.get(); }
  /// The value of WEFT_LAUNCHER for ranks.
  const std::string& name() const noexcept { return name_; }
  /// The next notices of the job. Never waits. It reads a bounded number of notices: `more` says that it
  /// stopped at that.
  struct Taken {
    std::vector<Notice> notices{};
    bool more = false;
  };
  Taken take();

 private:
  const std::string job_;
  Descriptor fd_;
  std::string name_;
};

}  // namespace weft::tools
