// A random program of collectives, exchanges of windows and reductions of gradients, as `weft check` runs it.
// Plain values. A program can be drawn, printed, stored and made smaller. It contains everything that all
// ranks know. Choices of one rank (the places of its buffers, the order of its waits) also follow from the
// program's numbers, see Habits.
#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "weft/backends/backend.hpp"
#include "weft/base/dtype.hpp"
#include "weft/base/op.hpp"

namespace weft::check {

/// Numbers that follow from other numbers, equal on every machine: splitmix64.
constexpr std::uint64_t mix(std::uint64_t x) noexcept {
  x += 0x9e3779b97f4a7c15u;
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9u;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebu;
  return x ^ (x >> 31);
}
constexpr std::uint64_t mix(std::uint64_t a, std::uint64_t b) noexcept { return mix(mix(a) ^ b); }

class Dice {
 public:
  explicit Dice(std::uint64_t seed) : state_(seed) {}
  std::uint64_t next() noexcept { return mix(state_++); }
  /// 0 … n - 1
  int below(std::size_t n) noexcept { return static_cast<int>(next() % n); }
  int between(int low, int high) noexcept { return low + below(static_cast<std::size_t>(high - low + 1)); }
  /// once in n times
  bool one_in(int n) noexcept { return below(static_cast<std::size_t>(n)) == 0; }
  template <class List>
  auto any(const List& list) noexcept {
    return *(std::begin(list) + below(std::size(list)));
  }

 private:
  std::uint64_t state_;
};

/// How a program ends if its struck call differs from the calls of the others, or is left out: which ranks
/// notice it then.
enum class Ending : std::uint8_t {
  barriers,  ///< by barriers
  leave,     ///< by leave(), behind the struck call
  destroy,   ///< its groups are destroyed, behind the struck call: a warning is all that there is
};
inline constexpr int kEndings = 3;
std::string_view name(Ending ending) noexcept;

/// How a group is made. The ranks are numbered as in the program, and listed in the order of the group's
/// numbering.
struct GroupPlan {
  enum class How : std::uint8_t { world, subgroup, split, duplicate };
  How how = How::world;
  int parent = 0;
  int before = 0;       ///< made before this step, when its ranks have nothing in flight
  bool joined = false;  ///< split: another color of the split before it in the list
  std::vector<int> ranks;
};

/// The kind of a step.
enum class Does : std::uint8_t {
  call,       ///< Step::op
  window,     ///< exchanges of windows: WindowPlan
  agreement,  ///< something in which all ranks give a value alike: Step::value
  overlap,    ///< submits calls together whose memory overlaps, which every rank must refuse: Step::overlap
  gradients,  ///< steps of a training: GradientPlan
};
inline constexpr int kDoes = 5;
#ifdef WEFT_HAVE_CHECKPOINT
inline constexpr int kDoesHere = kDoes;  ///< that this build has
#else
inline constexpr int kDoesHere = 4;    ///< without the layers dp and checkpoint
#endif
std::string_view name(Does does) noexcept;

/// A tensor whose rows are sharded over the ranks of the step's group. Rank r has Step::counts[r] rows of
/// Step::count elements. Each rank fetches its own rows and some neighbouring ones.
struct WindowPlan {
  int before = 0, after = 0;  ///< rows fetched in addition to a rank's own
  int edge = 1;               ///< Edge::Kind: zero, periodic, reflect or replicate
  int exchanges = 1;          ///< started one after the other, each of memory of its own
  int fields = 1;             ///< of each exchange
  bool newest_first = false;  ///< the last one started is finished first
  bool adjoint = false;       ///< each rank gives a gradient of its window, and gets that of its rows
  bool together = false;      ///< all exchanges as one, each of a Window of its own: start_together()
  bool by_plan = false;       ///< by make_exchange(), not a Window; a row is a box or indices
  bool same_geometry(const WindowPlan& other) const {
    return before == other.before && after == other.after && edge == other.edge;
  }
};

/// Tensors that every rank of the step's group has, in the order of Step::counts: the number of elements of
/// each, or of rows if the tensors are sharded.
struct GradientPlan {
  bool cut = false;  ///< each rank keeps a part of each tensor: ShardedParameters; otherwise BucketReducer
  /// Neither of both: reduce_gradients() of gradients that lie over a mesh of two axes in several ways.
  bool at_once = false;
  int rounds =
      1;  ///< of one reducer: values that are gathered (ShardedParameters), gradients that are reduced
  std::int64_t bytes = 1;  ///< BucketOptions::bucket_bytes or ShardedParametersOptions::alone_bytes
};

/// The arguments that must be equal on all ranks of a step.
enum class Value : std::uint8_t {
  edge,      ///< of a window
  full,      ///< the layout of a tensor that full() gathers
  mesh,      ///< the axes of a mesh
  max_norm,  ///< of clip_grad_norm()
  saved,     ///< the step of save_checkpoint()
  loaded,    ///< the directory of load_checkpoint(), where checkpoints of two steps are
};
inline constexpr int kValues = 6;
#ifdef WEFT_HAVE_CHECKPOINT
inline constexpr int kValuesHere = kValues;  ///< that this build has
#else
inline constexpr int kValuesHere = 3;  ///< without the layers dp and checkpoint
#endif
std::string_view name(Value value) noexcept;

/// Calls that overlap.
enum class Overlap : std::uint8_t {
  send_recv,       ///< the same memory is sent and received into
  send_recv_part,  ///< a part of it
  twice,           ///< two reductions in place of the same memory
  read_written,    ///< one call reads memory that another one writes
};
inline constexpr int kOverlaps = 4;
std::string_view name(Overlap overlap) noexcept;

/// One operation of one group. `Op::send` is a message from rank `root` to rank `peer`. `Op::recv` stands for
/// a ring: every rank sends to the rank `peer` further on and receives from the rank `peer` further back.
struct Step {
  int group = 0;
  Does does = Does::call;
  Op op = Op::barrier;  ///< none: not a call
  DType dtype = DType::f32;
  ReduceOp::Kind reduce = ReduceOp::Kind::sum;
  double scale = 1;
  Order order = Order::native;
  int root = 0;
  int peer = 0;
  int tag = 0;
  std::int64_t count = 0;  ///< of each block, if the blocks are equal
  std::vector<std::int64_t>
      counts;  ///< v-forms: per rank; all_to_all_v: per (from, to); see WindowPlan and GradientPlan
  bool coalesced = false;  ///< submitted together with the next step, which is of the same group
  bool plain = false;      ///< ordinary memory, no gaps, not in place
  /// How often the call is made, each time after the previous one has ended. It is more than once only for a
  /// collective alone, if no rank is struck.
  int starts = 1;
  bool shared = false;     ///< memory that peers map, on every rank
  std::uint64_t salt = 0;  ///< the origin of its data and of each rank's habits
  WindowPlan window;
  GradientPlan gradients;
  Value value = Value::edge;
  /// This rank passes another value, list or option than the others: see FaultRow::distort.
  bool differs = false;
  Overlap overlap = Overlap::send_recv;

