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
#include <string_view>

#include "weft/base/clock.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

class Arena;
class Logger;

/// Memory mapped by several processes or threads: a group's control block. Zero-filled when made. Unmapped
/// with the last owner; excluded from children by fork and from core dumps.
struct Region {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};
using RegionRef = std::shared_ptr<const Region>;

/// What a process publishes about itself, so that others find it. Encoded as one line of text for the Store.
struct ProcessAddress {
  /// Boot id, pid namespace and network namespace: equal means that memory can be shared. Random where the
  /// system does not tell (is_unknown_host()).
  std::string host;
  std::string socket;  ///< abstract socket name, without the leading zero byte; random
  std::uint32_t user = 0;
  std::int32_t pid = 0;
  std::int32_t block = -1;  ///< its block's descriptor there; -1: none, or not to be opened so
  std::uint64_t block_inode = 0;
  std::string encode() const;
  /// Throws mismatch with the text where it is not an address.
  static ProcessAddress decode(const std::string& text);
  friend bool operator==(const ProcessAddress&, const ProcessAddress&) = default;
};

/// Whether a ProcessAddress::host is of a process that could not tell where it is.
bool is_unknown_host(std::string_view host) noexcept;
inline constexpr const char* kUnknownHostText =
    "/proc/sys/kernel/random/boot_id or /proc/self/ns cannot be read (is /proc mounted?)";

/// One process of this host (perhaps this one), watched by pidfd. Shared by all groups that have ranks there.
class PeerProcess {
 public:
  virtual ~PeerProcess() = default;
  virtual const ProcessAddress& address() const noexcept = 0;
  virtual bool is_self() const noexcept = 0;
  /// False once the process or its Context has ended, or it has become another program. One cheap system
  /// call.
  virtual bool alive() const noexcept = 0;
  enum class State { running, stopped, ended };
  /// More than alive() sees, by a read of /proc (some 20 µs). A process that writes its core has ended, long
  /// before its pidfd says so; alive() is false from then on.
  virtual State look() noexcept = 0;
  /// This process's mapping of that process's segment, or null where not mapped (yet). Lock-free.
  virtual std::byte* segment(std::uint32_t index) const noexcept = 0;
  /// Maps segments [0, count) that are not mapped yet. Where their owner has to be asked for the descriptors,
  /// gives up at the deadline (a stopped owner). True: all are mapped. A refused mmap is final for that
  /// segment and logged once.
  virtual bool map_segments(std::uint32_t count, Deadline deadline) noexcept = 0;
  /// The doorbell of that number there. Null: there is none.
  virtual Doorbell doorbell(int number) const noexcept = 0;
};
using PeerProcessRef = std::shared_ptr<PeerProcess>;

class HostPeers {
 public:
  static constexpr int kMaxDoorbells = 1024;  ///< ranks that are threads of one process

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
