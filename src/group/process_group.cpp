#include "weft/group/process_group.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <cstring>
#include <new>
#include <numeric>
#include <utility>

#include "base/mutant.hpp"
#include "base/parse_number.hpp"
#include "base/text/printable.hpp"
#include "group/group_state.hpp"
#include "group/parent_watch.hpp"
#include "group/shrink.hpp"
#include "store/duration_text.hpp"
#include "store/table.hpp"
#include "weft/backends/hold_up.hpp"
#include "weft/backends/join.hpp"
#include "weft/backends/plugin.hpp"
#include "weft/base/env.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

void check_membership(const Membership& m) {
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("group \"{}\": {}", m.name, text));
  };
  if (m.size < 1) wrong(fmt::format("size is {}; expected 1 or more", m.size));
  if (m.size > kMaxRanks) wrong(fmt::format("size is {}; expected at most {}", m.size, kMaxRanks));
  if (m.rank < 0 || m.rank >= m.size)
    wrong(fmt::format("rank is {}; expected 0 to {} (size {})", m.rank, m.size - 1, m.size));
  if (m.size > 1 && m.store == nullptr) wrong("store is null; ranks need it to find each other");
  if (m.deadline <= Duration::zero())
    wrong(fmt::format("deadline is {} ns; expected more than 0", m.deadline.count()));
  if (m.order != Order::native && m.order != Order::canonical)
    wrong(fmt::format("order is {}; expected 0 (native) or 1 (canonical)", static_cast<int>(m.order)));
}

// Exchanges values through the Store, for a transport that does not move host memory: all[r] becomes `mine`
// of rank r.
using Pair = std::array<std::int32_t, 2>;
std::vector<Pair> gather_by_store(GroupState& group, Pair mine) {
  const Membership& m = group.member;
  std::vector<Pair> all(static_cast<std::size_t>(m.size), mine);
  if (m.size == 1) return all;
  const std::string token = group.next_token("gather", {});
  const Deadline deadline = Deadline::after(m.deadline);
  const CalledInWaits answers = group.answering();
  m.store->set(fmt::format("{}/{}", token, m.rank), fmt::format("{} {}", mine[0], mine[1]), deadline);
  for (int r = 0; r < m.size; ++r) {
    std::string text;
    try {
      text = m.store->get(fmt::format("{}/{}", token, r), deadline);
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout || unset(*m.store, {fmt::format("{}/{}", token, r)}).empty()) throw;
      throw Error(Failure{.code = ErrorCode::timeout,
                          .text = fmt::format("split: rank {} did not call it within {} "
                                              "[group \"{}\", rank {}]",
                                              r, shown_seconds(m.deadline), m.name, m.rank),
                          .ranks = {r}});
    }
    std::string_view rest = text;
    const auto color = next_integer<std::int32_t>(rest, -1, INT32_MAX);
    const auto order = parse_integer<std::int32_t>(rest);
    if (!color || !order)
      throw Error(Failure{
          .code = ErrorCode::mismatch,
          .text = fmt::format(
              "split: key {} holds {}; expected a color of -1 or more and a key [group \"{}\", rank {}]",
              shown_key(fmt::format("{}/{}", token, r)), shown_key(text), m.name, m.rank),
          .ranks = {r}});
    all[static_cast<std::size_t>(r)] = {*color, *order};
  }
  return all;
}

// Creates a group. No other code does. Also throws an Error if there is no memory for a group.
template <class... Args>
GroupState* new_group(Context& context, const BackendFactory& factory, const Membership& m, Args&&... args) {
  try {
    return new GroupState(context, factory, m, std::forward<Args>(args)...);
  } catch (const std::bad_alloc&) {
    throw Error(Failure{.code = ErrorCode::system,
                        .text = fmt::format("group \"{}\": no memory to make it: {} [rank {}]", m.name,
                                            system_words(ENOMEM), m.rank),
                        .ranks = {}});
  }
}

