#include "store/file_records.hpp"

#include <cstring>

#include "base/hash.hpp"
#include "store/table.hpp"

namespace weft {
namespace {

constexpr std::uint32_t kMagic = 0x52544657;  // "WFTR"

struct Header {
  std::uint32_t magic = kMagic;
  StoreRecord::Change change = StoreRecord::Change::set;
  std::uint32_t key_bytes = 0;
  std::uint32_t value_bytes = 0;
  std::uint64_t checksum = 0;  // the checksum of all other bytes of the record
};
static_assert(sizeof(Header) == 24);

// The checksum detects damage; it does not protect against attackers.
std::uint64_t checksum(Header header, std::string_view key_and_value) {
  header.checksum = 0;
  Fnv1a hash;
  hash.add({reinterpret_cast<const char*>(&header), sizeof header});
  hash.add(key_and_value);
  return hash.value;
}

}  // namespace

StoreRecord parse_record(std::string_view bytes) {
  StoreRecord record;
  if (bytes.size() < sizeof(Header)) return record;
  Header header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  const auto bad = [&](std::string_view why) {
    record.state = ParseState::bad;
    record.why = why;
    return record;
  };
  if (header.magic != kMagic || header.key_bytes == 0 || header.key_bytes > kMaxStoreKeyBytes ||
      header.value_bytes > kMaxStoreValueBytes ||
      (header.change != StoreRecord::Change::set && header.change != StoreRecord::Change::remove))
    return bad("no record begins there");
  const std::size_t body = header.key_bytes + header.value_bytes;
  if (bytes.size() < sizeof header + body) return record;
  if (checksum(header, bytes.substr(sizeof header, body)) != header.checksum)
    return bad("the checksum of the record there is wrong");
  record.state = ParseState::whole;
  record.change = header.change;
  record.key = bytes.substr(sizeof header, header.key_bytes);
  record.value = bytes.substr(sizeof header + header.key_bytes, header.value_bytes);
  record.bytes = sizeof header + body;
  return record;
}

std::string make_record(StoreRecord::Change change, std::string_view key, std::string_view value) {
  Header header{.change = change,
                .key_bytes = static_cast<std::uint32_t>(key.size()),
                .value_bytes = static_cast<std::uint32_t>(value.size())};
  const std::string body = std::string(key).append(value);
  header.checksum = checksum(header, body);
  return std::string(reinterpret_cast<const char*>(&header), sizeof header).append(body);
}

}  // namespace weft
