#include "group/group_state.hpp"

#include <fcntl.h>
#include <fmt/format.h>
#include <fmt/ranges.h>
#include <sched.h>
#include <time.h>

#include <cerrno>
#include <new>
#include <system_error>

#include "backends/compose.hpp"
#include "base/hash.hpp"
#include "base/memfd.hpp"
#include "base/mutant.hpp"
#include "base/suspension.hpp"
#include "group/check.hpp"
#include "reduce/reduce.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

constexpr int kInspectEvery = 64;
constexpr int kWarnAfter = 10;  // a tenth of the deadline
constexpr auto kInspectPause = std::chrono::milliseconds(1);
constexpr auto kGap =
    2 * kSleep;  // between two looks of who waits; what is longer may have been a suspension
constexpr auto kDropQuiesce = std::chrono::seconds(2);
// An owner that has not come back after this is stuck in the kernel. To fail a group loses nothing by not
// waiting, so it waits less.
constexpr auto kStuck = std::chrono::seconds(2);
constexpr auto kStuckInFailure = std::chrono::milliseconds(200);
constexpr auto kAnswers = std::chrono::milliseconds(500);  // of ranks that are asked who is there

// The kernel's tick: some milliseconds, and cheaper to read than the clock.
std::int64_t kernel_tick() noexcept {
  timespec now{};
  ::clock_gettime(CLOCK_MONOTONIC_COARSE, &now);
  return now.tv_sec * std::int64_t{1'000'000'000} + now.tv_nsec;
}

double seconds(Duration d) { return std::chrono::duration<double>(d).count(); }

// What a library says; and where this process may open nothing more, which it may have met and not said,
// that.
std::string words_of(const std::exception& e) {
  std::string words = with_limits(e.what());
  const Descriptor one(::open("/dev/null", O_RDONLY | O_CLOEXEC));
  if (!one && errno == EMFILE && words.find("ulimit -n") == std::string::npos)
    words += ": " + system_words(EMFILE);
  return words;
}

// What a transport's library throws becomes an Error here: no memory, no threads, or its own words.
std::unique_ptr<Backend> call_factory(const BackendFactory& factory, const GroupInit& b) {
  const auto failed = [&](const std::string& why) {
    return Error(ErrorCode::system, fmt::format("group \"{}\": {} [rank {}]", b.name, why, b.rank));
  };
  try {
    // It waits for ranks in many places, and peers of this rank's other groups may ask who is there.
    ProgressEngine& progress = b.context.progress(b.process_rank);
    const CalledInWaits answers([&progress] { progress.answer(); });
    return factory(b);
  } catch (const Error&) {
    throw;
  } catch (const std::bad_alloc&) {
    throw failed(system_words(ENOMEM));
  } catch (const std::system_error& e) {
    throw failed(e.code().category() == std::generic_category() ||
                         e.code().category() == std::system_category()
                     ? system_words(e.code().value())
                     : e.what());
  } catch (const std::exception& e) {
    throw failed(words_of(e));
  }
}

// The one place where a transport is made: a rank that cannot tells the others why, and none blames one that
// only gave up because of another.
std::unique_ptr<Backend> make_backend(const BackendFactory& factory, const GroupInit& b) {
  try {
    return call_factory(factory, b);
  } catch (const Error& e) {
    throw give_up(b, e);
  }
}

}  // namespace

GroupState::GroupState(Context& context_in, BackendFactory factory_in, const Membership& m,
                       std::string token_in, int ranks_here_in, Origin origin_in,
                       const std::shared_ptr<Store>& rendezvous_store, Duration patience)
    : context(context_in),
      factory(std::move(factory_in)),
      member(m),
      token(std::move(token_in)),
      ranks_here(ranks_here_in),
      origin(std::move(origin_in)),
      helped_(m.progress == Progress::thread && m.size > 1),
      trace_files_(context_in.attached<TraceFiles>()) {
  const int process_rank = m.process_rank < 0 ? m.rank : m.process_rank;
  backend_ = make_backend(
      factory, GroupInit{.context = context,
                         .store = rendezvous_store ? rendezvous_store : m.store,
                         .token = token,
                         .name = m.name,
                         .rank = m.rank,
                         .size = m.size,
                         .process_rank = process_rank,
                         .ranks_here = helped_ ? 2 * ranks_here : ranks_here,
                         .deadline = Deadline::after(patience > Duration::zero() ? patience : m.deadline)});
  if (needs_composition(backend_->traits())) backend_ = compose(std::move(backend_), m.rank, m.size);
  spin_ = backend_->traits().spin;
  rings_ = backend_->traits().rings;
  progress_ = &context.progress(process_rank);
  recorder_ = trace_files_.open({.group = member.name,
                                 .id = token,
                                 .rank = member.rank,
                                 .size = member.size,
                                 .backend = std::string(backend_name()),
                                 .host = {},
                                 .boot = {},
                                 .process_rank = process_rank});
  context.arena().add_holder(this);
  progress_->add(this);
  try {
    if (helped_) progress_->add_helped(spin_);
  } catch (...) {
    progress_->remove(this);
    context.arena().remove_holder(this);
    trace_files_.close(recorder_);
    throw;
  }
  context.log().flush();
}

