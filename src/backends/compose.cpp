// A composed call is a few inner steps, each posted when the one before is over and the local work between
// them is done:
//
//   same       the inner backend's own operation, numbered anew
//   exchange   one exchange; the rank's own block is copied here
//   reduce     exchange (everybody's part of my slice comes to me), combine; then, where others need the
//              result, exchange (my slice goes to them)
//   average    the inner backend's sum, then divide here
//
// Blocks with no elements are not sent. Only the owner of the group comes here, but for fail(), failure(),
// quiet(), quiesce() and announce_sleep().
#include "backends/compose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <atomic>
#include <charconv>
#include <cstring>
#include <deque>

#include "backends/call_numbers.hpp"
#include "base/hash.hpp"
#include "base/mutant.hpp"
#include "host/local_memory.hpp"
#include "reduce/reduce.hpp"
#include "weft/backends/call_record.hpp"
#include "weft/backends/op_table.hpp"
#include "weft/base/chunk.hpp"
#include "weft/base/name_ranks.hpp"

namespace weft {
namespace {

constexpr std::int64_t kChunkBytes = 256 << 10;  // local work of one poll
constexpr std::uint64_t kUsers =
    kUsersCall;                             // in what the inner backend is told; unmarked numbers are its own
constexpr std::uint64_t kRemembered = 256;  // calls whose names failures may ask for: more than a ring

bool exchanges(const Traits& t) noexcept {
  return t.has(Op::all_to_all_v) || (t.has(Op::send) && t.has(Op::recv));
}

// avg = the inner backend's sum, divided here: where that gives avg's own rounding. 16-bit floats would be
// rounded before the division.
bool divides_after(const Traits& t, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept {
  switch (dtype) {
    case DType::f64:
    case DType::f32:
    case DType::i8:
    case DType::i16:
    case DType::i32:
    case DType::i64:
    case DType::u8:
    case DType::u16:
    case DType::u32:
    case DType::u64: break;
    case DType::f16:
    case DType::bf16:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return false;
  }
  return kind == ReduceOp::Kind::avg &&
         op_support(t, op, dtype, ReduceOp::Kind::sum, order) == OpSupport::native;
}

// Slice r of `count` elements divided evenly.
Block slice(std::int64_t count, int r, int n) noexcept {
  const Chunk chunk = chunk_of(count, n, r);
  return {chunk.offset, chunk.size};
}

template <class T>
void divide_as(std::byte* data, std::int64_t count, int n) noexcept {
  using Wide = std::conditional_t<std::is_floating_point_v<T>, T,
                                  std::conditional_t<std::is_signed_v<T>, std::int64_t, std::uint64_t>>;
  T* const x = reinterpret_cast<T*>(data);
  for (std::int64_t i = 0; i < count; ++i)
    x[i] = static_cast<T>(static_cast<Wide>(x[i]) / static_cast<Wide>(n));
}

void divide(DType dtype, std::byte* data, std::int64_t count, int n) noexcept {
  switch (dtype) {
    case DType::f64: return divide_as<double>(data, count, n);
    case DType::f32: return divide_as<float>(data, count, n);
    case DType::i8: return divide_as<std::int8_t>(data, count, n);
    case DType::i16: return divide_as<std::int16_t>(data, count, n);
    case DType::i32: return divide_as<std::int32_t>(data, count, n);
    case DType::i64: return divide_as<std::int64_t>(data, count, n);
    case DType::u8: return divide_as<std::uint8_t>(data, count, n);
    case DType::u16: return divide_as<std::uint16_t>(data, count, n);
    case DType::u32: return divide_as<std::uint32_t>(data, count, n);
    case DType::u64: return divide_as<std::uint64_t>(data, count, n);
    case DType::f16:
    case DType::bf16:
    case DType::boolean:
    case DType::f8e4m3:
    case DType::f8e5m2:
    case DType::c64:
    case DType::c128: return;  // see divides_after()
  }
}

// What all ranks must have called alike for an exchange to be of one call: a tag that tells others apart.
// Without it, ranks that ask for different reductions would exchange happily and get different results.
int exchange_tag(const OpState& s, int size, std::uint64_t number, bool messages) noexcept {
  CallRecord r = record_of(s, size);
  if (messages) r.count = 0;  // each receiver compares its own
  Fnv1a hash;
  for (const std::int64_t x : {static_cast<std::int64_t>(r.op), static_cast<std::int64_t>(r.dtype),
                               static_cast<std::int64_t>(r.reduce), static_cast<std::int64_t>(r.order),
                               static_cast<std::int64_t>(r.root), r.count})
    hash.add(static_cast<std::uint64_t>(x));
  hash.add(r.hash);
  return -1 - static_cast<int>(((hash.value ^ hash.value >> 32) + number) % kComposedTags);
}

enum class Plan : std::uint8_t { same, exchange, reduce, average };

// Buffers of one exchange: block r of `to`, in `in`, goes to rank r; block r of `from`, in `out`, comes from
// it.
struct Exchange {
  const std::byte* in = nullptr;
  std::byte* out = nullptr;
  std::int64_t in_count = 0, out_count = 0;
  std::vector<Block> to, from;
};

// What is to be done here once a step's communication is over, chunk by chunk: elements [done, total).
struct LocalWork {
  std::int64_t done = 0, total = 0;
};

// A collective of the user's in flight. Reused; its vectors keep their room.
struct Composed {
  explicit Composed(int size)
      : inner(static_cast<std::size_t>(2 * size)),
        done(static_cast<std::size_t>(2 * size)),
        ins(static_cast<std::size_t>(size)),
        exchange{.to = std::vector<Block>(static_cast<std::size_t>(size)),
                 .from = std::vector<Block>(static_cast<std::size_t>(size))} {}

  OpState* user = nullptr;
  Plan plan = Plan::same;
  int posted = 0, steps = 1;  // inner steps
  // The inner calls of the current step; the first `count`, of which `open` are not done.
  std::vector<OpState> inner;  // a step has at most 2n; never moves
  std::vector<bool> done;
  int count = 0, open = 0;
  LocalWork copy;  // of the own block, in bytes
  const std::byte* copy_from = nullptr;
  std::byte* copy_to = nullptr;
  LocalWork work;     // combine or divide, in elements
  Block mine;         // reduce: my slice of `in`
  std::byte* result;  // reduce with a second exchange: my slice, combined
  std::vector<const std::byte*> ins;
  std::array<std::byte*, 2> outs{};
  std::size_t outs_count = 0;
  Exchange exchange;
  std::byte* scratch = nullptr;
  std::size_t scratch_bytes = 0;
};

class Composer final : public Backend {
 public:
  Composer(std::unique_ptr<Backend> inner, int rank, int size)
      : rank_(rank), size_(size), inner_(std::move(inner)), traits_(inner_->traits()) {}
  ~Composer() override;

  const Traits& traits() const noexcept override { return traits_; }
  void post(OpState& s) noexcept override;
  Step poll(OpState& s) noexcept override;
  bool healthy() noexcept override { return inner_->healthy(); }
  std::vector<int> missing(const OpState& s, std::string& story) noexcept override;
  bool ask(const OpState& s) noexcept override;
  void answer() noexcept override { inner_->answer(); }
  void fail(const Failure& why) noexcept override;
  Failure failure() const override;
  bool quiet() const noexcept override { return inner_->quiet(); }
  bool quiesce(Deadline deadline, std::span<const MemoryRange> exposed) noexcept override {
    const bool reached = inner_->quiesce(deadline, exposed);
    if (reached) quiesced_.store(true, std::memory_order_release);
    return reached;
  }
  void announce_sleep(bool asleep) noexcept override { inner_->announce_sleep(asleep); }
  void batch(bool begin) noexcept override {
    batching_ = begin;
    inner_->batch(begin);
  }
  bool wait_on(OpState& s, void* stream) noexcept override;
  void check_stream(void* stream, bool calls) override { inner_->check_stream(stream, calls); }
  std::vector<int> gone() const noexcept override { return inner_->gone(); }

 private:
  static Composed*& of(OpState& s) noexcept { return *reinterpret_cast<Composed**>(s.scratch.data()); }
  static const Composed* of(const OpState& s) noexcept {
    const Composed* c = nullptr;
    std::memcpy(&c, s.scratch.data(), sizeof(c));
    return c;
  }
  void plan(Composed& c, OpState& s);
  void plan_reduce(Composed& c);
  void allot(Composed& c, std::int64_t bytes);
  void start(Composed& c) noexcept;
  void start_queued() noexcept;
  void post_step(Composed& c) noexcept;
  void post_exchange(Composed& c) noexcept;
  void post_collective(Composed& c, OpState& inner) noexcept;
  void post_inner(Composed& c, OpState& inner) noexcept;
  static OpState& next_inner(Composed& c) noexcept { return c.inner[static_cast<std::size_t>(c.count++)]; }
  Step poll(Composed& c) noexcept;
  bool work(Composed& c) noexcept;
  void spare(Composed& c) noexcept;
  std::uint64_t users_call(std::uint64_t inner) const noexcept {
    return users_call_[inner % kRemembered].load(std::memory_order_relaxed);
  }
  Op users_op(std::uint64_t call) const noexcept {
    return users_op_[call % kRemembered].load(std::memory_order_relaxed);
  }
  std::string users_words(std::string text, Op inner, Op users) const;

  const int rank_, size_;
  // In this order: the inner backend goes first, and no longer holds what the calls exposed to it.
  LocalMemory memory_;
  std::vector<std::unique_ptr<Composed>> calls_;  // all that were ever made
  std::vector<Composed*> spare_;
  std::unique_ptr<Backend> inner_;
  const Traits traits_;
  std::deque<Composed*> queue_;     // collectives that are not started: an earlier one is not wholly posted
  Composed* unfinished_ = nullptr;  // that one
  std::uint64_t next_inner_ = 0;    // number of the next inner collective
  std::uint64_t next_exchange_ = 0;
  bool batching_ = false;
  std::atomic<bool> quiesced_{false};
  // For texts: the user's number of an inner collective, and what the user's call of a number was.
  std::array<std::atomic<std::uint64_t>, kRemembered> users_call_{};
  std::array<std::atomic<Op>, kRemembered> users_op_{};
};

// Calls that are still in flight here have failed.
Composer::~Composer() {
  if (spare_.size() < calls_.size() && !quiesced_.load(std::memory_order_acquire) && !inner_->quiet()) {
    for (auto& c : calls_) (void)c.release();  // a peer may still write there: never given to anybody else
    return;
  }
  inner_.reset();
  for (const auto& c : calls_)
    if (c->scratch != nullptr) memory_.release(c->scratch, c->scratch_bytes);
}

// ---- Planning

void Composer::allot(Composed& c, std::int64_t bytes) {
  c.scratch_bytes = static_cast<std::size_t>(bytes);
  c.scratch = static_cast<std::byte*>(memory_.allocate(c.scratch_bytes));
  if (c.scratch == nullptr) throw std::bad_alloc();
}

void Composer::plan(Composed& c, OpState& s) {
  const OpRow r = row(s.op);
  c.user = &s;
  c.posted = c.count = c.open = 0;
  c.steps = 1;
  c.copy = c.work = {};
  const bool native = op_support(traits_, s.op, s.dtype, s.reduce.kind, s.order) == OpSupport::native;
  c.plan = native                                                          ? Plan::same
           : !r.reduces                                                    ? Plan::exchange
           : divides_after(traits_, s.op, s.dtype, s.reduce.kind, s.order) ? Plan::average
                                                                           : Plan::reduce;
  switch (c.plan) {
    case Plan::same: return;
    case Plan::average: c.work.total = WEFT_MUTANT("composed_avg") ? 0 : s.out_count; return;
    case Plan::reduce: return plan_reduce(c);
    case Plan::exchange: break;
  }
  Exchange& x = c.exchange;
  const auto own = static_cast<std::size_t>(rank_);
  if (s.op == Op::barrier) {  // a byte from everybody
    allot(c, size_ + 1);
    std::memset(c.scratch, 0, c.scratch_bytes);
    x.in = c.scratch + size_;
    x.out = c.scratch;
    x.in_count = 1;
    x.out_count = size_;
    for (int p = 0; p < size_; ++p) {
      x.to[static_cast<std::size_t>(p)] = {0, p != rank_};
      x.from[static_cast<std::size_t>(p)] = {p, p != rank_};
    }
    return;
  }
  x.in = s.in;
  x.out = s.out;
  x.in_count = s.in_count;
  x.out_count = s.out_count;
  for (int p = 0; p < size_; ++p) {
    x.to[static_cast<std::size_t>(p)] = in_block(s, p, size_);
    x.from[static_cast<std::size_t>(p)] = out_block(s, p, size_);
  }
  if (x.to[own].count == 0) return;
  const std::int64_t element = size_bytes(s.dtype);
  const std::byte* const from = s.in + x.to[own].offset * element;
  std::byte* const to = s.out + x.from[own].offset * element;
  if (traits_.device && from != to) return;  // not memory of ours: the transport moves it
  if (from != to) {
    c.copy_from = from;
    c.copy_to = to;
    c.copy.total = WEFT_MUTANT("composed_own_block") ? 0 : x.to[own].count * element;
  }
  x.to[own].count = x.from[own].count = 0;
}

void Composer::plan_reduce(Composed& c) {
  const OpState& s = *c.user;
  Exchange& x = c.exchange;
  const bool sliced = row(s.op).counts == Counts::equal;  // the others need my result: all_reduce, reduce
  const auto own = static_cast<std::size_t>(rank_);
  const std::int64_t element = size_bytes(s.dtype);
  for (int p = 0; p < size_; ++p)
    x.to[static_cast<std::size_t>(p)] = sliced ? slice(s.in_count, p, size_) : in_block(s, p, size_);
  c.mine = x.to[own];
  x.to[own].count = 0;
  // Scratch: a row for each other rank, and one for the result.
  const std::int64_t bytes = c.mine.count * element;
  allot(c, bytes * size_);
  c.result = c.scratch + bytes * (size_ - 1);
  for (int p = 0; p < size_; ++p) {
    const int r = p < rank_ ? p : p - 1;
    x.from[static_cast<std::size_t>(p)] = p == rank_ ? Block{} : Block{r * c.mine.count, c.mine.count};
    c.ins[static_cast<std::size_t>(p)] = p == rank_ ? s.in + c.mine.offset * element : c.scratch + r * bytes;
  }
  if (WEFT_MUTANT("composed_order")) std::reverse(c.ins.begin(), c.ins.end());
  x.in = s.in;
  x.in_count = s.in_count;
  x.out = c.scratch;
  x.out_count = c.mine.count * (size_ - 1);
  c.outs_count = 0;
  if (sliced) {
    c.steps = 2;
    c.outs[c.outs_count++] = c.result;
    if (s.out != nullptr) c.outs[c.outs_count++] = s.out + c.mine.offset * element;
  } else {
    c.outs[c.outs_count++] = s.out;
  }
  c.work.total = c.mine.count;
}

// ---- Posting

void Composer::post(OpState& s) noexcept {
  if (!row(s.op).collective) {
    inner_->post(s);
    return;
  }
  users_op_[s.call % kRemembered].store(s.op, std::memory_order_relaxed);
  Composed*& slot = of(s);
  slot = nullptr;
  try {
    if (spare_.empty()) {
      spare_.reserve(calls_.size() + 1);
      calls_.push_back(std::make_unique<Composed>(size_));
      spare_.push_back(calls_.back().get());
    }
    Composed& c = *spare_.back();
    plan(c, s);
    if (unfinished_ != nullptr) queue_.push_back(&c);
    spare_.pop_back();
    slot = &c;
    if (unfinished_ == nullptr) start(c);
  } catch (const std::bad_alloc&) {
    inner_->fail({.code = ErrorCode::system,
                  .text = fmt::format("{}: out of memory", name(s.op)),
                  .op = s.op,
                  .call = s.call | kUsers,
                  .ranks = {rank_}});
  }
}

void Composer::start(Composed& c) noexcept {
  post_step(c);
  if (c.posted < c.steps) unfinished_ = &c;
}

void Composer::start_queued() noexcept {
  unfinished_ = nullptr;
  while (unfinished_ == nullptr && !queue_.empty()) {
    Composed& next = *queue_.front();
    queue_.pop_front();
    start(next);
  }
}

void Composer::post_step(Composed& c) noexcept {
  const OpState& s = *c.user;
  ++c.posted;
  c.count = c.open = 0;
  switch (c.plan) {
    case Plan::same:
    case Plan::average: {
      OpState& inner = next_inner(c);
      inner = s;
      if (c.plan == Plan::average) inner.reduce = ReduceOp::sum;
      post_collective(c, inner);
      return;
    }
    case Plan::exchange: return post_exchange(c);
    case Plan::reduce: break;
  }
  if (c.posted == 2) {  // my slice to those who have an `out`, theirs to me if I have
    Exchange& x = c.exchange;
    const bool all = s.op == Op::all_reduce;
    for (int p = 0; p < size_; ++p) {
      x.to[static_cast<std::size_t>(p)] = {0, p != rank_ && (all || p == s.root) ? c.mine.count : 0};
      x.from[static_cast<std::size_t>(p)] =
          p != rank_ && s.out != nullptr ? slice(s.out_count, p, size_) : Block{};
    }
    x.in = c.result;
    x.in_count = c.mine.count;
    x.out = s.out;
    x.out_count = s.out_count;
  }
  post_exchange(c);
}

void Composer::post_exchange(Composed& c) noexcept {
  const Exchange& x = c.exchange;
  const DType dtype = c.user->dtype;
  const int tag = exchange_tag(*c.user, size_, next_exchange_++, !traits_.has(Op::all_to_all_v));
  const auto fill = [&](Op op) -> OpState& {
    OpState& inner = next_inner(c);
    inner.op = op;
    inner.dtype = dtype;
    inner.reduce = {};
    inner.order = Order::native;
    inner.in = nullptr;
    inner.out = nullptr;
    inner.in_count = inner.out_count = 0;
    inner.root = inner.peer = -1;
    inner.tag = tag;
    inner.stream = c.user->stream;
    inner.in_blocks = inner.out_blocks = nullptr;
    return inner;
  };
  if (traits_.has(Op::all_to_all_v)) {
    OpState& inner = fill(Op::all_to_all_v);
    inner.in = x.in;
    inner.out = x.out;
    inner.in_count = x.in_count;
    inner.out_count = x.out_count;
    inner.in_blocks = x.to.data();
    inner.out_blocks = x.from.data();
    post_collective(c, inner);
    return;
  }
  const std::int64_t element = size_bytes(dtype);
  if (!batching_) inner_->batch(true);
  for (int k = 0; k < size_; ++k) {  // k = 0: itself
    const int from = (rank_ - k + size_) % size_, to = (rank_ + k) % size_;
    if (const Block b = x.from[static_cast<std::size_t>(from)]; b.count > 0) {
      OpState& inner = fill(Op::recv);
      inner.peer = from;
      inner.out = x.out + b.offset * element;
      inner.out_count = b.count;
      inner.call = c.user->call | kUsers;
      post_inner(c, inner);
    }
    if (const Block b = x.to[static_cast<std::size_t>(to)]; b.count > 0) {
      OpState& inner = fill(Op::send);
      inner.peer = to;
      inner.in = x.in + b.offset * element;
      inner.in_count = b.count;
      inner.call = c.user->call | kUsers;
      post_inner(c, inner);
    }
  }
  if (!batching_) inner_->batch(false);
}

void Composer::post_collective(Composed& c, OpState& inner) noexcept {
  inner.call = next_inner_++;
  inner.user = c.user;
  users_call_[inner.call % kRemembered].store(c.user->call, std::memory_order_relaxed);
  post_inner(c, inner);
}

void Composer::post_inner(Composed& c, OpState& inner) noexcept {
  ++c.open;
  c.done[static_cast<std::size_t>(&inner - c.inner.data())] = false;
  inner_->post(inner);
}

// ---- Polling

Step Composer::poll(OpState& s) noexcept {
  if (!row(s.op).collective) return inner_->poll(s);
  Composed* const c = of(s);
  return c == nullptr ? Step::failed : poll(*c);
}

Step Composer::poll(Composed& c) noexcept {
  if (c.posted == 0) return Step::pending;
  bool moved = false;
  for (int i = 0; c.open > 0 && i < c.count; ++i) {
    if (c.done[static_cast<std::size_t>(i)]) continue;
    switch (inner_->poll(c.inner[static_cast<std::size_t>(i)])) {
      case Step::pending: break;
      case Step::advanced: moved = true; break;
      case Step::failed: return Step::failed;
      case Step::done:
        c.done[static_cast<std::size_t>(i)] = true;
        --c.open;
        moved = true;
        break;
    }
  }
  if (c.copy.done < c.copy.total) {
    const std::int64_t bytes = std::min(kChunkBytes, c.copy.total - c.copy.done);
    copy_bytes(c.copy_to + c.copy.done, c.copy_from + c.copy.done, bytes);
    c.copy.done += bytes;
    if (c.open > 0 || c.copy.done < c.copy.total) return Step::advanced;
  }
  if (c.open > 0) return moved ? Step::advanced : Step::pending;
  if (!work(c)) return Step::advanced;
  if (c.posted < c.steps) {
    post_step(c);
    if (c.posted == c.steps) start_queued();
    return Step::advanced;
  }
  spare(c);
  return Step::done;
}

// One chunk of combining or dividing; true: there is no more.
bool Composer::work(Composed& c) noexcept {
  if (c.work.done == c.work.total) return true;
  const OpState& s = *c.user;
  const std::int64_t element = size_bytes(s.dtype);
  const std::int64_t count = std::min(kChunkBytes / element, c.work.total - c.work.done);
  const std::int64_t bytes = count * element;
  if (c.plan == Plan::average) {
    divide(s.dtype, s.out + c.work.done * element, count, size_);
  } else {
    reduce(s.dtype, s.reduce, c.ins, {c.outs.data(), c.outs_count}, count);
    for (const std::byte*& in : c.ins) in += bytes;
    for (std::byte*& out : c.outs) out += bytes;
  }
  c.work.done += count;
  return c.work.done == c.work.total;
}

void Composer::spare(Composed& c) noexcept {
  if (c.scratch != nullptr) memory_.release(c.scratch, c.scratch_bytes);
  c.scratch = nullptr;
  spare_.push_back(&c);  // has room: see post()
}

// A stream can wait for calls that leave nothing to do on the host.
bool Composer::wait_on(OpState& s, void* stream) noexcept {
  if (!row(s.op).collective) return inner_->wait_on(s, stream);
  Composed* const c = of(s);
  if (c == nullptr || c->posted < c->steps || c->work.total > 0 || c->copy.total > 0) return false;
  for (int i = 0; i < c->count; ++i)
    if (!c->done[static_cast<std::size_t>(i)] &&
        !inner_->wait_on(c->inner[static_cast<std::size_t>(i)], stream))
      return false;
  return true;
}

// ---- Words

// What the inner backend says of its own call, as the user knows it: the user's call numbers, and the user's
// operation where a text begins with the inner one.
std::string Composer::users_words(std::string text, Op inner, Op users) const {
  const std::string_view begins = name(inner);
  if (inner != users && users != Op::none && text.starts_with(begins))
    text.replace(0, begins.size(), name(users));
  return renumbered(std::move(text), [&](std::uint64_t number) {
    return number & kUsers ? number & ~kUsers : users_call(number);
  });
}

bool Composer::ask(const OpState& s) noexcept {
  if (!row(s.op).collective) return inner_->ask(s);
  const Composed* c = of(s);
  if (c != nullptr && c->posted == 0) c = unfinished_;
  bool known = true;
  for (int i = 0; c != nullptr && i < c->count; ++i)
    if (!c->done[static_cast<std::size_t>(i)] && !inner_->ask(c->inner[static_cast<std::size_t>(i)]))
      known = false;
  return known;
}

std::vector<int> Composer::missing(const OpState& s, std::string& story) noexcept {
  if (!row(s.op).collective) return inner_->missing(s, story);
  const Composed* c = of(s);
  if (c != nullptr && c->posted == 0) c = unfinished_;  // it waits in the queue
  if (c == nullptr) {
    story = "it was not started";
    return {};
  }
  const std::string before =
      c->user == &s ? "" : fmt::format("it comes after {} [call {}]: ", name(c->user->op), c->user->call);
  std::vector<int> ranks;
  for (int i = 0; i < c->count; ++i) {
    if (c->done[static_cast<std::size_t>(i)]) continue;
    const OpState& inner = c->inner[static_cast<std::size_t>(i)];
    const std::vector<int> these = inner_->missing(inner, story);
    ranks.insert(ranks.end(), these.begin(), these.end());
    if (c->plan == Plan::same || c->plan == Plan::average) {
      story = before + users_words(story, inner.op, c->user->op);
      return ranks;
    }
  }
  std::sort(ranks.begin(), ranks.end());
  ranks.erase(std::unique(ranks.begin(), ranks.end()), ranks.end());
  story = before + (ranks.empty()
                        ? "every rank is there"
                        : fmt::format("{} {} not done {} part (by {})", name_ranks(ranks),
                                      ranks.size() == 1 ? "has" : "have", ranks.size() == 1 ? "its" : "their",
                                      traits_.has(Op::all_to_all_v) ? "all_to_all_v" : "messages"));
  return ranks;
}

void Composer::fail(const Failure& why) noexcept {
  try {
    Failure marked = why;
    if (row(why.op).collective && why.call != kNoCall) marked.call |= kUsers;
    inner_->fail(marked);
  } catch (...) {  // out of memory
    inner_->fail(why);
  }
}

Failure Composer::failure() const {
  Failure f = inner_->failure();
  if (f.call == kNoCall) return f;
  const bool collective = row(f.op).collective;
  if (f.call & kUsers) {
    f.call &= ~kUsers;
    if (collective) {  // told by a group, or of what the ranks called: the user's words but for the marks
      f.text = unmarked(std::move(f.text));
      return f;
    }
    const Op users = users_op(f.call);  // a message of an exchange
    f.text = users_words(std::move(f.text), f.op, users);
    f.op = users;
  } else if (collective) {
    const std::uint64_t call = users_call(f.call);
    const Op users = users_op(call);
    f.text = users_words(std::move(f.text), f.op, users);
    f.op = users;
    f.call = call;
  }
  return f;
}

}  // namespace

OpSupport op_support(const Traits& t, Op op, DType dtype, ReduceOp::Kind kind, Order order) noexcept {
  const OpRow r = row(op);
  if (r.counts != Counts::none && !t.moves(dtype)) return OpSupport::unsupported;
  if (!r.reduces)
    return t.has(op)                      ? OpSupport::native
           : r.collective && exchanges(t) ? OpSupport::composed
                                          : OpSupport::unsupported;
  if (t.has(op) && t.reduces_itself(kind, dtype) && (order == Order::native || t.native_is_canonical))
    return OpSupport::native;
  return !t.device && can_reduce(dtype, kind) && exchanges(t) ? OpSupport::composed : OpSupport::unsupported;
}

bool needs_composition(const Traits& t) noexcept {
  for (int d = 0; d < kDTypeCount; ++d) {
    const auto dtype = static_cast<DType>(d);
    for (int o = 1; o < kOpCount; ++o) {
      const auto op = static_cast<Op>(o);
      for (int k = 0; k < (row(op).reduces ? kReduceKindCount : 1); ++k)
        for (const Order order : {Order::native, Order::canonical})
          if (op_support(t, op, dtype, static_cast<ReduceOp::Kind>(k), order) == OpSupport::composed)
            return true;
    }
  }
  return false;
}

std::unique_ptr<Backend> compose(std::unique_ptr<Backend> inner, int rank, int size) {
  return std::make_unique<Composer>(std::move(inner), rank, size);
}

}  // namespace weft
