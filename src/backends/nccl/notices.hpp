// What the ranks of a group tell one another through the Store, on a thread of its own. A Store may be slow,
// cut off or stopped, and who asks it here would hold the group, for which all threads of the rank wait.
#pragma once

#include <condition_variable>
#include <cstdint>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <optional>
#include <string>
#include <thread>
#include <utility>

#include "backends/first_cause.hpp"
#include "weft/backends/store.hpp"
#include "weft/base/clock.hpp"

namespace weft::nccl {

/// How long a Store may take to answer where somebody waits for it, or one of its calls here.
inline constexpr Duration kStoreAnswer = std::chrono::milliseconds(500);

/// No function waits for the Store, the destructor excepted: for the one call that is under way. Thread-safe.
class Notices {
 public:
  /// `token`: of the group.
  Notices(std::shared_ptr<Store> store, const std::string& token, int rank);
  ~Notices();
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;

  /// Sets a key, soon; tried again where the Store does not answer.
  void put(std::string key, std::string value);
  /// Looks for a key until it is there, and takes it out of the Store.
  void want(const std::string& key);
  /// What a wanted key held, once.
  std::optional<std::string> got(const std::string& key);

  /// Asks for one look at what others have said: has somebody failed, or left before the last of the `came`
  /// collectives of this rank? They are told of those in turn. found() has what it found.
  void look(std::uint64_t came);
  std::optional<Failure> found() const;

  /// The keys, under the group's token.
  static std::string came_key(const std::string& token, int rank);
  static std::string left_key(const std::string& token);

 private:
  struct Wanted {
    Clock::time_point since{}, next{};
    std::optional<std::string> value;
  };
  using Lock = std::unique_lock<std::mutex>;
  void work() noexcept;
  bool put_one(Lock& lock);
  bool look_once(Lock& lock);
  bool fetch_one(Lock& lock);
  std::optional<Failure> ask(std::uint64_t came);

  const std::shared_ptr<Store> store_;
  const FirstCause first_cause_;
  const std::string came_key_, left_key_;
  std::uint64_t told_ = 0;  // the thread's

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false, look_ = false;
  std::uint64_t came_ = 0;
  std::deque<std::pair<std::string, std::string>> puts_;
  std::map<std::string, Wanted> wanted_;
  std::optional<Failure> found_;
  std::thread thread_;
};

}  // namespace weft::nccl
