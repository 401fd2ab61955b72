// The highest instruction set that weft's kernels use. Every choice between kernels of several instruction
// sets calls this function, so that one variable decides it.
#pragma once

#include <optional>
#include <string>
#include <string_view>

namespace weft {

/// Each set includes all sets before it. baseline: the instructions that the compiler uses by default. avx2:
/// x86-64-v3, with FMA and F16C. avx512: x86-64-v4. amx: with products of bf16; all kernels except matrix
/// products compute as with avx512_bf16.
enum class CpuIsa : unsigned char { baseline, avx2, avx512, avx512_bf16, amx };

std::string_view name_of(CpuIsa isa) noexcept;

/// The highest instruction set that this CPU has and that the operating system lets programs use. If the CPU
/// has amx, this asks Linux to let this process use it.
CpuIsa cpu_has() noexcept;

/// Returns the highest set that may be used if the CPU has `has`. `limit`: the value of WEFT_CPU_ISA. Throws
/// bad_argument for a word that names no set, and for a set that the CPU lacks.
CpuIsa limited_isa(CpuIsa has, const std::optional<std::string>& limit);

/// limited_isa of this CPU and this environment, as they were at the first call that did not throw. The
/// constructor of a Context calls this function.
CpuIsa cpu_isa();

/// The instructions that matrix products of f32 and of bf16 use with `isa`, for reports.
std::string products_in_words(CpuIsa isa);

/// cpu_isa() and why, for reports.
std::string isa_in_words(CpuIsa has, const std::optional<std::string>& limit);

}  // namespace weft
