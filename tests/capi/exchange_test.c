/* Exchanges between neighbours from C, over shm and over a transport that composes them from messages: every
 * element, plans that are started often or used once, lifetimes, and refused arguments. */
#include "support.h"

enum { ROWS = 3, COLUMNS = 5, MORE = 4 };

static weft_group* join_over(rank_args* a, const char* backend) {
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  options.name = backend;
  options.backend = backend;
  options.deadline_ns = 20000 * MS;
  OK(weft_group_create(a->context, a->store, a->rank, a->size, &options, &group, &error));
  return group;
}

/* Each rank sends column 3 of `cells`, and the last two columns of `more`, to the next rank of the ring.
 * There they become column 0, and the first two columns. */
static const int64_t column[] = {ROWS, 1}, along[] = {COLUMNS, 1}, two[] = {2};
static const weft_exchange_box ring_sent[] = {{0, 2, 3, column, along, NULL},
                                              {1, 1, MORE - 2, two, NULL, NULL}},
                               ring_received[] = {{0, 2, 0, column, along, NULL}, {1, 1, 0, two, NULL, NULL}};
static const weft_dtype ring_fields[] = {WEFT_F64, WEFT_I32};
typedef struct ring_plan {
  weft_exchange_part to, from;
  weft_exchange_plan plan;
} ring_plan;
static const weft_exchange_plan* in_ring(ring_plan* r, int rank, int size) {
  const weft_exchange_plan none = WEFT_EXCHANGE_PLAN_INIT;
  r->to = (weft_exchange_part){(rank + 1) % size, 2, ring_sent};
  r->from = (weft_exchange_part){(rank + size - 1) % size, 2, ring_received};
  r->plan = none;
  r->plan.fields = ring_fields;
  r->plan.field_count = 2;
  r->plan.sends = &r->to;
  r->plan.receives = &r->from;
  r->plan.send_count = r->plan.receive_count = 1;
  return &r->plan;
}

typedef struct ring_memory {
  double cells[ROWS * COLUMNS];
  int32_t more[MORE];
  weft_buffer fields[2];
} ring_memory;
static double cell(int rank, int round, int64_t i) { return rank * 1000 + round * 100 + (double)i; }
static void fill(ring_memory* m, int rank, int round) {
  for (int i = 0; i < ROWS * COLUMNS; ++i) m->cells[i] = cell(rank, round, i);
  for (int i = 0; i < MORE; ++i) m->more[i] = (int32_t)cell(rank, round, 50 + i);
  m->fields[0] = (weft_buffer){m->cells, ROWS * COLUMNS, WEFT_F64, WEFT_CPU};
  m->fields[1] = (weft_buffer){m->more, MORE, WEFT_I32, WEFT_CPU};
}
static void check_filled(const ring_memory* m, int rank, int size, int round) {
  const int last = (rank + size - 1) % size;
  for (int i = 0; i < ROWS * COLUMNS; ++i)
    CHECK(m->cells[i] == (i % COLUMNS == 0 ? cell(last, round, i + 3) : cell(rank, round, i)));
  for (int i = 0; i < MORE; ++i)
    CHECK(m->more[i] == (int32_t)(i < 2 ? cell(last, round, 50 + i + MORE - 2) : cell(rank, round, 50 + i)));
}

static const char* backend; /* of the test that runs */

