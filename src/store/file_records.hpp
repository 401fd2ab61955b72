// The record format of the file store. This code uses no file, so that the parser can be tested and fuzzed
// with bytes alone.
//
// A record is a header (24 bytes, little-endian: magic, change, lengths, checksum of everything else), key
// and value.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <string_view>

#include "store/parse_state.hpp"

namespace weft {

inline constexpr std::string_view kStoreFileHeader = "weftlog1";

/// The result of parse_record(); it points into the given bytes.
struct StoreRecord {
  enum class Change : std::uint32_t { set = 1, remove = 2 };
  ParseState state = ParseState::more;
  Change change = Change::set;
  std::string_view key{}, value{};
  std::size_t bytes = 0;   ///< size of the record, if the state is `whole`
  std::string_view why{};  ///< the reason, if the state is `bad`
};

/// Parses the record at the front of `bytes`. The state is `more` if the end of the record has not been
/// written yet.
StoreRecord parse_record(std::string_view bytes);
std::string make_record(StoreRecord::Change change, std::string_view key, std::string_view value);

}  // namespace weft
