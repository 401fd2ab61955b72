#include "group/group_state.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <thread>

#include "backends/compose/op_support.hpp"
#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "group/make_backend.hpp"
#include "group/persistent/prepared_exchange.hpp"
#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"
#include "store/duration_text.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

// How long ranks may take to answer a roll-call.
constexpr auto kAnswers = std::chrono::milliseconds(500);

int process_rank_of(const Membership& m) { return m.process_rank < 0 ? m.rank : m.process_rank; }

// Returns the data that a group of one rank moves: its own block.
Operands own_block(const Call& call, Operands have) noexcept {
  const std::int64_t element = size_bytes(have.dtype);
  const auto first = [&](const Blocks& b, auto& data, std::int64_t& count) {
    if (b.counts.empty()) return;
    data += (b.offsets.empty() ? 0 : b.offsets[0]) * element;
    count = b.counts[0];
  };
  first(call.in_blocks, have.in, have.in_count);
  first(call.out_blocks, have.out, have.out_count);
  return have;
}

// Performs a call of a group of one rank: one local step, without a ring. `own`: the rank's own block.
void run_own(Op op, const ReduceOp& reduction, const Operands& own) {
  if (!has_in(op, true) || !has_out(op, true) || own.out_count == 0) return;
  const std::byte* const in = own.in;
  std::byte* const out = own.out;
  if (is_scan(op)) {
    scan_of(0, own.dtype, reduction, op == Op::exscan, {&in, 1}, out, own.out_count);
  } else if (row(op).reduces) {
    reduce(own.dtype, reduction, {&in, 1}, {&out, 1}, own.out_count);
  } else if (in != out) {
    copy_bytes(out, in, own.out_count * size_bytes(own.dtype));
  }
}

