#include "weft/nn/optimizer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <bit>

#include "base/hash.hpp"
#include "nn/history.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {
namespace {

std::uint64_t bits_of(double value) noexcept { return std::bit_cast<std::uint64_t>(value); }

}  // namespace

Optimizer::Optimizer(Compute& compute, std::vector<Parameter*> parameters, std::vector<std::string> names)
    : compute_(&compute), parameters_(std::move(parameters)), names_(std::move(names)) {
  Context& context = compute.context();
  for (const Parameter* p : parameters_)
    if (!p->trainable()) frozen_.push_back(p);
  std::erase_if(parameters_, [](const Parameter* p) { return !p->trainable(); });
  for (const Parameter* p : parameters_) {
    compute.expect_here(p->path(), p->master());
    State state;
    state.step = Tensor::zeros(context, {1}, DType::i64);  // the host counts
    for (std::size_t i = 0; i < names_.size(); ++i)
      state.tensors.push_back(compute.zeros(p->master().shape()).with_layout(p->master().layout()));
    states_.push_back(std::move(state));
  }
}

void Optimizer::step(double lr) {
  for (const Parameter* p : frozen_)
    if (p->trainable())
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("optimizer: \"{}\" was frozen when the optimizer was made; make it after set_trainable",
                      p->path()));
  std::vector<std::string_view> without;
  for (const Parameter* p : parameters_)
    if (p->trainable() && !p->has_gradient()) without.push_back(p->path());
  if (!without.empty())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("optimizer: no gradient for {}; no backward pass has used it", fmt::join(without, ", ")));
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& p = *parameters_[i];
    if (!p.trainable()) continue;  // frozen since
    layouts::expect_same(TensorName::of("optimizer: the gradient of ", p.path()), p.gradient_layout(),
                         p.master().layout(), "as the master; reduce it before the step");
    for (std::size_t j = 0; j < names_.size(); ++j)
      layouts::expect_same(TensorName::of("optimizer: the state of ", p.path()),
                           states_[i].tensors[j].layout(), p.master().layout(),
                           "as the master; make the optimizer after the master has its layout");
  }
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    if (!parameters_[i]->trainable()) continue;
    std::int64_t& step = states_[i].step.as<std::int64_t>()[0];
    update(*parameters_[i], states_[i], ++step, lr);
  }
}

void Optimizer::zero_gradients() noexcept {
  for (Parameter* p : parameters_) p->zero_gradient();
}

void Optimizer::visit_state(const Visitor& see) const {
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    see(parameters_[i]->path(), "step", states_[i].step);
    for (std::size_t j = 0; j < names_.size(); ++j)
      see(parameters_[i]->path(), names_[j], states_[i].tensors[j]);
  }
}

AdamW::AdamW(Compute& compute, std::vector<Parameter*> parameters, const Options& options)
    : Optimizer(compute, std::move(parameters), {"exp_avg", "exp_avg_sq"}), options_(options) {}

void AdamW::update(Parameter& p, State& state, std::int64_t step, double lr) {
  kernels::adamw_step(
      kernels_of(compute()), p.write_master().data_ptr<float>(), state.tensors[0].data_ptr<float>(),
      state.tensors[1].data_ptr<float>(), p.gradient().data_ptr<float>(), p.master().count(),
      {lr, options_.beta1, options_.beta2, options_.eps, p.decays() ? options_.weight_decay : 0.0, step});
  set_history(p, digest_of(hash_of("adamw"), bits_of(options_.beta1), bits_of(options_.beta2),
                           bits_of(options_.eps), bits_of(options_.weight_decay), bits_of(lr), step) |
                     1);
}

SGD::SGD(Compute& compute, std::vector<Parameter*> parameters, const Options& options)
    : Optimizer(compute, std::move(parameters),
                options.momentum == 0 ? std::vector<std::string>{} : std::vector<std::string>{"momentum"}),
      options_(options) {}

void SGD::update(Parameter& p, State& state, std::int64_t step, double lr) {
  kernels::sgd_step(kernels_of(compute()), p.write_master().data_ptr<float>(),
                    options_.momentum == 0 ? nullptr : state.tensors[0].data_ptr<float>(),
                    p.gradient().data_ptr<float>(), p.master().count(),
                    {lr, options_.momentum, p.decays() ? options_.weight_decay : 0.0});
  set_history(p, digest_of(hash_of("sgd"), bits_of(options_.momentum), bits_of(options_.weight_decay),
                           bits_of(lr), step) |
                     1);
}

}  // namespace weft
