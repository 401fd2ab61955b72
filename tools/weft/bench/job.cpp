#include "job.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/prctl.h>
#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <thread>

#include "base/json_reader.hpp"
#include "base/text/plain_streams.hpp"
#include "weft/base/error.hpp"

namespace weft::bench {
namespace {

using std::chrono::milliseconds;
constexpr int kSignals[] = {SIGINT, SIGTERM, SIGHUP};
constexpr std::size_t kLongestLine = std::size_t{1} << 20;  // of a row of results
constexpr Duration kGoodbye = std::chrono::seconds(2);  // for a job to end by itself, and again after SIGTERM
constexpr Duration kHaste = milliseconds(50);           // if somebody waits for us to end

volatile std::sig_atomic_t interrupted = 0;
void note(int signal) { interrupted = signal; }

// Open MPI's ranks lead their own process groups, and a killed mpirun leaves them behind: they become our
// children.
void kill_tree(pid_t root) {
  std::vector<pid_t> line = {root};
  for (std::size_t k = 0; k < line.size(); ++k) {
    std::error_code ignored;
    for (const auto& task :
         std::filesystem::directory_iterator(fmt::format("/proc/{}/task", line[k]), ignored)) {
      FileIn children(task.path() / "children");
      for (pid_t child; children >> child;) line.push_back(child);
    }
  }
  for (const pid_t pid : line) ::kill(pid, SIGKILL);
}

bool ended(pid_t pid, Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  for (;;) {
    if (::waitpid(pid, nullptr, WNOHANG) != 0) return true;
    if (deadline.passed()) return false;
    std::this_thread::sleep_for(milliseconds(5));
  }
}

sched_param children{};  // the policy and priority of jobs, if this process has a higher priority

// Under a real-time policy, a job that spins forever leaves no time to processes of its own priority. So this
// process runs at a higher priority than its children, to be able to end them.
int own_priority(int policy) {
  sched_param p{};
  ::sched_getparam(0, &p);
  return std::min(p.sched_priority + 1, ::sched_get_priority_max(policy));
}

}  // namespace

WorkFolder::WorkFolder() {
  std::string name = (std::filesystem::temp_directory_path() / "weft-bench-XXXXXX").string();
  if (::mkdtemp(name.data()) == nullptr) throw_errno("bench: cannot make " + name, errno);
  path_ = name;
}
WorkFolder::~WorkFolder() {
  std::error_code ignored;
  std::filesystem::remove_all(path_, ignored);
}

Watch::Watch() {
  if (const int policy = ::sched_getscheduler(0); policy == SCHED_FIFO || policy == SCHED_RR) {
    ::sched_getparam(0, &children);
    const sched_param mine{own_priority(policy)};
    ::sched_setscheduler(0, policy, &mine);
  }
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  struct sigaction action {};
  action.sa_handler = note;  // no SA_RESTART: poll returns
  for (const int s : kSignals) ::sigaction(s, &action, nullptr);
}
Watch::~Watch() {
  for (const int s : kSignals) ::signal(s, SIG_DFL);
  while (::waitpid(-1, nullptr, WNOHANG) > 0) {}
}

Job::Job(const WorkFolder& folder, const std::string& name, Start start)
    : fifo_path_(folder.path() + "/" + name + ".turns"),
      error_path_(folder.path() + "/" + name + ".err"),
      ranks_(start.ranks) {
  start.command.insert(start.command.end(), {"--turns", fifo_path_});
  ::unlink(fifo_path_.c_str());
  if (::mkfifo(fifo_path_.c_str(), 0600) != 0) throw_errno("bench: " + fifo_path_, errno);
  turns_ = ::open(fifo_path_.c_str(), O_RDWR | O_CLOEXEC);  // both: a writer alone would wait for the ranks
  int ends[2];
  if (turns_ < 0 || ::pipe2(ends, O_CLOEXEC) != 0) throw_errno("bench: " + fifo_path_, errno);
  std::vector<char*> argv;
  for (std::string& word : start.command) argv.push_back(word.data());
  argv.push_back(nullptr);
  pid_ = ::fork();
  if (pid_ < 0) throw_errno("bench: fork", errno);
  if (pid_ == 0) {
    ::prctl(PR_SET_PDEATHSIG, SIGTERM);
    ::setpgid(0, 0);
    for (const int s : kSignals) ::signal(s, SIG_DFL);
    if (children.sched_priority > 0) ::sched_setscheduler(0, ::sched_getscheduler(0), &children);
    for (const auto& [key, value] : start.environment) ::setenv(key.c_str(), value.c_str(), 1);
    const int nothing = ::open("/dev/null", O_RDONLY);
    const int errors = ::open(error_path_.c_str(), O_WRONLY | O_CREAT | O_TRUNC | O_APPEND, 0600);
    ::dup2(nothing, 0);
    ::dup2(ends[1], 1);
    ::dup2(errors, 2);
    ::execvp(argv[0], argv.data());
    ::dprintf(2, "%s: %s\n", argv[0], std::strerror(errno));
    ::_exit(127);
  }
  ::close(ends[1]);
  out_ = ends[0];
}

Job::~Job() {
  if (turns_ >= 0) ::close(turns_);  // the end of the turns: it ends
  if (pid_ > 0 && !ended(pid_, timed_out_ || interrupted != 0 ? kHaste : kGoodbye)) kill();
  if (out_ >= 0) ::close(out_);
}

void Job::kill() {
  if (pid_ <= 0) return;
  ::kill(pid_, SIGTERM);  // mpirun ends its ranks
  if (!ended(pid_, kGoodbye)) {
    kill_tree(pid_);
    ended(pid_, kGoodbye);
  }
  ::kill(-pid_, SIGKILL);
  pid_ = -1;
}

void Job::go() {
  const std::string tokens(static_cast<std::size_t>(ranks_), '+');
  if (::write(turns_, tokens.data(), tokens.size()) != ranks_) problem_ = "its turns cannot be written";
}

std::optional<nlohmann::ordered_json> Job::next(Duration limit) {
  const Deadline deadline = Deadline::after(limit);
  for (;;) {
    if (interrupted != 0) throw Interrupted{interrupted};
    const std::size_t end = pending_.find('\n');
    if (end != std::string::npos) {
      const std::string line = pending_.substr(0, end);
      pending_.erase(0, end + 1);
      JsonProblem ignored;
      const auto row = try_parse_json<nlohmann::ordered_json>(line, ignored, {.bytes = kLongestLine});
      if (row && row->is_object()) return row;
      continue;  // libraries chat
    }
    if (deadline.passed()) {
      timed_out_ = true;
      problem_ = fmt::format("did not finish in {} s",
                             std::chrono::duration_cast<std::chrono::seconds>(limit).count());
      return std::nullopt;
    }
    pollfd p{out_, POLLIN, 0};
    const auto left = std::chrono::duration_cast<milliseconds>(deadline.left()).count();
    if (::poll(&p, 1, static_cast<int>(std::min<long>(left, 1000)) + 1) <= 0) continue;
    char text[4096];
    const ssize_t n = ::read(out_, text, sizeof text);
    if (n > 0) {
      pending_.append(text, static_cast<std::size_t>(n));
      if (pending_.size() > kLongestLine && pending_.find('\n') == std::string::npos)
        pending_.clear();  // no row
    } else if (n == 0) {
      int status = 0;
      if (::waitpid(pid_, &status, 0) == pid_) pid_ = -1;
      problem_ = WIFSIGNALED(status) ? fmt::format("was ended by signal {}", WTERMSIG(status))
                                     : fmt::format("exit code {}", WEXITSTATUS(status));
      if (const std::string words = last_words(); !words.empty()) problem_ += ": " + words;
      return std::nullopt;
    }
  }
}

// The last line on standard error with words in it, because MPIs draw lines below.
std::string Job::last_words() const {
  FileIn file(error_path_);
  std::string last, ours;
  for (std::string line; std::getline(file, line);) {
    if (line.find_first_not_of("-=* \t|") == std::string::npos) continue;
    if (ours.empty() &&
        (line.find("; expected") != std::string::npos || line.find("Error: ") != std::string::npos))
      ours = line;
    last = line;
  }
  return ours.empty() ? last : ours;
}

}  // namespace weft::bench
