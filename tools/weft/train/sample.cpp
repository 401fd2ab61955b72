// weft sample: text from a checkpoint of weft train, on any mesh.
#include <fmt/format.h>
#include <CLI/CLI.hpp>

#include <algorithm>
#include <memory>
#include <nlohmann/json.hpp>
#include <optional>
#include <span>
#include <thread>
#include <variant>

#include "base/cpu/peak.hpp"
#include "base/files/regular_file.hpp"
#include "commands.hpp"
#include "launcher.hpp"
#include "number_flag.hpp"
#include "printable.hpp"
#include "ranks_flag.hpp"
#include "trainer.hpp"
#include "weft/checkpoint/reader.hpp"
#include "weft/models/generate.hpp"
#include "weft/models/moe_transformer.hpp"
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

// Behind the first of the stops that ends; nothing if there is none.
std::optional<std::size_t> end_of_stop(const std::string& text, std::span<const std::string> stops) {
  std::optional<std::size_t> first;
  for (const std::string& stop : stops)
    if (const std::size_t at = text.find(stop); at != std::string::npos)
      first = std::min(first.value_or(text.size()), at + stop.size());
  return first;
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
  std::error_code none;
  std::filesystem::path file = flags.folder / kTokenizerFile;
  if (!std::filesystem::exists(file, none))  // the folder is that of a step: the run is around it
    file = std::filesystem::absolute(info.folder, none).parent_path() / kTokenizerFile;
  const auto hash = info.extra.find(kTokenizerHash);
  const bool imported = !info.extra.contains("run");  // such a checkpoint has no hash
  if (hash == info.extra.end() && !(imported && std::filesystem::exists(file, none))) return std::nullopt;
  Tokenizer tokenizer = Tokenizer::from_file(file, "sample: tokenizer");
  if (hash != info.extra.end() && hash_text(tokenizer) != hash->second)
    bad_sample(fmt::format("\"{}\" is not the tokenizer of \"{}\"; --tokenizer names another file",
                           file.string(), info.folder.string()));
  return tokenizer;
}

// A dense model, or one with experts.
using SampledModel = std::variant<TransformerConfig, MoETransformerConfig>;

// The model of a checkpoint, from what weft train has written beside the tensors.
SampledModel model_of(const CheckpointInfo& info, const std::optional<Tokenizer>& tokenizer) {
  const std::string where = fmt::format("\"{}\"", info.folder.string());
  auto model = info.extra.find("model");
  const auto run = info.extra.find("run");
  const bool experts = model == info.extra.end() && run != info.extra.end() &&
                       (model = info.extra.find(kExpertsTransformer)) != info.extra.end();
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
  if (experts) return experts_of_identity(run->second, config, "sample: the run of " + where);
  return config;
}

ParallelModel built_of(const SampledModel& config, const DeviceMesh& mesh, Compute& compute,
                       const BuildOptions& options) {
  if (const auto* const experts = std::get_if<MoETransformerConfig>(&config))
    return build_parallel_model(moe_recipe(*experts), mesh, compute, options);
  return build_parallel_model(std::get<TransformerConfig>(config), mesh, compute, options);
}

