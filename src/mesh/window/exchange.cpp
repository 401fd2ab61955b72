// Carries out the plan of a window: packs, sends, receives, unpacks.
#include <fmt/format.h>

#include <array>

#include "mesh/window/program.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

using Program = Window::Plan::Program;
using windows::called;

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::bad_argument, "window: " + text); }

// The bytes that a view spans.
std::pair<const std::byte*, const std::byte*> span_of(const ConstTensorView& v) {
  std::int64_t low = 0, high = 0;
  for (int d = 0; d < v.shape.rank(); ++d) (v.strides[d] < 0 ? low : high) += (v.shape[d] - 1) * v.strides[d];
  const std::int64_t element = size_bytes(v.dtype);
  return {v.data + low * element, v.data + (high + 1) * element};
}

bool touch(const ConstTensorView& a, const ConstTensorView& b) {
  if (a.count() == 0 || b.count() == 0) return false;
  const auto [a_low, a_high] = span_of(a);
  const auto [b_low, b_high] = span_of(b);
  return a_low < b_high && b_low < a_high;
}

struct Pair {
  std::byte* part;
  std::byte* window;
};

// Where a field lies; throws where it has no memory, or not of its own.
Pair pair_of(const Program& program, const WindowField& f, Device device, std::size_t index,
             std::size_t count) {
  for (const auto& [which, view] : {std::pair<const char*, ConstTensorView>("in", f.in),
                                    std::pair<const char*, ConstTensorView>("out", f.out)}) {
    if (view.data == nullptr && view.count() > 0)
      refuse(fmt::format("{} {} has no memory", called(which, index, count), to_string(view.shape)));
    if (!(view.device == device)) refuse(called(which, index, count) + " " + is_on(view.device, device));
  }
  auto* const read = const_cast<std::byte*>(f.in.data);
  const Pair p = program.adjoint ? Pair{f.out.data, read} : Pair{read, f.out.data};
  const Program::Place& place = program.places[index];
  if (touch(f.in, f.out) && !(place.there && p.part + place.part == p.window + place.window))
    refuse(fmt::format("{} and {} overlap; expected apart{}", called("in", index, count),
                       called("out", index, count), program.adjoint ? "" : ", or in at its place in out"));
  return p;
}

class Exchange final : public WindowTransfer::Steps {
 public:
  Exchange(std::shared_ptr<const Window::Plan> plan, std::shared_ptr<const Program> program,
           std::vector<Pair> pairs, Stream stream)
      : plan_(std::move(plan)),
        program_(std::move(program)),
        pairs_(std::move(pairs)),
        stream_(stream),
        runtime_(plan_->mesh.context().device(stream.device)) {
    post();
    if (!program_->adjoint) {
      copy_own();
      for (const Program::Fill& fill : program_->fills)
        fill.step.loops.fill(runtime_, stream_, fill.element.data(), pair(fill.step).window + fill.step.to);
    }
  }
  ~Exchange() override {
    if (!buffer_) return;
    const std::lock_guard lock(plan_->mutex);
    constexpr std::size_t kMostSpare = 4;
    if (plan_->spare.size() < kMostSpare) plan_->spare.push_back(std::move(buffer_));
  }

  bool done() override { return !work_.valid() || work_.done(); }
  void finish() override {
    if (work_.valid()) work_.wait();
    if (program_->adjoint) return add_all();
    for (const Program::Message& m : program_->received)
      if (m.packed)
        for (const Program::Step& step : m.steps)
          step.loops.copy(runtime_, stream_, buffer_.data() + m.at + step.from, pair(step).window + step.to);
  }

 private:
  // Where the adjoint adds: in the part, or beside it.
  std::byte* sums_of(const Program::Step& step) const {
    const std::int64_t at = program_->sums[step.field];
    return at < 0 ? pair(step).part : buffer_.data() + at;
  }
  const Pair& pair(const Program::Step& step) const { return pairs_[step.field]; }
  std::byte* sent_from(const Pair& p) const { return program_->adjoint ? p.window : p.part; }
  std::byte* received_in(const Pair& p) const { return program_->adjoint ? p.part : p.window; }

