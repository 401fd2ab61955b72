#include "backends/shm/collectives/collectives.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "backends/call_word.hpp"

namespace weft::shm {

Step Collectives::poll(OpState& s) noexcept {
  CallState& st = state(s);
  current_ = &s;
  Step step = Step::pending;
  if (st.phase <= Phase::arriving) {
    step = arrivals_.step(s);
    if (st.phase == Phase::unpublished) return step;
    if (step == Step::done) step = begin_path(s);
  } else {
    step = step_path(s);
  }
  if (step == Step::done) current_ = nullptr;
  if (!arrivals_.is_behind(step == Step::pending)) return step;
  const Step caught = arrivals_.catch_up();
  return caught == Step::failed || step == Step::pending ? caught : step;
}

// Call this when all ranks that this rank needs have arrived.
Step Collectives::begin_path(OpState& s) noexcept {
  if (state(s).is_inline) {
    inline_.plan(s);
    return inline_.step(s);
  }
  const Step chosen = choose_path(s);
  return chosen == Step::advanced ? step_path(s) : chosen;
}

Step Collectives::step_path(OpState& s) noexcept {
  switch (state(s).phase) {
    case Phase::unpublished:
    case Phase::arriving: break;
    case Phase::inlined: return inline_.step(s);
    case Phase::direct: return direct_.step(s);
    case Phase::single: return single_.step(s);
    case Phase::staged: return staged_.step(s);
  }
  return Step::pending;
}

bool Collectives::is_missing(const OpState& s, int r) const noexcept {
  switch (state(s).phase) {
    case Phase::unpublished:
    case Phase::arriving: return arrivals_.missing(s, r);
    case Phase::inlined: return inline_.missing(s, r);
    case Phase::direct: return direct_.missing(s, r);
    case Phase::single: return single_.missing(s, r);
    case Phase::staged: return staged_.missing(s, r);
  }
  return false;
}

std::vector<int> Collectives::missing(const OpState& s) const {
  std::vector<int> ranks;
  for (int r = 0; r < group_.size; ++r)
    if (is_missing(s, r)) ranks.push_back(r);
  return ranks;
}

// Determines which rank's memory other ranks cannot access. It uses only the published places that other
// ranks access: each `in` that is read, and each `out` to which others write slices. Memory that a rank does
// not have counts as accessible.
Collectives::Reach Collectives::find_reach(const OpState& s) const noexcept {
  Reach reach;
  const bool outs = is_sliced(s);
  for (int r = 0; r < group_.size && !reach.foreign; ++r) {
    if (is_from_root(s) && r != s.root) continue;
    const Arrival& a = arrival(group_, r, s);
    // Rank r has sent a payload, and has not published the place of its memory.
    if (state(s).exposed_instead && (a.word & kExposed) == 0) return {.obstacle = r, .foreign = true};
    const bool beyond = !is_reachable(a.places.in) || (outs && !is_reachable(a.places.out));
    if (beyond && reach.obstacle < 0) reach.obstacle = r;
    reach.foreign =
        beyond && (group_.single_copy < needed_single_copy(s) || a.places.in.kind == Buffer::foreign ||
                   (outs && a.places.out.kind == Buffer::foreign));
  }
  return reach;
}

// Chooses the direct path, single copies or the staged path. All ranks choose the same path, because the
// choice depends only on what the ranks have published and on the path that a test has forced.
Step Collectives::choose_path(OpState& s) noexcept {
  group_.map_news();
  if (group_.path == Path::inline_only)
    return refuse(s, group_.rank,
                  s.in_blocks
                      ? fmt::format("path \"inline\" was requested, but a rank has more than {} bytes",
                                    sizeof(Arrival::both.payload))
                      : fmt::format("path \"inline\" was requested, but {} bytes are more than {}",
                                    payload_bytes(group_, s), kInlineBytes));
  const auto [obstacle, foreign] = find_reach(s);
  const bool all_reachable = obstacle < 0;
  if (group_.path == Path::direct && !all_reachable)
    return refuse(s, obstacle,
                  fmt::format("path \"direct\" was requested, but rank {}'s memory is not shared", obstacle));
  if (group_.path == Path::single && foreign)
    return refuse(
        s, obstacle,
        fmt::format("path \"single\" was requested, but rank {}'s memory cannot be reached", obstacle));
  if (group_.path == Path::single || (group_.path == Path::automatic && !all_reachable && !foreign &&
                                      is_single_copy_profitable(group_, s, agreed_count(s, group_.size)))) {
    single_.plan(s);
  } else if (group_.path == Path::staged || !all_reachable) {
    return staged_.plan(s);
  } else {
    direct_.plan(s);
  }
  return Step::advanced;
}

Step Collectives::refuse(const OpState& s, int because_of, std::string why) noexcept {
  raise(group_, {.code = ErrorCode::unsupported,
                 .text = fmt::format("{}: {}", name(s.op), why),
                 .op = s.op,
                 .call = s.call,
                 .ranks = {because_of}});
  return Step::failed;
}

// If many ranks have arrived, the text names one rank for each different call.
std::string Collectives::story(const OpState& s, std::span<const int> late) const {
  if (late.empty()) return "every rank has arrived";
  const bool one = late.size() == 1;
  return fmt::format("{} {}", name_ranks(late),
                     state(s).phase <= Phase::arriving ? "had not arrived"
                     : one                             ? "has not finished its part"
                                                       : "have not finished their parts");
}

}  // namespace weft::shm
