// Notices of ranks to `weft run` (store/launcher_notice.hpp). For use by one thread.
#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "base/memfd.hpp"

namespace weft::tools {

/// A datagram socket of this host, under a name that the kernel chooses. Any process of this host may send to
/// it; the kernel drops datagrams that do not begin with the job's token, if the filter could be set.
class LauncherNotices {
 public:
  struct Notice {
    int rank = 0;
    enum class Kind : unsigned char { others_failed, in_doubt, step } kind = Kind::others_failed;
    std::int64_t step = 0;  ///< of Kind::step
  };

  /// `job`: the token of the job. Throws system.
  explicit LauncherNotices(std::string job);

  int fd() const noexcept { return fd_.get(); }
  /// The value of WEFT_LAUNCHER for ranks.
  const std::string& name() const noexcept { return name_; }
  /// Returns the next notices of the job. Never waits. It reads a bounded number of notices: `more` is true
  /// if it stopped at that number.
  struct Taken {
    std::vector<Notice> notices{};
    bool more = false;
  };
  Taken take();

 private:
  std::optional<Notice> notice_of(std::string_view text) const;

  const std::string job_;
  Descriptor fd_;
  std::string name_;
};

}  // namespace weft::tools