GroupState::~GroupState() {
  progress_->remove(this);
  if (helped_) progress_->remove_helped(spin_);
  context.arena().remove_holder(this);
  trace_files_.close(recorder_);
}

void GroupState::release() noexcept {
  if (context.forked()) return;  // the parent's: locks may be held for ever, shared memory is not mapped
  if (!own_within(kStuck)) {
    given_up_.fetch_add(kHandle, std::memory_order_relaxed);  // the owner ends the group, when it comes back
    return;
  }
  handle_ = false;
  const bool last = works_ == 0;
  disown();
  if (last) end();
}

// Whoever holds the group has a Work of its own to give back, or helps, and then the group stays for ever.
void GroupState::take_given_up() noexcept {
  const std::int64_t given = given_up_.exchange(0, std::memory_order_relaxed);
  works_ -= given % kHandle;
  if (given >= kHandle) handle_ = false;
}

void GroupState::give_back() noexcept {
  if (context.forked()) return;
  if (!own_within(kStuck)) {
    given_up_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool last = count_back();
  disown();
  if (last) end();
}

// Nobody knows the group any more.
void GroupState::end() noexcept {
  if (failed() && !quiesce(drop_quiesced_.exchange(true) ? Duration::zero() : kDropQuiesce)) {
    // A stopped peer may still write into memory that this group lent it. The group stays, so that the arena
    // never gives that memory to anybody else.
    context.log().write(
        LogLevel::warning,
        fmt::format("group \"{}\": a peer may still touch buffers of a failed call; they are never reused",
                    member.name));
    progress_->remove(this);
    if (helped_) progress_->remove_helped(spin_);
    return;
  }
  delete this;
}

std::string GroupState::tail(const OpState* op) const {
  return op == nullptr || op->call == kNoCall
             ? fmt::format(" [group \"{}\", rank {}]", member.name, member.rank)
             : fmt::format(" [group \"{}\", rank {}, call {}]", member.name, member.rank, op->call);
}

std::string GroupState::key(std::string_view what) const {
  // Groups within groups, or of many ranks, would outgrow the keys of a store: what is long becomes a hash.
  constexpr std::size_t kLongest = 200;
  std::string key = fmt::format("{}/{}", token, what);
  if (key.size() <= kLongest) return key;
  Fnv1a hash;
  hash.add(key);
  return fmt::format("weft/{:016x}", hash.value);
}

std::string GroupState::next_token(std::string_view name, std::span<const int> ranks) {
  const std::string key = this->key(fmt::format("{}({})", name, fmt::join(ranks, ",")));
  const std::lock_guard lock(mutex_);
  return fmt::format("{}#{}", key, generations[key]++);
}

bool GroupState::contend(Deadline limit, bool well) noexcept {
  for (int spins = 0; !try_own(); ++spins) {
    if (well && failed()) return false;
    if (spin_ && spins < kSpins) {
      pause();
    } else {
      if (limit.passed()) return false;
      sched_yield();
    }
  }
  return true;
}

// One rank has nobody to meet: one local step, no ring.
void GroupState::alone(const Call& call, const Operands& have) {
  if (!has_in(call.op, true) || !has_out(call.op, true)) return;
  Block from{0, have.in_count}, to{0, have.out_count};
  const auto first = [](const Blocks& b, Block& block) {
    if (!b.counts.empty()) block = {b.offsets.empty() ? 0 : b.offsets[0], b.counts[0]};
  };
  first(call.in_blocks, from);
  first(call.out_blocks, to);
  if (to.count == 0) return;
  const std::int64_t element = size_bytes(call.out.dtype);
  const std::byte* const in = call.in.data + from.offset * element;
  std::byte* const out = call.out.data + to.offset * element;
  if (row(call.op).reduces) {
    reduce(call.out.dtype, call.options.op, {&in, 1}, {&out, 1}, to.count);
  } else if (in != out) {
    copy_bytes(out, in, to.count * element);
  }
}

// What fails here fails one call; on the device it would fail the group.
void GroupState::check_stream(void* stream, std::string_view what, bool calls) const {
  try {
    backend_->check_stream(stream, calls);
  } catch (const Error& e) {
    throw Error(
        Failure{.code = e.code(), .text = fmt::format("{}: {}{}", what, e.what(), tail()), .ranks = {}});
  }
}

[[gnu::flatten]] Work GroupState::submit(const Call& call) {
  if (context.forked()) context.check_fork(name(call.op).data());
  if (call.options.stream != nullptr) [[unlikely]]
    check_stream(call.options.stream, name(call.op), true);
  return submit_checked(call, check(call, traits(), member.rank, member.size, member.name));
}

// All are checked before the first is sent. Where one then cannot be sent, peers wait for what never comes:
// the group fails, with the reason.
Work GroupState::submit_all(std::span<const Call> calls) {
  context.check_fork("coalesced");
  std::vector<Operands> operands;
  operands.reserve(calls.size());
  for (const Call& c : calls) {
    if (c.options.stream != nullptr) check_stream(c.options.stream, name(c.op), true);
    operands.push_back(check(c, traits(), member.rank, member.size, member.name));
  }
  struct Batch {
    GroupState& group;
    explicit Batch(GroupState& g) : group(g) { group.batch(+1); }
    ~Batch() { group.batch(-1); }
  };
  Work first;
  Work* last = &first;
  std::size_t sent = 0;
  try {
    // On a stream a batch has room before it begins, so that all ranks divide the calls into the same
    // batches, however full their rings are: NCCL wants what starts together on one rank to start together on
    // all.
    while (sent < calls.size()) {
      const auto some = calls.subspan(sent, std::min<std::size_t>(calls.size() - sent, kSlots));
      if (traits().progress == ProgressStyle::stream) {
        own_room(static_cast<int>(some.size()), some.front().op, some.front().options.deadline);
        disown();
      }
      const Batch batch(*this);
      for (const Call& c : some) {
        Work work = submit_checked(c, operands[sent]);
        ++sent;
        if (!work.valid()) continue;
        if (first.valid()) {
          last->more_ = std::make_unique<Work>(std::move(work));
          last = last->more_.get();
        } else {
          first = std::move(work);
        }
      }
    }
  } catch (const std::exception& e) {
    if (failed() || !first.valid()) {
      first.spend();
      throw;
    }
    const auto* const error = dynamic_cast<const Error*>(&e);
    std::string why = e.what();
    if (why.ends_with(tail())) why.resize(why.size() - tail().size());
    fail(Failure{.code = error ? error->code() : ErrorCode::system,
                 .text = fmt::format("coalesced: rank {} sent {} of {} calls: {}", member.rank, sent,
                                     calls.size(), why),
                 .op = error ? error->op() : Op::none,
                 .ranks = {member.rank}});
    first.spend();
    throw_failure(calls[std::min(sent, calls.size() - 1)].op);
  }
  return first;
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

// Owned, but without room, or failed while the group was another thread's.
void GroupState::await_room(int slots, Op op, Duration deadline) {
  if (failed()) {
    disown();
    throw_failure(op);
  }
  ++stalled_;
  arrange_batch();
  disown();
  const Duration limit = deadline > Duration::zero() ? deadline : member.deadline;
  bool got = false;    // enough slots, and the group is ours
  bool asked = false;  // or who holds up the call that the others wait behind
  const auto oldest = [&]() -> const OpState& {
    return slots_[first_ != last_ ? collectives_[first_ % kSlots]
                                  : static_cast<std::uint32_t>(__builtin_ctzll(point_to_point_))]
        .op;
  };
  const auto look = [&](bool ask) {
    if (got || asked || failed()) return true;
    own();
    got = room(slots);
    if (got) return true;
    asked = ask && backend_->ask(oldest());
    disown();
    return asked;
  };
  drive_until([&] { return look(false); }, Deadline::after(limit));
  if (!got && !failed()) drive_until([&] { return look(true); }, Deadline::after(kAnswers));
  if (!got) {
    own();
    got = room(slots);  // another thread may just have finished what was in flight
  }
  --stalled_;
  arrange_batch();
  if (got && !failed()) return;
  std::string story;
  std::vector<int> absent;  // from the call that the others wait behind
  if (!failed()) absent = backend_->missing(oldest(), story);
  disown();
  if (failed()) throw_failure(op);
  throw Error(Failure{.code = ErrorCode::timeout,
                      .text = fmt::format("{}: {} calls in flight and {} finished within {:.3g} s{}{}",
                                          name(op), kSlots, slots == 1 ? "none" : "too few", seconds(limit),
                                          absent.empty() ? "" : ": " + story, tail()),
                      .op = op,
                      .ranks = absent});
}

Work GroupState::submit_checked(const Call& call, const Operands& have) {
  const OpRow r = row(call.op);
  if (failed()) throw_failure(call.op);
  if (member.size == 1 && r.collective && !traits().device) {
    alone(call, have);
    return {};
  }
  own_room(1, call.op, call.options.deadline);
  const auto index = static_cast<std::uint32_t>(__builtin_ctzll(free_));
  Slot& slot = slots_[index];
  const bool blocks = !call.in_blocks.counts.empty() || !call.out_blocks.counts.empty();
  try {
    if (blocks) slot.blocks.resize(2 * static_cast<std::size_t>(member.size));
  } catch (...) {  // out of memory, before anything has changed
    disown();
    throw;
  }
  free_ &= free_ - 1;
  OpState& s = slot.op;
  s.op = call.op;
  s.reduce.kind = call.options.op.kind;  // one by one: a wide load would wait for the caller's narrow stores
  s.reduce.scale = call.options.op.scale;
  s.reduce.user = call.options.op.user;
  s.order = call.options.order;
  s.call = r.collective ? next_collective_++ : next_message_++;
  s.in = have.in;
  s.in_count = have.in_count;
  s.out = have.out;
  s.out_count = have.out_count;
  s.dtype = have.dtype;
  s.root = WEFT_MUTANT("swapped_root") && call.root >= 0 ? (call.root + 1) % member.size : call.root;
  s.peer = call.peer;
  s.tag = call.options.tag;
  s.stream = call.options.stream;
  s.in_blocks = s.out_blocks = nullptr;
  if (blocks) keep_blocks(slot, call);
  const auto element = static_cast<std::size_t>(size_bytes(s.dtype));
  slot.in_bytes.store(static_cast<std::size_t>(s.in_count) * element, std::memory_order_relaxed);
  slot.out_bytes.store(static_cast<std::size_t>(s.out_count) * element, std::memory_order_relaxed);
  slot.in.store(s.in, std::memory_order_relaxed);
  slot.out.store(s.out, std::memory_order_release);
  slot.waited = false;
  slot.deadline = call.options.deadline > Duration::zero() ? call.options.deadline : member.deadline;
  if (r.collective) {
    collectives_[last_++ % kSlots] = static_cast<std::uint8_t>(index);
  } else {
    point_to_point_ |= std::uint64_t{1} << index;
  }
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) + 1, std::memory_order_relaxed);
  backend_->post(s);
  slot.record = recorder_->posted(s);  // while peers already see the call
  const std::uint32_t ticket = slot.generation.load(std::memory_order_relaxed);
  ++works_;
  disown();
  if (helped_) progress_->in_flight(1);
  return Work(this, index, ticket);
}

