// The system's information about a process, read from a folder like /proc.
#include "host/peers/process_state.hpp"

#include <gtest/gtest.h>
#include <signal.h>
#include <unistd.h>

#include <fstream>

#include "support/processes.hpp"
#include "support/temporary_folder.hpp"

namespace weft::process_state_test {
namespace {

using namespace std::chrono_literals;

TEST(ProcessState, IsReadFromItsStatus) {
  const test::TemporaryFolder proc;
  const auto state = [&](const std::string& status) {
    std::filesystem::create_directories(proc / "77");
    std::ofstream(proc / "77/status") << status;
    return process_state(77, proc.path().c_str());
  };
  const auto status = [](const char* letter, const char* dumps) {
    return std::string("Name:\tState:\nUmask:\t0022\nState:\t") + letter +
           "\nTgid:\t77\nSigQ:\t0/9\nCoreDumping:\t" + dumps + "\nTHP_enabled:\t1\n";
  };
  EXPECT_FALSE(state(status("S (sleeping)", "0")).stopped);
  EXPECT_FALSE(state(status("S (sleeping)", "0")).dumping);
  EXPECT_TRUE(state(status("T (stopped)", "0")).stopped);
  EXPECT_TRUE(state(status("t (tracing stop)", "0")).stopped);
  EXPECT_TRUE(state(status("D (disk sleep)", "1")).dumping);
  EXPECT_FALSE(state("Name:\tx\nState:\tR (running)\n").dumping);  // a kernel before 4.15
  for (const char* broken : {"", "State:", "\nState:\t", "\nCoreDumping:\t"}) {
    EXPECT_FALSE(state(broken).stopped) << broken;
    EXPECT_FALSE(state(broken).dumping) << broken;
  }
  EXPECT_FALSE(process_state(78, proc.path().c_str()).stopped);
}

TEST(ProcessState, SeesAStoppedProcess) {
  test::ChildProcess child = test::ChildProcess::fork([] {
    ::sleep(20);
    return 0;
  });
  child.stop();
  EXPECT_TRUE(process_state(child.pid()).stopped);
  child.resume();
  for (int i = 0; i < 1000 && process_state(child.pid()).stopped; ++i) ::usleep(1000);
  EXPECT_FALSE(process_state(child.pid()).stopped);
}

TEST(ProcessState, SeesAProcessThatHasEnded) {
  EXPECT_FALSE(has_ended(::getpid()));
  int ended = 0;
  {
    test::ChildProcess child = test::ChildProcess::fork([] {
      ::sleep(20);
      return 0;
    });
    EXPECT_FALSE(has_ended(child.pid()));
    ended = child.pid();
    ::kill(ended, SIGKILL);  // and nobody has waited for it
    for (int i = 0; i < 5000 && !has_ended(ended); ++i) ::usleep(1000);
    EXPECT_TRUE(has_ended(ended));
  }
  EXPECT_TRUE(has_ended(ended));
}

}  // namespace
}  // namespace weft::process_state_test
