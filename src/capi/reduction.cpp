// Reductions of the caller's own in C.
#include "base/errors/caught.hpp"
#include "capi/call_handles.hpp"
#include "capi/call_out.hpp"

using weft::ErrorCode;

namespace weft::capi {

Reduction::Reduction(const char* name, weft_combine combine, void* data) : data_(data) {
  user_.name = name;
  user_.combine = [this, combine](const void* left, const void* right, void* out, std::int64_t count,
                                  DType dtype) {
    try {
      const CallOut call_out;
      if (!call_out) throw std::runtime_error(kEnded);
      combine(data_, left, right, out, count, static_cast<weft_dtype>(dtype));
    } catch (...) {
      const std::lock_guard lock(mutex_);
      if (!threw_.load(std::memory_order_relaxed)) {
        try {
          words_ = caught_words();
        } catch (...) {}  // no memory for the words
      }
      threw_.store(true, std::memory_order_release);
    }
  };
}

Reduction::~Reduction() {
  const CallOut out;
  if (release_ == nullptr || !out) return;
  try {
    release_(data_);
  } catch (...) {}  // nobody is left to learn of it
}

std::string Reduction::text() const {
  const std::lock_guard lock(mutex_);
  return fmt::format("the function of reduction \"{}\" threw: {}", user_.name, words_);
}

void Reduction::refuse_thrown(const char* function) const { refuse(ErrorCode::system, function, text()); }

void check_reductions(const char* function, ProcessGroup& group, const Reductions& reductions) {
  for (const auto& r : reductions) {
    if (!r->threw()) continue;
    group.abort(r->text());
    r->check(function);
  }
}

}  // namespace weft::capi

namespace capi = weft::capi;

weft_status weft_reduction_create(const char* name, weft_combine combine, void* data,
                                  void (*release)(void* data), weft_reduction** reduction,
                                  weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const char& text = capi::given(function, name, "name");
    if (combine == nullptr) capi::refuse(ErrorCode::bad_argument, function, "combine is NULL");
    weft_reduction*& to = capi::given(function, reduction, "reduction");
    auto handle = std::make_unique<weft_reduction>();
    handle->reduction = std::make_shared<capi::Reduction>(&text, combine, data);
    handle->reduction->release_by(release);
    to = handle.release();
  });
}

void weft_reduction_destroy(weft_reduction* reduction) { capi::destroy(__func__, reduction, "reduction"); }
