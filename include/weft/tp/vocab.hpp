// Embedding and cross-entropy with the vocabulary split over ranks, as functions on anybody's memory (Shoeybi
// et al., Megatron-LM, arXiv:1909.08053, section 3). Modules do the same by layouts: Embedding and
// CrossEntropy of weft/nn. In libweft_train: link weft::weft_train, or pkg-config weft_train.
//
// The n ranks of `axes`, a mesh of one or more axes, hold a vocabulary of `vocab` entries in parts, as Shard
// cuts them: the first vocab % n ranks hold one more than the rest; a part may be empty. vocab_part() says
// which is this rank's. Tokens and labels are i64, whole and the same on all ranks.
//
// Views are on the device of the Compute (whose memory the group of `axes` moves) and contiguous. Tensors
// that are multiplied, looked up or written are f32 or bf16; sums are in f32, those of a loss in f64. Every
// function is collective among the ranks of `axes` where it says that it communicates, blocks until it is
// done, and throws bad_argument before anything is sent: for a view that does not fit, naming it, and on all
// ranks for a token or a label that the vocabulary does not have: `embedding: token 7 has id 300; expected 0
// <= id < 256 (vocab)`, `cross_entropy: token 7 has target 300; expected 0 <= target < 256 (vocab) or -100`.
// (On another device than the CPU the next wait for its stream throws it.) One thread per rank.
#pragma once

#include "weft/base/chunk.hpp"
#include "weft/base/view.hpp"
#include "weft/host/compute.hpp"
#include "weft/mesh/mesh.hpp"

namespace weft {

/// The entries of a vocabulary that this rank of `axes` holds. Throws bad_argument for a negative number.
Chunk vocab_part(const DeviceMesh& axes, std::int64_t vocab);

/// y[t] = row tokens[t] of the whole table, on every rank: each gives the rows that it holds and zeros for
/// the others, and one all-reduce over `axes` adds them up; exactly, since one of them is not zero. Before
/// it, in an all-gather of 128 bytes, they compare `vocab` and, on the host, the tokens: mismatch on all
/// ranks if one gives others; a fault on one rank alone is an error of all, as for the loss below. Without
/// `reduce` y stays this rank's contribution, and nothing is sent: for callers that reduce-scatter it along
/// the sequence. tokens: (…), w: (part, dim), y: (…, dim).
void vocab_parallel_embedding_forward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                      const ConstTensorView& tokens, const ConstTensorView& w,
                                      const TensorView& y, bool reduce = true);

/// dw, or dw + where `accumulate`: the rows of dy added up by the token that they are for, for the entries of
/// this rank's part. No communication. tokens: (…); dy: (…, dim), the same on all ranks; dw: (part, dim).
void vocab_parallel_embedding_backward(Compute& compute, const DeviceMesh& axes, std::int64_t vocab,
                                       const ConstTensorView& tokens, const ConstTensorView& dy,
                                       const TensorView& dw, bool accumulate = false);

struct VocabLossOptions {
  std::int64_t vocab = 0;  ///< entries of the whole
  /// The number of labels that count, of the whole batch: over this call and all others whose gradients are
  /// added to its, on whatever ranks. More than 0.
  std::int64_t valid = 0;
  /// 0 to 1: the weight that goes to all entries alike (Szegedy et al., arXiv:1512.00567).
  double label_smoothing = 0;
  double scale = 1;  ///< of dlogits alone: the gradient of the loss
};

/// The sum over tokens of -(1 - s) log p[label] - s (the mean of log p over the vocabulary), with p =
/// softmax(logits) over the whole vocabulary and s = label_smoothing, divided by `valid`; the same on all
/// ranks. Labels of -100 (CrossEntropy::kIgnore) do not count. dlogits, where it is given: the gradient with
/// regard to this rank's logits.
///
/// Ranks send four f64 for each token (the largest logit, the sum of exponentials, the label's logit, the sum
/// of logits) by one all-gather, and never a logit; dlogits costs no communication. Before it, in an
/// all-gather of 128 bytes, they compare the options and, on the host, the labels. Throws mismatch on all
/// ranks where one gives others: `vocab_parallel_cross_entropy: argument 1 is valid 4 on tp rank 0, but valid
/// 3 on tp rank 1`. A mistake on one rank alone is an error of the same code on all ranks: the others have
/// its text, `vocab_parallel_cross_entropy: tp rank 1 failed: …`. The rank that is wrong throws when they
/// have been notified, or at its deadline. logits: (…, part); labels: (…); dlogits: as logits, may be the
/// same memory where it has the same dtype.
double vocab_parallel_cross_entropy(Compute& compute, const DeviceMesh& axes, const ConstTensorView& logits,
                                    const ConstTensorView& labels, const VocabLossOptions& options,
                                    const TensorView& dlogits = {});

}  // namespace weft
