// Shared mappings: their addresses, and their remains.
#include "base/memfd.hpp"

#include <fcntl.h>
#include <gtest/gtest.h>
#include <sys/mman.h>
#include <sys/resource.h>
#include <unistd.h>

#include <cerrno>
#include <cstddef>
#include <cstdint>
#include <fstream>
#include <limits>
#include <set>
#include <vector>

#include "base/text/plain_streams.hpp"

namespace weft {
namespace {

constexpr std::size_t kBytes = std::size_t{4} << 20;

std::size_t mapped_bytes() {
  std::size_t pages = 0;
  FileIn("/proc/self/statm") >> pages;
  return pages * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

// The bits by which AMD's Zen cores distinguish lines at one offset of two mappings; the bits below 21 are
// zero.
std::uintptr_t color(const SharedMapping& m) {
  return (reinterpret_cast<std::uintptr_t>(m.data()) >> 21) & 127;
}

// A peer's access to a page beyond the end would be a SIGBUS.
TEST(SharedMappings, TheirFilesCannotBeCutShortOrGrow) {
  const Descriptor fd = make_memfd("weft-test", kBytes);
  ASSERT_TRUE(fd);
  EXPECT_TRUE(keeps_its_size(fd.get()));
  EXPECT_EQ(::ftruncate(fd.get(), 0), -1);
  EXPECT_EQ(errno, EPERM);
  EXPECT_EQ(::ftruncate(fd.get(), 2 * kBytes), -1);
  EXPECT_EQ(::fcntl(fd.get(), F_ADD_SEALS, 0), -1);
  EXPECT_EQ(::fallocate(fd.get(), FALLOC_FL_PUNCH_HOLE | FALLOC_FL_KEEP_SIZE, 0, kBytes), 0)
      << "pages are given back";
  const Descriptor plain(::memfd_create("weft-plain", MFD_CLOEXEC));
  EXPECT_FALSE(keeps_its_size(plain.get()));
}

TEST(SharedMappings, LargeOnesDifferInTheBitsByWhichACacheTellsThemApart) {
  const Descriptor fd = make_memfd("weft-test", kBytes);
  ASSERT_TRUE(fd);
  std::vector<SharedMapping> mappings;
  std::set<std::uintptr_t> colors;
  for (int i = 0; i < 100; ++i) {
    mappings.push_back(SharedMapping::map(i % 2 == 0 ? fd.get() : -1, kBytes));
    ASSERT_TRUE(mappings.back());
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(mappings.back().data()) % (std::size_t{2} << 20), 0u);
    colors.insert(color(mappings.back()));
  }
  EXPECT_EQ(colors.size(), mappings.size());
  *mappings.front().data() = std::byte{7};
  EXPECT_EQ(*mappings[2].data(), std::byte{7});
}

TEST(SharedMappings, LeaveNoAddressesBehind) {
  const Descriptor fd = make_memfd("weft-test", kBytes + 1);  // not whole pages
  ASSERT_TRUE(fd);
  const std::size_t before = mapped_bytes();
  for (int i = 0; i < 20; ++i) {
    const SharedMapping m = SharedMapping::map(fd.get(), kBytes + 1);
    ASSERT_TRUE(m);
    EXPECT_LT(mapped_bytes(), before + 2 * kBytes);
  }
  EXPECT_LT(mapped_bytes(), before + kBytes);
}

// If there is no room for the range from which the address is chosen, the system chooses it.
TEST(SharedMappings, ALimitOfAddressesIsNotExceededByTheChoice) {
  const Descriptor fd = make_memfd("weft-test", kBytes);
  ASSERT_TRUE(fd);
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &was), 0);
  rlimit tight = was;
  tight.rlim_cur = mapped_bytes() + (std::size_t{64} << 20);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const SharedMapping m = SharedMapping::map(fd.get(), kBytes);
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &was), 0);
  ASSERT_TRUE(m);
  *m.data() = std::byte{1};
}

TEST(SharedMappings, AQuarterOfALimitOfAddressesStaysFree) {
  rlimit was{};
  ASSERT_EQ(::getrlimit(RLIMIT_AS, &was), 0);
  rlimit tight = was;
  tight.rlim_cur = 4 * mapped_bytes();
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &tight), 0);
  const std::size_t mapped = tight.rlim_cur / 4, left = addresses_left();
  const bool two = leaves_addresses(left - mapped - (mapped >> 4)),
             none = leaves_addresses(left - mapped + (mapped >> 4)),
             most = leaves_addresses(std::numeric_limits<std::size_t>::max());
  ASSERT_EQ(::setrlimit(RLIMIT_AS, &was), 0);
  EXPECT_NEAR(static_cast<double>(left), static_cast<double>(3 * mapped), static_cast<double>(mapped) / 8);
  EXPECT_TRUE(two);
  EXPECT_FALSE(none);
  EXPECT_FALSE(most);
  if (was.rlim_cur == RLIM_INFINITY) {
    EXPECT_EQ(addresses_left(), std::numeric_limits<std::size_t>::max());
    EXPECT_TRUE(leaves_addresses(std::size_t{1} << 60));
  }
}

}  // namespace
}  // namespace weft
