// The TCP store and unauthenticated clients: clients without the secret, clients that intercept and change
// traffic, large numbers of clients, and requests beyond the limits. The job goes on. All on loopback;
// hosts_test.cpp has the same across hosts.
#include <arpa/inet.h>
#include <fmt/format.h>
#include <gmock/gmock.h>
#include <gtest/gtest.h>
#include <malloc.h>
#include <netinet/in.h>
#include <poll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#include <atomic>
#include <cerrno>
#include <fstream>
#include <functional>
#include <memory>
#include <mutex>
#include <string>
#include <thread>
#include <vector>

#include "base/memfd.hpp"
#include "base/text/plain_streams.hpp"
#include "store/tcp/seal.hpp"
#include "support/errors.hpp"
#include "support/other_user.hpp"
#include "support/processes.hpp"
#include "support/sanitizers.hpp"
#include "support/temporary_folder.hpp"
#include "support/unauthenticated_client.hpp"
#include "weft/store/file.hpp"
#include "weft/store/tcp.hpp"

namespace weft::unauthenticated_test {
namespace {

using std::chrono::microseconds;
using std::chrono::milliseconds;
using std::chrono::seconds;
using test::error_text;
using test::UnauthenticatedClient;
using ::testing::AllOf;
using ::testing::Contains;
using ::testing::HasSubstr;
using ::testing::Not;

constexpr std::string_view kSecret = "correct horse battery staple";

Deadline soon() { return Deadline::after(seconds(20)); }

class UnauthenticatedTest : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      key_of_secret(kSecret);
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }

  void serve(TcpStoreOptions options = {}) {
    options.secret = kSecret;
    options.linger = milliseconds(300);
    server_ = std::make_unique<TcpStoreServer>(log_, options);
  }
  std::shared_ptr<Store> client(std::string_view secret = kSecret) {
    return client_at(server_->port(), secret);
  }
  static std::shared_ptr<Store> client_at(std::uint16_t port, std::string_view secret = kSecret) {
    return make_tcp_store("127.0.0.1", port, soon(), secret);
  }

  std::vector<std::string> warnings() {
    const std::lock_guard lock(mutex_);
    return warnings_;
  }
  /// Waits until a warning holds `text`; bounded.
  bool warned_of(const std::string& text) {
    for (const Deadline limit = soon(); !limit.passed(); std::this_thread::sleep_for(milliseconds(5)))
      for (const std::string& w : warnings())
        if (w.find(text) != std::string::npos) return true;
    return false;
  }

  std::mutex mutex_;
  std::vector<std::string> warnings_;
  Logger log_{LogLevel::warning, [this](LogLevel, std::string_view line) {
                const std::lock_guard lock(mutex_);
                warnings_.emplace_back(line);
              }};
  std::unique_ptr<TcpStoreServer> server_;
};

