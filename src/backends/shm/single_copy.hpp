// The kernel's single copies between processes, for foreign memory. WEFT_SINGLE_COPY says what ranks may do:
//
//   off    nothing
//   pull   read each other's memory (process_vm_readv)
//   push   write it, too (process_vm_writev)
//   auto   the default: off where staging is faster at every size (staging_beats_kernel_copies), else pull
//
// Pushing is not the default. The kernel writes to an address, whatever that memory is used for by then. A
// rank that is stopped on its way into the system call writes when it goes on. Nobody can prevent that, and
// the memory cannot be given other pages as shared memory can. So a group that pushes does not promise
// quiesce() while a peer is stopped: see shm_single_copy_traits(). A late reader harms nobody, since its own
// call has failed.
//
// A system call of these may block in the kernel for as long as a page of the peer's memory does not come: a
// file on NFS or FUSE that is mapped there, userfaultfd. Only SIGKILL ends it. Nobody else can look at this
// group's deadlines meanwhile; abort(), quiesce(), other calls and destructors on other threads do not wait
// for it (GroupState::own_within). Where pages are slow, copies go page by page, with a look at the abort
// record and at the rank's other groups between one and the next. WEFT_SINGLE_COPY=off does without.
//
// A process is named by its number. The system may give the number to another process after this one has
// ended, but only after all other numbers. So one look at the peer's pidfd is good for a millisecond. A rank
// looks before it writes, and after it has read. Used by the owner of a group alone.
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

/// The single copies that ranks may use by that setting on this processor.
SingleCopy single_copy_of(SingleCopySetting setting);
std::string_view name(SingleCopy setting) noexcept;

/// Finds out, while a group is made, which single copies of the setting all its ranks may use: ptrace
/// restrictions, a seccomp filter or a container may forbid them, to some ranks or to all. Each rank has a
/// word per peer, which that peer reads, and, to push, writes and reads again. There are three steps, with
/// a barrier of all ranks between one and the next; does nothing if all ranks are threads of one process.
class SingleCopyProbe {
 public:
  /// `calls`: the single copies that calls should use, alike on all ranks; `may_pull`: whether the setting
  /// lets exchanges read.
  SingleCopyProbe(Group& g, SingleCopy calls, bool may_pull);
  /// Tries it, and publishes the result.
  void look() noexcept;
  /// Sets Group::single_copy and Group::may_pull alike on all ranks; logs at level info if single copies
  /// are not permitted.
  void settle();

 private:
  Group& group_;
  const SingleCopy calls_, requested_;
  std::vector<std::uint64_t> words_;
};

/// Which memory of this process the kernel copies for others. It refuses memory of a device's driver (some
/// kinds of pinned buffers) and secret memory (memfd_secret), which is staged.
class OwnMemory {
 public:
  /// Has the kernel copy the first and the last byte of a range that is not known yet (a microsecond). A
  /// range that was copyable is not tried again: if it is replaced later by memory that is not, the reader
  /// gets an error.
  bool copyable(const std::byte* data, std::size_t bytes) noexcept;

 private:
  struct Range {
    const std::byte *from = nullptr, *to = nullptr;
  };
  std::array<Range, 8> known_{};
  std::size_t oldest_ = 0;
};

/// Copies between this process and others.
class PeerMemory {
 public:
  /// `most`: bytes of one system call.
  explicit PeerMemory(const Group& g, std::int64_t most = kChunkBytes);
  /// Copies all bytes at `address` of rank r's process to `to`. False: that failed, and the group has failed
  /// with peer_lost where r has died, else system, naming it.
  bool read(const OpState& s, int r, std::uint64_t address, std::byte* to, std::int64_t bytes) noexcept;
  /// The most bytes that a step should copy: few if the peers' pages arrive slowly, so that the owner of
  /// the group soon polls everything else.
  std::int64_t most() const noexcept { return pace_.bytes(); }
  /// The same of bytes [from, from + bytes) of the pieces `there`, to `here`: as many on both sides.
  bool read(const OpState& s, int r, const Pieces& there, const Pieces& here, std::int64_t from,
            std::int64_t bytes) noexcept;
  /// The other way.
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
