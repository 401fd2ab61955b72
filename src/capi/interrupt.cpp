// Interrupts in C. A thread is attached to at most one, which lives as long as the thread is attached.
#include "weft/base/interrupt.hpp"

#include <memory>

#include "capi/handles.hpp"

namespace capi = weft::capi;

struct weft_interrupt : capi::Handle<weft_interrupt> {
  static constexpr const char* kKind = "weft_interrupt";
  const std::shared_ptr<weft::Interrupt> state = std::make_shared<weft::Interrupt>();
};

namespace {

struct Attached {
  explicit Attached(std::shared_ptr<weft::Interrupt> by_in) : by(std::move(by_in)) {}
  const std::shared_ptr<weft::Interrupt> by;
  const weft::Interruptible scope{*by};
};
thread_local std::unique_ptr<const Attached> attached;

}  // namespace

namespace weft::capi {

Error as_interrupted(const char* function, const Error& e) {
  const bool may_be_of_it = e.code() == ErrorCode::timeout || e.code() == ErrorCode::peer_lost;
  if (!may_be_of_it || !interrupted()) return e;
  return Error(ErrorCode::aborted,
               fmt::format("{}: interrupted; what it waited for: {}", function, e.what()));
}

}  // namespace weft::capi

weft_status weft_interrupt_create(weft_interrupt** interrupt, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_interrupt*& to = capi::given(function, interrupt, "interrupt");
    to = new weft_interrupt;
  });
}

void weft_interrupt_destroy(weft_interrupt* interrupt) { capi::destroy(__func__, interrupt, "interrupt"); }

weft_status weft_interrupt_attach(weft_interrupt* interrupt, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_interrupt* const by = capi::given_or_null(function, interrupt, "interrupt");
    attached.reset();  // before the next one, which must not lie inside of it
    if (by != nullptr) attached = std::make_unique<const Attached>(by->state);
  });
}

weft_status weft_interrupt_raise(weft_interrupt* interrupt, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    capi::given(function, interrupt, "interrupt").state->raise();
  });
}
