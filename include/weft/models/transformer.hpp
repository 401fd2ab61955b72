// A decoder-only transformer: pre-norm blocks of grouped-query attention and SwiGLU.
#pragma once

#include <functional>
#include <memory>

#include "weft/nn/activation.hpp"
#include "weft/nn/attention.hpp"
#include "weft/nn/embedding.hpp"
#include "weft/nn/linear.hpp"
#include "weft/nn/module.hpp"
#include "weft/nn/norm.hpp"

namespace weft {

struct TransformerConfig {
  std::int64_t dim = 256, layers = 4, heads = 8, kv_heads = 4, ffn_hidden = 768, vocab = 256, max_seq = 512;
  std::int64_t head_size = 0;  ///< features of a head; 0: dim / heads
  double rope_theta = 10000.0, norm_eps = 1e-5;
  bool tied = false;  ///< the head uses the embedding's weight
  /// standard deviation of initial weights; for o_proj and down_proj divided by sqrt(2·layers)
  double init_std = 0.02;

  std::int64_t head_dim() const noexcept { return head_size != 0 ? head_size : dim / heads; }
  /// The usual width inside the MLP for a `dim`: 8/3 dim, rounded up to a multiple of 32. Then SwiGLU's three
  /// matrices have as many weights as the two matrices of an MLP of width 4 dim (Shazeer, "GLU Variants
  /// Improve Transformer", 2020).
  static std::int64_t usual_ffn_hidden(std::int64_t dim) noexcept { return (8 * dim / 3 + 31) / 32 * 32; }
  /// The initial values of a matrix whose result is added to x: smaller, so that the sum's variance does not
  /// grow with depth.
  Init branch_end() const noexcept;
  /// Throws bad_argument if sizes do not fit; the text shows them: `transformer: dim 30 does not divide into
  /// heads 4`.
  void check() const;
};

/// x + attention(attention_norm(x)), then x + mlp(mlp_norm(x)), with any module as mlp.
class PreNormBlock : public Module {
 public:
  RMSNorm attention_norm;
  Attention attention;
  RMSNorm mlp_norm;

  SpaceRule space_rule(const DeviceMesh&, std::span<const int>) const override {
    return {SpaceRule::Kind::any_part};  // residual sums
  }

 protected:
  PreNormBlock(const TransformerConfig& config, std::shared_ptr<const RopeTables> rope);
  /// Registers the derived class's member, the last child.
  void set_mlp(Module& mlp);

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  Module* mlp_ = nullptr;
};

/// The block of a dense model.
class TransformerBlock : public PreNormBlock {
 public:
  TransformerBlock(const TransformerConfig& config, std::shared_ptr<const RopeTables> rope);
  SwiGLU mlp;
  bool has_exact_rule() const override { return typeid(*this) == typeid(TransformerBlock); }
};

/// token_embedding.embedding
class TokenEmbedding : public Module {
 public:
  TokenEmbedding(std::int64_t vocab, std::int64_t dim, Init init);
  Embedding embedding;
  bool has_exact_rule() const override { return typeid(*this) == typeid(TokenEmbedding); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

/// output_head.proj
class OutputHead : public Module {
 public:
  OutputHead(std::int64_t dim, std::int64_t vocab, Init init);
  Linear proj;
  bool has_exact_rule() const override { return typeid(*this) == typeid(OutputHead); }
  bool set_output_dtype(DType dtype) override { return proj.set_output_dtype(dtype); }

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
};

/// tokens: i64 (batch, sequence) → logits: (batch, sequence, vocab). A second input may say which document
/// each token belongs to, i64 (batch, sequence): attention then stays inside documents (PackedDocuments in
/// weft/nn/packed_documents.hpp). It has no gradient, and each rank needs it for whole sequences.
///
/// Paths: token_embedding.embedding.weight,
/// layers.N.{attention_norm, attention.{q,k,v,o}_proj, mlp_norm, mlp.{gate,up,down}_proj}.weight,
/// norm.weight, output_head.proj.weight (tied: the embedding's).
class Transformer : public Module {
 public:
  explicit Transformer(const TransformerConfig& config);

  TokenEmbedding token_embedding;
  Sequential layers;
  RMSNorm norm;
  OutputHead output_head;

  const TransformerConfig& config() const noexcept { return config_; }
  bool set_output_dtype(DType dtype) override { return output_head.set_output_dtype(dtype); }
  /// Throws std::bad_cast if the block is of another kind.
  TransformerBlock& block(std::size_t i);
  /// Replaces the rotary tables of every block, to compare with tables of another program.
  void set_rope(std::shared_ptr<const RopeTables> rope);
  bool has_exact_rule() const override { return typeid(*this) == typeid(Transformer); }

 protected:
  /// Makes block i; the tables are for all blocks.
  using MakeBlock =
      std::function<std::unique_ptr<Module>(std::int64_t i, const std::shared_ptr<const RopeTables>& rope)>;
  Transformer(const TransformerConfig& config, const MakeBlock& make_block);

 private:
  Tensors do_forward(Inputs x, Frame& frame) override;
  Tensors do_backward(Inputs dy, Frame& frame) override;
  static std::shared_ptr<const PackedDocuments> documents_of(const Tensor& ids, Frame& frame);
  TransformerConfig config_;
};

}  // namespace weft
