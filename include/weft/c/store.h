/* Stores: small tables of keys and values where ranks meet before they have a group. A host may use them for
 * itself, too. */
#ifndef WEFT_C_STORE_H
#define WEFT_C_STORE_H

#include "weft/c/context.h"

#ifdef __cplusplus
extern "C" {
#endif

/* One way to a table of keys. Groups that are made with a store keep what they need of it: it may be
 * destroyed once they are there. Any thread; several threads may use one store at once. */
typedef struct weft_store weft_store;

/* For threads of one process: made once, used by each of them. */
weft_status weft_store_create_local(weft_store** store, weft_error* error);
/* In the file at `path`, which is made where it is absent; all who open it share one table. For processes
 * that share a file system on which flock(2) works. The file only grows, and the program removes it; a
 * program that runs again needs another file. WEFT_SYSTEM if it cannot be opened, is another user's, may
 * be written by others, or holds something else. `limit_ns`: how long each request waits for another process
 * that has the file (0: 30 s), then WEFT_TIMEOUT. */
weft_status weft_store_create_file(const char* path, int64_t limit_ns, weft_store** store, weft_error* error);
/* A client of the server at host:port; see weft_store_server_create. Blocks until the server is there, at
 * most `limit_ns` (0: five minutes), then WEFT_TIMEOUT with the address. `port`: 1 to 65535. `secret`: that
 * of the server, NULL or "" where it has none. WEFT_MISMATCH if the server has another. When the server
 * has gone, every function of the store gives WEFT_PEER_LOST. */
weft_status weft_store_create_tcp(const char* host, int32_t port, const char* secret, int64_t limit_ns,
                                  weft_store** store, weft_error* error);
void weft_store_destroy(weft_store* store);

/* A table that this process serves to others, from a thread of weft's own. */
typedef struct weft_store_server weft_store_server;

typedef struct weft_store_server_options {
  uint32_t struct_size;
  int32_t port;     /* 0: any that is free */
  const char* host; /* a name or an address, IPv4 or IPv6; NULL: 127.0.0.1 */
  /* The secret that clients must know: 16 bytes to 4 KiB, at random; it is never sent. Demanded off loopback,
   * where libsodium is needed, too. NULL: no TCP port is opened, and processes of this user on this host join
   * at a Unix socket; the kernel identifies their users. */
  const char* secret;
  int64_t linger_ns; /* how long weft_store_server_destroy waits for clients to leave; 0: 2 s */
  /* Limits, so that nobody can fill this process's memory or descriptors. */
  int64_t max_clients; /* connections at once; further ones are closed, with a warning; 0: 4096 */
  /* The limit of clients that have not authenticated yet: if there are more, the oldest is closed; 0:
   * 512. */
  int64_t max_unauthenticated;
  int64_t join_limit_ns;  /* how long they may take to show it; 0: 10 s */
  int64_t max_keys;       /* in the table; a further one is refused; 0: 1048576 */
  int64_t max_bytes;      /* of keys and values in the table; 0: 256 MiB */
  int64_t max_unanswered; /* bytes of requests and replies in progress; 0: 256 MiB */
} weft_store_server_options;
#define WEFT_STORE_SERVER_OPTIONS_INIT \
  { sizeof(weft_store_server_options), 0, NULL, NULL, 0, 0, 0, 0, 0, 0, 0 }

/* Serves when it returns. `options` may be NULL. WEFT_SYSTEM if the port is taken. */
weft_status weft_store_server_create(weft_context* context, const weft_store_server_options* options,
                                     weft_store_server** server, weft_error* error);
weft_status weft_store_server_port(const weft_store_server* server, int32_t* port, weft_error* error);
/* "127.0.0.1:45123" or "[::1]:45123", as the variable WEFT_STORE takes it. Valid as long as the handle. */
weft_status weft_store_server_address(const weft_store_server* server, const char** address,
                                      weft_error* error);
/* Waits until the clients have left, at most `linger_ns`, and cuts the others off. */
void weft_store_server_destroy(weft_store_server* server);

/* The contents of WEFT_STORE_SECRET_FILE, or WEFT_STORE_SECRET; "" if neither is set. */
weft_status weft_store_secret_from_env(weft_text** secret, weft_error* error);
/* A new one, at random. WEFT_SYSTEM if the system gives no random numbers. */
weft_status weft_store_secret_create(weft_text** secret, weft_error* error);

/* Requests. `key`: up to 1 KiB; not beginning with "weft/", which are weft's own (WEFT_BAD_ARGUMENT). A
 * value: any bytes, up to 1 MiB; `value` may be NULL if `bytes` is 0. `limit_ns`: how long the store may
 * take to answer (0: half a minute), then WEFT_TIMEOUT, and the request may have been carried out or not. */
weft_status weft_store_set(weft_store* store, const char* key, const void* value, size_t bytes,
                           int64_t limit_ns, weft_error* error);
/* Blocks until the key exists, at most `limit_ns` (0: five minutes). */
weft_status weft_store_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                           weft_error* error);
/* The value now; *value is NULL if the key does not exist. */
weft_status weft_store_try_get(weft_store* store, const char* key, int64_t limit_ns, weft_text** value,
                               weft_error* error);
/* Adds to a decimal counter (absent: 0); *value is what it is then. */
weft_status weft_store_add(weft_store* store, const char* key, int64_t delta, int64_t limit_ns,
                           int64_t* value, weft_error* error);
/* Sets the key to `desired` where it holds `expected` (absent counts as ""). *value is what it holds then. */
weft_status weft_store_compare_set(weft_store* store, const char* key, const void* expected,
                                   size_t expected_bytes, const void* desired, size_t desired_bytes,
                                   int64_t limit_ns, weft_text** value, weft_error* error);
weft_status weft_store_remove(weft_store* store, const char* key, int64_t limit_ns, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_STORE_H */
