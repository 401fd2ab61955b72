// A rank's Compute, in C.
#include <string_view>

#include "capi/values.hpp"
#include "capi_train/handles.hpp"

namespace weft::capi {

Compute& compute_of(const char* function, const weft_compute* compute) {
  ComputeState& state = *given(function, compute, "compute").state;
  state.context->context.check_fork(function);
  return state.compute;
}

}  // namespace weft::capi

namespace capi = weft::capi;

namespace {

constexpr std::size_t kComputeOptionsFirstBytes = 12;
static_assert(sizeof(weft_compute_options) == kComputeOptionsFirstBytes);

// libweft_train uses functions of libweft whose ABI is promised to no other version. The dynamic loader
// compares versions, if it can. All handles of libweft_train come from a weft_compute, so this check comes
// before any other use.
void expect_libweft_of_this_version(const char* function) {
  if (std::string_view(weft_version()) != WEFT_VERSION)
    capi::refuse(
        weft::ErrorCode::unsupported, function,
        fmt::format(
            "libweft_train is of weft {}, and the libweft that it calls is of {}; expected the same version",
            WEFT_VERSION, weft_version()));
}

}  // namespace

weft_status weft_compute_create(weft_context* context, const weft_compute_options* options,
                                weft_compute** compute, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    expect_libweft_of_this_version(function);
    weft_context& in = capi::given(function, context, "context");
    weft_compute*& to = capi::given(function, compute, "compute");
    const weft_compute_options o =
        capi::read(function, options, weft_compute_options WEFT_COMPUTE_OPTIONS_INIT,
                   kComputeOptionsFirstBytes, "WEFT_COMPUTE_OPTIONS_INIT");
    in.state->context.check_fork(function);
    const weft_buffer somewhere = {nullptr, 0, WEFT_F32, o.device};
    const weft::Device device = capi::buffer_of(function, &somewhere, "options").device;
    to = new weft_compute{std::make_shared<capi::ComputeState>(in.state, o.threads, device)};
  });
}

void weft_compute_destroy(weft_compute* compute) { capi::destroy(__func__, compute, "compute"); }

weft_status weft_compute_threads(const weft_compute* compute, int32_t* threads, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    const weft::Compute& c = capi::compute_of(function, compute);
    capi::given(function, threads, "threads") = c.threads();
  });
}
