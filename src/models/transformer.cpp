#include "weft/models/transformer.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <cmath>
#include <string_view>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/nn/layouts.hpp"
#include "weft/nn/packed_documents.hpp"

namespace weft {

void TransformerConfig::check() const {
  // Far above any model, and low enough that no product of two such numbers overflows and no tree fills the
  // memory.
  constexpr std::int64_t kMostLayers = 10000, kMost = std::int64_t{1} << 30;
  for (const auto& [name, size] : {std::pair{"dim", dim},
                                   {"layers", layers},
                                   {"heads", heads},
                                   {"kv_heads", kv_heads},
                                   {"ffn_hidden", ffn_hidden},
                                   {"vocab", vocab},
                                   {"max_seq", max_seq},
                                   {"head_size", std::max<std::int64_t>(head_size, 1)}}) {
    const std::int64_t most = std::string_view(name) == "layers" ? kMostLayers : kMost;
    if (size < 1)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("transformer: {} is {}; expected at least 1", name, size));
    if (size > most)
      throw Error(ErrorCode::bad_argument,
                  fmt::format("transformer: {} is {}; expected at most {}", name, size, most));
  }
  if (!(rope_theta > 0 && std::isfinite(rope_theta)))
    throw Error(ErrorCode::bad_argument,
                fmt::format("transformer: rope_theta is {}; expected a finite number above 0", rope_theta));
  for (const auto& [name, value] : {std::pair{"norm_eps", norm_eps}, {"init_std", init_std}})
    if (!(value >= 0 && std::isfinite(value)))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("transformer: {} is {}; expected a finite number of 0 or more", name, value));
  if (head_size < 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("transformer: head_size is {}; expected 0 (dim / heads) or more", head_size));
  if (head_size == 0 && dim % heads != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("transformer: dim {} does not divide into heads {}", dim, heads));
  if (heads % kv_heads != 0)
    throw Error(ErrorCode::bad_argument,
                fmt::format("transformer: heads {} do not divide into kv_heads {}", heads, kv_heads));
  if (head_dim() % 2 != 0)
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("transformer: head_dim {} is odd; rotary positions need pairs",
                    head_size != 0 ? std::to_string(head_size)
                                   : fmt::format("= dim {} / heads {} = {}", dim, heads, head_dim())));
}

namespace {

const TransformerConfig& checked(const TransformerConfig& config) {
  config.check();
  return config;
}

}  // namespace

Init TransformerConfig::branch_end() const noexcept {
  return Normal{init_std / std::sqrt(2.0 * static_cast<double>(layers))};
}

PreNormBlock::PreNormBlock(const TransformerConfig& c, std::shared_ptr<const RopeTables> rope)
    : attention_norm(c.dim, c.norm_eps),
      attention({c.dim, c.heads, c.kv_heads, c.head_dim(), Normal{c.init_std}, c.branch_end()},
                std::move(rope)),
      mlp_norm(c.dim, c.norm_eps) {
  add("attention_norm", attention_norm);
  add("attention", attention);
  add("mlp_norm", mlp_norm);
}

void PreNormBlock::set_mlp(Module& mlp) {
  add("mlp", mlp);
  mlp_ = &mlp;
}

TransformerBlock::TransformerBlock(const TransformerConfig& c, std::shared_ptr<const RopeTables> rope)
    : PreNormBlock(c, std::move(rope)), mlp(c.dim, c.ffn_hidden, Normal{c.init_std}, c.branch_end()) {
  set_mlp(mlp);
}

Tensors PreNormBlock::do_forward(Inputs inputs, Frame& frame) {
  expect_count(inputs, 1, "inputs");
  const Tensor& x = inputs[0];
  const Tensors attended = attention.forward(attention_norm.forward(x, frame), frame);
  const Tensor middle = add_tensors(x, attended[0], frame.compute(), TensorName(path(), "x + attention"));
  const Tensors fed = mlp_->forward(mlp_norm.forward(middle, frame), frame);
  return {add_tensors(middle, fed[0], frame.compute(), TensorName(path(), "x + mlp"))};
}

