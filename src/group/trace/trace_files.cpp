#include "group/trace/trace_files.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <pthread.h>
#include <sys/eventfd.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>
#include <condition_variable>
#include <csignal>
#include <cstring>
#include <deque>
#include <map>
#include <random>
#include <thread>

#include "base/files/new_file.hpp"
#include "base/memfd.hpp"
#include "base/signals.hpp"
#include "host/peers.hpp"
#include "weft/base/env.hpp"

namespace weft {
namespace {

constexpr auto kPatience = std::chrono::seconds(2);  // how long threads wait for the disk

std::string host_name() {
  char text[256] = "";
  ::gethostname(text, sizeof text - 1);
  return text;
}

// ---- The signal. A signal handler gets no argument, so its data must be global. The thread that the
// descriptor wakes does the rest.

std::atomic<int> signal_descriptor{-1};
std::atomic<pid_t> signal_owner{0};
std::atomic<int> in_handler{0};

void on_signal(int number) {
  const int error_number = errno;
  in_handler.fetch_add(1, std::memory_order_seq_cst);
  const int descriptor = signal_descriptor.load(std::memory_order_seq_cst);
  if (signal_owner.load(std::memory_order_seq_cst) != ::getpid()) {
    // In a child made by fork the descriptor belongs to the parent, and no thread of the child would read it.
    ::signal(number, SIG_DFL);
    ::raise(number);
  } else if (descriptor >= 0) {
    const std::uint64_t one = 1;
    static_cast<void>(!::write(descriptor, &one, sizeof one));
  }
  in_handler.fetch_sub(1, std::memory_order_seq_cst);
  errno = error_number;
}

bool claim_signal(int descriptor) {
  struct sigaction now {};
  if (::sigaction(SIGUSR2, nullptr, &now) != 0) return false;
  const bool inherited = now.sa_handler == on_signal && signal_owner.load() != ::getpid();
  const bool free = (now.sa_flags & SA_SIGINFO) == 0 && now.sa_handler == SIG_DFL;
  if (!free && !inherited) return false;
  pid_t before = signal_owner.load();
  if (before == ::getpid() || !signal_owner.compare_exchange_strong(before, ::getpid())) return false;
  signal_descriptor.store(descriptor, std::memory_order_seq_cst);
  struct sigaction ours {};
  ours.sa_handler = on_signal;
  ours.sa_flags = SA_RESTART;
  ::sigfillset(&ours.sa_mask);
  if (::sigaction(SIGUSR2, &ours, nullptr) == 0) return true;
  signal_descriptor.store(-1, std::memory_order_seq_cst);
  signal_owner.store(0);
  return false;
}

void give_signal_back() {
  struct sigaction now {};
  if (::sigaction(SIGUSR2, nullptr, &now) == 0 && now.sa_handler == on_signal) ::signal(SIGUSR2, SIG_DFL);
  signal_descriptor.store(-1, std::memory_order_seq_cst);
  // Waits for handlers that have read the descriptor's number and are about to write to it, because it will
  // be closed.
  while (in_handler.load(std::memory_order_seq_cst) > 0) ::sched_yield();
  signal_owner.store(0);
}

// ---- Files

// Returns a text as a part of a file's name.
std::string plain(std::string_view text) {
  constexpr std::size_t kLongest = 48;
  std::string out;
  for (const char c : text.substr(0, kLongest))
    out += (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_'
               ? c
               : '_';
  return out;
}

// Writes a file, which appears complete or not at all. Returns the reason if that fails, or nothing.
std::string write_file(const std::string& path, std::string_view text) try {
  write_new_file(path, text);
  return {};
} catch (const std::exception& e) {
  return e.what();
}

}  // namespace

// The data of the thread. It exists longer than the Context if the disk hangs.
struct TraceFiles::Writer {
  std::string folder, names;
  Descriptor descriptor;
  bool has_signal = false;
  std::thread thread;

  std::mutex mutex;
  std::condition_variable changed;
  bool ending = false, ended = false;
  int files = 0;
  std::map<std::shared_ptr<Recorder>, int> groups;  // for each recorder, the number in the name of its file
  std::deque<std::pair<std::shared_ptr<Recorder>, int>> asked;
  std::shared_ptr<Recorder> in_hand;

  std::mutex log_mutex;
  Logger* log = nullptr;  // null: the Context is destroyed

  // The signal handler adds 1 to the counter of the descriptor, and all other code adds 2^32, so that the two
  // can be distinguished.
  static constexpr std::uint64_t kWake = std::uint64_t{1} << 32;
  void wake() const { static_cast<void>(!::write(descriptor.get(), &kWake, sizeof kWake)); }