[[noreturn, gnu::cold, gnu::noinline]] void throw_empty(std::string_view what) {
  throw Error(ErrorCode::bad_argument,
              fmt::format("{}: empty ProcessGroup: it was made by default, moved from, left, or is of a rank "
                          "without a color in split()",
                          what));
}
GroupState& given(GroupState* state, std::string_view what) {
  if (state == nullptr) [[unlikely]]
    throw_empty(what);
  return *state;
}

}  // namespace

ProcessGroup ProcessGroup::create(Context& context, std::string_view backend, const Membership& m) {
  if (const auto wanted = env::get("WEFT_BACKEND");
      wanted && m.rank == 0 && m.size > 1 && backend != "auto" && *wanted != "auto" && *wanted != backend)
    context.log().write(LogLayer::group, LogLevel::warning,
                        fmt::format("group \"{}\": the program asks for {} by name, so WEFT_BACKEND={} is "
                                    "ignored; \"auto\" would use it",
                                    m.name, backend, printable(*wanted)));
  return create(context, load_backend(context, backend), m);
}

ProcessGroup ProcessGroup::create(Context& context, const BackendFactory& factory, const Membership& m) {
  context.check_fork("ProcessGroup::create");
  check_membership(m);
  if (!factory)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("group \"{}\": the factory is empty; expected a function that makes a backend", m.name));
  // The n-th group of a name belongs to the n-th group of that name on the other ranks, so that a program may
  // make the same group again.
  const std::int64_t generation = m.size == 1
                                      ? 0
                                      : m.store->add(fmt::format("weft/{}/generation/{}", m.name, m.rank), 1,
                                                     Deadline::after(m.deadline));
  const std::string token = fmt::format("weft/{}#{}", m.name, generation);
  ProcessGroup made(new_group(context, factory, m, token, m.size,
                              Origin{.hosts = std::make_shared<HostTable>(context, m, token)}));
  if (m.order == Order::canonical && made.traits().device && !made.traits().native_is_canonical)
    throw Error(
        ErrorCode::unsupported,
        fmt::format("group \"{}\": order is canonical, but backend {} adds in an order of its own, and "
                    "weft composes no reductions of memory of a device",
                    m.name, made.backend()));
  return made;
}

