#include "store/table.hpp"

#include <fmt/format.h>

#include <charconv>

#include "store/duration_text.hpp"
#include "weft/base/error.hpp"

namespace weft {

std::string shown_key(std::string_view key) {
  constexpr std::size_t kShown = 64;
  std::string text = "\"";
  for (const char c : key.substr(0, kShown)) text += (c >= ' ' && c <= '~') ? c : '.';
  text += key.size() > kShown ? "...\"" : "\"";
  return text;
}

std::string timeout_text(std::string_view key, Duration waited) {
  return fmt::format("store: key {} was not set within {}", shown_key(key), shown_duration(waited));
}

void check_store_key(std::string_view key) {
  if (key.empty() || key.size() > kMaxStoreKeyBytes) {
    throw Error(ErrorCode::bad_argument, fmt::format("store: key {} has {} bytes; expected 1 to {}",
                                                     shown_key(key), key.size(), kMaxStoreKeyBytes));
  }
}

void check_store_value(std::string_view key, std::string_view value) {
  if (value.size() > kMaxStoreValueBytes) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("store: the value for key {} has {} bytes; expected at most {}", shown_key(key),
                            value.size(), kMaxStoreValueBytes));
  }
}

void StoreTable::check_room(std::string_view key, std::string_view value) const {
  const std::string* const held = find(key);
  const std::size_t bytes =
      held ? bytes_ - held->size() + value.size() : bytes_ + kPerKey + key.size() + value.size();
  if ((held == nullptr && values_.size() >= limits_.keys) || (bytes > limits_.bytes && bytes > bytes_))
    throw Error(
        ErrorCode::system,
        fmt::format("store: no room for key {} ({} bytes): it holds {} keys and {} bytes; at most {} and "
                    "{} are allowed",
                    shown_key(key), value.size(), values_.size(), bytes_, limits_.keys, limits_.bytes));
}

void StoreTable::set(std::string_view key, std::string_view value) {
  check_room(key, value);
  if (const auto at = values_.find(key); at != values_.end()) {
    bytes_ += value.size() - at->second.size();
    at->second = value;
  } else {
    values_.emplace(key, value);
    bytes_ += kPerKey + key.size() + value.size();
  }
}

const std::string* StoreTable::find(std::string_view key) const {
  const auto at = values_.find(key);
  return at == values_.end() ? nullptr : &at->second;
}

std::int64_t StoreTable::sum(std::string_view key, std::int64_t delta) const {
  std::int64_t value = 0;
  if (const std::string* held = find(key)) {
    const char* const end = held->data() + held->size();
    const auto [stop, failed] = std::from_chars(held->data(), end, value);
    if (failed != std::errc{} || stop != end) {
      throw Error(ErrorCode::bad_argument,
                  fmt::format("store: add: key {} holds {}; expected a decimal counter", shown_key(key),
                              shown_key(*held)));
    }
  }
  std::int64_t sum = 0;
  if (__builtin_add_overflow(value, delta, &sum)) {
    throw Error(ErrorCode::bad_argument, fmt::format("store: add: key {} holds {}; adding {} leaves 64 bits",
                                                     shown_key(key), value, delta));
  }
  return sum;
}

std::int64_t StoreTable::add(std::string_view key, std::int64_t delta) {
  const std::int64_t value = sum(key, delta);
  set(key, std::to_string(value));
  return value;
}

std::string StoreTable::compare_set(std::string_view key, std::string_view expected,
                                    std::string_view desired) {
  const std::string* const held = find(key);
  if ((held ? std::string_view(*held) : std::string_view()) != expected) return held ? *held : std::string();
  set(key, desired);
  return std::string(desired);
}

void StoreTable::remove(std::string_view key) {
  if (const auto at = values_.find(key); at != values_.end()) {
    bytes_ -= kPerKey + at->first.size() + at->second.size();
    values_.erase(at);
  }
}

}  // namespace weft
