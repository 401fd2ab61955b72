// The interface for users: a group of ranks and the operations that they perform together.
#pragma once

#include <initializer_list>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>

#include "weft/backends/backend.hpp"
#include "weft/backends/call.hpp"
#include "weft/base/error.hpp"
#include "weft/group/persistent_call.hpp"
#include "weft/group/persistent_exchange.hpp"
#include "weft/group/work.hpp"
#include "weft/host/context.hpp"
#include "weft/store/store.hpp"

namespace weft {

class UserNumbers;

/// The threads that make progress on calls. `caller`: only a thread that waits, calls done() or submits a
/// call. `thread`: also a helper thread of this rank, shared by all its groups with this setting, so that
/// communication overlaps computation.
enum class Progress : std::uint8_t { caller, thread };

/// The members of a group, and its settings. All ranks must give the same values, except for `rank` and
/// `process_rank`.
struct Membership {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;  ///< at most kMaxRanks
  std::string name = "world";
  Duration deadline = std::chrono::minutes(5);  ///< the deadline of each call, and of the group's creation
  /// the number of this rank within its process, if threads are ranks; -1: equal to `rank`
  int process_rank = -1;
  Progress progress = Progress::caller;
  /// Order::canonical: every reduction of the group and of its subgroups has the canonical order, also if its
  /// CallOptions say native. Then every transport gives the same bits, as exact mode needs (docs/exact.md).
  Order order = Order::native;

  /// Reads the environment that `weft run`, torchrun, Open MPI's mpirun, Hydra's mpirun (MPICH) or srun has
  /// set. WEFT_STORE names the store if the launcher's variables are not enough (docs/rendezvous.md). Without
  /// a launcher the result is a group of one rank. from_env() waits until it can connect to the store. It
  /// claims the rank there; only one process can claim a rank. It throws bad_argument, naming both processes,
  /// if another live process has claimed the rank, or if the store belongs to another job. `context` keeps
  /// the server that rank 0 starts. A second call gives the same store. `deadline` limits from_env() and
  /// becomes the Membership's deadline. Throws bad_argument, naming the variable, if a variable is wrong, and
  /// timeout if rank 0 does not start its server.
  static Membership from_env(Context& context, Duration deadline = std::chrono::minutes(5));
};

/// A group of ranks. Move-only handle. All ranks of the group must call collectives in the same order.
/// Messages are ordered only per (source, destination, tag). Several threads may call functions of a group,
/// but then the program must ensure the order of collectives. Destroying the handle leaves the group. Peers
/// that still wait for it get peer_lost. leave() also compares the last calls of the ranks.
///
/// If an argument is wrong, every function throws bad_argument before it sends anything. The text names the
/// argument. Buffers are made from vectors, arrays and other contiguous ranges, variables, views, Tensors or
/// (pointer, count, dtype, device); see weft/base/buffer.hpp. A view must be contiguous. All buffers of a
/// call must have one dtype, and lie in memory that the backend moves. Every function of an empty handle
/// (made by default, moved from, or of a rank outside a split) throws bad_argument.
///
/// Calls in place: for all_reduce, scan, exscan, reduce and broadcast, `in` and `out` may be the same view,
/// or the program passes one argument, `x`. For all_gather(_v), and gather at the root, `in` may be block
/// rank() of `out`. For reduce_scatter(_v), and scatter at the root, `out` may be block rank() of `in`. Any
/// other overlap gives bad_argument.
///
/// weft composes an operation that the transport lacks from other operations, with the same results. An
/// operation that cannot be composed is `unsupported` (docs/support.md).
class ProcessGroup {
 public:
  ProcessGroup() = default;
  /// Collective over the ranks of `m`. `backend`: "shm" (built in), "gloo", "mpi-openmpi", "mpi-mpich",
  /// "nccl" or another plug-in's name (weft/backends/plugin.hpp), or "auto". "auto" means the backend that
  /// WEFT_BACKEND (weft run --backend) names. If it names none, "auto" is shm if all ranks share this host,
  /// else the MPI whose mpirun started the program, else gloo. If `backend` and WEFT_BACKEND name different
  /// backends, rank 0 logs a warning. Throws timeout, naming the missing ranks. Throws unsupported, with the
  /// reason, if the backend cannot be loaded.
  static ProcessGroup create(Context& context, std::string_view backend, const Membership& m);
  /// Like the function above, over a transport of the caller's own (weft/backends/backend.hpp).
  static ProcessGroup create(Context& context, const BackendFactory& factory, const Membership& m);
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;
  ~ProcessGroup();

