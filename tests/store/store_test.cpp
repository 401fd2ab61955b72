// Runs one suite over every kind of store.
#include "weft/store/store.hpp"

#include <arpa/inet.h>
#include <fcntl.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <netinet/in.h>
#include <poll.h>
#include <sched.h>
#include <sys/file.h>
#include <sys/mount.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <functional>
#include <limits>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <thread>
#include <utility>
#include <vector>

#include "base/text/plain_streams.hpp"
#include "store/launcher_notice.hpp"
#include "store/tcp/address.hpp"
#include "support/errors.hpp"
#include "support/processes.hpp"
#include "support/temporary_folder.hpp"
#include "support/unauthenticated_client.hpp"
#include "weft/base/error.hpp"
#include "weft/base/log.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

namespace weft::store_test {
namespace {

using std::chrono::milliseconds;
using std::chrono::seconds;
using test::UnauthenticatedClient;
using ::testing::HasSubstr;

Deadline soon() { return Deadline::after(seconds(10)); }

template <class F>
void expect_error(ErrorCode code, const std::string& text, F&& call) {
  try {
    call();
    ADD_FAILURE() << "no error; expected: " << text;
  } catch (const Error& e) {
    EXPECT_EQ(e.code(), code);
    EXPECT_THAT(e.what(), HasSubstr(text));
  }
}

/// Makes the stores of a test: `client` is the view of one rank on the common table. Clients may be shared by
/// threads.
struct Source {
  virtual ~Source() = default;
  virtual std::shared_ptr<Store> client() = 0;
};

struct LocalSource final : Source {
  std::shared_ptr<Store> store = make_local_store();
  std::shared_ptr<Store> client() override { return store; }
};

struct TcpSource final : Source {
  Logger log;
  TcpStoreServer server{log};
  std::shared_ptr<Store> client() override { return make_tcp_store("127.0.0.1", server.port(), soon()); }
};

struct FileSource final : Source {
  test::TemporaryFolder folder;
  std::shared_ptr<Store> client() override { return make_file_store(folder / "store"); }
};

struct Kind {
  const char* name;
  std::function<std::unique_ptr<Source>()> make;
};

class StoreTest : public ::testing::TestWithParam<Kind> {
 protected:
  std::unique_ptr<Source> source_ = GetParam().make();
  std::shared_ptr<Store> store_ = source_->client();
};

TEST_P(StoreTest, GivesBackWhatWasSet) {
  const std::string bytes("a\0b\xff\n", 5);
  store_->set("key", bytes);
  store_->set("empty", "");
  EXPECT_EQ(store_->get("key", soon()), bytes);
  EXPECT_EQ(store_->get("empty", soon()), "");
  store_->set("key", "again");
  EXPECT_EQ(source_->client()->get("key", soon()), "again");
}

TEST_P(StoreTest, TryGetDoesNotWait) {
  EXPECT_FALSE(store_->try_get("absent").has_value());
  store_->set("present", "");
  EXPECT_EQ(store_->try_get("present"), "");
}

TEST_P(StoreTest, GetWaitsForASetFromElsewhere) {
  std::thread other([client = source_->client()] {
    std::this_thread::sleep_for(milliseconds(50));
    client->set("late", "value");
  });
  EXPECT_EQ(store_->get("late", soon()), "value");
  other.join();
}

TEST_P(StoreTest, AddAndCompareSetWakeWaiters) {
  std::thread other([client = source_->client()] {
    std::this_thread::sleep_for(milliseconds(30));
    client->add("counter", 7);
    client->compare_set("word", "", "new");
  });
  EXPECT_EQ(store_->get("counter", soon()), "7");
  EXPECT_EQ(store_->get("word", soon()), "new");
  other.join();
}

TEST_P(StoreTest, GetNamesTheKeyAndTheTimeAtItsDeadline) {
  const auto start = Clock::now();
  expect_error(ErrorCode::timeout, "store: key \"never\\x\" was not set within 200 ms",
               [&] { store_->get("never\\x", Deadline::after(milliseconds(200))); });
  const auto took = Clock::now() - start;
  EXPECT_GE(took, milliseconds(200));
  EXPECT_LT(took, seconds(5));
  expect_error(ErrorCode::timeout, "store: key \"never\" was not set within 1.1 s",
               [&] { store_->get("never", Deadline::after(milliseconds(1100))); });
  expect_error(ErrorCode::timeout, "was not set within 0 ms",
               [&] { store_->get("never", Deadline::at(Clock::now())); });
}

TEST_P(StoreTest, CountersAddUp) {
  EXPECT_EQ(store_->add("n", 5), 5);
  EXPECT_EQ(store_->add("n", -7), -2);
  EXPECT_EQ(store_->get("n", soon()), "-2");
  store_->set("n", std::to_string(std::numeric_limits<std::int64_t>::max()));
  expect_error(ErrorCode::bad_argument,
               "store: add: key \"n\" holds 9223372036854775807; adding 1 leaves 64 bits",
               [&] { store_->add("n", 1); });
  store_->set("n", "12x");
  expect_error(ErrorCode::bad_argument, "store: add: key \"n\" holds \"12x\"; expected a decimal counter",
               [&] { store_->add("n", 1); });
  EXPECT_EQ(store_->get("n", soon()), "12x");
}

TEST_P(StoreTest, CompareSetChangesOnlyWhatItExpects) {
  EXPECT_EQ(store_->compare_set("k", "other", "a"), "");
  EXPECT_FALSE(store_->try_get("k").has_value());
  EXPECT_EQ(store_->compare_set("k", "", "a"), "a");
  EXPECT_EQ(store_->compare_set("k", "", "b"), "a");
  EXPECT_EQ(store_->compare_set("k", "a", "b"), "b");
  EXPECT_EQ(store_->get("k", soon()), "b");
}

TEST_P(StoreTest, RemovedKeysAreAbsent) {
  store_->set("k", "v");
  store_->remove("k");
  store_->remove("k");
  EXPECT_FALSE(store_->try_get("k").has_value());
  EXPECT_EQ(store_->add("k", 1), 1);
}

TEST_P(StoreTest, RefusesKeysAndValuesBeyondTheLimits) {
  const std::string key(1024, 'k');
  const std::string value(std::size_t{1} << 20, 'v');
  store_->set(key, value);
  EXPECT_EQ(store_->get(key, soon()), value);
  EXPECT_EQ(store_->compare_set(key, value, value), value);

  expect_error(ErrorCode::bad_argument, "store: key \"\" has 0 bytes; expected 1 to 1024",
               [&] { store_->set("", "v"); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->get(key + "k", soon()); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->try_get(key + "k"); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->add(key + "k", 1); });
  expect_error(ErrorCode::bad_argument, "has 1025 bytes; expected 1 to 1024",
               [&] { store_->remove(key + "k"); });
  expect_error(ErrorCode::bad_argument,
               "store: the value for key \"x\" has 1048577 bytes; expected at most 1048576",
               [&] { store_->set("x", value + "v"); });
  expect_error(ErrorCode::bad_argument,
               "store: the value for key \"x\" has 1048577 bytes; expected at most 1048576",
               [&] { store_->compare_set("x", "", value + "v"); });
  EXPECT_FALSE(store_->try_get("x").has_value());
}

// Eight threads, half of them on one shared client: a counter loses nothing, and each finds what its
// neighbour set.
TEST_P(StoreTest, ManyThreadsAtOnce) {
  constexpr int kThreads = 8;
  constexpr int kRounds = 50;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kThreads; ++rank) {
    threads.emplace_back([&, rank] {
      const auto client = rank % 2 == 0 ? store_ : source_->client();
      for (int round = 0; round < kRounds; ++round) {
        const auto key = [&](int r) { return std::to_string(round) + "/" + std::to_string(r); };
        client->set(key(rank), std::to_string(round * kThreads + rank));
        const int next = (rank + 1) % kThreads;
        EXPECT_EQ(client->get(key(next), soon()), std::to_string(round * kThreads + next));
        client->add("total", rank);
      }
    });
  }
  for (auto& t : threads) t.join();
  EXPECT_EQ(store_->get("total", soon()), std::to_string(kRounds * kThreads * (kThreads - 1) / 2));
}

INSTANTIATE_TEST_SUITE_P(Kinds, StoreTest,
                         ::testing::Values(Kind{"local", [] { return std::make_unique<LocalSource>(); }},
                                           Kind{"tcp", [] { return std::make_unique<TcpSource>(); }},
                                           Kind{"file", [] { return std::make_unique<FileSource>(); }}),
                         [](const auto& kind) { return kind.param.name; });

// ---- what only files have ----

class FileStoreTest : public ::testing::Test {
 protected:
  std::shared_ptr<Store> open() { return make_file_store(path_); }
  void append(std::string_view bytes) { std::ofstream(path_, std::ios::app | std::ios::binary) << bytes; }
  std::string bytes() {
    FileIn in(path_, std::ios::binary);
    return {std::istreambuf_iterator<char>(in), {}};
  }

