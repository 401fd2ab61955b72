/* Names and sizes of dtypes, names of reductions, and whether buffers overlap. */
#include "support.h"

static void test_dtypes(void) {
  static const struct {
    weft_dtype dtype;
    int64_t bytes;
    const char* name;
  } all[] = {{WEFT_F64, 8, "f64"},   {WEFT_F32, 4, "f32"},       {WEFT_F16, 2, "f16"},
             {WEFT_BF16, 2, "bf16"}, {WEFT_I8, 1, "i8"},         {WEFT_I16, 2, "i16"},
             {WEFT_I32, 4, "i32"},   {WEFT_I64, 8, "i64"},       {WEFT_U8, 1, "u8"},
             {WEFT_U16, 2, "u16"},   {WEFT_U32, 4, "u32"},       {WEFT_U64, 8, "u64"},
             {WEFT_BOOL, 1, "bool"}, {WEFT_F8E4M3, 1, "f8e4m3"}, {WEFT_F8E5M2, 1, "f8e5m2"},
             {WEFT_C64, 8, "c64"},   {WEFT_C128, 16, "c128"}};
  for (size_t k = 0; k < LENGTH(all); ++k) {
    weft_dtype found = -1;
    CHECK(weft_dtype_size(all[k].dtype) == all[k].bytes);
    CHECK(strcmp(weft_dtype_name(all[k].dtype), all[k].name) == 0);
    OK(weft_dtype_from_name(all[k].name, &found, &error));
    CHECK(found == all[k].dtype);
  }
  CHECK(weft_dtype_size(-1) == 0 && weft_dtype_size(17) == 0);
  CHECK(strcmp(weft_dtype_name(-1), "?") == 0 && strcmp(weft_dtype_name(17), "?") == 0);
  weft_dtype found = -1;
  CHECK_ERROR(weft_dtype_from_name("float", &found, &error), WEFT_BAD_ARGUMENT, "*\"float\"");
  CHECK_ERROR(weft_dtype_from_name(NULL, &found, &error), WEFT_BAD_ARGUMENT,
              "weft_dtype_from_name: name is NULL");
  CHECK_ERROR(weft_dtype_from_name("f32", NULL, &error), WEFT_BAD_ARGUMENT,
              "weft_dtype_from_name: dtype is NULL");
  CHECK(found == -1);
}

static void test_reductions(void) {
  CHECK(strcmp(weft_reduce_op_name(WEFT_SUM), "sum") == 0);
  CHECK(strcmp(weft_reduce_op_name(WEFT_LOGICAL_XOR), "logical_xor") == 0);
  CHECK(strcmp(weft_reduce_op_name(WEFT_USER), "user") == 0);
  CHECK(strcmp(weft_reduce_op_name(-1), "?") == 0 && strcmp(weft_reduce_op_name(13), "?") == 0);
}

static void test_overlap(void) {
  float x[8];
  weft_buffer a = f32(x, 4), b = f32(x + 4, 4);
  bool yes = true;
  OK(weft_buffer_overlap(&a, &b, &yes, &error));
  CHECK(!yes);
  b.data = x + 3;
  OK(weft_buffer_overlap(&a, &b, &yes, &error));
  CHECK(yes);
  OK(weft_buffer_overlap(&b, &a, &yes, &error));
  CHECK(yes);
  b.count = 0;
  OK(weft_buffer_overlap(&a, &b, &yes, &error));
  CHECK(!yes);
  b = a;
  b.device = WEFT_CUDA(0); /* the same number, in other memory */
  OK(weft_buffer_overlap(&a, &b, &yes, &error));
  CHECK(!yes);
  const weft_status bad = WEFT_BAD_ARGUMENT;
  CHECK_ERROR(weft_buffer_overlap(NULL, &b, &yes, &error), bad, "weft_buffer_overlap: a is NULL");
  CHECK_ERROR(weft_buffer_overlap(&a, NULL, &yes, &error), bad, "weft_buffer_overlap: b is NULL");
  CHECK_ERROR(weft_buffer_overlap(&a, &b, NULL, &error), bad, "weft_buffer_overlap: overlap is NULL");
  b = f32(x, INT64_MAX);
  CHECK_ERROR(weft_buffer_overlap(&a, &b, &yes, &error), bad,
              "weft_buffer_overlap: b has 9223372036854775807 elements; their bytes do not fit 64 bits");
}

int main(int argc, char** argv) {
  static const named_test tests[] = {
      {"dtypes", test_dtypes}, {"reductions", test_reductions}, {"overlap", test_overlap}};
  return run_tests(tests, LENGTH(tests), argc, argv);
}
