#include "weft/nn/precision.hpp"

#include <fmt/format.h>

#include "base/floating.hpp"
#include "nn/operands.hpp"
#include "weft/base/error.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/module.hpp"

namespace weft {
namespace {

// Casts `tensors`, and returns empty tensors of the dtypes that they had.
Tensors cast_all(Tensors& tensors, DType to, Frame& frame) {
  Tensors before;
  for (Tensor& t : tensors) {
    before.push_back(frame.compute().make({0}, t.dtype()));
    t = cast(frame, t, to);
  }
  return before;
}

void cast_back(Tensors& gradients, const Module& module, Frame& frame) {
  std::size_t next = 0;
  for (const Tensor& before : frame.pop(module))
    if (is_floating(before.dtype()) && next < gradients.size()) {
      gradients[next] = cast(frame, gradients[next], before.dtype());
      ++next;
    }
}

// A pair of hooks. One casts tensors of the forward pass, the other casts their gradients.
void cast_at(Module& root, Module::HookPoint forward, Module::HookPoint backward, DType to) {
  root.add_hook(forward, [to](Module& m, Tensors& t, Frame& f) { f.push(m, cast_all(t, to, f)); }).detach();
  root.add_hook(backward, [](Module& m, Tensors& t, Frame& f) { cast_back(t, m, f); }).detach();
}

}  // namespace

void expect_precision(const MixedPrecision& p, std::string_view argument) {
  for (const auto& [what, dtype] : {std::pair{"param", p.param},
                                    {"activations", p.activations},
                                    {"output", p.output},
                                    {"reduce", p.reduce}})
    if (!is_weight_dtype(dtype))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("{}.{} is {}; expected {}", argument, what, name(dtype), kWeightDTypeNames));
  if (p.activations == DType::bf16 && p.param != DType::bf16)
    throw Error(ErrorCode::bad_argument,
                fmt::format("{}.activations is bf16 and param f32; expected bf16 of both, since products "
                            "in f32 do not take bf16",
                            argument));
  if (p.output == DType::bf16 && p.activations != DType::bf16)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("{}.output is bf16 and activations f32; expected f32, or bf16 of both", argument));
}

void set_activations(Module& root, const MixedPrecision& precision) {
  expect_precision(precision, "set_activations: precision");
  if (precision.activations == DType::f32) return;
  root.visit([&](Module& m) {
    if (auto* const embedding = dynamic_cast<Embedding*>(&m))
      embedding->set_output_dtype(precision.activations);
  });
  cast_at(root, Module::HookPoint::pre_forward, Module::HookPoint::post_backward, precision.activations);
  if (!root.set_output_dtype(precision.output))
    cast_at(root, Module::HookPoint::post_forward, Module::HookPoint::pre_backward, precision.output);
}

void set_precision(Module& root, const MixedPrecision& precision) {
  expect_precision(precision, "set_precision: precision");
  set_activations(root, precision);
  for (Parameter* p : root.parameters()) p->set_dtype(precision.param);
}

}  // namespace weft
