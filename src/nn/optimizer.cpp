#include "weft/nn/optimizer.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "base/hash.hpp"
#include "nn/history.hpp"
#include "nn/optimizer_options.hpp"
#include "nn/swapped_masters.hpp"
#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/host/device_runtime.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/path_pattern.hpp"

namespace weft {
namespace {

template <class... Numbers>
std::uint64_t digest_of_options(std::string_view kind, Numbers... options) noexcept {
  return digest_of(hash_of(kind), std::bit_cast<std::uint64_t>(static_cast<double>(options))...);
}

}  // namespace

Optimizer::Optimizer(Compute& compute, std::vector<Parameter*> parameters, std::vector<ParameterGroup> groups,
                     std::uint64_t digest, double weight_decay)
    : compute_(&compute),
      groups_(std::move(groups)),
      digest_(digest_of(digest, digest_of_groups(groups_))),
      weight_decay_(weight_decay),
      parameters_(std::move(parameters)) {
  for (const ParameterGroup& group : groups_) {
    check_option("the rate of a group", group.rate, kNoLimit);
    if (group.weight_decay) check_option("the weight_decay of a group", *group.weight_decay, kNoLimit);
    expect_patterns_match("a group", group.patterns, parameters_);
  }
}

void Optimizer::begin(std::function<StateNames(const Parameter&)> names) {
  names_ = std::move(names);
  std::vector<Parameter*> given = std::move(parameters_);
  parameters_.clear();
  for (Parameter* p : given) {
    if (std::ranges::count(given, p) > 1) bad_optimizer(fmt::format("\"{}\" is given twice", p->path()));
    if (p->trainable())
      add_state(*p);
    else
      frozen_.push_back(p);
  }
}

void Optimizer::add_state(Parameter& parameter) {
  Compute& compute = *compute_;
  compute.expect_here(parameter.path(), parameter.master());
  const StateNames names = names_(parameter);
  State state;
  state.step = Tensor::zeros(compute.context(), {1}, DType::i64);  // the host counts
  for (const std::string_view name : names.tensors)
    state.tensors.push_back(
        {name, compute.zeros(parameter.master().shape()).with_layout(parameter.master().layout())});
  for (const auto& [name, count] : names.numbers)
    state.numbers.push_back({name, Tensor::zeros(compute.context(), {count}, DType::f64)});
  parameters_.push_back(&parameter);
  states_.push_back(std::move(state));
}

void Optimizer::add(Parameter& parameter) {
  if (!parameter.trainable()) bad_optimizer(fmt::format("add(): \"{}\" is frozen", parameter.path()));
  if (std::ranges::find(parameters_, &parameter) != parameters_.end())
    bad_optimizer(fmt::format("add(): \"{}\" is trained already", parameter.path()));
  expect_trained_values("add()");
  add_state(parameter);
  std::erase(frozen_, &parameter);
}

Optimizer::Share Optimizer::share_of(const Parameter& parameter) const {
  const auto group = std::find_if(groups_.rbegin(), groups_.rend(), [&](const ParameterGroup& g) {
    return std::ranges::any_of(
        g.patterns, [&](const std::string& pattern) { return matches_part(pattern, parameter.path()); });
  });
  const double decay = parameter.decays() ? weight_decay_ : 0.0;
  if (group == groups_.rend()) return {1, decay};
  return {group->rate, group->weight_decay.value_or(decay)};
}

void Optimizer::expect_trained_values(const char* call) const {
  if (swapped_)
    bad_optimizer(fmt::format("{} while the values for evaluation are swapped in; swap_out() first", call));
}

void Optimizer::step(double lr) {
  if (!(lr >= 0 && std::isfinite(lr)))
    bad_optimizer(fmt::format("the learning rate is {}; expected a finite number of 0 or more", lr));
  expect_trained_values("step()");
  expect_trained_masters("optimizer: step()", parameters_);
  for (const Parameter* p : frozen_)
    if (p->trainable())
      bad_optimizer(fmt::format("\"{}\" was frozen when the optimizer was made; add() it when it is unfrozen",
                                p->path()));
  std::vector<std::string_view> without;
  for (const Parameter* p : parameters_)
    if (p->trainable() && !p->has_gradient()) without.push_back(p->path());
  if (!without.empty())
    bad_optimizer(fmt::format("no gradient for {}; no backward pass has used it", fmt::join(without, ", ")));
  std::vector<Item> items;
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    Parameter& p = *parameters_[i];
    if (!p.trainable()) continue;  // frozen since
    layouts::expect_same(TensorName::of("optimizer: the gradient of ", p.path()), p.gradient_layout(),
                         p.master().layout(), "as the master; reduce it before the step");
    for (const Named& s : states_[i].tensors)
      layouts::expect_same(TensorName::of("optimizer: the state of ", p.path()), s.tensor.layout(),
                           p.master().layout(),
                           "as the master; make the optimizer after the master has its layout");
    const Share share = share_of(p);
    items.push_back(
        {&p, &states_[i], states_[i].step.as<std::int64_t>()[0] + 1, lr * share.rate, share.weight_decay});
  }
  for (const Item& item : items) item.state->step.as<std::int64_t>()[0] = item.step;
  update_all(items);
  for (const Item& item : items)
    set_history(*item.parameter, digest_of(digest_, std::bit_cast<std::uint64_t>(item.lr), item.step) | 1);
}

