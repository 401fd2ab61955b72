// The vocabulary split over ranks, in C: each function makes views of its arguments and calls the function of
// weft/tp/vocab.hpp.
#include "weft/tp/vocab.hpp"

#include <cstddef>

#include "capi_train/matrices.hpp"

namespace capi = weft::capi;

namespace {

constexpr std::size_t kVocabLossOptionsFirstBytes = 40;
static_assert(offsetof(weft_vocab_loss_options, z_loss) == kVocabLossOptionsFirstBytes);
static_assert(sizeof(weft_vocab_loss_options) == 48);

weft::VocabLossOptions loss_options(const char* function, const weft_vocab_loss_options* options) {
  const weft_vocab_loss_options o =
      capi::read(function, options, weft_vocab_loss_options WEFT_VOCAB_LOSS_OPTIONS_INIT,
                 kVocabLossOptionsFirstBytes, "WEFT_VOCAB_LOSS_OPTIONS_INIT");
  return {o.vocab, o.valid, o.label_smoothing, o.scale, o.z_loss};
}

}  // namespace

weft_status weft_vocab_embedding_forward(weft_compute* compute, weft_group* group, int64_t vocab,
                                         const weft_buffer* tokens, const weft_matrix* w,
                                         const weft_matrix* y, bool reduce, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::TensorView of_tokens = capi::vector(function, tokens, "tokens"),
                           of_w = capi::matrix(function, w, "w"), of_y = capi::matrix(function, y, "y");
    weft::vocab_parallel_embedding_forward(with, capi::axes_of(function, with, group), vocab, of_tokens, of_w,
                                           of_y, reduce);
  });
}

weft_status weft_vocab_embedding_backward(weft_compute* compute, weft_group* group, int64_t vocab,
                                          const weft_buffer* tokens, const weft_matrix* dy,
                                          const weft_matrix* dw, bool accumulate, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::TensorView of_tokens = capi::vector(function, tokens, "tokens"),
                           of_dy = capi::matrix(function, dy, "dy"), of_dw = capi::matrix(function, dw, "dw");
    weft::vocab_parallel_embedding_backward(with, capi::axes_of(function, with, group), vocab, of_tokens,
                                            of_dy, of_dw, accumulate);
  });
}

weft_status weft_vocab_cross_entropy(weft_compute* compute, weft_group* group, const weft_matrix* logits,
                                     const weft_buffer* labels, const weft_vocab_loss_options* options,
                                     const weft_matrix* dlogits, double* loss, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::TensorView of_logits = capi::matrix(function, logits, "logits"),
                           of_labels = capi::vector(function, labels, "labels"),
                           of_dlogits = capi::matrix_or_none(function, dlogits, "dlogits");
    double& to = capi::given(function, loss, "loss");
    to = weft::vocab_parallel_cross_entropy(with, capi::axes_of(function, with, group), of_logits, of_labels,
                                            loss_options(function, options), of_dlogits);
  });
}

weft_status weft_vocab_linear_cross_entropy(weft_compute* compute, weft_group* group, const weft_matrix* x,
                                            const weft_matrix* w, const weft_buffer* labels,
                                            const weft_vocab_loss_options* options, int64_t chunk,
                                            const weft_matrix* dx, const weft_matrix* dw, bool accumulate,
                                            double* loss, weft_error* error) {
  return capi::guarded(__func__, error, [&, function = __func__] {
    weft::Compute& with = capi::compute_of(function, compute);
    const weft::TensorView of_x = capi::matrix(function, x, "x"), of_w = capi::matrix(function, w, "w"),
                           of_labels = capi::vector(function, labels, "labels");
    const weft::LinearLossGradients gradients{capi::matrix_or_none(function, dx, "dx"),
                                              capi::matrix_or_none(function, dw, "dw"), accumulate};
    double& to = capi::given(function, loss, "loss");
    to = weft::vocab_parallel_linear_cross_entropy(with, capi::axes_of(function, with, group), of_x, of_w,
                                                   of_labels, loss_options(function, options), gradients,
                                                   chunk);
  });
}
