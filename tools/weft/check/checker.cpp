#include "checker.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sys/mman.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <csignal>
#include <cstdio>
#include <map>
#include <nlohmann/json.hpp>
#include <thread>

#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "base/memfd.hpp"
#include "base/text/plain_streams.hpp"
#include "shrink.hpp"
#include "weft/base/error.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;

constexpr int kShrinkRuns = 150;
constexpr int kJobPrograms = 200;  // without faults, of one mpirun

// SharedReports that this process and its children map.
class SharedReports {
 public:
  explicit SharedReports(std::size_t count) : bytes_(count * sizeof(SharedReport)) {
    fd_ = Descriptor(::memfd_create("check-reports", MFD_CLOEXEC));
    if (!fd_ || ::ftruncate(fd(), static_cast<off_t>(bytes_)) != 0) throw_errno("check: a shared", errno);
    void* const map = ::mmap(nullptr, bytes_, PROT_READ | PROT_WRITE, MAP_SHARED, fd(), 0);
    if (map == MAP_FAILED) throw_errno("check: a shared", errno);
    reports_ = static_cast<SharedReport*>(map);
  }
  ~SharedReports() { ::munmap(static_cast<void*>(reports_), bytes_); }
  SharedReports(const SharedReports&) = delete;
  SharedReports& operator=(const SharedReports&) = delete;
  SharedReport& operator[](std::size_t i) { return reports_[i]; }
  SharedReport* data() { return reports_; }
  int fd() const { return fd_.get(); }

 private:
  std::size_t bytes_;
  Descriptor fd_;
  SharedReport* reports_ = nullptr;
};

// Programs that are running, each with the process that runs and watches it.
struct Running {
  pid_t watcher = -1;
  std::vector<Program> programs;
  std::unique_ptr<SharedReports> reports;
};

Running start(std::vector<Program> programs, const Settings& settings) {
  Running r;
  r.programs = std::move(programs);
  r.reports = std::make_unique<SharedReports>(r.programs.size());
  std::fflush(nullptr);
  const pid_t self = ::getpid();
  r.watcher = ::fork();
  if (r.watcher < 0) throw_errno("check: fork", errno);
  if (r.watcher > 0) return r;
  ::prctl(PR_SET_PDEATHSIG, SIGKILL);
  if (::getppid() != self) ::_exit(1);
  int code = 0;
  try {
    if (settings.mpirun.empty()) {
      run_program(r.programs[0], settings, (*r.reports)[0]);
    } else {
      run_job(r.programs, settings, r.reports->data(), r.reports->fd());
    }
  } catch (const std::exception& e) {
    (*r.reports)[0].trouble.set(e.what());
    code = 1;
  }
  ::_exit(code);
}

std::vector<Verdict> finish(Running& r, const Settings& settings, int status) {
  if (status != 0 && (*r.reports)[0].trouble.empty())
    (*r.reports)[0].trouble.set(fmt::format("the watcher ended with status {}", status));
  std::vector<Verdict> verdicts;
  for (std::size_t i = 0; i < r.programs.size(); ++i)
    verdicts.push_back(judge(r.programs[i], settings, (*r.reports)[i]));
  return verdicts;
}

Verdict run_one(const Program& p, const Settings& settings) {
  Running r = start({p}, settings);
  int status = 0;
  while (::waitpid(r.watcher, &status, 0) < 0 && errno == EINTR) {}
  return finish(r, settings, status)[0];
}

class Summary {
 public:
  void add(const Program& p, const Verdict& v) {
    ++programs_;
    ++outcomes_[std::string(name(p.fault.kind))][v.complaint.empty() ? v.outcome : "FAILED"];
    if (p.fault.kind != FaultKind::none) ++points_[std::string(name(p.fault.point))];
    if (!v.complaint.empty()) failures_.emplace_back(p.index, v.complaint);
  }
  void again(std::size_t programs) { again_ += programs; }
  std::int64_t programs() const { return programs_; }
  std::size_t failures() const { return failures_.size(); }

  void print(double took) const {
    fmt::print("\n{:<14} {:>8}  {}\n", "fault", "programs", "outcome");
    for (const auto& [kind, outcomes] : outcomes_) {
      std::int64_t all = 0;
      std::string text;
      for (const auto& [outcome, count] : outcomes) {
        all += count;
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, outcome);
      }
      fmt::print("{:<14} {:>8}  {}\n", kind, all, text);
    }
    if (!points_.empty()) {
      std::string text;
      for (const auto& [point, count] : points_)
        text += fmt::format("{}{} {}", text.empty() ? "" : ", ", count, point);
      fmt::print("points: {}\n", text);
    }
    if (again_ > 0)
      fmt::print("{} took longer than promised beside others, and ran once more alone\n", again_);
    fmt::print("{} program{} in {:.1f} s, {} failed\n", programs_, programs_ == 1 ? "" : "s", took,
               failures_.size());
  }

  nlohmann::json json() const {
    nlohmann::json failures = nlohmann::json::array();
    for (const auto& [index, complaint] : failures_)
      failures.push_back({{"program", index}, {"complaint", complaint}});
    return {{"programs", programs_},
            {"outcomes", outcomes_},
            {"points", points_},
            {"again", again_},
            {"failures", failures}};
  }

 private:
  std::int64_t programs_ = 0;
  std::size_t again_ = 0;
  std::map<std::string, std::map<std::string, std::int64_t>> outcomes_;
  std::map<std::string, std::int64_t> points_;
  std::vector<std::pair<std::uint64_t, std::string>> failures_;
};

