// The other processes of this host, as seen from this one: how their memory is reached and whether they live.
//
// Each Context has a block: shared memory with its doorbells, a word that tells whether it lives, and the
// numbers of its segments' descriptors. Processes of the same user open each other's process blocks and
// segments through /proc, without asking: a peer may be stopped, and n ranks need no n² conversations. What
// /proc refuses (a process that is not dumpable) is asked for over an abstract Unix socket, on which each
// Context listens with a small thread that sleeps otherwise; so are regions. Whoever asks must run as the
// same user (SO_PEERCRED). A connection lasts as long as one conversation; what is kept per peer process is
// one pidfd. No name is left in the file system; descriptors close themselves. Thread-safe.
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
class Logger;

class HostPeers {
 public:
  static constexpr int kMaxDoorbells = kMaxProcessDoorbells;  ///< ranks that are threads of one process

  HostPeers(Logger& log, Arena& arena);
  ~HostPeers();

  const ProcessAddress& self() const noexcept;
  /// Why other processes cannot map memory of this one: "memfd_create: Operation not permitted". Empty: they
  /// can.
  const std::string& no_shared_memory() const noexcept;
  /// Checks who it is, opens the pidfd, maps its block. The same address gives the same PeerProcess
  /// while anyone holds it. Throws peer_lost (gone), timeout, unsupported (other host or other user: text
  /// says which).
  PeerProcessRef meet(const ProcessAddress& address, Deadline deadline);

  /// Makes a region of zeros and offers it under `name` to this process's threads and to its peer processes,
  /// for as long as the returned owner lives. Throws bad_argument where the name is offered already.
  RegionRef offer(const std::string& name, std::size_t bytes);
  /// The region that `owner` offers under that name; waits for it until the deadline. Within one process
  /// everybody gets the same mapping. Throws timeout, peer_lost, system.
  RegionRef open(PeerProcess& owner, const std::string& name, Deadline deadline);
  /// Throws system, with the limit, where another process has been waiting for half a second (`last`: for a
  /// moment) to connect to this one, which may have no more descriptors or memory. Does not wait.
  void check_admits(bool last) const;

  /// The number of this process's doorbell for the rank of that process rank, given at first use: what peers
  /// ask doorbell() for. Throws unsupported where kMaxDoorbells process ranks have one.
  int doorbell_number(int process_rank);
  /// That doorbell; none for a negative process rank.
  Doorbell own_doorbell(int process_rank);
  /// Puts segments that the arena has made meanwhile on the block, so that peer processes need not ask. Cheap
  /// where there are none.
  void show_segments() noexcept;
  /// A digest of where things lie on a block: equal in processes that meet.
  static std::uint64_t process_block_layout() noexcept;

 private:
  struct Impl;
  std::unique_ptr<Impl> impl_;
};

}  // namespace weft
