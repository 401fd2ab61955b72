// Starts the built `weft` (WEFT_COMMAND) as a user would, outside of any job.
#pragma once

#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <vector>

#include "support/processes.hpp"

namespace weft::test {

/// `out`, `err`: files for its output. `environment`: NAME=value, set before the program starts.
inline ChildProcess start_weft(const std::vector<std::string>& words, const std::filesystem::path& out,
                               const std::filesystem::path& err,
                               const std::vector<std::string>& environment = {}) {
  return ChildProcess::fork([&] {
    for (const char* inherited : {"WEFT_RANK", "RANK", "WEFT_STORE", "WORLD_SIZE", "WEFT_WORLD_SIZE"})
      ::unsetenv(inherited);
    for (const int number : {SIGINT, SIGTERM}) ::signal(number, SIG_DFL);
    for (const std::string& e : environment) ::putenv(const_cast<char*>(e.c_str()));
    if (std::freopen(out.c_str(), "w", stdout) == nullptr ||
        std::freopen(err.c_str(), "w", stderr) == nullptr)
      return 99;
    std::vector<std::string> all = words;
    all.insert(all.begin(), WEFT_COMMAND);
    std::vector<char*> argv;
    for (std::string& word : all) argv.push_back(word.data());
    argv.push_back(nullptr);
    ::execv(argv[0], argv.data());
    return 99;
  });
}

}  // namespace weft::test