  /// The number of elements in the block that rank `from` passes for rank `to`, in a group of n.
  std::int64_t elements(int from, int to, int n) const;
  bool in_parted() const;   ///< `in` has a block for each rank
  bool out_parted() const;  ///< `out` has a block from each rank
  bool reduces() const;
  /// The number of ranks, from 0 on, whose combination rank `me` of `n` gets.
  int combined_ranks(int me, int n) const;
  bool is_for_everybody() const;  ///< every rank gives something, and gets something of every other
  bool is_rooted() const;
  /// Returns whether this is a window in which every rank has rows and exchanges some with a neighbouring
  /// rank.
  bool reaches_neighbours() const;
};

enum class FaultKind : std::uint8_t {
  none,
  kill,         ///< SIGKILL
  stop,         ///< SIGSTOP, for good
  stop_resume,  ///< SIGSTOP; SIGCONT when the others have failed and used their memory for something else
  pause,        ///< SIGSTOP, then SIGCONT early enough for all deadlines
  exit,         ///< _exit(0)
  delay,        ///< comes late, but in time
  late,         ///< comes after the deadline
  wrong_count,
  wrong_dtype,
  wrong_op,
  wrong_root,
  wrong_order,  ///< two calls swapped
  skip,         ///< a call left out
  abort,        ///< calls abort()
  leave,        ///< destroys its groups
  drop,         ///< drops the Work of a call in flight
  descriptors,  ///< no more descriptors to be had
  memory,       ///< little address space left
  fork,         ///< a child that tries to use the group
  suspend,      ///< SIGSTOP to all ranks, for longer than the deadline; then SIGCONT to all
  disagree,     ///< gives another value than the others
  interrupt,    ///< an Interrupt is raised while it asks done()
};
inline constexpr int kFaultKinds = 23;
inline constexpr int kMostRanks = 8;
inline constexpr int kMostStarts = 4;
std::string_view name(FaultKind kind) noexcept;

/// The point of a call at which a fault strikes.
enum class FaultPoint : std::uint8_t {
  before_post,
  after_post,
  in_chunk,        ///< with peers' memory in hand, in the middle of a copy
  while_waiting,   ///< in the middle of wait(), by a signal
  before_quiesce,  ///< after the rank itself has seen a call fail
  in_creation,     ///< while it makes a group before that step, at one of its requests to the store
};
inline constexpr int kFaultPoints = 6;
std::string_view name(FaultPoint point) noexcept;

struct Fault {
  FaultKind kind = FaultKind::none;
  FaultPoint point = FaultPoint::before_post;
  int rank = 0;
  int step = 0;
};

struct Program {
  std::uint64_t seed = 0;
  std::uint64_t index = 0;
  std::vector<int> homes;  ///< per rank: the process of which it is a thread; processes have numbers from 0
                           ///< on
  std::vector<GroupPlan> groups;
  std::vector<Step> steps;
  int in_flight = 1;        ///< calls that a rank may leave unwaited for
  bool helper = false;      ///< Progress::thread
  std::string path;         ///< the forced path of shm; empty: its own choice
  bool heartbeats = false;  ///< see heartbeat_ranks()
  /// Both flags are set only with shares_block() (faults/strike.hpp). The group of the ranks that are not
  /// struck exchanges windows meanwhile, instead of an all_reduce. The failed groups are ended instead of
  /// quiesced.
  bool window_beside = false, ends = false;
  Ending ending = Ending::barriers;
  Fault fault;