// Blocks without offsets follow one another.
void GroupState::keep_blocks(Slot& slot, const Call& call) noexcept {
  const auto n = static_cast<std::size_t>(member.size);
  const auto keep = [&](const Blocks& from, Block* to) -> const Block* {
    if (from.counts.empty()) return nullptr;
    std::int64_t next = 0;
    for (std::size_t i = 0; i < n; ++i) {
      to[i] = {from.offsets.empty() || WEFT_MUTANT("ignored_offsets") ? next : from.offsets[i],
               from.counts[i]};
      next += from.counts[i];
    }
    return to;
  };
  slot.op.in_blocks = keep(call.in_blocks, slot.blocks.data());
  slot.op.out_blocks = keep(call.out_blocks, slot.blocks.data() + n);
}

// Another thread of this rank may sleep until this. It has announced that, and then owned the group and found
// the call in flight (settled), before this owner did: so no fence is needed to see it.
void GroupState::finish(std::uint32_t index) noexcept {
  Slot& slot = slots_[index];
  recorder_->finished(slot.record, CallState::done, slot.waited);
  slot.in.store(nullptr, std::memory_order_relaxed);
  slot.out.store(nullptr, std::memory_order_relaxed);
  free_ |= std::uint64_t{1} << index;
  if (helped_) progress_->in_flight(-1);
  slot.generation.store(slot.generation.load(std::memory_order_relaxed) + 1, std::memory_order_release);
  in_flight_.store(in_flight_.load(std::memory_order_relaxed) - 1, std::memory_order_release);
  if (asleep_.load(std::memory_order_relaxed) > 0) progress_->doorbell().ring();
}

