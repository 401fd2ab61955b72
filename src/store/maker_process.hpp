// The process that opened a store. A child made by fork() shares the parent's connection or open file. The
// server would read the requests of both processes as one stream, and both processes would own the lock of
// the file. Any thread may use it.
#pragma once

#include <fmt/format.h>
#include <unistd.h>

#include <string_view>

#include "weft/base/error.hpp"

namespace weft {

class MakerProcess {
 public:
  /// Throws unsupported in any process other than the process that made this object. `what`: the opened
  /// object, as in "the file x".
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
