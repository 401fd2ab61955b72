// The kernels of bf16 compiled again, for CPUs that round to bf16 in hardware; called only if the CPU has
// AVX-512 BF16.
#include "reduce/reduce_kernels.hpp"

namespace weft {
const ReduceIsa kReduceAvx512Bf16 = {
    "avx512_bf16",
    {{}, {}, {}, WEFT_REDUCE_FLOAT(Bf16, (kernel<Reduction<Bf16, KernelKind::avg>>))},
    stream_copy};
}  // namespace weft