// True where something moved. Called by the owner.
bool GroupState::drive_owned() noexcept {
  if (failed()) {
    mark_failed();
    return false;
  }
  bool moved = false;
  while (first_ != last_) {
    const std::uint32_t index = collectives_[first_ % kSlots];
    const Step step = backend_->poll(slots_[index].op);
    if (step == Step::done) {
      ++first_;
      finish(index);
      moved = true;
      continue;
    }
    if (step == Step::advanced) moved = true;
    if (step == Step::failed) {
      mark_failed();
      return true;
    }
    break;
  }
  for (std::uint64_t left = point_to_point_; left != 0; left &= left - 1) {
    const auto index = static_cast<std::uint32_t>(__builtin_ctzll(left));
    const Step step = backend_->poll(slots_[index].op);
    if (step == Step::done) {
      point_to_point_ &= ~(std::uint64_t{1} << index);
      finish(index);
      moved = true;
    } else if (step == Step::advanced) {
      moved = true;
    } else if (step == Step::failed) {
      mark_failed();
      return true;
    }
  }
  // Counted whatever moves, and only while something stays in flight: small calls that succeed read no clock.
  if (idle() || (moved && WEFT_MUTANT("watch_reset_by_traffic"))) {
    polls_ = 0;
  } else if (++polls_ >= kInspectEvery) {
    inspect();
  }
  return moved;
}

