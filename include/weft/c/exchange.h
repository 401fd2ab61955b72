/* Exchanges between neighbours: each rank sends boxes of elements of its fields to the ranks that it names,
 * and receives boxes of their fields. A plan says which; it is used once, or made once and started often
 * (MPI_Neighbor_alltoallw_init of MPI 4). */
#ifndef WEFT_C_EXCHANGE_H
#define WEFT_C_EXCHANGE_H

#include "weft/c/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A box of elements of a field: element (i, j, ...) is `offset + i * strides[0] + j * strides[1] + ...`
 * elements from where the field begins. Strides may be negative; 0 in a dimension of one element, or of a box
 * that is sent. NULL: the strides of a row-major array of the box's counts.
 *
 * If there are `indices`, indices[i] stands in the place of i: counts[0] numbers, 0 or more, in any order.
 * So the rows `indices` of an array (nodes, 3) are counts {n, 3}, and its elements `indices` counts {n}. The
 * other rank may give indices, too, or a box of the same counts without. */
typedef struct weft_exchange_box {
  int32_t field;
  int32_t dim_count; /* 0 to 8; 0: one element */
  int64_t offset;
  const int64_t* counts;  /* of elements, in each dimension */
  const int64_t* strides; /* may be NULL */
  const int64_t* indices; /* may be NULL */
} weft_exchange_box;

/* The elements that one rank sends to this one, or gets from it: those of the boxes, one box after the other,
 * row-major in each. */
typedef struct weft_exchange_part {
  int32_t peer;
  int32_t box_count;
  const weft_exchange_box* boxes;
} weft_exchange_part;

typedef int32_t weft_exchange_kind;
enum {
  WEFT_EXCHANGE_COPY = 0, /* an element that comes replaces the one that is there */
  /* Elements that come are added to those that are there: first what rank 0 sent, then rank 1, ...; of one
   * rank in the order of its boxes. bf16 and f16 are added in f32 and rounded once, at the end; integers
   * wrap. Indices may then name an element several times. */
  WEFT_EXCHANGE_ADD
};

/* The part of one rank in an exchange. Two ranks that send to each other give boxes of the same fields and
 * counts, in the same order; offsets and strides are each rank's own. Elements that a rank sends to itself
 * are copied. */
typedef struct weft_exchange_plan {
  uint32_t struct_size;
  weft_exchange_kind kind;
  int32_t field_count, send_count, receive_count;
  int32_t reserved;                   /* 0 */
  const weft_dtype* fields;           /* of WEFT_EXCHANGE_ADD: f64, f32, bf16, f16 or an integer */
  const weft_exchange_part* sends;    /* each rank at most once; in any order */
  const weft_exchange_part* receives; /* the same */
  const char* name; /* the beginning of the texts of errors; not compared. NULL: "exchange" */
} weft_exchange_plan;
#define WEFT_EXCHANGE_PLAN_INIT \
  { sizeof(weft_exchange_plan), WEFT_EXCHANGE_COPY, 0, 0, 0, 0, NULL, NULL, NULL, NULL }

/* A plan that is checked and worked out once and started often. It is destroyed with
 * weft_persistent_exchange_destroy, before its group or after it; it does not keep the group. */
typedef struct weft_persistent_exchange weft_persistent_exchange;

/* Checks the plan and works it out, and sends nothing: local. The struct and everything that it points to may
 * be freed once this has returned. WEFT_UNSUPPORTED where the transport has no exchanges, and for
 * WEFT_EXCHANGE_ADD over nccl. */
weft_status weft_persistent_exchange_create(weft_group* group, const weft_exchange_plan* plan,
                                            weft_persistent_exchange** exchange, weft_error* error);
/* Begins the exchange of `field_count` fields, as many as the plan has, of its dtypes. Boxes that are sent
 * count from where in[f] begins, boxes that are received from where out[f] begins, and they lie within its
 * count. in[f] and out[f] may be the same memory, if no element of it is both sent and received; one of them
 * that has no boxes may have no memory. When it returns, the elements that this rank sends to itself have
 * been copied (WEFT_EXCHANGE_COPY).
 *
 * Only the ranks that a plan names take part. Two neighbours start the exchanges between them in the same
 * order; every start compares their plans, and a difference is a WEFT_MISMATCH that names both ranks. Several
 * may be in flight, of different memory. Only `deadline_ns` and `stream` of the options are used.
 * WEFT_BAD_ARGUMENT, and nothing is sent, if elements that are written are written twice, or sent, too, or if
 * the group was left or destroyed. One thread at a time. */
weft_status weft_persistent_exchange_start(weft_persistent_exchange* exchange, const weft_buffer* in,
                                           const weft_buffer* out, int32_t field_count,
                                           const weft_call_options* options, weft_work** work,
                                           weft_error* error);
/* May be called while an exchange that it has started is in flight, which goes on. NULL: nothing. */
void weft_persistent_exchange_destroy(weft_persistent_exchange* exchange);

/* The same once, for a plan that changes with each call: create and start together. */
weft_status weft_group_exchange(weft_group* group, const weft_exchange_plan* plan, const weft_buffer* in,
                                const weft_buffer* out, int32_t field_count, const weft_call_options* options,
                                weft_work** work, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_EXCHANGE_H */
