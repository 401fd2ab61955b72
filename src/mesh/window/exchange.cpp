// Carries out the plan of a window: checks the memory of fields, and begins the exchange of the group.
#include "mesh/window/exchange.hpp"

#include <fmt/format.h>

#include "group/group_state.hpp"
#include "group/persistent/prepared_exchange.hpp"
#include "host/strided/overlap.hpp"
#include "mesh/window/agree.hpp"
#include "mesh/window/in_flight.hpp"
#include "mesh/window/named.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"

namespace weft {
namespace windows {

Judged::Judged(std::uint64_t id, std::span<const WindowField> fields, Device device, std::vector<Pair> pairs,
               bool adjoint)
    : id_(id), pairs_(std::move(pairs)), device_(device) {
  for (const Pair& p : pairs_)
    memory_.push_back(adjoint ? ExchangeField{p.window, p.part} : ExchangeField{p.part, p.window});
  for (const WindowField& f : fields) {
    words_.insert(words_.end(), {address(f.in.data), address(f.out.data), kind(f.in), kind(f.out)});
    const int rank = f.in.shape.rank();
    for (int d = 0; d < rank; ++d)
      words_.insert(words_.end(), {bits(f.in.shape[d]), bits(f.in.strides[d]), bits(f.out.shape[d]),
                                   bits(f.out.strides[d])});
  }
}

Exchange::Exchange(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields,
                   Stream stream)
    : plan_(std::move(plan)),
      program_(&program),
      pairs_(fields.pairs()),
      judged_(fields.id()),
      stream_(stream),
      runtime_(stream.device == Device{} && plan_->host != nullptr
                   ? *plan_->host
                   : plan_->mesh.context().device(stream.device)) {
  if (program_->room > 0) buffer_ = room_of(program_->room);
  plan_->in_flight.push_back(this);
}

Exchange::~Exchange() {
  leave();
  if (buffer_) keep(std::move(buffer_));
}

Failure Exchange::dropped() const {
  return {.code = ErrorCode::aborted,
          .text = fmt::format("{}: rank {} dropped an exchange in flight", plan_->name, plan_->me),
          .ranks = {plan_->me}};
}

void Exchange::keep(Tensor room) const {
  if (plan_->mesh.context().forked()) return;  // the lock may be held for ever
  constexpr std::size_t kMostSpare = 4;
  const std::lock_guard lock(plan_->spare_mutex);
  if (plan_->spare.size() < kMostSpare) plan_->spare.push_back(std::move(room));
}

Tensor Exchange::room_of(std::int64_t bytes) const {
  {
    const std::lock_guard lock(plan_->spare_mutex);
    for (Tensor& spare : plan_->spare)
      if (spare.bytes() >= bytes && spare.stream() == stream_) {
        std::swap(spare, plan_->spare.back());
        Tensor taken = std::move(plan_->spare.back());
        plan_->spare.pop_back();
        return taken;
      }
  }
  return {plan_->mesh.context(), Dims::line(bytes), DType::u8, Memory::shared, stream_};
}

void Exchange::copy_own() const {
  for (const Program::Step& step : program_->own) {
    const std::byte* const from = pair(step).part + step.from;
    std::byte* const to = pair(step).window + step.to;
    if (from != to || !step.loops.same_steps()) step.loops.copy(runtime_, stream_, from, to);
  }
}

void Exchange::fill() const {
  for (const Program::Fill& f : program_->fills)
    f.step.loops.fill(runtime_, stream_, f.element.data(), pair(f.step).window + f.step.to);
}

void Exchange::clear_sums() const {
  const std::array<std::byte, 16> zero{};
  for (const Program::Step& step : program_->cleared)
    step.loops.fill(runtime_, stream_, zero.data(), sums_of(step.field));
}

void Exchange::add(const Program::Step& step, const std::byte* from) const {
  add_to(step.loops, program_->forms[step.field].dtype, from + step.from, sums_of(step.field) + step.to);
}

void Exchange::add_own() const {
  for (const Program::Step& step : program_->own) add(step, pair(step).window);
}

void Exchange::round_sums() const {
  for (const Program::Step& step : program_->rounded)
    round_to(step.loops, program_->forms[step.field].dtype, sums_of(step.field), pair(step).part);
}

}  // namespace windows

namespace {

using Program = Window::Plan::Program;
using windows::called;
using windows::Judged;
using windows::Pair;
using windows::refuse;

// Throws if elements that are written share memory with elements that are read, or with each other; `in`
// may lie at its place in `out`.
void judge_overlap(const Window::Plan& plan, const Program& program, std::span<const WindowField> fields,
                   std::span<const Pair> pairs) {
  const std::size_t n = fields.size();
  for (std::size_t i = 0; i < n; ++i) {
    if (overlaps_itself(fields[i].out))
      refuse(
          plan,
          fmt::format("{} has strides {} of {}: elements share memory; expected each in a place of its own",
                      called("out", i, n), to_string(fields[i].out.strides), to_string(fields[i].out.shape)));
    for (std::size_t j = 0; j < n; ++j) {
      const bool at_place =
          i == j && std::ranges::any_of(program.places[i], [&](const auto& p) { return p.holds(pairs[i]); });
      if (!at_place && share_memory(fields[j].in, fields[i].out))
        refuse(plan,
               fmt::format("{} and {} overlap; expected apart{}", called("in", j, n), called("out", i, n),
                           program.adjoint || i != j ? "" : ", or in at its place in out"));
      if (j < i && share_memory(fields[j].out, fields[i].out))
        refuse(plan,
               fmt::format("{} and {} overlap; expected apart", called("out", j, n), called("out", i, n)));
    }
  }
}

// Where the fields lie; throws where one has no memory, or not of its own.
const Judged& judge(const Window::Plan& plan, const Program& program, std::span<const WindowField> fields,
                    Device device) {
  const std::size_t n = fields.size();
  std::vector<Pair> pairs(n);
  for (std::size_t i = 0; i < n; ++i) {
    const WindowField& f = fields[i];
    auto* const read = const_cast<std::byte*>(f.in.data);
    pairs[i] = program.adjoint ? Pair{f.out.data, read} : Pair{read, f.out.data};
    const auto check = [&](const char* which, const std::byte* data, const Shape& shape, Device on) {
      if (data == nullptr && shape.count() > 0)
        refuse(plan, fmt::format("{} {} has no memory", called(which, i, n), to_string(shape)));
      if (!(on == device)) refuse(plan, called(which, i, n) + " " + is_on(on, device));
    };
    check("in", f.in.data, f.in.shape, f.in.device);
    check("out", f.out.data, f.out.shape, f.out.device);
  }
  judge_overlap(plan, program, fields, pairs);
  return program.judged[program.next_judged++ % program.judged.size()] = {++plan.judgements, fields, device,
                                                                          std::move(pairs), program.adjoint};
}

struct Known {
  const Program* program = nullptr;
  const Judged* fields = nullptr;
};

// Fields that were checked before. For eight fields this takes a tenth of the time of a small exchange, and
// checking them again takes a third.
Known as_before(const Window::Plan& plan, std::span<const WindowField> fields, Device device,
                bool adjoint) noexcept {
  for (const auto& p : plan.programs) {
    if (p->adjoint != adjoint) continue;
    for (const Judged& judged : p->judged)
      if (judged.is_of(fields, device)) return {p.get(), &judged};
  }
  return {};
}

// An exchange as a call of the group. Filling needs no other rank: this rank fills its own window.
class InGroup final : public WindowTransfer::Steps, private windows::Exchange {
 public:
  InGroup(std::shared_ptr<const Plan> plan, const Program& program, const Judged& fields, Stream stream)
      : Exchange(std::move(plan), program, fields, stream) {
    if (program_->adjoint) clear_sums();
    if (plan_->group != nullptr) {
      if (!program_->exchange)
        program_->exchange = detail::PreparedExchange::make_sound(*plan_->group, program_->plan);
      work_ = program_->exchange.start(fields.memory(), {.stream = stream_});
      group_ = &detail::Access::state(*plan_->group);
    } else if (program_->adjoint) {
      add_own();
      round_sums();
    } else {
      copy_own();
    }
    fill();
  }

