/* Works of weft.h: several at once, callbacks, streams. This test does not repeat those of capi/capi. */
#include "support.h"

static void wait_all(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  enum { CALLS = 5 };
  float x[CALLS];
  weft_work* works[CALLS] = {NULL};
  bool done = true;
  for (int k = 0; k < CALLS; ++k) {
    x[k] = (float)(k + a->rank);
    const weft_buffer b = f32(&x[k], 1);
    if (k == CALLS - 1 && a->rank == 0) { /* rank 1 has not called the last yet */
      OK(weft_all_reduce(group, &b, &b, NULL, &works[k], &error));
      OK(weft_work_wait_all_for(works, CALLS, 5 * MS, &done, &error));
      CHECK(!done);
      OK(weft_work_wait_all_for(works, CALLS, 0, &done, &error));
      CHECK(!done);
      pthread_barrier_wait(a->meet);
    } else {
      if (k == CALLS - 1) pthread_barrier_wait(a->meet);
      OK(weft_all_reduce(group, &b, &b, NULL, &works[k], &error));
    }
  }
  OK(weft_work_wait_all_for(works, CALLS, 20000 * MS, &done, &error));
  CHECK(done);
  OK(weft_work_wait_all(works, CALLS, &error)); /* again */
  for (int k = 0; k < CALLS; ++k) {
    CHECK(x[k] == (float)(2 * k + 1));
    weft_work_destroy(works[k]);
  }
  OK(weft_work_wait_all(NULL, 0, &error));
  done = false;
  OK(weft_work_wait_all_for(NULL, 0, 0, &done, &error));
  CHECK(done);
  weft_group_destroy(group);
}
static void test_wait_all(void) { run_ranks(2, wait_all); }

/* The first of the list that failed is reported, and none is pending. */
static void some_fail(rank_args* a) {
  weft_group *good = join(a, "good", 20000 * MS), *other = join(a, "other", 20000 * MS);
  float x[2] = {1, 1};
  const weft_buffer b = f32(&x[0], 1), c = f32(&x[1], 1);
  weft_work* works[2] = {NULL, NULL};
  if (a->rank == 1) OK(weft_group_abort(other, "enough", &error));
  CHECK(a->rank == 0 || weft_all_reduce(other, &c, &c, NULL, NULL, NULL) == WEFT_ABORTED);
  pthread_barrier_wait(a->meet);
  OK(weft_all_reduce(good, &b, &b, NULL, &works[1], &error));
  if (a->rank == 0) {
    const weft_status begun = weft_all_reduce(other, &c, &c, NULL, &works[0], NULL);
    if (begun == WEFT_OK) {
      bool done = true;
      CHECK_ERROR(weft_work_wait_all(works, 2, &error), WEFT_ABORTED, "*aborted by rank 1: enough");
      CHECK_ERROR(weft_work_wait_all_for(works, 2, 0, &done, &error), WEFT_ABORTED,
                  "*aborted by rank 1: enough");
      weft_work_destroy(works[0]);
    } else {
      CHECK(begun == WEFT_ABORTED && works[0] == NULL);
    }
  }
  OK(weft_work_wait(works[1], &error));
  CHECK(x[0] == 2);
  weft_work_destroy(works[1]);
  weft_group_destroy(other);
  weft_group_destroy(good);
}
static void test_some_fail(void) { run_ranks(2, some_fail); }

/* Callbacks ------------------------------------------------------------------------------------------------
 */

typedef struct calls {
  int order[4]; /* the numbers of the callbacks, as they were called */
  int count;
  weft_status status;
  char text[WEFT_ERROR_TEXT];
} calls;
typedef struct callback {
  calls* to;
  int number;
} callback;
static void called(void* data, const weft_error* error) {
  const callback* c = data;
  c->to->order[c->to->count++] = c->number;
  c->to->status = error == NULL ? WEFT_OK : error->code;
  snprintf(c->to->text, sizeof c->to->text, "%s", error == NULL ? "" : error->text);
}

static void callbacks(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  calls seen = {{0}, 0, -1, ""};
  callback first = {&seen, 1}, second = {&seen, 2}, third = {&seen, 3};
  float x = 1;
  const weft_buffer b = f32(&x, 1);
  weft_work* work = NULL;
  if (a->rank == 1) pthread_barrier_wait(a->meet);
  OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
  if (a->rank == 0) {
    OK(weft_work_then(work, called, &first, &error));
    OK(weft_work_then(work, called, &second, &error));
    CHECK(seen.count == 0);
    pthread_barrier_wait(a->meet);
    OK(weft_work_wait(work, &error));
    CHECK(seen.count == 2 && seen.order[0] == 1 && seen.order[1] == 2 && seen.status == WEFT_OK);
  } else {
    OK(weft_work_wait(work, &error));
  }
  const int before = seen.count;
  OK(weft_work_then(work, called, &third, &error)); /* ended already: at once */
  CHECK(seen.count == before + 1 && seen.order[before] == 3);
  weft_work_destroy(work);

  /* A call that fails, one that had failed, and a Work that is destroyed. */
  work = NULL;
  seen.count = 0;
  if (a->rank == 0) {
    OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
    OK(weft_work_then(work, called, &first, &error));
    OK(weft_group_abort(group, "enough", &error));
    CHECK_ERROR(weft_work_wait(work, &error), WEFT_ABORTED, "*aborted by rank 0: enough");
    CHECK(seen.count == 1 && seen.status == WEFT_ABORTED && strstr(seen.text, "aborted by rank 0: enough"));
    OK(weft_work_then(work, called, &second, &error));
    CHECK(seen.count == 2 && seen.order[1] == 2 && seen.status == WEFT_ABORTED);
    weft_work_destroy(work);
  }
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);

  weft_group* other = join(a, "other", 20000 * MS);
  seen.count = 0;
  work = NULL;
  if (a->rank == 0) {
    OK(weft_all_reduce(other, &b, &b, NULL, &work, &error));
    OK(weft_work_then(work, called, &third, &error));
    weft_work_destroy(work);
    CHECK(seen.count == 1 && seen.status == WEFT_ABORTED && strstr(seen.text, "dropped the Work"));
  }
  pthread_barrier_wait(a->meet);
  weft_group_destroy(other);
}
static void test_callbacks(void) { run_ranks(2, callbacks); }

