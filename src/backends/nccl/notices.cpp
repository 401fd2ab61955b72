#include "backends/nccl/notices.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <pthread.h>

#include <algorithm>
#include <sstream>
#include <vector>

#include "backends/blocking_backend.hpp"

namespace weft::nccl {
namespace {

constexpr Duration kLookForKey = std::chrono::milliseconds(1);  // at first; then an eighth of the wait
constexpr Duration kLookForKeyAtMost = std::chrono::milliseconds(20);
constexpr Duration kPause = std::chrono::milliseconds(50);  // after a Store that refused

}  // namespace

std::string Notices::came_key(const std::string& token, int rank) {
  return fmt::format("{}/nccl/came/{}", token, rank);
}
std::string Notices::left_key(const std::string& token) { return token + "/nccl/left"; }

Notices::Notices(std::shared_ptr<Store> store, const std::string& token, int rank)
    : store_(std::move(store)),
      first_cause_(store_, token),
      came_key_(came_key(token, rank)),
      left_key_(left_key(token)) {
  const NoSignals inherited;
  thread_ = std::thread([this] { work(); });
}

Notices::~Notices() {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  thread_.join();
}

void Notices::put(std::string key, std::string value) {
  const std::lock_guard lock(mutex_);
  puts_.emplace_back(std::move(key), std::move(value));
  changed_.notify_all();
}

void Notices::want(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  wanted_[key] = {.since = now, .next = now, .value = {}};
  changed_.notify_all();
}

std::optional<std::string> Notices::got(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto at = wanted_.find(key);
  if (at == wanted_.end() || !at->second.value) return std::nullopt;
  std::optional<std::string> value = std::move(at->second.value);
  wanted_.erase(at);
  return value;
}

void Notices::look(std::uint64_t came) {
  const std::lock_guard lock(mutex_);
  came_ = came;
  look_ = true;
  changed_.notify_all();
}

std::optional<Failure> Notices::found() const {
  const std::lock_guard lock(mutex_);
  return found_;
}

void Notices::work() noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-notices");
  Lock lock(mutex_);
  while (!ending_) {
    bool answered = true;
    try {
      const bool did = look_once(lock) || put_one(lock) || fetch_one(lock);
      if (did) continue;
    } catch (const std::exception&) {
      // The Store has ended, or does not answer: the group's deadlines hold without it.
      answered = false;
      if (!lock) lock.lock();
    }
    if (ending_) return;
    if (!answered) {
      changed_.wait_for(lock, kPause, [&] { return ending_; });
      continue;
    }
    auto next = Clock::time_point::max();
    for (const auto& [key, w] : wanted_)
      if (!w.value) next = std::min(next, w.next);
    if (next == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, next);
    }
  }
}

// Each true where it had something to do; the lock is not held while the Store is asked.
bool Notices::put_one(Lock& lock) {
  if (puts_.empty()) return false;
  const auto [key, value] = puts_.front();
  lock.unlock();
  store_->set(key, value, Deadline::after(kStoreAnswer));
  lock.lock();
  puts_.pop_front();
  return true;
}

bool Notices::look_once(Lock& lock) {
  if (!look_) return false;
  look_ = false;
  const std::uint64_t came = came_;
  lock.unlock();
  std::optional<Failure> why = ask(came);
  lock.lock();
  if (why && !found_) found_ = std::move(why);
  return true;
}

std::optional<Failure> Notices::ask(std::uint64_t came) {
  if (std::optional<Failure> why = first_cause_.look()) return why;
  const Deadline answer = Deadline::after(kStoreAnswer);
  if (told_ != came) store_->set(came_key_, fmt::format("{}", came), answer);
  told_ = came;
  // "rank:calls rank:calls …". Who left before this rank's last collective will not come to it.
  std::vector<int> left;
  std::istringstream leavers(store_->try_get(left_key_, answer).value_or(""));
  char colon = 0;
  std::uint64_t calls = 0;
  for (int r = 0; leavers >> r >> colon >> calls;)
    if (calls < came) left.push_back(r);
  if (left.empty()) return std::nullopt;
  return Failure{
      .code = ErrorCode::peer_lost,
      .text = fmt::format("rank{} {} left the group", left.size() == 1 ? "" : "s", fmt::join(left, ", ")),
      .ranks = left};
}

bool Notices::fetch_one(Lock& lock) {
  const auto now = Clock::now();
  const auto due = std::find_if(wanted_.begin(), wanted_.end(),
                                [&](const auto& w) { return !w.second.value && w.second.next <= now; });
  if (due == wanted_.end()) return false;
  const std::string key = due->first;
  due->second.next =
      now + std::clamp<Duration>((now - due->second.since) / 8, kLookForKey, kLookForKeyAtMost);
  lock.unlock();
  const Deadline answer = Deadline::after(kStoreAnswer);
  std::optional<std::string> value = store_->try_get(key, answer);
  if (value) {
    try {
      store_->remove(key, answer);
    } catch (const std::exception&) {}  // it stays: it is small
  }
  lock.lock();
  if (value) wanted_[key].value = std::move(value);
  return true;
}

}  // namespace weft::nccl