static void ring(rank_args* a) {
  weft_group* group = join_over(a, backend);
  weft_persistent_exchange* exchange = NULL;
  { /* the plan may be freed */
    ring_plan r;
    OK(weft_persistent_exchange_create(group, in_ring(&r, a->rank, a->size), &exchange, &error));
    memset(&r, 0, sizeof r);
  }
  ring_memory m[3];
  for (int round = 0; round < 3; ++round) {
    fill(&m[0], a->rank, round);
    OK(weft_persistent_exchange_start(exchange, m[0].fields, m[0].fields, 2, NULL, NULL, &error));
    check_filled(&m[0], a->rank, a->size, round);
  }
  /* Several in flight, and the handle is gone. */
  weft_work* works[3] = {NULL, NULL, NULL};
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  options.deadline_ns = 10000 * MS;
  for (int i = 0; i < 3; ++i) {
    fill(&m[i], a->rank, 3 + i);
    OK(weft_persistent_exchange_start(exchange, m[i].fields, m[i].fields, 2, &options, &works[i], &error));
  }
  weft_persistent_exchange_destroy(exchange);
  OK(weft_work_wait_all(works, 3, &error));
  for (int i = 0; i < 3; ++i) {
    check_filled(&m[i], a->rank, a->size, 3 + i);
    weft_work_destroy(works[i]);
  }
  /* Once. */
  ring_plan r;
  const weft_exchange_plan* const plan = in_ring(&r, a->rank, a->size);
  fill(&m[0], a->rank, 7);
  OK(weft_group_exchange(group, plan, m[0].fields, m[0].fields, 2, NULL, NULL, &error));
  check_filled(&m[0], a->rank, a->size, 7);
  fill(&m[1], a->rank, 8);
  weft_work* work = NULL;
  OK(weft_group_exchange(group, plan, m[1].fields, m[1].fields, 2, NULL, &work, &error));
  OK(weft_work_wait(work, &error));
  weft_work_destroy(work);
  check_filled(&m[1], a->rank, a->size, 8);
  weft_group_destroy(group);
}

/* Every rank adds its elements to one element of rank 0; a rank that sends nothing to a field needs no memory
 * for it. */
static void sums(rank_args* a) {
  weft_group* group = join_over(a, backend);
  const int64_t one[] = {1};
  const weft_exchange_box sent = {0, 1, 1, one, NULL, NULL}, received = {0, 1, 0, one, NULL, NULL};
  const weft_exchange_part to = {0, 1, &sent};
  weft_exchange_part from[MAX_RANKS];
  for (int r = 0; r < a->size; ++r) from[r] = (weft_exchange_part){r, 1, &received};
  const weft_dtype f32_only = WEFT_F32;
  weft_exchange_plan plan = WEFT_EXCHANGE_PLAN_INIT;
  plan.kind = WEFT_EXCHANGE_ADD;
  plan.fields = &f32_only;
  plan.field_count = 1;
  plan.sends = &to;
  plan.send_count = 1;
  plan.receives = from;
  plan.receive_count = a->rank == 0 ? a->size : 0;
  float out = 5, in[2] = {-1, (float)(1 << a->rank)};
  const weft_buffer from_here = f32(in, 2), to_here = f32(a->rank == 0 ? &out : NULL, a->rank == 0);
  OK(weft_group_exchange(group, &plan, &from_here, &to_here, 1, NULL, NULL, &error));
  CHECK(out == (a->rank == 0 ? (float)(5 + (1 << a->size) - 1) : 5));
  weft_group_destroy(group);
}

/* Rank 1 expects another count than rank 0 sends. */
static void other_counts(rank_args* a) {
  weft_group* group = join_over(a, backend);
  const int64_t counts[] = {a->rank == 0 ? 2 : 3};
  const weft_exchange_box box = {0, 1, 0, counts, NULL, NULL};
  const weft_exchange_part part = {1 - a->rank, 1, &box};
  weft_exchange_plan plan = WEFT_EXCHANGE_PLAN_INIT;
  const weft_dtype f32_only = WEFT_F32;
  plan.fields = &f32_only;
  plan.field_count = 1;
  plan.sends = &part;
  plan.receives = &part;
  plan.send_count = a->rank == 0;
  plan.receive_count = a->rank == 1;
  plan.name = "ghosts";
  float x[3] = {1, 2, 3};
  const weft_buffer field = f32(x, 3);
  weft_status status = WEFT_OK;
  weft_error got = WEFT_ERROR_INIT;
  status = weft_group_exchange(group, &plan, &field, &field, 1, NULL, NULL, &got);
  if (a->rank == 1) {
    CHECK(status == WEFT_MISMATCH);
    CHECK(strstr(got.text, "rank 0") != NULL && strstr(got.text, "rank 1") != NULL);
  }
  weft_group_destroy(group);
}

