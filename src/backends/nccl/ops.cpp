// Performs each operation by calls of NCCL, between group start and end. No function here waits.
#include <bit>
#include <cstring>
#include <optional>

#include "backends/nccl/channel.hpp"
#include "weft/backends/op_table.hpp"

namespace weft::nccl {
namespace {

/// The element type that NCCL counts; `each` NCCL elements make one weft element.
struct Elements {
  DataType type;
  int each;
  std::size_t of(std::int64_t count) const noexcept {
    return static_cast<std::size_t>(count) * static_cast<std::size_t>(each);
  }
};

// For moving, every dtype is bytes.
Elements moved_as(DType t) noexcept { return {DataType::u8, size_bytes(t)}; }

// Sums and averages of complex numbers are the sums and averages of their parts. Never called for a reduction
// that the traits lack.
Elements reduced_as(DType t) noexcept {
  switch (t) {
    case DType::f64: return {DataType::f64, 1};
    case DType::f32: return {DataType::f32, 1};
    case DType::f16: return {DataType::f16, 1};
    case DType::bf16: return {DataType::bf16, 1};
    case DType::i8: return {DataType::i8, 1};
    case DType::i32: return {DataType::i32, 1};
    case DType::i64: return {DataType::i64, 1};
    case DType::u8:
    case DType::boolean: return {DataType::u8, 1};
    case DType::u32: return {DataType::u32, 1};
    case DType::u64: return {DataType::u64, 1};
    case DType::c64: return {DataType::f32, 2};
    case DType::c128: return {DataType::f64, 2};
    case DType::i16:
    case DType::u16:
    case DType::f8e4m3:
    case DType::f8e5m2: break;
  }
  return {DataType::u8, 0};
}

// Returns `scale` as an element of the type, in the form that NCCL takes.
std::array<std::byte, 8> scalar(double scale, DataType type) noexcept {
  std::array<std::byte, 8> bytes{};
  const auto put = [&](auto value) { std::memcpy(bytes.data(), &value, sizeof(value)); };
  switch (type) {
    case DataType::f64: put(scale); break;
    case DataType::f32: put(static_cast<float>(scale)); break;
    case DataType::f16: put(f16(static_cast<float>(scale))); break;
    case DataType::bf16: put(bf16(static_cast<float>(scale))); break;
    case DataType::i8: put(static_cast<std::int8_t>(static_cast<std::int64_t>(scale))); break;
    case DataType::u8: put(static_cast<std::uint8_t>(static_cast<std::int64_t>(scale))); break;
    case DataType::i32: put(static_cast<std::int32_t>(static_cast<std::int64_t>(scale))); break;
    case DataType::u32: put(static_cast<std::uint32_t>(static_cast<std::int64_t>(scale))); break;
    case DataType::i64:
    case DataType::u64: put(static_cast<std::int64_t>(scale)); break;
  }
  return bytes;
}

/// A reduction in NCCL's form. NCCL allows that a custom reduction is destroyed as soon as the last call that
/// uses it has returned.
class Reduction {
 public:
  Reduction(const Driver& driver, const ReduceOp& op, DataType type, Comm* comm)
      : driver_(driver), comm_(comm) {
    switch (op.kind) {
      case ReduceOp::Kind::sum: op_ = RedOp::sum; return;
      case ReduceOp::Kind::prod: op_ = RedOp::prod; return;
      case ReduceOp::Kind::min: op_ = RedOp::min; return;
      case ReduceOp::Kind::max: op_ = RedOp::max; return;
      case ReduceOp::Kind::avg: op_ = RedOp::avg; return;
      case ReduceOp::Kind::premul_sum: {
        std::array<std::byte, 8> value = scalar(op.scale, type);
        driver_.check(
            "ncclRedOpCreatePreMulSum",
            driver_.api.ncclRedOpCreatePreMulSum(&op_, value.data(), type, Residence::host_immediate, comm),
            comm);
        made_ = true;
        return;
      }
      case ReduceOp::Kind::bit_and:
      case ReduceOp::Kind::bit_or:
      case ReduceOp::Kind::bit_xor:
      case ReduceOp::Kind::logical_and:
      case ReduceOp::Kind::logical_or:
      case ReduceOp::Kind::logical_xor:
      case ReduceOp::Kind::user: return;  // the traits do not have these reductions
    }
  }
  ~Reduction() {
    if (made_) driver_.api.ncclRedOpDestroy(op_, comm_);
  }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  operator RedOp() const noexcept { return op_; }

