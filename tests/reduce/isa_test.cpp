// Checks that weft chooses the reduction kernels of the instruction set that it uses. ctest runs this test
// for each set of the CPU.
#include "base/cpu/isa.hpp"

#include <gtest/gtest.h>

#include <cstdint>
#include <string>
#include <vector>

#include "reduce/reduce.hpp"
#include "reduce/reduce_isa.hpp"

namespace weft::reduce_isa_test {
namespace {

TEST(ReduceIsa, GoesUpToTheInstructionSetOfWeft) {
  std::vector<std::string> expected;
  for (const auto& [isa, name] : {std::pair{CpuIsa::avx512_bf16, "avx512_bf16"},
                                  {CpuIsa::avx512, "avx512"},
                                  {CpuIsa::avx2, "avx2"},
                                  {CpuIsa::baseline, "baseline"}})
    if (cpu_isa() >= isa) expected.push_back(name);
  const ReduceIsa* all[kReduceIsas];
  const int n = runnable_reduce_isas(all);
  std::vector<std::string> found;
  for (int i = 0; i < n; ++i) found.emplace_back(all[i]->name);
  EXPECT_EQ(found, expected);
}

TEST(ReduceIsa, AddsTheSame) {
  constexpr std::int64_t kCount = 1037;
  std::vector<float> a(kCount), b(kCount), sum(kCount);
  for (std::size_t i = 0; i < a.size(); ++i)
    a[i] = static_cast<float>(i), b[i] = static_cast<float>(3 * i + 1);
  const std::byte* const in[] = {reinterpret_cast<std::byte*>(a.data()),
                                 reinterpret_cast<std::byte*>(b.data())};
  std::byte* const out[] = {reinterpret_cast<std::byte*>(sum.data())};
  reduce(DType::f32, ReduceOp::sum, in, out, kCount);
  for (std::size_t i = 0; i < sum.size(); ++i) ASSERT_EQ(sum[i], static_cast<float>(4 * i + 1)) << i;
}

}  // namespace
}  // namespace weft::reduce_isa_test
