// The store for threads of one process. Any thread may call it.
#include <algorithm>
#include <condition_variable>
#include <mutex>

#include "base/waits/suspension.hpp"
#include "store/table.hpp"
#include "weft/base/error.hpp"
#include "weft/store/store.hpp"

namespace weft {

namespace {

class LocalStore final : public Store {
 public:
  void set(std::string_view key, std::string_view value, Deadline) override {
    check_store_key(key);
    check_store_value(key, value);
    {
      const std::lock_guard lock(mutex_);
      table_.set(key, value);
    }
    changed_.notify_all();
  }

  std::string get(std::string_view key, Deadline deadline) override {
    check_store_key(key);
    const Duration limit = deadline.left();
    std::unique_lock lock(mutex_);
    for (;;) {
      if (const std::string* value = table_.find(key)) return *value;
      if (deadline.passed()) throw Error(ErrorCode::timeout, timeout_text(key, limit));
      const Duration piece = std::min(deadline.left(), wait_piece());
      const TimedWait wait(piece);
      changed_.wait_for(lock, piece);
    }
  }

  std::optional<std::string> try_get(std::string_view key, Deadline) override {
    check_store_key(key);
    const std::lock_guard lock(mutex_);
    const std::string* const value = table_.find(key);
    return value ? std::optional(*value) : std::nullopt;
  }

  std::int64_t add(std::string_view key, std::int64_t delta, Deadline) override {
    check_store_key(key);
    std::unique_lock lock(mutex_);
    const std::int64_t sum = table_.add(key, delta);
    lock.unlock();
    changed_.notify_all();
    return sum;
  }

  std::string compare_set(std::string_view key, std::string_view expected, std::string_view desired,
                          Deadline) override {
    check_store_key(key);
    check_store_value(key, expected);
    check_store_value(key, desired);
    std::unique_lock lock(mutex_);
    std::string held = table_.compare_set(key, expected, desired);
    lock.unlock();
    changed_.notify_all();
    return held;
  }

  void remove(std::string_view key, Deadline) override {
    check_store_key(key);
    const std::lock_guard lock(mutex_);
    table_.remove(key);
  }

 private:
  std::mutex mutex_;
  std::condition_variable changed_;
  StoreTable table_;
};

}  // namespace

std::shared_ptr<Store> make_local_store() { return std::make_shared<LocalStore>(); }

}  // namespace weft
