#include "nn/kernels/bf16/library_isa.hpp"

#include <fmt/format.h>
#include <oneapi/dnnl/dnnl_debug.h>

#include "weft/base/error.hpp"

namespace weft::kernels::cpu {
dnnl_cpu_isa_t library_limit(CpuIsa isa) noexcept {
  switch (isa) {
    case CpuIsa::baseline: return dnnl_cpu_isa_all;
    case CpuIsa::avx2: return dnnl_cpu_isa_avx2;
    case CpuIsa::avx512: return dnnl_cpu_isa_avx512_core;
    case CpuIsa::avx512_bf16:
    case CpuIsa::amx: return dnnl_cpu_isa_avx512_core_bf16;
  }
  return dnnl_cpu_isa_all;
}

dnnl_cpu_isa_t library_isa() {
  static const dnnl_cpu_isa_t used = [] {
    const dnnl_cpu_isa_t limit = library_limit(cpu_isa());
    // This call fails if oneDNN was used before; the code asks for the limit in force, and ignores this
    // status.
    if (limit != dnnl_cpu_isa_all) (void)dnnl_set_max_cpu_isa(limit);
    return dnnl_get_effective_cpu_isa();
  }();
  return used;
}

bool library_has_avx512() { return (library_isa() & dnnl_cpu_isa_avx512_core) == dnnl_cpu_isa_avx512_core; }

void check_library(CpuIsa isa, dnnl_cpu_isa_t used) {
  if (isa < CpuIsa::avx512_bf16 || used == dnnl_cpu_isa_avx512_core_bf16) return;
  throw Error(
      ErrorCode::unsupported,
      fmt::format(
          "matmul: oneDNN uses {} in this process, which something fixed before weft used it; expected "
          "AVX512_CORE_BF16, whose products of bf16 have the same bits for any number of columns. Set "
          "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or WEFT_CPU_ISA=avx512, with which weft multiplies without "
          "oneDNN",
          dnnl_cpu_isa2str(used)));
}

}  // namespace weft::kernels::cpu
