// Transformers, dense or with mixtures of experts, on texts.
#include <fmt/format.h>

#include <algorithm>
#include <cmath>

#include "model_kind.hpp"
#include "train_flags.hpp"
#include "trainer.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/nn/exact.hpp"

namespace weft::tools {
namespace {

std::optional<Tokenizer> tokenizer_of(const TrainConfig& config) {
  if (config.source.tokenizer.empty()) return std::nullopt;
  return Tokenizer::from_file(config.source.tokenizer, "train: tokenizer");
}

class TokenSamples final : public Samples {
 public:
  explicit TokenSamples(const TrainConfig& config)
      : sequence_(config.sequence),
        tokenizer_(tokenizer_of(config)),
        data_(config.source, config.sequence, tokenizer()) {}
  std::int64_t population() const override { return data_.population(); }
  std::int64_t held_out() const override { return data_.held_out_sequences(); }
  BatchRows training(std::span<const std::int64_t> numbers, const BatchCut& cut) const override {
    Sequences rows;
    for (const std::int64_t number : numbers) data_.add(number, rows);
    return cut_up(std::move(rows), cut);
  }
  // The last batch is filled up with sequences without labels.
  std::optional<BatchRows> held_out(std::int64_t first, const BatchCut& cut,
                                    const PartOf& part_of) const override {
    Sequences all;
    for (std::int64_t i = 0; i < cut.global_rows; ++i) data_.add_held_out(first + i, all);
    // All ranks see it: the ends of documents alone, for example, which have no label.
    if (std::ranges::all_of(all.labels, [](std::int64_t l) { return l == CrossEntropy::kIgnore; }))
      return std::nullopt;
    const Chunk part = part_of(cut.global_rows);
    const auto own = [&](const std::vector<std::int64_t>& of) {
      if (of.empty()) return of;
      const auto begin = of.begin() + part.offset * sequence_;
      return std::vector<std::int64_t>(begin, begin + part.size * sequence_);
    };
    return cut_up({own(all.tokens), own(all.labels), own(all.documents)}, cut);
  }
  const Tokenizer* tokenizer() const noexcept override { return tokenizer_ ? &*tokenizer_ : nullptr; }