void Optimizer::zero_gradients() noexcept {
  for (Parameter* p : parameters_) p->zero_gradient();
}

void Optimizer::visit_state(const Visitor& see) const {
  expect_trained_values("visit_state()");
  for (std::size_t i = 0; i < parameters_.size(); ++i) {
    see(parameters_[i]->path(), "step", states_[i].step);
    for (const std::vector<Named>* list : {&states_[i].tensors, &states_[i].numbers})
      for (const Named& s : *list) see(parameters_[i]->path(), s.name, s.tensor);
  }
}

void Optimizer::swap_in() {
  expect_trained_values("swap_in()");
  expect_trained_masters("optimizer: swap_in()", parameters_);
  exchange_in();
  swapped_ = true;
}

void Optimizer::swap_out() {
  if (!swapped_) bad_optimizer("swap_out() without swap_in()");
  exchange_out();
  swapped_ = false;
}

Optimizer::Swapped::~Swapped() {
  if (!optimizer_->swapped()) return;  // the program did it
  try {
    optimizer_->swap_out();
  } catch (const std::exception&) {
    // A master has another shape now: swapped() stays true, and the next call throws.
  }
}

void AdamW::Options::check() const {
  check_option("beta1", beta1, 1);
  check_option("beta2", beta2, 1);
  check_eps("eps", eps);
  check_option("weight_decay", weight_decay, kNoLimit);
}

AdamW::AdamW(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
             std::vector<ParameterGroup> groups)
    : Optimizer(compute, std::move(parameters), std::move(groups),
                digest_of_options("adamw", options.beta1, options.beta2, options.eps, options.weight_decay),
                options.weight_decay),
      options_(options) {
  options.check();
  begin([](const Parameter&) { return StateNames{{"exp_avg", "exp_avg_sq"}}; });
}

void AdamW::update(const Item& item) {
  Parameter& p = *item.parameter;
  kernels::adamw_step(kernels_of(compute()), p.write_master().data_ptr<float>(),
                      item.state->tensors[0].tensor.data_ptr<float>(),
                      item.state->tensors[1].tensor.data_ptr<float>(), p.gradient().data_ptr<float>(),
                      p.master().count(),
                      {item.lr, options_.beta1, options_.beta2, options_.eps, item.weight_decay, item.step});
}

void SGD::Options::check() const {
  check_option("momentum", momentum, kNoLimit);
  check_option("weight_decay", weight_decay, kNoLimit);
}

SGD::SGD(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
         std::vector<ParameterGroup> groups)
    : Optimizer(compute, std::move(parameters), std::move(groups),
                digest_of_options("sgd", options.momentum, options.weight_decay), options.weight_decay),
      options_(options) {
  options.check();
  const bool keeps = options.momentum != 0;
  begin([keeps](const Parameter&) { return keeps ? StateNames{{"momentum"}} : StateNames{}; });
}

void SGD::update(const Item& item) {
  Parameter& p = *item.parameter;
  kernels::sgd_step(kernels_of(compute()), p.write_master().data_ptr<float>(),
                    options_.momentum == 0 ? nullptr : item.state->tensors[0].tensor.data_ptr<float>(),
                    p.gradient().data_ptr<float>(), p.master().count(),
                    {item.lr, options_.momentum, item.weight_decay});
}

