#include "ranks_flag.hpp"

#include <fmt/format.h>

#include <filesystem>

#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {

void expect_no_rank(const char* command) {
  if (env::get("WEFT_RANK") || env::get("RANK"))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: --ranks starts ranks, but this process is a rank already (WEFT_RANK or RANK "
                            "is set)",
                            command));
}

std::vector<std::string> command_of_a_rank(const std::vector<std::string>& words) {
  std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string()};
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--ranks") {
      ++i;
    } else if (!words[i].starts_with("--ranks=")) {
      command.push_back(words[i]);
    }
  }
  command.push_back("--ranks=0");  // --config may say otherwise
  return command;
}

}  // namespace weft::tools