/* Rows of an array (nodes, 3) by their numbers are sent to ghosts behind the nodes, and back, where they
 * are added. On the way back one node gets two of them. */
static void nodes(rank_args* a) {
  enum { NODES = 10, GHOSTS = 4 };
  weft_group* group = join_over(a, backend);
  const int next = (a->rank + 1) % a->size, last = (a->rank + a->size - 1) % a->size;
  const int64_t rows[] = {GHOSTS, 3}, shared[] = {7, 2, 9, 3}, back_to[] = {7, 2, 9, 7};
  const weft_exchange_box of_nodes = {0, 2, 0, rows, NULL, shared},
                          ghosts = {0, 2, NODES * 3, rows, NULL, NULL},
                          to_nodes = {0, 2, 0, rows, NULL, back_to};
  weft_exchange_part to = {next, 1, &of_nodes}, from = {last, 1, &ghosts};
  const weft_dtype dtype = WEFT_F32;
  weft_exchange_plan plan = WEFT_EXCHANGE_PLAN_INIT;
  plan.fields = &dtype;
  plan.field_count = 1;
  plan.sends = &to;
  plan.receives = &from;
  plan.send_count = plan.receive_count = 1;
  float x[(NODES + GHOSTS) * 3];
  for (int i = 0; i < NODES * 3; ++i) x[i] = (float)(100 * a->rank + i);
  const weft_buffer field = f32(x, LENGTH(x));
  OK(weft_group_exchange(group, &plan, &field, &field, 1, NULL, NULL, &error));
  for (int i = 0; i < GHOSTS * 3; ++i)
    CHECK(x[NODES * 3 + i] == (float)(100 * last + (int)shared[i / 3] * 3 + i % 3));
  plan.kind = WEFT_EXCHANGE_ADD;
  to = (weft_exchange_part){last, 1, &ghosts};
  from = (weft_exchange_part){next, 1, &to_nodes};
  OK(weft_group_exchange(group, &plan, &field, &field, 1, NULL, NULL, &error));
  for (int i = 0; i < NODES * 3; ++i) {
    float expected = (float)(100 * a->rank + i);
    for (int g = 0; g < GHOSTS; ++g)
      if (back_to[g] == i / 3) expected += (float)(100 * a->rank + (int)shared[g] * 3 + i % 3);
    CHECK(x[i] == expected);
  }
  weft_group_destroy(group);
}

/* The handle outlives the group. */
static void ends(rank_args* a) {
  weft_group* group = join_over(a, backend);
  weft_persistent_exchange* exchange = NULL;
  ring_plan r;
  ring_memory m;
  fill(&m, a->rank, 0);
  OK(weft_persistent_exchange_create(group, in_ring(&r, a->rank, a->size), &exchange, &error));
  OK(weft_persistent_exchange_start(exchange, m.fields, m.fields, 2, NULL, NULL, &error));
  OK(weft_group_leave(group, 0, &error));
  CHECK_ERROR(weft_persistent_exchange_start(exchange, m.fields, m.fields, 2, NULL, NULL, &error),
              WEFT_BAD_ARGUMENT,
              "*exchange: the group of this exchange has ended: its handle was destroyed, or has left it");
  weft_group_destroy(group);
  CHECK_ERROR(weft_persistent_exchange_start(exchange, m.fields, m.fields, 2, NULL, NULL, &error),
              WEFT_BAD_ARGUMENT,
              "weft_persistent_exchange_start: the weft_group that exchange was made for was destroyed; "
              "expected one that exists");
  weft_persistent_exchange_destroy(exchange);
  weft_persistent_exchange_destroy(NULL);
}

static const char* const backends[] = {"shm", "gloo"};
static void over_each(void (*body)(rank_args*), int least, int most) {
  for (size_t b = 0; b < LENGTH(backends); ++b) {
    backend = backends[b];
    for (int n = least; n <= most; ++n) run_ranks(n, body);
  }
}
static void test_ring(void) { over_each(ring, 1, 3); }
static void test_sums(void) { over_each(sums, 1, 3); }
static void test_nodes(void) { over_each(nodes, 1, 3); }
static void test_other_counts(void) { over_each(other_counts, 2, 2); }
static void test_ends(void) { over_each(ends, 1, 2); }

