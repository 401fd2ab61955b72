// How the ranks of a group find each other: addresses through the Store, then one control region, made by
// rank 0 and opened by the others, then each other's segments.
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>

#include <algorithm>
#include <cerrno>
#include <map>
#include <vector>

#include "backends/shm/bootstrap_info.hpp"
#include "backends/shm/layout.hpp"
#include "backends/shm/single_copy.hpp"
#include "backends/test_hooks.hpp"
#include "base/memfd.hpp"
#include "base/mutant.hpp"
#include "base/waits/suspension.hpp"
#include "weft/backends/join.hpp"

namespace weft::shm {
namespace {

Path parse_path(const std::string& text) {
  if (text.empty()) return Path::automatic;
  if (text == "inline") return Path::inline_only;
  if (text == "direct") return Path::direct;
  if (text == "staged") return Path::staged;
  if (text == "single") return Path::single;
  throw Error(
      ErrorCode::bad_argument,
      fmt::format("shm: path \"{}\" is not known; expected \"inline\", \"direct\", \"staged\" or \"single\"",
                  text));
}

// Makes the region of a group of one rank, which no other process maps.
RegionRef private_region(std::size_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw_errno(fmt::format("shm: {} bytes for a group of one", bytes), errno);
  return RegionRef(new Region{static_cast<std::byte*>(data), bytes}, [](const Region* r) {
    munmap(r->data, r->bytes);
    delete r;
  });
}

// For a rank that waits for other ranks outside of the store. From time to time it checks in the store
// whether a rank has failed to make the group.
class Looks {
 public:
  explicit Looks(const GroupInit& b) : b_(b) {}
  Deadline next() const { return next_.when() < b_.deadline.when() ? next_ : b_.deadline; }
  // If it is time to check, throws the first cause, if there is one.
  void look() {
    if (!next_.passed()) return;
    throw_first_cause(b_);
    pause_ = std::min<Duration>(2 * pause_, std::chrono::milliseconds(500));
    next_ = Deadline::after(pause_);
  }

 private:
  const GroupInit& b_;
  Duration pause_ = std::chrono::milliseconds(50);
  Deadline next_ = Deadline::after(pause_);
};

// Returns the Error for a failure to reach rank 0. A limit of this process (system) is not rank 0's fault, so
// the Error then names no rank.
Error about_rank_0(const GroupInit& b, const Error& e) {
  return Error(Failure{.code = e.code(),
                       .text = fmt::format("group \"{}\": rank 0: {}", b.name, e.what()),
                       .ranks = e.code() == ErrorCode::system ? std::vector<int>() : std::vector<int>{0}});
}

// Groups of two stores may have the same name and the same token in one process: the number distinguishes
// their regions.
std::string region_name(const GroupInit& b, int number) { return fmt::format("{}~{}", b.token, number); }

// Makes the group's memory. Rank 0 offers it before the others look for it, and ends the offer if it
// fails.
RegionRef offer_region(const GroupInit& b, const std::string& name, std::size_t bytes) {
  try {
    return host_peers_of(b.context).offer(name, bytes);
  } catch (const Error& e) {
    throw about_rank_0(b, e);
  }
}
RegionRef open_region(const GroupInit& b, PeerProcess& owner, const std::string& name, std::size_t bytes,
                      Clock::time_point began) {
  for (Looks looks(b);; looks.look()) {
    try {
      RegionRef region = host_peers_of(b.context).open(owner, name, looks.next());
      if (region->bytes < bytes)
        throw Error(ErrorCode::corrupt,
                    fmt::format("its region for the group has {} bytes; expected {}", region->bytes, bytes));
      return region;
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout) throw about_rank_0(b, e);
      if (b.deadline.passed())
        throw_absent(b, {0}, std::chrono::duration_cast<Duration>(Clock::now() - began));
    }
  }
}

constexpr int kManyRanks = 128;  // from here on a group needs more descriptors than the usual limit
constexpr std::size_t kOtherDescriptors = 512;  // what the program may need in addition to one for each rank

// The time between two checks whether ranks have died or failed: a millisecond for each rank of the group,
// within these limits.
constexpr Duration kShortestNap = std::chrono::milliseconds(20);
constexpr Duration kLongestNap = std::chrono::milliseconds(400);
constexpr auto kCountPatience = std::chrono::seconds(1);

// Finds the process of each rank, and its doorbell.
void meet_processes(const GroupInit& b, Group& g, const std::vector<BootstrapInfo>& infos) {
  HostPeers& host_peers = host_peers_of(b.context);
  if (b.size >= kManyRanks) {
    const std::size_t limit = raise_descriptor_limit(static_cast<std::size_t>(b.size) + kOtherDescriptors);
    if (limit > 0)
      b.context.log().write(LogLayer::backends, LogLevel::info,
                            fmt::format("group \"{}\": {} ranks: this process may open up to "
                                        "{} descriptors now (ulimit -n)",
                                        b.name, b.size, limit));
  }
  std::map<std::string, PeerProcessRef> by_socket;
  for (int r = 0; r < b.size; ++r) {
    const BootstrapInfo& info = infos[static_cast<std::size_t>(r)];
    PeerProcessRef& process = by_socket[info.address.socket];
    try {
      if (!process) process = host_peers.meet(info.address, b.deadline);
    } catch (const Error& e) {
      // Names no rank, because a limit of this process is not the other rank's fault.
      throw Error(Failure{.code = e.code(),
                          .text = fmt::format("group \"{}\": rank {}: {}", b.name, r, e.what()),
                          .ranks = e.code() == ErrorCode::system ? std::vector<int>() : std::vector<int>{r}});
    }
    if (!process->is_self()) g.one_process = false;
    g.processes.push_back(process);
    g.doorbells.push_back(process->doorbell(info.doorbell));
  }
}

// Waits until all ranks have reached a point in the making of the group. The last rank wakes the others,
// which check from time to time whether a rank has died or given up.
class Assembled {
 public:
  Assembled(const GroupInit& b, const Group& g)
      : b_(b), g_(g), all_(g.control.assembly()), began_(Clock::now()), looks_(b) {}

