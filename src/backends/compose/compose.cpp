// A composed call consists of a few inner steps. Each step is posted when the step before it and the local
// work between the two are done (see Plan). Blocks without elements are not sent.
#include "backends/compose/compose.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <new>

#include "backends/compose/composer.hpp"
#include "base/hash.hpp"
#include "reduce/reduce.hpp"
#include "reduce/scan.hpp"
#include "weft/backends/matching.hpp"
#include "weft/backends/op_table.hpp"

namespace weft {
namespace {

constexpr std::int64_t kChunkBytes = 256 << 10;  // bytes of local work in one poll
// the least such bytes of one input of a scan, which is combined into many prefixes
constexpr std::int64_t kLeastOfScan = 4 << 10;

// Returns a tag that is made of all values that must be equal in the calls of all ranks. Without this tag,
// ranks that call different reductions would still exchange their blocks, and get different results.
int exchange_tag(const OpState& s, int size, std::uint64_t number, bool messages) noexcept {
  CallRecord r = record_of(s, size);
  if (messages) r.count = 0;  // each receiver compares its own count
  const std::uint64_t hash =
      digest_of(static_cast<int>(r.op), static_cast<int>(r.dtype), static_cast<int>(r.reduce),
                static_cast<int>(r.order), r.root, r.count, r.hash);
  static_assert(kExchangeTag == -1);
  return -2 - static_cast<int>(((hash ^ hash >> 32) + number) % (kComposedTags - 1));
}

}  // namespace

// Calls that are still in flight here have failed.
Composer::~Composer() {
  if (!quiesced_.load(std::memory_order_acquire) && !inner_->quiet()) exchanges_.abandon();
  if (spare_.size() < calls_.size() && !quiesced_.load(std::memory_order_acquire) && !inner_->quiet()) {
    // a peer may still write to this memory, so it is never given to other code
    for (auto& c : calls_) (void)c.release();
    return;
  }
  inner_.reset();
  for (const auto& c : calls_)
    if (c->scratch != nullptr) memory_.release(c->scratch, c->scratch_bytes);
}

// ---- Posting

void Composer::post(OpState& s) noexcept {
  if (!row(s.op).collective) {
    if (exchanges(s)) return exchanges_.post(s, batching_);
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
    plan_call(c, s, traits_, rank_, size_, memory_);
    if (unfinished_ != nullptr) queue_.push_back(&c);
    spare_.pop_back();
    slot = &c;
    if (unfinished_ == nullptr) start(c);
  } catch (const std::bad_alloc&) {
    refuse(s, ErrorCode::system, fmt::format("{}: out of memory", name(s.op)));
  } catch (const Error& e) {
    refuse(s, e.code(), e.what());
  }
}

void Composer::refuse(const OpState& s, ErrorCode code, std::string text) noexcept {
  inner_->fail(
      {.code = code, .text = std::move(text), .op = s.op, .call = s.call | kUsersCall, .ranks = {rank_}});
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
  ++c.posted;
  c.count = c.open = 0;
  switch (c.plan) {
    case Plan::same: {
      OpState& inner = next_inner(c);
      inner = *c.user;
      post_collective(c, inner);
      return;
    }
    case Plan::exchange: return post_exchange(c);
    case Plan::reduce:
    case Plan::scan: break;
  }
  if (c.posted == 2) plan_results(c, rank_, size_);
  post_exchange(c);
}

void Composer::post_exchange(Composed& c) noexcept {
  const bool whole = traits_.has(Op::all_to_all_v);
  const int tag = exchange_tag(*c.user, size_, next_exchange_++, !whole);
  if (whole)
    post_all_to_all(c, tag);
  else
    post_messages(c, tag);
}

OpState& Composer::next_inner(Composed& c, Op op, int tag) noexcept {
  OpState& inner = next_inner(c);
  inner.op = op;
  inner.dtype = c.user->dtype;
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
}

void Composer::post_all_to_all(Composed& c, int tag) noexcept {
  const Exchange& x = c.exchange;
  OpState& inner = next_inner(c, Op::all_to_all_v, tag);
  inner.in = x.in;
  inner.out = x.out;
  inner.in_count = x.in_count;
  inner.out_count = x.out_count;
  inner.in_blocks = x.to.data();
  inner.out_blocks = x.from.data();
  post_collective(c, inner);
}

// In step k each rank sends to the k-th next rank and receives from the k-th previous rank, so that no rank
// is the first peer of all others.
void Composer::post_messages(Composed& c, int tag) noexcept {
  by_messages_ = true;
  const Exchange& x = c.exchange;
  const std::int64_t element = size_bytes(c.user->dtype);
  const auto post = [&](Op op, int peer, const BufferBlock& b) {
    if (b.count == 0) return;
    OpState& inner = next_inner(c, op, tag);
    inner.peer = peer;
    if (op == Op::send) {
      inner.in = x.in + b.offset * element;
      inner.in_count = b.count;
    } else {
      inner.out = x.out + b.offset * element;
      inner.out_count = b.count;
    }
    inner.call = c.user->call | kUsersCall;
    post_inner(c, inner);
  };
  if (!batching_) inner_->batch(true);
  for (int k = 0; k < size_; ++k) {  // k = 0: this rank itself
    const int from = (rank_ - k + size_) % size_, to = (rank_ + k) % size_;
    post(Op::recv, from, x.from[static_cast<std::size_t>(from)]);
    post(Op::send, to, x.to[static_cast<std::size_t>(to)]);
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
  if (!row(s.op).collective) return exchanges(s) ? exchanges_.poll(s) : inner_->poll(s);
  Composed* const c = of(s);
  return c == nullptr ? Step::failed : poll(*c);
}

Step Composer::poll(Composed& c) noexcept {
  if (c.posted == 0) return Step::pending;
  const Step inner = poll_inner(c);
  if (inner == Step::failed) return inner;
  if (copy(c) && (c.open > 0 || c.copy.done < c.copy.total)) return Step::advanced;
  if (c.open > 0) return inner;
  if (!work(c)) return Step::advanced;
  if (c.posted < c.steps) {
    post_step(c);
    if (c.posted == c.steps) start_queued();
    return Step::advanced;
  }
  spare(c);
  return Step::done;
}

// Polls the inner calls of the current step: pending, advanced or failed.
Step Composer::poll_inner(Composed& c) noexcept {
  Step all = Step::pending;
  for (int i = 0; c.open > 0 && i < c.count; ++i) {
    if (c.done[static_cast<std::size_t>(i)]) continue;
    switch (inner_->poll(c.inner[static_cast<std::size_t>(i)])) {
      case Step::pending: break;
      case Step::advanced: all = Step::advanced; break;
      case Step::failed: return Step::failed;
      case Step::done:
        c.done[static_cast<std::size_t>(i)] = true;
        --c.open;
        all = Step::advanced;
        break;
    }
  }
  return all;
}

// Copies one chunk of the rank's own block. Returns false if nothing was left to copy.
bool Composer::copy(Composed& c) noexcept {
  if (c.copy.done == c.copy.total) return false;
  const std::int64_t bytes = std::min(kChunkBytes, c.copy.total - c.copy.done);
  copy_bytes(c.copy_to + c.copy.done, c.copy_from + c.copy.done, bytes);
  c.copy.done += bytes;
  return true;
}

// Combines or fills one chunk. Returns true if no chunk is left.
bool Composer::work(Composed& c) noexcept {
  if (c.work.done == c.work.total) return true;
  const OpState& s = *c.user;
  const std::int64_t element = size_bytes(s.dtype);
  const std::int64_t chunk = c.plan == Plan::scan ? std::max(kChunkBytes / size_, kLeastOfScan) : kChunkBytes;
  const std::int64_t count = std::min(chunk / element, c.work.total - c.work.done);
  const std::int64_t bytes = count * element;
  if (c.plan == Plan::scan && c.posted == 2) {
    fill_identity(s.dtype, s.reduce.kind, s.out + c.work.done * element, count);
  } else if (c.plan == Plan::scan) {
    scan(s.dtype, s.reduce, s.op == Op::exscan, c.ins, c.prefixes, count);
    for (const std::byte*& in : c.ins) in += bytes;
    for (std::byte*& out : c.prefixes)
      if (out != nullptr) out += bytes;
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
  spare_.push_back(&c);  // there is room, see post()
}

// A stream can wait for a call only if the host has nothing left to do for the call.
bool Composer::wait_on(OpState& s, Stream stream) noexcept {
  if (exchanges(s)) return false;
  if (!row(s.op).collective) return inner_->wait_on(s, stream);
  Composed* const c = of(s);
  if (c == nullptr || c->posted < c->steps || c->work.total > 0 || c->copy.total > 0) return false;
  for (int i = 0; i < c->count; ++i)
    if (!c->done[static_cast<std::size_t>(i)] &&
        !inner_->wait_on(c->inner[static_cast<std::size_t>(i)], stream))
      return false;
  return true;
}

std::unique_ptr<Backend> compose(Context& context, std::unique_ptr<Backend> inner, int rank, int size) {
  return std::make_unique<Composer>(context, std::move(inner), rank, size);
}

}  // namespace weft
