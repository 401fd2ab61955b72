// The peak of a core: multiply-adds on registers alone. Any thread.
#pragma once

#include "weft/base/dtype.hpp"

namespace weft::bench {

/// Returns the GFLOP/s of the calling thread in f32 or bf16 (with sums in f32), with the widest vector
/// instructions of this CPU. If the CPU has no bf16 instructions, returns the value of f32 for bf16. The
/// result is the best of several runs of about 2 ms. Returns 0 if weft does not know this kind of CPU.
double peak_gflops(DType dtype);

}  // namespace weft::bench
