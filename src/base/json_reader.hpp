// Reads JSON that other programs wrote, within bounds. Bytes, depth and number of values are limited, no
// object has a key twice, and a number is checked before it is converted. Uses nlohmann's parser, for the
// layers and programs that have it. Callable from any thread.
#pragma once

#include <fmt/format.h>

#include <cstddef>
#include <cstdint>
#include <nlohmann/json.hpp>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "weft/base/error.hpp"

namespace weft {

struct JsonLimits {
  std::size_t bytes = std::size_t{64} << 20;
  std::size_t depth = 32;           ///< nesting of arrays and objects
  std::size_t values = 10'000'000;  ///< the number of values in all; each takes up to some 80 bytes
};

/// The reason why a text was refused.
struct JsonProblem {
  bool malformed = false;  ///< the text is no JSON at all
  std::string text;        ///< begins with a verb: "is no JSON (byte 7 of its 20)"
};

/// Builds the values while nlohmann's parser reads. nlohmann's own builder silently keeps the last of two
/// equal keys. With a callback, its time grows with the square of an object's members.
template <class Json>
class JsonBuilder final : public nlohmann::json_sax<Json> {
 public:
  using typename nlohmann::json_sax<Json>::number_integer_t;
  using typename nlohmann::json_sax<Json>::number_unsigned_t;
  using typename nlohmann::json_sax<Json>::number_float_t;
  using typename nlohmann::json_sax<Json>::string_t;
  using typename nlohmann::json_sax<Json>::binary_t;

  JsonBuilder(std::size_t bytes, const JsonLimits& limits) : bytes_(bytes), limits_(limits) {}

  bool null() override { return add(nullptr) != nullptr; }
  bool boolean(bool value) override { return add(value) != nullptr; }
  bool number_integer(number_integer_t value) override { return add(value) != nullptr; }
  bool number_unsigned(number_unsigned_t value) override { return add(value) != nullptr; }
  bool number_float(number_float_t value, const string_t&) override { return add(value) != nullptr; }
  bool string(string_t& value) override { return add(std::move(value)) != nullptr; }
  bool binary(binary_t&) override { return false; }  // JSON has none
  bool start_object(std::size_t) override { return open(Json::object()); }
  bool start_array(std::size_t) override { return open(Json::array()); }
  bool end_object() override { return open_.pop_back(), true; }
  bool end_array() override { return open_.pop_back(), true; }
  bool key(string_t& name) override {
    const auto [at, fresh] = open_.back()->emplace(name, nullptr);
    member_ = &*at;
    return fresh || refuse(fmt::format("has the key \"{}\" twice", name));
  }
  bool parse_error(std::size_t byte, const std::string&, const nlohmann::json::exception& e) override {
    constexpr int kNumberTooLarge = 406;  // nlohmann's out_of_range error with this number
    if (e.id == kNumberTooLarge) return refuse("has a number that is too large for JSON's readers");
    problem_.malformed = true;
    return refuse(fmt::format("is no JSON (byte {} of its {})", byte, bytes_));
  }

  Json& result() { return root_; }
  JsonProblem& problem() { return problem_; }

 private:
  bool refuse(std::string text) {
    problem_.text = std::move(text);
    return false;
  }
  // Returns the place of the value. Pointers to open containers stay valid: only the innermost container
  // grows.
  template <class Value>
  Json* add(Value&& value) {
    if (++values_ > limits_.values) {
      refuse(fmt::format("has more than {} values", limits_.values));
      return nullptr;
    }
    if (open_.empty()) {
      root_ = Json(std::forward<Value>(value));
      return &root_;
    }
    if (open_.back()->is_array()) {
      open_.back()->emplace_back(std::forward<Value>(value));
      return &open_.back()->back();
    }
    *member_ = Json(std::forward<Value>(value));
    return member_;
  }
  bool open(Json container) {
    if (open_.size() == limits_.depth)
      return refuse(fmt::format("nests deeper than {} levels", limits_.depth));
    Json* const at = add(std::move(container));
    if (at != nullptr) open_.push_back(at);
    return at != nullptr;
  }

