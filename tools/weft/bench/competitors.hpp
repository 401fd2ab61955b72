// The competitors, and how each is started with its best settings for one host.
#pragma once

#include <string>
#include <vector>

#include "job.hpp"
#include "options.hpp"

namespace weft::bench {

struct Competitor {
  enum class Who { weft, mpi, other, machine };
  std::string name;   ///< "shared", "openmpi", …: the names in JSON and flags
  std::string title;  ///< "weft shared", "Open MPI"
  Who who = Who::weft;
  std::string memory{}, dtype{};  ///< of ours; memory may be a backend
  Job::Start start{};
  std::string settings{};  ///< for people: transport, binding; the program adds its version
  /// why it cannot be started here, and which package to install; empty: it can be started
  std::string missing{};
};

/// Names that --against knows.
const std::vector<std::string>& known_peers();

/// Our programs by memory and backend, the peers of --against, and the machine; each measures `op` with o's
/// sizes, `rounds` times. `op`: one of the programs' operations. Throws bad_argument for peers, memories or
/// backends that do not exist.
std::vector<Competitor> competitors(const Options& o, const std::string& op);

/// The start of a job of one of the MPIs ("openmpi", "mpich", "intelmpi"), without its program; `missing`: as
/// above.
Competitor mpi_launcher(const Options& o, const std::string& name);
/// The peers, each with the part that is missing here, if any: its programs, its launcher, its Python module.
std::vector<Competitor> all_peers(const Options& o);

/// The folder of our programs if --programs is not given: the folder of `weft`, as in a build, or
/// installed_programs(). Throws unsupported if the programs are in neither. The text names both folders and
/// what to install.
std::string find_programs();
/// The folder into which `cmake --install` puts the programs, found from the folder of `weft` itself.
std::string installed_programs();

/// The path of one of our programs. Throws unsupported if it is not there; the text names it and what to
/// install.
std::string program(const Options& o, const std::string& name);

/// Cores that this process, and thus all of its children, may use.
int usable_cores();
/// The scheduling of this process when the function was first called, which all its children inherit:
/// "SCHED_FIFO 10".
std::string scheduling();

}  // namespace weft::bench
