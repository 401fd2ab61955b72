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

/// MPI calls it a persistent neighbourhood collective (MPI_Neighbor_alltoallw_init of MPI 4).
/// ProcessGroup::make_exchange() makes it. Move-only. make_exchange() checks and prepares the plan, and does
/// not communicate. Each start() is then a call of the group like any other: weft numbers, traces and times
/// it. It has the group's deadline, and returns a Work. Only the ranks that a plan names take part. Two
/// neighbours must start the exchanges between them in the same order. Every start compares the plans of
/// neighbours. If they differ, it throws mismatch that names both ranks.
///
/// Several exchanges may be in flight if they use different memory. A PersistentExchange may be destroyed
/// while an exchange that it has started is in flight.
class PersistentExchange {
 public:
  PersistentExchange() noexcept = default;
  PersistentExchange(PersistentExchange&&) noexcept = default;
  PersistentExchange& operator=(PersistentExchange&&) noexcept = default;
  ~PersistentExchange() = default;

  /// Begins the exchange of these fields, one for each field of the plan. Their memory must be on the device
  /// of the group's transport (host memory, except over nccl). The caller must keep it alive until the Work
  /// is done, and nobody else may write it. With kind `copy`, the elements that this rank sends to itself
  /// have been copied when start() returns. Only the options `deadline` and `stream` are used.
  ///
  /// Throws bad_argument, and sends nothing, in these cases: the number of fields is not that of the plan; a
  /// field has no memory; an element would be written twice, or both written and sent; the group's handle was
  /// destroyed or has left the group; this PersistentExchange is empty. Throws the group's first cause if the
  /// group has failed. One thread at a time may call it.
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
