// Carries out the plan of a window: checks the memory of fields, and begins the exchange of the group.
#include "mesh/window/exchange.hpp"

#include <fmt/format.h>

#include "group/group_state.hpp"
#include "group/persistent/prepared_exchange.hpp"
#include "host/strided/overlap.hpp"
#include "mesh/window/agree.hpp"
#include "mesh/window/flight.hpp"
#include "mesh/window/in_flight.hpp"
#include "mesh/window_errors.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"

namespace weft {
namespace windows {

Judged::Judged(std::uint64_t id, std::span<const WindowField> fields, Device device, std::vector<Pair> pairs,
               Way way)
    : id_(id), pairs_(std::move(pairs)), device_(device) {
  for (const Pair& p : pairs_)
    memory_.push_back(way == Way::fetch ? ExchangeField{p.part, p.window} : ExchangeField{p.window, p.part});
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
  plan_->in_flight.push_back(this);
}

void Exchange::clear() const {
  const std::array<std::byte, 16> zero{};
  for (const Program::Step& step : program_->cleared)
    step.loops.fill(runtime_, stream_, zero.data(), pair(step).part);
}

void Exchange::move_own(std::span<const ExchangeField> memory) const {
  if (program_->sums)
    return program_->sums->add_all(memory.data(), program_->room.data(), [](std::size_t) {});
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

}  // namespace windows

namespace {

using Program = Window::Plan::Program;
using windows::called;
using windows::Exchange;
using windows::Flight;
using windows::is_alone;
using windows::Judged;
using windows::Known;
using windows::Pair;
using windows::refuse;
using windows::stream_for;
using windows::Way;

// Throws if elements that are written share memory with elements that are read, or with each other. `in` may
// lie at its place in `out`.
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
        refuse(plan, fmt::format("{} and {} overlap; expected disjoint memory{}", called("in", j, n),
                                 called("out", i, n),
                                 program.way != Way::fetch || i != j ? "" : ", or in at its place in out"));
      if (j < i && share_memory(fields[j].out, fields[i].out))
        refuse(plan, fmt::format("{} and {} overlap; expected disjoint memory", called("out", j, n),
                                 called("out", i, n)));
    }
  }
}

// The places of the fields. Throws if a field has no memory, or shares it.
const Judged& judge(const Window::Plan& plan, const Program& program, std::span<const WindowField> fields,
                    Device device) {
  const std::size_t n = fields.size();
  std::vector<Pair> pairs(n);
  for (std::size_t i = 0; i < n; ++i) {
    const WindowField& f = fields[i];
    auto* const read = const_cast<std::byte*>(f.in.data);
    pairs[i] = program.way == Way::fetch ? Pair{read, f.out.data} : Pair{f.out.data, read};
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
                                                                          std::move(pairs), program.way};
}

// Fields that were checked before. For eight fields this takes a tenth of the time of a small exchange, and
// checking them again takes a third.
Known as_before(const Window::Plan& plan, std::span<const WindowField> fields, Device device,
                Way way) noexcept {
  for (const auto& p : plan.programs) {
    if (p->way != way) continue;
    for (const Judged& judged : p->judged)
      if (judged.is_of(fields, device)) return {p.get(), &judged};
  }
  return {};
}

}  // namespace

Known windows::prepare(const Window& window, Window::Plan& plan, std::span<const WindowField> fields,
                       Stream stream, Way way) {
  const bool alone = is_alone(plan);
  // The group is made by all of them at their first window, also by those that exchange nothing.
  if (!alone && plan.group == nullptr) {
    plan.group = &plan.axes.group();
    plan.listed.emplace(plan.mesh.context(), fmt::format("a {}", plan.name));
  }
  Known known = as_before(plan, fields, stream.device, way);
  if (known.program == nullptr) {
    known.program = &windows::program_for(window, plan, fields, way);
    known.fields = &judge(plan, *known.program, fields, stream.device);
  }
  if (!plan.in_flight.empty()) windows::expect_free(plan, *known.program, *known.fields);
  if (!alone && !plan.agreed) {
    windows::agree(plan, known.program->forms, stream.device, way);
    plan.agreed = true;
  }
  if (stream.device == Device{} && plan.host == nullptr)
    plan.host = &plan.mesh.context().device(stream.device);
  return known;
}

