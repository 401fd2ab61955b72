// The peak of a core: multiply-adds on registers alone. Any thread.
#pragma once

#include "weft/base/dtype.hpp"

namespace weft::bench {

/// GFLOP/s of the calling thread in f32 or bf16 (with sums in f32), in the widest vectors that this CPU has
/// instructions for; bf16 as f32 where it has none for it. The best of several runs of about 2 ms. 0: not
/// known on this kind of CPU.
double peak_gflops(DType dtype);

}  // namespace weft::bench
