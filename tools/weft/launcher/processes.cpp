#include "processes.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cerrno>
#include <chrono>
#include <csignal>
#include <cstdio>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/parse_number.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/clock.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

constexpr Duration kSweepLimit = std::chrono::seconds(5);  // time for killed processes to disappear

/// The parent of a process, from /proc; nothing if the process is gone.
std::optional<pid_t> parent_of(const std::filesystem::path& process) {
  FileIn file(process / "stat");
  std::string stat;
  if (!std::getline(file, stat)) return std::nullopt;
  const std::size_t name_end = stat.rfind(')');  // the name before it may hold anything
  char state = 0;
  int parent = 0;
  if (name_end == std::string::npos ||
      std::sscanf(stat.c_str() + name_end + 1, " %c %d", &state, &parent) != 2) {
    return std::nullopt;
  }
  return parent;
}

}  // namespace

void say(std::string_view text) {
  const std::string line = fmt::format("weft run: {}\n", text);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

std::string how_it_ended(int status) {
  if (!WIFSIGNALED(status)) return fmt::format("exited with code {}", WEXITSTATUS(status));
  const char* const name = ::sigabbrev_np(WTERMSIG(status));
  return fmt::format("killed by signal {}{}", WTERMSIG(status), name ? fmt::format(" (SIG{})", name) : "");
}

bool cannot_be_a_consequence(int status) {
  if (!WIFSIGNALED(status)) return false;
  switch (WTERMSIG(status)) {
    case SIGABRT:
    case SIGPIPE:
    case SIGTERM:
    case SIGINT:
    case SIGHUP:
    case SIGQUIT: return false;
    default: return true;
  }
}

int exit_status(int status) { return WIFSIGNALED(status) ? 128 + WTERMSIG(status) : WEXITSTATUS(status); }

std::vector<pid_t> own_children() {
  std::vector<pid_t> pids;
  std::error_code failed;
  bool known = true;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", failed)) {
    FileIn children(thread.path() / "children");
    known &= children.good();
    for (pid_t pid = 0; children >> pid;) pids.push_back(pid);
  }
  if (known && !failed) return pids;
  pids.clear();
  const pid_t self = ::getpid();
  for (const auto& entry : std::filesystem::directory_iterator("/proc", failed)) {
    const auto pid = parse_integer<pid_t>(entry.path().filename().string());
    if (pid && parent_of(entry.path()) == self) pids.push_back(*pid);
  }
  return pids;
}

std::optional<std::string> variable_of(pid_t process, std::string_view name) {
  FileIn environment(fmt::format("/proc/{}/environ", process), std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');)
    if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=')
      return entry.substr(name.size() + 1);
  return std::nullopt;
}

bool catches(pid_t process, int number) {
  FileIn status(fmt::format("/proc/{}/status", process));
  for (std::string word; status >> word;) {
    unsigned long long caught = 0;
    if (word == "SigCgt:") return (status >> std::hex >> caught) && ((caught >> (number - 1)) & 1) != 0;
  }
  return false;
}

bool is_stopped(pid_t process) {
  FileIn status(fmt::format("/proc/{}/status", process));
  for (std::string word; status >> word;)
    if (word == "State:") return (status >> word) && (word == "T" || word == "t");
  return false;
}

void kill_all_descendants() {
  const Deadline deadline = Deadline::after(kSweepLimit);
  while (!deadline.passed()) {
    pid_t reaped = 0;
    while ((reaped = ::waitpid(-1, nullptr, WNOHANG)) > 0) {}
    if (reaped < 0 && errno == ECHILD) return;
    for (const pid_t pid : own_children()) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(std::chrono::milliseconds(2));
  }
  say("some processes of the job did not end on SIGKILL");
}

Pipe::Pipe() {
  int ends[2];
  if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe", errno);
  read_end = ends[0];
  write_end = ends[1];
}

Pipe::~Pipe() {
  close(read_end);
  close(write_end);
}

void Pipe::close(int& end) {
  if (end >= 0) ::close(end);
  end = -1;
}

}  // namespace weft::tools
