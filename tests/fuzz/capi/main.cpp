// libFuzzer's entry of the target of calls: bin/fuzz_capi. `fuzz_capi --seeds FOLDER` writes the seeds there
// and ends.
#include <cstdint>
#include <cstdlib>
#include <cstring>
#include <fstream>
#include <string>

#include "capi/program.hpp"

extern "C" int LLVMFuzzerInitialize(int* count, char*** arguments) {
  if (*count == 3 && std::strcmp((*arguments)[1], "--seeds") == 0) {
    int number = 0;
    for (const std::string& seed : weft::fuzz::capi::program_seeds())
      std::ofstream((*arguments)[2] + ("/seed" + std::to_string(number++)), std::ios::binary) << seed;
    std::exit(0);
  }
  return 0;
}

extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  weft::fuzz::capi::run_program({reinterpret_cast<const char*>(data), size});
  return 0;
}
