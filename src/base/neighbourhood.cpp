#include "base/neighbourhood.hpp"

#include <fmt/format.h>
#include <linux/futex.h>
#include <sys/random.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <cerrno>
#include <climits>
#include <cstring>
#include <ctime>
#include <fstream>

#include "base/arena.hpp"
#include "base/memfd.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"

namespace weft {
namespace {

constexpr std::size_t kLineBytes = 64;  // one bell a cache line
constexpr std::size_t kBellsBytes = kLineBytes * Neighbourhood::kMaxIdentities;

std::string random_name() {
  std::array<unsigned char, 16> bytes{};
  if (::getrandom(bytes.data(), bytes.size(), 0) != static_cast<ssize_t>(bytes.size()))
    throw_errno("neighbourhood: no random bytes for the socket's name", errno);
  std::string text = "weft-";
  for (const unsigned char b : bytes) text += fmt::format("{:02x}", b);
  return text;
}

// The inode of a namespace of this process, or nothing.
std::string namespace_of(const char* path) {
  std::array<char, 64> target{};
  const ssize_t n = ::readlink(path, target.data(), target.size());
  return n > 0 ? std::string(target.data(), static_cast<std::size_t>(n)) : std::string();
}

// Processes with equal text can reach each other's sockets and watch each other's pids. Where the system does
// not tell, the text is random: then nobody else is a neighbour.
std::string this_host() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  const std::string pids = namespace_of("/proc/self/ns/pid"), network = namespace_of("/proc/self/ns/net");
  if (boot.empty() || pids.empty() || network.empty()) return random_name();
  return fmt::format("{}/{}/{}", boot, pids, network);
}

Bell bell_in(std::byte* bells, int identity) {
  if (bells == nullptr || identity < 0 || identity >= Neighbourhood::kMaxIdentities) return {};
  return Bell(
      reinterpret_cast<std::atomic<std::uint32_t>*>(bells + kLineBytes * static_cast<std::size_t>(identity)));
}

}  // namespace

void Bell::ring() const noexcept {
  word_->fetch_add(1, std::memory_order_seq_cst);
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAKE, INT_MAX, nullptr, nullptr, 0);
}

void Bell::sleep(std::uint32_t seen, Duration limit) const noexcept {
  if (limit <= Duration::zero()) return;
  const auto seconds = std::chrono::duration_cast<std::chrono::seconds>(limit);
  timespec time{};
  time.tv_sec = static_cast<std::time_t>(seconds.count());
  time.tv_nsec = static_cast<long>((limit - seconds).count());
  ::syscall(SYS_futex, reinterpret_cast<std::uint32_t*>(word_), FUTEX_WAIT, seen, &time, nullptr, 0);
}

struct Neighbourhood::Impl {
  Impl(Logger& l, Arena& a)
      : log(l),
        arena(a),
        self{.host = this_host(),
             .socket = random_name(),
             .user = static_cast<std::uint32_t>(::geteuid()),
             .pid = static_cast<std::int32_t>(::getpid())} {
    bells_memfd = make_memfd("weft-bells", kBellsBytes);
    bells = SharedMapping::map(bells_memfd.get(), kBellsBytes);
    if (!bells)
      throw_errno(fmt::format("neighbourhood: {} bytes for the ranks' bells cannot be had", kBellsBytes),
                  errno);
  }
  Logger& log;
  Arena& arena;
  const ProcessAddress self;
  Descriptor bells_memfd;
  SharedMapping bells;
};

Neighbourhood::Neighbourhood(Logger& log, Arena& arena) : impl_(std::make_unique<Impl>(log, arena)) {}
Neighbourhood::~Neighbourhood() = default;

const ProcessAddress& Neighbourhood::self() const noexcept { return impl_->self; }

Bell Neighbourhood::own_bell(int identity) noexcept { return bell_in(impl_->bells.data(), identity); }

}  // namespace weft
