/* The common part of the tests of weft.h: checks that name their line, and ranks as threads. */
#ifndef WEFT_TESTS_CAPI_SUPPORT_H
#define WEFT_TESTS_CAPI_SUPPORT_H

#ifndef _POSIX_C_SOURCE
#define _POSIX_C_SOURCE 200809L /* barriers of threads: this header comes first */
#endif

#include "weft/weft.h"

#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#define MS INT64_C(1000000)
#define LENGTH(a) (sizeof(a) / sizeof((a)[0]))

static inline void failed(const char* file, int line, const char* what) {
  fprintf(stderr, "%s:%d: %s\n", file, line, what);
  exit(1);
}
#define CHECK(condition)                                                 \
  do {                                                                   \
    if (!(condition)) failed(__FILE__, __LINE__, "not so: " #condition); \
  } while (0)

/* The call fails with this status and says this; or says something that contains it, where it begins with *.
 */
static inline void check_error(const char* file, int line, weft_status got, const weft_error* error,
                               weft_status expected, const char* text) {
  const bool same = text[0] == '*' ? strstr(error->text, text + 1) != NULL : strcmp(error->text, text) == 0;
  if (got == expected && error->code == expected && same) return;
  fprintf(stderr, "%s:%d: status %s, code %s, text \"%s\"\n  expected %s, \"%s\"\n", file, line,
          weft_status_name(got), weft_status_name(error->code), error->text, weft_status_name(expected),
          text);
  exit(1);
}
#define CHECK_ERROR(call, expected, words)                         \
  do {                                                             \
    weft_error error = WEFT_ERROR_INIT;                            \
    const weft_status got = (call);                                \
    check_error(__FILE__, __LINE__, got, &error, expected, words); \
  } while (0)
/* For use where a variable `error` exists: a failure prints its text. */
#define OK(call)                                                   \
  do {                                                             \
    weft_error error = WEFT_ERROR_INIT;                            \
    if ((call) != WEFT_OK) failed(__FILE__, __LINE__, error.text); \
  } while (0)

/* Ranks as threads -----------------------------------------------------------------------------------------
 */

enum { MAX_RANKS = 4 };
typedef struct rank_args {
  weft_context* context;
  weft_store* store;
  int rank, size;
  void (*body)(struct rank_args*);
  pthread_barrier_t* meet;
} rank_args;

static inline void* run_rank(void* args) {
  ((rank_args*)args)->body(args);
  return NULL;
}

static inline void run_ranks_in(weft_store* store, int size, void (*body)(rank_args*)) {
  weft_context* context = NULL;
  pthread_t threads[MAX_RANKS];
  rank_args args[MAX_RANKS];
  pthread_barrier_t meet;
  OK(weft_context_create(NULL, &context, &error));
  CHECK(pthread_barrier_init(&meet, NULL, (unsigned)size) == 0);
  for (int r = 0; r < size; ++r) {
    args[r] = (rank_args){context, store, r, size, body, &meet};
    CHECK(pthread_create(&threads[r], NULL, run_rank, &args[r]) == 0);
  }
  for (int r = 0; r < size; ++r) CHECK(pthread_join(threads[r], NULL) == 0);
  pthread_barrier_destroy(&meet);
  weft_context_destroy(context);
}

static inline void run_ranks(int size, void (*body)(rank_args*)) {
  weft_store* store = NULL;
  OK(weft_store_create_local(&store, &error));
  run_ranks_in(store, size, body);
  weft_store_destroy(store);
}

/* The expression by which join() makes its groups: a test of another transport defines MAKE_GROUP. */
#ifdef MAKE_GROUP
weft_status MAKE_GROUP(rank_args* a, const weft_group_options* options, weft_group** group,
                       weft_error* error);
#else
#define MAKE_GROUP(a, options, group, error) \
  weft_group_create((a)->context, (a)->store, (a)->rank, (a)->size, options, group, error)
#endif

static inline weft_group* join(rank_args* a, const char* name, int64_t deadline_ns) {
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  options.name = name;
  options.deadline_ns = deadline_ns;
  OK(MAKE_GROUP(a, &options, &group, &error));
  return group;
}

static inline weft_buffer f32(float* data, int64_t count) {
  const weft_buffer b = {data, count, WEFT_F32, WEFT_CPU};
  return b;
}

/* Tests by name --------------------------------------------------------------------------------------------
 */

typedef struct named_test {
  const char* name;
  void (*run)(void);
} named_test;

/* The rest of main(): runs all tests, or the one that the first argument names. */
static inline int run_tests(const named_test* tests, size_t count, int argc, char** argv) {
  int run = 0;
  for (size_t i = 0; i < count; ++i) {
    if (argc > 1 && strcmp(argv[1], tests[i].name) != 0) continue;
    printf("%s\n", tests[i].name);
    fflush(stdout);
    tests[i].run();
    ++run;
  }
  if (run == 0) failed(__FILE__, __LINE__, "no test of that name");
  printf("%d tests passed\n", run);
  return 0;
}

/* Element i of an array of f32 or bf16. To be set: to a number that the dtype has. */
static inline void set_element(void* data, weft_dtype dtype, int i, float value) {
  uint32_t bits;
  if (dtype == WEFT_F32) {
    ((float*)data)[i] = value;
    return;
  }
  memcpy(&bits, &value, sizeof(bits));
  CHECK((bits & 0xffff) == 0);
  ((uint16_t*)data)[i] = (uint16_t)(bits >> 16);
}
static inline float get_element(const void* data, weft_dtype dtype, int i) {
  uint32_t bits;
  float value;
  if (dtype == WEFT_F32) return ((const float*)data)[i];
  bits = (uint32_t)((const uint16_t*)data)[i] << 16;
  memcpy(&value, &bits, sizeof(value));
  return value;
}

#endif /* WEFT_TESTS_CAPI_SUPPORT_H */
