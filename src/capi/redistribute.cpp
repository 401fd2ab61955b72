// Functions of C that move and compare tensors of the caller's. Comments in weft/c/layout.h say which of
// them block.
#include "weft/mesh/redistribute.hpp"

#include "capi/transfer_handle.hpp"
#include "weft/mesh/replicas.hpp"

using weft::Buffer;
using weft::ErrorCode;
using weft::LayoutRef;
namespace capi = weft::capi;

weft_status weft_redistribute(const weft_buffer* in, const weft_layout* from, const weft_buffer* out,
                              const weft_layout* to, const weft_stream* stream, weft_transfer** transfer,
                              weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const Buffer source = capi::buffer_of(function, in, "in"), target = capi::buffer_of(function, out, "out");
    const LayoutRef &now = capi::layout_of(function, from, "from"),
                    &goal = capi::layout_of(function, to, "to");
    const weft::Stream on = stream == nullptr ? weft::Stream{} : capi::stream_of(function, *stream, "stream");
    capi::finish_or_give(from->owner, transfer, [&] {
      return weft::start_redistribute(capi::view_of(source, now->local_shape()), now,
                                      capi::view_of(target, goal->local_shape()), goal, on);
    });
  });
}

weft_status weft_transfer_done(weft_transfer* transfer, bool* done, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_transfer& asked = capi::given(function, transfer, "transfer");
    bool& to = capi::given(function, done, "done");
    to = asked.finished || asked.transfer.done();
  });
}

weft_status weft_transfer_finish(weft_transfer* transfer, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_transfer& asked = capi::given(function, transfer, "transfer");
    if (asked.finished) capi::refuse(ErrorCode::bad_argument, function, "transfer is finished already");
    asked.finished = true;
    asked.transfer.finish();
  });
}

void weft_transfer_destroy(weft_transfer* transfer) { capi::destroy(__func__, transfer, "transfer"); }

weft_status weft_check_replicas(const weft_tensor* tensors, int32_t count, const weft_mesh* axes,
                                weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const std::vector<weft::MutableNamedView> list = capi::tensors_of(function, tensors, count, "tensors");
    weft::check_replicas(std::vector<weft::NamedView>(list.begin(), list.end()),
                         capi::mesh_of(function, axes, "axes"));
  });
}