bool has_blocks(const Call& call) noexcept {
  return !call.in_blocks.counts.empty() || !call.out_blocks.counts.empty();
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
      progress_(progress_of(context_in, process_rank_of(m))),
      helped_(m.progress == Progress::thread && m.size > 1),
      backend_(make_backend(factory, GroupInit{.context = context,
                                               .store = rendezvous_store ? rendezvous_store : m.store,
                                               .token = token,
                                               .name = m.name,
                                               .rank = m.rank,
                                               .size = m.size,
                                               .process_rank = process_rank_of(m),
                                               .ranks_here = helped_ ? 2 * ranks_here : ranks_here,
                                               .deadline = Deadline::after(
                                                   patience > Duration::zero() ? patience : m.deadline)})),
      spin_(backend_->traits().spin),
      rings_(backend_->traits().rings),
      trace_files_(context_in.attached<TraceFiles>()),
      recorder_(trace_files_.open({.group = member.name,
                                   .id = token,
                                   .rank = member.rank,
                                   .size = member.size,
                                   .backend = std::string(backend_name()),
                                   .host = {},
                                   .boot = {},
                                   .process_rank = process_rank_of(m)})),
      watch_(context, member, *backend_, ring_),
      failure_(context, member, *backend_, progress_, trace_files_, recorder_) {
  arena_of(context).add_holder(this);
  progress_.add(this);
  try {
    if (helped_) progress_.add_helped(spin_);
  } catch (...) {
    progress_.remove(this);
    arena_of(context).remove_holder(this);
    trace_files_.close(recorder_);
    throw;
  }
  context.log().flush();
}

GroupState::~GroupState() {
  // destroyed first, because data that is kept with the group may still use the group
  users->forget();
  // holders of the remaining references cannot start the exchange any more
  for (const auto& e : exchanges_) e->planned.reset();
  progress_.remove(this);
  if (helped_) progress_.remove_helped(spin_);
  arena_of(context).remove_holder(this);
  trace_files_.close(recorder_);
}

void GroupState::release() noexcept {
  users->end();
  // in a forked child the group belongs to the parent: locks may be held forever, and shared memory is not
  // mapped
  if (context.forked()) return;
  if (!own_within(kStuck)) {
    unlist();
    // the owner ends the group when it returns from its step
    given_up_.fetch_add(kHandle, std::memory_order_relaxed);
    return;
  }
  handle_ = false;
  const bool last = works_ == 0;
  disown();
  if (last) end();
}

// Called when the owner returns from a step in which it was stuck. The owner gives back its own Work later.
// Or the owner is the helper thread, and then the group stays forever.
void GroupState::take_given_up() noexcept {
  const std::int64_t given = given_up_.exchange(0, std::memory_order_relaxed);
  works_ -= given % kHandle;
  if (given >= kHandle) handle_ = false;
}

void GroupState::give_back() noexcept {
  if (context.forked()) return;
  if (!own_within(kStuck)) {
    unlist();
    given_up_.fetch_add(1, std::memory_order_relaxed);
    return;
  }
  const bool last = count_back();
  disown();
  if (last) end();
}

// Call this when the program has no handle of the group any more. The group may stay forever, but the
// Context may be destroyed.
void GroupState::unlist() noexcept {
  const std::lock_guard lock(mutex_);
  listed_.reset();
}

// Call it when neither a handle nor a Work refers to the group any more.
void GroupState::end() noexcept {
  if (failed() && !failure_.quiesce_dropped(ring_)) {
    // A stopped peer may still write into memory that this group exposed to it. So the group is kept, and the
    // arena never gives that memory to other code.
    context.log().write(
        LogLayer::group, LogLevel::warning,
        fmt::format("group \"{}\": a peer may still touch buffers of a failed call; they are never reused",
                    member.name));
    progress_.remove(this);
    if (helped_) progress_.remove_helped(spin_);
    unlist();
    return;
  }
  delete this;
}

Origin GroupState::origin_of(std::span<const int> ranks) const {
  Origin of{.ranks = {ranks.begin(), ranks.end()}, .hosts = origin.hosts, .ranks_in_hosts = {}};
  for (const int r : ranks)
    of.ranks_in_hosts.push_back(
        origin.ranks_in_hosts.empty() ? r : origin.ranks_in_hosts[static_cast<std::size_t>(r)]);
  return of;
}

std::vector<int> GroupState::local_ranks() const {
  const std::vector<int>& first = origin.hosts->first_on_host();
  const auto host = [&](int r) {
    const auto rank = static_cast<std::size_t>(r);
    return first[origin.ranks_in_hosts.empty() ? rank
                                               : static_cast<std::size_t>(origin.ranks_in_hosts[rank])];
  };
  std::vector<int> local;
  for (int r = 0; r < member.size; ++r)
    if (host(r) == host(member.rank)) local.push_back(r);
  return local;
}

std::string GroupState::key(std::string_view what) const {
  // The names of nested groups, or of groups with many ranks, could be longer than a key of a store may be,
  // so a hash replaces a long key.
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

// A wrong stream fails only this call; without this check it would fail the group on the device.
void GroupState::check_stream(Stream stream, std::string_view what, bool calls) const {
  try {
    const Device device =
        traits().device ? Device{DeviceKind::cuda, traits().device_index} : Device{DeviceKind::cpu, 0};
    if (calls && stream.device != device)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("stream is of {}; expected {} (the device of the group)",
                              to_string(stream.device), to_string(device)));
    backend_->check_stream(stream, calls);
  } catch (const Error& e) {
    throw Error(Failure{
        .code = e.code(), .text = fmt::format("{}: {}{}", what, e.what(), tail(member)), .ranks = {}});
  }
}

[[gnu::flatten]] Work GroupState::submit(const Call& call) {
  if (context.forked()) context.check_fork(name(call.op).data());
  if (call.options.stream != Stream{}) [[unlikely]]
    check_stream(call.options.stream, name(call.op), true);
  return submit_checked(call, check(call, traits(), member.rank, member.size, member.name));
}

// Waits until this thread owns the group. Throws if the group has failed, or if another thread does not give
// it up, because the kernel waits for a peer's page in that thread.
void GroupState::await_owner(Op op, Duration deadline) {
  const Duration limit = deadline > Duration::zero() ? deadline : member.deadline;
  const auto since = Clock::now();
  do {  // no Interrupt ends this loop, because it does not wait for peers
    if (contend(Deadline::after(kStuckInFailure), true)) return;
    if (failed()) failure_.raise(op);
    std::this_thread::yield();
  } while (Clock::now() - since < limit);
  throw Error(Failure{.code = ErrorCode::timeout,
                      .text = fmt::format("{}: not begun within {}: all the time another thread of this rank "
                                          "was in the middle of a step; if the kernel copies for it, and "
                                          "waits for memory of a peer, WEFT_SINGLE_COPY=off avoids this{}",
                                          name(op), shown_seconds(limit), tail(member)),
                      .op = op,
                      .ranks = {}},
              true);
}

// Waits while this thread owns the group but there is no room, or until the group has failed while another
// thread owned it.
void GroupState::await_room(int slots, Op op, Duration deadline) {
  if (failed()) {
    disown();
    failure_.raise(op);
  }
  ++stalled_;
  arrange_batch();
  disown();
  const Duration limit = deadline > Duration::zero() ? deadline : member.deadline;
  bool got = false;    // there are enough slots, and this thread owns the group
  bool asked = false;  // whether the backend knows which ranks hold up the first call
  const auto look = [&](bool ask) {
    if (got || asked || failed()) return true;
    own();
    got = ring_.room(slots);
    if (got) return true;
    asked = ask && backend_->ask(ring_.oldest());
    disown();
    return asked;
  };
  drive_until([&] { return look(false); }, Deadline::after(limit));
  if (!got && !failed()) drive_until([&] { return look(true); }, Deadline::after(kAnswers));
  if (!got) {
    own();
    // checked again, because another thread may just have finished the calls in flight
    got = ring_.room(slots);
  }
  --stalled_;
  arrange_batch();
  if (got && !failed()) return;
  std::string story;
  std::vector<int> absent;  // the absent ranks of the first call, behind which the others wait
  std::vector<LastCall> last_calls;
  if (!failed()) {
    absent = backend_->missing(ring_.oldest(), story);
    if (!absent.empty()) story += watch_.told_last_calls();
    last_calls = watch_.last_calls();
  }
  disown();
  if (failed()) failure_.raise(op);
  throw Error(Failure{.code = ErrorCode::timeout,
                      .text = fmt::format("{}: {} calls in flight and {} finished within {}{}{}", name(op),
                                          Ring::kSlots, slots == 1 ? "none" : "too few", shown_seconds(limit),
                                          absent.empty() ? "" : ": " + story, tail(member)),
                      .op = op,
                      .ranks = absent},
              true, std::move(last_calls));
}

Work GroupState::submit_checked(const Call& call, const Operands& have) {
  const OpRow r = row(call.op);
  if (failed()) failure_.raise(call.op);
  if (runs_alone(r.collective)) {
    run_alone(call, have);
    return {};
  }
  own_room(1, call.op, call.options.deadline);
  std::uint32_t index = 0;
  detail::WorkCallbacks* found = nullptr;
  try {
    index = prepare_slot(call, have, found);
  } catch (...) {  // out of memory, before anything has changed
    disown();
    throw;
  }
  return post(index, r.collective, found);
}

// Fills in the call's slot, except for its number. Called by the owner, if there is room.
std::uint32_t GroupState::prepare_slot(const Call& call, const Operands& have,
                                       detail::WorkCallbacks*& found) {
  const std::uint32_t index = ring_.next();
  Ring::Slot& slot = ring_[index];
  const bool blocks = has_blocks(call);
  if (blocks) slot.blocks.resize(2 * static_cast<std::size_t>(member.size));
  if (!row(call.op).collective && (call.peer == any_source || call.op == Op::wait_message))
    found = await_found(slot);
  fill(slot.op, call, have);
  if (blocks) Ring::keep_blocks(slot.blocks, slot.op, call, member.size);
  slot.set_deadline(call.options.deadline > Duration::zero() ? call.options.deadline : member.deadline);
  return index;
}

// Numbers the call of this slot, which is already filled in otherwise, and passes it to the backend. Called
// by the owner. Returns the ticket.
std::uint32_t GroupState::send_off(std::uint32_t index, bool collective, std::uint64_t& when) noexcept {
  Ring::Slot& slot = ring_[index];
  slot.op.call = ring_.number(collective);
  ring_.put(index, collective);
  backend_->post(slot.op);
  slot.record = recorder_->posted(slot.op, when);  // recorded while peers already see the call
  ++works_;
  return slot.generation.load(std::memory_order_relaxed);
}

// Like send_off(), but also gives up ownership of the group and returns the Work.
inline Work GroupState::post(std::uint32_t index, bool collective, detail::WorkCallbacks* found) {
  const Op op = ring_[index].op.op;
  const int peer = ring_[index].op.peer;
  std::uint64_t when = 0;
  const std::uint32_t ticket = send_off(index, collective, when);
  disown();
  if (helped_) progress_.in_flight(1);
  Work work(this, index, ticket);
  if (!collective) {
    work.callbacks_ = found;
    if (op == Op::recv && found == nullptr) work.set_source(static_cast<std::uint32_t>(peer));
  }
  return work;
}

void GroupState::run_alone(const Call& call, const Operands& have) {
  run_own(call.op, call.options.op, own_block(call, have));
}

void GroupState::run_alone(const detail::PreparedCall& p) {
  run_own(p.op.op, p.op.reduce, {p.op.in, p.op.out, p.op.in_count, p.op.out_count, p.op.dtype});
}

std::shared_ptr<detail::PreparedCall> GroupState::prepare(const Call& call) {
  if (context.forked()) context.check_fork(name(call.op).data());
  if (call.options.stream != Stream{}) check_stream(call.options.stream, name(call.op), true);
  Operands have = check(call, traits(), member.rank, member.size, member.name);
  if (call.op == Op::wait_message)
    throw Error(Failure{.code = ErrorCode::bad_argument,
                        .text = fmt::format("make: op is wait_message, and a persistent call cannot hold its "
                                            "answer; expected a collective, send or recv{}",
                                            tail(member)),
                        .op = call.op,
                        .ranks = {}});
  auto prepared = std::make_shared<detail::PreparedCall>();
  detail::PreparedCall& p = *prepared;
  p.group = this;
  p.users = users;
  p.tail = tail(member);
  p.deadline = call.options.deadline > Duration::zero() ? call.options.deadline : member.deadline;
  p.collective = row(call.op).collective;
  p.alone = runs_alone(p.collective);
  if (p.alone) have = own_block(call, have);
  fill(p.op, call, have);
  if (!p.alone && has_blocks(call)) {
    p.blocks.resize(2 * static_cast<std::size_t>(member.size));
    Ring::keep_blocks(p.blocks, p.op, call, member.size);
  }
  p.plain = !p.alone && p.blocks.empty() && p.op.stream == Stream{} && p.op.peer != any_source;
  return prepared;
}

[[gnu::flatten]] Work GroupState::start(const std::shared_ptr<detail::PreparedCall>& prepared) {
  return prepared->plain ? start_as<true>(prepared) : start_as<false>(prepared);
}

template <bool kPlain>
Work GroupState::start_as(const std::shared_ptr<detail::PreparedCall>& prepared) {
  detail::PreparedCall& p = *prepared;
  const Op op = p.op.op;
  if (context.forked()) context.check_fork(name(op).data());
  if constexpr (!kPlain) {
    if (p.op.stream != Stream{})
      // checked again, because the stream may have ended, or may be captured now
      check_stream(p.op.stream, name(op), true);
  }
  if (failed()) failure_.raise(op);
  if constexpr (!kPlain) {
    if (p.alone) {
      run_alone(p);
      return {};
    }
  }
  if (in_flight(p)) [[unlikely]]
    throw_in_flight(p);
  own_room(1, op, p.deadline);
  if (in_flight(p)) [[unlikely]] {  // a callback has started the call while this thread waited for room
    disown();
    throw_in_flight(p);
  }
  const std::uint32_t index = ring_.next();
  detail::WorkCallbacks* found = nullptr;
  try {
    found = fill_slot_as<kPlain>(index, prepared);
  } catch (...) {  // out of memory, before anything has changed
    disown();
    throw;
  }
  return post(index, p.collective, found);
}

template <bool kPlain>
inline detail::WorkCallbacks* GroupState::fill_slot_as(
    std::uint32_t index, const std::shared_ptr<detail::PreparedCall>& prepared) {
  detail::PreparedCall& p = *prepared;
  Ring::Slot& slot = ring_[index];
  detail::WorkCallbacks* found = nullptr;
  if constexpr (!kPlain) {
    if (p.op.peer == any_source) found = await_found(slot);
    // keeps the blocks alive even if the program destroys the PersistentCall meanwhile
    if (!p.blocks.empty()) {
      slot.lent = prepared;
      slot.attended = true;
    }
  }
  p.copy_to(slot.op);
  slot.set_deadline(p.deadline);
  p.begun = true;
  p.slot = index;
  p.ticket = slot.generation.load(std::memory_order_relaxed);
  return found;
}

detail::WorkCallbacks* GroupState::fill_slot(std::uint32_t index,
                                             const std::shared_ptr<detail::PreparedCall>& prepared) {
  return fill_slot_as<false>(index, prepared);
}

void GroupState::throw_in_flight(const detail::PreparedCall& p) {
  throw Error(
      Failure{.code = ErrorCode::bad_argument,
              .text = fmt::format("{}: this persistent call was started before and is still in flight; "
                                  "expected that its last Work is done{}",
                                  name(p.op.op), p.tail),
              .op = p.op.op,
              .ranks = {}});
}

// Removes from the list the exchanges that cannot be started any more and are not in flight. Called by the
// owner, which destroys them after it has given up ownership, because the arena then may ask this group about
// their memory.
std::vector<std::shared_ptr<detail::PreparedExchange>> GroupState::take_unused_exchanges() {
  const auto used = [this](const std::shared_ptr<detail::PreparedExchange>& e) {
    bool flies = e.use_count() > 1;
    ring_.each([&](const Ring::Slot& slot) {
      flies |= slot.op.op == Op::exchange && slot.exchanged == e.get();
      return !flies;
    });
    return flies;
  };
  const auto unused = std::stable_partition(exchanges_.begin(), exchanges_.end(), used);
  std::vector<std::shared_ptr<detail::PreparedExchange>> taken(std::make_move_iterator(unused),
                                                               std::make_move_iterator(exchanges_.end()));
  exchanges_.erase(unused, exchanges_.end());
  return taken;
}

std::shared_ptr<detail::PreparedExchange> GroupState::prepare_exchange(const ExchangePlan& plan, bool sound) {
  context.check_fork(name(Op::exchange).data());
  const std::string tail = weft::tail(member);
  if (!sound) check_exchange(plan, member.rank, member.size, tail);
  if (op_support(traits(), Op::exchange, DType::u8, ReduceOp::Kind::sum, Order::native) ==
          OpSupport::unsupported ||
      (traits().device && plan.kind == ExchangePlan::Kind::add))
    throw Error(Failure{.code = ErrorCode::unsupported,
                        .text = fmt::format("{}: backend {} has no exchange{}{}", plan.name, traits().name,
                                            traits().device ? " that adds on the device" : "", tail),
                        .op = Op::exchange,
                        .ranks = {}});
  auto prepared = std::make_shared<detail::PreparedExchange>(plan, member.rank);
  prepared->group = this;
  prepared->users = users;
  prepared->sound = sound;
  prepared->tail = tail;
  if (failed()) failure_.raise(Op::exchange);
  std::vector<std::shared_ptr<detail::PreparedExchange>> unused;
  if (!try_own()) await_owner(Op::exchange, {});
  try {
    // the group has failed while this thread waited; then nothing is destroyed here
    if (failed()) failure_.raise(Op::exchange);
    unused = take_unused_exchanges();
    exchanges_.push_back(prepared);
    prepared->planned = backend_->plan_exchange(prepared->plan);
  } catch (...) {
    disown();
    throw;
  }
  disown();
  if (prepared->planned == nullptr)
    throw Error(Failure{.code = ErrorCode::system,
                        .text = fmt::format("{}: backend {} has exchange in its traits, but gave no plan{}",
                                            plan.name, traits().name, tail),
                        .op = Op::exchange,
                        .ranks = {}});
  return prepared;
}

Work GroupState::start_exchange(detail::PreparedExchange& p, std::span<const ExchangeField> fields,
                                const CallOptions& options) {
  if (context.forked()) context.check_fork(name(Op::exchange).data());
  if (options.stream != Stream{}) check_stream(options.stream, p.plan.name, true);
  if (options.deadline < Duration::zero())
    throw Error(Failure{.code = ErrorCode::bad_argument,
                        .text = fmt::format("{}: deadline is {} ns; expected 0 or more{}", p.plan.name,
                                            options.deadline.count(), p.tail),
                        .op = Op::exchange,
                        .ranks = {}});
  if (failed()) failure_.raise(Op::exchange);
  const std::uint64_t memory = p.memory_of(fields);
  own_room(1, Op::exchange, options.deadline);
  const std::uint32_t index = ring_.next();
  Ring::Slot& slot = ring_[index];
  try {
    slot.fields.assign(fields.begin(), fields.end());
  } catch (...) {  // out of memory, before anything has changed
    disown();
    throw;
  }
  slot.exchange = {p.planned.get(), slot.fields.data(), memory};
  slot.exchanged = &p;
  slot.op.op = Op::exchange;
  slot.op.dtype = DType::u8;
  slot.op.reduce = {};
  slot.op.order = Order::native;
  slot.op.in = nullptr;
  slot.op.out = nullptr;
  slot.op.in_count = p.program.in_bytes;
  slot.op.out_count = p.program.out_bytes;
  slot.op.root = slot.op.peer = -1;
  slot.op.tag = 0;
  slot.op.stream = options.stream;
  // the device's default stream, on which bytes are packed, too
  if (traits().device && options.stream == Stream{})
    slot.op.stream = Device{DeviceKind::cuda, traits().device_index};
  slot.op.in_blocks = slot.op.out_blocks = nullptr;
  slot.op.user = nullptr;
  slot.op.exchange = &slot.exchange;
  slot.set_deadline(options.deadline > Duration::zero() ? options.deadline : member.deadline);
  exchanges_begun_.store(true, std::memory_order_relaxed);
  return post(index, false, nullptr);
}

// Called by the owner, or by code that has called stand_still().
bool GroupState::exchanges_touch(const void* block, std::size_t bytes) const noexcept {
  const auto* const begin = static_cast<const std::byte*>(block);
  bool touched = false;
  if (WEFT_MUTANT("exchanges_hold_nothing")) return false;
  ring_.each([&](const Ring::Slot& slot) {
    touched |=
        slot.op.op == Op::exchange && slot.exchanged->touches(slot.fields.data(), begin, begin + bytes);
    return !touched;
  });
  return touched;
}

// Makes the object through which this slot's call reports to its Work which message it has found.
detail::WorkCallbacks* GroupState::await_found(Ring::Slot& slot) {
  std::unique_ptr<detail::WorkCallbacks> callbacks(new_callbacks());
  callbacks->found.push_back(std::make_shared<FoundMessage>());
  slot.found = callbacks->found.front();
  slot.attended = true;
  return callbacks.release();
}

// Once in each tick of the kernel it checks whether the ranks are alive, because a program may do nothing
// except call probe().
std::optional<MessageInfo> GroupState::probe(int source, const CallOptions& options) {
  context.check_fork("probe");
  check_probe(source, options, traits(), member.rank, member.size, member.name);
  if (!try_own()) await_owner(Op::wait_message, options.deadline);
  drive_owned();
  std::optional<MessageInfo> found;
  if (!failed()) found = backend_->probe(source, options.tag);
  if (!found && watch_.due_by_tick()) inspect();
  disown();
  progress_.run_due();
  if (failed()) failure_.raise(Op::wait_message);
  if (!found) progress_.drive_all(this);
  return found;
}

MessageInfo GroupState::wait_message(int source, const CallOptions& options) {
  check_may_wait();
  Work work = submit(call::wait_message(source, options));
  const std::shared_ptr<FoundMessage> found = work.callbacks_->found.front();
  work.wait();
  return found->message;
}

// Writes a call in the form for the backend, without its number. Sets only the fields that the operation has.
// A Call may also have a root, a peer or an order that means nothing for its operation, and ranks would
// compare these fields.
void GroupState::fill(OpState& s, const Call& call, const Operands& have) noexcept {
  const OpRow r = row(call.op);
  s.op = call.op;
  // copied field by field, because a wide load would wait for the caller's narrow stores
  s.reduce.kind = call.options.op.kind;
  s.reduce.scale = call.options.op.scale;
  s.reduce.user = call.options.op.user;
  s.order = r.reduces ? std::max(call.options.order, member.order) : Order::native;
  s.in = have.in;
  s.in_count = have.in_count;
  s.out = have.out;
  s.out_count = have.out_count;
  s.dtype = have.dtype;
  s.root = r.rooted == Rooted::no ? -1 : call.root;
  if (WEFT_MUTANT("swapped_root") && s.root >= 0) s.root = (s.root + 1) % member.size;
  s.peer = r.collective ? -1 : call.peer;
  s.tag = call.options.tag;
  s.stream.device.kind = call.options.stream.device.kind;
  s.stream.device.index = call.options.stream.device.index;
  s.stream.handle = call.options.stream.handle;
  s.in_blocks = s.out_blocks = nullptr;
}

// Another thread of this rank may sleep until the call is done. That thread announced its sleep, and then
// owned the group and found the call in flight (settled). Both happened before the present owner owned the
// group, so no fence is needed to see the announcement.
void GroupState::finish(std::uint32_t index) noexcept {
  Ring::Slot& slot = ring_[index];
  recorder_->finished(slot.record, TracedState::done, slot.waited);
  if (slot.attended) [[unlikely]]
    // before free(), so that a thread that finds the call done finds its callbacks in the list
    call_back(slot);
  if (helped_) progress_.in_flight(-1);
  ring_.free(index);
  if (asleep_.load(std::memory_order_relaxed) > 0) progress_.doorbell().ring();
}

// Polls the calls in flight. Returns true if any call moved. Called by the owner.
bool GroupState::drive_owned() noexcept {
  if (failed()) {
    mark_failed();
    return false;
  }
  const Step step = ring_.poll([this](OpState& s) { return backend_->poll(s); },
                               [this](std::uint32_t index) { finish(index); });
  if (step == Step::failed) {
    mark_failed();
    return true;
  }
  const bool moved = step == Step::advanced;
  if (watch_.due(moved)) inspect();
  return moved;
}

template <class After>
bool GroupState::drive_and(const After& after) noexcept {
  if (ring_.idle()) return false;
  if (!try_own()) [[unlikely]] {
    if (unowned_since_.load(std::memory_order_relaxed) == 0)
      unowned_since_.store(Clock::now().time_since_epoch().count(), std::memory_order_relaxed);
    return false;
  }
  if (unowned_since_.load(std::memory_order_relaxed) != 0) [[unlikely]]
    unowned_since_.store(0, std::memory_order_relaxed);
  const bool moved = drive_owned();
  after();
  disown();
  return moved;
}

// Returns whether another thread has owned the group for longer than a call may take. The kernel must then be
// waiting for a peer's page.
bool GroupState::is_stuck(Duration deadline) noexcept {
  const std::int64_t since = unowned_since_.load(std::memory_order_relaxed);
  if (since == 0 || Clock::now() - Clock::time_point(Clock::duration(since)) < deadline + kStuckInFailure)
    return false;
  if (!try_own()) return true;
  unowned_since_.store(0, std::memory_order_relaxed);
  disown();
  return false;
}

void GroupState::raise_stuck(const Ring::Slot& slot) {
  const Op op = slot.op.op;
  const std::uint64_t call = slot.op.call;
  fail(
      Failure{.code = ErrorCode::timeout,
              .text = fmt::format(
                  "{}: not finished within {}: all the time another thread of rank {} was in the middle of a "
                  "step; if the kernel copies for it, and waits for memory of a peer, WEFT_SINGLE_COPY=off "
                  "avoids this",
                  name(op), shown_seconds(slot.deadline()), member.rank),
              .op = op,
              .call = call,
              .ranks = {member.rank}});
  failure_.raise(op, call);
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
  if (ring_.idle()) return true;
  if (!try_own()) return false;
  const bool moved = drive_owned();
  disown();
  return !moved;
}

// If another thread owns the group, that thread polls the group, and inspects it after a number of polls.
void GroupState::watch() noexcept {
  if (ring_.idle() || WEFT_MUTANT("watch_reset_by_traffic") || !try_own()) return;
  if (!ring_.idle()) inspect();
  disown();
}

void GroupState::inspect() noexcept {
  if (!failed() && watch_.inspect()) mark_failed();
}

bool GroupState::look_after() noexcept {
  if (!failed() && try_own()) {  // if it fails, another thread owns the group, and looks itself
    if (!backend_->healthy()) mark_failed();
    disown();
  }
  return failed();
}

// Records the failure for the calls in flight, which stay as they are. Called by the owner.
void GroupState::mark_failed() noexcept {
  if (std::exchange(accounted_, true)) return;
  if (helped_) progress_.in_flight(-ring_.in_flight());
  ring_.each([this](const Ring::Slot& slot) {
    recorder_->finished(slot.record, TracedState::failed, true);
    return true;
  });
  failure_.take_over([this] { return watch_.last_calls(); });
  ring_.each([this](Ring::Slot& slot) {
    if (slot.attended) fail_back(slot);
    return true;
  });
}

// Exists while its thread waits for a Work or polls it. Gives the Work back as soon as the thread owns the
// group and the call is done.
class GroupState::Taking {
 public:
  Taking(GroupState& group, std::uint32_t slot, std::uint32_t ticket) noexcept
      : group_(group), slot_(slot), ticket_(ticket) {}
  bool finished() const noexcept { return taken_ || group_.ring_.finished(slot_, ticket_); }
  bool failed() const noexcept { return !taken_ && group_.failed(); }
  // Called by the owner.
  void take() noexcept {
    if (taken_ || !group_.ring_.finished(slot_, ticket_)) return;
    taken_ = true;
    last_ = group_.count_back();
  }
  // For a finished call: gives the Work back if take() has not done so. The last Work that is given back ends
  // the group.
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
      if (!work.finished() && watch_.due_by_tick()) inspect();
    });
    progress_.run_due();
    if (!work.finished()) {
      if (failed()) failure_.raise(ring_[slot].op.op, ring_[slot].op.call);
      if (unowned_since_.load(std::memory_order_relaxed) != 0 && is_stuck(ring_[slot].deadline()))
        raise_stuck(ring_[slot]);
      if (WEFT_MUTANT("interrupt_ends_done") &&
          (Deadline::after(std::chrono::hours(1)).passed() || interrupted()))
        raise_interrupted(ring_[slot].op.op, ring_[slot].op.call);
      // A peer may need this rank's part of a call in another group before it makes this call.
      if (!WEFT_MUTANT("asking_drives_one_group")) progress_.drive_all(this);
      if (!work.finished()) return false;
    }
  }
  work.give_back();
  return true;
}

