// A transport of the host's own, as weft_transport describes it.
#pragma once

#include <cstdint>
#include <memory>
#include <span>
#include <string>
#include <vector>

#include "capi/handles.hpp"
#include "weft/backends/backend.hpp"

namespace weft::capi {

/// The functions of a host, and its texts.
struct HostTransport {
  weft_transport calls;
  std::string name;
  int rank;  ///< of this process, in the numbering of the transport
};

/// Throws bad_argument if the struct is not as weft/c/transport.h wants it.
std::shared_ptr<const HostTransport> host_transport(const char* function, const weft_transport* transport,
                                                    int rank);

/// By rank of the group, its rank in the transport, from the addresses of the ranks
/// (StreamTransport::address). Throws mismatch if it is no number.
std::vector<std::int32_t> transport_ranks(const GroupInit& b, std::span<const std::string> addresses);

}  // namespace weft::capi
