#include "base/memfd.hpp"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <sys/stat.h>
#include <sys/sysinfo.h>
#include <unistd.h>

#include <algorithm>
#include <array>
#include <atomic>
#include <cerrno>
#include <charconv>
#include <cstdio>
#include <limits>
#include <system_error>

namespace weft {
namespace {

// With these seals nobody can truncate the file while others have it mapped. An access beyond its end would
// kill them (SIGBUS).
constexpr int kSeals = F_SEAL_SHRINK | F_SEAL_GROW | F_SEAL_SEAL;

}  // namespace

Descriptor::~Descriptor() {
  if (fd_ >= 0) ::close(fd_);
}

Descriptor make_memfd(const char* name, std::size_t bytes) noexcept {
  // The kernel grants any size, and kills a process later when the pages do not fit any more. So a size
  // larger than all memory is refused here, as malloc would refuse it.
  struct sysinfo machine {};
  if (::sysinfo(&machine) == 0 &&
      bytes / machine.mem_unit > static_cast<std::size_t>(machine.totalram) + machine.totalswap) {
    errno = ENOMEM;
    return {};
  }
  // Growing a file beyond RLIMIT_FSIZE raises a signal that ends the program, so the limit is checked
  // first.
  rlimit limit{};
  if (::getrlimit(RLIMIT_FSIZE, &limit) == 0 && limit.rlim_cur != RLIM_INFINITY && bytes > limit.rlim_cur) {
    errno = EFBIG;
    return {};
  }
#ifndef MFD_NOEXEC_SEAL
#define MFD_NOEXEC_SEAL 0x0008U
#endif
  // Hardened systems refuse a memfd that could be executed. Kernels before 6.3 do not know the flag.
  constexpr unsigned kFlags = MFD_CLOEXEC | MFD_ALLOW_SEALING;
  Descriptor fd(::memfd_create(name, kFlags | MFD_NOEXEC_SEAL));
  if (!fd && errno == EINVAL) fd = Descriptor(::memfd_create(name, kFlags));
  if (fd &&
      (::ftruncate(fd.get(), static_cast<off_t>(bytes)) != 0 || ::fcntl(fd.get(), F_ADD_SEALS, kSeals) != 0))
    return {};
  return fd;
}

bool keeps_its_size(int fd) noexcept {
  const int seals = ::fcntl(fd, F_GET_SEALS);
  return seals >= 0 && (seals & F_SEAL_SHRINK) != 0;
}

std::uint64_t inode_of(int fd) noexcept {
  struct stat file {};
  return fd >= 0 && ::fstat(fd, &file) == 0 ? file.st_ino : 0;
}

Descriptor open_file_of(pid_t pid, int descriptor, std::uint64_t inode) noexcept {
  if (descriptor < 0 || inode == 0) return {};
  std::array<char, 64> path{};
  std::snprintf(path.data(), path.size(), "/proc/%d/fd/%d", static_cast<int>(pid), descriptor);
  const auto is_it = [&](const struct stat& file) {
    return S_ISREG(file.st_mode) && file.st_ino == inode && file.st_uid == ::geteuid();
  };
  // The kind is checked before the file is opened. The number may belong to a device by now, and opening a
  // device can have effects.
  struct stat file {};
  if (::stat(path.data(), &file) != 0 || !is_it(file)) return {};
  Descriptor fd(::open(path.data(), O_RDWR | O_CLOEXEC | O_NOCTTY | O_NONBLOCK));
  if (!fd || ::fstat(fd.get(), &file) != 0 || !is_it(file)) return {};
  return fd;
}

std::size_t raise_descriptor_limit(std::size_t wanted) noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_NOFILE, &limit) != 0 || limit.rlim_cur >= wanted || limit.rlim_cur == limit.rlim_max)
    return 0;
  limit.rlim_cur = std::min<rlim_t>(wanted, limit.rlim_max);
  return ::setrlimit(RLIMIT_NOFILE, &limit) == 0 ? static_cast<std::size_t>(limit.rlim_cur) : 0;
}

