// The process that opened a store. A child made by fork() has the same connection or the same open file: the
// server would read both processes' requests as one stream, and both processes would own a lock of the file.
// Any thread.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <string_view>

#include "weft/base/error.hpp"

namespace weft {

class MakerProcess {
 public:
  /// Throws unsupported in any process but the one that made this object. `what`: the opened object: "the
  /// file x".
  void check(std::string_view what) const {
    if (::getpid() == process_) [[likely]]
      return;
    throw Error(
        ErrorCode::unsupported,
        fmt::format("store: this process was forked from process {}, which opened {}; open a store of its "
                    "own in the child",
                    process_, what));
  }

 private:
  const pid_t process_ = ::getpid();
};

}  // namespace weft