  void meet(std::uint32_t phase) {
    std::atomic<std::uint32_t>& came = all_.came[phase - 1];
    const auto size = static_cast<std::uint32_t>(b_.size);
    const Doorbell news(&all_.news);
    g_.mine().joined.store(phase, std::memory_order_seq_cst);
    if (came.fetch_add(1, std::memory_order_seq_cst) + 1 == size) return news.ring();
    for (int looks = 0; came.load(std::memory_order_seq_cst) < size; ++looks) {
      const std::uint32_t seen = news.read();
      if (looks < 100) {
        sched_yield();
        continue;
      }
      try {
        look(phase);
      } catch (const Error&) {
        // otherwise it has happened after all ranks had arrived
        if (came.load(std::memory_order_seq_cst) < size) throw;
      }
      // Meanwhile other ranks may ask which ranks are present.
      if (came.load(std::memory_order_seq_cst) < size)
        news.sleep(seen, std::min<Duration>({nap_, wait_piece(), b_.deadline.left()}));
    }
  }

 private:
  void look(std::uint32_t phase) {
    if (g_.aborted() && !WEFT_MUTANT("last_cause")) {
      Failure why = first_cause(g_);
      why.text = fmt::format("group \"{}\": {} [rank {}]", b_.name, why.text, b_.rank);
      throw Error(std::move(why));
    }
    if (const std::vector<int> dead = dead_ranks(g_); !dead.empty())
      throw Error(Failure{
          .code = ErrorCode::peer_lost,
          .text = fmt::format("group \"{}\": rank {} died while the group was made", b_.name, dead[0]),
          .ranks = dead});
    looks_.look();  // a rank without a control region gives up through the store
    if (phase == 1 && b_.rank == 0) check_admits();
    if (!b_.deadline.passed()) return;
    std::vector<int> missing;
    for (int r = 0; r < b_.size; ++r)
      if (g_.of(r).joined.load(std::memory_order_seq_cst) < phase) missing.push_back(r);
    if (!missing.empty())
      throw_absent(b_, missing, std::chrono::duration_cast<Duration>(Clock::now() - began_));
    // All ranks have written that they are present. They are counted a moment later.
    if (Clock::now() < b_.deadline.when() + kCountPatience) return;
    throw Error(ErrorCode::corrupt,
                fmt::format("group \"{}\": the group's words in shared memory are damaged: the number of "
                            "ranks that have arrived is {}; expected {}",
                            b_.name, all_.came[phase - 1].load(std::memory_order_relaxed), b_.size));
  }

  // The other ranks connect to get the control region. They must wait if this process has no more
  // descriptors.
  void check_admits() const {
    try {
      host_peers_of(b_.context).check_admits(b_.deadline.passed());
    } catch (const Error& e) {
      throw Error(e.code(), fmt::format("group \"{}\": {}", b_.name, e.what()));
    }
  }

