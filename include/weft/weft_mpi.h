/* A group of the ranks of an MPI communicator, for programs that use MPI themselves: compiled by the program,
 * with its own mpi.h, so that it fits every MPI. */
#ifndef WEFT_WEFT_MPI_H
#define WEFT_WEFT_MPI_H

#include <limits.h>
#include <mpi.h>

#include "weft/weft.h"

static inline int32_t weft_mpi_broadcast_(void* communicator, void* data, size_t bytes) {
  if (bytes > INT_MAX) return MPI_ERR_COUNT;
  return MPI_Bcast(data, (int)bytes, MPI_BYTE, 0, *(MPI_Comm*)communicator);
}

/* Rank r of the group is rank r of `communicator`. All its ranks must call it; it blocks until all have. MPI
 * must be initialised; weft uses the communicator only during the call. This function calls
 * weft_group_create_by_broadcast, which explains `host` and the other arguments. options->backend decides
 * which transport moves the group's data: weft uses MPI for that only if it is "mpi-openmpi" or
 * "mpi-mpich". */
static inline weft_status weft_group_from_mpi(weft_context* context, MPI_Comm communicator, const char* host,
                                              const weft_group_options* options, weft_group** group,
                                              weft_error* error) {
  int rank = -1, size = -1;
  /* An error of MPI goes to the communicator's error handler. If the handler returns, rank or size is -1, and
   * weft refuses it. */
  if (MPI_Comm_rank(communicator, &rank) != MPI_SUCCESS) rank = -1;
  if (MPI_Comm_size(communicator, &size) != MPI_SUCCESS) size = -1;
  return weft_group_create_by_broadcast(context, host, rank, size, weft_mpi_broadcast_, &communicator,
                                        options, group, error);
}

#endif /* WEFT_WEFT_MPI_H */
