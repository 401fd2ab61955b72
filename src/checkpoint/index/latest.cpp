// The contents of `latest`: the name of a folder next to it, and the name's hash.
#include <fmt/format.h>

#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/index/index.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::string_view kLatestHash = "\nxxh3 ";

}  // namespace

std::string latest_text(std::string_view folder) {
  return fmt::format("{}{}{}\n", folder, kLatestHash,
                     hash_text(content_hash(std::as_bytes(std::span(folder)))));
}

std::string folder_of_latest(const std::filesystem::path& latest, const std::string& text) {
  std::string name = text;
  if (const std::size_t line = name.find('\n');
      line != name.npos && name.substr(line).starts_with(kLatestHash)) {
    const std::string folder = name.substr(0, line);
    if (name != latest_text(folder))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("checkpoint: {} is not as it was written: it has the hash of another name than "
                              "\"{}\"",
                              latest.string(), folder));
    name = folder;
  }
  while (!name.empty() && (name.back() == '\n' || name.back() == ' ')) name.pop_back();
  if (const auto why = why_no_file_name(name))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("checkpoint: {} names what is {}; expected the name of a folder in the same place",
                    latest.string(), *why));
  return name;
}

}  // namespace weft
