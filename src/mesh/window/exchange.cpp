// Carries out the plan of a window: packs, sends, receives, unpacks.
#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "mesh/window/plan.hpp"
#include "mesh/window/strided.hpp"
#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/host/device_runtime.hpp"

namespace weft {
namespace {

using windows::Loops;
using windows::Segment;
using Box = std::vector<Segment>;  // one of each of the plan's dims

[[noreturn]] void refuse(const std::string& text) { throw Error(ErrorCode::bad_argument, "window: " + text); }

// One side of a copy of a box: where it begins, and its steps in bytes in each dimension of the tensor.
struct Side {
  std::int64_t offset = 0;
  std::array<std::int64_t, Dims::kMaxDims> steps{};
};

// How the boxes of a plan lie in tensors of some shape: the plan's number of each dimension, or -1 where no window is wanted.
class Geometry {
 public:
  explicit Geometry(const Window::Plan& plan) : rank_(plan.global.rank()) {
    of_.fill(-1);
    for (std::size_t d = 0; d < plan.dims.size(); ++d)
      of_[static_cast<std::size_t>(plan.dims[d].dim)] = static_cast<int>(d);
  }

  Shape counts(const Box& box, const Shape& shape) const {
    Shape counts = shape;
    for (int d = 0; d < rank_; ++d)
      if (of(d) >= 0) counts[d] = segment(box, d).count;
    return counts;
  }
  Side of_part(const Box& box, const Strides& strides, std::int64_t element) const {
    Side side;
    for (int d = 0; d < rank_; ++d) {
      const std::int64_t step = strides[d] * element;
      side.steps[static_cast<std::size_t>(d)] = of(d) < 0 ? step : segment(box, d).step * step;
      if (of(d) >= 0) side.offset += segment(box, d).in * step;
    }
    return side;
  }
  Side of_window(const Box& box, const Strides& strides, std::int64_t element) const {
    Side side;
    for (int d = 0; d < rank_; ++d) {
      const std::int64_t step = strides[d] * element;
      side.steps[static_cast<std::size_t>(d)] = step;
      if (of(d) >= 0) side.offset += segment(box, d).out * step;
    }
    return side;
  }
  /// One after the other.
  static Side of_message(const Shape& counts, std::int64_t element) {
    Side side;
    const Strides strides = row_major(counts);
    for (int d = 0; d < counts.rank(); ++d) side.steps[static_cast<std::size_t>(d)] = strides[d] * element;
    return side;
  }
  static Loops loops(const Shape& counts, const Side& in, const Side& out, std::int64_t element) {
    Loops loops(static_cast<std::size_t>(element));
    for (int d = 0; d < counts.rank(); ++d)
      loops.add(counts[d], in.steps[static_cast<std::size_t>(d)], out.steps[static_cast<std::size_t>(d)]);
    return loops;
  }

