// Converts the index to text, and back. The text may come from anybody, so all of it is checked before it is
// used.
#include <fmt/format.h>

#include <charconv>
#include <nlohmann/json.hpp>

#include "base/json_reader.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/index/coverage.hpp"
#include "checkpoint/index/index.hpp"
#include "checkpoint/shape_bytes.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using nlohmann::json;

constexpr std::string_view kFormat = "weft checkpoint";
constexpr int kVersion = 2;   // with hashes
constexpr int kUnhashed = 1;  // written by weft before 2026-11-23
constexpr JsonLimits kIndexLimits{.bytes = kMaxIndexBytes};

std::vector<std::int64_t> list(const Dims& dims) { return {dims.begin(), dims.end()}; }

[[noreturn]] void refuse_index(const std::filesystem::path& path, const std::string& what) {
  throw Error(ErrorCode::bad_argument, fmt::format("checkpoint: {}: {}", path.string(), what));
}

Dims dims_from(const JsonReader& in, const char* key) {
  const std::vector<std::int64_t> values = in.integers(key, 0, INT64_MAX);
  if (values.size() > std::size_t{Dims::kMaxDims})
    in.wrong(in.place(key),
             fmt::format("has {} dimensions; at most {} are supported", values.size(), Dims::kMaxDims));
  return Dims(std::span<const std::int64_t>(values));
}

// Each part must lie inside the global tensor, and together the parts must cover each of its elements once.
void check_parts(const std::filesystem::path& path, const std::string& name, const CheckpointEntry& entry) {
  const std::int64_t whole = entry.shape.count();
  std::int64_t count = 0;
  for (const CheckpointPart& part : entry.parts) {
    bool inside = part.box.offset.rank() == entry.shape.rank() && part.box.shape.rank() == entry.shape.rank();
    for (int d = 0; inside && d < entry.shape.rank(); ++d)
      inside =
          part.box.offset[d] <= entry.shape[d] && part.box.shape[d] <= entry.shape[d] - part.box.offset[d];
    if (!inside)
      refuse_index(
          path, fmt::format("the part of \"{}\" in {} is {} at {}, outside of the whole {}", name, part.file,
                            to_string(part.box.shape), to_string(part.box.offset), to_string(entry.shape)));
    if (__builtin_add_overflow(count, part.box.shape.count(), &count)) count = INT64_MAX;
  }
  if (count != whole)
    refuse_index(path, fmt::format("the {} parts of \"{}\" have {} elements; expected {} (shape {})",
                                   entry.parts.size(), name, count, whole, to_string(entry.shape)));
  if (const auto wrong = first_not_covered_once(entry.shape, entry.parts))
    refuse_index(path, fmt::format("element {} of \"{}\" is in {} of its {} parts; expected 1",
                                   to_string(wrong->element), name, wrong->parts, entry.parts.size()));
}

CheckpointPart read_part(const JsonReader& in) {
  CheckpointPart part{in.text("file"), {dims_from(in, "offset"), dims_from(in, "shape")}, {}};
  if (in.find("name") != nullptr) part.name = in.text("name");
  if (const auto why = why_no_file_name(part.file))
    in.wrong(in.place("file"), fmt::format("is {}; expected the name of a file in the same folder", *why));
  return part;
}

CheckpointFile read_file(const JsonReader& in) {
  const std::string digits = in.text("header");
  CheckpointFile file;
  const auto [end, error] =
      std::from_chars(digits.data(), digits.data() + digits.size(), file.header_hash, 16);
  if (error != std::errc() || end != digits.data() + digits.size() || digits.size() != kNoHash.size())
    in.wrong(in.place("header"), fmt::format("is \"{}\"; expected 16 hexadecimal digits", digits));
  return file;
}