/* Refused plans and fields ----------------------------------------------------------------------------------
 */

static void refused(rank_args* a) {
  enum { bad = WEFT_BAD_ARGUMENT };
  weft_group* group = join_over(a, "shm");
  weft_persistent_exchange* x = NULL;
  const int64_t back[] = {-1}, twice[] = {1, 1}, far_off[] = {0, MORE};
  ring_plan r;
  const weft_exchange_plan good = *in_ring(&r, 0, 1);
#define REFUSED(change, status, words)                                                     \
  do {                                                                                     \
    weft_exchange_plan plan = good;                                                        \
    change;                                                                                \
    CHECK_ERROR(weft_persistent_exchange_create(group, &plan, &x, &error), status, words); \
    CHECK(x == NULL);                                                                      \
  } while (0)
#define MADE "weft_persistent_exchange_create: plan->"
  REFUSED(plan.kind = 2, bad, MADE "kind is 2; expected 0 (WEFT_EXCHANGE_COPY) or 1 (WEFT_EXCHANGE_ADD)");
  REFUSED(plan.reserved = 1, WEFT_UNSUPPORTED, MADE "reserved is 1; expected 0");
  REFUSED(plan.field_count = -1, bad, MADE "field_count is -1; expected 0 or more");
  REFUSED(plan.fields = NULL, bad, MADE "fields is NULL");
  REFUSED(plan.send_count = -1, bad, MADE "send_count is -1; expected 0 or more");
  REFUSED(plan.receives = NULL, bad, MADE "receives is NULL");
  const weft_dtype none[] = {WEFT_F64, 99};
  REFUSED(plan.fields = none, bad, MADE "fields[1] is 99; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  const weft_exchange_part no_boxes = {0, 1, NULL}, less = {0, -1, NULL};
  REFUSED(plan.sends = &no_boxes, bad, MADE "sends[0].boxes is NULL");
  REFUSED(plan.sends = &less, bad, MADE "sends[0].box_count is -1; expected 0 or more");
  const weft_exchange_box no_counts = {0, 1, 0, NULL, NULL, NULL}, wide = {0, 9, 0, two, NULL, NULL};
  const weft_exchange_part without = {0, 1, &no_counts}, of_nine = {0, 1, &wide};
  REFUSED(plan.receives = &without, bad, MADE "receives[0].boxes[0].counts is NULL");
  REFUSED(plan.receives = &of_nine, bad, MADE "receives[0].boxes[0].dim_count is 9; expected 0 to 8");
  const weft_exchange_box of_none = {1, 0, 0, NULL, NULL, two}, minus = {1, 1, 0, back, NULL, two};
  const weft_exchange_part indexed = {0, 1, &of_none}, less_than_none = {0, 1, &minus};
  REFUSED(plan.sends = &indexed, bad,
          "weft_persistent_exchange_create: plan->sends[0].boxes[0] has indices, and counts (); expected a "
          "number of "
          "them, 0 or more");
  REFUSED(plan.sends = &less_than_none, bad,
          "weft_persistent_exchange_create: plan->sends[0].boxes[0] has indices, and counts (-1); expected a "
          "number "
          "of them, 0 or more");
  /* The library's own checks have the texts of C++. */
  const weft_exchange_box beyond = {2, 1, 0, two, NULL, NULL};
  const weft_exchange_part far = {0, 1, &beyond}, nobody = {1, 1, ring_sent};
  const weft_exchange_box again = {1, 1, 0, two, NULL, twice};
  const weft_exchange_part both = {0, 1, &again};
  REFUSED(plan.receives = &both, bad,
          "*exchange: box 0 of the data received from rank 0: its indices name element 1 of the field twice; "
          "expected "
          "each once");
  REFUSED(plan.sends = &far, bad, "*exchange: box 0 of the data sent to rank 0: field is 2; expected 0 to 1");
  REFUSED((plan.sends = &nobody, plan.name = "ghosts"), bad,
          "*ghosts: sends[0].peer is 1; expected 0 to 0 (group size 1)");
  OK(weft_persistent_exchange_create(group, &good, &x, &error));
  ring_memory m;
  fill(&m, 0, 0);
  weft_buffer other[2] = {m.fields[0], m.fields[1]};
#define NOT_STARTED(from, to, count, words)                                                \
  CHECK_ERROR(weft_persistent_exchange_start(x, from, to, count, NULL, NULL, &error), bad, \
              "weft_persistent_exchange_start: " words)
  NOT_STARTED(m.fields, m.fields, 1, "field_count is 1; expected 2, as the plan has");
  NOT_STARTED(m.fields, m.fields, -1, "field_count is -1; expected 0 or more");
  other[1].dtype = WEFT_F32;
  NOT_STARTED(other, m.fields, 2, "in[1] is f32; expected i32, as the plan has");
  NOT_STARTED(m.fields, other, 2, "out[1] is f32; expected i32, as the plan has");
  other[1] = m.fields[1];
  other[1].device = WEFT_CUDA(1);
  NOT_STARTED(other, m.fields, 2, "in[1] is on cuda:1; expected cpu (the device of the group)");
  other[1] = m.fields[1];
  other[1].count = MORE - 1;
  NOT_STARTED(other, m.fields, 2, "in[1] has 3 elements; boxes of it that are sent reach from 2 to 3");
  other[1].count = 1;
  NOT_STARTED(m.fields, other, 2, "out[1] has 1 elements; boxes of it that are received reach from 0 to 1");
  other[1] = m.fields[1];
  other[1].count = -1;
  NOT_STARTED(m.fields, other, 2, "out[1].count is -1; expected 0 or more");
  other[1] = (weft_buffer){NULL, MORE, WEFT_I32, WEFT_CPU};
  CHECK_ERROR(weft_persistent_exchange_start(x, other, m.fields, 2, NULL, NULL, &error), bad,
              "*exchange: in of field 1 has no memory; boxes of it are sent");
  other[1] = m.fields[1];
  other[1] = (weft_buffer){m.more + 1, MORE - 1, WEFT_I32, WEFT_CPU}; /* a part of what is sent */
  CHECK_ERROR(weft_persistent_exchange_start(x, m.fields, other, 2, NULL, NULL, &error), bad,
              "*exchange: a box of out of field 1 that is received and a box of in of field 1 that is sent "
              "overlap; expected disjoint memory");
  weft_persistent_exchange_destroy(x);
  /* A box that begins before its field. */
  x = NULL;
  const weft_exchange_box before = {1, 1, 0, two, back, NULL};
  const weft_exchange_part sent = {0, 1, &before}, received = {0, 1, ring_received + 1};
  weft_exchange_plan plan = good;
  plan.sends = &sent;
  plan.receives = &received;
  OK(weft_persistent_exchange_create(group, &plan, &x, &error));
  NOT_STARTED(m.fields, m.fields, 2, "in[1] has 4 elements; boxes of it that are sent reach from -1 to 0");
  weft_persistent_exchange_destroy(x);
  /* An index beyond the field. */
  x = NULL;
  const weft_exchange_box behind = {1, 1, 0, two, NULL, far_off};
  const weft_exchange_part sent_behind = {0, 1, &behind};
  plan.sends = &sent_behind;
  OK(weft_persistent_exchange_create(group, &plan, &x, &error));
  NOT_STARTED(m.fields, m.fields, 2, "in[1] has 4 elements; boxes of it that are sent reach from 0 to 4");
  weft_persistent_exchange_destroy(x);
  weft_group_destroy(group);
}
static void test_refused(void) { run_ranks(1, refused); }

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"ring", test_ring},   {"sums", test_sums},
      {"nodes", test_nodes}, {"other_counts", test_other_counts},
      {"ends", test_ends},   {"refused", test_refused},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
