// Functions compiled for several instruction sets.
#pragma once

/// On a function whose loops are to be vectorised: it is compiled for AVX-512, AVX2 and the baseline, and the
/// best the CPU has is picked when the library is loaded. Helpers it calls must be WEFT_INLINE, or they would
/// be baseline code. Sanitizers are not ready yet when it is picked: there is the baseline alone.
#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__) && !defined(__SANITIZE_ADDRESS__) && \
    !defined(__SANITIZE_THREAD__)
#define WEFT_CPU_CLONES __attribute__((target_clones("arch=x86-64-v4", "arch=x86-64-v3", "default")))
#else
#define WEFT_CPU_CLONES
#endif
#define WEFT_INLINE __attribute__((always_inline))
