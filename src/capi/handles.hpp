// The types behind the handles of weft.h, and the wrapper around every function of weft.h, which turns exceptions
// into statuses and texts. A handle keeps what it needs alive, so handles may be destroyed in any order.
#pragma once

#include <fmt/format.h>

#include <cstring>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <unordered_map>
#include <utility>

#include "weft/base/error.hpp"
#include "weft/base/storage.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/weft.h"

namespace weft::capi {

struct ContextState {
  explicit ContextState(ContextOptions options) : context(std::move(options)) {}
  Context context;
  std::mutex mutex;
  std::unordered_map<void*, Storage> blocks;  // of weft_alloc, by address; guarded by mutex
};

struct GroupHandle {
  std::shared_ptr<ContextState> context;
  ProcessGroup group;  // destroyed before its Context
};

/// The call's outcome, into `error` where there is one; returns its status.
weft_status tell(weft_error* error, const Error& e) noexcept;
weft_status tell(weft_error* error, const char* function, const char* text) noexcept;
/// False: `error` is not made with WEFT_ERROR_INIT, so that nothing can be written to it.
bool usable(const weft_error* error) noexcept;

/// Runs the body of a function of weft.h. Nothing leaves it but a status.
template <class Body>
weft_status guarded(const char* function, weft_error* error, const Body& body) noexcept {
  if (!usable(error)) return WEFT_BAD_ARGUMENT;
  try {
    body();
    return WEFT_OK;
  } catch (const Error& e) {
    return tell(error, e);
  } catch (const std::bad_alloc&) {
    return tell(error, function, "out of memory");
  } catch (const std::exception& e) {
    return tell(error, function, e.what());
  } catch (...) {
    return tell(error, function, "an exception that is none of weft's");
  }
}

[[noreturn]] inline void refuse(ErrorCode code, const char* function, const std::string& text) {
  throw Error(code, fmt::format("{}: {}", function, text));
}

template <class T>
T& given(const char* function, T* pointer, const char* what) {
  if (pointer == nullptr) refuse(ErrorCode::bad_argument, function, fmt::format("{} is NULL", what));
  return *pointer;
}

/// A duration of at least zero.
inline Duration limit(const char* function, std::int64_t ns, const char* what) {
  if (ns < 0)
    refuse(ErrorCode::bad_argument, function, fmt::format("{} is {}; expected 0 or more", what, ns));
  return Duration(ns);
}

/// A struct as this library knows it. `initial` has the defaults: fields that an older program's struct lacks keep
/// them. Additional fields of a newer program's struct must be zero. A new field therefore goes to the end, behind the
/// size of before (not into padding), and zero is its default. `first_bytes`: the size in version 0.1.
template <class T>
T read(const char* function, const T* options, const T& initial, std::size_t first_bytes,
       const char* initialiser) {
  constexpr std::size_t kMost = 4096;  // more is memory that nobody initialised
  if (options == nullptr) return initial;
  const std::size_t bytes = options->struct_size;
  if (bytes < first_bytes || bytes > kMost)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("options->struct_size is {}; expected {}: initialise it with {}", bytes, sizeof(T),
                       initialiser));
  const auto* const from = reinterpret_cast<const unsigned char*>(options);
  for (std::size_t i = sizeof(T); i < bytes; ++i) {
    if (from[i] != 0)
      refuse(ErrorCode::unsupported, function,
             fmt::format("options has {} bytes with something set beyond the {} that weft {} knows", bytes,
                         sizeof(T), weft_version()));
  }
  T known = initial;
  std::memcpy(&known, from, bytes < sizeof(T) ? bytes : sizeof(T));
  return known;
}

}  // namespace weft::capi

struct weft_context {
  std::shared_ptr<weft::capi::ContextState> state;
};

struct weft_store {
  std::shared_ptr<weft::Store> store;
};

struct weft_group {
  std::shared_ptr<weft::capi::GroupHandle> handle;
};

struct weft_work {
  std::shared_ptr<weft::capi::GroupHandle> group;
  weft::Work work;
  std::optional<weft::Error> failure;  // a Work throws it once; the handle returns it whenever it is asked
};
