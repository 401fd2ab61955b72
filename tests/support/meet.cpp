// A rank that finds its membership in the environment, sends its number to the others through the job's
// store, and prints the sum of all numbers. For the tests of launchers.
#include <cstdio>
#include <exception>
#include <string>

#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"

int main() {
  try {
    weft::Context context;
    const weft::Membership m = weft::Membership::from_env(context);
    m.store->set("number/" + std::to_string(m.rank), std::to_string(10 + m.rank));
    int sum = 0;
    for (int peer = 0; peer < m.size; ++peer) {
      sum += std::stoi(
          m.store->get("number/" + std::to_string(peer), weft::Deadline::after(std::chrono::seconds(20))));
    }
    std::printf("rank %d of %d: %d\n", m.rank, m.size, sum);
    return 0;
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s\n", e.what());
    return 1;
  }
}
