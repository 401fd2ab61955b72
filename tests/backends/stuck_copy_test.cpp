// A rank whose kernel waits for a page of a peer's memory, in the middle of a single copy, holds the group
// meanwhile. What other threads of that rank do with the group does not wait for it.
#include <fcntl.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <linux/userfaultfd.h>
#include <poll.h>
#include <sys/ioctl.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cerrno>
#include <cstring>
#include <thread>

#include "support/run_ranks.hpp"
#include "support/sanitizers.hpp"
#include "support/values.hpp"

namespace weft::test::stuck_copy_test {
namespace {

using namespace std::chrono_literals;
using testing::HasSubstr;

constexpr std::size_t kBytes = 1 << 20, kPage = 4096;

// Memory whose pages, but for the first and the last, do not come before it is told so: as those of a file on
// a server that does not answer.
class SlowMemory {
 public:
  SlowMemory() : fault_(static_cast<int>(::syscall(SYS_userfaultfd, O_CLOEXEC | O_NONBLOCK))) {
    uffdio_api api{.api = UFFD_API, .features = 0, .ioctls = 0};
    if (fault_ < 0 || ::ioctl(fault_, UFFDIO_API, &api) != 0) return;
    void* const data = ::mmap(nullptr, kBytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (data == MAP_FAILED) return;
    ::madvise(data, kBytes, MADV_NOHUGEPAGE);
    auto* const bytes = static_cast<char*>(data);
    bytes[0] = bytes[kBytes - 1] = 0;
    uffdio_register range{.range = middle(bytes), .mode = UFFDIO_REGISTER_MODE_MISSING, .ioctls = 0};
    if (::ioctl(fault_, UFFDIO_REGISTER, &range) == 0) data_ = bytes;
  }
  ~SlowMemory() {
    if (fault_ >= 0) ::close(fault_);  // then all pages come
    if (data_ != nullptr) ::munmap(data_, kBytes);
  }
  SlowMemory(const SlowMemory&) = delete;
  SlowMemory& operator=(const SlowMemory&) = delete;

  bool there() const { return data_ != nullptr; }
  float* data() { return reinterpret_cast<float*>(data_); }
  bool somebody_waits(Duration limit) const {
    pollfd p{.fd = fault_, .events = POLLIN, .revents = 0};
    const auto ms = std::chrono::duration_cast<std::chrono::milliseconds>(limit).count();
    return ::poll(&p, 1, static_cast<int>(ms)) == 1;
  }
  void let_come() {
    uffdio_zeropage zeros{.range = middle(data_), .mode = 0, .zeropage = 0};
    EXPECT_EQ(::ioctl(fault_, UFFDIO_ZEROPAGE, &zeros), 0) << std::strerror(errno);
  }

 private:
  static uffdio_range middle(char* data) {
    return {.start = reinterpret_cast<std::uint64_t>(data + kPage), .len = kBytes - 2 * kPage};
  }
  int fault_;
  char* data_ = nullptr;
};

bool possible() {
  return run_in_child([] { return SlowMemory().there() ? 0 : 1; }).ok();
}

// Rank 1 sends what does not come; rank 0 receives it on a thread of its own, and does `meanwhile` once that
// one is stuck. `after`: when it has come.
void stuck(const std::function<void(Rank&, ProcessGroup&)>& meanwhile,
           const std::function<void(Rank&, ProcessGroup&, const std::string& said)>& after) {
  run_ranks(Ranks::processes, 2, [&](Rank& r) {
    ProcessGroup group = ProcessGroup::create(r.context, "shm", r.membership("g"));
    constexpr std::int64_t kCount = kBytes / sizeof(float);
    if (r.rank == 1) {
      SlowMemory slow;
      ASSERT_TRUE(slow.there());
      Work sent = group.send(view(slow.data(), kCount), 0);
      std::jthread pages([&] {
        EXPECT_TRUE(slow.somebody_waits(20s));
        r.store->set("stuck", "1");
        r.store->get("resolve", Deadline::after(20s));
        slow.let_come();
      });
      const std::string said = error_text([&] { sent.wait(); });
      pages.join();
      after(r, group, said);
      return;
    }
    std::vector<float> out(kCount, 1.0f);
    Work received = group.recv(view(out), 1);
    std::string said;
    std::jthread receiver([&] { said = error_text([&] { received.wait(); }); });
    r.store->get("stuck", Deadline::after(20s));
    meanwhile(r, group);
    r.store->set("resolve", "1");
    receiver.join();
    after(r, group, said);
  });
}

class StuckCopy : public testing::Test {
 protected:
  void SetUp() override {
    ::setenv("WEFT_SINGLE_COPY", "pull", 1);  // what auto means depends on the processor
    if (!kProcesses) GTEST_SKIP() << "no processes under this sanitizer";
    if (!possible()) GTEST_SKIP() << "no userfaultfd here: " << std::strerror(errno);
  }
  void TearDown() override { ::unsetenv("WEFT_SINGLE_COPY"); }
};

TEST_F(StuckCopy, DoesNotHoldUpAnAbort) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        group.abort("enough");
        EXPECT_LT(Clock::now() - began, 2s);
        EXPECT_THAT(error_text([&] { group.barrier().wait(); }), HasSubstr("aborted by rank 0: enough"));
        EXPECT_FALSE(group.quiesce(20ms)) << "the stuck thread still writes here";
        EXPECT_LT(Clock::now() - began, 5s);
      },
      [](Rank& r, ProcessGroup& group, const std::string& said) {
        EXPECT_THAT(said, HasSubstr("aborted by rank 0: enough"));
        if (r.rank == 0) {
          EXPECT_TRUE(group.quiesce(5s));
        }
      });
}

// The group ends when the stuck thread has come back.
TEST_F(StuckCopy, DoesNotHoldUpADestructor) {
  stuck(
      [](Rank&, ProcessGroup& group) {
        const auto began = Clock::now();
        group = ProcessGroup();
        EXPECT_LT(Clock::now() - began, 8s);
      },
      [](Rank& r, ProcessGroup& group, const std::string& said) {
        EXPECT_EQ(said, "no error");
        if (r.rank == 1) {
          EXPECT_THAT(error_text([&] { group.barrier().wait(); }), HasSubstr("rank 0 left the group"));
        }
      });
}

}  // namespace
}  // namespace weft::test::stuck_copy_test
