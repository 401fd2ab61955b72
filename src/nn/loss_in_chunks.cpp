#include "weft/nn/loss_in_chunks.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/layout.hpp"
#include "weft/nn/frame.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

struct LossInChunks::Given::Loss {
  Module* module = nullptr;  // null: none
  Tensors inputs;
};

LossInChunks::Given::~Given() {
  if (loss_ != nullptr) *loss_ = {};
}

namespace {

[[noreturn]] void refuse_chunks(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "loss in chunks: " + text);
}

// Positions of (rows, positions, …), of all rows: a part of a tensor as a tensor of its own, and back.
class Positions {
 public:
  Positions(Compute& compute, Chunk part) : compute_(&compute), part_(part) {}

  Tensor of(const Tensor& whole) const {
    Tensor t = compute_->make(extents(whole.shape()), whole.dtype());
    move(whole, t, true);
    if (whole.layout() == nullptr) return t;
    return t.with_layout(whole.layout()->with_global(extents(whole.layout()->global)));
  }
  void put(const Tensor& part, const Tensor& whole) const { move(whole, part, false); }

 private:
  Shape extents(Shape shape) const {
    shape[1] = part_.size;
    return shape;
  }
  void move(const Tensor& whole, const Tensor& part, bool take) const {
    const std::int64_t rows = whole.size(0), positions = whole.size(1);
    if (rows == 0 || part.count() == 0) return;
    const std::int64_t inner = whole.count() / rows / positions, run = part_.size * inner;
    for (std::int64_t r = 0; r < rows; ++r) {
      const Tensor there = whole.slice_flat((r * positions + part_.offset) * inner, {run}),
                   here = part.slice_flat(r * run, {run});
      copy(compute_->context(), take ? there : here, take ? here : there, compute_->stream());
    }
  }
  Compute* compute_;
  Chunk part_;
};

// The largest number of rows that a rank has.
std::int64_t rows_of_a_rank(const Tensor& x) {
  if (x.layout() == nullptr) return x.size(0);
  std::int64_t most = 0;
  for (int rank = 0; rank < x.layout()->mesh_shape().size(); ++rank)
    for (const Box& box : x.layout()->parts(rank)) most = std::max(most, box.shape[0]);
  return most;
}

// Calls see(part) for the parts of the positions.
template <class See>
void each_part(Compute& compute, const Tensor& x, std::int64_t tokens, const See& see) {
  const std::int64_t positions = x.size(1),
                     size = std::max<std::int64_t>(1, tokens / std::max<std::int64_t>(1, rows_of_a_rank(x)));
  for (std::int64_t first = 0; first < std::max<std::int64_t>(positions, 1); first += size)
    see(Positions(compute, {first, std::min(size, positions - first)}));
}

// The inputs of the loss for a part: its outputs, the targets there, and the count of all.
Tensors inputs_of_part(const Positions& part, Tensors outputs, std::span<const Tensor> inputs) {
  for (std::size_t i = 0; i + 1 < inputs.size(); ++i) outputs.push_back(part.of(inputs[i]));
  outputs.push_back(inputs.back());
  return outputs;
}

void expect_positions(const Module& module, const Tensor& x, std::span<const Tensor> inputs) {
  if (x.shape().rank() < 2)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{} is {}; expected (rows, positions, …) for a loss in chunks",
                            layouts::named(module, "x").text(), to_string(x.shape())));
  for (std::size_t i = 0; i + 1 < inputs.size(); ++i) {
    const Shape& shape = inputs[i].shape();
    if (shape.rank() < 2 || shape[0] != x.size(0) || shape[1] != x.size(1))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("loss in chunks: inputs[{}] is {}; expected ({}, {}, …), as {}", i,
                              to_string(shape), x.size(0), x.size(1), layouts::named(module, "x").text()));
  }
}

}  // namespace

LossInChunks::LossInChunks(std::int64_t tokens) : tokens_(tokens), given_(std::make_shared<Given::Loss>()) {
  if (tokens < 1) refuse_chunks(fmt::format("tokens is {}; expected 1 or more", tokens));
}

LossInChunks::Given LossInChunks::give(Module& loss, Tensors inputs) const {
  if (inputs.empty()) refuse_chunks("inputs is empty; expected the number of counted elements, last");
  if (given_->module != nullptr) refuse_chunks("a loss is given already; expected one at a time");
  *given_ = {&loss, std::move(inputs)};
  return Given(given_);
}

Tensors LossInChunks::forward(Module& module, Inputs inputs, Frame& frame) const {
  if (given_->module == nullptr) return own_forward(module, inputs, frame);
  const Tensor x = inputs[0];
  expect_positions(module, x, given_->inputs);
  double sum = 0;
  LayoutRef layout;
  each_part(frame.compute(), x, tokens_, [&](const Positions& part) {
    Frame scratch = Frame::inference(frame.compute());
    const Tensors y = own_forward(module, Tensors{part.of(x)}, scratch);
    const Tensor loss = given_->module->forward(inputs_of_part(part, y, given_->inputs), scratch)[0];
    sum += to_host(frame.compute().context(), loss).as<double>()[0];
    layout = loss.layout();
  });
  Tensor all(frame.compute().context(), {1}, DType::f64);
  all.as<double>()[0] = sum;
  Tensors kept{x};
  kept.insert(kept.end(), given_->inputs.begin(), given_->inputs.end());
  frame.push(module, std::move(kept));
  return {to_device(frame.compute().context(), all, frame.compute().stream()).with_layout(layout)};
}

Tensors LossInChunks::backward(Module& module, Inputs dy, Frame& frame) const {
  if (given_->module == nullptr) return own_backward(module, dy, frame);
  const Tensors kept = frame.pop(module);
  const Tensor& x = kept[0];
  const std::span<const Tensor> inputs(kept.begin() + 1, kept.end());
  Tensor dx;
  each_part(frame.compute(), x, tokens_, [&](const Positions& part) {
    Frame scratch(frame.compute(), frame.pass());
    const Tensors y = own_forward(module, Tensors{part.of(x)}, scratch);
    given_->module->forward(inputs_of_part(part, y, inputs), scratch);
    const Tensor of_part = own_backward(module, given_->module->backward(dy, scratch), scratch)[0];
    if (!dx) {
      dx = frame.compute().make(x.shape(), of_part.dtype(), Memory::shared);
      if (of_part.layout() != nullptr)
        dx = dx.with_layout(of_part.layout()->with_global(layouts::global_shape(x)));
    }
    part.put(of_part, dx);
  });
  return {dx};
}

}  // namespace weft