template <class After>
bool GroupState::drive_and(const After& after) noexcept {
  if (idle() || !try_own()) return false;
  const bool moved = drive_owned();
  after();
  disown();
  return moved;
}

bool GroupState::drive() noexcept {
  return drive_and([] {});
}

void GroupState::answer() noexcept {
  if (!try_own()) return;
  if (!failed()) backend_->answer();
  disown();
}

bool GroupState::settled() noexcept {
  if (idle()) return true;
  if (!try_own()) return false;
  const bool moved = drive_owned();
  disown();
  return !moved;
}

// Whoever else holds the group polls it, and looks by count.
void GroupState::watch() noexcept {
  if (idle() || WEFT_MUTANT("watch_reset_by_traffic") || !try_own()) return;
  if (!idle()) inspect();
  disown();
}

// For who asks rarely: counting polls would take too long. Called by the owner.
void GroupState::inspect_each_tick() noexcept {
  const std::int64_t now = kernel_tick();
  if (now == tick_ || WEFT_MUTANT("watch_reset_by_traffic")) return;
  tick_ = now;
  inspect();
}

// A rank that was suspended (stopped by a signal, in a container that was paused) has not looked, and
// neither, if the whole job was, could anybody do its part: the gap does not count. What weft's own waits
// have noticed of it never does. Of the rest the caller may be the cause, who computes between two waits and
// for whom it must count: so a gap counts as far as the longest before it, since a call began to wait. After
// a suspension unlike those before a call has as long again as that lasted, at most its whole deadline, since
// ranks do not go on at one moment.
void GroupState::pass_over(Duration gap) noexcept {
  const Duration suspended = suspended_time();
  const Duration noticed = std::min(gap, suspended - std::exchange(suspended_, suspended)) - kGap;
  const Duration unlike = gap - std::max<Duration>(kGap, 2 * gap_);
  const Duration uncounted = std::max(noticed, unlike);
  bool waited = false;
  for (std::uint64_t left = ~free_; left != 0; left &= left - 1) {
    Slot& slot = slots_[static_cast<std::uint32_t>(__builtin_ctzll(left))];
    if (!slot.waited) continue;
    waited = true;
    if (uncounted <= Duration::zero() || WEFT_MUTANT("suspension_counts")) continue;
    if (slot.expires != Clock::time_point::max()) {
      slot.expires += uncounted;
      if (unlike > Duration::zero())
        slot.expires = std::max(slot.expires, inspected_ + std::min(unlike, slot.deadline));
    }
    if (slot.warns != Clock::time_point::max()) slot.warns += uncounted;
  }
  gap_ = waited ? std::max(gap_, gap) : Duration::zero();
}

