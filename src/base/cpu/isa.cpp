#include "base/cpu/isa.hpp"

#include <fmt/format.h>

#include <algorithm>
#include <array>

#include "base/text/printable.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"

#if defined(__x86_64__)
#include <cpuid.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace weft {
namespace {

constexpr std::array<std::string_view, 5> kNames = {"baseline", "avx2", "avx512", "avx512_bf16", "amx"};

#if defined(__x86_64__)
struct Registers {
  unsigned a = 0, b = 0, c = 0, d = 0;
};

Registers cpuid(unsigned leaf) noexcept {
  Registers r;
  if (__get_cpuid_count(leaf, 0, &r.a, &r.b, &r.c, &r.d) == 0) return {};
  return r;
}

constexpr bool has_bit(unsigned word, int bit) noexcept { return (word >> bit & 1u) != 0; }

// The compilers' names for these features differ, or one compiler has no name for them.
bool has_rest_of_avx2() noexcept {
  const unsigned c = cpuid(1).c;
  constexpr int kMovbe = 22, kF16c = 29, kLzcnt = 5;
  return has_bit(c, kMovbe) && has_bit(c, kF16c) && has_bit(cpuid(0x80000001u).c, kLzcnt);
}

// Linux lets a process use the registers of AMX only if the process requests it (arch_prctl, Linux 5.16). The
// request is for all its threads, and for processes that it forks. Linux refuses if a thread's alternate
// signal stack is too small for the registers.
bool may_use_amx() noexcept {
#if defined(__linux__)
  constexpr long kRequest = 0x1023, kTileData = 18;  // ARCH_REQ_XCOMP_PERM
  return ::syscall(SYS_arch_prctl, kRequest, kTileData) == 0;
#else
  return false;
#endif
}

// Requires products of bf16, tiles that the operating system saves, and its permission.
bool has_amx() noexcept {
  const unsigned d = cpuid(7).d;
  constexpr int kBf16 = 22, kTile = 24, kOsSaves = 27;
  if (!has_bit(d, kBf16) || !has_bit(d, kTile) || !has_bit(cpuid(1).c, kOsSaves)) return false;
  unsigned saved = 0, high = 0;
  __asm__("xgetbv" : "=a"(saved), "=d"(high) : "c"(0));
  constexpr unsigned kTiles = 3u << 17;
  return (saved & kTiles) == kTiles && may_use_amx();
}
#endif

}  // namespace

std::string_view name_of(CpuIsa isa) noexcept { return kNames[static_cast<std::size_t>(isa)]; }

CpuIsa cpu_has() noexcept {
#if defined(__x86_64__)
  __builtin_cpu_init();
  if (!__builtin_cpu_supports("avx2") || !__builtin_cpu_supports("fma") || !__builtin_cpu_supports("bmi") ||
      !__builtin_cpu_supports("bmi2") || !has_rest_of_avx2())
    return CpuIsa::baseline;
  if (!__builtin_cpu_supports("avx512f") || !__builtin_cpu_supports("avx512bw") ||
      !__builtin_cpu_supports("avx512cd") || !__builtin_cpu_supports("avx512dq") ||
      !__builtin_cpu_supports("avx512vl"))
    return CpuIsa::avx2;
  if (!__builtin_cpu_supports("avx512bf16")) return CpuIsa::avx512;
  return has_amx() ? CpuIsa::amx : CpuIsa::avx512_bf16;
#else
  return CpuIsa::baseline;
#endif
}

CpuIsa limited_isa(CpuIsa has, const std::optional<std::string>& limit) {
  if (!limit) return has;
  const auto found = std::find(kNames.begin() + 1, kNames.end(), *limit);
  if (found == kNames.end())
    throw Error(
        ErrorCode::bad_argument,
        fmt::format("WEFT_CPU_ISA is \"{}\"; expected avx2, avx512, avx512_bf16 or amx", printable(*limit)));
  const auto isa = static_cast<CpuIsa>(found - kNames.begin());
  if (isa > has)
    throw Error(ErrorCode::bad_argument,
                fmt::format("WEFT_CPU_ISA is \"{}\"; expected {}", *limit,
                            has == CpuIsa::baseline
                                ? "no value, since this CPU has none of avx2, avx512, "
                                  "avx512_bf16 and amx"
                                : fmt::format("at most {}, the last that this CPU has", name_of(has))));
  return isa;
}

CpuIsa cpu_isa() {
  static const CpuIsa isa = limited_isa(cpu_has(), env::get("WEFT_CPU_ISA"));
  return isa;
}

std::string products_in_words(CpuIsa isa) {
  switch (isa) {
    case CpuIsa::baseline: return "plain loops, which are slow; bf16 is widened";
    case CpuIsa::avx2:
    case CpuIsa::avx512: return fmt::format("{}; bf16 is widened", name_of(isa));
    case CpuIsa::avx512_bf16:
    case CpuIsa::amx: return fmt::format("f32 by avx512, bf16 by {}", name_of(isa));
  }
  return {};
}

std::string isa_in_words(CpuIsa has, const std::optional<std::string>& limit) {
  const CpuIsa isa = limited_isa(has, limit);
  return fmt::format("{}, {}", name_of(isa),
                     limit ? fmt::format("by WEFT_CPU_ISA; this CPU has {}", name_of(has))
                           : std::string("the last that this CPU has"));
}

}  // namespace weft
