// A transport of the host's own, as weft_transport describes it, and how the ranks of a group meet over it.
#pragma once

#include <cstdint>
#include <memory>
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

/// Throws bad_argument where the struct is not as weft/c/transport.h wants it.
std::shared_ptr<const HostTransport> host_transport(const char* function, const weft_transport* transport,
                                                    int rank);

/// What each rank of a group told: its rank in the transport, and its address (HostRanks).
struct HostPlaces {
  std::vector<std::int32_t> transport_ranks;
  std::vector<std::string> addresses;
};
/// Joins the group's ranks. `layout`: as join() has it. Throws what join() throws, and mismatch where a rank has another
/// transport.
HostPlaces meet_over(const HostTransport& host, const GroupInit& b, std::uint64_t layout);

}  // namespace weft::capi
