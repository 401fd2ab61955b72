/* Two copies of libweft in one process, as if two frameworks bring one each. Groups exist at the same time,
 * and one group has ranks in both. Also SIGUSR2, which one of them has, and a child made by fork. One copy is
 * unloaded, and the other continues.
 *
 *   two_libraries_test libweft.so [global]   the first one's symbols are seen by all, as if the program were linked to
 * it */
#define _POSIX_C_SOURCE 200809L
#include <dirent.h>
#include <dlfcn.h>
#include <signal.h>
#include <stdatomic.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "support.h" /* for its checks alone: nothing is linked to libweft */

#define FUNCTIONS(of)                                                                                     \
  of(weft_version) of(weft_context_create) of(weft_context_destroy) of(weft_alloc) of(weft_free)          \
      of(weft_store_create_local) of(weft_store_create_file) of(weft_store_destroy) of(weft_group_create) \
          of(weft_group_destroy) of(weft_all_reduce) of(weft_barrier) of(weft_mesh_create)                \
              of(weft_mesh_size) of(weft_mesh_destroy)
#define POINTER(name) __typeof__(&name) name##_;

typedef struct library {
  void* image;
  weft_context* context;
  weft_store* store; /* local */
  FUNCTIONS(POINTER)
} library;

static library first, second;
static atomic_int first_without_signal, second_without_signal;
static char folder[] = "/tmp/weft-two-XXXXXX";

static void* symbol(const library* l, const char* name) {
  void* const at = dlsym(l->image, name);
  if (at == NULL) failed(__FILE__, __LINE__, dlerror());
  return at;
}

/* Counts the lines that say that SIGUSR2 is somebody else's. */
static void look_at_line(void* log_data, weft_log_level level, const char* line) {
  (void)level;
  if (strstr(line, "SIGUSR2 is the program's or another Context's") != NULL) ++*(atomic_int*)log_data;
}

static void load(library* l, const char* path, atomic_int* without_signal, int flags) {
  weft_context_options options = WEFT_CONTEXT_OPTIONS_INIT;
  options.log_level = WEFT_LOG_INFO;
  options.log = look_at_line;
  options.log_data = without_signal;
  l->image = dlopen(path, RTLD_NOW | flags);
  if (l->image == NULL) failed(__FILE__, __LINE__, dlerror());
#define LOAD(name) *(void**)&l->name##_ = symbol(l, #name);
  FUNCTIONS(LOAD)
  OK(l->weft_context_create_(&options, &l->context, &error));
  OK(l->weft_store_create_local_(&l->store, &error));
}

static void unload(library* l) {
  l->weft_store_destroy_(l->store);
  l->weft_context_destroy_(l->context);
  CHECK(dlclose(l->image) == 0);
}

static void copy(const char* from, const char* to) {
  static char piece[1 << 16];
  FILE *in = fopen(from, "rb"), *out = fopen(to, "wb");
  size_t n = 0;
  CHECK(in != NULL && out != NULL);
  while ((n = fread(piece, 1, sizeof piece, in)) > 0) CHECK(fwrite(piece, 1, n, out) == n);
  CHECK(ferror(in) == 0 && fclose(in) == 0 && fclose(out) == 0);
}

/* Ranks as threads. Each is in one library, and in a group of `size` whose ranks find each other in
 * `store`. */
typedef struct member {
  library* lib;
  weft_store* store;
  int32_t rank, size, process_rank;
} member;

enum { COUNT = 300000, MOST = 4 };

static void* run_member(void* argument) {
  const member* m = argument;
  library* l = m->lib;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  void* memory = NULL;
  options.deadline_ns = 20000 * MS;
  options.process_rank = m->process_rank;
  OK(l->weft_group_create_(l->context, m->store, m->rank, m->size, &options, &group, &error));
  OK(l->weft_alloc_(l->context, COUNT * sizeof(float), &memory, &error));
  float* x = memory;
  const weft_buffer b = f32(x, COUNT);
  for (int round = 0; round < 5; ++round) {
    for (int i = 0; i < COUNT; ++i) x[i] = (float)(m->rank + i % 100 + round);
    OK(l->weft_all_reduce_(group, &b, &b, NULL, NULL, &error));
    for (int i = 0; i < COUNT; ++i)
      CHECK(x[i] == (float)(m->size * (m->size - 1) / 2 + m->size * (i % 100 + round)));
  }
  OK(l->weft_barrier_(group, NULL, NULL, &error));
  l->weft_group_destroy_(group);
  OK(l->weft_free_(l->context, memory, &error));
  return NULL;
}

static void run_members(member* members, int count) {
  pthread_t threads[MOST];
  for (int i = 0; i < count; ++i) CHECK(pthread_create(&threads[i], NULL, run_member, &members[i]) == 0);
  for (int i = 0; i < count; ++i) CHECK(pthread_join(threads[i], NULL) == 0);
}

static void test_two_images(void) {
  CHECK(first.weft_alloc_ != second.weft_alloc_);
  CHECK(strcmp(first.weft_version_(), second.weft_version_()) == 0);
}

static void test_side_by_side(void) {
  member members[] = {{&first, first.store, 0, 2, 0},
                      {&second, second.store, 0, 2, 0},
                      {&first, first.store, 1, 2, 1},
                      {&second, second.store, 1, 2, 1}};
  run_members(members, 4);
}

/* One group with ranks in both libraries, as if the libraries were two processes: they use a store in a
 * file. */
