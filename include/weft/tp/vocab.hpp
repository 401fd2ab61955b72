// Embedding and cross-entropy with the vocabulary split over ranks, as functions on any memory (Shoeybi et
// al., Megatron-LM, arXiv:1909.08053, section 3). The modules Embedding and CrossEntropy of weft/nn compute
// the same for tensors with layouts. In libweft_train: link weft::weft_train, or pkg-config weft_train.
//
// The n ranks of `axes`, a mesh of one or more axes, hold a vocabulary of `vocab` entries in parts, as Shard
// cuts them. The first vocab % n ranks hold one entry more than the others. A part may be empty. vocab_part()
// gives this rank's part. Tokens and labels are i64, whole and the same on all ranks.
//
// Views must be contiguous and on the device of the Compute, whose memory the group of `axes` must move.
// Tensors that are multiplied, looked up or written are f32 or bf16. Sums are made in f32. Sums of a loss are
// made in f64. A function is collective among the ranks of `axes` if its comment says that it communicates.
// Every function blocks until it is done. It throws bad_argument before anything is sent: on this rank if a
// view does not fit (the text names the view), and on all ranks if the vocabulary does not have a token or a
// label. `embedding: token 7 has id 300; expected 0 <= id < 256 (vocab)`, `cross_entropy: token 7 has target
// 300; expected 0 <= target < 256 (vocab) or -100`. (On a device other than the CPU, the next wait for its
// stream throws this error.) One thread per rank.
#pragma once

#include "weft/base/chunk.hpp"
#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The entries of a vocabulary that this rank of `axes` holds. Throws bad_argument if `vocab` is negative.
Chunk vocab_part(const DeviceMesh& axes, std::int64_t vocab);

/// y[t] = row tokens[t] of the whole table, on every rank. Each rank contributes the rows that it holds, and
/// zeros for the others. One all-reduce over `axes` adds them up exactly, because at most one contribution is
/// not zero. Before that, ranks compare `vocab` and, on the host, the tokens in an all-gather of 128 bytes.
/// If they differ, all ranks throw mismatch. A mistake on one rank alone is an error on all ranks, as in
/// vocab_parallel_cross_entropy(). If `reduce` is false, y is this rank's contribution, and nothing is sent.
/// It is for callers that reduce-scatter y along the sequence. tokens: (…), w: (part, dim), y: (…, dim).
void vocab_parallel_embedding_forward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                      const ConstTensorView& tokens, const ConstTensorView& w,
                                      const TensorView& y, bool reduce = true);

/// For each entry of this rank's part, dw = the sum of the rows of dy whose token is this entry. If
/// `accumulate` is true, the sums are added to dw. No communication. tokens: (…); dy: (…, dim), the same on
/// all ranks; dw: (part, dim).
void vocab_parallel_embedding_backward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                       const ConstTensorView& tokens, const ConstTensorView& dy,
                                       const TensorView& dw, bool accumulate = false);

struct VocabLossOptions {
  std::int64_t vocab = 0;  ///< entries of the whole vocabulary
  /// The number of labels that count in the whole batch, on all ranks: the labels of this call, and those of
  /// all other calls whose gradients are added to this call's gradients. More than 0.
  std::int64_t valid = 0;
  /// From 0 to 1: the part of each token's weight that is spread evenly over all entries (Szegedy et al.,
  /// arXiv:1512.00567).
  double label_smoothing = 0;
  double scale = 1;  ///< the gradient of the loss: a factor for dlogits only
  /// A finite number of 0 or more: z_loss (log Z)² is added to each token's term, where Z is the sum of
  /// e^logit over the whole vocabulary (Chowdhery et al., PaLM, arXiv:2204.02311, section 5).
  double z_loss = 0;
};

/// Returns the loss, which is the same on all ranks: the sum over tokens of -(1 - s) log p[label] - s (the
/// mean of log p over the vocabulary), divided by `valid`. Here p = softmax(logits) over the whole vocabulary
/// and s = label_smoothing. z_loss adds its terms to the sum. Labels of -100 (CrossEntropy::kIgnore) do not
/// count. If dlogits is given, it becomes the gradient of the loss with regard to this rank's logits.
///
/// Ranks send four f64 for each token (the largest logit, the sum of exponentials, the label's logit, the sum
/// of logits) in one all-gather. They never send a logit. dlogits costs no communication. Before that, ranks
/// compare the options and, on the host, the labels in an all-gather of 128 bytes. If they differ, all ranks
/// throw mismatch: `vocab_parallel_cross_entropy: argument 1 is valid 4 on tp rank 0, but valid 3 on tp rank
/// 1`. A mistake on one rank alone is an error of the same code on all ranks. The other ranks throw its text
/// after `vocab_parallel_cross_entropy: tp rank 1 failed: …`. The rank with the mistake throws when the other
/// ranks have been notified, or at its deadline. logits: (…, part); labels: (…); dlogits: like logits; it may
/// be the same memory if it has the same dtype.
double vocab_parallel_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& logits,
                                    const ConstTensorView& labels, const VocabLossOptions& options,
                                    const TensorView& dlogits = {});

/// Gradients of vocab_parallel_linear_cross_entropy(). An empty view means that the gradient is not
/// requested. All ranks must request the same gradients.
struct LinearLossGradients {
  TensorView dx{};          ///< like x; overwritten
  TensorView dw{};          ///< like w; see `accumulate`
  bool accumulate = false;  ///< true: the result is added to dw
};

/// The loss of vocab_parallel_cross_entropy() for logits = x wᵀ, computed for `chunk` tokens at a time. The
/// logits of a chunk become their own gradient, then a part of dx and of dw, and are dropped. So a rank never
/// has more than `chunk` rows of logits, in place of all rows of logits and of dlogits. The products are the
/// same. Returns the loss.
///
/// dx has the bits of column_linear_forward(), vocab_parallel_cross_entropy() and column_linear_backward() in
/// a row, for f32 logits. The loss and dw are sums over chunks, so they are equal within the rounding of f64
/// and f32. With one chunk they have the same bits, too. dw is added up in f32, and rounded once if it is
/// bf16.
///
/// Each chunk costs one all-gather of four f64 for each token. dx costs one all-reduce over `axes` at the
/// end. Before anything else, ranks compare the options, `chunk` and, on the host, the labels. Errors are
/// those of vocab_parallel_cross_entropy(). x: (…, dim), the same on all ranks; w: (part, dim), with the
/// dtype of x; labels: (…); dx and dw: f32 or the dtype of x. Throws bad_argument if `chunk` is less than 1.
double vocab_parallel_linear_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& x,
                                           const ConstTensorView& w, const ConstTensorView& labels,
                                           const VocabLossOptions& options,
                                           const LinearLossGradients& gradients = {},
                                           std::int64_t chunk = 1024);

}  // namespace weft
