// The reduction kernels compiled for AVX-512 F, BW, DQ, VL; called only if the CPU has them.
#include "reduce/reduce_kernels.hpp"

namespace weft {
const ReduceIsa kReduceAvx512 = WEFT_REDUCE_TABLE("avx512");
}  // namespace weft
