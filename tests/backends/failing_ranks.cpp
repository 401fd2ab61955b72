// A rank of a job in which something goes wrong, for mpi_test and hostile_test: `failing_ranks <backend>
// <what>`. Prints what it observes, line by line, each beginning with its rank. In addition to weft's
// backends, "composed" is a transport that has only messages, and "threads" is shm with all ranks in this
// process.
#include <fmt/format.h>
#include <sys/resource.h>
#include <sys/wait.h>
#include <unistd.h>

#include <algorithm>
#include <csignal>
#include <cstdio>
#include <cstdlib>
#include <ctime>
#include <filesystem>
#include <fstream>
#include <functional>
#include <iterator>
#include <map>
#include <memory>
#include <new>
#include <string>
#include <thread>
#include <vector>

#include "support/masked_backend.hpp"
#include "weft/base/tensor.hpp"
#include "weft/group/process_group.hpp"

namespace {

using namespace std::chrono_literals;
using weft::view;

thread_local int rank = 0;
bool threads = false;  // the ranks are

void say(const std::string& text) {
  const std::string line = fmt::format("rank {}: {}\n", rank, text);
  std::fwrite(line.data(), 1, line.size(), stdout);
  std::fflush(stdout);
}

// Prints the result of `call`.
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

// Like the function above, with all fields of the error and the time: "op all_reduce, call 1, after 0.5 s".
void tell_in_full(const std::function<void()>& call) {
  const auto began = weft::Clock::now();
  try {
    call();
    say("no error");
  } catch (const weft::Error& e) {
    std::string blamed;
    for (const int r : e.ranks()) blamed += fmt::format(" {}", r);
    say(fmt::format("{}{} | op {}, call {} | {}", name(e.code()), blamed, name(e.op()),
                    e.call() == weft::kNoCall ? "none" : std::to_string(e.call()), e.what()));
    say(fmt::format("after {:.2f} s", std::chrono::duration<double>(weft::Clock::now() - began).count()));
  }
}

weft::ProcessGroup create(weft::Context& context, const std::string& backend, const weft::Membership& m) {
  if (backend == "composed")
    return weft::ProcessGroup::create(context, weft::test::masked(weft::test::messages_only()), m);
  return weft::ProcessGroup::create(context, threads ? "shm" : backend, m);
}

struct Job {
  weft::Context& context;
  const std::string& backend;
  const weft::Membership& member;
  weft::ProcessGroup& g;
  weft::Store& store;
  std::vector<float> in = std::vector<float>(4, 1), out = std::vector<float>(16);

  void all_reduce(weft::Duration deadline = 20s) {
    g.all_reduce(view(std::as_const(in)), view(out.data(), 4), {.deadline = deadline}).wait();
  }
  void come(const char* key) { store.set(fmt::format("{}/{}", key, rank), std::to_string(::getpid())); }
  void store_meet(const std::string& key) {
    if (store.add(key, 1) == g.size()) store.set(key + "/all", "1");
    store.get(key + "/all", weft::Deadline::after(30s));
  }
  std::string await(const char* key, int r) {
    return store.get(fmt::format("{}/{}", key, r), weft::Deadline::after(30s));
  }
};

// The resources of groups that this process holds.
struct Holdings {
  long descriptors = 0, mappings = 0, threads = 0, resident = 0, address_space = 0;  // the last two in KiB
  static Holdings now() {
    Holdings h;
    const auto count = [](const char* folder) {
      return static_cast<long>(std::distance(std::filesystem::directory_iterator(folder), {}));
    };
    h.descriptors = count("/proc/self/fd");
    h.threads = count("/proc/self/task");
    std::ifstream maps("/proc/self/maps");
    for (std::string line; std::getline(maps, line);) ++h.mappings;
    std::ifstream status("/proc/self/status");
    for (std::string line; std::getline(status, line);) {
      if (line.starts_with("VmRSS:")) h.resident = std::atol(line.c_str() + 6);
      if (line.starts_with("VmSize:")) h.address_space = std::atol(line.c_str() + 7);
    }
    return h;
  }
};

// As long as it exists, this process may have only so much of the resource.
class Limited {
 public:
  Limited(int resource, rlim_t most) : resource_(resource) {
    ::getrlimit(resource, &before_);
    const rlimit now{most, before_.rlim_max};
    ::setrlimit(resource, &now);
  }
  Limited(const Limited&) = delete;
  Limited& operator=(const Limited&) = delete;
  virtual ~Limited() { ::setrlimit(resource_, &before_); }

