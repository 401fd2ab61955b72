// A user's program that uses MPI and weft together, for mpi_test: `mpi_program <what> <backend>`. Built once
// against each MPI.
#include <fmt/format.h>
#include <mpi.h>

#include <cstdio>
#include <string>
#include <thread>
#include <vector>

#include "weft/backends/plugin.hpp"
#include "weft/group/process_group.hpp"

int main(int argc, char** argv) {
  const std::string what = argv[1], backend = argv[2];
  weft::Context context;
  int rank = 0;
  const auto say = [&](const std::string& text) {
    const std::string line = fmt::format("rank {}: {}\n", rank, text);
    std::fwrite(line.data(), 1, line.size(), stdout);
    std::fflush(stdout);
  };
  // Asks for the other MPI's plug-in, which must say why not, whether MPI has been initialised or not.
  if (what == "other") {
    const auto ask = [&] {
      try {
        weft::load_backend(context, backend);
        say("loaded");
      } catch (const weft::Error& e) {
        say(e.what());
      }
    };
    ask();
    MPI_Init(&argc, &argv);
    ask();
    MPI_Finalize();
    return 0;
  }
  int provided = 0;
  MPI_Init_thread(&argc, &argv, what == "single" ? MPI_THREAD_SINGLE : MPI_THREAD_MULTIPLE, &provided);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  {
    weft::Membership m = weft::Membership::from_env(context);
    weft::ProcessGroup group = weft::ProcessGroup::create(context, backend, m);
    std::vector<float> in{static_cast<float>(m.rank + 1)}, out{0};
    const auto all_reduce = [&] { group.all_reduce(weft::view(std::as_const(in)), weft::view(out)).wait(); };
    all_reduce();
    say(fmt::format("sum {}", out[0]));
    if (what == "single") {
      std::thread([&] {
        try {
          all_reduce();
        } catch (const weft::Error& e) {
          say(fmt::format("{}: {}", name(e.code()), e.what()));
        }
      }).join();
      m.store->add("done", 1);
      while (m.store->add("done", 0) < m.size) std::this_thread::yield();
    }
  }
  // MPI still belongs to the program, and so does its error handler.
  MPI_Errhandler handler;
  MPI_Comm_get_errhandler(MPI_COMM_WORLD, &handler);
  int sum = 0;
  MPI_Allreduce(&rank, &sum, 1, MPI_INT, MPI_SUM, MPI_COMM_WORLD);
  say(fmt::format("world {}, fatal {}", sum, handler == MPI_ERRORS_ARE_FATAL));
  MPI_Finalize();
  return 0;
}
