// weft sample: text from a checkpoint of weft train, on any mesh.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <set>

#include "base/files/regular_file.hpp"
#include "commands.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
#include "printable.hpp"
#include "ranks_flag.hpp"
#include "trainer.hpp"
#include "weft/models/generate.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/train/checkpoint.hpp"

namespace weft::tools {
namespace {

struct SampleFlags {
  std::filesystem::path folder;
  std::vector<std::string> prompts, stops;
  std::string tokenizer;  // empty: the run's, if it has one
  std::string prompt_file, data = "ddp", weights = "f32", backend = "auto";
  GenerateOptions options{.new_tokens = 256};
  std::int64_t samples = 1;
  int ranks = 0, dp = -1, tp = 1, threads = 0;
  bool exact = false, no_cache = false, average = false, json = false;
};

[[noreturn]] void bad_sample(const std::string& text) {
  throw Error(ErrorCode::bad_argument, "sample: " + text);
}

// Texts as tokens, and back. `tokenizer`: null: bytes.
TokenList tokens_of(const Tokenizer* tokenizer, const std::string& text, const char* flag) {
  TokenList tokens;
  if (tokenizer == nullptr) {
    for (const char c : text) tokens.push_back(static_cast<unsigned char>(c));
    return tokens;
  }
  try {
    for (const std::uint32_t token : tokenizer->encode(text)) tokens.push_back(token);
  } catch (const Error& e) {
    bad_sample(fmt::format("{}: {}", flag, e.what()));
  }
  return tokens;
}
std::string text_of(const Tokenizer* tokenizer, std::span<const std::int64_t> tokens) {
  if (tokenizer != nullptr) return tokenizer->decode(tokens);
  std::string text;
  for (const std::int64_t token : tokens) text += static_cast<char>(token);
  return text;
}

// How many bytes at the end begin a character of UTF-8 that is not whole yet.
std::size_t unfinished(const std::string& text) {
  for (std::size_t back = 1; back <= std::min<std::size_t>(3, text.size()); ++back) {
    const auto byte = static_cast<unsigned char>(text[text.size() - back]);
    if (byte < 0x80) return 0;
    if (byte >= 0xc0) return back < (byte >= 0xf0 ? 4U : byte >= 0xe0 ? 3U : 2U) ? back : 0;
  }
  return 0;
}

// Text for a terminal: line feeds and tabs stay.
std::string shown(const std::string& text) {
  std::string all;
  for (std::size_t at = 0; at < text.size();) {
    const std::size_t end = std::min(text.find_first_of("\n\t", at), text.size());
    all += printable(text.substr(at, end - at));
    if (end < text.size()) all += text[end];
    at = end + 1;
  }
  return all;
}

// The tokenizer that the flags name, or the one of the run; null: bytes are tokens.
std::optional<Tokenizer> tokenizer_of(const SampleFlags& flags, const CheckpointInfo& info) {
  if (!flags.tokenizer.empty()) return Tokenizer::from_file(flags.tokenizer, "sample: --tokenizer");
  const std::filesystem::path file = flags.folder / kTokenizerFile;
  const auto hash = info.extra.find(kTokenizerHash);
  const bool imported = !info.extra.contains("run");  // such a checkpoint has no hash
  std::error_code none;
  if (hash == info.extra.end() && !(imported && std::filesystem::exists(file, none))) return std::nullopt;
  Tokenizer tokenizer = Tokenizer::from_file(file, "sample: tokenizer");
  if (hash != info.extra.end() && hash_text(tokenizer) != hash->second)
    bad_sample(fmt::format("\"{}\" is not the tokenizer of \"{}\"; --tokenizer names another file",
                           file.string(), info.folder.string()));
  return tokenizer;
}

// The model of a checkpoint, from what weft train has written beside the tensors.
TransformerConfig model_of(const CheckpointInfo& info, const std::optional<Tokenizer>& tokenizer) {
  const std::string where = fmt::format("\"{}\"", info.folder.string());
  const auto model = info.extra.find("model");
  if (const auto run = info.extra.find("run"); model == info.extra.end() && run != info.extra.end() &&
                                               run->second.find(" experts=") != std::string::npos)
    bad_sample(where + " is of a mixture of experts, which weft sample does not read");
  if (model == info.extra.end())
    bad_sample(where +
               " does not say which model it is of; expected a checkpoint of this version of weft train");
  const TransformerConfig config = transformer_from_text(model->second, "sample: the model of " + where);
  if (!tokenizer && config.vocab != kBytes)
    bad_sample(fmt::format("{} is of a model of {} tokens; expected {}, one for each byte, or --tokenizer",
                           where, config.vocab, kBytes));
  if (tokenizer && config.vocab < tokenizer->size())
    bad_sample(fmt::format("{} is of a model of {} tokens; the tokenizer has {}", where, config.vocab,
                           tokenizer->size()));
  return config;
}

CheckpointInfo expect_checkpoint(const std::filesystem::path& folder) {
  const std::optional<CheckpointInfo> found = latest_checkpoint(folder);
  if (!found) bad_sample(fmt::format("no checkpoint in \"{}\"", folder.string()));
  return *found;
}

MeshShape mesh_of(const SampleFlags& flags, int ranks) {
  if (flags.tp < 1) bad_sample(fmt::format("--tp is {}; expected 1 or more", flags.tp));
  const int dp = flags.dp == -1 ? std::max(1, ranks / flags.tp) : flags.dp;
  if (dp < 1 || dp * flags.tp != ranks)
    bad_sample(fmt::format("dp {} x tp {} is not {} rank{}", dp, flags.tp, ranks, ranks == 1 ? "" : "s"));
  return {{"dp", dp}, {"tp", flags.tp}};
}

std::vector<std::string> prompts_of(const SampleFlags& flags) {
  std::vector<std::string> texts = flags.prompts;
  if (!flags.prompt_file.empty())
    texts.push_back(read_regular_file(flags.prompt_file,
                                      fmt::format("sample: --prompt-file \"{}\":", flags.prompt_file),
                                      std::size_t{1} << 24));
  if (texts.empty()) texts.emplace_back("\n");
  std::vector<std::string> all;
  for (const std::string& text : texts)
    for (std::int64_t i = 0; i < flags.samples; ++i) all.push_back(text);
  return all;
}

// Bytes of weights that this rank reads for a token: all but an embedding, of which a token reads one row. A
// tied embedding is the head, too.
std::int64_t bytes_read(const ParallelModel& model, DType dtype) {
  std::int64_t bytes = 0;
  for (const Parameter* p : model.parameters())
    if (p->path() != "token_embedding.embedding.weight" || transformer_of(model).config().tied)
      bytes += p->master().count() * size_bytes(dtype);
  return bytes;
}

void say_json(const std::string& prompt, const Generated& made, const Tokenizer* tokenizer) {
  fmt::print("{}\n", nlohmann::json{{"prompt", prompt},
                                    {"text", text_of(tokenizer, made.tokens)},
                                    {"tokens", made.tokens},
                                    {"stopped", made.stopped}}
                         .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

int sample(const SampleFlags& flags) {
  Context context;
  const Membership m = Membership::from_env(context);
  const MeshShape shape = mesh_of(flags, m.size);
  const CheckpointInfo info = expect_checkpoint(flags.folder);
  const std::optional<Tokenizer> own = tokenizer_of(flags, info);
  const Tokenizer* const tokenizer = own ? &*own : nullptr;
  const TransformerConfig config = model_of(info, own);
  const std::vector<std::string> texts = prompts_of(flags);
  ProcessGroup group = ProcessGroup::create(context, flags.backend, m);
  const DeviceMesh mesh(group, shape);
  Compute compute(context, threads_per_rank(flags.threads, m.size));
  BuildOptions build;
  build.data = flags.data == "fsdp" ? DataForm::fsdp : DataForm::ddp;
  build.dtype = flags.weights == "bf16" ? DType::bf16 : DType::f32;
  build.exact = flags.exact ? Exact::yes : Exact::no;
  ParallelModel model = build_parallel_model(config, mesh, compute, build);
  std::optional<Ema> averages;
  if (flags.average) averages.emplace(compute, model.parameters());
  load_checkpoint(flags.folder, model.mesh, *model.model,
                  TrainingState(nullptr, averages ? &*averages : nullptr));
  std::optional<Ema::Swapped> swapped;
  if (averages) swapped.emplace(*averages);

  const bool speaks = group.rank() == 0;
  std::vector<TokenList> prompts;
  for (const std::string& text : texts) prompts.push_back(tokens_of(tokenizer, text, "--prompt"));
  GenerateOptions options = flags.options;
  options.cache = !flags.no_cache;
  for (const std::string& stop : flags.stops) options.stops.push_back(tokens_of(tokenizer, stop, "--stop"));
  // One prompt appears as it grows.
  const bool grows = speaks && !flags.json && texts.size() == 1;
  std::string held;  // bytes that wait for the rest of their character
  if (grows) {
    fmt::print("{}", shown(texts[0]));
    options.on_token = [&held, tokenizer](std::int64_t, std::int64_t token) {
      held += text_of(tokenizer, std::span(&token, 1));
      const std::size_t whole = held.size() - unfinished(held);
      fmt::print("{}", shown(held.substr(0, whole)));
      std::fflush(stdout);
      held.erase(0, whole);
    };
  }
  const auto began = Clock::now();
  const std::vector<Generated> made = generate(model, compute, prompts, options);
  const double passed = std::chrono::duration<double>(Clock::now() - began).count();
  std::size_t count = 0;
  for (const Generated& g : made) count += g.tokens.size();
  if (grows) fmt::print("{}\n", shown(held));
  for (std::size_t i = 0; speaks && !grows && i < made.size(); ++i) {
    if (flags.json)
      say_json(texts[i], made[i], tokenizer);
    else
      fmt::print("--- {} of {}\n{}{}\n", i + 1, made.size(), shown(texts[i]),
                 shown(text_of(tokenizer, made[i].tokens)));
  }
  std::fflush(stdout);
  if (speaks)
    fmt::print(stderr,
               "{} tokens in {:.2f} s, {:.0f} a second; mesh {}; a rank reads {:.1f} MB of weights in "
               "each pass\n",
               count, passed, static_cast<double>(count) / passed, to_string(shape),
               static_cast<double>(bytes_read(model, build.dtype)) / 1e6);
  group.barrier().wait();
  return 0;
}

}  // namespace

void add_sample(CLI::App& app, const std::vector<std::string>& words, Body& chosen) {
  auto flags = std::make_shared<SampleFlags>();
  CLI::App* sub = app.add_subcommand("sample", "Continue texts with a model that weft train has saved");
  sub->footer("Ranks come from weft run, from torchrun's or mpirun's variables, or from --ranks.");
  const auto option = [&](const char* name, auto& value, const char* help) {
    return sub->add_option(name, value, help)
        ->capture_default_str()
        ->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  };
  sub->add_option("folder", flags->folder, "Folder of the checkpoint: --save of weft train")->required();
  sub->add_option("--prompt", flags->prompts,
                  "Text to continue; may be given several times; without: a new line")
      ->allow_extra_args(false);
  option("--prompt-file", flags->prompt_file, "File with a text to continue");
  option("--tokens", flags->options.new_tokens,
         "At most so many tokens, bytes without a tokenizer, behind each prompt")
      ->check(number_at_least(1));
  option("--samples", flags->samples, "Continuations of each prompt")->check(number_at_least(1));
  option("--temperature", flags->options.temperature,
         "Divides the logits: below 1 likelier tokens are preferred; 0: always the likeliest");
  option("--top-k", flags->options.top_k, "Only the k likeliest tokens; 0: all");
  option("--top-p", flags->options.top_p, "Only the likeliest tokens that have this probability together");
  option("--seed", flags->options.seed, "Of the random numbers: the same seed, the same text");
  option("--tokenizer", flags->tokenizer, "A tokenizer.json; without: the one of the run, or bytes");
  sub->add_option("--stop", flags->stops,
                  "A text behind whose tokens a continuation ends; may be given several times")
      ->allow_extra_args(false);
  sub->add_flag("--average", flags->average, "The averages that weft train --ema has made, as the model");
  sub->add_flag("--no-cache", flags->no_cache,
                "Compute all positions again for each token: slower, the same bits");
  sub->add_flag("--exact", flags->exact, "The same bits on every mesh (docs/exact.md)");
  sub->add_flag("--json", flags->json, "A JSON object for each continuation");
  option("--weights", flags->weights, "Dtype in which layers read weights and multiply")
      ->check(CLI::IsMember({"f32", "bf16"}));
  option("--dp", flags->dp, "Data-parallel ranks, which share the prompts; -1: what tp leaves");
  option("--tp", flags->tp, "Tensor-parallel ranks");
  option("--data", flags->data, "What data ranks do with the parameters: ddp, each has all; fsdp, divided")
      ->check(CLI::IsMember({"ddp", "fsdp"}));
  option("--threads", flags->threads, "Threads per rank; 0: WEFT_THREADS, or a share of the cores")
      ->check(CLI::Range(0, 4096));
  option("--ranks", flags->ranks, "Start this many ranks on this host; 0: this process is one")
      ->check(CLI::Range(0, 256));
  option("--backend", flags->backend, "Transport: shm, gloo, mpi-openmpi, mpi-mpich or auto");
  sub->callback([flags, &words, &chosen] {
    chosen = [flags, &words] {
      if (flags->ranks == 0) return sample(*flags);
      expect_no_rank("sample");
      mesh_of(*flags, flags->ranks);
      const CheckpointInfo info = expect_checkpoint(flags->folder);
      model_of(info, tokenizer_of(*flags, info));
      prompts_of(*flags);
      return launch({.ranks = flags->ranks, .tag_output = false}, command_of_a_rank(words));
    };
  });
}

}  // namespace weft::tools
