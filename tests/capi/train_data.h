/* The training run that a test makes from C and from C++: the same batches, the same numbers. */
#ifndef WEFT_TESTS_CAPI_TRAIN_DATA_H
#define WEFT_TESTS_CAPI_TRAIN_DATA_H

#include <stdbool.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
  TRAIN_DIM = 16,
  TRAIN_LAYERS = 2,
  TRAIN_HEADS = 4,
  TRAIN_KV_HEADS = 4,
  TRAIN_HIDDEN = 24,
  TRAIN_EXPERTS = 4,
  TRAIN_EXPERT_HIDDEN = 12,
  TRAIN_VOCAB = 32,
  TRAIN_SEQUENCE = 8,
  TRAIN_ROWS = 4, /* of all data ranks */
  TRAIN_SEED = 11,
  TRAIN_STEPS = 5
};
#define TRAIN_RATE 0.01
#define TRAIN_MAX_NORM 0.5
#define TRAIN_INIT_STD 0.1

/* Rows [first, first + rows) of the batch of a step. Some labels do not count. */
static inline void train_batch(int step, int first, int rows, int64_t* tokens, int64_t* labels) {
  for (int r = 0; r < rows; ++r)
    for (int i = 0; i < TRAIN_SEQUENCE; ++i) {
      const int row = first + r, at = r * TRAIN_SEQUENCE + i, next = i + 1;
      tokens[at] = (step * 5 + row * 7 + i * i) % TRAIN_VOCAB;
      labels[at] = (row + i) % 5 == 0 ? -100 : (step * 5 + row * 7 + next * next) % TRAIN_VOCAB;
    }
}

/* The losses of that run by the parts of the C++ API, on dp x tp ranks that are threads. `split`: with
 * sequence parallel and a split vocabulary. */
void train_in_cpp(int dp, int tp, bool split, double losses[TRAIN_STEPS]);
/* The same run of a model with TRAIN_EXPERTS experts in each block, on dp x ep ranks. */
void train_experts_in_cpp(int dp, int ep, double losses[TRAIN_STEPS]);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_TESTS_CAPI_TRAIN_DATA_H */
