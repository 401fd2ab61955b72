// Rank 1 of a group of two, of another build of weft: what making the group said goes to a file. For
// build_test.
#include <cstdio>
#include <fstream>
#include <string>

#include "weft/group/process_group.hpp"
#include "weft/store/file.hpp"

int main(int count, char** arguments) {
  if (count != 3) return 2;
  try {
    weft::Context context;
    weft::Membership m;
    m.store = weft::make_file_store(arguments[1]);
    m.rank = 1;
    m.size = 2;
    m.deadline = std::chrono::seconds(20);
    weft::ProcessGroup::create(context, "shm", m);
    std::ofstream(arguments[2]) << "no error was thrown\n";
  } catch (const weft::Error& e) {
    std::ofstream(arguments[2]) << name(e.code()) << ": " << e.what() << "\n";
  }
  return 0;
}