/* A callback that calls functions that wait: they are refused before anything is sent, so the group lives
 * on. */
typedef struct waiting {
  weft_group* group;
  int refused;
} waiting;
static void call_and_wait(void* data, const weft_error* outcome) {
  waiting* w = data;
  static const char text[] = "*wait: this thread is in a callback of the same group, which may not wait";
  int64_t x = 1, where = 2;
  const weft_buffer b = {&x, 1, WEFT_I64, WEFT_CPU}, index = {&where, 1, WEFT_I64, WEFT_CPU};
  weft_message message;
  weft_call call = WEFT_CALL_INIT;
  call.op = WEFT_OP_BARRIER;
  CHECK(outcome == NULL);
  CHECK_ERROR(weft_all_reduce(w->group, &b, &b, NULL, NULL, &error), WEFT_BAD_ARGUMENT, text);
  CHECK_ERROR(weft_submit(w->group, &call, NULL, &error), WEFT_BAD_ARGUMENT, text);
  CHECK_ERROR(weft_coalesced(w->group, &call, 1, NULL, &error), WEFT_BAD_ARGUMENT, text);
  CHECK_ERROR(weft_min_loc(w->group, &b, &index, &b, &index, NULL, &error), WEFT_BAD_ARGUMENT, text);
  CHECK_ERROR(weft_wait_message(w->group, WEFT_ANY_SOURCE, NULL, &message, &error), WEFT_BAD_ARGUMENT, text);
  ++w->refused;
}
static void waits_in_callbacks(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  float x = 1;
  const weft_buffer b = f32(&x, 1);
  weft_work* work = NULL;
  waiting w = {group, 0};
  OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
  OK(weft_work_then(work, call_and_wait, &w, &error));
  OK(weft_work_wait(work, &error));
  CHECK(w.refused == 1);
  weft_work_destroy(work);
  OK(weft_barrier(group, NULL, NULL, &error));
  weft_group_destroy(group);
}
static void test_waits_in_callbacks(void) { run_ranks(2, waits_in_callbacks); }

/* With no stream but the host's, wait_on waits. */
static void streams(rank_args* a) {
  weft_group* group = join(a, "world", 20000 * MS);
  float x = 1;
  const weft_buffer b = f32(&x, 1);
  weft_work* work = NULL;
  const weft_stream host = {WEFT_CPU, NULL};
  OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
  OK(weft_work_wait_on(work, host, &error));
  CHECK(x == 2);
  OK(weft_work_wait(work, &error));
  const weft_stream wrong = {-7, NULL};
  CHECK_ERROR(weft_work_wait_on(work, wrong, &error), WEFT_BAD_ARGUMENT,
              "weft_work_wait_on: stream.device is -7; expected WEFT_CPU or WEFT_CUDA(index)");
  weft_work_destroy(work);
  weft_group_destroy(group);
}
static void test_streams(void) { run_ranks(2, streams); }

static void test_refused(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  weft_work* works[2] = {NULL, NULL};
  bool done = false;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  const weft_stream host = {WEFT_CPU, NULL};
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
  OK(weft_barrier(g, NULL, &works[0], &error));
  CHECK_ERROR(weft_work_wait_all(NULL, 1, &error), bad, "weft_work_wait_all: works is NULL");
  CHECK_ERROR(weft_work_wait_all(works, 2, &error), bad, "weft_work_wait_all: works[1] is NULL");
  CHECK_ERROR(weft_work_wait_all_for(works, 2, 0, &done, &error), bad,
              "weft_work_wait_all_for: works[1] is NULL");
  CHECK_ERROR(weft_work_wait_all_for(works, 1, -1, &done, &error), bad,
              "weft_work_wait_all_for: limit_ns is -1; expected 0 or more");
  CHECK_ERROR(weft_work_wait_all_for(works, 1, 0, NULL, &error), bad, "weft_work_wait_all_for: done is NULL");
  CHECK_ERROR(weft_work_then(NULL, called, NULL, &error), bad, "weft_work_then: work is NULL");
  CHECK_ERROR(weft_work_then(works[0], NULL, NULL, &error), bad, "weft_work_then: callback is NULL");
  CHECK_ERROR(weft_work_wait_on(NULL, host, &error), bad, "weft_work_wait_on: work is NULL");
  weft_work_destroy(works[0]);
  weft_group_destroy(g);
  weft_context_destroy(c);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"wait_all", test_wait_all},   {"some_fail", test_some_fail},
      {"callbacks", test_callbacks}, {"waits_in_callbacks", test_waits_in_callbacks},
      {"streams", test_streams},     {"refused", test_refused},
  };
  return run_tests(tests, LENGTH(tests), argc, argv);
}