  const GroupInit& b_;
  const Group& g_;
  Assembly& all_;
  const Duration nap_ = std::clamp<Duration>(std::chrono::milliseconds(b_.size), kShortestNap, kLongestNap);
  const Clock::time_point began_;
  Looks looks_;
};

// There are two phases. After the first all ranks are present, so that segments can be mapped. After the
// second all segments are mapped, so that the first call need not map them. `usable`: whether this rank may
// have memory of pairs in its arena.
void map_all(const GroupInit& b, Group& g, SingleCopy single_copy, bool may_pull, bool usable) {
  if (!g.one_process) {
    usable &= arena_of(b.context).ensure_segment();
    host_peers_of(b.context).show_segments();
    g.mine().segments.store(arena_of(b.context).segment_count(), std::memory_order_seq_cst);
  }
  if (memory_nodes() > 1) g.control.touch(b.rank);
  SingleCopyProbe probe(g, single_copy, may_pull);
  Assembled all(b, g);
  all.meet(1);
  g.map_news();
  for (int r = 0; r < g.size && usable; ++r)
    usable = g.one_process || r == g.rank || g.control.mapped(g.rank, r).load(std::memory_order_relaxed) > 0;
  g.mine().mapped_all.store(usable ? 1 : 0, std::memory_order_seq_cst);
  probe.look();
  all.meet(2);
  probe.settle();
  g.pairs_usable = true;
  for (int r = 0; r < g.size; ++r) g.pairs_usable &= g.of(r).mapped_all.load(std::memory_order_seq_cst) == 1;
}

// Returns the infos that all ranks have published, and adds the ranks' usable cores to `cores`. Throws if a
// rank has another setting of WEFT_SINGLE_COPY.
std::vector<BootstrapInfo> read_infos(const GroupInit& b, const std::vector<std::string>& texts,
                                      SingleCopy single_copy, CpuShare& cores) {
  std::vector<BootstrapInfo> infos;
  for (int r = 0; r < b.size; ++r) {
    try {
      infos.push_back(BootstrapInfo::decode(texts[static_cast<std::size_t>(r)]));
    } catch (const Error& e) {
      throw Error(
          Failure{.code = e.code(),
                  .text = fmt::format("group \"{}\": rank {}: {} [rank {}]", b.name, r, e.what(), b.rank),
                  .ranks = {r}});
    }
    if (infos.back().single_copy != single_copy) {
      throw Error(
          Failure{.code = ErrorCode::mismatch,
                  .text = fmt::format("group \"{}\": rank {} has WEFT_SINGLE_COPY={}, rank {} has {}", b.name,
                                      r, name(infos.back().single_copy), b.rank, name(single_copy)),
                  .ranks = {r, b.rank}});
    }
    cores |= infos.back().cores;
  }
  return infos;
}

}  // namespace

Group init_group(const GroupInit& b) {
  const auto began = Clock::now();
  Group g(b.context);
  g.name = b.name;
  g.rank = b.rank;
  g.size = b.size;
  const TestHooks hooks = test_hooks(b);
  g.path = parse_path(hooks.path);
  g.in_chunk = hooks.in_chunk;
  if (WEFT_MUTANT("leaked_descriptor")) ::memfd_create("lost", 0);
  HostPeers& host_peers = host_peers_of(b.context);
  const SingleCopySetting setting = single_copy_setting();
  const SingleCopy single_copy = single_copy_of(setting);
  // Done before the other ranks know this rank.
  const int region = b.size > 1 && b.rank == 0 ? host_peers.next_region_number() : 0;
  if (b.size > 1 && b.rank == 0) g.region = offer_region(b, region_name(b, region), Control::bytes(b.size));
  const std::vector<std::string> texts =
      join(b, "shm",
           BootstrapInfo{host_peers.doorbell_number(b.process_rank), single_copy, region, CpuShare::usable(),
                         host_peers.self()}
               .encode(),
           layout());
  CpuShare cores = CpuShare::usable();
  const std::vector<BootstrapInfo> infos = read_infos(b, texts, single_copy, cores);
  g.ask_again.resize(static_cast<std::size_t>(b.size));
  meet_processes(b, g, infos);
  g.oversubscribed = b.ranks_here > cores.count();

  if (b.size == 1) {
    g.region = private_region(Control::bytes(1));
    g.control = Control(g.region->data, 1);
    g.pairs_usable = true;
    return g;
  }
  const std::string name = region_name(b, infos[0].region);
  if (b.rank != 0) g.region = open_region(b, *g.processes[0], name, Control::bytes(b.size), began);
  g.control = Control(g.region->data, b.size);
  try {
    map_all(b, g, single_copy, setting != SingleCopySetting::off, !hooks.no_pair_memory);
    if (!g.pairs_usable) {
      const std::size_t bytes =
          static_cast<std::size_t>(b.size) * static_cast<std::size_t>(b.size) * sizeof(Pair);
      g.all_pairs = b.rank == 0 ? offer_region(b, name + "~pairs", bytes)
                                : open_region(b, *g.processes[0], name + "~pairs", bytes, began);
    }
  } catch (const Error& e) {
    const Error told = give_up(b, e);
    raise(g, reason_of(b, told));
    Doorbell(&g.control.assembly().news).ring();
    throw told;
  }
  withdraw(b, "shm");
  return g;
}

}  // namespace weft::shm