 private:
  int of(int dim) const { return of_[static_cast<std::size_t>(dim)]; }
  const Segment& segment(const Box& box, int dim) const { return box[static_cast<std::size_t>(of(dim))]; }
  int rank_;
  std::array<int, Dims::kMaxDims> of_{};
};

bool extents_fault(const Shape& shape) {
  return std::any_of(shape.begin(), shape.end(), [](std::int64_t n) { return n < 0; });
}

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

// A call's fields, by what they are: a part of the tensor, and a window on it.
struct Pair {
  std::byte* part;
  std::byte* window;
  Shape shape;  // of the part
  Strides part_strides, window_strides;
  DType dtype;
  std::int64_t element;
};

// Whether the window holds the part where it is, so that it need not be copied.
bool in_place(const Window::Plan& plan, const Geometry& geometry, const Pair& p) {
  bool found = false;
  windows::each_box(plan.self, [&](const Box& box) {
    for (std::size_t d = 0; d < box.size(); ++d)
      if (box[d].in != 0 || box[d].count != plan.dims[d].part_size || box[d].step != 1 || box[d].turned)
        return;
    const Side part = geometry.of_part(box, p.part_strides, p.element),
               window = geometry.of_window(box, p.window_strides, p.element);
    const Shape counts = geometry.counts(box, p.shape);
    found |= p.part + part.offset == p.window + window.offset &&
             Geometry::loops(counts, part, window, p.element).same_steps();
  });
  return found;
}

void check_view(const std::string& name, const ConstTensorView& v) {
  if (extents_fault(v.shape))
    refuse(fmt::format("{} is {}; expected no negative extent", name, to_string(v.shape)));
  if (v.strides.rank() != v.shape.rank())
    refuse(fmt::format("{} has {} strides for {} dimensions", name, v.strides.rank(), v.shape.rank()));
  if (v.count() > 0 && v.data == nullptr)
    refuse(fmt::format("{} {} has no memory", name, to_string(v.shape)));
}

// `adjoint`: `in` is a window, `out` a part.
Pair checked(const Window& window, const Window::Plan& plan, const Geometry& geometry, const WindowField& f,
             bool adjoint, Device device, std::size_t index, std::size_t count) {
  const auto called = [&](const char* which) {
    return count == 1 ? std::string(which) : fmt::format("{} of field {}", which, index);
  };
  const std::string in = called("in"), out = called("out");
  check_view(in, f.in);
  check_view(out, f.out);
  const Shape& part = adjoint ? f.out.shape : f.in.shape;
  if (part.rank() != plan.global.rank())
    refuse(fmt::format("{} is {}; expected {} dimensions, as the whole {} has", adjoint ? out : in,
                       to_string(part), plan.global.rank(), to_string(plan.global)));
  Shape expected = part;
  for (const Window::Plan::Dim& d : plan.dims) expected[d.dim] = d.part_size;
  if (!(part == expected))
    refuse(fmt::format("{} is {}; expected {}, this rank's part", adjoint ? out : in, to_string(part),
                       to_string(expected)));
  const Shape of_window = window.window_shape(part);
  if (const Shape& got = adjoint ? f.in.shape : f.out.shape; !(got == of_window))
    refuse(fmt::format("{} is {}; expected {}, this rank's window on {}", adjoint ? in : out, to_string(got),
                       to_string(of_window), to_string(part)));
  if (f.in.dtype != f.out.dtype)
    refuse(fmt::format("{} is {}; expected {} as {}", out, name(f.out.dtype), name(f.in.dtype), in));
  for (const auto& [which, on] : {std::pair(&in, f.in.device), std::pair(&out, f.out.device)})
    if (!(on == device)) refuse(*which + " " + is_on(on, device));
  if (adjoint && !windows::can_add(f.in.dtype))
    refuse(fmt::format("{} is {}; expected a dtype that is added: an integer, or f64, f32, bf16, f16", in,
                       name(f.in.dtype)));
  auto* const read = const_cast<std::byte*>(f.in.data);
  Pair p =
      adjoint ? Pair{f.out.data, read, part, f.out.strides, f.in.strides, f.in.dtype, size_bytes(f.in.dtype)}
              : Pair{read, f.out.data, part, f.in.strides, f.out.strides, f.in.dtype, size_bytes(f.in.dtype)};
  if (touch(f.in, f.out) && (adjoint || !in_place(plan, geometry, p)))
    refuse(fmt::format("{} and {} overlap; expected apart{}", in, out,
                       adjoint ? "" : ", or in at its place in out"));
  return p;
}

// The elements of a box where their window has no element of any tensor, but a number: the first dimension that is filled says which.
template <class See>
void each_filled_box(const Window::Plan& plan, const See& see) {
  for (std::size_t filled = 0; filled < plan.dims.size(); ++filled)
    for (const windows::Run& fill : plan.dims[filled].runs) {
      if (!fill.filled) continue;
      Box box(plan.dims.size());
      const auto descend = [&](const auto& again, std::size_t d) -> void {
        if (d == plan.dims.size()) return see(static_cast<const Box&>(box), fill.value);
        if (d == filled) {
          box[d] = {0, fill.out, fill.count};
          return again(again, d + 1);
        }
        if (d > filled) {
          box[d] = {0, 0, plan.dims[d].window_size};
          return again(again, d + 1);
        }
        for (const windows::Run& run : plan.dims[d].runs)
          if (!run.filled) {
            box[d] = {0, run.out, run.count};
            again(again, d + 1);
          }
      };
      descend(descend, 0);
    }
}

class Exchange final : public WindowTransfer::Steps {
 public:
  Exchange(std::shared_ptr<const Window::Plan> plan, std::vector<Pair> pairs, Stream stream, bool adjoint)
      : plan_(std::move(plan)),
        geometry_(*plan_),
        pairs_(std::move(pairs)),
        stream_(stream),
        runtime_(plan_->mesh.context().device(stream.device)),
        adjoint_(adjoint) {
    post();
    if (!adjoint_) {
      copy_own();
      fill();
    }
  }
  ~Exchange() override {
    if (buffer_) {
      const std::lock_guard lock(plan_->mutex);
      constexpr std::size_t kMostSpare = 4;
      if (plan_->spare.size() < kMostSpare) plan_->spare.push_back(std::move(buffer_));
    }
  }