Descriptor listen_on_loopback(std::uint16_t& port) {
  Descriptor listener(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  sockaddr_in at{};
  at.sin_family = AF_INET;
  at.sin_addr.s_addr = htonl(INADDR_LOOPBACK);
  socklen_t length = sizeof at;
  EXPECT_EQ(::bind(listener.get(), reinterpret_cast<const sockaddr*>(&at), length), 0);
  EXPECT_EQ(::listen(listener.get(), 64), 0);
  EXPECT_EQ(::getsockname(listener.get(), reinterpret_cast<sockaddr*>(&at), &length), 0);
  port = ntohs(at.sin_port);
  return listener;
}

/// A process on the path between client and server that reads all traffic and may change it: `change` gets
/// the bytes.
class Path {
 public:
  using Change = std::function<void(bool to_server, std::string& bytes)>;

  explicit Path(std::uint16_t server, Change change = {})
      : server_(server), change_(std::move(change)), listener_(listen_on_loopback(port_)) {
    thread_ = std::thread([this] { carry(); });
  }
  ~Path() {
    stop_ = true;
    thread_.join();
  }
  std::uint16_t port() const { return port_; }
  std::string heard(bool to_server) {
    const std::lock_guard lock(mutex_);
    return heard_[to_server];
  }

 private:
  struct Line {
    Descriptor ends[2];  // the client's, the server's
  };

  void carry() {
    std::vector<Line> lines;
    while (!stop_) {
      std::vector<pollfd> polled{{listener_.get(), POLLIN, 0}};
      for (const Line& line : lines)
        for (const Descriptor& end : line.ends) polled.push_back({end.get(), POLLIN, 0});
      ::poll(polled.data(), polled.size(), 10);
      for (std::size_t i = lines.size(); i-- > 0;)
        for (const bool to_server : {true, false})
          if (polled[1 + 2 * i + (to_server ? 0 : 1)].revents != 0 && !pass(lines[i], to_server)) {
            lines.erase(lines.begin() + static_cast<std::ptrdiff_t>(i));
            break;
          }
      if (polled[0].revents == 0) continue;
      Line line;
      line.ends[0] = Descriptor(::accept4(listener_.get(), nullptr, nullptr, SOCK_CLOEXEC));
      line.ends[1] = Descriptor(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
      std::string why;
      const SocketAddress to = resolve("127.0.0.1", server_, why).at(0);
      if (::connect(line.ends[1].get(), to.data(), to.length) == 0) lines.push_back(std::move(line));
    }
  }

  bool pass(Line& line, bool to_server) {
    char buffer[65536];
    const ssize_t got = ::recv(line.ends[to_server ? 0 : 1].get(), buffer, sizeof buffer, MSG_DONTWAIT);
    if (got <= 0) return false;
    std::string bytes(buffer, static_cast<std::size_t>(got));
    {
      const std::lock_guard lock(mutex_);
      heard_[to_server] += bytes;
    }
    if (change_) change_(to_server, bytes);
    return ::send(line.ends[to_server ? 1 : 0].get(), bytes.data(), bytes.size(), MSG_NOSIGNAL) ==
           static_cast<ssize_t>(bytes.size());
  }

  const std::uint16_t server_;
  const Change change_;
  std::uint16_t port_ = 0;
  Descriptor listener_;
  std::atomic<bool> stop_{false};
  std::mutex mutex_;
  std::string heard_[2];
  std::thread thread_;
};

TEST_F(UnauthenticatedTest, WhoKnowsTheSecretJoins) {
  serve();
  const auto a = client(), b = client();
  std::thread waiter([&] { EXPECT_EQ(b->get("late", soon()), "value"); });
  const std::string large(1 << 20, 'x');
  a->set("large", large);
  EXPECT_EQ(b->try_get("large"), large);
  EXPECT_EQ(a->compare_set("large", large, large), large);
  EXPECT_EQ(a->add("n", 5), 5);
  a->set("late", "value");
  waiter.join();
  EXPECT_EQ(error_text([&] { a->add("large", 1); }).substr(0, 40),
            "bad_argument: store: add: key \"large\" ho");
  EXPECT_THAT(warnings(), ::testing::IsEmpty());
}

// Both sides get an error at once, and authenticated clients continue.
TEST_F(UnauthenticatedTest, AnotherSecretIsRefusedOnBothSides) {
  serve();
  const auto good = client();
  const auto start = Clock::now();
  EXPECT_EQ(error_text([&] {
              make_tcp_store("127.0.0.1", server_->port(), Deadline::after(seconds(300)),
                             "another long secret");
            }),
            "mismatch: store: the server at " + server_->address() +
                " has another secret than this process, or none; expected the same one on all hosts "
                "(WEFT_STORE_SECRET_FILE, WEFT_STORE_SECRET)");
  EXPECT_LT(Clock::now() - start, seconds(10));
  EXPECT_TRUE(warned_of("it does not know the secret"));
  EXPECT_THAT(warnings().back(), HasSubstr("store server: closed 127.0.0.1:"));
  EXPECT_EQ(good->add("n", 1), 1);
}

TEST_F(UnauthenticatedTest, NoSecretIsRefusedOnBothSides) {
  serve();
  EXPECT_EQ(error_text([&] { client(""); }),
            "bad_argument: store: the server at " + server_->address() +
                " requires a secret; expected it in a file of mode 0600 (WEFT_STORE_SECRET_FILE) or in "
                "WEFT_STORE_SECRET");
  EXPECT_TRUE(warned_of("it left when it was asked for the secret"));
}

TEST_F(UnauthenticatedTest, ShortSecretsAreRefusedByBoth) {
  const std::string text = "bad_argument: store: the secret has 5 bytes; expected 16 to 4096";
  EXPECT_THAT(error_text([&] { TcpStoreServer server(log_, {.secret = "short"}); }), HasSubstr(text));
  serve();
  EXPECT_THAT(error_text([&] { client("short"); }), HasSubstr(text));
}

// A server that does not know the secret, but says that the client's proof was right.
TEST_F(UnauthenticatedTest, AFalseServerIsNotBelieved) {
  std::uint16_t port = 0;
  const Descriptor listener = listen_on_loopback(port);
  std::thread impostor([&] {
    const Handshake pretended(key_of_secret("what it thinks it might be"));
    const Descriptor fd(::accept(listener.get(), nullptr, nullptr));
    char buffer[4096];
    for (const std::string& reply : {make_frame(FrameKind::secret_demanded, {}, {}),
                                     make_frame(FrameKind::challenge, {}, pretended.own_half()),
                                     make_frame(FrameKind::welcome, {}, std::string(32, 'x'))}) {
      EXPECT_GT(::recv(fd.get(), buffer, sizeof buffer, 0), 0);
      ::send(fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL);
    }
    EXPECT_EQ(::recv(fd.get(), buffer, sizeof buffer, 0), 0) << "nothing more is said to it";
  });
  EXPECT_THAT(error_text([&] { client_at(port); }), HasSubstr("mismatch: store: the server at 127.0.0.1:"));
  impostor.join();
}

// The bytes on the wire show neither the secret nor keys nor values.
TEST_F(UnauthenticatedTest, WhoListensLearnsNothing) {
  serve();
  Path path(server_->port());
  const auto store = client_at(path.port());
  store->set("a key that is known", "a value that is known");
  EXPECT_EQ(store->get("a key that is known", soon()), "a value that is known");
  for (const bool to_server : {true, false}) {
    const std::string heard = path.heard(to_server);
    EXPECT_GT(heard.size(), 100u);
    for (const std::string_view word : {kSecret, kSecret.substr(0, 8), std::string_view("known")})
      EXPECT_EQ(heard.find(word), std::string::npos) << word;
  }
}

// A replay by another process of all bytes that a client has sent.
TEST_F(UnauthenticatedTest, WhatWasSaidOnceIsOfNoUseAgain) {
  serve();
  Path path(server_->port());
  client_at(path.port())->add("n", 1);
  std::string said = path.heard(true);
  // Its first words asked whether a secret is demanded.
  const std::size_t join = said.find("WFTS", 1);
  ASSERT_NE(join, std::string::npos);
  said.erase(0, join);
  constexpr std::size_t kFrame = sizeof(FrameHeader) + kHandshakeBytes;
  UnauthenticatedClient unauthenticated(server_->port());
  unauthenticated.say(said.substr(0, kFrame));
  EXPECT_TRUE(unauthenticated.is_answered());
  unauthenticated.say(said.substr(kFrame, kFrame));
  EXPECT_TRUE(unauthenticated.is_cut_off());
  EXPECT_TRUE(warned_of("it does not know the secret"));
  EXPECT_EQ(client()->add("n", 0), 1);
}

// One byte of a request or of a reply is changed after the handshake. The call fails and has no effect.
TEST_F(UnauthenticatedTest, WhatIsChangedOnTheWayIsNotBelieved) {
  for (const bool requests : {true, false}) {
    serve();
    std::atomic<bool> now{false};
    Path path(server_->port(), [&](bool to_server, std::string& bytes) {
      if (now && to_server == requests) bytes[bytes.size() / 2] ^= 1;
    });
    const auto store = client_at(path.port());
    store->set("key", "before");
    now = true;
    EXPECT_THAT(
        error_text([&] { store->set("key", "after"); }),
        AllOf(HasSubstr("peer_lost: store: key \"key\": the server at 127.0.0.1:"), HasSubstr("is gone")));
    if (requests) {
      EXPECT_TRUE(warned_of("it sent bytes that are not sealed with its key"));
      EXPECT_EQ(client()->try_get("key"), "before");
    }
  }
}

// One byte is changed within the handshake: the first and the last of each side's half and proof.
TEST_F(UnauthenticatedTest, AChangedHandshakeFails) {
  serve();
  constexpr std::size_t kFrame = sizeof(FrameHeader) + kHandshakeBytes;
  for (const bool direction : {true, false}) {
    for (const int number : {1, 2}) {
      for (const std::size_t at : {sizeof(FrameHeader), kFrame - 1}) {
        int seen = 0;
        Path path(server_->port(), [&](bool to_server, std::string& bytes) {
          if (to_server == direction && bytes.size() == kFrame && ++seen == number) bytes[at] ^= 1;
        });
        // The highest bit of a point does not count; but the bytes that both sides hash differ.
        EXPECT_THAT(error_text([&] { client_at(path.port()); }), HasSubstr("mismatch: "))
            << direction << number << at;
      }
    }
  }
}

// No more bytes arrive, as from a disconnected host: a call with a deadline returns by its deadline.
TEST_F(UnauthenticatedTest, ASilentServerIsATimeoutAtTheDeadline) {
  serve();
  std::atomic<bool> silent{false};
  Path path(server_->port(), [&](bool, std::string& bytes) {
    if (silent) bytes.clear();
  });
  const auto store = client_at(path.port());
  store->set("key", "1");
  silent = true;
  const std::string text =
      fmt::format("timeout: store: key \"key\": the server at 127.0.0.1:{}: it did not answer within 200 ms",
                  path.port());
  const auto in_time = [] { return Deadline::after(milliseconds(200)); };
  const auto start = Clock::now();
  EXPECT_EQ(error_text([&] { store->set("key", "2", in_time()); }), text);
  EXPECT_EQ(error_text([&] { store->try_get("key", in_time()); }), text);  // on a connection of its own
  EXPECT_EQ(error_text([&] { store->add("key", 1, in_time()); }), text);
  EXPECT_EQ(error_text([&] { store->compare_set("key", "1", "2", in_time()); }), text);
  EXPECT_EQ(error_text([&] { store->remove("key", in_time()); }), text);
  EXPECT_EQ(
      error_text([&] { store->get("key", in_time()); }),
      fmt::format("timeout: store: key \"key\" was not set within 200 ms (the server at 127.0.0.1:{} does "
                  "not answer)",
                  path.port()));
  EXPECT_LT(Clock::now() - start, seconds(15));
  silent = false;
  EXPECT_EQ(store->get("key", soon()), "1");
}

// ---- many at once ----

// More unauthenticated clients (silent, slow and talkative ones) than the server has room for, while ranks
// work and others join.
TEST_F(UnauthenticatedTest, ManyUnauthenticatedClientsHoldUpNobody) {
  for (const bool with_secret : {true, false}) {
    {
      const std::lock_guard lock(mutex_);
      warnings_.clear();
    }
    server_ = std::make_unique<TcpStoreServer>(
        log_, TcpStoreOptions{.secret = with_secret ? std::string(kSecret) : std::string(),
                              .max_clients = 64,
                              .max_unauthenticated = 16,
                              .join_limit = seconds(30),
                              .linger = milliseconds(300)});
    const auto good = client();
    std::atomic<bool> stop{false};
    std::jthread crowd([&] {
      std::vector<std::unique_ptr<UnauthenticatedClient>> silent;
      for (int i = 0; !stop || i < 200; ++i) {
        std::this_thread::sleep_for(microseconds(100));  // a crowd, but not on the machine's last processor
        auto next = std::make_unique<UnauthenticatedClient>(server_->port());
        if (i % 3 == 1) next->say("W");
        if (i % 3 == 2) next->say("GET / HTTP/1.1\r\n\r\n");
        silent.push_back(std::move(next));
        if (silent.size() > 100) silent.erase(silent.begin());
      }
    });
    try {
      for (int i = 1; i <= 20; ++i) {
        EXPECT_EQ(good->add("n", 1), i);
        client()->set("who came late", std::to_string(i));
      }
    } catch (const Error& e) {
      ADD_FAILURE() << e.what();
    }
    stop = true;
    crowd.join();
    EXPECT_EQ(good->get("who came late", soon()), "20");
    const auto lines = warnings();
    EXPECT_GT(lines.size(), 5u);
    EXPECT_LT(lines.size(), 100u) << "only so many in ten seconds";
    EXPECT_THAT(lines, Contains(AllOf(HasSubstr("it was the oldest of 16 that have not joined"))));
    server_.reset();
    EXPECT_THAT(warnings().back(), HasSubstr(" more warnings within 10.0 s"));
  }
}

// A client sends one byte at a time, forever: this must not extend its time to authenticate.
TEST_F(UnauthenticatedTest, WhoTakesTooLongToJoinIsClosed) {
  serve({.join_limit = milliseconds(400)});
  const auto good = client();
  UnauthenticatedClient silent(server_->port()), slow(server_->port());
  const std::string join = make_frame(FrameKind::join, {}, std::string(32, 'x'));
  std::size_t said = 0;
  for (const Deadline limit = Deadline::after(seconds(10)); !slow.hears_the_end() && !limit.passed();) {
    if (said < join.size()) slow.say_if_heard(join.substr(said++, 1));
    std::this_thread::sleep_for(milliseconds(20));
  }
  EXPECT_LT(said, join.size());
  EXPECT_TRUE(silent.is_cut_off());
  EXPECT_TRUE(warned_of("it has not joined within 400 ms"));
  std::this_thread::sleep_for(milliseconds(500));
  EXPECT_EQ(good->add("n", 1), 1) << "who has joined may be silent as long as he likes";
}

// Simulates a large job whose ranks all begin at the same moment.
TEST_F(UnauthenticatedTest, TwoHundredAndFiftySixClientsJoinAtOnce) {
  rlimit files{};
  ::getrlimit(RLIMIT_NOFILE, &files);
  if (files.rlim_max < 2048) GTEST_SKIP() << "this process may open only " << files.rlim_max << " files";
  files.rlim_cur = std::max<rlim_t>(files.rlim_cur, 2048);
  ASSERT_EQ(::setrlimit(RLIMIT_NOFILE, &files), 0);
  for (const bool with_secret : {true, false}) {
    server_ = std::make_unique<TcpStoreServer>(
        log_, TcpStoreOptions{.secret = with_secret ? std::string(kSecret) : std::string()});
    constexpr int kClients = 256;
    std::atomic<int> failed{0};
    std::vector<std::thread> ranks;
    for (int r = 0; r < kClients; ++r)
      ranks.emplace_back([&, r] {
        try {
          const auto store =
              make_tcp_store("127.0.0.1", server_->port(), Deadline::after(seconds(60)), kSecret);
          store->set(std::to_string(r), std::to_string(r));
          if (store->add("here", 1) == kClients) store->set("all", "yes");
          store->get("all", Deadline::after(seconds(60)));
          if (store->try_get(std::to_string((r + 1) % kClients)) != std::to_string((r + 1) % kClients))
            ++failed;
        } catch (const Error& e) {
          ++failed;
          ADD_FAILURE() << "client " << r << ": " << e.what();
        }
      });
    for (std::thread& t : ranks) t.join();
    EXPECT_EQ(failed, 0);
    for (const std::string& w : warnings())
      EXPECT_THAT(w, HasSubstr("did not prove")) << "the first question";
  }
}

// ---- other users ----

// A port of TCP on loopback is everybody's; the Unix socket is not.
TEST(OtherUsers, WithoutASecretNoPortOfTcpIsOpen) {
  Logger log;
  TcpStoreServer server(log);
  std::string why;
  const SocketAddress at = resolve("127.0.0.1", server.port(), why).at(0);
  const Descriptor fd(::socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0));
  EXPECT_NE(::connect(fd.get(), at.data(), at.length), 0);
  EXPECT_EQ(errno, ECONNREFUSED);
}

// One of them tries a hundred times to connect. There is room for four clients, and those of this user find
// it.
TEST(OtherUsers, AreRefusedAtOnceAndTakeNobodysPlace) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can play another user";
  std::mutex mutex;
  std::vector<std::string> lines;
  Logger log(LogLevel::warning, [&](LogLevel, std::string_view line) {
    const std::lock_guard lock(mutex);
    lines.emplace_back(line);
  });
  test::Pipe where, told;
  std::string why;
  auto other = test::ChildProcess::fork([&] {
    const auto port = static_cast<std::uint16_t>(std::stoi(where.read_line()));
    const SocketAddress socket = local_socket_of(resolve("127.0.0.1", port, why).at(0));  // root's
    EXPECT_TRUE(test::become_user(test::kNobody));
    for (int i = 0; i < 100; ++i) {
      const Descriptor fd(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
      EXPECT_EQ(::connect(fd.get(), socket.data(), socket.length), 0);
      const std::string request = make_frame(FrameKind::set, "weft/rank/1", "mine");
      ::send(fd.get(), request.data(), request.size(), MSG_NOSIGNAL);
      char byte = 0;
      EXPECT_LE(::recv(fd.get(), &byte, 1, 0), 0) << "it was answered";
    }
    EXPECT_THAT(error_text([&] { make_tcp_store("127.0.0.1", port, Deadline::after(milliseconds(50))); }),
                HasSubstr("timeout: store: no server at 127.0.0.1:"));
    told.write_line("done");
    return 0;
  });
  const pid_t pid = other.pid();
  TcpStoreServer server(log, {.max_clients = 4, .linger = milliseconds(300)});
  const auto first = make_tcp_store("127.0.0.1", server.port(), soon());
  where.write_line(std::to_string(server.port()));
  for (int i = 1; i <= 20; ++i) EXPECT_EQ(first->add("n", 1), i);
  told.read_line();
  EXPECT_FALSE(make_tcp_store("127.0.0.1", server.port(), soon())->try_get("weft/rank/1"));
  EXPECT_EQ(other.wait(seconds(20)), (test::ExitStatus{0, 0}));
  const std::lock_guard lock(mutex);
  ASSERT_FALSE(lines.empty());
  EXPECT_EQ(
      lines[0],
      fmt::format("[store] store server: closed process {} of user {}: expected processes of user 0 only",
                  pid, test::kNobody));
  EXPECT_LE(lines.size(), 25u) << "only so many in ten seconds";
}

// Another user has taken the name before rank 0: no rank accepts the server, and both sides get an error that
// names the user.
TEST(OtherUsers, AServerOfAnotherUserIsNotBelieved) {
  if (::geteuid() != 0) GTEST_SKIP() << "only root can play another user";
  std::string why;
  SocketAddress at = resolve("127.0.0.1", 0, why).at(0);
  {
    Logger log;
    at.set_port(TcpStoreServer(log).port());
  }
  test::Pipe ready, done;
  auto other = test::ChildProcess::fork([&] {
    const SocketAddress socket = local_socket_of(at);
    EXPECT_TRUE(test::become_user(test::kNobody));
    const Descriptor listener(::socket(AF_UNIX, SOCK_STREAM | SOCK_CLOEXEC, 0));
    EXPECT_EQ(::bind(listener.get(), socket.data(), socket.length), 0);
    EXPECT_EQ(::listen(listener.get(), 8), 0);
    ready.write_line("listening");
    done.read_line();
    return 0;
  });
  ready.read_line();
  EXPECT_EQ(error_text([&] { make_tcp_store("127.0.0.1", at.port(), soon()); }),
            fmt::format("system: store: the server at {} is process {} of user {}; expected user 0, as this "
                        "process",
                        at.text(), other.pid(), test::kNobody));
  Logger log;
  EXPECT_EQ(
      error_text([&] { TcpStoreServer(log, {.port = at.port()}); }),
      fmt::format("system: store server: cannot listen on {}: Address already in use (process {} of user "
                  "{} serves there; this is process {})",
                  at.text(), other.pid(), test::kNobody, ::getpid()));
  done.write_line("done");
  EXPECT_EQ(other.wait(seconds(20)), (test::ExitStatus{0, 0}));
}

// Somebody listens on the port of TCP and speaks our protocol without asking for a secret.
TEST(OtherUsers, AServerOfTcpThatDemandsNoSecretIsNotBelieved) {
  std::uint16_t port = 0;
  const Descriptor listener = listen_on_loopback(port);
  std::thread impostor([&] {
    const Descriptor fd(::accept(listener.get(), nullptr, nullptr));
    char buffer[4096];
    EXPECT_GT(::recv(fd.get(), buffer, sizeof buffer, 0), 0);
    const std::string reply = make_frame(FrameKind::absent, {}, {});
    ::send(fd.get(), reply.data(), reply.size(), MSG_NOSIGNAL);
    EXPECT_LE(::recv(fd.get(), buffer, sizeof buffer, 0), 0) << "nothing more is said to it";
  });
  EXPECT_EQ(error_text([&] { make_tcp_store("127.0.0.1", port, soon(), kSecret); }),
            fmt::format("system: store: the process that listens on 127.0.0.1:{} is not a weft store", port));
  impostor.join();
}

// ---- too few descriptors ----

class FewDescriptors : public ::testing::TestWithParam<bool> {};
INSTANTIATE_TEST_SUITE_P(TcpStore, FewDescriptors, ::testing::Bool(),
                         [](const auto& p) { return p.param ? "secret" : "no_secret"; });

// The server has room for two connections.
TEST_P(FewDescriptors, AreToldToTheClientsWithTheLimit) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  const std::string secret(GetParam() ? kSecret : "");
  try {
    if (GetParam()) key_of_secret(kSecret);
  } catch (const Error& e) {
    GTEST_SKIP() << e.what();
  }
  test::Pipe told, more;
  auto server = test::ChildProcess::fork([&] {
    Logger log(LogLevel::error);
    const TcpStoreServer serves(log, {.secret = secret});
    rlimit limit{};
    ::getrlimit(RLIMIT_NOFILE, &limit);
    const rlim_t before = limit.rlim_cur;
    const int next = ::dup(0);
    ::close(next);
    limit.rlim_cur = static_cast<rlim_t>(next) + 2;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    told.write_line(std::to_string(serves.port()));
    told.write_line(std::to_string(limit.rlim_cur));
    more.read_line();
    limit.rlim_cur = before;
    ::setrlimit(RLIMIT_NOFILE, &limit);
    told.write_line("more");
    more.read_line();
    return 0;
  });
  const auto port = static_cast<std::uint16_t>(std::stoi(told.read_line()));
  const std::string full = fmt::format(
      "the server at 127.0.0.1:{}: its process can take no more connections: Too many open files (ulimit -n "
      "is "
      "{})",
      port, told.read_line());
  const auto one = make_tcp_store("127.0.0.1", port, soon(), secret);
  const auto two = make_tcp_store("127.0.0.1", port, soon(), secret);
  const auto began = Clock::now();
  // All at the same time, since each waits for some seconds. A third client. If it makes two calls at one
  // time, one has the client's connection, and the other needs another connection.
  std::string third_text, texts[2];
  std::thread third(
      [&] { third_text = error_text([&] { make_tcp_store("127.0.0.1", port, soon(), secret); }); });
  const auto wait = [&](std::string& text) {
    text = error_text([&] { one->get("key", Deadline::after(seconds(5))); });
  };
  std::thread first(wait, std::ref(texts[0]));
  wait(texts[1]);
  first.join();
  third.join();
  EXPECT_EQ(third_text, "system: store: " + full);
  EXPECT_THAT(texts, ::testing::Contains("system: store: key \"key\": " + full));
  EXPECT_THAT(texts, ::testing::Contains(HasSubstr("timeout: store: key \"key\" was not set within ")));
  EXPECT_LT(Clock::now() - began, seconds(30));
  two->set("set", "1", soon());
  more.write_line("now");
  told.read_line();
  make_tcp_store("127.0.0.1", port, soon(), secret)->set("key", "1", soon());
  more.write_line("end");
  EXPECT_EQ(server.wait(seconds(20)), (test::ExitStatus{0, 0}));
}

