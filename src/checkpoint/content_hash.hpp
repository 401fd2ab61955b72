// Hashes that show whether a checkpoint's bytes are those that were written: XXH3 of 64 bits (Yann Collet,
// xxHash). They detect damage by a disk or a copy; an attacker can make other bytes with the same hash.
// Callable from any thread.
#pragma once

#include <cstddef>
#include <cstdint>
#include <span>
#include <string>
#include <string_view>

#include "weft/checkpoint/safetensors.hpp"

namespace weft {

std::uint64_t content_hash(std::span<const std::byte> bytes) noexcept;
/// 16 hexadecimal digits.
std::string hash_text(std::uint64_t hash);

/// A tensor's bytes are hashed in chunks, so that a rank that needs some rows need not read all.
inline constexpr std::int64_t kHashedChunk = std::int64_t{1} << 20;
/// The key of a safetensors file's metadata under which the hashes of a tensor's chunks stand.
std::string hashes_key(std::string_view tensor);
/// The hashes of all its chunks, 16 digits each, one behind the other.
std::string chunk_hashes(std::span<const std::byte> tensor);

/// Whether the file has hashes of that tensor.
bool has_hashes(const SafetensorsFile& file, std::string_view tensor);
/// SafetensorsFile::read_bytes(), and bad_argument naming the file, the tensor and the bytes where a chunk of
/// it is not as it was written. Chunks at both ends are read whole. A file without hashes is read as it is.
void read_verified(const SafetensorsFile& file, std::string_view tensor, std::int64_t offset,
                   std::span<std::byte> out);

/// A text of JSON with `"hash": "<16 digits>"` on a line of its own becomes one whose hash is that of the
/// text with zeros in their place.
void seal(std::string& json);
/// Whether it is. False, too, if there is no such line.
bool is_sealed(std::string_view json);
/// The placeholder between the quotes until seal().
inline constexpr std::string_view kNoHash = "0000000000000000";

}  // namespace weft
