#include "weft/models/moe_transformer.hpp"

#include <fmt/format.h>

#include <utility>

#include "weft/base/error.hpp"

namespace weft {
namespace {

const MoETransformerConfig& checked_moe(const MoETransformerConfig& config) {
  config.check();
  return config;
}

}  // namespace

MoEConfig MoETransformerConfig::layer() const {
  MoEConfig c;
  c.dim = transformer.dim;
  c.hidden = expert_hidden == 0 ? transformer.ffn_hidden : expert_hidden;
  c.experts = experts;
  c.kind = kind;
  c.router = router;
  c.shared_hidden = shared_hidden;
  c.scale_outputs_by_load = scale_outputs_by_load;
  c.float8_dispatch = float8_dispatch;
  c.init = Normal{transformer.init_std};
  c.down_init = transformer.branch_end();
  return c;
}

void MoETransformerConfig::check() const {
  transformer.check();
  layer().check();
  if (every < 1 || every > transformer.layers)
    throw Error(ErrorCode::bad_argument,
                fmt::format("moe: every is {}; expected 1 to {} (layers)", every, transformer.layers));
}

MoEBlock::MoEBlock(const MoETransformerConfig& config, std::shared_ptr<const RopeTables> rope)
    : PreNormBlock(config.transformer, std::move(rope)), mlp(config.layer()) {
  set_mlp(mlp);
}

MoETransformer::MoETransformer(const MoETransformerConfig& config)
    : Transformer(checked_moe(config).transformer,
                  [&config](std::int64_t i,
                            const std::shared_ptr<const RopeTables>& rope) -> std::unique_ptr<Module> {
                    if (config.has_experts(i)) return std::make_unique<MoEBlock>(config, rope);
                    return std::make_unique<TransformerBlock>(config.transformer, rope);
                  }),
      config_(config) {}

}  // namespace weft
