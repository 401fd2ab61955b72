#include "mesh/mesh_state.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <atomic>
#include <numeric>
#include <optional>
#include <utility>

#include "base/mutant.hpp"
#include "base/parse_number.hpp"
#include "group/group_state.hpp"
#include "weft/base/error.hpp"
#include "weft/mesh/spread_failure.hpp"
#include "weft/store/store.hpp"

namespace weft {

namespace {

// How many meshes this rank has made from a group.
struct MeshCount {
  std::atomic<int> value{0};
};
int next_number(const ProcessGroup& group) {
  return detail::Access::state(group)
      .users->kept<MeshCount>([] { return std::make_shared<MeshCount>(); })
      ->value++;
}

}  // namespace

MeshState::MeshState(Context& context, ProcessGroup* group, MeshShape shape, int rank)
    : context_(context),
      root_(group),
      root_users_(group == nullptr ? nullptr : detail::Access::state(*group).users),
      root_handles_gone_(root_users_ == nullptr ? 0 : root_users_->handles_gone()),
      shape_(std::move(shape)),
      rank_(rank),
      number_(group == nullptr ? 0 : next_number(*group)) {}

MeshState::MeshState(ProcessGroup&& group, const MeshShape& shape)
    : context_(group.context()),
      owned_(std::move(group)),
      root_(&owned_),
      root_users_(detail::Access::state(owned_).users),
      root_handles_gone_(root_users_->handles_gone()),
      shape_(shape.fit(owned_.size())),
      rank_(owned_.rank()),
      number_(next_number(owned_)) {}

std::shared_ptr<MeshState> MeshState::unflattened(const std::shared_ptr<MeshState>& whole, int axis,
                                                  const MeshShape& parts) {
  const MeshShape& before = whole->shape();
  const auto open = [](const MeshAxis& a) { return a.size == -1; };
  if (std::none_of(parts.axes().begin(), parts.axes().end(), open) && parts.size() != before.size(axis))
    throw Error(ErrorCode::bad_argument,
                fmt::format("mesh: {}={} cannot be divided into {} = {} ranks", before.name(axis),
                            before.size(axis), to_string(parts), parts.size()));
  const MeshShape fitted = parts.fit(before.size(axis));
  std::vector<MeshAxis> axes;
  for (int a = 0; a < before.axis_count(); ++a) {
    if (a != axis)
      axes.push_back(before.axes()[static_cast<std::size_t>(a)]);
    else
      axes.insert(axes.end(), fitted.axes().begin(), fitted.axes().end());
  }
  auto state =
      std::make_shared<MeshState>(whole->context_, whole->root_, MeshShape(std::move(axes)), whole->rank_);
  state->whole_ = whole;
  // Axes to the right of the divided one have other indices now.
  for (const auto& [name, old] : whole->taken_apart_)
    for (const int a : old)
      for (int i = 0; i < (a == axis ? fitted.axis_count() : 1); ++i)
        state->taken_apart_[name].push_back((a <= axis ? a : a + fitted.axis_count() - 1) + i);
  for (int i = 0; i < fitted.axis_count(); ++i) state->taken_apart_[before.name(axis)].push_back(axis + i);
  if (state->shape_.has(before.name(axis))) state->taken_apart_.erase(before.name(axis));
  return state;
}

const std::vector<int>* MeshState::axes_taken_apart(std::string_view name) const noexcept {
  const auto found = taken_apart_.find(name);
  return found == taken_apart_.end() ? nullptr : &found->second;
}

std::vector<int> MeshState::ranks_along(const std::vector<int>& axes) const {
  std::vector<int> at = shape_.coordinates(rank_);
  int count = 1;
  for (const int a : axes) count *= shape_.size(a);
  std::vector<int> ranks;
  ranks.reserve(static_cast<std::size_t>(count));
  for (int i = 0; i < count; ++i) {
    int rest = i;
    for (std::size_t k = axes.size(); k-- > 0;) {
      at[static_cast<std::size_t>(axes[k])] = rest % shape_.size(axes[k]);
      rest /= shape_.size(axes[k]);
    }
    ranks.push_back(shape_.rank(at));
  }
  return ranks;
}

ProcessGroup& MeshState::root() const {
  if (root_users_->handles_gone() != root_handles_gone_)
    throw Error(
        ErrorCode::bad_argument,
        root_ == &owned_
            ? fmt::format("mesh: the group of {} was left; expected that to be its last use",
                          to_string(shape_))
            : fmt::format(
                  "mesh: the group that {} was made of, and borrows, was destroyed, moved from or left; "
                  "expected it to exist longer than the mesh, or to be moved into it (std::move)",
                  to_string(shape_)));
  return *root_;
}

// Removes axes of one rank. They change neither the ranks nor their order, so without them more sub-meshes
// share a group.
std::vector<int> MeshState::longer(const std::vector<int>& axes) const {
  std::vector<int> longer;
  for (const int a : axes)
    if (shape_.size(a) > 1) longer.push_back(a);
  return longer;
}

bool MeshState::is_root_group(const std::vector<int>& ranks) const {
  return root_ != nullptr && std::is_sorted(ranks.begin(), ranks.end()) &&
         static_cast<int>(ranks.size()) == root().size();
}

MeshState::LazyGroup& MeshState::lazy_along(const std::vector<int>& longer) {
  const std::lock_guard lock(groups_mutex_);
  std::unique_ptr<LazyGroup>& entry = groups_[longer];
  if (entry == nullptr) entry = std::make_unique<LazyGroup>();
  return *entry;
}

// If the meshes of two ranks differ, their groups along axes have different members. So a comparison within a
// group may find no partner. So the ranks compare the meshes of a root group, by their numbers, in its store.
// The first rank to arrive stores its shape there. If a shape differs, the root group fails. Ranks that wait
// for others, in the root group or while they make a group from it, get the error.
void MeshState::expect_same_mesh() {
  if (root_->size() == 1 || root_->failed() || WEFT_MUTANT("meshes_unseen")) return;
  const GroupState& group = detail::Access::state(*root_);
  const CalledInWaits answers = group.answering();
  const std::string own = fmt::format("{} {}", rank_, to_string(shape_));
  const std::string first = group.member.store->compare_set(group.key(fmt::format("mesh{}", number_)), "",
                                                            own, Deadline::after(group.member.deadline));
  const std::size_t space = std::min(first.find(' '), first.size());
  if (first.substr(space) == own.substr(own.find(' '))) return;
  const int other = parse_integer<int>(std::string_view(first).substr(0, space)).value_or(-1);
  Failure why{
      .code = ErrorCode::mismatch,
      .text = fmt::format("mesh: rank {} made{} of group \"{}\" and rank {} made {} (mesh {} of that group); "
                          "expected the same on all ranks",
                          other, first.substr(space), root_->name(), rank_, to_string(shape_), number_),
      .ranks = {std::min(other, rank_), std::max(other, rank_)}};
  detail::Access::state(*root_).fail(why);
  throw Error(std::move(why));
}

ProcessGroup& MeshState::group_along(const std::vector<int>& axes) {
  if (root_ == nullptr)
    throw Error(ErrorCode::unsupported,
                fmt::format("mesh: {} is arithmetic only; without a process group it cannot communicate",
                            to_string(shape_)));
  root();
  std::call_once(compared_, [this] { expect_same_mesh(); });
  const std::vector<int> several = longer(axes), ranks = ranks_along(several);
  if (is_root_group(ranks)) {
    if (static_cast<int>(axes.size()) < shape_.axis_count()) root_is_of_axes_ = true;
    return *root_;
  }
  LazyGroup& lazy = lazy_along(several);
  const std::lock_guard lock(lazy.making);
  if (!lazy.group) {
    std::vector<std::string> names;
    for (const int a : several) names.push_back(shape_.name(a));
    lazy.group = root().subgroup(names.empty() ? "self" : fmt::format("{}", fmt::join(names, ",")), ranks);
  }
  return lazy.group;
}

void MeshState::spread_failure() {
  struct Made {
    ProcessGroup* group;
    std::vector<int> ranks;  // of the root
  };
  std::vector<Made> made;
  if (root_is_of_axes_) {
    made.push_back({&root(), std::vector<int>(static_cast<std::size_t>(root().size()))});
    std::iota(made[0].ranks.begin(), made[0].ranks.end(), 0);
  }
  {
    const std::lock_guard lock(groups_mutex_);
    for (const auto& [axes, lazy] : groups_) {
      const std::unique_lock making(lazy->making, std::try_to_lock);
      if (making && lazy->group) made.push_back({&lazy->group, ranks_along(axes)});
    }
  }
  constexpr std::string_view kSpread = "mesh: a failure of rank ";
  std::string why;
  for (const Made& m : made) {
    const std::optional<Failure> failure = detail::Access::state(*m.group).failure();
    if (!failure) continue;
    if (const std::size_t at = failure->text.find(kSpread); at != std::string::npos) {
      why = failure->text.substr(at);  // of a rank whose own groups had failed
      break;
    }
    std::vector<int> failed;
    for (const int r : failure->ranks) failed.push_back(m.ranks.at(static_cast<std::size_t>(r)));
    if (failed.empty()) failed.push_back(rank_);
    why = fmt::format("{}{} of {}: {}", kSpread, fmt::join(failed, ", "), to_string(shape_), failure->text);
  }
  if (why.empty()) return;
  for (const Made& m : made)
    if (!m.group->failed()) m.group->abort(why);
}

std::shared_ptr<UserNumbers> MeshState::users_along(const std::vector<int>& axes) {
  const std::vector<int> several = longer(axes);
  return is_root_group(ranks_along(several)) ? detail::Access::state(root()).users
                                             : lazy_along(several).users;
}

void spread_failure(const DeviceMesh& mesh) noexcept {
  try {
    detail::MeshAccess::state(mesh).spread_failure();
  } catch (...) {}  // the program has the first error already
}

}  // namespace weft
