// Many calls as one: submitted in batches that the backend starts together.
#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <memory>
#include <new>
#include <string>
#include <utility>
#include <vector>

#include "base/mutant.hpp"
#include "group/group_state.hpp"

namespace weft {
namespace {

// Memory that a call of a list writes or reads.
struct Extent {
  const std::byte *begin, *end;
  std::size_t call;
  bool written;
};

bool collide(const Extent& a, const Extent& b) noexcept {
  return (a.written || b.written) && a.call != b.call && a.begin < b.end && b.begin < a.end;
}

void add_extents(std::vector<Extent>& to, std::size_t call, const Operands& have, const Call& c) {
  const auto add = [&](const std::byte* data, std::int64_t count, const Blocks& blocks, bool written) {
    const std::int64_t element = size_bytes(have.dtype);
    const auto one = [&](std::int64_t at, std::int64_t n) {
      if (n > 0) to.push_back({data + at * element, data + (at + n) * element, call, written});
    };
    if (blocks.counts.empty()) return one(0, count);
    std::int64_t next = 0;
    for (std::size_t r = 0; r < blocks.counts.size(); ++r) {
      const std::int64_t at = blocks.offsets.empty() ? next : blocks.offsets[r];
      one(at, blocks.counts[r]);
      next = at + blocks.counts[r];
    }
  };
  add(have.in, have.in_count, c.in_blocks, false);
  add(have.out, have.out_count, c.out_blocks, true);
}

// Extents are visited in the order of their begin addresses. of[0] is the extent so far that reaches
// furthest. of[1] is the furthest extent of any other call than that of of[0].
struct Furthest {
  std::array<const Extent*, 2> of{};

  void see(const Extent& e) noexcept {
    if (of[0] == nullptr || e.end > of[0]->end) {
      if (of[0] != nullptr && of[0]->call != e.call) of[1] = of[0];
      of[0] = &e;
    } else if (of[0]->call != e.call && (of[1] == nullptr || e.end > of[1]->end)) {
      of[1] = &e;
    }
  }
  const Extent* hit_by(const Extent& e) const noexcept {
    for (const Extent* seen : of)
      if (seen != nullptr && collide(*seen, e)) return seen;
    return nullptr;
  }
};

// Returns two extents of different calls that have a byte in common, of which at least one is written. Null
// if there are none.
std::array<const Extent*, 2> collision_of(std::vector<Extent>& all) {
  std::sort(all.begin(), all.end(), [](const Extent& a, const Extent& b) { return a.begin < b.begin; });
  Furthest written, any;
  for (const Extent& e : all) {
    if (const Extent* const other = (e.written ? any : written).hit_by(e)) return {other, &e};
    any.see(e);
    if (e.written) written.see(e);
  }
  return {};
}

// Returns whether all memory that is read lies on one side of all memory that is written, and the written
// buffers are in the order of the calls. This is usual for a program that receives into one array and sends
// from another. If false, the caller must check more closely.
bool on_two_sides(std::span<const Operands> calls) noexcept {
  constexpr std::uintptr_t kNone = ~std::uintptr_t{0};
  std::uintptr_t read_from = kNone, read_to = 0, written_from = kNone, written_to = 0;
  bool in_order = true;
  for (const Operands& c : calls) {
    const std::int64_t element = size_bytes(c.dtype);
    if (c.in_count > 0) {
      const auto begin = reinterpret_cast<std::uintptr_t>(c.in);
      read_from = std::min(read_from, begin);
      read_to = std::max(read_to, begin + static_cast<std::uintptr_t>(c.in_count * element));
    }
    if (c.out_count > 0) {
      const auto begin = reinterpret_cast<std::uintptr_t>(c.out);
      in_order = in_order && begin >= written_to;
      written_from = std::min(written_from, begin);
      written_to = begin + static_cast<std::uintptr_t>(c.out_count * element);
    }
  }
  return in_order && (read_to <= written_from || written_to <= read_from);
}

// Returns whether the buffers of these calls are disjoint if each buffer counts as one block. If false, the
// caller must check more closely.
bool plainly_apart(std::span<const Operands> calls) noexcept {
  constexpr std::size_t kMost = 64;
  struct Range {
    std::uintptr_t begin, end;
    std::size_t call;
  };
  // Memory ranges, sorted by begin address. Programs mostly give buffers in the order of their addresses:
  // then nothing must be moved.
  struct Ranges {
    std::array<Range, kMost> all;
    std::size_t count = 0;
    void add(const std::byte* data, std::int64_t bytes, std::size_t call) noexcept {
      if (bytes <= 0) return;
      const auto begin = reinterpret_cast<std::uintptr_t>(data);
      std::size_t at = count++;
      for (; at > 0 && all[at - 1].begin > begin; --at) all[at] = all[at - 1];
      all[at] = {begin, begin + static_cast<std::uintptr_t>(bytes), call};
    }
  };
  if (calls.size() > kMost) return false;
  Ranges read, written;
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Operands& c = calls[i];
    const std::int64_t element = size_bytes(c.dtype);
    read.add(c.in, c.in_count * element, i);
    written.add(c.out, c.out_count * element, i);
  }
  for (std::size_t i = 1; i < written.count; ++i)
    if (written.all[i].begin < written.all[i - 1].end) return false;
  std::size_t first = 0;  // the first written range that ends behind the begin of the range that is read
  for (std::size_t i = 0; i < read.count; ++i) {
    const Range& r = read.all[i];
    while (first < written.count && written.all[first].end <= r.begin) ++first;
    for (std::size_t w = first; w < written.count && written.all[w].begin < r.end; ++w)
      if (written.all[w].call != r.call) return false;
  }
  return true;
}

// Throws if a call writes memory that another call of the list writes or reads, because the transport and the
// peers decide which of the two calls comes first.
void check_apart(std::span<const Call> calls, std::span<const Operands> operands, const Membership& member) {
  if (on_two_sides(operands) || plainly_apart(operands) || WEFT_MUTANT("overlapping_calls")) return;
  std::vector<Extent> all;
  all.reserve(2 * calls.size());
  for (std::size_t i = 0; i < calls.size(); ++i) add_extents(all, i, operands[i], calls[i]);
  const auto [one, other] = collision_of(all);
  if (one == nullptr) return;
  const auto [reader, writer] = one->written && (!other->written || one->call > other->call)
                                    ? std::pair(other, one)
                                    : std::pair(one, other);
  const auto described = [&](const Extent& e) {
    return fmt::format("{} of call {} ({})", e.written ? "out" : "in", e.call, name(calls[e.call].op));
  };
  throw Error(Failure{.code = ErrorCode::bad_argument,
                      .text = fmt::format("coalesced: {} overlaps {}; expected memory that no other call of "
                                          "the list uses{}",
                                          described(*writer), described(*reader), tail(member)),
                      .op = calls[writer->call].op,
                      .ranks = {}});
}

// One call of a list.
struct Head {
  Op op;
  Duration deadline;
  bool collective;
};

}  // namespace