  test::TemporaryFolder folder_;
  const std::string path_ = folder_ / "store";
};

TEST_F(FileStoreTest, ProcessesMeet) {
  constexpr int kRanks = 4;
  constexpr int kRounds = 50;
  test::run_in_children(kRanks, [&](int rank) {
    const auto store = open();
    for (int round = 0; round < kRounds; ++round) {
      const auto key = [&](int r) { return fmt::format("{}/{}", round, r); };
      store->set(key(rank), std::to_string(round * kRanks + rank));
      const int next = (rank + 1) % kRanks;
      EXPECT_EQ(store->get(key(next), soon()), std::to_string(round * kRanks + next));
      store->add("total", rank);
    }
  });
  EXPECT_EQ(open()->get("total", soon()), std::to_string(kRounds * kRanks * (kRanks - 1) / 2));
}

// A writer is killed again and again in the middle of its writes. The keys that it had set exist, and no
// other process is held up.
TEST_F(FileStoreTest, AWriterThatIsKilledDoesNoHarm) {
  const auto store = open();
  const std::string large(200'000, 'x');
  for (int round = 0; round < 20; ++round) {
    test::Pipe pipe;
    auto writer = test::ChildProcess::fork([&] {
      const auto mine = open();
      for (int i = 0;; ++i) {
        mine->set("large", large);
        mine->add("steps", 1);
        if (i == 3) pipe.write_line("going");
      }
      return 0;
    });
    pipe.read_line();
    std::this_thread::sleep_for(std::chrono::microseconds(137 * round));
    writer.kill(SIGKILL);
    ASSERT_TRUE(writer.wait(seconds(10)));
    EXPECT_GE(store->add("steps", 0), 4 * (round + 1));
    EXPECT_EQ(store->get("large", soon()), large);
    EXPECT_EQ(store->add("n", 1), round + 1);
  }
  EXPECT_EQ(open()->add("n", 1), 21);
}

// The file as a writer leaves it that is killed after any byte.
TEST_F(FileStoreTest, TheBeginningOfARecordAtTheEndIsCutOff) {
  open()->set("a", "1");
  const std::string one = bytes();
  open()->set("key", "value");
  const std::string two = bytes();
  for (std::size_t cut = 0; cut < two.size(); ++cut) {
    std::filesystem::remove(path_);
    append(two.substr(0, cut));
    const auto store = open();
    EXPECT_EQ(store->try_get("a").has_value(), cut >= one.size()) << cut;
    EXPECT_FALSE(store->try_get("key").has_value()) << cut;
    store->set("b", "2");
    EXPECT_EQ(open()->get("b", soon()), "2") << cut;
  }
}

// A reader that sees half of a record waits for the rest and changes nothing.
TEST_F(FileStoreTest, AReaderLeavesHalfARecordAlone) {
  const auto reader = open();
  open()->set("key", "value");
  const std::string whole = bytes();
  const std::size_t half = whole.size() - 3;
  std::filesystem::resize_file(path_, half);
  EXPECT_FALSE(reader->try_get("key").has_value());
  EXPECT_EQ(bytes().size(), half);
  append(whole.substr(half));
  EXPECT_EQ(reader->get("key", soon()), "value");
}

TEST_F(FileStoreTest, WhatIsNoStoreIsLeftAloneAndNamed) {
  append("a letter to a friend");
  expect_error(ErrorCode::system,
               "store: " + path_ + " is not a weft store (it begins with \"a letter to a fr\")",
               [&] { open(); });
  EXPECT_EQ(bytes(), "a letter to a friend");
  expect_error(ErrorCode::system, "store: cannot open " + folder_.path().string() + ": Is a directory",
               [&] { make_file_store(folder_.path()); });
  expect_error(ErrorCode::system, "store: cannot open " + path_ + "/x: Not a directory",
               [&] { make_file_store(path_ + "/x"); });
  expect_error(ErrorCode::system, "store: /dev/null is not a regular file",
               [&] { make_file_store("/dev/null"); });
}

// The store checks the opened file, and refuses a file that others could have written or replaced.
TEST_F(FileStoreTest, OnlyAFileOfThisUsersIsTaken) {
  open()->set("a", "1");
  const std::string before = bytes();
  for (const int mode : {0620, 0602, 0666}) {
    ASSERT_EQ(::chmod(path_.c_str(), static_cast<mode_t>(mode)), 0);
    expect_error(
        ErrorCode::system,
        fmt::format("store: {} has mode {:04o}; expected one that only its owner may write, such as 0600",
                    path_, mode),
        [&] { open(); });
  }
  ASSERT_EQ(::chmod(path_.c_str(), 0644), 0);
  EXPECT_EQ(open()->try_get("a"), "1");

  const std::string link = folder_ / "link";
  ASSERT_EQ(::symlink(path_.c_str(), link.c_str()), 0);
  expect_error(ErrorCode::system, "store: " + link + " is a symbolic link; expected the file itself",
               [&] { make_file_store(link); });
  const std::string nowhere = folder_ / "nowhere";
  ASSERT_EQ(::symlink((folder_ / "made").c_str(), nowhere.c_str()), 0);
  expect_error(ErrorCode::system, "store: " + nowhere + " is a symbolic link; expected the file itself",
               [&] { make_file_store(nowhere); });
  EXPECT_FALSE(std::filesystem::exists(folder_ / "made"));

  const std::string fifo = folder_ / "fifo";
  ASSERT_EQ(::mkfifo(fifo.c_str(), 0600), 0);
  expect_error(ErrorCode::system, "store: " + fifo + " is not a regular file",
               [&] { make_file_store(fifo); });
  EXPECT_EQ(bytes(), before);
}

TEST_F(FileStoreTest, AFolderThatAnybodyMayChangeIsRefused) {
  const std::filesystem::path folder = folder_ / "open";
  std::filesystem::create_directory(folder);
  ASSERT_EQ(::chmod(folder.c_str(), 0777), 0);
  expect_error(
      ErrorCode::system,
      "store: the folder " + folder.string() +
          " has mode 0777; expected one that others may not write to, or one with the sticky bit, such as "
          "0755 or 1777",
      [&] { make_file_store(folder / "store"); });
  EXPECT_TRUE(std::filesystem::is_empty(folder));
  for (const int mode : {01777, 0775, 0700}) {
    ASSERT_EQ(::chmod(folder.c_str(), static_cast<mode_t>(mode)), 0);
    make_file_store(folder / "store")->set("a", "1");
  }
  std::filesystem::create_directory_symlink(folder, folder_ / "way");  // folders may be reached by a link
  EXPECT_EQ(make_file_store(folder_ / "way/store")->try_get("a"), "1");
}

TEST_F(FileStoreTest, AnotherUsersFileIsRefused) {
  if (::geteuid() != 0) GTEST_SKIP() << "a file cannot be given to another user here (needs root)";
  open()->set("a", "1");
  constexpr uid_t kOther = 54321;
  ASSERT_EQ(::chown(path_.c_str(), kOther, static_cast<gid_t>(-1)), 0);
  expect_error(ErrorCode::system,
               "store: " + path_ + " belongs to user 54321; expected a file of this user's, 0",
               [&] { open(); });
}

TEST_F(FileStoreTest, DamageIsNamedNotRepaired) {
  const auto store = open();
  store->set("a", "1");
  const std::size_t good = bytes().size();
  append("something else wrote this into it");
  const std::string damaged = bytes();
  const std::string text =
      fmt::format("store: {} is damaged at byte {}: no record begins there", path_, good);
  expect_error(ErrorCode::system, text, [&] { store->try_get("b"); });
  expect_error(ErrorCode::system, text, [&] { open(); });
  EXPECT_EQ(bytes(), damaged);

  std::filesystem::resize_file(path_, good);
  store->set("b", "2");
  {
    std::fstream file(path_, std::ios::in | std::ios::out | std::ios::binary);
    file.seekp(-1, std::ios::end);
    file << '3';
  }
  expect_error(
      ErrorCode::system,
      fmt::format("store: {} is damaged at byte {}: the checksum of the record there is wrong", path_, good),
      [&] { open(); });
  std::filesystem::resize_file(path_, 3);
  expect_error(ErrorCode::system, fmt::format("store: {} is damaged at byte 3: it was cut short", path_),
               [&] { store->try_get("b"); });
}

// It has no bytes on the disk, and no process has memory for them.
TEST_F(FileStoreTest, WhatMadeItLongerIsNotRead) {
  const auto store = open();
  store->set("a", "1");
  const std::size_t good = bytes().size();
  std::error_code refused;
  std::filesystem::resize_file(path_, std::uintmax_t{1} << 40, refused);
  if (refused) GTEST_SKIP() << "files of 1 TiB: " << refused.message();
  const std::string text =
      fmt::format("store: {} is damaged at byte {}: no record begins there", path_, good);
  expect_error(ErrorCode::system, text, [&] { store->try_get("b"); });
  expect_error(ErrorCode::system, text, [&] { open(); });
  std::filesystem::resize_file(path_, good);
  const std::string large(1000003, 'x');  // of several pieces, together
  for (int i = 0; i < 12; ++i) store->set(std::to_string(i), large + std::to_string(i));
  const auto other = open();
  for (int i = 0; i < 12; ++i) EXPECT_EQ(other->get(std::to_string(i), soon()), large + std::to_string(i));
}

TEST_F(FileStoreTest, ARemovedFileIsToldAtOnce) {
  const auto store = open();
  std::thread waiter([&, other = open()] {
    expect_error(ErrorCode::peer_lost, "store: the file " + path_ + " was removed",
                 [&] { other->get("waited for", soon()); });
  });
  std::this_thread::sleep_for(milliseconds(30));
  std::filesystem::remove(path_);
  waiter.join();
  expect_error(ErrorCode::peer_lost, "store: the file " + path_ + " was removed",
               [&] { store->set("a", "1"); });
}

// A file-size limit stands for a full disk: only a part of the record fits. Nothing of the record stays, and
// once there is room the store works again.
TEST_F(FileStoreTest, AFullDiskIsAnErrorThatLeavesTheFileWhole) {
  const auto result = test::run_in_child([&] {
    const auto store = open();
    store->set("a", "1");
    const std::string before = bytes();
    rlimit limit{};
    ::getrlimit(RLIMIT_FSIZE, &limit);
    const rlim_t all = std::exchange(limit.rlim_cur, before.size() + 100);
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    expect_error(ErrorCode::system, "store: cannot write key \"b\" to " + path_ + ": File too large",
                 [&] { store->set("b", std::string(1000, 'b')); });
    EXPECT_EQ(bytes(), before);
    EXPECT_FALSE(store->try_get("b").has_value());
    store->set("c", "it fits");
    limit.rlim_cur = all;
    EXPECT_EQ(::setrlimit(RLIMIT_FSIZE, &limit), 0);
    store->set("b", std::string(1000, 'b'));
    EXPECT_EQ(open()->get("c", soon()), "it fits");
    EXPECT_EQ(open()->get("b", soon()).size(), 1000u);
    return 0;
  });
  EXPECT_TRUE(result.ok()) << to_string(result);
}

TEST_F(FileStoreTest, AStoppedHolderOfTheLockIsATimeout) {
  const auto store = make_file_store(path_, milliseconds(100));
  store->set("a", "1");
  const int other = ::open(path_.c_str(), O_RDWR | O_CLOEXEC);
  ASSERT_EQ(::flock(other, LOCK_EX), 0);
  expect_error(ErrorCode::timeout,
               "store: key \"b\": another process has held the lock of " + path_ + " for 100 ms",
               [&] { store->set("b", "2"); });
  expect_error(ErrorCode::timeout, "store: opening it: another process has held the lock",
               [&] { make_file_store(path_, milliseconds(50)); });
  expect_error(ErrorCode::timeout,
               "store: opening it: another process has held the lock of " + path_ + " for 50 ms",
               [&] { make_file_store(path_, seconds(30), Deadline::after(milliseconds(50))); });
  EXPECT_EQ(store->get("a", soon()), "1") << "reading takes no lock";
  ::close(other);
  store->set("b", "2");
}

// ---- what only TCP has ----

/// A server whose warnings are kept, and one good client.
class TcpStoreTest : public ::testing::Test {
 protected:
  std::vector<std::string> warnings() {
    const std::lock_guard lock(mutex_);
    return warnings_;
  }

  std::shared_ptr<Store> client() { return make_tcp_store("localhost", server_->port(), soon()); }

  std::mutex mutex_;
  std::vector<std::string> warnings_;
  Logger log_{LogLevel::warning, [this](LogLevel, std::string_view line) {
                const std::lock_guard lock(mutex_);
                warnings_.emplace_back(line);
              }};
  std::unique_ptr<TcpStoreServer> server_ =
      std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{.max_clients = 8, .linger = milliseconds(300)});
};

/// A request header as it goes over the wire, written out by hand; then whatever follows.
std::string frame(std::uint8_t version, std::uint8_t kind, std::uint16_t key_bytes, std::uint32_t value_bytes,
                  std::uint32_t extra_bytes, std::string_view rest = {}) {
  std::string bytes = "WFTS";
  const auto put = [&](auto number) { bytes.append(reinterpret_cast<const char*>(&number), sizeof number); };
  put(version);
  put(kind);
  put(key_bytes);
  put(value_bytes);
  put(extra_bytes);
  put(std::int64_t{0});
  return bytes.append(rest);
}

TEST_F(TcpStoreTest, TheTestsOwnFramesAreAnswered) {
  UnauthenticatedClient well_behaved(server_->port());
  well_behaved.say(frame(1, 3, 3, 2, 0, "keyhi"));
  EXPECT_TRUE(well_behaved.is_answered());
  EXPECT_EQ(client()->try_get("key"), "hi");
}

// Each bad frame ends its own connection with one warning that says what was wrong. A client that waits in a
// get, and a client that continues to work, notice nothing.
TEST_F(TcpStoreTest, BadFramesEndOnlyTheirOwnConnection) {
  struct Case {
    std::string bytes;
    const char* warning;
  };
  const Case cases[] = {
      {"GET / HTTP/1.1\r\n\r\n", "it does not speak this protocol (it sent \"GET / HTTP/1.1....\")"},
      {"h", "it does not speak this protocol (it sent \"h\")"},
      {std::string(100'000, '\xff'), "it does not speak this protocol"},
      {frame(9, 1, 1, 0, 0, "k"), "it speaks version 9 of the protocol; expected 1"},
      {frame(1, 0, 1, 0, 0, "k"), "it sent a request of unknown kind 0"},
      {frame(1, 64, 1, 0, 0, "k"), "it sent a request of unknown kind 64"},
      {frame(1, 1, 0, 0, 0), "it announced a frame beyond the limits (key 0 bytes, values 0 and 0)"},
      {frame(1, 3, 1025, 0, 0), "it announced a frame beyond the limits (key 1025 bytes, values 0 and 0)"},
      {frame(1, 3, 1, 0xffffffff, 0),
       "it announced a frame beyond the limits (key 1 bytes, values 4294967295 and 0)"},
      {frame(1, 5, 1, 0, 1048577),
       "it announced a frame beyond the limits (key 1 bytes, values 0 and 1048577)"},
      {frame(1, 2, 1, 0, 0, "kWFTS"), "it sent a second request before the first was answered"},
  };
  const auto good = client();
  std::thread waiter([store = client()] { EXPECT_EQ(store->get("at the end", soon()), "yes"); });
  for (std::size_t i = 0; i < std::size(cases); ++i) {
    UnauthenticatedClient unknown(server_->port());
    unknown.say(cases[i].bytes);
    EXPECT_TRUE(unknown.is_cut_off()) << cases[i].warning;
    EXPECT_EQ(good->add("round", 1), static_cast<int>(i) + 1);
    ASSERT_EQ(warnings().size(), i + 1) << cases[i].warning;
    EXPECT_THAT(warnings()[i], HasSubstr(fmt::format("store server: closed process {}: ", ::getpid())));
    EXPECT_THAT(warnings()[i], HasSubstr(cases[i].warning));
  }
  good->set("at the end", "yes");
  waiter.join();
}

TEST_F(TcpStoreTest, HalfFramesHoldUpNobody) {
  const auto good = client();
  {
    UnauthenticatedClient in_header(server_->port());
    UnauthenticatedClient in_value(server_->port());
    in_header.say(frame(1, 3, 3, 4, 0).substr(0, 10));
    in_value.say(frame(1, 3, 3, 1000, 0, "key and half of a va"));
    EXPECT_EQ(good->add("n", 1), 1);
    EXPECT_FALSE(good->try_get("key").has_value());
  }
  while (warnings().size() < 2) EXPECT_EQ(good->add("n", 0), 1);  // bounded by ctest's time limit
  EXPECT_THAT(warnings(),
              ::testing::UnorderedElementsAre(HasSubstr("it left within a frame, after 10 bytes"),
                                              HasSubstr("it left within a frame, after 44 bytes")));
}

TEST_F(TcpStoreTest, AFrameMayComeByteByByte) {
  UnauthenticatedClient slow(server_->port());
  for (const char byte : frame(1, 3, 3, 2, 0, "keyhi")) slow.say({&byte, 1});
  EXPECT_TRUE(slow.is_answered());
  EXPECT_EQ(client()->try_get("key"), "hi");
  EXPECT_THAT(warnings(), ::testing::IsEmpty());
}

// If there is no room, the server closes connections that have sent nothing yet, the oldest first. If all
// have sent something, it closes the new one.
TEST_F(TcpStoreTest, ClientsBeyondTheLimitAreRefused) {
  const auto good = client();
  std::vector<std::unique_ptr<UnauthenticatedClient>> crowd;
  for (int i = 0; i < 7; ++i) crowd.push_back(std::make_unique<UnauthenticatedClient>(server_->port()));
  for (int i = 1; i < 7; ++i) {
    crowd[static_cast<std::size_t>(i)]->say(frame(1, 2, 1, 0, 0, "k"));
    EXPECT_TRUE(crowd[static_cast<std::size_t>(i)]->is_answered());
  }
  UnauthenticatedClient another(server_->port());
  EXPECT_TRUE(crowd[0]->is_cut_off());
  ASSERT_EQ(warnings().size(), 1u);
  EXPECT_THAT(warnings()[0], HasSubstr("there are 8 clients, and it has not joined"));
  another.say(frame(1, 2, 1, 0, 0, "k"));
  EXPECT_TRUE(another.is_answered());
  UnauthenticatedClient one_too_many(server_->port());
  EXPECT_TRUE(one_too_many.is_cut_off());
  EXPECT_EQ(good->add("n", 1), 1);
  ASSERT_EQ(warnings().size(), 2u);
  EXPECT_THAT(warnings()[1], HasSubstr("there are 8 clients already"));
}

// The destructor's patience is for ranks that still want to say goodbye.
TEST_F(TcpStoreTest, AnEndingServerServesUntilItsClientsHaveLeft) {
  server_ = std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{.linger = seconds(20)});
  auto slow = client();
  std::thread slow_rank([store = std::move(slow)]() mutable {
    std::this_thread::sleep_for(milliseconds(200));
    EXPECT_EQ(store->add("goodbye", 1), 1);
    store.reset();
  });
  const auto start = Clock::now();
  server_.reset();
  const auto took = Clock::now() - start;
  EXPECT_GE(took, milliseconds(100));
  EXPECT_LT(took, seconds(10));
  slow_rank.join();
}

TEST_F(TcpStoreTest, WhenTheServerGoesCallsNameTheirKey) {
  const auto store = client();
  const std::uint16_t port = server_->port();
  const std::string gone = "the server at 127.0.0.1:" + std::to_string(port) + " is gone (";
  std::thread waiter([&, other = client()] {
    expect_error(ErrorCode::peer_lost, "store: key \"waited for\": " + gone,
                 [&] { other->get("waited for", Deadline::never()); });
  });
  server_.reset();  // cuts them off after its 300 ms
  waiter.join();
  expect_error(ErrorCode::peer_lost, "store: key \"x\": " + gone, [&] { store->set("x", "1"); });
  expect_error(ErrorCode::peer_lost, "store: key \"y\": " + gone, [&] { store->get("y", soon()); });
  expect_error(ErrorCode::timeout,
               "store: no server at 127.0.0.1:" + std::to_string(port) + " within 100 ms (",
               [&] { make_tcp_store("127.0.0.1", port, Deadline::after(milliseconds(100))); });
}

// The child has copies of the server's sockets, so closing the originals does not end the connections.
TEST_F(TcpStoreTest, AForkedChildDoesNotHideThatTheServerIsGone) {
  const auto store = client();
  const std::uint16_t port = server_->port();
  store->set("a", "1");
  test::ChildProcess child = test::ChildProcess::fork([] {
    ::pause();
    return 0;
  });
  const auto start = Clock::now();
  std::thread waiter([&, other = client()] {
    expect_error(ErrorCode::peer_lost, "is gone (it closed the connection)",
                 [&] { other->get("waited for", Deadline::after(seconds(20))); });
  });
  server_.reset();
  waiter.join();
  EXPECT_LT(Clock::now() - start, seconds(10));
  expect_error(ErrorCode::timeout, "(Connection refused)",
               [&] { make_tcp_store("127.0.0.1", port, Deadline::after(milliseconds(100))); });
}

TEST_F(TcpStoreTest, AClientWaitsForItsServer) {
  const std::uint16_t port = server_->port();
  server_.reset();
  std::thread early([port] { make_tcp_store("127.0.0.1", port, soon())->set("early", "1"); });
  std::this_thread::sleep_for(milliseconds(100));
  server_ = std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{.port = port});
  early.join();
  EXPECT_EQ(client()->try_get("early"), "1");
}

TEST_F(TcpStoreTest, APortInUseIsNamed) {
  expect_error(ErrorCode::system,
               "store server: cannot listen on " + server_->address() + ": Address already in use",
               [&] { TcpStoreServer second(log_, TcpStoreOptions{.port = server_->port()}); });
}

TEST_F(TcpStoreTest, OffLoopbackASecretIsDemanded) {
  for (const auto& [host, shown] : {std::pair("0.0.0.0", "0.0.0.0:1234"),
                                    {"192.0.2.1", "192.0.2.1:1234"},
                                    {"::", "[::]:1234"},
                                    {"2001:db8::1", "[2001:db8::1]:1234"}}) {
    const std::string text =
        std::string("store: ") + shown +
        " is not on loopback, and there is no secret; expected one that all ranks have, in "
        "a file of mode 0600 (WEFT_STORE_SECRET_FILE) or in WEFT_STORE_SECRET";
    expect_error(ErrorCode::bad_argument, text, [&] { make_tcp_store(host, 1234, soon()); });
    expect_error(ErrorCode::bad_argument, text,
                 [&] { TcpStoreServer server(log_, TcpStoreOptions{.host = host, .port = 1234}); });
  }
}

// If the resolver cannot be reached it says "try again", which is done until the deadline.
TEST_F(TcpStoreTest, AHostThatDoesNotExistIsNamed) {
  const auto error = test::error_text(
      [&] { make_tcp_store("no-such-host.invalid", 1234, Deadline::after(milliseconds(50))); });
  EXPECT_THAT(error, HasSubstr("the address of no-such-host.invalid cannot be found: "));
  EXPECT_THAT(
      test::error_text([&] { TcpStoreServer server(log_, TcpStoreOptions{.host = "no-such-host.invalid"}); }),
      HasSubstr("the address of no-such-host.invalid cannot be found: "));
}

// The server's thread blocks signals, so the program's threads get them.
TEST_F(TcpStoreTest, ItsThreadTakesNoSignals) {
  EXPECT_EQ(client()->add("n", 1), 1);
  int found = 0;
  for (const auto& task : std::filesystem::directory_iterator("/proc/self/task")) {
    std::string name, blocked;
    FileIn status(task.path() / "status");
    for (std::string word; status >> word;) {
      if (word == "Name:") status >> name;
      if (word == "SigBlk:") status >> blocked;
    }
    if (name != "weft-store") continue;
    ++found;
    const auto mask = std::stoull(blocked, nullptr, 16);
    for (const int number : {SIGTERM, SIGINT, SIGUSR1, SIGUSR2, SIGCHLD, SIGALRM})
      EXPECT_TRUE((mask >> (number - 1)) & 1) << number;
  }
  EXPECT_EQ(found, 1);
}

TEST_F(TcpStoreTest, AServerElsewhereIsNoError) {
  EXPECT_EQ(TcpStoreServer::try_serve(log_, {.port = server_->port()}), nullptr);
  EXPECT_NE(TcpStoreServer::try_serve(log_, {.port = 0}), nullptr);
}

bool has_ipv6_loopback() {
  const int fd = ::socket(AF_INET6, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in6 at{};
  at.sin6_family = AF_INET6;
  at.sin6_addr = in6addr_loopback;
  const bool has = fd >= 0 && ::bind(fd, reinterpret_cast<const sockaddr*>(&at), sizeof at) == 0;
  if (fd >= 0) ::close(fd);
  return has;
}

// "IPv6 only": the server is on ::1 alone, and 127.0.0.1 refuses.
TEST_F(TcpStoreTest, Ipv6Only) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no ::1";
  server_ = std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{.host = "::1"});
  EXPECT_EQ(server_->address(), "[::1]:" + std::to_string(server_->port()));
  make_tcp_store("::1", server_->port(), soon())->set("key", "value");
  EXPECT_EQ(make_tcp_store("localhost", server_->port(), soon())->get("key", soon()), "value")
      << "all addresses of the name are tried";
  expect_error(ErrorCode::timeout, "store: no server at 127.0.0.1:", [&] {
    make_tcp_store("127.0.0.1", server_->port(), Deadline::after(milliseconds(50)));
  });
  {
    UnauthenticatedClient unknown(server_->port(), "::1");
    unknown.say("h");
  }
  while (warnings().empty()) EXPECT_EQ(client()->add("n", 0), 0);  // bounded by ctest's time limit
  EXPECT_THAT(warnings()[0], HasSubstr(fmt::format("store server: closed process {}: ", ::getpid())));
}

