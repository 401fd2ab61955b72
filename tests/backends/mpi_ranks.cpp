// A rank of an MPI job in which something goes wrong, for mpi_test: `mpi_ranks <backend> <what>`. Prints what
// it sees, a line at a time, each led by its rank.
#include <fmt/format.h>
#include <unistd.h>

#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <map>
#include <string>
#include <thread>
#include <vector>

#include "weft/backends/process_group.hpp"

namespace {

using namespace std::chrono_literals;
using weft::view;

int rank = 0;

void say(const std::string& text) {
  const std::string line = fmt::format("rank {}: {}\n", rank, text);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

// Says what `call` ends with.
void tell(const std::function<void()>& call) {
  try {
    call();
    say("no error");
  } catch (const weft::Error& e) {
    std::string blamed;
    for (const int r : e.ranks()) blamed += fmt::format(" {}", r);
    say(fmt::format("{}{}: {}", name(e.code()), blamed, e.what()));
    say(fmt::format("quiesced {}", e.quiesced()));
  }
}

struct Job {
  weft::ProcessGroup& g;
  weft::Store& store;
  std::vector<float> in = std::vector<float>(4, 1), out = std::vector<float>(16);

  void all_reduce(weft::Duration deadline = 20s) {
    g.all_reduce(view(std::as_const(in)), view(out.data(), 4), {.deadline = deadline}).wait();
  }
  void come(const char* key) { store.set(fmt::format("{}/{}", key, rank), std::to_string(::getpid())); }
  std::string await(const char* key, int r) {
    return store.get(fmt::format("{}/{}", key, r), weft::Deadline::after(30s));
  }
};

const std::map<std::string, void (*)(Job&)> kScenes = {
    {"mismatch",
     [](Job& j) {
       tell([&] {
         if (rank != 1) return j.all_reduce();
         j.g.all_gather(view(std::as_const(j.in)), view(j.out.data(), 4 * j.g.size())).wait();
       });
       tell([&] { j.all_reduce(); });  // the same cause again
     }},
    {"message",
     [](Job& j) {
       tell([&] {
         if (rank == 1) return j.g.send(view(std::as_const(j.in)), 0, {.tag = 7}).wait();
         if (rank == 0) j.g.recv(view(j.out.data(), 3), 1, {.deadline = 20s, .tag = 7}).wait();
       });
     }},
    {"abort",
     [](Job& j) {
       if (rank == 1) {
         j.await("waits", 0);
         j.g.abort("had enough");
       } else {
         j.come("waits");
       }
       tell([&] { j.all_reduce(); });
     }},
    // Rank 1 is there and does not call.
    {"absent",
     [](Job& j) {
       if (rank == 1) {
         j.await("told", 0);
       } else {
         tell([&] { j.all_reduce(500ms); });
         j.come("told");
       }
       tell([&] { j.all_reduce(); });
     }},
    // Rank 1 stops for good, until rank 0 has seen its own deadline and wakes it.
    {"stopped",
     [](Job& j) {
       j.all_reduce();
       if (rank == 1) {
         j.come("stops");
         ::raise(SIGSTOP);
       } else if (rank == 0) {
         const int pid = std::stoi(j.await("stops", 1));
         tell([&] { j.all_reduce(500ms); });
         say(fmt::format("quiesces {}", j.g.quiesce(100ms)));
         std::fill(j.out.begin(), j.out.end(), 7.0f);
         ::kill(pid, SIGCONT);
         j.await("awake", 1);
         say(fmt::format("out is {}", j.out[0]));
       }
       if (rank == 1) {
         tell([&] { j.all_reduce(); });
         j.come("awake");
       }
     }},
    {"killed",
     [](Job& j) {
       j.all_reduce();
       if (rank == 1) {
         ::raise(SIGKILL);
       }
       tell([&] { j.all_reduce(5s); });
     }},
    // Rank 1 leaves the group while rank 0 waits for it.
    {"leaves",
     [](Job& j) {
       if (rank == 1) {
         j.g = {};
         j.await("told", 0);
       } else {
         tell([&] { j.all_reduce(); });
         j.come("told");
       }
     }},
};

}  // namespace

int main(int, char** argv) {
  weft::Context context;
  weft::Membership m = weft::Membership::from_env(context);
  rank = m.rank;
  if (argv[2] == std::string("never comes")) {  // to the group's creation
    if (rank == 1) {
      m.store->get("told", weft::Deadline::after(30s));
      return 0;
    }
    m.deadline = 500ms;
    tell([&] { weft::ProcessGroup::create(context, argv[1], m); });
    m.store->set("told", "1");
    return 0;
  }
  weft::ProcessGroup group;
  try {
    group = weft::ProcessGroup::create(context, argv[1], m);
  } catch (const weft::Error& e) {
    say(fmt::format("{}: {}", name(e.code()), e.what()));
    if (m.store->add("refused", 1) == m.size) m.store->set("all are refused", "1");
    m.store->get("all are refused", weft::Deadline::after(30s));
    return 0;
  }
  Job job{group, *m.store};
  kScenes.at(argv[2])(job);
  // Who exits after a failure has not called MPI_Finalize, and mpirun ends the others: all have spoken first.
  if (m.store->add("spoken", 1) == m.size) m.store->set("all have spoken", "1");
  m.store->get("all have spoken", weft::Deadline::after(30s));
  return 0;
}