class ProgressLine {
 public:
  ProgressLine(const std::string& style, std::int64_t all)
      : bar_(style == "bar" || (style == "auto" && ::isatty(STDOUT_FILENO) != 0)),
        lines_(style != "none"),
        all_(all) {}
  void show(const Summary& s) {
    const auto now = Clock::now();
    if (!lines_ || (now - shown_ < (bar_ ? Duration(milliseconds(100)) : Duration(std::chrono::seconds(10)))))
      return;
    if (!bar_ && s.programs() == 0) return;
    shown_ = now;
    constexpr std::size_t kWidth = 28;
    const std::size_t filled = static_cast<std::size_t>(s.programs()) * kWidth /
                               static_cast<std::size_t>(std::max<std::int64_t>(all_, 1));
    const double passed = std::chrono::duration<double>(now - began_).count();
    const std::string line =
        fmt::format("program {:>5}/{} [{}{}] {} failed, {:.0f} s", s.programs(), all_,
                    std::string(filled, '='), std::string(kWidth - filled, ' '), s.failures(), passed);
    fmt::print("{}{}", line, bar_ ? "  \r" : "\n");
    std::fflush(stdout);
  }
  void clear() {
    if (bar_) fmt::print("\x1b[K");
  }

 private:
  const bool bar_, lines_;
  const std::int64_t all_;
  Clock::time_point began_ = Clock::now(), shown_{};
};

void tell(const Options& o, const Program& p, const Verdict& v) {
  fmt::print("\nFAILED: program {} of seed {}: {}\n", p.index, p.seed, v.complaint);
  fmt::print("{}", describe(p));
  fmt::print("replay: {} --seed {} --only {}\n", o.command, p.seed, p.index);
  std::fflush(stdout);
}

void tell_shrunk(const Options& o, const Program& p) {
  std::string last;
  const auto fails = [&](const Program& q) {
    Verdict v = run_one(q, o.settings);
    if (v.complaint.empty()) return false;
    last = v.complaint;
    return true;
  };
  // A program that does not fail every time is shown unchanged.
  int failed = 0;
  for (int k = 0; k < 3; ++k) failed += fails(p);
  if (failed < 3) {
    fmt::print("it failed in {} of 3 more runs; it is not made smaller\n", failed);
    return;
  }
  const Program small = shrink(p, fails, kShrinkRuns);
  const std::string file = fmt::format("weft-check-{}-{}.json", p.seed, p.index);
  fmt::print("\nmade smaller: {}\n{}", last, describe(small));
  try {
    write_new_file(file, encode(small) + "\n");
    fmt::print("replay: {} --program {}\n", o.command, file);
  } catch (const std::exception& e) {
    fmt::print("no replay: {}\n", e.what());
  }
}

std::vector<std::vector<Program>> arrange(const Options& o) {
  std::vector<Program> all;
  if (!o.replay.empty()) {
    constexpr std::size_t kMostBytes = std::size_t{1} << 20;
    all.push_back(decode(read_regular_file(o.replay, fmt::format("check: {}:", o.replay), kMostBytes)));
  } else if (o.only) {
    all.push_back(draw(o.seed, *o.only, o.range));
  } else {
    for (std::int64_t i = 0; i < o.programs; ++i)
      all.push_back(draw(o.seed, static_cast<std::uint64_t>(i), o.range));
  }
  std::vector<std::vector<Program>> jobs;
  if (o.settings.mpirun.empty() || o.range.faults) {
    for (Program& p : all) jobs.push_back({std::move(p)});
    return jobs;
  }
  std::map<int, std::vector<Program>> by_size;  // an mpirun has one number of ranks
  for (Program& p : all) {
    auto& same = by_size[p.ranks()];
    same.push_back(std::move(p));
    if (same.size() == kJobPrograms) jobs.push_back(std::exchange(same, {}));
  }
  for (auto& [n, same] : by_size)
    if (!same.empty()) jobs.push_back(std::move(same));
  return jobs;
}

// Programs with faults mostly wait for a deadline.
int jobs_at_once(const Options& o) {
  const int cores = std::max(1, static_cast<int>(std::thread::hardware_concurrency()));
  return o.jobs > 0 ? o.jobs : !o.settings.mpirun.empty() ? 1 : o.range.faults ? 3 * cores : cores;
}

