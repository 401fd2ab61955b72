#include "harness.hpp"

#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cstdio>
#include <cstring>
#include <utility>

#include "weft/backends/store_tcp.hpp"

namespace weft::bench {
namespace {

// About half a second a case on an idle machine, whatever its size.
struct Plan {
  int samples;
  int runs_per_sample;
};
Plan plan_for(std::int64_t bytes) {
  const double guess_ns = 200 + static_cast<double>(bytes) * 0.15;
  const int runs = static_cast<int>(std::clamp(10000 / guess_ns, 1.0, 20.0));
  return {static_cast<int>(std::clamp(0.4e9 / (guess_ns * runs), 50.0, 20000.0)), runs};
}

double seconds_of_a_sample(const std::function<void()>& run, int runs) {
  const auto start = Clock::now();
  for (int i = 0; i < runs; ++i) run();
  return std::chrono::duration<double>(Clock::now() - start).count() / runs;
}

class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

void time_case(benchmark::State& state, const Case& c, bool& wrong) {
  const Prepared p = c.prepare();
  p.run();
  if (const std::string problem = p.verify(); !problem.empty()) {
    wrong = true;
    std::fprintf(stderr, "%s: %s\n", c.name.c_str(), problem.c_str());
    state.SkipWithError(problem.c_str());
    return;
  }
  const Plan plan = plan_for(c.bytes);
  for (int i = 0; i < plan.samples / 10 + 2; ++i) seconds_of_a_sample(p.run, plan.runs_per_sample);
  std::vector<double> seconds;
  seconds.reserve(static_cast<std::size_t>(plan.samples));
  for ([[maybe_unused]] const auto _ : state) {
    seconds.push_back(seconds_of_a_sample(p.run, plan.runs_per_sample));
    state.SetIterationTime(seconds.back());
  }
  std::sort(seconds.begin(), seconds.end());
  const double median = seconds[seconds.size() / 2];
  state.counters["median_us"] = median * 1e6;
  state.counters["p99_us"] = seconds[seconds.size() * 99 / 100] * 1e6;
  state.counters["alg_GBs"] = static_cast<double>(c.bytes) / median * 1e-9;
  state.counters["bus_GBs"] = static_cast<double>(c.bytes) / median * 1e-9 * c.bus_factor;
}

}  // namespace

Bench::Bench(int& argc, char** argv, bool report) : report_(report), wrong_(std::make_shared<bool>(false)) {
  benchmark::Initialize(&argc, argv);
}

void Bench::add(Case c) {
  const Plan plan = plan_for(c.bytes);
  const std::string name = c.name;
  benchmark::RegisterBenchmark(name.c_str(), [c = std::move(c), wrong = wrong_](
                                                 benchmark::State& state) { time_case(state, c, *wrong); })
      ->UseManualTime()
      ->Iterations(plan.samples)
      ->Unit(benchmark::kMicrosecond);
}

int Bench::run() {
  if (report_) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    SilentReporter silent;
    benchmark::RunSpecifiedBenchmarks(&silent);
  }
  benchmark::Shutdown();
  return *wrong_ ? 1 : 0;
}

// The parent serves the store; it may make threads only after the last fork, so the children learn the port
// by pipe.
int run_processes(int n, const std::function<int(int, std::shared_ptr<Store>)>& body) {
  std::vector<pid_t> children;
  std::vector<int> to_child;
  for (int r = 0; r < n; ++r) {
    int ends[2];
    if (pipe(ends) != 0) throw_errno("bench: pipe", errno);
    const pid_t pid = fork();
    if (pid < 0) throw_errno("bench: fork", errno);
    if (pid == 0) {
      prctl(PR_SET_PDEATHSIG, SIGKILL);
      int code = 1;
      try {
        std::uint16_t port = 0;
        if (read(ends[0], &port, sizeof port) == sizeof port)
          code = body(r, make_tcp_store("127.0.0.1", port, Deadline::after(std::chrono::seconds(10))));
      } catch (const std::exception& e) {
        std::fprintf(stderr, "rank %d: %s\n", r, e.what());
      }
      std::fflush(nullptr);
      _exit(code);
    }
    close(ends[0]);
    children.push_back(pid);
    to_child.push_back(ends[1]);
  }
  Logger log;
  TcpStoreServer server(log);
  const std::uint16_t port = server.port();
  for (const int fd : to_child) {
    if (write(fd, &port, sizeof port) != sizeof port) std::fprintf(stderr, "bench: a rank ended early\n");
    close(fd);
  }
  int failed = 0;
  for (int left = n; left > 0; --left) {
    int status = 0;
    const pid_t ended = waitpid(-1, &status, 0);
    if (ended < 0) throw_errno("bench: waitpid", errno);
    std::erase(children, ended);
    if (status != 0 && failed++ == 0)
      for (const pid_t other : children) kill(other, SIGKILL);
  }
  return failed == 0 ? 0 : 1;
}

}  // namespace weft::bench
