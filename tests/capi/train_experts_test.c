/* The parts of a mixture of experts from C, on plain arrays: ranks that divide the experts and the tokens
 * compute the results of plain loops on one rank. */
#define _POSIX_C_SOURCE 200809L /* barriers of pthread */
#include <math.h>
#include <stdlib.h>

#include "support.h"
#include "weft/weft_train.h"

enum { EXPERTS = 5, TOKENS = 6, TOP_K = 2, DIM = 3, HIDDEN = 4 }; /* TOKENS of each rank */

static double number(int stream, int i) { return sin(1.0 + stream * 17 + i * 3.7); }
static double logit(int token, int expert) { return number(1, token * EXPERTS + expert); }
static double x_of(int token, int c) { return number(2, token * DIM + c); }
static double up_of(int e, int h, int c) { return number(3, (e * HIDDEN + h) * DIM + c); }
static double down_of(int e, int c, int h) { return number(4, (e * DIM + c) * HIDDEN + h); }
static double dy_of(int token, int c) { return number(5, token * DIM + c); }

/* The two largest logits, and their softmax over these two. */
static void choose(int token, int chosen[TOP_K], double weights[TOP_K]) {
  chosen[0] = chosen[1] = -1;
  for (int k = 0; k < TOP_K; ++k)
    for (int e = 0; e < EXPERTS; ++e)
      if (e != chosen[0] && (chosen[k] < 0 || logit(token, e) > logit(token, chosen[k]))) chosen[k] = e;
  const double a = exp(logit(token, chosen[0])), b = exp(logit(token, chosen[1]));
  weights[0] = a / (a + b);
  weights[1] = b / (a + b);
}

/* relu(up x), and down of it. */
static double hidden_of(int e, int token, int h) {
  double sum = 0;
  for (int c = 0; c < DIM; ++c) sum += up_of(e, h, c) * x_of(token, c);
  return sum > 0 ? sum : 0;
}
static double result_of(int e, int token, int c) {
  double sum = 0;
  for (int h = 0; h < HIDDEN; ++h) sum += down_of(e, c, h) * hidden_of(e, token, h);
  return sum;
}

static void close_to(double got, double expected) {
  CHECK(fabs(got - expected) < 1e-5 * (1 + fabs(expected)));
}

static int idle = 0; /* the first rank has no experts */

