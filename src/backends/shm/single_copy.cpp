#include "backends/shm/single_copy.hpp"

#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cerrno>

#include "base/shared_words.hpp"
#include "reduce/staging.hpp"
#include "weft/base/log.hpp"

namespace weft::shm {
namespace {

constexpr auto kAliveFor = std::chrono::milliseconds(1);  // how long the result of a look at a pidfd is valid

iovec piece(std::uint64_t address, std::int64_t bytes) noexcept {
  return {reinterpret_cast<void*>(address), static_cast<std::size_t>(bytes)};
}
ssize_t read_some(int pid, std::uint64_t from, std::byte* to, std::int64_t bytes) noexcept {
  const iovec here = piece(reinterpret_cast<std::uint64_t>(to), bytes), there = piece(from, bytes);
  return ::process_vm_readv(pid, &here, 1, &there, 1, 0);
}
ssize_t write_some(int pid, const std::byte* from, std::uint64_t to, std::int64_t bytes) noexcept {
  const iovec here = piece(reinterpret_cast<std::uint64_t>(from), bytes), there = piece(to, bytes);
  return ::process_vm_writev(pid, &here, 1, &there, 1, 0);
}

// The refusal is logged once per Context.
struct Refusal {
  explicit Refusal(Context&) {}
  std::atomic<bool> told{false};
};

// Makes RankBlock::single, the result of a rank's look(): the single copies that it may use and, if these are
// fewer than in the setting, the errno and the peer.
std::uint32_t encode(SingleCopy may, int error, int peer) noexcept {
  return (static_cast<std::uint32_t>(may) + 1) | static_cast<std::uint32_t>(error) << 4 |
         static_cast<std::uint32_t>(peer) << 16;
}
SingleCopy permitted(std::uint32_t look) noexcept { return static_cast<SingleCopy>((look & 15) - 1); }

}  // namespace

SingleCopy single_copy_of(SingleCopySetting setting) {
  switch (setting) {
    case SingleCopySetting::automatic:
      return staging_beats_kernel_copies() ? SingleCopy::off : SingleCopy::pull;
    case SingleCopySetting::off: return SingleCopy::off;
    case SingleCopySetting::pull: return SingleCopy::pull;
    case SingleCopySetting::push: return SingleCopy::push;
  }
  return {};
}

std::string_view name(SingleCopy setting) noexcept {
  switch (setting) {
    case SingleCopy::off: return "off";
    case SingleCopy::pull: return "pull";
    case SingleCopy::push: return "push";
  }
  return {};
}

SingleCopyProbe::SingleCopyProbe(Group& g, SingleCopy calls, bool may_pull)
    : group_(g),
      calls_(calls),
      requested_(may_pull ? std::max(calls, SingleCopy::pull) : SingleCopy::off),
      words_(static_cast<std::size_t>(g.one_process ? 0 : g.size)) {
  if (g.one_process) return;
  const auto address = reinterpret_cast<std::uint64_t>(words_.data());
  for (std::size_t r = 0; r < words_.size(); ++r) words_[r] = address ^ (r << 56);
  g.mine().probe.store(address, std::memory_order_seq_cst);
}

void SingleCopyProbe::look() noexcept {
  if (group_.one_process) return;
  SingleCopy may = requested_;
  int error = 0, peer = 0;
  for (int r = 0; r < group_.size && may != SingleCopy::off; ++r) {
    const PeerProcess& process = *group_.processes[static_cast<std::size_t>(r)];
    if (r == group_.rank || process.is_self()) continue;
    const int pid = process.address().pid;
    const std::uint64_t words = group_.of(r).probe.load(std::memory_order_seq_cst);
    const std::uint64_t mine = words + static_cast<std::uint64_t>(group_.rank) * sizeof(std::uint64_t);
    constexpr std::int64_t kBytes = sizeof(std::uint64_t);
    const auto reads = [&](std::uint64_t expected) {
      std::uint64_t seen = 0;
      if (read_some(pid, mine, reinterpret_cast<std::byte*>(&seen), kBytes) != kBytes) return false;
      if (seen == expected) return true;
      errno = ESRCH;  // the number belongs to another process
      return false;
    };
    const std::uint64_t before = words ^ (static_cast<std::uint64_t>(group_.rank) << 56), after = ~before;
    const auto refused = [&](SingleCopy left) {
      error = errno;
      peer = r;
      may = left;
    };
    if (!reads(before)) {
      refused(SingleCopy::off);
    } else if (may == SingleCopy::push &&
               (write_some(pid, reinterpret_cast<const std::byte*>(&after), mine, kBytes) != kBytes ||
                !reads(after))) {
      refused(SingleCopy::pull);
    }
  }
  group_.mine().single.store(encode(may, error, peer), std::memory_order_seq_cst);
}

void SingleCopyProbe::settle() {
  if (group_.one_process) return;
  int least = 0;
  std::uint32_t said = group_.of(0).single.load(std::memory_order_seq_cst);
  for (int r = 1; r < group_.size; ++r) {
    const std::uint32_t theirs = group_.of(r).single.load(std::memory_order_seq_cst);
    if (permitted(theirs) >= permitted(said)) continue;
    said = theirs;
    least = r;
  }
  if (permitted(said) > requested_)
    throw Error(damaged(least, "the result of its check of the others' memory", said & 15,
                        fmt::format("1 to {}", static_cast<int>(requested_) + 1)));
  group_.single_copy = std::min(calls_, permitted(said));
  group_.may_pull = permitted(said) >= SingleCopy::pull;
  if (group_.single_copy == calls_ || group_.context.attached<Refusal>().told.exchange(true)) return;
  const bool reads = group_.single_copy == SingleCopy::off;
  group_.context.log().write(
      LogLayer::backends, LogLevel::info,
      fmt::format(
          "WEFT_SINGLE_COPY={}: the system does not let rank {} {} the memory of rank {} ({}); {} foreign "
          "memory copy twice [group \"{}\", rank {}]",
          name(calls_), least, reads ? "read" : "write", said >> 16,
          system_words(static_cast<int>((said >> 4) & 0xfff)),
          reads ? "calls on" : "all_reduce and reduce of", group_.name, group_.rank));
}

bool OwnMemory::copyable(const std::byte* data, std::size_t bytes) noexcept {
  const std::byte* const end = data + bytes;
  for (const Range& r : known_)
    if (data >= r.from && end <= r.to) return true;
  if (!kernel_copies_from(data, bytes)) return false;
  known_[oldest_++ % known_.size()] = {data, end};
  return true;
}

PeerMemory::PeerMemory(const Group& g, std::int64_t most)
    : group_(g), pace_(most), seen_alive_(static_cast<std::size_t>(g.size)) {}

// Returns 0, or ESRCH if the process of rank r has ended.
int PeerMemory::look(int r) noexcept {
  Clock::time_point& seen = seen_alive_[static_cast<std::size_t>(r)];
  const auto now = Clock::now();
  if (now - seen <= kAliveFor) return 0;
  seen = now;
  return group_.processes[static_cast<std::size_t>(r)]->alive() ? 0 : ESRCH;
}

template <class Copy>
bool PeerMemory::copy(const OpState& s, int r, std::int64_t bytes, bool writes, const Copy& copy) noexcept {
  const PeerProcess& process = *group_.processes[static_cast<std::size_t>(r)];
  int error = writes ? look(r) : 0;
  // A copy may end early, at the end of a page.
  for (std::int64_t done = 0; error == 0 && done < bytes;) {
    if (done > 0 && group_.aborted()) return false;
    const ssize_t got =
        pace_.timed([&] { return copy(process.address().pid, done, std::min(bytes - done, pace_.bytes())); });
    if (got > 0) {
      done += got;
    } else {
      error = got < 0 ? errno : EFAULT;
    }
  }
  if (error == 0 && !writes) error = look(r);
  if (error == 0) return true;
  const bool dead = error == ESRCH ? ends_now(process) : !process.alive();
  try {
    raise(group_, {.code = dead ? ErrorCode::peer_lost : ErrorCode::system,
                   .text = dead ? fmt::format("{}: rank {} (process {}) died", weft::name(s.op), r,
                                              process.address().pid)
                                : fmt::format("{}: rank {} cannot {} the memory of rank {} (process {}): {}; "
                                              "WEFT_SINGLE_COPY=off avoids this",
                                              weft::name(s.op), group_.rank, writes ? "write" : "read", r,
                                              process.address().pid, system_words(error)),
                   .op = s.op,
                   .call = s.call,
                   .ranks = {r}});
  } catch (...) {  // no memory for the text
    raise(group_, {.code = dead ? ErrorCode::peer_lost : ErrorCode::system,
                   .text = {},
                   .op = s.op,
                   .call = s.call,
                   .ranks = {}});
  }
  return false;
}

bool PeerMemory::read(const OpState& s, int r, std::uint64_t address, std::byte* to,
                      std::int64_t bytes) noexcept {
  return copy(s, r, bytes, false, [&](int pid, std::int64_t done, std::int64_t some) {
    return read_some(pid, address + static_cast<std::uint64_t>(done), to + done, some);
  });
}

bool PeerMemory::read(const OpState& s, int r, const Pieces& there, const Pieces& here, std::int64_t from,
                      std::int64_t bytes) noexcept {
  return copy(s, r, bytes, false, [&](int pid, std::int64_t done, std::int64_t some) {
    const PieceList theirs(there, from + done, some), ours(here, from + done, some);
    return ::process_vm_readv(pid, ours.data(), ours.size(), theirs.data(), theirs.size(), 0);
  });
}

bool PeerMemory::write(const OpState& s, int r, const std::byte* from, std::uint64_t address,
                       std::int64_t bytes) noexcept {
  return copy(s, r, bytes, true, [&](int pid, std::int64_t done, std::int64_t some) {
    return write_some(pid, from + done, address + static_cast<std::uint64_t>(done), some);
  });
}

}  // namespace weft::shm
