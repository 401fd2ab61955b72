// The types behind Works and reductions of weft.h, and how its functions submit calls.
#pragma once

#include <atomic>
#include <mutex>
#include <vector>

#include "capi/handles.hpp"
#include "capi/values.hpp"
#include "group/callback.hpp"
#include "weft/base/op.hpp"

namespace weft::capi {

/// A C function as a UserReduction. Works of calls with it share it.
class Reduction {
 public:
  Reduction(const char* name, weft_combine combine, void* data);
  /// Called once everything that may fail has been made: until then the data are the caller's.
  void release_by(void (*release)(void*)) noexcept { release_ = release; }
  Reduction(const Reduction&) = delete;
  Reduction& operator=(const Reduction&) = delete;
  ~Reduction();

  const UserReduction& user() const { return user_; }
  /// Throws if the function has thrown in any call so far: results of calls in flight may be wrong.
  void check(const char* function) const {
    if (threw_.load(std::memory_order_acquire)) [[unlikely]]
      refuse_thrown(function);
  }
  bool threw() const noexcept { return threw_.load(std::memory_order_acquire); }
  std::string text() const;

 private:
  [[noreturn]] void refuse_thrown(const char* function) const;
  UserReduction user_;
  void* data_;
  void (*release_)(void*) = nullptr;
  std::atomic<bool> threw_{false};
  mutable std::mutex mutex_;
  std::string words_;  // guarded by mutex_
};

using Reductions = std::vector<std::shared_ptr<Reduction>>;

}  // namespace weft::capi

struct weft_reduction : weft::capi::Handle<weft_reduction> {
  static constexpr const char* kKind = "weft_reduction";
  std::shared_ptr<weft::capi::Reduction> reduction;
};

struct weft_work : weft::capi::Handle<weft_work> {
  static constexpr const char* kKind = "weft_work";
  std::shared_ptr<weft::capi::GroupHandle> group;
  weft::capi::Reductions reductions;  // that the calls combine with
  weft::Work work;
  std::optional<weft::Error> failure;  // a Work throws it once; the handle returns it at every query
};

struct weft_persistent : weft::capi::Handle<weft_persistent> {
  static constexpr const char* kKind = "weft_persistent";
  std::weak_ptr<weft::capi::GroupHandle> group;  // whose end it does not put off
  weft::capi::Reductions reductions;             // that the call combines with
  weft::PersistentCall call;
};

namespace weft::capi {

/// Called after calls that have ended well. If the function of one of `reductions` threw, it aborts the group
/// and throws.
void check_reductions(const char* function, ProcessGroup& group, const Reductions& reductions);

/// Runs begin(), which submits calls to `group` and returns their Work. If `work` is null, it waits for that
/// Work. Otherwise *work becomes its handle. `reductions`: the reductions of the calls, without one that
/// threw before.
template <class Begin>
void begin(const char* function, const std::shared_ptr<GroupHandle>& group, Reductions reductions,
           weft_work** work, const Begin& begin) {
  for (const auto& r : reductions) r->check(function);
  if (work == nullptr) {
    check_may_wait(group->group);  // before anything is sent
    begin().wait();
    if (!reductions.empty()) [[unlikely]]
      check_reductions(function, group->group, reductions);
    return;
  }
  auto handle = std::make_unique<weft_work>();  // before anything is sent
  handle->group = group;
  handle->reductions = std::move(reductions);
  handle->work = begin();
  *work = handle.release();
}

/// The whole of a function of weft.h that makes one call, which make(group, options) returns.
template <class Make>
weft_status submitted(const char* function, weft_group* group, const weft_call_options* options,
                      weft_work** work, weft_error* error, const Make& make) noexcept {
  return guarded(function, error, [&] {
    weft_group& handle = given(function, group, "group");
    ProcessGroup& g = handle.handle->group;
    const CallOptions o = call_options(function, options);
    Reductions reductions;
    if (o.op.user != nullptr) [[unlikely]]
      reductions.push_back(options->reduction->reduction);
    begin(function, handle.handle, std::move(reductions), work, [&] { return g.submit(make(g, o)); });
  });
}

}  // namespace weft::capi
