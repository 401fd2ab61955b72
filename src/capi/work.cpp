// Works in C.
#include <algorithm>

#include "base/errors/caught.hpp"
#include "capi/call_handles.hpp"
#include "capi/call_out.hpp"

using weft::Error;
using weft::ErrorCode;
namespace capi = weft::capi;

namespace {

// Queries a Work. True: its calls have ended. The handle keeps its final answer, and gives it again at every
// query.
template <class Ask>
bool ask(const char* function, weft_work& work, const Ask& ask) {
  if (work.failure) throw Error(*work.failure);
  try {
    const bool done = ask(work.work);
    if (done && !work.reductions.empty()) {
      capi::check_reductions(function, work.group->group, work.reductions);
      work.reductions.clear();  // what later calls do to them is not this Work's
    }
    return done;
  } catch (const Error& e) {
    if (!work.work.valid()) work.failure = e;
    throw;
  }
}

bool wait(weft::Work& work) {
  work.wait();
  return true;
}

// Queries each Work of a list. The first error is thrown after all of them.
template <class Ask>
bool ask_all(const char* function, weft_work* const* works, std::size_t count, const Ask& ask_one) {
  if (count > 0) capi::given(function, works, "works");
  for (std::size_t k = 0; k < count; ++k)
    if (!capi::is_alive(works[k], weft_work::kKind)) [[unlikely]]
      capi::given(function, works[k], fmt::format("works[{}]", k).c_str());
  bool all = true;
  std::optional<Error> first;
  for (std::size_t k = 0; k < count; ++k) {
    try {
      all &= ask(function, *works[k], ask_one);
    } catch (const Error& e) {
      if (!first) first = e;
    }
  }
  if (first) throw Error(*std::move(first));
  return all;
}

// Calls a weft_work_callback. An exception of it is the error of the Work that it was given to.
void call_back(weft_work_callback callback, void* data, const capi::Reductions& reductions,
               const Error* error) {
  const capi::CallOut out;
  if (!out) return;
  const weft_error initial = WEFT_ERROR_INIT;
  weft_error told = initial;
  std::optional<Error> thrown;
  for (const auto& r : reductions)
    if (error == nullptr && r->threw())
      error = &thrown.emplace(ErrorCode::system, "weft_work_then: " + r->text());
  if (error != nullptr) capi::tell(&told, *error);
  try {
    callback(data, error != nullptr ? &told : nullptr);
  } catch (...) {
    throw Error(ErrorCode::system, "weft_work_then: the callback threw: " + weft::caught_words());
  }
}

}  // namespace

weft_status weft_work_wait(weft_work* work, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    ask(function, capi::given(function, work, "work"), wait);
  });
}

weft_status weft_work_wait_for(weft_work* work, int64_t limit_ns, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    bool& to = capi::given(function, done, "done");
    const weft::Duration limit = capi::limit(function, limit_ns, "limit_ns");
    to = ask(function, asked, [&](weft::Work& w) { return w.wait_for(limit); });
  });
}

weft_status weft_work_done(weft_work* work, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    bool& to = capi::given(function, done, "done");
    to = ask(function, asked, [&](weft::Work& w) { return w.done(); });
  });
}

weft_status weft_work_wait_all(weft_work* const* works, size_t count, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] { ask_all(function, works, count, wait); });
}

weft_status weft_work_wait_all_for(weft_work* const* works, size_t count, int64_t limit_ns, bool* done,
                                   weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Duration limit = capi::limit(function, limit_ns, "limit_ns");
    bool& to = capi::given(function, done, "done");
    const weft::Deadline deadline = weft::Deadline::after(limit);
    to = ask_all(function, works, count, [&](weft::Work& w) { return w.wait_for(deadline.left()); });
  });
}

weft_status weft_work_wait_on(weft_work* work, weft_stream stream, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    const weft::Stream s = capi::stream_of(function, stream, "stream");
    ask(function, asked, [&](weft::Work& w) {
      w.wait_on(s);
      return !w.valid();  // a transport of streams leaves it pending
    });
  });
}

weft_status weft_work_then(weft_work* work, weft_work_callback callback, void* data, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_work& asked = capi::given(function, work, "work");
    if (callback == nullptr) capi::refuse(ErrorCode::bad_argument, function, "callback is NULL");
    if (asked.failure) return call_back(callback, data, {}, &*asked.failure);
    asked.work.then([callback, data, reductions = asked.reductions](const Error* e) {
      call_back(callback, data, reductions, e);
    });
  });
}

weft_status weft_work_source(weft_work* work, int32_t* source, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_work& asked = capi::given(function, work, "work");
    int32_t& to = capi::given(function, source, "source");
    to = asked.work.source();
  });
}

weft_status weft_work_sources(weft_work* work, int32_t* sources, size_t room, size_t* count,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft_work& asked = capi::given(function, work, "work");
    if (room > 0) capi::given(function, sources, "sources");
    std::size_t& number = capi::given(function, count, "count");
    const std::vector<int> ranks = asked.work.sources();
    number = ranks.size();
    if (room < number)
      capi::refuse(ErrorCode::bad_argument, function,
                   fmt::format("room is {}; expected at least {}", room, number));
    std::copy(ranks.begin(), ranks.end(), sources);
  });
}

void weft_work_destroy(weft_work* work) { capi::destroy(__func__, work, "work"); }
