/* The parts of a mixture of experts on the caller's memory: a router, the way of tokens to their experts and
 * back, and the experts (N. Shazeer et al., "Outrageously Large Neural Networks", 2017). */
#ifndef WEFT_C_TRAIN_EXPERTS_H
#define WEFT_C_TRAIN_EXPERTS_H

#include "weft/c/layout.h"
#include "weft/c_train/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Rules for all functions of this header. Memory is of the host, row-major, and the caller's. A number of a
 * matrix is WEFT_F32 unless its comment says more. A function fails with WEFT_BAD_ARGUMENT, before it writes
 * or sends anything, if sizes or dtypes do not fit; the text names the argument. Only the functions whose
 * comments say so communicate; all ranks of the group must call those, whatever is routed: ranks without
 * tokens, too. */

typedef int32_t weft_router_scores;
enum { WEFT_ROUTER_SOFTMAX = 0, WEFT_ROUTER_SIGMOID = 1 };
typedef int32_t weft_router_bias;
enum {
  WEFT_ROUTER_BIAS_NONE = 0,
  WEFT_ROUTER_BIAS_SELECTS = 1, /* is added to the scores where experts are chosen, and not to weights */
  WEFT_ROUTER_BIAS_WEIGHS = 2   /* is added to the logits */
};
typedef struct weft_router_options {
  uint32_t struct_size;
  int32_t top_k; /* experts of a token */
  weft_router_scores scores;
  weft_router_bias bias;
  bool normalise; /* whether the weights of a token are divided by their sum */
} weft_router_options;
#define WEFT_ROUTER_OPTIONS_INIT \
  { sizeof(weft_router_options), 2, WEFT_ROUTER_SOFTMAX, WEFT_ROUTER_BIAS_NONE, true }

/* Chooses the experts of each token. logits: (tokens, experts); bias: one number for each expert, or NULL if
 * the options have none. Writes experts: WEFT_I32 (tokens, top_k), by falling score, equal scores by rising
 * number; and weights: (tokens, top_k). Fails for a logit that is not finite, naming the token. */
weft_status weft_route_tokens(const weft_matrix* logits, const weft_buffer* bias,
                              const weft_router_options* options, const weft_matrix* experts,
                              const weft_matrix* weights, weft_error* error);
/* Sums over tokens for the losses that keep the load even, added to what is there: counts: WEFT_F64, the
 * assignments of each expert; scores: WEFT_F64, the sum of the scores of each expert; *z: the sum of the
 * squared log-sum-exp of the logits. The auxiliary loss over T tokens is experts * sum_i (counts_i / (T
 * top_k)) * (scores_i / T), of sums over all ranks. */
weft_status weft_router_sums(const weft_matrix* logits, const weft_buffer* bias, const weft_matrix* experts,
                             const weft_router_options* options, const weft_buffer* counts,
                             const weft_buffer* scores, double* z, weft_error* error);
/* dlogits = the gradient of the weights' use, and of the losses. experts, weights: of weft_route_tokens; an
 * expert ~e (a negative number) is a choice of e that was dropped, whose dweights do not count. dweights: as
 * weights; dlogits: as logits. shares: WEFT_F64, the share of each expert in the assignments, or NULL: no
 * auxiliary loss. aux, z: the factors of the losses, divided by the number of tokens of their means. dbias:
 * one number for each expert, to which the gradient of a bias that weighs is added, or NULL. */
weft_status weft_route_tokens_backward(const weft_matrix* logits, const weft_buffer* bias,
                                       const weft_matrix* experts, const weft_matrix* weights,
                                       const weft_matrix* dweights, const weft_router_options* options,
                                       const weft_buffer* shares, double aux, double z,
                                       const weft_matrix* dlogits, const weft_buffer* dbias,
                                       weft_error* error);

/* Where the rows of this rank's tokens travel, and where they come back. A value that does not change; it
 * keeps the group. */
typedef struct weft_token_routes weft_token_routes;
/* Gives every rank the choices of all ranks, and makes the routes. Collective: two all-gathers. experts,
 * weights: of weft_route_tokens, of this rank's tokens; ranks may have any numbers of them. first_experts:
 * WEFT_I64, one number more than there are ranks: rank r holds the experts first_experts[r] to
 * first_experts[r + 1]. group: NULL: one rank. Fails if a token chose an expert twice, or one that there is
 * not; with WEFT_MISMATCH on all ranks if ranks differ in the number of choices. */
weft_status weft_token_routes_create(weft_compute* compute, weft_group* group, const weft_matrix* experts,
                                     const weft_matrix* weights, const weft_buffer* first_experts,
                                     weft_token_routes** routes, weft_error* error);
void weft_token_routes_destroy(weft_token_routes* routes);
/* The experts of this rank; the rows that a dispatch gives it, one for each choice of its experts; and the
 * results that a combine gives it, one for each choice of its tokens that was not dropped. Any of the
 * pointers may be NULL. */
weft_status weft_token_routes_sizes(const weft_token_routes* routes, int64_t* experts, int64_t* rows,
                                    int64_t* results, weft_error* error);
