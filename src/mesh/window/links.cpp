#include "mesh/window/links.hpp"

#include <sched.h>

#include <cstring>
#include <string>

#include "group/user_numbers.hpp"
#include "host/arena.hpp"
#include "host/progress_engine.hpp"
#include "weft/base/env.hpp"
#include "weft/base/error.hpp"
#include "weft/base/view.hpp"
#include "weft/host/context.hpp"

namespace weft::windows {
namespace {

// Makes this rank's earlier stores visible to others before its later loads.
void full_fence() noexcept {
#if defined(__x86_64__)
  asm volatile("lock; orl $0, (%%rsp)" : : : "memory", "cc");  // faster than mfence
#else
  std::atomic_thread_fence(std::memory_order_seq_cst);
#endif
}

// What a rank tells the others about itself.
struct Introduction {
  std::uint64_t usable;
  std::uint64_t word;  // its own address
  char address[448];
  char region[56];  // rank 0: the name under which it offers the links
};

bool put(char* to, std::size_t room, const std::string& text) {
  if (text.size() >= room) return false;
  std::memcpy(to, text.c_str(), text.size() + 1);
  return true;
}

constexpr int kEagerLooks = 32;  // without a pause between them: most exchanges end here
constexpr auto kPatience = std::chrono::seconds(10);

// The processes of all ranks and the memory of the links; throws where they cannot be had.
RegionRef meet(HostPeers& host, const std::vector<Introduction>& all, int rank, const RegionRef& offered,
               std::vector<PeerProcessRef>& processes, std::vector<bool>& readable) {
  const Deadline deadline = Deadline::after(kPatience);
  const bool allowed = KernelReads::allowed();
  for (const Introduction& i : all) {
    if (i.usable == 0) throw Error(ErrorCode::unsupported, "window: a rank cannot share memory");
    processes.push_back(host.meet(ProcessAddress::decode(i.address), deadline));
    PeerProcess& process = *processes.back();
    readable.push_back(allowed && !process.is_self() && KernelReads::finds(process, i.word, i.word));
  }
  return rank == 0 ? offered : host.open(*processes[0], all[0].region, deadline);
}

std::shared_ptr<Links> make(ProcessGroup& group) {
  if (group.backend() != "shm") return nullptr;
  // Off where it is not set, unlike other switches.
  std::int32_t wanted = env::get("WEFT_WINDOW_LINKS") && env::is_on("WEFT_WINDOW_LINKS") ? 1 : 0;
  group.all_reduce(view(&wanted, 1), view(&wanted, 1), {.op = ReduceOp::min}).wait();
  if (wanted == 0) return nullptr;
  const int n = group.size();
  Context& context = group.context();
  HostPeers& host = context.host_peers();
  Introduction mine{};
  mine.usable = 1;
  mine.word = reinterpret_cast<std::uint64_t>(&mine.word);
  RegionRef region;
  try {
    const std::string name = "weft-windows-" + random_socket_name();
    mine.usable &= put(mine.region, sizeof(mine.region), name) ? 1U : 0U;
    mine.usable &= put(mine.address, sizeof(mine.address), host.self().encode()) ? 1U : 0U;
    if (group.rank() == 0)
      region =
          host.offer(mine.region, static_cast<std::size_t>(n) * static_cast<std::size_t>(n) * sizeof(Link));
    context.arena().ensure_segment();
    host.show_segments();
  } catch (const Error&) {
    mine.usable = 0;
  }
  std::vector<Introduction> all(static_cast<std::size_t>(n));
  constexpr auto kBytes = static_cast<std::int64_t>(sizeof(Introduction));
  group
      .all_gather(view(reinterpret_cast<const std::uint8_t*>(&mine), kBytes),
                  view(reinterpret_cast<std::uint8_t*>(all.data()), kBytes * n))
      .wait();
  std::vector<PeerProcessRef> processes;
  std::vector<bool> readable;
  std::uint8_t met = 1;
  try {
    region = meet(host, all, group.rank(), region, processes, readable);
  } catch (const Error& e) {
    met = 0;
    context.log().write(LogLayer::group, LogLevel::info,
                        std::string("windows are exchanged by messages: ") + e.what());
  }
  std::vector<std::uint8_t> have(static_cast<std::size_t>(n));
  group.all_gather(view(&met, 1), view(have)).wait();
  for (const std::uint8_t h : have)
    if (h == 0) return nullptr;
  return std::make_shared<Links>(group, std::move(region), std::move(processes), readable);
}

struct Kept {
  std::shared_ptr<Links> links;
};

}  // namespace

std::shared_ptr<Links> Links::of(ProcessGroup& group) {
  return group.users()->kept<Kept>([&] { return std::make_shared<Kept>(Kept{make(group)}); })->links;
}

Links::Links(ProcessGroup& group, RegionRef region, std::vector<PeerProcessRef> processes,
             const std::vector<bool>& readable)
    : group_(&group),
      region_(std::move(region)),
      processes_(std::move(processes)),
      spins_(group.traits().spin),
      rank_(group.rank()) {
  const auto n = static_cast<std::size_t>(group.size()), me = static_cast<std::size_t>(rank_);
  auto* const links = reinterpret_cast<Link*>(region_->data);
  for (auto& ends : ends_) ends.resize(n);
  for (std::size_t r = 0; r < n; ++r) {
    ends_[0][r].link = links + me * n + r;
    ends_[1][r].link = links + r * n + me;
    if (readable[r]) ends_[1][r].link->kernel.store(1, std::memory_order_release);
    for (std::size_t side = 0; side < 2; ++side) {
      ends_[side][r].rank = static_cast<int>(r);
      ends_[side][r].sends = side == 0;
    }
  }
  touched_.reserve(2 * n);
}

bool Links::has_room(End& to) noexcept {
  if (to.next < to.room_to) return true;
  to.room_to = to.link->taken.load(std::memory_order_acquire) + kSlots;
  return to.next < to.room_to;
}

void Links::publish(End& to) {
  Slot& slot = to.link->slots[to.next % kSlots];
  slot.sequence.store(++to.next, std::memory_order_release);
  touch(to);
}

void Links::take(End& from) {
  from.link->taken.store(++from.next, std::memory_order_release);
  touch(from);
}

void Links::touch(End& end) {
  if (!end.touched) touched_.push_back(&end);
  end.touched = true;
}

void Links::answer() {
  if (touched_.empty()) return;
  full_fence();
  while (!touched_.empty()) {
    End& e = *touched_.back();
    touched_.pop_back();
    e.touched = false;
    std::atomic<std::uint64_t>& waits = e.sends ? e.link->receiver_waits : e.link->sender_waits;
    std::uint64_t wish = waits.load(std::memory_order_seq_cst);
    if (wish == 0 || wish > e.next || !waits.compare_exchange_strong(wish, 0, std::memory_order_seq_cst))
      continue;
    static constexpr std::uint8_t kToken = 1;
    group_->send(view(&kToken, 1), e.rank, {.tag = kTokenTag}).wait();
  }
}

bool Links::progress() {
  bool moved = false;
  for (std::size_t i = 0; i < active_.size(); ++i) moved |= active_[i]->step();
  if (moved) answer();
  return moved;
}

void Links::finish(LinkedSteps& x) {
  const int spins = spins_ ? kSpins : 0;
  for (int idle = 0; !x.complete();) {
    if (progress()) {
      idle = 0;
    } else if (++idle < spins) {
      if (idle > kEagerLooks) pause();
    } else if (idle < spins + kYields) {
      sched_yield();
    } else {
      // The oldest one first: those behind it may be held up by it.
      LinkedSteps* oldest = &x;
      for (LinkedSteps* a : active_)
        if (!a->complete()) {
          oldest = a;
          break;
        }
      await(oldest->wish());
      idle = 0;
    }
  }
}

// Waits for a message that says that the wish is fulfilled. Meanwhile other exchanges go on: who waits for a step of this rank must
// not wait for this message, too.
void Links::await(const LinkedSteps::Wish& wish) {
  End& end = wish.receives ? from(wish.rank) : to(wish.rank);
  std::atomic<std::uint64_t>& waits = wish.receives ? end.link->receiver_waits : end.link->sender_waits;
  const auto fulfilled = [&] {
    return wish.receives
               ? end.link->slots[(wish.value - 1) % kSlots].sequence.load(std::memory_order_seq_cst) >=
                     wish.value
               : end.link->taken.load(std::memory_order_seq_cst) >= wish.value;
  };
  waits.store(wish.value, std::memory_order_seq_cst);
  full_fence();
  if (std::uint64_t mine = wish.value;
      fulfilled() && waits.compare_exchange_strong(mine, 0, std::memory_order_seq_cst))
    return;
  std::uint8_t token = 0;
  Work message = group_->recv(view(&token, 1), wish.rank, {.tag = kTokenTag});
  try {
    while (!message.wait_for(std::chrono::milliseconds(1))) progress();
  } catch (...) {
    revoke();
    throw;
  }
}

void Links::revoke() noexcept {
  for (End& e : ends_[0]) e.link->revoked.store(1, std::memory_order_seq_cst);
}

void Links::check_revoked(int rank) {
  // An exchange of nothing, not a load: it stays behind the reads of that memory. (A fence would, too, but the thread sanitizer knows none.)
  if (from(rank).link->revoked.fetch_add(0, std::memory_order_acq_rel) == 0) return;
  group_->probe(rank, {.tag = kTokenTag});  // throws, where this rank knows why
  group_->fail({.code = ErrorCode::aborted,
                .text = "window: rank " + std::to_string(rank) + " gave up an exchange",
                .op = Op::recv,
                .ranks = {rank}});
  group_->probe(rank, {.tag = kTokenTag});
}

void Links::map(End& from, std::uint32_t segments) noexcept {
  if (segments <= from.asked) return;
  from.asked = segments;
  PeerProcess& peer = process(from.rank);
  peer.map_segments(segments, Deadline::after(std::chrono::milliseconds(100)));
  while (from.mapped < segments && peer.segment(from.mapped) != nullptr) ++from.mapped;
  from.link->mapped.store(from.mapped, std::memory_order_release);
}

}  // namespace weft::windows
