#include "capi/transport/host_transport.hpp"

#include <algorithm>

#include "base/parse_number.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kTransportFirstBytes = 56;
static_assert(sizeof(weft_transport) == kTransportFirstBytes);

}  // namespace

std::vector<std::int32_t> transport_ranks(const GroupInit& b, std::span<const std::string> addresses) {
  std::vector<std::int32_t> ranks;
  for (const std::string& address : addresses) {
    const auto rank = parse_integer<std::int32_t>(address);
    if (!rank || *rank < 0) {
      const int r = static_cast<int>(ranks.size());
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": rank {} gave no place in a transport [rank {}]",
                                              b.name, r, b.rank),
                          .ranks = {r}});
    }
    ranks.push_back(*rank);
  }
  return ranks;
}

std::shared_ptr<const HostTransport> host_transport(const char* function, const weft_transport* transport,
                                                    int rank) {
  constexpr std::size_t kLongestName = 31;
  given(function, transport, "transport");
  const weft_transport t = read(function, transport, weft_transport WEFT_TRANSPORT_INIT, kTransportFirstBytes,
                                "WEFT_TRANSPORT_INIT", "transport");
  const std::string name = &given(function, t.name, "transport->name");
  const bool plain = std::all_of(name.begin(), name.end(), [](char c) {
    return (c >= 'a' && c <= 'z') || (c >= 'A' && c <= 'Z') || (c >= '0' && c <= '9') || c == '-' || c == '_';
  });
  if (name.empty() || name.size() > kLongestName || !plain)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("transport->name is \"{}\"; expected 1 to {} letters, digits, '-', '_'", name,
                       kLongestName));
  const auto needed = [&](bool there, const char* what) {
    if (!there) refuse(ErrorCode::bad_argument, function, fmt::format("transport->{} is NULL", what));
  };
  needed(t.open != nullptr, "open");
  needed(t.write != nullptr, "write");
  needed(t.read != nullptr, "read");
  return std::make_shared<const HostTransport>(HostTransport{t, name, rank});
}

}  // namespace weft::capi