// Rare and slow: who is dead, whose deadline has passed, who waits long. The deadline's clock starts here, at
// the first look after polls have failed.
void GroupState::inspect() noexcept {
  polls_ = 0;
  if (failed()) return;
  const auto now = Clock::now();
  const Duration gap = now - inspected_;
  if (gap < kInspectPause) return;
  inspected_ = now;
  pass_over(gap);
  if (!backend_->healthy()) {
    mark_failed();
    return;
  }
  for (std::uint64_t left = ~free_; left != 0 && !failed(); left &= left - 1) {
    const auto index = static_cast<std::uint32_t>(__builtin_ctzll(left));
    Slot& slot = slots_[index];
    // Collectives wait one behind the other: there is something to say of the first alone.
    Slot& head = row(slot.op.op).collective ? slots_[collectives_[first_ % kSlots]] : slot;
    const bool behind = &head != &slot;
    if (!slot.waited) {
      slot.waited = true;
      slot.expires =
          slot.deadline >= std::chrono::hours(24 * 365) ? Clock::time_point::max() : now + slot.deadline;
      slot.warns = now + slot.deadline / kWarnAfter;
    } else if (now >= slot.expires + (WEFT_MUTANT("slow_deadline") ? 3 * slot.deadline : Duration())) {
      if (backend_->ask(head.op)) expire(head.waited && now >= head.expires ? head : slot, head);
    } else if (behind) {
      slot.warns = now + slot.deadline / kWarnAfter;
    } else if (now >= slot.warns && backend_->ask(slot.op)) {
      warn(slot);
    }
  }
}

// Once per call, when a tenth of its deadline has passed and somebody is missing.
void GroupState::warn(Slot& slot) noexcept {
  slot.warns = inspected_ + slot.deadline / kWarnAfter;
  try {
    std::string story;
    if (backend_->missing(slot.op, story).empty()) return;  // all are there, and it takes its time
    slot.warns = Clock::time_point::max();
    context.log().write_later(
        LogLevel::warning,  // the sink gets it when the group is not held any more
        fmt::format("{}: not finished after {:.2g} s, a tenth of its deadline: {}{}",
                    what(slot.op, member.size), seconds(slot.deadline / kWarnAfter), story, tail(&slot.op)));
  } catch (...) {  // out of memory: then without a warning
  }
}

// `head`: what the call waits behind, or itself.
void GroupState::expire(const Slot& slot, const Slot& head) noexcept {
  std::string story;
  Failure why{.code = ErrorCode::timeout, .text = {}, .op = slot.op.op, .call = slot.op.call, .ranks = {}};
  why.ranks = backend_->missing(head.op, story);
  if (WEFT_MUTANT("wrong_blame")) why.ranks = {member.rank};
  if (&head != &slot)
    story = fmt::format("it comes after {} [call {}]: {}", name(head.op.op), head.op.call, story);
  why.text =
      fmt::format("{}: not finished within {:.3g} s: {}", name(slot.op.op), seconds(slot.deadline), story);
  backend_->fail(why);
  mark_failed();
}

void GroupState::mark_failed() noexcept {
  if (std::exchange(accounted_, true)) return;
  if (helped_) progress_->in_flight(-in_flight_.load(std::memory_order_relaxed));  // they stay as they are
  for (std::uint64_t left = ~free_; left != 0; left &= left - 1)
    recorder_->finished(slots_[static_cast<std::uint32_t>(__builtin_ctzll(left))].record, CallState::failed,
                        true);
  tell_failed();
}

void GroupState::tell_failed() noexcept {
  {
    const std::lock_guard lock(mutex_);
    if (failure_) return;  // by another thread
    failure_ = backend_->failure();
  }
  recorder_->failed(*failure_);
  trace_files_.write(recorder_);
  failed_.store(true, std::memory_order_release);
  progress_->doorbell().ring();
}

