#include "capi/callbacks.hpp"

#include <algorithm>
#include <chrono>
#include <cstdlib>
#include <cstring>
#include <new>
#include <stdexcept>
#include <utility>

#include "capi/call.hpp"

namespace weft::fuzz::capi {
namespace {

[[noreturn]] void throw_something(const void* which) {
  switch (reinterpret_cast<std::uintptr_t>(which) / 64 % 3) {
    case 0: throw std::runtime_error("thrown by a callback");
    case 1: throw std::bad_alloc();
    default: throw 42;
  }
}

void log(void* data, weft_log_level level, const char* line) {
  if (static_cast<CallbackState*>(data)->rank < 0 || level < WEFT_LOG_ERROR || level > WEFT_LOG_DEBUG ||
      line == nullptr)
    fail("log", "is called with nonsense");
}

void* allocate(void*, std::size_t bytes, std::size_t alignment) {
  return bytes > std::size_t{1} << 24
             ? nullptr
             : std::aligned_alloc(alignment, (bytes + alignment - 1) / alignment * alignment);
}
void deallocate(void*, void* memory, std::size_t, std::size_t) { std::free(memory); }

void told(void*, const char* text) {
  if (text == nullptr) fail("a callback", "is told nothing");
}

void release(void* data) {
  if (data == nullptr) return;
  ++static_cast<ReleaseRecord*>(data)->releases;
}

// Combines bytes: the larger one. It is associative.
void combine(void* data, const void* left, const void* right, void* out, std::int64_t count,
             weft_dtype dtype) {
  const Mode mode = data == nullptr ? kGood : static_cast<ReleaseRecord*>(data)->mode;
  if (mode == kThrows || mode == kFails) throw_something(data);
  const auto* a = static_cast<const unsigned char*>(left);
  const auto* b = static_cast<const unsigned char*>(right);
  auto* to = static_cast<unsigned char*>(out);
  for (std::int64_t i = 0; i < count * weft_dtype_size(dtype); ++i) to[i] = std::max(a[i], b[i]);
}

void done(void* data, const weft_error* error) {
  auto& record = *static_cast<CallbackRecord*>(data);
  if (error != nullptr && (error->code <= WEFT_OK || error->code > WEFT_SYSTEM || error->text[0] == '\0'))
    fail("a callback of a Work", "gets an error that says nothing");
  if (++record.calls != 1) fail("a callback of a Work", "is called a second time");
  if (record.mode == kCallsWeft && record.thread == std::this_thread::get_id()) {
    const auto groups = record.world->handles.find("weft_group");
    if (groups == record.world->handles.end() || groups->second.empty()) return;
    weft_call_options options = WEFT_CALL_OPTIONS_INIT;
    options.deadline_ns = 5 * kMs;
    weft_work* work = nullptr;
    if (weft_barrier(static_cast<weft_group*>(groups->second.front()), &options, &work, nullptr) == WEFT_OK) {
      bool ready = false;
      (void)weft_work_done(work, &ready, nullptr);
      record.world->adopt("weft_work", work);
    }
  }
  if (record.mode == kThrows) throw_something(data);
}

std::int32_t broadcast(void* data, void* bytes, std::size_t count) {
  auto& state = *static_cast<CallbackState*>(data);
  if (state.mode == kThrows) throw_something(data);
  if (state.mode == kFails) return -1;
  if (state.mode == kRubbish) {
    if (state.rank != 0) std::memset(bytes, 0xab, count);
    return 0;
  }
  Exchange& exchange = *state.exchange;
  std::unique_lock lock(exchange.mutex);
  if (state.rank == 0) {
    exchange.told.emplace_back(static_cast<const char*>(bytes), count);
    exchange.came.notify_all();
    return 0;
  }
  if (!exchange.came.wait_for(lock, std::chrono::nanoseconds(kDeadline),
                              [&] { return !exchange.told.empty(); }))
    return 1;
  std::memcpy(bytes, exchange.told.front().data(), std::min(count, exchange.told.front().size()));
  exchange.told.pop_front();
  return 0;
}

// A bucket's hook: uses all of its memory.
weft_status bucket(void* data, const weft_ready_bucket* ready, weft_error* error) {
  const Mode mode = static_cast<CallbackState*>(data)->mode;
  if (ready == nullptr || ready->member_count < 1 || ready->members == nullptr || ready->data.data == nullptr)
    fail("a hook of buckets", "gets no bucket");
  auto* const bytes = static_cast<unsigned char*>(ready->data.data);
  for (std::int64_t i = 0; i < ready->data.count * weft_dtype_size(ready->data.dtype); ++i) bytes[i] ^= 1u;
  if (mode == kThrows) throw_something(data);
  if (mode != kFails) return WEFT_OK;
  if (error != nullptr) std::strcpy(error->text, "the hook does not want to");
  return WEFT_SYSTEM;
}

void progress(void* data, std::int64_t bytes, std::int64_t all) {
  if (bytes < 0 || bytes > all) fail("progress", "is told of more bytes than there are");
  if (static_cast<CallbackState*>(data)->mode == kThrows) throw_something(data);
}

bool may_leave(void* data, const char* name) {
  const Mode mode = static_cast<CallbackState*>(data)->mode;
  if (std::strlen(name) == 0) fail("may_leave", "gets no name");
  if (mode == kThrows) throw_something(data);
  return mode == kGood;
}

// Reads all of the tensor, or writes it, if the callback is one that gives values.
bool see(void* data, const char* name, const weft_buffer* whole) {
  const Mode mode = static_cast<CallbackState*>(data)->mode;
  if (name == nullptr) fail("see", "gets no name");
  if (whole->count < 0 || (whole->data == nullptr && whole->count > 0)) fail("see", "gets no memory");
  if (mode == kThrows) throw_something(data);
  return mode != kFails;
}
bool give(void* data, const char* name, const weft_buffer* whole) {
  if (!see(data, name, whole)) return false;
  std::memset(whole->data, 0, static_cast<std::size_t>(whole->count));  // of one byte each at least
  return true;
}

const char* rename(void* data, const char* name) {
  auto& state = *static_cast<CallbackState*>(data);
  if (std::strlen(name) == 0) fail("rename", "gets no name");
  switch (state.mode) {
    case kGood: return name;
    case kThrows: throw_something(data);
    case kFails: return nullptr;
    case kRubbish: return "\xff\"one name for all";
    case kCallsWeft: break;
  }
  state.renamed = std::string("x.") + name;
  return state.renamed.c_str();
}

weft_dtype dtype_of(void* data, const char* name, weft_dtype stored) {
  const Mode mode = static_cast<CallbackState*>(data)->mode;
  if (std::strlen(name) == 0 || (stored != WEFT_F32 && stored != WEFT_BF16))
    fail("dtype", "is asked for a tensor that it has no say in");
  switch (mode) {
    case kGood: return WEFT_BF16;
    case kThrows: throw_something(data);
    case kFails: return WEFT_F64;
    case kRubbish: return 77;
    case kCallsWeft: break;
  }
  return weft_dtype_size(stored) == 4 ? WEFT_BF16 : WEFT_F32;
}

// ---- A transport ----

struct Channel {
  CallbackState* state;
  std::shared_ptr<Hub::Rings> rings;
  int rank, size, calls = 0;
  bool closed = false;
};

// A fault after some calls that went well: so that groups exist first.
constexpr int kCallsBefore = 12;

weft_status open(void* data, const weft_channel_init* init, void** channel, weft_error* error) {
  auto& state = *static_cast<CallbackState*>(data);
  if (init->struct_size != sizeof *init || init->rank < 0 || init->rank >= init->size || *init->token == '\0')
    fail("open", "is called with nonsense");
  if (state.mode == kFails && init->size % 2 == 0) {
    std::memset(error->text, 'x', WEFT_ERROR_TEXT);  // no zero
    return WEFT_TIMEOUT;
  }
  const std::lock_guard lock(state.hub->mutex);
  auto& rings = state.hub->rings[init->token];
  if (rings == nullptr) rings = std::make_shared<Hub::Rings>();
  const auto made = std::make_shared<Channel>(Channel{&state, rings, init->rank, init->size});
  state.hub->channels.push_back(made);
  *channel = made.get();
  return WEFT_OK;
}

// The fault of this call, if any.
bool goes_wrong(Channel& c, std::size_t most, std::size_t* moved, weft_status* status, weft_error* error) {
  if (c.state->mode == kGood || ++c.calls <= kCallsBefore) return false;
  switch (c.state->mode) {
    case kThrows: throw_something(&c);
    case kRubbish:
      *moved = most + 1;
      *status = c.calls % 2 != 0 ? WEFT_OK : 77;
      return true;
    case kFails:
      if (c.calls % 2 != 0) std::strcpy(error->text, "the wire was cut");
      *status = c.calls % 3 != 0 ? WEFT_PEER_LOST : WEFT_SYSTEM;
      return true;
    case kGood:
    case kCallsWeft: break;
  }
  return false;
}

weft_status write(void* channel, std::int32_t to, const void* bytes, std::size_t count, std::size_t* taken,
                  weft_error* error) {
  auto& c = *static_cast<Channel*>(channel);
  if (to < 0 || to >= c.size || to == c.rank) fail("write", "is called for a rank that is none");
  weft_status status = WEFT_OK;
  if (goes_wrong(c, count, taken, &status, error)) return status;
  const std::lock_guard lock(c.state->hub->mutex);
  auto& stream = c.rings->bytes[{c.rank, to}];
  const auto* from = static_cast<const unsigned char*>(bytes);
  // Takes only some bytes, like a socket that is nearly full.
  *taken = std::min<std::size_t>(count, c.state->mode == kCallsWeft ? 3 : 4096);
  stream.insert(stream.end(), from, from + *taken);
  return WEFT_OK;
}

weft_status read(void* channel, std::int32_t from, void* bytes, std::size_t count, std::size_t* got,
                 weft_error* error) {
  auto& c = *static_cast<Channel*>(channel);
  if (from < 0 || from >= c.size || from == c.rank) fail("read", "is called for a rank that is none");
  weft_status status = WEFT_OK;
  if (goes_wrong(c, count, got, &status, error)) return status;
  const std::lock_guard lock(c.state->hub->mutex);
  auto& stream = c.rings->bytes[{from, c.rank}];
  *got = std::min(count, stream.size());
  std::copy_n(stream.begin(), *got, static_cast<unsigned char*>(bytes));
  stream.erase(stream.begin(), stream.begin() + static_cast<std::ptrdiff_t>(*got));
  return WEFT_OK;
}

void close(void* channel) {
  auto& c = *static_cast<Channel*>(channel);
  if (std::exchange(c.closed, true)) fail("close", "is called a second time");
  c.rings.reset();  // nothing is called on it afterwards
}

}  // namespace

Log callback_of(Log, const char*) { return log; }
Allocate callback_of(Allocate, const char*) { return allocate; }
Deallocate callback_of(Deallocate, const char*) { return deallocate; }
Told callback_of(Told, const char*) { return told; }
Release callback_of(Release, const char* name) { return std::strcmp(name, "close") == 0 ? close : release; }
Progress callback_of(Progress, const char*) { return progress; }
MayLeave callback_of(MayLeave, const char*) { return may_leave; }
Whole callback_of(Whole, const char* name) { return std::strcmp(name, "give") == 0 ? give : see; }
Rename callback_of(Rename, const char*) { return rename; }
DTypeOf callback_of(DTypeOf, const char*) { return dtype_of; }
Open callback_of(Open, const char*) { return open; }
Bucket callback_of(Bucket, const char*) { return bucket; }
Write callback_of(Write, const char*) { return write; }
Read callback_of(Read, const char*) { return read; }
weft_combine callback_of(weft_combine, const char*) { return combine; }
weft_work_callback callback_of(weft_work_callback, const char*) { return done; }
weft_broadcast_fn callback_of(weft_broadcast_fn, const char*) { return broadcast; }

}  // namespace weft::fuzz::capi
