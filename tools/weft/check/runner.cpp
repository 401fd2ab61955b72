// The watcher of a program. It starts the ranks, sees which ranks die or stop, notifies the others which
// ranks are left, resumes stopped ranks, and kills processes that do not end by themselves.
#include "runner.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <memory>
#include <optional>
#include <thread>

#include "base/text/plain_streams.hpp"
#include "faults/strike.hpp"
#include "weft/base/env.hpp"
#include "weft/store/tcp.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;

constexpr auto kTick = milliseconds(1);
constexpr auto kPause = milliseconds(120);    // how long a paused rank stays stopped
constexpr auto kOverdue = milliseconds(600);  // beyond the deadline: how long a suspended job is stopped
constexpr auto kEnd = seconds(15);            // for ranks to end once all is said
constexpr auto kEnding = milliseconds(500);   // for a process that was asked to end
constexpr auto kTermination = seconds(3);     // for mpirun, that was sent SIGTERM

int count_descriptors() {
  int count = -1;  // the folder itself is open while it is read
  for ([[maybe_unused]] const auto& entry : std::filesystem::directory_iterator("/proc/self/fd")) ++count;
  return count;
}

int count_segments() {
  FileIn maps("/proc/self/maps");
  int count = 0;
  for (std::string line; std::getline(maps, line);) count += line.find("memfd:weft") != std::string::npos;
  return count;
}

// The state of a process, a letter as in /proc/<pid>/stat, and its parent.
struct Stat {
  char state = 0;
  int parent = 0;
};
Stat stat_of(int pid) {
  FileIn file(fmt::format("/proc/{}/stat", pid));
  std::string text;
  Stat s;
  if (!std::getline(file, text)) return s;
  const std::size_t end = text.rfind(')');
  if (end == std::string::npos || std::sscanf(text.c_str() + end + 1, " %c %d", &s.state, &s.parent) != 2)
    return {};
  return s;
}

// Reaps the children that have ended. Returns false if there are none at all.
bool reap() {
  pid_t reaped = 0;
  while ((reaped = ::waitpid(-1, nullptr, WNOHANG)) > 0) {}
  return reaped == 0 || errno != ECHILD;
}

// Children of this process, their sub-reaper, that have not ended.
std::vector<int> children() {
  std::vector<int> pids;
  for (const auto& entry : std::filesystem::directory_iterator("/proc")) {
    const int pid = std::atoi(entry.path().filename().c_str());
    if (pid <= 0) continue;
    const Stat s = stat_of(pid);
    if (s.parent == ::getpid() && s.state != 'Z' && s.state != 'X') pids.push_back(pid);
  }
  return pids;
}

// Kills the remaining descendants of this process, and returns which these were. mpirun does not wait for the
// ranks that it ends. A rank that ends within kEnding does not count as remaining.
std::string kill_descendants() {
  for (const Deadline limit = Deadline::after(kEnding); !limit.passed();) {
    if (!reap()) return {};
    std::this_thread::sleep_for(kTick);
  }
  std::string found;
  for (const Deadline limit = Deadline::after(seconds(5)); !limit.passed() && reap();) {
    for (const int pid : children()) {
      const std::string who = fmt::format("process {} (", pid);
      const Stat s = stat_of(pid);
      if (::kill(pid, SIGKILL) == 0 && found.find(who) == std::string::npos)
        found += fmt::format("{}{}state {})", found.empty() ? "" : ", ", who, s.state);
    }
    std::this_thread::sleep_for(milliseconds(2));
  }
  return found;
}

// Checks lines of the log that a program must produce; errors go to stderr.
LogSink listener(ProcessReport& report) {
  return [&report](LogLevel level, std::string_view line) {
    const auto has = [&](std::string_view text) { return line.find(text) != std::string_view::npos; };
    if (has("mismatch, found when the group was left")) report.warned_of_difference.store(true);
    if (has("dropped the Work of a call in flight")) report.warned_of_drop.store(true);
    if (level == LogLevel::error)
      std::fprintf(stderr, "weft error: %.*s\n", static_cast<int>(line.size()), line.data());
  };
}

