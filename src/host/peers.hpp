// The other processes of this host: how this process reaches their memory, and whether they are alive.
//
// Each Context has a process block. It is shared memory with the Context's doorbells, a word that says
// whether the Context is alive, and the numbers of its segments' descriptors. Processes of the same user open
// each other's blocks and segments through /proc, without a request to the other process. So a stopped peer
// delays nobody, and n ranks do not need n² connections. If /proc refuses (a process that is not dumpable),
// the process is asked over an abstract Unix socket. A small thread of each Context listens on it. Regions
// are always requested over the socket. Both processes must run as the same user (SO_PEERCRED). A connection
// lasts for one request. Per peer process only a pidfd is kept. No name remains in the file system.
// Thread-safe.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <string>

#include "host/peers/peer_process.hpp"
#include "host/peers/process_address.hpp"
#include "host/peers/region.hpp"
#include "weft/base/clock.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

class Arena;
class Context;
class Logger;

class HostPeers {
 public:
  static constexpr int kMaxDoorbells = kMaxProcessDoorbells;  ///< ranks that are threads of one process

  HostPeers(Logger& log, Arena& arena);
  ~HostPeers();

  const ProcessAddress& self() const noexcept;
  /// Returns the reason why other processes cannot map memory of this process, such as "memfd_create:
  /// Operation not permitted". Returns "" if they can.
  const std::string& no_shared_memory() const noexcept;
  /// Verifies the process's identity, opens its pidfd, and maps its block. Equal addresses give the same
  /// PeerProcess as long as it exists. Throws peer_lost if the process is gone, timeout, and unsupported if
  /// it is on another host or belongs to another user. The text says which.
  PeerProcessRef meet(const ProcessAddress& address, Deadline deadline);

  /// Makes a region of zeros and offers it under `name` to this process's threads and to its peer processes,
  /// as long as the returned owner exists. Throws bad_argument if the name is already offered.
  RegionRef offer(const std::string& name, std::size_t bytes);
  /// Returns 1, 2, …, without repetition up to 2^30. It makes region names unique if several groups have the
  /// same name in unrelated stores. Thread-safe.
  int next_region_number() noexcept;
  /// Opens the region that `owner` offers under that name. Waits for the offer until the deadline. Within one
  /// process all callers get the same mapping. Throws timeout, peer_lost or system.
  RegionRef open(PeerProcess& owner, const std::string& name, Deadline deadline);
  /// Throws system, with the limit, if another process has tried for half a second (with `last`: has tried at
  /// all) to connect to this process, and this process had no descriptor or memory for the connection. Does
  /// not wait.
  void check_admits(bool last) const;

  /// The number of the doorbell of that process rank, assigned at first use. Peers pass this number to
  /// doorbell(). Throws unsupported if kMaxDoorbells process ranks already have a doorbell.
  int doorbell_number(int process_rank);
  /// The doorbell of that process rank. None if the rank is negative.
  Doorbell own_doorbell(int process_rank);
  /// Writes the segments that the arena has made since the last call into the block, so that peer processes
  /// need not request them. Cheap if there are no new segments.
  void show_segments() noexcept;
  /// A digest of the block's layout. Processes that use each other's blocks must have equal digests.
  static std::uint64_t process_block_layout() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

/// The other processes of the host.
HostPeers& host_peers_of(Context& context) noexcept;

}  // namespace weft