std::optional<Failure> GroupState::failure() const {
  const std::lock_guard lock(mutex_);
  return failure_;
}

// What fails with it is a call of `op`: the first cause may be that of another, or of none.
void GroupState::throw_failure(Op op, std::uint64_t call) {
  context.log().flush();  // what was to be said before it
  if (!told_.exchange(true))
    trace_files_.written(recorder_);  // a disk that hangs holds up the first Error alone
  const bool quiet = quiesced_.load(std::memory_order_acquire) || backend_->quiet();
  Failure f;
  {
    const std::lock_guard lock(mutex_);
    f = *failure_;
  }
  if (f.op == Op::none && op != Op::none) {
    f.op = op;
    f.call = call;
    f.text = fmt::format("{}: {}", name(op), f.text);
  }
  OpState at;
  at.call = f.call;
  f.text += tail(&at);
  throw Error(std::move(f), quiet);
}

// Once `done` is true nothing of the group is touched any more: it may be gone.
template <class Done, class After>
bool GroupState::drive_until(const Done& done, Deadline limit, const After& after) noexcept {
  const int spins = spin_ ? kSpins : 0;
  const ProgressEngine::Waiter waiter(*progress_);
  Clock::time_point asleep_since;
  for (int idle = 0;;) {
    if (done()) return true;
    if (drive_and(after)) {
      idle = 0;
      if (limit.passed()) return done();  // a long call moves all the time
      continue;
    }
    // The own group is stuck: drive the rank's other groups too, now and then while spinning, always
    // afterwards.
    if ((idle < spins ? idle % 16 == 15 : true) && progress_->drive_all()) {
      idle = 0;
      if (limit.passed()) return done();  // other groups may move all the time
      continue;
    }
    ++idle;
    if (idle < spins) {
      pause();
      if (idle % 8 == 0 && limit.passed()) return done();
    } else {
      if (limit.passed()) return done();
      if (idle < spins + kYields) {
        sched_yield();
      } else {
        // While this thread announced its sleep another one may have held the group, past the step that
        // matters: then nobody will ring for it, so it looks itself or stays awake.
        const auto now = Clock::now();
        if (idle == spins + kYields) asleep_since = now;
        progress_->sleep(std::min<Duration>(kSleep, limit.left()), now - asleep_since,
                         [&] { return done() || limit.passed() || !settled() || done(); });
      }
    }
  }
}

// A Work is given back by the thread that asks for it, as soon as that holds the group and the call is done.
class GroupState::Taking {
 public:
  Taking(GroupState& group, std::uint32_t slot, std::uint32_t ticket) noexcept
      : group_(group), slot_(slot), ticket_(ticket) {}
  bool finished() const noexcept { return taken_ || group_.finished(slot_, ticket_); }
  bool failed() const noexcept { return !taken_ && group_.failed(); }
  // By the owner.
  void take() noexcept {
    if (taken_ || !group_.finished(slot_, ticket_)) return;
    taken_ = true;
    last_ = group_.count_back();
  }
  // The end, of a call that is finished.
  void give_back() noexcept {
    if (!taken_) return group_.give_back();
    if (last_) group_.end();
  }

 private:
  GroupState& group_;
  const std::uint32_t slot_, ticket_;
  bool taken_ = false, last_ = false;
};

bool GroupState::poll(std::uint32_t slot, std::uint32_t ticket) {
  Taking work(*this, slot, ticket);
  if (!work.finished()) {
    context.check_fork("wait");
    drive_and([&] {
      work.take();
      if (!work.finished()) inspect_each_tick();
    });
    if (!work.finished()) {
      if (failed()) throw_failure(slots_[slot].op.op, slots_[slot].op.call);
      // A peer may need this rank's part in a call of another group before it comes to this.
      if (!WEFT_MUTANT("asking_drives_one_group")) progress_->drive_all(this);
      if (!work.finished()) return false;
    }
  }
  work.give_back();
  return true;
}

[[gnu::flatten]] bool GroupState::wait(std::uint32_t slot, std::uint32_t ticket,
                                       std::optional<Duration> limit) {
  if (limit && *limit <= Duration::zero()) return poll(slot, ticket);
  Taking work(*this, slot, ticket);
  if (!work.finished()) {
    context.check_fork("wait");
    drive_until([&] { return work.finished() || work.failed(); },
                limit ? Deadline::after(*limit) : Deadline::never(), [&] { work.take(); });
    if (!work.finished()) {
      if (failed()) throw_failure(slots_[slot].op.op, slots_[slot].op.call);
      return false;
    }
  }
  work.give_back();
  return true;
}

