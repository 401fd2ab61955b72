#include "support/processes.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>
#include <poll.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <memory>
#include <stdexcept>
#include <string>
#include <system_error>
#include <thread>
#include <utility>
#include <vector>

namespace weft::test {
namespace {

int run_body(const std::function<int()>& body) {
  try {
    const int code = body();
    return code == 0 && testing::Test::HasFailure() ? 1 : code;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "child %d: uncaught exception: %s\n", static_cast<int>(::getpid()), e.what());
  } catch (...) {
    std::fprintf(stderr, "child %d: uncaught exception of an unknown type\n", static_cast<int>(::getpid()));
  }
  return 1;
}

#ifdef __SANITIZE_ADDRESS__
// Whether all other threads of this process sleep in the kernel.
bool others_sleep() {
  std::error_code absent;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task", absent)) {
    if (task.path().filename() == std::to_string(::gettid())) continue;
    std::string stat;
    std::getline(std::ifstream(task.path() / "stat"), stat);
    const std::size_t name_end = stat.rfind(')');
    if (name_end != std::string::npos && stat.compare(name_end + 1, 2, " S") != 0) return false;
  }
  return true;
}
// The locks of the address sanitizer's allocator keep their state in a forked child. If another thread held
// one at the fork, the child waits forever when it allocates. A thread that has just been started allocates;
// one that sleeps holds no such lock. A thread that is seen asleep may be woken by a thread later in the
// list, so all threads are checked twice.
void let_others_sleep() {
  constexpr auto kLimit = std::chrono::seconds(5);  // for threads that never sleep
  const auto begin = Clock::now();
  for (int looks = 0; looks < 2 && Clock::now() - begin < kLimit;) {
    looks = others_sleep() ? looks + 1 : 0;
    if (looks == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  }
}
#else
void let_others_sleep() {}
#endif

// Waits until the child ends or, with WUNTRACED in `options`, stops.
std::optional<int> wait_status(pid_t pid, int options, Deadline deadline) {
  while (true) {
    int status = 0;
    const pid_t got = ::waitpid(pid, &status, options | WNOHANG);
    if (got == pid) return status;
    if (got < 0 && errno != EINTR) throw std::runtime_error(std::string("waitpid: ") + std::strerror(errno));
    if (deadline.passed()) return std::nullopt;
    std::this_thread::sleep_for(std::chrono::microseconds(500));
  }
}

}  // namespace

std::string to_string(const ExitStatus& status) {
  if (status.signal != 0) return fmt::format("signal {} ({})", status.signal, ::strsignal(status.signal));
  return fmt::format("exit code {}", status.code);
}

std::string to_string(const ProcessResult& result) {
  return result.timed_out ? "killed after the time limit" : to_string(result.status);
}

ChildProcess ChildProcess::fork(const std::function<int()>& body) {
  std::fflush(nullptr);  // else the child would write the parent's buffered text again
  let_others_sleep();
  const pid_t parent = ::getpid();
  const pid_t pid = ::fork();
  if (pid < 0) throw std::runtime_error(std::string("fork: ") + std::strerror(errno));
  if (pid == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    // 0: it is outside of this process's pid namespace.
    if (const pid_t now = ::getppid(); now != parent && now != 0) ::_exit(1);
    const int code = run_body(body);
    std::fflush(nullptr);
    ::_exit(code);
  }
  return ChildProcess(pid);
}

ChildProcess::ChildProcess(ChildProcess&& other) noexcept
    : pid_(std::exchange(other.pid_, -1)), ended_(std::exchange(other.ended_, std::nullopt)) {}

ChildProcess& ChildProcess::operator=(ChildProcess&& other) noexcept {
  std::swap(pid_, other.pid_);
  std::swap(ended_, other.ended_);
  return *this;
}

ChildProcess::~ChildProcess() {
  if (pid_ < 0 || ended_) return;
  ::kill(pid_, SIGKILL);
  while (::waitpid(pid_, nullptr, 0) < 0 && errno == EINTR) {}
}

void ChildProcess::kill(int signal) {
  if (!ended_) ::kill(pid_, signal);
}