  bool done() override { return !work_.valid() || work_.done(); }
  void finish() override {
    if (work_.valid()) work_.wait();
    if (adjoint_)
      add_all();
    else
      for (const Message& m : received_)
        if (m.packed) unpack(m);
  }

 private:
  struct Message {
    const Window::Plan::Overlap* overlap;
    std::int64_t bytes;
    std::int64_t at;    // in the buffer, where it is packed
    std::byte* direct;  // where it is not
    bool packed;
  };

  // The window side of a box sends in the adjoint, the part side otherwise.
  Side sending(const Box& box, const Pair& p) const {
    return adjoint_ ? geometry_.of_window(box, p.window_strides, p.element)
                    : geometry_.of_part(box, p.part_strides, p.element);
  }
  Side receiving(const Box& box, const Pair& p) const {
    return adjoint_ ? geometry_.of_part(box, p.part_strides, p.element)
                    : geometry_.of_window(box, p.window_strides, p.element);
  }
  std::byte* sent_from(const Pair& p) const { return adjoint_ ? p.window : p.part; }
  std::byte* received_in(const Pair& p) const { return adjoint_ ? p.part : p.window; }

  // Its bytes, and whether it is one piece of memory already.
  Message message(const Window::Plan::Overlap& overlap, bool sends) const {
    Message m{&overlap, 0, 0, nullptr, true};
    int pieces = 0;
    for (const Pair& p : pairs_)
      windows::each_box(overlap, [&](const Box& box) {
        const Shape counts = geometry_.counts(box, p.shape);
        if (counts.count() == 0) return;
        m.bytes += counts.count() * p.element;
        if (++pieces > 1 || (adjoint_ && !sends)) return;
        const Side side = sends ? sending(box, p) : receiving(box, p);
        if (Geometry::loops(counts, side, Geometry::of_message(counts, p.element), p.element).one_piece() > 0)
          m.direct = (sends ? sent_from(p) : received_in(p)) + side.offset;
      });
    if (pieces == 1 && m.direct != nullptr) m.packed = false;
    return m;
  }

  void post() {
    const auto& to = adjoint_ ? plan_->from : plan_->to;
    const auto& from = adjoint_ ? plan_->to : plan_->from;
    std::int64_t room = 0;
    constexpr std::int64_t kLine = 64;
    const auto list = [&](const auto& overlaps, bool sends, std::vector<Message>& messages) {
      for (const auto& overlap : overlaps) {
        Message m = message(overlap, sends);
        if (m.bytes == 0) continue;
        m.at = room;
        if (m.packed) room += (m.bytes + kLine - 1) / kLine * kLine;
        messages.push_back(m);
      }
    };
    std::vector<Message> sent;
    list(to, true, sent);
    list(from, false, received_);
    if (room > 0) buffer_ = room_of(room);
    for (const Message& m : sent)
      if (m.packed) pack(m);
    if (!plan_->axes || plan_->axes.size() == 1) return;
    ProcessGroup& group =
        plan_->axes
            .group();  // made by all of them at their first window, also by those that exchange nothing
    CallOptions options;
    options.tag = Window::kTag;
    options.stream = stream_;
    std::vector<Call> calls;
    calls.reserve(sent.size() + received_.size());
    for (const Message& m : received_)
      calls.push_back(
          call::recv({memory_of(m), m.bytes, DType::u8, stream_.device}, m.overlap->rank, options));
    for (const Message& m : sent)
      calls.push_back(
          call::send({memory_of(m), m.bytes, DType::u8, stream_.device}, m.overlap->rank, options));
    if (!calls.empty()) work_ = group.coalesced(calls);
  }

  std::byte* memory_of(const Message& m) const { return m.packed ? buffer_.data() + m.at : m.direct; }

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

