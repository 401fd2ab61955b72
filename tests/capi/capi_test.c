/* weft.h from a C program: results, every error path, lifetimes in any order. Ranks are threads; a peer that
 * dies is a process. `capi_test` runs all tests; `capi_test NAME` one. */
#define _POSIX_C_SOURCE 200809L
#include "weft/weft.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <pthread.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h"

/* Results --------------------------------------------------------------------------------------------------
 */

static void results(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  int32_t rank = -1, size = -1;
  OK(weft_group_rank(group, &rank, &error));
  OK(weft_group_size(group, &size, &error));
  CHECK(rank == a->rank && size == a->size);

  const int64_t counts[] = {0, 1, 7, 1000, 100003};
  for (size_t k = 0; k < LENGTH(counts); ++k) {
    const int64_t n = counts[k];
    float* mine = NULL; /* shared memory and the heap, in turn */
    float* all = malloc(sizeof(float) * (size_t)(n * size + 1));
    OK(weft_alloc(a->context, sizeof(float) * (size_t)n, (void**)&mine, &error));
    for (int64_t i = 0; i < n; ++i) mine[i] = (float)((rank * 5 + i * 3) % 7);
    const weft_buffer in = f32(mine, n), out = f32(all, n * size);
    OK(weft_all_gather(group, &in, &out, NULL, NULL, &error));
    for (int r = 0; r < size; ++r)
      for (int64_t i = 0; i < n; ++i) CHECK(all[r * n + i] == (float)((r * 5 + i * 3) % 7));
    OK(weft_all_reduce(group, &in, &in, NULL, NULL, &error));
    for (int64_t i = 0; i < n; ++i) {
      float sum = 0;
      for (int r = 0; r < size; ++r) sum += (float)((r * 5 + i * 3) % 7);
      CHECK(mine[i] == sum);
    }
    OK(weft_free(a->context, mine, &error));
    free(all);
  }
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
}
static void test_results(void) {
  for (int n = 1; n <= MAX_RANKS; ++n) run_ranks(n, results);
}

static void reductions(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  const int32_t expected[] = {7 + 11, 9, 7, 11, 77, 2 * (7 + 11), 7 & 11, 7 | 11, 7 ^ 11, 1, 1, 0};
  for (weft_reduce_op op = WEFT_SUM; op <= WEFT_LOGICAL_XOR; ++op) {
    int32_t x = a->rank == 0 ? 7 : 11;
    const weft_buffer b = {&x, 1, WEFT_I32, WEFT_CPU};
    options.reduce_op = op;
    options.scale = op == WEFT_PREMUL_SUM ? 2 : 0;
    OK(weft_all_reduce(group, &b, &b, &options, NULL, &error));
    CHECK(x == expected[op]);
  }
  double y = a->rank + 0.5;
  const weft_buffer b = {&y, 1, WEFT_F64, WEFT_CPU};
  options = (weft_call_options)WEFT_CALL_OPTIONS_INIT;
  options.order = WEFT_ORDER_CANONICAL;
  OK(weft_all_reduce(group, &b, &b, &options, NULL, &error));
  CHECK(y == 2);
  weft_group_destroy(group);
}
static void test_reductions(void) { run_ranks(2, reductions); }

/* Works ----------------------------------------------------------------------------------------------------
 */

static void works(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  float x[3] = {1, 2, 3}, y[3] = {10, 20, 30};
  const weft_buffer bx = f32(x, 3), by = f32(y, 3);
  weft_work *first = NULL, *second = NULL, *third = NULL;
  bool done = true;

  if (a->rank == 0) {
    OK(weft_all_reduce(group, &bx, &bx, NULL, &first, &error));
    OK(weft_work_done(first, &done, &error));
    CHECK(!done); /* rank 1 has not even called it */
    done = true;
    OK(weft_work_wait_for(first, 5 * MS, &done, &error));
    CHECK(!done);
    done = true;
    OK(weft_work_wait_for(first, 0, &done, &error));
    CHECK(!done);
    pthread_barrier_wait(a->meet);
  } else {
    pthread_barrier_wait(a->meet);
    OK(weft_all_reduce(group, &bx, &bx, NULL, &first, &error));
  }
  OK(weft_all_reduce(group, &by, &by, NULL, &second, &error));
  OK(weft_barrier(group, NULL, &third, &error));
  OK(weft_work_wait(third, &error)); /* the last first */
  OK(weft_work_wait(second, &error));
  OK(weft_work_wait_for(first, 20000 * MS, &done, &error));
  CHECK(done);
  done = false;
  OK(weft_work_done(first, &done, &error)); /* again */
  CHECK(done);
  OK(weft_work_wait(first, &error));
  CHECK(x[0] == 2 && x[1] == 4 && x[2] == 6 && y[0] == 20 && y[1] == 40 && y[2] == 60);
  weft_work_destroy(first);
  weft_work_destroy(second);
  weft_group_destroy(group); /* before its last Work */
  weft_work_destroy(third);
}
static void test_works(void) { run_ranks(2, works); }

