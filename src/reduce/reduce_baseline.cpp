// The reduction kernels for the instructions that every machine of this architecture has (SSE2 on x86-64,
// NEON on aarch64).
#include "reduce/reduce_kernels.hpp"

namespace weft {
const ReduceIsa kReduceBaseline = WEFT_REDUCE_TABLE("baseline");
}  // namespace weft
