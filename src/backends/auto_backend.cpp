#include "backends/auto_backend.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "backends/join.hpp"
#include "backends/launchers.hpp"
#include "base/neighbourhood.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"

namespace weft {
namespace {

// What this rank could use off its host: the launcher's MPI if its plug-in loads here. Empty: gloo.
std::string usable_mpi(Context& context, std::string& why) {
  const Launcher launcher = find_seat(context).launcher;
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

}  // namespace

std::unique_ptr<Backend> make_auto_backend(const Bringup& b) {
  const auto take = [&](std::string_view name, const std::string& why) {
    b.context.log().write(LogLevel::info, fmt::format("group \"{}\": auto takes {}: {}", b.name, name, why));
    return load_backend(b.context, name)(b);
  };
  const std::string wanted = env::get("WEFT_BACKEND").value_or("auto");
  if (b.size == 1) return wanted == "auto" ? take("shm", "one rank") : take(wanted, "WEFT_BACKEND says so");
  const ProcessAddress self = b.context.neighbourhood().self();
  // Memory is shared with processes of the same user on the same host (see Neighbourhood).
  const std::string host = b.test.host.empty() ? fmt::format("{}/{}", self.host, self.user) : b.test.host;
  std::string why_not;
  const std::string mpi = usable_mpi(b.context, why_not);
  std::vector<std::string> cards =
      join(b, "auto", fmt::format("{} {} {}", wanted, mpi.empty() ? "-" : mpi, host), 0);
  for (int r = 0; r < b.size; ++r) {
    std::string& card = cards[static_cast<std::size_t>(r)];
    const std::size_t space = card.find(' ');
    if (const std::string theirs = card.substr(0, space); theirs != wanted)
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": WEFT_BACKEND is {} on rank {}, {} on rank {}; "
                                              "expected the same on all ranks",
                                              b.name, theirs, r, wanted, b.rank),
                          .ranks = {std::min(r, b.rank), std::max(r, b.rank)}});
    card.erase(0, space + 1);
  }
  if (wanted != "auto") return take(wanted, "WEFT_BACKEND says so");
  // Of what all have said, so that all choose alike.
  const auto all = [&](const auto& is) { return std::all_of(cards.begin(), cards.end(), is); };
  const auto host_of = [](const std::string& card) { return card.substr(card.find(' ') + 1); };
  if (all([&](const std::string& c) { return host_of(c) == host; }))
    return take("shm", "all ranks share this host");
  if (!mpi.empty() && all([&](const std::string& c) { return c.starts_with(mpi + " "); }))
    return take(mpi, "the ranks are on several hosts, and its mpirun started them");
  const std::string why = mpi.empty() ? why_not : "not all ranks can use " + mpi;
  return take("gloo", fmt::format("the ranks are on several hosts, and not MPI: {}", why));
}

}  // namespace weft
