// A program of one rank whose checkpoint is a number in a file. For the tests of `weft run --elastic`.
//
//   stepping_rank FILE LAST EACH   takes steps from the number in FILE on, reports each, and dies after EACH
//                                  steps; it returns 0 once the number is LAST
#include <csignal>
#include <cstdlib>
#include <fstream>

#include "weft/store/elastic.hpp"

int main(int, char** words) {
  long step = 0;
  std::ifstream(words[1]) >> step;
  for (long end = step + std::atol(words[3]); step < end;) {
    if (step >= std::atol(words[2])) return 0;
    ++step;
    std::ofstream(words[1]) << step;
    weft::report_step(step);
  }
  return step >= std::atol(words[2]) ? 0 : std::raise(SIGKILL);
}
