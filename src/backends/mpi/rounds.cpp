#include "backends/mpi/rounds.hpp"

#include <algorithm>
#include <climits>
#include <cstring>

#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::mpi {
namespace {

// Returns whether that side (in or out) has a block per rank, and not one block.
bool many(Op op, bool in) noexcept {
  switch (row(op).counts) {
    case Counts::in_is_n_out:
    case Counts::in_blocks: return in;
    case Counts::out_is_n_in:
    case Counts::out_blocks: return !in;
    case Counts::both_blocks: return true;
    case Counts::equal: return op == Op::all_to_all;
    case Counts::none:
    case Counts::in_only:
    case Counts::out_only: break;
  }
  return false;
}

}  // namespace

Rounds::Rounds(const Process& process, MPI_Comm comm, int rank, int size, Limits limits)
    : process_(process), comm_(comm), rank_(rank), size_(size), limits_(limits) {}

// All ranks compute the same chunk and the same number of rounds, from limits and from counts that the ranks
// have compared.
void Rounds::begin(const OpState& s, std::int64_t largest) {
  const bool at_root = s.root == rank_;
  in_.present = has_in(s.op, at_root);
  out_.present = has_out(s.op, at_root);
  in_.blocks = many(s.op, true) ? size_ : 1;
  out_.blocks = many(s.op, false) ? size_ : 1;
  const int blocks = std::max(in_.blocks, out_.blocks);
  std::int64_t total = 0;
  switch (row(s.op).counts) {
    case Counts::none: break;
    case Counts::equal:
      largest = std::max(s.in_count, s.out_count) / blocks;
      total = largest * blocks;
      break;
    case Counts::out_is_n_in:
      largest = s.in_count;
      total = largest * size_;
      break;
    case Counts::in_is_n_out:
      largest = s.out_count;
      total = largest * size_;
      break;
    case Counts::out_blocks:
    case Counts::in_blocks: {
      const BufferBlock* const all = s.in_blocks != nullptr ? s.in_blocks : s.out_blocks;
      largest = 0;
      for (int r = 0; r < size_; ++r) {
        largest = std::max(largest, all[r].count);
        total += all[r].count;
      }
      break;
    }
    case Counts::both_blocks: total = largest * size_; break;
    case Counts::in_only:
    case Counts::out_only: break;
  }
  const std::int64_t element = size_bytes(s.dtype);
  const bool whole = !limits_.safe && largest <= limits_.max_count && total <= INT_MAX;
  const std::int64_t staged = std::max(kStageBytes / blocks, kLeastBlockBytes) / element;
  chunk_ = whole ? std::max<std::int64_t>(largest, 1)
                 : std::min({staged, limits_.max_count, std::int64_t{INT_MAX} / size_});
  rounds_ = s.op == Op::barrier ? 1 : (largest + chunk_ - 1) / chunk_;
  round_ = 0;
  running_ = false;
}

// Returns the part of a block that this round moves.
BufferBlock Rounds::piece(const OpState& s, bool in, int block) const noexcept {
  const Side& side = in ? in_ : out_;
  BufferBlock b{0, in ? s.in_count : s.out_count};
  if (side.blocks > 1) b = in ? in_block(s, block, size_) : out_block(s, block, size_);
  const std::int64_t done = std::min(b.count, round_ * chunk_);
  return {b.offset + done, std::min(b.count - done, chunk_)};
}

// Chooses this round's buffer: the caller's memory if its blocks have the form that MPI needs.
void Rounds::prepare(const OpState& s, bool in) {
  Side& side = in ? in_ : out_;
  side.elements = 0;
  side.direct = !limits_.safe && rounds_ == 1;
  side.counts.clear();
  side.displs.clear();
  if (!side.present) return;
  const std::int64_t begin = piece(s, in, 0).offset;
  for (int b = 0; b < side.blocks; ++b) {
    const BufferBlock p = piece(s, in, b);
    if (p.count > 0 && p.offset != begin + side.elements) side.direct = false;
    side.counts.push_back(static_cast<int>(p.count));
    side.displs.push_back(static_cast<int>(side.elements));
    side.elements += p.count;
  }
  const std::int64_t element = size_bytes(s.dtype);
  const std::byte* const memory = in ? s.in : s.out;
  if (side.direct) {
    side.at = const_cast<std::byte*>(memory) + begin * element;
  } else {
    side.at = (in ? in_stage_ : out_stage_).get(std::max<std::int64_t>(side.elements * element, 1));
  }
}

void Rounds::pack(const OpState& s) {
  prepare(s, true);
  prepare(s, false);
  const std::int64_t element = size_bytes(s.dtype);
  // MPI forbids overlapping buffers, but weft allows calls in place. For such a call `in` is copied. MPICH
  // compares the pointers even if one of the two buffers has no elements.
  if (in_.present && out_.present && in_.direct && out_.direct) {
    const std::byte *in_end = in_.at + in_.elements * element, *out_end = out_.at + out_.elements * element;
    if (in_.at == out_.at || (in_.at < out_end && out_.at < in_end)) {
      in_.direct = false;
      in_.at = in_stage_.get(std::max<std::int64_t>(in_.elements * element, 1));
    }
  }
  if (!in_.present || in_.direct) return;
  std::byte* to = in_.at;
  for (int b = 0; b < in_.blocks; ++b) {
    const BufferBlock p = piece(s, true, b);
    if (p.count > 0) std::memcpy(to, s.in + p.offset * element, static_cast<std::size_t>(p.count * element));
    to += p.count * element;
  }
}

