#include "weft/train/ema.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>
#include <span>

#include "nn/swapped_masters.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

[[noreturn]] void bad_ema(const std::string& text) { throw Error(ErrorCode::bad_argument, "ema: " + text); }

}  // namespace

Ema::Ema(Compute& compute, std::vector<Parameter*> parameters, const Options& options)
    : compute_(&compute), options_(options) {
  if (!(options.decay >= 0 && options.decay < 1))
    bad_ema(fmt::format("decay is {}; expected 0 or more, and less than 1", options.decay));
  for (Parameter* p : parameters)
    if (p->trainable())
      add(*p);
    else
      frozen_.push_back(p);
}

void Ema::add(Parameter& parameter) {
  if (!parameter.trainable())
    bad_ema(fmt::format("\"{}\" is frozen; its average would be its master", parameter.path()));
  if (std::find(parameters_.begin(), parameters_.end(), &parameter) != parameters_.end())
    bad_ema(fmt::format("\"{}\" is averaged already", parameter.path()));
  if (swapped_) bad_ema("add() while the averages are swapped in; swap_out() first");
  expect_trained_masters("ema: add()", std::span<Parameter* const>(std::array{&parameter}));
  Compute& compute = *compute_;
  const Tensor& master = parameter.master();
  compute.expect_here(parameter.path(), master);
  Average average{Tensor::zeros(compute.context(), {1}, DType::i64),  // the host counts
                  compute.make(master.shape()).with_layout(master.layout())};
  copy(compute.context(), master, average.value, compute.stream());
  averages_.push_back(std::move(average));
  parameters_.push_back(&parameter);
  std::erase(frozen_, &parameter);
}

void Ema::expect_sound(std::string_view call) const {
  if (swapped_) bad_ema(fmt::format("{} while the averages are swapped in; swap_out() first", call));
  for (const Parameter* p : frozen_)
    if (p->trainable())
      bad_ema(
          fmt::format("\"{}\" was frozen when the ema was made; add() it when it is unfrozen", p->path()));
}

void Ema::expect_same_layouts() const {
  for (std::size_t i = 0; i < parameters_.size(); ++i)
    layouts::expect_same(TensorName::of("ema: the average of ", parameters_[i]->path()),
                         averages_[i].value.layout(), parameters_[i]->master().layout(),
                         "as the master; make the ema after the master has its layout");
}

double Ema::decay_at(std::int64_t n) const noexcept {
  if (!options_.warm_up) return options_.decay;
  const auto done = static_cast<double>(n);
  return std::min(options_.decay, (1 + done) / (10 + done));
}

void Ema::update() {
  expect_sound("update()");
  expect_trained_masters("ema: update()", parameters_);
  expect_same_layouts();
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = *parameters_[i];
    if (!p.trainable()) continue;  // frozen since
    std::int64_t& updates = averages_[i].updates.as<std::int64_t>()[0];
    const double decay = decay_at(updates++);
    kernels::KernelContext& on = kernels_of(*compute_);
    float* const average = averages_[i].value.data_ptr<float>();
    const std::int64_t count = p.master().count();
    // e += (1 - d) (p - e) is a step of SGD: of e, along the gradient p, with a decay of -1 and a rate below
    // 0. So every device that can train can compute it. With a small d this formula would lose the digits by
    // which e is larger than p: then e = d e + (1 - d) p is used.
    const bool small = decay < 0.5;
    if (small) kernels::scale(on, average, static_cast<float>(decay), count);
    kernels::sgd_step(on, average, nullptr, p.master().data_ptr<float>(), count,
                      {decay - 1, 0, small ? 0.0 : -1.0});
  }
}

void Ema::exchange() {
  expect_same_layouts();
  Compute& compute = *compute_;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Tensor& master = parameters_[i]->write_master();
    const Tensor& average = averages_[i].value;
    if (compute.device() == Device{}) {
      std::swap_ranges(master.data_ptr<float>(), master.data_ptr<float>() + master.count(),
                       average.data_ptr<float>());
      continue;
    }
    const Tensor kept = compute.make(master.shape());
    copy(compute.context(), master, kept, compute.stream());
    copy(compute.context(), average, master, compute.stream());
    copy(compute.context(), kept, average, compute.stream());
  }
}

void Ema::swap_in() {
  expect_sound("swap_in()");
  expect_trained_masters("ema: swap_in()", parameters_);
  exchange();
  swapped_ = true;
  for (const Parameter* p : parameters_) mark_swapped(*p, "averages");
}

void Ema::swap_out() {
  if (!swapped_) bad_ema("swap_out() without swap_in()");
  exchange();
  swapped_ = false;
  for (const Parameter* p : parameters_) mark_trained(*p);
}

Ema::Swapped::~Swapped() {
  if (!ema_->swapped()) return;  // the program did it
  try {
    ema_->swap_out();
  } catch (const std::exception&) {
    // A master has another layout now: swapped() stays true, and the next call throws.
  }
}

void Ema::entries(const Optimizer::Visitor& see) const {
  expect_sound("entries()");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    see(parameters_[i]->path(), "updates", averages_[i].updates);
    see(parameters_[i]->path(), "average", averages_[i].value);
  }
}

}  // namespace weft
