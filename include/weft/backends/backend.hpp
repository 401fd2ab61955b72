// The interface that a transport implements. The group implements deadlines, the flight recorder and
// progress, once for all transports. The headers of this folder have the parts from which transports are
// built. docs/backends.md lists them.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/call.hpp"
#include "weft/backends/exchange.hpp"
#include "weft/base/error.hpp"
#include "weft/host/context.hpp"
#include "weft/store/store.hpp"

namespace weft {

/// The result of a poll. `pending`: there was nothing to do. `advanced`: a step was taken, and more steps
/// will follow. `done`: the call has ended. `failed`: the group has failed.
enum class Step : std::uint8_t { pending, advanced, done, failed };

/// The thread that makes progress on a call. `polled`: only poll(); `threaded`: a thread of the transport,
/// which may block; `stream`: a device stream.
enum class ProgressStyle : std::uint8_t { polled, threaded, stream };

/// The guarantees of a backend about failures. State only what is true: `weft check --faults` expects exactly
/// these guarantees.
struct FailureGuarantees {
  bool deadline = false;        ///< a call that has not ended by its deadline fails with `timeout`
  bool names_absent = false;    ///< the time-out names the ranks that had not arrived
  bool detects_death = false;   ///< if a rank dies, every survivor gets `peer_lost`, before the deadline
  bool survives_death = false;  ///< survivors may continue, in other groups
  bool checks_calls = false;    ///< ranks that call different things get `mismatch`
  bool revocable = false;       ///< after a failure the transport does not touch the caller's memory again
  bool quiesces = false;        ///< quiesce() returns true at some time, even if a peer is stopped
  friend bool operator==(const FailureGuarantees&, const FailureGuarantees&) = default;
};

/// Composed collectives send messages with tags from -kComposedTags to -1, which a user's message never has.
/// The all_to_all_v of a composed collective has such a tag, too. A transport that compares calls must also
/// compare this tag.
inline constexpr int kComposedTags = 1 << 15;

using OpSet = std::uint32_t;  ///< bit per Op
constexpr OpSet op_bit(Op op) noexcept { return OpSet{1} << static_cast<int>(op); }
using DTypeSet = std::uint32_t;  ///< bit per DType
constexpr DTypeSet dtype_bit(DType t) noexcept { return DTypeSet{1} << static_cast<int>(t); }

/// The abilities of a backend. The group reads them once, when it is created. weft composes the operations
/// that the transport lacks from those that it has. `send` and `recv` are enough for all operations, and
/// `all_to_all_v` is enough for all collectives. The transport must accept the tags of kComposedTags. It must
/// also accept an all_to_all_v in which several blocks of `in` are the same memory. Blocks of `in` may also
/// lie in the buffer of `out`, between the blocks of `out`.
struct Traits {
  std::string_view name;
  /// operations that the transport performs itself; wait_message includes recv from any_source and probe()
  OpSet ops = 0;
  DTypeSet dtypes = 0;  ///< the dtypes that the transport moves
  /// For each ReduceOp::Kind: the dtypes that the transport reduces itself, in its own order.
  std::array<DTypeSet, kReduceKindCount> reduces{};
  /// the transport's own order is the canonical tree, with the canonical rounding
  bool native_is_canonical = false;
  bool device = false;            ///< true: the transport moves CUDA memory; false: host memory
  std::int16_t device_index = 0;  ///< for a group on a device: the device whose memory the transport moves
  ProgressStyle progress = ProgressStyle::polled;
  FailureGuarantees guarantees{};
  bool spin = true;  ///< a waiting thread may spin: there are no more ranks on this host than usable cores
  /// True if the transport rings the doorbell of a sleeping rank when that rank has work (see
  /// announce_sleep). If false, a sleeping rank polls again after a fraction of a millisecond.
  bool rings = true;

