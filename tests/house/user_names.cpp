// A program that says `using namespace weft` and has classes of its own with the usual names of a model. It
// compiles if weft leaves these names alone.
#include "weft/train.hpp"
#include "weft/weft.hpp"

using namespace weft;

struct Block : Sequential {};
struct Layer : Sequential {};
struct Net : Sequential {};
struct Model : Sequential {};
struct Config {};
struct Options {};
struct Dataset {};
struct State {};
struct Head {};
struct Task {};

std::size_t sizes_of_the_users_classes();
std::size_t sizes_of_the_users_classes() {
  return sizeof(Block) + sizeof(Layer) + sizeof(Net) + sizeof(Model) + sizeof(Config) + sizeof(Options) +
         sizeof(Dataset) + sizeof(State) + sizeof(Head) + sizeof(Task);
}