[[gnu::flatten]] bool GroupState::wait(std::uint32_t slot, std::uint32_t ticket, const Duration* limit) {
  if (limit != nullptr && *limit <= Duration::zero()) return poll(slot, ticket);
  Taking work(*this, slot, ticket);
  if (!work.finished()) {
    context.check_fork("wait");
    bool stuck = false;
    const auto over = [&] {
      if (work.finished() || work.failed()) return true;
      if (unowned_since_.load(std::memory_order_relaxed) != 0) [[unlikely]]
        stuck = is_stuck(ring_[slot].deadline());
      return stuck;
    };
    drive_until(over,
                limit != nullptr                      ? Deadline::after(*limit)
                : Interruptible::current() == nullptr ? Deadline::never()
                                                      : Deadline::after(kUnlessInterrupted),
                [&] { work.take(); });
    if (!work.finished()) {
      if (failed()) failure_.raise(ring_[slot].op.op, ring_[slot].op.call);
      if (stuck) raise_stuck(ring_[slot]);
      if (limit == nullptr) raise_interrupted(ring_[slot].op.op, ring_[slot].op.call);
      return false;
    }
  }
  work.give_back();
  return true;
}

// Fails the group, because the other ranks are in the call, too, and cannot finish it without this rank.
void GroupState::raise_interrupted(Op op, std::uint64_t call) {
  fail(Failure{.code = ErrorCode::aborted,
               .text = fmt::format("{}: rank {} was interrupted while it waited", name(op), member.rank),
               .op = op,
               .call = call,
               .ranks = {member.rank}});
  failure_.raise(op, call);
}

