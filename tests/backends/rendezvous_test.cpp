// Membership::from_env under the variables of weft run and of torchrun, good and bad.
#include <gmock/gmock.h>
#include <gtest/gtest.h>

#include <cstdlib>
#include <map>
#include <string>
#include <thread>

#include "weft/backends/process_group.hpp"
#include "weft/backends/store_tcp.hpp"
#include "weft/base/context.hpp"
#include "weft/base/error.hpp"

namespace weft {
namespace {

using ::testing::HasSubstr;

constexpr const char* kNames[] = {"WEFT_RANK", "WEFT_WORLD_SIZE", "WEFT_STORE",  "WEFT_JOB",
                                  "RANK",      "WORLD_SIZE",      "MASTER_ADDR", "MASTER_PORT"};

class RendezvousTest : public ::testing::Test {
 protected:
  using Variables = std::map<std::string, std::string>;

  Membership from(const Variables& variables) {
    for (const char* name : kNames) ::unsetenv(name);
    for (const auto& [name, value] : variables) ::setenv(name.c_str(), value.c_str(), 1);
    return Membership::from_env(context_);
  }

  void expect_error(const Variables& variables, ErrorCode code, const std::string& text) {
    try {
      from(variables);
      ADD_FAILURE() << "no error; expected: " << text;
    } catch (const Error& e) {
      EXPECT_EQ(e.code(), code) << e.what();
      EXPECT_THAT(e.what(), HasSubstr(text));
    }
  }

  static Deadline soon() { return Deadline::after(std::chrono::seconds(10)); }

  /// A port that nobody listens on: a server had it and is gone.
  std::uint16_t free_port() { return TcpStoreServer(context_.log()).port(); }

