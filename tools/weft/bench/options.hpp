// The options of `weft bench`.
#pragma once

#include <cstdint>
#include <string>
#include <vector>

namespace weft::bench {

struct Options {
  std::string op;  ///< "all_reduce", …, "p2p", "facade", "overlap", "layers", "data", "domain", "experts"
  bool c = false;  ///< facade: weft.h above ProcessGroup
  bool list = false;                 ///< instead of measuring: lists the available ones
  std::vector<std::string> against;  ///< peers by name
  std::vector<std::string> memory;   ///< of ours: shared, foreign, single_copy, staged
  std::vector<std::string> backends = {"shm"};
  std::vector<std::string> sizes;             ///< as given: "8", "32K", "8M"
  std::vector<std::int64_t> bytes;            ///< the same as numbers, ascending
  std::vector<std::string> dtypes = {"f32"};  ///< several: next to each other, without peers
  std::string place, buffers = "hot", ranks_as = "processes";
  // layers
  std::vector<std::string> layers = {"mlp", "attention", "conv", "head"}, passes = {"forward", "both"};
  std::vector<std::int64_t> tokens = {8, 128, 512, 2048};
  std::vector<int> tp = {1, 2};
  std::vector<std::string> cases;  ///< data; empty: all
  // domain: empty: the program's own
  std::vector<std::string> maps, sequences;
  std::vector<std::string> dispatches, expert_layers;  ///< experts; empty: the program's own
  int ranks = 2, rounds = 2;
  double seconds = 0.2;  ///< of sampling per case
  double limit = 100;    ///< seconds, for one case of one program
  std::string programs;  ///< folder of the benchmark programs
  std::string python = "python3", intel_mpi;
  std::string json, plot;
  bool markdown = false;
};

}  // namespace weft::bench
