// weft checkpoint: lists a checkpoint, verifies it, compares two, and writes all of one to a file.
#include "weft/checkpoint/checkpoint.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>
#include <fnmatch.h>

#include <CLI/CLI.hpp>
#include <algorithm>
#include <filesystem>
#include <memory>
#include <nlohmann/json.hpp>
#include <set>
#include <string>
#include <vector>

#include "base/files/new_file.hpp"
#include "base/files/regular_file.hpp"
#include "commands.hpp"
#include "difference.hpp"
#include "name_table.hpp"
#include "number_flag.hpp"
#include "printable.hpp"
#include "weft/base/error.hpp"
#include "weft/checkpoint/convert.hpp"
#include "weft/checkpoint/reader.hpp"
#ifdef WEFT_HAVE_TRAIN
#include "weft/models/llama.hpp"
#include "weft/models/transformer_text.hpp"
#include "weft/train/checkpoint.hpp"
#endif

namespace weft::tools {
namespace {

struct CheckpointFlags {
  std::string path, other, file;
  std::vector<std::string> only;
  std::string strip;
  double tolerance = 0;
  std::string names, dtype;
  int files = 1;
  bool json = false, overwrite = false, old_names = false, ema = false;
  std::string as;  // "llama": the form of another program
};

bool wanted(const CheckpointFlags& flags, const std::string& name) {
  return flags.only.empty() ||
         std::any_of(flags.only.begin(), flags.only.end(),
                     [&](const std::string& glob) { return fnmatch(glob.c_str(), name.c_str(), 0) == 0; });
}

std::int64_t bytes_of(const CheckpointTensor& t) { return t.shape.count() * size_bytes(t.dtype); }

// 1.5 MB
std::string size_text(std::int64_t bytes) {
  constexpr const char* kUnits[] = {"B", "KB", "MB", "GB", "TB", "PB", "EB"};
  double size = static_cast<double>(bytes);
  std::size_t unit = 0;
  while (size >= 1000 && unit + 1 < std::size(kUnits)) {
    size /= 1000;
    ++unit;
  }
  return unit == 0 ? fmt::format("{} B", bytes) : fmt::format("{:.3g} {}", size, kUnits[unit]);
}

std::vector<std::string> names_of(const CheckpointReader& reader, const CheckpointFlags& flags) {
  std::vector<std::string> names;
  for (const std::string& name : reader.names())
    if (wanted(flags, name)) names.push_back(name);
  return names;
}

// A pattern that matches no tensor is most likely a mistake. `all`: the names in every checkpoint that is
// examined.
void check_patterns(const CheckpointFlags& flags, const std::vector<std::string>& all) {
  for (const std::string& glob : flags.only)
    if (std::none_of(all.begin(), all.end(),
                     [&](const std::string& name) { return fnmatch(glob.c_str(), name.c_str(), 0) == 0; }))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("--only '{}': none of the {} tensors' names match", glob, all.size()));
}

nlohmann::json as_json(const CheckpointReader& reader, const std::vector<std::string>& names) {
  nlohmann::json tensors = nlohmann::json::object();
  for (const std::string& name : names) {
    const CheckpointTensor& t = reader.tensor(name);
    const auto shape = t.shape.values();
    tensors[name] = {{"dtype", weft::name(t.dtype)},
                     {"shape", std::vector<std::int64_t>(shape.begin(), shape.end())},
                     {"layout", t.layout},
                     {"bytes", bytes_of(t)},
                     {"parts", t.parts},
                     {"files", t.files}};
  }
  const CheckpointInfo& info = reader.info();
  return {{"folder", info.folder.string()}, {"step", info.step},   {"mesh", info.mesh},
          {"hashed", reader.hashed()},      {"extra", info.extra}, {"tensors", std::move(tensors)}};
}

int inspect(const CheckpointFlags& flags) {
  const CheckpointReader reader = CheckpointReader::open(flags.path);
  check_patterns(flags, reader.names());
  const std::vector<std::string> names = names_of(reader, flags);
  if (flags.json) {
    fmt::print("{}\n", as_json(reader, names).dump(1));
    return 0;
  }
  const CheckpointInfo& info = reader.info();
  std::int64_t bytes = 0;
  std::size_t widest = 4;
  for (const std::string& name : names) {
    bytes += bytes_of(reader.tensor(name));
    widest = std::max(widest, name.size());
  }
  fmt::print("{}\nstep {}, written on {}, {}\n", info.folder.string(), info.step,
             info.mesh.empty() ? "one rank" : printable(info.mesh),
             reader.hashed() ? "with hashes" : "without hashes");
  for (const auto& [key, value] : info.extra) {
    const std::string first = value.substr(0, value.find('\n'));
    fmt::print("  {}: {}{}\n", printable(key), printable(first.substr(0, 100)),
               first.size() < value.size() || first.size() > 100 ? " ..." : "");
  }
  for (const std::string& name : names) {
    const CheckpointTensor& t = reader.tensor(name);
    fmt::print(
        "{:<{}}  {:<6} {:<20} {:>8}  {} part{}{}\n", printable(name), widest, weft::name(t.dtype),
        to_string(t.shape), size_text(bytes_of(t)), t.parts, t.parts == 1 ? " " : "s",
        t.layout.empty() ? "" : fmt::format("  {}", printable(fmt::format("{}", fmt::join(t.layout, ", ")))));
  }
  fmt::print("{} tensors, {}\n", names.size(), size_text(bytes));
  return 0;
}

int verify(const CheckpointFlags& flags) {
  std::int64_t read = 0;
  const std::vector<std::string> faults =
      verify_checkpoint(flags.path, [&](std::int64_t so_far, std::int64_t) { read = so_far; });
  for (const std::string& fault : faults) fmt::print("{}\n", fault);
  if (!faults.empty()) {
    fmt::print("{} fault{} in {}\n", faults.size(), faults.size() == 1 ? "" : "s", flags.path);
    return 1;
  }
  const CheckpointReader reader = CheckpointReader::open(flags.path);
  fmt::print(
      "{}: {} tensors, {}, {}\n", reader.info().folder.string(), reader.names().size(), size_text(read),
      reader.hashed() ? "all bytes are those that were written"
                      : "sound; written before checkpoints had hashes, so changed bytes cannot be told");
  return 0;
}

int diff(const CheckpointFlags& flags) {
  const CheckpointReader a = CheckpointReader::open(flags.path), b = CheckpointReader::open(flags.other);
  std::vector<std::string> names = a.names();
  names.insert(names.end(), b.names().begin(), b.names().end());
  check_patterns(flags, names);
  Context context;
  std::size_t alike = 0, different = 0;
  for (const std::string& name : names_of(a, flags)) {
    if (!b.contains(name)) {
      fmt::print("{}: only in {}\n", printable(name), flags.path);
      ++different;
      continue;
    }
    const CheckpointTensor &in_a = a.tensor(name), &in_b = b.tensor(name);
    const auto complex = [](DType d) { return d == DType::c64 || d == DType::c128; };
    if (in_a.shape != in_b.shape || complex(in_a.dtype) != complex(in_b.dtype)) {
      fmt::print("{}: {} {} and {} {}\n", printable(name), weft::name(in_a.dtype), to_string(in_a.shape),
                 weft::name(in_b.dtype), to_string(in_b.shape));
      ++different;
      continue;
    }
    const Tensor x = a.read(context, name), y = b.read(context, name);
    const Difference d = difference(x.view(), y.view(), flags.tolerance);
    const std::string dtypes =
        in_a.dtype == in_b.dtype ? ""
                                 : fmt::format("{} and {}, ", weft::name(in_a.dtype), weft::name(in_b.dtype));
    if (d.numbers == 0 && (dtypes.empty() || flags.tolerance > 0)) {
      ++alike;
      continue;
    }
    fmt::print("{}: {}{} of {} numbers differ, by at most {:.3g}\n", printable(name), dtypes, d.numbers,
               real_numbers(x.view()).count(), d.largest);
    ++different;
  }
  for (const std::string& name : names_of(b, flags))
    if (!a.contains(name)) {
      fmt::print("{}: only in {}\n", printable(name), flags.other);
      ++different;
    }
  const auto& in_a = a.info();
  const auto& in_b = b.info();
  if (in_a.step != in_b.step) fmt::print("step {} and step {}\n", in_a.step, in_b.step);
  if (in_a.extra != in_b.extra) fmt::print("their extra strings differ\n");
  fmt::print("{} tensor{} alike{}, {} different\n", alike, alike == 1 ? "" : "s",
             flags.tolerance > 0 ? fmt::format(" (to {:g})", flags.tolerance) : "", different);
  return different == 0 ? 0 : 1;
}

constexpr std::string_view kAverage = "ema.average.", kParameter = "param.";

// The name of a tensor if averages replace the parameters to which they belong; "" leaves the tensor out.
std::string name_with_averages(const CheckpointReader& reader, std::string_view name) {
  if (name.starts_with(kAverage)) return std::string(kParameter).append(name.substr(kAverage.size()));
  const bool averaged = name.starts_with(kParameter) &&
                        reader.contains(std::string(kAverage).append(name.substr(kParameter.size())));
  return averaged || name.starts_with("ema.") ? std::string() : std::string(name);
}

#ifdef WEFT_HAVE_TRAIN
// A flag that has no meaning with --as.
void refuse_with_as(bool given, const char* flag) {
  if (given)
    throw Error(ErrorCode::bad_argument, fmt::format("--as {}: {} has no meaning with it", "llama", flag));
}

// The tokenizer of a run lies beside its checkpoints, and that of a Llama in its folder, under one name.
constexpr const char* kTokenizer = "tokenizer.json";
void copy_tokenizer(const std::filesystem::path& from, const std::filesystem::path& to) {
  constexpr std::size_t kMostBytes = std::size_t{1} << 28;
  std::error_code none;
  if (!std::filesystem::exists(from / kTokenizer, none)) return;
  write_new_file(
      to / kTokenizer,
      read_regular_file((from / kTokenizer).string(),
                        fmt::format("--as llama: \"{}\":", (from / kTokenizer).string()), kMostBytes),
      "--as llama: ");
}

int export_as_llama(const CheckpointFlags& flags) {
  refuse_with_as(!flags.only.empty(), "--only");
  refuse_with_as(!flags.strip.empty(), "--strip");
  for (const char* name : {"model.safetensors", "config.json", kTokenizer})
    if (const auto file = std::filesystem::path(flags.file) / name;
        !flags.overwrite && std::filesystem::exists(file))
      throw Error(ErrorCode::bad_argument,
                  fmt::format("\"{}\" exists; another folder, or --overwrite, is expected", file.string()));
  const CheckpointReader reader = CheckpointReader::open(flags.path);
  const std::string folder = reader.info().folder.string();
  const auto model = reader.info().extra.find("model");
  if (model == reader.info().extra.end() && reader.info().extra.contains("train.transformer_of_experts"))
    throw Error(ErrorCode::bad_argument,
                fmt::format("--as llama: \"{}\" is of a mixture of experts, which has no form of a Llama; "
                            "export without --as writes its tensors",
                            folder));
  if (model == reader.info().extra.end())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("--as llama: \"{}\" does not say which model it is of; expected a checkpoint of this "
                    "version of weft train",
                    folder));
  const TransformerConfig config =
      transformer_from_text(model->second, fmt::format("--as llama: the model of \"{}\"", folder));
  const std::size_t count =
      export_llama(flags.path, flags.file, config,
                   {.dtype = flags.dtype == "bf16" ? DType::bf16 : DType::f32, .averages = flags.ema});
  if (reader.info().extra.contains("train.tokenizer"))
    copy_tokenizer(reader.info().folder.parent_path(), flags.file);
  const auto file = std::filesystem::path(flags.file) / "model.safetensors";
  fmt::print("{}: {} tensors, {}\n", file.string(), count,
             size_text(static_cast<std::int64_t>(std::filesystem::file_size(file))));
  return 0;
}

