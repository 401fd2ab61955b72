/* c/transport.h: all operations over the transport of examples/c/host, groups of groups, what it guarantees;
 * failures of each of its functions; a stream that takes or gives nothing; wrong arguments. */
#define _POSIX_C_SOURCE 200809L
#define MAKE_GROUP make_over_queues
#define main collectives_main
#include WEFT_TEST_OPERATIONS /* collectives_test.c */
#undef main

#include WEFT_TEST_QUEUES /* examples/c/host/queues.h */

static hub the_hub = {PTHREAD_MUTEX_INITIALIZER, NULL};

weft_status make_over_queues(rank_args* a, const weft_group_options* options, weft_group** group,
                             weft_error* error) {
  const weft_transport t = queues(&the_hub);
  return weft_group_create_over(a->context, &t, a->store, a->rank, a->size, options, group, error);
}

static weft_status reduce(weft_group* group, float* x, int64_t count, int64_t deadline_ns,
                          weft_error* error) {
  const weft_buffer b = f32(x, count);
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  options.deadline_ns = deadline_ns;
  return weft_all_reduce(group, &b, &b, &options, NULL, error);
}

static void tells(rank_args* a) {
  weft_group *group = join(a, "told", 20000 * MS), *part = NULL, *twin = NULL;
  weft_traits traits = WEFT_TRAITS_INIT;
  const char* backend = NULL;
  float x = (float)a->rank;
  OK(weft_group_backend(group, &backend, &error));
  CHECK(strcmp(backend, "queues") == 0);
  OK(weft_group_traits(group, &traits, &error));
  CHECK(traits.deadline && traits.names_absent && traits.detects_death && traits.survives_death &&
        traits.revocable);
  CHECK(traits.quiesces && !traits.checks_calls && !traits.rings && !traits.spin &&
        traits.device == WEFT_CPU);
  OK(weft_group_split(group, a->rank % 2, -a->rank, &part, &error)); /* with channels of their own */
  OK(weft_group_duplicate(part, &twin, &error));
  OK(reduce(twin, &x, 1, 0, &error));
  CHECK(x == (a->rank % 2 == 0 ? 2 : 4));
  weft_group_destroy(twin);
  weft_group_destroy(part);
  weft_group_destroy(group);
}
static void test_tells(void) { run_ranks(4, tells); }

/* An allocator of the host's: counts what it gives, and gives no more than it may. */
typedef struct pool {
  pthread_mutex_t mutex;
  int64_t blocks, bytes, asked, may_give;
} pool;
static void* pool_allocate(void* data, size_t bytes, size_t alignment) {
  pool* p = data;
  void* memory = NULL;
  pthread_mutex_lock(&p->mutex);
  ++p->asked;
  CHECK(alignment == 64 && bytes > 0 && bytes % 64 == 0);
  if (p->may_give > 0 && (memory = aligned_alloc(alignment, bytes)) != NULL) {
    --p->may_give;
    ++p->blocks;
    p->bytes += (int64_t)bytes;
  }
  pthread_mutex_unlock(&p->mutex);
  return memory;
}
static void pool_deallocate(void* data, void* memory, size_t bytes, size_t alignment) {
  pool* p = data;
  CHECK(alignment == 64 && memory != NULL);
  pthread_mutex_lock(&p->mutex);
  --p->blocks;
  p->bytes -= (int64_t)bytes;
  pthread_mutex_unlock(&p->mutex);
  free(memory);
}
static pool the_pool = {PTHREAD_MUTEX_INITIALIZER, 0, 0, 0, 0};

/* Staging memory of operations, and messages that no receive waits for yet, come from the program's
 * allocator; all of this memory is given back. */
