// A call that is checked once and started often.
#pragma once

#include <concepts>
#include <memory>
#include <span>

#include "weft/base/op.hpp"
#include "weft/group/work.hpp"

namespace weft {

namespace detail {
struct PreparedCall;
}

class PersistentCall;
namespace detail {
Work start_all(std::span<PersistentCall* const> calls);
}

/// MPI calls it a persistent operation. ProcessGroup::make() or a make_… function such as make_all_reduce()
/// makes it. Move-only. These functions check the arguments, with the error texts of the plain call, and do
/// not communicate. Each start() is then a call of the group like any other: weft numbers it, compares it
/// with the calls of the other ranks, traces it and times it. One rank may start a persistent all_reduce
/// while another rank makes a plain one. A start costs less than a plain call, because it does not check the
/// call again and does not allocate (except for a recv from any_source).
///
/// The caller must keep the buffers alive, at the same addresses, until the PersistentCall is destroyed and
/// its last Work is done. The same holds for the function of ReduceOp::user. weft copies lists of blocks. A
/// PersistentCall may be destroyed while a call that it has started is in flight.
class PersistentCall {
 public:
  PersistentCall() noexcept = default;
  PersistentCall(PersistentCall&&) noexcept = default;
  PersistentCall& operator=(PersistentCall&&) noexcept = default;
  ~PersistentCall() = default;

  /// Begins the call, with the present contents of its buffers. If the operation is collective, all ranks
  /// must start or call the same operations in the same order. The deadline of the options begins with this
  /// start. One thread at a time may call it.
  ///
  /// Throws bad_argument, and sends nothing, if the Work of the last start() is not done yet (several calls
  /// in flight each need their own buffers and their own PersistentCall). It also does so if the group's
  /// handle was destroyed or has left the group, or if this PersistentCall is empty (made by default, moved
  /// from). Throws the group's first cause if the group has failed.
  Work start();
  /// The operation. Op::none if this PersistentCall is empty.
  Op op() const noexcept;
  explicit operator bool() const noexcept { return prepared_ != nullptr; }

 private:
  friend class ProcessGroup;
  friend Work detail::start_all(std::span<PersistentCall* const> calls);
  explicit PersistentCall(std::shared_ptr<detail::PreparedCall> prepared) noexcept
      : prepared_(std::move(prepared)) {}
  std::shared_ptr<detail::PreparedCall> prepared_;
};

/// Starts several calls as one, as ProcessGroup::coalesced() begins a list of calls. They begin together, and
/// the Work is done when all of them are done. So neighbours that start a send and a receive do not deadlock,
/// on any transport (compare MPI_Startall, and ncclGroupStart on streams). All calls must be of one group.
/// The order of the collectives among them must be the same on all ranks. At most 64 calls are in flight at
/// once. The others begin when earlier ones end.
///
/// Throws bad_argument, and sends nothing, if start() of one call would throw it, if a call is in the list
/// twice, or if a call is of another group. If a call cannot be sent after others were sent, the group fails.
Work start_all(std::span<PersistentCall> calls);
template <std::same_as<PersistentCall>... Calls>
Work start_all(PersistentCall& first, Calls&... calls) {
  PersistentCall* const all[] = {&first, &calls...};
  return detail::start_all(all);
}

}  // namespace weft
