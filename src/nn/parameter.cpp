#include "weft/nn/parameter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <utility>

#include "base/floating.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

namespace {

// One counter for all Computes of this process. A Frame of one Compute may use weights of another, and packed
// weights in its kernels may exist longer than both. All threads share it. It is only a source of numbers.
std::uint64_t next_number() noexcept {
  static std::atomic<std::uint64_t> last{0};
  return last.fetch_add(1, std::memory_order_relaxed) + 1;
}

}  // namespace

Parameter::Parameter(const Shape& global, Init init)
    : global_(global), init_(init), decays_(global.rank() >= 2) {}

Shape Parameter::local_shape() const { return layout_ ? layout_->local_shape() : global_; }

void Parameter::set_layout(LayoutRef layout) {
  if (materialised())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format(
            "parameter \"{}\": set_layout after materialise; parallelise the model before it has memory",
            path_));
  if (layout_fixed_by_ != nullptr)
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": set_layout after {}; expected before",
                                                     path_, layout_fixed_by_));
  if (layout && !(layout->global == global_))
    throw Error(ErrorCode::layout, fmt::format("parameter \"{}\" is {}; its layout is for {}", path_,
                                               to_string(global_), to_string(layout->global)));
  if (layout && layout->partial())
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": its value cannot be {}", path_, to_string(*layout)));
  layout_ = layout;
}

void Parameter::set_trainable(bool trainable) {
  if (trainable != trainable_ && (has_gradient_ || gradient_owner_ != nullptr))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": set_trainable while {}; expected before", path_,
                            has_gradient_ ? "it has a gradient" : "a reducer has it"));
  trainable_ = trainable;
}

void Parameter::set_dtype(DType dtype) {
  if (!is_weight_dtype(dtype))
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": set_dtype got {}; expected {}", path_,
                                                     name(dtype), kWeightDTypeNames));
  if (materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": set_dtype after materialise", path_));
  dtype_ = dtype;
}

void Parameter::materialise(Compute& compute, Memory memory) {
  if (materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": materialised twice", path_));
  compute_ = &compute;
  number_ = next_number();
  master_ = compute.make(local_shape(), DType::f32, memory).with_layout(layout_);
}

Compute& Parameter::compute() const {
  master();  // made with it
  return *compute_;
}

const Tensor& Parameter::master() const {
  if (!materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": used before materialise", path_));
  return master_;
}

const Tensor& Parameter::write_master() {
  const Tensor& written = master();  // there must be one
  rounded_is_old_ = true;
  has_values_ = true;
  ++master_version_;
  return written;
}

void Parameter::set_master(Tensor master) {
  if (!materialised())
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": set_master before materialise", path_));
  const LayoutRef layout = master.layout() ? master.layout() : layout_;
  expect_fits("set_master", master, DType::f32, layout);
  if (layout != layout_ && has_gradient_)
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": set_master with another layout while it has a gradient; "
                            "zero_gradient first",
                            path_));
  if (!placed_ && !(master.shape() == master_.shape())) expect_unclaimed("set_master of another shape");
  layout_ = layout;
  has_values_ |= master.data() != master_.data();
  master_ = master.with_layout(layout);
  rounded_ = {};
  rounded_is_old_ = true;
  ++master_version_;
}

const Tensor& Parameter::weight() const {
  if (placed_) return placed_;
  if (dtype_ == DType::f32) return master();
  if (rounded_is_old_) {
    const Tensor& from = master();
    if (!rounded_) rounded_ = compute_->make(from.shape(), dtype_).with_layout(layout_);
    kernels::round_to_bf16(kernels_of(*compute_), from.data_ptr<float>(), rounded_.data_ptr<bf16>(),
                           from.count());
    rounded_is_old_ = false;
  }
  return rounded_;
}

std::uint64_t Parameter::weight_version() const {
  weight();  // rounds the master of this version
  return placed_ || dtype_ == DType::f32 ? 0 : master_version_ + 1;
}

void Parameter::place_weight(Tensor weight, const void* owner) {
  master();  // there must be one
  // Codes of float8 are for the layers that know their scales. The kernels of other layers refuse the dtype.
  const DType dtype = weight.dtype() == DType::f8e4m3 ? DType::f8e4m3 : dtype_;
  expect_fits("place_weight", weight, dtype, weight.layout());
  const bool owned = owner != nullptr && owner == gradient_owner_;
  if (!owned && has_gradient_ && !(weight.shape() == gradient_.shape()))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parameter \"{}\": place_weight got {} while it has a gradient of {}; zero_gradient "
                    "first",
                    path_, to_string(weight.shape()), to_string(gradient_.shape())));
  const Shape& before = placed_ ? placed_.shape() : master_.shape();
  if (!(weight.shape() == before)) expect_unclaimed("place_weight of another shape", owner);
  placed_ = std::move(weight);
}

