#include "ranks_flag.hpp"

#include <fmt/format.h>

#include <filesystem>
#include <string_view>

#include "base/parse_number.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr const char* kIsARank = "--ranks=0";

}  // namespace

void expect_no_rank(const char* command) {
  if (env::get("WEFT_RANK") || env::get("RANK"))
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}: --ranks starts ranks, but this process is a rank already (WEFT_RANK or RANK "
                            "is set)",
                            command));
}

std::vector<std::string> command_of_a_rank(const std::vector<std::string>& words, int ranks) {
  std::vector<std::string> command{std::filesystem::read_symlink("/proc/self/exe").string()};
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--ranks") {
      ++i;
    } else if (!words[i].starts_with("--ranks=")) {
      command.push_back(words[i]);
    }
  }
  command.push_back(fmt::format("--ranks={}", ranks));  // started_ranks() reads it
  command.push_back(kIsARank);                          // --config may say otherwise
  return command;
}

int started_ranks(const std::vector<std::string>& words) {
  if (words.size() < 2 || words.back() != kIsARank) return 0;
  constexpr std::string_view kFlag = "--ranks=";
  const std::string& before = words[words.size() - 2];
  if (!before.starts_with(kFlag)) return 0;
  return parse_integer<int>(std::string_view(before).substr(kFlag.size())).value_or(0);
}

}  // namespace weft::tools
