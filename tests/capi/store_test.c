/* c/store.h: every kind of store and every request, values of any bytes, servers with and without a secret,
 * wrong arguments. */
#define _POSIX_C_SOURCE 200809L
#include "support.h"

#include <sys/stat.h>
#include <sys/wait.h>
#include <unistd.h>

/* Takes the text and looks whether it has these bytes. */
static bool holds(weft_text* text, const char* bytes, size_t count) {
  const bool same = weft_text_size(text) == count && memcmp(weft_text_data(text), bytes, count) == 0 &&
                    weft_text_data(text)[count] == '\0';
  weft_text_destroy(text);
  return same;
}

static void requests(weft_store* s) {
  weft_text* value = NULL;
  int64_t number = 0;
  OK(weft_store_try_get(s, "a", 0, &value, &error));
  CHECK(value == NULL);
  OK(weft_store_set(s, "a", "x\0y", 3, 0, &error)); /* any bytes */
  OK(weft_store_get(s, "a", 0, &value, &error));
  CHECK(holds(value, "x\0y", 3));
  OK(weft_store_try_get(s, "a", 1000 * MS, &value, &error));
  CHECK(holds(value, "x\0y", 3));
  OK(weft_store_set(s, "a", NULL, 0, 0, &error));
  OK(weft_store_try_get(s, "a", 0, &value, &error));
  CHECK(holds(value, "", 0));
  OK(weft_store_compare_set(s, "a", NULL, 0, "one", 3, 0, &value, &error));
  CHECK(holds(value, "one", 3));
  OK(weft_store_compare_set(s, "a", "other", 5, "two", 3, 0, &value, &error));
  CHECK(holds(value, "one", 3));
  OK(weft_store_add(s, "n", 5, 0, &number, &error));
  CHECK(number == 5);
  OK(weft_store_add(s, "n", -7, 0, &number, &error));
  CHECK(number == -2);
  OK(weft_store_remove(s, "a", 0, &error));
  OK(weft_store_remove(s, "a", 0, &error));
  OK(weft_store_try_get(s, "a", 0, &value, &error));
  CHECK(value == NULL);
  CHECK_ERROR(weft_store_get(s, "a", 20 * MS, &value, &error), WEFT_TIMEOUT,
              "*store: key \"a\" was not set within");
  CHECK_ERROR(weft_store_set(s, "weft/world", "x", 1, 0, &error), WEFT_BAD_ARGUMENT,
              "weft_store_set: key is \"weft/world\"; keys that begin with \"weft/\" are weft's own");
  CHECK_ERROR(weft_store_remove(s, "weft/", 0, &error), WEFT_BAD_ARGUMENT,
              "*weft_store_remove: key is \"weft/\"");
  OK(weft_store_set(s, "weft", "x", 1, 0, &error));
  CHECK_ERROR(weft_store_add(s, "text", 1, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_store_add: value is NULL");
  OK(weft_store_set(s, "text", "abc", 3, 0, &error));
  CHECK_ERROR(weft_store_add(s, "text", 1, 0, &number, &error), WEFT_BAD_ARGUMENT, "*text");
  CHECK(value == NULL);
}

/* A store that a child made by fork() has belongs to its parent. */
static void expect_refused_in_child(weft_store* s) {
  int status = 0;
  const pid_t child = fork();
  if (child == 0) {
    weft_error in_child = WEFT_ERROR_INIT;
    const bool refused = weft_store_set(s, "a", "x", 1, 0, &in_child) == WEFT_UNSUPPORTED &&
                         strstr(in_child.text, "this process was forked from process") != NULL;
    weft_store_destroy(s);
    _exit(refused ? 0 : 1);
  }
  CHECK(waitpid(child, &status, 0) == child && status == 0);
  OK(weft_store_set(s, "a", "x", 1, 0, &error));
}

static void test_local(void) {
  weft_store* s = NULL;
  OK(weft_store_create_local(&s, &error));
  requests(s);
  weft_store_destroy(s);
  weft_store_destroy(NULL);
}

static void test_file(void) {
  char folder[] = "/tmp/weft-store-test-XXXXXX", path[64];
  weft_store *s = NULL, *other = NULL;
  weft_text* value = NULL;
  CHECK(mkdtemp(folder) != NULL);
  snprintf(path, sizeof path, "%s/store", folder);
  OK(weft_store_create_file(path, 0, &s, &error));
  requests(s);
  expect_refused_in_child(s);
  OK(weft_store_create_file(path, 1000 * MS, &other, &error)); /* one table for all who open it */
  OK(weft_store_set(s, "b", "from s", 6, 0, &error));
  OK(weft_store_get(other, "b", 0, &value, &error));
  CHECK(holds(value, "from s", 6));
  weft_store_destroy(other);
  weft_store_destroy(s);
  CHECK(unlink(path) == 0 && rmdir(folder) == 0);
  s = NULL;
  CHECK_ERROR(weft_store_create_file(path, 0, &s, &error), WEFT_SYSTEM, "*No such file");
  CHECK_ERROR(weft_store_create_file(NULL, 0, &s, &error), WEFT_BAD_ARGUMENT,
              "weft_store_create_file: path is NULL");
  CHECK_ERROR(weft_store_create_file(path, -1, &s, &error), WEFT_BAD_ARGUMENT,
              "weft_store_create_file: limit_ns is -1; expected 0 or more");
  CHECK_ERROR(weft_store_create_file(path, 0, NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_store_create_file: store is NULL");
  CHECK(s == NULL);
}

static void test_server(void) {
  weft_context* c = NULL;
  weft_store_server* server = NULL;
  weft_store *s = NULL, *second = NULL;
  weft_text* value = NULL;
  const char* address = NULL;
  int32_t port = 0;
  char expected[64];
  weft_store_server_options options = WEFT_STORE_SERVER_OPTIONS_INIT;
  OK(weft_context_create(NULL, &c, &error));
  options.linger_ns = 1; /* nobody is waited for */
  OK(weft_store_server_create(c, &options, &server, &error));
  weft_context_destroy(c); /* before what was made with it */
  OK(weft_store_server_port(server, &port, &error));
  OK(weft_store_server_address(server, &address, &error));
  snprintf(expected, sizeof expected, "127.0.0.1:%d", port);
  CHECK(port > 0 && strcmp(address, expected) == 0);
  OK(weft_store_create_tcp("127.0.0.1", port, NULL, 0, &s, &error));
  requests(s);
  expect_refused_in_child(s);
  OK(weft_store_create_tcp("localhost", port, "", 20000 * MS, &second, &error));
  OK(weft_store_set(second, "b", "1", 1, 0, &error));
  OK(weft_store_get(s, "b", 0, &value, &error));
  CHECK(holds(value, "1", 1));
  weft_store_server_destroy(server);
  value = NULL;
  CHECK_ERROR(weft_store_try_get(s, "b", 0, &value, &error), WEFT_PEER_LOST, "*\"b\"");
  CHECK(value == NULL);
  weft_store_destroy(second);
  weft_store_destroy(s);
  s = NULL;
  CHECK_ERROR(weft_store_create_tcp("127.0.0.1", port, NULL, 30 * MS, &s, &error), WEFT_TIMEOUT,
              "*127.0.0.1:");
  CHECK(s == NULL);
  weft_store_server_destroy(NULL);
}
/* A server with room for little. */
static void test_limits(void) {
  weft_context* c = NULL;
  weft_store_server* server = NULL;
  weft_store* s = NULL;
  int32_t port = 0;
  char large[2000] = {0};
  weft_store_server_options options = WEFT_STORE_SERVER_OPTIONS_INIT;
  options.linger_ns = 1;
  options.max_keys = 2;
  options.max_bytes = 1000;
  OK(weft_context_create(NULL, &c, &error));
  OK(weft_store_server_create(c, &options, &server, &error));
  OK(weft_store_server_port(server, &port, &error));
  OK(weft_store_create_tcp("127.0.0.1", port, NULL, 0, &s, &error));
  OK(weft_store_set(s, "a", "1", 1, 0, &error));
  OK(weft_store_set(s, "b", "2", 1, 0, &error));
  CHECK_ERROR(weft_store_set(s, "c", "3", 1, 0, &error), WEFT_SYSTEM, "*at most 2 and 1000 are allowed");
  CHECK_ERROR(weft_store_set(s, "a", large, sizeof large, 0, &error), WEFT_SYSTEM,
              "*store: no room for key \"a\" (2000 bytes): it holds 2 keys and ");
  weft_store_destroy(s);
  weft_store_server_destroy(server);
  weft_context_destroy(c);
}

static void test_secrets(void) {
  weft_context* c = NULL;
  weft_store_server* server = NULL;
  weft_store* s = NULL;
  weft_text *one = NULL, *two = NULL;
  int32_t port = 0;
  weft_store_server_options options = WEFT_STORE_SERVER_OPTIONS_INIT;
  OK(weft_store_secret_create(&one, &error));
  OK(weft_store_secret_create(&two, &error));
  CHECK(weft_text_size(one) == 64 && strspn(weft_text_data(one), "0123456789abcdef") == 64);
  CHECK(strcmp(weft_text_data(one), weft_text_data(two)) != 0);

  unsetenv("WEFT_STORE_SECRET_FILE");
  unsetenv("WEFT_STORE_SECRET");
  weft_text* set = NULL;
  OK(weft_store_secret_from_env(&set, &error));
  CHECK(holds(set, "", 0));
  setenv("WEFT_STORE_SECRET", weft_text_data(one), 1);
  OK(weft_store_secret_from_env(&set, &error));
  CHECK(holds(set, weft_text_data(one), 64));
  setenv("WEFT_STORE_SECRET", "short", 1);
  set = NULL;
  CHECK_ERROR(weft_store_secret_from_env(&set, &error), WEFT_BAD_ARGUMENT, "*has a secret of 5 bytes");
  CHECK_ERROR(weft_store_secret_from_env(NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_store_secret_from_env: secret is NULL");
  CHECK_ERROR(weft_store_secret_create(NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_store_secret_create: secret is NULL");
  CHECK(set == NULL);
  unsetenv("WEFT_STORE_SECRET");

  OK(weft_context_create(NULL, &c, &error));
  options.host = "0.0.0.0";
  CHECK_ERROR(weft_store_server_create(c, &options, &server, &error), WEFT_BAD_ARGUMENT, "*secret");
  options.host = "127.0.0.1";
  options.secret = weft_text_data(one);
  weft_error e = WEFT_ERROR_INIT;
  const weft_status status = weft_store_server_create(c, &options, &server, &e);
  if (status == WEFT_UNSUPPORTED && strstr(e.text, "libsodium") != NULL) {
    printf("skipped: %s\n", e.text);
  } else {
    CHECK(status == WEFT_OK);
    OK(weft_store_server_port(server, &port, &error));
    CHECK_ERROR(weft_store_create_tcp("127.0.0.1", port, weft_text_data(two), 20000 * MS, &s, &error),
                WEFT_MISMATCH, "*has another secret");
    CHECK(s == NULL);
    OK(weft_store_create_tcp("127.0.0.1", port, weft_text_data(one), 20000 * MS, &s, &error));
    requests(s);
    weft_store_destroy(s);
    weft_store_server_destroy(server);
  }
  weft_context_destroy(c);
  weft_text_destroy(one);
  weft_text_destroy(two);
}

static void test_wrong_arguments(void) {
  weft_context* c = NULL;
  weft_store_server* server = NULL;
  weft_store* s = NULL;
  weft_text* value = NULL;
  int64_t number = 0;
  int32_t port = 0;
  const char* address = NULL;
  const weft_status bad = WEFT_BAD_ARGUMENT;
  weft_store_server_options options = WEFT_STORE_SERVER_OPTIONS_INIT;
  OK(weft_context_create(NULL, &c, &error));
  CHECK_ERROR(weft_store_server_create(NULL, NULL, &server, &error), bad,
              "weft_store_server_create: context is NULL");
  CHECK_ERROR(weft_store_server_create(c, NULL, NULL, &error), bad,
              "weft_store_server_create: server is NULL");
  options.port = 65536;
  CHECK_ERROR(weft_store_server_create(c, &options, &server, &error), bad,
              "weft_store_server_create: options->port is 65536; expected 0 to 65535");
  options.port = 0;
  options.linger_ns = -5;
  CHECK_ERROR(weft_store_server_create(c, &options, &server, &error), bad,
              "weft_store_server_create: options->linger_ns is -5; expected 0 or more");
  options.linger_ns = 0;
#define TOO_LITTLE(field)                                                                 \
  options.field = -1;                                                                     \
  CHECK_ERROR(weft_store_server_create(c, &options, &server, &error), bad,                \
              "weft_store_server_create: options->" #field " is -1; expected 0 or more"); \
  options.field = 0;
  TOO_LITTLE(join_limit_ns)
  TOO_LITTLE(max_clients)
  TOO_LITTLE(max_unauthenticated)
  TOO_LITTLE(max_keys)
  TOO_LITTLE(max_bytes)
  TOO_LITTLE(max_unanswered)
  options.struct_size = 8;
  CHECK_ERROR(weft_store_server_create(c, &options, &server, &error), bad,
              "weft_store_server_create: options->struct_size is 8; expected 80: initialise it with "
              "WEFT_STORE_SERVER_OPTIONS_INIT");
  CHECK_ERROR(weft_store_server_port(NULL, &port, &error), bad, "weft_store_server_port: server is NULL");
  CHECK_ERROR(weft_store_server_address(NULL, &address, &error), bad,
              "weft_store_server_address: server is NULL");
  OK(weft_store_server_create(c, NULL, &server, &error));
  CHECK_ERROR(weft_store_server_port(server, NULL, &error), bad, "weft_store_server_port: port is NULL");
  CHECK_ERROR(weft_store_server_address(server, NULL, &error), bad,
              "weft_store_server_address: address is NULL");
  weft_store_server_destroy(server);

  CHECK_ERROR(weft_store_create_local(NULL, &error), bad, "weft_store_create_local: store is NULL");
  CHECK_ERROR(weft_store_create_tcp(NULL, 1, NULL, 0, &s, &error), bad,
              "weft_store_create_tcp: host is NULL");
  CHECK_ERROR(weft_store_create_tcp("localhost", 0, NULL, 0, &s, &error), bad,
              "weft_store_create_tcp: port is 0; expected 1 to 65535");
  CHECK_ERROR(weft_store_create_tcp("localhost", 1, NULL, 0, NULL, &error), bad,
              "weft_store_create_tcp: store is NULL");
  CHECK_ERROR(weft_store_create_tcp("localhost", 1, NULL, -1, &s, &error), bad,
              "weft_store_create_tcp: limit_ns is -1; expected 0 or more");
  CHECK(s == NULL);

  OK(weft_store_create_local(&s, &error));
  CHECK_ERROR(weft_store_set(NULL, "k", "v", 1, 0, &error), bad, "weft_store_set: store is NULL");
  CHECK_ERROR(weft_store_set(s, NULL, "v", 1, 0, &error), bad, "weft_store_set: key is NULL");
  CHECK_ERROR(weft_store_set(s, "k", NULL, 1, 0, &error), bad, "weft_store_set: value is NULL");
  CHECK_ERROR(weft_store_set(s, "k", "v", 1, -1, &error), bad,
              "weft_store_set: limit_ns is -1; expected 0 or more");
  CHECK_ERROR(weft_store_get(NULL, "k", 0, &value, &error), bad, "weft_store_get: store is NULL");
  CHECK_ERROR(weft_store_get(s, NULL, 0, &value, &error), bad, "weft_store_get: key is NULL");
  CHECK_ERROR(weft_store_get(s, "k", 0, NULL, &error), bad, "weft_store_get: value is NULL");
  CHECK_ERROR(weft_store_get(s, "k", -1, &value, &error), bad,
              "weft_store_get: limit_ns is -1; expected 0 or more");
  CHECK_ERROR(weft_store_try_get(NULL, "k", 0, &value, &error), bad, "weft_store_try_get: store is NULL");
  CHECK_ERROR(weft_store_try_get(s, NULL, 0, &value, &error), bad, "weft_store_try_get: key is NULL");
  CHECK_ERROR(weft_store_try_get(s, "k", 0, NULL, &error), bad, "weft_store_try_get: value is NULL");
  CHECK_ERROR(weft_store_add(NULL, "k", 1, 0, &number, &error), bad, "weft_store_add: store is NULL");
  CHECK_ERROR(weft_store_add(s, NULL, 1, 0, &number, &error), bad, "weft_store_add: key is NULL");
  CHECK_ERROR(weft_store_compare_set(NULL, "k", "", 0, "", 0, 0, &value, &error), bad,
              "weft_store_compare_set: store is NULL");
  CHECK_ERROR(weft_store_compare_set(s, NULL, "", 0, "", 0, 0, &value, &error), bad,
              "weft_store_compare_set: key is NULL");
  CHECK_ERROR(weft_store_compare_set(s, "k", NULL, 1, "", 0, 0, &value, &error), bad,
              "weft_store_compare_set: expected is NULL");
  CHECK_ERROR(weft_store_compare_set(s, "k", "", 0, NULL, 1, 0, &value, &error), bad,
              "weft_store_compare_set: desired is NULL");
  CHECK_ERROR(weft_store_compare_set(s, "k", "", 0, "", 0, 0, NULL, &error), bad,
              "weft_store_compare_set: value is NULL");
  CHECK_ERROR(weft_store_remove(NULL, "k", 0, &error), bad, "weft_store_remove: store is NULL");
  CHECK_ERROR(weft_store_remove(s, NULL, 0, &error), bad, "weft_store_remove: key is NULL");
  CHECK(value == NULL);
  weft_store_destroy(s);
  weft_context_destroy(c);

  CHECK(strcmp(weft_text_data(NULL), "") == 0 && weft_text_size(NULL) == 0);
  weft_text_destroy(NULL);
}

int main(void) {
  test_local();
  test_file();
  test_server();
  test_limits();
  test_secrets();
  test_wrong_arguments();
  printf("all passed\n");
  return 0;
}