void GroupState::wait_on(std::uint32_t slot, std::uint32_t ticket, Stream stream) {
  if (ring_.finished(slot, ticket)) return;
  context.check_fork("wait");
  check_stream(stream, "wait_on", false);
  // The call must first have been passed to the device, which may take some steps; this loop drives them.
  bool there = false;
  drive_until(
      [&] {
        if (there || failed()) return true;
        own();
        there = ring_.finished(slot, ticket) || backend_->wait_on(ring_[slot].op, stream);
        disown();
        return there;
      },
      Deadline::never());
  if (!there && !ring_.finished(slot, ticket)) failure_.raise(ring_[slot].op.op, ring_[slot].op.call);
}

void GroupState::dropped(std::uint32_t slot, std::uint32_t ticket,
                         const detail::WorkCallbacks* callbacks) noexcept {
  if (context.forked()) return;
  drop(slot, ticket);
  if (callbacks != nullptr) fail_callbacks(*callbacks);
  give_back();
}

void GroupState::drop(std::uint32_t slot, std::uint32_t ticket) noexcept {
  if (ring_.finished(slot, ticket)) return;
  // owned, because otherwise another thread might finish the call and reuse its slot
  if (!own_within(kStuck)) {
    const bool had_failed = failed();
    fail(Failure{.code = ErrorCode::aborted,
                 .text = fmt::format("rank {} dropped the Work of a call in flight", member.rank),
                 .ranks = {member.rank}});
    return failure_.warn_of_dropped(Op::none, kNoCall, had_failed);
  }
  drive_owned();
  const bool there = ring_.finished(slot, ticket);
  const Op op = ring_[slot].op.op;
  const std::uint64_t call = ring_[slot].op.call;
  disown();
  if (there) return;
  const bool had_failed = failed();
  try {
    if (!had_failed)
      fail(Failure{
          .code = ErrorCode::aborted,
          .text = fmt::format("{}: rank {} dropped the Work of a call in flight", name(op), member.rank),
          .op = op,
          .call = call,
          .ranks = {member.rank}});
  } catch (...) {  // out of memory for the message: peers notice when this rank leaves
  }
  failure_.warn_of_dropped(op, call, had_failed);
  failure_.quiesce_dropped(ring_);
}

