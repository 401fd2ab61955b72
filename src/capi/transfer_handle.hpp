// The type behind weft_transfer, which several functions begin.
#pragma once

#include <memory>

#include "capi/mesh_handles.hpp"
#include "weft/mesh/transfer.hpp"

struct weft_transfer : weft::capi::Handle<weft_transfer> {
  static constexpr const char* kKind = "weft_transfer";
  explicit weft_transfer(weft::capi::MeshOwner owner_in) : owner(std::move(owner_in)) {}
  weft::capi::MeshOwner owner;
  weft::Transfer transfer;
  bool finished = false;
};

namespace weft::capi {

/// Finishes what `start` begins, or gives it to the caller where `transfer` is not NULL. The handle is made
/// before anything is sent: what was begun must not be lost.
template <class Start>
void finish_or_give(const MeshOwner& owner, weft_transfer** transfer, const Start& start) {
  auto handle = std::make_unique<weft_transfer>(owner);
  handle->transfer = start();
  if (transfer == nullptr)
    handle->transfer.finish();
  else
    *transfer = handle.release();
}

}  // namespace weft::capi