void ChildProcess::stop() {
  kill(SIGSTOP);
  const auto status = wait_status(pid_, WUNTRACED, Deadline::after(std::chrono::seconds(10)));
  if (!status || !WIFSTOPPED(*status)) throw std::runtime_error("the child did not stop");
}

void ChildProcess::resume() { kill(SIGCONT); }

std::optional<ExitStatus> ChildProcess::wait(Duration limit) {
  if (ended_) return ended_;
  if (const auto status = wait_status(pid_, 0, Deadline::after(limit))) {
    if (WIFSIGNALED(*status))
      ended_ = ExitStatus{.code = -1, .signal = WTERMSIG(*status)};
    else
      ended_ = ExitStatus{.code = WEXITSTATUS(*status), .signal = 0};
  }
  return ended_;
}

ProcessResult run_in_child(const std::function<int()>& body, Duration limit) {
  ChildProcess child = ChildProcess::fork(body);
  if (const auto status = child.wait(limit)) return {*status, false};
  child.kill(SIGKILL);
  return {child.wait(std::chrono::seconds(10)).value_or(ExitStatus{}), true};
}

void run_in_children(int count, const std::function<void(int)>& body, Duration limit) {
  // All are forked before the first begins, since it may wake a thread of this process, such as a server.
  std::vector<std::unique_ptr<Pipe>> gates;
  for (int rank = 0; rank < count; ++rank) gates.push_back(std::make_unique<Pipe>());
  std::vector<ChildProcess> children;
  for (int rank = 0; rank < count; ++rank)
    children.push_back(ChildProcess::fork([&body, &gates, rank] {
      gates[static_cast<std::size_t>(rank)]->read_line();
      gates.clear();
      body(rank);
      return 0;
    }));
  for (const auto& gate : gates) gate->write_line("begin");
  const Deadline deadline = Deadline::after(limit);
  for (int rank = 0; rank < count; ++rank) {
    const auto status = children[static_cast<std::size_t>(rank)].wait(deadline.left());
    if (!status)
      ADD_FAILURE() << "rank " << rank << " (process " << children[static_cast<std::size_t>(rank)].pid()
                    << ") still ran after the time limit and was killed";
    else if (*status != ExitStatus{0, 0})
      ADD_FAILURE() << "rank " << rank << " ended with " << to_string(*status);
  }
}

Pipe::Pipe() {
  if (::pipe(ends_) != 0) throw std::runtime_error(std::string("pipe: ") + std::strerror(errno));
}

Pipe::~Pipe() {
  ::close(ends_[0]);
  ::close(ends_[1]);
}

void Pipe::write_line(const std::string& line) {
  const std::string text = line + '\n';
  for (std::size_t done = 0; done < text.size();) {
    const ssize_t n = ::write(ends_[1], text.data() + done, text.size() - done);
    if (n < 0 && errno == EINTR) continue;
    if (n < 0) throw std::runtime_error(std::string("pipe: ") + std::strerror(errno));
    done += static_cast<std::size_t>(n);
  }
}

std::string Pipe::read_line(Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  while (true) {
    if (const auto feed = rest_.find('\n'); feed != std::string::npos) {
      std::string line = rest_.substr(0, feed);
      rest_.erase(0, feed + 1);
      return line;
    }
    pollfd p{.fd = ends_[0], .events = POLLIN, .revents = 0};
    const auto left = std::chrono::duration_cast<std::chrono::milliseconds>(deadline.left()).count();
    const int ready = ::poll(&p, 1, static_cast<int>(left));
    if (ready == 0) throw std::runtime_error("pipe: no line within the time limit");
    if (ready < 0 && errno == EINTR) continue;
    char buffer[1024];
    const ssize_t n = ::read(ends_[0], buffer, sizeof buffer);
    if (n <= 0) throw std::runtime_error("pipe: closed");
    rest_.append(buffer, static_cast<std::size_t>(n));
  }
}

int count_descriptors() {
  // The folder itself is open while it is read.
  return static_cast<int>(std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {})) - 1;
}

}  // namespace weft::test
