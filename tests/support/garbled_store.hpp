// Stores into which a foreign process has written.
#pragma once

#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "store/forwarding_store.hpp"

namespace weft::test {

/// Returns `garbage` for every key that contains `part`.
class GarbledStore final : public ForwardingStore {
 public:
  GarbledStore(std::shared_ptr<Store> store, std::string part, std::string garbage)
      : ForwardingStore(std::move(store)), part_(std::move(part)), garbage_(std::move(garbage)) {}
  std::string get(std::string_view key, Deadline deadline) override {
    return garbled(key) ? garbage_ : ForwardingStore::get(key, deadline);
  }
  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    return garbled(key) ? garbage_ : ForwardingStore::try_get(key, deadline);
  }

 private:
  bool garbled(std::string_view key) const { return key.find(part_) != std::string_view::npos; }
  const std::string part_, garbage_;
};

}  // namespace weft::test
