#include "base/cpu/isa.hpp"

#include <gtest/gtest.h>

#include <string>

#include "support/errors.hpp"

namespace weft::isa_test {
namespace {

TEST(CpuIsa, GoesUpToTheLastOfTheCpuOrToTheLimit) {
  EXPECT_EQ(limited_isa(CpuIsa::avx512, {}), CpuIsa::avx512);
  EXPECT_EQ(limited_isa(CpuIsa::baseline, {}), CpuIsa::baseline);
  EXPECT_EQ(limited_isa(CpuIsa::amx, "avx2"), CpuIsa::avx2);
  EXPECT_EQ(limited_isa(CpuIsa::amx, "avx512"), CpuIsa::avx512);
  EXPECT_EQ(limited_isa(CpuIsa::amx, "avx512_bf16"), CpuIsa::avx512_bf16);
  EXPECT_EQ(limited_isa(CpuIsa::amx, "amx"), CpuIsa::amx);
}

TEST(CpuIsa, RefusesWhatTheCpuLacksAndOtherWords) {
  EXPECT_EQ(test::error_text([] { limited_isa(CpuIsa::avx512, "amx"); }),
            "bad_argument: WEFT_CPU_ISA is \"amx\"; expected at most avx512, "
            "the last that this CPU has");
  EXPECT_EQ(test::error_text([] { limited_isa(CpuIsa::baseline, "avx2"); }),
            "bad_argument: WEFT_CPU_ISA is \"avx2\"; expected no value, since "
            "this CPU has none of avx2, "
            "avx512, avx512_bf16 and amx");
  for (const std::string word : {"sse", "AVX2", "baseline", "avx2 ", "avx512,amx"})
    EXPECT_EQ(test::error_text([&] { limited_isa(CpuIsa::amx, word); }),
              "bad_argument: WEFT_CPU_ISA is \"" + word + "\"; expected avx2, avx512, avx512_bf16 or amx");
}

TEST(CpuIsa, NamesTheProducts) {
  EXPECT_EQ(products_in_words(CpuIsa::baseline), "plain loops, which are slow; bf16 is widened");
  EXPECT_EQ(products_in_words(CpuIsa::avx512), "avx512; bf16 is widened");
  EXPECT_EQ(products_in_words(CpuIsa::avx512_bf16), "f32 by avx512, bf16 by avx512_bf16");
  EXPECT_EQ(products_in_words(CpuIsa::amx), "f32 by avx512, bf16 by amx");
}

TEST(CpuIsa, IsToldWithItsReason) {
  EXPECT_EQ(isa_in_words(CpuIsa::avx512, {}), "avx512, the last that this CPU has");
  EXPECT_EQ(isa_in_words(CpuIsa::avx512, "avx2"), "avx2, by WEFT_CPU_ISA; this CPU has avx512");
  EXPECT_EQ(isa_in_words(CpuIsa::amx, {}), "amx, the last that this CPU has");
}

}  // namespace
}  // namespace weft::isa_test