namespace {

// The first-level data cache of AMD's Zen cores identifies lines by a hash of bits 12 to 27 of their virtual
// address ("Take A Way", AsiaCCS 2020). Two mappings that are a multiple of 2^28 bytes apart, as the kernel
// places adjacent segments of 1 GiB, have equal hashes at equal offsets. A kernel that reads or writes both
// by turns then misses at every access (all_reduce of 512 KB in shared memory: 41 us instead of 9). So large
// mappings begin at addresses that differ in bits 21 to 27.
constexpr std::size_t kColorBytes = std::size_t{1} << 21;  // also keeps huge pages possible
constexpr std::size_t kColors = 128;

// Returns an address for a mapping of `bytes`: the begin of a reserved range, over which the caller must map.
// Returns nullptr if any address will do.
void* reserve_with_next_color(std::size_t bytes) noexcept {
  static std::atomic<std::size_t> next{0};
  if (bytes < kColorBytes) return nullptr;
  const auto page = static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  bytes = (bytes + page - 1) / page * page;
  constexpr std::size_t slack = (kColors + 1) * kColorBytes;
  void* const range =
      ::mmap(nullptr, bytes + slack, PROT_NONE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
  if (range == MAP_FAILED) return nullptr;  // a limit of the address space
  const auto from = reinterpret_cast<std::uintptr_t>(range);
  const std::uintptr_t first = (from + kColorBytes - 1) / kColorBytes;
  const std::size_t color = next.fetch_add(1, std::memory_order_relaxed) % kColors;
  const std::uintptr_t at = (first + (color + kColors - first % kColors) % kColors) * kColorBytes;
  const std::uintptr_t end = at + bytes;
  if (at > from) ::munmap(range, at - from);
  ::munmap(reinterpret_cast<void*>(end), from + bytes + slack - end);
  return reinterpret_cast<void*>(at);
}

}  // namespace

SharedMapping SharedMapping::map(int fd, std::size_t bytes) noexcept {
  void* const place = reserve_with_next_color(bytes);
  const int flags =
      MAP_SHARED | MAP_NORESERVE | (fd < 0 ? MAP_ANONYMOUS : 0) | (place != nullptr ? MAP_FIXED : 0);
  void* data = ::mmap(place, bytes, PROT_READ | PROT_WRITE, flags, fd, 0);
  if (data == MAP_FAILED && place != nullptr) {
    const int error = errno;
    ::munmap(place, bytes);
    errno = error;
  }
  SharedMapping m;
  if (data == MAP_FAILED) return m;
  mark_shared(data, bytes);
  m.data_ = static_cast<std::byte*>(data);
  m.bytes_ = bytes;
  m.process_ = ::getpid();
  return m;
}

namespace {

std::size_t address_limit() noexcept {
  rlimit limit{};
  if (::getrlimit(RLIMIT_AS, &limit) != 0 || limit.rlim_cur == RLIM_INFINITY)
    return std::numeric_limits<std::size_t>::max();
  return limit.rlim_cur;
}

}  // namespace

std::size_t addresses_left() noexcept {
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  const std::size_t limit = address_limit();
  if (limit == any) return any;
  const Descriptor file(::open("/proc/self/statm", O_RDONLY | O_CLOEXEC));
  std::array<char, 64> text{};
  if (!file || ::read(file.get(), text.data(), text.size() - 1) <= 0) return any;
  std::size_t pages = 0;
  if (std::from_chars(text.data(), text.data() + text.size(), pages).ec != std::errc()) return any;
  const std::size_t mapped = pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
  return limit > mapped ? limit - mapped : 0;
}

bool leaves_addresses(std::size_t bytes) noexcept {
  constexpr std::size_t any = std::numeric_limits<std::size_t>::max();
  const std::size_t left = addresses_left();
  return left == any || (left >= bytes && left - bytes >= address_limit() / 4);
}

SharedMapping::~SharedMapping() {
  if (data_ != nullptr && process_ == ::getpid()) ::munmap(data_, bytes_);
}

void mark_shared(void* data, std::size_t bytes) noexcept {
  ::madvise(data, bytes, MADV_DONTFORK);
  ::madvise(data, bytes, MADV_DONTDUMP);
  ::madvise(data, bytes, MADV_HUGEPAGE);
}

}  // namespace weft
