/* Two versions of libweft in one process: to which version libweft_train and plug-ins are bound. Each test is
 * a process of its own, so that it begins with no libweft at all. Another version is made of a copy, in which
 * the soname and the names of versions that the dynamic loader compares are replaced by others of the same
 * length.
 *
 *   two_versions_test libweft.so libweft_train.so FOLDER-OF-PLUG-INS [test] */
#define _POSIX_C_SOURCE 200809L
#include <dlfcn.h>
#include <sys/wait.h>
#include <unistd.h>

#include "support.h" /* for its checks alone: nothing is linked to libweft */
#include "weft/weft_train.h"

#define STRING_OF(x) #x
#define NUMBER(x) STRING_OF(x)
#if WEFT_VERSION_MAJOR == 0
#define SOVERSION "0." NUMBER(WEFT_VERSION_MINOR)
#else
#define SOVERSION NUMBER(WEFT_VERSION_MAJOR)
#endif

#define POINTER(name) __typeof__(&name) name##_;
#define LOAD(name) *(void**)&l->name##_ = symbol(image, #name);
#define FUNCTIONS(of)                                                                           \
  of(weft_version) of(weft_context_create) of(weft_context_destroy) of(weft_backend_traits)     \
      of(weft_group_create) of(weft_group_destroy) of(weft_barrier) of(weft_store_create_local) \
          of(weft_store_destroy)
#define TRAIN_FUNCTIONS(of) of(weft_compute_create) of(weft_compute_destroy) of(weft_column_linear_forward)

typedef struct library {
  weft_context* context;
  FUNCTIONS(POINTER)
} library;
typedef struct train_library {
  TRAIN_FUNCTIONS(POINTER)
} train_library;

static const char *weft_file, *train_file, *plugins;
static char folder[] = "/tmp/weft-versions-XXXXXX";

/* A copy of a library in the folder of this test, with texts replaced. Each text is a whole string in the
 * file. The new text is as long and ends in '9'. */
static const char* changed_copy(const char* from, const char* name, const char* const* texts, size_t count) {
  static char path[2][128];
  static int used = 0;
  char* const to = path[used++ % 2];
  FILE *in = fopen(from, "rb"), *out = NULL;
  CHECK(in != NULL && fseek(in, 0, SEEK_END) == 0);
  const long size = ftell(in);
  CHECK(size > 0);
  rewind(in);
  char* const bytes = malloc((size_t)size);
  CHECK(bytes != NULL && fread(bytes, 1, (size_t)size, in) == (size_t)size && fclose(in) == 0);
  for (size_t t = 0; t < count; ++t) {
    const size_t length = strlen(texts[t]) + 1; /* with its zero */
    int found = 0;
    for (char* at = bytes + 1; at + length <= bytes + size; ++at) {
      if (at[-1] != 0 || memcmp(at, texts[t], length) != 0) continue;
      at[length - 2] = '9';
      ++found;
    }
    if (found == 0) failed(__FILE__, __LINE__, texts[t]);
  }
  snprintf(to, sizeof path[0], "%s/%s", folder, name);
  out = fopen(to, "wb");
  CHECK(out != NULL && fwrite(bytes, 1, (size_t)size, out) == (size_t)size && fclose(out) == 0);
  free(bytes);
  return to;
}

/* The call must fail with this error. (CHECK_ERROR calls a function of libweft.) */
#define REFUSED(call, expected, words)                                                                  \
  do {                                                                                                  \
    weft_error error = WEFT_ERROR_INIT;                                                                 \
    if ((call) != (expected) || strcmp(error.text, words) != 0) failed(__FILE__, __LINE__, error.text); \
  } while (0)

static void* opened(const char* path, int flags) {
  void* const image = dlopen(path, RTLD_NOW | flags);
  if (image == NULL) failed(__FILE__, __LINE__, dlerror());
  return image;
}
static void* symbol(void* image, const char* name) {
  void* const at = dlsym(image, name);
  if (at == NULL) failed(__FILE__, __LINE__, dlerror());
  return at;
}
static library load(const char* path, int flags) {
  library made, *const l = &made;
  void* const image = opened(path, flags);
  FUNCTIONS(LOAD)
  OK(made.weft_context_create_(NULL, &made.context, &error));
  return made;
}
static train_library load_train(const char* path) {
  train_library made, *const l = &made;
  void* const image = opened(path, RTLD_LOCAL);
  TRAIN_FUNCTIONS(LOAD)
  return made;
}

