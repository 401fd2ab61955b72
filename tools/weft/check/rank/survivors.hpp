// A new group of the ranks that are left after a failure.
#pragma once

#include <string>

#include "backends/test_hooks.hpp"
#include "runner.hpp"

namespace weft::check {

/// The complaint. Empty: none.
struct SurvivorsComplaint {
  std::string text;
  bool perhaps_late = false;  ///< a late rank would explain it
};

/// Makes the group of survivors, by shrink() of the group of all ranks, `whole`, or new from the store, and
/// uses it. `left`: one bit for each rank that is in it. `hooks`: the hooks of the group that shrink() makes.
SurvivorsComplaint use_group_of_survivors(const Program& p, int rank, Context& context,
                                          const Membership& member, const Settings& settings,
                                          const SharedReport& shared, ProcessGroup& whole,
                                          const TestHooks& hooks, std::uint32_t left);

}  // namespace weft::check
