// The kernel's single copies between processes, for foreign memory. WEFT_SINGLE_COPY controls what ranks may
// do:
//
//   off nothing pull read each other's memory (process_vm_readv) push write it, too (process_vm_writev) auto
//   the default: off if staging is faster at every size (staging_beats_kernel_copies), otherwise pull
//
// Pushing is not the default. The kernel writes to an address, whatever that memory is used for at that time.
// If a rank is stopped just before the system call, it writes when it goes on. This cannot be prevented, and
// the memory cannot be given other pages, as shared memory can. So a group that pushes does not promise
// quiesce() while a peer is stopped: see shm_single_copy_traits(). A late read does no harm, because the
// reading rank's own call has failed.
//
// Such a system call may block in the kernel as long as a page of the peer's memory does not arrive (a mapped
// file on NFS or FUSE, userfaultfd). Only SIGKILL ends it. Meanwhile no thread can check this group's
// deadlines. But abort(), quiesce(), other calls and destructors on other threads do not wait for the system
// call (GroupState::own_within). If pages are slow, weft copies page by page, and checks the abort record and
// the rank's other groups between two pages. WEFT_SINGLE_COPY=off avoids these system calls.
//
// The system calls name a process by its number. When the process has ended, the system may give the number
// to another process, but only after it has used all other numbers. So the result of one check of the peer's
// pidfd is valid for a millisecond. A rank looks before it writes, and after it has read. Only the owner of a
// group uses this code.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <string>
#include <vector>

#include "backends/shm/exchange/pieces.hpp"
#include "backends/shm/group.hpp"
#include "host/peers/kernel_copy.hpp"

namespace weft::shm {

/// Returns the single copies that ranks may use with that setting on this processor.
SingleCopy single_copy_of(SingleCopySetting setting);
std::string_view name(SingleCopy setting) noexcept;

/// Determines, while a group is made, which single copies of the setting all its ranks may use. ptrace
/// restrictions, a seccomp filter or a container may forbid them, to some ranks or to all. Each rank has a
/// word per peer, which that peer reads and, for `push`, also writes and reads again. There are three steps,
/// with a barrier of all ranks between two steps. It does nothing if all ranks are threads of one process.
class SingleCopyProbe {
 public:
  /// `calls`: the single copies that calls should use, equal on all ranks. `may_pull`: whether the setting
  /// lets exchanges read.
  SingleCopyProbe(Group& g, SingleCopy calls, bool may_pull);
  /// Tries the copies, and publishes the result.
  void look() noexcept;
  /// Sets Group::single_copy and Group::may_pull to the same values on all ranks; logs at level info if
  /// single copies are not permitted.
  void settle();

 private:
  Group& group_;
  const SingleCopy calls_, requested_;
  std::vector<std::uint64_t> words_;
};

/// Knows which memory of this process the kernel copies for other processes. The kernel refuses memory of a
/// device's driver (some kinds of pinned buffers) and secret memory (memfd_secret). Such memory is staged.
class OwnMemory {
 public:
  /// Lets the kernel copy the first and the last byte of a range that is not known yet, which takes a
  /// microsecond. A range that was copyable is not tried again: if memory that is not copyable replaces it
  /// later, the reader gets an error.
  bool copyable(const std::byte* data, std::size_t bytes) noexcept;

 private:
  struct Range {
    const std::byte *from = nullptr, *to = nullptr;
  };
  std::array<Range, 8> known_{};
  std::size_t oldest_ = 0;
};

/// Copies between this process and other processes.
class PeerMemory {
 public:
  /// `most`: the most bytes of one system call.
  explicit PeerMemory(const Group& g, std::int64_t most = kChunkBytes);
  /// Copies all bytes at `address` of rank r's process to `to`. Returns false if the copy failed. The group
  /// has then failed, with peer_lost if rank r has died and with system otherwise; the Error names r.
  bool read(const OpState& s, int r, std::uint64_t address, std::byte* to, std::int64_t bytes) noexcept;
  /// The most bytes that a step should copy: few if the peers' pages arrive slowly, so that the owner of the
  /// group soon polls all other calls.
  std::int64_t most() const noexcept { return pace_.bytes(); }
  /// Like read() above, for bytes [from, from + bytes) of the pieces `there`, which are copied to the same
  /// byte range of `here`.
  bool read(const OpState& s, int r, const Pieces& there, const Pieces& here, std::int64_t from,
            std::int64_t bytes) noexcept;
  /// Copies in the other direction, from this process to rank r's process.
  bool write(const OpState& s, int r, const std::byte* from, std::uint64_t address,
             std::int64_t bytes) noexcept;

 private:
  template <class Copy>
  bool copy(const OpState& s, int r, std::int64_t bytes, bool writes, const Copy& copy) noexcept;
  int look(int r) noexcept;

  const Group& group_;
  KernelPace pace_;
  std::vector<Clock::time_point> seen_alive_;  // by rank
};

}  // namespace weft::shm
