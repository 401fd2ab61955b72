#include "weft/ep/expert_modules.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "ep/tokens.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/dropout.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/init.hpp"

namespace weft {
namespace {

[[noreturn]] void refuse_expert(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "moe: make_expert gives " + text);
}

// Throws for a module whose results would depend on the mesh.
void expect_expert(Module& expert) {
  expert.visit([](Module& m) {
    if (!m.own_buffers().empty())
      refuse_expert(fmt::format("a module with the buffer \"{}\"; expected parameters alone",
                                m.own_buffers().front().second->path()));
    if (dynamic_cast<const Dropout*>(&m) != nullptr)
      refuse_expert(
          fmt::format("a module with the Dropout \"{}\", whose numbers would depend on the rows of a "
                      "rank; expected none",
                      m.path()));
  });
  for (const Parameter* p : expert.parameters())
    if (p->holders() > 1)
      refuse_expert(
          fmt::format("a module with the tied weight \"{}\"; expected one use of each weight", p->path()));
}

// Part i of a tensor whose first dimension counts parts.
Tensor part_of_stack(const Tensor& stack, std::size_t i, const Shape& part) {
  return stack.slice_flat(static_cast<std::int64_t>(i) * part.count(), part);
}

}  // namespace

// A module of an expert, with the parameters of all experts.
struct ExpertModules::Node : Module {
  Node(std::int64_t experts, const Module& of, std::vector<Parameter*>& stacked) {
    add_all(experts, of, *this, children, stacked);
  }
  // Adds the parameters and the children of `of` to `to`.
  template <class To>
  static void add_all(std::int64_t experts, const Module& of, To& to,
                      std::vector<std::unique_ptr<Node>>& nodes, std::vector<Parameter*>& stacked) {
    for (const auto& [name, p] : of.own_parameters()) {
      std::vector<std::int64_t> dims{experts};
      dims.insert(dims.end(), p->global_shape().begin(), p->global_shape().end());
      const ParameterRef all = to.add(name, std::make_shared<Parameter>(Shape(dims), p->init()));
      all->set_decays(p->decays());
      stacked.push_back(all.get());
    }
    for (const auto& [name, child] : of.children()) {
      nodes.push_back(std::make_unique<Node>(experts, *child, stacked));
      to.add(name, *nodes.back());
    }
  }
  Tensors do_forward(Inputs, Frame&) override { throw_alone(); }
  Tensors do_backward(Inputs, Frame&) override { throw_alone(); }
  [[noreturn]] void throw_alone() const {
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\" is a part of all experts; expected a pass of the mixture", path()));
  }
  std::vector<std::unique_ptr<Node>> children;
};

ExpertModules::ExpertModules(std::int64_t experts, MakeExpert make)
    : experts_(experts), make_(std::move(make)) {
  if (!make_) throw Error(ErrorCode::bad_argument, "moe: make_expert is empty; expected a function");
  const std::unique_ptr<Module> one = make_();
  if (one == nullptr) refuse_expert("null; expected a module");
  expect_expert(*one);
  Node::add_all(experts, *one, *this, nodes_, stacked_);
}
ExpertModules::~ExpertModules() = default;

ShardRule ExpertModules::shard_rule(Split) const {
  ShardRule rule;
  rule.refused = "has experts that are modules of the program, which a tensor axis does not divide";
  return rule;
}

// Expert i of this rank. All experts share the memory of one, which nobody reads: see place_weights().
Module& ExpertModules::expert(std::size_t i, Compute& compute) {
  while (of_rank_.size() <= i) {
    std::unique_ptr<Module> made = make_();
    if (made == nullptr) refuse_expert("null; expected a module");
    const std::vector<Parameter*> parameters = made->parameters();
    if (parameters.size() != stacked_.size())
      refuse_expert(fmt::format("a module with {} parameters; expected {}, as before", parameters.size(),
                                stacked_.size()));
    for (std::size_t p = 0; p < parameters.size(); ++p) {
      const Shape of_all = stacked_[p]->global_shape();
      if (!std::ranges::equal(parameters[p]->global_shape(), std::span(of_all.begin() + 1, of_all.end())))
        refuse_expert(fmt::format("a module whose parameter {} is {}; expected a part of {}, as before",
                                  parameters[p]->path(), to_string(parameters[p]->global_shape()),
                                  to_string(of_all)));
      parameters[p]->set_dtype(stacked_[p]->dtype());
      parameters[p]->materialise(compute);
      if (of_rank_.empty())
        parameters[p]->write_master();
      else
        parameters[p]->set_master(of_rank_.front()->parameters()[p]->master());
    }
    of_rank_.push_back(std::move(made));
  }
  return *of_rank_[i];
}

