// with_isa SET PROGRAM ARGUMENTS...: runs the program with WEFT_CPU_ISA=SET. If the CPU lacks the set, the
// output is that of a skipped test of GoogleTest. If weft chooses the set by itself, the program has run
// already and does not run again. Exit status: the program's, or 0 if it did not run.
#include <unistd.h>

#include <cstdio>
#include <cstdlib>
#include <exception>
#include <string>

#include "base/cpu/isa.hpp"

int main(int argc, char** argv) try {
  if (argc < 3) {
    std::fprintf(stderr, "usage: %s SET PROGRAM ARGUMENTS...\n", argv[0]);
    return 2;
  }
  const std::string set = argv[1];
  if (weft::name_of(weft::cpu_isa()) == set) {
    std::printf("%s is what weft chooses here\n", set.c_str());
    return 0;
  }
  try {
    weft::limited_isa(weft::cpu_has(), set);
  } catch (const std::exception& e) {
    std::printf("%s:%d: Skipped\n%s\n[  SKIPPED ] InstructionSet.%s (0 ms)\n", __FILE__, __LINE__, e.what(),
                set.c_str());
    return 0;
  }
  ::setenv("WEFT_CPU_ISA", set.c_str(), 1);
  ::execv(argv[2], argv + 2);
  std::perror(argv[2]);
  return 2;
} catch (const std::exception& e) {
  std::fprintf(stderr, "%s: %s\n", argv[0], e.what());
  return 2;
}
