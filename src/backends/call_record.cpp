#include "weft/backends/call_record.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <vector>

#include "backends/call_word.hpp"
#include "backends/layout_tag.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {

CallRecord record_of(const OpState& part, int size) {
  const OpState& s = part.user != nullptr ? *part.user : part;
  CallRecord r{.call = part.user != nullptr ? s.call | kUsersCall : s.call, .op = s.op};
  const OpRow op = row(s.op);
  if (op.counts == Counts::none) return r;
  r.dtype = s.dtype;
  if (op.rooted != Rooted::no) r.root = s.root;
  if (op.reduces) {
    r.reduce = s.reduce.kind;
    r.order = s.order;
  }
  r.count = agreed_count(s, size);
  r.hash = with_layout_tag(has_detail(s) ? detail_hash(s, size) : 0, s);
  return r;
}

void announce_to(Announcement& a, const OpState& s, int peer, int size) noexcept {
  if (s.op != Op::all_to_all_v) return;
  a.gives = in_block(s, peer, size).count;
  a.expects = out_block(s, peer, size).count;
}

Announcement announcement_of(const OpState& s, int size) {
  Announcement a{.record = record_of(s, size)};
  if (s.op == Op::all_to_all_v)
    for (int r = 0; r < size; ++r) a.largest = std::max(a.largest, s.in_blocks[r].count);
  return a;
}

namespace {

std::string what(const CallRecord& record, const CallDetail& detail) {
  std::string text(name(record.op));
  const OpRow op = row(record.op);
  if (op.counts != Counts::none) text += fmt::format(" {}", name(record.dtype));
  if (op.counts != Counts::none && op.counts != Counts::both_blocks)
    text += fmt::format(" x{}", record.count);
  if (detail.block >= 0) text += fmt::format(" with counts[{}] = {}", detail.block, detail.block_count);
  if (op.reduces) text += fmt::format(" {}", name(record.reduce));
  if (detail.scale) text += fmt::format("({})", *detail.scale);
  if (detail.user) text += fmt::format(" \"{}\"", *detail.user);
  if (op.rooted != Rooted::no) text += fmt::format(" root {}", record.root);
  if (!detail.path.empty()) text += fmt::format(" by path {}", detail.path);
  return text;
}

// Returns whether a reduction has more than its kind: a scale, or a name.
bool is_named(const CallRecord& r) {
  return row(r.op).reduces && (r.reduce == ReduceOp::Kind::premul_sum || r.reduce == ReduceOp::Kind::user);
}

std::vector<int> both(int a, int b) { return {std::min(a, b), std::max(a, b)}; }

}  // namespace

std::string what(const CallRecord& record) { return what(record, {}); }

std::string what(const OpState& s, int size) {
  if (row(s.op).collective) return what(record_of(s, size));
  if (s.op == Op::exchange) return fmt::format("exchange of {} bytes out and {} in", s.in_count, s.out_count);
  if (s.op == Op::wait_message || s.peer == any_source) {
    std::string text(name(s.op));
    if (s.op == Op::recv) text += fmt::format(" {} x{}", name(s.dtype), s.out_count);
    return text + (s.peer == any_source ? " from any rank" : fmt::format(" from rank {}", s.peer));
  }
  return fmt::format("{} {} x{} {} rank {}", name(s.op), name(s.dtype), std::max(s.in_count, s.out_count),
                     s.op == Op::send ? "to" : "from", s.peer);
}

std::string describe(int rank, const CallRecord& record) { return describe(rank, record, {}); }
std::string describe(int rank, const CallRecord& record, const CallDetail& detail) {
  return fmt::format("rank {} called {} [call {}]", rank, what(record, detail), record.call);
}

Failure mismatch_of(int peer, const CallRecord& theirs, const std::string& they_called, int rank,
                    const CallRecord& own, std::string called) {
  called.erase(called.find("called "), 7);
  const bool order = theirs.order != own.order && theirs.op == own.op;
  const OpRow op = row(own.op);
  CallRecord other = theirs;  // their record with this rank's hash
  other.hash = own.hash;
  const bool layouts = theirs.hash != own.hash && other == own && op.counts != Counts::in_blocks &&
                       op.counts != Counts::out_blocks && !is_named(own);
  return {
      .code = ErrorCode::mismatch,
      .text = fmt::format("{}, {}{}{}", they_called, called, order ? "; one in canonical order, one not" : "",
                          layouts ? "; their layouts differ" : ""),
      .op = own.op,
      .call = own.call,
      .ranks = both(peer, rank)};
}

Failure mismatch(int peer, const CallRecord& theirs, int rank, const CallRecord& own) {
  Failure why = mismatch_of(peer, theirs, describe(peer, theirs), rank, own, describe(rank, own));
  const OpRow op = row(own.op);
  if (theirs.hash != own.hash && theirs.op == own.op && theirs.count == own.count) {
    if (op.counts == Counts::in_blocks || op.counts == Counts::out_blocks)
      why.text += "; their counts differ";
    else if (is_named(own) || is_named(theirs))
      why.text += "; their reductions differ";
  }
  return why;
}

Failure mismatch_of_blocks(const CallRecord& call, int source, std::int64_t sent, int target,
                           std::int64_t expected) {
  return {.code = ErrorCode::mismatch,
          .text = fmt::format("{}: rank {} sends {} elements to rank {}, which expects {}", name(call.op),
                              source, sent, target, expected),
          .op = call.op,
          .call = call.call,
          .ranks = both(source, target)};
}

}  // namespace weft
