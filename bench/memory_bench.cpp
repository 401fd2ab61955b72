// Memory, descriptors and mappings of ranks that are threads of one process: after they have made a group,
// after each has exchanged a halo with both neighbours of a ring, and after each has sent to the next one.
//
//   memory_bench 256
#include <barrier>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <thread>
#include <vector>

#include "weft/weft.hpp"

namespace {

using namespace weft;

void show(const char* when) {
  long resident = 0, all = 0;
  std::ifstream status("/proc/self/status");
  for (std::string line; std::getline(status, line);) {
    if (line.starts_with("VmRSS:")) resident = std::atol(line.c_str() + 6);
    if (line.starts_with("VmSize:")) all = std::atol(line.c_str() + 7);
  }
  int mappings = 0;
  std::ifstream maps("/proc/self/maps");
  for (std::string line; std::getline(maps, line);) ++mappings;
  const auto descriptors = std::distance(std::filesystem::directory_iterator("/proc/self/fd"), {});
  std::printf("| %-15s | %8.1f MB | %9.1f MB | %11d | %8d |\n", when, static_cast<double>(resident) / 1024,
              static_cast<double>(all) / 1024, static_cast<int>(descriptors), mappings);
}

}  // namespace

int main(int argc, char** argv) {
  const int n = argc > 1 ? std::atoi(argv[1]) : 8;
  std::printf(
      "| %3d ranks       | VmRSS       | VmSize       | descriptors | mappings |\n|---|---|---|---|---|\n",
      n);
  Context context;
  const std::shared_ptr<Store> store = make_local_store();
  show("before");
  std::barrier point(n + 1);
  std::vector<std::jthread> ranks;
  for (int rank = 0; rank < n; ++rank)
    ranks.emplace_back([&, rank] {
      Membership member;
      member.store = store;
      member.name = std::string("ring");
      member.rank = rank;
      member.size = n;
      ProcessGroup group = ProcessGroup::create(context, "shm", member);
      const auto shown = [&] {
        point.arrive_and_wait();
        point.arrive_and_wait();
      };
      shown();
      const DeviceMesh mesh(group, {{"y", n}});
      const Partition x(make_layout(mesh, {Shard{0}}, {2 * n, 64}));
      Window window(x, {WindowDim::halo(x, 0, 1, 1, Edge::periodic())});
      const std::vector<float> in(128);
      std::vector<float> out(256);
      for (int i = 0; i < 20; ++i) window.fetch(view(in.data(), {2, 64}), view(out.data(), {4, 64}));
      shown();
      std::int32_t there = 0;
      const std::int32_t here = rank;
      for (int i = 0; i < 20; ++i) {
        Work sent = group.send(view(&here, 1), (rank + 1) % n);
        group.recv(view(&there, 1), (rank + n - 1) % n).wait();
        sent.wait();
      }
      shown();
    });
  for (const char* const when : {"group made", "halos exchanged", "messages sent"}) {
    point.arrive_and_wait();
    show(when);
    point.arrive_and_wait();
  }
}
