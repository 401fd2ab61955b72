// The types behind the handles of weft_train.h. Like a handle of weft.h, a handle keeps alive what it needs.
#pragma once

#include "capi/handles.hpp"
#include "weft/host/compute.hpp"
#include "weft/weft_train.h"

namespace weft::capi {

struct ComputeState {
  ComputeState(std::shared_ptr<ContextState> context_in, int threads, Device device)
      : context(std::move(context_in)), compute(context->context, threads, device) {}
  std::shared_ptr<ContextState> context;
  Compute compute;
};

/// Throws if `compute` is NULL, and throws unsupported in a child made by fork().
Compute& compute_of(const char* function, const weft_compute* compute);

}  // namespace weft::capi

struct weft_compute : weft::capi::Handle<weft_compute> {
  static constexpr const char* kKind = "weft_compute";
  explicit weft_compute(std::shared_ptr<weft::capi::ComputeState> state_in) : state(std::move(state_in)) {}
  std::shared_ptr<weft::capi::ComputeState> state;
};
