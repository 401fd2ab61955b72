#include "weft/models/moe_transformer.hpp"

#include <fmt/format.h>

#include <bit>
#include <cstdint>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/group/process_group.hpp"
#include "weft/models/build.hpp"

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
  mlp.set_neighbours(&mlp_norm, nullptr);
}

MoETransformer::MoETransformer(const MoETransformerConfig& config)
    : Transformer(checked_moe(config).transformer,
                  [&config](std::int64_t i,
                            const std::shared_ptr<const RopeTables>& rope) -> std::unique_ptr<Module> {
                    if (config.has_experts(i)) return std::make_unique<MoEBlock>(config, rope);
                    return std::make_unique<TransformerBlock>(config.transformer, rope);
                  }),
      config_(config) {
  for (std::size_t i = 0; i < layers.children().size(); ++i)
    if (auto* const block = dynamic_cast<MoEBlock*>(layers.children()[i].second))
      block->mlp.set_neighbours(&block->mlp_norm, i + 1 < layers.children().size()
                                                      ? layers.children()[i + 1].second
                                                      : static_cast<Module*>(&norm));
}

std::vector<LayerBalance> expert_balance(ParallelModel& model) {
  std::vector<LayerBalance> all = expert_balance(*model.model);
  if (!model.stages || model.stages.size() == 1 || all.empty()) return all;
  // Routers of other stages have counted nothing: sums over the stages are the numbers of one of them.
  std::vector<std::int64_t> numbers;
  std::vector<std::size_t> experts;
  model.model->visit([&](Module& m) {
    if (const auto* const moe = dynamic_cast<const MoE*>(&m))
      experts.push_back(static_cast<std::size_t>(moe->config().experts));
  });
  for (std::size_t i = 0; i < all.size(); ++i) {
    RouterReport& r = all[i].report;
    if (!model.is_own(all[i].path)) r = {};
    numbers.insert(numbers.end(),
                   {r.tokens, r.assignments, r.dropped, std::bit_cast<std::int64_t>(r.aux_loss),
                    std::bit_cast<std::int64_t>(r.z_loss)});
    r.counts.resize(experts[i]);
    numbers.insert(numbers.end(), r.counts.begin(), r.counts.end());
  }
  model.stages.group().all_reduce(numbers, numbers).wait();
  auto at = numbers.begin();
  for (LayerBalance& layer : all) {
    RouterReport& r = layer.report;
    r.tokens = *at++, r.assignments = *at++, r.dropped = *at++;
    r.aux_loss = std::bit_cast<double>(*at++);
    r.z_loss = std::bit_cast<double>(*at++);
    for (std::int64_t& count : r.counts) count = *at++;
  }
  return all;
}

}  // namespace weft