int convert_from_llama(const CheckpointFlags& flags) {
  refuse_with_as(!flags.only.empty(), "--only");
  refuse_with_as(!flags.names.empty(), "--names");
  refuse_with_as(flags.old_names, "--old-names");
  refuse_with_as(!flags.dtype.empty(), "--dtype");
  refuse_with_as(flags.files != 1, "--files");
  import_llama(flags.path, flags.file);
  copy_tokenizer(flags.path, flags.file);
  const CheckpointReader reader = CheckpointReader::open(flags.file);
  fmt::print("{}: {} tensors\n", reader.info().folder.string(), reader.names().size());
  return 0;
}
#endif

int export_file(const CheckpointFlags& flags) {
#ifdef WEFT_HAVE_TRAIN
  if (!flags.as.empty()) return export_as_llama(flags);
  if (!flags.dtype.empty())
    throw Error(ErrorCode::bad_argument, "--dtype: export has it with --as llama only");
#endif
  std::error_code none;
  const auto there = std::filesystem::symlink_status(flags.file, none);
  if (!flags.overwrite && std::filesystem::exists(there))
    throw Error(ErrorCode::bad_argument,
                fmt::format("\"{}\" exists; another name, or --overwrite, is expected", flags.file));
  if (std::filesystem::exists(there) && !std::filesystem::is_regular_file(there))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("--overwrite: \"{}\" is no regular file; expected one, or another name", flags.file));
  const CheckpointReader reader = CheckpointReader::open(flags.path);
  check_patterns(flags, reader.names());
  ExportOptions options;
  options.rename = [&](std::string_view stored) {
    const std::string name = flags.ema ? name_with_averages(reader, stored) : std::string(stored);
    if (name.empty() || !wanted(flags, name)) return std::string();
    const bool strips = name.starts_with(flags.strip) && name.size() > flags.strip.size();
    return strips ? name.substr(flags.strip.size()) : name;
  };
  if (flags.ema && std::none_of(reader.names().begin(), reader.names().end(),
                                [](const std::string& name) { return name.starts_with(kAverage); }))
    throw Error(ErrorCode::bad_argument, fmt::format("{} has no averages (\"{}*\") to export for --ema",
                                                     reader.info().folder.string(), kAverage));
