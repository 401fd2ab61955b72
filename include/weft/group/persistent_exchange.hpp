// A neighbourhood exchange that is planned once and started often.
#pragma once

#include <memory>
#include <span>

#include "weft/backends/call.hpp"
#include "weft/backends/exchange.hpp"
#include "weft/group/work.hpp"

namespace weft {

namespace detail {
struct PreparedExchange;
}

/// A persistent neighbourhood collective, as MPI calls it (MPI_Neighbor_alltoallw_init of MPI 4): made by
/// ProcessGroup::make_exchange(). Move-only. Making one is local: the plan is checked and worked out, and
/// nothing is sent. Each start() is then a call of the group like any other: it is numbered, traced and
/// timed, has the group's deadline, and ends in a Work. Only the ranks that a plan names take part. Two
/// neighbours start the exchanges between them in the same order; every start compares their plans, and a
/// difference is a `mismatch` that names both ranks.
///
/// Several starts may be in flight, of different memory. It may be destroyed while one is in flight.
class PersistentExchange {
 public:
  PersistentExchange() noexcept = default;
  PersistentExchange(PersistentExchange&&) noexcept = default;
  PersistentExchange& operator=(PersistentExchange&&) noexcept = default;
  ~PersistentExchange() = default;

  /// Begins the exchange of these fields, one for each of the plan's. Their memory is that of the device of
  /// the group's transport (host memory, except over nccl), is not written by others, and lives until the
  /// Work is done. When it returns, the elements that this rank sends to itself have been copied (kind
  /// copy). Only the options `deadline` and `stream` are used.
  ///
  /// Throws bad_argument, and nothing is sent, where the number of fields is not the plan's, a field has no
  /// memory, or memory that is written is written twice or sent, too; where the group's handle was destroyed
  /// or has left the group; and where this is empty. Throws the group's first cause once it has failed. One
  /// thread at a time.
  Work start(std::span<const ExchangeField> fields, const CallOptions& options = {});
  explicit operator bool() const noexcept { return prepared_ != nullptr; }

 private:
  friend class ProcessGroup;
  friend struct detail::PreparedExchange;
  explicit PersistentExchange(std::shared_ptr<detail::PreparedExchange> prepared) noexcept
      : prepared_(std::move(prepared)) {}
  std::shared_ptr<detail::PreparedExchange> prepared_;
};

}  // namespace weft
