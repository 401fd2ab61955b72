#include "host/peers.hpp"

#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <sched.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/un.h>
#include <unistd.h>

#include <atomic>
#include <csignal>
#include <cstdlib>
#include <cstring>
#include <functional>
#include <memory>
#include <mutex>
#include <optional>
#include <thread>
#include <utility>
#include <vector>

#include "host/arena.hpp"
#include "host/peers/descriptor_socket.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "weft/base/storage.hpp"
#include "weft/host/context.hpp"

namespace weft::peers_test {
namespace {

using namespace std::chrono_literals;
using test::ChildProcess;
using test::error_text;
using test::Pipe;

Deadline soon() { return Deadline::after(10s); }

// The objects that a peer keeps alive while other processes read them.
struct Kept {
  RegionRef region;
  Storage block;
};

Kept nothing(Context&) { return {}; }

Kept region_and_block(Context& context) {
  return {host_peers_of(context).offer("group", 4096), Storage::allocate(context, Memory::shared, 10000)};
}

// A child with a Context of its own. It makes the objects to be kept, reports its address, serves, and then
// waits until it is killed or asked to end.
struct Peer {
  Pipe from_child, to_child;
  std::optional<ChildProcess> process;

  using Make = std::function<Kept(Context&)>;
  using Serve = std::function<void(Context&, const Kept&)>;
  explicit Peer(const Make& make = nothing, const Serve& serve = {}) {
    process = ChildProcess::fork([&, this] {
      Context context;
      const Kept kept = make(context);
      from_child.write_line(host_peers_of(context).self().encode());
      if (serve) serve(context, kept);
      to_child.read_line(60s);
      return 0;
    });
  }
  ProcessAddress address() { return ProcessAddress::decode(from_child.read_line()); }
  void go() {
    to_child.write_line("go");
    const auto status = process->wait(10s);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(test::to_string(*status), "exit code 0");
  }
};

TEST(ProcessAddress, IsOneLineOfText) {
  const ProcessAddress a{.host = "boot/pid:[1]/net:[2]",
                         .socket = "weft-00ff",
                         .user = 1000,
                         .pid = 77,
                         .block = 5,
                         .block_inode = 12};
  EXPECT_EQ(a.encode(), "weft1 boot/pid:[1]/net:[2] weft-00ff 1000 77 5 12");
  EXPECT_EQ(ProcessAddress::decode(a.encode()), a);
}

TEST(ProcessAddress, RefusesOtherText) {
  for (const std::string text :
       {"", "hello", "weft1 a b 1", "weft1 a b 1 x", "weft1 a b 1 2 3", "weft1 a b 1 2 3 4 5",
        "weft2 a b 1 2 3 4", "weft1 a b -1 2 3 4", "weft1 a b 4294967296 2 3 4", "weft1 a b 0x1 2 3 4",
        "weft1 a b 1 0 3 4", "weft1 a b 1 -2 3 4", "weft1 a b 1 2147483648 3 4", "weft1 a b 1 2 -2 4",
        "weft1 a b 1 2 3 -4", "weft1 a b 1 2 3 4x"})
    EXPECT_EQ(error_text([&] { ProcessAddress::decode(text); }),
              "mismatch: host peers: \"" + text +
                  "\" is not a process address; expected \"weft1 <host> <socket> <user> <process> <block> "
                  "<inode>\", as this "
                  "version of "
                  "weft writes it");
}

TEST(Doorbell, WakesASleeperAndNotOneThatLooksAgain) {
  Context context;
  const Doorbell doorbell = host_peers_of(context).own_doorbell(3);
  const std::uint32_t seen = doorbell.read();
  doorbell.ring();
  const auto start = Clock::now();
  doorbell.sleep(seen, 20s);  // rung already
  EXPECT_LT(Clock::now() - start, 10s);
  std::thread ringer([&] {
    std::this_thread::sleep_for(20ms);
    doorbell.ring();
  });
  const std::uint32_t now = doorbell.read();
  while (doorbell.read() == now) doorbell.sleep(now, 20s);
  ringer.join();
  EXPECT_LT(Clock::now() - start, 10s);
  doorbell.sleep(doorbell.read(), 5ms);  // nobody rings: ends by itself
  EXPECT_FALSE(host_peers_of(context).own_doorbell(-1));
  EXPECT_TRUE(host_peers_of(context).own_doorbell(1'000'000));
}

TEST(Doorbell, ThereAreSoManyInAProcess) {
  Context context;
  HostPeers& here = host_peers_of(context);
  for (int i = 0; i < HostPeers::kMaxDoorbells; ++i) EXPECT_EQ(here.doorbell_number(7 * i), i);
  EXPECT_EQ(here.doorbell_number(7), 1);
  EXPECT_EQ(
      error_text([&] { here.doorbell_number(1); }),
      "unsupported: host peers: no doorbell for process_rank 1: 1024 ranks are threads of this process; "
      "expected at most that many");
  const PeerProcessRef self = here.meet(here.self(), soon());
  EXPECT_FALSE(self->doorbell(-1));
  EXPECT_FALSE(self->doorbell(HostPeers::kMaxDoorbells));
}

TEST(HostPeers, ThreadsShareOneMapping) {
  Context context;
  HostPeers& here = host_peers_of(context);
  const PeerProcessRef self = here.meet(here.self(), soon());
  EXPECT_TRUE(self->is_self());
  EXPECT_TRUE(self->alive());
  RegionRef opened;
  std::thread opener([&] { opened = here.open(*self, "group", soon()); });
  std::this_thread::sleep_for(5ms);
  const RegionRef offered = here.offer("group", 5000);
  opener.join();
  EXPECT_EQ(opened->data, offered->data);
  EXPECT_EQ(opened->bytes, 5000u);
  for (std::size_t i = 0; i < offered->bytes; ++i) ASSERT_EQ(offered->data[i], std::byte{0});

  EXPECT_EQ(self->segment(0), nullptr);
  EXPECT_FALSE(self->map_segments(1, soon()));
  const Storage s = Storage::allocate(context, Memory::shared, 100);
  EXPECT_TRUE(self->map_segments(1, soon()));
  EXPECT_EQ(self->segment(0), arena_of(context).segment_base(0));
}

TEST(HostPeers, RegionErrors) {
  Context context;
  HostPeers& here = host_peers_of(context);
  const PeerProcessRef self = here.meet(here.self(), soon());
  RegionRef a = here.offer("a", 64);
  EXPECT_EQ(error_text([&] { here.offer("a", 64); }),
            "bad_argument: host peers: region \"a\" is offered already by this process");
  EXPECT_EQ(error_text([&] { here.offer("b", 0); }),
            "bad_argument: host peers: region \"b\" has 0 bytes; expected at least 1");
  EXPECT_EQ(error_text([&] { here.offer(std::string(1001, 'x'), 1); }),
            "bad_argument: host peers: a region's name has 1001 bytes; expected 1 to 1000");
  EXPECT_EQ(error_text([&] { here.open(*self, "b", Deadline::after(100ms)); }),
            "timeout: host peers: process " + std::to_string(::getpid()) +
                " did not offer region \"b\" within 0.1 s");
  a.reset();  // withdrawn with its last owner
  EXPECT_NO_THROW(here.offer("a", 64));
}

TEST(HostPeers, ProcessesShareRegionsSegmentsAndDoorbells) {
  Peer peer(
      [](Context& context) {
        Kept kept = region_and_block(context);
        std::memset(kept.block.data(), 7, 10000);
        return kept;
      },
      [](Context& context, const Kept& kept) {  // answers the doorbell of process rank 5 through the region
        const Doorbell doorbell = host_peers_of(context).own_doorbell(5);
        while (doorbell.read() == 0) doorbell.sleep(0, 10s);
        std::atomic_ref(kept.region->data[1]).store(std::byte{9});
      });
  const ProcessAddress address = peer.address();
  Context context;
  HostPeers& here = host_peers_of(context);
  PeerProcessRef there = here.meet(address, soon());
  EXPECT_EQ(here.meet(address, soon()), there);
  EXPECT_FALSE(there->is_self());
  EXPECT_TRUE(there->alive());
  EXPECT_EQ(there->address(), address);

  const RegionRef region = here.open(*there, "group", soon());
  EXPECT_EQ(here.open(*there, "group", soon())->data, region->data);
  EXPECT_EQ(region->bytes, 4096u);

  EXPECT_EQ(there->segment(0), nullptr);
  ASSERT_TRUE(there->map_segments(1, soon()));
  EXPECT_EQ(there->segment(0)[9999], std::byte{7});
  EXPECT_FALSE(there->map_segments(2, soon()));  // it has one
  EXPECT_EQ(there->segment(300), nullptr);
  EXPECT_FALSE(there->map_segments(Arena::kMaxSegments + 1, soon()));

  there->doorbell(0).ring();  // the first that it asked for
  const std::atomic_ref<std::byte> answer(region->data[1]);
  for (const Deadline limit = soon(); answer.load() == std::byte{0} && !limit.passed();)
    std::this_thread::sleep_for(1ms);
  EXPECT_EQ(answer.load(), std::byte{9});

  there.reset();  // the region keeps its peer process, and so the mapping, known
  there = here.meet(address, soon());
  EXPECT_EQ(here.open(*there, "group", soon())->data, region->data);
  peer.go();
  EXPECT_FALSE(there->alive());
}

TEST(HostPeers, ManyThreadsMeetOneProcessOnce) {
  Peer peer(region_and_block);
  const ProcessAddress address = peer.address();
  Context context;
  std::mutex mutex;
  std::vector<PeerProcessRef> met;
  std::vector<RegionRef> opened;
  std::vector<std::thread> threads;
  for (int i = 0; i < 6; ++i)
    threads.emplace_back([&] {
      const PeerProcessRef there = host_peers_of(context).meet(address, soon());
      EXPECT_TRUE(there->map_segments(1, soon()));
      const RegionRef region = host_peers_of(context).open(*there, "group", soon());
      const std::lock_guard lock(mutex);
      met.push_back(there);
      opened.push_back(region);
    });
  for (std::thread& t : threads) t.join();
  for (const PeerProcessRef& n : met) EXPECT_EQ(n, met[0]);
  for (const RegionRef& r : opened) EXPECT_EQ(r->data, opened[0]->data);
}

TEST(HostPeers, TellsAKilledProcess) {
  Peer peer;
  const ProcessAddress address = peer.address();
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(address, soon());
  peer.process->kill(SIGKILL);
  for (const Deadline limit = Deadline::after(1s); there->alive() && !limit.passed();)
    std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(there->alive());
  EXPECT_FALSE(there->map_segments(1, soon()));
  const std::string who = "peer_lost: host peers: process " + std::to_string(address.pid);
  EXPECT_EQ(error_text([&] { host_peers_of(context).open(*there, "group", soon()); }), who + " has ended");
  ASSERT_TRUE(peer.process->wait(5s));
  ProcessAddress stale = address;
  EXPECT_EQ(host_peers_of(context).meet(stale, soon()), there);  // still held, still dead
  Context other;
  EXPECT_EQ(error_text([&] { host_peers_of(other).meet(stale, soon()); }),
            who + " has ended: nobody listens on its socket");
}

TEST(HostPeers, NamesADeathWhileItWaits) {
  Peer peer;
  const ProcessAddress address = peer.address();
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(address, soon());
  std::thread killer([&] {
    std::this_thread::sleep_for(50ms);
    peer.process->kill(SIGKILL);
  });
  const auto start = Clock::now();
  EXPECT_EQ(error_text([&] { host_peers_of(context).open(*there, "never", Deadline::after(30s)); }),
            "peer_lost: host peers: process " + std::to_string(address.pid) + " has ended");
  EXPECT_LT(Clock::now() - start, 5s);
  killer.join();
}

// A stopped process is not needed: memory that it has published can be opened without it.
TEST(HostPeers, AStoppedProcessIsMetAndMapped) {
  Peer peer([](Context& context) {
    Kept kept = region_and_block(context);
    host_peers_of(context).show_segments();
    return kept;
  });
  const ProcessAddress address = peer.address();
  peer.process->stop();
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(address, Deadline::after(0s));
  EXPECT_TRUE(there->map_segments(1, Deadline::after(0s)));
  EXPECT_NE(there->segment(0), nullptr);
  EXPECT_TRUE(there->alive());
  EXPECT_FALSE(there->map_segments(2, Deadline::after(1ms)));  // there is no second one
  peer.process->resume();
  peer.go();
  EXPECT_FALSE(there->alive());
}

// A process that is not dumpable, so that /proc refuses it.
ProcessAddress by_socket(ProcessAddress address) {
  address.block = -1;
  return address;
}

TEST(HostPeers, WhatCannotBeOpenedIsAskedFor) {
  Peer peer(region_and_block);
  const ProcessAddress address = peer.address();
  Context context;
  ProcessAddress wrong = address;
  ++wrong.block_inode;
  for (const ProcessAddress& a : {by_socket(address), wrong}) {
    const int before = test::count_descriptors();
    const PeerProcessRef there = host_peers_of(context).meet(a, soon());
    EXPECT_TRUE(there->map_segments(1, soon()));
    EXPECT_NE(there->segment(0), nullptr);
    EXPECT_TRUE(there->alive());
    EXPECT_EQ(test::count_descriptors(), before + 1);  // the pidfd
  }
}

// It keeps its pid, and its children hold copies of all descriptors that it had open.
TEST(HostPeers, TellsAProcessThatBecameAnother) {
  Pipe address_out, go;
  ChildProcess child = ChildProcess::fork([&] {
    Context context;
    address_out.write_line(host_peers_of(context).self().encode());
    go.read_line();
    if (::fork() == 0) {
      ::sleep(2);
      ::_exit(0);
    }
    ::execl("/bin/sleep", "sleep", "30", nullptr);
    return 1;
  });
  const ProcessAddress address = ProcessAddress::decode(address_out.read_line());
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(address, soon());
  EXPECT_TRUE(there->alive());
  go.write_line("go");
  for (const Deadline limit = soon(); there->alive() && !limit.passed();) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(there->alive());
  EXPECT_FALSE(child.wait(0ms).has_value());  // still there
}

// From here on this process has one processor. Another program that is to run there waits until this process
// sleeps.
bool take_one_processor() {
  cpu_set_t one;
  CPU_ZERO(&one);
  CPU_SET(::sched_getcpu(), &one);
  const sched_param first{.sched_priority = 1};
  return ::sched_setaffinity(0, sizeof one, &one) == 0 && ::sched_setscheduler(0, SCHED_FIFO, &first) == 0;
}

// This also holds if the threads of weft have not run yet, except for the part for which making a Context
// waits.
TEST(HostPeers, TellsAProcessThatBecameAnotherAtOnce) {
  Pipe address_out;
  ChildProcess child = ChildProcess::fork([&] {
    if (!take_one_processor()) {
      address_out.write_line("none");
      return 0;
    }
    Context context;
    const Doorbell doorbell = host_peers_of(context).own_doorbell(0);
    address_out.write_line(host_peers_of(context).self().encode());
    for (const Deadline limit = Deadline::after(5s); doorbell.read() == 0 && !limit.passed();) {}
    ::execl("/bin/sleep", "sleep", "30", nullptr);
    return 1;
  });
  const std::string address = address_out.read_line();
  if (address == "none") GTEST_SKIP() << "this system lets no process take a processor for itself";
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(ProcessAddress::decode(address), soon());
  there->doorbell(0).ring();
  for (const Deadline limit = soon(); there->alive() && !limit.passed();) std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(there->alive());
  EXPECT_FALSE(child.wait(0ms).has_value());  // still there
}

// The child holds a copy of the socket, which lets others knock for as long as it runs.
TEST(HostPeers, AChildOfItsDoesNotHideAnEnd) {
  for (const bool dies : {false, true}) {
    Pipe from_child, to_child;
    ChildProcess child = ChildProcess::fork([&] {
      auto context = std::make_unique<Context>();
      const std::string address = host_peers_of(*context).self().encode();
      if (::fork() == 0) {
        to_child.read_line(20s);
        ::_exit(0);
      }
      if (dies) {
        from_child.write_line(address);
        ::_exit(0);
      }
      context.reset();
      from_child.write_line(address);
      ::sleep(20);
      return 0;
    });
    const ProcessAddress address = by_socket(ProcessAddress::decode(from_child.read_line()));
    if (dies) {
      ASSERT_TRUE(child.wait(5s));
    }
    Context context;
    EXPECT_THAT(
        error_text([&] { host_peers_of(context).meet(address, soon()); }),
        testing::StartsWith("peer_lost: host peers: process " + std::to_string(address.pid) + " has ended"));
    to_child.write_line("go");
    if (!dies) child.kill(SIGKILL);
  }
}

// Many descriptors on their way, of a user who may have few: the kernel says ETOOMANYREFS. That means later.
TEST(HostPeers, ACrowdOfDescriptorsIsWaitedFor) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become a user whose descriptors are counted";
  const test::ProcessResult result = test::run_in_child([] {
    const rlimit few{.rlim_cur = 64, .rlim_max = 64};
    EXPECT_EQ(::setrlimit(RLIMIT_NOFILE, &few), 0);
    if (::setuid(65533) != 0) return 2;
    int pair[2];
    EXPECT_EQ(::socketpair(AF_UNIX, SOCK_SEQPACKET, 0, pair), 0);
    const Descriptor in(pair[0]), out(pair[1]);
    char byte = 0;
    int sent = 0;
    Transfer last = Transfer::done;
    for (; sent < 200 && last == Transfer::done; ++sent) last = send_message(in.get(), &byte, 1, in.get());
    EXPECT_EQ(last, Transfer::too_many_in_flight);
    Context one, other;
    std::thread receiver([&] {
      std::this_thread::sleep_for(100ms);
      Descriptor received;
      while (receive_message(out.get(), &byte, 1, &received) == Transfer::done) {}
    });
    EXPECT_TRUE(host_peers_of(one).meet(by_socket(host_peers_of(other).self()), soon())->alive());
    receiver.join();
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

TEST(HostPeers, ManyConnectionsOfAnotherUserAreFewLines) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  std::atomic<int> lines{0};
  {
    Pipe address_to_child;
    ChildProcess child = ChildProcess::fork([&] {
      if (::setuid(65534) != 0) return 2;
      const std::string name = address_to_child.read_line();
      for (int i = 0; i < 2000; ++i) {
        const Descriptor s = connect_abstract(name);
        if (!s) std::this_thread::sleep_for(1ms);
      }
      return 0;
    });
    Context context({.log_sink = [&](LogLevel, std::string_view line) {
      if (line.find("refused process") != line.npos || line.find(" more warnings within") != line.npos)
        ++lines;
    }});
    address_to_child.write_line(host_peers_of(context).self().socket);
    const auto status = child.wait(30s);
    ASSERT_TRUE(status.has_value());
    EXPECT_EQ(test::to_string(*status), "exit code 0");
    Context ours;  // still served
    EXPECT_TRUE(host_peers_of(ours).meet(by_socket(host_peers_of(context).self()), soon())->alive());
  }
  EXPECT_GE(lines, 2);
  EXPECT_LE(lines, 100);  // 21 within ten seconds
}

TEST(HostPeers, AStoppedProcessCostsNoMoreThanTheDeadline) {
  Peer peer(region_and_block);
  const ProcessAddress address = by_socket(peer.address());
  Context context;
  const PeerProcessRef there = host_peers_of(context).meet(address, soon());
  peer.process->stop();
  const auto start = Clock::now();
  // Two at once: the second waits for its turn, no longer than its own deadline.
  std::thread other([&] { EXPECT_FALSE(there->map_segments(1, Deadline::after(2s))); });
  std::this_thread::sleep_for(20ms);
  EXPECT_FALSE(there->map_segments(1, Deadline::after(100ms)));
  EXPECT_LT(Clock::now() - start, 1500ms);
  other.join();
  for (int i = 0; i < 20; ++i) EXPECT_FALSE(there->map_segments(1, Deadline::after(1ms)));
  EXPECT_EQ(error_text([&] { host_peers_of(context).open(*there, "x", Deadline::after(100ms)); }),
            "timeout: host peers: process " + std::to_string(address.pid) + " did not answer within 0.1 s");
  EXPECT_TRUE(there->alive());
  Context fresh;
  EXPECT_EQ(error_text([&] { host_peers_of(fresh).meet(address, Deadline::after(100ms)); }),
            "timeout: host peers: process " + std::to_string(address.pid) + " did not answer within 0.1 s");
  EXPECT_LT(Clock::now() - start, 8s);
  peer.process->resume();
  EXPECT_TRUE(there->map_segments(1, soon()));  // late answers to what was given up do no harm
  EXPECT_NE(there->segment(0), nullptr);
  peer.go();
}

TEST(HostPeers, RefusesOtherHostsAndUsersByName) {
  Context context;
  const ProcessAddress self = host_peers_of(context).self();
  ProcessAddress elsewhere = self;
  elsewhere.host = "moon";
  EXPECT_EQ(error_text([&] { host_peers_of(context).meet(elsewhere, soon()); }),
            "unsupported: host peers: process " + std::to_string(self.pid) +
                " is on another host, or in another pid or network namespace (moon); expected " + self.host +
                ", as this process: memory cannot be shared");
  ProcessAddress other = self;
  other.user = self.user + 1;
  EXPECT_EQ(error_text([&] { host_peers_of(context).meet(other, soon()); }),
            "unsupported: host peers: process " + std::to_string(self.pid) + " runs as user " +
                std::to_string(self.user + 1) + "; expected " + std::to_string(self.user) +
                ", as this process: memory is shared with processes of the same user only");
}

// A file-size limit of 0 stands for a system that refuses memfd_create.
TEST(HostPeers, SaysThatAProcessHasNoMemoryToShare) {
  Pipe address_out, done_in;
  ChildProcess child = ChildProcess::fork([&] {
    rlimit limit{};
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    Context context;
    address_out.write_line(host_peers_of(context).self().encode());
    done_in.read_line();
    return 0;
  });
  const ProcessAddress address = ProcessAddress::decode(address_out.read_line());
  Context context;
  EXPECT_EQ(
      error_text([&] { host_peers_of(context).meet(address, soon()); }),
      "unsupported: host peers: process " + std::to_string(address.pid) +
          " has no memory that others can map: its system refuses memfd_create: File too large (ulimit -f "
          "there)");
  done_in.write_line("done");
  EXPECT_EQ(child.wait(10s), (test::ExitStatus{0, 0}));
}

// A process without memory lets connecting processes wait, and continues when it has memory.
TEST(HostPeers, AProcessWithoutMemoryServesLater) {
#if defined(__SANITIZE_ADDRESS__) || defined(__SANITIZE_THREAD__)
  GTEST_SKIP() << "sanitizers need the address space that this test takes away";
#endif
  Pipe address_out, starved, fed;
  ChildProcess child = ChildProcess::fork([&] {
    ::mallopt(M_ARENA_MAX, 1);  // the socket's thread has no memory of its own
    Context context;
    address_out.write_line(host_peers_of(context).self().encode());
    rlimit before{};
    ::getrlimit(RLIMIT_AS, &before);
    const rlimit none{.rlim_cur = 4096, .rlim_max = before.rlim_max};
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &none), 0);
    void* all = nullptr;  // a list
    for (std::size_t size = 1 << 20; size >= sizeof(void*); size /= 2)
      while (void* const block = std::malloc(size)) {
        std::memcpy(block, &all, sizeof all);
        all = block;
      }
    starved.write_line("now");
    fed.read_line();
    EXPECT_EQ(::setrlimit(RLIMIT_AS, &before), 0);
    while (all != nullptr) {
      void* next = nullptr;
      std::memcpy(&next, all, sizeof next);
      std::free(std::exchange(all, next));
    }
    fed.read_line();
    return 0;
  });
  const ProcessAddress address = ProcessAddress::decode(address_out.read_line());
  starved.read_line();
  std::vector<Descriptor> knocking;  // more than it has room for, and fewer than a listener's queue holds
  for (int k = 0; k < 100; ++k) {
    knocking.push_back(connect_abstract(address.socket));
    EXPECT_TRUE(k > 64 || knocking.back()) << k << ": " << std::strerror(errno);
  }
  std::this_thread::sleep_for(200ms);
  EXPECT_FALSE(child.wait(0ms).has_value());
  fed.write_line("now");
  Context context;
  EXPECT_TRUE(host_peers_of(context).meet(address, soon())->alive());
  fed.write_line("done");
  EXPECT_EQ(child.wait(10s), (test::ExitStatus{0, 0}));
}

// A process of another user lies about itself: on both sides the kernel reports its real user.
TEST(HostPeers, ChecksCredentialsOnBothSides) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can become another user";
  Pipe address_to_child, log_lines;
  ChildProcess child = ChildProcess::fork([&] {
    if (::setuid(65534) != 0) return 2;
    ProcessAddress address = ProcessAddress::decode(address_to_child.read_line());
    address.user = 65534;
    Context context;
    EXPECT_EQ(error_text([&] { host_peers_of(context).meet(address, soon()); }),
              "unsupported: host peers: process " + std::to_string(address.pid) +
                  " runs as user 0; expected 65534, as this process: memory is shared with processes of the "
                  "same user "
                  "only");
    // A process that does not send the question gets no descriptor, and its connection is closed.
    const int s = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::memcpy(a.sun_path + 1, address.socket.data(), address.socket.size());
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.socket.size());
    EXPECT_EQ(::connect(s, reinterpret_cast<sockaddr*>(&a), bytes), 0);
    char reply[256], control[256];
    iovec part{reply, sizeof reply};
    msghdr header{};
    header.msg_iov = &part;
    header.msg_iovlen = 1;
    header.msg_control = control;
    header.msg_controllen = sizeof control;
    EXPECT_GT(::recvmsg(s, &header, 0), 0);  // the refusal
    EXPECT_EQ(header.msg_controllen, 0u);
    header.msg_controllen = sizeof control;
    EXPECT_EQ(::recvmsg(s, &header, 0), 0);
    return 0;
  });
  Context context(
      {.log_sink = [&](LogLevel, std::string_view line) { log_lines.write_line(std::string(line)); }});
  address_to_child.write_line(host_peers_of(context).self().encode());
  const auto status = child.wait(20s);
  ASSERT_TRUE(status.has_value());
  EXPECT_EQ(test::to_string(*status), "exit code 0");
  EXPECT_EQ(log_lines.read_line(),
            "[host] refused process " + std::to_string(child.pid()) +
                " of user 65534, which asked for memory of this process; only user 0 may");
}