#ifdef WEFT_HAVE_TRAIN
  Context context;
  Compute compute(context);
  const bool evaluates = !flags.ema && has_values_for_evaluation(reader);
  if (evaluates) {
    options.value = [&](const CheckpointReader& from, std::string_view name) {
      if (!name.starts_with(kParameter)) return Tensor();
      return value_for_evaluation(from, compute, name.substr(kParameter.size()));
    };
    fmt::print("schedule-free AdamW has trained it: {}* become the values for evaluation\n", kParameter);
  }
#endif
  const std::size_t count = export_checkpoint(flags.path, flags.file, options);
  fmt::print("{}: {} tensors, {}\n", flags.file, count,
             size_text(static_cast<std::int64_t>(std::filesystem::file_size(flags.file))));
  return 0;
}

#ifdef WEFT_HAVE_TRAIN
// Refuses a copy that has parameters as schedule-free AdamW trains them, without what gives the values for
// evaluation: its readers would take the former for the latter.
void expect_values_for_evaluation(const CheckpointReader& from, const ConvertOptions& options) {
  if (!has_values_for_evaluation(from)) return;
  std::set<std::string> copied;
  std::vector<std::string> trained;  // the copied names of these parameters
  for (const std::string& name : from.names()) {
    std::vector<RemappedTensor> pieces;
    if (options.remap) pieces = options.remap(name, from.tensor(name).shape);
    if (pieces.empty()) pieces.push_back({name, {}});
    const bool is_trained =
        name.starts_with(kParameter) &&
        from.contains("optimizer.rates." + name.substr(std::string_view(kParameter).size()));
    for (const RemappedTensor& piece : pieces) {
      const std::string to = options.rename(piece.name);
      if (to.empty()) continue;
      copied.insert(to);
      if (is_trained) trained.push_back(to);
    }
  }
  for (const std::string& name : trained) {
    const std::string path =
        name.starts_with(kParameter) ? name.substr(std::string_view(kParameter).size()) : std::string();
    for (const char* part : {"optimizer.z.", "optimizer.rates.", "optimizer.step."})
      if (path.empty() || !copied.contains(part + path))
        throw Error(
            ErrorCode::bad_argument,
            fmt::format("schedule-free AdamW has trained \"{}\", and the copy would have no \"{}{}\", from "
                        "which the values for evaluation come; expected all of \"optimizer.*\" beside "
                        "\"{}*\", or weft checkpoint export, which writes these values",
                        name, part, path.empty() ? name : path, kParameter));
  }
}
#endif

