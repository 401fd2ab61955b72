/* Exchanges between neighbours. Each rank sends boxes of elements of its fields to the ranks that it
 * names, and receives boxes of their fields. A plan lists the boxes. It may be used once, or made once and
 * started often (like MPI_Neighbor_alltoallw_init of MPI 4). */
#ifndef WEFT_C_EXCHANGE_H
#define WEFT_C_EXCHANGE_H

#include "weft/c/collectives.h"

#ifdef __cplusplus
extern "C" {
#endif

/* A box of elements of a field. Element (i, j, ...) is `offset + i * strides[0] + j * strides[1] + ...`
 * elements after the beginning of the field. A stride may be negative. It may be 0 in a dimension of one
 * element, and in any dimension of a box that is sent. If `strides` is NULL, the strides are those of a
 * row-major array with the box's counts.
 *
 * If `indices` is not NULL, it has counts[0] numbers, 0 or more, in any order. indices[i] then replaces i
 * in this formula. For example, the rows `indices` of an array (nodes, 3) have counts {n, 3}. The elements
 * `indices` of an array have counts {n}. The other rank may give a box with or without indices, but with
 * the same counts. */
typedef struct weft_exchange_box {
  int32_t field;
  int32_t dim_count; /* 0 to 8; 0: one element */
  int64_t offset;
  const int64_t* counts;  /* of elements, in each dimension */
  const int64_t* strides; /* may be NULL */
  const int64_t* indices; /* may be NULL */
} weft_exchange_box;

/* The elements that this rank sends to rank `peer`, or receives from it: the elements of the boxes, one box
 * after the other, in row-major order within each box. */
typedef struct weft_exchange_part {
  int32_t peer;
  int32_t box_count;
  const weft_exchange_box* boxes;
} weft_exchange_part;

typedef int32_t weft_exchange_kind;
enum {
  WEFT_EXCHANGE_COPY = 0, /* a received element replaces the receiver's element */
  /* Received elements are added to the receiver's elements: first those of rank 0, then those of rank 1,
   * and so on. Elements of one rank are added in the order of its boxes. bf16 and f16 are added in f32 and
   * rounded once, at the end. Integers wrap. Only with WEFT_EXCHANGE_ADD may the indices of a box to
   * receive name an element several times. */
  WEFT_EXCHANGE_ADD
};

/* The part of one rank in an exchange. The sender and the receiver must give boxes of the same fields and
 * counts, in the same order. Offsets and strides may differ. Elements that a rank sends to itself are
 * copied. */
typedef struct weft_exchange_plan {
  uint32_t struct_size;
  weft_exchange_kind kind;
  int32_t field_count, send_count, receive_count;
  int32_t reserved; /* 0 */
  /* the dtype of each field; for WEFT_EXCHANGE_ADD: f64, f32, bf16, f16 or an integer */
  const weft_dtype* fields;
  const weft_exchange_part* sends;    /* each rank at most once, in any order */
  const weft_exchange_part* receives; /* the same */
  const char* name; /* error texts begin with it; ranks do not compare it. NULL: "exchange" */
} weft_exchange_plan;
#define WEFT_EXCHANGE_PLAN_INIT \
  { sizeof(weft_exchange_plan), WEFT_EXCHANGE_COPY, 0, 0, 0, 0, NULL, NULL, NULL, NULL }

/* A plan that is checked and prepared once and started often. Destroy it with
 * weft_persistent_exchange_destroy, before or after its group. It does not keep the group alive. */
typedef struct weft_persistent_exchange weft_persistent_exchange;

/* Checks and prepares the plan. Does not communicate. When it has returned, the program may free the
 * struct and everything that it points to. Fails with WEFT_UNSUPPORTED if the transport has no exchanges,
 * and for WEFT_EXCHANGE_ADD over nccl. */
weft_status weft_persistent_exchange_create(weft_group* group, const weft_exchange_plan* plan,
                                            weft_persistent_exchange** exchange, weft_error* error);
/* Begins the exchange of `field_count` fields, with the plan's number of fields and dtypes. Offsets of boxes
 * to send count from the beginning of in[f], and offsets of boxes to receive count from the beginning of
 * out[f]. All boxes must lie within these buffers. in[f] and out[f] may be the same memory if no element is
 * both sent and received. If a field has no boxes to send (or to receive), in[f] (or out[f]) may be without
 * memory. With WEFT_EXCHANGE_COPY, the elements that this rank sends to itself have been copied when the
 * function returns.
 *
 * Only the ranks that a plan names take part. Two neighbours must start the exchanges between them in the
 * same order. Every start compares the plans of neighbours. If they differ, it fails with WEFT_MISMATCH,
 * and the text names both ranks. Several exchanges may be in flight if they use different memory. Only
 * `deadline_ns` and `stream` of the options are used. Fails with WEFT_BAD_ARGUMENT, and sends nothing, if
 * an element would be written twice, or both written and sent, or if the group was left or destroyed. One
 * thread at a time may start an exchange. */
weft_status weft_persistent_exchange_start(weft_persistent_exchange* exchange, const weft_buffer* in,
                                           const weft_buffer* out, int32_t field_count,
                                           const weft_call_options* options, weft_work** work,
                                           weft_error* error);
/* Destroys the handle. If an exchange that it has started is still in flight, that exchange continues.
 * NULL: does nothing. */
void weft_persistent_exchange_destroy(weft_persistent_exchange* exchange);

/* Creates and starts an exchange in one call, for a plan that changes each time. */
weft_status weft_group_exchange(weft_group* group, const weft_exchange_plan* plan, const weft_buffer* in,
                                const weft_buffer* out, int32_t field_count, const weft_call_options* options,
                                weft_work** work, weft_error* error);

#ifdef __cplusplus
}
#endif

#endif /* WEFT_C_EXCHANGE_H */
