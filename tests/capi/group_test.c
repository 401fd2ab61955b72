/* c/group.h and c/trace.h: groups made in each way, groups made from groups, properties of a group, the
 * recorder, wrong arguments. Environment and shrink are in capi_test.c. */
#define _POSIX_C_SOURCE 200809L
#include "support.h"

#include <arpa/inet.h>
#include <netinet/in.h>
#include <sys/socket.h>
#include <unistd.h>

static float sum_over(weft_group* group, float x) {
  const weft_buffer b = f32(&x, 1);
  OK(weft_all_reduce(group, &b, &b, NULL, NULL, &error));
  return x;
}

/* Properties of a group -------------------------------------------------------------------------------------
 */

/* Options of a group that are wrong; a canonical order, which shm has anyway. */
static void orders(rank_args* a) {
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  options.order = 2;
  CHECK_ERROR(weft_group_create(a->context, a->store, a->rank, a->size, &options, &group, &error),
              WEFT_BAD_ARGUMENT,
              "weft_group_create: options->order is 2; expected 0 (WEFT_ORDER_NATIVE) or 1 "
              "(WEFT_ORDER_CANONICAL)");
  options.order = WEFT_ORDER_CANONICAL;
  OK(weft_group_create(a->context, a->store, a->rank, a->size, &options, &group, &error));
  int32_t x = a->rank + 1;
  const weft_buffer b = {&x, 1, WEFT_I32, WEFT_CPU};
  OK(weft_all_reduce(group, &b, &b, NULL, NULL, &error));
  CHECK(x == 3);
  weft_group_destroy(group);
}
static void test_orders(void) { run_ranks(2, orders); }

static void tells(rank_args* a) {
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  weft_traits traits = WEFT_TRAITS_INIT, known = WEFT_TRAITS_INIT;
  const char *name = NULL, *backend = NULL;
  int32_t local_rank = -1, local_size = -1;
  options.name = "told";
  options.progress = WEFT_PROGRESS_THREAD;
  OK(weft_group_create(a->context, a->store, a->rank, a->size, &options, &group, &error));
  OK(weft_group_name(group, &name, &error));
  OK(weft_group_backend(group, &backend, &error));
  CHECK(strcmp(name, "told") == 0 && strcmp(backend, "shm") == 0);
  OK(weft_group_local_rank(group, &local_rank, &error));
  OK(weft_group_local_size(group, &local_size, &error));
  CHECK(local_rank == a->rank && local_size == a->size);
  OK(weft_group_traits(group, &traits, &error));
  CHECK(traits.struct_size == sizeof traits && traits.progress_style == WEFT_PROGRESS_POLLED);
  CHECK((traits.ops & WEFT_OP_BIT(WEFT_OP_ALL_REDUCE)) != 0 && (traits.ops & WEFT_OP_BIT(WEFT_OP_NONE)) == 0);
  CHECK((traits.dtypes & WEFT_DTYPE_BIT(WEFT_BF16)) != 0 && traits.device == WEFT_CPU);
  CHECK((traits.reduces[WEFT_SUM] & WEFT_DTYPE_BIT(WEFT_F32)) != 0);
  CHECK((traits.reduces[WEFT_BIT_AND] & WEFT_DTYPE_BIT(WEFT_F32)) == 0);
  CHECK(traits.native_is_canonical && traits.deadline && traits.names_absent && traits.detects_death);
  CHECK(traits.survives_death && traits.checks_calls && traits.revocable && traits.quiesces && traits.rings);
  OK(weft_backend_traits(a->context, "shm", &known, &error));
  CHECK(known.ops == traits.ops && known.dtypes == traits.dtypes && known.quiesces);

  /* The helper thread takes the steps: the program does not poll until the call is done. */
  float x = 1;
  const weft_buffer b = f32(&x, 1);
  weft_work* work = NULL;
  OK(weft_all_reduce(group, &b, &b, NULL, &work, &error));
  OK(weft_work_wait(work, &error));
  CHECK(x == (float)a->size);
  weft_work_destroy(work);
  weft_group_destroy(group);
}
static void test_tells(void) { run_ranks(3, tells); }

