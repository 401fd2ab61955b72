// Numbers for the users that share a group on one rank, and data that layers above keep with the group.
// Thread-safe.
#pragma once

#include <atomic>
#include <map>
#include <memory>
#include <mutex>
#include <set>
#include <typeindex>

namespace weft {

/// Gives each user the lowest free number, from 0. The numbers are equal on all ranks of a group if its ranks
/// take numbers and give them back in the same order. The users keep this object alive.
class UserNumbers {
 public:
  /// A number that a user has taken; the destructor gives it back.
  class Taken {
   public:
    explicit Taken(std::shared_ptr<UserNumbers> numbers) : numbers_(std::move(numbers)) {
      const std::lock_guard lock(numbers_->mutex_);
      while (numbers_->taken_.count(value_) != 0) ++value_;
      numbers_->taken_.insert(value_);
    }
    ~Taken() {
      const std::lock_guard lock(numbers_->mutex_);
      numbers_->taken_.erase(value_);
    }
    Taken(const Taken&) = delete;
    Taken& operator=(const Taken&) = delete;
    int value() const noexcept { return value_; }

   private:
    const std::shared_ptr<UserNumbers> numbers_;
    int value_ = 0;
  };

  /// How often a ProcessGroup handle of this group was destroyed, moved from or left. Code that has stored
  /// the address of a handle compares this number to check whether the address is still valid.
  int handles_gone() const noexcept { return handles_gone_.load(std::memory_order_relaxed); }
  void handle_goes() noexcept { handles_gone_.fetch_add(1, std::memory_order_relaxed); }

  /// Returns whether the handle has released the group: then no call begins any more, and the group may be
  /// destroyed.
  bool ended() const noexcept { return ended_.load(std::memory_order_acquire); }
  void end() noexcept { ended_.store(true, std::memory_order_release); }

  /// Returns the data, of type T, that a higher layer keeps for this group. The first call makes the data by
  /// make(); it is destroyed with the group.
  template <class T, class Make>
  std::shared_ptr<T> kept(const Make& make) {
    const std::lock_guard lock(keeping_);
    std::shared_ptr<void>& place = kept_[typeid(T)];
    if (!place) place = make();
    return std::static_pointer_cast<T>(place);
  }
  /// Call it when the group ends. It destroys the data.
  void forget() noexcept {
    std::map<std::type_index, std::shared_ptr<void>> gone;
    const std::lock_guard lock(keeping_);
    gone.swap(kept_);
  }

 private:
  std::mutex mutex_;
  std::set<int> taken_;
  std::atomic<int> handles_gone_{0};
  std::atomic<bool> ended_{false};
  std::mutex keeping_;  // a separate mutex, because make() may be collective
  std::map<std::type_index, std::shared_ptr<void>> kept_;
};

}  // namespace weft