  bool has(Op op) const noexcept { return (ops & op_bit(op)) != 0; }
  bool moves(DType t) const noexcept { return (dtypes & dtype_bit(t)) != 0; }
  bool reduces_itself(ReduceOp::Kind kind, DType t) const noexcept {
    return (reduces[static_cast<std::size_t>(kind)] & dtype_bit(t)) != 0;
  }
};

/// Memory of the caller that peers may write during a call.
struct MemoryRange {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// A part of a buffer, in elements.
struct BufferBlock {
  std::int64_t offset = 0;
  std::int64_t count = 0;
};

/// A call in flight: a fixed slot of the group's ring, which is reused when the call is done. The group fills
/// the first part before post(). The other fields belong to the backend.
struct OpState {
  Op op = Op::none;
  DType dtype = DType::f32;
  ReduceOp reduce{};
  Order order = Order::native;
  std::uint64_t call = 0;  ///< number among the group's collectives, or among its point-to-point calls
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_count = 0;  ///< elements
  std::int64_t out_count = 0;
  int root = -1;
  /// send: the destination. recv and wait_message: the source, or any_source. post() or poll() replaces
  /// any_source by the source of the message that was found, at the latest when the call is done.
  /// (wait_message sets `dtype` and `out_count` of that message, too.)
  int peer = -1;
  int tag = 0;
  Stream stream{};
  /// v-forms: for each rank r, block r of `in` and block r of `out`. Null if all blocks of the operation have
  /// equal size. Valid as long as the call. See in_block() and out_block() (weft/backends/op_table.hpp).
  const BufferBlock* in_blocks = nullptr;
  const BufferBlock* out_blocks = nullptr;
  /// If this call is a part of a composed call: the user's call, which ranks compare and texts name. Null if
  /// this call is itself the user's. Valid as long as this call.
  const OpState* user = nullptr;
  /// The plan and the fields of an exchange. Undefined for other operations. (Version 6.5.)
  const ExchangeCall* exchange = nullptr;

