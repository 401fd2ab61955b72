#include "weft/backends/blocking.hpp"

#include <fmt/format.h>
#include <pthread.h>

#include <new>

#include "base/errors/caught.hpp"
#include "base/signals.hpp"
#include "weft/backends/host_ranks.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

// How long a broken call waits for the thread that knows the reason.
constexpr auto kCauseWait = std::chrono::seconds(2);

}  // namespace

struct BlockingBackend::Flight {
  enum : int { pending, done, refused, found };
  std::uint64_t number = 0;  // the number of a collective
  MessageInfo message{};     // the message that was found
  std::atomic<int> state{pending};
  static Flight& of(OpState& s) noexcept { return *reinterpret_cast<Flight*>(s.scratch.data()); }
};

BlockingBackend::BlockingBackend(const GroupInit& b)
    : rank_(b.rank), cause_(b.store, b.token), doorbell_(own_doorbell(b)) {
  static_assert(sizeof(Flight) <= sizeof(OpState::scratch));
}

BlockingBackend::~BlockingBackend() = default;

void BlockingBackend::begin() {
  const NoSignals inherited;
  thread_ = std::thread([this] { work(); });
}

void BlockingBackend::end() noexcept {
  {
    const std::lock_guard lock(mutex_);
    ending_ = true;
    changed_.notify_all();
  }
  if (thread_.joinable()) thread_.join();
}

void BlockingBackend::post(OpState& s) noexcept {
  Flight& f = *new (s.scratch.data()) Flight;
  if (!row(s.op).collective) {
    start(s);
    return;
  }
  const std::lock_guard lock(mutex_);
  f.number = posted_++;
  queue_.push_back(&s);
  changed_.notify_all();
}

Step BlockingBackend::poll(OpState& s) noexcept {
  Flight& f = Flight::of(s);
  if (row(s.op).collective) {
    if (done_.load(std::memory_order_seq_cst) > f.number) return Step::done;
  } else {
    const int state = f.state.load(std::memory_order_seq_cst);
    if (state == Flight::done) return Step::done;
    if (state == Flight::found) {
      s.peer = f.message.source;
      if (s.op == Op::wait_message) {
        s.dtype = f.message.dtype;
        s.out_count = f.message.count;
      }
      return Step::done;
    }
    if (state == Flight::refused) {
      Failure why;
      {
        const std::lock_guard lock(mutex_);
        if (refusal_) why = *refusal_;
      }
      fail(why);
    }
  }
  return failed() ? Step::failed : Step::pending;
}

void BlockingBackend::ring() noexcept {
  if (asleep_.load(std::memory_order_seq_cst)) doorbell_.ring();
}

void BlockingBackend::finished(OpState& s) noexcept {
  Flight::of(s).state.store(Flight::done, std::memory_order_seq_cst);
  ring();
}

void BlockingBackend::finished(OpState& s, const MessageInfo& found) noexcept {
  Flight& f = Flight::of(s);
  f.message = found;
  f.state.store(Flight::found, std::memory_order_seq_cst);
  ring();
}

void BlockingBackend::refuse(OpState& s, Failure why) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (!refusal_) refusal_ = std::move(why);
  }
  Flight::of(s).state.store(Flight::refused, std::memory_order_seq_cst);
  ring();
}

void BlockingBackend::work() noexcept {
  ::pthread_setname_np(::pthread_self(), "weft-blocking");
  for (;;) {
    OpState* s = nullptr;
    {
      std::unique_lock lock(mutex_);
      changed_.wait(lock, [&] { return ending_ || failing_ || !queue_.empty(); });
      if (ending_ || failing_) return;
      s = queue_.front();
      queue_.pop_front();
      busy_ = true;
    }
    bool well = false;
    std::string trouble;
    std::optional<Failure> cause;
    try {
      run(*s);
      well = true;
    } catch (const Error& e) {
      cause = Failure{.code = e.code(),
                      .text = e.what(),
                      .op = s->op,
                      .call = s->call,
                      .ranks = {e.ranks().begin(), e.ranks().end()}};
    } catch (...) {
      trouble = caught_words();
    }
    if (well) done_.fetch_add(1, std::memory_order_seq_cst);
    {
      std::unique_lock lock(mutex_);
      busy_ = false;
      changed_.notify_all();
      // If a connection has broken, the thread that watches the connection knows the reason and fails the
      // group. If no thread does so, the cause is the transport's own text.
      if (!well && !cause && !changed_.wait_for(lock, kCauseWait, [&] { return failing_ || ending_; }))
        cause = Failure{.code = ErrorCode::system,
                        .text = fmt::format("{}: {}", name(s->op), trouble),
                        .op = s->op,
                        .call = s->call,
                        .ranks = {rank_}};
    }
    if (cause) fail(*cause);
    ring();
  }
}

void BlockingBackend::fail(const Failure& why) noexcept {
  {
    std::unique_lock lock(mutex_);
    if (failing_) {
      changed_.wait(lock, [&] { return failed(); });
      return;
    }
    failing_ = true;
  }
  Failure first = cause_.raise(why);
  {
    const std::lock_guard lock(mutex_);
    failure_ = std::move(first);
    failed_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  interrupt();
  {
    const std::lock_guard lock(mutex_);
    interrupted_.store(true, std::memory_order_release);
    changed_.notify_all();
  }
  doorbell_.ring();
}

Failure BlockingBackend::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

bool BlockingBackend::quiet() const noexcept {
  const std::lock_guard lock(mutex_);
  return interrupted_.load(std::memory_order_acquire) && !busy_;
}

bool BlockingBackend::quiesce(Deadline deadline, std::span<const MemoryRange>) noexcept {
  std::unique_lock lock(mutex_);
  return changed_.wait_for(lock, deadline.left(),
                           [&] { return interrupted_.load(std::memory_order_acquire) && !busy_; });
}

}  // namespace weft
