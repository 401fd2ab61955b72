// A loss of the outputs of a model's last layer, for some tokens at a time.
#pragma once

#include <cstdint>
#include <memory>

#include "weft/nn/module.hpp"

namespace weft {

/// Passes of the last layer of a model of tokens, such as the head of a transformer, which compute the loss
/// of its outputs and never hold the outputs of all tokens. With a large vocabulary, the logits of all tokens
/// and their gradient are the largest tensors of a step (see vocab_parallel_linear_cross_entropy(), which
/// does the same on views).
///
///     auto chunked = std::make_shared<LossInChunks>(1024);
///     model.output_head.proj.set_passes(chunked);
///     const LossInChunks::Given given = chunked->give(cross_entropy, {labels, valid});
///     const Tensor loss = model.forward({tokens}, frame)[0];
///     model.backward({d_loss}, frame);  // d_loss: f64 (1)
///
/// While a loss is given, the layer's forward takes x (rows, positions, …) and returns the loss, f64 (1); its
/// backward takes d(loss). Both compute the layer's output for as many positions at a time as make at most
/// `tokens` tokens of a rank, and for at least one position. The backward pass computes the outputs again:
/// a step has one more product of the layer. Without a loss the layer computes as before.
///
/// Outputs, their gradients and dx have the same bits as without chunks. The loss and the gradients of the
/// layer's parameters are sums over chunks, so they are rounded in another order. All ranks that split the
/// layer must have equal `tokens`.
class LossInChunks final : public Passes {
 public:
  /// Throws bad_argument if `tokens` is less than 1.
  explicit LossInChunks(std::int64_t tokens);
  std::int64_t tokens() const noexcept { return tokens_; }

  /// The loss of all passes while it lives: it must live until their backward passes are done.
  class [[nodiscard]] Given {
   public:
    Given(Given&& other) noexcept = default;
    ~Given();

   private:
    friend class LossInChunks;
    struct Loss;
    explicit Given(std::shared_ptr<Loss> loss) : loss_(std::move(loss)) {}
    std::shared_ptr<Loss> loss_;
  };
  /// `loss` must outlive the Given. `inputs`: what its forward takes after the layer's output; the
  /// last tensor is the number of counted elements, and the others have the rows and positions of x as their
  /// first two dimensions. Throws bad_argument if `inputs` is empty, or if a loss is given already.
  Given give(Module& loss, Tensors inputs) const;

 private:
  Tensors forward(Module& module, Inputs x, Frame& frame) const override;
  Tensors backward(Module& module, Inputs dy, Frame& frame) const override;

  const std::int64_t tokens_;
  const std::shared_ptr<Given::Loss> given_;
};

}  // namespace weft
