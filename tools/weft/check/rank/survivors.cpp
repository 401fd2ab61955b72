#include "rank/survivors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <vector>

#include "rank/trial.hpp"

namespace weft::check {
namespace {

constexpr auto kShrink = std::chrono::seconds(1);  // for ranks to come to shrink()

// The fault of a sum over the group.
std::string sum_over(Context& context, ProcessGroup& group, std::uint64_t salt, bool shared) {
  Step s;
  s.op = Op::all_reduce;
  s.dtype = DType::i64;
  s.count = 1009;
  s.salt = salt;
  s.shared = shared;
  const Trial trial(context, s, group.rank(), group.size(), {});
  group.submit(trial.calls()[0]).wait();
  return trial.complaint(true);
}

}  // namespace

SurvivorsComplaint use_group_of_survivors(const Program& p, int rank, Context& context,
                                          const Membership& member, const Settings& settings,
                                          const SharedReport& shared, ProcessGroup& whole,
                                          const TestHooks& hooks, std::uint32_t left) {
  Membership m = member;
  m.name += "/after";
  m.deadline = settings.patience;
  if (m.process_rank < 0) m.process_rank = m.rank;
  m.size = 0;
  std::vector<int> ranks;
  for (int r = 0; r < p.ranks(); ++r) {
    if ((left >> r & 1u) == 0) continue;
    if (r == rank) m.rank = m.size;
    ++m.size;
    ranks.push_back(r);
  }
  // A rank that was still making the group when it failed, or has ended it, has no group to shrink.
  const bool shrinks =
      mix(p.seed, p.index) % 2 == 0 && !p.ends && p.ending != Ending::leave &&
      std::all_of(ranks.begin(), ranks.end(), [&](int r) { return shared.ranks[r].made.load(); });
  SurvivorsComplaint wrong;
  try {
    const ScopedTestHooks scope(context, m.process_rank, shrinks ? hooks : TestHooks{});
    ProcessGroup group = shrinks            ? whole.shrink(kShrink)
                         : settings.factory ? ProcessGroup::create(context, settings.factory(context), m)
                                            : ProcessGroup::create(context, settings.backend, m);
    if (shrinks &&
        !std::equal(ranks.begin(), ranks.end(), group.parent_ranks().begin(), group.parent_ranks().end()))
      wrong = {fmt::format("shrink() gave ranks {}; expected {}", fmt::join(group.parent_ranks(), ", "),
                           fmt::join(ranks, ", ")),
               true};
    for (const bool in_shared : {true, false})
      if (const std::string what = sum_over(context, group, mix(p.seed, p.index), in_shared);
          !what.empty() && wrong.text.empty())
        wrong = {fmt::format("the new group: {}", what), false};
    group.barrier().wait();
  } catch (const std::exception& e) {
    if (wrong.text.empty()) wrong = {fmt::format("the new group of those who are left: {}", e.what()), true};
  }
  return wrong;
}

}  // namespace weft::check