  // Writes one file. If memory runs out, no file is written, and perhaps no warning.
  void write_one(const Recorder& recorder, int number) noexcept try {
    std::string problem;
    try {
      const Trace trace = recorder.read();
      const std::string path =
          fmt::format("{}/{}.rank{}.{}-{}.json", folder, plain(trace.group), trace.rank, names, number);
      problem = write_file(path, to_json(trace, true));
    } catch (const std::exception& e) {
      problem = e.what();
    }
    if (problem.empty()) return;
    const std::lock_guard lock(log_mutex);
    if (log != nullptr)
      log->write(LogLayer::group, LogLevel::warning, "WEFT_TRACE: no trace is written: " + problem);
  } catch (const std::bad_alloc&) {}

  // Called for a signal: requests the traces of all groups, as far as memory allows.
  void ask_for_all() noexcept try {
    for (const auto& group : groups) asked.push_back(group);
  } catch (const std::bad_alloc&) {}

  void run() {
    ::pthread_setname_np(::pthread_self(), "weft-traces");
    for (;;) {
      pollfd p{descriptor.get(), POLLIN, 0};
      ::poll(&p, 1, -1);
      std::uint64_t rung = 0;
      if (::read(descriptor.get(), &rung, sizeof rung) < 0) rung = 0;
      std::unique_lock lock(mutex);
      if (rung % kWake != 0) ask_for_all();
      while (!asked.empty()) {
        const auto [recorder, number] = asked.front();
        asked.pop_front();
        in_hand = recorder;
        lock.unlock();
        write_one(*recorder, number);
        lock.lock();
        in_hand.reset();
        changed.notify_all();
      }
      if (!ending) continue;
      ended = true;
      changed.notify_all();
      return;
    }
  }
};

TraceFiles::TraceFiles(Context& context)
    : host_(host_name()), boot_([&] {
        const std::string& host = host_peers_of(context).self().host;
        return host.substr(0, host.find('/'));
      }()) {
  const auto folder = env::get("WEFT_TRACE");
  if (!folder) return;
  const auto without = [&](const std::string& why) {
    context.log().write_later(LogLayer::group, LogLevel::warning,
                              "WEFT_TRACE: no traces are written: " + why);
  };
  auto writer = std::make_shared<Writer>();
  writer->folder = *folder;
  writer->names = fmt::format("{}-{}-{:08x}", plain(host_), ::getpid(), std::random_device()());
  writer->log = &context.log();
  writer->descriptor = Descriptor(::eventfd(0, EFD_CLOEXEC | EFD_NONBLOCK));
  if (!writer->descriptor) {
    without(fmt::format("eventfd: {}", system_words(errno)));
    return;
  }
  // The thread takes no signals, so a write beyond the limit of a file's size is an error there.
  try {
    writer->thread = start_thread("the writer", [writer] { writer->run(); });
  } catch (const Error& e) {
    without(e.what());
    return;
  }
  writer_ = std::move(writer);
  writer_->has_signal = claim_signal(writer_->descriptor.get());
  if (!writer_->has_signal)
    context.log().write_later(
        LogLayer::group, LogLevel::info,
        "WEFT_TRACE: SIGUSR2 is the program's or another Context's: it writes no traces here");
}

TraceFiles::~TraceFiles() {
  if (!writer_) return;
  Writer& w = *writer_;
  if (w.has_signal) give_signal_back();
  bool ended = false;
  {
    std::unique_lock lock(w.mutex);
    w.ending = true;
    w.wake();
    ended = w.changed.wait_for(lock, kPatience, [&] { return w.ended; });
  }
  if (ended) {
    w.thread.join();
  } else {
    w.thread.detach();  // the thread is inside a write that does not return; it owns the data that it uses
  }
  const std::lock_guard lock(w.log_mutex);
  w.log = nullptr;
}

std::shared_ptr<Recorder> TraceFiles::open(Trace about) {
  about.host = host_;
  about.boot = boot_;
  about.process = ::getpid();
  auto recorder = std::make_shared<Recorder>(std::move(about));
  if (writer_) {
    const std::lock_guard lock(writer_->mutex);
    writer_->groups.emplace(recorder, writer_->files++);
  }
  return recorder;
}

void TraceFiles::close(const std::shared_ptr<Recorder>& recorder) noexcept {
  if (!writer_) return;
  const std::lock_guard lock(writer_->mutex);
  writer_->groups.erase(recorder);
}

void TraceFiles::write(const std::shared_ptr<Recorder>& recorder) noexcept {
  if (!writer_) return;
  try {
    const std::lock_guard lock(writer_->mutex);
    const auto group = writer_->groups.find(recorder);
    if (group == writer_->groups.end()) return;
    writer_->asked.push_back(*group);
    writer_->wake();
  } catch (const std::exception&) {  // out of memory: there is no file then
  }
}

void TraceFiles::written(const std::shared_ptr<Recorder>& recorder) noexcept {
  if (!writer_) return;
  Writer& w = *writer_;
  std::unique_lock lock(w.mutex);
  w.changed.wait_for(lock, kPatience, [&] {
    return w.ended ||
           (w.in_hand != recorder &&
            std::none_of(w.asked.begin(), w.asked.end(), [&](const auto& a) { return a.first == recorder; }));
  });
}

}  // namespace weft
