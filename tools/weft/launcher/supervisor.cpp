#include "supervisor.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/random.h>
#include <sys/signalfd.h>

#include <algorithm>
#include <cerrno>
#include <utility>

#include "base/waits/suspension.hpp"
#include "terminal.hpp"
#include "weft/base/error.hpp"

namespace weft::tools {
namespace {

using std::chrono::milliseconds;

// How long pipes may take to end once no process of the job is left.
constexpr Duration kDrainLimit = std::chrono::seconds(1);

}  // namespace

std::string random_token() {
  std::uint64_t bits = 0;
  if (::getrandom(&bits, sizeof bits, 0) != sizeof bits) throw_errno("getrandom", errno);
  return fmt::format("{:016x}", bits);
}

Deadline job_end(const LaunchOptions& options) {
  return options.timeout > Duration::zero() ? Deadline::after(options.timeout) : Deadline::never();
}

Supervisor::Supervisor(const LaunchOptions& options, const Start& start,
                       const std::vector<std::string>& command, const sigset_t& ranks_mask,
                       const sigset_t& to_read, int guard_pipe)
    : options_(options), start_(start), command_(command), ranks_mask_(ranks_mask), guard_pipe_(guard_pipe) {
  signals_ = ::signalfd(-1, &to_read, SFD_CLOEXEC | SFD_NONBLOCK);
  if (signals_ < 0) throw_errno("signalfd", errno);
  for (const int number : {SIGPIPE, SIGXFSZ}) ::signal(number, SIG_IGN);  // the write says it
  CPU_ZERO(&usable_);
  if (::sched_getaffinity(0, sizeof usable_, &usable_) != 0) throw_errno("sched_getaffinity", errno);
}

Supervisor::~Supervisor() {
  signal_groups(SIGKILL);
  kill_all_descendants();
  ::close(signals_);
}

/// Returns the exit status if a rank cannot be started.
std::optional<int> Supervisor::start_ranks() {
  for (int number = 0; number < start_.ranks; ++number) {
    int error_number = 0;
    try {
      error_number = start_rank(number);
    } catch (const Error& e) {
      say(fmt::format("cannot start rank {} of {}: {}", number, start_.ranks, e.what()));
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
  return std::nullopt;
}

StartEnd Supervisor::run() {
  const auto began = Clock::now();
  StartEnd end{.ranks = start_.ranks, .number = start_.number};
  if (const auto status = start_ranks()) {
    end.status = *status;
    return end;
  }
  watch();
  if (options_.keep_going && !exit_ && !one_ended_well_) exit_ = first_failure_;
  if (!exit_ && ended_as_requested_) exit_ = 128 + requested_;
  const bool lost = out_.error() != 0 || err_.error() != 0;
  end.status = exit_.value_or(in_doubt_ ? kInDoubt : lost ? kOutputLost : 0);
  if (requested_ == 0 && !leaves_ && !guard_gone_) end.deaths = std::move(deaths_);
  end.step = step_;
  end.lasted = Clock::now() - began;
  return end;
}

std::vector<std::string> Supervisor::environment_of(int number) const {
  std::vector<std::pair<std::string_view, std::string>> ours{
      {"WEFT_RANK", fmt::to_string(number)},
      {"WEFT_WORLD_SIZE", fmt::to_string(start_.ranks)},
      {"WEFT_LOCAL_RANK", fmt::to_string(number)},
      {"WEFT_STORE", store_.address()},
      {"WEFT_JOB", job_},
      {"WEFT_LAUNCHER", notices_.name()},
      {"WEFT_TERMINAL", out_.terminal() ? "1" : "0"},
  };
  if (const auto columns = columns_of_a_line(number)) ours.emplace_back("COLUMNS", fmt::to_string(*columns));
  if (options_.elastic) ours.emplace_back("WEFT_RESTART_COUNT", fmt::to_string(start_.number));
  if (!options_.backend.empty()) ours.emplace_back("WEFT_BACKEND", options_.backend);
  for (auto& variable : torch_.of(number)) ours.push_back(std::move(variable));
  std::vector<std::string> all;
  for (char** variable = environ; *variable != nullptr; ++variable) {
    const std::string_view name =
        std::string_view(*variable).substr(0, std::string_view(*variable).find('='));
    if (name == "WEFT_RESTART_COUNT") continue;  // an outer launcher's
    if (std::none_of(std::begin(ours), std::end(ours), [&](const auto& o) { return o.first == name; })) {
      all.emplace_back(*variable);
    }
  }
  for (const auto& [name, value] : ours) all.push_back(fmt::format("{}={}", name, value));
  return all;
}

std::string Supervisor::tag_of(int number) const {
  return options_.tag_output ? fmt::format("[{}] ", number) : "";
}

/// The columns that the terminal leaves for a line behind the rank's tag. Nothing if output does not go to a
/// terminal, or if its width is not known.
std::optional<int> Supervisor::columns_of_a_line(int number) const {
  if (!out_.terminal()) return std::nullopt;
  const auto columns = terminal_columns(STDOUT_FILENO);
  if (!columns) return std::nullopt;
  return std::max(1, *columns - static_cast<int>(tag_of(number).size()));
}

/// Returns 0, or the errno of the step that failed.
int Supervisor::start_rank(int number) {
  ranks_.push_back(std::make_unique<RankProcess>());
  RankProcess& rank = *ranks_.back();
  rank.number = number;
  for (const int i : {0, 1}) {
    rank.streams[i] = std::make_unique<RankStream>(tag_of(number), number == 0, i == 0 ? out_ : err_);
    ::fcntl(rank.streams[i]->pipe.read_end, F_SETFL, O_NONBLOCK);
  }
  const cpu_set_t cores = share_of_cores(usable_, number, start_.ranks);
  return start(
      rank, {.command = command_,
             .environment = environment_of(number),
             .mask = ranks_mask_,
             .cores = options_.bind_cores ? &cores : nullptr,
             // Rank 0 reads our input, but not from a terminal, which only its foreground processes may read.
             .reads = number == 0 && ::isatty(STDIN_FILENO) == 0});
}

// Ends when no process of the job is left and its output is written, or nobody is there to read it.
void Supervisor::watch() {
  Deadline drained = Deadline::never();
  bool swept = false;
  for (;;) {
    if (!swept && none_runs()) {
      kill_all_descendants();
      swept = true;
      report_doubts();
      drained = Deadline::after(kDrainLimit);
    }
    const bool over = swept && (all_streams_ended() || drained.passed());
    if (over) {
      for (auto& rank : ranks_) {
        for (auto& stream : rank->streams) stream->end();
      }
      out_.finish();
      err_.finish();
      if ((out_.empty() && err_.empty()) || abandoned_) return;
    }
    const Deadline next = std::min({job_ends_, next_step_, judgement_, early_look_},
                                   [](Deadline a, Deadline b) { return a.when() < b.when(); });
    poll_once(over ? Deadline::never() : swept ? drained : next);
    if (abandoned_ && swept) {
      out_.drop();
      err_.drop();
    }
    advance();
  }
}

void Supervisor::poll_once(Deadline until) {
  std::vector<pollfd> polled;
  std::vector<RankStream*> streams;
  polled.push_back({signals_, POLLIN, 0});
  polled.push_back({guard_gone_ ? -1 : guard_pipe_, 0, 0});  // POLLHUP comes unasked
  for (Sink* sink : {&out_, &err_}) {
    polled.push_back({sink->empty() ? -1 : sink->fd(), POLLOUT, 0});
  }
  polled.push_back({notices_.fd(), POLLIN, 0});
  const std::size_t first_stream = polled.size();
  for (auto& rank : ranks_) {
    for (auto& stream : rank->streams) {
      if (!stream->open() || stream->lines.sink().full()) continue;
      polled.push_back({stream->pipe.read_end, POLLIN, 0});
      streams.push_back(stream.get());
    }
  }
  // Waits in pieces if there is a time limit: a suspended job is not late.
  const bool timed = until.when() != Clock::time_point::max();
  const auto left =
      std::chrono::ceil<milliseconds>(timed ? std::min(until.left(), kWaitPiece) : until.left());
  {
    const TimedWait wait(left);
    if (::poll(polled.data(), polled.size(), static_cast<int>(left.count())) < 0 && errno != EINTR)
      throw_errno("poll", errno);
  }
  // Begins with another rank each time, so that all ranks get their share of a slow sink.
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

/// Writes what can be written. A failed write is reported once, if the report can still be read.
void Supervisor::flush(Sink& sink, std::string_view what) {
  const bool well = sink.error() == 0;
  sink.flush();
  if (well && sink.error() != 0)
    report(fmt::format("cannot write {}: {}; what the ranks write there is lost from here on", what,
                       system_words(sink.error())));
}

/// Returns how many bytes arrived.
std::size_t Supervisor::read(RankStream& stream) {
  const ssize_t got = ::read(stream.pipe.read_end, buffer_.data(), buffer_.size());
  if (got > 0) {
    stream.lines.feed({buffer_.data(), static_cast<std::size_t>(got)});
  } else if (got == 0 || (errno != EAGAIN && errno != EINTR)) {
    stream.end();
  }
  return static_cast<std::size_t>(std::max<ssize_t>(got, 0));
}

/// Reads the output so far: a rank that has failed will write no more. Other processes may hold its pipe, and
/// go on.
void Supervisor::drain(RankStream& stream) {
  int waiting = 0;
  if (!stream.open() || ::ioctl(stream.pipe.read_end, FIONREAD, &waiting) != 0) return;
  for (auto left = static_cast<std::size_t>(std::max(waiting, 0)); left > 0 && stream.open();) {
    const std::size_t got = read(stream);
    if (got == 0) return;
    left -= std::min(left, got);
  }
}

void Supervisor::take_signals() {
  signalfd_siginfo info{};
  while (::read(signals_, &info, sizeof info) == sizeof info) {
    const int number = static_cast<int>(info.ssi_signo);
    if (number == SIGCHLD) continue;  // reaped below; several may have become one
    forward(number);
    if (number == SIGINT || number == SIGTERM) end_requested(number);
    if (number == SIGHUP || number == SIGQUIT) leaves_ = true;
  }
  reap();
}

/// Reads a bounded number of notices, because any process may send some. Returns whether there may be more.
bool Supervisor::take_notices() {
  const LauncherNotices::Taken taken = notices_.take();
  using Kind = LauncherNotices::Notice::Kind;
  for (const LauncherNotices::Notice& notice : taken.notices) {
    if (static_cast<std::size_t>(notice.rank) >= ranks_.size()) continue;
    RankProcess& rank = *ranks_[static_cast<std::size_t>(notice.rank)];
    switch (notice.kind) {
      case Kind::others_failed: rank.blames_others = true; break;
      case Kind::in_doubt: rank.in_doubt = true; break;
      case Kind::step: step_ = std::max(step_, notice.step); break;
    }
  }
  return taken.more;
}

/// Takes the notices that ended ranks have sent.
void Supervisor::take_last_notices() {
  constexpr int kTimes = 64;
  for (int times = 0; times < kTimes && take_notices();) ++times;
}

bool Supervisor::none_runs() const {
  return std::none_of(ranks_.begin(), ranks_.end(), [](const auto& r) { return r->running; });
}

bool Supervisor::all_streams_ended() const {
  return std::all_of(ranks_.begin(), ranks_.end(),
                     [](const auto& r) { return !r->streams[0]->open() && !r->streams[1]->open(); });
}

}  // namespace weft::tools
