// How the ranks of a group find each other: addresses through the Store, then one control region, made by
// rank 0 and opened by the others, then each other's segments.
#include <fmt/format.h>
#include <sched.h>
#include <sys/mman.h>

#include <cerrno>
#include <cstdlib>
#include <map>

#include "backends/join.hpp"
#include "backends/shm/layout.hpp"
#include "backends/shm/single_copy.hpp"
#include "backends/usable_cores.hpp"
#include "base/mutant.hpp"
#include "base/suspension.hpp"

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

// What each rank tells the others through the Store.
struct Card {
  int identity = 0;
  SingleCopy single_copy = SingleCopy::off;
  CpuShare cores;
  ProcessAddress address;

  std::string encode() const {
    return fmt::format("{} {} {} {}", identity, static_cast<int>(single_copy), cores.encode(),
                       address.encode());
  }
  static Card decode(const std::string& text) {
    Card c;
    char* end = nullptr;
    c.identity = static_cast<int>(std::strtol(text.c_str(), &end, 10));
    c.single_copy = static_cast<SingleCopy>(std::strtol(end, &end, 10));
    std::string rest = *end == ' ' ? end + 1 : end;
    const std::size_t space = std::min(rest.find(' '), rest.size());
    c.cores = CpuShare::decode(rest.substr(0, space));
    c.address = ProcessAddress::decode(rest.substr(std::min(space + 1, rest.size())));
    return c;
  }
};

// Region of a group of one: nobody else ever maps it.
RegionRef private_region(std::size_t bytes) {
  void* data =
      mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (data == MAP_FAILED) throw_errno(fmt::format("shm: {} bytes for a group of one", bytes), errno);
  return RegionRef(new Region{static_cast<std::byte*>(data), bytes}, [](const Region* r) {
    munmap(r->data, r->bytes);
    delete r;
  });
}

// A rank that waits for others elsewhere than in the store looks there now and then whether one has given up.
class Looks {
 public:
  explicit Looks(const Bringup& b) : b_(b) {}
  Deadline next() const { return next_.when() < b_.deadline.when() ? next_ : b_.deadline; }
  // Throws the first cause, if there is one and it is time to look.
  void look() {
    if (!next_.passed()) return;
    throw_first_cause(b_);
    pause_ = std::min<Duration>(2 * pause_, std::chrono::milliseconds(500));
    next_ = Deadline::after(pause_);
  }

 private:
  const Bringup& b_;
  Duration pause_ = std::chrono::milliseconds(50);
  Deadline next_ = Deadline::after(pause_);
};

// The group's memory: rank 0 offers it. It may have given up, and then never does.
RegionRef offer_or_open(const Bringup& b, Neighbour& owner, Clock::time_point began) {
  Neighbourhood& neighbourhood = b.context.neighbourhood();
  for (Looks looks(b);; looks.look()) {
    try {
      return b.rank == 0 ? neighbourhood.offer(b.token, Control::bytes(b.size))
                         : neighbourhood.open(owner, b.token, looks.next());
    } catch (const Error& e) {
      if (e.code() != ErrorCode::timeout)
        throw Error(Failure{.code = e.code(),
                            .text = fmt::format("group \"{}\": rank 0: {}", b.name, e.what()),
                            .ranks = {0}});
      if (b.deadline.passed())
        throw_absent(b, {0}, std::chrono::duration_cast<Duration>(Clock::now() - began));
    }
  }
}

}  // namespace

Group bring_up(const Bringup& b) {
  const auto began = Clock::now();
  Group g(b.context);
  g.name = b.name;
  g.rank = b.rank;
  g.size = b.size;
  g.path = parse_path(b.test.path);
  g.in_chunk = b.test.in_chunk;
  if (WEFT_MUTANT("leaked_descriptor")) ::memfd_create("lost", 0);
  Neighbourhood& neighbourhood = b.context.neighbourhood();
  const auto waited = [&] { return std::chrono::duration_cast<Duration>(Clock::now() - began); };
  const SingleCopy single_copy = single_copy_setting();
  const std::vector<std::string> cards = join(
      b, "shm", Card{b.identity, single_copy, CpuShare::usable(), neighbourhood.self()}.encode(), layout());
  std::map<std::string, NeighbourRef> by_socket;
  CpuShare cores = CpuShare::usable();
  for (int r = 0; r < b.size; ++r) {
    const Card card = Card::decode(cards[static_cast<std::size_t>(r)]);
    if (card.single_copy != single_copy) {
      throw Error(Failure{.code = ErrorCode::mismatch,
                          .text = fmt::format("group \"{}\": rank {} has WEFT_SINGLE_COPY={}, rank {} has {}",
                                              b.name, r, name(card.single_copy), b.rank, name(single_copy)),
                          .ranks = {r, b.rank}});
    }
    cores |= card.cores;
    NeighbourRef& home = by_socket[card.address.socket];
    try {
      if (!home) home = neighbourhood.meet(card.address, b.deadline);
    } catch (const Error& e) {
      throw Error(Failure{.code = e.code(),
                          .text = fmt::format("group \"{}\": rank {}: {}", b.name, r, e.what()),
                          .ranks = {r}});
    }
    if (!home->is_self()) g.one_process = false;
    g.homes.push_back(home);
    g.bells.push_back(home->bell(card.identity));
  }
  g.crowded = b.ranks_here > cores.count();

  if (b.size == 1) {
    g.region = private_region(Control::bytes(1));
    g.control = Control(g.region->data, 1);
    return g;
  }
  g.region = offer_or_open(b, *g.homes[0], began);
  g.control = Control(g.region->data, b.size);

  // Two phases: all present, so that segments can be asked for; all mapped, so that the first call finds it
  // done.
  const auto meet = [&](std::uint32_t phase) {
    g.mine().joined.store(phase, std::memory_order_seq_cst);
    Looks looks(b);
    for (int spins = 0;; ++spins) {
      std::vector<int> missing;
      for (int r = 0; r < b.size; ++r)
        if (g.of(r).joined.load(std::memory_order_seq_cst) < phase) missing.push_back(r);
      if (missing.empty()) return;
      if (b.deadline.passed()) throw_absent(b, missing, waited());
      if (const std::vector<int> dead = dead_ranks(g); !dead.empty()) {
        throw Error(Failure{
            .code = ErrorCode::peer_lost,
            .text = fmt::format("group \"{}\": rank {} died while the group was made", b.name, dead[0]),
            .ranks = dead});
      }
      if (spins < 100) {
        sched_yield();
      } else {
        looks.look();
        sleep_noticing(std::chrono::microseconds(spins < 1000 ? 100 : 2000));
      }
    }
  };
  if (!g.one_process) {
    b.context.arena().ensure_segment();
    g.mine().segments.store(b.context.arena().segment_count(), std::memory_order_seq_cst);
  }
  if (memory_nodes() > 1) g.control.touch(b.rank);
  SingleCopyProbe probe(g, single_copy);
  meet(1);
  g.map_news();
  probe.look();
  meet(2);
  probe.settle();
  withdraw(b, "shm");
  return g;
}

}  // namespace weft::shm
