// A rank of a job in which rank 2 is late: it computes while the others wait, until they fail.
#include <cstdio>
#include <thread>
#include <vector>

#include "weft/group/process_group.hpp"

int main() {
  using namespace std::chrono_literals;
  weft::Context context;
  weft::ProcessGroup g = weft::ProcessGroup::create(context, "shm", weft::Membership::from_env(context, 20s));
  std::vector<float> x(1000);
  try {
    for (int step = 0;; ++step) {
      if (step == 1 && g.rank() == 2) std::this_thread::sleep_for(30s);
      g.all_reduce(weft::view(x), weft::view(x), {.deadline = step == 0 ? 20s : 500ms}).wait();
    }
  } catch (const weft::Error& e) {
    std::printf("%s\n", e.what());
    return 1;
  }
}