ProcessGroup::ProcessGroup(ProcessGroup&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {
  if (state_ != nullptr) state_->users->handle_goes();
}

ProcessGroup& ProcessGroup::operator=(ProcessGroup&& other) noexcept {
  std::swap(state_, other.state_);
  for (const GroupState* state : {state_, other.state_})
    if (state != nullptr) state->users->handle_goes();
  return *this;
}

ProcessGroup::~ProcessGroup() {
  if (state_ == nullptr) return;
  state_->users->handle_goes();
  state_->release();
}

int ProcessGroup::rank() const { return given(state_, "rank").member.rank; }
int ProcessGroup::size() const { return given(state_, "size").member.size; }
const std::string& ProcessGroup::name() const { return given(state_, "name").member.name; }
Context& ProcessGroup::context() const { return given(state_, "context").context; }
std::string_view ProcessGroup::backend() const { return given(state_, "backend").backend_name(); }

const Traits& ProcessGroup::traits() const { return given(state_, "traits").traits(); }

Order ProcessGroup::order() const {
  const GroupState& group = given(state_, "order");
  return group.traits().native_is_canonical ? Order::canonical : group.member.order;
}

Work ProcessGroup::submit(const Call& c) {
  if (state_ == nullptr) [[unlikely]]
    throw_empty(weft::name(c.op));
  return state_->submit(c);
}
PersistentCall ProcessGroup::make(const Call& c) {
  return PersistentCall(given(state_, weft::name(c.op)).prepare(c));
}
PersistentExchange ProcessGroup::make_exchange(const ExchangePlan& plan) {
  return PersistentExchange(given(state_, "make_exchange").prepare_exchange(plan));
}
Work ProcessGroup::exchange(const ExchangePlan& plan, std::span<const ExchangeField> fields,
                            const CallOptions& options) {
  return PersistentExchange(given(state_, "exchange").prepare_exchange(plan)).start(fields, options);
}
std::optional<MessageInfo> ProcessGroup::probe(int src, const CallOptions& options) {
  return given(state_, "probe").probe(src, options);
}
MessageInfo ProcessGroup::wait_message(int src, const CallOptions& options) {
  return given(state_, "wait_message").wait_message(src, options);
}
Work ProcessGroup::coalesced(std::span<const Call> calls) {
  return given(state_, "coalesced").submit_all(calls);
}
Work ProcessGroup::coalesced(std::initializer_list<Call> calls) {
  return coalesced({calls.begin(), calls.size()});
}

namespace {

// Rewrites an Error from the making of a subgroup with ranks of the parent, because the caller of subgroup()
// knows only these ranks.
Error as_of_parent(const Error& e, const ProcessGroup& parent, std::span<const int> members) {
  std::vector<int> ranks;
  for (const int r : e.ranks())
    if (r >= 0 && r < static_cast<int>(members.size())) ranks.push_back(members[static_cast<std::size_t>(r)]);
  if (std::equal(ranks.begin(), ranks.end(), e.ranks().begin(), e.ranks().end())) return e;
  std::sort(ranks.begin(), ranks.end());
  return Error(
      Failure{.code = e.code(),
              .text = fmt::format("{} (in group \"{}\": {})", e.what(), parent.name(), name_ranks(ranks)),
              .op = e.op(),
              .call = e.call(),
              .ranks = ranks},
      e.quiesced());
}

}  // namespace

ProcessGroup ProcessGroup::subgroup(std::string_view name, std::span<const int> ranks) {
  given(state_, "subgroup").context.check_fork("subgroup");
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument,
                fmt::format("subgroup \"{}\": {} [group \"{}\", rank {}]", name, text, this->name(), rank()));
  };
  std::vector<int> sorted(ranks.begin(), ranks.end());
  std::sort(sorted.begin(), sorted.end());
  if (sorted.empty()) wrong("ranks is empty");
  if (sorted.front() < 0 || sorted.back() >= size())
    wrong(fmt::format("ranks holds {}; expected 0 to {}", sorted.front() < 0 ? sorted.front() : sorted.back(),
                      size() - 1));
  if (const auto twice = std::adjacent_find(sorted.begin(), sorted.end()); twice != sorted.end())
    wrong(fmt::format("ranks holds {} twice", *twice));
  const auto mine = std::find(ranks.begin(), ranks.end(), rank());
  if (mine == ranks.end())
    wrong(fmt::format("ranks {} do not include this rank, {}; only members may call it",
                      fmt::join(ranks, ", "), rank()));
  Membership m = state_->member;
  m.process_rank = m.process_rank < 0 ? m.rank : m.process_rank;
  m.rank = static_cast<int>(mine - ranks.begin());
  m.size = static_cast<int>(ranks.size());
  m.name = std::string(name);
  ParentWatch watch(*state_, name, ranks);
  try {
    return ProcessGroup(new_group(context(), state_->factory, m, state_->next_token(name, ranks),
                                  state_->ranks_here_of(m.size), state_->origin_of(ranks), watch.store()));
  } catch (const Error& e) {
    if (auto cause = watch.cause(e)) throw *std::move(cause);
    throw as_of_parent(e, *this, ranks);
  }
}

ProcessGroup ProcessGroup::shrink(Duration limit) {
  given(state_, "shrink").context.check_fork("shrink");
  if (limit < Duration::zero())
    throw Error(ErrorCode::bad_argument,
                fmt::format("shrink: limit is {}; expected 0 or more [group \"{}\", rank {}]",
                            shown_seconds(limit), name(), rank()));
  const CalledInWaits answers = state_->answering();
  return ProcessGroup(weft::shrink(*state_, limit));
}

std::span<const int> ProcessGroup::parent_ranks() const { return given(state_, "parent_ranks").origin.ranks; }

