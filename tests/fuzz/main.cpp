// libFuzzer's entry. One program has all targets: WEFT_FUZZ_TARGET, or the program's name after "fuzz_", says
// which. `fuzz_<target> --seeds FOLDER` writes the target's seeds there and ends.
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "targets.hpp"

namespace {

const weft::fuzz::Target* chosen = nullptr;

}  // namespace

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  const std::string program = (*arguments)[0];
  const std::string wanted = program.substr(program.rfind("fuzz_") + 5);
  for (const auto& target : weft::fuzz::targets())
    if (wanted == target.name) chosen = &target;
  if (chosen == nullptr) {
    std::fprintf(stderr, "fuzz: there is no target %s\n", wanted.c_str());
    std::exit(2);
  }
  if (*count == 3 && std::strcmp((*arguments)[1], "--seeds") == 0) {
    int number = 0;
    for (const std::string& seed : chosen->seeds())
      std::ofstream((*arguments)[2] + ("/seed" + std::to_string(number++)), std::ios::binary) << seed;
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  chosen->run({reinterpret_cast<const char*>(data), size});
  return 0;
}
