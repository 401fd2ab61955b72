#include "weft/backends/call_record.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>

#include "base/hash.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
CallRecord record_of(const OpState& part, int size) {
  const OpState& s = part.user != nullptr ? *part.user : part;
  CallRecord r{.call = part.user != nullptr ? s.call | kUsersCall : s.call, .op = s.op};
  const OpRow op = row(s.op);
  if (op.counts == Counts::none) return r;
  r.dtype = s.dtype;
  Fnv1a hash;
  if (op.rooted != Rooted::no) r.root = s.root;
  if (op.reduces) {
    r.reduce = s.reduce.kind;
    r.order = s.order;
    if (r.reduce == ReduceOp::Kind::premul_sum) hash.add(std::bit_cast<std::uint64_t>(s.reduce.scale));
    if (r.reduce == ReduceOp::Kind::user && s.reduce.user != nullptr) hash.add(s.reduce.user->name);
  }
  switch (op.counts) {
    case Counts::out_is_n_in: r.count = s.in_count; break;
    case Counts::in_is_n_out: r.count = s.out_count; break;
    case Counts::equal: r.count = std::max(s.in_count, s.out_count); break;  // a rank may lack one of them
    case Counts::out_blocks:
    case Counts::in_blocks: {
      const Block* const blocks = op.counts == Counts::out_blocks ? s.out_blocks : s.in_blocks;
      for (int i = 0; i < size; ++i) {
        r.count += blocks[i].count;
        hash.add(static_cast<std::uint64_t>(blocks[i].count));
      }
      break;
    }
    case Counts::both_blocks:  // counts are each pair's own
    case Counts::none:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  r.hash = hash.value;
  return r;
}

namespace {

std::string what(const CallRecord& record) {
  std::string text(name(record.op));
  const OpRow op = row(record.op);
  if (op.counts != Counts::none) text += fmt::format(" {}", name(record.dtype));
  if (op.counts != Counts::none && op.counts != Counts::both_blocks)
    text += fmt::format(" x{}", record.count);
  if (op.reduces) text += fmt::format(" {}", name(record.reduce));
  if (op.rooted != Rooted::no) text += fmt::format(" root {}", record.root);
  return text;
}

}  // namespace

std::string what(const OpState& s, int size) {
  if (row(s.op).collective) return what(record_of(s, size));
  return fmt::format("{} {} x{} {} rank {}", name(s.op), name(s.dtype), std::max(s.in_count, s.out_count),
                     s.op == Op::send ? "to" : "from", s.peer);
}

std::string describe(int rank, const CallRecord& record) {
  return fmt::format("rank {} called {} [call {}]", rank, what(record), record.call);
}

Failure mismatch(int peer, const CallRecord& theirs, int rank, const CallRecord& own) {
  std::string mine = describe(rank, own);
  mine.erase(mine.find("called "), 7);
  std::string why;
  if (theirs.hash != own.hash && theirs.op == own.op && theirs.count == own.count)
    why = row(own.op).reduces && row(own.op).counts != Counts::in_blocks ? "; their reductions differ"
                                                                         : "; their counts differ";
  if (theirs.order != own.order && theirs.op == own.op) why += "; one in canonical order, one not";
  return {.code = ErrorCode::mismatch,
          .text = fmt::format("{}, {}{}", describe(peer, theirs), mine, why),
          .op = own.op,
          .call = own.call,
          .ranks = {std::min(peer, rank), std::max(peer, rank)}};
}

}  // namespace weft