void Rounds::unpack(const OpState& s) {
  const std::int64_t element = size_bytes(s.dtype);
  if (!out_.present) return;
  if (s.op == Op::broadcast && s.root == rank_) {  // MPI has only one buffer on the root
    const BufferBlock p = piece(s, false, 0);
    std::byte* const to = s.out + p.offset * element;
    if (s.out != s.in && p.count > 0)
      std::memcpy(to, s.in + p.offset * element, static_cast<std::size_t>(p.count * element));
    return;
  }
  if (s.op == Op::exscan && rank_ == 0) {  // MPI leaves `out` undefined
    fill_identity(s.dtype, s.reduce.kind, out_.at, out_.elements);
  } else if (is_scan(s.op) && rank_ == (s.op == Op::exscan ? 1 : 0)) {
    // If MPI has nothing to combine, it only copies, so a bool may be another number than 0 and 1.
    const std::byte* const copied = out_.at;
    reduce(s.dtype, s.reduce, {&copied, 1}, {&out_.at, 1}, out_.elements);
  }
  if (out_.direct) return;
  const std::byte* from = out_.at;
  for (int b = 0; b < out_.blocks; ++b) {
    const BufferBlock p = piece(s, false, b);
    if (p.count > 0)
      std::memcpy(s.out + p.offset * element, from, static_cast<std::size_t>(p.count * element));
    from += p.count * element;
  }
}

void Rounds::start(const OpState& s) {
  const bool reduces = row(s.op).reduces;
  const MPI_Datatype type = reduces ? value_type(s.dtype) : bytes_type(s.dtype);
  const MPI_Op op = reduces ? process_.op(s.reduce.kind, s.dtype) : MPI_OP_NULL;
  const auto first = [](const Side& side) { return side.counts.empty() ? 0 : side.counts[0]; };
  const int in_count = first(in_), out_count = first(out_);
  switch (s.op) {
    case Op::all_reduce:
      return must(MPI_Iallreduce(in_.at, out_.at, in_count, type, op, comm_, &request_), "MPI_Iallreduce");
    case Op::scan: return must(MPI_Iscan(in_.at, out_.at, in_count, type, op, comm_, &request_), "MPI_Iscan");
    case Op::exscan:
      return must(MPI_Iexscan(in_.at, out_.at, in_count, type, op, comm_, &request_), "MPI_Iexscan");
    case Op::reduce:
      return must(MPI_Ireduce(in_.at, out_.at, in_count, type, op, s.root, comm_, &request_), "MPI_Ireduce");
    case Op::broadcast: {
      const Side& side = s.root == rank_ ? in_ : out_;
      return must(MPI_Ibcast(side.at, first(side), type, s.root, comm_, &request_), "MPI_Ibcast");
    }
    case Op::all_gather:
      return must(MPI_Iallgather(in_.at, in_count, type, out_.at, out_count, type, comm_, &request_),
                  "MPI_Iallgather");
    case Op::all_gather_v:
      return must(MPI_Iallgatherv(in_.at, in_count, type, out_.at, out_.counts.data(), out_.displs.data(),
                                  type, comm_, &request_),
                  "MPI_Iallgatherv");
    case Op::reduce_scatter:
      return must(MPI_Ireduce_scatter_block(in_.at, out_.at, out_count, type, op, comm_, &request_),
                  "MPI_Ireduce_scatter_block");
    case Op::reduce_scatter_v:
      return must(MPI_Ireduce_scatter(in_.at, out_.at, in_.counts.data(), type, op, comm_, &request_),
                  "MPI_Ireduce_scatter");
    case Op::gather:
      return must(MPI_Igather(in_.at, in_count, type, out_.at, in_count, type, s.root, comm_, &request_),
                  "MPI_Igather");
    case Op::scatter:
      return must(MPI_Iscatter(in_.at, out_count, type, out_.at, out_count, type, s.root, comm_, &request_),
                  "MPI_Iscatter");
    case Op::all_to_all:
      return must(MPI_Ialltoall(in_.at, in_count, type, out_.at, out_count, type, comm_, &request_),
                  "MPI_Ialltoall");
    case Op::all_to_all_v:
      return must(MPI_Ialltoallv(in_.at, in_.counts.data(), in_.displs.data(), type, out_.at,
                                 out_.counts.data(), out_.displs.data(), type, comm_, &request_),
                  "MPI_Ialltoallv");
    case Op::barrier: return must(MPI_Ibarrier(comm_, &request_), "MPI_Ibarrier");
    case Op::none:
    case Op::send:
    case Op::recv:
    case Op::exchange:
    case Op::wait_message: break;
  }
}

Step Rounds::step(const OpState& s) {
  if (running_) {
    int done = 0;
    must(MPI_Test(&request_, &done, MPI_STATUS_IGNORE), "MPI_Test");
    if (!done) return Step::pending;
    running_ = false;
    unpack(s);
    ++round_;
  }
  if (round_ == rounds_) return Step::done;
  pack(s);
  start(s);
  running_ = true;
  return Step::advanced;
}

bool Rounds::exposed() noexcept {
  if (!running_ || !(in_.direct || out_.direct)) return false;
  int done = 0;
  if (MPI_Test(&request_, &done, MPI_STATUS_IGNORE) != MPI_SUCCESS || !done) return true;
  running_ = false;
  return false;
}

}  // namespace weft::mpi