void GroupState::abort(std::string_view why) {
  fail(Failure{.code = ErrorCode::aborted,
               .text = fmt::format("aborted by rank {}: {}", member.rank, why),
               .ranks = {member.rank}});
}

void GroupState::fail(const Failure& why) noexcept {
  backend_->fail(why);
  if (!own_within(kStuckInFailure)) return failure_.take_over();
  mark_failed();
  disown();
}

void GroupState::fail_dropped(const Failure& why) noexcept {
  const bool had_failed = failed();
  fail(why);
  failure_.warn_of_dropped(why.op, why.call, had_failed);
}

bool GroupState::quiesce(Duration limit) noexcept { return failure_.quiesce(limit, ring_); }

void GroupState::announce_sleep(bool asleep) noexcept {
  asleep_.fetch_add(asleep ? 1 : -1, std::memory_order_seq_cst);
  backend_->announce_sleep(asleep);
}

// While the group stands still, no thread submits or polls.
bool GroupState::stand_still() noexcept { return try_own(); }

void GroupState::go_on() noexcept { disown(); }

bool GroupState::holds(const void* block, std::size_t bytes) const noexcept {
  if (failure_.quiesced()) return false;
  if (ring_.is_exposed(block, bytes)) return true;
  if (!exchanges_begun_.load(std::memory_order_relaxed) || ring_.idle()) return false;
  if (!owned_.try_own()) return true;  // the owning thread may be the thread that frees
  const bool held = exchanges_touch(block, bytes);
  owned_.disown();
  return held;
}

}  // namespace weft