/// Runs `body` in a child that has `hosts` for its /etc/hosts; skips where the system does not let it.
void with_hosts(const std::string& hosts, const std::function<void()>& body) {
  const test::TemporaryFolder folder;
  std::ofstream(folder / "hosts") << hosts;
  constexpr int kRefused = 77;
  const auto result = test::run_in_child([&] {
    if (::unshare(CLONE_NEWNS) != 0 ||
        ::mount((folder / "hosts").c_str(), "/etc/hosts", nullptr, MS_BIND, nullptr) != 0)
      return kRefused;
    body();
    return 0;
  });
  if (result.status.code == kRefused) GTEST_SKIP() << "a mount namespace of its own is refused (needs root)";
  EXPECT_TRUE(result.ok()) << to_string(result);
}

void meet_by_name(const char* host, const std::string& address) {
  Logger log;
  TcpStoreServer server(log, {.host = host, .linger = milliseconds(100)});
  EXPECT_THAT(server.address(), ::testing::StartsWith(address));
  const auto store = make_tcp_store(host, server.port(), soon());
  EXPECT_EQ(store->add("n", 1), 1);
}

// "hostname that resolves to 127.0.0.1".
TEST(TcpStoreNames, HostnameThatResolvesTo127001) {
  with_hosts("127.0.0.1 localhost node7\n", [] { meet_by_name("node7", "127.0.0.1:"); });
}

