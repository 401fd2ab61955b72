#include "train_flags.hpp"

#include <fmt/format.h>

#include <CLI/CLI.hpp>

#include "config_file.hpp"

namespace weft::tools {
namespace {

// Name, member, help: read by the parser and written back by to_words.
template <class Visit>
void each_flag(TrainConfig& c, const Visit& visit) {
  visit("--steps", c.steps, "Steps of the schedule");
  visit("--batch", c.global_batch, "Sequences per step, over all data ranks");
  visit("--seq", c.sequence, "Bytes per sequence");
  visit("--lr", c.peak_lr, "Highest learning rate");
  visit("--lr-floor", c.floor_lr, "Learning rate at the end");
  visit("--warmup", c.warmup, "Steps until the highest rate; -1: a third of --steps, at most 100");
  visit("--weight-decay", c.weight_decay, "Of matrices");
  visit("--clip", c.max_norm, "Largest gradient norm");
  visit("--seed", c.seed, "Of weights and batches");
  visit("--threads", c.threads, "Threads per rank; 0: WEFT_THREADS, or a share of the cores");
  visit("--dim", c.model.dim, "Width of the model");
  visit("--layers", c.model.layers, "Blocks");
  visit("--heads", c.model.heads, "Query heads");
  visit("--kv-heads", c.model.kv_heads, "Key and value heads");
  visit("--ffn", c.model.ffn_hidden, "Width inside the MLP");
  visit("--max-seq", c.model.max_seq, "Longest sequence");
}

}  // namespace

void add_train_flags(CLI::App& sub, TrainConfig& config, ConfigFile& file) {
  file.take(sub.add_option("--text", config.text, "Text to learn")
                ->check(CLI::ExistingFile)
                ->capture_default_str()
                ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
            &config.text);
  each_flag(config, [&](const char* flag, auto& member, const char* help) {
    file.take(sub.add_option(flag, member, help)
                  ->capture_default_str()
                  ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast),
              &member);
  });
}

std::vector<std::string> to_words(const TrainConfig& config) {
  TrainConfig copy = config;
  std::vector<std::string> words{"--text", config.text.string()};
  each_flag(copy, [&](const char* flag, const auto& member, const char*) {
    words.emplace_back(flag);
    words.push_back(fmt::format("{}", member));
  });
  return words;
}

}  // namespace weft::tools