 private:
  const Driver& driver_;
  Comm* const comm_;
  RedOp op_ = RedOp::sum;
  bool made_ = false;
};

const std::byte* at(const std::byte* data, DType t, BufferBlock b) noexcept {
  return data + b.offset * size_bytes(t);
}
std::byte* at(std::byte* data, DType t, BufferBlock b) noexcept { return data + b.offset * size_bytes(t); }

}  // namespace

void Channel::send(const OpState& s, BufferBlock block, int to) const {
  if (block.count == 0) return;
  const Elements e = moved_as(s.dtype);
  driver_.check("ncclSend",
                driver_.api.ncclSend(at(s.in, s.dtype, block), e.of(block.count), e.type, to, comm_, stream_),
                comm_);
}

void Channel::recv(const OpState& s, BufferBlock block, int from) const {
  if (block.count == 0) return;
  const Elements e = moved_as(s.dtype);
  driver_.check(
      "ncclRecv",
      driver_.api.ncclRecv(at(s.out, s.dtype, block), e.of(block.count), e.type, from, comm_, stream_),
      comm_);
}

void Channel::copy_own(const OpState& s, BufferBlock from, BufferBlock to) const {
  const std::byte* const in = at(s.in, s.dtype, from);
  std::byte* const out = at(s.out, s.dtype, to);
  if (in == out || from.count == 0) return;
  driver_.check("cudaMemcpyAsync", driver_.api.cudaMemcpyAsync(out, in, moved_as(s.dtype).of(from.count),
                                                               CopyKind::device_to_device, stream_));
}

void Channel::enqueue(const OpState& s) const {
  const NcclApi& api = driver_.api;
  const Elements moved = moved_as(s.dtype), reduced = reduced_as(s.dtype);
  const auto check = [&](const char* what, Result r) { driver_.check(what, r, comm_); };
  std::optional<Reduction> op;
  if (row(s.op).reduces) op.emplace(driver_, s.reduce, reduced.type, comm_);
  switch (s.op) {
    case Op::none:
    case Op::scan:  // NCCL does not have these operations
    case Op::exscan:
    case Op::exchange:
    case Op::wait_message: return;
    case Op::all_reduce:
      return check("ncclAllReduce",
                   api.ncclAllReduce(s.in, s.out, reduced.of(s.in_count), reduced.type, *op, comm_, stream_));
    case Op::reduce:
      return check("ncclReduce", api.ncclReduce(s.in, s.out, reduced.of(s.in_count), reduced.type, *op,
                                                s.root, comm_, stream_));
    case Op::broadcast: {
      const std::int64_t count = s.out_count;
      return check("ncclBroadcast", api.ncclBroadcast(rank_ == s.root ? s.in : s.out, s.out, moved.of(count),
                                                      moved.type, s.root, comm_, stream_));
    }
    case Op::all_gather:
      return check("ncclAllGather",
                   api.ncclAllGather(s.in, s.out, moved.of(s.in_count), moved.type, comm_, stream_));
    case Op::reduce_scatter:
      return check("ncclReduceScatter", api.ncclReduceScatter(s.in, s.out, reduced.of(s.out_count),
                                                              reduced.type, *op, comm_, stream_));
    case Op::reduce_scatter_v:  // performed as a reduction to each rank
      for (int r = 0; r < size_; ++r) {
        const BufferBlock block = s.in_blocks[r];
        if (block.count == 0) continue;
        check("ncclReduce", api.ncclReduce(at(s.in, s.dtype, block), r == rank_ ? s.out : nullptr,
                                           reduced.of(block.count), reduced.type, *op, r, comm_, stream_));
      }
      return;
    case Op::barrier:  // performed as a sum, which is complete on no rank before all ranks have arrived
      return check("ncclAllReduce",
                   api.ncclAllReduce(word_, word_, 1, DataType::u8, RedOp::max, comm_, stream_));
    case Op::send: return send(s, {0, s.in_count}, 1);   // in a lane the sender is rank 0 of two,
    case Op::recv: return recv(s, {0, s.out_count}, 0);  // and the receiver is rank 1
    case Op::all_gather_v:
    case Op::gather:
    case Op::scatter:
    case Op::all_to_all:
    case Op::all_to_all_v: break;
  }
  // All other operations: each rank sends a block to each rank. Some blocks are empty.
  for (int r = 0; r < size_; ++r) {
    const BufferBlock to = s.in == nullptr ? BufferBlock{} : in_block(s, r, size_);
    const BufferBlock from = s.out == nullptr ? BufferBlock{} : out_block(s, r, size_);
    if (r == rank_) {
      copy_own(s, to, from);
    } else {
      send(s, to, r);
      recv(s, from, r);
    }
  }
}

}  // namespace weft::nccl
