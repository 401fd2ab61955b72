#include "backends/messages/announced_calls.hpp"

#include <fmt/format.h>

#include <algorithm>

#include "weft/backends/op_table.hpp"

namespace weft {

std::uint64_t AnnouncedCalls::announce(const Announcement& call, const OpState& s) {
  Own& mine =
      own_.emplace_back(Own{.record = call.record, .given = {}, .expected = {}, .largest = call.largest});
  if (s.op == Op::all_to_all_v)
    for (int r = 0; r < size_; ++r) {
      mine.given.push_back(s.in_blocks[r].count);
      mine.expected.push_back(s.out_blocks[r].count);
    }
  last_ = call.record;
  return first_own_ + own_.size() - 1;
}

std::optional<Failure> AnnouncedCalls::compare(int r) {
  Peer& other = peer(r);
  while (!other.ahead.empty() && other.compared < first_own_ + own_.size()) {
    const Announcement theirs = other.ahead.front();
    Own& mine = own_[other.compared - first_own_];
    if (theirs.record != mine.record) return mismatch(r, theirs.record, rank_, mine.record);
    if (!mine.expected.empty()) {
      mine.largest = std::max(mine.largest, theirs.largest);
      const auto at = static_cast<std::size_t>(r);
      if (theirs.gives != mine.expected[at])
        return mismatch_of_blocks(mine.record, r, theirs.gives, rank_, mine.expected[at]);
      if (theirs.expects != mine.given[at])
        return mismatch_of_blocks(mine.record, rank_, mine.given[at], r, theirs.expects);
    }
    other.ahead.pop_front();
    ++other.compared;
  }
  forget();
  return std::nullopt;
}

void AnnouncedCalls::finish(std::uint64_t sequence) {
  done_ = sequence + 1;
  forget();
}

// Drops calls that were compared with all ranks and that no call in flight needs.
void AnnouncedCalls::forget() {
  std::uint64_t done = done_;
  for (int r = 0; r < size_; ++r)
    if (r != rank_) done = std::min(done, peer(r).compared);
  while (first_own_ < done) {
    own_.pop_front();
    ++first_own_;
  }
}

std::string AnnouncedCalls::left_out(const std::vector<bool>& left) const {
  const std::uint64_t called = first_own_ + own_.size();
  for (int r = 0; r < size_; ++r) {
    if (r == rank_) continue;
    const Peer& other = peer(r);
    // The next call of that rank is one that this rank will not make. If rank r waits for this rank in this
    // call, rank r is notified that this rank has left.
    if (other.compared == called && !other.ahead.empty()) {
      const CallRecord& call = other.ahead.front().record;
      const Rooted rooted = row(call.op).rooted;
      if ((rooted == Rooted::in_at_root && call.root != rank_) ||
          (rooted == Rooted::out_at_root && call.root != r))
        return fmt::format("{}, rank {} left the group without it", describe(r, call), rank_);
    }
    if (const std::uint64_t next = announced_by(r); left[static_cast<std::size_t>(r)] && next < done_)
      return fmt::format("{}, rank {} left the group without it", describe(rank_, record(next)), r);
  }
  return {};
}

std::vector<int> AnnouncedCalls::late(std::uint64_t sequence) const {
  std::vector<int> ranks;
  for (int r = 0; r < size_; ++r)
    if (r != rank_ && announced_by(r) <= sequence) ranks.push_back(r);
  return ranks;
}

}  // namespace weft
