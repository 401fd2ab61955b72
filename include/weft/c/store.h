/* Stores: small tables of keys and values, through which ranks find each other before they have a group. A
 * program may also use them for its own purposes. */
#ifndef WEFT_C_STORE_H
#define WEFT_C_STORE_H

#include "weft/c/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A connection to a table of keys. A group that was made with a store keeps the parts of it that it needs.
 * So the store may be destroyed once the group is made. Several threads may use one store at once. */
typedef struct weft_store weft_store;

/* A store for the threads of one process. Make it once, and use it in each of them. */
weft_status weft_store_create_local(weft_store** store, weft_error* error);
/* A store in the file at `path`, which is created if it does not exist. All processes that open the file
 * share one table. For processes that share a file system on which flock(2) works. The file only grows,
 * and the program must remove it. A program that runs again needs another file. Fails with WEFT_SYSTEM if
 * the file cannot be opened, belongs to another user, may be written by others, or holds something else.
 * `limit_ns`: how long each request waits for another process that has locked the file (0: 30 s) before it
 * fails with WEFT_TIMEOUT. */
weft_status weft_store_create_file(const char* path, int64_t limit_ns, weft_store** store, weft_error* error);
/* A client of the server at host:port; see weft_store_server_create. Blocks until the server answers, at most
 * `limit_ns` (0: five minutes). Then it fails with WEFT_TIMEOUT, whose text has the address. `port`: 1 to
 * 65535. `secret`: the secret of the server. NULL or "" if the server has none. Fails with WEFT_MISMATCH
 * if the server has another secret. After the server has ended, every function of the store fails with
 * WEFT_PEER_LOST. */
weft_status weft_store_create_tcp(const char* host, int32_t port, const char* secret, int64_t limit_ns,
                                  weft_store** store, weft_error* error);
void weft_store_destroy(weft_store* store);

/* A table that a thread of weft in this process serves to other processes. */
typedef struct weft_store_server weft_store_server;

typedef struct weft_store_server_options {
  uint32_t struct_size;
  int32_t port;     /* 0: any free port */
  const char* host; /* a name or an address, IPv4 or IPv6; NULL: 127.0.0.1 */
  /* The secret that clients must know: 16 bytes to 4 KiB, random. It is never sent. An address that is not
   * loopback needs it, and libsodium. NULL: weft opens no TCP port. Processes of this user on this host
   * connect to a Unix socket, and the kernel identifies their users. */
  const char* secret;
  int64_t linger_ns; /* how long weft_store_server_destroy waits for clients to leave; 0: 2 s */
  /* Limits, so that clients cannot use up this process's memory or descriptors. */
  int64_t max_clients; /* connections at once; further connections are closed, with a warning; 0: 4096 */
  /* The limit of connections that have not authenticated yet. If there are more, the oldest is closed. 0:
   * 512. */
  int64_t max_unauthenticated;
  int64_t join_limit_ns;  /* how long a connection may take to authenticate; 0: 10 s */
  int64_t max_keys;       /* keys in the table; a further key is refused; 0: 1048576 */
  int64_t max_bytes;      /* bytes of keys and values in the table; 0: 256 MiB */
  int64_t max_unanswered; /* bytes of requests and replies in progress; 0: 256 MiB */
} weft_store_server_options;
#define WEFT_STORE_SERVER_OPTIONS_INIT \
  { sizeof(weft_store_server_options), 0, NULL, NULL, 0, 0, 0, 0, 0, 0, 0 }

/* When it returns, the server accepts clients. `options` may be NULL. Fails with WEFT_SYSTEM if the port is
 * in use. */
weft_status weft_store_server_create(weft_context* context, const weft_store_server_options* options,
                                     weft_store_server** server, weft_error* error);
weft_status weft_store_server_port(const weft_store_server* server, int32_t* port, weft_error* error);
/* "127.0.0.1:45123" or "[::1]:45123", as the variable WEFT_STORE takes it. The text is valid as long as
 * the handle. */
weft_status weft_store_server_address(const weft_store_server* server, const char** address,
                                      weft_error* error);
/* Waits until the clients have left, at most `linger_ns`, and closes the connections of the other clients. */
void weft_store_server_destroy(weft_store_server* server);

/* The contents of WEFT_STORE_SECRET_FILE, or WEFT_STORE_SECRET. "" if neither is set. */
weft_status weft_store_secret_from_env(weft_text** secret, weft_error* error);
/* Makes a new random secret. Fails with WEFT_SYSTEM if the system gives no random numbers. */
weft_status weft_store_secret_create(weft_text** secret, weft_error* error);

/* Requests to a store. `key`: up to 1 KiB. It must not begin with "weft/", because these keys are weft's
 * own (WEFT_BAD_ARGUMENT). A value may have any bytes, up to 1 MiB. `value` may be NULL if `bytes` is 0.
 * `limit_ns`: how long the store may take to answer (0: half a minute). Then the function fails with
 * WEFT_TIMEOUT, and the store may or may not have carried out the request. */
weft_status weft_store_set(weft_store* store, const char* key, const void* value, size_t bytes,
                           int64_t limit_ns, weft_error* error);
/* Blocks until the key exists, at most `limit_ns` (0: five minutes). */
weft_status weft_store_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                           weft_error* error);
/* Gives the present value. *value becomes NULL if the key does not exist. */
weft_status weft_store_try_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                               weft_error* error);
/* Adds to a decimal counter (a missing key counts as 0). *value becomes the new value. */
weft_status weft_store_add(weft_store* store, const char* key, int64_t delta, int64_t limit_ns,
                           int64_t* value, weft_error* error);
/* Sets the key to `desired` if it holds `expected` (a missing key counts as ""). *value becomes the value
 * that the key holds afterwards. */
weft_status weft_store_compare_set(weft_store* store, const char* key, const void* expected,
                                   size_t expected_bytes, const void* desired, size_t desired_bytes,
                                   int64_t limit_ns, weft_text** value, weft_error* error);
weft_status weft_store_remove(weft_store* store, const char* key, int64_t limit_ns, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_STORE_H */