  // Calls see(pair, box, its counts, where it is in the message).
  template <class See>
  void each_packed(const Message& m, const See& see) const {
    std::byte* at = memory_of(m);
    for (const Pair& p : pairs_)
      windows::each_box(*m.overlap, [&](const Box& box) {
        const Shape counts = geometry_.counts(box, p.shape);
        if (counts.count() == 0) return;
        see(p, box, counts, at);
        at += counts.count() * p.element;
      });
  }
  void pack(const Message& m) const {
    each_packed(m, [&](const Pair& p, const Box& box, const Shape& counts, std::byte* at) {
      const Side from = sending(box, p);
      Geometry::loops(counts, from, Geometry::of_message(counts, p.element), p.element)
          .copy(runtime_, stream_, sent_from(p) + from.offset, at);
    });
  }
  void unpack(const Message& m) const {
    each_packed(m, [&](const Pair& p, const Box& box, const Shape& counts, const std::byte* at) {
      const Side to = receiving(box, p);
      Geometry::loops(counts, Geometry::of_message(counts, p.element), to, p.element)
          .copy(runtime_, stream_, at, received_in(p) + to.offset);
    });
  }

  void copy_own() const {
    for (const Pair& p : pairs_)
      windows::each_box(plan_->self, [&](const Box& box) {
        const Side from = sending(box, p), to = receiving(box, p);
        const Loops loops = Geometry::loops(geometry_.counts(box, p.shape), from, to, p.element);
        std::byte* const out = p.window + to.offset;
        if (p.part + from.offset != out || !loops.same_steps())
          loops.copy(runtime_, stream_, p.part + from.offset, out);
      });
  }

  void fill() const {
    each_filled_box(*plan_, [&](const Box& box, double value) {
      for (const Pair& p : pairs_) {
        const Side to = receiving(box, p);
        const std::array<std::byte, 16> element = windows::element_of(value, p.dtype);
        Geometry::loops(geometry_.counts(box, p.shape), to, to, p.element)
            .fill(runtime_, stream_, element.data(), p.window + to.offset);
      }
    });
  }

  // In the order of the ranks whose windows they are, this one among them.
  void add_all() const {
    for (const Pair& p : pairs_) clear(p);
    const auto own = [&] {
      for (const Pair& p : pairs_)
        windows::each_box(plan_->self, [&](const Box& box) {
          const Side from = sending(box, p), to = receiving(box, p);
          Geometry::loops(geometry_.counts(box, p.shape), from, to, p.element)
              .add_to(p.dtype, p.window + from.offset, p.part + to.offset);
        });
    };
    bool added = false;
    for (const Message& m : received_) {
      if (!added && m.overlap->rank > plan_->me) {
        own();
        added = true;
      }
      each_packed(m, [&](const Pair& p, const Box& box, const Shape& counts, const std::byte* at) {
        const Side to = receiving(box, p);
        Geometry::loops(counts, Geometry::of_message(counts, p.element), to, p.element)
            .add_to(p.dtype, at, p.part + to.offset);
      });
    }
    if (!added) own();
  }
  void clear(const Pair& p) const {
    Side all;
    for (int d = 0; d < p.shape.rank(); ++d)
      all.steps[static_cast<std::size_t>(d)] = p.part_strides[d] * p.element;
    const std::array<std::byte, 16> zero{};
    Geometry::loops(p.shape, all, all, p.element).fill(runtime_, stream_, zero.data(), p.part);
  }

  const std::shared_ptr<const Window::Plan> plan_;
  const Geometry geometry_;
  const std::vector<Pair> pairs_;
  const Stream stream_;
  DeviceRuntime& runtime_;
  const bool adjoint_;
  std::vector<Message> received_;
  Tensor buffer_;
  Work work_;  // last: it ends before the memory goes
};

WindowTransfer begin(const Window& window, const std::shared_ptr<Window::Plan>& plan,
                     std::span<const WindowField> fields, Stream stream, bool adjoint) {
  if (fields.empty()) return {};
  if (stream == Stream{}) stream = fields[0].in.device;
  const Geometry geometry(*plan);
  std::vector<Pair> pairs;
  for (std::size_t i = 0; i < fields.size(); ++i)
    pairs.push_back(checked(window, *plan, geometry, fields[i], adjoint, stream.device, i, fields.size()));
  return WindowTransfer(std::make_unique<Exchange>(plan, std::move(pairs), stream, adjoint));
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
