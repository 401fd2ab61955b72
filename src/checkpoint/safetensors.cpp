#include "weft/checkpoint/safetensors.hpp"

#include <fmt/format.h>
#include <fmt/ranges.h>

#include <algorithm>
#include <array>
#include <bit>
#include <cerrno>
#include <nlohmann/json.hpp>
#include <set>

#include "base/files/regular_file.hpp"
#include "base/json_reader.hpp"
#include "base/text/printable.hpp"
#include "checkpoint/content_hash.hpp"
#include "checkpoint/file_io.hpp"
#include "checkpoint/safetensors_write.hpp"
#include "checkpoint/shape_bytes.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using nlohmann::json;

static_assert(std::endian::native == std::endian::little,
              "the format is little-endian and elements are written as they are");

// The format limits headers to 100 MB, so that a wrong length cannot ask for all memory.
constexpr std::int64_t kMaxHeaderBytes = 100'000'000;
constexpr JsonLimits kHeaderLimits{.bytes = kMaxHeaderBytes};
constexpr std::int64_t kLengthBytes = 8;
constexpr std::int64_t kAlignment = 64;
constexpr std::string_view kMetadataKey = "__metadata__";

// The format's names of dtypes. C128 is not one of them, since other readers refuse a file that has it.
struct DTypeName {
  DType dtype;
  std::string_view name;
};
constexpr std::array<DTypeName, kDTypeCount> kDTypeNames = {{{DType::f64, "F64"},
                                                             {DType::f32, "F32"},
                                                             {DType::f16, "F16"},
                                                             {DType::bf16, "BF16"},
                                                             {DType::i8, "I8"},
                                                             {DType::i16, "I16"},
                                                             {DType::i32, "I32"},
                                                             {DType::i64, "I64"},
                                                             {DType::u8, "U8"},
                                                             {DType::u16, "U16"},
                                                             {DType::u32, "U32"},
                                                             {DType::u64, "U64"},
                                                             {DType::boolean, "BOOL"},
                                                             {DType::f8e4m3, "F8_E4M3"},
                                                             {DType::f8e5m2, "F8_E5M2"},
                                                             {DType::c64, "C64"},
                                                             {DType::c128, "C128"}}};

std::string_view file_name_of(DType dtype) {
  return std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                      [&](const DTypeName& d) { return d.dtype == dtype; })
      ->name;
}

std::string known_dtypes() {
  std::vector<std::string_view> names;
  for (const DTypeName& d : kDTypeNames) names.push_back(d.name);
  return fmt::format("{}", fmt::join(names, " "));
}

[[noreturn]] void refuse(const std::filesystem::path& path, const std::string& what,
                         ErrorCode code = ErrorCode::bad_argument) {
  throw Error(code, printable(fmt::format("safetensors: {}: {}", path.string(), what)));
}

json parse_header(const std::filesystem::path& path, const std::string& text) {
  json header = parse_json(text, fmt::format("safetensors: {}: the header", path.string()), kHeaderLimits);
  if (!header.is_object())
    refuse(path, fmt::format("the header is a JSON {}; expected an object", header.type_name()));
  return header;
}

