#include "backends/nccl/notices.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <algorithm>
#include <vector>

#include "backends/call_word.hpp"
#include "backends/last_calls.hpp"
#include "base/signals.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/backends/blocking.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::nccl {
namespace {

// the pause between two reads of a key at first; later an eighth of the time waited
constexpr Duration kLookForKey = std::chrono::milliseconds(1);
constexpr Duration kLookForKeyAtMost = std::chrono::milliseconds(20);
// one question serves all calls whose deadlines pass within this time
constexpr Duration kFresh = std::chrono::milliseconds(20);
constexpr Duration kPause = std::chrono::milliseconds(50);  // the pause after an error of the Store

}  // namespace

std::string Notices::came_key(const std::string& token, int rank) {
  return fmt::format("{}/nccl/came/{}", token, rank);
}
std::string Notices::left_key(const std::string& token) { return token + "/nccl/left"; }

Notices::Notices(std::shared_ptr<Store> store, const std::string& token, int rank)
    : store_(std::move(store)),
      first_cause_(store_, token),
      token_(token),
      came_key_(came_key(token, rank)),
      left_key_(left_key(token)),
      rank_(rank) {
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
  requested_[key] = {.since = now, .next = now, .value = {}};
  changed_.notify_all();
}

std::optional<std::string> Notices::got(const std::string& key) {
  const std::lock_guard lock(mutex_);
  const auto at = requested_.find(key);
  if (at == requested_.end() || !at->second.value) return std::nullopt;
  std::optional<std::string> value = std::move(at->second.value);
  requested_.erase(at);
  return value;
}

void Notices::look(std::uint64_t came, const LastCall& last) {
  const std::lock_guard lock(mutex_);
  came_ = came;
  last_ = last;
  look_ = true;
  changed_.notify_all();
}

std::optional<Failure> Notices::found() const {
  const std::lock_guard lock(mutex_);
  return found_;
}

bool Notices::ask(std::uint64_t call, int size) {
  const std::lock_guard lock(mutex_);
  const auto now = Clock::now();
  Question& q = question_;
  // A rank that had not arrived when a warning was due may have arrived since, so at the deadline the
  // question is asked again.
  if (q.state == Question::State::none || q.call != call || (q.settled < now && now - q.settled >= kFresh)) {
    q = {.call = call,
         .size = size,
         .number = q.number + 1,
         .limit = Deadline::after(kStoreAnswer),
         .state = Question::State::asked,
         .silent = {},
         .last = {}};
    changed_.notify_all();
  }
  const bool over = q.state == Question::State::told || q.state == Question::State::failed;
  if (!over && !q.limit.passed()) return false;
  if (!over) q.state = Question::State::failed;
  q.settled = std::min(q.settled, now);
  return true;
}

std::optional<std::vector<int>> Notices::silent() const {
  const std::lock_guard lock(mutex_);
  if (question_.state != Question::State::told) return std::nullopt;
  return question_.silent;
}

std::vector<LastCall> Notices::last_calls(int size) const {
  const std::lock_guard lock(mutex_);
  std::vector<LastCall> last(static_cast<std::size_t>(size));
  if (question_.state == Question::State::told && question_.last.size() == last.size()) last = question_.last;
  return last;
}

bool Notices::answers() const {
  const std::lock_guard lock(mutex_);
  return question_.state != Question::State::failed;
}

void Notices::raise(const Failure& why) {
  const std::lock_guard lock(mutex_);
  if (!to_raise_) to_raise_ = why;
  changed_.notify_all();
}

void Notices::work() noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-notices");
  Lock lock(mutex_);
  while (!ending_) {
    bool answered = true;
    try {
      const bool did =
          raise_once(lock) || ask_once(lock) || look_once(lock) || put_one(lock) || fetch_one(lock);
      if (did) continue;
    } catch (const std::exception&) {
      // The Store has ended, or does not answer. The group's deadlines work without it.
      answered = false;
      if (!lock) lock.lock();
    }
    if (ending_) break;
    if (!answered) {
      changed_.wait_for(lock, kPause, [&] { return ending_; });
      continue;
    }
    auto next = Clock::time_point::max();
    for (const auto& [key, w] : requested_)
      if (!w.value) next = std::min(next, w.next);
    if (next == Clock::time_point::max()) {
      changed_.wait(lock);
    } else {
      changed_.wait_until(lock, next);
    }
  }
  raise_once(lock);
}

// Each function returns true if it had work to do. It releases the lock during its request to the Store.
bool Notices::put_one(Lock& lock) {
  if (puts_.empty()) return false;
  const auto [key, value] = puts_.front();
  lock.unlock();
  store_->set(key, value, Deadline::after(kStoreAnswer));
  lock.lock();
  puts_.pop_front();
  return true;
}