static void pooled(rank_args* in_common) {
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  rank_args own = *in_common, *a = &own;
  float x[1000];
  int32_t message[500] = {a->rank}, received[500] = {0};
  const int other = 1 - a->rank;
  const weft_buffer in = i32(message, 500), out = i32(received, 500);
  weft_work* work = NULL;
  options.allocator.allocate = pool_allocate;
  options.allocator.deallocate = pool_deallocate;
  options.allocator.data = &the_pool;
  OK(weft_context_create(&options, &own.context, &error));
  weft_group* group = join(a, "pooled", 20000 * MS);
  OK(weft_send(group, &in, other, NULL, &work, &error));
  weft_message m = {0, 0, 0, 0};
  OK(weft_wait_message(group, other, NULL, &m, &error));
  CHECK(m.count == 500);
  pthread_barrier_wait(a->meet);
  if (a->rank == 0) CHECK(the_pool.blocks == 2 && the_pool.bytes == 2 * 2048); /* 2000 bytes on each rank */
  pthread_barrier_wait(a->meet);
  OK(weft_recv(group, &out, other, NULL, NULL, &error));
  CHECK(received[0] == other);
  OK(weft_work_wait(work, &error));
  weft_work_destroy(work);

  for (int i = 0; i < 1000; ++i) x[i] = (float)(a->rank + i);
  OK(reduce(group, x, 1000, 0, &error));
  for (int i = 0; i < 1000; ++i) CHECK(x[i] == (float)(1 + 2 * i));

  pthread_barrier_wait(a->meet);
  if (a->rank == 0) the_pool.may_give = 0;
  pthread_barrier_wait(a->meet);
  CHECK_ERROR(
      reduce(group, x, 1000, 0, &error), WEFT_SYSTEM,
      "*all_reduce: 4000 bytes of local memory cannot be allocated: the host's allocator, asked for 4032 "
      "bytes aligned to 64, gave none");
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
  weft_context_destroy(own.context);
}
/* A message for which there is no memory: the receiver's group fails, and the sender learns of it. */
static void no_room_for_message(rank_args* in_common) {
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  rank_args own = *in_common, *a = &own;
  int32_t message[500] = {0};
  weft_message m = {0, 0, 0, 0};
  const weft_buffer in = i32(message, 500);
  options.allocator = (weft_allocator){pool_allocate, pool_deallocate, &the_pool};
  OK(weft_context_create(&options, &own.context, &error));
  weft_group* group = join(a, "pooled", 20000 * MS);
  if (a->rank == 0) {
    CHECK_ERROR(weft_wait_message(group, 1, NULL, &m, &error), WEFT_SYSTEM,
                "*storage: 2000 bytes of local memory cannot be allocated: the host's allocator, asked for "
                "2048 bytes "
                "aligned to 64, gave none");
  } else {
    weft_work* work = NULL;
    if (weft_send(group, &in, 0, NULL, &work, NULL) == WEFT_OK) weft_work_wait(work, NULL);
    weft_work_destroy(work);
    CHECK_ERROR(weft_recv(group, &in, 0, NULL, NULL, &error), WEFT_SYSTEM,
                "*2000 bytes of local memory cannot");
  }
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
  weft_context_destroy(own.context);
}
static void test_allocator(void) {
  the_pool.may_give = INT64_MAX;
  run_ranks(2, pooled);
  CHECK(the_pool.asked > 2 && the_pool.blocks == 0 && the_pool.bytes == 0);
  the_pool.may_give = 0;
  run_ranks(2, no_room_for_message);
  CHECK(the_pool.blocks == 0 && the_pool.bytes == 0);
}

/* More than a queue takes, in both directions at once, and messages for which no rank waits yet. */
static void large(rank_args* a) {
  enum { COUNT = 50000 };
  weft_group* group = join(a, "large", 20000 * MS);
  int32_t* mine = malloc(COUNT * sizeof *mine);
  int32_t* got = malloc(COUNT * sizeof *got);
  const int other = 1 - a->rank;
  weft_work *send = NULL, *later = NULL;
  int32_t first = 100 + a->rank, second = 0;
  weft_call_options tagged = WEFT_CALL_OPTIONS_INIT;
  tagged.tag = 9;
  for (int32_t i = 0; i < COUNT; ++i) mine[i] = i * 3 + a->rank;
  const weft_buffer in = {mine, COUNT, WEFT_I32, WEFT_CPU}, out = {got, COUNT, WEFT_I32, WEFT_CPU};
  const weft_buffer one = {&first, 1, WEFT_I32, WEFT_CPU}, two = {&second, 1, WEFT_I32, WEFT_CPU};
  OK(weft_send(group, &in, other, NULL, &send, &error));
  OK(weft_send(group, &one, other, &tagged, &later, &error));
  OK(weft_recv(group, &two, other, &tagged, NULL, &error)); /* the large one came first, and is kept */
  OK(weft_recv(group, &out, other, NULL, NULL, &error));
  OK(weft_work_wait(send, &error));
  OK(weft_work_wait(later, &error));
  CHECK(second == 100 + other);
  for (int32_t i = 0; i < COUNT; ++i) CHECK(got[i] == i * 3 + other);
  weft_work_destroy(send);
  weft_work_destroy(later);
  weft_group_destroy(group);
  free(mine);
  free(got);
}
static void test_large(void) { run_ranks(2, large); }