void ExpertModules::place_weights(std::size_t i, Module& expert) const {
  const std::vector<Parameter*> parameters = expert.parameters();
  for (std::size_t p = 0; p < parameters.size(); ++p)
    parameters[p]->place_weight(part_of_stack(stacked_[p]->weight(), i, parameters[p]->global_shape()));
}

Tensors ExpertModules::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 2, "inputs");
  const Tensor &x = inputs[0], &offsets = inputs[1];
  const auto rows = offsets.as<std::int64_t>();
  const std::int64_t width = x.size(1);
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), rows_memory_);
  for (std::size_t i = 0; i + 1 < rows.size(); ++i) {
    const Shape part{rows[i + 1] - rows[i], width};
    if (part[0] == 0) continue;
    Module& of = expert(i, frame.compute());
    place_weights(i, of);
    const Tensors out = of.forward(x.slice_flat(rows[i] * width, part), frame);
    for (Parameter* p : of.parameters()) p->drop_weight();
    if (out.size() != 1 || !(out[0].shape() == part) || out[0].dtype() != x.dtype())
      throw Error(
          ErrorCode::bad_argument,
          fmt::format("\"{}\": an expert made {} of its rows, {} {}; expected one output, as its rows",
                      path(),
                      out.size() == 1 ? std::string(name(out[0].dtype())) + " " + to_string(out[0].shape())
                                      : std::to_string(out.size()) + " outputs",
                      name(x.dtype()), to_string(part)));
    std::memcpy(y.data() + rows[i] * width * size_bytes(x.dtype()), out[0].data(),
                static_cast<std::size_t>(out[0].bytes()));
  }
  for (const auto& node : nodes_)
    for (const Parameter* p : node->parameters()) frame.count_use(*p);
  frame.push(*this, {offsets});
  return {y};
}

Tensors ExpertModules::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor offsets = frame.pop(*this)[0];
  const Tensor& dy = gradients[0];
  const auto rows = offsets.as<std::int64_t>();
  const std::int64_t width = dy.size(1);
  const Tensor dx = frame.compute().make(dy.shape(), dy.dtype(), rows_memory_);
  // The places of the gradients; null: that parameter is frozen. Each accumulate() gives one of them.
  std::vector<std::pair<Tensor, bool>> to(stacked_.size());
  const auto run = [&] {
    for (std::size_t i = rows.size() - 1; i-- > 0;) {
      const Shape part{rows[i + 1] - rows[i], width};
      if (part[0] == 0) {
        for (std::size_t p = 0; p < to.size(); ++p)
          if (const auto& [into, add] = to[p]; into && !add) {
            const std::int64_t bytes = into.bytes() / into.size(0);
            std::memset(into.data() + static_cast<std::int64_t>(i) * bytes, 0,
                        static_cast<std::size_t>(bytes));
          }
        continue;
      }
      Module& of = expert(i, frame.compute());
      place_weights(i, of);
      const std::vector<Parameter*> parameters = of.parameters();
      for (std::size_t p = 0; p < to.size(); ++p) {
        const auto& [into, add] = to[p];
        parameters[p]->set_trainable(static_cast<bool>(into));
        if (!into) continue;
        const Tensor place = part_of_stack(into, i, parameters[p]->global_shape());
        if (!add && place.bytes() > 0) std::memset(place.data(), 0, static_cast<std::size_t>(place.bytes()));
        parameters[p]->place_gradient(place);
        parameters[p]->state_gradient(nullptr);
      }
      LeftOver of_weights;  // the places are known within this call alone
      Tensors out;
      {
        const Frame::Leaving leaving(frame, of_weights);
        out = of.backward(dy.slice_flat(rows[i] * width, part), frame);
      }
      of_weights.run();
      for (Parameter* p : parameters) {
        p->zero_gradient();
        p->drop_weight();
      }
      std::memcpy(dx.data() + rows[i] * width * size_bytes(dy.dtype()), out.at(0).data(),
                  static_cast<std::size_t>(out.at(0).bytes()));
    }
  };
  const std::function<void(std::size_t)> from = [&](std::size_t p) {
    if (p == stacked_.size()) return run();
    if (!stacked_[p]->trainable()) return from(p + 1);
    stacked_[p]->accumulate(ep::gradient_layout(*stacked_[p], tokens_layout_),
                            [&](const Tensor& into, bool add) {
                              to[p] = {into, add};
                              from(p + 1);
                            });
  };
  from(0);
  for (const auto& node : nodes_)
    for (Parameter* p : node->parameters())
      if (frame.drop_use(*p)) frame.later([p](Frame&) { p->announce_final(); });
  return {dx};
}

}  // namespace weft
