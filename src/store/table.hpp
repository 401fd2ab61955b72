// The keys and values of a store, with limits, counters and compare_set. The in-process store, the TCP server
// and each user of a file store have one table each. Not thread-safe. The owner must lock.
#pragma once

#include <cstddef>
#include <cstdint>
#include <functional>
#include <map>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"

namespace weft {

inline constexpr std::size_t kMaxStoreKeyBytes = 1024;
inline constexpr std::size_t kMaxStoreValueBytes = std::size_t{1} << 20;

/// Returns a key in the form for error texts: in quotes, at most 64 bytes of it, with dots for unprintable
/// bytes.
std::string shown_key(std::string_view key);
/// `store: key "x" was not set within 5.0 s`
std::string timeout_text(std::string_view key, Duration waited);
/// Throw bad_argument if a key is empty or too long, or a value is too long.
void check_store_key(std::string_view key);
void check_store_value(std::string_view key, std::string_view value);

/// The limits of a table. Each key counts 64 bytes in addition to key and value.
struct StoreLimits {
  std::size_t keys = std::size_t{1} << 20;
  std::size_t bytes = std::size_t{256} << 20;
};

/// Callers must check arguments first (check_store_key, check_store_value). A function that adds to the table
/// throws system if it is full.
class StoreTable {
 public:
  explicit StoreTable(StoreLimits limits = {}) : limits_(limits) {}
  /// Throws if set() would throw.
  void check_room(std::string_view key, std::string_view value) const;
  void set(std::string_view key, std::string_view value);
  /// The value, or null. Valid until the next change.
  const std::string* find(std::string_view key) const;
  /// Returns the value that add() would set and return. Throws bad_argument if the key holds no decimal
  /// number, or if the sum does not fit 64 bits.
  std::int64_t sum(std::string_view key, std::int64_t delta) const;
  std::int64_t add(std::string_view key, std::int64_t delta);
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired);
  void remove(std::string_view key);

 private:
  static constexpr std::size_t kPerKey = 64;

  StoreLimits limits_;
  std::map<std::string, std::string, std::less<>> values_;
  std::size_t bytes_ = 0;
};

}  // namespace weft