static void test_one_group(void) {
  char file[64];
  member members[] = {{&first, NULL, 0, 2, 0}, {&second, NULL, 1, 2, 0}};
  snprintf(file, sizeof file, "%s/store", folder);
  for (int i = 0; i < 2; ++i) OK(members[i].lib->weft_store_create_file_(file, 0, &members[i].store, &error));
  run_members(members, 2);
  for (int i = 0; i < 2; ++i) members[i].lib->weft_store_destroy_(members[i].store);
  remove(file);
}

/* Returns the number of trace files; removes them if it is asked to. */
static int traces(bool remove_them) {
  int count = 0;
  char path[512];
  DIR* d = opendir(folder);
  CHECK(d != NULL);
  for (struct dirent* e; (e = readdir(d)) != NULL;) {
    const size_t length = strlen(e->d_name);
    if (length < 6 || strcmp(e->d_name + length - 5, ".json") != 0) continue;
    ++count;
    snprintf(path, sizeof path, "%s/%s", folder, e->d_name);
    if (remove_them) CHECK(remove(path) == 0);
  }
  closedir(d);
  return count;
}

static weft_group* alone(const library* l) {
  weft_group* group = NULL;
  OK(l->weft_group_create_(l->context, NULL, 0, 1, NULL, &group, &error));
  OK(l->weft_barrier_(group, NULL, NULL, &error));
  return group;
}

/* WEFT_TRACE is set, so the first library that makes a group takes SIGUSR2. The other one logs that it has
 * not taken it. */
static void test_signal(void) {
  const struct timespec nap = {0, 5000000};
  weft_group* const of_first = alone(&first);
  weft_group* const of_second = alone(&second);
  CHECK(raise(SIGUSR2) == 0);
  for (int naps = 0; traces(false) == 0; ++naps) {
    CHECK(naps < 4000);
    nanosleep(&nap, NULL);
  }
  first.weft_group_destroy_(of_first);
  second.weft_group_destroy_(of_second);
  CHECK(first_without_signal == 0 && second_without_signal == 1);
}

/* A handle that the other library made is refused, and none of its memory is read. It is not destroyed
 * either. */
#define NO_LIVE(type) "is no live " type ": it is destroyed, or another libweft made it"
static void test_foreign_handles(void) {
  weft_error told = WEFT_ERROR_INIT;
  weft_group *group = alone(&first), *made = NULL;
  void* memory = NULL;
  const weft_mesh_axis axis = {"all", -1};
  weft_mesh* mesh = NULL;
  int32_t size = 0;
  CHECK(second.weft_alloc_(first.context, 1, &memory, &told) == WEFT_BAD_ARGUMENT);
  CHECK(strcmp(told.text, "weft_alloc: context " NO_LIVE("weft_context")) == 0);
  CHECK(second.weft_barrier_(group, NULL, NULL, &told) == WEFT_BAD_ARGUMENT);
  CHECK(strcmp(told.text, "weft_barrier: group " NO_LIVE("weft_group")) == 0);
  CHECK(second.weft_group_create_(second.context, first.store, 0, 2, NULL, &made, &told) ==
        WEFT_BAD_ARGUMENT);
  CHECK(strcmp(told.text, "weft_group_create: store " NO_LIVE("weft_store")) == 0);
  OK(first.weft_mesh_create_(group, &axis, 1, &mesh, &error));
  CHECK(second.weft_mesh_size_(mesh, &size, &told) == WEFT_BAD_ARGUMENT);
  CHECK(strcmp(told.text, "weft_mesh_size: mesh " NO_LIVE("weft_mesh")) == 0);
  CHECK(memory == NULL && made == NULL);
  second.weft_mesh_destroy_(mesh); /* says so on stderr */
  OK(first.weft_mesh_size_(mesh, &size, &error));
  CHECK(size == 1);
  first.weft_mesh_destroy_(mesh);
  first.weft_group_destroy_(group);
}

static void test_fork(void) {
  const library* both[] = {&first, &second};
  int status = 0;
  const pid_t child = fork();
  CHECK(child >= 0);
  if (child == 0) {
    for (int i = 0; i < 2; ++i) {
      void* memory = NULL;
      weft_error error = WEFT_ERROR_INIT;
      CHECK(both[i]->weft_alloc_(both[i]->context, 1, &memory, &error) == WEFT_UNSUPPORTED);
      CHECK(strstr(error.text, "fork") != NULL);
    }
    _exit(0);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  test_side_by_side(); /* in the parent nothing has changed */
}

int main(int argc, char** argv) {
  char path[64];
  CHECK((argc == 2 || (argc == 3 && strcmp(argv[2], "global") == 0)) && mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/other.so", folder);
  CHECK(setenv("WEFT_TRACE", folder, 1) == 0);
  copy(argv[1], path);
  load(&first, argv[1], &first_without_signal, argc == 3 ? RTLD_GLOBAL : RTLD_LOCAL);
  load(&second, path, &second_without_signal, RTLD_LOCAL);
  CHECK(remove(path) == 0);
  static const named_test tests[] = {
      {"two_images", test_two_images},           {"signal", test_signal},
      {"side_by_side", test_side_by_side},       {"one_group", test_one_group},
      {"foreign_handles", test_foreign_handles}, {"fork", test_fork},
  };
  const int result = run_tests(tests, LENGTH(tests), 1, argv);
  struct sigaction now;
  unload(&first);
  CHECK(sigaction(SIGUSR2, NULL, &now) == 0 && now.sa_handler == SIG_DFL); /* given back */
  member members[] = {{&second, second.store, 0, 2, 0}, {&second, second.store, 1, 2, 1}};
  run_members(members, 2);
  unload(&second);
  traces(true);
  CHECK(rmdir(folder) == 0);
  return result;
}
