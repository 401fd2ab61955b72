/* Every rank contributes its number plus one; all ranks get the sum.
 *
 *   cc hello.c -o hello $(pkg-config --cflags --libs weft)
 *   weft run -n 2 -- ./hello */
#include <stdio.h>
#include <weft/weft.h>

int main(void) {
  weft_error error = WEFT_ERROR_INIT;
  weft_context* context = NULL;
  weft_group* group = NULL;
  int32_t rank = 0, size = 0;
  float x[1000];
  const weft_buffer b = {x, 1000, WEFT_F32, WEFT_CPU};

  if (weft_context_create(NULL, &context, &error) != WEFT_OK) goto failed;
  if (weft_group_from_env(context, NULL, &group, &error) != WEFT_OK) goto failed;
  if (weft_group_rank(group, &rank, &error) != WEFT_OK) goto failed;
  if (weft_group_size(group, &size, &error) != WEFT_OK) goto failed;
  for (int i = 0; i < 1000; ++i) x[i] = (float)(rank + 1);
  if (weft_all_reduce(group, &b, &b, NULL, NULL, &error) != WEFT_OK) goto failed;
  printf("rank %d of %d: sum %g\n", rank, size, x[0]);

failed:
  if (error.code != WEFT_OK) fprintf(stderr, "%s: %s\n", weft_status_name(error.code), error.text);
  weft_group_destroy(group);
  weft_context_destroy(context);
  return error.code == WEFT_OK ? 0 : 1;
}