// ---- forked children ----

// A child that destroys objects of its parent does not affect the parent's server.
TEST(Forks, AServerIsItsProcesss) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  Logger log;
  auto server = std::make_unique<TcpStoreServer>(
      log, TcpStoreOptions{.served_by = "its process", .linger = milliseconds(50)});
  const auto store = make_tcp_store("127.0.0.1", server->port(), soon());
  EXPECT_TRUE(test::run_in_child(
                  [&] {
                    server.reset();
                    return 0;
                  },
                  seconds(10))
                  .ok());
  // An ending server would say so, and then be gone.
  for (const Deadline end = Deadline::after(milliseconds(200)); !end.passed();)
    ASSERT_EQ(store->try_get(kServedByKey, soon()), "its process");
}

// Its requests would go over the parent's connection, and the server would drop both.
TEST(Forks, AStoreIsItsProcesss) {
  if (!test::kThreadsInForks) GTEST_SKIP() << test::kNoThreadsInForks;
  Logger log;
  TcpStoreServer server(log, TcpStoreOptions{});
  const test::TemporaryFolder folder;
  const std::vector<std::pair<std::string, std::shared_ptr<Store>>> stores = {
      {fmt::format("the connection to the server at 127.0.0.1:{}", server.port()),
       make_tcp_store("127.0.0.1", server.port(), soon())},
      {(folder / "table").string(), make_file_store((folder / "table").string())}};
  for (const auto& [opened, store] : stores) {
    store->set("key", "parent", soon());
    const std::string expected = fmt::format(
        "unsupported: store: this process was forked from process {}, which opened {}; open a store "
        "of its own in the child",
        ::getpid(), opened);
    EXPECT_TRUE(test::run_in_child(
                    [&, &store = store] {
                      const std::vector<std::function<void()>> requests = {
                          [&] { store->set("key", "child", soon()); },
                          [&] { store->get("key", soon()); },
                          [&] { store->try_get("key", soon()); },
                          [&] { store->add("number", 1, soon()); },
                          [&] { store->compare_set("key", "parent", "child", soon()); },
                          [&] { store->remove("key", soon()); }};
                      for (const auto& request : requests)
                        if (error_text(request) != expected) return 1;
                      return 0;
                    },
                    seconds(10))
                    .ok())
        << expected;
    EXPECT_EQ(store->get("key", soon()), "parent");
  }
}

