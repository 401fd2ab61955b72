// What users call: a group of ranks and the operations they perform together.
#pragma once

#include <memory>
#include <span>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"
#include "weft/backends/call.hpp"
#include "weft/backends/store.hpp"
#include "weft/backends/work.hpp"
#include "weft/base/context.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// Who takes part in a group and how it behaves. All ranks give the same, but for `rank` and `identity`.
struct Membership {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;
  std::string name = "world";
  Duration deadline = std::chrono::minutes(5);  ///< of each call, and of the group's creation
  int identity = -1;  ///< which rank of this process (threads as ranks); -1: same as `rank`
  TestHooks test;

  /// From the environment: `weft run` (WEFT_RANK …) or torchrun's variables (RANK, WORLD_SIZE, MASTER_ADDR,
  /// MASTER_PORT); with neither, a group of one rank. Throws bad_argument naming the variable that is wrong.
  static Membership from_env(Context& context);
};

/// A group of ranks. Move-only handle. Collectives must be called in the same order by all ranks of the
/// group; point to point is ordered per (source, destination, tag) only. Functions may be called from several
/// threads, but the order of collectives is then the callers' to agree on. Destroying it leaves the group:
/// peers that still wait for this rank get peer_lost.
///
/// Every function throws bad_argument before anything is sent where an argument is wrong; the text names it.
/// Views must be contiguous, on the CPU, of one dtype.
///
/// In place: all_reduce, broadcast: `in` and `out` the same view; all_gather: `in` is block rank() of `out`;
/// reduce_scatter: `out` is block rank() of `in`. Any other overlap is bad_argument.
class ProcessGroup {
 public:
  ProcessGroup() = default;
  /// Collective over the ranks of `m`. Throws timeout naming the ranks that did not come.
  static ProcessGroup create(Context& context, std::string_view backend, const Membership& m);
  /// The same over a transport of the caller's own (weft/backends/backend.hpp).
  static ProcessGroup create(Context& context, const BackendFactory& factory, const Membership& m);
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;
  ~ProcessGroup();

  int rank() const noexcept;
  int size() const noexcept;
  const std::string& name() const noexcept;
  Context& context() const noexcept;
  std::string_view backend() const noexcept;
  explicit operator bool() const noexcept { return state_ != nullptr; }

  /// out[i] = combination over ranks of in[i]. Counts equal on all ranks.
  Work all_reduce(ConstTensorView in, TensorView out, const CallOptions& options = {});
  /// out = in of rank 0, in of rank 1, …: out has size() × in elements.
  Work all_gather(ConstTensorView in, TensorView out, const CallOptions& options = {});
  /// out = block rank() of the combination of all in: in has size() × out elements.
  Work reduce_scatter(ConstTensorView in, TensorView out, const CallOptions& options = {});
  /// out = in of rank `root`. Elsewhere `in` is ignored and may be empty.
  Work broadcast(ConstTensorView in, TensorView out, int root, const CallOptions& options = {});
  /// Done when all ranks have called it.
  Work barrier(const CallOptions& options = {});
  /// To rank `dst`, matched by its recv of the same tag. Done when `in` may be reused, which above the eager
  /// limit (shm: 4 KiB) may be as late as the match.
  Work send(ConstTensorView in, int dst, const CallOptions& options = {});
  /// From rank `src`. A message of another dtype or count is a mismatch.
  Work recv(TensorView out, int src, const CallOptions& options = {});

  /// A group of `ranks` (this group's numbering, in the order of their new ranks), which must hold this rank.
  /// Collective among its members only; others never block and need not call.
  ProcessGroup subgroup(std::string_view name, std::span<const int> ranks);

  /// Fails every pending and later call of every rank with `aborted` and this text.
  void abort(std::string_view why);
  /// After a failure: true once nobody can touch the buffers of failed calls any more; see Error::quiesced().
  bool quiesce(Duration limit);

  /// The last 1024 calls of this rank, as JSON: op, dtype, count, call, posted and finished in ns, state.
  std::string trace_json() const;

 private:
  explicit ProcessGroup(GroupState* state) : state_(state) {}
  Work submit(const Call& call);  // the only road to a Backend
  GroupState* state_ = nullptr;   // counted
};

}  // namespace weft
