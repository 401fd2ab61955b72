// The vocabulary split over ranks, in C: each function makes views of its arguments and calls the function of
// weft/tp/vocab.hpp.
#include "weft/tp/vocab.hpp"

#include "capi_train/matrices.hpp"

namespace capi = weft::capi;

namespace {

constexpr std::size_t kVocabLossOptionsFirstBytes = 40;
static_assert(sizeof(weft_vocab_loss_options) == kVocabLossOptionsFirstBytes);

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
    const weft_vocab_loss_options o =
        capi::read(function, options, weft_vocab_loss_options WEFT_VOCAB_LOSS_OPTIONS_INIT,
                   kVocabLossOptionsFirstBytes, "WEFT_VOCAB_LOSS_OPTIONS_INIT");
    const weft::VocabLossOptions with_options{o.vocab, o.valid, o.label_smoothing, o.scale};
    to = weft::vocab_parallel_cross_entropy(with, capi::axes_of(function, with, group), of_logits, of_labels,
                                            with_options, of_dlogits);
  });
}