/* More calls in flight than there are slots, finished handles kept. */
static void many_works(rank_args* a) {
  enum { CALLS = 200 };
  weft_group* group = join(a, "world", 20000 * MS);
  static float x[2][CALLS];
  weft_work* work[CALLS];
  for (int k = 0; k < CALLS; ++k) {
    const weft_buffer b = f32(&x[a->rank][k], 1);
    x[a->rank][k] = (float)(k + a->rank);
    OK(weft_all_reduce(group, &b, &b, NULL, &work[k], &error));
  }
  for (int k = CALLS; k-- > 0;) {
    OK(weft_work_wait(work[k], &error));
    CHECK(x[a->rank][k] == (float)(2 * k + 1));
  }
  for (int k = 0; k < CALLS; ++k) weft_work_destroy(work[k]);
  weft_group_destroy(group);
}
static void test_many_works(void) { run_ranks(2, many_works); }

/* A context, a store and a group may be destroyed before objects that were made with them. */
static void test_lifetimes(void) {
  weft_context* context = NULL;
  weft_store* store = NULL;
  weft_group* group = NULL;
  weft_work* work = NULL;
  int32_t size = 0;
  float x = 4;
  const weft_buffer b = f32(&x, 1);
  void *shared = NULL, *kept = NULL, *nothing = NULL;
  OK(weft_context_create(NULL, &context, &error));
  OK(weft_store_create_local(&store, &error));
  OK(weft_group_create(context, store, 0, 1, NULL, &group, &error));
  OK(weft_alloc(context, 100, &shared, &error));
  OK(weft_alloc(context, 100, &kept, &error));
  OK(weft_alloc(context, 0, &nothing, &error));
  CHECK(shared != NULL && kept != NULL && nothing != NULL && shared != kept && kept != nothing);
  memset(shared, 1, 100);
  OK(weft_free(context, shared, &error));
  OK(weft_free(context, NULL, &error));
  weft_store_destroy(store);
  weft_context_destroy(context);
  memset(kept, 1, 100); /* the group keeps the context, and that its memory */
  OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
  weft_group_destroy(group);
  OK(weft_work_wait(work, &error));
  CHECK(x == 4);
  weft_work_destroy(work);

  OK(weft_context_create(NULL, &context, &error));
  OK(weft_group_create(context, NULL, 0, 1, NULL, &group, &error)); /* one rank meets nobody */
  OK(weft_group_size(group, &size, &error));
  CHECK(size == 1);
  weft_context_destroy(context);
  weft_group_destroy(group);

  weft_context_destroy(NULL);
  weft_store_destroy(NULL);
  weft_group_destroy(NULL);
  weft_work_destroy(NULL);
}

/* Wrong arguments ------------------------------------------------------------------------------------------
 */

