// Decides which sizes take which path, by operation and number of ranks. All measured thresholds are here.
#pragma once

#include <algorithm>
#include <cstdint>

#include "backends/shm/control.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::shm {

/// [from, to) bytes of the longer of the two buffers of a call.
struct SizeRange {
  std::int64_t from = 0, to = 0;
  bool has(std::int64_t bytes) const noexcept { return bytes >= from && bytes < to; }
};

/// The sizes for which the kernel's single copies are faster than staging. Measured by
///   WEFT_SINGLE_COPY=push chrt -f 10 build/release/bin/paths_bench 2     (and 4, without chrt)
/// on two cores. A system call costs more than small stages, especially if ranks share cores. Beyond the
/// shared cache, where memory limits a reduction, the staged path writes past the caches. If all ranks give
/// to all, there are n (n - 1) system calls. With 4 to 32 ranks on two cores
///   WEFT_SINGLE_COPY=pull chrt -f 10 build/release/bin/paths_bench 32 all_to_all foreign     (and 4, 8, 16)
/// single copies are faster from 0.5 to 2 MiB on, for every number of ranks.
struct SingleCopyRow {
  int ranks;           ///< up to this many bytes
  SizeRange pushed;    ///< all_reduce, reduce
  SizeRange combined;  ///< reduce_scatter
  SizeRange moved;     ///< all ranks give to all, or to one: each rank copies
  SizeRange given;     ///< one rank sends to the others; if staged, the root copies at the same time as the
                       ///< others
};
inline constexpr std::int64_t kNoLimit = INT64_MAX;
inline constexpr SingleCopyRow kSingleCopy[] = {
    {2, {32 << 10, 64 << 20}, {32 << 10, 16 << 20}, {16 << 10, kNoLimit}, {16 << 10, 1 << 20}},
    {64, {1 << 20, 64 << 20}, {1 << 20, 16 << 20}, {1 << 20, kNoLimit}, {}},
};

constexpr SizeRange profitable_single_copy(Op op, int ranks) noexcept {
  const OpRow r = row(op);
  for (const SingleCopyRow& line : kSingleCopy) {
    if (ranks > line.ranks) continue;
    if (r.reduces) return r.counts == Counts::equal ? line.pushed : line.combined;
    return r.rooted == Rooted::in_at_root ? line.given : line.moved;
  }
  return {};  // never measured
}

/// Payloads of up to this many bytes travel with the arrival. For more bytes staging is faster for
/// reductions, because each rank then reads only a part of the other ranks' data. Measured by
///   chrt -f 10 weft bench all_reduce --memory foreign --bytes 2048,4096,8192          (and the others)
constexpr std::int64_t inline_bytes(Op op) noexcept {
  return row(op).reduces ? 4 << 10 : static_cast<std::int64_t>(kInlineBytes);
}

/// If all ranks share their memory, a call that could travel with its arrival is done in place
/// instead, from this many bytes on. That saves the copies into the line and out of it, and costs
/// one more synchronisation. Measured by chrt -f 10 build/release/bin/paths_bench 2 all shared
/// 4096
///   nice -n -15 weft bench all_reduce --ranks 4 --memory shared --bytes 2048,4096,8192     (and all_to_all)
/// If ranks share cores, a synchronisation costs more than 2 KiB of payload.
struct InPlaceRow {
  int ranks;  ///< up to this many bytes
  std::int64_t from;
};
inline constexpr InPlaceRow kInPlace[] = {{2, 1024}, {64, 4096}};

constexpr std::int64_t in_place_from(int ranks) noexcept {
  for (const InPlaceRow& line : kInPlace)
    if (ranks <= line.ranks) return line.from;
  return kNoLimit;
}

/// Bytes of an inline payload, behind the arrival's first line, that are prefetched before the arrival is
/// seen. With more bytes, lines would be fetched away from the rank that writes them. Measured by
///   chrt -f 10 weft bench all_reduce --memory foreign --bytes 8,128,512,1024,2048
inline constexpr std::int64_t kAskedAhead = 448;

/// A message of more bytes is read in place if the receiver reaches it itself. Measured by
///   chrt -f 10 weft bench p2p --bytes 2048,4096,6000,8192
inline constexpr std::int64_t kExposedFrom = 4096;

/// From this many bytes on, both ranks copy a message that the receiver reads by the kernel, if it is the
/// only one in flight and the sender waits. Such a message is in no cache, and one core alone cannot use the
/// full bandwidth of the memory. Measured by chrt -f 10 weft bench p2p --memory foreign --bytes
/// 512K,1M,2M,8M,32M
inline constexpr std::int64_t kHelpFrom = std::int64_t{2} << 20;

/// From so many bytes on, results do not stay in the caches. Stores that bypass the caches need not read the
/// lines first.
inline constexpr std::int64_t kStreamFrom = std::int64_t{64} << 20;

// The figures for exchanges were measured by
//   chrt -f 20 weft bench halo_rows,halo_columns --memory shared,foreign --bytes 128,1024,4K,8K,16K,64K,1M
/// If ranks share cores, up to so many bytes are packed, in whatever memory the fields lie, because a copy in
/// place takes one more switch between ranks. With eight ranks on two cores (`halo_bench --op halo_rows
/// --ranks 8`) 4 KiB take 17.2 us in place and 11.9 us packed; 64 KiB take 22 us in place and 33 us packed.
inline constexpr std::int64_t kPackedOnSharedCores = 16 << 10;
/// Up to so many packed bytes begin in the first line of a slot.
inline constexpr std::int64_t kFewBytes = 1024;
/// Up to so many bytes are packed, in whatever memory they lie.
inline constexpr std::int64_t kPackedBytes = kFewBytes;
/// From this many bytes on, the possible ways are measured (ways.hpp). Fewer bytes are packed run by run.
inline constexpr std::int64_t kMeasuredBytes = 8 << 10;
/// From kKernelBytes on the kernel may copy, if runs have at least kLongRun bytes on average. Each run costs
/// the kernel 0.4 us, as much as 6 KiB. Shorter runs may be gathered.
inline constexpr std::int64_t kKernelBytes = 12 << 10, kLongRun = 16 << 10;
/// If runs have fewer bytes than this on average, packing is tried in addition to copies from memory that the
/// receiver reaches.
inline constexpr std::int64_t kScatteredRun = 64;
/// From kStreamedBytes packed bytes on, in runs of at least kStreamedRun on average, the receiver may write
/// past its caches. Fewer bytes would stay in the caches, and shorter runs would write lines in parts.
inline constexpr std::int64_t kStreamedBytes = 8 << 20, kStreamedRun = 512;

}  // namespace weft::shm