 private:
  const int resource_;
  rlimit before_{};
};
// Leaves n descriptors: it opens the others that are free below the limit.
class FewDescriptors final : public Limited {
 public:
  explicit FewDescriptors(long n) : Limited(RLIMIT_NOFILE, 256) {
    for (int fd = 0; (fd = ::dup(0)) >= 0;) taken_.push_back(fd);
    for (; n > 0 && !taken_.empty(); --n, taken_.pop_back()) ::close(taken_.back());
  }
  ~FewDescriptors() override {
    for (const int fd : taken_) ::close(fd);
  }

 private:
  std::vector<int> taken_;
};
std::unique_ptr<Limited> descriptors_left(long n) { return std::make_unique<FewDescriptors>(n); }
std::unique_ptr<Limited> memory_left(long kib) {
  return std::make_unique<Limited>(RLIMIT_AS,
                                   static_cast<rlim_t>(Holdings::now().address_space + kib) * 1024);
}

// Rank 1 tries to make a group with ever more of what is limited, until it can. All ranks come along.
void try_with(weft::Context& context, const std::string& backend, weft::Membership m,
              const std::vector<long>& amounts, const std::function<std::unique_ptr<Limited>(long)>& limit) {
  auto meet = [&, round = 0](const std::string& news) mutable {
    const std::string key = fmt::format("round/{}", round++);
    if (!news.empty()) m.store->set(key + "/news", news);
    if (m.store->add(key, 1) == m.size) m.store->set(key + "/all", "1");
    m.store->get(key + "/all", weft::Deadline::after(30s));
    return m.store->get(key + "/news", weft::Deadline::after(30s));
  };
  // A client of the store keeps as many connections as it had calls at once. To make a group may take two.
  const auto ask = [&] {
    try {
      m.store->get("nobody sets this", weft::Deadline::after(200ms));
    } catch (const weft::Error&) {}
  };
  std::thread other(ask);
  ask();
  other.join();
  m.deadline = 500ms;
  for (const long amount : amounts) {
    m.name = fmt::format("with {}", amount);
    const Holdings before = Holdings::now();
    std::string outcome = "made";
    std::unique_ptr<Limited> limited;
    weft::ProcessGroup g;
    const auto began = weft::Clock::now();
    try {
      if (rank == 1) limited = limit(amount);
      g = create(context, backend, m);
      g.barrier({.deadline = 2s}).wait();
    } catch (const weft::Error& e) {
      limited.reset();
      outcome = fmt::format("{} | {}", name(e.code()), e.what());
    }
    g = {};
    limited.reset();
    const double took = std::chrono::duration<double>(weft::Clock::now() - began).count();
    say(fmt::format("{}: {} | after {:.2f} s", amount, outcome, took));
    const std::string of_1 = meet(rank == 1 ? outcome : "");
    if (amount != amounts.front() && outcome != "made") {
      // A peer that gives up later leaves its connection open a little longer.
      long kept = 0;
      for (int look = 0; look < 200; ++look, std::this_thread::sleep_for(10ms)) {
        kept = Holdings::now().descriptors - before.descriptors;
        if (kept <= 0) break;
      }
      if (kept > 0) say(fmt::format("{}: keeps {} descriptors", amount, kept));
    }
    if (of_1 == "made") break;
  }
  m.name = "afterwards";
  m.deadline = 10s;
  weft::ProcessGroup g = create(context, backend, m);
  g.barrier().wait();
  say("works afterwards");
}

// Makes, uses once and destroys a group, a subgroup and a duplicate, n times.
void make_groups(weft::Context& context, const std::string& backend, weft::Membership m, int n) {
  const auto one = [&] {
    weft::ProcessGroup g = create(context, backend, m);
    std::vector<float> x(100, 1.0f);
    g.all_reduce(view(x), view(x)).wait();
    weft::ProcessGroup twin = g.duplicate();
    twin.barrier().wait();
    const std::vector<int> all{0, 1};
    weft::ProcessGroup sub = g.subgroup("pair", all);
    sub.barrier().wait();
  };
  m.name = "again";
  // Threads and sockets that are about to end get a moment. shm keeps memory of a group that has ended here
  // and not yet on the other rank until the next group is made.
  const auto settled = [&] {
    std::this_thread::sleep_for(200ms);
    weft::Membership alone;
    alone.store = weft::make_local_store();
    alone.name = "alone";
    weft::ProcessGroup::create(context, "shm", alone);
    return Holdings::now();
  };
  for (int i = 0; i < 20; ++i) one();
  const Holdings before = settled();
  for (int i = 0; i < n; ++i) one();
  Holdings after = settled();
  for (int i = 0; i < 20 && (after.threads > before.threads || after.descriptors > before.descriptors); ++i)
    after = settled();
  say(fmt::format("descriptors {}", after.descriptors - before.descriptors));
  say(fmt::format("mappings {}", after.mappings - before.mappings));
  say(fmt::format("threads {}", after.threads - before.threads));
  say(fmt::format("KiB {}", after.resident - before.resident));
}

double cpu_seconds() {
  timespec t{};
  ::clock_gettime(threads ? CLOCK_THREAD_CPUTIME_ID : CLOCK_PROCESS_CPUTIME_ID, &t);
  return static_cast<double>(t.tv_sec) + static_cast<double>(t.tv_nsec) * 1e-9;
}

// Rank 1 gets a signal while all are in the middle of an all-reduce that takes long.
void in_the_middle(Job& j, int signal, weft::Duration deadline) {
  std::vector<float> large(std::size_t{16} << 20, 1.0f);
  j.all_reduce();
  if (rank == 1) {
    j.come("victim");
    weft::Work w = j.g.all_reduce(view(large), view(large), {.deadline = deadline});
    tell_in_full([&] {
      if (!w.wait_for(4ms)) ::raise(signal);
      w.wait();
    });
    j.come("awake");
    return;
  }
  const int pid = std::stoi(j.await("victim", 1));
  tell_in_full([&] { j.g.all_reduce(view(large), view(large), {.deadline = deadline}).wait(); });
  say(fmt::format("quiesces {}", j.g.quiesce(3s)));
  if (signal == SIGSTOP) {
    std::fill(large.begin(), large.end(), 7.0f);  // ours again
    j.come("has seen it");
    if (rank == 0) {
      for (int r = 2; r < j.g.size(); ++r) j.await("has seen it", r);
      ::kill(pid, SIGCONT);
    }
    j.await("awake", 1);
    say(fmt::format("untouched {}", std::all_of(large.begin(), large.end(), [](float x) { return x == 7; })));
  }
}

// A group that was shrunk works: "goes on as rank 1 of 2, once 2, the sum is 2".
void goes_on(Job& j, weft::ProcessGroup& g) {
  g.all_reduce(view(std::as_const(j.in)), view(j.out.data(), 4)).wait();
  say(fmt::format("goes on as rank {} of {}, once {}, the sum is {}", g.rank(), g.size(),
                  g.parent_ranks()[static_cast<std::size_t>(g.rank())], j.out[0]));
}

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
    {"unexpected",  // see main()
     [](Job& j) {
       tell([&] {
         for (int k = 0; k < 101 && rank == 1; ++k) j.g.send(view(std::as_const(j.in)), 0, {.tag = k}).wait();
         if (rank == 0) j.g.recv(view(j.out.data(), 4), 1, {.deadline = 20s, .tag = 5000}).wait();
         j.all_reduce();
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
    // Rank 1 has sent more than MPI takes for a rank that does not look, aborts, and calls MPI no more.
    {"abort behind messages",
     [](Job& j) {
       std::vector<weft::ProcessGroup> groups(12);
       for (weft::ProcessGroup& g : groups) g = j.g.duplicate();
       j.all_reduce();
       std::vector<weft::Work> works;
       if (rank == 1) {
         for (weft::ProcessGroup& g : groups)
           for (int k = 0; k < 60; ++k) works.push_back(g.send(view(std::as_const(j.in)), 0));
         j.g.abort("had enough");
         j.come("aborted");
         j.await("told", 0);
       } else {
         j.await("aborted", 1);
         tell([&] { j.all_reduce(5s); });
         j.come("told");
       }
     }},
    // Rank 1 exists and does not call.
    {"absent",
     [](Job& j) {
       j.store_meet(
           "absent");  // the others call at one time: under load, too, they arrive long before the deadline
       if (rank == 1) {
         j.await("told", 0);
       } else {
         tell([&] { j.all_reduce(2s); });
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

    // Both ranks are roots of the last call. A leaving rank reports the mismatch.
    {"two roots",
     [](Job& j) {
       tell([&] { j.g.broadcast(view(std::as_const(j.in)), view(j.out.data(), 4), rank).wait(); });
       j.store_meet("called");
       j.g = {};
       j.store_meet("left");
     }},

    // Rank 1 leaves out the last call, which needs no other rank.
    {"left out",
     [](Job& j) {
       j.all_reduce();
       if (rank == 0) {
         tell([&] { j.g.broadcast(view(std::as_const(j.in)), view(j.out.data(), 4), 0).wait(); });
         j.g = {};
         j.come("left");
       } else {
         j.await("left", 0);
         j.g = {};
       }
     }},

    // Rank 2 does not arrive. The others wait in a chain behind it: 3 for 2, 0 for 3, 1 for 0. Rank 1 is
    // first at its deadline.
    {"chain",
     [](Job& j) {
       if (rank == 2) {
         for (const int r : {0, 1, 3}) j.await("told", r);
         return;
       }
       const weft::CallOptions options{.deadline = rank == 1 ? 500ms : 20000ms};
       tell([&] {
         j.g.recv(view(j.out.data(), 4), (rank + 3) % 4, options).wait();
         j.g.send(view(std::as_const(j.in)), (rank + 1) % 4, options).wait();
       });
       j.come("told");
     }},

    // Rank 1 makes a group and waits for rank 2, which comes only when the others have the error.
    {"makes a group",
     [](Job& j) {
       j.all_reduce();
       if (rank == 0 || rank == 3) {
         tell([&] { j.all_reduce(500ms); });
         return j.come("told");
       }
       if (rank == 2)
         for (const int r : {0, 3}) j.await("told", r);
       tell([&] { j.g.subgroup("pair", {1, 2}); });
     }},

    // Rank 1 has fewer elements.
    {"counts",
     [](Job& j) {
       std::vector<float> x(1024);
       tell_in_full([&] {
         j.g.all_reduce(view(x.data(), rank == 1 ? 1000 : 1024), view(x.data(), rank == 1 ? 1000 : 1024))
             .wait();
       });
     }},
    {"counts of an average",
     [](Job& j) {
       std::vector<weft::bf16> x(1024);
       j.all_reduce();
       const weft::TensorView whole = view(x), part = view(x.data(), rank == 1 ? 1000 : 1024);
       const weft::CallOptions average{.op = weft::ReduceOp::avg};
       j.g.all_reduce(whole, whole, average).wait();
       j.store_meet("have met");
       tell_in_full([&] { j.g.all_reduce(part, part, average).wait(); });
     }},
    // Rank 1 leaves out a call. Its next call meets the others' earlier call.
    {"skips",
     [](Job& j) {
       std::vector<float> all(4 * static_cast<std::size_t>(j.g.size()));
       j.all_reduce();
       j.store_meet("have met");  // else a slow rank may learn of it in the call before
       tell_in_full([&] {
         if (rank != 1) j.all_reduce(1s);
         j.g.all_gather(view(std::as_const(j.in)), view(all), {.deadline = 1s}).wait();
       });
     }},
    // Rank 1 leaves out the last call, and has the same before: nothing differs but that it does not come.
    {"skips the last",
     [](Job& j) {
       for (int i = 0; i < (rank == 1 ? 3 : 4); ++i) {
         if (i < 3) {
           j.all_reduce();
           continue;
         }
         tell_in_full([&] { j.all_reduce(500ms); });
         j.come("told");
       }
       for (int r = 0; r < j.g.size(); ++r)
         if (r != 1) j.await("told", r);
     }},
    // One after the other, in a group each, all that rank 1 can do to the others, in their second call.
    {"every cause",
     [](Job& j) {
       const auto group = [&](const std::string& cause) {
         weft::Membership m = j.member;
         m.name = cause;
         weft::ProcessGroup g = create(j.context, j.backend, m);
         g.barrier().wait();
         return g;
       };
       const auto all_reduce = [&](weft::ProcessGroup& g, std::int64_t count = 4) {
         g.all_reduce(view(j.in.data(), count), view(j.out.data(), count)).wait();
       };
       // The failing call, and the call of `rank 1` in its place.
       const std::pair<const char*, std::function<void(weft::ProcessGroup&)>> causes[] = {
           {"counts", [&](weft::ProcessGroup& g) { all_reduce(g, rank == 1 ? 3 : 4); }},
           {"messages",
            [&](weft::ProcessGroup& g) {
              if (rank == 1) return g.send(view(std::as_const(j.in)), 0, {.tag = 7}).wait();
              if (rank == 0) g.recv(view(j.out.data(), 3), 1, {.tag = 7}).wait();
            }},
           {"abort",
            [&](weft::ProcessGroup& g) {
              if (rank == 1) g.abort("had enough");
              all_reduce(g);
            }},
           {"drop",
            [&](weft::ProcessGroup& g) {
              if (rank == 1) {
                { const weft::Work w = g.all_reduce(view(std::as_const(j.in)), view(j.out.data(), 4)); }
                j.come("dropped");
              } else {
                j.await("dropped", 1);
                all_reduce(g);  // rank 1 had come to this one, so it may be done
              }
              all_reduce(g);
            }},
           {"leave",
            [&](weft::ProcessGroup& g) {
              if (rank == 1) {
                g = {};
              } else {
                all_reduce(g);
              }
            }},
           {"absent",
            [&](weft::ProcessGroup& g) {
              if (rank != 1)
                g.broadcast(view(std::as_const(j.in)), view(j.out.data(), 4), 1, {.deadline = 300ms}).wait();
            }},
       };
       for (const auto& [cause, call] : causes) {
         weft::ProcessGroup g = group(cause);
         j.store_meet(std::string("before ") + cause);
         say(cause);
         tell_in_full([&, &call = call] { call(g); });
         j.store_meet(std::string("after ") + cause);
         if (g) g.quiesce(2s);
       }
     }},
    // All ranks continue after an abort. Then they continue without rank 1, which calls too late.
    {"shrinks",
     [](Job& j) {
       if (rank == 1) j.g.abort("once more");
       tell_in_full([&] { j.all_reduce(); });
       weft::ProcessGroup all = j.g.shrink(10s);
       goes_on(j, all);
       if (rank == 1) {
         j.await("made", 0);
         tell_in_full([&] { all.barrier().wait(); });
         tell_in_full([&] { all.shrink(); });
       } else {
         weft::ProcessGroup rest = all.shrink(1s);
         goes_on(j, rest);
         if (rank == 0) j.come("made");
       }
       j.store_meet("end");
     }},
    {"killed, then shrinks",
     [](Job& j) {
       j.all_reduce();
       if (rank == 1) ::raise(SIGKILL);
       tell_in_full([&] { j.all_reduce(2s); });
       weft::ProcessGroup rest = j.g.shrink(2s);
       goes_on(j, rest);
     }},
    {"stopped in the middle", [](Job& j) { in_the_middle(j, SIGSTOP, 1s); }},
    {"killed in the middle", [](Job& j) { in_the_middle(j, SIGKILL, 20s); }},
    {"killed in the middle, 2 s", [](Job& j) { in_the_middle(j, SIGKILL, 2s); }},
    {"large",
     [](Job& j) {
       const weft::Tensor t(j.context, weft::Shape{32 << 20}, weft::DType::f32, weft::Memory::shared);
       std::fill(t.f32().begin(), t.f32().end(), 1.0f);
       tell_in_full([&] { j.g.all_reduce(t, t).wait(); });
       say(fmt::format("sum {}", *std::min_element(t.f32().begin(), t.f32().end())));
     }},
    // Rank 0 forks: what the child may do, and that nobody else notices.
    {"forks",
     [](Job& j) {
       j.all_reduce();
       if (rank == 0) {
         const pid_t child = ::fork();
         if (child == 0) {
           tell_in_full([&] { j.all_reduce(); });
           tell_in_full([&] { j.g.duplicate(); });
           tell_in_full([&] { weft::Membership::from_env(j.context); });
           j.g = {};
           std::fflush(nullptr);
           ::_exit(0);
         }
         int status = -1;
         ::waitpid(child, &status, 0);
         say(fmt::format("child {}", status));
       }
       j.all_reduce();
       say(fmt::format("sum {}", j.out[0]));
     }},
    // Rank 1 may have no more descriptors and memory than it has; then rank 0 has a new segment.
    {"no more of anything",
     [](Job& j) {
       j.all_reduce();
       const auto no_memory = rank == 1 ? memory_left(8 << 10) : nullptr;
       const auto no_descriptors = rank == 1 ? descriptors_left(0) : nullptr;
       j.store_meet("limited");
       const weft::Tensor t(j.context, weft::Shape{200'000}, weft::DType::f32,
                            rank == 0 ? weft::Memory::shared : weft::Memory::local);
       for (int i = 0; i < 3; ++i) {
         std::fill(t.f32().begin(), t.f32().end(), 1.0f);
         tell_in_full([&] { j.g.all_reduce(t, t, {.deadline = 5s}).wait(); });
       }
       say(fmt::format("sum {}", *std::max_element(t.f32().begin(), t.f32().end())));
     }},
    // The CPU time of rank 0 between the first and the sixth second of a wait for rank 1.
    {"waits",
     [](Job& j) {
       j.all_reduce();
       if (rank == 1) {
         std::this_thread::sleep_for(6500ms);
         return j.all_reduce();
       }
       weft::Work w = j.g.all_reduce(view(std::as_const(j.in)), view(j.out.data(), 4));
       if (w.wait_for(1s)) say("too early");
       const double before = cpu_seconds();
       if (w.wait_for(5s)) say("too early");
       say(fmt::format("cpu {:.4f}", (cpu_seconds() - before) / 5));
       w.wait();
     }},
};

}  // namespace

int main(int, char** argv) {
  const std::string backend = argv[1], what = argv[2];
  threads = backend == "threads";
  if (what == "unexpected") ::setenv("WEFT_UNEXPECTED_MESSAGES", "100", 1);
  weft::Context context;
  const auto body = [&](weft::Membership m) {
    rank = m.rank;
    if (what == "few descriptors")
      return try_with(context, backend, m, {1, 2, 3, 4, 5, 6, 8, 10, 12, 16, 20, 32, 64}, descriptors_left);
    if (what == "little memory")
      return try_with(context, backend, m, {1 << 10, 4 << 10, 16 << 10, 64 << 10, 256 << 10, 2 << 20},
                      memory_left);
    if (what == "many groups") return make_groups(context, backend, m, std::atoi(argv[4]));
    if (what == "never comes") {  // to the group's creation
      if (rank == 1) {
        m.store->get("told", weft::Deadline::after(30s));
        return;
      }
      m.deadline = 500ms;
      tell([&] { create(context, backend, m); });
      m.store->set("told", "1");
      return;
    }
    weft::ProcessGroup group;
    try {
      group = create(context, backend, m);
    } catch (const weft::Error& e) {
      say(fmt::format("{}: {}", name(e.code()), e.what()));
      if (m.store->add("refused", 1) == m.size) m.store->set("all are refused", "1");
      m.store->get("all are refused", weft::Deadline::after(30s));
      return;
    }
    Job job{context, backend, m, group, *m.store};
    kScenes.at(what)(job);
    // A rank that exits after a failure has not called MPI_Finalize, and mpirun ends the others: all have
    // printed first.
    const int speakers = what.starts_with("killed") ? m.size - 1 : m.size;
    if (m.store->add("spoken", 1) == speakers) m.store->set("all have spoken", "1");
    m.store->get("all have spoken", weft::Deadline::after(30s));
  };
  if (!threads) {
    body(weft::Membership::from_env(context));
    return 0;
  }
  const std::shared_ptr<weft::Store> store = weft::make_local_store();
  const int size = std::atoi(argv[3]);
  std::vector<std::thread> ranks;
  for (int r = 0; r < size; ++r)
    ranks.emplace_back([&, r] {
      weft::Membership m;
      m.store = store;
      m.rank = r;
      m.size = size;
      body(m);
    });
  for (std::thread& t : ranks) t.join();
  return 0;
}
