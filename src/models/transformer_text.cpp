#include "weft/models/transformer_text.hpp"

#include <fmt/format.h>

#include <cassert>  // before toml++, which would have it hidden: then nothing defines what assert() calls
#include <cmath>
#include <cstdint>
#include <optional>
#include <vector>

#include "base/text/nearest.hpp"
#include "weft/base/error.hpp"

// toml++ is compiled in, and kept out of the library's symbols: nothing is linked, and a program may use
// another version of toml++.
#pragma GCC visibility push(hidden)
#undef TOML_HEADER_ONLY
#define TOML_HEADER_ONLY 1
#include <toml++/toml.h>

#include "base/text/plain_streams.hpp"
#pragma GCC visibility pop

namespace weft {
namespace {

// Calls visit with key, member, and the least value; 1 means a number of any size above 0.
template <class Config, class Visit>
void each_key(Config& c, const Visit& visit) {
  visit("dim", c.dim, 1);
  visit("layers", c.layers, 1);
  visit("heads", c.heads, 1);
  visit("kv_heads", c.kv_heads, 1);
  visit("ffn_hidden", c.ffn_hidden, 1);
  visit("vocab", c.vocab, 1);
  visit("max_seq", c.max_seq, 1);
  visit("head_size", c.head_size, 0);
  visit("rope_theta", c.rope_theta, 1);
  visit("norm_eps", c.norm_eps, 0);
  visit("tied", c.tied, 0);
  visit("init_std", c.init_std, 0);
}

std::string shown(const toml::node& value) {
  if (value.is_table()) return "a table";
  if (value.is_array()) return "an array";
  TextOut text;
  value.visit([&](const auto& v) { text << v; });
  return text.str();
}

struct Reader {
  std::string_view source;

  [[noreturn]] void wrong(std::optional<toml::source_index> line, const std::string& text) const {
    throw Error(ErrorCode::bad_argument,
                line ? fmt::format("{}:{}: {}", source, *line, text) : fmt::format("{}: {}", source, text));
  }

  toml::table parse(std::string_view text) const {
    try {
      return toml::parse(text);
    } catch (const toml::parse_error& e) {
      wrong(e.source().begin.line, fmt::format("not TOML: {}", e.description()));
    }
  }

  const toml::table& model_of(const toml::table& all) const {
    const auto found = all.find("model");
    if (found == all.end()) {
      std::string meant;
      for (const auto& [key, value] : all)
        if (const std::string name(key.str()); value.is_table() && !is_meant(name, {"model"}).empty())
          meant = fmt::format("; [{}] is at line {}", name, key.source().begin.line);
      wrong(std::nullopt, fmt::format("has no table [model]{}", meant));
    }
    if (!found->second.is_table())
      wrong(found->first.source().begin.line,
            fmt::format("model is {}; expected a table, [model]", shown(found->second)));
    return *found->second.as_table();
  }

  void set(const std::string& name, const toml::node& value, toml::source_index line, std::int64_t& to,
           std::int64_t least) const {
    const auto* const integer = value.as_integer();
    if (integer == nullptr) wrong(line, fmt::format("{} is {}; expected an integer", name, shown(value)));
    if (integer->get() < least)
      wrong(line, fmt::format("{} is {}; expected {} or more", name, integer->get(), least));
    to = integer->get();
  }
  void set(const std::string& name, const toml::node& value, toml::source_index line, double& to,
           int least) const {
    const std::optional<double> number = value.is_number() ? value.value<double>() : std::nullopt;
    if (!number) wrong(line, fmt::format("{} is {}; expected a number", name, shown(value)));
    if (!std::isfinite(*number) || *number < 0 || (least > 0 && *number == 0))
      wrong(line, fmt::format("{} is {}; expected a finite number {}", name, shown(value),
                              least > 0 ? "above 0" : "of 0 or more"));
    to = *number;
  }
  void set(const std::string& name, const toml::node& value, toml::source_index line, bool& to, int) const {
    const auto* const flag = value.as_boolean();
    if (flag == nullptr) wrong(line, fmt::format("{} is {}; expected true or false", name, shown(value)));
    to = flag->get();
  }
};

}  // namespace

TransformerConfig transformer_from_text(std::string_view text, std::string_view source,
                                        const TransformerConfig& initial) {
  const Reader reader{source};
  const toml::table all = reader.parse(text);
  const toml::table& model = reader.model_of(all);
  TransformerConfig config = initial;
  const auto follows = [&](const char* of, const char* what, std::int64_t value) {
    return !model.contains(of) && (model.contains(what) || value == 0);
  };
  for (const auto& [key, value] : model) {
    const std::string name(key.str());
    const toml::source_index line = key.source().begin.line;
    bool known = false;
    std::vector<std::string> names;
    each_key(config, [&, &node = value](const char* of, auto& member, int least) {
      names.emplace_back(of);
      if (name != of) return;
      known = true;
      reader.set(name, node, line, member, least);
    });
    if (!known) reader.wrong(line, fmt::format("[model] has no \"{}\"{}", name, is_meant(name, names)));
  }
  if (follows("kv_heads", "heads", config.kv_heads)) config.kv_heads = config.heads;
  if (follows("ffn_hidden", "dim", config.ffn_hidden))
    config.ffn_hidden = TransformerConfig::usual_ffn_hidden(config.dim);
  try {
    config.check();
  } catch (const Error& e) {
    // An error such as "transformer: heads 4 do not …" is reported for the line that has `heads`; an error
    // about a default value, for the table.
    const std::string_view what = e.what();
    toml::source_index line = model.source().begin.line;
    std::size_t first = what.size();
    for (const auto& [key, value] : model)
      if (const std::size_t at = what.find(key.str()); at < first) {
        first = at;
        line = key.source().begin.line;
      }
    reader.wrong(line, std::string(what));
  }
  return config;
}

std::string transformer_text(const TransformerConfig& config) {
  std::string text = "[model]\n";
  // Writes numbers with the fewest digits that give the same number.
  each_key(config,
           [&](const char* key, const auto& member, int) { text += fmt::format("{} = {}\n", key, member); });
  return text;
}

}  // namespace weft
