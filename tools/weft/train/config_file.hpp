// A TOML file that gives a sub-command's options; also writes the options as such a file. For use by one
// thread.
#pragma once

#include <cstdint>
#include <filesystem>
#include <functional>
#include <string>
#include <utility>
#include <variant>
#include <vector>

namespace CLI {
class App;
class Option;
}  // namespace CLI

namespace weft::tools {

/// Adds --config and --print-config to a sub-command. A key of the file is an option's name without its
/// dashes, or a key in a table, if arrange() has given the option one. Values of the file replace the
/// defaults; values of the command line replace the values of the file. Any fault in the file is an Error,
/// bad_argument, that names file, line and key.
class ConfigFile {
 public:
  /// `words`: the command line, in which the file is named.
  ConfigFile(CLI::App& sub, const std::vector<std::string>& words);
  ConfigFile(const ConfigFile&) = delete;
  ConfigFile& operator=(const ConfigFile&) = delete;

  /// The variable that keeps an option's value: the value in the file must have its type.
  using Variable = std::variant<bool*, int*, std::int64_t*, std::uint64_t*, double*, std::string*,
                                std::filesystem::path*, std::vector<std::string>*>;
  /// Declares that the file may give `option`, whose value is kept in `variable`. Returns the option.
  CLI::Option* take(CLI::Option* option, Variable variable);

  /// Adds a table of the file with its own reader. The reader gets the whole file, which it reads again so
  /// that its errors have lines, and the file's name; `written` returns the table as text. `options` are keys
  /// with equal meaning outside of the table: in a file that has the table they are errors, and text() leaves
  /// them out.
  using Read = std::function<void(const std::string& text, const std::string& path)>;
  void take_table(std::string name, std::vector<std::string> options, Read read,
                  std::function<std::string()> written);

  /// Gives options a place in a table: pairs of a key and the option's name. The file may also have the
  /// option outside of any table, as other options, but not in both places; text() writes it into the table.
  /// Names of options that take() has not declared are left out. The table may be one of take_table(), whose
  /// reader then gets blanks in the place of these keys.
  using Keys = std::vector<std::pair<std::string, std::string>>;
  void arrange(std::string table, const Keys& keys);

  bool print_asked() const noexcept { return print_; }
  /// The file of --config. Empty: none.
  const std::string& path() const noexcept { return path_; }
  /// Returns the text of a file that gives a run the present options.
  std::string text() const;

 private:
  struct Entry {
    std::string key;
    CLI::Option* option;
    Variable variable;
    std::string table{}, in_table{};  // its place there; empty: none
  };
  struct Table {
    std::string name;
    std::vector<std::string> options;
    Read read;
    std::function<std::string()> written;
    bool has(const std::string& key) const;
  };
  void read(const std::string& path) const;
  bool arranged(const std::string& table) const;
  const Table* reader_of(const std::string& table) const;
  const Entry& entry_of(const std::string& where, const std::string& name) const;
  const Entry* entry_in(const std::string& table, const std::string& key) const;
  static std::string line_of(const Entry& entry, const std::string& key);

  std::string command_;
  std::vector<Entry> entries_;
  std::vector<Table> tables_;
  std::string path_;
  bool print_ = false;
};

}  // namespace weft::tools