static const char* const other_version[] = {"libweft.so." SOVERSION, "WEFT_" SOVERSION,
                                            "WEFT_PRIVATE_" WEFT_VERSION};
static const char* const other_train[] = {"libweft.so." SOVERSION, "libweft_train.so." SOVERSION,
                                          "WEFT_" SOVERSION, "WEFT_PRIVATE_" WEFT_VERSION};

static library load_other_version(void) {
  return load(changed_copy(weft_file, "libweft.so", other_version, LENGTH(other_version)), RTLD_LOCAL);
}

/* A group of one rank, and a layer. */
static void work_with(library* l, const train_library* train) {
  weft_group* group = NULL;
  weft_compute* compute = NULL;
  float x[2] = {1, 2}, w[2] = {3, 4}, y[1] = {0};
  const weft_matrix of_x = {x, 1, 2, WEFT_F32, WEFT_CPU}, of_w = {w, 1, 2, WEFT_F32, WEFT_CPU},
                    of_y = {y, 1, 1, WEFT_F32, WEFT_CPU};
  OK(l->weft_group_create_(l->context, NULL, 0, 1, NULL, &group, &error));
  OK(l->weft_barrier_(group, NULL, NULL, &error));
  OK(train->weft_compute_create_(l->context, NULL, &compute, &error));
  OK(train->weft_column_linear_forward_(compute, NULL, &of_x, &of_w, NULL, &of_y, NULL, &error));
  CHECK(y[0] == 11);
  train->weft_compute_destroy_(compute);
  l->weft_group_destroy_(group);
}

/* All of the process sees the symbols of the first library, as if the program were linked to it. Still the
 * second libweft_train calls the libweft that it is linked to. */
static void test_side_by_side(void) {
  weft_compute* compute = NULL;
  library one = load(weft_file, RTLD_GLOBAL);
  const train_library train_of_one = load_train(train_file);
  library other = load_other_version();
  const train_library train_of_other =
      load_train(changed_copy(train_file, "libweft_train.so", other_train, LENGTH(other_train)));
  CHECK(train_of_one.weft_compute_create_ != train_of_other.weft_compute_create_);
  for (int round = 0; round < 2; ++round) {
    work_with(&one, &train_of_one);
    work_with(&other, &train_of_other);
  }
  const char* const words =
      "weft_compute_create: context is no live weft_context: it is destroyed, or another libweft made it";
  REFUSED(train_of_other.weft_compute_create_(one.context, NULL, &compute, &error), WEFT_BAD_ARGUMENT, words);
  REFUSED(train_of_one.weft_compute_create_(other.context, NULL, &compute, &error), WEFT_BAD_ARGUMENT, words);
  one.weft_context_destroy_(one.context);
  other.weft_context_destroy_(other.context);
}

/* If there are two copies of one version, it belongs to the one that was loaded first. */
static void test_train_of_two_copies(void) {
  weft_compute* compute = NULL;
  library one = load(weft_file, RTLD_LOCAL);
  const library other = load(changed_copy(weft_file, "libweft.so", NULL, 0), RTLD_LOCAL);
  const train_library train = load_train(train_file);
  work_with(&one, &train);
  REFUSED(
      train.weft_compute_create_(other.context, NULL, &compute, &error), WEFT_BAD_ARGUMENT,
      "weft_compute_create: context is no live weft_context: it is destroyed, or another libweft made it");
}

/* libweft_train uses functions of libweft that are promised to no other patch version: the dynamic loader
 * says so. */
static void test_train_over_another_patch_version(void) {
  static const char* const texts[] = {"WEFT_PRIVATE_" WEFT_VERSION};
  opened(changed_copy(weft_file, "libweft.so", texts, 1), RTLD_GLOBAL);
  CHECK(dlopen(train_file, RTLD_NOW | RTLD_LOCAL) == NULL);
  const char* const words = dlerror();
  if (strstr(words, "libweft.so: version `WEFT_PRIVATE_" WEFT_VERSION "' not found") == NULL)
    failed(__FILE__, __LINE__, words);
}

