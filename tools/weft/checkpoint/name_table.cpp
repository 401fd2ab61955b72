#include "name_table.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <optional>

#include "base/files/regular_file.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

// The texts that the * of a pattern stand for in `name`, or nothing if they do not fit.
std::optional<std::string_view> fit(std::string_view pattern, std::string_view name) {
  const std::size_t star = pattern.find('*');
  if (star == pattern.npos) return pattern == name ? std::optional<std::string_view>("") : std::nullopt;
  const std::string_view before = pattern.substr(0, star), after = pattern.substr(star + 1);
  if (name.size() < before.size() + after.size() || !name.starts_with(before) || !name.ends_with(after))
    return std::nullopt;
  return name.substr(star, name.size() - before.size() - after.size());
}

constexpr std::size_t kMostBytes = std::size_t{64} << 20;

}  // namespace

NameTable NameTable::read(const std::filesystem::path& path) {
  TextIn file(read_regular_file(path.string(), fmt::format("names \"{}\":", path.string()), kMostBytes));
  NameTable table;
  int number = 0;
  for (std::string line; std::getline(file, line);) {
    ++number;
    TextIn words(line.substr(0, line.find('#')));
    Line names;
    std::string more;
    if (!(words >> names.from)) continue;
    const auto wrong = [&](const std::string& text) {
      throw Error(ErrorCode::bad_argument,
                  fmt::format("names \"{}\", line {}: {}", path.string(), number, text));
    };
    if (!(words >> names.to) || words >> more) wrong("expected two names, OLD NEW");
    const auto from = std::count(names.from.begin(), names.from.end(), '*'),
               to = std::count(names.to.begin(), names.to.end(), '*');
    if (from > 1 || to > from) wrong("expected at most one * in OLD, and in NEW no more than there");
    table.lines_.push_back(std::move(names));
  }
  return table;
}

std::string NameTable::renamed(std::string_view name) const {
  for (const Line& line : lines_)
    if (const auto text = fit(line.from, name)) {
      const std::size_t star = line.to.find('*');
      return star == line.to.npos
                 ? line.to
                 : fmt::format("{}{}{}", line.to.substr(0, star), *text, line.to.substr(star + 1));
    }
  return std::string(name);
}

}  // namespace weft::tools
