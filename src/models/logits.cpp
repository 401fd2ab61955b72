#include <fmt/format.h>

#include <optional>

#include "models/agreement.hpp"
#include "models/batch.hpp"
#include "weft/host/copy.hpp"
#include "weft/mesh/redistribute.hpp"
#include "weft/models/outputs.hpp"

namespace weft {
namespace {

// A forward pass that keeps nothing, after the ranks with equal rows have agreed on their inputs. `make`
// gives them as a plain Batch; its errors are reported to the other ranks.
template <class Make>
Tensors outputs_of(const char* who, ParallelModel& model, Compute& compute, const std::optional<Error>& fault,
                   const Make& make) {
  std::optional<Error> own = fault;
  Tensors inputs;
  Fnv1a hash;
  try {
    if (!own) {
      const Batch plain = make();
      inputs = placed(who, "", model, compute, plain).inputs;
      add_content(hash, plain);
    }
  } catch (const Error& e) {
    own = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  Numbers least{own ? -1 : 0, content, ~content};
  std::string names;
  for (const DeviceMesh& axes : model.axes_of_equal_rows()) {
    least = least_of(compute, axes, least);
    if (axes.size() > 1)
      names += fmt::format("{}{}={}", names.empty() ? "" : " x ", axes.name(), axes.size());
  }
  if (own) throw Error(*own);
  if (least[0] != 0)
    refuse_batch(
        who,
        fmt::format("another rank of {} was given a batch that does not fit; its own error says why", names));
  if (least[1] != ~least[2]) refuse_batch(who, different_batches(model));
  Frame frame = Frame::inference(compute);
  frame.begin({.training = false, .exact = model.exact});
  Tensors outputs = model.model->forward(inputs, frame);
  for (Tensor& y : outputs)
    for (const DeviceMesh& axes : model.axes_of_equal_rows()) y = redistribute(y, axes, Replicate{});
  return outputs;
}

}  // namespace

Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch,
                      const std::optional<Error>& fault) {
  constexpr const char* kWho = "compute_logits";
  return outputs_of(kWho, model, compute, fault,
                    [&] { return batch_of(kWho, "", model, compute, batch, false); })[0];
}

Tensors compute_outputs(ParallelModel& model, Compute& compute, const Batch& batch,
                        const std::optional<Error>& fault) {
  constexpr const char* kWho = "compute_outputs";
  if (model.stages) refuse_batch(kWho, "the model is a pipeline; expected a whole model");
  Tensors outputs = outputs_of(kWho, model, compute, fault, [&] {
    return Batch{.inputs = batch.inputs, .targets = {}, .global_rows = batch.global_rows};
  });
  for (Tensor& y : outputs) y = to_host(compute.context(), y).with_layout(nullptr);
  return outputs;
}

}  // namespace weft
