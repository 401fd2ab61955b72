#include "group/watch.hpp"

#include <fmt/format.h>
#include <time.h>

#include <utility>

#include "backends/last_calls.hpp"
#include "base/mutant.hpp"
#include "base/waits/suspension.hpp"
#include "group/failure.hpp"
#include "host/progress_engine.hpp"
#include "store/duration_text.hpp"
#include "weft/backends/call_record.hpp"

namespace weft {
namespace {

constexpr int kInspectEvery = 64;  // polls
constexpr int kWarnAfter = 10;     // a warning is due after a tenth of the deadline
constexpr auto kInspectPause = std::chrono::milliseconds(1);
// If a waiting thread has not looked at the clock for longer than this, it may have been suspended.
constexpr auto kGap = 2 * kSleep;

// The kernel's tick: some milliseconds long, and cheaper to read than the clock.
std::int64_t kernel_tick() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

}  // namespace

bool Watch::due(bool moved) noexcept {
  if (ring_.idle() || (moved && WEFT_MUTANT("watch_reset_by_traffic"))) {
    polls_ = 0;
    return false;
  }
  return ++polls_ >= kInspectEvery;
}

bool Watch::due_by_tick() noexcept {
  const std::int64_t now = kernel_tick();
  if (now == tick_ || WEFT_MUTANT("watch_reset_by_traffic")) return false;
  tick_ = now;
  return true;
}

// A gap is a time in which this rank has not looked at the clock. If the rank was suspended (stopped by a
// signal, or in a paused container), perhaps with the whole job, the gap should not count for deadlines.
// Suspended time that weft's own waits have noticed (suspended_time) never counts. A part of a gap may be the
// caller's own computation between two waits, which must count. So a gap counts up to twice the longest gap
// before it since a call began to wait. After a longer suspension a call gets as much additional time as the
// suspension lasted, at most its whole deadline, because ranks do not resume at the same moment.
void Watch::pass_over(Duration gap) noexcept {
  const Duration suspended = suspended_time();
  const Duration noticed = std::min(gap, suspended - std::exchange(suspended_, suspended)) - kGap;
  const Duration unlike = gap - std::max<Duration>(kGap, 2 * gap_);
  const Duration uncounted = std::max(noticed, unlike);
  bool waited = false;
  ring_.each([&](Ring::Slot& slot) {
    if (!slot.waited) return true;
    waited = true;
    if (uncounted <= Duration::zero() || WEFT_MUTANT("suspension_counts")) return true;
    if (slot.expires != Clock::time_point::max()) {
      slot.expires += uncounted;
      if (unlike > Duration::zero())
        slot.expires = std::max(slot.expires, inspected_ + std::min(unlike, slot.deadline()));
    }
    if (slot.warns != Clock::time_point::max()) slot.warns += uncounted;
    return true;
  });
  gap_ = waited ? std::max(gap_, gap) : Duration::zero();
}

bool Watch::inspect() noexcept {
  polls_ = 0;
  const auto now = Clock::now();
  const Duration gap = now - inspected_;
  if (gap < kInspectPause) return false;
  inspected_ = now;
  pass_over(gap);
  if (!backend_.healthy()) return true;
  bool failed = false;
  ring_.each([&](Ring::Slot& slot) {
    failed = inspect(slot, now);
    return !failed;
  });
  return failed;
}

void Watch::begin(Ring::Slot& slot, Clock::time_point now) noexcept {
  slot.waited = true;
  slot.expires =
      slot.deadline() >= std::chrono::hours(24 * 365) ? Clock::time_point::max() : now + slot.deadline();
  slot.warns = now + slot.deadline() / kWarnAfter;
}

bool Watch::inspect(Ring::Slot& slot, Clock::time_point now) noexcept {
  // Collectives wait one behind the other, so only the first collective can be reported as late.
  Ring::Slot& head = ring_.head_of(slot);
  const bool behind = &head != &slot;
  if (!slot.waited) {
    begin(slot, now);
  } else if (now >= slot.expires + (WEFT_MUTANT("slow_deadline") ? 3 * slot.deadline() : Duration())) {
    if (!backend_.ask(head.op)) return false;
    expire(head.waited && now >= head.expires ? head : slot, head);
    return true;
  } else if (behind) {
    slot.warns = now + slot.deadline() / kWarnAfter;
  } else if (now >= slot.warns && backend_.ask(slot.op)) {
    warn(slot);
  }
  return false;
}

// Warns once per call, when a tenth of its deadline has passed and a rank is missing.
void Watch::warn(Ring::Slot& slot) noexcept {
  slot.warns = inspected_ + slot.deadline() / kWarnAfter;
  try {
    std::string story;
    // all ranks have arrived, and the call is only slow
    if (backend_.missing(slot.op, story).empty()) return;
    slot.warns = Clock::time_point::max();
    context_.log().write_later(
        LogLayer::group, LogLevel::warning,  // the sink gets the line when no thread owns the group any more
        fmt::format("{}: not finished after {}, a tenth of its deadline: {}{}{}", what(slot.op, member_.size),
                    shown_seconds(slot.deadline() / kWarnAfter, 2), story, told_last_calls(),
                    tail(member_, slot.op.call)));
  } catch (...) {  // out of memory: there is no warning then
  }
}

// `head`: the call behind which this call waits, or this call itself.
void Watch::expire(const Ring::Slot& slot, const Ring::Slot& head) noexcept {
  std::string story;
  Failure why{.code = ErrorCode::timeout, .text = {}, .op = slot.op.op, .call = slot.op.call, .ranks = {}};
  why.ranks = backend_.missing(head.op, story);
  if (WEFT_MUTANT("wrong_blame")) why.ranks = {member_.rank};
  if (&head != &slot)
    story = fmt::format("it comes after {} [call {}]: {}", name(head.op.op), head.op.call, story);
  why.text = fmt::format("{}: not finished within {}: {}{}", name(slot.op.op), shown_seconds(slot.deadline()),
                         story, told_last_calls());
  backend_.fail(why);
}

std::vector<LastCall> Watch::last_calls() noexcept try {
  std::vector<LastCall> calls = backend_.last_calls();
  if (calls.size() != static_cast<std::size_t>(member_.size)) return {};
  for (int r = 0; r < member_.size; ++r) {
    LastCall& c = calls[static_cast<std::size_t>(r)];
    c.rank = r;
    if (static_cast<int>(c.op) >= kOpCount) c = {.rank = r};  // from a plug-in for a newer version of weft
  }
  LastCall& own = calls[static_cast<std::size_t>(member_.rank)];
  if (const OpState* const last = ring_.last_collective()) {
    const bool answered = own.answered;
    own = last_call_of(member_.rank, LastCall::State::in_flight, record_of(*last, member_.size));
    own.answered = answered;
    own.oldest = ring_.first_collective()->call;
  }
  own.message = {};
  if (const OpState* const message = ring_.first_message()) own.message = message_of(*message);
  return calls;
} catch (...) {  // out of memory: the list stays empty
  return {};
}

std::string Watch::told_last_calls() {
  const std::string told = tell_last_calls(last_calls());
  return told.empty() ? told : "; " + told;
}

}  // namespace weft
