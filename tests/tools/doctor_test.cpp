// `weft doctor` as a user calls it.
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <filesystem>
#include <fstream>
#include <string>

#include "base/cpu/isa.hpp"
#include "support/command_output.hpp"
#include "support/temporary_folder.hpp"

namespace weft::test::doctor_test {
namespace {

using testing::ContainsRegex;
using testing::HasSubstr;
using testing::Not;

/// `settings`: variables of its environment.
CommandOutput doctor(const std::string& settings = "", const std::string& flags = "") {
  return output_of(
      fmt::format("{} timeout 60 '{}' doctor {} 2>&1 </dev/null", settings, WEFT_COMMAND, flags));
}

TEST(Doctor, FindsNothingWrong) {
  const CommandOutput few = doctor();
  EXPECT_EQ(few.status, 0) << few.text;
  EXPECT_THAT(few.text, HasSubstr("nothing is wrong"));
  EXPECT_THAT(few.text, Not(HasSubstr("WEFT_STORE"))) << "only what is set is shown";
  EXPECT_THAT(few.text, HasSubstr("memory that peers map        works"));
  EXPECT_THAT(few.text, ContainsRegex("\n  memory +[0-9]+\\.[0-9] GiB\n"));
  const CommandOutput all = doctor("", "--all");
  EXPECT_EQ(all.status, 0) << all.text;
  EXPECT_THAT(all.text, HasSubstr("WEFT_STORE"));
}

TEST(Doctor, SaysThatNoVariableIsSet) {
  EXPECT_THAT(doctor("env -i PATH=/usr/bin:/bin").text,
              ContainsRegex("\nenvironment [^\n]*\n  nothing is set\n\n"));
  EXPECT_THAT(doctor("env -i PATH=/usr/bin:/bin WEFT_BACKEND=shm").text, Not(HasSubstr("nothing is set")));
}

TEST(Doctor, SaysWhichInstructionSetIsUsedAndWhy) {
  EXPECT_THAT(doctor("WEFT_CPU_ISA=").text,
              ContainsRegex("\n  instruction set +[a-z0-9_]+, the last that this CPU has"));
  const CommandOutput wrong = doctor("WEFT_CPU_ISA=sse2");
  EXPECT_EQ(wrong.status, 1);
  EXPECT_THAT(wrong.text,
              ContainsRegex("\n  instruction set +WRONG: WEFT_CPU_ISA is \"sse2\"; expected avx2, avx512, "));
  EXPECT_THAT(wrong.text, HasSubstr("\n1 thing is wrong\n"));
  if (cpu_has() > CpuIsa::avx2) {
    const CommandOutput less = doctor("WEFT_CPU_ISA=avx2");
    EXPECT_EQ(less.status, 0) << less.text;
    EXPECT_THAT(less.text, ContainsRegex("\n  instruction set +avx2, by WEFT_CPU_ISA; this CPU has "));
    EXPECT_THAT(less.text, ContainsRegex("\n  matrix products +avx2; bf16 is widened\n"));
  }
}

TEST(Doctor, AVariableThatNoContextTakesIsWrongAndNotTheTransports) {
  const CommandOutput d = doctor("WEFT_LOG=loud");
  EXPECT_EQ(d.status, 1);
  EXPECT_THAT(d.text, HasSubstr("WRONG                        WEFT_LOG is \"loud\"; expected "));
  EXPECT_THAT(d.text, Not(HasSubstr("shm")));
  EXPECT_THAT(d.text, HasSubstr("\n1 thing is wrong\n"));
}

TEST(Doctor, ATransportThatIsNotThereIsWrongWhereItIsChosen) {
  EXPECT_EQ(doctor("WEFT_BACKEND=shm").status, 0);
  EXPECT_EQ(doctor("WEFT_BACKEND=auto").status, 0);
  const CommandOutput none = doctor("WEFT_BACKEND=shn");
  EXPECT_EQ(none.status, 1);
  EXPECT_THAT(none.text,
              HasSubstr("WRONG: there is no transport \"shn\"; is shm meant? Expected one of auto, shm"));
  const TemporaryFolder folder;
  std::ofstream(folder / "libweft_backend_broken.so") << "no library";
  const std::string path = fmt::format("WEFT_BACKEND_PATH='{}'", folder.path().string());
  const CommandOutput there = doctor(path);
  EXPECT_EQ(there.status, 0) << "nobody has chosen it";
  EXPECT_THAT(there.text, HasSubstr("broken                       cannot be used: "));
  const CommandOutput chosen = doctor(path + " WEFT_BACKEND=broken");
  EXPECT_EQ(chosen.status, 1);
  EXPECT_THAT(chosen.text, HasSubstr("WRONG: broken: "));
}

TEST(Doctor, AFolderThatTakesNoTracesIsWrong) {
  const TemporaryFolder folder;
  const auto trace = [&](const char* name) {
    return doctor(fmt::format("WEFT_TRACE='{}'", (folder / name).string()));
  };
  EXPECT_EQ(trace(".").status, 0);
  const CommandOutput none = trace("none");
  EXPECT_EQ(none.status, 1);
  EXPECT_THAT(none.text, HasSubstr("WRONG: no traces are written: there is no folder "));
  std::ofstream(folder / "file").flush();
  EXPECT_THAT(trace("file").text, HasSubstr("file is not a folder\n"));
}

}  // namespace
}  // namespace weft::test::doctor_test
