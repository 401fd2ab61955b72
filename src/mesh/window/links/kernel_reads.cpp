#include "mesh/window/links/kernel_reads.hpp"

#include <sys/uio.h>

#include <algorithm>
#include <cerrno>

namespace weft::windows {
namespace {

constexpr std::size_t kMostPieces = 256;  // of one system call, on a side

iovec at(std::uint64_t address, std::int64_t bytes) noexcept {
  return {reinterpret_cast<void*>(address),
          static_cast<std::size_t>(bytes)};  // NOLINT(performance-no-int-to-ptr)
}

/// Takes runs of a list, a system call's worth at a time.
class Taker {
 public:
  explicit Taker(const Pieces& pieces) : fields_(pieces.fields), pieces_(pieces.list) {}
  /// At most `bytes` of them; how many it took.
  std::int64_t take(std::int64_t bytes, std::array<iovec, kMostPieces>& list, std::size_t& count) {
    std::int64_t taken = 0;
    std::size_t i = next_;
    std::int64_t done = done_;
    for (count = 0; i < pieces_.size() && count < kMostPieces && taken < bytes; ++count) {
      const std::int64_t some = std::min(pieces_[i].bytes - done, bytes - taken);
      list[count] =
          at(fields_[pieces_[i].field] + static_cast<std::uint64_t>(pieces_[i].offset + done), some);
      taken += some;
      done += some;
      if (done == pieces_[i].bytes) ++i, done = 0;
    }
    return taken;
  }
  void advance(std::int64_t bytes) {
    while (bytes > 0) {
      const std::int64_t some = std::min(pieces_[next_].bytes - done_, bytes);
      done_ += some;
      bytes -= some;
      if (done_ == pieces_[next_].bytes) ++next_, done_ = 0;
    }
  }

 private:
  const std::uint64_t* const fields_;
  const std::vector<Piece>& pieces_;
  std::size_t next_ = 0;
  std::int64_t done_ = 0;
};

}  // namespace

void add_pieces(const Shape& counts, const std::array<std::int64_t, Dims::kMaxDims>& steps,
                std::int64_t element, std::size_t field, std::int64_t offset, std::vector<Piece>& pieces) {
  const auto step = [&](int d) { return steps[static_cast<std::size_t>(d)]; };
  int rank = counts.rank();
  std::int64_t run = element;
  while (rank > 0 && (counts[rank - 1] == 1 || step(rank - 1) == run)) {
    run *= counts[rank - 1];
    --rank;
  }
  Dims index;
  for (int d = 0; d < rank; ++d) index.push_back(0);
  for (;;) {
    std::int64_t at = offset;
    for (int d = 0; d < rank; ++d) at += index[d] * step(d);
    if (!pieces.empty() && pieces.back().field == field && pieces.back().offset + pieces.back().bytes == at)
      pieces.back().bytes += run;
    else
      pieces.push_back({field, at, run});
    int d = rank - 1;
    for (; d >= 0; --d) {
      if (++index[d] < counts[d]) break;
      index[d] = 0;
    }
    if (d < 0) return;
  }
}

bool KernelReads::finds(PeerProcess& process, std::uint64_t address, std::uint64_t expected) noexcept {
  std::uint64_t found = 0;
  const iovec here = at(reinterpret_cast<std::uint64_t>(&found), sizeof(found)),
              there = at(address, sizeof(found));
  return ::process_vm_readv(process.address().pid, &here, 1, &there, 1, 0) == sizeof(found) &&
         found == expected;
}

KernelReads::Outcome KernelReads::read(PeerProcess& process, const Pieces& there, const Pieces& here,
                                       KernelPace& pace, std::int64_t& done) noexcept {
  Taker theirs(there), ours(here);
  theirs.advance(done);
  ours.advance(done);
  std::array<iovec, kMostPieces> their_list, our_list;
  for (std::int64_t before = done;;) {
    std::size_t their_count = 0, our_count = 0;
    std::int64_t bytes = theirs.take(pace.bytes(), their_list, their_count);
    if (bytes == 0) break;
    if (done > before && (pace.slow() || done - before >= kMostBytes)) return Outcome::more;
    bytes = ours.take(bytes, our_list, our_count);
    const ssize_t got = pace.timed([&] {
      return ::process_vm_readv(process.address().pid, our_list.data(), our_count, their_list.data(),
                                their_count, 0);
    });
    // Of a process that was killed the kernel says so (ESRCH) before its peers are told.
    if (got < 0 && errno == ESRCH) return Outcome::ended;
    if (got <= 0)  // what is beyond the shorter list is not copied
      return ends_now(process) ? Outcome::ended : Outcome::refused;
    theirs.advance(got);
    ours.advance(got);
    done += got;
  }
  return process.alive() ? Outcome::copied : Outcome::ended;
}

}  // namespace weft::windows
