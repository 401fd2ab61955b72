// The first failure of a group, on which all its ranks agree. It is a key in the Store. It is for transports
// that cannot distribute the first cause themselves.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "weft/base/error.hpp"
#include "weft/store/store.hpp"

namespace weft {

/// Thread-safe. Each function waits for the Store, half a second at most.
class FirstCause {
 public:
  /// `token`: the token of the group (GroupInit). A null store means a group of one rank.
  FirstCause(std::shared_ptr<Store> store, const std::string& token)
      : store_(std::move(store)), key_(token + "/first_cause") {}
  /// Makes `why` the cause, unless there is a cause already. Returns the cause that all ranks report, or
  /// `why` if the Store does not answer any more.
  Failure raise(const Failure& why) const noexcept;
  /// The cause, if there is one. Returns nothing if the Store does not answer any more. The Store may have
  /// ended with the rank that served it; that alone is no failure.
  std::optional<Failure> look() const noexcept;

 private:
  std::shared_ptr<Store> store_;
  std::string key_;
};

/// Converts a Failure to the value of a key, and back. Pure functions.
std::string encode(const Failure& why);
Failure decode_failure(const std::string& text);

}  // namespace weft