// One process of a program: the ranks that run in it, as threads.
int run_home(const Program& p, int home, const Settings& settings, SharedReport& shared) {
  ProcessReport& report = shared.processes[home];
  std::vector<int> mine;
  for (int r = 0; r < p.ranks(); ++r)
    if (p.homes[static_cast<std::size_t>(r)] == home) mine.push_back(r);
  for (const int r : mine) shared.ranks[r].pid.store(::getpid());
  const bool alone = p.processes() == 1;
  while (!alone && shared.port.load() == 0) std::this_thread::sleep_for(std::chrono::microseconds(200));
  report.descriptors_before = count_descriptors();
  {
    ContextOptions options;
    options.log_level = LogLevel::warning;
    options.log_sink = listener(report);
    Context context(options);
    const std::shared_ptr<Store> store =
        alone ? make_local_store()
              : make_tcp_store("127.0.0.1", static_cast<std::uint16_t>(shared.port.load() - 1),
                               Deadline::after(seconds(20)));
    const auto rank = [&](int r) {
      Membership m;
      m.store = store;
      m.rank = r;
      m.size = p.ranks();
      m.name = "program";
      try {
        run_rank(p, r, context, m, settings, shared);
      } catch (const std::exception& e) {
        shared.ranks[r].untyped.set(e.what());
      }
    };
    std::vector<std::thread> threads;
    for (std::size_t i = 1; i < mine.size(); ++i) threads.emplace_back(rank, mine[i]);
    rank(mine[0]);
    for (std::thread& t : threads) t.join();
  }
  report.descriptors_after = count_descriptors();
  report.segments_after = count_segments();
  report.counted = true;
  return 0;
}

// Watches one program; call this again and again until over().
class Watch {
 public:
  Watch(const Program& p, const Settings& settings, SharedReport& shared)
      : p_(p), settings_(settings), shared_(shared), victim_(p.fault.rank), began_(now_ns()), last_(began_) {
    shared.began = began_;
    shared.ran = true;
    const Duration call = settings.call_deadline(p), group = settings.group_deadline(p);
    // Steps of several groups may wait one after the other. Then quiesce() and the new group need time.
    limit_ = std::chrono::nanoseconds(2 * (call + group) + seconds(20)).count();
  }

  void look() {
    const std::int64_t now = now_ns();
    const std::int64_t late = now - last_ - std::chrono::nanoseconds(kTick).count();
    shared_.late_ns = std::max(shared_.late_ns, late);
    last_ = now;
    limit_ += std::max<std::int64_t>(late, 0);
    resume(now);
    decide();
    if (shared_.survivors.load() != 0 && !shared_.late_over.load() && reused()) let_go();
    kill_stopped();
    if (!over_ && now - began_ > limit_) hang();
  }

  /// Records that the process of these ranks has ended.
  void ended(int home, std::int64_t when) {
    for (int r = 0; r < p_.ranks(); ++r)
      if (p_.homes[static_cast<std::size_t>(r)] == home) gone_ |= 1u << r;
    if (row(p_).takes_process && home == p_.homes[static_cast<std::size_t>(victim_)] && shared_.died_at == 0)
      shared_.died_at = when;
  }
  void all_ended() { gone_ = ~0u; }

  bool done() const {
    for (int r = 0; r < p_.ranks(); ++r)
      if ((gone_ >> r & 1u) == 0 && shared_.ranks[r].phase.load() != Phase::done) return false;
    return true;
  }
  bool gave_up() const { return over_; }

 private:
  bool with_victim(int r) const {
    return p_.homes[static_cast<std::size_t>(r)] == p_.homes[static_cast<std::size_t>(victim_)];
  }
  bool victim_taken() const {
    return row(p_).takes_process && shared_.ranks[victim_].struck.load() &&
           ((gone_ >> victim_ & 1u) != 0 || stopped());
  }
  bool stopped() const {
    const int pid = shared_.ranks[victim_].pid.load();
    return pid > 0 && stat_of(pid).state == 'T';
  }

  // A paused rank resumes by itself, a suspended job as a whole.
  void resume(std::int64_t now) {
    const bool all = row(p_).stopped == Stopped::with_all;
    if (row(p_).stopped != Stopped::for_a_moment && !all) return;
    if (resumed_ || !shared_.ranks[victim_].struck.load()) return;
    if (stopped_at_ == 0 && stopped()) {
      stopped_at_ = now;
      if (all) signal_all(SIGSTOP);
    }
    const Duration span = all ? Duration(settings_.call_deadline(p_) + kOverdue) : kPause;
    if (stopped_at_ == 0 || now - stopped_at_ < span.count()) return;
    if (all) signal_all(SIGCONT);
    ::kill(shared_.ranks[victim_].pid.load(), SIGCONT);
    resumed_ = true;
  }