int convert(const CheckpointFlags& flags) {
  if (!flags.overwrite && latest_checkpoint(flags.file))
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("\"{}\" has a checkpoint; another folder, or --overwrite, is expected", flags.file));
#ifdef WEFT_HAVE_TRAIN
  if (!flags.as.empty()) return convert_from_llama(flags);
#endif
  const NameTable table = flags.names.empty() ? NameTable() : NameTable::read(flags.names);
  ConvertOptions options;
  options.files = flags.files;
  std::size_t old = 0;
  if (flags.old_names)
    options.remap = [&](std::string_view name, const Shape& shape) {
      std::vector<RemappedTensor> pieces = remap_old_names(name, shape);
      old += pieces.empty() ? 0 : 1;
      return pieces;
    };
  options.rename = [&](std::string_view name) {
    const std::string to = table.renamed(name);
    return wanted(flags, to) ? to : std::string();
  };
  if (!flags.dtype.empty())
    options.dtype = [&](std::string_view, DType) { return flags.dtype == "f32" ? DType::f32 : DType::bf16; };
#ifdef WEFT_HAVE_TRAIN
  expect_values_for_evaluation(CheckpointReader::open(flags.path), options);
  old = 0;
#endif
  const std::size_t count = convert_checkpoint(flags.path, flags.file, options);
  const CheckpointReader reader = CheckpointReader::open(flags.file);
  fmt::print("{}: {} tensors{}\n", reader.info().folder.string(), count,
             old == 0 ? "" : fmt::format("; {} had older names or shapes", old));
  return 0;
}

}  // namespace

