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

/// A persistent operation, as MPI calls it: made by ProcessGroup::make() or by one of the functions beside
/// it. Move-only. Making one is local: arguments are checked there, with the texts of the plain call, and
/// nothing is sent. Each start() is then a call of the group like any other: it is numbered, compared with
/// what the other ranks call, traced and timed, and a plain all_reduce of one rank may meet one that another
/// rank has started. A start costs less than a plain call, because nothing is checked again, and it does not
/// allocate (except for a recv from any_source).
///
/// The caller must keep the buffers alive, at the same addresses, and the function of ReduceOp::user, until
/// the PersistentCall is destroyed and its last Work is done. weft copies lists of blocks. A PersistentCall
/// may be destroyed while a call that it has started is in flight.
class PersistentCall {
 public:
  PersistentCall() noexcept = default;
  PersistentCall(PersistentCall&&) noexcept = default;
  PersistentCall& operator=(PersistentCall&&) noexcept = default;
  ~PersistentCall() = default;

  /// Begins the call, with the present contents of its buffers. If the operation is collective, all ranks
  /// must start or call the same operations in the same order. The deadline of the options counts from here.
  /// One thread at a time may call it.
  ///
  /// Throws bad_argument, and sends nothing, if the Work of the last start() is not done yet (several calls
  /// in flight each need their own buffers and their own PersistentCall); if the group's handle was destroyed
  /// or has left the group; or if this PersistentCall is empty (made by default, moved from). Throws the
  /// group's first cause if the group has failed.
  Work start();
  /// The operation; Op::none if this is empty.
  Op op() const noexcept;
  explicit operator bool() const noexcept { return prepared_ != nullptr; }

 private:
  friend class ProcessGroup;
  friend Work detail::start_all(std::span<PersistentCall* const> calls);
  explicit PersistentCall(std::shared_ptr<detail::PreparedCall> prepared) noexcept
      : prepared_(std::move(prepared)) {}
  std::shared_ptr<detail::PreparedCall> prepared_;
};

/// Starts all of them as one, as ProcessGroup::coalesced() begins a list of calls: begun together, done when
/// all of them are. So a send and a receive that neighbours start are no deadlock on any transport
/// (MPI_Startall, and on streams ncclGroupStart). All are of one group. The order of the collectives among
/// them must be the same on all ranks. At most 64 are in flight at once; the rest begin as earlier ones end.
///
/// Throws bad_argument, and nothing is sent, where start() of one of them would, where one is there twice,
/// and where one is of another group. If one cannot be sent after others were sent, the group fails.
Work start_all(std::span<PersistentCall> calls);
template <std::same_as<PersistentCall>... Calls>
Work start_all(PersistentCall& first, Calls&... calls) {
  PersistentCall* const all[] = {&first, &calls...};
  return detail::start_all(all);
}

}  // namespace weft
