#include "store/tcp/wire.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <bit>
#include <cstring>

namespace weft {
namespace {

static_assert(std::endian::native == std::endian::little, "frames are written as they lie in memory");

Parsed bad(std::string why) { return {.state = ParseState::bad, .why = std::move(why)}; }

bool is_request(FrameKind kind) { return kind >= FrameKind::get && kind <= FrameKind::prove; }
bool is_reply(FrameKind kind) { return kind >= FrameKind::found && kind <= FrameKind::wrong_proof; }

/// Returns whether a frame of that kind may have these lengths. A request has a key, except for requests of
/// the handshake, which have a fixed size; a reply has at most a value.
bool lengths_fit(const FrameHeader& h) {
  switch (h.kind) {
    case FrameKind::get:
    case FrameKind::try_get:
    case FrameKind::add:
    case FrameKind::remove:
    case FrameKind::set:
    case FrameKind::compare_set:
      return h.key_bytes > 0 && h.key_bytes <= kMaxStoreKeyBytes && h.value_bytes <= kMaxStoreValueBytes &&
             h.extra_bytes <= kMaxStoreValueBytes;
    case FrameKind::join:
    case FrameKind::prove:
    case FrameKind::challenge:
    case FrameKind::welcome:
      return h.key_bytes == 0 && h.value_bytes == kHandshakeBytes && h.extra_bytes == 0;
    case FrameKind::found:
    case FrameKind::absent:
    case FrameKind::timed_out:
    case FrameKind::refused:
    case FrameKind::secret_demanded:
    case FrameKind::wrong_proof:
      return h.key_bytes == 0 && h.value_bytes <= kMaxStoreValueBytes && h.extra_bytes == 0;
  }
  return false;
}

Parsed parse(std::string_view bytes, bool (*expected)(FrameKind), std::string_view what) {
  const std::uint32_t magic = kFrameMagic;
  if (std::memcmp(bytes.data(), &magic, std::min(bytes.size(), sizeof magic)) != 0)
    return bad(fmt::format("it does not speak this protocol (it sent {})", shown_key(bytes)));
  if (bytes.size() < sizeof(FrameHeader)) return {.bytes = sizeof(FrameHeader)};
  FrameHeader header;
  std::memcpy(static_cast<void*>(&header), bytes.data(), sizeof header);
  if (header.version != kFrameVersion)
    return bad(
        fmt::format("it speaks version {} of the protocol; expected {}", header.version, kFrameVersion));
  if (!expected(header.kind))
    return bad(fmt::format("it sent a {} of unknown kind {}", what, static_cast<int>(header.kind)));
  if (!lengths_fit(header))
    return bad(fmt::format("it announced a frame beyond the limits (key {} bytes, values {} and {})",
                           header.key_bytes, header.value_bytes, header.extra_bytes));
  Parsed result;
  result.bytes = sizeof header + header.key_bytes + header.value_bytes + header.extra_bytes;
  if (bytes.size() < result.bytes) return result;
  result.state = ParseState::whole;
  result.frame = {.kind = header.kind,
                  .number = header.number,
                  .key = bytes.substr(sizeof header, header.key_bytes),
                  .value = bytes.substr(sizeof header + header.key_bytes, header.value_bytes),
                  .extra = bytes.substr(result.bytes - header.extra_bytes, header.extra_bytes)};
  return result;
}

}  // namespace

std::string make_frame(FrameKind kind, std::string_view key, std::string_view value, std::string_view extra,
                       std::int64_t number) {
  const FrameHeader header{.kind = kind,
                           .key_bytes = static_cast<std::uint16_t>(key.size()),
                           .value_bytes = static_cast<std::uint32_t>(value.size()),
                           .extra_bytes = static_cast<std::uint32_t>(extra.size()),
                           .number = number};
  std::string frame;
  frame.reserve(sizeof header + key.size() + value.size() + extra.size());
  frame.append(reinterpret_cast<const char*>(&header), sizeof header);
  return frame.append(key).append(value).append(extra);
}

std::string make_refusal(ErrorCode code, std::string_view text) {
  return make_frame(FrameKind::refused, {}, text.substr(0, kMaxStoreValueBytes), {}, static_cast<int>(code));
}

ErrorCode refusal_code(const StoreFrame& frame) noexcept { return error_code(frame.number); }

Parsed parse_request(std::string_view bytes) { return parse(bytes, is_request, "request"); }
Parsed parse_reply(std::string_view bytes) { return parse(bytes, is_reply, "reply"); }

}  // namespace weft