// ---- too much ----

TEST_F(UnauthenticatedTest, AFullTableRefusesAndGoesOn) {
  serve({.max_keys = 3, .max_bytes = 1000});
  const auto store = client();
  store->set("a", "1");
  store->set("b", "2");
  store->set("c", "3");
  EXPECT_EQ(
      error_text([&] { store->set("d", "4"); }),
      "system: store: no room for key \"d\" (1 bytes): it holds 3 keys and 198 bytes; at most 3 and 1000 "
      "are allowed");
  EXPECT_THAT(error_text([&] { store->add("e", 1); }), HasSubstr("system: store: no room for key \"e\""));
  EXPECT_THAT(error_text([&] { store->compare_set("f", "", "1"); }), HasSubstr("system: store: no room"));
  EXPECT_THAT(error_text([&] { store->set("a", std::string(1000, 'x')); }),
              HasSubstr("no room for key \"a\" (1000 bytes)"));
  EXPECT_EQ(store->get("a", soon()), "1");
  store->set("a", std::string(500, 'x'));
  store->set("a", "1");
  store->remove("b");
  store->set("d", "4");
  EXPECT_EQ(store->get("d", soon()), "4");
}

TEST_F(UnauthenticatedTest, HalfRequestsAddUpToSoMuch) {
  server_ = std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{.max_unanswered = 300'000});
  const auto good = client("");
  const std::string half = make_frame(FrameKind::set, "k", std::string(200'000, 'x')).substr(0, 150'000);
  UnauthenticatedClient first(server_->port());
  first.say(half);
  good->set("small", "1");
  UnauthenticatedClient second(server_->port());
  second.say(half);
  UnauthenticatedClient third(server_->port());
  third.say_if_heard(half);
  EXPECT_TRUE(warned_of("bytes of requests and answers are in progress; at most 300000 are allowed"));
  EXPECT_EQ(good->get("small", soon()), "1");
}

std::size_t resident_bytes() {
  std::size_t pages = 0, resident = 0;
  FileIn("/proc/self/statm") >> pages >> resident;
  return resident * static_cast<std::size_t>(::sysconf(_SC_PAGESIZE));
}

/// The memory that the process has allocated and not freed. malloc may keep freed memory for later.
std::size_t allocated_bytes() {
  const struct mallinfo2 info = ::mallinfo2();
  return info.uordblks + info.hblkhd;
}

// The reported memory in progress is the memory that it takes, and it is freed once the request is answered.
TEST_F(UnauthenticatedTest, RequestsUnderWayTakeNoMoreThanTheirBytes) {
  if (!test::kPlainMemory) GTEST_SKIP() << test::kNoPlainMemory;
  constexpr std::size_t kRequests = 48, kValue = 1 << 20;
  server_ = std::make_unique<TcpStoreServer>(log_, TcpStoreOptions{});
  const auto good = client("");
  const std::string whole = make_frame(FrameKind::set, "k", std::string(kValue, 'x'));
  const std::size_t before = resident_bytes(), allocated_before = allocated_bytes();
  std::vector<std::unique_ptr<UnauthenticatedClient>> many;
  for (std::size_t i = 0; i < kRequests; ++i) {
    many.push_back(std::make_unique<UnauthenticatedClient>(server_->port()));
    many.back()->say(std::string_view(whole).substr(0, whole.size() - 1));
    good->set("another", "1");  // the server has read most of it by now
  }
  for (const Deadline limit = soon();
       resident_bytes() - before < kRequests * kValue * 9 / 10 && !limit.passed();)
    good->set("another", "1");
  EXPECT_LT(resident_bytes() - before, kRequests * kValue * 5 / 4);
  for (auto& m : many) {
    m->say(std::string_view(whole).substr(whole.size() - 1));
    EXPECT_TRUE(m->is_answered());
  }
  EXPECT_LT(allocated_bytes() - allocated_before, 12 * kValue);
}

}  // namespace
}  // namespace weft::unauthenticated_test
