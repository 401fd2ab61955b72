// The facts that each rank of a group over shared memory gives the other ranks through the store.
#pragma once

#include <fmt/format.h>

#include <string>
#include <string_view>

#include "backends/shm/group.hpp"
#include "base/parse_number.hpp"
#include "host/cores/usable_cores.hpp"
#include "host/peers.hpp"
#include "store/table.hpp"
#include "weft/base/error.hpp"

namespace weft::shm {

struct BootstrapInfo {
  static constexpr int kMostRegions = 1 << 30;
  int doorbell = 0;
  SingleCopy single_copy = SingleCopy::off;
  int region = 0;  ///< on rank 0: the number of the group's region in its process, see region_name()
  CpuShare cores;
  ProcessAddress address;

  std::string encode() const {
    return fmt::format("{} {} {} {} {}", doorbell, static_cast<int>(single_copy), region, cores.encode(),
                       address.encode());
  }
  /// Throws mismatch, with the text, if the text is no BootstrapInfo.
  static BootstrapInfo decode(std::string_view text) {
    std::string_view rest = text;
    const auto doorbell = next_integer(rest, 0, HostPeers::kMaxDoorbells - 1);
    const auto single_copy = next_integer(rest, 0, static_cast<int>(SingleCopy::push));
    const auto region = next_integer(rest, 0, kMostRegions);
    if (!doorbell || !single_copy || !region)
      throw Error(
          ErrorCode::mismatch,
          fmt::format("shm: {} is no rank's info; expected \"<doorbell from 0 to {}> <single copy from 0 "
                      "to {}> <region from 0 to {}> <cores> <process address>\"",
                      shown_key(text), HostPeers::kMaxDoorbells - 1, static_cast<int>(SingleCopy::push),
                      kMostRegions));
    const CpuShare cores = CpuShare::decode(std::string(next_word(rest)));
    return {.doorbell = *doorbell,
            .single_copy = static_cast<SingleCopy>(*single_copy),
            .region = *region,
            .cores = cores,
            .address = ProcessAddress::decode(std::string(rest))};
  }
};

}  // namespace weft::shm