  Context context_;
};

TEST_F(RendezvousTest, WithoutVariablesOneRankIsAlone) {
  const Membership m = from({});
  EXPECT_EQ(m.rank, 0);
  EXPECT_EQ(m.size, 1);
  EXPECT_EQ(m.identity, 0);
  EXPECT_EQ(m.store->add("n", 1), 1);
}

TEST_F(RendezvousTest, RanksOfWeftRunMeetAndJobsDoNot) {
  TcpStoreServer server(context_.log());
  const auto member = [&](const char* rank, const char* job) {
    return from(
        {{"WEFT_RANK", rank}, {"WEFT_WORLD_SIZE", "3"}, {"WEFT_STORE", server.address()}, {"WEFT_JOB", job}});
  };
  const Membership zero = member("0", "a");
  const Membership two = member("2", "a");
  const Membership stranger = member("1", "b");
  EXPECT_EQ(zero.rank, 0);
  EXPECT_EQ(two.rank, 2);
  EXPECT_EQ(two.size, 3);
  EXPECT_EQ(two.identity, 0);
  zero.store->set("key", "from zero");
  EXPECT_EQ(two.store->get("key", soon()), "from zero");
  EXPECT_FALSE(stranger.store->try_get("key").has_value());
  EXPECT_EQ(stranger.store->compare_set("key", "", "mine"), "mine");
  EXPECT_EQ(stranger.store->add("n", 3), 3);
  EXPECT_EQ(two.store->add("n", 1), 1);
  stranger.store->remove("key");
  EXPECT_EQ(two.store->try_get("key"), "from zero");
}

TEST_F(RendezvousTest, VariablesOfWeftRunComeBeforeThoseOfTorchrun) {
  TcpStoreServer server(context_.log());
  const Membership m = from({{"WEFT_RANK", "1"},
                             {"WEFT_WORLD_SIZE", "2"},
                             {"WEFT_STORE", server.address()},
                             {"RANK", "7"},
                             {"WORLD_SIZE", "9"}});
  EXPECT_EQ(m.rank, 1);
  EXPECT_EQ(m.size, 2);
}

// Rank 0 of torchrun's variables serves; when it is gone, so is the store.
TEST_F(RendezvousTest, UnderTorchrunRankZeroServes) {
  const std::string port = std::to_string(free_port());
  const auto member = [&](const char* rank) {
    return from({{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "localhost"}, {"MASTER_PORT", port}});
  };
  Membership zero = member("0");
  Membership one = member("1");
  EXPECT_EQ(zero.identity, 0);
  EXPECT_EQ(one.rank, 1);
  EXPECT_EQ(one.size, 2);
  zero.store->set("key", "value");
  EXPECT_EQ(one.store->get("key", soon()), "value");
  const auto leave = Clock::now();
  one.store.reset();
  zero.store.reset();
  EXPECT_LT(Clock::now() - leave, std::chrono::milliseconds(1500))
      << "the server waits only while clients are there";
}

TEST_F(RendezvousTest, TheServingRankWaitsForTheOthersGoodbye) {
  const std::string port = std::to_string(free_port());
  Membership zero = from({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}});
  Membership one = from({{"RANK", "1"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}});
  std::thread slow([store = std::move(one.store)]() mutable {
    std::this_thread::sleep_for(std::chrono::milliseconds(300));
    EXPECT_EQ(store->add("goodbye", 1), 1);
    store.reset();
  });
  zero.store.reset();
  slow.join();
}

TEST_F(RendezvousTest, OneRankUnderTorchrunNeedsNoPort) {
  const Membership m = from({{"RANK", "0"}, {"WORLD_SIZE", "1"}});
  EXPECT_EQ(m.size, 1);
  EXPECT_EQ(m.store->add("n", 1), 1);
}

TEST_F(RendezvousTest, BadValuesNameTheirVariable) {
  const auto bad = [&](const Variables& variables, const std::string& text) {
    expect_error(variables, ErrorCode::bad_argument, text);
  };
  bad({{"RANK", "7"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "1234"}},
      "RANK is \"7\"; expected 0 to 3 (WORLD_SIZE is 4)");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "abc"}},
      "MASTER_PORT is \"abc\"; expected an integer from 1 to 65535");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}, {"MASTER_PORT", "70000"}},
      "MASTER_PORT is \"70000\"; expected an integer from 1 to 65535");
  bad({{"RANK", "1"}, {"WORLD_SIZE", "4"}},
      "MASTER_PORT is not set, but WORLD_SIZE is; expected an integer from 1");
  bad({{"RANK", "1"}}, "WORLD_SIZE is not set, but RANK is; expected an integer from 1");
  bad({{"WORLD_SIZE", "2"}}, "RANK is not set, but WORLD_SIZE is; expected an integer from 0");
  bad({{"MASTER_PORT", "1234"}}, "WORLD_SIZE is not set, but MASTER_PORT is; expected an integer from 1");
  bad({{"MASTER_ADDR", "localhost"}},
      "WORLD_SIZE is not set, but MASTER_ADDR is; expected an integer from 1");
  bad({{"RANK", "-1"}, {"WORLD_SIZE", "2"}}, "RANK is \"-1\"; expected an integer from 0");
  bad({{"RANK", "0"}, {"WORLD_SIZE", "0"}}, "WORLD_SIZE is \"0\"; expected an integer from 1");
  bad({{"RANK", "one"}, {"WORLD_SIZE", "2"}}, "RANK is \"one\"; expected an integer from 0");

  bad({{"WEFT_RANK", "3"}, {"WEFT_WORLD_SIZE", "3"}, {"WEFT_STORE", "localhost:1"}},
      "WEFT_RANK is \"3\"; expected 0 to 2 (WEFT_WORLD_SIZE is 3)");
  bad({{"WEFT_RANK", "0"}}, "WEFT_WORLD_SIZE is not set, but WEFT_RANK is");
  bad({{"WEFT_STORE", "localhost:1"}}, "WEFT_WORLD_SIZE is not set, but WEFT_STORE is");
  bad({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}},
      "WEFT_STORE is not set, but WEFT_RANK is; expected host:port");
  for (const char* store :
       {"localhost", "localhost:", "localhost:0", "localhost:12x", "localhost:65536", ":x"}) {
    bad({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", store}},
        std::string("WEFT_STORE is \"") + store + "\"; expected host:port, the port from 1 to 65535");
  }
}

TEST_F(RendezvousTest, OtherHostsAreUnsupported) {
  for (const char* rank : {"0", "1"}) {
    expect_error(
        {{"RANK", rank}, {"WORLD_SIZE", "2"}, {"MASTER_ADDR", "192.0.2.7"}, {"MASTER_PORT", "1234"}},
        ErrorCode::unsupported,
        "MASTER_ADDR is \"192.0.2.7\", MASTER_PORT is \"1234\": store: 192.0.2.7:1234 is not on loopback");
  }
  expect_error({{"WEFT_RANK", "0"}, {"WEFT_WORLD_SIZE", "2"}, {"WEFT_STORE", "node7:99"}},
               ErrorCode::unsupported, "WEFT_STORE is \"node7:99\": store: node7:99 is not on loopback");
}

TEST_F(RendezvousTest, ATakenPortIsNamed) {
  TcpStoreServer other(context_.log());
  const std::string port = std::to_string(other.port());
  expect_error({{"RANK", "0"}, {"WORLD_SIZE", "2"}, {"MASTER_PORT", port}}, ErrorCode::system,
               "MASTER_PORT is \"" + port + "\": store server: cannot listen on 127.0.0.1:" + port +
                   ": Address already in use");
}

}  // namespace
}  // namespace weft
