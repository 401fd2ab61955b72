// How a job is started and ended. Three kinds of process:
//
//   guard        the process that called launch(). It forwards signals to the supervisor and waits for it.
//   supervisor   its child: serves the store, starts the ranks, passes on their output, ends the job.
//   ranks        the supervisor's children, each the leader of a process group of its own.
//
// Two, because one could be killed with SIGKILL and then end nothing. The supervisor notices the guard's
// death by a pipe that only the guard holds open for writing, and ends the job. When the supervisor dies the
// kernel kills the ranks (PR_SET_PDEATHSIG). Both are sub-reapers: what the ranks started and left behind
// becomes a child of the supervisor or, after its death, of the guard, and is killed there, even if it left
// its process group.
#include "launcher.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sched.h>
#include <sys/ioctl.h>
#include <sys/prctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <memory>
#include <optional>
#include <thread>
#include <utility>

#include "base/parse_number.hpp"
#include "base/suspension.hpp"
#include "launcher_notices.hpp"
#include "output.hpp"
#include "store/launcher_notice.hpp"
#include "terminal.hpp"
#include "torch_variables.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"
#include "weft/store/tcp.hpp"

namespace weft::tools {
namespace {

using std::chrono::milliseconds;

constexpr int kForwarded[] = {SIGINT, SIGTERM, SIGHUP, SIGQUIT, SIGUSR1, SIGUSR2};
constexpr int kOutputLost = 74;  // EX_IOERR of sysexits.h
constexpr int kTimedOut = 124;   // as timeout(1) has it
constexpr int kNotFound = 127;
constexpr int kNotExecutable = 126;
constexpr Duration kSweepLimit = std::chrono::seconds(5);  // for killed processes to be gone
constexpr Duration kDrainLimit =
    std::chrono::seconds(1);  // for pipes to end once no process of the job is left
// After the first failure, for what may have caused it to be found dead, too. Where all who have failed say
// that it was others, the whole notice (LaunchOptions) is waited for those.
constexpr Duration kJudgement = milliseconds(200);
constexpr Duration kStoreLimit = std::chrono::seconds(1);  // for our own store to answer
constexpr Duration kSameRequest = milliseconds(500);       // `timeout` and the like send their signal twice

void say(std::string_view text) {
  const std::string line = fmt::format("weft run: {}\n", text);
  [[maybe_unused]] const auto written = ::write(STDERR_FILENO, line.data(), line.size());
}

struct Pipe {
  int read_end = -1;
  int write_end = -1;