void GroupState::wait_on(std::uint32_t slot, std::uint32_t ticket, void* stream) {
  if (finished(slot, ticket)) return;
  context.check_fork("wait");
  check_stream(stream, "wait_on", false);
  // Not before the call has been given to the device, which may take some steps: those are driven here.
  bool there = false;
  drive_until(
      [&] {
        if (there || failed()) return true;
        own();
        there = finished(slot, ticket) || backend_->wait_on(slots_[slot].op, stream);
        disown();
        return there;
      },
      Deadline::never());
  if (!there && !finished(slot, ticket)) throw_failure(slots_[slot].op.op, slots_[slot].op.call);
}

void GroupState::dropped(std::uint32_t slot, std::uint32_t ticket) noexcept {
  if (context.forked()) return;
  drop(slot, ticket);
  give_back();
}

void GroupState::drop(std::uint32_t slot, std::uint32_t ticket) noexcept {
  if (finished(slot, ticket)) return;
  if (!own_within(kStuck)) {  // else another thread might finish the call and reuse its slot
    fail(Failure{.code = ErrorCode::aborted,
                 .text = fmt::format("rank {} dropped the Work of a call in flight", member.rank),
                 .ranks = {member.rank}});
    return;
  }
  drive_owned();
  const bool there = finished(slot, ticket);
  const Op op = slots_[slot].op.op;
  const std::uint64_t call = slots_[slot].op.call;
  disown();
  if (there) return;
  try {
    if (!failed())
      fail(Failure{
          .code = ErrorCode::aborted,
          .text = fmt::format("{}: rank {} dropped the Work of a call in flight", name(op), member.rank),
          .op = op,
          .call = call,
          .ranks = {member.rank}});
  } catch (...) {  // out of memory while saying so: peers find out when this rank leaves
  }
  // Of many Works that are dropped one waits.
  quiesce(drop_quiesced_.exchange(true) ? Duration::zero() : kDropQuiesce);
}

void GroupState::abort(std::string_view why) {
  fail(Failure{.code = ErrorCode::aborted,
               .text = fmt::format("aborted by rank {}: {}", member.rank, why),
               .ranks = {member.rank}});
}

void GroupState::fail(const Failure& why) noexcept {
  backend_->fail(why);
  if (!own_within(kStuckInFailure)) return tell_failed();
  mark_failed();
  disown();
}

bool GroupState::quiesce(Duration limit) noexcept {
  if (!failed() || quiesced_.load(std::memory_order_acquire)) return true;
  std::array<MemoryRange, kSlots> exposed;
  std::size_t count = 0;
  for (Slot& slot : slots_) {
    const std::byte* out = slot.out.load(std::memory_order_acquire);
    const std::size_t bytes = slot.out_bytes.load(std::memory_order_relaxed);
    if (out != nullptr && bytes > 0) exposed[count++] = {const_cast<std::byte*>(out), bytes};
  }
  if (!backend_->quiesce(Deadline::after(limit), {exposed.data(), count})) return false;
  quiesced_.store(true, std::memory_order_release);
  return true;
}

void GroupState::announce_sleep(bool asleep) noexcept {
  asleep_.fetch_add(asleep ? 1 : -1, std::memory_order_seq_cst);
  backend_->announce_sleep(asleep);
}

bool GroupState::holds(const void* block, std::size_t bytes) const noexcept {
  return !quiesced_.load(std::memory_order_acquire) && lent(block, bytes);
}

bool GroupState::lent(const void* block, std::size_t bytes) const noexcept {
  const auto* begin = static_cast<const std::byte*>(block);
  const auto touches = [&](const std::byte* p, std::size_t n) {
    return p != nullptr && p < begin + bytes && begin < p + n;
  };
  for (const Slot& slot : slots_) {
    if (touches(slot.in.load(std::memory_order_relaxed), slot.in_bytes.load(std::memory_order_relaxed)) ||
        touches(slot.out.load(std::memory_order_relaxed), slot.out_bytes.load(std::memory_order_relaxed)))
      return true;
  }
  return false;
}

}  // namespace weft