bool Notices::raise_once(Lock& lock) {
  if (!to_raise_) return false;
  const Failure why = *std::exchange(to_raise_, std::nullopt);
  lock.unlock();
  first_cause_.raise(why);
  lock.lock();
  return true;
}

bool Notices::ask_once(Lock& lock) {
  using State = Question::State;
  if (question_.state != State::asked) return false;
  question_.state = State::underway;
  Question q = question_;
  lock.unlock();
  try {
    find_silent(q);
    q.state = State::told;
  } catch (const std::exception&) {  // the Store does not answer
    q.state = State::failed;
  }
  lock.lock();
  if (question_.state == State::underway && question_.number == q.number) question_ = std::move(q);
  return true;  // if the first cause was not written, another cause was first
}

namespace {

// The report of a rank about itself: how many collectives it has called, and number, word and count of the
// last one.
struct Came {
  std::uint64_t came = 0;
  LastCall last{};
};

std::string to_text(const Came& c) {
  const CallWord word(c.last.op, c.last.dtype, c.last.reduce, 0, c.last.root);
  return fmt::format("{} {} {} {}", c.came, c.last.call, word.bits(), c.last.count);
}

std::optional<Came> to_came(const std::string& text) {
  Came c;
  std::uint64_t bits = 0;
  TextIn words(text);
  if (!(words >> c.came)) return std::nullopt;
  if (!(words >> c.last.call >> bits >> c.last.count)) return Came{.came = c.came};
  const CallWord word(bits);
  if (static_cast<int>(word.op()) >= kOpCount || static_cast<int>(word.dtype()) >= kDTypeCount ||
      static_cast<int>(word.reduce()) >= kReduceKindCount)
    return Came{.came = c.came};
  c.last.state = LastCall::State::called;
  c.last.op = word.op();
  c.last.dtype = word.dtype();
  c.last.reduce = word.reduce();
  c.last.root = word.rank();
  return c;
}

}  // namespace

// Finds the ranks that have not reported. NCCL does not know which ranks are missing, so each waiting rank
// reports its wait in the Store, soon after the wait has begun.
void Notices::find_silent(Question& q) {
  const Deadline answer = Deadline::after(kStoreAnswer);  // one deadline for all requests
  q.last.assign(static_cast<std::size_t>(q.size), {});
  for (int r = 0; r < q.size; ++r) {
    if (r == rank_) continue;
    const auto at = store_->try_get(came_key(token_, r), answer);
    const auto said = at ? to_came(*at) : std::nullopt;
    if (!said || said->came <= q.call) q.silent.push_back(r);
    if (!said) continue;
    q.last[static_cast<std::size_t>(r)] = said->last;
    q.last[static_cast<std::size_t>(r)].answered = said->came > q.call;
  }
}

bool Notices::look_once(Lock& lock) {
  if (!look_) return false;
  look_ = false;
  const std::uint64_t came = came_;
  const LastCall last = last_;
  lock.unlock();
  std::optional<Failure> why = ask(came, last);
  lock.lock();
  if (why && !found_) found_ = std::move(why);
  return true;
}

std::optional<Failure> Notices::ask(std::uint64_t came, const LastCall& last) {
  if (std::optional<Failure> why = first_cause_.look()) return why;
  const Deadline answer = Deadline::after(kStoreAnswer);
  if (told_ != came) store_->set(came_key_, to_text({.came = came, .last = last}), answer);
  told_ = came;
  // "rank:calls rank:calls …". A rank that left before this rank's last collective will not call it.
  std::vector<int> left;
  TextIn leavers(store_->try_get(left_key_, answer).value_or(""));
  char colon = 0;
  std::uint64_t calls = 0;
  for (int r = 0; leavers >> r >> colon >> calls;)
    if (calls < came) left.push_back(r);
  if (left.empty()) return std::nullopt;
  return Failure{.code = ErrorCode::peer_lost, .text = left_text(Op::none, left), .ranks = left};
}

bool Notices::fetch_one(Lock& lock) {
  const auto now = Clock::now();
  const auto due = std::find_if(requested_.begin(), requested_.end(),
                                [&](const auto& w) { return !w.second.value && w.second.next <= now; });
  if (due == requested_.end()) return false;
  const std::string key = due->first;
  due->second.next =
      now + std::clamp<Duration>((now - due->second.since) / 8, kLookForKey, kLookForKeyAtMost);
  lock.unlock();
  const Deadline answer = Deadline::after(kStoreAnswer);
  std::optional<std::string> value = store_->try_get(key, answer);
  if (value) {
    try {
      store_->remove(key, answer);
    } catch (const std::exception&) {}  // the key stays in the Store; it is small
  }
  lock.lock();
  if (value) requested_[key].value = std::move(value);
  return true;
}

}  // namespace weft::nccl
