// The reduction kernels compiled for AVX2, FMA and F16C; called only if the CPU has them.
#include "reduce/reduce_kernels.hpp"

namespace weft {
const ReduceIsa kReduceAvx2 = WEFT_REDUCE_TABLE("avx2");
}  // namespace weft
