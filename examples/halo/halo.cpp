// Heat in a ring of cells, divided over ranks: in each step a rank needs one cell of each neighbour (a halo).
// The result equals that of one rank, bit for bit.
//   weft run -n 4 -- ./halo
#include <cstdio>
#include <numeric>
#include <vector>

#include "weft/weft.hpp"

namespace {

constexpr std::int64_t kCells = 1000;
constexpr int kSteps = 200;

// cells[0] and cells.back() are the halo.
void step(std::vector<double>& cells, std::vector<double>& next) {
  for (std::size_t i = 1; i + 1 < cells.size(); ++i)
    next[i] = cells[i] + 0.2 * (cells[i - 1] - 2 * cells[i] + cells[i + 1]);
  cells.swap(next);
}

std::vector<double> first_heat(std::int64_t begin, std::int64_t count) {
  std::vector<double> cells(static_cast<std::size_t>(count) + 2);
  for (std::int64_t i = 0; i < count; ++i) cells[static_cast<std::size_t>(i) + 1] = (begin + i) % 100 < 50;
  return cells;
}

}  // namespace

int main() {
  weft::Context context;
  auto group = weft::ProcessGroup::create(context, "auto", weft::Membership::from_env(context));
  const weft::DeviceMesh mesh(group, {{"x", -1}});
  const weft::Halo halo(weft::make_layout(mesh, {weft::Shard{0}}, {kCells}),
                        {{0, 1, 1, weft::Edge::periodic()}});

  const weft::Chunk mine{halo.offset()[0], halo.inner().shape[0]};
  std::vector<double> cells = first_heat(mine.offset, mine.size), next(cells.size());
  for (int s = 0; s < kSteps; ++s) {
    halo.exchange(weft::view(cells.data(), halo.shape()));
    step(cells, next);
  }

  // Computes the same steps on one rank, to compare.
  std::vector<double> whole = first_heat(0, kCells), scratch(whole.size());
  for (int s = 0; s < kSteps; ++s) {
    whole.front() = whole[static_cast<std::size_t>(kCells)];
    whole.back() = whole[1];
    step(whole, scratch);
  }
  std::int64_t different = 0;
  for (std::int64_t i = 0; i < mine.size; ++i)
    different +=
        cells[static_cast<std::size_t>(i) + 1] != whole[static_cast<std::size_t>(mine.offset + i) + 1];
  double heat = std::accumulate(cells.begin() + 1, cells.end() - 1, 0.0);
  group.all_reduce(weft::view(&heat, 1), weft::view(&heat, 1)).wait();
  group.all_reduce(weft::view(&different, 1), weft::view(&different, 1)).wait();
  if (group.rank() == 0)
    std::printf("%d steps: heat %.6f, %lld cells differ from one rank's\n", kSteps, heat,
                static_cast<long long>(different));
  return different == 0 ? 0 : 1;
}
