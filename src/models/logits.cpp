#include <fmt/format.h>

#include <optional>

#include "models/agreement.hpp"
#include "models/batch.hpp"
#include "weft/mesh/redistribute.hpp"

namespace weft {

Tensor compute_logits(ParallelModel& model, Compute& compute, const TokenBatch& batch,
                      const std::optional<Error>& fault) {
  constexpr const char* kWho = "compute_logits";
  std::optional<Error> own = fault;
  Tensor tokens;
  Fnv1a hash;
  try {
    if (!own) {
      const Batch plain = batch_of(kWho, "", model, compute, batch, false);
      tokens = placed(kWho, "", model, compute, plain).inputs[0];
      add_content(hash, plain);
    }
  } catch (const Error& e) {
    own = e;
  }
  const auto content = static_cast<std::int64_t>(hash.value);
  const Numbers least = least_of(compute, model.tensor, {own ? -1 : 0, content, ~content});
  if (own) throw Error(*own);
  if (least[0] != 0)
    refuse_batch(
        kWho, fmt::format("another rank of {}={} was given a batch that does not fit; its own error says why",
                          model.tensor.name(), model.tensor.size()));
  if (least[1] != ~least[2]) refuse_batch(kWho, different_batches(model));
  Frame frame = Frame::inference(compute);
  frame.begin({.training = false, .exact = model.exact});
  return redistribute(model.model->forward({tokens}, frame)[0], model.tensor, Replicate{});
}

}  // namespace weft
