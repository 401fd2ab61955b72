/* A C program that uses MPI itself: its communicator, and half of it with the ranks in the other order, as
 * groups of weft, over shm and over the backend that the first argument names. */
#include <stdio.h>

#include "weft/weft_mpi.h"

static int check(weft_context* context, MPI_Comm communicator, const char* backend) {
  weft_error error = WEFT_ERROR_INIT;
  weft_group_options options = WEFT_GROUP_OPTIONS_INIT;
  weft_group* group = NULL;
  int rank = 0, size = 0;
  int32_t got = -1;
  MPI_Comm_rank(communicator, &rank);
  MPI_Comm_size(communicator, &size);
  int32_t x = rank + 1;
  const weft_buffer b = {&x, 1, WEFT_I32, WEFT_CPU};
  options.backend = backend;
  if (weft_group_from_mpi(context, communicator, NULL, &options, &group, &error) != WEFT_OK ||
      weft_group_rank(group, &got, &error) != WEFT_OK ||
      weft_all_reduce(group, &b, &b, NULL, NULL, &error) != WEFT_OK)
    fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
  const int wrong = error.code != WEFT_OK || got != rank || x != size * (size + 1) / 2;
  weft_group_destroy(group);
  return wrong;
}

int main(int argc, char** argv) {
  weft_context* context = NULL;
  MPI_Comm half;
  int rank = 0;
  MPI_Init(&argc, &argv);
  MPI_Comm_rank(MPI_COMM_WORLD, &rank);
  MPI_Comm_split(MPI_COMM_WORLD, rank % 2, -rank, &half); /* ranks in the other order */
  int wrong = weft_context_create(NULL, &context, NULL) != WEFT_OK;
  wrong = wrong || check(context, MPI_COMM_WORLD, "shm") || check(context, half, "shm");
  if (argc > 1) wrong = wrong || check(context, MPI_COMM_WORLD, argv[1]) || check(context, half, argv[1]);
  weft_context_destroy(context);
  if (rank == 0 && !wrong) printf("groups of communicators: ok\n");
  MPI_Comm_free(&half);
  MPI_Finalize();
  return wrong;
}
