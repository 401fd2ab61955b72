#include "weft/nn/activation.hpp"

#include <fmt/format.h>

#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/kernels.hpp"
#include "weft/nn/layouts.hpp"

namespace weft {

SwiGLU::SwiGLU(std::int64_t dim, std::int64_t hidden, Init init, Init down_init)
    : gate_proj(dim, hidden, false, init),
      up_proj(dim, hidden, false, init),
      down_proj(hidden, dim, false, down_init) {
  add("gate_proj", gate_proj);
  add("up_proj", up_proj);
  add("down_proj", down_proj);
}

Tensors SwiGLU::do_forward(Inputs x, Frame& frame) {
  expect_count(x, 1, "inputs");
  const Tensor gate = gate_proj.forward(x, frame)[0];  // both (…, hidden/tp)
  const Tensor up = up_proj.forward(x, frame)[0];
  layouts::expect_whole(layouts::named(*this, "gate"), gate, "a nonlinearity", false);
  layouts::expect_same(layouts::named(*this, "up"), up.layout(), gate.layout(), "as gate");
  const Tensor hidden = frame.compute().make(gate.shape(), gate.dtype()).with_layout(gate.layout());
  by_element(gate, [&]<class T>() {
    kernels::swiglu_forward(frame.kernels(), gate.data_ptr<T>(), up.data_ptr<T>(), hidden.data_ptr<T>(),
                            gate.count());
  });
  frame.push(*this, {gate, up});
  return down_proj.forward(hidden, frame);
}

Tensors SwiGLU::do_backward(Inputs dy, Frame& frame) {
  const Tensor dhidden = down_proj.backward(dy, frame)[0];
  const Tensors kept = frame.pop(*this);
  const Tensor &gate = kept[0], &up = kept[1];
  layouts::expect_same(layouts::named(*this, "d(hidden)"), dhidden.layout(), gate.layout(), "as gate");
  const Tensor dgate = frame.compute().make(gate.shape(), gate.dtype()).with_layout(gate.layout());
  const Tensor dup = frame.compute().make(gate.shape(), gate.dtype()).with_layout(gate.layout());
  by_element(gate, [&]<class T>() {
    kernels::swiglu_backward(frame.kernels(), dhidden.data_ptr<T>(), gate.data_ptr<T>(), up.data_ptr<T>(),
                             dgate.data_ptr<T>(), dup.data_ptr<T>(), gate.count());
  });
  const Tensor through_up = up_proj.backward(dup, frame)[0];
  const Tensor through_gate = gate_proj.backward(dgate, frame)[0];
  return {add_tensors(through_up, through_gate, frame.compute(), layouts::named(*this, "dx"), dx_memory())};
}

Tensors GELU::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  expect_activation(layouts::named(*this, "x"), x);
  layouts::expect_whole(layouts::named(*this, "x"), x, "a nonlinearity", false);
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), out_memory()).with_layout(x.layout());
  by_element(x, [&]<class T>() {
    kernels::gelu_forward(frame.kernels(), x.data_ptr<T>(), y.data_ptr<T>(), x.count(), form_);
  });
  frame.push(*this, {x});
  return {y};
}

Tensors GELU::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor x = frame.pop(*this)[0];
  const Tensor& dy = gradients[0];
  expect_gradient(*this, dy, x.shape(), x.layout(), x.dtype());
  const Tensor dx = frame.compute().make(x.shape(), x.dtype(), dx_memory()).with_layout(x.layout());
  by_element(x, [&]<class T>() {
    kernels::gelu_backward(frame.kernels(), dy.data_ptr<T>(), x.data_ptr<T>(), dx.data_ptr<T>(), x.count(),
                           form_);
  });
  return {dx};
}

Tensors ReLU::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  expect_activation(layouts::named(*this, "x"), x);
  layouts::expect_whole(layouts::named(*this, "x"), x, "a nonlinearity", false);
  const Tensor y = frame.compute().make(x.shape(), x.dtype(), out_memory()).with_layout(x.layout());
  by_element(x, [&]<class T>() {
    kernels::relu_forward(frame.kernels(), x.data_ptr<T>(), y.data_ptr<T>(), x.count());
  });
  frame.push(*this, {y});
  return {y};
}

Tensors ReLU::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor y = frame.pop(*this)[0];
  const Tensor& dy = gradients[0];
  expect_gradient(*this, dy, y.shape(), y.layout(), y.dtype());
  const Tensor dx = frame.compute().make(y.shape(), y.dtype(), dx_memory()).with_layout(y.layout());
  by_element(y, [&]<class T>() {
    kernels::relu_backward(frame.kernels(), dy.data_ptr<T>(), y.data_ptr<T>(), dx.data_ptr<T>(), y.count());
  });
  return {dx};
}

Tensor add_tensors(const Tensor& a, const Tensor& b, Compute& compute, const TensorName& what,
                   Memory memory) {
  layouts::expect_same(what.and_then(": the second term"), b.layout(), a.layout(), "as the first");
  expect_activation(what.and_then(": the first term"), a);
  expect_dtype(what.and_then(": the second term"), b, a.dtype());
  if (!(a.shape() == b.shape()))
    throw Error(ErrorCode::bad_argument, fmt::format("{}: terms of shapes {} and {}", what.text(),
                                                     to_string(a.shape()), to_string(b.shape())));
  const Tensor sum = compute.make(a.shape(), a.dtype(), memory).with_layout(a.layout());
  by_element(a, [&]<class T>() {
    kernels::add(kernels_of(compute), a.data_ptr<T>(), b.data_ptr<T>(), sum.data_ptr<T>(), a.count());
  });
  return sum;
}

}  // namespace weft
