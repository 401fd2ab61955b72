#include "train_flags.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include <regex>

#include "config_file.hpp"
#include "weft/models/transformer_text.hpp"

namespace weft::tools {
namespace {

// Name, member, help: the parser reads them and to_words writes them.
template <class Visit>
void each_data_flag(DataConfig& c, const Visit& visit) {
  visit("--tokenizer", c.tokenizer,
        "A tokenizer.json of byte pairs, which makes the tokens of a text; without: its bytes");
  visit("--format", c.format,
        "Of --text: text, whose bytes are tokens; uint16, uint32, npy: numbers of tokens; auto: by its name");
  visit("--held-out-file", c.held_out_file, "... or another file for evaluation, of the form of --text");
  visit("--document-end", c.document_end,
        "A text, or the number of a token, behind which a document ends: nothing is predicted over it");
  visit(
      "--document-attention", c.document_attention,
      "With --document-end: inside, the default, attention stays inside documents; across, it sees the whole "
      "sequence");
  visit("--draw", c.draw,
        "Which sequences there are: offsets, from any token on; sequences, one behind the other");
}
template <class Visit>
void each_token_run_flag(TrainConfig& c, const Visit& visit) {
  visit("--seq", c.sequence, "Tokens per sequence");
  visit("--label-smoothing", c.label_smoothing,
        "Of each byte's weight in the loss, what goes to all bytes alike");
  visit("--z-loss", c.z_loss, "Factor of the square of the log of the softmax's sum, in the loss; 0: none");
  visit("--loss-chunk", c.loss_chunk,
        "Tokens of a rank whose logits are in memory at a time; 0: all (docs/recipes.md)");
}
template <class Visit>
void each_map_flag(TrainConfig& c, const Visit& visit) {
  visit("--maps", c.maps.maps,
        "With --model weather: an array of NumPy (samples, channels, rows, columns); without: made-up maps");
  visit("--targets", c.maps.targets, "... an array of the same shape; without: each map's is the next map");
  visit("--map-samples", c.maps.samples, "Samples of made-up maps; 0: 1024");
  visit("--channels", c.maps.channels, "Channels of a map, which is the width of the model; 0: 16");
  visit("--map-rows", c.maps.rows, "Rows of a map; 0: 16");
  visit("--map-columns", c.maps.columns, "Columns of a map; 0: 32");
  visit("--depth", c.weather.depth, "Blocks of a weather model");
  visit("--head-dim", c.weather.head_dim, "Features of each of its heads");
  visit("--local-window", c.weather.local_window, "Rows and columns of a window of neighbouring pixels");
  visit("--global-window", c.weather.global_window, "... of pixels that are spread over the map");
  visit("--mult", c.weather.mult, "Width inside the feed-forward layers, as a multiple of --channels");
  visit("--dropout", c.weather.dropout, "Part of the hidden features that is dropped in training");
  visit("--attention-dropout", c.weather.attention_dropout, "... of the weights of attention");
}
template <class Visit>
void each_run_flag(TrainConfig& c, const Visit& visit) {
  visit("--steps", c.steps, "Steps of the schedule");
  visit("--batch", c.global_batch, "Sequences, or maps, per step, over all data ranks");
  visit("--held-out", c.source.held_out,
        "Fraction of the text, or of the maps, at its end, that is kept for evaluation; 0: none");
  visit("--lr", c.peak_lr, "Highest learning rate");
  visit("--lr-floor", c.floor_lr, "Learning rate at the end; -1: a tenth of --lr");
  visit("--warmup", c.warmup, "Steps until the highest rate; -1: a third of --steps, at most 100");
  visit("--schedule", c.schedule,
        "How the rate falls from --lr: cosine, linear, wsd, rex, constant, or none");
  visit("--decay-steps", c.decay_steps, "Last steps, in which the rate of wsd falls; -1: a fifth of --steps");
  visit("--decay-shape", c.decay_shape, "How it falls then: linear, cosine, or 1-sqrt");
  visit("--weight-decay", c.weight_decay, "Of matrices");
  visit("--groups", c.groups,
        "Parameters with a factor of --lr, or a decay, of their own: PATTERN,...:rate=X:decay=X;...");
  visit("--clip", c.max_norm, "Largest gradient norm; 0: no limit");
  visit("--loss-scale", c.loss_scale, "Dynamic loss scaling, which begins with this; 0: none");
  visit("--freeze", c.freeze, "What is trained when: STEP:frozen:PATTERN or STEP:trained:PATTERN, by commas");
  visit("--ema", c.ema, "Decay of averages of the parameters, which checkpoints hold, too; 0: none");
  visit("--seed", c.seed, "Of weights and batches");
  visit("--threads", c.threads, "Threads per rank; 0: WEFT_THREADS, or a share of the cores");
}
// The model has more members than these: a file's table [model] has all.
template <class Visit>
void each_model_flag(TrainConfig& c, const Visit& visit) {
  visit("--dim", c.model.dim, "Width of the model");
  visit("--layers", c.model.layers, "Blocks");
  visit("--heads", c.model.heads, "Query heads");
  visit("--kv-heads", c.model.kv_heads, "Key and value heads; 0: as many as --heads");
  visit("--ffn", c.model.ffn_hidden, "Width inside the MLP; 0: 8/3 of --dim, rounded up to a multiple of 32");
  visit("--max-seq", c.model.max_seq, "Longest sequence; 0: --seq");
  visit("--vocab-size", c.model.vocab, "Tokens that there are; 0: those of --tokenizer, or 256 for bytes");
}
template <class Visit>
void each_expert_flag(TrainConfig& c, const Visit& visit) {
  visit("--experts", c.moe.experts, "Experts of each block; 0: a dense model");
  visit("--top-k", c.moe.router.top_k, "Experts of each token");
  visit("--expert-hidden", c.moe.expert_hidden, "Width inside each expert; 0: as --ffn");
  visit("--shared-hidden", c.moe.shared_hidden, "Width of an expert that every token uses, too; 0: none");
  visit("--experts-every", c.moe.every, "Only each such block has experts; the others are dense");
  visit("--router", c.router, "Scores of experts: softmax or sigmoid");
  visit("--router-bias", c.router_bias, "none, or selects: a bias of each expert that follows its load");
  visit("--aux-loss", c.moe.router.aux_loss, "Factor of the loss that balances experts");
  visit("--capacity-factor", c.capacity_factor,
        "An expert keeps so many times its even share of the global batch; 0: all");
}

// All that means something for models of tokens alone, beside `kind`.
template <class Visit>
void each_flag_of_tokens(TrainConfig& c, const Visit& visit) {
  visit("--text", c.source.text, "");
  each_data_flag(c.source, visit);
  each_token_run_flag(c, visit);
  each_model_flag(c, visit);
  each_expert_flag(c, visit);
  visit("--sequence-parallel", c.sequence_parallel, "");
  visit("--vocab", c.vocab, "");
  visit("--float8", c.float8, "");
  visit("--pipeline", c.pipeline, "");
  visit("--stages-per-rank", c.stages_per_rank, "");
}

template <class Value>
std::string shown(const Value& value) {
  if constexpr (requires { value.string(); })
    return fmt::format("\"{}\"", value.string());
  else if constexpr (requires { value.c_str(); })
    return fmt::format("\"{}\"", value);
  else
    return fmt::format("{}", value);
}

}  // namespace

void expect_flags_of_kind(const TrainConfig& config) {
  TrainConfig given = config, usual;
  std::vector<std::pair<std::string, std::string>> defaults;
  const auto keep = [&](const char* flag, const auto& value, const char*) {
    defaults.emplace_back(std::string_view(flag).substr(2), shown(value));
  };
  std::size_t at = 0;
  const char* of = config.is_of_maps() ? "maps" : "tokens";
  const auto compare = [&](const char*, const auto& value, const char*) {
    const auto& [flag, normal] = defaults[at++];
    if (shown(value) != normal)
      bad_training(fmt::format("{} is {} with --model {}, a model of {} that has no such option; expected {}",
                               flag, shown(value), config.kind, of, normal));
  };
  if (config.is_of_maps()) {
    each_flag_of_tokens(usual, keep);
    each_flag_of_tokens(given, compare);
  } else {
    each_map_flag(usual, keep);
    each_expert_flag(usual, keep);
    each_map_flag(given, compare);
    of = "tokens without experts";
    if (!config.has_experts()) each_expert_flag(given, compare);
  }
}

void add_train_flags(CLI::App& sub, TrainConfig& config, ConfigFile& file) {
  file.take(sub.add_option("--text", config.source.text, "Text, or file of tokens, to learn")
                ->check(CLI::ExistingFile)
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.source.text);
  std::vector<std::string> of_model;
  const auto add = [&](const char* flag, auto& member, const char* help) {
    CLI::Option* added = sub.add_option(flag, member, help)
                             ->capture_default_str()
                             ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    file.take(added, &member);
  };
  each_data_flag(config.source, add);
  each_run_flag(config, add);
  each_token_run_flag(config, add);
  each_map_flag(config, add);
  file.take(sub.add_option("--optimizer", config.optimizer, "adamw, sgd, lion, schedule-free or muon")
                ->check(CLI::IsMember({"adamw", "sgd", "lion", "schedule-free", "muon"}))
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.optimizer);
  file.take(sub.add_option("--model", config.kind,
                           "dense, or moe: mixtures of experts, 8 unless --experts says more "
                           "(docs/expert_parallel.md), or weather: maps (docs/domain_parallel.md); empty: by "
                           "--experts")
                ->check(CLI::IsMember({"dense", "moe", "weather"}))
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.kind);
  each_expert_flag(config, add);
  file.take(sub.add_flag("--sequence-parallel", config.sequence_parallel,
                         "Norms and residual sums on a part of the sequence in each tensor rank"),
            &config.sequence_parallel);
  file.take(sub.add_flag("--exact", config.exact,
                         "The same bits of losses, gradients and parameters on every mesh (docs/exact.md)"),
            &config.exact);
  file.take(sub.add_option("--vocab", config.vocab,
                           "Embedding and head: whole, with logits gathered, or shard, over the vocabulary")
                ->check(CLI::IsMember({"whole", "shard"}))
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.vocab);
  const auto add_dtype = [&](const char* flag, std::string& member, const char* help) {
    file.take(sub.add_option(flag, member, help)
                  ->check(CLI::IsMember({"f32", "bf16"}))
                  ->capture_default_str()
                  ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
              &member);
  };
  add_dtype("--weights", config.weights, "Dtype in which layers read weights and multiply; masters are f32");
  add_dtype("--activations", config.activations,
            "Dtype of what goes from layer to layer, and over tp: f32, or bf16 with --weights bf16");
  file.take(sub.add_option("--float8", config.float8,
                           "Linear layers in eight bits (docs/float8.md): none, tensorwise, rowwise or "
                           "rowwise_gw_hp")
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.float8);
  file.take(sub.add_option("--float8-scales", config.float8_scales,
                           "Of activations and gradients: own, of each rank's part, or whole, over all ranks")
                ->check(CLI::IsMember({"own", "whole"}))
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.float8_scales);
  file.take(sub.add_option("--ac", config.ac,
                           "Activation checkpointing: none; full, each block runs again in backward; "
                           "selective, each attention")
                ->check(CLI::IsMember({"none", "full", "selective"}))
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.ac);
  add("--ac-every", config.ac_every, "With --ac full: only the first of so many blocks");
  each_model_flag(config, [&](const char* flag, auto& member, const char* help) {
    add(flag, member, help);
    of_model.emplace_back(std::string_view(flag).substr(2));
  });
  file.take_table(
      "model", of_model,
      [&config](const std::string& text, const std::string& path) {
        // fill_in() gives max_seq and vocab values.
        constexpr std::int64_t kUnnamed = (std::int64_t{1} << 30) - 1;
        TransformerConfig initial = config.model;
        if (initial.max_seq == 0) initial.max_seq = kUnnamed;
        if (initial.vocab == 0) initial.vocab = kUnnamed;
        config.model = transformer_from_text(text, path, initial);
        if (config.model.max_seq == kUnnamed) config.model.max_seq = 0;
        if (config.model.vocab == kUnnamed) config.model.vocab = 0;
        // Sizes that follow others do so behind the command line, which may change the others: fill_in().
        const auto named = [&](const char* key) {
          return std::regex_search(text, std::regex(fmt::format("(^|[\n{{,]) *\"?{}\"? *=", key)));
        };
        if (!named("kv_heads") && initial.kv_heads == 0) config.model.kv_heads = 0;
        if (!named("ffn_hidden") && initial.ffn_hidden == 0) config.model.ffn_hidden = 0;
      },
      [&config] {
        return (config.is_of_maps() ? ""
                                    : "# The model, as weft_transformer_create_from_text and "
                                      "transformer_from_text read it.\n") +
               kind_of(config).table(config);
      });
}

void arrange_tables(ConfigFile& file) {
  file.arrange("model", {{"kind", "model"},
                         {"channels", "channels"},
                         {"depth", "depth"},
                         {"head_dim", "head-dim"},
                         {"local_window", "local-window"},
                         {"global_window", "global-window"},
                         {"mult", "mult"},
                         {"dropout", "dropout"},
                         {"attention_dropout", "attention-dropout"},
                         {"experts", "experts"},
                         {"top_k", "top-k"},
                         {"expert_hidden", "expert-hidden"},
                         {"shared_hidden", "shared-hidden"},
                         {"experts_every", "experts-every"},
                         {"router", "router"},
                         {"router_bias", "router-bias"},
                         {"aux_loss", "aux-loss"},
                         {"capacity_factor", "capacity-factor"}});
  file.arrange("parallelism", {{"ranks", "ranks"},
                               {"data", "dp"},
                               {"tensor", "tp"},
                               {"domain", "domain"},
                               {"expert", "ep"},
                               {"pipeline", "pp"},
                               {"schedule", "pipeline"},
                               {"stages_per_rank", "stages-per-rank"},
                               {"micro_batches", "micro-batches"},
                               {"parameters", "data"},
                               {"replicate", "replicate"},
                               {"sequence_parallel", "sequence-parallel"},
                               {"vocab", "vocab"}});
  file.arrange("optimizer", {{"kind", "optimizer"},
                             {"lr", "lr"},
                             {"lr_floor", "lr-floor"},
                             {"warmup", "warmup"},
                             {"schedule", "schedule"},
                             {"decay_steps", "decay-steps"},
                             {"decay_shape", "decay-shape"},
                             {"weight_decay", "weight-decay"},
                             {"groups", "groups"},
                             {"clip", "clip"},
                             {"loss_scale", "loss-scale"},
                             {"freeze", "freeze"},
                             {"ema", "ema"}});
  file.arrange("data", {{"text", "text"},
                        {"maps", "maps"},
                        {"targets", "targets"},
                        {"map_samples", "map-samples"},
                        {"map_rows", "map-rows"},
                        {"map_columns", "map-columns"},
                        {"tokenizer", "tokenizer"},
                        {"format", "format"},
                        {"held_out", "held-out"},
                        {"held_out_file", "held-out-file"},
                        {"document_end", "document-end"},
                        {"document_attention", "document-attention"},
                        {"draw", "draw"}});
  file.arrange("eval", {{"every", "eval-every"},
                        {"batches", "eval-batches"},
                        {"patience", "patience"},
                        {"least_gain", "least-gain"}});
  file.arrange("checkpoint", {{"folder", "save"},
                              {"every", "save-every"},
                              {"minutes", "save-minutes"},
                              {"keep", "keep"},
                              {"background", "async-save"},
                              {"resume", "resume"},
                              {"overwrite", "overwrite"},
                              {"init_from", "init-from"},
                              {"init_except", "init-except"},
                              {"init_remap", "init-remap"}});
}

std::vector<std::string> to_words(const TrainConfig& config) {
  TrainConfig copy = config;
  std::vector<std::string> words{
      "--optimizer", config.optimizer, "--weights",  config.weights,
      "--ac",        config.ac,        "--ac-every", std::to_string(config.ac_every),
      "--model",     config.kind};
  const auto add = [&](const char* flag, const auto& member, const char*) {
    words.emplace_back(flag);
    if constexpr (requires { member.string(); })
      words.push_back(member.string());
    else
      words.push_back(fmt::format("{}", member));
  };
  each_run_flag(copy, add);
  if (config.exact) words.emplace_back("--exact");
  if (config.is_of_maps()) {
    each_map_flag(copy, add);
    return words;
  }
  words.insert(words.end(), {"--text", config.source.text.string()});
  each_data_flag(copy.source, add);
  each_token_run_flag(copy, add);
  if (config.has_experts()) each_expert_flag(copy, add);
  if (config.sequence_parallel) words.emplace_back("--sequence-parallel");
  words.insert(words.end(), {"--vocab", config.vocab, "--activations", config.activations, "--float8",
                             config.float8, "--float8-scales", config.float8_scales});
  return words;
}

}  // namespace weft::tools
