#include "config_file.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <iterator>
#include <optional>
#include <type_traits>

#include "base/files/regular_file.hpp"
#include "base/text/nearest.hpp"
#include "base/text/plain_streams.hpp"
#include "command_voice.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

[[noreturn]] void wrong(const std::string& where, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("{}: {}", where, what));
}

// The last file that the command line names, if there is one: the value of "--config".
std::optional<std::string> named_in(const std::vector<std::string>& words) {
  std::optional<std::string> path;
  for (std::size_t i = 0; i < words.size(); ++i) {
    if (words[i] == "--") break;
    if (words[i].starts_with("--config=")) path = words[i].substr(std::string_view("--config=").size());
    if (words[i] == "--config" && i + 1 < words.size()) path = words[++i];
  }
  return path;
}

template <class T>
const char* type_name() {
  if constexpr (std::is_same_v<T, bool>)
    return "true or false";
  else if constexpr (std::is_integral_v<T>)
    return "an integer";
  else if constexpr (std::is_floating_point_v<T>)
    return "a number";
  else if constexpr (std::is_same_v<T, std::vector<std::string>>)
    return "an array of texts";
  else
    return "a text in quotes";
}

// The value in the form of the command line; nothing if it is of another type.
template <class T>
std::optional<std::vector<std::string>> words_of(const toml::node& value) {
  using Words = std::vector<std::string>;
  if constexpr (std::is_same_v<T, bool>) {
    if (const auto* b = value.as_boolean()) return Words{b->get() ? "true" : "false"};
  } else if constexpr (std::is_integral_v<T>) {
    if (const auto* i = value.as_integer()) return Words{fmt::to_string(i->get())};
  } else if constexpr (std::is_floating_point_v<T>) {
    if (const auto* i = value.as_integer()) return Words{fmt::to_string(i->get())};
    if (const auto* d = value.as_floating_point()) return Words{fmt::to_string(d->get())};
  } else if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    if (const auto* all = value.as_array()) {
      Words words;
      for (const toml::node& one : *all) {
        if (!one.is_string()) return std::nullopt;
        words.push_back(one.as_string()->get());
      }
      return words;
    }
  } else {
    if (const auto* s = value.as_string()) return Words{s->get()};
  }
  return std::nullopt;
}

std::string shown(const toml::node& value) {
  if (value.is_table()) return "a table";
  TextOut text;
  value.visit([&](const auto& v) { text << v; });
  return text.str();
}

std::string quoted(const std::string& text) {
  TextOut out;
  out << toml::value<std::string>(text);
  return out.str();
}

template <class T>
std::string written(const T& value) {
  if constexpr (std::is_same_v<T, std::vector<std::string>>) {
    std::vector<std::string> all;
    for (const std::string& one : value) all.push_back(quoted(one));
    return fmt::format("[{}]", fmt::join(all, ", "));
  } else if constexpr (std::is_same_v<T, std::filesystem::path>) {
    return quoted(value.string());
  } else if constexpr (std::is_same_v<T, std::string>) {
    return quoted(value);
  } else {
    return fmt::format("{}", value);  // the shortest digits that give the same number
  }
}

std::string contents_of(const std::string& path) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 20;
  if (const RegularFile file = open_regular_file(path); !file.fd)
    wrong(fmt::format("--config \"{}\"", path), file.why);
  return read_regular_file(path, fmt::format("--config \"{}\":", path), kMostBytes);
}

toml::table parse(const std::string& text, const std::string& path) {
  try {
    return toml::parse(text, path);
  } catch (const toml::parse_error& e) {
    wrong(fmt::format("{}:{}", path, e.source().begin.line), fmt::format("not TOML: {}", e.description()));
  }
}

// Returns the value in the form of the command line.
void give(const std::string& where, const std::string& name, const toml::node& value, CLI::Option& option,
          const ConfigFile::Variable& variable) {
  std::visit(
      [&](auto* kept) {
        using T = std::remove_pointer_t<decltype(kept)>;
        const auto words = words_of<T>(value);
        if (!words) wrong(where, fmt::format("{} is {}; expected {}", name, shown(value), type_name<T>()));
        try {
          option.add_result(*words);
          option.run_callback();
        } catch (const CLI::Error& e) {
          wrong(where, in_our_words(e));
        }
        option.clear();  // so that the command line's value takes its place
      },
      variable);
}

}  // namespace

ConfigFile::ConfigFile(CLI::App& sub, const std::vector<std::string>& words) : command_(sub.get_name()) {
  sub.add_option("--config", path_, "Read options from a TOML file: name = value; the command line wins")
      ->type_name("FILE")
      ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  sub.add_flag("--print-config", print_,
               "Print a file for --config with all options as they are now, and end");
  sub.preparse_callback([this, &words](std::size_t) {
    if (const auto path = named_in(words)) read(*path);
  });
}

CLI::Option* ConfigFile::take(CLI::Option* option, Variable variable) {
  entries_.push_back({option->get_lnames().front(), option, variable});
  return option;
}

void ConfigFile::take_table(std::string name, std::vector<std::string> options, Read read,
                            std::function<std::string()> written) {
  tables_.push_back({std::move(name), std::move(options), std::move(read), std::move(written)});
}

bool ConfigFile::Table::has(const std::string& key) const {
  return std::find(options.begin(), options.end(), key) != options.end();
}

void ConfigFile::read(const std::string& path) const {
  const std::string text = contents_of(path);
  const toml::table all = parse(text, path);
  for (const auto& [key, value] : all) {
    const std::string name(key.str());
    const std::string where = fmt::format("{}:{}", path, key.source().begin.line);
    for (const Table& table : tables_)
      if (table.has(name) && all.contains(table.name))
        wrong(where, fmt::format("{} is given beside the table [{}]; expected it there", name, table.name));
    const auto table =
        std::find_if(tables_.begin(), tables_.end(), [&](const Table& t) { return t.name == name; });
    if (table != tables_.end()) {
      table->read(text, path);
    } else {
      const Entry& entry = entry_of(where, name);
      give(where, name, value, *entry.option, entry.variable);
    }
  }
}

const ConfigFile::Entry& ConfigFile::entry_of(const std::string& where, const std::string& name) const {
  const auto entry =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.key == name; });
  if (entry != entries_.end()) return *entry;
  std::vector<std::string> names;
  for (const Entry& e : entries_) names.push_back(e.key);
  for (const Table& t : tables_) names.push_back(t.name);
  wrong(where, fmt::format("weft {} has no option \"{}\"{}", command_, name, is_meant(name, names)));
}

std::string ConfigFile::text() const {
  std::string all = fmt::format("# For weft {} --config FILE.\n", command_);
  for (const Entry& e : entries_) {
    if (std::any_of(tables_.begin(), tables_.end(), [&](const Table& t) { return t.has(e.key); })) continue;
    std::visit(
        [&](const auto* variable) {
          // An empty text or list means that the option was not given.
          bool given = true;
          if constexpr (requires { variable->empty(); }) given = !variable->empty();
          all += fmt::format("\n# {}\n{}{} = {}\n", e.option->get_description(), given ? "" : "# ", e.key,
                             written(*variable));
        },
        e.variable);
  }
  for (const Table& t : tables_)
    all += "\n" + t.written();  // to the end: the lines after a table's name belong to the table
  return all;
}

}  // namespace weft::tools
