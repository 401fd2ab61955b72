// A rank of a job on several hosts, under an mpirun: `host_ranks <backend> sums|cut <file>`. Prints what it
// observes, line by line, each beginning with its rank. "cut": calls until a call fails, and prints the
// error. It ends once `file` exists, when the test has read the lines of all ranks.
#include <fmt/format.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <string>
#include <thread>
#include <vector>

#include "weft/group/process_group.hpp"

namespace {

using weft::view;

void say(int rank, const std::string& text) {
  const std::string line = fmt::format("rank {}: {}\n", rank, text);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

std::vector<float> numbers(int rank) {
  std::vector<float> v(50'000);
  for (std::size_t i = 0; i < v.size(); ++i)
    v[i] = static_cast<float>(rank * 1000 + static_cast<int>(i % 97));
  return v;
}

int sums(weft::ProcessGroup& group) {
  const int n = group.size();
  std::vector<float> sum = numbers(group.rank());
  group.all_reduce(view(sum), view(sum)).wait();
  for (std::size_t i = 0; i < sum.size(); ++i) {
    const auto expected = static_cast<float>(1000 * n * (n - 1) / 2 + n * static_cast<int>(i % 97));
    if (sum[i] != expected) {
      say(group.rank(), fmt::format("element {} is {}; expected {}", i, sum[i], expected));
      return 1;
    }
  }
  char name[64] = {};
  ::gethostname(name, sizeof name - 1);
  say(group.rank(), fmt::format("sums over {} on {}", group.backend(), name));
  return 0;
}

int until_cut(weft::ProcessGroup& group) {
  std::vector<float> sum = numbers(group.rank());
  auto began = weft::Clock::now();
  try {
    for (int call = 0;; ++call) {
      if (call == 20) say(group.rank(), "is going");
      began = weft::Clock::now();
      group.all_reduce(view(sum), view(sum)).wait();
    }
  } catch (const weft::Error& e) {
    std::string blamed;
    for (const int r : e.ranks()) blamed += fmt::format(" {}", r);
    say(group.rank(), fmt::format("{}{}: {}", name(e.code()), blamed, e.what()));
    say(group.rank(),
        fmt::format("{} ms",
                    std::chrono::ceil<std::chrono::milliseconds>(weft::Clock::now() - began).count()));
  }
  return 0;
}

/// If a process ends without MPI_Finalize, mpirun ends the others, whose output may still be in flight.
void wait_for(const std::filesystem::path& file) {
  const weft::Deadline limit = weft::Deadline::after(std::chrono::seconds(20));
  while (!std::filesystem::exists(file) && !limit.passed())
    std::this_thread::sleep_for(std::chrono::milliseconds(5));
}

}  // namespace

int main(int count, char** arguments) {
  if (count != 4) return 2;
  int rank = -1;
  try {
    weft::Context context;
    weft::Membership m = weft::Membership::from_env(context, std::chrono::seconds(20));
    rank = m.rank;
    m.deadline = std::chrono::seconds(2);
    const bool cut = std::string(arguments[2]) == "cut";
    if (!cut) m.deadline = std::chrono::seconds(20);
    weft::ProcessGroup group = weft::ProcessGroup::create(context, arguments[1], m);
    const int status = cut ? until_cut(group) : sums(group);
    if (!cut) group.barrier().wait();
    wait_for(arguments[3]);
    say(rank, "ends");
    // MPICH 4.0 over UCX and TCP hangs in MPI_Finalize more often than not, with weft or without.
    if (group.backend() == "mpi-mpich") std::_Exit(status);
    return status;
  } catch (const std::exception& e) {
    say(rank, fmt::format("failed: {}", e.what()));
    return 1;
  }
}
