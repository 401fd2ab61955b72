// The types behind the handles of weft.h, and the wrapper around every function of weft.h, which turns
// exceptions into statuses and texts. A handle keeps what it needs alive, so handles may be destroyed in any
// order.
#pragma once

#include <fmt/format.h>

#include <atomic>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <new>
#include <optional>
#include <string>
#include <type_traits>
#include <unordered_map>
#include <utility>

#include "capi/handle/handle.hpp"
#include "weft/base/error.hpp"
#include "weft/base/storage.hpp"
#include "weft/group/process_group.hpp"
#include "weft/host/context.hpp"
#include "weft/store/tcp.hpp"
#include "weft/weft.h"

namespace weft::capi {

struct ContextState {
  explicit ContextState(ContextOptions options) : context(std::move(options)) {}
  Context context;
  std::mutex mutex;
  std::unordered_map<void*, Storage> blocks;  // of weft_alloc, by address; guarded by mutex
  std::map<std::string, std::unique_ptr<TcpStoreServer>> servers;  // of groups, by address; guarded by mutex
};

struct GroupHandle {
  GroupHandle(std::shared_ptr<ContextState> context_in, ProcessGroup&& group_in)
      : context(std::move(context_in)), own(std::move(group_in)), group(own), backend(group.backend()) {}
  /// A group that `owner_in` keeps, such as a mesh.
  GroupHandle(std::shared_ptr<ContextState> context_in, std::shared_ptr<const void> owner_in,
              ProcessGroup& group_in)
      : context(std::move(context_in)),
        owner(std::move(owner_in)),
        group(group_in),
        backend(group.backend()) {}
  GroupHandle(GroupHandle&& other) noexcept
      : context(std::move(other.context)),
        owner(std::move(other.owner)),
        own(std::move(other.own)),
        group(owner != nullptr ? other.group : own),
        backend(std::move(other.backend)) {}