TEST(HostPeers, GarbageOnTheSocketHarmsNobody) {
  std::mutex mutex;
  std::vector<std::string> lines;
  Context context({.log_sink = [&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  }});
  const ProcessAddress address = host_peers_of(context).self();
  for (const std::size_t size : {std::size_t{1}, std::size_t{1024}, std::size_t{20000}}) {
    const int s = ::socket(AF_UNIX, SOCK_SEQPACKET, 0);
    sockaddr_un a{};
    a.sun_family = AF_UNIX;
    std::memcpy(a.sun_path + 1, address.socket.data(), address.socket.size());
    const auto bytes = static_cast<socklen_t>(offsetof(sockaddr_un, sun_path) + 1 + address.socket.size());
    ASSERT_EQ(::connect(s, reinterpret_cast<sockaddr*>(&a), bytes), 0);
    const std::vector<char> garbage(size, 'x');
    ASSERT_EQ(::send(s, garbage.data(), size, MSG_NOSIGNAL), static_cast<ssize_t>(size));
    char byte;
    EXPECT_EQ(::recv(s, &byte, 1, 0), 0);  // hung up
    ::close(s);
  }
  {
    const std::lock_guard lock(mutex);
    EXPECT_THAT(lines,
                testing::Contains("[host] refused a message on this process's socket that is not weft's"));
  }
  Context other;  // still served
  EXPECT_TRUE(host_peers_of(other).meet(address, soon())->alive());
}

