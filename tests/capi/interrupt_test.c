/* c/interrupt.h: a rank that waits for another one is interrupted by a thread, and by the handler of a
 * signal. */
#include "support.h"

#include <signal.h>
#include <time.h>
#include <unistd.h>

static weft_interrupt* current;

static void nap(long ms) {
  const struct timespec time = {0, ms * MS};
  nanosleep(&time, NULL);
}
static void* raise_soon(void* interrupt) {
  nap(100);
  OK(weft_interrupt_raise(interrupt, &error));
  return NULL;
}
static void handler(int number) {
  (void)number;
  (void)weft_interrupt_raise(current, NULL);
}
static void* signal_soon(void* interrupt) {
  (void)interrupt;
  nap(100);
  CHECK(kill(getpid(), SIGUSR1) == 0);
  return NULL;
}

/* A fresh interrupt for this thread, which `raiser` raises; NULL: it is raised already. */
static pthread_t begin(void* (*raiser)(void*)) {
  pthread_t thread = pthread_self();
  OK(weft_interrupt_create(&current, &error));
  OK(weft_interrupt_attach(current, &error));
  if (raiser == NULL)
    OK(weft_interrupt_raise(current, &error));
  else
    CHECK(pthread_create(&thread, NULL, raiser, current) == 0);
  return thread;
}
static void end(pthread_t thread) {
  if (!pthread_equal(thread, pthread_self())) CHECK(pthread_join(thread, NULL) == 0);
  OK(weft_interrupt_attach(NULL, &error));
  weft_interrupt_destroy(current);
}

static void a_group(weft_context* context, void* (*raiser)(void*)) {
  weft_store* store = NULL;
  weft_group* group = NULL;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  options.backend = "shm";
  OK(weft_store_create_local(&store, &error));
  const time_t began = time(NULL);
  const pthread_t thread = begin(raiser);
  weft_error said = WEFT_ERROR_INIT;
  CHECK(weft_group_create(context, store, 0, 2, &options, &group, &said) == WEFT_ABORTED);
  CHECK(said.code == WEFT_ABORTED && said.rank_count == 1 && said.ranks[0] == 0 && group == NULL);
  CHECK(strstr(said.text, "rank 0 was interrupted while it was made [rank 0]") != NULL);
  /* It interrupts only once. The next failing call fails for its own reason. */
  CHECK_ERROR(weft_group_create(context, store, 2, 2, &options, &group, &error), WEFT_BAD_ARGUMENT,
              "*rank is 2");
  end(thread);
  CHECK_ERROR(weft_group_create(context, store, 1, 2, &options, &group, &error), WEFT_ABORTED,
              "*rank 0 was interrupted while it was made [rank 1]");
  CHECK(time(NULL) - began < 30);
  weft_store_destroy(store);
}

static void a_store(void) {
  weft_store* store = NULL;
  weft_text* value = NULL;
  OK(weft_store_create_local(&store, &error));
  pthread_t thread = begin(raise_soon);
  CHECK_ERROR(weft_store_get(store, "k", 0, &value, &error), WEFT_ABORTED,
              "*weft_store_get: interrupted; what it waited for: store: key \"k\" was not set within");
  OK(weft_store_set(store, "k", "x", 1, 0, &error)); /* the store is as good as before */
  end(thread);
  OK(weft_store_get(store, "k", 0, &value, &error));
  weft_text_destroy(value);
  weft_store_destroy(store);
  thread = begin(raise_soon);
  CHECK_ERROR(weft_store_create_tcp("127.0.0.1", 1, NULL, 0, &store, &error), WEFT_ABORTED,
              "*weft_store_create_tcp: interrupted; what it waited for: store: no server at 127.0.0.1:1");
  end(thread);
}

/* Rank 0 waits for rank 1 in a call. With a limit the call stays in flight. Without a limit the group
 * fails on both. */
static void a_call(rank_args* a) {
  weft_group* group = NULL;
  weft_work* work = NULL;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  options.backend = "shm";
  options.name = "pair";
  OK(weft_group_create(a->context, a->store, a->rank, a->size, &options, &group, &error));
  if (a->rank == 0) {
    bool done = true;
    pthread_t thread = begin(NULL);
    OK(weft_barrier(group, NULL, &work, &error));
    OK(weft_work_wait_for(work, 60000 * MS, &done, &error));
    CHECK(!done);
    end(thread);
    thread = begin(raise_soon);
    CHECK_ERROR(weft_work_wait(work, &error), WEFT_ABORTED,
                "barrier: rank 0 was interrupted while it waited [group \"pair\", rank 0, call 0]");
    end(thread);
  } else {
    nap(900);
    double least = 1, where_least = 0;
    int64_t index = 0, where = 0;
    const weft_buffer value = {&least, 1, WEFT_F64, WEFT_CPU}, indices = {&index, 1, WEFT_I64, WEFT_CPU},
                      to = {&where_least, 1, WEFT_F64, WEFT_CPU}, where_to = {&where, 1, WEFT_I64, WEFT_CPU};
    CHECK_ERROR(weft_min_loc(group, &value, &indices, &to, &where_to, NULL, &error), WEFT_ABORTED,
                "barrier: rank 0 was interrupted while it waited [group \"pair\", rank 1, call 0]");
  }
  weft_work_destroy(work);
  weft_group_destroy(group);
}

/* A destroyed interrupt stays attached, and interrupts nobody. */
static void destroyed(void) {
  weft_store* store = NULL;
  weft_text* value = NULL;
  weft_interrupt* interrupt = NULL;
  OK(weft_store_create_local(&store, &error));
  OK(weft_interrupt_create(&interrupt, &error));
  OK(weft_interrupt_attach(interrupt, &error));
  weft_interrupt_destroy(interrupt);
  CHECK_ERROR(weft_interrupt_raise(interrupt, &error), WEFT_BAD_ARGUMENT, "*interrupt");
  CHECK_ERROR(weft_store_get(store, "k", 50 * MS, &value, &error), WEFT_TIMEOUT, "*was not set within");
  OK(weft_interrupt_attach(NULL, &error));
  weft_store_destroy(store);
}

int main(void) {
  weft_context* context = NULL;
  struct sigaction action = {.sa_handler = handler};
  CHECK(sigaction(SIGUSR1, &action, NULL) == 0);
  OK(weft_context_create(NULL, &context, &error));
  a_group(context, raise_soon);
  a_group(context, signal_soon);
  a_group(context, NULL);
  a_store();
  run_ranks(2, a_call);
  destroyed();
  weft_context_destroy(context);
  return 0;
}