// The file as Debian's installer writes it for machines without a fixed address.
TEST(TcpStoreNames, HostnameThatResolvesTo127011) {
  with_hosts("127.0.0.1 localhost\n127.0.1.1 node7.example node7\n",
             [] { meet_by_name("node7", "127.0.1.1:"); });
}

TEST(TcpStoreNames, HostnameThatIsIpv6Only) {
  if (!has_ipv6_loopback()) GTEST_SKIP() << "this machine has no ::1";
  with_hosts("::1 localhost node7\n", [] { meet_by_name("node7", "[::1]:"); });
}

// Without a secret the store uses only those addresses of a name that are on loopback, and refuses a name
// without any.
TEST(TcpStoreNames, HostnameWithAddressesOffLoopback) {
  with_hosts("192.0.2.7 node7 node8\n127.0.1.1 node7\n", [] {
    meet_by_name("node7", "127.0.1.1:");
    expect_error(ErrorCode::bad_argument, "store: node8:99 is not on loopback, and there is no secret",
                 [] { make_tcp_store("node8", 99, soon()); });
  });
}

TEST(Address, HostAndPortAreRead) {
  EXPECT_EQ(parse_host_port("node7:99"), (HostPort{"node7", 99}));
  EXPECT_EQ(parse_host_port("127.0.0.1:0"), (HostPort{"127.0.0.1", 0}));
  EXPECT_EQ(parse_host_port("[::1]:65535"), (HostPort{"::1", 65535}));
  for (const char* bad :
       {"", ":", ":99", "node7", "node7:", "node7:65536", "node7:-1", "node7:9x", "::1", "::1:99", "[::1]",
        "[::1]99", "[]:99", "[::1:99", "[]1]:5", "[[::1]]:5", "file:///x:9"})
    EXPECT_FALSE(parse_host_port(bad)) << bad;
  EXPECT_EQ(shown_host_port("::1", 9), "[::1]:9");
  EXPECT_EQ(shown_host_port("node7", 9), "node7:9");
}

