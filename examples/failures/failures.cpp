// Shows what a program sees when a rank fails, and how it goes on: `weft run -n 3 --keep-going -- failures
// dies`. docs/failures.md shows the output of each failure.
#include <sys/resource.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <string>
#include <string_view>
#include <thread>
#include <vector>

#include "weft/weft.hpp"

namespace {

using namespace std::chrono_literals;

// The failure of rank 1 in its fourth step.
std::int64_t befall(std::string_view what) {
  std::this_thread::sleep_for(50ms);  // by then the others are in the call
  if (what == "dies") std::raise(SIGKILL);
  if (what == "stops") std::raise(SIGSTOP);
  if (what == "is late") std::this_thread::sleep_for(4s);
  if (what == "leaves") throw std::runtime_error("the input is not a number");
  return what == "has less" ? 1000 : 4096;
}

int steps(weft::ProcessGroup& group, std::string_view what) {
  std::vector<float> x(4096);
  const int once = group.rank();
  for (int step = 0; step < 5; ++step) {
    try {
      const std::int64_t count = once == 1 && step == 3 ? befall(what) : 4096;
      group.all_reduce(weft::view(x.data(), count), weft::view(x.data(), count), {.deadline = 1s}).wait();
    } catch (const weft::Error& e) {
      const std::string code(name(e.code()));
      std::printf("rank %d, step %d: %s: %s\n", once, step, code.c_str(), e.what());
      if (e.code() != weft::ErrorCode::peer_lost && e.code() != weft::ErrorCode::timeout) return 1;
      // x is ours again when nobody can write to it any more.
      if (!e.quiesced() && !group.quiesce(1s)) return 1;
      try {
        group = group.shrink(1s);
      } catch (const weft::Error& last) {
        std::printf("rank %d: %s\n", once, last.what());
        return 1;
      }
      std::printf("rank %d goes on as rank %d of %d\n", once, group.rank(), group.size());
    }
  }
  std::printf("rank %d is done\n", once);
  return 0;
}

}  // namespace

int main(int argc, char** argv) {
  const std::string_view what = argc > 1 ? argv[1] : "dies";
  std::setvbuf(stdout, nullptr, _IOLBF, 0);
  try {
    weft::Context context;
    weft::Membership m = weft::Membership::from_env(context);
    m.deadline = 10s;
    if (what == "has no descriptors" && m.rank == 1) {
      const rlimit none{4, 4};
      ::setrlimit(RLIMIT_NOFILE, &none);
    }
    weft::ProcessGroup group = weft::ProcessGroup::create(context, "auto", m);
    return steps(group, what);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "failures: %s\n", e.what());
    return 1;
  }
}