TEST(HostPeers, LeavesNoDescriptorBehind) {
  const int before = test::count_descriptors();
  for (int round = 0; round < 3; ++round) {
    Peer peer(region_and_block);
    const ProcessAddress address = peer.address();
    Context context;
    const PeerProcessRef there = host_peers_of(context).meet(address, soon());
    const int met = test::count_descriptors();
    ASSERT_TRUE(there->map_segments(1, soon()));
    const RegionRef region = host_peers_of(context).open(*there, "group", soon());
    EXPECT_EQ(test::count_descriptors(), met);  // descriptors that came are closed once mapped
  }
  EXPECT_EQ(test::count_descriptors(), before);
}

// A peer process whose Context is gone counts as ended, even if the process continues and its own children
// hold copies of its sockets.
TEST(HostPeers, TellsAContextThatEnded) {
  Context context;
  auto other = std::make_unique<Context>();
  ChildProcess holder = ChildProcess::fork([] {
    std::this_thread::sleep_for(30s);
    return 0;
  });
  const PeerProcessRef there = host_peers_of(context).meet(host_peers_of(*other).self(), soon());
  EXPECT_TRUE(there->alive());
  other.reset();
  for (const Deadline limit = Deadline::after(1s); there->alive() && !limit.passed();)
    std::this_thread::sleep_for(1ms);
  EXPECT_FALSE(there->alive());
}

}  // namespace
}  // namespace weft::peers_test
