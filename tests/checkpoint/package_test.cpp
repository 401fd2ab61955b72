// The files of a checkpoint, read by the Python package `safetensors`: WEFT_TEST_PYTHON names an interpreter
// that has it.
#include <fmt/format.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <numeric>
#include <vector>

#include "support/command_output.hpp"
#include "support/run_ranks.hpp"
#include "support/temporary_folder.hpp"
#include "weft/checkpoint/checkpoint.hpp"
#include "weft/checkpoint/reader.hpp"

namespace weft::package_test {
namespace {

// Prints, for each tensor, name, dtype, shape and the sum of its elements.
constexpr const char* kProgram = R"(import sys
from safetensors import safe_open
for path in sys.argv[1:]:
    with safe_open(path, framework="np") as f:
        print(f.metadata()["weft_step"])
        for name in sorted(f.keys()):
            t = f.get_tensor(name)
            print(name, t.dtype, t.shape, float(t.sum()))
)";

TEST(SafetensorsPackage, ReadsWhatIsSavedAndExported) {
  const char* const named = std::getenv("WEFT_TEST_PYTHON");
  const std::string python = named != nullptr ? named : "python3";
  if (test::output_of(fmt::format("'{}' -c 'import safetensors, numpy' 2>&1", python)).status != 0)
    GTEST_SKIP() << python << " has no safetensors and numpy (WEFT_TEST_PYTHON names one that has)";
  const test::TemporaryFolder folder;
  std::ofstream(folder / "show.py") << kProgram;
  test::run_ranks(test::Ranks::threads, 2, [&](test::Rank& rank) {
    const DeviceMesh mesh(rank.group(), {{"tp", 2}});
    const LayoutRef cut = make_layout(mesh, {{"tp", Shard{0}}}, {4, 3});
    std::vector<float> mine(6);
    std::iota(mine.begin(), mine.end(), rank.rank == 0 ? 0.0f : 6.0f);
    std::vector<std::int64_t> step = {7};
    std::vector<f16> half = {f16(0.5f), f16(1.5f)};
    save_checkpoint(folder.path(), mesh, 3,
                    std::vector<NamedView>{{"weight", view(mine.data(), {2, 3}), cut},
                                           {"step", view(step), replicated_layout(mesh, {1})},
                                           {"half", view(half), replicated_layout(mesh, {2})}},
                    {{"note", "two\nlines"}});
  });
  export_checkpoint(folder.path(), folder / "whole.safetensors");
  const auto files = folder / "step-00000003";
  const test::CommandOutput shown = test::output_of(
      fmt::format("'{}' '{}' '{}' '{}' '{}' 2>&1", python, (folder / "show.py").string(),
                  (files / "rank-00000.safetensors").string(), (files / "rank-00001.safetensors").string(),
                  (folder / "whole.safetensors").string()));
  EXPECT_EQ(shown.status, 0);
  EXPECT_EQ(shown.text,
            "3\nhalf float16 (2,) 2.0\nstep int64 (1,) 7.0\nweight float32 (2, 3) 15.0\n"
            "3\nweight float32 (2, 3) 51.0\n"
            "3\nhalf float16 (2,) 2.0\nstep int64 (1,) 7.0\nweight float32 (4, 3) 66.0\n");
}

}  // namespace
}  // namespace weft::package_test
