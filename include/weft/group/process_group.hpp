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

/// Which threads make progress on calls. `caller`: only a thread that waits, asks done() or submits.
/// `thread`: a helper thread of this rank as well, one for all its groups that ask for it, so that
/// communication overlaps computation.
enum class Progress : std::uint8_t { caller, thread };

/// The members of a group and how it behaves. All ranks give the same values, except `rank` and
/// `process_rank`.
struct Membership {
  std::shared_ptr<Store> store;
  int rank = 0;
  int size = 1;  ///< at most kMaxRanks
  std::string name = "world";
  Duration deadline = std::chrono::minutes(5);  ///< of each call, and of the group's creation
  int process_rank = -1;  ///< which rank of this process (threads as ranks); -1: same as `rank`
  Progress progress = Progress::caller;

  /// From the environment: weft run, torchrun, Open MPI's mpirun, Hydra's (MPICH) or srun. WEFT_STORE says
  /// where to meet if what the launcher offers is not enough (docs/rendezvous.md). With none of them, a group
  /// of one rank. Waits until the store is reached, and claims the rank there, which one process alone can:
  /// throws bad_argument naming both processes where another live process has claimed it, or where the store
  /// is another job's. `context` keeps the server that rank 0 starts; a second call gives the same store.
  /// `deadline` is the Membership's, too. Throws bad_argument naming the variable that is wrong, and timeout
  /// if rank 0 does not come.
  static Membership from_env(Context& context, Duration deadline = std::chrono::minutes(5));
};

/// A group of ranks. Move-only handle. Collectives must be called in the same order by all ranks of the
/// group; point to point is ordered per (source, destination, tag) only. Functions may be called from several
/// threads, but the order of collectives is then the callers' to agree on. Destroying it leaves the group:
/// peers that still wait for this rank get peer_lost. leave() also compares what the ranks have called last.
///
/// Every function throws bad_argument before anything is sent where an argument is wrong; the text names it.
/// Buffers are made from vectors, arrays and other contiguous ranges, variables, views, Tensors or (pointer,
/// count, dtype, device); see weft/base/buffer.hpp. A view must be contiguous; all buffers of a call are of
/// one dtype, in memory that the backend moves. An empty handle (made by default, moved from, or of a rank
/// outside of a split) throws bad_argument from every function.
///
/// In place: all_reduce, scan, exscan, reduce, broadcast: `in` and `out` the same view, or one argument, `x`;
/// all_gather(_v), gather at the root: `in` is block rank() of `out`; reduce_scatter(_v), scatter at the
/// root: `out` is block rank() of `in`. Any other overlap is bad_argument.
///
/// Operations that the transport lacks are composed from others, with the same results; an operation that
/// cannot be composed is `unsupported` (docs/support.md).
class ProcessGroup {
 public:
  ProcessGroup() = default;
  /// Collective over the ranks of `m`. `backend`: "shm" (built in), "gloo", "mpi-openmpi", "mpi-mpich",
  /// "nccl" or another plug-in's name (weft/backends/plugin.hpp), or "auto": what WEFT_BACKEND (weft run
  /// --backend) says; otherwise shm if all ranks share this host, otherwise the MPI under whose mpirun the
  /// program runs, otherwise gloo. If another name is given than WEFT_BACKEND has, rank 0 logs a warning.
  /// Throws timeout naming the ranks that did not come; unsupported if the backend cannot be loaded, with the
  /// reason.
  static ProcessGroup create(Context& context, std::string_view backend, const Membership& m);
  /// The same over a transport of the caller's own (weft/backends/backend.hpp).
  static ProcessGroup create(Context& context, const BackendFactory& factory, const Membership& m);
  ProcessGroup(ProcessGroup&&) noexcept;
  ProcessGroup& operator=(ProcessGroup&&) noexcept;
  ~ProcessGroup();

  int rank() const;
  int size() const;
  /// This rank's place among the ranks of this group that are on its host, and how many these are: to choose
  /// a GPU, for example. A host is where memory can be shared: ranks of different users, or of containers
  /// with process numbers or a network of their own, are on different ones; threads of one process are on
  /// one. The first call reads the Store, and may throw its errors, and timeout naming a rank that did not
  /// publish its host.
  int local_rank() const;
  int local_size() const;
  const std::string& name() const;
  Context& context() const;
  std::string_view backend() const;
  /// The operations that the transport performs itself, and its guarantees.
  const Traits& traits() const;
  explicit operator bool() const noexcept { return state_ != nullptr; }