TEST(Address, TheInterfaceIsTheRoutes) {
  std::string why;
  for (const char* host : {"127.0.0.1", "127.0.1.1"})
    EXPECT_EQ(interface_to(resolve(host, 1, why).at(0)), "lo (127.0.0.1)") << host;
  if (has_ipv6_loopback()) {
    EXPECT_EQ(interface_to(resolve("::1", 1, why).at(0)), "lo (::1)");
  }
}

// Another server listens at the port. One sends a greeting like FTP, and one sends nothing.
TEST_F(TcpStoreTest, AForeignServerIsNotTakenForAStore) {
  const int listener = ::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0);
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  ASSERT_EQ(::bind(listener, reinterpret_cast<const sockaddr*>(&at), length), 0);
  ASSERT_EQ(::listen(listener, 8), 0);
  ASSERT_EQ(::getsockname(listener, reinterpret_cast<sockaddr*>(&at), &length), 0);
  const std::uint16_t port = ntohs(at.sin_port);
  const std::string where = "127.0.0.1:" + std::to_string(port);
  expect_error(
      ErrorCode::timeout,
      "store: no server at " + where + " within 200 ms (the process that listens there does not answer)",
      [&] { make_tcp_store("127.0.0.1", port, Deadline::after(milliseconds(200))); });
  std::thread greeter([listener] {
    ::close(::accept(listener, nullptr, nullptr));  // the client of above, which has left
    const int fd = ::accept(listener, nullptr, nullptr);
    const std::string_view greeting = "220 some other service, at your command\r\n";
    EXPECT_EQ(::send(fd, greeting.data(), greeting.size(), MSG_NOSIGNAL),
              static_cast<ssize_t>(greeting.size()));
    char buffer[256];
    while (::recv(fd, buffer, sizeof buffer, 0) > 0) {}
    ::close(fd);
  });
  expect_error(ErrorCode::system, "store: the process that listens on " + where + " is not a weft store",
               [&] { make_tcp_store("127.0.0.1", port, soon()); });
  greeter.join();
  ::close(listener);
}

TEST(LauncherNotice, EndedRanksAreReadAsTheyAreWritten) {
  const std::string text = encode_ended({{1, "exited with code 0"}, {30, "killed by signal 9 (SIGKILL)"}});
  EXPECT_EQ(text, "1 exited with code 0\n30 killed by signal 9 (SIGKILL)\n");
  const std::vector<EndedRank> ranks = decode_ended(text);
  ASSERT_EQ(ranks.size(), 2u);
  EXPECT_EQ(ranks[1].rank, 30);
  EXPECT_EQ(ranks[1].how, "killed by signal 9 (SIGKILL)");
  for (const char* none : {"", "\n", "x exited\n", "-1 exited\n", " \n\n"})
    EXPECT_TRUE(decode_ended(none).empty());
  EXPECT_EQ(decode_ended("x\n2").at(0).rank, 2);  // no line's end
}

}  // namespace
}  // namespace weft::store_test
