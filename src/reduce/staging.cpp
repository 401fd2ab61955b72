#include "reduce/staging.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#endif

namespace weft {

bool staging_beats_kernel_copies() noexcept {
#if defined(__x86_64__)
  unsigned a = 0, b = 0, c = 0, d = 0;
  if (__get_cpuid(0, &a, &b, &c, &d) == 0 || b != signature_AMD_ebx || d != signature_AMD_edx ||
      c != signature_AMD_ecx)
    return false;
  if (__get_cpuid(1, &a, &b, &c, &d) == 0) return false;
  unsigned family = (a >> 8) & 0xf;
  if (family == 0xf) family += (a >> 20) & 0xff;
  constexpr unsigned kZen3 = 0x19;
  return family >= kZen3;
#else
  return false;
#endif
}

}  // namespace weft
