// Many calls as one: submitted in batches that the backend starts together.
#include <fmt/format.h>

#include <algorithm>
#include <memory>
#include <string>
#include <utility>
#include <vector>

#include "group/group_state.hpp"

namespace weft {

// All are checked before the first is sent.
Work GroupState::submit_all(std::span<const Call> calls) {
  context.check_fork("coalesced");
  std::vector<Operands> operands;
  operands.reserve(calls.size());
  for (const Call& c : calls) {
    if (c.options.stream != Stream{}) check_stream(c.options.stream, name(c.op), true);
    operands.push_back(check(c, traits(), member.rank, member.size, member.name));
  }
  Work first;
  std::size_t sent = 0;
  try {
    submit_batches(calls, operands, first, sent);
  } catch (const std::exception& e) {
    if (failed() || !first.valid()) {
      first.spend();
      throw;
    }
    fail_batch(e, sent, calls.size());
    first.spend();
    failure_.raise(calls[std::min(sent, calls.size() - 1)].op);
  }
  first.source_ = Work::kSeveral;
  return first;
}

// `first` and `sent` say what was submitted, also where this throws.
void GroupState::submit_batches(std::span<const Call> calls, std::span<const Operands> operands, Work& first,
                                std::size_t& sent) {
  struct Batch {
    GroupState& group;
    explicit Batch(GroupState& g) : group(g) { group.batch(+1); }
    ~Batch() { group.batch(-1); }
  };
  Work* last = &first;
  while (sent < calls.size()) {
    const auto some = calls.subspan(sent, std::min<std::size_t>(calls.size() - sent, Ring::kSlots));
    // On a stream a batch has room before it begins, so that all ranks divide the calls into the same
    // batches, however full their rings are: NCCL wants calls that start together on one rank to start
    // together on all.
    if (streams()) {
      own_room(static_cast<int>(some.size()), some.front().op, some.front().options.deadline);
      disown();
    }
    const Batch batch(*this);
    for (const Call& c : some) {
      Work work = submit_checked(c, operands[sent]);
      ++sent;
      if (!work.valid()) continue;
      if (first.valid()) {
        first.join_found(work);
        last->more_ = std::make_unique<Work>(std::move(work));
        last = last->more_.get();
      } else {
        first = std::move(work);
      }
    }
  }
}

// Some calls of the batch were sent and one cannot be: peers wait for calls that never come, so the group
// fails, with the reason.
void GroupState::fail_batch(const std::exception& reason, std::size_t sent, std::size_t calls) {
  const auto* const error = dynamic_cast<const Error*>(&reason);
  std::string why = reason.what();
  if (const std::string end = tail(member); why.ends_with(end)) why.resize(why.size() - end.size());
  fail(Failure{
      .code = error ? error->code() : ErrorCode::system,
      .text = fmt::format("coalesced: rank {} sent {} of {} calls: {}", member.rank, sent, calls, why),
      .op = error ? error->op() : Op::none,
      .ranks = {member.rank}});
}

void GroupState::batch(int begun) noexcept {
  own();
  batches_ += begun;
  arrange_batch();
  disown();
}

// The backend's batch is open while some thread is in a batch and none waits for slots: what is in it must
// get on then, or no slot ever frees. Called by the owner.
void GroupState::arrange_batch() noexcept {
  const bool open = batches_ > 0 && stalled_ == 0 && !failed();
  if (open == batch_open_) return;
  batch_open_ = open;
  backend_->batch(open);
}

}  // namespace weft
