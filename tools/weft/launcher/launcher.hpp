// Starts a program once per rank and ensures that all of its processes end. Call it from the program's only
// thread.
#pragma once

#include <optional>
#include <string>
#include <vector>

#include "weft/base/clock.hpp"

namespace weft::tools {

/// A job that is started again after a rank has failed, on at least so many ranks and at most so many.
struct Elastic {
  int least = 1, most = 1;
};

struct LaunchOptions {
  int ranks = 1;  ///< with elastic: of the first start
  std::optional<Elastic> elastic{};
  bool bind_cores = false;  ///< each rank to its share of this process's cores
  bool tag_output = true;   ///< "[2] " before each line of rank 2
  bool keep_going = false;  ///< a rank's failure is named and the others are left alone
  /// the backend for "auto", whatever the ranks' environment says; empty: auto chooses
  std::string backend{};
  Duration timeout{};  ///< of the whole job; zero: none
  /// The time from the first failure to SIGTERM, in which ranks may report what they saw.
  Duration notice = std::chrono::milliseconds(500);
  Duration grace = std::chrono::seconds(3);  ///< from SIGTERM to SIGKILL
};

/// Runs `command` (program and arguments; the program is looked up in PATH) as ranks 0 … ranks - 1, and
/// serves their store. Each rank has WEFT_RANK, WEFT_WORLD_SIZE, WEFT_LOCAL_RANK, WEFT_STORE, WEFT_JOB and
/// WEFT_TERMINAL, and torch's RANK and so on (torch_variables.hpp). Forwards SIGINT, SIGTERM, SIGHUP,
/// SIGQUIT, SIGUSR1 and SIGUSR2. When this function returns, no process of the job is left, even if this
/// process or its helper is killed with SIGKILL. With `elastic` a rank's failure is followed by a new start
/// of all ranks (elastic.hpp), which also have WEFT_RESTART_COUNT. Returns the exit status of the first rank
/// that failed (128 + signal if a signal ended it), 127 if the program does not exist, 126 if it cannot be
/// run, 124 if the job did not end within its timeout, 74 if all ranks ended well (with keep_going: if one
/// did) but their output could not be written, otherwise 0. With `elastic` that is of the last start.
int launch(const LaunchOptions& options, const std::vector<std::string>& command);

}  // namespace weft::tools