// Parses one entry of the header, {"dtype": "F32", "shape": [2, 3], "data_offsets": [0, 24]}, and checks it
// alone. In the header, offsets count from the end of the header (`data_begin`). In the result, they count
// from the start of the file.
SafetensorsInfo parse_tensor(const std::filesystem::path& path, const std::string& name, const json& entry,
                             std::int64_t data_begin, std::int64_t file_bytes) {
  const auto bad = [&](const std::string& what, ErrorCode code = ErrorCode::bad_argument) {
    refuse(path, fmt::format("tensor \"{}\" {}", name, what), code);
  };
  const auto numbers = [&](const char* key) {
    const auto found = entry.find(key);
    if (found == entry.end() || !found->is_array()) bad(fmt::format("has no list \"{}\"", key));
    std::vector<std::int64_t> values;
    for (const json& value : *found) {
      if (!value.is_number_unsigned() || value.get<std::uint64_t>() > std::uint64_t{INT64_MAX})
        bad(fmt::format("has {} in \"{}\"; expected integers from 0 to 2^63 - 1", value.dump(), key));
      values.push_back(value.get<std::int64_t>());
    }
    return values;
  };

  if (!entry.is_object()) bad(fmt::format("is a JSON {}; expected an object", entry.type_name()));
  const auto dtype = entry.find("dtype");
  if (dtype == entry.end() || !dtype->is_string()) bad("has no string \"dtype\"");
  const auto known = std::find_if(kDTypeNames.begin(), kDTypeNames.end(),
                                  [&](const DTypeName& d) { return d.name == dtype->get<std::string>(); });
  if (known == kDTypeNames.end())
    bad(fmt::format("has dtype {}; known are {}", dtype->get<std::string>(), known_dtypes()),
        ErrorCode::unsupported);

  const std::vector<std::int64_t> shape = numbers("shape");
  if (shape.size() > std::size_t{Shape::kMaxDims})
    bad(fmt::format("has {} dimensions; at most {} are supported", shape.size(), Shape::kMaxDims),
        ErrorCode::unsupported);
  const std::vector<std::int64_t> offsets = numbers("data_offsets");
  if (offsets.size() != 2) bad(fmt::format("has {} data_offsets; expected 2, begin and end", offsets.size()));
  if (offsets[0] > offsets[1])
    bad(fmt::format("begins at {} and ends before, at {}", offsets[0], offsets[1]));
  if (offsets[1] > file_bytes - data_begin)
    bad(fmt::format("ends at byte {} of the data; the file has {} (file {} - header {})", offsets[1],
                    file_bytes - data_begin, file_bytes, data_begin));

  SafetensorsInfo info;
  info.dtype = known->dtype;
  info.shape = Shape(shape);
  info.begin = data_begin + offsets[0];
  info.bytes = offsets[1] - offsets[0];
  const auto expected = shape_bytes(shape, size_bytes(info.dtype));
  if (!expected)
    bad(fmt::format("has shape {} of {}; a product beyond 2^63 - 1 bytes", to_string(info.shape),
                    known->name));
  if (*expected != info.bytes)
    bad(fmt::format("has {} bytes (data_offsets {} to {}); expected {} (shape {} of {})", info.bytes,
                    offsets[0], offsets[1], *expected, to_string(info.shape), known->name));
  return info;
}

// Together the tensors must cover the data once, since the format allows neither overlaps nor gaps.
void check_cover(const std::filesystem::path& path,
                 const std::map<std::string, SafetensorsInfo, std::less<>>& tensors, std::int64_t data_begin,
                 std::int64_t file_bytes) {
  std::vector<std::pair<const SafetensorsInfo*, const std::string*>> order;
  for (const auto& [name, info] : tensors) order.emplace_back(&info, &name);
  std::sort(order.begin(), order.end(), [](const auto& a, const auto& b) {
    return std::pair(a.first->begin, a.first->bytes) < std::pair(b.first->begin, b.first->bytes);
  });
  std::int64_t covered = data_begin;
  const std::string* before = nullptr;
  for (const auto& [info, name] : order) {
    if (info->begin < covered)
      refuse(path, fmt::format("tensors \"{}\" and \"{}\" overlap at byte {} of the data", *before, *name,
                               info->begin - data_begin));
    if (info->begin > covered)
      refuse(path, fmt::format("bytes {} to {} of the data, before \"{}\", belong to no tensor",
                               covered - data_begin, info->begin - data_begin, *name));
    covered = info->begin + info->bytes;
    before = name;
  }
  if (covered != file_bytes)
    refuse(path, fmt::format("the last {} bytes belong to no tensor (file {} - header {} - tensors {})",
                             file_bytes - covered, file_bytes, data_begin, covered - data_begin));
}

// The hash also covers the length.
std::uint64_t hash_of_header(const std::string& text) {
  const std::uint64_t parts[] = {text.size(), content_hash(std::as_bytes(std::span(text)))};
  return content_hash(std::as_bytes(std::span(parts)));
}

}  // namespace

struct SafetensorsFile::Impl {
  std::filesystem::path path;
  Descriptor file;
  std::vector<std::string> names;
  std::map<std::string, SafetensorsInfo, std::less<>> tensors;
  std::map<std::string, std::string, std::less<>> metadata;
  std::uint64_t header_hash = 0;

  void read(std::int64_t file_bytes);
};

