/* The result of every function of weft.h: a status, and the text and facts of an error. See weft/weft.h for
 * the conventions. */
#ifndef WEFT_C_ERROR_H
#define WEFT_C_ERROR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "weft/c/version.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The version of the loaded library, as a text like WEFT_VERSION. Never NULL. */
const char* weft_version(void);
/* The version of the loaded library, as a number like WEFT_VERSION_NUMBER. */
int32_t weft_version_number(void);

typedef int32_t weft_status;
enum {
  WEFT_OK = 0,
  WEFT_BAD_ARGUMENT = 1, /* an argument of this call is wrong; nothing was sent */
  WEFT_LAYOUT = 2,       /* a tensor's layout does not fit the operation */
  WEFT_UNSUPPORTED = 3,  /* this backend or build cannot do it */
  WEFT_MISMATCH = 4,     /* ranks called different things */
  WEFT_TIMEOUT = 5,      /* the deadline passed; `ranks` are the ranks that had not arrived */
  WEFT_PEER_LOST = 6,    /* `ranks` died or left */
  WEFT_ABORTED = 7,      /* some rank called weft_group_abort */
  WEFT_SYSTEM = 8,       /* the operating system refused, or memory ran out */
  WEFT_CORRUPT = 9       /* bytes are damaged, in a file or in memory that ranks share */
};
/* "ok", "bad_argument", .... "?" for a number that is no status. Never NULL. */
const char* weft_status_name(weft_status status);

/* The operation of a call or an error. */
typedef int32_t weft_op;
enum {
  WEFT_OP_NONE = 0,
  WEFT_OP_ALL_REDUCE,
  WEFT_OP_REDUCE,
  WEFT_OP_BROADCAST,
  WEFT_OP_ALL_GATHER,
  WEFT_OP_ALL_GATHER_V,
  WEFT_OP_REDUCE_SCATTER,
  WEFT_OP_REDUCE_SCATTER_V,
  WEFT_OP_GATHER,
  WEFT_OP_SCATTER,
  WEFT_OP_ALL_TO_ALL,
  WEFT_OP_ALL_TO_ALL_V,
  WEFT_OP_BARRIER,
  WEFT_OP_SEND,
  WEFT_OP_RECV,
  WEFT_OP_SCAN,
  WEFT_OP_EXSCAN,
  WEFT_OP_WAIT_MESSAGE,
  WEFT_OP_EXCHANGE
};

/* "all_reduce", .... "none" for WEFT_OP_NONE, "?" for a number that is no operation. Never NULL. */
const char* weft_op_name(weft_op op);

#define WEFT_NO_CALL UINT64_MAX
#define WEFT_ERROR_RANKS 16
#define WEFT_ERROR_TEXT 1024

typedef struct weft_error {
  uint32_t struct_size;
  weft_status code;
  weft_op op;                      /* WEFT_OP_NONE if the error belongs to no operation */
  int32_t rank_count;              /* how many ranks are to blame, even if `ranks` has no room for all */
  uint64_t call;                   /* the call's number in its group, or WEFT_NO_CALL */
  int32_t ranks[WEFT_ERROR_RANKS]; /* the ranks to blame: dead, absent, mismatching; unused ones are -1 */
  /* if false, call weft_group_quiesce before you reuse the failed call's buffers */
  bool quiesced;
  char text[WEFT_ERROR_TEXT]; /* for people; ends in "..." if there was no room for all of it */
} weft_error;
#define WEFT_ERROR_INIT \
  { sizeof(weft_error), WEFT_OK, WEFT_OP_NONE, 0, WEFT_NO_CALL, {0}, true, "" }

/* A text, or bytes, that a function returned. It belongs to the caller, which must destroy it with
 * weft_text_destroy. */
typedef struct weft_text weft_text;
/* The bytes of the text, followed by a zero. They are valid until the text is destroyed. "" if `text` is
 * NULL. Never NULL. */
const char* weft_text_data(const weft_text* text);
/* The number of bytes, without that zero. 0 if `text` is NULL. */
size_t weft_text_size(const weft_text* text);
void weft_text_destroy(weft_text* text);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_ERROR_H */