  InGroup(const InGroup&) = delete;
  InGroup& operator=(const InGroup&) = delete;
  ~InGroup() override {
    if (!work_.valid() || plan_->mesh.context().forked()) return;
    try {
      if (work_.done()) return;
      group_->fail_dropped(dropped());
    } catch (...) {  // the group has failed: others know
    }
  }

  bool done() override try {
    plan_->mesh.context().check_fork(plan_->name);
    if (why_) std::rethrow_exception(why_);
    try {
      return !work_.valid() || work_.done();
    } catch (...) {
      why_ = std::current_exception();
      leave();
      throw;
    }
  } catch (const Error& e) {
    windows::throw_named(plan_->name, e);
  }
  void finish() override try {
    plan_->mesh.context().check_fork(plan_->name);
    if (why_) std::rethrow_exception(why_);
    if (work_.valid()) work_.wait();
  } catch (const Error& e) {
    windows::throw_named(plan_->name, e);
  }

 private:
  GroupState* group_ = nullptr;  // lives while work_ is valid: the program may have let go of the group
  std::exception_ptr why_;       // done() has thrown it
  Work work_;                    // last: it ends before the memory goes
};

WindowTransfer begin(const Window& window, const std::shared_ptr<Window::Plan>& plan,
                     std::span<const WindowField> fields, Stream stream, bool adjoint) try {
  const bool alone = !plan->axes || plan->axes.size() == 1;
  if (!alone) plan->mesh.context().check_fork(plan->name);
  if (fields.empty() && alone) return {};
  if (stream == Stream{} && !fields.empty()) stream = fields[0].in.device;
  const bool host = stream.device == Device{};
  // The group is made by all of them at their first window, also by those that exchange nothing.
  if (!alone && plan->group == nullptr) {
    plan->group = &plan->axes.group();
    plan->listed.emplace(plan->mesh.context(), fmt::format("a {}", plan->name));
  }
  Known known = as_before(*plan, fields, stream.device, adjoint);
  if (known.program == nullptr) {
    known.program = &windows::program_for(window, *plan, fields, adjoint);
    known.fields = &judge(*plan, *known.program, fields, stream.device);
  }
  const Program& program = *known.program;
  if (!plan->in_flight.empty()) windows::expect_free(*plan, program, *known.fields);
  if (!alone && !plan->agreed) {
    windows::agree(*plan, program.forms, stream.device, adjoint);
    plan->agreed = true;
  }
  if (host && plan->host == nullptr) plan->host = &plan->mesh.context().device(stream.device);
  return WindowTransfer(std::make_unique<InGroup>(plan, program, *known.fields, stream));
} catch (const Error& e) {
  windows::throw_named(plan->name, e);
}

}  // namespace

WindowTransfer Window::start(std::span<const WindowField> fields, Stream stream) const {
  return begin(*this, plan_, fields, stream, false);
}
WindowTransfer Window::start(const ConstTensorView& in, const TensorView& out, Stream stream) const {
  const WindowField field{in, out};
  return start(std::span(&field, 1), stream);
}
WindowTransfer Window::start_adjoint(std::span<const WindowField> fields) const {
  for (const WindowField& f : fields)
    if (!(f.in.device == Device{}))
      throw Error(ErrorCode::unsupported,
                  fmt::format("window: the adjoint adds in the memory of the host; in is on {}",
                              to_string(f.in.device)));
  return begin(*this, plan_, fields, {}, true);
}
WindowTransfer Window::start_adjoint(const ConstTensorView& in, const TensorView& out) const {
  const WindowField field{in, out};
  return start_adjoint(std::span(&field, 1));
}

namespace {

class FetchedTensor final : public Transfer::Steps {
 public:
  FetchedTensor(Tensor in, Tensor out, WindowTransfer transfer)
      : in_(std::move(in)), out_(std::move(out)), transfer_(std::move(transfer)) {}
  bool done() override { return transfer_.done(); }
  Tensor finish() override {
    transfer_.finish();
    return out_;
  }

