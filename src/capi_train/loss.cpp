// Losses of elements in C: each function makes views of its arguments and calls the function of
// weft/tp/element_loss.hpp.
#include "capi_train/matrices.hpp"
#include "weft/tp/element_loss.hpp"

namespace capi = weft::capi;

namespace {

constexpr std::size_t kElementLossOptionsFirstBytes = 24;
static_assert(sizeof(weft_element_loss_options) == kElementLossOptionsFirstBytes);

template <class Loss>
void compute_loss(const char* function, const Loss& function_on_views, weft_compute* compute,
                  const weft_buffer* y, const weft_buffer* target, const weft_element_loss_options* options,
                  const weft_buffer* dy, double* loss) {
  weft::Compute& with = capi::compute_of(function, compute);
  const weft::TensorView of_y = capi::vector(function, y, "y"),
                         of_target = capi::vector(function, target, "target"),
                         of_dy = capi::vector_or_none(function, dy, "dy");
  double& to = capi::given(function, loss, "loss");
  const weft_element_loss_options o =
      capi::read(function, options, weft_element_loss_options WEFT_ELEMENT_LOSS_OPTIONS_INIT,
                 kElementLossOptionsFirstBytes, "WEFT_ELEMENT_LOSS_OPTIONS_INIT");
  to = function_on_views(with, of_y, of_target, {o.count, o.scale}, of_dy);
}

}  // namespace

weft_status weft_mean_squared_error(weft_compute* compute, const weft_buffer* y, const weft_buffer* target,
                                    const weft_element_loss_options* options, const weft_buffer* dy,
                                    double* loss, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    compute_loss(function, weft::mean_squared_error, compute, y, target, options, dy, loss);
  });
}

weft_status weft_binary_cross_entropy(weft_compute* compute, const weft_buffer* y, const weft_buffer* target,
                                      const weft_element_loss_options* options, const weft_buffer* dy,
                                      double* loss, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    compute_loss(function, weft::binary_cross_entropy, compute, y, target, options, dy, loss);
  });
}