  void post() {
    if (program_->room > 0) buffer_ = room_of(program_->room);
    for (const Program::Message& m : program_->sent)
      if (m.packed)
        for (const Program::Step& step : m.steps)
          step.loops.copy(runtime_, stream_, sent_from(pair(step)) + step.from,
                          buffer_.data() + m.at + step.to);
    if (!plan_->axes || plan_->axes.size() == 1) return;
    ProcessGroup& group =
        plan_->axes
            .group();  // made by all of them at their first window, also by those that exchange nothing
    CallOptions options;
    options.tag = Window::kTag;
    options.stream = stream_;
    std::vector<Call> calls;
    calls.reserve(program_->sent.size() + program_->received.size());
    const auto memory_of = [&](const Program::Message& m, bool sends) -> std::byte* {
      if (m.packed) return buffer_.data() + m.at;
      return (sends ? sent_from(pairs_[m.field]) : received_in(pairs_[m.field])) + m.offset;
    };
    for (const Program::Message& m : program_->received)
      calls.push_back(call::recv(
          {memory_of(m, false), m.bytes / size_bytes(m.dtype), m.dtype, stream_.device}, m.rank, options));
    for (const Program::Message& m : program_->sent)
      calls.push_back(call::send({memory_of(m, true), m.bytes / size_bytes(m.dtype), m.dtype, stream_.device},
                                 m.rank, options));
    if (!calls.empty()) work_ = group.coalesced(calls);
  }

  Tensor room_of(std::int64_t bytes) const {
    {
      const std::lock_guard lock(plan_->mutex);
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

  void copy_own() const {
    for (const Program::Step& step : program_->own) {
      const std::byte* const from = pair(step).part + step.from;
      std::byte* const to = pair(step).window + step.to;
      if (from != to || !step.loops.same_steps()) step.loops.copy(runtime_, stream_, from, to);
    }
  }

  // In the order of the ranks whose windows they are, this one among them.
  void add_all() const {
    const std::array<std::byte, 16> zero{};
    for (const Program::Step& step : program_->cleared)
      step.loops.fill(runtime_, stream_, zero.data(), sums_of(step));
    const auto add = [&](const Program::Step& step, const std::byte* from) {
      step.loops.add_to(program_->forms[step.field].dtype, from + step.from, sums_of(step) + step.to);
    };
    const auto own = [&] {
      for (const Program::Step& step : program_->own) add(step, pair(step).window);
    };
    bool added = false;
    for (const Program::Message& m : program_->received) {
      if (!added && m.rank > plan_->me) {
        own();
        added = true;
      }
      for (const Program::Step& step : m.steps) add(step, buffer_.data() + m.at);
    }
    if (!added) own();
    for (const Program::Step& step : program_->rounded)
      step.loops.round_to(program_->forms[step.field].dtype, sums_of(step), pair(step).part);
  }

  const std::shared_ptr<const Window::Plan> plan_;
  const std::shared_ptr<const Program> program_;
  const std::vector<Pair> pairs_;
  const Stream stream_;
  DeviceRuntime& runtime_;
  Tensor buffer_;
  Work work_;  // last: it ends before the memory goes
};

WindowTransfer begin(const Window& window, const std::shared_ptr<Window::Plan>& plan,
                     std::span<const WindowField> fields, Stream stream, bool adjoint) {
  if (fields.empty()) return {};
  if (stream == Stream{}) stream = fields[0].in.device;
  std::shared_ptr<const Program> program = windows::program_for(window, *plan, fields, adjoint);
  std::vector<Pair> pairs;
  pairs.reserve(fields.size());
  for (std::size_t i = 0; i < fields.size(); ++i)
    pairs.push_back(pair_of(*program, fields[i], stream.device, i, fields.size()));
  return WindowTransfer(std::make_unique<Exchange>(plan, std::move(program), std::move(pairs), stream));
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
