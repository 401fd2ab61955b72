// Stores that forward to another store.
#pragma once

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>

#include "weft/store/store.hpp"

namespace weft {

/// Forwards every request. A derived class overrides the functions that it changes.
class ForwardingStore : public Store {
 public:
  explicit ForwardingStore(std::shared_ptr<Store> store) : store_(std::move(store)) {}

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    store_->set(key, value, deadline);
  }
  std::string get(std::string_view key, Deadline deadline) override { return store_->get(key, deadline); }
  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    return store_->try_get(key, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    return store_->add(key, delta, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return store_->compare_set(key, expected, desired, deadline);
  }
  void remove(std::string_view key, Deadline deadline) override { store_->remove(key, deadline); }

 private:
  const std::shared_ptr<Store> store_;
};

enum class StoreRequest { set, get, try_get, add, compare_set, remove };

/// Calls a function before every request. If the function throws, the request fails with the function's
/// error.
class ObservedStore final : public ForwardingStore {
 public:
  using Before = std::function<void(StoreRequest request, std::string_view key, Deadline deadline)>;
  ObservedStore(std::shared_ptr<Store> store, Before before)
      : ForwardingStore(std::move(store)), before_(std::move(before)) {}

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    before_(StoreRequest::set, key, deadline);
    ForwardingStore::set(key, value, deadline);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    before_(StoreRequest::get, key, deadline);
    return ForwardingStore::get(key, deadline);
  }
  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    before_(StoreRequest::try_get, key, deadline);
    return ForwardingStore::try_get(key, deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    before_(StoreRequest::add, key, deadline);
    return ForwardingStore::add(key, delta, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    before_(StoreRequest::compare_set, key, deadline);
    return ForwardingStore::compare_set(key, expected, desired, deadline);
  }
  void remove(std::string_view key, Deadline deadline) override {
    before_(StoreRequest::remove, key, deadline);
    ForwardingStore::remove(key, deadline);
  }

 private:
  const Before before_;
};

}  // namespace weft