  std::shared_ptr<ContextState> context;
  std::shared_ptr<const void> owner;  // null: the group is `own`
  ProcessGroup own;                   // destroyed before its Context
  ProcessGroup& group;
  std::string backend;                 // with a zero at its end
  std::atomic<bool> destroyed{false};  // the weft_group was destroyed; Works keep this object
};

/// Writes the call's outcome into `error` if there is one. Returns its status.
weft_status tell(weft_error* error, const Error& e) noexcept;
weft_status tell(weft_error* error, const char* function, const Error& e) noexcept;
weft_status tell(weft_error* error, const char* function, const char* text) noexcept;
/// Returns false if `error` is not made with WEFT_ERROR_INIT. Only its code is set, to WEFT_BAD_ARGUMENT. The
/// first time in a process, a line on stderr names the function, since a program that never checks statuses
/// would notice nothing.
bool usable(const char* function, weft_error* error) noexcept;

/// A wait that an interrupt of this thread ended becomes aborted. Any other Error does not change.
Error as_interrupted(const char* function, const Error& e);

/// Runs the body of a function of weft.h. Nothing leaves it but a status.
template <class Body>
weft_status guarded(const char* function, weft_error* error, const Body& body) noexcept {
  if (!usable(function, error)) return WEFT_BAD_ARGUMENT;
  try {
    body();
    return WEFT_OK;
  } catch (const Error& e) {
    return tell(error, function, e);
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

/// The object that a pointer of the caller's points to. Throws bad_argument if it is NULL, or if it should
/// be a living handle and is none.
template <class T>
T& given(const char* function, T* pointer, const char* what) {
  if (pointer == nullptr) refuse(ErrorCode::bad_argument, function, fmt::format("{} is NULL", what));
  if constexpr (std::is_base_of_v<HandleBase, T>) expect_alive(function, pointer, what, T::kKind);
  return *pointer;
}

/// For a handle that may be NULL. Otherwise as given().
template <class T>
T* given_or_null(const char* function, T* pointer, const char* what) {
  return pointer == nullptr ? nullptr : &given(function, pointer, what);
}

/// A duration of at least zero.
inline Duration limit(const char* function, std::int64_t ns, const char* what) {
  if (ns < 0)
    refuse(ErrorCode::bad_argument, function, fmt::format("{} is {}; expected 0 or more", what, ns));
  return Duration(ns);
}

// A larger struct_size is memory that nobody initialised.
inline constexpr std::size_t kMostStructBytes = 4096;

/// A struct as this library knows it. `initial` has the defaults: fields that an older program's struct lacks
/// keep them. Additional fields of a newer program's struct must be zero. A new field therefore goes to the
/// end, behind the size of before (not into padding), and zero is its default. `first_bytes`: the size in
/// version 0.1. `which`: the argument's name in texts.
template <class T>
T read(const char* function, const T* options, const T& initial, std::size_t first_bytes,
       const char* initialiser, const char* which = "options") {
  if (options == nullptr) return initial;
  const std::size_t bytes = options->struct_size;
  if (bytes == sizeof(T)) [[likely]]
    return *options;  // a copy of known size takes a few instructions
  if (bytes < first_bytes || bytes > kMostStructBytes)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->struct_size is {}; expected {}: initialise it with {}", which, bytes, sizeof(T),
                       initialiser));
  const auto* const from = reinterpret_cast<const unsigned char*>(options);
  for (std::size_t i = sizeof(T); i < bytes; ++i) {
    if (from[i] != 0)
      refuse(ErrorCode::unsupported, function,
             fmt::format("{} has {} bytes with something set beyond the {} that weft {} knows", which, bytes,
                         sizeof(T), weft_version()));
  }
  T known = initial;
  std::memcpy(&known, from, bytes < sizeof(T) ? bytes : sizeof(T));
  return known;
}

/// Whether a struct of the caller's to which a function writes its answer is initialised, as struct_size
/// says. `first_bytes`: its size in version 0.1.
template <class T>
void expect_initialised(const char* function, const T& to, std::size_t first_bytes, const char* which,
                        const char* initialiser) {
  if (to.struct_size < first_bytes || to.struct_size > kMostStructBytes)
    refuse(ErrorCode::bad_argument, function,
           fmt::format("{}->struct_size is {}; expected {}: initialise it with {}", which, to.struct_size,
                       sizeof(T), initialiser));
}
/// As much of `value` as a program compiled against an older header has room for.
template <class T>
void answer(const char* function, T& to, const T& value, std::size_t first_bytes, const char* which,
            const char* initialiser) {
  expect_initialised(function, to, first_bytes, which, initialiser);
  const std::uint32_t bytes = to.struct_size;
  std::memcpy(&to, &value, bytes < sizeof(T) ? bytes : sizeof(T));
  to.struct_size = bytes;
}

}  // namespace weft::capi

struct weft_text : weft::capi::Handle<weft_text> {
  static constexpr const char* kKind = "weft_text";
  explicit weft_text(std::string text_in) : text(std::move(text_in)) {}
  std::string text;
};

struct weft_context : weft::capi::Handle<weft_context> {
  static constexpr const char* kKind = "weft_context";
  explicit weft_context(std::shared_ptr<weft::capi::ContextState> state_in) : state(std::move(state_in)) {}
  std::shared_ptr<weft::capi::ContextState> state;
};

struct weft_store : weft::capi::Handle<weft_store> {
  static constexpr const char* kKind = "weft_store";
  explicit weft_store(std::shared_ptr<weft::Store> store_in) : store(std::move(store_in)) {}
  std::shared_ptr<weft::Store> store;
};

struct weft_group : weft::capi::Handle<weft_group> {
  static constexpr const char* kKind = "weft_group";
  explicit weft_group(std::shared_ptr<weft::capi::GroupHandle> handle_in) : handle(std::move(handle_in)) {}
  ~weft_group() { handle->destroyed = true; }
  weft_group(const weft_group&) = delete;
  weft_group& operator=(const weft_group&) = delete;
  std::shared_ptr<weft::capi::GroupHandle> handle;
};