  void signal_all(int number) {
    for (int r = 0; r < p_.ranks(); ++r)
      if (const int pid = shared_.ranks[r].pid.load(); pid > 0 && (gone_ >> r & 1u) == 0) ::kill(pid, number);
  }

  // Decides which ranks survive: all ranks that have settled, once every rank has settled or is lost.
  void decide() {
    if (shared_.survivors.load() != 0) return;
    if (p_.fault.kind == FaultKind::none) {
      bool failed = false;
      for (int r = 0; r < p_.ranks(); ++r)
        failed = failed || shared_.ranks[r].has_error || !shared_.ranks[r].untyped.empty();
      if (!failed) return;
    }
    std::uint32_t left = 0;
    const bool taken = victim_taken();
    for (int r = 0; r < p_.ranks(); ++r) {
      if (taken && with_victim(r)) continue;
      if ((gone_ >> r & 1u) != 0) continue;
      if (shared_.ranks[r].phase.load() < Phase::settled) return;
      left |= 1u << r;
    }
    const bool lost = taken && !(settings_.traits.guarantees.survives_death);
    shared_.survivors.store(left | SharedReport::kDecided | (lost ? 0 : SharedReport::kPromised));
  }

  bool reused() const {
    for (int r = 0; r < p_.ranks(); ++r)
      if ((shared_.survivors.load() >> r & 1u) != 0 && (gone_ >> r & 1u) == 0 &&
          shared_.ranks[r].phase.load() < Phase::reused)
        return false;
    return true;
  }

  // Kills the rank that was stopped for good when the others need no more time.
  void kill_stopped() {
    if (row(p_).stopped != Stopped::for_good || killed_ || !shared_.late_over.load()) return;
    if ((shared_.survivors.load() >> victim_ & 1u) != 0) return;  // it was never struck
    for (int r = 0; r < p_.ranks(); ++r)
      if ((shared_.survivors.load() >> r & 1u) != 0 && (gone_ >> r & 1u) == 0 &&
          shared_.ranks[r].phase.load() != Phase::done)
        return;
    if (const int pid = shared_.ranks[victim_].pid.load(); pid > 0 && (gone_ >> victim_ & 1u) == 0)
      ::kill(pid, SIGKILL);
    killed_ = true;
  }

  // Resumes the stopped rank, whose target memory has been reused meanwhile.
  void let_go() {
    const int pid = shared_.ranks[victim_].pid.load();
    const bool resumes = row(p_).stopped == Stopped::until_reused;
    if (resumes && !resumed_ && (gone_ >> victim_ & 1u) == 0 && pid > 0 && stopped()) {
      ::kill(pid, SIGCONT);
      resumed_ = true;
    }
    const bool awaited = resumes && resumed_ && (gone_ >> victim_ & 1u) == 0 &&
                         shared_.ranks[victim_].phase.load() < Phase::done;
    if (!awaited) shared_.late_over.store(true);
  }

  void hang() {
    over_ = true;
    std::string who;
    for (int r = 0; r < p_.ranks(); ++r)
      if ((gone_ >> r & 1u) == 0 && shared_.ranks[r].phase.load() != Phase::done)
        who += fmt::format("{}rank {} at step {} ({})", who.empty() ? "" : ", ", r,
                           shared_.ranks[r].step.load(), name(shared_.ranks[r].phase.load()));
    shared_.trouble.set(
        fmt::format("hangs after {:.1f} s: {}", static_cast<double>(now_ns() - began_) * 1e-9, who));
  }

  const Program& p_;
  const Settings& settings_;
  SharedReport& shared_;
  const int victim_;
  const std::int64_t began_;
  std::int64_t last_, limit_ = 0, stopped_at_ = 0;
  std::uint32_t gone_ = 0;
  bool resumed_ = false, killed_ = false, over_ = false;
};

void note_leftovers(SharedReport& shared, const char* whose) {
  const std::string left = kill_descendants();
  if (!left.empty() && shared.trouble.empty()) shared.trouble.set(fmt::format("{} left: {}", whose, left));
}

}  // namespace

