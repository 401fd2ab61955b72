// The ranks of a group that run on this host: their doorbells, and whether their processes are alive. It is
// for transports that cannot wake a rank, or notice its death, themselves.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

class PeerProcess;

/// The doorbell on which this rank sleeps. A transport rings it when one of its threads has finished a step.
/// Peers ring it through HostRanks. Throws unsupported if this process has more ranks than doorbells (1024).
Doorbell own_doorbell(const GroupInit& b);

/// Thread-safe.
class HostRanks {
 public:
  HostRanks() = default;  ///< for no ranks: no rank is on this host, or known to be dead
  /// The text, one line, that this rank adds to its info for join(), so that the other ranks can find its
  /// doorbell and its process. Throws the errors of own_doorbell().
  static std::string address(const GroupInit& b);
  /// `addresses`: the addresses of all ranks, by rank. Ranks on other hosts, or of other users, have no
  /// doorbell and are never reported as dead. Throws mismatch if a text is not an address. Throws timeout if
  /// this rank must ask a process that is stopped and does not answer by b.deadline.
  HostRanks(const GroupInit& b, std::span<const std::string> addresses);

  /// Whether the rank is on this host, as far as this rank can tell, and belongs to the same user.
  bool is_here(int rank) const noexcept;
  /// The doorbell of `rank`. It converts to false if the rank has none. Publish the data first, then ring.
  Doorbell doorbell(int rank) const noexcept;
  /// Rings the doorbells of all other ranks, so that they poll at once, for example after a failure.
  void ring_all() const noexcept;
  /// Whether the rank's process is alive, as far as this host knows. Makes one system call. A rank that is a
  /// thread of this process is alive as long as the process.
  bool alive(int rank) const noexcept;

 private:
  struct Rank {
    std::shared_ptr<PeerProcess> process;  // null if the rank is on another host, or its process has ended
    bool ended = false;                    // the process had ended before this rank could open it
    Doorbell doorbell;
  };
  const Rank* find(int rank) const noexcept;  // null: no rank of this group
  int self_ = -1;
  std::vector<Rank> ranks_;
};

}  // namespace weft
