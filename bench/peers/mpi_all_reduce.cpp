// The peer of all_reduce_bench: raw MPI_Allreduce of f32, the same sizes, checks, samples and statistics.
// Rank 0 prints one JSON object a line. Run by ../run_all_reduce.py; by hand: mpirun -n 2 mpi_all_reduce
#include <mpi.h>

#include <cstdio>
#include <vector>

#include "plan.hpp"

namespace {

float value(int rank, std::int64_t i) { return static_cast<float>((i * 7 + rank * 31) % 251); }

}  // namespace

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  for (const std::int64_t bytes :
       {8, 256, 2 << 10, 8 << 10, 32 << 10, 128 << 10, 512 << 10, 2 << 20, 8 << 20, 32 << 20}) {
    const int count = static_cast<int>(bytes / 4);
    std::vector<float> in(count), out(count, -1.0f);
    for (int i = 0; i < count; ++i) in[i] = value(rank, i);
    const auto run = [&] { MPI_Allreduce(in.data(), out.data(), count, MPI_FLOAT, MPI_SUM, MPI_COMM_WORLD); };
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
      std::printf("{\"bytes\": %lld, \"median_us\": %.4f, \"p99_us\": %.4f}\n", static_cast<long long>(bytes),
                  t.median_us, t.p99_us);
    std::fflush(stdout);
  }
  MPI_Finalize();
}
