// The functions that the fuzz target of calls gives weft: functions that do what they should, throw, fail, or
// return nonsense; the memory that is passed to them decides which. Any thread.
#pragma once

#include <atomic>
#include <condition_variable>
#include <deque>
#include <map>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "weft/weft.h"

namespace weft::fuzz::capi {

class World;

enum Mode { kGood = 0, kThrows, kFails, kRubbish, kCallsWeft };
inline constexpr int kModes = 5;

/// The streams of transports between the ranks of one input, which are threads.
struct Hub {
  struct Rings {
    std::map<std::pair<int, int>, std::deque<unsigned char>> bytes;  // by (from, to)
  };
  std::mutex mutex;
  std::map<std::string, std::shared_ptr<Rings>> rings;  // by token
  std::vector<std::shared_ptr<void>>
      channels;  // open or closed: where close() is left out they end with the input
};

/// The broadcasts of rank 0, in order.
struct Exchange {
  std::mutex mutex;
  std::condition_variable came;
  std::deque<std::string> told;
};

/// The data of callbacks: for one rank and one mode, and valid while its input runs.
struct CallbackState {
  Mode mode = kGood;
  int rank = 0;
  Hub* hub = nullptr;
  Exchange* exchange = nullptr;
  std::string renamed;
};
/// A callback of a Work, which must be called exactly once.
struct CallbackRecord {
  Mode mode = kGood;
  World* world = nullptr;
  std::thread::id thread{};
  std::atomic<int> calls{0};
  bool given = false;
};
/// A reduction, which must be released exactly once if it was made.
struct ReleaseRecord {
  Mode mode = kGood;
  std::atomic<int> releases{0};
  bool given = false, with_release = false;
};

using Log = void (*)(void*, weft_log_level, const char*);
using Allocate = void* (*)(void*, std::size_t, std::size_t);
using Deallocate = void (*)(void*, void*, std::size_t, std::size_t);
using Told = void (*)(void*, const char*);
using Release = void (*)(void*);
using Progress = void (*)(void*, std::int64_t, std::int64_t);
using MayLeave = bool (*)(void*, const char*);
using Whole = bool (*)(void*, const char*, const weft_buffer*);
using Rename = const char* (*)(void*, const char*);
using DTypeOf = weft_dtype (*)(void*, const char*, weft_dtype);
using Open = weft_status (*)(void*, const weft_channel_init*, void**, weft_error*);
using Bucket = weft_status (*)(void*, const weft_ready_bucket*, weft_error*);
using Write = weft_status (*)(void*, std::int32_t, const void*, std::size_t, std::size_t*, weft_error*);
using Read = weft_status (*)(void*, std::int32_t, void*, std::size_t, std::size_t*, weft_error*);

/// The function of that type; `name` selects one of several of a type.
Log callback_of(Log, const char* name);
Allocate callback_of(Allocate, const char* name);
Deallocate callback_of(Deallocate, const char* name);
Told callback_of(Told, const char* name);
Release callback_of(Release, const char* name);
Progress callback_of(Progress, const char* name);
MayLeave callback_of(MayLeave, const char* name);
Whole callback_of(Whole, const char* name);
Rename callback_of(Rename, const char* name);
DTypeOf callback_of(DTypeOf, const char* name);
Open callback_of(Open, const char* name);
Bucket callback_of(Bucket, const char* name);
Write callback_of(Write, const char* name);
Read callback_of(Read, const char* name);
weft_combine callback_of(weft_combine, const char* name);
weft_work_callback callback_of(weft_work_callback, const char* name);
weft_broadcast_fn callback_of(weft_broadcast_fn, const char* name);

}  // namespace weft::fuzz::capi