std::string_view name(Phase phase) noexcept {
  constexpr std::string_view kNames[] = {"absent",           "running", "failed", "settled",
                                         "in the new group", "waiting", "done"};
  return kNames[static_cast<std::size_t>(phase)];
}

void run_program(const Program& p, const Settings& settings, SharedReport& shared) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const pid_t self = ::getpid();
  std::vector<pid_t> children;
  for (int home = 0; home < p.processes(); ++home) {
    const pid_t pid = ::fork();
    if (pid < 0) throw_errno("check: fork", errno);
    if (pid == 0) {
      ::prctl(PR_SET_PDEATHSIG, SIGKILL);
      if (::getppid() != self) ::_exit(1);
      int code = 1;
      try {
        code = run_home(p, home, settings, shared);
      } catch (const std::exception& e) {
        for (int r = 0; r < p.ranks(); ++r)
          if (p.homes[static_cast<std::size_t>(r)] == home) shared.ranks[r].untyped.set(e.what());
      }
      ::_exit(code);
    }
    children.push_back(pid);
  }
  {
    Logger log(LogLevel::error);
    std::unique_ptr<TcpStoreServer> server;
    if (p.processes() > 1) {
      TcpStoreOptions options;
      options.linger = Duration::zero();
      server = std::make_unique<TcpStoreServer>(log, options);
      shared.port.store(server->port() + 1);
    }
    Watch watch(p, settings, shared);
    std::size_t running = children.size();
    while (running > 0 && !watch.gave_up()) {
      std::this_thread::sleep_for(kTick);
      watch.look();
      for (std::size_t home = 0; home < children.size(); ++home) {
        int status = 0;
        if (children[home] == 0 || ::waitpid(children[home], &status, WNOHANG) != children[home]) continue;
        children[home] = 0;
        shared.statuses[home] = status;
        watch.ended(static_cast<int>(home), now_ns());
        --running;
      }
    }
    for (std::size_t home = 0; home < children.size(); ++home) {
      if (children[home] == 0) continue;
      ::kill(children[home], SIGKILL);
      ::waitpid(children[home], nullptr, 0);
      shared.statuses[home] = -1;
    }
    shared.ended = now_ns();
  }
  note_leftovers(shared, "the program");
}

namespace {

std::string file_of(int fd) { return fmt::format("/proc/{}/fd/{}", ::getpid(), fd); }

// A memfd with the programs, one per line.
int write_programs(const std::vector<Program>& programs) {
  const int fd = ::memfd_create("check-programs", 0);
  if (fd < 0) throw_errno("check: memfd_create", errno);
  for (const Program& p : programs) {
    const std::string line = encode(p) + "\n";
    if (::write(fd, line.data(), line.size()) != static_cast<ssize_t>(line.size()))
      throw_errno("check: write", errno);
  }
  return fd;
}

[[noreturn]] void become_mpirun(std::vector<std::string>& words) {
  const int nowhere = ::open("/dev/null", O_RDWR);
  ::dup2(nowhere, 0);
  if (!env::get("WEFT_CHECK_SHOW_MPIRUN")) {
    ::dup2(nowhere, 1);
    ::dup2(nowhere, 2);
  }
  ::setenv("OMPI_MCA_mpi_yield_when_idle", "1", 1);
  ::setenv("OMPI_MCA_rmaps_base_oversubscribe", "1", 1);
  std::vector<char*> argv;
  for (std::string& w : words) argv.push_back(w.data());
  argv.push_back(nullptr);
  ::execvp(argv[0], argv.data());
  ::_exit(127);
}

// The mpirun of a job.
class Mpirun {
 public:
  Mpirun(int ranks, const Settings& settings, int programs_fd, int reports_fd) {
    const auto seconds_of = [](Duration d) {
      return fmt::format("{}", std::chrono::duration<double>(d).count());
    };
    std::vector<std::string> words = settings.mpirun;
    for (const std::string& more :
         {std::string("-n"), std::to_string(ranks), settings.self, std::string("check"),
          std::string("--backend"), settings.backend, std::string("--patience"),
          seconds_of(settings.patience), std::string("--deadline"), seconds_of(settings.deadline),
          std::string("--programs-file"), file_of(programs_fd), std::string("--reports-file"),
          file_of(reports_fd)})
      words.push_back(more);
    const pid_t self = ::getpid();
    pid_ = ::fork();
    if (pid_ < 0) throw_errno("check: fork", errno);
    if (pid_ > 0) return;
    ::prctl(PR_SET_PDEATHSIG, SIGKILL);
    if (::getppid() != self) ::_exit(1);
    become_mpirun(words);
  }
  /// Returns whether ended() has found that it has ended.
  bool known_ended() const { return ended_; }
  /// Returns whether it has ended, by now or until the limit.
  bool ended() {
    if (!ended_) ended_ = ::waitpid(pid_, &status_, WNOHANG) == pid_;
    return ended_;
  }
  bool ended_within(Duration limit) {
    for (const Deadline end = Deadline::after(limit); !ended() && !end.passed();)
      std::this_thread::sleep_for(kTick);
    return ended_;
  }
  void end() { ::kill(pid_, SIGTERM); }
  int status() const { return status_; }

