// oneDNN must not use AMX, even if other code used oneDNN first in this process.
#include "nn/kernels/bf16/library_isa.hpp"

#include <dnnl.h>

#include <cstdio>
#include <cstdlib>
#include <string>

#include "base/hash.hpp"
#include "nn/kernel_support.hpp"
#include "support/errors.hpp"

namespace weft::kernels::library_isa_test {
namespace {

using kernels::test::Array;
using kernels::test::random_array;

TEST(LibraryIsa, IsLimitedBelowAmx) {
  EXPECT_EQ(cpu::library_limit(CpuIsa::baseline), dnnl_cpu_isa_all);
  EXPECT_EQ(cpu::library_limit(CpuIsa::avx2), dnnl_cpu_isa_avx2);
  EXPECT_EQ(cpu::library_limit(CpuIsa::avx512), dnnl_cpu_isa_avx512_core);
  EXPECT_EQ(cpu::library_limit(CpuIsa::avx512_bf16), dnnl_cpu_isa_avx512_core_bf16);
  EXPECT_EQ(cpu::library_limit(CpuIsa::amx), dnnl_cpu_isa_avx512_core_bf16);
}

TEST(LibraryIsa, ProductsOfOtherBitsAreRefused) {
  const auto refused = [](dnnl_cpu_isa_t used) {
    return weft::test::error_text([&] { cpu::check_library(CpuIsa::amx, used); });
  };
  EXPECT_EQ(
      refused(dnnl_cpu_isa_avx512_core_amx),
      "unsupported: matmul: oneDNN uses cpu_isa_avx512_core_amx in this process, which something fixed "
      "before "
      "weft used it; expected AVX512_CORE_BF16, whose products of bf16 have the same bits for any number of "
      "columns. Set ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or WEFT_CPU_ISA=avx512, with which weft multiplies "
      "without oneDNN");
  EXPECT_EQ(weft::test::error_text([&] {
              cpu::check_library(CpuIsa::avx512_bf16, dnnl_cpu_isa_avx512_core);
            }).rfind("unsupported: matmul: oneDNN uses ", 0),
            0u);
  cpu::check_library(CpuIsa::amx, dnnl_cpu_isa_avx512_core_bf16);
  cpu::check_library(CpuIsa::avx512, dnnl_cpu_isa_avx512_core_amx);  // weft's own products, without oneDNN
  cpu::check_library(CpuIsa::avx2, dnnl_cpu_isa_all);
}

// The digest of a product of bf16, or why there is none.
std::string digest_of_product() {
  constexpr std::int64_t kM = 20, kN = 70, kK = 300;
  const auto a = random_array<bf16>(kM * kK, 1), b = random_array<bf16>(kK * kN, 2);
  Array<float> c(kM * kN);
  try {
    KernelContext ctx(1);
    matmul(ctx, a.data(), Stored::plain, b.data(), Stored::plain, c.data(), kM, kN, kK, false);
  } catch (const Error& e) {
    return e.what();
  }
  Fnv1a hash;
  for (const float x : c) hash.add_at_once(std::bit_cast<std::uint32_t>(x));
  return "digest " + std::to_string(hash.value);
}

[[noreturn]] void say_product() {
  std::fputs(digest_of_product().c_str(), stderr);
  std::_Exit(0);
}

// Each case runs in a separate process, because the first use of oneDNN decides the instruction set.
struct LibraryIsaDeath : testing::Test {
  LibraryIsaDeath() { GTEST_FLAG_SET(death_test_style, "threadsafe"); }
  ~LibraryIsaDeath() override {
    for (const char* const name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"}) ::unsetenv(name);
  }
};

TEST_F(LibraryIsaDeath, WeftSetsTheLimitOverTheEnvironment) {
  const std::string here = digest_of_product();
  ASSERT_EQ(here.rfind("digest ", 0), 0u) << here;
  for (const char* const name : {"ONEDNN_MAX_CPU_ISA", "DNNL_MAX_CPU_ISA"})
    for (const char* const value : {"AVX2", "ALL"}) {
      ::setenv(name, value, 1);
      EXPECT_EXIT(say_product(), testing::ExitedWithCode(0), here) << name << " " << value;
      ::unsetenv(name);
    }
}

TEST_F(LibraryIsaDeath, AnEarlierUserThatSetAnotherLimitIsFoundOut) {
  if (cpu_isa() < CpuIsa::avx512_bf16) GTEST_SKIP() << "bf16 products are not oneDNN's here";
  ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE", 1);
  EXPECT_EXIT((dnnl_get_effective_cpu_isa(), say_product()), testing::ExitedWithCode(0),
              "matmul: oneDNN uses .* in this process, which something fixed before weft");
}

TEST_F(LibraryIsaDeath, AnEarlierUserWithTheSameLimitIsFine) {
  const std::string here = digest_of_product();
  ::setenv("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16", 1);
  EXPECT_EXIT((dnnl_get_effective_cpu_isa(), say_product()), testing::ExitedWithCode(0), here);
}

}  // namespace
}  // namespace weft::kernels::library_isa_test