// An error here concerns the file: open() reports the file as damaged.
void SafetensorsFile::Impl::read(std::int64_t file_bytes) {
  // A file consists of the header length (8 bytes, little-endian), the header (JSON) and the data.
  if (file_bytes < kLengthBytes)
    refuse(path, fmt::format("has {} bytes; expected at least {}, the length of the header", file_bytes,
                             kLengthBytes));
  std::uint64_t header_bytes = 0;
  read_exactly(file.get(), path, 0, std::as_writable_bytes(std::span(&header_bytes, 1)));
  if (header_bytes > std::uint64_t{kMaxHeaderBytes})
    refuse(path, fmt::format("says its header has {} bytes; at most {} are allowed", header_bytes,
                             kMaxHeaderBytes));
  const std::int64_t data_begin = kLengthBytes + static_cast<std::int64_t>(header_bytes);
  if (data_begin > file_bytes)
    refuse(path, fmt::format("says its header has {} bytes; {} are left (file {} - length {})", header_bytes,
                             file_bytes - kLengthBytes, file_bytes, kLengthBytes));
  std::string text(header_bytes, '\0');
  read_exactly(file.get(), path, kLengthBytes, std::as_writable_bytes(std::span(text)));

  header_hash = hash_of_header(text);
  const json header = parse_header(path, text);
  for (const auto& [name, entry] : header.items()) {
    if (name != kMetadataKey) {
      if (name.find('\0') != std::string::npos)
        refuse(path, fmt::format("the name of a tensor, \"{}\", continues after a NUL", name.c_str()));
      tensors.emplace(name, parse_tensor(path, name, entry, data_begin, file_bytes));
      names.push_back(name);
      continue;
    }
    if (!entry.is_object())
      refuse(path, fmt::format("__metadata__ is a JSON {}; expected an object", entry.type_name()));
    for (const auto& [key, value] : entry.items()) {
      if (!value.is_string())
        refuse(path, fmt::format("__metadata__ has a JSON {} under \"{}\"; expected a string",
                                 value.type_name(), key));
      metadata.emplace(key, value.get<std::string>());
    }
  }
  std::sort(names.begin(), names.end());
  check_cover(path, tensors, data_begin, file_bytes);
}

SafetensorsFile SafetensorsFile::open(const std::filesystem::path& path) {
  auto impl = std::make_shared<Impl>();
  impl->path = path;
  RegularFile opened = open_regular_file(path.string());
  if (opened.error_number != 0)
    throw_errno(fmt::format("safetensors: cannot open {}", path.string()), opened.error_number);
  if (!opened.fd) refuse(path, opened.why);
  impl->file = std::move(opened.fd);
  try {
    impl->read(opened.bytes);
  } catch (const Error& e) {
    if (e.code() != ErrorCode::bad_argument) throw;
    throw Error(ErrorCode::corrupt, printable(e.what()));
  }
  return SafetensorsFile(std::move(impl));
}

const std::filesystem::path& SafetensorsFile::path() const noexcept { return impl_->path; }
const std::vector<std::string>& SafetensorsFile::names() const noexcept { return impl_->names; }
bool SafetensorsFile::contains(std::string_view name) const {
  return impl_->tensors.find(name) != impl_->tensors.end();
}

const SafetensorsInfo& SafetensorsFile::info(std::string_view name) const {
  const auto found = impl_->tensors.find(name);
  if (found == impl_->tensors.end())
    refuse(impl_->path, fmt::format("has no tensor \"{}\" among its {}", name, impl_->tensors.size()));
  return found->second;
}

const std::map<std::string, std::string, std::less<>>& SafetensorsFile::metadata() const noexcept {
  return impl_->metadata;
}

std::uint64_t SafetensorsFile::header_hash() const noexcept { return impl_->header_hash; }

const std::string& SafetensorsFile::metadata(std::string_view key) const {
  const auto found = impl_->metadata.find(key);
  if (found == impl_->metadata.end()) {
    std::vector<std::string> keys;
    for (const auto& [other, value] : impl_->metadata) keys.push_back(fmt::format("\"{}\"", other));
    refuse(impl_->path, fmt::format("has no metadata \"{}\"; it has {}", key,
                                    keys.empty() ? "none" : fmt::format("{}", fmt::join(keys, ", "))));
  }
  return found->second;
}

Tensor SafetensorsFile::read(Context& context, std::string_view name, Memory memory) const {
  const SafetensorsInfo& tensor = info(name);
  Tensor out(context, tensor.shape, tensor.dtype, memory);
  read_exactly(impl_->file.get(), impl_->path, tensor.begin,
               {out.data(), static_cast<std::size_t>(tensor.bytes)});
  return out;
}

