// Three ranks that add numbers without end, until those that the command line names fail. For the tests of
// the texts that `weft run` prints then.
//
//   failing_rank terminate|exit HOW [HOW]   what ranks do that notice it: let the Error end them, or exit with 1;
//                                           how rank 1 fails, and rank 2; "return": it leaves, and returns 0
//   failing_rank mistake WHAT               all return 0 after what no Error tells of
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <stdexcept>
#include <string>
#include <thread>
#include <vector>

#include "weft/weft.hpp"

namespace {

// Returns where the rank is to leave its group before its process ends.
void fail(const std::string& how) {
  if (how == "kill") std::raise(SIGKILL);
  if (how == "exit") std::_Exit(3);
  if (how == "throw") throw std::runtime_error("no such file");
}

void add_numbers(const std::string& how) {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "shm", weft::Membership::from_env(context));
  std::vector<float> x(1000, 1);
  for (int i = 0;; ++i) {
    if (i == 100 && !how.empty()) return fail(how);
    group.all_reduce(weft::view(x), weft::view(x), {.op = weft::ReduceOp::max}).wait();
  }
}

void make_mistake(const std::string& what) {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "shm", weft::Membership::from_env(context));
  std::vector<float> x(5000, 1);
  const int root = what == "roots" && group.rank() == 1 ? 1 : 0;
  if (what == "drop") static_cast<void>(group.all_reduce(x));
  if (what != "drop" && (what != "left out" || group.rank() != 1)) group.broadcast(x.front(), root).wait();
}

}  // namespace

int main(int argc, char** argv) {
  const std::string reaction = argv[1];
  const int rank = std::atoi(std::getenv("WEFT_RANK"));
  const std::string how = rank > 0 && rank + 1 < argc ? argv[rank + 1] : "";
  if (reaction == "mistake") {
    make_mistake(argv[2]);
    return 0;
  }
  if (reaction == "terminate" && how.empty()) {
    add_numbers(how);
    return 0;
  }
  try {
    add_numbers(how);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    if (how.empty()) return 1;
  }
  if (how == "return") return 0;
  // The others have been notified by now; this rank still has to clean up.
  std::this_thread::sleep_for(std::chrono::milliseconds(300));
  return 3;
}
