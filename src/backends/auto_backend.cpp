#include "backends/auto_backend.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/test_hooks.hpp"
#include "base/text/plain_streams.hpp"
#include "base/text/printable.hpp"
#include "host/peers.hpp"
#include "store/launch.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"

namespace weft {
namespace {

// Returns the MPI that this rank could use between hosts. It is the MPI of the launcher, if its plug-in can
// be loaded here. Returns "" if this rank can use only gloo.
std::string usable_mpi(Context& context, std::string& why) {
  const Launcher launcher = find_launch_info(context).launcher;
  const std::string_view mpi = launcher == Launcher::openmpi ? "mpi-openmpi"
                               : launcher == Launcher::hydra ? "mpi-mpich"
                                                             : "";
  if (mpi.empty()) {
    why = "no mpirun started it";
    return {};
  }
  try {
    load_backend(context, mpi);
    return std::string(mpi);
  } catch (const Error& e) {
    why = e.what();
    return {};
  }
}

/// The message of a rank to the other ranks.
struct RankInfo {
  std::string mpi;     // the MPI that the rank can use, or "-"
  std::string host;    // the rank's host, and its user
  std::string socket;  // the socket of the rank's process
  std::string no_shared_memory;
};

RankInfo read_info(const std::string& text) {
  TextIn words(text);
  RankInfo info;
  words >> info.mpi >> info.host >> info.socket >> std::ws;
  std::getline(words, info.no_shared_memory);
  return info;
}

/// Returns why the ranks cannot use shm. Empty: they can use it.
std::string why_not_shared(const std::vector<RankInfo>& all) {
  const auto same = [&](std::string RankInfo::*field) {
    return std::all_of(all.begin(), all.end(),
                       [&](const RankInfo& info) { return info.*field == all[0].*field; });
  };
  if (same(&RankInfo::socket) && same(&RankInfo::host)) return {};  // threads of one process
  for (std::size_t r = 0; r < all.size(); ++r)
    if (is_unknown_host(all[r].host))
      return fmt::format("rank {} cannot determine its host ({})", r, kUnknownHostText);
  if (!same(&RankInfo::host)) return "the ranks are on several hosts";
  for (std::size_t r = 0; r < all.size(); ++r)
    if (!all[r].no_shared_memory.empty())
      return fmt::format("rank {} has no memory that others can map ({})", r, all[r].no_shared_memory);
  return {};
}

}  // namespace

std::unique_ptr<Backend> make_auto_backend(const GroupInit& b) {
  const auto take = [&](std::string_view name, const std::string& why) {
    b.context.log().write(LogLayer::backends, LogLevel::info,
                          fmt::format("group \"{}\": auto takes {}: {}", b.name, name, why));
    return load_backend(b.context, name)(b);
  };
  const std::string wanted = printable(env::get("WEFT_BACKEND").value_or("auto"));
  const auto take_wanted = [&] {
    try {
      static_cast<void>(load_backend(b.context, wanted));
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("WEFT_BACKEND is \"{}\": {}", wanted, e.what()));
    }
    return take(wanted, "WEFT_BACKEND says so");
  };
  if (b.size == 1) return wanted == "auto" ? take("shm", "one rank") : take_wanted();
  const ProcessAddress self = host_peers_of(b.context).self();
  // Memory is shared with processes of the same user on the same host (see HostPeers).
  const std::string test_host = test_hooks(b).host;
  const std::string host = test_host.empty() ? fmt::format("{}/{}", self.host, self.user) : test_host;
  std::string why_not;
  const std::string mpi = usable_mpi(b.context, why_not);
  std::vector<std::string> infos = join(b, "auto",
                                        fmt::format("{}\n{} {} {} {}", wanted, mpi.empty() ? "-" : mpi, host,
                                                    self.socket, host_peers_of(b.context).no_shared_memory()),
                                        0);
  for (int r = 0; r < b.size; ++r) {
    std::string& info = infos[static_cast<std::size_t>(r)];
    const std::size_t end = info.find('\n');
    if (const std::string theirs = info.substr(0, end); theirs != wanted)
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": WEFT_BACKEND is {} on rank {}, {} on rank {}; "
                                              "expected the same on all ranks",
                                              b.name, theirs, r, wanted, b.rank),
                          .ranks = {std::min(r, b.rank), std::max(r, b.rank)}});
    info.erase(0, end + 1);
  }
  if (wanted != "auto") return take_wanted();
  // Each rank decides from the messages of all ranks, so all ranks choose the same transport.
  std::vector<RankInfo> all;
  for (const std::string& text : infos) all.push_back(read_info(text));
  const std::string not_shared = why_not_shared(all);
  if (not_shared.empty()) return take("shm", "all ranks share this host");
  if (!mpi.empty() &&
      std::all_of(all.begin(), all.end(), [&](const RankInfo& info) { return info.mpi == mpi; }))
    return take(mpi, not_shared + ", and its mpirun started them");
  const std::string why = mpi.empty() ? why_not : "not all ranks can use " + mpi;
  return take("gloo", fmt::format("{}, and not MPI: {}", not_shared, why));
}

}  // namespace weft