Tensors PreNormBlock::do_backward(Inputs gradients, Frame& frame) {
  expect_count(gradients, 1, "gradients");
  const Tensor& dy = gradients[0];
  const Tensors through_mlp = mlp_norm.backward(mlp_->backward(dy, frame), frame);
  const Tensor dmiddle = add_tensors(dy, through_mlp[0], frame.compute(), TensorName(path(), "d(x + mlp)"));
  const Tensors through_attention = attention_norm.backward(attention.backward(dmiddle, frame), frame);
  return {add_tensors(dmiddle, through_attention[0], frame.compute(), TensorName(path(), "d(x + attention)"),
                      dx_memory())};
}

TokenEmbedding::TokenEmbedding(std::int64_t vocab, std::int64_t dim, Init init)
    : embedding(vocab, dim, init) {
  add("embedding", embedding);
}
Tensors TokenEmbedding::do_forward(Inputs tokens, Frame& frame) { return embedding.forward(tokens, frame); }
Tensors TokenEmbedding::do_backward(Inputs dy, Frame& frame) { return embedding.backward(dy, frame); }

OutputHead::OutputHead(std::int64_t dim, std::int64_t vocab, Init init) : proj(dim, vocab, false, init) {
  add("proj", proj);
}
Tensors OutputHead::do_forward(Inputs x, Frame& frame) { return proj.forward(x, frame); }
Tensors OutputHead::do_backward(Inputs dy, Frame& frame) { return proj.backward(dy, frame); }

Transformer::Transformer(const TransformerConfig& config)
    : Transformer(config, [config](std::int64_t, const std::shared_ptr<const RopeTables>& rope) {
        return std::make_unique<TransformerBlock>(config, rope);
      }) {}

Transformer::Transformer(const TransformerConfig& config, const MakeBlock& make_block)
    : token_embedding(checked(config).vocab, config.dim, Normal{config.init_std}),
      norm(config.dim, config.norm_eps),
      output_head(config.dim, config.vocab, Normal{config.init_std}),
      config_(config) {
  add("token_embedding", token_embedding);
  const auto rope = RopeTables::make(config.max_seq, config.head_dim(), config.rope_theta);
  for (std::int64_t i = 0; i < config.layers; ++i) layers.append(make_block(i, rope));
  add("layers", layers);
  add("norm", norm);
  add("output_head", output_head);
  if (config.tied) output_head.proj.tie_weight(token_embedding.embedding.weight);
}

TransformerBlock& Transformer::block(std::size_t i) {
  return dynamic_cast<TransformerBlock&>(*layers.children().at(i).second);
}

void Transformer::set_rope(std::shared_ptr<const RopeTables> rope) {
  visit([&](Module& m) {
    if (auto* const attention = dynamic_cast<Attention*>(&m)) attention->set_rope(rope);
  });
}

Tensors Transformer::do_forward(Inputs inputs, Frame& frame) {
  if (inputs.size() != 2) expect_count(inputs, 1, "inputs");
  const std::shared_ptr<const PackedDocuments> outer = frame.documents();  // of a module around this one
  frame.set_documents(inputs.size() == 2 ? documents_of(inputs[1], frame) : nullptr);
  const Tensors x = layers.forward(token_embedding.forward(inputs[0], frame), frame);
  Tensors y = output_head.forward(norm.forward(x, frame), frame);
  frame.set_documents(outer);
  return y;
}

std::shared_ptr<const PackedDocuments> Transformer::documents_of(const Tensor& ids, Frame& frame) {
  constexpr const char* kWhat = "transformer: documents";
  layouts::expect_whole_dim(kWhat, ids, "attention inside documents", 1);
  return PackedDocuments::of(frame.compute().context(), ids, kWhat);
}

Tensors Transformer::do_backward(Inputs dlogits, Frame& frame) {
  expect_count(dlogits, 1, "gradients");
  const Tensors dx = norm.backward(output_head.backward(dlogits, frame), frame);
  return token_embedding.backward(layers.backward(dx, frame), frame);
}

}  // namespace weft