 private:
  // Micro-batches: parts of this rank's sequences, the first ones larger.
  BatchRows cut_up(Sequences sequences, const BatchCut& cut) const {
    BatchRows rows{.batches = {}, .sequences = std::move(sequences)};
    std::vector<TokenBatch> batches;
    const std::int64_t all = static_cast<std::int64_t>(rows.sequences.tokens.size()) / sequence_;
    for (std::int64_t m = 0, first = 0; m < cut.micro_batches; ++m) {
      const std::int64_t count = all / cut.micro_batches + (m < all % cut.micro_batches ? 1 : 0);
      const std::vector<std::int64_t>& documents = rows.sequences.documents;
      batches.push_back({rows.sequences.tokens.data() + first * sequence_,
                         rows.sequences.labels.data() + first * sequence_, count, sequence_,
                         cut.micro_batches == 1 ? cut.global_rows : count * cut.data_ranks,
                         documents.empty() ? nullptr : documents.data() + first * sequence_});
      first += count;
    }
    rows.batches = std::move(batches);
    return rows;
  }
  std::int64_t sequence_;
  std::optional<Tokenizer> tokenizer_;
  TrainingData data_;
};

// Throws, before any rank is started, for sizes that the model or its batches would refuse.
void expect_exact_config(const TrainConfig& c, int data_ranks) {
  expect_exact_parts("batch: sequences", c.global_batch, data_ranks);
  expect_exact_parts("dim", c.model.dim, c.tp);
  if (c.vocab == "shard") expect_exact_parts("vocabulary entries", c.model.vocab, c.tp);
  if (c.sequence_parallel) expect_exact_parts("seq: tokens of a sequence", c.sequence, c.tp);
}

void expect_experts(const TrainConfig& c) {
  if (c.exact && c.tp > 1)
    bad_training(
        fmt::format("exact with experts over tp={}; expected tp 1, whose hidden features are whole", c.tp));
  if (c.sequence_parallel)
    bad_training("sequence-parallel with experts; tokens are routed with whole samples");
  if (c.router != "softmax" && c.router != "sigmoid")
    bad_training(fmt::format("router is \"{}\"; expected softmax or sigmoid", c.router));
  if (c.router_bias != "none" && c.router_bias != "selects")
    bad_training(fmt::format("router-bias is \"{}\"; expected none or selects", c.router_bias));
  const MoETransformerConfig moe = c.moe_model();
  moe.check();
  if (moe.router.top_k < 1 || moe.router.top_k > moe.experts)
    bad_training(fmt::format("top-k is {}; expected 1 to {} (experts)", moe.router.top_k, moe.experts));
  if (moe.experts % c.ep != 0)
    bad_training(fmt::format("{} experts do not divide into ep={} ({} = {} x {} + {})", moe.experts, c.ep,
                             moe.experts, c.ep, moe.experts / c.ep, moe.experts % c.ep));
  for (const auto& [what, features] :
       {std::pair{"expert-hidden", moe.layer().hidden}, {"shared-hidden", moe.shared_hidden}})
    if (features % c.tp != 0)
      bad_training(fmt::format("{} {} does not divide into tp={}", what, features, c.tp));
  if (!(c.capacity_factor >= 0 && std::isfinite(c.capacity_factor)))
    bad_training(fmt::format("capacity-factor is {}; expected 0 (none) or more", c.capacity_factor));
  if (!(moe.router.aux_loss >= 0 && std::isfinite(moe.router.aux_loss)))
    bad_training(fmt::format("aux-loss is {}; expected a finite number of 0 or more", moe.router.aux_loss));
}

// Throws, before any rank is started, for what a pipeline does not support, and sizes that do not fit.
void expect_pipeline(const TrainConfig& c) {
  const auto refuse = [&](const char* what) {
    bad_training(fmt::format("pp is {} with {}; a pipeline does not support that", c.pp, what));
  };
  if (c.data != "ddp" && c.exact) refuse("--exact and --data fsdp or hsdp");
  const PipelineForm form = c.pipeline_form();
  const PipelineSchedule s =
      form.schedule ? *form.schedule
                    : make_pipeline_schedule(form.kind, c.pp, c.micro_batches, form.stages_per_rank);
  if (!s.trains()) bad_training(fmt::format("pipeline \"{}\" has no backward passes", c.pipeline));
  if (s.ranks != c.pp || s.micro_batches != c.micro_batches)
    bad_training(
        fmt::format("pipeline \"{}\" is for {} ranks and {} micro-batches; pp is {} and "
                    "micro-batches {}",
                    c.pipeline, s.ranks, s.micro_batches, c.pp, c.micro_batches));
  // token_embedding, norm and output_head beside the layers
  if (s.stages() > c.model.layers + 3)
    bad_training(fmt::format("{} stages; the model has {} modules to cut (layers + 3)", s.stages(),
                             c.model.layers + 3));
}

void expect_sizes(const TrainConfig& c, const MeshShape& mesh) {
  c.model.check();
  const auto divides = [&](const char* what, std::int64_t count, const char* remedy = "") {
    if (count % c.tp != 0)
      bad_training(fmt::format("{} {} do not divide into tp={} ({} = {} x {} + {}){}", count, what, c.tp,
                               count, c.tp, count / c.tp, count % c.tp, remedy));
  };
  divides("heads", c.model.heads);
  if (c.model.kv_heads >= c.tp)
    divides("kv_heads", c.model.kv_heads);
  else if (c.tp % c.model.kv_heads != 0)  // ranks share them, as many each
    bad_training(fmt::format("tp={} does not divide into {} kv_heads ({} = {} x {} + {})", c.tp,
                             c.model.kv_heads, c.tp, c.model.kv_heads, c.tp / c.model.kv_heads,
                             c.tp % c.model.kv_heads));
  divides("ffn_hidden columns", c.model.ffn_hidden);
  if (c.vocab != "whole" && c.vocab != "shard")
    bad_training(fmt::format("vocab is \"{}\"; expected whole or shard", c.vocab));
  if (c.vocab == "whole") divides("vocabulary entries", c.model.vocab, "; --vocab shard takes any number");
  if (c.exact) expect_exact_config(c, data_ranks_of(mesh));
  c.source.check();
  if (c.has_experts()) expect_experts(c);
  if (c.pp > 1) expect_pipeline(c);
  if (c.sequence < 1) bad_training(fmt::format("seq is {}; expected 1 or more", c.sequence));
  if (c.sequence > c.model.max_seq)
    bad_training(fmt::format("seq is {}; expected 1 to {} (max-seq)", c.sequence, c.model.max_seq));
  if (c.source.bytes() && c.model.vocab < kBytes)
    bad_training(fmt::format("vocab is {}; expected 256 or more: one for each byte", c.model.vocab));
  if (c.model.vocab < c.tokenizer_size)
    bad_training(fmt::format("vocab is {}; expected {} or more: the tokens of \"{}\"", c.model.vocab,
                             c.tokenizer_size, c.source.tokenizer.string()));
  if (!(c.label_smoothing >= 0 && c.label_smoothing <= 1))
    bad_training(fmt::format("label-smoothing is {}; expected 0 to 1", c.label_smoothing));
  if (c.loss_chunk < 0) bad_training(fmt::format("loss-chunk is {}; expected 0 or more", c.loss_chunk));
  if (c.loss_chunk > 0 && (c.exact || c.pp > 1))
    bad_training(
        fmt::format("loss-chunk is {} with {}; expected 0", c.loss_chunk, c.exact ? "--exact" : "--pp"));
  if (!(c.z_loss >= 0 && std::isfinite(c.z_loss)))
    bad_training(fmt::format("z-loss is {}; expected a finite number of 0 or more", c.z_loss));
}

class TokenKind final : public ModelKind {
 public:
  KindWords words(const TrainConfig& c) const override {
    const std::string one = c.source.bytes() ? "byte" : "token";
    return {.a_step = fmt::format("{} {}s of text", units_per_step(c), one),
            .source = "text " + c.source.text.string(),
            .rate = "tokens",
            .rate_brief = "tok",
            .counted = "tokens",
            .one = one,
            .loss = "nats per " + one,
            .perplexity = true};
  }
  void fill_in(TrainConfig& c) const override {
    TransformerConfig& m = c.model;
    if (m.kv_heads == 0) m.kv_heads = m.heads;
    if (m.ffn_hidden == 0) m.ffn_hidden = TransformerConfig::usual_ffn_hidden(m.dim);
    c.tokenizer_size =
        c.source.tokenizer.empty() ? 0 : Tokenizer::from_file(c.source.tokenizer, "train: tokenizer").size();
    if (m.vocab == 0) m.vocab = c.tokenizer_size > 0 ? c.tokenizer_size : kBytes;
    if (m.max_seq == 0) m.max_seq = std::max<std::int64_t>(c.sequence, 1);
  }
  void check_flags(const TrainConfig& c) const override {
    expect_flags_of_kind(c);
    if (c.domain > 1)
      bad_training(
          fmt::format("domain is {} with --model {}; expected 1: a sequence of tokens is no map, and has no "
                      "rows to cut; --sequence-parallel cuts sequences",
                      c.domain, c.kind));
  }
  void check_sizes(const TrainConfig& c, const MeshShape& mesh) const override { expect_sizes(c, mesh); }
  Recipe recipe(const TrainConfig& c) const override {
    return c.has_experts() ? moe_recipe(c.moe_model()) : transformer_recipe(c.model);
  }
  std::unique_ptr<Samples> samples(const TrainConfig& c, Context&) const override {
    return std::make_unique<TokenSamples>(c);
  }
  std::string identity(const TrainConfig& c) const override {
    const TransformerConfig& m = c.model;
    std::string identity = fmt::format(
        "dim={} layers={} heads={} kv_heads={} ffn={} vocab={} theta={} seq={} {}", m.dim, m.layers, m.heads,
        m.kv_heads, m.ffn_hidden, m.vocab, m.rope_theta, c.sequence, c.source.identity());
    // Values that neither flags nor older checkpoints contain.
    const TransformerConfig usual;
    if (m.head_size != usual.head_size) identity += fmt::format(" head_size={}", m.head_size);
    if (m.norm_eps != usual.norm_eps) identity += fmt::format(" norm_eps={}", m.norm_eps);
    if (m.tied != usual.tied) identity += fmt::format(" tied={}", m.tied);
    if (m.init_std != usual.init_std) identity += fmt::format(" init_std={}", m.init_std);
    if (c.label_smoothing != 0) identity += fmt::format(" label_smoothing={}", c.label_smoothing);
    if (c.z_loss != 0) identity += fmt::format(" z_loss={}", c.z_loss);
    if (c.has_experts()) {
      const MoETransformerConfig& e = c.moe;
      identity += fmt::format(
          " experts={} top_k={} expert_hidden={} shared_hidden={} every={} router={} "
          "router_bias={} aux_loss={} capacity_factor={}",
          e.experts, e.router.top_k, e.expert_hidden, e.shared_hidden, e.every, c.router, c.router_bias,
          e.router.aux_loss, c.capacity_factor);
    }
    return identity;
  }
  std::string table(const TrainConfig& c) const override { return transformer_text(c.model); }
  std::string sample_text(const TrainConfig& c) const override { return transformer_text(c.model); }
  std::int64_t units_per_step(const TrainConfig& c) const override { return c.global_batch * c.sequence; }
  // 6 for each weight by which a token is multiplied, and for each layer 12 for each feature of the positions
  // that it attends to, which are half of them (A. Chowdhery et al., "PaLM", 2022, appendix B, with all
  // positions).
  double flops_per_unit(const TrainConfig& c, std::span<const Parameter* const> parameters) const override {
    double weights = 0;
    for (const Parameter* p : parameters) {
      const std::string& path = p->path();
      if (path.starts_with("token_embedding") && !c.model.tied) continue;  // a row is read
      const bool of_experts = path.find(".experts.") != std::string::npos;
      weights +=
          static_cast<double>(p->global_shape().count()) *
          (of_experts ? static_cast<double>(c.moe.router.top_k) / static_cast<double>(c.moe.experts) : 1);
    }
    const TransformerConfig& m = c.model;
    const std::int64_t width = m.heads * (m.head_size != 0 ? m.head_size : m.dim / m.heads);
    return 6 * weights + 6 * static_cast<double>(m.layers * width * c.sequence);
  }
};

}  // namespace

MoETransformerConfig TrainConfig::moe_model() const {
  MoETransformerConfig c = moe;
  c.transformer = model;
  c.router.scores = router == "sigmoid" ? RouterScores::sigmoid : RouterScores::softmax;
  c.router.bias = router_bias == "selects" ? RouterBias::selects : RouterBias::none;
  if (capacity_factor > 0) {
    c.router.capacity = Capacity::by_weight;
    c.router.capacity_factor = capacity_factor;
  }
  return c;
}

const ModelKind& token_kind() {
  static const TokenKind kind;
  return kind;
}

const ModelKind& kind_of(const TrainConfig& config) {
  return config.kind == "weather" ? weather_kind() : token_kind();
}

}  // namespace weft::tools
