// The peer of all_reduce_bench: raw MPI_Allreduce of f32, out of place and in place, the same sizes, checks,
// samples and statistics. Rank 0 prints one JSON object a line. Run by ../run_all_reduce.py; by hand: mpirun
// -n 2 mpi_all_reduce
#include <mpi.h>

#include <cstdio>
#include <cstdlib>
#include <memory>

#include "plan.hpp"

namespace {

float value(int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 31) % 251); }

struct Free {
  void operator()(float* p) const { std::free(p); }
};
using Buffer = std::unique_ptr<float, Free>;  // page-aligned
Buffer allocate(std::int64_t bytes) {
  return Buffer(
      static_cast<float*>(std::aligned_alloc(4096, static_cast<std::size_t>((bytes + 4095) / 4096 * 4096))));
}

void time_size(int rank, int size, bool in_place, std::int64_t bytes) {
  const int count = static_cast<int>(bytes / 4);
  const Buffer in = allocate(bytes), other = allocate(bytes);
  float* const out = in_place ? in.get() : other.get();
  const void* const from = in_place ? MPI_IN_PLACE : in.get();
  for (int i = 0; i < count; ++i) other.get()[i] = -1;
  for (int i = 0; i < count; ++i) in.get()[i] = value(rank, i);
  const auto run = [&] { MPI_Allreduce(from, out, count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
  run();
  for (int i = 0; i < count; ++i) {
    float want = 0;
    for (int r = 0; r < size; ++r) want += value(r, i);
    if (out[i] != want) {
      std::fprintf(stderr, "mpi_all_reduce: element %d: %f; expected %f\n", i, out[i], want);
      MPI_Abort(MPI_COMM_WORLD, 1);
    }
  }
  const auto agree = [](bool more) {
    int first = more;
    MPI_Bcast(&first, 1, MPI_INT, 0, MPI_COMM_WORLD);
    return first != 0;
  };
  const weft::bench::Times t = weft::bench::time_samples(bytes, run, agree);
  if (rank == 0)
    std::printf("{\"in_place\": %s, \"bytes\": %lld, \"median_us\": %.4f, \"p99_us\": %.4f}\n",
                in_place ? "true" : "false", static_cast<long long>(bytes), t.median_us, t.p99_us);
  std::fflush(stdout);
}

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (const bool in_place : {false, true})
    for (const std::int64_t bytes :
         {8, 256, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20})
      time_size(rank, size, in_place, bytes);
  MPI_Finalize();
}