void Parameter::drop_weight() noexcept { placed_ = {}; }

void Parameter::expect_fits(std::string_view call, const Tensor& t, DType dtype,
                            const LayoutRef& layout) const {
  const Shape expected = layout ? layout->local_shape() : global_;
  if (t.dtype() != dtype || !(t.shape() == expected))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": {} got {} {}; expected {} {}", path_, call, name(t.dtype()),
                            to_string(t.shape()), name(dtype), to_string(expected)));
  expect_memory(call, t);
  expect_device(call, t);
  if (layout && (layout->partial() || !(layout->global == global_)))
    throw Error(ErrorCode::layout, fmt::format("parameter \"{}\": {} got {}; expected whole values of {}",
                                               path_, call, to_string(*layout), to_string(global_)));
}

const Tensor& Parameter::gradient() const {
  if (!has_gradient_)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parameter \"{}\": has no gradient; no backward pass has used it since zero_gradient",
                    path_));
  return gradient_;
}

void Parameter::set_gradient_layout(LayoutRef layout) {
  expect_gradient_layout("set_gradient_layout", gradient().shape(), layout);
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::set_gradient(Tensor gradient) {
  this->gradient();  // there must be one
  expect_unclaimed("set_gradient");
  put_gradient("set_gradient", std::move(gradient));
}

Tensor Parameter::take_gradient(const void* owner) {
  gradient();  // there must be one
  expect_unclaimed("take_gradient", owner);
  zero_gradient();
  return std::exchange(gradient_, {});
}

void Parameter::give_gradient(Tensor gradient, const void* owner) {
  expect_unclaimed("give_gradient", owner);
  put_gradient("give_gradient", std::move(gradient));
  has_gradient_ = true;
}

void Parameter::put_gradient(std::string_view call, Tensor gradient) {
  const LayoutRef& layout = gradient.layout();
  const Shape expected = layout ? layout->local_shape() : master().shape();
  if (gradient.dtype() != DType::f32 || !(gradient.shape() == expected) ||
      (layout && !(layout->global == global_)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": {} got {} {}{}; expected f32 {} of {}", path_, call,
                            name(gradient.dtype()), to_string(gradient.shape()),
                            layout ? fmt::format(", stated to be {}", to_string(*layout)) : "",
                            to_string(expected), to_string(global_)));
  expect_memory(call, gradient);
  expect_device(call, gradient);
  gradient_layout_ = layout;
  gradient_ = std::move(gradient);
}

// A reducer reduces the memory that it gave to the gradient. The reducer would not reduce a gradient in other
// memory.
void Parameter::expect_unclaimed(std::string_view call, const void* owner) const {
  if (gradient_owner_ != nullptr && gradient_owner_ != owner)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": {} while its gradient belongs to a reducer", path_, call));
}

void Parameter::claim_gradient(const void* owner) {
  if (owner == nullptr)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parameter \"{}\": claim_gradient: owner is null; expected the owner of the claim",
                    path_));
  if (gradient_owner_ != nullptr && gradient_owner_ != owner)
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": its gradient belongs to another "
                                                     "reducer already; one reducer reduces over several axes",
                                                     path_));
  gradient_owner_ = owner;
}

void Parameter::release_gradient(const void* owner) noexcept {
  if (gradient_owner_ == owner) gradient_owner_ = nullptr;
}

void Parameter::state_gradient(LayoutRef layout) {
  expect_gradient_layout("state_gradient", weight().shape(), layout);
  make_gradient();
  has_gradient_ = true;
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::place_gradient(Tensor memory) {
  const Shape& expected = weight().shape();
  if (memory.dtype() != DType::f32 || !(memory.shape() == expected))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": place_gradient got {} {}; expected f32 {}", path_,
                            name(memory.dtype()), to_string(memory.shape()), to_string(expected)));
  expect_memory("place_gradient", memory);
  expect_device("place_gradient", memory);
  if (has_gradient_ && memory.data() != gradient_.data())
    copy(compute_->context(), gradient_, memory, compute_->stream());
  gradient_ = memory.with_layout(gradient_layout_);
}

