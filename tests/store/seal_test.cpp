// The TCP store's handshake and its sealed records, without a socket.
#include "store/tcp/seal.hpp"

#include <fmt/format.h>
#include <gtest/gtest.h>

#include <optional>
#include <string>
#include <string_view>

#include "store/tcp/session.hpp"
#include "support/errors.hpp"

namespace weft::seal_test {
namespace {

using Said = StoreSession::Result::State;

constexpr std::string_view kSecret = "0123456789abcdef";

std::string hex(std::string_view bytes) {
  std::string text;
  for (const char c : bytes) text += fmt::format("{:02x}", static_cast<unsigned char>(c));
  return text;
}

KeyBytes counting_from(int first) {
  KeyBytes key;
  for (std::size_t i = 0; i < KeyBytes::size(); ++i)
    key.data()[i] = static_cast<unsigned char>(first + static_cast<int>(i));
  return key;
}

struct Pair {
  explicit Pair(std::string_view clients = kSecret, std::string_view servers = kSecret)
      : client(key_of_secret(clients)), server(key_of_secret(servers)) {
    EXPECT_TRUE(client.meet(server.own_half(), true));
    EXPECT_TRUE(server.meet(client.own_half(), false));
  }
  Handshake client, server;
};

class StoreSeal : public ::testing::Test {
 protected:
  void SetUp() override {
    try {
      key_of_secret(kSecret);
    } catch (const Error& e) {
      GTEST_SKIP() << e.what();
    }
  }
};

TEST_F(StoreSeal, BothSidesProveTheSameSecret) {
  const Pair p;
  EXPECT_TRUE(p.server.holds(p.client.proof(true), true));
  EXPECT_TRUE(p.client.holds(p.server.proof(false), false));
  SealedPair client = p.client.streams(), server = p.server.streams();
  for (const std::string& frame : {std::string("one"), std::string(), std::string(100'000, 'x')}) {
    const std::string record = client.to_server.seal(frame);
    EXPECT_EQ(record.size(), 4 + frame.size() + kSealBytes);
    const auto opened = server.to_server.open(record);
    ASSERT_EQ(opened.state, ParseState::whole);
    EXPECT_EQ(opened.frame, frame);
    EXPECT_EQ(opened.bytes, record.size());
    EXPECT_EQ(client.to_client.open(server.to_client.seal(frame)).frame, frame);
  }
}

// The bytes as an independent implementation (Python's hashlib and RFC 7748 written out) computes them: both
// ends of a job may run different builds.
TEST_F(StoreSeal, TheProtocolIsPinned) {
  Handshake client(key_of_secret(kSecret), counting_from(0)),
      server(key_of_secret(kSecret), counting_from(32));
  EXPECT_EQ(hex(client.own_half()), "8f40c5adb68f25624ae5b214ea767a6ec94d829d3d7b5e1ad1ba6f3e2138285f");
  EXPECT_EQ(hex(server.own_half()), "358072d6365880d1aeea329adf9121383851ed21a28e3b75e965d0d2cd166254");
  ASSERT_TRUE(client.meet(server.own_half(), true));
  ASSERT_TRUE(server.meet(client.own_half(), false));
  EXPECT_EQ(hex(client.proof(true)), "0b7477c3a0e9ee192295c28ceae2da415ffda0c057676fcd6ef4aad28c23a7b6");
  EXPECT_EQ(hex(server.proof(false)), "c228441df5d2687f8f1a9982d498dc285c9f7b4ea00b02e619f8097f6ca2ef2b");
}

TEST_F(StoreSeal, AnotherSecretProvesNothing) {
  const Pair p("0123456789abcdef", "0123456789abcdeg");
  EXPECT_FALSE(p.server.holds(p.client.proof(true), true));
  EXPECT_FALSE(p.client.holds(p.server.proof(false), false));
}

// The proof of one side is invalid if it is sent back, and in another connection.
TEST_F(StoreSeal, ProofsAreOfOneSideAndOneConnection) {
  const Pair p;
  EXPECT_FALSE(p.client.holds(p.client.proof(true), false));
  EXPECT_FALSE(p.server.holds(p.server.proof(false), true));
  Handshake later(key_of_secret(kSecret));
  ASSERT_TRUE(later.meet(p.client.own_half(), false));  // the client's half again, the server's is new
  EXPECT_FALSE(later.holds(p.client.proof(true), true));
  for (const std::string& bad : {std::string(), std::string(31, 'x'), p.client.proof(true) + "x"})
    EXPECT_FALSE(p.server.holds(bad, true)) << bad.size();
}

// Points of small order, whose product is known to everybody.
TEST_F(StoreSeal, HalvesThatGiveNoKeyAreRefused) {
  Handshake server(key_of_secret(kSecret));
  std::string half(32, '\0');
  EXPECT_FALSE(server.meet(half, false));
  half[0] = 1;
  EXPECT_FALSE(server.meet(half, false));
  EXPECT_FALSE(server.meet("short", false));
}

TEST_F(StoreSeal, AChangedRecordDoesNotOpen) {
  const Pair p;
  const std::string record = p.client.streams().to_server.seal("a frame");
  for (std::size_t i = 0; i < record.size(); ++i) {
    std::string changed = record;
    changed[i] ^= 1;
    EXPECT_NE(p.server.streams().to_server.open(changed).state, ParseState::whole) << i;
    EXPECT_EQ(p.server.streams().to_server.open(record.substr(0, i)).state, ParseState::more) << i;
  }
}

TEST_F(StoreSeal, RecordsOpenOnceInOrderAndInTheirDirection) {
  const Pair p;
  SealedPair client = p.client.streams(), server = p.server.streams();
  const std::string first = client.to_server.seal("first"), second = client.to_server.seal("second");
  EXPECT_EQ(server.to_server.open(second).state, ParseState::bad);  // the first was left out
  EXPECT_EQ(client.to_client.open(first).state, ParseState::bad);   // sent back
  EXPECT_EQ(server.to_server.open(first).frame, "first");
  EXPECT_EQ(server.to_server.open(first).state, ParseState::bad);  // again
  EXPECT_EQ(server.to_server.open(second).frame, "second");
  EXPECT_EQ(Pair().server.streams().to_server.open(first).state, ParseState::bad);  // in another connection
}

TEST_F(StoreSeal, LengthsBeyondTheLimitsAreRefusedAtOnce) {
  SealedStream stream((KeyBytes()));
  const auto length = [](std::uint32_t n) {
    return std::string(reinterpret_cast<const char*>(&n), sizeof n);
  };
  EXPECT_EQ(stream.open(length(15)).state, ParseState::bad);
  EXPECT_EQ(stream.open(length(16)).state, ParseState::more);
  EXPECT_EQ(stream.open(length(kMaxFrameBytes + kSealBytes)).state, ParseState::more);
  EXPECT_EQ(stream.open(length(kMaxFrameBytes + kSealBytes + 1)).state, ParseState::bad);
  EXPECT_EQ(stream.open(length(0xffffffff)).state, ParseState::bad);
}

TEST_F(StoreSeal, SecretsHaveALength) {
  EXPECT_EQ(
      test::error_text([] { key_of_secret("0123456789abcde"); }),
      "bad_argument: store: the secret has 15 bytes; expected 16 to 4096, at random (openssl rand -hex 32)");
  EXPECT_EQ(test::error_text([] { key_of_secret(std::string(4096, 'x')); }), "no error");
  EXPECT_EQ(
      test::error_text([] { key_of_secret(std::string(4097, 'x')); }),
      "bad_argument: store: the secret has 4097 bytes; expected 16 to 4096, at random (openssl rand -hex "
      "32)");
}

// A server's side of one connection, driven by bytes.
class StoreSessionTest : public StoreSeal {
 protected:
  /// The handshake, up to the proof, and the session that received it.
  void begin(StoreSession& session, Handshake& client) {
    const auto heard = session.take(make_frame(FrameKind::join, {}, client.own_half()));
    ASSERT_EQ(heard.state, Said::reply);
    ASSERT_TRUE(client.meet(parse_reply(heard.out).frame.value, true));
    EXPECT_TRUE(session.is_unauthenticated());
  }
  static StoreSession::Result prove(StoreSession& session, const Handshake& client) {
    return session.take(make_frame(FrameKind::prove, {}, client.proof(true)));
  }
  static void expect_bad(const StoreSession::Result& result, const std::string& why,
                         std::optional<FrameKind> told) {
    EXPECT_EQ(result.state, Said::bad);
    EXPECT_EQ(result.why, why);
    if (told) {
      EXPECT_EQ(parse_reply(result.out).frame.kind, *told);
    } else {
      EXPECT_EQ(result.out, "");
    }
  }

  const KeyBytes key_ = counting_from(7);
};

TEST_F(StoreSessionTest, AfterTheHandshakeRequestsAreSealed) {
  StoreSession session(&key_);
  Handshake client(key_);
  begin(session, client);
  const auto welcome = prove(session, client);
  ASSERT_EQ(welcome.state, Said::reply);
  EXPECT_TRUE(client.holds(parse_reply(welcome.out).frame.value, false));
  EXPECT_FALSE(session.is_unauthenticated());
  SealedPair streams = client.streams();
  std::string record = streams.to_server.seal(make_frame(FrameKind::set, "key", "value"));
  for (const char byte : record.substr(0, record.size() - 1))
    EXPECT_EQ(session.take({&byte, 1}).state, Said::more);
  const auto request = session.take(record.substr(record.size() - 1));
  ASSERT_EQ(request.state, Said::request);
  EXPECT_EQ(request.frame.key, "key");
  EXPECT_EQ(request.frame.value, "value");
  EXPECT_EQ(parse_reply(streams.to_client.open(session.wire(make_frame(FrameKind::found, {}, "x"))).frame)
                .frame.value,
            "x");
  expect_bad(session.take(make_frame(FrameKind::set, "key", "value")),
             "it sent bytes that are not sealed with its key: perhaps somebody changed them", std::nullopt);
}

TEST_F(StoreSessionTest, WhoDoesNotProveIsToldAndClosed) {
  const std::string unproven = "it sent a request, but did not prove that it knows the secret";
  {
    StoreSession session(&key_);
    expect_bad(session.take(make_frame(FrameKind::try_get, "key", {})), unproven, FrameKind::secret_demanded);
  }
  {  // a question is answered, once
    StoreSession session(&key_);
    const auto told = session.take(make_frame(FrameKind::try_get, kHelloKey, {}));
    EXPECT_EQ(told.state, Said::reply);
    EXPECT_EQ(parse_reply(told.out).frame.kind, FrameKind::secret_demanded);
    EXPECT_TRUE(session.was_told_of_secret());
    expect_bad(session.take(make_frame(FrameKind::try_get, kHelloKey, {})), unproven,
               FrameKind::secret_demanded);
  }
  {  // a large frame is not waited for
    StoreSession session(&key_);
    expect_bad(session.take(make_frame(FrameKind::set, "key", std::string(1000, 'x')).substr(0, 24)),
               unproven, FrameKind::secret_demanded);
  }
  {  // a proof of nothing
    StoreSession session(&key_);
    expect_bad(session.take(make_frame(FrameKind::prove, {}, std::string(32, 'x'))), unproven,
               FrameKind::secret_demanded);
  }
  {
    StoreSession session(&key_);
    Handshake client(counting_from(8));
    begin(session, client);
    expect_bad(prove(session, client), "it does not know the secret", FrameKind::wrong_proof);
  }
  {  // twice the same half, to try another server half
    StoreSession session(&key_);
    Handshake client(key_);
    begin(session, client);
    expect_bad(session.take(make_frame(FrameKind::join, {}, client.own_half())), unproven,
               FrameKind::secret_demanded);
  }
  {
    StoreSession session(&key_);
    expect_bad(session.take(make_frame(FrameKind::join, {}, std::string(32, '\0'))),
               "it began a handshake with an invalid key", std::nullopt);
  }
}

TEST_F(StoreSessionTest, SealedNonsenseEndsTheConnection) {
  const std::pair<std::string, const char*> cases[] = {
      {"no frame", "it does not speak this protocol (it sent \"no frame\")"},
      {make_frame(FrameKind::try_get, "key", {}).substr(0, 20), "it sealed bytes that are not a whole frame"},
      {make_frame(FrameKind::try_get, "key", {}) + "x", "it sealed bytes that are not a whole frame"},
      {make_frame(FrameKind::join, {}, std::string(32, 'x')), "it began a handshake again"},
      {make_frame(FrameKind::found, {}, {}), "it sent a request of unknown kind 64"},
  };
  for (const auto& [frame, why] : cases) {
    StoreSession session(&key_);
    Handshake client(key_);
    begin(session, client);
    ASSERT_EQ(prove(session, client).state, Said::reply);
    expect_bad(session.take(client.streams().to_server.seal(frame)), why, std::nullopt);
  }
}

TEST_F(StoreSessionTest, WhereNoSecretIsDemandedAHandshakeIsRefused) {
  StoreSession session(nullptr);
  expect_bad(session.take(make_frame(FrameKind::join, {}, Handshake(key_).own_half())),
             "it began a handshake, but no secret is required here", FrameKind::refused);
}

}  // namespace
}  // namespace weft::seal_test