void SafetensorsFile::read_bytes(std::string_view name, std::int64_t offset, std::span<std::byte> out) const {
  const SafetensorsInfo& tensor = info(name);
  const auto wanted = static_cast<std::int64_t>(out.size());
  if (offset < 0 || wanted > tensor.bytes || offset > tensor.bytes - wanted)
    refuse(impl_->path, fmt::format("tensor \"{}\" has {} bytes; {} from byte {} were requested", name,
                                    tensor.bytes, wanted, offset));
  read_exactly(impl_->file.get(), impl_->path, tensor.begin + offset, out);
}

void write_safetensors(const std::filesystem::path& path, std::span<const SafetensorsEntry> entries,
                       const std::map<std::string, std::string>& metadata) {
  write_safetensors(path, planned(path, entries), metadata);
}

std::vector<PlannedTensor> planned(const std::filesystem::path& path,
                                   std::span<const SafetensorsEntry> entries) {
  std::vector<PlannedTensor> tensors;
  for (const SafetensorsEntry& entry : entries) {
    if (!entry.data.contiguous())
      refuse(path, fmt::format("tensor \"{}\" has strides {} at shape {}; expected contiguous", entry.name,
                               to_string(entry.data.strides), to_string(entry.data.shape)));
    const std::span bytes(entry.data.data, static_cast<std::size_t>(entry.data.bytes()));
    tensors.push_back({entry.name, entry.data.dtype, entry.data.shape, [bytes] { return bytes; }});
  }
  return tensors;
}

std::uint64_t write_safetensors(const std::filesystem::path& path, std::span<const PlannedTensor> tensors,
                                const std::map<std::string, std::string>& metadata,
                                const std::function<void(std::string_view step)>& on_step) {
  std::vector<const PlannedTensor*> order;
  std::set<std::string_view> names;
  for (const PlannedTensor& tensor : tensors) {
    if (tensor.name == kMetadataKey)
      refuse(path, fmt::format("a tensor may not be called \"{}\"", kMetadataKey));
    if (tensor.name.find('\0') != std::string::npos)
      refuse(path, fmt::format("the name of a tensor, \"{}\", continues after a NUL", tensor.name.c_str()));
    if (!names.insert(tensor.name).second)
      refuse(path, fmt::format("tensor \"{}\" is given twice", tensor.name));
    order.push_back(&tensor);
  }
  std::sort(order.begin(), order.end(), [](const PlannedTensor* a, const PlannedTensor* b) {
    const int a_size = size_bytes(a->dtype), b_size = size_bytes(b->dtype);
    return a_size != b_size ? a_size > b_size : a->name < b->name;
  });

  json header = json::object();  // a sorted map: the header lists tensors by name
  if (!metadata.empty()) header[std::string(kMetadataKey)] = metadata;
  std::size_t values = 2 + metadata.size();
  std::int64_t end = 0;
  for (const PlannedTensor* entry : order) {
    const std::int64_t begin = end;
    end += entry->shape.count() * size_bytes(entry->dtype);
    const auto shape = entry->shape.values();
    values += 6 + shape.size();  // the entry, dtype, shape, data_offsets and two numbers
    header[entry->name] = {{"dtype", file_name_of(entry->dtype)},
                           {"shape", std::vector<std::int64_t>(shape.begin(), shape.end())},
                           {"data_offsets", {begin, end}}};
  }
  std::string text;
  try {
    text = header.dump();
  } catch (const json::type_error&) {
    refuse(path, "a name or a metadata string is not UTF-8");
  }
  const auto used = static_cast<std::size_t>(kLengthBytes) + text.size();
  text.append((kAlignment - used % kAlignment) % kAlignment, ' ');
  if (text.size() > kHeaderLimits.bytes || values > kHeaderLimits.values)  // no reader would take it
    refuse(path,
           fmt::format("the header of {} tensors has {} bytes and {} values; at most {} and {} are allowed",
                       order.size(), text.size(), values, kHeaderLimits.bytes, kHeaderLimits.values));

  AtomicFile file(path, on_step);
  const std::uint64_t header_bytes = text.size();
  file.write(std::as_bytes(std::span(&header_bytes, 1)));
  file.write(text);
  for (const PlannedTensor* entry : order) {
    file.write(entry->bytes());
  }
  file.commit();
  return hash_of_header(text);
}

}  // namespace weft
