// Where ranks meet: a small key-value store with waiting. Values are bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"

namespace weft {

inline constexpr int kMaxRanks = 65536;  ///< of a job, and of a group

/// Thread-safe. Keys begin with the job's name if several jobs could meet. Every function may throw system
/// or peer_lost (the server is gone), with the key in the text. `deadline`: how long the store itself may
/// take to answer; only get() also waits for other ranks. After it timeout is thrown, and the request may
/// have been carried out or not. Default: half a minute, if the store is in another process or a file.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value, Deadline deadline = Deadline::never()) = 0;
  /// Waits until the key exists. Throws timeout: `store: key "x" was not set within 5.0 s`.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  /// The value now, or nothing.
  virtual std::optional<std::string> try_get(std::string_view key, Deadline deadline = Deadline::never()) = 0;
  /// Adds to a decimal counter (absent: 0) and returns the new value.
  virtual std::int64_t add(std::string_view key, std::int64_t delta,
                           Deadline deadline = Deadline::never()) = 0;
  /// Sets the key to `desired` where it holds `expected` (absent counts as ""). Returns what it holds
  /// afterwards.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  Deadline deadline = Deadline::never()) = 0;
  virtual void remove(std::string_view key, Deadline deadline = Deadline::never()) = 0;
};

/// A store for threads of one process.
std::shared_ptr<Store> make_local_store();

}  // namespace weft
