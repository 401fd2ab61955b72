// What a transport implements. Deadlines, the recorder, the first cause and progress are written once, in the
// group.
#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <functional>
#include <memory>
#include <span>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/call.hpp"
#include "weft/backends/store.hpp"
#include "weft/base/context.hpp"
#include "weft/base/error.hpp"

namespace weft {

/// What a poll found: nothing to do now; a step taken with more to come; the end; a failure.
enum class Step : std::uint8_t { pending, advanced, done, failed };

/// What a backend can do. Asked once, when the group is created.
struct Traits {
  std::string_view name;
  bool native_is_canonical = false;  ///< its native order is the canonical tree
  bool canonical = false;            ///< it can do Order::canonical
  std::uint32_t reduce_dtypes = 0;   ///< bit per DType: may be reduced
  std::uint32_t dtypes = 0;          ///< bit per DType: may be moved
  bool spin = true;                  ///< a waiter may spin: no more ranks here than usable cores
};

/// Memory of the caller's that peers may write during a call.
struct MemoryRange {
  std::byte* data = nullptr;
  std::size_t bytes = 0;
};

/// A call in flight: a fixed slot of the group's ring, reused when done. The group fills the first part
/// before post(); the rest is the backend's.
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
  int peer = -1;
  int tag = 0;

  alignas(16) std::array<std::byte, 192> scratch;  ///< the backend's own, uninitialised at post()
};

/// Created by a factory; used by one thread at a time (the group sees to it) except where a function says
/// otherwise.
class Backend {
 public:
  virtual ~Backend() = default;
  virtual const Traits& traits() const noexcept = 0;
  /// Starts a call; never waits, never fails: what goes wrong is told by poll(). Collectives come in order.
  virtual void post(OpState& s) noexcept = 0;
  /// The next steps of a call, bounded. Collectives are polled in order: a later one only after the earlier
  /// are done.
  virtual Step poll(OpState& s) noexcept = 0;
  /// Slow path: has somebody failed, died or aborted? False: failure() tells.
  virtual bool healthy() noexcept = 0;
  /// Ranks that have not arrived at this call yet, and what the others called, for time-outs and warnings.
  virtual std::vector<int> missing(const OpState& s, std::string& story) noexcept = 0;
  /// Makes every pending and later call of every rank fail. The first cause of all ranks wins. Bounded in
  /// time; from any thread.
  virtual void fail(const Failure& why) noexcept = 0;
  /// The first cause, after fail(), a failed poll() or healthy() == false. From any thread.
  virtual Failure failure() const = 0;
  /// After a failure: true where nobody is inside the callers' memory now. No waiting. From any thread.
  virtual bool quiet() const noexcept = 0;
  /// After a failure: waits until nobody can touch the callers' memory any more, moving the callers' shared
  /// memory to new pages where a stopped peer might still write. `exposed`: the buffers of the calls that
  /// failed. False: not reached by the deadline. From any thread.
  virtual bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept = 0;
  /// The rank is about to sleep on its bell, or awake again: from any thread. See ProgressList::sleep.
  virtual void announce_sleep(bool asleep) noexcept = 0;
};

/// For tests only: what a user never sets.
struct TestHooks {
  std::string path;  ///< force one path of the backend: shm knows "inline", "direct" and "staged"
  std::function<void(std::uint64_t call)>
      in_chunk;  ///< called with peers' memory in hand, in the middle of a copy
};

/// What a backend's factory gets: who meets whom, where.
struct Bringup {
  Context& context;
  std::shared_ptr<Store> store;
  std::string
      token;  ///< prefix of this group's keys in the store: unique to (job, parent, name, ranks, generation)
  std::string name;
  int rank = 0;
  int size = 1;
  int identity = 0;  ///< which rank of this process this is: names its bell and its progress list
  int ranks_here =
      1;  ///< ranks of the whole job on this host, as far as known: more than cores means no spinning
  Deadline deadline;  ///< for the bring-up
  TestHooks test;
};

/// Makes a transport. Throws where the group cannot be had; collective over its ranks.
using BackendFactory = std::function<std::unique_ptr<Backend>(const Bringup&)>;

}  // namespace weft