CheckpointInfo expect_checkpoint(const std::filesystem::path& folder) {
  std::optional<CheckpointInfo> found = latest_checkpoint(folder);
  std::error_code none;
  if (!found && std::filesystem::exists(folder / "index.json", none))  // of a step
    found = CheckpointReader::open(folder).info();
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
  if (std::ranges::count(flags.stops, "") > 0) bad_sample("--stop is empty; expected a text");
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

// Bytes of weights that this rank reads for a token: all but an embedding, of which a token reads one row,
// and experts that the token does not use. A tied embedding is the head, too.
std::int64_t bytes_read(const ParallelModel& model, const SampledModel& config, DType dtype) {
  const auto* const moe = std::get_if<MoETransformerConfig>(&config);
  const bool tied = moe != nullptr ? moe->transformer.tied : std::get<TransformerConfig>(config).tied;
  std::int64_t bytes = 0;
  for (const Parameter* p : model.parameters()) {
    if (p->path() == "token_embedding.embedding.weight" && !tied) continue;
    std::int64_t count = p->master().count();
    if (moe != nullptr && p->path().find(".experts.") != std::string::npos)
      count = count / moe->experts * moe->router.top_k;
    bytes += count * size_bytes(dtype);
  }
  return bytes;
}

void say_json(const std::string& prompt, const std::string& text, const Generated& made) {
  fmt::print(
      "{}\n",
      nlohmann::json{{"prompt", prompt}, {"text", text}, {"tokens", made.tokens}, {"stopped", made.stopped}}
          .dump(-1, ' ', false, nlohmann::json::error_handler_t::replace));
}

int sample(const SampleFlags& flags) {
  Context context;
  const Membership m = Membership::from_env(context);
  const MeshShape shape = mesh_of(flags, m.size);
  const CheckpointInfo info = expect_checkpoint(flags.folder);
  const std::optional<Tokenizer> own = tokenizer_of(flags, info);
  const Tokenizer* const tokenizer = own ? &*own : nullptr;
  const SampledModel config = model_of(info, own);
  const std::vector<std::string> texts = prompts_of(flags);
  ProcessGroup group = ProcessGroup::create(context, flags.backend, m);
  const DeviceMesh mesh(group, shape);
  Compute compute(context, threads_per_rank(flags.threads, m.size));
  BuildOptions build;
  build.data = flags.data == "fsdp" ? DataForm::fsdp : DataForm::ddp;
  build.dtype = flags.weights == "bf16" ? DType::bf16 : DType::f32;
  build.exact = flags.exact ? Exact::yes : Exact::no;
  ParallelModel model = built_of(config, mesh, compute, build);
  std::optional<Ema> averages;
  if (flags.average &&
      std::ranges::none_of(CheckpointReader::open(info.folder).names(),
                           [](const auto& name) { return name.starts_with("ema.average."); }))
    bad_sample(fmt::format("--average: \"{}\" has no averages; expected a run of weft train --ema",
                           info.folder.string()));
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
  if (!flags.stops.empty())
    options.stop_when = [&](std::int64_t, std::span<const std::int64_t> tokens) {
      return end_of_stop(text_of(tokenizer, tokens), flags.stops).has_value();
    };
  // One prompt appears as it grows.
  const bool grows = speaks && !flags.json && texts.size() == 1;
  std::string grown;
  std::size_t done = 0;  // so much of it is printed; bytes wait for the rest of their character
  const auto print_to = [&](std::size_t end) {
    fmt::print("{}", shown(grown.substr(done, end - done)));
    std::fflush(stdout);
    done = end;
  };
  if (grows) {
    fmt::print("{}", shown(texts[0]));
    options.on_token = [&](std::int64_t, std::int64_t token) {
      grown += text_of(tokenizer, std::span(&token, 1));
      print_to(end_of_stop(grown, flags.stops).value_or(grown.size() - unfinished(grown)));
    };
  }
  // The last token may have more than the end of a stop; that is left out.
  const auto text_made = [&](const Generated& g) {
    const std::string text = text_of(tokenizer, g.tokens);
    return text.substr(0, end_of_stop(text, flags.stops).value_or(text.size()));
  };
  const auto began = Clock::now();
  const std::vector<Generated> made = generate(model, compute, prompts, options);
  const double passed = std::chrono::duration<double>(Clock::now() - began).count();
  std::size_t count = 0;
  for (const Generated& g : made) count += g.tokens.size();
  if (grows) {
    print_to(end_of_stop(grown, flags.stops).value_or(grown.size()));
    fmt::print("\n");
  }
  for (std::size_t i = 0; speaks && !grows && i < made.size(); ++i) {
    if (flags.json)
      say_json(texts[i], text_made(made[i]), made[i]);
    else
      fmt::print("--- {} of {}\n{}{}\n", i + 1, made.size(), shown(texts[i]), shown(text_made(made[i])));
  }
  std::fflush(stdout);
  if (speaks) {
    // A pass makes one token of each sample, and its time is at least that of reading the weights.
    const double mbytes = static_cast<double>(bytes_read(model, config, build.dtype)) / 1e6,
                 speed =
                     peak_read_gbytes(static_cast<int>(std::max(1U, std::thread::hardware_concurrency()))),
                 passes = speed * 1e3 / (mbytes * m.size);
    fmt::print(stderr,
               "{} tokens in {:.2f} s, {:.0f} a second; mesh {}; a rank reads {:.1f} MB of weights in "
               "each pass;\n  at {:.1f} GB/s, which the memory of this host gives, that is at most {:.0f} a "
               "second\n",
               count, passed, static_cast<double>(count) / passed, to_string(shape), mbytes, speed,
               passes * static_cast<double>(made.size()));
  }
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
  sub->add_option("folder", flags->folder,
                  "Folder of the checkpoint: --save of weft train, or that of a step in it")
      ->required();
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
                  "A text behind which a continuation ends; may be given several times")
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
      return launch({.ranks = flags->ranks, .tag_output = false}, command_of_a_rank(words, flags->ranks));
    };
  });
}

}  // namespace weft::tools
