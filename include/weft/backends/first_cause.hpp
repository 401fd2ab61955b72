// The first failure of a group, on which all its ranks agree: a key in the Store. For transports that have no
// means of their own for it.
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
  /// `token`: the group's (GroupInit). A null store: a group of one rank.
  FirstCause(std::shared_ptr<Store> store, const std::string& token)
      : store_(std::move(store)), key_(token + "/first_cause") {}
  /// Makes `why` the cause unless there is one. Returns the one that counts for all ranks; `why` itself where
  /// the Store does not answer any more.
  Failure raise(const Failure& why) const noexcept;
  /// The cause, if there is one. Nothing if the Store does not answer any more: it may have ended with the
  /// rank that served it, which by itself is no failure.
  std::optional<Failure> look() const noexcept;

 private:
  std::shared_ptr<Store> store_;
  std::string key_;
};

/// A Failure as the value of a key, and back. Pure.
std::string encode(const Failure& why);
Failure decode_failure(const std::string& text);

}  // namespace weft