static void test_null_arguments(void) {
  weft_context* c = NULL;
  weft_store* s = NULL;
  weft_group* g = NULL;
  weft_work* w = NULL;
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  void* data = NULL;
  bool yes = false;
  int32_t number = 0;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  CHECK_ERROR(weft_context_create(NULL, NULL, &error), bad, "weft_context_create: context is NULL");
  CHECK_ERROR(weft_store_create_local(NULL, &error), bad, "weft_store_create_local: store is NULL");
  CHECK_ERROR(weft_alloc(NULL, 1, &data, &error), bad, "weft_alloc: context is NULL");
  CHECK_ERROR(weft_free(NULL, NULL, &error), bad, "weft_free: context is NULL");
  CHECK_ERROR(weft_group_from_env(NULL, NULL, &g, &error), bad, "weft_group_from_env: context is NULL");
  CHECK_ERROR(weft_group_create(NULL, s, 0, 1, NULL, &g, &error), bad, "weft_group_create: context is NULL");
  CHECK_ERROR(weft_group_rank(NULL, &number, &error), bad, "weft_group_rank: group is NULL");
  CHECK_ERROR(weft_group_size(NULL, &number, &error), bad, "weft_group_size: group is NULL");
  CHECK_ERROR(weft_group_abort(NULL, "", &error), bad, "weft_group_abort: group is NULL");
  CHECK_ERROR(weft_group_quiesce(NULL, 0, &yes, &error), bad, "weft_group_quiesce: group is NULL");
  CHECK_ERROR(weft_group_shrink(NULL, 0, &g, &error), bad, "weft_group_shrink: group is NULL");
  CHECK_ERROR(weft_group_parent_rank(NULL, 0, &number, &error), bad, "weft_group_parent_rank: group is NULL");
  CHECK_ERROR(weft_all_reduce(NULL, &b, &b, NULL, &w, &error), bad, "weft_all_reduce: group is NULL");
  CHECK_ERROR(weft_all_gather(NULL, &b, &b, NULL, &w, &error), bad, "weft_all_gather: group is NULL");
  CHECK_ERROR(weft_barrier(NULL, NULL, &w, &error), bad, "weft_barrier: group is NULL");
  CHECK_ERROR(weft_work_wait(NULL, &error), bad, "weft_work_wait: work is NULL");
  CHECK_ERROR(weft_work_wait_for(NULL, 0, &yes, &error), bad, "weft_work_wait_for: work is NULL");
  CHECK_ERROR(weft_work_done(NULL, &yes, &error), bad, "weft_work_done: work is NULL");

  OK(weft_context_create(NULL, &c, &error));
  CHECK_ERROR(weft_alloc(c, 1, NULL, &error), bad, "weft_alloc: data is NULL");
  CHECK_ERROR(weft_group_from_env(c, NULL, NULL, &error), bad, "weft_group_from_env: group is NULL");
  CHECK_ERROR(weft_group_create(c, s, 0, 1, NULL, NULL, &error), bad, "weft_group_create: group is NULL");
  CHECK_ERROR(weft_group_create(c, NULL, 0, 2, NULL, &g, &error), bad, "weft_group_create: store is NULL");
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
  CHECK_ERROR(weft_group_rank(g, NULL, &error), bad, "weft_group_rank: rank is NULL");
  CHECK_ERROR(weft_group_size(g, NULL, &error), bad, "weft_group_size: size is NULL");
  CHECK_ERROR(weft_group_abort(g, NULL, &error), bad, "weft_group_abort: why is NULL");
  CHECK_ERROR(weft_group_quiesce(g, 0, NULL, &error), bad, "weft_group_quiesce: quiet is NULL");
  CHECK_ERROR(weft_group_shrink(g, 0, NULL, &error), bad, "weft_group_shrink: survivors is NULL");
  CHECK_ERROR(weft_group_parent_rank(g, 0, NULL, &error), bad, "weft_group_parent_rank: parent_rank is NULL");
  CHECK_ERROR(weft_all_reduce(g, NULL, &b, NULL, &w, &error), bad, "weft_all_reduce: in is NULL");
  CHECK_ERROR(weft_all_reduce(g, &b, NULL, NULL, &w, &error), bad, "weft_all_reduce: out is NULL");
  CHECK_ERROR(weft_all_gather(g, NULL, &b, NULL, &w, &error), bad, "weft_all_gather: in is NULL");
  CHECK_ERROR(weft_all_gather(g, &b, NULL, NULL, &w, &error), bad, "weft_all_gather: out is NULL");
  CHECK(w == NULL); /* outputs are written on success only */
  OK(weft_barrier(g, NULL, &w, &error));
  CHECK_ERROR(weft_work_wait_for(w, 0, NULL, &error), bad, "weft_work_wait_for: done is NULL");
  CHECK_ERROR(weft_work_done(w, NULL, &error), bad, "weft_work_done: done is NULL");
  CHECK_ERROR(weft_work_wait_for(w, -1, &yes, &error), bad,
              "weft_work_wait_for: limit_ns is -1; expected 0 or more");
  CHECK_ERROR(weft_group_quiesce(g, -2, &yes, &error), bad,
              "weft_group_quiesce: limit_ns is -2; expected 0 or more");
  weft_work_destroy(w);
  weft_group_destroy(g);
  weft_context_destroy(c);

  CHECK(weft_work_wait(NULL, NULL) == bad); /* without an error the status is all there is */
}

