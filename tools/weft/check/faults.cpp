#include "faults.hpp"

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

#include "weft/backends/plugin.hpp"

namespace weft::check {
namespace {

using std::chrono::milliseconds;

constexpr auto kInTime = milliseconds(150);   // delay: far below any deadline
constexpr auto kOverdue = milliseconds(600);  // late: beyond the deadline
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

// The number of the next descriptor, so none more fits.
rlim_t next_descriptor() {
  const int fd = ::open("/dev/null", O_RDONLY | O_CLOEXEC);
  if (fd < 0) return 0;
  ::close(fd);
  return static_cast<rlim_t>(fd);
}

// Set by the handler's process-wide signal alone.
volatile std::sig_atomic_t alarm_came = 0;

void on_alarm(int) { ::kill(::getpid(), SIGKILL); }
void on_alarm_stop(int) {
  ::kill(::getpid(), SIGSTOP);
  alarm_came = 1;
}
void on_alarm_exit(int) { ::_exit(0); }

}  // namespace

bool takes_process(FaultKind k) {
  return k == FaultKind::kill || k == FaultKind::exit || k == FaultKind::stop || k == FaultKind::stop_resume;
}

bool shares_block(const Program& p) {
  const auto alone =
      std::count(p.homes.begin(), p.homes.end(), p.homes[static_cast<std::size_t>(p.fault.rank)]);
  return (p.fault.kind == FaultKind::stop || p.fault.kind == FaultKind::stop_resume) &&
         p.fault.point == FaultPoint::in_chunk && p.ranks() > 2 && alone == 1;
}

bool calls_wrongly(FaultKind k) {
  return k == FaultKind::wrong_count || k == FaultKind::wrong_dtype || k == FaultKind::wrong_op ||
         k == FaultKind::wrong_root || k == FaultKind::wrong_order;
}

bool runs_into_deadline(const Program& p, const FailureGuarantees& promises) {
  switch (p.fault.kind) {
    case FaultKind::stop:
    case FaultKind::stop_resume:
    case FaultKind::suspend:
    case FaultKind::late:
    case FaultKind::skip: return true;
    case FaultKind::kill:
    case FaultKind::exit: return !promises.detects_death;
    case FaultKind::none:
    case FaultKind::pause:
    case FaultKind::delay:
    case FaultKind::wrong_count:
    case FaultKind::wrong_dtype:
    case FaultKind::wrong_op:
    case FaultKind::wrong_root:
    case FaultKind::wrong_order:
    case FaultKind::abort:
    case FaultKind::leave:
    case FaultKind::drop:
    case FaultKind::descriptors:
    case FaultKind::memory:
    case FaultKind::fork: break;
  }
  return false;
}

Step distorted(const Step& s, FaultKind kind, int me, int n) {
  Step w = s;
  Dice d(mix(s.salt, 4711));
  const auto reducible = [](DType t, ReduceOp::Kind k) { return known_traits("shm")->reduces_itself(k, t); };
  switch (kind) {
    case FaultKind::wrong_count:
      if (s.op == Op::all_to_all_v) {  // sends more to another than that one expects
        w.counts[static_cast<std::size_t>(me * n + (me + 1) % n)] += d.between(1, 3);
      } else if (!s.counts.empty()) {
        w.counts[static_cast<std::size_t>(d.below(s.counts.size()))] += d.between(1, 3);
      } else {
        w.count = d.one_in(2) || s.count == 0 ? s.count + d.between(1, 24) : s.count / 2;
      }
      break;
    case FaultKind::wrong_dtype:
      for (;;) {
        w.dtype = static_cast<DType>(d.below(kDTypeCount));
        if (w.dtype == s.dtype || (s.reduces() && !reducible(w.dtype, s.reduce))) continue;
        if (s.reduces() && s.reduce == ReduceOp::Kind::premul_sum &&
            is_floating(w.dtype) != is_floating(s.dtype))
          continue;
        break;
      }
      break;
    case FaultKind::wrong_op:
      if (s.reduces() && d.one_in(2)) {
        do {
          w.reduce = static_cast<ReduceOp::Kind>(d.below(kReduceKindCount));
          w.scale = 3;
        } while (w.reduce == s.reduce || !reducible(s.dtype, w.reduce));
        break;
      }
      do {
        constexpr Op kOthers[] = {Op::barrier, Op::all_gather, Op::all_to_all, Op::broadcast, Op::gather};
        w.op = d.any(kOthers);
      } while (w.op == s.op);
      w.counts.clear();
      if (!s.counts.empty()) w.count = 5;
      break;
    case FaultKind::wrong_root: w.root = (s.root + 1 + d.below(static_cast<std::size_t>(n - 1))) % n; break;
    case FaultKind::none:
    case FaultKind::kill:
    case FaultKind::stop:
    case FaultKind::stop_resume:
    case FaultKind::pause:
    case FaultKind::suspend:
    case FaultKind::exit:
    case FaultKind::delay:
    case FaultKind::late:
    case FaultKind::wrong_order:
    case FaultKind::skip:
    case FaultKind::abort:
    case FaultKind::leave:
    case FaultKind::drop:
    case FaultKind::descriptors:
    case FaultKind::memory:
    case FaultKind::fork: break;
  }
  return w;
}

std::vector<int> order_of(const Program& p, int rank) {
  std::vector<int> order(p.steps.size());
  std::iota(order.begin(), order.end(), 0);
  if (rank != p.fault.rank) return order;
  const auto at = order.begin() + p.fault.step;
  if (p.fault.kind == FaultKind::wrong_order && p.fault.step + 1 < static_cast<int>(order.size()))
    std::iter_swap(at, at + 1);
  if (p.fault.kind == FaultKind::skip) order.erase(at);
  return order;
}

void strike(const Program& p, RankReport& report, Duration deadline) {
  report.struck.store(true);
  switch (p.fault.kind) {
    case FaultKind::kill: ::kill(::getpid(), SIGKILL); break;
    case FaultKind::stop:
    case FaultKind::stop_resume:
    case FaultKind::pause: ::kill(::getpid(), SIGSTOP); break;
    case FaultKind::suspend:  // and comes in time, where the time of the suspension does not count
      ::kill(::getpid(), SIGSTOP);
      std::this_thread::sleep_for(deadline / 2);
      break;
    case FaultKind::exit: ::_exit(0);
    case FaultKind::delay: std::this_thread::sleep_for(kInTime); break;
    case FaultKind::late: std::this_thread::sleep_for(deadline + kOverdue); break;
    case FaultKind::descriptors: set_soft(RLIMIT_NOFILE, next_descriptor()); break;
    case FaultKind::memory:
      set_soft(RLIMIT_AS, address_space() + kSpare[mix(p.seed, p.index) % std::size(kSpare)]);
      break;
    case FaultKind::none:
    case FaultKind::wrong_count:
    case FaultKind::wrong_dtype:
    case FaultKind::wrong_op:
    case FaultKind::wrong_root:
    case FaultKind::wrong_order:
    case FaultKind::skip:
    case FaultKind::abort:
    case FaultKind::leave:
    case FaultKind::drop:
    case FaultKind::fork: break;
  }
}

void strike_soon(const Program& p, RankReport& report) {
  report.struck.store(true);
  struct sigaction action {};
  action.sa_handler = p.fault.kind == FaultKind::kill   ? on_alarm
                      : p.fault.kind == FaultKind::exit ? on_alarm_exit
                                                        : on_alarm_stop;
  alarm_came = 0;
  ::sigaction(SIGALRM, &action, nullptr);
  itimerval timer{};
  timer.it_value.tv_usec = std::chrono::microseconds(kSoon).count();
  ::setitimer(ITIMER_REAL, &timer, nullptr);
}

void await_strike() {
  while (alarm_came == 0) std::this_thread::sleep_for(milliseconds(1));
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
