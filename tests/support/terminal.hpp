// A program that runs on a terminal, and the bytes that the terminal receives.
#pragma once

#include <fcntl.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <stdlib.h>
#include <sys/ioctl.h>
#include <unistd.h>

#include <functional>
#include <optional>
#include <string>
#include <vector>

#include "support/processes.hpp"
#include "weft/base/clock.hpp"

namespace weft::test {

struct OnATerminal {
  std::string text;
  std::optional<ExitStatus> status;  ///< empty: it still ran some seconds after its terminal was closed
};

/// Runs words[0] with the other words as its arguments. `columns`: the width of the terminal; 0: the terminal
/// does not report its width. `prepare` runs in the child first.
inline OnATerminal run_on_a_terminal(std::vector<std::string> words, int columns, Duration limit,
                                     const std::function<void()>& prepare = {}) {
  const int terminal = ::posix_openpt(O_RDWR | O_NOCTTY | O_CLOEXEC);
  EXPECT_EQ(::grantpt(terminal), 0);
  EXPECT_EQ(::unlockpt(terminal), 0);
  if (columns > 0) {
    const winsize size{
        .ws_row = 24, .ws_col = static_cast<unsigned short>(columns), .ws_xpixel = 0, .ws_ypixel = 0};
    EXPECT_EQ(::ioctl(terminal, TIOCSWINSZ, &size), 0);
  }
  const std::string name = ::ptsname(terminal);
  ChildProcess process = ChildProcess::fork([&] {
    if (prepare) prepare();
    const int side = ::open(name.c_str(), O_RDWR | O_NOCTTY);
    for (int fd = 0; fd <= 2; ++fd) ::dup2(side, fd);
    ::close(side);
    std::vector<char*> argv;
    for (std::string& word : words) argv.push_back(word.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    return 99;
  });
  OnATerminal got;
  for (const Deadline deadline = Deadline::after(limit); !deadline.passed();) {
    pollfd p{terminal, POLLIN, 0};
    char buffer[4096];
    if (::poll(&p, 1, 100) == 0) continue;
    const ssize_t bytes = ::read(terminal, buffer, sizeof buffer);  // EIO: the other side is closed
    if (bytes <= 0) break;
    got.text.append(buffer, static_cast<std::size_t>(bytes));
  }
  got.status = process.wait(std::chrono::seconds(10));
  ::close(terminal);
  return got;
}

}  // namespace weft::test
