/* Every operation of weft.h between ranks that are threads: results, in place, user's functions, lists of
 * calls, and what is refused. */
#include "support.h"

enum { MOST = 12 }; /* elements of a block */

static weft_buffer i32(int32_t* data, int64_t count) {
  const weft_buffer b = {data, count, WEFT_I32, WEFT_CPU};
  return b;
}
static weft_buffer i64(int64_t* data, int64_t count) {
  const weft_buffer b = {data, count, WEFT_I64, WEFT_CPU};
  return b;
}

/* Element i of rank r's input. */
static int32_t given(int r, int64_t i) { return (int32_t)(100 * (r + 1) + i); }
static void fill(int32_t* to, int r, int64_t count) {
  for (int64_t i = 0; i < count; ++i) to[i] = given(r, i);
}
/* The sum over ranks first ... last of element i. */
static int32_t sum(int first, int last, int64_t i) {
  int32_t total = 0;
  for (int r = first; r <= last; ++r) total += given(r, i);
  return total;
}

/* Results --------------------------------------------------------------------------------------------------
 */

static void equal_blocks(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, me = a->rank;
  const int64_t counts[] = {0, 1, 7, MOST};
  for (size_t k = 0; k < LENGTH(counts); ++k) {
    const int64_t c = counts[k];
    int32_t x[MOST * MAX_RANKS], y[MOST * MAX_RANKS];
    const weft_buffer bx = i32(x, c), by = i32(y, c), all_x = i32(x, c * n), all_y = i32(y, c * n);
    for (int root = 0; root < n; ++root) {
      fill(x, me, c);
      memset(y, 0, sizeof y);
      OK(weft_reduce(group, &bx, me == root ? &by : NULL, root, NULL, NULL, &error));
      for (int64_t i = 0; i < c; ++i) CHECK(y[i] == (me == root ? sum(0, n - 1, i) : 0));

      OK(weft_broadcast(group, me == root ? &bx : NULL, &by, root, NULL, NULL, &error));
      for (int64_t i = 0; i < c; ++i) CHECK(y[i] == given(root, i));
      OK(weft_broadcast(group, &bx, &bx, root, NULL, NULL, &error)); /* in place */
      for (int64_t i = 0; i < c; ++i) CHECK(x[i] == given(root, i));

      fill(x, me, c);
      OK(weft_gather(group, &bx, me == root ? &all_y : NULL, root, NULL, NULL, &error));
      for (int64_t i = 0; me == root && i < c * n; ++i) CHECK(y[i] == given((int)(i / c), i % c));
      fill(x, me, c * n);
      OK(weft_scatter(group, me == root ? &all_x : NULL, &by, root, NULL, NULL, &error));
      for (int64_t i = 0; i < c; ++i) CHECK(y[i] == given(root, me * c + i));
    }
    fill(x, me, c * n);
    OK(weft_reduce_scatter(group, &all_x, &by, NULL, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == sum(0, n - 1, me * c + i));
    OK(weft_all_to_all(group, &all_x, &all_y, NULL, NULL, &error));
    for (int64_t i = 0; i < c * n; ++i) CHECK(y[i] == given((int)(i / c), me * c + i % c));
    OK(weft_scan(group, &bx, &by, NULL, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == sum(0, me, i));
    OK(weft_exscan(group, &bx, &by, NULL, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == sum(0, me - 1, i));

    /* In place: a block of the other buffer. */
    fill(y + me * c, me, c);
    const weft_buffer mine = i32(y + me * c, c);
    OK(weft_all_gather(group, &mine, &all_y, NULL, NULL, &error));
    for (int64_t i = 0; i < c * n; ++i) CHECK(y[i] == given((int)(i / c), i % c));
    fill(y, me, c * n);
    OK(weft_reduce_scatter(group, &all_y, &mine, NULL, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[me * c + i] == sum(0, n - 1, me * c + i));
  }
  weft_group_destroy(group);
}
static void test_equal_blocks(void) {
  for (int n = 1; n <= MAX_RANKS; ++n) run_ranks(n, equal_blocks);
}

/* Rank r's block has r + 1 elements, or none if r is 1; with offsets the blocks are in reverse order. */
static void blocks_of_any_size(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, me = a->rank;
  for (int backwards = 0; backwards < 2; ++backwards) {
    int64_t counts[MAX_RANKS], offsets[MAX_RANKS], from[MAX_RANKS], total = 0;
    for (int r = 0; r < n; ++r) {
      counts[r] = r == 1 ? 0 : r + 1;
      from[r] = offsets[r] = total;
      total += counts[r];
    }
    for (int r = 0; backwards && r < n; ++r) offsets[r] = total - from[r] - counts[r];
    const weft_blocks blocks = {counts, backwards ? offsets : NULL, n};
    int32_t x[64], y[64];
    const weft_buffer mine = i32(x, counts[me]), all = i32(y, total);
    fill(x, me, counts[me]);
    OK(weft_all_gather_v(group, &mine, &all, &blocks, NULL, NULL, &error));
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < counts[r]; ++i) CHECK(y[offsets[r] + i] == given(r, i));

    for (int64_t i = 0; i < total; ++i) y[i] = given(me, i);
    OK(weft_reduce_scatter_v(group, &all, &mine, &blocks, NULL, NULL, &error));
    for (int64_t i = 0; i < counts[me]; ++i) CHECK(x[i] == sum(0, n - 1, offsets[me] + i));

    /* To rank r go counts[r] elements, so counts[me] come from each. */
    int64_t equal[MAX_RANKS];
    for (int r = 0; r < n; ++r) equal[r] = counts[me];
    const weft_blocks in_blocks = {counts, backwards ? offsets : NULL, n}, out_blocks = {equal, NULL, n};
    const weft_buffer out = i32(x, counts[me] * n);
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < counts[r]; ++i) y[offsets[r] + i] = given(me, 10 * r + i);
    OK(weft_all_to_all_v(group, &all, &out, &in_blocks, &out_blocks, NULL, NULL, &error));
    for (int64_t i = 0; i < counts[me] * n; ++i)
      CHECK(x[i] == given((int)(i / counts[me]), 10 * me + i % counts[me]));
  }
  weft_group_destroy(group);
}
static void test_blocks(void) {
  for (int n = 1; n <= MAX_RANKS; ++n) run_ranks(n, blocks_of_any_size);
}

static void messages(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, next = (a->rank + 1) % n, before = (a->rank + n - 1) % n;
  const int64_t counts[] = {0, 3, 5000};
  for (size_t k = 0; k < LENGTH(counts); ++k) {
    const int64_t c = counts[k];
    static int32_t from[MAX_RANKS][5000], to[MAX_RANKS][2][5000];
    fill(from[a->rank], a->rank, c);
    const weft_buffer in = i32(from[a->rank], c), first = i32(to[a->rank][0], c),
                      second = i32(to[a->rank][1], c);
    OK(weft_send_recv(group, &in, next, &first, before, NULL, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(to[a->rank][0][i] == given(before, i));
    if (c > 0)
      CHECK_ERROR(weft_send_recv(group, &first, next, &first, before, NULL, NULL, &error), WEFT_BAD_ARGUMENT,
                  "*coalesced: out of call 1 (recv) overlaps in of call 0 (send); expected memory that no "
                  "other call of the list uses");

    /* Two tags, received in the other order. */
    weft_call_options high = WEFT_CALL_OPTIONS_INIT;
    high.tag = INT32_MAX;
    weft_work* works[4] = {NULL};
    OK(weft_send(group, &in, next, NULL, &works[0], &error));
    OK(weft_send(group, &in, next, &high, &works[1], &error));
    OK(weft_recv(group, &second, before, &high, &works[2], &error));
    OK(weft_recv(group, &first, before, NULL, &works[3], &error));
    OK(weft_work_wait_all(works, 4, &error));
    for (int64_t i = 0; i < c; ++i)
      CHECK(to[a->rank][0][i] == given(before, i) && to[a->rank][1][i] == given(before, i));
    for (int w = 0; w < 4; ++w) weft_work_destroy(works[w]);
  }
  weft_group_destroy(group);
}
static void test_messages(void) {
  for (int n = 1; n <= MAX_RANKS; ++n) run_ranks(n, messages);
}

static weft_call a_call(weft_op op, weft_buffer in, weft_buffer out) {
  weft_call c = WEFT_CALL_INIT;
  c.op = op;
  c.in = in;
  c.out = out;
  return c;
}

/* Rank 0 receives from any source, probes for messages of unknown size, and waits for one. */
static void from_any_source(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, me = a->rank;
  weft_call_options looked_for = WEFT_CALL_OPTIONS_INIT, waited_for = WEFT_CALL_OPTIONS_INIT;
  looked_for.tag = 3;
  waited_for.tag = 4;
  const int64_t counts[] = {0, 3, 5000};
  static int32_t from[MAX_RANKS][5000], to[5000];
  for (size_t k = 0; k < LENGTH(counts); ++k) {
    const int64_t c = counts[k];
    fill(from[me], me, c);
    const weft_buffer mine = i32(from[me], c), got = i32(to, c);
    if (me != 0) {
      OK(weft_send(group, &mine, 0, NULL, NULL, &error));
      OK(weft_send(group, &mine, 0, &looked_for, NULL, &error));
      OK(weft_send(group, &mine, 0, &waited_for, NULL, &error));
    } else {
      bool seen[MAX_RANKS] = {false};
      for (int i = 1; i < n; ++i) {
        weft_work* work = NULL;
        int32_t source = -1;
        OK(weft_recv(group, &got, WEFT_ANY_SOURCE, NULL, &work, &error));
        OK(weft_work_wait(work, &error));
        OK(weft_work_source(work, &source, &error));
        CHECK(source > 0 && source < n && !seen[source]);
        seen[source] = true;
        for (int64_t e = 0; e < c; ++e) CHECK(to[e] == given(source, e));
        weft_work_destroy(work);
      }
      for (int i = 1; i < n; ++i) {
        weft_message m = {-5, -5, -5, -5};
        bool found = true;
        OK(weft_probe(group, 0, &looked_for, &found, &m, &error));
        CHECK(!found && m.source == -5 && m.tag == -5 && m.count == -5 && m.dtype == -5);
        while (!found) OK(weft_probe(group, WEFT_ANY_SOURCE, &looked_for, &found, &m, &error));
        CHECK(m.source > 0 && m.source < n && m.tag == 3 && m.count == c && m.dtype == WEFT_I32);
        OK(weft_recv(group, &got, m.source, &looked_for, NULL, &error));
        for (int64_t e = 0; e < c; ++e) CHECK(to[e] == given(m.source, e));
      }
      weft_message m = {-5, -5, -5, -5};
      OK(weft_wait_message(group, WEFT_ANY_SOURCE, &waited_for, &m, &error));
      CHECK(m.source > 0 && m.source < n && m.tag == 4 && m.count == c && m.dtype == WEFT_I32);
      for (int i = n - 1; i > 0; --i) {
        OK(weft_wait_message(group, i, &waited_for, &m, &error));
        CHECK(m.source == i && m.tag == 4 && m.count == c && m.dtype == WEFT_I32);
        OK(weft_recv(group, &got, i, &waited_for, NULL, &error));
        for (int64_t e = 0; e < c; ++e) CHECK(to[e] == given(i, e));
      }
    }
    OK(weft_barrier(group, NULL, NULL, &error));
  }
  weft_group_destroy(group);
}
/* The sources of several calls, and the error of a Work that has no source. */
static void sources_of_several(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, next = (a->rank + 1) % n, before = (a->rank + n - 1) % n;
  int32_t x = a->rank, y = -1, z = -1, sources[2] = {-1, -1}, source = -1;
  size_t count = 99;
  weft_work* work = NULL;
  const weft_buffer in = i32(&x, 1), first = i32(&y, 1), second = i32(&z, 1);
  weft_call_options tagged = WEFT_CALL_OPTIONS_INIT;
  tagged.tag = 6;
  weft_call calls[4] = {a_call(WEFT_OP_RECV, in, first), a_call(WEFT_OP_RECV, in, second),
                        a_call(WEFT_OP_SEND, in, first), a_call(WEFT_OP_SEND, in, first)};
  const weft_buffer none = {NULL, 0, WEFT_F32, WEFT_CPU};
  for (int k = 0; k < 4; ++k) {
    calls[k].peer = k < 2 ? WEFT_ANY_SOURCE : next;
    calls[k].options = k % 2 == 0 ? NULL : &tagged;
    if (k < 2)
      calls[k].in = none;
    else
      calls[k].out = none;
  }
  OK(weft_coalesced(group, calls, 4, &work, &error));
  OK(weft_work_wait(work, &error));
  OK(weft_work_sources(work, sources, 2, &count, &error));
  CHECK(count == 2 && sources[0] == before && sources[1] == before && y == before && z == before);
  count = 99;
  CHECK_ERROR(weft_work_sources(work, sources, 1, &count, &error), WEFT_BAD_ARGUMENT,
              "weft_work_sources: room is 1; expected at least 2");
  CHECK(count == 2);
  CHECK_ERROR(weft_work_sources(work, NULL, 0, &count, &error), WEFT_BAD_ARGUMENT,
              "weft_work_sources: room is 0; expected at least 2");
  CHECK_ERROR(weft_work_sources(work, NULL, 2, &count, &error), WEFT_BAD_ARGUMENT,
              "weft_work_sources: sources is NULL");
  CHECK_ERROR(weft_work_source(work, &source, &error), WEFT_BAD_ARGUMENT,
              "source: the Work is of coalesced calls; expected one recv, or call sources()");
  weft_work_destroy(work);

  OK(weft_send_recv(group, &in, next, &first, WEFT_ANY_SOURCE, NULL, &work, &error));
  OK(weft_work_wait(work, &error));
  OK(weft_work_sources(work, sources, 2, &count, &error));
  CHECK(count == 1 && sources[0] == before);
  weft_work_destroy(work);

  OK(weft_barrier(group, NULL, &work, &error));
  OK(weft_work_wait(work, &error));
  CHECK_ERROR(weft_work_source(work, &source, &error), WEFT_BAD_ARGUMENT,
              "source: the Work is of no recv, or of one that has failed; expected one that is done");
  CHECK_ERROR(weft_work_sources(work, sources, 2, &count, &error), WEFT_BAD_ARGUMENT,
              "sources: the Work is not of coalesced calls, or of some that have failed; call source()");
  weft_work_destroy(work);

  OK(weft_recv(group, &first, WEFT_ANY_SOURCE, &tagged, &work, &error));
  CHECK_ERROR(weft_work_source(work, &source, &error), WEFT_BAD_ARGUMENT, "source: the recv is not done yet");
  CHECK(source == -1);
  OK(weft_barrier(group, NULL, NULL, &error));
  OK(weft_send(group, &in, next, &tagged, NULL, &error));
  OK(weft_work_wait(work, &error));
  OK(weft_work_source(work, &source, &error));
  CHECK(source == before);
  weft_work_destroy(work);
  weft_group_destroy(group);
}
/* A time-out reports that no rank has sent; a rank that has left is named. */
static void nobody_sends(rank_args* a) {
  weft_group* group = join(a, "silent", 20000 * MS);
  weft_call_options soon = WEFT_CALL_OPTIONS_INIT;
  weft_message m = {0, 0, 0, 0};
  soon.tag = 5;
  soon.deadline_ns = 200 * MS;
  OK(weft_barrier(group, NULL, NULL, &error));
  if (a->rank == 0)
    CHECK_ERROR(weft_wait_message(group, WEFT_ANY_SOURCE, &soon, &m, &error), WEFT_TIMEOUT,
                "*wait_message: not finished within 0.2 s: no rank has sent a message with tag 5");
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
static void all_leave(rank_args* a) {
  weft_group* group = join(a, "left behind", 20000 * MS);
  weft_message m = {0, 0, 0, 0};
  int32_t x = 0;
  const weft_buffer b = i32(&x, 1);
  OK(weft_barrier(group, NULL, NULL, &error));
  if (a->rank == 2) { /* no loss while rank 1 may send */
    weft_group_destroy(group);
    pthread_barrier_wait(a->meet);
    return;
  }
  if (a->rank == 1) {
    x = 11;
    pthread_barrier_wait(a->meet);
    OK(weft_send(group, &b, 0, NULL, NULL, &error));
  } else {
    weft_work* work = NULL;
    int32_t source = -1;
    bool found = true;
    OK(weft_recv(group, &b, WEFT_ANY_SOURCE, NULL, &work, &error));
    pthread_barrier_wait(a->meet);
    OK(weft_work_wait(work, &error));
    OK(weft_work_source(work, &source, &error));
    CHECK(source == 1 && x == 11);
    weft_work_destroy(work);
    OK(weft_probe(group, 2, NULL, &found, &m, &error));
    CHECK(!found);
  }
  if (a->rank == 0)
    CHECK_ERROR(weft_wait_message(group, WEFT_ANY_SOURCE, NULL, &m, &error), WEFT_PEER_LOST,
                "*left the group");
  if (a->rank == 0)
    CHECK_ERROR(weft_recv(group, &b, WEFT_ANY_SOURCE, NULL, NULL, &error), WEFT_PEER_LOST, "*left the group");
  weft_group_destroy(group);
}
static void test_from_any_source(void) {
  for (int n = 2; n <= MAX_RANKS; ++n) run_ranks(n, from_any_source);
  for (int n = 2; n <= MAX_RANKS; ++n) run_ranks(n, sources_of_several);
  run_ranks(3, nobody_sends);
  run_ranks(3, all_leave);
}

static void min_and_max(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  double values[3] = {a->rank == 1 ? -5.0 : 2.0, (double)a->rank, 7.0}, least[3] = {0};
  int64_t indices[3] = {a->rank, 10 + a->rank, 20 + a->rank}, where[3] = {0};
  const weft_buffer v = {values, 3, WEFT_F64, WEFT_CPU}, l = {least, 3, WEFT_F64, WEFT_CPU};
  const weft_buffer ix = i64(indices, 3), w = i64(where, 3);
  OK(weft_min_loc(group, &v, &ix, &l, &w, NULL, &error));
  CHECK(least[0] == -5 && where[0] == 1 && least[1] == 0 && where[1] == 10 && least[2] == 7 &&
        where[2] == 20);
  OK(weft_max_loc(group, &v, &ix, &v, &ix, NULL, &error)); /* in place */
  CHECK(values[0] == 2 && indices[0] == 0 && values[1] == a->size - 1 && indices[1] == 10 + a->size - 1);
  weft_group_destroy(group);
}
static void test_min_and_max(void) { run_ranks(3, min_and_max); }

/* A function of the caller's ------------------------------------------------------------------------------
 */

/* left, then right: keeps which came first and last, and how many there were. It is not commutative. */
static void keep_ends(void* data, const void* left, const void* right, void* out, int64_t count,
                      weft_dtype dtype) {
  const int32_t *l = left, *r = right;
  int32_t* to = out;
  CHECK(dtype == WEFT_I32 && count % 2 == 0);
  for (int64_t i = 0; i < count; i += 2) {
    const int32_t first = l[i], last = r[i + 1];
    to[i] = first;
    to[i + 1] = last;
  }
  *(bool*)data = true;
}
static void released(void* data) { ++*(int*)data; }

static void users_function(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  bool called = false;
  weft_reduction *ends = NULL, *unused = NULL;
  int gone = 0;
  OK(weft_reduction_create("ends", keep_ends, &called, NULL, &ends, &error));
  OK(weft_reduction_create("unused", keep_ends, &gone, released, &unused, &error));
  CHECK(gone == 0);
  weft_reduction_destroy(unused);
  CHECK(gone == 1);
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  options.reduce_op = WEFT_USER;
  options.reduction = ends;
  int32_t x[4] = {10 + a->rank, 20 + a->rank, 30 + a->rank, 40 + a->rank};
  const weft_buffer b = i32(x, 4);
  OK(weft_all_reduce(group, &b, &b, &options, NULL, &error));
  CHECK(x[0] == 10 && x[1] == 20 + a->size - 1 && x[2] == 30 && x[3] == 40 + a->size - 1);
  CHECK(called || a->size > 2);

  /* The handle may go before the Work. */
  weft_work* work = NULL;
  x[0] = a->rank;
  x[1] = -a->rank;
  const weft_buffer two = i32(x, 2);
  OK(weft_scan(group, &two, &two, &options, &work, &error));
  weft_reduction_destroy(ends);
  OK(weft_work_wait(work, &error));
  CHECK(x[0] == 0 && x[1] == -a->rank);
  weft_work_destroy(work);
  weft_reduction_destroy(NULL);
  weft_group_destroy(group);
}
static void test_users_function(void) {
  run_ranks(2, users_function);
  run_ranks(3, users_function);
}

/* A reduction of single elements, between which calls may be cut. Each element is a map x -> a x + b of
 * numbers below a prime. To combine two is to apply the left one first. It is associative, but not
 * commutative. */
enum { PRIME = 65521 };
static int the_maps; /* what the function is handed */
static int64_t map_of(int64_t a, int64_t b) { return a << 32 | b; }
static int64_t after(int64_t first, int64_t then) {
  const int64_t a = first >> 32, b = first & 0xffffffff, c = then >> 32, d = then & 0xffffffff;
  return map_of(c * a % PRIME, (c * b + d) % PRIME);
}
static void apply_after(void* data, const void* left, const void* right, void* out, int64_t count,
                        weft_dtype dtype) {
  const int64_t *l = left, *r = right;
  int64_t* to = out;
  CHECK(data == &the_maps && dtype == WEFT_I64);
  for (int64_t i = 0; i < count; ++i) to[i] = after(l[i], r[i]);
}
static int64_t given_map(int r, int64_t i) { return map_of(2 + (7 * r + i) % 1000, (i * i + r) % PRIME); }
/* The result of ranks 0 to last. */
static int64_t expected_map(int last, int64_t i) {
  int64_t all = given_map(0, i);
  for (int r = 1; r <= last; ++r) all = after(all, given_map(r, i));
  return all;
}
static void users_elements(rank_args* a) {
  enum { COUNT = 3000 };
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, me = a->rank, root = n - 1;
  weft_reduction* maps = NULL;
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  int64_t* x = malloc(COUNT * MAX_RANKS * sizeof *x);
  int64_t* y = malloc(COUNT * MAX_RANKS * sizeof *y);
  const int64_t counts[] = {0, 1, 7, COUNT};
  OK(weft_reduction_create("maps", apply_after, &the_maps, NULL, &maps, &error));
  options.reduce_op = WEFT_USER;
  options.reduction = maps;
  for (size_t k = 0; k < LENGTH(counts); ++k) {
    const int64_t c = counts[k];
    const weft_buffer in = i64(x, c), all = i64(x, c * n), out = i64(y, c);
    for (int64_t i = 0; i < c * n; ++i) x[i] = given_map(me, i);
    OK(weft_all_reduce(group, &in, &out, &options, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == expected_map(n - 1, i));
    OK(weft_reduce(group, &in, me == root ? &out : NULL, root, &options, NULL, &error));
    for (int64_t i = 0; me == root && i < c; ++i) CHECK(y[i] == expected_map(n - 1, i));
    OK(weft_reduce_scatter(group, &all, &out, &options, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == expected_map(n - 1, me * c + i));
    OK(weft_scan(group, &in, &out, &options, NULL, &error));
    for (int64_t i = 0; i < c; ++i) CHECK(y[i] == expected_map(me, i));
    OK(weft_exscan(group, &in, &out, &options, NULL, &error));
    for (int64_t i = 0; me > 0 && i < c; ++i) CHECK(y[i] == expected_map(me - 1, i));
  }
  weft_reduction_destroy(maps);
  weft_group_destroy(group);
  free(x);
  free(y);
}
static void test_users_elements(void) {
  for (int n = 1; n <= MAX_RANKS; ++n) run_ranks(n, users_elements);
}

/* Lists of calls -------------------------------------------------------------------------------------------
 */

/* A call of a later version, in a list of its own size. */
typedef struct later_call {
  weft_call known;
  int64_t later;
} later_call;

static void lists(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, next = (a->rank + 1) % n, before = (a->rank + n - 1) % n;
  enum { CALLS = 100 };
  static int32_t x[MAX_RANKS][CALLS];
  int32_t got = 0, mine = a->rank;
  weft_call calls[CALLS + 2];
  for (int k = 0; k < CALLS; ++k) {
    x[a->rank][k] = a->rank + k;
    calls[k] = a_call(WEFT_OP_ALL_REDUCE, i32(&x[a->rank][k], 1), i32(&x[a->rank][k], 1));
  }
  calls[CALLS] = a_call(WEFT_OP_SEND, i32(&mine, 1), calls[0].out);
  calls[CALLS].out = (weft_buffer){NULL, 0, WEFT_F32, WEFT_CPU};
  calls[CALLS].peer = next;
  calls[CALLS + 1] = a_call(WEFT_OP_RECV, (weft_buffer){NULL, 0, WEFT_F32, WEFT_CPU}, i32(&got, 1));
  calls[CALLS + 1].peer = before;
  weft_work* work = NULL;
  OK(weft_coalesced(group, calls, CALLS + 2, &work, &error));
  OK(weft_work_wait(work, &error));
  weft_work_destroy(work);
  CHECK(got == before);
  for (int k = 0; k < CALLS; ++k) CHECK(x[a->rank][k] == n * (n - 1) / 2 + n * k);

  /* One with options of its own. */
  weft_call_options largest = WEFT_CALL_OPTIONS_INIT;
  largest.reduce_op = WEFT_MAX;
  weft_call one = a_call(WEFT_OP_ALL_REDUCE, i32(&mine, 1), i32(&got, 1));
  one.options = &largest;
  OK(weft_submit(group, &one, NULL, &error));
  CHECK(got == n - 1);
  OK(weft_submit(group, &one, &work, &error));
  OK(weft_work_wait(work, &error));
  weft_work_destroy(work);
  OK(weft_coalesced(group, NULL, 0, NULL, &error));

  later_call later[2] = {{one, 0}, {one, 0}};
  int32_t other = -1;
  later[0].known.struct_size = later[1].known.struct_size = sizeof later[0];
  later[1].known.out = i32(&other, 1);
  got = -1;
  OK(weft_coalesced(group, &later[0].known, 2, NULL, &error));
  CHECK(got == n - 1 && other == n - 1);
  weft_group_destroy(group);
}
static void test_lists(void) {
  for (int n = 1; n <= 3; ++n) run_ranks(n, lists);
}

/* Persistent calls -----------------------------------------------------------------------------------------
 */

static void persistent(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  const int n = a->size, me = a->rank;
  int32_t x[MOST], y[MOST], all[MOST * MAX_RANKS];
  weft_persistent *reduce = NULL, *gather = NULL, *wait_for_all = NULL;
  int64_t counts[MAX_RANKS];
  { /* the descriptions of the calls may be freed, but not the buffers' memory */
    weft_call call = a_call(WEFT_OP_ALL_REDUCE, i32(x, MOST), i32(y, MOST));
    weft_call_options largest = WEFT_CALL_OPTIONS_INIT;
    largest.reduce_op = WEFT_MAX;
    call.options = &largest;
    OK(weft_persistent_create(group, &call, &reduce, &error));
    for (int r = 0; r < n; ++r) counts[r] = r % 2 == 0 ? MOST : 1;
    call = a_call(WEFT_OP_ALL_GATHER_V, i32(x, counts[me]), i32(all, MOST * n));
    call.out_blocks.counts = counts;
    call.out_blocks.size = n;
    OK(weft_persistent_create(group, &call, &gather, &error));
    memset(counts, 0, sizeof counts);
    memset(&call, 0, sizeof call);
    const weft_buffer none = i32(NULL, 0);
    call = a_call(WEFT_OP_BARRIER, none, none);
    OK(weft_persistent_create(group, &call, &wait_for_all, &error));
  }
  for (int round = 0; round < 3; ++round) {
    fill(x, me + round, MOST);
    memset(y, 0, sizeof y);
    memset(all, 0, sizeof all);
    if (round == me) { /* one rank calls what the others start */
      const weft_buffer in = i32(x, MOST), out = i32(y, MOST);
      weft_call_options largest = WEFT_CALL_OPTIONS_INIT;
      largest.reduce_op = WEFT_MAX;
      OK(weft_all_reduce(group, &in, &out, &largest, NULL, &error));
    } else {
      OK(weft_persistent_start(reduce, NULL, &error));
    }
    for (int64_t i = 0; i < MOST; ++i) CHECK(y[i] == given(n - 1 + round, i));
    weft_work* work = NULL;
    OK(weft_persistent_start(gather, &work, &error));
    OK(weft_work_wait(work, &error));
    weft_work_destroy(work);
    int64_t at = 0;
    for (int r = 0; r < n; ++r)
      for (int64_t i = 0; i < (r % 2 == 0 ? MOST : 1); ++i) CHECK(all[at++] == given(r + round, i));
    OK(weft_persistent_start(wait_for_all, NULL, &error));
  }
  /* Around the ring: one that is in flight is not started again. */
  weft_call_options tagged = WEFT_CALL_OPTIONS_INIT;
  tagged.tag = 3;
  weft_call call = a_call(WEFT_OP_RECV, i32(NULL, 0), i32(y, MOST));
  call.peer = (me + n - 1) % n;
  call.options = &tagged;
  weft_persistent *from = NULL, *to = NULL;
  OK(weft_persistent_create(group, &call, &from, &error));
  call = a_call(WEFT_OP_SEND, i32(x, MOST), i32(NULL, 0));
  call.peer = (me + 1) % n;
  call.options = &tagged;
  OK(weft_persistent_create(group, &call, &to, &error));
  for (int round = 0; round < 2; ++round) {
    weft_work *received = NULL, *sent = NULL;
    OK(weft_persistent_start(from, &received, &error));
    CHECK_ERROR(
        weft_persistent_start(from, &sent, &error), WEFT_BAD_ARGUMENT,
        "*recv: this persistent call was started before and is still in flight; expected that its last Work "
        "is done [group \"world\", rank ");
    CHECK(sent == NULL);
    OK(weft_persistent_start(to, &sent, &error));
    OK(weft_work_wait(received, &error));
    int32_t source = -1;
    OK(weft_work_source(received, &source, &error));
    CHECK(source == (me + n - 1) % n);
    OK(weft_work_wait(sent, &error));
    weft_work_destroy(received);
    weft_work_destroy(sent);
  }
  /* Both as one. */
  weft_persistent* const both[] = {to, from};
  for (int round = 0; round < 2; ++round) {
    fill(x, 10 * me + round, MOST);
    if (round == 0) {
      OK(weft_persistent_start_all(both, 2, NULL, &error));
    } else {
      weft_work* work = NULL;
      OK(weft_persistent_start_all(both, 2, &work, &error));
      OK(weft_work_wait(work, &error));
      weft_work_destroy(work);
    }
    for (int64_t i = 0; i < MOST; ++i) CHECK(y[i] == given(10 * ((me + n - 1) % n) + round, i));
  }
  weft_persistent* const twice[] = {to, to};
  CHECK_ERROR(weft_persistent_start_all(twice, 2, NULL, &error), WEFT_BAD_ARGUMENT,
              "*start_all: a call (send) is there twice; expected each once");
  CHECK_ERROR(weft_persistent_start_all(both, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_persistent_start_all: count is 0; expected 1 or more");
  weft_persistent_destroy(from);
  weft_persistent_destroy(to);
  weft_persistent_destroy(gather);
  OK(weft_group_leave(group, 0, &error));
  CHECK_ERROR(
      weft_persistent_start(reduce, NULL, &error), WEFT_BAD_ARGUMENT,
      "*all_reduce: the group of this persistent call has ended: its handle was destroyed, or has left it "
      "[group \"world\", rank ");
  weft_group_destroy(group);
  CHECK_ERROR(weft_persistent_start(reduce, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_persistent_start: the weft_group that persistent was made for was destroyed; expected "
              "one that exists");
  CHECK_ERROR(weft_persistent_start_all(&reduce, 1, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_persistent_start_all: the weft_group that calls[0] was made for was destroyed; expected "
              "one that exists");
  weft_persistent_destroy(reduce);
  weft_persistent_destroy(wait_for_all);
  weft_persistent_destroy(NULL);
  /* A Work delays the end of the group, but no new call begins. */
  const weft_buffer none = i32(NULL, 0);
  weft_work* kept = NULL;
  group = join(a, "kept", 20000 * MS);
  call = a_call(WEFT_OP_BARRIER, none, none);
  OK(weft_persistent_create(group, &call, &wait_for_all, &error));
  OK(weft_persistent_start(wait_for_all, &kept, &error));
  OK(weft_work_wait(kept, &error));
  weft_group_destroy(group);
  weft_work* refused = NULL;
  CHECK_ERROR(weft_persistent_start(wait_for_all, &refused, &error), WEFT_BAD_ARGUMENT,
              "weft_persistent_start: the weft_group that persistent was made for was destroyed; expected "
              "one that exists");
  CHECK(refused == NULL);
  weft_work_destroy(kept);
  weft_persistent_destroy(wait_for_all);
}
static void test_persistent(void) {
  for (int n = 1; n <= 3; ++n) run_ranks(n, persistent);
}

/* Refused calls --------------------------------------------------------------------------------------------
 */

static void test_refused(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  int32_t x[4] = {0}, y[4] = {0};
  int64_t one[1] = {2}, minus[1] = {-2};
  const weft_buffer in = i32(x, 2), out = i32(y, 2);
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));

  /* NULL if this rank is the root, and where the rank is none. */
  CHECK_ERROR(weft_reduce(g, &in, NULL, 0, NULL, NULL, &error), bad, "weft_reduce: out is NULL");
  CHECK_ERROR(weft_gather(g, &in, NULL, 0, NULL, NULL, &error), bad, "weft_gather: out is NULL");
  CHECK_ERROR(weft_broadcast(g, NULL, &out, 0, NULL, NULL, &error), bad, "weft_broadcast: in is NULL");
  CHECK_ERROR(weft_scatter(g, NULL, &out, 0, NULL, NULL, &error), bad, "weft_scatter: in is NULL");
  CHECK_ERROR(weft_reduce(g, &in, &out, 1, NULL, NULL, &error), bad,
              "reduce: root is 1; expected 0 to 0 (group size 1) [group \"world\", rank 0]");
  CHECK_ERROR(weft_send(g, &in, -1, NULL, NULL, &error), bad, "*dst is -1; expected 0 to 0 (group size 1)");
  CHECK_ERROR(weft_send(g, &in, WEFT_ANY_SOURCE, NULL, NULL, &error), bad,
              "*dst is any_source; expected 0 to 0 (group size 1)");
  weft_message m = {-5, -5, -5, -5};
  bool found = true;
  CHECK_ERROR(weft_probe(g, 1, NULL, &found, &m, &error), bad,
              "*probe: src is 1; expected 0 to 0 (group size 1)");
  CHECK_ERROR(weft_probe(g, 0, NULL, NULL, &m, &error), bad, "weft_probe: found is NULL");
  CHECK_ERROR(weft_probe(g, 0, NULL, &found, NULL, &error), bad, "weft_probe: message is NULL");
  CHECK_ERROR(weft_wait_message(g, -1, NULL, &m, &error), bad,
              "*wait_message: src is -1; expected 0 to 0 (group size 1)");
  CHECK_ERROR(weft_wait_message(g, 0, NULL, NULL, &error), bad, "weft_wait_message: message is NULL");
  CHECK(found && m.source == -5);
  CHECK_ERROR(weft_recv(g, &out, 7, NULL, NULL, &error), bad, "*src is 7; expected 0 to 0 (group size 1)");

  weft_blocks blocks = {one, NULL, 1};
  CHECK_ERROR(weft_all_gather_v(g, &in, &out, NULL, NULL, NULL, &error), bad,
              "weft_all_gather_v: out_blocks is NULL");
  blocks.size = -1;
  CHECK_ERROR(weft_all_gather_v(g, &in, &out, &blocks, NULL, NULL, &error), bad,
              "weft_all_gather_v: out_blocks->size is -1; expected the group's size");
  blocks.size = 1;
  blocks.counts = NULL;
  CHECK_ERROR(weft_reduce_scatter_v(g, &in, &out, &blocks, NULL, NULL, &error), bad,
              "weft_reduce_scatter_v: in_blocks->counts is NULL");
  blocks.counts = minus;
  CHECK_ERROR(weft_all_gather_v(g, &in, &out, &blocks, NULL, NULL, &error), bad,
              "*out_blocks.counts[0] is -2; expected 0 or more");
  blocks.counts = one;
  blocks.size = 0;
  CHECK_ERROR(weft_all_to_all_v(g, &in, &out, &blocks, &blocks, NULL, NULL, &error), bad,
              "*in_blocks has 0 counts; expected 1 (group size)");

  weft_call_options o = WEFT_CALL_OPTIONS_INIT;
  o.reduce_op = WEFT_USER;
  CHECK_ERROR(
      weft_all_reduce(g, &in, &out, &o, NULL, &error), bad,
      "weft_all_reduce: options->reduction is NULL; expected a result of weft_reduction_create, since "
      "reduce_op is WEFT_USER");
  weft_reduction* r = NULL;
  CHECK_ERROR(weft_reduction_create(NULL, keep_ends, NULL, NULL, &r, &error), bad,
              "weft_reduction_create: name is NULL");
  CHECK_ERROR(weft_reduction_create("r", NULL, NULL, NULL, &r, &error), bad,
              "weft_reduction_create: combine is NULL");
  int gone = 0;
  CHECK_ERROR(weft_reduction_create("r", keep_ends, &gone, released, NULL, &error), bad,
              "weft_reduction_create: reduction is NULL");
  CHECK(gone == 0 && r == NULL); /* the data are still the caller's */
  OK(weft_reduction_create("r", keep_ends, NULL, NULL, &r, &error));
  o.reduction = r;
  o.reduce_op = WEFT_SUM;
  CHECK_ERROR(weft_all_reduce(g, &in, &out, &o, NULL, &error), bad,
              "weft_all_reduce: options->reduction is set; expected NULL unless reduce_op is WEFT_USER");
  weft_reduction_destroy(r);
  o.reduction = NULL;
  o.reserved = 3;
  CHECK_ERROR(weft_barrier(g, &o, NULL, &error), bad, "weft_barrier: options->reserved is 3; expected 0");
  o.reserved = 0;
  o.tag = -4;
  CHECK_ERROR(weft_send(g, &in, 0, &o, NULL, &error), bad, "*tag is -4; expected 0 or more");
  o.tag = 0;
  o.stream.device = -1;
  CHECK_ERROR(weft_barrier(g, &o, NULL, &error), bad,
              "weft_barrier: options->stream.device is -1; expected WEFT_CPU or WEFT_CUDA(index)");
  o.stream.device = WEFT_CUDA(0);
  CHECK(weft_barrier(g, &o, NULL, NULL) != WEFT_OK); /* shm has no streams */

  weft_call calls[2] = {a_call(WEFT_OP_ALL_REDUCE, in, out), a_call(WEFT_OP_NONE, in, out)};
  weft_work* w = NULL;
  CHECK_ERROR(weft_submit(g, NULL, NULL, &error), bad, "weft_submit: call is NULL");
  CHECK_ERROR(weft_submit(g, &calls[1], &w, &error), bad,
              "*weft_submit: call: op is 0; expected 1 (all_reduce) to ");
  CHECK_ERROR(weft_coalesced(g, NULL, 1, &w, &error), bad, "weft_coalesced: calls is NULL");
  CHECK_ERROR(weft_coalesced(g, calls, 2, &w, &error), bad,
              "*weft_coalesced: calls[1]: op is 0; expected 1 (all_reduce) to ");
  calls[1].op = WEFT_OP_WAIT_MESSAGE;
  CHECK_ERROR(weft_submit(g, &calls[1], &w, &error), bad,
              "weft_submit: call: op is wait_message, and a weft_call cannot hold its answer; call "
              "weft_wait_message");
  calls[1].op = 99;
  CHECK_ERROR(weft_coalesced(g, calls, 2, &w, &error), bad, "*calls[1]: op is 99; expected 1 (all_reduce)");
  calls[1] = calls[0];
  calls[1].in.dtype = 50;
  CHECK_ERROR(weft_coalesced(g, calls, 2, &w, &error), bad,
              "weft_coalesced: calls[1]: in.dtype is 50; expected 0 (WEFT_F64) to 16 (WEFT_C128)");
  calls[1] = calls[0];
  calls[1].struct_size = 8;
  CHECK_ERROR(weft_coalesced(g, calls, 2, &w, &error), bad,
              "weft_coalesced: calls[1]: struct_size is 8; expected 120 (calls[0])");
  calls[0].struct_size = 8;
  CHECK_ERROR(
      weft_coalesced(g, calls, 1, &w, &error), bad,
      "weft_coalesced: calls[0]: call->struct_size is 8; expected 120: initialise it with WEFT_CALL_INIT");
  later_call later = {a_call(WEFT_OP_BARRIER, in, out), 1};
  later.known.struct_size = sizeof later;
  CHECK_ERROR(weft_submit(g, &later.known, &w, &error), WEFT_UNSUPPORTED,
              "weft_submit: call has 128 bytes with something set beyond the 120 that weft " WEFT_VERSION
              " knows");
  CHECK(w == NULL);
  weft_persistent* p = NULL;
  calls[0] = calls[1] = a_call(WEFT_OP_ALL_REDUCE, in, i32(y, 1));
  CHECK_ERROR(weft_persistent_create(g, &calls[0], &p, &error), bad,
              "*all_reduce: out has 1 elements; expected ");
  calls[1].op = WEFT_OP_WAIT_MESSAGE;
  CHECK_ERROR(
      weft_persistent_create(g, &calls[1], &p, &error), bad,
      "weft_persistent_create: call: op is wait_message, and a weft_call cannot hold its answer; call "
      "weft_wait_message");
  CHECK(p == NULL);

  const weft_buffer f = f32((float*)x, 2);
  CHECK_ERROR(weft_min_loc(g, &in, &in, &in, &in, NULL, &error), bad,
              "*min_loc: indices is i32; expected i64");
  CHECK_ERROR(weft_max_loc(g, &in, &in, &f, &in, NULL, &error), bad,
              "*max_loc: indices is i32; expected i64");
  weft_group_destroy(g);
  weft_context_destroy(c);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"equal_blocks", test_equal_blocks},
      {"blocks", test_blocks},
      {"messages", test_messages},
      {"from_any_source", test_from_any_source},
      {"min_and_max", test_min_and_max},
      {"users_function", test_users_function},
      {"users_elements", test_users_elements},
      {"lists", test_lists},
      {"persistent", test_persistent},
      {"refused", test_refused},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
