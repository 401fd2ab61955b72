// `weft check` over a libweft with mistakes: WEFT_MUTANT names the one that is made. It has additional
// backends, shm with hidden operations, to test composed calls.
#include "command.hpp"
#include "support/masked_backend.hpp"

namespace {

bool masked(const std::string& backend, weft::check::Settings& settings) {
  weft::test::Mask mask;
  if (backend == "composed-messages") {
    mask = weft::test::messages_only();
  } else if (backend == "composed-some") {
    mask = weft::test::some();
  } else {
    return false;
  }
  settings.traits = weft::test::traits_of(mask);
  settings.factory = [mask](weft::Context&) { return weft::test::masked(mask); };
  return true;
}

}  // namespace

int main(int argc, char** argv) { return weft::check::check_main(argc, argv, masked); }
