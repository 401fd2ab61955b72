// A part of a store. It puts a prefix before all keys, so that its users do not see each other's keys.
#pragma once

#include <memory>
#include <string>
#include <utility>

#include "weft/store/store.hpp"

namespace weft {

class PrefixStore final : public Store {
 public:
  PrefixStore(std::string prefix, std::shared_ptr<Store> store)
      : store_(std::move(store)), prefix_(std::move(prefix)) {}

  void set(std::string_view key, std::string_view value, Deadline deadline) override {
    store_->set(full(key), value, deadline);
  }
  std::string get(std::string_view key, Deadline deadline) override {
    return store_->get(full(key), deadline);
  }
  std::optional<std::string> try_get(std::string_view key, Deadline deadline) override {
    return store_->try_get(full(key), deadline);
  }
  std::int64_t add(std::string_view key, std::int64_t delta, Deadline deadline) override {
    return store_->add(full(key), delta, deadline);
  }
  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline deadline) override {
    return store_->compare_set(full(key), expected, desired, deadline);
  }
  void remove(std::string_view key, Deadline deadline) override { store_->remove(full(key), deadline); }

 private:
  std::string full(std::string_view key) const { return prefix_ + std::string(key); }

  std::shared_ptr<Store> store_;
  std::string prefix_;
};

}  // namespace weft
