// Groups inside a group: all ranks with the same colour, a chosen list of ranks, and a second group of the
// same ranks.
//   weft run -n 4 -- ./subgroups
#include <cstdio>
#include <vector>

#include "weft/weft.hpp"

int main() {
  weft::Context context;
  auto world = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));

  // Collective over all ranks: the even ranks get one group, and the odd ranks get another.
  auto half = world.split(world.rank() % 2);
  double sum = world.rank();
  half.all_reduce(weft::view(&sum, 1), weft::view(&sum, 1)).wait();

  // Only the members call it; the other ranks need not.
  double ends = 0;
  if (world.rank() == 0 || world.rank() == world.size() - 1) {
    auto pair =
        world.size() > 1 ? world.subgroup("ends", {0, world.size() - 1}) : world.subgroup("ends", {0});
    ends = world.rank() + 1;
    pair.all_reduce(weft::view(&ends, 1), weft::view(&ends, 1)).wait();
  }

  // A second group of the same ranks: calls of the two groups do not wait for each other.
  auto second = world.duplicate();
  double first_call = 1, second_call = 10;
  auto a = world.all_reduce(weft::view(&first_call, 1), weft::view(&first_call, 1));
  auto b = second.all_reduce(weft::view(&second_call, 1), weft::view(&second_call, 1));
  b.wait();
  a.wait();

  std::vector<double> sums(static_cast<std::size_t>(world.size()));
  world.all_gather(weft::view(&sum, 1), weft::view(sums)).wait();
  if (world.rank() != 0) return 0;
  std::printf("sums of the halves:");
  for (const double s : sums) std::printf(" %g", s);
  std::printf("\nfirst and last: %g\ntwo groups at once: %g and %g\n", ends, first_call, second_call);
}
