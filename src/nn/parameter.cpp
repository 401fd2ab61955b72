#include "weft/nn/parameter.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>

#include "weft/base/error.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

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
  if (layout && !(layout->global == global_))
    throw Error(ErrorCode::layout, fmt::format("parameter \"{}\" is {}; its layout is for {}", path_,
                                               to_string(global_), to_string(layout->global)));
  if (layout && layout->partial())
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": its value cannot be {}", path_, to_string(*layout)));
  layout_ = layout;
}

void Parameter::materialise(Context& context, Memory memory) {
  if (materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": materialised twice", path_));
  context_ = &context;
  value_ = Tensor(context, local_shape(), DType::f32, memory).with_layout(layout_);
}

const Tensor& Parameter::value() const {
  if (!materialised())
    throw Error(ErrorCode::bad_argument, fmt::format("parameter \"{}\": used before materialise", path_));
  return value_;
}

void Parameter::set_value(Tensor value) {
  if (!materialised())
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": set_value before materialise", path_));
  const LayoutRef layout = value.layout() ? value.layout() : layout_;
  const Shape expected = layout ? layout->local_shape() : global_;
  if (value.dtype() != DType::f32 || !(value.shape() == expected))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": set_value got {} {}; expected f32 {}", path_,
                            name(value.dtype()), to_string(value.shape()), to_string(expected)));
  if (layout && (layout->partial() || !(layout->global == global_)))
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": set_value got {}; expected whole values of {}", path_,
                            to_string(*layout), to_string(global_)));
  if (layout != layout_ && has_gradient_)
    throw Error(ErrorCode::layout,
                fmt::format("parameter \"{}\": set_value with another layout while it has a gradient; "
                            "zero_gradient first",
                            path_));
  layout_ = layout;
  value_ = value.with_layout(layout);
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
  gradient();  // there must be one
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::claim_gradient(const void* owner) {
  if (gradient_owner_ != nullptr && gradient_owner_ != owner)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("parameter \"{}\": its gradient belongs to another averager already; one averager "
                    "reduces over several axes",
                    path_));
  gradient_owner_ = owner;
}

void Parameter::release_gradient(const void* owner) noexcept {
  if (gradient_owner_ == owner) gradient_owner_ = nullptr;
}

void Parameter::state_gradient(LayoutRef layout) {
  if (!gradient_ || !(gradient_.shape() == value().shape())) gradient_ = Tensor(*context_, value().shape());
  has_gradient_ = true;
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::place_gradient(Tensor memory) {
  const Shape& expected = value().shape();
  if (memory.dtype() != DType::f32 || !(memory.shape() == expected))
    throw Error(ErrorCode::bad_argument,
                fmt::format("parameter \"{}\": place_gradient got {} {}; expected f32 {}", path_,
                            name(memory.dtype()), to_string(memory.shape()), to_string(expected)));
  if (has_gradient_) std::memcpy(memory.data(), gradient_.data(), static_cast<std::size_t>(memory.bytes()));
  gradient_ = memory.with_layout(gradient_layout_);
}

void Parameter::zero_gradient() noexcept {
  has_gradient_ = false;
  gradient_layout_ = nullptr;
}

void Parameter::accumulate(const Tensor& dw) {
  accumulate(dw.layout(), [&](const Tensor& into, bool add) {
    if (!(dw.shape() == into.shape()))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("parameter \"{}\": a gradient of shape {}; expected {}", path_,
                              to_string(dw.shape()), to_string(into.shape())));
    float* out = into.f32().data();
    const float* in = dw.f32().data();
    if (add)
      for (std::int64_t i = 0; i < dw.count(); ++i) out[i] += in[i];
    else
      std::copy_n(in, dw.count(), out);
  });
}

void Parameter::accumulate(LayoutRef layout, const std::function<void(const Tensor&, bool)>& write) {
  if (has_gradient_)
    layouts::expect_same(fmt::format("parameter \"{}\": a gradient", path_), layout, gradient_layout_,
                         "as its uses before; zero_gradient after reducing");
  if (!gradient_ || !(gradient_.shape() == value().shape())) gradient_ = Tensor(*context_, value().shape());
  write(gradient_, has_gradient_);
  has_gradient_ = true;
  gradient_layout_ = layout;
  gradient_ = gradient_.with_layout(layout);
}

void Parameter::announce_final() {
  if (!has_gradient_) return;
  for (std::size_t i = 0; i < listeners_.size(); ++i) listeners_[i].second(*this);
}

int Parameter::listen(Listener listener) {
  listeners_.emplace_back(next_listener_, std::move(listener));
  return next_listener_++;
}

void Parameter::stop_listening(int id) {
  std::erase_if(listeners_, [id](const auto& entry) { return entry.first == id; });
}

}  // namespace weft
