// The kernel's single copies between processes, which WEFT_SINGLE_COPY=push asks for: a rank reads and writes
// the foreign memory of another process by process_vm_readv and process_vm_writev. Used by the owner of a
// group alone.
//
// It is no default. The kernel writes to an address, whoever owns it then: a rank that is stopped on its way
// into the system call writes when it goes on, and nobody can stop it, or give it other pages, as is done
// with shared memory. So a group that uses it promises no quiesce() where a peer is stopped: see
// shm_single_copy_traits().
//
// A process is named by its number, which the system may give to another once it has ended. It does so only
// after all others have been used, so a look at the peer's pidfd holds for a millisecond.
#pragma once

#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/shm/group.hpp"

namespace weft::shm {

/// What WEFT_SINGLE_COPY says. Throws bad_argument where it says neither.
SingleCopy single_copy_setting();
std::string_view name(SingleCopy setting) noexcept;

/// Finds out, while a group is made, whether all its ranks may reach each other so: ptrace restrictions, a
/// seccomp filter or a container may forbid it, to some or to all. Each rank has a word per peer, which that
/// peer reads, writes and reads again. Three steps, with a meeting of all ranks between one and the next;
/// does nothing where the setting is off or all ranks are threads of one process.
class SingleCopyProbe {
 public:
  SingleCopyProbe(Group& g, SingleCopy setting);
  void look() noexcept;  ///< tries, and says how it went
  void
  settle();  ///< sets Group::single_copy alike on all ranks; says at level info where it is not permitted

 private:
  Group& group_;
  const bool wanted_;
  std::vector<std::uint64_t> words_;
};

/// Copies between this process and others.
class PeerMemory {
 public:
  explicit PeerMemory(const Group& g);
  /// Copies bytes at `address` of rank r's process to `to`, whole. False: it cannot be, and the group has
  /// failed: peer_lost where r has died, else system, naming it.
  bool read(const OpState& s, int r, std::uint64_t address, std::byte* to, std::int64_t bytes) noexcept;
  /// The other way.
  bool write(const OpState& s, int r, const std::byte* from, std::uint64_t address,
             std::int64_t bytes) noexcept;

 private:
  template <class Copy>
  bool copy(const OpState& s, int r, std::int64_t bytes, const char* what, const Copy& copy) noexcept;

  const Group& group_;
  std::vector<Clock::time_point> seen_alive_;  // by rank
};

}  // namespace weft::shm
