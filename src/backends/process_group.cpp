#include "weft/backends/process_group.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <utility>

#include "backends/group_state.hpp"
#include "backends/shm/shm_backend.hpp"

namespace weft {
namespace {

void check_membership(const Membership& m) {
  const auto wrong = [&](const std::string& text) {
    throw Error(ErrorCode::bad_argument, fmt::format("group \"{}\": {}", m.name, text));
  };
  if (m.size < 1) wrong(fmt::format("size is {}; expected 1 or more", m.size));
  if (m.rank < 0 || m.rank >= m.size)
    wrong(fmt::format("rank is {}; expected 0 to {} (size {})", m.rank, m.size - 1, m.size));
  if (m.size > 1 && m.store == nullptr) wrong("store is null; ranks have nowhere to meet");
  if (m.deadline <= Duration::zero()) wrong("deadline is not positive");
  const int identity = m.identity < 0 ? m.rank : m.identity;
  if (identity >= Neighbourhood::kMaxIdentities)
    wrong(fmt::format("identity is {}; expected at most {}", identity, Neighbourhood::kMaxIdentities - 1));
}

}  // namespace

ProcessGroup ProcessGroup::create(Context& context, std::string_view backend, const Membership& m) {
  if (backend != "shm")
    throw Error(ErrorCode::unsupported,
                fmt::format("backend \"{}\" is not known; expected \"shm\"", backend));
  return create(context, make_shm_backend, m);
}

ProcessGroup ProcessGroup::create(Context& context, const BackendFactory& factory, const Membership& m) {
  context.check_fork("ProcessGroup::create");
  check_membership(m);
  // The n-th group of a name meets the n-th of the others, so that a program may make the same group again.
  const std::int64_t generation =
      m.size == 1 ? 0 : m.store->add(fmt::format("weft/{}/generation/{}", m.name, m.rank), 1);
  return ProcessGroup(
      new GroupState(context, factory, m, fmt::format("weft/{}#{}", m.name, generation), m.size));
}

ProcessGroup::ProcessGroup(ProcessGroup&& other) noexcept : state_(std::exchange(other.state_, nullptr)) {}

ProcessGroup& ProcessGroup::operator=(ProcessGroup&& other) noexcept {
  std::swap(state_, other.state_);
  return *this;
}

ProcessGroup::~ProcessGroup() {
  if (state_) state_->release();
}

int ProcessGroup::rank() const noexcept { return state_->member.rank; }
int ProcessGroup::size() const noexcept { return state_->member.size; }
const std::string& ProcessGroup::name() const noexcept { return state_->member.name; }
Context& ProcessGroup::context() const noexcept { return state_->context; }
std::string_view ProcessGroup::backend() const noexcept { return state_->backend_name(); }

Work ProcessGroup::submit(const Call& call) { return state_->submit(call); }

Work ProcessGroup::all_reduce(ConstTensorView in, TensorView out, const CallOptions& options) {
  return submit({.op = Op::all_reduce, .in = {&in, 1}, .out = {&out, 1}, .options = options});
}

Work ProcessGroup::all_gather(ConstTensorView in, TensorView out, const CallOptions& options) {
  return submit({.op = Op::all_gather, .in = {&in, 1}, .out = {&out, 1}, .options = options});
}

Work ProcessGroup::reduce_scatter(ConstTensorView in, TensorView out, const CallOptions& options) {
  return submit({.op = Op::reduce_scatter, .in = {&in, 1}, .out = {&out, 1}, .options = options});
}

Work ProcessGroup::broadcast(ConstTensorView in, TensorView out, int root, const CallOptions& options) {
  return submit({.op = Op::broadcast, .in = {&in, 1}, .out = {&out, 1}, .root = root, .options = options});
}

Work ProcessGroup::barrier(const CallOptions& options) {
  return submit({.op = Op::barrier, .in = {}, .out = {}, .options = options});
}

Work ProcessGroup::send(ConstTensorView in, int dst, const CallOptions& options) {
  return submit({.op = Op::send, .in = {&in, 1}, .out = {}, .peer = dst, .options = options});
}

Work ProcessGroup::recv(TensorView out, int src, const CallOptions& options) {
  return submit({.op = Op::recv, .in = {}, .out = {&out, 1}, .peer = src, .options = options});
}

ProcessGroup ProcessGroup::subgroup(std::string_view name, std::span<const int> ranks) {
  context().check_fork("subgroup");
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
    wrong(fmt::format("ranks {} does not hold this rank, {}; only members may call it",
                      fmt::join(ranks, ", "), rank()));
  Membership m = state_->member;
  m.identity = m.identity < 0 ? m.rank : m.identity;
  m.rank = static_cast<int>(mine - ranks.begin());
  m.size = static_cast<int>(ranks.size());
  m.name = std::string(name);
  return ProcessGroup(
      new GroupState(context(), state_->factory, m, state_->next_token(name, ranks), state_->ranks_here));
}

void ProcessGroup::abort(std::string_view why) {
  context().check_fork("abort");
  state_->abort(why);
}

bool ProcessGroup::quiesce(Duration limit) {
  context().check_fork("quiesce");
  return state_->quiesce(limit);
}

std::string ProcessGroup::trace_json() const { return state_->recorder.json(name(), rank(), size()); }

}  // namespace weft