void Lion::Options::check() const {
  check_option("beta1", beta1, 1);
  check_option("beta2", beta2, 1);
  check_option("weight_decay", weight_decay, kNoLimit);
}

Lion::Lion(Compute& compute, std::vector<Parameter*> parameters, const Options& options,
           std::vector<ParameterGroup> groups)
    : Optimizer(compute, std::move(parameters), std::move(groups),
                digest_of_options("lion", options.beta1, options.beta2, options.weight_decay),
                options.weight_decay),
      options_(options) {
  options.check();
  begin([](const Parameter&) { return StateNames{{"exp_avg"}}; });
}

void Lion::update(const Item& item) {
  Parameter& p = *item.parameter;
  kernels::lion_step(kernels_of(compute()), p.write_master().data_ptr<float>(),
                     item.state->tensors[0].tensor.data_ptr<float>(), p.gradient().data_ptr<float>(),
                     p.master().count(), {item.lr, options_.beta1, options_.beta2, item.weight_decay});
}

void ScheduleFreeAdamW::Options::check() const {
  if (!(beta1 > 0 && beta1 < 1))
    bad_optimizer(fmt::format("beta1 is {}; expected more than 0, and less than 1", beta1));
  check_option("beta2", beta2, 1);
  check_eps("eps", eps);
  check_option("weight_decay", weight_decay, kNoLimit);
}

ScheduleFreeAdamW::ScheduleFreeAdamW(Compute& compute, std::vector<Parameter*> parameters,
                                     const Options& options, std::vector<ParameterGroup> groups)
    : Optimizer(compute, std::move(parameters), std::move(groups),
                digest_of_options("schedule_free_adamw", options.beta1, options.beta2, options.eps,
                                  options.weight_decay),
                options.weight_decay),
      options_(options) {
  options.check();
  begin([](const Parameter&) { return StateNames{{"z", "exp_avg_sq"}, {{"rates", 3}}}; });
}

void ScheduleFreeAdamW::update(const Item& item) {
  Parameter& p = *item.parameter;
  const Tensor &z = item.state->tensors[0].tensor, &v = item.state->tensors[1].tensor;
  if (item.step == 1) copy(compute().context(), p.master(), z, compute().stream());  // z begins as y
  const std::span<double> rates = item.state->numbers[0].tensor.as<double>();
  rates[1] = std::max(rates[1], item.lr);
  rates[2] =
      options_.beta1;  // for those who read a checkpoint: with it y and z give the values for evaluation
  rates[0] += rates[1] * rates[1];
  const double weight = rates[0] == 0 ? 0 : rates[1] * rates[1] / rates[0];
  kernels::schedule_free_step(
      kernels_of(compute()), p.write_master().data_ptr<float>(), z.data_ptr<float>(), v.data_ptr<float>(),
      p.gradient().data_ptr<float>(), p.master().count(),
      {item.lr, options_.beta1, options_.beta2, options_.eps, item.weight_decay, weight, item.step});
}

// x = y / b1 + (1 - 1/b1) z, written as a step of SGD of y along z, which every device that trains computes.
void ScheduleFreeAdamW::exchange_in() {
  kept_.clear();
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    Parameter& p = *parameters()[i];
    const State& state = state_of(i);
    if (state.step.as<std::int64_t>()[0] == 0) {
      kept_.push_back({});
      continue;
    }
    mark_swapped(p, "values for evaluation");
    kept_.push_back(compute().make(p.master().shape()));
    copy(compute().context(), p.master(), kept_.back(), compute().stream());
    kernels::sgd_step(kernels_of(compute()), p.write_master().data_ptr<float>(), nullptr,
                      state.tensors[0].tensor.data_ptr<float>(), p.master().count(),
                      {1 / options_.beta1 - 1, 0, -1});
  }
}

void ScheduleFreeAdamW::exchange_out() {
  for (std::size_t i = 0; i < parameters().size(); ++i) {
    if (!kept_[i]) continue;
    copy(compute().context(), kept_[i], parameters()[i]->write_master(), compute().stream());
    mark_trained(*parameters()[i]);
  }
  kept_.clear();
}

}  // namespace weft
