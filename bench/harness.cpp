#include "harness.hpp"

#include <benchmark/benchmark.h>
#include <signal.h>
#include <sys/prctl.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cstdio>
#include <string_view>
#include <utility>
#include <vector>

#include "plan.hpp"
#include "weft/backends/store_tcp.hpp"

namespace weft::bench {
namespace {

class SilentReporter : public benchmark::BenchmarkReporter {
 public:
  bool ReportContext(const Context&) override { return true; }
  void ReportRuns(const std::vector<Run>&) override {}
};

void time_case(benchmark::State& state, const Case& c) {
  const Prepared p = c.prepare();
  p.run();
  if (const std::string problem = p.verify(); !problem.empty()) {
    std::fprintf(stderr, "%s: %s\n", c.name.c_str(), problem.c_str());
    std::fflush(nullptr);
    _exit(1);
  }
  for ([[maybe_unused]] const auto _ : state) {  // once: the samples are taken inside
    const Times t = time_samples(c.bytes, p.run, c.agree);
    state.SetIterationTime(t.median_us * 1e-6);
    state.counters["median_us"] = t.median_us;
    state.counters["p99_us"] = t.p99_us;
    state.counters["alg_GBs"] = static_cast<double>(c.bytes) / t.median_us * 1e-3;
    state.counters["bus_GBs"] = static_cast<double>(c.bytes) / t.median_us * 1e-3 * c.bus_factor;
    state.counters["samples"] = static_cast<double>(t.samples);
  }
}

}  // namespace

Bench::Bench(int& argc, char** argv, bool report) : report_(report) {
  if (!report) {  // one file and one format, and they are the reporting rank's
    char** const end = std::remove_if(argv + 1, argv + argc, [](const char* argument) {
      return std::string_view(argument).starts_with("--benchmark_out") ||
             std::string_view(argument).starts_with("--benchmark_format");
    });
    argc = static_cast<int>(end - argv);
  }
  benchmark::Initialize(&argc, argv);
}

void Bench::add(Case c) {
  const std::string name = c.name;
  benchmark::RegisterBenchmark(name.c_str(),
                               [c = std::move(c)](benchmark::State& state) { time_case(state, c); })
      ->UseManualTime()
      ->Iterations(1)
      ->Unit(benchmark::kMicrosecond);
}

void Bench::run() {
  if (report_) {
    benchmark::RunSpecifiedBenchmarks();
  } else {
    SilentReporter silent;
    benchmark::RunSpecifiedBenchmarks(&silent);
  }
  benchmark::Shutdown();
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