namespace {

// Rewrites an Error of a collective that split() or leave() has made, and that the program itself has not
// called.
Error within(const char* what, const Error& e) {
  return Error(Failure{.code = e.code(),
                       .text = fmt::format("{}: {}", what, e.what()),
                       .op = e.op(),
                       .call = e.call(),
                       .ranks = std::vector<int>(e.ranks().begin(), e.ranks().end())},
               e.quiesced(), std::vector<LastCall>(e.last_calls().begin(), e.last_calls().end()));
}

}  // namespace

ProcessGroup ProcessGroup::split(int color, int key) {
  given(state_, "split").context.check_fork("split");
  if (color < -1)
    throw Error(ErrorCode::bad_argument,
                fmt::format("split: color is {}; expected 0 or more, or -1 for no group "
                            "[group \"{}\", rank {}]",
                            color, name(), rank()));
  const Pair mine{color, key};
  std::vector<Pair> all(static_cast<std::size_t>(size()));
  if (traits().device) {
    all = gather_by_store(*state_, mine);
  } else {
    try {
      all_gather(view(mine.data(), 2), view(all.data()->data(), 2 * size())).wait();
    } catch (const Error& e) {
      throw within("split: the exchange of colors (an all_gather)", e);
    }
  }
  if (color == -1) return {};
  std::vector<int> ranks;
  for (int r = 0; r < size(); ++r)
    if (all[static_cast<std::size_t>(r)][0] == color) ranks.push_back(r);
  std::stable_sort(ranks.begin(), ranks.end(), [&](int a, int b) {
    return all[static_cast<std::size_t>(a)][1] < all[static_cast<std::size_t>(b)][1];
  });
  return subgroup(fmt::format("{}/split{}", name(), color), ranks);
}

ProcessGroup ProcessGroup::duplicate() {
  std::vector<int> ranks(static_cast<std::size_t>(given(state_, "duplicate").member.size));
  std::iota(ranks.begin(), ranks.end(), 0);
  return subgroup(name() + "/duplicate", ranks);
}

int ProcessGroup::local_rank() const {
  const std::vector<int> local = given(state_, "local_rank").local_ranks();
  return static_cast<int>(std::find(local.begin(), local.end(), rank()) - local.begin());
}

int ProcessGroup::local_size() const {
  return static_cast<int>(given(state_, "local_size").local_ranks().size());
}

ProcessGroup ProcessGroup::split_by_host() {
  const std::vector<int> local = given(state_, "split_by_host").local_ranks();
  return subgroup(fmt::format("{}/host{}", name(), local.front()), local);
}

void GroupState::compare_with_all(Duration deadline) {
  context.check_fork("leave");
  if (deadline < Duration::zero())
    throw Error(ErrorCode::bad_argument, fmt::format("leave: deadline is {}; expected 0 or more{}",
                                                     shown_seconds(deadline), tail(member)));
  if (WEFT_MUTANT("silent_leave")) return;
  try {
    submit(call::barrier({.deadline = deadline})).wait();
  } catch (const Error& e) {
    throw within("leave: the comparison of all calls (a barrier)", e);
  }
}

void ProcessGroup::leave(Duration deadline) {
  given(state_, "leave").compare_with_all(deadline);
  state_->users->handle_goes();
  std::exchange(state_, nullptr)->release();
}

void ProcessGroup::abort(std::string_view why) {
  given(state_, "abort").context.check_fork("abort");
  state_->abort(why);
}

bool ProcessGroup::quiesce(Duration limit) {
  given(state_, "quiesce").context.check_fork("quiesce");
  return state_->quiesce(limit);
}

GroupState& detail::Access::state(const ProcessGroup& group, const char* call) {
  return given(group.state_, call);
}

bool ProcessGroup::failed() const noexcept { return state_ != nullptr && state_->failed(); }

std::string ProcessGroup::trace_json() const { return to_json(given(state_, "trace_json").trace()); }

std::string ProcessGroup::trace_chrome() const {
  const Trace trace = given(state_, "trace_chrome").trace();
  return to_chrome({&trace, 1});
}

}  // namespace weft
