#include "faults/strike.hpp"

#include <fcntl.h>
#include <sys/resource.h>
#include <sys/time.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <numeric>
#include <thread>

namespace weft::check {
namespace {

using std::chrono::milliseconds;

constexpr auto kSoon = milliseconds(8);
constexpr rlim_t kSpare[] = {0, 1 << 20, 24 << 20};  // bytes of address space that memory leaves

std::size_t address_space() {
  std::FILE* const f = std::fopen("/proc/self/statm", "r");
  unsigned long pages = 0;
  if (f == nullptr || std::fscanf(f, "%lu", &pages) != 1) pages = 0;
  if (f != nullptr) std::fclose(f);
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

void set_soft(int resource, rlim_t soft) {
  rlimit l{};
  ::getrlimit(static_cast<__rlimit_resource>(resource), &l);
  l.rlim_cur = soft;
  ::setrlimit(static_cast<__rlimit_resource>(resource), &l);
}

// The number of the next descriptor; if this is the limit, no more descriptors are possible.
rlim_t next_descriptor() {
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ::close(fd);
  return static_cast<rlim_t>(fd);
}

// Only the handler of the process-wide signal sets it.
volatile std::sig_atomic_t alarm_came = 0;

void stop_by_signal(int) {
  ::kill(::getpid(), SIGSTOP);
  alarm_came = 1;
}

}  // namespace

bool shares_block(const Program& p) {
  const auto alone =
      std::count(p.homes.begin(), p.homes.end(), p.homes[static_cast<std::size_t>(p.fault.rank)]);
  const Stopped stopped = row(p).stopped;
  return (stopped == Stopped::for_good || stopped == Stopped::until_reused) &&
         p.fault.point == FaultPoint::in_chunk && p.ranks() > 2 && alone == 1;
}

bool holds_window(const Program& p) {
  if (!shares_block(p) || p.fault.step == 0) return false;
  const Step &s = p.steps[static_cast<std::size_t>(p.fault.step)],
             &before = p.steps[static_cast<std::size_t>(p.fault.step - 1)];
  return before.does == Does::window && before.group == s.group && p.group_size(s.group) > 2 &&
         before.window.exchanges == 1;
}

int holding_rank(const Program& p) {
  const std::vector<int>& ranks =
      p.groups[static_cast<std::size_t>(p.steps[static_cast<std::size_t>(p.fault.step)].group)].ranks;
  return *std::find_if(ranks.rbegin(), ranks.rend(), [&](int r) { return r != p.fault.rank; });
}

bool runs_into_deadline(const Program& p, const FailureGuarantees& guarantees) {
  return row(p).overdue != nullptr && row(p).overdue(guarantees);
}

Step as_called(const Program& p, int step, int rank) {
  const Step& s = p.steps[static_cast<std::size_t>(step)];
  Step w = s;
  if (p.fault.kind == FaultKind::none || rank != p.fault.rank || step != p.fault.step) return w;
  Dice d(mix(s.salt, 4711));
  if (row(p).distort != nullptr) row(p).distort(w, s, d, p.rank_in(s.group, rank), p.group_size(s.group));
  return w;
}

std::vector<int> order_of(const Program& p, int rank) {
  std::vector<int> order(p.steps.size());
  std::iota(order.begin(), order.end(), 0);
  if (rank != p.fault.rank) return order;
  const auto at = order.begin() + p.fault.step;
  switch (row(p).steps) {
    case StepsTaken::as_planned: break;
    case StepsTaken::swapped:
      if (p.fault.step + 1 < static_cast<int>(order.size())) std::iter_swap(at, at + 1);
      break;
    case StepsTaken::left_out: order.erase(at); break;
  }
  return order;
}

void strike(const Program& p, RankReport& report, Duration deadline) {
  report.struck.store(true);
  if (row(p).strike != nullptr) row(p).strike(p, deadline);
}

void strike_soon(const Program& p, RankReport& report) {
  report.struck.store(true);
  struct sigaction action {};
  action.sa_handler = row(p).strike_by_signal != nullptr ? row(p).strike_by_signal : stop_by_signal;
  alarm_came = 0;
  ::sigaction(SIGALRM, &action, nullptr);
  itimerval timer{};
  timer.it_value.tv_usec = std::chrono::microseconds(kSoon).count();
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

void await_strike() {
  while (alarm_came == 0) std::this_thread::sleep_for(milliseconds(1));
}

void take_descriptors(const Program&, Duration) { set_soft(RLIMIT_NOFILE, next_descriptor()); }
void take_memory(const Program& p, Duration) {
  set_soft(RLIMIT_AS, address_space() + kSpare[mix(p.seed, p.index) % std::size(kSpare)]);
}

void lift_limits() {
  for (const int resource : {RLIMIT_NOFILE, RLIMIT_AS}) {
    rlimit l{};
    ::getrlimit(static_cast<__rlimit_resource>(resource), &l);
    set_soft(resource, l.rlim_max);
  }
}

Unlimited::Unlimited() {
  rlimit l{};
  ::getrlimit(RLIMIT_AS, &l);
  if (l.rlim_cur == l.rlim_max) return;
  soft_ = l.rlim_cur;
  lifted_ = true;
  set_soft(RLIMIT_AS, l.rlim_max);
}
Unlimited::~Unlimited() {
  if (lifted_) set_soft(RLIMIT_AS, soft_);
}

void fork_and_call(ProcessGroup& group, SharedReport& shared, RankReport& report) {
  report.struck.store(true);
  const pid_t child = ::fork();
  if (child < 0) return;
  if (child == 0) {
    int found = 2;
    try {
      group.barrier().wait();
    } catch (const Error& e) {
      if (e.code() == ErrorCode::unsupported &&
          std::string_view(e.what()).find("forked") != std::string_view::npos)
        found = 1;
    } catch (...) {}
    group = ProcessGroup();
    shared.child.store(found);
    ::_exit(0);
  }
  for (const Deadline limit = Deadline::after(std::chrono::seconds(5)); !limit.passed();) {
    if (::waitpid(child, nullptr, WNOHANG) == child) return;
    std::this_thread::sleep_for(milliseconds(1));
  }
  ::kill(child, SIGKILL);
  ::waitpid(child, nullptr, 0);
  shared.child.store(2);
}

}  // namespace weft::check