/* Failures -------------------------------------------------------------------------------------------------
 */

/* The fault of rank 1's functions. */
enum fault { NONE, FAILS, LOSES, SILENT, NO_STATUS, TOO_MUCH, HANGS, GARBAGE };
static enum fault write_fault, read_fault, open_fault;

static weft_status faulty(enum fault fault, weft_error* error) {
  if (fault == FAILS) snprintf(error->text, sizeof error->text, "the cable is cut");
  if (fault == FAILS || fault == SILENT) return WEFT_SYSTEM;
  if (fault == LOSES) return WEFT_PEER_LOST;
  if (fault == NO_STATUS) return 77;
  return WEFT_OK;
}
static weft_status faulty_write(void* opened, int32_t to, const void* bytes, size_t count, size_t* taken,
                                weft_error* error) {
  channel* c = opened;
  const enum fault fault = c->rank == 1 ? write_fault : NONE;
  unsigned char garbage[64];
  const weft_status status = faulty(fault, error);
  if (status != WEFT_OK) return status;
  if (fault == TOO_MUCH) *taken = count + 1;
  if (fault == TOO_MUCH || fault == HANGS) return WEFT_OK;
  memset(garbage, 0xff, sizeof garbage);
  if (fault == GARBAGE) return queues_write(opened, to, garbage, count < 64 ? count : 64, taken, error);
  return queues_write(opened, to, bytes, count, taken, error);
}
static weft_status faulty_read(void* opened, int32_t from, void* bytes, size_t count, size_t* got,
                               weft_error* error) {
  channel* c = opened;
  const enum fault fault = c->rank == 1 ? read_fault : NONE;
  const weft_status status = faulty(fault, error);
  if (status != WEFT_OK) return status;
  if (fault == TOO_MUCH) *got = count + 1;
  if (fault == TOO_MUCH || fault == HANGS) return WEFT_OK;
  return queues_read(opened, from, bytes, count, got, error);
}
static weft_status faulty_open(void* data, const weft_channel_init* init, void** opened, weft_error* error) {
  const weft_status opens = queues_open(data, init, opened, error);
  const weft_status status = faulty(init->transport_ranks[init->rank] == 1 ? open_fault : NONE, error);
  if (opens == WEFT_OK && status != WEFT_OK) queues_close(*opened);
  return status != WEFT_OK ? status : opens;
}
static weft_status make_faulty(rank_args* a, weft_group** group, weft_error* error) {
  weft_transport t = queues(&the_hub);
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  options.name = "faulty";
  options.deadline_ns = 20000 * MS;
  t.open = faulty_open;
  t.write = faulty_write;
  t.read = faulty_read;
  return weft_group_create_over(a->context, &t, a->store, a->rank, a->size, &options, group, error);
}