 private:
  Tensor in_, out_;
  WindowTransfer transfer_;  // last: it ends before the memory goes
};

const LayoutRef& layout_of(const Tensor& x) {
  if (x.layout() == nullptr)
    throw Error(ErrorCode::layout,
                fmt::format("fetch_window: the tensor {} is plain; state its layout first (as_layout)",
                            to_string(x.shape())));
  return x.layout();
}

}  // namespace

Transfer start_fetch_window(const Tensor& x, std::vector<WindowDim> dims) {
  const Window window(Partition(layout_of(x)), std::move(dims));
  Tensor out(x.layout()->mesh().context(), window.window_shape(x.shape()), x.dtype(), Memory::shared,
             x.stream());
  WindowTransfer transfer = window.start(x, out, x.stream());
  return Transfer(std::make_unique<FetchedTensor>(x, std::move(out), std::move(transfer)));
}

Tensor fetch_window(const Tensor& x, std::vector<WindowDim> dims) {
  return start_fetch_window(x, std::move(dims)).finish();
}

Tensor fetch_window_adjoint(const Tensor& dwindow, const LayoutRef& x, std::vector<WindowDim> dims) {
  const Window window(Partition(x), std::move(dims));
  Tensor out(x->mesh().context(), x->local_shape(), dwindow.dtype(), Memory::shared, dwindow.stream());
  window.start_adjoint(dwindow, out).finish();
  return out.with_layout(x);
}

}  // namespace weft