void add_checkpoint(CLI::App& app, Body& chosen) {
  const auto flags = std::make_shared<CheckpointFlags>();
  CLI::App* const checkpoint = app.add_subcommand("checkpoint", "Look into checkpoints");
  checkpoint->require_subcommand(1);
  const auto add = [&](const char* name, const char* what, int (*body)(const CheckpointFlags&)) {
    CLI::App* const sub = checkpoint->add_subcommand(name, what);
    sub->add_option("checkpoint", flags->path,
                    "A run's folder (its latest checkpoint), a checkpoint's own, or a safetensors file")
        ->required();
    sub->callback([flags, body, &chosen] { chosen = [flags, body] { return body(*flags); }; });
    return sub;
  };
  const auto add_only = [&](CLI::App* sub) {
    sub->add_option("--only", flags->only, "Only tensors whose names match, as in --only 'param.*'");
  };

  CLI::App* const shows = add("inspect", "What it holds: names, shapes, layouts, parts", inspect);
  add_only(shows);
  shows->add_flag("--json", flags->json, "As JSON");
  add("verify", "Read all of it; is every byte the one that was written?", verify);
  CLI::App* const compares = add("diff", "How two checkpoints differ; status 1 where they do", diff);
  compares->add_option("other", flags->other, "The other one")->required();
  add_only(compares);
  compares->add_option("--tolerance", flags->tolerance, "Numbers that are no further apart are alike")
      ->check(number_at_least(0));
  CLI::App* const exports = add("export", "Write its tensors, whole, into one safetensors file", export_file);
  exports->add_option("file", flags->file, "The file")->required();
  add_only(exports);
  exports->add_option("--strip", flags->strip,
                      "Leave this out where names begin with it, as in --strip param.");
  CLI::App* const converts =
      add("convert", "Write it anew: other names, another dtype, another number of files", convert);
  converts->add_option("to", flags->file, "The folder of the new one")->required();
  add_only(converts);
  converts
      ->add_option("--names", flags->names, "A file of lines OLD NEW; a * in both stands for the same text")
      ->check(CLI::ExistingFile);
  converts->add_flag(
      "--old-names", flags->old_names,
      "Names and shapes of older programs (to_qkv, 1x1 convolutions, spectral norms) become today's");
  converts->add_option("--dtype", flags->dtype, "What tensors of f32 and bf16 become")
      ->check(CLI::IsMember({"f32", "bf16"}));
  converts->add_option("--files", flags->files, "How many files the tensors' rows are cut into")
      ->check(CLI::Range(1, 99999));
  converts->add_flag("--overwrite", flags->overwrite, "Also where the folder has a checkpoint");
  exports->add_flag("--ema", flags->ema, "Averages in the place of the parameters that they are of");
  exports->add_flag("--overwrite", flags->overwrite, "Replace the file where it is there");
#ifdef WEFT_HAVE_TRAIN
  exports
      ->add_option("--as", flags->as,
                   "llama: write a folder with model.safetensors and config.json, which transformers reads")
      ->check(CLI::IsMember({"llama"}));
  exports->add_option("--dtype", flags->dtype, "With --as: what tensors become")
      ->check(CLI::IsMember({"f32", "bf16"}));
  converts
      ->add_option("--as", flags->as,
                   "llama: read a folder with config.json and safetensors files, such as "
                   "transformers writes")
      ->check(CLI::IsMember({"llama"}));
#endif
}

}  // namespace weft::tools
