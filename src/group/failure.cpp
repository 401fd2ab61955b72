#include "group/failure.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <exception>

#include "base/errors/caught.hpp"
#include "base/mutant.hpp"
#include "store/launcher_notice.hpp"

namespace weft {
namespace {

// Returns the backend's failure. failure() of a plug-in may throw, although it should not; the group has
// failed in any case. The op may have a number that this version of weft does not know.
Failure failure_of(const Backend& backend) {
  try {
    Failure why = backend.failure();
    if (static_cast<int>(why.op) >= kOpCount) why.op = Op::none;
    return why;
  } catch (...) {
    return {.code = ErrorCode::system,
            .text = fmt::format("backend {} cannot say why: failure() threw: {}", backend.traits().name,
                                caught_words()),
            .ranks = {}};
  }
}

}  // namespace

std::string tail(const Membership& member, std::uint64_t call) {
  return call == kNoCall ? fmt::format(" [group \"{}\", rank {}]", member.name, member.rank)
                         : fmt::format(" [group \"{}\", rank {}, call {}]", member.name, member.rank, call);
}

void GroupFailure::take_over(const std::function<std::vector<LastCall>()>& last_calls) noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (first_cause_) return;  // another thread has taken it over
    first_cause_ = failure_of(backend_);
    if ((first_cause_->code == ErrorCode::timeout || first_cause_->code == ErrorCode::peer_lost) &&
        last_calls)
      last_calls_ = last_calls();
  }
  recorder_->failed(*first_cause_);
  const std::vector<int>& blamed = first_cause_->ranks;
  if (!blamed.empty() && std::find(blamed.begin(), blamed.end(), member_.rank) == blamed.end())
    tell_launcher_that_others_failed();
  trace_files_.write(recorder_);
  failed_.store(true, std::memory_order_release);
  progress_.doorbell().ring();
}

std::optional<Failure> GroupFailure::first_cause() const {
  const std::lock_guard lock(mutex_);
  return first_cause_;
}

void GroupFailure::raise(Op op, std::uint64_t call) {
  context_.log().flush();  // writes the lines that were logged before
  if (!told_.exchange(true))
    trace_files_.written(recorder_);  // a disk that hangs delays only the first Error
  throw error(op, call);
}

Error GroupFailure::error(Op op, std::uint64_t call) const {
  const bool quiet = quiesced() || backend_.quiet();
  Failure f;
  std::vector<LastCall> last_calls;
  {
    const std::lock_guard lock(mutex_);
    f = *first_cause_;
    last_calls = last_calls_;
  }
  if (f.op == Op::none && op != Op::none) {
    f.op = op;
    f.call = call;
    f.text = fmt::format("{}: {}", name(op), f.text);
  }
  f.text += tail(member_, f.call);
  return Error(std::move(f), quiet, std::move(last_calls));
}

// Without a warning the program would continue with numbers that were never reduced. If the program has got
// an Error of this group, or an exception is in flight, it knows of the failure, and no warning is needed.
// `had_failed`: whether the group had failed before. If this rank itself failed the group, its program knows
// that, too.
void GroupFailure::warn_of_dropped(Op op, std::uint64_t call, bool had_failed) noexcept try {
  const std::optional<Failure> why = first_cause();
  if (!why || told_.load(std::memory_order_relaxed) || WEFT_MUTANT("silent_drop")) return;
  const bool own = why->ranks == std::vector<int>{member_.rank}, unwinding = std::uncaught_exceptions() > 0;
  if (had_failed && (own || unwinding)) return;
  if (warned_.exchange(true)) return;
  const std::string what =
      own ? fmt::format("{}; its result is undefined, and the group has failed", why->text)
          : fmt::format(
                "{}a call that failed was dropped before the program asked for its result; its result is "
                "undefined: {}",
                op == Op::none ? "" : fmt::format("{}: ", name(op)), why->text);
  context_.log().write(LogLayer::group, LogLevel::warning, what + tail(member_, call));
  if (!unwinding) tell_launcher_that_results_are_in_doubt();
} catch (...) {  // out of memory
}

bool GroupFailure::quiesce(Duration limit, const Ring& ring) noexcept {
  if (!happened() || quiesced()) return true;
  std::array<MemoryRange, Ring::kSlots> exposed;
  const std::size_t count = ring.exposed(exposed);
  if (!backend_.quiesce(Deadline::after(limit), {exposed.data(), count})) return false;
  quiesced_.store(true, std::memory_order_release);
  return true;
}

bool GroupFailure::quiesce_dropped(const Ring& ring) noexcept {
  constexpr auto kLimit = std::chrono::seconds(2);
  return quiesce(drop_quiesced_.exchange(true) ? Duration::zero() : kLimit, ring);
}

}  // namespace weft
