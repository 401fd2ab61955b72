// A small key-value store with waiting, through which ranks find each other. Values are bytes.
#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <string_view>

#include "weft/base/clock.hpp"

namespace weft {

inline constexpr int kMaxRanks = 65536;  ///< the largest number of ranks of a job, and of a group

/// Thread-safe. If several jobs could use one store, keys must begin with the job's name. Every function may
/// throw system, or peer_lost if the server has ended, with the key in the text. `deadline`: how long the
/// store itself may take to answer. Only get() also waits for other ranks. After the deadline a function
/// throws timeout. The store may or may not have carried out the request. With Deadline::never() a store in
/// another process or in a file may take half a minute.
class Store {
 public:
  virtual ~Store() = default;
  virtual void set(std::string_view key, std::string_view value, Deadline deadline = Deadline::never()) = 0;
  /// Waits until the key exists. After the deadline it throws timeout: `store: key "x" was not set within 5.0
  /// s`.
  virtual std::string get(std::string_view key, Deadline deadline) = 0;
  /// The present value, or nothing if the key does not exist.
  virtual std::optional<std::string> try_get(std::string_view key, Deadline deadline = Deadline::never()) = 0;
  /// Adds to a decimal counter (a missing key counts as 0) and returns the new value.
  virtual std::int64_t add(std::string_view key, std::int64_t delta,
                           Deadline deadline = Deadline::never()) = 0;
  /// Sets the key to `desired` if it holds `expected` (a missing key counts as ""). Returns the value that
  /// the key holds afterwards.
  virtual std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                                  Deadline deadline = Deadline::never()) = 0;
  virtual void remove(std::string_view key, Deadline deadline = Deadline::never()) = 0;
};

/// A store for threads of one process.
std::shared_ptr<Store> make_local_store();

}  // namespace weft
