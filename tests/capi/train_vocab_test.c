/* Embedding and cross-entropy from C with the vocabulary split, on plain arrays: the ranks together compute
 * the results of plain loops on one rank. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include <math.h>

#include "support.h"
#include "weft/weft_train.h"

/* 7 entries, which 2 to 4 ranks do not divide. */
enum { VOCAB = 7, TOKENS = 5, DIM = 3 };

static double logit(int token, int entry) { return 3 * sinf((float)(token * VOCAB + entry)); }
/* The value of an element that is stored in f32 with `shift` added: subtracts `shift`. */
static double stored_logit(int token, int entry, double shift) {
  return (double)(float)(logit(token, entry) + shift) - shift;
}

/* This rank's entries: [first, first + own). */
typedef struct part {
  int first, own;
} part;
static part part_of(const rank_args* a) {
  const int more = VOCAB % a->size, least = VOCAB / a->size;
  const part p = {a->rank * least + (a->rank < more ? a->rank : more), least + (a->rank < more ? 1 : 0)};
  return p;
}

static weft_compute* compute_of(weft_context* context) {
  weft_compute* compute = NULL;
  OK(weft_compute_create(context, NULL, &compute, &error));
  return compute;
}

static void cross_entropy(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_of(a->context);
  const part p = part_of(a);
  int64_t labels[TOKENS] = {6, 0, WEFT_IGNORED, 3, 4};
  float logits[TOKENS * VOCAB], dlogits[TOKENS * VOCAB];
  const weft_buffer of_labels = {labels, TOKENS, WEFT_I64, WEFT_CPU};
  const weft_matrix of_logits = {logits, TOKENS, p.own, WEFT_F32, WEFT_CPU},
                    of_dlogits = {dlogits, TOKENS, p.own, WEFT_F32, WEFT_CPU};
  weft_vocab_loss_options options = WEFT_VOCAB_LOSS_OPTIONS_INIT;
  options.vocab = VOCAB;
  options.valid = 4;
  options.scale = 2;
  for (int large = 0; large < 2; ++large)
    for (int smoothed = 0; smoothed < 2; ++smoothed) {
      const double shift = large ? 131072 : 0;
      const double z_loss = options.z_loss = large ? 0 : 0.01;
      for (int t = 0; t < TOKENS; ++t)
        for (int j = 0; j < p.own; ++j) logits[t * p.own + j] = (float)(logit(t, p.first + j) + shift);
      const double s = options.label_smoothing = smoothed ? 0.2 : 0;
      double loss = -1, expected = 0;
      OK(weft_vocab_cross_entropy(compute, group, &of_logits, &of_labels, &options, &of_dlogits, &loss,
                                  &error));
      for (int t = 0; t < TOKENS; ++t) {
        double sum = 0, all = 0;
        for (int j = 0; j < VOCAB; ++j) sum += exp(stored_logit(t, j, shift));
        for (int j = 0; j < VOCAB; ++j) all += stored_logit(t, j, shift);
        if (labels[t] != WEFT_IGNORED)
          expected += (z_loss * log(sum) * log(sum) + log(sum) -
                       (1 - s) * stored_logit(t, (int)labels[t], shift) - s * all / VOCAB) /
                      4;
        for (int j = 0; j < p.own; ++j) {
          const double wanted = (p.first + j == labels[t] ? 1 - s : 0) + s / VOCAB;
          const double probability = exp(stored_logit(t, p.first + j, shift)) / sum;
          const double gradient = 2 * (probability * (1 + 2 * z_loss * log(sum)) - wanted) / 4;
          CHECK(fabs(dlogits[t * p.own + j] - (labels[t] == WEFT_IGNORED ? 0 : gradient)) < 1e-6);
        }
      }
      CHECK(fabs(loss - expected) < 1e-6 * expected);
      loss = -1;
      OK(weft_vocab_cross_entropy(compute, group, &of_logits, &of_labels, &options, NULL, &loss, &error));
      CHECK(fabs(loss - expected) < 1e-6 * expected);
    }
  { /* A label that is not there, on all ranks; and the group is as it was. */
    double loss = -1;
    labels[3] = VOCAB;
    CHECK_ERROR(
        weft_vocab_cross_entropy(compute, group, &of_logits, &of_labels, &options, NULL, &loss, &error),
        WEFT_BAD_ARGUMENT, "cross_entropy: token 3 has target 7; expected 0 <= target < 7 (vocab) or -100");
    options.valid = 0;
    CHECK_ERROR(
        weft_vocab_cross_entropy(compute, group, &of_logits, &of_labels, &options, NULL, &loss, &error),
        WEFT_BAD_ARGUMENT,
        "vocab_parallel_cross_entropy: valid is 0; expected the number of valid labels of the whole batch, "
        "more "
        "than 0");
    CHECK(loss == -1);
    OK(weft_barrier(group, NULL, NULL, &error));
  }
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

/* A head and its loss by chunks: the numbers of all logits at once. */
static void loss_in_chunks(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_of(a->context);
  const part p = part_of(a);
  int64_t labels[TOKENS] = {6, 0, WEFT_IGNORED, 3, 4};
  float x[TOKENS * DIM], w[VOCAB * DIM], logits[TOKENS * VOCAB], dx[TOKENS * DIM], dw[VOCAB * DIM],
      all_dx[TOKENS * DIM], all_dw[VOCAB * DIM];
  const weft_buffer of_labels = {labels, TOKENS, WEFT_I64, WEFT_CPU};
  const weft_matrix of_x = {x, TOKENS, DIM, WEFT_F32, WEFT_CPU}, of_w = {w, p.own, DIM, WEFT_F32, WEFT_CPU},
                    of_logits = {logits, TOKENS, p.own, WEFT_F32, WEFT_CPU},
                    of_dx = {dx, TOKENS, DIM, WEFT_F32, WEFT_CPU},
                    of_dw = {dw, p.own, DIM, WEFT_F32, WEFT_CPU},
                    of_all_dx = {all_dx, TOKENS, DIM, WEFT_F32, WEFT_CPU},
                    of_all_dw = {all_dw, p.own, DIM, WEFT_F32, WEFT_CPU};
  for (int i = 0; i < TOKENS * DIM; ++i) x[i] = sinf((float)i);
  for (int i = 0; i < p.own * DIM; ++i) w[i] = cosf((float)(p.first * DIM + i));
  weft_vocab_loss_options options = WEFT_VOCAB_LOSS_OPTIONS_INIT;
  options.vocab = VOCAB;
  options.valid = 4;
  options.z_loss = 0.01;
  double loss = -1, expected = -1;
  for (int t = 0; t < TOKENS; ++t)
    for (int j = 0; j < p.own; ++j) {
      logits[t * p.own + j] = 0;
      for (int i = 0; i < DIM; ++i) logits[t * p.own + j] += x[t * DIM + i] * w[j * DIM + i];
    }
  OK(weft_vocab_cross_entropy(compute, group, &of_logits, &of_labels, &options, NULL, &expected, &error));
  OK(weft_vocab_linear_cross_entropy(compute, group, &of_x, &of_w, &of_labels, &options, TOKENS, &of_all_dx,
                                     &of_all_dw, false, &loss, &error));
  CHECK(fabs(loss - expected) < 1e-6 * expected);
  for (int i = 0; i < p.own * DIM; ++i) dw[i] = 1;
  OK(weft_vocab_linear_cross_entropy(compute, group, &of_x, &of_w, &of_labels, &options, 2, &of_dx, &of_dw,
                                     true, &loss, &error));
  CHECK(fabs(loss - expected) < 1e-6 * expected);
  for (int i = 0; i < TOKENS * DIM; ++i) CHECK(dx[i] == all_dx[i]);
  for (int i = 0; i < p.own * DIM; ++i) CHECK(fabsf(dw[i] - 1 - all_dw[i]) < 1e-6F);
  OK(weft_vocab_linear_cross_entropy(compute, group, &of_x, &of_w, &of_labels, &options, 3, NULL, NULL, false,
                                     &loss, &error));
  CHECK(fabs(loss - expected) < 1e-6 * expected);
  CHECK_ERROR(weft_vocab_linear_cross_entropy(compute, group, &of_x, &of_w, &of_labels, &options, 0, NULL,
                                              NULL, false, &loss, &error),
              WEFT_BAD_ARGUMENT, "vocab_parallel_linear_cross_entropy: chunk is 0; expected 1 token or more");
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

static void embedding(rank_args* a) {
  weft_group* group = join(a, "tp", 0);
  weft_compute* compute = compute_of(a->context);
  const part p = part_of(a);
  int64_t tokens[TOKENS] = {6, 0, 6, 3, 4};
  float w[VOCAB * DIM], dw[VOCAB * DIM], y[TOKENS * DIM], dy[TOKENS * DIM];
  const weft_buffer of_tokens = {tokens, TOKENS, WEFT_I64, WEFT_CPU};
  const weft_matrix of_w = {w, p.own, DIM, WEFT_F32, WEFT_CPU}, of_dw = {dw, p.own, DIM, WEFT_F32, WEFT_CPU},
                    of_y = {y, TOKENS, DIM, WEFT_F32, WEFT_CPU},
                    of_dy = {dy, TOKENS, DIM, WEFT_F32, WEFT_CPU};
  for (int i = 0; i < p.own * DIM; ++i) w[i] = (float)(p.first * DIM + i);
  for (int i = 0; i < TOKENS * DIM; ++i) dy[i] = (float)(i % 4);
  for (int i = 0; i < p.own * DIM; ++i) dw[i] = 1;

  OK(weft_vocab_embedding_forward(compute, group, VOCAB, &of_tokens, &of_w, &of_y, true, &error));
  for (int i = 0; i < TOKENS * DIM; ++i) CHECK(y[i] == (float)(tokens[i / DIM] * DIM + i % DIM));
  OK(weft_vocab_embedding_forward(compute, group, VOCAB, &of_tokens, &of_w, &of_y, false, &error));
  for (int i = 0; i < TOKENS * DIM; ++i) {
    const bool here = tokens[i / DIM] >= p.first && tokens[i / DIM] < p.first + p.own;
    CHECK(y[i] == (here ? (float)(tokens[i / DIM] * DIM + i % DIM) : 0));
  }
  for (int accumulate = 1; accumulate >= 0; --accumulate) {
    OK(weft_vocab_embedding_backward(compute, group, VOCAB, &of_tokens, &of_dy, &of_dw, accumulate != 0,
                                     &error));
    for (int i = 0; i < p.own * DIM; ++i) {
      float sum = (float)accumulate;
      for (int t = 0; t < TOKENS; ++t)
        if (tokens[t] == p.first + i / DIM) sum += dy[t * DIM + i % DIM];
      CHECK(dw[i] == sum);
    }
  }
  tokens[2] = -1; /* on all ranks; and the group is as it was */
  CHECK_ERROR(weft_vocab_embedding_forward(compute, group, VOCAB, &of_tokens, &of_w, &of_y, true, &error),
              WEFT_BAD_ARGUMENT, "embedding: token 2 has id -1; expected 0 <= id < 7 (vocab)");
  CHECK_ERROR(weft_vocab_embedding_backward(compute, group, VOCAB, &of_tokens, &of_dy, &of_dw, false, &error),
              WEFT_BAD_ARGUMENT, "embedding: token 2 has id -1; expected 0 <= id < 7 (vocab)");
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  for (int size = 1; size <= MAX_RANKS; ++size) {
    run_ranks(size, cross_entropy);
    run_ranks(size, loss_in_chunks);
    run_ranks(size, embedding);
  }
  return 0;
}