  int ranks() const { return static_cast<int>(homes.size()); }
  int processes() const;
  /// The rank's number in a group; -1 if it is no member.
  int rank_in(int group, int rank) const;
  int group_size(int group) const {
    return static_cast<int>(groups[static_cast<std::size_t>(group)].ranks.size());
  }
  /// Two ranks whose second threads exchange small messages in the group of all ranks while a third rank is
  /// struck. This traffic must not hide that the third rank is stuck. Empty: the program has no such
  /// messages.
  std::vector<int> heartbeat_ranks() const;
  /// The group in whose making a rank is struck, if the point is in_creation. -1: none.
  int struck_group() const;
  /// Returns whether the group has steps that are not calls, so that the numbers of its calls are unknown.
  bool has_more_than_calls(int group) const;
  /// Returns whether the step may have several starts.
  bool may_be_repeated(int step) const;
  /// Returns whether the rank has a part in the step.
  bool takes_part(int step, int rank) const;
};

/// The number of elements in a row of a sharded tensor (GradientPlan).
inline constexpr int kMostColumns = 5;
/// Returns whether windows of that dtype have an adjoint.
constexpr bool has_adjoint(DType dtype) noexcept {
  return dtype != DType::boolean && dtype != DType::f8e4m3 && dtype != DType::f8e5m2 && dtype != DType::c64 &&
         dtype != DType::c128;
}

inline constexpr Op kForEverybody[] = {
    Op::all_reduce, Op::all_gather,   Op::all_gather_v, Op::reduce_scatter, Op::reduce_scatter_v,
    Op::all_to_all, Op::all_to_all_v, Op::scan,         Op::exscan};
inline constexpr Op kRooted[] = {Op::reduce, Op::broadcast, Op::gather, Op::scatter};
/// Returns whether each block of the operation has its own count.
constexpr bool has_counts(Op op) noexcept {
  return op == Op::all_gather_v || op == Op::reduce_scatter_v || op == Op::all_to_all_v;
}

/// The choices from which programs are drawn.
struct Range {
  std::string backend = "shm";
  Traits traits;
  std::vector<int> ranks{2, 3, 4, 5};
  bool threads = true;    ///< ranks may be threads
  bool processes = true;  ///< ranks may be processes
  bool job = false;       ///< ranks are the processes of an mpirun
  bool faults = false;
  std::vector<FaultKind>
      kinds;  ///< only these; empty: all kinds about which the backend's guarantees say something
  std::vector<FaultPoint> points;  ///< only at these points, if a fault is possible there; empty: anywhere
  std::int64_t most = 70001;       ///< elements of the largest blocks
  std::vector<Does>
      steps;  ///< every program has some of these; empty: half of them have some of all steps that are no
              ///< calls
};

/// Returns program `index` of `seed`: a function of both and of `range`, equal on every machine.
Program draw(std::uint64_t seed, std::uint64_t index, const Range& range);

/// Makes a program runnable after steps were added or left out: calls are submitted together only with
/// adjacent calls of their group, and no group is made in between.
void settle(Program& program);

/// Text for people, one line per step.
std::string describe(const Program& program);
std::string describe(const Program& program, int step);
std::string describe(const Fault& fault);

/// Converts a program to text for a file, and back. decode() throws bad_argument if the text is no program
/// that can be run. Every number must be in range, and its groups, steps and fault must fit each other.
std::string encode(const Program& program);
Program decode(const std::string& text);

}  // namespace weft::check
