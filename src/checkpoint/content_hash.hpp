// Hashes that show whether a checkpoint's bytes are the bytes that were written: XXH3 of 64 bits (Yann
// Collet, xxHash). The hashes detect damage by a disk or a copy. An attacker can make other bytes with an
// equal hash. Any thread may call them.
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

/// A tensor's bytes are hashed in chunks, so that a rank that needs some rows need not read the whole tensor.
inline constexpr std::int64_t kHashedChunk = std::int64_t{1} << 20;
/// The key of a safetensors file's metadata under which the hashes of a tensor's chunks are stored.
std::string hashes_key(std::string_view tensor);
/// The hashes of all its chunks, 16 digits each, without separators.
std::string chunk_hashes(std::span<const std::byte> tensor);

/// Returns whether the file has hashes of that tensor.
bool has_hashes(const SafetensorsFile& file, std::string_view tensor);
/// Like SafetensorsFile::read_bytes(). But it throws bad_argument that names the file, the tensor and the
/// bytes if a chunk differs from what was written. Chunks at both ends are read completely. A file without
/// hashes is read unchecked.
void read_verified(const SafetensorsFile& file, std::string_view tensor, std::int64_t offset,
                   std::span<std::byte> out);

/// Fills in the hash of a JSON text that has a line `"hash": "<16 digits>"`. The hash is computed over the
/// text with zeros in place of the digits.
void seal(std::string& json);
/// Returns whether the hash of the text is right. Returns false, too, if there is no such line.
bool is_sealed(std::string_view json);
/// The placeholder between the quotes until seal().
inline constexpr std::string_view kNoHash = "0000000000000000";

}  // namespace weft