/* A struct of an earlier version gets what it has room for, one of a later version keeps what is beyond. */
static void test_traits_sizes(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  struct {
    weft_traits known;
    int64_t later;
  } wider = {WEFT_TRAITS_INIT, 77};
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
  wider.known.struct_size = sizeof wider;
  OK(weft_group_traits(g, &wider.known, &error));
  CHECK(wider.later == 77 && wider.known.quiesces && wider.known.struct_size == sizeof wider);
  wider.known.struct_size = 4;
  CHECK_ERROR(
      weft_group_traits(g, &wider.known, &error), WEFT_BAD_ARGUMENT,
      "weft_group_traits: traits->struct_size is 4; expected 296: initialise it with WEFT_TRAITS_INIT");
  CHECK_ERROR(weft_backend_traits(c, "no-such", &wider.known, &error), WEFT_UNSUPPORTED, "*no-such");
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* Groups of groups -----------------------------------------------------------------------------------------
 */

static void derived(rank_args* a) {
  weft_group *world = join(a, "world", 20000 * MS), *part = NULL, *pair = NULL, *twin = NULL, *host = NULL;
  int32_t rank = -1, size = -1, parent = -1;
  const char* name = NULL;
  /* Groups of the even and of the odd ranks, the highest rank first; rank 2 is in no group. */
  OK(weft_group_split(world, a->rank == 2 ? -1 : a->rank % 2, -a->rank, &part, &error));
  CHECK((part == NULL) == (a->rank == 2));
  if (part != NULL) {
    OK(weft_group_rank(part, &rank, &error));
    OK(weft_group_size(part, &size, &error));
    CHECK(size == (a->rank % 2 == 1 ? 2 : 1) && rank == (a->rank == 1 ? 1 : 0));
    OK(weft_group_parent_rank(part, 0, &parent, &error));
    CHECK(parent == (a->rank % 2 == 1 ? 3 : 0));
    CHECK(sum_over(part, (float)a->rank) == (a->rank % 2 == 1 ? 4 : 0));
  }
  if (a->rank == 3 || a->rank == 0) { /* members alone call it */
    const int32_t ranks[] = {3, 0};
    OK(weft_group_subgroup(world, "ends", ranks, 2, &pair, &error));
    OK(weft_group_rank(pair, &rank, &error));
    OK(weft_group_name(pair, &name, &error));
    CHECK(rank == (a->rank == 3 ? 0 : 1) && strcmp(name, "ends") == 0);
    CHECK(sum_over(pair, (float)a->rank) == 3);
  }
  OK(weft_group_duplicate(world, &twin, &error));
  OK(weft_group_split_by_host(world, &host, &error));
  OK(weft_group_size(host, &size, &error));
  CHECK(size == 4);
  weft_group_destroy(world); /* before those made from it */
  CHECK(sum_over(twin, 1) == 4);
  CHECK(sum_over(host, 2) == 8);
  weft_group_destroy(pair);
  weft_group_destroy(part);
  weft_group_destroy(twin);
  weft_group_destroy(host);
}
static void test_derived(void) { run_ranks(4, derived); }

/* Rendezvous -----------------------------------------------------------------------------------------------
 */

/* A port that nobody uses right now. */
static int free_port(void) {
  struct sockaddr_in at;
  socklen_t length = sizeof at;
  const int s = socket(AF_INET, SOCK_STREAM, 0);
  memset(&at, 0, sizeof at);
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  CHECK(s >= 0 && bind(s, (struct sockaddr*)&at, sizeof at) == 0);
  CHECK(getsockname(s, (struct sockaddr*)&at, &length) == 0);
  close(s);
  return ntohs(at.sin_port);
}
static int tcp_port;

static void by_tcp(rank_args* a) {
  for (int again = 0; again < 2; ++again) { /* the second time the server is there already */
    weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
    weft_group* group = NULL;
    options.process_rank = a->rank; /* ranks are threads here */
    OK(weft_group_create_tcp(a->context, "127.0.0.1", tcp_port, NULL, a->rank, a->size, &options, &group,
                             &error));
    CHECK(sum_over(group, (float)(a->rank + 1)) == 6);
    weft_group_destroy(group);
  }
}
static void test_tcp(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  tcp_port = free_port();
  run_ranks(3, by_tcp);

  OK(weft_context_create(NULL, &c, &error));
  options.deadline_ns = 50 * MS;
  CHECK_ERROR(weft_group_create_tcp(c, "127.0.0.1", tcp_port, NULL, 1, 2, &options, &g, &error), WEFT_TIMEOUT,
              "*127.0.0.1:");
  CHECK_ERROR(weft_group_create_tcp(c, "127.0.0.1", tcp_port, NULL, 0, 2, &options, &g, &error), WEFT_TIMEOUT,
              "*rank 1 did not join");
  CHECK_ERROR(weft_group_create_tcp(c, "0.0.0.0", tcp_port, NULL, 0, 2, &options, &g, &error),
              WEFT_BAD_ARGUMENT, "*secret");
  CHECK(g == NULL);
  OK(weft_group_create_tcp(c, "127.0.0.1", tcp_port, NULL, 0, 1, NULL, &g,
                           &error)); /* alone: nobody serves */
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* The ranks' own connection: memory and a barrier. `wrong_*`: what it does instead. */
typedef struct wire {
  rank_args* rank;
  const char* host;
  int32_t answer;
  bool garbage;
} wire;
static char wire_bytes[4096];
static int32_t broadcast(void* data, void* bytes, size_t count) {
  wire* w = data;
  CHECK(count <= sizeof wire_bytes);
  if (w->rank->rank == 0) memcpy(wire_bytes, bytes, count);
  pthread_barrier_wait(w->rank->meet);
  if (w->rank->rank != 0) memcpy(bytes, wire_bytes, count);
  if (w->garbage) memset(bytes, 0, count);
  pthread_barrier_wait(w->rank->meet);
  return w->answer;
}

static weft_status by_broadcast(wire* w, const char* name, int64_t deadline_ns, weft_group** group,
                                weft_error* error) {
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  rank_args* a = w->rank;
  options.process_rank = a->rank;
  options.name = name;
  options.deadline_ns = deadline_ns;
  return weft_group_create_by_broadcast(a->context, a->rank == 0 ? w->host : NULL, a->rank, a->size,
                                        broadcast, w, &options, group, error);
}

static void broadcasts(rank_args* a) {
  wire w = {a, NULL, 0, false};
  weft_group* group = NULL;
  weft_error e = WEFT_ERROR_INIT;
  for (int again = 0; again < 2; ++again) {
    OK(by_broadcast(&w, "wired", 20000 * MS, &group, &error));
    CHECK(sum_over(group, (float)(a->rank + 1)) == 6);
    weft_group_destroy(group);
  }
  group = NULL;
  /* With a secret, because `host` might be reachable from other hosts. */
  w.host = "127.0.0.1";
  if (by_broadcast(&w, "secret", 20000 * MS, &group, &e) == WEFT_OK) {
    CHECK(sum_over(group, (float)(a->rank + 1)) == 6);
    weft_group_destroy(group);
  } else {
    CHECK(e.code == WEFT_UNSUPPORTED && strstr(e.text, "libsodium") != NULL);
  }
  group = NULL;
  /* Rank 0 cannot serve: all ranks get the reason. */
  w.host = "no such host.invalid";
  CHECK_ERROR(by_broadcast(&w, "none", 20000 * MS, &group, &error), WEFT_SYSTEM,
              "*weft_group_create_by_broadcast: rank 0 cannot serve: ");
  w.host = NULL;
  w.garbage = true;
  char text[160];
  snprintf(text, sizeof text,
           "weft_group_create_by_broadcast: broadcast copied bytes of nobody to rank %d; expected those of "
           "rank 0, "
           "of weft " WEFT_VERSION,
           a->rank);
  CHECK_ERROR(by_broadcast(&w, "garbage", 20000 * MS, &group, &error), WEFT_MISMATCH, text);
  w.garbage = false;
  w.answer = 7;
  snprintf(text, sizeof text, "weft_group_create_by_broadcast: broadcast returned 7 on rank %d; expected 0",
           a->rank);
  CHECK_ERROR(by_broadcast(&w, "failing", 20000 * MS, &group, &error), WEFT_SYSTEM, text);
  CHECK(group == NULL);
}
static void test_broadcast(void) {
  weft_context* c = NULL;
  weft_group* g = NULL;
  run_ranks(3, broadcasts);
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_group_create_by_broadcast(c, NULL, 0, 1, broadcast, NULL, NULL, &g, &error)); /* it is not called */
  weft_group_destroy(g);
  weft_context_destroy(c);
}

/* Ranks are threads: one group over a file, another over a server of the program. */
static void other_stores(rank_args* a) {
  weft_group* group = NULL;
  CHECK(a->store != NULL);
  OK(weft_group_create(a->context, a->store, a->rank, a->size, NULL, &group, &error));
  CHECK(sum_over(group, 1) == 2);
  weft_group_destroy(group);
}
static void test_other_stores(void) {
  char folder[] = "/tmp/weft-group-test-XXXXXX", path[64];
  weft_context* c = NULL;
  weft_store* s = NULL;
  weft_store_server* server = NULL;
  int32_t port = 0;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/store", folder);
  OK(weft_store_create_file(path, 0, &s, &error));
  run_ranks_in(s, 2, other_stores);
  weft_store_destroy(s);
  CHECK(unlink(path) == 0 && rmdir(folder) == 0);

  OK(weft_context_create(NULL, &c, &error));
  OK(weft_store_server_create(c, NULL, &server, &error));
  OK(weft_store_server_port(server, &port, &error));
  OK(weft_store_create_tcp("127.0.0.1", port, NULL, 0, &s, &error));
  run_ranks_in(s, 2, other_stores);
  weft_store_destroy(s);
  weft_store_server_destroy(server);
  weft_context_destroy(c);
}

/* The recorder ---------------------------------------------------------------------------------------------
 */

static void recorded(rank_args* a) {
  weft_group* group = join(a, "recorded", 20000 * MS);
  weft_text* json = NULL;
  sum_over(group, 1);
  OK(weft_group_trace_json(group, &json, &error));
  CHECK(strstr(weft_text_data(json), "\"all_reduce\"") != NULL &&
        strstr(weft_text_data(json), "recorded") != NULL);
  CHECK(strlen(weft_text_data(json)) == weft_text_size(json));
  weft_text_destroy(json);
  OK(weft_group_trace_chrome(group, &json, &error));
  CHECK(strstr(weft_text_data(json), "traceEvents") != NULL);
  weft_text_destroy(json);
  weft_group_destroy(group);
}
static void test_trace(void) { run_ranks(2, recorded); }

/* Wrong arguments ------------------------------------------------------------------------------------------
 */

static void test_wrong_arguments(void) {
  weft_context* c = NULL;
  weft_group *g = NULL, *other = NULL;
  weft_text* json = NULL;
  weft_traits traits = WEFT_TRAITS_INIT;
  const char* text = NULL;
  int32_t number = 0;
  const int32_t ranks[] = {0, 0, 7};
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  OK(weft_context_create(NULL, &c, &error));
  options.progress = 2;
  CHECK_ERROR(weft_group_create(c, NULL, 0, 1, &options, &g, &error), bad,
              "weft_group_create: options->progress is 2; expected 0 (WEFT_PROGRESS_CALLER) or 1 "
              "(WEFT_PROGRESS_THREAD)");
  options.progress = WEFT_PROGRESS_CALLER;
  options.process_rank = -2;
  CHECK_ERROR(weft_group_from_env(c, &options, &g, &error), bad,
              "weft_group_from_env: options->process_rank is -2; expected -1 or more");

  CHECK_ERROR(weft_group_create_tcp(NULL, "h", 1, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_tcp: context is NULL");
  CHECK_ERROR(weft_group_create_tcp(c, NULL, 1, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_tcp: host is NULL");
  CHECK_ERROR(weft_group_create_tcp(c, "h", 0, NULL, 0, 1, NULL, &g, &error), bad,
              "weft_group_create_tcp: port is 0; expected 1 to 65535");
  CHECK_ERROR(weft_group_create_tcp(c, "h", 1, NULL, 2, 2, NULL, &g, &error), bad,
              "weft_group_create_tcp: rank is 2; expected 0 to 1 (size 2)");
  CHECK_ERROR(weft_group_create_tcp(c, "h", 1, NULL, 0, 0, NULL, &g, &error), bad,
              "weft_group_create_tcp: size is 0; expected 1 to 65536");
  CHECK_ERROR(weft_group_create_tcp(c, "h", 1, NULL, 0, 1, NULL, NULL, &error), bad,
              "weft_group_create_tcp: group is NULL");
  CHECK_ERROR(weft_group_create_tcp(c, "h", 1, NULL, 0, 1, &options, &g, &error), bad,
              "weft_group_create_tcp: options->process_rank is -2; expected -1 or more");
  CHECK_ERROR(weft_group_create_by_broadcast(NULL, NULL, 0, 1, broadcast, NULL, NULL, &g, &error), bad,
              "weft_group_create_by_broadcast: context is NULL");
  CHECK_ERROR(weft_group_create_by_broadcast(c, NULL, -1, 1, broadcast, NULL, NULL, &g, &error), bad,
              "weft_group_create_by_broadcast: rank is -1; expected 0 to 0 (size 1)");
  CHECK_ERROR(weft_group_create_by_broadcast(c, NULL, 0, 1, NULL, NULL, NULL, &g, &error), bad,
              "weft_group_create_by_broadcast: broadcast is NULL");
  CHECK_ERROR(weft_group_create_by_broadcast(c, NULL, 0, 1, broadcast, NULL, NULL, NULL, &error), bad,
              "weft_group_create_by_broadcast: group is NULL");
  CHECK(g == NULL);

  OK(weft_group_create(c, NULL, 0, 1, NULL, &g, &error));
  CHECK_ERROR(weft_group_subgroup(NULL, "s", ranks, 1, &other, &error), bad,
              "weft_group_subgroup: group is NULL");
  CHECK_ERROR(weft_group_subgroup(g, NULL, ranks, 1, &other, &error), bad,
              "weft_group_subgroup: name is NULL");
  CHECK_ERROR(weft_group_subgroup(g, "s", NULL, 1, &other, &error), bad,
              "weft_group_subgroup: ranks is NULL");
  CHECK_ERROR(weft_group_subgroup(g, "s", ranks, 1, NULL, &error), bad,
              "weft_group_subgroup: subgroup is NULL");
  CHECK_ERROR(weft_group_subgroup(g, "s", NULL, 0, &other, &error), bad,
              "subgroup \"s\": ranks is empty [group \"world\", rank 0]");
  CHECK_ERROR(weft_group_subgroup(g, "s", ranks, 2, &other, &error), bad,
              "subgroup \"s\": ranks holds 0 twice [group \"world\", rank 0]");
  CHECK_ERROR(weft_group_subgroup(g, "s", ranks, 3, &other, &error), bad,
              "subgroup \"s\": ranks holds 7; expected 0 to 0 [group \"world\", rank 0]");
  CHECK_ERROR(weft_group_split(NULL, 0, 0, &other, &error), bad, "weft_group_split: group is NULL");
  CHECK_ERROR(weft_group_split(g, 0, 0, NULL, &error), bad, "weft_group_split: part is NULL");
  CHECK_ERROR(weft_group_split(g, -2, 0, &other, &error), bad,
              "*split: color is -2; expected 0 or more, or -1");
  CHECK_ERROR(weft_group_split_by_host(NULL, &other, &error), bad, "weft_group_split_by_host: group is NULL");
  CHECK_ERROR(weft_group_split_by_host(g, NULL, &error), bad, "weft_group_split_by_host: part is NULL");
  CHECK_ERROR(weft_group_duplicate(NULL, &other, &error), bad, "weft_group_duplicate: group is NULL");
  CHECK_ERROR(weft_group_duplicate(g, NULL, &error), bad, "weft_group_duplicate: duplicate is NULL");
  CHECK(other == NULL);

  CHECK_ERROR(weft_group_local_rank(NULL, &number, &error), bad, "weft_group_local_rank: group is NULL");
  CHECK_ERROR(weft_group_local_rank(g, NULL, &error), bad, "weft_group_local_rank: local_rank is NULL");
  CHECK_ERROR(weft_group_local_size(NULL, &number, &error), bad, "weft_group_local_size: group is NULL");
  CHECK_ERROR(weft_group_local_size(g, NULL, &error), bad, "weft_group_local_size: local_size is NULL");
  CHECK_ERROR(weft_group_name(NULL, &text, &error), bad, "weft_group_name: group is NULL");
  CHECK_ERROR(weft_group_name(g, NULL, &error), bad, "weft_group_name: name is NULL");
  CHECK_ERROR(weft_group_backend(NULL, &text, &error), bad, "weft_group_backend: group is NULL");
  CHECK_ERROR(weft_group_backend(g, NULL, &error), bad, "weft_group_backend: backend is NULL");
  CHECK_ERROR(weft_group_traits(NULL, &traits, &error), bad, "weft_group_traits: group is NULL");
  CHECK_ERROR(weft_group_traits(g, NULL, &error), bad, "weft_group_traits: traits is NULL");
  CHECK_ERROR(weft_backend_traits(NULL, "shm", &traits, &error), bad, "weft_backend_traits: context is NULL");
  CHECK_ERROR(weft_backend_traits(c, NULL, &traits, &error), bad, "weft_backend_traits: backend is NULL");
  CHECK_ERROR(weft_backend_traits(c, "shm", NULL, &error), bad, "weft_backend_traits: traits is NULL");
  CHECK_ERROR(weft_group_trace_json(NULL, &json, &error), bad, "weft_group_trace_json: group is NULL");
  CHECK_ERROR(weft_group_trace_json(g, NULL, &error), bad, "weft_group_trace_json: json is NULL");
  CHECK_ERROR(weft_group_trace_chrome(NULL, &json, &error), bad, "weft_group_trace_chrome: group is NULL");
  CHECK_ERROR(weft_group_trace_chrome(g, NULL, &error), bad, "weft_group_trace_chrome: json is NULL");
  weft_group_destroy(g);
  weft_context_destroy(c);
}

int main(void) {
  test_tells();
  test_orders();
  test_traits_sizes();
  test_derived();
  test_tcp();
  test_broadcast();
  test_other_stores();
  test_trace();
  test_wrong_arguments();
  printf("all passed\n");
  return 0;
}
