#include "backends/shm/single_copy.hpp"

#include <fmt/format.h>
#include <sys/uio.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <thread>

#include "weft/base/env.hpp"
#include "weft/base/log.hpp"

namespace weft::shm {
namespace {

constexpr auto kAliveFor = std::chrono::milliseconds(1);  // how long a look at a pidfd holds
constexpr auto kDeathPatience =
    std::chrono::milliseconds(100);  // a process loses its memory before its pidfd says so

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

// Said once per Context.
struct Refusal {
  explicit Refusal(Context&) {}
  std::atomic<bool> told{false};
};

// RankBlock::single: how a rank's look went.
constexpr std::uint32_t kPermitted = 1, kRefused = 2;  // kRefused + errno, the peer's rank above

}  // namespace

SingleCopy single_copy_setting() {
  const std::string text = env::get("WEFT_SINGLE_COPY").value_or("off");
  if (text == "off") return SingleCopy::off;
  if (text == "push") return SingleCopy::push;
  throw Error(ErrorCode::bad_argument, fmt::format("WEFT_SINGLE_COPY is \"{}\"; expected off or push", text));
}

std::string_view name(SingleCopy setting) noexcept { return setting == SingleCopy::off ? "off" : "push"; }

SingleCopyProbe::SingleCopyProbe(Group& g, SingleCopy setting)
    : group_(g),
      wanted_(setting == SingleCopy::push && !g.one_process),
      words_(wanted_ ? static_cast<std::size_t>(g.size) : 0) {
  if (!wanted_) return;
  const auto address = reinterpret_cast<std::uint64_t>(words_.data());
  for (std::size_t r = 0; r < words_.size(); ++r) words_[r] = address ^ (r << 56);
  g.mine().probe.store(address, std::memory_order_seq_cst);
}

void SingleCopyProbe::look() noexcept {
  if (!wanted_) return;
  std::uint32_t result = kPermitted;
  for (int r = 0; r < group_.size && result == kPermitted; ++r) {
    const Neighbour& home = *group_.homes[static_cast<std::size_t>(r)];
    if (r == group_.rank || home.is_self()) continue;
    const int pid = home.address().pid;
    const std::uint64_t words = group_.of(r).probe.load(std::memory_order_seq_cst);
    const std::uint64_t mine = words + static_cast<std::uint64_t>(group_.rank) * sizeof(std::uint64_t);
    constexpr std::int64_t kBytes = sizeof(std::uint64_t);
    const auto attempt = [&](std::uint64_t expected) {
      std::uint64_t seen = 0;
      if (read_some(pid, mine, reinterpret_cast<std::byte*>(&seen), kBytes) != kBytes) return false;
      if (seen == expected) return true;
      errno = ESRCH;  // not the process that we mean
      return false;
    };
    const std::uint64_t before = words ^ (static_cast<std::uint64_t>(group_.rank) << 56), after = ~before;
    errno = 0;
    if (attempt(before) &&
        write_some(pid, reinterpret_cast<const std::byte*>(&after), mine, kBytes) == kBytes && attempt(after))
      continue;
    result = static_cast<std::uint32_t>(r) << 16 | (kRefused + static_cast<std::uint32_t>(errno));
  }
  group_.mine().single.store(result, std::memory_order_seq_cst);
}

void SingleCopyProbe::settle() {
  if (!wanted_) return;
  for (int r = 0; r < group_.size; ++r) {
    const std::uint32_t result = group_.of(r).single.load(std::memory_order_seq_cst);
    if (result == kPermitted) continue;
    if (!group_.context.attached<Refusal>().told.exchange(true))
      group_.context.log().write(
          LogLevel::info,
          fmt::format(
              "WEFT_SINGLE_COPY=push: the system does not let rank {} reach the memory of rank {} ({}); "
              "collectives on foreign memory copy twice [group \"{}\", rank {}]",
              r, result >> 16, system_words(static_cast<int>((result & 0xffff) - kRefused)), group_.name,
              group_.rank));
    return;
  }
  group_.single_copy = true;
}

PeerMemory::PeerMemory(const Group& g) : group_(g), seen_alive_(static_cast<std::size_t>(g.size)) {}

template <class Copy>
bool PeerMemory::copy(const OpState& s, int r, std::int64_t bytes, const char* what,
                      const Copy& copy) noexcept {
  const Neighbour& home = *group_.homes[static_cast<std::size_t>(r)];
  Clock::time_point& seen = seen_alive_[static_cast<std::size_t>(r)];
  int error = 0;
  if (const auto now = Clock::now(); now - seen > kAliveFor) {
    if (!home.alive()) error = ESRCH;
    seen = now;
  }
  // A copy may end early, at the end of a page.
  for (std::int64_t done = 0; error == 0 && done < bytes;) {
    const ssize_t got = copy(home.address().pid, done);
    if (got > 0) {
      done += got;
    } else {
      error = got < 0 ? errno : EFAULT;
    }
  }
  if (error == 0) return true;
  const auto patience = Deadline::after(kDeathPatience);
  if (error == ESRCH)
    while (home.alive() && !patience.passed()) std::this_thread::sleep_for(std::chrono::milliseconds(1));
  const bool dead = !home.alive();
  try {
    raise(group_, {.code = dead ? ErrorCode::peer_lost : ErrorCode::system,
                   .text = dead ? fmt::format("{}: rank {} (process {}) died", weft::name(s.op), r,
                                              home.address().pid)
                                : fmt::format("{}: rank {} cannot {} the memory of rank {} (process {}): {}",
                                              weft::name(s.op), group_.rank, what, r, home.address().pid,
                                              system_words(error)),
                   .op = s.op,
                   .call = s.call,
                   .ranks = {r}});
  } catch (...) {  // no memory for the words
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
  return copy(s, r, bytes, "read", [&](int pid, std::int64_t done) {
    return read_some(pid, address + static_cast<std::uint64_t>(done), to + done, bytes - done);
  });
}

bool PeerMemory::write(const OpState& s, int r, const std::byte* from, std::uint64_t address,
                       std::int64_t bytes) noexcept {
  return copy(s, r, bytes, "write", [&](int pid, std::int64_t done) {
    return write_some(pid, from + done, address + static_cast<std::uint64_t>(done), bytes - done);
  });
}

}  // namespace weft::shm
