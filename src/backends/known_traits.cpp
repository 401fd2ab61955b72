// The operations that weft's transports perform natively, and their guarantees: one table for the plug-ins,
// docs/support.md and the conformance tests.
#include <algorithm>

#include "reduce/reduce.hpp"
#include "weft/backends/plugin.hpp"

namespace weft {
namespace {

constexpr DTypeSet kAllDTypes = (DTypeSet{1} << kDTypeCount) - 1;
constexpr OpSet kAllOps = ((OpSet{1} << kOpCount) - 1) & ~op_bit(Op::none);
constexpr OpSet kForeignOps = kAllOps & ~op_bit(Op::exchange);

Traits shm() {
  Traits t{.name = "shm", .ops = kAllOps, .dtypes = kAllDTypes};
  for (int k = 0; k < kReduceKindCount; ++k)
    for (int d = 0; d < kDTypeCount; ++d)
      if (can_reduce(static_cast<DType>(d), static_cast<ReduceOp::Kind>(k)))
        t.reduces[static_cast<std::size_t>(k)] |= dtype_bit(static_cast<DType>(d));
  t.native_is_canonical = true;
  t.guarantees = {.deadline = true,
                  .names_absent = true,
                  .detects_death = true,
                  .survives_death = true,
                  .checks_calls = true,
                  .revocable = true,
                  .quiesces = true};
  return t;
}

// Adds the dtypes that foreign transports combine themselves. These lose nothing when ranks are combined one
// after the other. 16-bit floats would be rounded at every hop.
void reduce_pairwise(Traits& t) {
  using Kind = ReduceOp::Kind;
  for (const Kind k : {Kind::sum, Kind::prod, Kind::min, Kind::max, Kind::bit_and, Kind::bit_or,
                       Kind::bit_xor, Kind::logical_and, Kind::logical_or, Kind::logical_xor})
    for (int i = 0; i < kDTypeCount; ++i)
      if (const auto d = static_cast<DType>(i); d != DType::f16 && d != DType::bf16 && can_reduce(d, k))
        t.reduces[static_cast<std::size_t>(k)] |= dtype_bit(d);
}

// MPI: reductions that MPI knows, on types that it knows. min and max of floats use a function of weft.
Traits mpi(std::string_view name) {
  Traits t{.name = name, .ops = kForeignOps, .dtypes = kAllDTypes};
  reduce_pairwise(t);
  t.rings = false;
  // If a rank dies, mpirun ends the whole job. If an option forbids that, the dead rank is reported as absent
  // at the deadline.
  t.guarantees = {.deadline = true,
                  .names_absent = true,
                  .detects_death = false,
                  .survives_death = false,
                  .checks_calls = true,
                  .revocable = true,
                  .quiesces = true};
  return t;
}

// Averages and 16-bit sums round at every hop, like NCCL's. A reduction that NCCL lacks cannot be composed,
// either: the host does not compute on device memory.
Traits nccl() {
  Traits t{.name = "nccl",
           // NCCL has no scans, and its receives must name their source
           .ops = kForeignOps & ~op_bit(Op::scan) & ~op_bit(Op::exscan) & ~op_bit(Op::wait_message),
           .dtypes = kAllDTypes};
  constexpr DTypeSet floating =
      dtype_bit(DType::f64) | dtype_bit(DType::f32) | dtype_bit(DType::f16) | dtype_bit(DType::bf16);
  constexpr DTypeSet integers = dtype_bit(DType::i8) | dtype_bit(DType::i32) | dtype_bit(DType::i64) |
                                dtype_bit(DType::u8) | dtype_bit(DType::u32) | dtype_bit(DType::u64);
  constexpr DTypeSet complex = dtype_bit(DType::c64) | dtype_bit(DType::c128);
  const auto reduces = [&](ReduceOp::Kind kind, DTypeSet dtypes) {
    for (int d = 0; d < kDTypeCount; ++d)
      if (const auto dtype = static_cast<DType>(d); can_reduce(dtype, kind))
        t.reduces[static_cast<std::size_t>(kind)] |= dtype_bit(dtype) & dtypes;
  };
  reduces(ReduceOp::Kind::sum, floating | integers | complex);
  // not for integers, because NCCL divides a sum that may have wrapped
  reduces(ReduceOp::Kind::avg, floating | complex);
  reduces(ReduceOp::Kind::prod, floating | integers);
  reduces(ReduceOp::Kind::premul_sum, floating | integers);
  reduces(ReduceOp::Kind::min, floating | integers | dtype_bit(DType::boolean));
  reduces(ReduceOp::Kind::max, floating | integers | dtype_bit(DType::boolean));
  t.device = true;
  t.progress = ProgressStyle::stream;
  t.rings = false;
  t.guarantees = {
      .deadline = true, .names_absent = true, .survives_death = true, .revocable = true, .quiesces = true};
  return t;
}

// Gloo: over TCP, in the group's thread.
Traits gloo() {
  Traits t{.name = "gloo",
           .ops = op_bit(Op::all_reduce) | op_bit(Op::reduce) | op_bit(Op::broadcast) |
                  op_bit(Op::all_gather) | op_bit(Op::all_gather_v) | op_bit(Op::gather) |
                  op_bit(Op::scatter) | op_bit(Op::all_to_all) | op_bit(Op::all_to_all_v) |
                  op_bit(Op::barrier) | op_bit(Op::send) | op_bit(Op::recv) | op_bit(Op::wait_message),
           .dtypes = kAllDTypes};
  reduce_pairwise(t);
  t.progress = ProgressStyle::threaded;
  t.guarantees = {.deadline = true,
                  .names_absent = true,
                  .detects_death = true,
                  .survives_death = true,
                  .checks_calls = true,
                  .revocable = true,
                  .quiesces = true};
  t.spin = false;
  return t;
}

// If a rank is stopped just before process_vm_writev, it performs the write when it is resumed. At that time
// the target address may belong to another buffer, and its pages cannot be replaced as pages of shared memory
// can. So quiesce() returns false while such a rank is in its copy.
Traits shm_single_copy() {
  Traits t = shm();
  t.guarantees.quiesces = false;
  return t;
}

const Traits kTable[] = {shm(), gloo(), mpi("mpi-openmpi"), mpi("mpi-mpich"), nccl()};
const std::string_view kNames[] = {"shm", "gloo", "mpi-openmpi", "mpi-mpich", "nccl"};

}  // namespace

const Traits* known_traits(std::string_view name) noexcept {
  const auto* const found =
      std::find_if(std::begin(kTable), std::end(kTable), [&](const Traits& t) { return t.name == name; });
  return found == std::end(kTable) ? nullptr : found;
}

const Traits& shm_single_copy_traits() noexcept {
  static const Traits traits = shm_single_copy();
  return traits;
}

std::span<const std::string_view> known_backends() noexcept { return kNames; }

}  // namespace weft
