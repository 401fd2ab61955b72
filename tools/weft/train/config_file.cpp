#include "config_file.hpp"

#include <fmt/format.h>
#include <toml++/toml.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <cerrno>
#include <iterator>
#include <map>
#include <optional>
#include <set>
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

// Control characters as escapes: a line feed at the beginning of a text of several lines would not count.
std::string quoted(const std::string& text) {
  if (std::any_of(text.begin(), text.end(), [](unsigned char c) { return c < 0x20 || c == 0x7f; })) {
    std::string escaped = "\"";
    for (const char c : text) {
      const auto byte = static_cast<unsigned char>(c);
      if (byte < 0x20 || byte == 0x7f)
        escaped += fmt::format("\\u{:04x}", static_cast<unsigned>(byte));
      else if (c == '"' || c == '\\')
        escaped += {'\\', c};
      else
        escaped += c;
    }
    return escaped + "\"";
  }
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

void ConfigFile::arrange(std::string table, const Keys& keys) {
  for (const auto& [key, option] : keys)
    for (Entry& e : entries_)
      if (e.key == option) e.table = table, e.in_table = key;
}

bool ConfigFile::arranged(const std::string& table) const {
  return std::any_of(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.table == table; });
}

const ConfigFile::Table* ConfigFile::reader_of(const std::string& table) const {
  const auto found =
      std::find_if(tables_.begin(), tables_.end(), [&](const Table& t) { return t.name == table; });
  return found == tables_.end() ? nullptr : &*found;
}

namespace {

// Puts blanks in the place of a key and its value, so that lines keep their numbers.
void blank(std::string& text, const toml::source_position& from, const toml::source_position& to) {
  std::uint32_t line = 1, column = 1;
  for (char& c : text) {
    const bool before = line < from.line || (line == from.line && column < from.column);
    const bool behind = line > to.line || (line == to.line && column >= to.column);
    if (c == '\n') {
      ++line, column = 1;
      continue;
    }
    if (!before && !behind) c = ' ';
    if ((static_cast<unsigned char>(c) & 0xc0) != 0x80) ++column;  // toml++ counts characters
  }
}

}  // namespace

void ConfigFile::read(const std::string& path) const {
  const std::string text = contents_of(path);
  std::string rest = text;  // without what is arranged in tables that have a reader
  const toml::table all = parse(text, path);
  std::map<const Entry*, std::string> seen;  // under which name the file gave it
  const auto take = [&](const Entry& entry, const std::string& where, const std::string& name,
                        const toml::node& value) {
    if (const auto [there, added] = seen.emplace(&entry, name); !added)
      wrong(where, fmt::format("{} is given beside {}; expected one of them", name, there->second));
    give(where, name, value, *entry.option, entry.variable);
  };
  for (const auto& [key, value] : all) {
    const std::string name(key.str());
    const std::string where = fmt::format("{}:{}", path, key.source().begin.line);
    for (const Table& table : tables_)
      if (table.has(name) && all.contains(table.name))
        wrong(where, fmt::format("{} is given beside the table [{}]; expected it there", name, table.name));
    const Table* const reader = reader_of(name);
    if (value.is_table() && arranged(name)) {
      std::vector<std::string> known;
      for (const Entry& e : entries_)
        if (e.table == name) known.push_back(e.in_table);
      for (const auto& [inner, of] : *value.as_table()) {
        const std::string in_table(inner.str());
        const Entry* const entry = entry_in(name, in_table);
        const std::string at = fmt::format("{}:{}", path, inner.source().begin.line);
        if (entry != nullptr) {
          take(*entry, at, fmt::format("[{}] {}", name, in_table), of);
          blank(rest, inner.source().begin, of.source().end);
        } else if (reader == nullptr) {
          wrong(at, fmt::format("[{}] has no \"{}\"{}", name, in_table, is_meant(in_table, known)));
        }
      }
    } else if (reader == nullptr) {
      take(entry_of(where, name), where, name, value);
    }
  }
  for (const Table& table : tables_)
    if (all.contains(table.name)) table.read(rest, path);
}

const ConfigFile::Entry& ConfigFile::entry_of(const std::string& where, const std::string& name) const {
  const auto entry =
      std::find_if(entries_.begin(), entries_.end(), [&](const Entry& e) { return e.key == name; });
  if (entry != entries_.end()) return *entry;
  std::set<std::string> names;
  for (const Entry& e : entries_) names.insert({e.key, e.table.empty() ? e.key : e.table});
  for (const Table& t : tables_) names.insert(t.name);
  const std::string meant = is_meant(name, {names.begin(), names.end()});
  wrong(where, fmt::format("weft {} has no option \"{}\"{}", command_, name, meant));
}

const ConfigFile::Entry* ConfigFile::entry_in(const std::string& table, const std::string& key) const {
  const auto entry = std::find_if(entries_.begin(), entries_.end(),
                                  [&](const Entry& e) { return e.table == table && e.in_table == key; });
  return entry == entries_.end() ? nullptr : &*entry;
}

std::string ConfigFile::line_of(const Entry& entry, const std::string& key) {
  return std::visit(
      [&](const auto* variable) {
        // An empty text or list means that the option was not given.
        bool given = true;
        if constexpr (requires { variable->empty(); }) given = !variable->empty();
        return fmt::format("\n# {}\n{}{} = {}\n", entry.option->get_description(), given ? "" : "# ", key,
                           written(*variable));
      },
      entry.variable);
}

std::string ConfigFile::text() const {
  std::string all = fmt::format("# For weft {} --config FILE.\n", command_);
  std::vector<std::string> tables;
  for (const Entry& e : entries_) {
    if (std::any_of(tables_.begin(), tables_.end(), [&](const Table& t) { return t.has(e.key); })) continue;
    if (e.table.empty())
      all += line_of(e, e.key);
    else if (std::find(tables.begin(), tables.end(), e.table) == tables.end())
      tables.push_back(e.table);
  }
  // To the end: the lines after a table's name belong to the table.
  for (const Table& t : tables_)
    if (std::find(tables.begin(), tables.end(), t.name) == tables.end()) tables.push_back(t.name);
  for (const std::string& name : tables) {
    const Table* const reader = reader_of(name);
    all += "\n" + (reader != nullptr ? reader->written() : fmt::format("[{}]\n", name));
    for (const Entry& e : entries_)
      if (e.table == name) all += line_of(e, e.in_table);
  }
  return all;
}

}  // namespace weft::tools
