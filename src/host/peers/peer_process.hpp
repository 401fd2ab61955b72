// One process of this host, as its peer processes see it: whether it is alive, its segments, its doorbells.
#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>

#include "base/shared_words.hpp"
#include "host/peers/process_address.hpp"
#include "weft/base/clock.hpp"
#include "weft/host/doorbell.hpp"

namespace weft {

inline constexpr int kMaxProcessDoorbells = 1024;  ///< ranks that are threads of one process

/// One process of this host (perhaps this one), watched by pidfd. All groups that have ranks in the process
/// share this object.
class PeerProcess {
 public:
  virtual ~PeerProcess() = default;
  virtual const ProcessAddress& address() const noexcept = 0;
  virtual bool is_self() const noexcept = 0;
  /// Returns false if the process or its Context has ended, or if the process has become another program.
  /// Makes one cheap system call.
  virtual bool alive() const noexcept = 0;
  enum class State { running, stopped, ended };
  /// Detects more than alive(), by reading /proc (some 20 µs). A process that writes its core dump counts as
  /// ended, long before its pidfd reports the end; alive() then returns false, too.
  virtual State look() noexcept = 0;
  /// A segment as this process has mapped it: null and 0 bytes if it is not mapped (yet).
  struct MappedSegment {
    std::byte* begin = nullptr;
    std::size_t bytes = 0;
  };
  /// The address at which this process has mapped the other process's segment. Lock-free: called for each
  /// buffer of each direct call.
  virtual MappedSegment mapped(std::uint32_t index) const noexcept = 0;
  std::byte* segment(std::uint32_t index) const noexcept { return mapped(index).begin; }
  /// Returns the address, in this process, of bytes that the other process has named by their place. Returns
  /// null if the bytes do not lie in a mapped segment.
  std::byte* find(std::uint64_t segment, std::uint64_t offset, std::int64_t bytes) const noexcept {
    const auto index = static_cast<std::uint32_t>(segment);
    if (index != segment) return nullptr;
    const MappedSegment there = mapped(index);
    return is_within(offset, bytes, there.bytes) ? there.begin + offset : nullptr;
  }
  /// Maps the segments [0, count) that are not mapped yet. If it must request the descriptors from their
  /// owner, it gives up at the deadline, because the owner may be stopped. Returns true if all these segments
  /// are mapped. If the system refuses the mmap of a segment, this is final, and is logged once.
  virtual bool map_segments(std::uint32_t count, Deadline deadline) noexcept = 0;
  /// Returns whether the mmap of that segment was refused.
  virtual bool is_refused(std::uint64_t index) const noexcept = 0;
  /// Returns the doorbell with that number in that process, or an empty Doorbell if there is none.
  virtual Doorbell doorbell(int number) const noexcept = 0;
};
using PeerProcessRef = std::shared_ptr<PeerProcess>;

}  // namespace weft
