// The variables by which torch's env:// finds its ranks: `weft run` sets them in addition to its own.
#pragma once

#include <string>
#include <string_view>
#include <utility>
#include <vector>

namespace weft::tools {

/// RANK, WORLD_SIZE, LOCAL_RANK and LOCAL_WORLD_SIZE; MASTER_ADDR and MASTER_PORT: a port of loopback on
/// which rank 0 will serve torch's store. The port stays reserved while this object exists: the kernel gives
/// it to nobody, except to a server that sets SO_REUSEADDR, as the servers of torch and weft do. Variables
/// that are already set stay: another launcher's variables, or a port that the caller chose; unless an outer
/// `weft run` set them.
class TorchVariables {
 public:
  /// Throws system if no port is available.
  explicit TorchVariables(int ranks);
  ~TorchVariables();
  TorchVariables(const TorchVariables&) = delete;
  TorchVariables& operator=(const TorchVariables&) = delete;
  std::vector<std::pair<std::string_view, std::string>> of(int rank) const;

 private:
  int ranks_;
  bool sets_ranks_, sets_address_, sets_port_;
  int reserved_ = -1;  // a socket that has the port and does not listen
  std::string port_;
};

}  // namespace weft::tools