// The calls of one batch. Meanwhile this thread owns the group, except while it waits for room.
class GroupState::Batch {
 public:
  // On a stream a batch must have room for all its calls before it begins. So all ranks divide the calls into
  // the same batches, however full their rings are. NCCL requires that calls which start together on one rank
  // start together on all ranks.
  Batch(GroupState& group, std::size_t calls, const Head& first) : group_(group) {
    group_.own_room(group_.streams() ? static_cast<int>(calls) : 1, first.op, first.deadline);
    ++group_.batches_;
    group_.arrange_batch();
  }
  Batch(const Batch&) = delete;
  Batch& operator=(const Batch&) = delete;
  ~Batch() {
    if (!owns_) group_.own();
    --group_.batches_;
    group_.arrange_batch();
    group_.disown();
    if (group_.helped_) group_.progress_.in_flight(sent_);
  }
  // Call this before each call of the batch. Throws if the group has failed, or if there is no room in
  // time.
  void expect_room(Op op, Duration deadline) {
    if (!group_.failed() && group_.ring_.room(1)) [[likely]]
      return;
    owns_ = false;
    began_ = 0;
    group_.await_room(1, op, deadline);
    owns_ = true;
  }
  void count() noexcept { ++sent_; }
  /// The time at which the calls began, for send_off(). 0: no call has begun since this thread owns the
  /// group.
  std::uint64_t& began() noexcept { return began_; }

 private:
  GroupState& group_;
  bool owns_ = true;
  int sent_ = 0;
  std::uint64_t began_ = 0;
};

// Checks all calls before it sends the first one.
Work GroupState::submit_all(std::span<const Call> calls, bool apart) {
  context.check_fork("coalesced");
  constexpr std::size_t kFew = 12;
  // left uninitialised, because initialising it would take a while
  alignas(Operands) std::array<std::byte, kFew * sizeof(Operands)> few;
  std::vector<Operands> many(calls.size() > kFew ? calls.size() : 0);
  const std::span<Operands> operands(many.empty() ? reinterpret_cast<Operands*>(few.data()) : many.data(),
                                     calls.size());
  const Traits& of_backend = traits();
  for (std::size_t i = 0; i < calls.size(); ++i) {
    const Call& c = calls[i];
    if (c.options.stream != Stream{}) check_stream(c.options.stream, name(c.op), true);
    // The object is constructed in its place, because a copy would wait for stores whose sizes differ from
    // those of its loads.
    ::new (&operands[i]) Operands(check(c, of_backend, member.rank, member.size, member.name));
  }
  if (!apart) check_apart(calls, operands, member);
  const auto from_any = std::count_if(calls.begin(), calls.end(), [](const Call& c) {
    return c.op == Op::wait_message || (c.op == Op::recv && c.peer == any_source);
  });
  return begin_all(
      "coalesced", calls.size(), static_cast<std::size_t>(from_any),
      [&](std::size_t i) {
        return Head{calls[i].op, calls[i].options.deadline, row(calls[i].op).collective};
      },
      [&](std::size_t i, detail::WorkCallbacks*& found, Batch& batch) -> std::optional<std::uint32_t> {
        if (runs_alone(row(calls[i].op).collective)) {
          run_alone(calls[i], operands[i]);
          return {};
        }
        batch.expect_room(calls[i].op, calls[i].options.deadline);
        return prepare_slot(calls[i], operands[i], found);
      });
}

