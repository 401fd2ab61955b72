// The notices that the ranks of a group exchange through the Store, on a background thread. A Store may be
// slow, cut off or stopped. A thread of the program would own the group while it waits for the Store, and all
// threads of the rank would wait for the group.
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
#include <vector>

#include "weft/backends/first_cause.hpp"
#include "weft/base/clock.hpp"
#include "weft/store/store.hpp"

namespace weft::nccl {

/// How long a Store may take to answer one request.
inline constexpr Duration kStoreAnswer = std::chrono::milliseconds(500);

/// Thread-safe. No function except the destructor waits for the Store. The destructor waits for the request
/// in progress, and for a first cause that is not written yet.
class Notices {
 public:
  /// `token`: the group's token.
  Notices(std::shared_ptr<Store> store, const std::string& token, int rank);
  ~Notices();
  Notices(const Notices&) = delete;
  Notices& operator=(const Notices&) = delete;

  /// Requests that a key be set. This is tried again if the Store does not answer.
  void put(std::string key, std::string value);
  /// Requests that the thread waits until the key exists, reads it, and removes it from the Store.
  void want(const std::string& key);
  /// Returns the value of a key that want() has requested, once.
  std::optional<std::string> got(const std::string& key);

  /// Requests that the notices of the other ranks are read once: whether a rank has failed, or has left
  /// before the last of the `came` collectives of this rank. The request also reports this rank's collectives
  /// to the other ranks. found() returns the result. `last`: the last of these collectives.
  void look(std::uint64_t came, const LastCall& last);
  std::optional<Failure> found() const;

  /// Asks, or continues to ask, which of `size` ranks have not reported that they have reached collective
  /// `call`. Returns true if silent() has the answer, or if the Store has not answered in time.
  bool ask(std::uint64_t call, int size);
  /// Returns the answer to ask(), or nothing if the Store does not answer.
  std::optional<std::vector<int>> silent() const;
  /// The last call that each rank reported in answer to the last question, by rank. State::unknown if a rank
  /// has not reported, or if the Store does not answer.
  std::vector<LastCall> last_calls(int size) const;
  /// Whether the Store has answered the last question in time. If not, a caller that cannot wait should not
  /// ask.
  bool answers() const;
  /// Requests that `why` becomes the first cause, if there is no first cause yet.
  void raise(const Failure& why);

  /// The keys, under the group's token.
  static std::string came_key(const std::string& token, int rank);
  static std::string left_key(const std::string& token);

 private:
  /// The question which ranks have not made a call yet. It is asked again each time, because more ranks may
  /// have arrived.
  struct Question {
    std::uint64_t call = 0;
    int size = 0;
    std::uint64_t number = 0;
    Deadline limit = Deadline::never();
    Clock::time_point settled = Clock::time_point::max();
    enum class State : std::uint8_t { none, asked, underway, told, failed } state = State::none;
    std::vector<int> silent;
    std::vector<LastCall> last;  // by rank
  };
  struct Requested {
    Clock::time_point since{}, next{};
    std::optional<std::string> value;
  };
  using Lock = std::unique_lock<std::mutex>;
  void work() noexcept;
  bool put_one(Lock& lock);
  bool look_once(Lock& lock);
  bool fetch_one(Lock& lock);
  bool raise_once(Lock& lock);
  bool ask_once(Lock& lock);
  void find_silent(Question& q);
  std::optional<Failure> ask(std::uint64_t came, const LastCall& last);

  const std::shared_ptr<Store> store_;
  const FirstCause first_cause_;
  const std::string token_, came_key_, left_key_;
  const int rank_;
  std::uint64_t told_ = 0;  // used by the thread

  mutable std::mutex mutex_;
  std::condition_variable changed_;
  bool ending_ = false, look_ = false;
  std::uint64_t came_ = 0;
  LastCall last_{};  // the last of the came_ collectives
  std::deque<std::pair<std::string, std::string>> puts_;
  std::map<std::string, Requested> requested_;
  std::optional<Failure> found_, to_raise_;
  Question question_;
  std::thread thread_;
};

}  // namespace weft::nccl