CheckpointEntry read_entry(const JsonReader& in, const std::string& subject) {
  CheckpointEntry entry;
  entry.dtype = in.named<DType>("dtype", kDTypeCount);
  entry.shape = dims_from(in, "shape");
  if (!shape_bytes(entry.shape.values(), size_bytes(entry.dtype)))
    in.wrong(in.place("shape"), fmt::format("is {} of {}; a product beyond 2^63 - 1 bytes",
                                            to_string(entry.shape), name(entry.dtype)));
  entry.layout = in.texts("layout");
  const json& parts = in.list("parts");
  for (std::size_t i = 0; i < parts.size(); ++i)
    entry.parts.push_back(
        read_part(JsonReader(subject, parts[i], fmt::format("{}[{}]", in.place("parts"), i))));
  return entry;
}

}  // namespace

std::string to_json(const CheckpointIndex& index) {
  json tensors = json::object();
  for (const auto& [name, entry] : index.tensors) {
    json parts = json::array();
    for (const CheckpointPart& part : entry.parts) {
      parts.push_back(
          {{"file", part.file}, {"offset", list(part.box.offset)}, {"shape", list(part.box.shape)}});
      if (!part.name.empty()) parts.back()["name"] = part.name;
    }
    tensors[name] = {{"dtype", weft::name(entry.dtype)},
                     {"shape", list(entry.shape)},
                     {"layout", entry.layout},
                     {"parts", std::move(parts)}};
  }
  json files = json::object();
  for (const auto& [name, file] : index.files) files[name] = {{"header", hash_text(file.header_hash)}};
  const json whole = {{"format", kFormat},  {"version", kVersion},          {"hash", kNoHash},
                      {"step", index.step}, {"mesh", index.mesh},           {"extra", index.extra},
                      {"files", files},     {"tensors", std::move(tensors)}};
  try {
    std::string text = whole.dump(1) + "\n";
    seal(text);
    return text;
  } catch (const json::type_error&) {
    throw Error(ErrorCode::bad_argument, "save_checkpoint: a string of `extra` or a path is not UTF-8");
  }
}

CheckpointIndex index_from_json(const std::filesystem::path& path, const std::string& text) {
  const std::string subject = fmt::format("checkpoint: {}: is no index", path.string());
  const json whole = parse_json(text, subject + ": it", kIndexLimits);
  const JsonReader in(subject, whole, "");
  const json* const format = in.find("format");
  if (format == nullptr || *format != kFormat)
    refuse_index(path, fmt::format("\"format\" is not \"{}\"", kFormat));
  const bool hashed = in.at("version") == kVersion;
  if (!hashed && in.at("version") != kUnhashed)
    throw Error(ErrorCode::unsupported,
                fmt::format("checkpoint: {}: has version {}; this build reads {} and {}", path.string(),
                            shown_json(in.at("version")), kUnhashed, kVersion));
  if (hashed && !is_sealed(text))
    refuse_index(path, "is not as it was written: its \"hash\" is that of another text");
  CheckpointIndex index;
  index.step = in.integer("step", 0, INT64_MAX);
  index.mesh = in.text("mesh");
  const JsonReader extra(subject, in.at("extra"), "extra");
  for (const auto& [key, value] : extra.object().items())
    index.extra.emplace(key, in.text(value, extra.place(key)));
  if (hashed) {
    const JsonReader files(subject, in.at("files"), "files");
    for (const auto& [name, file] : files.object().items())
      index.files[name] = read_file(JsonReader(subject, file, files.place(name)));
  }
  const JsonReader tensors(subject, in.at("tensors"), "tensors");
  for (const auto& [name, entry] : tensors.object().items()) {
    CheckpointEntry& tensor = index.tensors[name];
    tensor = read_entry(JsonReader(subject, entry, tensors.place(name)), subject);
    check_parts(path, name, tensor);
    for (const CheckpointPart& part : tensor.parts)
      if (hashed && !index.files.contains(part.file))
        refuse_index(path,
                     fmt::format("a part of \"{}\" is in {}, which is not among its files", name, part.file));
  }
  return index;
}

}  // namespace weft