  const std::size_t bytes_;
  const JsonLimits limits_;
  Json root_;
  std::vector<Json*> open_;
  Json* member_ = nullptr;  // the member of the innermost object that gets the next value
  std::size_t values_ = 0;
  JsonProblem problem_;
};

/// Returns the text as values, or nothing, and sets the reason.
template <class Json = nlohmann::json>
std::optional<Json> try_parse_json(std::string_view text, JsonProblem& why, const JsonLimits& limits = {}) {
  if (text.size() > limits.bytes) {
    why = {.malformed = false,
           .text = fmt::format("has {} bytes; at most {} are allowed", text.size(), limits.bytes)};
    return std::nullopt;
  }
  JsonBuilder<Json> builder(text.size(), limits);
  if (Json::sax_parse(text, &builder)) return std::move(builder.result());
  why = std::move(builder.problem());
  return std::nullopt;
}

/// Parses the text to values. Throws bad_argument "<subject> is no JSON (byte 7 of its 20)", "<subject> has
/// the key "x" twice" and the like.
template <class Json = nlohmann::json>
Json parse_json(std::string_view text, std::string_view subject, const JsonLimits& limits = {}) {
  JsonProblem why;
  if (auto value = try_parse_json<Json>(text, why, limits)) return std::move(*value);
  throw Error(ErrorCode::bad_argument, fmt::format("{} {}", subject, why.text));
}

/// Returns a value as a short and printable text, for error texts.
inline std::string shown_json(const nlohmann::json& value) {
  constexpr std::size_t kLongest = 40;
  if (value.is_structured() && value.size() > kLongest) return fmt::format("an {}", value.type_name());
  std::string text = value.dump(-1, ' ', true, nlohmann::json::error_handler_t::replace);
  if (text.size() > kLongest) text.replace(kLongest, std::string::npos, "...");
  return text;
}

/// Reads one object of a parsed text, member by member. An unexpected value throws bad_argument "<subject>:
/// <where> is -1; expected an integer from 0 to 7". The object refers to `subject` and `object`. The caller
/// must keep both alive.
class JsonReader {
 public:
  /// `where`: the object's place in the text, such as "calls[3]"; empty: the outermost object.
  JsonReader(const std::string& subject, const nlohmann::json& object, std::string where)
      : subject_(subject), object_(object), where_(std::move(where)) {
    if (!object.is_object()) wrong(where_.empty() ? "it" : where_, "is no object");
  }

  [[noreturn]] void wrong(const std::string& what, const std::string& how) const {
    throw Error(ErrorCode::bad_argument, fmt::format("{}: {} {}", subject_, what, how));
  }
  const nlohmann::json& object() const { return object_; }
  const nlohmann::json* find(const char* key) const {
    const auto at = object_.find(key);
    return at == object_.end() ? nullptr : &*at;
  }
  const nlohmann::json& at(const char* key) const {
    if (const nlohmann::json* value = find(key)) return *value;
    wrong(place(key), "is missing");
  }
  std::int64_t integer(const char* key, std::int64_t min, std::int64_t max) const {
    return integer(at(key), place(key), min, max);
  }
  /// Accepts the whole range, for numbers drawn at random.
  std::uint64_t any_unsigned(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_number_unsigned())
      wrong(place(key), fmt::format("is {}; expected an integer from 0 to 2^64 - 1", shown_json(value)));
    return value.get<std::uint64_t>();
  }
  bool boolean(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_boolean())
      wrong(place(key), fmt::format("is {}; expected true or false", shown_json(value)));
    return value.get<bool>();
  }
  std::string text(const char* key) const { return text(at(key), place(key)); }
  /// Returns one of the `count` values of an enum from `first` on, found by the name that name(T) gives it.
  template <class T>
  T named(const char* key, int count, int first = 0) const {
    const std::string is = text(key);
    for (int i = first; i < first + count; ++i)
      if (name(static_cast<T>(i)) == is) return static_cast<T>(i);
    wrong(place(key), fmt::format("is {}, which weft does not know", shown_json(is)));
  }
  const nlohmann::json& list(const char* key) const {
    const nlohmann::json& value = at(key);
    if (!value.is_array()) wrong(place(key), "is no list");
    return value;
  }
  std::vector<std::int64_t> integers(const char* key, std::int64_t min, std::int64_t max) const {
    const nlohmann::json& values = list(key);
    std::vector<std::int64_t> out;
    for (std::size_t i = 0; i < values.size(); ++i)
      out.push_back(integer(values[i], fmt::format("{}[{}]", place(key), i), min, max));
    return out;
  }
  std::vector<std::string> texts(const char* key) const {
    const nlohmann::json& values = list(key);
    std::vector<std::string> out;
    for (std::size_t i = 0; i < values.size(); ++i)
      out.push_back(text(values[i], fmt::format("{}[{}]", place(key), i)));
    return out;
  }
  /// Like integer() above, for a value whose place in the text is `where`. Neither 8.0 nor 1e3 counts as an
  /// integer.
  std::int64_t integer(const nlohmann::json& value, const std::string& where, std::int64_t min,
                       std::int64_t max) const {
    if (!value.is_number_integer() ||
        (value.is_number_unsigned() && value.get<std::uint64_t>() > std::uint64_t{INT64_MAX}) ||
        value.get<std::int64_t>() < min || value.get<std::int64_t>() > max)
      wrong(where, fmt::format("is {}; expected an integer from {} to {}", shown_json(value), min, max));
    return value.get<std::int64_t>();
  }
  std::string text(const nlohmann::json& value, const std::string& where) const {
    if (!value.is_string()) wrong(where, fmt::format("is {}; expected a text", shown_json(value)));
    return value.get<std::string>();
  }
  std::string place(std::string_view key) const {
    return where_.empty() ? std::string(key) : fmt::format("{}.{}", where_, key);
  }

 private:
  const std::string& subject_;
  const nlohmann::json& object_;
  const std::string where_;
};

}  // namespace weft
