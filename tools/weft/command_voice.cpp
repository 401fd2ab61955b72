#include "command_voice.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <optional>
#include <string_view>
#include <utility>
#include <vector>

#include "columns.hpp"

namespace weft::tools {
namespace {

constexpr std::size_t kNames = 26;  // where descriptions begin
constexpr std::string_view kNotInRange = " not in range ";

std::vector<std::string> parts_of(const std::string& text, const std::string& by) {
  std::vector<std::string> parts;
  std::size_t from = 0;
  for (std::size_t at = 0; (at = text.find(by, from)) != std::string::npos; from = at + by.size())
    parts.push_back(text.substr(from, at - from));
  parts.push_back(text.substr(from));
  return parts;
}

std::string row(const std::string& names, const std::string& description) {
  std::string out = "  " + names;
  if (description.empty()) return out + '\n';
  if (out.size() + 2 > kNames)
    out += '\n' + std::string(kNames, ' ');
  else
    out += std::string(kNames - out.size(), ' ');
  return out + folded(description, kNames, kNames) + '\n';
}

// "1 to 256" of the bounds that CLI11 has. "0 or more" if the upper bound is the largest number that
// exists.
std::string range(const std::string& low, const std::string& high) {
  const bool open = high.find("e+308") != std::string::npos;
  return open ? low + " or more" : fmt::format("{} to {}", low, high);
}

// The value of an option: CLI11 joins the type and the checks, as in "INT:INT in [1 - 256]".
struct Value {
  std::string word;    // "N", "FILE", "whole|shard"
  std::string bounds;  // "1 to 256"
};

Value value_of(const CLI::Option& option) {
  Value value;
  for (const std::string& part : parts_of(option.get_type_name(), ":")) {
    if (part.starts_with('{')) {
      value.word = fmt::format("{}", fmt::join(parts_of(part.substr(1, part.size() - 2), ","), "|"));
    } else if (const std::size_t at = part.find(" in ["); at != std::string::npos) {
      const std::vector<std::string> ends = parts_of(part.substr(at + 5, part.size() - at - 6), " - ");
      if (ends.size() == 2) value.bounds = range(ends[0], ends[1]);
    } else if (part == "INT" || part == "UINT") {
      value.word = "N";
    } else if (part == "FLOAT") {
      value.word = "X";
    } else if (!part.empty()) {
      value.word = part;
    }
  }
  return value;
}

}  // namespace

HelpFormat::HelpFormat() {
  label("SUBCOMMAND", "COMMAND");
  label("SUBCOMMANDS", "COMMANDS");
  label("Positionals", "Words");
}

std::string HelpFormat::make_option(const CLI::Option* option, bool is_positional) const {
  std::string names = make_option_name(option, is_positional);
  std::vector<std::string> more;
  const Value value = value_of(*option);
  if (const std::size_t brace = names.find('{'); brace != std::string::npos)  // a flag that may have a value
    names = fmt::format("{}[={}]", names.substr(0, brace), value.word);
  else if (option->get_type_size() != 0 && !is_positional)
    names += " " + value.word;
  if (option->get_expected_max() == CLI::detail::expected_max_vector_size) names += "...";
  if (!value.bounds.empty()) more.push_back(value.bounds);
  if (option->get_type_size() != 0 && !option->get_default_str().empty())
    more.push_back("default " + option->get_default_str());
  if (option->get_required()) more.push_back("required");
  std::string description = option->get_description();
  if (!more.empty()) description += fmt::format(" ({})", fmt::join(more, "; "));
  return row(names, description);
}

std::string HelpFormat::make_subcommand(const CLI::App* command) const {
  return row(command->get_name(), command->get_description());
}

std::string HelpFormat::make_footer(const CLI::App* command) const {
  if (command->get_footer().empty()) return {};
  std::string out;
  for (const std::string& line : parts_of(command->get_footer(), "\n")) {
    const std::size_t indent = std::min(line.find_first_not_of(' '), line.size());
    out += line.substr(0, indent) + folded(line.substr(indent), indent == 0 ? 0 : indent + 2, indent) + '\n';
  }
  return out;
}

std::string in_our_words(const CLI::Error& error) {
  const std::string text = error.what();
  const auto behind = [&](const std::string& words) -> std::optional<std::string> {
    return text.starts_with(words) ? std::optional(text.substr(words.size())) : std::nullopt;
  };
  if (const auto words = behind("The following argument was not expected: "))
    return fmt::format("{} is not expected", *words);
  if (const auto words = behind("The following arguments were not expected: "))
    return fmt::format("{} are not expected", *words);
  if (const auto words = behind("Could not convert: "))
    if (const std::size_t at = words->find(" = "); at != std::string::npos)
      return fmt::format("{} is {}; expected a number", words->substr(0, at), words->substr(at + 3));
  const std::size_t colon = text.find(": ");
  if (colon == std::string::npos) return text;
  const std::string name = text.substr(0, colon), rest = text.substr(colon + 2);
  if (name == "weft run") return rest;
  if (rest.find(" required ") != std::string::npos && rest.ends_with(" missing"))
    return fmt::format("{} has no value; expected one", name);
  const bool is_value = rest.starts_with("Value ");
  if (const std::size_t at = rest.find(kNotInRange); is_value && at != std::string::npos) {
    const std::vector<std::string> ends = parts_of(rest.substr(at + kNotInRange.size()), " to ");
    if (ends.size() == 2)
      return fmt::format("{} is {}; expected {}", name, rest.substr(6, at - 6), range(ends[0], ends[1]));
  }
  if (is_value) return fmt::format("{} is {}", name, rest.substr(6));
  if (const std::size_t at = rest.find(" not in {"); at != std::string::npos && rest.ends_with('}'))
    return fmt::format("{} is {}; expected {}", name, rest.substr(0, at),
                       fmt::join(parts_of(rest.substr(at + 9, rest.size() - at - 10), ","), ", "));
  if (rest.starts_with("File does not exist: "))
    return fmt::format("{} is {}, which is not there", name, rest.substr(21));
  if (rest.starts_with("File is actually a directory: "))
    return fmt::format("{} is {}, a folder; expected a file", name, rest.substr(30));
  return text;
}

}  // namespace weft::tools