  Pipe() {
    int ends[2];
    if (::pipe2(ends, O_CLOEXEC) != 0) throw_errno("pipe", errno);
    read_end = ends[0];
    write_end = ends[1];
  }
  Pipe(const Pipe&) = delete;
  Pipe& operator=(const Pipe&) = delete;
  ~Pipe() {
    close(read_end);
    close(write_end);
  }
  static void close(int& end) {
    if (end >= 0) ::close(end);
    end = -1;
  }
};

/// "exited with code 3" or "killed by signal 9 (SIGKILL)".
std::string how_it_ended(int status) {
  if (!WIFSIGNALED(status)) return fmt::format("exited with code {}", WEXITSTATUS(status));
  const char* const name = ::sigabbrev_np(WTERMSIG(status));
  return fmt::format("killed by signal {}{}", WTERMSIG(status), name ? fmt::format(" (SIG{})", name) : "");
}

/// Whether a rank that ended so failed by itself. SIGABRT, SIGPIPE and what asks a process to end may be the
/// consequence of another's failure, and so may any exit code.
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

/// The parent of a process, from /proc; nothing where it is gone.
std::optional<pid_t> parent_of(const std::filesystem::path& process) {
  std::ifstream file(process / "stat");
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

/// The children of this process, of all its threads. Where the kernel has no file `children`, all processes
/// are looked through.
std::vector<pid_t> own_children() {
  std::vector<pid_t> pids;
  std::error_code failed;
  bool known = true;
  for (const auto& thread : std::filesystem::directory_iterator("/proc/self/task", failed)) {
    std::ifstream children(thread.path() / "children");
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

/// The value of a variable as a process was started with it.
std::optional<std::string> variable_of(pid_t process, std::string_view name) {
  std::ifstream environment(fmt::format("/proc/{}/environ", process), std::ios::binary);
  for (std::string entry; std::getline(environment, entry, '\0');)
    if (entry.size() > name.size() && entry.starts_with(name) && entry[name.size()] == '=')
      return entry.substr(name.size() + 1);
  return std::nullopt;
}

/// Kills all children, and as a sub-reaper thereby gets their children, until there are none.
void kill_all_descendants() {
  const Deadline deadline = Deadline::after(kSweepLimit);
  while (!deadline.passed()) {
    pid_t reaped = 0;
    while ((reaped = ::waitpid(-1, nullptr, WNOHANG)) > 0) {}
    if (reaped < 0 && errno == ECHILD) return;
    for (const pid_t pid : own_children()) ::kill(pid, SIGKILL);
    std::this_thread::sleep_for(milliseconds(2));
  }
  say("some processes of the job did not end on SIGKILL");
}

/// Descriptors 0, 1 and 2 exist, so that none of ours gets their numbers.
void open_standard_descriptors() {
  for (int fd = 0; fd <= 2; ++fd) {
    if (::fcntl(fd, F_GETFD) < 0) [[maybe_unused]]
      const int opened = ::open("/dev/null", O_RDWR);
  }
}

/// The signals that guard and supervisor read rather than suffer. One that our caller ignores (nohup) stays
/// ignored.
sigset_t signals_to_read() {
  sigset_t set;
  sigemptyset(&set);
  sigaddset(&set, SIGCHLD);
  for (const int number : kForwarded) {
    struct sigaction action {};
    if (::sigaction(number, nullptr, &action) == 0 && action.sa_handler != SIG_IGN) sigaddset(&set, number);
  }
  return set;
}

/// The cores of one rank: an equal share where there are enough, one of them in turn otherwise.
cpu_set_t share_of_cores(const cpu_set_t& usable, int rank, int ranks) {
  std::vector<int> cores;
  for (int core = 0; core < CPU_SETSIZE; ++core) {
    if (CPU_ISSET(core, &usable)) cores.push_back(core);
  }
  const int count = static_cast<int>(cores.size());
  const int first = ranks <= count ? rank * count / ranks : rank % count;
  const int last = ranks <= count ? (rank + 1) * count / ranks : first + 1;
  cpu_set_t share;
  CPU_ZERO(&share);
  for (int i = first; i < last; ++i) CPU_SET(cores[i], &share);
  return share;
}

std::string random_token() {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom", errno);
  return fmt::format("{:016x}", bits);
}

// ---- supervisor ----

class Supervisor {
 public:
  Supervisor(const LaunchOptions& options, const std::vector<std::string>& command,
             const sigset_t& ranks_mask, const sigset_t& to_read, int guard_pipe)
      : options_(options), command_(command), ranks_mask_(ranks_mask), guard_pipe_(guard_pipe) {
    signals_ = ::signalfd(-1, &to_read, SFD_CLOEXEC | SFD_NONBLOCK);
    if (signals_ < 0) throw_errno("signalfd", errno);
    ::signal(SIGPIPE, SIG_IGN);
    CPU_ZERO(&usable_);
    if (::sched_getaffinity(0, sizeof usable_, &usable_) != 0) throw_errno("sched_getaffinity", errno);
  }

  ~Supervisor() {  // whatever happened: nothing is left behind
    signal_groups(SIGKILL);
    kill_all_descendants();
    ::close(signals_);
  }
  Supervisor(const Supervisor&) = delete;
  Supervisor& operator=(const Supervisor&) = delete;

  int run() {
    for (int number = 0; number < options_.ranks; ++number) {
      int error_number = 0;
      try {
        error_number = start(number);
      } catch (const Error& e) {
        say(fmt::format("cannot start rank {} of {}: {}", number, options_.ranks, e.what()));
        return kNotExecutable;
      }
      if (error_number != 0) {
        const bool here = error_number == ENOENT && command_.front().find('/') == std::string::npos &&
                          ::access(command_.front().c_str(), X_OK) == 0;
        say(fmt::format("cannot start \"{}\": {}{}", command_.front(), system_words(error_number),
                        here ? fmt::format("; is ./{} meant?", command_.front()) : ""));
        return error_number == ENOENT ? kNotFound : kNotExecutable;
      }
    }
    if (options_.timeout > Duration::zero()) job_ends_ = Deadline::after(options_.timeout);
    watch();
    if (options_.keep_going && !exit_ && !one_ended_well_) exit_ = first_failure_;
    if (!exit_ && ended_as_requested_) exit_ = 128 + requested_;
    const bool lost = out_.error() != 0 || err_.error() != 0;
    return exit_.value_or(lost ? kOutputLost : 0);
  }

 private:
  struct Stream {
    Pipe pipe;
    LineCutter lines;
    Stream(std::string tag, bool shows_bars, Sink& sink) : lines(std::move(tag), shows_bars, sink) {}
  };

  struct Rank {
    int number = 0;
    pid_t pid = -1;
    bool running = false;
    bool blames_others = false;                      // its group failed because of other ranks, it says
    std::array<std::unique_ptr<Stream>, 2> streams;  // standard output and error
  };

  struct Failed {
    const Rank* rank = nullptr;
    int status = 0;
  };

  /// How far the end of the job has come.
  enum class Stage : std::uint8_t {
    running,
    noticed,     // a rank failed; the others may still say what they saw
    terminated,  // they were sent SIGTERM
    killed,      // and SIGKILL
  };

  // ---- starting ----

  std::vector<std::string> environment_of(int number) const {
    std::vector<std::pair<std::string_view, std::string>> ours{
        {"WEFT_RANK", fmt::to_string(number)},
        {"WEFT_WORLD_SIZE", fmt::to_string(options_.ranks)},
        {"WEFT_LOCAL_RANK", fmt::to_string(number)},
        {"WEFT_STORE", store_.address()},
        {"WEFT_JOB", job_},
        {"WEFT_LAUNCHER", notices_.name()},
        {"WEFT_TERMINAL", out_.terminal() ? "1" : "0"},
    };
    if (const auto columns = columns_of_a_line(number))
      ours.emplace_back("COLUMNS", fmt::to_string(*columns));
    if (!options_.backend.empty()) ours.emplace_back("WEFT_BACKEND", options_.backend);
    for (auto& variable : torch_.of(number)) ours.push_back(std::move(variable));
    std::vector<std::string> all;
    for (char** variable = environ; *variable != nullptr; ++variable) {
      const std::string_view name =
          std::string_view(*variable).substr(0, std::string_view(*variable).find('='));
      if (std::none_of(std::begin(ours), std::end(ours), [&](const auto& o) { return o.first == name; })) {
        all.emplace_back(*variable);
      }
    }
    for (const auto& [name, value] : ours) all.push_back(fmt::format("{}={}", name, value));
    return all;
  }

  std::string tag_of(int number) const { return options_.tag_output ? fmt::format("[{}] ", number) : ""; }

  /// What the terminal leaves of a line behind the rank's tag. Nothing where output does not go to one, or its
  /// width is not known.
  std::optional<int> columns_of_a_line(int number) const {
    if (!out_.terminal()) return std::nullopt;
    const auto columns = terminal_columns(STDOUT_FILENO);
    if (!columns) return std::nullopt;
    return std::max(1, *columns - static_cast<int>(tag_of(number).size()));
  }

  /// 0, or the errno of what could not be done.
  int start(int number) {
    ranks_.push_back(std::make_unique<Rank>());
    Rank& rank = *ranks_.back();
    rank.number = number;
    const std::string tag = tag_of(number);
    for (const int i : {0, 1}) {
      rank.streams[i] = std::make_unique<Stream>(tag, number == 0, i == 0 ? out_ : err_);
      ::fcntl(rank.streams[i]->pipe.read_end, F_SETFL, O_NONBLOCK);
    }
    // Everything the child needs is made before fork: it shares a moment of a process with threads.
    std::vector<std::string> words = command_;
    std::vector<std::string> environment = environment_of(number);
    std::vector<char*> argv;
    std::vector<char*> envp;
    for (auto& word : words) argv.push_back(word.data());
    for (auto& variable : environment) envp.push_back(variable.data());
    argv.push_back(nullptr);
    envp.push_back(nullptr);
    const cpu_set_t cores = options_.bind_cores ? share_of_cores(usable_, number, options_.ranks) : usable_;
    // Rank 0 reads what we are given, but not from a terminal, which only its foreground processes may read.
    const bool reads = number == 0 && ::isatty(STDIN_FILENO) == 0;
    Pipe failure;  // closed by a good exec, else receives errno
    const pid_t supervisor = ::getpid();
    const pid_t pid = ::fork();
    if (pid < 0) return errno;
    if (pid == 0) {
      ::setpgid(0, 0);
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != supervisor) ::_exit(1);  // it died before the line above
      if (!reads) {
        const int null = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
        if (null >= 0) ::dup2(null, STDIN_FILENO);
      }
      if (::dup2(rank.streams[0]->pipe.write_end, STDOUT_FILENO) >= 0 &&
          ::dup2(rank.streams[1]->pipe.write_end, STDERR_FILENO) >= 0 &&
          (!options_.bind_cores || ::sched_setaffinity(0, sizeof cores, &cores) == 0)) {
        ::signal(SIGPIPE, SIG_DFL);
        ::sigprocmask(SIG_SETMASK, &ranks_mask_, nullptr);
        ::execvpe(argv[0], argv.data(), envp.data());
      }
      const int error_number = errno;
      [[maybe_unused]] const auto written = ::write(failure.write_end, &error_number, sizeof error_number);
      ::_exit(kNotFound);
    }
    ::setpgid(pid, pid);  // whoever comes first; the child may have done so and be beyond exec
    rank.pid = pid;
    rank.running = true;
    for (auto& stream : rank.streams) Pipe::close(stream->pipe.write_end);
    Pipe::close(failure.write_end);
    int error_number = 0;
    ssize_t got = 0;
    do {
      got = ::read(failure.read_end, &error_number, sizeof error_number);
    } while (got < 0 && errno == EINTR);
    return got == sizeof error_number ? error_number : 0;
  }

  // ---- watching ----

  // Ends when no process of the job is left and its output is out, or nobody is there to read it.
  void watch() {
    Deadline drained = Deadline::never();
    bool swept = false;
    for (;;) {
      if (!swept && none_runs()) {
        kill_all_descendants();
        swept = true;
        drained = Deadline::after(kDrainLimit);
      }
      const bool over = swept && (all_streams_ended() || drained.passed());
      if (over) {
        for (auto& rank : ranks_) {
          for (auto& stream : rank->streams) end(*stream);
        }
        out_.finish();
        err_.finish();
        if ((out_.empty() && err_.empty()) || abandoned_) return;
      }
      const Deadline next = std::min({job_ends_, next_step_, judgement_},
                                     [](Deadline a, Deadline b) { return a.when() < b.when(); });
      poll_once(over ? Deadline::never() : swept ? drained : next);
      if (abandoned_ && swept) {
        out_.drop();
        err_.drop();
      }
      advance();
    }
  }

  void poll_once(Deadline until) {
    std::vector<pollfd> polled;
    std::vector<Stream*> streams;
    polled.push_back({signals_, POLLIN, 0});
    polled.push_back({guard_gone_ ? -1 : guard_pipe_, 0, 0});  // POLLHUP comes unasked
    for (Sink* sink : {&out_, &err_}) {
      polled.push_back({sink->empty() ? -1 : sink->fd(), POLLOUT, 0});
    }
    polled.push_back({notices_.fd(), POLLIN, 0});
    const std::size_t first_stream = polled.size();
    for (auto& rank : ranks_) {
      for (auto& stream : rank->streams) {
        if (stream->pipe.read_end < 0 || stream->lines.sink().full()) continue;
        polled.push_back({stream->pipe.read_end, POLLIN, 0});
        streams.push_back(stream.get());
      }
    }
    // In pieces where there is a time to come: a job that is suspended is not late.
    const bool timed = until.when() != Clock::time_point::max();
    const auto left =
        std::chrono::ceil<milliseconds>(timed ? std::min(until.left(), kWaitPiece) : until.left());
    {
      const TimedWait wait(left);
      if (::poll(polled.data(), polled.size(), static_cast<int>(left.count())) < 0 && errno != EINTR)
        throw_errno("poll", errno);
    }
    // Each time beginning with another one: where a sink takes little, all ranks get their share of it.
    ++turn_;
    for (std::size_t k = 0; k < streams.size(); ++k) {
      const std::size_t i = (k + turn_) % streams.size();
      if (polled[i + first_stream].revents != 0 && !streams[i]->lines.sink().full()) read(*streams[i]);
    }
    take_notices();
    flush(out_, "standard output");
    flush(err_, "standard error");
    if (polled[1].revents != 0) {
      guard_gone_ = true;
      abandon();
    }
    if (polled[0].revents != 0) take_signals();
  }

  /// Writes what can be. A write that fails is told once, where that can still be read.
  void flush(Sink& sink, std::string_view what) {
    const bool well = sink.error() == 0;
    sink.flush();
    if (well && sink.error() != 0)
      report(fmt::format("cannot write {}: {}; what the ranks write there is lost from here on", what,
                         system_words(sink.error())));
  }

  /// How many bytes came.
  std::size_t read(Stream& stream) {
    const ssize_t got = ::read(stream.pipe.read_end, buffer_.data(), buffer_.size());
    if (got > 0) {
      stream.lines.feed({buffer_.data(), static_cast<std::size_t>(got)});
    } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
      end(stream);
    }
    return static_cast<std::size_t>(std::max<ssize_t>(got, 0));
  }

  /// What has been written so far: all that a rank which has failed will write. Others may hold its pipe, and
  /// go on.
  void drain(Stream& stream) {
    int waiting = 0;
    if (stream.pipe.read_end < 0 || ::ioctl(stream.pipe.read_end, FIONREAD, &waiting) != 0) return;
    for (auto left = static_cast<std::size_t>(std::max(waiting, 0)); left > 0 && stream.pipe.read_end >= 0;) {
      const std::size_t got = read(stream);
      if (got == 0) return;
      left -= std::min(left, got);
    }
  }

  static void end(Stream& stream) {
    if (stream.pipe.read_end < 0) return;
    stream.lines.finish();
    Pipe::close(stream.pipe.read_end);
  }

  void take_signals() {
    signalfd_siginfo info{};
    while (::read(signals_, &info, sizeof info) == sizeof info) {
      const int number = static_cast<int>(info.ssi_signo);
      if (number == SIGCHLD) continue;  // reaped below; several may have become one
      forward(number);
      if (number == SIGINT || number == SIGTERM) end_requested(number);
    }
    reap();
  }

  /// The ranks may take their time after a first SIGINT or SIGTERM; who sends a second one is not willing to
  /// wait.
  void end_requested(int number) {
    const auto now = Clock::now();
    if (!first_request_) {
      first_request_ = now;
      requested_ = number;
    } else if (now - *first_request_ > kSameRequest) {
      if (none_runs()) abandoned_ = true;  // only output nobody reads is left
      if (stage_ == Stage::running || stage_ == Stage::noticed) terminate();
    }
  }

  void take_notices() {
    for (int number = 0; (number = notices_.next(job_)) >= 0;)
      if (static_cast<std::size_t>(number) < ranks_.size())
        ranks_[static_cast<std::size_t>(number)]->blames_others = true;
  }

  // Looks at each child that has ended before it is reaped: as long as it is not, its process group cannot be
  // another's, and what is left of the group is killed.
  void reap() {
    std::vector<std::pair<Rank*, int>> ended;
    for (;;) {
      siginfo_t info{};
      if (::waitid(P_ALL, 0, &info, WEXITED | WNOHANG | WNOWAIT) != 0 || info.si_pid == 0) break;
      const auto at =
          std::find_if(ranks_.begin(), ranks_.end(), [&](const auto& r) { return r->pid == info.si_pid; });
      if (at != ranks_.end()) ::kill(-info.si_pid, SIGKILL);
      int status = 0;
      if (::waitpid(info.si_pid, &status, 0) != info.si_pid) break;
      if (at == ranks_.end()) continue;  // an orphan of a rank
      (*at)->running = false;
      ended.emplace_back(at->get(), status);
    }
    end_orphans();
    if (exit_) return;
    for (const auto& [rank, status] : ended) {
      // Asked to end, it did so in good order, and the others may take their time.
      if (requested_ != 0 && WIFEXITED(status) && WEXITSTATUS(status) == 128 + requested_) {
        ended_as_requested_ = true;
        continue;
      }
      one_ended_well_ |= status == 0;
      if (stage_ == Stage::running && (status == 0 || options_.keep_going)) tell_of_end(*rank, status);
      if (status == 0) continue;
      if (options_.keep_going && stage_ == Stage::running) {
        report(fmt::format("rank {} (pid {}) failed: {}; the others go on", rank->number, rank->pid,
                           how_it_ended(status)));
        if (!first_failure_) first_failure_ = exit_status(status);
        continue;
      }
      if (failed_.empty()) judgement_ = Deadline::after(std::min(kJudgement, options_.notice));
      failed_.push_back({rank, status});
      if (stage_ == Stage::running) {
        stage_ = Stage::noticed;
        next_step_ = Deadline::after(options_.notice);
        if (env::get("WEFT_TRACE")) ask_for_traces();
      }
    }
    if (!failed_.empty()) judge(false);
  }

  /// Tells the ranks that still run of one that has ended: those that wait for it to join need wait no longer.
  void tell_of_end(const Rank& rank, int status) {
    if (none_runs()) return;
    ended_.push_back({rank.number, how_it_ended(status)});
    try {
      if (client_ == nullptr)
        client_ = make_tcp_store("127.0.0.1", store_.port(), Deadline::after(kStoreLimit));
      client_->set(fmt::format("{}/{}", job_, kEndedKey), encode_ended(ended_), Deadline::after(kStoreLimit));
    } catch (const Error&) {  // they wait until their deadline
    }
  }

  /// Names the rank that failed first, as soon as it is known, at the latest when `late`. The kernel does not
  /// tell in which order processes ended, and a survivor may well be gone before the one that it fails
  /// because of. So: one killed by a signal that cannot be a consequence; else one that does not blame others;
  /// among equals, the one that was found first.
  void judge(bool late) {
    take_notices();  // sent before the rank ended
    const auto by_itself = [](const Failed& f) {
      return cannot_be_a_consequence(f.status) ? 2 : f.rank->blames_others ? 0 : 1;
    };
    const auto first =
        std::max_element(failed_.begin(), failed_.end(),
                         [&](const Failed& a, const Failed& b) { return by_itself(a) < by_itself(b); });
    if (by_itself(*first) < 2 && !late && !none_runs()) return;
    if (by_itself(*first) == 0 && stage_ == Stage::noticed && !next_step_.passed() && !none_runs()) {
      judgement_ = next_step_;
      return;
    }
    judgement_ = Deadline::never();
    const auto& [rank, status] = *first;
    report(
        fmt::format("rank {} (pid {}) was first to fail: {}", rank->number, rank->pid, how_it_ended(status)));
    Stream& errors = *rank->streams[1];
    drain(errors);
    if (!errors.lines.last().empty())
      report(fmt::format("rank {} said last: {}", rank->number, errors.lines.last()));
    exit_ = exit_status(status);
  }

  /// Ends what a rank that has ended left outside of its process group: it is our child then, and has the
  /// rank's variables. Each that ends gives us its own children, and SIGCHLD, by which this is called again.
  void end_orphans() {
    if (none_runs()) return;  // all go then
    for (const pid_t pid : own_children()) {
      if (std::any_of(ranks_.begin(), ranks_.end(),
                      [&](const auto& r) { return r->running && r->pid == pid; }))
        continue;
      if (variable_of(pid, "WEFT_JOB") != job_) continue;
      const auto number = parse_integer<std::size_t>(variable_of(pid, "WEFT_RANK").value_or(""));
      if (number && *number < ranks_.size() && !ranks_[*number]->running) ::kill(pid, SIGKILL);
    }
  }

  // ---- ending ----

  void advance() {
    if (job_ends_.passed()) expire();
    if (judgement_.passed()) {
      judgement_ = Deadline::never();
      if (!exit_) judge(true);
    }
    if (!next_step_.passed()) return;
    switch (stage_) {
      case Stage::noticed: return terminate();
      case Stage::terminated:
        for (const auto& rank : ranks_) {
          if (!rank->running) continue;
          report(fmt::format("rank {} (pid {}) did not end within {:.1f} s of SIGTERM: killed", rank->number,
                             rank->pid, std::chrono::duration<double>(options_.grace).count()));
        }
        return kill_ranks();
      case Stage::running:
      case Stage::killed: next_step_ = Deadline::never(); return;
    }
  }

  /// The job's time is over.
  void expire() {
    job_ends_ = Deadline::never();
    if (stage_ != Stage::running) return;  // it is ending already
    std::string still;
    for (const auto& rank : ranks_)
      if (rank->running)
        still += fmt::format("{}rank {} (pid {})", still.empty() ? "" : ", ", rank->number, rank->pid);
    if (still.empty()) return;
    report(fmt::format("the job did not end within {:g} s: {} still ran",
                       std::chrono::duration<double>(options_.timeout).count(), still));
    exit_ = kTimedOut;
    stage_ = Stage::noticed;
    next_step_ = Deadline::after(options_.notice);
    if (env::get("WEFT_TRACE")) ask_for_traces();
  }

  void terminate() {
    signal_groups(SIGTERM);
    signal_groups(SIGCONT);  // a stopped rank takes SIGTERM only once it goes on
    stage_ = Stage::terminated;
    next_step_ = Deadline::after(options_.grace);
  }

  void kill_ranks() {
    signal_groups(SIGKILL);
    stage_ = Stage::killed;
    next_step_ = Deadline::never();
  }

  /// The guard was killed: nobody waits for the job any more.
  void abandon() {
    abandoned_ = true;
    exit_ = 128 + SIGKILL;
    kill_ranks();
  }

  void signal_groups(int number) {
    for (const auto& rank : ranks_) {
      if (rank->running) ::kill(-rank->pid, number);
    }
  }

  /// A signal that was sent to us. What asks to end goes to all a rank has started, as from a terminal.
  /// SIGUSR1 and SIGUSR2 go to the rank itself: they would kill helpers that do not know them.
  void forward(int number) {
    const bool for_all = number != SIGUSR1 && number != SIGUSR2;
    for (const auto& rank : ranks_) {
      if (rank->running) ::kill(for_all ? -rank->pid : rank->pid, number);
    }
  }

  // Ranks that are about to be ended may not have noticed what went wrong, and the trace of the late one is the one
  // that matters.
  void ask_for_traces() {
    for (const auto& rank : ranks_)
      if (rank->running && catches(rank->pid, SIGUSR2)) ::kill(rank->pid, SIGUSR2);
  }
  /// False, too, for a program that does not use weft: the signal would end it.
  static bool catches(pid_t pid, int number) {
    std::ifstream status(fmt::format("/proc/{}/status", pid));
    for (std::string word; status >> word;) {
      unsigned long long caught = 0;
      if (word == "SigCgt:") return (status >> std::hex >> caught) && ((caught >> (number - 1)) & 1) != 0;
    }
    return false;
  }

  void report(std::string_view text) { err_.add_line("weft run: ", text); }

  bool none_runs() const {
    return std::none_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return r->running; });
  }
  bool all_streams_ended() const {
    return std::all_of(ranks_.begin(), ranks_.end(), [](const auto& r) {
      return r->streams[0]->pipe.read_end < 0 && r->streams[1]->pipe.read_end < 0;
    });
  }

