#include "backends/shm/collectives/single_path.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"

namespace weft::shm {
namespace {

// Returns the bytes of one rank's piece, at least a cache line. The pieces of up to 4096 ranks together fit
// in kChunkBytes.
std::int64_t piece_bytes(int ranks) noexcept {
  return std::max<std::int64_t>(std::min<std::int64_t>(kPieceBytes, kChunkBytes / ranks) / kLine, 1) * kLine;
}

}  // namespace

Step SinglePath::step(OpState& s) noexcept {
  return chunk_in_peer_memory(s, is_sliced(s) ? kByKernel : 0, [&] {
    if (row(s.op).reduces) return push_piece(s);
    const auto copy = [&](int from, const Buffer& place, std::int64_t skip, std::byte* out,
                          std::int64_t bytes) {
      if (from != group_.rank && group_.by_kernel(from, place))
        return peers_.read(s, from, place.offset + static_cast<std::uint64_t>(skip), out, bytes);
      const std::byte* const source = from == group_.rank ? s.in + skip : reach(s, from, place, skip, bytes);
      if (source == nullptr) return false;
      if (out != source) copy_bytes(out, source, bytes, streams(s));
      return true;
    };
    return pull(s, peers_.most(), copy);
  });
}

std::byte* SinglePath::piece_of(int r) const noexcept {
  return pieces_[static_cast<std::size_t>(r * piece_bytes(group_.size) / static_cast<std::int64_t>(kLine))]
      .bytes;
}

// Allocates the pieces at first use, uninitialised. Returns false, and the group has failed, if there is no
// memory.
bool SinglePath::make_pieces(const OpState& s) noexcept {
  if (pieces_ != nullptr) return true;
  const std::int64_t bytes = group_.size * piece_bytes(group_.size);
  pieces_.reset(new (std::nothrow) Line[static_cast<std::size_t>(bytes) / sizeof(Line)]);
  if (pieces_ != nullptr) return true;
  Failure why{.code = ErrorCode::system, .text = {}, .op = s.op, .call = s.call, .ranks = {}};
  try {
    why.text = fmt::format("{}: rank {} has no memory for {} bytes that it reads from its peers", name(s.op),
                           group_.rank, bytes);
    why.ranks = {group_.rank};
  } catch (...) {  // no memory even for the text
  }
  raise(group_, why);
  return false;
}

// Combines a piece of this rank's part of all inputs. Returns `done` if it was the last piece.
Step SinglePath::push_piece(OpState& s) noexcept {
  CallState& st = state(s);
  const auto [begin, count] = own_part(s);
  const std::int64_t step = std::min(count - st.done, piece_bytes(group_.size) / size_bytes(s.dtype));
  if (step == 0) return Step::done;
  if (!make_pieces(s)) return Step::failed;
  const std::int64_t at = begin + st.done;
  if (is_scan(s.op)) {
    if (!gather_inputs(s, at, step)) return Step::failed;
    if (!place_prefixes(s, at, step)) return Step::failed;
    scan(s.dtype, s.reduce, s.op == Op::exscan, operands_.ins, operands_.outs, step);
  } else {
    std::size_t outs = 0;
    if (!gather_inputs(s, at, step)) return Step::failed;
    if (!place_sums(s, at, step, outs)) return Step::failed;
    reduce(s.dtype, s.reduce, operands_.ins, {operands_.outs.data(), outs}, step);
  }
  if (is_sliced(s) && !write_to_peers(s, at, step)) return Step::failed;
  st.done += step;
  return st.done >= count ? Step::done : Step::advanced;
}

// Finds the inputs of elements [at, at + count). The kernel reads the inputs that this rank does not reach.
bool SinglePath::gather_inputs(const OpState& s, std::int64_t at, std::int64_t count) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  for (int r = 0; r < group_.size; ++r) {
    const Arrival& a = arrival(group_, r, s);
    const std::int64_t from = bytes_before(exposed_block(group_, s, r), at, element);
    const Buffer place = place_in(a.places.in);
    const std::byte*& in = operands_.ins[static_cast<std::size_t>(r)];
    if (r == group_.rank) {
      in = s.in + from;
    } else if (group_.by_kernel(r, place)) {
      in = piece_of(r);
      if (!peers_.read(s, r, place.offset + static_cast<std::uint64_t>(from), piece_of(r), count * element))
        return false;
    } else {
      in = reach(s, r, place, from, count * element);
      if (in == nullptr) return false;
    }
  }
  return true;
}

// Finds the outputs that this rank reaches; write_to_peers() reads from the first of them.
bool SinglePath::place_sums(const OpState& s, std::int64_t at, std::int64_t count,
                            std::size_t& outs) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  if (s.out_count > 0) operands_.outs[outs++] = s.out + at * element;
  for (int r = 0; r < group_.size; ++r) {
    const Buffer out = place_in(arrival(group_, r, s).places.out);
    if (r == group_.rank || !is_sliced(s) || out.kind == Buffer::none || group_.by_kernel(r, out)) continue;
    std::byte* const found = reach(s, r, out, at * element, count * element);
    if (found == nullptr) return false;
    operands_.outs[outs++] = found;
  }
  // for a reduce, on a rank that is not the root
  if (outs == 0) operands_.outs[outs++] = piece_of(group_.rank);
  return true;
}

// Finds an output for each rank. If the kernel writes a rank's output, this rank computes it in that rank's
// piece, which may hold that rank's input.
bool SinglePath::place_prefixes(const OpState& s, std::int64_t at, std::int64_t count) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  for (int r = 0; r < group_.size; ++r) {
    const Buffer out = place_in(arrival(group_, r, s).places.out);
    std::byte* const found = r == group_.rank           ? s.out + at * element
                             : group_.by_kernel(r, out) ? piece_of(r)
                                                        : reach(s, r, out, at * element, count * element);
    if (found == nullptr) return false;
    operands_.outs[static_cast<std::size_t>(r)] = found;
  }
  if (s.op == Op::exscan && !has_identity(s.reduce.kind)) operands_.outs[0] = nullptr;
  return true;
}

// The kernel writes the results to the outputs that this rank does not reach.
bool SinglePath::write_to_peers(const OpState& s, std::int64_t at, std::int64_t count) noexcept {
  const std::int64_t element = size_bytes(s.dtype);
  for (int i = 1; i < group_.size; ++i) {
    const int r = (group_.rank + i) % group_.size;  // different ranks begin at different peers
    const Buffer out = place_in(arrival(group_, r, s).places.out);
    const std::byte* const result = operands_.outs[is_scan(s.op) ? static_cast<std::size_t>(r) : 0];
    if (result != nullptr && out.kind != Buffer::none && group_.by_kernel(r, out) &&
        !peers_.write(s, r, result, out.offset + static_cast<std::uint64_t>(at * element), count * element))
      return false;
  }
  return true;
}

}  // namespace weft::shm
