// Runs a shell command until it ends.
#pragma once

#include <sys/wait.h>

#include <cstdio>
#include <string>

namespace weft::test {

struct CommandOutput {
  int status = -1;  ///< its exit status, or minus the signal that ended it
  std::string text;
};

/// Its standard output. It has the test's environment and folder.
inline CommandOutput output_of(const std::string& command) {
  CommandOutput o;
  std::FILE* const pipe = ::popen(command.c_str(), "r");
  if (pipe == nullptr) return o;
  char buffer[4096];
  for (std::size_t n = 0; (n = std::fread(buffer, 1, sizeof buffer, pipe)) > 0;) o.text.append(buffer, n);
  const int status = ::pclose(pipe);
  o.status = WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  return o;
}

}  // namespace weft::test