  const LaunchOptions& options_;
  const std::vector<std::string>& command_;
  const sigset_t ranks_mask_;
  const int guard_pipe_;
  int signals_ = -1;
  cpu_set_t usable_;
  Logger log_;
  TcpStoreServer store_{log_};
  std::shared_ptr<Store> client_;  // of that server; null: not needed yet
  std::vector<EndedRank> ended_;
  LauncherNotices notices_;
  const std::string job_ = random_token();
  const TorchVariables torch_{options_.ranks};
  Screen screen_;
  Sink out_{STDOUT_FILENO, screen_};
  Sink err_{STDERR_FILENO, screen_};
  std::vector<std::unique_ptr<Rank>> ranks_;
  std::vector<char> buffer_ = std::vector<char>(64 * 1024);  // not on the stack, which may be small
  std::size_t turn_ = 0;
  Stage stage_ = Stage::running;
  Deadline next_step_ = Deadline::never();
  Deadline job_ends_ = Deadline::never();
  Deadline judgement_ = Deadline::never();  // when the first failure is named
  std::vector<Failed> failed_;              // in the order in which they were found, until then
  std::optional<Clock::time_point> first_request_;
  int requested_ = 0;  // SIGINT or SIGTERM, once one was passed on
  bool ended_as_requested_ = false;
  bool guard_gone_ = false;
  bool abandoned_ = false;
  bool one_ended_well_ = false;
  std::optional<int> first_failure_;  // of those that the others have outlived
  std::optional<int> exit_;           // the first failure's, once there is one
};

int supervise(const LaunchOptions& options, const std::vector<std::string>& command,
              const sigset_t& ranks_mask, const sigset_t& to_read, int guard_pipe) {
  try {
    return Supervisor(options, command, ranks_mask, to_read, guard_pipe).run();
  } catch (const std::exception& e) {
    say(e.what());
    return 1;
  }
}

// ---- guard ----

int guard(pid_t supervisor, const sigset_t& to_read) {
  for (;;) {
    siginfo_t info{};
    const int number = ::sigwaitinfo(&to_read, &info);
    if (number > 0 && number != SIGCHLD) ::kill(supervisor, number);
    int status = 0;
    if (number != SIGCHLD || ::waitpid(supervisor, &status, WNOHANG) != supervisor) continue;
    if (WIFSIGNALED(status)) {
      say(fmt::format("the supervisor (pid {}) was {}", supervisor, how_it_ended(status)));
    }
    kill_all_descendants();
    return exit_status(status);
  }
}

}  // namespace

int launch(const LaunchOptions& options, const std::vector<std::string>& command) {
  open_standard_descriptors();
  std::fflush(nullptr);
  ::signal(SIGCHLD, SIG_DFL);  // a caller that ignores it would have the kernel reap for us
  const sigset_t to_read = signals_to_read();
  sigset_t mask_before;
  ::sigprocmask(SIG_BLOCK, &to_read, &mask_before);
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  Pipe guard_alive;
  const pid_t pid = ::fork();
  if (pid < 0) throw_errno("weft run: fork", errno);
  if (pid == 0) {
    Pipe::close(guard_alive.write_end);
    ::setpgid(0, 0);  // a terminal's Ctrl-C goes to the guard alone, which forwards it
    ::prctl(PR_SET_CHILD_SUBREAPER, 1);
    const int code = supervise(options, command, mask_before, to_read, guard_alive.read_end);
    std::fflush(nullptr);
    ::_exit(code);
  }
  const int code = guard(pid, to_read);
  ::sigprocmask(SIG_SETMASK, &mask_before, nullptr);
  return code;
}

}  // namespace weft::tools