Work GroupState::start_all(std::span<const std::shared_ptr<detail::PreparedCall>> calls) {
  context.check_fork("start_all");
  for (const auto& p : calls) {
    if (p->op.stream != Stream{}) check_stream(p->op.stream, name(p->op.op), true);
    if (in_flight(*p)) throw_in_flight(*p);
  }
  const auto from_any = std::count_if(calls.begin(), calls.end(), [](const auto& p) {
    return p->op.op == Op::recv && p->op.peer == any_source;
  });
  return begin_all(
      "start_all", calls.size(), static_cast<std::size_t>(from_any),
      [&](std::size_t i) {
        return Head{calls[i]->op.op, calls[i]->deadline, calls[i]->collective};
      },
      [&](std::size_t i, detail::WorkCallbacks*& found, Batch& batch) -> std::optional<std::uint32_t> {
        detail::PreparedCall& p = *calls[i];
        if (p.alone) {
          run_alone(p);
          return {};
        }
        batch.expect_room(p.op.op, p.deadline);
        // a callback has started this call while this thread waited for room
        if (in_flight(p)) throw_in_flight(p);
        const std::uint32_t index = ring_.next();
        found = fill_slot(index, calls[i]);
        return index;
      });
}

// Begins several calls as one. head(i) describes call i. begin(i, found, batch) fills the slot of call i and
// returns its number, or nothing if the call is already done.
template <class OfCall, class Begin>
Work GroupState::begin_all(const char* function, std::size_t count, std::size_t from_any, const OfCall& head,
                           const Begin& begin) {
  Work first;
  std::size_t sent = 0;
  try {
    begin_batches(count, from_any, head, begin, first, sent);
  } catch (const std::exception& e) {
    if (failed() || !first.valid()) {
      first.spend();
      throw;
    }
    fail_batch(function, e, sent, count);
    first.spend();
    failure_.raise(head(std::min(sent, count - 1)).op);
  }
  first.set_source(Work::kSeveral);
  return first;
}

// `first` and `sent` say which calls were submitted, even if the function throws.
template <class OfCall, class Begin>
void GroupState::begin_batches(std::size_t count, std::size_t from_any, const OfCall& head,
                               const Begin& begin, Work& first, std::size_t& sent) {
  // All memory is allocated before this thread owns the group.
  auto further = std::make_unique<detail::FurtherCalls>(count);
  std::unique_ptr<detail::WorkCallbacks> found(from_any > 0 ? new_callbacks() : nullptr);
  if (found) found->found.reserve(from_any);
  while (sent < count) {
    const std::size_t end = std::min<std::size_t>(count, sent + Ring::kSlots);
    Batch batch(*this, end - sent, head(sent));
    while (sent < end) {
      detail::WorkCallbacks* of_call = nullptr;
      const bool collective = head(sent).collective;
      const std::optional<std::uint32_t> index = begin(sent, of_call, batch);
      ++sent;
      if (!index) continue;
      const std::uint32_t ticket = send_off(*index, collective, batch.began());
      batch.count();
      if (!first.valid()) {
        first = Work(this, *index, ticket);
        first.more_ = std::move(further);
        first.callbacks_ = found.release();
      } else {
        first.more_->add({*index, ticket});
      }
      if (of_call == nullptr) continue;
      first.callbacks_->found.push_back(std::move(of_call->found.front()));
      delete of_call;
    }
  }
}

// For a batch of which some calls were sent and another call cannot be sent. Peers would wait for that call
// without end, so the group fails, with the reason. The error names the ranks that hold up the calls in
// flight, or this rank if no such rank is known.
void GroupState::fail_batch(const char* function, const std::exception& reason, std::size_t sent,
                            std::size_t calls) {
  const auto* const error = dynamic_cast<const Error*>(&reason);
  std::string why = reason.what();
  if (const std::string end = tail(member); why.ends_with(end)) why.resize(why.size() - end.size());
  std::vector<int> ranks{member.rank};
  if (error != nullptr && !error->ranks().empty()) ranks.assign(error->ranks().begin(), error->ranks().end());
  fail(Failure{
      .code = error ? error->code() : ErrorCode::system,
      .text = fmt::format("{}: rank {} sent {} of {} calls: {}", function, member.rank, sent, calls, why),
      .op = error ? error->op() : Op::none,
      .ranks = std::move(ranks)});
}

// Opens or closes the backend's batch. It is open while some thread is in a batch and no thread waits for
// slots. If a thread waits for slots, the calls in the batch must start, or no slot would become free. Called
// by the owner.
void GroupState::arrange_batch() noexcept {
  const bool open = batches_ > 0 && stalled_ == 0 && !failed();
  if (open == batch_open_) return;
  batch_open_ = open;
  backend_->batch(open);
}

}  // namespace weft
