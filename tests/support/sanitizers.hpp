// The limits of the sanitizers of this build.
#pragma once

#include <cstdlib>

namespace weft::test {

#if defined(__SANITIZE_THREAD__) || defined(__SANITIZE_ADDRESS__)
/// The sanitizers watch ranks that are threads. All paths run in such ranks, in memory that the sanitizers
/// see.
inline constexpr bool kProcesses = false;
/// The kernel that combines elements does not change how ranks interact (reduce_test has all kernels). So one
/// dtype with every reduction, and every dtype with one reduction, are enough, in a fraction of the time.
inline constexpr bool kEveryKernel = false;
/// Sanitizers take memory and stack of their own, and do not return freed memory to the system.
inline constexpr bool kPlainMemory = false;
#else
inline constexpr bool kProcesses = true;
inline constexpr bool kEveryKernel = true;
inline constexpr bool kPlainMemory = true;
#endif

#ifdef __SANITIZE_ADDRESS__
/// Where the undefined sanitizer, which is built in with the other one, reads an object's type, it opens a
/// pipe to find out whether the address is readable. If no descriptor is free, it reports an error although
/// there is none.
inline constexpr bool kTypesWithoutDescriptors = false;
#else
inline constexpr bool kTypesWithoutDescriptors = true;
#endif

#ifdef __SANITIZE_THREAD__
/// The thread sanitizer ends a forked process that starts a thread.
inline constexpr bool kThreadsInForks = false;
#else
inline constexpr bool kThreadsInForks = true;
#endif
/// Sanitizers make a test some ten times slower. Without `tools/test.sh --full`, which sets WEFT_TEST_FULL,
/// they see a part of the random cases and of the sizes of a test. That part runs each line of code. An
/// emulator (the preset aarch64) is even slower, and always sees a part only.
inline bool does_everything() {
#ifdef WEFT_EMULATED
  return false;
#else
  return kEveryKernel || std::getenv("WEFT_TEST_FULL") != nullptr;
#endif
}

inline constexpr const char* kNoPlainMemory = "the sanitizers take memory and stack of their own";
inline constexpr const char* kNoTypesWithoutDescriptors =
    "the undefined sanitizer opens a pipe where it looks at an object's type";
inline constexpr const char* kNoThreadsInForks =
    "the thread sanitizer follows no threads of a forked process";

}  // namespace weft::test
