// The competitors, and how each is started with its best settings for one host.
#pragma once

#include <string>
#include <vector>

#include "job.hpp"
#include "options.hpp"

namespace weft::bench {

struct Competitor {
  enum class Who { weft, mpi, other, machine };
  std::string name;   ///< "shared", "openmpi", …: what JSON and flags say
  std::string title;  ///< "weft shared", "Open MPI"
  Who who = Who::weft;
  std::string memory{}, dtype{};  ///< of ours; memory may be a backend
  Job::Start start{};
  std::string settings{};  ///< for people: transport, binding; the program adds its version
  std::string missing{};   ///< why it cannot be started here, and what to install; empty: it can
};

/// Names that --against knows.
const std::vector<std::string>& known_peers();

/// Ours by memory and backend, the peers of --against, and the machine; each measuring `op` with o's sizes,
/// `rounds` times over. `op` is one of the programs' operations. Throws bad_argument for peers, memories or
/// backends that there are not.
std::vector<Competitor> competitors(const Options& o, const std::string& op);

/// The peers, each with what is missing here, if anything: its programs, its launcher, its Python module.
std::vector<Competitor> all_peers(const Options& o);

/// The folder of our programs if --programs does not say: beside `weft`, as in a build, or
/// installed_programs(). Throws unsupported if they are in neither, naming both and what to install.
std::string find_programs();
/// The folder into which `cmake --install` puts them, found from that of `weft` itself.
std::string installed_programs();

/// The path of one of our programs. Throws unsupported if it is not there, naming it and what to install.
std::string program(const Options& o, const std::string& name);

/// Cores that this process, and so all it starts, may use.
int usable_cores();
/// How this process was scheduled when it was first asked, and so all it starts: "SCHED_FIFO 10".
std::string scheduling();

}  // namespace weft::bench
