// Which instructions oneDNN uses. Private to cpu_*.cpp and to tests.
//
// oneDNN's products of bf16 on AMX give other bits for other numbers of columns, so it must not use AMX.
// oneDNN's limit belongs to the process, and the first use of oneDNN fixes it: weft sets it before its own
// first use, and overrides ONEDNN_MAX_CPU_ISA. If another part of the process used oneDNN first and the limit
// is different, products of bf16 that need oneDNN throw.
#pragma once

#include <dnnl.h>

#include "base/cpu/isa.hpp"

namespace weft::kernels::cpu {

/// The limit for oneDNN if weft's kernels go up to `isa`; dnnl_cpu_isa_all: no limit is set.
dnnl_cpu_isa_t library_limit(CpuIsa isa) noexcept;

/// The instruction set that oneDNN uses in this process. The first call sets the limit, if nobody has used
/// oneDNN before.
dnnl_cpu_isa_t library_isa();

/// Returns whether oneDNN uses AVX-512, without which it has no products of bf16.
bool library_has_avx512();

/// Throws unsupported if the bits of oneDNN's products of bf16 by the instructions `used` are not the bits
/// promised for `isa`.
void check_library(CpuIsa isa, dnnl_cpu_isa_t used);

}  // namespace weft::kernels::cpu
