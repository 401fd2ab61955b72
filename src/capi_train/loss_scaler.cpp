// Loss scaling and conversions in C. Comments in weft/c_train/loss_scaler.h say which functions are
// collective.
#include "weft/train/loss_scaler.hpp"

#include "capi/mesh_handles.hpp"
#include "capi_train/handles.hpp"
#include "weft/train/convert.hpp"

using weft::LossScaler;
namespace capi = weft::capi;

struct weft_loss_scaler : capi::Handle<weft_loss_scaler> {
  static constexpr const char* kKind = "weft_loss_scaler";
  explicit weft_loss_scaler(const LossScaler::Options& options) : scaler(options) {}
  LossScaler scaler;
};

namespace {

constexpr std::size_t kOptionsFirstBytes = 48;
static_assert(sizeof(weft_loss_scaler_options) == kOptionsFirstBytes);

const LossScaler& scaler_of(const char* function, const weft_loss_scaler* scaler) {
  return capi::given(function, scaler, "scaler").scaler;
}
LossScaler& scaler_of(const char* function, weft_loss_scaler* scaler) {
  return capi::given(function, scaler, "scaler").scaler;
}

}  // namespace

weft_status weft_loss_scaler_create(const weft_loss_scaler_options* options, weft_loss_scaler** scaler,
                                    weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft_loss_scaler*& to = capi::given(function, scaler, "scaler");
    const weft_loss_scaler_options o =
        capi::read(function, options, weft_loss_scaler_options WEFT_LOSS_SCALER_OPTIONS_INIT,
                   kOptionsFirstBytes, "WEFT_LOSS_SCALER_OPTIONS_INIT");
    to = new weft_loss_scaler({o.scale, o.growth, o.backoff, o.interval, o.least});
  });
}

void weft_loss_scaler_destroy(weft_loss_scaler* scaler) { capi::destroy(__func__, scaler, "scaler"); }

weft_status weft_loss_scaler_scale(const weft_loss_scaler* scaler, double* scale, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LossScaler& of = scaler_of(function, scaler);
    capi::given(function, scale, "scale") = of.scale();
  });
}

weft_status weft_loss_scaler_unscale(weft_loss_scaler* scaler, const weft_tensor* gradients, int32_t count,
                                     const weft_mesh* mesh, weft_compute* compute, bool* finite,
                                     weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    LossScaler& with = scaler_of(function, scaler);
    const std::vector<weft::Gradient> list = capi::gradients_of(function, gradients, count);
    const weft::DeviceMesh& over = capi::given(function, mesh, "mesh").mesh;
    weft::Compute* const on = capi::given_or_null(function, compute, "compute") == nullptr
                                  ? nullptr
                                  : &capi::compute_of(function, compute);
    bool& to = capi::given(function, finite, "finite");
    to = with.unscale(list, over, on);
  });
}

weft_status weft_loss_scaler_update(weft_loss_scaler* scaler, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] { scaler_of(function, scaler).update(); });
}

weft_status weft_loss_scaler_discard(weft_loss_scaler* scaler, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] { scaler_of(function, scaler).discard(); });
}

weft_status weft_loss_scaler_state(const weft_loss_scaler* scaler, weft_text** text, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const LossScaler& of = scaler_of(function, scaler);
    weft_text*& to = capi::given(function, text, "text");
    to = new weft_text{of.to_text()};
  });
}

weft_status weft_loss_scaler_set_state(weft_loss_scaler* scaler, const char* text, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    LossScaler& with = scaler_of(function, scaler);
    with.set_text(capi::text_of(function, text, "text"));
  });
}

weft_status weft_convert(weft_compute* compute, const weft_buffer* in, const weft_buffer* out,
                         weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::Buffer from = capi::buffer_of(function, in, "in"), to = capi::buffer_of(function, out, "out");
    weft::convert(with, from, to);
    with.wait();
  });
}