/* A dynamic loader that does not compare versions, or libraries without them: libweft_train does. */
static void test_train_over_another_version_unnoticed(void) {
  static const char* const texts[] = {WEFT_VERSION};
  static char other[] = WEFT_VERSION, words[512];
  other[sizeof other - 2] = '9';
  const char* const path = changed_copy(weft_file, "libweft.so", texts, 1);
  library l = load(path, RTLD_LOCAL);
  CHECK(strcmp(l.weft_version_(), other) == 0);
  const train_library train = load_train(train_file);
  weft_compute* compute = NULL;
  snprintf(words, sizeof words,
           "weft_compute_create: libweft_train is of weft " WEFT_VERSION
           ", and the libweft that it calls is of %s; expected the same version",
           other);
  REFUSED(train.weft_compute_create_(l.context, NULL, &compute, &error), WEFT_UNSUPPORTED, words);
  l.weft_context_destroy_(l.context);
}

static weft_status traits_of(const library* l, const char* plugin, weft_error* error) {
  weft_traits traits = WEFT_TRAITS_INIT;
  return l->weft_backend_traits_(l->context, plugin, &traits, error);
}
static void check_refused(const library* l, const char* plugin, const char* bound, const char* own) {
  static char words[1024];
  snprintf(words, sizeof words,
           "%s/libweft_backend_%s.so: calls the libweft in %s; expected %s, which loads it", plugins, plugin,
           bound, own);
  weft_error error = WEFT_ERROR_INIT;
  const weft_status got = traits_of(l, plugin, &error);
  if (got != WEFT_UNSUPPORTED || strncmp(error.text, words, strlen(words)) != 0) {
    fprintf(stderr, "status %d, text %s\n  expected %s\n", (int)got, error.text, words);
    exit(1);
  }
}

/* With two copies of one soname, the dynamic loader binds a plug-in to the first, whichever of them loads
 * it. */
static void test_plugin_of_two_copies(void) {
  const library one = load(weft_file, RTLD_LOCAL);
  const char* const copy = changed_copy(weft_file, "libweft.so", NULL, 0);
  const library other = load(copy, RTLD_LOCAL);
  check_refused(&other, "linked", weft_file, copy);
  OK(traits_of(&one, "linked", &error));
  check_refused(&other, "linked", weft_file, copy);
}

/* A plug-in that is linked to no libweft calls the libweft whose symbols the whole process sees. */
static void test_plugin_bound_by_the_process(void) {
  const char* const copy = changed_copy(weft_file, "libweft.so", NULL, 0);
  const library other = load(copy, RTLD_LOCAL), one = load(weft_file, RTLD_GLOBAL);
  OK(traits_of(&one, "unlinked", &error));
  check_refused(&other, "unlinked", weft_file, copy);
}

/* A plug-in that was linked to another version brings that along. */
static void test_plugin_of_another_version(void) {
  weft_error error = WEFT_ERROR_INIT;
  const library other = load_other_version();
  CHECK(traits_of(&other, "linked", &error) == WEFT_UNSUPPORTED);
  if (strstr(error.text, "/libweft_backend_linked.so: calls the libweft in ") == NULL ||
      strstr(error.text, "/libweft.so." SOVERSION "; expected /tmp/weft-versions-") == NULL)
    failed(__FILE__, __LINE__, error.text);
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"side_by_side", test_side_by_side},
      {"train_of_two_copies", test_train_of_two_copies},
      {"train_over_another_patch_version", test_train_over_another_patch_version},
      {"train_over_another_version_unnoticed", test_train_over_another_version_unnoticed},
      {"plugin_of_two_copies", test_plugin_of_two_copies},
      {"plugin_bound_by_the_process", test_plugin_bound_by_the_process},
      {"plugin_of_another_version", test_plugin_of_another_version},
  };
  int status = 0, all = 0;
  CHECK(argc == 4 || argc == 5);
  weft_file = argv[1], train_file = argv[2], plugins = argv[3];
  CHECK(setenv("WEFT_BACKEND_PATH", plugins, 1) == 0 && mkdtemp(folder) != NULL);
  for (size_t i = 0; i < LENGTH(tests); ++i) {
    if (argc == 5 && strcmp(argv[4], tests[i].name) != 0) continue;
    printf("%s\n", tests[i].name);
    fflush(stdout);
    const pid_t child = fork();
    CHECK(child >= 0);
    if (child == 0) {
      tests[i].run();
      _exit(0);
    }
    CHECK(waitpid(child, &status, 0) == child);
    all |= status;
  }
  char command[64];
  snprintf(command, sizeof command, "rm -r '%s'", folder);
  CHECK(system(command) == 0);
  return all == 0 ? 0 : 1;
}
