#include "capi/transport/host_transport.hpp"

#include <algorithm>
#include <limits>

#include "base/parse_number.hpp"
#include "weft/backends/host_ranks.hpp"
#include "weft/backends/join.hpp"

namespace weft::capi {
namespace {

constexpr std::size_t kTransportFirstBytes = 56;
static_assert(sizeof(weft_transport) == kTransportFirstBytes);

}  // namespace

HostPlaces meet_over(const HostTransport& host, const GroupInit& b, std::uint64_t layout) {
  // "rank in the transport\nname\naddress"
  const std::string own = fmt::format("{}\n{}\n{}", host.rank, host.name, HostRanks::address(b));
  std::vector<std::string> infos{own};
  if (b.size > 1) infos = join(b, "host/open", own, layout);
  std::vector<std::int32_t> transport_ranks;
  for (std::string& info : infos) {
    const int r = static_cast<int>(transport_ranks.size());
    const std::size_t first = info.find('\n'), second = info.find('\n', first + 1);
    std::string_view number(info.data(), std::min(first, info.size()));
    const auto place = next_integer<std::int32_t>(number, 0, std::numeric_limits<std::int32_t>::max());
    if (!place || second == std::string::npos)
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": rank {} told no place in a transport [rank {}]",
                                              b.name, r, b.rank),
                          .ranks = {r}});
    const std::string name = info.substr(first + 1, second - first - 1);
    if (name != host.name)
      throw Error(
          Failure{.code = ErrorCode::mismatch,
                  .text = fmt::format("group \"{}\": rank {} has the transport {}, rank {} {} [rank {}]",
                                      b.name, r, name, b.rank, host.name, b.rank),
                  .ranks = {std::min(r, b.rank), std::max(r, b.rank)}});
    transport_ranks.push_back(*place);
    info.erase(0, second + 1);
  }
  return {std::move(transport_ranks), std::move(infos)};
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
