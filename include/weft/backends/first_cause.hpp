// The first failure of a group, for transports that have nothing of their own to agree on it: a key in the
// Store.
#pragma once

#include <memory>
#include <optional>
#include <string>

#include "weft/base/error.hpp"
#include "weft/store/store.hpp"

namespace weft {

/// Thread-safe. One key under the group's token.
class FirstCause {
 public:
  /// A null store: a group of one rank.
  FirstCause(std::shared_ptr<Store> store, const std::string& token)
      : store_(std::move(store)), key_(token + "/first_cause") {}
  /// Makes `why` the cause where there is none yet. Returns the one that counts for all ranks; `why` where
  /// the Store cannot be asked any more.
  Failure raise(const Failure& why) const noexcept;
  /// The cause, if there is one. Nothing where the Store cannot be asked any more: it may have ended with
  /// the rank that kept it, which by itself is no failure.
  std::optional<Failure> look() const noexcept;

 private:
  std::shared_ptr<Store> store_;
  std::string key_;
};

/// A Failure as the value of a key and back.
std::string encode(const Failure& why);
Failure decode_failure(const std::string& text);

}  // namespace weft
