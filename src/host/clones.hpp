// Functions compiled for several instruction sets.
#pragma once

#define WEFT_INLINE __attribute__((always_inline))

/// WEFT_CPU_CLONES(void, add_to, (float* y, float value, std::int64_t n), (y, value, n)) { ... } defines a
/// function whose loops are to be vectorised. The function is compiled for AVX-512, AVX2 and the baseline,
/// and each call runs the best version that cpu_isa() allows. `parameters` may end in noexcept. Helpers that
/// the function calls must be WEFT_INLINE; otherwise they would be baseline code. With sanitizers, and with
/// clang, only the baseline version is compiled. WEFT_CLONE_OF(add_to) is a pointer to the best version, for
/// a caller that stores it; calls through this pointer need no selection.
///
/// WEFT_CPU_CLONES_OF_T(void, add, (const T* a, T* b, std::int64_t n), (a, b, n)) { ... } defines such a
/// function template in T. It has no WEFT_CLONE_OF.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)

#include "base/cpu/isa.hpp"

namespace weft {

/// Returns cpu_isa(), at the cost of one load.
inline CpuIsa isa_of_clones() noexcept {
  static const CpuIsa isa = cpu_isa();
  return isa;
}

}  // namespace weft

#define WEFT_CPU_CLONES(result, name, parameters, arguments)                               \
  WEFT_INLINE static inline result name##_body parameters;                                 \
  __attribute__((target("arch=x86-64-v4"))) static result name##_avx512 parameters {       \
    return name##_body arguments;                                                          \
  }                                                                                        \
  __attribute__((target("arch=x86-64-v3"))) static result name##_avx2 parameters {         \
    return name##_body arguments;                                                          \
  }                                                                                        \
  result name parameters {                                                                 \
    if (const ::weft::CpuIsa isa = ::weft::isa_of_clones(); isa >= ::weft::CpuIsa::avx512) \
      return name##_avx512 arguments;                                                      \
    else if (isa >= ::weft::CpuIsa::avx2)                                                  \
      return name##_avx2 arguments;                                                        \
    return name##_body arguments;                                                          \
  }                                                                                        \
  result name##_body parameters
#define WEFT_CPU_CLONES_OF_T(result, name, parameters, arguments)                          \
  template <class T>                                                                       \
  WEFT_INLINE static inline result name##_body parameters;                                 \
  template <class T>                                                                       \
  __attribute__((target("arch=x86-64-v4"))) static result name##_avx512 parameters {       \
    return name##_body<T> arguments;                                                       \
  }                                                                                        \
  template <class T>                                                                       \
  __attribute__((target("arch=x86-64-v3"))) static result name##_avx2 parameters {         \
    return name##_body<T> arguments;                                                       \
  }                                                                                        \
  template <class T>                                                                       \
  result name parameters {                                                                 \
    if (const ::weft::CpuIsa isa = ::weft::isa_of_clones(); isa >= ::weft::CpuIsa::avx512) \
      return name##_avx512<T> arguments;                                                   \
    else if (isa >= ::weft::CpuIsa::avx2)                                                  \
      return name##_avx2<T> arguments;                                                     \
    return name##_body<T> arguments;                                                       \
  }                                                                                        \
  template <class T>                                                                       \
  result name##_body parameters
#define WEFT_CLONE_OF(name)                                          \
  (::weft::isa_of_clones() >= ::weft::CpuIsa::avx512 ? name##_avx512 \
   : ::weft::isa_of_clones() >= ::weft::CpuIsa::avx2 ? name##_avx2   \
                                                     : name)

#else
#define WEFT_CPU_CLONES(result, name, parameters, arguments) result name parameters
#define WEFT_CPU_CLONES_OF_T(result, name, parameters, arguments) \
  template <class T>                                              \
  result name parameters
#define WEFT_CLONE_OF(name) name
#endif