// All jobs of one command.
class Session {
 public:
  Session(const Options& o, std::vector<std::vector<Program>> jobs)
      : o_(o), jobs_(std::move(jobs)), at_once_(jobs_at_once(o)), progress_(o.progress, count(jobs_)) {}

  /// Runs all programs, or, if the rest is not requested, until one fails.
  void run() {
    while (next_ < jobs_.size() || !running_.empty() || !slow_.empty()) {
      if (next_ == jobs_.size() && running_.empty() && !slow_.empty()) repeat_slow();
      const bool stop = first_ && !o_.keep_going;
      if (stop && running_.empty()) break;
      while (!stop && next_ < jobs_.size() && static_cast<int>(running_.size()) < (alone_ ? 1 : at_once_))
        running_.push_back(start(std::move(jobs_[next_++]), o_.settings));
      collect();
      progress_.show(summary_);
      std::this_thread::sleep_for(milliseconds(1));
    }
    progress_.clear();
  }
  const Summary& summary() const { return summary_; }
  /// Returns the failed program with the lowest number.
  const std::optional<std::pair<Program, Verdict>>& first_failure() const { return first_; }

 private:
  static std::int64_t count(const std::vector<std::vector<Program>>& jobs) {
    std::int64_t programs = 0;
    for (const auto& job : jobs) programs += static_cast<std::int64_t>(job.size());
    return programs;
  }
  // Times count only if no other program of ours runs.
  void repeat_slow() {
    alone_ = true;
    summary_.again(slow_.size());
    jobs_ = std::move(slow_);
    slow_.clear();
    next_ = 0;
  }
  void collect() {
    for (std::size_t i = 0; i < running_.size();) {
      int status = 0;
      if (::waitpid(running_[i].watcher, &status, WNOHANG) != running_[i].watcher) {
        ++i;
        continue;
      }
      take(running_[i], finish(running_[i], o_.settings, status));
      running_.erase(running_.begin() + static_cast<std::ptrdiff_t>(i));
    }
  }
  void take(const Running& job, const std::vector<Verdict>& verdicts) {
    bool slow = false;  // later programs of its job did not run
    for (std::size_t k = 0; k < verdicts.size(); ++k) {
      const Program& p = job.programs[k];
      slow = slow || verdicts[k].slow;
      if (slow && !alone_) {
        slow_.push_back({p});
        continue;
      }
      summary_.add(p, verdicts[k]);
      if (verdicts[k].complaint.empty()) continue;
      progress_.clear();
      if (o_.keep_going)
        fmt::print("FAILED: program {} ({}): {}\n", p.index, describe(p.fault), verdicts[k].complaint);
      if (!first_ || (p.index < first_->first.index && (*job.reports)[k].ran)) first_.emplace(p, verdicts[k]);
    }
  }

  const Options& o_;
  std::vector<std::vector<Program>> jobs_;
  const int at_once_;
  Summary summary_;
  ProgressLine progress_;
  std::vector<Running> running_;
  std::optional<std::pair<Program, Verdict>> first_;
  std::size_t next_ = 0;
  std::vector<std::vector<Program>> slow_;  // to be run again, one at a time
  bool alone_ = false;
};

// The file of --json, if one was requested. Opened before the programs run, so that a file that cannot be
// written is reported at once.
class SummaryFile {
 public:
  explicit SummaryFile(const Options& o) : o_(o) {
    if (!o.json.empty()) file_.emplace(o.json, "check: --json: ");
  }
  void write(const Summary& summary, double took) {
    if (!file_) return;
    nlohmann::json j = summary.json();
    j["backend"] = o_.settings.backend;
    j["seed"] = o_.seed;
    j["faults"] = o_.range.faults;
    j["seconds"] = took;
    file_->write(j.dump(1) + "\n");
    file_->publish();
  }

 private:
  const Options& o_;
  std::optional<NewFile> file_;
};

}  // namespace

int run_check(const Options& o) {
  const auto began = Clock::now();
  SummaryFile file(o);
  std::vector<std::vector<Program>> jobs = arrange(o);
  if (o.show)
    for (const auto& job : jobs)
      for (const Program& p : job) fmt::print("program {} of seed {}\n{}\n", p.index, p.seed, describe(p));
  Session session(o, std::move(jobs));
  session.run();
  if (const auto& first = session.first_failure()) {
    tell(o, first->first, first->second);
    if (o.shrinks && o.replay.empty()) tell_shrunk(o, first->first);
  }
  const double took = std::chrono::duration<double>(Clock::now() - began).count();
  session.summary().print(took);
  file.write(session.summary(), took);
  return session.summary().failures() == 0 ? 0 : 1;
}

}  // namespace weft::check
