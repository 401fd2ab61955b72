#include "checkpoint/content_hash.hpp"

#include <fmt/format.h>

#define XXH_INLINE_ALL  // nothing of xxHash is linked or exported
#include <xxhash.h>

#include <algorithm>
#include <cstring>
#include <vector>

#include "base/text/printable.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

constexpr std::size_t kDigits = 16;
constexpr std::string_view kHashLine = "\n \"hash\": \"";

// The place of the digits. npos if there are none.
std::size_t hash_place(std::string_view json) {
  const std::size_t line = json.find(kHashLine);
  if (line == std::string_view::npos || json.size() < line + kHashLine.size() + kDigits) return json.npos;
  return line + kHashLine.size();
}

std::uint64_t hash_of_sealed(std::string json, std::size_t place) {
  json.replace(place, kDigits, kNoHash);
  return content_hash(std::as_bytes(std::span(json)));
}

// The hashes of a tensor's chunks from its file. Empty if the file has none.
std::string_view written_hashes(const SafetensorsFile& file, std::string_view tensor) {
  const auto found = file.metadata().find(hashes_key(tensor));
  if (found == file.metadata().end()) return {};
  const std::int64_t bytes = file.info(tensor).bytes;
  const auto chunks = static_cast<std::size_t>((bytes + kHashedChunk - 1) / kHashedChunk);
  if (found->second.size() != chunks * kDigits)
    throw Error(
        ErrorCode::corrupt,
        fmt::format("checkpoint: {}: the hashes of \"{}\" have {} digits; expected {} for its {} bytes",
                    file.path().string(), printable(std::string(tensor)), found->second.size(),
                    chunks * kDigits, bytes));
  return found->second;
}

}  // namespace

std::uint64_t content_hash(std::span<const std::byte> bytes) noexcept {
  return XXH3_64bits(bytes.data(), bytes.size());
}

std::string hash_text(std::uint64_t hash) { return fmt::format("{:016x}", hash); }

std::string hashes_key(std::string_view tensor) { return fmt::format("xxh3:{}", tensor); }

std::string chunk_hashes(std::span<const std::byte> tensor) {
  std::string hashes;
  constexpr auto kChunk = static_cast<std::size_t>(kHashedChunk);
  for (std::size_t at = 0; at < tensor.size(); at += kChunk)
    hashes += hash_text(content_hash(tensor.subspan(at, std::min(kChunk, tensor.size() - at))));
  return hashes;
}

bool has_hashes(const SafetensorsFile& file, std::string_view tensor) {
  return file.metadata().contains(hashes_key(tensor));
}

void read_verified(const SafetensorsFile& file, std::string_view tensor, std::int64_t offset,
                   std::span<std::byte> out) {
  const std::string_view hashes = written_hashes(file, tensor);
  if (hashes.empty()) return file.read_bytes(tensor, offset, out);
  const SafetensorsInfo& info = file.info(tensor);
  const std::int64_t end = offset + static_cast<std::int64_t>(out.size());
  std::vector<std::byte> whole_chunk;
  for (std::int64_t at = offset; at < end;) {
    const std::int64_t chunk = at / kHashedChunk, first = chunk * kHashedChunk;
    const std::int64_t last = std::min(first + kHashedChunk, info.bytes);
    const std::int64_t until = std::min(last, end);
    const std::span<std::byte> target =
        out.subspan(static_cast<std::size_t>(at - offset), static_cast<std::size_t>(until - at));
    const bool whole = at == first && until == last;
    if (!whole) whole_chunk.resize(static_cast<std::size_t>(last - first));
    const std::span<std::byte> read = whole ? target : std::span(whole_chunk);
    file.read_bytes(tensor, first, read);
    const std::string_view written = hashes.substr(static_cast<std::size_t>(chunk) * kDigits, kDigits);
    if (hash_text(content_hash(read)) != written)
      throw Error(ErrorCode::corrupt,
                  fmt::format("checkpoint: {}: bytes {} to {}, of \"{}\", are not those that were written "
                              "(their hash is not {})",
                              file.path().string(), info.begin + first, info.begin + last,
                              printable(std::string(tensor)), written));
    if (!whole) std::memcpy(target.data(), whole_chunk.data() + (at - first), target.size());
    at = until;
  }
}

void seal(std::string& json) {
  const std::size_t place = hash_place(json);
  if (place != json.npos) json.replace(place, kDigits, hash_text(hash_of_sealed(json, place)));
}

bool is_sealed(std::string_view json) {
  const std::size_t place = hash_place(json);
  return place != json.npos &&
         json.substr(place, kDigits) == hash_text(hash_of_sealed(std::string(json), place));
}

}  // namespace weft