static void* no_memory(void* data, size_t bytes, size_t alignment) {
  (void)data, (void)bytes, (void)alignment;
  return NULL;
}
static void test_wrong_arguments(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  float x[4] = {0};
  void* data = NULL;
  const weft_buffer good = f32(x, 1);
  weft_buffer b = good;
  const weft_status bad = WEFT_BAD_ARGUMENT;

  weft_context_options co = WEFT_CONTEXT_OPTIONS_INIT;
  co.log_level = 4;
  CHECK_ERROR(weft_context_create(&co, &c, &error), bad,
              "weft_context_create: options->log_level is 4; expected 0 to 3");
  co.log_level = WEFT_LOG_WARNING;
  co.log_levels = "store=loud";
  CHECK_ERROR(
      weft_context_create(&co, &c, &error), bad,
      "context: log_levels is \"store=loud\"; \"loud\" is no level; expected error, warning, info or debug, "
      "and for single layers layer=level, as in info,store=debug");
  co.log_levels = NULL;
  co.segment_bytes = SIZE_MAX;
  CHECK_ERROR(weft_context_create(&co, &c, &error), bad,
              "context: segment_bytes is 18446744073709551615; expected at most 2^62 = 4611686018427387904");
  co.segment_bytes = 0;
  co.allocator.allocate = no_memory;
  CHECK_ERROR(weft_context_create(&co, &c, &error), bad,
              "context: allocator.deallocate is null; expected a function, since allocator.allocate is one");
  CHECK(c == NULL);
  OK(weft_context_create(NULL, &c, &error));
  CHECK_ERROR(weft_free(c, x, &error), bad,
              "*which weft_alloc of this context did not allocate, or is freed already");
  OK(weft_alloc(c, 1, &data, &error));
  OK(weft_free(c, data, &error));
  CHECK_ERROR(weft_free(c, data, &error), bad, "*weft_free: data is 0x");
  data = NULL;
  CHECK_ERROR(weft_alloc(c, SIZE_MAX - 5, &data, &error), WEFT_SYSTEM, "*18446744073709551610");
  CHECK(data == NULL);

  weft_group_options go = WEFT_GROUP_OPTIONS_INIT;
  go.deadline_ns = -1;
  CHECK_ERROR(weft_group_create(c, NULL, 0, 1, &go, &g, &error), bad,
              "weft_group_create: options->deadline_ns is -1; expected 0 or more");
  go.deadline_ns = 0;
  go.backend = "no-such-transport";
  CHECK_ERROR(weft_group_create(c, NULL, 0, 1, &go, &g, &error), WEFT_UNSUPPORTED, "*no-such-transport");
  go.backend = NULL;
  go.name = "mine";
  CHECK_ERROR(weft_group_create(c, NULL, 1, 1, &go, &g, &error), bad,
              "group \"mine\": rank is 1; expected 0 to 0 (size 1)");
  CHECK_ERROR(weft_group_create(c, NULL, 0, 0, &go, &g, &error), bad,
              "group \"mine\": size is 0; expected 1 or more");
  CHECK(g == NULL);
  OK(weft_group_create(c, NULL, 0, 1, &go, &g, &error));

  weft_call_options o = WEFT_CALL_OPTIONS_INIT;
  o.reduce_op = 13;
  CHECK_ERROR(weft_all_reduce(g, &good, &good, &o, NULL, &error), bad,
              "weft_all_reduce: options->reduce_op is 13; expected 0 (WEFT_SUM) to 12 (WEFT_USER)");
  o.reduce_op = WEFT_SUM;
  o.scale = 2;
  CHECK_ERROR(weft_all_reduce(g, &good, &good, &o, NULL, &error), bad,
              "weft_all_reduce: options->scale is 2; expected 0 unless reduce_op is WEFT_PREMUL_SUM");
  o.scale = 0;
  o.order = -1;
  CHECK_ERROR(weft_all_gather(g, &good, &good, &o, NULL, &error), bad,
              "weft_all_gather: options->order is -1; expected WEFT_ORDER_NATIVE or WEFT_ORDER_CANONICAL");
  o.order = WEFT_ORDER_NATIVE;
  o.deadline_ns = -7;
  CHECK_ERROR(weft_barrier(g, &o, NULL, &error), bad,
              "weft_barrier: options->deadline_ns is -7; expected 0 or more");

  b.count = -1;
  CHECK_ERROR(weft_all_reduce(g, &b, &good, NULL, NULL, &error), bad,
              "weft_all_reduce: in->count is -1; expected 0 or more");
  b = good;
  b.dtype = 17;
  CHECK_ERROR(weft_all_reduce(g, &good, &b, NULL, NULL, &error), bad,
              "weft_all_reduce: out->dtype is 17; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  b.dtype = -1;
  CHECK_ERROR(weft_all_gather(g, &b, &good, NULL, NULL, &error), bad,
              "weft_all_gather: in->dtype is -1; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  b = good;
  b.device = -3;
  CHECK_ERROR(weft_all_reduce(g, &b, &good, NULL, NULL, &error), bad,
              "weft_all_reduce: in->device is -3; expected WEFT_CPU or WEFT_CUDA(index)");

  /* Errors of the call itself have the call's text. */
  b = good;
  b.device = WEFT_CUDA(3);
  CHECK_ERROR(weft_all_reduce(g, &b, &good, NULL, NULL, &error), WEFT_UNSUPPORTED,
              "all_reduce: in is on cuda:3; backend shm moves cpu memory [group \"mine\", rank 0]");
  b = f32(NULL, 2);
  CHECK_ERROR(weft_all_reduce(g, &b, &b, NULL, NULL, &error), bad,
              "all_reduce: in is null; expected 2 elements [group \"mine\", rank 0]");
  b = f32(x, 2);
  CHECK_ERROR(
      weft_all_gather(g, &good, &b, NULL, NULL, &error), bad,
      "all_gather: out has 2 elements; expected 1 (in) x 1 (group size) = 1 [group \"mine\", rank 0]");
  weft_error e = WEFT_ERROR_INIT;
  CHECK(weft_all_gather(g, &good, &b, NULL, NULL, &e) == bad);
  CHECK(e.op == WEFT_OP_ALL_GATHER && e.call == WEFT_NO_CALL && e.rank_count == 0 && e.quiesced);
  CHECK(e.ranks[0] == -1 && e.ranks[WEFT_ERROR_RANKS - 1] == -1);
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* Structs of other versions --------------------------------------------------------------------------------
 */

static void test_struct_sizes(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  const weft_status bad = WEFT_BAD_ARGUMENT;

  weft_context_options raw_context;
  memset(&raw_context, 0, sizeof raw_context); /* without its initialiser */
  CHECK_ERROR(weft_context_create(&raw_context, &c, &error), bad,
              "weft_context_create: options->struct_size is 0; expected 64: initialise it with "
              "WEFT_CONTEXT_OPTIONS_INIT");
  /* A program of version 0.1, whose options end before log_levels: the memory behind them is the
   * program's. */
  memset(&raw_context, 0x5a, sizeof raw_context);
  raw_context.struct_size = 24;
  raw_context.log_level = WEFT_LOG_WARNING;
  raw_context.log = NULL;
  OK(weft_context_create(&raw_context, &c, &error));
  weft_context_destroy(c);
  OK(weft_context_create(NULL, &c, &error));
  weft_group_options raw_group;
  memset(&raw_group, 0x5a, sizeof raw_group);
  CHECK_ERROR(weft_group_create(c, NULL, 0, 1, &raw_group, &g, &error), bad,
              "weft_group_create: options->struct_size is 1515870810; expected 48: initialise it with "
              "WEFT_GROUP_OPTIONS_INIT");
  CHECK_ERROR(weft_group_from_env(c, &raw_group, &g, &error), bad,
              "weft_group_from_env: options->struct_size is 1515870810; expected 48: initialise it with "
              "WEFT_GROUP_OPTIONS_INIT");
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));

  /* A program of a later version, whose options have grown. */
  struct {
    weft_call_options known;
    int64_t later;
  } newer = {WEFT_CALL_OPTIONS_INIT, 0};
  newer.known.struct_size = sizeof newer;
  OK(weft_barrier(g, &newer.known, NULL, &error));
  newer.later = 1;
  CHECK_ERROR(weft_barrier(g, &newer.known, NULL, &error), WEFT_UNSUPPORTED,
              "weft_barrier: options has 72 bytes with something set beyond the 64 that weft " WEFT_VERSION
              " knows");
  newer.known.struct_size = 31;
  CHECK_ERROR(
      weft_barrier(g, &newer.known, NULL, &error), bad,
      "weft_barrier: options->struct_size is 31; expected 64: initialise it with WEFT_CALL_OPTIONS_INIT");

  /* An error without its initialiser gets a code and no text, a line on stderr says so, and the call is not
   * made. */
  weft_error raw;
  memset(&raw, 0, sizeof raw);
  raw.code = -9;
  CHECK(weft_barrier(g, NULL, NULL, &raw) == bad && raw.code == bad && raw.text[0] == '\0');
  /* An error of a later version keeps the fields that this library does not know. */
  struct {
    weft_error known;
    int64_t later;
  } wider = {WEFT_ERROR_INIT, 77};
  wider.known.struct_size = sizeof wider;
  CHECK(weft_barrier(NULL, NULL, NULL, &wider.known) == bad && wider.later == 77);
  CHECK(strcmp(wider.known.text, "weft_barrier: group is NULL") == 0);
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* A text longer than its place ends in "...", and not within a character. */
static void test_long_texts(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  char why[3000];
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  OK(weft_context_create(NULL, &c, &error));
  for (int shift = 0; shift < 3; ++shift) {
    memset(why, 'a', (size_t)shift);
    for (size_t i = (size_t)shift; i + 3 < sizeof why; i += 3)
      memcpy(why + i, "\xe2\x82\xac", 4); /* a euro sign */
    OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
    OK(weft_group_abort(g, why, &error));
    weft_error e = WEFT_ERROR_INIT;
    CHECK(weft_all_reduce(g, &b, &b, NULL, NULL, &e) == WEFT_ABORTED);
    const size_t n = strlen(e.text);
    CHECK(n >= WEFT_ERROR_TEXT - 4 && n < WEFT_ERROR_TEXT);
    CHECK(strcmp(e.text + n - 6, "\xe2\x82\xac...") == 0);
    weft_group_destroy(g);
  }
  weft_context_destroy(c);
}

static void test_names(void) {
  CHECK(strcmp(weft_version(), WEFT_VERSION) == 0);
  CHECK(weft_version_number() == WEFT_VERSION_NUMBER && WEFT_VERSION_NUMBER >= 1000);
  CHECK(strcmp(weft_op_name(WEFT_OP_NONE), "none") == 0);
  CHECK(strcmp(weft_op_name(WEFT_OP_EXSCAN), "exscan") == 0);
  CHECK(strcmp(weft_op_name(-1), "?") == 0 && strcmp(weft_op_name(1000), "?") == 0);
  CHECK(strcmp(weft_status_name(WEFT_OK), "ok") == 0);
  CHECK(strcmp(weft_status_name(WEFT_BAD_ARGUMENT), "bad_argument") == 0);
  CHECK(strcmp(weft_status_name(WEFT_PEER_LOST), "peer_lost") == 0);
  CHECK(strcmp(weft_status_name(WEFT_SYSTEM), "system") == 0);
  CHECK(strcmp(weft_status_name(WEFT_CORRUPT), "corrupt") == 0);
  CHECK(strcmp(weft_status_name(-1), "?") == 0 && strcmp(weft_status_name(WEFT_CORRUPT + 1), "?") == 0);
}

/* Failures -------------------------------------------------------------------------------------------------
 */

/* Rank 1 leaves while rank 0 waits for it. */
static void peer_leaves(rank_args* a) {
  weft_group* group = join(a, "tp", 20000 * MS);
  OK(weft_barrier(group, NULL, NULL, &error));
  if (a->rank == 0) {
    float x = 1;
    const weft_buffer b = f32(&x, 1);
    weft_work* work = NULL;
    weft_error e = WEFT_ERROR_INIT, again = WEFT_ERROR_INIT;
    bool done = false, quiet = false;
    OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
    pthread_barrier_wait(a->meet);
    CHECK(weft_work_wait(work, &e) == WEFT_PEER_LOST && e.code == WEFT_PEER_LOST);
    CHECK(e.rank_count == 1 && e.ranks[0] == 1 && e.ranks[1] == -1);
    CHECK(strstr(e.text, "rank 1") != NULL && strstr(e.text, "[group \"tp\", rank 0") != NULL);
    /* The handle returns the error again and again; so does the group. */
    CHECK(weft_work_wait(work, &again) == WEFT_PEER_LOST && strcmp(again.text, e.text) == 0);
    CHECK(weft_work_done(work, &done, NULL) == WEFT_PEER_LOST && !done);
    CHECK(weft_work_wait_for(work, 0, &done, NULL) == WEFT_PEER_LOST && !done);
    CHECK(weft_barrier(group, NULL, NULL, NULL) == WEFT_PEER_LOST);
    OK(weft_group_quiesce(group, 5000 * MS, &quiet, &error));
    CHECK(quiet);
    weft_work_destroy(work);
  } else {
    pthread_barrier_wait(a->meet);
  }
  weft_group_destroy(group);
}
static void test_peer_leaves(void) { run_ranks(2, peer_leaves); }

/* Ranks 1 and 2 never call it. */
static void nobody_comes(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  if (a->rank == 0) {
    float x = 1;
    const weft_buffer b = f32(&x, 1);
    weft_call_options options = WEFT_CALL_OPTIONS_INIT;
    weft_error e = WEFT_ERROR_INIT;
    options.deadline_ns = 50 * MS;
    CHECK(weft_all_reduce(group, &b, &b, &options, NULL, &e) == WEFT_TIMEOUT);
    CHECK(e.op == WEFT_OP_ALL_REDUCE && e.call == 0);
    CHECK(e.rank_count == 2 && e.ranks[0] == 1 && e.ranks[1] == 2 && e.ranks[2] == -1);
    CHECK(strstr(e.text, "all_reduce: not finished within 0.05 s") == e.text);
  }
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
static void test_timeout(void) { run_ranks(3, nobody_comes); }

/* The group cannot be made: rank 1 does not come. */
static void test_group_timeout(void) {
  weft_context* c = NULL;
  weft_store* s = NULL;
  weft_group* g = NULL;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  options.deadline_ns = 100 * MS;
  options.name = "late";
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_store_create_local(&s, &error));
  CHECK_ERROR(weft_group_create(c, s, 0, 2, &options, &g, &error), WEFT_TIMEOUT,
              "*rank 1 did not join within");
  CHECK(g == NULL);
  weft_store_destroy(s);
  weft_context_destroy(c);
}

static void mismatch(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  float x[2] = {1, 2};
  const weft_buffer b = f32(x, a->rank == 0 ? 1 : 2);
  weft_error e = WEFT_ERROR_INIT;
  CHECK(weft_all_reduce(group, &b, &b, NULL, NULL, &e) == WEFT_MISMATCH);
  CHECK(strstr(e.text, "rank 0") != NULL && strstr(e.text, "rank 1") != NULL);
  weft_group_destroy(group);
}
static void test_mismatch(void) { run_ranks(2, mismatch); }

/* In the last call two ranks are roots, which wait for nobody. Leaving reports the mismatch. */
static void leaves(rank_args* a) {
  float x = (float)a->rank;
  const weft_buffer b = f32(&x, 1);
  for (int alike = 0; alike < 2; ++alike) {
    weft_group* group = join(a, "world", 20000 * MS);
    weft_error e = WEFT_ERROR_INIT;
    weft_status status = weft_broadcast(group, &b, &b, alike ? 1 : a->rank, NULL, NULL, &e);
    if (status == WEFT_OK) status = weft_group_leave(group, 0, &e);
    CHECK(status == (alike ? WEFT_OK : WEFT_MISMATCH));
    CHECK(alike || (strstr(e.text, "broadcast f32 x1 root 0 [call 0]") &&
                    strstr(e.text, "broadcast f32 x1 root 1 [call 0]")));
    CHECK_ERROR(weft_group_leave(group, -1, &error), WEFT_BAD_ARGUMENT,
                "weft_group_leave: deadline_ns is -1; expected 0 or more");
    if (alike)
      CHECK_ERROR(weft_barrier(group, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
                  "barrier: empty ProcessGroup: it was made by default, moved from, left, or is of a rank "
                  "without a color in split()");
    weft_group_destroy(group);
  }
}
static void test_leave(void) { run_ranks(2, leaves); }

static void aborts(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  weft_error e = WEFT_ERROR_INIT;
  bool quiet = false;
  OK(weft_group_quiesce(group, 0, &quiet, &error));
  CHECK(quiet); /* nothing has failed */
  if (a->rank == 1) OK(weft_group_abort(group, "enough", &error));
  CHECK(weft_barrier(group, NULL, NULL, &e) == WEFT_ABORTED);
  CHECK(strstr(e.text, "barrier: aborted by rank 1: enough") == e.text && e.ranks[0] == 1);
  CHECK(e.op == WEFT_OP_BARRIER && e.rank_count == 1 && e.quiesced);
  weft_group_destroy(group);
}
static void test_abort(void) { run_ranks(2, aborts); }

/* Rank 0 leaves. The others continue without it, and destroy the old group before the new one. */
static void shrinks(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  weft_group* rest = NULL;
  weft_error e = WEFT_ERROR_INIT;
  int32_t rank = -1, size = -1, parent = 7;
  OK(weft_barrier(group, NULL, NULL, &error));
  OK(weft_group_parent_rank(group, 0, &parent, &error));
  CHECK(parent == -1);
  if (a->rank == 0) {
    weft_group_destroy(group);
    return;
  }
  CHECK(weft_barrier(group, NULL, NULL, &e) == WEFT_PEER_LOST);
  CHECK(e.op == WEFT_OP_BARRIER && e.call == 1 && e.rank_count == 1 && e.ranks[0] == 0);
  CHECK_ERROR(weft_group_shrink(group, -1, &rest, &error), WEFT_BAD_ARGUMENT,
              "weft_group_shrink: limit_ns is -1; expected 0 or more");
  CHECK(rest == NULL);
  OK(weft_group_shrink(group, 5000 * MS, &rest, &error));
  weft_group_destroy(group);
  OK(weft_group_rank(rest, &rank, &error));
  OK(weft_group_size(rest, &size, &error));
  CHECK(rank == a->rank - 1 && size == 2);
  for (int32_t r = 0; r < size; ++r) {
    OK(weft_group_parent_rank(rest, r, &parent, &error));
    CHECK(parent == r + 1);
  }
  CHECK_ERROR(weft_group_parent_rank(rest, 2, &parent, &error), WEFT_BAD_ARGUMENT,
              "weft_group_parent_rank: rank is 2; expected 0 to 1");
  float x = (float)a->rank;
  const weft_buffer b = f32(&x, 1);
  OK(weft_all_reduce(rest, &b, &b, NULL, NULL, &error));
  CHECK(x == 3);
  weft_group_destroy(rest);
}
static void test_shrink(void) { run_ranks(3, shrinks); }

/* Destroying a Work in flight aborts the group: the other rank gets the reason, and no rank hangs. */
static void dropped_work(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  float x = 1;
  const weft_buffer b = f32(&x, 1);
  if (a->rank == 0) {
    weft_work* work = NULL;
    OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
    weft_work_destroy(work);
    CHECK_ERROR(weft_barrier(group, NULL, NULL, &error), WEFT_ABORTED, "*rank 0 dropped the Work of a call");
    pthread_barrier_wait(a->meet);
  } else {
    pthread_barrier_wait(a->meet);
    /* The input that rank 0 had given already may be enough for this call, but not for another. */
    const weft_status status = weft_all_reduce(group, &b, &b, NULL, NULL, NULL);
    CHECK(status == WEFT_ABORTED || (status == WEFT_OK && x == 2));
    CHECK_ERROR(weft_barrier(group, NULL, NULL, &error), WEFT_ABORTED,
                "*rank 0 dropped the Work of a call in flight");
  }
  weft_group_destroy(group);
}
static void test_dropped_work(void) { run_ranks(2, dropped_work); }

/* Processes ------------------------------------------------------------------------------------------------
 */

/* A child may not use its parent's handles; it may make its own. */
static void test_fork(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  int status = 0;
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    void* data = NULL;
    weft_group* other = NULL;
    weft_context* own = NULL;
    CHECK_ERROR(weft_barrier(g, NULL, NULL, &error), WEFT_UNSUPPORTED, "*forked");
    CHECK_ERROR(weft_alloc(c, 1, &data, &error), WEFT_UNSUPPORTED, "*forked");
    CHECK_ERROR(weft_group_from_env(c, NULL, &other, &error), WEFT_UNSUPPORTED, "*forked");
    OK(weft_context_create(NULL, &own, &error));
    OK(weft_alloc(own, 1, &data, &error));
    weft_context_destroy(own);
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child && WIFEXITED(status) && WEXITSTATUS(status) == 0);
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* Two processes make a group by torchrun's variables; then rank 1 is killed. */
static void process_rank(int rank, const char* port, bool dies) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  float x = (float)(rank + 1);
  const weft_buffer b = f32(&x, 1);
  setenv("RANK", rank == 0 ? "0" : "1", 1);
  setenv("WORLD_SIZE", "2", 1);
  setenv("MASTER_ADDR", "127.0.0.1", 1);
  setenv("MASTER_PORT", port, 1);
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_from_env(c, NULL, &g, &error));
  OK(weft_all_reduce(g, &b, &b, NULL, NULL, &error));
  CHECK(x == 3);
  if (dies && rank == 1) raise(SIGKILL);
  if (dies) {
    weft_error e = WEFT_ERROR_INIT;
    CHECK(weft_barrier(g, NULL, NULL, &e) == WEFT_PEER_LOST);
    CHECK(e.rank_count == 1 && e.ranks[0] == 1);
  }
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* A port that is free now. */
static void free_port(char* text, size_t bytes) {
  struct sockaddr_in at;
  socklen_t length = sizeof at;
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  memset(&at, 0, sizeof at);
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(s >= 0 && bind(s, (struct sockaddr*)&at, sizeof at) == 0);
  CHECK(getsockname(s, (struct sockaddr*)&at, &length) == 0);
  snprintf(text, bytes, "%d", ntohs(at.sin_port));
  close(s);
}

static void test_environment(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  int32_t size = 0;
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_from_env(c, NULL, &g, &error)); /* nothing is set: alone */
  OK(weft_group_size(g, &size, &error));
  CHECK(size == 1);
  weft_group_destroy(g);
  g = NULL;
  setenv("RANK", "zero", 1);
  setenv("WORLD_SIZE", "2", 1);
  CHECK_ERROR(weft_group_from_env(c, NULL, &g, &error), WEFT_BAD_ARGUMENT, "*RANK is \"zero\"");
  CHECK(g == NULL);
  unsetenv("RANK");
  unsetenv("WORLD_SIZE");
  weft_context_destroy(c);

  char port[16];
  free_port(port, sizeof port);
  for (int dies = 0; dies < 2; ++dies) {
    pid_t children[2];
    for (int r = 0; r < 2; ++r) {
      children[r] = fork();
      CHECK(children[r] >= 0);
      if (children[r] == 0) {
        process_rank(r, port, dies != 0);
        _exit(0);
      }
    }
    for (int r = 0; r < 2; ++r) {
      int status = 0;
      CHECK(waitpid(children[r], &status, 0) == children[r]);
      if (dies && r == 1)
        CHECK(WIFSIGNALED(status) && WTERMSIG(status) == SIGKILL);
      else
        CHECK(WIFEXITED(status) && WEXITSTATUS(status) == 0);
    }
  }
}

/* The log --------------------------------------------------------------------------------------------------
 */

typedef struct lines {
  int count;
  weft_log_level highest;
} lines;
static void keep_line(void* data, weft_log_level level, const char* line) {
  lines* l = data;
  CHECK(line != NULL && strchr(line, '\n') == NULL);
  ++l->count;
  if (level > l->highest) l->highest = level;
}

static void test_log(void) {
  for (weft_log_level level = WEFT_LOG_ERROR; level <= WEFT_LOG_DEBUG; ++level) {
    lines seen = {0, WEFT_LOG_ERROR};
    weft_context* c = NULL;
    weft_group* g = NULL;
    weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
    options.log_level = level;
    options.log = keep_line;
    options.log_data = &seen;
    OK(weft_context_create(&options, &c, &error));
    OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
    weft_group_destroy(g);
    weft_context_destroy(c);
    CHECK(seen.highest <= level);
  }
}
/* Levels of single layers. WEFT_LOG is not set here. */
static void test_log_levels(void) {
  for (int quiet = 0; quiet < 2; ++quiet) {
    lines seen = {0, WEFT_LOG_ERROR};
    weft_context* c = NULL;
    void* data = NULL;
    weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
    options.log_levels = quiet ? "host=error" : "host=info";
    options.log_level = quiet ? WEFT_LOG_DEBUG : WEFT_LOG_ERROR;
    /* Each block needs a segment of one page, so the 256 segments of a process are soon used up. */
    options.segment_bytes = 1;
    options.log = keep_line;
    options.log_data = &seen;
    OK(weft_context_create(&options, &c, &error));
    for (int i = 0; i < 300; ++i) OK(weft_alloc(c, 1, &data, &error));
    CHECK(seen.count == (quiet ? 0 : 1)); /* that local memory is used instead */
    weft_context_destroy(c);
  }
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"fork", test_fork}, /* forks come before threads */
      {"environment", test_environment},
      {"names", test_names},
      {"null_arguments", test_null_arguments},
      {"wrong_arguments", test_wrong_arguments},
      {"struct_sizes", test_struct_sizes},
      {"long_texts", test_long_texts},
      {"log", test_log},
      {"log_levels", test_log_levels},
      {"lifetimes", test_lifetimes},
      {"results", test_results},
      {"reductions", test_reductions},
      {"works", test_works},
      {"many_works", test_many_works},
      {"peer_leaves", test_peer_leaves},
      {"timeout", test_timeout},
      {"group_timeout", test_group_timeout},
      {"mismatch", test_mismatch},
      {"leave", test_leave},
      {"abort", test_abort},
      {"shrink", test_shrink},
      {"dropped_work", test_dropped_work},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