 private:
  pid_t pid_ = -1;
  bool ended_ = false;
  int status_ = 0;
};

// Watches one program of the job. Returns false if the ranks come to no other program.
bool watch_program(const Program& p, const Settings& settings, SharedReport& report, Mpirun& mpirun) {
  // The clock starts when the first rank arrives.
  const auto absent = [&] { return report.ranks[0].phase.load() == Phase::absent; };
  for (const Deadline start = Deadline::after(seconds(60)); absent() && !mpirun.ended() && !start.passed();)
    std::this_thread::sleep_for(kTick);
  if (absent()) {
    report.trouble.set(
        mpirun.known_ended()
            ? fmt::format("mpirun ended with status {} before the ranks began", mpirun.status())
            : "the ranks did not begin within 60 s");
    report.ran = true;
    return false;
  }
  Watch watch(p, settings, report);
  while (!watch.done() && !watch.gave_up()) {
    std::this_thread::sleep_for(kTick);
    watch.look();
    if (mpirun.known_ended() || !mpirun.ended()) continue;
    report.died_at = now_ns();
    report.job_ended = !watch.done();
    watch.all_ended();
  }
  report.ended = now_ns();
  report.job_status = mpirun.status();
  report.released.store(true);
  return !watch.gave_up() && !mpirun.known_ended();
}

}  // namespace

void run_job(const std::vector<Program>& programs, const Settings& settings, SharedReport* reports,
             int reports_fd) {
  ::prctl(PR_SET_CHILD_SUBREAPER, 1);
  const int text = write_programs(programs);
  Mpirun mpirun(programs[0].ranks(), settings, text, reports_fd);
  for (std::size_t i = 0; i < programs.size(); ++i)
    if (!watch_program(programs[i], settings, reports[i], mpirun)) break;
  SharedReport& last = reports[programs.size() - 1];
  if (!mpirun.ended_within(kEnd)) {
    if (last.trouble.empty()) last.trouble.set("mpirun did not end");
    mpirun.end();
    mpirun.ended_within(kTermination);
  }
  last.job_status = mpirun.status();
  note_leftovers(last, "the job");
  ::close(text);
}

int run_job_rank(const std::string& programs_file, const std::string& reports_file,
                 const Settings& settings) {
  std::vector<Program> programs;
  FileIn in(programs_file);
  for (std::string line; std::getline(in, line);) programs.push_back(decode(line));
  const int fd = ::open(reports_file.c_str(), O_RDWR | O_CLOEXEC);
  if (fd < 0) throw_errno(fmt::format("check: {}", reports_file), errno);
  void* const map =
      ::mmap(nullptr, programs.size() * sizeof(SharedReport), PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (map == MAP_FAILED) throw_errno("check: mmap", errno);
  ::close(fd);
  auto* const reports = static_cast<SharedReport*>(map);
  ContextOptions options;
  options.log_level = LogLevel::error;
  Context context(options);
  Membership m = Membership::from_env(context, seconds(60));
  for (std::size_t i = 0; i < programs.size(); ++i) {
    m.name = fmt::format("program{}", i);
    reports[i].ranks[m.rank].pid.store(::getpid());
    run_rank(programs[i], m.rank, context, m, settings, reports[i]);
    // The next program begins when all ranks are done with this one; it does not begin if something has
    // failed.
    for (const Deadline limit = Deadline::after(seconds(90)); !reports[i].released.load() && !limit.passed();)
      std::this_thread::sleep_for(std::chrono::microseconds(200));
    if (reports[i].ranks[m.rank].has_error) break;
  }
  return 0;
}

}  // namespace weft::check