static void mixture(rank_args* a) {
  weft_group* group = join(a, "ep", 0);
  weft_compute* compute = NULL;
  OK(weft_compute_create(a->context, NULL, &compute, &error));
  const int first_token = a->rank * TOKENS;
  float logits[TOKENS * EXPERTS], weights[TOKENS * TOP_K], x[TOKENS * DIM], y[TOKENS * DIM], dy[TOKENS * DIM];
  int32_t experts[TOKENS * TOP_K];
  for (int i = 0; i < TOKENS * EXPERTS; ++i) logits[i] = (float)logit(first_token + i / EXPERTS, i % EXPERTS);
  for (int i = 0; i < TOKENS * DIM; ++i) x[i] = (float)x_of(first_token + i / DIM, i % DIM);
  for (int i = 0; i < TOKENS * DIM; ++i) dy[i] = (float)dy_of(first_token + i / DIM, i % DIM);
  const weft_matrix of_logits = {logits, TOKENS, EXPERTS, WEFT_F32, WEFT_CPU},
                    of_experts = {experts, TOKENS, TOP_K, WEFT_I32, WEFT_CPU},
                    of_weights = {weights, TOKENS, TOP_K, WEFT_F32, WEFT_CPU},
                    of_x = {x, TOKENS, DIM, WEFT_F32, WEFT_CPU}, of_y = {y, TOKENS, DIM, WEFT_F32, WEFT_CPU},
                    of_dy = {dy, TOKENS, DIM, WEFT_F32, WEFT_CPU};
  OK(weft_route_tokens(&of_logits, NULL, NULL, &of_experts, &of_weights, &error));
  for (int t = 0; t < TOKENS; ++t) {
    int chosen[TOP_K];
    double expected[TOP_K];
    choose(first_token + t, chosen, expected);
    for (int k = 0; k < TOP_K; ++k) {
      CHECK(experts[t * TOP_K + k] == chosen[k]);
      close_to(weights[t * TOP_K + k], expected[k]);
    }
  }
  double counts[EXPERTS] = {0}, scores[EXPERTS] = {0}, z = 0, all = 0;
  const weft_buffer of_counts = {counts, EXPERTS, WEFT_F64, WEFT_CPU},
                    of_scores = {scores, EXPERTS, WEFT_F64, WEFT_CPU};
  OK(weft_router_sums(&of_logits, NULL, &of_experts, NULL, &of_counts, &of_scores, &z, &error));
  for (int e = 0; e < EXPERTS; ++e) all += counts[e];
  CHECK(all == TOKENS * TOP_K);
  all = 0;
  for (int e = 0; e < EXPERTS; ++e) all += scores[e];
  close_to(all, TOKENS);

  /* Rank r has the experts EXPERTS r / size to EXPERTS (r + 1) / size, of the ranks that have any. */
  int64_t first[MAX_RANKS + 1] = {0};
  for (int r = idle; r <= a->size; ++r) first[r] = EXPERTS * (r - idle) / (a->size - idle);
  const weft_buffer of_first = {first, a->size + 1, WEFT_I64, WEFT_CPU};
  weft_token_routes* routes = NULL;
  if (a->size > 1) {
    const int64_t moved = a->rank == 1 ? 1 : 0;
    first[1] += moved;
    CHECK_ERROR(
        weft_token_routes_create(compute, group, &of_experts, &of_weights, &of_first, &routes, &error),
        WEFT_MISMATCH,
        "weft_token_routes_create: first_experts on rank 1 differs from that on rank 0; expected the "
        "same on all ranks");
    first[1] -= moved;
  }
  OK(weft_token_routes_create(compute, group, &of_experts, &of_weights, &of_first, &routes, &error));
  int64_t own = 0, rows = 0, results = 0, offsets[EXPERTS + 1];
  OK(weft_token_routes_sizes(routes, &own, &rows, &results, &error));
  CHECK(own == first[a->rank + 1] - first[a->rank] && results == TOKENS * TOP_K);
  float row_weights[MAX_RANKS * TOKENS * TOP_K];
  const weft_buffer of_offsets = {offsets, own + 1, WEFT_I64, WEFT_CPU},
                    of_row_weights = {row_weights, rows, WEFT_F32, WEFT_CPU};
  OK(weft_token_routes_rows(routes, &of_offsets, &of_row_weights, &error));
  CHECK(offsets[0] == 0 && offsets[own] == rows);

  float came[MAX_RANKS * TOKENS * TOP_K * DIM], out[MAX_RANKS * TOKENS * TOP_K * DIM],
      up_kept[MAX_RANKS * TOKENS * TOP_K * HIDDEN], hidden_kept[MAX_RANKS * TOKENS * TOP_K * HIDDEN],
      back[TOKENS * TOP_K * DIM], dweights[TOKENS * TOP_K], dlogits[TOKENS * EXPERTS], dx[TOKENS * DIM],
      up[EXPERTS * HIDDEN * DIM], down[EXPERTS * DIM * HIDDEN], dup[EXPERTS * HIDDEN * DIM];
  for (int i = 0; i < (int)own * HIDDEN * DIM; ++i) {
    const int e = (int)first[a->rank] + i / (HIDDEN * DIM), at = i % (HIDDEN * DIM);
    up[i] = (float)up_of(e, at / DIM, at % DIM);
    down[i] = (float)down_of(e, at / HIDDEN, at % HIDDEN);
  }
  const weft_matrix of_came = {came, rows, DIM, WEFT_F32, WEFT_CPU},
                    of_out = {out, rows, DIM, WEFT_F32, WEFT_CPU},
                    of_up_kept = {up_kept, rows, HIDDEN, WEFT_F32, WEFT_CPU},
                    of_hidden_kept = {hidden_kept, rows, HIDDEN, WEFT_F32, WEFT_CPU},
                    of_back = {back, results, DIM, WEFT_F32, WEFT_CPU},
                    of_dweights = {dweights, TOKENS, TOP_K, WEFT_F32, WEFT_CPU},
                    of_dlogits = {dlogits, TOKENS, EXPERTS, WEFT_F32, WEFT_CPU},
                    of_dx = {dx, TOKENS, DIM, WEFT_F32, WEFT_CPU},
                    of_up = {up, own * HIDDEN, DIM, WEFT_F32, WEFT_CPU},
                    of_down = {down, own * DIM, HIDDEN, WEFT_F32, WEFT_CPU},
                    of_dup = {dup, own * HIDDEN, DIM, WEFT_F32, WEFT_CPU};
  weft_transfer* transfer = NULL;
  OK(weft_dispatch_rows(routes, &of_x, &of_came, &transfer, &error));
  OK(weft_transfer_finish(transfer, &error));
  weft_transfer_destroy(transfer);
  weft_expert_matrices matrices = WEFT_EXPERT_MATRICES_INIT, gradients = WEFT_EXPERT_MATRICES_INIT;
  matrices.kind = gradients.kind = WEFT_EXPERT_RELU;
  matrices.experts = gradients.experts = own;
  matrices.up = &of_up;
  matrices.down = &of_down;
  gradients.up = &of_dup;
  weft_expert_activations kept = WEFT_EXPERT_ACTIVATIONS_INIT;
  kept.up = &of_up_kept;
  kept.hidden = &of_hidden_kept;
  OK(weft_experts_forward(compute, &of_came, &of_offsets, &matrices, &kept, &of_out, &error));
  OK(weft_combine_rows(routes, &of_out, &of_back, NULL, &error));
  OK(weft_weighted_sum(routes, &of_back, &of_weights, &of_y, &error));
  OK(weft_row_products(routes, &of_back, &of_dy, &of_dweights, &error));
  for (int t = 0; t < TOKENS; ++t) {
    const int token = first_token + t;
    int chosen[TOP_K];
    double weight[TOP_K];
    choose(token, chosen, weight);
    for (int c = 0; c < DIM; ++c)
      close_to(y[t * DIM + c],
               weight[0] * result_of(chosen[0], token, c) + weight[1] * result_of(chosen[1], token, c));
    for (int k = 0; k < TOP_K; ++k) {
      double product = 0;
      for (int c = 0; c < DIM; ++c) product += dy_of(token, c) * result_of(chosen[k], token, c);
      close_to(dweights[t * TOP_K + k], product);
    }
  }

  /* Backward: the rows of dy times their weights, through the experts, and back. */
  float drows[MAX_RANKS * TOKENS * TOP_K * DIM];
  const weft_matrix of_drows = {drows, rows, DIM, WEFT_F32, WEFT_CPU};
  OK(weft_dispatch_rows(routes, &of_dy, &of_drows, NULL, &error));
  for (int i = 0; i < (int)rows * DIM; ++i) drows[i] *= row_weights[i / DIM];
  OK(weft_experts_backward(compute, &of_drows, &of_came, &of_offsets, &matrices, &kept, &of_out, &error));
  for (int i = 0; i < (int)own * HIDDEN * DIM; ++i) dup[i] = 1;
  OK(weft_experts_weight_gradients(compute, &of_drows, &of_came, &of_offsets, WEFT_F32, &kept, &gradients,
                                   true, &error));
  OK(weft_combine_rows(routes, &of_out, &of_back, NULL, &error));
  OK(weft_weighted_sum(routes, &of_back, NULL, &of_dx, &error));
  OK(weft_route_tokens_backward(&of_logits, NULL, &of_experts, &of_weights, &of_dweights, NULL, NULL, 0, 0,
                                &of_dlogits, NULL, &error));
  double expected_dup[EXPERTS * HIDDEN * DIM] = {0};
  for (int token = 0; token < a->size * TOKENS; ++token) {
    int chosen[TOP_K];
    double weight[TOP_K], expected_dx[DIM] = {0};
    choose(token, chosen, weight);
    for (int k = 0; k < TOP_K; ++k)
      for (int h = 0; h < HIDDEN; ++h) {
        if (hidden_of(chosen[k], token, h) <= 0) continue;
        double dhidden = 0;
        for (int c = 0; c < DIM; ++c) dhidden += weight[k] * dy_of(token, c) * down_of(chosen[k], c, h);
        for (int c = 0; c < DIM; ++c) {
          expected_dx[c] += dhidden * up_of(chosen[k], h, c);
          expected_dup[(chosen[k] * HIDDEN + h) * DIM + c] += dhidden * x_of(token, c);
        }
      }
    const int t = token - first_token;
    for (int c = 0; t >= 0 && t < TOKENS && c < DIM; ++c) close_to(dx[t * DIM + c], expected_dx[c]);
  }
  for (int i = 0; i < (int)own * HIDDEN * DIM; ++i)
    close_to(dup[i] - 1, expected_dup[first[a->rank] * HIDDEN * DIM + i]);
  for (int t = 0; t < TOKENS; ++t) { /* the weights of a token sum to 1, so its logits' gradients sum to 0 */
    double sum = 0;
    for (int e = 0; e < EXPERTS; ++e) sum += dlogits[t * EXPERTS + e];
    CHECK(fabs(sum) < 1e-5);
    int chosen[TOP_K];
    double weight[TOP_K];
    choose(first_token + t, chosen, weight);
    close_to(dlogits[t * EXPERTS + chosen[0]],
             weight[0] * weight[1] * (dweights[t * TOP_K] - dweights[t * TOP_K + 1]));
  }

  /* Wrong arguments. */
  matrices.kind = 4;
  CHECK_ERROR(weft_experts_forward(compute, &of_came, &of_offsets, &matrices, &kept, &of_out, &error),
              WEFT_BAD_ARGUMENT, "weft_experts_forward: weights->kind is 4; expected 0 to 3");
  matrices.kind = WEFT_EXPERT_RELU;
  matrices.experts = -1;
  if (a->size == 1)
    CHECK_ERROR(weft_experts_forward(compute, &of_came, &of_offsets, &matrices, &kept, &of_out, &error),
                WEFT_BAD_ARGUMENT,
                "weft_experts_forward: weights->up->rows is 20; expected a multiple of the -1 experts");
  weft_router_options options = WEFT_ROUTER_OPTIONS_INIT;
  options.scores = 2;
  CHECK_ERROR(weft_route_tokens(&of_logits, NULL, &options, &of_experts, &of_weights, &error),
              WEFT_BAD_ARGUMENT, "weft_route_tokens: options->scores is 2; expected 0 to 1");
  options.scores = WEFT_ROUTER_SIGMOID;
  options.bias = -1;
  CHECK_ERROR(weft_route_tokens(&of_logits, NULL, &options, &of_experts, &of_weights, &error),
              WEFT_BAD_ARGUMENT, "weft_route_tokens: options->bias is -1; expected 0 to 2");
  logits[7] = NAN;
  CHECK_ERROR(weft_route_tokens(&of_logits, NULL, NULL, &of_experts, &of_weights, &error), WEFT_BAD_ARGUMENT,
              "route_tokens: the logits of token 1 are not finite");
  if (a->size == 1)
    CHECK_ERROR(weft_token_routes_rows(routes, &of_counts, NULL, &error), WEFT_BAD_ARGUMENT,
                "weft_token_routes_rows: offsets is f64 (5); expected i64 (6)");
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_token_routes_destroy(routes);
  weft_group_destroy(group);
  weft_compute_destroy(compute);
}

int main(void) {
  for (int size = 1; size <= MAX_RANKS; ++size) run_ranks(size, mixture);
  idle = 1;
  for (int size = 2; size <= MAX_RANKS; ++size) run_ranks(size, mixture);
  return 0;
}