  alignas(16) std::array<std::byte, 192> scratch;  ///< the backend's own, uninitialised at post()
};

/// A transport in one group, made by a BackendFactory. The group calls it from one thread at a time, except
/// for functions that say "from any thread". The virtual functions are ordered by the version of the ABI that
/// added them (see weft/backends/plugin.hpp). New functions go to the end, have a default, and are never
/// called on a plug-in that was built for an older version.
class Backend {
 public:
  // Version 6.0.
  virtual ~Backend() = default;
  virtual const Traits& traits() const noexcept = 0;
  /// Starts a call. Never waits and never fails. poll() reports errors. All ranks post the same collectives
  /// in the same order.
  virtual void post(OpState& s) noexcept = 0;
  /// Takes the next steps of a call, of which there is a bounded number. The group polls a collective only
  /// after all earlier collectives are done.
  virtual Step poll(OpState& s) noexcept = 0;
  /// Returns true if no rank has failed, died or aborted. If it returns false, failure() gives the reason.
  /// The group calls it about once a millisecond while a call makes no progress.
  virtual bool healthy() noexcept = 0;
  /// Returns the ranks that have not arrived at this call yet. Sets `story` to a sentence about these ranks,
  /// for the texts of time-outs and warnings.
  virtual std::vector<int> missing(const OpState& s, std::string& story) noexcept = 0;
  /// Makes every pending and later call of every rank fail. If several ranks call it, all ranks report the
  /// first cause. Returns within a bounded time. From any thread.
  virtual void fail(const Failure& why) noexcept = 0;
  /// The first cause of the failure. Called only after fail(), a failed poll() or healthy() == false. From
  /// any thread.
  virtual Failure failure() const = 0;
  /// After a failure: returns true if no rank accesses the callers' memory now. Does not wait. From any
  /// thread.
  virtual bool quiet() const noexcept = 0;
  /// After a failure: waits until no rank can access the callers' memory any more. If a stopped peer might
  /// still write to the callers' shared memory, the backend moves that memory to new pages. `exposed`: the
  /// buffers of the calls that failed. Returns false if ranks can still access the memory at the deadline.
  /// From any thread.
  virtual bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept = 0;
  /// Announces that this rank is about to sleep on its doorbell (true), or is awake again (false). After the
  /// announcement the group polls once more before it sleeps. A peer first makes its step visible and then
  /// checks for sleepers, so it always wakes this rank. From any thread.
  virtual void announce_sleep(bool asleep) noexcept = 0;
  /// Calls posted between batch(true) and batch(false) belong together and may be started as one. Calls of an
  /// open batch may be polled, and calls of other threads may be posted into it.
  virtual void batch(bool /*begin*/) noexcept {}
  /// Stream backends: makes `stream` wait for the call, without blocking the host. Returns false if the host
  /// has to wait instead.
  virtual bool wait_on(OpState& /*s*/, Stream /*stream*/) noexcept { return false; }
  /// Stream backends, before anything is posted: throws bad_argument if calls cannot be ordered on `stream`,
  /// because its handle is no stream of its device. Throws unsupported if it is being captured into a graph.
  /// `calls` is true if the stream is to order calls. Then it belongs to the group's device. `calls` is false
  /// for wait_on(), which takes streams of any device. From any thread.
  virtual void check_stream(Stream /*stream*/, bool /*calls*/) {}
  /// The ranks that have died or left the group, as far as the transport knows at this moment. May be called
  /// before and after a failure. From any thread.
  virtual std::vector<int> gone() const noexcept { return {}; }
  // Version 6.1.
  /// The group calls it before it calls missing() for a time-out. Asks the other ranks for which ranks they
  /// wait, or continues to ask. It does not wait (weft/backends/hold_up.hpp). Returns true if no more answers
  /// are expected. If it returns false, call it again soon.
  virtual bool ask(const OpState& /*s*/) noexcept { return true; }
  /// Answers peers that ask(). Called when the rank goes to sleep, even if it has no calls in flight in this
  /// group.
  virtual void answer() noexcept {}
  // Version 6.3.
  /// The last call of each rank of the group, including this one, as far as this rank knows after ask(), in
  /// order of the ranks. May be called before and after a failure. Empty if the transport does not know the
  /// calls. The transport must set `rank` and `state`, and `op` and `call` if it knows the call. The group
  /// writes the text.
  virtual std::vector<LastCall> last_calls() noexcept { return {}; }
  /// The message that a recv from `source` (any_source: from any rank) with this tag would take if it were
  /// posted now. Nothing if no such message has arrived. First takes in the data that has arrived. Never
  /// waits. Called only if the traits have wait_message.
  virtual std::optional<MessageInfo> probe(int /*source*/, int /*tag*/) noexcept { return std::nullopt; }
  // Version 6.5.
  /// Prepares a plan, which the group has checked, for the exchanges that use it. OpState::exchange names the
  /// result. Does not communicate. Called only if the traits have exchange, while this thread owns the group.
  /// The result is destroyed after its exchanges, but before this backend.
  virtual std::unique_ptr<PlannedExchange> plan_exchange(const ExchangePlan& /*plan*/) { return nullptr; }
};

/// The arguments of a backend's factory: the ranks of the group, and the store through which they find each
/// other.
struct GroupInit {
  Context& context;
  std::shared_ptr<Store> store;
  std::string
      token;  ///< prefix of this group's keys in the store: unique to (job, parent, name, ranks, generation)
  std::string name;
  int rank = 0;
  int size = 1;
  /// the index of this rank among the ranks of this process (several if ranks are threads)
  int process_rank = 0;
  /// The number of ranks of the whole job on this host, as far as it is known. If this host has more such
  /// ranks than cores, waits do not spin.
  int ranks_here = 1;
  Deadline deadline;  ///< for making the group
};

/// Makes a transport. Throws if the group cannot be made. Collective over the group's ranks.
using BackendFactory = std::function<std::unique_ptr<Backend>(const GroupInit&)>;

}  // namespace weft