bool windows::Flight::done() try {
  check();
  try {
    return !work_.valid() || work_.done();
  } catch (...) {
    why_ = std::current_exception();
    leave();
    throw;
  }
} catch (const Error& e) {
  throw_named(plan_.name, e);
}

void windows::Flight::finish() try {
  check();
  if (work_.valid()) work_.wait();
} catch (const Error& e) {
  throw_named(plan_.name, e);
}

void windows::Flight::set_work(Work work) {
  work_ = std::move(work);
  group_ = &detail::Access::state(*plan_.group);
}

void windows::Flight::drop() noexcept {
  if (!work_.valid() || plan_.mesh.context().forked()) return;
  try {
    if (!work_.done())
      group_->fail_dropped(
          {.code = ErrorCode::aborted,
           .text = fmt::format("{}: rank {} dropped an exchange in flight", plan_.name, plan_.me),
           .ranks = {plan_.me}});
  } catch (...) {  // the group has failed, and the other ranks know it
  }
  work_ = {};
}

void windows::Flight::check() const {
  plan_.mesh.context().check_fork(plan_.name);
  if (why_) std::rethrow_exception(why_);
}

namespace {

class OfOne final : public Flight {
 public:
  OfOne(std::shared_ptr<const Window::Plan> plan, const Program& program, const Judged& fields, Stream stream)
      : Flight(*plan), exchange_(std::move(plan), program, fields, stream) {
    exchange_.clear();
    ProcessGroup* const group = exchange_.plan().group;
    if (group != nullptr) {
      if (!program.exchange) program.exchange = detail::PreparedExchange::make_sound(*group, program.plan);
      set_work(program.exchange.start(fields.memory(), {.stream = stream}));
    } else {
      exchange_.move_own(fields.memory());
    }
    exchange_.fill();
  }
  OfOne(const OfOne&) = delete;
  OfOne& operator=(const OfOne&) = delete;
  ~OfOne() override { drop(); }

 private:
  void leave() const noexcept override { exchange_.leave(); }
  Exchange exchange_;
};

WindowTransfer begin(const Window& window, const std::shared_ptr<Window::Plan>& plan,
                     std::span<const WindowField> fields, Stream stream, Way way) try {
  const bool alone = is_alone(*plan);
  if (!alone) plan->mesh.context().check_fork(plan->name);
  if (fields.empty() && alone) return {};
  stream = stream_for(stream, fields);
  const Known known = prepare(window, *plan, fields, stream, way);
  return WindowTransfer(std::make_unique<OfOne>(plan, *known.program, *known.fields, stream));
} catch (const Error& e) {
  windows::throw_named(plan->name, e);
}

void expect_on_host(const Window::Plan& plan, std::span<const WindowField> fields, const char* what) {
  for (const WindowField& f : fields)
    if (!(f.in.device == Device{}))
      throw Error(ErrorCode::unsupported, fmt::format("{}: {} adds in the memory of the host; in is on {}",
                                                      plan.name, what, to_string(f.in.device)));
}

}  // namespace

WindowTransfer Window::start(std::span<const WindowField> fields, Stream stream) const {
  return begin(*this, plan_, fields, stream, Way::fetch);
}
WindowTransfer Window::start(const ConstTensorView& in, const TensorView& out, Stream stream) const {
  const WindowField field{in, out};
  return start(std::span(&field, 1), stream);
}
WindowTransfer Window::start_adjoint(std::span<const WindowField> fields) const {
  expect_on_host(*plan_, fields, "the adjoint");
  return begin(*this, plan_, fields, {}, Way::adjoint);
}
WindowTransfer Window::start_adjoint(const ConstTensorView& in, const TensorView& out) const {
  const WindowField field{in, out};
  return start_adjoint(std::span(&field, 1));
}
WindowTransfer Window::start_add(std::span<const WindowField> fields) const {
  expect_on_host(*plan_, fields, "add");
  return begin(*this, plan_, fields, {}, Way::add);
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
    throw Error(
        ErrorCode::layout,
        fmt::format(
            "fetch_window: the tensor {} is plain; give it a layout, which says what part of the whole it is",
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
