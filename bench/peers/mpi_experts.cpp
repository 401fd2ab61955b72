// The MPI peers of experts_bench: MPI_Alltoallv of a row for each choice of a token, own rows too, which lie
// packed in the order of their ranks. The choices, samples and rows are those of experts_bench. MPI has no
// layers. `weft bench experts` runs the programs; to run one by hand:
//
//   mpirun -n 2 mpi_experts_openmpi --dispatch 128x7168 --layers "" --rows
#include <mpi.h>

#include <algorithm>
#include <cstdio>
#include <numeric>
#include <stdexcept>
#include <string>
#include <string_view>
#include <vector>

#include "cases.hpp"
#include "train/choices.hpp"
#include "train/inputs.hpp"

namespace weft::bench {
namespace {

// Takes `flag` and its value out of the arguments.
std::string take(int& argc, char** argv, std::string_view flag) {
  for (int i = 1; i + 1 < argc; ++i) {
    if (flag != argv[i]) continue;
    const std::string value = argv[i + 1];
    std::copy(argv + i + 2, argv + argc, argv + i);
    argc -= 2;
    return value;
  }
  return {};
}

// The call between buffers that are there already.
struct Rows {
  Rows(const std::string& size, int rank, int ranks) {
    long tokens = 0, width = 0;
    if (std::sscanf(size.c_str(), "%ldx%ld", &tokens, &width) != 2)
      throw std::runtime_error("--dispatch " + size + ": expected tokens of each rank x width");
    const ChoiceCounts counts = counts_of_choices(tokens, rank, ranks);
    for (std::size_t r = 0; r < counts.sent.size(); ++r) {
      sent.push_back(static_cast<int>(counts.sent[r] * width));
      came.push_back(static_cast<int>(counts.came[r] * width));
    }
    const auto starts = [](const std::vector<int>& of) {
      std::vector<int> first(of.size());
      std::exclusive_scan(of.begin(), of.end(), first.begin(), 0);
      return first;
    };
    sent_at = starts(sent), came_at = starts(came);
    in.assign(static_cast<std::size_t>(sent_at.back() + sent.back()), static_cast<std::uint16_t>(rank + 1));
    out.resize(static_cast<std::size_t>(came_at.back() + came.back()));
  }
  void run() {
    MPI_Alltoallv(in.data(), sent.data(), sent_at.data(), MPI_UINT16_T, out.data(), came.data(),
                  came_at.data(), MPI_UINT16_T, MPI_COMM_WORLD);
  }
  std::string verify() const {
    for (std::size_t r = 0; r < came.size(); ++r)
      for (int i = 0; i < came[r]; ++i)
        if (out[static_cast<std::size_t>(came_at[r] + i)] != r + 1) return "a row is from another rank";
    return "";
  }
  std::vector<int> sent, came, sent_at, came_at;
  std::vector<std::uint16_t> in, out;
};

void body(int argc, char** argv) {
  int rank = 0, size = 0;
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_size(MPI_COMM_WORLD, &size);
  const std::vector<std::string> dispatches = words(take(argc, argv, "--dispatch"));
  const std::string layers_text = take(argc, argv, "--layers");
  const std::vector<std::string> layers =
      layers_text.empty() ? std::vector<std::string>() : words(layers_text);
  const std::string rounds = take(argc, argv, "--rounds");
  Spec spec = parse_spec(argc, argv, {{Kind::all_to_all}});
  spec.ranks = size;
  const Agree agree = [](std::int64_t mine) {
    MPI_Bcast(&mine, 1, MPI_INT64_T, 0, MPI_COMM_WORLD);
    return mine;
  };
  MPI_Barrier(MPI_COMM_WORLD);
  if (rank == 0) {
    char text[MPI_MAX_LIBRARY_VERSION_STRING];
    int length = 0;
    MPI_Get_library_version(text, &length);
    std::string line(text, static_cast<std::size_t>(length));
    line = line.substr(0, line.find_first_of(",\n"));
    std::replace(line.begin(), line.end(), '\t', ' ');
    spec.print_settings(WEFT_PEER, line);
  }
  Turns turns(spec.turns);
  for (int round = 0; round < (rounds.empty() ? 1 : rounds_from(rounds)); ++round) {
    for (const std::string& of : dispatches) {
      if (!turns.take()) return;
      Rows rows(of, rank, size);
      const Times t = measure({[&] { rows.run(); }, [&] { return rows.verify(); }}, agree, spec.seconds);
      if (rank == 0)
        print({{{"op", "experts"}, {"case", "dispatch/" + of}},
               size,
               0,
               {{"median_us", t.median_us},
                {"p99_us", t.p99_us},
                {"samples", static_cast<double>(t.samples)}}});
    }
    for (const std::string& tokens : layers) {
      if (!turns.take()) return;
      MPI_Barrier(MPI_COMM_WORLD);  // no rank takes another's turn
      if (rank == 0)
        print_unsupported({{{"op", "experts"}, {"case", "layer/" + tokens}}, size, 0, {}},
                          "MPI has no layers");
    }
  }
  turns.take();  // no rank leaves before the end
}

}  // namespace
}  // namespace weft::bench

int main(int argc, char** argv) {
  MPI_Init(&argc, &argv);
  try {
    weft::bench::body(argc, argv);
  } catch (const std::exception& e) {
    std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
    MPI_Abort(MPI_COMM_WORLD, 1);
  }
  MPI_Finalize();
}