void Parameter::zero_gradient() noexcept {
  has_gradient_ = false;
  gradient_layout_ = nullptr;
}

// Tensors passed to a parameter must be on the master's device and stream, as layers and kernels expect.
void Parameter::expect_device(std::string_view call, const Tensor& t) const {
  if (t.stream() != master().stream())
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": the tensor given to {} {}", path_, call,
                            elsewhere_text(t, master().stream(), "the master")));
}

// An empty handle is a scalar without memory. A handle that was moved from keeps its shape.
void Parameter::expect_memory(std::string_view call, const Tensor& t) const {
  if (!t && t.count() > 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parameter \"{}\": the tensor given to {} has no memory: it is empty or was moved from",
                    path_, call));
}

// Throws unless a gradient of `shape` may have this layout.
void Parameter::expect_gradient_layout(std::string_view call, const Shape& shape,
                                       const LayoutRef& layout) const {
  if (layout == nullptr || (layout->global == global_ && layout->local_shape() == shape)) return;
  throw Error(
      ErrorCode::layout,
      fmt::format("parameter \"{}\": {} got {}, of which this rank holds {}; expected one for {}, of which "
                  "it holds {}",
                  path_, call, to_string(*layout), to_string(layout->local_shape()), to_string(global_),
                  to_string(shape)));
}

void Parameter::make_gradient() {
  const Shape& shape = weight().shape();
  if (!gradient_ || !(gradient_.shape() == shape)) gradient_ = compute_->make(shape);
}

void Parameter::accumulate(const Tensor& dw) {
  add_gradient(dw.layout(), [&](const Tensor& into, bool add) {
    if (!(dw.shape() == into.shape()))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("parameter \"{}\": a gradient of shape {}; expected {}", path_,
                              to_string(dw.shape()), to_string(into.shape())));
    if (dw.dtype() != DType::f32)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("parameter \"{}\": a gradient of {}; expected f32", path_, name(dw.dtype())));
    expect_memory("accumulate", dw);
    expect_device("accumulate", dw);
    float* const out = into.data_ptr<float>();
    if (add)
      kernels::add(kernels_of(*compute_), out, dw.data_ptr<float>(), out, dw.count());
    else
      copy(compute_->context(), dw, into, compute_->stream());
  });
}

void Parameter::accumulate(LayoutRef layout, const std::function<void(const Tensor&, bool)>& write) {
  if (write == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": accumulate: write is empty; expected a function", path_));
  // A plain gradient is one of the whole weight. If its work was left over, the weight may be another by now.
  if (trainable_ && layout == nullptr && !(weight().shape() == global_))
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": a plain gradient, but the weight is {} of {} here; expected a "
                            "gradient with a layout, and the weight of the backward pass until its "
                            "LeftOver has run",
                            path_, to_string(weight().shape()), to_string(global_)));
  add_gradient(layout, write);
}

void Parameter::add_gradient(const LayoutRef& layout, const std::function<void(const Tensor&, bool)>& write) {
  if (!trainable_) return;
  if (layout != nullptr)
    layouts::expect_same(TensorName::of("parameter ", path_).and_then(": a gradient, summed,"),
                         layouts::gradient_of_output(layout), weight().layout(), "as the weight");
  if (has_gradient_)
    layouts::expect_same(
        TensorName::of("parameter ", path_).and_then(": a gradient"), layout, gradient_layout_,
        "as its uses before; after a gradient was reduced, zero it before the next backward pass");
  make_gradient();
  write(gradient_, has_gradient_);
  has_gradient_ = true;
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::announce_final() {
  if (!has_gradient_) return;
  int done = -1;
  const auto next = [&] {
    return std::ranges::find_if(listeners_, [&](const auto& entry) { return entry.first > done; });
  };
  for (auto at = next(); at != listeners_.end(); at = next()) {  // one may add others, or take any away
    done = at->first;
    const Listener listener = at->second;
    listener(*this);
  }
}

int Parameter::listen(Listener listener) {
  if (listener == nullptr)
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": listen: listener is empty; expected a function", path_));
  listeners_.emplace_back(next_listener_, std::move(listener));
  return next_listener_++;
}

void Parameter::stop_listening(int id) {
  std::erase_if(listeners_, [id](const auto& entry) { return entry.first == id; });
}

}  // namespace weft