  /// out[i] = combination over ranks of in[i]. Counts equal on all ranks.
  Work all_reduce(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_reduce(in, out, options));
  }
  /// In place: x[i] = combination over ranks of x[i].
  Work all_reduce(const Buffer& x, const CallOptions& options = {}) {
    return submit(call::all_reduce(x, options));
  }
  /// The same at rank `root` alone. Elsewhere `out` is ignored and may be empty.
  Work reduce(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::reduce(in, out, root, options));
  }
  /// In place: x of rank `root` becomes the combination; elsewhere x stays as it is.
  Work reduce(const Buffer& x, int root, const CallOptions& options = {}) {
    return submit(call::reduce(x, root, options));
  }
  /// out[i] = combination over ranks 0 … rank() of in[i]. Counts equal on all ranks. The result is what an
  /// all_reduce would give in a group of these ranks alone: avg divides by how many they are, and in
  /// canonical order the last rank has the bits of all_reduce. The ranks share the work, but together they
  /// combine size() / 2 times as much as in an all_reduce.
  Work scan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::scan(in, out, options));
  }
  Work scan(const Buffer& x, const CallOptions& options = {}) { return submit(call::scan(x, options)); }
  /// The same over ranks 0 … rank() - 1. `out` of rank 0 becomes the identity of the reduction: 0 of sum,
  /// premul_sum, bit_or, bit_xor, logical_or and logical_xor; 1 of prod and logical_and; all bits of bit_and;
  /// the largest value of min and the least of max (of floats the infinities; of bool true and false). avg
  /// and a user's function have none: there `out` of rank 0 stays as it is.
  Work exscan(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::exscan(in, out, options));
  }
  Work exscan(const Buffer& x, const CallOptions& options = {}) { return submit(call::exscan(x, options)); }
  /// out = in of rank 0, in of rank 1, …: out has size() × in elements.
  Work all_gather(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_gather(in, out, options));
  }
  /// Block r of out = in of rank r, which has `out_blocks.counts[r]` elements. All ranks give the same
  /// counts.
  Work all_gather_v(const ConstBuffer& in, const Buffer& out, const Blocks& out_blocks,
                    const CallOptions& options = {}) {
    return submit(call::all_gather_v(in, out, out_blocks, options));
  }
  /// out = block rank() of the combination of all in: in has size() × out elements.
  Work reduce_scatter(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::reduce_scatter(in, out, options));
  }
  /// out = the combination of block rank() of all `in`. All ranks give the same counts; offsets are their
  /// own.
  Work reduce_scatter_v(const ConstBuffer& in, const Buffer& out, const Blocks& in_blocks,
                        const CallOptions& options = {}) {
    return submit(call::reduce_scatter_v(in, out, in_blocks, options));
  }
  /// At rank `root`: out = in of rank 0, in of rank 1, …. Elsewhere `out` is ignored and may be empty.
  Work gather(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::gather(in, out, root, options));
  }
  /// out = block rank() of the root's `in`. Elsewhere `in` is ignored and may be empty.
  Work scatter(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::scatter(in, out, root, options));
  }
  /// Block r of out = block rank() of rank r's in: n equal blocks each.
  Work all_to_all(const ConstBuffer& in, const Buffer& out, const CallOptions& options = {}) {
    return submit(call::all_to_all(in, out, options));
  }
  /// The same with blocks of any size: `in_blocks.counts[r]` here is `out_blocks.counts[rank()]` on rank r.
  Work all_to_all_v(const ConstBuffer& in, const Blocks& in_blocks, const Buffer& out,
                    const Blocks& out_blocks, const CallOptions& options = {}) {
    return submit(call::all_to_all_v(in, in_blocks, out, out_blocks, options));
  }
  /// out = in of rank `root`. Elsewhere `in` is ignored and may be empty.
  Work broadcast(const ConstBuffer& in, const Buffer& out, int root, const CallOptions& options = {}) {
    return submit(call::broadcast(in, out, root, options));
  }
  /// In place: x = x of rank `root`.
  Work broadcast(const Buffer& x, int root, const CallOptions& options = {}) {
    return submit(call::broadcast(x, root, options));
  }
  /// Done when all ranks have called it.
  Work barrier(const CallOptions& options = {}) { return submit(call::barrier(options)); }
  /// To rank `dst`, matched by its recv of the same tag. Done when `in` may be reused, which above the eager
  /// limit (shm: 4 KiB) may be as late as the match.
  Work send(const ConstBuffer& in, int dst, const CallOptions& options = {}) {
    return submit(call::send(in, dst, options));
  }
  /// From rank `src`. A message of another dtype or count is a mismatch.
  ///
  /// `any_source`: the next message of this tag, whichever rank sent it; Work::source() says which. (A tag is
  /// always given: there is no receive of any tag.) If a message fits several receives, whether they name
  /// its source or not, the one that was posted first takes it. If several messages fit a receive, it takes
  /// the one that arrived first. So the messages of one source and tag are taken in the order in which they
  /// were sent, and no source waits behind later messages of another. It fails when any rank dies, as every
  /// call does, and when all other ranks have left the group. Over nccl it is `unsupported`.
  Work recv(const Buffer& out, int src, const CallOptions& options = {}) {
    return submit(call::recv(out, src, options));
  }

  /// The message that a recv of this source (or any_source) and tag would take now: its source, dtype and
  /// count, whatever its size; nothing if none has come. The message stays: until another thread receives, a
  /// recv of its source and tag takes it. So a program can allocate for messages whose size it does not know.
  /// Never waits, but takes the next steps of all calls in flight, and throws this group's first cause once
  /// it has failed, as when a rank dies. A rank that has left is no failure here: no more messages come from
  /// it (wait_message() throws it). From any thread. The deadline does not count.
  std::optional<MessageInfo> probe(int src, const CallOptions& options = {});
  /// The same, but waits until there is one; after the deadline, timeout. It is a call: the deadline fails
  /// the group.
  MessageInfo wait_message(int src, const CallOptions& options = {});

  /// A send to `dst` and a receive from `src` at once, with the same tag, so that rings cannot deadlock. `in`
  /// and `out` may not overlap.
  Work send_recv(const ConstBuffer& in, int dst, const Buffer& out, int src,
                 const CallOptions& options = {}) {
    return coalesced({call::send(in, dst, options), call::recv(out, src, options)});
  }
  /// Several calls as one: begun together, done when all of them are. The order of the collectives among them
  /// must be the same on all ranks. A wrong argument in any of them throws before the first is sent; so does
  /// memory that one of them writes and another one writes or reads (of calls with blocks, the blocks count).
  /// At most 64 are in flight at once; the rest begin as earlier ones end. If one cannot be sent after
  /// others were sent, the group fails.
  Work coalesced(std::span<const Call> calls);
  Work coalesced(std::initializer_list<Call> calls);
  /// One call made by a function of namespace `call`.
  Work submit(const Call& call);

  /// The same call, to be started often: checks it, and sends nothing. Each PersistentCall::start() then does
  /// what submit() does, for less (weft/group/persistent_call.hpp). Throws what submit() throws of wrong
  /// arguments; bad_argument for wait_message. Local; from any thread.
  PersistentCall make(const Call& call);
  /// For each operation, make() of the call that the method of that name submits, with the same arguments.
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
  PersistentCall make_all_to_all_v(const ConstBuffer& in, const Blocks& in_blocks, const Buffer& out,
                                   const Blocks& out_blocks, const CallOptions& options = {}) {
    return make(call::all_to_all_v(in, in_blocks, out, out_blocks, options));
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

  /// An exchange between neighbours, to be started often (weft/group/persistent_exchange.hpp): for each rank
  /// that this one exchanges with, the boxes of elements to send and to receive. Works the plan out, and
  /// sends nothing. Local. Throws bad_argument naming the part of the plan that is wrong; unsupported for
  /// sums over a transport of a device.
  PersistentExchange make_exchange(const ExchangePlan& plan);
  /// The same once, for a plan that changes with each call: make_exchange() and one start() together.
  Work exchange(const ExchangePlan& plan, std::span<const ExchangeField> fields,
                const CallOptions& options = {});

  /// A group of `ranks` (this group's numbering, in the order of their new ranks), which must hold this rank.
  /// Collective among its members only; others never block and need not call. Error::ranks() of its errors
  /// are ranks of this group. If this group fails meanwhile, or a member has left it, it throws this
  /// group's first cause.
  ProcessGroup subgroup(std::string_view name, std::span<const int> ranks);

  /// Groups by `color`: the ranks that give the same color, ordered by (key, rank). Collective over all
  /// ranks; color -1: no group (an empty handle).
  ProcessGroup split(int color, int key = 0);
  /// Groups by host: the ranks of this group that are on this rank's host, in the same order; see
  /// local_rank(), which is this rank's rank there. Collective over all ranks of the host.
  ProcessGroup split_by_host();
  /// A group of the same ranks whose calls are independent of this one's. Collective over all ranks.
  ProcessGroup duplicate();

  /// After a failure, or before one where a rank is known to be lost: a group of the survivors, numbered in
  /// the order of their ranks here, which share only the Store and the transport with this group. All
  /// survivors call it, and agree through the Store on who takes part. Ranks that the transport knows to be
  /// dead or gone are left out at once; others are waited for, `limit` (zero: the group's deadline), and then
  /// left out, too. On a rank that comes later, because it was stopped or busy, it throws peer_lost naming
  /// that rank, which is in no group. If a rank dies while the group is made, the others agree again, so it
  /// may take `limit` twice for each rank that is lost meanwhile. If any rank is left out, this group fails
  /// on all ranks, if it had not failed before.
  ///
  /// Buffers of failed calls are still this group's: see quiesce(). It may be destroyed afterwards, and both
  /// may be shrunk again.
  ///
  /// Throws peer_lost if the Store is lost, too: the process that served it has ended, and the survivors
  /// cannot agree without it. `unsupported` or `system` if this rank cannot make the group: then the others
  /// make it without this rank.
  ProcessGroup shrink(Duration limit = {});
  /// The rank that each rank of this group has in the group that this one was made of by subgroup(), split(),
  /// duplicate() or shrink(). Empty: of none.
  std::span<const int> parent_ranks() const;

  /// Leaves the group together with its other ranks: all ranks call it, as their last call of the group. It
  /// waits for them, and compares what they have called, also in broadcasts and scatters, whose roots wait
  /// for nobody. Throws `mismatch` on every rank where calls differ or a rank has left one out. (The
  /// destructor compares without waiting, and logs a warning.) The handle is empty afterwards; if this
  /// throws, the handle is unchanged, and the group has failed. `deadline` zero: the group's. Over nccl, and
  /// where the comparison is switched off, it only waits.
  void leave(Duration deadline = {});

  /// Fails every pending and later call of every rank with `aborted` and this text. A call whose peers have
  /// done their part already may succeed; the next one fails. Does not block.
  void abort(std::string_view why);
  /// After a failure: true once nobody can touch the buffers of failed calls any more; see Error::quiesced().
  /// Waits up to `limit` for ranks that access them. If such a rank is stopped, the whole allocations of
  /// Memory::shared that these buffers lie in get other pages: addresses and contents stay, later writes of
  /// the stopped rank are lost. Meanwhile no other thread may write anywhere in these allocations; calls of
  /// other groups may be made. False, then and until that has changed, where
  ///   - a call of another group that uses these allocations, or an exchange of a window or halo of any
  ///     group, is in flight: finish it and ask again;
  ///   - a driver holds their pages (weft/host/pin.hpp), or the kernel counts pinned pages of this process;
  ///   - the rank that is stopped is a thread of this process, or writes through the kernel.
  /// From any thread.
  bool quiesce(Duration limit);

  /// The last 1024 calls of this rank, as JSON: op, dtype, count, call, posted and finished in ns, state, and
  /// the failure, if any (docs/traces.md). Any thread, at any time. If WEFT_TRACE names a folder it is
  /// written there when the group fails, before the first Error is thrown, and at every SIGUSR2.
  std::string trace_json() const;
  /// The same for chrome://tracing and Perfetto.
  std::string trace_chrome() const;

  /// Whether this rank knows that the group has failed, or is empty. Any thread; does not look for news.
  bool failed() const noexcept;

 private:
  friend class detail::Access;
  explicit ProcessGroup(GroupState* state) : state_(state) {}
  GroupState* state_ = nullptr;  // counted
};

}  // namespace weft