/* offsets: WEFT_I64, one more than experts: the rows of expert i of this rank are offsets[i] to offsets[i +
 * 1]. row_weights: one for each row, the weight with which its result is used; NULL: not wanted. */
weft_status weft_token_routes_rows(const weft_token_routes* routes, const weft_buffer* offsets,
                                   const weft_buffer* row_weights, weft_error* error);
/* Sends x: (tokens, width), of any dtype, to the experts. Writes rows: (rows, width), ordered by expert,
 * then by rank, token and choice. Collective: one exchange; each token travels once to each rank that has
 * one of its experts. If `transfer` is NULL, the function blocks until it is done. Otherwise it begins
 * *transfer, which weft_transfer_finish ends; x, rows and the routes must live until then, and nobody may
 * write x. Ranks of the same host read memory of weft_alloc in place. */
weft_status weft_dispatch_rows(const weft_token_routes* routes, const weft_matrix* x, const weft_matrix* rows,
                               weft_transfer** transfer, weft_error* error);
/* Sends rows: (rows, width) back, like weft_dispatch_rows. Writes results: (results, width), in an order that
 * weft_weighted_sum and weft_row_products know. */
weft_status weft_combine_rows(const weft_token_routes* routes, const weft_matrix* rows,
                              const weft_matrix* results, weft_transfer** transfer, weft_error* error);
/* y = the sum of weight * result over the choices of each token, in the order of the choices, in f32.
 * results: of weft_combine_rows, WEFT_F32 or WEFT_BF16; weights: (tokens, top_k), NULL: 1 each; y: (tokens,
 * width), of the dtype of results. */
weft_status weft_weighted_sum(const weft_token_routes* routes, const weft_matrix* results,
                              const weft_matrix* weights, const weft_matrix* y, weft_error* error);
/* dweights = the product of dy: (tokens, width) with the result of each choice; 0 for a dropped choice.
 * dweights: (tokens, top_k). */
weft_status weft_row_products(const weft_token_routes* routes, const weft_matrix* results,
                              const weft_matrix* dy, const weft_matrix* dweights, weft_error* error);

typedef int32_t weft_expert_kind;
enum {
  WEFT_EXPERT_SWIGLU = 0, /* down(silu(gate(x)) * up(x)) */
  WEFT_EXPERT_SILU = 1,   /* down(silu(up(x))); and so on */
  WEFT_EXPERT_GELU = 2,
  WEFT_EXPERT_RELU = 3
};
/* Experts one after the other, as matrices whose rows are those of all experts: gate and up: (experts *
 * hidden, dim); down: (experts * dim, hidden). WEFT_F32, or all WEFT_BF16. gate: NULL unless the kind is
 * WEFT_EXPERT_SWIGLU. For gradients, WEFT_F32; a NULL gradient is not wanted. */
typedef struct weft_expert_matrices {
  uint32_t struct_size;
  weft_expert_kind kind;
  int64_t experts;
  const weft_matrix *gate, *up, *down;
} weft_expert_matrices;
#define WEFT_EXPERT_MATRICES_INIT \
  { sizeof(weft_expert_matrices), WEFT_EXPERT_SWIGLU, 0, NULL, NULL, NULL }
/* The forward pass keeps these for the backward pass: each (rows, hidden), of the dtype of x. gate: NULL
 * unless the kind is WEFT_EXPERT_SWIGLU. */
typedef struct weft_expert_activations {
  uint32_t struct_size;
  const weft_matrix *gate, *up, *hidden;
} weft_expert_activations;
#define WEFT_EXPERT_ACTIVATIONS_INIT \
  { sizeof(weft_expert_activations), NULL, NULL, NULL }

/* y = the experts of x. x, y: (rows, dim), WEFT_F32, or WEFT_BF16 with weights in bf16. offsets: WEFT_I64, of
 * weft_token_routes_rows. Products take just the rows of each expert: nothing is padded. */
weft_status weft_experts_forward(weft_compute* compute, const weft_matrix* x, const weft_buffer* offsets,
                                 const weft_expert_matrices* weights, const weft_expert_activations* kept,
                                 const weft_matrix* y, weft_error* error);
/* The first half of the backward pass: dx from dy. x, kept: of the forward pass. Afterwards the gate and up
 * of `kept` are their gradients, which the second half needs. */
weft_status weft_experts_backward(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                  const weft_buffer* offsets, const weft_expert_matrices* weights,
                                  const weft_expert_activations* kept, const weft_matrix* dx,
                                  weft_error* error);
/* The second half: the gradients of the weights; if `accumulate` is true, added to what is there. dy, x,
 * kept: as the first half had them, and left them. weights_dtype: of the weights. */
weft_status weft_experts_weight_gradients(weft_compute* compute, const weft_matrix* dy, const weft_matrix* x,
                                          const weft_buffer* offsets, weft_dtype weights_dtype,
                                          const weft_expert_activations* kept,
                                          const weft_expert_matrices* gradients, bool accumulate,
                                          weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_TRAIN_EXPERTS_H */
