// The ranks of a group that run on this host: their doorbells, and whether their processes live. For
// transports that have no means of their own to wake a rank or to notice its death.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

class PeerProcess;

/// The doorbell that this rank sleeps on. A transport rings it when a thread of its own has finished
/// something; its peers ring it through HostRanks. Throws unsupported if this process has more ranks than
/// doorbells (1024).
Doorbell own_doorbell(const GroupInit& b);

/// Thread-safe.
class HostRanks {
 public:
  HostRanks() = default;  ///< for no ranks: no rank is on this host, and no rank is known to be dead
  /// The text that this rank puts into its info for join(), so that the others reach its doorbell and
  /// process: one line. Throws the errors of own_doorbell().
  static std::string address(const GroupInit& b);
  /// `addresses`: the information of all ranks, by rank. Ranks on other hosts, or of other users, have no
  /// doorbell and are never known to be dead. Throws mismatch if a text is no address, timeout if a
  /// process must be asked but is stopped and does not answer by b.deadline.
  HostRanks(const GroupInit& b, std::span<const std::string> addresses);

  /// Whether the rank is on this host, as far as this rank can tell, and belongs to the same user.
  bool is_here(int rank) const noexcept;
  /// The doorbell of `rank`; converts to false if the rank has none. Publish the data first, then ring.
  Doorbell doorbell(int rank) const noexcept;
  /// Rings the doorbells of all other ranks, so that they poll at once: after a failure, for example.
  void ring_all() const noexcept;
  /// Whether the rank's process lives, as far as this host knows. One system call. A rank that is a thread of
  /// this process lives as long as the process does.
  bool alive(int rank) const noexcept;

 private:
  struct Rank {
    std::shared_ptr<PeerProcess> process;  // null: a rank on another host, or a process that has ended
    bool ended = false;                    // the process had ended before it was reached
    Doorbell doorbell;
  };
  const Rank* find(int rank) const noexcept;  // null: no rank of this group
  int self_ = -1;
  std::vector<Rank> ranks_;
};

}  // namespace weft
