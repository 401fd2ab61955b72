// A call that is checked and described once and started often.
#pragma once

#include <memory>

#include "weft/base/op.hpp"
#include "weft/group/work.hpp"

namespace weft {

namespace detail {
struct PreparedCall;
}

/// A persistent operation, as MPI calls it: made by ProcessGroup::make() or by one of the functions beside
/// it. Move-only. Making one is local: arguments are checked there, with the texts of the plain call, and
/// nothing is sent. Each start() is then a call of the group like any other: it is numbered, compared with
/// what the other ranks call, traced and timed, and a plain all_reduce of one rank may meet one that another
/// rank has started. A start costs less than a plain call, because nothing is checked again, and it does not
/// allocate (except for a recv from any_source).
///
/// The buffers stay the caller's, at the same addresses: they, and the function of ReduceOp::user, live until
/// the PersistentCall is destroyed and its last Work is done. Lists of blocks are copied. It may be destroyed
/// while a call that it has started is in flight.
class PersistentCall {
 public:
  PersistentCall() noexcept = default;
  PersistentCall(PersistentCall&&) noexcept = default;
  PersistentCall& operator=(PersistentCall&&) noexcept = default;
  ~PersistentCall() = default;

  /// Begins the call, with the contents that its buffers have now. Collective where the call is: all ranks
  /// start or call the same, in the same order. The deadline of the options counts from here. One thread at a
  /// time.
  ///
  /// Throws bad_argument, and nothing is sent, where the Work of the last start() is not done yet: of several
  /// calls in flight each needs buffers, and a PersistentCall, of its own; where the group's handle was
  /// destroyed or has left the group; and where this is empty (made by default, moved from). Throws the
  /// group's first cause once it has failed.
  Work start();
  /// Which operation; Op::none: empty.
  Op op() const noexcept;
  explicit operator bool() const noexcept { return prepared_ != nullptr; }

 private:
  friend class ProcessGroup;
  explicit PersistentCall(std::shared_ptr<detail::PreparedCall> prepared) noexcept
      : prepared_(std::move(prepared)) {}
  std::shared_ptr<detail::PreparedCall> prepared_;
};

}  // namespace weft