static weft_status expected_status;
static const char* expected_text;
static int64_t call_deadline;
static void fails(rank_args* a) {
  weft_group* group = NULL;
  float x[3] = {1, 2, 3};
  bool quiet = false;
  OK(make_faulty(a, &group, &error));
  /* All ranks get the same first cause. */
  CHECK_ERROR(reduce(group, x, 3, call_deadline, &error), expected_status, expected_text);
  CHECK_ERROR(weft_barrier(group, NULL, NULL, &error), expected_status, "*");
  OK(weft_group_quiesce(group, 2000 * MS, &quiet, &error));
  CHECK(quiet);
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
static void expect(enum fault write, enum fault read, weft_status status, const char* text) {
  write_fault = write;
  read_fault = read;
  expected_status = status;
  expected_text = text;
  run_ranks(3, fails);
  write_fault = read_fault = NONE;
}
static void test_failures(void) {
  call_deadline = 20000 * MS;
  expect(FAILS, NONE, WEFT_SYSTEM, "*transport queues: write to rank ");
  expect(FAILS, NONE, WEFT_SYSTEM, "* on rank 1: the cable is cut");
  expect(NONE, FAILS, WEFT_SYSTEM, "*transport queues: read from rank ");
  expect(NONE, SILENT, WEFT_SYSTEM, "* on rank 1: system");
  expect(LOSES, NONE, WEFT_PEER_LOST, "* on rank 1: peer_lost");
  expect(NO_STATUS, NONE, WEFT_SYSTEM, "*it returned 77, which is no weft_status");
  expect(TOO_MUCH, NONE, WEFT_SYSTEM, "*taken is ");
  expect(NONE, TOO_MUCH, WEFT_SYSTEM, "*got is ");
  expect(GARBAGE, NONE, WEFT_SYSTEM,
         "*read from rank 1 is no message of weft: bytes are lost, or in another order");
}
static void test_hangs(void) {
  call_deadline = 50 * MS;
  expect(HANGS, NONE, WEFT_TIMEOUT, "*rank ");
  expect(NONE, HANGS, WEFT_TIMEOUT, "*rank ");
}

static void cannot_open(rank_args* a) {
  weft_group* group = NULL;
  CHECK_ERROR(make_faulty(a, &group, &error), WEFT_SYSTEM,
              "*transport queues: open on rank 1: the cable is cut");
  CHECK(group == NULL);
}
static void test_open(void) {
  open_fault = FAILS;
  run_ranks(3, cannot_open);
  open_fault = NONE;
}

static void leaves(rank_args* a) {
  weft_group* group = join(a, "left", 20000 * MS);
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  if (a->rank == 0)
    CHECK_ERROR(weft_recv(group, &b, 1, NULL, NULL, &error), WEFT_PEER_LOST, "*rank 1 has left the group");
  weft_group_destroy(group);
}
/* Rank 0 has left and closed its end: its earlier bytes are still unread. */
static void leaves_and_closes(rank_args* a) {
  weft_group* group = NULL;
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  OK(make_faulty(a, &group, &error));
  OK(reduce(group, &x, 1, 0, &error));
  pthread_barrier_wait(a->meet);
  if (a->rank == 0) weft_group_destroy(group);
  pthread_barrier_wait(a->meet);
  if (a->rank == 0) return;
  write_fault = LOSES;
  CHECK_ERROR(weft_send(group, &b, 0, NULL, NULL, &error), WEFT_PEER_LOST, "*rank 0 has left the group");
  weft_group_destroy(group);
  write_fault = NONE;
}
static void mismatches(rank_args* a) {
  weft_group* group = join(a, "mixed", 20000 * MS);
  float x[2] = {0};
  const weft_buffer b = f32(x, a->rank == 0 ? 1 : 2);
  if (a->rank == 1)
    CHECK_ERROR(weft_recv(group, &b, 0, NULL, NULL, &error), WEFT_MISMATCH, "*rank 0 sen");
  else
    OK(weft_send(group, &b, 1, NULL, NULL, &error));
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
/* A time-out lists the messages that have arrived instead, because the tag may be wrong. */
static void other_tag(rank_args* a) {
  weft_group* group = join(a, "tags", 20000 * MS);
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  weft_call_options options = WEFT_CALL_OPTIONS_INIT;
  options.tag = a->rank == 0 ? 7 : 8;
  options.deadline_ns = 200 * MS;
  if (a->rank == 1) OK(weft_send(group, &b, 0, &options, NULL, &error));
  pthread_barrier_wait(a->meet);
  if (a->rank == 0)
    CHECK_ERROR(weft_recv(group, &b, 1, &options, NULL, &error), WEFT_TIMEOUT,
                "*rank 1 has not sent it (tag 7); messages that were not received: tag 8 from rank 1");
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
/* Messages of a rank to itself are limited like messages of other ranks. */
static void too_many_to_self(rank_args* a) {
  weft_group* group = join(a, "self", 20000 * MS);
  float x = 0;
  const weft_buffer b = f32(&x, 1);
  if (a->rank == 0) {
    for (int i = 0; i < 3; ++i) OK(weft_send(group, &b, 0, NULL, NULL, &error));
    CHECK_ERROR(
        weft_send(group, &b, 0, NULL, NULL, &error), WEFT_SYSTEM,
        "*rank 0 has no room for a message of 4 bytes with tag 0 from rank 0: it holds 3 messages of 12 "
        "bytes that it has not received yet, and WEFT_UNEXPECTED_MESSAGES is 3");
  }
  pthread_barrier_wait(a->meet);
  weft_group_destroy(group);
}
static void shrinks(rank_args* a) {
  weft_group *group = join(a, "shrunk", 20000 * MS), *rest = NULL;
  float x = 1;
  int32_t size = 0;
  OK(reduce(group, &x, 1, 0, &error));
  if (a->rank != 0) {
    const weft_buffer b = f32(&x, 1);
    CHECK_ERROR(weft_recv(group, &b, 0, NULL, NULL, &error), WEFT_PEER_LOST, "*rank 0 has left");
    OK(weft_group_shrink(group, 5000 * MS, &rest, &error));
    OK(weft_group_size(rest, &size, &error));
    x = 1;
    OK(reduce(rest, &x, 1, 0, &error));
    CHECK(size == 2 && x == 2);
    weft_group_destroy(rest);
  }
  weft_group_destroy(group);
}
static void test_peers(void) {
  run_ranks(2, leaves);
  run_ranks(2, leaves_and_closes);
  run_ranks(2, mismatches);
  run_ranks(2, other_tag);
  setenv("WEFT_UNEXPECTED_MESSAGES", "3", 1);
  run_ranks(2, too_many_to_self);
  unsetenv("WEFT_UNEXPECTED_MESSAGES");
  run_ranks(3, shrinks);
}

/* Rank 0 says "queues", rank 1 something else. */
static void other_names(rank_args* a) {
  weft_transport t = queues(&the_hub);
  weft_group* group = NULL;
  if (a->rank == 1) t.name = "cables";
  CHECK_ERROR(weft_group_create_over(a->context, &t, a->store, a->rank, a->size, NULL, &group, &error),
              WEFT_MISMATCH, "*has the transport ");
}

static void test_wrong_transports(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  weft_transport t = queues(&the_hub);
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  OK(weft_context_create(NULL, &c, &error));
  CHECK_ERROR(weft_group_create_over(NULL, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: context is NULL");
  CHECK_ERROR(weft_group_create_over(c, NULL, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport is NULL");
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, NULL, &error), bad,
              "weft_group_create_over: group is NULL");
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 2, NULL, &g, &error), bad,
              "weft_group_create_over: store is NULL");
  options.backend = "shm";
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, &options, &g, &error), bad,
              "weft_group_create_over: options->backend is \"shm\"; expected NULL with a transport");
  t.name = "two words";
  CHECK_ERROR(
      weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
      "weft_group_create_over: transport->name is \"two words\"; expected 1 to 31 letters, digits, '-', '_'");
  t.name = NULL;
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport->name is NULL");
  t = queues(&the_hub);
  t.open = NULL;
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport->open is NULL");
  t = queues(&the_hub);
  t.write = NULL;
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport->write is NULL");
  t = queues(&the_hub);
  t.read = NULL;
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport->read is NULL");
  t.struct_size = 7;
  CHECK_ERROR(weft_group_create_over(c, &t, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_over: transport->struct_size is 7; expected 56: initialise it with "
              "WEFT_TRANSPORT_INIT");
  CHECK(g == NULL);
  weft_context_destroy(c);
  run_ranks(2, other_names);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"tells", test_tells}, {"allocator", test_allocator},
      {"large", test_large}, {"failures", test_failures},
      {"hangs", test_hangs}, {"open", test_open},
      {"peers", test_peers}, {"wrong_transports", test_wrong_transports},
  };
  /* All operations. "users_function" is left out, because its function takes elements in pairs and
   * composed calls may separate a pair. */
  static const char* const operations[] = {"equal_blocks", "blocks",         "messages", "from_any_source",
                                           "min_and_max",  "users_elements", "lists"};
  for (size_t i = 0; argc < 2 && i < LENGTH(operations); ++i) {
    char name[32];
    char* arguments[] = {argv[0], name};
    snprintf(name, sizeof name, "%s", operations[i]);
    CHECK(collectives_main(2, arguments) == 0);
  }
  const int result = run_tests(tests, LENGTH(tests), argc, argv);
  CHECK(the_hub.first == NULL); /* every channel was closed */
  return result;
}
