// The path of single copies, for foreign memory that the kernel may copy between processes: WEFT_SINGLE_COPY.
// Synchronised as the direct path is, by the arrival and by the `finished` of those who touch this rank's
// memory.
//
// all_reduce and reduce push, where that is asked for: a rank reads a piece of its part of each peer's `in`
// into a buffer that stays in the cache, combines, and writes the result to its own `out` and from there to
// the others'. In reduce_scatter it keeps the result. All else pulls: the kernel copies from the peer's `in`
// to this rank's `out`. Memory that this rank reaches itself, being shared, is read and written in place, as
// on the direct path, whose pull() and frame, touch(), serve here too.
#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "backends/shm/collectives.hpp"
#include "backends/shm/paths.hpp"
#include "reduce/reduce.hpp"

namespace weft::shm {
namespace {

// Bytes of one rank's piece, a cache line at least. Of up to 4096 ranks they fit in kChunkBytes together.
std::int64_t piece_bytes(int ranks) noexcept {
  return std::max<std::int64_t>(std::min<std::int64_t>(kPieceBytes, kChunkBytes / ranks) / kLine, 1) * kLine;
}

}  // namespace

// Whether single copies are faster than staging: a pure function of what all ranks know, as is the count.
bool Collectives::is_profitable(const OpState& s, std::int64_t count) const noexcept {
  if (s.op == Op::all_to_all_v) return false;  // nobody knows how much there is
  const Counts counts = row(s.op).counts;
  const bool each = counts == Counts::out_is_n_in || counts == Counts::in_is_n_out;  // told by one block of n
  const std::int64_t bytes = count * size_bytes(s.dtype) * (each ? group_.size : 1);
  return profitable_single_copy(s.op, group_.size).has(bytes);
}

// Allocates the pieces at first use, not zeroed. False: there is no memory, and the group has failed.
bool Collectives::have_pieces(const OpState& s) noexcept {
  if (pieces_ != nullptr) return true;
  const std::int64_t bytes = group_.size * piece_bytes(group_.size);
  pieces_.reset(new (std::nothrow) Line[static_cast<std::size_t>(bytes) / sizeof(Line)]);
  if (pieces_ != nullptr) return true;
  Failure why{.code = ErrorCode::system, .text = {}, .op = s.op, .call = s.call, .ranks = {}};
  try {
    why.text = fmt::format("{}: rank {} has no memory for {} bytes that it reads from its peers", name(s.op),
                           group_.rank, bytes);
    why.ranks = {group_.rank};
  } catch (...) {  // not for the words either
  }
  raise(group_, why);
  return false;
}

// A piece of this rank's part of all inputs. Done: it was the last.
Step Collectives::push(OpState& s) noexcept {
  State& st = state(s);
  const std::int64_t element = size_bytes(s.dtype), room = piece_bytes(group_.size);
  const auto [begin, count] = own_part(s);
  const std::int64_t step = std::min(count - st.done, room / element);
  if (step == 0) return Step::done;
  if (!have_pieces(s)) return Step::failed;
  const std::int64_t at = begin + st.done;
  const auto own_piece = [&](int r) { return pieces_[static_cast<std::size_t>(r * room / kLine)].bytes; };
  std::size_t outs = 0;
  if (s.out_count > 0) outs_[outs++] = s.out + at * element;
  for (int r = 0; r < group_.size; ++r) {
    const Arrival& a = arrival(r, s);
    const std::int64_t from = (exposed_block(s, r).offset + at) * element;
    const std::byte*& in = ins_[static_cast<std::size_t>(r)];
    if (r == group_.rank) {
      in = s.in + from;
      continue;
    }
    if (group_.by_kernel(r, a.places.in)) {
      in = own_piece(r);
      if (!peers_.read(s, r, a.places.in.offset + static_cast<std::uint64_t>(from), own_piece(r),
                       step * element))
        return Step::failed;
    } else {
      in = group_.reach(r, a.places.in) + from;
    }
    if (sliced(s) && a.places.out.kind != Buffer::none && !group_.by_kernel(r, a.places.out))
      outs_[outs++] = group_.reach(r, a.places.out) + at * element;
  }
  if (outs == 0) outs_[outs++] = own_piece(group_.rank);  // on the way to a root
  const std::byte* const sums = outs_[0];
  reduce(s.dtype, s.reduce, ins_, {outs_.data(), outs}, step);
  for (int i = 1; i < group_.size && sliced(s); ++i) {
    const int r = (group_.rank + i) % group_.size;  // not all to the same one
    const Buffer& out = arrival(r, s).places.out;
    if (out.kind != Buffer::none && group_.by_kernel(r, out) &&
        !peers_.write(s, r, sums, out.offset + static_cast<std::uint64_t>(at * element), step * element))
      return Step::failed;
  }
  st.done += step;
  return st.done >= count ? Step::done : Step::advanced;
}

}  // namespace weft::shm