  int rank() const;
  int size() const;
  /// The number of this rank among the group's ranks on its host, and the number of these ranks. A program
  /// can choose a GPU by it, for example. Two ranks are on one host if they can share memory. Ranks of
  /// different users, or of containers with their own process numbers or network, are on different hosts.
  /// Threads of one process are on one host. The first call reads the Store, and may throw the Store's
  /// errors, and a timeout that names a rank which did not publish its host.
  int local_rank() const;
  int local_size() const;
  const std::string& name() const;
  Context& context() const;
  std::string_view backend() const;
  /// Order::canonical if every reduction of the group has the canonical order: because Membership::order says
  /// so, or because it is the transport's own.
  Order order() const;
  /// The operations that the transport performs itself, and its guarantees.
  const Traits& traits() const;
  explicit operator bool() const noexcept { return state_ != nullptr; }

  /// out[i] = combination over ranks of in[i]. Counts must be equal on all ranks.
  Work all_reduce(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_reduce(in, out, options));
  }
  /// In place: x[i] = combination over ranks of x[i].
  Work all_reduce(const Buffer& x, const CallOptions& options = {}) {
    return submit(call::all_reduce(x, options));
  }
  /// Like all_reduce(), but only rank `root` gets the result. On other ranks `out` is ignored and may be
  /// empty.
  Work reduce(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::reduce(in, out, root, options));
  }
  /// In place: x of rank `root` becomes the combination; on other ranks x stays as it is.
  Work reduce(const Buffer& x, int root, const CallOptions& options = {}) {
    return submit(call::reduce(x, root, options));
  }
  /// out[i] = combination over ranks 0 … rank() of in[i]. Counts must be equal on all ranks. The result
  /// equals that of an all_reduce in a group of only these ranks. avg divides by the number of these ranks.
  /// In canonical order the last rank gets the same bits as from an all_reduce. The ranks share the work, but
  /// together they combine size() / 2 times as much as in an all_reduce.
  Work scan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::scan(in, out, options));
  }
  Work scan(const Buffer& x, const CallOptions& options = {}) { return submit(call::scan(x, options)); }
  /// Like scan(), but over ranks 0 … rank() - 1. `out` of rank 0 becomes the identity of the reduction: 0 for
  /// sum, premul_sum, bit_or, bit_xor, logical_or and logical_xor; 1 for prod and logical_and; all bits set
  /// for bit_and; the largest value of the dtype for min, and the least for max (for floats the infinities;
  /// for bool true and false). avg and a user's function have no identity, so `out` of rank 0 is not changed.
  Work exscan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::exscan(in, out, options));
  }
  Work exscan(const Buffer& x, const CallOptions& options = {}) { return submit(call::exscan(x, options)); }
  /// out = in of rank 0, in of rank 1, …: out has size() × in elements.
  Work all_gather(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_gather(in, out, options));
  }
  /// Block r of out = in of rank r, which has `out_blocks.counts[r]` elements. All ranks must give the same
  /// counts.
  Work all_gather_v(const ConstBuffer& in, const Buffer& out, const Blocks& out_blocks,
                    const CallOptions& options = {}) {
    return submit(call::all_gather_v(in, out, out_blocks, options));
  }
  /// out = block rank() of the combination of all in: in has size() × out elements.
  Work reduce_scatter(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::reduce_scatter(in, out, options));
  }
  /// out = the combination of block rank() of all `in`. All ranks must give the same counts. Each rank may
  /// have different offsets.
  Work reduce_scatter_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                        const CallOptions& options = {}) {
    return submit(call::reduce_scatter_v(in, out, in_blocks, options));
  }
  /// At rank `root`: out = in of rank 0, in of rank 1, …. On other ranks `out` is ignored and may be empty.
  Work gather(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::gather(in, out, root, options));
  }
  /// out = block rank() of the root's `in`. On other ranks `in` is ignored and may be empty.
  Work scatter(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::scatter(in, out, root, options));
  }
  /// Block r of out = block rank() of rank r's in. Each has n equal blocks.
  Work all_to_all(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_to_all(in, out, options));
  }
  /// Like all_to_all(), but with blocks of any size. `in_blocks.counts[r]` on this rank must equal
  /// `out_blocks.counts[rank()]` on rank r.
  Work all_to_all_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                    const Blocks& out_blocks, const CallOptions& options = {}) {
    return submit(call::all_to_all_v(in, out, in_blocks, out_blocks, options));
  }
  /// out = in of rank `root`. On other ranks `in` is ignored and may be empty.
  Work broadcast(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::broadcast(in, out, root, options));
  }
  /// In place: x = x of rank `root`.
  Work broadcast(const Buffer& x, int root, const CallOptions& options = {}) {
    return submit(call::broadcast(x, root, options));
  }
  /// The call is done when all ranks have called barrier().
  Work barrier(const CallOptions& options = {}) { return submit(call::barrier(options)); }
  /// Sends to rank `dst`, whose recv must have the same tag. The call is done when `in` may be reused. For a
  /// message above the eager limit (shm: 4 KiB) this may be only when the receiver has the matching recv.
  Work send(const ConstBuffer& in, int dst, const CallOptions& options = {}) {
    return submit(call::send(in, dst, options));
  }
  /// Receives from rank `src`. A message of another dtype or count gives mismatch.
  ///
  /// With any_source it receives the next message of this tag, from any rank. Work::source() gives that rank.
  /// (There is no receive of any tag.) If a message matches several receives, whether they name its source or
  /// not, the receive that was posted first takes it. If several messages match a receive, it takes the
  /// message that arrived first. So messages of one source and tag are taken in the order in which they were
  /// sent, and a message never waits behind later messages of another source. A recv from any_source fails
  /// when any rank dies, as every call does, and when all other ranks have left the group. Over nccl it is
  /// `unsupported`.
  Work recv(const Buffer& out, int src, const CallOptions& options = {}) {
    return submit(call::recv(out, src, options));
  }

  /// Returns source, dtype and count of the message that a recv from `src` (or any_source) with this tag
  /// would take now. Returns nothing if no such message has arrived. The message is not removed. A later recv
  /// of its source and tag takes it, unless another thread receives it first. So a program can allocate
  /// memory for messages of unknown size. Never waits, but takes the next steps of all calls in flight.
  /// Throws the group's first cause if the group has failed, for example because a rank died. If a rank has
  /// left the group, probe() does not throw, because the rank merely sends no more messages (but
  /// wait_message() throws). Any thread may call it. The deadline does not apply.
  std::optional<MessageInfo> probe(int src, const CallOptions& options = {});
  /// Like probe(), but waits until there is such a message, and throws timeout after the deadline. It is a
  /// call of the group. So if its deadline passes, the group fails.
  MessageInfo wait_message(int src, const CallOptions& options = {});

  /// Performs a send to `dst` and a receive from `src` at the same time, with the same tag, so that rings
  /// cannot deadlock. `in` and `out` may not overlap.
  Work send_recv(const ConstBuffer& in, int dst, const Buffer& out, int src,
                 const CallOptions& options = {}) {
    return coalesced({call::send(in, dst, options), call::recv(out, src, options)});
  }
  /// Submits several calls as one. They begin together, and the Work is done when all of them are done. The
  /// order of the collectives among them must be the same on all ranks. Throws before the first call is sent
  /// if any call has a wrong argument, or if one call writes memory that another call writes or reads. For
  /// calls with blocks, only the blocks count. At most 64 calls are in flight at once. The others begin when
  /// earlier ones end. If a call cannot be sent after others were sent, the group fails.
  Work coalesced(std::span<const Call> calls);
  Work coalesced(std::initializer_list<Call> calls);
  /// Submits a call that was made by a function of namespace `call`.
  Work submit(const Call& call);

  /// Prepares a call that will be started often. It checks the call, and does not communicate. Each
  /// PersistentCall::start() then does the same as submit(), at lower cost (weft/group/persistent_call.hpp).
  /// Throws the errors of submit() about arguments, and bad_argument for wait_message. Any thread may call
  /// it.
  PersistentCall make(const Call& call);
  /// make_NAME() calls make() for the call that the method NAME() submits, with the same arguments.
  PersistentCall make_all_reduce(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return make(call::all_reduce(in, out, options));
  }
  PersistentCall make_all_reduce(const Buffer& x, const CallOptions& options = {}) {
    return make(call::all_reduce(x, options));
  }
  PersistentCall make_reduce(const ConstBuffer& in, const Buffer& out, int root,
                             const CallOptions& options = {}) {
    return make(call::reduce(in, out, root, options));
  }
  PersistentCall make_reduce(const Buffer& x, int root, const CallOptions& options = {}) {
    return make(call::reduce(x, root, options));
  }
  PersistentCall make_scan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return make(call::scan(in, out, options));
  }
  PersistentCall make_scan(const Buffer& x, const CallOptions& options = {}) {
    return make(call::scan(x, options));
  }
  PersistentCall make_exscan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return make(call::exscan(in, out, options));
  }
  PersistentCall make_exscan(const Buffer& x, const CallOptions& options = {}) {
    return make(call::exscan(x, options));
  }
  PersistentCall make_all_gather(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return make(call::all_gather(in, out, options));
  }
  PersistentCall make_all_gather_v(const ConstBuffer& in, const Buffer& out, const Blocks& out_blocks,
                                   const CallOptions& options = {}) {
    return make(call::all_gather_v(in, out, out_blocks, options));
  }
  PersistentCall make_reduce_scatter(const ConstBuffer& in, const Buffer& out,
                                     const CallOptions& options = {}) {
    return make(call::reduce_scatter(in, out, options));
  }
  PersistentCall make_reduce_scatter_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                                       const CallOptions& options = {}) {
    return make(call::reduce_scatter_v(in, out, in_blocks, options));
  }
  PersistentCall make_gather(const ConstBuffer& in, const Buffer& out, int root,
                             const CallOptions& options = {}) {
    return make(call::gather(in, out, root, options));
  }
  PersistentCall make_scatter(const ConstBuffer& in, const Buffer& out, int root,
                              const CallOptions& options = {}) {
    return make(call::scatter(in, out, root, options));
  }
  PersistentCall make_all_to_all(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return make(call::all_to_all(in, out, options));
  }
  PersistentCall make_all_to_all_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                                   const Blocks& out_blocks, const CallOptions& options = {}) {
    return make(call::all_to_all_v(in, out, in_blocks, out_blocks, options));
  }
  PersistentCall make_broadcast(const ConstBuffer& in, const Buffer& out, int root,
                                const CallOptions& options = {}) {
    return make(call::broadcast(in, out, root, options));
  }
  PersistentCall make_broadcast(const Buffer& x, int root, const CallOptions& options = {}) {
    return make(call::broadcast(x, root, options));
  }
  PersistentCall make_barrier(const CallOptions& options = {}) { return make(call::barrier(options)); }
  PersistentCall make_send(const ConstBuffer& in, int dst, const CallOptions& options = {}) {
    return make(call::send(in, dst, options));
  }
  PersistentCall make_recv(const Buffer& out, int src, const CallOptions& options = {}) {
    return make(call::recv(out, src, options));
  }

  /// Prepares an exchange between neighbours that will be started often (weft/group/persistent_exchange.hpp).
  /// For each rank with which this rank exchanges, the plan has the boxes of elements to send and to receive.
  /// Does not communicate. Throws bad_argument, naming the part of the plan, if the plan is wrong, and
  /// unsupported for sums over a transport of a device.
  PersistentExchange make_exchange(const ExchangePlan& plan);
  /// Performs one exchange, for a plan that changes each time. It is make_exchange() and start() in one call.
  Work exchange(const ExchangePlan& plan, std::span<const ExchangeField> fields,
                const CallOptions& options = {});

  /// Makes a group of `ranks` (this group's numbering, in the order of their new ranks), which must contain
  /// this rank. Collective among these ranks only. Other ranks never block and need not call it. Its errors
  /// give Error::ranks() as ranks of this group. If this group fails meanwhile, or a member has left this
  /// group, subgroup() throws this group's first cause.
  ProcessGroup subgroup(std::string_view name, std::span<const int> ranks);
  /// Like the function above, for a list in braces: subgroup("ends", {0, 3}).
  ProcessGroup subgroup(std::string_view name, std::initializer_list<int> ranks) {
    return subgroup(name, std::span<const int>(ranks.begin(), ranks.size()));
  }

  /// Makes one group for each `color`. Its members are the ranks that give this color, ordered by (key,
  /// rank). Collective over all ranks. A rank that gives color -1 is in no group and gets an empty handle.
  ProcessGroup split(int color, int key = 0);
  /// Makes a group of the ranks of this group that are on this rank's host, in the same order. local_rank()
  /// is the rank of this rank in the new group. Collective over all ranks of the host.
  ProcessGroup split_by_host();
  /// Makes a group of the same ranks, whose calls are independent of the calls of this group. Collective over
  /// all ranks.
  ProcessGroup duplicate();

  /// Makes a group of the survivors, numbered in the order of their ranks in this group. Call it after a
  /// failure, or earlier if a rank is known to be lost. The new group shares only the Store and the transport
  /// with this group. All survivors call shrink(), and agree through the Store which ranks take part. It
  /// leaves out at once the ranks that the transport knows to be dead or to have left. It waits for the
  /// others at most `limit` (zero: the group's deadline), and then leaves out the missing ranks, too. A rank
  /// that calls shrink() after that, because it was stopped or busy, gets peer_lost with its own number, and
  /// is in no group. If a rank dies while the group is made, the others agree again. This may take `limit`
  /// twice for each rank that is lost meanwhile. If any rank is left out, this group fails on all ranks,
  /// unless it had failed before.
  ///
  /// The program may not use buffers of failed calls before quiesce() of this group returns true. This group
  /// may be destroyed afterwards. Both groups may be shrunk again.
  ///
  /// Also throws peer_lost if the Store is lost, since the survivors cannot agree without it: the process
  /// that served it has ended. Throws `unsupported` or `system` if this rank cannot make the group. The other
  /// ranks then make the group without it.
  ProcessGroup shrink(Duration limit = {});
  /// For each rank of this group, its rank in the parent group, from which this group was made by subgroup(),
  /// split(), duplicate() or shrink(). Empty if there is no parent group.
  std::span<const int> parent_ranks() const;

  /// Leaves the group together with the other ranks: all ranks must call leave() as their last call of the
  /// group. It waits for all ranks, and compares their calls, including broadcasts and scatters, whose roots
  /// wait for nobody. Throws `mismatch` on every rank if calls differ or a rank has left out a call. (The
  /// destructor compares without waiting, and logs a warning.) The handle is empty afterwards. If leave()
  /// throws, the handle is unchanged, and the group has failed. `deadline` zero: the group's deadline. Over
  /// nccl, and if the comparison is switched off, leave() only waits.
  void leave(Duration deadline = {});

  /// Fails every pending and later call of every rank with `aborted` and this text. A call whose peers have
  /// already done their part may still succeed. The next call fails. Does not block.
  void abort(std::string_view why);
  /// After a failure: returns true when no rank can access the buffers of failed calls any more; see
  /// Error::quiesced(). Waits up to `limit` for ranks that access these buffers. If such a rank is stopped,
  /// the allocations of Memory::shared in which the buffers lie get other pages as a whole. Addresses and
  /// contents stay, and later writes of the stopped rank are lost. Meanwhile no other thread may write
  /// anywhere in these allocations. Calls of other groups may be made. Any thread may call quiesce(). It
  /// returns false as long as one of these conditions holds:
  ///   - a call of another group that uses these allocations, or an exchange of a window or halo of any
  ///     group, is in flight: finish it and ask again;
  ///   - a driver holds their pages (weft/host/pin.hpp), or the kernel counts pinned pages of this process;
  ///   - the stopped rank is a thread of this process, or writes through the kernel.
  bool quiesce(Duration limit);

  /// The last 1024 calls of this rank, as JSON: op, dtype, count, call, posted and finished in ns, state, and
  /// the failure, if any (docs/traces.md). Any thread may call it at any time. If WEFT_TRACE names a folder,
  /// weft writes the trace there when the group fails, before the first Error is thrown, and at every
  /// SIGUSR2.
  std::string trace_json() const;
  /// The same calls in the format of chrome://tracing and Perfetto.
  std::string trace_chrome() const;

  /// Whether this rank knows that the group has failed, or the handle is empty. Any thread may call it. It
  /// does not check for new failures.
  bool failed() const noexcept;

 private:
  friend class detail::Access;
  explicit ProcessGroup(GroupState* state) : state_(state) {}
  GroupState* state_ = nullptr;  // counted
};

}  // namespace weft
